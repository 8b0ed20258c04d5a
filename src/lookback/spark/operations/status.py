"""Reads the figures of a stream from its tables, and checks whether it is healthy."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from lookback.core.errors import LookbackError
from lookback.core.operations.figures import Figures, Sample, WarmUp
from lookback.core.operations.health import (
    check_health,
    describe_health,
    describe_leader,
    is_healthy,
    make_misfit,
    needs_leader,
)
from lookback.core.operations.thresholds import RECENT
from lookback.core.rules.document import read_document
from lookback.core.rules.roles import WARMING, name_role
from lookback.core.rules.versions import EVALUATED, WARM, Piece
from lookback.core.streams.declaration import Stream
from lookback.core.streams.metrics import RuleCounts
from lookback.core.values.times import to_utc
from lookback.spark.review import select_open
from lookback.spark.rulerows import find_rejected, find_warming
from lookback.spark.rules import RulesTable
from lookback.spark.stream.metrics import read_backlog
from lookback.spark.tables.history import find_other_histories
from lookback.spark.tables.sqltexts import quote_name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row

    from lookback.spark.checkpoints.checkpoint import Checkpoint
    from lookback.spark.tables.lakehouse import Tables

# The account in the status covers at most this time span and this number of rows.
_ACCOUNT_SPAN = dt.timedelta(days=1)
_ACCOUNT_ROWS = 1_000_000
# The maximum length of a logged message within a sentence.
_MAX_CHARACTERS = 200
# The expected number of maintenance commits among those of ingest.
_OTHER_COMMITS = 50


@dataclass(frozen=True)
class EventAccount:
    """The outcomes of the events in a stream's table: ingested = evaluated + recorded + discarded + waiting.

    Attributes:
        ingested: All events.
        evaluated: Events that were judged, or that no rule needed.
        recorded: Late events that only count for later events.
        discarded: Events too late for every rule that needed them, or beyond max_future.
        waiting: Events not read yet.
        unknown: Rows of late_events about an event that was not judged, and second rows about the same event.
    """

    ingested: int
    evaluated: int
    recorded: int
    discarded: int
    waiting: int
    unknown: int

    @property
    def closes(self) -> bool:
        """True if every event is accounted for exactly once."""
        parts = self.evaluated + self.recorded + self.discarded + self.waiting
        return self.ingested == parts and not self.unknown


def event_account(
    tables: Tables, stream: Stream, through: int | None, since: int = 0, stamped: int | None = None
) -> EventAccount:
    """Counts the outcomes of a stream's events from its tables.

    Args:
        tables: The tables.
        stream: The stream.
        through: The last judged commit; None for none.
        since: The first commit to count.
        stamped: The earliest `ingested_at` to count, in microseconds.
    """
    last, tables = -1 if through is None else through, tables.holding(stream)
    events = tables.read_changes(stream.name, since).selectExpr(
        f"CAST({quote_name(stream.event_id)} AS STRING) AS event_id",
        "_commit_version AS arrival",
        "unix_micros(ingested_at) AS stamp",
        "_change_type",
    )
    given = {"judged": last, "stamped": stamped, "since": since, "stream": stream.name}
    rows = tables.ask("event_outcomes", {"events": events}, **given).collect()
    counts = {name: sum(row["counted"] for row in rows if row["action"] == name) for name in _ACTIONS}
    unknown = sum(row["counted"] for row in rows if row["unknown"])
    return EventAccount(sum(row["counted"] for row in rows if row["action"]), **counts, unknown=unknown)


def find_recent_account(tables: Tables, stream: Stream, through: int | None, now: dt.datetime) -> dict[str, Any] | None:
    """Counts the outcomes of the rows that the last rounds of ingest read, and of their events.

    It covers at most a day, 200 rounds and about a million rows, so that its cost does not grow with the stream.

    Args:
        tables: The tables.
        stream: The stream.
        through: The last judged commit.
        now: The end of the covered day (aware).

    Returns:
        None without a round; else the counts, for which offered = ingested + duplicates + rejected and ingested =
        evaluated + recorded + discarded + waiting. `rounds` is the number of rounds, `since` the end of the first, and
        `closes` says whether the tables ingests, events and late_events account for all rows.
    """
    if stream.table or not tables.exists("ingests"):
        return None
    rounds: list[Row] = []
    for row in tables.ask("newest_rounds", stream=stream.name, since=now - _ACCOUNT_SPAN).collect():
        if rounds and sum(each["offered"] for each in rounds) + row["offered"] > _ACCOUNT_ROWS:
            break
        rounds.append(row)
    if not rounds:
        return None
    sums = {name: sum(row[name] for row in rounds) for name in ("ingested", "duplicates", "rejected", "commits")}
    stamps = [row["first_us"] for row in rounds if row["first_us"] is not None]
    events = EventAccount(0, 0, 0, 0, 0, 0)
    if stamps:
        first = _find_first_commit(tables, stream.name, min(stamps), sums["commits"])
        events = event_account(tables, stream, through, first, min(stamps))
    return {
        "rounds": len(rounds),
        "since": to_utc(rounds[-1]["ended_us"]),
        # A killed round leaves events, but no row in `ingests`.
        "offered": events.ingested + sums["duplicates"] + sums["rejected"],
        "duplicates": sums["duplicates"],
        "rejected": sums["rejected"],
        **{name: getattr(events, name) for name in ("ingested", *_ACTIONS)},
        "closes": events.closes and events.ingested >= sums["ingested"],
    }


def _find_first_commit(tables: Tables, name: str, stamp: int, commits: int) -> int:
    """Finds the table's first commit at or after a time in microseconds; `commits` is their estimated number."""
    limit = commits + _OTHER_COMMITS
    while True:
        rows = tables.history(name, limit).selectExpr("version", "unix_micros(timestamp) AS at").collect()
        if len(rows) < limit or rows[-1]["at"] < stamp:
            return min((int(row["version"]) for row in rows if row["at"] >= stamp), default=0)
        limit *= 8


