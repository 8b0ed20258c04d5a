"""A declaration drafted from a file: the separator, types, id and time are those that a person would have written."""

from __future__ import annotations

import datetime as dt
import gzip
import json
import random
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from lookback.cli import main
from lookback.config import load_stream
from lookback.core.errors import SetupError
from lookback.core.streams.arrival import describe_fast_clock
from lookback.core.streams.declaration import Stream
from lookback.stream_draft import draft_stream

CONF = Path(__file__).parents[2] / "conf"


def drafted(file: Path, text: str | bytes, **more: str) -> dict[str, Any]:
    """The draft of a file with this text, which must be a declaration that can be used."""
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    document = yaml.safe_load(draft_stream(file, **more))
    Stream.from_dict(document)
    return document


def of_column(tmp_path: Path, *values: str, name: str = "x") -> tuple[str, str | None, str]:
    """The type, the expression and the comment of a column with these values in a CSV file."""
    rows = "".join(f'{number},2026-03-01T10:00:00Z,"{value}"\n' for number, value in enumerate(values))
    document = drafted(tmp_path / "in.csv", f"id,at,{name}\n{rows}")
    line = next(line for line in draft_stream(tmp_path / "in.csv").splitlines() if line.startswith(f"  {name}: "))
    return document["fields"][name], document.get("columns", {}).get(name), line.partition(" # ")[2]


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_the_separator_is_found(tmp_path: Path, separator: str):
    lines = [["order_id", "at", "note"], ["1", "2026-03-01 10:00:00", "a, b; c"], ["2", "2026-03-01 10:05:00", "d"]]
    text = "".join(separator.join(f'"{cell}"' for cell in line) + "\r\n" for line in lines)
    document = drafted(tmp_path / "Orders 2026.csv", text)
    assert document["stream"] == "orders_2026"
    assert (document["event_id"], document["event_time"]) == ("order_id", "at")
    assert document["fields"] == {"order_id": "bigint", "at": "timestamp", "note": "string"}
    assert document["source"].get("options") == (None if separator == "," else {"sep": separator})


@pytest.mark.parametrize(
    ("values", "type_", "expression"),
    [
        (["1", "-20", ""], "bigint", None),
        (["1234567890123456789"], "string", None),
        (["01234", "10115"], "string", None),
        (["0", "10"], "bigint", None),
        (["12.5", "3", "-0.125"], "decimal(18,3)", None),
        (["12345678901234567.89"], "decimal(38,2)", None),
        (["1e5", "2.5"], "double", None),
        (["12,5", "3"], "decimal(18,1)", "replace(`x`, ',', '.')"),
        (["1.234,50", "3,5"], "decimal(18,2)", "replace(replace(`x`, '.', ''), ',', '.')"),
        (["1,234.50", "3.5"], "decimal(18,2)", "replace(`x`, ',', '')"),
        (["1,234", "5,678"], "string", None),
        (["n/a", "12.50", "n/a"], "decimal(18,2)", "nullif(`x`, 'n/a')"),
        (["n/a", "12.50", "-"], "string", None),
        (["true", "FALSE"], "boolean", None),
        (["yes", "no"], "string", None),
        (["2026-03-01", "2026-03-02"], "date", None),
        (["2026-03-01T10:00:00.123+01:00"], "timestamp", None),
        (["31.01.2026", "1.2.2026"], "date", "to_date(`x`, 'd.M.yyyy')"),
        (["31.01.2026 10:00", "01.02.2026 10:00:05"], "timestamp", "to_timestamp(`x`, 'd.M.yyyy H:mm[:ss]')"),
        (["1/31/2026 9:05 PM"], "timestamp", "to_timestamp(`x`, 'M/d/yyyy h:mm a')"),
        (["31/1/2026 09:05:00"], "timestamp", "to_timestamp(`x`, 'd/M/yyyy H:mm:ss')"),
        (["2026/01/31 10:00:00"], "timestamp", "to_timestamp(`x`, 'yyyy/MM/dd H:mm:ss')"),
        (["13/13/2026"], "string", None),
        (["", ""], "string", None),
        (["Ghent", "7"], "string", None),
    ],
)
def test_the_type_of_a_column_of_texts(tmp_path: Path, values: list[str], type_: str, expression: str | None):
    assert of_column(tmp_path, *values)[:2] == (type_, expression)


def test_a_person_is_told_what_a_file_cannot_tell(tmp_path: Path):
    assert "a thousand or a fraction?" in of_column(tmp_path, "1,234", "5,678")[2]
    assert of_column(tmp_path, "1/2/2026")[2] == "is the month first, or the day?"
    assert "taken as UTC" in of_column(tmp_path, "2026-03-01 10:00:00")[2]
    assert of_column(tmp_path, "n/a", "1")[2] == "1 value is 'n/a', read as null"
    assert "has no value" in of_column(tmp_path, "", "")[2]


