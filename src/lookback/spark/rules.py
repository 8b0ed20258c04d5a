"""Publishing rules: versions appended to the rules table, never rewritten."""

from __future__ import annotations

import contextlib
import datetime as dt
import getpass
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import Row

from lookback.core.alerts import moment
from lookback.core.columns import text_of
from lookback.core.compiled import CompiledRule, compile_rule
from lookback.core.durations import MICROSECONDS
from lookback.core.errors import LookbackError, Problem, RuleError
from lookback.core.rulebook import COMMANDS, WITH_STATE
from lookback.core.rules import MAX_DOCUMENT_BYTES, STATUSES, Rule, parse_time, read_document
from lookback.core.streams import Stream
from lookback.core.windows import Lookback, Session, Window
from lookback.rule_tests import check_rule
from lookback.spark.schemas import RULES

if TYPE_CHECKING:
    from lookback.spark.tables import Tables


_DAY = MICROSECONDS["day"]


@dataclass(frozen=True)
class RuleRow:
    """The last version of a rule in the table; document None where it cannot be read as JSON."""

    rule_id: str
    version: int
    status: str
    document: dict[str, Any] | None
    author: str | None
    comment: str | None
    changed_at: dt.datetime | None


@dataclass(frozen=True)
class RulesTable:
    """The rules table of one place. streams: every declared stream by name."""

    tables: Tables
    streams: Mapping[str, Stream]

    def check(self, document: Mapping[str, Any] | Rule) -> CompiledRule:
        """The rule, bound to its stream, its own tests run. Raises RuleError with every problem at once."""
        return check_rule(document, self.streams)

    def push(
        self, document: Mapping[str, Any] | Rule, *, status: str = "active", author: str = "", comment: str = ""
    ) -> int:
        """Publishes the next version of a rule and returns its number. Raises RuleError; nothing is written then."""
        compiled = self.check(document)
        return self._append(compiled.rule.rule_id, status, dict(compiled.rule.document), author, comment)

    def set_status(self, rule_id: str, status: str, *, author: str = "", comment: str = "") -> int:
        """Publishes a version with the last one's document and another status. Raises RuleError for an unknown rule."""
        last = next((row for row in self.rows() if row.rule_id == rule_id), None)
        if last is None or last.document is None:
            known = ", ".join(row.rule_id for row in self.rows()) or "none"
            raise RuleError(rule_id, [Problem("rule_id", f"there is no such rule in the table; known are {known}")])
        return self._append(rule_id, status, last.document, author, comment)

    def command(self, action: str, stream: str, *, time: object = None, author: str = "", comment: str = "") -> None:
        """Publishes a command: clear_state, retire_all, or advance with the `time` that the watermark is to reach.

        Raises RuleError for an unknown command, stream or time.
        """
        if action not in COMMANDS:
            raise RuleError("*", [Problem("status", f"must be one of {', '.join(COMMANDS)}, got {action!r}")])
        if stream not in self.streams:
            known = ", ".join(sorted(self.streams))
            raise RuleError("*", [Problem("stream", f"there is no stream {stream!r}; known are {known}")])
        document: dict[str, Any] = {"stream": stream}
        if action == "advance":
            try:
                document["time"] = text_of(moment(parse_time(time)))
            except ValueError:
                raise RuleError(
                    "*", [Problem("time", f"must be a time such as '2026-01-31T12:00:00Z', got {time!r:.100}")]
                ) from None
        self._write("*", None, action, json.dumps(document), author, comment)

    def cold_measures(self, document: Mapping[str, Any] | Rule) -> list[str]:
        """The measures that will start empty and take over a day to fill: no rule in the table keeps their rows yet.

        A sequence has no measures and is named `sequence`. A session is as long as it is: what counts is its gap.
        """
        compiled = self.check(document)
        kept: set[str] = set()
        for row in self.rows():
            if row.status in WITH_STATE and row.document and row.document.get("stream") == compiled.rule.stream:
                # A row that somebody wrote by hand may not be a rule.
                with contextlib.suppress(RuleError):
                    kept |= set(_spans(compile_rule(row.document, self.streams[compiled.rule.stream])).values())
        return [name for (name, span), state in _spans(compiled).items() if span > _DAY and state not in kept]

    def rows(self) -> list[RuleRow]:
        """The last version of each rule, by rule_id; commands and rows without an id are left out."""
        last: dict[str, Row] = {}
        for row in self.tables.read("rules").collect():
            if row["rule_id"] in (None, "*"):
                continue
            known = last.get(row["rule_id"])
            if known is None or (row["version"] or 0) >= (known["version"] or 0):
                last[row["rule_id"]] = row
        return [_rule_row(row) for _, row in sorted(last.items())]

    def export(self, rule_id: str | None = None) -> list[dict[str, Any]]:
        """The documents of the last versions that are not retired, or that of one rule."""
        rows = [row for row in self.rows() if rule_id in (None, row.rule_id)]
        if rule_id is not None and not rows:
            raise RuleError(rule_id, [Problem("rule_id", "there is no such rule in the table")])
        return [row.document for row in rows if row.document and (rule_id is not None or row.status != "retired")]

    def _append(self, rule_id: str, status: str, document: Mapping[str, Any], author: str, comment: str) -> int:
        if status not in STATUSES:
            raise RuleError(rule_id, [Problem("status", f"must be one of {', '.join(STATUSES)}, got {status!r}")])
        text = json.dumps(document, ensure_ascii=False, default=_plain)
        if len(text.encode()) > MAX_DOCUMENT_BYTES:
            raise RuleError(
                rule_id, [Problem("", f"the document is longer than {MAX_DOCUMENT_BYTES:,} bytes; split it")]
            )
        versions = [row.version for row in self.rows() if row.rule_id == rule_id]
        version = max(versions, default=0) + 1
        self._write(rule_id, version, status, text, author, comment)
        return version

    def _write(self, rule_id: str, version: int | None, status: str, document: str, author: str, comment: str) -> None:
        changed_at = dt.datetime.now(dt.timezone.utc)
        row = (rule_id, version, status, document, author or getpass.getuser(), comment, changed_at)
        self.tables.append(self.tables.spark.createDataFrame([row], RULES).coalesce(1), "rules")


def _spans(rule: CompiledRule) -> dict[tuple[str, int], str]:
    """(What a rule measures, how far it looks back in microseconds) -> the name of the state that holds its rows."""
    if rule.rule.sequence is not None:
        return {("sequence", rule.rule.sequence.within): rule.store}
    return {
        (measure.name, _reach(measure.window)): f"{rule.store}{measure.feature.feature_id}" for measure in rule.measures
    }


def _reach(window: Window) -> int:
    if isinstance(window, Session):
        return window.gap
    return window.size + window.delay if isinstance(window, Lookback) else window.size


def _rule_row(row: Row) -> RuleRow:
    try:
        document = read_document(row["document"])
    except LookbackError:
        document = None
    return RuleRow(
        row["rule_id"], row["version"] or 0, row["status"], document, row["author"], row["comment"], row["changed_at"]
    )


def _plain(value: object) -> str:
    if isinstance(value, (dt.datetime, dt.date)):
        return value.isoformat()
    raise TypeError(f"{value!r} cannot stand in a rule document; write it as text")
