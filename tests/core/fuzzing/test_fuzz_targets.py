"""A fuzz target that cannot fail finds nothing: each one raises where something that it reaches raises."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import fuzz_targets
import pyarrow as pa
import pytest
import yaml
from fuzz_targets import block, change, document, events, expression, other_texts, page, state, yaml_text
from test_fuzz_pages import SAVED

from lookback import config
from lookback.core.engine import evaluation
from lookback.core.expressions.compiling import Expression
from lookback.core.rules import compilecache, rulebook
from lookback.core.streams import blocks
from lookback.core.streams.blocks import COMMIT, pack_events, pack_failures, pack_late
from lookback.core.values.pages import encode_page

COUNT = {"rule_id": "r", "stream": "tx", "group_by": ["k"], "measures": {"m": "count(*)"}, "when": "m > 0"}
STEPS = [{"name": "one", "where": "n = 1"}, {"name": "two", "where": "n = 2"}]
RULES: dict[str, dict[str, Any]] = {
    "lookback": {**COUNT, "window": "1 hour"},
    "tumbling": {**COUNT, "window": {"tumbling": "1 hour"}},
    "sliding": {**COUNT, "window": {"sliding": "1 hour", "slide": "30 minutes"}},
    "session": {**COUNT, "window": {"session": "1 hour"}},
    "sequence": {"rule_id": "r", "stream": "tx", "sequence": {"within": "1 hour", "steps": STEPS}},
}
ROW = ("insert", 1, "r", 1, "active", json.dumps(RULES["lookback"]))
EVENT = pa.RecordBatch.from_pydict(
    {"id": ["a"], "at": pa.array([1], pa.timestamp("us", tz="UTC")), "position": [0], COMMIT: [1]}
)
EVENTS = pack_events(EVENT, {"marks": [], "own": [], "future": []})


class BoomError(Exception):
    """Nothing that anybody expects."""


def boom(*_: Any, **__: Any) -> Any:
    raise BoomError("a defect")


@pytest.mark.parametrize("kind", RULES)
def test_a_judge_that_raises_fails_the_target_of_documents(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    document(RULES[kind])
    if kind in evaluation.JUDGES:
        monkeypatch.setitem(evaluation.JUDGES, kind, boom)
    else:
        monkeypatch.setattr(evaluation.TiledJudge, "judge", boom)
    with pytest.raises(AssertionError, match="BoomError: a defect"):
        document(RULES[kind])


# What each target is given that is right, and what it reaches with it.
REACHED: list[tuple[Callable[[Any], None], Any, Any, str]] = [
    (document, RULES["lookback"], evaluation.Segment, "keep_rows"),
    (document, RULES["tumbling"], evaluation.TiledJudge, "finish"),
    (document, RULES["lookback"], compilecache, "compile_rule"),
    (document, RULES["lookback"], rulebook.RuleBook, "_put_in_force"),
    (document, RULES["lookback"], fuzz_targets.Stream, "from_dict"),
    (change, ROW, compilecache, "compile_rule"),
    (change, ROW, rulebook, "read_document"),
    (change, ROW, rulebook.RuleBook, "_put_in_force"),
    (change, ROW, rulebook.RuleBook, "load"),
    (change, ("insert", 1, "*", None, "clear_state", None), rulebook.RuleBook, "_command"),
    (expression, "n + 1 > 2", Expression, "evaluate"),
    (expression, "n + 1 > 2", fuzz_targets, "compile_expression"),
    (other_texts, "sum(n)", fuzz_targets, "compile_aggregate"),
    (other_texts, "n > 1", fuzz_targets, "compile_part"),
    (other_texts, "int", fuzz_targets, "parse_type"),
    (other_texts, "1 hour", fuzz_targets, "parse_duration"),
    (other_texts, "{}", fuzz_targets, "read_document"),
    (events, [{"id": "a", "at": 1}], fuzz_targets, "read_events"),
    (events, [{"id": "a", "at": 1}], blocks.Events, "in_order_of_arrival"),
    (page, encode_page([]), fuzz_targets, "decode_page"),
    (page, encode_page([]), fuzz_targets.Run, "decode"),
    (page, encode_page([]), fuzz_targets.KeyedTable, "get"),
    (state, SAVED, rulebook.RuleBook, "load"),
    (state, SAVED, fuzz_targets.ShardState, "load"),
    (block, EVENTS, blocks, "from_arrow"),
    (block, EVENTS, blocks.Events, "in_order_of_arrival"),
    (block, pack_late([]), blocks, "unpack_table"),
    (block, pack_failures([]), fuzz_targets, "unpack_failures"),
    (yaml_text, "a: 1", yaml, "compose_all"),
    (yaml_text, "a: 1", config, "_note_places"),
]


@pytest.mark.parametrize(
    ("target", "given", "owner", "name"), REACHED, ids=lambda value: getattr(value, "__name__", "")
)
def test_what_a_target_reaches_and_raises_fails_it(
    target: Callable[[Any], None], given: Any, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compilecache._open_compiler.cache_clear()
    target(given)
    compilecache._open_compiler.cache_clear()
    monkeypatch.setattr(owner, name, boom)
    try:
        with pytest.raises((BoomError, AssertionError)):
            target(given)
    finally:
        compilecache._open_compiler.cache_clear()
