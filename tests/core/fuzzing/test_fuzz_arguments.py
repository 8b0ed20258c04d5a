"""Whatever a caller gives to the harness or to replay is used or refused by one of our errors, with place and remedy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from fuzz_targets import harness_call, replay_call
from hypothesis import given
from hypothesis import strategies as st

import lookback
from lookback.core.errors import EventError, RuleError, StreamError

STREAM = {
    "stream": "tx",
    "event_id": "id",
    "event_time": "at",
    "fields": {"id": "string", "at": "timestamp", "n": "int", "a": "decimal(18,2)"},
}
RULE = {"rule_id": "r1", "stream": "tx", "window": "1 minute", "measures": {"m": "count(*)"}, "when": "m > 0"}
EVENTS = [{"id": "a", "at": 1}]
ROW = {"rule_id": "r1", "document": RULE, "version": 1, "status": "active"}
NAN = float("nan")


def _nest(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


DEEP = _nest(5_000)


@pytest.mark.parametrize("rule", [None, 5, "text", (), [], b"x", NAN, Path("x.yml")])
def test_a_rule_that_is_no_rule_is_refused(rule: Any) -> None:
    for call in (lambda: lookback.Harness(STREAM).rule(rule), lambda: lookback.replay([rule], EVENTS, STREAM)):
        with pytest.raises(RuleError, match=r"a rule.*, got .|a rule.*; got ."):
            call()


@pytest.mark.parametrize("version", ["x", "2", 1.5, True, NAN, pd.NA, 10**30, -1])
def test_a_version_that_is_none_is_refused(version: Any) -> None:
    with pytest.raises(RuleError, match="version"):
        lookback.Harness(STREAM).rule(RULE, version=version)


@pytest.mark.parametrize("version", [np.int64(3), np.uint8(3), 3])
def test_a_version_may_be_any_integer(version: Any) -> None:
    harness = lookback.Harness(STREAM)
    harness.rule(RULE, version=version)
    harness.events(EVENTS)
    assert harness.alerts[0].rule_version == 3
    (alert,) = lookback.replay([(ROW | {"version": version}, np.int64(0))], EVENTS, STREAM).alerts
    assert alert.rule_version == 3


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        (None, "rules must be a list of rules, got None"),
        (5, "rules must be a list of rules, got 5"),
        (RULE, "put one rule into a list"),
        ({"r1": DEEP}, "rules must be a list of rules, got a dict; put one rule into a list"),
        ("r1", "put one rule into a list"),
        ([(ROW,)], "rules[0] must be a rule, or a pair"),
        ([RULE, (ROW, 1, 2, 3)], "rules[1] must be a rule, or a pair"),
        ([(5, None)], "rules[0] must be a rule, or a pair"),
        ([(ROW | {"version": "x"}, None)], "rules[0].version must be a whole number"),
        ([(ROW | {"version": 1.5}, None)], "rules[0].version must be a whole number"),
        ([(ROW | {"version": True}, None)], "rules[0].version must be a whole number"),
        ([(ROW | {"version": NAN}, None)], "or None for the next one"),
        ([(ROW | {"status": pd.NA}, None)], "rules[0].status must be one of draft"),
        ([(ROW | {"rule_id": 5}, None)], "rules[0].rule_id must be"),
        ([(ROW | {"document": 5}, None)], "rules[0].document must be"),
        ([(ROW, "x")], "rules[0].arrival must be the number of the last commit"),
        ([(ROW, NAN)], "give None for a change before the first commit"),
        ([(ROW, 1.5)], "rules[0].arrival must be"),
        ([(ROW, True)], "rules[0].arrival must be"),
        ([(ROW, 10**30)], "rules[0].arrival must be"),
    ],
)
def test_rules_of_a_replay_that_are_none_are_refused(rules: Any, words: str) -> None:
    with pytest.raises(RuleError) as told:
        lookback.replay(rules, EVENTS, STREAM)
    assert words in str(told.value)


@pytest.mark.parametrize("stream", [None, 5, b"x", [], NAN])
def test_a_stream_that_is_none_is_refused(stream: Any) -> None:
    for call in (lambda: lookback.Harness(stream), lambda: lookback.replay([RULE], EVENTS, stream)):
        with pytest.raises(StreamError, match="a stream is"):
            call()


def test_a_type_of_many_nested_arrays_is_refused() -> None:
    fields = STREAM["fields"] | {"x": "array<" * 3_000 + "int" + ">" * 3_000}
    with pytest.raises(StreamError, match=r"more than 32 others; use fewer levels \(fields.x\)"):
        lookback.Harness(STREAM | {"fields": fields})


@pytest.mark.parametrize("text", ["decimal", "DECIMAL", "dec", "numeric", "decimal(18)", "array<decimal>"])
def test_a_decimal_of_a_declaration_names_precision_and_scale(text: str) -> None:
    with pytest.raises(StreamError, match=r"write both, such as decimal\(18,2\) for money \(fields.x\)"):
        lookback.Harness(STREAM | {"fields": STREAM["fields"] | {"x": text}})


@pytest.mark.parametrize("time", [10**30, 2**62, -(2**63), "soon", None, NAN, True, pd.NaT])
def test_a_watermark_that_is_no_time_is_refused(time: Any) -> None:
    with pytest.raises(EventError, match="watermark: got"):
        lookback.Harness(STREAM, watermark="manual").watermark(time)


@pytest.mark.parametrize("time", [2**63 - 1, -(2**63), 253_402_300_800_000_000])
@pytest.mark.parametrize("window", ["1 minute", {"session": "1 minute"}, {"tumbling": "1 minute"}])
def test_an_event_beyond_all_years_is_refused(time: int, window: Any) -> None:
    harness = lookback.Harness(STREAM)
    harness.rule(RULE | {"window": window})
    with pytest.raises(EventError, match=r"row 0: at must be timestamp, got .* beyond the years 1 to 9999; correct it"):
        harness.events([{"id": "a", "at": time}])


@pytest.mark.parametrize(
    "call",
    [
        lambda: lookback.Harness(STREAM, watermark=DEEP),  # type: ignore[arg-type]
        lambda: lookback.Harness(STREAM).watermark(DEEP),
        lambda: lookback.Harness(STREAM).rule(RULE, version=DEEP),  # type: ignore[arg-type]
        lambda: lookback.Harness(STREAM).rule(RULE, status=DEEP),  # type: ignore[arg-type]
        lambda: lookback.Harness(STREAM).events([{"id": "a", "at": DEEP}]),
        lambda: lookback.Harness(STREAM).events([{"id": "a", "at": 1, "n": DEEP}]),
        lambda: lookback.Harness(STREAM).events([{"id": "a", "at": 1, "committed_at": DEEP}]),
        *(
            lambda contents=contents: lookback.Harness(STREAM).lists(contents)  # type: ignore[misc]
            for contents in (
                DEEP, {"x": DEEP}, {"x": [{"value": DEEP}]}, {"x": [{"value": "a", "expires_at": DEEP}]},
                {"x": [{"value": "a", "kind": DEEP}]},
            )
        ),
        lambda: lookback.replay([(ROW | {"rule_id": DEEP}, 1)], EVENTS, STREAM),
        lambda: lookback.replay([(DEEP, 1)], EVENTS, STREAM),
        lambda: lookback.replay([(ROW, DEEP)], EVENTS, STREAM),
        lambda: lookback.replay([(ROW, 1, DEEP)], EVENTS, STREAM),
        lambda: lookback.replay([RULE], EVENTS, STREAM, lists=DEEP),
        lambda: lookback.replay([RULE], EVENTS, STREAM, lists=[({}, DEEP)]),
    ],
)  # fmt: skip
def test_a_value_that_is_nested_too_deep_is_refused(call: Callable[[], object]) -> None:
    with pytest.raises((EventError, RuleError, ValueError), match=r"\ba (list|tuple)\b"):
        call()


_ODD = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=3), st.just(()),
    st.sampled_from([pd.NA, pd.NaT, np.int64(2), np.float64("nan"), np.array([1]), object(), type, {1}, ..., RULE, ROW]),
)  # fmt: skip
_RULES = (
    _ODD | st.sampled_from([RULE]) | st.fixed_dictionaries({"rule_id": _ODD, "stream": st.just("tx"), "window": _ODD})
)
_ROWS = st.fixed_dictionaries(
    {"rule_id": st.just("r1") | _ODD, "document": st.just(RULE) | _ODD},
    optional={"version": st.just(1) | _ODD, "status": st.just("active") | _ODD},
)


@given(st.one_of(_RULES), st.sampled_from(["active", "paused"]) | _ODD, st.none() | _ODD, _ODD)
def test_any_call_of_the_harness_works_or_is_refused(rule: Any, status: Any, version: Any, time: Any) -> None:
    harness_call(rule, status, version, time)


@given(
    _ODD | st.lists(_RULES | st.tuples(_ROWS, st.none() | st.integers(0, 3) | _ODD) | st.tuples(_ODD), max_size=3),
    st.just(EVENTS) | _ODD,
    st.just(STREAM) | _ODD,
)
def test_any_call_of_replay_works_or_is_refused(rules: Any, events: Any, stream: Any) -> None:
    replay_call(rules, events, stream)
