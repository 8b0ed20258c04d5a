"""What the tables hold of one stream, in figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812

from lookback.core.rulebook import EVALUATED
from lookback.core.streams import Stream
from lookback.spark.review import open_queue
from lookback.spark.rules import RulesTable

if TYPE_CHECKING:
    from lookback.spark.tables import Tables


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


def event_account(tables: Tables, stream: Stream, through: int | None) -> EventAccount:
    """The account of a stream's events by its tables. through: the last commit judged; None for none."""
    last = -1 if through is None else through
    inserts = tables.read_changes(stream.name, 0).where("_change_type = 'insert'")
    events = inserts.select(
        F.col(stream.event_id).cast("string").alias("event_id"),
        F.col("_commit_version").alias("arrival"),
        (F.col("_commit_version") > last).alias("waiting"),
    )
    late = tables.read("late_events").where(F.col("stream") == stream.name)
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


_ACTIONS = ("evaluated", "recorded", "discarded", "waiting")


def stream_status(tables: Tables, stream: Stream) -> dict[str, Any]:
    """Figures of a stream, from its tables; zeros before `init`.

    events and commits of its table; judged: the last commit that brought an alert; rules that raise alerts; alerts,
    and how many of all are in the open queue; late and rejected events.
    """
    zeros = dict.fromkeys(("events", "commits", "rules", "alerts", "open", "late", "rejected"), 0)
    status: dict[str, Any] = {"stream": stream.name, **zeros, "judged": None}
    if not tables.exists(stream.name):
        return status

    def count(name: str) -> int:
        return tables.read(name).where(F.col("stream") == stream.name).count()

    rows = RulesTable(tables, {stream.name: stream}).rows()
    own = [row for row in rows if row.document is not None and row.document.get("stream") == stream.name]
    judged = tables.read("alerts").where(F.col("stream") == stream.name).agg(F.max("arrival")).head()
    status.update(
        events=tables.read(stream.name).count(),
        commits=tables.version(stream.name),
        judged=judged[0] if judged else None,
        rules=sum(1 for row in own if row.status in EVALUATED),
        alerts=count("alerts"),
        open=open_queue(tables).where(F.col("stream") == stream.name).count(),
        late=count("late_events"),
        rejected=count("rejected_events"),
    )
    return status
