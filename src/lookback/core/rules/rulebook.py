"""Which version of which rule is in force: the rules table's changes, applied one after another.

Every shard keeps a whole rulebook of its own and applies the same changes, so all of them agree.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lookback.core.errors import Problem, RuleError
from lookback.core.rules.compiled import CompiledRule, compile_rule
from lookback.core.rules.document import RULE_ID, STATUSES, read_document, shown
from lookback.core.rules.quarantine import NOT_THE_RULES, describe_error
from lookback.core.streams.alerts import moment
from lookback.core.streams.declaration import Stream
from lookback.core.values.columns import text_of
from lookback.core.values.limits import WIDEST, Limits, over
from lookback.core.values.times import parse_calendar_time

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
# Of a rule_id in the log; one that is valid is not longer.
_MOST_ID = 103
COMMANDS = ("clear_state", "retire_all", "advance")


@dataclass(frozen=True)
class RuleChange:
    """A row of the rules table as the change feed brings it.

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
        """Changes apply by (commit version, version); a row without version comes after those with one.

        What a commit deletes comes last, and rows that are equal so far come by what stands in them: whoever reads the
        commit, in whatever order, applies it alike.
        """
        number = 2**63 if self.version is None else self.version
        texts = [text or "" for text in (self.rule_id, self.change, self.status, self.document)]
        return (self.commit, self.change == "delete", number, *texts)

    @property
    def slot(self) -> tuple[int, str | None, int | None]:
        """What a commit can change once: a version of a rule."""
        return (self.commit, self.rule_id, self.version)


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
    """The version in force of one rule. `stream`: where it is evaluated; `highest`: of all versions seen.

    broken: judging it ended in an unexpected exception here; it is judged no more until another row comes into force.
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
        self._unlimited = {
            name: json.dumps(replace(stream, limits=WIDEST).to_dict()) for name, stream in self.streams.items()
        }
        self._widest = Limits(document_bytes=max(each.limits.document_bytes for each in self.streams.values()))

    def apply(self, changes: Iterable[RuleChange], arrival: int | None) -> tuple[list[LogRow], list[Command]]:
        """Applies changes in order. arrival: the last commit judged before them."""
        log: list[LogRow] = []
        commands: list[Command] = []
        for change in order_changes(changes):
            commands += self._apply(change, arrival, log)
        return log, commands

    def in_force(self, statuses: Iterable[str] = WITH_STATE) -> list[tuple[Entry, CompiledRule]]:
        """The stream's rules of these statuses, by rule_id; without those that are `lost`."""
        known = ((entry, self._again(entry)) for entry in self._own(statuses))
        return [(entry, rule) for entry, rule in known if isinstance(rule, CompiledRule)]

    def unreadable(self) -> list[tuple[Entry, str]]:
        """The rules in force that this release, or the stream as it is declared now, cannot read any more, and why."""
        known = ((entry, self._again(entry)) for entry in self._own(WITH_STATE))
        return [(entry, _one_line(error.problems)) for entry, error in known if isinstance(error, RuleError)]

    def _own(self, statuses: Iterable[str]) -> list[Entry]:
        wanted = set(statuses)
        return [e for _, e in sorted(self.entries.items()) if e.status in wanted and e.stream == self.stream.name]

    def stop(self, rule_id: str) -> None:
        """Judges the version in force no more: an unexpected exception came of it."""
        self._enter(replace(self.entries[rule_id], broken=True))

    def to_json(self) -> str:
        """The book as text, for the state store."""
        if self._text is None:
            self._text = json.dumps([_stored(entry) for entry in self.entries.values()], separators=(",", ":"))
        return self._text

    def load(self, text: str) -> None:
        """Takes over what `to_json` wrote."""
        self.entries = {row["rule_id"]: Entry(**row) for row in json.loads(text)}
        self._text = text

    def _enter(self, entry: Entry) -> None:
        self.entries[entry.rule_id], self._text = entry, None

    def _compiled(self, stream: str, document: str, *, limited: bool = True) -> CompiledRule | RuleError:
        return _compile_cached((self._declarations if limited else self._unlimited)[stream], document)

    def _again(self, entry: Entry) -> CompiledRule | RuleError:
        """The rule of a version in force, which goes on where the limits have been lowered."""
        compiled = self._compiled(entry.stream, entry.document)
        if isinstance(compiled, RuleError):
            return self._compiled(entry.stream, entry.document, limited=False)
        return compiled

    def _apply(self, change: RuleChange, arrival: int | None, log: list[LogRow]) -> list[Command]:
        shown_id = change.rule_id
        if isinstance(shown_id, str) and len(shown_id) > _MOST_ID:
            shown_id = f"{shown_id[: _MOST_ID - 3]}..."

        def write(action: str, message: str = "", version: int | None = change.version) -> None:
            log.append(LogRow(self.stream.name, shown_id, version, action, message, arrival))

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
            # Which version it became cannot be seen; what stands in it can.
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
        self._take(change, entry, version, name, max(highest, version), write if concerns_us else _ignore)

    def _check(self, change: RuleChange, entry: Entry | None, version: int, name: str) -> None:
        """Raises where the row cannot come into force."""
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
        # What takes load off the stream needs no leave.
        limited = change.status not in ("paused", "retired", "quarantined")
        if limited:
            read_document(change.document, self.streams[name].limits)
            self._check_count(change, entry, name)
        compiled = self._compiled(name, str(change.document), limited=limited)
        if isinstance(compiled, RuleError):
            raise RuleError(compiled.name, compiled.problems)
        if compiled.spec.rule_id != change.rule_id:
            raise Rejected(
                f"the document is of rule {compiled.spec.rule_id!r}, the row of {change.rule_id!r}; make them the same (rule_id)"
            )

    def _check_count(self, change: RuleChange, entry: Entry | None, name: str) -> None:
        most = self.streams[name].limits.rules
        is_more = entry is None or entry.status not in WITH_STATE or entry.stream != name
        if change.status == "draft" or not is_more or len(self.entries) < most:
            return
        count = sum(1 for each in self.entries.values() if each.stream == name and each.status in WITH_STATE)
        if count >= most:
            raise Rejected(over(f"stream {name!r} has {count:,} rules in force already; retire one first", "rules"))

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

    def _document_stream(self, change: RuleChange) -> str:
        """The name of the stream of the row's document; raises where it cannot be read."""
        document = read_document(change.document, self._widest)
        name = document.get("stream")
        if not isinstance(name, str) or name not in self.streams:
            known = ", ".join(sorted(self.streams))
            raise Rejected(f"there is no stream {shown(name)}; known are {known} (stream)")
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
                raise Rejected(f"there is no stream {shown(name)}; known are {known}, none means all (stream)")
            return []
        time = None
        if change.status == "advance":
            try:
                time = parse_calendar_time(document.get("time"))
            except ValueError:
                raise Rejected(
                    f"advance needs a time such as '2026-01-31T12:00:00Z', got {shown(document.get('time'))} (time)"
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


def _stored(entry: Entry) -> dict[str, Any]:
    # As it was before entries could break, where none has.
    return {name: value for name, value in vars(entry).items() if name != "broken" or value}


def _ignore(action: str, message: str = "", version: int | None = None) -> None:
    """Rows that only concern other streams are logged there."""


def order_changes(changes: Iterable[RuleChange]) -> list[RuleChange]:
    """The changes in the order in which they apply: what each commit changed in all, each version of a rule once.

    A row that a commit takes out and writes again as it was, as an overwrite or a MERGE may, is no change; one that it
    writes with something else in it is updated. A version whose row an UPDATE gave another rule_id or version is deleted:
    what is in force stands in the table.
    """
    written: Counter[RuleChange] = Counter()
    removed: Counter[RuleChange] = Counter()
    for change in changes:
        (removed if change.change in ("delete", "before") else written)[change] += 1
    unchanged = _rows(written) & _rows(removed)
    left, gone = list(_less(written, unchanged)), list(_less(removed, unchanged))
    new, old = ({change.slot for change in part if change.version is not None} for part in (left, gone))
    found = [replace(change, change="update") if change.slot in old else change for change in left]
    found += [replace(change, change="delete") for change in gone if change.slot not in new]
    return sorted(found, key=lambda change: change.order)


def _rows(changes: Counter[RuleChange]) -> Counter[RuleChange]:
    """The rows of changes, whatever became of them."""
    rows: Counter[RuleChange] = Counter()
    for change, count in changes.items():
        rows[replace(change, change="")] += count
    return rows


def _less(changes: Counter[RuleChange], unchanged: Counter[RuleChange]) -> Iterator[RuleChange]:
    """The changes without those of rows that stay as they were."""
    left = unchanged.copy()
    for change in changes.elements():
        row = replace(change, change="")
        if left[row]:
            left[row] -= 1
        else:
            yield change


def _one_line(problems: list[Problem]) -> str:
    return "; ".join(str(problem) for problem in problems)[:4_000]


@functools.lru_cache(maxsize=4_096)
def _compile_cached(declaration: str, document: str) -> CompiledRule | RuleError:
    try:
        return compile_rule(read_document(document), Stream.from_dict(json.loads(declaration)))
    except RuleError as error:
        # Without the frames in which it was raised, which would stay in memory.
        return RuleError(error.name, error.problems)
    except NOT_THE_RULES:
        raise
    except Exception as error:  # noqa: BLE001 - a defect in reading one rule stops no other
        return RuleError(
            "?", [Problem("", f"the document cannot be read: {describe_error(error)}; write it otherwise")]
        )
