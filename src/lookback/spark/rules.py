"""Publishes rules and commands: appends versions to the rules table and never rewrites one."""

from __future__ import annotations

import datetime as dt
import json
import random
import time
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.sql import Row

from lookback.core.errors import Problem, RuleError, SetupError
from lookback.core.rules.changes import MAX_VERSION
from lookback.core.rules.commands import COMMANDS, LISTS
from lookback.core.rules.compiled import CompiledRule
from lookback.core.rules.document import STATUSES, Rule, describe_size_limit, read_rule
from lookback.core.rules.gate import REFUSAL, is_proven, is_same_person
from lookback.core.rules.memberships import find_unknown_lists
from lookback.core.rules.parameters import Parameters
from lookback.core.rules.quarantine import AUTHOR, Quarantine
from lookback.core.rules.roles import REJECTED, WARMING, find_roles, write_quarantined
from lookback.core.rules.versions import WARM, Piece
from lookback.core.streams.declaration import Stream
from lookback.core.values.columns import to_text
from lookback.core.values.times import parse_calendar_time, to_utc
from lookback.spark.lists import list_names
from lookback.spark.rulerows import (
    RuleRow,
    count_next_version,
    find_document_author,
    find_failing_document,
    find_last,
    find_rejected,
    find_stream,
    find_warming,
    is_objectionable,
    list_by_role,
    list_sound,
    make_rule_row,
)
from lookback.spark.tables.conflicts import SPARK_ERRORS, is_conflict
from lookback.spark.tables.schemas import RULES

if TYPE_CHECKING:
    from lookback.spark.tables.lakehouse import Tables


_MAX_ATTEMPTS = 20
_MAX_PAUSE_SECONDS = 3.0
_CONFLICT = "the rule has a new version since it was read"


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


