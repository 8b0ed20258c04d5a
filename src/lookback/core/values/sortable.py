"""Writes values as texts that sort like the values, whatever text follows, and reads them back.

NULL comes first, NaN last, and both zeros are one. Texts sort by code point, which is the order of their UTF-8 bytes.
"""

from __future__ import annotations

import struct
from typing import Any

from lookback.core.values.columns import is_nan
from lookback.core.values.types import DataType

_NULL, _NUMBER, _TEXT = "0", "1", "2"
# Digits of the longest number: a decimal without its point.
_MAX_DIGITS = 38
_END = "\0\0"
# The bits of a double without its sign.
_MAGNITUDE = 2**63 - 1


def write_sortable(value: Any) -> str:
    """Writes a stored value: a text, a number, a boolean or None."""
    if value is None:
        return _NULL
    if isinstance(value, str):
        # The end marker sorts before every character, including an escaped NUL within the text.
        return _TEXT + value.replace("\0", "\0\1") + _END
    whole = _rank_double(value) if isinstance(value, float) else int(value)
    return _NUMBER + str(whole + 10**_MAX_DIGITS).zfill(_MAX_DIGITS + 1)


def read_sortable(text: str, at: int, type_: DataType) -> tuple[Any, int]:
    """Reads the value of a type whose text begins at a position, and returns it with the position after it."""
    kind, begin = text[at], at + 1
    if kind == _NULL:
        return None, begin
    if kind == _TEXT:
        end = text.index(_END, begin)
        return text[begin:end].replace("\0\1", "\0"), end + len(_END)
    end = begin + _MAX_DIGITS + 1
    whole = int(text[begin:end]) - 10**_MAX_DIGITS
    return (_unrank_double(whole) if type_.is_float else bool(whole) if type_.name == "boolean" else whole), end


def _rank_double(value: float) -> int:
    """Returns an integer that sorts like a double: its bits, and for a negative one those of its magnitude, negated."""
    (bits,) = struct.unpack("<q", struct.pack("<d", float("nan") if is_nan(value) else value + 0.0))
    return int(bits) if bits >= 0 else -(bits & _MAGNITUDE)


def _unrank_double(rank: int) -> float:
    value: float = struct.unpack("<d", struct.pack("<q", abs(rank)))[0]
    return value if rank >= 0 else -value
