"""Bad events, one of each kind among good ones: told with a reason in rejected_events, and nothing else is stopped."""

from __future__ import annotations

import contextlib
import datetime as dt
import gzip
import json
import os
import time
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lookback.core.errors import SetupError
from lookback.core.streams.declaration import Stream
from lookback.spark.ingest.fields import REASON
from lookback.spark.ingest.filerows import Files
from lookback.spark.ingest.files import ingest, ingest_continuously
from lookback.spark.ingest.report import IngestReport
from lookback.spark.ingest.round import IngestRound
from lookback.spark.ingest.sources import Source
from lookback.spark.operations.status import event_account
from lookback.spark.rules import RulesTable
from lookback.spark.stream.pipeline import Evaluation
from lookback.spark.tables.locks import lock_ingest

if TYPE_CHECKING:
    from lookback.spark.tables.lakehouse import Tables

pytestmark = pytest.mark.spark
AT = "2024-03-04T00:00:00Z"
# How a rejected row says what to do.
AS_TIME = "write it as 2026-01-31T12:00:00Z, or say how it is written by columns: {at: \"to_timestamp(at, 'dd.MM.yyyy HH:mm:ss')\"}"
AS_NUMBER = "write a number, such as 12.50"
HUGE = 10 * 1024 * 1024


def stream(**changes: Any) -> Stream:
    fields = {"id": "string", "at": "timestamp", "amount": "decimal(18,2)", "ratio": "double", "note": "string"}
    document = {"stream": "events", "event_id": "id", "event_time": "at", "fields": fields}
    return Stream.from_dict({**document, **changes})


def take(tables: Tables, declared: Stream, path: Path | str, **options: Any) -> IngestReport:
    report = ingest(tables, declared, path, progress=None, **options)
    assert report.balanced
    return report


def written(file: Path, content: str | bytes) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


def half(content: bytes) -> bytes:
    return content[: len(content) // 2]


def zipped(lines: int) -> bytes:
    # Text that does not repeat, so that half of the file holds whole lines.
    return gzip.compress("".join(f'{{"id": "z{n}", "at": "{AT}", "note": "{n * n}"}}\n' for n in range(lines)).encode())


def parquet(file: Path, **columns: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), file)
    return file


def reasons(tables: Tables) -> dict[str, set[str]]:
    """File name -> the reasons of its rows."""
    found: dict[str, set[str]] = {}
    for row in tables.read("rejected_events").collect():
        found.setdefault(row["source"].rsplit("/", 1)[-1], set()).add(row["reason"])
    return found


def events(tables: Tables) -> dict[str, Any]:
    return {row["id"]: row for row in tables.read("events").collect()}


