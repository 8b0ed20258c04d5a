"""Ingest takes a value exactly as its field's type has it, or rejects the row with what to do, from every source alike."""

from __future__ import annotations

import datetime as dt
import json
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from lookback.cli import main
from lookback.core.errors import EventError
from lookback.core.streams.declaration import Stream
from lookback.core.streams.eventrows import read_events
from lookback.spark.ingest.files import ingest, retry_rejected
from lookback.spark.ingest.report import IngestReport

if TYPE_CHECKING:
    from lookback.spark.tables.lakehouse import Tables

pytestmark = pytest.mark.spark
AT = "2026-01-31T12:00:00Z"
NOON = dt.datetime(2026, 1, 31, 12, tzinfo=dt.timezone.utc)
FIELDS = {
    "id": "string", "at": "timestamp", "a": "decimal(18,2)", "n": "int", "d": "double", "f": "float", "ok": "boolean",
    "day": "date", "ns": "array<int>", "amounts": "array<decimal(18,2)>",
}  # fmt: skip


@pytest.fixture(autouse=True, params=["small", pytest.param("usual", marks=pytest.mark.long)])
def settings(request: pytest.FixtureRequest) -> None:
    """With those of the tests and with Spark's own the outcome is the same."""
    if request.param == "usual":
        request.getfixturevalue("usual_queries")


def stream(**changes: Any) -> Stream:
    return Stream.from_dict({"stream": "events", "event_id": "id", "event_time": "at", "fields": FIELDS, **changes})


def take(tables: Tables, declared: Stream, path: Path, **options: Any) -> IngestReport:
    report = ingest(tables, declared, path, progress=None, **options)
    assert report.balanced
    return report


def outcome(tables: Tables) -> dict[str, Any]:
    """By id the value of the one field that is not NULL; of rejected rows the reason."""
    found: dict[str, Any] = {}
    for row in tables.read("events").drop("at", "position", "ingested_at").collect():
        values = [value for name, value in row.asDict().items() if name != "id" and value is not None]
        found[row["id"]] = values[0] if values else None
    for row in tables.read("rejected_events").collect():
        found[json.loads(row["raw"])["id"]] = row["reason"]
    return found


# field, text, and what it is read as; a text: words of the reason and of the remedy
TEXTS: list[tuple[str, str, Any]] = [
    ("a", "12.345", "more than 2 digits after the point, so declare more, or round it by columns: {a: \"cast(a as decimal(18,2))\"}"),
    ("a", "0.004", "more than 2 digits"),
    ("a", "-0.004", "more than 2 digits"),
    ("a", "1.2345e1", "more than 2 digits"),
    ("a", "1.234e1", Decimal("12.34")),
    ("a", "1.1e-2", "more than 2 digits"),
    ("a", "12,5", "write a decimal point, by columns: {a: \"replace(a, ',', '.')\"}"),
    ("a", "1,000", "leave the separators out, by columns: {a: \"replace(a, ',', '')\"}"),
    ("a", "1e30", "too large, so declare more digits"),
    ("a", "\u0661", "write a number, such as 12.50"),
    ("a", "12.340", Decimal("12.34")),
    ("a", " 12.5 ", Decimal("12.50")),
    ("a", "1.5e1", Decimal("15.00")),
    ("a", "1.23e1", Decimal("12.30")),
    ("a", "12300e-2", Decimal("123.00")),
    ("a", "0.000e0", Decimal("0.00")),
    ("a", ".5", Decimal("0.50")),
    ("n", "1.5", "it has a fraction, so declare a decimal, or cut it by columns"),
    ("n", "1_000", "write a whole number, such as 12"),
    ("n", "1,000", "leave the separators out"),
    ("n", "9999999999", "too large, so declare bigint"),
    ("n", "+12", 12),
    ("d", "1e400", "too large"),
    ("d", "1d", "write a number, such as 12.50"),
    ("d", "1.5e3", 1500.0),
    ("d", "-Infinity", float("-inf")),
    ("f", "1e39", "too large"),
    ("ok", "maybe", "write true or false"),
    ("ok", "true", True),
    ("day", "2026-01-31 12:00", "it has a time of day, so declare a timestamp, or cut it by columns: {day: \"cast(day as date)\"}"),
    ("day", "31.01.2026", "write it as 2026-01-31, or say how it is written by columns: {day: \"to_date(day, 'dd.MM.yyyy')\"}"),
    ("day", "2026-01-31T00:00:00Z", dt.date(2026, 1, 31)),
    ("day", "2026-01-31", dt.date(2026, 1, 31)),
    ("ns", "abc", "write a list of such values, in text as JSON"),
    ("ns", "42", "write a list"),
    ("ns", "[1, 2.5]", "write a list"),
    ("ns", '[1, "x"]', "write a list"),
    ("ns", "[1, null]", [1, None]),
    ("amounts", "[12.345]", "write a list"),
    ("amounts", "[9007199254740993.01]", [Decimal("9007199254740993.01")]),
]  # fmt: skip


