"""Files of a checkpoint for the shards are whole or not there, and one that is lost says so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lookback.core.errors import StoreFailed
from lookback.spark.checkpoints.checkpoint import Checkpoint
from lookback.spark.checkpoints.parcels import Parcels


def test_what_is_written_is_read_listed_and_removed(tmp_path: Path) -> None:
    parcels = Checkpoint(tmp_path / "c").parcels("lists")
    assert parcels.list() == []  # the folder is made with the first parcel

    parcels.write("2.snapshot", b"two")
    parcels.write("1.changes", b"")
    assert parcels.list() == ["1.changes", "2.snapshot"]
    assert (parcels.read("2.snapshot"), parcels.read("1.changes")) == (b"two", b"")

    parcels.write("2.snapshot", b"again")  # as after a crash between the parcel and the row that names it
    assert parcels.read("2.snapshot") == b"again"

    parcels.remove("2.snapshot")
    parcels.remove("2.snapshot")
    assert parcels.list() == ["1.changes"]
    assert Checkpoint(tmp_path / "c").is_new  # Spark has planned nothing there


def test_a_lost_parcel_is_a_fault_of_the_store_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(StoreFailed, match=r"lists/7 of the checkpoint cannot be read .*start the evaluation again"):
        Parcels(tmp_path / "lists").read("7")


def test_a_crash_while_writing_leaves_no_parcel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parcels = Parcels(tmp_path)
    parcels.write("kept", b"before")

    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        parcels.write("kept", b"after")
    monkeypatch.undo()
    (tmp_path / ".other.1").write_bytes(b"half")  # the process was killed
    assert (parcels.list(), parcels.read("kept")) == (["kept"], b"before")


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "../up", "a\nb", "x" * 201])
def test_a_name_that_leaves_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="not a valid parcel name"):
        Parcels(tmp_path).write(name, b"")
