"""What dispatch and shards make of a stream whose lateness changes, and a replay of it, without Spark (contract 10.2)."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa

from dev.bench.scale import _Pages
from lookback.core.rules.changes import RuleChange
from lookback.core.rules.compiling import compile_rule
from lookback.core.rules.coverage import find_coverage
from lookback.core.streams.blocks import unpack_table
from lookback.core.streams.declarations import Declarations, Declared
from lookback.spark.batches.dispatch import INSERTED, BlockBuilder, Dispatch
from lookback.spark.batches.shard import ALERTS, LATE, LOG, Shard
from lookback.spark.replay import tasks
from lookback.spark.replay.plan import ReplayPlan
from payins import MORE_RULES, RULES, STREAM, TIME, make_events

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lookback.core.streams.declaration import Stream

DOCUMENTS = [RULES[0], RULES[3], *MORE_RULES]
COMPILED = [compile_rule(document, STREAM) for document in DOCUMENTS]
COVERAGE = find_coverage(COMPILED)
CHANGES = [RuleChange("insert", 1, each["rule_id"], 1, "active", json.dumps(each)) for each in DOCUMENTS]
EVENTS = make_events(300, seed=24)
LABELS = ("s0", "s1")
STRICT = replace(STREAM, max_out_of_orderness=1_000_000, allowed_lateness=20_000_000, max_revisions=3)
LAX = replace(STREAM, max_out_of_orderness=60_000_000)
TYPES = {"id": pa.string(), "at": TIME, "customer": pa.int32(), "shop": pa.string(), "amount": pa.decimal128(18, 2)}


def make_chunk(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    """Rows of `select_changes`."""
    columns = {
        name: pa.array([Decimal(row[name]) if name == "amount" else row[name] for row in rows], TYPES[name])
        for name in sorted({"id", "at", *COVERAGE.fields})
    }
    columns["position"] = pa.array([int(row["id"][1:]) for row in rows], pa.int64())
    columns["_kind"] = pa.array([INSERTED] * len(rows), pa.int8())
    columns["_commit_version"] = pa.array([row["arrival"] for row in rows], pa.int64())
    columns["_committed"] = pa.array([None] * len(rows), TIME)
    return pa.RecordBatch.from_pydict(columns)


def judge_as_stream() -> dict[str, list[bytes]]:
    """Twelve commits in six batches, with a restart under another declaration after the second and the fourth."""
    stores, answers = {label: _Pages() for label in LABELS}, defaultdict[str, list[bytes]](list)
    plan: Any = SimpleNamespace(read_plan=lambda: SimpleNamespace(coverage=COVERAGE))
    for last in range(2, 13, 2):
        stream: Stream = (STREAM, STRICT, LAX)[(last - 1) // 4]
        declarations = Declarations((Declared.now(stream, "1"),))
        sent = defaultdict[str, list[tuple[str, bytes]]](list)
        chunk = make_chunk([row for row in EVENTS if last - 2 < row["arrival"] <= last])
        for block in Dispatch(declarations, COVERAGE, LABELS, plan)([chunk]):
            for row in block.to_pylist():
                sent[row["shard"]].append((row["kind"], row["payload"]))
        for label in LABELS:
            rules = [("rule", json.dumps(vars(change)).encode()) for change in CHANGES] if last == 2 else []
            pages: Any = stores[label]
            shard = Shard(declarations, {stream.name: stream}, LABELS, Path("declared-blocks"), label, pages)
            found = shard.judge([pd.DataFrame([*sent[label], *rules], columns=["kind", "payload"])])
            for kind, payload in zip(found["kind"], found["payload"], strict=True):
                answers[kind].append(payload)
    return answers


def judge_as_replay(declarations: Declarations) -> dict[str, list[bytes]]:
    plan = ReplayPlan(COMPILED, CHANGES, [], {STREAM.name: STREAM}, erases=True, declarations=declarations)
    dispatch = tasks._SpanDispatch(BlockBuilder(declarations, LABELS), COVERAGE, (5, 12), erases=True)
    rows = [row for block in dispatch([make_chunk(EVENTS)]) for row in block.to_pylist()]
    rows.sort(key=lambda row: (row["shard"], row["span"]))
    answers = defaultdict[str, list[bytes]](list)
    blocks = pa.RecordBatch.from_pylist(rows, schema=tasks._ARROW_BLOCKS)
    for batch in tasks._ShardJudge(LAX, LABELS, plan)([blocks]):
        for row in batch.to_pylist():
            answers[row["kind"]].append(row["payload"])
    return answers


def count_rows(payloads: Iterable[bytes]) -> Counter[str]:
    rows = (row for payload in payloads for row in unpack_table(payload).to_pylist())
    return Counter(json.dumps(row, sort_keys=True, default=str) for row in rows)


def test_c10_2_a_replay_by_the_logged_declarations_has_every_row_of_the_restarted_stream() -> None:
    lived = judge_as_stream()
    log = [row for payload in lived[LOG] for row in json.loads(payload) if row["action"] == "declared"]
    assert [row["arrival"] for row in log] == [None, 4, 8]
    logged = Declarations.from_rows(LAX, [(row["arrival"], row["message"]) for row in log])
    again = judge_as_replay(logged)
    assert sum(count_rows(lived[ALERTS]).values()) > 1_000
    assert count_rows(again[ALERTS]) == count_rows(lived[ALERTS])
    assert sum(count_rows(lived[LATE]).values()) > 40
    assert count_rows(again[LATE]) == count_rows(lived[LATE])
    # By today's declaration alone it has not.
    assert count_rows(judge_as_replay(Declarations.of(LAX))[ALERTS]) != count_rows(lived[ALERTS])
