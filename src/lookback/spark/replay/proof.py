"""Proves what is recorded: judges commits anew from the tables, and compares with `alerts` and `late_events` row for row.

Rules come into force at the arrivals that rule_log has, and events count until they are deleted, as they did in the stream.
So a row that somebody changed, deleted or inserted is found and named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812

from lookback.core.engine.schedule import Schedule, WaitingChange
from lookback.core.errors import LookbackError, SetupError
from lookback.core.rules.compiled import CompiledRule, compile_rule
from lookback.core.rules.document import read_document
from lookback.core.rules.roles import read_quarantined
from lookback.core.rules.rulebook import WITH_STATE, LogRow, RuleChange
from lookback.core.streams.alerts import ACTION_STRENGTHS
from lookback.core.streams.blocks import ALERTS_SCHEMA, LATE_SCHEMA
from lookback.core.streams.declaration import Stream
from lookback.core.streams.declarations import Declarations
from lookback.spark.platform.session import open_own_session
from lookback.spark.replay.history import History
from lookback.spark.replay.reach import Reach
from lookback.spark.replay.saved import SavedState
from lookback.spark.replay.tasks import Answers, Plan, judge
from lookback.spark.stream.declared import read_declarations
from lookback.spark.stream.rebuild import (
    find_deletions,
    find_last_arrival,
    find_new_beginning,
    read_log,
    read_rule_changes,
)
from lookback.spark.tables.history import find_first_readable

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from lookback.spark.tables.lakehouse import Tables

_MAPS = ("key", "measures")
_RECORDED, _REPLAYED = "recorded", "replayed"


@dataclass(frozen=True)
class Proof:
    """The rows of one rule, or of late_events where rule_id is None, by whether the table and the replay have them.

    unprovable: rows that only one has, for a known reason: they are about events that were deleted later, of a version that was
    quarantined, or of a commit that was judged in pieces, an evaluation before the last `--fresh` wrote them, the
    settings' retention deleted them, or they depend on events whose history is gone (see `Reach`).
    """

    rule_id: str | None
    alike: int
    only_recorded: int
    only_replayed: int
    unprovable: int

    @property
    def holds(self) -> bool:
        """Whether no row differs."""
        return not (self.only_recorded or self.only_replayed)


@dataclass
class Proofs:
    """The result of a proof. rows: by rule, late_events last. commits: the first and the last that were compared.

    gone: for people, what cannot be proved since the first events cannot be read any more; empty if they can.
    differences: the rows that differ, with the columns of `alerts` (decided_at left out), `side` (recorded or replayed) and
    `times`, how often more than the other side.
    """

    rows: list[Proof]
    commits: tuple[int, int]
    differences: DataFrame
    gone: str = ""
    _answers: Answers | None = None

    def close(self) -> None:
        """Frees the rows that Spark keeps for `differences`, which cannot be read afterwards."""
        if self._answers is not None:
            self._answers.close()

    def __enter__(self) -> Proofs:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def prove(
    tables: Tables, stream: Stream, streams: Mapping[str, Stream], *, first: int | None = None, last: int | None = None,
    saved: Path | None = None, accept: bool = False, progress: Callable[[str], None] | None = None,
) -> Proofs:  # fmt: skip
    """Judges the events anew, and compares the rows of the commits from `first` to `last` with those in the tables.

    first: None for the first commit; last: None for the last that the tables name. streams: every declared stream by name.
    saved: a folder for the state that was reached; the next proof with it goes on after this one and reads only new commits,
    by default up to the last that `metrics` counts as judged, whose outputs are whole also while the stream goes on.
    Where rows differ, nothing is saved, so that the next proof finds them too, unless `accept` is true. Where the first commits
    of the events cannot be read any more, rows that may depend on them are no difference (see `Reach`).
    Raises SetupError if the table or the first commits of the rules are missing, or for `first` beside `saved`.
    """
    if saved is not None and first is not None:
        raise SetupError("a proof that goes on from its saved state begins after it: leave out the first commit")
    tables = replace(tables.holding(*streams.values()), spark=open_own_session(tables.spark))
    tables.require(stream)
    if last is None:
        judged = None if saved is None else find_last_arrival(tables, "metrics", stream, "judged")
        last = _find_last_written(tables, stream) if judged is None else judged
    begun = find_new_beginning(tables, stream)
    begun_at = None if begun is None else begun["logged_at"]
    declarations = read_declarations(tables, stream, begun_at)
    before = None if saved is None else SavedState.find(saved, declarations, begun_at)
    if before is not None:
        first = before.through + 1
        if first > min(last, tables.version(stream.name)):
            nothing = (
                tables.read("alerts")
                .where("false")
                .select(F.lit("").alias("side"), F.lit(0).alias("times"), *ALERTS_SCHEMA.names)
            )
            return Proofs([Proof(None, 0, 0, 0, 0)], (first, last), nothing)
    history = History.read(tables, stream, last, first if before is not None else None)
    if find_first_readable(tables, "rules"):
        raise SetupError(
            f"the first commits of {tables.identifier('rules')} cannot be read any more, and without them nothing can be judged "
            "anew; keep its log and files for as long as you want to prove"
        )
    if before is not None and history.first > before.through + 1:
        before = None  # commits between are gone
    logged = read_log(tables, stream)
    changes = read_rule_changes(tables, 0)
    plan = _make_plan(changes, declarations, streams, logged, last)
    if before is not None:
        waiting = [each for each in plan.waiting if each.after >= before.through]
        plan = replace(plan, first=[], waiting=waiting)
    if before is None:
        reach = Reach.find(tables, history)
    else:
        reach = None if before.reach is None else Reach(**before.reach)  # type: ignore[arg-type]
    if reach is not None:
        reach = reach.follow(tables, history, declarations, plan.rules)
    plan = replace(plan, keeps_state=saved is not None, high=None if reach is None else reach.high)
    answers = judge(history.read_changes(tables), stream, plan, history.events, history.spans, progress, before)
    between = (F.col("arrival") >= (first or 0)) & (F.col("arrival") <= last)
    deleted = find_deletions(logged)
    gone = _find_deleted_events(tables, stream, history)
    cut = sorted({row.arrival for row in logged if row.action == "commit_cut" and row.arrival is not None})
    own = F.col("stream") == stream.name
    recorded, earlier = tables.read("alerts").where(own & between), dict[str, int]()
    if begun is not None:
        older = recorded.where(F.col("decided_at") < F.lit(begun_at)).groupBy("rule_id").count()
        earlier = {row["rule_id"]: int(row["count"]) for row in older.collect()}
        recorded = recorded.where(F.col("decided_at") >= F.lit(begun_at))
    alerts = _compare(recorded, answers.read_alerts().where(between), ALERTS_SCHEMA.names)
    unreached = [F.lit(False)] * 2 if reach is None else [reach.excuse(plan.rules, late=late) for late in (False, True)]
    alerts = _excuse(alerts, gone, deleted["alerts"], _find_broken(logged, changes), cut, unreached[0])
    late = _compare(
        tables.read("late_events").where(own & between),
        _merge_late(answers.read_late()).where(between),
        LATE_SCHEMA.names,
    )
    late = _excuse(late, gone, deleted["late_events"], [], cut, unreached[1])
    if begun is not None and begun["arrival"] is not None:
        # A late event has no time at which it was written.
        older_late = (F.col(_RECORDED) > F.col(_REPLAYED)) & (F.col("arrival") <= begun["arrival"])
        late = late.withColumn("is_excused", F.col("is_excused") | older_late)
    rows = [
        *_add_earlier(_count(alerts, F.col("rule_id")), earlier),
        *(_count(late, F.lit(None).cast("string")) or [Proof(None, 0, 0, 0, 0)]),
    ]
    differs = ~F.col("is_excused") & (F.col(_RECORDED) != F.col(_REPLAYED))
    more = F.col(_RECORDED) - F.col(_REPLAYED)
    side = F.when(more > 0, F.lit(_RECORDED)).otherwise(F.lit(_REPLAYED)).alias("side")
    differences = alerts.where(differs).select(side, F.abs(more).alias("times"), *ALERTS_SCHEMA.names)
    if saved is not None and (accept or all(row.holds for row in rows)):
        SavedState.write(
            saved,
            declarations,
            begun_at,
            history.last,
            answers.shards,
            answers.read_state(),
            None if reach is None else vars(reach),
        )
    said = "" if reach is None else reach.describe(tables.identifier(stream.name), plan.rules)
    return Proofs(rows, (first or 0, last), differences, said, answers)


def _add_earlier(rows: list[Proof], earlier: Mapping[str, int]) -> list[Proof]:
    """Adds, as unprovable, the rows of each rule that an earlier evaluation wrote."""
    counts = {str(row.rule_id): row for row in rows}
    for rule_id, number in earlier.items():
        row = counts.get(rule_id, Proof(rule_id, 0, 0, 0, 0))
        counts[rule_id] = replace(row, unprovable=row.unprovable + number)
    return [counts[rule_id] for rule_id in sorted(counts)]


def proof_folder(tables: Tables, stream: Stream) -> Path:
    """Returns the folder in which a stream's nightly proof keeps its state, which is below the tables' root or volume."""
    return Path(f"{tables.files}/_proofs/{stream.name}")


def _find_last_written(tables: Tables, stream: Stream) -> int:
    """Finds the last commit that an output names."""
    return max(0, *(find_last_arrival(tables, name, stream) or 0 for name in ("alerts", "late_events", "rule_log")))


def _make_plan(
    changes: Sequence[RuleChange], declarations: Declarations, streams: Mapping[str, Stream], logged: Iterable[LogRow],
    last: int,
) -> Plan:  # fmt: skip
    """Plans that each change of the rules takes effect at the arrival that the log has; those without one never do."""
    schedule = Schedule.from_log(changes, logged, declarations.last, streams, None, declarations=declarations)
    first, waiting = list[RuleChange](), list[WaitingChange]()
    for change in map(schedule.restore_gate, changes):
        if change.commit not in schedule.arrivals:
            continue
        after = schedule.arrivals[change.commit]
        if after is None:
            first.append(change)
        elif after < last:
            waiting.append(WaitingChange(change, after))
    rules = _compile_all([*first, *(each.change for each in waiting)], declarations.widest)
    return Plan(rules, first, waiting, streams, erases=True, declarations=declarations)


def _compile_all(changes: Iterable[RuleChange], stream: Stream) -> list[CompiledRule]:
    """Compiles the rules that may come into force; rows that are no rule of the stream are left out."""
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


def _find_deleted_events(tables: Tables, stream: Stream, history: History) -> DataFrame:
    """Finds the ids of the events that were deleted, also after the commits that are compared."""
    changes = tables.read_changes(stream.name, history.first, tables.version(stream.name))
    deleted = changes.where(F.col("_change_type") == "delete")
    return deleted.select(F.col(stream.event_id).cast("string").alias("_deleted_id")).distinct()


def _merge_late(late: DataFrame) -> DataFrame:
    """Merges the rows of all shards: of each late event the one with the strongest action."""
    strength = F.lit(0)
    for action, number in ACTION_STRENGTHS.items():
        strength = F.when(F.col("action") == action, number).otherwise(strength)
    row = F.max_by(F.struct(*LATE_SCHEMA.names), strength).alias("row")
    return late.groupBy("event_id", "arrival").agg(row).select("row.*")


def _compare(recorded: DataFrame, replayed: DataFrame, names: list[str]) -> DataFrame:
    """Counts how often each side has each row; maps are written as text."""

    def select(rows: DataFrame, side: str) -> DataFrame:
        columns: list[Column] = [
            F.to_json(F.array_sort(F.map_entries(name))).alias(name) if name in _MAPS else F.col(name) for name in names
        ]
        return rows.select(*columns, *(F.lit(int(side == each)).alias(each) for each in (_RECORDED, _REPLAYED)))

    both = select(recorded, _RECORDED).unionByName(select(replayed, _REPLAYED))
    return both.groupBy(*names).agg(*(F.sum(each).alias(each) for each in (_RECORDED, _REPLAYED)))


def _find_broken(logged: Iterable[LogRow], changes: Iterable[RuleChange]) -> list[str]:
    """Lists the versions that were quarantined, as `rule_id version`: nobody knows at which event each shard stopped."""
    named = {(row.rule_id, row.version): read_quarantined(row.evidence) for row in changes}
    rows = [row for row in logged if row.action == "quarantined" and row.version]
    return [f"{row.rule_id} {named.get((row.rule_id, row.version)) or (row.version or 0) - 1}" for row in rows]


def _excuse(
    rows: DataFrame, gone: DataFrame, deleted_through: int, broken: list[str], cut: Sequence[int], unreached: Column
) -> DataFrame:
    """Marks the rows whose difference is explained.

    gone: the ids of events that were deleted; deleted_through: the last arrival of the rows that retention deleted; broken:
    the versions that were quarantined; cut: the commits that were judged in pieces; unreached: whether a row depends on events
    whose history is gone.
    """
    marked = rows.join(F.broadcast(gone), F.col("event_id") == F.col("_deleted_id"), "left")
    by_retention = (F.col(_RECORDED) == 0) & (F.col("arrival") <= deleted_through)
    excused = F.col("_deleted_id").isNotNull() | by_retention | F.col("arrival").isin(cut) | unreached
    if broken:
        excused = excused | F.concat_ws(" ", "rule_id", "rule_version").isin(broken)
    return marked.withColumn("is_excused", excused).drop("_deleted_id")


def _count(rows: DataFrame, rule_id: Column) -> list[Proof]:
    alike = F.least(_RECORDED, _REPLAYED)
    counts = rows.groupBy(rule_id.alias("rule_id")).agg(
        F.sum(alike).alias("alike"),
        *(
            F.sum(F.when(~F.col("is_excused"), F.col(side) - alike).otherwise(0)).alias(f"only_{side}")
            for side in (_RECORDED, _REPLAYED)
        ),
        F.sum(F.when(F.col("is_excused"), F.greatest(_RECORDED, _REPLAYED) - alike).otherwise(0)).alias("unprovable"),
    )
    return [Proof(**row.asDict()) for row in counts.orderBy("rule_id").collect()]
