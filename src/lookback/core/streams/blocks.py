"""Packs many events, or the output of a shard, into one binary value (a block) that Spark's operators pass on.

Unpacking anything but an intact block raises StateError.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lookback.core.errors import SetupError, StateError
from lookback.core.streams.alerts import Alert, AlertOrder, Failure, LateEvent
from lookback.core.streams.declaration import Stream
from lookback.core.streams.events import Events
from lookback.core.streams.flagged import FlaggedEvents
from lookback.core.values.columns import Column, Mask, from_arrow, normalize_zeros, to_text
from lookback.core.values.keys import Int64s
from lookback.core.values.times import parse_time, to_utc
from lookback.core.values.types import BIGINT, DataType

COMMIT = "_commit_version"
_HEADER = b"lookback"
# Metadata of a narrow column: the number that is added to its stored values.
_BASE = b"base"
# A decimal of more digits needs more than 64 bits.
_MAX_INT64_DIGITS = 18
_NARROW = (np.dtype(np.uint8), np.dtype(np.uint16), np.dtype(np.uint32))
_TEXTS = pa.map_(pa.string(), pa.string())
_TIME = pa.timestamp("us", tz="UTC")
# Annotation of a field, without None -> type of its column.
_TYPES = {
    "str": pa.string(),
    "int": pa.int64(),
    "bool": pa.bool_(),
    "dt.datetime": _TIME,
    "Sequence[str]": pa.list_(pa.string()),
    **dict.fromkeys(("Mapping[str, Any]", "Mapping[str, str | None]"), _TEXTS),
}


def make_columns(rows: type[Any], **types: pa.DataType) -> pa.Schema:
    """Makes the columns of a dataclass of rows. Their types follow from the annotations, except for those in `types`."""
    usual = {name: _TYPES[annotation.removesuffix(" | None")] for name, annotation in rows.__annotations__.items()}
    return pa.schema({**usual, **types})


# The last field is set when the row is written.
ALERTS_SCHEMA = pa.schema([*make_columns(Alert, revision=pa.int32(), change=pa.int32())][:-1])
LATE_SCHEMA = make_columns(LateEvent)
# The fields of AlertOrder that are not among the columns above; `merge_alerts` sorts by them.
_ORDER_COLUMNS = pa.schema(
    [("order_phase", pa.int8()), ("order_time", pa.int64()), ("order_event", pa.string()), ("order_key", pa.string())]
)
# The column with the number of the backtest candidate that raised the row.
TRIED = "tried"
FLAGGED_SCHEMA = pa.schema(
    [
        ("group", pa.int32()),
        ("key", _TEXTS),
        ("event_id", pa.string()),
        ("event_time", _TIME),
        ("arrival", pa.int64()),
        ("bits", pa.list_(pa.int64())),
    ]
)


# A grouping set, and the number of events in a block whose key belongs to the block's shard.
OwnCount = tuple[tuple[str, ...], int]


def narrow_columns(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Stores whole numbers, dates, times and decimals of at most 18 digits in as few bytes as their range needs.

    A narrow column holds differences from the smallest value. `unpack_events` restores the values; NULLs stay NULL.
    """
    fields, arrays = [], []
    for field, array in zip(batch.schema, batch.columns, strict=True):
        narrow = _narrow(array)
        if narrow is None:
            fields.append(field)
            arrays.append(array)
        else:
            differences, base = narrow
            fields.append(pa.field(field.name, differences.type, metadata={_BASE: str(base)}))
            arrays.append(differences)
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def _narrow(array: pa.Array[Any]) -> tuple[pa.Array[Any], int] | None:
    """Returns the differences from the smallest value, and that value; None if that saves no bytes."""
    values = _view_integers(array)
    if values is None or not len(values):
        return None
    null = np.asarray(array.is_null()) if array.null_count else None
    known = values if null is None else values[~null]
    least, most = (int(known.min()), int(known.max())) if len(known) else (0, 0)
    for narrow in _NARROW:
        if narrow.itemsize < values.itemsize and most - least <= np.iinfo(narrow).max:
            # The difference may overflow the wider type, but its lower bytes are correct even then.
            return pa.array((values - values.dtype.type(least)).astype(narrow), mask=null), least
    return (pa.array(values, mask=null), 0) if pa.types.is_decimal(array.type) else None


