"""Rules whose condition holds no more often for a smaller window: only events that a larger one leaves are measured."""

from __future__ import annotations

from typing import Any

import pytest
from cases import STREAMS
from test_equals_oracle import assert_engine_equals_oracle, regression, run_engine

from lookback.core.expressions.compiling import Expression, find_rising
from lookback.core.judging import lookbacks
from lookback.core.rules.compiling import compile_rule
from lookback.core.streams.declaration import Stream


def rule(window: int, measure: str, when: str, where: str = "", **more: Any) -> dict[str, Any]:
    document = {
        "group_by": ["k"],
        "window": f"{window} microseconds",
        "measures": {"m0": measure},
        "when": when,
        **more,
    }
    return document | ({"where": where} if where else {})


def events(*rows: tuple[int, int, str]) -> list[dict[str, Any]]:
    """One event a commit. rows: time, n and a of each."""
    return [{"id": f"e{at}", "at": t, "arrival": at, "n": n, "a": a} for at, (t, n, a) in enumerate(rows, 1)]


MANY = events(*((at, at % 3, f"{at % 4}.00") for at in range(1, 25)))
MIXED = events((1, 1, "-100.00"), *((at, 1, "10.00") for at in range(10, 20)))
WIDE = Stream.from_dict(STREAMS["plain"].to_dict() | {"limits": {"expression_characters": 10_000}})
WITH_ERRORS = rule(25, "count(*)", "m0 >= 8 and m1 > 1")
WITH_ERRORS["measures"] = {"m0": "count(*)", "m1": "sum(n * 4611686018427387904)"}
CASES = {
    "smaller windows of the same measure": regression(
        "", [rule(25, "count(*)", "m0 >= 15"), rule(8, "count(*)", "m0 >= 9"), rule(3, "count(*)", "m0 > 1")], MANY
    ),
    "a sum over negative values may grow in a smaller window": regression(
        "", [rule(25, "sum(a)", "m0 >= 10"), rule(5, "sum(a)", "m0 >= 10")], MIXED, cuts=(6,)
    ),
    "a feature that began later lacks rows that a narrower one has": regression(
        "",
        [rule(12, "count(*)", "m0 >= 3", "n >= 0")],
        MANY,
        more=(
            {"after": 12, "change": "insert", "rule_id": "r0", "version": 1, "status": "active",
             "document": {"rule_id": "r0", "stream": "tx", **rule(25, "count(*)", "m0 >= 10")}},
        ),
        cuts=(12,),
    ),
    "a lowered ceiling holds for no larger window": regression(
        "",
        [rule(25, "count(*)", "m0 >= 5"), rule(1, "count(*)", "m0 >= 2"), rule(25, "count(*)", "m0 >= 6", "n >= 1")],
        MANY,
    ),
    "different values are at most as many as events": regression(
        "", [rule(25, "count(*)", "m0 >= 20"), rule(8, "count(distinct n)", "m0 >= 3"), rule(3, "max(n)", "m0 >= 2")], MANY
    ),
    "an error of a sum counts whatever the other measures are": regression(
        "", [WITH_ERRORS | {"window": f"{window} microseconds"} for window in (25, 12, 1)], MANY
    ),
    "rows of earlier batches that only the narrower windows' feature has": regression(
        "",
        [rule(25, "count(*)", "m0 >= 4", "n >= 1"), rule(12, "count(*)", "m0 >= 9", "true")],
        events((1, 1, "0.00"), *((at, at // 10, "0.00") for at in range(2, 18))),
        cuts=(9,),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("share", [0.5, 2])
def test_rising_conditions_judge_as_if_every_event_were_measured(
    name: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # At 2 the events that may alert are measured by themselves, however many they are.
    monkeypatch.setattr(lookbacks, "_MAX_CANDIDATES", share)
    assert_engine_equals_oracle(CASES[name])


def test_a_smaller_window_is_measured_for_the_events_that_may_alert(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []
    judge = lookbacks._judge_events

    def count_events(rule_run: Any, measuring: Any, counted: Any, counted_as: Any) -> Any:
        measured.append(len(counted))
        return judge(rule_run, measuring, counted, counted_as)

    monkeypatch.setattr(lookbacks, "_judge_events", count_events)
    rules = [
        rule(25, "count(*)", "m0 >= 20"),
        rule(8, "count(*)", "m0 >= 20"),
        rule(25, "count(*)", "m0 >= 16", "n >= 1"),
    ]
    run_engine(regression("", rules, MANY))
    # 24 events; 5 have 20 or more in the larger window, and none of the smaller ones. 9 have 16 of any n, of which 6 count.
    assert measured == [24, 5, 6]


def test_rows_of_a_batch_are_indexed_for_one_feature_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """An index is as long as the batch, and there may be a thousand rules."""
    indexed: list[int] = []
    find = lookbacks._find_candidates

    def count_indexed(rule_run: Any, *others: Any) -> Any:
        indexed.append(sum("_sorted" in vars(each) for each in rule_run.measuring._rows.values()))
        return find(rule_run, *others)

    monkeypatch.setattr(lookbacks, "_find_candidates", count_indexed)
    wheres = ["", "n >= 1", "n >= 2", "k <> 'y'"]
    run_engine(
        regression("", [rule(size, "sum(n)", "m0 >= 1", where) for where in wheres for size in (25, 8, 2)], MANY)
    )
    assert len(indexed) == 12
    assert max(indexed) == 1


def test_rules_are_judged_in_an_order_whatever_digits_their_texts_have() -> None:
    wheres = ["n >= 10", "n >= 9", f"k <> '3²3' and k <> '{'9' * 5_000}'", "k <> '٣'", "k <> 'x'", ""]
    rules = [compile_rule({"rule_id": "r", "stream": "tx", **rule(3, "count(*)", "m0 >= 2", w)}, WIDE) for w in wheres]
    ordered = [each.where.sql if each.where else "" for each in sorted(rules, key=lambda each: each.sharing_key)]
    assert ordered[0] == ""
    assert ordered.index("n >= 9") < ordered.index("n >= 10")


@pytest.mark.parametrize(
    ("condition", "names"),
    [
        ("m0 >= 3", {"m0": 3}),
        ("3 < m0", {"m0": 3}),
        ("m0 > 2.5 and (m1 >= 1 or `order` > 9)", {"m0": 2, "m1": 1, "order": 9}),
        ("m0 >= 7 or m0 > 4", {"m0": 4}),
        # A number of another kind, or with more digits than a double has.
        ("m0 >= 1e3 and m1 > 12345678901234567", {"m0": 0, "m1": 0}),
        ("m0 < 3", None),
        ("m0 >= n", None),
        ("not m0 >= 3", None),
        ("m0 >= 3 or m1 is null", None),
        ("m0 * 2 >= 3", None),
        ("m0 = 3", None),
        (" and ".join(["m0 >= 3"] * 2_000), {"m0": 3}),
        ("m0 >= (3", None),
    ],
)
def test_conditions_that_hold_no_more_often_for_lower_values(condition: str, names: dict[str, int] | None) -> None:
    assert find_rising(condition) == names


@pytest.mark.parametrize(("limit", "is_evaluated"), [("24", True), ("25", False), ("24.5", True), ("25.5", False)])
def test_a_condition_that_the_most_in_any_larger_window_is_far_below_is_not_evaluated(
    limit: str, is_evaluated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The larger window has 24 events at most; a number is compared rounded down, and one less."""
    evaluate, texts = Expression.evaluate, list[str]()

    def note(self: Expression, *arguments: Any) -> Any:
        texts.append(self.sql)
        return evaluate(self, *arguments)

    monkeypatch.setattr(Expression, "evaluate", note)
    run_engine(regression("", [rule(25, "count(*)", "m0 >= 1"), rule(8, "count(*)", f"m0 >= {limit}")], MANY))
    assert (f"m0 >= {limit}" in texts) == is_evaluated
