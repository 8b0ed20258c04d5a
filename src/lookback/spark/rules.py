"""Publishes rules and commands: appends versions to the rules table and never rewrites one."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import random
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.sql import Row

from lookback.core.errors import LookbackError, Problem, RuleError, SetupError
from lookback.core.rules.compiled import CompiledRule, compile_rule
from lookback.core.rules.document import STATUSES, Rule, describe_size_limit, read_document, read_rule
from lookback.core.rules.gate import REFUSAL, find_objection, is_proven, is_same_person
from lookback.core.rules.memberships import find_unknown_lists
from lookback.core.rules.parameters import Parameters
from lookback.core.rules.quarantine import AUTHOR, Quarantine
from lookback.core.rules.roles import REJECTED, SHADOW, WARMING, find_roles, write_quarantined
from lookback.core.rules.rulebook import ACTIONS, COMMANDS, LISTS, MAX_VERSION, RuleBook, RuleChange
from lookback.core.rules.versions import WARM, WITH_STATE, Entry, Piece
from lookback.core.streams.declaration import Stream
from lookback.core.values.columns import to_text
from lookback.core.values.durations import MICROSECONDS
from lookback.core.values.limits import WIDEST_LIMITS
from lookback.core.values.times import parse_calendar_time, to_utc
from lookback.core.values.windows import Lookback, Session, Window
from lookback.spark.lists import list_names
from lookback.spark.queries import functions as F  # noqa: N812
from lookback.spark.tables.lakehouse import SPARK_ERRORS, is_conflict
from lookback.spark.tables.schemas import RULES

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from lookback.spark.tables.lakehouse import Tables


_DAY_US = MICROSECONDS["day"]
_MAX_ATTEMPTS = 20
# Estimates how long a warm-up takes. Making a history of two sums took 10 microseconds of processor time per event, one
# of sessions, or of matches with fixed expiry, another 8 to 14.
_MIN_SECONDS, _EVENTS_PER_SECOND, _ORDERED_PER_SECOND = 5, 150_000, 80_000
_MAX_PAUSE_SECONDS = 3.0
_CONFLICT = "the rule has a new version since it was read"


@dataclass(frozen=True)
class RuleRow:
    """A version of a rule in the table. `document` is None if it is not valid JSON."""

    rule_id: str
    version: int
    status: str
    document: dict[str, Any] | None
    author: str | None
    comment: str | None
    changed_at: dt.datetime | None
    approved_by: str | None = None
    evidence: str | None = None


@dataclass(frozen=True)
class _NewRow:
    """A version of a rule, or a command, to write."""

    rule_id: str
    version: int | None
    status: str
    document: str
    author: str
    comment: str
    evidence: str | None = None
    approved_by: str | None = None


class _Approval(NamedTuple):
    """The columns of a row about the gate. `author` replaces the publisher of the row if the publisher approved it."""

    approved_by: str | None = None
    evidence: str | None = None
    author: str = ""


class _Span(NamedTuple):
    """The name of a measure, or `sequence`, and how far it reaches back in microseconds."""

    name: str
    reach: int


@dataclass(frozen=True)
class RulesTable:
    """The rules table of one place, with every declared stream by name.

    With `has_gate` a version only becomes active by `activate`: `push` and `set_parameters` publish a draft instead,
    and an active row that the stream rejected because of an enforced gate counts as a draft.
    """

    tables: Tables
    streams: Mapping[str, Stream]
    has_gate: bool = False

    def check(self, document: Mapping[str, Any] | Rule) -> CompiledRule:
        """Binds a rule to its stream and runs its own tests. Raises RuleError with all problems at once."""
        from lookback.testing.rule_tests import check_rule

        return check_rule(document, self.streams)

    def _check_with_lists(self, document: Mapping[str, Any] | Rule) -> CompiledRule:
        """Checks a rule before publication; its lists must exist. Raises RuleError."""
        compiled = self.check(document)
        if compiled.lists and (problems := find_unknown_lists(compiled, list_names(self.tables))):
            raise RuleError(compiled.spec.rule_id, problems)
        return compiled

    def push(
        self, document: Mapping[str, Any] | Rule, *, status: str = "active", author: str = "", comment: str = ""
    ) -> int:
        """Publishes the next version of a rule and returns its number.

        If two processes publish at once, both versions are written, one after the other. Raises RuleError, with nothing
        written, if the rule is invalid, and SetupError if concurrent writers win every attempt.
        """
        compiled = self._check_with_lists(document)
        text = _write_document(compiled, self.streams)
        status = self.choose_status(status)
        return self._publish(compiled.spec.rule_id, lambda _: (status, text), author, comment)

    def choose_status(self, status: str) -> str:
        """Returns the status for publishing a new document: with a gate, draft instead of active."""
        return "draft" if self.has_gate and status == "active" else status

    def publish_approved(self, row: RuleRow, *, author: str, approver: str, evidence: str, comment: str = "") -> int:
        """Publishes a row's document as the active version.

        `author` wrote the document; `approver` activated it, and is empty if that was the author. `evidence` is JSON
        from the gate's `write_evidence`.
        """
        text = json.dumps(row.document, ensure_ascii=False, default=_to_json_value)
        approval = _Approval(approver or None, evidence)
        return self._publish(row.rule_id, lambda _: ("active", text), author, comment, lambda _: approval)

    def set_status(self, rule_id: str, status: str, *, author: str = "", comment: str = "") -> int:
        """Publishes a version with another status. Raises RuleError for an unknown rule.

        It has the document of the active or paused version, else of the one in shadow, else of the last draft, even if
        another process publishes at the same time. Rows that never came into force, such as an unreadable row written
        by hand, are skipped.
        """

        def make_row(rows: list[Row]) -> tuple[str, str]:
            current, document = self._require_current(rule_id, rows)
            if self.has_gate and status == "active" and not is_proven(document, current.evidence):
                message = (
                    f"the settings have a gate, and version {current.version} has no evidence of meeting it; use "
                    f"`lookback rules activate {rule_id}`"
                )
                raise RuleError(rule_id, [Problem("status", message)])
            return status, json.dumps(document, ensure_ascii=False)

        def carry_on(rows: list[Row]) -> _Approval:
            current, _ = self._require_current(rule_id, rows)
            # The document is the same, so its evidence stays valid; only a retired rule must meet the gate again.
            if not (current.status in ("active", "paused") and status in ("active", "paused")):
                return _Approval()
            approval = _Approval(current.approved_by, current.evidence)
            if status == "active" and is_same_person(author or self.tables.current_user, current.approved_by):
                # The approver may resume the rule, which keeps its original author.
                return approval._replace(author=_find_document_author(rows, current.evidence))
            return approval

        return self._publish(rule_id, make_row, author, comment, carry_on)

    def set_parameters(
        self, rule_id: str, changes: Mapping[str, object], *, author: str = "", comment: str = ""
    ) -> int:
        """Publishes a version with new parameter values. Document and status are those that `set_status` takes.

        `changes` has the new values by parameter; a text is parsed as the parameter's type. The document's tests keep
        their meaning: parameters that a test does not set get the previous values. A quarantined rule becomes active
        again. Raises RuleError for an unknown rule, parameter or value, for a retired rule, and if the new document
        fails its check.
        """

        def make_row(rows: list[Row]) -> tuple[str, str]:
            current, document = self._require_current(rule_id, rows)
            if current.status == "retired":
                message = "is retired; publish its document again with `lookback rules push`"
                raise RuleError(rule_id, [Problem("status", message)])
            rule, problems = read_rule(document)
            values, wrong = Parameters(rule.parameters).change(changes)
            if problems or wrong:
                raise RuleError(rule_id, problems or wrong)
            document["parameters"] = values
            if rule.tests:
                document["tests"] = [
                    {**test, "parameters": {**rule.parameters, **test.get("parameters", {})}} for test in rule.tests
                ]
            status = self.choose_status("active" if current.status == "quarantined" else current.status)
            return status, _write_document(self._check_with_lists(document), self.streams)

        return self._publish(rule_id, make_row, author, comment)

    def quarantine(self, quarantine: Quarantine) -> bool:
        """Publishes a version that takes the failing version out of service. Returns whether it published one.

        It publishes none if that was done already, or if the author has since published a version with the same role.
        """
        rule_id, evidence = quarantine.rule_id, write_quarantined(quarantine.version)
        for _ in self._attempt(rule_id, 3):
            rows = self._read_rows(rule_id)
            document = self._find_failing_document(quarantine, rows)
            if document is None:
                return False
            version = max(_count_next_version(rows), quarantine.version + 1)
            new = _NewRow(rule_id, version, "quarantined", document, AUTHOR, quarantine.comment, evidence)
            if self._insert(rows, new):
                return True
        raise AssertionError  # the attempts end with an error

    def command(self, action: str, stream: str, *, time: object = None, author: str = "", comment: str = "") -> None:
        """Publishes a command; `action` is clear_state, retire_all, or advance, which moves the watermark to `time`.

        Raises RuleError for an unknown command, stream or time.
        """
        if action not in COMMANDS:
            raise RuleError("*", [Problem("status", f"must be one of {', '.join(COMMANDS)}, got {action!r}")])
        if stream not in self.streams:
            known = ", ".join(sorted(self.streams))
            raise RuleError("*", [Problem("stream", f"unknown stream {stream!r}; known are {known}")])
        document: dict[str, Any] = {"stream": stream}
        if action == "advance":
            try:
                document["time"] = to_text(to_utc(parse_calendar_time(time)))
            except ValueError:
                raise RuleError(
                    "*", [Problem("time", f"must be a time such as '2026-01-31T12:00:00Z', got {time!r:.100}")]
                ) from None
        self._append(_NewRow("*", None, action, json.dumps(document), author, comment))

    def announce_lists(self, stream: str, commits: Mapping[int, str]) -> None:
        """Publishes the command that makes a stream apply commits of the table `lists`.

        `commits` describes, for the log, what each commit changed.
        """
        rows = [
            _NewRow("*", commit, LISTS, json.dumps({"stream": stream, "commit": commit, "message": text}), AUTHOR, "")
            for commit, text in sorted(commits.items())
        ]
        self._append(*rows)

    def publish_piece(self, stream: str, piece: Piece) -> None:
        """Publishes a row that refers to a piece of history, for a version that is warming up."""
        row = _NewRow("*", None, WARM, piece.to_document(stream), AUTHOR, "")
        self._append(row)

    def cold_measures(self, document: Mapping[str, Any] | Rule) -> list[str]:
        """Returns the measures that will start empty and take over a day to fill, as no rule keeps their rows yet.

        A sequence, which has no measures, is listed as `sequence`. For a session, which has no length, its gap counts.
        The list is empty if the stream has no events yet, when no rows can be kept.
        """
        compiled = self.check(document)
        spans = {span: state for span, state in _find_spans(compiled).items() if span.reach > _DAY_US}
        tables, stream = self.tables.holding(*self.streams.values()), compiled.spec.stream
        if not spans or not tables.exists(stream) or tables.is_unwritten(stream) or tables.read(stream).isEmpty():
            return []
        kept: set[str] = set()
        for row in self.rows():
            if row.status in WITH_STATE and row.document and row.document.get("stream") == stream:
                # A row written by hand may not be a valid rule.
                with contextlib.suppress(RuleError):
                    kept |= set(_find_spans(compile_rule(row.document, self.streams[stream])).values())
        return [span.name for span, state in spans.items() if state not in kept]

    def describe_history(self, document: Mapping[str, Any] | Rule) -> str:
        """Says how windows without kept rows are filled: from the table and how long that takes, or not at all."""
        from lookback.core.engine.warming import find_reach, find_reason_cold

        compiled = self.check(document)
        if (reason := find_reason_cold(compiled)) is not None:
            return f"{reason}, so window_complete is false until the longest window has filled"
        tables, time_ = self.tables.holding(*self.streams.values()), self.streams[compiled.spec.stream].event_time
        rows, reach = tables.read(compiled.spec.stream), find_reach(compiled)
        if reach is not None:
            ((newest,),) = rows.agg(F.max(F.unix_micros(time_))).collect()
            rows = rows.where(F.unix_micros(time_) >= newest - reach)
        ((count, first),) = rows.agg(F.count("*"), F.min(F.unix_micros(time_))).collect()
        seconds = round(_MIN_SECONDS + count / (_EVENTS_PER_SECOND if reach is not None else _ORDERED_PER_SECOND))
        return (
            f"the running stream reads the {count:,} events since {to_text(to_utc(first))} from the table, "
            f"in about {seconds:,} s, and until then the version before it stays in force"
        )

    def rows(self, without: Container[tuple[str, int | None]] = ()) -> list[RuleRow]:
        """Returns the current versions of all rules, by rule_id, without commands and rows without an id.

        The current versions of a rule are the last one that is active, paused, retired or quarantined, the one in
        shadow, and a draft that is later than both. An unreadable row counts only if the rule has no other row.
        `without` excludes versions by rule_id and number.
        """
        rows = self._read_versions()
        return _list_by_role(_list_sound(row for row in rows if (row["rule_id"], row["version"]) not in without))

    def list_rows(self) -> list[RuleRow]:
        """Returns the current versions, and later ones that are not (yet) in force with status rejected or warming."""
        has_log = self.tables.exists("rule_log")
        shown = dict.fromkeys(find_warming(self.tables), WARMING) if has_log else {}
        shown |= dict.fromkeys(find_rejected(self.tables), REJECTED) if has_log else {}

        def show(row: Row) -> Row:
            status = shown.get((row["rule_id"], row["version"]))
            return row if status is None or row["status"] == "draft" else Row(**{**row.asDict(), "status": status})

        return _list_by_role(map(show, self._read_versions()))

    def _read_versions(self) -> list[Row]:
        """Reads all versions of rules, without commands and rows without an id."""
        rows = self._show_refused_as_drafts(self.tables.query("rules", lambda rows: rows.select(*RULES.names)))
        return [row for row in rows if row["rule_id"] not in (None, "*")]

    def read_versions(self, rule_id: str) -> list[RuleRow]:
        """Returns all versions of a rule, including those that are no longer current."""
        return [_make_rule_row(row) for row in self._read_rows(rule_id)]

    def find_version(self, rule_id: str) -> RuleRow:
        """Returns the version that a rule's id alone refers to: the last active one, else the last.

        Raises RuleError if the rule is unknown, or its document cannot be read.
        """
        rows = _list_sound(self._read_rows(rule_id)) if self.tables.exists("rules") else []
        last = _find_last(row for row in rows if row["status"] == "active") or _find_last(rows)
        if last is None or last.document is None:
            raise RuleError(rule_id, [Problem("rule_id", "not a rule in the table, and not a file")])
        return last

    def find_document(self, rule_id: str, version: int) -> dict[str, Any]:
        """Returns the document of a version. Raises RuleError if the version is unknown or unreadable."""
        rows = self.read_versions(rule_id)
        for row in rows:
            if row.version == version and row.document is not None:
                return row.document
        known = ", ".join(str(row.version) for row in sorted(rows, key=lambda row: row.version)) or "none"
        raise RuleError(rule_id, [Problem("version", f"version {version} is not in the table; known are {known}")])

    def next_version(self, rule_id: str) -> int:
        """Returns the number that the next published version of a rule will have."""
        rows = self._read_rows(rule_id) if self.tables.exists("rules") else []
        return _count_next_version(rows)

    def export(self, rule_id: str | None = None) -> list[dict[str, Any]]:
        """Returns the documents of all rules that are not retired, or of the rule `rule_id`.

        If a rule has a version in shadow too, the active one's document is returned. Raises RuleError for an unknown
        rule.
        """
        by_rule: dict[str, list[RuleRow]] = {}
        for row in self.rows():
            if rule_id in (None, row.rule_id):
                by_rule.setdefault(row.rule_id, []).append(row)
        if rule_id is not None and not by_rule:
            raise RuleError(rule_id, [Problem("rule_id", "not a rule in the table")])
        rows = [next((row for row in rows if row.status != "retired"), rows[0]) for rows in by_rule.values()]
        return [row.document for row in rows if row.document and (rule_id is not None or row.status != "retired")]

    def list_obeyed(self, rule_id: str) -> list[RuleRow]:
        """Returns the current versions of a rule, as `rows` does, without those that its stream rejected."""
        return _list_by_role(self._keep_obeyed(rule_id, self._read_rows(rule_id)))

    def _keep_obeyed(self, rule_id: str, rows: Sequence[Row]) -> Sequence[Row]:
        """Drops the rows of a rule that its stream has rejected or will reject; keeps all of them if none is left."""
        rejected = find_rejected(self.tables, rule_id=rule_id) if self.tables.exists("rule_log") else set()
        # Versions that the gate rejected have status draft here.
        sound = _list_sound(rows)
        kept = [each for each in sound if each["status"] == "draft" or (rule_id, each["version"]) not in rejected]
        return [row for row in kept if _find_stream(row, self.streams) is not None] or kept or rows

    def _require_current(self, rule_id: str, rows: Sequence[Row]) -> tuple[RuleRow, dict[str, Any]]:
        """Returns the row that a command on a rule applies to, and a copy of its document. Raises RuleError."""
        found = find_roles(self._keep_obeyed(rule_id, rows)).current
        row = None if found is None else _make_rule_row(found)
        if row is None or row.document is None:
            known = ", ".join(dict.fromkeys(row.rule_id for row in self.rows())) or "none"
            raise RuleError(rule_id, [Problem("rule_id", f"not a rule in the table; known are {known}")])
        return row, dict(row.document)

    def _publish(
        self, rule_id: str, make_row: Callable[[list[Row]], tuple[str, str]], author: str, comment: str,
        approve: Callable[[list[Row]], _Approval] | None = None,
    ) -> int:  # fmt: skip
        """Publishes the version after the last one.

        `make_row` gets all rows of the rule and returns the new status and document; `approve` returns the approval.
        """
        for _ in self._attempt(rule_id):
            rows = self._read_rows(rule_id)
            version = _count_next_version(rows)
            if version >= MAX_VERSION:
                raise RuleError(
                    rule_id,
                    [Problem("version", f"the table has version {version - 1:,}, the maximum; delete that row")],
                )
            status, document = make_row(rows)
            approval = _Approval() if approve is None else approve(rows)
            if status not in STATUSES:
                raise RuleError(rule_id, [Problem("status", f"must be one of {', '.join(STATUSES)}, got {status!r}")])
            new = _NewRow(rule_id, version, status, document, author, comment, approval.evidence, approval.approved_by)
            if approval.author:
                resumed = f"resumed by {author or self.tables.current_user}"
                new = replace(new, author=approval.author, comment=f"{comment}; {resumed}" if comment else resumed)
            if self._insert(rows, new):
                return version
        raise AssertionError  # the attempts end with an error

    def _attempt(self, rule_id: str, attempts: int = _MAX_ATTEMPTS) -> Iterator[int]:
        """Yields the number of each attempt to publish, with pauses. Raises SetupError after the last."""
        for attempt in range(attempts):
            if attempt:
                time.sleep(random.uniform(0.5, 1.0) * min(0.1 * 2**attempt, _MAX_PAUSE_SECONDS))  # noqa: S311
            yield attempt
        last = _find_last(self._read_rows(rule_id))
        who = "" if last is None else f"; the last version, {last.version}, is by {last.author or 'an unknown author'}"
        raise SetupError(
            f"rule {rule_id!r} was not published: other writers changed {self.tables.identifier('rules')} during each "
            f"of {attempts} attempts{who}. Look at `lookback rules list` and publish again"
        )

    def _read_rows(self, rule_id: str) -> list[Row]:
        return self._show_refused_as_drafts(
            self.tables.query("rules", lambda rows: rows.where(F.col("rule_id") == rule_id))
        )

    def _show_refused_as_drafts(self, rows: list[Row]) -> list[Row]:
        """Changes the status of active rows that the stream rejected because of the gate to draft."""
        if not self.has_gate or not any(_is_objectionable(row) for row in rows) or not self.tables.exists("rule_log"):
            return rows
        is_refused = (F.col("action") == "rejected") & (F.col("decision") == REFUSAL)
        last = F.max_by(is_refused, F.struct("logged_at", "position")).alias("is_refused")
        own = self.tables.read("rule_log").where(is_refused | (F.col("action") == "activated"))
        found = own.groupBy("rule_id", "version").agg(last).where("is_refused").collect()
        refused = {(row["rule_id"], row["version"]) for row in found}
        return [
            Row(**{**row.asDict(), "status": "draft"})
            if (row["rule_id"], row["version"]) in refused and _is_objectionable(row) else row
            for row in rows
        ]  # fmt: skip

    def _insert(self, rows: list[Row], new: _NewRow) -> bool:
        """Appends a version if the rule still has these rows. Returns False if another process has written since."""
        try:
            self._insert_by_query(rows, new)
        except SPARK_ERRORS as error:
            if _CONFLICT not in str(error) and not is_conflict(error):
                raise
            return False
        return True

    def _insert_by_query(self, rows: list[Row], new: _NewRow) -> None:
        """Inserts with a single query that reads and writes, so that Delta detects conflicts with all other writers."""
        highest = max((row["version"] or 0 for row in rows), default=0)
        current = self.tables.read("rules").where(F.col("rule_id") == new.rule_id)
        counts = current.agg(F.count("*").alias("count"), F.coalesce(F.max("version"), F.lit(0)).alias("highest"))
        is_same = (F.col("count") == len(rows)) & (F.col("highest") == highest)
        values = {name: F.lit(value) for name, value in self._complete(new).items()}
        values["version"] = F.when(is_same, values["version"]).otherwise(F.raise_error(F.lit(_CONFLICT)).cast("bigint"))
        fields = [field for field in RULES if field.name in current.columns]
        row = counts.select(*(values[field.name].cast(field.dataType).alias(field.name) for field in fields))
        self.tables.append(row, "rules")

    def _find_failing_document(self, quarantine: Quarantine, rows: list[Row]) -> str | None:
        """Returns the document of the failing version; None if it has no row or a later version has its role."""
        rule_id, version = quarantine.rule_id, quarantine.version
        failing = [row for row in rows if row["version"] == version] or [row for row in rows if row["version"] is None]
        for row in failing:
            stream = _find_stream(row, self.streams)
            if stream is None:
                continue
            status = SHADOW if row["status"] == SHADOW else "active"
            entry = Entry(rule_id, version, status, str(row["document"]), stream.name, version)
            book = RuleBook(stream, self.streams, {rule_id: entry})
            later = [row for row in rows if row["version"] is not None and row["version"] > version]
            columns = ("rule_id", "version", "status", "document", "evidence")
            book.apply((RuleChange("insert", 0, *(each[name] for name in columns)) for each in later), None)
            return str(row["document"]) if (rule_id, version) in book.list_versions() else None
        return None

    def _append(self, *rows: _NewRow) -> None:
        frame = self.tables.spark.createDataFrame([self._complete(row) for row in rows], RULES).coalesce(1)
        existing = self.tables.read("rules").columns
        self.tables.append(frame.select(*(name for name in RULES.names if name in existing)), "rules")

    def _complete(self, new: _NewRow) -> dict[str, Any]:
        """Returns the columns of a new row, with the time and, by default, the current user as author."""
        author = new.author or self.tables.current_user
        columns = {**asdict(new), "author": author, "changed_at": dt.datetime.now(dt.timezone.utc)}
        return {name: columns[name] for name in RULES.names}


def _write_document(compiled: CompiledRule, streams: Mapping[str, Stream]) -> str:
    """Formats a rule's document for the table. Raises RuleError if it is too long."""
    rule = compiled.spec
    text = json.dumps(dict(rule.document), ensure_ascii=False, default=_to_json_value)
    limits = streams[rule.stream].limits
    if len(text.encode()) > limits.document_bytes:
        raise RuleError(rule.rule_id, [Problem("document", describe_size_limit(limits))])
    return text


