"""Backtests rules on Spark: finds the alerts that they would have raised over the whole events table.

The rules count as in force since before the first commit.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812

from lookback.core.errors import SetupError
from lookback.core.rules.compiling import compile_rule
from lookback.core.rules.rulelog import LogRow
from lookback.core.rules.variants import make_variants
from lookback.core.streams.blocks import TRIED
from lookback.core.streams.declaration import Stream
from lookback.core.streams.flagged import FlagPlace
from lookback.core.values.windows import PER_EVENT
from lookback.spark.platform.session import open_own_session
from lookback.spark.replay.comparison import RunComparison, compare, find_changes, find_standing
from lookback.spark.replay.counting import LabelCounts, TrialCounts, count_trials, find_last_rows, read_range_labels
from lookback.spark.replay.facts import count_failures, describe_discarded, list_errors
from lookback.spark.replay.flagging import find_events_behind
from lookback.spark.replay.history import History
from lookback.spark.replay.outputs import write_new
from lookback.spark.replay.tasks import judge
from lookback.spark.replay.trials import MAX_TRIALS, Course, Trial, make_plan
from lookback.spark.tables.lakehouse import keep

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from lookback.spark.tables.lakehouse import Tables

_DAY_US = 86_400_000_000


@dataclass(frozen=True)
class Candidate:
    """A version of a rule to try; its alerts carry the number `version`."""

    document: Mapping[str, Any]
    version: int = 1

    @property
    def rule_id(self) -> str:
        """The rule's id."""
        return str(self.document["rule_id"])


@dataclass(frozen=True)
class Range:
    """The part of history in which the rules raise alerts; before it they only gather state.

    Attributes:
        since: The first event time in microseconds, like `effective_from` of a rule.
        until: The event time in microseconds at which the range ends, exclusive, like `effective_until` of a rule.
        since_commit: The first commit whose events may raise alerts.
    """

    since: int | None = None
    until: int | None = None
    since_commit: int | None = None

    def narrow(self, document: Mapping[str, Any], stream: Stream) -> dict[str, Any]:
        """Returns the document of a rule that triggers only within the range. Raises RuleError."""
        rule = compile_rule(document, stream).spec
        bounds = {
            "effective_from": _pick(max, rule.effective_from, self.since),
            "effective_until": _pick(min, rule.effective_until, self.until),
        }
        return {**document, **{name: value for name, value in bounds.items() if value is not None}}


@dataclass(frozen=True)
class BacktestFigures:
    """The result of one rule or variant over the range. A ratio with a denominator of 0 is None.

    Attributes:
        rule_id: The rule's id.
        version: The rule's version.
        parameters: The values of the variant's parameters.
        alerts: The number of standing alerts, that is, those whose last revision is raised.
        alerts_per_day: Alerts per day of event time in which the rule may raise them.
        keys: The number of keys with a standing alert.
        flagged: The number of events behind standing alerts: those that triggered an alert, matched a step of its
            sequence, or were counted by its window as of its last row.
        labelled: How many of the flagged events have a label.
        positives: How many of the flagged events have a positive label.
        precision: positives / labelled.
        recall: positives / all_positives.
        all_positives: The number of events in the range with a positive label.
        rows: The number of alert rows, including all revisions and suppressed alerts.
        failures: How many times the rule could not be judged.
    """

    rule_id: str
    version: int
    parameters: Mapping[str, Any]
    alerts: int
    alerts_per_day: float | None
    keys: int
    flagged: int
    labelled: int
    positives: int
    precision: float | None
    recall: float | None
    all_positives: int
    rows: int
    failures: int


