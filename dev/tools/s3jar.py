"""Compiles the classes for S3 into their JAR, with the compiler that Spark brings: python dev/tools/s3jar.py.

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
from lookback.spark.platform.logstores import S3_JAR
from objectstore import S3

# The same sources always make the same JAR.
_DATE = (1980, 1, 1, 0, 0, 0)


def compile_classes() -> bytes:
    """Returns the JAR of the compiled sources."""
    jars = os.pathsep.join(map(str, [*fetch_session_jars(), *S3.fetch()]))
    gateway = launch_gateway(SparkConf(loadDefaults=False).set("spark.driver.extraClassPath", jars))
    try:
        jvm = gateway.jvm
        resource = jvm.org.codehaus.commons.compiler.util.resource
        sources = [
            resource.StringResource(file.name, file.read_text(encoding="utf-8"))
            for file in sorted(S3_JAR.parent.glob("*.java"))
        ]
        made = jvm.java.util.HashMap()
        known = jvm.org.codehaus.janino.ClassLoaderIClassLoader(
            jvm.java.lang.Thread.currentThread().getContextClassLoader()
        )
        compiler = jvm.org.codehaus.janino.Compiler(None, known)
        compiler.setSourceFinder(resource.ResourceFinder.EMPTY_RESOURCE_FINDER)
        compiler.setClassFileCreator(resource.MapResourceCreator(made))
        together = gateway.new_array(resource.Resource, len(sources))
        for at, source in enumerate(sources):
            together[at] = source
        compiler.compile(together)
        classes = {name: bytes(code) for name, code in made.items()}
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
            archive.writestr(zipfile.ZipInfo(name, _DATE), code)
    return jar.getvalue()


if __name__ == "__main__":
    Path(sys.argv[1] if sys.argv[1:] else S3_JAR).write_bytes(compile_classes())
