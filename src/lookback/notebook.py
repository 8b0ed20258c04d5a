"""The functions that notebooks call, one a cell: parameters, the workspace, and a result to show for every step.

The same notebooks run in Jupyter and on Databricks. All results are shown as ordinary display objects, escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import pandas as pd
import yaml

from lookback.config import Settings, load_rule_document
from lookback.core.errors import RuleError, SetupError
from lookback.core.explaining.events import EventExplanation
from lookback.core.explaining.evidence import Explanation, StepEvidence
from lookback.core.operations.health import Finding, check_health, describe_health, describe_warm_up
from lookback.core.rules.compiled import compile_rule
from lookback.core.rules.document import read_rule
from lookback.core.rules.parameters import read_parameter
from lookback.core.rules.remarks import Remark, find_remarks
from lookback.core.rules.variants import read_varied, suggest_values
from lookback.core.rules.wording import describe_rule
from lookback.core.values.durations import parse_duration
from lookback.core.values.texts import count_noun
from lookback.core.values.times import parse_calendar_time, to_utc
from lookback.data_remarks import find_data_remarks
from lookback.parameters import check_mode
from lookback.parameters import parameters as parameters  # noqa: PLC0414 - notebooks find it here
from lookback.places import find_local_path
from lookback.testing.trial import Trial, run_trial
from lookback.views import pictures, whatif
from lookback.views.display import code, has_person, show, text, to_frame
from lookback.views.explanations import describe_alert, describe_event
from lookback.views.live import read_commit_times, watch
from lookback.views.terminal import describe_redundant
from lookback.views.timeline import plot_key_timeline

if TYPE_CHECKING:
    from lookback.core.rules.compiled import CompiledRule
    from lookback.core.rules.gate import Condition
    from lookback.core.streams.declaration import Stream
    from lookback.desk.authoring import Authoring
    from lookback.desk.review import ReviewDesk
    from lookback.desk.streams import StreamDesk
    from lookback.spark.batches.sink import BatchReport
    from lookback.spark.figures import RuleFigures
    from lookback.spark.ingest.files import IngestReport
    from lookback.spark.rules import RulesTable
    from lookback.spark.stream.metrics import Metrics
    from lookback.spark.stream.pipeline import Evaluation
    from lookback.spark.tables.lakehouse import Tables

_MAX_LISTED_EVENTS = 50
_MAX_READ_ALERTS = 1_000
_MAX_DRAWN_ROWS = 100_000
_WAIT_SECONDS = 60.0


class _HasWidget(Protocol):
    widget: Any


_Desk = TypeVar("_Desk", bound=_HasWidget)


@dataclass(frozen=True)
class Workspace:
    """The place of a notebook's work: its tables, the declared streams by name, the chosen stream, the settings."""

    tables: Tables
    streams: Mapping[str, Stream]
    stream: Stream
    settings: Settings

    @property
    def conf(self) -> Path:
        """The folder conf/."""
        return self.settings.conf

    @property
    def rules(self) -> RulesTable:
        """The rules table."""
        from lookback.spark.rules import RulesTable

        return RulesTable(self.tables, self.streams, self.settings.gate is not None)

    def checkpoint(self, step: str) -> str:
        """Returns the checkpoint folder of a step for the chosen stream; the command line shares that of `evaluate`."""
        return f"{self.tables.files}/_checkpoints/{step}_{self.stream.name}"


def open_workspace(
    root: str, catalog: str = "", schema: str = "", conf: str = "../conf", stream: str = "", profile: str = ""
) -> Workspace:
    """Starts or finds Spark, reads conf/, and checks the tables; in local folders it creates missing ones.

    With catalog and schema the tables are catalog.schema.<table> and `root` (a volume) holds checkpoints; without them
    they are folders below `root`. stream: one of conf/streams. profile: one of conf/profiles; empty: that of
    conf/settings.yml. Raises SetupError.
    """
    from lookback.spark.ingest.fields import reads_kafka
    from lookback.spark.platform.session import get_spark
    from lookback.spark.tables.lakehouse import Tables

    settings = Settings.local(root, conf, profile, catalog, schema)
    streams, chosen = settings.streams(), settings.stream(stream)
    spark = get_spark("lookback notebook", settings=settings.spark, kafka=reads_kafka(chosen))
    tables = Tables.of(spark, settings).holding(*streams.values())
    tables.require(chosen)
    show(text(f"Stream {stream} in {tables.place}; {len(streams)} streams declared in {settings.conf}."))
    return Workspace(tables, streams, chosen, settings)


