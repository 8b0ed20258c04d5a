"""The queries that `lookback status --warehouse` sends to a warehouse, run by Spark on local tables."""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

from lookback.core.rules.quarantine import Quarantine
from lookback.core.streams.declaration import Stream
from lookback.remote.figures import Query, Row, StreamTables, read_figures
from lookback.spark.operations.status import read_stream_figures, stream_status
from lookback.spark.rules import RulesTable
from lookback.spark.tables.schemas import METRICS
from lookback.spark.tables.sqltexts import quote_text

if TYPE_CHECKING:
    from lookback.spark.tables.lakehouse import Tables

pytestmark = pytest.mark.spark
STREAM = Stream.from_dict(
    {"stream": "payments", "event_id": "id", "event_time": "at", "fields": {"id": "bigint", "at": "timestamp", "payer": "string"}}
)  # fmt: skip
RULE = {
    "rule_id": "often",
    "stream": "payments",
    "group_by": ["payer"],
    "window": "1 hour",
    "measures": {"n": "count(*)"},
    "when": "n > 2",
}


def as_text(value: Any) -> str | None:
    """A value as the statement execution API writes it."""
    if value is None:
        return None
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dt.datetime):
        return value.astimezone(dt.timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return json.dumps(value) if isinstance(value, dict) else str(value)


@pytest.mark.long
def test_c10_7_figures_of_a_workspace_are_those_of_local_status_with_both_roles_of_a_rule(tables: Tables) -> None:
    spark = tables.spark
    tables.create(STREAM)
    rules = RulesTable(tables, {"payments": STREAM})
    rules.push(RULE)
    rules.push({**RULE, "rule_id": "set-aside"})
    # Active by its row alone: the stream rejected it.
    rules.push({**RULE, "rule_id": "worse"})
    rules.set_status("set-aside", "quarantined")
    # A challenger beside the active version, one that was quarantined, and one that took the place of another.
    rules.push(RULE, status="shadow")
    for rule_id in ("tried", "twice"):
        rules.push({**RULE, "rule_id": rule_id})
        rules.push({**RULE, "rule_id": rule_id}, status="shadow")
        assert rules.quarantine(Quarantine(rule_id, 2, "it failed"))
    rules.push({**RULE, "rule_id": "twice"}, status="shadow")
    payments, log = (tables.identifier(name) for name in ("payments", "rule_log"))
    spark.sql(
        f"INSERT INTO {payments} (id, at, payer, ingested_at) VALUES (1, current_timestamp(), 'ann', current_timestamp())"
    )
    spark.sql(
        f"INSERT INTO {payments} (id, at, payer, ingested_at) VALUES (2, current_timestamp(), 'bob', current_timestamp())"
    )
    spark.sql(f"OPTIMIZE {payments}")
    before = dt.datetime.now(dt.timezone.utc)
    counts = {"evaluated": 9, "matched": 3, "suppressed": 1, "failed": 2}
    samples = [
        {
            "metrics_id": f"m{hours}", "measured_at": before - dt.timedelta(hours=hours), "stream": "payments",
            "events": 10 + hours, "late": 1, "discarded": 0, "lag_seconds": Decimal("1.500"), "watermark": before,
            "state_rows": 5, "run_ms": 30, "evaluate_ms": 10, "write_ms": 5, "judged": 1, "by_rule": {"often": counts},
        }
        for hours in (0, 2)
    ]  # fmt: skip
    tables.append(spark.createDataFrame(samples, METRICS).coalesce(1), "metrics")
    spark.sql(
        f"INSERT INTO {log} (stream, rule_id, version, action, message, batch_id, arrival, logged_at) VALUES "
        "('payments', 'often', 1, 'activated', '', 1, 1, current_timestamp() - interval 4 hours), "
        # What was in force goes on after a change of it that was rejected.
        "('payments', 'often', 1, 'rejected', 'no window', 2, 1, current_timestamp() - interval 3 hours), "
        "('payments', 'often', 2, 'shadowed', '', 2, 1, current_timestamp() - interval 2 hours), "
        "('payments', 'often', 1, 'failed', 'division by 0', 3, 1, current_timestamp()), "
        "('payments', 'worse', 1, 'rejected', 'no window', 3, 1, current_timestamp()), "
        "('payments', 'mended', 1, 'rejected', 'no window', 3, 1, current_timestamp() - interval 2 hours), "
        "('payments', 'mended', 2, 'activated', '', 4, 1, current_timestamp())"
    )
    spark.sql(
        f"INSERT INTO {tables.identifier('rejected_events')} (stream, raw, reason, source, ingested_at, read_as) VALUES "
        "('payments', 'x', 'id is NULL', 'a.csv', current_timestamp(), NULL)"
    )

    def execute(query: Query) -> Sequence[Row]:
        # Delta's parser hands markers on without their values (Delta 4.4 on Spark 4.2).
        values = {name: "NULL" if value is None else quote_text(value) for name, value in query.values.items()}
        text = re.sub(r":(\w+)", lambda marker: values.get(marker[1], marker[0]), query.text)
        frame = spark.sql(text)
        return [{name: as_text(value) for name, value in row.asDict(recursive=True).items()} for row in frame.collect()]

    now = dt.datetime.now(dt.timezone.utc)
    found = read_figures(StreamTables("payments", tables.identifier), execute, now)
    expected = read_stream_figures(tables, STREAM, None, now)
    # The history's times come to the millisecond.
    assert abs(found.lag - expected.lag) < 0.002
    assert {**vars(found), "lag": 0, "newest": 0} == {**vars(expected), "lag": 0, "newest": 0}
    assert (found.rules, found.quarantined, found.waiting, found.judged, found.committed) == (
        5,
        ["set-aside", "tried"],
        1,
        1,
        3,
    )
    assert (len(found.samples), found.failing, found.refused) == (1, {"often": "division by 0"}, {"worse": "no window"})
    assert (found.rejected, found.reason, found.ingested) == (1, "id is NULL", 2)
    status = stream_status(tables, STREAM)
    assert [status[name] for name in ("events", "alerts", "open", "late", "rejected")] == [2, 0, 0, 0, 1]
