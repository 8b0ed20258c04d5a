"""Brings a version into force with the history of its windows: what it lacks, where it waits, and how it goes over.

In silence nothing that a rule keeps of lookback, tumbling and sliding windows depends on the order of its events: no alert resets
anything. So rows of before can be added behind.

A version that is warming keeps rows in features of its own, which no other rule sees. Rows that arrived before are made from
the table meanwhile, by a replay in which the version gathers rows and is silent, and come in pieces, each with some of the
keys. When all are there, its features take the places of those that rules share.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lookback.core.aggregation.runs import Run
from lookback.core.errors import StateError
from lookback.core.rules.compiled import CompiledRule
from lookback.core.state.shard import FeatureState, ShardState
from lookback.core.values.times import NEVER_DUE
from lookback.core.values.windows import LOOKBACK, SLIDING, TUMBLING

# Reads a piece of history by the name of its parcel, and the number of its part of the keys.
ReadParcel = Callable[[str, int], bytes]
_KINDS = (LOOKBACK, TUMBLING, SLIDING)
_HEAD = struct.Struct("<I")


def find_reason_cold(rule: CompiledRule) -> str | None:
    """Returns why a rule starts without its history, though its windows reach back; None if it need not."""
    if not rule.spec.warm_start:
        return "its document has warm_start: false"
    if rule.spec.kind not in _KINDS:
        return f"a {rule.spec.kind} depends on the order of its events"
    return None


def needs_history(state: ShardState, rule: CompiledRule, watermark: int | None) -> bool:
    """Returns whether a rule that can be warmed has windows that reach further back than its features hold."""
    if state.last_commit is None or watermark is None or find_reason_cold(rule) is not None:
        return False
    return any(not _holds(state.features.get(name), watermark - width) for name, width in rule.needs.items())


def _holds(feature: FeatureState | None, earliest: int) -> bool:
    """Returns whether a feature has all rows from a time on."""
    if feature is None:
        return False
    return feature.complete_from is None or feature.complete_from <= earliest


def open_features(state: ShardState, rule: CompiledRule) -> None:
    """Lets the features of a version begin, without rows. Those of another version that waited in its lane are dropped."""
    for name, width in rule.needs.items():
        if name in state.features:
            state.drop_feature(name)
        state.features[name] = FeatureState(since=state.high, width=width)
    for feature in rule.features:
        state.features[feature.feature_id].buckets = feature.buckets


@dataclass(frozen=True)
class History:
    """The rows that the windows of a rule need of some commits, of one shard or of some keys of it.

    floors, sinces, closed: of its features in their order (see `FeatureState`); runs: their rows, None for none. open_keys: of the
    table of keys with open windows: key, wake and value of each.
    """

    floors: list[int | None]
    sinces: list[int | None]
    closed: list[int]
    runs: list[Run | None]
    open_keys: list[tuple[tuple[int, int], int, Any]]

    @classmethod
    def empty(cls, rule: CompiledRule) -> History:
        """Returns the history of keys without a row."""
        count = len(rule.features)
        return cls([None] * count, [None] * count, [-NEVER_DUE] * count, [None] * count, [])

    @classmethod
    def of(cls, state: ShardState, rule: CompiledRule) -> History:
        """Takes the history of a rule out of a state in which it gathered rows. rule: with the features of the state."""
        features = [state.features[feature.feature_id] for feature in rule.features]
        runs = [state.gather_rows(feature.feature_id, feature.row_set) for feature in rule.features]
        table = state.tables.get(rule.open_keys)
        return cls(
            [each.floor for each in features], [each.since for each in features],
            [each.closed for each in features], runs,
            [] if table is None else list(table.items()),
        )  # fmt: skip

    def encode(self) -> bytes:
        """Encodes the history as bytes, which `decode` reads."""
        pages = [b"" if run is None else run.encode() for run in self.runs]
        header = {
            "floors": self.floors, "sinces": self.sinces, "closed": self.closed, "sizes": [len(page) for page in pages],
            "open_keys": self.open_keys,
        }  # fmt: skip
        text = json.dumps(header, separators=(",", ":")).encode()
        return b"".join([_HEAD.pack(len(text)), text, *pages])

    @classmethod
    def decode(cls, content: bytes, place: str) -> History:
        """Decodes what `encode` wrote. Raises StateError, naming `place`, if it is damaged."""
        try:
            (size,) = _HEAD.unpack_from(content)
            at = _HEAD.size + size
            header = json.loads(content[_HEAD.size : at])
            runs: list[Run | None] = []
            for length in header["sizes"]:
                runs.append(Run.decode(content[at : at + length], place) if length else None)
                at += length
            keys = [((int(low), int(high)), int(wake), value) for (low, high), wake, value in header["open_keys"]]
            return cls(list(header["floors"]), list(header["sinces"]), list(header["closed"]), runs, keys)
        except (struct.error, ValueError, TypeError, LookupError) as error:
            raise StateError(
                f"{place}: a piece of history is damaged ({error}); start the evaluation again, which makes it anew"
            ) from error

    def load(self, state: ShardState, rule: CompiledRule) -> None:
        """Adds the history to a state. rule: with the features in which its version waits."""
        columns = (rule.features, self.floors, self.sinces, self.closed, self.runs)
        for feature, floor, since, closed, run in zip(*columns, strict=True):
            held = state.features[feature.feature_id]
            # Both rise with the watermark alone, and the history may end where the version waits.
            held.floor = floor if held.floor is None else held.floor if floor is None else max(held.floor, floor)
            held.since, held.closed = since, max(held.closed, closed)
            if run is not None:
                state.add_history(feature.feature_id, run)
        if self.open_keys:
            table = state.table(rule.open_keys)
            for key, wake, value in self.open_keys:
                if table.find_wake(key) < wake:
                    table.put(key, value, wake)


def take_over(state: ShardState, waiting: CompiledRule, rule: CompiledRule) -> None:
    """Puts the features in which a version waited in the places of those that its rule shares, or will share."""
    for before, feature in zip(waiting.features, rule.features, strict=True):
        if before.feature_id in state.features:
            state.replace_feature(feature.feature_id, feature.row_set, before.feature_id)
