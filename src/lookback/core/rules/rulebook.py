"""Applies the changes of the rules table in order, and knows which versions of each rule are in force.

A rule has two roles: one version is active or paused, and one, the challenger, may be in shadow beside it. All shards agree,
since each keeps a complete rulebook and applies the same changes.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from lookback.core.errors import Problem, RuleError
from lookback.core.rules.compiled import CompiledRule
from lookback.core.rules.compiling import compile_rule
from lookback.core.rules.document import RULE_ID, STATUSES, is_same_document, read_document
from lookback.core.rules.gate import REFUSAL, find_objection
from lookback.core.rules.problems import quote_value
from lookback.core.rules.quarantine import AUTHOR, NOT_THE_RULES, describe_error
from lookback.core.rules.roles import SHADOW, WARMING, read_quarantined
from lookback.core.rules.versions import (
    EVALUATED,
    WARM,
    WITH_STATE,
    Entry,
    Piece,
    Warming,
    WarmingVersions,
    describe_start,
    describe_warming,
    find_replaced,
)
from lookback.core.streams.declaration import Stream
from lookback.core.values.columns import to_text
from lookback.core.values.limits import LIMITS, WIDEST_LIMITS, Limits, name_limit
from lookback.core.values.texts import cut_end, to_one_line
from lookback.core.values.times import parse_calendar_time, to_utc

ACTIONS = {
    "draft": "drafted",
    "shadow": "shadowed",
    "active": "activated",
    "paused": "paused",
    "retired": "retired",
    "quarantined": "quarantined",
}
# The largest bigint that has a next one.
MAX_VERSION = 2**63 - 2
# Longer ids are cut in the log; valid ones have at most 100 characters.
_MAX_ID_CHARACTERS = 103
_MAX_LOG_CHARACTERS = 4_000
# Rules cached per declaration, for all shards of a process: the maximum in force, and room for replaced versions.
_MAX_COMPILED, _MAX_DECLARATIONS = LIMITS["rules"].most + 2_000, 100
# The decisions in rule_log about versions that ended although no row of their own has status retired.
ROW_DELETED, MOVED, RETIRE_ALL = "deleted", "moved", "retire_all"
COMMANDS = ("clear_state", RETIRE_ALL, "advance")
# The status of a row that names a commit of table `lists`, which the stream writes itself, and its action in rule_log.
LISTS, LIST_CHANGED = "lists", "list"
_DELETE_ROW = "delete the row: the stream writes such rows itself when the table changes"
# Why a row with a piece of history is rejected.
NOT_BY_ENGINE = "only the stream itself writes rows with status warm; delete the row (status)"


@dataclass(frozen=True)
class RuleChange:
    """A change to a row of the rules table, as the change feed reports it."""

    change: str  # insert, delete, update (the new row) or before (the old row of an update)
    commit: int
    rule_id: str | None
    version: int | None
    status: str | None
    document: str | None
    evidence: str | None = None  # JSON: of a quarantined row the failing version, of an active one the gate's figures
    author: str | None = None
    approved_by: str | None = None
    gate: str = (
        ""  # what an enforced gate requires of an active row: EVIDENCE or APPROVAL; empty for rows before the gate
    )
    # What rule_log says, in a replay; None if the state decides. For a version: whether it was warmed first; for a piece of
    # history: whether it was the last; for a commit of lists: whether it was obeyed.
    warms: bool | None = None

    @property
    def order(self) -> tuple[object, ...]:
        """The sort key by which changes apply: commit, then version; rows without a version come later, deletions last.

        The row's texts break ties, so that every reader applies a commit in the same order.
        """
        number = 2**63 if self.version is None else self.version
        named = (self.rule_id, self.change, self.status, self.document, self.evidence, self.author, self.approved_by)
        texts = [text or "" for text in named]
        return (self.commit, self.change == "delete", number, *texts)

    @property
    def slot(self) -> tuple[int, str | None, int | None]:
        """The version of a rule that the change is about; a commit changes each at most once."""
        return (self.commit, self.rule_id, self.version)


@dataclass(frozen=True)
class LogRow:
    """A row of rule_log, without the columns that only the shell knows."""

    stream: str
    rule_id: str | None
    version: int | None
    action: str
    message: str
    arrival: int | None  # the last commit judged before the row; None before the first
    rules_commit: int | None = None  # the commit of the rules table with the row that was obeyed or rejected
    decision: str | None = None  # what was decided, for programs: see the column in the schema of rule_log


@dataclass(frozen=True)
class Command:
    """A command row for this stream, or the start of a warm-up."""

    action: str
    time: int | None = None  # of `advance`: the new watermark in microseconds
    commit: int | None = None  # of `lists`: the commit of the table
    piece: Piece | None = None  # of `warm`: a piece of history
    warms: bool | None = None  # see `RuleChange`
    opened: Warming | None = None  # of `warming`: the version whose features begin to keep rows
    rules_commit: int | None = None  # of `warm`: the commit of the rules table with the row


class Rejected(Exception):
    """Raised for a row that cannot come into force; its text goes to rule_log, and so does `decision`."""

    decision: str | None = None


class GateRejected(Rejected):
    """Raised for a row that the gate rejects."""

    decision = REFUSAL


@dataclass
class RuleBook:
    """The rules in force for `stream`."""

    stream: Stream
    streams: Mapping[str, Stream]  # all declared streams by name
    # By rule_id: the active or paused version, else the one in shadow, else the one that ended the rule.
    entries: dict[str, Entry] = field(default_factory=dict)
    # By rule_id: the version in shadow beside the one in `entries`.
    challengers: dict[str, Entry] = field(default_factory=dict)
    lists_commit: int | None = None  # the last commit of table `lists` that a row has named
    warming: WarmingVersions = field(default_factory=WarmingVersions)  # versions that wait for their history

    def __post_init__(self) -> None:
        self._json: str | None = None
        self._counts = self._count_in_force()
        self._needs_history: Callable[[CompiledRule], bool] = lambda _: False
        self._knows_lists: Callable[[int], bool] = lambda _: True
        # While a change is applied: the last commit judged before it, and the warm-ups that it starts.
        self._arrival: int | None = None
        self._opened: list[Command] = []
        # Rules that have only versions that are warming.
        self._only_warming: set[str] = set()
        # Versions that are no longer judged, by rule_id and version.
        self.broken = self._list_broken()
        self._know_declarations()

    def _know_declarations(self) -> None:
        # The keys of the cache of compiled rules, which all books of a process share.
        self._declarations = {name: json.dumps(stream.to_dict()) for name, stream in self.streams.items()}
        self._unlimited = {
            name: json.dumps(replace(stream, limits=WIDEST_LIMITS).to_dict()) for name, stream in self.streams.items()
        }
        self._widest = Limits(document_bytes=max(each.limits.document_bytes for each in self.streams.values()))

    def apply(
        self, changes: Iterable[RuleChange], arrival: int | None,
        needs_history: Callable[[CompiledRule], bool] = lambda _: False,
        knows_lists: Callable[[int], bool] = lambda _: True,
    ) -> tuple[list[LogRow], list[Command]]:  # fmt: skip
        """Applies changes in order and returns the log rows and commands.

        Args:
            changes: Rows of the change feed; `order_changes` brings them in order.
            arrival: The last commit judged before them.
            needs_history: Whether a version must be warmed before it comes into force.
            knows_lists: Whether the stream itself has announced a commit of table `lists`.
        """
        log: list[LogRow] = []
        commands: list[Command] = []
        self._needs_history, self._knows_lists = needs_history, knows_lists
        for change in order_changes(changes):
            commands += self._apply(change, arrival, log)
        return log, commands

    def declare(self, stream: Stream) -> None:
        """Switches to a new declaration of the same stream, which may have other lateness and limits."""
        if stream != self.stream or stream != self.streams.get(stream.name):
            self.stream, self.streams = stream, {**self.streams, stream.name: stream}
            self._know_declarations()

    def in_force(self, statuses: Iterable[str] = WITH_STATE) -> list[tuple[Entry, CompiledRule]]:
        """Returns the stream's readable rules with these statuses, by rule_id, a challenger after the version beside it."""
        known = ((entry, self._compile_in_force(entry)) for entry in self._entries_of_stream(statuses))
        return [(entry, rule) for entry, rule in known if isinstance(rule, CompiledRule)]

    def list_judged(self) -> list[tuple[Entry, CompiledRule]]:
        """Returns the rules in force, and those that are warming, which raise no alerts."""
        if not self.warming:
            return self.in_force()
        warming = [(each, self.compile_warming(each)) for _, each in sorted(self.warming.items())]
        return self.in_force() + [(each.silence(rule), rule) for each, rule in warming if rule is not None]

    def list_known_warming(self) -> list[Warming]:
        """Returns the versions that are warming and whose row has arrived."""
        return [each for _, each in sorted(self.warming.items()) if each.is_known]

    def compile_warming(self, warming: Warming) -> CompiledRule | None:
        """Returns the rule of a version that is warming, with its own features; None if it is no longer readable."""
        rule = self._compile_in_force(warming.entry)
        return rule if isinstance(rule, CompiledRule) else None

    def open_warming(self, rule_id: str, version: int, status: str, document: str) -> None:
        """Starts to keep rows for a version whose row comes later in a replay."""
        lane = self.warming.find_free_lane()
        entry = Entry(rule_id, version, status, document, self.stream.name, version, lane=lane)
        self.change_warming(Warming(entry, None, is_known=False, is_replayed=True))

    def change_warming(self, warming: Warming) -> None:
        """Replaces the state of a version that is warming."""
        self.warming.put(warming)
        self._note_warming(warming.entry.rule_id)

    def finish_warming(
        self, piece: Piece, arrival: int | None, rules_commit: int | None = None
    ) -> tuple[LogRow, Entry]:
        """Brings a version into force with the last piece of its history, and returns its log row and its entry."""
        warming = self.warming[piece.rule_id, piece.version]
        entry = warming.entry
        self._drop_warming([warming])
        roles = self._list_roles(entry.rule_id)
        # A later version in shadow stays beside it.
        later = [each for each in roles if each.status == SHADOW and each.version > entry.version]
        roles = [each for each in roles if each not in later]
        if later and entry.status != SHADOW:
            main, *_ = fill_role([*roles, *later], replace(entry, status="paused"))
            self._enter(replace(main, status=entry.status), *later)
        else:
            self._enter(*fill_role(roles, replace(entry, lane=0)))
        message, decision = describe_start(piece)
        row = LogRow(
            self.stream.name,
            entry.rule_id,
            entry.version,
            ACTIONS[entry.status],
            message,
            arrival,
            rules_commit,
            decision,
        )
        held = next(each for each in self._list_roles(entry.rule_id) if each.version == entry.version)
        return row, held

    def _list_warming(self, rule_id: str) -> list[Warming]:
        """Lists the versions of a rule that are warming and whose row has arrived."""
        return [each for each in self.warming.list_versions(rule_id) if each.is_known]

    def _drop_warming(self, dropped: Iterable[Warming]) -> None:
        for each in list(dropped):
            self.warming.drop(each.key)
            self._note_warming(each.entry.rule_id)

    def _note_warming(self, rule_id: str) -> None:
        """Notes whether a rule has only versions that are warming."""
        self._json = None
        if self.warming.has_rule(rule_id) and rule_id not in self.entries:
            self._only_warming.add(rule_id)
        else:
            self._only_warming.discard(rule_id)

    def unreadable(self) -> list[tuple[Entry, str]]:
        """Returns the rules in force that this release, or the current declaration, cannot read, with the reasons."""
        known = ((entry, self._compile_in_force(entry)) for entry in self._entries_of_stream(WITH_STATE))
        return [(entry, _join_problems(error.problems)) for entry, error in known if isinstance(error, RuleError)]

    def _entries_of_stream(self, statuses: Iterable[str]) -> list[Entry]:
        wanted, challengers = set(statuses), self.challengers
        listed: list[Entry] = []
        for rule_id, entry in sorted(self.entries.items()):
            listed += (entry, challengers[rule_id]) if rule_id in challengers else (entry,)
        return [entry for entry in listed if entry.status in wanted and entry.stream == self.stream.name]

    def mark_broken(self, entry: Entry) -> None:
        """Marks a version that raised an unexpected exception, so that it is no longer judged."""
        for held in (self.entries, self.challengers):
            if (known := held.get(entry.rule_id)) is not None and known.version == entry.version:
                held[entry.rule_id], self._json = replace(known, broken=True), None
                self.broken.add((entry.rule_id, entry.version))
        warming = self.warming.get((entry.rule_id, entry.version))
        if warming is not None:
            self.change_warming(replace(warming, entry=replace(warming.entry, broken=True)))
            self.broken.add(warming.key)

    def _list_broken(self) -> set[tuple[str, int]]:
        entries = (*self.entries.values(), *self.challengers.values(), *(each.entry for each in self.warming.values()))
        return {(entry.rule_id, entry.version) for entry in entries if entry.broken}

    def list_versions(self) -> set[tuple[str, int]]:
        """Returns rule_id and version of all versions in force, of any stream."""
        entries = (*self.entries.values(), *self.challengers.values())
        return {(entry.rule_id, entry.version) for entry in entries if entry.is_in_force}

    def to_json(self) -> str:
        """Returns the book as JSON for the state store."""
        if self._json is None:
            entries = [*self.entries.values(), *self.challengers.values()]
            rows = [entry.to_row() for entry in entries] + [each.to_row() for each in self.warming.values()]
            self._json = json.dumps(rows, separators=(",", ":"))
        return self._json

    def load(self, text: str) -> None:
        """Replaces the entries by those that `to_json` wrote."""
        self.entries, self.challengers = {}, {}
        rows = json.loads(text)
        self.warming = WarmingVersions(Warming.from_row(row) for row in rows if WARMING in row)
        for row in rows:
            if WARMING in row:
                continue
            entry = Entry(**row)
            # A challenger is written after the version beside it.
            held = self.challengers if entry.rule_id in self.entries else self.entries
            held[entry.rule_id] = entry
        self._json, self._counts, self.broken = text, self._count_in_force(), self._list_broken()
        self._only_warming = {rule_id for rule_id, _ in self.warming if rule_id not in self.entries}

    def _list_roles(self, rule_id: str) -> list[Entry]:
        """Lists the entries of a rule, the challenger last."""
        return [held[rule_id] for held in (self.entries, self.challengers) if rule_id in held]

    def _enter(self, main: Entry, challenger: Entry | None = None) -> None:
        """Sets both roles of a rule and keeps its highest version."""
        rule_id = main.rule_id
        before = self._list_roles(rule_id)
        after = [main] if challenger is None else [main, challenger]
        highest = max(entry.highest for entry in (*before, *after))
        main, *beside = (replace(entry, highest=highest) for entry in after)
        self._set_roles(rule_id, main, *beside)

    def _set_roles(self, rule_id: str, *entries: Entry) -> None:
        """Sets both roles of a rule to these entries; a role without an entry ends."""
        self._counts.subtract(entry.stream for entry in self._list_roles(rule_id) if entry.is_in_force)
        self._counts.update(entry.stream for entry in entries if entry.is_in_force)
        for held, entry in zip_longest((self.entries, self.challengers), entries):
            if entry is None:
                held.pop(rule_id, None)
            else:
                held[rule_id] = entry
        self._note_warming(rule_id)
        if self.broken:
            self.broken = self._list_broken()

    def _count_in_force(self) -> Counter[str]:
        """Counts the rules in force of each stream."""
        entries = (*self.entries.values(), *self.challengers.values())
        return Counter(entry.stream for entry in entries if entry.is_in_force)

    def _compile(self, stream: str, document: str, *, limited: bool = True, lane: int = 0) -> CompiledRule | RuleError:
        declarations = self._declarations if limited else self._unlimited
        compiled = _open_compiler(declarations[stream])(document)
        if lane and isinstance(compiled, CompiledRule):
            compiled = _open_lanes(declarations[stream])(document, lane)
        return compiled

    def _compile_in_force(self, entry: Entry) -> CompiledRule | RuleError:
        """Compiles the rule of an entry; a rule in force stays valid when the stream's limits are lowered."""
        compiled = self._compile(entry.stream, entry.document, lane=entry.lane)
        if isinstance(compiled, RuleError):
            compiled = self._compile(entry.stream, entry.document, limited=False, lane=entry.lane)
        return compiled

    def _apply(self, change: RuleChange, arrival: int | None, log: list[LogRow]) -> list[Command]:
        logged_id = change.rule_id
        if isinstance(logged_id, str):
            logged_id = cut_end(logged_id, _MAX_ID_CHARACTERS)

        def write(
            action: str, message: str = "", version: int | None = change.version, decision: str | None = None
        ) -> None:
            log.append(LogRow(self.stream.name, logged_id, version, action, message, arrival, change.commit, decision))

        self._arrival, self._opened = arrival, list[Command]()
        try:
            if change.rule_id == "*":
                return self._command(change, log, arrival)
            if change.change == "delete":
                self._delete(change, write)
            else:
                self._put(change, write)
        except Rejected as reason:
            write("rejected", str(reason), decision=reason.decision)
        except RuleError as error:
            write("rejected", _join_problems(error.problems))
        except NOT_THE_RULES:
            raise
        except Exception as error:  # noqa: BLE001 - a bad row must not stop other rows
            write("rejected", f"the row cannot be read: {describe_error(error)}; write it with `lookback rules push`")
        return self._opened

    def _delete(self, change: RuleChange, write: Any) -> None:
        for warming in self._list_warming(str(change.rule_id)):
            if _is_meant(change, warming.entry):
                self._drop_warming([warming])
                write("retired", "the row of the warming version was deleted", warming.entry.version, ROW_DELETED)
                return
        for entry in self._list_roles(str(change.rule_id)):
            if _is_meant(change, entry) and entry.status != "retired":
                self._end_role(entry, replace(entry, status="retired"))
                if entry.stream == self.stream.name:
                    write("retired", "the row in force was deleted", decision=ROW_DELETED)
                return

    def _end_role(self, ending: Entry, ended: Entry) -> None:
        """Ends one role of a rule and keeps the other; if there is no other, the rule's entry becomes `ended`."""
        left = [entry for entry in self._list_roles(ending.rule_id) if entry.version != ending.version]
        left = [entry for entry in left if entry.is_in_force]
        if not left:
            self._enter(ended)
            return
        passed = ended.version if ended.status == "quarantined" else 0
        main = replace(left[0], ended=max(left[0].ended, passed), highest=max(left[0].highest, ended.highest))
        self._enter(main, *left[1:])

    def _put(self, change: RuleChange, write: Any) -> None:
        rule_id = change.rule_id
        if not (isinstance(rule_id, str) and RULE_ID.fullmatch(rule_id)):
            raise Rejected(
                f"rule_id must have 1 to 100 characters of a-z, 0-9, '.', '_' and '-', got {rule_id!r:.120} (rule_id)"
            )
        roles = self._list_roles(rule_id)
        warming = [each.entry for each in self._list_warming(rule_id)]
        highest = max([*(each.highest for each in roles[:1]), *(each.version for each in warming)], default=0)
        version = change.version
        if version is None:
            same = any(_is_row_of(each, change.status, change.document) for each in [*roles, *warming])
            if change.change == "update" and same:
                return
            version = highest + 1
            change = replace(change, version=version)
        versions = {each.version for each in [*roles, *warming]}
        if change.change == "update" and versions and version not in versions and version < max(versions):
            return
        name = self._document_stream(change)
        concerns_us = self.stream.name in (name, *(each.stream for each in [*roles, *warming]))
        try:
            self._check(change, roles, version, name)
            _check_gate(change, roles, version)
            self._put_in_force(
                change, roles, version, name, max(highest, version), write if concerns_us else _write_nothing
            )
        except (Rejected, RuleError):
            if concerns_us:
                raise

    def _check(self, change: RuleChange, roles: list[Entry], version: int, name: str) -> None:
        """Checks that a row can come into force. Raises Rejected and RuleError."""
        warming = self._list_warming(str(change.rule_id))
        highest = max([*(each.highest for each in roles[:1]), *(each.entry.version for each in warming)], default=0)
        if change.status not in STATUSES:
            raise Rejected(f"status must be one of {', '.join(STATUSES)}, got {change.status!r:.40} (status)")
        if version < 0:
            raise Rejected(f"version must not be negative, got {version}; insert {highest + 1} or NULL (version)")
        if version >= MAX_VERSION:
            raise Rejected(
                f"version must be less than {MAX_VERSION:,}, got {version:,}; insert {highest + 1} or NULL (version)"
            )
        last = max((max(each.version, each.ended) for each in [*roles, *(each.entry for each in warming)]), default=-1)
        if change.change == "insert" and last >= version:
            raise Rejected(
                f"superseded: version {version} is not above version {last}, which is in force; "
                f"insert {highest + 1} or NULL (version)"
            )
        # Limits do not apply to a status that takes load off the stream.
        limited = change.status not in ("paused", "retired", "quarantined")
        if limited:
            read_document(change.document, self.streams[name].limits)
            self._check_count(change, roles, name)
        compiled = self._compile(name, str(change.document), limited=limited)
        if isinstance(compiled, RuleError):
            raise RuleError(compiled.name, compiled.problems)
        if compiled.spec.rule_id != change.rule_id:
            raise Rejected(
                f"the document has rule_id {compiled.spec.rule_id!r}, the row {change.rule_id!r}; make them equal (rule_id)"
            )

    def _check_count(self, change: RuleChange, roles: list[Entry], name: str) -> None:
        most = self.streams[name].limits.rules
        replaced = [each for each in roles if each.is_in_force and each.stream == name]
        if change.status == SHADOW:
            replaced = [each for each in replaced if each.status == SHADOW or each.version == change.version]
        if change.status == "draft" or replaced or self._list_warming(str(change.rule_id)):
            return
        # Rules that are warming will be in force too.
        number = self._counts[name] + len(self._only_warming)
        if number >= most:
            raise Rejected(
                name_limit(f"stream {name!r} already has {number:,} rules in force; retire one first", "rules")
            )

    def _put_in_force(
        self, change: RuleChange, roles: list[Entry], version: int, name: str, highest: int, write: Any
    ) -> None:
        status, document = str(change.status), str(change.document)
        if status == "draft":
            if roles:
                main, *beside = roles
                self._enter(replace(main, highest=highest), *beside)
            write("drafted", version=version)
            return
        warming = self._list_warming(str(change.rule_id))
        present = [*roles, *(each.entry for each in warming)]
        if any(each.version == version and _is_row_of(each, status, document) for each in present):
            return
        entry = Entry(str(change.rule_id), version, status, document, name, highest)
        if self._warm_first(change, entry, warming, write):
            if roles:
                main, *beside = roles
                self._enter(replace(main, highest=highest), *beside)
            return
        in_force = [each for each in roles if each.is_in_force]
        if status == "quarantined" and (in_force or warming):
            failing = find_failing([*in_force, *(each.entry for each in warming)], version, change.evidence)
            self._drop_warming(each for each in warming if each.entry.version == failing.version)
            self._end_role(failing, entry)
        else:
            if not self._keep_warming(entry, warming, write):
                self._drop_warming(find_replaced(warming, status))
            self._enter(*fill_role(roles, entry))
        if name == self.stream.name:
            write(ACTIONS[status], version=version)
        else:
            # An UPDATE may have moved a version of this stream.
            left = {each.version for each in self._list_roles(entry.rule_id) if each.stream == self.stream.name}
            here = [each for each in roles if each.stream == self.stream.name and each.status != "retired"]
            if warming or any(each.version not in left for each in here):
                write("retired", f"version {version} is for stream {name!r}", version, MOVED)

    def _warm_first(self, change: RuleChange, entry: Entry, warming: list[Warming], write: Any) -> bool:
        """Starts to warm an active or shadow version if its windows need history, and returns whether they do."""
        rule = self._compile(entry.stream, entry.document)
        if entry.status not in EVALUATED or entry.stream != self.stream.name or isinstance(rule, RuleError):
            return False
        if not (self._needs_warming(entry) if change.warms is None else change.warms):
            return False
        replaced = find_replaced(warming, entry.status)
        known = self.warming.get((entry.rule_id, entry.version))
        same = next((each for each in replaced if self._has_same_states(each.entry, rule)), None)
        self._drop_warming(replaced)
        if known is not None and not known.is_known:
            first = self._arrival if same is None else same.begun
            begun = replace(known, entry=replace(entry, lane=known.entry.lane), begun=first, is_known=True)
        elif same is not None:
            begun = replace(same, entry=replace(entry, lane=same.entry.lane))
        else:
            begun = Warming(replace(entry, lane=self.warming.find_free_lane()), self._arrival)
            self._opened.append(Command(WARMING, opened=begun))
        self.change_warming(begun)
        write("warming", describe_warming(begun.begun), version=entry.version)
        return True

    def _keep_warming(self, entry: Entry, warming: list[Warming], write: Any) -> bool:
        """Lets a paused version go on with the warm-up of one with the same features, if there is one; returns whether."""
        rule = self._compile(entry.stream, entry.document)
        if entry.status != "paused" or entry.stream != self.stream.name or isinstance(rule, RuleError):
            return False
        known = self.warming.get((entry.rule_id, entry.version))
        replaced = find_replaced(warming, entry.status)
        same = next((each for each in replaced if self._has_same_states(each.entry, rule)), None)
        if same is None:
            return False
        self._drop_warming(replaced)
        if known is not None and not known.is_known:
            same = replace(known, begun=same.begun, is_known=True)
        self.change_warming(replace(same, entry=replace(entry, lane=same.entry.lane)))
        write("warming", describe_warming(same.begun), version=entry.version)
        return True

    def _needs_warming(self, entry: Entry) -> bool:
        """Returns whether a version needs history, given the state that it would continue with."""
        entered = fill_role(self._list_roles(entry.rule_id), entry)
        lane = next(each.lane for each in entered if each.version == entry.version)
        rule = self._compile(entry.stream, entry.document, lane=lane)
        return isinstance(rule, CompiledRule) and self._needs_history(rule)

    def _has_same_states(self, entry: Entry, rule: CompiledRule) -> bool:
        other = self._compile(entry.stream, entry.document)
        return isinstance(other, CompiledRule) and (other.needs, other.measured) == (rule.needs, rule.measured)

    def _document_stream(self, change: RuleChange) -> str:
        """Returns the stream that the row's document names. Raises Rejected and RuleError."""
        document = read_document(change.document, self._widest)
        name = document.get("stream")
        if not isinstance(name, str) or name not in self.streams:
            known = ", ".join(sorted(self.streams))
            raise Rejected(f"unknown stream {quote_value(name)}; known: {known} (stream)")
        return name

    def _command(self, change: RuleChange, log: list[LogRow], arrival: int | None) -> list[Command]:
        if change.change != "insert":
            return []
        if change.status not in (*COMMANDS, LISTS, WARM):
            raise Rejected(
                f"a command's status must be one of {', '.join(COMMANDS)}, got {change.status!r:.40} (status)"
            )
        document = read_document(change.document) if change.document else {}
        name = document.get("stream")
        if change.status == WARM:
            return self._read_piece(change, document)
        if name is not None and name != self.stream.name:
            if not isinstance(name, str) or name not in self.streams:
                known = ", ".join(sorted(self.streams))
                raise Rejected(f"unknown stream {quote_value(name)}; known: {known}; leave it out for all (stream)")
            return []
        if change.status == LISTS:
            return self._change_lists(change, document, log, arrival)

        def make_retired(entry: Entry) -> LogRow:
            named = (self.stream.name, entry.rule_id, entry.version)
            return LogRow(*named, "retired", "by retire_all", arrival, change.commit, RETIRE_ALL)

        time = None
        if change.status == "advance":
            try:
                time = parse_calendar_time(document.get("time"))
            except ValueError:
                raise Rejected(
                    f"advance needs a time such as '2026-01-31T12:00:00Z', got {quote_value(document.get('time'))} (time)"
                ) from None
        if change.status == RETIRE_ALL:
            for each in self.list_known_warming():
                self._drop_warming([each])
                log.append(make_retired(each.entry))
            for rule_id in list(self.entries):
                roles = self._list_roles(rule_id)
                ending = [each for each in roles if each.stream == self.stream.name and each.status != "retired"]
                left = [each for each in roles if each not in ending and each.is_in_force]
                if ending:
                    self._enter(*(left or [replace(ending[0], status="retired")]))
                log += map(make_retired, ending)
        until = None if time is None else str(to_text(to_utc(time)))
        message = "" if until is None else f"to {until}"
        log.append(
            LogRow(self.stream.name, "*", change.version, str(change.status), message, arrival, change.commit, until)
        )
        return [Command(str(change.status), time)]

    def _change_lists(
        self, change: RuleChange, document: Mapping[str, Any], log: list[LogRow], arrival: int | None
    ) -> list[Command]:
        """Moves to a commit of table `lists`; an earlier commit does nothing, so the row may be repeated.

        Raises:
            Rejected: The stream itself has not announced the commit, so its lists are unknown.
        """
        commit, message = document.get("commit"), document.get("message")
        if type(commit) is not int or not 0 <= commit < MAX_VERSION:
            raise Rejected(
                f"commit must be the number of a commit of table lists, got {quote_value(commit)}; {_DELETE_ROW} (commit)"
            )
        if not _is_by_engine(change):
            raise Rejected(f"the stream did not write this row; {_DELETE_ROW} (author)")
        if self.lists_commit is not None and commit <= self.lists_commit:
            return []
        if not (self._knows_lists(commit) if change.warms is None else change.warms):
            raise Rejected(f"the stream did not announce commit {commit} of table lists; {_DELETE_ROW} (commit)")
        self.lists_commit = commit
        text = cut_end(to_one_line(message), _MAX_LOG_CHARACTERS) if isinstance(message, str) else ""
        log.append(LogRow(self.stream.name, "*", commit, LIST_CHANGED, text, arrival, change.commit))
        return [Command(LISTS, commit=commit)]

    def _read_piece(self, change: RuleChange, document: Mapping[str, Any]) -> list[Command]:
        """Reads a piece of history, without changing the book: the state decides whether to take it."""
        if document.get("stream") != self.stream.name:
            return []
        try:
            piece = Piece.from_document(document)
        except ValueError:
            raise Rejected(NOT_BY_ENGINE) from None
        if not _is_by_engine(change):
            raise Rejected(NOT_BY_ENGINE)
        return [Command(WARM, piece=piece, warms=change.warms, rules_commit=change.commit)]


