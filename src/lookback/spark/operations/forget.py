"""Carries out privacy requests: permanently deletes a person's rows from every table.

A request is a condition over the fields of a stream. It deletes:

    events           rows that satisfy the condition; the evaluation sees the DELETE in the change feed and removes them
                     from its state
    alerts           all revisions of an alert that such an event triggered or is evidence of, or that has a matching
                     key: one that has every field of the condition and satisfies it, or has a value that only those
                     events had, whether of a field or of an expression in group_by
    reviews          reviews of these alerts
    labels           labels of these events
    snoozes          snoozes of a matching key
    lists            values that satisfy the condition, or that only those events had, in lists in which a rule of the
                     stream looks the field up
    late_events      rows about these events
    rule_log         rows whose message names such an event, or a session with a matching key
    rejected_events  rows that satisfy the condition when read with the current declaration of the stream

The events of the stream `alerts` are the alerts of other streams; they are deleted with all their revisions.

Alerts of other keys that merely counted such an event stay, and so do people's notes. But values that only those events
had are removed from them; see `lookback.spark.operations.redaction`. `rules` and `metrics` contain no events.

Dependent rows are deleted first and the events last, so that a request repeated after a kill finds all of them again.
Rows that the evaluation has written in the meantime are deleted after that. Events deleted earlier are found in the
change feed.
"""

from __future__ import annotations

import datetime as dt
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql import functions as F  # noqa: N812

from lookback.core.errors import ExpressionError, SetupError
from lookback.core.expressions.compiling import Expression, compile_expression
from lookback.core.values.texts import first_line
from lookback.core.values.times import to_utc
from lookback.core.values.types import BOOLEAN
from lookback.spark.checkpoints.checkpoint import Checkpoint
from lookback.spark.operations.dependents import KNOWN_BY, Dependents, list_key_parts, read_rules
from lookback.spark.operations.mentions import Mention, find_mentions
from lookback.spark.operations.redaction import (
    OwnValue,
    Redactions,
    find_own_values,
    list_identifying,
    select_texts,
)
from lookback.spark.stream.rebuild import has_outputs
from lookback.spark.tables.conflicts import SPARK_ERRORS, change_table
from lookback.spark.tables.properties import parse_file_retention, parse_log_retention

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from lookback.core.streams.declaration import Stream
    from lookback.places import Place
    from lookback.spark.tables.lakehouse import Tables

REMOVING = ("DELETE", "MERGE", "UPDATE")
# The maximum number of commits of a table's history to search for earlier deletions.
MAX_COMMITS = 10_000


@dataclass(frozen=True)
class Purge:
    """The SQL that removes deleted rows from a table's files too.

    Attributes:
        table: The table.
        statements: The SQL statements.
        after: The time (aware, UTC) from which on the statements work.
        log_until: The time until which the table's log may contain the values; the log's next checkpoint then drops
            them.
    """

    table: str
    statements: tuple[str, ...]
    after: dt.datetime
    log_until: dt.datetime


@dataclass(frozen=True)
class ForgetReport:
    """The result of a privacy request or, with dry_run, the result that it would have.

    Attributes:
        stream: The stream.
        where: The condition as it was understood.
        dry_run: Whether the rows were only counted.
        rows: The number of deleted rows by table.
        unreadable: The number of the stream's rejected rows that cannot be read and so were not searched.
        commit: The commit of the events table from which on the events no longer count in any window.
        waiting: True if the evaluation has not judged that commit yet. It may still write rows about the events; the
            same request, repeated later, deletes them. None if the checkpoint is elsewhere or out of reach.
        purges: The SQL left to run.
        redacted: By table, the number of remaining rows from which values that only these events had are removed.
        mentions: What other streams still have of the condition's values. The request deletes none of it.
    """

    stream: str
    where: str
    dry_run: bool
    rows: Mapping[str, int]
    unreadable: int
    commit: int | None
    waiting: bool | None
    purges: tuple[Purge, ...] = ()
    redacted: Mapping[str, int] = field(default_factory=dict)
    mentions: tuple[Mention, ...] = ()

    @property
    def total(self) -> int:
        """The number of rows in all tables."""
        return sum(self.rows.values())

    def __str__(self) -> str:
        return "\n".join(self.list_lines())

    def list_lines(self) -> list[str]:
        """Lists the lines of the report."""
        verb = "would be deleted" if self.dry_run else "deleted"
        lines = [f"{self.stream} where {self.where}: {self.total:,} rows {verb}"]
        lines += [f"  {name:<16}{count:>9,}" for name, count in self.rows.items()]
        if self.redacted:
            verb = "would lose" if self.dry_run else "lost"
            lines.append(f"Remaining rows {verb} the values that only these events had:")
            lines += [f"  {name:<16}{count:>9,}" for name, count in self.redacted.items()]
        if self.unreadable:
            lines.append(
                f"{self.unreadable:,} rejected rows of the stream cannot be read and were not searched; see them in "
                f"rejected_events where stream = '{self.stream}'"
            )
        if self.mentions:
            lines.append("Other streams are not part of this request, and still mention the values:")
            lines += [f"  {each}" for each in self.mentions]
        if self.waiting is not False and not self.dry_run:
            judged = "has not judged" if self.waiting else "may not have judged"
            lines.append(
                f"The evaluation {judged} commit {self.commit} yet, from which on the events no longer count. Until "
                "then it may write rows about them: repeat the request afterwards."
            )
        if self.purges:
            lines.append(
                "Old files and the change feed still contain the rows. From these times on, `lookback maintain` or "
                "this SQL removes them:"
            )
            lines += [f"  {_format_minute(p.after)}  {statement}" for p in self.purges for statement in p.statements]
            lines.append("The tables' logs may contain values until the first `lookback maintain` after these times:")
            lines += [f"  {_format_minute(p.log_until)}  {p.table}" for p in self.purges]
        if not self.dry_run:
            lines.append(
                "`lookback maintain` also removes older states of nightly proofs and older checkpoints that were moved "
                "aside. rules and metrics contain no events. Not searched: the texts of rules, and the source files of "
                "the events, which would bring the events back if you ingest them again."
            )
        return lines


