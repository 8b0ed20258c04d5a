"""Opens the Spark session for all work: the workspace's on Databricks, or else a local one with Delta."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from py4j.protocol import Py4JJavaError
from pyspark import SparkConf, SparkContext, __version__
from pyspark.errors import PySparkException
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

from lookback.core.errors import SetupError
from lookback.core.values.texts import first_line
from lookback.places import ObjectPath, Place
from lookback.spark.platform.jars import check_java, fetch_kafka_jars, fetch_session_jars
from lookback.spark.platform.logstores import S3_CHECKPOINT_FILES, add_log_store, has_log_store
from lookback.spark.platform.scratch import make_scratch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_LOG_CONFIG = Path(__file__).with_name("log4j2.properties")
_SUPPRESSED_LINES = (
    b"WARNING: Using incubator modules",
    b"Starting Streaming TransformWithStateInPandas",
    b"Streaming TransformWithStateInPandas Python worker",
)
_DAEMON = b"pyspark/daemon.py"
_CHECKPOINTS = "org.apache.spark.sql.execution.streaming"
_FILE_MANAGER = "spark.sql.streaming.checkpointFileManagerClass"
_FILE_SUMS = "spark.sql.streaming.checkpoint.fileChecksum.enabled"
# Results depend on these settings, so Lookback sets them wherever it reads or writes.
_RESULT_SETTINGS = {
    # Times are UTC, whatever the machine's zone.
    "spark.sql.session.timeZone": "UTC",
    # Expressions follow ANSI mode: an overflow is an error and never a wrong number.
    "spark.sql.ansi.enabled": "true",
    # Reads nanosecond times, which pandas writes to Parquet, as numbers. Otherwise Spark could read no column of such a
    # file.
    "spark.sql.legacy.parquet.nanosAsLong": "true",
}
# Python's stateful operator requires this state store. Also, window pages would outgrow the JVM's heap.
_STATE_STORE = {"spark.sql.streaming.stateStore.providerClass": f"{_CHECKPOINTS}.state.RocksDBStateStoreProvider"}
# The stateful query needs these settings.
_QUERY_SETTINGS = {
    **_RESULT_SETTINGS,
    **_STATE_STORE,
    # The offset log version that Lookback reads and repairs; a later one names the sources.
    "spark.sql.streaming.offsetLog.formatVersion": "1",
}
# The speed of the stateful query depends on these settings. Values set by the user are kept.
_QUERY_SPEED = {
    # Arrow batches to Python are limited to 10,000 rows. With a limit in bytes, the default in Spark 4.2, Spark adds up
    # the size of every row, a third of the cost of passing it. 2 GiB - 1 means no limit.
    "spark.sql.execution.arrow.maxBytesPerBatch": "2147483647",
    # A batch uploads only its changes instead of whole state files.
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    # The count costs a read per write, and nothing uses it.
    "spark.sql.streaming.stateStore.rocksdb.trackTotalNumberOfRows": "false",
    # Changelogs are short, so fewer snapshots suffice for the same recovery.
    "spark.sql.streaming.stateStore.minDeltasForSnapshot": "50",
}
# The size of the range used to count the cores of Spark Connect.
_MAX_CORES = 4_096
_PARTITIONS = "spark.sql.shuffle.partitions"
# The maximum default number of shards. It is divisible by many numbers of cores.
MAX_SHARDS = 48
# Two evaluations may start in the same session at the same time.
_SETTINGS_LOCK = threading.RLock()
# Marks Lookback's own session, and sessions cloned from it.
_OWN_MARK = "spark.lookback.session"
# The settings that the JVM needs at launch. The first file it opens determines the file system class for all files.
_AT_LAUNCH = (
    "spark.hadoop.fs.file.impl",
    "spark.master",
    "spark.app.name",
    "spark.driver.",
    "spark.jars",
    "spark.files",
    "spark.archives",
    "spark.submit.",
)
# Delta refuses to read changes across a rename or drop of any column. Lookback reads only the declared columns, by
# name, and checks at every start that the table has them.
_READ_ON = {
    "spark.databricks.delta.streaming.unsafeReadOnIncompatibleColumnMappingSchemaChanges.enabled": "true",
    "spark.databricks.delta.changeDataFeed.unsafeBatchReadOnIncompatibleSchemaChanges.enabled": "true",
    "spark.databricks.delta.changeDataFeed.defaultSchemaModeForColumnMappingTable": "latest",
}
# By default Delta keeps no record of VACUUM on S3, so `maintain` could not say what it deleted.
_RECORD_VACUUM = {"spark.databricks.delta.vacuum.logging.enabled": "true"}
_DELTA_LOG_TASKS = "spark.databricks.delta.snapshotPartitions"


def get_spark(
    app_name: str = "lookback",
    *,
    cores: int | None = None,
    settings: Mapping[str, str] | None = None,
    kafka: bool = False,
) -> SparkSession:
    """Starts a local session with Delta, or opens Lookback's own session beside a running one, as on Databricks.

    Lookback's own session shares cluster, catalog and cache with the running session and has a copy of its settings, so
    that the original settings stay unchanged. Spark Connect has no such sessions; there the time zone and ANSI mode are
    set in the running session. If databricks-connect is installed, the running session is that of its workspace.

    Args:
        app_name: The name of a new session in Spark's UI.
        cores: The threads of a local session, at least 1; by default all cores of the machine, at least 2.
        settings: Spark settings that override the defaults. In a running session only those that can change at run time
            apply.
        kafka: Whether a new local session can read Kafka from the start. A running session loads it with its first
            topic.

    Returns:
        The session.

    Raises:
        SetupError: If Java or the JARs are missing, or databricks-connect finds no workspace.
    """
    spark = SparkSession.getActiveSession()
    if spark is None and on_databricks():
        spark = SparkSession.builder.getOrCreate()
    if spark is None and has_databricks_connect():
        spark = _connect()
    if spark is not None:
        own = open_own_session(spark)
        _apply_settings(own, {**_RESULT_SETTINGS, **(settings or {})})
        return own
    return _start(app_name, cores or max(2, os.cpu_count() or 2), settings or {}, fetch_kafka_jars() if kafka else [])


def has_session() -> bool:
    """Returns whether no session needs to be started: one is running, or this is a Databricks runtime."""
    return on_databricks() or SparkSession.getActiveSession() is not None


def on_databricks() -> bool:
    """Returns whether this process runs in a Databricks runtime, which has its own Spark, Kafka and Auto Loader."""
    return "DATABRICKS_RUNTIME_VERSION" in os.environ


def open_own_session(spark: SparkSession) -> SparkSession:
    """Returns Lookback's own session beside the caller's session `spark`.

    Returns `spark` itself if it already is Lookback's own, or for Spark Connect, which has no such sessions.
    """
    if is_connect(spark) or spark.conf.get(_OWN_MARK, None) is not None:
        return spark
    with _SETTINGS_LOCK:
        own, original = _OwnSession.session, dict(spark.conf.getAll)
        is_new = own is None or own.sparkContext is not spark.sparkContext
        if is_new or own is None:
            own = _OwnSession.session = spark.newSession()
            # A new session starts with the settings of the cluster.
            _OwnSession.copied = dict(own.conf.getAll)
        # The caller's settings, including later changes, may be needed to access storage.
        changed = {key: value for key, value in original.items() if _OwnSession.copied.get(key) != value}
        _apply_settings(own, {key: value for key, value in changed.items() if key not in _RESULT_SETTINGS})
        _OwnSession.copied = original
        if is_new:
            # By default Delta reads its log in 50 tasks, which on a few cores takes longer than the rest of a small
            # batch.
            tasks = {} if _DELTA_LOG_TASKS in original else {_DELTA_LOG_TASKS: str(choose_default_shards(spark))}
            _apply_settings(own, {**_RESULT_SETTINGS, **_READ_ON, **tasks, _OWN_MARK: "true"})
        return own


class _OwnSession:
    """Lookback's only session beside the caller's, and the caller's settings when last copied."""

    session: SparkSession | None = None
    copied: ClassVar[dict[str, str]] = {}