# The status, the document and the approval of a rule's next version, which are made from all rows of the rule.
_Next = tuple[str, str, _Approval]
_MakeRow = Callable[[list[Row]], _Next]


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

    def _require_lists(self, rules: Sequence[CompiledRule]) -> None:
        """Raises RuleError if a list of a rule does not exist."""
        names = list_names(self.tables) if any(rule.lists for rule in rules) else []
        for rule in rules:
            if rule.lists and (problems := find_unknown_lists(rule, names)):
                raise RuleError(rule.spec.rule_id, problems)

    def push(
        self, document: Mapping[str, Any] | Rule, *, status: str = "active", author: str = "", comment: str = ""
    ) -> int:
        """Publishes the next version of a rule and returns its number.

        If two processes publish at once, both versions are written, one after the other. Raises RuleError, with nothing
        written, if the rule is invalid, and SetupError if concurrent writers win every attempt.
        """
        ((_, version),) = self.push_all([document], status=status, author=author, comment=comment)
        return version

    def push_all(
        self,
        documents: Iterable[Mapping[str, Any] | Rule],
        *,
        status: str = "active",
        author: str = "",
        comment: str = "",
    ) -> list[tuple[str, int]]:
        """Publishes the next versions of rules in one commit; a rule that is there twice gets its later one in another.

        Args:
            documents: The rules.
            status: The status of all versions; with a gate, draft instead of active.
            author: Default: the current user.
            comment: The comment of all versions.

        Returns:
            The rule_id and the version of each document, in order.

        Raises:
            RuleError: If a rule is invalid. Nothing is written then.
            SetupError: If concurrent writers win every attempt.
        """
        return self.push_checked(list(map(self.check, documents)), status=status, author=author, comment=comment)

    def push_checked(
        self, rules: Sequence[CompiledRule], *, status: str = "active", author: str = "", comment: str = ""
    ) -> list[tuple[str, int]]:
        """Publishes rules that `check` has returned; see `push_all`, which checks them first."""
        self._require_lists(rules)
        status, left = self.choose_status(status), rules
        published: list[tuple[str, int]] = []
        while left:
            # What comes before the first rule that is there again.
            texts: dict[str, str] = {}
            for rule in left:
                if rule.spec.rule_id in texts:
                    break
                texts[rule.spec.rule_id] = _write_document(rule, self.streams)
            makers = {rule_id: partial(_make_row, status, text) for rule_id, text in texts.items()}
            published += self._publish_all(makers, author, comment).items()
            left = left[len(texts) :]
        return published

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
        return self._publish(row.rule_id, lambda _: ("active", text, approval), author, comment)

    def set_status(self, rule_id: str, status: str, *, author: str = "", comment: str = "") -> int:
        """Publishes a version with another status. Raises RuleError for an unknown rule.

        It has the document of the active or paused version, else of the one in shadow, else of the last draft, even if
        another process publishes at the same time. Rows that never came into force, such as an unreadable row written
        by hand, are skipped.
        """

        def make_row(rows: list[Row]) -> _Next:
            current, document = self._require_current(rule_id, rows)
            if self.has_gate and status == "active" and not is_proven(document, current.evidence):
                message = (
                    f"the settings have a gate, and version {current.version} has no evidence of meeting it; use "
                    f"`lookback rules activate {rule_id}`"
                )
                raise RuleError(rule_id, [Problem("status", message)])
            text, approval = json.dumps(document, ensure_ascii=False), _Approval()
            # The document is the same, so its evidence stays valid; only a retired rule must meet the gate again.
            if current.status in ("active", "paused") and status in ("active", "paused"):
                approval = _Approval(current.approved_by, current.evidence)
                if status == "active" and is_same_person(author or self.tables.current_user, current.approved_by):
                    # The approver may resume the rule, which keeps its original author.
                    approval = approval._replace(author=find_document_author(rows, current.evidence))
            return status, text, approval

        return self._publish(rule_id, make_row, author, comment)

    def set_parameters(
        self, rule_id: str, changes: Mapping[str, object], *, author: str = "", comment: str = ""
    ) -> int:
        """Publishes a version with new parameter values. Document and status are those that `set_status` takes.

        `changes` has the new values by parameter; a text is parsed as the parameter's type. The document's tests keep
        their meaning: parameters that a test does not set get the previous values. A quarantined rule becomes active
        again. Raises RuleError for an unknown rule, parameter or value, for a retired rule, and if the new document
        fails its check.
        """

        def make_row(rows: list[Row]) -> _Next:
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
            compiled = self.check(document)
            self._require_lists([compiled])
            return status, _write_document(compiled, self.streams), _Approval()

        return self._publish(rule_id, make_row, author, comment)

    def quarantine(self, quarantine: Quarantine) -> bool:
        """Publishes a version that takes the failing version out of service. Returns whether it published one.

        It publishes none if that was done already, or if the author has since published a version with the same role.
        """
        rule_id, evidence = quarantine.rule_id, write_quarantined(quarantine.version)
        for _ in self._attempt(rule_id, attempts=3):
            rows = self._read_rows(rule_id)
            document = find_failing_document(quarantine, rows, self.streams)
            if document is None:
                return False
            version = max(count_next_version(rows), quarantine.version + 1)
            new = _NewRow(rule_id, version, "quarantined", document, AUTHOR, quarantine.comment, evidence)
            if self._insert({rule_id: rows}, [new]):
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

    def rows(self, without: Container[tuple[str, int | None]] = ()) -> list[RuleRow]:
        """Returns the current versions of all rules, by rule_id, without commands and rows without an id.

        The current versions of a rule are the last one that is active, paused, retired or quarantined, the one in
        shadow, and a draft that is later than both. An unreadable row counts only if the rule has no other row.
        `without` excludes versions by rule_id and number.
        """
        rows = self._read_versions()
        return list_by_role(list_sound(row for row in rows if (row["rule_id"], row["version"]) not in without))

    def list_rows(self) -> list[RuleRow]:
        """Returns the current versions, and later ones that are not (yet) in force with status rejected or warming."""
        has_log = self.tables.exists("rule_log")
        shown = dict.fromkeys(find_warming(self.tables), WARMING) if has_log else {}
        shown |= dict.fromkeys(find_rejected(self.tables), REJECTED) if has_log else {}

        def show(row: Row) -> Row:
            status = shown.get((row["rule_id"], row["version"]))
            return row if status is None or row["status"] == "draft" else Row(**{**row.asDict(), "status": status})

        return list_by_role(map(show, self._read_versions()))

    def _read_versions(self) -> list[Row]:
        """Reads all versions of rules, without commands and rows without an id."""
        return [row for row in self._read_rows() if row["rule_id"] not in (None, "*")]

    def read_versions(self, rule_id: str) -> list[RuleRow]:
        """Returns all versions of a rule, including those that are no longer current."""
        return [make_rule_row(row) for row in self._read_rows(rule_id)]

    def find_version(self, rule_id: str) -> RuleRow:
        """Returns the version that a rule's id alone refers to: the last active one, else the last.

        Raises RuleError if the rule is unknown, or its document cannot be read.
        """
        rows = list_sound(self._read_rows(rule_id)) if self.tables.exists("rules") else []
        last = find_last(row for row in rows if row["status"] == "active") or find_last(rows)
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
        return count_next_version(rows)

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
        return list_by_role(self._keep_obeyed(rule_id, self._read_rows(rule_id)))

    def _keep_obeyed(self, rule_id: str, rows: Sequence[Row]) -> Sequence[Row]:
        """Drops the rows of a rule that its stream has rejected or will reject; keeps all of them if none is left."""
        rejected = find_rejected(self.tables, rule_id=rule_id) if self.tables.exists("rule_log") else set()
        # Versions that the gate rejected have status draft here.
        sound = list_sound(rows)
        kept = [each for each in sound if each["status"] == "draft" or (rule_id, each["version"]) not in rejected]
        return [row for row in kept if find_stream(row, self.streams) is not None] or kept or rows

    def _require_current(self, rule_id: str, rows: Sequence[Row]) -> tuple[RuleRow, dict[str, Any]]:
        """Returns the row that a command on a rule applies to, and a copy of its document. Raises RuleError."""
        found = find_roles(self._keep_obeyed(rule_id, rows)).current
        row = None if found is None else make_rule_row(found)
        if row is None or row.document is None:
            known = ", ".join(dict.fromkeys(row.rule_id for row in self.rows())) or "none"
            raise RuleError(rule_id, [Problem("rule_id", f"not a rule in the table; known are {known}")])
        return row, dict(row.document)

    def _publish(self, rule_id: str, make_row: _MakeRow, author: str, comment: str) -> int:
        return self._publish_all({rule_id: make_row}, author, comment)[rule_id]

    def _publish_all(self, makers: Mapping[str, _MakeRow], author: str, comment: str) -> dict[str, int]:
        """Publishes the version after the last one of each rule, in one commit. Returns their numbers."""
        author = author or self.tables.current_user
        for _ in self._attempt(*makers):
            rows = self._read_rows_of(makers)
            news = [self._make_version(each, rows[each], makers[each], author, comment) for each in makers]
            if self._insert(rows, news):
                return {new.rule_id: new.version or 0 for new in news}
        raise AssertionError  # the attempts end with an error

    def _make_version(self, rule_id: str, rows: list[Row], make_row: _MakeRow, author: str, comment: str) -> _NewRow:
        version = count_next_version(rows)
        if version >= MAX_VERSION:
            message = f"the table has version {version - 1:,}, the maximum; delete that row"
            raise RuleError(rule_id, [Problem("version", message)])
        status, document, approval = make_row(rows)
        if status not in STATUSES:
            raise RuleError(rule_id, [Problem("status", f"must be one of {', '.join(STATUSES)}, got {status!r}")])
        new = _NewRow(rule_id, version, status, document, author, comment, approval.evidence, approval.approved_by)
        if approval.author:
            resumed = f"resumed by {author}"
            new = replace(new, author=approval.author, comment=f"{comment}; {resumed}" if comment else resumed)
        return new

    def _attempt(self, *rule_ids: str, attempts: int = _MAX_ATTEMPTS) -> Iterator[int]:
        """Yields the number of each attempt to publish, with pauses. Raises SetupError after the last."""
        for attempt in range(attempts):
            if attempt:
                time.sleep(random.uniform(0.5, 1.0) * min(0.1 * 2**attempt, _MAX_PAUSE_SECONDS))  # noqa: S311
            yield attempt
        rule_id = rule_ids[0]
        last = find_last(self._read_rows(rule_id))
        who = "" if last is None else f"; the last version, {last.version}, is by {last.author or 'an unknown author'}"
        others = f", with {len(rule_ids) - 1:,} others," if len(rule_ids) > 1 else ""
        raise SetupError(
            f"rule {rule_id!r}{others} was not published: other writers changed {self.tables.identifier('rules')} during each "
            f"of {attempts} attempts{who}. Look at `lookback rules list` and publish again"
        )

    def _read_rows(self, rule_id: str | None = None) -> list[Row]:
        return self._show_refused_as_drafts(self.tables.ask("rule_rows", rule_id=rule_id).collect())

    def _show_refused_as_drafts(self, rows: list[Row]) -> list[Row]:
        """Changes the status of active rows that the stream rejected because of the gate to draft."""
        if not self.has_gate or not any(is_objectionable(row) for row in rows) or not self.tables.exists("rule_log"):
            return rows
        found = self.tables.ask("refused_versions", refusal=REFUSAL).collect()
        refused = {(row["rule_id"], row["version"]) for row in found}

        def show(row: Row) -> Row:
            is_refused = (row["rule_id"], row["version"]) in refused and is_objectionable(row)
            return Row(**{**row.asDict(), "status": "draft"}) if is_refused else row

        return [show(row) for row in rows]

    def _read_rows_of(self, rule_ids: Collection[str]) -> dict[str, list[Row]]:
        """Reads the rows of rules, by rule_id."""
        found: dict[str, list[Row]] = {rule_id: [] for rule_id in rule_ids}
        for row in self._read_rows(next(iter(rule_ids)) if len(rule_ids) == 1 else None):
            if row["rule_id"] in found:
                found[row["rule_id"]].append(row)
        return found

    def _insert(self, rows: Mapping[str, list[Row]], news: Sequence[_NewRow]) -> bool:
        """Appends a version of each rule if all still have these rows. Returns False if another process has written.

        A single query reads and writes, so that Delta detects conflicts with all other writers.
        """
        expected = [
            (len(rows[new.rule_id]), max((row["version"] or 0 for row in rows[new.rule_id]), default=0)) for new in news
        ]
        types = {field.name: field.dataType.simpleString() for field in RULES} | {"rows": "bigint", "highest": "bigint"}
        values = [(*self._complete(new).values(), *each) for new, each in zip(news, expected, strict=True)]
        # A question would not read a table that was never written to, and so miss another first writer.
        frames = {"offered": self.tables.make_rows(values, types), "rules": self.tables.read("rules")}
        try:
            self.tables.append(self.tables.ask("next_versions", frames, conflict=_CONFLICT).coalesce(1), "rules")
        except SPARK_ERRORS as error:
            if _CONFLICT not in str(error) and not is_conflict(error):
                raise
            return False
        return True

    def _append(self, *rows: _NewRow) -> None:
        self.tables.append_rows([self._complete(row) for row in rows], "rules")

    def _complete(self, new: _NewRow) -> dict[str, Any]:
        """Returns the columns of a new row, with the time and, by default, the current user as author."""
        author = new.author or self.tables.current_user
        columns = {**asdict(new), "author": author, "changed_at": dt.datetime.now(dt.timezone.utc)}
        return {name: columns[name] for name in RULES.names}


def _make_row(status: str, document: str, _: list[Row]) -> _Next:
    return status, document, _Approval()


def _write_document(compiled: CompiledRule, streams: Mapping[str, Stream]) -> str:
    """Formats a rule's document for the table. Raises RuleError if it is too long."""
    rule = compiled.spec
    text = json.dumps(dict(rule.document), ensure_ascii=False, default=_to_json_value)
    limits = streams[rule.stream].limits
    if len(text.encode()) > limits.document_bytes:
        raise RuleError(rule.rule_id, [Problem("document", describe_size_limit(limits))])
    return text


def _to_json_value(value: object) -> str:
    if isinstance(value, (dt.datetime, dt.date)):
        return value.isoformat()
    raise TypeError(f"{value!r} is not allowed in a rule document; write it as text")
