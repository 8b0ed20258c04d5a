"""Alerts of a batch that are packed while it is judged: the same rows, of which few are objects at a time."""

from __future__ import annotations

from typing import Any
from unittest import mock

import cases as generated
import pyarrow as pa
from hypothesis import given, settings
from test_equals_oracle import DictStore, changes_after, new_state

from lookback.core.engine import batch as batch_module
from lookback.core.engine import output as output_module
from lookback.core.engine.batch import Batch
from lookback.core.engine.evaluation import Evaluator
from lookback.core.engine.output import Output
from lookback.core.streams.arrival import find_marks
from lookback.core.streams.blocks import merge_alerts, pack_alerts, unpack_table
from lookback.core.streams.eventrows import read_events

MOST = 3


def judge_all(case: dict[str, Any], *, packs: bool) -> list[Output]:
    """The output of each shard. All changes come before the first event, and each commit is a part of its own."""
    stream = generated.STREAMS[case["stream"]]
    events, _ = read_events(case["rows"], stream, 1)
    changes = [
        change for after in sorted({each["after"] for each in case["changes"]}) for change in changes_after(case, after)
    ]
    outputs = list[Output]()
    with mock.patch.object(output_module, "MAX_ROWS", MOST), mock.patch.object(batch_module, "MAX_EVENTS", 1):
        for shard in range(case["shards"]):
            state, output = new_state(stream), Output(pack=pack_alerts if packs else None)
            state.begin(DictStore())
            batch = Batch(events, marks=find_marks(events, events.commits), changes=changes)
            outputs.append(Evaluator(stream, shard, case["shards"]).process(state, batch, output))
    return outputs


def merge(outputs: list[Output]) -> pa.Table:
    return merge_alerts(block for each in outputs for block in [*each.packed, pack_alerts(each.rows)])


@settings(max_examples=25)
@given(generated.cases(updates=True))
def test_c3_1_alerts_that_are_packed_while_a_batch_is_judged_are_the_same(case: dict[str, Any]) -> None:
    whole, packed = judge_all(case, packs=False), judge_all(case, packs=True)

    assert merge(packed) == merge(whole)
    assert all(len(each.rows) < MOST for each in packed)
    sizes = [unpack_table(block).num_rows for each in packed for block in each.packed]
    assert all(0 < size <= MOST for size in sizes)
