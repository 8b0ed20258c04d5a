"""What the tables hold of one stream, in figures, and whether it is healthy."""

from __future__ import annotations

import contextlib
import datetime as dt
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812

from lookback.core.errors import SetupError
from lookback.core.operations.health import RECENT, Figures, Sample, check_health, describe_health, is_healthy
from lookback.core.rules.rulebook import EVALUATED
from lookback.core.streams import metrics
from lookback.core.streams.declaration import Stream
from lookback.core.streams.metrics import RuleCounts
from lookback.spark.review import open_queue, queue_begins
from lookback.spark.rules import RulesTable
from lookback.spark.stream.metrics import read_backlog

if TYPE_CHECKING:
    from pyspark.sql import Row

    from lookback.spark.stream.checkpoint import Checkpoint
    from lookback.spark.tables.lakehouse import Tables

# Of a message of the log, in a sentence.
_MOST_TEXT = 200
# What the account in the status goes back over, at most.
_ACCOUNT_SPAN = dt.timedelta(days=1)
_ACCOUNT_ROUNDS, _ACCOUNT_ROWS = 200, 1_000_000
# Commits of maintenance among those of ingest.
_OTHER_COMMITS = 50


@dataclass(frozen=True)
class EventAccount:
    """What became of the events of a stream's table: ingested = evaluated + recorded + discarded + waiting.

    evaluated: judged, or wanted by no rule; recorded: late, and only counts later; discarded: too late for every rule
    that wanted it, or further ahead than max_future; waiting: not read yet. unknown: rows of late_events that stand for
    no event that was judged, or for one a second time.
    """

    ingested: int
    evaluated: int
    recorded: int
    discarded: int
    waiting: int
    unknown: int

    @property
    def closes(self) -> bool:
        """Whether every event is accounted for, once."""
        parts = self.evaluated + self.recorded + self.discarded + self.waiting
        return self.ingested == parts and not self.unknown


def event_account(
    tables: Tables, stream: Stream, through: int | None, since: int = 0, stamped: int | None = None
) -> EventAccount:
    """The account of a stream's events by its tables.

    through: the last commit judged; None for none. since: the first commit that counts. stamped: in microseconds, leaves
    out the events of that commit and later ones whose `ingested_at` is earlier.
    """
    last, tables = -1 if through is None else through, tables.holding(stream)
    inserts = tables.read_changes(stream.name, since).where("_change_type = 'insert'")
    if stamped is not None:
        inserts = inserts.where(F.unix_micros("ingested_at") >= stamped)
    events = inserts.select(
        F.col(stream.event_id).cast("string").alias("event_id"),
        F.col("_commit_version").alias("arrival"),
        (F.col("_commit_version") > last).alias("waiting"),
    )
    late = tables.read("late_events").where((F.col("stream") == stream.name) & (F.col("arrival") >= since))
    late = late.groupBy("event_id", "arrival").agg(F.first("action").alias("action"), F.count("*").alias("rows"))
    waiting = F.coalesce(F.col("waiting"), F.lit(False))
    action = F.when(waiting, "waiting").otherwise(F.coalesce("action", F.lit("evaluated")))
    is_unknown = F.col("rows").isNotNull() & (F.col("waiting").isNull() | waiting | (F.col("rows") > 1))
    joined = events.join(late, ["event_id", "arrival"], "full_outer").select(
        F.when(F.col("waiting").isNotNull(), action).alias("action"), is_unknown.alias("unknown")
    )
    rows = joined.groupBy("action", "unknown").count().collect()
    counts = {name: sum(row["count"] for row in rows if row["action"] == name) for name in _ACTIONS}
    unknown = sum(row["count"] for row in rows if row["unknown"])
    return EventAccount(sum(row["count"] for row in rows if row["action"]), **counts, unknown=unknown)


