"""Sets of characters, as the classes of regular expressions in Java have them, written out for RE2."""

from __future__ import annotations

MAX_CODE = 0x10FFFF

# Code points as ranges [first, last], in order and apart.
Ranges = tuple[tuple[int, int], ...]


def merge(*sets: Ranges) -> Ranges:
    """Returns the characters that are in any of the sets."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(each for ranges in sets for each in ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return tuple(merged)


def invert(ranges: Ranges) -> Ranges:
    """Returns the characters that are not in a set."""
    inverted, start = [], 0
    for first, last in ranges:
        if start < first:
            inverted.append((start, first - 1))
        start = last + 1
    return (*inverted, (start, MAX_CODE)) if start <= MAX_CODE else tuple(inverted)


def list_characters(characters: str) -> Ranges:
    """Returns the set of the characters of a text."""
    return merge(tuple((ord(each), ord(each)) for each in characters))


def fold(ranges: Ranges) -> Ranges:
    """Adds the other case of each ASCII letter, all that Java does for `(?i)`."""
    added = [
        (code ^ 32, code ^ 32)
        for code in (*range(65, 91), *range(97, 123))
        if any(first <= code <= last for first, last in ranges)
    ]
    return merge(ranges, tuple(added))


_DIGITS: Ranges = ((48, 57),)
_UPPER: Ranges = ((65, 90),)
_LOWER: Ranges = ((97, 122),)
_ALPHA = merge(_UPPER, _LOWER)
_ALNUM = merge(_DIGITS, _ALPHA)
_PUNCT = ((33, 47), (58, 64), (91, 96), (123, 126))
_SPACE = list_characters(" \t\n\v\f\r")
LINE_ENDS = list_characters("\n\r\x85\u2028\u2029")
SHORTHANDS = {"d": _DIGITS, "w": merge(_ALNUM, list_characters("_")), "s": _SPACE}
NAMED = {
    "Lower": _LOWER,
    "Upper": _UPPER,
    "ASCII": ((0, 127),),
    "Alpha": _ALPHA,
    "Digit": _DIGITS,
    "Alnum": _ALNUM,
    "Punct": _PUNCT,
    "Graph": ((33, 126),),
    "Print": ((32, 126),),
    "Blank": list_characters(" \t"),
    "Cntrl": ((0, 31), (127, 127)),
    "XDigit": merge(_DIGITS, ((65, 70), (97, 102))),
    "Space": _SPACE,
}
CONTROLS = {"t": 9, "n": 10, "r": 13, "f": 12, "a": 7, "e": 27}


def write_characters(ranges: Ranges) -> str:
    """Writes a set as RE2 reads it."""
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _write_code(ranges[0][0])
    # An empty set, such as [^\w\W], matches nothing.
    shown = (_write_code(first) + (f"-{_write_code(last)}" if last > first else "") for first, last in ranges)
    return f"[{''.join(shown)}]" if ranges else r"[^\x{0}-\x{10ffff}]"


def _write_code(code: int) -> str:
    return chr(code) if chr(code).isascii() and chr(code).isalnum() else f"\\x{{{code:x}}}"