@pytest.mark.long
def test_every_kind_of_bad_line_is_rejected_alone(tables: Tables, tmp_path: Path):
    good = {
        "a": {"amount": 1.5, "note": "first"},
        "nul": {"note": "a\u0000b"},
        "rtl": {"note": "\u202e\u05d0\u05d1"},
        "surrogate": {"note": "\ud800"},
        "huge": {"note": "x" * HUGE},
        "nested": {"note": {"x": [1, 2]}},
        "nan": {"ratio": float("nan")},
        "infinite": {"ratio": float("-inf")},
        # A number; the nearest double is ...994.
        "exact": {"amount": "EXACT"},
        "year-1": {"at": "0001-01-02T00:00:00Z"},
        "year-9999": {"at": "9999-12-30T23:59:59.999999Z"},
    }
    lines = [json.dumps({"id": id_, "at": AT, **row}) for id_, row in good.items()]
    lines = [line.replace('"EXACT"', "9007199254740993.01") for line in lines]
    bad = {
        '{"id": "b", "at": ': "malformed line",
        f'[{{"id": "b", "at": "{AT}"}}]': "malformed line",
        f'{{"id": "b", "at": "{AT}"}}{{"id": "c", "at": "{AT}"}}': "malformed line",
        f'{{"id": "b", "at": "{AT}"}}, {{"id": "c", "at": "{AT}"}}': "malformed line",
        "null": "malformed line",
        f'{{"at": "{AT}"}}': "id is NULL",
        '{"id": "b"}': "at is NULL",
        '{"id": "b", "at": "yesterday"}': f"at: 'yesterday' is not timestamp: {AS_TIME}",
        '{"id": "b", "at": {"t": 1}}': """at: '{"t":1}' is not timestamp: """ + AS_TIME,
        '{"id": "b", "at": "+10000-01-01"}': f"at: '+10000-01-01' is not timestamp: {AS_TIME}",
        '{"id": "b", "at": "0000-12-31"}': f"at: '0000-12-31' is not timestamp: {AS_TIME}",
        '{"id": "b", "at": "0001-01-01"}': "at is on 0001-01-01 or 9999-12-31, which not every zone has",
        '{"id": "b", "at": "9999-12-31T23:59:59Z"}': "at is on 0001-01-01 or 9999-12-31, which not every zone has",
        f'{{"id": "b", "at": "{AT}", "amount": NaN}}': f"amount: 'NaN' is not decimal(18,2): {AS_NUMBER}",
        f'{{"id": "b", "at": "{AT}", "amount": 1e30}}': "amount: '1.0E30' is not decimal(18,2): it is too large, so declare more digits",
        f'{{"id": "b", "at": "{AT}", "ratio": "12,5"}}': "ratio: '12,5' is not double: write a decimal point, by columns: {ratio: \"replace(ratio, ',', '.')\"}",
        f'{{"id": "b", "at": "{AT}", "amount": "{"y" * HUGE}"}}': (
            f"amount: '{'y' * 100}... (10,485,760 characters)' is not decimal(18,2): {AS_NUMBER}"
        ),
    }
    folder = tmp_path / "a folder [1], 100%"
    written(folder / "1" / "x.jsonl", "\n".join([*lines, *bad]) + "\n")
    # Another file of that name, with a byte order mark, Windows' line ends, an id that is known and bytes of Latin-1.
    latin = [
        f'{{"id": "a", "at": "{AT}"}}', f'{{"id": "bom", "at": "{AT}"}}',
        f'{{"id": "l", "at": "{AT}", "note": "\xe9"}}', f'{{"id": "\xe9", "at": "{AT}"}}',
    ]  # fmt: skip
    written(folder / "2" / "x.jsonl", b"\xef\xbb\xbf" + "\r\n".join(latin).encode("latin-1"))
    written(folder / "2" / "empty.jsonl", "")
    written(folder / "2" / "torn.jsonl.gz", half(zipped(5_000)))

    pattern = str(folder).replace("[", "\\[").replace("]", "\\]")
    report = take(tables, stream(), pattern, options={"recursiveFileLookup": "true"})

    found = events(tables)
    assert sorted(found) == sorted([*good, "bom", "l"])
    assert (report.offered, report.ingested, report.duplicates, report.rejected) == (33, 13, 0, 20)
    assert found["exact"]["amount"] == Decimal("9007199254740993.01")
    assert (found["nul"]["note"], found["rtl"]["note"], found["surrogate"]["note"]) == (
        "a\0b",
        "\u202e\u05d0\u05d1",
        "?",
    )
    assert (len(found["huge"]["note"]), found["nested"]["note"]) == (HUGE, '{"x":[1,2]}')
    assert found["nan"]["ratio"] != found["nan"]["ratio"]
    assert (found["infinite"]["ratio"], found["l"]["note"]) == (float("-inf"), "\ufffd")
    rows = {row["raw"]: row for row in tables.read("rejected_events").collect()}
    assert {raw: rows[raw]["reason"] for raw in bad} == bad
    assert (
        rows['{"id": "\ufffd", "at": "2024-03-04T00:00:00Z"}']["reason"]
        == "id: '\ufffd' holds bytes that are not UTF-8"
    )
    assert rows[None]["source"].endswith("/2/torn.jsonl.gz")
    assert rows[None]["reason"].startswith("the file cannot be read as json: Unexpected end of input stream")

    # Once more: nothing new, and nothing told twice.
    assert take(tables, stream(), pattern, options={"recursiveFileLookup": "true"}).ingested == 0
    assert tables.read("rejected_events").count() == 20


@pytest.mark.long
def test_csv_files_with_other_columns_and_broken_lines_stop_no_other_file(tables: Tables, tmp_path: Path):
    folder = tmp_path / "in"
    written(folder / "1.csv", f'id,at,amount,note\na,{AT},1,x\nb,1,{AT},x\nc,{AT},1\nd,{AT},1,x,y\n"e,{AT},1,x\n')
    written(folder / "2-gains.csv", f"id,at,amount,ratio,note\nf,{AT},1,0.5,x\n")
    written(folder / "3-loses.csv", f"at,id\n{AT},g\n")
    written(folder / "4-windows.csv", f'\ufeffid,at,note\r\nh,{AT},"q""u"\r\n')
    written(folder / "5-header.csv", "id,at,amount,note\n")
    written(folder / "6-empty.csv", "")
    written(folder / "7-no-time.csv", "id,time\ni,1\n")
    written(folder / "8-torn.csv.gz", half(gzip.compress(os.urandom(50_000).hex().encode())))

    report = take(tables, stream(), folder)

    found = events(tables)
    assert sorted(found) == ["a", "f", "g", "h"]
    assert (found["f"]["ratio"], found["f"]["note"], found["g"]["note"], found["h"]["note"]) == (0.5, "x", None, 'q"u')
    assert (report.offered, report.rejected) == (10, 6)
    told = reasons(tables)
    assert told["1.csv"] == {
        f"at: '1' is not timestamp: {AS_TIME}; amount: '{AT}' is not decimal(18,2): {AS_NUMBER}", "malformed line",
    }  # fmt: skip
    assert "column 'at', from which the event_time of stream 'events' is made, is missing" in min(told["7-no-time.csv"])
    assert "cannot be read as csv: Unexpected end of input stream" in min(told["8-torn.csv.gz"])
    assert sorted(told) == ["1.csv", "7-no-time.csv", "8-torn.csv.gz"]


