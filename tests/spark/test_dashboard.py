"""The queries of the bundle's dashboard on real tables: each equals what the product, or plain Python, says of the same rows.

A dashboard's SQL cannot call the product's code, so these tests are what keeps the two alike.
"""

from __future__ import annotations

import datetime as dt
import random
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
import sqlglot
from pyspark.sql.types import DateType, NumericType, StringType, TimestampType
from sqlglot import exp
from test_dashboard import DASHBOARD, QUERIES, encodings, layouts, widget_queries

from lookback.core.operations.figures import Figures, Sample
from lookback.core.operations.health import check_health
from lookback.core.streams import metrics
from lookback.questions import VIEWS, write_view
from lookback.spark.figures import RuleFigures
from lookback.spark.review import open_queue
from lookback.spark.snoozes import TABLE as SNOOZES_TABLE
from lookback.spark.tables.schemas import ALERTS, LABELS, METRICS, PRODUCT_TABLES, REVIEWS, RULE_LOG, SNOOZES
from payins import STREAM, append, publish, rule
from sample_alert import ALERT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from lookback.spark.tables.lakehouse import Tables

pytestmark = pytest.mark.spark
NOW = dt.datetime.now(dt.timezone.utc)
OTHER = "others"
SCALES = {"temporal": (DateType, TimestampType), "quantitative": NumericType, "categorical": StringType}
RULE_IDS = ("a", "b", "c")


def ago(**span: float) -> dt.datetime:
    return NOW - dt.timedelta(**span)


def write(tables: Tables, name: str, schema: Any, rows: list[dict[str, Any]]) -> None:
    if rows:
        tables.append(tables.spark.createDataFrame(rows, schema).coalesce(1), name)
    show(tables, name)


def show(tables: Tables, *names: str) -> None:
    """Lets queries reach tables, as they are now, by their names alone."""
    for name in names:
        tables.read(name).createOrReplaceTempView(name)


@pytest.fixture
def named(ready: Tables) -> Iterator[Tables]:
    """Tables that queries reach by their names alone, as in the schema that the bundle names."""
    show(ready, *PRODUCT_TABLES)
    for name in VIEWS:
        ready.spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW {name} AS {write_view(name, str)}")
    yield ready
    for name in (*VIEWS, *PRODUCT_TABLES):
        ready.spark.catalog.dropTempView(name)


def ask(tables: Tables, dataset: str, tag: str = "all tags") -> DataFrame:
    """Asks a dataset as if it were NOW, however long the test takes, with a value of the filter by tag."""
    now = f"timestamp'{NOW.isoformat()}'"
    for name in VIEWS:
        # A temporary view does not see the rows that were written after it was made.
        text = write_view(name, str).replace("current_timestamp()", now)
        tables.spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW {name} AS {text}")
    return tables.spark.sql(_fill(QUERIES[dataset], tag).replace("current_timestamp()", now))


def _fill(query: str, tag: str = "all tags") -> str:
    """Writes the value of the filter into a query, as Delta's parser leaves parameters of `spark.sql` unbound."""
    return query.replace(":tag", f"'{tag}'")


def rows_of(frame: DataFrame, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in frame.select(*names).collect()]


# Random rows ---------------------------------------------------------------------------------------------------------


