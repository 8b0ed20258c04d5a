"""Reads how rules and events came to be: every version of a rule, what was in force after each change, the change feeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812

from lookback.core.errors import ReviewError, RuleError
from lookback.core.explaining.evidence import (
    Activation,
)
from lookback.core.rules.compiled import CompiledRule, compile_rule
from lookback.core.rules.document import read_document
from lookback.core.rules.roles import read_quarantined
from lookback.core.rules.rulebook import ACTIONS, Entry, fill_role
from lookback.core.values.texts import first_line
from lookback.core.values.times import parse_time, to_utc

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row

    from lookback.core.streams.declaration import Stream
    from lookback.spark.tables.lakehouse import Tables


_Result = TypeVar("_Result")


STATUS_BY_ACTION = {action: status for status, action in ACTIONS.items()}


class RuleVersion(NamedTuple):
    """A version of a rule: its row in the rules table, with the document parsed, and the rule."""

    row: dict[str, Any]
    rule: CompiledRule


class RuleHistory:
    """Every row that the rules table ever held, in the order in which rows apply. Its rules are those of one stream."""

    def __init__(self, tables: Tables, stream: Stream) -> None:
        feed = read_feed(tables, "rules").where(F.col("_change_type").isin("insert", "update_postimage"))
        self._rows = sorted(feed.collect(), key=lambda row: (row["_commit_version"], rank_version(row)))
        self._stream = stream
        self._kept: dict[tuple[str, int, int], CompiledRule | None] = {}

    def find_version(self, rule_id: str, version: int) -> RuleVersion:
        """Finds a version of a rule, as inserted first or as updated since. A NULL version is the highest so far + 1.

        Raises ReviewError if it is neither in the table nor in its history.
        """
        highest, found = 0, None
        for row in self._rows:
            rule = _compile_accepted(row, self._stream) if row["rule_id"] == rule_id else None
            if rule is None:
                continue
            number = highest + 1 if row["version"] is None else int(row["version"])
            highest = max(highest, number)
            if number == version and (found is None or row["_change_type"] != "insert"):
                found = row, rule
        if found is None:
            raise ReviewError(f"version {version} of rule {rule_id!r} is not in the rules table, nor in its history")
        row, rule = found
        columns = {name: value for name, value in row.asDict().items() if not name.startswith("_")}
        return RuleVersion({**columns, "version": version, "document": dict(rule.spec.document)}, rule)

    def find_last(self, rule_id: str) -> int:
        """Finds the highest version of a rule. Raises ReviewError if no row of it is a rule of the stream."""
        highest = 0
        for row in self._rows:
            if row["rule_id"] == rule_id and _compile_accepted(row, self._stream) is not None:
                highest = max(highest, highest + 1 if row["version"] is None else int(row["version"]))
        if not highest:
            raise ReviewError(f"no version of rule {rule_id!r} is a rule of stream {self._stream.name!r}")
        return highest

    def find_kept(self, rule_id: str, version: int, lane: int = 0) -> CompiledRule | None:
        """Finds a version that kept state; None if it was changed by hand since, so that its rows are not known any more."""
        slot = (rule_id, version, lane)
        if slot not in self._kept:
            try:
                rule = self.find_version(rule_id, version).rule
                self._kept[slot] = compile_rule(rule.spec, self._stream, lane=lane) if lane else rule
            except ReviewError:
                self._kept[slot] = None
        return self._kept[slot]

    def find_quarantined(self, rule_id: str, version: int) -> Any:
        """Finds the version that a quarantined row took out of service; None if the row does not name it."""
        rows = [row for row in self._rows if (row["rule_id"], row["version"]) == (rule_id, version)]
        named = [read_quarantined(row["evidence"]) for row in rows if "evidence" in row]
        return next((each for each in named if each is not None), None)

    def find_advances(self, log: list[Row]) -> list[tuple[int | None, int]]:
        """Finds the `advance` commands in rule_log: (arrival, time in microseconds)."""
        rows = [row for row in self._rows if row["rule_id"] == "*" and row["status"] == "advance"]
        times = {row["version"]: parse_time(read_document(row["document"])["time"]) for row in rows}
        return [(row["arrival"], times[row["version"]]) for row in log if row["action"] == "advance"]


def rank_version(row: Row) -> int:
    """Returns the version of a row of the rules table; NULL, which becomes the highest, comes last."""
    return 2**63 if row["version"] is None else int(row["version"])


def _compile_accepted(row: Row, stream: Stream) -> CompiledRule | None:
    try:
        return compile_rule(read_document(row["document"]), stream)
    except RuleError:
        return None


def read_feed(tables: Tables, name: str, since: int | None = None) -> DataFrame:
    """Reads the table's change feed to its last commit, from the first commit or from those made at `since` on."""
    start = {"startingVersion": "0"}
    if since is not None:
        start = {"startingTimestamp": to_utc(since).replace(tzinfo=None).isoformat(sep=" ")}
    return read_or_refuse(lambda: tables.changes(name, start), name)


