"""Dispatch on its own: which events and columns are packed for the shards."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa
import pytest
from pandas import factorize

from dev.bench.scale import _Pages
from lookback.core.errors import SetupError
from lookback.core.expressions import compiling as expressions
from lookback.core.rules.account import Account
from lookback.core.rules.changes import RuleChange
from lookback.core.rules.compiling import compile_rule
from lookback.core.rules.coverage import MAX_CONDITIONS, Coverage, find_coverage
from lookback.core.streams.blocks import unpack_events, unpack_table
from lookback.core.streams.declarations import Declarations
from lookback.core.streams.events import Events
from lookback.core.values import keys
from lookback.spark.batches import dispatch
from lookback.spark.batches.dispatch import DELETED, INSERTED, KIND, Dispatch, select_changes
from lookback.spark.batches.shard import ALERTS, Shard
from lookback.spark.checkpoints.checkpoint import Checkpoint
from lookback.spark.checkpoints.plan import Plan
from lookback.spark.replay import tasks
from lookback.spark.replay.answers import ShardAnswers
from lookback.spark.replay.plan import ReplayPlan
from payins import STREAM, STREAMS, rule

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LABELS = ("a", "b")
START = dt.datetime(2024, 3, 4, tzinfo=dt.timezone.utc)
COUNT = {"measures": {"n": "count(*)"}, "when": "n > 1", "message": ""}


def coverage_of(*documents: dict[str, Any]) -> Coverage:
    return find_coverage(compile_rule(document, STREAM) for document in documents)


def changes(count: int = 40, change: str = "insert") -> pa.RecordBatch:
    """A record batch as Spark gives it. Customers 0 to 6, amounts NULL or their row's number."""
    times = pa.array([START + dt.timedelta(seconds=n) for n in range(count)], pa.timestamp("us", tz="UTC"))
    return pa.RecordBatch.from_pydict(
        {
            "id": pa.array([f"e{n}" for n in range(count)]),
            "at": times,
            "position": pa.array(range(count), pa.int64()),
            "customer": pa.array([n % 7 for n in range(count)], pa.int32()),
            "shop": pa.array([f"s{n % 3}" for n in range(count)]),
            "amount": pa.array([None if n % 4 == 0 else n for n in range(count)], pa.decimal128(18, 2)),
            "_kind": pa.array([INSERTED if change == "insert" else DELETED] * count, pa.int8()),
            "_commit_version": pa.array([1] * count, pa.int64()),
            "_committed": pa.array([None] * count, pa.timestamp("us", tz="UTC")),
        }
    )


def sent(coverage: Coverage, folder: Path, batch: pa.RecordBatch) -> tuple[set[str], set[str], dict[str, Any]]:
    """The ids and columns that the shards are sent, and what the blocks say of themselves."""
    (blocks,) = Dispatch(Declarations.of(STREAM), coverage, LABELS, Checkpoint(folder))([batch])
    assert blocks.column("shard").to_pylist() == list(LABELS)
    unpacked = [unpack_events(payload, STREAM) for payload in blocks.column("payload").to_pylist()]
    ids = [text for events, _ in unpacked for text in events.id_texts]
    assert len(coverage.grouping_sets) > 1 or len(ids) == len(set(ids))
    return set(ids), set(unpacked[0][0].columns), unpacked[0][1]


def test_an_event_that_no_rule_wants_is_not_sent_but_counts_for_the_watermark(tmp_path: Path) -> None:
    coverage = coverage_of(rule("large", where="amount >= 30", **COUNT), rule("one", where="customer = 1", **COUNT))
    ids, columns, header = sent(coverage, tmp_path, changes())
    assert ids == {f"e{n}" for n in range(40) if (n >= 30 and n % 4) or n % 7 == 1}
    assert columns == {"id", "at", "position", "customer", "amount"}
    last = int((START + dt.timedelta(seconds=39)).timestamp() * 1_000_000)
    assert (header["rows"], header["marks"]) == (40, [[1, last]])
    assert sent(coverage, tmp_path, changes(change="delete"))[0] == ids


def test_c4_an_event_whose_where_fails_is_sent_so_that_the_failure_is_logged(tmp_path: Path) -> None:
    coverage = coverage_of(rule("division", where="10 / (customer - 3) > 100", **COUNT))
    assert sent(coverage, tmp_path, changes())[0] == {f"e{n}" for n in range(40) if n % 7 == 3}


