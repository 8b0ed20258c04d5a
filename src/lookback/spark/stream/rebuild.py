"""Rebuilds the state of an evaluation from its tables, which show when rules changed and which rows were written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as F  # noqa: N812

from lookback.core.engine.schedule import DELETED, NO_CHANGES, Schedule, Seed
from lookback.core.errors import RuleError, SetupError
from lookback.core.rules.document import read_document
from lookback.core.rules.keys import find_key
from lookback.core.rules.roles import name_role
from lookback.core.rules.rulelog import LogRow
from lookback.core.streams.declarations import Declared
from lookback.core.streams.unions import MEMBER
from lookback.spark.checkpoints.sparklogs import EVENTS
from lookback.spark.record.evaluations import Term
from lookback.spark.record.record import Record
from lookback.spark.stream.declared import read_release
from lookback.spark.tables.conflicts import SPARK_ERRORS
from lookback.spark.tables.history import choose_log_time

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row

    from lookback.core.streams.declaration import Stream
    from lookback.core.streams.watermarks import Mark
    from lookback.spark.tables.lakehouse import Tables

# The columns that identify a row of an output table.
_IDENTITIES = {
    "alerts": ("alert_id", "revision", "arrival"),
    "late_events": ("event_id", "arrival"),
    "rule_log": ("rule_id", "version", "action", "message", "arrival"),
}
# The same if not all events are read again. Then a row may have another arrival than before.
_LASTING = {"alerts": ("alert_id", "revision")}
_REMOVING = ("DELETE", "MERGE", "TRUNCATE", "RESTORE", "WRITE OVERWRITE")


@dataclass(frozen=True)
class Rebuild:
    """The plan for rebuilding state.

    Attributes:
        schedule: When the rules changed.
        written: For each output table, the arrival before which it had all rows.
        restore: Whether to write missing rows of these arrivals; False if events and their rows were deleted on
            purpose.
        deleted: For each output table, the arrival up to which retention has deleted rows, which are not written again.
    """

    schedule: Schedule
    written: Mapping[str, int]
    restore: bool
    deleted: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_exact(self) -> bool:
        """Whether events are read from their first commit, so that every result is the same as before."""
        return self.schedule.seed is None

    @classmethod
    def from_tables(
        cls, tables: Tables, stream: Stream, starts: Mapping[str, int], judged_through: int | None
    ) -> Rebuild | None:
        """Plans a rebuild from the tables; returns None if they have no output of this stream.

        Args:
            tables: The tables.
            stream: The stream.
            starts: The first commits of events and rules to read.
            judged_through: The last commit evaluated with the previous checkpoint, if known.

        Returns:
            The plan, or None.

        Raises:
            SetupError: If the outputs have an arrival that the events table lacks.
        """
        written = {name: find_last_arrival(tables, name, stream) for name in _IDENTITIES}
        if all(last is None for last in written.values()):
            return None
        known = {name: last for name, last in written.items() if last is not None and last >= 0}
        last_commit = tables.version(stream.name)
        if (through := max(known.values(), default=-1)) > last_commit:
            raise SetupError(
                f"the outputs of stream {stream.name!r} refer to commit {through} of {tables.identifier(stream.name)}, "
                f"which ends at commit {last_commit}, so the tables do not match. If the events were rewritten, delete "
                "the stream's rows from alerts, late_events and rule_log, or evaluate with --fresh"
            )
        if judged_through is not None and max(through, starts[EVENTS] - 1) < judged_through <= last_commit:
            first = max(through + 1, starts[EVENTS])
            through = max(through, _find_last_change(tables, stream, first, judged_through))
        record = Record.read(tables, stream, Term.find(tables, stream))
        seed = _make_seed(tables, stream, starts[EVENTS]) if starts[EVENTS] else None
        last = None if through < 0 else through
        # The stream does not read changes of lost commits again.
        changes = [each for each in record.changes if each.commit >= record.begins]
        declarations = record.declarations.then(Declared.now(stream, read_release(), last))
        schedule = replace(record, changes=changes, declarations=declarations).make_schedule(last, seed)
        deleted = find_deletions(record.logged)
        if judged_through is not None and judged_through <= last_commit:
            known = {name: max(known.get(name, -1), judged_through) for name in _IDENTITIES}
        return cls(schedule, known, not _has_removals(tables, stream.name), deleted)

    @property
    def through(self) -> int | None:
        """The last commit to evaluate again, or None."""
        return self.schedule.through

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON."""
        return {
            "schedule": self.schedule.to_dict(),
            "written": dict(self.written),
            "restore": self.restore,
            "deleted": dict(self.deleted),
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Rebuild:
        """Reads the result of `to_dict`."""
        schedule, deleted = Schedule.from_dict(document["schedule"]), dict(document["deleted"])
        return cls(schedule, dict(document["written"]), bool(document["restore"]), deleted)


@dataclass(frozen=True)
class UnwrittenRows:
    """Selects the rows of a batch that are not yet written, during a rebuild."""

    tables: Tables
    stream: str
    rebuild: Rebuild
    _removed: dict[str, Counter[tuple[Any, ...]]] = field(default_factory=dict)

    def __call__(self, name: str, rows: pa.Table) -> pa.Table:
        """Returns the rows that a table lacks, including all rows after the last written arrival."""
        through = self.rebuild.through
        through = -1 if through is None else through
        arrivals = rows.column("arrival")
        if not len(rows) or (not arrivals.null_count and pc.min(arrivals).as_py() > through):
            return rows
        identity = _IDENTITIES[name] if self.rebuild.is_exact else _LASTING.get(name, _IDENTITIES[name])
        known, rebuild = self._count_known(name, identity, arrivals), self.rebuild
        last, deleted = rebuild.written.get(name, -1), rebuild.deleted.get(name, -1)
        if not rebuild.restore:
            if name not in self._removed:
                self._removed[name] = self._count_removed(name, identity, last)
            known |= self._removed[name]
        keys = zip(*(rows.column(column).to_pylist() for column in identity), strict=True)
        keep = []
        for key, row in zip(keys, self._list_rows(rows), strict=True):
            arrival = -1 if row["arrival"] is None else row["arrival"]
            again = known[key] > 0
            known[key] -= again
            # Failures are logged per batch, and these batches differ from the original ones.
            failed = row.get("action") == "failed" and arrival <= through
            # Retention never deletes changes of rules.
            gone = arrival <= deleted and (name != "rule_log" or row["action"] in NO_CHANGES)
            keep.append(not again and not failed and not gone and (rebuild.restore or arrival >= last))
        return rows.filter(pa.array(keep, pa.bool_()))

    @staticmethod
    def _list_rows(rows: pa.Table) -> list[dict[str, Any]]:
        columns = [each for each in ("arrival", "action") if each in rows.column_names]
        return list(rows.select(columns).to_pylist())

    def _count_known(self, name: str, columns: tuple[str, ...], arrivals: pa.ChunkedArray) -> Counter[tuple[Any, ...]]:
        """Counts how often the table has each row in the range of arrivals, by the columns that identify it."""
        low, high = pc.min(arrivals).as_py(), pc.max(arrivals).as_py()
        if "arrival" not in columns:
            low, high = 0, 2**62
        in_range = F.col("arrival").isNull() if arrivals.null_count else F.lit(False)
        if low is not None:
            in_range = in_range | F.col("arrival").between(low, high)
        return self._count(self.tables.read(name).where(in_range), columns)

    def _count_removed(self, name: str, columns: tuple[str, ...], last: int) -> Counter[tuple[Any, ...]]:
        """Counts how often the table had each row from arrival `last` on before rows were removed.

        A privacy request may remove rows of the last arrival, some of which may never have been written after a kill.
        """
        counted = Counter[tuple[Any, ...]]()
        for (version,) in _select_removals(self.tables, name).select("version").collect():
            # If VACUUM has deleted the old files, there usually are newer commits.
            with suppress(*SPARK_ERRORS):
                before = self.tables.read(name, version=version - 1)
                counted |= self._count(before.where(F.coalesce("arrival", F.lit(-1)) >= last), columns)
        return counted

    def _count(self, rows: DataFrame, columns: tuple[str, ...]) -> Counter[tuple[Any, ...]]:
        stored = rows.where(F.col("stream") == self.stream).select(*columns).toArrow()
        return Counter(zip(*(stored.column(column).to_pylist() for column in columns), strict=True))


def has_outputs(tables: Tables, stream: Stream) -> bool:
    """Returns whether an evaluation of the stream has written alerts, late events or log rows."""
    # One question that ends at the first row: every start of a stream waits for the answer.
    written = [tables.read(name).select("stream") for name in _IDENTITIES if tables.exists(name)]
    own = F.col("stream") == stream.name
    return bool(written) and not reduce(lambda a, b: a.unionAll(b), written).where(own).isEmpty()


def log_new_beginning(tables: Tables, stream: Stream) -> None:
    """Logs in rule_log that a new evaluation begins at the first commit while outputs of another one exist."""
    known = [find_last_arrival(tables, name, stream) for name in _IDENTITIES]
    last = max((each for each in known if each is not None), default=-1)
    message = "an evaluation begins at the first commit with a new checkpoint (--fresh); earlier rows are of another"
    row = LogRow(stream.name, None, None, "begun_afresh", message, None if last < 0 else last)
    tables.append_rows([{**vars(row), "logged_at": choose_log_time(tables, stream.name)}], "rule_log")


def find_last_arrival(tables: Tables, name: str, stream: Stream, column: str = "arrival") -> int | None:
    """Returns the last arrival in the stream's rows of a table: -1 if all are NULL, None without rows."""
    if not tables.exists(name):
        return None
    rows = tables.read(name).where(F.col("stream") == stream.name)
    row = rows.agg(F.max(F.coalesce(column, F.lit(-1)))).head()
    return None if row is None or row[0] is None else int(row[0])


def find_mark_before(tables: Tables, stream: Stream, start: int) -> Mark | None:
    """Finds the mark of all commits before `start`, or None if they had no events.

    It reads that version of the table or, if its files are gone after OPTIMIZE and VACUUM, the current one, which lacks
    events that were deleted since. Events beyond max_future do not count.
    """
    try:
        return _find_mark(tables, stream, start, start)
    except SPARK_ERRORS:
        return _find_mark(tables, stream, start, None)


def _find_mark(tables: Tables, stream: Stream, start: int, version: int | None) -> Mark | None:
    """Finds the mark of the events from before the commit `start` in a version of the table (None: the latest)."""
    own = F.col("stream") == stream.name
    # The stream may have a column named event_id too.
    future = (
        tables.read("late_events").where(own & (F.col("late_by_us") < 0)).select(F.col("event_id").alias("_future"))
    )
    new = tables.read_changes(stream.name, start, version).where(F.col("_change_type") == "insert")
    old = tables.read_events(stream.name, version).join(new, [stream.event_id, stream.event_time], "left_anti")
    old = old.join(future, F.col(stream.event_id).cast("string") == F.col("_future"), "left_anti")
    return find_mark(old, stream)


def find_mark(events: DataFrame, stream: Stream) -> Mark | None:
    """Finds the mark of events, as if they were one commit; None without events."""
    high = F.max(F.unix_micros(F.col(stream.event_time))).alias("high")
    if stream.union is not None:
        rows = events.groupBy(MEMBER).agg(high).collect()
        return {row[MEMBER]: int(row["high"]) for row in rows} or None
    row = events.agg(high).head()
    return None if row is None or row["high"] is None else int(row["high"])


def _make_seed(tables: Tables, stream: Stream, start: int) -> Seed | None:
    """Returns the seed of the state from the commits before `start`, or None if they had no events."""
    high = find_mark_before(tables, stream, start)
    if high is None:
        return None
    own = F.col("stream") == stream.name
    raised = tables.read("alerts").where(own & (F.col("arrival") < start) & (F.col("verdict") == "raised"))
    entries = F.array_sort(F.map_entries("key")).alias("entries")
    last = raised.groupBy("rule_id", "mode", "rule_version", entries).agg(
        F.max(F.struct("arrival", "event_time")).alias("last")
    )
    rows = last.select("*", F.unix_micros("last.event_time").alias("at")).orderBy("last").collect()
    columns = _find_key_columns(tables, stream, rows)
    found: dict[tuple[str, frozenset[tuple[str, str | None]]], tuple[dict[str, str | None], int]] = {}
    for row in rows:
        known = columns.get((row["rule_id"], row["rule_version"]), {})
        texts: dict[str, str | None] = dict(row["entries"])
        # Versions with the same expressions share the key, whatever they call it.
        key = {known.get(name, name): text for name, text in texts.items()}
        if all(name in stream.fields or name in known.values() for name in key):
            found[name_role(row["rule_id"], row["mode"]), frozenset(key.items())] = key, row["at"]
    return Seed(high, [(role, key, at) for (role, _), (key, at) in found.items()])


def _find_key_columns(tables: Tables, stream: Stream, alerts: Sequence[Row]) -> dict[tuple[str, int], dict[str, str]]:
    """Finds the columns of keys by their names in alerts, for each version whose alerts name an expression."""
    versions = {
        (row["rule_id"], row["rule_version"])
        for row in alerts
        if any(name not in stream.fields for name in dict(row["entries"]))
    }
    found = {}
    if versions:
        rows = tables.read("rules").where(F.col("rule_id").isin(sorted({rule_id for rule_id, _ in versions})))
        for row in rows.select("rule_id", "version", "document").collect():
            with suppress(RuleError):
                key = find_key(read_document(row["document"]), stream)
                found[row["rule_id"], row["version"]] = {part.name: part.column for part in key or ()}
    return {version: columns for version, columns in found.items() if version in versions}


def find_deletions(logged: Sequence[LogRow]) -> dict[str, int]:
    """Finds in the log the last arrival whose rows retention deleted, per table; -1 if it deleted none."""

    def find_last(action: str) -> int:
        return max((row.arrival for row in logged if row.action == action and row.arrival is not None), default=-1)

    return {name: find_last(action) for name, action in DELETED.items()}


def _find_last_change(tables: Tables, stream: Stream, first: int, last: int) -> int:
    """Returns the last commit from `first` to `last` that changed events, or -1."""
    changes = tables.read_changes(stream.name, first, last).where(F.col("_change_type").isin("insert", "delete"))
    row = changes.agg(F.max("_commit_version")).head()
    return -1 if row is None or row[0] is None else int(row[0])


def _has_removals(tables: Tables, name: str) -> bool:
    """Returns whether the history of a table shows that rows were deleted."""
    return not _select_removals(tables, name).isEmpty()


def _select_removals(tables: Tables, name: str) -> DataFrame:
    """Selects the commits that may have deleted rows from the history of a table."""
    return tables.history(name).where(F.col("operation").isin(*_REMOVING))
