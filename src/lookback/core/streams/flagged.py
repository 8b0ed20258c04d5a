"""The events that variants of a rule flag, in columns: many variants of one rule need no alert of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lookback.core.values.keys import Int64s

WORD_BITS = 64


class FlagPlace(NamedTuple):
    """The place of a rule's flags: the bit of the rules of a group, which are judged over the same keys."""

    group: int
    bit: int


@dataclass(frozen=True)
class FlaggedEvents:
    """The events that at least one rule of a group has noted in place of alerts (see `Evaluator`).

    keys: texts by group_by field; times in microseconds; arrivals: commits. bits: shape (events, words), a bit for each rule.
    """

    group: int
    keys: Sequence[Mapping[str, str | None]]
    event_ids: Sequence[str]
    times: Int64s
    arrivals: Int64s
    bits: Int64s


def make_bits(rows: int, flags: Iterable[tuple[int, Int64s]]) -> Int64s:
    """Returns the words of each row, shape (rows, words), with the bits set. flags: each bit with its rows, each row once."""
    listed = list(flags)
    words = 1 + max((bit for bit, _ in listed), default=0) // WORD_BITS
    bits = np.zeros((rows, words), dtype=np.uint64)
    for bit, at in listed:
        word, shift = divmod(bit, WORD_BITS)
        bits[at, word] |= np.uint64(1 << shift)
    return bits.view(np.int64)


def count_bits(words: Int64s, bits: int) -> Int64s:
    """Returns per bit, from 0, in how many rows it is set. words: shape (rows, words); bits: how many are counted."""
    counts = np.zeros(bits, dtype=np.int64)
    for bit in range(bits):
        word, shift = divmod(bit, WORD_BITS)
        if word < words.shape[1]:
            counts[bit] = np.count_nonzero(words[:, word].view(np.uint64) & np.uint64(1 << shift))
    return counts
