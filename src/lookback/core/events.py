"""Events as columns, in order of arrival, made from whatever rows a caller has."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from lookback.core.columns import Column, arrow_type, from_arrow, from_values, text_of
from lookback.core.errors import EventError
from lookback.core.expressions import Expression
from lookback.core.keys import Int64s
from lookback.core.rules import parse_time
from lookback.core.streams import Stream
from lookback.core.types import DataType

# The values of expressions that events keep for others who ask the same.
MAX_CACHED_BYTES = 128 * 2**20
# Of a value that is a Python object, roughly, with the place that names it.
_OBJECT_BYTES = 64
_LARGEST_FLOAT = float(np.finfo(np.float32).max)
_EPOCH_DATE = dt.date(1970, 1, 1)
# 1 and 0 are True and False to a dict.
_TRUTH = {True: True, False: False, "true": True, "false": False}


class Events:
    """Events of one stream as columns of one length.

    columns: by field name; commits: the commit version that brought each event, shape (rows,). The id and time columns
    have no NULLs. Values of expressions are kept, since many rules ask for the same ones: those asked for last, up to
    MAX_CACHED_BYTES.
    """

    def __init__(self, columns: Mapping[str, Column], commits: Int64s, event_id: str, event_time: str) -> None:
        self.columns = columns
        self.commits = commits
        self.times: Int64s = columns[event_time].values
        self._id, self._time = event_id, event_time
        self._values: dict[str, Column] = {}
        self._cached_bytes = 0

    def __len__(self) -> int:
        return len(self.commits)

    def take(self, index: npt.NDArray[Any]) -> Events:
        """The events at `index` (positions or a mask)."""
        columns = {name: column.take(index) for name, column in self.columns.items()}
        return Events(columns, self.commits[index], self._id, self._time)

    def value(self, expression: Expression) -> Column:
        """The expression's value for every event."""
        known = self._values.pop(expression.sql, None)
        column = expression.evaluate(self.columns, len(self)) if known is None else known
        self._values[expression.sql] = column
        if known is None:
            self._cached_bytes += _bytes_of(column)
            while self._cached_bytes > MAX_CACHED_BYTES:
                self._cached_bytes -= _bytes_of(self._values.pop(next(iter(self._values))))
        return column

    def id_value(self, at: int) -> int | str:
        """The id of one event: an integer or a text, as the stream declares it."""
        value: int | str = self.columns[self._id].item(at)
        return value

    def id_text(self, at: int) -> str:
        """The id of one event as text."""
        return str(text_of(self.columns[self._id].item(at)))

    @cached_property
    def id_texts(self) -> list[str]:
        """The ids of all events as text."""
        return [str(value) for value in self.columns[self._id].stored()]

    def in_order_of_arrival(self) -> Events:
        """The events by (commit, event time, event id); ids compare as their type, strings by code point.

        That is the order of their UTF-8 bytes. Rows that are equal in all three keep their order.
        """
        order = np.lexsort((self.times, self.commits))
        commits, times = self.commits[order], self.times[order]
        tied = np.zeros(len(order), dtype=bool)
        same = (commits[1:] == commits[:-1]) & (times[1:] == times[:-1])
        tied[1:] |= same
        tied[:-1] |= same
        if tied.any():
            at = np.flatnonzero(tied)
            ids = self.columns[self._id].values[order[at]]
            rank = np.unique(ids, return_inverse=True)[1].ravel()
            order[at] = order[at][np.lexsort((rank, times[at], commits[at]))]
        if (order[1:] > order[:-1]).all():
            return self
        return self.take(order)

    @classmethod
    def concat(cls, parts: Sequence[Events], event_id: str, event_time: str) -> Events:
        """All events of the parts, with the columns that each of them has."""
        if len(parts) == 1:
            return parts[0]
        common = [name for name in parts[0].columns if all(name in part.columns for part in parts)]
        columns = {name: _concat([part.columns[name] for part in parts]) for name in common}
        return cls(columns, np.concatenate([part.commits for part in parts]), event_id, event_time)


def _bytes_of(column: Column) -> int:
    each = _OBJECT_BYTES if column.values.dtype == object else column.values.itemsize
    return len(column) * (each + (column.null is not None) + (column.error is not None))


def _concat(columns: Sequence[Column]) -> Column:
    null = None
    if any(column.null is not None for column in columns):
        null = np.concatenate([np.zeros(len(c), dtype=bool) if c.null is None else c.null for c in columns])
    return Column(columns[0].type, np.concatenate([column.values for column in columns]), null)


