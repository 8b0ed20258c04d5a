"""The rules and variants that a backtest tries, and the plans to judge them."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from lookback.core.engine.schedule import WaitingChange
from lookback.core.rules.changes import RuleChange
from lookback.core.rules.commands import LIST_CHANGED, LISTS
from lookback.core.rules.compiled import CompiledRule
from lookback.core.rules.variants import Variant
from lookback.core.streams.alerts import MAX_EVIDENCE_IDS
from lookback.core.streams.arrival import arrival_number
from lookback.core.streams.declaration import Stream
from lookback.core.streams.declarations import Declarations
from lookback.core.streams.flagged import FlagPlace
from lookback.core.streams.measured import MeasuredPlace
from lookback.core.values.limits import LIMITS
from lookback.core.values.lists import ListSource
from lookback.spark.following.listfeed import ListFeed, ReplayedLists
from lookback.spark.lists import TABLE as LISTS_TABLE
from lookback.spark.record.evaluations import Term
from lookback.spark.record.log import DECLARED, read_rows
from lookback.spark.replay.history import History
from lookback.spark.replay.plan import ReplayPlan, Tried

if TYPE_CHECKING:
    from pyspark.sql import Row

    from lookback.spark.tables.lakehouse import Tables

# The maximum number of rules and variants to judge at once.
MAX_TRIALS = LIMITS["rules"].most


@dataclass(frozen=True)
class Trial:
    """A candidate or one of its variants, which is judged under a temporary id.

    Attributes:
        rule_id: The rule id that its alerts have.
        version: The version that its alerts have.
        variant: The variant.
        rule: The compiled rule, with the temporary id.
        place: The place of its flags if it writes no alerts, else None.
    """

    rule_id: str
    version: int
    variant: Variant
    rule: CompiledRule
    place: FlagPlace | None


class PlacedCommand(NamedTuple):
    """A command and the last commit that was judged before it; None if it preceded the first commit."""

    change: RuleChange
    after: int | None


@dataclass(frozen=True)
class Course:
    """What happened to a stream apart from events and rules: commands in order, declarations, and lists by commit.

    `warnings` has sentences for the user, about lists that never had a value.
    """

    commands: Sequence[PlacedCommand]
    declarations: Declarations
    lists: ListSource
    warnings: Sequence[str] = ()

    @classmethod
    def read(
        cls,
        tables: Tables,
        stream: Stream,
        history: History,
        names: Collection[str],
        *,
        lists_now: bool = False,
        only_logged: bool = False,
    ) -> Course:
        """Reads the course of a stream's last evaluation from rule_log.

        A commit of the table `lists` that was not logged takes effect at its time, but not before an earlier commit.

        Args:
            tables: The tables of the workspace.
            stream: The stream.
            history: The commits that are judged.
            names: The lists that the rules name.
            lists_now: True uses the current lists from the beginning.
            only_logged: True ignores list commits that were not logged, like a running stream that has yet to apply
                them.
        """
        term = Term.find(tables, stream)
        commands, lists = _read_commands(tables, stream, history, term), ReplayedLists()
        if names and tables.may_have_rows(LISTS_TABLE):
            changes = ListFeed.read(tables, names=names)
            lists = ReplayedLists.of(changes)
            if lists_now:
                commands = [each for each in commands if each.change.status != LISTS]
                commands.append(_place_lists(stream, changes.last, None))
            elif not only_logged:
                logged = {each.change.version: each.after for each in commands if each.change.status == LISTS}
                commands += _place_by_time(tables, stream, history, list(changes.changes), logged)
        numbered = [replace(each.change, commit=at) for at, each in enumerate(commands, MAX_TRIALS)]
        placed = [PlacedCommand(change, each.after) for change, each in zip(numbered, commands, strict=True)]
        unknown = sorted(set(names) - lists.steps.keys())
        warnings = [f"list {name!r} never existed; it counts as empty" for name in unknown]
        return cls(placed, _read_declarations(tables, stream, history, term), lists, warnings)


def _read_commands(tables: Tables, stream: Stream, history: History, term: Term) -> list[PlacedCommand]:
    """Reads the stream's commands from rule_log in order, without commit numbers."""
    commands = []
    for row in read_rows(tables, stream, term):
        if row["action"] not in ("advance", "clear_state", LIST_CHANGED):
            continue
        after = history.find_place(tables, row["arrival"], row["logged_at"])
        if row["action"] == LIST_CHANGED:
            commands.append(_place_lists(stream, row["version"], after))
            continue
        document = {"stream": stream.name, **({"time": row["decision"]} if row["action"] == "advance" else {})}
        commands.append(PlacedCommand(RuleChange("insert", 0, "*", None, row["action"], json.dumps(document)), after))
    return commands