def draw_alerts(chance: random.Random) -> list[dict[str, Any]]:
    """Rows of few alerts: revisions in any order of time, of two evaluations and two streams, some old, some reports."""
    rows = []
    for at in range(60):
        rule_id, stream = chance.choice(RULE_IDS), chance.choice([STREAM.name, STREAM.name, OTHER])
        entities = chance.choice([[], ["customer"], ["shop"], ["customer", "shop"]])
        base = {
            **ALERT, "alert_id": f"{at:032d}", "rule_id": rule_id, "stream": stream,
            "mode": chance.choice(["active"] * 5 + ["shadow"]), "event_id": chance.choice([f"e{chance.randrange(30)}"] * 5 + [None]),
            "evidence": chance.choice([None, [], [f"e{chance.randrange(30)}" for _ in range(3)]]),
            "severity": chance.choice(["info", "low", "medium", "high", "critical"]), "queue": chance.choice([True, True, False]),
            "key": chance.choice([{}, {"customer": None}, {"customer": "1"}, {"customer": "1", "shop": "ü"}, {"shop": "'a"}]),
            "entities": {name: chance.choice([None, "1", "2", "ü"]) for name in entities},
            "tags": chance.choice([None, [], ["attack.t1110"], ["Pci", "attack.t1110"]]),
            "score": chance.choice([0, 10, 25, 100]), "event_time": ago(days=chance.choice([0, 1, 400]), seconds=at), "message": "",
        }  # fmt: skip
        decided = ago(days=chance.choice([0.1, 2, 30, 89, 91, 200]), seconds=chance.random())
        for _ in range(chance.choice([1, 1, 2])):
            for revision in range(chance.choice([1, 1, 2, 3])):
                verdict = chance.choice(["raised", "raised", "raised", "suppressed", "retracted"])
                rows.append({**base, "revision": revision, "verdict": verdict, "decided_at": decided})
                decided += dt.timedelta(seconds=chance.random() * 100)
            # Another evaluation, begun in between, may write the alert again.
            decided += dt.timedelta(days=chance.choice([0.05, 1.5]))
    return [row for row in rows if row["decided_at"] < NOW]


@pytest.fixture
def drawn(
    named: Tables, request: pytest.FixtureRequest
) -> tuple[Tables, list[dict[str, Any]], dict[str, list[dt.datetime]]]:
    """Random rows in all tables, those of `alerts`, and when each stream's evaluation began anew."""
    chance = random.Random(request.param)
    alerts = draw_alerts(chance)
    write(named, "alerts", ALERTS, alerts)
    begun = {
        stream: [ago(days=each) for each in chance.sample([0.5, 1, 29.5, 88, 91.5], 2)]
        for stream in (STREAM.name, OTHER)
    }
    log = {"rule_id": None, "version": None, "message": "", "batch_id": 0, "arrival": None}
    write(named, "rule_log", RULE_LOG, [
        {**log, "stream": stream, "action": "begun_afresh", "logged_at": at} for stream, times in begun.items() for at in times
    ])  # fmt: skip
    write(named, "reviews", REVIEWS, [
        {
            "alert_id": f"{chance.randrange(60):032d}", "disposition": chance.choice(["confirmed", "confirmed", "false_positive", "benign", "unclear"]),
            "revision": chance.choice([None, 0, 1]), "reviewer": chance.choice(["ann", "kim"]), "note": "",
            "reviewed_at": ago(days=chance.choice([0.2, 1, 10])),
        } for _ in range(15)
    ])  # fmt: skip
    write(named, "labels", LABELS, [
        {
            "stream": STREAM.name, "event_id": f"e{chance.randrange(30)}", "positive": chance.choice([True, False]), "label": None,
            "labelled_at": ago(days=chance.choice([-1, 1, 1, 2])), "source": None, "author": None,
        } for _ in range(20)
    ])  # fmt: skip
    write(named, SNOOZES_TABLE, SNOOZES, [
        {
            "rule_id": chance.choice([None, "b"]), "key": key, "from": ago(days=1), "until": ago(days=until), "reason": "", "author": "",
        } for key, until in (({"customer": "1"}, -1), ({"customer": None, "shop": "x"}, -1), (None, 0.5), ({"shop": "'a"}, -1))
    ])  # fmt: skip
    return named, alerts, begun


def find_last(rows: list[dict[str, Any]], begun: dict[str, list[dt.datetime]]) -> dict[str, dict[str, Any]]:
    """The last row of each alert by evaluation and revision."""
    ordered = sorted(
        rows, key=lambda row: (sum(at < row["decided_at"] for at in begun[row["stream"]]), row["revision"])
    )
    return {row["alert_id"]: row for row in ordered}


