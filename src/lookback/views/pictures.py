"""Pictures for people: events, what a rule would flag, alerts over time, precision by rule, a running evaluation.

Each function returns a matplotlib Figure of its own and changes nothing outside of it, so it works without a display.
Times are UTC. The time line of one key: `timeline`.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.ticker import FuncFormatter, MaxNLocator

from lookback.views.drawing import (
    BLUE,
    DATES,
    GREEN,
    GREY,
    ORANGE,
    RED,
    SKY,
    legend,
    moment_text,
    new_figure,
    no_formula,
    nothing,
    plain,
    short,
    stacked_axes,
    thousands,
    time_axis,
    titled,
    utc,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from lookback.spark.stream.sink import BatchReport

_RULE_COLOURS = [BLUE, ORANGE, GREEN, RED, SKY, "#CC79A7"]
_DISPOSITIONS = {
    "confirmed": (GREEN, "confirmed"),
    "false_positive": (RED, "false positive"),
    "unclear": (GREY, "unclear"),
}
# Of values, flagged or not.
_POINTS: dict[bool, dict[str, Any]] = {
    False: {"marker": ".", "color": BLUE, "markersize": 4, "alpha": 0.35},
    True: {"marker": "D", "color": RED, "markersize": 5, "zorder": 4},
}
# Up to so many do not hide each other.
_CROWD, _APART = 500, {"markersize": 8, "alpha": 0.7}
_MOST_KEYS = 10
_MOST_RULES = 6


def events_over_time(times: Iterable[object], title: str = "Events over time") -> Figure:
    """Events over event time. times: of the events."""
    figure, (axes,) = stacked_axes(1, 2.9)
    known = utc(times)
    _bars_over_time(axes, known, known, BLUE, "events")
    time_axis(axes)
    span = f", {moment_text(known.min())} to {moment_text(known.max())}" if len(known) else ""
    titled(figure, title, f"{count_text(len(known), 'event')}{span}")
    return figure


def flagged(
    events: pd.DataFrame,
    alerts: pd.DataFrame,
    event_time: str,
    title: str = "What the rule would have flagged",
    *,
    values: pd.DataFrame | None = None,
    name: str = "",
    limits: Iterable[float] = (),
) -> Figure:
    """What a rule would have flagged: values against the limit, alerts over time, and the keys with the most alerts.

    events: the events tried, with a column `event_time` of times; alerts: rows with event_id, event_time and key (a
    mapping), as Result.alerts.to_pandas() gives them. values, name, limits: as a Trial has them; without values the
    events over time stand in their place.
    """
    figure = new_figure(5.2)
    grid = figure.add_gridspec(2, 2, width_ratios=(2.6, 1), height_ratios=(2, 1))
    upper, top = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[:, 1])
    lower = figure.add_subplot(grid[1, 0], sharex=upper)
    times = utc(events[event_time] if len(events) else [])
    raised = utc(alerts["event_time"] if len(alerts) else [])
    if values is None or values["value"].isna().all():
        _bars_over_time(upper, times, times, BLUE, "events")
    else:
        _values(upper, values, name, limits)
    _bars_over_time(lower, raised, times, RED, "alerts")
    upper.tick_params(labelbottom=False)
    time_axis(lower)
    _top_keys(top, alerts)
    share = f"{len(alerts) / len(events):.2%} of events" if len(events) else "no events"
    if len(alerts) and alerts["event_id"].isna().any():
        # Of windows, which are no part of the events.
        share = f"over {len(events):,} events"
    titled(figure, title, f"{count_text(len(alerts), 'alert')}, {share}")
    return figure


def _bars_over_time(axes: Axes, times: pd.DatetimeIndex, among: pd.DatetimeIndex, colour: str, label: str) -> None:
    plain(axes)
    axes.hist(DATES.date2num(times), bins=_edges(among), color=colour, alpha=0.85)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    axes.set_ylim(0, max(1.0, axes.get_ylim()[1]))
    axes.set_ylabel(label)


def _values(axes: Axes, values: pd.DataFrame, name: str, limits: Iterable[float]) -> None:
    """Each value at its time, those that were flagged marked."""
    plain(axes)
    for is_flagged, style in _POINTS.items():
        part = values[values["flagged"] == is_flagged].dropna(subset=["value"])
        if len(part):
            label = "flagged" if is_flagged else f"not flagged ({len(part):,} shown)"
            apart = {} if is_flagged or len(part) > _CROWD else _APART
            at = DATES.date2num(utc(part["event_time"]))
            axes.plot(at, part["value"], linestyle="none", label=label, **{**style, **apart})
    for limit in limits:
        axes.axhline(limit, color=RED, linestyle="--", linewidth=1.4, label=f"limit {thousands(limit)}")
    # From zero on, unless values lie below it.
    if values["value"].min() >= 0:
        axes.set_ylim(bottom=0)
    axes.set_ylabel(name)
    legend(axes)


def alerts_over_time(alerts: pd.DataFrame) -> Figure:
    """Alerts over event time, one colour per rule (the most frequent ones apart, the others together).

    alerts: rows with event_time and rule_id, such as the alerts table's.
    """
    figure, (axes,) = stacked_axes(1, 3.8)
    names = _frequent(alerts)
    edges = _edges(utc(alerts["event_time"]) if len(alerts) else utc([]))
    groups = [DATES.date2num(utc(alerts.loc[alerts["rule_id"].isin(rules), "event_time"])) for rules in names.values()]
    colours = [*_RULE_COLOURS[: len(groups) - 1], GREY] if "other rules" in names else _RULE_COLOURS[: len(groups)]
    labels = [f"{name} ({len(group):,})" for name, group in zip(names, groups, strict=True)]
    if groups:
        axes.hist(groups, bins=edges, stacked=True, color=colours, label=labels)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)
    else:
        nothing(axes, "no alerts")
    axes.set_ylabel("alerts")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    time_axis(axes)
    titled(figure, "Alerts over time", f"{len(alerts):,} alerts")
    return figure


def precision(reviews: pd.DataFrame) -> Figure:
    """What people decided about the alerts of each rule, and the share of those decided that were confirmed.

    reviews: rows of rule_id, disposition (confirmed, false_positive or unclear) and alerts, their number. Rules with the
    most reviews come first; precision is confirmed / (confirmed + false_positive), so `unclear` leaves it as it is.
    """
    counts = reviews.pivot_table(index="rule_id", columns="disposition", values="alerts", aggfunc="sum", fill_value=0)
    counts = counts.reindex(columns=list(_DISPOSITIONS), fill_value=0)
    totals = counts.sum(axis=1).sort_values(ascending=False, kind="stable")
    shown = counts.loc[totals.index[:_MOST_KEYS]]
    figure, (axes,) = stacked_axes(1, 1.6 + 0.4 * max(len(shown), 2))
    axes.grid(visible=False)
    left = np.zeros(len(shown))
    for disposition, (colour, label) in _DISPOSITIONS.items():
        numbers = shown[disposition].to_numpy(dtype=float)
        if numbers.any():
            bars = axes.barh(range(len(shown)), numbers, left=left, color=colour, height=0.62, label=label)
            texts = [f"{number:,.0f}" if number >= 0.04 * totals.max() else "" for number in numbers]
            axes.bar_label(bars, texts, label_type="center", color="white", fontsize=9)
        left += numbers
    for at, (confirmed, wrong) in enumerate(zip(shown["confirmed"], shown["false_positive"], strict=True)):
        share = f"{confirmed / (confirmed + wrong):.0%}" if confirmed + wrong else "undecided"
        axes.annotate(share, (left[at], at), (6, 0), textcoords="offset points", va="center", fontweight="bold")
    if len(shown):
        axes.set_yticks(range(len(shown)), [short(str(name)) for name in shown.index])
        axes.set_ylim(max(len(shown), 2) - 0.5, -0.5)
        axes.margins(x=0.12)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(thousands))
        legend(axes)
    else:
        nothing(axes, "no reviews yet")
    axes.set_xlabel("reviewed alerts")
    titled(figure, "Precision by rule", f"{count_text(int(totals.sum()), 'alert')} reviewed")
    return figure


def live(reports: Sequence[BatchReport], committed: Mapping[int, dt.datetime] | None = None) -> Figure:
    """A running evaluation: events/s, lag, rows of state and alerts per rule, batch by batch.

    committed: commit version -> when it was made; the lag is the time from the commit of a batch's last events to the
    commit of its alerts. Without it the seconds that each batch took are shown.
    """
    figure = new_figure(5.4)
    (rate, lag), (state, alerts) = figure.subplots(2, 2)
    times = [report.finished_at for report in reports]
    _line(rate, times, events_per_second(reports), BLUE, "events/s")
    lags = lag_seconds(reports, committed) if committed else None
    if lags is not None and any(not math.isnan(value) for value in lags):
        _line(lag, times, lags, ORANGE, "lag, commit to alert (s)")
    else:
        _line(lag, times, [(r.run_ms + r.write_ms) / 1_000 for r in reports], ORANGE, "seconds per batch")
    _line(state, times, [float(report.state_rows) for report in reports], GREEN, "rows of window state")
    _bars(alerts, alert_totals(reports), "alerts since the start")
    last = reports[-1] if reports else None
    text = "waiting for the first batch" if last is None else (
        f"{count_text(sum(r.events for r in reports), 'event')}, "
            f"{count_text(sum(sum(r.alerts.values()) for r in reports), 'alert')}, "
        f"{count_text(last.rules, 'rule')}, watermark {_watermark(last.watermark)}"
    )  # fmt: skip
    titled(figure, "Evaluation", text)
    return figure


def count_text(number: int, noun: str) -> str:
    """`1 rule`, `2,000 rules`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def events_per_second(reports: Sequence[BatchReport]) -> list[float]:
    """Events of each batch by the seconds since the batch before ended (of the first: by those that it took)."""
    rates = []
    for at, report in enumerate(reports):
        took = (report.run_ms + report.write_ms) / 1_000
        if at:
            took = (report.finished_at - reports[at - 1].finished_at).total_seconds()
        rates.append(report.events / took if took > 0 else 0.0)
    return rates


