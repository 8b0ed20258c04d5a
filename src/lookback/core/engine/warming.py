"""Warms up a version: finds the history that its windows lack, loads it, and brings the version into force.

While a version is warming, it keeps rows in features of its own, which no other rule sees. Meanwhile a replay rebuilds
the earlier rows from the table: it runs the version silently, to gather rows. They arrive in pieces, each with some of
the keys. Once all pieces are loaded, the features of the version replace those that rules share.

As long as a rule is silent, no alert resets its windows. So the state of lookback, tumbling and sliding windows does
not depend on the order of events, and earlier rows can be added afterwards. The state of sessions and sequences does
depend on the order: see `deferral`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lookback.core.aggregation.runs import Run
from lookback.core.errors import StateError
from lookback.core.judging.sessions import adopt_measures, has_measures, open_measures
from lookback.core.rules.compiled import CompiledRule
from lookback.core.rules.versions import Warming
from lookback.core.state.featurestate import FeatureState
from lookback.core.state.keyed import KeyedTable
from lookback.core.state.keyruns import Rows
from lookback.core.state.shard import ShardState
from lookback.core.values.times import NEVER_DUE
from lookback.core.values.windows import SESSION, Session

# Reads a piece of history, given the name of its parcel and the number of its part of the keys.
ReadParcel = Callable[[str, int], bytes]
_HEAD = struct.Struct("<I")


def find_reason_cold(rule: CompiledRule) -> str | None:
    """Returns why a rule must start without the history of its windows; None if it can be warmed."""
    return None if rule.spec.warm_start else "its document has warm_start: false"


def needs_history(state: ShardState, rule: CompiledRule, watermark: int | None) -> bool:
    """Returns whether a rule can be warmed and its windows reach further back than the rows of its features."""
    if state.last_commit is None or watermark is None or find_reason_cold(rule) is not None:
        return False
    if any(not _holds(state.features.get(name), watermark - width) for name, width in rule.needs.items()):
        return True
    # The rows of a session may be older than a measure that was added later.
    return bool(rule.measured) and not has_measures(
        state.tables.get(rule.store), rule, watermark - rule.needs[rule.store]
    )


def _holds(feature: FeatureState | None, earliest: int) -> bool:
    """Returns whether a feature has all rows from `earliest` on."""
    if feature is None:
        return False
    return feature.complete_from is None or feature.complete_from <= earliest


def find_reach(rule: CompiledRule) -> int | None:
    """Finds how far below the watermark the history of a rule reaches, in microseconds; None if any event may count.

    A session begins where the one before it ended, and so does a match with fixed expiry. Any earlier event may affect
    that.
    """
    return None if find_gap(rule) is not None else max(rule.needs.values()) + _find_wait(rule)


def find_earliest(state: ShardState, rule: CompiledRule, watermark: int | None) -> int | None:
    """Finds the time before which events no longer count for a rule; None if all may count, or if it is unknown."""
    floors = [_find_floor(state.features.get(name), width, watermark) for name, width in rule.needs.items()]
    known = [floor for floor in floors if floor is not None]
    return None if find_gap(rule) is not None or len(known) < len(floors) else min(known) - _find_wait(rule)


def find_gap(rule: CompiledRule) -> int | None:
    """Finds the gap without events of a key after which a rule starts over, in microseconds; None if it never does."""
    if isinstance(rule.window, Session):
        return rule.window.gap
    sequence = rule.spec.sequence
    return sequence.within if sequence is not None and sequence.expiry == "fixed" else None


def find_settled(rule: CompiledRule, watermark: int | None) -> int | None:
    """Finds the latest time with nothing open at a watermark, if the gap after it has no events; None for other rules.

    Then the session is closed for good, the match and its waits have ended, and any event that still arrives is too
    late.
    """
    gap = find_gap(rule)
    if gap is None or watermark is None:
        return None
    return watermark - rule.allowed_lateness - _find_wait(rule) - gap - 1


def _find_wait(rule: CompiledRule) -> int:
    """Finds how long ago an open wait may have begun; it names the events of the steps before it."""
    absent = None if rule.sequence is None else rule.sequence.absent
    return 0 if absent is None else absent.step.within


def _find_floor(feature: FeatureState | None, width: int, watermark: int | None) -> int | None:
    """Returns the time below which no row counts for a feature; None if it is not yet known."""
    if feature is not None and feature.floor is not None:
        return feature.floor
    return None if watermark is None else watermark - width


def list_lost(state: ShardState) -> list[Warming]:
    """Lists the warming versions whose features have new names because the declaration of the stream changed."""
    return [
        each
        for each in state.book.list_known_warming()
        if not (each.is_replayed or each.is_void or each.entry.broken)
        and (rule := state.book.compile_warming(each)) is not None
        and not all(name in state.features for name in rule.needs)
    ]


def open_features(state: ShardState, rule: CompiledRule) -> None:
    """Opens the features of a version without rows, and drops those of another version that waited in its lane."""
    for name, width in rule.needs.items():
        if name in state.features:
            state.drop_feature(name)
        state.features[name] = FeatureState(since=state.high, width=width)
    for feature in rule.features:
        held = state.features[feature.feature_id]
        held.buckets, held.row_set = feature.buckets, feature.row_set


def _list_states(rule: CompiledRule) -> tuple[str, ...]:
    """Lists the ids of a rule's features in order; for a session or sequence, the id of its keyed table."""
    return (rule.store,) if rule.store else tuple(feature.feature_id for feature in rule.features)