def _view_integers(array: pa.Array[Any]) -> npt.NDArray[Any] | None:
    """Returns the stored integers of an array, with arbitrary values at NULLs; None if it does not store integers."""
    type_, buffer = array.type, array.buffers()[1] if array.type.num_buffers > 1 else None
    if buffer is None:
        return None
    if pa.types.is_decimal128(type_) and type_.precision <= _MAX_INT64_DIGITS:
        # A value takes 16 bytes, but fits into the lower eight.
        pairs = np.frombuffer(buffer, np.int64, 2 * len(array), 16 * array.offset)
        return pairs[::2].copy()
    if pa.types.is_signed_integer(type_) or pa.types.is_timestamp(type_) or pa.types.is_date32(type_):
        width = type_.bit_width // 8
        return np.frombuffer(buffer, f"<i{width}", len(array), width * array.offset)
    return None


def pack_events(batch: pa.RecordBatch, header: Mapping[str, Any]) -> bytes:
    """Packs a record batch and a header, which must be JSON, into a block.

    batch: fields and the commit column, with or without `narrow_columns` applied.
    """
    table = pa.Table.from_batches([batch]).replace_schema_metadata({_HEADER: json.dumps(header).encode()})
    return pack_table(table)


def unpack_events(block: bytes, stream: Stream) -> tuple[Events, dict[str, Any]]:
    """Unpacks the events and the header of a block. In the header, `future` lists LateEvents, `own` lists OwnCounts."""
    table = unpack_table(block)
    with _raise_state_error():
        header: dict[str, Any] = json.loads((table.schema.metadata or {})[_HEADER])
        header["own"] = [(tuple(group_by), count) for group_by, count in header["own"]]
        header["future"] = [
            LateEvent(**{**row, "event_time": to_utc(parse_time(row["event_time"]))}) for row in header["future"]
        ]
        columns = {
            name: _read_column(table, name, stream.columns_of_events[name])
            for name in table.column_names
            if name != COMMIT
        }
        commits: Int64s = _read_column(table, COMMIT, BIGINT).values
        if lacking := set(stream.key_columns) - columns.keys():
            raise KeyError(sorted(lacking))
        return Events.of(columns, commits, stream), header


def require_own(events: Events, counts: Sequence[Sequence[OwnCount]], shard: int, shards: int) -> None:
    """Checks that a shard finds as many events of its own in its blocks as dispatch counted.

    If dispatch and the shard computed different keys for an event, no shard would judge it.

    Args:
        events: The events of the blocks.
        counts: The counts of each block. A grouping set is compared only if every block counts it.
        shard: The number of the shard, from 0.
        shards: The number of shards.

    Raises:
        SetupError: The numbers differ; the message names an event, the meaning and the remedy.
    """
    expected = Counter[tuple[str, ...]]()
    for each in counts:
        expected.update(dict(each))
    counted = [group_by for group_by in sorted(expected) if all(group_by in dict(each) for each in counts)]
    found = ((group_by, _find_own(events, group_by, shard, shards)) for group_by in counted)
    is_own = {group_by: own for group_by, own in found if own is not None}
    for group_by, own in is_own.items():
        if np.count_nonzero(own) != expected[group_by]:
            # Prefer an event that no other grouping set brings to this shard.
            foreign = ~np.logical_or.reduce(list(is_own.values()))
            at = int(np.argmax(foreign if foreign.any() else ~own))
            raise SetupError(
                f"event {events.id_text(at)!r} of commit {events.commits[at]} came to a shard that does not judge it: "
                f"grouped by {', '.join(group_by) or 'no field'}, {expected[group_by]:,} events were sent to shard "
                f"{shard + 1} of {shards}, which finds {np.count_nonzero(own):,}. The batch ends here, so that no "
                "event is lost. Some machines compute keys differently: install the same versions of Lookback and its "
                "packages on all of them"
            )


def _find_own(events: Events, group_by: tuple[str, ...], shard: int, shards: int) -> Mask | None:
    """Marks the events whose key belongs to the shard; None if keys cannot be computed (only their rules fail)."""
    try:
        return np.asarray(events.find_shards(group_by, shards) == shard)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - see above
        return None


def _read_column(table: pa.Table, name: str, type_: DataType) -> Column:
    base = (table.schema.field(name).metadata or {}).get(_BASE)
    if base is None:
        return normalize_zeros(from_arrow(table.column(name), type_))
    if type_.storage != np.int64 or not pa.types.is_integer(table.schema.field(name).type):
        raise ValueError(f"column {name} is narrow and of type {type_}")
    differences = from_arrow(table.column(name), BIGINT)
    values = differences.values + int(base)
    if differences.null is not None:
        values[differences.null] = 0
    return Column(type_, values, differences.null)


