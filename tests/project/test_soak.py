"""The soak run's own parts: what it feeds repeats, what it sees is so, what it kills is dead, what it tears can be mended."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dev.soak.__main__ import parser
from dev.soak.killing import OUTPUTS, Moment, Place, Torn, kill_session, tear
from dev.soak.scenario import LISTED, RULES, STREAM, Feed, is_usable, make_next_version, make_wide_rule
from dev.soak.tally import Tally
from dev.soak.verdict import find_differences, list_warming
from lookback.core.engine.warming import find_reason_cold
from lookback.core.rules.compiling import compile_rule
from lookback.spark.checkpoints.histories import Waiting


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A checkpoint with two batches planned, one finished, and a commit of each output by the second."""
    found = Place(tmp_path)
    for part in ("offsets", "commits", "state/0/0", "state/0/1"):
        (found.checkpoint / part).mkdir(parents=True)
    read = {"reservoirVersion": 3}
    for number in (0, 1):
        (found.checkpoint / "offsets" / str(number)).write_text(f"v1\n{{}}\n{json.dumps(read)}\n-")
    (found.checkpoint / "commits/0").write_text("v1\n{}")
    for part in (0, 1):
        (found.checkpoint / f"state/0/{part}/1.changelog").write_bytes(bytes(100))
    for table in (STREAM.name, *OUTPUTS):
        log = found.root / table / "_delta_log"
        log.mkdir(parents=True)
        for version in range(8):
            (log / f"{version:020}.json").write_text(json.dumps({"commitInfo": {"userMetadata": f"query:{version}"}}))
    return found


def test_the_same_seed_feeds_the_same() -> None:
    lines = Feed(random.Random(3)).make_lines(2_000)
    assert lines == Feed(random.Random(3)).make_lines(2_000)
    ids = [json.loads(line)["id"] for line in lines if is_usable(line)]
    assert 20 < len(ids) - len(set(ids)) < 80, "duplicates"
    assert 5 < sum(not is_usable(line) for line in lines) < 60, "broken lines"
    assert sum("2099" in line for line in lines) > 2, "events of the far future"


def test_rules_and_all_that_becomes_of_them_are_valid() -> None:
    chance = random.Random(5)
    for document in (*RULES, LISTED):
        for _ in range(20):
            compile_rule(document, STREAM)
            document = make_next_version(document, chance)  # noqa: PLW2901 - one version after another
    wide = [compile_rule(make_wide_rule(chance), STREAM) for _ in range(200)]
    assert all(find_reason_cold(rule) is None for rule in wide)
    assert len({name for rule in wide for name in rule.needs}) > 10, "keys and windows vary"


def test_how_far_a_warm_up_is_is_told_by_the_files(place: Place) -> None:
    assert place.describe_warm_up() == ""
    assert list_warming(place.checkpoint) == []
    waiting, histories = place.checkpoint / "warming.json", place.checkpoint / "lookback-histories"
    waiting.write_text(json.dumps([Waiting("wide-1", 3, 7)]))
    assert list_warming(place.checkpoint) == [list(Waiting("wide-1", 3, 7))]
    assert place.describe_warm_up() == "begun"
    histories.mkdir()
    # A file for another version does not count; a draft for this one does.
    (histories / "wide-1-2-7.ready").write_text("1")
    assert place.describe_warm_up() == "begun"
    (histories / ".wide-1-3-7.0.99").write_text("")
    assert place.describe_warm_up() == "history half made"
    (histories / "wide-1-3-7.ready").write_text("1")
    assert place.describe_warm_up() == "history made, not in force"
    waiting.write_text("[]")
    assert place.describe_warm_up() == ""


def test_what_a_kill_left_is_told_by_the_files(place: Place) -> None:
    assert place.count_waiting() == 7 - 2
    assert place.describe_kill() == "in a batch"
    newest = place.root / "alerts/_delta_log" / f"{8:020}.json"
    newest.write_text(json.dumps({"commitInfo": {"userMetadata": "query:1"}}))
    assert place.describe_kill() == "after output, before the batch's commit"
    (place.checkpoint / "commits/1").write_text("v1\n{}")
    assert place.describe_kill() == "between batches"


def test_a_moment_is_met_by_a_new_name_and_by_the_end_of_the_process(place: Place) -> None:
    seen = iter([{"a"}, {"a"}, {"b"}, {"b", "c"}])
    chance = random.Random(1)
    assert Moment("new", lambda: next(seen), 0).wait(chance, lambda: False, 10)
    assert next(seen) == {"b", "c"}
    assert not Moment("never", place.list_planned, 0).wait(chance, lambda: True, 10)
    assert not Moment("never", place.list_planned, 0).wait(chance, lambda: False, 0.01)


def test_the_newest_file_of_a_kind_is_torn_and_can_be_mended(place: Place) -> None:
    newest = place.checkpoint / "state/0/1/1.changelog"
    os.utime(newest, (time.time() + 9, time.time() + 9))
    torn = {each.kind: each for seed in range(30) if (each := _torn_and_mended(place, seed)) is not None}
    assert torn.keys() == {"offsets", "commits", "changelog"}
    assert torn["changelog"].file == newest
    assert torn["offsets"].file.name in ("0", "1")


def _torn_and_mended(place: Place, seed: int) -> Torn | None:
    torn = tear(place, random.Random(seed))
    if torn is not None:
        assert torn.file.stat().st_size == torn.left < len(torn.content)
        torn.restore()
        assert torn.file.read_bytes() == torn.content
    return torn


def test_a_process_is_ended_with_those_of_its_session() -> None:
    code = "import os, subprocess, sys; p = subprocess.Popen(['sleep', '60'], preexec_fn=os.setpgrp); print(p.pid, flush=True); p.wait()"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    kill_session(process)
    process.stdout.close()
    deadline = time.monotonic() + 10
    while _runs(child):
        assert time.monotonic() < deadline, "the child outlived its session"
        time.sleep(0.01)


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_one_side_having_a_row_more_is_a_difference() -> None:
    assert find_differences([1, 1, 2], [2, 1]) == ["only in the table: 1"]
    assert find_differences([1], [1, 3]) == ["only in the replay: 3"]


def test_a_run_fails_by_a_difference_by_no_comparison_and_by_a_process_that_ended() -> None:
    fine = {"alerts": 5, "differences": {"alerts": 0}}
    for verdict, ended, failed in (
        (fine, False, False),
        ({"alerts": 5, "differences": {"alerts": 1}}, False, True),
        ({"error": "exit code 1"}, False, True),
        (fine, True, True),
    ):
        tally = Tally(1)
        tally.add("kills", "evaluation, in a batch", 3)
        if ended:
            tally.add("ended by itself", "evaluate")
        tally.close(verdict)
        assert tally.has_failed is failed
        assert tally.kills == 3
        assert "kills: 3" in str(tally)


def test_two_hundred_kills_are_the_default() -> None:
    assert parser().parse_args([]).kills == 200
