"""The operations that the command line and the notebooks share. They take options and return results; nothing is shown.

An operation that `lookback.spark` offers as one call has no second name here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lookback.config import Settings, load_receivers
from lookback.core.errors import Problem, SetupError
from lookback.core.rules.compiled import CompiledRule
from lookback.core.rules.compiling import compile_rule
from lookback.core.rules.memberships import find_unknown_lists
from lookback.core.rules.variants import read_varied, suggest_values
from lookback.core.rules.wording import describe_rule
from lookback.core.values.suggestions import suggest
from lookback.core.values.times import parse_calendar_time, to_utc
from lookback.places import parse_place
from lookback.senders import make_sender

if TYPE_CHECKING:
    from lookback.core.operations.notifications import Send
    from lookback.core.operations.receivers import Receiver
    from lookback.core.streams.declaration import Stream
    from lookback.spark.batches.sink import BatchReport
    from lookback.spark.ingest.topics import TopicIngest
    from lookback.spark.ingest.unions import UnionIngest
    from lookback.spark.operations.catalog import SetUpStep
    from lookback.spark.operations.forget import ForgetReport
    from lookback.spark.operations.grants import Grantees
    from lookback.spark.operations.maintenance import Maintenance
    from lookback.spark.operations.notify import Notifier
    from lookback.spark.replay.backtest import Backtest, Range
    from lookback.spark.replay.comparison import RunComparison
    from lookback.spark.rules import RulesTable
    from lookback.spark.stream.metrics import Metrics
    from lookback.spark.stream.pipeline import Evaluation
    from lookback.spark.tables.lakehouse import Tables
    from lookback.testing.trial import DocumentTrial

_Answer = TypeVar("_Answer")
# Gets lines about the progress of an operation.
Progress = Callable[[str], None]
NO_GATE = "conf/settings.yml has no gate: a version is active as soon as it is published as active."


@dataclass
class Workspace:
    """The settings of a place, and its streams, tables and rules, each opened when it is first used.

    Attributes:
        settings: Settings of the place.
        chosen: Name of the chosen stream; empty for none.
        announce: Receives a line before Spark starts.
        kafka: Whether Spark loads the library for topics.
        warehouse: Opens the tables over a SQL warehouse, without Spark; None to use Spark.
    """

    settings: Settings
    chosen: str = ""
    announce: Callable[[str], None] | None = None
    kafka: bool = False
    warehouse: Callable[[], Tables] | None = None

    @property
    def conf(self) -> Path:
        """The configuration folder."""
        return self.settings.conf

    @cached_property
    def streams(self) -> Mapping[str, Stream]:
        """The declared streams by name."""
        return self.settings.streams()

    @cached_property
    def stream(self) -> Stream:
        """The chosen stream. Raises SetupError if it is not declared."""
        return self.settings.stream(self.chosen)

    @cached_property
    def tables(self) -> Tables:
        """The tables of the place, and the external tables of its streams. Starts Spark."""
        streams = self.streams.values()
        return self.open_tables().holding(*streams)

    @cached_property
    def rules(self) -> RulesTable:
        """The rules table. Starts Spark."""
        return self.find_rules(self.tables)

    def open_tables(self) -> Tables:
        """Starts or finds Spark. Returns the tables of the place without those of other programs."""
        if self.warehouse is not None:
            return self.warehouse()
        from lookback.spark.platform.session import get_spark, has_session
        from lookback.spark.tables.lakehouse import Tables

        if self.announce is not None and not has_session():
            self.announce("starting Spark")
        return Tables.of(get_spark(settings=self.settings.spark, kafka=self.kafka), self.settings)

    def find_rules(self, tables: Tables) -> RulesTable:
        """Returns the rules table among `tables`; creates it in a local folder. Raises SetupError."""
        from lookback.spark.rules import RulesTable

        if tables.root is None:
            tables.require_table("rules")
        elif not tables.exists("rules"):
            own = [stream for stream in self.streams.values() if not stream.table]
            for stream in own or self.streams.values():
                tables.create(stream)
        return RulesTable(tables, self.streams, self.settings.gate is not None)

    def answer(self, compute: Callable[[Tables], _Answer]) -> _Answer:
        """Computes a result from the tables of the place, without starting Spark if possible.

        `compute` only reads, returns rows instead of frames, and may run twice: if the tables are not folders, or have
        features that only Spark reads reliably, Spark runs it again.
        """
        from lookback.spark.tables.answers import compute_at_once

        needs_engine = self.settings.catalog or self.warehouse is not None
        return compute_at_once(compute, None if needs_engine else self.settings.root, self.open_tables)

    def checkpoint(self, step: str) -> str:
        """Returns the checkpoint folder of a step for the chosen stream."""
        return self.tables.choose_checkpoint(step, self.stream)


def set_up(place: Workspace, landing: str = "", roles: Grantees | None = None) -> list[SetUpStep]:
    """Creates the missing parts of a place, and `landing`, the folder of arriving files. Returns a step for each part."""
    from lookback.spark.operations.catalog import set_up as run

    checkpoints = place.settings.root if place.settings.catalog else ""
    steps = run(place.tables, place.streams, checkpoints=checkpoints, landing=landing, roles=roles)
    if landing:
        parse_place(landing).mkdir(parents=True, exist_ok=True)
    return steps


def maintain(place: Workspace) -> Maintenance:
    """Deletes expired rows, runs OPTIMIZE and VACUUM on every table, and checks the checkpoint of every stream."""
    from lookback.spark.checkpoints.checkpoint import checkpoint_folder
    from lookback.spark.operations.maintenance import maintain as run

    tables, streams = place.tables, place.streams
    checkpoints = {name: checkpoint_folder(tables, stream) for name, stream in streams.items()}
    return run(tables, streams, checkpoints, place.settings.retention)


def forget(place: Workspace, where: str, *, dry_run: bool, checkpoint: str | None = None) -> ForgetReport:
    """Deletes all rows about the chosen stream's events that satisfy `where`; with `dry_run` it only counts them.

    `checkpoint` is the folder of the evaluation; None for the default one. Raises ExpressionError before Spark starts
    if `where` is not a condition on the stream's fields.
    """
    from lookback.spark.checkpoints.checkpoint import checkpoint_folder
    from lookback.spark.operations.forget import forget as run
    from lookback.spark.operations.forget import forget_condition

    forget_condition(place.stream, where)
    tables = place.tables
    folder = checkpoint or (checkpoint_folder(tables, place.stream) if tables.reaches_files else None)
    return run(tables, place.stream, where, dry_run=dry_run, checkpoint=folder, streams=list(place.streams.values()))


def make_senders(conf: Path) -> dict[Receiver, Send]:
    """Returns the receivers of CONF/notifiers.yml, each with the function that sends to it. Raises SetupError."""
    return {receiver: make_sender(receiver) for receiver in load_receivers(conf)}


def make_notifier(place: Workspace, since: str = "") -> Notifier:
    """Makes the notifier that sends the alerts of the chosen stream, or of all if none is chosen.

    It creates missing tables. `since` is the time from which a new receiver gets alerts, in UTC if it has no zone;
    empty for now. Raises SetupError if the receivers, the stream or `since` are invalid.
    """
    from lookback.spark.operations.notify import Notifier

    senders = make_senders(place.conf)
    try:
        start = to_utc(parse_calendar_time(since)) if since else None
    except ValueError:
        raise SetupError(f"{since!r:.100} is not a valid time; use 2026-01-31T12:00:00Z") from None
    streams = [place.stream] if place.chosen else list(place.streams.values())
    for stream in streams:
        place.tables.require(stream)
    return Notifier(place.tables, [stream.name for stream in streams], senders, start)


def open_ingest(
    place: Workspace, checkpoint: str | None = None, *, skip_lost: bool = False, **options: Any
) -> TopicIngest | UnionIngest | None:
    """Opens the ingest of the stream's topic, or of its members' events, with `every` and `progress`; None for files."""
    from lookback.spark.ingest.fields import reads_kafka
    from lookback.spark.ingest.topics import TopicIngest
    from lookback.spark.ingest.unions import UnionIngest

    stream = place.stream
    if reads_kafka(stream):
        place.kafka = True
        return TopicIngest(place.tables, stream, checkpoint, skip_lost=skip_lost, **options)
    return None if stream.union is None else UnionIngest(place.tables, place.streams, stream, checkpoint, **options)


def prepare_evaluation(
    place: Workspace,
    checkpoint: str = "",
    show: Callable[[BatchReport], None] | None = None,
    *,
    every: str = "",
    default_shards: int = 0,
    **how: Any,
) -> tuple[Evaluation, Metrics]:
    """Prepares the evaluation of the chosen stream, and the metrics of its batches.

    Args:
        place: Settings, tables and the chosen stream.
        checkpoint: Folder of the checkpoint; empty for the default.
        show: Receives the report of each batch.
        every: Pause between two micro-batches; empty for that of the settings.
        default_shards: Number of shards in a new checkpoint; 0 for that of the stream or the settings.
        **how: Other fields of `EvaluationOptions`.
    """
    from lookback.spark.checkpoints.checkpoint import Checkpoint, checkpoint_folder
    from lookback.spark.replay.histories import make_history
    from lookback.spark.stream.metrics import Metrics
    from lookback.spark.stream.options import EvaluationOptions
    from lookback.spark.stream.pipeline import Evaluation

    tables, stream, settings = place.tables, place.stream, place.settings
    folder = tables.find_place(checkpoint or checkpoint_folder(tables, stream))
    metrics = Metrics(tables, stream, Checkpoint(folder), settings.metrics)

    def take(report: BatchReport) -> None:
        metrics.add(report)
        if show is not None:
            show(report)

    options = EvaluationOptions(
        every=every or settings.every,
        admission=settings.admission,
        on_batch=take,
        default_shards=default_shards or stream.shards or settings.shards,
        accept_unknown=settings.accept_unknown_checkpoint,
        gate=settings.gate,
        historian=make_history,
    )
    return Evaluation(tables, stream, place.streams, folder, options, **how), metrics


def describe_checked(rule: CompiledRule) -> str:
    """Says that a rule can be published, and describes it in words."""
    tests = f"; {len(rule.spec.tests)} of its own tests passed" if rule.spec.tests else ""
    return f"{rule.spec.rule_id} can be published{tests}. {describe_rule(rule)}"


def describe_new_version(
    rules: RulesTable, rule_id: str, version: int, what: str = "", status: str | None = None
) -> list[str]:
    """Says what became of a rule's new version, and what is left to do for a draft.

    `what` says what it changes; `status` is read from the table if it is None.
    """
    status = status or next(row.status for row in rules.read_versions(rule_id) if row.version == version)
    if status != "draft":
        return [f"published {rule_id} version {version}{what or f' ({status})'}"]
    lines = [f"wrote {rule_id} version {version}{what} as a draft: it is not in force yet"]
    if rules.has_gate:
        lines.append(f"the settings have a gate: lookback rules activate {rule_id}")
    return lines


def describe_published(rule_id: str, version: int, status: str, then: str = "") -> str:
    """Says at a desk or in a notebook what became of a rule's new version; `then` what is left to do for a draft."""
    if status == "draft":
        return f"{rule_id} version {version} is a draft: it is not in force yet{then}."
    return f"{rule_id} is published as version {version}, {status}."


