"""Reads which values the lists had after each commit of the table `lists`, as far as its change feed reaches."""

from __future__ import annotations

import uuid
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lookback.core.values.cache import RecentCache
from lookback.core.values.lists import CIDR, FOREVER, ListRows, Lists
from lookback.core.values.texts import cut_end
from lookback.spark.checkpoints.listfiles import ListFiles, pack_rows, unpack_rows
from lookback.spark.lists import REMOVED, TABLE, read_list_changes, select_list_changes
from lookback.spark.queries import functions as F  # noqa: N812
from lookback.spark.tables.history import find_first_readable
from lookback.spark.tables.lakehouse import SPARK_ERRORS, commit_file, read_actions

if TYPE_CHECKING:
    from lookback.spark.tables.lakehouse import Tables

# A commit that changes more rows of a list is kept as the list after it.
_MANY_CHANGES = 10_000
_SCHEMA = pa.schema(
    [
        ("change", pa.string()), ("commit", pa.int64()), ("list", pa.string()), ("value", pa.string()),
        ("expires_at", pa.int64()), ("kind", pa.string()),
    ]
)  # fmt: skip
_ROW = ["list", "value", "expires_at", "kind"]
# The commit of rows that were there before all that can be read.
_NEVER = -1
# So many commits are read from their files, where that is possible: a job of Spark takes longer.
_FEW_COMMITS = 20
# In a sentence about a commit stand at most so many lists.
_MOST_NAMED, _MOST_CHARACTERS = 10, 2_000


@dataclass(frozen=True)
class ListFeed:
    """The changes of lists by commit, ascending; a commit that changed rows is there even if they are as before, net.

    begins: the first commit that can be read, or the one that was asked for. changes: by commit the changed rows of each list.
    before: the rows that the table had before it, if not all earlier commits were read. last: the last commit of the table.
    """

    begins: int
    last: int
    changes: Mapping[int, Mapping[str, ListRows]]
    before: Mapping[str, ListRows] = field(default_factory=dict)

    @classmethod
    def read(cls, tables: Tables, first: int = 0, names: Collection[str] | None = None) -> ListFeed:
        """Reads the commits from `first` on. names: of the lists that are wanted; None: all.

        Where the change feed begins later, `begins` is greater than `first`, and `before` has the rows until then.
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
        """Writes the lists after each commit. asked: commits that must be there too, with the lists as they were then.

        Before the first commit that can be read, that is with the lists as they were right before it.
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
    """A list after a commit: the whole of it, or what the commit changed."""

    commit: int
    content: bytes
    is_whole: bool


@dataclass
class _Reached:
    """A list as far as a process has read it: the number of steps, and the contents after them."""

    steps: int = 0
    contents: Lists = field(default_factory=Lists.empty)


@dataclass(frozen=True)
class ReplayedLists:
    """Some lists by commit, for a replay: a `ListSource` of the core, which travels to its tasks.

    key: names the replay in the cache of a process. steps: of each list, ascending by commit. begins: the first commit that
    could be read; those before it have the lists as they were right before it.
    """

    key: str = ""
    steps: Mapping[str, Sequence[_Step]] = field(default_factory=dict)
    begins: int = 0

    @classmethod
    def find(cls, tables: Tables, names: Collection[str]) -> ReplayedLists:
        """Reads lists from the table and its change feed; none where there is no such table."""
        if not names or not tables.may_have_rows(TABLE):
            return cls()
        return cls.of(ListFeed.read(tables, names=names))

    @classmethod
    def of(cls, history: ListFeed) -> ReplayedLists:
        """Orders the changes of lists by list. A commit that changed much of one has the whole of it."""
        steps: dict[str, list[_Step]] = {}
        contents = Lists.empty().change(history.before, history.begins - 1)
        for name in contents.names:
            steps[name] = [_Step(-1, contents.select([name]).to_bytes(), is_whole=True)]
        for commit, changes in history.changes.items():
            contents = contents.change(changes, commit)
            for name, rows in changes.items():
                is_whole = len(rows) > _MANY_CHANGES
                content = contents.select([name]).to_bytes() if is_whole else pack_rows(rows)
                steps.setdefault(name, []).append(_Step(commit, content, is_whole))
        return cls(uuid.uuid4().hex, steps, history.begins)

    def read(self, commit: int | None, names: frozenset[str]) -> Lists:
        """Returns these lists after a commit, empty where there is none of a name."""
        if commit is None:
            return Lists.empty()
        known = sorted(names & self.steps.keys())
        return Lists.join(
            [self._read_list(name, commit, _REACHED.get((self.key, name), _Reached)) for name in known], commit
        )

    def knows(self, commit: int) -> bool:
        """Returns True: a replay obeys the commits that were obeyed, which its changes say."""
        return True

    def _read_list(self, name: str, commit: int, reached: _Reached) -> Lists:
        """Reads a list after a commit, in the order of commits only what is new."""
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


