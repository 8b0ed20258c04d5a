"""Lists the answers that in_list may have given for events that are now deleted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from lookback.core.expressions.compiling import Membership
from lookback.core.streams.events import Events
from lookback.core.values.lists import Lists

# With more calls than this there are too many combinations of answers to try them all.
_MAX_COMBINED = 4


def list_answers(events: Events, memberships: Sequence[Membership], lists: Lists) -> Iterator[Events]:
    """Yields events with today's answers, then with each other combination of answers that they may have had.

    State has no event ids, so the row of an event is found by its key, time and value, given some combination of
    answers. If two events agree in all of these, and only one of them was kept because their answers differed, then
    deleting either one removes the row. With more than four calls, it tries the combinations with up to two changed
    answers, and the one with all answers changed.
    """
    calls = [membership.name for membership in memberships]
    most = len(calls) if len(calls) <= _MAX_COMBINED else 2
    for count in range(most + 1):
        for turned in combinations(calls, count):
            yield _turn(events, memberships, lists, frozenset(turned))
    if most < len(calls):
        yield _turn(events, memberships, lists, frozenset(calls))


def _turn(events: Events, memberships: Sequence[Membership], lists: Lists, turned: frozenset[str]) -> Events:
    """Looks events up and negates the answers of some calls; NULLs and errors do not depend on the lists."""
    for membership in memberships:
        events = events.look_up([membership], lists)
        if membership.name in turned:
            column = events.columns[membership.name]
            events = events.with_column(membership.name, replace(column, values=~column.values))
    return events