def empty_events(stream: Stream, fields: Iterable[str]) -> Events:
    """No events, with columns for `fields` and for the id and time."""
    names = {stream.event_id, stream.event_time, *fields}
    columns = {name: from_values(stream.fields[name], []) for name in names}
    return Events(columns, np.zeros(0, dtype=np.int64), stream.event_id, stream.event_time)


def read_events(rows: object, stream: Stream, next_commit: int) -> tuple[Events, Int64s | None]:
    """Events from a list of dicts, a pandas frame or an Arrow table, and when each commit was made.

    A column `arrival` groups rows into commits; without it each row is a commit of its own, numbered from next_commit.
    A column `committed_at` gives the commits' times in microseconds, shape (rows,); None without it. Fields that are
    absent are NULL; other columns are ignored. Raises EventError, naming row and field.
    """
    table = _as_columns(rows)
    count = len(next(iter(table.values()))) if table else 0
    columns = {}
    for name, type_ in stream.fields.items():
        columns[name] = _column(name, type_, table.get(name), count)
    for name in (stream.event_id, stream.event_time):
        null = columns[name].null
        if null is not None:
            raise EventError(f"row {int(np.flatnonzero(null)[0])}: {name} is missing or NULL; every event needs one")
    commits = _commits(table.get("arrival"), count, next_commit)
    events = Events(columns, commits, stream.event_id, stream.event_time)
    made = table.get("committed_at")
    return events, None if made is None else _times(made, "committed_at")


def problems_of_rows(rows: Sequence[Mapping[str, Any]], stream: Stream) -> list[str]:
    """Sentences on all cells that cannot be values of their fields; rows are counted from 1, as people count them."""
    problems = []
    for number, row in enumerate(rows, 1):
        for name, type_ in stream.fields.items():
            try:
                value = _stored_or_null(name, type_, number, row.get(name))
            except EventError as error:
                problems.append(str(error))
                continue
            if value is None and name in (stream.event_id, stream.event_time):
                problems.append(f"row {number}: {name} is missing or NULL; every event needs one")
    return problems


def _as_columns(rows: object) -> dict[str, Any]:
    if isinstance(rows, pa.RecordBatch):
        rows = pa.Table.from_batches([rows])
    if isinstance(rows, pa.Table):
        return {name: rows.column(name) for name in rows.column_names}
    if isinstance(rows, pd.DataFrame):
        return {str(name): rows[name] for name in rows.columns}
    if isinstance(rows, Iterable):
        listed = list(rows)
        if all(isinstance(row, Mapping) for row in listed):
            names = {name: None for row in listed for name in row}
            return {str(name): [row.get(name) for row in listed] for name in names}
    raise EventError(f"events are a list of dicts, a pandas DataFrame or an Arrow table, got {type(rows).__name__}")


def _commits(arrivals: Any, count: int, next_commit: int) -> Int64s:
    if arrivals is None:
        return np.arange(next_commit, next_commit + count, dtype=np.int64)
    try:
        commits = np.array([_whole(arrival) for arrival in _listed(arrivals)], dtype=np.int64)
    except (ValueError, TypeError, OverflowError) as error:
        raise EventError(f"arrival must be the number of a commit ({error})") from None
    if len(commits) and int(commits.min()) < next_commit - 1:
        raise EventError(f"arrival {int(commits.min())} is before {next_commit - 1}, which was judged already")
    return commits


def _times(values: Any, name: str) -> Int64s:
    try:
        return np.array([parse_time(_plain_time(value)) for value in _listed(values)], dtype=np.int64)
    except (ValueError, TypeError, OverflowError) as error:
        raise EventError(f"{name}: {error}") from None


def _listed(values: Any) -> list[Any]:
    if isinstance(values, (pa.ChunkedArray, pa.Array)):
        return list(values.to_pylist())
    return list(values)


def _plain_time(value: Any) -> Any:
    if isinstance(value, pd.Timestamp):
        return value.to_pydatetime(warn=False)
    if isinstance(value, np.ndarray):
        # Of one element, it would pass for that element.
        return value.tolist()
    return value.item() if isinstance(value, np.generic) else value


def _column(name: str, type_: DataType, values: Any, count: int) -> Column:
    if values is None:
        return from_values(type_, [None] * count)
    fast = _fast_column(type_, values)
    if fast is not None:
        return fast
    try:
        listed = _listed(values)
    except (ValueError, OverflowError) as error:  # Arrow holds times that Python has no object for
        raise EventError(f"{name} must be {type_} ({error})") from None
    return from_values(type_, [_stored_or_null(name, type_, row, value) for row, value in enumerate(listed)])