# The lists of the last replays of this process.
_REACHED: RecentCache[_Reached] = RecentCache(1_000)


def read_contents(tables: Tables, names: Collection[str]) -> Lists:
    """Reads what the lists of these `names` have now, for a trial of a rule that asks them; one that is not there is empty."""
    if not names or not tables.exists(TABLE):
        return Lists.empty()
    return Lists.empty().change(_split_by_commit(_read_rows(tables, names), [_NEVER])[_NEVER], 0)


def describe_changes(changes: Mapping[str, ListRows]) -> str:
    """Says in a few words what a commit did to which list, such as `vips: 2 added, 1 removed`."""
    parts = []
    for name, rows in sorted(changes.items()):
        new, old = (set(rows.values[is_meant]) for is_meant in (rows.rows > 0, rows.rows < 0))
        both = len(new & old)
        counts = {"added": len(new) - both, "changed": both, "removed": len(old) - both}
        parts.append(f"{name}: {', '.join(f'{count:,} {verb}' for verb, count in counts.items() if count)}")
    more = f"; and {len(parts) - _MOST_NAMED:,} other lists" if len(parts) > _MOST_NAMED else ""
    # By SQL a name may be of any length, and a command with a long document is refused.
    return cut_end("; ".join(parts[:_MOST_NAMED]) + more, _MOST_CHARACTERS) if parts else "no value changed"


def _read_changes(tables: Tables, first: int, last: int, names: Collection[str] | None) -> tuple[pa.Table, list[int]]:
    """Reads the rows that commits added or removed, net, and the commits that changed any."""
    if first > last:
        return _sum_rows(_SCHEMA.empty_table()), []
    folder = tables.log_folder(TABLE) if last - first < _FEW_COMMITS and names is None else None
    parts = [] if folder is None else [read_commit_files(folder, commit) for commit in range(first, last + 1)]
    if parts and all(part is not None for part in parts):
        read = pa.concat_tables(parts)
        return _sum_rows(read), read["commit"].unique().to_pylist()
    rows = read_list_changes(tables, first, last)
    commits = [row["commit"] for row in rows.select("commit").distinct().collect()] if names is not None else None
    table = (rows if names is None else rows.where(F.col("list").isin(*names))).toArrow()
    return _sum_rows(table), table["commit"].unique().to_pylist() if commits is None else commits


def read_commit_files(folder: Path, commit: int) -> pa.Table | None:
    """Reads the changes of a commit, with the columns of `read_list_changes`, from its files; that takes no Spark job.

    folder: of the table, on this machine. None where only Spark knows how to read them.
    """
    try:
        actions = read_actions(commit_file(folder, commit))
        changed = [action["cdc"] for action in actions if "cdc" in action]
        parts = [action[kind] for action in actions for kind in ("add", "remove") if kind in action]
        is_plain = all("add" in action for action in actions if {"add", "remove"} & action.keys())
        if not (changed or is_plain) or any(part.get("deletionVector") for part in parts):
            return None
        # Where a commit has files of changes, these have all of them.
        files = [unquote(part["path"]) for part in changed or parts if part.get("dataChange", True) or changed]
        tables = [_read_file(folder / file, commit, has_changes=bool(changed)) for file in files]
        return pa.concat_tables(tables) if tables else _SCHEMA.empty_table()
    except (OSError, ValueError, KeyError, pa.ArrowException):
        # Half written, or of another layout.
        return None


