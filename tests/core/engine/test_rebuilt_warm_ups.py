"""State made anew from what was logged, with versions that were warming: drivers and evaluations may have ended at any time.

Contract 11.1. A driver names the pieces of a history in the rules table; one that was killed may name them again, whatever the
stream has made of them, and a rebuilt evaluation has them made anew.
"""

from __future__ import annotations

import json
from dataclasses import astuple
from typing import Any

from hypothesis import event, given
from hypothesis import strategies as st
from test_equals_oracle import plain

from lookback.core.engine.batch import Batch
from lookback.core.engine.evaluation import Evaluator
from lookback.core.engine.output import Output
from lookback.core.engine.schedule import Schedule, WaitingChange, judge_batch
from lookback.core.engine.warming import WindowHistory
from lookback.core.rules.changes import RuleChange
from lookback.core.rules.compiling import compile_rule
from lookback.core.rules.rulebook import RuleBook
from lookback.core.rules.rulelog import LogRow
from lookback.core.rules.versions import WARM, Piece
from lookback.core.state.shard import ShardState
from lookback.core.streams.arrival import find_marks
from lookback.core.streams.declaration import Stream
from lookback.core.streams.declarations import Declarations
from lookback.core.streams.eventrows import read_events
from lookback.core.streams.events import empty_events

STREAM = Stream.from_dict(
    {
        "stream": "uses",
        "event_id": "id",
        "event_time": "at",
        "fields": {"id": "string", "at": "timestamp", "card": "string"},
    }
)
STREAMS = {STREAM.name: STREAM}
_MINUTE = 60_000_000
_STEPS = [{"name": "first", "where": "card = 'x'", "at_least": 2}, {"name": "then", "where": "card = 'y'"}]


def counting(window: Any, when: str = "n >= 1") -> dict[str, Any]:
    return {"stream": "uses", "group_by": ["card"], "window": window, "measures": {"n": "count(*)"}, "when": when}


_DOCUMENTS = [
    counting("1 minute"), *[counting("60 minutes", f"n >= {at}") for at in (1, 2, 3)], counting("90 minutes"),
    counting({"tumbling": "10 minutes"}), counting({"session": "2 minutes"}),
    {"stream": "uses", "sequence": {"within": "5 minutes", "steps": _STEPS}},
]  # fmt: skip


def new_state() -> ShardState:
    return ShardState(RuleBook(STREAM, STREAMS))


