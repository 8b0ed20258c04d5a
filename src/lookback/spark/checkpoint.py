"""The checkpoint of an evaluation: its query's id, and how it is planned."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lookback.core.coverage import Coverage
from lookback.core.errors import SetupError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PLAN = "lookback.json"


@dataclass(frozen=True)
class Plan:
    """How a query is planned.

    shards: into how many parts the keys are divided, frozen with the first batch. coverage: what dispatch sends; it
    covers the rules in force, also those whose rows have been deleted since.
    """

    shards: int
    coverage: Coverage


def repartition(spark: SparkSession, folder: str | Path, partitions: int) -> None:
    """Divides the state of a query that has been stopped among so many partitions, at most as many as it has shards.

    Raises SetupError where there is no such checkpoint, it has fewer shards, or this Spark cannot do it.
    """
    plan = Checkpoint(Path(folder)).plan()
    if plan is None:
        raise SetupError(f"{folder} is not the checkpoint of an evaluation that has run")
    if not 1 <= partitions <= plan.shards:
        raise SetupError(
            f"{folder} divides its keys into {plan.shards} shards, so its state has 1 to {plan.shards} partitions, not "
            f"{partitions}; more shards are chosen with a new checkpoint: `evaluate --shards`"
        )
    # Spark 4.2 has this as an experimental call.
    manager = getattr(spark, "_streamingCheckpointManager", None)
    if manager is None:
        raise SetupError(
            "this Spark cannot repartition state: Spark 4.2 can; on Databricks (Runtime 18.3 or newer) set "
            "spark.sql.streaming.stateStore.partitions and start the evaluation again"
        )
    manager.repartition(str(folder), partitions)


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
