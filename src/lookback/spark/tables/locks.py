"""Lets one ingest and one notifier of a stream run at a time, by files beside its table, if tables are local folders."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from lookback.places import find_local_path
from lookback.spark.platform.owner import become_owner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lookback.core.streams.declaration import Stream
    from lookback.spark.tables.lakehouse import Tables


@contextlib.contextmanager
def lock_ingest(tables: Tables, stream: Stream) -> Iterator[None]:
    """Lets the block ingest a stream alone. Raises SetupError, which names the other ingest if there is one.

    Without local folders there is no lock: see `IngestRound._require_alone`.
    """
    root = find_local_path(tables.root)
    with contextlib.ExitStack() as held:
        if root is not None:
            held.enter_context(
                become_owner(root / f".ingest-{stream.name}.lock", f"the ingest of stream {stream.name!r}")
            )
        yield


@contextlib.contextmanager
def lock_notifier(root: str | None, streams: Sequence[str]) -> Iterator[Callable[[], None]]:
    """Lets the block notify of streams alone. root: the tables' root or volume; without a local folder there is no lock.

    Yields a check that raises SetupError if another machine has begun too. Raises SetupError, which names the other
    notifier if there is one.
    """
    folder = find_local_path(root)
    with contextlib.ExitStack() as held:
        names = [] if folder is None else [(name, folder / f".notify-{name}.lock") for name in sorted(streams)]
        checks = [held.enter_context(become_owner(file, f"the notifier of stream {name!r}")) for name, file in names]

        def check() -> None:
            for each in checks:
                each()

        yield check
