"""Rows of the table `alerts` that can be compared: those of the tables, and those of a replay in memory."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.sql import functions as F  # noqa: N812

from lookback.core.values.columns import to_text

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    import lookback
    from lookback.spark.tables.lakehouse import Tables

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)


class AlertRow(NamedTuple):
    """A row of `alerts`, to be compared with a replay. Times are microseconds since 1970; maps are sorted pairs."""

    alert_id: str
    revision: int
    verdict: str
    rule_id: str
    rule_version: int | None
    mode: str
    severity: str
    key: tuple[tuple[str, str | None], ...]
    event_id: str
    event_time: int
    window_start: int
    window_end: int
    window_complete: bool
    measures: tuple[tuple[str, str | None], ...]
    message: str
    evidence: tuple[str, ...]
    arrival: int
    entities: tuple[tuple[str, str | None], ...]
    tags: tuple[str, ...]


def read_alerts(tables: Tables) -> list[AlertRow]:
    """Reads all rows of the table `alerts`."""
    return collect_alerts(tables.read("alerts"))


def collect_alerts(alerts: DataFrame) -> list[AlertRow]:
    """Collects rows that have the columns of the table `alerts`."""
    micros = {name: F.unix_micros(name) for name in ("event_time", "window_start", "window_end")}
    return [_make_alert_row(row.asDict()) for row in alerts.withColumns(micros).collect()]


def list_alerts(result: lookback.Result) -> list[AlertRow]:
    """Lists the alerts of a replay as rows of the table `alerts`."""
    return [_make_alert_row(vars(alert)) for alert in result.alerts]


def _make_alert_row(alert: Mapping[str, Any]) -> AlertRow:
    return AlertRow(*(_to_plain(alert[name]) for name in AlertRow._fields))


def _to_plain(value: Any) -> Any:
    if isinstance(value, dt.datetime):
        return (value - _EPOCH) // dt.timedelta(microseconds=1)
    if isinstance(value, Mapping):
        return tuple(sorted((name, to_text(each)) for name, each in value.items()))
    return tuple(value) if isinstance(value, list) else value
