"""Chooses the log store by which Delta commits to a bucket: of two commits of one version it must let one fail.

Lookback writes its tables from several processes. Delta's default for S3 keeps writers apart within one process only.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lookback.core.errors import SetupError
from lookback.places import ObjectPath, parse_place

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark import SparkConf
    from pyspark.sql import SparkSession

# Compiled from the Java files beside it by dev/tools/s3jar.py.
S3_JAR = Path(__file__).with_name("s3.jar")
_S3_LOG_STORE = "lookback.S3LogStore"
# Writes the files of a query's checkpoint on S3, for sessions with that log store.
S3_CHECKPOINT_FILES = "lookback.S3CheckpointFiles"
# An option of a stream, for the log store: Delta passes on what begins with `fs.`. Commits that are new to the stream
# are listed in any case. A batch takes two seconds where a request takes 30 ms.
_FOLLOWS = {"fs.lookback.max.list.age": "2s"}
# Sets one log store for all storages. Delta refuses it beside a setting for one of them.
_ANY_STORE = "spark.delta.logStore.class"
# The safe log stores of each storage, and Delta's default.
_SAFE = {
    "s3a": (_S3_LOG_STORE, "io.delta.storage.S3DynamoDBLogStore"),
    "abfss": ("io.delta.storage.AzureLogStore",),
    "wasb": ("io.delta.storage.AzureLogStore",),
    "wasbs": ("io.delta.storage.AzureLogStore",),
    "gs": ("io.delta.storage.GCSLogStore",),
    "hdfs": ("io.delta.storage.HDFSLogStore",),
}
_UNSAFE_DEFAULTS = {"s3a": "io.delta.storage.S3SingleDriverLogStore"}
# S3A does not look whether a new file is there: the names of data files are unique, and commits are conditional.
_UNIQUE_NAMES = ("spark.hadoop.fs.s3a.performance.flags", "create")
# What S3A must be able to do: create a file only if there is none, in one request.
_CAPABILITY, _SWITCH = "fs.option.create.conditional.overwrite", "fs.s3a.create.conditional.enabled"


def add_log_store(conf: SparkConf) -> None:
    """Gives a new session the log store for S3, unless its settings name another one, and files without needless looks."""
    conf.set("spark.jars", ",".join(filter(None, [conf.get("spark.jars", ""), str(S3_JAR)])))
    names = [_name_setting("s3a"), _ANY_STORE]
    if not any(conf.contains(each) for name in names for each in _spell(name)):
        conf.set(names[0], _S3_LOG_STORE)
    conf.setIfMissing(*_UNIQUE_NAMES)


def has_log_store(spark: SparkSession, place: ObjectPath) -> bool:
    """Returns whether a session has Lookback's log store, and so its JAR, for a place."""
    names = _spell(_name_setting("s3a"))
    return place.scheme == "s3a" and any(spark.conf.get(name, None) == _S3_LOG_STORE for name in names)


def begin_following(spark: SparkSession, folder: str) -> dict[str, str]:
    """Lets a new stream follow a table's log by the log store for S3. Returns the options for its Delta source."""
    place = parse_place(folder)
    if isinstance(place, Path) or not has_log_store(spark, place):
        return {}
    assert spark._jvm is not None
    spark._jvm.lookback.S3LogStore.forgetLists()
    return dict(_FOLLOWS)


def require_one_winner(spark: SparkSession, folder: str, settings: Mapping[str, str]) -> None:
    """Raises SetupError if two processes that commit to a table in a folder at the same moment could both succeed.

    Args:
        spark: The session; not one of Databricks, which has a commit service.
        folder: The folder or its URL.
        settings: The settings with which Spark started.
    """
    place = parse_place(folder)
    if isinstance(place, Path) or place.scheme not in _SAFE:
        return
    safe, name = _SAFE[place.scheme], _name_setting(place.scheme)
    found = next(
        ((each, settings[each]) for key in (_ANY_STORE, name) for each in _spell(key) if each in settings), None
    )
    default = _UNSAFE_DEFAULTS.get(place.scheme)
    if found is None and default is None:
        return
    setting, value = found or (name, default)
    if value not in safe:
        advice = f"set {name} to {' or '.join(safe)}" if default else f"remove the setting, for {safe[0]}"
        jar = f", and add {S3_JAR} to spark.jars" if default else ""
        raise SetupError(
            f"{setting} is {value}{'' if found else ' by default'}: if two processes commit to a table in {place} at the "
            f"same moment, both may succeed, and one commit is lost. Before Spark starts, {advice}{jar}"
        )
    if value == _S3_LOG_STORE:
        _require_conditional_writes(spark, folder)


def probe_one_winner(spark: SparkSession, folder: str, settings: Mapping[str, str]) -> None:
    """Raises SetupError if a store for S3 overwrites a file that must not exist. Writes a file to the folder to see it."""
    if settings.get(_name_setting("s3a")) != _S3_LOG_STORE or not str(parse_place(folder)).startswith("s3a://"):
        return
    jvm, conf = spark._jvm, spark._jsparkSession.sessionState().newHadoopConf()
    assert jvm is not None
    if not jvm.lookback.S3LogStore.letsOneWriterWin(folder, conf):
        raise SetupError(
            f"the store of {folder} ignores If-None-Match: if two processes commit to a table there at the same moment, "
            "both succeed, and one commit is lost. Use a store that knows conditional writes, as Amazon S3 does"
        )


def _require_conditional_writes(spark: SparkSession, folder: str) -> None:
    jvm, conf = spark._jvm, spark._jsparkSession.sessionState().newHadoopConf()
    assert jvm is not None
    path = jvm.org.apache.hadoop.fs.Path(folder)
    if path.getFileSystem(conf).hasPathCapability(path, _CAPABILITY):
        return
    bucket = _SWITCH.replace("fs.s3a.", f"fs.s3a.bucket.{path.toUri().getHost()}.")
    off = next((name for name in (bucket, _SWITCH) if (conf.get(name) or "").strip().lower() == "false"), None)
    if off is not None:
        raise SetupError(
            f"spark.hadoop.{off} is false: without conditional writes, if two processes commit to a table in {folder} at "
            "the same moment, both may succeed, and one commit is lost. Remove the setting"
        )
    version = jvm.org.apache.hadoop.util.VersionInfo.getVersion()
    raise SetupError(
        f"Hadoop {version} cannot write to {folder} on the condition that a file does not exist: if two processes commit "
        "at the same moment, both may succeed, and one commit is lost. Use Spark 4.1 or later, with Hadoop 3.4.2 or later"
    )


def _name_setting(scheme: str) -> str:
    return f"spark.delta.logStore.{scheme}.impl"


def _spell(setting: str) -> tuple[str, str]:
    """Returns both names of a setting of Delta: with `spark.` and without."""
    return setting, setting.removeprefix("spark.")
