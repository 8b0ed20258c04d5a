"""Speeds up Delta's reads and writes of local table logs with a Java class beside this module.

Delta lists the commits from a given one on six times per batch. Its own classes stat every file of the log, at 20 µs
each, so that a stream with two commits per second lost a second per batch after an hour. This class stats only the
listed files. It also commits with a hard link, without starting a system process; the link fails if another process
commits first.

Janino, which Spark includes for its generated code, compiles the class when a session starts, so that only source is
shipped. If that fails, Delta's own class is used.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JError
from pyspark import SparkFiles

from lookback.core.values.texts import summarize_error

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SOURCE = Path(__file__).with_name("FolderLogStore.java")
_NAME = "lookback.FolderLogStore"
# Delta's settings for the log class of local folders, and for that of all places. Only one may be set.
_SETTING, _SETTING_OF_ALL = "spark.delta.logStore.file.impl", "spark.delta.logStore.class"
_LOG = logging.getLogger("lookback")


def use_folder_logs(spark: SparkSession) -> None:
    """Uses this class in a local session, unless the user has set one. Call it before any table is read."""
    jvm: Any = spark._jvm
    conf: Any = spark.sparkContext._jsc.sc().conf()
    if conf.contains(_SETTING) or conf.contains(_SETTING_OF_ALL):
        return
    try:
        loader = jvm.org.apache.spark.util.Utils.getContextOrSparkClassLoader()
        if not _is_loaded(loader):
            _compile(jvm, loader)
            loader.loadClass(_NAME)
    except (Py4JError, OSError, TypeError) as error:  # py4j raises TypeError if a class is missing
        _LOG.warning("using Delta's own log store, which slows down as logs grow: %s", summarize_error(error))
        return
    conf.set(_SETTING, _NAME)


def _is_loaded(loader: Any) -> bool:
    """Returns whether an earlier session in this process has compiled the class."""
    try:
        loader.loadClass(_NAME)
    except Py4JError:
        return False
    return True


def _compile(jvm: Any, loader: Any) -> None:
    compiler = jvm.org.codehaus.janino.SimpleCompiler()
    compiler.setParentClassLoader(loader)
    compiler.cook(_SOURCE.read_text(encoding="utf-8"))
    # Spark removes this folder at the end of the session.
    folder = Path(SparkFiles.getRootDirectory(), "lookback-classes")
    for name, code in dict(compiler.getBytecodes()).items():
        file = folder.joinpath(*name.split(".")).with_suffix(".class")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes(code))
    loader.addURL(jvm.java.io.File(str(folder)).toURI().toURL())
