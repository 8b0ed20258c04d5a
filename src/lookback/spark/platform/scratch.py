"""A folder for Spark's temporary files, which hold events: for this user alone, and removed after a process that was killed."""

from __future__ import annotations

import getpass
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_LOCK = "lock"
# The operating system frees the locks of these files when the process ends, however it does.
_held: list[int] = []


def make_scratch(parent: Path | None = None) -> Path:
    """Makes a folder that belongs to this process, and removes those of processes of this user that have ended.

    parent: the folder of these folders; default: one in the temporary folder, named by user.
    """
    parent = parent or Path(tempfile.gettempdir(), f"lookback-{getpass.getuser()}")
    try:
        import fcntl  # noqa: PLC0415 - Windows has none
    except ImportError:
        return Path(tempfile.mkdtemp(prefix="lookback-"))
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if parent.is_symlink() or parent.stat().st_uid != os.getuid():
            raise PermissionError(f"{parent} is of somebody else")
        parent.chmod(0o700)
        # One process at a time, so that none removes a folder that another has not locked yet.
        with (parent / _LOCK).open("a", encoding="utf-8") as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)
            for folder in parent.glob("run-*"):
                with suppress(BlockingIOError), (folder / _LOCK).open("a", encoding="utf-8") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            made = Path(tempfile.mkdtemp(prefix="run-", dir=parent))
            _held.append(os.open(made / _LOCK, os.O_CREAT | os.O_WRONLY, 0o600))
            fcntl.flock(_held[-1], fcntl.LOCK_EX)
        return made
    except OSError:
        # Files cannot be locked here, or the name is taken.
        return Path(tempfile.mkdtemp(prefix="lookback-"))
