"""Encodes arrays as pages: compact, versioned bytes for the state store.

Layout: magic `LBpg`, layout version (u16), number of arrays (u16); then per array a kind (u8), rows (u64), a base
(i64), the length of the raw bytes (u64), the length of the packed bytes (u64) and the packed bytes. Integers are stored
as differences to the base or to the row before, in the fewest bytes, then compressed by Zstandard. Reading a page never
runs code.

Reading refuses an array of more than a gibibyte, so that a damaged page cannot allocate any amount of memory. Writing
cuts a longer array into parts, which reading joins.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pyarrow as pa

from lookback.core.errors import StateError
from lookback.core.values.columns import Values, make_objects

PAGE_VERSION = 3
_MAGIC = b"LBpg"
_ZSTD = bytes.fromhex("28b52ffd")
_HEAD = struct.Struct("<4sHH")
_ARRAY = struct.Struct("<BQqQQ")
# Bounds the memory that reading a page can allocate.
_MAX_BYTES = 2**30
_MAX_ROWS = _MAX_BYTES // 8
_INTEGERS: tuple[np.dtype[Any], ...] = (np.dtype("<u1"), np.dtype("<u2"), np.dtype("<u4"), np.dtype("<i8"))
_FLOATS: dict[np.dtype[Any], int] = {np.dtype(np.float32): 16, np.dtype(np.float64): 17}
_BOOL, _TEXTS, _WIDE, _NOTHING = 18, 19, 20, 21
_STEPS = 64  # added to an integer kind: values are differences to the row before
_CONTINUED = 128  # added to any kind: the next array is the rest of this one
_KINDS = {*range(4), *range(_STEPS, _STEPS + 4), *_FLOATS.values(), _BOOL, _TEXTS, _WIDE, _NOTHING}


def encode_page(arrays: list[Values | None]) -> bytes:
    """Encodes arrays of bool, int64, float32, float64, or of objects that are all str or all int, or None, as a page."""
    parts = [part for array in arrays for part in _encode_array(array)]
    return b"".join([_HEAD.pack(_MAGIC, PAGE_VERSION, len(parts)), *parts])


def decode_page(page: bytes, place: str) -> list[Values | None]:
    """Decodes the arrays of a page. Raises StateError, naming `place`, if it is damaged or of another version."""
    check_version(page, place)
    try:
        return _decode(page)
    except StateError:
        raise
    except (
        struct.error,
        ValueError,
        TypeError,
        IndexError,
        RecursionError,
        OverflowError,
        pa.ArrowException,
        OSError,
        MemoryError,
    ) as error:
        raise StateError(
            f"{place}: a page of window state is damaged ({error}); start with a new checkpoint, the tables have it all"
        ) from error


def check_version(page: bytes, place: str) -> None:
    """Raises StateError unless `page` begins like a page of this release's layout."""
    if len(page) < _HEAD.size or page[:4] != _MAGIC:
        raise StateError(f"{place}: this is not a page of window state; start with a new checkpoint")
    version = _HEAD.unpack_from(page)[1]
    if version != PAGE_VERSION:
        raise StateError(
            f"{place}: the window state has layout version {version}, this release reads version {PAGE_VERSION}; "
            "go on with the release that wrote it, or start with a new checkpoint"
        )


def _encode_array(array: Values | None, continued: int = 0) -> list[bytes]:
    """Encodes one array, cut in halves again and again while a part is longer than reading accepts."""
    kind, base, raw = _pack(array)
    rows = 0 if array is None else len(array)
    if array is not None and rows > 1 and (len(raw) > _MAX_BYTES or rows > _MAX_ROWS):
        half = rows // 2
        return [*_encode_array(array[:half], _CONTINUED), *_encode_array(array[half:], continued)]
    packed = pa.compress(raw, codec="zstd", asbytes=True)
    return [_ARRAY.pack(kind + continued, rows, base, len(raw), len(packed)) + packed]


def _pack(array: Values | None) -> tuple[int, int, bytes]:
    if array is None:
        return _NOTHING, 0, b""
    if array.dtype == np.dtype(object):
        texts = len(array) > 0 and isinstance(array[0], str)
        return (_TEXTS if texts else _WIDE), 0, json.dumps(array.tolist(), separators=(",", ":")).encode()
    if array.dtype == np.dtype(bool):
        return _BOOL, 0, np.packbits(array).tobytes()
    if array.dtype in _FLOATS:
        return _FLOATS[array.dtype], 0, array.tobytes()
    plain = _narrow(array)
    if len(array) > 1 and int(array.max()) - int(array.min()) < 2**62:
        steps = _narrow(np.diff(array, prepend=array[:1]))
        # Differences make sorted columns and times shorter, and random values longer.
        if len(steps[2]) < len(plain[2]):
            first = int(array[0])
            return steps[0] + _STEPS, first, struct.pack("<q", steps[1]) + steps[2]
    return plain


