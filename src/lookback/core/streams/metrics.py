"""The counts of an evaluation, and the columns of the table `metrics` that stores them."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import NamedTuple

from lookback.core.values.types import DataType, parse_type

TABLE = "metrics"
METRICS_ID, MEASURED_AT = "metrics_id", "measured_at"


class MetricColumn(NamedTuple):
    """A column of the table: its name, its Spark type, and a description."""

    name: str
    type: str
    comment: str


@dataclass(frozen=True)
class RuleCounts:
    """The counts of one rule.

    evaluated: the events that it judged, or for windows, counted. matched: its alert rows, raised or suppressed.
    suppressed: the matched rows that `suppress` withheld. failed: errors while judging.
    """

    evaluated: int = 0
    matched: int = 0
    suppressed: int = 0
    failed: int = 0

    def __add__(self, other: RuleCounts) -> RuleCounts:
        return RuleCounts(*(one + more for one, more in zip(astuple(self), astuple(other), strict=True)))


# A row covers the time since the previous row of the same evaluation. Rules can only read plain columns, so `by_rule` is
# not a field of the stream.
COLUMNS = tuple(
    MetricColumn(*column)
    for column in (
        (METRICS_ID, "string", "Identifies the row"),
        (MEASURED_AT, "timestamp", "The end of the time that the row covers"),
        ("stream", "string", "The stream that is evaluated"),
        ("seconds", "decimal(18,3)", "How much time the row covers"),
        ("batches", "bigint", "Batches that ended in this time"),
        ("events", "bigint", "Events judged"),
        ("events_per_second", "decimal(18,1)", "Events by the seconds that the batches took; NULL without a batch"),
        ("lag_commits", "bigint", "Commits of the events table that bring rows and are not judged yet"),
        ("lag_seconds", "decimal(18,3)", "How long the oldest of them has waited; 0 where none waits"),
        ("committed", "bigint", "The last commit of the events table"),
        ("judged", "bigint", "The last commit judged; NULL before the first"),
        ("watermark", "timestamp", "The watermark of the last batch; NULL before the first"),
        ("watermark_behind_seconds", "decimal(18,3)", "measured_at - watermark; negative: the watermark is ahead"),
        (
            "state_rows",
            "bigint",
            (
                "Rows of window state not below the floor after the last batch: events kept for windows, sessions and sequences, "
                "and waits of absences; NULL before the first"
            ),
        ),
        ("state_bytes", "bigint", "Bytes that the state store holds of them, where Spark says so"),
        ("state_bytes_written", "bigint", "Bytes of pages written"),
        ("rules", "bigint", "Rules with state after the last batch; NULL before the first"),
        ("evaluated", "bigint", "Judgements: events times the rules that judged them"),
        ("matched", "bigint", "Rows of alerts that were raised or suppressed"),
        ("suppressed", "bigint", "Those of them that were suppressed"),
        ("failed", "bigint", "Errors while judging"),
        ("late", "bigint", "Late events that some rule wants"),
        ("discarded", "bigint", "Those of them that came too late for every rule, and events beyond max_future"),
        ("top_rule", "string", "The rule with the most alerts that were raised; NULL where there was none"),
        ("top_rule_alerts", "bigint", "How many those were"),
        ("run_ms", "bigint", "Milliseconds in which Spark read, dispatched and judged events"),
        ("evaluate_ms", "bigint", "Those of them of the slowest shard of each batch"),
        ("write_ms", "bigint", "Milliseconds in which alerts, late events and log rows were written"),
        ("trigger_ms", "bigint", "Milliseconds of whole micro-batches, where Spark says so"),
        ("longest_ms", "bigint", "Milliseconds of the batch that took the longest to run and write; NULL without one"),
    )
)
BY_RULE = "by_rule"
FIELDS: dict[str, DataType] = {column.name: parse_type(column.type) for column in COLUMNS}
