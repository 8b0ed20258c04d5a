"""Opens the Spark session that everything runs in: the workspace's own on Databricks, else a local one with Delta."""

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
from lookback.places import Place
from lookback.spark.platform.jars import check_java, fetch_kafka_jars, fetch_session_jars, find_local_files_jar
from lookback.spark.platform.logstore import use_folder_logs
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
# Results depend on these settings: Lookback sets them wherever it reads or writes.
_RESULT_SETTINGS = {
    # Times are UTC, whatever the machine's zone.
    "spark.sql.session.timeZone": "UTC",
    # Expressions follow ANSI mode: an overflow is an error and never a wrong number.
    "spark.sql.ansi.enabled": "true",
    # Times in nanoseconds, as pandas writes them into Parquet, are numbers; else no column of such a file can be read.
    "spark.sql.legacy.parquet.nanosAsLong": "true",
}
# Python's stateful operator works with no other state store; window pages also outgrow the JVM's heap.
_STATE_STORE = {"spark.sql.streaming.stateStore.providerClass": f"{_CHECKPOINTS}.state.RocksDBStateStoreProvider"}
# The stateful query needs these settings.
_QUERY_SETTINGS = {
    **_RESULT_SETTINGS,
    **_STATE_STORE,
    # Every batch brings each shard its marks, so timers fire with the next one; a batch of its own would only delay it.
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    # The form of the offset log that Lookback reads and repairs; a later one names the sources.
    "spark.sql.streaming.offsetLog.formatVersion": "1",
}
# The speed of the stateful query depends on these settings; a user's own values are kept.
_QUERY_SPEED = {
    # An Arrow batch to Python is bounded by its 10,000 rows. With a bound in bytes, the default of Spark 4.2, its size is added up
    # for every row: a third of what handing a row over costs. 2 GiB - 1 is none.
    "spark.sql.execution.arrow.maxBytesPerBatch": "2147483647",
    # A batch uploads its changes, not whole state files.
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    # The count costs a read for every write; nothing here uses it.
    "spark.sql.streaming.stateStore.rocksdb.trackTotalNumberOfRows": "false",
    # Changelogs are short: fewer snapshots, the same recovery.
    "spark.sql.streaming.stateStore.minDeltasForSnapshot": "50",
}
# Numbers in the range by which the cores of Spark Connect are counted.
_MAX_CORES = 4_096
_PARTITIONS = "spark.sql.shuffle.partitions"
# More shards are never chosen here. Many counts of cores divide this number.
MAX_SHARDS = 48
# Two evaluations may start in one session at the same time.
_SETTINGS_LOCK = threading.RLock()
# Marks a session of Lookback's own, and sessions cloned from it.
_OWN_MARK = "spark.lookback.session"
# The settings that the JVM must know before it runs. The first file that it opens decides which file system opens all others.
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
# Delta refuses to read changes across a rename or drop of a column, whichever column it is. Only declared columns are read
# here, by name and as declared, and whether the table has them is checked at every start.
_READ_ON = {
    "spark.databricks.delta.streaming.unsafeReadOnIncompatibleColumnMappingSchemaChanges.enabled": "true",
    "spark.databricks.delta.changeDataFeed.unsafeBatchReadOnIncompatibleSchemaChanges.enabled": "true",
    "spark.databricks.delta.changeDataFeed.defaultSchemaModeForColumnMappingTable": "latest",
}
_DELTA_LOG_TASKS = "spark.databricks.delta.snapshotPartitions"


def get_spark(
    app_name: str = "lookback",
    *,
    cores: int | None = None,
    settings: Mapping[str, str] | None = None,
    kafka: bool = False,
) -> SparkSession:
    """Starts a local session with Delta; if a session runs already, as on Databricks, opens one of Lookback's own beside it.

    The session beside shares cluster, catalog and cache with the one that others started, and has a copy of its
    settings, so that theirs stay as they are. Spark Connect has no such session; there time zone and ANSI mode are set in
    the one that runs.
    app_name: the name of a new session in Spark's pages. cores: threads of a local session (at least 1; default: all of
    the machine's, at least 2). settings: Spark settings that override the defaults here; if a session runs already, only
    those that can be changed at run time are taken. kafka: a new local session can read Kafka from its start; a running
    one learns it when it first reads a topic.
    If databricks-connect is installed, the running session is that of its workspace.
    Raises SetupError if Java or the JARs are missing, and if databricks-connect finds no workspace.
    """
    spark = SparkSession.getActiveSession()
    if spark is None and on_databricks():
        spark = SparkSession.builder.getOrCreate()
    if spark is None and _has_databricks_connect():
        spark = _connect()
    if spark is not None:
        own = open_own_session(spark)
        _apply_settings(own, {**_RESULT_SETTINGS, **(settings or {})})
        return own
    return _start(app_name, cores or max(2, os.cpu_count() or 2), settings or {}, fetch_kafka_jars() if kafka else [])


def has_session() -> bool:
    """Returns whether a session runs already, or this is a Databricks runtime, so that none has to be started."""
    return on_databricks() or SparkSession.getActiveSession() is not None


