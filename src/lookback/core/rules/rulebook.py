"""Applies the changes of the rules table one after another, and knows which version of each rule is in force.

Every shard keeps a whole rulebook and applies the same changes, so all shards agree.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lookback.core.errors import Problem, RuleError
from lookback.core.rules.compiled import CompiledRule, compile_rule
from lookback.core.rules.document import RULE_ID, STATUSES, quote_value, read_document
from lookback.core.rules.quarantine import NOT_THE_RULES, describe_error
from lookback.core.streams.declaration import Stream
from lookback.core.values.columns import to_text
from lookback.core.values.limits import LIMITS, WIDEST_LIMITS, Limits, name_limit
from lookback.core.values.texts import cut_end
from lookback.core.values.times import parse_calendar_time, to_utc

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
# A bigint, and room for the next one.
MAX_VERSION = 2**63 - 2
# Longer ids are cut in the log; a valid one has at most 100 characters.
_MAX_ID_CHARACTERS = 103
_MAX_LOG_CHARACTERS = 4_000
# Compiled rules that the shards of a process share, of each declaration: all that a stream can have in force, and some that
# were replaced.
_MOST_COMPILED, _MOST_DECLARATIONS = LIMITS["rules"].most + 2_000, 100
COMMANDS = ("clear_state", "retire_all", "advance")


@dataclass(frozen=True)
class RuleChange:
    """A change to a row of the rules table, as the change feed reports it.

    `change`: insert, delete, update (the row after it), or before (the row as it was before an update).
    """

    change: str
    commit: int
    rule_id: str | None
    version: int | None
    status: str | None
    document: str | None

    @property
    def order(self) -> tuple[object, ...]:
        """The sort key by which changes apply: commit, then version, with rows without a version after the others.

        Deletions of a commit come last, and remaining ties are broken by the row's texts, so that every reader of a commit
        applies it in the same order.
        """
        number = 2**63 if self.version is None else self.version
        texts = [text or "" for text in (self.rule_id, self.change, self.status, self.document)]
        return (self.commit, self.change == "delete", number, *texts)

    @property
    def slot(self) -> tuple[int, str | None, int | None]:
        """The version of a rule, which a commit changes at most once."""
        return (self.commit, self.rule_id, self.version)


@dataclass(frozen=True)
class LogRow:
    """A row of rule_log, without the columns that only the shell knows.

    arrival: the last commit judged before the row; None if none was.
    """

    stream: str
    rule_id: str | None
    version: int | None
    action: str
    message: str
    arrival: int | None


@dataclass(frozen=True)
class Entry:
    """The version of a rule that is in force. stream: where it is evaluated; highest: the highest version seen.

    broken: judging it raised an unexpected exception in this shard; it is not judged again until another row comes into
    force.
    """

    rule_id: str
    version: int
    status: str
    document: str
    stream: str
    highest: int
    broken: bool = False


@dataclass(frozen=True)
class Command:
    """A command row that concerns this stream. time: the watermark that an `advance` sets, in microseconds."""

    action: str
    time: int | None = None


class Rejected(Exception):
    """Raised for a row that cannot come into force; its text goes to rule_log."""


@dataclass
class RuleBook:
    """The rules in force for `stream`. streams: every declared stream by name, against which rules are checked."""

    stream: Stream
    streams: Mapping[str, Stream]
    entries: dict[str, Entry] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._json: str | None = None
        self._counts = self._count_in_force()
        # All books of a process share what was compiled for a declaration.
        self._declarations = {name: json.dumps(stream.to_dict()) for name, stream in self.streams.items()}
        self._unlimited = {
            name: json.dumps(replace(stream, limits=WIDEST_LIMITS).to_dict()) for name, stream in self.streams.items()
        }
        self._widest = Limits(document_bytes=max(each.limits.document_bytes for each in self.streams.values()))

    def apply(self, changes: Iterable[RuleChange], arrival: int | None) -> tuple[list[LogRow], list[Command]]:
        """Applies changes in order and returns the log rows and commands. arrival: the last commit judged before them."""
        log: list[LogRow] = []
        commands: list[Command] = []
        for change in order_changes(changes):
            commands += self._apply(change, arrival, log)
        return log, commands

    def in_force(self, statuses: Iterable[str] = WITH_STATE) -> list[tuple[Entry, CompiledRule]]:
        """Returns the stream's rules that have these statuses, by rule_id, without the unreadable ones."""
        known = ((entry, self._compile_in_force(entry)) for entry in self._entries_of_stream(statuses))
        return [(entry, rule) for entry, rule in known if isinstance(rule, CompiledRule)]

    def unreadable(self) -> list[tuple[Entry, str]]:
        """Returns the rules in force that cannot be read under this release or the current declaration, each with why."""
        known = ((entry, self._compile_in_force(entry)) for entry in self._entries_of_stream(WITH_STATE))
        return [(entry, _join_problems(error.problems)) for entry, error in known if isinstance(error, RuleError)]

    def _entries_of_stream(self, statuses: Iterable[str]) -> list[Entry]:
        wanted = set(statuses)
        return [e for _, e in sorted(self.entries.items()) if e.status in wanted and e.stream == self.stream.name]

    def mark_broken(self, rule_id: str) -> None:
        """Takes the version in force out of judging, after it raised an unexpected exception."""
        self._enter(replace(self.entries[rule_id], broken=True))

    def to_json(self) -> str:
        """Returns the book as JSON for the state store."""
        if self._json is None:
            self._json = json.dumps([_to_row(entry) for entry in self.entries.values()], separators=(",", ":"))
        return self._json

    def load(self, text: str) -> None:
        """Reads the entries that `to_json` wrote."""
        self.entries = {row["rule_id"]: Entry(**row) for row in json.loads(text)}
        self._json, self._counts = text, self._count_in_force()

    def _enter(self, entry: Entry) -> None:
        before = self.entries.get(entry.rule_id)
        if before is not None and before.status in WITH_STATE:
            self._counts[before.stream] -= 1
        if entry.status in WITH_STATE:
            self._counts[entry.stream] += 1
        self.entries[entry.rule_id], self._json = entry, None

    def _count_in_force(self) -> Counter[str]:
        """Counts the rules in force of each stream."""
        return Counter(entry.stream for entry in self.entries.values() if entry.status in WITH_STATE)

    def _compile(self, stream: str, document: str, *, limited: bool = True) -> CompiledRule | RuleError:
        declarations = self._declarations if limited else self._unlimited
        return _open_compiler(declarations[stream])(document)

    def _compile_in_force(self, entry: Entry) -> CompiledRule | RuleError:
        """Compiles the rule of an entry; a rule in force stays valid where the stream's limits were lowered."""
        compiled = self._compile(entry.stream, entry.document)
        if isinstance(compiled, RuleError):
            compiled = self._compile(entry.stream, entry.document, limited=False)
        return compiled

    def _apply(self, change: RuleChange, arrival: int | None, log: list[LogRow]) -> list[Command]:
        logged_id = change.rule_id
        if isinstance(logged_id, str):
            logged_id = cut_end(logged_id, _MAX_ID_CHARACTERS)

        def write(action: str, message: str = "", version: int | None = change.version) -> None:
            log.append(LogRow(self.stream.name, logged_id, version, action, message, arrival))

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
            write("rejected", _join_problems(error.problems))
        except NOT_THE_RULES:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a row holds, it stops no other
            write("rejected", f"the row cannot be read: {describe_error(error)}; write it with `lookback rules push`")
        return []

    def _delete(self, change: RuleChange, write: Any) -> None:
        entry = self.entries.get(str(change.rule_id))
        if entry is None or entry.status == "retired":
            return
        if change.version is None:
            # The version that the row was given is unknown, but its status and document identify it.
            if (entry.status, entry.document) != (change.status, change.document):
                return
        elif entry.version != change.version:
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
            same = entry is not None and (entry.status, entry.document) == (change.status, change.document)
            if change.change == "update" and same:
                return
            version = highest + 1
            change = replace(change, version=version)
        if change.change == "update" and entry is not None and version < entry.version:
            return
        name = self._document_stream(change)
        concerns_us = name == self.stream.name or (entry is not None and entry.stream == self.stream.name)
        try:
            self._check(change, entry, version, name)
        except (Rejected, RuleError):
            if concerns_us:
                raise
            return
        self._put_in_force(
            change, entry, version, name, max(highest, version), write if concerns_us else _write_nothing
        )

    def _check(self, change: RuleChange, entry: Entry | None, version: int, name: str) -> None:
        """Checks that a row can come into force. Raises Rejected and RuleError."""
        highest = entry.highest if entry else 0
        if change.status not in STATUSES:
            raise Rejected(f"status must be one of {', '.join(STATUSES)}, got {change.status!r:.40} (status)")
        if version < 0:
            raise Rejected(f"version must not be negative, got {version}; insert {highest + 1} or NULL (version)")
        if version >= MAX_VERSION:
            raise Rejected(
                f"version must be less than {MAX_VERSION:,}, or no other could follow, got {version:,} (version)"
            )
        if change.change == "insert" and entry is not None and entry.version >= version:
            raise Rejected(
                f"superseded: version {version} is not above version {entry.version}, which is in force; "
                f"insert version {entry.highest + 1} or NULL (version)"
            )
        # A status that takes load off the stream is exempt from its limits.
        limited = change.status not in ("paused", "retired", "quarantined")
        if limited:
            read_document(change.document, self.streams[name].limits)
            self._check_count(change, entry, name)
        compiled = self._compile(name, str(change.document), limited=limited)
        if isinstance(compiled, RuleError):
            raise RuleError(compiled.name, compiled.problems)
        if compiled.spec.rule_id != change.rule_id:
            raise Rejected(
                f"the document is of rule {compiled.spec.rule_id!r}, the row of {change.rule_id!r}; make them the same (rule_id)"
            )

    def _check_count(self, change: RuleChange, entry: Entry | None, name: str) -> None:
        most = self.streams[name].limits.rules
        is_more = entry is None or entry.status not in WITH_STATE or entry.stream != name
        if change.status == "draft" or not is_more:
            return
        count = self._counts[name]
        if count >= most:
            raise Rejected(
                name_limit(f"stream {name!r} has {count:,} rules in force already; retire one first", "rules")
            )

    def _put_in_force(
        self, change: RuleChange, entry: Entry | None, version: int, name: str, highest: int, write: Any
    ) -> None:
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

    def _document_stream(self, change: RuleChange) -> str:
        """Returns the name of the stream in the row's document. Raises Rejected and RuleError."""
        document = read_document(change.document, self._widest)
        name = document.get("stream")
        if not isinstance(name, str) or name not in self.streams:
            known = ", ".join(sorted(self.streams))
            raise Rejected(f"there is no stream {quote_value(name)}; known are {known} (stream)")
        return name

    def _command(self, change: RuleChange, log: list[LogRow], arrival: int | None) -> list[Command]:
        if change.change != "insert":
            return []
        if change.status not in COMMANDS:
            raise Rejected(
                f"a command's status must be one of {', '.join(COMMANDS)}, got {change.status!r:.40} (status)"
            )
        document = read_document(change.document) if change.document else {}
        name = document.get("stream")
        if name is not None and name != self.stream.name:
            if not isinstance(name, str) or name not in self.streams:
                known = ", ".join(sorted(self.streams))
                raise Rejected(f"there is no stream {quote_value(name)}; known are {known}, none means all (stream)")
            return []
        time = None
        if change.status == "advance":
            try:
                time = parse_calendar_time(document.get("time"))
            except ValueError:
                raise Rejected(
                    f"advance needs a time such as '2026-01-31T12:00:00Z', got {quote_value(document.get('time'))} (time)"
                ) from None
        if change.status == "retire_all":
            for entry in list(self.entries.values()):
                if entry.stream == self.stream.name and entry.status != "retired":
                    self._enter(replace(entry, status="retired"))
                    log.append(
                        LogRow(self.stream.name, entry.rule_id, entry.version, "retired", "by retire_all", arrival)
                    )
        message = "" if time is None else f"to {to_text(to_utc(time))}"
        log.append(LogRow(self.stream.name, "*", change.version, str(change.status), message, arrival))
        return [Command(str(change.status), time)]


