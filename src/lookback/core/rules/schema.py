"""Builds the JSON Schema of rule documents, with which editors complete and check them, from the forms of which they are read.

It is published as conf/rule.schema.json; `lookback rules schema` prints it. A rule file that begins with the line

    # yaml-language-server: $schema=../rule.schema.json

(from conf/rules; the path is relative to the file) is checked while it is written by editors that know the YAML language
server, such as VS Code with its YAML extension: they complete and explain keys and underline errors.

A schema sees one document and no stream, so `lookback rules check` has the last word: it also knows fields and types,
compares durations with each other, and runs the rule's tests. If the two differ, the schema is the stricter one: it
accepts no key without a value, and only units in lower case.
"""

from __future__ import annotations

import json
from typing import Any

from lookback.core.rules.document import COMMON_KEYS, KEYS_OF_KIND, LATE_POLICIES, Rule
from lookback.core.rules.kinds import Schema, make_schema, refuse
from lookback.core.values.limits import DEFAULT_LIMITS
from lookback.core.values.windows import EVENT, LOOKBACK, SEQUENCE

_KEYS_OF_SOME = tuple(dict.fromkeys(key for keys in KEYS_OF_KIND.values() for key in keys))

# A rule without any of these is an event rule.
_DECIDING_KEYS = ("window", "measures", "sequence")


def format_rule_schema() -> str:
    """Returns the text of conf/rule.schema.json, with a final line break."""
    return json.dumps(build_rule_schema(), indent=2, ensure_ascii=False) + "\n"


def build_rule_schema() -> dict[str, Any]:
    """Builds the JSON Schema (draft 2020-12) of a rule document; each call returns a new one.

    It refuses unknown keys and those of another kind of rule. Plain validators ignore the keys for editors
    (`errorMessage`, `patternErrorMessage`, `doNotSuggest`).
    """
    schema = make_schema(Rule)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Lookback rule",
        **schema,
        "description": (
            "Raises an alert when an event, or the events of a key within a window or in an order, satisfy a condition. "
            f"At most {DEFAULT_LIMITS.document_bytes:,} bytes as JSON."
        ),
        "properties": {key: schema["properties"][key] for key in (*COMMON_KEYS, *_KEYS_OF_SOME)},
        "required": ["rule_id", "stream"],
        "allOf": [
            {
                "not": {"required": ["entity", "entities"]},
                "errorMessage": "entity: x means entities: [x]; leave entity out and write all in entities",
            },
            {
                "if": {
                    "required": ["measures"],
                    "not": {"anyOf": [{"required": ["window"]}, {"required": ["sequence"]}]},
                },
                "then": {"required": ["window"]},
            },
            *(_kind_branch(kind) for kind in KEYS_OF_KIND),
            {
                "if": {"properties": {"late": {"const": "revise"}}, "required": ["late"]},
                "then": {
                    "properties": {
                        "reset_on_alert": {
                            "const": False,
                            "errorMessage": "revise and reset_on_alert exclude each other; leave one of them out",
                        }
                    }
                },
            },
        ],
    }


def _kind_branch(kind: str) -> Schema:
    """Builds the condition for one kind of rule: its required keys, and the keys that belong to other kinds."""
    required: list[str] = []
    if kind == SEQUENCE:
        is_of_kind: Schema = {"required": ["sequence"]}
    elif kind == EVENT:
        is_of_kind = {"not": {"anyOf": [{"required": [key]} for key in _DECIDING_KEYS]}}
    else:
        forms: list[Schema] = [{"type": "object", "required": [kind]}]
        if kind == LOOKBACK:
            forms.append({"type": "string"})
        is_of_kind = {
            "properties": {"window": {"anyOf": forms}},
            "required": ["window"],
            "not": {"required": ["sequence"]},
        }
        required = ["window", "measures", *(["when"] if kind == LOOKBACK else [])]
    properties: dict[str, Schema] = {
        key: refuse(f"{key} is not for {kind} rules; leave it out")
        for key in _KEYS_OF_SOME
        if key not in KEYS_OF_KIND[kind] and not (kind == EVENT and key in _DECIDING_KEYS)
    }
    if kind in (EVENT, SEQUENCE):
        policies = [policy for policy in LATE_POLICIES if policy != "revise"]
        this = "an event rule" if kind == EVENT else "a sequence"
        properties["late"] = {
            "enum": policies,
            "errorMessage": f"{this} takes {' or '.join(policies)}; revise is for lookback rules",
        }
    elif kind != LOOKBACK:
        properties["measures"] = {
            "additionalProperties": {
                "properties": {"window": refuse("only measures of lookback rules have windows of their own")}
            }
        }
    then: Schema = {"required": required, "properties": properties}
    if kind == EVENT:
        then["anyOf"] = [{"required": ["when"]}, {"required": ["where"]}]
    return {"if": is_of_kind, "then": then}