def recent_account(tables: Tables, stream: Stream, through: int | None, now: dt.datetime) -> dict[str, Any] | None:
    """What became of the rows that the last rounds of ingest were offered, and of the events they made; None without one.

    offered = ingested + duplicates + rejected; ingested = evaluated + recorded + discarded + waiting. rounds, since: how
    many, and the end of the first. closes: whether all of them are accounted for, by what ingest has written of itself,
    the events table and late_events. Of the last day at most 200 rounds and about a million rows, so that it costs the
    same however long the stream has run. through: the last commit judged. now: aware; the day ends there.
    """
    if stream.table or not tables.exists("ingests") or tables.is_unwritten("ingests"):
        return None
    own = (F.col("stream") == stream.name) & (F.col("ended_at") >= now - _ACCOUNT_SPAN)
    newest = tables.read("ingests").where(own).orderBy(F.col("ended_at").desc()).limit(_ACCOUNT_ROUNDS)
    rounds: list[Row] = []
    for row in newest.withColumn("first", F.unix_micros("first_ingested_at")).collect():
        if rounds and sum(each["offered"] for each in rounds) + row["offered"] > _ACCOUNT_ROWS:
            break
        rounds.append(row)
    if not rounds:
        return None
    sums = {name: sum(row[name] for row in rounds) for name in ("ingested", "duplicates", "rejected", "commits")}
    stamps = [row["first"] for row in rounds if row["first"] is not None]
    events = EventAccount(0, 0, 0, 0, 0, 0)
    if stamps:
        first = _first_commit(tables, stream.name, min(stamps), sums["commits"])
        events = event_account(tables, stream, through, first, min(stamps))
    return {
        "rounds": len(rounds),
        "since": _aware(rounds[-1]["ended_at"]),
        # Events of a round that was killed are there, and ingest has not written of them.
        "offered": events.ingested + sums["duplicates"] + sums["rejected"],
        "duplicates": sums["duplicates"],
        "rejected": sums["rejected"],
        **{name: getattr(events, name) for name in ("ingested", *_ACTIONS)},
        "closes": events.closes and events.ingested >= sums["ingested"],
    }


def _first_commit(tables: Tables, name: str, stamp: int, commits: int) -> int:
    """The first commit of the table that was made at this time, in microseconds, or later. commits: there are about."""
    limit = commits + _OTHER_COMMITS
    while True:
        rows = tables.history(name, limit).select("version", F.unix_micros("timestamp").alias("at")).collect()
        if len(rows) < limit or rows[-1]["at"] < stamp:
            return min((int(row["version"]) for row in rows if row["at"] >= stamp), default=0)
        limit *= 8


_ACTIONS = ("evaluated", "recorded", "discarded", "waiting")


def stream_status(tables: Tables, stream: Stream, checkpoint: Checkpoint | None = None) -> dict[str, Any]:
    """Figures of a stream, from its tables; zeros before `init`.

    events and commits of its table; judged: the last commit judged, so far as it is known; lag_commits, lag_seconds: the
    commits that wait and for how long the oldest has; rules that raise alerts; alerts decided and rows rejected in the 90
    days of the queue, and how many alerts are in the open queue; late events, of all that the table has; account: what became of what ingest was offered lately, see `recent_account`; healthy, health: a sentence; findings: level, check, what, remedy of each.
    checkpoint: that of the stream's evaluation, where it can be reached.
    """
    tables = tables.holding(stream)
    zeros = dict.fromkeys(("events", "commits", "rules", "alerts", "open", "late", "rejected", "lag_commits"), 0)
    status: dict[str, Any] = {"stream": stream.name, **zeros, "judged": None, "lag_seconds": 0.0, "account": None}
    if not tables.exists(stream.name):
        missing = (
            "has no table yet: lookback init." if not stream.table else f"is in {stream.table}, which is not there."
        )
        return {**status, "healthy": True, "health": f"{stream.name} {missing}", "findings": []}

    def count(name: str, time: str | None = None) -> int:
        if tables.is_unwritten(name):
            return 0
        rows = tables.read(name).where(F.col("stream") == stream.name)
        return (rows if time is None else rows.where(F.col(time) >= F.lit(queue_begins()))).count()

    figures = stream_figures(tables, stream, checkpoint)
    findings = check_health(figures)
    status.update(
        events=0 if tables.is_unwritten(stream.name) else tables.read(stream.name).count(),
        commits=figures.committed,
        judged=figures.judged,
        rules=figures.rules,
        alerts=count("alerts", "decided_at"),
        open=0 if tables.is_unwritten("alerts") else open_queue(tables, stream=stream.name).count(),
        late=count("late_events"),
        rejected=count("rejected_events", "ingested_at"),
        lag_commits=figures.waiting,
        lag_seconds=round(figures.lag, 3),
        account=recent_account(tables, stream, figures.judged, figures.now),
        healthy=is_healthy(findings),
        health=describe_health(figures, findings),
        findings=[asdict(finding) for finding in findings],
    )
    return status


