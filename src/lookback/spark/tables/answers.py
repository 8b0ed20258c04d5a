"""Computes answers from tables without Spark if they are local folders, and with Spark otherwise."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from lookback.spark.tables.lakehouse import Tables

_Answer = TypeVar("_Answer")
# Packages that read Delta without Spark.
_READER = ("deltalake", "duckdb")


def compute_at_once(
    compute: Callable[[Tables], _Answer], root: str | None, open_tables: Callable[[], Tables]
) -> _Answer:
    """Computes an answer from tables, if possible without Spark.

    Args:
        compute: Reads tables and returns rows, not frames. It may run twice: if reading without Spark fails, it runs
            again with Spark.
        root: The root of local tables; None for those of a catalog.
        open_tables: Opens the tables with Spark.

    Returns:
        The result of `compute`.
    """
    if root is None or not has_reader():
        return compute(open_tables())
    from lookback.spark.tables.folders import READ_ERRORS, open_folders  # noqa: PLC0415 - its packages may be missing

    try:
        with open_folders(root) as tables:
            return compute(tables)
    except READ_ERRORS:
        return compute(open_tables())


def has_reader() -> bool:
    """Returns whether the packages for reading tables without Spark are installed."""
    return all(map(importlib.util.find_spec, _READER))
