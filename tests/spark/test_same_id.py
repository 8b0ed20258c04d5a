"""A row with the id of another event is a duplicate if it is equal to it, else it is rejected; nothing is lost in silence."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F  # noqa: N812

from lookback.core.streams.declaration import Stream
from lookback.spark.ingest.files import ingest, retry_rejected
from lookback.spark.ingest.report import IngestReport

if TYPE_CHECKING:
    from lookback.spark.tables.lakehouse import Tables

pytestmark = pytest.mark.spark
FIELDS = {"id": "string", "at": "timestamp", "amount": "decimal(18,2)", "score": "double", "tags": "array<string>"}


def stream(**changes: Any) -> Stream:
    document = {"stream": "events", "event_id": "id", "event_time": "at", "fields": FIELDS, "dedupe_window": "1 hour"}
    return Stream.from_dict({**document, "columns": {"amount": "replace(paid, ',', '.')"}, **changes})


def row(id_: str, paid: str | None = "1,50", time: str = "10:00:00", **others: Any) -> dict[str, Any]:
    return {"id": id_, "at": f"2026-01-31T{time}Z", "paid": paid, **others}


def counts(report: IngestReport) -> tuple[int, int, int]:
    assert report.balanced
    return report.ingested, report.duplicates, report.rejected


def take(
    tables: Tables, file: Path, rows: list[dict[str, Any]], declared: Stream | None = None
) -> tuple[int, int, int]:
    file.write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")
    return counts(ingest(tables, declared or stream(), file, progress=None))


def kept(tables: Tables) -> dict[str, set[Any]]:
    """By id, the amounts of the rows in rejected_events."""
    found: dict[str, set[Any]] = {}
    for each in tables.read("rejected_events").collect():
        assert each["reason"].startswith(f"id: '{json.loads(each['raw'])['id']}' is the id of an existing event")
        found.setdefault(json.loads(each["raw"])["id"], set()).add(json.loads(each["raw"])["amount"])
    return found


@pytest.mark.long
def test_a_row_that_differs_from_the_event_of_its_id_is_kept_with_the_reason(tables: Tables, tmp_path: Path) -> None:
    nan = {"score": "NaN", "tags": [None, "a"]}
    first = [
        row("a"), row("b", None), row("c", **nan), row("d"), row("far"),
        # In one read: an equal row is a duplicate, one that differs is rejected, one beyond the window is an event.
        row("twice"), row("twice"), row("twice", "9", "10:00:01"), row("twice", "7", "11:00:00"), row("twice", "7", "11:00:00.000001"),
        # The row between is rejected, so it does not hide that the last is beyond the window of the first.
        row("chain"), row("chain", "2", "10:40:00"), row("chain", "3", "11:20:00"),
    ]  # fmt: skip
    assert take(tables, tmp_path / "a.jsonl", first) == (9, 1, 3)
    assert kept(tables) == {"twice": {9.0, 7.0}, "chain": {2.0}}

    # Against the table: NULL is not a value, NaN is equal to itself, and so is a number written otherwise.
    second = [
        row("a", "1.500"), row("b", "1"), row("c", **nan), row("d", None), row("c", score="NaN", tags=["a", None]),
        row("far", "5", "11:00:00.000001"), row("new"),
    ]  # fmt: skip
    assert take(tables, tmp_path / "b.jsonl", second) == (2, 2, 3)
    assert kept(tables) == {"twice": {9.0, 7.0}, "chain": {2.0}, "b": {1.0}, "d": {None}, "c": {1.5}}
    assert tables.read("events").where("id = 'b'").head()["amount"] is None  # type: ignore[index]

    # Again: the same account, and no row is written twice.
    before = tables.read("rejected_events").count()
    assert take(tables, tmp_path / "b.jsonl", second) == (0, 4, 3)
    assert tables.read("rejected_events").count() == before == 6


@pytest.mark.long
def test_a_retry_takes_the_row_in_once_the_other_event_is_gone(tables: Tables, tmp_path: Path) -> None:
    assert take(tables, tmp_path / "a.jsonl", [row("a"), row("a", "9"), row("b"), row("b", "8")]) == (2, 0, 2)
    # Nothing has changed, and nothing is written.
    versions = [tables.version(name) for name in ("events", "rejected_events")]
    assert counts(retry_rejected(tables, stream(), progress=None)) == (0, 0, 2)
    assert [tables.version(name) for name in ("events", "rejected_events")] == versions

    tables.delta("events").delete(F.col("id") == "a")
    assert counts(retry_rejected(tables, stream(), progress=None)) == (1, 0, 1)
    assert {each["id"]: each["amount"] for each in tables.read("events").collect()} == {
        "a": Decimal(9),
        "b": Decimal("1.5"),
    }
    assert kept(tables) == {"b": {8.0}}
    tables.delta("rejected_events").update(F.lit(True), {"raw": F.replace("raw", F.lit('"id":"b"'), F.lit('"id":"z"'))})
    assert counts(retry_rejected(tables, stream(), progress=None)) == (1, 0, 0)
    assert kept(tables) == {}


@pytest.mark.long
def test_an_event_that_is_older_than_a_column_does_not_differ_by_it(tables: Tables, tmp_path: Path) -> None:
    assert take(tables, tmp_path / "a.jsonl", [row("a"), row("b")]) == (2, 0, 0)
    tables.spark.sql(f"ALTER TABLE {tables.identifier('events')} ADD COLUMNS (shop string)")
    wider = stream(fields={**FIELDS, "shop": "string"})
    assert take(tables, tmp_path / "b.jsonl", [row("a", shop="x"), row("b", "2", shop="x"), row("c")], wider) == (
        1,
        1,
        1,
    )
    assert take(tables, tmp_path / "c.jsonl", [row("c", shop="x")], wider) == (0, 0, 1)
