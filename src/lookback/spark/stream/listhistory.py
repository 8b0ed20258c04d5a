"""Reads which values the lists had after each commit of the table `lists`, as far as its change feed reaches."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as F  # noqa: N812

from lookback.core.values.lists import Lists
from lookback.spark.lists import TABLE, read_list_changes, select_list_changes
from lookback.spark.stream.listfiles import ListFiles, NetChange, list_changes
from lookback.spark.tables.history import find_first_readable
from lookback.spark.tables.lakehouse import SPARK_ERRORS

if TYPE_CHECKING:
    from lookback.spark.tables.lakehouse import Tables

_ROW = ["list", "value", "expires_at", "kind"]
# In a sentence about a commit stand at most so many lists.
_MOST_NAMED = 10


@dataclass(frozen=True)
class ListHistory:
    """The changes of lists by commit, ascending; a commit that changed rows is there even if they are as before, net.

    begins: the first commit that can be read, or the one that was asked for. before: the rows that the table had before it, if
    not all earlier commits were read. last: the last commit of the table.
    """

    begins: int
    last: int
    changes: Mapping[int, Sequence[NetChange]]
    before: Sequence[NetChange] = field(default=())

    @classmethod
    def read(cls, tables: Tables, first: int = 0, names: Collection[str] | None = None) -> ListHistory:
        """Reads the commits from `first` on. names: of the lists that are wanted; None: all.

        Where the change feed begins later, `begins` is greater than `first`, and `before` has the rows until then.
        """
        last = tables.version(TABLE)
        try:
            return cls(first, last, _read_changes(tables, first, last, names))
        except SPARK_ERRORS:
            begins = find_first_readable(tables, TABLE)
            if begins <= first:
                raise
        changes = _read_changes(tables, begins, last, names)
        return cls(begins, last, changes, _read_before(tables, last, changes, names))

    def write(self, files: ListFiles, asked: Iterable[int] = ()) -> None:
        """Writes the lists after each commit. asked: commits that must be there too, with the lists as they were then.

        Before the first commit that can be read, that is with the lists as they were right before it.
        """
        asked, known = sorted(asked), list(self.changes)
        early = [commit for commit in asked if commit < self.begins]
        before: int | None = None
        if early or self.before:
            before = self.begins - 1
            files.begin({*early, before}, Lists.empty().apply(list_changes(self.before, before)))
        for commit in sorted({*known, *(each for each in asked if each >= self.begins)}):
            files.add(before, commit, self.changes.get(commit, ()))
            before = commit


def describe_changes(changes: Sequence[NetChange]) -> str:
    """Says in a few words what a commit did to which list, such as `vips: 2 added, 1 removed`."""
    added: dict[str, set[str]] = {}
    removed: dict[str, set[str]] = {}
    for change in changes:
        (added if change.rows > 0 else removed).setdefault(change.list, set()).add(change.value)
    parts = []
    for name in sorted({*added, *removed}):
        new, old = added.get(name, set()), removed.get(name, set())
        counts = {"added": len(new - old), "changed": len(new & old), "removed": len(old - new)}
        parts.append(f"{name}: {', '.join(f'{count:,} {verb}' for verb, count in counts.items() if count)}")
    more = f"; and {len(parts) - _MOST_NAMED:,} other lists" if len(parts) > _MOST_NAMED else ""
    return "; ".join(parts[:_MOST_NAMED]) + more if parts else "no value changed"


def _read_changes(
    tables: Tables, first: int, last: int, names: Collection[str] | None
) -> dict[int, Sequence[NetChange]]:
    if first > last:
        return {}
    rows = read_list_changes(tables, first, last)
    commits = [row["commit"] for row in rows.select("commit").distinct().collect()] if names is not None else None
    table = (rows if names is None else rows.where(F.col("list").isin(*names))).toArrow()
    commits = table["commit"].unique().to_pylist() if commits is None else commits
    by_commit: dict[int, list[NetChange]] = {commit: [] for commit in sorted(commits)}
    for commit, *row in _sum_rows(table):
        by_commit[commit].append(NetChange(*row))
    return dict(by_commit)


def _read_before(
    tables: Tables, last: int, changes: Mapping[int, Sequence[NetChange]], names: Collection[str] | None
) -> list[NetChange]:
    """Reads the rows that the table had before these changes: those of now without what was changed since."""
    columns = {"_change_type": F.lit("insert"), "_commit_version": F.lit(0).cast("bigint")}
    now = select_list_changes(tables.read(TABLE, version=last).withColumns(columns))
    table = (now if names is None else now.where(F.col("list").isin(*names))).toArrow()
    rows = {each[:4]: each.rows for each in (NetChange(*row) for _, *row in _sum_rows(table))}
    for change in (change for listed in changes.values() for change in listed):
        rows[change[:4]] = rows.get(change[:4], 0) - change.rows
    return [NetChange(*row, number) for row, number in rows.items() if number > 0]


def _sum_rows(table: pa.Table) -> Iterable[tuple[int, str, str, int | None, str | None, int]]:
    """Yields commit, list, value, expires_at and kind of the rows that were added or removed, net, and how many."""
    signs = pc.if_else(pc.equal(table["change"], "insert"), 1, -1)
    summed = table.append_column("rows", signs).group_by(["commit", *_ROW]).aggregate([("rows", "sum")])
    summed = summed.filter(pc.not_equal(summed["rows_sum"], 0))
    # In one order, so that a repeated attempt writes what the first one wrote.
    summed = summed.sort_by([("commit", "ascending"), *((name, "ascending") for name in _ROW)])
    return zip(*(summed[name].to_pylist() for name in ("commit", *_ROW, "rows_sum")), strict=True)
