"""Builds the JSON Schema of rule documents, with which editors complete and check them, from the reader's own tables.

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
from collections.abc import Iterable, Mapping
from typing import Any

from lookback.core.expressions.syntax import MAX_CHARACTERS
from lookback.core.rules.document import (
    ABSENT_KEYS,
    COMMON_KEYS,
    EXPIRIES,
    INFO,
    KEYS_OF_KIND,
    LATE_POLICIES,
    MAX_DOCUMENT_BYTES,
    MAX_EVENTS,
    MAX_MEASURES,
    MAX_OVERLAP,
    MAX_SCORE,
    MAX_STEPS,
    MEASURE_KEYS,
    NAME,
    RULE_ID,
    SCORES,
    SEQUENCE_KEYS,
    SEVERITIES,
    STEP_KEYS,
    TEST_KEYS,
    WINDOW_FORMS,
)
from lookback.core.values.contents import ROW_KEYS
from lookback.core.values.durations import MICROSECONDS
from lookback.core.values.lists import CIDR
from lookback.core.values.windows import LOOKBACK, SEQUENCE, SLIDING

_Schema = dict[str, Any]
_UNITS = "|".join(MICROSECONDS)
_MARKER = f":{NAME.pattern}"
_TIME = r"^\s*[0-9]{4}-[0-9]{2}-[0-9]{2}([T ][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]{1,6})?)?([Zz]|[+-][0-9]{2}:[0-9]{2})?)?\s*$"


def format_rule_schema() -> str:
    """Returns the text of conf/rule.schema.json, with a final line break."""
    return json.dumps(build_rule_schema(), indent=2, ensure_ascii=False) + "\n"


def build_rule_schema() -> dict[str, Any]:
    """Builds the JSON Schema (draft 2020-12) of a rule document; each call returns a new one.

    It refuses unknown keys and those of another kind of rule. Plain validators ignore the keys for editors
    (`errorMessage`, `patternErrorMessage`, `doNotSuggest`).
    """
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Lookback rule",
        "description": (
            "Raises an alert when the events of a key, within a window or in an order, satisfy a condition. "
            f"At most {MAX_DOCUMENT_BYTES:,} bytes as JSON."
        ),
        "type": "object",
        "properties": _select((*COMMON_KEYS, *_list_kind_keys()), {**_common_properties(), **_kind_properties()}),
        "required": ["rule_id", "stream"],
        "dependentRequired": {"entity": ["group_by"]},
        "additionalProperties": False,
        "allOf": [
            {
                "if": {"not": {"anyOf": [{"required": ["window"]}, {"required": ["sequence"]}]}},
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


def _list_kind_keys() -> tuple[str, ...]:
    return tuple(dict.fromkeys(key for keys in KEYS_OF_KIND.values() for key in keys))


def _select(keys: Iterable[str], described: Mapping[str, _Schema]) -> dict[str, _Schema]:
    # In the order of the reader's table. A key without a description raises KeyError.
    return {key: described[key] for key in keys}


def _kind_branch(kind: str) -> _Schema:
    """Builds the condition for one kind of rule: its required keys, and the keys that belong to other kinds."""
    required: list[str] = []
    if kind == SEQUENCE:
        is_of_kind: _Schema = {"required": ["sequence"]}
    else:
        forms: list[_Schema] = [{"type": "object", "required": [kind]}]
        if kind == LOOKBACK:
            forms.append({"type": "string"})
        is_of_kind = {
            "properties": {"window": {"anyOf": forms}},
            "required": ["window"],
            "not": {"required": ["sequence"]},
        }
        required = ["window", "measures", *(["when"] if kind == LOOKBACK else [])]
    properties: dict[str, _Schema] = {
        key: _refuse(f"{key} is not for {kind} rules; leave it out")
        for key in _list_kind_keys()
        if key not in KEYS_OF_KIND[kind]
    }
    if kind == SEQUENCE:
        policies = [policy for policy in LATE_POLICIES if policy != "revise"]
        properties["late"] = {
            "enum": policies,
            "errorMessage": f"a sequence takes {' or '.join(policies)}; revise is for lookback rules",
        }
    elif kind != LOOKBACK:
        properties["measures"] = {
            "additionalProperties": {
                "properties": {"window": _refuse("only measures of lookback rules have windows of their own")}
            }
        }
    return {"if": is_of_kind, "then": {"required": required, "properties": properties}}


def _refuse(message: str) -> _Schema:
    return {"not": {}, "errorMessage": message, "doNotSuggest": True}


# Kinds of values ------------------------------------------------------------------------------------------------------


def _duration(description: str, *examples: str, zero: bool = False, default: str | None = None) -> _Schema:
    count = "[0-9]{1,19}" if zero else "0*[1-9][0-9]{0,18}"
    least = "" if zero else ", longer than 0"
    return {
        "description": f"{description} A duration{least}: an integer, a space and microseconds ... weeks.",
        "type": "string",
        "pattern": rf"^\s*({count}\s+({_UNITS})s?|{_MARKER})\s*$",
        "patternErrorMessage": (
            f"write an integer, a space and a unit, such as '{examples[0]}', or the name of a parameter, such as ':span'; "
            "months and years have no fixed length, write days"
        ),
        "examples": list(examples),
        **({} if default is None else {"default": default}),
    }


def _expression(description: str, *examples: str) -> _Schema:
    return {
        "description": f"{description} Spark SQL, in quotes; at most {MAX_CHARACTERS:,} characters.",
        "type": "string",
        "pattern": r"\S",
        "patternErrorMessage": f"write an expression, such as {examples[0]}",
        "maxLength": MAX_CHARACTERS,
        "examples": list(examples),
    }


def _time(description: str, example: str) -> _Schema:
    return {
        "description": f"{description} ISO 8601 in quotes, UTC without a zone; or integer microseconds since 1970.",
        "type": ["string", "integer"],
        "pattern": _TIME,
        "patternErrorMessage": f"write a time such as '{example}'",
        "examples": [example],
    }


def _choice(description: str, choices: Iterable[str], default: str) -> _Schema:
    return {"description": f"{description} Default: {default}.", "enum": list(choices), "default": default}


def _flag(description: str, *, default: bool = False) -> _Schema:
    return {"description": f"{description} Default: {str(default).lower()}.", "type": "boolean", "default": default}


def _name(description: str, *examples: str) -> _Schema:
    return {
        "description": f"{description} Letters, digits and _, no digit first.",
        "type": "string",
        "pattern": f"^{NAME.pattern}$",
        "patternErrorMessage": f"use letters, digits and _, no digit first, such as {examples[0]}",
        "examples": list(examples),
    }


def _number(description: str) -> _Schema:
    return {
        "description": description,
        "type": ["integer", "string"],
        "minimum": 1,
        "maximum": MAX_EVENTS,
        "pattern": rf"^\s*{_MARKER}\s*$",
        "patternErrorMessage": "write a whole number, or the name of a parameter, such as ':least'",
    }


def _mapping(description: str, properties: Mapping[str, _Schema], required: Iterable[str]) -> _Schema:
    return {
        "description": description,
        "type": "object",
        "properties": dict(properties),
        "required": list(required),
        "additionalProperties": False,
    }


# Keys -----------------------------------------------------------------------------------------------------------------


def _common_properties() -> dict[str, _Schema]:
    return {
        "rule_id": {
            "description": (
                "The rule's name: 1 to 100 lower-case letters, digits, '.', '_' or '-', beginning with a letter or "
                "digit. Alerts and versions go by it; it never changes."
            ),
            "type": "string",
            "pattern": f"^{RULE_ID.pattern}$",
            "patternErrorMessage": "use lower-case letters, digits, '.', '_' or '-', such as large-payment",
            "examples": ["large-payment"],
        },
        "description": {
            "description": "What the rule looks for, for those who review its alerts.",
            "type": "string",
            "examples": ["Much money to one beneficiary within a day"],
        },
        "parameters": {
            "description": (
                "Values by name, which the rule's expressions, durations, at_least, at_most and message take as :name. Each "
                "can be changed by itself, with `lookback rules set`. Default: none."
            ),
            **_values_by_name(),
            "examples": [{"limit": 1000, "span": "24 hours"}],
        },
        "stream": {
            "description": "The stream whose events the rule judges: a name from conf/streams.",
            "type": "string",
            "pattern": r"\S",
            "examples": ["payments"],
        },
        "severity": _choice(
            "How grave an alert is; reviewers see the gravest first, and info only among reports.", SEVERITIES, "medium"
        ),
        "group_by": {
            "description": (
                "The fields that make the key: events with equal values are looked at together. Order does not matter, "
                "NULL is a value. Default: [], one key for all events."
            ),
            "type": "array",
            "items": {"type": "string"},
            "uniqueItems": True,
            "default": [],
            "examples": [["customer_id"], ["customer_id", "terminal_id"]],
        },
        "entity": {
            "description": (
                "A field of group_by: whom the alerts are about. Rules over the stream `alerts` add up the scores of an "
                "entity. Default: none."
            ),
            "type": "string",
            "pattern": r"\S",
            "examples": ["customer_id"],
        },
        "score": {
            "description": (
                "What an alert adds to the risk of its entity. Default: by severity, "
                f"{', '.join(f'{severity} {score}' for severity, score in SCORES.items())}."
            ),
            "type": "integer",
            "minimum": 0,
            "maximum": MAX_SCORE,
            "examples": [25],
        },
        "queue": {
            "description": (
                "Whether alerts wait for a person in the queue. If false they are reports, such as totals, and have a view of "
                f"their own. Default: true, and false if the severity is {INFO}."
            ),
            "type": "boolean",
            "examples": [False],
        },
        "where": _expression(
            "Which events the rule sees; it may name the event's fields. Default: all events.",
            "payment_type = 'CSH'",
        ),
        "effective_from": _time(
            "What lies before this time triggers nothing, though it counts in windows (an event's time, a window's end, "
            "an absence's due). Default: no limit.",
            "2026-01-31T12:00:00Z",
        ),
        "effective_until": _time(
            "What lies at or after this time triggers nothing; later than effective_from. Default: no limit.",
            "2026-12-31T00:00:00Z",
        ),
        "allowed_lateness": _duration(
            "How far behind the watermark an event may be and still be taken by this rule. At most the stream's, which is "
            "the default.",
            "1 hour",
            zero=True,
        ),
        "suppress": _duration(
            "After an alert, later ones of the same rule and key up to this much event time on get the verdict "
            "suppressed. Default: every alert is raised.",
            "1 hour",
        ),
        "warm_start": _flag(
            "Whether the rule comes into force with the events of before in its windows. If false, its windows fill from then "
            "on.",
            default=True,
        ),
        "message": {
            "description": (
                "The alert's text. Names in braces are filled in: fields, measures and window_complete; in a sequence "
                "also {step.count} and {step.field}. So are parameters, as :name. Default: empty."
            ),
            "type": "string",
            "default": "",
            "examples": ["{total} to {beneficiary_id} in a day"],
        },
        "tests": {
            "description": "The rule's own examples; `lookback rules check` and the test suite run them. Default: none.",
            "type": "array",
            "items": _test(),
        },
    }


def _values_by_name() -> _Schema:
    return {
        "type": "object",
        "propertyNames": {
            "pattern": f"^{NAME.pattern}$",
            "patternErrorMessage": "use letters, digits and _, no digit first",
        },
        "additionalProperties": {"type": ["number", "string", "boolean"]},
    }


def _test() -> _Schema:
    described: dict[str, _Schema] = {
        "name": {"description": "What the test shows.", "type": "string", "examples": ["the third payment in a day"]},
        "events": {
            "description": "Events of the stream, as mappings of field to value. Each is a commit of its own.",
            "type": "array",
            "items": {"type": "object"},
            "examples": [[{"payment_id": 1, "event_time": "2026-03-01T10:00:00Z", "amount": 400}]],
        },
        "alerts": {
            "description": (
                "All alerts that these events raise, in order; of each, what is written is compared. Default: none."
            ),
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "event_id": {"description": "The id of the event that triggered it."},
                    "measures": {"description": "Measures by name, numbers compared by value.", "type": "object"},
                    "message": {"description": "The text, filled in.", "type": "string"},
                },
            },
            "examples": [[{"event_id": 3, "measures": {"total": 12000}}]],
        },
        "parameters": {
            "description": "Values of parameters for this test alone. Default: those of the rule.",
            **_values_by_name(),
            "examples": [{"limit": 1000}],
        },
        "lists": _lists(),
    }
    return _mapping("Events, and the alerts that they raise.", _select(TEST_KEYS, described), ["events"])


def _lists() -> _Schema:
    row = {
        "value": {"description": "The text that cast(field as string) gives.", "type": ["string", "integer"]},
        "expires_at": _time("Events from this time on do not find the value. Default: never.", "2026-01-31T12:00:00Z"),
        "kind": {"description": "cidr for a range of addresses, such as 10.0.0.0/8. Default: a text.", "enum": [CIDR]},
    }
    value = {"oneOf": [{"type": ["string", "integer"]}, _mapping("A value.", _select(ROW_KEYS, row), ["value"])]}
    return {
        "description": "The contents of the lists that in_list() asks, by name. Default: a list is empty.",
        "type": "object",
        "additionalProperties": {"type": "array", "items": value},
        "examples": [{"known-terminals": ["T1", "T2"]}],
    }


def _kind_properties() -> dict[str, _Schema]:
    return {
        "window": {
            "description": (
                "What is looked at together: of lookback rules, for each event, the time up to it ('24 hours', both ends "
                "included); or tumbling, sliding or session windows, which give a result when they end. "
                "Instead of a window a rule may have a sequence."
            ),
            "oneOf": [_lookback_text(), *(_window(kind) for kind in WINDOW_FORMS)],
            "examples": ["24 hours", {"lookback": "30 days", "delay": "1 day"}, {"tumbling": "5 minutes"}],
        },
        "measures": {
            "description": (
                f"Aggregates over the window, by name; at least one, at most {MAX_MEASURES}. count(*), count(x), "
                "count(distinct x), sum, avg, min, max, stddev_samp, first, last, each with an optional "
                "filter (where ...). "
                "Names of the stream's fields cannot be used."
            ),
            "type": "object",
            "minProperties": 1,
            "maxProperties": MAX_MEASURES,
            "propertyNames": {
                "pattern": f"^{NAME.pattern}$",
                "patternErrorMessage": "use letters, digits and _, no digit first",
            },
            "additionalProperties": _measure(),
            "examples": [{"total": "sum(amount)", "large": "count(*) filter (where amount > 1000)"}],
        },
        "when": _expression(
            "The condition that raises the alert; NULL raises none. It may name measures, window_complete, the fields in "
            "group_by, and of lookback rules all fields of the event. Without it every tumbling, sliding or session "
            "window gives a result; lookback rules need it.",
            "total >= 10000 and large >= 3",
        ),
        "late": _choice(
            "What becomes of an event behind the watermark, within the allowed lateness. evaluate: it is judged at its "
            "own time over what has arrived. record: it is not judged, but counts in later windows. revise (lookback "
            "rules): events that it concerns are judged again as well.",
            LATE_POLICIES,
            "evaluate",
        ),
        "reset_on_alert": _flag(
            "Whether an alert empties what this rule has gathered for the key, for events that arrive later. Not with "
            "late: revise."
        ),
        "early": _flag("Whether windows give a result after each event too, before they end."),
        "sequence": _sequence(),
    }


def _lookback_text() -> _Schema:
    return _duration("How far each event looks back, itself included.", "24 hours", "10 minutes")


def _window(kind: str) -> _Schema:
    described = {
        "lookback": _duration("How far each event looks back.", "24 hours"),
        "delay": _duration(
            "The window ends this long before the event, which it then leaves out. Default: 0 seconds.",
            "7 days",
            zero=True,
            default="0 seconds",
        ),
        "resolution": _duration(
            "The window begins at the multiple of this at or before its exact start, and state is kept per key and this "
            "long instead of per event. At most the window; for count, sum, avg, stddev_samp. Default: exact.",
            "1 hour",
            "1 minute",
        ),
        "tumbling": _duration("Windows of this size, side by side, counted from 1970.", "5 minutes"),
        "sliding": _duration("Windows of this size that overlap.", "1 hour"),
        "slide": _duration(
            f"How far apart the windows start: at most their size, at least a {MAX_OVERLAP:,}th of it.", "5 minutes"
        ),
        "session": _duration("Events this far apart or less belong to one window.", "30 minutes"),
        "offset": _duration(
            "Windows start this long after full multiples of the slide. Default: 0 seconds.",
            "1 minute",
            zero=True,
            default="0 seconds",
        ),
    }
    required = [kind, "slide"] if kind == SLIDING else [kind]
    return _mapping(f"A {kind} window.", _select(WINDOW_FORMS[kind], described), required)


def _measure() -> _Schema:
    aggregate = _expression("One aggregate.", "sum(amount)", "count(*) filter (where amount > 1000)")
    described: dict[str, _Schema] = {
        "measure": aggregate,
        "window": {
            "description": "A window of its own, which looks back too. Default: the rule's.",
            "oneOf": [_lookback_text(), _window(LOOKBACK)],
            "examples": ["30 days", {"lookback": "30 days", "delay": "1 day"}],
        },
    }
    with_window = _mapping(
        "An aggregate with a window of its own, in lookback rules.",
        _select(MEASURE_KEYS, described),
        ["measure"],
    )
    return {"oneOf": [aggregate, with_window]}


def _sequence() -> _Schema:
    described: dict[str, _Schema] = {
        "within": _duration("The time that the steps have, from the first event to the last.", "10 minutes"),
        "steps": {
            "description": (
                f"What has to happen, in order; at most {MAX_STEPS}. The rule is judged when an event satisfies the last."
            ),
            "type": "array",
            "minItems": 1,
            "maxItems": MAX_STEPS,
            "items": _step(),
            "allOf": [
                {
                    "prefixItems": [
                        {"properties": {"absent": _refuse("nothing begins the wait; write a step before it")}}
                    ]
                }
            ],
        },
        "until": _expression(
            "An event that satisfies this ends the match, after it has been judged itself; it may name the event's fields. "
            "Default: only time ends it.",
            "outcome = 'SUCCESS'",
        ),
        "expiry": _choice(
            "From where `within` counts. sliding: back from the event that is judged. fixed: on from the first event taken.",
            EXPIRIES,
            "sliding",
        ),
    }
    return _mapping(
        "Steps that have to follow one another; instead of a window, measures and when.",
        _select(SEQUENCE_KEYS, described),
        ["within", "steps"],
    )


def _step() -> _Schema:
    described: dict[str, _Schema] = {
        "name": _name("By which later steps and the message mean its events: failures.count, failures.ip.", "failures"),
        "where": _expression(
            "Which events the step takes. It may name the event's fields and those of earlier steps as arrays, and their "
            "number: failures.ip, failures.count.",
            "outcome = 'FAIL'",
            "not array_contains(failures.ip, ip)",
        ),
        "at_least": {**_number("How many events the step needs. Default: 1."), "default": 1},
        "at_most": _number("More events than this prevent a match; not below at_least. Default: no limit."),
        "absent": _expression(
            "As the last step: no event may satisfy this up to `within` after the step before.",
            "outcome = 'SUCCESS'",
        ),
        "within": _duration("How long the absence lasts. Default: the sequence's within.", "5 minutes"),
    }
    step = _mapping(
        "Events to be taken (where), or as the last step events that must not come (absent).",
        _select(dict.fromkeys((*STEP_KEYS, *ABSENT_KEYS)), described),
        ["name"],
    )
    return {
        **step,
        "if": {"required": ["absent"]},
        "then": {
            "properties": {
                key: _refuse(f"{key} is not for a step of absence; leave it out")
                for key in STEP_KEYS
                if key not in ABSENT_KEYS
            }
        },
        "else": {
            "required": ["where"],
            "properties": {
                key: _refuse(f"{key} is for a last step with absent; leave it out")
                for key in ABSENT_KEYS
                if key not in (*STEP_KEYS, "absent")
            },
        },
    }
