"""Computes what rules measure of every event, as each stood when the event arrived: a training set without leaks.

The rules count as in force since before the first commit, as in a backtest. Unlike a backtest, an event that is deleted
later counts until then, as it did in the stream.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from lookback.core.errors import SetupError
from lookback.core.rules.compiled import WINDOW_COMPLETE, CompiledRule
from lookback.core.rules.compiling import compile_rule
from lookback.core.rules.keys import KeyPart
from lookback.core.rules.rulelog import LogRow
from lookback.core.rules.variants import Variant
from lookback.core.streams.declaration import Stream
from lookback.core.streams.measured import ARRIVAL, EVENT_ID, EVENT_TIME, MeasuredPlace, count_values
from lookback.core.values.types import BOOLEAN, DataType
from lookback.core.values.windows import EVENT, LOOKBACK, SEQUENCE
from lookback.spark.labels import read_labels
from lookback.spark.platform.session import open_own_session
from lookback.spark.replay.backtest import Candidate
from lookback.spark.replay.facts import count_failures, describe_discarded, list_errors
from lookback.spark.replay.history import History
from lookback.spark.replay.outputs import PARQUET, count_written, write_new
from lookback.spark.replay.tasks import judge
from lookback.spark.replay.trials import MAX_TRIALS, Course, Trial, make_plan
from lookback.spark.tables.sqltexts import quote_name

if TYPE_CHECKING:
    from lookback.spark.tables.lakehouse import Tables

_LABEL = ("positive", "label", "labelled_at")
_COLUMNS = (EVENT_ID, EVENT_TIME, ARRIVAL, WINDOW_COMPLETE, *_LABEL)
_IDS = (EVENT_ID, EVENT_TIME, ARRIVAL)
# What only decides which events raise alerts, and what these show. Resets also depend on the first three.
_OF_ALERTS = ("when", "effective_from", "effective_until", "suppress")
_SHOWN = ("message", "entity", "entities", "tests")
# A task holds what its rules measure of the events of a span: about this many values, of eight bytes each.
_SPAN_VALUES = 32_000_000
_MIN_SPAN_EVENTS = 100_000


@dataclass(frozen=True)
class FeatureRule:
    """A rule whose measures were computed.

    Attributes:
        rule_id: The rule's id.
        version: The rule's version.
        columns: The names of its columns.
        failures: How many times the rule could not judge an event because of an error. If it had seen the event, its
            columns are NULL there.
    """

    rule_id: str
    version: int
    columns: Sequence[str]
    failures: int


@dataclass
class Features:
    """What rules measure of the events of a stream.

    Attributes:
        rows: One row for each event that at least one rule judges: event_id (exact text), event_time, arrival, the
            entries of the keys, `rule_id.measure` and `rule_id.window_complete` for each rule, window_complete if all
            these are, and positive, label and labelled_at. The columns of a rule that does not judge the event are
            NULL.
        rules: The rules.
        events: The number of events of the stream.
        commits: The first and the last commit.
        errors: The rows that a stream would have written to rule_log.
        warnings: Sentences for the user, about events that cannot be read.
    """

    rows: DataFrame
    rules: list[FeatureRule]
    events: int
    commits: tuple[int, int]
    errors: list[LogRow] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    _kept: ExitStack = field(default_factory=ExitStack)

    def write(self, place: str, format: str = PARQUET) -> int:
        """Writes the rows to a new place. Returns their number.

        Args:
            place: A new or empty folder; for Delta also catalog.schema.table for a new table.
            format: parquet or delta.

        Raises:
            SetupError: If the table exists or the folder is not empty.
        """
        write_new(self.rows, place, format)
        return count_written(self.rows.sparkSession, place, format)

    def close(self) -> None:
        """Frees what Spark keeps for `rows`; you cannot read them afterwards."""
        self._kept.close()

    def __enter__(self) -> Features:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def compute_features(
    tables: Tables,
    stream: Stream,
    candidates: Sequence[Candidate],
    *,
    since: int | None = None,
    until: int | None = None,
    as_of: dt.datetime | None = None,
    streams: Mapping[str, Stream] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Features:
    """Computes the measures of every event that lookback rules judge, as of the event's arrival.

    They equal, to the digit, those by which a stream judges the event if the rules are in force since before the first
    commit. `when`, `suppress` and a range of effective times limit alerts, not events; with `reset_on_alert` the alerts
    reset windows as in the stream. With `late: revise` an event has the measures of its first verdict.

    Args:
        tables: The tables of the workspace.
        stream: The stream of the events.
        candidates: The rules.
        since: The first event time to include, in microseconds; None for all. Earlier events still count in windows.
        until: The event time in microseconds at which the rows end, exclusive; None for no end.
        as_of: Ignores labels that became known after this time; None: now. It has no influence on measures.
        streams: The declared streams by name, for labels; see `read_labels`.
        progress: Called with lines of progress for the user.

    Raises:
        RuleError: If a rule is wrong.
        SetupError: If the table or its change feed is missing, a rule has no window that ends at the event, or two
            columns would have one name.
    """
    trials = [_make_trial(at, each, stream) for at, each in enumerate(candidates)]
    keys = list(dict.fromkeys(trial.rule.key for trial in trials))
    groups = [keys.index(trial.rule.key) for trial in trials]
    names = [_name_columns(trial) for trial in trials]
    _require_names(trials, keys)
    tables = replace(tables.holding(stream), spark=open_own_session(tables.spark))
    tables.require_fields(stream)
    tables.require(stream)
    width = count_values(measure.type for trial in trials for measure in trial.rule.measures)
    history = History.read_whole(tables, stream, max(_MIN_SPAN_EVENTS, _SPAN_VALUES // max(1, width)))
    lists = frozenset[str]().union(*(trial.rule.lists for trial in trials))
    course = Course.read(tables, stream, history, lists)
    places = {at: MeasuredPlace(groups[at], names[at], since, until) for at in range(len(trials))}
    plan = replace(make_plan(dict(enumerate(trials)), stream, course, flagging=places), erases=not history.stamps)
    changes = history.read_lasting(tables) if history.stamps else history.read_changes(tables)
    with ExitStack() as kept:
        answers = judge(changes, stream, plan, history.events, history.spans, progress)
        kept.callback(answers.close)
        parts = []
        for at, key in enumerate(keys):
            own = [(trial.rule, names[number]) for number, trial in enumerate(trials) if groups[number] == at]
            parts.append(answers.read_measured(at, _describe_columns(key, own)))
        rows = _add_labels(_merge(parts), tables, stream, as_of, streams)
        if history.deletes:
            rows = _drop_deleted(rows, tables, stream)
        if history.stamps:
            rows = rows.withColumn(ARRIVAL, F.lit(None).cast("bigint"))
        failures = count_failures(answers, plan)
        return Features(
            rows=_select_columns(rows, keys, names),
            rules=[
                FeatureRule(trial.rule_id, trial.version, [*names[at].values()], failures[at])
                for at, trial in enumerate(trials)
            ],
            events=history.events,
            commits=(history.first, history.last),
            errors=list_errors(answers, plan),
            warnings=[*filter(None, [history.warning]), *course.warnings, *describe_discarded(answers)],
            _kept=kept.pop_all(),
        )


def _make_trial(at: int, candidate: Candidate, stream: Stream) -> Trial:
    """Makes the trial of a rule without what limits or shows alerts. Raises RuleError and SetupError."""
    document = dict(candidate.document)
    given = compile_rule(document, stream)
    if given.spec.kind != LOOKBACK:
        raise SetupError(
            f"{candidate.rule_id}: {_explain_kind(given.spec.kind)}; features are of rules with a window that ends at "
            "each event, such as window: 1 hour"
        )
    dropped = _SHOWN if given.spec.reset_on_alert else (*_SHOWN, *_OF_ALERTS)
    bare = {name: value for name, value in document.items() if name not in dropped}
    rule = compile_rule({"when": "true", **bare, "rule_id": f"trial-{at}"}, stream)
    return Trial(candidate.rule_id, candidate.version, Variant(document), rule, None)


def _explain_kind(kind: str) -> str:
    if kind == EVENT:
        return "an event rule measures nothing"
    if kind == SEQUENCE:
        return "a sequence measures nothing"
    return f"a {kind} window is measured when it ends, not when an event arrives"


def _name_columns(trial: Trial) -> dict[str, str]:
    """Returns the column of each measure of a rule, and of its window_complete."""
    return {name: f"{trial.rule_id}.{name}" for name in (*(each.name for each in trial.rule.measures), WINDOW_COMPLETE)}


def _require_names(trials: Sequence[Trial], keys: Sequence[tuple[KeyPart, ...]]) -> None:
    """Raises SetupError if two columns would have one name, or there are too many rules."""
    if len(trials) > MAX_TRIALS:
        raise SetupError(f"{len(trials):,} rules exceed the limit of {MAX_TRIALS:,}; take fewer at once")
    ids = [trial.rule_id for trial in trials]
    if again := [each for each in ids if ids.count(each) > 1]:
        raise SetupError(f"{again[0]} is given twice; name each rule once")
    known: dict[str, KeyPart] = {}
    for part in (part for key in keys for part in key):
        other = known.setdefault(part.name.lower(), part)
        if other.column != part.column:
            raise SetupError(
                f"two rules call different entries of their keys {part.name}; give one of them another name, or take "
                "these rules one at a time"
            )
        if part.name.lower() in _COLUMNS:
            raise SetupError(
                f"group_by: {part.name} has the name of a column that every row has; give it another one in "
                f"the rule, as in {{{part.name}_key: {part.column}}}"
            )


def _describe_columns(
    key: Sequence[KeyPart], rules: Sequence[tuple[CompiledRule, Mapping[str, str]]]
) -> dict[str, DataType | str]:
    """Returns the types of the columns of a table (see `MeasuredEvents`) by name."""
    columns: dict[str, Any] = {EVENT_ID: "string", EVENT_TIME: "timestamp", ARRIVAL: "bigint"}
    columns |= {part.name: part.type for part in key}
    for rule, names in rules:
        columns |= {names[measure.name]: measure.type for measure in rule.measures}
        columns[names[WINDOW_COMPLETE]] = BOOLEAN
    return columns


def _merge(parts: Sequence[DataFrame]) -> DataFrame:
    """Merges the tables of rules with different keys into one with a row for each event."""
    if len(parts) == 1:
        return parts[0]
    own = [[name for name in part.columns if name not in _IDS] for part in parts]
    packed = [
        part.select(*_IDS, F.struct(*map(quote_name, names)).alias(f"part{at}"))
        for at, (part, names) in enumerate(zip(parts, own, strict=True))
    ]
    united = reduce(lambda one, other: one.unionByName(other, allowMissingColumns=True), packed)
    merged = united.groupBy(*_IDS).agg(
        *(F.first(f"part{at}", ignorenulls=True).alias(f"part{at}") for at in range(len(parts)))
    )
    # Rules with different keys may share an entry.
    holders: dict[str, list[int]] = {}
    for at, names in enumerate(own):
        for name in names:
            holders.setdefault(name, []).append(at)
    columns = [F.coalesce(*(F.col(f"part{at}")[name] for at in held)).alias(name) for name, held in holders.items()]
    return merged.select(*_IDS, *columns)


def _add_labels(
    rows: DataFrame, tables: Tables, stream: Stream, as_of: dt.datetime | None, streams: Mapping[str, Stream] | None
) -> DataFrame:
    """Adds the label of each event as of a time; NULL for none."""
    if tables.exists("reviews") and any(map(tables.may_have_rows, ("reviews", "labels"))):
        labels = read_labels(tables, stream, as_of, streams=streams).select(EVENT_ID, *_LABEL)
        return rows.join(labels, EVENT_ID, "left")
    types = zip(_LABEL, ("boolean", "string", "timestamp"), strict=True)
    return rows.withColumns({name: F.lit(None).cast(type_) for name, type_ in types})


def _drop_deleted(rows: DataFrame, tables: Tables, stream: Stream) -> DataFrame:
    """Drops the rows of events that are in the table no more: a deletion on request must reach a training set."""
    ids = tables.read_events(stream.name).select(F.col(stream.event_id).cast("string").alias(EVENT_ID))
    return rows.join(ids, EVENT_ID, "left_semi")


def _select_columns(
    rows: DataFrame, keys: Sequence[Sequence[KeyPart]], names: Sequence[Mapping[str, str]]
) -> DataFrame:
    """Puts the columns in order, and adds whether all windows of an event are complete."""
    parts = list(dict.fromkeys(part.name for key in keys for part in key))
    measures = [name for own in names for name in own.values()]
    complete = F.array_min(F.array(*(F.col(quote_name(own[WINDOW_COMPLETE])) for own in names)))
    return rows.select(*_IDS, *map(quote_name, [*parts, *measures]), complete.alias(WINDOW_COMPLETE), *_LABEL)
