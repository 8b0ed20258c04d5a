"""Decides what a version must have before it becomes active, and writes down that it had it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lookback.core.rules.parameters import Parameters

# Keys of a document that change nothing about which alerts it raises.
_TEXTS = ("tests", "description", "message", "parameters")


@dataclass(frozen=True)
class Gate:
    """The conditions of a version that is to be active; 0, None and False ask for nothing.

    tests: so many tests of its own. backtest_days: a backtest of so many days; max_alerts_per_day, min_precision: what it may
    raise and must reach there. shadow_hours: so many hours in shadow. approval: somebody other than its author approves.
    """

    tests: int = 0
    backtest_days: float = 0.0
    max_alerts_per_day: float | None = None
    min_precision: float | None = None
    shadow_hours: float = 0.0
    approval: bool = False


@dataclass(frozen=True)
class Knowledge:
    """The known figures of a version; None: not known, such as the precision of a backtest without labels."""

    tests: int
    shadow_hours: float | None
    alerts_per_day: float | None
    precision: float | None
    author: str
    approver: str


@dataclass(frozen=True)
class Condition:
    """A condition of a gate: what it asks for, the figure of the version, whether that meets it, and else the remedy."""

    condition: str
    figure: str
    met: bool
    remedy: str = ""


def hash_document(document: Mapping[str, Any]) -> str:
    """Returns a hash of what a rule means: of its document with the values of its parameters, without tests and texts.

    Two documents that differ only in the order of keys and of group_by, in tests, description or message, or in whether a value
    is written in or is a parameter, have one hash.
    """
    values = document.get("parameters")
    parameters = Parameters(values if isinstance(values, Mapping) else {})
    meaning = {name: _fill(value, parameters) for name, value in document.items() if name not in _TEXTS}
    if isinstance(meaning.get("group_by"), list):
        meaning["group_by"] = sorted(meaning["group_by"], key=str)
    text = json.dumps(meaning, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _fill(value: Any, parameters: Parameters) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _fill(each, parameters) for name, each in value.items()}
    if isinstance(value, list):
        return [_fill(each, parameters) for each in value]
    if not isinstance(value, str):
        return value
    filled = parameters.fill_value(value)
    return parameters.fill_expression(filled)[0] if isinstance(filled, str) else filled


def check_gate(gate: Gate, known: Knowledge) -> list[Condition]:
    """Returns the conditions of a gate, each met or not."""
    found = []
    if gate.tests:
        remedy = "write `tests` into the document: events, and the alerts that they raise"
        found.append(
            _make_condition(f"at least {gate.tests} tests", str(known.tests), known.tests >= gate.tests, remedy)
        )
    days = f"in a backtest of {gate.backtest_days:g} days"
    if gate.max_alerts_per_day is not None:
        figure, most = known.alerts_per_day, gate.max_alerts_per_day
        remedy = "raise its limit, such as one that `lookback backtest --vary` finds, or give it `suppress`"
        is_met = figure is not None and figure <= most
        found.append(_make_condition(f"at most {most:g} alerts a day {days}", _write(figure), is_met, remedy))
    if gate.min_precision is not None:
        figure, least = known.precision, gate.min_precision
        remedy = "make it stricter; without a figure, give events labels with `lookback labels import`"
        is_met = figure is not None and figure >= least
        found.append(_make_condition(f"a precision of at least {least:g} {days}", _write(figure), is_met, remedy))
    if gate.shadow_hours:
        hours = known.shadow_hours
        remedy = "publish it with `lookback rules push FILE --status shadow` and wait"
        is_met = hours is not None and hours >= gate.shadow_hours
        found.append(_make_condition(f"{gate.shadow_hours:g} hours in shadow", _write(hours), is_met, remedy))
    if gate.approval:
        is_met = bool(known.approver) and known.approver != known.author
        remedy = f"let somebody other than {known.author or 'its author'} activate it"
        found.append(_make_condition("an approval by another person", known.approver or "none", is_met, remedy))
    return found


def write_evidence(document: Mapping[str, Any], conditions: Sequence[Condition], when: str) -> str:
    """Writes the evidence of an activation: the hash of the document, the figures, and when they were found."""
    figures = [asdict(each) for each in conditions]
    return json.dumps({"hash": hash_document(document), "figures": figures, "when": when}, ensure_ascii=False)


def is_proven(document: Mapping[str, Any], evidence: str | None) -> bool:
    """Returns whether the evidence of a row is about its document."""
    try:
        read = json.loads(evidence or "null")
    except (ValueError, RecursionError):
        return False
    return isinstance(read, dict) and read.get("hash") == hash_document(document)


def _make_condition(condition: str, figure: str, is_met: bool, remedy: str) -> Condition:
    return Condition(condition, figure, is_met, "" if is_met else remedy)


def _write(figure: float | None) -> str:
    return "none" if figure is None else f"{figure:.4g}"
