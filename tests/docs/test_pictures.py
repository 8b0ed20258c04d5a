"""Pictures: drawn without a display, from what the engine gives."""

from __future__ import annotations

import datetime as dt
import io
import math
from decimal import ROUND_HALF_UP, Decimal
from types import SimpleNamespace
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from matplotlib.figure import Figure

import lookback
from lookback.core.explaining.evidence import Clock, Evidence, Explanation
from lookback.core.explaining.explanation import explain_alert, picture_span
from lookback.core.rules.compiling import compile_rule
from lookback.core.streams.arrival import find_marks
from lookback.core.streams.declaration import Stream
from lookback.core.streams.declarations import Declarations
from lookback.core.streams.eventrows import read_events
from lookback.core.values.columns import to_text
from lookback.testing.trial import DocumentTrial, run_trial
from lookback.views import pictures, whatif
from lookback.views.timeline import plot_key_timeline

START = dt.datetime(2024, 3, 4, tzinfo=dt.timezone.utc)
STREAM = Stream.from_dict(
    {
        "stream": "tx",
        "event_id": "id",
        "event_time": "at",
        "fields": {"id": "bigint", "at": "timestamp", "customer": "string", "amount": "decimal(18,2)"},
    }
)
RULE = {
    "rule_id": "day-spend",
    "stream": "tx",
    "severity": "high",
    "group_by": ["customer"],
    "window": "24 hours",
    "measures": {"total": "sum(amount)", "n": "count(*)"},
    "when": "total >= 300",
}


def rows(count: int = 60) -> list[dict[str, Any]]:
    chance = np.random.default_rng(3)
    hours = np.sort(chance.uniform(0, 96, count))
    return [
        {
            "id": at,
            "at": START + dt.timedelta(hours=float(hour)),
            "customer": f"c{at % 3}",
            "amount": round(float(chance.gamma(2, 20)), 2),
        }
        for at, hour in enumerate(hours)
    ]


WINDOWS = {name: RULE[name] for name in ("rule_id", "stream", "severity", "group_by", "measures")}
TUMBLING = {**WINDOWS, "window": {"tumbling": "12 hours"}, "when": "total >= 60"}
SLIDING = {**WINDOWS, "window": {"sliding": "12 hours", "slide": "3 hours"}, "when": "total >= 60"}
SESSION = {**WINDOWS, "window": {"session": "3 hours"}}
SEQUENCE = {
    "rule_id": "small-then-large",
    "stream": "tx",
    "group_by": ["customer"],
    "sequence": {
        "within": "12 hours",
        "steps": [
            {"name": "small", "where": "amount < 40", "at_least": 2},
            {"name": "large", "where": "amount > 45"},
        ],
        "until": "amount > 100",
    },
}
SILENCE = {
    **SEQUENCE,
    "rule_id": "then-silent",
    "sequence": {
        "within": "12 hours",
        "steps": [{"name": "small", "where": "amount < 40"}, {"name": "silent", "absent": "true", "within": "4 hours"}],
        "expiry": "fixed",
    },
}


def explanation(document: dict[str, Any] = RULE, number: int = -1) -> Explanation:
    """Explains one alert as review.explain does, from events in memory."""
    alerts = lookback.replay([document], rows(), STREAM).alerts
    alert = alerts[number]
    row = {**vars(alert), "measures": {name: to_text(value) for name, value in alert.measures.items()}}
    events = read_events(rows(), STREAM, 1)[0]
    highs = {commit: high for commit, high in find_marks(events, events.commits).items() if high is not None}
    mine = [at for at, row in enumerate(rows()) if row["customer"] == alert.key["customer"] and at < alert.arrival]
    rule = compile_rule(document, STREAM)
    own = events.take(np.array(mine))
    evidence = Evidence(rule, own, Clock(Declarations.of(STREAM), highs))
    return explain_alert(evidence, row, {"document": document}, picture_span(rule, STREAM, row, None)[0])


