"""One process at a time on a folder: who has it, told to whoever comes second."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lookback.core.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# How often an owner says that it lives, and how long one is watched that no lock of this machine tells of.
BEAT_SECONDS = 5.0
_WATCHED_BEATS = 3


@dataclass(frozen=True)
class Owner:
    """A process and since when it owns something. beat: counts up while it lives."""

    host: str
    pid: int
    user: str
    since: str
    beat: int = 0

    @classmethod
    def this_process(cls) -> Owner:
        """This one, from now on."""
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return cls(socket.gethostname(), os.getpid(), getpass.getuser(), since)

    def __str__(self) -> str:
        return f"process {self.pid} of {self.user} on {self.host}, since {self.since}"


@contextlib.contextmanager
def become_owner(file: Path, what: str, beat_seconds: float = BEAT_SECONDS) -> Iterator[Callable[[], None]]:
    """Owns what `file` stands for, such as "checkpoint X", until the end of the block. The file names the owner.

    Where the operating system locks files, it frees the lock of a process that has died, so that a killed owner is
    followed at once. An owner on another machine, or where files cannot be locked, is told by its beat, which is watched
    for some seconds: of two that start within the same moment there, both may begin, and the first soon finds that it
    is not the owner any more. Yields what raises SetupError then; call it now and again. Raises SetupError, naming the
    owner, where there is another.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as opened:
        locked = _lock(file, opened)
        known = _read(file)
        if locked is False or (known is not None and not _is_over(file, known, locked, beat_seconds)):
            raise _refusal(what, known, file)
        beating = _Beating(file, what, Owner.this_process(), beat_seconds)
        try:
            beating.start()
            yield beating.check
        finally:
            beating.stop()
            # Emptied, not removed: another process may have it open already.
            if beating.is_owner():
                file.write_text("")


def _lock(file: Path, opened: contextlib.ExitStack) -> bool | None:
    """Whether the lock was free and is held now, until `opened` is left; None where files cannot be locked."""
    try:
        import fcntl  # noqa: PLC0415 - Windows has none
    except ImportError:
        return None
    try:
        fcntl.flock(opened.enter_context(file.open("a+", encoding="utf-8")), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_over(file: Path, known: Owner, locked: bool | None, beat_seconds: float) -> bool:
    """Whether the owner that a file names is none any more."""
    if locked and known.host == socket.gethostname():
        return True
    # Locks may not reach other machines of a shared folder: the beat does. Clocks are not compared.
    deadline = time.monotonic() + _WATCHED_BEATS * beat_seconds
    while time.monotonic() < deadline:
        time.sleep(min(beat_seconds / 5, 0.5))
        now = _read(file)
        # Nothing can be read of a file that is just being written.
        if now is not None and now != known:
            return False
    return True


def _refusal(what: str, owner: Owner | None, file: Path) -> SetupError:
    who = "another process" if owner is None else str(owner)
    return SetupError(f"{what} is in use by {who}; one at a time. Stop that one first ({file} says who it is).")


def _read(file: Path) -> Owner | None:
    try:
        return Owner(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


class _Beating:
    """Writes the owner's beat into its file, in a thread of its own."""

    def __init__(self, file: Path, what: str, owner: Owner, seconds: float) -> None:
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
        """Whether the file still names this process."""
        found = _read(self._file)
        return found is not None and (found.host, found.pid, found.since) == self._identity

    def check(self) -> None:
        if self._usurper is not None:
            raise _refusal(self._what, self._usurper, self._file)

    @property
    def _identity(self) -> tuple[str, int, str]:
        return self._owner.host, self._owner.pid, self._owner.since

    def _run(self) -> None:
        beat = 0
        while not self._ended.wait(self._seconds):
            found = _read(self._file)
            if found is not None and (found.host, found.pid, found.since) != self._identity:
                self._usurper = found
                return
            beat += 1
            with contextlib.suppress(OSError):
                self._write(beat)

    def _write(self, beat: int) -> None:
        # In place: the lock is on this very file.
        self._file.write_text(json.dumps({**asdict(self._owner), "beat": beat}), encoding="utf-8")
