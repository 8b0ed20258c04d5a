"""Reads files of rules that are JSON: a list, an object, or one rule a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from lookback.core.errors import SetupError
from lookback.importing.documents import read_text
from lookback.importing.rulefiles import RuleFile

SUFFIXES = (".json", ".jsonl", ".ndjson", ".txt", ".csv")
# Lists of rules, as an import of many at once wraps them.
_LISTS = ("Records", "rules")


def read_json_rules(file: RuleFile) -> list[Any]:
    """Returns the rules of a file: objects, or lines that are not JSON as texts. Raises SetupError."""
    text = read_text(file.path)
    try:
        return list(_unwrap(json.loads(text)))
    except RecursionError as error:
        raise SetupError(f"{file.path} is nested too deeply") from error
    except ValueError:
        return [_read_line(line.strip()) for line in text.splitlines() if line.strip()]


def _unwrap(value: Any) -> Iterator[Any]:
    lists = [value[name] for name in _LISTS if isinstance(value.get(name), list)] if isinstance(value, dict) else []
    yield from lists[0] if lists else value if isinstance(value, list) else [value]


def _read_line(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return line
