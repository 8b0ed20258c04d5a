"""Ingests the events of a union's members into the union's events table, each exactly once.

A round reads what the change feeds of the members have new, removes deleted events from the union, and then takes in the
new ones as `IngestRound` does. After that it records how far it has read. A round that is killed is repeated: what it has
removed and written already stays as it is.
"""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

from pyspark import StorageLevel
from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812

from lookback.core.errors import SetupError
from lookback.core.streams.unions import MEMBER
from lookback.core.values.durations import parse_duration
from lookback.core.values.texts import count_noun, quote_identifier
from lookback.places import write_whole
from lookback.spark.ingest.fields import (
    BLOCK,
    FILE,
    RAW,
    READ_AS,
    ROW,
    UNIT,
    cast_rows,
    drop_raw,
    list_uncast_fields,
)
from lookback.spark.ingest.files import require_ingest
from lookback.spark.ingest.report import IngestReport
from lookback.spark.ingest.round import IngestRound
from lookback.spark.ingest.sources import JSON_FORMATS
from lookback.spark.tables.conflicts import change_table
from lookback.spark.tables.history import find_first_readable
from lookback.spark.tables.locks import lock_ingest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pyspark.sql import DataFrame

    from lookback.core.streams.declaration import Stream
    from lookback.places import Place
    from lookback.spark.tables.lakehouse import Tables

_PROGRESS = "progress.json"
_COMMIT, _KIND, _GONE = "_commit_version", "_change_type", "__gone"
# How RAW of a rejected row is read again: a JSON object of the fields of the union.
_READING = json.dumps({"format": "json", "fields": True})


class _Read(NamedTuple):
    """How far a member was read: the id of its table, and the last commit."""

    table: str
    version: int


class _Changes(NamedTuple):
    """The changes of a member: checked rows (see `fields`), and the ids and times of events that the union must drop."""

    rows: DataFrame
    dropped: DataFrame | None


