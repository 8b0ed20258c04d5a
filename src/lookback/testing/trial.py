"""A rule tried over history, without Spark: what it would have flagged, and the values that it went by."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa

from lookback.core.explaining.explanation import main_measure
from lookback.core.rules.compiled import CompiledRule, compile_rule
from lookback.core.rules.wording import find_field_limits, find_measure_limits
from lookback.core.values.windows import LOOKBACK, SEQUENCE, TiledWindow
from lookback.testing.harness import replay

if TYPE_CHECKING:
    from lookback.core.streams.declaration import Stream

# A picture cannot show more apart, and each costs about 0.1 ms.
_MOST_VALUES = 5_000
_NO_VALUES = pd.DataFrame({"event_time": pd.to_datetime([], utc=True), "value": [], "flagged": []})
_SAID = ("alert_id", "event_id", "event_time", "measures")
# What makes of values more or fewer alerts, and what nobody reads here.
_APART = ("suppress", "reset_on_alert", "early", "message", "tests")


@dataclass(frozen=True)
class Trial:
    """What a rule says of recent events.

    errors: rows of the kind that rule_log would have had. standing: the last row of each alert that was not retracted.
    values: what the rule went by, rows of event_time, value (NaN: none) and flagged; of all that stands in `standing`
    and, for comparison, of about 5,000 others. name: of the measure or the field that they are of; empty, without
    values, for a sequence. limits: the numbers that `when` compares it with.
    """

    events: pd.DataFrame = field(repr=False)
    alerts: pd.DataFrame = field(repr=False)
    errors: pd.DataFrame = field(repr=False)
    standing: pd.DataFrame = field(repr=False)
    values: pd.DataFrame = field(default_factory=_NO_VALUES.copy, repr=False)
    name: str = ""
    limits: tuple[float, ...] = ()


def run_trial(document: Mapping[str, Any], events: pa.Table, stream: Stream) -> Trial:
    """Runs a rule over events; see `replay` for their form. Raises RuleError and EventError."""
    result = replay([document], events, stream)
    frame, alerts = events.to_pandas(), result.alerts.to_pandas()
    known = (frame, alerts, result.errors.to_pandas(), _standing(alerts))
    rule = compile_rule(document, stream)
    if rule.spec.kind == SEQUENCE:
        return Trial(*known)
    measure, fields = main_measure(rule), find_field_limits(rule, stream)
    limits = find_measure_limits(rule).get(measure.name, ())
    of_field = next(iter(fields)) if fields and not limits and rule.spec.kind == LOOKBACK else None
    name = of_field or measure.name
    # Of an alert that resets its key the others cannot be told without it.
    others = [] if rule.spec.reset_on_alert else _others(document, rule, events, stream)
    said = [*_said(known[3].to_dict("records"), flagged=True), *_said(others, flagged=False)]
    rows = pd.DataFrame(said, columns=[*_SAID, "flagged"]).drop_duplicates("alert_id", keep="first")
    if of_field is None:
        values = rows["measures"].map(lambda measures: _number(measures.get(name)))
    else:
        column = frame[of_field].map(_number)
        values = rows["event_id"].map(dict(zip(frame[stream.event_id].astype(str), column, strict=True)))
    drawn = pd.DataFrame({"event_time": rows["event_time"], "value": values.astype(float), "flagged": rows["flagged"]})
    return Trial(*known, drawn.reset_index(drop=True), name, fields[of_field] if of_field else limits)


def _standing(alerts: pd.DataFrame) -> pd.DataFrame:
    """The last row of each alert, without those that were retracted."""
    if not len(alerts):
        return alerts
    last = alerts.drop_duplicates("alert_id", keep="last")
    return last[last["verdict"] != "retracted"]


def _others(document: Mapping[str, Any], rule: CompiledRule, events: pa.Table, stream: Stream) -> list[dict[str, Any]]:
    """What the rule would say without its condition: of events spread over all, or of the windows of the newest ones."""
    probe = {name: value for name, value in document.items() if name not in _APART}
    if rule.spec.kind == LOOKBACK:
        # Times in whole seconds, minutes or hours are spread as well: the step has no factor in common with them.
        step = -(-len(events) // _MOST_VALUES)
        step += next(more for more in range(60) if math.gcd(step + more, 60) == 1)
        probe["when"] = f"mod(unix_micros(`{stream.event_time}`), {step}) = 0" if step > 1 else "true"
        return [vars(alert) for alert in replay([probe], events, stream).alerts]
    probe.pop("when", None)
    window = rule.spec.window
    each = -(-window.size // window.slide) if isinstance(window, TiledWindow) else 1
    times = pd.to_datetime(events[stream.event_time].to_pandas(), utc=True)
    most = max(1, _MOST_VALUES // each)
    since = times.nlargest(most).iloc[-1] if len(times) > most else None
    newest = events if since is None else events.filter(pa.array((times >= since).to_numpy()))
    alerts = [vars(alert) for alert in replay([probe], newest, stream).alerts if alert.verdict != "retracted"]
    # What began before has lost events.
    return [alert for alert in reversed(alerts) if since is None or alert["window_start"] >= since]


def _said(alerts: Iterable[Mapping[Any, Any]], *, flagged: bool) -> list[dict[str, Any]]:
    return [{**{name: alert[name] for name in _SAID}, "flagged": flagged} for alert in alerts]


def _number(value: Any) -> float:
    """A value as a picture shows it: NaN where there is no number."""
    return float("nan") if value is None or isinstance(value, str) or not hasattr(value, "__float__") else float(value)