def _to_row(entry: Entry) -> dict[str, Any]:
    # Without `broken` where it is false: so were entries written before they could break.
    return {name: value for name, value in vars(entry).items() if name != "broken" or value}


def _write_nothing(action: str, message: str = "", version: int | None = None) -> None:
    """Drops a log row; one that concerns only other streams is logged there."""


def order_changes(changes: Iterable[RuleChange]) -> list[RuleChange]:
    """Returns the net changes of each commit in the order in which they apply, at most one for each version of a rule.

    A row that a commit removes and writes again unchanged, as an overwrite or a MERGE may, is no change; one that it
    writes with other values is an update. A version whose row got another rule_id or version by an UPDATE is deleted,
    since every version in force has its row in the table.
    """
    written: Counter[RuleChange] = Counter()
    removed: Counter[RuleChange] = Counter()
    for change in changes:
        (removed if change.change in ("delete", "before") else written)[change] += 1
    unchanged = _count_rows(written) & _count_rows(removed)
    new_rows, old_rows = list(_without(written, unchanged)), list(_without(removed, unchanged))
    new, old = ({change.slot for change in part if change.version is not None} for part in (new_rows, old_rows))
    net = [replace(change, change="update") if change.slot in old else change for change in new_rows]
    net += [replace(change, change="delete") for change in old_rows if change.slot not in new]
    return sorted(net, key=lambda change: change.order)


