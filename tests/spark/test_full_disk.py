"""A disk that fills up while a stream is evaluated: a real one, in memory, which only root may mount."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lookback.core.errors import LookbackError
from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder
from lookback.spark.tables.lakehouse import Tables
from payins import (
    RULES,
    STREAM,
    STREAMS,
    append,
    make_events,
    publish,
    replay_of_tables,
    replayed_alerts,
    stored_alerts,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.spark, pytest.mark.long]
MOUNT = ["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs"]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.name != "posix" or os.getuid() or subprocess.run([*MOUNT, str(folder)], check=False).returncode:
        pytest.skip("only root may mount a disk")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path, left: int) -> None:
    """Fills the disk but for so many bytes."""
    filler = disk / "filler"
    filler.write_bytes(b"\0" * max(0, shutil.disk_usage(disk).free - left))


def test_c8_a_disk_that_is_full_ends_an_evaluation_in_words_and_nothing_is_lost(ready: Tables, disk: Path) -> None:
    root = disk / "lakehouse"
    shutil.copytree(str(ready.root), root)
    tables = Tables.local(ready.spark, root)
    publish(tables, RULES)
    for arrival, left in enumerate((0, 30_000, 100_000, 250_000, 600_000), 1):
        append(tables, [row for row in make_events(150, seed=12) if row["arrival"] == arrival])
        fill(disk, left)
        evaluation = Evaluation(tables, STREAM, STREAMS, checkpoint_folder(tables, STREAM), once=True)
        try:
            evaluation.run()
        except LookbackError as error:
            assert "the disk is full" in str(error), f"{left} bytes left"  # noqa: PT017 - some of them are enough
        else:
            assert left > 100_000
        (disk / "filler").unlink()
    Evaluation(tables, STREAM, STREAMS, checkpoint_folder(tables, STREAM), once=True).run()
    assert stored_alerts(tables) == replayed_alerts(replay_of_tables(tables))
