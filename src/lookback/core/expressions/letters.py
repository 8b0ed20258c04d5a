"""Capitals and small letters, as Spark pairs them, whatever the version of Python."""

from __future__ import annotations

# Pairs of a capital and a small letter that Unicode added after version 13, which the oldest supported Python has: the
# first capital of a range, the number of capitals, and the first small letter. Spark knows them, but Python may not.
_NEW_CAPITALS = (
    (0x1C89, 1, 0x1C8A), (0x2C2F, 1, 0x2C5F), (0xA7C0, 1, 0xA7C1), (0xA7CB, 1, 0x264), (0xA7CC, 1, 0xA7CD),
    (0xA7CE, 1, 0xA7CF), (0xA7D0, 1, 0xA7D1), (0xA7D2, 1, 0xA7D3), (0xA7D4, 1, 0xA7D5), (0xA7D6, 1, 0xA7D7),
    (0xA7D8, 1, 0xA7D9), (0xA7DA, 1, 0xA7DB), (0xA7DC, 1, 0x19B), (0x10570, 11, 0x10597), (0x1057C, 15, 0x105A3),
    (0x1058C, 7, 0x105B3), (0x10594, 2, 0x105BB), (0x10D50, 22, 0x10D70), (0x16EA0, 25, 0x16EBB),
)  # fmt: skip
_TO_SMALL = {first + at: small + at for first, count, small in _NEW_CAPITALS for at in range(count)}
_TO_CAPITAL = {small: capital for capital, small in _TO_SMALL.items()}


def change_to_lower(text: str) -> str:
    """Converts a text to lower case, as Spark does."""
    return text.lower() if text.isascii() else text.translate(_TO_SMALL).lower()


def change_to_upper(text: str) -> str:
    """Converts a text to upper case, as Spark does."""
    return text.upper() if text.isascii() else text.translate(_TO_CAPITAL).upper()


def change_to_title(text: str) -> str:
    """Converts each letter of a text to its capital at the beginning of a word, as Spark does."""
    return "".join(each.translate(_TO_CAPITAL).title() for each in text)
