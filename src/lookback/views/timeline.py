"""Plots the time line of a key: its events, the window of an alert, and the alert. Times are UTC."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from lookback.core.values.times import format_time
from lookback.core.values.windows import EVENT, LOOKBACK, SEQUENCE, SESSION
from lookback.views.drawing import (
    BLUE,
    DATES,
    GREY,
    ORANGE,
    RED,
    SKY,
    draw_legend,
    draw_limit,
    escape_formula,
    format_time_axis,
    make_stacked_axes,
    set_titles,
    shorten_name,
    to_utc_index,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from lookback.core.explaining.evidence import Explanation, MeasureEvidence

_DIAMOND: dict[str, Any] = {"color": RED, "markersize": 8, "zorder": 4}
_RAISED = "raised the alert"
# The background of a value that crosses a line.
_LABEL_BOX = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}


def plot_key_timeline(explanation: Explanation) -> Figure:
    """Plots the key's events over time, with the alert marked.

    For a rule with measures, the upper axes show what each event contributes to the measure with a limit, with the
    window shaded. The lower axes show that measure and its limits, at each event of a lookback rule or for each window.

    For a sequence, the axes show the events by the step that took them, with the time for the steps and the wait for an
    absence shaded. A hollow point is a near miss: an event that fits a step but that no step took.

    For an event rule, the axes show the events of the key by whether the rule's conditions hold: as values of the field
    that the rule compares with a number, with that limit, or else in two rows.
    """
    if explanation.kind == SEQUENCE:
        return _plot_sequence(explanation)
    if explanation.kind == EVENT:
        return _plot_event(explanation)
    return _plot_lookback(explanation) if explanation.kind == LOOKBACK else _plot_windows(explanation)


def _plot_lookback(explanation: Explanation) -> Figure:
    frame, main = explanation.timeline, _find_main_measure(explanation)
    figure, (upper, lower) = make_stacked_axes(2, 5.6, sharex=True)
    _draw_contributions(upper, explanation, "look-back window")
    _shade(lower, main.window_start, main.window_end, SKY, "look-back window")
    for text, value in explanation.event_limits:
        draw_limit(upper, float(value), f"limit {escape_formula(text)} = {value}")
    raised = frame[frame["is_alert"]]
    running = frame.dropna(subset=["running"])
    lower.step(running["event_time"], running["running"], where="post", color=BLUE, linewidth=1.6, label=main.name)
    lower.plot(running["event_time"], running["running"], ".", color=BLUE, markersize=5)
    _draw_limits(lower, explanation)
    if len(raised):
        lower.plot(raised["event_time"], raised["running"], "D", **_DIAMOND)
        _label_value(lower, DATES.date2num(raised["event_time"].iloc[-1]), raised["running"].iloc[-1], main.shown)
    lower.set_ylabel(f"{main.name} as of each event")
    return _finish(figure, explanation)


def _plot_event(explanation: Explanation) -> Figure:
    frame, field = explanation.timeline, explanation.main
    figure, (axes,) = make_stacked_axes(1, 3.2 if field else 2.4)
    rows = frame["value"] if field else (~frame["fits"]).astype(float)
    for fits, colour, label in ((True, BLUE, "the rule's conditions hold"), (False, GREY, "they do not")):
        part = frame["fits"] == fits
        axes.plot(
            frame["event_time"][part], rows[part], "o", color=colour, markersize=6, label=label if field else None
        )
    axes.plot(frame["event_time"][frame["is_alert"]], rows[frame["is_alert"]], "D", label=_RAISED, **_DIAMOND)
    if field:
        _draw_limits(axes, explanation)
        axes.set_ylabel(field)
    else:
        axes.grid(visible=False)
        axes.set_yticks([0, 1], ["the rule's conditions hold", "they do not"])
        axes.set_ylim(1.6, -0.6)
    return _finish(figure, explanation, from_zero=bool(field))


def _plot_windows(explanation: Explanation) -> Figure:
    windows, main = explanation.windows, _find_main_measure(explanation)
    what = "session" if explanation.kind == SESSION else "window"
    figure, (upper, lower) = make_stacked_axes(2, 5.6, sharex=True)
    _draw_contributions(upper, explanation, what)
    _shade(lower, main.window_start, main.window_end, SKY, what)
    drawn = windows.dropna(subset=["value"])
    overlap = bool((windows["window_start"].iloc[1:].to_numpy() < windows["window_end"].iloc[:-1].to_numpy()).any())
    for is_alert, colour in ((False, GREY), (True, BLUE)):
        part = drawn[drawn["is_alert"] == is_alert]
        starts, ends = (DATES.date2num(to_utc_index(part[name])) for name in ("window_start", "window_end"))
        label = main.name if is_alert else f"{main.name} of {what}s before"
        if not len(part):
            continue
        if overlap:
            lower.hlines(part["value"], starts, ends, color=colour, linewidth=3, label=label)
        else:
            style: dict[str, Any] = {"align": "edge", "edgecolor": "white", "alpha": 0.7}
            lower.bar(starts, part["value"], ends - starts, color=colour, label=label, **style)
        if is_alert and main.shown is not None:
            middle = (starts[-1] + ends[-1]) / 2
            _label_value(lower, middle, float(part["value"].iloc[-1]), main.shown, above=True)
    if main.shown is not None and not explanation.timeline["is_alert"].any():
        # No event raised the alert, but the end of its window.
        own = drawn[drawn["is_alert"]]
        lower.plot(DATES.date2num(to_utc_index(own["window_end"])), own["value"], "D", label=_RAISED, **_DIAMOND)
    _draw_limits(lower, explanation)
    lower.set_ylabel(f"{main.name} of each {what}")
    return _finish(figure, explanation)


def _plot_sequence(explanation: Explanation) -> Figure:
    frame, alert = explanation.timeline, explanation.alert
    names = [step.name for step in explanation.steps]
    figure, (axes,) = make_stacked_axes(1, 1.9 + 0.5 * (len(names) + 1))
    axes.grid(visible=False)
    shades = {"steps": (SKY, "time for the steps"), "wait": (ORANGE, "wait")}
    for row in explanation.windows.itertuples():
        _shade(axes, row.window_start, row.window_end, *shades[str(row.name)])
    is_near = (frame["step"] == "") & (frame["fits"] != "")
    for at, name in enumerate([*names, ""]):
        taken = frame[(frame["step"] == name) & ~is_near]
        near = frame[is_near & (frame["fits"] == name)]
        if len(near):
            _draw_near_misses(axes, near["event_time"], at)
        if len(taken):
            label = "taken" if name == names[0] else "not taken" if not name else None
            colour = BLUE if name else GREY
            axes.plot(taken["event_time"], [at] * len(taken), "o", color=colour, markersize=6, label=label)
    own = frame[frame["is_alert"]]
    absent = [step for step in explanation.steps if step.absent]
    if len(own):
        rows = [[*names, ""].index(step) for step in own["step"]]
        label = "began the wait" if absent else _RAISED
        axes.plot(own["event_time"], rows, "D", label=label, **_DIAMOND)
    if absent:
        axes.axvline(DATES.date2num(alert["event_time"]), color=RED, linestyle="--", linewidth=1.4, label="due")
    for number, time in enumerate(frame.loc[frame["until"], "event_time"]):
        label = None if number else "ends what has begun"
        axes.axvline(DATES.date2num(time), color=GREY, linestyle=":", linewidth=1.4, label=label)
    axes.set_yticks(range(len(names) + 1), [*(shorten_name(name) for name in names), "fits no step"])
    axes.set_ylim(len(names) + 0.6, -0.6)
    return _finish(figure, explanation, from_zero=False)


def _draw_near_misses(axes: Axes, times: pd.Series[Any], at: int) -> None:
    """Draws events that fit a step but that no step took, in the step's row, with one legend entry."""
    label = "fits, not taken"
    known = axes.get_legend_handles_labels()[1]
    marks: Any = {"color": "none", "markeredgecolor": GREY, "markersize": 6, "label": None if label in known else label}
    axes.plot(times, [at] * len(times), "o", **marks)


