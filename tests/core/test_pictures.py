"""Pictures: drawn without a display, from what the engine gives."""

from __future__ import annotations

import datetime as dt
import io
import math
from types import SimpleNamespace
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

import lookback
from lookback import pictures
from lookback.core.columns import text_of
from lookback.core.compiled import compile_rule
from lookback.core.events import read_events
from lookback.core.evidence import Clock, Evidence, Explanation, Subject, measured, timeline, window_of
from lookback.core.rules import parse_time
from lookback.core.streams import Stream
from lookback.core.wording import limits_of, measure_in_words, rule_in_words

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


def explanation() -> Explanation:
    """What review.explain makes of one alert, from events in memory."""
    alert = lookback.replay([RULE], rows(), STREAM).alerts[-1]
    rule = compile_rule(RULE, STREAM)
    mine = [row for row in rows() if row["customer"] == alert.key["customer"]]
    events = read_events(mine, STREAM, 1)[0]
    evidence = Evidence(rule, events, events.columns["id"], Clock(STREAM, {}), {})
    time = parse_time(alert.event_time)
    at = next(number for number, row in enumerate(mine) if str(row["id"]) == alert.event_id)
    subject = Subject(int(events.commits[at]), time, mine[at]["id"])
    gone = np.zeros(len(events), dtype=bool)
    recorded = {name: text_of(value) for name, value in alert.measures.items()}
    words = {measure.name: measure_in_words(measure) for measure in rule.measures}
    return Explanation(
        alert={**vars(alert), "measures": recorded},
        rule={"document": RULE},
        sentence=rule_in_words(rule),
        limits=limits_of(rule),
        measures=measured(evidence, subject, recorded, gone, words),
        timeline=timeline(evidence, subject, rule.measures[0], window_of(rule.measures[0], time)[0] - 10**11, gone),
        main="total",
    )


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

    figure = pictures.key_timeline(explained)

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


def test_a_key_timeline_without_events_or_limit_is_still_drawn():
    explained = explanation()
    empty = Explanation(
        {**explained.alert, "key": {}}, explained.rule, "", {}, explained.measures, explained.timeline.iloc[:0], "total"
    )
    assert "all events" in texts(pictures.key_timeline(empty))
    assert png(pictures.key_timeline(empty))


def test_what_a_rule_would_flag_shows_share_and_top_keys():
    alerts = lookback.replay([RULE], rows(), STREAM).alerts.to_pandas()

    figure = pictures.flagged(pd.DataFrame(rows()), alerts, "at")

    assert png(figure)
    said = texts(figure)
    assert f"{len(alerts):,} alerts, {len(alerts) / 60:.2%} of events" in said
    assert "most alerts by customer" in said
    assert "c0" in said


def test_nothing_flagged_and_no_events_are_drawn_too():
    none = lookback.replay([RULE], [], STREAM).alerts.to_pandas()
    assert "0 alerts" in texts(pictures.flagged(pd.DataFrame(rows()), none, "at"))
    assert png(pictures.flagged(pd.DataFrame(), none, "at"))
    assert "no alerts" in texts(pictures.alerts_over_time(none))


def test_alerts_over_time_names_the_frequent_rules_and_sums_up_the_rest():
    frame = pd.DataFrame(
        {
            "event_time": [START + dt.timedelta(hours=at) for at in range(36)],
            "rule_id": [f"r{at % 8}" for at in range(36)],
        }
    )
    figure = pictures.alerts_over_time(frame)
    assert png(figure)
    assert "r0 (5)" in texts(figure)
    assert "other rules (12)" in texts(figure)


def test_a_live_view_shows_rate_lag_state_and_alerts():
    reports = [report(number) for number in range(1, 6)]
    committed = {number: reports[number - 1].finished_at - dt.timedelta(seconds=0.8) for number in range(1, 6)}

    figure = pictures.live(reports, committed)

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
    assert "seconds per batch" in texts(pictures.live(reports))
    assert "waiting for the first batch" in texts(pictures.live([]))
    assert png(pictures.live([report(1, watermark=None)]))


def test_rates_lags_and_totals():
    reports = [report(1), report(2), report(3, arrival=None, alerts={"a": 7})]
    assert pictures.events_per_second(reports) == [2_000.0, 1_000.0, 1_500.0]
    lags = pictures.lag_seconds(reports, {1: START})
    assert lags[0] == 2.0
    assert all(math.isnan(lag) for lag in lags[1:])
    assert list(pictures.alert_totals(reports).items()) == [("a", 7), ("day-spend", 3)]


def draw(folder: str) -> None:
    """Every picture as a file, to be looked at: python -c 'import test_pictures; test_pictures.draw(".")'."""
    from pathlib import Path

    alerts = lookback.replay([RULE], rows(), STREAM).alerts.to_pandas()
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
        "timeline": pictures.key_timeline(explanation()),
        "flagged": pictures.flagged(pd.DataFrame(rows()), alerts, "at"),
        "alerts": pictures.alerts_over_time(spread),
        "live": pictures.live(reports, committed),
    }.items():
        figure.savefig(Path(folder) / f"{name}.png", dpi=80)
