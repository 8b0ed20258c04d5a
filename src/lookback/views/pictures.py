"""Plots events, the alerts of a trial, alerts over time, precision by rule, and a running evaluation.

Each function returns a new matplotlib Figure and changes nothing else, so it works without a display. Times are UTC.
`timeline` plots the time line of one key.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.ticker import FuncFormatter, MaxNLocator

from lookback.core.values.texts import count_noun
from lookback.core.values.times import format_time
from lookback.views.drawing import (
    BLUE,
    DATES,
    GREEN,
    GREY,
    ORANGE,
    RED,
    SKY,
    draw_legend,
    draw_legend_beside,
    draw_limit,
    escape_formula,
    format_share_axis,
    format_thousands,
    format_time_axis,
    make_figure,
    make_stacked_axes,
    set_titles,
    shorten_name,
    style_axes,
    to_utc_index,
    write_placeholder,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from lookback.spark.batches.sink import BatchReport
    from lookback.testing.trial import DocumentTrial

_RULE_COLOURS = [BLUE, ORANGE, GREEN, RED, SKY, "#CC79A7"]
_DISPOSITIONS = {
    "confirmed": (GREEN, "confirmed"),
    "false_positive": (RED, "false positive"),
    "benign": (ORANGE, "benign"),
    "unclear": (GREY, "unclear"),
}
# The style of flagged and of other values.
_POINT_STYLES: dict[bool, dict[str, Any]] = {
    False: {"marker": ".", "color": BLUE, "markersize": 4, "alpha": 0.35},
    True: {"marker": "D", "color": RED, "markersize": 5, "zorder": 4},
}
# Up to this number, points are drawn larger, as they do not hide each other.
_MAX_LARGE_POINTS, _LARGE_POINTS = 500, {"markersize": 8, "alpha": 0.7}
_MAX_KEYS = 10
_MAX_BARS = 60
# The lengths of bars, in minutes, and the first Monday since the day from which matplotlib counts.
_DAY = 24 * 60
_BARS = (1, 5, 15, 30, 60, 2 * 60, 3 * 60, 6 * 60, 12 * 60, _DAY, 7 * _DAY, 28 * _DAY)
_FIRST_MONDAY = 4 * _DAY
_MAX_RULES = 6


def plot_events_over_time(times: Iterable[object], title: str = "Events over time") -> Figure:
    """Plots a histogram of event times."""
    figure, (axes,) = make_stacked_axes(1, 2.9)
    known = to_utc_index(times)
    _draw_histogram(axes, known, known, BLUE, "events")
    format_time_axis(axes)
    span = f", {format_time(known.min())} to {format_time(known.max())}" if len(known) else ""
    set_titles(figure, title, f"{count_noun(len(known), 'event')}{span}")
    return figure


def plot_trial(rule_id: str, trial: DocumentTrial, event_time: str) -> Figure:
    """Plots what a rule would have flagged: values against the limit, alerts over time, and the keys with most alerts.

    The trial's events have their times in the column `event_time`. Without values, events over time are plotted instead.
    """
    events, alerts, values = trial.events, trial.final_alerts, trial.values
    figure = make_figure(5.2)
    grid = figure.add_gridspec(2, 2, width_ratios=(2.6, 1), height_ratios=(2, 1))
    upper, top = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[:, 1])
    lower = figure.add_subplot(grid[1, 0], sharex=upper)
    times = to_utc_index(events[event_time] if len(events) else [])
    raised = to_utc_index(alerts["event_time"] if len(alerts) else [])
    if values["value"].isna().all():
        _draw_histogram(upper, times, times, BLUE, "events")
    else:
        _draw_values(upper, values, trial.name, trial.limits)
    _draw_histogram(lower, raised, times, RED, "alerts")
    upper.tick_params(labelbottom=False)
    format_time_axis(lower)
    _draw_top_keys(top, alerts)
    share = f"{len(alerts) / len(events):.2%} of events" if len(events) else "no events"
    if len(alerts) and alerts["event_id"].isna().any():
        # Alerts on windows are not about single events, so their share of events would mean nothing.
        share = f"over {len(events):,} events"
    set_titles(figure, f"{rule_id}: what it would have flagged", f"{count_noun(len(alerts), 'alert')}, {share}")
    return figure


def _draw_histogram(axes: Axes, times: pd.DatetimeIndex, among: pd.DatetimeIndex, colour: str, label: str) -> None:
    style_axes(axes)
    axes.hist(DATES.date2num(times), bins=_find_bin_edges(among), color=colour, alpha=0.85)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    axes.set_ylim(0, max(1.0, axes.get_ylim()[1]))
    axes.set_ylabel(label)


def _draw_values(axes: Axes, values: pd.DataFrame, name: str, limits: Iterable[float]) -> None:
    """Draws each value at its time and marks the flagged ones."""
    style_axes(axes)
    for is_flagged, style in _POINT_STYLES.items():
        part = values[values["flagged"] == is_flagged].dropna(subset=["value"])
        if len(part):
            label = "flagged" if is_flagged else f"not flagged ({len(part):,} shown)"
            apart = {} if is_flagged or len(part) > _MAX_LARGE_POINTS else _LARGE_POINTS
            at = DATES.date2num(to_utc_index(part["event_time"]))
            axes.plot(at, part["value"], linestyle="none", label=label, **{**style, **apart})
    for limit in limits:
        draw_limit(axes, limit, f"limit {format_thousands(limit)}")
    # The axis starts at zero unless a value is negative.
    if values["value"].min() >= 0:
        axes.set_ylim(bottom=0)
    axes.set_ylabel(name)
    draw_legend(axes)


def plot_alerts_over_time(alerts: pd.DataFrame) -> Figure:
    """Plots alerts over event time, with one colour per frequent rule and one for the remaining rules.

    `alerts` has rows with event_time and rule_id, such as the alerts table.
    """
    figure, (axes,) = make_stacked_axes(1, 3.8)
    names = _group_frequent_rules(alerts)
    edges = _find_bin_edges(to_utc_index(alerts["event_time"]) if len(alerts) else to_utc_index([]))
    groups = [
        DATES.date2num(to_utc_index(alerts.loc[alerts["rule_id"].isin(rules), "event_time"]))
        for rules in names.values()
    ]
    colours = [*_RULE_COLOURS[: len(groups) - 1], GREY] if "other rules" in names else _RULE_COLOURS[: len(groups)]
    labels = [f"{name} ({len(group):,})" for name, group in zip(names, groups, strict=True)]
    if groups:
        axes.hist(groups, bins=edges, stacked=True, color=colours, label=labels)
        draw_legend_beside(axes)
    else:
        write_placeholder(axes, "no alerts")
    axes.set_ylabel("alerts")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    format_time_axis(axes)
    set_titles(figure, "Alerts over time", f"{len(alerts):,} alerts")
    return figure


def plot_precision(reviews: pd.DataFrame) -> Figure:
    """Plots the dispositions of each rule's alerts, and its precision: confirmed / decided.

    `reviews` has rows with rule_id, disposition (see DISPOSITIONS) and the number of alerts. Rules with the most
    reviews come first. All dispositions except unclear count as decided.
    """
    counts = reviews.pivot_table(index="rule_id", columns="disposition", values="alerts", aggfunc="sum", fill_value=0)
    counts = counts.reindex(columns=list(_DISPOSITIONS), fill_value=0)
    totals = counts.sum(axis=1).sort_values(ascending=False, kind="stable")
    shown = counts.loc[totals.index[:_MAX_KEYS]]
    figure, (axes,) = make_stacked_axes(1, 1.6 + 0.4 * max(len(shown), 2))
    axes.grid(visible=False)
    left = np.zeros(len(shown))
    for disposition, (colour, label) in _DISPOSITIONS.items():
        numbers = shown[disposition].to_numpy(dtype=float)
        if numbers.any():
            bars = axes.barh(range(len(shown)), numbers, left=left, color=colour, height=0.62, label=label)
            texts = [f"{number:,.0f}" if number >= 0.04 * totals.max() else "" for number in numbers]
            axes.bar_label(bars, texts, label_type="center", color="white", fontsize=9)
        left += numbers
    decided = shown.sum(axis=1) - shown["unclear"]
    for at, (confirmed, all_) in enumerate(zip(shown["confirmed"], decided, strict=True)):
        share = f"{confirmed / all_:.0%}" if all_ else "undecided"
        axes.annotate(share, (left[at], at), (6, 0), textcoords="offset points", va="center", fontweight="bold")
    if len(shown):
        axes.set_yticks(range(len(shown)), [shorten_name(str(name)) for name in shown.index])
        axes.set_ylim(max(len(shown), 2) - 0.5, -0.5)
        axes.margins(x=0.12)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(format_thousands))
        draw_legend(axes)
    else:
        write_placeholder(axes, "no reviews yet")
    axes.set_xlabel("reviewed alerts")
    set_titles(figure, "Precision by rule", f"{count_noun(int(totals.sum()), 'alert')} reviewed")
    return figure


def plot_rule_figures(days: pd.DataFrame) -> Figure:
    """Plots daily precision and recall by rule; the black line is all rules together.

    `days` has rows with day, rule_id (None for all together), flagged, precision and recall. Days without a value leave
    a gap.
    """
    figure, axes = make_stacked_axes(2, 5.0, sharex=True)
    rules = (
        days[days["rule_id"].notna()].groupby("rule_id")["flagged"].sum().sort_values(ascending=False, kind="stable")
    )
    shown = [str(name) for name in rules.index[: _MAX_RULES - 1]]
    lines = [(name, days[days["rule_id"] == name], colour) for name, colour in zip(shown, _RULE_COLOURS, strict=False)]
    lines.append(("all together", days[days["rule_id"].isna()], "#222222"))
    for each, measure in zip(axes, ("precision", "recall"), strict=True):
        for name, rows, colour in lines:
            values = pd.to_numeric(rows[measure], errors="coerce")
            at = DATES.date2num(to_utc_index(rows["day"])) if len(rows) else []
            style: dict[str, Any] = {"marker": "o", "markersize": 3, "linewidth": 1.6, "alpha": 0.9}
            each.plot(at, values.to_numpy(dtype=float), color=colour, label=shorten_name(name), **style)
        format_share_axis(each, measure)
    if len(days) and days[["precision", "recall"]].notna().any(axis=None):
        draw_legend_beside(axes[0])
    else:
        write_placeholder(axes[0], "no labels yet")
    format_time_axis(axes[1])
    more = f", {len(rules) - len(shown)} more not drawn" if len(rules) > len(shown) else ""
    set_titles(figure, "Precision and recall over time", f"{count_noun(len(rules), 'rule')}{more}")
    return figure


def plot_overlap(pairs: pd.DataFrame, alone: pd.DataFrame) -> Figure:
    """Plots a heat map of the rules that flag the same events; the diagonal shows what each catches alone.

    `pairs` has rows with a, b, both and jaccard; `alone` has a, alone and flagged. Shows the _MAX_KEYS rules that flag
    most.
    """
    ordered = alone.sort_values("flagged", ascending=False, kind="stable")["a"].head(_MAX_KEYS)
    names = [str(name) for name in ordered]
    figure, (axes,) = make_stacked_axes(1, 1.8 + 0.42 * max(len(names), 2))
    axes.grid(visible=False)
    set_titles(figure, "Overlap of rules", "shared events over those of either; on the diagonal positives caught alone")
    if not names:
        write_placeholder(axes, "no rules")
        return figure
    place = {name: at for at, name in enumerate(names)}
    shares = np.full((len(names), len(names)), np.nan)
    for a, b, jaccard in pairs[["a", "b", "jaccard"]].itertuples(index=False, name=None):
        if a in place and b in place and jaccard is not None:
            shares[place[a], place[b]] = shares[place[b], place[a]] = jaccard
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    middle: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 9}
    for row, column in np.argwhere(~np.isnan(shares)).tolist():
        share = shares[row, column]
        colour = "white" if share > 0.5 else "#222222"
        axes.text(column, row, f"{share:.0%}", color=colour, **middle)
    caught = dict(zip(alone["a"], alone["alone"], strict=True))
    for name, at in place.items():
        axes.text(at, at, f"{caught[name]:,}", color=GREEN, fontweight="bold", **middle)
    labels = [shorten_name(name) for name in names]
    axes.set_xticks(range(len(names)), labels, rotation=30, ha="right")
    axes.set_yticks(range(len(names)), labels)
    return figure


def plot_evaluation(reports: Sequence[BatchReport], committed: Mapping[int, dt.datetime] | None = None) -> Figure:
    """Plots a running evaluation by batch: events/s, lag, rows of state and alerts per rule.

    `committed` has commit times by version. The lag is the time from the commit of a batch's last events to the commit
    of its alerts. Without commit times, the duration of each batch is plotted instead.
    """
    figure = make_figure(5.4)
    (rate, lag), (state, alerts) = figure.subplots(2, 2)
    times = [report.finished_at for report in reports]
    _draw_line(rate, times, compute_events_per_second(reports), BLUE, "events/s")
    lags = compute_lag_seconds(reports, committed) if committed else None
    if lags is not None and any(not math.isnan(value) for value in lags):
        _draw_line(lag, times, lags, ORANGE, "lag, commit to alert (s)")
    else:
        _draw_line(lag, times, [(r.run_ms + r.write_ms) / 1_000 for r in reports], ORANGE, "seconds per batch")
    _draw_line(state, times, [float(report.state_rows) for report in reports], GREEN, "rows of window state")
    _draw_bars(alerts, sum_alerts(reports), "alerts since the start")
    last = reports[-1] if reports else None
    text = "waiting for the first batch"
    if last is not None:
        counts = {"event": sum(r.events for r in reports), "alert": sum(sum(r.alerts.values()) for r in reports)}
        counted = ", ".join(count_noun(count, noun) for noun, count in {**counts, "rule": last.rules}.items())
        text = f"{counted}, watermark {_format_watermark(last.watermark)}"
    set_titles(figure, "Evaluation", text)
    return figure


def compute_events_per_second(reports: Sequence[BatchReport]) -> list[float]:
    """Divides the events of each batch by the seconds since the previous batch ended (the first: by its duration)."""
    rates = []
    for at, report in enumerate(reports):
        took = (report.run_ms + report.write_ms) / 1_000
        if at:
            took = (report.finished_at - reports[at - 1].finished_at).total_seconds()
        rates.append(report.events / took if took > 0 else 0.0)
    return rates


def compute_lag_seconds(reports: Sequence[BatchReport], committed: Mapping[int, dt.datetime]) -> list[float]:
    """Returns the seconds from the commit of each batch's last events until its alerts; NaN if the commit is unknown."""
    commit_times = [None if report.arrival is None else committed.get(report.arrival) for report in reports]
    return [
        math.nan if at is None else (report.finished_at - at).total_seconds()
        for report, at in zip(reports, commit_times, strict=True)
    ]


