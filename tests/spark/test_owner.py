"""One process at a time on a folder; no Spark is needed here."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lookback.core.errors import SetupError
from lookback.spark.checkpoints.checkpoint import Checkpoint
from lookback.spark.platform import owner
from lookback.spark.platform.owner import become_owner
from lookback.spark.tables.locks import lock_notifier

_HOLD = """
import sys, time
from pathlib import Path
from lookback.spark.platform.owner import become_owner
with become_owner(Path(sys.argv[1]), "checkpoint c"):
    print("held", flush=True)
    time.sleep(60)
"""


def elsewhere(file: Path, beat: int) -> None:
    file.write_text(json.dumps({"host": "far", "pid": 7, "user": "ann", "since": "2026-01-01T00:00:00Z", "beat": beat}))


def test_c8_the_second_is_told_the_first_and_follows_it_at_once_when_it_was_killed(tmp_path: Path) -> None:
    file = tmp_path / "a" / ".c.owner"
    process = subprocess.Popen([sys.executable, "-c", _HOLD, str(file)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with (
            pytest.raises(SetupError, match=rf"checkpoint c is in use by process {process.pid} of \w+ on .+, since 20"),
            become_owner(file, "checkpoint c"),
        ):
            pass
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    started = time.monotonic()
    with become_owner(file, "checkpoint c", 0.01) as check:
        assert time.monotonic() - started < 1
        # In the same process, too.
        with pytest.raises(SetupError, match=f"process {os.getpid()} "), become_owner(file, "checkpoint c"):
            pass
        check()
    assert file.read_text() == ""
    with become_owner(file, "checkpoint c"):
        pass


@pytest.mark.parametrize("locks", [True, False])
def test_c8_an_owner_on_another_machine_is_told_by_its_beat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool
) -> None:
    if not locks:
        monkeypatch.setattr(owner, "_lock", lambda file, opened: None)
    file = tmp_path / ".c.owner"
    elsewhere(file, 1)
    sleep = time.sleep

    def beat(seconds: float) -> None:
        elsewhere(file, 2)
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", beat)
    with pytest.raises(SetupError, match="in use by process 7 of ann on far"), become_owner(file, "checkpoint c", 0.05):
        pass
    monkeypatch.setattr(time, "sleep", sleep)
    # It does not beat any more.
    with become_owner(file, "checkpoint c", 0.02) as check:
        check()
        elsewhere(file, 9)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                check()
            except SetupError as error:
                assert "process 7 of ann on far" in str(error)  # noqa: PT017 - it comes after some time
                break
            sleep(0.01)
        else:
            pytest.fail("the owner did not find that it is none any more")
    # What another owns is not emptied.
    assert '"far"' in file.read_text()


def test_c8_a_file_that_names_nobody_is_nobodys(tmp_path: Path) -> None:
    file = tmp_path / ".c.owner"
    file.write_text('{"host": "half')
    with become_owner(file, "checkpoint c"):
        assert json.loads(file.read_text())["pid"] == os.getpid()


def test_c8_an_owner_that_has_emptied_its_file_and_still_holds_the_lock_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / ".c.owner"
    with file.open("a+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        freeing = threading.Timer(0.2, fcntl.flock, (held, fcntl.LOCK_UN))
        freeing.start()
        with become_owner(file, "checkpoint c"):
            assert json.loads(file.read_text())["pid"] == os.getpid()
        freeing.join()
        # Some other program may hold the lock: not for ever.
        monkeypatch.setattr(owner, "_MAX_NAMELESS_SECONDS", 0.05)
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(SetupError, match="in use by another process"), become_owner(file, "checkpoint c"):
            pass


def test_a_second_notifier_of_one_of_the_streams_is_refused_where_there_is_a_folder(tmp_path: Path) -> None:
    with lock_notifier(str(tmp_path), ["b", "a"]) as check:
        check()
        said = f"the notifier of stream 'a' is in use by process {os.getpid()} of"
        with pytest.raises(SetupError, match=said), lock_notifier(str(tmp_path), ["c", "a"]):
            pass
        with lock_notifier(f"file://{tmp_path}", ["c"]), lock_notifier("s3://there", ["a"]):
            pass
    with lock_notifier(str(tmp_path), ["a"]):
        pass


def test_a_full_disk_stops_a_start_with_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", "x.owner")

    monkeypatch.setattr(Path, "write_text", write)
    with pytest.raises(OSError, match="No space left"), become_owner(tmp_path / "x.owner", "checkpoint x"):
        pass


def test_a_checkpoint_has_one_owner_by_whatever_link_it_is_reached(tmp_path: Path) -> None:
    (tmp_path / "there/evaluate_x").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "there/evaluate_x")
    (tmp_path / "folder").symlink_to(tmp_path / "there")
    folders = (tmp_path / "there/evaluate_x", tmp_path / "link", tmp_path / "folder/evaluate_x")
    assert {Checkpoint(folder).owner_file for folder in folders} == {tmp_path / "there/.evaluate_x.owner"}
