"""Keeps what dispatch sends in step with the rules table while a query runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import functions as F  # noqa: N812

from lookback.core.rules.compiled import compile_rule
from lookback.core.rules.coverage import Coverage, find_coverage
from lookback.core.rules.document import read_document
from lookback.core.rules.roles import find_roles
from lookback.core.rules.versions import WITH_STATE
from lookback.core.values.limits import LIMITS
from lookback.spark.batches.dispatch import select_rule_changes
from lookback.spark.checkpoints.checkpoint import Checkpoint
from lookback.spark.platform.faults import succeeds
from lookback.spark.tables.lakehouse import commit_file, read_actions

if TYPE_CHECKING:
    from lookback.core.streams.declaration import Stream
    from lookback.spark.batches.sink import BatchReport
    from lookback.spark.tables.lakehouse import Tables

_COLUMNS = ["rule_id", "version", "status", "document"]
# Looking for a file costs nothing; asking a catalog for a table's version takes a job. If a rule that needs more than is
# sent arrives between two looks, a new query must be planned, which takes some two seconds.
_REMOTE_SECONDS = 10.0
# The documents whose needs are kept: those of the largest table, and some that were replaced.
_MOST_DOCUMENTS = 2 * LIMITS["rules"].most


class RulesWatch:
    """Looks for new commits of the rules table before the batch that reads them is dispatched, and widens the plan.

    It only saves time: a batch whose blocks lack something fails and is planned again. So a failed look, as in an outage
    of the catalog, is logged and repeated ten seconds later. Once a batch has applied a change, the plan is narrowed to the
    coverage that is still required.
    """

    def __init__(self, tables: Tables, stream: Stream, checkpoint: Checkpoint) -> None:
        self._tables, self._stream, self._checkpoint = tables, stream, checkpoint
        self._folder = tables.local_folder("rules")
        self._version = tables.version("rules")
        self._next_look = time.monotonic() + (_REMOTE_SECONDS if self._folder is None else 0.0)
        self._seen: BatchReport | None = None
        # The coverage that each document needs, since a change of one rule looks at all of them; None for one that is no rule.
        self._needs: dict[str, Coverage | None] = {}

    @property
    def is_cheap(self) -> bool:
        """True if a look reads only the file system, so that it can be repeated many times a second."""
        return self._folder is not None

    def find_current_needs(self) -> Coverage:
        """Returns the coverage that dispatch must send for the last versions of every rule in the table, in both roles."""
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
        """Returns the coverage that dispatch must send for all versions that rules had from a commit of the table on."""
        rows = select_rule_changes(self._tables.read_changes("rules", start)).select(*_COLUMNS)
        return self._find_needs(rows.toArrow().to_pylist())

    def follow_if_due(self, report: BatchReport | None) -> None:
        """Brings the plan up to date if a look is due; called often. report: that of the last batch."""
        if time.monotonic() < self._next_look:
            return
        is_seen = succeeds(
            lambda: self._follow(report),
            "stream=%s the rules table could not be looked at, it will be tried again: %s",
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
        """Returns the coverage that the rows of new commits need; None without a new commit."""
        if self._folder is None:
            version = self._tables.version("rules")
            if version == self._version:
                return None
            needs = self.find_current_needs()
            self._version = version
            return needs
        added: Coverage | None = None
        while (rows := _read_commit_rows(self._folder, self._version + 1)) is not None:
            self._version += 1
            added = self._find_needs(rows) | (added or Coverage())
        return added

    def _find_needs(self, rows: Iterable[dict[str, Any]]) -> Coverage:
        documents = {row["document"] for row in rows if row["status"] in WITH_STATE and row["document"]}
        needs = [needed for document in documents if (needed := self._find_needs_of(document)) is not None]
        return Coverage.of(
            (want for needed in needs for want in needed.wants), (name for needed in needs for name in needed.fields)
        )

    def _find_needs_of(self, document: str) -> Coverage | None:
        """Returns the coverage of one rule; None for a document that is no rule of the stream."""
        if document not in self._needs:
            if len(self._needs) >= _MOST_DOCUMENTS:
                self._needs.clear()
            self._needs[document] = None
            # A row that is not a valid rule is rejected and logged by the stream, whatever the error is.
            with contextlib.suppress(Exception):
                self._needs[document] = find_coverage([compile_rule(read_document(document), self._stream)])
        return self._needs[document]

    def _widen(self, coverage: Coverage) -> None:
        plan = self._checkpoint.read_plan()
        if plan is not None and not plan.coverage.covers(coverage):
            self._checkpoint.write_plan(replace(plan, coverage=plan.coverage | coverage))

    def _narrow(self, required: Coverage) -> None:
        """Leaves out of the plan what no rule needs any more. required: what those need that the last change left in force."""
        plan = self._checkpoint.read_plan()
        # To ask the table takes a job, beside the batches.
        if plan is not None and plan.coverage != required:
            coverage = required | self.find_current_needs()
            if plan.coverage != coverage:
                self._checkpoint.write_plan(replace(plan, coverage=coverage))


def _read_commit_rows(table: Path, version: int) -> list[dict[str, Any]] | None:
    """Reads the rows of the files that a commit added to a local table; None if there is no such commit yet."""
    try:
        added = read_actions(commit_file(table, version), "add")
        files = [table / unquote(action["add"]["path"]) for action in added]
        return [row for file in files for row in pq.read_table(file, columns=_COLUMNS).to_pylist()]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, pa.ArrowException):
        # Half written, or of another layout: the batch that reads it will find out what it needs.
        return []
