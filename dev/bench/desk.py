"""The review desk on a large table: how long it takes to read the queue, to open an alert and to decide.

The repository's sample is ingested and judged; alerts of other days are added until there are as many as asked for, most of
them reviewed. What is opened are alerts of the sample, each explained by its events. The tables are made once.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from dev.bench.processes import ProcessorClock
from dev.bench.sets import DATA, REPOSITORY
from dev.bench.watching import say
from lookback.config import Settings

if TYPE_CHECKING:
    from lookback.desk.queue import QueuedAlert
    from lookback.spark.tables.lakehouse import Tables

RULES = ("customer-day-spend", "large-payment", "spend-against-usual")
# Alerts in a file, as `maintain` leaves them, and open ones among those that are added.
_FILE_ROWS, _OPEN = 10_000, 10_000
_SECONDS_TO_DECIDE = 4.0
_REPEATS = 12


def run(alerts: int) -> dict[str, float]:
    """Makes the tables, measures, prints seconds by name and returns them."""
    from lookback.desk.records import AlertRecords  # noqa: PLC0415 - Spark is imported when it is needed
    from lookback.spark.platform.session import get_spark  # noqa: PLC0415
    from lookback.spark.tables.lakehouse import Tables  # noqa: PLC0415

    settings = Settings.local(DATA / f"desk-{alerts}", REPOSITORY / "conf")
    tables, made = (
        Tables.of(get_spark("lookback bench", settings=settings.spark), settings),
        Path(settings.root, "made"),
    )
    if not made.exists():
        shutil.rmtree(settings.root, ignore_errors=True)
        _judge_sample(tables, settings)
        say(f"adding alerts up to {alerts:,}")
        _add_alerts(tables, alerts)
        made.touch()
    figures: dict[str, float] = {}
    # Beside others on the machine the work says what it takes by itself.
    clock = ProcessorClock()

    def measure(name: str, act: Callable[[], Any]) -> Any:
        begun, worked = time.perf_counter(), clock.read()
        result = act()
        figures[name] = round(time.perf_counter() - begun, 2)
        figures[f"{name}, of a processor"] = round(clock.read() - worked, 2)
        say(f"{name}: {figures[name]} s, {figures[f'{name}, of a processor']} of a processor")
        return result

    records = AlertRecords(tables, settings.streams(), stream="transactions", reviewer="kim")
    reading = measure("read the queue, first", records.read_queue)
    measure("read the queue", records.read_queue)
    say(f"{len(reading.alerts):,} alerts wait")
    own = [each for each in reading.alerts if each.rule_id in RULES and each.rule_version == 1]
    _measure_opening(records, own, measure, figures)
    _measure_desk(records, figures)
    for name, seconds in figures.items():
        print(f"{name:50} {seconds:6.2f} s")  # noqa: T201 - it is what the command is for
    return figures


def _measure_opening(
    records: Any, own: list[QueuedAlert], measure: Callable[..., Any], figures: dict[str, float]
) -> None:
    measure("open an alert, first", lambda: records.open(own[0]))
    parts: Mapping[str, list[float]] = {"open an alert": [], "read its like": [], "decide": []}
    from lookback.spark.review import SeenAlert  # noqa: PLC0415

    work: list[float] = []
    clock = ProcessorClock()
    for alert in own[1 : _REPEATS + 1]:
        times = [time.perf_counter()]
        worked = clock.read()
        opened = records.open(alert)
        work.append(clock.read() - worked)
        times.append(time.perf_counter())
        records.read_like(opened)
        times.append(time.perf_counter())
        records.decide([SeenAlert(alert.alert_id, alert.revision, alert.decided_at)], "benign", "measured")
        times.append(time.perf_counter())
        for name, begun, ended in zip(parts, times, times[1:], strict=False):
            parts[name].append(ended - begun)
    for name, seconds in parts.items():
        figures[f"{name}, median of {_REPEATS}"] = round(statistics.median(seconds), 2)
        figures[f"{name}, longest"] = round(max(seconds), 2)
    figures[f"open an alert, of a processor, median of {_REPEATS}"] = round(statistics.median(work), 2)


def _measure_desk(records: Any, figures: dict[str, float]) -> None:
    """Measures from the press of a button to the next alert with its picture, with some seconds to look at each."""
    from lookback.desk.queue import QueueFilter  # noqa: PLC0415
    from lookback.desk.review import ReviewDesk  # noqa: PLC0415

    desk = ReviewDesk(records)
    desk.show(QueueFilter(rule_id=RULES[0]), desk.queue.order)
    seconds = []
    for _ in range(_REPEATS):
        time.sleep(_SECONDS_TO_DECIDE)
        begun = time.perf_counter()
        desk.decide("benign", "measured")
        seconds.append(time.perf_counter() - begun)
    figures[f"decide and see the next, median of {_REPEATS}"] = round(statistics.median(seconds), 2)
    figures["decide and see the next, longest"] = round(max(seconds), 2)


def _judge_sample(tables: Tables, settings: Settings) -> None:
    from lookback.spark.ingest.files import ingest  # noqa: PLC0415
    from lookback.spark.rules import RulesTable  # noqa: PLC0415
    from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder  # noqa: PLC0415

    streams, stream = settings.streams(), settings.stream("transactions")
    tables.create(stream)
    ingest(tables, stream, str(REPOSITORY / "conf/samples/transactions.parquet"), progress=None)
    for name in RULES:
        document = yaml.safe_load((REPOSITORY / f"conf/rules/{name}.yml").read_text(encoding="utf-8"))
        RulesTable(tables, streams).push(document, status="active", author="bench")
    Evaluation(tables, stream, streams, checkpoint_folder(tables, stream), once=True).run()


def _add_alerts(tables: Tables, alerts: int) -> None:
    """Adds alerts of the last 80 days, sorted by time in files, and reviews of all but some of them."""
    rows = tables.spark.range(alerts - tables.read("alerts").count()).selectExpr(
        "md5(cast(id as string)) alert_id", "0 revision", "'raised' verdict",
        f"element_at(array{RULES}, cast(id % 3 + 1 as int)) rule_id", "0L rule_version", "'active' mode", "'low' severity",
        "'transactions' stream", "map('customer_id', cast(id % 5000 as string)) key", "cast(id as string) event_id",
        "timestamp_micros(unix_micros(current_timestamp()) - id * 6900000) event_time", "event_time window_start",
        "event_time window_end", "true window_complete", "map('total', cast(id as string)) measures",
        "concat('much by customer ', id % 5000) message", "cast(array() as array<string>) evidence", "0L arrival",
        "event_time decided_at", "map('customer_id', cast(id % 5000 as string)) entities", "1L score", "1 change",
        "true queue", "cast(array() as array<string>) tags",
    )  # fmt: skip
    tables.append(rows.repartitionByRange(max(1, alerts // _FILE_ROWS), "decided_at"), "alerts")
    reviews = rows.where(f"rule_version = 0 and cast(event_id as bigint) >= {_OPEN}").selectExpr(
        "alert_id", "if(cast(event_id as bigint) % 5 = 0, 'confirmed', 'false_positive') disposition", "revision",
        "'lee' reviewer", "'' note", "decided_at reviewed_at",
    )  # fmt: skip
    tables.append(reviews.repartitionByRange(max(1, alerts // 100_000), "reviewed_at"), "reviews")
