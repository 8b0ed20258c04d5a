"""Reads the history of rules and events: all versions of a rule, the rules in force after each change, change feeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from lookback.core.engine.schedule import STATUS_BY_ACTION, find_causes
from lookback.core.errors import ReviewError, RuleError
from lookback.core.explaining.evidence import Activation, ListHistory
from lookback.core.rules.changes import RuleChange
from lookback.core.rules.commands import LIST_CHANGED
from lookback.core.rules.compiled import CompiledRule
from lookback.core.rules.compiling import compile_rule
from lookback.core.rules.document import read_document
from lookback.core.rules.filling import fill_role
from lookback.core.rules.roles import WARMING, read_quarantined
from lookback.core.rules.rulelog import LogRow
from lookback.core.rules.versions import WITH_HISTORY, WITHOUT_HISTORY, Entry
from lookback.core.streams.arrival import arrival_number
from lookback.core.values.limits import WIDEST_LIMITS
from lookback.core.values.texts import first_line, join_words
from lookback.core.values.times import parse_time, to_utc
from lookback.spark.following.listfeed import ReplayedLists
from lookback.spark.record.evaluations import Term
from lookback.spark.record.record import Record
from lookback.spark.tables.conflicts import SPARK_ERRORS

if TYPE_CHECKING:
    import datetime as dt

    from pyspark.sql import DataFrame, Row

    from lookback.core.streams.declaration import Stream
    from lookback.spark.tables.lakehouse import Tables


_Result = TypeVar("_Result")
_Row = TypeVar("_Row", LogRow, RuleChange)
# Greater than any commit number.
_NOT_JUDGED = 2**62


class RuleVersion(NamedTuple):
    """A version of a rule: its row in the rules table, with a parsed document but no comment or time, and the rule."""

    row: dict[str, Any]
    rule: CompiledRule


class JudgedDocument(NamedTuple):
    """A document of a version, compiled, and the first and last commit whose rows it may have produced."""

    rule: CompiledRule
    first: int
    last: int


class _Document(NamedTuple):
    """A row of a rule's version.

    Attributes:
        change: The row.
        judged: The last commit that was judged before the stream applied the row; None for none.
    """

    change: RuleChange
    judged: int | None


class RuleHistory:
    """The versions of rules that a stream applied, without rejected rows.

    If the first commits of the rules table are gone, its current rows are used; see `describe_lost`.

    Attributes:
        term: The evaluation.
        declarations: The declarations by which the stream was judged. Rules are compiled for the one in force.
    """

    def __init__(
        self,
        tables: Tables,
        stream: Stream,
        streams: Mapping[str, Stream] | None = None,
        decided_at: dt.datetime | None = None,
    ) -> None:
        """Reads the history.

        Args:
            tables: The tables of the workspace.
            stream: The stream.
            streams: All declared streams by name; a version may have moved a rule to another stream.
            decided_at: When the explained row was written, which selects the evaluation; None: the last evaluation.
        """
        self.term = Term.find(tables, stream, decided_at)
        self._stream, self._streams = stream, {**(streams or {}), stream.name: stream}
        self._name = tables.identifier("rules")
        self._record = read_or_refuse(lambda: Record.read(tables, stream, self.term), "rules")
        self.declarations = self._record.declarations
        self._changes = _group_by_rule(self._record.changes)
        self._logged = _group_by_rule(self._record.logged)
        # By rule, the applied rows of its versions; by row of rule_log, the row of the rules table that caused it.
        self._documents: dict[str, dict[int, list[_Document]]] = {}
        self._causes: dict[LogRow, RuleChange] = {}
        self._compiled: dict[tuple[str, int, int], CompiledRule | None] = {}

    def find_version(self, rule_id: str, version: int, judged: int | None) -> RuleVersion:
        """Finds a version of a rule as it was once all commits up to `judged` were judged, else its first form.

        For a version that the stream never applied, such as a draft, the last row counts. A NULL version is the highest
        so far + 1.

        Raises:
            ReviewError: If the version is neither in the table nor in its history.
        """
        found = self._make_version(self._find_change(rule_id, version, judged), version, judged)
        if found is None:
            begins = f", which begins at commit {self._record.begins}" if self._record.begins else ""
            raise ReviewError(
                f"version {version} of rule {rule_id!r} is neither in the rules table nor in its history{begins}"
            )
        return found

    def list_updated(self, rule_id: str, version: int, arrival: int) -> list[RuleVersion]:
        """Lists the forms of a version after changes right after a commit.

        An advance after these changes may have produced rows of that commit.
        """
        documents = self._find_documents(rule_id).get(version, [])
        found = (self._make_version(each.change, version, arrival) for each in documents if each.judged == arrival)
        return [each for each in found if each is not None]

    def list_judged_documents(self, rule_id: str, version: int, first: int, last: int) -> list[JudgedDocument]:
        """Lists the documents of a version that may have produced rows of the commits from `first` to `last`.

        If an UPDATE took effect after a commit, either document may have produced the commit's rows, since an advance
        may have come later.

        Raises:
            ReviewError: If no row of the version is known.
        """
        self.find_version(rule_id, version, last - 1)
        documents = self._find_documents(rule_id)[version]
        listed: list[JudgedDocument] = []
        for at, each in enumerate(documents):
            begins = max(first, arrival_number(each.judged)) if at else first
            ends = min(last, arrival_number(documents[at + 1].judged)) if at + 1 < len(documents) else last
            judged = ends - 1 if ends > arrival_number(each.judged) else each.judged
            made = self._make_version(each.change, version, judged) if begins <= ends else None
            if made is None or made.rule.spec.stream != self._stream.name:
                continue
            if listed and listed[-1].rule.spec.document == made.rule.spec.document:
                begins = listed.pop().first
            listed.append(JudgedDocument(made.rule, begins, ends))
        return listed

    def _make_version(self, change: RuleChange | None, version: int, judged: int | None) -> RuleVersion | None:
        rule = None if change is None else self._compile(change, judged) or self._compile_widely(change)
        if change is None or rule is None:
            return None
        names = ("rule_id", "status", "author", "approved_by", "evidence")
        columns = {name: getattr(change, name) for name in names}
        return RuleVersion({**columns, "version": version, "document": dict(rule.spec.document)}, rule)

    def find_last(self, rule_id: str) -> int:
        """Finds the highest version of a rule. Raises ReviewError if none of its rows is a rule of the stream."""
        for version, documents in sorted(self._find_documents(rule_id).items(), reverse=True):
            if self._compile_widely(documents[-1].change) is not None:
                return version
        raise ReviewError(f"no version of rule {rule_id!r} is a rule of stream {self._stream.name!r}")

    def find_kept(
        self, rule_id: str, version: int, judged: int | None, lane: int = 0, change: RuleChange | None = None
    ) -> CompiledRule | None:
        """Finds a version that kept state; None if its row is unknown or was invalid under the declaration of the time.

        `change` is the version's row; None: its last row by then.
        """
        change = change or self._find_change(rule_id, version, judged)
        return None if change is None else self._compile(change, judged, lane)

    def find_obeyed(self, row: LogRow) -> RuleChange | None:
        """Finds the row of a rule's version that the stream applied when it wrote a row of rule_log.

        None if it is no longer known, or if the log's row is about a deletion or a command.
        """
        self._find_documents(str(row.rule_id))
        return self._causes.get(row)

    def list_obeyed(self, arrival: int) -> list[LogRow]:
        """Lists the rule changes and commands up to an alert's commit in rule_log, in the order of their effect.

        Changes right after that commit are included, since rows produced by an advance name the last commit before it.
        """
        rows = (row for row in self._record.logged if arrival_number(row.arrival) <= arrival)
        return [row for row in rows if row.action in STATUS_BY_ACTION or row.action in ("clear_state", "advance")]

    def list_obeyed_lists(self) -> list[tuple[int | None, int]]:
        """Lists the commits of the table `lists` that took effect, each after the last commit judged before it."""
        rows = (row for row in self._record.logged if row.action == LIST_CHANGED)
        return [(row.arrival, int(row.version or 0)) for row in rows]

    def find_quarantined(self, rule_id: str, version: int) -> Any:
        """Finds the version that a quarantined row disabled; None if the row does not name it."""
        rows = [each for each in self._changes.get(rule_id, []) if each.version == version]
        named = (read_quarantined(each.evidence) for each in rows)
        return next((each for each in named if each is not None), None)

    def describe_lost(self, rule_id: str) -> str:
        """Describes what is unknown about a rule's versions because the first commits of the rules table are gone.

        Empty if the rule does not depend on lost rows.
        """
        if not self._record.begins:
            return ""
        unexplained = self._record.make_schedule().unexplained
        parts = []
        if any(each.commit < self._record.begins for each in self._changes.get(rule_id, [])) or rule_id in unexplained:
            parts.append("earlier versions are read from the table's current rows")
        if rule_id in unexplained:
            parts.append(f"rows of {rule_id!r} were updated or deleted, so it may have had another document")
        if beside := [repr(name) for name in sorted(unexplained - {rule_id, "*"})]:
            parts.append(f"rows of {join_words(beside)} are missing, so state that they kept first may begin too late")
        return (
            f"The change feed of {self._name} begins at commit {self._record.begins}: {'; '.join(parts)}."
            if parts
            else ""
        )

    def _find_change(self, rule_id: str, version: int, judged: int | None) -> RuleChange | None:
        documents = self._find_documents(rule_id).get(version, [])
        before = [each for each in documents if arrival_number(each.judged) <= arrival_number(judged)]
        return (before or documents[:1])[-1].change if documents else None

    def _find_documents(self, rule_id: str) -> dict[int, list[_Document]]:
        """Finds the applied rows of each version of a rule, in order, or the last row of a version never applied."""
        if rule_id not in self._documents:
            self._documents[rule_id] = self._list_documents(rule_id)
        return self._documents[rule_id]

    def _list_documents(self, rule_id: str) -> dict[int, list[_Document]]:
        changes = [each for each in self._changes.get(rule_id, []) if each.change != "delete"]
        obeyed, never_obeyed = dict[int, list[_Document]](), dict[int, list[_Document]]()
        for change in changes:
            number = max([0, *never_obeyed]) + 1 if change.version is None else change.version
            never_obeyed[number] = [_Document(change, _NOT_JUDGED)]
        # By version, the row with which it began to wait for its history.
        begun = dict[int, RuleChange]()
        for row, cause in find_causes(self._logged.get(rule_id, []), changes):
            version = int(row.version or 0)
            if row.action == WARMING and cause is not None:
                begun[version] = cause
            if row.decision in (WITH_HISTORY, WITHOUT_HISTORY):
                cause = begun.get(version)  # noqa: PLW2901 - the command's own row has no document
            if cause is not None and STATUS_BY_ACTION.get(row.action, "draft") != "draft":
                self._causes[row] = cause
                obeyed.setdefault(version, []).append(_Document(cause, row.arrival))
        return {**never_obeyed, **obeyed}

    def may_reset(self, rule_id: str) -> bool:
        """Returns whether any version of a rule, in force or not, resets its windows on alert."""
        return any(map(_resets_on_alert, self._changes.get(rule_id, ())))

    def _compile(self, change: RuleChange, judged: int | None, lane: int = 0) -> CompiledRule | None:
        """Compiles a row for the declaration in force; lowered limits do not make a rule invalid."""
        declared = self.declarations.after(judged)
        slot = (str(change.document), lane, arrival_number(declared.after))
        if slot not in self._compiled:
            self._compiled[slot] = _compile(change, replace(declared.stream, limits=WIDEST_LIMITS), lane)
        return self._compiled[slot]

    def _compile_widely(self, change: RuleChange) -> CompiledRule | None:
        return _compile(change, self.declarations.widest)


def _resets_on_alert(change: RuleChange) -> bool:
    """Returns whether the document of a change has `reset_on_alert`; False if it cannot be read."""
    try:
        return bool(read_document(change.document).get("reset_on_alert"))
    except RuleError:
        return False


def _group_by_rule(rows: Iterable[_Row]) -> dict[str | None, list[_Row]]:
    groups: dict[str | None, list[_Row]] = {}
    for row in rows:
        groups.setdefault(row.rule_id, []).append(row)
    return groups


def _compile(change: RuleChange, stream: Stream, lane: int = 0) -> CompiledRule | None:
    try:
        rule = compile_rule(read_document(change.document, WIDEST_LIMITS), stream, lane=lane)
    except RuleError:
        return None
    return rule


def find_advances(log: Iterable[LogRow]) -> list[tuple[int | None, int]]:
    """Finds the `advance` commands in rule_log: (arrival, time in microseconds)."""
    return [(row.arrival, parse_time(row.decision)) for row in log if row.action == "advance" and row.decision]


def rank_version(row: Row) -> int:
    """Returns the version of a row of the rules table as a sort key; NULL, which becomes the highest, sorts last."""
    return 2**63 if row["version"] is None else int(row["version"])


def read_feed(tables: Tables, name: str, since: int | None = None) -> DataFrame:
    """Reads the table's change feed from the first commit, or from the first at or after `since`, to the last."""
    start = {"startingVersion": "0"}
    if since is not None:
        start = {"startingTimestamp": to_utc(since).replace(tzinfo=None).isoformat(sep=" ")}
    return read_or_refuse(lambda: tables.changes(name, start), name)


