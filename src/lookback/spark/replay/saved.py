"""Saves the final state of a replay, so that the next one continues from it and reads only new commits.

A folder holds one state at a time, in a subfolder named after its last commit: Parquet with the pages of all shards,
and a JSON document, which is written last. A state with a different layout or different stream settings is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lookback.core.streams.declarations import Declarations
from lookback.core.values.pages import PAGE_VERSION
from lookback.places import Place, remove_tree, write_whole

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_DOCUMENT, _PAGES = "state.json", "pages"


@dataclass(frozen=True)
class SavedState:
    """The state of all shards after a commit of the events.

    Attributes:
        folder: The folder of the state, named after the commit.
        through: The last commit that the state includes.
        shards: The number of shards.
        reach: The attributes of the `Reach` of the replay that made the state; None if it read from the first commit
            on.
        warmed: The versions, as `rule_id version`, that came into force with a history, which the state has gathered
            from the first commit on.
        changed: The commit of the last rule change that the state includes; None for none.
        decided_at: When the last compared alert of commit `through` was decided, in microseconds; 0 without any.
    """

    folder: Place
    through: int
    shards: int
    reach: Mapping[str, int | None] | None
    warmed: frozenset[str]
    changed: int | None
    decided_at: int

    @classmethod
    def find(cls, place: Place, declarations: Declarations, begun_at: object = None) -> SavedState | None:
        """Finds the last complete state in a folder; None if there is none to continue from.

        Args:
            place: The folder.
            declarations: The stream's declarations, which must match those of the state up to its commit.
            begun_at: When the proved evaluation began, if an earlier evaluation preceded it.
        """
        folders: list[Place] = [*place.glob("[0-9]*")]
        for folder in sorted(folders, key=str, reverse=True):
            try:
                document = json.loads((folder / _DOCUMENT).read_text(encoding="utf-8"))
                warmed, decided_at = frozenset(map(str, document["warmed"])), int(document["decided_at"])
                through, shards = int(document["through"]), int(document["shards"])
                state = cls(folder, through, shards, document["reach"], warmed, document["changed"], decided_at)
            except (OSError, ValueError, LookupError, TypeError):
                continue  # the write was interrupted
            if document.get("fits") == _describe_fit(declarations, state.through, begun_at):
                return state
        return None

    def read(self, spark: SparkSession) -> DataFrame:
        """Reads the pages, with the columns shard and payload."""
        return spark.read.parquet(str(self.folder / _PAGES))

    def write(self, declarations: Declarations, begun_at: object, pages: DataFrame) -> None:
        """Writes the state with its pages, then removes other states in the folder. For the arguments see `find`."""
        if self.folder.exists():
            remove_tree(self.folder)
        pages.write.parquet(str(self.folder / _PAGES))
        fits = _describe_fit(declarations, self.through, begun_at)
        document = {
            "through": self.through,
            "shards": self.shards,
            "fits": fits,
            "reach": self.reach,
            "warmed": sorted(self.warmed),
            "changed": self.changed,
            "decided_at": self.decided_at,
        }
        write_whole(self.folder / _DOCUMENT, json.dumps(document).encode())
        for other in self.folder.parent.glob("[0-9]*"):
            if other != self.folder:
                remove_tree(other)


def _describe_fit(declarations: Declarations, through: int, begun_at: object) -> dict[str, Any]:
    """Returns the facts that must be unchanged for a replay to continue from the state after a commit."""
    document = declarations.last.to_dict()
    fit = {
        "begun_at": str(begun_at),
        "layout": PAGE_VERSION,
        "stream": {name: document.get(name) for name in ("stream", "event_id", "event_time", "fields", "order_by")},
        "declared": declarations.describe(through),
    }
    return dict(json.loads(json.dumps(fit, default=str)))
