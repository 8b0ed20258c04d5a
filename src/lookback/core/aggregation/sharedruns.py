"""Keeps the rows of all features of one grouping in one run: each event once, marked for each feature that keeps it.

All features share the keys and times, so these are sorted, searched, merged and stored once, no matter how many
features there are. A feature is a column: a `Selection` of the rows, and the values of its argument, which all features
with the same argument share.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from lookback.core.aggregation.aggregate import Aggregate
from lookback.core.aggregation.distinct import STORED
from lookback.core.aggregation.exact import Partial
from lookback.core.aggregation.grouping import Queries
from lookback.core.aggregation.runs import Run, concat_rows, has_negative, read_rows
from lookback.core.errors import StateError
from lookback.core.values.cache import ArrayFile, estimate_bytes
from lookback.core.values.columns import Mask, Values
from lookback.core.values.keys import SEARCH_CLASSES, Int64s, Keys, order_by_group
from lookback.core.values.pages import decode_page, encode_page

# Instead of a number: all rows are selected, or no values are kept.
ALL = NONE = -1
# If at most one row in 64 is selected, the selection keeps positions: one position takes as much memory as 64 bits.
_SPARSE = 64


@dataclass(frozen=True)
class Selection:
    """One or more rows of a run.

    Attributes:
        rows: The number of rows of the run.
        count: The number of selected rows.
        content: The selected rows: ascending positions if they are few, otherwise bits.
    """

    rows: int
    count: int
    content: Values

    @classmethod
    def from_mask(cls, mask: Mask) -> Selection:
        """Makes a selection from a mask."""
        count = int(np.count_nonzero(mask))
        return cls(len(mask), count, np.flatnonzero(mask) if count * _SPARSE <= len(mask) else np.packbits(mask))

    @property
    def is_sparse(self) -> bool:
        """True if the rows are kept as positions."""
        return self.content.dtype != np.uint8

    @property
    def mask(self) -> Mask:
        """The selection as a mask, shape (rows,)."""
        if not self.is_sparse:
            return np.unpackbits(self.content, count=self.rows).view(bool)
        mask = np.zeros(self.rows, dtype=bool)
        mask[self.content] = True
        return mask

    @property
    def positions(self) -> Int64s:
        """The selected rows, ascending."""
        return np.asarray(self.content, dtype=np.int64) if self.is_sparse else np.flatnonzero(self.mask)


class Place(NamedTuple):
    """The place of a feature in a shared run.

    Attributes:
        selection: The number of its selection there, or ALL.
        values: The number of its values there, or NONE.
        rows: The number of its rows.
    """

    selection: int
    values: int
    rows: int


@dataclass(frozen=True)
class Kept:
    """The rows of one feature, among the rows of several features.

    Attributes:
        feature_id: The id of the feature.
        selected: A mask of the feature's rows.
        values: The values; None if the feature stores none.
        argument: Identifies the argument; features with the same argument share values.
    """

    feature_id: str
    selected: Mask
    values: Values | None
    argument: Hashable


@dataclass(eq=False)
class SharedRun:
    """The rows of a grouping sorted by (key, time, arrival), each kept by at least one feature.

    Attributes:
        keys: As in `Run`.
        starts: As in `Run`.
        times: As in `Run`.
        selections: The distinct selections of rows that features keep.
        values: The values of each argument, shape (rows,); undefined in rows where no feature needs them.
    """

    keys: Keys
    starts: Int64s
    times: Int64s
    selections: tuple[Selection, ...]
    values: tuple[Values, ...]
    _before: dict[int, Values] = field(default_factory=dict)
    _indexes: dict[tuple[str, int, int], Any] = field(default_factory=dict)
    _index_bytes: int = 0
    _has_negative: dict[int, bool] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.times)

    @property
    def memory_bytes(self) -> int:
        """The estimated memory of the run, including its indexes, in bytes."""
        return self.frame.memory_bytes + self._column_bytes + self._index_bytes

    @cached_property
    def _column_bytes(self) -> int:
        return estimate_bytes(self.selections) + estimate_bytes(self.values)

    @cached_property
    def frame(self) -> Run:
        """All rows, without values."""
        return Run(self.keys, self.starts, self.times, None)

    def forget_indexes(self) -> None:
        """Drops the cached indexes; the next measurement rebuilds them."""
        self._before.clear()
        self._indexes.clear()
        self._index_bytes = 0

    def forget_estimate(self) -> None:
        """Discards the estimate of memory, after the arrays have moved to a file."""
        vars(self).pop("_column_bytes", None)
        self._index_bytes = 0
        self.frame.forget_estimate()

    def has_place(self, place: Place) -> bool:
        """Returns whether the run has such a place."""
        is_inside = ALL <= place.selection < len(self.selections) and NONE <= place.values < len(self.values)
        return is_inside and place.rows == (
            len(self) if place.selection == ALL else self.selections[place.selection].count
        )

    def select(self, number: int) -> Mask:
        """Returns the mask of a selection."""
        return np.ones(len(self), dtype=bool) if number == ALL else self.selections[number].mask

    def count_before(self, number: int) -> Values:
        """Returns the number of selected rows before each row and before the end."""
        if number not in self._before:
            before = np.zeros(len(self) + 1, dtype=np.int32)
            np.cumsum(self.selections[number].mask, out=before[1:])
            self._before[number] = before
            self._index_bytes += before.nbytes
        return self._before[number]

    def index(self, name: str, aggregate: Aggregate, place: Place) -> Any:
        """Returns the index of the aggregate called `name` over the rows of a feature."""
        known_as = (name, place.selection, place.values)
        if known_as not in self._indexes:
            rows = slice(None) if place.selection == ALL else self.selections[place.selection].positions
            times = self.times[rows]
            values = times if place.values == NONE else self.values[place.values][rows]
            self._indexes[known_as] = aggregate.index_rows(values, times, np.full(len(times), STORED))
            self._index_bytes += estimate_bytes(self._indexes[known_as])
        return self._indexes[known_as]

    def has_negative(self, number: int) -> bool:
        """Returns whether any value of an argument is negative."""
        if number not in self._has_negative:
            self._has_negative[number] = number != NONE and has_negative(self.values[number])
        return self._has_negative[number]

    def encode(self) -> bytes:
        """Encodes the run as a page."""
        marks = [each.content if each.is_sparse else each.mask for each in self.selections]
        sizes = np.array([len(marks), len(self.values)], dtype=np.int64)
        return encode_page(
            [self.keys.low, self.keys.high, np.diff(self.starts), self.times, sizes, *marks, *self.values]
        )

    @classmethod
    def decode(cls, page: bytes, place: str) -> SharedRun:
        """Decodes a run from a page; raises StateError, naming `place`, if the page is damaged."""
        arrays = decode_page(page, place)
        keys, starts, times, (sizes, *more) = read_rows(arrays, place)
        is_whole = sizes is not None and sizes.dtype == np.int64 and len(sizes) == 2 and min(sizes) >= 0
        columns = [array for array in more if array is not None]
        if sizes is None or not is_whole or len(columns) != len(more) or len(columns) != sum(sizes.tolist()):
            raise StateError(f"{place}: a page of window state is damaged; start with a new checkpoint")
        marks, values = columns[: int(sizes[0])], columns[int(sizes[0]) :]
        if not all(_is_mark(mark, len(times)) for mark in marks) or any(len(each) != len(times) for each in values):
            raise StateError(f"{place}: a page of window state is damaged; start with a new checkpoint")
        selections = tuple(
            Selection.from_mask(mark) if mark.dtype == bool else Selection(len(times), len(mark), mark)
            for mark in marks
        )
        return cls(keys, starts, times, selections, tuple(values))


def _is_mark(mark: Values, rows: int) -> bool:
    """Returns whether an array is a mask of the rows or ascending positions, and selects at least one row."""
    if mark.dtype == bool:
        return len(mark) == rows and bool(mark.any())
    if mark.dtype != np.int64 or not 0 < len(mark) <= rows:
        return False
    return bool(mark[0] >= 0) and bool(mark[-1] < rows) and bool((mark[1:] > mark[:-1]).all())


@dataclass(frozen=True)
class FeatureColumn:
    """The rows of one feature in a shared run; positions are those in the run."""

    run: SharedRun
    place: Place

    def __len__(self) -> int:
        return self.place.rows

    @property
    def keys(self) -> Keys:
        """The keys of the run; the feature may have no rows for some of them."""
        return self.run.keys

    @property
    def times(self) -> Int64s:
        """The times of all rows of the run, shape (rows,)."""
        return self.run.times

    @property
    def values(self) -> Values | None:
        """The values of all rows of the run; undefined in rows that the feature lacks."""
        return None if self.place.values == NONE else self.run.values[self.place.values]

    @property
    def has_negative_value(self) -> bool:
        """True if any value of the argument is negative, even in a row that the feature lacks."""
        return self.run.has_negative(self.place.values)

    def includes(self, other: FeatureColumn) -> bool:
        """Returns whether the feature has all rows of another feature of the same run."""
        if self.place.selection in (ALL, other.place.selection):
            return True
        if other.place.selection == ALL:
            return False
        own, others = (self.run.selections[place.selection] for place in (self.place, other.place))
        if own.is_sparse or others.is_sparse:
            return bool(own.mask[others.positions].all())
        return not (others.content & ~own.content).any()

    def find_windows(self, groups: Int64s, queries: Queries) -> tuple[Int64s, Int64s, Int64s]:
        """Finds the rows of all features in each window (see `Run.find_windows`)."""
        return self.run.frame.find_windows(groups, queries)

    def aggregate_ranges(self, name: str, aggregate: Aggregate, low: Int64s, high: Int64s) -> Partial:
        """Aggregates the feature's rows among the rows [low, high) of each window; `name` is that of the aggregate."""
        low, high = self._count_before(low), self._count_before(high)
        return aggregate.aggregate_ranges(self.run.index(name, aggregate, self.place), low, high)

    def _count_before(self, positions: Int64s) -> Int64s:
        """Returns the number of the feature's rows before each position."""
        if self.place.selection == ALL:
            return positions
        selection = self.run.selections[self.place.selection]
        if selection.is_sparse:
            return selection.content.searchsorted(positions).astype(np.int64, copy=False)
        return self.run.count_before(self.place.selection)[positions].astype(np.int64)

    def find_rows(self, groups: Int64s, first: Int64s, last: Int64s) -> tuple[Int64s, Int64s]:
        """Finds the feature's rows with first <= time <= last for some keys (see `Run.find_rows`)."""
        numbers, at = self.run.frame.find_rows(groups, first, last)
        if self.place.selection == ALL:
            return numbers, at
        selected = self.run.select(self.place.selection)[at]
        return numbers[selected], at[selected]

    def find_ranges(self, groups: Int64s, first: Int64s, last: Int64s) -> tuple[Int64s, Int64s]:
        """Finds the feature's rows [low, high) of each window, counted among its own (see `Run.find_ranges`)."""
        low, high = self.run.frame.find_ranges(groups, first, last)
        return self._count_before(low), self._count_before(high)

    def list_rows(self) -> tuple[Int64s, Int64s]:
        """Returns the number of the key of each of the feature's rows, and their times."""
        groups = self.run.frame.groups
        if self.place.selection == ALL:
            return groups, self.times
        selected = self.run.select(self.place.selection)
        return groups[selected], self.times[selected]

    def count_since(self, earliest: int) -> int:
        """Counts the feature's rows from a time on."""
        return int(np.count_nonzero((self.times >= earliest) & self.run.select(self.place.selection)))

    def to_run(self) -> Run:
        """Copies the feature's rows into a separate run."""
        frame = Run(self.keys, self.run.starts, self.times, self.values)
        return frame if self.place.selection == ALL else frame.take(self.run.select(self.place.selection))

    def without(self, dropped: Mask) -> tuple[SharedRun, Place]:
        """Removes some of the feature's rows. Returns the new run and the feature's place there.

        Other features keep their rows. `dropped` marks some of the feature's rows, but never all.
        """
        mask = self.run.select(self.place.selection)
        mask[np.flatnonzero(mask)[dropped]] = False
        run, selection = self.run, Selection.from_mask(mask)
        selections = (*run.selections, selection)
        changed = SharedRun(run.keys, run.starts, run.times, selections, run.values)
        return changed, Place(len(selections) - 1, self.place.values, selection.count)