def _place_lists(stream: Stream, commit: int, after: int | None) -> PlacedCommand:
    """Makes the command by which a commit of the table `lists` takes effect after the commit `after` of the events."""
    document = {"stream": stream.name, "commit": commit}
    return PlacedCommand(RuleChange("insert", 0, "*", commit, LISTS, json.dumps(document)), after)


def _place_by_time(
    tables: Tables, stream: Stream, history: History, commits: Sequence[int], logged: Mapping[int | None, int | None]
) -> list[PlacedCommand]:
    """Places commits of the table `lists` that no evaluation logged after the events that were committed before them.

    `logged` maps the logged commits to the last commit of events judged before them; a later list commit takes effect
    no earlier.
    """
    if logged.keys() >= set(commits):
        return []
    times = {row["version"]: row["at"] for row in _read_times(tables, LISTS_TABLE)}
    stamps: Sequence[int] = history.stamps
    numbers: Sequence[int] = range(1, len(stamps) + 1)
    if not stamps:
        events = sorted((row["version"], row["at"]) for row in _read_times(tables, stream.name))
        numbers, stamps = [number for number, _ in events], list(accumulate((at for _, at in events), max))
    placed = []
    reached = -1
    for commit in commits:
        if commit in logged:
            reached = max(reached, arrival_number(logged[commit]))
            continue
        # If the log entry of a commit was cleaned up, its time is unknown, but long ago.
        at = bisect_right(stamps, times.get(commit, 0))
        after = max(reached, numbers[at - 1] if at else -1)
        placed.append(_place_lists(stream, commit, None if after < 0 else after))
    return placed


def _read_times(tables: Tables, name: str) -> list[Row]:
    return tables.history(name).selectExpr("version", "unix_micros(timestamp) AS at").collect()


def _read_declarations(tables: Tables, stream: Stream, history: History, term: Term) -> Declarations:
    """Reads the declarations by which the commits of a history were judged."""
    logged = [row for row in read_rows(tables, stream, term) if row["action"] == DECLARED]
    places = [history.find_place(tables, row["arrival"], row["logged_at"]) for row in logged]
    return Declarations.from_rows(stream, zip(places, (row["decision"] for row in logged), strict=True))


def make_plan(
    trials: Mapping[int, Trial],
    stream: Stream,
    course: Course,
    since_commit: int | None = None,
    *,
    flagging: Mapping[int, FlagPlace | MeasuredPlace],
    paused: Collection[int] = (),
    max_evidence: int = MAX_EVIDENCE_IDS,
) -> ReplayPlan:
    """Plans a replay with the trials in force from the beginning, and commands taking effect where the stream had them.

    Args:
        trials: The trials by number.
        stream: The stream.
        course: The course of the stream.
        since_commit: The first commit whose events may raise alerts; None: the first of all.
        flagging: See `Evaluator`.
        paused: The numbers of the trials that only gather state.
        max_evidence: See `Evaluator`.
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
    first += [command.change for command in course.commands if command.after is None]
    waiting += [WaitingChange(change, after) for change, after in course.commands if after is not None]
    # The stream's own limit on rules may be lower.
    widened = replace(stream, limits=replace(stream.limits, rules=MAX_TRIALS))
    ids = {at: trial.rule.spec.rule_id for at, trial in trials.items()}
    return ReplayPlan(
        rules=[trial.rule for trial in trials.values()],
        first=first,
        waiting=waiting,
        streams={stream.name: widened},
        declarations=course.declarations.with_limits(widened),
        lists=course.lists,
        tried={rule_id: Tried(at, trials[at].rule_id) for at, rule_id in ids.items()},
        flagging={ids[at]: place for at, place in flagging.items()},
        max_evidence=max_evidence,
    )
