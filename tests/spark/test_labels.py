"""Labels: what an import does with each row, and which label an event has as of a moment (contract 10.4)."""

from __future__ import annotations

import datetime as dt
import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from lookback.cli import main
from lookback.core.errors import SetupError
from lookback.spark.labels import import_labels, read_labels
from lookback.spark.tables.schemas import ALERTS, LABELS, REVIEWS
from payins import STREAM, append
from sample_alert import ALERT

if TYPE_CHECKING:
    from pathlib import Path

    from lookback.spark.tables.lakehouse import Tables

pytestmark = pytest.mark.spark
NOW = dt.datetime(2024, 3, 4, 12, tzinfo=dt.timezone.utc)
START = int(NOW.timestamp()) * 1_000_000


def at(minutes: float) -> dt.datetime:
    return NOW + dt.timedelta(minutes=minutes)


def write(tables: Tables, name: str, schema: Any, rows: list[Any]) -> None:
    tables.append(tables.spark.createDataFrame(rows, schema).coalesce(1), name)


def label(event_id: str, minutes: float, positive: bool, text: str | None = None) -> tuple[Any, ...]:
    return STREAM.name, event_id, positive, text, at(minutes), "desk", "kim"


def known(tables: Tables, minutes: float | None = None) -> dict[str, tuple[bool, str | None, str | None]]:
    rows = read_labels(tables, STREAM, None if minutes is None else at(minutes)).collect()
    assert len({row["event_id"] for row in rows}) == len(rows)
    return {row["event_id"]: (row["positive"], row["label"], row["source"]) for row in rows}


def alert(name: str, revision: int = 0, **values: Any) -> dict[str, Any]:
    base = {**ALERT, "alert_id": name, "revision": revision, "stream": STREAM.name, "decided_at": at(revision)}
    return {**base, **values}


def events(*ids: str) -> list[dict[str, Any]]:
    return [
        {"id": id_, "at": START + n, "customer": 1, "shop": "a", "amount": "1.00", "arrival": 1}
        for n, id_ in enumerate(ids)
    ]


def stored(tables: Tables) -> set[tuple[Any, ...]]:
    rows = tables.read("labels").collect()
    return {(row["event_id"], row["positive"], row["label"], row["source"], row["author"]) for row in rows}


@pytest.mark.long
def test_c10_4_the_last_label_by_its_time_counts_and_none_that_became_known_later(ready: Tables) -> None:
    write(
        ready, "labels", LABELS,
        [
            label("e1", 10, False), label("e1", 20, True, "fraud"), label("e2", 30, True), label("e3", 5, False), label("e3", 5, True),
            ("others", "e4", True, None, at(0), None, None),
        ],
    )  # fmt: skip
    assert known(ready, 4) == {}
    assert known(ready, 10) == {"e1": (False, None, "desk"), "e3": (True, None, "desk")}
    assert known(ready, 19.9) == known(ready, 10)
    assert known(ready, 20)["e1"] == (True, "fraud", "desk")
    assert set(known(ready, 29)) == {"e1", "e3"}
    assert known(ready) == known(ready, 30) == {
        "e1": (True, "fraud", "desk"), "e2": (True, None, "desk"), "e3": (True, None, "desk"),
    }  # fmt: skip


