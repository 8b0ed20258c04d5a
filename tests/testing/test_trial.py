"""A rule tried over history: what it went by, event by event and window by window."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from lookback.core.streams.declaration import Stream
from lookback.core.values.listchanges import ListChange
from lookback.core.values.lists import Lists
from lookback.testing import trial
from lookback.testing.trial import run_trial

START = dt.datetime(2024, 3, 4, tzinfo=dt.timezone.utc)
STREAM = Stream.from_dict(
    {
        "stream": "tx",
        "event_id": "id",
        "event_time": "end",  # a word that SQL has for itself
        "fields": {"id": "bigint", "end": "timestamp", "k": "string", "amount": "decimal(18,2)"},
    }
)
RULE = {"rule_id": "r", "stream": "tx", "group_by": ["k"]}
SUMS = {"measures": {"total": "sum(amount)", "n": "count(*)"}, "when": "total >= 30 and n >= 2"}


def events(amounts: list[int], minutes: int = 10) -> pa.Table:
    """One event every `minutes`, all of one key, in commits of their own."""
    return pa.Table.from_pylist(
        [
            {"id": at, "end": START + at * dt.timedelta(minutes=minutes), "k": "x", "amount": Decimal(amount), "arrival": at + 1}
            for at, amount in enumerate(amounts)
        ]
    )  # fmt: skip


def points(document: dict[str, Any], rows: pa.Table) -> list[tuple[int, float, bool]]:
    """(minutes since START, value, flagged), in order of time."""
    values = run_trial({**RULE, **document}, rows, STREAM).values.sort_values("event_time")
    minutes = (values["event_time"] - START) // dt.timedelta(minutes=1)
    return list(zip(minutes, values["value"], values["flagged"], strict=True))


#  minute    0   10   20   30
#  amount   10   25   40   15
#  10 min   10   35   65   55      both ends included
AMOUNTS = [10, 25, 40, 15]


def test_a_lookback_rule_goes_by_its_measure_as_of_each_event():
    document = {**RULE, **SUMS, "window": "10 minutes"}
    done = run_trial(document, events(AMOUNTS), STREAM)
    assert (done.name, done.limits) == ("total", (30.0,))
    assert points(document, events(AMOUNTS)) == [(0, 10, False), (10, 35, True), (20, 65, True), (30, 55, True)]


def test_what_is_suppressed_is_an_alert_that_stands_once():
    document = {**SUMS, "window": "10 minutes", "suppress": "1 hour"}
    assert [flagged for _, _, flagged in points(document, events(AMOUNTS))] == [False, True, True, True]


def test_a_rule_on_a_field_goes_by_the_field():
    document = {**RULE, "window": "10 minutes", "measures": {"n": "count(*)"}, "when": "amount > 20"}
    assert (run_trial(document, events(AMOUNTS), STREAM).name, run_trial(document, events(AMOUNTS), STREAM).limits) == (
        "amount",
        (20.0,),
    )
    assert points(document, events(AMOUNTS)) == [(0, 10, False), (10, 25, True), (20, 40, True), (30, 15, False)]


def test_where_alerts_empty_the_key_only_they_are_known():
    document = {**SUMS, "window": "1 hour", "reset_on_alert": True}
    assert points(document, events(AMOUNTS)) == [(10, 35, True), (30, 55, True)]


def test_a_windows_rule_goes_by_each_window_that_has_ended():
    # [0, 20): 35, [20, 40): 55, [40, 60): 2; the fourth is still open.
    document = {**SUMS, "window": {"tumbling": "20 minutes"}}
    # Without the column `arrival` rows arrive as they stand.
    done = run_trial({**RULE, **document}, events([*AMOUNTS, 1, 1, 1, 1]).drop_columns("arrival"), STREAM)
    found = [(value, flagged) for value, flagged in zip(done.values["value"], done.values["flagged"], strict=True)]
    assert sorted(found) == [(2, False), (35, True), (55, True)]


def test_a_sequence_has_no_values():
    document = {**RULE, "sequence": {"within": "1 hour", "steps": [{"name": "a", "where": "amount > 20"}]}}
    done = run_trial(document, events(AMOUNTS), STREAM)
    assert len(done.final_alerts) == 2
    assert (done.name, len(done.values)) == ("", 0)


@pytest.mark.parametrize("minutes", [1, 7, 60])
def test_of_many_events_some_are_shown_spread_over_the_time_and_all_that_were_flagged(
    minutes: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(trial, "_MAX_VALUES", 100)
    amounts = [1 + 99 * (at % 250 == 3) for at in range(1_000)]
    document = {**RULE, "window": "1 second", "measures": {"total": "sum(amount)"}, "when": "total >= 100"}
    values = run_trial(document, events(amounts, minutes), STREAM).values
    assert values["flagged"].sum() == 4
    others = values[~values["flagged"]]
    assert 50 <= len(others) <= 100
    span = (others["event_time"].max() - others["event_time"].min()) / dt.timedelta(minutes=minutes)
    assert span > 900


def test_of_many_windows_those_of_the_newest_events_are_shown(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trial, "_MAX_VALUES", 24)
    window = {"sliding": "40 minutes", "slide": "20 minutes"}
    document = {**RULE, "measures": {"n": "count(*)"}, "when": "n > 5", "window": window}
    values = run_trial(document, events([1] * 40), STREAM).values
    # Each event is in two windows, so twelve events, of minutes 280 to 390; [260, 300) would lack two of its four.
    assert sorted((values["event_time"] - START) // dt.timedelta(minutes=1)) == [320, 340, 360, 380]
    assert set(values["value"]) == {4}


def test_c11_3_a_trial_takes_lists_as_they_are():
    document = {**RULE, **SUMS, "window": "10 minutes", "where": "in_list(k, 'known')"}
    lists = Lists.empty().apply([ListChange("insert", 3, "known", "x")])
    assert len(run_trial(document, events(AMOUNTS), STREAM).alerts) == 0
    done = run_trial(document, events(AMOUNTS), STREAM, lists)
    assert len(done.final_alerts) == 3
    assert len(done.values) == 4
