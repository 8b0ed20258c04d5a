"""Runs the main job on real transactions from start to end: ingest, rules, evaluation, review, what-if, proof.

While the stream runs, the demo adds a rule with a new grouping key, changes a limit and pauses a rule. For each change
it shows the first event that the change applied to, and how long the change took to apply after its commit. Then it
tries other limits of a rule on all events, and proves the alerts of the stream.
"""

from __future__ import annotations

import datetime as dt
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import functions as F  # noqa: N812

from lookback.config import Settings, load_rule_document
from lookback.core.errors import SetupError
from lookback.spark.ingest.files import ingest
from lookback.spark.replay.backtest import Candidate, backtest
from lookback.spark.replay.proof import prove
from lookback.spark.review import explain, open_queue, record_review
from lookback.spark.rules import RulesTable
from lookback.spark.stream.pipeline import Evaluation
from lookback.verbs import Workspace
from lookback.views.terminal import describe_change
from lookback.views.timeline import plot_key_timeline
from lookback.views.whatif import plot_alerts_by_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from lookback.spark.batches.sink import BatchReport

_SAMPLE = Path("samples/transactions.parquet")
_MARKER = ".lookback-demo"
_RULES = ("customer-day-spend", "large-payment", "spend-against-usual")
_ADDED, _CHANGED, _PAUSED = "same-terminal-again", "customer-day-spend", "large-payment"
# The limits of the changed rule: before, after, and the ones to try.
_LIMIT, _NEW_LIMIT, _LIMITS = 1000, 800, (500, 650, 800, 1000, 1250, 1500, 2000)
# The first part is ingested before the stream starts; the remaining parts arrive while it runs.
_FIRST_PART, _PARTS = 0.6, 4
_TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True)
class Change:
    """A rule change made while the stream ran, and the seconds from its commit until the stream had applied it."""

    what: str
    rule_id: str
    version: int
    seconds: float
    arrival: int | None


def run_demo(settings: Settings, events: Path | None = None) -> Path:
    """Runs the demo in the folder settings.root, which it empties first if an earlier demo made it.

    Args:
        settings: Settings of the run; their root is the demo's folder.
        events: Parquet file of transactions; default: the sample in the configuration folder.

    Returns:
        The path of the picture.

    Raises:
        SetupError: If the events or the folder cannot be used, or the proof fails.
    """
    started = time.monotonic()
    source = events or settings.conf / _SAMPLE
    root = _make_fresh_folder(Path(settings.root))
    place = Workspace(replace(settings, root=str(root)), "transactions")
    print(f"Starting Spark; tables go to {root}")
    place.tables.create(place.stream)
    demo = _Demo(place)
    try:
        return demo.run(source, started)
    finally:
        demo.evaluation.stop()


