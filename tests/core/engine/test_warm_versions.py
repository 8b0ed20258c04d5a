"""A version that is warming beside the one in force: what replaces, pauses and ends it, and what moves the seam (11.1, 11.2)."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from lookback.core.engine.evaluation import Batch, Evaluator, Output
from lookback.core.engine.warming import History, find_reason_cold
from lookback.core.rules.compiled import compile_rule
from lookback.core.rules.rulebook import WARM, Piece, RuleBook, RuleChange
from lookback.core.state.shard import ShardState
from lookback.core.streams.arrival import find_marks
from lookback.core.streams.declaration import Stream
from lookback.core.streams.events import Events, empty_events, read_events
from lookback.core.values.columns import to_text

_MINUTE = 60_000_000
STREAM = Stream.from_dict(
    {
        "stream": "uses", "event_id": "id", "event_time": "at",
        "fields": {"id": "string", "at": "timestamp", "card": "string"},
    }
)  # fmt: skip
SHORT = {
    "rule_id": "r", "stream": "uses", "group_by": ["card"], "window": "1 minute", "measures": {"n": "count(*)"}, "when": "n >= 1",
}  # fmt: skip
LONG = {**SHORT, "window": "60 minutes"}
LONGER = {**SHORT, "window": "90 minutes"}
# The same windows as LONG, with another condition.
STRICT = {**LONG, "when": "n >= 2"}
TUMBLING = {**SHORT, "window": {"tumbling": "10 minutes"}}


class Stage:
    """One shard and the table that it reads: an event of a card each minute, each a commit of its own."""

    def __init__(self, *cards: str, warms: bool = True) -> None:
        self.state = ShardState(RuleBook(STREAM, {STREAM.name: STREAM}))
        self.parts: dict[str, bytes] = {}
        self.evaluator = Evaluator(STREAM, warms=warms, read_parcel=lambda name, _: self.parts[name], query="q")
        self.rows: list[dict[str, Any]] = []
        self.log: list[tuple[Any, ...]] = []
        self.alerts: list[tuple[Any, ...]] = []
        self._changes = 0
        for card in cards:
            self.event(card)

    def event(self, card: str) -> None:
        number = len(self.rows) + 1
        self.rows.append({"id": f"e{number}", "at": number * _MINUTE, "card": card, "arrival": number})
        events, _ = read_events(self.rows[-1:], STREAM, 1)
        self._take(self.evaluator.process(self.state, Batch(events, marks=find_marks(events, events.commits))))

    def delete(self, *numbers: int) -> None:
        """Deletes events in a commit of its own."""
        commit = len(self.rows) + 1
        self.rows.append({"id": None, "arrival": commit})
        taken, _ = read_events([self.rows[number - 1] for number in numbers], STREAM, 1)
        gone = Events(taken.columns, np.full(len(taken), commit), "id", "at")
        batch = Batch(empty_events(STREAM, STREAM.fields), gone, {commit: None}, deleting=frozenset([commit]))
        self._take(self.evaluator.process(self.state, batch))

    def change(
        self, document: dict[str, Any] | None, version: int | None, status: str = "active", what: str = "insert"
    ) -> None:
        self._changes += 1
        text = None if document is None else json.dumps(document)
        rule_id = "*" if document is None else document["rule_id"]
        change = RuleChange(what, self._changes, rule_id, version, status, text)
        self._take(self.evaluator.process(self.state, Batch(empty_events(STREAM, ()), changes=[change])))

    def piece(self, version: int, through: int, piece: int = 1, pieces: int = 1, query: str = "q") -> None:
        document = Piece("r", version, through, piece, pieces, "p", query).to_document(STREAM.name)
        self._changes += 1
        change = RuleChange("insert", self._changes, "*", None, WARM, document)
        self._take(self.evaluator.process(self.state, Batch(empty_events(STREAM, ()), changes=[change])))

    def gather(self, document: dict[str, Any], through: int, *gone: int) -> None:
        """Makes the history of a rule, without the events that were deleted."""
        state = ShardState(RuleBook(STREAM, {STREAM.name: STREAM}))
        listed = [row for row in self.rows if row["arrival"] <= through and row["id"] and row["arrival"] not in gone]
        events, _ = read_events(listed, STREAM, 1)
        change = RuleChange("insert", 0, document["rule_id"], 1, "paused", json.dumps(document))
        Evaluator(STREAM).process(state, Batch(events, marks=find_marks(events, events.commits), changes=[change]))
        self.parts["p"] = History.of(state, compile_rule(document, STREAM)).encode()

    def _take(self, output: Output) -> None:
        self.state.drop_old()
        assert not output.failures
        self.log += [(row.version, row.action, row.arrival) for row in output.log]
        self.alerts += [
            (alert.rule_version, alert.arrival, to_text(alert.measures["n"]), alert.window_complete)
            for alert in output.alerts
        ]

    def alerts_of(self, version: int) -> list[tuple[Any, ...]]:
        return [alert[1:] for alert in self.alerts if alert[0] == version]


def test_the_version_before_stays_in_force_until_the_history_is_there() -> None:
    """11.1, the drawing of how-time-works.md: C = 3, A = 4."""
    stage = Stage()
    stage.change(SHORT, 1)
    for card in "xxx":
        stage.event(card)
    stage.change(LONG, 2)
    stage.event("x")
    stage.gather(LONG, 3)
    stage.piece(2, 3)
    stage.event("x")
    assert stage.log == [(1, "activated", None), (2, "warming", 3), (2, "activated", 4)]
    assert [alert[1:] for alert in stage.alerts if alert[0] == 1] == [
        (at, "2" if at > 1 else "1", True) for at in (1, 2, 3, 4)
    ]
    assert stage.alerts_of(2) == [(5, "5", True)]


def test_a_tumbling_window_has_the_events_of_keys_that_do_not_come_again() -> None:
    stage = Stage("x", "y", "x")
    stage.change(TUMBLING, 1)
    assert stage.log == [(1, "warming", 3)]
    stage.gather(TUMBLING, 3)
    stage.piece(1, 3)
    for card in "zzzzzzzz":
        stage.event(card)
    # [0:00, 0:10) ends with the event at 0:11.
    assert sorted(stage.alerts_of(1)) == [(11, "1", True), (11, "2", True), (11, "6", True)]


@pytest.mark.parametrize(
    ("document", "log"),
    [
        # The features are equal: what is kept and loaded stays, and so does C.
        (STRICT, [(1, "warming", 3), (2, "warming", 4), (2, "activated", 5)]),
        # Other windows begin anew, after commit 4.
        (LONGER, [(1, "warming", 3), (2, "warming", 4)]),
    ],
)
def test_a_later_version_replaces_one_that_is_warming(document: dict[str, Any], log: list[tuple[Any, ...]]) -> None:
    stage = Stage("x", "x", "x")
    stage.change(LONG, 1)
    stage.event("x")
    stage.change(document, 2)
    stage.event("x")
    stage.gather(document, 3)
    stage.piece(1, 3)
    stage.piece(2, 3)
    assert stage.log == log
    if document is LONGER:
        stage.gather(LONGER, 4)
        stage.piece(2, 4)
        assert stage.log[2:] == [(2, "activated", 5)]
    stage.event("x")
    assert stage.alerts_of(2) == [(6, "6", True)]
    assert not stage.state.book.warming
    # The features of before are gone with the next commit.
    assert set(stage.state.features) == set(compile_rule(document, STREAM).needs)


def test_a_version_that_is_paused_while_it_is_warming_is_silent_at_once_and_warmed() -> None:
    stage = Stage("x", "x")
    stage.change({**SHORT, "warm_start": False}, 1)
    stage.change(LONG, 2)
    stage.event("x")
    stage.change(LONG, 3, "paused")
    stage.event("x")
    stage.gather(LONG, 2)
    stage.piece(3, 2)
    stage.event("x")
    assert stage.log[1:] == [(2, "warming", 2), (3, "warming", 3), (3, "paused", 3), (3, "paused", 4)]
    assert [alert[:2] for alert in stage.alerts] == [(1, 3)]
    # Its windows are held now, so it speaks at once.
    stage.change(LONG, 4)
    stage.event("x")
    assert stage.log[5:] == [(4, "activated", 5)]
    assert stage.alerts_of(4) == [(6, "6", True)]


@pytest.mark.parametrize("how", ["retired", "delete", "retire_all", "quarantined"])
def test_a_version_that_is_warming_is_ended(how: str) -> None:
    stage = Stage("x", "x")
    stage.change(LONG, 1)
    if how == "delete":
        stage.change(LONG, 1, what="delete")
    elif how == "retire_all":
        stage.change(None, None, how)
    else:
        stage.change(LONG, 2, how)
    stage.gather(LONG, 2)
    stage.piece(1, 2)
    stage.event("x")
    assert not stage.state.book.warming
    assert "activated" not in {action for _, action, _ in stage.log}
    assert not stage.alerts
    assert not stage.state.features


def test_a_delete_moves_the_seam() -> None:
    """11.2: the history is made anew with what the delete left; pieces of the one before are not taken."""
    stage = Stage("x", "x", "x")
    stage.change(LONG, 1)
    stage.event("x")
    stage.gather(LONG, 3)
    stage.delete(2)
    stage.piece(1, 3)
    stage.event("x")
    assert stage.log == [(1, "warming", 3), (1, "warming", 5)]
    stage.gather(LONG, 5, 2)
    stage.piece(1, 5)
    stage.event("x")
    assert stage.log[2:] == [(1, "activated", 6)]
    # Commits 1, 3, 4, 6 and 7 have an event that is still there.
    assert stage.alerts_of(1) == [(7, "5", True)]


def test_a_history_from_before_clear_state_counts_no_more() -> None:
    stage = Stage("x", "x")
    stage.change(LONG, 1)
    stage.event("x")
    stage.change(None, None, "clear_state")
    stage.gather(LONG, 2)
    stage.piece(1, 2)
    stage.event("x")
    assert stage.alerts_of(1) == [(4, "1", False)]


def test_pieces_are_taken_once_in_their_order_and_for_this_evaluation_alone() -> None:
    stage = Stage("x", "x")
    stage.change(LONG, 1)
    stage.gather(LONG, 2)
    whole, stage.parts["p"] = stage.parts["p"], b""
    stage.piece(1, 2, 2, 2)
    stage.piece(1, 2, 1, 1, query="another")
    stage.piece(1, 1, 1, 1)
    assert stage.log == [(1, "warming", 2)]
    stage.parts["p"] = whole
    stage.piece(1, 2, 1, 2)
    stage.parts["p"] = b""
    stage.piece(1, 2, 1, 2)
    stage.parts["p"] = History.empty(compile_rule(LONG, STREAM)).encode()
    stage.piece(1, 2, 2, 2)
    stage.event("x")
    assert stage.log[1:] == [(1, "activated", 2)]
    assert stage.alerts_of(1) == [(3, "3", True)]


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ({**LONG, "warm_start": False}, "warm_start: false"),
        ({**SHORT, "window": {"session": "5 minutes"}}, "session"),
    ],
)
def test_rules_without_a_history_start_cold_and_say_why(document: dict[str, Any], reason: str) -> None:
    stage = Stage("x", "x")
    stage.change(document, 1)
    assert stage.log == [(1, "activated", 2)]
    assert reason in str(find_reason_cold(compile_rule(document, STREAM)))


def test_a_version_whose_windows_are_held_is_in_force_at_once() -> None:
    """A rule that stood there since the first event holds 60 minutes; as many minutes later, a cold one does too."""
    stage = Stage()
    stage.change(LONG, 1)
    stage.event("x")
    stage.change(STRICT, 2)
    stage.change({**STRICT, "window": "30 minutes"}, 3)
    stage.change(LONGER, 4)
    assert stage.log == [(1, "activated", None), (2, "activated", 1), (3, "activated", 1), (4, "warming", 1)]


def test_a_shadow_that_came_later_stays_beside_a_version_that_has_been_warmed() -> None:
    stage = Stage("x", "x")
    stage.change(LONG, 1)
    stage.change({**SHORT, "warm_start": False}, 2, "shadow")
    stage.gather(LONG, 2)
    stage.piece(1, 2)
    assert stage.log == [(1, "warming", 2), (2, "shadowed", 2), (1, "activated", 2)]
    book = stage.state.book
    assert (book.entries["r"].version, book.challengers["r"].version) == (1, 2)
    assert {book.entries["r"].lane, book.challengers["r"].lane} == {0, 1}
    loaded = RuleBook(STREAM, {STREAM.name: STREAM})
    loaded.load(book.to_json())
    assert (loaded.entries, loaded.challengers, loaded.warming) == (book.entries, book.challengers, book.warming)
