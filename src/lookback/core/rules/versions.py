"""The versions of rules that one stream obeys: in force, or waiting until they have the history of their windows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from heapq import heappop, heappush
from typing import Any

from lookback.core.rules.compiled import WARMING_LANE, CompiledRule
from lookback.core.rules.roles import SHADOW, WARMING, name_role
from lookback.core.values.windows import SESSION

EVALUATED = ("active", SHADOW)
WITH_STATE = (*EVALUATED, "paused")
# The status of the rows of `*` with which the stream's driver hands out history.
WARM = "warm"
# The decision in rule_log about a version that has come into force after a warm-up, with its history or without one.
WITH_HISTORY, WITHOUT_HISTORY = "with_history", "without_history"
# Fields of a piece of history that are numbers; the rest are texts.
_NUMBERS = {"version", "through", "piece", "pieces"}


@dataclass(frozen=True)
class Entry:
    """A version of a rule that is in force. stream: where it is evaluated; highest: the highest version seen.

    broken: judging it raised an unexpected exception in this shard; it is not judged again until another row comes into
    force. lane: 0 or 1; two versions side by side have different lanes, and each lane has state of its own. ended: the
    version of a quarantine that ended the other role; an insert must be above it too. is_unseen: a version that gathers rows
    and is not in late_events yet, as in a replay before its row has come. role: the name under which what belongs
    to this role of the rule alone is counted and remembered.
    """

    rule_id: str
    version: int
    status: str
    document: str
    stream: str
    highest: int
    broken: bool = False
    lane: int = 0
    ended: int = 0
    is_unseen: bool = False
    role: str = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        # Not a property, since every batch asks for it many times.
        object.__setattr__(self, "role", name_role(self.rule_id, self.status))

    @property
    def is_in_force(self) -> bool:
        """True if the version keeps state."""
        return self.status in WITH_STATE

    def to_row(self) -> dict[str, Any]:
        """Returns the columns of the version, for JSON."""
        return {name: value for name, value in vars(self).items() if name != "role"}


@dataclass(frozen=True)
class Warming:
    """A version that comes into force once its features have the rows of the commits before it.

    entry: as it comes into force, but in a lane of its own. begun: the last commit judged before its features began to keep
    rows; None before the first. is_known: its row has come. is_replayed: its features have had all rows from the first commit
    on, as a replay lets them before the row comes. loaded: the pieces of history that its features have, of `pieces`, which is
    0 before the first one. is_void: `clear_state` came after `begun`, so that no row of the history counts any more. watermark:
    that of `begun`, in microseconds.
    """

    entry: Entry
    begun: int | None
    is_known: bool = True
    is_replayed: bool = False
    loaded: int = 0
    is_void: bool = False
    pieces: int = 0
    watermark: int | None = None

    @property
    def key(self) -> tuple[str, int]:
        """The rule's id and the version."""
        return self.entry.rule_id, self.entry.version

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Warming:
        """Reads what `to_row` wrote."""
        entry = {name: value for name, value in row.items() if name != WARMING}
        return cls(Entry(**entry), **row[WARMING])

    def to_row(self) -> dict[str, Any]:
        """Returns the columns of the version, and how far it is, for JSON."""
        state = {name: value for name, value in vars(self).items() if name != "entry"}
        return {**self.entry.to_row(), WARMING: state}

    def silence(self, rule: CompiledRule) -> Entry:
        """Returns the version as it gathers rows: it keeps state and raises no alerts.

        A session takes a late event or not by the events before it, which a version that is warming does not have yet; so
        it is in late_events from when it comes into force.
        """
        is_unseen = not self.is_known or rule.spec.kind == SESSION
        return replace(self.entry, status="paused", is_unseen=is_unseen)


