"""The Spark session that everything runs in: the workspace's own on Databricks, else a local one with Delta."""

from __future__ import annotations

import getpass
import os
import shlex
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO, TYPE_CHECKING

from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from lookback.spark.jars import check_java, extra_jars, kafka_jars, local_files_jar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_LOG_CONFIG = Path(__file__).with_name("log4j2.properties")
_CHATTER = (
    b"WARNING: Using incubator modules",
    b"Starting Streaming TransformWithStateInPandas",
    b"Streaming TransformWithStateInPandas Python worker",
)
_CHECKPOINTS = "org.apache.spark.sql.execution.streaming"
# What the results depend on, or the speed of a running stream: set in any session, also one that others started.
_SESSION = {
    # Times are UTC, whatever the machine's zone.
    "spark.sql.session.timeZone": "UTC",
    # The meaning of expressions is that of ANSI mode: an overflow is an error and never a wrong number.
    "spark.sql.ansi.enabled": "true",
    # Rows to an Arrow batch: a few big ones cost less than many of the default 10,000.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "100000",
    # Window pages outgrow the JVM's heap.
    "spark.sql.streaming.stateStore.providerClass": f"{_CHECKPOINTS}.state.RocksDBStateStoreProvider",
    # A batch uploads what it changed, not whole state files.
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    # The count costs a read for every write; nothing here uses it.
    "spark.sql.streaming.stateStore.rocksdb.trackTotalNumberOfRows": "false",
    # Changelogs are short: fewer snapshots, the same recovery.
    "spark.sql.streaming.stateStore.minDeltasForSnapshot": "50",
}

_MEANING = ("spark.sql.session.timeZone", "spark.sql.ansi.enabled")


def get_spark(
    app_name: str = "lookback",
    *,
    cores: int | None = None,
    settings: Mapping[str, str] | None = None,
    kafka: bool = False,
) -> SparkSession:
    """The active session, the workspace's on Databricks, or a new local one with Delta.

    app_name: of a new session, as Spark's pages show it. cores: threads of a local session (at least 1; default: all of the machine's, at least 2) and its shuffle
    partitions, thus the shards of a new stream. settings: Spark settings that go before the defaults here; in a session
    that runs already only those that can be changed at run time are taken. kafka: a new local session can read Kafka from
    its start; one that runs already learns it when it first reads a topic.
    Raises SetupError where Java or the JARs are missing.
    """
    spark = SparkSession.getActiveSession()
    if spark is None and on_databricks():
        spark = SparkSession.builder.getOrCreate()
    if spark is not None:
        _apply(spark, {**_SESSION, **(settings or {})})
        return spark
    return _start(app_name, cores or max(2, os.cpu_count() or 2), settings or {}, kafka_jars() if kafka else [])


def on_databricks() -> bool:
    """Whether this process runs in a Databricks runtime, which has its own Spark, Kafka and Auto Loader."""
    return "DATABRICKS_RUNTIME_VERSION" in os.environ


def _apply(spark: SparkSession, settings: Mapping[str, str]) -> None:
    for key, value in settings.items():
        if spark.conf.isModifiable(key):
            _set(spark, key, value)


def _set(spark: SparkSession, key: str, value: str) -> None:
    try:
        spark.conf.set(key, value)
    except PySparkException:
        # Serverless compute lets few settings be changed. Without those of the meaning results would be others.
        if key in _MEANING:
            raise


def is_connect(spark: SparkSession) -> bool:
    """Whether a session is one of Spark Connect, as on serverless compute and in standard access mode."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


def _start(app_name: str, cores: int, settings: Mapping[str, str], more: Sequence[Path]) -> SparkSession:
    check_java()
    # Workers must be this interpreter, not the first `python3` on the PATH.
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    conf = SparkConf().setMaster(f"local[{cores}]").setAppName(app_name)
    conf.setAll(list({**_SESSION, **_local(cores, more), **settings}.items()))
    if getattr(SparkContext, "_gateway", None) is None:
        gateway = launch_gateway(conf, {"stderr": subprocess.PIPE})  # type: ignore[no-untyped-call]
        threading.Thread(target=_pass_on, args=(gateway.proc.stderr,), name="jvm-stderr", daemon=True).start()
        SparkContext(conf=conf, gateway=gateway)
    return SparkSession.builder.config(conf=conf).getOrCreate()


def _pass_on(lines: IO[bytes]) -> None:
    """Hands on what the JVM writes to its standard error, less what it says at every start of a query."""
    quiet = False
    for line in lines:
        # The chatter's paragraphs end in an empty line each.
        quiet = line.startswith(_CHATTER) or (quiet and not line.strip())
        if not quiet:
            sys.stderr.write(line.decode("utf-8", "replace"))
            sys.stderr.flush()


def _local(cores: int, more: Sequence[Path]) -> dict[str, str]:
    # Named by user, so that nothing is left in the working directory and users of one machine do not meet.
    scratch = Path(tempfile.gettempdir(), f"lookback-{getpass.getuser()}")
    jars = extra_jars()
    local = {
        "spark.jars": ",".join(str(jar) for jar in [*jars, *more]),
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        # No port is opened for a page that nobody looks at, and no progress bar is drawn into the output.
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        # One process on one machine: the loopback address works without a network and where the host has no name.
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "4g",
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={shlex.quote(_LOG_CONFIG.as_uri())}",
        # The catalog is in memory and Hive's is not used: tables are folders.
        "spark.sql.catalogImplementation": "in-memory",
        "spark.sql.warehouse.dir": str(scratch / "warehouse"),
        # Tasks of a shuffle and shards of a stream: one for each core.
        "spark.sql.shuffle.partitions": str(cores),
        # Delta's own view of its log, 50 tasks by default, is small here.
        "spark.databricks.delta.snapshotPartitions": "2",
        # VACUUM lists folders in as many tasks, 10,000 by default.
        "spark.sql.sources.parallelPartitionDiscovery.parallelism": str(cores),
        # Rows move between the JVM and Python faster than through TCP.
        "spark.python.unix.domain.socket.enabled": "true",
    }
    files = local_files_jar(jars)
    if files is not None:
        # Permissions are set without a process for each file: a fifth of what a small append takes.
        local["spark.hadoop.fs.file.impl"] = "com.globalmentor.apache.hadoop.fs.BareLocalFileSystem"
        # Also where the session reads its first file, before `spark.jars` are there.
        local["spark.driver.extraClassPath"] = str(files)
    if _is_local(os.environ.get("LOOKBACK_ROOT", "")):
        # Files are renamed without a shell command per file; right for local disks alone.
        local["spark.sql.streaming.checkpointFileManagerClass"] = (
            f"{_CHECKPOINTS}.checkpointing.FileSystemBasedCheckpointFileManager"
        )
    return local


def _is_local(root: str) -> bool:
    return "://" not in root or root.startswith("file://")