def sum_alerts(reports: Iterable[BatchReport]) -> dict[str, int]:
    """Returns the alerts of each rule over all reports, most first."""
    totals: dict[str, int] = {}
    for report in reports:
        for rule_id, count in report.alerts.items():
            totals[rule_id] = totals.get(rule_id, 0) + count
    return dict(sorted(totals.items(), key=lambda item: (-item[1], item[0])))


def _format_watermark(microseconds: int | None) -> str:
    if microseconds is None:
        return "not yet"
    return format_time(int(microseconds))


def _find_bin_edges(times: pd.DatetimeIndex) -> list[float]:
    """Returns the edges of at most 60 bars over the times, in days as matplotlib counts them, or one day without times.

    Bars are whole hours or days, and minutes if the times are within three hours. They begin at midnight or divide the
    day, and weeks begin on Monday. Otherwise a bar with one midnight more than the others would look like a spike.
    """
    if not len(times):
        return [0.0, 1.0]
    low, high = (DATES.date2num(time) * _DAY for time in (times.min(), times.max()))
    steps = [*_BARS, *range(2 * _BARS[-1], int(high - low), _BARS[-1])]
    steps = steps if high - low <= 3 * 60 else [step for step in steps if step >= 60]
    for step in steps:
        monday = _FIRST_MONDAY if step > _DAY else 0
        first, end = (low - monday) // step, (high - monday) // step + 1
        if end - first <= _MAX_BARS:
            break
    return [(monday + at * step) / _DAY for at in range(int(first), int(end) + 1)]


