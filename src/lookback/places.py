"""Places of tables and files: folders on this machine and in object stores, with one set of methods.

A place on this machine is a `pathlib.Path`; any other place is an `ObjectPath`, which has the methods of `Path` that
Lookback calls. Spark reads the tables of either from their path as text. Lookback reads and writes its own files, such
as those of a checkpoint, with Arrow's file systems: they also work in an executor's Python and in a process without
Spark, while Hadoop's need a JVM, which only the driver has.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote

from lookback.core.errors import SetupError

if TYPE_CHECKING:
    from pyarrow import fs
    from pyspark.sql import SparkSession

# Schemes that other tools use for the same stores.
_ALIASES = {"s3": "s3a", "s3n": "s3a", "abfs": "abfss"}
_STORES = ("s3a", "gs", "abfss", "hdfs", "wasb", "wasbs")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(.*)", re.ASCII | re.DOTALL)
_HADOOP, _S3A = "spark.hadoop.", "fs.s3a."
_NOT_FOUND = "NotFound"


@dataclass(frozen=True)
class ObjectPath:
    """A file or folder in an object store, such as s3a://bucket/key.

    `settings` are the Hadoop settings with which Spark reaches the store, such as fs.s3a.endpoint. They travel with the
    place to executors; its repr hides them.
    """

    scheme: str
    store: str
    key: str = ""
    settings: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    def __str__(self) -> str:
        if not self.store:
            return f"{self.scheme}:/{self.key}"
        return f"{self.scheme}://{self.store}/{self.key}".rstrip("/")

    def __truediv__(self, name: str) -> ObjectPath:
        return replace(self, key=f"{self.key}/{name}".lstrip("/"))

    @property
    def name(self) -> str:
        """The last part of the key."""
        return posixpath.basename(self.key)

    @property
    def parent(self) -> ObjectPath:
        """The folder that contains it."""
        return replace(self, key=posixpath.dirname(self.key))

    def with_name(self, name: str) -> ObjectPath:
        """Returns the place with another name in the same folder."""
        return self.parent / name

    def exists(self) -> bool:
        """Returns whether the file exists, or any file below the folder."""
        return bool(self._find().type.name != _NOT_FOUND)

    def is_dir(self) -> bool:
        """Returns whether it is an existing folder."""
        return bool(self._find().type.name == "Directory")

    def stat(self) -> FileStatus:
        """Returns when the file was written. Raises FileNotFoundError."""
        found = self._find()
        if found.type.name == _NOT_FOUND:
            raise FileNotFoundError(f"{self} is not there")
        return FileStatus((found.mtime_ns or 0) / 1e9)

    def read_bytes(self) -> bytes:
        """Reads the file. Raises OSError."""
        with self._files.open_input_stream(self._path) as file:
            return bytes(file.read())

    def read_text(self, encoding: str = "utf-8") -> str:
        """Reads the file as text. Raises OSError."""
        return self.read_bytes().decode(encoding)

    def write_bytes(self, content: bytes) -> None:
        """Writes the file atomically, replacing an existing one."""
        with self._files.open_output_stream(self._path) as file:
            file.write(content)

    def write_text(self, text: str, encoding: str = "utf-8") -> None:
        """Writes the file as `write_bytes` does."""
        self.write_bytes(text.encode(encoding))

    def unlink(self, missing_ok: bool = False) -> None:
        """Removes the file. Raises FileNotFoundError if it is missing, unless missing_ok is set."""
        if self.exists():
            self._files.delete_file(self._path)
        elif not missing_ok:
            raise FileNotFoundError(f"{self} is not there")

    def mkdir(self, **_: object) -> None:
        """Does nothing: a folder of an object store exists as soon as it has a file."""

    def iterdir(self) -> Iterator[ObjectPath]:
        """Yields the files and folders in the folder; nothing if it does not exist."""
        return self.glob("*")

    def glob(self, pattern: str) -> Iterator[ObjectPath]:
        """Yields the files and folders whose path below this folder matches the pattern, part by part."""
        parts = pattern.split("/")
        for each in self._list(recursive=len(parts) > 1):
            names = PurePosixPath(each.path).relative_to(self._path).parts
            if len(names) == len(parts) and all(map(fnmatchcase, names, parts)):
                yield self / "/".join(names)

    @property
    def _path(self) -> str:
        return f"{self.store}/{self.key}".strip("/")

    @property
    def _files(self) -> fs.FileSystem:
        return _open_files(self.scheme, self.store, self.settings)

    def _find(self) -> fs.FileInfo:
        (found,) = self._files.get_file_info([self._path])
        return found

    def _list(self, *, recursive: bool) -> list[fs.FileInfo]:
        from pyarrow import fs  # noqa: PLC0415 - slow to import, and only needed for files in a store

        selected = fs.FileSelector(self._path, allow_not_found=True, recursive=recursive)
        return list(self._files.get_file_info(selected))


# A place on this machine is a `Path`.
Place = Path | ObjectPath


class FileStatus(NamedTuple):
    """When a file was last written, in seconds since 1970, as in os.stat_result."""

    st_mtime: float


def parse_place(text: str | Place) -> Place:
    """Parses a folder or file as you write it: a path, file:/x, file:///x, s3a://bucket/x, abfss://..., gs://...

    A path or a `file:` URI, in which %20 is a blank, becomes an absolute path; ~ is the user's home. s3:// and s3n://
    become s3a://, Spark's name for them. Raises SetupError for ambiguous texts such as s3a:/bucket, which looks like a
    folder on this machine.
    """
    if isinstance(text, ObjectPath):
        return text
    if isinstance(text, Path):
        return text.expanduser().resolve()
    if not text or text != text.strip():
        raise SetupError(f"a folder must not be empty or begin or end with a blank, got {text!r}")
    match = _SCHEME.fullmatch(text)
    if match is None:
        return _expand_user(text).resolve()
    scheme, rest = match[1].lower(), match[2]
    if scheme == "file":
        return _parse_file(text, rest)
    if scheme == "dbfs":
        return ObjectPath(scheme, "", _normalize(text, rest))
    scheme = _ALIASES.get(scheme, scheme)
    if not rest.startswith("//"):
        if scheme not in _STORES:
            # A folder's name may contain a colon.
            return Path(text).expanduser().resolve()
        raise SetupError(f"{text!r} is not a place; write {scheme}://{rest.lstrip('/') or 'bucket/folder'}")
    store, _, key = rest[2:].partition("/")
    if not store or store != store.strip():
        raise SetupError(f"{text!r} names no bucket; write {scheme}://bucket/folder")
    return ObjectPath(scheme, store, _normalize(text, key))


def open_place(text: str | Place, spark: SparkSession) -> Place:
    """Parses a place, and adds the settings with which Spark reaches its object store."""
    place = parse_place(text)
    if isinstance(place, Path):
        return place
    found = ((name.removeprefix(_HADOOP), value) for name, value in spark.conf.getAll.items())
    return replace(place, settings=tuple(sorted(each for each in found if each[0].startswith("fs."))))


def parse_source(text: str) -> str:
    """Parses files to read as you write them, including patterns such as in/*.csv. Returns the text that Spark reads.

    URIs are parsed as in `parse_place`. A path without a scheme stays unchanged, even a relative one.
    """
    match = _SCHEME.fullmatch(text)
    scheme = "" if match is None else match[1].lower()
    if scheme == "file" or _ALIASES.get(scheme, scheme) in _STORES:
        return str(parse_place(text))
    return str(_expand_user(text)) if text.startswith("~") else text


def _expand_user(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise SetupError(f"{text!r} is not a place: {error}; write ./{text} for a folder of that name") from error


def _parse_file(text: str, rest: str) -> Path:
    host = re.match(r"//([^/]*)", rest)
    path = rest if host is None else rest[host.end() :]
    if host is not None and host[1] not in ("", "localhost"):
        raise SetupError(f"{text!r} names host {host[1]!r}; a file URI has three slashes: file:///{host[1]}{path}")
    if not path.startswith("/"):
        raise SetupError(f"{text!r} is not a place; write file:///folder, or a path without file:")
    return Path(unquote(path, errors="surrogateescape")).resolve()


def _normalize(text: str, key: str) -> str:
    parts = posixpath.normpath("/" + key.lstrip("/")).lstrip("/")
    if ".." in key.split("/"):
        raise SetupError(f"{text!r} has a part `..`, which object stores do not support; write the full path")
    return parts


def find_local_path(place: str | Place | None) -> Path | None:
    """Returns the path of a place on this machine or mounted here; None for any other place, such as a bucket."""
    found = None if place is None else parse_place(place)
    return found if isinstance(found, Path) else None


def write_whole(place: Place, content: bytes, *, durable: bool = True) -> None:
    """Writes a file atomically, replacing an existing one, and makes its folder.

    With `durable` the file survives a crash of the machine, at the cost of two calls of fsync.
    """
    if isinstance(place, ObjectPath):
        place.write_bytes(content)
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    draft = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            file.write(content)
            if durable:
                file.flush()
                # A crash of the machine must not leave an empty file of that name.
                os.fsync(file.fileno())
        draft.replace(place)
    finally:
        draft.unlink(missing_ok=True)
    if not durable:
        return
    # Makes the new name survive a crash too. Mounted volumes may not support it.
    with contextlib.suppress(OSError):
        opened = os.open(place.parent, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def remove_tree(place: Place) -> None:
    """Removes a folder and everything in it. Raises OSError."""
    if isinstance(place, ObjectPath):
        place._files.delete_dir(place._path)
    else:
        shutil.rmtree(place)


def move_tree(place: Place, target: Place) -> None:
    """Renames a folder; in an object store this copies its files, then removes the originals. Raises OSError."""
    if isinstance(place, ObjectPath) and isinstance(target, ObjectPath):
        for each in place._list(recursive=True):
            if each.is_file:
                below = PurePosixPath(each.path).relative_to(place._path)
                place._files.copy_file(each.path, (target / str(below))._path)
        remove_tree(place)
    else:
        Path(str(place)).rename(str(target))


@lru_cache(maxsize=64)
def _open_files(scheme: str, store: str, settings: tuple[tuple[str, str], ...]) -> fs.FileSystem:
    """Opens the file system of a store. Raises SetupError if Arrow does not support the store."""
    import pyarrow as pa  # noqa: PLC0415
    from pyarrow import fs  # noqa: PLC0415

    try:
        if scheme == "s3a":
            options = read_s3_options(store, settings)
            if not options.keys() & {"region", "endpoint_override"}:
                options["region"] = fs.resolve_s3_region(store)
            # Arrow writes a small file in one request if it may, and else in three.
            with contextlib.suppress(TypeError):
                return fs.S3FileSystem(**options, allow_delayed_open=True)
            return fs.S3FileSystem(**options)
        if scheme == "dbfs":
            return fs.SubTreeFileSystem("/dbfs", fs.LocalFileSystem())
        return fs.FileSystem.from_uri(f"{scheme}://{store}")[0]
    except (pa.ArrowException, OSError, ImportError) as error:
        raise SetupError(
            f"files at {scheme}://{store} cannot be read or written: {error}. Checkpoints can be in s3a://, gs://, abfss:// "
            "and folders of this machine"
        ) from error


def read_s3_options(bucket: str, settings: Iterable[tuple[str, str]]) -> dict[str, str | bool]:
    """Translates a bucket's Hadoop settings to Arrow's. Without keys Arrow uses the machine's, as Hadoop does."""
    own = f"{_S3A}bucket.{bucket}."
    found = {name.removeprefix(_S3A): value for name, value in settings if name.startswith(_S3A)}
    found |= {name.removeprefix(own): value for name, value in settings if name.startswith(own)}
    names = {"access_key": "access.key", "secret_key": "secret.key", "session_token": "session.token"}
    names |= {"region": "endpoint.region", "role_arn": "assumed.role.arn"}
    options: dict[str, str | bool] = {name: found[key] for name, key in names.items() if found.get(key)}
    endpoint = found.get("endpoint", "")
    if endpoint.startswith("http://") or found.get("connection.ssl.enabled", "").lower() == "false":
        options["scheme"] = "http"
    if endpoint:
        options["endpoint_override"] = endpoint.rpartition("://")[2].rstrip("/")
    if "Anonymous" in found.get("aws.credentials.provider", ""):
        options["anonymous"] = True
    return options
