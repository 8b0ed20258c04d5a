"""The input of a shard for one call, and how a long batch is cut into parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from lookback.core.rules.changes import RuleChange
from lookback.core.rules.coverage import Coverage
from lookback.core.streams.events import Events, find_commit_edges
from lookback.core.streams.watermarks import Mark
from lookback.core.values.columns import Column
from lookback.core.values.keys import Int64s, count_earlier, encode_keys
from lookback.core.values.types import BIGINT

# Long batches are judged in parts to bound the memory that judges need in addition to the events: up to 850 bytes per
# event with 20 features of one grouping. Larger parts save no time; parts of half this size take up to 25% longer.
MAX_EVENTS = 300_000


@dataclass
class Batch:
    """The input of a shard for one call.

    Attributes:
        events: The inserted events of the shard, in any order.
        deleted: The deleted rows, with the commit that deleted them.
        marks: Every commit of the batch and its mark over all shards; None if none of its events count.
        changes: The rule changes.
        coverage: The events and fields that dispatch sent; None for all.
        deleting: The commits that deleted rows of any shard.
    """

    events: Events
    deleted: Events | None = None
    marks: Mapping[int, Mark | None] = field(default_factory=dict)
    changes: list[RuleChange] = field(default_factory=list)
    coverage: Coverage | None = None
    deleting: frozenset[int] = frozenset()

    def net(self) -> Batch:
        """Returns the batch without the rows that one commit both removes and writes again unchanged.

        RESTORE and INSERT OVERWRITE do this; such events have not changed.
        """
        events, deleted = self.events, self.deleted
        if deleted is None or not len(both := np.intersect1d(events.commits, deleted.commits)):
            return self
        parts = events, deleted
        names = sorted(events.columns.keys() & deleted.columns.keys())
        at = [np.flatnonzero(np.isin(part.commits, both)) for part in parts]
        rows = [_number_rows(part, index, names) for part, index in zip(parts, at, strict=True)]
        _, groups = np.unique(np.concatenate(rows), axis=0, return_inverse=True)
        written, removed = np.split(groups.ravel(), [len(at[0])])
        count = len(groups)
        unchanged = np.minimum(np.bincount(written, minlength=count), np.bincount(removed, minlength=count))
        kept = []
        for part, index, group in zip(parts, at, (written, removed), strict=True):
            is_kept = np.ones(len(part), dtype=bool)
            is_kept[index] = count_earlier(group) >= unchanged[group]
            kept.append(part.take(is_kept))
        return replace(self, events=kept[0], deleted=kept[1] if len(kept[1]) else None)


def _number_rows(events: Events, at: Int64s, names: Sequence[str]) -> Int64s:
    """Returns two numbers for each event at `at`, shape (rows, 2), that are equal for equal rows of one commit."""
    columns = [Column(BIGINT, events.commits[at]), *(events.columns[name].take(at) for name in names)]
    keys = encode_keys(columns, len(at), has_repeats=False)
    return np.stack([keys.low, keys.high], axis=1)


class CommitRanges:
    """Cuts a batch into ranges of adjacent commits."""

    def __init__(self, batch: Batch) -> None:
        self._batch, self._commits = batch, batch.events.commits
        # If events are in order of arrival, those of a range are adjacent and need not be copied.
        self._order: Int64s | None = None
        if (self._commits[1:] < self._commits[:-1]).any():
            self._order = np.argsort(self._commits, kind="stable")
            self._commits = self._commits[self._order]

    def select(self, start: int, end: int) -> Batch:
        """Selects the commits from `start` to `end`, exclusive, without rule changes."""
        batch, (low, high) = self._batch, np.searchsorted(self._commits, (start, end))
        events = batch.events.take(slice(low, high) if self._order is None else np.sort(self._order[low:high]))
        deleted = batch.deleted
        if deleted is not None:
            here = np.flatnonzero((deleted.commits >= start) & (deleted.commits < end))
            deleted = deleted.take(here) if len(here) else None
        marks = {commit: high for commit, high in batch.marks.items() if start <= commit < end}
        deleting = frozenset(commit for commit in batch.deleting if start <= commit < end)
        return Batch(events, deleted, marks, coverage=batch.coverage, deleting=deleting)

    def find_full_parts(self) -> Iterator[int]:
        """Yields the commits with which parts begin, so that a part has at most `MAX_EVENTS` events, or one commit."""
        commits = self._commits
        if len(commits) <= MAX_EVENTS:
            return
        begin = 0
        for start, end in pairwise(find_commit_edges(commits)):
            if start > begin and end - begin > MAX_EVENTS:
                yield int(commits[start])
                begin = start


def split_batch(batch: Batch) -> list[Batch]:
    """Splits the batch before every commit that deletes rows, and wherever a part has enough events."""
    ranges = CommitRanges(batch)
    cuts = set(ranges.find_full_parts())
    if batch.deleted is not None and len(batch.deleted):
        cuts.update(np.unique(batch.deleted.commits).tolist())
    if not cuts:
        return [Batch(batch.events, marks=batch.marks)]
    commits = sorted(batch.marks)
    edges = [commits[0], *sorted(cut for cut in cuts if cut > commits[0]), commits[-1] + 1]
    return [ranges.select(start, end) for start, end in pairwise(edges)]