def same(found: Any, expected: Any, field: str) -> bool:
    if isinstance(expected, str):
        return isinstance(found, str) and found.startswith(f"{field}: '") and expected in found
    return bool(found == expected) and type(found) is type(expected)


@pytest.mark.long
@pytest.mark.parametrize("format_", ["csv", "json"])
def test_a_text_is_read_exactly_or_rejected_with_a_remedy(tables: Tables, tmp_path: Path, format_: str) -> None:
    rows = [{"id": f"e{at:02d}", "at": AT, field: text} for at, (field, text, _) in enumerate(TEXTS)]
    file = tmp_path / f"x.{format_}"
    if format_ == "json":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    else:
        names = list(FIELDS)
        lines = [
            ";".join('"' + row.get(name, "").replace('"', '""') + '"' if name in row else "" for name in names)
            for row in rows
        ]
        file.write_text("\n".join([";".join(names), *lines]) + "\n", encoding="utf-8")
    report = take(
        tables, stream(), file, options={"sep": ";", "ignoreLeadingWhiteSpace": "false"} if format_ == "csv" else {}
    )
    assert report.rejected == sum(isinstance(expected, str) for *_, expected in TEXTS)
    found = outcome(tables)
    wrong = [
        (field, text, found[f"e{at:02d}"])
        for at, (field, text, expected) in enumerate(TEXTS)
        if not same(found[f"e{at:02d}"], expected, field)
    ]
    assert wrong == []


def test_what_ingest_refuses_of_texts_the_harness_refuses_too() -> None:
    for field, text, expected in TEXTS:
        if isinstance(expected, str):
            with pytest.raises(EventError):
                read_events([{"id": "a", "at": AT, field: text}], stream(), 1)


TYPED: list[tuple[str, Any, Any]] = [
    ("a", pa.array([12.345]), "more than 2 digits"),
    ("a", pa.array([0.1]), Decimal("0.10")),
    ("a", pa.array([0.1], pa.float32()), Decimal("0.10")),
    ("a", pa.array([Decimal("12.3450")], pa.decimal128(38, 4)), "more than 2 digits"),
    ("a", pa.array([Decimal("12.3400")], pa.decimal128(38, 4)), Decimal("12.34")),
    ("a", pa.array([True]), "write a number"),
    ("n", pa.array([1.5]), "it has a fraction"),
    ("n", pa.array([2.0]), 2),
    ("n", pa.array([2**40]), "too large"),
    ("n", pa.array([True]), "write a whole number"),
    ("f", pa.array([1e39]), "too large"),
    ("f", pa.array([float("inf")]), float("inf")),
    ("d", pa.array([Decimal("1.5")]), 1.5),
    ("ok", pa.array([2]), "write true or false"),
    ("ok", pa.array([1]), True),
    ("day", pa.array([NOON]), "it has a time of day"),
    ("day", pa.array([NOON.replace(hour=0)]), dt.date(2026, 1, 31)),
    ("ns", pa.array([[1.5]]), "write a list"),
    ("ns", pa.array([[2.0, None]]), [2, None]),
    ("amounts", pa.array([[12.345]]), "write a list"),
    ("amounts", pa.array([[12.34]]), [Decimal("12.34")]),
]


@pytest.mark.long
def test_a_typed_value_is_cast_exactly_or_rejected_with_a_remedy(tables: Tables, tmp_path: Path) -> None:
    # A column has one type, so each case has a field of its own.
    names = [f"{field}_{at}" for at, (field, *_) in enumerate(TYPED)]
    fields = {name: FIELDS[field] for name, (field, *_) in zip(names, TYPED, strict=True)}
    columns: dict[str, Any] = {"id": [f"e{at:02d}" for at in range(len(TYPED))], "at": [NOON] * len(TYPED)}
    for at, (name, (_, values, _)) in enumerate(zip(names, TYPED, strict=True)):
        before, after = (pa.nulls(rows, values.type) for rows in (at, len(TYPED) - at - 1))
        columns[name] = pa.concat_arrays([before, values, after])
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    report = take(tables, stream(fields={"id": "string", "at": "timestamp", **fields}), tmp_path / "x.parquet")
    assert report.rejected == sum(isinstance(expected, str) for *_, expected in TYPED)
    found = outcome(tables)
    wrong = [
        (name, str(values.type), found[f"e{at:02d}"])
        for at, (name, (_, values, expected)) in enumerate(zip(names, TYPED, strict=True))
        if not same(found[f"e{at:02d}"], expected, name)
    ]
    assert wrong == []


