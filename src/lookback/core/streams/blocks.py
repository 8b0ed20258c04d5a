"""Packs many events, or the output of a shard, into one binary value (a block) that Spark's operators pass on.

Reading refuses other bytes and damaged blocks with a StateError.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa

from lookback.core.errors import StateError
from lookback.core.streams.alerts import Alert, AlertOrder, Failure, LateEvent
from lookback.core.streams.declaration import Stream
from lookback.core.streams.events import Events
from lookback.core.streams.flagged import FlaggedEvents
from lookback.core.values.columns import from_arrow, normalize_zeros, to_text
from lookback.core.values.keys import Int64s
from lookback.core.values.times import parse_time, to_utc

COMMIT = "_commit_version"
_HEADER = b"lookback"
_TEXTS = pa.map_(pa.string(), pa.string())
_TIME = pa.timestamp("us", tz="UTC")
ALERTS_SCHEMA = pa.schema(
    [
        ("alert_id", pa.string()), ("revision", pa.int32()), ("verdict", pa.string()), ("rule_id", pa.string()),
        ("rule_version", pa.int64()), ("mode", pa.string()), ("severity", pa.string()), ("stream", pa.string()),
        ("key", _TEXTS), ("event_id", pa.string()), ("event_time", _TIME), ("window_start", _TIME),
        ("window_end", _TIME), ("window_complete", pa.bool_()), ("measures", _TEXTS), ("message", pa.string()),
        ("evidence", pa.list_(pa.string())), ("arrival", pa.int64()),
    ]
)  # fmt: skip
# The fields of AlertOrder that are not among the columns above; they serve to sort the alerts of all shards.
_ORDER_COLUMNS = pa.schema(
    [
        ("order_phase", pa.int8()),
        ("order_time", pa.int64()),
        ("order_event_id", pa.string()),
        ("order_key", pa.string()),
    ]
)
# The number of the candidate of a backtest that raised a row.
TRIED = "tried"
FLAGGED_SCHEMA = pa.schema(
    [
        ("group", pa.int32()), ("key", _TEXTS), ("event_id", pa.string()), ("event_time", _TIME), ("arrival", pa.int64()),
        ("bits", pa.list_(pa.int64())),
    ]
)  # fmt: skip
LATE_SCHEMA = pa.schema(
    [
        ("stream", pa.string()), ("event_id", pa.string()), ("event_time", _TIME), ("arrival", pa.int64()),
        ("late_by_us", pa.int64()), ("action", pa.string()),
    ]
)  # fmt: skip


def pack_events(batch: pa.RecordBatch, header: Mapping[str, Any]) -> bytes:
    """Packs a record batch (fields and the commit column) and a header, which must be JSON, into a block."""
    table = pa.Table.from_batches([batch]).replace_schema_metadata({_HEADER: json.dumps(header).encode()})
    return _write_ipc(table)


def unpack_events(block: bytes, stream: Stream) -> tuple[Events, dict[str, Any]]:
    """Unpacks the events and the header of a block. The header's `future` are LateEvents."""
    table = unpack_table(block)
    with _raise_state_error():
        header: dict[str, Any] = json.loads((table.schema.metadata or {})[_HEADER])
        header["future"] = [
            LateEvent(**{**row, "event_time": to_utc(parse_time(row["event_time"]))}) for row in header["future"]
        ]
        columns = {
            name: normalize_zeros(from_arrow(table.column(name), stream.fields[name]))
            for name in table.column_names
            if name != COMMIT
        }
        commits: Int64s = np.asarray(table.column(COMMIT).cast(pa.int64()).to_numpy())
        return Events(columns, commits, stream.event_id, stream.event_time), header


def pack_alerts(rows: Sequence[tuple[AlertOrder, Alert]], tried: Sequence[int] | None = None) -> bytes:
    """Packs alerts and their order into a block, the measures as exact texts. tried: the number of each row's candidate."""
    columns: dict[str, list[Any]] = {name: [getattr(alert, name) for _, alert in rows] for name in ALERTS_SCHEMA.names}
    columns["key"] = [list(key.items()) for key in columns["key"]]
    columns["measures"] = [[(name, to_text(value)) for name, value in each.items()] for each in columns["measures"]]
    columns |= {
        f"order_{name}": [getattr(order, name) for order, _ in rows] for name in ("phase", "time", "event_id", "key")
    }
    table = pa.Table.from_pydict(columns, schema=pa.schema([*ALERTS_SCHEMA, *_ORDER_COLUMNS]))
    return _write_ipc(table if tried is None else table.append_column(TRIED, pa.array(tried, pa.int32())))


def merge_alerts(blocks: Iterable[bytes]) -> pa.Table:
    """Merges the alerts of all shards into one sorted table with the columns of ALERTS_SCHEMA."""
    tables = [unpack_table(block) for block in blocks]
    if not tables:
        return ALERTS_SCHEMA.empty_table()
    with _raise_state_error():
        # Rows that are equal in all of these come from one shard, which packed them in order; the sort is stable.
        names = ("arrival", "order_phase", "order_time", "order_event_id", "rule_id", "rule_version", "order_key")
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
    return _write_ipc(pa.table(columns, schema=FLAGGED_SCHEMA))


def pack_late(late: Sequence[LateEvent]) -> bytes:
    """Packs late events into a block."""
    return _write_ipc(pa.Table.from_pylist([asdict(each) for each in late], schema=LATE_SCHEMA))


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
    """Turns the errors that reading damaged bytes can raise into a StateError."""
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


def _write_ipc(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue().to_pybytes())
