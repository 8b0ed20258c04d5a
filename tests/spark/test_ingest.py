"""Ingest: what is offered is accounted for, each event is once in the table, in commits in order."""

from __future__ import annotations

import datetime as dt
import fcntl
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from lookback.config import load_streams
from lookback.core.errors import SetupError
from lookback.core.streams.declaration import Stream
from lookback.core.streams.source_keys import READER_OPTIONS
from lookback.spark.ingest import commits, fields
from lookback.spark.ingest.duplicates import read_possible_duplicates
from lookback.spark.ingest.files import ingest, ingest_continuously
from lookback.spark.ingest.report import IngestReport
from lookback.spark.ingest.sources import write_file_pattern
from lookback.stream_draft import draft_stream

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from lookback.spark.tables.lakehouse import Tables

pytestmark = pytest.mark.spark
CONF = Path(__file__).parents[2] / "conf"
START = dt.datetime(2024, 3, 4, tzinfo=dt.timezone.utc)
DAY = 86_400
# How a rejected row says what to do.
AS_TIME = "write it as 2026-01-31T12:00:00Z, or say how it is written by columns: {at: \"to_timestamp(at, 'dd.MM.yyyy HH:mm:ss')\"}"


def stream(**changes: Any) -> Stream:
    document = {
        "stream": "events",
        "event_id": "id",
        "event_time": "at",
        "fields": {"id": "string", "at": "timestamp", "amount": "decimal(18,2)", "note": "string"},
        "commit_rows": 4,
    }
    return Stream.from_dict({**document, **changes})


def at(seconds: float) -> str:
    return (START + dt.timedelta(seconds=seconds)).isoformat()


