"""Measures how much of an events table is not judged yet, from the history of its commits."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Operations of a Delta table that may add or delete rows -> the metrics of the history that count them.
_ROW_METRICS = {
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
# How many commits are read at first, and at most.
_FIRST_COMMITS, _MAX_COMMITS = 50, 3_200


class Commit(NamedTuple):
    """A row of a table's history: an aware datetime `at`, and the operation's metrics as text in `figures`."""

    version: int
    at: dt.datetime
    operation: str
    figures: Mapping[str, str]

    @property
    def brings_rows(self) -> bool:
        """True if the commit has rows to judge. Commits that only move or describe rows have none."""
        return any(self.figures.get(name, "some") != "0" for name in _ROW_METRICS.get(self.operation, ()))


@dataclass(frozen=True)
class Backlog:
    """The part of an events table that is not judged yet.

    Attributes:
        committed: The table's last commit.
        newest: The time of that commit.
        waiting: The number of commits after the last one judged that add or delete rows.
        since: The time of the oldest waiting commit; None if no commit waits. With more than 3,200 unjudged commits it
            is the time of a newer one.
    """

    committed: int
    newest: dt.datetime
    waiting: int
    since: dt.datetime | None

    def seconds(self, now: dt.datetime) -> float:
        """Returns how many seconds the oldest commit has waited; 0 if no commit waits."""
        return 0.0 if self.since is None else max(0.0, (now - self.since).total_seconds())


def measure_backlog(history: Callable[[int], Sequence[Commit]], judged: int | None) -> Backlog:
    """Measures the backlog of an events table.

    Args:
        history: Takes a number and returns at most that many of the table's newest commits, newest first, and at least
            one.
        judged: The last commit judged; None if no commit was judged.
    """
    last, limit = -1 if judged is None else judged, _FIRST_COMMITS
    while True:
        commits = history(limit)
        if len(commits) < limit or commits[-1].version <= last + 1 or limit >= _MAX_COMMITS:
            break
        limit *= 8
    waiting = [commit for commit in commits if commit.version > last and commit.brings_rows]
    # Commits that were not read count as waiting, since most add rows.
    unseen = max(0, commits[-1].version - last - 1) if len(commits) == limit else 0
    since = min((commit.at for commit in waiting), default=None)
    return Backlog(commits[0].version, commits[0].at, len(waiting) + unseen, since)