def report(number: int, **changes: Any) -> Any:
    values = {
        "batch_id": number, "events": 1_000 * number, "alerts": {"day-spend": number}, "rules": 2, "arrival": number,
        "watermark": 1_709_510_400_000_000, "state_rows": 5_000 * number, "run_ms": 400.0, "write_ms": 100.0,
        "finished_at": START + dt.timedelta(seconds=2 * number),
    }  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


def png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=60)
    return buffer.getvalue()


def texts(figure: Figure) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(mpl.text.Text))


@pytest.fixture(autouse=True)
def _nothing_outside_changes():
    before = dict(mpl.rcParams)
    yield
    assert dict(mpl.rcParams) == before


def test_a_key_timeline_shows_window_measure_limit_and_alert():
    explained = explanation()

    figure = plot_key_timeline(explained)

    assert png(figure).startswith(b"\x89PNG")
    said = texts(figure)
    assert explained.consistent
    for text in (
        "day-spend: customer c",
        "limit 300",
        "look-back window",
        "event time (UTC)",
        "total as of each event",
    ):
        assert text in said
    assert explained.measures[0].recorded in said


USUAL = {
    **WINDOWS, "window": "1 hour", "when": "amount > 1.5 * usual and n >= 1",
    "measures": {
        "n": "count(*)", "usual": {"measure": "avg(amount)", "window": {"lookback": "2 days", "delay": "1 microsecond"}},
    },
}  # fmt: skip


@pytest.mark.parametrize("when", ["amount > 1.5 * usual and n >= 1", "1.5 * usual < amount", "amount / usual > 1.5"])
def test_a_limit_that_depends_on_the_event_is_drawn_as_it_was_with_the_events_that_it_rests_on(when: str):
    explained = explanation({**USUAL, "when": when})
    usual = next(measure for measure in explained.measures if measure.name == "usual")
    limit = Decimal(usual.recorded) * Decimal("1.5")

    figure = plot_key_timeline(explained)

    ((text, value),) = explained.event_limits
    assert (text.replace(" ", "") in ("1.5*usual", "usual*1.5"), Decimal(value)) == (True, round(limit, 2))
    assert explained.main == "usual"
    assert explained.notes == (f"For this event the limit {text} was {value}.",)
    upper = figure.axes[0]
    assert f"limit {text} = {value}" in texts(figure)
    assert any(list(line.get_ydata()) == [float(value)] * 2 for line in upper.lines)
    counted = explained.timeline[explained.timeline["in_window"]]
    assert len(counted) == len(usual.events) >= 1
    (own,) = explained.timeline.loc[explained.timeline["is_alert"], "value"]
    assert own > float(value)
    assert not explained.timeline.loc[explained.timeline["is_alert"], "in_window"].any()


def test_money_in_a_picture_has_the_digits_of_its_field():
    explained = explanation({**USUAL, "when": "usual > 30"})
    usual = next(measure for measure in explained.measures if measure.name == "usual")
    assert len(usual.recorded.partition(".")[2]) == 6
    said = texts(plot_key_timeline(explained))
    assert usual.recorded not in said
    assert str(Decimal(usual.recorded).quantize(Decimal("0.01"), ROUND_HALF_UP)) in said