class _Demo:
    def __init__(self, place: Workspace) -> None:
        self.tables, self.stream, self.streams = place.tables, place.stream, place.streams
        self.settings, self.rules = place.settings, RulesTable(place.tables, place.streams)
        folder = place.checkpoint("evaluate")
        self.evaluation = Evaluation(place.tables, place.stream, place.streams, folder, on_batch=self._show_batch)
        self.changes: list[Change] = []

    def run(self, source: Path, started: float) -> Path:
        parts = _write_parts(source, Path(str(self.tables.root)) / "_incoming")
        print(f"\n1. Ingest: {source.name}, the first {_FIRST_PART:.0%} now, the rest while the stream runs")
        self._ingest(next(parts))
        print("\n2. Rules: checked with their own tests, then published")
        for name in _RULES:
            self._publish(load_rule_document(self.settings.conf / "rules" / f"{name}.yml"))
        print("\n3. Evaluate: the stream runs; rules change under it")
        self.evaluation.start()
        self._change_rules(parts)
        seconds, events = self._finish()
        print("\n4. Review")
        picture = self._review()
        print(f"\n5. What if? {_CHANGED} with other limits, over all events")
        what_if = self._try_limits()
        print("\n6. Prove: replay all events and compare every row of alerts and late_events")
        self._prove()
        self._print_summary(events, seconds, (picture, what_if), time.monotonic() - started)
        return picture

    def _ingest(self, file: Path) -> None:
        print(f"   {ingest(self.tables, self.stream, file, progress=None)}")

    def _publish(self, document: dict[str, Any], status: str = "active") -> int:
        version = self.rules.push(document, status=status, author="demo")
        print(f"   {document['rule_id']} v{version} {status}: {document['when']}")
        return version

    def _change_rules(self, parts: Iterator[Path]) -> None:
        self._wait(lambda report: report.events > 0, "the first batch")
        added = load_rule_document(self.settings.conf / "rules" / f"{_ADDED}.yml")
        self._ingest(next(parts))
        self._change("rule added, new grouping key", added)
        self._ingest(next(parts))
        limit = load_rule_document(self.settings.conf / "rules" / f"{_CHANGED}.yml")
        limit["parameters"] = {"limit": _NEW_LIMIT}
        self._change(f"limit changed from {_LIMIT} to {_NEW_LIMIT}", limit)
        self._ingest(next(parts))
        paused = load_rule_document(self.settings.conf / "rules" / f"{_PAUSED}.yml")
        self._change("rule paused", paused, "paused")
        for part in parts:
            self._ingest(part)

    def _change(self, what: str, document: dict[str, Any], status: str = "active") -> None:
        version = self._publish(document, status)
        committed = self._read_commit_time("rules")
        rule_id = document["rule_id"]

        def find_rows(report: BatchReport) -> list[Mapping[str, Any]]:
            return [row for row in report.log if row["rule_id"] == rule_id and row["version"] == version]

        report = self._wait(lambda report: bool(find_rows(report)), f"{rule_id} v{version} to be applied")
        row = find_rows(report)[0]
        seconds = (report.finished_at - committed).total_seconds()
        self.changes.append(Change(what, rule_id, version, seconds, row["arrival"]))

    def _read_commit_time(self, table: str) -> dt.datetime:
        row = self.tables.delta(table).history(1).select(F.col("timestamp").cast("double")).head()
        assert row is not None
        return dt.datetime.fromtimestamp(row[0], dt.timezone.utc)

    def _wait(self, condition: Callable[[BatchReport], bool], what: str) -> BatchReport:
        try:
            return self.evaluation.wait_until(condition, _TIMEOUT_SECONDS)
        except TimeoutError as error:
            raise SetupError(f"waited {_TIMEOUT_SECONDS:.0f} s for {what}: {error}") from error

    def _show_batch(self, report: BatchReport) -> None:
        seconds = (report.run_ms + report.write_ms) / 1_000
        alerts = ", ".join(f"{rule} {count}" for rule, count in sorted(report.alerts.items()))
        text = f"{report.events:>9,} events in {seconds:4.1f} s   {alerts}" if report.events else "no events"
        print(f"   batch {report.batch_id:>3}: {text}")
        for row in report.log:
            where = "before the first commit" if row["arrival"] is None else f"after commit {row['arrival']}"
            print(f"              {describe_change(row)} {where} {row['message']}")

    def _finish(self) -> tuple[float, int]:
        """Waits for the last commit, then stops the stream. Returns its seconds of work and its number of events."""
        last = self.tables.version(self.stream.name)
        self._wait(lambda report: (report.arrival or 0) >= last, f"commit {last} to be judged")
        self.evaluation.stop()
        reports = list(self.evaluation.reports)
        seconds = sum(report.run_ms + report.write_ms for report in reports) / 1_000
        return seconds, sum(report.events for report in reports)

    def _find_first_event(self, change: Change) -> str:
        """Finds the first event, in arrival order, that was judged after the change."""
        feed = self.tables.read_changes(self.stream.name, (change.arrival or 0) + 1)
        order = ["_commit_version", self.stream.event_time, *self.stream.order_columns, self.stream.event_id]
        row = feed.orderBy(*order).select("_commit_version", self.stream.event_time, self.stream.event_id).head()
        if row is None:
            return "none yet"
        commit, at, event_id = row
        return f"{event_id} ({at:%Y-%m-%d %H:%M:%S}, commit {commit})"

    def _review(self) -> Path:
        row = open_queue(self.tables).head()
        if row is None:
            raise SetupError("no alert was raised; the demo expects the sample transactions")
        explanation = explain(self.tables, self.streams, row["alert_id"])
        print(f"   first of the queue: {row['severity']}, {row['message']}")
        print(f"   {explanation.sentence}")
        record_review(self.tables, row["alert_id"], "confirmed", "demo", "by make demo")
        print(f"   recorded as confirmed; {open_queue(self.tables).count():,} alerts are left in the queue")
        picture = Path(str(self.tables.root)) / "alert.png"
        plot_key_timeline(explanation).savefig(picture, dpi=120)
        return picture

    def _try_limits(self) -> Path:
        """Tries other limits of a rule in one pass over the events. Returns the path of a picture."""
        document = load_rule_document(self.settings.conf / "rules" / f"{_CHANGED}.yml")
        with backtest(self.tables, self.stream, [Candidate(document)], vary={"limit": _LIMITS}, rows=False) as result:
            figures = result.figures
        for each in figures:
            print(
                f"   limit {each.parameters['limit']!s:>5}: {each.alerts:>7,} alerts, {each.alerts_per_day or 0:8.1f} a day, "
                f"{each.keys:,} customers"
            )
        picture = Path(str(self.tables.root)) / "what-if.png"
        plot_alerts_by_value(figures, "limit", today=_NEW_LIMIT).savefig(picture, dpi=120)
        return picture

    def _prove(self) -> None:
        """Replays all events. Raises SetupError if a row differs."""
        with prove(self.tables, self.stream, self.streams) as proofs:
            rows = proofs.rows
        alike = sum(row.alike for row in rows)
        if differing := sum(row.only_recorded + row.only_replayed + row.unjudged for row in rows):
            raise SetupError(f"{differing:,} rows of the demo's outputs differ from a replay, {alike:,} match")
        print(f"   {alike:,} rows match, none differs")

    def _print_summary(self, events: int, seconds: float, pictures: tuple[Path, Path], total: float) -> None:
        print("\nRule changes while the stream ran")
        print(f"   {'change':<32}{'rule':<22}{'seconds':>8}   first event it applied to")
        for change in self.changes:
            event = self._find_first_event(change)
            print(f"   {change.what:<32}{change.rule_id:<22}{change.seconds:>8.1f}   {event}")
        print("\nAlerts")
        counts = self.tables.read("alerts").groupBy("rule_id", "rule_version", "verdict").count()
        for row in counts.orderBy("rule_id", "rule_version", "verdict").collect():
            print(f"   {row['rule_id']:<24} v{row['rule_version']}  {row['verdict']:<11}{row['count']:>8,}")
        print(
            f"\n{events:,} events judged, {events / max(seconds, 1e-9):,.0f} events/s while batches ran, first ones included"
        )
        print(
            f"The whole demo took {total:.0f} s. Charts of the first alert and of other limits: {pictures[0]}, {pictures[1]}"
        )
        root = self.tables.root
        print(
            "Next steps:\n"
            f"   .venv/bin/lookback --root {root} alerts --queue\n"
            f"   .venv/bin/lookback --root {root} rules list\n"
            "   .venv/bin/lookback rules check conf/rules"
        )


def _make_fresh_folder(root: Path) -> Path:
    if root.exists() and any(root.iterdir()):
        if not (root / _MARKER).exists():
            raise SetupError(f"{root} has files from outside the demo; choose another folder with --root")
        shutil.rmtree(root)
    root.mkdir(parents=True, exist_ok=True)
    (root / _MARKER).touch()
    return root.resolve()


def _write_parts(source: Path, folder: Path) -> Iterator[Path]:
    """Splits a file, in row order, into one large and some smaller files. Yields each file once it is written."""
    if not source.exists():
        raise SetupError(f"{source} does not exist; choose a Parquet file of transactions with --events")
    folder.mkdir(parents=True, exist_ok=True)
    table = pq.read_table(source)
    for number, part in enumerate(_slice(table)):
        file = folder / f"part-{number}.parquet"
        pq.write_table(part, file)
        yield file


def _slice(table: pa.Table) -> Sequence[pa.Table]:
    first = int(table.num_rows * _FIRST_PART)
    size = -(-(table.num_rows - first) // _PARTS)
    return [table.slice(0, first), *(table.slice(first + at * size, size) for at in range(_PARTS))]