# The classes of objects that a run in a file consists of.
_CLASSES: dict[str, type[Any]] = {each.__name__: each for each in (SharedRun, Run, Selection, Keys, *SEARCH_CLASSES)}


def move_run(run: Run | SharedRun, file: ArrayFile) -> Run | SharedRun | None:
    """Moves a run with its indexes into a file. Returns the run in the file; None if the file cannot take it."""
    return read_run(file) if file.write(run) else None


def read_run(file: ArrayFile) -> Run | SharedRun | None:
    """Returns the run in a file, which takes no memory until it is searched; None if the file has none."""
    run = file.read(_CLASSES)
    if not isinstance(run, (Run, SharedRun)):
        return None
    run.forget_estimate()
    return run


def make_shared_run(
    numbers: Int64s, keys: Keys, times: Int64s, kept: Sequence[Kept]
) -> tuple[SharedRun, dict[str, Place]]:
    """Makes a shared run from rows sorted by (number, time, arrival).

    Args:
        numbers: The number of each row's key in `keys`.
        keys: Distinct, sorted keys.
        times: The time of each row.
        kept: The rows of each feature, at least one each; together they cover all rows.

    Returns:
        The run, and the place of each feature.
    """
    counts = np.bincount(numbers, minlength=len(keys.low))
    has_rows = counts > 0
    keys, starts = keys.take(has_rows), np.concatenate(([0], np.cumsum(counts[has_rows]))).astype(np.int64)
    known, masks = dict[bytes, int](), list[Mask]()
    known_values, values, users = dict[Hashable, int](), list[Values](), list[Mask | None]()
    places: dict[str, Place] = {}
    for each in kept:
        rows, selection, place = int(np.count_nonzero(each.selected)), ALL, NONE
        if rows < len(times):
            selection = known.setdefault(np.packbits(each.selected).tobytes(), len(masks))
            if selection == len(masks):
                masks.append(each.selected)
        if each.values is not None:
            place = known_values.setdefault(each.argument, len(values))
            if place == len(values):
                values.append(each.values)
                users.append(np.zeros(len(times), dtype=bool))
            users[place] = _unite(users[place], None if selection == ALL else each.selected)
        places[each.feature_id] = Place(selection, place, rows)
    selections = tuple(map(Selection.from_mask, masks))
    return SharedRun(keys, starts, times, selections, tuple(map(_blank_unneeded, values, users))), places


