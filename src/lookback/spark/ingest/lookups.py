"""Joins the tables in which a stream looks its events up, each as it is at one moment, and finds events to reject."""

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
from lookback.spark.tables.lakehouse import SPARK_ERRORS

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from lookback.core.streams.declaration import Stream
    from lookback.core.streams.lookups import Lookup
    from lookback.spark.tables.lakehouse import Tables

# A column of a table's rows beside their keys: the fields that they bring, and why one of these cannot be used. Of the rows
# of a key it has the least and the greatest.
_FOUND, _LEAST, _GREATEST = "__found", "__least", "__greatest"
_FIELDS, _PROBLEM = "fields", "problem"


@dataclass(frozen=True)
class Lookups:
    """The look-ups of a stream in tables that others may change meanwhile."""

    tables: Tables
    stream: Stream

    def require(self) -> None:
        """Raises SetupError if a table is not there, or lacks a column."""
        for lookup, version in self._pin():
            self._read(lookup, version)

    def join(self, events: DataFrame, *, are_few: bool) -> DataFrame:
        """Adds the looked-up fields to checked `events`, all from the newest version of each table; REASON where it rejects.

        are_few: the tables are reduced to the keys of the events before their rows are brought together by key. Raises
        SetupError as `require` does.
        """
        for lookup, version in self._pin():
            events = self._join(events, lookup, version, are_few)
        return events

    def _pin(self) -> list[tuple[Lookup, int]]:
        """Returns the look-ups, each with the version of its table in which to look up; one version for each table."""
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
                f"table {place}, in which stream {stream!r} looks events up, has no versions that can be read: "
                f"{first_line(error):.300}; name a Delta table in `lookups`"
            ) from error
        raise SetupError(
            f"table {place}, in which stream {stream!r} looks events up, is not there, or is no Delta table, or you may not "
            "read it; mend `lookups` in the declaration, or make the table first"
        )

    def _join(self, events: DataFrame, lookup: Lookup, version: int, are_few: bool) -> DataFrame:
        keys = {name: f"__key{at}" for at, name in enumerate(lookup.on)}
        found = self._read(lookup, version).toDF(*keys.values(), _FOUND)
        if are_few:
            wanted = events.select(*[F.col(name).alias(key) for name, key in keys.items()]).distinct()
            found = found.join(F.broadcast(wanted), list(keys.values()), "left_semi")
        found = found.groupBy(*keys.values()).agg(F.min(_FOUND).alias(_LEAST), F.max(_FOUND).alias(_GREATEST))
        same = reduce(and_, [F.col(name) == F.col(key) for name, key in keys.items()])
        joined = events.join(F.broadcast(found) if are_few else found, same, "left")
        values = {name: F.when(_is_found(), F.col(_LEAST)[_FIELDS][name]) for name in lookup.fields}
        reason = F.concat_ws("; ", F.col(REASON), *_explain(lookup))
        added = {**values, lookup.version_field: F.lit(version).cast("bigint"), REASON: F.when(reason != "", reason)}
        return joined.withColumns(added).drop(*keys.values(), _LEAST, _GREATEST)

    def _read(self, lookup: Lookup, version: int) -> DataFrame:
        """Reads the rows of a table that can be found: the keys in the order of `on`, and _FOUND."""
        rows = self.tables.read(lookup.table, version)
        place = f"table {lookup.table}, version {version}"
        columns = {name: quote_identifier(column) for name, column in lookup.on.items()}
        own = self.stream.own_fields
        # Keys and values are cast as those of a source are, which says what cannot be used.
        by = replace(self.stream, fields={name: own[name] for name in lookup.on}, columns=columns, lookups=())
        brought = replace(self.stream, fields=lookup.fields, columns=lookup.columns, lookups=())
        self._require_columns(rows, lookup, [by, brought])
        (keys, unusable), (values, problem) = (make_fields(rows, fields, place) for fields in (by, brought))
        found = F.struct(F.struct(*values).alias(_FIELDS), problem.alias(_PROBLEM))
        rows = rows.where(unusable.isNull()).select(*keys, found.alias(_FOUND))
        return rows.dropna(subset=list(lookup.on))

    def _require_columns(self, rows: DataFrame, lookup: Lookup, parts: list[Stream]) -> None:
        """Raises SetupError if the table lacks a column that its keys or its fields are made from."""
        there = {name.lower() for name in rows.columns}
        needed = [name for part in parts for field in part.fields for name in find_source_columns(part, field)]
        lacking = [name for name in dict.fromkeys(needed) if name.lower() not in there]
        if lacking:
            raise SetupError(
                f"table {self.tables.identifier(lookup.table)}, in which stream {self.stream.name!r} looks events up, has no "
                f"column {', '.join(lacking)}; there are {', '.join(sorted(rows.columns))}. Mend `lookups` in the declaration, or "
                "alter the table"
            )


def _is_found() -> Column:
    """The condition that there is a row, and that all rows of the key agree in what is looked up."""
    return F.col(_LEAST).isNotNull() & F.col(_LEAST).eqNullSafe(F.col(_GREATEST))


def _explain(lookup: Lookup) -> list[Column]:
    """Returns the reasons for which a row that was joined is rejected, each NULL where it is none."""
    key = [quote_value(F.col(name)) for name in lookup.on]
    subject = F.concat(F.lit(f"{', '.join(lookup.on)}: "), F.concat_ws(", ", *key))
    is_missing, is_found = F.col(_LEAST).isNull(), _is_found()
    reasons = [F.when(is_found, F.concat(F.lit(f"table {lookup.table}: "), F.col(_LEAST)[_PROBLEM]))]
    if lookup.missing == REJECT:
        text = F.concat(subject, F.lit(f" is not in table {lookup.table}: add its row there, then --retry-rejected"))
        reasons.append(F.when(is_missing, text))
    if lookup.ambiguous == REJECT:
        text = F.concat(
            subject,
            F.lit(
                f" has several rows in table {lookup.table}, which differ in {', '.join(lookup.fields)}: leave one of them"
            ),
            F.lit(" there, then --retry-rejected"),
        )
        reasons.append(F.when(~is_missing & ~is_found, text))
    return reasons