def json_lines(file: Path, rows: list[Any]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    return file


def events(*seconds: float, first: int = 0) -> list[dict[str, str]]:
    return [{"id": f"e{number:04d}", "at": at(second)} for number, second in enumerate(seconds, first)]


def take(tables: Tables, declared: Stream, path: Path, **options: Any) -> IngestReport:
    report = ingest(tables, declared, path, progress=None, **options)
    assert report.balanced
    return report


def ids(tables: Tables, name: str = "events") -> list[str]:
    """In arrival order."""
    feed = tables.spark.read.format("delta").option("readChangeFeed", "true").option("startingVersion", "0")
    rows = feed.load(tables.path_or_name(name)).orderBy("_commit_version", "at", "position").select("id").collect()
    return [row[0] for row in rows]


def reasons(tables: Tables) -> list[tuple[str, str]]:
    rows = tables.read("rejected_events").orderBy("raw").select("raw", "reason").collect()
    return [(row[0], row[1]) for row in rows]


@pytest.mark.long
def test_c3_1_commits_hold_one_file_sorted_by_time_and_position(tables: Tables, tmp_path: Path):
    same_time = [{"id": id_, "at": at(50)} for id_ in ("é", "Z", "a", "10", "9", "\U0001f600", "\uffff")]
    file = json_lines(tmp_path / "x.jsonl", [*reversed(events(*range(10))), *same_time])

    report = take(tables, stream(), file)

    history = tables.delta("events").history().where("operation = 'WRITE'").orderBy("version").collect()
    assert [row.operationMetrics["numFiles"] for row in history] == ["1"] * 5
    assert [row.operationMetrics["numOutputRows"] for row in history] == ["4", "4", "4", "4", "1"]
    assert ids(tables) == [f"e{n:04d}" for n in range(10)] + [row["id"] for row in same_time]
    assert (report.commits, report.first_version, report.last_version) == (5, 1, 5)
    for path in tables.read("events").inputFiles():
        rows = pq.ParquetFile(path.removeprefix("file://")).read().to_pylist()
        assert rows == sorted(rows, key=lambda row: (row["at"], row["position"]))


@pytest.mark.long
def test_c3_1_a_commit_has_one_stamp_later_than_all_before_even_if_the_clock_steps_back(
    tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    clock = iter(range(2_000_000_000_000_000, 0, -1_000_000))
    monkeypatch.setattr(commits, "read_clock", lambda: next(clock))

    for run in range(2):
        take(tables, stream(), json_lines(tmp_path / f"{run}.jsonl", events(*range(6), first=10 * run)))

    feed = tables.spark.read.format("delta").option("readChangeFeed", "true").option("startingVersion", "0")
    rows = feed.load(tables.path_or_name("events")).select("_commit_version", "ingested_at").distinct().collect()
    stamps = [row.ingested_at for row in sorted(rows)]
    assert [row._commit_version for row in sorted(rows)] == [1, 2, 3, 4]
    assert stamps == sorted(set(stamps))


def test_c3_3_the_account_closes_with_every_kind_of_row(tables: Tables, tmp_path: Path):
    good = {"id": "a", "at": at(0), "amount": "1.50"}
    rows: list[Any] = [
        good,
        {**good, "note": "second"},
        "",
        '{"id": "b", "at": ',
        {"id": None, "at": at(1)},
        {"id": "c", "at": "yesterday"},
        {"id": "d", "at": at(2), "amount": "12,50"},
        {"at": "x", "amount": "y"},
        {"id": "e", "at": at(3), "amount": 7, "unknown": {"x": 1}},
        {"id": "f", "at": "+99999-01-01T00:00:00Z"},
    ]

    report = take(tables, stream(), json_lines(tmp_path / "x.json", rows))

    assert (report.offered, report.ingested, report.duplicates, report.rejected) == (9, 2, 0, 7)
    found = {reason for _, reason in reasons(tables)}
    assert found == {
        "malformed line",
        "id is NULL",
        f"at: 'yesterday' is not timestamp: {AS_TIME}",
        "amount: '12,50' is not decimal(18,2): write a decimal point, by columns: {amount: \"replace(amount, ',', '.')\"}",
        f"id is NULL; at: 'x' is not timestamp: {AS_TIME}; amount: 'y' is not decimal(18,2): write a number, such as 12.50",
        f"at: '+99999-01-01T00:00:00Z' is not timestamp: {AS_TIME}",
        "id: 'a' is the id of an existing event, and this row differs from it: give the row its own id, or delete that event",
    }
    assert ('{"id": "b", "at": ', "malformed line") in reasons(tables)
    assert tables.read("events").where("id = 'a'").head()["note"] is None  # type: ignore[index]
    assert tables.read("events").where("id = 'e'").head()["amount"] == Decimal("7.00")  # type: ignore[index]
    assert "9 offered = 2 ingested + 0 duplicates + 7 rejected" in str(report)


@pytest.mark.long
def test_c4_the_same_file_again_adds_nothing_not_even_rejected_rows(tables: Tables, tmp_path: Path):
    file = json_lines(tmp_path / "x.jsonl", [*events(*range(6)), "{", "{"])
    take(tables, stream(), file)
    version = tables.version("events")

    report = take(tables, stream(), file)

    assert (report.ingested, report.duplicates, report.rejected, report.commits) == (0, 6, 2, 0)
    assert (tables.version("events"), tables.read("rejected_events").count()) == (version, 2)


# dedupe window 30 days:  |----30----|    both ends included. Days that one id is offered at, and those that stay:
CHAINS = {
    "both-ends": ([0, 30], [0]),
    "just-beyond": ([0, 30 + 1 / DAY], [0, 30 + 1 / DAY]),
    # 20 goes because of 0; 40 is 40 from the one that stayed
    "chain": ([0, 20, 40], [0, 40]),
    "long-chain": ([0, 20, 40, 60, 80], [0, 40, 80]),
    "same-time": ([5, 5, 5], [5]),
}


@pytest.mark.parametrize("runs", [1, pytest.param(5, marks=pytest.mark.long)])
def test_c4_of_one_id_within_the_dedupe_window_the_first_stays(tables: Tables, tmp_path: Path, runs: int):
    offered = {id_: [{"id": id_, "at": at(day * DAY)} for day in days] for id_, (days, _) in CHAINS.items()}
    for run in range(runs):
        part = [row for rows in offered.values() for row in (rows if runs == 1 else rows[run : run + 1])]
        take(tables, stream(commit_rows=100), json_lines(tmp_path / f"{run}.jsonl", part))

    found = tables.read("events").orderBy("id", "at").selectExpr("id", "unix_micros(at)").collect()
    start = int(START.timestamp()) * 1_000_000
    expected = [
        (id_, start + round(day * DAY) * 1_000_000) for id_, (_, days) in sorted(CHAINS.items()) for day in days
    ]
    assert [tuple(row) for row in found] == expected


@pytest.mark.long
def test_c4_new_events_among_known_ones_are_all_taken(tables: Tables, tmp_path: Path):
    known, new = events(*range(0, 20, 2)), events(*range(1, 20, 2), first=100)
    take(tables, stream(), json_lines(tmp_path / "1.jsonl", known))

    report = take(tables, stream(), json_lines(tmp_path / "2.jsonl", [*known, *new]))

    assert (report.ingested, report.duplicates, report.commits) == (10, 10, 3)
    assert ids(tables) == [row["id"] for row in [*known, *new]]


@pytest.mark.long
def test_c4_of_equal_time_and_id_the_first_of_the_file_stays(tables: Tables, tmp_path: Path):
    rows = [{"id": f"x{n % 3}", "at": at(0), "note": str(n)} for n in range(30)]

    take(tables, stream(), json_lines(tmp_path / "x.jsonl", rows))

    found = tables.read("events").orderBy("id").select("id", "note").collect()
    assert [tuple(row) for row in found] == [("x0", "0"), ("x1", "1"), ("x2", "2")]


@pytest.mark.long
def test_c4_looking_for_duplicates_skips_files_outside_the_window(tables: Tables, tmp_path: Path):
    declared = stream(dedupe_window="10 seconds", commit_rows=10)
    take(tables, declared, json_lines(tmp_path / "x.jsonl", events(*range(0, 400, 10))))
    assert len(tables.read("events").inputFiles()) == 4
    second = 1_000_000
    start = int(START.timestamp()) * second

    def files(first: float, last: float, ids: tuple[str, str] = ("", "f")) -> int:
        bounds = (start + int(first * second), start + int(last * second))
        return len(read_possible_duplicates(tables, declared, *bounds, *ids).inputFiles())

    # files:  0..90  100..190  200..290  300..390; the batch's times widened by 10 s on either side, ends included
    assert files(150, 160) == 1
    assert files(110, 110) == 1
    assert files(100, 100) == 2
    assert files(401, 500) == 0
    assert files(0, 400) == 4
    assert files(0, 400, ids=("e0005", "e0012")) == 2


@pytest.mark.long
def test_c8_killed_between_commits_and_run_again_takes_in_what_is_missing(
    tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = json_lines(tmp_path / "x.jsonl", [*events(*range(10)), {"id": "e0003", "at": at(3)}, "{"])
    append, left = type(tables).append, iter([True, True])

    def append_twice(self: Tables, *arguments: Any) -> None:
        next(left)
        append(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(type(tables), "append", append_twice)
        with pytest.raises(StopIteration):
            ingest(tables, stream(), file, progress=None)
    assert len(ids(tables)) == 8

    report = take(tables, stream(), file)

    assert (report.ingested, report.duplicates, report.rejected) == (2, 9, 1)
    assert ids(tables) == [f"e{n:04d}" for n in range(10)]
    assert tables.read("rejected_events").count() == 1


@pytest.mark.long
def test_columns_make_fields_and_what_they_cannot_make_is_rejected(tables: Tables, tmp_path: Path):
    columns = {
        "amount": "cast(cents as decimal(18,2)) / 100",
        "at": "timestamp_millis(cast(ms as bigint))",
        "note": "nullif(text, '')",
    }
    file = tmp_path / "x.csv"
    lines = [
        "id,ms,cents,text",
        "a,1709510400123,1050,hello",
        "b,1709510400456,,",
        "c,soon,1,x",
        "d,1709510400789,1o,x",
        "e,1",
        # More milliseconds than 64 bits of microseconds hold.
        "g,9000000000000000000,1,x",
    ]
    file.write_text("\n".join([*lines, 'f,1709510401000,5,"two\nlines"']) + "\n", encoding="utf-8")

    report = take(tables, stream(columns=columns), file, options={"multiLine": "true"})

    assert (report.ingested, report.rejected) == (3, 4)
    rows = tables.read("events").orderBy("id").select("id", "at", "amount", "note").collect()
    assert [(row.id, row.amount, row.note) for row in rows] == [
        ("a", Decimal("10.50"), "hello"),
        ("b", None, None),
        ("f", Decimal("0.05"), "two\nlines"),
    ]
    assert reasons(tables) == [
        ("e,1", "malformed line"),
        (
            '{"id":"c","ms":"soon","cents":"1","text":"x"}',
            f"at: `{columns['at']}` is not timestamp where ms = 'soon': correct the expression or the row",
        ),
        (
            '{"id":"d","ms":"1709510400789","cents":"1o","text":"x"}',
            f"amount: `{columns['amount']}` is not decimal(18,2) where cents = '1o': correct the expression or the row",
        ),
        (
            '{"id":"g","ms":"9000000000000000000","cents":"1","text":"x"}',
            f"at: `{columns['at']}` is not timestamp where ms = '9000000000000000000': correct the expression or the row",
        ),
    ]


@pytest.mark.long
def test_a_missing_column_is_null_but_for_id_and_time(tables: Tables, tmp_path: Path):
    file = tmp_path / "x.csv"
    file.write_text(f"id,happened\na,{at(0)}\n")

    with pytest.raises(
        SetupError, match=r"x\.csv: column 'at', from which the event_time of stream 'events' .* there are happened, id"
    ):
        ingest(tables, stream(), file, progress=None)
    report = take(tables, stream(columns={"at": "happened"}), file)

    assert report.ingested == 1
    assert tables.read("events").where("amount is null and note is null").count() == 1


def test_json_lines_without_the_time_are_refused_by_name(tables: Tables, tmp_path: Path):
    with pytest.raises(SetupError, match=r"column 'at'.*there are id, time"):
        ingest(tables, stream(), json_lines(tmp_path / "x.jsonl", [{"id": "a", "time": at(0)}]), progress=None)


@pytest.mark.long
def test_parquet_types_are_cast_to_the_declared_ones(tables: Tables, tmp_path: Path):
    times = pa.array([START, START, None], pa.timestamp("ns", tz="UTC")).cast(pa.timestamp("us", tz="UTC"))
    rows = pa.table({"id": [1, 2, 3], "at": times, "amount": [0.5, 1e30, 1.0], "note": [1, None, 3]})
    pq.write_table(rows, tmp_path / "x.parquet")

    report = take(tables, stream(), tmp_path)

    assert (report.ingested, report.rejected) == (1, 2)
    row = tables.read("events").drop("ingested_at").head()
    assert row is not None
    assert (row.id, row.amount, row.note) == ("1", Decimal("0.50"), "1")
    assert {reason for _, reason in reasons(tables)} == {
        "amount: '1.0E30' is not decimal(18,2): it is too large, so declare more digits", "at is NULL",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("files", "message"),
    [([], "cannot be read"), (["a.csv", "b.jsonl"], "several formats"), (["a.txt"], "parquet, csv, json")],
)
def test_a_source_that_cannot_be_told_is_refused(tables: Tables, tmp_path: Path, files: list[str], message: str):
    folder = tmp_path / "source"
    for name in files:
        json_lines(folder / name, [{"id": "a", "at": at(0)}])

    with pytest.raises(SetupError, match=message):
        ingest(tables, stream(), folder, progress=None)


def test_an_expression_that_spark_cannot_analyse_is_refused_by_name(tables: Tables, tmp_path: Path):
    file = json_lines(tmp_path / "x.jsonl", events(0))

    with pytest.raises(SetupError, match=r"columns\.amount cannot become decimal\(18,2\)"):
        ingest(tables, stream(columns={"amount": "no_such_function(id)"}), file, progress=None)


def test_c3_1_a_second_ingest_of_a_stream_is_refused_and_told_who_holds_it(tables: Tables, tmp_path: Path):
    file = json_lines(tmp_path / "x.jsonl", events(0))
    take(tables, stream(), file)
    lock = Path(str(tables.root), ".ingest-events.lock")

    with lock.open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        owner = {"pid": 4711, "host": "elsewhere", "user": "ann", "since": "2024-03-04T00:00:00Z"}
        held.write(json.dumps(owner))
        held.flush()
        with pytest.raises(
            SetupError, match="the ingest of stream 'events' is in use by process 4711 of ann on elsewhere, since 2024"
        ):
            ingest(tables, stream(), file, progress=None)


@pytest.mark.long
def test_the_lock_of_a_killed_process_is_taken_over(tables: Tables, tmp_path: Path):
    code = (
        "import sys, time\nfrom lookback.spark.tables.locks import lock_ingest\nfrom types import SimpleNamespace as N\n"
        "with lock_ingest(N(root=sys.argv[1]), N(name='events')):\n    print('held', flush=True)\n    time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tables.root)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        file = json_lines(tmp_path / "x.jsonl", events(0))
        with pytest.raises(SetupError, match=f"process {process.pid} of"):
            ingest(tables, stream(), file, progress=None)
        os.kill(process.pid, signal.SIGKILL)

    assert take(tables, stream(), file).ingested == 1


@pytest.mark.long
def test_continuous_ingest_takes_files_as_they_come_and_once(tables: Tables, tmp_path: Path):
    folder, checkpoint = tmp_path / "in", tmp_path / "checkpoint"
    json_lines(folder / "1.jsonl", [*events(0, 1), "{"])
    query = ingest_continuously(tables, stream(), folder, checkpoint=checkpoint, every="200 milliseconds")
    try:
        _await(query, lambda: tables.read("events").count() == 2)
        with pytest.raises(SetupError, match="one at a time"):
            ingest(tables, stream(), folder, progress=None)
        json_lines(tmp_path / "2.jsonl", events(5, 6, first=1)).rename(folder / "2.jsonl")
        _await(query, lambda: tables.read("events").count() == 3 and not query.status["isTriggerActive"])
    finally:
        query.stop()
    assert ids(tables) == ["e0000", "e0001", "e0002"]
    # The line that is not JSON, and another event that has the id of one before.
    reasons = [row["reason"] for row in tables.read("rejected_events").orderBy("ingested_at").collect()]
    assert len(reasons) == 2
    assert "e0001" in reasons[1]

    _await(None, lambda: Path(str(tables.root), ".ingest-events.lock").read_text() == "")
    json_lines(tmp_path / "3.jsonl", events(9, first=9)).rename(folder / "3.jsonl")
    reports: list[IngestReport] = []
    again = ingest_continuously(tables, stream(), folder, checkpoint=checkpoint, every=None, progress=reports.append)
    again.awaitTermination()

    assert [str(report).partition(";")[0] for report in reports] == [
        "events: 1 offered = 1 ingested + 0 duplicates + 0 rejected"
    ]


@pytest.mark.long
def test_a_file_that_grew_after_it_was_taken_is_told(tables: Tables, tmp_path: Path):
    folder, warnings = tmp_path / "in [1]", list[str]()
    file = json_lines(folder / "it's.jsonl", events(0))

    def take_new() -> None:
        query = ingest_continuously(
            tables, stream(), folder, checkpoint=tmp_path / "checkpoint", every=None, warn=warnings.append
        )
        query.awaitTermination()

    take_new()
    take_new()
    assert warnings == []
    json_lines(file, events(0, 1))
    os.utime(file, (time.time() + 5, time.time() + 5))
    take_new()
    (warning,) = warnings
    assert warning.startswith(
        f"1 file changed after an earlier run ingested it, such as {file}: each file name is read once"
    )
    assert ids(tables) == ["e0000"]
    assert take(tables, stream(), file).ingested == 1
    assert shlex.quote(str(file)) in warning


@pytest.mark.long
def test_the_first_run_of_new_files_leaves_out_what_ingest_took(tables: Tables, tmp_path: Path):
    folder, said, reports = tmp_path / "in", list[str](), list[Any]()
    changed = [json_lines(folder / f"{number}.jsonl", events(number, first=number)) for number in (0, 1)][1]
    assert take(tables, stream(), folder).ingested == 2
    json_lines(changed, events(1, 2, first=1))
    os.utime(changed, (time.time() + 5, time.time() + 5))
    json_lines(folder / "c.jsonl", events(3, first=3))

    def take_new(checkpoint: str) -> None:
        reports.clear()
        said.clear()
        ingest_continuously(
            tables,
            stream(),
            folder,
            checkpoint=tmp_path / checkpoint,
            every=None,
            progress=reports.append,
            warn=said.append,
        ).awaitTermination()

    take_new("checkpoint")
    assert [(each.offered, each.ingested) for each in reports] == [(3, 2)]
    (sentence,) = said
    assert sentence.startswith("1 file of this path was ingested before and has not changed since, so it is not read")
    # All are known now, and nothing is read.
    take(tables, stream(), folder)
    take_new("another")
    assert reports == []
    assert said[0].startswith("3 files of this path were ingested before and have not changed since")
    # What rejected a row may be read again by other options.
    (folder / "d.jsonl").write_text("{}", encoding="utf-8")
    take(tables, stream(), folder)
    take_new("third")
    assert [(each.offered, each.rejected) for each in reports] == [(1, 1)]


def _await(query: Any, condition: Any) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert query is None or query.exception() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.long
def test_the_samples_that_are_shipped_are_ingested_whole(
    tables: Tables, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
):
    for name, declared in load_streams(CONF).items():
        if name != "transactions" and declared.source:
            report = take(tables, declared, CONF.parent / declared.source["path"])
            assert report.rejected == report.duplicates == 0
            assert report.ingested > 200


def test_rows_of_a_commit_are_cut_across_partitions():
    base = 1 << 33

    assert list(commits._cut_commits({0: 3, 1: 6, 2: 0, 3: 1}, 4)) == [
        [range(3), range(base, base + 1)],
        [range(base + 1, base + 5)],
        [range(base + 5, base + 6), range(3 * base, 3 * base + 1)],
    ]
    assert list(commits._cut_commits({0: 4}, 4)) == [[range(4)]]
    assert list(commits._cut_commits({}, 4)) == []


@pytest.mark.parametrize(
    ("expression", "lenient"),
    [
        ("url_decode(x)", "try_URL_DECODE(x)"),
        ("make_timestamp(a, b, c, d, e, f)", "try_MAKE_TIMESTAMP(a, b, c, d, e, f)"),
        ("timestamp_seconds(x)", "if((x) between -9223372036854 and 9223372036854, TIMESTAMP_SECONDS(x), null)"),
        ("to_timestamp(x, 'yyyy') + y", "try_add(try_TO_TIMESTAMP(x, 'yyyy'), y)"),
        ("nullif(x, '')", "NULLIF(x, '')"),
    ],
)
def test_what_raises_an_error_in_spark_gives_null(expression: str, lenient: str):
    assert fields._make_lenient(expression).value == lenient


def test_the_options_of_a_source_are_those_that_spark_knows(spark: SparkSession):
    """A newer Spark may know more; none that it knows may be refused, and none be taken that it does not know."""
    package = spark._jvm.org.apache.spark.sql  # type: ignore[union-attr]
    known = {
        "csv": package.catalyst.csv.CSVOptions,
        "json": package.catalyst.json.JSONOptions,
        "parquet": package.execution.datasources.parquet.ParquetOptions,
    }
    for format_, options in known.items():
        names = set(str(options.getAllOptions().mkString(" ")).split())
        assert {name for name in names if "." not in name} == set(READER_OPTIONS[format_])


@pytest.mark.long
def test_a_file_with_another_separator_is_told_with_the_option_that_reads_it(tables: Tables, tmp_path: Path):
    file = tmp_path / "in.csv"
    for number, separator in enumerate((";", "\t", "|")):
        file.write_text(f"id{separator}at{separator}note\ne{number}{separator}{at(1)}{separator}x\n")
        with pytest.raises(SetupError, match="the header is a single column") as refused:
            ingest(tables, stream(), file, progress=None)
        (option,) = re.findall(r"to the source of stream 'events': `(options: .*)`", str(refused.value))
        source = {"format": "csv", "path": str(file), **yaml.safe_load(option)}
        assert source["options"] == {"sep": separator}
        assert ingest(tables, stream(source=source), progress=None).ingested == 1


@pytest.mark.long
@pytest.mark.parametrize(
    "text",
    [
        "Order ID;ordered_at;amount\n1;31.01.2026 10:00;1.234,50\n2;1.2.2026 9:05;n/a\n",
        'id,at,amount\n1,1/31/2026 9:05 PM,"1,234.50"\n2,12/1/2026 10:05 AM,3.5\n',
        "id\tat\tplz\tday\n1\t2026-01-31 10:00\t01234\t2026/01/31\n",
        "\ufeffid,at,ts\n1,1769853600,1769853600123\n",
        "id,day\n1,2026-01-31\n",
        "at,who\n2026-01-31T10:00:00+01:00,Ann\n2026-01-31T10:00:00+01:00,Bob\n2026-01-31T10:00:00+01:00,Bob \n",
    ],
)
def test_what_is_drafted_from_a_file_takes_all_of_it_in(tables: Tables, tmp_path: Path, text: str):
    file = tmp_path / "in.csv"
    file.write_text(text, encoding="utf-8")
    declared = Stream.from_dict(yaml.safe_load(draft_stream(file)))
    report = ingest(tables, declared, progress=None)
    assert (report.ingested, report.rejected, report.duplicates) == (text.count("\n") - 1, 0, 0)
    row = tables.read(declared.name).orderBy(declared.event_id).first()
    assert row is not None
    lacking = {name for name, value in row.asDict().items() if value is None}
    assert not lacking


@pytest.mark.long
def test_what_the_page_says_of_numbers_and_times_is_so(tables: Tables, tmp_path: Path):
    page = (CONF.parent / "docs/streams.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)`[^|]* \| `(amount|at): (\".*\")` \|$", page, re.MULTILINE)
    assert len(rows) == 8
    of_field = {
        name: [(value, yaml.safe_load(text)) for value, field, text in rows if field == name]
        for name in ("amount", "at")
    }
    # An amount and a time in one row.
    for number, ((amount, amount_as), (time_, time_as)) in enumerate(
        zip(of_field["amount"], of_field["at"], strict=True)
    ):
        file = json_lines(tmp_path / f"{number}.json", [{"id": str(number), "at": time_, "amount": amount}])
        columns = {"amount": amount_as, "at": time_as}
        assert ingest(tables, stream(columns=columns), file, progress=None).ingested == 1
    found = sorted(tables.read("events").collect())
    assert [None if row["amount"] is None else str(row["amount"]) for row in found] == [
        "12.50",
        "1234.50",
        "1234.50",
        None,
    ]
    assert [row["at"].astimezone(dt.timezone.utc).isoformat() for row in found] == [
        "2026-01-31T10:00:00+00:00", "2026-01-31T21:05:00+00:00", "2026-01-31T10:00:00+00:00", "2026-01-31T09:00:00+00:00",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "pattern"),
    [
        ("a b.csv", "[a] b.csv"),
        ("in/x[1].csv", r"in/[x]\[1\].csv"),
        ("/x.csv", "/[x].csv"),
        ("s3a://b/1", "s3a://b/[1]"),
    ],
)
def test_the_pattern_of_one_file_begins_where_its_path_does(path: str, pattern: str) -> None:
    assert write_file_pattern(path) == pattern


@pytest.mark.parametrize("name", ["new.jsonl", "[a] {b}, 100% é.jsonl"])
def test_a_new_file_is_taken_by_its_own_path(tables: Tables, tmp_path: Path, name: str) -> None:
    file, reports = json_lines(tmp_path / "in" / name, events(0, 1)), list[IngestReport]()
    json_lines(tmp_path / "in" / "other.jsonl", events(2, first=2))
    for _ in range(2):
        query = ingest_continuously(
            tables, stream(), file, checkpoint=tmp_path / "checkpoint", every=None, progress=reports.append
        )
        query.awaitTermination()
    assert ids(tables) == ["e0000", "e0001"]
    assert [report.ingested for report in reports] == [2]
