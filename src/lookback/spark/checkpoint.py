"""The checkpoint of an evaluation: its query's id, and what dispatch sends."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from lookback.core.errors import SetupError
from lookback.core.rulebook import Coverage

_COVERAGE = "coverage.json"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's folder: a local path, or one that is mounted as such (/Volumes/..., /dbfs/...)."""

    folder: Path

    @property
    def query_id(self) -> str | None:
        """The id that the query keeps over restarts; None before its first start."""
        file = self.folder / "metadata"
        return str(json.loads(file.read_text())["id"]) if file.exists() else None

    def coverage(self) -> Coverage:
        """What dispatch sent when the query was last started; nothing before its first start.

        Rules that are in force are covered by it, also those whose rows have been deleted since.
        """
        file = self.folder / _COVERAGE
        if not file.exists():
            return Coverage()
        try:
            return Coverage.from_dict(json.loads(file.read_text()))
        except (ValueError, KeyError, TypeError) as error:
            raise SetupError(f"{file} is damaged ({error}); start with a new checkpoint") from error

    def record(self, coverage: Coverage) -> None:
        """Writes down, before the query starts, what dispatch sends."""
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.folder / f".{_COVERAGE}.{os.getpid()}"
        temporary.write_text(json.dumps(coverage.to_dict()))
        temporary.replace(self.folder / _COVERAGE)