@pytest.mark.long
def test_parquet_files_of_other_columns_and_types_and_broken_ones(tables: Tables, tmp_path: Path):
    folder, moment = tmp_path / "in", [dt.datetime(2024, 3, 4, 0, 0, 0, 123456, dt.timezone.utc)]
    parquet(folder / "1.parquet", id=["a"], at=moment, amount=[1])
    parquet(folder / "2-gains.parquet", id=["b"], at=moment, amount=[1], note=["x"])
    parquet(folder / "3-loses.parquet", id=["c"], at=moment)
    # Other types of the id, the time and an amount that is always NULL.
    parquet(folder / "4-types.parquet", id=[4], at=[AT], amount=pa.nulls(1), note=["y"])
    parquet(folder / "5-object.parquet", id=["e"], at=[{"t": 1}])
    parquet(folder / "6-bytes.parquet", id=["f"], at=moment, note=pa.array([b"\xff"], pa.binary()).view(pa.string()))
    parquet(folder / "7-nanoseconds.parquet", id=["g"], at=pa.array([1], pa.timestamp("ns", "UTC")))
    written(folder / "8-empty.parquet", "")
    written(folder / "9-torn.parquet", half((folder / "1.parquet").read_bytes()))
    page = bytearray(
        parquet(folder / "10-page.parquet", id=[str(n) for n in range(20_000)], at=moment * 20_000).read_bytes()
    )
    page[1_000:3_000] = b"\x77" * 2_000
    written(folder / "10-page.parquet", bytes(page))

    report = take(tables, stream(), folder)

    found = events(tables)
    assert sorted(found) == ["4", "a", "b", "c", "f"]
    assert (found["b"]["note"], found["c"]["amount"], found["4"]["note"], found["f"]["note"]) == (
        "x",
        None,
        "y",
        "\ufffd",
    )
    assert (report.offered, report.rejected) == (10, 5)
    told = {name: min(texts) for name, texts in reasons(tables).items()}
    assert sorted(told) == [
        "10-page.parquet", "5-object.parquet", "7-nanoseconds.parquet", "8-empty.parquet", "9-torn.parquet",
    ]  # fmt: skip
    assert "at: '{1}' is not timestamp" in told["5-object.parquet"]
    assert "at: '1' is not timestamp" in told["7-nanoseconds.parquet"]
    assert told["9-torn.parquet"].startswith("the file cannot be read as parquet: ")


@pytest.mark.long
@pytest.mark.parametrize("format_", ["csv", "json"])
def test_a_file_that_vanished_is_not_read_as_an_empty_one(tables: Tables, tmp_path: Path, format_: str):
    content = "id,at\na,2024-03-04T00:00:00Z\n" if format_ == "csv" else '{"id": "a", "at": "2024-03-04T00:00:00Z"}\n'
    names = [f"file:{written(tmp_path / f'{name}.{format_}', content)}" for name in ("a", "b:c", "gone")]
    (tmp_path / f"gone.{format_}").unlink()
    source = Source.find(tables.spark, stream(), str(tmp_path), format_, {})
    rows, count = Files(tables.spark, source, stream(), names).read_kept()
    assert (count, [row[0] for row in rows.select(REASON).distinct().collect() if row[0]]) == (
        3,
        ["the file vanished before it was read"],
    )


@pytest.mark.long
def test_files_of_which_none_can_be_used_are_refused(tables: Tables, tmp_path: Path):
    written(tmp_path / "in" / "1.parquet", "PAR1")
    written(tmp_path / "in" / "2.parquet", "PAR1")

    with pytest.raises(SetupError, match=r"1\.parquet: the file cannot be read as parquet: .*other 1 files cannot"):
        ingest(tables, stream(), tmp_path / "in", progress=None)
    assert tables.read("rejected_events").count() == 0
    assert take(tables, stream(), written(tmp_path / "empty.csv", "")).offered == 0


