"""What of an events table is not judged yet, by the history of its commits."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Operations of a Delta table that may bring rows, and the figure of the history that says how many.
_ROWS_OF = {
    "WRITE": ("numOutputRows",),
    "STREAMING UPDATE": ("numOutputRows",),
    "COPY INTO": ("numOutputRows",),
    "CREATE TABLE AS SELECT": ("numOutputRows",),
    "REPLACE TABLE AS SELECT": ("numOutputRows",),
    "CREATE OR REPLACE TABLE AS SELECT": ("numOutputRows",),
    "MERGE": ("numTargetRowsInserted", "numTargetRowsDeleted"),
    "DELETE": ("numDeletedRows",),
    "TRUNCATE": ("numDeletedRows",),
}
# How many commits are looked at, at first and at most.
_HISTORY, _MOST_HISTORY = 50, 3_200


class Commit(NamedTuple):
    """A row of a table's history: its number, its time (aware), the operation and the figures of it, as text."""

    version: int
    at: dt.datetime
    operation: str
    figures: Mapping[str, str]

    @property
    def brings_rows(self) -> bool:
        """Whether it has rows to judge: not one that only moves or describes them."""
        return any(self.figures.get(name, "some") != "0" for name in _ROWS_OF.get(self.operation, ()))


@dataclass(frozen=True)
class Backlog:
    """What of an events table is not judged yet.

    committed: its last commit; newest: when it was made; waiting: commits after the last one judged that bring or delete
    rows; since: when the oldest of them was made, None where none waits; of more than 3,200 commits a newer one's time.
    """

    committed: int
    newest: dt.datetime
    waiting: int
    since: dt.datetime | None

    def seconds(self, now: dt.datetime) -> float:
        """How long the oldest has waited; 0 where none waits."""
        return 0.0 if self.since is None else max(0.0, (now - self.since).total_seconds())


def backlog_of(history: Callable[[int], Sequence[Commit]], judged: int | None) -> Backlog:
    """The backlog of an events table. judged: the last commit judged; None for none.

    history: handed a number, the table's newest commits, newest first, at most so many; there is at least one.
    """
    last, limit = -1 if judged is None else judged, _HISTORY
    while True:
        commits = history(limit)
        if len(commits) < limit or commits[-1].version <= last + 1 or limit >= _MOST_HISTORY:
            break
        limit *= 8
    waiting = [commit for commit in commits if commit.version > last and commit.brings_rows]
    # Of the commits that were not looked at nothing is known; most bring rows.
    unseen = max(0, commits[-1].version - last - 1) if len(commits) == limit else 0
    since = min((commit.at for commit in waiting), default=None)
    return Backlog(commits[0].version, commits[0].at, len(waiting) + unseen, since)
