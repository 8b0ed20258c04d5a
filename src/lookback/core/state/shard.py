"""What a shard remembers between batches, and how it stands in the state store."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from lookback.core.aggregation.runs import Buckets, Run, combine_runs, make_run, merge_runs, remove_rows, subtract_rows
from lookback.core.errors import StateError
from lookback.core.rules.rulebook import RuleBook
from lookback.core.state.keyed import Key, KeyedTable, Pieces, Store, cut_text
from lookback.core.values.cache import SHARED, Cache
from lookback.core.values.columns import Mask, Values
from lookback.core.values.keys import Int64s, Keys, find_keys, number_keys
from lookback.core.values.pages import decode_page, encode_page
from lookback.core.values.times import NEVER_DUE
from lookback.core.values.windows import aligned

MANIFEST, _RULES, _SUPPRESSED = "manifest", "rules", "suppressed"
# As many runs of one size class stand side by side before they are merged into one of the next class, four times as large.
_FANOUT = 4
_SMALLEST_CLASS = 256
# No run is made of more rows by merging: it is read as a whole, and some 40 bytes a row in memory.
_MOST_MERGED = 2**22
# To count what stands of runs that lie across their floor, so many rows are looked at in a batch.
_MOST_COUNTED = 2**20
# Of a text in one row of a page.
_MOST_CHARACTERS = 2**26


@dataclass(eq=False)
class StoredRun:
    """A run with what is known of it before it is read. Times in microseconds; segment: the number of that which made it.

    due: of a feature with buckets, the time at which half of the run's rows can be combined, once it is closed.
    """

    run_id: str
    segment: int
    rows: int
    first_time: int
    middle_time: int
    last_time: int
    due: int = NEVER_DUE
    run: Run | None = None

    def evict(self) -> None:
        """Lets go of the run, which is in the store."""
        self.run = None

    def summary(self) -> list[Any]:
        """What the manifest keeps of it."""
        known = [self.run_id, self.segment, self.rows, self.first_time, self.middle_time, self.last_time]
        return known if self.due == NEVER_DUE else [*known, self.due]

    def emptied(self, resets: dict[Key, int], run: Run) -> Mask | None:
        """Which of the run's keys have been emptied since it was made, shape (keys,); None if none has."""
        since = [key for key, segment in resets.items() if segment > self.segment]
        if not since:
            return None
        halves = np.array(since, dtype=np.int64)
        _, wanted = number_keys(Keys(halves[:, 0], halves[:, 1]))
        mask: Mask = find_keys(run.keys, wanted) >= 0
        return mask if mask.any() else None


@dataclass
class FeatureState:
    """The rows of one feature, as sorted runs from oldest to newest; what a rule has of its own is in a keyed table.

    floor: an event below it counts in no window; None before the first commit. since: the highest event time when
    the feature started, before which its windows are incomplete; None if the stream was empty. width: how far below
    the watermark rows are kept. resets: per key the number of the segment in which an alert emptied its windows; rows of
    earlier ones do not count from then on. buckets: how rows are combined, of a feature with a resolution; closed: those
    before it may be.
    """

    floor: int | None = None
    since: int | None = None
    width: int = 0
    runs: list[StoredRun] = field(default_factory=list)
    resets: dict[Key, int] = field(default_factory=dict)
    buckets: Buckets | None = None
    closed: int = -NEVER_DUE

    def pass_time(self, watermark: int) -> None:
        """Raises the floor, and what is closed, to what the watermark says; they never fall."""
        floor = watermark - self.width
        if self.buckets is not None:
            floor = aligned(floor, self.buckets.resolution)
            self.closed = max(self.closed, self.buckets.closed(watermark))
        if self.floor is None or floor > self.floor:
            self.floor = floor

    def next_expiry(self, stored: StoredRun) -> int:
        """The watermark from which on half of a run is below the floor, or can be combined."""
        if self.buckets is None:
            return stored.middle_time + self.width + 1
        resolution = self.buckets.resolution
        times = [aligned(stored.middle_time, resolution) + self.width]
        if stored.due < NEVER_DUE:
            times.append(aligned(stored.due, resolution) + self.buckets.lag)
        return min(times) + resolution

    @property
    def complete_from(self) -> int | None:
        """The earliest window start that has all its events; None if any has."""
        bounds = [bound for bound in (self.floor, self.since) if bound is not None]
        return max(bounds) if bounds else None


