"""Finds the field of the stream that a field of a rule is."""

from __future__ import annotations

import re
from collections.abc import Mapping

from lookback.core.expressions.syntax import name_as_sql
from lookback.core.streams.declaration import Stream
from lookback.core.streams.fields import POSITION, RESERVED_FIELDS
from lookback.core.values.suggestions import suggest
from lookback.core.values.types import DataType
from lookback.importing.reasons import Refusal

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_]+", re.ASCII)
_MAX_CHARACTERS = 120


def name_column(name: str) -> str:
    """Returns a name with `_` for what the name of a column cannot have, such as `c_uri` for `c-uri`."""
    plain = _NOT_IN_NAMES.sub("_", name)[:_MAX_CHARACTERS]
    if not plain or plain[0].isdigit():
        return f"_{plain}"
    return f"{plain}_" if plain.lower() in {*RESERVED_FIELDS, POSITION} else plain


class FieldNames:
    """The fields of a stream by the names that rules use.

    A field is the one that the map names, else the one of the same name, else of the same name whatever the capitals,
    else of the same name with `_` for what a field's name cannot have.
    """

    def __init__(self, stream: Stream, mapped: Mapping[str, str]) -> None:
        self._stream, self._mapped = stream, mapped
        self._by_lower = {name.lower(): name for name in stream.fields}

    def find(self, name: str) -> str:
        """Returns the stream's field. Raises Refusal if there is none."""
        for each in (self._mapped.get(name, name), name):
            if each in self._stream.fields:
                return each
        for each in (name, name_column(name)):
            if found := self._by_lower.get(each.lower()):
                return found
        hint = suggest(name, self._stream.fields, "")
        raise Refusal(
            "unmapped-field", f"stream {self._stream.name!r} has no field {name!r:.100}{hint and f'; {hint}'}"
        )

    def find_type(self, name: str) -> DataType:
        """Returns the type of the field. Raises Refusal if there is none."""
        return self._stream.fields[self.find(name)]

    def write(self, name: str) -> str:
        """Writes the field as SQL has it. Raises Refusal if there is none."""
        return name_as_sql(self.find(name))
