"""Defers the events of sessions and sequences that are warming, until the history of their keys is loaded.

The state of a session or sequence depends on the order of its events. So events that arrive while a version is warming
are stored unchanged, each with the watermark that it is judged against. They are judged once the piece of history with
their key is loaded, with the same result as if the version had run silently from the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

import numpy as np

from lookback.core.errors import StateError
from lookback.core.judging.rulerun import RuleRun, SelectKeys
from lookback.core.judging.segment import Timeline
from lookback.core.judging.sequences import select_taken
from lookback.core.judging.sessions import open_measures
from lookback.core.rules.compiled import WARMING_LANE, CompiledRule
from lookback.core.rules.versions import Entry, Warming
from lookback.core.state.shard import ShardState
from lookback.core.streams.declaration import Stream
from lookback.core.streams.events import Events
from lookback.core.values.columns import Column, Mask, Values, from_values
from lookback.core.values.keycolumns import KeyColumns
from lookback.core.values.keys import Int64s, Keys
from lookback.core.values.pages import decode_page, encode_page
from lookback.core.values.types import BOOLEAN, DataType
from lookback.core.values.windows import SEQUENCE, SESSION


def _select_wanted(rule_run: RuleRun) -> Callable[[SelectKeys], Mask]:
    """Returns a function that marks the events that a session wants of some of the keys.

    Whether it accepts a late one is decided when it is judged.
    """
    open_measures(rule_run.state.table(rule_run.rule.store), rule_run.rule, rule_run.state.high)
    grouping = rule_run.grouping

    def mark_wanted(select: SelectKeys) -> Mask:
        # Events of other shards have no number.
        is_wanted: Mask = rule_run.wanted & np.append(select(grouping.distinct), np.array([False]))[grouping.numbers]
        return is_wanted

    return mark_wanted


_SELECTORS: dict[str, Callable[[RuleRun], Callable[[SelectKeys], Mask]]] = {
    SESSION: _select_wanted,
    SEQUENCE: select_taken,
}


def select_events(rule_run: RuleRun, is_loaded: SelectKeys) -> tuple[Mask, Mask]:
    """Marks the events of a segment that a warming version has to judge now, and those that it has to judge later.

    `is_loaded` marks the keys that have their history. An event with several keys may be among both.
    """
    mark = _SELECTORS[rule_run.spec.kind](rule_run)
    return mark(is_loaded), mark(lambda keys: ~is_loaded(keys))


def find_pieces(keys: Keys, shards: int, pieces: int) -> Int64s:
    """Returns for each key of a shard the number of its piece of history, from 1."""
    numbers: Int64s = keys.shard(shards * pieces) // shards + 1
    return numbers


def mark_loaded(warming: Warming, shards: int, keys: Keys) -> Mask:
    """Marks the keys of a shard that already have their history."""
    if not warming.loaded:
        return np.zeros(len(keys), dtype=bool)
    is_loaded: Mask = find_pieces(keys, shards, warming.pieces) <= warming.loaded
    return is_loaded


def has_deferred(state: ShardState, entry: Entry, rule: CompiledRule) -> bool:
    """Returns whether events of a version may be deferred: it is warming, and its state depends on their order."""
    warming = state.book.warming.get((entry.rule_id, entry.version)) if rule.lane >= WARMING_LANE else None
    # After `clear_state` the features are missing until events arrive.
    return warming is not None and not warming.is_replayed and rule.store in state.features


def encode_events(rule_run: RuleRun, selected: Mask) -> bytes:
    """Encodes the selected events of a segment as a page, with the watermarks of their commits."""
    at, timeline, rule = np.flatnonzero(selected), rule_run.timeline, rule_run.rule
    indexes, of_commit = np.unique(rule_run.commit_indexes[at], return_inverse=True)
    columns = [rule_run.events.columns[name] for name, _ in _list_columns(rule, rule_run.stream)]
    # A call of in_list with an error is neither true nor NULL.
    errors = [None if column.error is None else column.error[at] for column in columns[-len(rule.memberships) :]]
    head: list[Values | None] = [
        timeline.commits[indexes],
        timeline.before[indexes],
        timeline.after[indexes],
        of_commit.astype(np.int64),
    ]
    return encode_page([*head, *(errors if rule.memberships else ()), *KeyColumns.from_columns(columns, at).encode()])


def _decode_events(page: bytes, rule: CompiledRule, stream: Stream) -> tuple[Events, Timeline]:
    """Decodes a page of `encode_events`; raises StateError if it is damaged."""
    place, names = rule.store, _list_columns(rule, stream)
    commits, before, after, of_commit, *rest = decode_page(page, place)
    errors, arrays = rest[: len(rule.memberships)], rest[len(rule.memberships) :]
    if commits is None or before is None or after is None or of_commit is None:
        raise StateError(f"{place}: a page of window state holds something else; start with a new checkpoint")
    stored = KeyColumns.decode(arrays, len(of_commit), place)
    columns: dict[str, Column] = {}
    for at, (name, type_) in enumerate(names):
        error = errors[at - len(names)] if at >= len(names) - len(errors) else None
        columns[name] = _make_column(type_, stored.values[at], stored.nulls[at], error)
    return Events.of(columns, commits[of_commit], stream), Timeline(commits, before, after)


def list_no_events(rule: CompiledRule, stream: Stream) -> Events:
    """Makes an empty list of events with the columns of deferred events."""
    columns = {name: from_values(type_, []) for name, type_ in _list_columns(rule, stream)}
    return Events.of(columns, np.zeros(0, dtype=np.int64), stream)


def _list_columns(rule: CompiledRule, stream: Stream) -> list[tuple[str, DataType]]:
    """Lists the columns of deferred events with their types: fields first, then the results of list lookups."""
    fields = sorted({*rule.event_fields, *stream.key_columns})
    looked_up = [(membership.name, BOOLEAN) for membership in rule.memberships]
    return [*((name, stream.columns_of_events[name]) for name in fields), *looked_up]


def _make_column(type_: DataType, values: Values, unknown: Mask | None, error: Mask | None) -> Column:
    """Restores a column; `unknown` marks NULLs and errors, whose stored values may have another type."""
    values = values.astype(type_.storage, copy=False)
    if unknown is not None and values.dtype == np.dtype(object):
        values = values.copy()
        values[unknown] = 0 if type_.is_decimal else None
    null = unknown if unknown is None or error is None else unknown & ~error
    return Column(type_, values, null, error)


def read_deferred(
    pages: Iterable[bytes], rule: CompiledRule, stream: Stream, select: SelectKeys, most: int
) -> Iterator[tuple[Events, Timeline]]:
    """Yields the deferred events with a key that `select` marks, with their timeline, in parts of about `most` events.

    Events are in order of arrival.
    """
    parts: list[tuple[Events, Timeline]] = []
    for page in pages:
        events, timeline = _decode_events(page, rule, stream)
        is_selected = [select(events.find_keys(fields)) for fields, _ in rule.routes]
        events = events.take(np.logical_or.reduce(is_selected))
        if len(events):
            parts.append((events, timeline))
        if sum(len(each) for each, _ in parts) >= most:
            yield _join(parts)
            parts = []
    if parts:
        yield _join(parts)


def _join(parts: list[tuple[Events, Timeline]]) -> tuple[Events, Timeline]:
    commits, before, after = (
        np.concatenate([getattr(timeline, name) for _, timeline in parts]) for name in ("commits", "before", "after")
    )
    assert all(one < other for one, other in pairwise(commits.tolist()))
    return Events.join([events for events, _ in parts]), Timeline(commits, before, after)
