"""Checkpoints that are torn, of another stream or of other settings: mended, or refused with the remedy. No Spark here."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from lookback.core.errors import SetupError
from lookback.core.rules.coverage import Coverage
from lookback.core.streams.declaration import Stream
from lookback.spark.checkpoints.checkpoint import Checkpoint
from lookback.spark.checkpoints.plan import Plan, snapshot_declaration
from lookback.spark.checkpoints.repair import repair
from lookback.spark.checkpoints.sparklogs import EVENTS, RULES, UnknownFormatError
from lookback.spark.stream.pipeline import Evaluation
from lookback.spark.tables.lakehouse import Tables
from payins import STREAM

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_COVERAGE = Coverage.of([(("customer",), None)], ["amount", "customer"])


def offsets(events: int) -> str:
    source = {"sourceVersion": 1, "reservoirId": "r", "index": -1, "isStartingVersion": False}
    lines = [json.dumps({**source, "reservoirVersion": version}) for version in (events, 2)]
    return "\n".join(["v1", json.dumps({"batchWatermarkMs": 0, "conf": {}}), *lines])


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """A checkpoint of three batches, the last of which has not ended."""
    checkpoint = Checkpoint(tmp_path / "evaluate_payins")
    checkpoint.write_plan(Plan(2, _COVERAGE, snapshot_declaration(STREAM), {EVENTS: 1}, ""))
    (checkpoint.folder / "metadata").write_text('{"id": "q"}')
    for kind, texts in {"offsets": [offsets(3), offsets(5), offsets(8)], "commits": ["v1\n{}", "v1\n{}"]}.items():
        (checkpoint.folder / kind).mkdir()
        for number, text in enumerate(texts):
            (checkpoint.folder / kind / str(number)).write_text(text)
            (checkpoint.folder / kind / f".{number}.crc").write_text("crc")
    return checkpoint


def names(checkpoint: Checkpoint) -> set[str]:
    return {f"{path.parent.name}/{path.name}" for path in checkpoint.folder.glob("*s/*")}


def test_c8_a_whole_checkpoint_is_left_as_it_is_and_tells_where_it_goes_on(checkpoint: Checkpoint) -> None:
    before = names(checkpoint)
    assert repair(checkpoint, STREAM, lambda mark: True) == []
    checkpoint.require_fit(STREAM, 2)
    assert names(checkpoint) == before
    assert checkpoint.read_last_judged() == 4
    assert checkpoint.find_next_commits() == {EVENTS: 5, RULES: 2}
    assert checkpoint.find_reread_commits() == {EVENTS: 3, RULES: 2}
    shutil.rmtree(checkpoint.folder / "commits")
    assert checkpoint.find_next_commits() == {EVENTS: 1, RULES: 0}


def test_the_order_of_events_is_that_of_the_checkpoint(checkpoint: Checkpoint) -> None:
    with pytest.raises(SetupError, match=r"order_by was \[\], now \['shop'\]"):
        checkpoint.require_fit(replace(STREAM, table="/lake/payins", order_by=("shop",)), 2)


@pytest.mark.parametrize("text", ["", "v1", "v1\n{", offsets(8)[:-3], offsets(8).rpartition("\n")[0], "\x00" * 80])
def test_c8_a_torn_plan_of_a_batch_that_wrote_nothing_is_removed(checkpoint: Checkpoint, text: str) -> None:
    file = checkpoint.folder / "offsets" / "2"
    file.write_text(text)
    done = [f"removed the torn file {file}: the batch had written nothing and is planned again"]
    assert repair(checkpoint, STREAM, lambda mark: mark != "q:2") == done
    assert {"offsets/2", "offsets/.2.crc"}.isdisjoint(names(checkpoint))
    assert repair(checkpoint, STREAM, lambda mark: True) == []


def with_ids(text: str) -> str:
    """An offset log as Spark 4.2 writes it where it names its sources."""
    version, metadata, *sources = text.splitlines()
    assert version == "v1"
    return "\n".join(["v2", metadata, *(f"{number}:{source}" for number, source in enumerate(sources))])


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("offsets/2", with_ids(offsets(8)), "has version v2"),
        ("offsets/1", with_ids(offsets(5)), "has version v2"),
        ("offsets/2", "v7", "has version v7"),
        ("offsets/2", with_ids(offsets(8)).replace("v2", "v1"), "names its sources"),
        ("offsets/2", offsets(8).replace("reservoirVersion", "version"), "has offsets without a table version"),
        ("offsets/2", f"{offsets(8)}\n-", "has 3 sources instead of 2"),
        ("commits/1", "v9\n{", "has version v9"),
    ],
)
def test_c8_a_log_of_an_unknown_form_is_not_torn_and_nothing_is_deleted(
    checkpoint: Checkpoint, name: str, text: str, what: str
) -> None:
    file = checkpoint.folder / name
    file.write_text(text)
    # What would be mended, were all forms known.
    (checkpoint.folder / "state/0/1").mkdir(parents=True)
    (checkpoint.folder / "state/0/1/9.changelog").write_text("")
    before = {path: path.stat().st_mtime_ns for path in checkpoint.folder.rglob("*")}
    with pytest.raises(
        UnknownFormatError, match=rf"^{file} {what}, a format that this release does not know: .*Nothing was repaired"
    ):
        repair(checkpoint, STREAM, lambda mark: False)
    assert {path: path.stat().st_mtime_ns for path in checkpoint.folder.rglob("*")} == before


def test_c8_an_unknown_form_says_nothing_of_what_is_judged(checkpoint: Checkpoint) -> None:
    (checkpoint.folder / "offsets/1").write_text(with_ids(offsets(5)))
    with pytest.raises(
        UnknownFormatError,
        match="has version v2, a format that this release does not know, so the last evaluated commit",
    ):
        checkpoint.read_last_judged()


def test_c8_a_torn_plan_of_a_batch_that_has_written_is_refused(checkpoint: Checkpoint) -> None:
    file = checkpoint.folder / "offsets" / "2"
    file.write_text("")
    with pytest.raises(SetupError, match=rf"^{file} is torn .*: lookback evaluate payins --rebuild$"):
        repair(checkpoint, STREAM, lambda mark: True)
    assert file.exists()


def test_c8_a_torn_mark_of_a_batch_that_has_ended_is_removed_so_that_it_is_run_again(checkpoint: Checkpoint) -> None:
    (checkpoint.folder / "offsets" / "2").unlink()
    file = checkpoint.folder / "commits" / "1"
    file.write_text("v1\n{")
    assert repair(checkpoint, STREAM, lambda mark: True) == [
        f"removed the torn file {file}: the batch runs again, but is written only once"
    ]
    assert {"commits/1", "commits/.1.crc"}.isdisjoint(names(checkpoint))
    assert checkpoint.find_next_commits()[EVENTS] == 3


def test_c8_state_of_a_batch_that_was_not_finished_is_removed_for_a_torn_file_would_outlive_its_repetition(
    checkpoint: Checkpoint,
) -> None:
    part = checkpoint.folder / "state/0/1"
    part.mkdir(parents=True)
    kept = {"1.changelog", "2.changelog", "2.zip", ".2.changelog.crc", "10.sst"}
    for name in {*kept, "3.changelog", ".3.changelog.crc", "10.zip"}:
        (part / name).write_text("")
    assert repair(checkpoint, STREAM, lambda mark: True) == [
        "removed 2 state files of an unfinished batch, which runs again"
    ]
    assert {file.name for file in part.iterdir()} == kept
    assert repair(checkpoint, STREAM, lambda mark: True) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("metadata", ""), ("metadata", '{"id": '), ("metadata", None), ("lookback.json", ""), ("lookback.json", "[]"),
        ("lookback.json", None), ("offsets/1", ""), ("offsets/1", None), ("commits/1", ""),
    ],
)  # fmt: skip
def test_c8_what_cannot_be_mended_is_refused_with_the_file_and_the_remedy(
    checkpoint: Checkpoint, name: str, text: str | None
) -> None:
    file = checkpoint.folder / name
    file.unlink() if text is None else file.write_text(text)
    what = "is missing" if text is None else "is torn or damaged"
    with pytest.raises(SetupError, match=rf"^{file} {what}.* lookback evaluate payins --rebuild$"):
        repair(checkpoint, STREAM, lambda mark: False)


def test_c8_a_first_start_that_was_cut_short_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "new")
    assert repair(checkpoint, STREAM, lambda mark: False) == []
    checkpoint.folder.mkdir()
    (checkpoint.folder / "metadata").write_text("")
    assert len(repair(checkpoint, STREAM, lambda mark: False)) == 1
    assert not (checkpoint.folder / "metadata").exists()


def changed(**changes: str | None) -> Stream:
    document = STREAM.to_dict()
    for name, type_ in changes.items():
        if type_ is None:
            del document["fields"][name]
        else:
            document["fields"][name] = type_
    return Stream.from_dict(document)


def test_c8_a_declaration_may_gain_fields_and_lose_those_that_no_rule_reads(checkpoint: Checkpoint) -> None:
    checkpoint.require_fit(changed(city="string", shop=None), None)
    checkpoint.require_fit(changed(shop="int"), None)


@pytest.mark.parametrize(
    ("stream", "shards", "problem"),
    [
        (changed(amount="decimal(20,2)"), None, r"field amount was decimal\(18,2\), now decimal\(20,2\)"),
        (changed(customer=None), None, "field customer, which rules read, is gone"),
        (Stream.from_dict({**STREAM.to_dict(), "stream": "other"}), None, "it is the checkpoint of stream 'payins'"),
        (Stream.from_dict({**STREAM.to_dict(), "event_id": "shop"}), None, "event_id was id, now shop"),
        (STREAM, 3, "has 2 shards, which cannot change to 3; leave the number out"),
    ],
)
def test_c8_a_checkpoint_of_another_declaration_or_number_of_shards_is_refused(
    checkpoint: Checkpoint, stream: Stream, shards: int | None, problem: str
) -> None:
    with pytest.raises(SetupError, match=rf"{problem}.* lookback evaluate {stream.name} --rebuild"):
        checkpoint.require_fit(stream, shards)


@pytest.mark.parametrize("now", ["4.1.0", "4.1.7", "4.2.0", "4.10.1", "5.0.0"])
def test_c8_a_checkpoint_is_gone_on_with_by_the_same_or_a_newer_spark(checkpoint: Checkpoint, now: str) -> None:
    plan = checkpoint.read_plan()
    assert plan is not None
    checkpoint.require_spark(now, STREAM.name)
    checkpoint.write_plan(replace(plan, spark="4.1.2"))
    checkpoint.require_spark(now, STREAM.name)


@pytest.mark.parametrize(("before", "now"), [("4.2.0", "4.1.9"), ("4.10.0", "4.9.0"), ("5.0.0", "4.2.0")])
def test_c8_a_checkpoint_of_a_newer_spark_is_refused(checkpoint: Checkpoint, before: str, now: str) -> None:
    plan = checkpoint.read_plan()
    assert plan is not None
    checkpoint.write_plan(replace(plan, spark=before))
    words = rf"{checkpoint.folder} was last written by Spark {before}, but this is Spark {now}: .*payins --rebuild$"
    with pytest.raises(SetupError, match=words):
        checkpoint.require_spark(now, STREAM.name)
    # Nothing is in a checkpoint before its first batch, so any Spark may begin it.
    shutil.rmtree(checkpoint.folder / "offsets")
    shutil.rmtree(checkpoint.folder / "commits")
    checkpoint.require_spark(now, STREAM.name)


def test_c3_1_a_plan_keeps_its_settings_and_a_batch_that_was_begun_is_found(checkpoint: Checkpoint) -> None:
    plan = Plan(
        2, _COVERAGE, snapshot_declaration(STREAM), {}, "", settings=((None, "{}"), (7, '{"max_future": "1 hour"}'))
    )
    checkpoint.write_plan(plan)
    assert checkpoint.read_plan() == plan
    planned = sorted(int(file.name) for file in (checkpoint.folder / "offsets").iterdir() if file.name.isdigit())
    finished = sorted(int(file.name) for file in (checkpoint.folder / "commits").iterdir() if file.name.isdigit())
    for number in finished:
        if number == planned[-1]:
            (checkpoint.folder / "commits" / str(number)).unlink()
    assert checkpoint.find_unfinished() is not None
    (checkpoint.folder / "commits" / str(planned[-1])).write_text("v1\n{}")
    assert checkpoint.find_unfinished() is None


def test_c8_a_checkpoint_is_moved_aside_and_never_over_another(checkpoint: Checkpoint) -> None:
    folder = checkpoint.folder
    moved = []
    for _ in range(3):
        moved.append(checkpoint.move_aside())
        folder.mkdir()
    folder.rmdir()
    assert checkpoint.move_aside() is None
    assert len(set(moved)) == 3
    assert all(path is not None and path.exists() and path.name.startswith("evaluate_payins.2") for path in moved)


def test_c8_a_relative_folder_is_that_of_the_driver_on_every_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spark = SimpleNamespace(conf=SimpleNamespace(get=lambda *_: "a session of its own"))
    tables = Tables(cast("SparkSession", spark), root="/lake")
    assert Evaluation(tables, STREAM, {}, "cp").checkpoint.folder == tmp_path / "cp"
    assert Evaluation(tables, STREAM, {}, "/Volumes/a/b").checkpoint.folder == Path("/Volumes/a/b")


_Read = Callable[[Checkpoint], object]


@pytest.mark.parametrize("read", [Checkpoint.read_last_judged, Checkpoint.find_next_commits])
def test_c8_what_is_asked_of_a_torn_checkpoint_is_refused_in_words(checkpoint: Checkpoint, read: _Read) -> None:
    (checkpoint.folder / "offsets" / "1").write_text("v1")
    with pytest.raises(SetupError, match=r"offsets/1 is torn or missing .*evaluate --rebuild"):
        read(checkpoint)


def test_c10_8_a_gate_holds_from_the_first_commit_of_the_rules_that_no_batch_has_been_planned_to_read(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """The third batch has not ended and is repeated; it has read the rules before commit 2."""

    def start(asked: str) -> dict[int, str]:
        plan = checkpoint.read_plan()
        assert plan is not None
        checkpoint.write_plan(replace(plan, gates=checkpoint.plan_gates(asked)))
        return dict(checkpoint.read_plan().gates)  # type: ignore[union-attr]

    assert Checkpoint(tmp_path / "new").plan_gates("evidence") == {0: "evidence"}
    assert Checkpoint(tmp_path / "new").plan_gates("") == {}
    assert start("") == {}
    assert start("approval") == start("approval") == {2: "approval"}
    (checkpoint.folder / "offsets" / "3").write_text(
        offsets(9).replace('"reservoirVersion": 2', '"reservoirVersion": 7')
    )
    # What was planned under the gate is decided under it, also after the gate was taken back.
    assert start("") == {2: "approval", 7: ""}
    assert start("evidence") == {7: "evidence"}
