"""Lets one process at a time own a file, and names the owner to any other process that wants it."""

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

# The time between two beats of an owner, and the number of beats for which an owner without a lock here is watched.
BEAT_SECONDS = 5.0
_WATCHED_BEATS = 3
# An owner names itself after it locks the file, and empties the file before it frees the lock. Either takes less than this.
_MOST_NAMELESS_SECONDS = 2.0


@dataclass(frozen=True)
class Owner:
    """A process that owns something. since: the time from which it does; beat: counts up while the process lives."""

    host: str
    pid: int
    user: str
    since: str
    beat: int = 0

    @classmethod
    def this_process(cls) -> Owner:
        """Returns this process as an owner from now on."""
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return cls(socket.gethostname(), os.getpid(), getpass.getuser(), since)

    def is_same(self, other: Owner) -> bool:
        """Returns whether both are one process that owns one thing since one time, whatever its beat."""
        return (self.host, self.pid, self.since) == (other.host, other.pid, other.since)

    def __str__(self) -> str:
        return f"process {self.pid} of {self.user} on {self.host}, since {self.since}"


@contextlib.contextmanager
def become_owner(file: Place, what: str, beat_seconds: float = BEAT_SECONDS) -> Iterator[Callable[[], None]]:
    """Makes this process the owner of `what`, such as "checkpoint X", until the end of the block. `file` names the owner.

    If the operating system locks files, it frees the lock of a process that has died, so that another process can follow
    a killed owner at once. Otherwise, as in an object store, and for an owner on another machine, the owner's beat decides,
    which is watched for some seconds. Two processes that start at the same moment there may both begin, and the first soon finds that it has
    lost ownership. Yields a check that raises SetupError then; call it now and again. Raises SetupError, which names the
    owner, if there is another one.
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
            # Emptied, not removed: another process may have it open already.
            if heartbeat.is_owner():
                file.write_text("")


def _claim(file: Place, opened: contextlib.ExitStack) -> tuple[bool | None, Owner | None]:
    """Tries to lock the file (see `_lock`). Returns whether that worked, and the owner that the file names.

    A locked file that names nobody is tried again: its owner is just beginning, or about to free the lock.
    """
    deadline = time.monotonic() + _MOST_NAMELESS_SECONDS
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
    """Returns whether the owner that a file names has ended."""
    if locked and known.host == socket.gethostname():
        return True
    # Locks may not reach other machines of a shared folder: the beat does. Clocks are not compared.
    deadline = time.monotonic() + _WATCHED_BEATS * beat_seconds
    while time.monotonic() < deadline:
        time.sleep(min(beat_seconds / 5, 0.5))
        now = _read(file)
        # A file that is just being written reads as None.
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
    """Writes the owner's beat into its file, in a thread of its own."""

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
        # In place: the lock is on this very file.
        self._file.write_text(json.dumps({**asdict(self._owner), "beat": beat}), encoding="utf-8")
