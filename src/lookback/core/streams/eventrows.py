"""Reads events from a caller's rows: a list of dicts, a pandas frame or an Arrow table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from lookback.core.errors import EventError, show_value
from lookback.core.streams.cells import is_missing, read_cell
from lookback.core.streams.declaration import Stream
from lookback.core.streams.events import Events
from lookback.core.streams.fields import POSITION
from lookback.core.streams.unions import MEMBER, Union
from lookback.core.values.columns import (
    Column,
    arrow_type,
    find_beyond_calendar,
    from_arrow,
    from_values,
    normalize_zeros,
)
from lookback.core.values.keys import Int64s
from lookback.core.values.types import BIGINT, TIMESTAMP, DataType


def read_events(rows: object, stream: Stream, next_commit: int) -> tuple[Events, Int64s | None]:
    """Reads events, and the times of their commits, from a list of dicts, a pandas frame or an Arrow table.

    Missing fields are NULL, and undeclared columns are ignored, except:

    - `arrival` groups rows into commits. Without it, each row is its own commit, numbered from next_commit.
    - `position` orders rows with the same commit and time, if Lookback ingests the stream. Without it, they keep the
      order in which they are given.
    - `committed_at` is the time of each row's commit.

    None, NaT and pd.NA are NULL. NaN is NULL in a pandas frame, where it marks a missing value, except in columns of
    type Float32, Float64 or an Arrow type, which mark missing values differently. Elsewhere it is the double NaN.

    Args:
        rows: The events.
        stream: The declaration of their stream.
        next_commit: The number of the next commit.

    Returns:
        The events, and the times of their commits in microseconds, shape (rows,); None without `committed_at`.

    Raises:
        EventError: A value does not fit its field exactly; the message names row, field and remedy.
    """
    table, count = _split_columns(rows)
    columns = {}
    for name, type_ in stream.fields.items():
        columns[name] = _read_field(name, type_, _find_column(table, name), count)
    for name in (stream.event_id, stream.event_time):
        null = columns[name].null
        if null is not None:
            raise EventError(
                f"row {int(np.flatnonzero(null)[0])}: {name} is missing or NULL; every event of stream {stream.name!r} "
                "needs one"
            )
    if stream.union is not None:
        _require_members(columns[MEMBER], stream.union)
    commits = _read_commits(_find_column(table, "arrival"), count, next_commit)
    if POSITION in stream.order_columns:
        columns[POSITION] = _read_positions(_find_column(table, POSITION), count)
    events = Events.of(columns, commits, stream)
    committed_at = _find_column(table, "committed_at")
    if committed_at is None:
        return events, None
    return events, _read_required("committed_at must be the time of a commit", TIMESTAMP, committed_at).values


def _require_members(column: Column, union: Union) -> None:
    """Raises EventError if an event does not name a member of its union."""
    for at, name in enumerate(column.to_stored_list()):
        if name not in union.members:
            raise EventError(
                f"row {at}: {MEMBER} is {name!r:.100}; name the stream from which the event of the union comes: "
                f"{', '.join(union.members)}"
            )


def find_row_problems(rows: Sequence[Mapping[str, Any]], stream: Stream) -> list[str]:
    """Describes every cell that does not fit its field in one sentence each; rows are counted from 1."""
    problems = []
    for number, row in enumerate(rows, 1):
        for name, type_ in stream.fields.items():
            try:
                value = row
                for at, part in enumerate(parts := name.split(".")):
                    value = _take_part(value, f"row {number}: {'.'.join(parts[:at])}", part)
                value = _read_cell(f"{name} must be {type_}", type_, number, value, nan_is_missing=False)
            except EventError as error:
                problems.append(str(error))
                continue
            if value is None and name in (stream.event_id, stream.event_time):
                problems.append(f"row {number}: {name} is missing or NULL; every event needs one")
    return problems


def _split_columns(rows: object) -> tuple[dict[str, list[Any]], int]:
    """Returns the columns by name, and the number of rows. A name can have several columns."""
    named: Iterable[tuple[Any, Any]]
    if isinstance(rows, (pa.Table, pa.RecordBatch)):
        named, count = zip(rows.schema.names, rows.columns, strict=True), rows.num_rows
    elif isinstance(rows, pd.DataFrame):
        named, count = ((name, rows.iloc[:, at]) for at, name in enumerate(rows.columns)), len(rows)
    elif isinstance(rows, Iterable) and not isinstance(rows, (str, bytes, Mapping)):
        listed = list(rows)
        for at, row in enumerate(listed):
            if not isinstance(row, Mapping):
                raise EventError(f"row {at}: a dict of field to value is needed, got {_format_value(row)}")
        names = {name: None for row in listed for name in row}
        named, count = ((name, [row.get(name) for row in listed]) for name in names), len(listed)
    else:
        hint = "; put the one event into a list" if isinstance(rows, Mapping) else ""
        raise EventError(
            f"events are a list of dicts, a pandas DataFrame or an Arrow table, got {_format_value(rows)}{hint}"
        )
    columns: dict[str, list[Any]] = {}
    for name, values in named:
        columns.setdefault(str(name), []).append(values)
    return columns, count


def _find_column(table: Mapping[str, Sequence[Any]], name: str) -> Any:
    """Returns the column with this name, or None. Raises EventError if there are several."""
    columns = table.get(name, ())
    if len(columns) > 1:
        raise EventError(f"there are {len(columns)} columns {name!r}; rename or drop all but one of them")
    whole, _, part = name.rpartition(".")
    struct = _find_column(table, whole) if whole else None
    if columns and struct is not None:
        raise EventError(f"there are columns {whole!r} and {name!r}; give {name} in one of them, for all events")
    if columns:
        return columns[0]
    return None if struct is None else _take_parts(struct, whole, part)


def _take_parts(struct: Any, whole: str, part: str) -> Any:
    """Returns a part of each struct in a column. Raises EventError if a value is not a struct."""
    if isinstance(struct, (pa.Array, pa.ChunkedArray)) and pa.types.is_struct(struct.type):
        has_part = struct.type.get_field_index(part) >= 0
        return pc.struct_field(struct, part) if has_part else None
    return [_take_part(value, f"row {row}: {whole}", part) for row, value in enumerate(struct)]


def _take_part(struct: object, whole: str, part: str) -> Any:
    """Returns a part of a struct; None if it lacks it, or is missing. Raises EventError, which begins with `whole`."""
    if isinstance(struct, Mapping):
        return struct.get(part)
    if is_missing(struct, nan=True):
        return None
    raise EventError(f"{whole} must be a struct, such as {{{part}: ...}}, got {show_value(struct)}")


def _format_value(value: object) -> str:
    return f"{type(value).__name__} {show_value(value)}"


def _read_commits(arrivals: Any, count: int, next_commit: int) -> Int64s:
    if arrivals is None:
        return np.arange(next_commit, next_commit + count, dtype=np.int64)
    column = _read_required("arrival must be the number of a commit", BIGINT, arrivals)
    commits: Int64s = column.values
    if len(commits) and int(commits.min()) < next_commit - 1:
        at = int(commits.argmin())
        raise EventError(
            f"row {at}: arrival {commits[at]} is before {next_commit - 1}, which was judged already; number later "
            "commits higher"
        )
    return commits


def _read_positions(positions: Any, count: int) -> Column:
    if positions is None:
        return Column(BIGINT, np.arange(count, dtype=np.int64))
    return _read_column("position must be the place of a row in what was read", BIGINT, positions)


def _read_required(requirement: str, type_: DataType, values: Any) -> Column:
    """Reads a column about commits, which must not contain NULLs. requirement: the start of error messages."""
    column = _read_column(requirement, type_, values)
    if column.null is not None:
        at = int(np.flatnonzero(column.null)[0])
        raise EventError(f"row {at}: {requirement}, got none; give every row one, or leave the column out")
    return column


def _read_field(name: str, type_: DataType, values: Any, count: int) -> Column:
    if values is None:
        return from_values(type_, [None] * count)
    return _read_column(f"{name} must be {type_}", type_, values)


def _read_column(requirement: str, type_: DataType, values: Any) -> Column:
    column = _read_whole_column(type_, values)
    if column is not None:
        return column
    try:
        listed = list(values.to_pylist()) if isinstance(values, (pa.ChunkedArray, pa.Array)) else list(values)
    except (ValueError, OverflowError) as error:  # Arrow has times that Python cannot represent
        raise EventError(f"{requirement} ({error}); correct the column, or give None for an unknown time") from None
    # These types mark missing values differently, so NaN is a value in them.
    nan_is_missing = isinstance(values, pd.Series) and not isinstance(
        values.dtype, (pd.ArrowDtype, pd.Float32Dtype, pd.Float64Dtype)
    )
    cells = [_read_cell(requirement, type_, row, value, nan_is_missing) for row, value in enumerate(listed)]
    return from_values(type_, cells)


def _read_cell(requirement: str, type_: DataType, row: int, value: Any, nan_is_missing: bool) -> Any:
    try:
        return read_cell(type_, value, nan_is_missing=nan_is_missing)
    except ValueError as error:
        raise EventError(f"row {row}: {requirement}, got {show_value(value)}: {error}") from None


def _read_whole_column(type_: DataType, values: Any) -> Column | None:
    """Reads a column as a whole if it already has the type; None if its values must be read one by one."""
    if isinstance(values, pd.Series):
        values = _convert_series(type_, values)
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
    # If a value is out of bounds, reading one by one will report its row.
    return column if find_beyond_calendar(column) is None else None


def _convert_series(type_: DataType, values: pd.Series[Any]) -> pa.Array[Any] | pa.ChunkedArray[Any] | None:
    kind = values.dtype.kind
    times = isinstance(values.dtype, pd.DatetimeTZDtype) or kind == "M"
    if (type_.name == "timestamp" and times) or (type_.is_integer and kind in "iu"):
        return pa.Array.from_pandas(values)
    if type_.name == "double" and isinstance(values.dtype, np.dtype) and kind == "f":
        return pa.Array.from_pandas(values.astype(np.float64))
    return None
