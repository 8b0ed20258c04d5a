"""Arrays in files: what comes back is what was written, and nothing comes of a file that is damaged or cannot be written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookback.core.values.cache import estimate_bytes
from lookback.spark.batches import arrayfiles
from lookback.spark.batches.arrayfiles import MappedFile, release_mapped


@dataclass(frozen=True)
class Inner:
    array: Any


class Outer:
    def __init__(self) -> None:
        self.plain, self.empty = np.arange(1_000), np.zeros(0, dtype=np.int64)
        self.inner, self.same = Inner(np.array([1.5, np.nan, -0.0, np.inf])), self.plain
        self.listed = [np.arange(10, dtype=np.uint8), "text\n", None, True, 2**70, -0.5, self.plain[::7]]
        self.mapped = {("sum", 1, -1): (np.array([True, False]), {}), 2: np.arange(7, dtype=np.int32), "": ()}

    def arrays(self) -> list[Any]:
        first = [self.plain, self.empty, self.inner.array, self.listed[0], self.listed[6]]
        return [*first, self.mapped["sum", 1, -1][0], self.mapped[2]]


CLASSES: dict[str, type[Any]] = {"Inner": Inner, "Outer": Outer}


def test_an_object_comes_back_with_its_arrays_in_the_file(tmp_path: Path) -> None:
    content, path = Outer(), tmp_path / "run"
    assert MappedFile(path).write(content)
    assert [file.name for file in tmp_path.iterdir()] == ["run"]
    # An array that is held twice is written once.
    assert 9_000 < path.stat().st_size < 12_000
    back = MappedFile(path).read(CLASSES)
    assert isinstance(back, Outer)
    assert back.same is back.plain
    for array, was in zip(back.arrays(), content.arrays(), strict=True):
        assert array.dtype == was.dtype
        assert array.tobytes() == was.tobytes()
    assert back.listed[1:6] == content.listed[1:6]
    assert list(back.mapped) == list(content.mapped)
    assert back.mapped[""] == ()
    assert estimate_bytes(content) > 9_000
    assert estimate_bytes(back) == 0
    with pytest.raises(ValueError, match="read-only"):
        back.plain[0] = 1
    release_mapped(above=0)
    assert back.plain.tolist() == content.plain.tolist()


def test_a_file_that_is_replaced_or_gone_stays_with_those_who_have_it(tmp_path: Path) -> None:
    path = tmp_path / "run"
    assert MappedFile(path).write(np.arange(10_000))
    first = MappedFile(path).read({})
    assert MappedFile(path).write((first, np.arange(3)))
    second, more = MappedFile(path).read({})
    path.unlink()
    assert MappedFile(path).read({}) is None
    release_mapped(above=0)
    assert first.tolist() == second.tolist() == list(range(10_000))
    assert more.tolist() == [0, 1, 2]


def _no_room(patch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(".")
    patch.setattr(arrayfiles.shutil, "disk_usage", lambda _: usage._replace(free=usage.total // 10))


def _broken_disk(patch: pytest.MonkeyPatch) -> None:
    def fail(array: Any) -> Any:
        raise OSError("no space left on device")

    patch.setattr(arrayfiles.np, "ascontiguousarray", fail)


class Pair(NamedTuple):
    array: Any
    number: int


@pytest.mark.parametrize(
    ("content", "break_it"),
    [
        pytest.param(np.array(["a"], dtype=object), None, id="Python objects"),
        pytest.param(np.zeros((2, 2)), None, id="two dimensions"),
        pytest.param({1, 2}, None, id="a set"),
        pytest.param(Pair(np.arange(3), 1), None, id="a named tuple"),
        pytest.param(np.int64(3), None, id="a number of numpy"),
        pytest.param(np.arange(3), _no_room, id="no room"),
        pytest.param(np.arange(3), _broken_disk, id="a disk that fails"),
    ],
)
def test_what_cannot_be_written_leaves_all_as_it_was(
    content: Any, break_it: Callable[[pytest.MonkeyPatch], None] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    assert MappedFile(path).write("before")
    with monkeypatch.context() as patch:
        if break_it is not None:
            break_it(patch)
        assert not MappedFile(path).write(content)
    assert MappedFile(path).read({}) == "before"
    assert [file.name for file in tmp_path.iterdir()] == ["run"]
    assert not MappedFile(tmp_path / "none" / "run").write(np.arange(3))


def test_objects_of_other_classes_are_not_made(tmp_path: Path) -> None:
    assert MappedFile(tmp_path / "run").write(Inner(1))
    assert MappedFile(tmp_path / "run").read({"Outer": Outer}) is None


@given(cut=st.integers(0, 400), at=st.integers(0, 250), byte=st.integers(0, 255))
def test_a_damaged_file_is_as_none(cut: int, at: int, byte: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("damaged") / "run"
    assert MappedFile(path).write(Inner((np.arange(9), {"a": [1]})))
    whole = path.read_bytes()
    if cut < len(whole):
        path.write_bytes(whole[:cut])
        assert MappedFile(path).read(CLASSES) is None
    # A changed byte is refused, or changes a value: it never ends in an error.
    path.write_bytes(whole[: at % len(whole)] + bytes([byte]) + whole[at % len(whole) + 1 :])
    MappedFile(path).read(CLASSES)
