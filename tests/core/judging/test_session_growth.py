"""The cost of a session: twice the events of one session in a batch take at most twice the time, memory and bytes."""

from __future__ import annotations

import json
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
from test_equals_oracle import DictStore

from growth import grows_in_proportion
from lookback.core.engine.batch import Batch
from lookback.core.engine.evaluation import Evaluator
from lookback.core.rules.changes import RuleChange
from lookback.core.rules.rulebook import RuleBook
from lookback.core.state.shard import ShardState
from lookback.core.streams.arrival import find_marks
from lookback.core.streams.declaration import Stream
from lookback.core.streams.events import Events
from lookback.core.values.columns import from_values

MAX_GROWTH = 2.2
SECOND = 1_000_000
STREAM = Stream.from_dict(
    {
        "stream": "uses", "event_id": "id", "event_time": "at", "max_out_of_orderness": "1 day",
        "fields": {"id": "bigint", "at": "timestamp", "card": "string", "n": "bigint"},
    }
)  # fmt: skip
RULE: dict[str, Any] = {
    "rule_id": "r", "stream": "uses", "group_by": ["card"], "window": {"session": "10 seconds"}, "early": True,
    "measures": {"c": "count(*)", "s": "sum(n)", "most": "max(n)", "kinds": "count(distinct n)"},
    "when": "c > 1000000 and s > 0 and most > 0 and kinds > 0",
}  # fmt: skip


def in_order(count: int) -> np.ndarray[Any, Any]:
    return np.arange(count)


def newest_first(count: int) -> np.ndarray[Any, Any]:
    return np.arange(count)[::-1]


def bridged(count: int) -> np.ndarray[Any, Any]:
    """Every second event joins the session so far with one event beyond its gap: 0, 12, 6, 24, 18, ..."""
    far = np.arange(count // 2) * 12
    return np.stack([far, far - 6], axis=1).ravel()[: 2 * (count // 2)]


def batch_of(seconds: np.ndarray[Any, Any]) -> Batch:
    """One key; the events arrive in this order, each with a commit of its own."""
    rows = len(seconds)
    values = {
        "id": np.arange(rows).tolist(), "at": (seconds * SECOND).tolist(), "card": ["x"] * rows,
        "n": (np.arange(rows) % 97).tolist(),
    }  # fmt: skip
    columns = {name: from_values(STREAM.fields[name], listed) for name, listed in values.items()}
    events = Events(columns, np.arange(1, rows + 1, dtype=np.int64), "id", "at")
    changes = [RuleChange("insert", 1, "r", 1, "active", json.dumps(RULE))]
    return Batch(events, marks=find_marks(events, events.commits), changes=changes)


def judge(batch: Batch) -> int:
    """Judges the batch with a state of its own; how many bytes that writes."""
    state, store = ShardState(RuleBook(STREAM, {"uses": STREAM})), DictStore()
    state.begin(store)
    output = Evaluator(STREAM).process(state, batch)
    assert not output.failures
    assert output.evaluated["r"] == len(batch.events)
    state.save()
    return sum(map(len, store.pages.values()))


def seconds_for(batch: Batch) -> float:
    start = time.process_time()
    judge(batch)
    return time.process_time() - start


def memory_of(batch: Batch) -> int:
    tracemalloc.start()
    judge(batch)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


@pytest.mark.long
@pytest.mark.parametrize("order", [in_order, newest_first, bridged])
def test_an_early_session_costs_what_its_events_cost(order: Any) -> None:
    small, large = batch_of(order(2_000)), batch_of(order(4_000))
    judge(small)
    grown = {
        "bytes": (judge(small), judge(large)),
        "memory": (memory_of(small), memory_of(large)),
    }
    assert {name: pair for name, pair in grown.items() if pair[1] > MAX_GROWTH * pair[0]} == {}
    assert grows_in_proportion(lambda rows: seconds_for(batch_of(order(rows))), 2_000)
    # 490 MB before results shared their rows.
    assert grown["memory"][1] < 20_000_000