def test_a_key_timeline_without_events_or_limit_is_still_drawn():
    explained = explanation()
    nothing = {"rule": explained.rule, "sentence": "", "limits": {}, "timeline": explained.timeline.iloc[:0]}
    empty = Explanation(alert={**explained.alert, "key": {}}, measures=explained.measures, main="total", **nothing)
    assert "all events" in texts(plot_key_timeline(empty))
    assert png(plot_key_timeline(empty))


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (TUMBLING, ["window", "counted", "limit 60", "total of each window", "total of windows before"]),
        (SLIDING, ["window", "counted", "limit 60", "total of each window", "total of windows before"]),
        (SESSION, ["session", "counted", "total of each session"]),
    ],
    ids=["tumbling", "sliding", "session"],
)
def test_a_key_timeline_shows_the_windows_of_the_key(document: dict[str, Any], said: list[str]):
    explained = explanation(document)

    figure = plot_key_timeline(explained)

    assert explained.consistent
    assert png(figure)
    for text in ("day-spend: customer c", explained.measures[0].recorded, "event time (UTC)", *said):
        assert text in texts(figure)
    drawn = len(figure.axes[1].patches) + sum(len(lines.get_segments()) for lines in figure.axes[1].collections)
    assert drawn > len(explained.windows) > 1


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (SEQUENCE, ["small", "large", "fits no step", "raised the alert", "time for the steps"]),
        (SILENCE, ["small", "silent", "began the wait", "due", "wait"]),
    ],
    ids=["sequence", "absence"],
)
def test_a_key_timeline_shows_a_sequence_step_by_step(document: dict[str, Any], said: list[str]):
    explained = explanation(document)

    figure = plot_key_timeline(explained)

    assert explained.consistent
    assert png(figure)
    for text in (f"{document['rule_id']}: customer c", "event time (UTC)", *said):
        assert text in texts(figure)


def test_a_key_timeline_shows_which_events_an_event_rule_takes():
    explained = explanation({"rule_id": "large", "stream": "tx", "group_by": ["customer"], "when": "amount > 50"})

    figure = plot_key_timeline(explained)

    assert explained.consistent
    assert png(figure)
    for text in ("large: customer c", "the rule's conditions hold", "they do not", "raised the alert"):
        assert text in texts(figure)
    (axes,) = figure.axes
    drawn = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    frame = explained.timeline
    amounts = {fits: list(frame.loc[frame["fits"] == fits, "value"]) for fits in (True, False)}
    assert min(amounts[True]) > 50 >= max(amounts[False]) > 0
    own = list(frame.loc[frame["is_alert"], "value"])
    assert drawn == {
        "the rule's conditions hold": amounts[True],
        "they do not": amounts[False],
        "raised the alert": own,
        "limit 50": [50, 50],
    }
    assert len(own) == 1


def test_an_event_rule_that_compares_no_number_shows_its_events_in_two_rows():
    explained = explanation({"rule_id": "own", "stream": "tx", "group_by": ["customer"], "when": "customer = 'c1'"})
    (axes,) = plot_key_timeline(explained).axes
    # By row, the points of the events, and the diamond of the alert.
    fits = explained.timeline["fits"]
    assert [len(line.get_xdata()) for line in axes.lines] == [fits.sum(), (~fits).sum(), 1]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["the rule's conditions hold", "they do not"]


BEFORE = {"measure": "count(*)", "window": {"lookback": "2 days", "delay": "6 hours"}}
PICTURED = {
    "distinct": {"measures": {"who": "count(distinct customer)"}, "when": "who >= 1 and amount > 40"},
    "several": {"measures": {"mean": "avg(amount)", "n": "count(*)"}, "when": "n >= 4"},
    "other window": {"measures": {"mean": "avg(amount)", "n": "count(*)", "before": BEFORE}, "when": "n > before / 4"},
    "delayed": {"measures": {"n": "count(*)", "before": BEFORE}, "when": "before >= 4"},
    "filtered": {"measures": {"n": "count(*) filter (where amount < 40)"}, "when": "n >= 3 and amount > 60"},
    "time": {"measures": {"newest": "max(at)", "n": "count(*)"}, "when": "n >= 3"},
    "tumbling": {"window": {"tumbling": "12 hours"}, "measures": {"who": "count(distinct customer)"}, "when": "who >= 1"},
    "early": {"window": {"tumbling": "12 hours"}, "early": True, "when": "total >= 60"},
    "session": {"window": {"session": "3 hours"}, "measures": {"mean": "avg(amount)", "n": "count(*)"}, "when": "n >= 1"},
}  # fmt: skip


