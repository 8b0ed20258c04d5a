"""Lists the answers that in_list may have given about events that are deleted now."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from lookback.core.expressions.compiling import Membership
from lookback.core.streams.events import Events
from lookback.core.values.lists import Lists

# Of more calls than this, all combinations of answers are too many to try.
_MOST_COMBINED = 4


def list_answers(events: Events, memberships: Sequence[Membership], lists: Lists) -> Iterator[Events]:
    """Yields events with the answers of today, then with each other combination of answers that they may have had.

    State has no ids, so what an event left behind is found by its key, time and value, as far as some answer explains
    them. Where two events are alike in these and one of them was not kept, since its answer was another one, deleting either
    removes the row. Of more than four calls, no combination of more than two other answers is tried, and the one in which all
    are others.
    """
    calls = [membership.name for membership in memberships]
    most = len(calls) if len(calls) <= _MOST_COMBINED else 2
    for count in range(most + 1):
        for turned in combinations(calls, count):
            yield _turn(events, memberships, lists, frozenset(turned))
    if most < len(calls):
        yield _turn(events, memberships, lists, frozenset(calls))


def _turn(events: Events, memberships: Sequence[Membership], lists: Lists, turned: frozenset[str]) -> Events:
    """Returns events with answers, some of which are turned around; NULLs and errors are the same whatever is in lists."""
    for membership in memberships:
        events = events.look_up([membership], lists)
        if membership.name in turned:
            column = events.columns[membership.name]
            events = events.with_column(membership.name, replace(column, values=~column.values))
    return events