def _find_main_measure(explanation: Explanation) -> MeasureEvidence:
    """Returns the plotted measure."""
    return next(measure for measure in explanation.measures if measure.name == explanation.main)


def _shade(axes: Axes, start: Any, end: Any, colour: str, label: str) -> None:
    axes.axvspan(start, end, color=colour, alpha=0.18, linewidth=0, label=label)


def _draw_contributions(axes: Axes, explanation: Explanation, window: str) -> None:
    """Draws what each event contributes to the measure, with the window shaded."""
    frame, main = explanation.timeline, _find_main_measure(explanation)
    _shade(axes, main.window_start, main.window_end, SKY, window)
    _draw_stems(axes, frame[~frame["in_window"]], GREY, "not counted")
    _draw_stems(axes, frame[frame["in_window"]], BLUE, "counted")
    raised = frame[frame["is_alert"]]
    if len(raised):
        axes.plot(raised["event_time"], raised["value"].fillna(0), "D", label=_RAISED, **_DIAMOND)
    is_ones = bool((frame["value"] == 1).all())
    axes.set_ylabel("events" if is_ones else _name_argument(main.text))


def _draw_limits(axes: Axes, explanation: Explanation) -> None:
    for limit in explanation.limits.get(explanation.main, ()):
        draw_limit(axes, limit, f"limit {limit:,.10g}")
    for text, value in explanation.measure_limits:
        draw_limit(axes, value, f"limit {escape_formula(text)} = {value:,.6g}")