def pack_alerts(rows: Sequence[tuple[AlertOrder, Alert]], tried: Sequence[int] | None = None) -> bytes:
    """Packs alerts and their order into a block, with measures as exact texts. tried: each row's candidate number."""
    columns: dict[str, list[Any]] = {name: [getattr(alert, name) for _, alert in rows] for name in ALERTS_SCHEMA.names}
    columns |= {name: [list(texts.items()) for texts in columns[name]] for name in ("key", "entities")}
    columns["measures"] = [[(name, to_text(value)) for name, value in each.items()] for each in columns["measures"]]
    columns |= {
        f"order_{name}": [getattr(order, name) for order, _ in rows] for name in ("phase", "time", "event", "key")
    }
    table = pa.Table.from_pydict(columns, schema=pa.schema([*ALERTS_SCHEMA, *_ORDER_COLUMNS]))
    return pack_table(table if tried is None else table.append_column(TRIED, pa.array(tried, pa.int32())))


def merge_alerts(blocks: Iterable[bytes]) -> pa.Table:
    """Merges the alerts of all shards into one sorted table with the columns of ALERTS_SCHEMA."""
    tables = [unpack_table(block) for block in blocks]
    if not tables:
        return ALERTS_SCHEMA.empty_table()
    with _raise_state_error():
        # Rows that are equal in all of these come from one shard, which packed them in order. The sort is stable.
        names = ("arrival", "order_phase", "order_time", "order_event", "rule_id", "rule_version", "order_key")
        ordered = pa.concat_tables(tables).sort_by([(name, "ascending") for name in names])
        return ordered.select(ALERTS_SCHEMA.names)


def pack_flagged(flagged: FlaggedEvents) -> bytes:
    """Packs flagged events into a block with the columns of FLAGGED_SCHEMA."""
    rows, words = flagged.bits.shape
    columns = {
        "group": pa.array([flagged.group] * rows, pa.int32()),
        "key": pa.array([list(key.items()) for key in flagged.keys], _TEXTS),
        "event_id": pa.array(flagged.event_ids, pa.string()),
        "event_time": pa.array(flagged.times, pa.int64()).cast(_TIME),
        "arrival": pa.array(flagged.arrivals, pa.int64()),
        "bits": pa.ListArray.from_arrays(
            pa.array(np.arange(rows + 1) * words, pa.int32()), pa.array(flagged.bits.reshape(-1), pa.int64())
        ),
    }
    return pack_table(pa.table(columns, schema=FLAGGED_SCHEMA))


def pack_late(late: Sequence[LateEvent]) -> bytes:
    """Packs late events into a block."""
    return pack_table(pa.Table.from_pylist([vars(each) for each in late], schema=LATE_SCHEMA))


def unpack_late(block: bytes) -> list[dict[str, Any]]:
    """Unpacks the late events of a block, as dicts with the columns of LATE_SCHEMA."""
    table = unpack_table(block)
    with _raise_state_error():
        rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def pack_failures(failures: Sequence[Failure]) -> bytes:
    """Packs failures into a block."""
    return json.dumps([asdict(failure) for failure in failures]).encode()


def unpack_failures(block: bytes) -> list[Failure]:
    """Unpacks the failures of a block."""
    with _raise_state_error():
        return [Failure(**{**row, "first_arrival": tuple(row["first_arrival"])}) for row in json.loads(block)]


def unpack_table(block: bytes) -> pa.Table:
    """Unpacks the Arrow table of a block of events, alerts or late events."""
    with _raise_state_error():
        table = pa.ipc.open_stream(block).read_all()
        # Damaged offsets could point to memory outside the block.
        table.validate(full=True)
    return table


@contextmanager
def _raise_state_error() -> Iterator[None]:
    """Converts the errors that reading damaged bytes can raise into StateError."""
    try:
        yield
    except (
        pa.ArrowException,
        OSError,
        ValueError,
        TypeError,
        KeyError,
        MemoryError,
        OverflowError,
        RecursionError,
    ) as error:
        raise StateError(
            f"a block between two operators is damaged ({type(error).__name__}: {error}); start the evaluation again"
        ) from error


def pack_table(table: pa.Table) -> bytes:
    """Packs an Arrow table into a block."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue().to_pybytes())
