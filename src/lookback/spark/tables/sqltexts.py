"""Writes names and values as SQL, and times as columns."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812

from lookback.core.errors import SetupError
from lookback.core.values.texts import quote_identifier
from lookback.core.values.times import parse_time

if TYPE_CHECKING:
    from pyspark.sql import Column


def quote_name(text: str) -> str:
    """Quotes a name for SQL, in backticks. Raises SetupError if Spark would substitute a part of it."""
    return quote_identifier(refuse_substitution(text, "name"))


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