_ACTIONS = ("evaluated", "recorded", "discarded", "waiting")


def stream_status(tables: Tables, stream: Stream, checkpoint: Checkpoint | None = None) -> dict[str, Any]:
    """Returns the figures of a stream from its tables; zeros before `init`.

    Args:
        tables: The tables.
        stream: The stream.
        checkpoint: The checkpoint of the stream's evaluation, if it can be reached.

    Returns:
        A dict with these keys:

        - events, commits: the numbers in the stream's table
        - judged: the last judged commit, if known
        - lag_commits, lag_seconds: the number of waiting commits, and how long the oldest has waited
        - rules: the number of rules that raise alerts
        - alerts, rejected: the numbers of alerts and rejected rows within the 90 days of the queue
        - open: the number of alerts in the open queue
        - late: the number of all late events
        - account: see `find_recent_account`
        - healthy, health: a flag and a sentence
        - findings: a list with level, check, what and remedy
        - warming: the versions that wait for their history, with rule_id, version, since and the number of pieces
    """
    tables = tables.holding(stream)
    zeros = dict.fromkeys(("events", "commits", "rules", "alerts", "open", "late", "rejected", "lag_commits"), 0)
    status: dict[str, Any] = {"stream": stream.name, **zeros, "judged": None, "lag_seconds": 0.0, "account": None}
    status["warming"] = list[dict[str, Any]]()
    if not tables.exists(stream.name):
        missing = (
            "has no table yet: lookback init." if not stream.table else f"is in {stream.table}, which does not exist."
        )
        return {**status, "healthy": True, "health": f"{stream.name} {missing}", "findings": []}
    if not stream.is_of_alerts and (misfit := tables.find_misfit(stream)):
        finding = make_misfit(misfit)
        return {**status, "healthy": False, "health": f"{stream.name} cannot be read.", "findings": [asdict(finding)]}

    figures = with_account(tables, stream, read_stream_figures(tables, stream, checkpoint))
    findings = check_health(figures)
    (counts,) = tables.ask("stream_counts", **select_open(stream=stream.name)).collect()
    status.update(
        **counts.asDict(),
        events=0 if tables.is_unwritten(stream.name) else tables.read_events(stream.name).count(),
        commits=figures.committed,
        judged=figures.judged,
        rules=figures.rules,
        lag_commits=figures.waiting,
        lag_seconds=round(figures.lag, 3),
        account=figures.account,
        warming=[each._asdict() for each in figures.warming],
        healthy=is_healthy(findings),
        health=describe_health(figures, findings),
        findings=[asdict(finding) for finding in findings],
    )
    return status