def on_databricks() -> bool:
    """Returns whether this process runs in a Databricks runtime, which has its own Spark, Kafka and Auto Loader."""
    return "DATABRICKS_RUNTIME_VERSION" in os.environ


def open_own_session(spark: SparkSession) -> SparkSession:
    """Returns Lookback's own session beside `spark`, which others started; `spark` itself if it is Lookback's own.

    Over Spark Connect, which has no such session, returns `spark` too.
    """
    if is_connect(spark) or spark.conf.get(_OWN_MARK, None) is not None:
        return spark
    with _SETTINGS_LOCK:
        own, theirs = _OwnSession.session, dict(spark.conf.getAll)
        is_new = own is None or own.sparkContext is not spark.sparkContext
        if is_new or own is None:
            own = _OwnSession.session = spark.newSession()
            # A new session has the settings of the cluster.
            _OwnSession.copied = dict(own.conf.getAll)
        # Their settings may say how storage is reached, also those that they make later.
        changed = {key: value for key, value in theirs.items() if _OwnSession.copied.get(key) != value}
        _apply_settings(own, {key: value for key, value in changed.items() if key not in _RESULT_SETTINGS})
        _OwnSession.copied = theirs
        if is_new:
            # By default Delta reads its log in 50 tasks, which on few cores takes longer than the rest of a small batch.
            tasks = {} if _DELTA_LOG_TASKS in theirs else {_DELTA_LOG_TASKS: str(choose_default_shards(spark))}
            _apply_settings(own, {**_RESULT_SETTINGS, **_READ_ON, **tasks, _OWN_MARK: "true"})
        return own


class _OwnSession:
    """Holds Lookback's one session beside those that others started, and their settings when last copied."""

    session: SparkSession | None = None
    copied: ClassVar[dict[str, str]] = {}


def _has_databricks_connect() -> bool:
    """Returns whether databricks-connect is installed, in place of a Spark that could start here."""
    try:
        return importlib.util.find_spec("databricks.connect") is not None
    except ModuleNotFoundError:
        return False


def _connect() -> SparkSession:
    from databricks.connect import DatabricksSession  # noqa: PLC0415 - it looks for a workspace

    try:
        spark: SparkSession = DatabricksSession.builder.getOrCreate()
    except Exception as error:  # whatever the kind: it is about profile, address or compute
        raise SetupError(
            f"databricks-connect does not reach a workspace: {first_line(error):.300}. Name one by "
            "DATABRICKS_CONFIG_PROFILE, and its compute by DATABRICKS_CLUSTER_ID or DATABRICKS_SERVERLESS_COMPUTE_ID=auto"
        ) from error
    return spark


def _apply_settings(spark: SparkSession, settings: Mapping[str, str]) -> None:
    for key, value in settings.items():
        _set_or_skip(spark, key, value)


def _set_or_skip(spark: SparkSession, key: str, value: str) -> None:
    try:
        spark.conf.set(key, value)
    except (PySparkException, Py4JJavaError):
        # Some settings are fixed when Spark starts, and serverless compute lets few be changed. Only those on which
        # results depend must be set.
        if key in _RESULT_SETTINGS and spark.conf.get(key) != value:
            raise


@contextlib.contextmanager
def apply_query_settings(spark: SparkSession, partitions: int | None) -> Iterator[None]:
    """Gives the session the settings of a stateful query until the end of the block, in which the query is started.

    A query copies the session's settings when it starts. So this is enough, it works in every kind of session, and no
    other query is affected. partitions: those of the state, which a new checkpoint freezes; None: the checkpoint's.
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
    """Lets a query that starts in the block write its checkpoint as is right for the place where that is.

    A session here writes them in the way that is fast on a disk. In an object store it cannot replace a file.
    """
    with _SETTINGS_LOCK:
        manager = spark.conf.get(_FILE_MANAGER, None)
        if manager is None or isinstance(checkpoint, Path):
            yield
            return
        spark.conf.unset(_FILE_MANAGER)
        try:
            yield
        finally:
            spark.conf.set(_FILE_MANAGER, manager)


def choose_default_shards(spark: SparkSession) -> int:
    """Returns the number of shards of a new checkpoint if none is configured: the cores of the cluster, at most 48.

    The session's shuffle partitions do not count: Spark's default of 200 makes a batch of a few events last for minutes.
    """
    return min(count_cores(spark), MAX_SHARDS)


def count_cores(spark: SparkSession) -> int:
    """Counts the tasks that the cluster works on at a time, at least 1, as far as Spark knows its executors by now."""
    if not is_connect(spark):
        return max(1, spark.sparkContext.defaultParallelism)
    # A range has one partition for each core.
    partition = F.spark_partition_id().alias("partition")
    return max(1, spark.range(_MAX_CORES).select(partition).distinct().count())


def is_connect(spark: SparkSession) -> bool:
    """Returns whether a session is one of Spark Connect, as on serverless compute and in standard access mode."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


