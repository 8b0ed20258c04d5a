"""Reads the lists after each commit of the table `lists`, as far back as its change feed goes."""

from __future__ import annotations

import uuid
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lookback.core.values.cache import RecentCache
from lookback.core.values.listchanges import CIDR, FOREVER, ListRows
from lookback.core.values.lists import Lists
from lookback.core.values.texts import cut_end
from lookback.spark.checkpoints.listfiles import ListFiles, pack_rows, unpack_rows
from lookback.spark.lists import TABLE
from lookback.spark.tables.conflicts import SPARK_ERRORS
from lookback.spark.tables.history import find_first_readable

if TYPE_CHECKING:
    from lookback.spark.tables.lakehouse import Tables

# If a commit changes more rows of a list than this, the whole list is stored instead of the changes.
_MAX_CHANGES = 10_000
_SCHEMA = pa.schema(
    [
        ("change", pa.string()),
        ("commit", pa.int64()),
        ("list", pa.string()),
        ("value", pa.string()),
        ("expires_at", pa.int64()),
        ("kind", pa.string()),
    ]
)
_ROW = ["list", "value", "expires_at", "kind"]
# The commit number of rows that are older than the first readable commit.
_NEVER = -1
# Limits on the description of a commit.
_MAX_NAMED, _MAX_CHARACTERS = 10, 2_000


@dataclass(frozen=True)
class ListFeed:
    """The changes of lists by commit.

    Attributes:
        begins: The requested first commit, or the first that can be read.
        last: The last commit of the table.
        changes: The changed rows of each list by commit, ascending. A commit whose changes cancel out is included.
        before: The table's rows before `begins`, unless `begins` is the requested commit.
    """

    begins: int
    last: int
    changes: Mapping[int, Mapping[str, ListRows]]
    before: Mapping[str, ListRows] = field(default_factory=dict)

    @classmethod
    def read(cls, tables: Tables, first: int = 0, names: Collection[str] | None = None) -> ListFeed:
        """Reads the commits from `first` on, for all lists or those in `names`.

        If the change feed begins later, `begins` is greater than `first`, and `before` has the rows until then.
        """
        last = tables.version(TABLE)
        try:
            changed, commits = _read_changes(tables, first, last, names)
            return cls(first, last, _split_by_commit(changed, commits))
        except SPARK_ERRORS:
            begins = find_first_readable(tables, TABLE)
            if begins <= first:
                raise
        changed, commits = _read_changes(tables, begins, last, names)
        before = _split_by_commit(_read_before(tables, last, changed, names), [_NEVER])[_NEVER]
        return cls(begins, last, _split_by_commit(changed, commits), before)

    def write(self, files: ListFiles, asked: Iterable[int] = ()) -> None:
        """Writes the lists after each commit, also after the commits `asked`, even if these changed nothing.

        Commits too old to be read get the lists from just before the first readable commit.
        """
        asked, known = sorted(asked), list(self.changes)
        early = [commit for commit in asked if commit < self.begins]
        before: int | None = None
        if early or self.before:
            before = self.begins - 1
            files.begin({*early, before}, Lists.empty().change(self.before, before))
        for commit in sorted({*known, *(each for each in asked if each >= self.begins)}):
            files.add(before, commit, self.changes.get(commit, {}))
            before = commit


class _Step(NamedTuple):
    """A list after a commit: either the whole list or the changes of the commit."""

    commit: int
    content: bytes
    is_whole: bool


@dataclass
class _Reached:
    """How far a process has read a list: the number of steps, and the contents after them."""

    steps: int = 0
    contents: Lists = field(default_factory=Lists.empty)


@dataclass(frozen=True)
class ReplayedLists:
    """Lists by commit, for a replay: a `ListSource` that is sent to Spark tasks.

    Attributes:
        key: Identifies the replay in the cache of a process.
        steps: The steps of each list, ascending by commit.
        begins: The first readable commit. Earlier commits get the lists from just before it.
    """

    key: str = ""
    steps: Mapping[str, Sequence[_Step]] = field(default_factory=dict)
    begins: int = 0

    @classmethod
    def find(cls, tables: Tables, names: Collection[str]) -> ReplayedLists:
        """Reads lists from the table and its change feed. Returns no lists if the table does not exist."""
        if not names or not tables.may_have_rows(TABLE):
            return cls()
        return cls.of(ListFeed.read(tables, names=names))

    @classmethod
    def of(cls, history: ListFeed) -> ReplayedLists:
        """Groups the changes by list. A step with many changes holds the whole list instead."""
        steps: dict[str, list[_Step]] = {}
        contents = Lists.empty().change(history.before, history.begins - 1)
        for name in contents.names:
            steps[name] = [_Step(-1, contents.select([name]).to_bytes(), is_whole=True)]
        for commit, changes in history.changes.items():
            contents = contents.change(changes, commit)
            for name, rows in changes.items():
                is_whole = len(rows) > _MAX_CHANGES
                content = contents.select([name]).to_bytes() if is_whole else pack_rows(rows)
                steps.setdefault(name, []).append(_Step(commit, content, is_whole))
        return cls(uuid.uuid4().hex, steps, history.begins)

    def read(self, commit: int | None, names: frozenset[str]) -> Lists:
        """Returns the named lists after a commit. A list that does not exist is empty."""
        if commit is None:
            return Lists.empty()
        known = sorted(names & self.steps.keys())
        return Lists.join(
            [self._read_list(name, commit, _REACHED.get((self.key, name), _Reached)) for name in known], commit
        )

    def knows(self, commit: int) -> bool:
        """Returns True: a replay applies only commits that the stream applied, so it knows them all."""
        return True

    def _read_list(self, name: str, commit: int, reached: _Reached) -> Lists:
        """Reads a list after a commit. In ascending order of commits, each call reads only the new steps."""
        steps = self.steps[name]
        end = bisect_right(steps, commit, key=lambda step: step.commit)
        if end < reached.steps:
            reached.steps, reached.contents = 0, Lists.empty()
        begin = max((at for at in range(reached.steps, end) if steps[at].is_whole), default=reached.steps)
        changes: list[ListRows] = []
        for step in steps[begin:end]:
            if step.is_whole:
                reached.contents = Lists.from_bytes(step.content, name)
            else:
                changes.append(unpack_rows(step.content, name))
        if changes:
            reached.contents = reached.contents.change({name: ListRows.concat(changes)})
        reached.steps = end
        return reached.contents


