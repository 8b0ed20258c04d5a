"""One ingest of a stream at a time: a lock beside its table, where there are local folders."""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lookback.core.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lookback.core.streams import Stream
    from lookback.spark.tables import Tables


def local_root(tables: Tables) -> Path | None:
    """The root where it is a folder of this machine."""
    root = tables.root
    if root is None or ("://" in root and not root.startswith("file://")) or root.startswith("dbfs:/"):
        return None
    return Path(root.removeprefix("file://"))


@contextmanager
def only_one_ingest(tables: Tables, stream: Stream) -> Iterator[None]:
    """Holds the stream's ingest lock, a file next to its table.

    The operating system frees the lock of a process that has died; the text in it says who holds it. Raises SetupError
    where another holds it. Without local folders there is no file: see `Step._alone`.
    """
    root = local_root(tables)
    if root is None:
        yield
        return
    root.mkdir(parents=True, exist_ok=True)
    path = root / f".ingest-{stream.name}.lock"
    with path.open("a+", encoding="utf-8") as file:
        _lock(file, path, stream)
        try:
            yield
        finally:
            # Emptied, not removed: another process may have it open already.
            file.truncate(0)


def _lock(file: Any, path: Path, stream: Stream) -> None:
    import fcntl  # noqa: PLC0415 - only where there are local folders; Windows has none

    file.seek(0)
    text = file.read()
    holder: dict[str, Any] = json.loads(text) if text.startswith("{") else {}
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Locks may not reach other machines of a shared folder; a name left there by one of them counts.
        elsewhere = holder.get("host", socket.gethostname()) != socket.gethostname()
    except OSError:
        elsewhere = True
    if elsewhere:
        who = f"process {holder.get('pid', '?')} on {holder.get('host', '?')}, since {holder.get('since', '?')}"
        raise SetupError(
            f"stream {stream.name!r} is being ingested by {who}; one ingest at a time. "
            f"Wait for it or stop it; if that process is gone, delete {path}."
        )
    file.truncate(0)
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}))
    file.flush()