def ingest_files(
    workspace: Workspace,
    path: str = "",
    format: str = "",
    mode: str = "once",
    every: str = "1 second",
    minutes: float = 0,
) -> IngestReport | None:
    """Takes in the files at `path` (empty: the stream's `source`, which may be a Kafka topic), and shows the account.

    mode `once`: the files that are there, or the records of a topic since the last run; `new`: files that came since the
    last run in mode new or continuous; `continuous`: files or records as they appear, for `minutes` (0: until
    interrupted); `retry`: rejected rows and files that can be read by now. A relative path that does not exist here is
    searched beside conf/. Returns the report of modes once and retry. Raises SetupError for an unknown mode, and for mode
    new or continuous with a single file.
    """
    from lookback.spark.ingest.fields import reads_kafka
    from lookback.spark.ingest.files import ingest, ingest_continuously, retry_rejected

    if check_mode(mode, "once", "new", "continuous", "retry") != "retry" and reads_kafka(workspace.stream) and not path:
        return _ingest_topic(workspace, every if mode == "continuous" else None, minutes)
    source = _find_source(workspace, path)
    if mode in ("once", "retry"):
        report = (
            retry_rejected(workspace.tables, workspace.stream, progress=None)
            if mode == "retry"
            else ingest(
                workspace.tables, workspace.stream, source, format=_find_format(workspace, path, format), progress=None
            )
        )
        _show_account(report)
        return report
    if Path(source).is_file():
        raise SetupError(f"mode {mode} watches a folder for new files, and {source} is one file; name its folder")
    query = ingest_continuously(
        workspace.tables, workspace.stream, source, checkpoint=workspace.checkpoint("ingest"),
        every=every if mode == "continuous" else None,
        format=_find_format(workspace, path, format), progress=lambda report: show(text(str(report))), warn=lambda sentence: show(text(sentence)),
    )  # fmt: skip
    try:
        query.awaitTermination(round(minutes * 60) or None)
    except KeyboardInterrupt:
        pass  # the person at the notebook has seen enough
    finally:
        query.stop()
    return None


def _ingest_topic(workspace: Workspace, every: str | None, minutes: float) -> IngestReport:
    from threading import Timer

    from lookback.spark.ingest.topics import TopicIngest

    run = TopicIngest(
        workspace.tables,
        workspace.stream,
        workspace.checkpoint("kafka"),
        every=every,
        progress=lambda line: show(text(line)),
    )
    timer = Timer(minutes * 60, run.request_stop)
    if every is not None and minutes:
        timer.start()
    try:
        report = run.run()
    finally:
        timer.cancel()
    _show_account(report)
    return report


def _show_account(report: IngestReport) -> None:
    """Shows the counts, the assumptions, and the rejected rows by kind of reason, with an example."""
    counts = {name: getattr(report, name) for name in ("offered", "ingested", "duplicates", "rejected", "commits")}
    account = pd.DataFrame([{**counts, "adds_up": report.balanced, "seconds": round(report.seconds, 1)}])
    show(account, text(str(report)), *([text(report.assumptions)] if report.assumptions else []))
    if report.rejections:
        show(pd.DataFrame([vars(each) for each in report.rejections]))
        show(
            text(f"All rejected rows are in the table rejected_events; `lookback rejected {report.stream}` lists them.")
        )


def _find_source(workspace: Workspace, path: str) -> str:
    chosen = path or str(workspace.stream.source.get("path") or "")
    beside = workspace.conf.resolve().parent / chosen
    is_beside = bool(chosen) and find_local_path(chosen) == Path(chosen).resolve() and not Path(chosen).exists()
    return str(beside) if is_beside else chosen


def _find_format(workspace: Workspace, path: str, format_: str) -> str | None:
    declared = workspace.stream.source.get("format") if not path else None
    return format_ or (None if declared is None else str(declared))


def show_rejected(workspace: Workspace, limit: int = 20) -> pd.DataFrame:
    """Shows the newest rejected rows, unchanged, with every reason."""
    from pyspark.sql import functions as F  # noqa: N812

    rows = workspace.tables.read("rejected_events").where(F.col("stream") == workspace.stream.name)
    frame = to_frame(rows.orderBy(F.col("ingested_at").desc(), "raw").limit(limit))
    show(frame if len(frame) else text("No row was rejected."))
    return frame


