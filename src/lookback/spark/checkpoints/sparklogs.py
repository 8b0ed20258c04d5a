"""Reads Spark's logs in a checkpoint: the planned and finished batches, and the commits that each reads."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from lookback.core.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Callable

    from lookback.places import Place

# The sources of the query, in the order of their lines in an offsets file (after version and metadata), and the table
# of lists, which only the driver reads.
EVENTS, RULES, LISTS = "events", "rules", "lists"
SOURCES = (EVENTS, RULES)
# The versions of Spark's logs that this release supports. Later versions may write a source's id before its offset.
_KNOWN_VERSIONS = {"offsets": ("v1",), "commits": ("v1", "v2")}
_VERSION = re.compile(r"v\d+")
_SOURCE_ID = re.compile(r"[^{\[\"]*:(?=[{-])")


class UnknownFormatError(SetupError):
    """A file of Spark's in the checkpoint is intact but has an unknown format."""


def list_batches(folder: Place) -> list[int]:
    """Returns the numbers of the batches that have a file in the folder, ascending."""
    return sorted(int(file.name) for file in folder.glob("[0-9]*") if file.name.isdigit())


class Position(NamedTuple):
    """Where a batch has ended in a table.

    Attributes:
        commit: The first commit that is not known to be read completely.
        files: How many of its files are read. If these are all, nothing of the commit is left.
    """

    commit: int
    files: int


def read_offsets(file: Place) -> dict[str, int | None]:
    """Returns the first commit of each source after a batch. Raises SetupError if the file is unreadable."""
    return {name: None if each is None else each.commit for name, each in read_positions(file).items()}


def read_positions(file: Place) -> dict[str, Position | None]:
    """Returns where a batch has ended in each source. Raises SetupError if the file is unreadable."""
    if unknown := _find_unknown_format(file, "offsets"):
        raise UnknownFormatError(
            f"{file} {unknown}, a format that this release does not know, so the last evaluated commit is unknown"
        )
    try:
        lines = file.read_text().splitlines()[2:]
        offsets = [None if line == "-" else json.loads(line) for line in lines]
        read = {
            name: None if each is None else Position(int(each["reservoirVersion"]), int(each.get("index", -1)) + 1)
            for name, each in zip(SOURCES, offsets, strict=True)
        }
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise SetupError(
            f"{file} is torn or missing ({error}); start with a new checkpoint: evaluate --rebuild"
        ) from error
    return read


def require_known_format(folder: Place) -> None:
    """Raises UnknownFormatError if this release cannot read and repair one of Spark's logs in a checkpoint."""
    for kind in ("offsets", "commits"):
        for number in list_batches(folder / kind)[-2:]:
            file = folder / kind / str(number)
            if unknown := _find_unknown_format(file, kind):
                raise UnknownFormatError(
                    f"{file} {unknown}, a format that this release does not know: another version of Spark may "
                    "have written it. Nothing was repaired or deleted. Use the versions of Spark and Lookback that "
                    "wrote it. Or, at your own risk, set accept_unknown_checkpoint: true in conf/settings.yml to "
                    "let Spark use it unchecked"
                )


def _find_unknown_format(file: Place, kind: str) -> str | None:
    """Describes how a file of Spark's logs differs from the known format; None if it matches, is torn or is missing."""
    try:
        version, *lines = file.read_text().splitlines() or [""]
    except (OSError, UnicodeDecodeError):
        return None
    if _VERSION.fullmatch(version) and version not in _KNOWN_VERSIONS[kind]:
        return f"has version {version}"
    if kind == "commits" or version not in _KNOWN_VERSIONS[kind]:
        return None
    sources = [line for line in lines[1:] if line != "-"]
    if any(_SOURCE_ID.match(line) for line in sources):
        return "names its sources"
    read = [offset for line in sources if (offset := _parse_json(line)) is not None]
    if any(not isinstance(offset, dict) or "reservoirVersion" not in offset for offset in read):
        return "has offsets without a table version"
    if len(lines) - 1 > len(SOURCES):
        return f"has {len(lines) - 1} sources instead of {len(SOURCES)}"
    return None


def _parse_json(text: str) -> Any:
    """Returns the value of a JSON text; None if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def is_planned(file: Place) -> bool:
    """Returns whether an offsets file is complete and has a known format."""
    return is_whole(file, lines=2 + len(SOURCES)) and is_readable(file, read_offsets)


def is_whole(file: Place, lines: int) -> bool:
    """Returns whether a file of Spark's has a version and at least `lines` lines in all, each JSON or `-`."""

    def read(file: Place) -> None:
        version, *rest = file.read_text().splitlines()
        if not version.startswith("v") or len(rest) < lines - 1:
            raise ValueError(version)
        for line in rest:
            if line != "-":
                json.loads(line)

    return is_readable(file, read)


def is_readable(file: Place, read: Callable[[Place], object]) -> bool:
    """Returns whether `read` can read a file."""
    try:
        read(file)
    except (SetupError, OSError, ValueError, KeyError, TypeError):
        return False
    return True