@pytest.mark.parametrize(
    ("value", "function"),
    [
        ("1772359200", "timestamp_seconds"),
        ("1772359200123", "timestamp_millis"),
        ("1772359200123456", "timestamp_micros"),
    ],
)
def test_a_time_counted_from_1970_goes_by_its_name(tmp_path: Path, value: str, function: str):
    made = f"{function}(cast(`paid_at` as bigint))"
    assert of_column(tmp_path, value, name="paid_at")[:2] == ("timestamp", made)
    assert of_column(tmp_path, value, name="account")[:2] == ("bigint", None)


@pytest.mark.parametrize(
    ("name", "value", "type_"),
    [
        ("amount", "20", "decimal(18,2)"), ("Total Price", "20.5", "decimal(18,2)"), ("amount", "2.505", "decimal(18,3)"),
        ("amount_cents", "20", "bigint"), ("amount", "002", "string"), ("discount", "20", "bigint"),
    ],
)  # fmt: skip
def test_money_has_cents(tmp_path: Path, name: str, value: str, type_: str):
    document = drafted(tmp_path / "x.csv", f"id,at,{name}\n1,2026-03-01T10:00:00Z,{value}\n")
    assert list(document["fields"].values())[-1] == type_


def test_names_that_are_no_fields_are_made_of_their_columns(tmp_path: Path):
    header = "Order ID,Größe,Zeit,1st,Zéit,arrival\n"
    document = drafted(tmp_path / "x.csv", header + "1,2,2026-03-01T10:00:00Z,a,b,c\n")
    assert list(document["fields"]) == ["order_id", "groe", "Zeit", "f_1st", "zeit_2", "arrival_2"]
    assert document["columns"] == {
        "order_id": "`Order ID`", "groe": "`Größe`", "f_1st": "`1st`", "zeit_2": "`Zéit`", "arrival_2": "`arrival`",
    }  # fmt: skip


def test_the_id_is_a_column_without_equal_values_named_like_one(tmp_path: Path):
    rows = "".join(f"{n},2026-03-01T10:0{n}:00Z,note {n},{n % 2},{100 + n}\n" for n in range(3))
    document = drafted(tmp_path / "orders.csv", "row,at,note,customer_id,order_id\n" + rows)
    assert document["event_id"] == "order_id"
    assert "could also be row, note" in draft_stream(tmp_path / "orders.csv")


def test_where_no_column_tells_events_apart_all_of_them_do(tmp_path: Path):
    row = "2026-03-01T10:00:00Z,Ann,5\n"
    document = drafted(tmp_path / "x.csv", f"at,who,n\n{row}{row}2026-03-01T10:00:00Z,Bob,5\n")
    assert document["event_id"] == "event_id"
    assert document["columns"]["event_id"].startswith("sha2(concat_ws('|', coalesce(cast(`at` as string), '')")


def test_a_day_is_a_time_where_there_is_no_other(tmp_path: Path):
    document = drafted(tmp_path / "x.csv", "id,day\n1,2026-03-01\n2,2026-03-02\n")
    assert (document["event_time"], document["fields"]["day"]) == ("day", "timestamp")
    document = drafted(tmp_path / "y.csv", "id,day,at\n1,2026-03-01,2026-03-01 10:00:00\n")
    assert (document["event_time"], document["fields"]["day"]) == ("at", "date")


def test_json_lines_have_the_types_that_they_show(tmp_path: Path):
    lines = [
        {"id": 1, "at": "2026-03-01T10:00:00Z", "amount": 12.5, "ok": True, "tags": ["a"], "place": {"city": "x"}, "mix": 1},
        {"id": 2, "at": "2026-03-01T10:01:00Z", "amount": 3, "tags": [], "mix": "a", "later": "b", "things": [{"a": 1}]},
    ]  # fmt: skip
    document = drafted(tmp_path / "x.jsonl", "\n".join(map(json.dumps, lines)) + "\n\n")
    assert document["fields"] == {
        "id": "bigint", "at": "timestamp", "amount": "decimal(18,2)", "ok": "boolean", "tags": "array<string>",
        "place": "struct<city:string>", "mix": "string", "later": "string",
    }  # fmt: skip
    text = draft_stream(tmp_path / "x.jsonl")
    assert "  # things is a list of objects" in text


def test_parts_of_an_object_that_differ_in_case_only(tmp_path: Path):
    (tmp_path / "x.jsonl").write_text('{"id": "a", "at": "2026-01-31T12:00:00Z", "u": {"A": 1, "a": 2}}\n')
    text = draft_stream(tmp_path / "x.jsonl")
    assert "leaves out a; map such a part in columns" in text
    assert str(Stream.from_dict(yaml.safe_load(text)).fields["u.A"]) == "bigint"


