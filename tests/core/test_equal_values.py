"""Values that SQL takes for equal are one value: zeros and NaN in keys and extremes, however batches are cut."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

import lookback
from lookback.core.streams.declaration import Stream

STREAM = Stream.from_dict(
    {
        "stream": "tx",
        "event_id": "id",
        "event_time": "at",
        "fields": {"id": "string", "at": "timestamp", "d": "double", "f": "float", "t": "string"},
    }
)
NAN = float("nan")


def measured(rows: list[dict[str, Any]], measures: dict[str, str], group_by: list[str]) -> list[tuple[Any, ...]]:
    harness = lookback.Harness(STREAM)
    harness.rule(
        {
            "rule_id": "r1", "stream": "tx", "group_by": group_by, "window": "1 minute", "measures": measures,
            "when": "true", "message": "{m}",
        }
    )  # fmt: skip
    harness.events(rows)
    # As text, in which -0.0 is not 0.0 and NaN is like itself.
    return [(a.alert_id, a.key, str(a.measures), a.message) for a in harness.alerts]


@pytest.mark.parametrize("measure", ["min(d)", "max(d)", "min(-d)", "max(-d)", "max(d * -1)", "min(f)", "max(f)"])
def test_extremes_of_both_zeros_are_zero_in_any_order(measure: str) -> None:
    # -- 0.0 -- -0.0 -- 0.0 -->   all three are equal, so that either could be the extreme
    for values in permutations([0.0, -0.0, 0.0]):
        rows = [{"id": str(at), "at": at, "d": d, "f": d} for at, d in enumerate(values)]
        last = measured(rows, {"m": measure}, [])[-1]
        assert last[2:] == ("{'m': 0.0}", "0.0"), values


@pytest.mark.parametrize("field", ["d", "f"])
@pytest.mark.parametrize(("one", "other"), [(0.0, -0.0), (NAN, -NAN)])
def test_equal_keys_have_one_text_and_one_alert_id(field: str, one: float, other: float) -> None:
    first = measured([{"id": "a", "at": 1, field: one}, {"id": "b", "at": 2, field: other}], {"m": "count(*)"}, [field])
    second = measured(
        [{"id": "a", "at": 1, field: other}, {"id": "b", "at": 2, field: one}], {"m": "count(*)"}, [field]
    )
    assert first == second
    assert first[-1][2] == "{'m': 2}"
    assert first[0][1] == {field: "0.0" if one == 0 else "nan"}


def test_texts_that_are_alike_up_to_a_nul_are_different_keys_different_values_and_different_members() -> None:
    harness = lookback.Harness(STREAM)
    harness.lists({"known": ["a", "a\0c"]})
    measures = {"n": "count(*)", "kinds": "count(distinct t)", "listed": "count(*) filter (where in_list(t, 'known'))"}
    rule = {"stream": "tx", "window": "1 minute", "measures": measures, "when": "true"}
    harness.rule({**rule, "rule_id": "of-text", "group_by": ["t"]})
    harness.rule({**rule, "rule_id": "of-all", "group_by": []})
    texts = ["a\0b", "a\0c", "a", "a\0", "a\0b"]
    harness.events([{"id": str(at), "at": at, "t": text, "arrival": 1} for at, text in enumerate(texts)])
    found = {(alert.rule_id, alert.event_id): tuple(alert.measures.values()) for alert in harness.alerts}
    assert [found["of-text", str(at)] for at in range(5)] == [(1, 1, 0), (1, 1, 1), (1, 1, 1), (1, 1, 0), (2, 1, 0)]
    assert [found["of-all", str(at)] for at in range(5)] == [(1, 1, 0), (2, 2, 1), (3, 3, 2), (4, 4, 2), (5, 4, 2)]
