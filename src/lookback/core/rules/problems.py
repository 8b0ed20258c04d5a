"""Writes the problems of a rule document: short lines, whatever its names and values hold."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterable

from lookback.core.errors import Problem
from lookback.core.values.suggestions import suggest
from lookback.core.values.texts import cut_end, cut_middle, to_one_line

# Problems listed for one document; a hostile one could have tens of thousands.
MAX_PROBLEMS = 100
_MAX_PLACE_CHARACTERS, _MAX_MESSAGE_CHARACTERS, _MAX_VALUE_CHARACTERS = 120, 550, 100
# Words that people try for a key, and the key. A step has a `where` instead of a `when`.
_SYNONYMS = {
    "condition": "when",
    "conditions": "when",
    "having": "when",
    "alert_when": "when",
    "if": "when",
    "filter": "where",
    "aggregates": "measures",
    "aggregations": "measures",
    "metrics": "measures",
    "key": "group_by",
    "keys": "group_by",
    "partition_by": "group_by",
    "id": "rule_id",
    "priority": "severity",
    "text": "message",
    "throttle": "suppress",
}


def make_problem(place: str, message: str) -> Problem:
    """Returns a problem on one line of at most about 550 characters, whatever a document's names and values hold.

    A long message is cut in its middle: it begins with the place and ends with the remedy.
    """
    message = cut_middle(to_one_line(message), _MAX_MESSAGE_CHARACTERS)
    return Problem(cut_middle(to_one_line(place), _MAX_PLACE_CHARACTERS), message)


def limit_problems(problems: list[Problem]) -> list[Problem]:
    """Returns the first 100 problems, and the number of the rest as the last one."""
    more = len(problems) - MAX_PROBLEMS
    if more <= 0:
        return problems
    return [*problems[:MAX_PROBLEMS], Problem("", f"{more:,} more problems are not listed; mend these first")]


def quote_value(value: object) -> str:
    """Formats a value for a message: a text in quotes, anything else as JSON; at most 100 characters."""
    if isinstance(value, str):
        text = repr(value)
    elif isinstance(value, dt.date):
        text = str(value)
    else:
        try:
            text = json.dumps(value, default=str, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            text = "something that JSON cannot hold"
    return cut_end(text, _MAX_VALUE_CHARACTERS)


def describe_unknown_key(key: object, known: Iterable[str]) -> str:
    """Returns the message for a key that is not known, with the key that was probably meant."""
    known = list(known)
    hint = suggest(key, known)
    if isinstance(key, str) and (meant := _SYNONYMS.get(key.lower())):
        words = [word for word in (meant, "where" if meant == "when" else "") if word in known]
        hint = f"did you mean {words[0]!r}?" if words else hint
    return f"unknown key {quote_value(key)}; {hint}"
