"""Tries a rule over history without Spark: finds what it would have flagged, and the values it compared."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa

from lookback.core.explaining.explanation import main_measure, to_number
from lookback.core.rules.compiled import CompiledRule
from lookback.core.rules.compiling import compile_rule
from lookback.core.rules.wording import find_field_limits, find_measure_limits
from lookback.core.values.lists import Lists
from lookback.core.values.windows import EVENT, LOOKBACK, SEQUENCE, TiledWindow
from lookback.testing.harness import replay

if TYPE_CHECKING:
    from lookback.core.streams.declaration import Stream

# A chart cannot show more values distinctly, and each costs about 0.1 ms.
_MAX_VALUES = 5_000
_NO_VALUES = pd.DataFrame({"event_time": pd.to_datetime([], utc=True), "value": [], "flagged": []})
_COLUMNS = ("alert_id", "event_id", "event_time", "measures")
# Keys left out of the replay for values: they suppress or repeat alerts, or do not matter here.
_IGNORED_KEYS = ("suppress", "reset_on_alert", "early", "message", "tests")


@dataclass(frozen=True)
class DocumentTrial:
    """The result of a rule over recent events.

    `errors` has the rows that rule_log would have. `final_alerts` has the last row of each alert that was not
    retracted. `values` has rows with event_time, value (NaN for none) and flagged, for each final alert and, for
    comparison, about 5,000 other events or windows. `name` is the measure or field of the values, and `limits` are the
    numbers that `when` compares it with. Event rules and sequences have neither name nor values.
    """

    events: pd.DataFrame = field(repr=False)
    alerts: pd.DataFrame = field(repr=False)
    errors: pd.DataFrame = field(repr=False)
    final_alerts: pd.DataFrame = field(repr=False)
    values: pd.DataFrame = field(default_factory=_NO_VALUES.copy, repr=False)
    name: str = ""
    limits: tuple[float, ...] = ()


def run_trial(
    document: Mapping[str, Any], events: pa.Table, stream: Stream, lists: Lists | None = None
) -> DocumentTrial:
    """Runs a rule over events (see `replay` for their form) with the current lists. Raises RuleError and EventError."""
    known = Lists.empty() if lists is None else lists
    result = replay([document], events, stream, known)
    frame, alerts = events.to_pandas(), result.alerts.to_pandas()
    final_alerts = _find_final_alerts(alerts)
    frames = (frame, alerts, result.errors.to_pandas(), final_alerts)
    rule = compile_rule(document, stream)
    if rule.spec.kind in (EVENT, SEQUENCE):
        return DocumentTrial(*frames)
    measure, fields = main_measure(rule), find_field_limits(rule, stream)
    limits = find_measure_limits(rule).get(measure.name, ())
    field_name = next(iter(fields)) if fields and not limits and rule.spec.kind == LOOKBACK else None
    name = field_name or measure.name
    # With reset_on_alert values depend on earlier alerts, so they need the rule's own condition.
    others = [] if rule.spec.reset_on_alert else _replay_without_condition(document, rule, events, stream, known)
    rows = [*_make_rows(final_alerts.to_dict("records"), flagged=True), *_make_rows(others, flagged=False)]
    value_rows = pd.DataFrame(rows, columns=[*_COLUMNS, "flagged"]).drop_duplicates("alert_id", keep="first")
    if field_name is None:
        values = value_rows["measures"].map(lambda measures: to_number(measures.get(name)))
    else:
        column = frame[field_name].map(to_number)
        values = value_rows["event_id"].map(dict(zip(frame[stream.event_id].astype(str), column, strict=True)))
    drawn = pd.DataFrame(
        {"event_time": value_rows["event_time"], "value": values.astype(float), "flagged": value_rows["flagged"]}
    )
    return DocumentTrial(*frames, drawn.reset_index(drop=True), name, fields[field_name] if field_name else limits)


def _find_final_alerts(alerts: pd.DataFrame) -> pd.DataFrame:
    """Returns the last row of each alert that was not retracted."""
    if not len(alerts):
        return alerts
    last = alerts.drop_duplicates("alert_id", keep="last")
    return last[last["verdict"] != "retracted"]


def _replay_without_condition(
    document: Mapping[str, Any], rule: CompiledRule, events: pa.Table, stream: Stream, lists: Lists
) -> list[dict[str, Any]]:
    """Replays the rule without its condition on evenly spread events, or on the windows of the newest events."""
    probe = {name: value for name, value in document.items() if name not in _IGNORED_KEYS}
    if rule.spec.kind == LOOKBACK:
        # The step shares no factor with 60, so that whole seconds, minutes and hours are spread evenly too.
        step = -(-len(events) // _MAX_VALUES)
        step += next(more for more in range(60) if math.gcd(step + more, 60) == 1)
        probe["when"] = f"mod(unix_micros(`{stream.event_time}`), {step}) = 0" if step > 1 else "true"
        return [vars(alert) for alert in replay([probe], events, stream, lists).alerts]
    probe.pop("when", None)
    window = rule.spec.window
    windows_per_event = -(-window.size // window.slide) if isinstance(window, TiledWindow) else 1
    times = pd.to_datetime(events[stream.event_time].to_pandas(), utc=True)
    max_events = max(1, _MAX_VALUES // windows_per_event)
    since = times.nlargest(max_events).iloc[-1] if len(times) > max_events else None
    newest = events if since is None else events.filter(pa.array((times >= since).to_numpy()))
    alerts = [vars(alert) for alert in replay([probe], newest, stream, lists).alerts if alert.verdict != "retracted"]
    # Windows that began earlier lack events.
    return [alert for alert in reversed(alerts) if since is None or alert["window_start"] >= since]


def _make_rows(alerts: Iterable[Mapping[Any, Any]], *, flagged: bool) -> list[dict[str, Any]]:
    return [{**{name: alert[name] for name in _COLUMNS}, "flagged": flagged} for alert in alerts]
