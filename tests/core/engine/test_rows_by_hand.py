"""No row that a person can write into the rules table stops a stream, or says what only the engine may say."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from typing import Any

import pytest

from lookback.core.engine.batch import Batch
from lookback.core.engine.evaluation import Evaluator
from lookback.core.engine.output import Output
from lookback.core.engine.schedule import Schedule
from lookback.core.errors import StoreFailed
from lookback.core.rules.changes import RuleChange
from lookback.core.rules.commands import LISTS
from lookback.core.rules.quarantine import AUTHOR
from lookback.core.rules.rulebook import RuleBook
from lookback.core.rules.rulelog import LogRow
from lookback.core.rules.versions import WARM, Piece
from lookback.core.state.shard import ShardState
from lookback.core.streams.arrival import find_marks
from lookback.core.streams.declaration import Stream
from lookback.core.streams.declarations import Declarations
from lookback.core.streams.eventrows import read_events
from lookback.core.streams.events import empty_events
from lookback.core.values.listchanges import ListChange
from lookback.core.values.lists import KnownLists, Lists

STREAM = Stream.from_dict(
    {
        "stream": "pay", "event_id": "id", "event_time": "at",
        "fields": {"id": "string", "at": "timestamp", "card": "string"},
    }
)  # fmt: skip
STREAMS = {STREAM.name: STREAM}
RULE = {
    "rule_id": "listed", "stream": "pay", "group_by": ["card"], "window": "1 minute", "where": "in_list(card, 'l')",
    "measures": {"n": "count(*)"}, "when": "n >= 1", "warm_start": False,
}  # fmt: skip
LONG = {**RULE, "rule_id": "long", "where": "card = 'x'", "window": "60 minutes", "warm_start": True}
LISTED = Lists.empty().apply([ListChange("insert", 3, "l", "x")])
_MINUTE = 60_000_000
_HUGE = 2**63 - 1
_PIECE = Piece("long", 2, 3, 1, 1, "long-2-3", "q")

STATUSES = [
    "draft", "shadow", "active", "paused", "retired", "quarantined", "clear_state", "advance", LISTS, WARM, "warming",
    "rejected", "declared", "list", "Lists", " lists", "lists ", "", None, "a\0b", "x" * 51,
]  # fmt: skip
VERSIONS = [None, 0, 1, 2, 7, -1, -(2**63), _HUGE, _HUGE - 1, 1_000_000]
DOCUMENTS = [
    None, "", " ", "null", "true", "1", '"pay"', "[]", "{}", "{", "no json", "\0", "[" * 10_000, '{"a":' * 10_000,
    "x" * 300_000, '{"stream":"pay"}', '{"stream":null}', '{"stream":["pay"]}', '{"stream":"other","commit":1}',
    *(json.dumps({"stream": "pay", "commit": commit, "message": commit}) for commit in (
        1_000_000, -1, 0, 1, 2, 4, True, None, 1.0, 1e300, "3", [3], {"a": 3}, _HUGE, _HUGE - 1, 10**30)),
    '{"stream":"pay","commit":1e999}', '{"stream":"pay","commit":NaN}', '{"stream":"pay","commit":4,"commit":5}',
    '{"stream":"pay","time":"9999-99-99"}', '{"stream":"pay","time":{"a":1}}', '{"stream":"pay","time":NaN}',
    *(_PIECE.to_document("pay").replace(before, after) for before, after in (
        ("", ""), ('"piece": 1', '"piece": 2'), ('"pieces": 1', '"pieces": 0'), ('"pieces": 1', '"pieces": 9'),
        ("long-2-3", "../../x"), ("long-2-3", ""), ("long-2-3", "long-2-4"), ('"through": 3', '"through": 1e999'),
        ('"version": 2', '"version": "2"'), ('"version": 2', '"version": null'), ('"q"', '"another"'), ('"q"', "[]"),
        ('"rule_id": "long"', '"rule_id": {}'), ('"piece": 1', '"piece": -1'), ('"through": 3', f'"through": {10**30}'))),
    *(json.dumps({**RULE, **more}) for more in (
        {}, {"rule_id": "a\0b"}, {"rule_id": None}, {"rule_id": "*"}, {"when": "n >= 1e999"}, {"window": None},
        {"measures": {"n": "count(" * 500}}, {"when": "(" * 5_000}, {"extra": [[[]]]})),
]  # fmt: skip
EVIDENCE = [
    None,
    "",
    "{",
    "null",
    "[" * 10_000,
    '{"quarantined": true}',
    '{"quarantined": 1e999}',
    '{"quarantined": [1]}',
]


class Place:
    """A shard with the files that the driver of its stream has left: the lists after commit 3, and no history."""

    def __init__(self) -> None:
        self.state = ShardState(RuleBook(STREAM, STREAMS))
        self.evaluator = Evaluator(
            STREAM, lists=_Files({3: LISTED, 5: LISTED}), warms=True, read_parcel=_read_parcel, query="q",
            knows_piece=lambda _: False,
        )  # fmt: skip
        self.log: list[LogRow] = []
        self.alerts: list[str] = []
        self._minute, self._commit = 0, 0

    def obey(self, *rows: RuleChange) -> list[RuleChange]:
        """Lets the shard read rows, each as a commit of its own. Returns them as the feed gives them."""
        numbered = [replace(row, commit=self._commit + at) for at, row in enumerate(rows, 1)]
        self._commit += len(rows)
        self._take(self.evaluator.process(self.state, Batch(empty_events(STREAM, ()), changes=numbered)))
        return numbered

    def event(self, card: str = "x") -> None:
        self._minute += 1
        row = {"id": f"e{self._minute}", "at": self._minute * _MINUTE, "card": card, "arrival": self._minute}
        events, _ = read_events([row], STREAM, 1)
        self._take(self.evaluator.process(self.state, Batch(events, marks=find_marks(events, events.commits))))

    def _take(self, output: Output) -> None:
        assert not output.failures
        self.log += output.log
        self.alerts += [alert.rule_id for alert in output.alerts]


class _Files(KnownLists):
    def read(self, commit: int | None, names: frozenset[str] | None) -> Lists:
        if commit is not None and not self.knows(commit):
            raise StoreFailed(f"the lists of commit {commit} are not there")
        return super().read(commit, names)


def obey(book: RuleBook, change: RuleChange, arrival: int | None) -> list[LogRow]:
    """Applies a logged change and returns its log rows; the last piece of a history brings its version into force."""
    log, commands = book.apply([change], arrival)
    for command in commands:
        if command.piece is not None and command.warms:
            log.append(book.finish_warming(command.piece, arrival, command.rules_commit)[0])
    return log


def _read_parcel(name: str, part: int) -> bytes:
    raise StoreFailed(f"{name}.{part} is not there")


def _row(rule_id: str | None, version: int | None, status: str | None, document: Any, **more: Any) -> RuleChange:
    text = document if document is None or isinstance(document, str) else json.dumps(document)
    return RuleChange("insert", 0, rule_id, version, status, text, **more)


def _announce(commit: int) -> RuleChange:
    return _row("*", commit, LISTS, {"stream": "pay", "commit": commit}, author=AUTHOR)


def _make_rows() -> list[RuleChange]:
    chosen = random.Random(43)
    rows = []
    for rule_id, status, document in itertools.product(("*", "listed", None, "A b", "long"), STATUSES, DOCUMENTS):
        if rule_id != "*" and chosen.random() > 0.05:
            continue
        author, evidence = chosen.choice([None, "m", AUTHOR, "\0"]), chosen.choice(EVIDENCE)
        rows.append(_row(rule_id, chosen.choice(VERSIONS), status, document, author=author, evidence=evidence))
    chosen.shuffle(rows)
    return rows


def test_no_generated_row_stops_a_shard_and_a_rule_published_afterwards_alerts() -> None:
    place, rows = Place(), _make_rows()
    assert len(rows) > 1_500
    place.obey(_announce(3), _row("long", 1, "active", {**LONG, "window": "1 minute"}))
    place.event()
    for at in range(0, len(rows), 100):
        place.obey(*rows[at : at + 100])
        place.event()
    place.alerts.clear()
    place.obey(_announce(5), _row("after", 1, "active", {**RULE, "rule_id": "after"}))
    place.event()
    place.event("y")
    assert place.alerts.count("after") == 1
    assert [row.version for row in place.log if row.action == "list"] == [3, 5]
    assert all(row.message for row in place.log if row.action == "rejected")


@pytest.mark.parametrize("author", ["m", AUTHOR, None])
def test_a_commit_of_lists_that_the_stream_has_not_announced_is_rejected_and_the_next_one_is_obeyed(
    author: str | None,
) -> None:
    place = Place()
    place.obey(_announce(3), _row("listed", 1, "active", RULE))
    place.obey(_row("*", None, LISTS, '{"stream":"pay","commit":1000000}', author=author))
    place.event()
    (rejected,) = [row for row in place.log if row.action == "rejected"]
    assert rejected.rule_id == "*"
    assert "the stream writes such rows itself" in rejected.message
    place.obey(_announce(5))
    assert place.state.lists_commit == 5
    assert place.alerts == ["listed"]


def test_a_piece_of_history_that_the_driver_has_not_left_is_rejected_and_the_version_goes_on_warming() -> None:
    place = Place()
    place.obey(_row("long", 1, "active", {**LONG, "window": "1 minute"}))
    for _ in range(3):
        place.event()
    place.obey(_row("long", 2, "active", LONG))
    assert place.state.book.warming.has_rule("long")
    for author in ("m", AUTHOR):
        place.obey(_row("*", None, WARM, _PIECE.to_document("pay"), author=author))
    cold = replace(_PIECE, piece=0, pieces=0, parcel="")
    place.obey(_row("*", None, WARM, cold.to_document("pay"), author=AUTHOR))
    assert place.state.book.warming.has_rule("long")
    assert [row.action for row in place.log if row.rule_id == "*"] == ["rejected"] * 3
    place.event()
    assert place.alerts == ["long"] * 4


def test_a_rebuild_rejects_what_was_rejected_also_where_the_commit_exists_by_then() -> None:
    """A person names commit 5 before the table of lists has it; later the stream announces it."""
    place = Place()
    early = _row("*", 5, LISTS, {"stream": "pay", "commit": 5}, author=AUTHOR)
    place.evaluator = replace(place.evaluator, lists=_Files({3: LISTED}))
    changes = place.obey(_announce(3), _row("listed", 1, "active", RULE), early)
    place.event()
    changes += place.obey(_row("listed", 2, "active", RULE))
    place.event()
    place.evaluator = replace(place.evaluator, lists=_Files({3: LISTED, 5: LISTED}))
    changes += place.obey(_announce(5))
    schedule = Schedule.from_log(changes, place.log, 2, Declarations.of(STREAM))
    assert schedule.arrivals == {1: None, 2: None, 3: None, 4: 1, 5: 2}
    assert not schedule.unexplained
    book = RuleBook(STREAM, STREAMS)
    again = [
        (row.action, row.version) for each in map(schedule.restore_decision, changes) for row in obey(book, each, 0)
    ]
    assert again == [(row.action, row.version) for row in place.log]


def test_a_schedule_reads_whatever_rows_the_table_has() -> None:
    """As a rebuild, a proof and a backtest do."""
    rows = [replace(row, commit=at) for at, row in enumerate(_make_rows())]
    first = RuleBook(STREAM, STREAMS)
    log = [row for change in rows for row in obey(first, replace(change, warms=False), 1)]
    assert not Schedule.from_log(rows, log, 9, Declarations.of(STREAM)).unexplained