def forget(
    tables: Tables,
    stream: Stream,
    where: str,
    *,
    dry_run: bool = False,
    checkpoint: str | Place | None = None,
    streams: Sequence[Stream] = (),
) -> ForgetReport:
    """Deletes all rows about the events that satisfy a condition; the module's docstring lists them by table.

    Ingest and the evaluation may keep running. You may repeat the request at any time, even after a kill; no row is
    counted or deleted twice.

    Args:
        tables: The tables of the deployment.
        stream: The stream.
        where: A condition over the stream's declared fields, in the language of rules.
        dry_run: True only counts the rows.
        checkpoint: The evaluation's folder, to see its progress; None if it is out of reach.
        streams: All declared streams, of which the report names those that still mention the values.

    Raises:
        ExpressionError: If the condition is invalid.
        SetupError: If a table is missing, the condition fails on a value, or other writers kept conflicting for five
            minutes.
    """
    condition, place, tables = forget_condition(stream, where), tables, tables.holding(stream)
    for name in (stream.name, *KNOWN_BY):
        if not tables.exists(name):
            raise SetupError(f"table {tables.identifier(name)} does not exist; `lookback init` creates missing tables")
    request = _Request(tables, stream, condition)
    try:
        rows, commit = request.count(), request.deleted_in
        redactions = request.find_redactions()
        mentions = request.find_mentions(place, streams, condition) if streams else ()
        if dry_run:
            redacted = redactions.count()
        else:
            deleted, removed_at = request.delete()
            rows, commit = deleted, removed_at if removed_at is not None else commit
            redacted = redactions.make()
    except SPARK_ERRORS as error:
        raise SetupError(
            f"the condition {condition.sql!r} cannot be computed for every row: {first_line(error):.300}. "
            "Guard it, for example with try_cast() or nullif(). Rows that were already deleted stay deleted."
        ) from error
    waiting = (
        False if commit is None else None if checkpoint is None else _is_waiting(tables, stream, checkpoint, commit)
    )
    purges = () if dry_run else tuple(request.find_purges({**rows, **redacted}))
    return ForgetReport(
        stream.name, condition.sql, dry_run, rows, request.unreadable, commit, waiting, purges, redacted, mentions
    )


def forget_condition(stream: Stream, where: str) -> Expression:
    """Compiles the condition of a request.

    Raises:
        ExpressionError: If `where` is not a condition over the stream's fields.
    """
    condition = compile_expression(where, stream.fields)
    problem = ""
    if condition.type != BOOLEAN:
        problem = f"{condition.sql!r} is of type {condition.type}, not a condition; compare it with a value"
    elif condition.memberships:
        problem = "in_list() reads lists, which change; name the values themselves, such as `id in (17, 18)`"
    elif not condition.fields:
        problem = f"the condition {condition.sql!r} does not name a field; select events, such as `id = 17`"
    elif stream.table and (mapped := sorted(name for name in condition.fields if stream.find_origin(name)[0])):
        problem = (
            f"{mapped[0]} has another name in {stream.table}; name fields that have the name of their column, or delete "
            "the rows there, which reaches rules too"
        )
    if problem:
        raise ExpressionError([problem])
    return condition


