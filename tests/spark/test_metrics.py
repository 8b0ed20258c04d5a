"""An evaluation reports on itself: in the table `metrics`, in the stream's health, and to a rule on that table."""

from __future__ import annotations

import datetime as dt
import logging
import time
from collections import Counter
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F  # noqa: N812

from lookback.config import load_rule_document, load_stream
from lookback.core.operations.health import check_health
from lookback.core.streams.metrics import COLUMNS, FIELDS, RuleCounts
from lookback.core.values.times import parse_time
from lookback.spark.batches.sink import BatchReport
from lookback.spark.checkpoints.checkpoint import Checkpoint
from lookback.spark.operations.status import read_stream_figures
from lookback.spark.stream import metrics as module
from lookback.spark.stream.metrics import Backlog, Metrics, read_backlog
from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder
from lookback.spark.tables.schemas import METRICS
from payins import RULES, STREAM, STREAMS, append, make_events, publish

if TYPE_CHECKING:
    from lookback.spark.tables.lakehouse import Tables

CONF = Path(__file__).parents[2] / "conf"
OWN = load_stream(CONF / "streams/metrics.yml")
START = dt.datetime(2026, 3, 1, 10, tzinfo=dt.timezone.utc)


def test_the_stream_that_ships_declares_the_columns_of_the_table() -> None:
    assert OWN.fields == FIELDS
    assert [(field.name, field.dataType.simpleString()) for field in METRICS][: len(COLUMNS)] == [
        (column.name, column.type) for column in COLUMNS
    ]
    assert all(field.metadata["comment"] for field in METRICS)


def run(tables: Tables, stream: Any, seconds: float = 60.0) -> Evaluation:
    """Judges what is there, with metrics."""
    folder = checkpoint_folder(tables, stream)
    metrics = Metrics(tables, stream, Checkpoint(Path(folder)), seconds)
    streams = {**STREAMS, OWN.name: OWN}
    evaluation = Evaluation(tables, stream, streams, folder, once=True, on_batch=metrics.add)
    with metrics:
        evaluation.run()
    return evaluation


@pytest.mark.spark
def test_status_names_the_event_whose_fast_clock_made_the_others_late(tables: Tables) -> None:
    tables.create(STREAM)
    now = dt.datetime.now(dt.timezone.utc)
    fast, usual = now + dt.timedelta(minutes=50), make_events(2, seed=1)
    rows = [{**usual[0], "at": parse_time(now)}, {**usual[1], "id": "fast", "at": parse_time(fast)}]
    append(tables, rows)
    measured = {
        **dict.fromkeys(METRICS.fieldNames()), "metrics_id": "m", "stream": STREAM.name, "measured_at": now,
        "watermark": fast - dt.timedelta(microseconds=STREAM.max_out_of_orderness),
        "events": 150, "late": 140, "discarded": 140, "lag_seconds": Decimal(0),
        **dict.fromkeys(["run_ms", "evaluate_ms", "write_ms"], 1),
    }  # fmt: skip
    tables.append_rows([measured], "metrics")
    findings = check_health(read_stream_figures(tables, STREAM))
    for check in ("discarded", "watermark_ahead"):
        (what,) = (finding.what for finding in findings if finding.check == check)
        assert what.endswith(
            f" The watermark was moved furthest by event 'fast' of {fast:%Y-%m-%dT%H:%M:%SZ}, 50 minutes ahead of the clock "
            "when it was ingested."
        )