def with_account(tables: Tables, stream: Stream, figures: Figures) -> Figures:
    """Adds the account of the last rounds of ingest to the figures of a stream."""
    account = find_recent_account(tables.holding(stream), stream, figures.judged, figures.now)
    return replace(figures, account=account)


def read_stream_figures(
    tables: Tables, stream: Stream, checkpoint: Checkpoint | None = None, now: dt.datetime | None = None
) -> Figures:
    """Reads the figures that decide a stream's health from its tables, which must exist; `now` must be aware."""
    now, tables = now or dt.datetime.now(dt.timezone.utc), tables.holding(stream)
    name, since = stream.name, now - RECENT
    rows = RulesTable(tables, {name: stream}).rows(find_rejected(tables, name))
    own = [row for row in rows if row.document is not None and row.document.get("stream") == name]
    samples = tables.ask("health_samples", stream=name, since=since).collect()
    last = samples[-1] if samples else None
    judged = _find_judged(tables, name, None if last is None else last["judged"], checkpoint)
    waiting = read_backlog(tables, name, judged)
    (rejected,) = tables.ask("rejected_lately", stream=name, since=since).collect()
    failing, refused = _read_failures(tables, name, since)
    figures = Figures(
        stream=name,
        now=now,
        rules=sum(1 for row in own if row.status in EVALUATED),
        quarantined=[row.rule_id for row in own if row.status == "quarantined"],
        committed=waiting.committed,
        judged=judged,
        waiting=waiting.waiting,
        lag=waiting.seconds(now),
        newest=waiting.newest,
        samples=[_parse_sample(row) for row in samples if row["is_recent"]],
        last_sample=None if last is None else to_utc(last["at_us"]),
        failing=failing,
        refused=refused,
        rejected=rejected["counted"],
        reason=(rejected["reason"] or "")[:_MAX_CHARACTERS],
        ingested=_select_events(tables, stream, "ingested_at >= :since", since=since).count()
        if rejected["counted"]
        else 0,
        warming=read_warm_ups(tables, stream),
        other_tables=() if checkpoint is None else find_other_histories(tables, checkpoint.read_noted(stream)),
    )
    if needs_leader(check_health(figures)):
        return replace(figures, leader=_find_leader(tables, stream, figures))
    return figures


def _find_judged(tables: Tables, name: str, sampled: int | None, checkpoint: Checkpoint | None) -> int | None:
    """Finds the last judged commit: from the last sample and the checkpoint, else from the alerts."""
    noted = None if checkpoint is None else checkpoint.find_last_judged()
    known = [commit for commit in (sampled, noted) if commit is not None]
    if known:
        return max(known)
    (row,) = tables.ask("last_arrival", stream=name).collect()
    judged: int | None = row["arrival"]
    return judged


def _read_failures(tables: Tables, name: str, since: dt.datetime) -> tuple[dict[str, str], dict[str, str]]:
    """Reads the log messages of rules that failed since a time, and of rules whose last row was rejected."""
    failing, refused = {}, {}
    for row in tables.ask("rule_failures", stream=name).collect():
        message = (row["message"] or "")[:_MAX_CHARACTERS]
        if row["has_failed"] and to_utc(row["at_us"]) >= since:
            failing[row["rule_id"]] = message
        if row["action"] == "rejected":
            refused[row["rule_id"]] = message
    return failing, refused