def has_databricks_connect() -> bool:
    """Returns whether databricks-connect is installed, which replaces a local Spark."""
    try:
        return importlib.util.find_spec("databricks.connect") is not None
    except ModuleNotFoundError:
        return False


def _connect() -> SparkSession:
    from databricks.connect import DatabricksSession  # noqa: PLC0415 - it looks for a workspace

    try:
        spark: SparkSession = DatabricksSession.builder.getOrCreate()
    except Exception as error:  # of any type, about the profile, address or compute
        raise SetupError(
            f"databricks-connect does not reach a workspace: {first_line(error):.300}. Set DATABRICKS_CONFIG_PROFILE, "
            "and for its compute DATABRICKS_CLUSTER_ID or DATABRICKS_SERVERLESS_COMPUTE_ID=auto"
        ) from error
    return spark


def _apply_settings(spark: SparkSession, settings: Mapping[str, str]) -> None:
    for key, value in settings.items():
        _set_or_skip(spark, key, value)


def _set_or_skip(spark: SparkSession, key: str, value: str) -> None:
    try:
        spark.conf.set(key, value)
    except (PySparkException, Py4JJavaError):
        # Some settings are fixed when Spark starts, and serverless compute allows few changes. Only settings that
        # affect results are required.
        if key in _RESULT_SETTINGS and spark.conf.get(key) != value:
            raise