@pytest.mark.parametrize("name", ["a\nb.csv", "x\nevent_id: evil\n#.csv", "p'q$.csv", "\x85\u2028.csv"])
def test_the_name_of_a_file_adds_nothing_to_its_draft(tmp_path: Path, name: str):
    (tmp_path / name).write_text("id,at\n1,2026-01-31T12:00:00Z\n")
    drafted = yaml.safe_load(draft_stream(tmp_path / name))
    assert (drafted["event_id"], drafted["source"]["path"]) == ("id", str(tmp_path / name))


def test_a_parquet_file_has_its_types(tmp_path: Path):
    at = dt.datetime(2026, 3, 1, 10, tzinfo=dt.timezone.utc)
    columns = {
        "id": pa.array([1, 2], pa.int32()), "at": pa.array([at, at], pa.timestamp("us", "UTC")), "cents": pa.array([5, 6], pa.int64()),
        "amount": pa.array([12.5, 3.25]), "share": pa.array([0.123456789, 1e-9]), "price": pa.array([Decimal("1.50"), None]),
        "day": pa.array([at.date(), None]), "place": pa.array([{"city": "x"}, None]), "tags": pa.array([["a"], None]),
        "ts": pa.array([1772359200123, 1772359200124]), "bytes": pa.array([b"x", b"y"]),
    }  # fmt: skip
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    text = draft_stream(tmp_path / "x.parquet")
    document = yaml.safe_load(text)
    Stream.from_dict(document)
    assert document["fields"] == {
        "id": "int", "at": "timestamp", "cents": "bigint", "amount": "decimal(18,2)", "share": "double",
        "price": "decimal(3,2)", "day": "date", "place": "struct<city:string>", "tags": "array<string>", "ts": "timestamp",
    }  # fmt: skip
    assert document["columns"] == {"ts": "timestamp_millis(cast(`ts` as bigint))"}
    assert "  # bytes is binary, which no field can hold" in text


def test_other_encodings_and_packed_files(tmp_path: Path):
    text = "id,at,city\n1,2026-03-01T10:00:00Z,Zürich\n"
    assert drafted(tmp_path / "a.csv", text.encode("cp1252"))["source"]["options"] == {"encoding": "windows-1252"}
    assert "order_id" in drafted(tmp_path / "b.csv", b"\xef\xbb\xbforder_id,at\n1,2026-03-01T10:00:00Z\n")["fields"]
    document = drafted(tmp_path / "c.csv.gz", gzip.compress(text.encode()))
    assert (document["stream"], document["source"]["format"]) == ("c", "csv")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x.csv").write_text(text)
    assert yaml.safe_load(draft_stream(tmp_path / "folder"))["source"]["path"] == str(tmp_path / "folder")


def test_only_the_first_rows_are_looked_at(tmp_path: Path):
    rows = "".join(f"{n},2026-03-01T10:00:00Z\n" for n in range(10_005))
    (tmp_path / "x.csv").write_text("id,at\n" + rows)
    assert "its first 10,000 rows" in draft_stream(tmp_path / "x.csv")
    (tmp_path / "y.csv").write_text("id,at\n1,2026-03-01T10:00:00Z,9\n2,2026-03-01T10:00:00Z\n")
    assert "# 1 of 2 rows have another number of values than the header" in draft_stream(tmp_path / "y.csv")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("x.csv", b"", "has no rows"),
        ("x.csv", b"id,at\n", "has no rows"),
        ("x.xlsx", b"PK", "the suffix is not a known format; set --format"),
        ("x.json", b"[1]\n", "is JSON but not an object"),
        ("x.json", b"{\n", "x.json:1 is not a JSON object on one line"),
        (
            "x.json",
            b'{"Records": [{"a": 1}, {"a": 2}]}',
            "in 'Records', as CloudTrail writes it; write one event per line: `jq -c '.\\[\"Records\"\\]\\[\\]'`",
        ),
        ("x.json", b'{\n"a": 1\n}\n', "`jq -c .` puts an object of several lines on one"),
        (
            "x.json",
            '{"a": "\xe9"}'.encode("utf-16"),
            "x.json is UTF-16, but JSON must be UTF-8; convert it: `iconv",
        ),
        ("x.json", b'{"a": "\xe9"}', "x.json is windows-1252, but JSON must be UTF-8"),
        ("x.csv", "id,at\n1,2\n".encode("utf-16-le"), "has NUL bytes; if it is UTF-16 without a BOM, convert it"),
        (
            "x.csv",
            b"sep=;\r\nid;at\r\n1;2\r\n",
            "its first line is 'sep=;', which only Excel reads; delete that line: `tail -n [+]2",
        ),
        (
            "x.csv",
            b"id,at,n,ID,n\n1,2,3,4,5\n",
            "the columns 1, 4 are named 'id', 'ID', the same name to Spark",
        ),
        ("x.parquet", b"PAR", "cannot be read as parquet"),
        ("x.csv.gz", b"no", "cannot be read as csv"),
        ("none/x.csv", None, "cannot be read as csv"),
    ],
)
def test_a_file_that_cannot_be_drafted_from(tmp_path: Path, name: str, content: bytes | None, said: str):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SetupError, match=said):
        draft_stream(tmp_path / name)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"id": [1], "ID": [2]}, "the columns 1, 2 are named 'id', 'ID'"),
        ({"id": [1], "clock": pa.array([dt.time(1)])}, "Spark cannot read columns of these types: clock"),
    ],
)
def test_a_parquet_file_that_spark_cannot_read(tmp_path: Path, columns: dict[str, Any], said: str):
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    with pytest.raises(SetupError, match=said):
        draft_stream(tmp_path / "x.parquet")