@pytest.mark.long
@pytest.mark.parametrize("drawn", [1, 2, 6, 7], indirect=True)
def test_the_numbers_are_those_of_the_product(
    drawn: tuple[Tables, list[dict[str, Any]], dict[str, list[dt.datetime]]],
) -> None:
    tables, rows, begun = drawn
    # The queue, in its order.
    queue = open_queue(tables).collect()
    asked = ask(tables, "open_queue").collect()
    assert [row["alert_id"] for row in asked] == [row["alert_id"] for row in queue]
    assert [(row["severity"], row["decided_at"]) for row in asked] == [
        (row["severity"], row["decided_at"]) for row in queue
    ]
    assert queue
    # The filter by tag offers the tags of the queue, and leaves its alerts of one, whatever its capitals.
    tags = sorted({tag for row in queue for tag in row["tags"] or ()})
    assert [row["tag"] for row in ask(tables, "queue_tags").collect()] == sorted(["all tags", *tags])
    assert tags
    for tag in tags:
        left = [row["alert_id"] for row in open_queue(tables, tag=tag.upper()).collect()]
        assert [row["alert_id"] for row in ask(tables, "open_queue", tag.upper()).collect()] == left
        assert left
    recent = [row for row in rows if row["decided_at"] >= ago(days=90) and row["mode"] == "active"]
    last = find_last(recent, begun)
    assert all(row["age_days"] == (NOW - row["decided_at"].astimezone(dt.timezone.utc)).days for row in asked)
    # Alerts by day.
    counts = Counter(
        (row["stream"], row["rule_id"], row["severity"], row["event_time"].date())
        for row in last.values()
        if row["verdict"] == "raised"
    )
    days = rows_of(ask(tables, "alerts_by_day"), "stream", "rule_id", "severity", "day", "alerts")
    assert {key: count for *key, count in days for key in [tuple(key)]} == counts
    # Entities, by risk.
    about: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in last.values():
        for name, text in row["entities"].items():
            if row["verdict"] != "retracted" and text:
                about.setdefault((name, text), []).append(row)
    expected = {
        key: (sum(row["score"] for row in own), len(own), len({row["rule_id"] for row in own}))
        for key, own in about.items()
    }
    entities = rows_of(ask(tables, "top_entities"), "entity", "entity_id", "risk", "alerts", "rules")
    assert {key[:2]: key[2:] for key in entities} == expected
    assert [row[2] for row in entities] == sorted((row[2] for row in entities), reverse=True)


@pytest.mark.long
@pytest.mark.parametrize("drawn", [3, 4, 8], indirect=True)
def test_c10_4_precision_and_recall_are_those_of_the_figures(drawn: tuple[Tables, list[dict[str, Any]], Any]) -> None:
    tables, _, _ = drawn
    append(tables, [
        {"id": f"e{at}", "at": 1_700_000_000_000_000 + at, "customer": 1, "shop": "a", "amount": "1.00", "arrival": 1} for at in range(30)
    ])  # fmt: skip
    publish(tables, [rule("c"), rule("quiet")])
    show(tables, "rules")
    figures = RuleFigures(tables, STREAM)
    names = ("rule_id", "alerts", "flagged", "labelled", "positives", "all_positives", "precision", "recall")
    by_rule = [row for row in rows_of(figures.by_rule(), *names) if row[0] is not None]
    asked = ask(tables, "rule_figures").where(f"stream = '{STREAM.name}'")
    assert rows_of(asked, *names) == by_rule
    assert {row[0] for row in by_rule} == {*RULE_IDS, "quiet"}
    unexplained = {row["rule_id"]: row["alerts"] for row in figures.unexplained.collect()}
    assert {row[0]: row[1] for row in rows_of(asked, "rule_id", "unnamed") if row[1]} == unexplained


# Every query ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_on_empty_tables_every_query_answers_and_every_widget_shows_a_column_of_its_kind(named: Tables) -> None:
    schemas = {}
    for name in QUERIES:
        frame = ask(named, name)
        assert [tuple(row) for row in frame.collect()] == ([("all tags",)] if name == "queue_tags" else []), name
        schemas[name] = {field.name: field.dataType for field in frame.schema}
    for query in widget_queries():
        columns = {
            each.name
            for text in query.fields.values()
            for each in sqlglot.parse_one(text, dialect="databricks").find_all(exp.Column)
        }
        assert columns <= set(schemas[query.dataset]), query.widget
        found = run_widget(named, query)
        for encoding in (
            each
            for _, layout in layouts()
            if layout["widget"]["name"] == query.widget
            for each in encodings(layout["widget"])
        ):
            kind = found.schema[encoding["fieldName"]].dataType
            assert (
                isinstance(kind, SCALES[encoding.get("scale", {}).get("type", "quantitative")])
                or "scale" not in encoding
            ), encoding