def stream_figures(
    tables: Tables, stream: Stream, checkpoint: Checkpoint | None = None, now: dt.datetime | None = None
) -> Figures:
    """What health goes by, from the tables of a stream that is there. now: aware; the clock's time unless given."""
    now, tables = now or dt.datetime.now(dt.timezone.utc), tables.holding(stream)
    rows = RulesTable(tables, {stream.name: stream}).rows()
    own = [row for row in rows if row.document is not None and row.document.get("stream") == stream.name]
    samples, last = _samples(tables, stream.name, now)
    judged = _judged(tables, stream.name, checkpoint, last)
    waiting = read_backlog(tables, stream.name, judged)
    rejected, reason = _rejected(tables, stream.name, now)
    failing, refused = _logged(tables, stream.name, now)
    ingested = tables.read(stream.name).where(F.col("ingested_at") >= now - RECENT).count() if rejected else 0
    return Figures(
        stream.name, now,
        rules=sum(1 for row in own if row.status in EVALUATED),
        quarantined=[row.rule_id for row in own if row.status == "quarantined"],
        committed=waiting.committed, judged=judged, waiting=waiting.waiting, lag=waiting.seconds(now),
        newest=waiting.newest, samples=samples,
        last_sample=None if last is None else _aware(last[metrics.MEASURED_AT]),
        failing=failing, refused=refused, rejected=rejected, reason=reason, ingested=ingested,
    )  # fmt: skip


def _samples(tables: Tables, name: str, now: dt.datetime) -> tuple[list[Sample], Row | None]:
    """The rows of `metrics` of the last hour, oldest first, and the last of all."""
    if not tables.exists(metrics.TABLE) or tables.is_unwritten(metrics.TABLE):
        return [], None
    at = F.col(metrics.MEASURED_AT)
    rows = tables.read(metrics.TABLE).where(F.col("stream") == name)
    recent = rows.where(at >= now - RECENT).orderBy(at).collect()
    if recent:
        return [_sample(row) for row in recent], recent[-1]
    return [], rows.orderBy(at.desc()).limit(1).head()


def _sample(row: Row) -> Sample:
    return Sample(
        at=_aware(row[metrics.MEASURED_AT]),
        events=row["events"],
        late=row["late"],
        discarded=row["discarded"],
        lag=float(row["lag_seconds"]),
        watermark=None if row["watermark"] is None else _aware(row["watermark"]),
        state_rows=row["state_rows"],
        stages={stage: row[f"{stage}_ms"] for stage in ("run", "evaluate", "write")},
        rules={rule_id: RuleCounts(**counts.asDict()) for rule_id, counts in (row["by_rule"] or {}).items()},
    )


def _judged(tables: Tables, name: str, checkpoint: Checkpoint | None, last: Row | None) -> int | None:
    """The last commit judged: by the checkpoint and by the metrics; where neither knows, the last that brought an alert."""
    known: list[int | None] = [None if last is None else last["judged"]]
    if checkpoint is not None:
        # A folder that cannot be read, or not as this release writes it, only says less.
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, SetupError):
            known.append(checkpoint.read_last_judged())
    if all(commit is None for commit in known) and not tables.is_unwritten("alerts"):
        alerts = tables.read("alerts").where(F.col("stream") == name)
        known.append(alerts.agg(F.max("arrival").alias("arrival")).collect()[0]["arrival"])
    return max((commit for commit in known if commit is not None), default=None)


def _rejected(tables: Tables, name: str, now: dt.datetime) -> tuple[int, str]:
    """How many rows ingest rejected within the last hour, and why the newest."""
    if tables.is_unwritten("rejected_events"):
        return 0, ""
    rows = tables.read("rejected_events").where((F.col("stream") == name) & (F.col("ingested_at") >= now - RECENT))
    found = rows.agg(F.count("*").alias("rows"), F.max_by("reason", "ingested_at").alias("reason")).collect()[0]
    return found["rows"], (found["reason"] or "")[:_MOST_TEXT]


def _logged(tables: Tables, name: str, now: dt.datetime) -> tuple[dict[str, str], dict[str, str]]:
    """Rules that failed within the last hour, and rules of which the last row was rejected, with what rule_log says."""
    if tables.is_unwritten("rule_log"):
        return {}, {}
    rows = tables.read("rule_log").where((F.col("stream") == name) & F.col("rule_id").isNotNull())
    newest = F.max_by(F.struct("action", "message"), F.struct("logged_at", "batch_id", "version")).alias("newest")
    has_failed = (F.col("action") == "failed").alias("has_failed")
    found = rows.groupBy("rule_id", has_failed).agg(newest, F.max("logged_at").alias("at")).collect()
    failing = {
        row["rule_id"]: row["newest"]["message"][:_MOST_TEXT]
        for row in found
        if row["has_failed"] and _aware(row["at"]) >= now - RECENT
    }
    refused = {
        row["rule_id"]: row["newest"]["message"][:_MOST_TEXT] for row in found if row["newest"]["action"] == "rejected"
    }
    return failing, refused


def _aware(time: dt.datetime) -> dt.datetime:
    """A time as Spark hands it out: local, without a zone."""
    return time.astimezone(dt.timezone.utc)