class StateCounts(NamedTuple):
    """How much a shard keeps.

    rows: rows of window state that are not below their feature's floor (see `ShardState.state_rows`). remembered: what is
    kept beside them: keys that `suppress` holds back, keys that an alert has emptied, and verdicts and events that may
    still be revised.
    """

    rows: int
    remembered: int


@dataclass
class ShardState:
    """All that one shard keeps.

    high: highest event time of all commits so far; advanced: the watermark that an `advance` has set; last_commit:
    the last commit judged; segments: how many runs over events there were; tables: keyed tables by name; suppressed: per rule_id
    and group_by, the time of the last raised alert of each key; timer: when the shell will be woken to drop what is old, in its own
    unit; manifest: the page last saved or loaded; cache: which pages that were read or written stay in memory.
    origin: a text that no other state has, given when this one was first made; saves: how often it was saved.

    Given the same state, a batch writes the same pages under the same names, whatever attempt it is: a state store may
    keep the pages of a first attempt beside those of its repetition.
    """

    book: RuleBook
    high: int | None = None
    advanced: int | None = None
    last_commit: int | None = None
    segments: int = 0
    features: dict[str, FeatureState] = field(default_factory=dict)
    tables: dict[str, KeyedTable] = field(default_factory=dict)
    suppressed: dict[tuple[str, tuple[str, ...]], dict[Key, int]] = field(default_factory=dict)
    origin: str = ""
    saves: int = 0
    timer: int | None = None
    cache: Cache = SHARED

    def __post_init__(self) -> None:
        self._store: Store | None = None
        self._made = 0
        self._new: dict[str, StoredRun] = {}
        self._gone: list[str] = []
        self._saved_rules = self._saved_suppressed = ""
        self._pieces: dict[str, int] = {}
        self.manifest = b""

    def begin(self, store: Store) -> None:
        """Starts a batch that writes to `store`."""
        self._store, self._made = Pieces(store, self._pieces), 0
        self._new, self._gone = {}, []
        for table in self.tables.values():
            table.store = self._store

    def table(self, name: str) -> KeyedTable:
        """The keyed table of that name, made where there is none."""
        if name not in self.tables:
            self.tables[name] = KeyedTable(name, store=self._store, cache=self.cache)
        return self.tables[name]

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
        run = stored.run
        self.hold(stored)
        return run

    def hold(self, stored: StoredRun) -> None:
        """Notes that a run was used: it stays in memory while there is room, if it can be read again."""
        if self._store is not None and stored.run is not None and stored.run_id not in self._new:
            self.cache.hold(stored, stored.run.memory)

    def add_rows(
        self, feature: FeatureState, numbers: Int64s, keys: Keys, times: Int64s, values: Values | None
    ) -> None:
        """Adds rows that arrived after all others, as `make_run` takes them; merges runs where there are many of a size."""
        keep = times >= feature.floor if feature.floor is not None else np.ones(len(times), dtype=bool)
        if not keep.all():
            numbers, times, values = numbers[keep], times[keep], None if values is None else values[keep]
        if not len(times):
            return
        feature.runs.append(self._stored(feature, make_run(numbers, keys, times, values)))
        while self._merge_alike(feature):
            pass

    def drop_old(self) -> None:
        """Forgets runs that lie below their feature's floor, and rewrites those of which more than half does.

        Those of which half can be combined are rewritten too.
        """
        for feature in self.features.values():
            if feature.floor is not None:
                self._drop_below(feature, feature.floor)

    def forget_resets(self) -> None:
        """Forgets resets that concern no run any more, and tables of which nothing is left."""
        for feature in self.features.values():
            if feature.resets:
                oldest = min((stored.segment for stored in feature.runs), default=self.segments)
                feature.resets = {key: segment for key, segment in feature.resets.items() if segment > oldest}

    def _drop_below(self, feature: FeatureState, floor: int) -> None:
        for stored in [stored for stored in feature.runs if stored.last_time < floor]:
            self._forget(feature, stored)
        for at, stored in enumerate(feature.runs):
            if stored.middle_time < floor or stored.due < feature.closed:
                self._replace(feature, at, at + 1)

    def next_expiry(self) -> int | None:
        """The watermark from which on `drop_old` will find something to drop; None if never."""
        times = [feature.next_expiry(stored) for feature in self.features.values() for stored in feature.runs]
        return min(times) if times else None

    def reset(self, feature: FeatureState, keys: Iterable[Key]) -> None:
        """From now on the rows that earlier segments brought for these keys count no more."""
        for key in keys:
            feature.resets[key] = self.segments

    def remove_rows(self, feature: FeatureState, keys: Keys, times: Int64s, values: Values | None) -> bool:
        """Takes rows out again (a privacy request), from whichever run holds them.

        Returns whether one was not found, though there is a row of its key and time with another value: an event that was
        updated since it came, or another's. Without combined buckets alone: within one, times are not told apart.
        """
        if feature.buckets is not None:
            self._subtract(feature, feature.buckets, keys, times, values)
            return False
        left = np.arange(len(times))
        for at in range(len(feature.runs) - 1, -1, -1):
            if not len(left):
                return False
            part = None if values is None else values[left]
            run, held = remove_rows(self._living(feature, feature.runs[at]), keys.take(left), times[left], part)
            if len(held):
                left = np.delete(left, held)
                self._put_in_place(feature, at, at + 1, run)
        runs = (self._living(feature, stored) for stored in feature.runs)
        return any(bool(run.has_rows(keys.take(left), times[left]).any()) for run in runs if len(run))

    def drop_feature(self, feature_id: str) -> None:
        """Forgets a feature and its rows."""
        feature = self.features.pop(feature_id)
        for stored in list(feature.runs):
            self._forget(feature, stored)
        self.drop_table(feature_id)

    def adopt(self, former: str, name: str, is_own: Callable[[Any], bool]) -> None:
        """Moves what is a rule's own from the table that release 0.1.0 kept for all kinds of rules."""
        if former in self.tables:
            own, old = self.table(name), self.tables[former]
            own.notes.update(old.notes)
            for key, wake, value in old.items():
                if is_own(value):
                    own.put(key, value, wake)
            self.drop_table(former)

    def drop_due(self, name: str, watermark: int | None) -> None:
        """Forgets the keys of a table whose wake is reached, and the table with its last key."""
        table = self.tables[name]
        if watermark is not None:
            table.forget_due(watermark)
        if table.next_wake() is None:
            self.drop_table(name)

    def drop_table(self, name: str) -> None:
        """Forgets a keyed table, if there is one of that name."""
        if name in self.tables:
            self._gone += self.tables.pop(name).clear()

    def state_rows(self) -> int:
        """Rows of window state that are not below their feature's floor.

        A row is an event that a feature keeps, or all that are combined into one bucket of a `resolution`; an event that
        a session or a sequence keeps; or a wait of an absence.
        """
        total = 0
        for feature_id, feature in self.features.items():
            floor = _floor_of(feature)
            total += sum(int((self._living(feature, stored).times >= floor).sum()) for stored in feature.runs)
            if feature_id in self.tables:
                total += sum(_count_rows(value, floor) for value in self.tables[feature_id].values())
        return total

    def count_held(self) -> StateCounts:
        """What `state_rows` counts, and what is kept beside it, without reading any page.

        Rows of sessions and sequences are those that stood when their page was last written. Where a run lies across the
        floor, or has rows of emptied keys, its rows are looked at if it is in memory, up to a million of them; else all of
        them count.
        """
        rows, left = 0, _MOST_COUNTED
        for feature in self.features.values():
            floor, resets = _floor_of(feature), max(feature.resets.values(), default=-1)
            for stored in feature.runs:
                if stored.last_time < floor:
                    continue
                is_whole = stored.first_time >= floor and resets <= stored.segment
                if is_whole or stored.run is None or stored.rows > left:
                    rows += stored.rows
                else:
                    rows += int((self._living(feature, stored).times >= floor).sum())
                    left -= stored.rows
        rows += sum(table.rows for name, table in self.tables.items() if name in self.features)
        remembered = sum(map(len, self.suppressed.values())) + sum(len(f.resets) for f in self.features.values())
        remembered += sum(table.rows for name, table in self.tables.items() if name not in self.features)
        return StateCounts(rows, remembered)

    def save(self) -> None:
        """Writes what changed since `begin` to its store."""
        store = self._store
        if store is None:
            return
        self.saves += 1
        for name in self._gone:
            store.remove(name)
        for name, table in self.tables.items():
            feature = self.features.get(name)
            table.save(_count_memories if feature is None else partial(_count_rows, floor=_floor_of(feature)))
        new, self._new = self._new, {}
        for run_id, stored in new.items():
            assert stored.run is not None
            store.put(run_id, stored.run.encode())
            self.hold(stored)
        self._saved_rules = _put_changed(store, _RULES, self.book.to_json(), self._saved_rules)
        suppressed = [
            [rule_id, low, high, at, list(group_by)]
            for (rule_id, group_by), keys in self.suppressed.items()
            for (low, high), at in keys.items()
        ]
        self._saved_suppressed = _put_changed(store, _SUPPRESSED, json.dumps(suppressed), self._saved_suppressed)
        self.manifest = text_page(json.dumps(self._manifest(), separators=(",", ":")))
        store.put(MANIFEST, self.manifest)
        self._gone = []

    def load(self, store: Store, known: ShardState | None = None) -> bool:
        """Takes over what `save` wrote; False if the store is empty. known: a state whose runs are in memory already.

        Raises StateError where the pages are damaged.
        """
        self._pieces = {}
        pages = Pieces(store, self._pieces)
        page = pages.get(MANIFEST)
        if page is None:
            return False
        try:
            self._load(page, pages, known)
        except (LookupError, ValueError, TypeError, AttributeError, RecursionError, AssertionError) as error:
            raise StateError(
                f"{MANIFEST}: what a shard keeps is damaged ({type(error).__name__}: {error}); start with a new checkpoint"
            ) from error
        return True

    def _load(self, page: bytes, store: Store, known: ShardState | None) -> None:
        self.manifest = page
        manifest = json.loads(page_text(page, MANIFEST))
        self._pieces.update({str(name): int(count) for name, count in manifest.get("pieces", {}).items()})
        for name in ("high", "advanced", "last_commit", "origin", "saves", "timer"):
            setattr(self, name, manifest[name])
        self.segments = manifest["stretches"]
        in_memory = known.runs_in_memory() if known is not None and known.origin == self.origin else {}
        self.features = {}
        for feature_id, (floor, since, width, runs, resets, *more) in manifest["features"].items():
            stored = [StoredRun(*each) for each in runs]
            for each in stored:
                if each.run_id in in_memory:
                    self._take_over(each, in_memory[each.run_id])
            keys = {(low, high): segment for low, high, segment in resets}
            feature = self.features[feature_id] = FeatureState(floor, since, width, stored, keys)
            if more:
                feature.closed, feature.buckets = more[0], Buckets(*more[1:])
        self.tables = {
            name: KeyedTable.of_summary(name, each, store, self.cache) for name, each in manifest["tables"].items()
        }
        self._saved_rules = page_text(store.get(_RULES), _RULES)
        self.book.load(self._saved_rules)
        self._saved_suppressed = page_text(store.get(_SUPPRESSED), _SUPPRESSED)
        self.suppressed = {}
        # Release 0.1.0 did not keep the fields of a key; they are those of the version in force.
        former = {entry.rule_id: rule.group_by for entry, rule in self.book.in_force()}
        for rule_id, low, high, at, *group_by in json.loads(self._saved_suppressed):
            fields = tuple(group_by[0]) if group_by else former.get(rule_id, ())
            self.suppressed.setdefault((rule_id, fields), {})[low, high] = at

    def runs_in_memory(self) -> dict[str, StoredRun]:
        """The runs that need not be read again, by id."""
        stored = (stored for feature in self.features.values() for stored in feature.runs)
        return {each.run_id: each for each in stored if each.run is not None}

    def _take_over(self, stored: StoredRun, known: StoredRun) -> None:
        """Takes a run that another state has in memory, unless it was evicted there meanwhile."""
        if known.run is not None:
            stored.run = known.run
            self.cache.forget(known)
            self.cache.hold(stored, stored.run.memory)

    def _manifest(self) -> dict[str, Any]:
        features = {
            feature_id: [
                f.floor,
                f.since,
                f.width,
                [stored.summary() for stored in f.runs],
                [[low, high, segment] for (low, high), segment in f.resets.items()],
                *([f.closed, f.buckets.resolution, f.buckets.lag, f.buckets.function] if f.buckets else []),
            ]
            for feature_id, f in self.features.items()
        }
        return {
            "high": self.high, "advanced": self.advanced, "last_commit": self.last_commit, "stretches": self.segments,
            "origin": self.origin, "saves": self.saves, "timer": self.timer, "features": features,
            "tables": {name: table.summary() for name, table in self.tables.items()},
            **({"pieces": pieces} if (pieces := {n: c for n, c in self._pieces.items() if n != MANIFEST}) else {}),
        }  # fmt: skip

    def _stored(self, feature: FeatureState, run: Run) -> StoredRun:
        self._made += 1
        half = len(run) // 2
        stored = StoredRun(
            f"run:{self.saves}:{self._made}",
            self.segments,
            len(run),
            int(run.times.min()),
            int(np.partition(run.times, half)[half]),
            int(run.times.max()),
            run=run,
        )
        if feature.buckets is not None:
            # After the rows that are combined already there may be fewer than half of all.
            half += 0 if run.parts is None else int((run.times < feature.closed).sum())
            stored.due = int(np.partition(run.times, half)[half]) if half < len(run) else NEVER_DUE
        self._new[stored.run_id] = stored
        return stored

    def _forget(self, feature: FeatureState, stored: StoredRun) -> None:
        feature.runs.remove(stored)
        self._discard(stored)

    def _discard(self, stored: StoredRun) -> None:
        self.cache.forget(stored)
        if self._new.pop(stored.run_id, None) is None:
            self._gone.append(stored.run_id)

    def _merge_alike(self, feature: FeatureState) -> bool:
        runs = feature.runs
        newest = _size_class(runs[-1].rows) if runs else 0
        alike = sum(1 for _ in _take_while(reversed(runs), newest))
        if alike < _FANOUT or sum(stored.rows for stored in runs[-alike:]) > _MOST_MERGED:
            return False
        self._replace(feature, len(runs) - alike, len(runs))
        return bool(runs)

    def _replace(self, feature: FeatureState, start: int, end: int) -> None:
        runs = [self._living(feature, stored) for stored in feature.runs[start:end]]
        buckets, closed = feature.buckets, feature.closed
        if buckets is None or not any(run.parts is not None or (run.times < closed).any() for run in runs):
            run = merge_runs(runs, feature.floor)
        else:
            run = combine_runs(runs, feature.floor, buckets, closed)
        self._put_in_place(feature, start, end, run)

    def _subtract(
        self, feature: FeatureState, buckets: Buckets, keys: Keys, times: Int64s, values: Values | None
    ) -> None:
        """Takes rows out of a feature with buckets.

        All that is closed is combined before, and all of a bucket stands in one row: whether it was when the request
        came must not show.
        """
        if len(times) and feature.runs:
            runs = [self._living(feature, stored) for stored in feature.runs]
            run = combine_runs(runs, feature.floor, buckets, feature.closed)
            run = subtract_rows(run, keys, times, values, buckets, feature.closed)
            self._put_in_place(feature, 0, len(runs), run)

    def _living(self, feature: FeatureState, stored: StoredRun) -> Run:
        """The run less the rows of keys that were emptied since."""
        run = self.load_run(stored)
        emptied = stored.emptied(feature.resets, run)
        return run if emptied is None else run.take(~emptied[run.groups])

    def _put_in_place(self, feature: FeatureState, start: int, end: int, run: Run) -> None:
        for stored in feature.runs[start:end]:
            self._discard(stored)
        feature.runs[start:end] = [self._stored(feature, run)] if len(run) else []


