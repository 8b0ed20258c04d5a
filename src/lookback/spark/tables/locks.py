"""Lock files beside local tables that allow one ingest and one notifier per stream at a time."""

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
    """Locks a stream for the block's ingest. Raises SetupError, with its name, if another ingest is running.

    Only local folders have locks. Elsewhere see `EventWriter` in `spark.ingest.commits`.
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
    """Locks streams for the block's notifier.

    Args:
        root: The tables' root or volume. Only local folders have locks.
        streams: The names of the streams.

    Yields:
        A check that raises SetupError if another machine has started a notifier too.

    Raises:
        SetupError: If another notifier is running; the message names it.
    """
    folder = find_local_path(root)
    with contextlib.ExitStack() as held:
        names = [] if folder is None else [(name, folder / f".notify-{name}.lock") for name in sorted(streams)]
        checks = [held.enter_context(become_owner(file, f"the notifier of stream {name!r}")) for name, file in names]

        def check() -> None:
            for each in checks:
                each()

        yield check
