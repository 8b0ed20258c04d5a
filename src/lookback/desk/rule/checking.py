"""Checks a rule as you write it: the problems and remarks of `lookback rules check`, each with its place and line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lookback.core.errors import Problem, RuleError
from lookback.core.rules.remarks import find_remarks
from lookback.core.values.texts import count_noun
from lookback.testing.rule_tests import check_rule
from lookback.verbs import describe_checked

if TYPE_CHECKING:
    from lookback.core.streams.declaration import Stream
    from lookback.desk.rule.text import RuleText


@dataclass(frozen=True)
class RuleFinding:
    """A problem or a remark, with its dotted path (empty for the whole document) and its line, counted from 1."""

    place: str
    message: str
    line: int


@dataclass(frozen=True)
class Checked:
    """The result of a check: problems to fix before publication, remarks, and the rule in words."""

    problems: list[RuleFinding]
    remarks: list[RuleFinding]
    words: str

    @property
    def is_fine(self) -> bool:
        """Whether the rule can be published."""
        return not self.problems


def check_text(text: RuleText, streams: Mapping[str, Stream]) -> Checked:
    """Checks the rule in a text against its stream, one of the declared `streams`, and runs its own tests."""
    try:
        rule = check_rule(text.document, streams)
    except RuleError as error:
        return Checked(_place(error.problems, text), [], f"{count_noun(len(error.problems), 'problem')} to fix")
    return Checked([], _place(find_remarks(rule), text), describe_checked(rule))


def find_nearest_place(place: str, known: Iterable[str]) -> str:
    """Finds the place of a finding, or the nearest enclosing one, among `known`; empty if there is none."""
    places = set(known)
    while place and place not in places:
        place = place[: max(place.rfind("."), place.rfind("["), 0)]
    return place


def _place(found: Iterable[Problem], text: RuleText) -> list[RuleFinding]:
    return [RuleFinding(each.place, each.message, text.parsed.find_line(each.place)) for each in found]
