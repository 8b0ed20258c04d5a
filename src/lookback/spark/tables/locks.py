"""One ingest and one notifier of a stream at a time: files beside its table, where there are local folders."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from lookback.spark.platform.owner import only_one

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lookback.core.streams.declaration import Stream
    from lookback.spark.tables.lakehouse import Tables


def local_root(root: str | None) -> Path | None:
    """The root of tables where it is a folder of this machine, or is mounted as one."""
    if root is None or ("://" in root and not root.startswith("file://")) or root.startswith("dbfs:/"):
        return None
    return Path(root.removeprefix("file://"))


@contextlib.contextmanager
def only_one_ingest(tables: Tables, stream: Stream) -> Iterator[None]:
    """Ingests a stream alone. Raises SetupError, naming the other, where there is another.

    Without local folders there is no lock: see `Step._alone`.
    """
    root = local_root(tables.root)
    with contextlib.ExitStack() as held:
        if root is not None:
            held.enter_context(only_one(root / f".ingest-{stream.name}.lock", f"the ingest of stream {stream.name!r}"))
        yield


@contextlib.contextmanager
def only_one_notifier(root: str | None, streams: Sequence[str]) -> Iterator[Callable[[], None]]:
    """Notifies of streams alone. root: that of the tables, or a volume; no lock where it is no local folder.

    Yields what raises SetupError where another machine has begun too. Raises SetupError, naming the other.
    """
    folder = local_root(root)
    with contextlib.ExitStack() as held:
        names = [] if folder is None else [(name, folder / f".notify-{name}.lock") for name in sorted(streams)]
        checks = [held.enter_context(only_one(file, f"the notifier of stream {name!r}")) for name, file in names]

        def check() -> None:
            for each in checks:
                each()

        yield check
