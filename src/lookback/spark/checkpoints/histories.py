"""Files through which shards and the driver coordinate warm-ups: which versions wait, and where their history is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from lookback.core.engine.warming import find_earliest, find_settled
from lookback.core.rules.versions import Piece
from lookback.core.state.shard import ShardState
from lookback.places import Place
from lookback.spark.checkpoints.checkpoint import Checkpoint
from lookback.spark.checkpoints.parcels import Parcels

# The kind of the parcels of histories in a checkpoint.
_KIND = "histories"
# The parcel with the number of pieces of a history. It is written after all of them.
_READY = "ready"


@dataclass(frozen=True)
class Histories:
    """The histories that the driver of the query `query_id` stores in its checkpoint."""

    parcels: Parcels
    query_id: str

    @classmethod
    def of(cls, checkpoint: Place, query_id: str) -> Histories:
        """Returns the histories in the folder of a checkpoint."""
        return cls(Checkpoint(checkpoint).parcels(_KIND), query_id)

    def read_part(self, name: str, part: int) -> bytes:
        """Reads a part of a history. Raises StoreFailed if it is missing."""
        return self.parcels.read(name_part(name, part))

    def knows(self, piece: Piece) -> bool:
        """Returns whether the driver really stored this piece, or noted zero pieces. Anyone can write such a row."""
        name = Waiting(piece.rule_id, piece.version, piece.through).name
        is_number = 0 < piece.piece <= piece.pieces or piece.piece == piece.pieces == 0
        return piece.parcel == name and is_number and self.count_pieces(name) == piece.pieces

    def note_pieces(self, name: str, pieces: int) -> None:
        """Stores the number of pieces of a history once all are stored; 0 for a version that starts without one."""
        self.parcels.write(f"{name}.{_READY}", str(pieces).encode())

    def count_pieces(self, name: str) -> int | None:
        """Returns the number that `note_pieces` stored; None if the history is not ready."""
        return int(self.parcels.read(f"{name}.{_READY}")) if self.parcels.has(f"{name}.{_READY}") else None


class Waiting(NamedTuple):
    """A version that is warming up, as reported by the shards.

    Attributes:
        rule_id: The rule.
        version: The version.
        begun: The last commit of its history.
        loaded: The number of pieces that all shards have loaded.
        earliest: Rows with earlier event times (microseconds) are no longer in any window; None if unknown or
            unlimited.
        pieces: The total number of pieces; 0 before the first is loaded.
        settled: See `find_settled`, as of the last commit of the history.
    """

    rule_id: str
    version: int
    begun: int
    loaded: int = 0
    earliest: int | None = None
    pieces: int = 0
    settled: int | None = None

    @property
    def name(self) -> str:
        """The name of its parcels."""
        return f"{self.rule_id}-{self.version}-{self.begun}"


def name_part(name: str, part: int) -> str:
    """Returns the name of the parcel with one part of a history."""
    return f"{name}.{part}"


def merge_waiting(reports: Iterable[Mapping[str, Any]]) -> tuple[Waiting, ...]:
    """Merges the warming versions in the shards' reports, each with the fewest pieces that any shard has loaded."""
    merged: dict[tuple[str, int, int], Waiting] = {}
    for report in reports:
        for row in report.get("warming", ()):
            each = Waiting(*row)
            key = each.rule_id, each.version, each.begun
            known = merged.get(key)
            fewest = each if known is None or each.loaded < known.loaded else known
            merged[key] = fewest._replace(pieces=max(each.pieces, known.pieces if known is not None else 0))
    return tuple(merged[key] for key in sorted(merged))


def describe_waiting(state: ShardState, watermark: int | None) -> list[list[Any]]:
    """Lists the versions that are warming up in a shard, for its report."""
    listed = []
    for each in state.book.list_known_warming():
        rule = state.book.compile_warming(each)
        if rule is None or each.begun is None or each.is_replayed:
            continue
        earliest = find_earliest(state, rule, watermark)
        settled = find_settled(rule, each.watermark)
        listed.append([*each.key, each.begun, each.loaded, earliest, each.pieces, settled])
    return listed
