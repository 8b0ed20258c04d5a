"""Checkpoint files that the driver writes, and that shards read when a command in the rules table names them.

A parcel is written atomically, never changes, and survives a crash of the machine. Executors read the checkpoint's
folder directly. The driver writes the parcel before the row that names it, so every reader of the row finds the parcel.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lookback.core.errors import StoreFailed
from lookback.places import Place, write_whole

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


@dataclass(frozen=True)
class Parcels:
    """The parcels in one folder. The first write creates the folder.

    Names consist of letters, digits, '.', '_' and '-', and begin with a letter or digit.
    """

    folder: Place

    def write(self, name: str, content: bytes) -> None:
        """Writes a parcel. Atomically replaces one of the same name, such as from a crashed attempt."""
        write_whole(self._find_place(name), content)

    def read(self, name: str) -> bytes:
        """Reads a parcel. Raises StoreFailed if it is missing or unreadable."""
        place = self._find_place(name)
        try:
            return place.read_bytes()
        except OSError as error:
            raise StoreFailed(
                f"{place} of the checkpoint cannot be read ({error.strerror or error}); start the evaluation again, "
                "which rebuilds it from the tables"
            ) from error

    def has(self, name: str) -> bool:
        """Returns whether a parcel of this name exists; False if the name is invalid."""
        return _NAME.fullmatch(name) is not None and (self.folder / name).exists()

    def list(self) -> list[str]:
        """Lists the names of the parcels, ascending. Skips drafts left behind by a crash."""
        try:
            return sorted(file.name for file in self.folder.iterdir() if _NAME.fullmatch(file.name))
        except FileNotFoundError:
            return []

    def remove(self, name: str) -> None:
        """Removes a parcel if it exists."""
        self._find_place(name).unlink(missing_ok=True)

    def _find_place(self, name: str) -> Place:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a valid parcel name")
        return self.folder / name
