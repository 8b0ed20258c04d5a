"""Lets Delta read and write the logs of tables in folders of this machine fast, by a class of Java beside this module.

Delta asks for "the commits from this one on" six times a batch. Its own classes answer by looking at every file of the log, 20 µs
each, so that a stream of two commits a second was a second slower after an hour; this one looks at those alone that were asked for.
And it makes a commit without starting a process of the system, by a hard link, which fails where another process was first.

Janino, which Spark brings for its own generated code, compiles the class when a session starts, so that nothing but source is
shipped. Where that fails, Delta's own class does the work.
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
# Which class Delta uses for logs in folders, and for logs wherever they are; not both may be set.
_SETTING, _SETTING_OF_ALL = "spark.delta.logStore.file.impl", "spark.delta.logStore.class"
_LOG = logging.getLogger("lookback")


def use_folder_logs(spark: SparkSession) -> None:
    """Gives all tables of a local session that Lookback has started this class, before any is read; a user's own stays."""
    jvm: Any = spark._jvm
    conf: Any = spark.sparkContext._jsc.sc().conf()
    if conf.contains(_SETTING) or conf.contains(_SETTING_OF_ALL):
        return
    try:
        loader = jvm.org.apache.spark.util.Utils.getContextOrSparkClassLoader()
        if not _is_loaded(loader):
            _compile(jvm, loader)
            loader.loadClass(_NAME)
    except (Py4JError, OSError, TypeError) as error:  # the last one is how py4j says that a class is not there
        _LOG.warning("Delta's own log store is used, which slows down as logs grow: %s", summarize_error(error))
        return
    conf.set(_SETTING, _NAME)


def _is_loaded(loader: Any) -> bool:
    """Returns whether an earlier session of this process has compiled the class."""
    try:
        loader.loadClass(_NAME)
    except Py4JError:
        return False
    return True


def _compile(jvm: Any, loader: Any) -> None:
    compiler = jvm.org.codehaus.janino.SimpleCompiler()
    compiler.setParentClassLoader(loader)
    compiler.cook(_SOURCE.read_text(encoding="utf-8"))
    # Spark removes this folder with the session.
    folder = Path(SparkFiles.getRootDirectory(), "lookback-classes")
    for name, code in dict(compiler.getBytecodes()).items():
        file = folder.joinpath(*name.split(".")).with_suffix(".class")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes(code))
    loader.addURL(jvm.java.io.File(str(folder)).toURI().toURL())