@pytest.mark.parametrize("name", PICTURED)
def test_a_picture_shows_the_events_the_limit_and_what_raised_the_alert_whatever_is_measured(name: str):
    explained = explanation({**RULE, **PICTURED[name]})
    figure = plot_key_timeline(explained)
    upper, lower = figure.axes
    above, below = ({line.get_label(): line for line in axes.lines} for axes in (upper, lower))
    main = next(measure for measure in explained.measures if measure.name == explained.main)
    assert explained.consistent
    assert len(above["counted"].get_xdata()) == len(main.events) > 0
    assert not np.isnan(above["counted"].get_ydata()).any()
    assert any(label.startswith("limit ") for label in below), list(below)
    by_event = name not in ("tumbling", "session")
    diamond = (above if by_event else below)["raised the alert"]
    (time,), (value,) = diamond.get_data()
    assert not math.isnan(value)
    if name != "early":
        drawn = time if isinstance(time, float) else mpl.dates.date2num(time)
        assert drawn == pytest.approx(mpl.dates.date2num(explained.alert["event_time"]), abs=1e-6)


def test_a_limit_that_depends_on_another_measure_has_its_value_for_the_alert():
    explained = explanation({**RULE, **PICTURED["other window"]})
    before = next(measure for measure in explained.measures if measure.name == "before")
    assert explained.measure_limits == (("before / 4", int(before.recorded) / 4),)