def show_events(workspace: Workspace, limit: int = 5) -> pd.DataFrame:
    """Shows the newest events of the stream's table, and a picture of the times of the newest 100,000."""
    from pyspark.sql import functions as F  # noqa: N812

    time = workspace.stream.event_time
    newest = workspace.tables.read_events(workspace.stream.name).orderBy(F.col(time).desc())
    frame = to_frame(newest.limit(limit))
    if not len(frame):
        show(text("The table holds no event yet."))
        return frame
    times = to_frame(newest.select(time).limit(_MAX_DRAWN_ROWS))[time]
    title = "Events over time" if len(times) < _MAX_DRAWN_ROWS else "The newest events over time"
    show(pictures.plot_events_over_time(times, title), frame)
    return frame


def rule_form(workspace: Workspace, form: SimpleNamespace) -> dict[str, Any]:
    """Makes the rule document that the parameters describe, or reads `rule_file`, and shows it.

    form: rule_file, or rule_id, description, severity, group_by (names with commas), where, window, measures (`name:
    aggregate`, several with semicolons or lines), when, parameters (`name: value`, likewise), message. The fields make a lookback rule, whose window ends at
    each event; a rule of any other kind comes from a rule_file, which is searched here, then in conf/rules.
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
    """Parses a list such as `total: sum(amount); n: count(*)` into name -> text."""
    parts = [part.partition(":") for part in listed.replace(";", "\n").splitlines() if part.strip()]
    return {name.strip(): text.strip() for name, _, text in parts}


def open_author_desk(workspace: Workspace, form: SimpleNamespace, wanted: bool = True) -> Authoring | None:
    """Shows a desk at which a person writes a rule: form, YAML, checks, trials, what-if, the gate, saving, publishing.

    form: as for `rule_form`, whose rule it begins with. wanted False: no desk, as in a job. Returns None, and shows a sentence,
    where nobody is at the notebook or ipywidgets is missing.
    """

    def make() -> Authoring:
        from lookback.desk.authoring import Authoring
        from lookback.desk.rule.text import RuleText

        document = None if form.rule_file else _make_document(workspace, form)
        text = RuleText.read(_find_rule_file(workspace, form)) if document is None else RuleText.of(document)
        return Authoring(workspace.rules, workspace.stream, workspace.settings, text)

    return _show_desk(make, wanted)


def _show_desk(make: Callable[[], _Desk], wanted: bool) -> _Desk | None:
    """Shows a desk where somebody is at the notebook, else a sentence. make: makes it, and imports ipywidgets."""
    if not (wanted and has_person()):
        show(text("No desk is shown, as nobody is at this notebook or the parameter desk is false."))
        return None
    try:
        desk = make()
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("ipywidgets"):
            raise
        show(text("The desk needs the package ipywidgets, which is not installed; the cells below do without it."))
        return None
    show(desk.widget)
    return desk


def check_rule(workspace: Workspace, document: Mapping[str, Any]) -> CompiledRule:
    """Checks a rule against its stream, runs its own tests, and describes it in words.

    All problems are shown as a table of places and remedies, and RuleError is raised. Remarks, which stop nothing, are
    shown too.
    """
    try:
        rule = workspace.rules.check(document)
    except RuleError as error:
        show(pd.DataFrame([{"place": p.place or "the document", "what to do": p.message} for p in error.problems]))
        raise
    tests = f"; {len(rule.spec.tests)} of its own tests passed" if rule.spec.tests else ""
    show(text(f"{rule.spec.rule_id} can be published{tests}. {describe_rule(rule)}"))
    _show_remarks(find_remarks(rule))
    return rule


def _show_remarks(remarks: Sequence[Remark]) -> None:
    """Shows the remarks as a table, if there are any."""
    if remarks:
        show(pd.DataFrame([{"place": each.place or "the document", "remark": each.message} for each in remarks]))


def try_rule(workspace: Workspace, document: Mapping[str, Any], events: int = 50_000) -> Trial:
    """Runs a rule over the newest `events` events of its stream, publishing nothing, and draws what it would have flagged.

    The evaluator is the stream's own; events go in the order in which they were ingested. A window that begins before
    the first of these events is incomplete. Windows, sessions and waits that are still open at the last of them have
    given no result yet. Retracted alerts are not drawn. Remarks name conditions that no event meets, such as a text that
    was never seen in its field.
    """
    from lookback.spark.following.listfeed import read_contents
    from lookback.spark.tables.history import read_recent_events

    stream = workspace.streams[str(document.get("stream"))]
    rule = compile_rule(document, stream)
    recent, lists = read_recent_events(workspace.tables, stream, events), read_contents(workspace.tables, rule.lists)
    trial = run_trial(document, recent, stream, lists)
    title = f"{document.get('rule_id')}: what it would have flagged"
    measured: dict[str, Any] = {"values": trial.values, "name": trial.name, "limits": trial.limits}
    show(pictures.plot_flagged(trial.events, trial.final_alerts, stream.event_time, title, **measured))
    if len(trial.alerts):
        columns = ["window_start", "event_time", "severity", "key", "measures", "message", "verdict"]
        show(trial.alerts[columns].tail(10).iloc[::-1])
    if len(trial.errors):
        show(trial.errors)
    _show_remarks(find_data_remarks(rule, stream, recent, lists))
    return trial


def backtest_rule(
    workspace: Workspace, document: Mapping[str, Any], run: bool = True, since: str = "", vary: str = "",
    budget: float = 0, against: str = "",
) -> pd.DataFrame | None:  # fmt: skip
    """Judges all events of the rule's stream by it, publishing nothing, and draws what other values of a parameter raise.

    run False: nothing is judged. since: the event time from which on it speaks; empty: the first. vary: values such as
    `limit=500,1000,2000`, several parameters with semicolons; empty: the first number among its parameters, from a quarter
    to four times. budget: the alerts that a team can look at in a day, 0 for none. against: the id of a rule whose active
    version is compared. Returns the figures. Raises SetupError for wrong values, and RuleError.
    """
    from lookback.spark.replay.backtest import Candidate, Range, backtest

    if not run:
        show(text("Not judged: set the parameter backtest to true."))
        return None
    candidate = Candidate(document, workspace.rules.next_version(str(document["rule_id"])))
    try:
        varied: dict[str, Any] = {**read_varied(part for part in vary.split(";") if part.strip())}
        within = Range(parse_calendar_time(since) if since else None)
    except ValueError as error:
        raise SetupError(f"vary or since: {error}") from None
    varied = varied or suggest_values(document)
    other = workspace.rules.find_version(against) if against else None
    compared = None if other is None else Candidate(dict(other.document or {}), other.version)
    stream = workspace.streams[str(document.get("stream"))]
    with backtest(
        workspace.tables, stream, [candidate], within, vary=varied, rows=False, against=compared, streams=workspace.streams
    ) as result:  # fmt: skip
        frame = pd.DataFrame([{**vars(each), **each.parameters} for each in result.figures]).drop(columns="parameters")
        shown = [*varied, "alerts", "alerts_per_day", "keys", "flagged", "positives", "precision", "recall"]
        show(frame[shown])
        for name in list(varied)[:1]:
            today = (document.get("parameters") or {}).get(name)
            show(whatif.plot_alerts_by_value(result.figures, name, today=today, budget=budget or None))
            show(whatif.plot_precision_by_value(result.figures, name, today=today))
        show(*(text(f"Beside {each.rule_id} version {each.version}: {each.sentence}.") for each in result.comparisons))
    show(text(f"{document['rule_id']} over {result.events:,} events; nothing was published."))
    return frame


def edit_list(
    workspace: Workspace, name: str = "", add: str = "", remove: str = "", until: str = "", reason: str = "",
    kind: str = "", author: str = "",
) -> None:  # fmt: skip
    """Puts values on a list that rules look up with `in_list(field, 'name')`, takes others off, and shows all lists.

    name: the list; empty: nothing is changed. add, remove: values with commas. until: a time, or a duration such as `30 days`,
    from which on events are not on the list; empty: never. reason: why they are on it. kind: cidr for ranges of addresses.
    author: default: the user who runs the notebook. Raises SetupError.
    """
    from lookback.spark.lists import add_values, read_until, remove_values, show_lists

    if (add or remove) and not name:
        raise SetupError("list_add and list_remove name values, and list_name the list: set it too")
    added, removed = ([part.strip() for part in each.split(",") if part.strip()] for each in (add, remove))
    if removed:
        show(text(str(remove_values(workspace.tables, name, removed))))
    if added:
        show(text(str(add_values(
            workspace.tables, name, added, until=read_until(until) if until else None, reason=reason or None,
            kind=kind or None, author=author or None,
        ))))  # fmt: skip
    rows = show_lists(workspace.tables)
    show(pd.DataFrame(rows) if rows else text("There are no lists yet."))


def publish_rule(
    workspace: Workspace, document: Mapping[str, Any], status: str = "active", publish: bool = True,
    author: str = "", comment: str = "",
) -> int | None:  # fmt: skip
    """Appends the rule's next version with a status, if `publish` is true; a running stream applies it in seconds."""
    if not publish:
        show(text("Not published: set the parameter publish to true."))
        return None
    version = workspace.rules.push(document, status=status, author=author, comment=comment)
    status = workspace.rules.choose_status(status)
    show(text(f"{document['rule_id']} is published as version {version}, {status}."))
    return version


