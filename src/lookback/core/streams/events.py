"""Events as columns, in order of arrival, made from whatever rows a caller has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from lookback.core.errors import EventError
from lookback.core.expressions.compiling import Expression
from lookback.core.streams.cells import read_cell
from lookback.core.streams.declaration import Stream
from lookback.core.values.columns import (
    Column,
    arrow_type,
    find_beyond_calendar,
    from_arrow,
    from_values,
    normalize_zeros,
    text_of,
)
from lookback.core.values.keys import Int64s
from lookback.core.values.types import BIGINT, TIMESTAMP, DataType

# The values of expressions that events keep for others who ask the same.
MAX_CACHED_BYTES = 128 * 2**20
# Of a value that is a Python object, roughly, with the place that names it.
_OBJECT_BYTES = 64


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
    absent are NULL; other columns are ignored. None, NaT and pd.NA are NULL. NaN is NULL in a pandas frame, where it
    marks a missing value, save in columns of the types Float32, Float64 and those of Arrow, which have a mark of their
    own; elsewhere it is the double NaN. A value that does not fit its field exactly is refused: raises EventError,
    naming row, field and remedy.
    """
    table, count = _as_columns(rows)
    columns = {}
    for name, type_ in stream.fields.items():
        columns[name] = _column(name, type_, _one(table, name), count)
    for name in (stream.event_id, stream.event_time):
        null = columns[name].null
        if null is not None:
            raise EventError(
                f"row {int(np.flatnonzero(null)[0])}: {name} is missing or NULL; every event of stream {stream.name!r} "
                "needs one"
            )
    commits = _commits(_one(table, "arrival"), count, next_commit)
    events = Events(columns, commits, stream.event_id, stream.event_time)
    made = _one(table, "committed_at")
    return events, None if made is None else _times(made)


def problems_of_rows(rows: Sequence[Mapping[str, Any]], stream: Stream) -> list[str]:
    """Sentences on all cells that cannot be values of their fields; rows are counted from 1, as people count them."""
    problems = []
    for number, row in enumerate(rows, 1):
        for name, type_ in stream.fields.items():
            try:
                value = _cell(f"{name} must be {type_}", type_, number, row.get(name), nan_is_missing=False)
            except EventError as error:
                problems.append(str(error))
                continue
            if value is None and name in (stream.event_id, stream.event_time):
                problems.append(f"row {number}: {name} is missing or NULL; every event needs one")
    return problems


def _as_columns(rows: object) -> tuple[dict[str, list[Any]], int]:
    """The columns of each name, and the number of rows."""
    named: Iterable[tuple[Any, Any]]
    if isinstance(rows, (pa.Table, pa.RecordBatch)):
        named, count = zip(rows.schema.names, rows.columns, strict=True), rows.num_rows
    elif isinstance(rows, pd.DataFrame):
        named, count = ((name, rows.iloc[:, at]) for at, name in enumerate(rows.columns)), len(rows)
    elif isinstance(rows, Iterable) and not isinstance(rows, (str, bytes, Mapping)):
        listed = list(rows)
        for at, row in enumerate(listed):
            if not isinstance(row, Mapping):
                raise EventError(f"row {at}: a dict of field to value is needed, got {_shown(row)}")
        names = {name: None for row in listed for name in row}
        named, count = ((name, [row.get(name) for row in listed]) for name in names), len(listed)
    else:
        hint = "; put the one event into a list" if isinstance(rows, Mapping) else ""
        raise EventError(f"events are a list of dicts, a pandas DataFrame or an Arrow table, got {_shown(rows)}{hint}")
    columns: dict[str, list[Any]] = {}
    for name, values in named:
        columns.setdefault(str(name), []).append(values)
    return columns, count


def _one(table: Mapping[str, Sequence[Any]], name: str) -> Any:
    """The column of that name, None if there is none. Raises EventError where there are several."""
    found = table.get(name, ())
    if len(found) > 1:
        raise EventError(f"there are {len(found)} columns {name!r}; rename or drop all but one of them")
    return found[0] if found else None


def _shown(value: object) -> str:
    return f"{type(value).__name__} {_repr(value)}"


def _repr(value: object) -> str:
    try:
        return f"{value!r:.100}"
    except Exception:  # noqa: BLE001 - a caller's value may be one that cannot be shown, such as a time beyond all years
        return f"a {type(value).__name__}"


def _commits(arrivals: Any, count: int, next_commit: int) -> Int64s:
    if arrivals is None:
        return np.arange(next_commit, next_commit + count, dtype=np.int64)
    column = _required("arrival must be the number of a commit", BIGINT, arrivals)
    commits: Int64s = column.values
    if len(commits) and int(commits.min()) < next_commit - 1:
        at = int(commits.argmin())
        raise EventError(
            f"row {at}: arrival {commits[at]} is before {next_commit - 1}, which was judged already; number later "
            "commits higher"
        )
    return commits


def _times(values: Any) -> Int64s:
    times: Int64s = _required("committed_at must be the time of a commit", TIMESTAMP, values).values
    return times


def _required(what: str, type_: DataType, values: Any) -> Column:
    """A column that says something about rows and has no NULLs. what: a message's beginning."""
    column = _read_column(what, type_, values)
    if column.null is not None:
        at = int(np.flatnonzero(column.null)[0])
        raise EventError(f"row {at}: {what}, got none; give every row one, or leave the column out")
    return column


def _column(name: str, type_: DataType, values: Any, count: int) -> Column:
    if values is None:
        return from_values(type_, [None] * count)
    return _read_column(f"{name} must be {type_}", type_, values)


def _read_column(what: str, type_: DataType, values: Any) -> Column:
    fast = _fast_column(type_, values)
    if fast is not None:
        return fast
    try:
        listed = list(values.to_pylist()) if isinstance(values, (pa.ChunkedArray, pa.Array)) else list(values)
    except (ValueError, OverflowError) as error:  # Arrow holds times that Python has no object for
        raise EventError(f"{what} ({error}); correct the column, or give None for an unknown time") from None
    # Columns of these types mark a missing value otherwise, so that NaN in them is meant.
    nan_is_missing = isinstance(values, pd.Series) and not isinstance(
        values.dtype, (pd.ArrowDtype, pd.Float32Dtype, pd.Float64Dtype)
    )
    return from_values(type_, [_cell(what, type_, row, value, nan_is_missing) for row, value in enumerate(listed)])


def _cell(what: str, type_: DataType, row: int, value: Any, nan_is_missing: bool) -> Any:
    try:
        return read_cell(type_, value, nan_is_missing=nan_is_missing)
    except ValueError as error:
        raise EventError(f"row {row}: {what}, got {_repr(value)}: {error}") from None


def _fast_column(type_: DataType, values: Any) -> Column | None:
    """Whole columns at once where the values have the type already; None where they need a look one by one."""
    if isinstance(values, pd.Series):
        values = _series_array(type_, values)
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
        column = normalize_zeros(from_arrow(values, type_))
    except pa.ArrowException:
        return None
    # One by one, what is out of bounds is refused with its row.
    return column if find_beyond_calendar(column) is None else None


def _series_array(type_: DataType, values: pd.Series[Any]) -> pa.Array[Any] | pa.ChunkedArray[Any] | None:
    kind = values.dtype.kind
    times = isinstance(values.dtype, pd.DatetimeTZDtype) or kind == "M"
    if (type_.name == "timestamp" and times) or (type_.is_integer and kind in "iu"):
        return pa.Array.from_pandas(values)
    if type_.name == "double" and isinstance(values.dtype, np.dtype) and kind == "f":
        return pa.Array.from_pandas(values.astype(np.float64))
    return None
