"""Reads and changes lists: the values that rules look up with `in_list(field, 'name')`, in the table `lists`.

You may also change the table by SQL: evaluations and replays read its change feed.
"""

from __future__ import annotations

import datetime as dt
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812

from lookback.core.errors import DurationError, SetupError
from lookback.core.streams.declaration import Stream
from lookback.core.values.addresses import explain_no_range
from lookback.core.values.durations import parse_duration
from lookback.core.values.listchanges import CIDR
from lookback.core.values.suggestions import suggest
from lookback.core.values.texts import count_noun, quote_identifier
from lookback.core.values.times import parse_calendar_time, to_utc
from lookback.core.values.types import STRING, TIMESTAMP
from lookback.questions import read_question
from lookback.spark.ingest.fields import BLOCK, FILE, RAW, REASON, ROW
from lookback.spark.ingest.filerows import Files
from lookback.spark.ingest.rejected import Rejection, count_rejections
from lookback.spark.ingest.sources import Source
from lookback.spark.tables.conflicts import change_table
from lookback.spark.tables.lakehouse import keep

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from lookback.spark.tables.lakehouse import Tables

TABLE = "lists"
KINDS = (CIDR,)
# Limits for adding values to one list, and to all lists. An evaluation accepts larger lists, as it never stops for a
# list.
MAX_LIST_VALUES, MAX_VALUES = 1_000_000, 5_000_000
_MAX_PROBLEMS = 10
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)
_VALUE, _EXPIRES, _REASON, _KIND, _PROBLEM = "value", "expires_at", "reason", "kind", "problem"
# Columns of values that are offered to a list: `problem` is NULL for a usable one, `position` is their order.
_OFFERED = {
    _VALUE: "string", _EXPIRES: "timestamp", _REASON: "string", _KIND: "string", _PROBLEM: "string", "position": "int",
}  # fmt: skip
_NEW, _CHANGED, _DUPLICATE, _REJECTED = "new", "changed", "duplicate", "rejected"


@dataclass(frozen=True)
class ListReport:
    """Counts of the values offered to a list, by outcome.

    `changed` values were on the list with another expiry, kind or reason; `duplicates` were on it unchanged. `values`
    is the size of the list afterwards.
    """

    list: str
    offered: int
    added: int
    changed: int
    duplicates: int
    rejected: int
    values: int
    seconds: float
    rejections: tuple[Rejection, ...] = ()

    def __str__(self) -> str:
        return (
            f"list {self.list}: {self.offered:,} offered = {self.added:,} added + {self.changed:,} changed + "
            f"{self.duplicates:,} duplicates + {self.rejected:,} rejected; {count_noun(self.values, 'value')} now, in "
            f"{self.seconds:.1f} s"
        )


@dataclass(frozen=True)
class Removal:
    """The number of values removed from a list, and the values that were not on it."""

    list: str
    removed: int
    missing: tuple[str, ...] = ()

    def __str__(self) -> str:
        missing = f"; not on it: {', '.join(self.missing)}" if self.missing else ""
        return f"list {self.list}: {count_noun(self.removed, 'value')} removed{missing}"


def read_until(text: str) -> dt.datetime:
    """Parses when a value expires: a time, or a duration from now such as `30 days`. Raises SetupError."""
    with suppress(DurationError):
        return dt.datetime.now(dt.timezone.utc) + dt.timedelta(microseconds=parse_duration(text))
    try:
        return to_utc(parse_calendar_time(text))
    except ValueError:
        raise SetupError(
            f"a value expires at a time such as 2026-01-31T12:00:00Z or after a duration such as '30 days', "
            f"got {text!r:.100}"
        ) from None


def list_names(tables: Tables) -> list[str]:
    """Returns the names of the lists, ascending. A list without values does not exist."""
    if not tables.exists(TABLE):
        return []
    return [row["list"] for row in tables.ask("list_names").collect()]


def show_lists(tables: Tables) -> list[dict[str, Any]]:
    """Describes all lists by name: list, kind, values, expired (number of values, by the clock), last_added_at."""
    return [row.asDict() for row in tables.ask("counted_lists").collect()] if tables.exists(TABLE) else []


def read_list(tables: Tables, name: str) -> DataFrame:
    """Reads the rows of a list, ordered by value, with a column `state`: active or expired, by the clock.

    Raises SetupError if the list does not exist.
    """
    _require_list(tables, name)
    return tables.ask("list_rows", list=name)