def _count_next_version(rows: Sequence[Row]) -> int:
    # A row without a version took the next number when it was written. Versions beyond the maximum are rejected.
    numbers = (row["version"] or 0 for row in rows if (row["version"] or 0) < MAX_VERSION)
    return max([0, *numbers]) + 1 + sum(row["version"] is None for row in rows)


def _list_sound(rows: Iterable[Row]) -> list[Row]:
    """Lists the sound rows of each rule, or all its rows if none is sound."""
    rows = list(rows)
    sound = [row for row in rows if _is_sound(row)]
    known = {row["rule_id"] for row in sound}
    return sound + [row for row in rows if row["rule_id"] not in known]


def _is_sound(row: Row) -> bool:
    """Returns whether a row can be a version of a rule, as far as can be checked without its stream."""
    if row["status"] not in STATUSES or not 0 <= (row["version"] or 0) < MAX_VERSION:
        return False
    try:
        document = read_document(row["document"], WIDEST_LIMITS)
    except LookbackError:
        return False
    return document.get("rule_id") == row["rule_id"] and isinstance(document.get("stream"), str)


def _is_objectionable(row: Row) -> bool:
    """Returns whether an enforced gate would reject an active row."""
    if row["status"] != "active":
        return False
    try:
        document = read_document(row["document"])
    except LookbackError:
        return False
    return bool(find_objection(document, row["author"], row["approved_by"], row["evidence"]))