@pytest.mark.spark
@pytest.mark.long
def test_metrics_add_up_health_goes_by_them_and_a_rule_watches_them(
    tables: Tables, caplog: pytest.LogCaptureFixture
) -> None:
    tables.create(STREAM)
    documents = [RULES[0], *RULES[2:], load_rule_document(CONF / "rules/evaluation-behind.yml")]
    publish(tables, documents)
    events = make_events(125, seed=7)
    append(tables, [row for row in events if row["arrival"] <= 4])
    with caplog.at_level(logging.INFO, "lookback"):
        reports = run(tables, STREAM).reports
    # A line a batch.
    lines = [record.getMessage() for record in caplog.records if record.name == "lookback"]
    assert [line.split()[:3] for line in lines] == [
        ["stream=payins", f"batch={report.batch_id}", f"events={report.events}"] for report in reports
    ]

    (row,) = tables.read("metrics").collect()
    alerts = tables.read("alerts").groupBy("rule_id", "verdict").count().collect()
    verdicts = Counter({(each["rule_id"], each["verdict"]): each["count"] for each in alerts})
    counts = {rule_id: RuleCounts(**each.asDict()) for rule_id, each in row["by_rule"].items()}
    assert {rule_id: (each.matched, each.suppressed) for rule_id, each in counts.items()} == {
        rule_id: (verdicts[rule_id, "raised"] + verdicts[rule_id, "suppressed"], verdicts[rule_id, "suppressed"])
        for rule_id in ("by-customer", "all", "pair")
    }
    assert sum(counts.values(), RuleCounts()) == RuleCounts(*(row[name] for name in vars(RuleCounts())))
    assert counts["all"].suppressed
    assert counts["pair"].failed == sum(report.by_rule["pair"].failed for report in reports) > 0
    late = Counter(each["action"] for each in tables.read("late_events").collect())
    assert (row["late"], row["discarded"]) == (sum(late.values()), late["discarded"])
    # An event is judged by a rule in one shard alone; `all` judges those that are not late.
    assert counts["by-customer"].evaluated == row["events"] - late["discarded"]
    assert counts["all"].evaluated == row["events"] - row["late"]
    assert row["events"] == sum(report.events for report in reports) == 100
    assert (row["committed"], row["judged"], row["lag_commits"], row["lag_seconds"]) == (4, 4, 0, 0)
    assert row["state_rows"] == reports[-1].state_rows
    assert row["run_ms"] >= row["evaluate_ms"] > 0 < row["write_ms"]
    # What Spark says of a query that has just ended may come too late.
    assert row["trigger_ms"] is None or row["trigger_ms"] >= row["run_ms"] + row["write_ms"] - 1
    assert row["watermark_behind_seconds"] > 10**7

    # What no rows come with is no lag; rows are, until they are judged.
    folder = Checkpoint(Path(checkpoint_folder(tables, STREAM)))
    tables.spark.sql(f"ALTER TABLE {tables.identifier(STREAM.name)} SET TBLPROPERTIES ('a' = 'b')")
    assert read_backlog(tables, STREAM.name, folder.read_last_judged()).waiting == 0
    append(tables, [row for row in events if row["arrival"] > 4])
    now = dt.datetime.now(dt.timezone.utc)
    figures = read_stream_figures(tables, STREAM, folder, now + dt.timedelta(minutes=10))
    assert (figures.waiting, figures.committed, figures.rules) == (1, 6, 3)
    assert [(finding.level, finding.check) for finding in check_health(figures)] == [
        ("problem", "not_running"), ("warning", "failing"),
    ]  # fmt: skip

    # The table is an events table: a rule on it is a rule like any other.
    # After the row that is there, whose lag is none.
    first = now + dt.timedelta(minutes=6)
    measured = [
        {
            **dict.fromkeys(METRICS.fieldNames()), "metrics_id": f"m{at}", "stream": "payins",
            "measured_at": first + dt.timedelta(seconds=30 * at), "seconds": Decimal(30), "lag_seconds": Decimal(61 + at),
            "lag_commits": at,
        }
        for at in range(9)
    ]  # fmt: skip
    tables.append(tables.spark.createDataFrame(measured, METRICS).coalesce(1), "metrics")
    before = tables.version("metrics")
    run(tables, OWN)
    found = tables.read("alerts").where(F.col("stream") == OWN.name).select("event_id", "verdict", "message").collect()
    assert [tuple(each) for each in found if each["verdict"] == "raised"] == [
        ("m7", "raised", "payins is behind: for 5 minutes events have waited for 61.000 s and longer, up to 7 commits of them")
    ]  # fmt: skip
    # It says nothing of itself, to which it would have to listen.
    assert tables.version("metrics") == before


def report(events: int, **more: Any) -> BatchReport:
    by_rule = {"a": RuleCounts(events, 2, 1, 0), "b": RuleCounts(events, 3, 0, 1)}
    return BatchReport(
        batch_id=1, events=events, alerts={"a": 2, "b": 3}, late=0, failed=1, log=(), watermark=1_000_000, arrival=7,
        state_rows=5, state_bytes_written=10, rules=2, evaluate_ms=2.0, run_ms=30.0, write_ms=20.0, shards_in_memory=1,
        finished_at=START, by_rule=by_rule, **more,
    )  # fmt: skip


class Place:
    """Tables that keep what is written, or cannot."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.broken = False
        self.tried = 0
        self.spark = SimpleNamespace(streams=SimpleNamespace(active=[]), createDataFrame=self._frame)

    def _frame(self, rows: list[dict[str, Any]], schema: Any) -> Any:
        return SimpleNamespace(coalesce=lambda parts: rows)

    def append(self, rows: list[dict[str, Any]], name: str) -> None:
        self.tried += 1
        if self.broken:
            raise OSError("no space left on device\nmore of it")
        self.rows += rows


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(module, "read_backlog", lambda tables, name, judged: Backlog(judged or 0, START, 0, None))
    return Place()


def until(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_what_cannot_be_written_stops_nothing_and_is_in_the_next_row(
    place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place.broken = True
    tables: Any = place
    with Metrics(tables, STREAM, Checkpoint(tmp_path), 0.01) as metrics:
        metrics.add(report(100))
        until(lambda: place.tried >= 3)
        metrics.add(report(20, discarded=4))
        place.broken = False
        until(lambda: place.rows)
    first = place.rows[0]
    assert sum(row["events"] for row in place.rows) == 120
    assert sum(row["discarded"] for row in place.rows) == 4
    assert first["evaluated"] in (200, 240)
    assert (first["top_rule"], first["top_rule_alerts"]) in (("b", 3), ("b", 6))
    assert first["events_per_second"] in (2_000, 1_200)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == ["stream=payins cannot write metrics; the evaluation continues: no space left on device"], (
        "said once, not every time"
    )


def test_while_nothing_happens_a_row_comes_every_tenth_time_and_one_at_the_end(place: Place, tmp_path: Path) -> None:
    tables: Any = place
    with Metrics(tables, STREAM, Checkpoint(tmp_path), 0.02):
        until(lambda: place.rows)
        assert place.rows[0]["seconds"] >= Decimal("0.2")
        written = len(place.rows)
    assert len(place.rows) == written + 1
    assert (place.rows[-1]["batches"], place.rows[-1]["watermark"], place.rows[-1]["top_rule"]) == (0, None, None)


def test_a_run_that_failed_before_its_first_batch_says_nothing(place: Place, tmp_path: Path) -> None:
    tables: Any = place
    with pytest.raises(ValueError, match="as it must"), Metrics(tables, STREAM, Checkpoint(tmp_path), 60.0):
        raise ValueError("as it must")
    assert place.rows == []


def test_without_metrics_nothing_is_kept(place: Place, tmp_path: Path) -> None:
    tables: Any = place
    with Metrics(tables, STREAM, Checkpoint(tmp_path), None) as metrics:
        metrics.add(report(1))
    assert not place.tried