def run_widget(tables: Tables, query: Any) -> DataFrame:
    """Runs the query of a widget as Databricks makes it: its fields, grouped by those that are no aggregate."""
    trees = {name: sqlglot.parse_one(text, dialect="databricks") for name, text in query.fields.items()}
    keys = [query.fields[name] for name, tree in trees.items() if not tree.find(exp.AggFunc)]
    fields = ", ".join(f"{text} AS `{name}`" for name, text in query.fields.items())
    grouped = f" GROUP BY {', '.join(keys)}" if query.is_aggregated and keys else ""
    return tables.spark.sql(f"SELECT {fields} FROM ({_fill(QUERIES[query.dataset])}){grouped}")


@pytest.mark.long
@pytest.mark.parametrize("drawn", [5], indirect=True)
def test_a_day_is_one_of_utc_whatever_the_warehouse_is_set_to(drawn: tuple[Tables, Any, Any]) -> None:
    tables, _, _ = drawn
    before = rows_of(ask(tables, "alerts_by_day"), "stream", "rule_id", "severity", "day", "alerts")
    zone = str(tables.spark.conf.get("spark.sql.session.timeZone"))
    tables.spark.conf.set("spark.sql.session.timeZone", "Pacific/Kiritimati")
    try:
        assert rows_of(ask(tables, "alerts_by_day"), "stream", "rule_id", "severity", "day", "alerts") == before
    finally:
        tables.spark.conf.set("spark.sql.session.timeZone", zone)


@pytest.mark.long
@pytest.mark.parametrize("drawn", [5], indirect=True)
def test_every_widget_gets_its_rows(drawn: tuple[Tables, Any, Any]) -> None:
    tables, _, _ = drawn
    empty = {query.widget for query in widget_queries() if not run_widget(tables, query).collect()}
    # No rows of metrics were drawn, nor rules that failed.
    undrawn = ("evaluation_hours", "stream_health", "rule_troubles")
    assert empty == {query.widget for query in widget_queries() if query.dataset in undrawn}
    counts = run_widget(tables, next(each for each in widget_queries() if each.widget == "open_alerts")).collect()
    assert [tuple(row) for row in counts] == [(open_queue(tables).count(),)]


# Streams -------------------------------------------------------------------------------------------------------------

# A stream for each: seconds since the last row, and what its row says.
STATES: dict[str, tuple[float, dict[str, Any]]] = {
    "well": (10, {}),
    "ended": (7_200, {}),
    "waits": (600, {"lag_commits": 2, "lag_seconds": 30}),
    "waits_for_a_rule": (600, {"lag_commits": 2, "lag_seconds": 30, "rules": 0}),
    "waits_a_little": (150, {"lag_commits": 1, "lag_seconds": 5}),
    "never_judged": (150, {"lag_commits": 1, "lag_seconds": 5, "judged": None}),
    "behind": (10, {"lag_commits": 9, "lag_seconds": 61}),
    "almost_behind": (10, {"lag_commits": 9, "lag_seconds": 45}),
    "late": (10, {"late": 100}),
    "a_little_late": (10, {"late": 99}),
    "discarded": (10, {"late": 100, "discarded": 10}),
    "ahead": (10, {"watermark": NOW + dt.timedelta(seconds=700)}),
    "failing": (10, {"failed": 1}),
    "much": (10, {"late": 500, "discarded": 500, "failed": 3, "lag_commits": 1, "lag_seconds": 100}),
}


