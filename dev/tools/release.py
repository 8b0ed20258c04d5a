"""Checks whether a version can be tagged: `make release-check VERSION=0.2.0`.

The changelog must have a section of the version with its day, above all earlier ones, and nothing under Unreleased. Every
entry must say whether state is kept or reset. pyproject must have the same version, all must be committed, and the tag
must be new. Then the tag's message is printed and written to build/release.txt: the section, below a sentence on the state.
"""

from __future__ import annotations

import argparse
import datetime as dt
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from packaging.version import InvalidVersion, Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
FINE, FOUND = 0, 1
_SECTION = re.compile(r"^## \[([^\]]+)\](?: - (\S+))?$", re.MULTILINE)
_STATE = re.compile(r"\bstate (kept|reset)\b", re.IGNORECASE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the problems, or the message of the tag. Returns 0 or 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", help="such as 0.2.0")
    parser.add_argument("--root", type=Path, default=ROOT)
    options = parser.parse_args(arguments)
    sections = read_changelog((options.root / "CHANGELOG.md").read_text(encoding="utf-8"))
    problems = [
        *check_changelog(sections, options.version),
        *check_version(options.root, options.version),
        *check_repository(options.root, options.version),
    ]
    for problem in problems:
        print(f"{options.version}: {problem}")
    if problems:
        return FOUND
    file = options.root / "build" / "release.txt"
    file.parent.mkdir(exist_ok=True)
    message = format_message(options.version, sections[options.version].text)
    file.write_text(message, encoding="utf-8")
    print(message, end="")
    return FINE


class Section(NamedTuple):
    """A section of the changelog. day: as written; None if it has none."""

    day: str | None
    text: str


def read_changelog(text: str) -> dict[str, Section]:
    """Reads the sections by version, in the order of the file."""
    heads = list(_SECTION.finditer(text))
    ends = [*(head.start() for head in heads[1:]), len(text)]
    return {head[1]: Section(head[2], text[head.end() : end].strip()) for head, end in zip(heads, ends, strict=True)}


def split_entries(text: str) -> list[str]:
    """Splits a section into its entries: top-level list items with all that belongs to them."""
    return re.split(r"^- ", text, flags=re.MULTILINE)[1:]


def check_changelog(sections: dict[str, Section], version: str) -> list[str]:
    """Finds the problems of the changelog."""
    if version not in sections:
        return [f"CHANGELOG.md has no section '## [{version}] - YYYY-MM-DD'; move what is under Unreleased there"]
    problems = []
    day, text = sections[version]
    if split_entries(sections.get("Unreleased", Section(None, "")).text):
        problems.append(
            "CHANGELOG.md still has entries under Unreleased; move them into the section, or out of the release"
        )
    try:
        dt.date.fromisoformat(day or "")
    except ValueError:
        problems.append(f"its section needs a day such as YYYY-MM-DD, got {day or 'none'}")
    if not split_entries(text):
        problems.append("its section has no entries")
    problems += [
        f"an entry says neither 'state kept' nor 'state reset': {' '.join(entry.split())[:80]}"
        for entry in split_entries(text)
        if not _STATE.search(entry)
    ]
    released = [name for name in sections if name != "Unreleased"]
    if list(sections)[:1] != ["Unreleased"] or released != sorted(released, key=_number, reverse=True):
        problems.append("CHANGELOG.md must begin with Unreleased, then have the versions, the newest first")
    elif released[0] != version:
        problems.append(f"CHANGELOG.md has {released[0]} above it, which is newer")
    return problems


def check_version(root: Path, version: str) -> list[str]:
    """Finds a problem unless the package has this version."""
    declared = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    return [] if declared == version else [f"pyproject.toml has version {declared}"]


def check_repository(root: Path, version: str) -> list[str]:
    """Finds problems unless all is committed and the tag is new."""
    problems = []
    if _git(root, "status", "--porcelain"):
        problems.append("there are changes that are not committed")
    if _git(root, "tag", "--list", f"v{version}"):
        problems.append(f"the tag v{version} is there already")
    return problems


def format_message(version: str, text: str) -> str:
    """Formats the message of the tag: the effect of an upgrade on the state, then the section."""
    resets = [entry for entry in split_entries(text) if re.search(r"\bstate reset\b", entry, re.IGNORECASE)]
    effect = (
        "State reset: start with `lookback evaluate STREAM --rebuild`."
        if resets
        else "State kept: restart on the same checkpoint."
    )
    return f"Lookback {version}\n\n{effect}\n\n{text}\n"


def _number(name: str) -> Version:
    try:
        return Version(name)
    except InvalidVersion:
        return Version("0")


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, capture_output=True, check=True, text=True).stdout.strip()  # noqa: S603, S607


if __name__ == "__main__":
    sys.exit(main())