def test_a_condition_or_a_key_that_breaks_sends_more_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_shop = rule("shops", group_by=["shop"], where="amount >= 30", **COUNT)
    coverage = coverage_of(rule("large", where="amount >= 30", **COUNT), rule("one", where="customer = 1", **COUNT))
    unreadable = Coverage(coverage.wants | {(("customer",), "from != 'me'")}, coverage.fields)
    assert len(sent(unreadable, tmp_path, changes())[0]) == 40
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "_compile_cached", broken)
        assert len(sent(coverage, tmp_path, changes())[0]) == 40
    find_keys = Events.find_keys
    patched = lambda events, group_by: broken() if "shop" in group_by else find_keys(events, group_by)  # noqa: E731
    monkeypatch.setattr(Events, "find_keys", patched)
    (blocks,) = Dispatch(Declarations.of(STREAM), coverage_of(by_shop), LABELS, Checkpoint(tmp_path))([changes()])
    for payload in blocks.column("payload").to_pylist():
        events, _ = unpack_events(payload, STREAM)
        assert set(events.id_texts) == {f"e{n}" for n in range(30, 40) if n % 4}


def broken(*_: Any) -> Any:
    raise KeyError("broken")


def test_a_condition_that_cannot_be_read_again_is_not_sent_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    where = rule("large", where="amount >= 30 and shop = 'a'", **COUNT)
    assert coverage_of(where).conditions(("customer",)) == ["amount >= 30 and shop = 'a'"]
    monkeypatch.setattr(expressions, "recompile", broken)
    assert coverage_of(where).conditions(("customer",)) is None
    # What is read as something else, as a field named null once was, is not sent either.
    monkeypatch.setattr(expressions, "recompile", lambda *_: compile_rule(rule("r", where="true"), STREAM).where)
    assert coverage_of(where).conditions(("customer",)) is None


def test_a_rule_without_where_wants_every_event_of_its_grouping_set(tmp_path: Path) -> None:
    coverage = coverage_of(rule("large", where="amount >= 30", **COUNT), rule("all", **COUNT))
    ids, columns, _ = sent(coverage, tmp_path, changes())
    assert len(ids) == 40
    assert coverage.conditions(("customer",)) is None
    assert columns == {"id", "at", "position", "customer", "amount"}
    assert sent(Coverage(), tmp_path, changes())[0] == set()


def test_the_plan_in_the_checkpoint_goes_before_that_of_the_query(tmp_path: Path) -> None:
    first, wider = coverage_of(rule("large", where="amount >= 30", **COUNT)), coverage_of(rule("all", **COUNT))
    Checkpoint(tmp_path).write_plan(Plan(2, wider, {}, {}, ""))
    ids, columns, header = sent(first, tmp_path, changes())
    assert (len(ids), columns) == (40, {"id", "at", "position", "customer"})
    assert Coverage.from_dict(header["coverage"]) == wider
    # A field that the query does not read cannot be sent.
    batch = changes()
    without = batch.select([name for name in batch.schema.names if name != "shop"])
    Checkpoint(tmp_path).write_plan(Plan(2, coverage_of(rule("shops", group_by=["shop"], **COUNT)), {}, {}, ""))
    assert Coverage.from_dict(sent(wider, tmp_path, without)[2]["coverage"]) == wider
    (tmp_path / "lookback.json").write_text("torn")
    assert Coverage.from_dict(sent(wider, tmp_path, batch)[2]["coverage"]) == wider


def test_coverage_covers_what_it_sends_and_no_more() -> None:
    large = coverage_of(rule("large", where="amount >= 30", **COUNT))
    everything = coverage_of(rule("all", **COUNT), rule("reads", **{**COUNT, "when": "n > 1 and amount > 2"}))
    shops = coverage_of(rule("shops", group_by=["shop"], **COUNT))
    assert everything.covers(large)
    assert not large.covers(everything)
    assert not everything.covers(shops)
    assert (everything | shops).covers(shops)
    assert (everything & large).wants == large.wants
    assert not (everything & shops).covers(shops)
    assert Coverage.from_dict((large | shops).to_dict()) == large | shops
    many = [rule(f"r{n}", where=f"amount > {n}", **COUNT) for n in range(MAX_CONDITIONS + 1)]
    assert coverage_of(*many).conditions(("customer",)) is None
    assert len(coverage_of(*many[1:]).conditions(("customer",)) or ()) == MAX_CONDITIONS


# Eight shards, so that the keys `a` and `a\0` are not of one.
SHARDS = tuple(map(str, range(8)))
BURST = rule("burst", group_by=["shop"], where="amount = 9", measures={"n": "count(*)"}, when="n >= 3", message="")
BURSTS = [RuleChange("insert", 1, "burst", 1, "active", json.dumps(BURST))]


