"""Commits to one Delta log from a process of its own, as fast as it can.

Run as `python -m commits FOLDER NAME COUNT`, with the settings of Spark as JSON on its standard input. It prints
`ready`, waits for a line, commits COUNT times, and prints the versions.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark import SparkConf
from pyspark.java_gateway import launch_gateway

from lookback.spark.platform.logstores import S3_JAR


@contextmanager
def open_log_store(settings: dict[str, str]) -> Iterator[tuple[Any, Any, Any]]:
    """Starts a JVM without Spark for the block. Yields it, the log store for S3, and its settings."""
    jars = os.pathsep.join([*settings["spark.jars"].split(","), str(S3_JAR)])
    gateway = launch_gateway(SparkConf(loadDefaults=False).set("spark.driver.extraClassPath", jars))
    jvm = gateway.jvm
    conf = jvm.org.apache.hadoop.conf.Configuration()
    for name, value in settings.items():
        if name.startswith("spark.hadoop."):
            conf.set(name.removeprefix("spark.hadoop."), value)
    try:
        yield jvm, jvm.lookback.S3LogStore(conf), conf
    finally:
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait()


def write(jvm: Any, store: Any, conf: Any, path: str, line: str, *, overwrite: bool = False) -> bool:
    """Writes a file of one line. Returns False if there is one and it may not be replaced."""
    lines = jvm.java.util.ArrayList()
    lines.add(line)
    try:
        store.write(jvm.org.apache.hadoop.fs.Path(path), lines.iterator(), overwrite, conf)
    except Py4JJavaError as error:
        if error.java_exception.getClass().getName() != "java.nio.file.FileAlreadyExistsException":
            raise
        return False
    return True


def main() -> None:
    folder, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with open_log_store(json.loads(sys.stdin.readline())) as (jvm, store, conf):
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        sys.stdin.readline()
        version, made = 0, list[int]()
        for number in range(count):
            # What Delta does: the loser takes the next version.
            while not write(jvm, store, conf, f"{folder}/{version:020}.json", json.dumps([name, number])):
                version += 1
            made.append(version)
    sys.stdout.write(json.dumps(made) + "\n")


if __name__ == "__main__":
    main()
