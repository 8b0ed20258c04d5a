"""Rejected rows are taken in once they can be read, whatever they were read from, and none twice or never."""

from __future__ import annotations

import datetime as dt
import gzip
import json
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import functions as F  # noqa: N812

from lookback import cli
from lookback.core.streams.declaration import Stream
from lookback.spark.ingest.files import ingest, retry_rejected
from lookback.spark.ingest.rejected import RejectedRows
from lookback.spark.ingest.report import IngestReport

if TYPE_CHECKING:
    from lookback.spark.tables.lakehouse import Tables

pytestmark = pytest.mark.spark
AT = "2024-03-04T00:00:00Z"
MICROSECONDS = dt.datetime(2024, 3, 4, 1, 2, 3, 123456, dt.timezone.utc)


def stream(name: str = "events", **changes: Any) -> Stream:
    fields = {"id": "string", "at": "timestamp", "amount": "decimal(18,2)"}
    return Stream.from_dict({"stream": name, "event_id": "id", "event_time": "at", "fields": fields, **changes})


MENDED = stream(columns={"amount": "replace(amount, ',', '.')"})


def retry(tables: Tables, declared: Stream, **options: Any) -> tuple[int, int, int, int]:
    report: IngestReport = retry_rejected(tables, declared, progress=None, **options)
    assert report.balanced
    return report.offered, report.ingested, report.duplicates, report.rejected


def left(tables: Tables) -> list[str]:
    return sorted(str(row["raw"]) for row in tables.read("rejected_events").collect())


def correct(tables: Tables, old: str, new: str) -> None:
    tables.delta("rejected_events").update(F.col("raw") == old, {"raw": F.lit(new)})


def lines(file: Path, rows: list[Any]) -> Path:
    text = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n"
    file.write_bytes(gzip.compress(text.encode()) if file.suffix == ".gz" else text.encode())
    return file


@pytest.mark.long
def test_mended_rows_of_every_format_go_in_and_leave_and_the_others_stay(
    tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    row = {"at": AT, "amount": "1,50"}
    still = {"id": "never", "at": "yesterday"}
    json_lines = [{"id": "good", "at": AT}, {"id": "json", **row}, {"id": "json", **row}, still, '{"id": "cut", ']
    ingest(tables, stream(), lines(tmp_path / "x.jsonl", json_lines), progress=None)
    csv = [f'csv;{AT};"1,50"', "short;1", f"long;{AT};1;2"]
    file = lines(tmp_path / "x.csv", ["id;at;amount", *csv])
    ingest(tables, stream(), file, options={"sep": ";"}, progress=None)
    other = stream("typed")
    columns = {"id": [7], "at": [MICROSECONDS], "amount": [1e30], "more": [b"\x00\xff"]}
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    ingest(tables, other, tmp_path / "x.parquet", progress=None)
    assert tables.read("rejected_events").count() == 8
    correct(tables, "short;1", f"corrected;{AT};2")
    correct(tables, '{"id": "cut", ', json.dumps({"id": "good", "at": AT}))

    # Killed when the events are in the table, and run again: they are duplicates now, and leave.
    with monkeypatch.context() as patch:
        patch.setattr(RejectedRows, "delete", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            retry(tables, MENDED)
    assert tables.read("rejected_events").count() == 8
    version = tables.version("rejected_events")
    assert retry(tables, MENDED) == (7, 0, 5, 2)

    events = {row["id"]: row["amount"] for row in tables.read("events").collect()}
    price = Decimal("1.50")
    assert events == {"good": None, "json": price, "csv": price, "corrected": Decimal("2.00")}
    # Another stream's rows are not touched.
    assert [text for text in left(tables) if not text.startswith('{"id":7')] == [csv[2], json.dumps(still)]
    assert tables.version("rejected_events") == version + 1

    # The Parquet row by its own types: an expression over a bigint and a binary, and every microsecond of the time.
    typed = stream("typed", columns={"id": "cast(id + 1 as string)", "amount": "length(more)"})
    assert retry(tables, typed) == (1, 1, 0, 0)
    found = tables.read("typed").head()
    assert found is not None
    assert (found["id"], found["amount"]) == ("8", Decimal("2.00"))
    assert found["at"].astimezone(dt.timezone.utc) == MICROSECONDS


@pytest.mark.long
def test_a_file_that_could_not_be_read_is_read_again_whole(tables: Tables, tmp_path: Path):
    folder = tmp_path / "it's [1], 100%"
    folder.mkdir()
    lines(folder / "good.jsonl", [{"id": "good", "at": AT}])
    torn = lines(folder / "torn a.jsonl.gz", [{"id": f"z{n}", "at": AT, "amount": n * n} for n in range(2_000)])
    torn.write_bytes(torn.read_bytes()[:5_000])
    ingest(tables, stream(), str(folder).replace("[", "\\[").replace("]", "\\]"), progress=None)
    assert left(tables) == ["None"]

    # It cannot be read any better: nothing is written.
    version = tables.version("rejected_events")
    assert retry(tables, stream()) == (1, 0, 0, 1)
    assert tables.version("rejected_events") == version
    lines(torn, [{"id": "one", "at": AT}, {"id": "good", "at": AT}, {"id": "bad"}])
    assert retry(tables, stream()) == (3, 1, 1, 1)
    assert left(tables) == ['{"id": "bad"}']
    assert tables.read("events").count() == 2


def test_the_command_takes_no_path(capsys: pytest.CaptureFixture[str]):
    conf = str(Path(__file__).parents[2] / "conf")

    assert cli.main(["--conf", conf, "ingest", "items", "items.csv", "--retry-rejected"]) == 2
    assert "omit PATH and --format" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "[]", '{"columns": "no type ("}', '{"columns": "int"}', '{"format": "jdbc"}'])
def test_what_a_stranger_writes_into_read_as_counts_as_absent(tables: Tables, text: str):
    from lookback.spark.ingest.rejected import _Reading

    reading = _Reading.from_json(text, {})
    assert (reading.source.format, reading.columns) == ("json", None)
