"""Blocks: many events, or what a shard has to say, as one binary value between Spark's operators.

Bytes that are no block, or a damaged one, are refused with a StateError.
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
from lookback.core.streams.alerts import Alert, Failure, LateEvent, Place
from lookback.core.streams.declaration import Stream
from lookback.core.streams.events import Events
from lookback.core.values.columns import from_arrow, normalize_zeros, text_of
from lookback.core.values.keys import Int64s

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
# What alerts of different shards are brought into one order by: of their places what the columns above do not say.
_PLACES = pa.schema(
    [
        ("place_phase", pa.int8()),
        ("place_time", pa.int64()),
        ("place_event_id", pa.string()),
        ("place_key", pa.string()),
    ]
)
LATE_SCHEMA = pa.schema(
    [
        ("stream", pa.string()), ("event_id", pa.string()), ("event_time", _TIME), ("arrival", pa.int64()),
        ("late_by_us", pa.int64()), ("action", pa.string()),
    ]
)  # fmt: skip


def pack_events(batch: pa.RecordBatch, header: Mapping[str, Any]) -> bytes:
    """A block of a record batch (fields and the commit column) and a header, which must be JSON."""
    table = pa.Table.from_batches([batch]).replace_schema_metadata({_HEADER: json.dumps(header).encode()})
    return _ipc(table)


def unpack_events(block: bytes, stream: Stream) -> tuple[Events, dict[str, Any]]:
    """The events and the header of a block."""
    table = unpack_table(block)
    with _refused():
        header: dict[str, Any] = json.loads((table.schema.metadata or {})[_HEADER])
        columns = {
            name: normalize_zeros(from_arrow(table.column(name), stream.fields[name]))
            for name in table.column_names
            if name != COMMIT
        }
        commits: Int64s = np.asarray(table.column(COMMIT).cast(pa.int64()).to_numpy())
        return Events(columns, commits, stream.event_id, stream.event_time), header


def pack_alerts(rows: Sequence[tuple[Place, Alert]]) -> bytes:
    """A block of alerts and their places, the measures as exact texts."""
    columns: dict[str, list[Any]] = {name: [getattr(alert, name) for _, alert in rows] for name in ALERTS_SCHEMA.names}
    columns["key"] = [list(key.items()) for key in columns["key"]]
    columns["measures"] = [[(name, text_of(value)) for name, value in each.items()] for each in columns["measures"]]
    columns |= {
        f"place_{name}": [getattr(place, name) for place, _ in rows] for name in ("phase", "time", "event_id", "key")
    }
    return _ipc(pa.Table.from_pydict(columns, schema=pa.schema([*ALERTS_SCHEMA, *_PLACES])))


def merge_alerts(blocks: Iterable[bytes]) -> pa.Table:
    """The alerts of all shards in order of their places, with the columns of ALERTS_SCHEMA."""
    tables = [unpack_table(block) for block in blocks]
    if not tables:
        return ALERTS_SCHEMA.empty_table()
    with _refused():
        # Rows that agree in all of these are of one shard, which gives them in order; the sort is stable.
        names = ("arrival", "place_phase", "place_time", "place_event_id", "rule_id", "place_key")
        ordered = pa.concat_tables(tables).sort_by([(name, "ascending") for name in names])
        return ordered.select(ALERTS_SCHEMA.names)


def pack_late(late: Sequence[LateEvent]) -> bytes:
    """A block of late events."""
    return _ipc(pa.Table.from_pylist([asdict(each) for each in late], schema=LATE_SCHEMA))


def unpack_late(block: bytes) -> list[dict[str, Any]]:
    """The late events of a block, by the columns of LATE_SCHEMA."""
    table = unpack_table(block)
    with _refused():
        rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def pack_failures(failures: Sequence[Failure]) -> bytes:
    """A block of failures."""
    return json.dumps([asdict(failure) for failure in failures]).encode()


def unpack_failures(block: bytes) -> list[Failure]:
    """The failures of a block."""
    with _refused():
        return [Failure(**{**row, "first_arrival": tuple(row["first_arrival"])}) for row in json.loads(block)]


def unpack_table(block: bytes) -> pa.Table:
    """The Arrow table of a block of events, of alerts or of late events."""
    with _refused():
        table = pa.ipc.open_stream(block).read_all()
        # Offsets that point elsewhere would be followed into memory that is not the block's.
        table.validate(full=True)
    return table


@contextmanager
def _refused() -> Iterator[None]:
    """Turns what reading damaged bytes can raise into a StateError."""
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


def _ipc(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue().to_pybytes())
