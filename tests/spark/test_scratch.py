"""The folder of Spark's temporary files: nobody else reads it, and that of a killed process is removed at the next start."""

from __future__ import annotations

import signal
import stat
import subprocess
import sys
from pathlib import Path

from lookback.spark.platform.scratch import make_scratch


def start(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    """Starts a process that makes a folder and goes on."""
    code = (
        f"import sys; from pathlib import Path; sys.path[:] = {sys.path!r}\n"
        "from lookback.spark.platform.scratch import make_scratch\n"
        f"print(make_scratch(Path({str(parent)!r})), flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    parent = tmp_path / "lookback-ann"
    (killed, left), (running, kept) = start(parent), start(parent)
    (left / "blockmgr").mkdir()
    (left / "blockmgr/shuffle_0_0_0.data").write_text("card 4111")
    others = tmp_path / "lookback-ann/notes.txt"
    others.write_text("mine")
    try:
        assert left.is_dir()
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        made = make_scratch(parent)
        assert (left.exists(), kept.is_dir(), made.is_dir(), others.exists()) == (False, True, True, True)
    finally:
        for process in (killed, running):
            process.kill()
            process.communicate()
    assert {stat.S_IMODE(each.stat().st_mode) for each in (parent, made)} == {0o700}


def test_a_folder_of_somebody_else_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    parent = tmp_path / "lookback-ann"
    parent.symlink_to(tmp_path / "theirs")
    made = make_scratch(parent)
    assert tmp_path not in made.parents
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    made.rmdir()
    assert not any((tmp_path / "theirs").iterdir())
