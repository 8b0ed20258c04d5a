"""The JSON Schema of rule documents: as published, it takes what the reader takes and refuses what is wrong in structure."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from core.rules.test_wrong_documents import (
    ABSENCE,
    DOCUMENTS,
    EVENT,
    FAILURES,
    GOOD,
    KEYS,
    LOOKBACK,
    MEASURES,
    SEQUENCE,
    SESSION,
    SILENT,
    SLIDING,
    STEPS,
    STREAMS,
    SUCCESS,
    TESTS,
    TUMBLING,
    TYPES,
    VALUES,
    WINDOWS,
    Wrong,
)
from lookback.core.rules.compiling import compile_rule
from lookback.core.rules.document import COMMON_KEYS, KEYS_OF_KIND, read_rule
from lookback.core.rules.schema import build_rule_schema, format_rule_schema
from lookback.core.values.durations import MICROSECONDS

CONF = Path(__file__).parents[3] / "conf"
RULES = sorted((CONF / "rules").glob("*.yml"))
SCHEMA = Draft202012Validator(build_rule_schema())

_ALL = {
    "description": "Everything at once",
    "tags": ["attack.t1110.003", "Typology.Structuring", "a"],
    "references": ["https://attack.mitre.org/techniques/T1110/", "HTTP://example.org?a=b#c"],
    "runbook": "https://example.org/runbooks/1",
    "source": {
        "format": "sigma",
        "id": "5d0c7e4a",
        "author": "A. Analyst",
        "license": "DRL-1.1",
        "url": "https://example.org/rules/1",
        "fidelity": "exact",
    },
    "parameters": {"limit": 1.5, "span": "1 hour", "only": True},
    "severity": "low",
    "score": 12,
    "queue": False,
    "where": "true",
    "effective_from": "2026-01-01T00:00:00Z",
    "effective_until": "2026-12-31 23:59:59.5+01:00",
    "allowed_lateness": "0 seconds",
    "suppress": "1 hour",
    "warm_start": False,
    "tests": [
        {"name": "nothing", "events": [{"tags": ["a", None]}], "alerts": [{"event_id": 1, "measures": {"n": 1.5}}]},
        {"events": [], "parameters": {}},
    ],
}
_ENTITY = {"lookback": "beneficiary_id", "sequence": "user_id"}
# Of each kind one with all its keys.
FULL: dict[str, dict[str, Any]] = {
    "event": {**EVENT, **_ALL, "when": "amount > 100", "late": "record"},
    "lookback": {
        **LOOKBACK, **_ALL, "window": {"lookback": "1 hour", "delay": "0 minutes"}, "late": "revise", "reset_on_alert": False,
        "measures": {"n": "count(*)", "usual": {"measure": "avg(amount)", "window": {"lookback": "30 days", "delay": "1 day", "resolution": "1 hour"}}},
        "when": "n > 3 and amount > usual", "message": "{n} {usual} {amount}",
    },
    "tumbling": {**TUMBLING, **_ALL, "early": True},
    "sliding": {**SLIDING, **_ALL, "early": False, "window": {"sliding": "1 hour", "slide": "5 minutes", "offset": "1 minute"}},
    "session": {**SESSION, **_ALL, "early": True},
    "sequence": {
        **SEQUENCE, **_ALL, "late": "record", "reset_on_alert": True,
        "sequence": {
            "within": "10 minutes", "until": "outcome = 'SUCCESS'", "expiry": "fixed",
            "steps": [{**FAILURES, "at_most": 9}, SUCCESS, SILENT],
        },
    },
}  # fmt: skip
FULL = {kind: {**document, "entities": [_ENTITY.get(kind, "customer_id")]} for kind, document in FULL.items()}
ACCEPTED = [
    *GOOD,
    *FULL.values(),
    {**{key: value for key, value in FULL["session"].items() if key != "entities"}, "entity": "customer_id"},
    {**SLIDING, "when": "total > 1", "window": {"sliding": "90 seconds", "slide": "90 seconds"}},
    {key: value for key, value in TUMBLING.items() if key not in ("when", "message", "group_by")},
    {**ABSENCE, "sequence": {"within": "1 week", "steps": [FAILURES, {"name": "silent", "absent": "true"}]}},
    {**LOOKBACK, "entities": ["beneficiary_id", "customer_id", "amount"]},
    {**EVENT, "group_by": [], "message": "", "entity": "customer_id"},
    {**LOOKBACK, "effective_from": 0, "effective_until": 1_800_000_000_000_000},
    {**LOOKBACK, "effective_from": "2026-01-31", "severity": "critical", "message": ""},
    *({**LOOKBACK, "window": f"1 {unit}"} for unit in MICROSECONDS),
    *({**LOOKBACK, "window": f" 0024  {unit}s "} for unit in MICROSECONDS),
]
# Wrong in what a schema cannot see: values against each other, or against the calendar, expressions, the stream.
BEYOND = {
    "an id with a line's end", "a tag twice", "an entity twice", "entities that are not in group_by", "an entity that is no field", "an entity that is an array", "an entity that is not in group_by", "an entity misspelt", "lateness above the stream's", "until before from", "a thirteenth month",
    "a time beyond all years", "a window beyond all years", "a slide above the size", "a slide too small",
    "a resolution above the window", "a resolution above a measure's window", "min with a resolution",
    "max with a resolution", "distinct with a resolution",
    "a measure in an event rule", "an aggregate in when", "two aggregates in one", "no aggregate", "an unknown aggregate", "distinct star",
    "the sum of a star", "a measure named like a field", "window_complete", "a measure twice", "a step named like a field",
    "two steps of one name", "at_most below at_least", "a later step", "the step itself", "an unknown step",
    "a step near by", "a step for a number", "until of a step", "absent not last", "a stream with count",
}  # fmt: skip
STRUCTURE = [
    wrong
    for wrong in (*KEYS, *VALUES, *WINDOWS, *MEASURES, *STEPS, *TESTS, *DOCUMENTS)
    # The text of a document, and lists in lists without end, are no matter of a schema.
    if not isinstance(wrong.document, str) and not wrong.name.startswith("deep ")
]


def schemas(node: object) -> Iterator[dict[str, Any]]:
    """Every mapping within a schema."""
    if isinstance(node, dict):
        yield node
    for part in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from schemas(part)


def test_the_published_schema_is_the_generated_one() -> None:
    published = (CONF / "rule.schema.json").read_text(encoding="utf-8")
    assert published == format_rule_schema(), "write it anew: lookback rules schema > conf/rule.schema.json"
    assert json.loads(published) == build_rule_schema()
    assert published.endswith("}\n")


def test_the_schema_is_one() -> None:
    Draft202012Validator.check_schema(build_rule_schema())


@pytest.mark.parametrize("file", RULES, ids=lambda file: file.stem)
def test_every_shipped_rule_is_valid(file: Path) -> None:
    SCHEMA.validate(yaml.safe_load(file.read_text(encoding="utf-8")))


@pytest.mark.parametrize("file", RULES, ids=lambda file: file.stem)
def test_editors_find_the_schema_of_every_shipped_rule(file: Path) -> None:
    first = file.read_text(encoding="utf-8").splitlines()[0]
    match = re.fullmatch(r"# yaml-language-server: \$schema=(\S+)", first)
    assert match, first
    assert (file.parent / match[1]).resolve() == CONF / "rule.schema.json"


@pytest.mark.parametrize("document", ACCEPTED, ids=lambda document: document["rule_id"])
def test_what_the_reader_takes_is_valid(document: dict[str, Any]) -> None:
    compile_rule(document, STREAMS[document["stream"]])
    SCHEMA.validate(document)


def test_the_full_documents_have_every_key_of_their_kind() -> None:
    for kind, document in FULL.items():
        # when and late have other texts in the other kinds; tests travel with all of them
        # of entity and entities a document has one
        assert {*document, "entity"} == {*COMMON_KEYS, *KEYS_OF_KIND[kind]}


@pytest.mark.parametrize("wrong", STRUCTURE, ids=[wrong.name for wrong in STRUCTURE])
def test_what_is_wrong_in_structure_is_not_valid(wrong: Wrong) -> None:
    assert SCHEMA.is_valid(wrong.document) == (wrong.name in BEYOND)


def test_what_is_wrong_in_a_type_is_left_to_the_check() -> None:
    assert {wrong.name for wrong in STRUCTURE} >= BEYOND
    assert all(SCHEMA.is_valid(wrong.document) for wrong in TYPES)


@pytest.mark.parametrize("kind", FULL)
def test_a_key_that_is_taken_away_is_missed_by_both_or_by_none(kind: str) -> None:
    for key in FULL[kind]:
        document = {name: value for name, value in FULL[kind].items() if name != key}
        assert SCHEMA.is_valid(document) == (not read_rule(document)[1]), key


def test_a_key_without_a_value_is_not_valid() -> None:
    for document in FULL.values():
        for key in document:
            assert not SCHEMA.is_valid({**document, key: None}), key


def test_every_key_is_explained() -> None:
    schema = build_rule_schema()
    assert set(schema["properties"]) == {*COMMON_KEYS, *(key for keys in KEYS_OF_KIND.values() for key in keys)}
    for part in schemas(schema):
        if "additionalProperties" not in part or "description" not in part:
            continue
        for name, described in part.get("properties", {}).items():
            assert len(described["description"]) > 10, name
            assert described["description"].endswith("."), name


def test_examples_and_defaults_are_valid_themselves() -> None:
    seen = 0
    for part in schemas(build_rule_schema()):
        if "description" not in part or not isinstance(part["description"], str):
            continue
        for value in [*part.get("examples", []), *([part["default"]] if "default" in part else [])]:
            Draft202012Validator(part).validate(value)
            seen += 1
    assert seen > 40


def test_a_caller_may_change_the_schema_it_got() -> None:
    schema = build_rule_schema()
    before = copy.deepcopy(schema)
    schema["properties"]["severity"]["enum"].append("none")
    assert build_rule_schema() == before
