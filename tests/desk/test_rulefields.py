"""The fields of the form: what they read of a document, and that nothing but what they change becomes different."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lookback.config import load_streams
from lookback.core.errors import SetupError
from lookback.desk.rule import fields as rulefields
from lookback.desk.rule.checking import check_text, find_nearest_place
from lookback.desk.rule.fields import MeasureField, WindowField
from lookback.desk.rule.text import RuleText

CONF = Path(__file__).parents[2] / "conf"
RULES = sorted((CONF / "rules").glob("*.yml"))
STREAMS = load_streams(CONF)
OF_EACH_KIND = (
    "large-payment",
    "customer-day-spend",
    "burst-against-usual",
    "city-price-totals",
    "card-testing",
    "failed-logins",
)


@pytest.mark.parametrize("file", RULES, ids=lambda file: file.stem)
def test_what_the_fields_read_and_write_back_leaves_the_file_as_it_is(file: Path):
    """Round trip: file -> form -> file."""
    text = before = RuleText.read(file)
    for name in ("rule_id", "description", "where", "when", "message", "suppress", "score", "runbook", "severity"):
        text = rulefields.put_value(name, text, rulefields.read_value(text.document, name).value)
    text = rulefields.put_group_by(text, rulefields.read_group_by(text.document) or ())
    text = rulefields.put_entities(text, rulefields.read_entities(text.document) or ())
    for name in ("tags", "references"):
        text = rulefields.put_words(name, text, rulefields.read_words(text.document, name).value)
    window = rulefields.read_window(text.document)
    assert window.is_whole
    if window.kind != "sequence":
        text = rulefields.put_window(text, window.parts)
    for measure in rulefields.read_measures(text.document):
        assert measure.is_whole
        text = rulefields.put_measure(text, measure)
    for parameter in rulefields.read_parameters(text.document):
        text = rulefields.put_parameter(text, parameter.name, parameter.value)
    for name, default in (("early", False), ("reset_on_alert", False), ("warm_start", True)):
        text = rulefields.put_flag(name, text, text.document.get(name, default), default)
    assert text.text == before.text


@pytest.mark.parametrize("file", [file for file in RULES if file.stem in OF_EACH_KIND], ids=lambda file: file.stem)
def test_the_check_is_that_of_the_command(file: Path):
    checked = check_text(RuleText.read(file), STREAMS)
    assert checked.is_fine
    assert checked.words.startswith(f"{file.stem} can be published")


def test_a_problem_has_its_line_and_its_field():
    text = RuleText.read(CONF / "rules/spend-against-usual.yml").put(["measures", "usual", "measure"], "sum(nothing)")
    (problem,) = [each for each in check_text(text, STREAMS).problems if each.place.startswith("measures")]
    assert text.text.splitlines()[problem.line - 1].startswith("  usual:")
    assert find_nearest_place(problem.place, ["measures", "measures.usual", "when"]) == "measures.usual"
    assert find_nearest_place("tests[0].events[1]", ["measures", "tests"]) == "tests"
    assert find_nearest_place("tests[0]", ["measures"]) == ""


@pytest.mark.parametrize(
    ("written", "window"),
    [
        ("window: 24 hours", WindowField("lookback", {"lookback": "24 hours"})),
        ("window: {lookback: 1 day, delay: 2 days, resolution: 1 hour}", WindowField("lookback", {"lookback": "1 day", "delay": "2 days", "resolution": "1 hour"})),
        ("window: {sliding: 1 hour, slide: 5 minutes}", WindowField("sliding", {"sliding": "1 hour", "slide": "5 minutes"})),
        ("window: {session: 5 minutes}", WindowField("session", {"session": "5 minutes"})),
        ("severity: low", WindowField("event")),
        ("measures: {n: count(*)}", WindowField("lookback")),
        ("window: 7", WindowField("lookback", {"lookback": "7"}, is_whole=False)),
        ("window: {session: 1 hour, tumbling: 1 hour}", WindowField("tumbling", {"tumbling": "1 hour"}, is_whole=False)),
        ("window: {session: 1 hour, more: 1}", WindowField("session", {"session": "1 hour"}, is_whole=False)),
        ("sequence: {within: 1 hour}", WindowField("sequence")),
        ("sequence: {within: 1 hour}\nwindow: 1 hour", WindowField("sequence", {}, is_whole=False)),
    ],
)  # fmt: skip
def test_windows_of_every_kind(written: str, window: WindowField):
    assert rulefields.read_window(RuleText(f"rule_id: a\n{written}\n").document) == window


def test_parts_of_a_window_come_and_go():
    text = RuleText("window: 24 hours  # a day\n")
    text = rulefields.put_window(text, {"lookback": "1 hour"})
    assert text.text == "window: 1 hour  # a day\n"
    text = rulefields.put_window(text, {"lookback": "1 hour", "delay": "1 day"})
    assert text.text == "window: {lookback: 1 hour, delay: 1 day}  # a day\n"
    text = rulefields.put_window(text, {"lookback": "2 hours", "delay": ""})
    assert text.text == "window: {lookback: 2 hours}  # a day\n"


@pytest.mark.parametrize("kind", rulefields.KINDS)
@pytest.mark.parametrize("file", [file for file in RULES if file.stem in OF_EACH_KIND], ids=lambda file: file.stem)
def test_another_kind_keeps_what_is_common(file: Path, kind: str):
    before = RuleText.read(file)
    text = rulefields.choose_kind(before, kind)
    assert rulefields.read_window(text.document).kind == kind
    for key in ("rule_id", "description", "stream", "group_by", "tests", "message"):
        assert text.get(key) == before.get(key)
    # What is left to mend is not about keys of another kind.
    assert not [
        each
        for each in check_text(text, STREAMS).problems
        if "leave it out" in each.message and each.place in text.document
    ]


def test_measures_of_every_form():
    document = {
        "measures": {
            "n": "count(*)", "own": {"measure": "sum(a)", "window": "1 day"},
            "late": {"measure": "sum(a)", "window": {"lookback": "1 day", "delay": "1 hour"}},
            "fine": {"measure": "sum(a)", "window": {"lookback": "1 day", "resolution": "1 hour"}}, "odd": 3,
        }
    }  # fmt: skip
    read = rulefields.read_measures(document)
    assert read == [
        MeasureField("n", "count(*)"), MeasureField("own", "sum(a)", "1 day"), MeasureField("late", "sum(a)", "1 day", "1 hour"),
        MeasureField("fine", "sum(a)", is_whole=False), MeasureField("odd", "", is_whole=False),
    ]  # fmt: skip
    text = RuleText.of({"rule_id": "a", **document})
    text = rulefields.put_measure(text, replace(read[0], window="1 day"))
    text = rulefields.put_measure(text, replace(read[1], window=""))
    text = rulefields.put_measure(text, replace(read[2], aggregate="max(a)"))
    assert text.get("measures", "n") == {"measure": "count(*)", "window": "1 day"}
    assert text.get("measures", "own") == "sum(a)"
    assert text.get("measures", "late") == {"measure": "max(a)", "window": {"lookback": "1 day", "delay": "1 hour"}}


def test_a_measure_is_begun_from_an_aggregate_and_a_field_of_its_type():
    stream = STREAMS["transactions"]
    assert "amount" in rulefields.list_argument_fields("sum({})", stream)
    assert "event_time" not in rulefields.list_argument_fields("sum({})", stream)
    assert "event_time" in rulefields.list_argument_fields("max({})", stream)
    assert rulefields.list_argument_fields("count(*)", stream) == []
    text = rulefields.begin_measure(RuleText("rule_id: a\n"), "sum({})", "amount")
    text = rulefields.begin_measure(text, "sum({})", "amount")
    text = rulefields.begin_measure(text, "count(distinct {})", "odd name")
    text = rulefields.begin_measure(text, "count(*)")
    assert text.get("measures") == {
        "sum_amount": "sum(amount)", "sum_amount_2": "sum(amount)", "count_odd_name": "count(distinct `odd name`)", "count": "count(*)",
    }  # fmt: skip


def test_parameters_are_read_as_yaml_reads_them():
    text = RuleText("rule_id: a\n")
    for written, value in (("3", 3), ("2.5", 2.5), ("24 hours", "24 hours"), ("true", True), ("", "")):
        text = rulefields.put_parameter(text, "limit", written)
        assert text.get("parameters") == {"limit": value}
    with pytest.raises(SetupError, match="more digits than a JSON number can hold"):
        rulefields.put_parameter(text, "limit", "0.12345678901234567890")
    assert rulefields.begin_parameter(text).get("parameters") == {"limit": "", "limit_2": 1}
    with pytest.raises(SetupError, match="a name may have letters"):
        rulefields.rename(text, ["parameters", "limit"], "1x")


def test_c12_5_the_form_keeps_the_expressions_of_group_by() -> None:
    text = RuleText.read(next(file for file in RULES if file.stem == "network-tries-accounts"))
    (expression,) = text.document["group_by"]
    assert rulefields.read_group_by(text.document) == expression
    assert rulefields.put_group_by(text, ["network", "user_id"]).document["group_by"] == [expression, "user_id"]
    assert rulefields.put_group_by(text, ["user_id"]).document["group_by"] == ["user_id"]
    for wrong in ([{}], [{"a": "b", "c": "d"}], [{"a": 1}], [3], "ip"):
        assert rulefields.read_group_by({"group_by": wrong}) is None