def require_rule(tables: Tables, rule_id: str) -> None:
    """Raises SetupError if no version of a rule was ever published."""
    from lookback.spark.rulerows import list_rule_ids

    ids = list_rule_ids(tables)
    if rule_id not in ids:
        raise SetupError(f"unknown rule {rule_id!r}; {suggest(rule_id, ids, '`lookback rules list` shows the rules')}")


def list_queue_notes(tables: Tables, days: float) -> list[str]:
    """Says how many alerts the open queue of the last `days` leaves out, as they are snoozed or older."""
    from lookback.spark.review import note_on_older, note_on_snoozed

    return list(filter(None, (note_on_snoozed(tables, days), note_on_older(tables, days))))


def list_snoozes(tables: Tables, *, with_ended: bool = False) -> list[dict[str, Any]]:
    """Lists the snoozes that have not ended, or all."""
    from lookback.spark.review import show_snoozes
    from lookback.spark.snoozes import EXPIRED

    return [row for row in show_snoozes(tables) if with_ended or row["state"] != EXPIRED]


def find_remarks_on_data(rule: CompiledRule, stream: Stream, tables: Tables, events: int) -> list[Problem]:
    """Returns remarks on a rule beside the newest `events` events of its stream and the lists that there are."""
    from lookback.data_remarks import find_data_remarks
    from lookback.spark.following.listfeed import read_contents
    from lookback.spark.lists import list_names
    from lookback.spark.tables.history import read_recent_events

    remarks = find_unknown_lists(rule, list_names(tables)) if rule.lists else []
    recent = read_recent_events(tables, stream, events) if tables.exists(stream.name) else ()
    if not len(recent):
        missing = f"{stream.name!r} has no events to check the rule against; ingest some first"
        return [*remarks, Problem("stream", missing)]
    return [*remarks, *find_data_remarks(rule, stream, recent, read_contents(tables, rule.lists))]


