"""The events that variants of a rule flag, in columns. Comparing variants takes only flags, not alerts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lookback.core.values.keys import Int64s

WORD_BITS = 64


class FlagPlace(NamedTuple):
    """The place of a rule's flags: its group, whose rules share the same keys, and its bit within the group."""

    group: int
    bit: int


@dataclass(frozen=True)
class FlaggedEvents:
    """The events that at least one rule of a group flagged instead of raising alerts (see `Evaluator`).

    keys: texts by group_by field. times: microseconds. arrivals: commits. bits: shape (events, words), one bit per
    rule.
    """

    group: int
    keys: Sequence[Mapping[str, str | None]]
    event_ids: Sequence[str]
    times: Int64s
    arrivals: Int64s
    bits: Int64s


def make_bits(rows: int, flags: Iterable[tuple[int, Int64s]]) -> Int64s:
    """Sets bits in the words of rows, shape (rows, words). flags: each bit with its rows, without duplicates."""
    listed = list(flags)
    words = 1 + max((bit for bit, _ in listed), default=0) // WORD_BITS
    bits = np.zeros((rows, words), dtype=np.uint64)
    for bit, at in listed:
        word, shift = divmod(bit, WORD_BITS)
        bits[at, word] |= np.uint64(1 << shift)
    return bits.view(np.int64)


def count_bits(words: Int64s, bits: int) -> Int64s:
    """Counts the rows in which each of the first `bits` bits is set. words: shape (rows, words)."""
    counts = np.zeros(bits, dtype=np.int64)
    for bit in range(bits):
        word, shift = divmod(bit, WORD_BITS)
        if word < words.shape[1]:
            counts[bit] = np.count_nonzero(words[:, word].view(np.uint64) & np.uint64(1 << shift))
    return counts