def _start(app_name: str, cores: int, settings: Mapping[str, str], more: Sequence[Path]) -> SparkSession:
    check_java()
    master = settings.get("spark.master", f"local[{cores}]")
    is_here = master.startswith("local")
    # Workers must be this interpreter, not the first `python3` on the PATH; other machines may have theirs elsewhere.
    if is_here or "PYSPARK_PYTHON" not in os.environ:
        os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    jars = fetch_session_jars()
    own = {
        **_RESULT_SETTINGS,
        **_READ_ON,
        **_STATE_STORE,
        **_QUERY_SPEED,
        **_make_start_settings(cores, [*jars, *more]),
        **(_make_local_settings(jars) if is_here else {}),
    }
    conf = SparkConf().setMaster(master).setAppName(app_name)
    conf.setAll(list({**own, **settings}.items()))
    if getattr(SparkContext, "_gateway", None) is None:
        gateway = launch_gateway(_select_at_launch(conf), {"stderr": subprocess.PIPE})  # type: ignore[no-untyped-call]
        threading.Thread(target=_forward_lines, args=(gateway.proc.stderr,), name="jvm-stderr", daemon=True).start()
        SparkContext(conf=conf, gateway=gateway)
    spark = SparkSession.builder.config(conf=conf).getOrCreate()
    if is_here:
        use_folder_logs(spark)
    return spark


def _select_at_launch(conf: SparkConf) -> SparkConf:
    """Selects what the JVM must know before it runs. Everybody on the machine sees that in the list of processes.

    The other settings, keys of storage among them, reach the JVM through the context.
    """
    chosen = SparkConf(loadDefaults=False)
    chosen.setAll([(key, value) for key, value in conf.getAll() if key.startswith(_AT_LAUNCH)])
    return chosen


def _forward_lines(lines: Iterable[bytes]) -> None:
    """Forwards the JVM's standard error, without what it writes at every start of a query and at the end of many tasks."""
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
            # The JVM has read what it needs, and a worker of Python learns it by this: no harm.
            trace = []
            continue
        yield from trace
        # Traces of several workers may be mixed.
        is_trace = line.startswith(b"Traceback (most recent call last)") or (b"  File" in line[:6] and _DAEMON in line)
        trace = [line] if is_trace else []
        # Each suppressed paragraph ends in an empty line.
        quiet = line.startswith(_SUPPRESSED_LINES) or (quiet and not line.strip())
        if not quiet and not trace:
            yield line
    yield from trace


def _make_start_settings(cores: int, jars: Sequence[Path]) -> dict[str, str]:
    """Returns the settings of a session that is started here, whether it works on this machine or on a cluster."""
    # Nothing is left in the working directory, and users of one machine do not meet.
    scratch = make_scratch()
    return {
        "spark.jars": ",".join(map(str, jars)),
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        # No port is opened for a page that nobody looks at, and no progress bar is drawn into the output.
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": "4g",
        # The threads of the JVM's default collector, G1, took 7 % of a backtest's processor time on two cores; with this one the
        # 99th percentile of the latency at 1,000 events/s fell from 660 to 465 ms. A setting of the same name replaces it.
        "spark.driver.defaultJavaOptions": "-XX:+UseParallelGC",
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={shlex.quote(_LOG_CONFIG.as_uri())}",
        # The catalog is in memory and Hive's is not used: tables are folders.
        "spark.sql.catalogImplementation": "in-memory",
        "spark.sql.warehouse.dir": str(scratch / "warehouse"),
        # Rows between the stages of a query, and the state that is being read.
        "spark.local.dir": str(scratch / "local"),
        # A history that is read beside the stream must not keep its batches waiting: jobs in different pools take turns.
        "spark.scheduler.mode": "FAIR",
        # Tasks of a shuffle: one for each core.
        "spark.sql.shuffle.partitions": str(cores),
        # VACUUM lists folders in as many tasks, 10,000 by default.
        "spark.sql.sources.parallelPartitionDiscovery.parallelism": str(cores),
        # Delta's own view of its log, 50 tasks by default, is small here.
        _DELTA_LOG_TASKS: "2",
        _OWN_MARK: "true",
        # Rows move between the JVM and Python faster than through TCP.
        "spark.python.unix.domain.socket.enabled": "true",
    }


def _make_local_settings(jars: Sequence[Path]) -> dict[str, str]:
    """Returns settings for one process that does all the work on this machine; they are wrong for executors elsewhere."""
    local = {
        # The loopback address works without a network and where the host has no name.
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
    }
    files = find_local_files_jar(jars)
    if files is not None:
        # Permissions are set without a process for each file, which saves a fifth of the time of a small append.
        local["spark.hadoop.fs.file.impl"] = "com.globalmentor.apache.hadoop.fs.BareLocalFileSystem"
        # Also where the session reads its first file, before `spark.jars` are there.
        local["spark.driver.extraClassPath"] = str(files)
    # Files are renamed without a shell command per file; see `use_files_of`.
    package = _CHECKPOINTS if __version__.startswith("4.0.") else f"{_CHECKPOINTS}.checkpointing"
    local[_FILE_MANAGER] = f"{package}.FileSystemBasedCheckpointFileManager"
    return local