def try_rule(
    tables: Tables, document: Mapping[str, Any], stream: Stream, events: int, progress: Progress | None = None
) -> tuple[DocumentTrial, list[Problem]]:
    """Runs a rule over the newest `events` events of its stream. Returns the result, and what no event satisfies."""
    from lookback.data_remarks import find_data_remarks
    from lookback.spark.following.listfeed import read_contents
    from lookback.spark.tables.history import read_recent_events
    from lookback.testing.trial import run_trial

    rule = compile_rule(document, stream)
    recent, lists = read_recent_events(tables, stream, events), read_contents(tables, rule.lists)
    if progress is not None:
        progress(f"judging {len(recent):,} events")
    return run_trial(document, recent, stream, lists), find_data_remarks(rule, stream, recent, lists)


def draft_rule_tests(tables: Tables, document: Mapping[str, Any], stream: Stream, events: int) -> list[dict[str, Any]]:
    """Drafts tests of a rule from the newest `events` events of its stream. Raises RuleError and SetupError."""
    from lookback.spark.tables.history import read_recent_events
    from lookback.testing.drafts import draft_tests

    if not tables.exists(stream.name):
        raise SetupError(f"{stream.name!r} has no events to draft tests from; ingest some first")
    return draft_tests(document, read_recent_events(tables, stream, events), stream)


