"""Brings changes of lists to the shards: writes them to the checkpoint, then appends a command to the rules table.

The stream reads the command like a change of a rule. So Spark's offsets determine between which two commits of events
it takes effect, also when a batch is repeated.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from lookback.core.errors import SetupError
from lookback.core.rules.commands import LIST_CHANGED
from lookback.core.values.lists import Lists
from lookback.spark.checkpoints.checkpoint import Checkpoint
from lookback.spark.checkpoints.listfiles import ListFiles
from lookback.spark.checkpoints.sparklogs import LISTS, RULES
from lookback.spark.following.listfeed import ListFeed, describe_changes
from lookback.spark.lists import TABLE
from lookback.spark.platform.faults import succeeds
from lookback.spark.rules import RulesTable
from lookback.spark.tables.history import read_stamp
from lookback.spark.tables.logfiles import commit_file

if TYPE_CHECKING:
    from lookback.core.streams.declaration import Stream
    from lookback.spark.tables.lakehouse import Tables

_LOG = logging.getLogger("lookback")
# Looking for a file costs nothing; reading a table's version from a catalog takes a job.
_REMOTE_SECONDS = 5.0
_RETRY_SECONDS = 5.0
# Removed values stay in the checkpoint for at most this long plus two batches.
_REMOVE_SECONDS = 60.0


class ListsWatch:
    """Looks for new commits of the table `lists` and announces them to a stream, whichever lists its rules use.

    `is_rebuilding` returns whether a rebuild is running. Meanwhile no files are removed, because its commands are still
    waiting in the shards.
    """

    def __init__(
        self,
        tables: Tables,
        stream: Stream,
        streams: Mapping[str, Stream],
        checkpoint: Checkpoint,
        is_rebuilding: Callable[[], bool],
    ) -> None:
        self._tables, self._stream, self._checkpoint, self._is_rebuilding = tables, stream, checkpoint, is_rebuilding
        self._rules = RulesTable(tables, streams)
        self._files = ListFiles.of(checkpoint)
        self._folder = tables.local_folder(TABLE)
        self._log = self._folder or tables.find_log_place(TABLE)
        # The last commit seen; None if the table does not exist.
        self._version: int | None = None
        self._next_look = self._next_removal = 0.0
        # The commit before which this process has removed files.
        self._kept_from = -1
        # For each announced commit, a version of the rules table that contains its command.
        self._announced: dict[int, int] = {}

    def begin(self) -> None:
        """Recreates missing files that the stream's commands refer to, and announces new commits.

        Raises SetupError if the table has no change feed.
        """
        if not self._tables.exists(TABLE):
            return
        if self._folder is not None and not (self._folder / "_delta_log").is_dir():
            # Over Spark Connect the folder is on another machine.
            self._folder = self._log = None
        self._version = -1
        if self._tables.is_unwritten(TABLE):
            self._version = 0
            return
        # Read the stream's own notes: anyone can write such commands to the rules table.
        noted = self._files.read_announced()
        announced = sorted({*noted, *self._read_obeyed()})
        is_afresh = self._checkpoint.is_new and not self._is_rebuilding()
        if announced and is_afresh and self._tables.version(TABLE) < announced[-1]:
            # An earlier evaluation read a different table.
            announced = []
        if announced:
            self._version = announced[-1]
            self._announced = {announced[-1]: self._tables.version("rules"), **noted}
            self._restore(announced)
        self._follow()
        self.remove_old()
        self._next_look = time.monotonic() + (_REMOTE_SECONDS if self._folder is None else 0.0)

    def follow_if_due(self) -> None:
        """Announces new commits if a check is due; called often. Failures are logged and retried after five seconds."""
        if self._version is None or time.monotonic() < self._next_look:
            return
        if time.monotonic() >= self._next_removal:
            self.remove_old()
        if not succeeds(
            self._follow_if_changed, "stream=%s could not read the table lists, will retry: %s", self._stream
        ):
            self._next_look = time.monotonic() + _RETRY_SECONDS
        elif self._folder is None:
            self._next_look = time.monotonic() + _REMOTE_SECONDS

    def _read_obeyed(self) -> list[int]:
        """Reads the commits that evaluations of the stream logged as applied."""
        if not self._tables.may_have_rows("rule_log"):
            return []
        own = "stream = :stream AND action = :action AND version IS NOT NULL"
        text = f"SELECT DISTINCT version FROM rule_log WHERE {own}"
        rows = self._tables.run(text, stream=self._stream.name, action=LIST_CHANGED).collect()
        return [row["version"] for row in rows]

    def _restore(self, announced: list[int]) -> None:
        """Recreates the files from the table if some are lost or the checkpoint is new."""
        floor, last = self._files.read_floor(), self._tables.version(TABLE)
        if last < announced[-1]:
            raise SetupError(
                f"{self._tables.identifier(TABLE)} ends at commit {last}, but stream {self._stream.name!r} has already "
                f"applied commit {announced[-1]}: the table was deleted and created again, so its changes would be "
                "mistaken for old ones. Restore the previous table, or begin a new evaluation: lookback evaluate "
                f"{self._stream.name} --fresh"
            )
        if not self._files.find_damaged(commit for commit in announced if commit >= floor):
            return
        history = ListFeed.read(self._tables)
        if history.begins:
            _LOG.warning(
                f"the change feed of {self._tables.identifier(TABLE)} begins at commit {history.begins}: earlier "
                "events are evaluated again with the lists of that commit"
            )
        history.write(self._files, announced)
        if floor >= 0:
            self._files.drop_before(floor)

    def _follow_if_changed(self) -> None:
        assert self._version is not None
        # To look for a commit takes one request. To read the table's version takes several.
        if self._log is None or commit_file(self._log, self._version + 1).exists():
            self._follow()

    def _follow(self) -> None:
        assert self._version is not None
        history = ListFeed.read(self._tables, self._version + 1)
        # An attempt that failed before its command was written may have left files of later commits.
        before = max((each for each in self._files.list_commits() if each <= self._version), default=None)
        news: dict[int, str] = {}
        if history.begins > self._version + 1:
            before = history.begins - 1
            self._files.begin([before], Lists.empty().change(history.before, before))
            news[before] = (
                f"commits {self._version + 1} to {before} can no longer be read: all lists as of commit {before}"
            )
        for commit, changes in history.changes.items():
            self._files.add(before, commit, changes)
            before, news[commit] = commit, describe_changes(changes)
        if news:
            # Write the files first, so that they exist when a shard reads the command.
            self._rules.announce_lists(self._stream.name, news)
        self._version = history.last
        if (stamp := read_stamp(self._tables, TABLE, self._version)) is not None:
            self._checkpoint.note_read(LISTS, self._version, stamp)
        if news:
            self._announced[max(news)] = self._tables.version("rules")
            self._files.note_announced(self._announced)

    def remove_old(self) -> None:
        """Removes the files that no state can need. A failure is logged and retried, here or at the next start."""
        self._next_removal = time.monotonic() + _REMOVE_SECONDS
        succeeds(self._remove_old, "stream=%s could not remove files of lists, will retry: %s", self._stream)

    def _remove_old(self) -> None:
        """Removes the files that are older than the lists of the last finished batch."""
        if max(self._announced, default=-1) <= self._kept_from or self._is_rebuilding():
            return
        following = self._checkpoint.find_next_commits()[RULES]
        passed = max((commit for commit, rules in self._announced.items() if rules < following), default=None)
        if passed is not None and passed > self._kept_from:
            self._files.drop_before(passed)
            self._kept_from = passed
            self._announced = {commit: rules for commit, rules in self._announced.items() if commit >= passed}