def add_values(
    tables: Tables,
    name: str,
    values: Sequence[str],
    *,
    until: dt.datetime | None = None,
    reason: str | None = None,
    kind: str | None = None,
    author: str | None = None,
) -> ListReport:
    """Adds values to a list, and creates the list if needed. A value that is already on it gets the new expiry.

    Args:
        tables: The tables of the place.
        name: The list.
        values: The values.
        until: Aware time from which events no longer match the values; None for never.
        reason: Why the values are on the list.
        kind: cidr for ranges of addresses; None for the kind of the list, or plain values if it is new.
        author: Default: the current user.

    Raises:
        SetupError: If the name or a range is invalid, the list would exceed `MAX_LIST_VALUES`, or all lists together
            `MAX_VALUES`. Nothing is written then.
    """
    started = time.monotonic()
    tables.require_table(TABLE)
    kind = _choose_kind(tables, name, kind)
    problems = [problem for value in values if kind == CIDR and (problem := explain_no_range(value)) is not None]
    if problems:
        raise SetupError(f"list {name} is of kind cidr: {'; '.join(problems[:_MAX_PROBLEMS])}")
    if "" in values:
        raise SetupError(f"list {name}: a value is empty; leave it out")
    rows = [(value, until, reason, kind, None, position) for position, value in enumerate(values)]
    return _put(tables, name, tables.make_rows(rows, _OFFERED), author, started)


def remove_values(tables: Tables, name: str, values: Iterable[str]) -> Removal:
    """Removes values from a list. Raises SetupError if the list does not exist."""
    _require_list(tables, name)
    wanted = list(dict.fromkeys(values))
    text = "SELECT DISTINCT value FROM lists WHERE list = :list AND array_contains(:wanted, value)"
    found = {row[0] for row in tables.run(text, list=name, wanted=wanted).collect()}
    if found:
        text = "DELETE FROM lists WHERE list = :list AND array_contains(:wanted, value)"
        change_table(tables, TABLE, lambda: tables.change(text, list=name, wanted=wanted))
    return Removal(name, len(found), tuple(value for value in wanted if value not in found))


def import_values(
    tables: Tables,
    name: str,
    path: str | Path,
    *,
    value: str | None = None,
    until: dt.datetime | None = None,
    reason: str | None = None,
    kind: str | None = None,
    format: str | None = None,
    options: Mapping[str, str] | None = None,
    author: str | None = None,
) -> ListReport:
    """Adds the values in the files at `path` to a list, in one commit, as `add_values` does.

    The files may also have the columns `expires_at` and `reason`; `until` and `reason` apply to rows without them. If
    several rows have the same value, the last to expire counts. Unusable rows are rejected and counted.

    Args:
        tables: The tables of the place.
        name: The list.
        path: The files.
        value: Column of the values; default: `value`, or the only column.
        until: As in `add_values`.
        reason: As in `add_values`.
        kind: As in `add_values`.
        format: parquet, csv or json; default: from the file names.
        options: Spark's reader options.
        author: Default: the current user.

    Raises:
        SetupError: If the files cannot be read or lack the column, and as in `add_values`.
    """
    started = time.monotonic()
    tables.require_table(TABLE)
    kind = _choose_kind(tables, name, kind)
    bare = _make_file_stream(_VALUE, [])
    source = Source.find(tables.spark, bare, str(path), format, options)
    existing = Files(tables.spark, source, bare).list_columns()
    column = _choose_column(source, existing, value)
    taken = [each for each in (_EXPIRES, _REASON) if each in existing and each != column.lower()]
    checked, _ = Files(tables.spark, source, _make_file_stream(column, taken)).read_kept()
    text = F.col(quote_identifier(column)).cast("string")
    expires = F.col(_EXPIRES) if _EXPIRES in taken else F.lit(None).cast("timestamp")
    given = F.lit(None).cast("timestamp") if until is None else F.lit(until)
    because = F.col(_REASON) if _REASON in taken else F.lit(None).cast("string")
    wrong = F.when(text == "", F.lit(f"{column} is empty"))
    if kind == CIDR:
        wrong = F.coalesce(wrong, F.udf(_explain_no_range, "string", useArrow=False)(text))
    rows = checked.select(
        text.alias(_VALUE),
        F.coalesce(expires, given).alias(_EXPIRES),
        F.coalesce(because, F.lit(reason).cast("string")).alias(_REASON),
        F.lit(kind).cast("string").alias(_KIND),
        F.coalesce(REASON, wrong).alias(_PROBLEM),
        F.struct(FILE, BLOCK, ROW).alias("position"),
        RAW,
        FILE,
    )
    try:
        return _put(tables, name, rows, author, started)
    finally:
        with suppress(PySparkException):
            checked.unpersist()