def _read_file(file: Path, commit: int, *, has_changes: bool) -> pa.Table:
    rows = pq.read_table(file, coerce_int96_timestamp_unit="us", partitioning=None)
    # Bytes that are no text are replaced by Spark.
    rows.validate(full=True)
    rows = rows.filter(pc.and_(pc.is_valid(rows["list"]), pc.is_valid(rows["value"])))
    removed = pc.is_in(rows["_change_type"], pa.array(REMOVED)) if has_changes else None
    change = pa.repeat("insert", len(rows)) if removed is None else pc.if_else(removed, "delete", "insert")
    expires_at = pc.cast(rows["expires_at"], pa.timestamp("us", "UTC")).cast(pa.int64())
    kind = rows["kind"] if "kind" in rows.column_names else pa.nulls(len(rows), pa.string())
    columns = [change, pa.repeat(commit, len(rows)), rows["list"], rows["value"], expires_at, kind]
    return pa.table(columns, names=_SCHEMA.names).cast(_SCHEMA)


def _read_before(tables: Tables, last: int, changed: pa.Table, names: Collection[str] | None) -> pa.Table:
    """Reads the rows that the table had before these changes: those of now without what was changed since."""
    undone = changed.set_column(0, "commit", pa.repeat(_NEVER, len(changed)))
    undone = undone.set_column(undone.schema.get_field_index("rows"), "rows", pc.negate(changed["rows"]))
    before = _sum(pa.concat_tables([_read_rows(tables, names, last), undone]))
    return before.filter(pc.greater(before["rows"], 0))


def _read_rows(tables: Tables, names: Collection[str] | None, version: int | None = None) -> pa.Table:
    """Reads the rows of the table at a version, by default the last one, as those that a commit _NEVER added."""
    columns = {"_change_type": F.lit("insert"), "_commit_version": F.lit(_NEVER).cast("bigint")}
    rows = select_list_changes(tables.read(TABLE, version=version).withColumns(columns))
    return _sum_rows((rows if names is None else rows.where(F.col("list").isin(*names))).toArrow())


def _sum_rows(table: pa.Table) -> pa.Table:
    """Lists the rows that each commit added or removed, net, in any order.

    Columns: commit, list, value, expires_at, kind, and rows, never 0.
    """
    is_added = pc.equal(table["change"], "insert")
    signs = pc.cast(pc.if_else(is_added, 1, -1), pa.int64())
    signed = table.cast(_SCHEMA).drop_columns("change").append_column("rows", signs)
    # Where all rows were added a sum changes nothing, and takes most of the time of a million.
    return signed if pc.all(is_added, min_count=0).as_py() else _sum(signed)


def _sum(table: pa.Table) -> pa.Table:
    summed = table.group_by(["commit", *_ROW]).aggregate([("rows", "sum")]).rename_columns(["commit", *_ROW, "rows"])
    return summed.filter(pc.not_equal(summed["rows"], 0))


def _split_by_commit(table: pa.Table, commits: Iterable[int]) -> dict[int, dict[str, ListRows]]:
    """Cuts what `_sum_rows` returned into the rows of each list by commit; of the commits also those that have none."""
    by_commit: dict[int, dict[str, ListRows]] = {commit: {} for commit in sorted(commits)}
    kinds = pc.fill_null(pc.equal(table["kind"], CIDR), fill_value=False)
    rows = ListRows(
        table["value"].to_numpy(), pc.fill_null(table["expires_at"], FOREVER).to_numpy(), kinds.to_numpy(),
        table["rows"].to_numpy(),
    )  # fmt: skip
    numbers, names = table["commit"].to_numpy(), table["list"].combine_chunks().dictionary_encode()
    codes = names.indices.to_numpy()
    order = np.lexsort((codes, numbers))
    is_same = (numbers[order[1:]] == numbers[order[:-1]]) & (codes[order[1:]] == codes[order[:-1]])
    edges = np.flatnonzero(~is_same) + 1
    for part in np.split(order, edges) if len(order) else ():
        name = names.dictionary[int(codes[part[0]])].as_py()
        by_commit[int(numbers[part[0]])][name] = rows.take(part)
    return by_commit