# The lists of recent replays in this process.
_REACHED: RecentCache[_Reached] = RecentCache(1_000)


def read_contents(tables: Tables, names: Collection[str]) -> Lists:
    """Reads the current contents of the named lists, for a trial of a rule. A list that does not exist is empty."""
    if not names or not tables.exists(TABLE):
        return Lists.empty()
    return Lists.empty().change(_split_by_commit(_read_rows(tables, names), [_NEVER])[_NEVER], 0)


def describe_changes(changes: Mapping[str, ListRows]) -> str:
    """Summarizes the changes of a commit, such as `vips: 2 added, 1 removed`."""
    parts = []
    for name, rows in sorted(changes.items()):
        new, old = (set(rows.values[is_meant]) for is_meant in (rows.rows > 0, rows.rows < 0))
        both = len(new & old)
        counts = {"added": len(new) - both, "changed": both, "removed": len(old) - both}
        parts.append(f"{name}: {', '.join(f'{count:,} {verb}' for verb, count in counts.items() if count)}")
    more = f"; and {len(parts) - _MAX_NAMED:,} other lists" if len(parts) > _MAX_NAMED else ""
    # A name written by SQL may have any length, and a command with a long document is refused.
    return cut_end("; ".join(parts[:_MAX_NAMED]) + more, _MAX_CHARACTERS) if parts else "no value changed"


def _read_changes(tables: Tables, first: int, last: int, names: Collection[str] | None) -> tuple[pa.Table, list[int]]:
    """Reads the net added and removed rows, and the commits that changed any."""
    if first > last:
        return _sum_rows(_SCHEMA.empty_table()), []
    feed = {"changes": tables.read_changes(TABLE, first, last)}
    table = tables.ask("list_changes", feed, names=None if names is None else list(names)).toArrow()
    if names is None:
        return _sum_rows(table), table["commit"].unique().to_pylist()
    commits = tables.ask("list_changes", feed, names=None).select("commit").toArrow()["commit"]
    return _sum_rows(table), commits.unique().to_pylist()


def _read_before(tables: Tables, last: int, changed: pa.Table, names: Collection[str] | None) -> pa.Table:
    """Reads the rows that the table had before these changes: the current rows with the changes undone."""
    undone = changed.set_column(0, "commit", pa.repeat(_NEVER, len(changed)))
    undone = undone.set_column(undone.schema.get_field_index("rows"), "rows", pc.negate(changed["rows"]))
    before = _sum(pa.concat_tables([_read_rows(tables, names, last), undone]))
    return before.filter(pc.greater(before["rows"], 0))


def _read_rows(tables: Tables, names: Collection[str] | None, version: int | None = None) -> pa.Table:
    """Reads the rows of a version of the table (default: the last) as if the commit _NEVER had added them."""
    changes = {"changes": tables.read_as_inserts(TABLE, version, _NEVER)}
    return _sum_rows(tables.ask("list_changes", changes, names=None if names is None else list(names)).toArrow())


def _sum_rows(table: pa.Table) -> pa.Table:
    """Returns the net added and removed rows of each commit, in any order.

    The columns are commit, list, value, expires_at, kind and rows (never 0).
    """
    is_added = pc.equal(table["change"], "insert")
    signs = pc.cast(pc.if_else(is_added, 1, -1), pa.int64())
    signed = table.cast(_SCHEMA).drop_columns("change").append_column("rows", signs)
    # If all rows were added, a sum changes nothing, but would take most of the time for a million rows.
    return signed if pc.all(is_added, min_count=0).as_py() else _sum(signed)


def _sum(table: pa.Table) -> pa.Table:
    summed = table.group_by(["commit", *_ROW]).aggregate([("rows", "sum")]).rename_columns(["commit", *_ROW, "rows"])
    return summed.filter(pc.not_equal(summed["rows"], 0))


def _split_by_commit(table: pa.Table, commits: Iterable[int]) -> dict[int, dict[str, ListRows]]:
    """Splits the result of `_sum_rows` by commit and list. `commits` without rows get an empty entry."""
    by_commit: dict[int, dict[str, ListRows]] = {commit: {} for commit in sorted(commits)}
    kinds = pc.fill_null(pc.equal(table["kind"], CIDR), fill_value=False)
    rows = ListRows(
        values=table["value"].to_numpy(),
        until=pc.fill_null(table["expires_at"], FOREVER).to_numpy(),
        is_cidr=kinds.to_numpy(),
        rows=table["rows"].to_numpy(),
    )
    numbers, names = table["commit"].to_numpy(), table["list"].combine_chunks().dictionary_encode()
    codes = names.indices.to_numpy()
    order = np.lexsort((codes, numbers))
    is_same = (numbers[order[1:]] == numbers[order[:-1]]) & (codes[order[1:]] == codes[order[:-1]])
    edges = np.flatnonzero(~is_same) + 1
    for part in np.split(order, edges) if len(order) else ():
        name = names.dictionary[int(codes[part[0]])].as_py()
        by_commit[int(numbers[part[0]])][name] = rows.take(part)
    return by_commit
