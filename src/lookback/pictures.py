"""Pictures for people: one key's time line, what a rule would flag, alerts over time, a running evaluation.

Each function returns a matplotlib Figure of its own and changes nothing outside of it, so it works without a display.
Times are UTC. The colours are Okabe and Ito's (2008), which stay apart for colour-blind eyes.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib.dates
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from lookback.core.windows import LOOKBACK, SEQUENCE, SESSION

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from lookback.core.evidence import Explanation, MeasureEvidence
    from lookback.spark.sink import BatchReport

# Its functions carry no types.
_DATES: Any = matplotlib.dates
_BLUE, _ORANGE, _GREEN, _RED, _SKY, _GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#7F7F7F"
_RULE_COLOURS = [_BLUE, _ORANGE, _GREEN, _RED, _SKY, "#CC79A7"]
_WIDTH = 10.0
_MOST_KEYS = 10
_MOST_RULES = 6


def key_timeline(explanation: Explanation) -> Figure:
    """The key's events over time and what the alert made of them; the alert marked.

    Of measures: upper axes: what each event brought to the one that has a limit, the window shaded; lower axes: that
    measure and its limits, as of each event of a lookback rule, window by window of others. Of a sequence: the events
    by the step that took them, the time that the steps had and the wait for an absence shaded.
    """
    if explanation.kind == SEQUENCE:
        return _of_sequence(explanation)
    return _of_events(explanation) if explanation.kind == LOOKBACK else _of_windows(explanation)


def _of_events(explanation: Explanation) -> Figure:
    frame, main = explanation.timeline, _main(explanation)
    figure, (upper, lower) = _axes(2, 5.6, sharex=True)
    _brought(upper, explanation, "look-back window")
    _shade(lower, main.window_start, main.window_end, _SKY, "look-back window")
    raised = frame[frame["is_alert"]]
    if len(raised):
        upper.plot(
            raised["event_time"], raised["value"], "D", color=_RED, markersize=8, zorder=4, label="raised the alert"
        )
    running = frame.dropna(subset=["running"])
    lower.step(running["event_time"], running["running"], where="post", color=_BLUE, linewidth=1.6, label=main.name)
    lower.plot(running["event_time"], running["running"], ".", color=_BLUE, markersize=5)
    _limits(lower, explanation)
    if len(raised):
        lower.plot(raised["event_time"], raised["running"], "D", color=_RED, markersize=8, zorder=4)
        _value_label(lower, _DATES.date2num(raised["event_time"].iloc[-1]), raised["running"].iloc[-1], main.recorded)
    lower.set_ylabel(f"{main.name} as of each event")
    return _finished(figure, explanation)


def _of_windows(explanation: Explanation) -> Figure:
    windows, main = explanation.windows, _main(explanation)
    what = "session" if explanation.kind == SESSION else "window"
    figure, (upper, lower) = _axes(2, 5.6, sharex=True)
    _brought(upper, explanation, what)
    _shade(lower, main.window_start, main.window_end, _SKY, what)
    drawn = windows.dropna(subset=["value"])
    overlap = bool((windows["window_start"].iloc[1:].to_numpy() < windows["window_end"].iloc[:-1].to_numpy()).any())
    for is_alert, colour in ((False, _GREY), (True, _BLUE)):
        part = drawn[drawn["is_alert"] == is_alert]
        starts, ends = _DATES.date2num(_times(part["window_start"])), _DATES.date2num(_times(part["window_end"]))
        label = main.name if is_alert else f"{main.name} of {what}s before"
        if not len(part):
            continue
        if overlap:
            lower.hlines(part["value"], starts, ends, color=colour, linewidth=3, label=label)
        else:
            lower.bar(
                starts,
                part["value"],
                ends - starts,
                align="edge",
                color=colour,
                edgecolor="white",
                alpha=0.7,
                label=label,
            )
        if is_alert and main.recorded is not None:
            middle = (starts[-1] + ends[-1]) / 2
            _value_label(lower, middle, float(part["value"].iloc[-1]), main.recorded, above=True)
    _limits(lower, explanation)
    lower.set_ylabel(f"{main.name} of each {what}")
    return _finished(figure, explanation)


def _of_sequence(explanation: Explanation) -> Figure:
    frame, alert = explanation.timeline, explanation.alert
    names = [step.name for step in explanation.steps]
    figure, (axes,) = _axes(1, 1.9 + 0.5 * (len(names) + 1))
    axes.grid(visible=False)
    shades = {"steps": (_SKY, "time for the steps"), "wait": (_ORANGE, "wait")}
    for row in explanation.windows.itertuples():
        _shade(axes, row.window_start, row.window_end, *shades[str(row.name)])
    for at, name in enumerate([*names, ""]):
        taken = frame[frame["step"] == name]
        if len(taken):
            label = "taken" if name == names[0] else "not taken" if not name else None
            axes.plot(
                taken["event_time"], [at] * len(taken), "o", color=_BLUE if name else _GREY, markersize=6, label=label
            )
    own = frame[frame["is_alert"]]
    absent = [step for step in explanation.steps if step.absent]
    if len(own):
        rows = [[*names, ""].index(step) for step in own["step"]]
        label = "began the wait" if absent else "raised the alert"
        axes.plot(own["event_time"], rows, "D", color=_RED, markersize=9, zorder=4, label=label)
    if absent:
        axes.axvline(_DATES.date2num(alert["event_time"]), color=_RED, linestyle="--", linewidth=1.4, label="due")
    for number, time in enumerate(frame.loc[frame["until"], "event_time"]):
        label = None if number else "ends what has begun"
        axes.axvline(_DATES.date2num(time), color=_GREY, linestyle=":", linewidth=1.4, label=label)
    axes.set_yticks(range(len(names) + 1), [*(_short(name) for name in names), "not taken"])
    axes.set_ylim(len(names) + 0.6, -0.6)
    return _finished(figure, explanation, from_zero=False)


def _main(explanation: Explanation) -> MeasureEvidence:
    """The measure that the picture is about."""
    return next(measure for measure in explanation.measures if measure.name == explanation.main)


def _shade(axes: Axes, start: Any, end: Any, colour: str, label: str) -> None:
    axes.axvspan(start, end, color=colour, alpha=0.18, linewidth=0, label=label)


def _brought(axes: Axes, explanation: Explanation, window: str) -> None:
    """What each event brought to the measure, the window shaded."""
    frame, main = explanation.timeline, _main(explanation)
    _shade(axes, main.window_start, main.window_end, _SKY, window)
    _stems(
        axes,
        frame[~frame["in_window"]],
        _GREY,
        f"not in the {window}" if window != "look-back window" else "before the window",
    )
    _stems(axes, frame[frame["in_window"]], _BLUE, "counted")
    axes.set_ylabel(_measured(main.text))


def _limits(axes: Axes, explanation: Explanation) -> None:
    for limit in explanation.limits.get(explanation.main, ()):
        axes.axhline(limit, color=_RED, linestyle="--", linewidth=1.4, label=f"limit {limit:,.10g}")


def _finished(figure: Figure, explanation: Explanation, *, from_zero: bool = True) -> Figure:
    """With title, legends and the axis of time."""
    alert, last = explanation.alert, figure.axes[-1]
    key = ", ".join(f"{name} {value}" for name, value in explanation.key.items()) or "all events"
    verdict = "" if alert["verdict"] == "raised" else f", {alert['verdict']}"
    _title(figure, f"{alert['rule_id']}: {key}", f"{alert['severity']}{verdict}, {_moment(alert['event_time'])}")
    _legend(figure.axes[0])
    if last is not figure.axes[0]:
        _legend(last, skip=1)
    if from_zero:
        low, high = last.get_ylim()
        last.set_ylim(min(0.0, low), high + 0.08 * (high - min(0.0, low)))
    _time_axis(last)
    return figure


def flagged(
    events: pd.DataFrame, alerts: pd.DataFrame, event_time: str, title: str = "What the rule would have flagged"
) -> Figure:
    """What a rule would have flagged: events and alerts over time, and the keys with the most alerts.

    events: the events tried, with a column `event_time` of times; alerts: rows with event_id, event_time and key (a
    mapping), as Result.alerts.to_pandas() gives them.
    """
    figure = _figure(4.6)
    grid = figure.add_gridspec(2, 2, width_ratios=(2.2, 1))
    upper, top = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[:, 1])
    lower = figure.add_subplot(grid[1, 0], sharex=upper)
    times = _times(events[event_time] if len(events) else [])
    raised = _times(alerts["event_time"] if len(alerts) else [])
    for axes, values, colour, label in ((upper, times, _BLUE, "events"), (lower, raised, _RED, "alerts")):
        _plain(axes)
        axes.hist(_DATES.date2num(values), bins=_edges(times), color=colour, alpha=0.85)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
        axes.set_ylim(0, max(1.0, axes.get_ylim()[1]))
        axes.set_ylabel(label)
    upper.tick_params(labelbottom=False)
    _time_axis(lower)
    _top_keys(top, alerts)
    share = f"{len(alerts) / len(events):.2%} of events" if len(events) else "no events"
    if len(alerts) and alerts["event_id"].isna().any():
        # Of windows, which are no part of the events.
        share = f"over {len(events):,} events"
    _title(figure, title, f"{len(alerts):,} alerts, {share}")
    return figure


def alerts_over_time(alerts: pd.DataFrame) -> Figure:
    """Alerts over event time, one colour per rule (the most frequent ones apart, the others together).

    alerts: rows with event_time and rule_id, such as the alerts table's.
    """
    figure, (axes,) = _axes(1, 3.8)
    names = _frequent(alerts)
    edges = _edges(_times(alerts["event_time"]) if len(alerts) else _times([]))
    groups = [
        _DATES.date2num(_times(alerts.loc[alerts["rule_id"].isin(rules), "event_time"])) for rules in names.values()
    ]
    colours = [*_RULE_COLOURS[: len(groups) - 1], _GREY] if "other rules" in names else _RULE_COLOURS[: len(groups)]
    labels = [f"{name} ({len(group):,})" for name, group in zip(names, groups, strict=True)]
    if groups:
        axes.hist(groups, bins=edges, stacked=True, color=colours, label=labels)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)
    else:
        _nothing(axes, "no alerts")
    axes.set_ylabel("alerts")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    _time_axis(axes)
    _title(figure, "Alerts over time", f"{len(alerts):,} alerts")
    return figure


def live(reports: Sequence[BatchReport], committed: Mapping[int, dt.datetime] | None = None) -> Figure:
    """A running evaluation: events/s, lag, rows of state and alerts per rule, batch by batch.

    committed: commit version -> when it was made; the lag is the time from the commit of a batch's last events to the
    commit of its alerts. Without it the seconds that each batch took are shown.
    """
    figure = _figure(5.4)
    (rate, lag), (state, alerts) = figure.subplots(2, 2)
    times = [report.finished_at for report in reports]
    _line(rate, times, events_per_second(reports), _BLUE, "events/s")
    lags = lag_seconds(reports, committed) if committed else None
    if lags is not None and any(not math.isnan(value) for value in lags):
        _line(lag, times, lags, _ORANGE, "lag, commit to alert (s)")
    else:
        _line(lag, times, [(r.run_ms + r.write_ms) / 1_000 for r in reports], _ORANGE, "seconds per batch")
    _line(state, times, [float(report.state_rows) for report in reports], _GREEN, "rows of window state")
    _bars(alerts, alert_totals(reports), "alerts since the start")
    last = reports[-1] if reports else None
    text = "waiting for the first batch" if last is None else (
        f"{counted(sum(r.events for r in reports), 'event')}, "
            f"{counted(sum(sum(r.alerts.values()) for r in reports), 'alert')}, "
        f"{counted(last.rules, 'rule')}, watermark {_watermark(last.watermark)}"
    )  # fmt: skip
    _title(figure, "Evaluation", text)
    return figure


def counted(number: int, noun: str) -> str:
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


def _figure(height: float) -> Figure:
    return Figure(figsize=(_WIDTH, height), layout="constrained")


def _axes(rows: int, height: float, *, sharex: bool = False) -> tuple[Figure, list[Axes]]:
    figure = _figure(height)
    axes = list(figure.subplots(rows, 1, sharex=sharex, squeeze=False).ravel())
    for each in axes:
        _plain(each)
    return figure, axes


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.yaxis.set_major_formatter(FuncFormatter(_thousands))
    axes.tick_params(labelsize=9)


def _thousands(value: float, _: Any = None) -> str:
    return f"{value:,.10g}"


def _title(figure: Figure, title: str, below: str) -> None:
    figure.suptitle(_no_formula(title), x=0.01, ha="left", fontsize=13, fontweight="bold")
    figure.axes[0].set_title(_no_formula(below), loc="left", fontsize=10, color="#444444")


def _no_formula(text: str) -> str:
    """The text with its dollar signs as they are: between two of them matplotlib would read a formula."""
    return text.replace("$", "\\$")


def _stems(axes: Axes, frame: pd.DataFrame, colour: str, label: str) -> None:
    frame = frame.dropna(subset=["value"])
    if not len(frame):
        return
    axes.vlines(frame["event_time"], 0, frame["value"], color=colour, linewidth=1.2)
    axes.plot(frame["event_time"], frame["value"], "o", color=colour, markersize=4, label=label)


def _value_label(axes: Axes, at: float, value: float, text: str | None, *, above: bool = False) -> None:
    """Left of a point, or above it; `at` as matplotlib counts days."""
    if text is not None and not math.isnan(value):
        place: Any = {"xytext": (0, 5), "ha": "center"} if above else {"xytext": (-9, 0), "ha": "right", "va": "center"}
        axes.annotate(
            text, (at, value), textcoords="offset points", fontsize=10, fontweight="bold", color=_RED, **place
        )  # fmt: skip


def _measured(text: str) -> str:
    """`sum(amount) filter (...)` -> `amount`; a count is of events."""
    inside = text.partition("(")[2].partition(")")[0].strip()
    return "events" if inside in ("*", "") or text.strip().lower().startswith("count") else inside


def _legend(axes: Axes, skip: int = 0) -> None:
    """In a row above the axes, where it covers nothing."""
    handles, labels = axes.get_legend_handles_labels()
    place = {"loc": "lower right", "bbox_to_anchor": (1.0, 0.99), "borderaxespad": 0.2}
    axes.legend(handles[skip:], labels[skip:], ncols=4, fontsize=9, frameon=False, **place)


def _time_axis(axes: Axes) -> None:
    locator = _DATES.AutoDateLocator(tz=dt.timezone.utc, minticks=4, maxticks=9)
    axes.xaxis_date(tz=dt.timezone.utc)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(_DATES.ConciseDateFormatter(locator, tz=dt.timezone.utc))
    axes.set_xlabel("event time (UTC)")


def _moment(time: dt.datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M:%S} UTC"


def _watermark(microseconds: int | None) -> str:
    if microseconds is None:
        return "not yet"
    return _moment(dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc) + dt.timedelta(microseconds=microseconds))


def _times(values: Any) -> pd.DatetimeIndex:
    return pd.DatetimeIndex(pd.to_datetime(pd.Series(list(values), dtype=object), utc=True))


def _edges(times: pd.DatetimeIndex) -> list[float]:
    """At most 60 bars over the times; one day without any."""
    if not len(times):
        return [0.0, 1.0]
    low, high = float(_DATES.date2num(times.min())), float(_DATES.date2num(times.max()))
    high = high if high > low else low + 1 / 24
    return list(np.linspace(low, high, min(60, max(10, len(times))) + 1).tolist())


def _top_keys(axes: Axes, alerts: pd.DataFrame) -> None:
    names = [", ".join("null" if v is None else str(v) for v in key.values()) or "all" for key in alerts.get("key", [])]
    names = [_no_formula(name) for name in names]
    counts = pd.Series(names, dtype=object).value_counts().head(_MOST_KEYS)
    fields = next((", ".join(key) for key in alerts.get("key", []) if key), "key")
    _bars(axes, {str(name): int(count) for name, count in counts.items()}, "alerts")
    axes.set_title(f"most alerts by {fields}", loc="left", fontsize=10, color="#444444")


def _bars(axes: Axes, counts: Mapping[str, int], label: str) -> None:
    _plain(axes)
    axes.grid(visible=False)
    axes.set_xlabel(label)
    if not counts:
        _nothing(axes, "none")
        return
    shown = dict(list(counts.items())[:_MOST_KEYS])
    bars = axes.barh([_short(name) for name in shown], list(shown.values()), color=_RED, alpha=0.85, height=0.65)
    axes.bar_label(bars, fmt=_thousands, padding=3, fontsize=9)
    # Few bars do not grow to fill the height.
    axes.set_ylim(max(len(shown), 5) - 0.5, -0.5)
    axes.margins(x=0.18)
    axes.set_yticks(range(len(shown)), [_short(name) for name in shown])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
    axes.xaxis.set_major_formatter(FuncFormatter(_thousands))


def _short(name: str) -> str:
    return name if len(name) <= 28 else f"{name[:27]}…"


def _line(axes: Axes, times: Sequence[dt.datetime], values: Sequence[float], colour: str, label: str) -> None:
    _plain(axes)
    axes.set_ylabel(label)
    if not times:
        _nothing(axes, "no batch yet")
        return
    size = 3 if len(times) > 5 else 6
    axes.plot(_DATES.date2num(times), values, color=colour, linewidth=1.6, marker="o", markersize=size)
    known = [value for value in values if not math.isnan(value)]
    axes.set_ylim(0, 1.1 * max(known, default=0.0) or 1.0)
    locator = _DATES.AutoDateLocator(tz=dt.timezone.utc, minticks=3, maxticks=6)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(_DATES.DateFormatter("%H:%M:%S", tz=dt.timezone.utc))
    axes.set_xlabel("UTC")
    if len(times) == 1:
        axes.set_xlim(*(_DATES.date2num(times[0] + dt.timedelta(seconds=side)) for side in (-5, 5)))


def _nothing(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=_GREY)
    axes.set_xticks([])
    axes.set_yticks([])


def _frequent(alerts: pd.DataFrame) -> dict[str, list[str]]:
    """Label -> rule ids: the most frequent rules by themselves, the others as one."""
    counts = alerts["rule_id"].value_counts() if len(alerts) else pd.Series(dtype=int)
    ordered = [str(name) for name in counts.index]
    alone = ordered if len(ordered) <= _MOST_RULES else ordered[: _MOST_RULES - 1]
    rest = ordered[len(alone) :]
    return {**{name: [name] for name in alone}, **({"other rules": rest} if rest else {})}
