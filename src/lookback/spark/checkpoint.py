"""The checkpoint of an evaluation: which batch is half done, and what dispatch sent from which batch on."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from lookback.core.errors import SetupError
from lookback.core.rulebook import Coverage

_COVERAGE = "coverage"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's folder: a local path, or one that is mounted as such (/Volumes/..., /dbfs/...)."""

    folder: Path

    @property
    def query_id(self) -> str | None:
        """The id that the query keeps over restarts; None before its first start."""
        file = self.folder / "metadata"
        return str(json.loads(file.read_text())["id"]) if file.exists() else None

    @property
    def last_committed(self) -> int:
        """The number of the last batch that is done; -1 if none is."""
        return _highest(self.folder / "commits")

    @property
    def next_batch(self) -> int:
        """The batch that a start of the query runs first: the one that was planned and is not done, or a new one."""
        return self.last_committed + 1

    @property
    def half_done(self) -> bool:
        """Whether the next batch was planned already, so that its rows are fixed and its output may be written."""
        return _highest(self.folder / "offsets") > self.last_committed

    def coverage_of(self, batch: int) -> Coverage | None:
        """What dispatch sent when `batch` was first run; None if nothing was recorded."""
        recorded = [int(file.stem) for file in self._records() if int(file.stem) <= batch]
        if not recorded:
            return None
        file = self.folder / _COVERAGE / f"{max(recorded)}.json"
        try:
            return Coverage.from_dict(json.loads(file.read_text()))
        except (ValueError, KeyError, TypeError) as error:
            raise SetupError(f"{file} is damaged ({error}); start with a new checkpoint") from error

    def record(self, batch: int, coverage: Coverage) -> None:
        """Writes down, before the query starts, what dispatch sends from `batch` on."""
        folder = self.folder / _COVERAGE
        folder.mkdir(parents=True, exist_ok=True)
        for file in self._records():
            if int(file.stem) > batch:
                file.unlink()
        temporary = folder / f".{batch}.{os.getpid()}"
        temporary.write_text(json.dumps(coverage.to_dict()))
        temporary.replace(folder / f"{batch}.json")

    def _records(self) -> list[Path]:
        return [file for file in (self.folder / _COVERAGE).glob("*.json") if file.stem.isdigit()]


def _highest(folder: Path) -> int:
    numbers = [int(file.name) for file in folder.iterdir() if file.name.isdigit()] if folder.is_dir() else []
    return max(numbers, default=-1)
