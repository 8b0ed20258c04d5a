"""The driver makes each history once, names its pieces one after another, and goes on where it was killed (11.1)."""

from __future__ import annotations

import json
import os
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lookback.core.rules.coverage import Coverage
from lookback.core.rules.versions import Piece
from lookback.spark.checkpoints.checkpoint import Checkpoint
from lookback.spark.checkpoints.histories import Histories, Waiting, merge_waiting, name_part
from lookback.spark.checkpoints.plan import Plan
from lookback.spark.following import warmups
from lookback.spark.following.warmups import Request, WarmUps
from lookback.spark.replay.tasks import give_way
from payins import STREAM, rule

WAITING = Waiting("long", 2, begun=6, earliest=100)


@dataclass
class Rules:
    """The rules table, as far as the driver needs it."""

    pieces: list[Piece] = field(default_factory=list)
    fails: bool = False
    tables: Any = None

    def find_document(self, rule_id: str, version: int) -> dict[str, Any]:
        assert version == 2
        return {**rule(rule_id), "window": "30 days"}

    def publish_piece(self, stream: str, piece: Piece) -> None:
        if self.fails:
            raise OSError("no catalog")
        assert stream == STREAM.name
        self.pieces.append(piece)


class Historian:
    """Leaves two pieces for each of two shards, after as many failures as are asked for."""

    def __init__(self, failures: int = 0) -> None:
        self.requests: list[Request] = []
        self._failures = failures

    def __call__(self, tables: Any, stream: Any, request: Request) -> int:
        self.requests.append(request)
        if len(self.requests) <= self._failures:
            raise OSError("no such volume")
        for part in range(2 * request.shards):
            request.parcels.write(name_part(request.name, part), b"rows")
        return 2


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    monkeypatch.setattr(warmups, "_PAUSE_SECONDS", 0.0)
    made = Checkpoint(tmp_path / "checkpoint")
    made.write_plan(Plan(2, Coverage(), {}, {}, ""))
    return made


def start(checkpoint: Checkpoint, rules: Rules, historian: Historian) -> WarmUps:
    return WarmUps(cast(Any, SimpleNamespace(root=None)), STREAM, cast(Any, rules), checkpoint, historian)


def report(batch_id: int, *warming: Waiting) -> Any:
    return SimpleNamespace(batch_id=batch_id, warming=warming)


def follow(warm_ups: WarmUps, times: int = 4) -> None:
    """Lets the driver look so often, each time after what it began is done."""
    for _ in range(times):
        warm_ups.follow()
        for job in warm_ups._jobs.values():
            if job.thread is not None:
                job.thread.join()


def test_the_next_piece_is_named_when_the_stream_has_the_one_before(checkpoint: Checkpoint) -> None:
    rules, historian = Rules(), Historian()
    warm_ups = start(checkpoint, rules, historian)
    follow(warm_ups)
    assert not historian.requests
    warm_ups.note(report(1, WAITING))
    follow(warm_ups)
    (request,) = historian.requests
    assert (request.through, request.shards, request.earliest, request.rule.spec.rule_id) == (6, 2, 100, "long")
    assert [(piece.piece, piece.pieces, piece.through, piece.version) for piece in rules.pieces] == [(1, 2, 6, 2)]
    # The batches in between bring nothing of it.
    warm_ups.note(report(2, WAITING))
    follow(warm_ups)
    assert len(rules.pieces) == 1
    warm_ups.note(report(3, WAITING._replace(loaded=1)))
    follow(warm_ups)
    assert [piece.piece for piece in rules.pieces] == [1, 2]
    assert {piece.query for piece in rules.pieces} == {checkpoint.query_id}

    # In force: its files go once the batch that read them cannot be repeated any more.
    parcels = Histories.of(checkpoint.folder, "").parcels
    warm_ups.note(report(4))
    assert len(parcels.list()) == 5
    warm_ups.note(report(5))
    assert (parcels.list(), warm_ups.is_idle) == ([], True)

    # Those of a run that ended with that batch go with the next start.
    parcels.write("long-2-6.0", b"rows")
    start(checkpoint, rules, historian)
    assert parcels.list() == []


