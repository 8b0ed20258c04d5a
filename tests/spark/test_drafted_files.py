"""Ingest reads a file by the draft that was made of it: all rows, with their values; and a file of any name."""

from __future__ import annotations

import datetime as dt
import os
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from lookback.core.errors import SetupError
from lookback.core.streams.declaration import Stream
from lookback.spark.ingest.fields import REASON
from lookback.spark.ingest.filerows import Files
from lookback.spark.ingest.sources import Source
from lookback.stream_draft import draft_stream

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
NOON = dt.datetime(2026, 1, 31, 12, 0, 0, 123456, dt.timezone.utc)
NANOSECONDS = pa.array([1769860800123456789], pa.timestamp("ns"))
AT = "2026-01-31T12:00:00.123456Z"


def read(spark: SparkSession, file: Path, stream: Stream) -> list[dict[str, Any]]:
    rows, _ = Files(spark, Source.find(spark, stream, None, None, None), stream).read_kept()
    found = [
        {
            name: value.astimezone(dt.timezone.utc) if isinstance(value, dt.datetime) else value
            for name, value in row.asDict().items()
        }
        for row in rows.select(*stream.fields, REASON).collect()
    ]
    assert [row.pop(REASON) for row in found] == [None] * len(found)
    return sorted(found, key=lambda row: str(row[stream.event_id]))


def drafted(spark: SparkSession, file: Path) -> list[dict[str, Any]]:
    return read(spark, file, Stream.from_dict(yaml.safe_load(draft_stream(file))))


def test_a_csv_of_utf_16_and_one_with_line_breaks_in_quotes(spark: SparkSession, tmp_path: Path) -> None:
    text = f'id;at;note\r\na;{AT};"ü\nlong"\r\nb;{AT};\r\n'
    expected = [{"id": "a", "at": NOON, "note": "ü\nlong"}, {"id": "b", "at": NOON, "note": None}]
    for name, content in {"utf-16.csv": text.encode("utf-16"), "utf-8.csv": text.encode()}.items():
        (tmp_path / name).write_bytes(content)
        assert drafted(spark, tmp_path / name) == expected, name


def test_keys_of_json_that_differ_in_case_only(spark: SparkSession, tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text(
        f'{{"id": "a", "at": "{AT}", "Note": "x", "note": "y"}}\n{{"id": "b", "at": "{AT}", "note": "z"}}\n'
    )
    assert "# the key 'Note' differs from 'note' only in case and is not read; rename one of them" in draft_stream(file)
    assert drafted(spark, file) == [{"id": "a", "at": NOON, "note": "y"}, {"id": "b", "at": NOON, "note": "z"}]


def test_every_type_of_a_parquet_file_that_pandas_and_arrow_write(spark: SparkSession, tmp_path: Path) -> None:
    columns = {
        "id": ["a"], "at": NANOSECONDS, "kind": pa.array(["x"]).dictionary_encode(),
        "u8": pa.array([255], pa.uint8()), "u16": pa.array([65535], pa.uint16()), "u32": pa.array([2**32 - 1], pa.uint32()),
        "u64": pa.array([2**64 - 1], pa.uint64()), "f": pa.array([0.5], pa.float32()), "large": pa.array(["y"], pa.large_string()),
    }  # fmt: skip
    pq.write_table(pa.table(columns), tmp_path / "new.parquet")
    pq.write_table(pa.table(columns), tmp_path / "old.parquet", use_deprecated_int96_timestamps=True)
    row = {
        "id": "a", "at": NOON, "kind": "x", "u8": 255, "u16": 65535, "u32": 2**32 - 1, "u64": Decimal(2**64 - 1), "f": Decimal("0.5"),
        "large": "y",
    }  # fmt: skip
    assert drafted(spark, tmp_path / "new.parquet") == [row]
    assert drafted(spark, tmp_path / "old.parquet") == [row]
    assert "in nanoseconds, truncated" in draft_stream(tmp_path / "new.parquet")
    assert "nanoseconds" not in draft_stream(tmp_path / "old.parquet")

    # Without the draft's expression the reason has it.
    fields = {"id": "string", "at": "timestamp"}
    stream = Stream.from_dict({"stream": "s", "event_id": "id", "event_time": "at", "fields": fields})
    found = Files(spark, Source.find(spark, stream, str(tmp_path / "new.parquet"), None, None), stream).read_kept()[0]
    (reason,) = [each[REASON] for each in found.collect()]
    assert (
        'it counts nanoseconds from 1970, by columns: {at: "timestamp_micros(cast(at as bigint) div 1000)"}' in reason
    )


NAMES = ("a [1].csv", "b:c.csv", "2026-01-31T12:00:00.csv", "#d.csv", "e%20f.csv", "%zz.csv", "g h.csv", "{i}.csv", "j*.csv", "k?.csv", "l\\m.csv", "n\no: #.csv", "p'q$.csv", "ü.csv")  # fmt: skip


@pytest.mark.long
def test_a_file_of_any_name_is_read_alone_and_in_its_folder(spark: SparkSession, tmp_path: Path) -> None:
    folder = tmp_path / "odd [1]: 100%41 #"
    folder.mkdir()
    for at, name in enumerate(NAMES):
        (folder / name).write_text(f"id,at\nx{at:02d},{AT}\n", encoding="utf-8")
    for at, name in enumerate(NAMES):
        assert drafted(spark, folder / name) == [{"id": f"x{at:02d}", "at": NOON}], name
    assert [row["id"] for row in drafted(spark, folder)] == [f"x{at:02d}" for at in range(len(NAMES))]


def test_a_name_that_is_not_utf_8_costs_its_file_alone(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"id,at\na,{AT}\n")
    unreadable = os.path.join(os.fsencode(tmp_path), b"\xe9.csv")  # noqa: PTH118 - a name of bytes
    with open(unreadable, "wb") as file:  # noqa: PTH123
        file.write(b"id,at\nb,2026-01-31T12:00:00Z\n")
    stream = Stream.from_dict(yaml.safe_load(draft_stream(tmp_path / "a.csv")))
    rows, count = Files(spark, Source.find(spark, stream, str(tmp_path), "csv", None), stream).read_kept()
    reasons = [row[REASON] for row in rows.collect()]
    assert count == 2
    assert None in reasons
    assert "the file's name is not UTF-8, so Spark cannot open it; rename the file" in reasons
    with pytest.raises(SetupError, match="the name is not UTF-8, so Spark cannot open the file; rename it"):
        draft_stream(os.fsdecode(unreadable))


def test_a_header_with_a_name_twice_is_told_by_ingest(spark: SparkSession, tmp_path: Path) -> None:
    file = tmp_path / "x.csv"
    file.write_text(f"id,at,n,N\na,{AT},1,2\n")
    fields = {"id": "string", "at": "timestamp"}
    stream = Stream.from_dict({"stream": "s", "event_id": "id", "event_time": "at", "fields": fields})
    with pytest.raises(SetupError, match="its header names 'n' more than once; give each column its own name"):
        Files(spark, Source.find(spark, stream, str(file), None, None), stream).read_kept()