@pytest.mark.long
def test_c10_4_a_review_labels_triggering_and_matched_events_and_never_those_of_a_window(ready: Tables) -> None:
    write(
        ready, "alerts", ALERTS,
        [
            alert("a1", event_id="e1"),
            # A later revision of the sequence has other events; a person saw the first one.
            alert("a2", event_id="e4", evidence=["e2", "e3", "e4"]), alert("a2", 1, event_id="e4", evidence=["e9", "e4"]),
            alert("a3", event_id="e5"), alert("a4", event_id="e6"), alert("a5", event_id="e7"),
            alert("window", event_id=None, evidence=[]), alert("elsewhere", event_id="e8", stream="others"),
        ],
    )  # fmt: skip
    reviews = [
        ("a1", "confirmed", 10), ("a2", "false_positive", 11), ("a3", "benign", 12), ("a4", "unclear", 13),
        ("a5", "confirmed", 14), ("a5", "unclear", 20), ("window", "confirmed", 15), ("elsewhere", "confirmed", 15),
    ]  # fmt: skip
    write(ready, "reviews", REVIEWS, [(name, each, 0, "kim", "", at(minutes)) for name, each, minutes in reviews])
    negative = dict.fromkeys(("e2", "e3", "e4"), (False, "false_positive", "review"))
    first = {"e1": (True, "confirmed", "review"), **negative, "e5": (False, "benign", "review")}
    assert known(ready, 9) == {}
    assert known(ready, 15) == {**first, "e7": (True, "confirmed", "review")}
    # The last review of an alert counts, and unclear is no label.
    assert known(ready, 20) == known(ready) == first
    # A row of `labels` wins over a review, also over one that came later, from when it is known.
    write(ready, "labels", LABELS, [label("e1", 5, False, "refunded"), label("e5", 30, True)])
    assert known(ready, 20) == {**first, "e1": (False, "refunded", "desk")}
    assert known(ready, 30)["e5"] == (True, None, "desk")


def test_c10_4_plain_sql_may_insert_labels_and_the_time_of_the_insert_is_their_time(ready: Tables) -> None:
    before = dt.datetime.now(dt.timezone.utc)
    name = ready.identifier("labels")
    ready.spark.sql(f"insert into {name} (stream, event_id, positive) values ('{STREAM.name}', 7, true)")
    (row,) = read_labels(ready, STREAM).collect()
    assert (row["event_id"], row["positive"]) == ("7", True)
    assert before <= row["labelled_at"].astimezone(dt.timezone.utc) <= dt.datetime.now(dt.timezone.utc)
    with pytest.raises(Exception, match=r"DELTA_(NOT_NULL_CONSTRAINT_VIOLATED|INSERT_COLUMN_MISMATCH)"):
        ready.spark.sql(f"insert into {name} (stream, event_id) values ('{STREAM.name}', 7)")


@pytest.mark.long
def test_c10_4_every_row_of_an_import_is_accounted_for(ready: Tables, tmp_path: Path) -> None:
    append(ready, events("e1", "e2", "e3", "e4", "e5"))
    file = tmp_path / "cases.csv"
    file.write_text(
        "payment,is_fraud,known_at,label\n"
        "e1,1,2024-03-05T10:00:00Z,fraud\n"
        "e2,false,2024-03-05T10:00:00Z,\n"
        "e1,1,2024-03-05T10:00:00Z,fraud\n"  # the same again
        "e9,true,2024-03-05T10:00:00Z,\n"  # no such event
        "e3,perhaps,2024-03-05T10:00:00Z,\n"
        "e3,,2024-03-05T10:00:00Z,\n"
        ",true,2024-03-05T10:00:00Z,\n"
        "e4,true,yesterday,\n"
        "e4,true,,\n"  # the time of the import
        "e5,true,2024-03-06T10:00:00Z,\n"
        "e5,false,2024-03-06T10:00:00Z,\n"  # one of them is wrong
        "e5,false\n",
        encoding="utf-8",
    )
    named = {"event_id": "payment", "positive": "is_fraud", "at": "known_at", "author": "kim"}
    report = import_labels(ready, STREAM, file, **named)
    outcomes = report.stored + report.unknown_events + report.duplicates + report.rejected
    assert report.offered == outcomes
    assert (report.offered, report.stored, report.unknown_events, report.duplicates, report.rejected) == (
        12,
        3,
        1,
        1,
        7,
    )
    reasons = {each.reason: each.rows for each in report.rejections}
    assert sum(reasons.values()) == 7
    for part in (
        "'…' is not boolean",
        "is_fraud is NULL",
        "payment is NULL",
        "is not timestamp",
        "two different labels",
    ):
        assert any(part in reason for reason in reasons), part
    assert stored(ready) == {
        ("e1", True, "fraud", "cases.csv", "kim"), ("e2", False, None, "cases.csv", "kim"), ("e4", True, None, "cases.csv", "kim"),
    }  # fmt: skip
    assert read_labels(ready, STREAM, dt.datetime(2024, 3, 5, 9, tzinfo=dt.timezone.utc)).isEmpty()
    again = import_labels(ready, STREAM, file, **named)
    assert (again.stored, again.duplicates, again.unknown_events, again.rejected) == (0, 4, 1, 7)
    assert ready.version("labels") == 1


