"""Lets one process at a time own a file, and tells other processes who the owner is."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from lookback.core.errors import SetupError
from lookback.places import ObjectPath

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lookback.places import Place

# The time between two heartbeats of an owner, and how many beats to watch an owner that holds no lock here.
BEAT_SECONDS = 5.0
_WATCHED_BEATS = 3
# An owner writes its name after it locks the file, and clears it before it unlocks. Either takes less than this.
_MAX_NAMELESS_SECONDS = 2.0


@dataclass(frozen=True)
class Owner:
    """A process that owns something since a time. `beat` counts up while the process lives."""

    host: str
    pid: int
    user: str
    since: str
    beat: int = 0

    @classmethod
    def this_process(cls) -> Owner:
        """Returns this process as an owner, starting now."""
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return cls(socket.gethostname(), os.getpid(), getpass.getuser(), since)

    def is_same(self, other: Owner) -> bool:
        """Returns whether both are the same process with the same start of ownership, regardless of the beat."""
        return (self.host, self.pid, self.since) == (other.host, other.pid, other.since)

    def __str__(self) -> str:
        return f"process {self.pid} of {self.user} on {self.host}, since {self.since}"


@contextlib.contextmanager
def become_owner(file: Place, what: str, beat_seconds: float = BEAT_SECONDS) -> Iterator[Callable[[], None]]:
    """Makes this process the owner of something until the end of the block.

    If the operating system can lock files, it releases the lock of a dead process, so that another process can take
    over from a killed owner at once. Without locks, as in an object store, and if the owner is on another machine, its
    heartbeat decides, which takes some seconds to watch. There, two processes that start at the same moment may both
    begin; the first soon finds that it has lost ownership.

    Args:
        file: The file that names the owner.
        what: The thing that is owned, such as "checkpoint X", for messages.
        beat_seconds: The time between two heartbeats.

    Yields:
        A check to call regularly. It raises SetupError if ownership was lost.

    Raises:
        SetupError: If there is another owner; the message names it.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as opened:
        locked, known = _claim(file, opened)
        if locked is False or (known is not None and not _has_ended(file, known, locked, beat_seconds)):
            raise _make_refusal(what, known, file)
        heartbeat = _Heartbeat(file, what, Owner.this_process(), beat_seconds)
        heartbeat.start()
        try:
            yield heartbeat.check
        finally:
            heartbeat.stop()
            # Clear the file instead of removing it: another process may have opened it already.
            if heartbeat.is_owner():
                file.write_text("")


def _claim(file: Place, opened: contextlib.ExitStack) -> tuple[bool | None, Owner | None]:
    """Tries to lock the file (see `_lock`). Returns whether that worked, and the owner that the file names.

    Retries if a locked file names no owner, because that process is just starting or about to unlock the file.
    """
    deadline = time.monotonic() + _MAX_NAMELESS_SECONDS
    while True:
        locked, known = _lock(file, opened), _read(file)
        if locked is not False or known is not None or time.monotonic() >= deadline:
            return locked, known
        time.sleep(0.01)


def _lock(file: Place, opened: contextlib.ExitStack) -> bool | None:
    """Tries to lock the file until `opened` is left. Returns whether that worked; None if files cannot be locked."""
    if isinstance(file, ObjectPath):
        return None
    try:
        import fcntl  # noqa: PLC0415 - Windows has none
    except ImportError:
        return None
    with contextlib.ExitStack() as tried:
        try:
            fcntl.flock(tried.enter_context(file.open("a+", encoding="utf-8")), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return None
        opened.push(tried.pop_all())
    return True


def _has_ended(file: Place, known: Owner, locked: bool | None, beat_seconds: float) -> bool:
    """Returns whether the owner that a file names is gone."""
    if locked and known.host == socket.gethostname():
        return True
    # Locks may not work across machines that share a folder, but the heartbeat does. Clocks are not compared.
    deadline = time.monotonic() + _WATCHED_BEATS * beat_seconds
    while time.monotonic() < deadline:
        time.sleep(min(beat_seconds / 5, 0.5))
        now = _read(file)
        # None if the file is just being written.
        if now is not None and now != known:
            return False
    return True


def _make_refusal(what: str, owner: Owner | None, file: Place) -> SetupError:
    who = "another process" if owner is None else str(owner)
    return SetupError(f"{what} is in use by {who}; one at a time. Stop that one first ({file} names it).")


def _read(file: Place) -> Owner | None:
    try:
        return Owner(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


class _Heartbeat:
    """Writes the owner's heartbeat to its file, in a separate thread."""

    def __init__(self, file: Place, what: str, owner: Owner, seconds: float) -> None:
        self._file, self._what, self._owner, self._seconds = file, what, owner, seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="owner", daemon=True)
        self._usurper: Owner | None = None

    def start(self) -> None:
        self._write(0)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def is_owner(self) -> bool:
        """Returns whether the file still names this process."""
        owner = _read(self._file)
        return owner is not None and owner.is_same(self._owner)

    def check(self) -> None:
        if self._usurper is not None:
            raise _make_refusal(self._what, self._usurper, self._file)

    def _run(self) -> None:
        beat = 0
        while not self._ended.wait(self._seconds):
            owner = _read(self._file)
            if owner is not None and not owner.is_same(self._owner):
                self._usurper = owner
                return
            beat += 1
            with contextlib.suppress(OSError):
                self._write(beat)

    def _write(self, beat: int) -> None:
        # Write in place, because the lock is on this file.
        self._file.write_text(json.dumps({**asdict(self._owner), "beat": beat}), encoding="utf-8")
