"""Checks whether a version may become active, and writes the evidence."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lookback.core.rules.descriptions import DESCRIPTIONS
from lookback.core.rules.parameters import Parameters
from lookback.core.values.texts import format_figure

# Keys of a document that do not change which alerts it raises. Values of parameters are hashed where they are used.
_TEXTS = ("tests", "message", "parameters", *DESCRIPTIONS)
# What an enforced gate requires of an active row: evidence for its document, or also the name of an approver.
EVIDENCE, APPROVAL = "evidence", "approval"
# The decision in rule_log about a row that an enforced gate rejects.
REFUSAL = "gate"


@dataclass(frozen=True)
class Gate:
    """The conditions that a version must meet to become active; 0, None and False require nothing."""

    tests: int = 0  # the minimum number of tests in the document
    backtest_days: float = 0.0  # the length of the backtest for the next two
    max_alerts_per_day: float | None = None
    min_precision: float | None = None
    shadow_hours: float = 0.0  # the minimum time in shadow
    approval: bool = False  # whether somebody other than the author must approve
    enforce: bool = False  # whether the stream itself rejects an active row without matching evidence

    @property
    def enforced(self) -> str:
        """The requirement of the stream for an active row: EVIDENCE, APPROVAL or "" for nothing."""
        return "" if not self.enforce else APPROVAL if self.approval else EVIDENCE


@dataclass(frozen=True)
class Knowledge:
    """The figures of a version; None if unknown, such as the precision of a backtest without labels."""

    tests: int
    shadow_hours: float | None
    alerts_per_day: float | None
    precision: float | None
    author: str  # of the document
    approver: str  # the name that the approver gives
    user: str = ""  # the user who runs the check
    committers: Sequence[str] | None = None  # the users who wrote the document, by the table's history; may be empty


@dataclass(frozen=True)
class Condition:
    """A condition of a gate, the version's figure, whether it is met, and the remedy if it is not."""

    condition: str
    figure: str
    met: bool
    remedy: str = ""


def hash_document(document: Mapping[str, Any]) -> str:
    """Returns a hash of what a rule means: of the document with its parameters filled in, without tests and texts.

    These do not change the hash: the order of keys, of entities and, unless a step has a key, of group_by, tests, message, DESCRIPTIONS, and
    whether a value is written in or is a parameter.
    """
    values = document.get("parameters")
    parameters = Parameters(values if isinstance(values, Mapping) else {})
    meaning = {name: _fill(value, parameters) for name, value in document.items() if name not in _TEXTS}
    if "entity" in meaning:
        meaning.setdefault("entities", [meaning.pop("entity")])
    # The fields of a step's key are in the order of group_by.
    unordered = ["entities"] if _has_step_keys(meaning.get("sequence")) else ["group_by", "entities"]
    for name in unordered:
        if isinstance(meaning.get(name), list):
            meaning[name] = sorted(meaning[name], key=str)
    text = json.dumps(meaning, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _has_step_keys(sequence: object) -> bool:
    """Returns whether a step of a sequence, or `until`, has a key of its own."""
    if not isinstance(sequence, Mapping):
        return False
    steps = sequence.get("steps")
    parts = [sequence.get("until"), *(steps if isinstance(steps, list) else [])]
    return any(isinstance(part, Mapping) and part.get("key") is not None for part in parts)


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
    """Checks each condition of a gate."""
    found = []
    if gate.tests:
        remedy = "add `tests` to the document: events, and the alerts that they raise"
        found.append(
            _make_condition(f"at least {gate.tests} tests", str(known.tests), known.tests >= gate.tests, remedy)
        )
    days = f"in a backtest of {gate.backtest_days:g} days"
    if gate.max_alerts_per_day is not None:
        figure, most = known.alerts_per_day, gate.max_alerts_per_day
        remedy = "raise its limit (`lookback backtest --vary` compares limits), or add `suppress`"
        is_met = figure is not None and figure <= most
        found.append(_make_condition(f"at most {most:g} alerts a day {days}", _write(figure), is_met, remedy))
    if gate.min_precision is not None:
        figure, least = known.precision, gate.min_precision
        remedy = "make the rule stricter; if there is no figure, label events with `lookback labels import`"
        is_met = figure is not None and figure >= least
        found.append(_make_condition(f"a precision of at least {least:g} {days}", _write(figure), is_met, remedy))
    if gate.shadow_hours:
        hours = known.shadow_hours
        remedy = "publish it with `lookback rules push FILE --status shadow` and wait"
        is_met = hours is not None and hours >= gate.shadow_hours
        found.append(_make_condition(f"{gate.shadow_hours:g} hours in shadow", _write(hours), is_met, remedy))
    if gate.approval:
        found.append(_check_approval(known))
    return found


def _check_approval(known: Knowledge) -> Condition:
    writers = [known.author, *(known.committers or ())]
    # Author and approver are names that people give; the users are what the history and the machine say.
    is_by_writer = any(is_same_person(one, other) for one in (known.approver, known.user) for other in writers[1:])
    is_met = bool(known.approver.strip()) and not is_same_person(known.approver, known.author) and not is_by_writer
    figure = known.approver or "none"
    if known.committers:
        figure += f"; by the table's history, {' and '.join(known.committers)} wrote it"
    elif known.committers is not None:
        figure += "; its authors could not be checked, since the table's history names no users"
    authors = " and ".join(dict.fromkeys(each for each in writers if each)) or "its author"
    remedy = f"ask somebody other than {authors} to activate it"
    return _make_condition("an approval by another person", figure, is_met, remedy)


def write_evidence(document: Mapping[str, Any], conditions: Sequence[Condition], when: str) -> str:
    """Writes the evidence of an activation: the document's hash, the figures and their time."""
    figures = [asdict(each) for each in conditions]
    return json.dumps({"hash": hash_document(document), "figures": figures, "when": when}, ensure_ascii=False)


def is_proven(document: Mapping[str, Any], evidence: str | None) -> bool:
    """Returns whether the evidence of a row is for its document."""
    try:
        read = json.loads(evidence or "null")
    except (ValueError, RecursionError):
        return False
    return isinstance(read, dict) and read.get("hash") == hash_document(document)


def is_same_person(one: str | None, other: str | None) -> bool:
    """Returns whether two names are equal but for case and outer blanks; an empty name equals none."""
    one, other = (one or "").strip().casefold(), (other or "").strip().casefold()
    return bool(one) and one == other


def find_objection(
    document: Mapping[str, Any],
    author: str | None,
    approver: str | None,
    evidence: str | None,
    *,
    required: str = APPROVAL,
) -> str:
    """Finds why an enforced gate rejects an active row; empty if it does not.

    Only the row decides. A row that fails both EVIDENCE and APPROVAL gets the same text for both, since rule_log must not
    depend on the settings.
    """
    if not (evidence or "").strip():
        return "it has no evidence that it met the gate (evidence)"
    if not is_proven(document, evidence):
        return "its evidence is for another document (evidence)"
    if is_same_person(author, approver):
        return f"its author, {str(author).strip()!r:.100}, approved it; somebody else must (approved_by)"
    if required == APPROVAL and not (approver or "").strip():
        return "nobody approved it (approved_by)"
    return ""


def _make_condition(condition: str, figure: str, is_met: bool, remedy: str) -> Condition:
    return Condition(condition, figure, is_met, "" if is_met else remedy)


def _write(figure: float | None) -> str:
    # Without commas, since programs read the evidence too.
    return "none" if figure is None else format_figure(figure).replace(",", "")