def find_rejected(tables: Tables, stream: str | None = None, rule_id: str | None = None) -> set[tuple[str, int]]:
    """Finds the versions, by rule_id and number, that a stream rejected and no stream applied; they are not in force.

    `stream` and `rule_id` restrict the search to one stream or rule.
    """
    rows = tables.ask("rejected_versions", stream=stream, rule_id=rule_id).collect()
    return {(row["rule_id"], row["version"]) for row in rows}


def find_warming(tables: Tables, stream: str | None = None) -> dict[tuple[str, int], dt.datetime]:
    """Finds the versions, by rule_id and number, that wait for the history of their windows, and since when.

    `stream` restricts the search to one stream. Versions that a later one has replaced may be included.
    """
    is_own = F.lit(True) if stream is None else F.col("stream") == stream
    has_ended = F.bool_or(F.col("action").isin(*(action for action in ACTIONS.values() if action != ACTIONS["draft"])))
    begun = F.min(F.when(F.col("action") == WARMING, F.col("logged_at")))

    def select(rows: DataFrame) -> DataFrame:
        own = rows.where(is_own & F.col("rule_id").isNotNull() & F.col("version").isNotNull())
        found = own.groupBy("rule_id", "version").agg(begun.alias("since"), has_ended.alias("has_ended"))
        return found.where(F.col("since").isNotNull() & ~F.coalesce("has_ended", F.lit(False)))

    return {(row["rule_id"], row["version"]): row["since"] for row in tables.query("rule_log", select)}