def _is_by_engine(change: RuleChange) -> bool:
    """Returns whether the engine wrote a row; in a replay the author is unknown and it counts as the engine's."""
    return change.author in (None, AUTHOR)


def _is_meant(change: RuleChange, entry: Entry) -> bool:
    """Returns whether a deleted row was that of an entry."""
    if change.version is None:
        # The version that the engine gave the row is unknown, but its status and document identify it.
        return _is_row_of(entry, change.status, change.document)
    return entry.version == change.version


def _is_row_of(entry: Entry, status: str | None, document: str | None) -> bool:
    """Returns whether a row has an entry's status and document, however the JSON is laid out."""
    return entry.status == status and is_same_document(entry.document, document)


def fill_role(roles: list[Entry], entry: Entry) -> list[Entry]:
    """Returns a rule's entries after a version has come into force, the challenger last.

    The version takes over the lane of the role that it fills. If it changes its role, it keeps its lane. If it becomes active
    or paused where only a shadow was, it takes over the shadow's lane, unless the shadow stays.

    Args:
        roles: The entries before.
        entry: The version that comes into force.
    """
    shadow = next((each for each in roles if each.status == SHADOW), None)
    main = next((each for each in roles if each.is_in_force and each.status != SHADOW), None)
    same = next((each for each in roles if each.version == entry.version), None)
    if not entry.is_in_force:
        return [entry if same is None else replace(entry, lane=same.lane)]
    if entry.status == SHADOW:
        left = None if main is same else main
        lane = next((each.lane for each in (same, shadow) if each is not None), 0 if left is None else 1 - left.lane)
        entry = replace(entry, lane=lane)
        return [entry] if left is None else [left, entry]
    left = shadow if entry.status == "paused" and shadow is not same else None
    taken = (same, main, None if left is not None else shadow)
    lane = next((each.lane for each in taken if each is not None), 0 if left is None else 1 - left.lane)
    entry = replace(entry, lane=lane)
    return [entry] if left is None else [entry, left]


