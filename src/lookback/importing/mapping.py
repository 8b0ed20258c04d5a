"""The file of --map: which fields of the stream the fields of the rules are, and what stands for their sources of events.

fields: {CommandLine: command_line, User: user_name}
keywords: [message]                      # where rules look for words without a field
logsources:
  - {product: windows, category: process_creation, where: event_code = 1}
license: DRL-1.1                         # of rules that name none
url: https://github.com/SigmaHQ/sigma/blob/master/rules/{path}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lookback.core.errors import SetupError
from lookback.core.streams.declaration import Stream
from lookback.core.values.suggestions import suggest
from lookback.importing.documents import read_mapping_file

_KEYS = ("fields", "keywords", "logsources", "license", "url")
_SOURCE_KEYS = ("product", "category", "service")


@dataclass(frozen=True)
class SourceEntry:
    """The condition that events of some sources satisfy. named: product, category and service, as far as given."""

    named: Mapping[str, str]
    where: str


@dataclass(frozen=True)
class NameMap:
    """The content of a file of --map; empty without one.

    Attributes:
        fields: Field of the rules -> field of the stream.
        keywords: Fields of the stream in which rules look for words without a field.
        logsources: The first entry whose names are all those of a rule's source holds; None if sources are left alone.
        license: The licence of rules that name none.
        url: The address of a rule, with `{path}` for its file below the folder that was given.
    """

    fields: Mapping[str, str] = field(default_factory=dict)
    keywords: tuple[str, ...] = ()
    logsources: tuple[SourceEntry, ...] | None = None
    license: str = ""
    url: str = ""

    def find_source(self, source: Mapping[str, str]) -> SourceEntry | None:
        """Finds the entry for a source of events; None if there is none."""
        entries = (each for each in self.logsources or () if each.named.items() <= source.items())
        return next(entries, None)

    def require_fields(self, stream: Stream) -> None:
        """Raises SetupError unless the stream has the fields that are named."""
        for name in (*self.fields.values(), *self.keywords):
            if name not in stream.fields:
                hint = suggest(name, stream.fields)
                raise SetupError(f"--map: stream {stream.name!r} has no field {name!r:.100}; {hint}")


def load_map(path: str | Path | None) -> NameMap:
    """Reads a file of --map. Raises SetupError if something in it is wrong."""
    if path is None:
        return NameMap()
    document = read_mapping_file(path)
    if unknown := [name for name in document if name not in _KEYS]:
        raise SetupError(f"{path}: unknown key {unknown[0]!r:.100}; {suggest(unknown[0], _KEYS)}")
    texts = {name: _read_text(document.get(name, ""), name, path) for name in ("license", "url")}
    fields = document.get("fields", {})
    if not isinstance(fields, Mapping):
        raise SetupError(
            f"{path}: fields must be a mapping of a rule's field to one of the stream, got {fields!r:.100}"
        )
    keywords = document.get("keywords", [])
    if not isinstance(keywords, list):
        raise SetupError(f"{path}: keywords must be a list of fields, got {keywords!r:.100}")
    named = {_read_text(key, "fields", path): _read_text(value, f"fields.{key}", path) for key, value in fields.items()}
    searched = tuple(_read_text(each, "keywords", path) for each in keywords)
    return NameMap(named, searched, _read_sources(document.get("logsources"), path), texts["license"], texts["url"])


def _read_text(value: Any, place: str, path: str | Path) -> str:
    if not isinstance(value, str):
        raise SetupError(f"{path}: {place} must be a text, got {value!r:.100}; put it in quotes")
    return value


def _read_sources(entries: Any, path: str | Path) -> tuple[SourceEntry, ...] | None:
    if entries is None:
        return None
    if not isinstance(entries, list):
        raise SetupError(f"{path}: logsources must be a list of mappings, got {entries!r:.100}")
    found = []
    for at, entry in enumerate(entries):
        place, keys = f"logsources[{at}]", (*_SOURCE_KEYS, "where")
        if not isinstance(entry, Mapping):
            raise SetupError(f"{path}: {place} must be a mapping of {', '.join(keys)}, got {entry!r:.100}")
        if unknown := [name for name in entry if name not in keys]:
            raise SetupError(f"{path}: {place}: unknown key {unknown[0]!r:.100}; {suggest(unknown[0], keys)}")
        if "where" not in entry:
            raise SetupError(f'{path}: {place}.where is missing; write a condition, or "true" for every event')
        texts = {name: _read_text(value, f"{place}.{name}", path) for name, value in entry.items()}
        found.append(SourceEntry({name: texts[name] for name in _SOURCE_KEYS if name in texts}, texts["where"]))
    return tuple(found)
