"""Which version of which rule is in force: the rules table's changes, applied one after another.

Every shard keeps a whole rulebook of its own and applies the same changes, so all of them agree.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lookback.core.alerts import moment
from lookback.core.columns import text_of
from lookback.core.compiled import CompiledRule, compile_rule
from lookback.core.errors import Problem, RuleError
from lookback.core.rules import RULE_ID, STATUSES, parse_time, read_document
from lookback.core.streams import Stream

EVALUATED = ("active", "shadow")
WITH_STATE = (*EVALUATED, "paused")
ACTIONS = {
    "draft": "drafted",
    "shadow": "shadowed",
    "active": "activated",
    "paused": "paused",
    "retired": "retired",
    "quarantined": "quarantined",
}
COMMANDS = ("clear_state", "retire_all", "advance")


@dataclass(frozen=True)
class RuleChange:
    """A row of the rules table as the change feed brings it. `change`: insert, update (the row after it) or delete."""

    change: str
    commit: int
    rule_id: str | None
    version: int | None
    status: str | None
    document: str | None

    @property
    def order(self) -> tuple[int, int]:
        """Changes apply by (commit version, version); a row without version comes after those with one."""
        return (self.commit, 2**63 if self.version is None else self.version)


@dataclass(frozen=True)
class LogRow:
    """A row of rule_log, less what only the shell knows. arrival: the last commit judged before it; None for none."""

    stream: str
    rule_id: str | None
    version: int | None
    action: str
    message: str
    arrival: int | None


@dataclass(frozen=True)
class Entry:
    """The version in force of one rule. `stream`: where it is evaluated; `highest`: of all versions seen."""

    rule_id: str
    version: int
    status: str
    document: str
    stream: str
    highest: int


@dataclass(frozen=True)
class Command:
    """A command row that concerns this stream. `time`: of an advance, in microseconds."""

    action: str
    time: int | None = None


class Rejected(Exception):
    """A row that is not obeyed; the text goes to the log."""


@dataclass
class RuleBook:
    """The rules in force for `stream`. streams: every declared stream by name, to tell what is a valid rule."""

    stream: Stream
    streams: Mapping[str, Stream]
    entries: dict[str, Entry] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._text: str | None = None
        # The compiled rules are cached by declaration and document, for all books of a process.
        self._declarations = {name: json.dumps(stream.to_dict()) for name, stream in self.streams.items()}

    def apply(self, changes: Iterable[RuleChange], arrival: int | None) -> tuple[list[LogRow], list[Command]]:
        """Applies changes in order. arrival: the last commit judged before them."""
        log: list[LogRow] = []
        commands: list[Command] = []
        for change in sorted(changes, key=lambda change: change.order):
            commands += self._apply(change, arrival, log)
        return log, commands

    def in_force(self, statuses: Iterable[str] = WITH_STATE) -> list[tuple[Entry, CompiledRule]]:
        """The stream's rules of these statuses, by rule_id."""
        wanted = set(statuses)
        chosen = [e for _, e in sorted(self.entries.items()) if e.status in wanted and e.stream == self.stream.name]
        return [(entry, self._compiled(entry.stream, entry.document)) for entry in chosen]

    def to_json(self) -> str:
        """The book as text, for the state store."""
        if self._text is None:
            self._text = json.dumps([vars(entry) for entry in self.entries.values()], separators=(",", ":"))
        return self._text

    def load(self, text: str) -> None:
        """Takes over what `to_json` wrote."""
        self.entries = {row["rule_id"]: Entry(**row) for row in json.loads(text)}
        self._text = text

    def _enter(self, entry: Entry) -> None:
        self.entries[entry.rule_id], self._text = entry, None

    def _compiled(self, stream: str, document: str) -> CompiledRule:
        return _compile_cached(self._declarations[stream], document)

    def _apply(self, change: RuleChange, arrival: int | None, log: list[LogRow]) -> list[Command]:
        def write(action: str, message: str = "", version: int | None = change.version) -> None:
            log.append(LogRow(self.stream.name, change.rule_id, version, action, message, arrival))

        try:
            if change.rule_id == "*":
                return self._command(change, log, arrival)
            if change.change == "delete":
                self._delete(change, write)
            else:
                self._put(change, write)
        except Rejected as reason:
            write("rejected", str(reason))
        except RuleError as error:
            write("rejected", _one_line(error.problems))
        return []

    def _delete(self, change: RuleChange, write: Any) -> None:
        entry = self.entries.get(str(change.rule_id))
        if entry is None or entry.version != change.version or entry.status == "retired":
            return
        self._enter(replace(entry, status="retired"))
        if entry.stream == self.stream.name:
            write("retired", "the row in force was deleted")

    def _put(self, change: RuleChange, write: Any) -> None:
        rule_id = change.rule_id
        if not (isinstance(rule_id, str) and RULE_ID.fullmatch(rule_id)):
            raise Rejected(f"rule_id must be 1 to 100 of a-z, 0-9, '.', '_', '-', got {rule_id!r:.120} (rule_id)")
        entry = self.entries.get(rule_id)
        highest = entry.highest if entry else 0
        version = change.version
        if version is None:
            version = highest + 1
            change = replace(change, version=version)
        if change.change == "update" and entry is not None and version < entry.version:
            return
        _, name = self._document_stream(change)
        concerns_us = name == self.stream.name or (entry is not None and entry.stream == self.stream.name)
        try:
            self._check(change, entry, version, name)
        except (Rejected, RuleError):
            if concerns_us:
                raise
            return
        self._take(change, entry, version, name, max(highest, version), write if concerns_us else _ignore)

    def _check(self, change: RuleChange, entry: Entry | None, version: int, name: str) -> None:
        """Raises where the row cannot come into force."""
        if change.status not in STATUSES:
            raise Rejected(f"status must be one of {', '.join(STATUSES)}, got {change.status!r:.40} (status)")
        if not 0 <= version < 2**63 - 1:
            raise Rejected(f"version must not be negative, got {version} (version)")
        if change.change == "insert" and entry is not None and entry.version >= version:
            raise Rejected(
                f"superseded: version {version} is not above version {entry.version}, which is in force; "
                f"insert version {entry.highest + 1} or NULL (version)"
            )
        compiled = self._compiled(name, str(change.document))
        if compiled.rule.rule_id != change.rule_id:
            raise Rejected(
                f"the document is of rule {compiled.rule.rule_id!r}, the row of {change.rule_id!r}; make them the same (rule_id)"
            )

    def _take(self, change: RuleChange, entry: Entry | None, version: int, name: str, highest: int, write: Any) -> None:
        status, document = str(change.status), str(change.document)
        if status == "draft":
            if entry is not None:
                self._enter(replace(entry, highest=highest))
            write("drafted", version=version)
            return
        if entry is not None and (entry.version, entry.status, entry.document) == (version, status, document):
            return
        self._enter(Entry(str(change.rule_id), version, status, document, name, highest))
        if name == self.stream.name:
            write(ACTIONS[status], version=version)
        elif entry is not None and entry.status != "retired":
            write("retired", f"version {version} is for stream {name!r}", version=version)

    def _document_stream(self, change: RuleChange) -> tuple[dict[str, Any], str]:
        """The row's document and the name of its stream; raises where either cannot be read."""
        document = read_document(change.document)
        name = document.get("stream")
        if not isinstance(name, str) or name not in self.streams:
            known = ", ".join(sorted(self.streams))
            raise Rejected(f"there is no stream {name!r:.100}; known are {known} (stream)")
        return document, name

    def _command(self, change: RuleChange, log: list[LogRow], arrival: int | None) -> list[Command]:
        if change.change != "insert":
            return []
        if change.status not in COMMANDS:
            raise Rejected(
                f"a command's status must be one of {', '.join(COMMANDS)}, got {change.status!r:.40} (status)"
            )
        document = read_document(change.document) if change.document else {}
        if document.get("stream", self.stream.name) != self.stream.name:
            if document["stream"] not in self.streams:
                raise Rejected(f"there is no stream {document['stream']!r:.100} (stream)")
            return []
        time = None
        if change.status == "advance":
            try:
                time = parse_time(document.get("time"))
            except ValueError:
                raise Rejected(
                    f"advance needs a time such as '2026-01-31T12:00:00Z', got {document.get('time')!r:.100} (time)"
                ) from None
        if change.status == "retire_all":
            for entry in list(self.entries.values()):
                if entry.stream == self.stream.name and entry.status != "retired":
                    self._enter(replace(entry, status="retired"))
                    log.append(
                        LogRow(self.stream.name, entry.rule_id, entry.version, "retired", "by retire_all", arrival)
                    )
        message = "" if time is None else f"to {text_of(moment(time))}"
        log.append(LogRow(self.stream.name, "*", change.version, str(change.status), message, arrival))
        return [Command(str(change.status), time)]


def _ignore(action: str, message: str = "", version: int | None = None) -> None:
    """Rows that only concern other streams are logged there."""


def _one_line(problems: list[Problem]) -> str:
    return "; ".join(str(problem) for problem in problems)[:4_000]


@functools.lru_cache(maxsize=4_096)
def _compile_cached(declaration: str, document: str) -> CompiledRule:
    return compile_rule(read_document(document), Stream.from_dict(json.loads(declaration)))