def read_or_refuse(read: Callable[[], _Result], name: str) -> _Result:
    """Reads something of a table; raises ReviewError if its history is gone."""
    try:
        return read()
    except PySparkException as error:
        raise ReviewError(
            f"the history of table {name!r} cannot be read as it stood: {first_line(error):.300}. "
            "Commits and removed files are kept for delta.logRetentionDuration and delta.deletedFileRetentionDuration."
        ) from error


def read_log(tables: Tables, stream: Stream, arrival: int) -> list[Row]:
    """Reads the changes of rules up to the alert's commit from rule_log, in the order in which they took effect."""
    actions = [*STATUS_BY_ACTION, "clear_state", "advance"]
    log = tables.read("rule_log").where((F.col("stream") == stream.name) & F.col("action").isin(actions))
    # The rows that an advance brings name the last commit before it.
    last = F.col("arrival") < arrival + F.when(F.col("action") == "advance", 1).otherwise(0)
    log = log.where(F.col("arrival").isNull() | last)
    in_order = (F.col("arrival").asc_nulls_first(), F.col("batch_id"), F.col("version").asc_nulls_last())
    return log.orderBy(*in_order).collect()


class Lanes:
    """The rules that were in force after each change, and which versions of an alert's rule shared its state.

    activations: the changes. The version that is explained has lane 0 in them, whatever it had in the stream; a version of
    its rule beside it has lane 1.
    """

    def __init__(self, log: list[Row], history: RuleHistory, alert: Mapping[str, Any]) -> None:
        self._history, self._rule_id = history, alert["rule_id"]
        self._roles: dict[str, list[Entry]] = {}
        self._lanes: dict[int, int] = {}
        changes: list[tuple[int | None, str, int, int | None]] = []
        for row in log:
            status = STATUS_BY_ACTION.get(row["action"], "")
            if status == "draft" or row["action"] == "advance":
                continue
            if row["rule_id"] == "*":
                changes.append((row["arrival"], "*", 0, None))
                continue
            before = {each.lane: each.version for each in self._roles.get(row["rule_id"], ())}
            self._change_roles(row, status)
            after = {each.lane: each.version for each in self._roles[row["rule_id"]]}
            lanes = sorted(lane for lane in before | after if before.get(lane) != after.get(lane))
            changes += [(row["arrival"], row["rule_id"], lane, after.get(lane)) for lane in lanes]
        self._own = self._lanes.get(alert["rule_version"], 0)
        self.activations = [self._activate(*change) for change in changes]

    def list_roles(self, rule_id: str) -> list[Entry]:
        """Lists the versions of a rule that are in force in the end, the one in shadow last."""
        return self._roles.get(rule_id, [])

    def is_own(self, version: int) -> bool:
        """Returns whether a version of the alert's rule shared the state of the alert's version."""
        return self._lanes.get(version, self._own) == self._own

    def _change_roles(self, row: Row, status: str) -> None:
        rule_id, version = row["rule_id"], row["version"]
        before = self._roles.get(rule_id, [])
        if status == "quarantined" and before:
            failing = self._history.find_quarantined(rule_id, version)
            left = [each for each in before if each.version != (version - 1 if failing is None else failing)]
        elif status == "retired" and row["message"] and version in {each.version for each in before}:
            # The log names the version that a deletion or a command ended.
            left = [each for each in before if each.version != version]
        else:
            left = fill_role(before, Entry(rule_id, version, status, "", "", version))
        self._roles[rule_id] = [each for each in left if each.is_in_force]
        if rule_id == self._rule_id:
            self._lanes.update({each.version: each.lane for each in self._roles[rule_id]})

    def _activate(self, arrival: int | None, rule_id: str, lane: int, version: int | None) -> Activation:
        lane = lane ^ self._own if rule_id == self._rule_id else lane
        rule = None if version is None else self._history.find_kept(rule_id, version, lane)
        return Activation(arrival, f"{rule_id} beside" if lane else rule_id, rule)
