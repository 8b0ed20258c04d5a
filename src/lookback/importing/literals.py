"""Writes texts of other systems as literals of SQL."""

from __future__ import annotations

_ESCAPES = {"\\": "\\\\", "'": "\\'", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def write_text(text: str) -> str:
    """Writes a text as a literal; a raw one where that leaves backslashes as they are."""
    if "\\" in text and "'" not in text and text.isprintable():
        return f"r'{text}'"
    written = (_ESCAPES.get(each) or (each if each.isprintable() else f"\\u{ord(each):04x}") for each in text)
    return f"'{''.join(written)}'"
