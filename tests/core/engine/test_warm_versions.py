"""A version that is warming beside the one in force: what replaces, pauses and ends it, and what moves the seam (11.1, 11.2)."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from growth import grows_in_proportion
from lookback.core.engine.batch import Batch
from lookback.core.engine.deferral import find_pieces
from lookback.core.engine.evaluation import Evaluator
from lookback.core.engine.output import Output
from lookback.core.engine.warming import WindowHistory, find_reason_cold
from lookback.core.rules.changes import RuleChange
from lookback.core.rules.compiling import compile_rule
from lookback.core.rules.rulebook import RuleBook
from lookback.core.rules.versions import WARM, Piece
from lookback.core.state.shard import ShardState
from lookback.core.streams.arrival import find_marks
from lookback.core.streams.declaration import Stream
from lookback.core.streams.eventrows import read_events
from lookback.core.streams.events import Events, empty_events
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
SESSION = {**SHORT, "window": {"session": "2 minutes"}}
FIRST, THEN = {"name": "first", "where": "card = 'x'", "at_least": 2}, {"name": "then", "where": "card = 'y'"}
SEQUENCE = {"rule_id": "r", "stream": "uses", "sequence": {"within": "5 minutes", "steps": [FIRST, THEN]}}
FIXED = {**SEQUENCE, "sequence": {**SEQUENCE["sequence"], "expiry": "fixed"}}  # type: ignore[dict-item]
ABSENT = {
    **SEQUENCE,
    "sequence": {
        "within": "5 minutes",
        "steps": [FIRST, {"name": "quiet", "absent": "card = 'y'", "within": "4 minutes"}],
    },
}


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
        self.process(Batch(events, marks=find_marks(events, events.commits)))

    def process(self, batch: Batch) -> None:
        self._take(self.evaluator.process(self.state, batch))

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

    def gather(self, document: dict[str, Any], through: int, *gone: int, part: int = 0, parts: int = 1) -> None:
        """Makes the history of a rule, or a part of it, without the events that were deleted."""
        state = ShardState(RuleBook(STREAM, {STREAM.name: STREAM}))
        listed = [row for row in self.rows if row["arrival"] <= through and row["id"] and row["arrival"] not in gone]
        events, _ = read_events(listed, STREAM, 1)
        change = RuleChange("insert", 0, document["rule_id"], 1, "paused", json.dumps(document))
        batch = Batch(events, marks=find_marks(events, events.commits), changes=[change])
        Evaluator(STREAM, part, parts).process(state, batch)
        self.parts["p"] = WindowHistory.of(state, compile_rule(document, STREAM)).encode()

    def _take(self, output: Output) -> None:
        self.state.drop_old()
        assert not output.failures
        self.log += [(row.version, row.action, row.arrival) for row in output.log]
        self.alerts += [
            (
                alert.rule_version,
                alert.arrival,
                to_text(alert.measures.get("n")) or ",".join(alert.evidence),
                alert.window_complete,
            )
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


@pytest.mark.parametrize(("document", "through"), [(STRICT, 3), (LONGER, 4)])
def test_a_replay_logs_of_a_version_that_was_warmed_what_the_stream_did(document: dict[str, Any], through: int) -> None:
    """11.2: a rebuild drops the rows of rule_log that are there, so the commit in the message has to be the same."""
    changes = [
        RuleChange("insert", version, "r", version, "active", json.dumps(each), warms=True)
        for version, each in ((1, LONG), (2, document))
    ]
    messages = []
    for is_replay in (False, True):
        book = RuleBook(STREAM, {STREAM.name: STREAM})
        if is_replay:
            # The second came into force with its history, the first never did.
            book.open_warming("r", 2, "active", json.dumps(document))
        log = [
            row for arrival, change in ((3, changes[0]), (4, changes[1])) for row in book.apply([change], arrival)[0]
        ]
        messages.append([(row.version, row.action, row.message) for row in log])
    stream, replay = messages
    assert stream == replay
    assert f"through commit {through} are" in stream[1][2]


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
    stage.parts["p"] = WindowHistory.empty(compile_rule(LONG, STREAM)).encode()
    stage.piece(1, 2, 2, 2)
    stage.event("x")
    assert stage.log[1:] == [(1, "activated", 2)]
    assert stage.alerts_of(1) == [(3, "3", True)]


def test_a_rule_that_wants_no_history_starts_cold_and_says_why() -> None:
    document = {**LONG, "warm_start": False}
    stage = Stage("x", "x")
    stage.change(document, 1)
    assert stage.log == [(1, "activated", 2)]
    assert "warm_start: false" in str(find_reason_cold(compile_rule(document, STREAM)))


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


# Sessions and sequences: what arrives while they are warming is judged once the history of its key is there.


def warm(stage: Stage, document: dict[str, Any], meanwhile: str, after: str) -> None:
    """C is the last commit so far; A comes after the events of `meanwhile`, and those of `after` follow."""
    through = len(stage.rows)
    stage.change(document, 1)
    for card in meanwhile:
        stage.event(card)
    assert stage.state.deferred.events <= len(meanwhile)
    stage.gather(document, through)
    stage.piece(1, through)
    assert not stage.state.deferred.counts
    for card in after:
        stage.event(card)
    active = through + len(meanwhile)
    assert stage.log[-2:] == [(1, "warming", through), (1, "activated", active)]
    assert all(arrival > active for _, arrival, *_ in stage.alerts)


@pytest.mark.parametrize(
    ("before", "meanwhile", "after", "alerts"),
    [
        # The first step began before C: e2 and e3, or e4, which came in between.
        ("zxx", "", "y", [(4, "e2,e3,e4", True)]),
        ("zxx", "zz", "y", [(6, "e2,e3,e6", True)]),
        ("zxx", "xz", "y", [(6, "e2,e3,e4,e6", True)]),
        # [0:01, 0:06] of e6 has e1, both ends included; [0:02, 0:07] of e7 has not.
        ("xxz", "zz", "y", [(6, "e1,e2,e6", True)]),
        ("xxz", "zzz", "y", []),
        # What is completed before A raises nothing, and the match goes on.
        ("zxx", "yz", "zy", [(7, "e2,e3,e4,e7", True)]),
    ],
)
def test_a_sequence_goes_on_over_the_seam(before: str, meanwhile: str, after: str, alerts: list[Any]) -> None:
    """11.2: an event a minute, e1 at 0:01; the match reaches back 5 minutes, over C and A."""
    stage = Stage(*before)
    warm(stage, SEQUENCE, meanwhile, after)
    assert stage.alerts_of(1) == alerts


def test_a_match_with_fixed_expiry_begins_where_the_one_before_has_ended() -> None:
    """It takes [0:01, 0:06], the next one begins with e7: however long ago that was decided, e8 is in it at 0:08."""
    stage = Stage(*"xzzxz")
    warm(stage, FIXED, "zx", "xy")
    assert stage.alerts_of(1) == [(9, "e7,e8,e9", True)]


@pytest.mark.parametrize(
    ("before", "meanwhile", "after", "alerts"),
    [
        # The wait of e2 lasts up to 0:06, and e7 moves the watermark beyond it.
        ("xxz", "zz", "zz", [(7, "e1,e2", True)]),
        # It is over before A: no alert was written then, and none is later.
        ("xxz", "zzzz", "zz", []),
        # y ended it: before C, before A, after A.
        ("xxy", "zz", "zz", []),
        ("xxz", "yz", "zz", []),
        ("xxz", "zz", "yz", []),
        # It began after C, with a first step of before.
        ("zzx", "xz", "zzzz", [(9, "e3,e4", True)]),
    ],
)
def test_a_wait_for_an_absence_goes_on_over_the_seam(
    before: str, meanwhile: str, after: str, alerts: list[Any]
) -> None:
    stage = Stage(*before)
    warm(stage, ABSENT, meanwhile, after)
    assert stage.alerts_of(1) == alerts


def test_a_wait_that_began_below_the_floor_of_a_names_what_counted_when_it_began() -> None:
    """It begins with e4 and e3 of before C; at A, at 0:12, rows below 0:07 are in no match that an event could complete."""
    steps = [FIRST, {"name": "quiet", "absent": "card = 'y'", "within": "20 minutes"}]
    document = {**ABSENT, "allowed_lateness": "0 seconds", "sequence": {"within": "5 minutes", "steps": steps}}
    stage = Stage(*"zzx")
    warm(stage, document, "x" + "z" * 8, "z" * 13)
    assert stage.alerts_of(1) == [(25, "e3,e4", True)]


@pytest.mark.parametrize(
    ("before", "meanwhile", "after", "alerts"),
    [
        # e1, e2, e3, e4 of x: gaps of 1 minute. It ends at 0:06:00.000001, which e7 passes.
        ("xx", "xx", "zzz", [(7, "4", True)]),
        # The gap of 2 minutes belongs to it, that of 3 does not.
        ("xz", "xz", "xzzz", [(8, "3", True)]),
        ("xz", "zx", "zzz", [(7, "1", True)]),
        # It ended before A.
        ("xx", "zzz", "zz", []),
    ],
)
def test_a_session_goes_on_over_the_seam(before: str, meanwhile: str, after: str, alerts: list[Any]) -> None:
    stage = Stage(*before)
    warm(stage, {**SESSION, "where": "card = 'x'"}, meanwhile, after)
    assert stage.alerts_of(1) == alerts


def test_keys_are_judged_as_soon_as_their_piece_is_there() -> None:
    """11.1, the second drawing of how-time-works.md: one key comes with the first of two pieces, one with the second."""
    first, second = (next(card for card in "abcdefgh" if _piece_of(card) == number) for number in (1, 2))
    stage = Stage(first, second, first, second)
    stage.change(SESSION, 1)
    stage.event(first)
    stage.event(second)
    assert stage.state.deferred.events == 2
    for number in (1, 2):
        stage.gather(SESSION, 4, part=number - 1, parts=2)
        stage.piece(1, 4, number, 2)
        # Of the key that has its history nothing is deferred any more.
        stage.event(first)
        assert stage.state.deferred.events == (2 if number == 1 else 0)
    for _ in range(4):
        stage.event("z")
    assert sorted(alert[1:] for alert in stage.alerts_of(1)) == [("3", True), ("5", True)]


def _piece_of(card: str) -> int:
    events, _ = read_events([{"id": "e", "at": 0, "card": card, "arrival": 1}], STREAM, 1)
    return int(find_pieces(events.find_keys(("card",)), 1, 2)[0])


def test_a_session_with_another_measure_waits_for_its_values() -> None:
    """11.1: its rows are there, and do not have the values of the new measure."""
    stage = Stage()
    stage.change({**SESSION, "where": "card = 'x'"}, 1)
    stage.event("x")
    changed = {**SESSION, "where": "card = 'x'", "measures": {"n": "count(*)", "last": "max(id)"}}
    stage.change({**SESSION, "where": "card = 'x'", "when": "n >= 2"}, 2)
    stage.change(changed, 3)
    stage.event("x")
    stage.gather(changed, 1)
    stage.piece(3, 1)
    for card in "zzz":
        stage.event(card)
    assert stage.log == [(1, "activated", None), (2, "activated", 1), (3, "warming", 1), (3, "activated", 2)]
    assert stage.alerts == [(3, 5, "2", True)]


@pytest.mark.parametrize("document", [SEQUENCE, {**SHORT, "reset_on_alert": True}, SESSION])
def test_a_version_in_shadow_waits_for_the_state_that_it_has_to_itself(document: dict[str, Any]) -> None:
    """11.1: the active one has its windows, and resets them; the one beside it has none of them yet."""
    stage = Stage()
    stage.change(document, 1)
    stage.event("x")
    stage.change({**document, "message": "again"}, 2, "shadow")
    assert stage.log == [(1, "activated", None), (2, "warming", 1)]
    stage.event("x")
    stage.gather(document, 1)
    stage.piece(2, 1)
    # What took its place goes on with what that has.
    stage.change({**document, "message": "once more"}, 3, "shadow")
    assert stage.log[2:] == [(2, "shadowed", 2), (3, "shadowed", 2)]


@pytest.mark.parametrize("end", ["retired", "delete", "cold"])
def test_deferred_events_go_with_the_version(end: str) -> None:
    stage = Stage(*"xx")
    stage.change(SEQUENCE, 1)
    stage.event("x")
    assert stage.state.deferred.events == 1
    if end == "retired":
        stage.change(SEQUENCE, 2, "retired")
    elif end == "delete":
        # C moves, and what came before it is part of the history.
        stage.delete(1)
        assert stage.log[-1] == (1, "warming", 4)
    else:
        stage.piece(1, 2, 0, 0)
    stage.event("z")
    assert not stage.state.deferred.counts
    stage.event("y")
    assert not stage.alerts


def test_what_was_deferred_before_clear_state_counts_no_more() -> None:
    """It forgets the history, and the events that were deferred; those that come after it count."""
    stage = Stage(*"xx")
    stage.change(SEQUENCE, 1)
    stage.event("x")
    stage.change(None, None, "clear_state")
    stage.event("x")
    stage.gather(SEQUENCE, 2)
    stage.piece(1, 2)
    stage.event("y")
    assert not stage.alerts
    stage.event("x")
    stage.event("y")
    assert [alert[1:3] for alert in stage.alerts] == [(7, "e4,e6,e7")]


@pytest.mark.parametrize("document", [LONG, SEQUENCE])
def test_a_declaration_that_names_the_features_anew_moves_the_seam(document: dict[str, Any]) -> None:
    """What was kept by those of before is not theirs: the history ends with the last commit that was judged."""
    stage = Stage(*"xx")
    stage.change(document, 1)
    stage.event("x")
    declared = replace(STREAM, allowed_lateness=STREAM.allowed_lateness // 2)
    stage.evaluator = replace(stage.evaluator, stream=declared)
    stage.state.book.declare(declared)
    stage.event("x")
    assert stage.log == [(1, "warming", 2), (1, "warming", 3)]
    assert set(stage.state.features) == set(stage.state.book.list_judged()[0][1].needs)


@pytest.mark.parametrize("document", [SEQUENCE, ABSENT, {**SESSION, "where": "card <> 'y'"}])
def test_deferred_events_take_a_time_in_proportion_to_their_number(document: dict[str, Any]) -> None:
    document = {**document, "group_by": ["card"]}
    listed = [
        {"id": f"e{at}", "at": at * 40_000_000, "card": f"c{at % 50}", "arrival": 2 + at // 50} for at in range(40_000)
    ]
    whole, _ = read_events(listed, STREAM, 1)

    def seconds_for(count: int) -> float:
        stage = Stage("x")
        stage.change(document, 1)
        commits = 1 + count // 50
        stage.gather(document, 1)
        empty = WindowHistory.empty(compile_rule(document, STREAM)).encode()
        started = time.process_time()
        for begin in range(2, commits, 10):
            events = whole.take((whole.commits >= begin) & (whole.commits < min(begin + 10, commits)))
            stage.process(Batch(events, marks=find_marks(events, events.commits)))
        for number in (1, 2, 3):
            stage.piece(1, 1, number, 3)
            stage.parts["p"] = empty
        assert stage.log[-1][1] == "activated"
        return time.process_time() - started

    assert grows_in_proportion(seconds_for, 4_000)