def _narrow(array: Values) -> tuple[int, int, bytes]:
    if len(array) == 0:
        return 3, 0, b""
    base, span = int(array.min()), int(array.max()) - int(array.min())
    for kind, dtype in enumerate(_INTEGERS[:3]):
        if span < 2 ** (8 * dtype.itemsize):
            return kind, base, (array - base).astype(dtype).tobytes()
    return 3, 0, array.astype(_INTEGERS[3]).tobytes()


def _decode(page: bytes) -> list[Values | None]:
    count = _HEAD.unpack_from(page)[2]
    position, arrays = _HEAD.size, list[Values | None]()
    unfinished: list[Values] = []
    for _ in range(count):
        kind, rows, base, raw_bytes, packed = _ARRAY.unpack_from(page, position)
        position += _ARRAY.size
        kind, continued = kind % _CONTINUED, kind >= _CONTINUED
        if kind not in _KINDS:
            raise ValueError(f"an unknown kind of array, {kind}")
        if raw_bytes > _MAX_BYTES or rows > _MAX_ROWS or position + packed > len(page):
            raise ValueError("a length does not fit the page")
        content = page[position : position + packed]
        # Checked before memory of that size is allocated.
        if raw_bytes != _count_expected_bytes(kind, rows, raw_bytes) or (
            raw_bytes and raw_bytes != _content_bytes(content)
        ):
            raise ValueError("lengths contradict each other")
        raw = pa.decompress(content, raw_bytes, codec="zstd", asbytes=True) if raw_bytes else b""
        position += packed
        array = _unpack(kind, rows, base, raw)
        if unfinished or continued:
            if array is None:
                raise ValueError("a part of an array is missing")
            unfinished.append(array)
        if not continued:
            arrays.append(np.concatenate(unfinished) if unfinished else array)
            unfinished = []
    if unfinished:
        raise ValueError("an array does not end")
    if position != len(page):
        raise ValueError("bytes are left over")
    return arrays


def _count_expected_bytes(kind: int, rows: int, raw_bytes: int) -> int:
    """Returns the raw bytes that `rows` rows must have; `raw_bytes` itself if rows have no fixed width."""
    if kind in (_TEXTS, _WIDE):
        return raw_bytes
    if kind == _NOTHING:
        return 0
    if kind == _BOOL:
        return (rows + 7) // 8
    if kind in _FLOATS.values():
        return rows * _float_of(kind).itemsize
    if kind >= _STEPS:
        return rows * _INTEGERS[kind - _STEPS].itemsize + 8
    return rows * _INTEGERS[kind].itemsize


def _float_of(kind: int) -> np.dtype[Any]:
    return next(dtype for dtype, code in _FLOATS.items() if code == kind)


def _content_bytes(frame: bytes) -> int | None:
    """Reads the content size that the header of a Zstandard frame (RFC 8878) declares; None if it declares none."""
    if len(frame) < 5 or frame[:4] != _ZSTD:
        return None
    flags = frame[4]
    single = flags & 0x20
    width = (int(bool(single)), 2, 4, 8)[flags >> 6]
    start = 5 + (not single) + (0, 1, 2, 4)[flags & 3]
    # Sizes of two bytes count from 256: smaller ones have one byte.
    return int.from_bytes(frame[start : start + width], "little") + (256 if width == 2 else 0) if width else None


def _unpack(kind: int, rows: int, base: int, raw: bytes) -> Values | None:
    if kind == _NOTHING:
        return None
    if kind in (_TEXTS, _WIDE):
        wanted: type[Any] = str if kind == _TEXTS else int
        items = json.loads(raw)
        if not isinstance(items, list) or not all(type(item) is wanted for item in items):
            raise ValueError("a list of another kind")
        array = make_objects(items)
    elif kind == _BOOL:
        array = np.unpackbits(np.frombuffer(raw, dtype=np.uint8), count=rows).astype(bool)
    elif kind in _FLOATS.values():
        array = np.frombuffer(raw, dtype=_float_of(kind))
    elif kind >= _STEPS:
        steps = np.frombuffer(raw, dtype=_INTEGERS[kind - _STEPS], offset=8).astype(np.int64)
        array = np.cumsum(steps + struct.unpack_from("<q", raw)[0]) + base
    else:
        array = np.frombuffer(raw, dtype=_INTEGERS[kind]).astype(np.int64) + base
    if len(array) != rows:
        raise ValueError(f"{len(array)} rows where {rows} were announced")
    return array