def check_gate(
    workspace: Workspace, document: Mapping[str, Any], run: bool = True, activate: bool = False, author: str = "",
    comment: str = "",
) -> int | None:  # fmt: skip
    """Shows what the gate of the settings asks of a rule, each condition with its figure and remedy.

    run False: nothing is checked. activate: make the version in the table that has this document active if all is met; else
    nothing is written. author: who approves it; empty: who runs the notebook. Returns the number of the new version; None if
    there is none. Raises SetupError if the version in the table has another document, and RuleError.
    """
    from lookback.core.rules.gate import Gate, hash_document
    from lookback.spark.activation import activate as make_active
    from lookback.spark.activation import check_document, find_candidate

    gate, rules, rule_id = workspace.settings.gate, workspace.rules, str(document["rule_id"])
    if not (run or activate):
        show(text("Not checked: set the parameter gate to true."))
        return None
    if gate is None:
        show(text("conf/settings.yml has no gate: a version is active as soon as it is published as active."))
        if not activate:
            return None
    if not activate:
        _show_conditions(check_document(rules, document, gate or Gate(), author=author))
        show(text(f"{rule_id} was checked as it stands here; to make it active, set the parameter activate to true."))
        return None
    there = find_candidate(rules, rule_id)
    if hash_document(there.document or {}) != hash_document(document):
        raise SetupError(
            f"version {there.version} of {rule_id} in the table has another document: set the parameter publish to true, and "
            "status to draft, and activate it then"
        )
    found = make_active(rules, rule_id, gate or Gate(), approver=author, comment=comment)
    _show_conditions(found.conditions)
    done = "is not active: not all is met" if found.version is None else f"is active as version {found.version}"
    show(text(f"Version {found.candidate} of {rule_id} {done}."))
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
    frame = pd.DataFrame(rows)
    show(frame if rows else text("No rule is published yet."))
    return frame