def test_a_driver_that_was_killed_goes_on_with_what_is_there(checkpoint: Checkpoint) -> None:
    rules, historian = Rules(), Historian()
    first = start(checkpoint, rules, historian)
    first.note(report(1, WAITING))
    follow(first)
    first.note(report(2, WAITING._replace(loaded=1)))
    again = start(checkpoint, rules, historian)
    assert not again.is_idle
    follow(again)
    assert ([piece.piece for piece in rules.pieces], len(historian.requests)) == ([1, 2], 1)
    # Before a run that does not wait, all that are left are named at once.
    rules.pieces.clear()
    (checkpoint.folder / "warming.json").write_text(json.dumps([list(WAITING)]))
    start(checkpoint, rules, historian).prepare()
    assert ([piece.piece for piece in rules.pieces], len(historian.requests)) == ([1, 2], 1)


def test_c11_1_a_history_gives_way_to_a_stream_that_goes_on_beside_it(checkpoint: Checkpoint) -> None:
    rules, historian = Rules(), Historian()
    beside = start(checkpoint, rules, historian)
    beside.note(report(1, WAITING))
    follow(beside)
    start(checkpoint, rules, historian).note(report(2, WAITING._replace(begun=9)))
    start(checkpoint, rules, historian).prepare()
    assert [request.is_beside for request in historian.requests] == [True, False]


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux alone")
def test_what_gives_way_leaves_the_priority_of_its_worker_as_it_was() -> None:
    def find_priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    own = find_priority()
    found = list(give_way(find_priority() for _ in range(3)))
    assert (found, find_priority()) == ([10] * 3, own)
    with pytest.raises(ZeroDivisionError):
        list(give_way(1 // number for number in (1, 0)))


def test_a_seam_that_moved_has_a_history_of_its_own(checkpoint: Checkpoint) -> None:
    rules, historian = Rules(), Historian()
    warm_ups = start(checkpoint, rules, historian)
    warm_ups.note(report(1, WAITING))
    follow(warm_ups)
    warm_ups.note(report(2, WAITING._replace(begun=9)))
    follow(warm_ups)
    assert [(piece.through, piece.piece) for piece in rules.pieces] == [(6, 1), (9, 1)]


@pytest.mark.parametrize(("failures", "pieces"), [(2, [(1, 2)]), (3, [(0, 0)]), (9, [(0, 0)])])
def test_after_three_failures_the_version_starts_cold(
    checkpoint: Checkpoint, failures: int, pieces: list[tuple[int, int]], caplog: pytest.LogCaptureFixture
) -> None:
    rules, historian = Rules(), Historian(failures)
    warm_ups = start(checkpoint, rules, historian)
    warm_ups.note(report(1, WAITING))
    follow(warm_ups, 12)
    assert [(piece.piece, piece.pieces) for piece in rules.pieces] == pieces
    assert rules.pieces[0].is_cold == (failures >= 3)
    assert len(historian.requests) == min(failures + 1, 3)
    assert "(attempt 2 of 3): no such volume" in caplog.text


def test_a_row_that_cannot_be_written_is_written_later(checkpoint: Checkpoint) -> None:
    rules = Rules(fails=True)
    warm_ups = start(checkpoint, rules, Historian())
    warm_ups.note(report(1, WAITING))
    follow(warm_ups)
    assert not rules.pieces
    rules.fails = False
    follow(warm_ups)
    assert len(rules.pieces) == 1


def test_shards_that_differ_are_waited_for() -> None:
    """A piece is there when the last shard has it."""
    reports = [{"warming": [["long", 2, 6, 1, 100, 3]]}, {"warming": [["long", 2, 6, 0, 100, 0]]}, {}]
    assert merge_waiting(reports) == (WAITING._replace(pieces=3),)


def test_a_version_that_goes_on_with_loaded_pieces_has_its_keys_divided_alike(checkpoint: Checkpoint) -> None:
    """11.1: a later version keeps C where the features are equal, and the pieces that are loaded."""
    rules, historian = Rules(), Historian()
    warm_ups = start(checkpoint, rules, historian)
    warm_ups.note(report(1, WAITING._replace(loaded=1, pieces=2)))
    follow(warm_ups)
    (request,) = historian.requests
    assert request.pieces == 2
    assert [(piece.piece, piece.pieces) for piece in rules.pieces] == [(2, 2)]
