"""Decides what a version must have before it becomes active, and writes down that it had it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lookback.core.rules.parameters import Parameters
from lookback.core.values.texts import format_figure

# Keys of a document that change nothing about which alerts it raises.
_TEXTS = ("tests", "description", "message", "parameters")
# What an enforced gate asks of an active row: evidence that fits its document; an approval too, by somebody who is named.
EVIDENCE, APPROVAL = "evidence", "approval"
# The first words of rule_log's message about a row that an enforced gate rejected.
REFUSAL = "the gate is enforced"


@dataclass(frozen=True)
class Gate:
    """The conditions of a version that is to be active; 0, None and False ask for nothing.

    tests: so many tests of its own. backtest_days: a backtest of so many days; max_alerts_per_day, min_precision: what it may
    raise and must reach there. shadow_hours: so many hours in shadow. approval: somebody other than its author approves.
    enforce: the stream itself rejects an active row without evidence that fits it.
    """

    tests: int = 0
    backtest_days: float = 0.0
    max_alerts_per_day: float | None = None
    min_precision: float | None = None
    shadow_hours: float = 0.0
    approval: bool = False
    enforce: bool = False

    @property
    def enforced(self) -> str:
        """The demand of the stream on an active row: EVIDENCE, APPROVAL, or nothing."""
        return "" if not self.enforce else APPROVAL if self.approval else EVIDENCE


@dataclass(frozen=True)
class Knowledge:
    """The known figures of a version; None: not known, such as the precision of a backtest without labels.

    author: of its document; approver: who approves it, as they say. user: who runs the check. committers: the users who wrote
    the document, by the table's history; empty if that names none.
    """

    tests: int
    shadow_hours: float | None
    alerts_per_day: float | None
    precision: float | None
    author: str
    approver: str
    user: str = ""
    committers: Sequence[str] | None = None


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
        found.append(_check_approval(known))
    return found


def _check_approval(known: Knowledge) -> Condition:
    writers = [known.author, *(known.committers or ())]
    # What people say of themselves is checked by what the history says of them.
    is_by_writer = any(is_same_person(one, other) for one in (known.approver, known.user) for other in writers[1:])
    is_met = bool(known.approver.strip()) and not is_same_person(known.approver, known.author) and not is_by_writer
    figure = known.approver or "none"
    if known.committers:
        figure += f"; the table's history names {' and '.join(known.committers)} as who wrote it"
    elif known.committers is not None:
        figure += "; who wrote it could not be checked, since the table's history names no users"
    others = " and ".join(dict.fromkeys(each for each in writers if each)) or "its author"
    remedy = f"let somebody other than {others} activate it"
    return _make_condition("an approval by another person", figure, is_met, remedy)


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


def is_same_person(one: str | None, other: str | None) -> bool:
    """Returns whether two names are of one person; upper and lower case are alike, and nobody is the same as nobody named."""
    one, other = (one or "").strip().casefold(), (other or "").strip().casefold()
    return bool(one) and one == other


def find_objection(
    document: Mapping[str, Any],
    author: str | None,
    approver: str | None,
    evidence: str | None,
    *,
    asked: str = APPROVAL,
) -> str:
    """Finds why an enforced gate rejects an active row; empty if it does not.

    The row alone decides: its document, author, approved_by and evidence. asked: EVIDENCE or APPROVAL. The text is the same
    for both if the row fails both, since rule_log must not depend on more than the row.
    """
    if not (evidence or "").strip():
        return "it has no evidence that it met the gate (evidence)"
    if not is_proven(document, evidence):
        return "its evidence is about another document (evidence)"
    if is_same_person(author, approver):
        return f"its author, {str(author).strip()!r:.100}, approved it, and somebody else must (approved_by)"
    if asked == APPROVAL and not (approver or "").strip():
        return "nobody approved it (approved_by)"
    return ""


def _make_condition(condition: str, figure: str, is_met: bool, remedy: str) -> Condition:
    return Condition(condition, figure, is_met, "" if is_met else remedy)


def _write(figure: float | None) -> str:
    # Evidence keeps it, so programs read it too: without commas.
    return "none" if figure is None else format_figure(figure).replace(",", "")
