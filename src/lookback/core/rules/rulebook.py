"""Applies the changes of the rules table in order, and knows which versions of each rule are in force.

A rule has two roles: one version is active or paused, and one, the challenger, may be in shadow beside it. All shards agree,
since each keeps a complete rulebook and applies the same changes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from lookback.core.errors import Problem, RuleError
from lookback.core.rules.changes import MOVED, RETIRE_ALL, ROW_DELETED, Rejected, RuleChange, order_changes
from lookback.core.rules.commands import (
    DELETE_ROW,
    LIST_CHANGED,
    LISTS,
    Command,
    read_command,
    read_lists_commit,
    read_piece,
    read_time,
)
from lookback.core.rules.compilecache import RuleCompiler
from lookback.core.rules.compiled import CompiledRule
from lookback.core.rules.document import read_document
from lookback.core.rules.filling import (
    check_count,
    check_gate,
    check_version,
    end_role,
    fill_role,
    fill_warmed,
    find_failing,
    is_meant,
    is_row_of,
    require_rule_id,
)
from lookback.core.rules.quarantine import NOT_THE_RULES, describe_error
from lookback.core.rules.roles import WARMING
from lookback.core.rules.rulelog import ACTIONS, LogRow
from lookback.core.rules.versions import (
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
from lookback.core.values.texts import cut_end, to_one_line
from lookback.core.values.times import to_utc

# Longer ids are cut in the log; valid ones have at most 100 characters.
_MAX_ID_CHARACTERS = 103
_MAX_LOG_CHARACTERS = 4_000


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
        self._compiler = RuleCompiler(self.streams)

    def apply(
        self,
        changes: Iterable[RuleChange],
        arrival: int | None,
        needs_history: Callable[[CompiledRule], bool] = lambda _: False,
        knows_lists: Callable[[int], bool] = lambda _: True,
    ) -> tuple[list[LogRow], list[Command]]:
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
            self._compiler = RuleCompiler(self.streams)

    def in_force(self) -> list[tuple[Entry, CompiledRule]]:
        """Returns the stream's readable rules in force, by rule_id, a challenger after the version beside it."""
        return [(entry, rule) for entry, rule in self._compile_own() if isinstance(rule, CompiledRule)]

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
        rule = self._compiler.compile_in_force(warming.entry)
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
        self._enter(*fill_warmed(self._list_roles(entry.rule_id), entry))
        message, decision = describe_start(piece)
        named = (self.stream.name, entry.rule_id, entry.version)
        row = LogRow(*named, ACTIONS[entry.status], message, arrival, rules_commit, decision)
        held = next(each for each in self._list_roles(entry.rule_id) if each.version == entry.version)
        return row, held

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
        known = self._compile_own()
        return [(entry, _join_problems(error.problems)) for entry, error in known if isinstance(error, RuleError)]

    def _compile_own(self) -> Iterator[tuple[Entry, CompiledRule | RuleError]]:
        for entry in sorted([*self.entries.values(), *self.challengers.values()], key=lambda each: each.rule_id):
            if entry.status in WITH_STATE and entry.stream == self.stream.name:
                yield entry, self._compiler.compile_in_force(entry)

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

    def _raise_highest(self, roles: list[Entry], highest: int) -> None:
        """Keeps the highest version of a rule whose roles stay."""
        if roles:
            main, *beside = roles
            self._enter(replace(main, highest=highest), *beside)

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
        for warming in self.warming.list_known(str(change.rule_id)):
            if is_meant(change, warming.entry):
                self._drop_warming([warming])
                write("retired", "the row of the warming version was deleted", warming.entry.version, ROW_DELETED)
                return
        for entry in self._list_roles(str(change.rule_id)):
            if is_meant(change, entry) and entry.status != "retired":
                self._enter(*end_role(self._list_roles(entry.rule_id), entry, replace(entry, status="retired")))
                if entry.stream == self.stream.name:
                    write("retired", "the row in force was deleted", decision=ROW_DELETED)
                return

    def _put(self, change: RuleChange, write: Any) -> None:
        rule_id = require_rule_id(change)
        roles = self._list_roles(rule_id)
        warming = self.warming.list_known(rule_id)
        present = [*roles, *(each.entry for each in warming)]
        highest = max([*(each.highest for each in roles[:1]), *(each.entry.version for each in warming)], default=0)
        version = change.version
        if version is None:
            same = any(is_row_of(each, change.status, change.document) for each in present)
            if change.change == "update" and same:
                return
            version = highest + 1
            change = replace(change, version=version)
        versions = {each.version for each in present}
        if change.change == "update" and versions and version not in versions and version < max(versions):
            return
        name = self._compiler.find_stream(change.document)
        concerns_us = self.stream.name in (name, *(each.stream for each in present))
        try:
            check_version(change, version, present, highest)
            self._check(change, roles, name, is_warming=bool(warming))
            check_gate(change, roles, version)
            self._put_in_force(
                change, roles, version, name, max(highest, version), write if concerns_us else _write_nothing
            )
        except (Rejected, RuleError):
            if concerns_us:
                raise

    def _check(self, change: RuleChange, roles: list[Entry], name: str, *, is_warming: bool) -> None:
        """Checks that a row can come into force. Raises Rejected and RuleError."""
        # Limits do not apply to a status that takes load off the stream.
        limited = change.status not in ("paused", "retired", "quarantined")
        if limited:
            read_document(change.document, self.streams[name].limits)
            if not is_warming:
                # Rules that are warming will be in force too.
                check_count(change, roles, self.streams[name], self._counts[name] + len(self._only_warming))
        self._compiler.check(name, str(change.document), change.rule_id, limited=limited)

    def _put_in_force(
        self, change: RuleChange, roles: list[Entry], version: int, name: str, highest: int, write: Any
    ) -> None:
        status, document = str(change.status), str(change.document)
        if status == "draft":
            self._raise_highest(roles, highest)
            write("drafted", version=version)
            return
        warming = self.warming.list_known(str(change.rule_id))
        present = [*roles, *(each.entry for each in warming)]
        if any(each.version == version and is_row_of(each, status, document) for each in present):
            return
        entry = Entry(str(change.rule_id), version, status, document, name, highest)
        goes_on = self._warm(change, entry, warming, write)
        if goes_on and status != "paused":
            self._raise_highest(roles, highest)
            return
        in_force = [each for each in roles if each.is_in_force]
        if status == "quarantined" and (in_force or warming):
            failing = find_failing([*in_force, *(each.entry for each in warming)], version, change.evidence)
            self._drop_warming(each for each in warming if each.entry.version == failing.version)
            self._enter(*end_role(self._list_roles(failing.rule_id), failing, entry))
        else:
            if not goes_on:
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

    def _warm(self, change: RuleChange, entry: Entry, warming: list[Warming], write: Any) -> bool:
        """Starts to warm an active or shadow version if its windows need history, and returns whether they do.

        A paused version only goes on with the warm-up of one with the same features, if there is one.
        """
        rule = self._compiler.compile_document(entry.stream, entry.document)
        if not entry.is_in_force or entry.stream != self.stream.name or isinstance(rule, RuleError):
            return False
        is_paused = entry.status == "paused"
        if not is_paused and not (self._needs_warming(entry) if change.warms is None else change.warms):
            return False
        replaced = find_replaced(warming, entry.status)
        known = self.warming.get((entry.rule_id, entry.version))
        same = next((each for each in replaced if self._compiler.has_same_states(each.entry, rule)), None)
        if is_paused and same is None:
            return False
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

    def _needs_warming(self, entry: Entry) -> bool:
        """Returns whether a version needs history, given the state that it would continue with."""
        entered = fill_role(self._list_roles(entry.rule_id), entry)
        lane = next(each.lane for each in entered if each.version == entry.version)
        rule = self._compiler.compile_document(entry.stream, entry.document, lane=lane)
        return isinstance(rule, CompiledRule) and self._needs_history(rule)

    def _command(self, change: RuleChange, log: list[LogRow], arrival: int | None) -> list[Command]:
        document = read_command(change, self.stream.name, self.streams)
        if document is None:
            return []
        if change.status == WARM:
            # The book does not change: the state decides whether to take the piece.
            piece = read_piece(change, document)
            return [Command(WARM, piece=piece, warms=change.warms, rules_commit=change.commit)]
        if change.status == LISTS:
            return self._change_lists(change, document, log, arrival)
        time = read_time(document) if change.status == "advance" else None
        if change.status == RETIRE_ALL:
            log += self._retire_all(change, arrival)
        until = None if time is None else str(to_text(to_utc(time)))
        message = "" if until is None else f"to {until}"
        log.append(
            LogRow(self.stream.name, "*", change.version, str(change.status), message, arrival, change.commit, until)
        )
        return [Command(str(change.status), time)]

    def _retire_all(self, change: RuleChange, arrival: int | None) -> list[LogRow]:
        """Retires all versions of the stream, and returns a log row for each."""
        retired = list[Entry]()
        for each in self.list_known_warming():
            self._drop_warming([each])
            retired.append(each.entry)
        for rule_id in list(self.entries):
            roles = self._list_roles(rule_id)
            ending = [each for each in roles if each.stream == self.stream.name and each.status != "retired"]
            left = [each for each in roles if each not in ending and each.is_in_force]
            if ending:
                self._enter(*(left or [replace(ending[0], status="retired")]))
            retired += ending
        named = [(self.stream.name, entry.rule_id, entry.version) for entry in retired]
        return [LogRow(*each, "retired", "by retire_all", arrival, change.commit, RETIRE_ALL) for each in named]

    def _change_lists(
        self, change: RuleChange, document: Mapping[str, Any], log: list[LogRow], arrival: int | None
    ) -> list[Command]:
        """Moves to a commit of table `lists`; an earlier commit does nothing, so the row may be repeated.

        Raises:
            Rejected: The stream itself has not announced the commit, so its lists are unknown.
        """
        commit, message = read_lists_commit(change, document), document.get("message")
        if self.lists_commit is not None and commit <= self.lists_commit:
            return []
        if not (self._knows_lists(commit) if change.warms is None else change.warms):
            raise Rejected(f"the stream did not announce commit {commit} of table lists; {DELETE_ROW} (commit)")
        self.lists_commit = commit
        text = cut_end(to_one_line(message), _MAX_LOG_CHARACTERS) if isinstance(message, str) else ""
        log.append(LogRow(self.stream.name, "*", commit, LIST_CHANGED, text, arrival, change.commit))
        return [Command(LISTS, commit=commit)]


def _write_nothing(action: str, message: str = "", version: int | None = None) -> None:
    """Drops a log row that concerns only other streams, which log it themselves."""


def _join_problems(problems: list[Problem]) -> str:
    return "; ".join(str(problem) for problem in problems)[:_MAX_LOG_CHARACTERS]
