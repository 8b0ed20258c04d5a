"""Finds the files of rules to read, and writes those of rules that were made, without touching anybody else's."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lookback.core.errors import SetupError
from lookback.importing.reasons import Refusal

YAML_SUFFIXES = (".yml", ".yaml")
_MAX_SLUG_CHARACTERS = 80
# The first line of a file that the import wrote, with a digest of the rest: only an unchanged file is written again.
_HEAD = "# Written by `lookback import`, which replaces this file as long as nothing below changes: "
_HEAD_LINE = re.compile(re.escape(_HEAD) + r"([0-9a-f]{16})\n", re.ASCII)


@dataclass(frozen=True)
class RuleFile:
    """A file to read. below: its path below the folder that was given, with `/`."""

    path: Path
    below: str


def find_files(places: Sequence[str | Path], suffixes: Sequence[str] = YAML_SUFFIXES) -> list[RuleFile]:
    """Lists files, and in folders those that end with a suffix, each once, in order.

    Raises:
        SetupError: If a place does not exist, or there is no file.
    """
    found: dict[Path, RuleFile] = {}
    for place in map(Path, places):
        if not place.exists():
            raise SetupError(f"{place} does not exist; name files or folders of rules")
        inside = sorted(each for each in place.rglob("*") if each.suffix in suffixes and each.is_file())
        for path in inside if place.is_dir() else [place]:
            below = path.relative_to(place).as_posix() if place.is_dir() else path.name
            found.setdefault(path.resolve(), RuleFile(path, below))
    if not found:
        raise SetupError(f"{', '.join(map(str, places))}: there is no file that ends with {' or '.join(suffixes)}")
    return list(found.values())


def name_slug(title: str) -> str:
    """Returns a title as the name of a rule or a list: small letters, digits and `-`; empty if nothing is left."""
    plain = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-")[:_MAX_SLUG_CHARACTERS].rstrip("-")


def write_yaml(document: dict[str, Any]) -> str:
    """Writes a document with the line that says who wrote it."""
    body = yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=110)
    return f"{_HEAD}{_digest(body)}\n{body}"


def _digest(body: str) -> str:
    return hashlib.sha256(body.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def is_unchanged(text: str) -> bool:
    """Returns whether `write_yaml` made the text, and nobody has changed it since."""
    head = _HEAD_LINE.match(text)
    return head is not None and head[1] == _digest(text[head.end() :])


class RuleFolder:
    """A folder that rules are written to: gives each rule a name that no other has, and replaces only its own files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._taken: set[str] = set()
        self._ids: set[str] = set()

    def choose_name(self, names: Sequence[str], source: dict[str, str]) -> str:
        """Chooses the first name that is free, or whose file the same rule was written to before.

        source: format and id of the rule. Raises Refusal if all are taken.
        """
        if source["id"] in self._ids:
            raise Refusal("duplicate", f"another rule of this import has the id {source['id']}")
        for name in names:
            if name not in self._taken and self._is_free(self.find_path(name), source):
                self._taken.add(name)
                self._ids.add(source["id"])
                return name
        raise Refusal("exists", f"{names[0]}.yml is the file of another rule, or was changed after it was imported")

    def find_path(self, name: str) -> Path:
        """Returns the file of a rule."""
        return self._folder / f"{name}.yml"

    def _is_free(self, path: Path, source: dict[str, str]) -> bool:
        if not path.exists() and not path.is_symlink():
            return True
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError):
            return False
        if not is_unchanged(text):
            return False
        document = yaml.safe_load(text)
        known = document.get("source") if isinstance(document, dict) else None
        return isinstance(known, dict) and {key: known.get(key, "") for key in source} == source

    def write(self, name: str, text: str) -> Path:
        """Writes the file of a rule."""
        path = self.find_path(name)
        self._folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path
