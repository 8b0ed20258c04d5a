"""The checkpoint of an evaluation: its query's id, and how it is planned."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from lookback.core.coverage import Coverage
from lookback.core.errors import SetupError

_PLAN = "lookback.json"


@dataclass(frozen=True)
class Plan:
    """How a query is planned.

    shards: frozen with the first batch, as Spark freezes its state's partitions. coverage: what dispatch sends; it
    covers the rules in force, also those whose rows have been deleted since.
    """

    shards: int
    coverage: Coverage


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's folder: a local path, or one that is mounted as such (/Volumes/..., /dbfs/...)."""

    folder: Path

    @property
    def query_id(self) -> str | None:
        """The id that the query keeps over restarts; None before its first start."""
        file = self.folder / "metadata"
        return str(json.loads(file.read_text())["id"]) if file.exists() else None

    def judged_through(self) -> int | None:
        """The last commit of the events table that a finished batch has read whole; None before the first."""
        batches = [int(file.name) for file in (self.folder / "commits").glob("[0-9]*") if file.name.isdigit()]
        if not batches:
            return None
        # A line each: version, metadata, then the sources in their order in the query, the events first.
        lines = (self.folder / "offsets" / str(max(batches))).read_text().splitlines()
        offset = json.loads(lines[2])
        return None if offset is None else int(offset["reservoirVersion"]) - 1

    def plan(self) -> Plan | None:
        """What was recorded before the last start of the query; None before its first start."""
        file = self.folder / _PLAN
        if not file.exists():
            return None
        try:
            document = json.loads(file.read_text())
            return Plan(int(document["shards"]), Coverage.from_dict(document))
        except (ValueError, KeyError, TypeError) as error:
            raise SetupError(f"{file} is damaged ({error}); start with a new checkpoint") from error

    def record(self, plan: Plan) -> None:
        """Writes down, before the query starts, how it is planned."""
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.folder / f".{_PLAN}.{os.getpid()}"
        temporary.write_text(json.dumps({"shards": plan.shards, **plan.coverage.to_dict()}))
        temporary.replace(self.folder / _PLAN)
