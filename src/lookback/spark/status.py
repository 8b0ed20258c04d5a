"""What the tables hold of one stream, in figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812

from lookback.core.rulebook import EVALUATED
from lookback.core.streams import Stream
from lookback.spark.review import open_queue
from lookback.spark.rules import RulesTable

if TYPE_CHECKING:
    from lookback.spark.tables import Tables


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
