"""Why an imported rule differs from its original, or is not taken over: a code, what it means, and what to do."""

from __future__ import annotations

from dataclasses import dataclass

from lookback.core.values.texts import collapse_spaces, cut_middle

# Code -> the remedy, or for an approximation how the alerts differ. docs/reference/import-reasons.md has a section for each.
APPROXIMATIONS = {
    "alias": "fewer alerts: an event that several members match counts under the key of the first",
    "analyzed": "fewer or more alerts: the text is looked for as it is written, whatever the case",
    "any-field": "fewer alerts: only the fields that the stream has are looked at",
    "array-key": "fewer alerts: the items of an array are a key together, not each by itself",
    "every-event": "other moments: the condition is asked at each event, and never between events",
    "exceptions": "more alerts: what the lists leave out is not left out; add it as `and not`",
    "fold": "fewer or more alerts: only for texts with letters whose capitals are not one to one",
    "list": "as the list says: fill it by `lookback lists import`",
    "nested": "more alerts: each value may be that of another object of the array",
    "paused": "more alerts, unless you push it and then pause it by `lookback rules pause`",
    "phase": "other moments: windows begin at multiples of the interval",
    "pipe": "more alerts: a pipe such as `| tail 1`, which keeps only some, is left out",
    "reuse": "more alerts: each first event waits, also if another one came after it",
    "schedule": "more alerts, or earlier ones: nothing waits for a run, or falls between two",
    "suppression": "more alerts: none is left out",
    "there": "other alerts than there, where the code has this fault",
}
REMEDIES = {
    "absence": "use one rule that must come and rules that must not, joined by `and not`",
    "aggregation": "write it as a Sigma correlation, such as event_count",
    "chain": "write a rule over the alerts of the correlation that it names",
    "check": "mend the original, or write the rule by hand",
    "command": "use a command: `rules retire`, `retire-all`, `clear-state` or `export`",
    "duplicate": "give each rule an id of its own",
    "elastic": "mend the original",
    "engine": "mend the original",
    "eql": "mend the query, or write the rule by hand",
    "esql": "write the rule by hand",
    "exists": "move the other file away, or give another --out",
    "file": "mend the file",
    "filter": "write the filter into the query",
    "function": "write the rule by hand",
    "indicators": "write the rule by hand, with a list for each value",
    "keywords": "name the fields to search as `keywords` in the --map file",
    "logsource": "add an entry for it to `logsources` in the --map file",
    "kql": "mend the query",
    "lucene": "write the query in KQL",
    "machine-learning": "write a rule with a long window, such as three times what is usual",
    "missing-rule": "give the file of that rule too",
    "nothing": "leave it out; it looks for nothing",
    "placeholder": "fill it with pySigma's value_placeholders in a --pipeline file",
    "python": "write its condition by hand; --skeletons writes the rest of the rule",
    "query": "leave query expressions out of the --pipeline file",
    "range": "compare with a number",
    "regex": "write the pattern as RE2 has it",
    "sample": "write a window with a count for each condition",
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
