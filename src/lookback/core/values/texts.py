"""Puts texts of any origin on one line, cuts them, and writes counts and lists for people."""

from __future__ import annotations

import re
from collections.abc import Sequence

_UNPRINTABLE = re.compile("\0+")
_MAX_ERROR_CHARACTERS = 300


def to_one_line(text: str) -> str:
    """Returns the text with a space for each run of unprintable characters, line breaks among them.

    Half of a surrogate pair, which JSON can hold and a table cannot, is written as a backslash, u and four digits. The
    result cannot steer a terminal.
    """
    whole = text.encode("utf-8", "backslashreplace").decode()
    return _UNPRINTABLE.sub(" ", "".join(each if each.isprintable() else "\0" for each in whole))


def escape_unprintable(text: str) -> str:
    """Escapes the unprintable characters of a text, line breaks among them, so that a value can forge no line."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


def collapse_spaces(text: str) -> str:
    """Returns the text on one line with single spaces: none around it, and one for each run of spaces within."""
    return " ".join(to_one_line(text).split())


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, which leaves out the trace of another language; never empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def summarize_error(error: BaseException) -> str:
    """Returns at most 300 characters of the first line of an error's message; never empty."""
    return first_line(error)[:_MAX_ERROR_CHARACTERS]


def cut_end(text: str, most: int) -> str:
    """Returns at most `most` characters of the text, which ends in ... where it was cut."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def cut_middle(text: str, most: int) -> str:
    """Shortens a text of more than `most` characters: keeps two thirds of them from its start and a third from its end."""
    return text if len(text) <= most else f"{text[: most * 2 // 3]} ... {text[-most // 3 :]}"


def quote_identifier(name: str) -> str:
    """Writes the name of a column or a table as SQL has it, in backticks."""
    return f"`{name.replace('`', '``')}`"


def count_noun(number: int, noun: str) -> str:
    """Returns a number with its noun, such as `1 rule` and `2,000 rules`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def format_figure(figure: float) -> str:
    """Returns a figure with four digits, or with all those before its point, such as `0.04762`, `57.6` and `21,620`."""
    return f"{figure:,.0f}" if abs(figure) >= 1_000 else f"{figure:.4g}"


def join_words(words: Sequence[str]) -> str:
    """Returns the words as a list in a sentence, such as `a, b and c`; at least one word."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
