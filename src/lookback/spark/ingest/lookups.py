"""Looks events up in tables, each read at a single version, and finds events to reject."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812

from lookback.core.errors import SetupError
from lookback.core.streams.lookups import REJECT
from lookback.core.values.texts import first_line, quote_identifier
from lookback.spark.ingest.fields import REASON, find_source_columns, make_fields, quote_value
from lookback.spark.tables.conflicts import SPARK_ERRORS

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from lookback.core.streams.declaration import Stream
    from lookback.core.streams.lookups import Lookup
    from lookback.spark.tables.lakehouse import Tables

# A column besides a table's keys: a struct of the looked-up fields and the reason why one of them is unusable. For each
# key, the minimum and the maximum are kept.
_FOUND, _MIN, _MAX = "__found", "__min", "__max"
_FIELDS, _PROBLEM = "fields", "problem"


@dataclass(frozen=True)
class Lookups:
    """The look-ups of a stream, in tables that may change at any time."""

    tables: Tables
    stream: Stream

    def require(self) -> None:
        """Raises SetupError if a table is missing or lacks a column."""
        for lookup, version in self._pin():
            self._read(lookup, version)

    def join(self, events: DataFrame, *, are_few: bool) -> DataFrame:
        """Adds the looked-up fields to checked `events`, from each table's newest version, and REASON if it rejects.

        If `are_few`, the tables are filtered by the keys of the events before the aggregation by key. Raises SetupError
        as `require` does.
        """
        for lookup, version in self._pin():
            events = self._join(events, lookup, version, are_few)
        return events

    def _pin(self) -> list[tuple[Lookup, int]]:
        """Returns the look-ups with the version of the table to read; all look-ups in a table share one version."""
        tables = dict.fromkeys(lookup.table for lookup in self.stream.lookups)
        versions = {table: self._read_version(table) for table in tables}
        return [(lookup, versions[lookup.table]) for lookup in self.stream.lookups]

    def _read_version(self, table: str) -> int:
        place, stream = self.tables.identifier(table), self.stream.name
        try:
            if self.tables.exists(table):
                return self.tables.version(table)
        except SPARK_ERRORS as error:
            raise SetupError(
                f"table {place}, in which stream {stream!r} looks events up, has no readable versions: "
                f"{first_line(error):.300}; name a Delta table in `lookups`"
            ) from error
        raise SetupError(
            f"table {place}, in which stream {stream!r} looks events up, does not exist, or is not a Delta table, or "
            "you may not read it; correct `lookups` in the declaration, or create the table first"
        )

    def _join(self, events: DataFrame, lookup: Lookup, version: int, are_few: bool) -> DataFrame:
        keys = {name: f"__key{at}" for at, name in enumerate(lookup.on)}
        found = self._read(lookup, version).toDF(*keys.values(), _FOUND)
        if are_few:
            wanted = events.select(*[F.col(name).alias(key) for name, key in keys.items()]).distinct()
            found = found.join(F.broadcast(wanted), list(keys.values()), "left_semi")
        found = found.groupBy(*keys.values()).agg(F.min(_FOUND).alias(_MIN), F.max(_FOUND).alias(_MAX))
        same = reduce(and_, [F.col(name) == F.col(key) for name, key in keys.items()])
        joined = events.join(F.broadcast(found) if are_few else found, same, "left")
        values = {name: F.when(_is_found(), F.col(_MIN)[_FIELDS][name]) for name in lookup.fields}
        reason = F.concat_ws("; ", F.col(REASON), *_explain(lookup))
        added = {**values, lookup.version_field: F.lit(version).cast("bigint"), REASON: F.when(reason != "", reason)}
        return joined.withColumns(added).drop(*keys.values(), _MIN, _MAX)

    def _read(self, lookup: Lookup, version: int) -> DataFrame:
        """Reads the rows of a table that have usable keys: the keys in the order of `on`, and _FOUND."""
        rows = self.tables.read(lookup.table, version)
        place = f"table {lookup.table}, version {version}"
        columns = {name: quote_identifier(column) for name, column in lookup.on.items()}
        own = self.stream.own_fields
        # Keys and values are cast like those of a source, which also finds unusable ones.
        by = replace(self.stream, fields={name: own[name] for name in lookup.on}, columns=columns, lookups=())
        brought = replace(self.stream, fields=lookup.fields, columns=lookup.columns, lookups=())
        self._require_columns(rows, lookup, [by, brought])
        (keys, unusable), (values, problem) = (make_fields(rows, fields, place) for fields in (by, brought))
        found = F.struct(F.struct(*values).alias(_FIELDS), problem.alias(_PROBLEM))
        rows = rows.where(unusable.isNull()).select(*keys, found.alias(_FOUND))
        return rows.dropna(subset=list(lookup.on))

    def _require_columns(self, rows: DataFrame, lookup: Lookup, parts: list[Stream]) -> None:
        """Raises SetupError if the table lacks a column from which its keys or fields are made."""
        there = {name.lower() for name in rows.columns}
        needed = [name for part in parts for field in part.fields for name in find_source_columns(part, field)]
        lacking = [name for name in dict.fromkeys(needed) if name.lower() not in there]
        if lacking:
            raise SetupError(
                f"table {self.tables.identifier(lookup.table)}, in which stream {self.stream.name!r} looks events up, "
                f"has no column {', '.join(lacking)}; there are {', '.join(sorted(rows.columns))}. Correct `lookups` "
                "in the declaration, or alter the table"
            )


def _is_found() -> Column:
    """The condition that the key has a row, and that all its rows agree in the looked-up fields."""
    return F.col(_MIN).isNotNull() & F.col(_MIN).eqNullSafe(F.col(_MAX))


def _explain(lookup: Lookup) -> list[Column]:
    """Returns the possible reasons to reject a joined row; each is NULL if it does not apply."""
    key = [quote_value(F.col(name)) for name in lookup.on]
    subject = F.concat(F.lit(f"{', '.join(lookup.on)}: "), F.concat_ws(", ", *key))
    is_missing, is_found = F.col(_MIN).isNull(), _is_found()
    reasons = [F.when(is_found, F.concat(F.lit(f"table {lookup.table}: "), F.col(_MIN)[_PROBLEM]))]
    if lookup.missing == REJECT:
        text = F.concat(subject, F.lit(f" is not in table {lookup.table}: add its row there, then --retry-rejected"))
        reasons.append(F.when(is_missing, text))
    if lookup.ambiguous == REJECT:
        text = F.concat(
            subject,
            F.lit(
                f" has several rows in table {lookup.table}, which differ in {', '.join(lookup.fields)}: leave one of"
            ),
            F.lit(" them there, then --retry-rejected"),
        )
        reasons.append(F.when(~is_missing & ~is_found, text))
    return reasons
