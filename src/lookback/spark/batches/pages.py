"""The pages of a shard in Spark's state store, with copies of the large ones on the disk of the executor."""

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

# A smaller page comes from the state store as fast.
_LEAST_BYTES = 16_384
_INDEX, _DECODED = ".index", ".decoded"


class ShardPages:
    """A store of the core: pages in the state store's map, and copies of large ones for the other workers of the machine.

    Spark hands a page of its state store to Python byte by byte: 7.3 MB took 390 ms on a busy machine. Its tasks take any
    idle worker, so one often gets a shard that another worker had before. It then reads the copies, as fast as files are. Copies are in the
    folder of Spark's own temporary files, which Spark removes when it ends; without such a folder there are none. They
    belong to one manifest, byte for byte, as a state in memory does; for any other the state store is read. Beside a copy,
    the core may keep what it decodes from the page.
    read, written: bytes, from and to the state store.
    """

    def __init__(self, pages: MapState, query: str, label: str) -> None:
        self._pages = pages
        self._folder = _make_folder(query, label)
        # Name of a page -> its file and its bytes.
        self._copies: dict[str, tuple[str, int]] = {}
        self.read = self.written = 0

    def get(self, name: str) -> bytes | None:
        """Returns the page of that name; None if there is none. Raises StoreFailed."""
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
        """Returns the text of a page that `encode_text` made; None if there is no such page."""
        page = self.get(name)
        return None if page is None else decode_text(page, name)

    def put(self, name: str, page: bytes) -> None:
        """Keeps a page, in place of one of the same name."""
        self.written += len(page)
        self._copies.pop(name, None)
        self._pages.updateValue((name,), (page,))
        self._copy(name, page)

    def remove(self, name: str) -> None:
        """Removes a page, which must exist."""
        self._copies.pop(name, None)
        self._pages.removeKey((name,))

    def find_file(self, name: str) -> MappedFile | None:
        """Returns the file for what is decoded of a page, which goes with the copy of the page; None if that has none."""
        if self._folder is None or name not in self._copies:
            return None
        return MappedFile(self._folder / self._name_decoded(name))

    def find_copies(self, manifest: bytes | None) -> None:
        """Finds the copies of the pages to which a manifest belongs; until then, pages come from the state store."""
        self._copies = {}
        if self._folder is not None and manifest is not None:
            with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
                found = json.loads((self._folder / _name_index(manifest)).read_bytes())
                self._copies = {name: (file, size) for name, (file, size) in found.items()}

    def keep_copies(self, manifest: bytes | None) -> None:
        """Notes that the copies belong to a manifest, after the last page of a batch was put; removes all others."""
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
        if self._folder is not None and len(page) >= _LEAST_BYTES:
            # Each copy has a file of its own: another attempt of the same task may write at the same time.
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
    """Makes the folder of a shard's copies; None if Spark names no folder, or it cannot be written to."""
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
