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
    shown = _LiveView(commits) if is_live else _LinesView(commits)
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
    """Counts the batches of an evaluation for both views, which refresh every `seconds`."""

    seconds: float

    def __init__(self, commits: Callable[[], dict[int, dt.datetime]] | None) -> None:
        self._commits = commits
        self._committed: dict[int, dt.datetime] = {}
        self._commits_read_at = float("-inf")
        # Totals of all batches, as the evaluation keeps only the last thousand reports.
        self._batches = self._events = 0
        self._last_batch = -1
        self._changes: list[str] = []
        self._is_begun = False

    def refresh(self, reports: Sequence[BatchReport], *, done: bool = False) -> None:
        """Shows the batches that have ended since the last refresh."""
        raise NotImplementedError

    def _count(self, reports: Sequence[BatchReport]) -> bool:
        """Counts the batches that have ended since the last call. Returns whether there is something new to show."""
        new = [report for report in reports if report.batch_id > self._last_batch]
        if new:
            self._last_batch = new[-1].batch_id
        self._batches += len(new)
        self._events += sum(report.events for report in new)
        self._changes = [*self._changes, *(describe_change(row) for report in new for row in report.log)][-3:]
        is_first, self._is_begun = not self._is_begun, True
        return bool(new) or is_first

    def _read_commits(self, *, done: bool) -> None:
        if self._commits is not None and (done or time.monotonic() - self._commits_read_at >= _COMMITS_SECONDS):
            self._committed, self._commits_read_at = self._commits(), time.monotonic()

    def _describe(self, reports: Sequence[BatchReport], state: str) -> str:
        if not reports:
            return f"{state}; no batch yet"
        last = reports[-1]
        parts = [
            state, f"{self._batches:,} {'batch' if self._batches == 1 else 'batches'}", f"{self._events:,} events",
            f"{pictures.compute_events_per_second(reports)[-1]:,.0f} events/s in the last batch",
            f"{last.state_rows:,} rows of state", count_noun(last.rules, "rule"),
        ]  # fmt: skip
        if self._committed and last.arrival is not None:
            parts.append(f"{max(0, max(self._committed) - last.arrival):,} commits behind")
        return "; ".join(parts + ([f"last changes: {', '.join(self._changes)}"] if self._changes else []))


class _LiveView(_View):
    """Replaces one output, and redraws the chart only when there is something new."""

    seconds = _REFRESH_SECONDS
    _picture = ""

    def refresh(self, reports: Sequence[BatchReport], *, done: bool = False) -> None:
        if self._count(reports) or done:
            self._read_commits(done=done)
            self._picture = make_image_tag(pictures.plot_evaluation(reports, self._committed or None))
        status = self._describe(reports, "ended" if done else "running")
        clear()
        show(Markup(f"<p>{html.escape(status)}</p>{self._picture}", status))


class _LinesView(_View):
    """Shows a line from time to time, and one chart at the end."""

    seconds = _LINE_SECONDS

    def refresh(self, reports: Sequence[BatchReport], *, done: bool = False) -> None:
        if not (self._count(reports) or done):
            return
        self._read_commits(done=done)
        show(text(self._describe(reports, "ended" if done else "running")))
        if done and reports:
            show(pictures.plot_evaluation(reports, self._committed or None))