@pytest.mark.long
def test_continuous_ingest_goes_on_without_files_that_are_torn_or_gone(
    tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder, checkpoint = tmp_path / "in it's [1]", tmp_path / "checkpoint [1]"
    moment = [dt.datetime(2024, 3, 4, tzinfo=dt.timezone.utc)]

    def run() -> list[str]:
        said: list[IngestReport] = []
        query = ingest_continuously(
            tables, stream(), str(folder).replace("[", "\\[").replace("]", "\\]"), checkpoint=checkpoint, every=None,
            format="parquet", progress=said.append,
        )  # fmt: skip
        try:
            query.awaitTermination()
        finally:
            # A thread of its own releases the lock once the query has ended.
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:
                with contextlib.suppress(SetupError), lock_ingest(tables, stream()):
                    break
                time.sleep(0.05)
        return [str(report).partition(";")[0] for report in said]

    for name in ("a", "gone", "torn"):
        parquet(folder / f"{name}.parquet", id=[name], at=moment)
    written(folder / "torn.parquet", half((folder / "a.parquet").read_bytes()))
    with monkeypatch.context() as patch:
        # As if it were killed: the batch is planned and not done.
        patch.setattr(IngestRound, "take", lambda *_: 1 / 0)
        with pytest.raises(Exception, match="division by zero"):
            run()
    (folder / "gone.parquet").unlink()

    assert run() == ["events: 3 offered = 1 ingested + 0 duplicates + 2 rejected"]
    told = {name: min(texts) for name, texts in reasons(tables).items()}
    assert told["gone.parquet"] == "the file vanished before it was read"
    assert told["torn.parquet"].startswith("the file cannot be read as parquet: ")

    # New files go in, with another column, and however old.
    parquet(folder / "b.parquet", id=["b"], at=moment, note=["x"])
    os.utime(parquet(folder / "c.parquet", id=[3], at=moment), (0, 0))
    assert run() == ["events: 2 offered = 2 ingested + 0 duplicates + 0 rejected"]
    assert sorted(events(tables)) == ["3", "a", "b"]


@pytest.mark.long
def test_c3_2_an_event_of_the_year_2099_makes_no_other_late(tables: Tables, tmp_path: Path):
    declared = stream(max_out_of_orderness="1 second", allowed_lateness="1 minute")
    document = {
        "rule_id": "any", "stream": "events", "severity": "low", "window": "1 hour",
        "measures": {"n": "count(*)"}, "when": "n >= 1",
    }  # fmt: skip
    RulesTable(tables, {"events": declared}).push(document)
    for number, rows in enumerate(
        [
            {"a": AT, "future": "2099-01-01T00:00:00Z", "end": "9999-12-30T23:59:59Z"},
            {"b": AT, "past": "0001-01-02T00:00:00Z"},
        ]
    ):
        lines = "".join(json.dumps({"id": id_, "at": at}) + "\n" for id_, at in rows.items())
        take(tables, declared, written(tmp_path / f"{number}.jsonl", lines))

    Evaluation(tables, declared, {"events": declared}, tmp_path / "checkpoint", once=True).run()

    alerts = {row["event_id"] for row in tables.read("alerts").collect()}
    late = {row["event_id"]: row for row in tables.read("late_events").collect()}
    assert alerts == {"a", "b"}
    assert {id_: row["action"] for id_, row in late.items()} == dict.fromkeys(("future", "end", "past"), "discarded")
    assert late["future"]["late_by_us"] < 0 < late["past"]["late_by_us"]
    account = event_account(tables, declared, tables.version("events"))
    assert account.closes
    assert (account.evaluated, account.discarded) == (2, 3)


def test_a_column_that_is_not_there_is_named(tables: Tables, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    declared = stream(stream="orders", columns={"at": "`when`"})
    take(tables, declared, written(tmp_path / "a.csv", f"id,when,amount,notes\na,{AT},1,x\n"))
    (text,) = caplog.messages
    assert f"{tmp_path / 'a.csv'} has no column note, ratio, so what stream 'orders' makes of it is NULL" in text
    assert "there are amount, id, notes, when." in text
    # Once is enough.
    take(tables, declared, written(tmp_path / "b.csv", f"id,when,amount,notes\nb,{AT},1,x\n"))
    assert len(caplog.messages) == 1


def test_a_remedy_writes_words_of_sql_in_backticks(tables: Tables, tmp_path: Path) -> None:
    declared = stream(stream="words", event_time="when", fields={"id": "string", "when": "timestamp", "end": "double"})
    take(tables, declared, written(tmp_path / "a.csv", f'id,when,end\na,31/12/2026 10:00,1\nb,{AT},"1,5"\n'))
    found = reasons(tables)["a.csv"]
    assert any("columns: {when: \"to_timestamp(`when`, 'dd.MM.yyyy HH:mm:ss')\"}" in each for each in found), found
    with pytest.raises(
        SetupError, match="If a column has the name of a word of SQL, such as when, write it in backticks"
    ):
        take(tables, stream(stream="wrong", columns={"at": "to_timestamp(when, 'yyyy')"}), tmp_path / "a.csv")
