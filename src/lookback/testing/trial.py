"""Tries a rule over history without Spark: finds what it would have flagged, and the values it compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa

from lookback.core.explaining.measures import main_measure, to_number
from lookback.core.rules.compiled import CompiledRule
from lookback.core.rules.compiling import compile_rule
from lookback.core.rules.wording import find_field_limits, find_measure_limits
from lookback.core.values.lists import Lists
from lookback.core.values.types import BIGINT
from lookback.core.values.windows import EVENT, LOOKBACK, SEQUENCE, TiledWindow
from lookback.testing.harness import replay

if TYPE_CHECKING:
    from lookback.core.streams.declaration import Stream

# A chart cannot show more values distinctly, and each costs about 0.1 ms.
_MAX_VALUES = 5_000
# Windows that are drawn to take the values from.
_MAX_DRAWN_WINDOWS = 4 * _MAX_VALUES
_NO_VALUES = pd.DataFrame({"event_time": pd.to_datetime([], utc=True), "value": [], "flagged": []})
_COLUMNS = ("alert_id", "event_id", "event_time", "measures")
# Keys left out of the replay for values: they suppress or repeat alerts, or do not matter here.
_IGNORED_KEYS = ("suppress", "reset_on_alert", "early", "message", "tests")


@dataclass(frozen=True)
class DocumentTrial:
    """The result of a rule over recent events.

    `errors` has the rows that rule_log would have. `final_alerts` has the last row of each alert that was not
    retracted. `values` has rows with event_time, value (NaN for none) and flagged, for each final alert and, for
    comparison, a random sample of at most 5,000 other events or windows. `name` is the measure or field of the values,
    and `limits` are the numbers that `when` compares it with. Event rules and sequences have neither name nor values.
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
    """Replays the rule without its condition on a random sample of the events or windows, the same for each call.

    Each event gets a random number below `step` in a field of its own. Of lookback rules, the events with zero are the
    sample; of others, the windows whose sum is a multiple of `step`.
    """
    probe = {name: value for name, value in document.items() if name not in _IGNORED_KEYS}
    window, chance = rule.spec.window, np.random.default_rng(0)
    windows_per_event = -(-window.size // window.slide) if isinstance(window, TiledWindow) else 1
    # Most windows have several events, so of windows more are drawn, and then cut.
    max_values = _MAX_VALUES if rule.spec.kind == LOOKBACK else _MAX_DRAWN_WINDOWS
    step = max(1, -(-len(events) * windows_per_event // max_values))
    name = "lookback_sample"
    while name in stream.fields:
        name += "_"
    drawn = events.append_column(name, pa.array(chance.integers(0, step, len(events)), pa.int64()))
    if rule.spec.kind == LOOKBACK:
        probe["when"] = f"{name} = 0"
    else:
        probe["measures"] = {**(probe.get("measures") or {}), f"{name}_sum": f"sum({name})"}
        probe["when"] = f"mod({name}_sum, {step}) = 0"
    sampled = replace(stream, fields={**stream.fields, name: BIGINT})
    alerts = [vars(alert) for alert in replay([probe], drawn, sampled, lists).alerts if alert.verdict != "retracted"]
    kept = np.sort(chance.permutation(len(alerts))[:_MAX_VALUES])
    return [alerts[at] for at in kept.tolist()]


def _make_rows(alerts: Iterable[Mapping[Any, Any]], *, flagged: bool) -> list[dict[str, Any]]:
    return [{**{name: alert[name] for name in _COLUMNS}, "flagged": flagged} for alert in alerts]
