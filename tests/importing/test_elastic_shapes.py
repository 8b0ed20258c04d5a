"""Kinds of Elastic's rules: sequences, thresholds, new terms, indicators, suppression and filters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic_imported import find, import_rules, judge, make_rule

EXACT_SPAN = {"from": "now-9m", "interval": "5m"}


def alerts(folder: Path, rule: dict[str, Any], *events: dict[str, Any], is_scheduled: bool = False) -> list[str]:
    """Returns the ids of the events that the rule alerts on."""
    return judge(import_rules(folder, rule, is_scheduled=is_scheduled).documents, events)["a-rule"]


def events(*given: tuple[Any, ...]) -> list[dict[str, Any]]:
    """Makes events of tuples: second, process.name, user.name, host.id."""
    names = ("at", "process.name", "user.name", "host.id")
    return [{name: value for name, value in zip(names, each, strict=False) if value is not None} for each in given]


def sequence(text: str, **more: Any) -> dict[str, Any]:
    return make_rule(text, **{**EXACT_SPAN, **more})


AB = '[any where process.name == "a"] [any where process.name == "b"]'


def test_a_sequence_takes_each_event_once(tmp_path: Path) -> None:
    rule = sequence(f"sequence by user.name with maxspan=10s {AB}")
    given = [(0, "a", "u"), (1, "a", "u"), (2, "b", "u"), (3, "b", "u"), (4, "a", "v"), (14, "b", "v")]
    assert find(tmp_path, rule, *events(*given)) == [2, 5]
    # Both ends of the span count, and no more.
    assert find(tmp_path, rule, *events((0, "a", "u"), (10.000001, "b", "u"))) == []


def test_events_without_the_key_take_no_part_unless_the_field_is_optional(tmp_path: Path) -> None:
    given = events((0, "a"), (1, "b"), (2, "a", "u"), (3, "b", "u"))
    assert find(tmp_path, sequence(f"sequence by user.name with maxspan=4m {AB}"), *given) == [3]
    assert find(tmp_path, sequence(f"sequence by ?user.name with maxspan=4m {AB}"), *given) == [1, 3]


def test_a_step_may_have_a_key_of_its_own(tmp_path: Path) -> None:
    text = """sequence with maxspan=1m by host.id
      [any where process.name == "a"] by user.name
      [any where process.name == "b"] by process.args"""
    made = import_rules(tmp_path, sequence(text))
    # An array is no key of a step.
    assert made.fidelities[0].startswith("refused: ")
    rule = sequence(text.replace("process.args", "source.ip"))
    given = [
        {"process.name": "a", "user.name": "x", "host.id": "h"},
        {"process.name": "b", "source.ip": "x", "host.id": "h"},
    ]
    assert find(tmp_path, rule, *given) == [1]


def test_runs_and_until(tmp_path: Path) -> None:
    text = '[any where process.name == "a"] with runs=3 until [any where process.name == "stop"]'
    rule = sequence(f"sequence by user.name with maxspan=1m {text}")
    names = ["a", "a", "stop", "a", "a", "a", "a"]
    assert find(tmp_path, rule, *events(*[(at, name, "u") for at, name in enumerate(names)])) == [5, 6]


def test_an_event_that_must_not_come(tmp_path: Path) -> None:
    rule = sequence(
        'sequence by user.name with maxspan=10s [any where process.name == "a"] ![any where process.name == "b"]'
    )
    made = import_rules(tmp_path, rule)
    assert made.fidelities[0].startswith("approximated: reuse: ")
    given = events((0, "a", "u"), (5, "b", "u"), (20, "a", "u"), (100, "x", "w"))
    assert judge(made.documents, given)["a-rule"] == ["e2"]


@pytest.mark.parametrize(
    ("span", "more", "fidelity"),
    [
        (" with maxspan=4m", {}, "exact"),
        (
            " with maxspan=241s",
            {},
            "approximated: schedule: maxspan is longer than what each run of 5m surely sees, 9m, more",
        ),
        ("", {}, "approximated: schedule: it has no maxspan, and a run sees 9m, more alerts"),
        (
            " with maxspan=1s",
            {"interval": "10m"},
            "approximated: schedule: of each 10m only the last 9m are looked at, more",
        ),
    ],
)
def test_a_sequence_is_exact_if_a_run_surely_sees_it(tmp_path: Path, span: str, more: Any, fidelity: str) -> None:
    made = import_rules(tmp_path, sequence(f"sequence by user.name{span} {AB}", **more))
    assert made.fidelities[0].startswith(fidelity)
    assert made.document["sequence"]["take"] == "once"


THRESHOLD = make_rule("process.name: a", "kuery", type="threshold", **{"from": "now-10m"})


def test_a_threshold_counts_back_from_each_event_and_uses_them_up(tmp_path: Path) -> None:
    rule = {**THRESHOLD, "threshold": {"field": ["user.name"], "value": 3}}
    assert (
        import_rules(tmp_path, rule).fidelities[0].startswith("approximated: schedule: it counts the last 10m every 5m")
    )
    given = [(at, "a", "u") for at in range(7)]
    assert alerts(tmp_path, rule, *events(*given, (8, "a"), (9, "a"), (10, "a"))) == ["e2", "e5"]


def test_a_threshold_of_the_schedule_has_its_windows(tmp_path: Path) -> None:
    rule = {
        **THRESHOLD,
        "threshold": {"field": "user.name", "value": 2, "cardinality": [{"field": "host.id", "value": 2}]},
    }
    made = import_rules(tmp_path, rule, is_scheduled=True)
    assert made.fidelities[0].startswith("approximated: phase: it counts the last 10m every 5m, other moments: ")
    assert made.document["window"] == {"sliding": "10 minutes", "slide": "5 minutes"}
    assert made.document["when"] == "events_ >= 2 and values_ >= 2"
    assert "reset_on_alert" not in made.document


def test_a_threshold_of_different_values_alone(tmp_path: Path) -> None:
    rule = {**THRESHOLD, "threshold": {"field": [], "value": 1, "cardinality": [{"field": "host.id", "value": 2}]}}
    assert alerts(tmp_path, rule, *events((0, "a", "u", "h"), (1, "a", "u", "h"), (2, "a", "v", "i"))) == ["e2"]


@pytest.mark.parametrize("is_exported", [True, False])
def test_new_terms_alert_on_the_first_event_of_the_history(tmp_path: Path, is_exported: bool) -> None:
    fields = ["user.name", "host.id"]
    named = {"field": "new_terms_fields", "value": fields}
    named["history_window_start"] = [{"field": "history_window_start", "value": "now-1d"}]
    own = {"new_terms_fields": fields, "history_window_start": "now-1d"} if is_exported else {"new_terms": named}
    rule = make_rule("process.name: a", "kuery", **{**own, "type": "new_terms"})
    day = 86_400
    given = [(0, "a", "u", "h"), (1, "a", "u", "h"), (2, "a", "u", "i"), (3, "a", "u"), (4, "b", "v", "h"),
             (day + 1, "a", "u", "h"), (2 * day + 1.000001, "a", "u", "h")]  # fmt: skip
    assert find(tmp_path, rule, *events(*given)) == [0, 2, 6]


def test_suppression_is_for_the_key(tmp_path: Path) -> None:
    suppression = {"group_by": ["user.name"], "duration": {"value": 1, "unit": "m"}}
    rule = make_rule("process.name: a", "kuery", alert_suppression=suppression)
    given = events((0, "a", "u"), (60, "a", "u"), (60.000001, "a", "u"), (70, "a"), (71, "a"))
    assert find(tmp_path, rule, *given) == [0, 2, 3]
    suppression["missing_fields_strategy"] = "doNotSuppress"
    assert find(tmp_path, rule, *given) == [0, 2, 3, 4]
    del suppression["duration"]
    assert import_rules(tmp_path, rule).fidelities[0].startswith("approximated: schedule: each run alerts once")
    rule = {**THRESHOLD, "threshold": {"field": [], "value": 2}, "alert_suppression": suppression}
    assert "suppression: of alerts of several events" in import_rules(tmp_path, rule).fidelities[0]


def test_filters_must_hold_too(tmp_path: Path) -> None:
    filters = [
        {
            "meta": {"negate": True},
            "query": {"wildcard": {"user.name": {"value": "C:\\\\x\\*?*", "case_insensitive": True}}},
        },
        {"meta": {"negate": True, "disabled": True}, "query": {"match_all": {}}},
        {
            "meta": {},
            "query": {"bool": {"should": [{"term": {"process.pid": 1}}, {"range": {"process.pid": {"gte": 5}}}]}},
        },
        {
            "query": {
                "bool": {"must": [{"exists": {"field": "host.id"}}], "must_not": {"terms": {"host.id": ["x", "y"]}}}
            }
        },
        {"exists": {"field": "user.name"}, "meta": {}},
    ]
    rule = make_rule("process.name: a", "kuery", filters=filters)
    good = {"process.name": "a", "user.name": "c:\\x*", "process.pid": 1, "host.id": "z"}
    bad = [{"user.name": "c:\\X*1"}, {"process.pid": 2}, {"host.id": "x"}, {"host.id": None}, {"user.name": None}]
    assert find(tmp_path, rule, good, {**good, "process.pid": 7}, *[{**good, **each} for each in bad]) == [0, 1]
    for wrong in ({"script": {}}, {"term": {}}, {"bool": {"boost": 1}}, {"range": {"process.pid": {"from": 1}}}):
        (fidelity,) = import_rules(tmp_path, {**rule, "filters": [{"query": wrong}]}).fidelities
        assert fidelity.startswith("refused: filter: ")
    assert (
        import_rules(tmp_path, {**sequence(f"sequence with maxspan=1s {AB}"), "filters": filters})
        .fidelities[0]
        .startswith("refused: filter: it stands beside a sequence")
    )


def test_indicators_are_lists(tmp_path: Path) -> None:
    entries = [[("file.hash.md5", "threat.indicator.md5")], [("source.ip", "threat.indicator.ip")]]
    mapping = [{"entries": [{"field": a, "type": "mapping", "value": b} for a, b in each]} for each in entries]
    rule = make_rule("file.hash.md5: * or source.ip: *", "kuery", type="threat_match", threat_mapping=mapping)
    made = import_rules(tmp_path, rule)
    assert made.fidelities[0].startswith("approximated: list: threat-indicator-md5, as the list says")
    assert sorted(each.name for each in (tmp_path / "lists").iterdir()) == [
        "threat-indicator-ip.csv",
        "threat-indicator-md5.csv",
    ]
    assert "in_list(file_hash_md5, 'threat-indicator-md5')" in made.document["where"]
    two = [{"entries": [*mapping[0]["entries"], *mapping[1]["entries"]]}]
    assert import_rules(tmp_path, {**rule, "threat_mapping": two}).fidelities[0].startswith("refused: indicators: ")


@pytest.mark.parametrize(
    ("more", "refusal"),
    [
        ({"type": "esql"}, "refused: esql: "),
        ({"type": "machine_learning"}, "refused: machine-learning: "),
        ({"type": "saved_query"}, "refused: unsupported: a rule of the type 'saved_query'"),
        ({"from": "now/d"}, "refused: unsupported: the time 'now/d'"),
        ({"to": "now-1h"}, "refused: unsupported: it looks at events up to now-1h"),
        ({"type": "threshold"}, "refused: elastic: KeyError: 'threshold'"),
        ({"filters": 3}, "refused: elastic: TypeError: "),
    ],
)
def test_kinds_that_cannot_be_said_are_refused(tmp_path: Path, more: dict[str, Any], refusal: str) -> None:
    (fidelity,) = import_rules(tmp_path, make_rule("process.name: a", "kuery", **more)).fidelities
    assert fidelity.startswith(refusal)


def test_an_array_is_one_key(tmp_path: Path) -> None:
    rule = {**THRESHOLD, "threshold": {"field": ["process.args"], "value": 2}}
    made = import_rules(tmp_path, rule, is_scheduled=True)
    assert "array-key: process.args, fewer alerts: " in made.fidelities[0]
    assert made.document["group_by"] == [{"process_args_joined": "array_join(process_args, ', ')"}]


def test_exceptions_and_pipes_are_left_out(tmp_path: Path) -> None:
    rule = make_rule("process.name: a", "kuery", exceptions_list=[{"list_id": "x"}])
    assert (
        import_rules(tmp_path, rule)
        .fidelities[0]
        .startswith("approximated: exceptions: it has lists of exceptions, more")
    )
    rule = sequence(f"sequence by user.name with maxspan=1s {AB} | tail 1")
    assert import_rules(tmp_path, rule).fidelities[0].startswith("approximated: pipe: | tail 1, more alerts: ")
