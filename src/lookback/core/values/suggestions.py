"""Suggests the known name that a misspelt one was probably meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# A longer text is hardly a misspelt name, and comparing it would take long.
_MAX_CHARACTERS = 200


def find_nearest(name: object, known: Iterable[str], likeness: float = 0.6) -> str | None:
    """Finds the known name most similar to `name`, ignoring case; None if none is similar or `name` is not a text.

    likeness: the least of a similar name, from 0 to 1, as difflib computes it.
    """
    if not isinstance(name, str) or len(name) > _MAX_CHARACTERS:
        return None
    by_lower = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), by_lower, 1, likeness)
    return by_lower[near[0]] if near else None


def suggest(name: object, known: Iterable[str], otherwise: str | None = None) -> str:
    """Returns `did you mean 'x'?` for the most similar known name x.

    If none is similar, returns `otherwise`, or a list of the known names if that is None.
    """
    listed = list(known)
    nearest = find_nearest(name, listed)
    if nearest is not None:
        return f"did you mean {nearest!r}?"
    return f"known: {', '.join(listed)}" if otherwise is None else otherwise
