"""Privacy requests: the rows that belong to a person leave every table that holds some, for good.

What a request means, for a condition over the fields of a stream:

    events           rows that satisfy it; the change feed carries the DELETE to the evaluation, which takes them out of state
    alerts           all revisions of an alert that one of those events triggered or is evidence of, and of an alert whose key
                     has every field that the condition reads and satisfies it
    reviews          those of these alerts
    late_events      those events
    rule_log         rows whose message names one of those events, or the key of a session that satisfies it
    rejected_events  rows that would satisfy it if they are read as the stream is declared today

An alert of another key that merely counted such an event stays: a sum over many people names none of them. `rules` and
`metrics` hold no event.

What hangs on events goes first and the events last, so that a request that was killed finds all of it again; then once more
what the evaluation has written meanwhile. Events that were deleted before are found by their rows in the change feed.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import and_
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812

from lookback.core.errors import ExpressionError, SetupError
from lookback.core.expressions.compiling import Expression, compile_expression
from lookback.core.values.texts import first_line
from lookback.core.values.types import BOOLEAN
from lookback.spark.ingest.fields import RAW, REASON
from lookback.spark.ingest.rejected import Rejected
from lookback.spark.stream.checkpoint import Checkpoint
from lookback.spark.tables.lakehouse import parse_file_retention, retry_on_conflict

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from lookback.core.streams.declaration import Stream
    from lookback.spark.tables.lakehouse import Tables

# What a row of a table is known by when it is to go. Reviews before the alerts that lead to them.
_KNOWN_BY = {
    "reviews": ("alert_id",),
    "alerts": ("alert_id",),
    "late_events": ("stream", "event_id"),
    "rule_log": ("stream", "action", "message"),
    "rejected_events": ("stream", "raw"),
}
# Log rows that name an event or a key; none of them decides what a replay gives.
_NAMING = ("failed", "revisions_limited", "session_closed")
_REMOVING = ("DELETE", "MERGE", "UPDATE")
# So many commits of a table's history are searched for earlier deletions.
_HISTORY = 10_000
# How long to try again where others keep writing to the same table, seconds.
_PATIENCE = 300.0


@dataclass(frozen=True)
class Purge:
    """What takes deleted rows out of a table's files too: SQL, which has that effect from a time on (aware, UTC)."""

    table: str
    statements: tuple[str, ...]
    after: dt.datetime


@dataclass(frozen=True)
class ForgetReport:
    """What a privacy request did or, where dry_run, would do.

    where: the condition as it was understood. rows: deleted rows by table. unreadable: rejected rows of the stream that
    cannot be read, and so were not looked into. commit: of the events table; from it on the events count in no window.
    waiting: the evaluation has not judged that commit yet, so that it may still write of them; the same request, made
    again later, takes that out. None: its checkpoint is out of reach. purges: what is left to do, and when.
    """

    stream: str
    where: str
    dry_run: bool
    rows: Mapping[str, int]
    unreadable: int
    commit: int | None
    waiting: bool | None
    purges: tuple[Purge, ...] = ()

    @property
    def total(self) -> int:
        """Rows of all tables."""
        return sum(self.rows.values())

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> list[str]:
        verb = "would be deleted" if self.dry_run else "deleted"
        lines = [f"{self.stream} where {self.where}: {self.total:,} rows {verb}"]
        lines += [f"  {name:<16}{count:>9,}" for name, count in self.rows.items()]
        if self.unreadable:
            lines.append(
                f"{self.unreadable:,} rejected rows of the stream cannot be read and were not looked into; see them in "
                f"rejected_events where stream = '{self.stream}'"
            )
        if self.waiting is not False and not self.dry_run:
            judged = "has not judged" if self.waiting else "may not have judged"
            lines.append(
                f"The evaluation {judged} commit {self.commit} yet, from which on the events count no more. Make the "
                "same request again when it has: it may write of them until then."
            )
        if self.purges:
            lines.append(
                "The files still hold the rows, as history. VACUUM takes them out; for good from the times named:"
            )
            lines += [f"  {_minute(p.after)}  {statement}" for p in self.purges for statement in p.statements]
        if not self.dry_run:
            lines.append(
                "rules and metrics hold no events. Not searched: what authors wrote into rules, the id of one event that a "
                "quarantine's comment may name, and the files that events came from, which would bring them back if they are "
                "ingested again."
            )
        return lines


