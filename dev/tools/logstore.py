"""Compiles the log store for S3 into its JAR, with the compiler that Spark brings: python dev/tools/logstore.py.

The JAR is in the repository, so that nobody needs a compiler. A test compiles it again and compares.
"""

from __future__ import annotations

import io
import os
import sys
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from py4j.protocol import Py4JJavaError
from pyspark import SparkConf
from pyspark.java_gateway import launch_gateway

from lookback.spark.platform.jars import fetch_session_jars
from lookback.spark.platform.logstores import LOG_STORE_JAR
from objectstore import S3

SOURCE = LOG_STORE_JAR.with_name("S3LogStore.java")
# The same source always makes the same JAR.
_DATE = (1980, 1, 1, 0, 0, 0)


def compile_log_store() -> bytes:
    """Returns the JAR of the compiled source."""
    jars = os.pathsep.join(map(str, [*fetch_session_jars(), *S3.fetch()]))
    gateway = launch_gateway(SparkConf(loadDefaults=False).set("spark.driver.extraClassPath", jars))
    try:
        jvm = gateway.jvm
        compiler = jvm.org.codehaus.janino.SimpleCompiler()
        compiler.setParentClassLoader(jvm.java.lang.Thread.currentThread().getContextClassLoader())
        compiler.cook(SOURCE.read_text(encoding="utf-8"))
        classes = {name: bytes(code) for name, code in compiler.getBytecodes().items()}
    except Py4JJavaError as error:
        # Its text is asked of the JVM, which ends here.
        sys.exit(str(error))
    finally:
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait()
    jar = io.BytesIO()
    with zipfile.ZipFile(jar, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, code in sorted(classes.items()):
            archive.writestr(zipfile.ZipInfo(f"{name.replace('.', '/')}.class", _DATE), code)
    return jar.getvalue()


if __name__ == "__main__":
    Path(sys.argv[1] if sys.argv[1:] else LOG_STORE_JAR).write_bytes(compile_log_store())
