"""Stores arrays in memory-mapped files, so that the processes of a machine share them instead of each using memory.

A file contains an object and its arrays in their memory layout, so that reading it only maps them. A search touches a
few blocks; the operating system caches blocks that are used often, and frees their memory for other uses. The processes
that share files run the same release, and the files do not outlive them; lasting data is in pages.

Layout: a header `LBar` and the length of the JSON (u64), JSON that describes the object, and the arrays, each aligned
to 64 bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import struct
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_HEAD = struct.Struct("<4sQ")
_MAGIC = b"LBar"
# NumPy reads aligned numbers fastest.
_ALIGNED_BYTES = 64
# Keep a tenth of the disk free.
_FREE_PART = 10
_Array = npt.NDArray[Any]

# By address. Arrow keeps a file mapped while its buffer is used, without a file descriptor, which are limited.
_mapped = WeakValueDictionary[int, pa.Buffer]()
# How much mapped memory may stay resident, including the libraries of the process.
_MAX_RESIDENT_BYTES = 2**27
_DONT_NEED = 4  # Linux's MADV_DONTNEED


@dataclass(frozen=True)
class MappedFile:
    """A file for an object with arrays. It may not exist yet."""

    path: Path

    def write(self, content: Any) -> bool:
        """Writes an object to the file, replacing an existing one.

        `content` may consist of one-dimensional arrays, tuples, lists, dicts, strings, numbers, None, and objects whose
        attributes consist of these. Returns False and writes nothing if an array has Python objects or the disk is too
        full.
        """
        arrays = list[_Array]()
        try:
            described = {
                "content": _describe(content, arrays, {}),
                "arrays": [_describe_array(each) for each in arrays],
            }
            text = json.dumps(described, separators=(",", ":")).encode()
            starts = _place(_HEAD.size + len(text), [array.nbytes for array in arrays])
            disk = shutil.disk_usage(self.path.parent)
            if disk.free - starts[-1] < disk.total // _FREE_PART:
                return False
            draft = self.path.parent / uuid.uuid4().hex
            try:
                with draft.open("xb") as file:
                    file.write(_HEAD.pack(_MAGIC, len(text)) + text)
                    for array, start in zip(arrays, starts, strict=False):
                        file.write(bytes(start - file.tell()))
                        file.write(np.ascontiguousarray(array).data)
                    file.write(bytes(starts[-1] - file.tell()))
                draft.replace(self.path)
            finally:
                draft.unlink(missing_ok=True)
        except (OSError, TypeError):
            return False
        return True

    def read(self, classes: Mapping[str, type[Any]]) -> Any:
        """Returns the object in the file, with read-only arrays; None if the file is missing or damaged.

        `classes` are the classes, by name, whose objects the file may contain.
        """
        try:
            with pa.memory_map(str(self.path)) as file:
                mapped = file.read_buffer()
            content = memoryview(mapped)
            magic, length = _HEAD.unpack_from(content)
            described = json.loads(bytes(content[_HEAD.size : _HEAD.size + length]))
            listed = [(np.dtype(type_), rows) for type_, rows in described["arrays"]]
            starts = _place(_HEAD.size + length, [type_.itemsize * rows for type_, rows in listed])
            if magic != _MAGIC or len(content) != starts[-1]:
                return None
            arrays = [
                np.frombuffer(mapped, type_, rows, start) for (type_, rows), start in zip(listed, starts, strict=False)
            ]
            made = _make(described["content"], arrays, classes)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, struct.error):
            return None
        _mapped[mapped.address] = mapped
        return made


def release_mapped(above: int = _MAX_RESIDENT_BYTES) -> None:
    """Releases the memory of mapped files if this process uses more than `above` bytes of shared memory.

    The operating system may keep the blocks cached. On systems other than Linux, this does nothing.
    """
    with contextlib.suppress(OSError, AttributeError):
        resident = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[2]) * os.sysconf("SC_PAGE_SIZE")
        if resident > above:
            advise = ctypes.CDLL(None).madvise
            advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
            for each in list(_mapped.values()):
                advise(each.address, each.size, _DONT_NEED)


def _place(position: int, sizes: Sequence[int]) -> list[int]:
    """Returns where arrays of these sizes begin after a position, and where the last one ends."""
    starts = []
    for size in sizes:
        starts.append(position + -position % _ALIGNED_BYTES)
        position = starts[-1] + size
    return [*starts, position]


def _describe_array(array: _Array) -> tuple[str, int]:
    if array.dtype.hasobject or array.ndim != 1:
        raise TypeError("the array has Python objects or several dimensions")
    return array.dtype.str, len(array)


def _describe(content: Any, arrays: list[_Array], numbers: dict[int, int]) -> Any:
    """Describes an object for JSON, and collects its arrays. `numbers` maps their identities to indexes."""
    if content is None or isinstance(content, (bool, int, float, str)):
        return content
    if isinstance(content, np.ndarray):
        if id(content) not in numbers:
            numbers[id(content)] = len(arrays)
            arrays.append(content)
        return {"array": numbers[id(content)]}
    if type(content) in (tuple, list):
        return {type(content).__name__: [_describe(item, arrays, numbers) for item in content]}
    if isinstance(content, dict):
        return {"dict": [[_describe(each, arrays, numbers) for each in item] for item in content.items()]}
    return {"class": type(content).__name__, "attributes": _describe(vars(content), arrays, numbers)}


def _make(described: Any, arrays: Sequence[_Array], classes: Mapping[str, type[Any]]) -> Any:
    """Rebuilds the object that `_describe` described."""
    if not isinstance(described, dict):
        return described
    if "array" in described:
        return arrays[described["array"]]
    if "dict" in described:
        return {_make(key, arrays, classes): _make(value, arrays, classes) for key, value in described["dict"]}
    if "class" in described:
        made = object.__new__(classes[described["class"]])
        vars(made).update(_make(described["attributes"], arrays, classes))
        return made
    if "tuple" in described:
        return tuple(_make(item, arrays, classes) for item in described["tuple"])
    return [_make(item, arrays, classes) for item in described["list"]]
