"""Measures the state of a checkpoint: the pages in force, by Spark's own reader, and the files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lookback.core.rules.rulebook import RuleBook
from lookback.core.state.shard import ShardState

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from lookback.core.streams.declaration import Stream


class _Pages(dict[str, bytes]):
    """Pages of one shard that were read, as the state's store; nothing is written back."""

    def put(self, name: str, page: bytes) -> None:
        raise AssertionError(f"page {name} is only read here")

    def remove(self, name: str) -> None:
        raise AssertionError(f"page {name} is only read here")


def on_disk(checkpoint: Path) -> dict[str, int]:
    """Measures the files of the state: snapshots and change logs of all versions that are kept."""
    sizes = [file.stat().st_size for file in (checkpoint / "state").rglob("*") if file.is_file()]
    return {"checkpoint_bytes": sum(sizes), "checkpoint_files": len(sizes)}


def in_force(spark: SparkSession, checkpoint: Path, stream: Stream) -> dict[str, Any]:
    """Measures the pages after the last batch: their bytes, names included, and their rows that windows still need.

    A row is one event in one feature.
    """
    rows = spark.read.format("statestore").option("path", str(checkpoint)).option("stateVarName", "pages").load()
    pages = rows.selectExpr("key.shard", "user_map_key.name", "user_map_value.page").toArrow().to_pylist()
    shards: dict[str, _Pages] = {}
    for row in pages:
        shards.setdefault(row["shard"], _Pages())[row["name"]] = bytes(row["page"])
    retained = stored = 0
    for each in shards.values():
        state = ShardState(RuleBook(stream, {stream.name: stream}))
        state.load(each)
        state.begin(each)
        retained += state.state_rows()
        stored += sum(run.rows for run in state.windows.list_runs())
    used = sum(len(name) + len(page) for each in shards.values() for name, page in each.items())
    return {
        "pages": len(pages),
        "page_bytes": used,
        "retained_rows": retained,
        "stored_rows": stored,
        "bytes_per_retained_row": round(used / max(1, retained), 2),
        "bytes_per_stored_row": round(used / max(1, stored), 2),
    }
