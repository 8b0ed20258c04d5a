"""Suggests the known name that a misspelt one was probably meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# A longer name is no misspelt one, and comparing it would take long.
_MAX_CHARACTERS = 200


def find_nearest(name: object, known: Iterable[str]) -> str | None:
    """The known name that is most like `name`, whatever its capitals; None where none is alike or `name` is no text."""
    if not isinstance(name, str) or len(name) > _MAX_CHARACTERS:
        return None
    by_lower = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), by_lower, 1)
    return by_lower[near[0]] if near else None


def suggest(name: object, known: Iterable[str], otherwise: str | None = None) -> str:
    """`did you mean 'x'?` for the nearest known name x.

    otherwise: where none is alike; if it is not given, the known names are listed.
    """
    listed = list(known)
    nearest = find_nearest(name, listed)
    if nearest is not None:
        return f"did you mean {nearest!r}?"
    return f"known are {', '.join(listed)}" if otherwise is None else otherwise
