"""Chooses the properties of tables, and reads how long a table keeps its history."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pyspark.sql.types import StructType

from lookback.core.errors import DurationError, SetupError
from lookback.core.streams import alerts, metrics
from lookback.core.streams.alerts import DISPOSITIONS
from lookback.core.values.durations import parse_duration
from lookback.spark.tables.schemas import DEFAULTS

if TYPE_CHECKING:
    from pyspark.sql.types import StructField

# How far back you can replay an events table or read an earlier version of it.
DEFAULT_HISTORY = "30 days"
_DEFAULT_FILE_RETENTION = "interval 7 days"
CHANGE_FEED = {"delta.enableChangeDataFeed": "true", "delta.enableInCommitTimestamps": "true"}
# Commits between checkpoints of the log. For a small table, a checkpoint costs more than reading a hundred short log
# files.
_OFTEN_WRITTEN = {"delta.checkpointInterval": "100"}
# For tables that an evaluation writes in every batch: a checkpoint of the log delays alerts by 1.7 s. Without one, a
# first reader takes 2.4 s longer after 950 commits (2 cores).
_WRITTEN_EVERY_BATCH = {"delta.checkpointInterval": "1000"}
# Statistics for these columns only, the ones that help readers, make an append a sixth faster.
_STATISTICS_COLUMNS = {
    "alerts": "event_time,arrival,decided_at",
    "late_events": "event_time,arrival",
    "rule_log": "arrival,logged_at",
}
STATISTICS = "delta.dataSkippingStatsColumns"
# Delta checks these on every row, so they exist only where people write and a wrong value would be lost.
_DISPOSITION_TEXTS = ", ".join(f"'{disposition}'" for disposition in DISPOSITIONS)
_CHECKS = {"reviews": {"delta.constraints.disposition_known": f"disposition in ({_DISPOSITION_TEXTS})"}}
# Past rules and lists must stay readable for as long as anyone may have to explain an alert.
_AUDITED = ("rules", "lists")


def choose_properties(name: str) -> dict[str, str]:
    """Chooses the properties of one of Lookback's own tables."""
    defaults = {"delta.feature.allowColumnDefaults": "supported"} if name in DEFAULTS else {}
    if name in _AUDITED:
        return {**CHANGE_FEED, **_OFTEN_WRITTEN, **_make_retention("3650 days"), **defaults}
    if name == metrics.TABLE:
        # Evaluations write this events table, and rules may watch it.
        return {**CHANGE_FEED, **_OFTEN_WRITTEN, **_make_retention(DEFAULT_HISTORY)}
    if name in _STATISTICS_COLUMNS:
        # Alerts are also events, for rules over alerts.
        feed = {**CHANGE_FEED, **_make_retention(DEFAULT_HISTORY)} if name == alerts.TABLE else {}
        return {**feed, **_WRITTEN_EVERY_BATCH, STATISTICS: _STATISTICS_COLUMNS[name]}
    return {**_OFTEN_WRITTEN, **_CHECKS.get(name, {}), **defaults}


def _make_retention(history: str) -> dict[str, str]:
    # Delta refuses time travel beyond the retention of deleted files, whatever the log's retention.
    interval = f"interval {history}"
    return {"delta.logRetentionDuration": interval, "delta.deletedFileRetentionDuration": interval}


def _make_statistics(schema: StructType) -> dict[str, str]:
    # Ingest prunes by id, time and ingested_at, which may be beyond the 32 columns that have statistics by default.
    count = sum(map(_count_values, schema))
    return {"delta.dataSkippingNumIndexedCols": str(count)} if count > 32 else {}


def _count_values(field: StructField) -> int:
    """Counts the values in a column: 1, or those of a struct, each of which has statistics of its own."""
    return sum(map(_count_values, field.dataType)) if isinstance(field.dataType, StructType) else 1


def parse_file_retention(properties: Mapping[str, str]) -> dt.timedelta:
    """Returns how long a table with these properties keeps the files that a commit has removed.

    VACUUM deletes only files that were removed longer ago. Raises SetupError if the property is not a duration.
    """
    return _parse_interval(properties, "delta.deletedFileRetentionDuration", _DEFAULT_FILE_RETENTION)


def parse_log_retention(properties: Mapping[str, str]) -> dt.timedelta:
    """Returns how long a table with these properties keeps its log. Raises SetupError if that is not a duration."""
    return _parse_interval(properties, "delta.logRetentionDuration", f"interval {DEFAULT_HISTORY}")


def _parse_interval(properties: Mapping[str, str], name: str, default: str) -> dt.timedelta:
    text = properties.get(name, default)
    try:
        return dt.timedelta(microseconds=parse_duration(text.lower().removeprefix("interval").strip()))
    except DurationError as error:
        raise SetupError(f"{name} is {text!r}, which is not a duration: {error}") from error


def choose_event_properties(events: StructType, history: str) -> dict[str, str]:
    """Chooses the properties of an events table, whose old versions stay readable for `history`."""
    return {**CHANGE_FEED, **_OFTEN_WRITTEN, **_make_retention(history), **_make_statistics(events)}
