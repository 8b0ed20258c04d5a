"""Proves the recorded results: replays commits and compares row for row with `alerts` and `late_events`.

Rules come into force at the arrivals in rule_log, and events count until they are deleted, as in the stream. So the
proof finds and names every row that somebody changed, deleted or inserted.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812

from lookback.core.engine.schedule import WaitingChange
from lookback.core.errors import LookbackError, SetupError
from lookback.core.rules.account import Account
from lookback.core.rules.changes import RuleChange
from lookback.core.rules.compiled import CompiledRule
from lookback.core.rules.compiling import compile_rule
from lookback.core.rules.document import read_document
from lookback.core.rules.versions import WITH_STATE
from lookback.core.streams.alerts import ACTION_STRENGTHS
from lookback.core.streams.blocks import ALERTS_SCHEMA, LATE_SCHEMA
from lookback.core.streams.declaration import Stream
from lookback.core.streams.declarations import Declarations
from lookback.core.values.texts import count_noun
from lookback.spark.following.listfeed import ReplayedLists
from lookback.spark.platform.faults import explain_unreadable
from lookback.spark.platform.session import open_own_session
from lookback.spark.record.evaluations import Term
from lookback.spark.record.record import Record
from lookback.spark.replay.answers import ShardAnswers
from lookback.spark.replay.excuses import RECORDED, REPLAYED, Excuses, Unreached
from lookback.spark.replay.history import History
from lookback.spark.replay.plan import ReplayPlan
from lookback.spark.replay.reach import LostLists, LostRules, Reach
from lookback.spark.replay.saved import SavedState
from lookback.spark.replay.tasks import judge
from lookback.spark.stream.rebuild import find_last_arrival
from lookback.spark.tables.conflicts import SPARK_ERRORS

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from lookback.places import Place
    from lookback.spark.tables.lakehouse import Tables

_MAPS = ("key", "measures", "entities")


@dataclass(frozen=True)
class Proof:
    """Counts the rows of one rule by whether the table and the replay have them.

    Attributes:
        rule_id: The rule; None for the rows of late_events.
        alike: Rows that both have.
        only_recorded: Rows that only the table has.
        only_replayed: Rows that only the replay has.
        unprovable: Rows that only one side has, for a known reason: their event was deleted later, their version was
            quarantined, their commit was judged in pieces, an evaluation before the last `--fresh` wrote them,
            retention deleted them, a privacy request removed values from them, or they depend on events, rules or lists
            whose history is gone (see `Reach`, `LostRules`, `LostLists`).
        unjudged: Events that the rule wants, found by a plain read of all events, but that no shard of the replay
            judged. The stream judges in the same way and may have missed them too, without a row that differs.
    """

    rule_id: str | None
    alike: int
    only_recorded: int
    only_replayed: int
    unprovable: int
    unjudged: int = 0

    @property
    def holds(self) -> bool:
        """True if no row differs and no event is missing."""
        return not (self.only_recorded or self.only_replayed or self.unjudged)


def describe_match(rows: Iterable[Proof]) -> str:
    """Says whether the rows of a proof match a replay, and if they do, how many could not be compared."""
    rows = list(rows)
    if not all(each.holds for each in rows):
        return "the tables differ from a replay"
    unprovable = sum(each.unprovable for each in rows)
    if not unprovable:
        return "all rows match a replay"
    verb = "is" if unprovable == 1 else "are"
    return f"all rows that can be proved match a replay; {count_noun(unprovable, 'row')} {verb} unprovable"


@dataclass
class Proofs:
    """The result of a proof.

    Attributes:
        rows: The counts by rule, those of late_events last.
        commits: The first and the last commit that were compared.
        differences: The alerts that differ, with the columns of `alerts` except decided_at, `side` (recorded or
            replayed), and `times`: how many more copies that side has.
        gone: A sentence for the user on what cannot be proved because the first events, rules or lists are gone; empty
            if none are.
    """

    rows: list[Proof]
    commits: tuple[int, int]
    differences: DataFrame
    gone: str = ""
    _answers: ShardAnswers | None = None

    def close(self) -> None:
        """Frees the rows that Spark keeps for `differences`; you cannot read them afterwards."""
        if self._answers is not None:
            self._answers.close()

    def __enter__(self) -> Proofs:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def prove(
    tables: Tables,
    stream: Stream,
    streams: Mapping[str, Stream],
    *,
    first: int | None = None,
    last: int | None = None,
    saved: Place | None = None,
    accept: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Proofs:
    """Replays the events and compares the results of the commits from `first` to `last` with the rows in the tables.

    If the first commits of the events, rules or lists can no longer be read, rows that may depend on them do not count
    as differences (see `Reach`, `LostRules`, `LostLists`).

    Args:
        tables: The tables of the workspace.
        stream: The stream to prove.
        streams: All declared streams by name.
        first: The first commit to compare; None: the first of all.
        last: The last commit to compare; None: the last that the tables name, or with `saved` the last that `metrics`
            counts as judged, whose outputs are complete even while the stream runs.
        saved: A folder for the final state. The next proof with this folder continues from it and reads only new
            commits.
        accept: True saves the state even if rows differ. Otherwise it is not saved, so that the next proof finds the
            differences again.
        progress: Called with lines of progress for the user.

    Raises:
        SetupError: If the table is missing, or if both `first` and `saved` are given.
    """
    try:
        return _prove(tables, stream, streams, first, last, saved, accept, progress)
    except SPARK_ERRORS as error:
        explained = explain_unreadable(error, tables.holding(*streams.values()).identifier(stream.name))
        if explained is error:
            raise
        raise explained from error


def _prove(
    tables: Tables,
    stream: Stream,
    streams: Mapping[str, Stream],
    first: int | None,
    last: int | None,
    saved: Place | None,
    accept: bool,
    progress: Callable[[str], None] | None,
) -> Proofs:
    if saved is not None and first is not None:
        raise SetupError("a nightly proof begins after its saved state: leave out the first commit")
    tables = replace(tables.holding(*streams.values()), spark=open_own_session(tables.spark))
    tables.require_fields(stream)
    tables.require(stream)
    last = _find_last_written(tables, stream, nightly=saved is not None) if last is None else last
    record = Record.read(tables, stream, Term.find(tables, stream))
    declarations, begun_at = record.declarations, record.term.begun_at
    start = _Start.find(tables, stream, declarations, begun_at, saved, first, last)
    if start.history is None:
        return _prove_nothing(tables, (start.first, last))
    history, logged = start.history, record.logged
    plan, lost = _make_plan(record, streams, last)
    warmed = {f"{each.rule_id} {each.version}" for each in plan.warmed}
    if start.saved is not None and not warmed <= start.saved.warmed:
        # A version has come into force with a history of the first commits, which the saved state does not have.
        start = _Start.find(tables, stream, declarations, begun_at, None, first, last)
        assert start.history is not None
        history = start.history
    changed = max((each.commit for each in (*plan.first, *(each.change for each in plan.waiting))), default=None)
    plan = plan if start.saved is None else _go_on(plan, start.saved)
    reach = None if start.reach is None else start.reach.follow(tables, history, declarations, plan.rules)
    lists = ReplayedLists.find(tables, frozenset[str]().union(*(rule.lists for rule in plan.rules)))
    account = Account.of(plan.rules, (each.after for each in plan.waiting))
    plan = replace(
        plan, account=account, keeps_state=saved is not None, high=None if reach is None else reach.high, lists=lists
    )
    answers = judge(history.read_changes(tables), stream, plan, history.events, history.spans, progress, start.saved)
    unreached = Unreached(plan.rules, lost, reach, LostLists.find(lists.begins, logged, plan.rules))
    excuses = Excuses.find(tables, stream, history, record, unreached)
    between = (F.col("arrival") >= start.first) & (F.col("arrival") <= last)
    alerts, earlier = _compare_alerts(tables, stream, answers, start.select_alerts(between), begun_at)
    alerts = excuses.mark_alerts(alerts)
    late = excuses.mark_late(_compare_late(tables, stream, answers, between), record.term.begun_after)
    rows = _add(_count(alerts, F.col("rule_id")), "unprovable", earlier)
    rows = _add(rows, "unjudged", excuses.select_unjudged(answers.find_missing(account)))
    rows += _count(late, F.lit(None).cast("string"))
    rows += [] if rows and rows[-1].rule_id is None else [Proof(None, 0, 0, 0, 0)]
    if saved is not None and (accept or all(row.holds for row in rows)):
        state = SavedState(
            folder=saved / f"{history.last:020}",
            through=history.last,
            shards=answers.shards,
            reach=None if reach is None else vars(reach),
            warmed=frozenset(warmed),
            changed=changed,
            decided_at=_find_decided(tables, stream, history.last),
        )
        state.write(declarations, begun_at, answers.read_state())
    return Proofs(rows, (start.first, last), _list_differences(alerts), unreached.describe(tables, stream), answers)


@dataclass(frozen=True)
class _Start:
    """Where a replay begins: at the first commit that can be read, or after the state that the last proof saved.

    Attributes:
        first: The first commit to compare.
        history: The commits to judge; None if none are new.
        saved: The state to continue from.
        reach: The limits of the proof if the first events are gone, else None.
    """

    first: int
    history: History | None
    saved: SavedState | None = None
    reach: Reach | None = None

    @classmethod
    def find(
        cls,
        tables: Tables,
        stream: Stream,
        declarations: Declarations,
        begun_at: dt.datetime | None,
        saved: Place | None,
        first: int | None,
        last: int,
    ) -> _Start:
        """Finds where a proof begins. For the arguments see `prove` and, for begun_at, `Term`."""
        state = None if saved is None else SavedState.find(saved, declarations, begun_at)
        if state is None:
            history = History.read(tables, stream, last)
            return cls(first or 0, history, reach=Reach.find(tables, history))
        first = state.through + 1
        if first > min(last, tables.version(stream.name)):
            return cls(first, None)
        history = History.read(tables, stream, last, first)
        if history.first > first:
            # The commits right after the state are gone, so the state is useless.
            return cls(first, history, reach=Reach.find(tables, history))
        return cls(first, history, state, None if state.reach is None else Reach(**state.reach))  # type: ignore[arg-type]

    def select_alerts(self, between: Column) -> tuple[Column, Column]:
        """Returns two conditions that select the recorded and the replayed alerts to compare.

        They select the alerts of new commits, for which `between` is the condition, and those of the saved state's last
        commit that a command raised after the proof that saved it.
        """
        if self.saved is None:
            return between, between
        is_before = F.col("arrival") == self.saved.through
        return between | (is_before & (F.unix_micros("decided_at") > self.saved.decided_at)), between | is_before


def _prove_nothing(tables: Tables, commits: tuple[int, int]) -> Proofs:
    """Makes the result of a proof without new commits."""
    columns = (F.lit("").alias("side"), F.lit(0).alias("times"), *ALERTS_SCHEMA.names)
    return Proofs([Proof(None, 0, 0, 0, 0)], commits, tables.read("alerts").where("false").select(*columns))


def _go_on(plan: ReplayPlan, state: SavedState) -> ReplayPlan:
    """Drops the rule changes that a saved state already includes from a plan."""

    def is_new(each: WaitingChange) -> bool:
        if each.after != state.through:
            return each.after > state.through
        return state.changed is None or each.change.commit > state.changed

    return replace(plan, first=[], waiting=[each for each in plan.waiting if is_new(each)])


def _compare_alerts(
    tables: Tables,
    stream: Stream,
    answers: ShardAnswers,
    conditions: tuple[Column, Column],
    begun_at: dt.datetime | None,
) -> tuple[DataFrame, dict[str, int]]:
    """Compares the alerts. Also returns, by rule, the number of excluded rows, which an earlier evaluation wrote."""
    of_recorded, of_replayed = conditions
    recorded, earlier = tables.read("alerts").where((F.col("stream") == stream.name) & of_recorded), dict[str, int]()
    if begun_at is not None:
        older = recorded.where(F.col("decided_at") < F.lit(begun_at)).groupBy("rule_id").count()
        earlier = {row["rule_id"]: int(row["count"]) for row in older.collect()}
        recorded = recorded.where(F.col("decided_at") >= F.lit(begun_at))
    return _compare(recorded, answers.read_alerts().where(of_replayed), ALERTS_SCHEMA.names), earlier


def _compare_late(tables: Tables, stream: Stream, answers: ShardAnswers, between: Column) -> DataFrame:
    recorded = tables.read("late_events").where((F.col("stream") == stream.name) & between)
    return _compare(recorded, _merge_late(answers.read_late()).where(between), LATE_SCHEMA.names)


def _list_differences(alerts: DataFrame) -> DataFrame:
    """Lists the alerts that differ; see `Proofs.differences`."""
    differs = ~F.col("is_excused") & (F.col(RECORDED) != F.col(REPLAYED))
    more = F.col(RECORDED) - F.col(REPLAYED)
    side = F.when(more > 0, F.lit(RECORDED)).otherwise(F.lit(REPLAYED)).alias("side")
    return alerts.where(differs).select(side, F.abs(more).alias("times"), *ALERTS_SCHEMA.names)


def _add(rows: list[Proof], name: str, more: Mapping[str, int]) -> list[Proof]:
    """Adds a number to one of the counts of each rule."""
    counts = {str(row.rule_id): row for row in rows}
    for rule_id, number in more.items():
        row = counts.get(rule_id, Proof(rule_id, 0, 0, 0, 0))
        counts[rule_id] = replace(row, **{name: getattr(row, name) + number})
    return [counts[rule_id] for rule_id in sorted(counts)]


def proof_folder(tables: Tables, stream: Stream) -> Place:
    """Returns the folder, below the tables' root or volume, in which a stream's nightly proof saves its state."""
    return tables.find_place(f"{tables.files}/_proofs/{stream.name}")


def _find_decided(tables: Tables, stream: Stream, commit: int) -> int:
    """Finds when the last alert of a commit was decided, in microseconds; 0 if it has none."""
    own = tables.read("alerts").where((F.col("stream") == stream.name) & (F.col("arrival") == commit))
    ((decided_at,),) = own.agg(F.max(F.unix_micros("decided_at"))).collect()
    return decided_at or 0


def _find_last_written(tables: Tables, stream: Stream, *, nightly: bool) -> int:
    """Finds the last commit that an output names; for a nightly proof, the last that `metrics` counts as judged."""
    judged = find_last_arrival(tables, "metrics", stream, "judged") if nightly else None
    if judged is not None:
        return judged
    return max(0, *(find_last_arrival(tables, name, stream) or 0 for name in ("alerts", "late_events", "rule_log")))


def _make_plan(record: Record, streams: Mapping[str, Stream], last: int) -> tuple[ReplayPlan, LostRules]:
    """Plans a replay in which each rule change takes effect at its logged arrival, or never if it has none.

    Rules with unknown versions are left out.
    """
    schedule, declarations = record.make_schedule(), record.declarations
    first, waiting = list[RuleChange](), list[WaitingChange]()
    unknown = schedule.unexplained if record.begins else frozenset[str]()
    for change in map(schedule.restore_decision, record.changes):
        if change.commit not in schedule.arrivals or change.rule_id in unknown:
            continue
        after = schedule.arrivals[change.commit]
        if after is None:
            first.append(change)
        # An `advance` between this commit and the next raises alerts of this one.
        elif after <= last:
            waiting.append(WaitingChange(change, after))
    rules = _compile_all([*first, *(each.change for each in waiting)], declarations.widest)
    warmed = [each for each in schedule.warmed if each.arrival <= last and each.rule_id not in unknown]
    plan = ReplayPlan(rules, first, waiting, streams, erases=True, declarations=declarations, warmed=warmed)
    return plan, LostRules.find(record.begins, unknown, record.logged, waiting)


def _compile_all(changes: Iterable[RuleChange], stream: Stream) -> list[CompiledRule]:
    """Compiles the rules that may come into force; skips rows that are not a rule of the stream."""
    rules = []
    for change in changes:
        if change.status not in WITH_STATE:
            continue
        try:
            document = read_document(change.document)
            if document.get("stream") == stream.name:
                rules.append(compile_rule(document, stream))
        except LookbackError:
            continue  # the rulebook rejects it, as it did in the stream
    return rules


def _merge_late(late: DataFrame) -> DataFrame:
    """Merges the rows of all shards: keeps the row with the strongest action of each late event."""
    strength = F.lit(0)
    for action, number in ACTION_STRENGTHS.items():
        strength = F.when(F.col("action") == action, number).otherwise(strength)
    row = F.max_by(F.struct(*LATE_SCHEMA.names), strength).alias("row")
    return late.groupBy("event_id", "arrival").agg(row).select("row.*")


def _compare(recorded: DataFrame, replayed: DataFrame, names: list[str]) -> DataFrame:
    """Counts how often each side has each row; maps become JSON text."""

    def select(rows: DataFrame, side: str) -> DataFrame:
        columns: list[Column] = [
            F.to_json(F.array_sort(F.map_entries(name))).alias(name) if name in _MAPS else F.col(name) for name in names
        ]
        return rows.select(*columns, *(F.lit(int(side == each)).alias(each) for each in (RECORDED, REPLAYED)))

    both = select(recorded, RECORDED).unionByName(select(replayed, REPLAYED))
    return both.groupBy(*names).agg(*(F.sum(each).alias(each) for each in (RECORDED, REPLAYED)))


def _count(rows: DataFrame, rule_id: Column) -> list[Proof]:
    alike = F.least(RECORDED, REPLAYED)
    counts = rows.groupBy(rule_id.alias("rule_id")).agg(
        F.sum(alike).alias("alike"),
        *(
            F.sum(F.when(~F.col("is_excused"), F.col(side) - alike).otherwise(0)).alias(f"only_{side}")
            for side in (RECORDED, REPLAYED)
        ),
        F.sum(F.when(F.col("is_excused"), F.greatest(RECORDED, REPLAYED) - alike).otherwise(0)).alias("unprovable"),
    )
    return [Proof(**row.asDict()) for row in counts.orderBy("rule_id").collect()]
