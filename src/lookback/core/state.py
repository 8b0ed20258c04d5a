"""What a shard remembers between batches, and how it stands in the state store."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from lookback.core.columns import Values
from lookback.core.keys import Int64s, Keys
from lookback.core.pages import decode_page, encode_page
from lookback.core.rulebook import RuleBook
from lookback.core.runs import Run, make_run, merge_runs, remove_rows

MANIFEST, _RULES, _SUPPRESSED = "manifest", "rules", "suppressed"
# As many runs of one size class stand side by side before they are merged into one of the next class, four times as large.
_FANOUT = 4
_SMALLEST_CLASS = 256


class Store(Protocol):
    """Where pages are kept: RocksDB in a stream, a dict in tests."""

    def get(self, name: str) -> bytes | None:
        """The page of that name; None if there is none."""

    def put(self, name: str, page: bytes) -> None:
        """Keeps a page, in place of one of the same name."""

    def remove(self, name: str) -> None:
        """Forgets a page; it exists."""


@dataclass(eq=False)
class StoredRun:
    """A run with what is known of it before it is read. Times in microseconds."""

    run_id: str
    rows: int
    first_time: int
    middle_time: int
    last_time: int
    run: Run | None = None


@dataclass
class FeatureState:
    """The rows of one feature, as sorted runs from oldest to newest.

    floor: an event below it counts in no window; None before the first commit. since: the highest event time when
    the feature started, before which its windows are incomplete; None if the stream was empty. width: how far below
    the watermark rows are kept.
    """

    floor: int | None = None
    since: int | None = None
    width: int = 0
    runs: list[StoredRun] = field(default_factory=list)

    @property
    def complete_from(self) -> int | None:
        """The earliest window start that has all its events; None if any has."""
        bounds = [bound for bound in (self.floor, self.since) if bound is not None]
        return max(bounds) if bounds else None

    def rows(self, load: Any) -> int:
        """Rows that are not below the floor."""
        if self.floor is None:
            return sum(stored.rows for stored in self.runs)
        return sum(int((load(stored).times >= self.floor).sum()) for stored in self.runs)


@dataclass
class ShardState:
    """All that one shard keeps.

    high: highest event time of all commits so far; advanced: the watermark that an `advance` has set; last_commit:
    the last commit judged; suppressed: per rule_id, the time of the last raised alert of each key (its two halves);
    timer: when the shell will be woken to drop what is old, in its own unit; manifest: the page last saved or loaded.
    origin: a text that no other state has, given when this one was first made; saves: how often it was saved.

    Given the same state, a batch writes the same pages under the same names, whatever attempt it is: a state store may
    keep the pages of a first attempt beside those of its repetition.
    """

    book: RuleBook
    high: int | None = None
    advanced: int | None = None
    last_commit: int | None = None
    features: dict[str, FeatureState] = field(default_factory=dict)
    suppressed: dict[str, dict[tuple[int, int], int]] = field(default_factory=dict)
    origin: str = ""
    saves: int = 0
    timer: int | None = None

    def __post_init__(self) -> None:
        self._store: Store | None = None
        self._made = 0
        self._new: dict[str, StoredRun] = {}
        self._gone: list[str] = []
        self._saved_rules = self._saved_suppressed = ""
        self.manifest = b""

    def begin(self, store: Store) -> None:
        """Starts a batch that writes to `store`."""
        self._store, self._made = store, 0
        self._new, self._gone = {}, []

    def watermark(self, max_out_of_orderness: int, *, automatic: bool = True) -> int | None:
        """The watermark after the last commit; None if there is none yet."""
        bounds = [] if self.advanced is None else [self.advanced]
        if automatic and self.high is not None:
            bounds.append(self.high - max_out_of_orderness)
        return max(bounds) if bounds else None

    def load_run(self, stored: StoredRun) -> Run:
        """The run, read from the store unless it is in memory."""
        if stored.run is None:
            assert self._store is not None
            page = self._store.get(stored.run_id)
            stored.run = Run.decode(page or b"", stored.run_id)
        return stored.run

    def add_rows(self, feature: FeatureState, keys: Keys, times: Int64s, values: Values | None) -> None:
        """Adds rows that arrived after all others; merges runs where there are many of a size."""
        keep = times >= feature.floor if feature.floor is not None else np.ones(len(times), dtype=bool)
        if not keep.all():
            keys, times, values = keys.take(keep), times[keep], None if values is None else values[keep]
        if not len(times):
            return
        self._append(feature, make_run(keys, times, values))
        while self._merge_alike(feature):
            pass

    def drop_old(self) -> None:
        """Forgets runs that lie below their feature's floor, and rewrites those of which more than half does."""
        for feature in self.features.values():
            if feature.floor is not None:
                self._drop_below(feature, feature.floor)

    def _drop_below(self, feature: FeatureState, floor: int) -> None:
        for stored in [stored for stored in feature.runs if stored.last_time < floor]:
            self._forget(feature, stored)
        for at, stored in enumerate(feature.runs):
            if stored.middle_time < floor:
                self._replace(feature, at, at + 1)

    def next_expiry(self) -> int | None:
        """The watermark from which on `drop_old` will find something to drop; None if never."""
        times = [
            stored.middle_time + feature.width + 1 for feature in self.features.values() for stored in feature.runs
        ]
        return min(times) if times else None

    def remove_rows(self, feature: FeatureState, keys: Keys, times: Int64s, values: Values | None) -> None:
        """Takes rows out again (a privacy request), from whichever run holds them."""
        left = np.arange(len(times))
        for at in range(len(feature.runs) - 1, -1, -1):
            if not len(left):
                return
            part = None if values is None else values[left]
            run, held = remove_rows(self.load_run(feature.runs[at]), keys.take(left), times[left], part)
            if len(held):
                left = np.delete(left, held)
                self._put_in_place(feature, at, at + 1, run)

    def drop_feature(self, feature_id: str) -> None:
        """Forgets a feature and its rows."""
        feature = self.features.pop(feature_id)
        for stored in list(feature.runs):
            self._forget(feature, stored)

    def state_rows(self) -> int:
        """Rows of window state that are not below their feature's floor."""
        return sum(feature.rows(self.load_run) for feature in self.features.values())

    def save(self) -> None:
        """Writes what changed since `begin` to its store."""
        store = self._store
        if store is None:
            return
        self.saves += 1
        for run_id in self._gone:
            store.remove(run_id)
        for run_id, stored in self._new.items():
            assert stored.run is not None
            store.put(run_id, stored.run.encode())
        self._saved_rules = _put_changed(store, _RULES, self.book.to_json(), self._saved_rules)
        suppressed = [
            [rule, low, high, at] for rule, keys in self.suppressed.items() for (low, high), at in keys.items()
        ]
        self._saved_suppressed = _put_changed(store, _SUPPRESSED, json.dumps(suppressed), self._saved_suppressed)
        self.manifest = _text_page(json.dumps(self._manifest(), separators=(",", ":")))
        store.put(MANIFEST, self.manifest)
        self._new, self._gone = {}, []

    def load(self, store: Store, known: ShardState | None = None) -> bool:
        """Takes over what `save` wrote; False if the store is empty. known: a state whose runs are in memory already."""
        page = store.get(MANIFEST)
        if page is None:
            return False
        self.manifest = page
        manifest = json.loads(_page_text(page, MANIFEST))
        for name in ("high", "advanced", "last_commit", "origin", "saves", "timer"):
            setattr(self, name, manifest[name])
        in_memory = known.runs_in_memory() if known is not None and known.origin == self.origin else {}
        self.features = {}
        for feature_id, (floor, since, width, runs) in manifest["features"].items():
            stored = [StoredRun(*each) for each in runs]
            for each in stored:
                each.run = in_memory.get(each.run_id)
            self.features[feature_id] = FeatureState(floor, since, width, stored)
        self._saved_rules = _page_text(store.get(_RULES), _RULES)
        self.book.load(self._saved_rules)
        self._saved_suppressed = _page_text(store.get(_SUPPRESSED), _SUPPRESSED)
        self.suppressed = {}
        for rule, low, high, at in json.loads(self._saved_suppressed):
            self.suppressed.setdefault(rule, {})[low, high] = at
        return True

    def runs_in_memory(self) -> dict[str, Run]:
        """The runs that need not be read again, by id."""
        stored = (stored for feature in self.features.values() for stored in feature.runs)
        return {each.run_id: each.run for each in stored if each.run is not None}

    def _manifest(self) -> dict[str, Any]:
        features = {
            feature_id: [
                f.floor,
                f.since,
                f.width,
                [[r.run_id, r.rows, r.first_time, r.middle_time, r.last_time] for r in f.runs],
            ]
            for feature_id, f in self.features.items()
        }
        return {
            "high": self.high, "advanced": self.advanced, "last_commit": self.last_commit, "origin": self.origin,
            "saves": self.saves, "timer": self.timer, "features": features,
        }  # fmt: skip

    def _append(self, feature: FeatureState, run: Run) -> None:
        feature.runs.append(self._stored(run))

    def _stored(self, run: Run) -> StoredRun:
        self._made += 1
        ordered = np.partition(run.times, len(run) // 2)
        stored = StoredRun(
            f"run:{self.saves}:{self._made}",
            len(run),
            int(run.times.min()),
            int(ordered[len(run) // 2]),
            int(run.times.max()),
            run,
        )
        self._new[stored.run_id] = stored
        return stored

    def _forget(self, feature: FeatureState, stored: StoredRun) -> None:
        feature.runs.remove(stored)
        self._discard(stored)

    def _discard(self, stored: StoredRun) -> None:
        if self._new.pop(stored.run_id, None) is None:
            self._gone.append(stored.run_id)

    def _merge_alike(self, feature: FeatureState) -> bool:
        runs = feature.runs
        newest = _size_class(runs[-1].rows) if runs else 0
        alike = sum(1 for _ in _take_while(reversed(runs), newest))
        if alike < _FANOUT:
            return False
        self._replace(feature, len(runs) - alike, len(runs))
        return bool(runs)

    def _replace(self, feature: FeatureState, start: int, end: int) -> None:
        merged = merge_runs([self.load_run(stored) for stored in feature.runs[start:end]], feature.floor)
        self._put_in_place(feature, start, end, merged)

    def _put_in_place(self, feature: FeatureState, start: int, end: int, run: Run) -> None:
        for stored in feature.runs[start:end]:
            self._discard(stored)
        feature.runs[start:end] = [self._stored(run)] if len(run) else []


def _take_while(runs: Iterable[StoredRun], size_class: int) -> Iterator[StoredRun]:
    for stored in runs:
        if _size_class(stored.rows) > size_class:
            return
        yield stored


def _size_class(rows: int) -> int:
    return (max(1, rows // _SMALLEST_CLASS).bit_length() + 1) // 2


def _put_changed(store: Store, name: str, text: str, before: str) -> str:
    if text != before:
        store.put(name, _text_page(text))
    return text


def _text_page(text: str) -> bytes:
    return encode_page([np.array([text], dtype=object)])


def _page_text(page: bytes | None, name: str) -> str:
    arrays = decode_page(page or b"", name)
    assert arrays[0] is not None
    return str(arrays[0][0])