@dataclass(frozen=True)
class WindowHistory:
    """The rows from earlier commits that the windows of a rule need, for one shard or some of its keys.

    Attributes:
        floors: The `floor` of each feature in order (see `FeatureState`), or of the table of a session or sequence.
        sinces: Their `since`.
        closed: Their `closed`.
        runs: The rows of each feature; None if it has none.
        open_keys: The key, wake and value of each entry in the table of keys with open windows.
        rows: The rows of the table of a session or sequence.
        notes: The notes of that table.
    """

    floors: list[int | None]
    sinces: list[int | None]
    closed: list[int]
    runs: list[Run | None]
    open_keys: list[tuple[tuple[int, int], int, Any]]
    rows: list[Rows] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def empty(cls, rule: CompiledRule, high: int | None = None) -> WindowHistory:
        """Makes a history without rows; `high` is the highest event time before the commits that were read."""
        count, table = len(_list_states(rule)), KeyedTable("")
        if rule.spec.kind == SESSION:
            open_measures(table, rule, high)
        runs: list[Run | None] = [None] * len(rule.features)
        return cls([None] * count, [high] * count, [-NEVER_DUE] * count, runs, [], notes=table.notes)

    @classmethod
    def of(cls, state: ShardState, rule: CompiledRule) -> WindowHistory:
        """Extracts the history of a rule from a state where it gathered rows; `rule` has the features of that state."""
        states = [state.features[name] for name in _list_states(rule)]
        runs = [state.windows.gather_rows(feature.feature_id) for feature in rule.features]
        open_keys, table = state.tables.get(rule.open_keys), state.tables.get(rule.store)
        return cls(
            [each.floor for each in states],
            [each.since for each in states],
            [each.closed for each in states],
            runs,
            [] if open_keys is None else list(open_keys.items()),
            state.export_rows(rule.store),
            {} if table is None else table.notes,
        )

    def encode(self) -> bytes:
        """Encodes the history as bytes for `decode`."""
        pages = [b"" if run is None else run.encode() for run in self.runs]
        of_table = [rows.encode() for rows in self.rows]
        header = {
            "floors": self.floors,
            "sinces": self.sinces,
            "closed": self.closed,
            "sizes": [len(page) for page in pages],
            "open_keys": self.open_keys,
            "of_table": [len(page) for page in of_table],
            "notes": self.notes,
        }
        text = json.dumps(header, separators=(",", ":")).encode()
        return b"".join([_HEAD.pack(len(text)), text, *pages, *of_table])

    @classmethod
    def decode(cls, content: bytes, place: str) -> WindowHistory:
        """Decodes the output of `encode`; raises StateError, naming `place`, if it is damaged."""
        try:
            (size,) = _HEAD.unpack_from(content)
            at = _HEAD.size + size
            header = json.loads(content[_HEAD.size : at])
            runs: list[Run | None] = []
            for length in header["sizes"]:
                runs.append(Run.decode(content[at : at + length], place) if length else None)
                at += length
            rows = []
            for length in header["of_table"]:
                rows.append(Rows.decode(content[at : at + length], place))
                at += length
            keys = [((int(low), int(high)), int(wake), value) for (low, high), wake, value in header["open_keys"]]
            floors, sinces, closed = (list(header[name]) for name in ("floors", "sinces", "closed"))
            return cls(floors, sinces, closed, runs, keys, rows, dict(header["notes"]))
        except (struct.error, ValueError, TypeError, LookupError) as error:
            raise StateError(
                f"{place}: a piece of history is damaged ({error}); restart the evaluation to rebuild it"
            ) from error

    def load(self, state: ShardState, rule: CompiledRule) -> None:
        """Adds the history to a state; `rule` has the features in which its version waits."""
        bounds = (_list_states(rule), self.floors, self.sinces, self.closed)
        for name, floor, since, closed in zip(*bounds, strict=True):
            held = state.features[name]
            # Both rise only with the watermark, and the history may end where the version waits.
            held.floor = floor if held.floor is None else held.floor if floor is None else max(held.floor, floor)
            held.since, held.closed = since, max(held.closed, closed)
        for feature, run in zip(rule.features, self.runs, strict=True):
            if run is not None:
                state.windows.add_history(
                    feature.feature_id, run, partial(Run.prepare, name=feature.function, aggregate=feature.aggregate)
                )
        if rule.store:
            for rows in self.rows:
                state.table(rule.store).add_rows(rows)
            adopt_measures(state.table(rule.store), rule, self.notes)
        if self.open_keys:
            table = state.table(rule.open_keys)
            for key, wake, value in self.open_keys:
                if table.find_wake(key) < wake:
                    table.put(key, value, wake)


def take_over(state: ShardState, waiting: CompiledRule, rule: CompiledRule) -> None:
    """Replaces the features that a rule shares, or will share, with those in which its version waited."""
    for before, feature in zip(waiting.features, rule.features, strict=True):
        if before.feature_id in state.features:
            state.windows.replace(feature.feature_id, before.feature_id)
            state.features[feature.feature_id].row_set = feature.row_set
    if rule.store and waiting.store in state.features:
        state.replace_table(rule.store, waiting.store)
        adopt_measures(state.table(rule.store), rule, state.table(rule.store).notes)
