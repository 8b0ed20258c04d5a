"""Keeps arrays in files, which the processes of a machine share in place of memory of their own.

A file holds an object with its arrays as they are in memory, so that reading it only maps them: a search touches a few
blocks, the operating system keeps what is touched often, and gives its memory back where others need it. The processes that
share files run the same release, and files do not outlive them; what must last is in pages.

Layout: a head `LBar` and the length of a text (u64), a text of JSON that says what the object is made of, and the arrays, each
at a multiple of 64 bytes.
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
# Numpy reads numbers fastest at multiples of their size.
_ALIGNED_BYTES = 64
# One part in so many of a disk is left to others.
_FREE_PART = 10
_Array = npt.NDArray[Any]

# By address. Arrow keeps a file mapped while its buffer is used, without a descriptor, of which a process has few.
_mapped = WeakValueDictionary[int, pa.Buffer]()
# Of what is mapped, so much may stay in memory, together with the libraries of the process.
_MAX_RESIDENT_BYTES = 2**27
_DONT_NEED = 4  # MADV_DONTNEED of Linux


@dataclass(frozen=True)
class MappedFile:
    """A file for an object with its arrays, or for none yet."""

    path: Path

    def write(self, content: Any) -> bool:
        """Writes an object into a file, in place of one that is there.

        content: made of arrays of one dimension, tuples, lists, dicts, texts, numbers, None and objects whose attributes are.
        Returns False, and writes nothing, if an array has Python objects, or if the disk has no room.
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
        """Returns the object of a file, whose arrays cannot be written to; None if there is no such file, or it is damaged.

        classes: by name, those of which it may have objects.
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
    """Gives back the memory of what this process has read of its files, if that is more than `above` bytes.

    The operating system may go on to keep it. On other systems than Linux it alone decides.
    """
    with contextlib.suppress(OSError, AttributeError):
        resident = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[2]) * os.sysconf("SC_PAGE_SIZE")
        if resident > above:
            advise = ctypes.CDLL(None).madvise
            advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
            for each in list(_mapped.values()):
                advise(each.address, each.size, _DONT_NEED)


def _place(position: int, sizes: Sequence[int]) -> list[int]:
    """Returns where arrays of these sizes begin that follow a position, and where the last one ends."""
    starts = []
    for size in sizes:
        starts.append(position + -position % _ALIGNED_BYTES)
        position = starts[-1] + size
    return [*starts, position]


def _describe_array(array: _Array) -> tuple[str, int]:
    if array.dtype.hasobject or array.ndim != 1:
        raise TypeError("an array of Python objects, or of more dimensions")
    return array.dtype.str, len(array)


def _describe(content: Any, arrays: list[_Array], numbers: dict[int, int]) -> Any:
    """Returns what an object is made of, as JSON has it, and collects its arrays. numbers: of these, by identity."""
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
    """Makes the object that `_describe` described."""
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
