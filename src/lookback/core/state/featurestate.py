"""The state of one feature: its rows, and how far they reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lookback.core.aggregation.runs import Buckets, Run, combine_runs, merge_runs
from lookback.core.state.keyed import KeyedTable
from lookback.core.state.storedruns import StoredRun
from lookback.core.values.keys import Int64s, Keys, find_keys, number_keys
from lookback.core.values.times import NEVER_DUE
from lookback.core.values.windows import align_down


@dataclass
class FeatureState:
    """The state of one feature: its rows, and how far they reach. State that belongs to one rule is in a keyed table.

    Attributes:
        floor: Events below it count in no window; None before the first commit.
        since: The highest event time when the feature started, before which its windows are incomplete; None if the
            stream was empty.
        width: How far below the watermark rows are kept.
        runs: Sorted rows, from oldest to newest, that the feature shares with no other feature, because they can be
            combined or emptied, or are history.
        row_set: The name in `RowSets.runs` of the rows that it shares; see `rules.compiled.Feature`.
        resets: For each key, the number of the segment in which an alert emptied its windows: its rows of earlier
            segments no longer count. None if no windows were emptied.
        buckets: How rows are combined, for a feature with a `resolution`.
        closed: Rows before it may be combined.
    """

    floor: int | None = None
    since: int | None = None
    width: int = 0
    runs: list[StoredRun] = field(default_factory=list)
    row_set: str = ""
    resets: KeyedTable | None = None
    buckets: Buckets | None = None
    closed: int = -NEVER_DUE

    def pass_time(self, watermark: int) -> None:
        """Raises `floor` and `closed` to match the watermark; they never fall."""
        floor = watermark - self.width
        if self.buckets is not None:
            floor = align_down(floor, self.buckets.resolution)
            self.closed = max(self.closed, self.buckets.find_closed_end(watermark))
        if self.floor is None or floor > self.floor:
            self.floor = floor

    @property
    def earliest(self) -> int:
        """The floor; below every time before the first commit."""
        return -NEVER_DUE if self.floor is None else self.floor

    @property
    def last_reset(self) -> int:
        """The number of the last segment in which an alert emptied the windows of a key; -1 for none."""
        return -1 if self.resets is None else int(self.resets.notes.get("last", -1))

    def find_resets(self, keys: Keys) -> Int64s:
        """Returns for each key the number of the segment in which its windows were emptied; -1 for none."""
        segments = np.full(len(keys), -1, dtype=np.int64)
        if self.resets is None:
            return segments
        if len(segments) <= self.resets.most_keys:
            found = map(self.resets.get, keys.list_pairs())
            segments[:] = [-1 if segment is None else segment for segment in found]
            return segments
        emptied = [(key, segment) for key, _, segment in self.resets.items()]
        halves = np.array([key for key, _ in emptied], dtype=np.int64).reshape(-1, 2)
        numbers, distinct = number_keys(Keys(halves[:, 0], halves[:, 1]))
        emptied_in = np.zeros(len(emptied) + 1, dtype=np.int64)
        emptied_in[numbers] = [segment for _, segment in emptied]
        emptied_in[-1] = -1
        return emptied_in[find_keys(keys, distinct)]

    def merge(self, runs: Sequence[Run]) -> Run:
        """Merges rows without those below the floor, and combines those in closed buckets."""
        if self.buckets is None or not any(run.parts is not None or (run.times < self.closed).any() for run in runs):
            return merge_runs(runs, self.floor)
        return combine_runs(runs, self.floor, self.buckets, self.closed)

    @property
    def complete_from(self) -> int | None:
        """The earliest start of a complete window; None if all windows are complete."""
        bounds = [bound for bound in (self.floor, self.since) if bound is not None]
        return max(bounds) if bounds else None