def lag_seconds(reports: Sequence[BatchReport], committed: Mapping[int, dt.datetime]) -> list[float]:
    """From the commit of each batch's last events until its alerts were written; NaN where the commit is not known."""
    made = [None if report.arrival is None else committed.get(report.arrival) for report in reports]
    return [
        math.nan if at is None else (report.finished_at - at).total_seconds()
        for report, at in zip(reports, made, strict=True)
    ]


def alert_totals(reports: Iterable[BatchReport]) -> dict[str, int]:
    """Alerts per rule over all reports, most first."""
    totals: dict[str, int] = {}
    for report in reports:
        for rule_id, count in report.alerts.items():
            totals[rule_id] = totals.get(rule_id, 0) + count
    return dict(sorted(totals.items(), key=lambda item: (-item[1], item[0])))


def _watermark(microseconds: int | None) -> str:
    if microseconds is None:
        return "not yet"
    return moment_text(dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc) + dt.timedelta(microseconds=microseconds))


def _edges(times: pd.DatetimeIndex) -> list[float]:
    """At most 60 bars over the times; one day without any."""
    if not len(times):
        return [0.0, 1.0]
    low, high = float(DATES.date2num(times.min())), float(DATES.date2num(times.max()))
    high = high if high > low else low + 1 / 24
    return list(np.linspace(low, high, min(60, max(10, len(times))) + 1).tolist())


