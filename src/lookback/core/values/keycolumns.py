"""Keeps the rows of many keys by column, so that they are encoded, decoded and selected together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lookback.core.errors import StateError
from lookback.core.values.cache import estimate_bytes
from lookback.core.values.columns import Column, Mask, Values, make_objects
from lookback.core.values.keys import Int64s

_encode_json = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(eq=False)
class KeyColumns:
    """Rows by column, those of a key one after another.

    values: per column an array of shape (rows,) of bool, int64, float32 or float64, or of objects that are all str, all int
    or all lists; nulls: per column a mask of the same shape, None if no row is NULL. A value under a mark has no meaning.
    """

    values: list[Values]
    nulls: list[Mask | None]

    def __len__(self) -> int:
        return len(self.values[0])

    @classmethod
    def from_columns(cls, columns: Sequence[Column], at: Int64s | slice = slice(None)) -> KeyColumns:
        """Makes the rows at some positions of columns."""
        nulls: list[Mask | None] = []
        for column in columns:
            null = None if column.null is None and column.error is None else ~column.is_known()[at]
            nulls.append(null if null is not None and null.any() else None)
        return cls([column.values[at] for column in columns], nulls)

    def take(self, at: Int64s) -> KeyColumns:
        """Returns the rows at positions."""
        return KeyColumns(
            [each[at] for each in self.values], [None if each is None else each[at] for each in self.nulls]
        )

    @classmethod
    def join(cls, parts: Sequence[KeyColumns]) -> KeyColumns:
        """Joins parts that have rows and the same columns."""
        if len(parts) == 1:
            return parts[0]
        values = [np.concatenate(each) for each in zip(*(part.values for part in parts), strict=True)]
        nulls: list[Mask | None] = []
        for masks in zip(*(part.nulls for part in parts), strict=True):
            known = [np.zeros(len(part), dtype=bool) for part in parts] if any(m is not None for m in masks) else []
            filled = [none if mask is None else mask for mask, none in zip(masks, known, strict=False)]
            nulls.append(np.concatenate(filled) if filled else None)
        return cls(values, nulls)

    def list_column(self, column: int, at: Int64s | slice) -> list[Any]:
        """Lists the values of a column at positions; None for NULL."""
        values: list[Any] = self.values[column][at].tolist()
        null = self.nulls[column]
        if null is None:
            return values
        return [None if is_null else value for value, is_null in zip(values, null[at].tolist(), strict=True)]

    def list_rows(self, begin: int, end: int) -> list[list[Any]]:
        """Lists the rows in [begin, end), each as a list of its values."""
        columns = [self.list_column(column, slice(begin, end)) for column in range(len(self.values))]
        return list(map(list, zip(*columns, strict=True)))

    @property
    def memory_bytes(self) -> int:
        """The estimated memory, in bytes."""
        return estimate_bytes([self.values, [null for null in self.nulls if null is not None]])

    def encode(self) -> list[Values | None]:
        """Returns arrays for a page."""
        is_json, arrays = [], list[Values | None]()
        for values, null in zip(self.values, self.nulls, strict=True):
            stored = values
            if values.dtype == np.dtype(object):
                known = values if null is None else values[~null]
                first = known[0] if len(known) else ""
                fill: Any = 0 if isinstance(first, int) else ""
                listed = map(_encode_json, known.tolist()) if isinstance(first, list) else known.tolist()
                stored = np.full(len(values), fill, dtype=object)
                stored[slice(None) if null is None else ~null] = list(listed)
                is_json.append(isinstance(first, list))
            else:
                is_json.append(False)
            arrays += [stored, null]
        return [np.array(is_json, dtype=bool), *arrays]

    @classmethod
    def decode(cls, arrays: Sequence[Values | None], rows: int, place: str) -> KeyColumns:
        """Reads `rows` rows from arrays that `encode` returned. Raises StateError."""
        is_json, pairs = arrays[0], list(zip(arrays[1::2], arrays[2::2], strict=False))
        if is_json is None or is_json.dtype != np.dtype(bool) or len(arrays) != 1 + 2 * len(is_json) or not pairs:
            raise _refuse(place)
        values, nulls = list[Values](), list[Mask | None]()
        for has_json, (array, null) in zip(is_json.tolist(), pairs, strict=True):
            if array is None or len(array) != rows:
                raise _refuse(place)
            if null is not None and (null.dtype != np.dtype(bool) or len(null) != rows):
                raise _refuse(place)
            values.append(_decode_lists(array, place) if has_json else array)
            nulls.append(null)
        return cls(values, nulls)


def _decode_lists(texts: Values, place: str) -> Values:
    try:
        return make_objects(json.loads(text) if text else [] for text in texts.tolist())
    except (ValueError, TypeError, RecursionError) as error:
        raise _refuse(place) from error


def _refuse(place: str) -> StateError:
    return StateError(f"{place}: a page of window state holds something else; start with a new checkpoint")
