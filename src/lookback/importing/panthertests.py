"""Reads the tests of Panther's correlations: when each signal came, and with which values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from lookback.core.values.times import parse_time
from lookback.importing.detections import Example, Together, list_fields_read
from lookback.importing.panthercorrelations import SIGNAL, CorrelationRule

_SECOND = 1_000_000
_MINUTE = 60 * _SECOND
# Numbers of a test are minutes after this time, a midnight.
_START = 1_767_225_600 * _SECOND
_Row = tuple[int, dict[str, Any]]


def read_tests(tests: Any, correlation: CorrelationRule) -> tuple[Example, ...]:
    """Reads the tests that events can express, each with the signals in the order of time."""
    read = (
        (_read_test(test, correlation) for test in tests if isinstance(test, dict)) if isinstance(tests, list) else ()
    )
    return tuple(example for example in read if example is not None)


def _read_test(test: Mapping[str, Any], correlation: CorrelationRule) -> Example | None:
    rows: list[_Row] = []
    try:
        for output in test.get("RuleOutputs") or []:
            rows += _read_output(output, correlation)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    rows = _place(sorted(rows, key=lambda row: row[0]), correlation)
    return Example(str(test.get("Name", "")), tuple(rows), bool(test.get("ExpectedResult"))) if rows else None


def _read_output(output: Mapping[str, Any], correlation: CorrelationRule) -> list[_Row]:
    """Reads the signals of one detection. Values of several fields at the same time are those of one signal."""
    read, rule_id = list_fields_read(correlation.shape), correlation.members[str(output["ID"])].rule_id
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    for field, values in (output.get("Matches") or {}).items():
        seen = Counter[int]()
        for value, times in values.items():
            for given in times:
                at = _START + given * _MINUTE if isinstance(given, int) else parse_time(given)
                row = rows.setdefault((at, seen[at]), {SIGNAL: rule_id})
                seen[at] += 1
                if field in read:
                    row[field] = str(value)
    return [(at, row) for (at, _), row in sorted(rows.items(), key=lambda each: each[0])]


def _place(rows: list[_Row], correlation: CorrelationRule) -> list[_Row]:
    """Moves the signals of a test to the start of a window: a test of Panther is what one run sees.

    If some signal must not come, other windows must not see a part of them alone. So they must lie in the part of the
    window that no other one covers; if it is too short, events cannot express the test.
    """
    shape = correlation.shape
    if not rows or not isinstance(shape, Together) or not shape.slide:
        return rows
    size, slide = shape.seconds * _SECOND, shape.slide * _SECOND
    start = 0
    if any(member.is_absent for member in correlation.members.values()):
        start = max(0, size - slide)
        if rows[-1][0] - rows[0][0] >= min(size, slide) - start:
            return []
    moved = rows[0][0] // slide * slide + start - rows[0][0]
    return [(at + moved, row) for at, row in rows]