def _floor_of(feature: FeatureState) -> int:
    return -NEVER_DUE if feature.floor is None else feature.floor


def _count_rows(value: Any, floor: int) -> int:
    """The rows of a key's session or sequence that are not below the floor."""
    return sum(1 for row in _rows_of(value) if row[0] >= floor)


def _rows_of(value: Any) -> Iterator[Any]:
    """The rows of a key, time first: those that may count, and waits."""
    yield from value.get("rows", ())
    yield from value.get("waits", ())


def _count_memories(value: Any) -> int:
    """How many verdicts, or events whose verdict may be revised, are remembered of a key."""
    return len(value["rows"] if isinstance(value, dict) else value)


def _take_while(runs: Iterable[StoredRun], size_class: int) -> Iterator[StoredRun]:
    for stored in runs:
        if _size_class(stored.rows) > size_class:
            return
        yield stored


def _size_class(rows: int) -> int:
    return (max(1, rows // _SMALLEST_CLASS).bit_length() + 1) // 2


def _put_changed(store: Store, name: str, text: str, before: str) -> str:
    if text != before:
        store.put(name, text_page(text))
    return text


def text_page(text: str) -> bytes:
    """The page of a text."""
    return encode_page([np.array(cut_text(text, _MOST_CHARACTERS), dtype=object)])


def page_text(page: bytes | None, name: str) -> str:
    """The text of a page that `text_page` made. Raises StateError, naming the page, for anything else."""
    arrays = decode_page(page or b"", name)
    assert arrays[0] is not None
    return "".join(arrays[0])
