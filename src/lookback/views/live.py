"""A running evaluation, watched: by a person, one output that is refreshed; in a job, a line now and then."""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lookback.core.errors import SetupError
from lookback.views import pictures
from lookback.views.display import Markup, clear, has_front_end, png_tag, show, text
from lookback.views.terminal import describe_change

if TYPE_CHECKING:
    import datetime as dt

    from lookback.core.streams.declaration import Stream
    from lookback.spark.stream.pipeline import Evaluation
    from lookback.spark.stream.sink import BatchReport
    from lookback.spark.tables.lakehouse import Tables

VIEWS = ("auto", "live", "lines")
_REFRESH_SECONDS = 1.0
_LINE_SECONDS = 30.0
# Asking for the times of commits takes a Spark job.
_COMMITS_SECONDS = 10.0
# Of commits, for the lag: what is older than these is not lag any more.
_COMMITS = 200


def watch(
    evaluation: Evaluation,
    minutes: float = 0,
    commits: Callable[[], dict[int, dt.datetime]] | None = None,
    view: str = "auto",
) -> None:
    """Starts an evaluation and shows how it goes until it ends, `minutes` are over or an interrupt.

    commits: gives the times of commits, for the lag. view `live`: a picture that is refreshed every second; `lines`: a
    line every 30 seconds in which a batch ended, and one picture at the end, for a run that nobody looks at; `auto`:
    live in a notebook with a front end, else lines. Raises SetupError for another view, and what the evaluation failed
    with.
    """
    if view not in VIEWS:
        raise SetupError(f"view is {', '.join(VIEWS[:-1])} or {VIEWS[-1]}, got {view!r}")
    is_live = view == "live" or (view == "auto" and has_front_end())
    shown = _LiveView(commits) if is_live else _Lines(commits)
    deadline = time.monotonic() + minutes * 60 if minutes else float("inf")
    evaluation.start()
    try:
        while evaluation.running and (left := deadline - time.monotonic()) > 0:
            shown.refresh(list(evaluation.reports))
            evaluation.wait(min(left, shown.seconds))
    except KeyboardInterrupt:
        pass  # the person at the notebook has seen enough
    finally:
        evaluation.stop()
        shown.refresh(list(evaluation.reports), done=True)


def commit_times(tables: Tables, stream: Stream) -> dict[int, dt.datetime]:
    """When the last commits of the events table were made, by version; aware."""
    history = tables.history(stream.name, _COMMITS).select("version", "timestamp").toArrow().to_pylist()
    return {row["version"]: row["timestamp"] for row in history}


class _View:
    """What both ways to show an evaluation know. seconds: between two refreshes."""

    seconds: float

    def __init__(self, commits: Callable[[], dict[int, dt.datetime]] | None) -> None:
        self._commits = commits
        self._committed: dict[int, dt.datetime] = {}
        self._asked = float("-inf")
        # Of all batches; the evaluation keeps the reports of the last thousand.
        self._batches = self._events = 0
        self._last_batch = -1
        self._changes: list[str] = []
        self._is_begun = False

    def refresh(self, reports: Sequence[BatchReport], *, done: bool = False) -> None:
        """Shows what is new."""
        raise NotImplementedError

    def _count(self, reports: Sequence[BatchReport]) -> bool:
        """Counts the batches that have ended since the last time. Returns whether there is something new to show."""
        new = [report for report in reports if report.batch_id > self._last_batch]
        if new:
            self._last_batch = new[-1].batch_id
        self._batches += len(new)
        self._events += sum(report.events for report in new)
        self._changes = [*self._changes, *(describe_change(row) for report in new for row in report.log)][-3:]
        is_first, self._is_begun = not self._is_begun, True
        return bool(new) or is_first

    def _ask_for_commits(self, *, done: bool) -> None:
        if self._commits is not None and (done or time.monotonic() - self._asked >= _COMMITS_SECONDS):
            self._committed, self._asked = self._commits(), time.monotonic()

    def _status(self, reports: Sequence[BatchReport], state: str) -> str:
        if not reports:
            return f"{state}; no batch yet"
        last = reports[-1]
        parts = [
            state, f"{self._batches:,} {'batch' if self._batches == 1 else 'batches'}", f"{self._events:,} events",
            f"{pictures.events_per_second(reports)[-1]:,.0f} events/s in the last batch",
            f"{last.state_rows:,} rows of state", pictures.count_text(last.rules, "rule"),
        ]  # fmt: skip
        if self._committed and last.arrival is not None:
            parts.append(f"{max(0, max(self._committed) - last.arrival):,} commits behind")
        return "; ".join(parts + ([f"last changes: {', '.join(self._changes)}"] if self._changes else []))


class _LiveView(_View):
    """One output that is replaced; the picture is drawn again only when there is something new."""

    seconds = _REFRESH_SECONDS
    _picture = ""

    def refresh(self, reports: Sequence[BatchReport], *, done: bool = False) -> None:
        if self._count(reports) or done:
            self._ask_for_commits(done=done)
            self._picture = png_tag(pictures.live(reports, self._committed or None))
        status = self._status(reports, "ended" if done else "running")
        clear()
        show(Markup(f"<p>{html.escape(status)}</p>{self._picture}", status))


class _Lines(_View):
    """A line now and then, and one picture at the end."""

    seconds = _LINE_SECONDS

    def refresh(self, reports: Sequence[BatchReport], *, done: bool = False) -> None:
        if not (self._count(reports) or done):
            return
        self._ask_for_commits(done=done)
        show(text(self._status(reports, "ended" if done else "running")))
        if done and reports:
            show(pictures.live(reports, self._committed or None))