def test_the_counted_events_are_drawn_though_a_key_has_more_events_since(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lookback.core.explaining.evidence.MAX_EVENTS", 6)
    monkeypatch.setattr("lookback.core.explaining.explanation.MAX_EVENTS", 6)
    delayed = {"measure": "count(*)", "window": {"lookback": "1 day", "delay": "2 days"}}
    explained = explanation({**RULE, "measures": {"before": delayed}, "when": "before >= 3"})
    timeline = explained.timeline
    assert len(timeline) == 6
    assert timeline["in_window"].sum() == min(5, len(explained.measures[0].events))
    assert timeline["is_alert"].sum() == 1


def test_near_misses_of_a_sequence_are_hollow_in_the_row_of_the_step_that_they_fit():
    explained = explanation(SEQUENCE)
    frame = explained.timeline
    near = frame[frame["fits"] != ""]
    assert len(near)

    (axes,) = plot_key_timeline(explained).axes

    hollow = [line for line in axes.lines if line.get_markerfacecolor() == "none"]
    drawn = sorted((int(row), time) for line in hollow for time, row in zip(*line.get_data(), strict=True))
    rows_ = {"small": 0, "large": 1}
    expected = sorted(
        (rows_[fits], time.to_datetime64()) for time, fits in zip(near["event_time"], near["fits"], strict=True)
    )
    assert [row for row, _ in drawn] == [row for row, _ in expected]
    assert texts(axes.figure).count("fits, not taken") == 1
    # None of them is among those that fit nothing.
    others = frame[(frame["step"] == "") & (frame["fits"] == "")]
    assert sum(len(line.get_xdata()) for line in axes.lines if set(line.get_ydata()) == {2}) == len(others)


def plot_trial(events: pd.DataFrame, alerts: pd.DataFrame, **measured: Any) -> Figure:
    return pictures.plot_trial("often", DocumentTrial(events, alerts, pd.DataFrame(), alerts, **measured), "at")


def test_what_a_rule_would_flag_shows_share_and_top_keys():
    alerts = lookback.replay([RULE], rows(), STREAM).alerts.to_pandas()

    figure = plot_trial(pd.DataFrame(rows()), alerts)

    assert png(figure)
    said = texts(figure)
    assert f"{len(alerts):,} alerts, {len(alerts) / 60:.2%} of events" in said
    assert "most alerts by customer" in said
    assert "c0" in said


def test_nothing_flagged_and_no_events_are_drawn_too():
    none = lookback.replay([RULE], [], STREAM).alerts.to_pandas()
    assert "0 alerts" in texts(plot_trial(pd.DataFrame(rows()), none))
    assert png(plot_trial(pd.DataFrame(), none))
    assert "no alerts" in texts(pictures.plot_alerts_over_time(none))


def test_values_stand_against_the_limit_with_what_was_flagged_marked():
    values = pd.DataFrame(
        {
            "event_time": [START + dt.timedelta(hours=at) for at in range(4)],
            "value": [1.0, 6.0, math.nan, 9.0],
            "flagged": [False, True, True, True],
        }
    )
    alerts = lookback.replay([RULE], rows(), STREAM).alerts.to_pandas()

    figure = plot_trial(pd.DataFrame(rows()), alerts, values=values, name="total", limits=(5.0,))

    assert png(figure)
    upper = figure.axes[0]
    drawn = {line.get_label(): list(line.get_ydata()) for line in upper.lines}
    assert drawn == {"not flagged (1 shown)": [1.0], "flagged": [6.0, 9.0], "limit 5": [5.0, 5.0]}
    assert upper.get_ylabel() == "total"
    assert upper.get_ylim()[0] == 0


def test_values_below_zero_are_not_cut_off():
    values = pd.DataFrame({"event_time": [START, START], "value": [-3.0, 2.0], "flagged": [False, True]})
    none = lookback.replay([RULE], [], STREAM).alerts.to_pandas()
    figure = plot_trial(pd.DataFrame(rows()), none, values=values, name="total")
    assert figure.axes[0].get_ylim()[0] < -3


def test_events_over_time_says_how_many_and_from_when_to_when():
    figure = pictures.plot_events_over_time([START, START + dt.timedelta(hours=5)])
    assert png(figure)
    assert "2 events, 2024-03-04 00:00:00 UTC to 2024-03-04 05:00:00 UTC" in texts(figure)
    assert "0 events" in texts(pictures.plot_events_over_time([]))


@pytest.mark.parametrize(
    ("days", "step"), [(0.4, 1 / 24), (1.5, 1 / 24), (12.5, 6 / 24), (45, 1), (200, 7), (1_500, 28)]
)
def test_bars_are_whole_hours_or_days_from_midnight_so_that_equal_days_are_equally_high(days: float, step: float):
    first = START + dt.timedelta(hours=7, minutes=13)
    figure = pictures.plot_events_over_time([first, first + dt.timedelta(days=days)])
    bars = [bar for bar in figure.axes[0].patches if bar.get_width()]
    edges = np.array([bar.get_x() for bar in bars])
    midnight = mpl.dates.date2num(START)  # a Monday
    assert len(bars) <= 60
    assert np.diff(edges) == pytest.approx(step)
    from_edge = (edges - midnight) / min(step, 7)
    assert from_edge == pytest.approx(np.round(from_edge), abs=1e-6)
    assert sum(bar.get_height() for bar in bars) == 2


def test_events_at_each_midnight_are_equally_many_in_each_bar():
    figure = pictures.plot_events_over_time([START + dt.timedelta(days=at) for at in range(7 * 12)])
    assert {bar.get_height() for bar in figure.axes[0].patches} == {7}
    figure = pictures.plot_events_over_time([START + dt.timedelta(days=at) for at in range(40)])
    assert [bar.get_height() for bar in figure.axes[0].patches] == [1] * 40


def test_the_bars_of_a_few_minutes_are_minutes():
    figure = pictures.plot_events_over_time([START + dt.timedelta(seconds=at) for at in range(600)])
    assert [bar.get_height() for bar in figure.axes[0].patches] == [60] * 10


REVIEWS = pd.DataFrame(
    [
        ("few", "unclear", 1), ("often", "confirmed", 30), ("often", "false_positive", 10), ("often", "unclear", 5),
        ("wrong", "false_positive", 3), ("wrong", "benign", 1),
    ],
    columns=["rule_id", "disposition", "alerts"],
)  # fmt: skip


def test_precision_is_of_what_was_decided():
    figure = pictures.plot_precision(REVIEWS)
    assert png(figure)
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["often", "wrong", "few"]
    assert [text.get_text() for text in axes.texts if "%" in text.get_text() or text.get_text() == "undecided"] == [
        "75%", "0%", "undecided",
    ]  # fmt: skip
    assert "50 alerts reviewed" in texts(figure)
    assert "no reviews yet" in texts(pictures.plot_precision(REVIEWS.iloc[:0]))


def test_precision_and_recall_are_drawn_by_day_and_rule_with_gaps():
    days = pd.DataFrame(
        [
            (dt.date(2024, 3, at), name, 4, None if at == 2 else at / 10, at / 20)
            for at in range(1, 9)
            for name in (*(f"r{number}" for number in range(7)), None)
        ],
        columns=["day", "rule_id", "flagged", "precision", "recall"],
    )
    figure = pictures.plot_rule_figures(days)
    assert png(figure)
    assert "7 rules, 2 more not drawn" in texts(figure)
    precision, recall = figure.axes
    assert [line.get_label() for line in precision.lines] == ["r0", "r1", "r2", "r3", "r4", "all together"]
    assert [math.isnan(value) for value in precision.lines[0].get_ydata()] == [False, True, *[False] * 6]
    assert recall.lines[-1].get_ydata()[-1] == 0.4
    assert "no labels yet" in texts(pictures.plot_rule_figures(days.iloc[:0]))


def test_overlap_is_a_heat_map_with_what_each_catches_alone_on_the_diagonal():
    pairs = pd.DataFrame(
        [("a", "b", 3, 0.25), ("a", "c", 0, None), ("b", "c", 0, 0.0)], columns=["a", "b", "both", "jaccard"]
    )
    alone = pd.DataFrame([("a", 7, 10), ("b", 0, 5), ("c", 0, 0)], columns=["a", "alone", "flagged"])
    figure = pictures.plot_overlap(pairs, alone)
    assert png(figure)
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["a", "b", "c"]
    assert sorted(text.get_text() for text in axes.texts) == ["0", "0", "0%", "0%", "25%", "25%", "7"]
    assert "no rules" in texts(pictures.plot_overlap(pairs.iloc[:0], alone.iloc[:0]))


def test_alerts_over_time_names_the_frequent_rules_and_sums_up_the_rest():
    frame = pd.DataFrame(
        {
            "event_time": [START + dt.timedelta(hours=at) for at in range(36)],
            "rule_id": [f"r{at % 8}" for at in range(36)],
        }
    )
    figure = pictures.plot_alerts_over_time(frame)
    assert png(figure)
    assert "r0 (5)" in texts(figure)
    assert "other rules (12)" in texts(figure)


def test_a_live_view_shows_rate_lag_state_and_alerts():
    reports = [report(number) for number in range(1, 6)]
    committed = {number: reports[number - 1].finished_at - dt.timedelta(seconds=0.8) for number in range(1, 6)}

    figure = pictures.plot_evaluation(reports, committed)

    assert png(figure)
    said = texts(figure)
    for text in (
        "events/s",
        "lag, commit to alert (s)",
        "rows of window state",
        "day-spend",
        "15,000 events, 15 alerts",
    ):
        assert text in said
    assert "seconds per batch" in texts(pictures.plot_evaluation(reports))
    assert "waiting for the first batch" in texts(pictures.plot_evaluation([]))
    assert png(pictures.plot_evaluation([report(1, watermark=None)]))


def test_rates_lags_and_totals():
    reports = [report(1), report(2), report(3, arrival=None, alerts={"a": 7})]
    assert pictures.compute_events_per_second(reports) == [2_000.0, 1_000.0, 1_500.0]
    lags = pictures.compute_lag_seconds(reports, {1: START})
    assert lags[0] == 2.0
    assert all(math.isnan(lag) for lag in lags[1:])
    assert list(pictures.sum_alerts(reports).items()) == [("a", 7), ("day-spend", 3)]


def draw(folder: str) -> None:
    """Every picture as a file, to be looked at: python -c 'import test_pictures; test_pictures.draw(".")'."""
    from pathlib import Path

    alerts = lookback.replay([RULE], rows(), STREAM).alerts.to_pandas()
    done = run_trial(TUMBLING, pa.Table.from_pandas(pd.DataFrame(rows())), STREAM)
    spread = pd.concat([alerts.assign(rule_id=f"rule-{at}") for at in range(8)])
    reports = [
        report(number, events=900 + 40 * (number % 5), alerts={"day-spend": 2, "new-terminal": 1})
        for number in range(1, 40)
    ]
    committed = {
        number: reports[number - 1].finished_at - dt.timedelta(seconds=0.8 + 0.1 * (number % 3))
        for number in range(1, 40)
    }
    for name, figure in {
        "timeline": plot_key_timeline(explanation()),
        "tumbling": plot_key_timeline(explanation(TUMBLING)),
        "sliding": plot_key_timeline(explanation(SLIDING)),
        "session": plot_key_timeline(explanation(SESSION)),
        "sequence": plot_key_timeline(explanation(SEQUENCE)),
        "absence": plot_key_timeline(explanation(SILENCE)),
        "flagged": plot_trial(pd.DataFrame(rows()), alerts),
        "values": pictures.plot_trial("often", done, "at"),
        "precision": pictures.plot_precision(REVIEWS),
        "events": pictures.plot_events_over_time(pd.DataFrame(rows())["at"]),
        "alerts": pictures.plot_alerts_over_time(spread),
        "live": pictures.plot_evaluation(reports, committed),
    }.items():
        figure.savefig(Path(folder) / f"{name}.png", dpi=80)


def variant(
    parameters: dict[str, Any], alerts: int, precision: float | None = None, recall: float | None = None
) -> Any:
    ratios = {"precision": precision, "recall": recall, "all_positives": 40}
    return SimpleNamespace(
        rule_id="day-spend", parameters=parameters, alerts=alerts, alerts_per_day=alerts / 4, **ratios
    )


def lines(axes: Any) -> dict[str, list[tuple[float, float]]]:
    return {str(each.get_label()): [tuple(point) for point in each.get_xydata().tolist()] for each in axes.get_lines()}


def test_c10_3_alerts_a_day_are_drawn_against_the_limit_with_today_and_the_budget():
    figures = [variant({"limit": limit}, alerts) for limit, alerts in ((1000, 40), (500, 400), (2000, 0))]
    figure = whatif.plot_alerts_by_value(figures, "limit", today=1000, budget=20)
    (axes,) = figure.axes
    drawn = lines(axes)
    assert drawn["alerts a day"] == [(500.0, 100.0), (1000.0, 10.0)]
    assert drawn["today: 1,000"][0][0] == 1000
    assert drawn["budget 20 a day"][0][1] == 20
    assert axes.get_yscale() == "log"
    assert axes.get_title(loc="left") == "3 variants, 2 within the budget; 1 raise none"
    assert figure.get_suptitle() == "day-spend: alerts a day by limit"
    figure.savefig(io.BytesIO())
    whatif.plot_alerts_by_value([variant({"limit": 1}, 0)], "limit").savefig(io.BytesIO())


def test_c10_3_precision_and_recall_are_drawn_against_the_limit():
    figures = [
        variant({"span": span, "limit": limit}, 4, precision, recall)
        for span, limit, precision, recall in (
            ("2 hours", 5, 0.5, 0.25), ("1 day", 5, 0.25, 0.5), ("2 hours", 6, 1.0, 0.125), ("1 day", 6, None, None)
        )
    ]  # fmt: skip
    upper, lower = whatif.plot_precision_by_value(figures, "span", today="12 hours").axes
    assert lines(upper)["limit 5"] == [(2.0, 0.5), (24.0, 0.25)]
    assert lines(lower)["limit 6"] == [(2.0, 0.125)]
    assert lines(lower)["today: 12 hours"][0][0] == 12
    assert lower.get_xlabel() == "span (hours)"
    figures = [variant({"kind": kind}, 4) for kind in ("a", "b")]
    upper, _ = whatif.plot_precision_by_value(figures, "kind", today="b").axes
    assert [text.get_text() for text in upper.texts] == ["no labels"]
    assert lines(upper)["today: b"][0][0] == 1