def read_what_if(document: Mapping[str, Any], vary: str, since: str) -> tuple[dict[str, Any], Range]:
    """Reads the values and the range of a what-if about a rule.

    `vary` has values such as `limit=500,1000`, several parameters separated by semicolons; empty for values around that
    of the first numeric parameter. `since` is the event time from which alerts count; empty for the first event. Raises
    ValueError, with a message for people, if one of them is invalid.
    """
    from lookback.spark.replay.backtest import Range

    varied = read_varied(part for part in vary.split(";") if part.strip())
    return {**(varied or suggest_values(document))}, Range(parse_calendar_time(since) if since else None)


def run_what_if(
    rules: RulesTable,
    document: Mapping[str, Any],
    varied: Mapping[str, Any],
    within: Range,
    against: str = "",
    progress: Progress | None = None,
) -> Backtest:
    """Runs a rule over all events of its stream with other values of its parameters. Nothing is published.

    `against` is the id of a rule whose active version to compare with; empty for none.
    """
    from lookback.spark.replay.backtest import Candidate, backtest

    candidate = Candidate(document, rules.next_version(str(document["rule_id"])))
    other = rules.find_version(against) if against else None
    compared = None if other is None else Candidate(dict(other.document or {}), other.version)
    stream = rules.streams[str(document.get("stream"))]
    return backtest(
        rules.tables,
        stream,
        [candidate],
        within,
        vary=varied,
        rows=False,
        against=compared,
        streams=rules.streams,
        progress=progress,
    )


def describe_comparisons(result: Backtest, varied: Iterable[str]) -> list[str]:
    """Says of each variant of a backtest how it differs from the version that it is compared with, if with any."""
    variants = zip(result.figures, result.comparisons, strict=False)
    return [describe_against(compared, {name: each.parameters[name] for name in varied}) for each, compared in variants]


def describe_against(compared: RunComparison, values: Mapping[str, Any]) -> str:
    """Says how the alerts of a rule differ from those of the version that it is compared with.

    `values` are those of the parameters that vary; they tell the lines of a what-if apart.
    """
    named = ", ".join(f"{name} = {value}" for name, value in values.items())
    return (
        f"Against {compared.rule_id} version {compared.version}{f', with {named}' if named else ''}: "
        f"{compared.sentence}."
    )
