"""A CSV, JSON lines, Parquet, Arrow and pandas agree on what is NULL, what is NaN and what is a text."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq
import pytest

from lookback.core.streams.declaration import Stream
from lookback.core.streams.eventrows import read_events
from lookback.spark.ingest.fields import REASON
from lookback.spark.ingest.filerows import Files
from lookback.spark.ingest.sources import Source

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
FIELDS = {
    "id": "string",
    "at": "timestamp",
    "country": "string",
    "ratio": "double",
    "amount": "decimal(9,2)",
    "n": "int",
    "note": "string",
}
STREAM = Stream.from_dict({"stream": "events", "event_id": "id", "event_time": "at", "fields": FIELDS})
CSV = """id,at,country,ratio,amount,n,note
a,2026-01-31T12:00:00Z,NA,NaN,1.5,1,
b,2026-01-31T12:00:00Z,null,,,,""
c,2026-01-31T12:00:00Z,None,Infinity,2,,nan
d,2026-01-31T12:00:00Z,,0.5,,3,N/A
"""
MEANT = [
    ["NA", "NaN", 1.5, 1, None],
    ["null", None, None, None, None],
    ["None", math.inf, 2.0, None, "nan"],
    [None, 0.5, None, 3, "N/A"],
]


def show(value: Any) -> Any:
    return "NaN" if value != value else float(value) if type(value).__name__ == "Decimal" else value


def harness(rows: Any) -> list[list[Any]]:
    columns = read_events(rows, STREAM, 1)[0].columns
    return [list(map(show, row)) for row in zip(*(columns[name].to_list() for name in list(FIELDS)[2:]), strict=True)]


def ingested(spark: SparkSession, file: Path) -> list[list[Any]]:
    rows = Files(spark, Source.find(spark, STREAM, str(file), None, None), STREAM).read_together()
    assert rows.where(f"{REASON} is not null").count() == 0
    return [list(map(show, row)) for row in rows.orderBy("id").select(*list(FIELDS)[2:]).collect()]


def read_as_the_guide_does(file: Path) -> pd.DataFrame:
    guide = (Path(__file__).parents[2] / "docs" / "how-to" / "write-a-rule.md").read_text(encoding="utf-8")
    (arguments,) = re.findall(r'pd\.read_csv\("conf/samples/payments\.csv", (.*)\)$', guide, re.MULTILINE)
    frame: pd.DataFrame = eval(f"pd.read_csv(file, {arguments})", {"pd": pd, "file": file})
    return frame


@pytest.mark.long
def test_null_and_nan_are_the_same_whatever_reads_them(spark: SparkSession, tmp_path: Path) -> None:
    file = tmp_path / "x.csv"
    file.write_text(CSV, encoding="utf-8")
    frame = read_as_the_guide_does(file)
    options = arrow_csv.ConvertOptions(
        null_values=[""], strings_can_be_null=True, column_types=dict.fromkeys(FIELDS, pa.string())
    )
    names = list(FIELDS)[2:]
    documents = [
        {"id": id_, "at": "2026-01-31T12:00:00Z", **{name: float("nan") if value == "NaN" else value for name, value in zip(names, row, strict=True)}}
        for id_, row in zip("abcd", MEANT, strict=True)
    ]  # fmt: skip
    typed = pa.table(
        {
            "id": list("abcd"), "at": ["2026-01-31T12:00:00Z"] * 4, "country": [row[0] for row in MEANT],
            "ratio": pa.array([math.nan, None, math.inf, 0.5]), "amount": pa.array([1.5, None, 2.0, None]),
            "n": pa.array([1, None, None, 3], pa.int32()), "note": [row[4] for row in MEANT],
        }
    )  # fmt: skip
    pq.write_table(typed, tmp_path / "x.parquet")
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(each) + "\n" for each in documents), encoding="utf-8")
    assert {
        "the CSV by ingest": ingested(spark, file),
        "JSON by ingest": ingested(spark, tmp_path / "x.jsonl"),
        "Parquet by ingest": ingested(spark, tmp_path / "x.parquet"),
        "the CSV by pandas": harness(frame),
        "the CSV by Arrow": harness(arrow_csv.read_csv(file, convert_options=options)),
        "dicts": harness(documents),
        "an Arrow table": harness(typed),
        "pandas with Arrow's types": harness(typed.to_pandas(types_mapper=pd.ArrowDtype)),
    } == dict.fromkeys(
        [
            "the CSV by ingest", "JSON by ingest", "Parquet by ingest", "the CSV by pandas", "the CSV by Arrow", "dicts",
            "an Arrow table", "pandas with Arrow's types",
        ],
        MEANT,
    )  # fmt: skip
    # In a frame of numpy's types NaN is what is missing, as it is in the Parquet file that pandas would write of it.
    unmarked = [[*row[:1], None, *row[2:]] if row[1] == "NaN" else row for row in MEANT]
    frame = typed.to_pandas()
    frame.to_parquet(tmp_path / "y.parquet")
    assert (harness(frame), ingested(spark, tmp_path / "y.parquet")) == (unmarked, unmarked)