def read_or_refuse(read: Callable[[], _Result], name: str) -> _Result:
    """Runs `read` on a table; raises ReviewError if the table's history is gone."""
    try:
        return read()
    except SPARK_ERRORS as error:
        raise ReviewError(
            f"the history of table {name!r} can no longer be read: {first_line(error):.300}. "
            "Commits and removed files are kept for delta.logRetentionDuration and delta.deletedFileRetentionDuration."
        ) from error


def read_list_history(
    tables: Tables, rule: CompiledRule, activations: Iterable[Activation], history: RuleHistory
) -> ListHistory:
    """Reads the history of the lists named by a rule or by rules that may share its state."""
    names = rule.lists.union(*(each.rule.lists for each in activations if each.rule is not None))
    if not names:
        return ListHistory()
    source = read_or_refuse(lambda: ReplayedLists.find(tables, names), "lists")
    return ListHistory(source, history.list_obeyed_lists())


class Lanes:
    """The rules in force after each change, and the versions of an alert's rule that shared its state.

    Attributes:
        activations: The changes. In them, the explained version has lane 0, whatever lane it had in the stream, and
            another version of its rule has lane 1.
    """

    def __init__(self, log: Sequence[LogRow], history: RuleHistory, alert: Mapping[str, Any]) -> None:
        self._history, self._rule_id = history, alert["rule_id"]
        self._roles: dict[str, list[Entry]] = {}
        # By rule version, the last of its rows that was applied.
        self._obeyed: dict[tuple[str | None, int | None], RuleChange] = {}
        self._lanes: dict[int, int] = {}
        # Versions that were replaced by one with its own history, which their alerts did not reset.
        self._apart: set[int] = set()
        self._advances = 0
        # By rule_id and version, for versions that came into force with a history: how many advances preceded them.
        self._advances_before: dict[tuple[str, int], int] = {}
        changes: list[_LaneChange] = []
        cuts = history.declarations.cuts
        for row in log:
            while cuts and cuts[0] <= arrival_number(row.arrival):
                changes += self._list_redeclared(cuts.pop(0))
            if row.decision == WITH_HISTORY:
                if row.rule_id == self._rule_id and alert["rule_version"] not in self._lanes:
                    self._apart.update(self._lanes)
                self._advances_before[str(row.rule_id), int(row.version or 0)] = self._advances
            changes += self._list_changes(row)
            self._advances += row.action == "advance"
        for cut in cuts:
            changes += self._list_redeclared(cut)
        self._own = self._lanes.get(alert["rule_version"], 0)
        self.activations = [*self._list_openings(log, alert.get("arrival")), *self._activate_all(changes)]

    def list_roles(self, rule_id: str) -> list[Entry]:
        """Lists the versions of a rule that are in force after the last change, the one in shadow last."""
        return self._roles.get(rule_id, [])

    def is_own(self, version: int) -> bool:
        """Returns whether a version of the alert's rule shared the state of the alert's version."""
        return version not in self._apart and self._lanes.get(version, self._own) == self._own

    def _list_openings(self, log: Sequence[LogRow], arrival: int | None) -> Iterator[Activation]:
        """Yields an activation for each version that got the history of its windows before the alert's commit.

        Such a version keeps rows from the first commit on, separately. Only one version at a time keeps the state of a
        session or a sequence: first the waiting version, then the one in force.
        """
        for row in log:
            if row.decision == WITH_HISTORY and (arrival is None or arrival_number(row.arrival) < arrival):
                rule_id, version, active = str(row.rule_id), int(row.version or 0), row.arrival
                rule, name = self._history.find_kept(rule_id, version, active), f"history of {rule_id} {version}"
                if rule is not None and rule.store:
                    if rule_id != self._rule_id or self._lanes.get(version, self._own) != self._own:
                        continue
                    yield Activation(active, name, None, self._advances_before[rule_id, version])
                yield Activation(None, name, rule, is_silent=True)

    def _list_changes(self, row: LogRow) -> list[_LaneChange]:
        """Lists the changes that a row of rule_log makes."""
        status, rule_id = STATUS_BY_ACTION.get(row.action, ""), str(row.rule_id)
        if status == "draft" or row.action == "advance":
            return []
        if rule_id == "*":
            return [_LaneChange(row.arrival, "*", 0, None, self._advances)]
        before = {each.lane: each.version for each in self._roles.get(rule_id, ())}
        self._change_roles(row, rule_id, status)
        after = {each.lane: each.version for each in self._roles[rule_id]}
        changed = {lane for lane in before | after if before.get(lane) != after.get(lane)}
        # An UPDATE may have given a version another document.
        updated = {lane for lane, version in after.items() if version == row.version} - changed
        return [
            self._make_change(row.arrival, rule_id, lane, after.get(lane), is_same=lane in updated)
            for lane in sorted(changed | updated)
        ]

    def _make_change(
        self, arrival: int | None, rule_id: str, lane: int, version: int | None, *, is_same: bool
    ) -> _LaneChange:
        change = self._obeyed.get((rule_id, version))
        return _LaneChange(arrival, rule_id, lane, version, self._advances, change, is_same)

    def _list_redeclared(self, cut: int) -> list[_LaneChange]:
        """Lists all versions in force, which a new declaration of the stream may change."""
        return [
            self._make_change(cut, rule_id, each.lane, each.version, is_same=True)
            for rule_id, roles in sorted(self._roles.items())
            for each in roles
        ]

    def _change_roles(self, row: LogRow, rule_id: str, status: str) -> None:
        version, change = int(row.version or 0), self._history.find_obeyed(row)
        before = self._roles.get(rule_id, [])
        if change is not None:
            self._obeyed[rule_id, version] = change
        if status == "quarantined" and before:
            failing = self._history.find_quarantined(rule_id, version)
            left = [each for each in before if each.version != (version - 1 if failing is None else failing)]
        elif status == "retired" and row.decision:
            # The log names the version that a deletion or a command ended, or a version for another stream if it fills
            # a role.
            if change is not None:
                before = fill_role(before, Entry(rule_id, version, str(change.status), "", "", version))
            left = [each for each in before if each.version != version]
        else:
            left = fill_role(before, Entry(rule_id, version, status, "", "", version))
        self._roles[rule_id] = [each for each in left if each.is_in_force]
        if rule_id == self._rule_id:
            self._lanes.update({each.version: each.lane for each in self._roles[rule_id]})

    def _activate_all(self, changes: list[_LaneChange]) -> Iterator[Activation]:
        """Yields the activations that change a rule."""
        known: dict[str, CompiledRule | None] = {}
        for change in changes:
            lane = change.lane ^ self._own if change.rule_id == self._rule_id else change.lane
            name = f"{change.rule_id} beside" if lane else change.rule_id
            rule = None
            if change.version is not None:
                rule = self._history.find_kept(change.rule_id, change.version, change.arrival, lane, change.row)
            if not (change.is_same and _are_alike(known.get(name), rule)):
                yield Activation(change.arrival, name, rule, change.advances)
            known[name] = rule


class _LaneChange(NamedTuple):
    """A change of the version in a rule's lane.

    Attributes:
        arrival: The commit after which it took effect.
        rule_id: The rule; `*` if all state was cleared.
        lane: The lane.
        version: The new version; None if the lane becomes empty.
        advances: How many advances took effect before it.
        row: The version's row that was applied; None if unknown.
        is_same: The lane already has this version; only its document or the stream's declaration may have changed.
    """

    arrival: int | None
    rule_id: str
    lane: int
    version: int | None
    advances: int
    row: RuleChange | None = None
    is_same: bool = False


def _are_alike(one: CompiledRule | None, other: CompiledRule | None) -> bool:
    """Returns whether two compiled forms of a rule have the same document and keep the same state equally long."""
    if one is None or other is None:
        return one is other
    parts = [(each.fingerprint, each.needs, each.allowed_lateness) for each in (one, other)]
    return parts[0] == parts[1]