def _count_rows(changes: Counter[RuleChange]) -> Counter[RuleChange]:
    """Counts the rows of changes, whatever the kind of change."""
    rows: Counter[RuleChange] = Counter()
    for change, count in changes.items():
        rows[replace(change, change="")] += count
    return rows


def _without(changes: Counter[RuleChange], unchanged: Counter[RuleChange]) -> Iterator[RuleChange]:
    """Yields the changes without those of unchanged rows."""
    left = unchanged.copy()
    for change in changes.elements():
        row = replace(change, change="")
        if left[row]:
            left[row] -= 1
        else:
            yield change


def _join_problems(problems: list[Problem]) -> str:
    return "; ".join(str(problem) for problem in problems)[:_MAX_LOG_CHARACTERS]


@functools.lru_cache(maxsize=_MOST_DECLARATIONS)
def _open_compiler(declaration: str) -> Callable[[str], CompiledRule | RuleError]:
    """Returns the function that compiles documents for a declared stream, and keeps the compiled rules."""
    stream = Stream.from_dict(json.loads(declaration))
    return functools.lru_cache(maxsize=_MOST_COMPILED)(functools.partial(_compile, stream))


def _compile(stream: Stream, document: str) -> CompiledRule | RuleError:
    try:
        return compile_rule(read_document(document), stream)
    except RuleError as error:
        # A new error, since the cache would keep the frames of the one that was raised in memory.
        return RuleError(error.name, error.problems)
    except NOT_THE_RULES:
        raise
    except Exception as error:  # noqa: BLE001 - a defect in reading one rule stops no other
        return RuleError(
            "?", [Problem("", f"the document cannot be read: {describe_error(error)}; write it otherwise")]
        )
