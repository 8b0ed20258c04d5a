"""The rules and variants that a backtest tries, and the plans by which they are judged."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql import functions as F  # noqa: N812

from lookback.core.engine.schedule import WaitingChange
from lookback.core.rules.compiled import CompiledRule
from lookback.core.rules.rulebook import RuleChange
from lookback.core.rules.variants import Variant
from lookback.core.streams.alerts import MAX_EVIDENCE_IDS
from lookback.core.streams.declaration import Stream
from lookback.core.streams.declarations import Declarations
from lookback.core.streams.flagged import FlagPlace
from lookback.core.values.limits import LIMITS
from lookback.spark.replay.history import History
from lookback.spark.replay.tasks import Plan, Tried
from lookback.spark.stream.declared import read_declared
from lookback.spark.stream.rebuild import find_begun_at

if TYPE_CHECKING:
    from lookback.spark.tables.lakehouse import Tables

# The most rules and variants that are judged at once.
MAX_TRIALS = LIMITS["rules"].most


@dataclass(frozen=True)
class Trial:
    """A candidate or a variant of it, which is judged under an id of its own beside all others.

    rule_id, version: those of its alerts. place: the place of its flags if it writes no alerts, else None.
    """

    rule_id: str
    version: int
    variant: Variant
    rule: CompiledRule
    place: FlagPlace | None


class PlacedCommand(NamedTuple):
    """A command, and the last commit that was judged before it; None if it came before the first one."""

    change: RuleChange
    after: int | None


def read_commands(tables: Tables, stream: Stream, history: History) -> list[PlacedCommand]:
    """Reads the commands that rule_log has of the stream, in their order."""
    if not tables.may_have_rows("rule_log"):
        return []
    own = (F.col("stream") == stream.name) & F.col("action").isin("advance", "clear_state")
    commands = []
    for at, row in enumerate(tables.read("rule_log").where(own).orderBy("logged_at", "batch_id").collect(), MAX_TRIALS):
        time = str(row["message"]).removeprefix("to ") if row["action"] == "advance" else None
        document = {"stream": stream.name, **({} if time is None else {"time": time})}
        change = RuleChange("insert", at, "*", None, row["action"], json.dumps(document))
        commands.append(PlacedCommand(change, history.find_place(tables, row["arrival"], row["logged_at"])))
    return commands


def read_declarations(tables: Tables, stream: Stream, history: History) -> Declarations:
    """Reads by which declarations the commits of a history were judged."""
    logged = read_declared(tables, stream, find_begun_at(tables, stream))
    rows = [(history.find_place(tables, after, logged_at), text) for after, text, logged_at in logged]
    return Declarations.from_rows(stream, rows)


def make_plan(
    trials: Mapping[int, Trial], stream: Stream, commands: Sequence[PlacedCommand], since_commit: int | None = None, *,
    declarations: Declarations, flagging: Mapping[int, FlagPlace], paused: Collection[int] = (),
    max_evidence: int = MAX_EVIDENCE_IDS,
) -> Plan:  # fmt: skip
    """Plans a replay with trials in force from the beginning, and with the commands where they took effect in the stream.

    trials: by number. since_commit: the first commit whose events may raise alerts; None: the first of all. declarations:
    of the stream. flagging, max_evidence: see `Evaluator`. paused: the trials that only gather state.
    """
    first, waiting = list[RuleChange](), list[WaitingChange]()
    for at, trial in trials.items():
        rule_id, version = trial.rule.spec.rule_id, trial.version
        text = json.dumps(trial.rule.spec.document, ensure_ascii=False, default=str)
        is_silent = at in paused or since_commit is not None
        first.append(RuleChange("insert", at, rule_id, version, "paused" if is_silent else "active", text))
        if since_commit is not None and at not in paused:
            activation = RuleChange("update", at, rule_id, version, "active", text)
            waiting.append(WaitingChange(activation, since_commit - 1))
    first += [command.change for command in commands if command.after is None]
    waiting += [WaitingChange(change, after) for change, after in commands if after is not None]
    # The stream's own limit may be lower.
    widened = replace(stream, limits=replace(stream.limits, rules=MAX_TRIALS))
    ids = {at: trial.rule.spec.rule_id for at, trial in trials.items()}
    return Plan(
        [trial.rule for trial in trials.values()], first, waiting, {stream.name: widened},
        declarations=declarations.with_limits(widened),
        tried={rule_id: Tried(at, trials[at].rule_id) for at, rule_id in ids.items()},
        flagging={ids[at]: place for at, place in flagging.items()}, max_evidence=max_evidence,
    )  # fmt: skip
