"""A rule tried over history: what it went by, event by event and window by window."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import numpy as np
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


@pytest.mark.parametrize("minutes", [1, 7, 60, 0])
def test_of_many_events_a_random_sample_of_all_of_the_time_is_shown_and_all_that_were_flagged(
    minutes: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(trial, "_MAX_VALUES", 100)
    amounts = [1 + 999 * (at % 250 == 3) for at in range(1_000)]
    document = {**RULE, "window": "1 second", "measures": {"largest": "max(amount)"}, "when": "amount >= 1000"}
    rows = events(amounts, minutes)
    values = run_trial(document, rows, STREAM).values
    assert values["flagged"].sum() == 4
    others = values[~values["flagged"]]
    assert 70 <= len(others) <= 100
    assert run_trial(document, rows, STREAM).values.equals(values)
    if minutes:
        at = ((others["event_time"] - START) / dt.timedelta(minutes=minutes)).to_numpy()
        # Each fifth of the time has its share, and the distances between neighbours vary as those of a random sample.
        assert min(np.histogram(at, bins=5, range=(0, 1_000))[0]) >= 8
        assert len(set(np.diff(np.sort(at)).round().tolist())) > 10


def test_of_many_windows_a_random_sample_of_all_of_the_time_is_shown_each_with_all_its_events(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(trial, "_MAX_VALUES", 100)
    monkeypatch.setattr(trial, "_MAX_DRAWN_WINDOWS", 400)
    window = {"sliding": "40 minutes", "slide": "20 minutes"}
    document = {**RULE, "measures": {"n": "count(*)"}, "when": "n > 5", "window": window}
    values = run_trial(document, events([1] * 2_000), STREAM).values
    at = ((values["event_time"] - START) / dt.timedelta(minutes=10)).to_numpy()
    assert 60 <= len(values) <= 100
    assert min(np.histogram(at, bins=5, range=(0, 2_000))[0]) >= 5
    assert set(values["value"]) == {4}


def test_a_sample_takes_no_field_of_the_stream_for_its_own():
    fields = {**STREAM.to_dict()["fields"], "lookback_sample": "bigint"}
    stream = Stream.from_dict({**STREAM.to_dict(), "fields": fields})
    rows = events(AMOUNTS).append_column("lookback_sample", pa.array([7] * len(AMOUNTS)))
    document = {**RULE, "window": "10 minutes", "measures": {"total": "sum(lookback_sample)"}, "when": "total >= 100"}
    assert list(run_trial(document, rows, stream).values["value"]) == [7, 14, 14, 14]


def test_c11_3_a_trial_takes_lists_as_they_are():
    document = {**RULE, **SUMS, "window": "10 minutes", "where": "in_list(k, 'known')"}
    lists = Lists.empty().apply([ListChange("insert", 3, "known", "x")])
    assert len(run_trial(document, events(AMOUNTS), STREAM).alerts) == 0
    done = run_trial(document, events(AMOUNTS), STREAM, lists)
    assert len(done.final_alerts) == 3
    assert len(done.values) == 4