def find_failing(in_force: list[Entry], version: int, evidence: str | None) -> Entry:
    """Finds the version that a quarantined row takes out of service: the one that its evidence names.

    Without evidence it is the version right before the row's, else the active one.

    Raises:
        Rejected: The named version is not in force.
    """
    failing = read_quarantined(evidence)
    if failing is None:
        return next((each for each in in_force if each.version == version - 1), in_force[0])
    for each in in_force:
        if each.version == failing:
            return each
    raise Rejected(f"superseded: version {quote_value(failing)}, which the row quarantines, is not in force (evidence)")


def _check_gate(change: RuleChange, roles: list[Entry], version: int) -> None:
    """Checks an active row against an enforced gate, unless the same version is in force already. Raises Rejected."""
    if not change.gate or change.status != "active":
        return
    if any(each.version == version and _is_row_of(each, "active", change.document) for each in roles):
        return
    document = read_document(change.document, WIDEST_LIMITS)
    if objection := find_objection(document, change.author, change.approved_by, change.evidence, required=change.gate):
        raise GateRejected(
            f"the gate is enforced: version {version} is not active, since {objection}; publish it as a draft, then run "
            f"`lookback rules activate {change.rule_id}`"
        )


def _write_nothing(action: str, message: str = "", version: int | None = None) -> None:
    """Drops a log row that concerns only other streams, which log it themselves."""