def _top_keys(axes: Axes, alerts: pd.DataFrame) -> None:
    names = [", ".join("null" if v is None else str(v) for v in key.values()) or "all" for key in alerts.get("key", [])]
    names = [no_formula(name) for name in names]
    counts = pd.Series(names, dtype=object).value_counts().head(_MOST_KEYS)
    fields = next((", ".join(key) for key in alerts.get("key", []) if key), "key")
    _bars(axes, {str(name): int(count) for name, count in counts.items()}, "alerts")
    axes.set_title(f"most alerts by {fields}", loc="left", fontsize=10, color="#444444")


def _bars(axes: Axes, counts: Mapping[str, int], label: str) -> None:
    plain(axes)
    axes.grid(visible=False)
    axes.set_xlabel(label)
    if not counts:
        nothing(axes, "none")
        return
    shown = dict(list(counts.items())[:_MOST_KEYS])
    bars = axes.barh([short(name) for name in shown], list(shown.values()), color=RED, alpha=0.85, height=0.65)
    axes.bar_label(bars, fmt=thousands, padding=3, fontsize=9)
    # Few bars do not grow to fill the height.
    axes.set_ylim(max(len(shown), 5) - 0.5, -0.5)
    axes.margins(x=0.18)
    axes.set_yticks(range(len(shown)), [short(name) for name in shown])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
    axes.xaxis.set_major_formatter(FuncFormatter(thousands))


def _line(axes: Axes, times: Sequence[dt.datetime], values: Sequence[float], colour: str, label: str) -> None:
    plain(axes)
    axes.set_ylabel(label)
    if not times:
        nothing(axes, "no batch yet")
        return
    size = 3 if len(times) > 5 else 6
    axes.plot(DATES.date2num(times), values, color=colour, linewidth=1.6, marker="o", markersize=size)
    known = [value for value in values if not math.isnan(value)]
    axes.set_ylim(0, 1.1 * max(known, default=0.0) or 1.0)
    locator = DATES.AutoDateLocator(tz=dt.timezone.utc, minticks=3, maxticks=6)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(DATES.DateFormatter("%H:%M:%S", tz=dt.timezone.utc))
    axes.set_xlabel("UTC")
    if len(times) == 1:
        axes.set_xlim(*(DATES.date2num(times[0] + dt.timedelta(seconds=side)) for side in (-5, 5)))


def _frequent(alerts: pd.DataFrame) -> dict[str, list[str]]:
    """Label -> rule ids: the most frequent rules by themselves, the others as one."""
    counts = alerts["rule_id"].value_counts() if len(alerts) else pd.Series(dtype=int)
    ordered = [str(name) for name in counts.index]
    alone = ordered if len(ordered) <= _MOST_RULES else ordered[: _MOST_RULES - 1]
    rest = ordered[len(alone) :]
    return {**{name: [name] for name in alone}, **({"other rules": rest} if rest else {})}