@contextlib.contextmanager
def apply_query_settings(spark: SparkSession, partitions: int | None) -> Iterator[None]:
    """Applies the settings of a stateful query to the session during the block that starts the query.

    A query copies the session's settings when it starts, so other queries are not affected. This works in every kind of
    session. `partitions` is the number of state partitions, which a new checkpoint fixes; None keeps the checkpoint's.
    """
    with _SETTINGS_LOCK:
        before = dict(spark.conf.getAll)
        speed = {key: value for key, value in _QUERY_SPEED.items() if key not in before}
        frozen = {} if partitions is None else {_PARTITIONS: str(partitions)}
        wanted = {
            key: value for key, value in {**_QUERY_SETTINGS, **speed, **frozen}.items() if before.get(key) != value
        }
        try:
            _apply_settings(spark, wanted)
            yield
        finally:
            for key in wanted:
                with contextlib.suppress(PySparkException):
                    spark.conf.set(key, before[key]) if key in before else spark.conf.unset(key)


@contextlib.contextmanager
def use_files_of(spark: SparkSession, checkpoint: Place) -> Iterator[None]:
    """Lets a query started in the block write its checkpoint in the way that suits its storage.

    Local sessions use a way that is fast on disk but cannot replace files in an object store.
    """
    with _SETTINGS_LOCK:
        wanted = {} if isinstance(checkpoint, Path) else _choose_store_settings(spark, checkpoint)
        before = {key: spark.conf.get(key, None) for key in wanted}
        try:
            _change_settings(spark, wanted)
            yield
        finally:
            _change_settings(spark, before)


def _choose_store_settings(spark: SparkSession, checkpoint: ObjectPath) -> dict[str, str | None]:
    """Returns the settings for a checkpoint in an object store; None for a setting to remove."""
    if has_log_store(spark, checkpoint):
        # An object store compares what it got with a sum of its own. Spark's sums are as many files again.
        return {_FILE_MANAGER: S3_CHECKPOINT_FILES, _FILE_SUMS: "false"}
    return {_FILE_MANAGER: None} if spark.conf.get(_FILE_MANAGER, None) is not None else {}


def _change_settings(spark: SparkSession, settings: Mapping[str, str | None]) -> None:
    for key, value in settings.items():
        spark.conf.unset(key) if value is None else spark.conf.set(key, value)


def choose_default_shards(spark: SparkSession) -> int:
    """Returns the default number of shards for a new checkpoint: the cores of the cluster, at most 48.

    It ignores the session's shuffle partitions: with Spark's default of 200, a batch of a few events takes minutes.
    """
    return min(count_cores(spark), MAX_SHARDS)


def count_cores(spark: SparkSession) -> int:
    """Returns how many tasks the cluster runs in parallel, at least 1, on the executors that Spark knows so far."""
    if not is_connect(spark):
        return max(1, spark.sparkContext.defaultParallelism)
    # A range has one partition for each core.
    partition = F.spark_partition_id().alias("partition")
    return max(1, spark.range(_MAX_CORES).select(partition).distinct().count())