class UnionIngest:
    """Ingests the events of a union's members into the union's events table, each exactly once.

    Args:
        tables: The tables of the workspace.
        streams: All declared streams by name.
        stream: The union.
        checkpoint: The folder that records how far the members were read; default: see `Tables.choose_checkpoint`.
        every: The interval at which to look for new events; None: ingest the existing ones, then end.
        progress: Called with a line for each commit, or with `every` for each round that found something.
    """

    def __init__(
        self,
        tables: Tables,
        streams: Mapping[str, Stream],
        stream: Stream,
        checkpoint: str | Place | None = None,
        *,
        every: str | None = None,
        progress: Callable[[str], None] | None = print,
    ) -> None:
        require_ingest(tables, stream)
        if stream.union is None:
            raise SetupError(f"stream {stream.name!r} is not a union; ingest its files or its topic")
        missing = [name for name in stream.union.members if name not in streams]
        if missing:
            raise SetupError(f"stream {stream.name!r} is the union of {missing[0]!r} too, which is not declared")
        self._members = [streams[name] for name in stream.union.members]
        self._tables, self._stream = tables.holding(*self._members), stream
        self._checkpoint = tables.find_place(checkpoint or tables.choose_checkpoint("union", stream))
        self._every, self._progress = every, progress
        self._stopping = threading.Event()

    def run(self) -> IngestReport:
        """Ingests events until the end or until `request_stop`, and returns the summed report of all rounds.

        Raises:
            SetupError: If a table is missing or does not fit, or another ingest of the union is running.
        """
        with lock_ingest(self._tables, self._stream):
            for stream in (self._stream, *self._members):
                self._tables.require(stream)
            ids = {each.name: str(self._tables.describe(each.name)["id"]) for each in self._members}
            self._round = IngestRound(self._tables, self._stream, self._progress if self._every is None else None)
            total = IngestReport(self._stream.name, 0, 0, 0, 0, 0, 0.0)
            while True:
                report = self._take_new(ids)
                total = total.plus(report)
                if self._every is None:
                    return self._round.add_versions(total)
                if report.offered and self._progress is not None:
                    self._progress(str(report))
                if self._stopping.wait(parse_duration(self._every) / 1e6):
                    return total

    def request_stop(self) -> None:
        """Asks `run` to end after the current round."""
        self._stopping.set()

    def _take_new(self, ids: Mapping[str, str]) -> IngestReport:
        """Takes in what the members have new."""
        known, found = self._read_progress(), dict[str, _Read]()
        changes = list[_Changes]()
        for number, member in enumerate(self._members):
            before = known.get(member.name)
            last = self._tables.version(member.name)
            # A table that was created again is read from its beginning.
            if before is not None and (before.table != ids[member.name] or before.version > last):
                before = None
            found[member.name] = _Read(ids[member.name], last)
            if before is None or before.version < last:
                feed = _MemberFeed(self._tables, self._stream, member, f"{number:04} {member.name}")
                changes.append(feed.read(None if before is None else before.version + 1, last))
        report = IngestReport(self._stream.name, 0, 0, 0, 0, 0, 0.0)
        if changes:
            self._drop([each.dropped for each in changes if each.dropped is not None])
            rows = reduce(lambda some, more: some.unionByName(more), [each.rows for each in changes])
            report = self._round.take_checked(rows)
        if found != known:
            self._write_progress(found)
        return report

    def _drop(self, parts: Sequence[DataFrame]) -> None:
        """Deletes events from the union."""
        if not parts:
            return
        name, id_, time = self._stream.name, self._stream.event_id, self._stream.event_time
        gone = reduce(lambda some, more: some.union(more), parts).distinct().localCheckpoint()
        first, last = gone.agg(F.min("time"), F.max("time")).collect()[0]
        if first is None:
            return
        # The bounds let Delta skip files.
        here = F.col(f"t.{quote_identifier(time)}").between(F.lit(first), F.lit(last))
        same = F.col(f"t.{quote_identifier(id_)}") == F.col("s.id")
        count = self._tables.read(name).alias("t").where(here).join(gone.alias("s"), same, "left_semi").count()
        if not count:
            return

        def act() -> None:
            self._tables.delta(name).alias("t").merge(gone.alias("s"), here & same).whenMatchedDelete().execute()

        change_table(self._tables, name, act)
        if self._progress is not None:
            self._progress(f"{name}: removed {count_noun(count, 'event')} that a member has no more")

    def _read_progress(self) -> dict[str, _Read]:
        """Reads how far the members were read; nothing if the checkpoint is new or damaged."""
        try:
            document = json.loads((self._checkpoint / _PROGRESS).read_text(encoding="utf-8"))
            return {str(name): _Read(str(table), int(version)) for name, (table, version) in document.items()}
        except (OSError, AttributeError, TypeError, ValueError):
            return {}

    def _write_progress(self, read: Mapping[str, _Read]) -> None:
        write_whole(self._checkpoint / _PROGRESS, json.dumps(read).encode())


