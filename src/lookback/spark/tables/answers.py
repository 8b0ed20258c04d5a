"""Computes answers from tables at once where they are folders of this machine, and by Spark elsewhere."""

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
    """Computes an answer from tables, without Spark where they are in folders below `root` on this machine.

    compute: only reads, returns rows and not frames, and may run twice: what only Spark reads for sure, it reads once more from
    what `open_tables` returns. root: None for the tables of a catalog.
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
    """Returns whether the packages are installed that read tables without Spark."""
    return all(map(importlib.util.find_spec, _READER))