@pytest.mark.long
def test_only_an_expression_rounds_and_what_was_rejected_goes_in_once_it_does(tables: Tables, tmp_path: Path) -> None:
    file = tmp_path / "x.csv"
    file.write_text(f"id,at,a\nx,{AT},12.345\ny,{AT},12.60\n", encoding="utf-8")
    assert (take(tables, stream(), file).rejected, outcome(tables)["y"]) == (1, Decimal("12.60"))
    rounded = stream(columns={"a": "cast(a as decimal(18,2))"})
    assert retry_rejected(tables, rounded, progress=None).ingested == 1
    assert outcome(tables)["x"] == Decimal("12.35")

    # The cast to the field's type at the end of an expression is none that anybody wrote.
    file.write_text(f"id,at,a\nz,{AT},1234.5\nw,{AT},1234\n", encoding="utf-8")
    report = take(tables, stream(columns={"a": "cast(a as decimal(18,4)) / 100"}), file)
    assert (report.ingested, report.rejected) == (1, 1)
    assert outcome(tables)["w"] == Decimal("12.34")
    assert "where a = '1234.5': cast it to decimal(18,2) there, which rounds" in outcome(tables)["z"]


@pytest.mark.long
def test_a_line_with_a_key_twice_is_rejected(tables: Tables, tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text(
        f'{{"id": "x", "at": "{AT}", "n": 1, "n": 2}}\n{{"id": "y", "at": "{AT}", "n": 1}}\n', encoding="utf-8"
    )
    assert take(tables, stream(), file).rejected == 1
    (row,) = tables.read("rejected_events").collect()
    assert row["reason"] == "the line contains a key twice, and only one value can count; send it once"


@pytest.mark.long
def test_times_without_a_zone_and_days_without_a_time_are_counted(tables: Tables, tmp_path: Path) -> None:
    times = {
        "a": "2026-01-31T12:00:00Z", "b": "2026-01-31 12:00:00+01:00", "c": "2026-01-31 12:00:00,5 UTC",
        "d": "2026-01-31 12:00:00", "e": "2026-01-31T12:00:00.123456", "f": "2026-01-31", "g": "soon",
    }  # fmt: skip
    file = tmp_path / "x.jsonl"
    file.write_text("".join(json.dumps({"id": id_, "at": at}) + "\n" for id_, at in times.items()), encoding="utf-8")
    report = take(tables, stream(), file)
    assert (report.ingested, report.rejected, report.without_zone, report.without_time) == (6, 1, 2, 1)
    assert report.assumptions == (
        "events: 2 rows have a time without a zone, taken as UTC; 1 row has a day without a time, taken as midnight UTC. "
        "Write times as 2026-01-31T12:00:00Z, or name the zone in `columns`, such as to_utc_timestamp(at, 'Europe/Berlin')"
    )
    both = report.plus(report)
    assert (both.without_zone, both.without_time) == (4, 2)

    naive = pa.table({"id": ["h"], "at": pa.array([NOON.replace(tzinfo=None)])})
    pq.write_table(naive, tmp_path / "x.parquet")
    assert take(tables, stream(), tmp_path / "x.parquet").without_zone == 1
    pq.write_table(pa.table({"id": ["i"], "at": [NOON]}), tmp_path / "y.parquet")
    assert take(tables, stream(), tmp_path / "y.parquet").assumptions == ""


@pytest.mark.long
def test_what_was_assumed_of_times_is_told_once(
    tables: Tables, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "conf" / "streams").mkdir(parents=True)
    (tmp_path / "conf" / "streams" / "events.yml").write_text(yaml.safe_dump(stream().to_dict()), encoding="utf-8")
    file = tmp_path / "x.jsonl"
    file.write_text(json.dumps({"id": "a", "at": "2026-01-31 12:00:00"}) + "\n", encoding="utf-8")
    command = ["--root", str(tables.root), "--conf", str(tmp_path / "conf"), "ingest", "events", str(file)]
    assert main(command) == 0
    assert capsys.readouterr().out.count("1 row has a time without a zone, taken as UTC") == 1
    assert main([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["without_zone"], report["without_time"]) == (1, 0)
