"""The report of an import: a line for each rule, and counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lookback.core.values.texts import count_noun, escape_unprintable
from lookback.importing.detections import Origin
from lookback.importing.reasons import APPROXIMATIONS, REMEDIES, Reason

EXACT, APPROXIMATED, REFUSED, PART = "exact", "approximated", "refused", "part"
_KINDS = (EXACT, APPROXIMATED, REFUSED)


@dataclass(frozen=True)
class Line:
    """What became of one rule.

    Attributes:
        origin: The rule.
        kind: exact, approximated, refused, or part: of a rule that alone alerts.
        rule_id: The name of the rule that was made; empty if none was.
        reasons: Why it is not exact.
        part_of: The title of the rule that it is a part of.
    """

    origin: Origin
    kind: str
    rule_id: str = ""
    reasons: tuple[Reason, ...] = ()
    part_of: str = ""

    @property
    def fidelity(self) -> str:
        """The kind with its reasons: for approximated ones how alerts differ, for refused ones what to do."""
        return describe_fidelity(self.kind, self.reasons, self.part_of)

    def __str__(self) -> str:
        origin = self.origin
        place = f"{origin.file}#{origin.place}" if origin.place > 1 else origin.file
        made = f" -> {self.rule_id}" if self.rule_id else ""
        return escape_unprintable(f"{place}{made}: {self.fidelity}")

    def to_row(self) -> dict[str, object]:
        """Returns the line as one object of JSON."""
        origin = self.origin
        return {
            "file": origin.file,
            "place": origin.place,
            "id": origin.id,
            "title": origin.title,
            "logsource": origin.logsource,
            "rule_id": self.rule_id or None,
            "result": self.kind,
            "reasons": [each.code for each in self.reasons],
            "fidelity": self.fidelity,
        }


def describe_fidelity(kind: str, reasons: Sequence[Reason] = (), part_of: str = "") -> str:
    """Returns a kind with its reasons, such as `approximated: fold: 'İ', fewer alerts`."""
    if kind == PART:
        return f"part of {part_of!r}, which alone alerts"
    remedies = {**REMEDIES, **APPROXIMATIONS}
    if not reasons:
        return kind
    separator = ", " if kind == APPROXIMATED else "; "
    return f"{kind}: " + "; ".join(f"{each}{separator}{remedies[each.code]}" for each in reasons)


@dataclass(frozen=True)
class Report:
    """What became of all rules. leaves_sources: Whether the sources of events are left to the stream."""

    lines: Sequence[Line]
    stream: str
    leaves_sources: bool = True

    def count(self, kind: str) -> int:
        """Counts the rules of a kind."""
        return sum(line.kind == kind for line in self.lines)

    def list_head(self) -> list[str]:
        """Returns what holds of all rules."""
        files = len({line.origin.file for line in self.lines})
        head = [f"{count_noun(len(self.lines), 'rule')} in {count_noun(files, 'file')}, for stream {self.stream}"]
        sources = Counter(line.origin.logsource for line in self.lines if line.origin.logsource)
        if self.leaves_sources and sources:
            listed = ", ".join(f"{name} {count:,}" for name, count in sources.most_common(5))
            more = f" and {len(sources) - 5} more" if len(sources) > 5 else ""
            # Only Sigma names its sources so that a map can tell them apart.
            is_mapped = all(line.origin.format == "sigma" for line in self.lines)
            hint = "; `logsources` in the --map file give each source a condition" if is_mapped else ""
            head.append(f"each rule judges every event of the stream, whatever its source: {listed}{more}{hint}")
        return head

    def list_counts(self) -> list[str]:
        """Returns the counts of kinds and of reasons."""
        counted = [f"{kind} {self.count(kind):,}" for kind in _KINDS]
        if parts := self.count(PART):
            counted.append(f"parts of others {parts:,}")
        if judged := sum(self.count(kind) for kind in _KINDS):
            counted[0] += f" ({self.count(EXACT) / judged:.1%})"
        rows = [", ".join(counted)]
        for kind in (APPROXIMATED, REFUSED):
            codes = Counter(line.reasons[0].code for line in self.lines if line.kind == kind)
            rows += [f"  {kind}, {code}: {count:,}" for code, count in codes.most_common()]
        return rows

    def has_failed(self, *, is_strict: bool) -> bool:
        """Returns whether a rule was refused, or, if strict, is not exact."""
        return bool(self.count(REFUSED) or (is_strict and self.count(APPROXIMATED)))
