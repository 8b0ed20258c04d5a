"""Adapts what dispatch sends to the rules table while a query runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812

from lookback.core.rules.compiling import compile_rule
from lookback.core.rules.coverage import Coverage, find_coverage
from lookback.core.rules.document import read_document
from lookback.core.rules.roles import find_roles
from lookback.core.rules.versions import WITH_STATE
from lookback.core.values.limits import LIMITS
from lookback.spark.batches.dispatch import select_rule_changes
from lookback.spark.checkpoints.checkpoint import Checkpoint
from lookback.spark.platform.faults import succeeds
from lookback.spark.tables.logfiles import commit_file

if TYPE_CHECKING:
    from lookback.core.streams.declaration import Stream
    from lookback.spark.batches.sink import BatchReport
    from lookback.spark.tables.lakehouse import Tables

_COLUMNS = ["rule_id", "version", "status", "document"]
# Looking for a file costs nothing; reading a table's version from a catalog takes a job. If a rule arrives between two
# checks that needs more than is sent, a new query must be planned, which takes about two seconds.
_REMOTE_SECONDS = 10.0
# How many documents' needs are cached: those of the largest table, and some replaced ones.
_MAX_DOCUMENTS = 2 * LIMITS["rules"].most


class RulesWatch:
    """Looks for new commits of the rules table and widens the plan before the batch that reads them is dispatched.

    This only saves time: a batch whose blocks lack something fails and is planned again. So a failed check, such as
    during an outage of the catalog, is logged and repeated ten seconds later. Once a batch has applied a change, the
    plan is narrowed to the coverage that is still required.
    """

    def __init__(self, tables: Tables, stream: Stream, checkpoint: Checkpoint) -> None:
        self._tables, self._stream, self._checkpoint = tables, stream, checkpoint
        self._folder = tables.local_folder("rules")
        self._log = tables.find_log_place("rules") if self._folder is None else None
        self._version = tables.version("rules")
        self._next_look = time.monotonic() + (_REMOTE_SECONDS if self._folder is None else 0.0)
        self._seen: BatchReport | None = None
        # The coverage of each document, cached because every change checks all rules; None if it is not a valid rule.
        self._needs: dict[str, Coverage | None] = {}

    @property
    def is_cheap(self) -> bool:
        """Whether a check only reads the file system, so that it can run many times a second."""
        return self._folder is not None

    def find_current_needs(self) -> Coverage:
        """Returns the coverage for the latest versions of all rules in the table, active and shadow."""
        table = self._tables.read("rules")
        names = [name for name in (*_COLUMNS, "evidence") if name != "version" and name in table.columns]
        texts = [F.make_valid_utf8(name).alias(name) for name in names]
        by_rule: dict[str, list[dict[str, Any]]] = {}
        for row in table.select("version", *texts).collect():
            if row["rule_id"] is not None:
                version = 2**63 if row["version"] is None else row["version"]
                by_rule.setdefault(row["rule_id"], []).append({"evidence": None, **row.asDict(), "version": version})
        return self._find_needs(row for rows in by_rule.values() for row in find_roles(rows).listed)

    def find_past_needs(self, start: int) -> Coverage:
        """Returns the coverage for all rule versions from the commit `start` of the table on."""
        rows = select_rule_changes(self._tables.read_changes("rules", start)).select(*_COLUMNS)
        return self._find_needs(rows.toArrow().to_pylist())

    def follow_if_due(self, report: BatchReport | None) -> None:
        """Updates the plan if a check is due; called often. `report` is that of the last batch."""
        if time.monotonic() < self._next_look:
            return
        is_seen = succeeds(
            lambda: self._follow(report),
            "stream=%s could not check the rules table, will retry: %s",
            self._stream,
        )
        if self._folder is None or not is_seen:
            self._next_look = time.monotonic() + _REMOTE_SECONDS

    def _follow(self, report: BatchReport | None) -> None:
        added = self._find_added_needs()
        if added is not None:
            self._widen(added)
        if report is not self._seen and report is not None and report.required is not None:
            self._narrow(report.required)
        self._seen = report

    def _find_added_needs(self) -> Coverage | None:
        """Returns the coverage for the rules in the table, or None if it has no new commit."""
        # To look for a commit takes one request. To read the table's version takes several.
        if self._log is not None and not commit_file(self._log, self._version + 1).exists():
            return None
        version = self._tables.version("rules")
        if version == self._version:
            return None
        needs = self.find_current_needs()
        self._version = version
        return needs

    def _find_needs(self, rows: Iterable[dict[str, Any]]) -> Coverage:
        documents = {row["document"] for row in rows if row["status"] in WITH_STATE and row["document"]}
        needs = [needed for document in documents if (needed := self._find_needs_of(document)) is not None]
        return Coverage.of(
            (want for needed in needs for want in needed.wants), (name for needed in needs for name in needed.fields)
        )

    def _find_needs_of(self, document: str) -> Coverage | None:
        """Returns the coverage of one rule; None if the document is not a valid rule of the stream."""
        if document not in self._needs:
            if len(self._needs) >= _MAX_DOCUMENTS:
                self._needs.clear()
            self._needs[document] = None
            # The stream itself rejects and logs a row that is not a valid rule.
            with contextlib.suppress(Exception):
                self._needs[document] = find_coverage([compile_rule(read_document(document), self._stream)])
        return self._needs[document]

    def _widen(self, coverage: Coverage) -> None:
        plan = self._checkpoint.read_plan()
        if plan is not None and not plan.coverage.covers(coverage):
            self._checkpoint.write_plan(replace(plan, coverage=plan.coverage | coverage))

    def _narrow(self, required: Coverage) -> None:
        """Narrows the plan to `required`, the needs of the rules in force, and those of the rules now in the table."""
        plan = self._checkpoint.read_plan()
        # Reading the table takes a job, while batches run.
        if plan is not None and plan.coverage != required:
            coverage = required | self.find_current_needs()
            if plan.coverage != coverage:
                self._checkpoint.write_plan(replace(plan, coverage=coverage))
