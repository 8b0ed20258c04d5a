"""The cells about a stream: opening its place, ingest, evaluation, health."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from threading import Thread, Timer
from typing import TYPE_CHECKING, Any

import pandas as pd

from lookback import verbs
from lookback.config import Settings
from lookback.core.errors import SetupError
from lookback.core.operations.figures import describe_warm_up
from lookback.core.operations.health import Finding, check_health, describe_health
from lookback.core.values.durations import parse_duration
from lookback.notebook.showing import say, show_desk, show_frame
from lookback.parameters import check_mode
from lookback.places import find_local_path
from lookback.spark.checkpoints.checkpoint import Checkpoint
from lookback.spark.ingest.fields import reads_kafka
from lookback.spark.ingest.files import ingest, ingest_continuously, retry_rejected
from lookback.spark.operations.status import read_stream_figures, with_account
from lookback.views import pictures
from lookback.views.display import show, text, to_frame
from lookback.views.live import read_commit_times, watch

if TYPE_CHECKING:
    from lookback.desk.streams import StreamDesk
    from lookback.spark.batches.sink import BatchReport
    from lookback.spark.ingest.report import IngestReport
    from lookback.spark.ingest.topics import TopicIngest
    from lookback.spark.ingest.unions import UnionIngest
    from lookback.spark.stream.metrics import Metrics
    from lookback.spark.stream.pipeline import Evaluation

_MAX_DRAWN_ROWS = 100_000
_WAIT_SECONDS = 60.0


def open_workspace(
    root: str, catalog: str = "", schema: str = "", conf: str = "../conf", stream: str = "", profile: str = ""
) -> verbs.Workspace:
    """Starts or finds Spark, reads conf/, and checks the tables; creates missing tables in local folders.

    With catalog and schema the tables are catalog.schema.<table> and `root` (a volume) has the checkpoints; without
    them the tables are folders below `root`. `stream` is one of conf/streams, `profile` one of conf/profiles (empty:
    the one in conf/settings.yml). Raises SetupError.
    """
    place = verbs.Workspace(Settings.local(root, conf, profile, catalog, schema), stream)
    place.kafka = reads_kafka(place.stream)
    place.tables.require(place.stream)
    say(f"Stream {stream} in {place.tables.place}; {len(place.streams)} streams declared in {place.conf}.")
    return place


def ingest_files(
    workspace: verbs.Workspace,
    path: str = "",
    format: str = "",
    mode: str = "once",
    every: str = "1 second",
    minutes: float = 0,
) -> IngestReport | None:
    """Ingests the files at `path` (empty: the stream's `source`, which may be a Kafka topic), and shows the counts.

    For a union it ingests the events of the members.

    Mode `once` reads the existing files, or the topic's records since the last run. `new` reads files added since the
    last run in mode new or continuous. `continuous` reads files or records as they appear, for `minutes` (0: until you
    interrupt it), looking at the interval `every`. `retry` reads rejected rows and files that are readable by now.

    A relative path that does not exist here is looked up next to conf/. Returns a report, except for files in mode new
    or continuous. Raises SetupError for an unknown mode, and for mode new or continuous with a single file.
    """
    stream, repeats = workspace.stream, every if mode == "continuous" else None
    reads_files = check_mode(mode, "once", "new", "continuous", "retry") == "retry" or path
    if not reads_files and (run := verbs.open_ingest(workspace, every=repeats, progress=say)):
        return _run_for(run, repeats, minutes)
    source, kind = _find_source(workspace, path), _find_format(workspace, path, format)
    if mode in ("new", "continuous") and Path(source).is_file():
        raise SetupError(f"mode {mode} watches a folder for new files, and {source} is one file; name its folder")
    if mode == "retry":
        return _show_account(retry_rejected(workspace.tables, stream, progress=None))
    if mode == "once":
        return _show_account(ingest(workspace.tables, stream, source, format=kind, progress=None))
    query = ingest_continuously(
        workspace.tables,
        stream,
        source,
        checkpoint=workspace.checkpoint("ingest"),
        every=repeats,
        format=kind,
        progress=lambda report: say(str(report)),
        warn=say,
    )
    try:
        query.awaitTermination(round(minutes * 60) or None)
    except KeyboardInterrupt:
        pass  # the user has seen enough
    finally:
        query.stop()
    return None


def _run_for(run: TopicIngest | UnionIngest, every: str | None, minutes: float) -> IngestReport:
    """Runs an ingest, with `every` for some minutes (0: until it is interrupted), and shows the counts."""
    timer = Timer(minutes * 60, run.request_stop)
    if every is not None and minutes:
        timer.start()
    try:
        return _show_account(run.run())
    finally:
        timer.cancel()


def _show_account(report: IngestReport) -> IngestReport:
    """Shows the counts, the assumptions, and the rejected rows by reason, each with an example."""
    counts = {name: getattr(report, name) for name in ("offered", "ingested", "duplicates", "rejected", "commits")}
    account = pd.DataFrame([{**counts, "adds_up": report.balanced, "seconds": round(report.seconds, 1)}])
    show(account, text(str(report)), *([text(report.assumptions)] if report.assumptions else []))
    if report.rejections:
        show(pd.DataFrame([vars(each) for each in report.rejections]))
        say(f"All rejected rows are in the table rejected_events; `lookback rejected {report.stream}` lists them.")
    return report


def _find_source(workspace: verbs.Workspace, path: str) -> str:
    chosen = path or str(workspace.stream.source.get("path") or "")
    beside = workspace.conf.resolve().parent / chosen
    is_beside = bool(chosen) and find_local_path(chosen) == Path(chosen).resolve() and not Path(chosen).exists()
    return str(beside) if is_beside else chosen


def _find_format(workspace: verbs.Workspace, path: str, format_: str) -> str | None:
    declared = workspace.stream.source.get("format") if not path else None
    return format_ or (None if declared is None else str(declared))


def _read_newest(workspace: verbs.Workspace, table: str, limit: int, *order: str) -> Any:
    """Returns the newest rows of a table about the chosen stream, as a Spark frame."""
    rows = workspace.tables.read(table)
    newest = (rows[name].desc() for name in order)
    return rows.where(rows["stream"] == workspace.stream.name).orderBy(*newest).limit(limit)


def show_rejected(workspace: verbs.Workspace, limit: int = 20) -> pd.DataFrame:
    """Shows the newest rejected rows, unchanged, with all reasons."""
    newest = _read_newest(workspace, "rejected_events", limit, "ingested_at", "raw")
    return show_frame(to_frame(newest), "No row was rejected.")


def show_events(workspace: verbs.Workspace, limit: int = 5) -> pd.DataFrame:
    """Shows the newest events of the stream's table, and a chart of the times of the newest 100,000."""
    time = workspace.stream.event_time
    newest = workspace.tables.read_events(workspace.stream.name).orderBy(time, ascending=False)
    frame = to_frame(newest.limit(limit))
    if not len(frame):
        say("The table has no events yet.")
        return frame
    times = to_frame(newest.select(time).limit(_MAX_DRAWN_ROWS))[time]
    title = "Events over time" if len(times) < _MAX_DRAWN_ROWS else "The newest events over time"
    show(pictures.plot_events_over_time(times, title), frame)
    return frame


def show_log(workspace: verbs.Workspace, limit: int = 20) -> pd.DataFrame:
    """Shows the newest rows of rule_log: activated, paused and rejected rules, and failures."""
    newest = _read_newest(workspace, "rule_log", limit, "logged_at", "position")
    columns = ("logged_at", "rule_id", "version", "action", "arrival", "message")
    return show_frame(to_frame(newest.select(*columns)), "The log is empty.")


def evaluate_stream(
    workspace: verbs.Workspace,
    mode: str = "once",
    every: str = "",
    minutes: float = 0,
    idle_after: str = "",
    shards: int = 0,
    view: str = "auto",
    desk: StreamDesk | None = None,
) -> list[BatchReport]:
    """Evaluates the rules in force on the stream's events, and shows the progress. Returns the reports of the batches.

    An interrupt of the cell stops the evaluation cleanly, as Stop at the desk does; the next start repeats an
    unfinished batch.

    Args:
        workspace: Tables, streams and settings.
        mode: `once` evaluates all events that have arrived, then stops; `rebuild` does the same after rebuilding the
            state from the tables (see docs/how-to/recover.md); `continuous` runs for `minutes`, 0 for no limit.
        every: Pause between two micro-batches; empty for the profile's.
        minutes: Time limit of mode continuous.
        idle_after: Duration. After each such interval without a new commit a continuous evaluation advances the
            watermark by this duration.
        shards: Number of shards in a new checkpoint. 0 uses the number of the stream, then of conf/settings.yml, then
            one per core of the cluster, at most 48.
        view: `live` shows a chart that refreshes every second; `lines` suits jobs; `auto` chooses, see
            `lookback.views.live.watch`; `desk` runs a continuous evaluation in the background, and the cell ends.
        desk: The stream desk for the view `desk`.
    """
    once = check_mode(mode, "once", "rebuild", "continuous") != "continuous"
    if not any(row.status in ("active", "shadow") for row in workspace.rules.rows()):
        say("No rule is in force: publish one with 02_author_rules, or with `lookback rules push`.")
    idle = parse_duration(idle_after) if idle_after and not once else None
    evaluation, metrics = verbs.prepare_evaluation(
        workspace, every=every, default_shards=shards, once=once, rebuild=mode == "rebuild", idle_after=idle
    )
    if view == "desk" and desk is not None and not once:
        _run_beside(evaluation, metrics, minutes)
        desk.attach(evaluation)
        return list(evaluation.reports)
    view = "auto" if view == "desk" else view
    with metrics:
        commits = None if once else lambda: read_commit_times(workspace.tables, workspace.stream)
        watch(evaluation, minutes, commits, view)
    return list(evaluation.reports)


def _run_beside(evaluation: Evaluation, metrics: Metrics, minutes: float) -> None:
    """Runs an evaluation and its metrics in a thread, for `minutes` or, if 0, until it is stopped."""
    evaluation.start()

    def keep() -> None:
        # The caller that stops the evaluation sees its error; this thread only records it in the metrics.
        with suppress(Exception), metrics:
            if minutes:
                evaluation.wait(minutes * 60)
                evaluation.request_stop()
            while not evaluation.wait(_WAIT_SECONDS):
                pass
            evaluation.stop()

    Thread(target=keep, name="evaluate-beside", daemon=True).start()


def open_stream_desk(workspace: verbs.Workspace, wanted: bool = True) -> StreamDesk | None:
    """Shows a desk for controlling a stream: its rules, their alerts per minute, and buttons.

    There is no desk unless it is wanted, see `show_desk`.
    """
    return show_desk("streams", lambda desk: desk.StreamDesk(workspace.rules, workspace.stream), wanted)


def show_health(workspace: verbs.Workspace) -> list[Finding]:
    """Shows whether the stream is healthy, and what to do if it is not."""
    tables, stream = workspace.tables, workspace.stream
    checkpoint = Checkpoint(tables.find_place(workspace.checkpoint("evaluate")))
    figures = with_account(tables, stream, read_stream_figures(tables, stream, checkpoint))
    findings = check_health(figures)
    say(describe_health(figures, findings))
    if findings:
        rows = [{"level": each.level, "what": each.what, "what to do": each.remedy} for each in findings]
        show(pd.DataFrame(rows))
    for each in figures.warming:
        say(f"Warming up: {describe_warm_up(each)}.")
    return findings
