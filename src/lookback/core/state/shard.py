"""Keeps everything that one shard remembers between batches, and saves it to the state store.

    batch        1        2        3
    events    10:00    10:20    11:10        count(*) of a key in the last hour, with disorder of 5 minutes
    watermark  9:55    10:15    11:05
    runs      [10:00]  [10:00]  [10:20]      each batch adds its rows as a run; four small runs are merged into one
                       [10:20]  [11:10]      10:00 goes: no window that is still to be judged reaches below 10:05

A batch begins with `begin`, changes the state, and ends with `save`, which writes the new pages and the manifest. A
state is the same whether it stayed in memory or was loaded from its pages.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from lookback.core.errors import StateError
from lookback.core.rules.compiled import JUDGED, OPEN_KEYS
from lookback.core.rules.rulebook import RuleBook
from lookback.core.state.deferred import Deferred
from lookback.core.state.featurestate import FeatureState
from lookback.core.state.keyed import KeyedTable
from lookback.core.state.keyruns import Rows, split_text
from lookback.core.state.manifest import read_rows, write_features, write_row_sets
from lookback.core.state.pieces import FindFile, Pieces, Store
from lookback.core.state.storedruns import StoredRuns
from lookback.core.state.tables import RAISED, KeyedTables
from lookback.core.state.windowrows import RESETS, WindowRows
from lookback.core.streams.declaration import Stream
from lookback.core.streams.watermarks import Mark, MemberTimes, Reached, pass_marks
from lookback.core.values.cache import SHARED_CACHE, Cache
from lookback.core.values.pages import decode_page, encode_page
from lookback.core.values.times import NEVER

MANIFEST, _RULES = "manifest", "rules"
# Longer texts continue in the next row of their page.
_MAX_ROW_CHARACTERS = 2**26
# The fields that the manifest has as they are.
_PLAIN = ("high", "advanced", "last_commit", "origin", "declared")


class StateCounts(NamedTuple):
    """The size of the state of a shard.

    Attributes:
        rows: Rows of window state at or above their feature's floor (see `ShardState.state_rows`).
        remembered: Keys whose alerts `suppress` holds back, keys whose windows an alert emptied, keys with events that
            a window with a `resolution` discarded, and verdicts and events that may still be revised. It may include
            forgotten ones until their page is rewritten.
    """

    rows: int
    remembered: int


@dataclass
class ShardState:
    """Everything that one shard keeps.

    Each attempt of a batch on the same state writes the same pages under the same names, since a state store may keep
    the pages of a failed attempt next to those of its retry.

    Attributes:
        high: The highest event time of all commits so far.
        members: The event times of a union's members; empty for other streams.
        advanced: The watermark reached. It never falls, even if the stream is declared with more disorder or a command
            moved it.
        last_commit: The last commit judged.
        deferred: The events that warming versions have yet to judge, by the name of their keyed table.
        origin: A text unique to this state, set when it was created.
        declared: The mark of the declaration by which the last batch was judged (see `Declared.mark`).
        cache: Decides which pages stay in memory.
        runs: Loads, holds and saves the runs of window rows.
        tables: Keyed tables by name.
        windows: The rows of window state.
        manifest: The page last saved or loaded.
    """

    book: RuleBook
    high: int | None = None
    members: Mapping[str, MemberTimes] = field(default_factory=dict)
    advanced: int | None = None
    last_commit: int | None = None
    deferred: Deferred = field(default_factory=Deferred)
    origin: str = ""
    declared: str = ""
    cache: Cache = SHARED_CACHE

    def __post_init__(self) -> None:
        self.runs, self.tables = StoredRuns(self.cache), KeyedTables(self.cache)
        self.windows = WindowRows(self.runs, self.tables)
        self._saved_rules = ""
        self._pieces: dict[str, int] = {}
        self.manifest = b""

    @property
    def features(self) -> dict[str, FeatureState]:
        """The features by id."""
        return self.windows.features

    @property
    def lists_commit(self) -> int | None:
        """The last commit of table `lists` that the shard has applied; None before the first."""
        return self.book.lists_commit

    def begin(self, store: Store, find_file: FindFile = lambda _: None) -> None:
        """Starts a batch that writes to `store`; see `Pieces` for `find_file`."""
        pieces = Pieces(store, self._pieces, find_file)
        for each in (self.runs, self.tables):
            each.begin(pieces)
        self.deferred.use_store(pieces)

    def table(self, name: str) -> KeyedTable:
        """Returns the keyed table of that name, creating it if needed."""
        return self.tables.open(name)

    @property
    def reached(self) -> Reached:
        """The event times up to the last commit."""
        return Reached(self.high, self.members)

    @reached.setter
    def reached(self, reached: Reached) -> None:
        self.high, self.members = reached

    def watermark(self, stream: Stream, *, automatic: bool = True) -> int | None:
        """Returns the watermark after the last commit; None if the stream has none yet."""
        bounds = [] if self.advanced is None else [self.advanced]
        if automatic and (own := self.reached.watermark(stream)) != NEVER:
            bounds.append(own)
        return max(bounds) if bounds else None

    def pass_time(self, marks: Mapping[int, Mark | None], stream: Stream, *, automatic: bool = True) -> int | None:
        """Advances past these commits. Only this method raises the highest event times and the floors.

        `marks` has the mark of each commit, None if none of its events counts. `drop_old` later drops the rows below the
        floors. Returns the watermark after the commits.
        """
        if marks:
            self.last_commit = max(marks)
            passed = pass_marks(stream, self.reached, (marks[commit] for commit in sorted(marks)))
            self.reached, reached = passed.reached, int(passed.watermarks[-1])
            # That of a union may have been higher before the last commit.
            if automatic and reached != NEVER:
                self.advanced = reached if self.advanced is None else max(self.advanced, reached)
        watermark = self.advanced = self.watermark(stream, automatic=automatic)
        if watermark is not None:
            for feature in self.features.values():
                feature.pass_time(watermark)
        return watermark

    def drop_old(self) -> None:
        """Drops or rewrites runs with rows below the floors of their features."""
        self.windows.drop_old()

    def forget_unused(
        self,
        features: Collection[str],
        tables: Collection[str],
        raised: Mapping[str, tuple[int, int]],
        watermark: int | None,
    ) -> None:
        """Drops unused features and keyed tables, and keys that are due.

        Args:
            features: Names of the features to keep.
            tables: Names of the keyed tables to keep.
            raised: For each rule with `suppress`, by `Entry.role`, how long an alert suppresses later ones, and the
                allowed lateness.
            watermark: The watermark; None if the stream has none yet.
        """
        for feature_id in [feature_id for feature_id in self.features if feature_id not in features]:
            self.drop_feature(feature_id)
        for name in [name for name in self.tables if name not in features and name not in tables]:
            if name.startswith(JUDGED):
                self.tables.drop(name)
            elif not name.startswith((RAISED, RESETS)):
                # The memories of windows stay until they are due, since their version may come back and write more.
                if watermark is not None:
                    self.tables[name].forget_due(watermark)
                if next(self.tables[name].values(), None) is None:
                    self.tables.drop(name)
        self.tables.forget_raised(raised, watermark)
        self.windows.forget_resets()

    def drop_feature(self, feature_id: str) -> None:
        """Drops a feature, its rows, and its events that wait."""
        self.windows.drop(feature_id)
        self.deferred.drop(feature_id)

    def export_rows(self, name: str) -> list[Rows]:
        """Returns the rows of a session's or a sequence's keyed table, for `KeyedTable.add_rows`."""
        if name not in self.tables:
            return []
        return list(self.tables[name].export_rows(partial(_count_rows, floor=self.features[name].earliest)))

    def replace_table(self, name: str, by: str) -> None:
        """Replaces a session's or a sequence's feature and keyed table with those of `by`, which take over its name."""
        rows, notes = self.export_rows(by), self.table(by).notes
        feature = self.features[by]
        for each in (by, name):
            if each in self.features:
                self.drop_feature(each)
        self.features[name], table = feature, self.table(name)
        table.notes = notes
        for part in rows:
            table.add_rows(part)

    def clear(self) -> None:
        """Drops all features and their rows, raised alerts, keys with open windows, and events that may be revised."""
        self.windows.row_sets.clear()
        for feature_id in list(self.features):
            self.drop_feature(feature_id)
        for name in [name for name in self.tables if name.startswith((JUDGED, OPEN_KEYS, RAISED))]:
            self.tables.drop(name)

    def state_rows(self) -> int:
        """Counts the rows of window state at or above their feature's floor.

        A row is an event that a feature keeps, or the events combined into one bucket of a `resolution`; an event that
        a session or a sequence keeps or has yet to judge; or a wait for an absence.
        """
        total = self.deferred.events
        for feature_id, feature in self.features.items():
            total += self.windows.count_rows(feature_id)
            if feature_id in self.tables:
                total += sum(_count_rows(value, feature.earliest) for value in self.tables[feature_id].values())
        return total

    def estimate_counts(self) -> StateCounts:
        """Counts rows as `state_rows` does, and remembered keys, without reading any page.

        Rows of sessions and sequences count as of the last write of their key; see `WindowRows.estimate_rows` for those
        of windows.
        """
        rows = self.deferred.events + self.windows.estimate_rows()
        rows += sum(table.rows for name, table in self.tables.items() if name in self.features)
        return StateCounts(rows, sum(table.rows for name, table in self.tables.items() if name not in self.features))

    def save(self) -> None:
        """Writes all changes since `begin` to the store; does nothing without a store."""
        store = self.runs.store
        if store is None:
            return
        floors = {name: partial(_count_rows, floor=feature.earliest) for name, feature in self.features.items()}
        self.tables.save(floors, _count_memories)
        self.runs.save()
        self.deferred.save()
        rules = self.book.to_json()
        if rules != self._saved_rules:
            store.put(_RULES, encode_text(rules))
            self._saved_rules = rules
        self.manifest = encode_text(json.dumps(self._describe(), separators=(",", ":")))
        store.put(MANIFEST, self.manifest)
        self.runs.free_memory(self.windows.list_runs())

    def load(self, store: Store, known: ShardState | None = None) -> bool:
        """Reads what `save` wrote; returns False if the store is empty.

        Reuses the runs that the state `known` has in memory. Raises StateError if the pages are damaged.
        """
        self._pieces = {}
        pages = Pieces(store, self._pieces)
        page = pages.get(MANIFEST)
        if page is None:
            return False
        try:
            self.manifest = page
            self._read(json.loads(decode_text(page, MANIFEST)), pages)
        except (LookupError, ValueError, TypeError, AttributeError, RecursionError, AssertionError) as error:
            raise StateError(
                f"{MANIFEST}: the state of a shard is damaged ({type(error).__name__}: {error}); "
                "start with a new checkpoint"
            ) from error
        if known is not None and known.origin == self.origin:
            in_memory = {each.run_id: each for each in known.windows.list_runs()}
            for stored in self.windows.list_runs():
                self.runs.share(stored, in_memory)
        return True

    def _describe(self) -> dict[str, Any]:
        """Returns the manifest; `_read` reads it."""
        return {
            **{name: getattr(self, name) for name in _PLAIN},
            **({"members": self.members} if self.members else {}),
            "segments": self.windows.segments,
            "saves": self.runs.saves,
            "lists_commit": self.lists_commit,
            "features": write_features(self.features),
            "row_sets": write_row_sets(self.windows.row_sets.runs),
            "tables": {name: table.to_json() for name, table in self.tables.items()},
            "deferred": self.deferred.counts,
            "pieces": {name: count for name, count in self._pieces.items() if name != MANIFEST},
        }

    def _read(self, manifest: dict[str, Any], store: Store) -> None:
        for name in _PLAIN:
            setattr(self, name, manifest[name])
        members = manifest.get("members", {})
        self.members = {str(name): MemberTimes(int(high), int(heard)) for name, (high, heard) in members.items()}
        self._pieces.update({str(name): int(count) for name, count in manifest["pieces"].items()})
        self.windows.segments, self.runs.saves = manifest["segments"], manifest["saves"]
        self.book.lists_commit = manifest["lists_commit"]
        if self.lists_commit is not None and type(self.lists_commit) is not int:
            raise ValueError("the commit of lists is not an integer")
        read_rows(self.windows, manifest["features"], manifest["row_sets"])
        self.tables.clear()
        for name, row in manifest["tables"].items():
            self.tables[name] = KeyedTable.from_json(name, row, store, self.cache)
        self.deferred = Deferred.from_json(manifest["deferred"])
        self._saved_rules = decode_text(store.get(_RULES), _RULES)
        self.book.load(self._saved_rules)
        for feature_id, feature in self.features.items():
            feature.resets = self.tables.get(f"{RESETS}{feature_id}")


def _count_rows(value: Any, floor: int) -> int:
    """Counts the rows and waits of a key's session or sequence at or above the floor; each begins with its time."""
    return sum(1 for name in ("rows", "waits") for row in value.get(name, ()) if row[0] >= floor)


def _count_memories(value: Any) -> int:
    """Counts what is remembered for a key: verdicts, events that may be revised, a raised alert or a reset.

    Open windows do not count, since their rows do.
    """
    return 1 if isinstance(value, int) else len(value.get("rows", ()) if isinstance(value, dict) else value)


def encode_text(text: str) -> bytes:
    """Encodes a text as a page."""
    return encode_page([np.array(split_text(text, _MAX_ROW_CHARACTERS), dtype=object)])


def decode_text(page: bytes | None, name: str) -> str:
    """Decodes a page that `encode_text` wrote. Raises StateError, naming the page, for anything else."""
    arrays = decode_page(page or b"", name)
    assert arrays[0] is not None
    return "".join(arrays[0])