def _parse_sample(row: Row) -> Sample:
    watermark = row["watermark_us"]
    return Sample(
        at=to_utc(row["at_us"]),
        events=row["events"] or 0,
        late=row["late"] or 0,
        discarded=row["discarded"] or 0,
        lag=row["lag_seconds"] or 0.0,
        watermark=None if watermark is None else to_utc(watermark),
        state_rows=row["state_rows"],
        stages={stage: row[f"{stage}_ms"] or 0 for stage in ("run", "evaluate", "write")},
        rules={rule_id: RuleCounts(**counts) for rule_id, counts in json.loads(row["by_rule"] or "{}").items()},
    )


def _find_leader(tables: Tables, stream: Stream, figures: Figures) -> str:
    """Describes the event that moved the watermark furthest ahead of the clock; empty if it was an `advance`."""
    furthest = figures.furthest
    if furthest is None or furthest.watermark is None:
        return ""
    # In a union each member has its own disorder.
    disorders = {stream.max_out_of_orderness} if stream.union is None else set(stream.union.members.values())
    times = [furthest.watermark + dt.timedelta(microseconds=each) for each in sorted(disorders)]
    conditions = (f"{quote_name(stream.event_time)} = :time_{at}" for at in range(len(times)))
    values = {f"time_{at}": time for at, time in enumerate(times)}
    rows = _select_events(tables, stream, f"({' OR '.join(conditions)})", **values).collect()
    first = min(rows, key=lambda row: (row["at_us"] or 0, row["event_id"]), default=None)
    if first is None:
        return ""
    return describe_leader(
        first["event_id"], to_utc(first["time_us"]), None if first["at_us"] is None else to_utc(first["at_us"])
    )


def _select_events(tables: Tables, stream: Stream, condition: str, **values: object) -> DataFrame:
    """Selects the events of a stream for which a condition holds: id as text, time_us and, when ingested, at_us."""
    event_id = f"CAST({quote_name(stream.event_id)} AS STRING) AS event_id"
    times = f"unix_micros({quote_name(stream.event_time)}) AS time_us, unix_micros(ingested_at) AS at_us"
    text = f"SELECT {event_id}, {times} FROM events WHERE {condition}"
    return tables.run(text, {"events": tables.read_events(stream.name)}, **values)


def count_alerts_by_role(tables: Tables, name: str, since: dt.datetime) -> dict[str, int]:
    """Counts a stream's alerts raised since a time, by the role of their rule (see `name_role`)."""
    rows = tables.ask("alerts_by_role", stream=name, since=since).collect()
    return {name_role(row["rule_id"], row["mode"]): row["alerts"] for row in rows}


def read_warm_ups(tables: Tables, stream: Stream) -> tuple[WarmUp, ...]:
    """Reads the rule versions of a stream that wait for the history of their windows, and their progress."""
    since = find_warming(tables, stream.name)
    if not since:
        return ()
    listed = RulesTable(tables, {stream.name: stream}).list_rows()
    waiting = [(row.rule_id, row.version) for row in listed if row.status == WARMING]
    named: dict[tuple[str, int], tuple[int, int]] = {}
    for row in tables.ask("rule_rows", rule_id="*").collect():
        if row["status"] != WARM:
            continue
        with contextlib.suppress(LookbackError, ValueError):
            piece = Piece.from_document(read_document(row["document"]))
            key = piece.rule_id, piece.version
            named[key] = max(named.get(key, (0, 0)), (piece.piece, piece.pieces))
    known = (key for key in sorted(waiting) if key in since)
    return tuple(WarmUp(*key, _to_utc(since[key]), *named.get(key, (0, 0))) for key in known)


def _to_utc(time: dt.datetime) -> dt.datetime:
    """Converts a time from Spark, which is local and without a time zone, to UTC."""
    return time.astimezone(dt.timezone.utc)