def forget(
    tables: Tables, stream: Stream, where: str, *, dry_run: bool = False, checkpoint: str | Path | None = None
) -> ForgetReport:
    """Deletes what the tables hold of the events that satisfy `where`; see the module for what that is.

    where: a condition over the stream's declared fields, as rules write them. dry_run: count only. checkpoint: the
    evaluation's folder, to see how far it is; None: out of reach. It may run while ingest and the evaluation run, and may be made again at
    any time, also after it was killed; nothing is counted or deleted twice.
    Raises ExpressionError where the condition is none, and SetupError where a table is missing, the condition fails on a
    value, or others kept writing for five minutes.
    """
    condition, tables = forget_condition(stream, where), tables.holding(stream)
    for name in (stream.name, *_KNOWN_BY):
        if not tables.exists(name):
            raise SetupError(f"there is no table {tables.identifier(name)}; `lookback init` creates what is missing")
    request = _Request(tables, stream, condition)
    try:
        rows, commit = request.count(), request.gone_at
        if not dry_run:
            deleted, removed_at = request.delete()
            rows, commit = deleted, removed_at if removed_at is not None else commit
    except PySparkException as error:
        raise SetupError(
            f"the condition {condition.sql!r} cannot be computed for every row: {first_line(error):.300}. "
            "Write it so that it can, such as with try_cast() or nullif(); what was deleted before stays deleted."
        ) from error
    waiting = False if commit is None else None if checkpoint is None else _waits(Path(checkpoint), commit)
    purges = () if dry_run else tuple(request.purges(rows))
    return ForgetReport(stream.name, condition.sql, dry_run, rows, request.unreadable, commit, waiting, purges)


def forget_condition(stream: Stream, where: str) -> Expression:
    """The condition of a request, checked. Raises ExpressionError where it is not one over the stream's fields."""
    condition = compile_expression(where, stream.fields)
    if condition.type != BOOLEAN:
        raise ExpressionError([f"a condition is needed, but {condition.sql!r} is of type {condition.type}; compare it"])
    if not condition.fields:
        raise ExpressionError([f"the condition {condition.sql!r} names no field; say whose events, such as `id = 17`"])
    return condition


def spark_text(condition: Expression) -> str:
    """The condition for Spark's parser, made from what was understood and not from the text that was given.

    Spark puts settings and environment variables in place of ${name} before it parses, also within quotes; written with
    an escape for the brace that is left alone.
    """
    return condition.sql.replace("${", "$\\u007b")


