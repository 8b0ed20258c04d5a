"""Writes names and values as SQL, and times as columns."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812

from lookback.core.errors import SetupError
from lookback.core.streams.fields import nest_parts
from lookback.core.values.texts import quote_identifier
from lookback.core.values.times import parse_time

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pyspark.sql import Column


def quote_name(text: str) -> str:
    """Quotes a name for SQL, in backticks. Raises SetupError if Spark would substitute a part of it."""
    return quote_identifier(refuse_substitution(text, "name"))


def quote_path(parts: Iterable[str]) -> str:
    """Quotes the names of a column and of parts of a struct below it; see `quote_name`."""
    return ".".join(map(quote_name, parts))


def quote_field(name: str) -> str:
    """Quotes the name of a field, which has dots if it is a part of a struct; see `quote_name`."""
    return quote_path(name.split("."))


def select_field(name: str, known_as: str | None = None) -> Column:
    """Returns a field as a column, also if it is a part of a struct; `known_as` is the column's name, default: its own."""
    return F.col(quote_field(name)).alias(known_as or name)


def write_plain_name(name: str) -> str:
    """Writes the name of a field without dots, which PySpark's Arrow functions take for a part of a struct."""
    return name.replace(".", ":")


def read_plain_name(name: str) -> str:
    """Returns the name of a field from what `write_plain_name` returned."""
    return name.replace(":", ".")


def nest_columns(fields: Mapping[str, Column]) -> list[Column]:
    """Returns the columns that hold fields, in order, each with its name; parts of a struct become one column."""
    return _name_columns(nest_parts(fields, lambda parts: F.struct(*_name_columns(parts))))


def _name_columns(columns: Mapping[str, Column]) -> list[Column]:
    return [column.alias(name) for name, column in columns.items()]


def quote_text(text: str) -> str:
    """Quotes a text for SQL, in single quotes. Raises SetupError if Spark would substitute a part of it."""
    return _quote(refuse_substitution(text, "text"))


def write_value(value: object) -> str:
    """Returns the SQL for a value of a question. Delta's parser does not accept parameters."""
    if value is None or isinstance(value, bool):
        return {None: "NULL", True: "true", False: "false"}[value]
    if isinstance(value, dt.datetime):
        return f"timestamp_micros({parse_time(value)})"
    if isinstance(value, int):
        return f"{value}L"
    if isinstance(value, (list, tuple)):
        return f"CAST(array({', '.join(map(write_value, value))}) AS ARRAY<STRING>)"
    assert isinstance(value, str), value
    # Spark does not substitute a variable that begins with an escaped $.
    return _quote(value).replace("$", "\\u0024")


def _quote(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def refuse_substitution(text: str, what: str) -> str:
    """Returns `text`, which Spark will parse as SQL. Raises SetupError if Spark would substitute a part of it first.

    `what` is what the error calls the text, such as "name".
    """
    if "${" in text:
        raise SetupError(
            f"{text!r} contains ${{, which Spark would replace with a setting or a variable; use another {what}"
        )
    return text


def to_timestamp(microseconds: int) -> Column:
    """Returns a Spark timestamp, exact to the microsecond, from microseconds since 1970."""
    return F.timestamp_micros(F.lit(microseconds).cast("bigint"))