def _list_by_role(rows: Iterable[Row]) -> list[RuleRow]:
    """Lists the current rows by rule_id (see `find_roles`)."""
    by_rule: dict[str, list[Row]] = {}
    for row in rows:
        by_rule.setdefault(row["rule_id"], []).append(row)
    return [_make_rule_row(row) for _, own in sorted(by_rule.items()) for row in find_roles(own).listed]


def _find_document_author(rows: list[Row], evidence: str | None) -> str:
    """Finds the author in the first row that became active with this evidence; empty if there is none."""
    proven = [row for row in rows if row["status"] == "active" and row["evidence"] == evidence]
    return next((row["author"] or "" for row in sorted(proven, key=lambda row: row["version"] or 0)), "")


def _find_last(rows: Iterable[Row]) -> RuleRow | None:
    """Finds the row with the highest version; on a tie the last row."""
    last: Row | None = None
    for row in rows:
        if last is None or (row["version"] or 0) >= (last["version"] or 0):
            last = row
    return None if last is None else _make_rule_row(last)


def _find_stream(row: Row, streams: Mapping[str, Stream]) -> Stream | None:
    """Finds the stream of a row; None if the row is not a valid rule."""
    with contextlib.suppress(LookbackError):
        document = read_document(row["document"], WIDEST_LIMITS)
        stream = streams.get(str(document.get("stream")))
        # A rule in force stays valid even if the limits of its stream were lowered.
        if stream and compile_rule(document, replace(stream, limits=WIDEST_LIMITS)).spec.rule_id == row["rule_id"]:
            return stream
    return None


def _find_spans(rule: CompiledRule) -> dict[_Span, str]:
    """Maps the spans of a rule to the names of the states that keep their rows."""
    if rule.sequence is not None:
        return {_Span("sequence", rule.sequence.within): rule.store}
    return {
        _Span(measure.name, _find_reach(measure.window)): f"{rule.store}{measure.feature.feature_id}"
        for measure in rule.measures
    }


def _find_reach(window: Window) -> int:
    if isinstance(window, Session):
        return window.gap
    return window.size + window.delay if isinstance(window, Lookback) else window.size


def _make_rule_row(row: Row) -> RuleRow:
    try:
        document = read_document(row["document"])
    except LookbackError:
        document = None
    return RuleRow(
        row["rule_id"],
        row["version"] or 0,
        row["status"],
        document,
        row["author"],
        row["comment"],
        row["changed_at"],
        row["approved_by"],
        row["evidence"],
    )


def _to_json_value(value: object) -> str:
    if isinstance(value, (dt.datetime, dt.date)):
        return value.isoformat()
    raise TypeError(f"{value!r} is not allowed in a rule document; write it as text")