def merge_shared_runs(
    runs: Sequence[SharedRun], places: Mapping[str, Sequence[Place | None]], floors: Mapping[str, int | None]
) -> tuple[SharedRun, dict[str, Place]] | None:
    """Merges shared runs; among rows with equal key and time, those of earlier runs come first.

    Args:
        runs: The runs to merge.
        places: The place of each feature in each run; None where it has no rows.
        floors: The time of each feature before which it drops its rows; None to keep all.

    Returns:
        The merged run and the place of each feature; None if no rows are left.
    """
    numbers, keys, times = concat_rows([run.frame for run in runs])
    order = order_by_group(numbers, times)
    times, earliest = times[order], int(times.min())
    masks: dict[Hashable, Mask | None] = {}
    chosen: dict[str, Hashable] = {}
    for feature_id, each in places.items():
        floor = floors[feature_id]
        cut = floor if floor is not None and floor > earliest else None
        chosen[feature_id] = known_as = (tuple(None if place is None else place.selection for place in each), cut)
        if known_as not in masks:
            masks[known_as] = _merge_masks(runs, each, order, None if cut is None else times >= cut)
    union: Mask | None = np.zeros(len(times), dtype=bool)
    for mask in masks.values():
        union = _unite(union, mask)
    rows = slice(None) if union is None or union.all() else np.flatnonzero(union)
    order, numbers, times = order[rows], numbers[order][rows], times[rows]
    if not len(times):
        return None
    masks = {known_as: None if mask is None else mask[rows] for known_as, mask in masks.items()}
    kept, values = [], dict[Hashable, Values | None]()
    for feature_id, each in places.items():
        mask = masks[chosen[feature_id]]
        selected = np.ones(len(times), dtype=bool) if mask is None else mask
        if not selected.any():
            continue
        argument = tuple(NONE if place is None else place.values for place in each)
        if argument not in values:
            values[argument] = _merge_values(runs, argument, order)
        kept.append(Kept(feature_id, selected, values[argument], argument))
    return make_shared_run(numbers, keys, times, kept)