def metrics_row(stream: str, seconds: float, **values: Any) -> dict[str, Any]:
    row = {
        metrics.METRICS_ID: f"{stream}-{seconds}", metrics.MEASURED_AT: ago(seconds=seconds), "stream": stream, "events": 1_000,
        "late": 0, "discarded": 0, "failed": 0, "matched": 9, "suppressed": 2, "lag_commits": 0, "lag_seconds": 0, "judged": 7,
        "committed": 9, "watermark": ago(seconds=30), "state_rows": 5, "rules": 2, "run_ms": 1, "evaluate_ms": 1, "write_ms": 1,
        **values,
    }  # fmt: skip
    row["by_rule"] = {"r": {"evaluated": 1, "matched": 9, "suppressed": 2, "failed": row["failed"]}}
    return {**row, "lag_seconds": Decimal(row["lag_seconds"])}


def expect_health(stream: str, row: dict[str, Any]) -> str:
    """The checks that health makes of the same row, among those that rows of metrics decide."""
    silent = (NOW - row["measured_at"]).total_seconds()
    recent = silent <= 3_600
    sample = Sample(
        row["measured_at"], row["events"], row["late"], row["discarded"], float(row["lag_seconds"]), row["watermark"], row["state_rows"],
    )  # fmt: skip
    waited = float(row["lag_seconds"]) + (silent if silent > 120 and row["lag_commits"] else 0)
    figures = Figures(
        stream, NOW, rules=row["rules"], committed=row["committed"], judged=row["judged"], waiting=row["lag_commits"], lag=waited,
        samples=[sample] if recent else [], last_sample=row["measured_at"], failing={"r": ""} if recent and row["failed"] else {},
    )  # fmt: skip
    wanted = ("not_running", "behind", "failing", "discarded", "late", "watermark_ahead")
    found = {finding.check for finding in check_health(figures)}
    return ", ".join(name for name in wanted if name in found) or "well"


def test_health_is_what_the_checks_say_and_hours_add_up(named: Tables) -> None:
    rows = {stream: metrics_row(stream, seconds, **values) for stream, (seconds, values) in STATES.items()}
    earlier = [metrics_row(stream, seconds + 90_000, late=10_000, failed=4) for stream, (seconds, _) in STATES.items()]
    write(named, metrics.TABLE, METRICS, [*rows.values(), *earlier])
    asked = {row["stream"]: row for row in ask(named, "stream_health").collect()}
    assert {stream: row["health"] for stream, row in asked.items()} == {
        stream: expect_health(stream, row) for stream, row in rows.items()
    }
    assert len({row["health"] for row in asked.values()}) > 7
    for stream, row in asked.items():
        own = rows[stream]
        assert (row["lag_commits"], row["judged"], row["lag_seconds"]) == (
            own["lag_commits"],
            own["judged"],
            float(own["lag_seconds"]),
        )
        assert row["late"] == (own["late"] if STATES[stream][0] < 3_600 else 0)

    by_hour: dict[tuple[str, dt.datetime], list[dict[str, Any]]] = {}
    for each in (*rows.values(), *earlier):
        hour = each["measured_at"].replace(minute=0, second=0, microsecond=0)
        by_hour.setdefault((each["stream"], hour), []).append(each)
    found = {
        (row["stream"], row["hour"].astimezone(dt.timezone.utc)): row
        for row in ask(named, "evaluation_hours").collect()
    }
    assert set(found) == set(by_hour)
    for key, own in by_hour.items():
        row = found[key]
        assert row["lag_seconds"] == max(float(each["lag_seconds"]) for each in own)
        for name in ("events", "late", "discarded", "failed"):
            assert row[name] == sum(each[name] for each in own), name
        assert row["raised"] == 7 * len(own)


def test_troubles_of_rules_are_the_newest_of_a_week(named: Tables) -> None:
    log = {"stream": STREAM.name, "version": 1, "message": "x", "batch_id": 0, "arrival": 1}
    actions = ("activated", "failed", "rejected", "quarantined", "failed")
    write(named, "rule_log", RULE_LOG, [
        {**log, "rule_id": f"r{at}", "action": action, "logged_at": ago(days=(0.1, 0.2, 1, 6, 8)[at])} for at, action in enumerate(actions)
    ])  # fmt: skip
    assert rows_of(ask(named, "rule_troubles"), "rule_id", "action") == [
        ("r1", "failed"),
        ("r2", "rejected"),
        ("r3", "quarantined"),
    ]
    assert [each["name"] for each in DASHBOARD["datasets"]] == list(QUERIES)
