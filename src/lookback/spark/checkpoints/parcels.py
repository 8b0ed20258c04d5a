"""Files that the driver leaves in a checkpoint, and that shards read when a command of the rules table names them.

A parcel is whole or not there, never changes, and survives a crash of the machine once it is written. Executors read the
folder of the checkpoint too. The driver writes the parcel first and the row that names it afterwards, so who reads the row
finds the parcel.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lookback.core.errors import StoreFailed
from lookback.places import Place, write_whole

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


@dataclass(frozen=True)
class Parcels:
    """The parcels in one folder, which is made with the first of them.

    Names have letters, digits, '.', '_' and '-', and begin with a letter or digit.
    """

    folder: Place

    def write(self, name: str, content: bytes) -> None:
        """Writes a parcel. One of the same name, as of an attempt that a crash cut short, is replaced at once."""
        write_whole(self._find_place(name), content)

    def read(self, name: str) -> bytes:
        """Reads a parcel. Raises StoreFailed if it is not there or cannot be read."""
        place = self._find_place(name)
        try:
            return place.read_bytes()
        except OSError as error:
            raise StoreFailed(
                f"{place} of the checkpoint cannot be read ({error.strerror or error}); start the evaluation again, which "
                "makes it anew from the tables"
            ) from error

    def has(self, name: str) -> bool:
        """Returns whether there is a parcel of this name; none where the name is that of no parcel."""
        return _NAME.fullmatch(name) is not None and (self.folder / name).exists()

    def list(self) -> list[str]:
        """Lists the names of the parcels, ascending; drafts that a crash left behind are no parcels."""
        try:
            return sorted(file.name for file in self.folder.iterdir() if _NAME.fullmatch(file.name))
        except FileNotFoundError:
            return []

    def remove(self, name: str) -> None:
        """Removes a parcel, if it is there."""
        self._find_place(name).unlink(missing_ok=True)

    def _find_place(self, name: str) -> Place:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a parcel")
        return self.folder / name
