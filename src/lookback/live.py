"""A running evaluation, watched: one output that is refreshed until the evaluation ends."""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lookback import pictures
from lookback.display import Markup, clear, png_tag, show

if TYPE_CHECKING:
    import datetime as dt

    from lookback.core.streams import Stream
    from lookback.spark.pipeline import Evaluation
    from lookback.spark.sink import BatchReport
    from lookback.spark.tables import Tables

_REFRESH_SECONDS = 1.0
# Of commits, for the lag: what is older than these is not lag any more.
_COMMITS = 200


def watch(
    evaluation: Evaluation, minutes: float = 0, commits: Callable[[], dict[int, dt.datetime]] | None = None
) -> None:
    """Starts an evaluation and shows how it goes, every second, until it ends, `minutes` are over or an interrupt.

    commits: gives the times of commits, for the lag. Raises what the evaluation failed with.
    """
    deadline = time.monotonic() + minutes * 60 if minutes else float("inf")
    view = _LiveView(commits)
    evaluation.start()
    try:
        while evaluation.running and time.monotonic() < deadline:
            view.refresh(list(evaluation.reports))
            time.sleep(_REFRESH_SECONDS)
    except KeyboardInterrupt:
        pass  # the person at the notebook has seen enough
    finally:
        evaluation.stop()
        view.refresh(list(evaluation.reports), done=True)


def commit_times(tables: Tables, stream: Stream) -> dict[int, dt.datetime]:
    """When the last commits of the events table were made, by version; aware."""
    history = tables.history(stream.name, _COMMITS).select("version", "timestamp").toArrow().to_pylist()
    return {row["version"]: row["timestamp"] for row in history}


class _LiveView:
    """One output that is replaced; the picture is drawn again only when there is something new."""

    def __init__(self, commits: Callable[[], dict[int, dt.datetime]] | None) -> None:
        self._commits = commits
        self._committed: dict[int, dt.datetime] = {}
        self._drawn = -1
        self._picture = ""

    def refresh(self, reports: Sequence[BatchReport], *, done: bool = False) -> None:
        last = reports[-1].batch_id if reports else -2
        if last != self._drawn:
            if self._commits is not None:
                self._committed = self._commits()
            self._picture = png_tag(pictures.live(reports, self._committed or None))
            self._drawn = last
        state = "ended" if done else "running"
        clear()
        show(Markup(f"<p>{html.escape(self._status(reports, state))}</p>{self._picture}", self._status(reports, state)))

    def _status(self, reports: Sequence[BatchReport], state: str) -> str:
        if not reports:
            return f"{state}; no batch yet"
        last = reports[-1]
        parts = [
            state, f"{len(reports):,} {'batch' if len(reports) == 1 else 'batches'}", f"{sum(r.events for r in reports):,} events",
            f"{pictures.events_per_second(reports)[-1]:,.0f} events/s in the last batch",
            f"{last.state_rows:,} rows of state", pictures.counted(last.rules, "rule"),
        ]  # fmt: skip
        if self._committed and last.arrival is not None:
            parts.append(f"{max(0, max(self._committed) - last.arrival):,} commits behind")
        changes = [f"{row['rule_id']} v{row['version']} {row['action']}" for r in reports[-20:] for row in r.log][-3:]
        return "; ".join(parts + ([f"last changes: {', '.join(changes)}"] if changes else []))
