"""Shows a running evaluation: one refreshed output for people, occasional lines for jobs."""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lookback.core.errors import SetupError
from lookback.core.values.texts import count_noun
from lookback.views import pictures
from lookback.views.display import Markup, clear, has_front_end, make_image_tag, show, text
from lookback.views.terminal import describe_change

if TYPE_CHECKING:
    import datetime as dt

    from lookback.core.streams.declaration import Stream
    from lookback.spark.batches.sink import BatchReport
    from lookback.spark.stream.pipeline import Evaluation
    from lookback.spark.tables.lakehouse import Tables

VIEWS = ("auto", "live", "lines")
_REFRESH_SECONDS = 1.0
_LINE_SECONDS = 30.0
# Reading the times of commits takes a Spark job.
_COMMITS_SECONDS = 10.0
# The newest commits are enough for the lag.
_MAX_COMMITS = 200


def watch(
    evaluation: Evaluation,
    minutes: float = 0,
    commits: Callable[[], dict[int, dt.datetime]] | None = None,
    view: str = "auto",
) -> None:
    """Starts an evaluation and shows its progress until it ends, `minutes` have passed or the user interrupts.

    `commits` returns the times of commits, for the lag. The view `live` shows a chart that refreshes every second.
    `lines`, for unattended runs, shows a line at most every 30 seconds when a batch has ended, and one chart at the
    end. `auto` is live in a notebook with a front end, else lines. Raises SetupError for an unknown view, and the error
    of the evaluation.
    """
    if view not in VIEWS:
        raise SetupError(f"view must be {', '.join(VIEWS[:-1])} or {VIEWS[-1]}, got {view!r}")
    is_live = view == "live" or (view == "auto" and has_front_end())
    shown = _View(commits, is_live=is_live)
    deadline = time.monotonic() + minutes * 60 if minutes else float("inf")
    evaluation.start()
    try:
        while evaluation.running and (left := deadline - time.monotonic()) > 0:
            shown.refresh(list(evaluation.reports))
            evaluation.wait(min(left, shown.seconds))
    except KeyboardInterrupt:
        pass  # the user has seen enough
    finally:
        evaluation.stop()
        shown.refresh(list(evaluation.reports), done=True)


def read_commit_times(tables: Tables, stream: Stream) -> dict[int, dt.datetime]:
    """Returns the aware times of the latest commits of the events table, by version."""
    history = tables.history(stream.name, _MAX_COMMITS).select("version", "timestamp").toArrow().to_pylist()
    return {row["version"]: row["timestamp"] for row in history}


class _View:
    """Shows the batches of an evaluation: live as one output that is replaced, else as lines and a chart at the end."""

    def __init__(self, commits: Callable[[], dict[int, dt.datetime]] | None, *, is_live: bool) -> None:
        self._commits, self._is_live = commits, is_live
        self.seconds = _REFRESH_SECONDS if is_live else _LINE_SECONDS
        self._committed: dict[int, dt.datetime] = {}
        self._commits_read_at = float("-inf")
        # Totals of all batches, as the evaluation keeps only the last thousand reports.
        self._batches = self._events = 0
        self._last_batch = -1
        self._changes: list[str] = []
        self._picture: str | None = None

    def refresh(self, reports: Sequence[BatchReport], *, done: bool = False) -> None:
        """Shows the batches that have ended since the last refresh. The chart is redrawn only for something new."""
        is_new = self._count(reports) or self._picture is None or done
        is_due = done or time.monotonic() - self._commits_read_at >= _COMMITS_SECONDS
        if is_new and is_due and self._commits is not None:
            self._committed, self._commits_read_at = self._commits(), time.monotonic()
        status = self._describe(reports, "ended" if done else "running")
        if self._is_live:
            if is_new:
                self._picture = make_image_tag(pictures.plot_evaluation(reports, self._committed or None))
            clear()
            show(Markup(f"<p>{html.escape(status)}</p>{self._picture}", status))
        elif is_new:
            self._picture = ""
            show(text(status))
            if done and reports:
                show(pictures.plot_evaluation(reports, self._committed or None))

    def _count(self, reports: Sequence[BatchReport]) -> bool:
        """Counts the batches that have ended since the last call. Returns whether there are any."""
        new = [report for report in reports if report.batch_id > self._last_batch]
        if new:
            self._last_batch = new[-1].batch_id
        self._batches += len(new)
        self._events += sum(report.events for report in new)
        self._changes = [*self._changes, *(describe_change(row) for report in new for row in report.log)][-3:]
        return bool(new)

    def _describe(self, reports: Sequence[BatchReport], state: str) -> str:
        if not reports:
            return f"{state}; no batch yet"
        last = reports[-1]
        batches = f"{self._batches:,} {'batch' if self._batches == 1 else 'batches'}; {self._events:,} events"
        speed = f"{pictures.compute_events_per_second(reports)[-1]:,.0f} events/s in the last batch"
        parts = [state, batches, speed, f"{last.state_rows:,} rows of state", count_noun(last.rules, "rule")]
        if self._committed and last.arrival is not None:
            parts.append(f"{max(0, max(self._committed) - last.arrival):,} commits behind")
        return "; ".join(parts + ([f"last changes: {', '.join(self._changes)}"] if self._changes else []))