class _Request:
    """One request on its way. gone_at: the last commit that deleted such events before; None if none is known."""

    def __init__(self, tables: Tables, stream: Stream, condition: Expression) -> None:
        self._tables, self._stream, self._fields = tables, stream, sorted(condition.fields)
        self._text = spark_text(condition)
        self._holds = F.expr(self._text)
        self.gone_at: int | None = None
        self.unreadable = 0
        self._keys: dict[str, DataFrame] = {}
        self._rows: dict[str, int] = {}

    def count(self) -> dict[str, int]:
        """Finds all rows that are to go. Returns how many, by table; nothing is changed."""
        present = self._tables.read(self._stream.name).where(self._holds).select(self._id)
        gone = self._gone()
        # Cut off from the table: what it is computed from will be deleted.
        ids = present if gone is None else present.union(gone)
        self._ids = ids.distinct().localCheckpoint()
        self._keys = {**self._dependents(), "rejected_events": self._rejected()}
        self._rows = {name: self._matching(name, keys).count() for name, keys in self._keys.items()}
        self._rows[self._stream.name] = present.count()
        return {name: self._rows[name] for name in (self._stream.name, *_KNOWN_BY)}

    def delete(self) -> tuple[dict[str, int], int | None]:
        """Deletes what was counted. Returns how many rows, by table, and the commit that deleted events, if there is one."""
        name = self._stream.name
        rows = {each: self._rows[each] for each in (name, *_KNOWN_BY)}
        for dependent, keys in self._keys.items():
            if rows[dependent]:
                self._delete(dependent, keys)
        if not rows[name]:
            return rows, None
        before = self._tables.version(name)
        table = self._tables.identifier(name)
        self._retried(name, lambda: self._tables.spark.sql(f"DELETE FROM {table} WHERE {self._text}"))
        commit = self._last_removal(name)[0]
        if commit is None or commit <= before:
            return {**rows, name: 0}, None  # somebody else came first
        # What came in since they were counted is among them; and what was written of all of them meanwhile goes too.
        deleted = self._deleted(before + 1, commit).localCheckpoint()
        rows[name] = deleted.count()
        self._ids = self._ids.union(deleted.select("event_id")).distinct().localCheckpoint()
        for dependent, keys in self._dependents().items():
            more = self._matching(dependent, keys).count()
            if more:
                self._delete(dependent, keys)
                rows[dependent] += more
        return rows, commit

    def purges(self, rows: Mapping[str, int]) -> list[Purge]:
        """What empties the files of the tables that rows were deleted from, in this request or lately."""
        found = []
        for name in rows:
            removed = dt.datetime.now(dt.timezone.utc) if rows[name] else self._last_removal(name)[1]
            if removed is None:
                continue
            detail = self._tables.spark.sql(f"DESCRIBE DETAIL {self._tables.identifier(name)}").head()
            properties: Mapping[str, str] = {} if detail is None else detail["properties"]
            statements = [f"VACUUM {self._tables.identifier(name)}"]
            if properties.get("delta.enableDeletionVectors") == "true":
                # Rows are only marked there; this writes the files anew.
                statements.insert(0, f"REORG TABLE {self._tables.identifier(name)} APPLY (PURGE)")
            found.append(Purge(name, tuple(statements), removed + parse_file_retention(properties)))
        return found

    @property
    def _id(self) -> Column:
        return F.col(self._stream.event_id).cast("string").alias("event_id")

    def _gone(self) -> DataFrame | None:
        """The ids of such events that were deleted before, as far as the change feed tells."""
        name = self._stream.name
        history = self._tables.history(name, _HISTORY).where(F.col("operation").isin(*_REMOVING))
        versions = sorted(row[0] for row in history.select("version").collect())
        while versions:
            try:
                ids = self._deleted(versions[0], versions[-1]).localCheckpoint()
            except PySparkException:
                # The files of old changes are vacuumed away; what is newer may be there.
                versions = versions[len(versions) // 2 + 1 :]
                continue
            row = ids.agg(F.max("commit")).head()
            self.gone_at = None if row is None else row[0]
            return ids.select("event_id")
        return None

    def _deleted(self, first: int, last: int | None) -> DataFrame:
        """(event_id, commit) of the events of the request that these commits deleted."""
        feed = self._tables.read_changes(self._stream.name, first, last)
        rows = feed.where((F.col("_change_type") == "delete") & self._holds)
        return rows.select(self._id, F.col("_commit_version").alias("commit"))

    def _dependents(self) -> dict[str, DataFrame]:
        """What is to go with the events, by table, as it stands now."""
        alerts = self._alerts()
        return {
            "reviews": alerts,
            "alerts": alerts,
            "late_events": self._ids.select(F.lit(self._stream.name).alias("stream"), "event_id"),
            "rule_log": self._log_rows(),
        }

    def _own(self, name: str) -> DataFrame:
        return self._tables.read(name).where(F.col("stream") == F.lit(self._stream.name))

    def _alerts(self) -> DataFrame:
        alerts = self._own("alerts")
        named = F.array_union(F.array("event_id"), F.coalesce("evidence", F.array().cast("array<string>")))
        by_event = alerts.select("alert_id", F.explode(named).alias("event_id")).join(
            self._ids, "event_id", "left_semi"
        )
        has_fields = reduce(and_, [F.map_contains_key("key", F.lit(name)) for name in self._fields])
        texts = {name: F.col("key")[F.lit(name)] for name in self._fields}
        by_key = self._satisfying(alerts.where(has_fields), texts, "alert_id")
        return by_event.select("alert_id").union(by_key).distinct().localCheckpoint()

    def _satisfying(self, rows: DataFrame, texts: Mapping[str, Column], known_by: str) -> DataFrame:
        """`known_by` of the rows for which the condition holds, its fields made from texts."""
        types = self._stream.fields
        fields = [text.try_cast(str(types[name])).alias(name) for name, text in texts.items()]
        return rows.select(F.col(known_by).alias("__known_by"), *fields).where(self._holds).select("__known_by")

    def _log_rows(self) -> DataFrame:
        log = self._own("rule_log").where(F.col("action").isin(*_NAMING))
        named = F.coalesce(
            *[
                F.nullif(F.regexp_extract("message", pattern, 1), F.lit(""))
                for pattern in ("the first is (.*)$", "^event (.*) enters the windows of ")
            ]
        )
        by_event = log.withColumn("event_id", named).join(self._ids, "event_id", "left_semi")
        # A key stands there as {'customer': '17', 'shop': None}.
        written = {name: F.regexp_extract("message", rf"'{name}': '([^']*)'", 1) for name in self._fields}
        has_fields = [F.col("message").rlike(rf"'{name}': ('[^']*'|None)") for name in self._fields]
        sessions = log.where(reduce(and_, [F.col("action") == "session_closed", *has_fields]))
        texts = {
            name: F.when(~F.contains(F.col("message"), F.lit(f"'{name}': None")), text)
            for name, text in written.items()
        }
        by_key = self._satisfying(sessions, texts, "message").withColumnRenamed("__known_by", "message")
        columns = [F.lit(self._stream.name).alias("stream"), F.col("action"), F.col("message")]
        keyed = by_key.select(columns[0], F.lit("session_closed").alias("action"), F.col("message"))
        return by_event.select(*columns).union(keyed).distinct()

    def _rejected(self) -> DataFrame:
        """The rejected rows that satisfy the condition, read as the stream is declared today."""
        own = self._own("rejected_events")
        self.unreadable = own.where("raw is null").count()
        keys = own.limit(0).select("stream", "raw")
        for judged in Rejected(self._tables, self._stream).kept({}):
            self.unreadable += judged.where(F.col(REASON) == "malformed line").count()
            keys = keys.union(judged.where(self._holds).select(F.lit(self._stream.name), RAW))
        return keys.distinct().localCheckpoint()

    def _matching(self, name: str, keys: DataFrame) -> DataFrame:
        return self._tables.read(name).alias("t").join(keys.alias("k"), _same(name), "left_semi")

    def _delete(self, name: str, keys: DataFrame) -> None:
        """Deletes the rows that `keys` names. The table's log is told the join, not the condition."""
        view = f"lookback_forget_{name}"
        keys.createOrReplaceTempView(view)
        same = " AND ".join(f"t.{column} <=> k.{column}" for column in _KNOWN_BY[name])
        merge = f"MERGE INTO {self._tables.identifier(name)} AS t USING {view} AS k ON {same} WHEN MATCHED THEN DELETE"
        try:
            self._retried(name, lambda: self._tables.spark.sql(merge))
        finally:
            self._tables.spark.catalog.dropTempView(view)

    def _retried(self, name: str, act: Callable[[], object]) -> None:
        if not retry_on_conflict(self._tables, name, act, _PATIENCE):
            raise SetupError(
                f"others keep writing to {self._tables.identifier(name)}; pause the ingest or the evaluation for a "
                "minute and make the same request again"
            )

    def _last_removal(self, name: str) -> tuple[int | None, dt.datetime | None]:
        """The last commit that deleted rows of a table and its time, among the last ones."""
        history = self._tables.history(name, 100).where(F.col("operation").isin("DELETE", "MERGE"))
        row = history.orderBy(F.col("version").desc()).select("version", F.unix_micros("timestamp")).head()
        if row is None:
            return None, None
        return int(row[0]), dt.datetime.fromtimestamp(row[1] / 1e6, dt.timezone.utc)


def _same(name: str) -> Column:
    return reduce(and_, [F.col(f"t.{column}").eqNullSafe(F.col(f"k.{column}")) for column in _KNOWN_BY[name]])


def _waits(checkpoint: Path, commit: int) -> bool:
    """Whether an evaluation that has begun has not judged a commit yet."""
    if not checkpoint.exists():
        return False
    judged = Checkpoint(checkpoint).read_last_judged()
    return judged is None or judged < commit


def _minute(time_: dt.datetime) -> str:
    return time_.strftime("%Y-%m-%dT%H:%MZ")