def to_spark_sql(condition: Expression) -> str:
    """Writes the compiled condition for Spark's parser, so that Spark gets the checked condition, not the user's text.

    Before parsing, Spark replaces ${name} with settings and environment variables, even within quotes, so the brace is
    escaped.
    """
    return condition.sql.replace("${", "$\\u007b")


class _Removal(NamedTuple):
    """A commit that deleted rows of a table, with its time."""

    commit: int
    at: dt.datetime


class _Request:
    """A running request; `deleted_in` is the last earlier commit that deleted such events, None if unknown."""

    def __init__(self, tables: Tables, stream: Stream, condition: Expression) -> None:
        self._tables, self._stream, self._fields = tables, stream, sorted(condition.fields)
        self._text = to_spark_sql(condition)
        self._holds = F.expr(self._text)
        self.deleted_in: int | None = None
        self.unreadable = 0
        self._keys: dict[str, DataFrame] = {}
        self._rows: dict[str, int] = {}

    def count(self) -> dict[str, int]:
        """Finds all rows to delete, and returns their number by table. Changes nothing."""
        events, columns = self._tables.read_events(self._stream.name), list(self._stream.table_columns)
        present, deleted = events.where(self._holds).select(*columns), self._find_deleted_before()
        # Local checkpoints, because the rows from which they are computed will be deleted.
        gone = (present if deleted is None else present.union(deleted.select(*columns))).localCheckpoint()
        ids = gone.select(self._id).distinct().localCheckpoint()
        staying = events.where(~F.coalesce(self._holds, F.lit(False)))
        rules = read_rules(self._tables, self._stream)
        self._values = list_identifying(self._stream, list_key_parts(rules))
        own = find_own_values(gone, staying, self._stream, self._values).localCheckpoint()
        self._dependents = Dependents(self._tables, self._stream, self._fields, self._holds, ids, own, rules)
        rejected, self.unreadable = self._dependents.find_rejected()
        self._keys = {**self._dependents.find(), "rejected_events": rejected}
        self._rows = {name: self._select_matching(name, keys).count() for name, keys in self._keys.items()}
        if not self._stream.is_of_alerts:
            self._rows[self._stream.name] = present.count()
        return {name: self._rows[name] for name in (self._stream.name, *KNOWN_BY)}

    def find_redactions(self) -> Redactions:
        """Finds the values that remaining rows must not contain."""
        values = [OwnValue(*row) for row in self._dependents.own.collect()]
        return Redactions(self._tables, select_texts(values, self._values, self._fields))

    def find_mentions(self, place: Tables, streams: Sequence[Stream], condition: Expression) -> tuple[Mention, ...]:
        """Finds what other streams have of the condition's values."""
        return tuple(find_mentions(place, streams, condition, self._holds, self._dependents))

    def delete(self) -> tuple[dict[str, int], int | None]:
        """Deletes the counted rows. Returns their number by table, and the commit that deleted events, if any."""
        name = self._stream.name
        rows = {each: self._rows[each] for each in (name, *KNOWN_BY)}
        for dependent, keys in self._keys.items():
            if rows[dependent]:
                self._delete_matching(dependent, keys)
        if not rows[name]:
            return rows, None
        if self._stream.is_of_alerts:
            # The stream's events are rows of alerts, which are already deleted.
            removal = self._find_last_removal(name)
            return rows, None if removal is None else removal.commit
        before = self._tables.version(name)
        table = self._tables.identifier(name)
        change_table(self._tables, name, lambda: self._tables.spark.sql(f"DELETE FROM {table} WHERE {self._text}"))
        removal = self._find_last_removal(name)
        if removal is None or removal.commit <= before:
            return {**rows, name: 0}, None  # another request deleted the events first
        # These include events that arrived after the count. Rows written about them in the meantime are deleted too.
        deleted = self._read_deleted(before + 1, removal.commit).localCheckpoint()
        rows[name] = deleted.count()
        ids = self._dependents.ids.union(deleted.select(self._id)).distinct().localCheckpoint()
        for dependent, keys in replace(self._dependents, ids=ids).find().items():
            if more := self._select_matching(dependent, keys).count():
                self._delete_matching(dependent, keys)
                rows[dependent] += more
        return rows, removal.commit

    def find_purges(self, rows: Mapping[str, int]) -> list[Purge]:
        """Finds the SQL to purge the files of tables from which rows were deleted, by this request or recently."""
        purges = []
        for name in rows:
            if rows[name]:
                removed_at = dt.datetime.now(dt.timezone.utc)
            elif (removal := self._find_last_removal(name)) is not None:
                removed_at = removal.at
            else:
                continue
            properties: Mapping[str, str] = self._tables.describe(name)["properties"]
            statements = [f"VACUUM {self._tables.identifier(name)}"]
            if properties.get("delta.enableDeletionVectors") == "true":
                # With deletion vectors, deleted rows are only marked; REORG rewrites the files without them.
                statements.insert(0, f"REORG TABLE {self._tables.identifier(name)} APPLY (PURGE)")
            after, log_until = (removed_at + parse(properties) for parse in (parse_file_retention, parse_log_retention))
            purges.append(Purge(name, tuple(statements), after, log_until))
        return purges

    @property
    def _id(self) -> Column:
        return F.col(self._stream.event_id).cast("string").alias("event_id")

    def _find_deleted_before(self) -> DataFrame | None:
        """Finds matching events that were deleted earlier, as far back as the change feed can be read."""
        name = self._stream.name
        history = self._tables.history(name, MAX_COMMITS).where(F.col("operation").isin(*REMOVING))
        versions = sorted(row[0] for row in history.select("version").collect())
        while versions:
            try:
                events = self._read_deleted(versions[0], versions[-1]).localCheckpoint()
            except SPARK_ERRORS:
                # The files of old changes have been vacuumed, but newer ones may exist.
                versions = versions[len(versions) // 2 + 1 :]
                continue
            row = events.agg(F.max("_commit_version")).head()
            self.deleted_in = None if row is None else row[0]
            return events
        return None

    def _read_deleted(self, first: int, last: int | None) -> DataFrame:
        """Reads the request's events that these commits deleted."""
        feed = self._tables.read_changes(self._stream.name, first, last)
        return feed.where((F.col("_change_type") == "delete") & self._holds)

    def _select_matching(self, name: str, keys: DataFrame) -> DataFrame:
        return self._tables.read(name).alias("t").join(keys.alias("k"), _match_rows(name), "left_semi")

    def _delete_matching(self, name: str, keys: DataFrame) -> None:
        """Deletes the rows that match `keys`. The table's history shows the join, not the condition."""
        view = f"lookback_forget_{name}"
        keys.createOrReplaceTempView(view)
        same = " AND ".join(f"{_write_column('t', each)} <=> {_write_column('k', each)}" for each in KNOWN_BY[name])
        merge = f"MERGE INTO {self._tables.identifier(name)} AS t USING {view} AS k ON {same} WHEN MATCHED THEN DELETE"
        try:
            change_table(self._tables, name, lambda: self._tables.spark.sql(merge))
        finally:
            self._tables.spark.catalog.dropTempView(view)

    def _find_last_removal(self, name: str) -> _Removal | None:
        """Finds the last commit that deleted rows of a table, among the last 100."""
        history = self._tables.history(name, 100).where(F.col("operation").isin("DELETE", "MERGE"))
        row = history.orderBy(F.col("version").desc()).select("version", F.unix_micros("timestamp").alias("at")).head()
        return None if row is None else _Removal(int(row["version"]), to_utc(row["at"]))


def _match_rows(name: str) -> Column:
    pairs = [(F.expr(_write_column("t", each)), F.expr(_write_column("k", each))) for each in KNOWN_BY[name]]
    return reduce(and_, [mine.eqNullSafe(theirs) for mine, theirs in pairs])


def _write_column(side: str, column: str) -> str:
    """Writes a column as SQL; a key becomes text, since Spark cannot compare maps."""
    return f"to_json(array_sort(map_entries({side}.key)))" if column == "key" else f"{side}.{column}"


def _is_waiting(tables: Tables, stream: Stream, folder: str | Place, commit: int) -> bool | None:
    """Returns whether a started evaluation has yet to judge the commit; None if its checkpoint is elsewhere."""
    checkpoint = Checkpoint(tables.find_place(folder))
    if not checkpoint.folder.exists():
        return None if has_outputs(tables, stream) else False

    def count_files(commit: int) -> int:
        (row,) = tables.history(stream.name).where(F.col("version") == commit).collect()
        figures = {name: int(text) for name, text in (row["operationMetrics"] or {}).items() if text.isdecimal()}
        # Where whole files are removed, their rows are the changes.
        whole = figures.get("numAddedFiles", 0) + figures.get("numRemovedFiles", 0)
        return figures.get("numAddedChangeFiles", 0) or whole or sys.maxsize

    return not checkpoint.has_judged(commit, count_files)


def _format_minute(time_: dt.datetime) -> str:
    return time_.strftime("%Y-%m-%dT%H:%MZ")