class Evaluated:
    """One shard, its tables, and the pieces of history that were named."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.changes: list[RuleChange] = []
        self.pieces: list[Piece] = []
        self.alerts: list[Any] = []
        self.log: list[LogRow] = []
        self.evaluations = 0
        self.state = new_state()

    @property
    def query(self) -> str:
        return f"q{self.evaluations}"

    @property
    def evaluator(self) -> Evaluator:
        return Evaluator(STREAM, warms=True, read_parcel=self.make_history, query=self.query)

    def event(self, card: str, minutes: int) -> None:
        number = len(self.rows) + 1
        before = self.rows[-1]["at"] if self.rows else 0
        self.rows.append({"id": f"e{number}", "at": before + minutes * _MINUTE, "card": card, "arrival": number})
        self.take(self.evaluator.process(self.state, self.batch(number - 1, number)))

    def batch(self, start: int, end: int, changes: list[RuleChange] | None = None) -> Batch:
        events, _ = read_events(self.rows[start:end], STREAM, 1)
        return Batch(events, marks=find_marks(events, events.commits), changes=changes or [])

    def change(self, rule_id: str, status: str, document: str | None, version: int | None = None) -> None:
        change = RuleChange("insert", len(self.changes) + 1, rule_id, version, status, document)
        self.changes.append(change)
        self.take(self.evaluator.process(self.state, Batch(empty_events(STREAM, ()), changes=[change])))

    def name_pieces(self, count: int) -> None:
        """Names the next piece of the version that began to warm first, in a history of so many pieces."""
        for warming in self.state.book.list_known_warming()[:1]:
            if warming.begun is not None:
                number, pieces = warming.loaded + 1, warming.pieces or count
                entry, through = warming.entry, warming.begun
                parcel = f"{entry.rule_id} {entry.version} {through} {pieces}"
                self.name(Piece(entry.rule_id, entry.version, through, number, pieces, parcel, self.query))

    def name(self, piece: Piece) -> None:
        self.pieces.append(piece)
        self.change("*", WARM, piece.to_document(STREAM.name))

    def make_history(self, parcel: str, part: int) -> bytes:
        """Makes a piece of history, as a replay in which the version stands paused."""
        rule_id, version, through, pieces = parcel.split()
        document = next(
            json.loads(each.document or "")
            for each in self.changes
            if (each.rule_id, each.version) == (rule_id, int(version))
        )
        state, evaluator, last = new_state(), Evaluator(STREAM, part, int(pieces)), int(through)
        first = [RuleChange("insert", 0, rule_id, 1, "paused", json.dumps(document))]
        bound = [
            (row.arrival or 0, row.action, row.message)
            for row in self.log
            if row.rule_id == "*" and (row.arrival or 0) <= last
        ]
        edges = sorted({0, *(arrival for arrival, *_ in bound), last})
        for start, end in zip([0, *edges[:-1]], edges, strict=True):
            evaluator.process(state, self.batch(start, end, first))
            first = [
                RuleChange(
                    "insert", 1, "*", None, action, json.dumps({"time": message.removeprefix("to ")} if message else {})
                )
                for arrival, action, message in bound
                if arrival == end
            ]
            state.drop_old()
        evaluator.process(state, self.batch(last, last, first))
        return WindowHistory.of(state, compile_rule(document, STREAM)).encode()

    def take(self, output: Output) -> None:
        self.state.drop_old()
        assert not output.failures
        self.log += output.log
        self.alerts += map(plain, output.alerts)

    def replay(self) -> tuple[Output, ShardState]:
        """Judges all again by the schedule that the log gives."""
        last = len(self.rows) or None
        schedule = Schedule.from_log(self.changes, self.log, last, Declarations.of(STREAM))
        assert not schedule.unexplained
        assert Schedule.from_dict(json.loads(json.dumps(schedule.to_dict()))) == schedule
        state = new_state()
        schedule.begin(state, STREAM)
        bound = [(schedule.restore_decision(each), schedule.after(each.commit)) for each in self.changes]
        waiting = [WaitingChange(change, after) for change, after in bound if after is not None]
        batch = self.batch(0, len(self.rows), [change for change, after in bound if after is None])
        output, left = judge_batch(self.evaluator, state, batch, waiting)
        assert not left
        state.drop_old()
        return output, state

    def check(self) -> ShardState:
        """A replay gives the alerts and the log that the stream gave. Returns its state."""
        output, state = self.replay()
        assert sorted(map(plain, output.alerts), key=repr) == sorted(self.alerts, key=repr)
        assert sorted(map(astuple, output.log), key=repr) == sorted(map(astuple, self.log), key=repr)
        return state

    def rebuild(self) -> None:
        """Goes on as another evaluation, with state made anew."""
        self.evaluations += 1
        self.state = self.check()


_EVENTS = st.tuples(st.just("event"), st.sampled_from("xxyz"), st.sampled_from([0, 1, 1, 2, 7, 15]))
_CHANGES = st.tuples(
    st.just("change"), st.sampled_from("rs"), st.sampled_from(["active", "active", "active", "shadow", "paused", "retired", "draft"]),
    st.sampled_from(_DOCUMENTS),
)  # fmt: skip
_PIECES = st.tuples(st.just("piece"), st.sampled_from([1, 1, 2]))
_AGAIN = st.tuples(st.just("again"), st.integers(0, 3))
_COMMANDS = st.tuples(st.just("command"), st.sampled_from(["advance", "clear_state"]), st.integers(0, 60))
_ACTIONS = st.lists(
    st.one_of(_EVENTS, _EVENTS, _EVENTS, _CHANGES, _CHANGES, _PIECES, _PIECES, _PIECES, _AGAIN, _COMMANDS, st.just(("rebuild",))),
    min_size=5, max_size=40,
)  # fmt: skip


@given(_ACTIONS)
def test_c11_1_whatever_drivers_name_again_a_rebuild_gives_what_the_stream_gave(actions: list[tuple[Any, ...]]) -> None:
    stream = Evaluated()
    versions: dict[str, int] = {}
    stream.event("x", 1)
    for what, *given_ in actions:
        if what == "event":
            stream.event(*given_)
        elif what == "change":
            rule_id, status, document = given_
            versions[rule_id] = versions.get(rule_id, 0) + 1
            stream.change(rule_id, status, json.dumps({**document, "rule_id": rule_id}), versions[rule_id])
        elif what == "piece":
            stream.name_pieces(*given_)
        elif what == "again" and stream.pieces:
            stream.name(stream.pieces[-1 - given_[0] % len(stream.pieces)])
        elif what == "command":
            command, minutes = given_
            text = json.dumps(
                {"time": f"1970-01-01T{minutes // 60:02}:{minutes % 60:02}:00Z"} if command == "advance" else {}
            )
            stream.change("*", command, text)
        elif what == "rebuild":
            stream.rebuild()
    event("activated with history" if any("history" in row.message for row in stream.log) else "none was warmed")
    event(f"{min(2, stream.evaluations)} rebuilds")
    stream.check()
