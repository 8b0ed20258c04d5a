"""Why an imported rule differs from its original, or is not taken over: a code, what it means, and what to do."""

from __future__ import annotations

from dataclasses import dataclass

from lookback.core.values.texts import collapse_spaces, cut_middle

# Code -> the remedy, or for an approximation how the alerts differ. docs/bring-your-rules.md has a section for each.
APPROXIMATIONS = {
    "alias": "fewer alerts: an event that several members match counts under the key of the first",
    "every-event": "other moments: the condition is asked at each event, and never between events",
    "fold": "fewer or more alerts: only for texts with letters whose capitals are not one to one",
    "list": "as the list says: fill it by `lookback lists import`",
    "paused": "more alerts, unless you push it and then pause it by `lookback rules pause`",
    "phase": "other moments: windows begin at multiples of the interval",
    "schedule": "more alerts, or earlier ones: nothing waits for a run, or falls between two",
    "there": "other alerts than there, where the code has this fault",
}
REMEDIES = {
    "absence": "use one rule that must come and rules that must not, joined by `and not`",
    "aggregation": "write it as a Sigma correlation, such as event_count",
    "chain": "write a rule over the alerts of the correlation that it names",
    "check": "mend the original, or write the rule by hand",
    "command": "use a command: `rules retire`, `retire-all`, `clear-state` or `export`",
    "duplicate": "give each rule an id of its own",
    "engine": "mend the original",
    "exists": "move the other file away, or give another --out",
    "file": "mend the file",
    "keywords": "name the fields to search as `keywords` in the --map file",
    "logsource": "add an entry for it to `logsources` in the --map file",
    "missing-rule": "give the file of that rule too",
    "nothing": "leave it out; it looks for nothing",
    "placeholder": "fill it with pySigma's value_placeholders in a --pipeline file",
    "python": "write its condition by hand; --skeletons writes the rest of the rule",
    "query": "leave query expressions out of the --pipeline file",
    "regex": "write the pattern as RE2 has it",
    "scheduled-query": "write a rule over the events that the query reads",
    "sigma": "mend the original",
    "tests": "mend the test, or write the rule by hand",
    "too-long": "split the original into several rules",
    "type": "declare the field with a type that fits",
    "unmapped-field": "map it in the --map file, or declare it in the stream",
    "unsupported": "write the rule by hand",
    "yaml": "mend the file",
}
_MAX_CHARACTERS = 400


@dataclass(frozen=True)
class Reason:
    """One reason. code: one of APPROXIMATIONS or REMEDIES."""

    code: str
    text: str = ""

    def __str__(self) -> str:
        text = f"{self.code}: {self.text}" if self.text else self.code
        return cut_middle(collapse_spaces(text), _MAX_CHARACTERS)


class Refusal(Exception):
    """A rule cannot be taken over. Never leaves the package."""

    def __init__(self, code: str, text: str = "") -> None:
        self.reason = Reason(code, text)
        super().__init__(str(self.reason))
