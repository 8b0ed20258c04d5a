"""A rule as text: a change touches its place alone; comments, order and all that a form has no field for stay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lookback.core.errors import SetupError
from lookback.desk.rule.text import RuleText

RULES = sorted((Path(__file__).parents[2] / "conf/rules").glob("*.yml"))
COMMENTED = """\
# the head
rule_id: large  # its name
description: >-
  Much money
  in a day
# whose
group_by:   # the key
  # first of all
  - customer_id
  - terminal_id

window: {lookback: 24 hours, delay: 1 day}  # a day
measures:
  # how much
  total: sum(amount)   # in all

  n: count(*)
parameters: {limit: 1000}
when: "total > :limit"

# the end
"""


def put(text: str, place: list[str], value: Any) -> str:
    return RuleText(text).put(place, value).text


@pytest.mark.parametrize("file", RULES, ids=lambda file: file.stem)
def test_a_file_that_is_read_and_not_changed_is_the_same_file(file: Path):
    text = RuleText.read(file)
    for key, value in text.document.items():
        assert text.put([key], value) is text
    assert text.text.encode() == file.read_bytes()
    assert text.document == yaml.safe_load(file.read_text())


@pytest.mark.parametrize("file", RULES[::4], ids=lambda file: file.stem)
def test_a_change_and_its_opposite_give_the_file_back(file: Path):
    text = RuleText.read(file)
    changed = text.put(["severity"], "low").put(["score"], 7).put(["parameters", "more"], 1)
    assert changed.document == {
        **text.document,
        "severity": "low",
        "score": 7,
        "parameters": {**text.document.get("parameters", {}), "more": 1},
    }
    back = changed.remove(["parameters", "more"]).remove(["score"])
    back = (
        back.put(["severity"], text.document["severity"]) if "severity" in text.document else back.remove(["severity"])
    )
    assert back.document == text.document
    assert [line for line in back.text.splitlines() if "#" in line] == [
        line for line in text.text.splitlines() if "#" in line
    ]


def test_a_value_changes_alone_and_comments_stay():
    assert put(COMMENTED, ["rule_id"], "small") == COMMENTED.replace("rule_id: large ", "rule_id: small ")
    assert put(COMMENTED, ["measures", "total"], "max(amount)") == COMMENTED.replace("sum(amount)", "max(amount)")
    assert put(COMMENTED, ["window", "delay"], "2 days") == COMMENTED.replace("1 day}", "2 days}")
    assert put(COMMENTED, ["parameters", "limit"], 5) == COMMENTED.replace("1000", "5")
    assert put(COMMENTED, ["when"], 'n > 3 or x = "y"') == COMMENTED.replace(
        '"total > :limit"', '"n > 3 or x = \\"y\\""'
    )


def test_a_text_that_was_folded_is_folded_again():
    long = "word " * 40 + "end"
    changed = RuleText(COMMENTED).put(["description"], long)
    assert changed.get("description") == long
    assert max(map(len, changed.text.splitlines())) <= 120
    assert "description: >-\n  word word" in changed.text


def test_a_list_of_lines_becomes_one_line_and_its_comments_stay():
    changed = put(COMMENTED, ["group_by"], ["customer_id"])
    assert "group_by: [customer_id]   # the key\n  # first of all\n\nwindow" in changed


def test_a_new_key_comes_in_its_order_behind_what_is_there():
    changed = (
        RuleText(COMMENTED).put(["where"], "amount > 0").put(["message"], "{n} of them").put(["stream"], "payments")
    )
    keys = list(changed.document)
    assert keys == [
        "rule_id",
        "description",
        "stream",
        "group_by",
        "where",
        "window",
        "measures",
        "parameters",
        "when",
        "message",
    ]
    assert '  - terminal_id\nwhere: "amount > 0"\n\nwindow' in changed.text
    assert changed.text.endswith('when: "total > :limit"\nmessage: "{n} of them"\n\n# the end\n')


def test_a_key_goes_with_its_line_and_the_last_of_a_mapping_with_the_mapping():
    text = RuleText(COMMENTED).remove(["measures", "n"]).remove(["parameters", "limit"])
    assert text.text == COMMENTED.replace("  n: count(*)\n", "").replace("parameters: {limit: 1000}\n", "")
    assert RuleText(COMMENTED).remove(["window", "delay"]).text == COMMENTED.replace(", delay: 1 day", "")
    assert RuleText(COMMENTED).remove(["nothing"]).text == COMMENTED


def test_a_name_changes_in_its_place():
    assert RuleText(COMMENTED).rename(["measures", "total"], "sum").text == COMMENTED.replace(
        "  total: sum", "  sum: sum"
    )
    with pytest.raises(SetupError, match=r"measures\.n already exists"):
        RuleText(COMMENTED).rename(["measures", "total"], "n")


@pytest.mark.parametrize("ending", ["\n", "\r\n", ""])
def test_line_breaks_stay_as_they_are(ending: str):
    text = f"rule_id: a{ending or chr(10)}severity: low{ending}"
    assert put(text, ["severity"], "high") == text.replace("low", "high")
    assert yaml.safe_load(put(text, ["message"], "x")) == {"rule_id": "a", "severity": "low", "message": "x"}


@pytest.mark.parametrize(
    ("text", "place", "value", "expected"),
    [
        ("{rule_id: a}", ["severity"], "low", "{rule_id: a, severity: low}"),
        ("rule_id: a\nwhere:\n", ["where"], "x", 'rule_id: a\nwhere: "x"\n'),
        ("rule_id: a\nwhere: # none\n", ["where"], "x", 'rule_id: a\nwhere: "x" # none\n'),
        ("rule_id: 'a'\n", ["rule_id"], "b", "rule_id: 'b'\n"),
        ("rule_id: a\nmessage: |\n  one\n  two\n", ["message"], "1\n2", "rule_id: a\nmessage: |-\n  1\n  2\n"),
        ("rule_id: a\n", ["measures", "n"], "count(*)", "rule_id: a\nmeasures:\n  n: count(*)\n"),
        ("rule_id: a\nmeasures: {}\n", ["measures", "n"], "count(*)", "rule_id: a\nmeasures:\n  n: count(*)\n"),
    ],
)  # fmt: skip
def test_the_forms_of_yaml(text: str, place: list[str], value: Any, expected: str):
    assert RuleText(put(text, place, value)).get(*place) == value
    if place[0] != "measures" or "{}" not in text:
        assert put(text, place, value) == expected


def test_what_cannot_be_changed_alone_is_refused_with_its_line():
    text = 'rule_id: a\nwhere: &x "b > 1"\nwhen: *x\n'
    with pytest.raises(
        SetupError,
        match="where cannot be changed here without changing more of the text, line 2; change it in the YAML",
    ):
        RuleText(text).put(["where"], "b > 2")


def test_no_yaml_and_no_mapping_are_refused():
    for text in ("a: [", "- a", "", "a: 1\na: 2\n"):
        with pytest.raises(SetupError):
            RuleText(text)


NAMES = st.text("abc_1:#'\"-{}[]&*!|>%@` ,?ü", min_size=1, max_size=6)
TEXTS = st.one_of(
    st.text(max_size=40),
    st.text("ab \n\t:#'\"{}[]&*!|>%@`,?-\\\u0085\u2028\ufeff", max_size=30),
    st.sampled_from(["24 hours", "true", "null", "1", "2026-01-01", "sum(amount)", "~", "yes", " a", "a ", "a\n\nb"]),
)
SCALARS = st.one_of(TEXTS, st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False, allow_infinity=False))
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=6
)
DOCUMENTS = st.dictionaries(
    st.sampled_from(["rule_id", "description", "where", "window", "measures", "tests", "parameters", "when"]) | NAMES,
    VALUES,
    min_size=2,
    max_size=6,
)


@given(document=DOCUMENTS)
def test_a_document_is_written_as_a_new_file(document: dict[str, Any]):
    text = RuleText.of({"rule_id": "a", **document})
    assert text.document == {"rule_id": "a", **document}
    assert text.text.startswith("# yaml-language-server: $schema=../rule.schema.json\nrule_id:")


def write(document: dict[str, Any], style: str) -> str:
    if style == "json":
        return json.dumps(document)
    text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True, default_flow_style=style == "flow", width=60)
    return "".join(f"# note {at}\n{line}" for at, line in enumerate(text.splitlines(keepends=True)[:1])) + "".join(
        text.splitlines(keepends=True)[1:]
    )


@given(document=DOCUMENTS, style=st.sampled_from(["block", "flow", "json"]), data=st.data())
def test_a_change_means_what_it_says_or_is_refused(document: dict[str, Any], style: str, data: st.DataObject):
    """Any document in any style: a change makes the document that it has to make, and never loses a comment."""
    try:
        text = RuleText(write(document, style))
    except SetupError:
        return  # the YAML of a hostile text, such as one with a half of a pair
    assert RuleText(text.text).text == text.text
    place = [data.draw(st.sampled_from([*document, "message", "severity"]))]
    inner = document.get(place[0])
    if isinstance(inner, dict) and inner and data.draw(st.booleans()):
        place.append(data.draw(st.sampled_from([*inner, "new"])))
    value = data.draw(VALUES)
    before = [line for line in text.text.splitlines() if line.startswith("# note")]
    try:
        changed = text.put(place, value)
        removed = text.remove(place)
    except SetupError:
        return
    assert changed.get(*place) == value
    assert removed.get(*place) is None
    for made in (changed, removed):
        assert [line for line in made.text.splitlines() if line.startswith("# note")] == before
        assert {key: each for key, each in made.document.items() if key != place[0]} == {
            key: each for key, each in text.document.items() if key != place[0]
        }


@given(texts=st.lists(st.text(max_size=60), min_size=3, max_size=3))
def test_any_text_can_be_typed_into_a_field(texts: list[str]):
    """No text is refused at a plain key: the last way to write it is always right."""
    text = RuleText(COMMENTED)
    for key, value in zip(("where", "description", "message"), texts, strict=True):
        text = text.put([key], value)
        assert text.get(key) == value
    assert "# the end" in text.text