def is_connect(spark: SparkSession) -> bool:
    """Returns whether a session uses Spark Connect, as on serverless compute and in standard access mode."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


def _start(app_name: str, cores: int, settings: Mapping[str, str], more: Sequence[Path]) -> SparkSession:
    check_java()
    master = settings.get("spark.master", f"local[{cores}]")
    is_here = master.startswith("local")
    # Workers must use this interpreter, not the first `python3` on the PATH. On other machines its path may differ.
    if is_here or "PYSPARK_PYTHON" not in os.environ:
        os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    jars = fetch_session_jars()
    own = {
        **_RESULT_SETTINGS,
        **_READ_ON,
        **_RECORD_VACUUM,
        **_STATE_STORE,
        **_QUERY_SPEED,
        **_make_start_settings(cores, [*jars, *more]),
        **(_make_local_settings() if is_here else {}),
    }
    conf = SparkConf().setMaster(master).setAppName(app_name)
    conf.setAll(list({**own, **settings}.items()))
    add_log_store(conf)
    if getattr(SparkContext, "_gateway", None) is None:
        gateway = launch_gateway(_select_at_launch(conf), {"stderr": subprocess.PIPE})  # type: ignore[no-untyped-call]
        threading.Thread(target=_forward_lines, args=(gateway.proc.stderr,), name="jvm-stderr", daemon=True).start()
        SparkContext(conf=conf, gateway=gateway)
    return SparkSession.builder.config(conf=conf).getOrCreate()


def _select_at_launch(conf: SparkConf) -> SparkConf:
    """Selects the settings that the JVM needs at launch. They are visible to all users in the list of processes.

    The other settings, which include storage keys, reach the JVM through the context.
    """
    chosen = SparkConf(loadDefaults=False)
    chosen.setAll([(key, value) for key, value in conf.getAll() if key.startswith(_AT_LAUNCH)])
    return chosen


def _forward_lines(lines: Iterable[bytes]) -> None:
    """Forwards the JVM's standard error, except for noise at the start of each query and the end of many tasks."""
    for line in _select_lines(lines):
        sys.stderr.write(line.decode("utf-8", "replace"))
        sys.stderr.flush()


def _select_lines(lines: Iterable[bytes]) -> Iterator[bytes]:
    quiet, trace = False, list[bytes]()
    for line in lines:
        if trace and line.startswith((b"  ", b"Traceback")):
            trace.append(line)
            continue
        if trace and line.startswith(b"BrokenPipeError") and all(_DAEMON in each for each in trace if b"File" in each):
            # Harmless: the JVM has read what it needs and closed the pipe to a Python worker.
            trace = []
            continue
        yield from trace
        # Tracebacks of several workers may be interleaved.
        is_trace = line.startswith(b"Traceback (most recent call last)") or (b"  File" in line[:6] and _DAEMON in line)
        trace = [line] if is_trace else []
        # Each suppressed paragraph ends with an empty line.
        quiet = line.startswith(_SUPPRESSED_LINES) or (quiet and not line.strip())
        if not quiet and not trace:
            yield line
    yield from trace


def _make_start_settings(cores: int, jars: Sequence[Path]) -> dict[str, str]:
    """Returns the settings of a new session, whether it runs on this machine or a cluster."""
    # Leaves nothing in the working directory, and separates the users of a machine.
    scratch = make_scratch()
    return {
        "spark.jars": ",".join(map(str, jars)),
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        # Open no port for a UI that nobody uses, and print no progress bar.
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": "4g",
        # The threads of G1, the JVM's default collector, took 7 % of a backtest's CPU time on two cores. With this one
        # the 99th percentile of the latency at 1,000 events/s fell from 660 to 465 ms. The user can override this
        # setting.
        "spark.driver.defaultJavaOptions": "-XX:+UseParallelGC",
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={shlex.quote(_LOG_CONFIG.as_uri())}",
        # Tables are folders, so an in-memory catalog replaces Hive's.
        "spark.sql.catalogImplementation": "in-memory",
        "spark.sql.warehouse.dir": str(scratch / "warehouse"),
        # Shuffled rows, and state that is being read.
        "spark.local.dir": str(scratch / "local"),
        # Jobs in different pools take turns, so that reading a history does not block the stream's batches.
        "spark.scheduler.mode": "FAIR",
        # One shuffle task per core.
        "spark.sql.shuffle.partitions": str(cores),
        # The number of tasks in which VACUUM lists folders, 10,000 by default.
        "spark.sql.sources.parallelPartitionDiscovery.parallelism": str(cores),
        # Delta reads its log in 50 tasks by default, but here it is small.
        _DELTA_LOG_TASKS: "2",
        _OWN_MARK: "true",
        # Moves rows between the JVM and Python faster than TCP.
        "spark.python.unix.domain.socket.enabled": "true",
    }


def _make_local_settings() -> dict[str, str]:
    """Returns settings for a single process that does all the work. They do not suit executors on other machines."""
    is_old = __version__.startswith("4.0.")
    return {
        # The loopback address works without a network or a host name.
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        # Hive registers a class of its own for local files, which does not list names that are not UTF-8.
        "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.LocalFileSystem",
        # Both rename files without a shell command per file; see `use_files_of`. The second one knows S3, too.
        _FILE_MANAGER: f"{_CHECKPOINTS}.FileSystemBasedCheckpointFileManager" if is_old else S3_CHECKPOINT_FILES,
    }