def _finish(figure: Figure, explanation: Explanation, *, from_zero: bool = True) -> Figure:
    """Adds the title, the legends and the time axis."""
    alert, last = explanation.alert, figure.axes[-1]
    key = ", ".join(f"{name} {value}" for name, value in explanation.key.items()) or "all events"
    verdict = "" if alert["verdict"] == "raised" else f", {alert['verdict']}"
    below = f"{alert['severity']}{verdict}, {format_time(alert['event_time'])}"
    set_titles(figure, f"{alert['rule_id']}: {key}", below)
    draw_legend(figure.axes[0])
    if last is not figure.axes[0]:
        draw_legend(last, skip=1)
    if from_zero:
        low, high = last.get_ylim()
        last.set_ylim(min(0.0, low), high + 0.08 * (high - min(0.0, low)))
    format_time_axis(last)
    return figure


def _draw_stems(axes: Axes, frame: pd.DataFrame, colour: str, label: str) -> None:
    frame = frame.dropna(subset=["value"])
    if not len(frame):
        return
    axes.vlines(frame["event_time"], 0, frame["value"], color=colour, linewidth=1.2)
    axes.plot(frame["event_time"], frame["value"], "o", color=colour, markersize=4, label=label)


def _label_value(axes: Axes, at: float, value: float, text: str | None, *, above: bool = False) -> None:
    """Writes a value to the left of a point, or above it. `at` is in days, as matplotlib counts them."""
    if text is not None and not math.isnan(value):
        place: Any = {"xytext": (0, 5), "ha": "center"} if above else {"xytext": (-9, 0), "ha": "right", "va": "center"}
        style: Any = {"fontsize": 10, "fontweight": "bold", "color": RED, "bbox": _LABEL_BOX}
        axes.annotate(text, (at, value), textcoords="offset points", **place, **style)


def _name_argument(text: str) -> str:
    """Returns the argument of an aggregate, such as `amount` for `sum(amount) filter (...)`; `events` for a count."""
    inside = text.partition("(")[2].partition(")")[0].strip()
    return "events" if inside in ("*", "") or text.strip().lower().startswith("count") else inside