@dataclass
class Backtest:
    """The result of a backtest.

    Attributes:
        figures: One entry per candidate, or per variant of a candidate.
        events: The number of judged events.
        commits: The first and the last judged commit.
        deletes: The number of commits that deleted events. Deleted events do not count.
        first_time: The first event time that the figures cover, in microseconds; None without events.
        last_time: The last event time that the figures cover, in microseconds; None without events.
        errors: The rows that a stream would have written to rule_log.
        against: The figures of the rule to compare with, if there is one.
        comparisons: Each entry of `figures` compared with `against`.
        warnings: Sentences for the user, about events that cannot be read.
    """

    figures: list[BacktestFigures]
    events: int
    commits: tuple[int, int]
    deletes: int
    first_time: int | None
    last_time: int | None
    errors: list[LogRow] = field(default_factory=list)
    against: BacktestFigures | None = None
    comparisons: list[RunComparison] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    _standing: DataFrame | None = None
    _rows: DataFrame | None = None
    _kept: ExitStack = field(default_factory=ExitStack)

    @property
    def alerts(self) -> DataFrame:
        """The alert rows: the columns of the table `alerts`, with decided_at NULL, and `variant`.

        `variant` holds the values of the parameters as JSON.

        Raises:
            SetupError: If the backtest ran with `rows=False`.
        """
        if self._rows is None:
            raise SetupError("this backtest computed figures only; run it with rows=True to get the alerts")
        return self._rows

    def find_changes(self, at: int = 0) -> DataFrame:
        """Lists the alerts that a candidate gains, loses and keeps compared with `against`.

        Args:
            at: The position of the candidate in `figures`.

        Returns:
            The columns change (gained, lost, kept), key as JSON, event_id, window_start if the alert is about a window,
            event_time, and positive according to the labels.

        Raises:
            SetupError: If the backtest ran without `against`.
        """
        if self._standing is None or self.against is None:
            raise SetupError("this backtest compared nothing; run it with against=Candidate(...)")
        return find_changes(self._standing, at, len(self.figures))

    def write(self, place: str) -> None:
        """Writes the alerts as a Delta table.

        Args:
            place: A new or empty folder, or catalog.schema.table for a new table.

        Raises:
            SetupError: If the table exists or the folder is not empty.
        """
        write_new(self.alerts, place)

    def close(self) -> None:
        """Frees the rows that Spark keeps for `alerts`; you cannot read them afterwards."""
        self._kept.close()

    def __enter__(self) -> Backtest:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def backtest(
    tables: Tables,
    stream: Stream,
    candidates: Sequence[Candidate],
    within: Range | None = None,
    *,
    vary: Mapping[str, Sequence[object]] | None = None,
    rows: bool = True,
    against: Candidate | None = None,
    as_of: dt.datetime | None = None,
    lists_now: bool = False,
    streams: Mapping[str, Stream] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Backtest:
    """Judges all events of a stream in one pass, as if the candidates had been in force before the first commit.

    Args:
        tables: The tables of the workspace.
        stream: The stream whose events are judged.
        candidates: The rules to try.
        within: The range in which the rules raise alerts; default: everywhere.
        vary: Values for parameters, by name. Each candidate is judged with every combination of them (see
            `make_variants`).
        rows: False computes the figures only, which is much faster when many variants raise alerts.
        against: A rule to compare each candidate with. It is not varied, and the result does not include its alerts.
        as_of: Ignores labels that became known after this time; None: now.
        lists_now: True shows the rules the current lists at all times, not the lists as of each commit.
        streams: The declared streams by name, for labels; see `read_labels`.
        progress: Called with lines of progress for the user.

    Raises:
        RuleError: If a rule or parameter is wrong.
        SetupError: If the table or its change feed is missing.
    """
    within = within or Range()
    trials = _make_trials(candidates, vary or {}, stream, within, rows=rows)
    if against is not None:
        trials += _make_trials([against], {}, stream, within, rows=rows, first=trials)
    tables = replace(tables.holding(stream), spark=open_own_session(tables.spark))
    tables.require_fields(stream)
    tables.require(stream)
    history = History.read_whole(tables, stream)
    if history.stamps and within.since_commit is not None:
        raise SetupError(f"since_commit: {history.warning}, so you cannot begin at a commit; begin at an event time")
    since_commit = _find_first_commit(within, history)
    names = frozenset[str]().union(*(trial.rule.lists for trial in trials))
    course = Course.read(tables, stream, history, names, lists_now=lists_now)
    places = {trial.place: at for at, trial in enumerate(trials) if trial.place is not None}
    flagging = {at: place for place, at in places.items()}
    plan = make_plan(dict(enumerate(trials)), stream, course, since_commit, flagging=flagging)
    with ExitStack() as kept:
        # If a step fails or is cancelled, this frees the rows that Spark has kept so far.
        answers = judge(history.read_lasting(tables), stream, plan, history.events, history.spans, progress)
        kept.callback(answers.close)
        alerts = answers.read_tried_alerts()
        last = _keep(find_last_rows(alerts), kept)
        events, again = find_events_behind(tables, stream, history, trials, last, course, since_commit, progress)
        if again is not None:
            kept.callback(again.close)
        events = _keep(events, kept)
        first_time, last_time = _clip(history, within)
        labels = read_range_labels(
            tables, stream, history, (within.since, within.until, within.since_commit), as_of, streams
        )
        if labels is not None:
            kept.callback(_free, labels)
        counts = count_trials(len(trials), last, events, answers.read_flagged(), places, labels)
        figures = _make_figures(trials, counts, count_failures(answers, plan), (first_time, last_time))
        if history.stamps:
            alerts = alerts.withColumn("arrival", F.lit(None).cast("bigint"))
        result = Backtest(
            figures=figures,
            events=history.events,
            commits=(history.first, history.last),
            deletes=history.deletes,
            first_time=first_time,
            last_time=last_time,
            errors=list_errors(answers, plan),
            warnings=[*filter(None, [history.warning]), *course.warnings, *describe_discarded(answers)],
            _rows=_name_variants(alerts, trials[: len(trials) - (against is not None)]) if rows else None,
        )
        if against is not None:
            result.against = figures.pop()
            result._standing = _keep(find_standing(last, events, answers.read_flagged(), places, labels), kept)
            result.comparisons = [
                compare(result.find_changes(at), against.rule_id, against.version) for at in range(len(figures))
            ]
        result._kept = kept.pop_all()
    return result


def _keep(rows: DataFrame, kept: ExitStack) -> DataFrame:
    """Caches rows that are read several times, until `kept` is closed."""
    rows = keep(rows)
    kept.callback(_free, rows)
    return rows


def _free(rows: DataFrame) -> None:
    with suppress(PySparkException):
        rows.unpersist()


def find_last_days(tables: Tables, stream: Stream, days: float) -> Range | None:
    """Finds the range of the last `days` days before a stream's newest event; None if it has no events."""
    newest = tables.read_events(stream.name).agg(F.unix_micros(F.max(stream.event_time))).head()
    return None if newest is None or newest[0] is None else Range(since=int(newest[0]) - round(days * _DAY_US))


def _find_first_commit(within: Range, history: History) -> int | None:
    """Returns the first commit whose events may raise alerts; None if that is the first of the history."""
    is_later = within.since_commit is not None and within.since_commit > history.first
    return within.since_commit if is_later else None


def _pick(choose: Callable[[int, int], int], own: int | None, given: int | None) -> int | None:
    known = [each for each in (own, given) if each is not None]
    return choose(*known) if len(known) == 2 else known[0] if known else None


def _make_trials(
    candidates: Sequence[Candidate],
    vary: Mapping[str, Sequence[object]],
    stream: Stream,
    within: Range,
    *,
    rows: bool,
    first: Sequence[Trial] = (),
) -> list[Trial]:
    """Makes a trial of each variant of each candidate, numbered after the trials in `first`.

    Raises:
        RuleError: If a rule is wrong; it names the rule by its own id.
        SetupError: If there are too many trials.
    """
    trials = list[Trial]()
    variants = make_variants([each.document for each in candidates], vary)
    for group, (candidate, made) in enumerate(zip(candidates, variants, strict=True), len(first)):
        for bit, variant in enumerate(made):
            document = {**within.narrow(variant.document, stream), "rule_id": f"trial-{len(first) + len(trials)}"}
            rule = compile_rule(document, stream)
            can_flag = (
                not rows and rule.spec.kind in PER_EVENT and rule.spec.suppress is None and rule.spec.late != "revise"
            )
            trials.append(
                Trial(candidate.rule_id, candidate.version, variant, rule, FlagPlace(group, bit) if can_flag else None)
            )
    if len(trials) > MAX_TRIALS:
        raise SetupError(f"{len(trials):,} rules and variants exceed the limit of {MAX_TRIALS:,}; try fewer at once")
    return trials


def _clip(history: History, within: Range) -> tuple[int | None, int | None]:
    """Returns the first and the last event time of the history within a range; None without events."""
    if history.first_time is None or history.last_time is None:
        return None, None
    first, last = _pick(max, history.first_time, within.since), _pick(min, history.last_time, within.until)
    return first, max(last or 0, first or 0)


def _make_figures(
    trials: Sequence[Trial], counts: LabelCounts, failed: Mapping[int, int], times: tuple[int | None, int | None]
) -> list[BacktestFigures]:
    first, last = times
    days = None if first is None or last is None else (last - first) / _DAY_US
    figures = []
    for at, trial in enumerate(trials):
        own = counts.by_trial.get(at, TrialCounts())
        figures.append(
            BacktestFigures(
                rule_id=trial.rule_id,
                version=trial.version,
                parameters=trial.variant.parameters,
                alerts=own.alerts,
                alerts_per_day=own.alerts / days if days else None,
                keys=own.keys,
                flagged=own.flagged,
                labelled=own.labelled,
                positives=own.positives,
                precision=own.positives / own.labelled if own.labelled else None,
                recall=own.positives / counts.all_positives if counts.all_positives else None,
                all_positives=counts.all_positives,
                rows=own.rows,
                failures=failed.get(at, 0),
            )
        )
    return figures


def _name_variants(alerts: DataFrame, trials: Sequence[Trial]) -> DataFrame:
    """Replaces the trial number of each alert row with the text of its variant."""
    texts = F.array(*(F.lit(trial.variant.text) for trial in trials))
    variant = F.element_at(texts, F.col(TRIED) + 1).alias("variant")
    alerts = alerts.where(F.col(TRIED) < len(trials))
    names = [name for name in alerts.columns if name != TRIED]
    return alerts.select(*names, F.lit(None).cast("timestamp").alias("decided_at"), variant)