@pytest.mark.long
@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_labels_come_from_lines_of_json_and_from_parquet_by_the_names_of_the_table(
    ready: Tables, tmp_path: Path, kind: str
) -> None:
    append(ready, events("e1", "e2"))
    rows = [
        {"id": "e1", "positive": True, "label": "chargeback", "source": "bank"}, {"id": "e2", "positive": False},
    ]  # fmt: skip
    file = tmp_path / f"labels.{kind}"
    if kind == "json":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    else:
        pq.write_table(pa.Table.from_pylist([{"label": None, "source": None, **row} for row in rows]), file)
    before = dt.datetime.now(dt.timezone.utc)
    report = import_labels(ready, STREAM, file, author="kim")
    assert (report.offered, report.stored) == (2, 2)
    assert stored(ready) == {("e1", True, "chargeback", "bank", "kim"), ("e2", False, None, file.name, "kim")}
    assert all(row["labelled_at"].astimezone(dt.timezone.utc) >= before for row in read_labels(ready, STREAM).collect())
    assert import_labels(ready, STREAM, file, author="lee").duplicates == 2


@pytest.mark.long
def test_a_missing_column_is_named_with_the_option_that_mends_it(ready: Tables, tmp_path: Path) -> None:
    file = tmp_path / "labels.csv"
    file.write_text("payment,is_fraud\ne1,true\n", encoding="utf-8")
    with pytest.raises(
        SetupError, match=r"column 'event_id' or 'id' is missing; the columns are is_fraud, payment. .* with --event-id"
    ):
        import_labels(ready, STREAM, file)
    with pytest.raises(SetupError, match=r"column 'positive' is missing; .* with --positive"):
        import_labels(ready, STREAM, file, event_id="payment")
    with pytest.raises(SetupError, match=r"column 'known' is missing; .* with --at"):
        import_labels(ready, STREAM, file, event_id="payment", positive="is_fraud", at="known")
    with pytest.raises(SetupError, match="cannot be read"):
        import_labels(ready, STREAM, tmp_path / "nowhere.csv")


@pytest.mark.long
def test_c10_4_the_command_prints_the_account(
    ready: Tables, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    append(ready, events("e1"))
    (tmp_path / "conf/streams").mkdir(parents=True)
    (tmp_path / "conf/streams/payins.yml").write_text(yaml.safe_dump(STREAM.to_dict()), encoding="utf-8")
    file = tmp_path / "labels.csv"
    file.write_text("event_id,fraud\ne1,maybe\ne1,true\n", encoding="utf-8")
    words = ["--root", str(ready.root), "--conf", str(tmp_path / "conf"), "labels", "import", STREAM.name, str(file)]
    assert main([*words, "--positive", "fraud", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = ("stream", "offered", "stored", "unknown_events", "duplicates", "rejected")
    assert [found[name] for name in names] == [STREAM.name, 2, 1, 0, 0, 1]
    assert main([*words, "--positive", "fraud"]) == 0
    text = capsys.readouterr().out
    assert "2 offered = 0 stored + 0 of unknown events + 1 duplicates + 1 rejected" in text
    assert "fraud: 'maybe' is not boolean" in text
    assert main(words) == 2
    assert "Choose one with --positive" in capsys.readouterr().err
