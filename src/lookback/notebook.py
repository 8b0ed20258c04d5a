"""The functions that notebooks call, one per cell. Each does one step and shows its result.

The same notebooks run in Jupyter and on Databricks. All results are ordinary display objects with escaped text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import pandas as pd
import yaml

from lookback import verbs
from lookback.config import Settings, load_rule_document
from lookback.core.errors import RuleError, SetupError
from lookback.core.explaining.events import EventExplanation
from lookback.core.explaining.evidence import Explanation, StepEvidence
from lookback.core.operations.health import Finding, check_health, describe_health, describe_warm_up
from lookback.core.rules.document import read_rule
from lookback.core.rules.parameters import read_parameter
from lookback.core.rules.remarks import Remark, find_remarks
from lookback.core.rules.wording import describe_rule
from lookback.core.values.durations import parse_duration
from lookback.core.values.texts import count_noun
from lookback.core.values.times import parse_calendar_time, to_utc
from lookback.parameters import check_mode
from lookback.parameters import parameters as parameters  # noqa: PLC0414 - notebooks find it here
from lookback.places import find_local_path
from lookback.testing.trial import DocumentTrial
from lookback.verbs import Workspace as Workspace  # noqa: PLC0414 - notebooks find it here
from lookback.views import pictures, whatif
from lookback.views.display import code, has_person, show, text, to_frame
from lookback.views.explanations import describe_alert, describe_event
from lookback.views.live import read_commit_times, watch
from lookback.views.terminal import describe_redundant
from lookback.views.timeline import plot_key_timeline

if TYPE_CHECKING:
    from lookback.core.rules.compiled import CompiledRule
    from lookback.core.rules.gate import Condition
    from lookback.desk.authoring import Authoring
    from lookback.desk.review import ReviewDesk
    from lookback.desk.streams import StreamDesk
    from lookback.spark.batches.sink import BatchReport
    from lookback.spark.figures import RuleFigures
    from lookback.spark.ingest.files import IngestReport
    from lookback.spark.stream.metrics import Metrics
    from lookback.spark.stream.pipeline import Evaluation

_MAX_LISTED_EVENTS = 50
_MAX_READ_ALERTS = 1_000
_MAX_DRAWN_ROWS = 100_000
_WAIT_SECONDS = 60.0


class _HasWidget(Protocol):
    widget: Any


_Desk = TypeVar("_Desk", bound=_HasWidget)


def open_workspace(
    root: str, catalog: str = "", schema: str = "", conf: str = "../conf", stream: str = "", profile: str = ""
) -> Workspace:
    """Starts or finds Spark, reads conf/, and checks the tables; creates missing tables in local folders.

    With catalog and schema the tables are catalog.schema.<table> and `root` (a volume) has the checkpoints; without
    them the tables are folders below `root`. `stream` is one of conf/streams, `profile` one of conf/profiles (empty:
    the one in conf/settings.yml). Raises SetupError.
    """
    from lookback.spark.ingest.fields import reads_kafka

    place = Workspace(Settings.local(root, conf, profile, catalog, schema), stream)
    place.kafka = reads_kafka(place.stream)
    place.tables.require(place.stream)
    _say(f"Stream {stream} in {place.tables.place}; {len(place.streams)} streams declared in {place.conf}.")
    return place


def ingest_files(
    workspace: Workspace,
    path: str = "",
    format: str = "",
    mode: str = "once",
    every: str = "1 second",
    minutes: float = 0,
) -> IngestReport | None:
    """Ingests the files at `path` (empty: the stream's `source`, which may be a Kafka topic), and shows the counts.

    Mode `once` reads the existing files, or the topic's records since the last run. `new` reads files added since the
    last run in mode new or continuous. `continuous` reads files or records as they appear, for `minutes` (0: until you
    interrupt it), looking at the interval `every`. `retry` reads rejected rows and files that are readable by now.

    A relative path that does not exist here is looked up next to conf/. Returns a report, except for files in mode new
    or continuous. Raises SetupError for an unknown mode, and for mode new or continuous with a single file.
    """
    from lookback.spark.ingest.fields import reads_kafka
    from lookback.spark.ingest.files import ingest, ingest_continuously, retry_rejected

    if check_mode(mode, "once", "new", "continuous", "retry") != "retry" and reads_kafka(workspace.stream) and not path:
        return _ingest_topic(workspace, every if mode == "continuous" else None, minutes)
    source = _find_source(workspace, path)
    kind = _find_format(workspace, path, format)
    if mode in ("new", "continuous") and Path(source).is_file():
        raise SetupError(f"mode {mode} watches a folder for new files, and {source} is one file; name its folder")
    tables, stream = workspace.tables, workspace.stream
    if mode == "retry":
        return _show_account(retry_rejected(tables, stream, progress=None))
    if mode == "once":
        return _show_account(ingest(tables, stream, source, format=kind, progress=None))
    query = ingest_continuously(
        tables, stream, source, checkpoint=workspace.checkpoint("ingest"), format=kind,
        every=every if mode == "continuous" else None, progress=lambda report: _say(str(report)), warn=_say,
    )  # fmt: skip
    try:
        query.awaitTermination(round(minutes * 60) or None)
    except KeyboardInterrupt:
        pass  # the user has seen enough
    finally:
        query.stop()
    return None


def _ingest_topic(workspace: Workspace, every: str | None, minutes: float) -> IngestReport:
    from threading import Timer

    from lookback.spark.ingest.topics import TopicIngest

    checkpoint = workspace.checkpoint("kafka")
    run = TopicIngest(workspace.tables, workspace.stream, checkpoint, every=every, progress=_say)
    timer = Timer(minutes * 60, run.request_stop)
    if every is not None and minutes:
        timer.start()
    try:
        return _show_account(run.run())
    finally:
        timer.cancel()


def _say(line: str) -> None:
    show(text(line))


def _show_account(report: IngestReport) -> IngestReport:
    """Shows the counts, the assumptions, and the rejected rows by reason, each with an example."""
    counts = {name: getattr(report, name) for name in ("offered", "ingested", "duplicates", "rejected", "commits")}
    account = pd.DataFrame([{**counts, "adds_up": report.balanced, "seconds": round(report.seconds, 1)}])
    show(account, text(str(report)), *([text(report.assumptions)] if report.assumptions else []))
    if report.rejections:
        show(pd.DataFrame([vars(each) for each in report.rejections]))
        _say(f"All rejected rows are in the table rejected_events; `lookback rejected {report.stream}` lists them.")
    return report


def _find_source(workspace: Workspace, path: str) -> str:
    chosen = path or str(workspace.stream.source.get("path") or "")
    beside = workspace.conf.resolve().parent / chosen
    is_beside = bool(chosen) and find_local_path(chosen) == Path(chosen).resolve() and not Path(chosen).exists()
    return str(beside) if is_beside else chosen


def _find_format(workspace: Workspace, path: str, format_: str) -> str | None:
    declared = workspace.stream.source.get("format") if not path else None
    return format_ or (None if declared is None else str(declared))


def _show_frame(frame: pd.DataFrame, empty: str, *before: Any) -> pd.DataFrame:
    """Shows `before`, and the frame, or a sentence if it is empty. Returns the frame."""
    show(*before, frame if len(frame) else text(empty))
    return frame


def show_rejected(workspace: Workspace, limit: int = 20) -> pd.DataFrame:
    """Shows the newest rejected rows, unchanged, with all reasons."""
    newest = _read_newest(workspace, "rejected_events", limit, "ingested_at", "raw")
    return _show_frame(to_frame(newest), "No row was rejected.")


def _read_newest(workspace: Workspace, table: str, limit: int, time: str, *ties: str) -> Any:
    """Returns the newest rows of a table about the chosen stream, as a Spark frame."""
    from pyspark.sql import functions as F  # noqa: N812

    rows = workspace.tables.read(table).where(F.col("stream") == workspace.stream.name)
    return rows.orderBy(F.col(time).desc(), *ties).limit(limit)


def show_events(workspace: Workspace, limit: int = 5) -> pd.DataFrame:
    """Shows the newest events of the stream's table, and a chart of the times of the newest 100,000."""
    from pyspark.sql import functions as F  # noqa: N812

    time = workspace.stream.event_time
    newest = workspace.tables.read_events(workspace.stream.name).orderBy(F.col(time).desc())
    frame = to_frame(newest.limit(limit))
    if not len(frame):
        _say("The table has no events yet.")
        return frame
    times = to_frame(newest.select(time).limit(_MAX_DRAWN_ROWS))[time]
    title = "Events over time" if len(times) < _MAX_DRAWN_ROWS else "The newest events over time"
    show(pictures.plot_events_over_time(times, title), frame)
    return frame


def rule_form(workspace: Workspace, form: SimpleNamespace) -> dict[str, Any]:
    """Builds the rule document that the parameters describe, or reads it from `rule_file`, and shows it.

    `form` has either rule_file, or rule_id, description, severity, group_by (names separated by commas), where, window,
    measures (`name: aggregate`, separated by semicolons or lines), when, parameters (`name: value`, separated in the
    same way) and message. These fields make a lookback rule, whose window ends at each event. For any other kind use a
    rule_file; it is looked up here, then in conf/rules.
    """
    document = (
        load_rule_document(_find_rule_file(workspace, form)) if form.rule_file else _make_document(workspace, form)
    )
    show(code(yaml.safe_dump(document, sort_keys=False, allow_unicode=True)))
    return document


def _find_rule_file(workspace: Workspace, form: SimpleNamespace) -> Path:
    here, there = Path(form.rule_file), workspace.conf / "rules" / form.rule_file
    return there if there.is_file() and not here.is_file() else here


def _make_document(workspace: Workspace, form: SimpleNamespace) -> dict[str, Any]:
    texts = {name: getattr(form, name) for name in ("description", "where", "message") if getattr(form, name)}
    document = {
        "rule_id": form.rule_id, "stream": workspace.stream.name, "severity": form.severity, **texts,
        "group_by": [name.strip() for name in form.group_by.split(",") if name.strip()],
        "window": form.window, "measures": _parse_pairs(form.measures), "when": form.when,
    }  # fmt: skip
    if form.parameters:
        document["parameters"] = {name: read_parameter(value) for name, value in _parse_pairs(form.parameters).items()}
    return document


def _parse_pairs(listed: str) -> dict[str, str]:
    """Parses a list such as `total: sum(amount); n: count(*)` into texts by name."""
    parts = [part.partition(":") for part in listed.replace(";", "\n").splitlines() if part.strip()]
    return {name.strip(): text.strip() for name, _, text in parts}


def open_author_desk(workspace: Workspace, form: SimpleNamespace, wanted: bool = True) -> Authoring | None:
    """Shows a desk for writing a rule: form, YAML, checks, trials, what-if, the gate, saving, publishing.

    It starts with the rule of `form`, as `rule_form` does. Returns None, and shows why, if `wanted` is false, the
    notebook runs non-interactively, or ipywidgets is missing.
    """

    def make() -> Authoring:
        from lookback.desk.authoring import Authoring
        from lookback.desk.rule.text import RuleText

        document = None if form.rule_file else _make_document(workspace, form)
        text = RuleText.read(_find_rule_file(workspace, form)) if document is None else RuleText.of(document)
        return Authoring(workspace.rules, workspace.stream, workspace.settings, text)

    return _show_desk(make, wanted)


def _show_desk(make: Callable[[], _Desk], wanted: bool) -> _Desk | None:
    """Shows a desk in an interactive notebook, else a sentence. `make` imports ipywidgets and makes the desk."""
    if not (wanted and has_person()):
        _say("No desk: the notebook runs non-interactively, or the parameter desk is false.")
        return None
    try:
        desk = make()
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("ipywidgets"):
            raise
        _say("The desk needs the package ipywidgets, which is not installed; the cells below work without it.")
        return None
    show(desk.widget)
    return desk


def check_rule(workspace: Workspace, document: Mapping[str, Any]) -> CompiledRule:
    """Checks a rule against its stream, runs its own tests, and describes it in words.

    Shows all problems as a table of places and remedies, and raises RuleError. Also shows remarks, which do not prevent
    publication.
    """
    try:
        rule = workspace.rules.check(document)
    except RuleError as error:
        show(pd.DataFrame([{"place": p.place or "the document", "what to do": p.message} for p in error.problems]))
        raise
    tests = f"; {len(rule.spec.tests)} of its own tests passed" if rule.spec.tests else ""
    _say(f"{rule.spec.rule_id} can be published{tests}. {describe_rule(rule)}")
    _show_remarks(find_remarks(rule))
    return rule


def _show_remarks(remarks: Sequence[Remark]) -> None:
    """Shows the remarks, if any, as a table."""
    if remarks:
        show(pd.DataFrame([{"place": each.place or "the document", "remark": each.message} for each in remarks]))


def try_rule(workspace: Workspace, document: Mapping[str, Any], events: int = 50_000) -> DocumentTrial:
    """Runs a rule over the newest `events` events of its stream, and plots what it would have flagged.

    Nothing is published. The evaluator is the stream's own and takes the events in the order they were ingested. A
    window that begins before the first of these events is incomplete. Windows, sessions and waits that are still open
    at the last event have no result yet. The plot leaves out retracted alerts. Remarks name conditions that no event
    satisfies, such as a text that was never seen in its field.
    """
    stream = workspace.streams[str(document.get("stream"))]
    trial, remarks = verbs.try_rule(workspace.tables, document, stream, events)
    title = f"{document.get('rule_id')}: what it would have flagged"
    measured: dict[str, Any] = {"values": trial.values, "name": trial.name, "limits": trial.limits}
    show(pictures.plot_flagged(trial.events, trial.final_alerts, stream.event_time, title, **measured))
    if len(trial.alerts):
        columns = ["window_start", "event_time", "severity", "key", "measures", "message", "verdict"]
        show(trial.alerts[columns].tail(10).iloc[::-1])
    if len(trial.errors):
        show(trial.errors)
    _show_remarks(remarks)
    return trial


def backtest_rule(
    workspace: Workspace, document: Mapping[str, Any], run: bool = True, since: str = "", vary: str = "",
    budget: float = 0, against: str = "",
) -> pd.DataFrame | None:  # fmt: skip
    """Runs a rule over all events of its stream, and plots the alerts for other values of a parameter.

    Nothing is published.

    Args:
        workspace: Tables and streams.
        document: The rule.
        run: False to skip the backtest.
        since: Event time from which alerts count; empty for the first event.
        vary: Values such as `limit=500,1000,2000`, several parameters separated by semicolons; empty for the first
            numeric parameter, from a quarter of its value to four times its value.
        budget: Alerts that a team can review in a day; 0 for no budget.
        against: Id of a rule whose active version to compare with.

    Returns:
        The figures; None if the backtest was skipped.

    Raises:
        SetupError: If a value is invalid.
        RuleError: If the rule is invalid.
    """
    if not run:
        _say("Skipped: set the parameter backtest to true to run the rule over all events.")
        return None
    try:
        varied, within = verbs.read_what_if(document, vary, since)
    except ValueError as error:
        raise SetupError(f"vary or since: {error}") from None
    with verbs.run_what_if(workspace.rules, document, varied, within, against) as result:
        frame = pd.DataFrame([{**vars(each), **each.parameters} for each in result.figures]).drop(columns="parameters")
        shown = [*varied, "alerts", "alerts_per_day", "keys", "flagged", "positives", "precision", "recall"]
        show(frame[shown])
        for name in list(varied)[:1]:
            today = (document.get("parameters") or {}).get(name)
            show(whatif.plot_alerts_by_value(result.figures, name, today=today, budget=budget or None))
            show(whatif.plot_precision_by_value(result.figures, name, today=today))
        show(*(text(f"Against {each.rule_id} version {each.version}: {each.sentence}.") for each in result.comparisons))
    _say(f"{document['rule_id']} over {result.events:,} events; nothing was published.")
    return frame


def edit_list(
    workspace: Workspace, name: str = "", add: str = "", remove: str = "", until: str = "", reason: str = "",
    kind: str = "", author: str = "",
) -> None:  # fmt: skip
    """Adds values to a list that rules look up with `in_list(field, 'name')`, removes values, and shows all lists.

    Args:
        workspace: Tables and streams.
        name: The list; empty to change nothing.
        add: Values to add, separated by commas.
        remove: Values to remove, separated by commas.
        until: When the added values expire: a time, or a duration such as `30 days`; empty for never.
        reason: Why the values are on the list.
        kind: cidr for ranges of addresses.
        author: Default: the user who runs the notebook.

    Raises:
        SetupError: If the list or a value is invalid.
    """
    from lookback.spark.lists import add_values, read_until, remove_values, show_lists

    if (add or remove) and not name:
        raise SetupError("list_add and list_remove need a list: set list_name too")
    added, removed = ([part.strip() for part in each.split(",") if part.strip()] for each in (add, remove))
    if removed:
        show(text(str(remove_values(workspace.tables, name, removed))))
    if added:
        show(text(str(add_values(
            workspace.tables, name, added, until=read_until(until) if until else None, reason=reason or None,
            kind=kind or None, author=author or None,
        ))))  # fmt: skip
    _show_frame(pd.DataFrame(show_lists(workspace.tables)), "No lists yet.")


def publish_rule(
    workspace: Workspace, document: Mapping[str, Any], status: str = "active", publish: bool = True,
    author: str = "", comment: str = "",
) -> int | None:  # fmt: skip
    """Publishes the rule's next version with a status, if `publish` is true. A running stream applies it in seconds."""
    if not publish:
        _say("Not published: set the parameter publish to true.")
        return None
    version = workspace.rules.push(document, status=status, author=author, comment=comment)
    status = workspace.rules.choose_status(status)
    _say(f"{document['rule_id']} is published as version {version}, {status}.")
    return version


def check_gate(
    workspace: Workspace, document: Mapping[str, Any], run: bool = True, activate: bool = False, author: str = "",
    comment: str = "",
) -> int | None:  # fmt: skip
    """Checks a rule against the gate of the settings. Shows each condition with its figure and remedy.

    Args:
        workspace: Tables and settings.
        document: The rule.
        run: False to skip the check.
        activate: Whether to activate the published version with this document, if it meets all conditions; if not,
            nothing is written.
        author: Who approves it; empty for the user who runs the notebook.
        comment: Comment of the new version.

    Returns:
        The number of the new version; None if there is none.

    Raises:
        SetupError: If the published version has another document.
        RuleError: If the rule is invalid.
    """
    from lookback.core.rules.gate import Gate, hash_document
    from lookback.spark.activation import activate as make_active
    from lookback.spark.activation import check_document, find_candidate

    gate, rules, rule_id = workspace.settings.gate, workspace.rules, str(document["rule_id"])
    if not (run or activate):
        _say("Not checked: set the parameter gate to true.")
        return None
    if gate is None:
        _say("conf/settings.yml has no gate: a version is active as soon as it is published as active.")
        if not activate:
            return None
    if not activate:
        _show_conditions(check_document(rules, document, gate or Gate(), author=author))
        _say(f"Only checked {rule_id}; to activate it, set the parameter activate to true.")
        return None
    candidate = find_candidate(rules, rule_id)
    if hash_document(candidate.document or {}) != hash_document(document):
        raise SetupError(
            f"version {candidate.version} of {rule_id} in the table has another document: set the parameters publish "
            "to true and status to draft, then activate it"
        )
    found = make_active(rules, rule_id, gate or Gate(), approver=author, comment=comment)
    _show_conditions(found.conditions)
    _say(f"Version {found.candidate} of {rule_id} {found.outcome}.")
    return found.version


def _show_conditions(conditions: Sequence[Condition]) -> None:
    if conditions:
        show(pd.DataFrame([vars(each) for each in conditions]))


def _describe_document(document: dict[str, Any] | None) -> dict[str, str]:
    if not document:
        return dict.fromkeys(("kind", "stream", "severity", "when"), "")
    rule, _ = read_rule(document)
    return {"kind": rule.kind, "stream": rule.stream, "severity": rule.severity, "when": rule.when}


def list_rules(workspace: Workspace) -> pd.DataFrame:
    """Shows the last version of every rule."""
    rows = [
        {
            "rule_id": row.rule_id, "version": row.version, "status": row.status,
            **_describe_document(row.document),
            "author": row.author, "changed_at": row.changed_at,
        }
        for row in workspace.rules.rows()
    ]  # fmt: skip
    return _show_frame(pd.DataFrame(rows), "No rule is published yet.")


def evaluate_stream(
    workspace: Workspace, mode: str = "once", every: str = "", minutes: float = 0, idle_after: str = "", shards: int = 0,
    view: str = "auto", desk: StreamDesk | None = None,
) -> list[BatchReport]:  # fmt: skip
    """Evaluates the rules in force on the stream's events, and shows the progress.

    An interrupt of the cell stops the evaluation cleanly, as Stop at the desk does; the next start repeats an
    unfinished batch.

    Args:
        workspace: Tables, streams and settings.
        mode: `once` evaluates all events that have arrived, then stops; `rebuild` does the same after rebuilding the
            state from the tables (see docs/operations.md); `continuous` runs for `minutes`.
        every: Pause between two micro-batches; empty for the profile's.
        minutes: Time limit of mode continuous; 0 for none.
        idle_after: Duration. After each such interval without a new commit a continuous evaluation advances the
            watermark by this duration.
        shards: Number of shards in a new checkpoint. 0 uses the number of the stream, then of conf/settings.yml, then
            one per core of the cluster, at most 48.
        view: `live` shows a chart that refreshes every second; `lines` suits jobs; `auto` chooses, see
            `lookback.views.live.watch`; `desk` runs a continuous evaluation in the background, and the cell ends at
            once.
        desk: The stream desk for the view `desk`.

    Returns:
        The reports of the batches.
    """
    once = check_mode(mode, "once", "rebuild", "continuous") != "continuous"
    if not any(row.status in ("active", "shadow") for row in workspace.rules.rows()):
        _say("No rule is in force: publish one with 02_author_rules, or with `lookback rules push`.")
    evaluation, metrics = verbs.prepare_evaluation(
        workspace, every=every, default_shards=shards, once=once, rebuild=mode == "rebuild",
        idle_after=parse_duration(idle_after) if idle_after and not once else None,
    )  # fmt: skip
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
    from contextlib import suppress
    from threading import Thread

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


def open_stream_desk(workspace: Workspace, wanted: bool = True) -> StreamDesk | None:
    """Shows a desk for controlling a stream: its rules, their alerts per minute, and buttons.

    Returns None, and shows why, if `wanted` is false, the notebook runs non-interactively, or ipywidgets is missing.
    """

    def make() -> StreamDesk:
        from lookback.desk.streams import StreamDesk

        return StreamDesk(workspace.rules, workspace.stream)

    return _show_desk(make, wanted)


def show_health(workspace: Workspace) -> list[Finding]:
    """Shows whether the stream is healthy, and what to do if it is not."""
    from lookback.spark.checkpoints.checkpoint import Checkpoint
    from lookback.spark.operations.status import read_stream_figures, with_account

    tables, stream = workspace.tables, workspace.stream
    checkpoint = Checkpoint(tables.find_place(workspace.checkpoint("evaluate")))
    figures = with_account(tables, stream, read_stream_figures(tables, stream, checkpoint))
    findings = check_health(figures)
    _say(describe_health(figures, findings))
    if findings:
        rows = [{"level": each.level, "what": each.what, "what to do": each.remedy} for each in findings]
        show(pd.DataFrame(rows))
    for each in figures.warming:
        _say(f"Warming up: {describe_warm_up(each)}.")
    return findings


def show_alerts(workspace: Workspace, rule_id: str = "", days: float = 90) -> pd.DataFrame:
    """Shows the newest 100,000 alerts by rule, mode and verdict, and plots their times.

    `rule_id` selects one rule; empty for all. Alerts decided more than `days` ago are left out.
    """
    from pyspark.sql import functions as F  # noqa: N812

    from lookback.spark.review import queue_begins

    alerts = workspace.tables.read("alerts").where(F.col("stream") == workspace.stream.name)
    alerts = alerts.where(F.col("decided_at") >= F.lit(queue_begins(days)))
    alerts = alerts.where(F.col("rule_id") == rule_id) if rule_id else alerts
    kinds = ["rule_id", "mode", "verdict", "severity"]
    newest = to_frame(alerts.orderBy(F.col("event_time").desc()).limit(_MAX_DRAWN_ROWS).select("event_time", *kinds))
    counts = newest.groupby(kinds).size().rename("alerts").reset_index().sort_values("alerts", ascending=False)
    return _show_frame(counts, "No alerts yet.", pictures.plot_alerts_over_time(newest))


def show_log(workspace: Workspace, limit: int = 20) -> pd.DataFrame:
    """Shows the newest rows of rule_log: activated, paused and rejected rules, and failures."""
    newest = _read_newest(workspace, "rule_log", limit, "logged_at", "position")
    columns = ("logged_at", "rule_id", "version", "action", "arrival", "message")
    return _show_frame(to_frame(newest.select(*columns)), "The log is empty.")


def show_queue(workspace: Workspace, rule_id: str = "", limit: int = 20, days: float = 90) -> pd.DataFrame:
    """Shows the first alerts of the stream's open queue, by severity, and the total number waiting.

    Alerts decided more than `days` ago are left out, and a sentence says so.
    """
    from lookback.spark.review import note_on_older, note_on_snoozed, open_queue

    queue = open_queue(workspace.tables, rule_id or None, workspace.stream.name, days)
    # If few alerts wait, one pass over the tables is enough.
    frame = to_frame(queue.limit(_MAX_READ_ALERTS))
    waiting = len(frame) if len(frame) < _MAX_READ_ALERTS else queue.count()
    _say(f"{waiting:,} alerts wait for review" + (f"; the first {limit}:" if waiting > limit else "."))
    for note in (note_on_snoozed(workspace.tables, days), note_on_older(workspace.tables, days)):
        show(*([text(note)] if note else []))
    if len(frame):
        show(
            frame[["severity", "event_time", "rule_id", "key", "measures", "message", "alert_id", "revision"]].head(
                limit
            )
        )
    return frame.head(limit)


def show_reports(workspace: Workspace, rule_id: str = "", limit: int = 20, days: float = 90) -> pd.DataFrame:
    """Shows the newest reports of the stream: alerts of rules with `queue: false` or severity info, which need nobody.

    Reports made more than `days` ago are left out.
    """
    from pyspark.sql import functions as F  # noqa: N812

    from lookback.spark.review import open_queue

    reports = open_queue(workspace.tables, rule_id or None, workspace.stream.name, days, reports=True)
    newest = reports.orderBy(F.col("event_time").desc(), "rule_id", "alert_id").limit(limit)
    columns = ("event_time", "rule_id", "key", "measures", "message", "alert_id", "revision")
    return _show_frame(to_frame(newest.select(*columns)), "No rule has written a report.")


def open_desk(
    workspace: Workspace, rule_id: str = "", days: float = 90, reviewer: str = "", wanted: bool = True
) -> ReviewDesk | None:
    """Shows the review desk: the queue, one alert, and buttons to decide on it.

    `rule_id` and `days` are as in `show_queue`; `reviewer` defaults to the user who runs the notebook. Returns None,
    and shows why, if `wanted` is false, the notebook runs non-interactively, or ipywidgets is missing.
    """

    def make() -> ReviewDesk:
        from lookback.desk.records import AlertRecords
        from lookback.desk.review import ReviewDesk

        records = AlertRecords(
            workspace.tables, workspace.streams, stream=workspace.stream.name, rule_id=rule_id or None, days=days,
            reviewer=reviewer or None,
        )  # fmt: skip
        return ReviewDesk(records)

    return _show_desk(make, wanted)


def explain_alert(
    workspace: Workspace, alert_id: str = "", queue: pd.DataFrame | None = None, revision: str = ""
) -> Explanation | None:
    """Explains one alert: the rule in words, its measures, the events that counted, a chart.

    `alert_id` defaults to the first alert of `queue`, `revision` to the alert's last. Returns None, and shows a
    sentence, if the queue is empty. Raises ReviewError for an unknown alert, and SetupError if `revision` is not a
    number.
    """
    from lookback.spark.review import explain

    chosen = alert_id or (str(queue["alert_id"].iloc[0]) if queue is not None and len(queue) else "")
    if not chosen:
        _say("Nothing to explain: the queue is empty.")
        return None
    number = _parse_revision(revision) if alert_id else None
    explanation = explain(workspace.tables, workspace.streams, chosen, revision=number)
    show_explanation(explanation)
    return explanation


def explain_event(workspace: Workspace, rule_id: str = "", event_id: str = "") -> EventExplanation | None:
    """Explains how a rule judged an event, with or without an alert: every reason, the windows, and a chart.

    Returns None, and shows a sentence, if `event_id` is empty. Raises ReviewError if the rule or the event is unknown,
    and SetupError if `rule_id` is empty.
    """
    from lookback.spark.review import explain_event as explain

    if not event_id:
        _say("No event to explain: set event_id and rule_id to see how a rule judged an event.")
        return None
    if not rule_id:
        raise SetupError("event_id needs a rule: set rule_id too")
    found = explain(workspace.tables, workspace.streams, rule_id, event_id)
    show(*(text(line) for line in describe_event(found)))
    if found.picture is not None:
        show(plot_key_timeline(found.picture))
    return found


def _parse_revision(revision: str) -> int | None:
    if revision and not revision.isdecimal():
        raise SetupError(f"parameter revision must be a whole number or empty, got {revision!r}")
    return int(revision) if revision else None


def show_explanation(explanation: Explanation) -> None:
    """Shows the explanation as text, tables and a chart, with the newest 50 events that counted."""
    show(*(text(line) for line in describe_alert(explanation)))
    if explanation.measures:
        show(pd.DataFrame([_make_measure_row(measure) for measure in explanation.measures]))
    show(plot_key_timeline(explanation))
    for measure in explanation.measures:
        if measure.name == explanation.main:
            shown = measure.events.tail(_MAX_LISTED_EVENTS).iloc[::-1]
            show(text(f"Events that counted for {measure.name}: {len(measure.events):,}"), shown)
    for step in explanation.steps:
        _say(f"Step {step.name}, {step.words}: {_describe_taken(step)}")
        if len(step.events):
            show(step.events.head(_MAX_LISTED_EVENTS))


def _make_measure_row(measure: Any) -> dict[str, Any]:
    return {
        "measure": measure.name, "is": measure.words, "from": measure.window_start,
        "to" if measure.end_included else "to before": measure.window_end,
        "in the alert": measure.recorded, "recomputed": measure.recomputed, "events": len(measure.events),
    }  # fmt: skip


def _describe_taken(step: StepEvidence) -> str:
    number = count_noun(len(step.events), "event")
    return f"{number} came" if step.absent else f"{number}, in the order taken"


def review_alert(
    workspace: Workspace, explanation: Explanation | None, alert_id: str = "", disposition: str = "",
    reviewer: str = "", note: str = "",
) -> None:  # fmt: skip
    """Records your decision on the explained alert, with the revision that was shown.

    Args:
        workspace: Tables and streams.
        explanation: Result of `explain_alert`; None if the queue is empty.
        alert_id: The alert that you decide on. If empty, nothing is recorded, so that no decision lands on an alert
            that merely comes first in the queue.
        disposition: confirmed, false_positive, benign or unclear; empty to record nothing.
        reviewer: Default: the user who runs the notebook.
        note: Remark on the decision.

    Raises:
        ReviewError: If the decision cannot be recorded.
    """
    from lookback.spark.review import record_review

    if explanation is None or not disposition:
        _say("Nothing is recorded: set disposition to confirmed, false_positive, benign or unclear.")
        return
    shown = explanation.alert
    if alert_id != shown["alert_id"]:
        name = f"alert_id {shown['alert_id']} and revision {shown['revision']}"
        _say(f"Nothing is recorded: say which alert you decide on. For the one above, set {name}.")
        return
    show(text(str(record_review(
        workspace.tables, alert_id, disposition, reviewer or None, note, revision=shown["revision"]
    ))))  # fmt: skip


def snooze_alerts(
    workspace: Workspace, alert_id: str = "", rule_id: str = "", until: str = "", reason: str = "", author: str = ""
) -> None:
    """Hides alerts from the queue and from notifications for a while, and lists the snoozes that have not ended.

    Args:
        workspace: Tables and streams.
        alert_id: Snoozes alerts of this alert's rule and key.
        rule_id: Snoozes alerts of this rule, of any key, if alert_id is empty.
        until: A time, or a duration such as `8 hours`; empty to snooze nothing.
        reason: For readers who wonder where the alerts are.
        author: Default: the user who runs the notebook.

    Raises:
        ReviewError: If the alert or rule is unknown, or `until` is invalid.
        SetupError: If neither an alert nor a rule is given.
    """
    from lookback.spark.review import show_snoozes
    from lookback.spark.snoozes import EXPIRED, read_end, snooze

    if until:
        if not (alert_id or rule_id):
            raise SetupError("snooze_until needs something to snooze: set alert_id or rule_id too")
        show(text(str(snooze(
            workspace.tables, workspace.streams, alert_id or rule_id, until=read_end(until), reason=reason,
            author=author or None,
        ))))  # fmt: skip
    rows = [row for row in show_snoozes(workspace.tables) if row["state"] != EXPIRED]
    _show_frame(pd.DataFrame(rows), "Nothing is snoozed.")


def show_precision(workspace: Workspace, rule_id: str = "") -> pd.DataFrame:
    """Shows the decisions on the stream's alerts by rule; the last review of each alert counts.

    `rule_id` selects one rule; empty for all.
    """
    from pyspark.sql import functions as F  # noqa: N812

    from lookback.spark.review import decisions

    rows = decisions(workspace.tables).where(F.col("stream") == workspace.stream.name)
    frame = to_frame((rows.where(F.col("rule_id") == rule_id) if rule_id else rows).drop("stream"))
    return _show_frame(frame, "No alert has been reviewed yet.", pictures.plot_precision(frame))


def import_labels(workspace: Workspace, path: str = "", positive: str = "", event_id: str = "", at: str = "") -> None:
    """Appends the labels in a file to the table `labels`, and shows the outcome.

    Does nothing without a path.
    `positive`, `event_id` and `at` name columns of the file; see `lookback.spark.labels.import_labels` for the
    defaults.
    """
    from lookback.spark import labels

    if not path:
        _say("No labels imported: set the parameter labels to a file.")
        return
    report = labels.import_labels(
        workspace.tables, workspace.stream, path, event_id=event_id or None, positive=positive or None, at=at or None
    )
    show(text(str(report)), *(text(str(rejection)) for rejection in report.rejections))


def measure_rules(workspace: Workspace, rule_id: str = "", as_of: str = "") -> RuleFigures:
    """Shows precision and recall of the stream's rules, over time and in total, from labels and reviews.

    `rule_id` selects one rule; empty for all. Alerts and labels after the time `as_of` (empty: now) do not count.
    Returns the figures, for `show_overlap`.
    """
    from lookback.spark.figures import Period, RuleFigures

    period = Period(as_of=to_utc(parse_calendar_time(as_of)) if as_of else None)
    rules = [rule_id] if rule_id else None
    figures = RuleFigures(workspace.tables, workspace.stream, period, rules, streams=workspace.streams)
    days, by_rule = to_frame(figures.by_day()), to_frame(figures.by_rule())
    show(pictures.plot_rule_figures(days), by_rule)
    return figures


def show_overlap(figures: RuleFigures) -> pd.DataFrame:
    """Shows which rules flag the same events, what each catches alone, and which rules add nothing."""
    pairs, alone = to_frame(figures.pairs()), to_frame(figures.alone())
    show(pictures.plot_overlap(pairs, alone), alone)
    show(text(describe_redundant([{str(k): v for k, v in row.items()} for row in alone.to_dict("records")])))
    return alone