def evaluate_stream(
    workspace: Workspace, mode: str = "once", every: str = "", minutes: float = 0, idle_after: str = "", shards: int = 0,
    view: str = "auto", desk: StreamDesk | None = None,
) -> list[BatchReport]:  # fmt: skip
    """Judges the stream's events by the rules in force and shows the progress; returns the reports of its batches.

    mode `once`: all events that have arrived, then end; `rebuild`: the same, with the state rebuilt from the tables (see
    docs/operations.md); `continuous`: for `minutes`, 0 without end. every: the pause between two micro-batches; empty: as
    the profile says. idle_after: a duration; for each such time without a new commit a continuous evaluation moves the
    watermark on by as much. shards: the number for a new checkpoint; 0: as the stream or conf/settings.yml says, else as
    many as the cluster has cores, at most 48. view: `live`, a picture that is refreshed every second; `lines`, for jobs;
    `auto`, see `lookback.views.live.watch`; `desk`: a continuous evaluation runs beside `desk`, and the cell ends at once. An
    interrupt of the cell ends it cleanly, as Stop at the desk does; a half-done batch is repeated at the next start.
    """
    from lookback.spark.checkpoints.checkpoint import Checkpoint
    from lookback.spark.replay.histories import HistoryMaker
    from lookback.spark.stream.metrics import Metrics
    from lookback.spark.stream.pipeline import Evaluation

    once = check_mode(mode, "once", "rebuild", "continuous") != "continuous"
    if not any(row.status in ("active", "shadow") for row in workspace.rules.rows()):
        show(text("No rule is in force: publish one with 02_author_rules, or with `lookback rules push`."))
    folder = workspace.checkpoint("evaluate")
    metrics = Metrics(
        workspace.tables, workspace.stream, Checkpoint(workspace.tables.find_place(folder)), workspace.settings.metrics
    )
    evaluation = Evaluation(
        workspace.tables, workspace.stream, workspace.streams, folder, once=once,
        every=every or workspace.settings.every, admission=workspace.settings.admission, on_batch=metrics.add,
        idle_after=parse_duration(idle_after) if idle_after and not once else None, rebuild=mode == "rebuild",
        default_shards=shards or workspace.stream.shards or workspace.settings.shards,
        accept_unknown=workspace.settings.accept_unknown_checkpoint, gate=workspace.settings.gate, historian=HistoryMaker(),
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
    """Runs an evaluation in a thread, with its metrics, for `minutes`, 0 until it is stopped."""
    from contextlib import suppress
    from threading import Thread

    evaluation.start()

    def keep() -> None:
        # Whoever stops the evaluation is told how it failed; here that is only written into the metrics.
        with suppress(Exception), metrics:
            if minutes:
                evaluation.wait(minutes * 60)
                evaluation.request_stop()
            while not evaluation.wait(_WAIT_SECONDS):
                pass
            evaluation.stop()

    Thread(target=keep, name="evaluate-beside", daemon=True).start()


def open_stream_desk(workspace: Workspace, wanted: bool = True) -> StreamDesk | None:
    """Shows a desk to steer a stream where somebody is at the notebook: its rules, their alerts a minute, and buttons.

    wanted False: no desk, as in a job. Returns None, and shows a sentence, where nobody is or ipywidgets is missing.
    """

    def make() -> StreamDesk:
        from lookback.desk.streams import StreamDesk

        return StreamDesk(workspace.rules, workspace.stream)

    return _show_desk(make, wanted)


def show_health(workspace: Workspace) -> list[Finding]:
    """Shows in words whether the stream is healthy, and what to do if it is not."""
    from lookback.spark.checkpoints.checkpoint import Checkpoint
    from lookback.spark.operations.status import read_stream_figures, with_account

    tables, stream = workspace.tables, workspace.stream
    checkpoint = Checkpoint(tables.find_place(workspace.checkpoint("evaluate")))
    figures = with_account(tables, stream, read_stream_figures(tables, stream, checkpoint))
    findings = check_health(figures)
    show(text(describe_health(figures, findings)))
    if findings:
        rows = [{"level": each.level, "what": each.what, "what to do": each.remedy} for each in findings]
        show(pd.DataFrame(rows))
    for each in figures.warming:
        show(text(f"Warming: {describe_warm_up(each)}."))
    return findings


def show_alerts(workspace: Workspace, rule_id: str = "", days: float = 90) -> pd.DataFrame:
    """Shows the alerts per rule, mode and verdict (of the newest 100,000), and their times; of one rule or of all.

    days: alerts decided longer ago are left out.
    """
    from pyspark.sql import functions as F  # noqa: N812

    from lookback.spark.review import queue_begins

    alerts = workspace.tables.read("alerts").where(F.col("stream") == workspace.stream.name)
    alerts = alerts.where(F.col("decided_at") >= F.lit(queue_begins(days)))
    alerts = alerts.where(F.col("rule_id") == rule_id) if rule_id else alerts
    kinds = ["rule_id", "mode", "verdict", "severity"]
    newest = to_frame(alerts.orderBy(F.col("event_time").desc()).limit(_MAX_DRAWN_ROWS).select("event_time", *kinds))
    counts = newest.groupby(kinds).size().rename("alerts").reset_index().sort_values("alerts", ascending=False)
    show(pictures.plot_alerts_over_time(newest), counts if len(counts) else text("There are no alerts yet."))
    return counts


def show_log(workspace: Workspace, limit: int = 20) -> pd.DataFrame:
    """Shows the newest rows of rule_log: rules activated, paused or rejected, and failures."""
    from pyspark.sql import functions as F  # noqa: N812

    rows = workspace.tables.read("rule_log").where(F.col("stream") == workspace.stream.name)
    newest = rows.orderBy(F.col("logged_at").desc(), "rule_id", "version").limit(limit)
    frame = to_frame(newest.select("logged_at", "rule_id", "version", "action", "arrival", "message"))
    show(frame if len(frame) else text("Nothing is logged yet."))
    return frame


def show_queue(workspace: Workspace, rule_id: str = "", limit: int = 20, days: float = 90) -> pd.DataFrame:
    """Shows the first alerts of the stream's open queue, by severity, and how many wait in all.

    days: alerts decided longer ago are left out, and a sentence says so.
    """
    from lookback.spark.review import note_on_older, note_on_snoozed, open_queue

    queue = open_queue(workspace.tables, rule_id or None, workspace.stream.name, days)
    # One pass over the tables is enough if few alerts wait.
    frame = to_frame(queue.limit(_MAX_READ_ALERTS))
    waiting = len(frame) if len(frame) < _MAX_READ_ALERTS else queue.count()
    show(text(f"{waiting:,} alerts wait for review" + (f"; the first {limit}:" if waiting > limit else ".")))
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
    """Shows the newest reports of the stream: alerts of rules with `queue: false` or severity info, which wait for nobody.

    days: reports made longer ago are left out.
    """
    from pyspark.sql import functions as F  # noqa: N812

    from lookback.spark.review import open_queue

    reports = open_queue(workspace.tables, rule_id or None, workspace.stream.name, days, reports=True)
    newest = reports.orderBy(F.col("event_time").desc(), "rule_id", "alert_id").limit(limit)
    frame = to_frame(newest.select("event_time", "rule_id", "key", "measures", "message", "alert_id", "revision"))
    show(frame if len(frame) else text("No rule has written a report."))
    return frame


def open_desk(
    workspace: Workspace, rule_id: str = "", days: float = 90, reviewer: str = "", wanted: bool = True
) -> ReviewDesk | None:
    """Shows the review desk where somebody is at the notebook: the queue, one alert, and buttons to decide on it.

    rule_id, days: as for `show_queue`. reviewer: default: the user who runs the notebook. wanted False: no desk, as in a job.
    Returns None, and shows a sentence, where nobody is or ipywidgets is missing.
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
    """Explains one alert (empty: the first of `queue`): the rule in words, its measures, the events that counted, a picture.

    revision: the number of the alert's row; empty: its last. Returns None, and shows a sentence, if the queue is empty.
    Raises ReviewError for an unknown alert, SetupError if `revision` is not a number.
    """
    from lookback.spark.review import explain

    chosen = alert_id or (str(queue["alert_id"].iloc[0]) if queue is not None and len(queue) else "")
    if not chosen:
        show(text("There is no alert to explain: the queue is empty."))
        return None
    number = _parse_revision(revision) if alert_id else None
    explanation = explain(workspace.tables, workspace.streams, chosen, revision=number)
    show_explanation(explanation)
    return explanation


def explain_event(workspace: Workspace, rule_id: str = "", event_id: str = "") -> EventExplanation | None:
    """Explains how a rule judged an event, also where no alert came of it: every reason, the windows, and a picture.

    event_id: of the stream; empty: a sentence is shown, and None returned. Raises ReviewError if there is no such rule or
    event, SetupError if `rule_id` is empty.
    """
    from lookback.spark.review import explain_event as explain

    if not event_id:
        show(text("No event is named: event_id, with rule_id, shows what a rule made of an event."))
        return None
    if not rule_id:
        raise SetupError("event_id says which event, and rule_id which rule: set both")
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
    """Shows the explanation as text, tables and a picture; it lists the newest 50 events that counted."""
    show(*(text(line) for line in describe_alert(explanation)))
    if explanation.measures:
        show(pd.DataFrame([_make_measure_row(measure) for measure in explanation.measures]))
    show(plot_key_timeline(explanation))
    for measure in explanation.measures:
        if measure.name == explanation.main:
            shown = measure.events.tail(_MAX_LISTED_EVENTS).iloc[::-1]
            show(text(f"Events that counted for {measure.name}: {len(measure.events):,}"), shown)
    for step in explanation.steps:
        show(text(f"Step {step.name}, {step.words}: {_describe_taken(step)}"))
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
    """Records a person's decision about the explained alert, with the revision that was shown.

    explanation: the result of `explain_alert`; None if the queue is empty. alert_id: the alert that the decision is about;
    empty: nothing is recorded, so that no decision falls on an alert that merely comes first in the queue. disposition:
    confirmed, false_positive, benign or unclear; empty: nothing is recorded. reviewer: default: the user who runs the notebook.
    Raises ReviewError.
    """
    from lookback.spark.review import record_review

    if explanation is None or not disposition:
        show(text("Nothing is recorded: give a disposition, one of confirmed, false_positive, benign, unclear."))
        return
    shown = explanation.alert
    if alert_id != shown["alert_id"]:
        name = f"alert_id {shown['alert_id']} and revision {shown['revision']}"
        show(text(f"Nothing is recorded: a decision names its alert. To decide on the one above, give {name}."))
        return
    show(text(str(record_review(
        workspace.tables, alert_id, disposition, reviewer or None, note, revision=shown["revision"]
    ))))  # fmt: skip


def snooze_alerts(
    workspace: Workspace, alert_id: str = "", rule_id: str = "", until: str = "", reason: str = "", author: str = ""
) -> None:
    """Leaves alerts out of the queue and of notifications for a while, and lists the snoozes that have not ended.

    alert_id: those of this alert's rule and key; empty: those of the rule `rule_id`, of any key. until: a time, or a duration
    such as `8 hours`; empty: nothing is snoozed. reason: for those who wonder where the alerts are. author: default: the user
    who runs the notebook. Raises ReviewError, and SetupError if neither is named.
    """
    from lookback.spark.review import show_snoozes
    from lookback.spark.snoozes import EXPIRED, read_end, snooze

    if until:
        if not (alert_id or rule_id):
            raise SetupError("snooze_until says how long, and alert_id or rule_id what is snoozed: set one of them too")
        show(text(str(snooze(
            workspace.tables, workspace.streams, alert_id or rule_id, until=read_end(until), reason=reason,
            author=author or None,
        ))))  # fmt: skip
    rows = [row for row in show_snoozes(workspace.tables) if row["state"] != EXPIRED]
    show(pd.DataFrame(rows) if rows else text("Nothing is snoozed."))


def show_precision(workspace: Workspace, rule_id: str = "") -> pd.DataFrame:
    """Shows, by rule, the decisions about the stream's alerts; the last review of each alert counts. For one rule or all."""
    from pyspark.sql import functions as F  # noqa: N812

    from lookback.spark.review import decisions

    rows = decisions(workspace.tables).where(F.col("stream") == workspace.stream.name)
    frame = to_frame((rows.where(F.col("rule_id") == rule_id) if rule_id else rows).drop("stream"))
    show(pictures.plot_precision(frame), frame if len(frame) else text("No alert has been reviewed yet."))
    return frame


def import_labels(workspace: Workspace, path: str = "", positive: str = "", event_id: str = "", at: str = "") -> None:
    """Appends the labels in a file to the table `labels`, and shows what became of each row; nothing without a path.

    positive, event_id, at: the columns of the file, see `lookback.spark.labels.import_labels`; empty: its defaults.
    """
    from lookback.spark import labels

    if not path:
        show(text("No labels are imported: give a file in the parameter labels."))
        return
    report = labels.import_labels(
        workspace.tables, workspace.stream, path, event_id=event_id or None, positive=positive or None, at=at or None
    )
    show(text(str(report)), *(text(str(rejection)) for rejection in report.rejections))


def measure_rules(workspace: Workspace, rule_id: str = "", as_of: str = "") -> RuleFigures:
    """Shows precision and recall of the stream's rules, over time and in all, by labels and reviews. For one rule or all.

    as_of: a time; alerts and labels of later do not count; empty: now. Returns the figures, for `show_overlap`.
    """
    from lookback.spark.figures import Period, RuleFigures

    period = Period(as_of=to_utc(parse_calendar_time(as_of)) if as_of else None)
    rules = [rule_id] if rule_id else None
    figures = RuleFigures(workspace.tables, workspace.stream, period, rules, streams=workspace.streams)
    days, by_rule = to_frame(figures.by_day()), to_frame(figures.by_rule())
    show(pictures.plot_rule_figures(days), by_rule)
    return figures


def show_overlap(figures: RuleFigures) -> pd.DataFrame:
    """Shows which rules flag the same events and what each catches alone, and names those that add nothing."""
    pairs, alone = to_frame(figures.pairs()), to_frame(figures.alone())
    show(pictures.plot_overlap(pairs, alone), alone)
    show(text(describe_redundant([{str(k): v for k, v in row.items()} for row in alone.to_dict("records")])))
    return alone