def test_any_bytes_give_a_draft_or_a_setup_error(tmp_path: Path):
    random_ = random.Random(7)
    parts = [
        b"id",
        b",",
        b";",
        b"\n",
        b'"',
        b"2026-03-01",
        b"1,5",
        b"{",
        b"}",
        b":",
        b"\xff",
        b"null",
        b"a",
        b"[",
        b"]",
        b"0",
    ]
    for _ in range(300):
        text = b"".join(random_.choices(parts, k=random_.randrange(40)))
        for suffix in ("csv", "json"):
            (tmp_path / f"x.{suffix}").write_bytes(text)
            try:
                draft = draft_stream(tmp_path / f"x.{suffix}")
            except SetupError:
                continue
            assert yaml.safe_load(draft)["stream"] == "x"


def test_the_command_prints_or_writes_and_never_over_anything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    file = CONF / "samples" / "payments.csv"
    assert main(["stream", "new", str(file)]) == 0
    assert capsys.readouterr().out == draft_stream(file)
    assert main(["stream", "new", str(file), "--name", "paid", "--write"]) == 0
    assert "lookback ingest paid" in capsys.readouterr().out
    assert load_stream(tmp_path / "conf/streams/paid.yml").fields == load_stream(CONF / "streams/payments.yml").fields
    assert main(["stream", "new", str(file), "--name", "paid", "--write"]) == 2
    assert "already exists" in capsys.readouterr().err


def test_a_draft_that_lacks_something_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "x.csv").write_text("id,what\n1,a\n")
    assert main(["stream", "new", str(tmp_path / "x.csv")]) == 1
    captured = capsys.readouterr()
    assert "no column looks like a time" in captured.out
    assert "edit the draft before you use it" in captured.err


def test_a_draft_keeps_a_fast_clock_from_making_others_late_and_has_no_field_position(tmp_path: Path):
    document = drafted(tmp_path / "in.csv", "id,at,position\n1,2026-03-01T10:00:00Z,left\n")
    assert (document["max_future"], describe_fast_clock(Stream.from_dict(document))) == ("1 hour", "")
    assert document["fields"] == {"id": "bigint", "at": "timestamp", "position_2": "string"}
    assert document["columns"] == {"position_2": "`position`"}


def test_init_remarks_a_stream_that_one_fast_clock_can_make_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "streams").mkdir()
    document = {"stream": "s", "event_id": "id", "event_time": "at", "fields": {"id": "int", "at": "timestamp"}}
    for name, lateness in (("tight", "5 minutes"), ("wide", "1 hour")):
        text = yaml.safe_dump({**document, "stream": name, "allowed_lateness": lateness})
        (tmp_path / f"streams/{name}.yml").write_text(text, encoding="utf-8")
    tables = SimpleNamespace(path_or_name=lambda name: f"/lake/{name}")
    monkeypatch.setattr("lookback.verbs.Workspace.tables", tables)
    monkeypatch.setattr("lookback.spark.operations.catalog.set_up", lambda *_, **__: [])
    assert main(["--conf", str(tmp_path), "init"]) == 0
    (remark,) = capsys.readouterr().err.splitlines()
    assert remark.startswith(
        "tight: max_future (1 hour) exceeds max_out_of_orderness + allowed_lateness (310 seconds): "
    )


def test_a_draft_with_a_wrong_name_is_shown_and_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.csv").write_text("id,at\n1,2026-01-01T00:00:00Z\n")
    words = ["stream", "new", str(tmp_path / "a.csv"), "--write", "--conf", str(tmp_path / "conf"), "--name"]
    assert main([*words, "Cards"]) == 1
    said = capsys.readouterr()
    assert "stream: Cards" in said.out
    assert "a name of lower-case letters, digits and _ is needed, got 'Cards'" in said.err
    assert not (tmp_path / "conf").exists()
    assert main([*words, "cards"]) == 0
    assert (tmp_path / "conf/streams/cards.yml").exists()
