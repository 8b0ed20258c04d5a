"""The plan of a replay: the rules to judge, their changes, and the results to keep besides alerts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lookback.core.engine.schedule import WaitingChange, Warmed
from lookback.core.rules.account import Account
from lookback.core.rules.changes import RuleChange
from lookback.core.rules.compiled import CompiledRule
from lookback.core.streams.alerts import MAX_EVIDENCE_IDS
from lookback.core.streams.declaration import Stream
from lookback.core.streams.declarations import Declarations
from lookback.core.streams.flagged import FlagPlace
from lookback.core.streams.measured import MeasuredPlace
from lookback.core.streams.watermarks import Mark
from lookback.core.values.lists import ListSource
from lookback.spark.checkpoints.parcels import Parcels
from lookback.spark.following.listfeed import ReplayedLists


@dataclass(frozen=True)
class ReplayPlan:
    """The rules of a replay and their changes.

    Attributes:
        rules: All rules that may come into force.
        first: The changes before the first commit.
        waiting: The changes that take effect after a later commit.
        streams: All declared streams by name.
        erases: True counts a deleted event until it is deleted, as in the stream. False never counts it, though it
            moves the watermark.
        tried: The candidates of a backtest, by the id under which each is judged. If empty, rules keep their own ids.
        flagging: See `Evaluator`.
        max_evidence: See `Evaluator`.
        keeps_state: Whether the answers include the final state.
        declarations: The declarations by which the stream was judged; None: the current one.
        high: The mark of all events before the commits that are read; None for none.
        lists: The lists that rules name, by commit.
        warmed: The versions that came into force with the history of their windows.
        history: Where each shard stores the rows that it gathered for the first rule.
        account: The counts to take of all events and of the events that shards take, to find events that no shard took.
    """

    rules: Sequence[CompiledRule]
    first: Sequence[RuleChange]
    waiting: Sequence[WaitingChange]
    streams: Mapping[str, Stream]
    erases: bool = False
    tried: Mapping[str, Tried] = field(default_factory=dict)
    flagging: Mapping[str, FlagPlace | MeasuredPlace] = field(default_factory=dict)
    max_evidence: int = MAX_EVIDENCE_IDS
    keeps_state: bool = False
    declarations: Declarations | None = None
    high: Mark | None = None
    lists: ListSource = field(default_factory=ReplayedLists)
    warmed: Sequence[Warmed] = ()
    history: HistoryPlace | None = None
    account: Account | None = None

    @property
    def gives_way(self) -> bool:
        """True if the replay runs beside a stream, which has priority."""
        return self.history is not None and self.history.gives_way


class HistoryPlace(NamedTuple):
    """The parcels of a history and its name there. If `gives_way` is true, the replay leaves a core to the stream."""

    parcels: Parcels
    name: str
    gives_way: bool


class Tried(NamedTuple):
    """A candidate of a backtest: its number and its rule's id. Versions and variants of one rule share this id."""

    number: int
    rule_id: str
