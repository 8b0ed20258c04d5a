"""UPDATEs of one version that arrive in one batch, also to another stream and back (contract 4): stream, explanation, counted
events, rebuild and proof agree."""

from __future__ import annotations

import datetime as dt
import json
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from lookback.spark.explaining.counted import find_counted_events
from lookback.spark.replay.proof import prove
from lookback.spark.review import explain
from lookback.spark.rules import RulesTable
from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder
from payins import START, STREAM, STREAMS, append, outputs, publish, window

if TYPE_CHECKING:
    from lookback.spark.tables.lakehouse import Tables

pytestmark = [pytest.mark.spark, pytest.mark.long]
SECOND = 1_000_000
BOTH = {**STREAMS, "others": replace(STREAM, name="others")}


def event(name: str, seconds: int, amount: int, arrival: int) -> dict[str, Any]:
    at = START + seconds * SECOND
    return {"id": name, "at": at, "customer": 1, "shop": "a", "amount": f"{amount}.00", "arrival": arrival}


# 0 a10 b30 | a sum comes, time passes, the rule moves away and comes back for amounts above 20 | 70 c10 d30 | 140 e30
#             \__________________________ one version, one batch __________________________/
def test_c4_c10_6_c10_9_updates_of_one_version_in_one_batch_apply_in_the_order_of_their_commits(ready: Tables):
    document = window("minutes", {"tumbling": "1 minute"}, group_by=[], measures={"n": "count(*)"}, message="{n}")
    rules, name = RulesTable(ready, BOTH), ready.identifier("rules")

    def update(**changes: Any) -> None:
        ready.spark.sql(
            f"UPDATE {name} SET document = '{json.dumps({**document, **changes})}' WHERE rule_id = 'minutes'"
        )

    def evaluate(**options: Any) -> None:
        Evaluation(ready, STREAM, BOTH, checkpoint_folder(ready, STREAM), once=True, **options).run()

    publish(ready, [document])
    append(ready, [event("a", 0, 10, 1), event("b", 1, 30, 1)])
    evaluate()
    sums = {"measures": {"n": "count(*)", "total": "sum(amount)"}}
    update(**sums)
    passed = dt.datetime.fromtimestamp(START / SECOND + 60, dt.timezone.utc).isoformat()
    rules.command("advance", STREAM.name, time=passed)
    update(stream="others")
    update(where="amount > 20")
    append(ready, [event("c", 70, 10, 2), event("d", 71, 30, 2), event("e", 140, 30, 3)])
    evaluate()

    log = ready.read("rule_log").where("arrival = 1 and action in ('activated', 'retired', 'advance')").collect()
    assert sorted(row["action"] for row in log) == ["activated", "activated", "advance", "retired"]
    assert len({row["batch_id"] for row in log}) == 1
    alerts = ready.read("alerts").orderBy("window_start").collect()
    # The sum begins with its document, and the last one with the commit after it.
    found = [(row["rule_version"], row["arrival"], dict(row["measures"])) for row in alerts]
    assert found == [(1, 1, {"n": "2", "total": None}), (1, 3, {"n": "1"})]
    explained = [explain(ready, BOTH, row["alert_id"]) for row in alerts]
    assert [each.consistent for each in explained] == [True, True]
    assert [list(each.rule["document"]["measures"]) for each in explained] == [["n", "total"], ["n"]]
    behind = defaultdict[str, set[str | None]](set)
    for row in find_counted_events(ready, BOTH, ready.read("alerts")).collect():
        behind[row["alert_id"]].add(row["event_id"])
    assert [behind[row["alert_id"]] for row in alerts] == [{"a", "b"}, {"d"}]

    written = outputs(ready)
    with prove(ready, STREAM, BOTH) as proofs:
        assert [(row.rule_id, row.alike, row.holds) for row in proofs.rows] == [("minutes", 2, True), (None, 0, True)]
    ready.spark.sql(f"DELETE FROM {ready.identifier('alerts')} WHERE event_time IS NOT NULL")
    evaluate(rebuild=True)
    assert outputs(ready) == written
