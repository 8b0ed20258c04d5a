"""A folder for Spark's temporary files, which contain events: private, and removed even if the process is killed."""

from __future__ import annotations

import getpass
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_LOCK = "lock"
# The operating system releases the locks of these files when the process ends, even if it is killed.
_held: list[int] = []


def make_scratch(parent: Path | None = None) -> Path:
    """Creates a folder for this process, and removes those of this user's ended processes.

    `parent` contains these folders. By default it is in the temporary folder, named after the user.
    """
    parent = parent or Path(tempfile.gettempdir(), f"lookback-{getpass.getuser()}")
    try:
        import fcntl  # noqa: PLC0415 - Windows has none
    except ImportError:
        return Path(tempfile.mkdtemp(prefix="lookback-"))
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if parent.is_symlink() or parent.stat().st_uid != os.getuid():
            raise PermissionError(f"{parent} belongs to another user")
        parent.chmod(0o700)
        # One process at a time, so that no process removes a folder that another one has not locked yet.
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
        # Files cannot be locked here, or the name is taken by another user.
        return Path(tempfile.mkdtemp(prefix="lookback-"))
