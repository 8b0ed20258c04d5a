"""Repeats changes of a table that other writers conflict with."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from lookback.core.errors import RemoteError, SetupError

if TYPE_CHECKING:
    from collections.abc import Callable

    from lookback.spark.tables.reading import ReadableTables

# The errors of a failed read or write: Spark's own, or Java's if Spark has no class for it.
SPARK_ERRORS = (PySparkException, Py4JJavaError)
# A write that conflicts with another one can be retried. The Python class of the error depends on the version of Delta
# and on Spark Connect; its name does not.
_CONFLICT = re.compile(
    r"DELTA_(CONCURRENT_\w+|METADATA_CHANGED|PROTOCOL_CHANGED)"
    r"|\b(Concurrent(Append|DeleteDelete|DeleteRead|Transaction|Write)|MetadataChanged|ProtocolChanged)Exception"
)
# How long a change is retried while other writers keep committing to the same table.
_RETRY_SECONDS = 300.0


def is_conflict(error: Exception) -> bool:
    """Returns whether a write failed because of a conflicting write and can be retried."""
    return _CONFLICT.search(f"{type(error).__name__}: {error}") is not None


def retry_on_conflict(tables: ReadableTables, name: str, act: Callable[[], object], patience: float) -> bool:
    """Changes a table, with retries while other writers conflict with the change.

    Open-source Delta lets only one of two concurrent writers succeed. Databricks does so too if both remove rows.

    Args:
        tables: The tables.
        name: The table to change.
        act: Makes the change, or raises a conflict; see `is_conflict`.
        patience: The seconds after which to stop retrying.

    Returns:
        Whether the change was made.
    """
    deadline = time.monotonic() + patience
    while not _succeeds(act):
        if time.monotonic() > deadline:
            return False
        _await_commit(tables, name)
    return True


def change_table(tables: ReadableTables, name: str, act: Callable[[], object]) -> None:
    """Changes a table with `act` like `retry_on_conflict`, for up to five minutes. Raises SetupError if that fails."""
    if not retry_on_conflict(tables, name, act, _RETRY_SECONDS):
        raise SetupError(
            f"other writers keep changing {tables.identifier(name)}; pause the ingest or the evaluation for a minute, "
            "then try again"
        )


def _succeeds(act: Callable[[], object]) -> bool:
    """Makes a change. Returns False if another write conflicted with it."""
    try:
        act()
    except (*SPARK_ERRORS, RemoteError) as error:
        if not is_conflict(error):
            raise
        return False
    return True


def _await_commit(tables: ReadableTables, name: str) -> None:
    """Waits up to two seconds for another writer's next commit: right after it there is the most time for one's own."""
    until, version = time.monotonic() + 2, tables.version(name)
    while time.monotonic() < until and tables.version(name) == version:
        time.sleep(0.05)