def order_changes(changes: Iterable[RuleChange]) -> list[RuleChange]:
    """Returns the net changes of each commit in the order in which they apply, at most one per version of a rule.

    A row that an overwrite or a MERGE removes and writes back unchanged is dropped; written back with other values, it is an
    update. If an UPDATE changes a row's rule_id or version, the old version is deleted, since each version in force needs
    its row.
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
    """Counts equal rows, whatever the kind of change."""
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


@functools.lru_cache(maxsize=_MAX_DECLARATIONS)
def _open_compiler(declaration: str) -> Callable[[str], CompiledRule | RuleError]:
    """Returns a cached function that compiles documents for a declared stream."""
    stream = Stream.from_dict(json.loads(declaration))
    return functools.lru_cache(maxsize=_MAX_COMPILED)(functools.partial(_compile, stream))


@functools.lru_cache(maxsize=_MAX_DECLARATIONS)
def _open_lanes(declaration: str) -> Callable[[str, int], CompiledRule | RuleError]:
    """Returns the same for lanes other than the first."""
    stream = Stream.from_dict(json.loads(declaration))
    return functools.lru_cache(maxsize=_MAX_COMPILED)(functools.partial(_compile, stream))


def _compile(stream: Stream, document: str, lane: int = 0) -> CompiledRule | RuleError:
    try:
        read = read_document(document)
        return compile_rule(read, stream, lane=lane) if lane else compile_rule(read, stream)
    except RuleError as error:
        # A new error, since the cache would keep the stack frames of the raised one in memory.
        return RuleError(error.name, error.problems)
    except NOT_THE_RULES:
        raise
    except Exception as error:  # noqa: BLE001 - a rule that cannot be read must not stop other rules
        return RuleError("?", [Problem("", f"the document cannot be read: {describe_error(error)}; rewrite the rule")])