def _put(tables: Tables, name: str, offered: DataFrame, author: str | None, started: float) -> ListReport:
    """Adds the offered rows to a list. `offered` has the columns of _OFFERED, and for files RAW and FILE."""
    judged = keep(tables.ask("list_outcomes", {"offered": offered}, list=name))
    try:
        counted = tables.run("SELECT outcome, count(*) AS rows FROM judged GROUP BY outcome", {"judged": judged})
        counts: dict[str, int] = dict(counted.collect())
        new, changed = counts.get(_NEW, 0), counts.get(_CHANGED, 0)
        own = _require_room(tables, name, new)
        rejections: tuple[Rejection, ...] = ()
        if counts.get(_REJECTED):
            refused = judged.where(F.col("outcome") == _REJECTED)
            rejections = count_rejections(refused, F.col(_PROBLEM), F.col(RAW), F.col(FILE))
        if new or changed:
            who = {"author": tables.current_user if author is None else author, "now": dt.datetime.now(dt.timezone.utc)}
            text = read_question("put_list_values")
            change_table(tables, TABLE, lambda: tables.change(text, {"judged": judged}, list=name, **who))
    finally:
        with suppress(PySparkException):
            judged.unpersist()
    return ListReport(
        list=name,
        offered=sum(counts.values()),
        added=new,
        changed=changed,
        duplicates=counts.get(_DUPLICATE, 0),
        rejected=counts.get(_REJECTED, 0),
        values=own + new,
        seconds=time.monotonic() - started,
        rejections=rejections,
    )


def _require_room(tables: Tables, name: str, new: int) -> int:
    """Counts the values of the list. Raises SetupError if `new` more would exceed a limit."""
    values: dict[str, int] = {row["list"]: row["values"] for row in show_lists(tables)}
    own, all_ = values.get(name, 0), sum(values.values())
    for count, limit, what in ((own, MAX_LIST_VALUES, f"list {name}"), (all_, MAX_VALUES, "the table lists")):
        if new and count + new > limit:
            raise SetupError(
                f"{what} would have {count + new:,} values, and at most {limit:,} are allowed; nothing was written. "
                "If the values follow a pattern, write a condition in the rule; many attributes of one thing belong "
                "in a look-up table"
            )
    return own


def _choose_kind(tables: Tables, name: str, kind: str | None) -> str | None:
    """Returns the kind of new values: the given one, or that of the list. Raises SetupError."""
    if kind is not None and kind not in KINDS:
        raise SetupError(f"list {name}: unknown kind {kind!r:.40}; {suggest(kind, KINDS)}")
    text = "SELECT max(kind) AS kind, count(*) AS rows FROM lists WHERE list = :list"
    ((known, count),) = tables.run(text, list=name).collect()
    if not count and not _NAME.fullmatch(name):
        raise SetupError(
            f"{name!r:.120} is not a valid list name; use 1 to 100 letters, digits, '.', '_' and '-', "
            "such as allowed-terminals"
        )
    return kind or known


def _require_list(tables: Tables, name: str) -> None:
    tables.require_table(TABLE)
    names = list_names(tables)
    if name not in names:
        raise SetupError(f"unknown list {name!r:.120}; {suggest(name, names, '`lookback lists show` lists them')}")


def _make_file_stream(column: str, more: Iterable[str]) -> Stream:
    """Makes the declaration with which ingest reads the files; its fields are their columns."""
    types = {_EXPIRES: TIMESTAMP, _REASON: STRING}
    return Stream(
        name=TABLE, event_id=column, event_time=column, fields={column: STRING, **{each: types[each] for each in more}}
    )


def _explain_no_range(text: str | None) -> str | None:
    # Spark calls this for NULL too, whatever a condition around the call says.
    return None if text is None else explain_no_range(text)


def _choose_column(source: Source, existing: set[str], given: str | None) -> str:
    """Chooses the column of the values. Raises SetupError if it does not exist or is ambiguous."""
    if given is not None or _VALUE in existing:
        column = given or _VALUE
        if column.lower() in existing:
            return column
    elif len(existing) == 1:
        return next(iter(existing))
    problem = f"column {given!r} is missing" if given else "none of the columns is called value"
    raise SetupError(
        f"{source.path}: {problem}; the columns are {', '.join(sorted(existing))}. Choose one with --value"
    )