def _merge_masks(
    runs: Sequence[SharedRun], places: Sequence[Place | None], order: Int64s, above_floor: Mask | None
) -> Mask | None:
    """Returns the mask of a feature's rows among those of all runs; None if it has all of them."""
    if above_floor is None and all(place is not None and place.selection == ALL for place in places):
        return None
    each = (
        np.zeros(len(run), dtype=bool) if place is None else run.select(place.selection)
        for run, place in zip(runs, places, strict=True)
    )
    mask: Mask = np.concatenate(list(each))[order]
    return mask if above_floor is None else mask & above_floor


def _merge_values(runs: Sequence[SharedRun], numbers: Sequence[int], order: Int64s) -> Values | None:
    """Merges the values of an argument, given its number in each run; None if no run has any."""
    known = [run.values[number] for run, number in zip(runs, numbers, strict=True) if number != NONE]
    if not known:
        return None
    parts = [
        run.values[number] if number != NONE else np.zeros(len(run), dtype=known[0].dtype)
        for run, number in zip(runs, numbers, strict=True)
    ]
    merged: Values = np.concatenate(parts)[order]
    return merged


def _unite(left: Mask | None, right: Mask | None) -> Mask | None:
    """Returns the rows of either mask; None for all."""
    return None if left is None or right is None else left | right


def _blank_unneeded(values: Values, needed: Mask | None) -> Values:
    """Returns the values with a blank of the same type in rows where no feature needs them."""
    if needed is None or needed.all():
        return values
    blank = values.copy()
    is_text = values.dtype == np.dtype(object) and isinstance(values[int(needed.argmax())], str)
    blank[~needed] = "" if is_text else 0
    return blank