class _MemberFeed:
    """Reads the changes of one member. `unit` sorts the members among themselves."""

    def __init__(self, tables: Tables, union: Stream, member: Stream, unit: str) -> None:
        self._tables, self._union, self._member, self._unit = tables, union, member, unit

    def read(self, first: int | None, last: int) -> _Changes:
        """Reads the commits from `first` to `last`; None: all commits, or the table's rows if the first are gone."""
        start = 0 if first is None else first
        if find_first_readable(self._tables, self._member.name) > start:
            return self._read_table(last)
        changes = self._tables.read_changes(self._member.name, start, last)
        changes = changes.where(F.col(_KIND).isin("insert", "delete")).persist(StorageLevel.MEMORY_AND_DISK)
        inserted, deleted = (changes.where(F.col(_KIND) == kind) for kind in ("insert", "delete"))
        if deleted.isEmpty():
            return _Changes(self._check(inserted, _COMMIT), None)
        id_, time = self._member.event_id, F.col(self._member.event_time)
        gone = deleted.groupBy(id_).agg(F.max(_COMMIT).alias(_GONE), F.min(time).alias("__time")).localCheckpoint()
        # An event that a commit both deletes and inserts was replaced.
        left = inserted.join(gone.drop("__time"), id_, "left").where(
            F.col(_GONE).isNull() | (F.col(_COMMIT) >= F.col(_GONE))
        )
        dropped = self._name_ids(gone.join(left.select(id_), id_, "left_anti"), "__time")
        return _Changes(self._check(left, _COMMIT), dropped.unionByName(self._find_replaced(left)))

    def _read_table(self, last: int) -> _Changes:
        """Reads the table as it is after a commit, as if all its rows were new, and drops what it lacks."""
        rows = self._tables.read_events(self._member.name, last)
        checked = self._check(rows, "ingested_at")
        present = self._tables.read(self._union.name).where(F.col(MEMBER) == self._member.name)
        lost = present.join(
            self._name_ids(rows, self._member.event_time), F.col(self._union.event_id) == F.col("id"), "left_anti"
        )
        return _Changes(
            checked, lost.select(F.col(self._union.event_id).alias("id"), F.col(self._union.event_time).alias("time"))
        )

    def _name_ids(self, rows: DataFrame, time: str) -> DataFrame:
        """Returns the ids that events have in the union, and their times."""
        id_ = F.concat(F.lit(f"{self._member.name}:"), F.col(self._member.event_id).cast("string"))
        return rows.select(id_.alias("id"), F.col(time).alias("time"))

    def _find_replaced(self, left: DataFrame) -> DataFrame:
        """Finds the events of the union that were deleted and inserted again with other values."""
        again = self._check(left.where(F.col(_GONE).isNotNull()), _COMMIT)
        id_, fields = self._union.event_id, list(self._union.table_columns)
        new = again.select(F.col(id_).alias("__id"), F.struct(*fields).alias("__new"))
        present = self._tables.read(self._union.name)
        pairs = present.join(new, F.col(id_) == F.col("__id"))
        same = reduce(lambda some, more: some & more, [F.col(name).eqNullSafe(F.col("__new")[name]) for name in fields])
        return pairs.where(~same).select(F.col(id_).alias("id"), F.col(self._union.event_time).alias("time"))

    def _check(self, rows: DataFrame, block: str) -> DataFrame:
        """Turns rows of the member into checked rows of the union. `block` is the column of their order of arrival."""
        arrived = F.unix_micros(block) if block == "ingested_at" else F.col(block)
        order = [self._member.event_time, *self._member.order_columns, self._member.event_id]
        window = Window.partitionBy(block).orderBy(*[F.col(name).asc_nulls_first() for name in order])
        converted = _convert(self._union, self._member)
        placed = rows.select(
            *self._member.table_columns,
            F.lit(f"stream {self._member.name}").alias(FILE),
            F.lit(self._unit).alias(UNIT),
            F.coalesce(arrived, F.lit(0)).cast("bigint").alias(BLOCK),
            (F.row_number().over(window) - 1).cast("bigint").alias(ROW),
            F.lit(_READING).alias(READ_AS),
        )
        raw = F.to_json(F.struct(*list_uncast_fields(placed, converted)), {"ignoreNullFields": "false", **JSON_FORMATS})
        placed = placed.withColumn(RAW, F.make_valid_utf8(raw))
        return drop_raw(cast_rows(placed, converted, text=False, place=f"stream {self._member.name}"), self._union)


def _convert(union: Stream, member: Stream) -> Stream:
    """Returns the union with `columns` that make its fields of the fields of a member."""
    assert union.union is not None
    columns = {
        union.event_id: f"concat('{member.name}:', cast({quote_identifier(member.event_id)} as string))",
        union.event_time: quote_identifier(member.event_time),
        MEMBER: f"'{member.name}'",
    }
    for name, type_ in union.fields.items():
        if name not in columns and name not in member.fields:
            columns[name] = f"cast(null as {type_})"
    return replace(union, columns={**columns, **union.union.columns.get(member.name, {})}, union=None)
