"""Parameters of a rule document: what they mean is what the document means with their values written in (contract 10.1)."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
from cases import documents
from hypothesis import given
from hypothesis import strategies as st

from core.rules.test_wrong_documents import FAILURES, LOOKBACK, SEQUENCE, SILENT, SLIDING, STREAMS, SUCCESS
from lookback.core.errors import RuleError
from lookback.core.rules.compiled import CompiledRule
from lookback.core.rules.compiling import compile_rule
from lookback.core.rules.document import read_rule
from lookback.core.rules.parameters import Parameters
from lookback.core.rules.remarks import find_remarks
from lookback.testing.rule_tests import check_rule


def compiled(document: dict[str, Any]) -> CompiledRule:
    return compile_rule(document, STREAMS[document["stream"]])


def problems_of(document: dict[str, Any]) -> list[str]:
    with pytest.raises(RuleError) as caught:
        compiled(document)
    return [str(problem) for problem in caught.value.problems]


def with_parameters(values: dict[str, Any], **changes: Any) -> dict[str, Any]:
    base = {key: value for key, value in LOOKBACK.items() if key != "tests"}
    return {**base, "parameters": values, **changes}


WRITTEN_IN = [
    # where the parameter is, its value, and the same with the value written in
    ({"when": "total > :limit"}, 1000, {"when": "total > 1000"}),
    ({"when": "total>:limit and amount<:limit"}, 0.1, {"when": "total>0.1 and amount<0.1"}),
    ({"when": "total > :limit"}, -5, {"when": "total > (-5)"}),
    ({"when": "total > -:limit"}, -5, {"when": "total > -(-5)"}),
    ({"when": "total > :limit"}, 1e-7, {"when": "total > 0.0000001"}),
    ({"when": "total > :limit"}, 10**20, {"when": "total > 100000000000000000000"}),
    ({"when": "total > 1 or :limit"}, True, {"when": "total > 1 or true"}),
    ({"where": "payment_type = :limit"}, "CSH", {"where": "payment_type = 'CSH'"}),
    ({"where": "payment_type = :limit"}, "O'Neil\\n \"", {"where": "payment_type = 'O\\'Neil\\\\n \"'"}),
    ({"where": "payment_type in (':limit', :limit)"}, "24 hours", {"where": "payment_type in (':limit', '24 hours')"}),
    ({"where": "case when:limit=amount then true end"}, 3, {"where": "case when 3=amount then true end"}),
    ({"where": "event_time - :limit > '2026-01-01'"}, "24 hours", {"where": "event_time - interval '1' day > '2026-01-01'"}),
    ({"where": "event_time > cast('2026-01-01' as timestamp) + :limit"}, "5 minutes", {"where": "event_time > cast('2026-01-01' as timestamp) + interval '5' minutes"}),
    ({"measures": {"total": "sum(amount) filter (where amount > :limit)"}, "when": "total > 1"}, 7,
     {"measures": {"total": "sum(amount) filter (where amount > 7)"}, "when": "total > 1"}),
    ({"measures": {"total": {"measure": "sum(amount * :limit)", "window": "1 day"}}, "when": "total > 1"}, 2,
     {"measures": {"total": {"measure": "sum(amount * 2)", "window": "1 day"}}, "when": "total > 1"}),
    ({"measures": {"total": {"measure": "sum(amount)", "window": ":limit"}}, "when": "total > 1"}, "1 day",
     {"measures": {"total": {"measure": "sum(amount)", "window": "1 day"}}, "when": "total > 1"}),
    ({"window": ":limit"}, "3 hours", {"window": "3 hours"}),
    ({"window": " :limit "}, "3 hours", {"window": "3 hours"}),
    ({"window": {"lookback": ":limit", "delay": ":limit"}}, "3 hours", {"window": {"lookback": "3 hours", "delay": "3 hours"}}),
    ({"suppress": ":limit"}, "3 hours", {"suppress": "3 hours"}),
    ({"allowed_lateness": ":limit"}, "3 minutes", {"allowed_lateness": "3 minutes"}),
    ({"message": "{total} is above :limit, not {:limit}"}, 1000, {"message": "{total} is above 1000, not 1000"}),
    ({"message": "at 12:limit x:limit :limits"}, 1, {"message": "at 12:limit x:limit :limits"}),
]  # fmt: skip


@pytest.mark.parametrize(("marked", "value", "plain"), WRITTEN_IN, ids=[str(case[0]) for case in WRITTEN_IN])
def test_c10_1_a_parameter_means_its_value_written_in(marked: Any, value: Any, plain: Any) -> None:
    with_values = compiled(with_parameters({"limit": value}, **marked))
    written = compiled(with_parameters({}, **plain))
    assert as_compiled(with_values) == as_compiled(written)
    assert with_values.spec.document["parameters"] == {"limit": value}


def as_compiled(rule: CompiledRule) -> list[Any]:
    parts = [rule.where, rule.when, *(part for m in rule.measures for part in (m.feature.filter, m.feature.argument))]
    found: list[Any] = [None if part is None else (part.sql, part.type) for part in parts]
    found += [rule.spec.message, rule.window, rule.spec.suppress, rule.allowed_lateness, rule.needs, rule.store]
    found += [(measure.name, measure.feature.feature_id, measure.window) for measure in rule.measures]
    if rule.sequence is not None:
        found += [[(step.step, step.condition.sql) for step in rule.sequence.conditions], rule.spec.sequence]
    return found


def test_c10_1_the_parts_of_a_sequence_take_parameters() -> None:
    values = {"bad": "FAIL", "good": "SUCCESS", "least": 3, "most": 9, "span": "10 minutes", "wait": "5 minutes"}
    steps = [
        {**FAILURES, "where": "outcome = :bad", "at_least": ":least", "at_most": ":most"},
        {**SUCCESS, "where": "outcome = :good"},
        {**SILENT, "absent": "outcome = :good", "within": ":wait"},
    ]
    sequence = {"within": ":span", "until": "outcome = :good", "steps": steps}
    document = {key: value for key, value in SEQUENCE.items() if key != "tests"} | {"sequence": sequence}
    written = copy.deepcopy(document)
    written["sequence"] = {
        "within": "10 minutes", "until": "outcome = 'SUCCESS'",
        "steps": [
            {**FAILURES, "where": "outcome = 'FAIL'", "at_least": 3, "at_most": 9},
            {**SUCCESS, "where": "outcome = 'SUCCESS'"},
            {**SILENT, "absent": "outcome = 'SUCCESS'", "within": "5 minutes"},
        ],
    }  # fmt: skip
    assert as_compiled(compiled({**document, "parameters": values})) == as_compiled(compiled(written))


_NUMBER = re.compile(r"(?<![\w.'])\d+(?![\w.'])")


def take_out(part: Any, values: dict[str, Any], key: str = "") -> Any:
    """The part with a parameter in place of each duration, each number of a condition and each least number of events."""
    if isinstance(part, dict):
        return {name: take_out(value, values, name) for name, value in part.items()}
    if isinstance(part, list):
        return part if key == "group_by" else [take_out(value, values, key) for value in part]

    def name(value: object) -> str:
        values[f"p{len(values)}"] = value
        return f":p{len(values) - 1}"

    if key in ("at_least", "at_most"):
        return name(part)
    if isinstance(part, str) and re.fullmatch(r"\d+ \w+", part):
        return name(part)
    if isinstance(part, str) and key not in ("rule_id", "stream", "late", "expiry", "name", "message"):
        return _NUMBER.sub(lambda match: name(int(match[0])), part)
    return part


@given(st.data())
def test_c10_1_any_rule_with_parameters_is_the_rule_with_their_values(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["lookback", "tumbling", "sliding", "session", "sequence"]))
    document = data.draw(documents("r", kind))
    values: dict[str, Any] = {}
    marked = take_out(document, values)
    assert ":p0" in str(marked)
    (rule, problems), (written, expected) = read_rule({**marked, "parameters": values}), read_rule(document)
    assert (problems, expected) == ([], [])
    assert rule == written


def test_c10_1_a_test_gives_parameters_values_of_its_own() -> None:
    test = {
        "name": "below the old limit",
        "events": [{"payment_id": 1, "event_time": 0, "payment_type": "CSH", "beneficiary_id": "a", "amount": 500}],
        "alerts": [{"event_id": 1}],
    }
    document = with_parameters({"limit": 1000}, when="total > :limit")
    with pytest.raises(RuleError, match="alerts expected: 1, found: 0"):
        check_rule({**document, "tests": [test]}, STREAMS)
    check_rule({**document, "tests": [{**test, "parameters": {"limit": 400}}]}, STREAMS)
    with pytest.raises(RuleError, match="with these parameters"):
        check_rule({**document, "tests": [{**test, "parameters": {"limit": "many"}}]}, STREAMS)


WRONG = [
    ({"parameters": [1]}, "parameters must be a mapping, such as {limit: 1000}, got [1] (parameters)"),
    ({"parameters": {"limit": [1]}}, "must be a number, a text, true or false, got [1]"),
    ({"parameters": {"limit": None}}, "must be a number, a text, true or false, got None"),
    ({"parameters": {"limit": float("nan")}}, "must be a finite number, got nan"),
    ({"parameters": {"limit": float("-inf")}}, "must be a finite number, got -inf"),
    ({"parameters": {"limit": 10**38}}, "has more than 38 digits"),
    ({"parameters": {"limit": 1e-300}}, "has more than 38 digits"),
    ({"parameters": {"a b": 1}}, "'a b' is not a name"),
    ({"parameters": {"limit": 1}, "when": "total > :limt"}, "unknown parameter :limt; did you mean 'limit'? (when)"),
    ({"when": "total > :limit"}, "unknown parameter :limit; add it under `parameters`"),
    ({"window": ":span"}, "unknown parameter :span"),
    ({"parameters": {"span": 3}, "window": ":span"}, "3 is not a duration"),
    ({"parameters": {"span": "3 parsecs"}, "suppress": ":span"}, "unknown unit"),
    ({"parameters": {"limit": "x"}, "when": "total > :limit"}, "(when)"),
    ({"parameters": {"Limit": 1}, "when": "total > :limit"}, "unknown parameter :limit; did you mean 'Limit'?"),
    ({"parameters": {"limit": 1}, "tests": [{"events": [], "parameters": {"limt": 2}}]}, "unknown parameter; did you mean 'limit'?"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[each[1] for each in WRONG])
def test_c10_1_a_wrong_parameter_is_refused_with_its_place(changes: dict[str, Any], message: str) -> None:
    found = problems_of({**LOOKBACK, **changes})
    assert [problem for problem in found if message in problem], found
    assert len(found) == 1, found


def test_a_step_without_its_parameter_is_refused() -> None:
    steps = [{**FAILURES, "at_least": ":least"}, {**SUCCESS, "where": "outcome = :good"}]
    found = problems_of({**SEQUENCE, "sequence": {"within": "1 hour", "steps": steps}})
    assert [each.partition(";")[0] for each in found] == ["unknown parameter :least", "unknown parameter :good"]


def test_a_parameter_that_nothing_takes_is_remarked_on() -> None:
    rule = compiled(with_parameters({"limit": 1, "limits": 2, "span": "1 day"}, when="total > :limits", window=":span"))
    places = [remark.place for remark in find_remarks(rule)]
    assert [place for place in places if place.startswith("parameters")] == ["parameters.limit"]


def test_a_sliding_window_takes_parameters() -> None:
    values = {"size": "1 hour", "step": "5 minutes", "shift": "1 minute"}
    window = {"sliding": ":size", "slide": ":step", "offset": ":shift"}
    written = {"sliding": "1 hour", "slide": "5 minutes", "offset": "1 minute"}
    plain = {key: value for key, value in SLIDING.items() if key != "tests"}
    rule = compiled({**plain, "window": window, "parameters": values})
    assert rule.window == compiled({**plain, "window": written}).window


CHANGES = [
    ({"limit": "1200"}, {"limit": 1200}, None),
    ({"limit": "0.30"}, {"limit": 0.3}, None),
    ({"limit": "1e3"}, {"limit": 1000.0}, None),
    ({"limit": 7}, {"limit": 7}, None),
    ({"limit": "-7"}, {"limit": -7}, None),
    ({"word": "1200"}, {"word": "1200"}, None),
    ({"flag": "false"}, {"flag": False}, None),
    ({"limit": "0.1234567890123456789"}, None, "has more digits than a JSON number can hold"),
    ({"limit": "nan"}, None, "must be a number, such as 1000, got 'nan'"),
    ({"limit": "many"}, None, "must be a number, such as 1000, got 'many'"),
    ({"limit": True}, None, "must be a number, such as 1000, got True"),
    ({"flag": "yes"}, None, "must be true or false, such as true, got 'yes'"),
    ({"word": 3}, None, "must be a text, such as CSH, got 3"),
    ({"limt": 3}, None, "unknown parameter; did you mean 'limit'?"),
]


@pytest.mark.parametrize(("changes", "values", "message"), CHANGES, ids=[str(each[0]) for each in CHANGES])
def test_a_change_keeps_the_kind_of_a_value(changes: Any, values: Any, message: str | None) -> None:
    before = {"limit": 1000, "word": "CSH", "flag": True}
    changed, problems = Parameters(before).change(changes)
    if message is None:
        assert (changed, problems) == ({**before, **values}, [])
        assert all(type(changed[name]) is type(value) for name, value in values.items())
    else:
        assert [each.message for each in problems if message in each.message], problems
        assert changed == before
