"""Kernels of functions over texts. Positions and lengths count characters (code points), as in Spark."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from lookback.core.expressions.kernels import KernelResult, map_repeated, mask_or_none
from lookback.core.expressions.letters import change_to_lower, change_to_title
from lookback.core.expressions.signatures import Call, CallKernel
from lookback.core.values.columns import Values, make_objects


class TooManyCharacters(Exception):
    """Raised if the texts of all events do not fit in memory at once; evaluate fewer events at a time."""


# The limit for one call of a function that may return longer texts than it takes, such as concat(). A single text beyond
# it, or those of the items of one array, are an error of their event; if only the texts of several events exceed it, these
# are evaluated in slices.
MAX_JOINED_CHARACTERS = 256_000_000


def grow_texts(rows: Iterable[Sequence[Any]], measure: Callable[..., int], make: Callable[..., str]) -> KernelResult:
    """Makes a text of each row whose length `measure` says before it is made. Raises TooManyCharacters."""
    made: list[str] = []
    errors: list[bool] = []
    characters = 0
    for row in rows:
        length = measure(*row)
        errors.append(length > MAX_JOINED_CHARACTERS)
        characters += 0 if errors[-1] else length
        if characters > MAX_JOINED_CHARACTERS:
            raise TooManyCharacters
        made.append("" if errors[-1] else make(*row))
    return KernelResult(make_objects(made), mask_or_none(np.array(errors, dtype=bool)))


def map_growing(measure: Callable[..., int], make: Callable[..., str]) -> CallKernel:
    """Makes the kernel of a function that may return longer texts than it takes; see `grow_texts`."""
    return lambda call, values: grow_texts(zip(*(v.tolist() for v in values), strict=True), measure, make)


def map_texts(function: Callable[..., str]) -> CallKernel:
    """Makes the kernel of a function that returns no longer texts than it takes."""

    def run(call: Call, values: Sequence[Values]) -> KernelResult:
        if len(values) == 1:
            return KernelResult(map_repeated(lambda texts: make_objects(map(function, texts.tolist())), values[0]))
        return KernelResult(make_objects(map(function, *(each.tolist() for each in values))))

    return run


def measure_joined(*texts: str) -> int:
    """Returns the length of texts joined."""
    return sum(map(len, texts))


def join(*texts: str) -> str:
    """Joins texts."""
    return "".join(texts)


def measure_separated(separator: str | None, *parts: str | list[str | None] | None) -> int:
    """Returns the length of `join_separated`."""
    texts = _list_texts(parts)
    return 0 if separator is None else sum(map(len, texts)) + len(separator) * max(len(texts) - 1, 0)


def join_separated(separator: str | None, *parts: str | list[str | None] | None) -> str:
    """Joins texts, and those in arrays, with a separator; leaves NULLs out."""
    return "" if separator is None else separator.join(_list_texts(parts))


def measure_items(items: list[str | None], separator: str, filler: str | None = None) -> int:
    """Returns the length of `join_items`."""
    return measure_separated(separator, _fill_items(items, filler))


def join_items(items: list[str | None], separator: str, filler: str | None = None) -> str:
    """Joins the texts of an array with a separator; `filler` stands for NULL, which is left out without one."""
    return join_separated(separator, _fill_items(items, filler))


def _fill_items(items: list[str | None], filler: str | None) -> list[str | None]:
    return [filler if item is None else item for item in items]


def _list_texts(parts: Iterable[str | list[str | None] | None]) -> list[str]:
    items = (item for part in parts for item in (part if isinstance(part, list) else [part]))
    return [item for item in items if item is not None]


def measure_replaced(text: str, old: str, new: str = "") -> int:
    """Returns the length of `replace`."""
    return len(text) + text.count(old) * (len(new) - len(old)) if old else len(text)


def replace(text: str, old: str, new: str = "") -> str:
    """Replaces all occurrences of `old`; an empty `old` occurs nowhere."""
    return text.replace(old, new) if old else text


def measure_padded(text: str, length: int, pad: str = " ") -> int:
    """Returns a length that padding does not exceed."""
    return max(length, 0) if pad else len(text)


def pad_left(text: str, length: int, pad: str = " ") -> str:
    """Fills a text with `pad` on the left up to `length`, or cuts it on the right."""
    return _fill(len(text), length, pad) + text[: max(length, 0)]


def pad_right(text: str, length: int, pad: str = " ") -> str:
    """Fills or cuts a text on the right."""
    return text[: max(length, 0)] + _fill(len(text), length, pad)


def _fill(has: int, length: int, pad: str) -> str:
    missing = length - has
    return (pad * (missing // len(pad) + 1))[:missing] if missing > 0 and pad else ""


def measure_repeated(text: str, count: int) -> int:
    """Returns the length of a text repeated."""
    return len(text) * max(count, 0)


def repeat(text: str, count: int) -> str:
    """Repeats a text; none of it for a count below 1."""
    return text * count


def reverse(call: Call, values: Sequence[Values]) -> KernelResult:
    """Reverses texts or arrays."""
    return KernelResult(make_objects([each[::-1] for each in values[0].tolist()]))


def capitalize_words(text: str) -> str:
    """Writes the first letter of each word as a capital and the others small; words are separated by blanks."""
    return " ".join(map(_capitalize, text.split(" ")))


def _capitalize(word: str) -> str:
    # A small letter depends on those around it (final sigma), and may be several characters.
    return change_to_title(word[:1]) + change_to_lower(word)[len(change_to_lower(word[:1])) :]


def find_position(call: Call, values: Sequence[Values]) -> KernelResult:
    """Finds the first position of a text in another one, from 1; 0 if there is none."""
    pairs = zip(values[0].tolist(), values[1].tolist(), strict=True)
    return KernelResult(np.fromiter((text.find(part) + 1 for text, part in pairs), np.int64, count=len(values[0])))


def split_part(call: Call, values: Sequence[Values]) -> KernelResult:
    """Takes a part of texts, from 1, or from -1 for the last; empty if there is none, and an error for 0."""
    rows = zip(*(each.tolist() for each in values), strict=True)
    return KernelResult(make_objects([_take_part(*row) for row in rows]), mask_or_none(values[2] == 0))


def _take_part(text: str, delimiter: str, number: int) -> str:
    parts = text.split(delimiter) if delimiter else [text]
    if not 0 < abs(number) <= len(parts):
        return ""
    return parts[number - 1 if number > 0 else number]


def hash_md5(text: str) -> str:
    """Returns the MD5 of a text in UTF-8."""
    return hashlib.md5(_encode(text), usedforsecurity=False).hexdigest()


def hash_sha2(call: Call, values: Sequence[Values]) -> KernelResult:
    """Computes SHA-224 to SHA-512 of texts in UTF-8, 0 meaning 256; NULL for another number of bits."""
    makers = [_SHA2.get(bits) for bits in values[1].tolist()]
    hashed = [
        "" if make is None else make(_encode(text)).hexdigest()
        for text, make in zip(values[0].tolist(), makers, strict=True)
    ]
    unknown = np.fromiter((make is None for make in makers), dtype=bool, count=len(makers))
    return KernelResult(make_objects(hashed), None, mask_or_none(unknown))


_SHA2: dict[int, Callable[[bytes], Any]] = {
    0: hashlib.sha256,
    224: hashlib.sha224,
    256: hashlib.sha256,
    384: hashlib.sha384,
    512: hashlib.sha512,
}


def _encode(text: str) -> bytes:
    # A text from Python may have half of a surrogate pair.
    return text.encode("utf-8", "surrogatepass")
