"""Correlations of Sigma, against verdicts that were worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from imported import HEAD, import_rules, judge

BASE = {
    "failed": {"EventID": 1},
    "succeeded": {"EventID": 2},
    "changed": {"EventID": [3, 9]},
}


def base_rule(name: str) -> dict[str, Any]:
    """Makes one of the rules that correlations name."""
    return {**HEAD, "title": name, "name": name, "detection": {"s": BASE[name], "condition": "s"}}


def correlate(folder: Path, kind: str, *names: str, **correlation: Any) -> Any:
    """Imports a correlation with the rules that it names."""
    document = {
        "title": "Together",
        "id": "0e95725d-7320-415d-80f7-004da920fc27",
        "level": "high",
        "correlation": {"type": kind, "rules": list(names), "timespan": "10s", **correlation},
    }
    return import_rules(folder, *map(base_rule, names), document)


def events(*given: tuple[Any, ...]) -> list[dict[str, Any]]:
    """Makes events of tuples: second, EventID, User, Host."""
    names = ("at", "EventID", "User", "Host")
    return [{name: value for name, value in zip(names, each, strict=False) if value is not None} for each in given]


def alerts(made: Any, *given: tuple[Any, ...]) -> list[str]:
    """Returns the ids of the events that alert."""
    return judge(made.documents, events(*given))["together"]


def test_event_count_counts_back_from_each_event(tmp_path: Path) -> None:
    made = correlate(tmp_path, "event_count", "failed", **{"group-by": ["User"], "condition": {"gte": 3}})
    assert made.fidelities == ["part of 'Together', which alone alerts", "exact"]
    given = [(0, 1, "a"), (4, 1, "a"), (5, 1, "b"), (6, 2, "a"), (10, 1, "a"), (10.000001, 1, "a"), (13, 1, "A")]
    assert alerts(made, *given) == ["e4", "e5"]
    # Both ends of the time count: e0 is out of the window of e5, which has e1, e4 and itself.
    assert alerts(made, (0, 1, "a"), (4, 1, "a"), (10.000001, 1, "a")) == []
    assert alerts(made, (0, 1, "a"), (4, 1, "a"), (10, 1, "a")) == ["e2"]


def test_events_without_the_key_count_nowhere(tmp_path: Path) -> None:
    made = correlate(tmp_path, "event_count", "failed", **{"group-by": ["User"], "condition": {"gte": 2}})
    assert alerts(made, (0, 1), (1, 1), (2, 1, "a"), (3, 1, "a")) == ["e3"]


def test_event_count_without_a_key_counts_all(tmp_path: Path) -> None:
    made = correlate(tmp_path, "event_count", "failed", "changed", condition={"gt": 1})
    assert alerts(made, (0, 1, "a"), (1, 2), (2, 3), (20, 9), (21, 1)) == ["e2", "e4"]


@pytest.mark.parametrize(
    ("operator", "expected"), [("lt", ["e0"]), ("lte", ["e0", "e1"]), ("eq", ["e1"]), ("neq", ["e0", "e2"])]
)
def test_a_condition_that_may_cease_is_noted(tmp_path: Path, operator: str, expected: list[str]) -> None:
    made = correlate(tmp_path, "event_count", "failed", condition={operator: 2})
    assert made.fidelities[1].startswith("approximated: every-event: ")
    assert alerts(made, (0, 1), (1, 1), (2, 1)) == expected


def test_value_count_counts_different_values(tmp_path: Path) -> None:
    condition = {"gte": 2, "field": "Host"}
    made = correlate(tmp_path, "value_count", "failed", **{"group-by": ["User"], "condition": condition})
    given = [
        (0, 1, "a", "x"),
        (1, 1, "a", "x"),
        (2, 1, "a"),
        (3, 1, "a", "y"),
        (10, 1, "a", "y"),
        (11, 1, "a", "y"),
        (12, 1, "a", "y"),
    ]
    # The x of e1 is 11 s before e6.
    assert alerts(made, *given) == ["e3", "e4", "e5"]


# Texts that are no numbers count nowhere.
SUMMED = [(0, 1, "a", "10"), (1, 1, "a", "20"), (2, 1, "a", "0.5"), (3, 1, "a", "ten"), (20, 1, "a", "9")]


@pytest.mark.parametrize(
    ("kind", "condition", "expected"),
    [
        ("value_sum", {"gte": 30.5}, ["e2", "e3"]), ("value_avg", {"gt": 10}, ["e1", "e2", "e3"]),
        ("value_median", {"gt": 14}, ["e1"]), ("value_percentile", {"gt": 15, "percentile": 90}, ["e1", "e2", "e3"]),
    ],
)  # fmt: skip
def test_sums_and_the_like(tmp_path: Path, kind: str, condition: dict[str, Any], expected: list[str]) -> None:
    made = correlate(tmp_path, kind, "failed", condition={**condition, "field": "Host"})
    assert made.fidelities[1] == "exact"
    assert alerts(made, *SUMMED) == expected


def test_temporal_needs_all_in_any_order(tmp_path: Path) -> None:
    made = correlate(tmp_path, "temporal", "failed", "succeeded", **{"group-by": ["User"]})
    assert made.fidelities[2] == "exact"
    assert alerts(made, (0, 2, "a"), (1, 1, "b"), (10, 1, "a"), (11, 1, "a"), (20, 2, "a"), (21.5, 2, "a")) == [
        "e2",
        "e4",
    ]


def test_temporal_with_a_number(tmp_path: Path) -> None:
    made = correlate(tmp_path, "temporal", "failed", "succeeded", "changed", condition={"gte": 2})
    assert made.fidelities[3] == "exact"
    assert alerts(made, (0, 1), (1, 1), (2, 9), (13, 2)) == ["e2"]


def test_temporal_ordered_ends_with_the_last(tmp_path: Path) -> None:
    made = correlate(tmp_path, "temporal_ordered", "failed", "changed", "succeeded", **{"group-by": ["User"]})
    assert made.fidelities[3] == "exact"
    given = [(0, 1, "a"), (1, 2, "a"), (2, 3, "a"), (3, 2, "b"), (10, 2, "a"), (10.5, 2, "a")]
    assert alerts(made, *given) == ["e4"]


def test_aliases_are_the_keys_of_steps(tmp_path: Path) -> None:
    aliases = {"who": {"failed": "User", "succeeded": "Host"}}
    made = correlate(tmp_path, "temporal_ordered", "failed", "succeeded", **{"group-by": ["who"], "aliases": aliases})
    assert made.fidelities[2] == "exact"
    assert alerts(made, (0, 1, "a", "x"), (1, 2, "q", "b"), (2, 2, "q", "a"), (3, 2, "a")) == ["e2"]


def test_aliases_without_an_order_are_the_key_of_the_first_that_matches(tmp_path: Path) -> None:
    aliases = {"User": {"succeeded": "Host"}}
    made = correlate(tmp_path, "temporal", "failed", "succeeded", **{"group-by": ["User"], "aliases": aliases})
    assert made.fidelities[2].startswith("approximated: alias: ")
    assert alerts(made, (0, 1, "a", "x"), (1, 2, "a", "x"), (2, 2, "x", "a"), (3, 2)) == ["e2"]


@pytest.mark.parametrize("kind", ["temporal", "temporal_ordered"])
def test_one_rule_without_another(tmp_path: Path, kind: str) -> None:
    made = correlate(
        tmp_path, kind, "failed", "succeeded", **{"group-by": ["User"], "condition": "failed and not succeeded"}
    )
    assert made.fidelities[2] == "exact"
    given = [(0, 1, "a"), (1, 1, "b"), (2, 2, "b"), (3, 1, "c"), (13, 2, "c"), (60, 9, "a")]
    assert alerts(made, *given) == ["e0"]
    assert alerts(made, (3, 1, "c"), (13.000001, 2, "c"), (60, 9, "a")) == ["e0"]


def test_an_event_that_is_both_is_not_without(tmp_path: Path) -> None:
    other = {**base_rule("succeeded"), "detection": {"s": {"EventID": [1, 2]}, "condition": "s"}}
    document = {
        "title": "Together",
        "correlation": {"type": "temporal", "timespan": "10s", "condition": "failed and not succeeded"},
    }
    made = import_rules(tmp_path, base_rule("failed"), other, document)
    assert alerts(made, (0, 1), (60, 9)) == []


def test_extended_conditions(tmp_path: Path) -> None:
    condition = "failed and (succeeded or changed)"
    made = correlate(tmp_path, "temporal", "failed", "succeeded", "changed", condition=condition)
    assert made.fidelities[3] == "exact"
    assert alerts(made, (0, 2), (1, 3), (20, 1), (21, 9)) == ["e3"]
    made = correlate(tmp_path, "temporal_ordered", "failed", "succeeded", condition="succeeded and failed")
    assert alerts(made, (0, 1), (1, 2), (20, 2), (21, 1)) == ["e1"]


def test_rules_that_generate_alert_too(tmp_path: Path) -> None:
    made = correlate(tmp_path, "event_count", "failed", condition={"gte": 2}, generate=True)
    assert made.fidelities == ["exact", "exact"]
    assert judge(made.documents, events((0, 1), (1, 1))) == {"failed": ["e0", "e1"], "together": ["e1"]}


def test_a_key_that_is_an_alias_of_one_field_everywhere_is_that_field(tmp_path: Path) -> None:
    aliases = {"who": {"failed": "User", "succeeded": "User"}}
    made = correlate(tmp_path, "temporal", "failed", "succeeded", **{"group-by": ["who"], "aliases": aliases})
    assert made.documents["together"]["group_by"] == ["User"]


def test_correlations_of_correlations_and_others_are_refused(tmp_path: Path) -> None:
    inner = {
        "title": "In",
        "name": "inner",
        "correlation": {"type": "event_count", "rules": ["failed"], "timespan": "1m", "condition": {"gte": 2}},
    }
    outer = {
        "title": "Out",
        "correlation": {"type": "event_count", "rules": ["inner"], "timespan": "1m", "condition": {"gte": 2}},
    }
    lost = {
        "title": "Lost",
        "correlation": {"type": "event_count", "rules": ["nowhere"], "timespan": "1m", "condition": {"gte": 2}},
    }
    both = {
        "title": "Two",
        "correlation": {"type": "temporal", "timespan": "1m", "condition": "failed and succeeded and not changed"},
    }
    made = import_rules(tmp_path, *map(base_rule, BASE), inner, outer, lost, both)
    results = [
        line.fidelity.split(": ")[:2] for line in made.report.lines if line.origin.title in ("Out", "Lost", "Two")
    ]
    assert results == [["refused", "chain"], ["refused", "missing-rule"], ["refused", "absence"]]


def test_the_message_names_the_key(tmp_path: Path) -> None:
    made = correlate(tmp_path, "event_count", "failed", **{"group-by": ["User"], "condition": {"gte": 2}})
    document = made.documents["together"]
    assert (document["message"], document["severity"]) == ("Together: User {User}", "high")
    assert document["source"] == {"format": "sigma", "id": "0e95725d-7320-415d-80f7-004da920fc27", "fidelity": "exact"}
