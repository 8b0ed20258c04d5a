"""The harness and ingest read a text alike: both refuse it, or both take the same value from it."""

from __future__ import annotations

import datetime as dt
import itertools
import math
from collections import Counter
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F  # noqa: N812

from lookback.core.streams.cells import read_cell
from lookback.core.streams.declaration import Stream
from lookback.core.values.columns import from_values
from lookback.core.values.types import parse_type
from lookback.spark.ingest.fields import BLOCK, FILE, RAW, READ_AS, REASON, ROW, UNIT, cast_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
TYPES = (
    "timestamp",
    "date",
    "boolean",
    "int",
    "bigint",
    "tinyint",
    "double",
    "float",
    "decimal(18,2)",
    "decimal(38,0)",
    "string",
)
FIELDS = {name.translate(str.maketrans("(),", "___")).strip("_"): name for name in TYPES}
FIELDS |= {f"{name}s": f"array<{type_}>" for name, type_ in FIELDS.items()}
DAYS = (
    "2026-01-31", "2026-1-5", "20260131", "2026-02-29", "2024-02-29", "2026-13-01", "2026-00-10", "0000-01-01",
    "0001-01-02", "0001-01-01", "9999-12-31", "10000-01-01", "+2026-01-31", "-2026-01-31", "26-01-31", "2026-01", "2026",
    "31.01.2026", "2026/01/31", "2026-031", "2026-W05-6", "\uff12026-01-31",
)  # fmt: skip
CLOCKS = (
    "10:15", "10:15:30", "9:05", "10:5", "1:02:03", "10:15:30.5", "10:15:30,123", "10:15:30.123456789", "10:15:30.",
    "10:15:60", "24:00", "00:00", "00:00:00.000", "23:59:59.999999", "10", "1015", "101530", "101530.25", "101530,5", "10:15.5", "-1:00",
)  # fmt: skip
ZONES = (
    "Z", "z", " Z", " UTC", "UTC", "utc", " GMT", "+01:00", " +01:00", "+0100", "+01", "+1", "-00:00", "+18:00", "+18:01", "-23:00",
    "+01:60", "+01:00:30", " Europe/Berlin", " CET", "[UTC]", " PM",
)  # fmt: skip
OTHERS = (
    "", " ", "\t7\n", "\u00a07", "7\u2028", "\x017", "7\x00", "now", "today", "epoch", "1706700000", "1706700000000", "yes", "Yes",
    "y", "no", "N", "t", "F", "TRUE", "false", "on", "off", "ja", "1", "0", "1.0", "0.00", "01", "2", "-1", "+0", "-0", "-0.0",
    "+12", "--1", "+ 1", "1 2", "1_000", "1,000", "1,5", "1.5", "12.", ".5", ".", "+", "-.", "e5", "1e", "1e3", "1E3", "1e+3", "1.5e1",
    "1.55e1", "1e-1", "100e-2", "1e400", "-1e400", "1e-400", "0e999999", "0e400", "1e999999", "1e-999999", "1e9999999", "127", "128",
    "-128", "-129", "2147483647", "2147483648", "-2147483648", "9223372036854775807", "9223372036854775808", "9.0", "9e18",
    "12.34", "12.345", "12.340", "12.3400e0", "0.005", "9999999999999999.99", "10000000000000000", "9" * 38, "9" * 39, "0" * 50 + "7",
    "1e37", "1e38", "0.1", "1e39", "3.4028235e38", "3.5e38", "1.7976931348623157e308", "1.7976931348623159e308", "4.9e-324", "1e-50",
    "0x10", "1d", "1f", "1L", "\u0661", "½", "NaN", "nan", "+nan", "-NaN", "NAN", "inf", "Inf", "+inf", "-INF", "infinity", "-Infinity",
    "+Infinity", "infinit", "∞", "null", "NULL", "None", "NA", "true ", " true", "2026-01-31\u2028", "2026-01-31T10:15:30Z ", "1.0.0",
)  # fmt: skip


def forms() -> Iterator[str]:
    yield from OTHERS
    for day in DAYS:
        yield from (day, f"{day}Z", f" {day}", f"{day}T10:15:30Z", f"{day} 00:00", f"{day}T101530Z")
    for clock, between in itertools.product(CLOCKS, ("T", " ", "t", "  ", "T ")):
        yield f"2026-01-31{between}{clock}"
    for clock in CLOCKS:
        yield from (
            clock,
            f"T{clock}",
            f"{clock}Z",
            f"20260131T{clock}",
            f"2026-01-31T{clock}Z",
            f"20260131T{clock}+0130",
        )
    for clock, zone in itertools.product(("00:00", "00:30:00", "10:15:30", "10:15:30.25", "101530"), ZONES):
        yield from (f"2026-01-31T{clock}{zone}", f"20260131T{clock}{zone}")


