"""Backtests rules on Spark: finds the alerts that they would have raised over the whole events table.

The alerts are those of a stream in which the rules were in force from before the first commit.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812

from lookback.core.engine.schedule import WaitingChange
from lookback.core.errors import SetupError
from lookback.core.rules.compiled import compile_rule
from lookback.core.rules.rulebook import LogRow, RuleChange
from lookback.core.streams.alerts import Failure
from lookback.core.streams.blocks import unpack_failures
from lookback.core.streams.declaration import Stream
from lookback.spark.platform.session import find_local_path, open_own_session
from lookback.spark.replay.history import History
from lookback.spark.replay.tasks import Answers, Plan, judge
from lookback.spark.stream.shard import FAILURES, LOG

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from lookback.spark.tables.lakehouse import Tables

_DAY_US = 86_400_000_000
_TABLE = re.compile(r"\w+(\.\w+){1,2}", re.ASCII)


@dataclass(frozen=True)
class Candidate:
    """A version of a rule that is tried. version: the number that its alerts have."""

    document: Mapping[str, Any]
    version: int = 1

    @property
    def rule_id(self) -> str:
        """The rule's id."""
        return str(self.document["rule_id"])


@dataclass(frozen=True)
class Range:
    """The part of history in which the rules speak; before it they gather state and are silent.

    since, until: event times in microseconds, [since, until), as `effective_from` and `effective_until` of a rule.
    since_commit: the first commit whose events may raise alerts.
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
class Figures:
    """What a rule would have raised. alerts: those that stand, by their last revision; keys: how many keys have one.

    rows: of alerts, with all revisions and suppressed ones. failures: how many times it could not be judged. alerts_per_day:
    over the days of event time in which the rule speaks; None if these are none.
    """

    rule_id: str
    version: int
    alerts: int
    alerts_per_day: float | None
    keys: int
    rows: int
    failures: int


@dataclass
class Backtest:
    """The result of a backtest.

    alerts: rows with the columns of the table `alerts`, of which decided_at is NULL. events: how many were judged, through
    `commits`, the first and the last. deletes: the number of commits that deleted events, which count nowhere.
    errors: rows as rule_log would have had them. first_time, last_time: the event times that the figures are over,
    in microseconds; None without events.
    """

    alerts: DataFrame
    figures: list[Figures]
    events: int
    commits: tuple[int, int]
    deletes: int
    first_time: int | None
    last_time: int | None
    errors: list[LogRow] = field(default_factory=list)
    _answers: Answers | None = None

    def write(self, place: str) -> None:
        """Writes the alerts as a Delta table, with a column `variant`.

        place: a new or empty folder, or catalog.schema.table for a new table. Raises SetupError if something is there.
        """
        writer = self.alerts.withColumn("variant", F.lit("")).write.format("delta").mode("error")
        if _TABLE.fullmatch(place):
            if self.alerts.sparkSession.catalog.tableExists(place):
                raise SetupError(f"--out: there is a table {place}; name another one")
            writer.saveAsTable(place)
            return
        folder = find_local_path(place)
        if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise SetupError(f"--out: {place} is not empty; name a new or empty folder")
        writer.save(place if folder is None else str(folder.absolute()))

    def close(self) -> None:
        """Frees the rows that Spark keeps for `alerts`, which cannot be read afterwards."""
        if self._answers is not None:
            self._answers.close()

    def __enter__(self) -> Backtest:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def backtest(
    tables: Tables, stream: Stream, candidates: Sequence[Candidate], within: Range | None = None, *,
    progress: Callable[[str], None] | None = None,
) -> Backtest:  # fmt: skip
    """Judges all events of a stream by rules that were in force from before its first commit on.

    within: where the rules speak; default: everywhere. Two candidates cannot have one rule_id. Raises RuleError for a wrong
    rule, and SetupError if the table or its change feed is missing.
    """
    within = within or Range()
    tables = replace(tables.holding(stream), spark=open_own_session(tables.spark))
    tables.require(stream)
    _require_different(candidates)
    history = History.read(tables, stream)
    plan = _make_plan(tables, stream, candidates, within, history)
    answers = judge(history.read_lasting(tables), stream, plan, history.events, history.spans, progress)
    alerts = answers.read_alerts()
    alerts = alerts.select(*alerts.columns, F.lit(None).cast("timestamp").alias("decided_at"))
    failures = [each for payload in answers.list_payloads(FAILURES) for each in unpack_failures(payload)]
    errors = {LogRow(**each) for payload in answers.list_payloads(LOG) for each in json.loads(payload)}
    first_time, last_time = _clip(history, within)
    return Backtest(
        alerts, _make_figures(candidates, alerts, failures, (first_time, last_time)), history.events,
        (history.first, history.last), history.deletes, first_time, last_time, sorted(errors, key=repr), answers,
    )  # fmt: skip


def _pick(choose: Callable[[int, int], int], own: int | None, given: int | None) -> int | None:
    known = [each for each in (own, given) if each is not None]
    return choose(*known) if len(known) == 2 else known[0] if known else None


def _require_different(candidates: Sequence[Candidate]) -> None:
    ids = [each.rule_id for each in candidates]
    if twice := sorted({each for each in ids if ids.count(each) > 1}):
        raise SetupError(f"rule {twice[0]!r} is to be tried twice at once; try its versions one after the other")


def _clip(history: History, within: Range) -> tuple[int | None, int | None]:
    """Returns the first and the last event time of the history within a range; None without events."""
    if history.first_time is None or history.last_time is None:
        return None, None
    first, last = _pick(max, history.first_time, within.since), _pick(min, history.last_time, within.until)
    return first, max(last or 0, first or 0)


def _make_plan(
    tables: Tables, stream: Stream, candidates: Sequence[Candidate], within: Range, history: History
) -> Plan:
    """Plans that all candidates are in force from the beginning, and that commands come as they came to the stream.

    Raises RuleError for a wrong rule.
    """
    is_silent = within.since_commit is not None and within.since_commit > history.first
    documents = [within.narrow(each.document, stream) for each in candidates]
    first, waiting = list[RuleChange](), list[WaitingChange]()
    for at, (each, document) in enumerate(zip(candidates, documents, strict=True)):
        text = json.dumps(document, ensure_ascii=False, default=str)
        status = "paused" if is_silent else "active"
        first.append(RuleChange("insert", at, each.rule_id, each.version, status, text))
        if is_silent and within.since_commit is not None:
            speaks = RuleChange("update", at, each.rule_id, each.version, "active", text)
            waiting.append(WaitingChange(speaks, within.since_commit - 1))
    for command, after in _read_commands(tables, stream, len(candidates)):
        if after is None:
            first.append(command)
        else:
            waiting.append(WaitingChange(command, after))
    rules = [compile_rule(each, stream) for each in documents]
    return Plan(rules, first, waiting, {stream.name: stream})


def _read_commands(tables: Tables, stream: Stream, number: int) -> Iterator[tuple[RuleChange, int | None]]:
    """Yields the commands that rule_log has of the stream, in their order, each with the commit judged before it."""
    if not tables.exists("rule_log"):
        return
    own = (F.col("stream") == stream.name) & F.col("action").isin("advance", "clear_state")
    logged = tables.read("rule_log").where(own).orderBy("logged_at", "batch_id").collect()
    for at, row in enumerate(logged, number):
        time = str(row["message"]).removeprefix("to ") if row["action"] == "advance" else None
        document = {"stream": stream.name, **({} if time is None else {"time": time})}
        yield RuleChange("insert", at, "*", None, row["action"], json.dumps(document)), row["arrival"]


def _make_figures(
    candidates: Sequence[Candidate], alerts: DataFrame, failures: list[Failure], times: tuple[int | None, int | None]
) -> list[Figures]:
    counts, failed = _count_alerts(alerts), Counter[str]()
    for failure in failures:
        failed[failure.rule_id] += failure.count
    first, last = times
    days = None if first is None or last is None else (last - first) / _DAY_US
    figures = []
    for each in candidates:
        own = counts.get(each.rule_id, {"alerts": 0, "keys": 0, "rows": 0})
        per_day = own["alerts"] / days if days else None
        figures.append(
            Figures(each.rule_id, each.version, own["alerts"], per_day, own["keys"], own["rows"], failed[each.rule_id])
        )
    return figures


def _count_alerts(alerts: DataFrame) -> dict[str, dict[str, int]]:
    """Counts the alerts of each rule, and the keys that have one."""
    last = alerts.groupBy("rule_id", "alert_id").agg(
        F.max_by(F.struct("verdict", F.to_json("key").alias("key")), "revision").alias("last"),
        F.count("*").alias("rows"),
    )
    stands = F.col("last.verdict") == "raised"
    counted = last.groupBy("rule_id").agg(
        F.count_if(stands).alias("alerts"),
        F.count_distinct(F.when(stands, F.col("last.key"))).alias("keys"),
        F.sum("rows").alias("rows"),
    )
    return {row["rule_id"]: row.asDict() for row in counted.collect()}