class WarmingVersions(Mapping[tuple[str, int], Warming]):
    """The versions that are warming, by rule_id and version, each in a lane of its own.

    The time of a query about one rule does not depend on the versions of other rules.
    """

    def __init__(self, warming: Iterable[Warming] = ()) -> None:
        self._by_rule: dict[str, dict[int, Warming]] = {}
        self._count, self._used = 0, set[int]()
        # Lanes below `_end`, among them all that are free, as a heap; lanes from `_end` on were never used.
        self._left, self._end = list[int](), WARMING_LANE
        for each in warming:
            self.put(each)

    def __getitem__(self, key: tuple[str, int]) -> Warming:
        """Returns a version that is warming. Raises KeyError if there is none."""
        rule_id, version = key
        return self._by_rule[rule_id][version]

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """Yields rule_id and version of each."""
        return ((rule_id, version) for rule_id, versions in self._by_rule.items() for version in versions)

    def __len__(self) -> int:
        """Returns how many there are."""
        return self._count

    def has_rule(self, rule_id: str) -> bool:
        """Returns whether a rule has versions that are warming."""
        return rule_id in self._by_rule

    def list_versions(self, rule_id: str) -> list[Warming]:
        """Lists the versions of a rule that are warming, in the order in which they began to."""
        return list(self._by_rule.get(rule_id, {}).values())

    def list_known(self, rule_id: str) -> list[Warming]:
        """Lists those of them whose row has arrived."""
        return [each for each in self.list_versions(rule_id) if each.is_known]

    def put(self, warming: Warming) -> None:
        """Adds a version, or replaces its earlier state."""
        versions = self._by_rule.setdefault(warming.entry.rule_id, {})
        before = versions.get(warming.entry.version)
        if before is not None and before.entry.lane != warming.entry.lane:
            self._free(before.entry.lane)
        self._count += before is None
        versions[warming.entry.version] = warming
        lane = warming.entry.lane
        self._used.add(lane)
        while self._end <= lane:
            heappush(self._left, self._end)
            self._end += 1

    def drop(self, key: tuple[str, int]) -> Warming:
        """Removes a version that is warming, and returns it."""
        rule_id, version = key
        versions = self._by_rule[rule_id]
        dropped = versions.pop(version)
        self._count -= 1
        if not versions:
            del self._by_rule[rule_id]
        self._free(dropped.entry.lane)
        return dropped

    def find_free_lane(self) -> int:
        """Finds the first lane that no version has."""
        while self._left and self._left[0] in self._used:
            heappop(self._left)
        return self._left[0] if self._left else self._end

    def _free(self, lane: int) -> None:
        self._used.discard(lane)
        heappush(self._left, lane)


@dataclass(frozen=True)
class Piece:
    """A row of `*` with a piece of the history of a version that is warming, or without any: it then starts cold.

    through: the last commit of the history. piece: its number, from 1 on, of `pieces`. parcel: the name under which the
    shards find it; query: the evaluation that it is for.
    """

    rule_id: str
    version: int
    through: int
    piece: int = 0
    pieces: int = 0
    parcel: str = ""
    query: str = ""

    @property
    def is_last(self) -> bool:
        """True if the version comes into force after it."""
        return self.piece == self.pieces

    @property
    def is_cold(self) -> bool:
        """Whether the history is empty."""
        return self.pieces == 0

    def to_document(self, stream: str) -> str:
        """Returns the document of the row."""
        return json.dumps({"stream": stream, **vars(self)})

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Piece:
        """Reads what `to_document` wrote. Raises ValueError for anything else, which a person may have written."""
        values = {each.name: document.get(each.name) for each in fields(cls)}
        if any(type(value) is not (int if name in _NUMBERS else str) for name, value in values.items()):
            raise ValueError("not a piece of history")
        return cls(**values)  # type: ignore[arg-type]


def describe_start(piece: Piece) -> tuple[str, str]:
    """Returns the message and the decision of rule_log for a version that comes into force with a piece of history."""
    if piece.is_cold:
        return "without history: it could not be made", WITHOUT_HISTORY
    return "with the history of its windows", WITH_HISTORY


def describe_warming(begun: int | None) -> str:
    """Returns the message of rule_log for a version that begins to warm up after the commit `begun`."""
    return (
        f"its windows reach further back than what is kept: the events through commit {begun} are read from the table"
    )


def find_replaced(warming: Iterable[Warming], status: str) -> list[Warming]:
    """Returns those of a rule's versions that are warming which a later one of this status replaces.

    A challenger replaces a challenger, a paused version the other one, and any other status ends both.
    """
    if status == SHADOW:
        return [each for each in warming if each.entry.status == SHADOW]
    if status == "paused":
        return [each for each in warming if each.entry.status != SHADOW]
    return list(warming)
