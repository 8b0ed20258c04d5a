"""The measures of every event that a rule judges, in columns: the rows of a training set."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from lookback.core.values.columns import Column, Mask, concat_columns, to_arrow
from lookback.core.values.keys import Int64s
from lookback.core.values.types import DataType

# How many values a table has at most, so that it stays small beside the events of a batch.
_MAX_VALUES = 1_000_000
# An array counts as this many: collect_set gives at most 100.
_ARRAY_VALUES = 30
EVENT_ID, EVENT_TIME, ARRIVAL = "event_id", "event_time", "arrival"


@dataclass(frozen=True)
class MeasuredPlace:
    """The destination of the measures of a rule that records them instead of raising alerts.

    Attributes:
        group: The number of the table. Rules with the same key may share one.
        names: By measure, and for window_complete, the name of its column in the table.
        since: The first event time to record, in microseconds; None for all.
        until: The event time in microseconds at which recording ends, exclusive; None for no end.
    """

    group: int
    names: Mapping[str, str]
    since: int | None = None
    until: int | None = None

    def covers(self, times: Int64s) -> Mask:
        """Marks the event times to record."""
        mask = np.ones(len(times), dtype=bool)
        if self.since is not None:
            mask &= times >= self.since
        if self.until is not None:
            mask &= times < self.until
        return mask


@dataclass(frozen=True)
class Measures:
    """What one rule measured. `at` has the positions of its events, ascending; `columns` have a row for each."""

    at: Int64s
    columns: Mapping[str, Column]

    @classmethod
    def concat(cls, parts: Sequence[Measures]) -> Measures:
        """Joins what one rule measured of different events, given in any order; at least one part."""
        at = np.concatenate([part.at for part in parts])
        order = np.argsort(at)
        names = parts[0].columns
        columns = {name: concat_columns([part.columns[name] for part in parts]).take(order) for name in names}
        return cls(at[order], columns)


@dataclass(frozen=True)
class MeasuredEvents:
    """The events of a segment that at least one rule of a group measured.

    Attributes:
        group: The number of the table.
        events: The columns that all rules share, such as the id and the key.
        measures: What each rule measured; `at` are positions among `events`.
    """

    group: int
    events: Mapping[str, Column]
    measures: Sequence[Measures]

    def list_tables(self) -> Iterator[pa.Table]:
        """Yields tables of some rows each; a rule that did not judge an event has NULLs in its row."""
        rows = len(self.events[EVENT_ID])
        columns = (column for each in self.measures for column in each.columns.values())
        step = max(1, _MAX_VALUES // count_values(column.type for column in [*self.events.values(), *columns]))
        for start in range(0, rows, step):
            end = min(start + step, rows)
            arrays = {name: to_arrow(column.take(slice(start, end))) for name, column in self.events.items()}
            arrays[EVENT_ID] = arrays[EVENT_ID].cast(pa.string())
            for each in self.measures:
                low, high = np.searchsorted(each.at, (start, end)).tolist()
                at = each.at[low:high] - start
                for name, column in each.columns.items():
                    arrays[name] = _spread(to_arrow(column.take(slice(low, high))), at, end - start)
            yield pa.table(arrays)


def count_values(types: Iterable[DataType]) -> int:
    """Estimates how many values a row of columns of these types has."""
    return sum(_ARRAY_VALUES if type_.name == "array" else 1 for type_ in types)


def _spread(values: pa.Array, at: Int64s, rows: int) -> pa.Array:
    """Puts values at these positions of an array that is NULL elsewhere."""
    if len(at) == rows:
        return values
    source = np.zeros(rows, dtype=np.int64)
    source[at] = np.arange(len(at))
    is_missing = np.ones(rows, dtype=bool)
    is_missing[at] = False
    return values.take(pa.array(source, mask=is_missing))
