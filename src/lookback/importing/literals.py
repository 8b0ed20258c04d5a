"""Writes texts of other systems as literals of SQL, and their spans as durations."""

from __future__ import annotations

from lookback.core.values.durations import format_duration

_MICROSECONDS = 1_000_000
_ESCAPES = {"\\": "\\\\", "'": "\\'", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def write_text(text: str) -> str:
    """Writes a text as a literal; a raw one where that leaves backslashes as they are."""
    if "\\" in text and "'" not in text and text.isprintable():
        return f"r'{text}'"
    written = (_ESCAPES.get(each) or (each if each.isprintable() else f"\\u{ord(each):04x}") for each in text)
    return f"'{''.join(written)}'"


def write_span(seconds: int) -> str:
    """Writes a number of seconds as a duration."""
    return format_duration(seconds * _MICROSECONDS)


def write_window(seconds: int, slide: int) -> str | dict[str, str]:
    """Writes a window that ends at each event, or a sliding one. slide: in seconds; 0 for none."""
    span = write_span(seconds)
    return {"sliding": span, "slide": write_span(slide)} if slide else span