def cash_after_another() -> pa.RecordBatch:
    """An event that no rule wants, of shop `a` with a NUL behind it, and seven that the rule wants, of shop `a`."""
    batch = changes(8)
    columns = {name: batch.column(name) for name in batch.schema.names}
    columns["shop"] = pa.array(["a\0", *["a"] * 7])
    columns["amount"] = pa.array([1, *[9] * 7], pa.decimal128(18, 2))
    return pa.RecordBatch.from_pydict(columns)


def judge_in_stream(folder: Path) -> list[str]:
    """The events that raise an alert, as dispatch and the shards of a stream find them."""
    coverage, found = coverage_of(BURST), list[str]()
    (blocks,) = Dispatch(Declarations.of(STREAM), coverage, SHARDS, Checkpoint(folder))([cash_after_another()])
    change = ("rule", json.dumps(vars(BURSTS[0])).encode())
    for row in blocks.to_pylist():
        pages: Any = _Pages()
        shard = Shard(Declarations.of(STREAM), STREAMS, SHARDS, folder, row["shard"], pages)
        answers = shard.judge([pd.DataFrame([(row["kind"], row["payload"]), change], columns=["kind", "payload"])])
        packed = answers["payload"][answers["kind"] == ALERTS]
        found += [alert for payload in packed for alert in unpack_table(payload)["event_id"].to_pylist()]
    return sorted(found)


ACCOUNT = Account.of([compile_rule(BURST, STREAM)], [])


def answer_in_replay() -> list[dict[str, Any]]:
    """What the shards of a replay answer about the same events."""
    plan = ReplayPlan([compile_rule(BURST, STREAM)], BURSTS, [], STREAMS, erases=True, account=ACCOUNT)
    blocks = tasks._SpanDispatch.of(STREAM, plan, SHARDS, [1])([cash_after_another()])
    return [row for batch in tasks._ShardJudge(STREAM, SHARDS, plan)(blocks) for row in batch.to_pylist()]


def judge_in_replay(folder: Path) -> list[str]:
    """The events that raise an alert in a replay."""
    packed = [row["payload"] for row in answer_in_replay() if row["kind"] == ALERTS]
    return sorted(alert for payload in packed for alert in unpack_table(payload)["event_id"].to_pylist())


def count_missing() -> dict[tuple[str, int], int]:
    """The events that a replay does not judge though a version wants them."""
    answers = answer_in_replay()
    facts: Any = SimpleNamespace(list_payloads=lambda kind: [row["payload"] for row in answers if row["kind"] == kind])
    return dict(ShardAnswers.find_missing(facts, ACCOUNT))


@pytest.mark.parametrize("judge", [judge_in_stream, judge_in_replay])
def test_an_event_that_no_rule_wants_hides_none_whose_key_it_resembles(judge: Any, tmp_path: Path) -> None:
    assert judge(tmp_path) == [f"e{n}" for n in range(3, 8)]


@pytest.mark.parametrize("judge", [judge_in_stream, judge_in_replay])
def test_a_shard_that_does_not_know_an_event_as_its_own_says_so(
    judge: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # pandas ends a text at its first NUL, so dispatch takes `a` for what came before it, and a shard does not.
    monkeypatch.setattr(keys, "number_values", factorize)
    with pytest.raises(
        SetupError, match=r"event 'e1' of commit 1 came to a shard .* by shop, 7 events .* which finds 0"
    ):
        judge(tmp_path)


def test_c10_6_the_account_of_a_proof_misses_events_that_no_shard_judges(monkeypatch: pytest.MonkeyPatch) -> None:
    assert count_missing() == {}
    # The events are sent to a shard that drops them, as above, and the shard does not look.
    monkeypatch.setattr(keys, "number_values", factorize)
    monkeypatch.setattr(tasks, "require_own", lambda *_: None)
    assert count_missing() == {("burst", 1): 7}


def test_an_updated_event_is_neither_a_new_one_nor_a_deleted_one(spark: SparkSession) -> None:
    kinds = ["insert", "delete", "update_preimage", "update_postimage"]
    rows = [(kind, START, None, START, 1, kind) for kind in kinds]
    columns = "id string, at timestamp, position long"
    feed = spark.createDataFrame(
        rows, f"{columns}, _commit_timestamp timestamp, _commit_version long, _change_type string"
    )
    found = {row["id"]: row[KIND] for row in select_changes(feed, Declarations.of(STREAM), ()).collect()}
    others = found.keys() - {"insert", "delete"}
    assert (found["insert"], found["delete"]) == (INSERTED, DELETED)
    assert {found[each] for each in others}.isdisjoint({INSERTED, DELETED})
    assert len(others) == 2