@pytest.mark.long
def test_the_harness_and_ingest_read_every_form_alike(spark: SparkSession) -> None:
    texts = list(dict.fromkeys(forms()))
    stream = Stream.from_dict(
        {
            "stream": "s",
            "event_id": "id",
            "event_time": "at",
            "fields": {"id": "string", "at": "timestamp", **FIELDS},
            # A text is not read as JSON there, so an array has it as its one item.
            "columns": {name: f"array({name})" for name in FIELDS if name.endswith("s")},
        }
    )
    listed = spark.createDataFrame(list(enumerate(texts)), "n long, text string")
    rows = listed.select(
        F.col("n").cast("string").alias("id"), F.lit("2026-01-31T12:00:00Z").alias("at"),
        *[F.col("text").alias(name) for name in FIELDS],
        *[F.lit("").alias(name) for name in (RAW, READ_AS, FILE, UNIT)], *[F.lit(0).cast("bigint").alias(name) for name in (BLOCK, ROW)],
    )  # fmt: skip
    cast, reason = cast_rows(rows, stream, text=True, place="here"), F.coalesce(REASON, F.lit(""))
    usable = {name: ~reason.rlike(f"(^|; ){name}(: | is )") for name in FIELDS}
    taken = [F.when(is_usable, F.col(name)).alias(name) for name, is_usable in usable.items()]
    found = {int(row["id"]): row for row in cast.select("id", *taken).collect()}
    wrong, counts = [], Counter[str]()
    for (at, text), (name, type_) in itertools.product(enumerate(texts), FIELDS.items()):
        value = found[at][name]
        if name.endswith("s") and value:
            (value,) = value
        ingested, expected = repr(show(value)), read(text, type_.removeprefix("array<").removesuffix(">"))
        counts[name] += expected != "None"
        if ingested != expected:
            wrong.append((text, name, expected, ingested))
    assert not wrong, "\n".join(map(str, wrong))
    assert min(counts.values()) >= 15


def test_an_expression_makes_no_time_of_today_from_a_time_of_day(spark: SparkSession) -> None:
    expressions = [
        "to_timestamp(clock)", "cast(clock as timestamp)", "to_utc_timestamp(clock, 'Europe/Berlin')", "clock::timestamp",
        "coalesce(try_cast(clock as timestamp), from_utc_timestamp(clock, 'UTC'))", "concat(day, ' ', clock)",
        "to_timestamp(concat(day, ' ', clock))", "to_timestamp(day)",
    ]  # fmt: skip
    names = [f"t{at}" for at in range(len(expressions))]
    stream = Stream.from_dict(
        {
            "stream": "s",
            "event_id": "id",
            "event_time": "at",
            "fields": {"id": "string", "at": "timestamp", **dict.fromkeys(names, "timestamp")},
            "columns": dict(zip(names, expressions, strict=True)),
        }
    )
    rows = spark.createDataFrame(
        [("a", "2026-01-31", "10:15", *["2026-01-31T12:00:00Z"] * 5, 0, 0)],
        f"id string, day string, clock string, at string, {RAW} string, {READ_AS} string, {FILE} string, {UNIT} string, {BLOCK} long, {ROW} long",
    )
    (row,) = cast_rows(rows, stream, text=True, place="here").collect()
    assert [show(row[name]) for name in names] == [
        *[None] * 5, *[dt.datetime(2026, 1, 31, 10, 15)] * 2, dt.datetime(2026, 1, 31),  # noqa: DTZ001 - as UTC
    ]  # fmt: skip
    assert [name for name in names if f"{name}: " in row[REASON]] == names[:5]


def read(text: str, type_: str) -> str:
    """What the harness takes a text for."""
    declared = parse_type(type_)
    try:
        return repr(show(from_values(declared, [read_cell(declared, text)]).item(0)))
    except ValueError:
        return repr(None)


def show(value: Any) -> Any:
    if isinstance(value, dt.datetime):
        return value.replace(tzinfo=None)
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else value + 0.0
    return value.normalize() + 0 if isinstance(value, Decimal) else value