def _stored_or_null(name: str, type_: DataType, row: int, value: Any) -> Any:
    try:
        return None if _is_missing(value) else _stored(type_, value)
    except (ValueError, TypeError, KeyError, InvalidOperation, OverflowError) as error:
        reason = str(error) or type(error).__name__
        raise EventError(f"row {row}: {name} must be {type_}, got {value!r:.100} ({reason})") from None


def _fast_column(type_: DataType, values: Any) -> Column | None:
    """Whole columns at once where the values have the type already; None where they need a look one by one."""
    if isinstance(values, pd.Series):
        if (type_.name == "timestamp" and isinstance(values.dtype, pd.DatetimeTZDtype)) or values.dtype.kind == "M":
            values = pa.Array.from_pandas(values)
        elif type_.is_integer and values.dtype.kind in "iu":
            values = pa.array(values.to_numpy())
        else:
            return None
    if not isinstance(values, (pa.Array, pa.ChunkedArray)):
        return None
    kind = values.type
    same = kind == arrow_type(type_)
    times = type_.name == "timestamp" and pa.types.is_timestamp(kind) and kind.unit != "ns"
    integers = type_.is_integer and pa.types.is_integer(kind)
    decimals = type_.is_decimal and pa.types.is_decimal128(kind)
    texts = type_.name == "string" and (pa.types.is_string(kind) or pa.types.is_large_string(kind))
    if not (same or times or integers or decimals or texts):
        return None
    try:
        return from_arrow(values, type_)
    except pa.ArrowException:
        return None


def _is_missing(value: Any) -> bool:
    return value is None or value is pd.NaT or value is pd.NA


def _stored(type_: DataType, value: Any) -> Any:
    """A caller's value in the form that columns store; raises where it does not fit."""
    value = _plain_time(value)
    if type_.is_integer:
        return _integer(type_, value)
    if type_.is_decimal:
        return _unscaled(type_, value)
    if type_.is_float:
        return _float(type_, value)
    if type_.name == "boolean":
        return _TRUTH[value.strip().lower() if isinstance(value, str) else value]
    if type_.name == "timestamp":
        return _bounded(type_, parse_time(value), 64)
    if type_.name == "date":
        return ((dt.date.fromisoformat(value) if isinstance(value, str) else value) - _EPOCH_DATE).days
    if type_.name == "array":
        element = type_.element
        assert element is not None
        return [None if _is_missing(item) else _stored(element, item) for item in value]
    if not isinstance(value, str):
        raise TypeError("a text is needed")
    value.encode()  # raises for half a surrogate pair, which no table can hold
    return value


def _integer(type_: DataType, value: Any) -> int:
    number = _whole(value)
    if isinstance(value, bool) or number != (Decimal(value) if isinstance(value, str) else value):
        raise ValueError("an integer is needed")
    return _bounded(type_, number, type_.bits)


def _whole(value: Any) -> int:
    """int(value), save for a decimal that would take as many digits as its exponent says."""
    if isinstance(value, Decimal) and value.is_finite() and value.adjusted() > 40:
        raise ValueError("beyond the range of an integer")
    return int(value)


def _bounded(type_: DataType, number: int, bits: int) -> int:
    if not -(2 ** (bits - 1)) <= number < 2 ** (bits - 1):
        raise ValueError(f"beyond the range of {type_}")
    return number


def _float(type_: DataType, value: Any) -> float:
    number = float(value)
    if type_.name == "float" and math.isfinite(number) and abs(number) > _LARGEST_FLOAT:
        raise ValueError(f"beyond the range of {type_}")
    return number


def _unscaled(type_: DataType, value: Any) -> int:
    # A float goes by its shortest text, which is what its author wrote.
    number = Decimal(repr(value)) if isinstance(value, float) else Decimal(value)
    sign, digits, exponent = number.as_tuple()
    if not isinstance(exponent, int):
        raise ValueError("not a finite number")
    if number and not -10_000 < number.adjusted() <= 40:
        raise ValueError(f"beyond the range of {type_}")
    shift = exponent + type_.scale
    magnitude = int("".join(map(str, digits)))
    if shift < 0 and magnitude % 10**-shift:
        raise ValueError(f"more than {type_.scale} digits after the point")
    unscaled = int(magnitude * 10**shift) if shift >= 0 else magnitude // 10**-shift
    if unscaled >= 10**type_.precision:
        raise ValueError(f"beyond the range of {type_}")
    return -unscaled if sign else unscaled
