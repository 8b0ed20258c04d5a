"""Kernels of functions over arrays. NaN is equal to itself and the greatest double, as in Spark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lookback.core.expressions.kernels import KernelResult, mask_or_none
from lookback.core.expressions.signatures import Call, CallKernel
from lookback.core.values.columns import Values, is_nan, make_objects, replace_nan


def contains_item(call: Call, values: Sequence[Values]) -> KernelResult:
    """Tells whether arrays contain a value; NULL if it is not among the known items and others are NULL."""
    contains = np.zeros(len(values[0]), dtype=bool)
    unknown = np.zeros(len(values[0]), dtype=bool)
    for row, (items, value) in enumerate(zip(values[0].tolist(), values[1].tolist(), strict=True)):
        contains[row] = value in items or (is_nan(value) and any(map(is_nan, items)))
        unknown[row] = not contains[row] and None in items
    return KernelResult(contains, None, mask_or_none(unknown))


def find_item(call: Call, values: Sequence[Values]) -> KernelResult:
    """Finds the first position of a value in arrays, from 1; 0 if there is none."""
    rows = zip(values[0].tolist(), values[1].tolist(), strict=True)
    return KernelResult(np.fromiter((_find(*row) for row in rows), dtype=np.int64, count=len(values[0])))


def _find(items: list[Any], value: Any) -> int:
    wanted = replace_nan(value)
    return next((at for at, item in enumerate(items, 1) if item is not None and replace_nan(item) == wanted), 0)


def take_item(call: Call, values: Sequence[Values]) -> KernelResult:
    """Takes the item at a position of arrays, from 1, or from -1 for the last; an error if there is none."""
    arrays, positions = values[0].tolist(), values[1].tolist()
    elements: list[Any] = []
    error = np.zeros(len(arrays), dtype=bool)
    for row, (items, p) in enumerate(zip(arrays, positions, strict=True)):
        error[row] = not 0 < abs(p) <= len(items)
        elements.append(None if error[row] else items[p - 1 if p > 0 else p])
    return _store_items(call, elements)._replace(error=mask_or_none(error))


def _store_items(call: Call, elements: list[Any]) -> KernelResult:
    null = np.fromiter((item is None for item in elements), dtype=bool, count=len(elements))
    filler = np.zeros((), dtype=call.type.storage).item()
    known = make_objects([filler if item is None else item for item in elements]).astype(call.type.storage, copy=False)
    return KernelResult(known, None, mask_or_none(null))


def drop_repeated(call: Call, values: Sequence[Values]) -> KernelResult:
    """Keeps the first of equal items of arrays; NULL counts as a value."""
    return KernelResult(make_objects([_keep_first(items) for items in values[0].tolist()]))


def _keep_first(items: list[Any]) -> list[Any]:
    first: dict[Any, Any] = {}
    for item in items:
        # Spark, too, writes one of the two zeros.
        first.setdefault(replace_nan(item), item + 0.0 if isinstance(item, float) else item)
    return list(first.values())


def pick_item(pick: Callable[..., Any]) -> CallKernel:
    """Makes the kernel that picks the greatest or the least item by `max` or `min`; NULLs do not count."""

    def kernel(call: Call, values: Sequence[Values]) -> KernelResult:
        known = ([item for item in items if item is not None] for items in values[0].tolist())
        return _store_items(call, [pick(items, key=_order) if items else None for items in known])

    return kernel


def _order(item: Any) -> tuple[bool, Any]:
    return bool(is_nan(item)), item
