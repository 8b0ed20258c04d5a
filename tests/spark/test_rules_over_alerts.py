"""Rules over alerts: an alert that begins or ceases to stand is an event of the stream `alerts` (contract 11.6)."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F  # noqa: N812

import lookback
from alert_rows import collect_alerts, list_alerts
from lookback.config import load_stream
from lookback.core.errors import SetupError
from lookback.core.streams.alerts import FIELDS
from lookback.spark.checkpoints.checkpoint import Checkpoint
from lookback.spark.ingest.files import ingest
from lookback.spark.operations.forget import forget
from lookback.spark.operations.status import stream_status
from lookback.spark.replay.backtest import Candidate, backtest
from lookback.spark.replay.proof import prove
from lookback.spark.snoozes import snooze
from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder
from lookback.spark.tables.folders import open_folders
from lookback.spark.tables.schemas import ALERTS
from payins import START, STREAM, append, publish

if TYPE_CHECKING:
    from lookback.core.streams.declaration import Stream
    from lookback.spark.tables.lakehouse import Tables

pytestmark = pytest.mark.spark
OWN = load_stream(Path(__file__).parents[2] / "conf/streams/alerts.yml")
STREAMS = {STREAM.name: STREAM, OWN.name: OWN}
COMMON: dict[str, Any] = {"stream": STREAM.name, "group_by": ["customer"]}
# Every payment, of which all but the first of an hour are suppressed; sums of an hour that are told early and taken back;
# and large payments at one shop.
EACH = {
    **COMMON,
    "entity": "customer",
    "rule_id": "each",
    "score": 20,
    "window": "1 hour",
    "measures": {"n": "count(*)"},
    "when": "n >= 1",
    "suppress": "1 hour",
}
HOURS = {
    **COMMON, "entity": "customer", "rule_id": "hours", "severity": "high", "window": {"tumbling": "1 hour"}, "early": True,
    "measures": {"n": "count(*)", "total": "sum(amount)"}, "when": "total >= 100",
}  # fmt: skip
LARGE = {
    **COMMON, "rule_id": "large", "group_by": ["customer"], "entities": ["customer", "shop"], "score": 15, "window": "1 hour",
    "measures": {"n": "count(*)"}, "when": "amount > 90",
}  # fmt: skip
# It names no entity.
TRIED = {
    "rule_id": "tried", "stream": STREAM.name, "severity": "low", "window": "1 hour", "measures": {"n": "count(*)"},
    "when": "amount > 90",
}  # fmt: skip
RISK = {
    "rule_id": "risk", "stream": OWN.name, "severity": "critical", "group_by": ["entity", "entity_id"], "entity": "entity_id",
    "where": "mode = 'active' and entity_id is not null", "window": "7 days",
    "measures": {"risk": "sum(score)", "rules": "count(distinct rule_id)"},
    "when": "score > 0 and risk >= 85 and rules >= 3",
}  # fmt: skip
FIRST, SECOND, THIRD = (
    {"id": "e1", "at": START, "customer": 1, "shop": "a", "amount": "95.00", "arrival": 1},
    {"id": "e2", "at": START + 60_000_000, "customer": 1, "shop": "a", "amount": "5.00", "arrival": 2},
    {"id": "e3", "at": START + 120_000_000, "customer": 1, "shop": "a", "amount": "-60.00", "arrival": 3},
)
FOURTH = {"id": "e4", "at": START + 180_000_000, "customer": 1, "shop": "a", "amount": "1.00", "arrival": 4}
# As each row of an alert counts: with a payment of 95, one of 5 that makes the sum 100, one of -60 that takes it back.
BEGUN = [
    ("each", "active", "raised", "customer", "1", 20), ("large", "active", "raised", "customer", "1", 15),
    ("large", "active", "raised", "shop", "a", 15),
    ("tried", "shadow", "raised", None, None, 10), ("each", "active", "suppressed", "customer", "1", 20),
    ("hours", "active", "raised", "customer", "1", 50),
]  # fmt: skip
CEASED = [("each", "active", "suppressed", "customer", "1", 20), ("hours", "active", "retracted", "customer", "1", -50)]


def evaluate(tables: Tables, stream: Stream, **options: Any) -> Evaluation:
    tables.require(stream)
    evaluation = Evaluation(tables, stream, STREAMS, checkpoint_folder(tables, stream), once=True, **options)
    evaluation.run()
    return evaluation


def events_of(tables: Tables) -> list[tuple[Any, ...]]:
    names = ("rule_id", "mode", "verdict", "entity", "entity_id", "score")
    return [tuple(row) for row in tables.read_events(OWN.name).select(*names).collect()]


def read_about(tables: Tables) -> list[dict[str, Any]]:
    """The ids of the events and whom they are about, by id."""
    rows = tables.read_events(OWN.name).select("change_id", "alert_id", "entity", "entity_id", "score", "tags")
    return sorted(rows.toArrow().to_pylist(), key=lambda row: str(row["change_id"]))


def risks(tables: Tables) -> list[tuple[str, int]]:
    """What the rules over alerts raised: rule and risk."""
    rows = tables.read("alerts").where(F.col("stream") == OWN.name).orderBy("arrival").collect()
    return [(row["rule_id"], int(row["measures"]["risk"])) for row in rows]


def repeat_last_batch(tables: Tables, stream: Stream) -> None:
    """As if the process had died after its output was written and before the batch was marked as done."""
    commits = Path(checkpoint_folder(tables, stream)) / "commits"
    last = max((file for file in commits.iterdir() if file.name.isdigit()), key=lambda file: int(file.name))
    for file in (last, commits / f".{last.name}.crc"):
        file.unlink()


@pytest.fixture
def watched(ready: Tables) -> Tables:
    """Three rules of one customer that count, one in shadow, and a rule over their alerts."""
    publish(ready, [EACH, HOURS, LARGE, RISK])
    publish(ready, [TRIED], "shadow")
    return ready


@pytest.mark.long
def test_c11_6_risk_of_a_customer_rises_by_alerts_of_three_rules_and_a_retraction_takes_it_back(
    watched: Tables,
) -> None:
    # Nobody looks at the alerts of the customer, and they count all the same.
    until = dt.datetime.now(dt.timezone.utc) + dt.timedelta(hours=1)
    snooze(watched, STREAMS, "*", {"customer": "1"}, until=until, reason="a test card")
    append(watched, [FIRST, SECOND])
    evaluate(watched, STREAM)
    assert Counter(events_of(watched)) == Counter(BEGUN)
    evaluate(watched, OWN)
    first = risks(watched)
    # Events of one batch are judged in the order of their ids.
    assert first[-1] == ("risk", 105)
    (row,) = watched.read("alerts").where("stream = 'alerts' and measures['risk'] = '105'").collect()
    assert (row["severity"], row["entities"], row["score"], row["change"]) == ("critical", {"entity_id": "1"}, 100, 1)
    assert row["key"] == {"entity": "customer", "entity_id": "1"}

    # Its own alerts are no events of it: they do not wait, and nothing is written about them.
    own = Checkpoint(Path(checkpoint_folder(watched, OWN)))
    status = stream_status(watched, OWN, own)
    assert (status["events"], status["rules"], status["lag_commits"]) == (len(BEGUN), 1, 0)
    before = watched.version("alerts")
    repeat_last_batch(watched, OWN)
    evaluate(watched, OWN)
    assert (watched.version("alerts"), risks(watched), len(events_of(watched))) == (before, first, len(BEGUN))

    # A payment that is taken back brings an alert of `each`, which makes 125, and retracts that of `hours`. The batch is
    # repeated after its output was written, and adds no event twice.
    append(watched, [THIRD])
    evaluate(watched, STREAM)
    repeat_last_batch(watched, STREAM)
    append(watched, [FOURTH])
    evaluate(watched, STREAM)
    assert Counter(events_of(watched)) == Counter([*BEGUN, *CEASED, BEGUN[4]])
    evaluate(watched, OWN)
    # 20 + 15 + 20 + 20 = 75 (of one batch what ceases counts first), then 95, which without the retraction were 145.
    assert risks(watched) == [*first, ("risk", 95)]


@pytest.mark.long
def test_c11_6_replay_proof_backtest_and_rebuild_find_the_same_rows_and_who_is_forgotten_has_no_risk(
    watched: Tables,
) -> None:
    append(watched, [FIRST, SECOND])
    evaluate(watched, STREAM)
    append(watched, [THIRD, FOURTH])
    evaluate(watched, STREAM)
    evaluate(watched, OWN)
    known = risks(watched)
    assert known[-1] == ("risk", 95)
    stored = sorted(collect_alerts(watched.read("alerts").where("stream = 'alerts'")))
    feed = watched.read_changes(OWN.name, 0).where("_change_type = 'insert'")
    events = feed.select(*FIELDS, F.col("_commit_version").alias("arrival")).toArrow()
    assert sorted(list_alerts(lookback.replay([RISK], events, OWN))) == stored
    for stream, rows in ((OWN, len(known)), (STREAM, 8)):
        with prove(watched, stream, STREAMS) as proofs:
            assert all(each.holds and not each.unprovable for each in proofs.rows)
            assert sum(each.alike for each in proofs.rows if each.rule_id) == rows
    with backtest(watched, OWN, [Candidate(RISK, 1)]) as tried:
        assert sorted(collect_alerts(tried.alerts.drop("variant"))) == stored
    version = watched.version("alerts")
    for stream in (OWN, STREAM):
        evaluate(watched, stream, rebuild=True)
    assert watched.version("alerts") == version

    report = forget(watched, OWN, "entity = 'customer' and entity_id = '1'", checkpoint=checkpoint_folder(watched, OWN))
    assert report.rows["alerts"] == 7 + len(known)
    assert [row["rule_id"] for row in watched.read("alerts").select("rule_id").distinct().collect()] == ["tried"]
    append(watched, [{**FOURTH, "id": "e5", "at": START + 240_000_000, "amount": "30.00", "arrival": 5}])
    evaluate(watched, STREAM)
    evaluate(watched, OWN)
    # 20, and not 115.
    assert risks(watched) == []


@pytest.mark.long
def test_c12_2_each_entity_of_an_alert_is_an_event_and_all_go_with_their_alert(ready: Tables) -> None:
    # A payment is about a customer and a shop. Each customer pays once, and the shop is there each time.
    shop_risk = {
        "rule_id": "shop-risk", "stream": OWN.name, "group_by": ["entity", "entity_id"], "window": "7 days",
        "measures": {"risk": "sum(score)"}, "when": "risk >= 30",
    }  # fmt: skip
    publish(ready, [{**LARGE, "tags": ["a"]}, shop_risk])
    append(ready, [FIRST, {**SECOND, "customer": 2, "amount": "96.00"}])
    evaluate(ready, STREAM)
    assert Counter(events_of(ready)) == Counter(
        ("large", "active", "raised", *about, 15)
        for about in (("customer", "1"), ("customer", "2"), ("shop", "a"), ("shop", "a"))
    )
    with open_folders(str(ready.root)) as folders:
        assert read_about(folders) == read_about(ready)
    ids = [(row["change_id"], row["alert_id"]) for row in ready.read_events(OWN.name).collect()]
    assert len({change_id for change_id, _ in ids}) == 4
    assert len({alert_id for _, alert_id in ids}) == ready.read("alerts").count() == 2
    evaluate(ready, OWN)
    assert [dict(each.key) for each in collect_alerts(ready.read("alerts").where("stream = 'alerts'"))] == [
        {"entity": "shop", "entity_id": "a"}
    ]
    with prove(ready, OWN, STREAMS) as proofs:
        assert [(each.rule_id, each.alike, each.holds) for each in proofs.rows if each.rule_id] == [
            ("shop-risk", 1, True)
        ]

    # Who is forgotten leaves the risk of the shop too: 15 + 15, and not 45. So does an alert that only its entity tells of.
    row = ready.read("alerts").where("entities['customer'] = '1'").collect()[0].asDict()
    gone = {**row, "alert_id": "0" * 32, "event_id": "gone", "key": {}, "change": 0}
    ready.append(ready.spark.createDataFrame([gone], ALERTS), "alerts")
    report = forget(ready, STREAM, "customer = 1", checkpoint=checkpoint_folder(ready, STREAM))
    assert report.rows["alerts"] == 2
    append(ready, [{**THIRD, "customer": 3, "amount": "97.00"}])
    evaluate(ready, STREAM)
    evaluate(ready, OWN)
    found = ready.read("alerts").where("stream = 'alerts'").orderBy("arrival").collect()
    assert [row["measures"]["risk"] for row in found] == ["30", "30"]
    version = ready.version("alerts")
    evaluate(ready, OWN, rebuild=True)
    assert ready.version("alerts") == version


def test_c11_6_nothing_is_ingested_into_the_stream_of_alerts(ready: Tables, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="the events of stream 'alerts' are the alerts of the other streams"):
        ingest(ready, OWN, tmp_path)
