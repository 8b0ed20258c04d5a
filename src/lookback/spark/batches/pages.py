"""The pages of a shard in Spark's state store, with copies of large pages on the executor's disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from lookback.core.errors import StoreFailed
from lookback.core.state.shard import decode_text
from lookback.spark.batches.arrayfiles import MappedFile

if TYPE_CHECKING:
    from pyspark.sql.streaming.stateful_processor import MapState

# Smaller pages are read as fast from the state store.
_MIN_BYTES = 16_384
_INDEX, _DECODED = ".index", ".decoded"


class ShardPages:
    """A store of the core: pages in Spark's state store, and copies of large pages for other workers on the machine.

    Spark passes a page of its state store to Python byte by byte: 7.3 MB took 390 ms on a busy machine. Its tasks use
    any idle worker, so a worker often gets a shard that another worker had before, and then reads the copies. These are
    in the folder of Spark's temporary files, which Spark removes when it ends; without such a folder no copies are
    made. Copies belong to exactly one manifest, like a state in memory; for any other manifest the state store is read.
    Beside a copy, the core may store what it decodes from the page.

    Attributes:
        read: The bytes read from the state store.
        written: The bytes written to the state store.
    """

    def __init__(self, pages: MapState, query: str, label: str) -> None:
        self._pages = pages
        self._folder = _make_folder(query, label)
        # Name of a page -> its file and its bytes.
        self._copies: dict[str, tuple[str, int]] = {}
        self.read = self.written = 0

    def get(self, name: str) -> bytes | None:
        """Returns a page, or None if it does not exist. Raises StoreFailed if the state store fails."""
        copy = self._read_copy(name)
        if copy is not None:
            return copy
        try:
            row = self._pages.getValue((name,))
        except Exception as error:
            raise StoreFailed(f"{name}: {type(error).__name__}: {error}") from error
        if row is None:
            return None
        page = bytes(row[0])
        self.read += len(page)
        self._copy(name, page)
        return page

    def get_text(self, name: str) -> str | None:
        """Returns the text of a page that `encode_text` made, or None if the page does not exist."""
        page = self.get(name)
        return None if page is None else decode_text(page, name)

    def put(self, name: str, page: bytes) -> None:
        """Stores a page, replacing one of the same name."""
        self.written += len(page)
        self._copies.pop(name, None)
        self._pages.updateValue((name,), (page,))
        self._copy(name, page)

    def remove(self, name: str) -> None:
        """Removes a page, which must exist."""
        self._copies.pop(name, None)
        self._pages.removeKey((name,))

    def find_file(self, name: str) -> MappedFile | None:
        """Returns the file for the decoded content of a page, which lives as long as its copy; None without a copy."""
        if self._folder is None or name not in self._copies:
            return None
        return MappedFile(self._folder / self._name_decoded(name))

    def find_copies(self, manifest: bytes | None) -> None:
        """Finds the copies that belong to a manifest. Before this call, pages come from the state store."""
        self._copies = {}
        if self._folder is not None and manifest is not None:
            with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
                found = json.loads((self._folder / _name_index(manifest)).read_bytes())
                self._copies = {name: (file, size) for name, (file, size) in found.items()}

    def keep_copies(self, manifest: bytes | None) -> None:
        """Marks the copies as those of a manifest and removes older ones. Call it after the last `put` of a batch."""
        if self._folder is None or manifest is None:
            return
        index = _name_index(manifest)
        with contextlib.suppress(OSError):
            draft = self._folder / uuid.uuid4().hex
            draft.write_text(json.dumps(self._copies), encoding="utf-8")
            draft.replace(self._folder / index)
            kept = {index, *(file for file, _ in self._copies.values()), *map(self._name_decoded, self._copies)}
            for file in self._folder.iterdir():
                if file.name not in kept:
                    file.unlink(missing_ok=True)

    def _name_decoded(self, name: str) -> str:
        return self._copies[name][0] + _DECODED

    def _copy(self, name: str, page: bytes) -> None:
        if self._folder is not None and len(page) >= _MIN_BYTES:
            # Each copy has its own file, because another attempt of the same task may write at the same time.
            file = uuid.uuid4().hex
            with contextlib.suppress(OSError):
                (self._folder / file).write_bytes(page)
                self._copies[name] = (file, len(page))

    def _read_copy(self, name: str) -> bytes | None:
        if self._folder is None or name not in self._copies:
            return None
        file, size = self._copies[name]
        try:
            page = (self._folder / file).read_bytes()
        except OSError:
            return None
        return page if len(page) == size else None


def _make_folder(query: str, label: str) -> Path | None:
    """Creates the folder for a shard's copies; returns None if Spark names no folder or it is not writable."""
    place = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0]
    if not place:
        return None
    digest = hashlib.blake2b(f"{query}\0{label}".encode(), digest_size=16).hexdigest()
    folder = Path(place) / "lookback-pages" / digest
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return None
    return folder


def _name_index(manifest: bytes) -> str:
    return hashlib.blake2b(manifest, digest_size=16).hexdigest() + _INDEX