def _draw_top_keys(axes: Axes, alerts: pd.DataFrame) -> None:
    names = [", ".join("null" if v is None else str(v) for v in key.values()) or "all" for key in alerts.get("key", [])]
    names = [escape_formula(name) for name in names]
    counts = pd.Series(names, dtype=object).value_counts().head(_MAX_KEYS)
    fields = next((", ".join(key) for key in alerts.get("key", []) if key), "key")
    _draw_bars(axes, {str(name): int(count) for name, count in counts.items()}, "alerts")
    axes.set_title(f"most alerts by {fields}", loc="left", fontsize=10, color="#444444")


def _draw_bars(axes: Axes, counts: Mapping[str, int], label: str) -> None:
    style_axes(axes)
    axes.grid(visible=False)
    axes.set_xlabel(label)
    if not counts:
        write_placeholder(axes, "none")
        return
    shown = dict(list(counts.items())[:_MAX_KEYS])
    bars = axes.barh([shorten_name(name) for name in shown], list(shown.values()), color=RED, alpha=0.85, height=0.65)
    axes.bar_label(bars, fmt=format_thousands, padding=3, fontsize=9)
    # Fewer than five bars are as thin as five.
    axes.set_ylim(max(len(shown), 5) - 0.5, -0.5)
    axes.margins(x=0.18)
    axes.set_yticks(range(len(shown)), [shorten_name(name) for name in shown])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
    axes.xaxis.set_major_formatter(FuncFormatter(format_thousands))


def _draw_line(axes: Axes, times: Sequence[dt.datetime], values: Sequence[float], colour: str, label: str) -> None:
    style_axes(axes)
    axes.set_ylabel(label)
    if not times:
        write_placeholder(axes, "no batch yet")
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


def _group_frequent_rules(alerts: pd.DataFrame) -> dict[str, list[str]]:
    """Groups rule ids by label: each of the most frequent rules alone, the remaining rules together."""
    counts = alerts["rule_id"].value_counts() if len(alerts) else pd.Series(dtype=int)
    ordered = [str(name) for name in counts.index]
    alone = ordered if len(ordered) <= _MAX_RULES else ordered[: _MAX_RULES - 1]
    rest = ordered[len(alone) :]
    return {**{name: [name] for name in alone}, **({"other rules": rest} if rest else {})}
