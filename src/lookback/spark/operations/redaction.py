"""Removes the values that only forgotten events had from the texts and measures of remaining rows.

A value that a remaining event shares, such as a shop's name, reveals nothing about the person and stays.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StructType

from lookback.core.rules.keys import KeyPart
from lookback.core.streams.alerts import REMOVED
from lookback.core.values.columns import from_text, to_text
from lookback.core.values.types import DataType
from lookback.spark.explaining.keys import add_texts, list_columns
from lookback.spark.tables.conflicts import change_table
from lookback.spark.tables.schemas import PRODUCT_TABLES
from lookback.spark.tables.sqltexts import quote_name

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from lookback.core.streams.declaration import Stream
    from lookback.spark.tables.lakehouse import Tables

# The columns with texts written by people, rules or errors.
TEXTS: dict[str, tuple[str, ...]] = {
    "alerts": ("measures", "message"),
    "reviews": ("note",),
    "labels": ("label", "source"),
    "snoozes": ("reason",),
    "lists": ("reason",),
    "notifications": ("error",),
    "rule_log": ("message",),
    "rejected_events": ("raw", "reason"),
}
# A shorter value may occur in any text by chance; it is removed only if the request names its field.
_MIN_CHARACTERS = 4
# A shorter value must match as a whole word or number.
_MIN_UNIQUE_CHARACTERS = 8


class OwnValue(NamedTuple):
    """A value that only forgotten events have. `name` is that of a field, or of the entry of a key."""

    name: str
    text: str


def list_identifying(stream: Stream, keys: Iterable[KeyPart]) -> list[KeyPart]:
    """Lists the values of events that can identify a person: of fields, and of the entries of rules' keys.

    Boolean values and those of arrays, structs and times of events do not identify anybody.
    """
    fields = (KeyPart(name, name, type_, frozenset([name])) for name, type_ in stream.fields.items())
    return [
        part
        for part in dict.fromkeys([*fields, *keys])
        if part.column != stream.event_time and not str(part.type).startswith(("boolean", "array", "struct", "map"))
    ]


def find_own_values(gone: DataFrame, staying: DataFrame, stream: Stream, values: Sequence[KeyPart]) -> DataFrame:
    """Finds the values that the events `gone` have and the events `staying` do not, with the columns of OwnValue."""

    def read_values(events: DataFrame) -> DataFrame:
        columns = zip(values, list_columns(values), strict=True)
        pairs = [F.struct(F.lit(part.name).alias("name"), each.cast("string").alias("text")) for part, each in columns]
        found = add_texts(events, stream, values).select(F.explode(F.array(*pairs)).alias("pair"))
        return found.select("pair.*").where("text <> ''")

    own = read_values(gone).distinct()
    theirs = read_values(staying).join(F.broadcast(own), ["name", "text"], "left_semi").distinct()
    return own.join(theirs, ["name", "text"], "left_anti")


def select_texts(own: Iterable[OwnValue], values: Sequence[KeyPart], asked: Collection[str]) -> list[str]:
    """Selects the values to look for, in every form that a text may show. The request names the fields `asked`."""
    parts: dict[str, list[KeyPart]] = {}
    for part in values:
        parts.setdefault(part.name, []).append(part)
    return sorted(
        {
            form
            for name, text in own
            for part in parts[name]
            if len(text) >= _MIN_CHARACTERS or not part.fields.isdisjoint(asked)
            for form in _list_forms(part.type, text)
        },
        key=lambda form: (-len(form), form),
    )


def _list_forms(type_: DataType, text: str) -> Iterator[str]:
    """Lists the forms in which a text may show a value: as written by Spark, JSON and Python."""
    yield text
    with suppress(ValueError, InvalidOperation):
        typed = from_text(type_, text)
        yield to_text(typed) or text
        if isinstance(typed, Decimal):
            # Averages have more digits, casts to double fewer.
            yield format(typed.normalize(), "f")
        if isinstance(typed, dt.datetime):
            yield typed.isoformat()
    for written in (json.dumps(text), json.dumps(text, ensure_ascii=False), repr(text)):
        yield written[1:-1]


class Redactor:
    """Replaces values within texts; the values must be sorted longest first."""

    def __init__(self, values: Collection[str]) -> None:
        self._values = [(value.casefold(), _compile(value)) for value in values]

    def redact(self, text: str | None) -> str | None:
        """Returns the text without the values."""
        if text is None:
            return None
        folded = text.casefold()
        for value, pattern in self._values:
            if value in folded:
                text = pattern.sub(REMOVED, text)
        return text

    def redact_row(self, *cells: Any) -> tuple[Any, ...]:
        """Returns the cells of a row without the values: replaces them in texts, and sets map entries to NULL."""
        done: list[Any] = []
        for cell in cells:
            if isinstance(cell, dict):
                done.append({name: text if self.redact(text) == text else None for name, text in cell.items()})
            else:
                done.append(self.redact(cell))
        if isinstance(cells[0], dict) and done[0] != cells[0] and REMOVED not in (done[-1] or ""):
            # A proof recognizes redacted rows by this mark.
            done[-1] = f"{done[-1] or ''} {REMOVED}".strip()
        return tuple(done)


def _compile(value: str) -> re.Pattern[str]:
    pattern, is_short = re.escape(value), len(value) < _MIN_UNIQUE_CHARACTERS
    if re.fullmatch(r"-?\d+(\.\d+)?", value):
        # Matches the same number with more trailing zeros, but no other number.
        zeros, edge = "0*" if "." in value else r"(?:\.0+)?", r"\w" if is_short else r"\d"
        pattern = rf"(?<![{edge}.]){pattern}{zeros}(?!{edge}|\.\d)"
    elif is_short:
        pattern = rf"(?<!\w){pattern}(?!\w)"
    return re.compile(pattern, re.IGNORECASE)


class Redactions:
    """The rows that contain some of the values, which come from `select_texts`."""

    def __init__(self, tables: Tables, values: Collection[str]) -> None:
        self._tables, self._values = tables, values

    def count(self) -> dict[str, int]:
        """Counts the rows to change, by table. Changes nothing."""
        return {name: rows for name, _, rows in self._find()}

    def make(self) -> dict[str, int]:
        """Removes the values and returns the number of changed rows by table. The tables' history shows no values."""
        counts = {}
        for name, pairs, rows in self._find():
            view = f"lookback_redact_{name}"
            pairs.createOrReplaceTempView(view)
            same = f"{_write_row('t', TEXTS[name])} = k.old"
            changed = ", ".join(f"t.{quote_name(each)} = k.new.{quote_name(each)}" for each in TEXTS[name])
            merge = (
                f"MERGE INTO {self._tables.identifier(name)} AS t USING {view} AS k ON {same} "
                f"WHEN MATCHED THEN UPDATE SET {changed}"
            )
            try:
                change_table(self._tables, name, lambda merge=merge: self._tables.spark.sql(merge))  # type: ignore[misc]
            finally:
                self._tables.spark.catalog.dropTempView(view)
            counts[name] = rows
        return counts

    def _find(self) -> Iterator[tuple[str, DataFrame, int]]:
        """Yields each table to change: its name, the texts before and after as `old` and `new`, and the row count."""
        if not self._values:
            return
        redactor = Redactor(self._values)
        for name, columns in TEXTS.items():
            if not self._tables.exists(name):
                continue
            type_ = StructType([PRODUCT_TABLES[name][each] for each in columns])
            redact = F.udf(redactor.redact_row, StructType(type_.fields), useArrow=False)
            texts = (
                self._tables.read(name)
                .groupBy(F.expr(_write_row("", columns)).alias("old"))
                .agg(F.count("*").alias("rows"), *(F.first(each).alias(each) for each in columns))
            )
            before: Column = F.struct(*columns)
            pairs = texts.select("old", "rows", before.alias("before"), redact(*columns).alias("new"))
            changed = (
                pairs.where(F.to_json("before") != F.to_json("new")).select("old", "new", "rows").localCheckpoint()
            )
            rows = changed.agg(F.sum("rows")).collect()[0][0]
            if rows:
                yield name, changed, int(rows)


def _write_row(side: str, columns: Iterable[str]) -> str:
    """Writes the SQL that joins the texts of a row into one text, since Spark cannot compare maps."""
    prefix = f"{side}." if side else ""
    return f"to_json(struct({', '.join(f'{prefix}{quote_name(each)} AS {quote_name(each)}' for each in columns)}))"
