"""The command line: what the notebooks do, for places without them."""

from __future__ import annotations

import argparse
import getpass
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from lookback.config import Settings, load_rule_document
from lookback.core.durations import parse_duration
from lookback.core.errors import LookbackError, RuleError, SetupError, StreamError
from lookback.remote.commands import DESCRIPTION as REMOTE
from lookback.remote.commands import add_commands
from lookback.rule_tests import check_rule
from lookback.terminal import as_json, print_health, print_json, print_table, visible

if TYPE_CHECKING:
    from lookback.core.streams import Stream
    from lookback.spark.ingest import IngestReport
    from lookback.spark.notify import Counts
    from lookback.spark.rules import RulesTable
    from lookback.spark.sink import BatchReport
    from lookback.spark.tables import Tables

FOUND_PROBLEMS, WRONG_USE = 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns 0, 1 for "found problems", 2 for wrong use."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options) or 0)
    except (RuleError, StreamError) as error:
        print(error, file=sys.stderr)
        return FOUND_PROBLEMS
    except LookbackError as error:
        print(f"lookback: {error}", file=sys.stderr)
        return WRONG_USE


def _parser() -> argparse.ArgumentParser:
    places = argparse.ArgumentParser(add_help=False)
    # Given before or after the command; SUPPRESS keeps the one from overwriting the other.
    places.add_argument("--root", default=argparse.SUPPRESS, help="folder of the tables (LOOKBACK_ROOT; ./lakehouse)")
    places.add_argument("--conf", default=argparse.SUPPRESS, help="folder of streams/ and rules/ (./conf)")
    places.add_argument(
        "--json", action="store_true", default=argparse.SUPPRESS, help="one JSON object a line for what is listed"
    )
    parser = argparse.ArgumentParser(prog="lookback", description=__doc__, parents=[places])
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int | None], text: str) -> Any:
        sub = commands.add_parser(name, help=text, description=text, parents=[places])
        sub.set_defaults(run=run)
        return sub

    command("init", _init, "create the tables of all declared streams; add comments that are missing")
    ingest = command("ingest", _ingest, "take files, or a Kafka topic, into a stream's events table")
    ingest.add_argument("stream")
    ingest.add_argument("path", nargs="?", help="file or folder (default: the stream's source, which may be a topic)")
    ingest.add_argument("--format", choices=["parquet", "csv", "json"])
    ingest.add_argument(
        "--retry-rejected", action="store_true",
        help="take in the rows of rejected_events, and the files, that can be read by now; they leave that table",
    )  # fmt: skip
    going = ingest.add_mutually_exclusive_group()
    going.add_argument("--every", metavar="DURATION", help="go on, looking so often for new files or records")
    going.add_argument(
        "--new", action="store_true", help="only files that have come since the last run with --new or --every"
    )
    ingest.add_argument(
        "--checkpoint",
        help="folder that remembers files or offsets of --new, --every and topics (default: below the root)",
    )
    ingest.add_argument(
        "--skip-lost", action="store_true", help="go on where Kafka has deleted records that were not read yet"
    )
    _rules_parser(command("rules", _rules_list, "publish, check and list rules"), places)
    evaluate = command("evaluate", _evaluate, "judge a stream's events by its rules")
    evaluate.add_argument("stream")
    how = evaluate.add_mutually_exclusive_group()
    how.add_argument("--once", action="store_true", help="judge what is there, then end")
    how.add_argument("--every", metavar="DURATION", help="how often to look for more (default: as the profile says)")
    evaluate.add_argument(
        "--profile", metavar="NAME", help="settings of CONF/profiles/NAME.yml (default: as conf/settings.yml says)"
    )
    evaluate.add_argument(
        "--idle-after", metavar="DURATION",
        help="after so much time without a new commit, and again each time, move the watermark on by as much",
    )  # fmt: skip
    evaluate.add_argument("--checkpoint", help="folder of the checkpoint (default: below the root)")
    evaluate.add_argument(
        "--shards", type=int, metavar="N",
        help="of a new checkpoint: into how many parts the keys are divided, for good (default: one for each core)",
    )  # fmt: skip
    begin = evaluate.add_mutually_exclusive_group()
    begin.add_argument(
        "--rebuild", action="store_true",
        help="move the checkpoint aside and make the state anew from the tables; what they have is not written again",
    )  # fmt: skip
    begin.add_argument(
        "--fresh", action="store_true",
        help="let a new checkpoint begin where alerts are already: all of them are written once more",
    )  # fmt: skip
    spread = command("repartition", _repartition, "divide the state of a stopped evaluation among more or fewer cores")
    spread.add_argument("stream")
    spread.add_argument("partitions", type=int, help="at most as many as the checkpoint has shards")
    spread.add_argument("--checkpoint", help="folder of the checkpoint (default: below the root)")
    advance = command("advance", _advance, "move a stream's watermark on where no events come")
    advance.add_argument("stream")
    advance.add_argument("time", help="the time that it is to reach, such as 2026-01-31T12:00:00Z; UTC without a zone")
    alerts = command("alerts", _alerts, "list alerts")
    alerts.add_argument("--rule", help="of this rule only")
    alerts.add_argument("--queue", action="store_true", help="the open queue: what nobody reviewed yet")
    notify = command("notify", _notify, "send alerts to the receivers of CONF/notifiers.yml")
    which = notify.add_mutually_exclusive_group(required=True)
    which.add_argument("stream", nargs="?", help="of this stream")
    which.add_argument("--all", action="store_true", help="of all declared streams")
    notify.add_argument("--once", action="store_true", help="send what is there, then end; 1 where some of it failed")
    notify.add_argument("--every", metavar="DURATION", default="10 seconds", help="how often to look (10 seconds)")
    notify.add_argument("--since", metavar="TIME", help="from when on a receiver that is new hears of alerts (now)")
    notify.add_argument(
        "--catalog", help="of Unity Catalog, where it is run on Databricks; with --schema, and a volume as --root"
    )
    notify.add_argument("--schema", help="the schema of the tables in it")
    review = command("review", _review, "record what an alert was")
    review.add_argument("alert_id")
    review.add_argument("--disposition", required=True, choices=["confirmed", "false_positive", "unclear"])
    review.add_argument("--note", default="")
    review.add_argument("--reviewer", default=None)
    forget = command("forget", _forget, "delete what the tables hold of some events, for a privacy request")
    forget.add_argument("stream")
    forget.add_argument(
        "--where", required=True, help="a condition over the stream's fields, such as 'customer_id = 17'"
    )
    forget.add_argument("--dry-run", action="store_true", help="count the rows; delete nothing")
    forget.add_argument("--yes", action="store_true", help="do not ask")
    forget.add_argument("--checkpoint", help="folder of the evaluation's checkpoint (default: below the root)")
    status = command("status", _status, "what the tables hold, and whether each stream is healthy")
    status.add_argument("--check", action="store_true", help="end with 1 where a stream needs a look, for a monitor")
    add_commands(commands.add_parser("remote", help="jobs of a Databricks workspace", description=REMOTE), places)
    command("maintain", _maintain, "OPTIMIZE and VACUUM all tables within their retention, look at the checkpoints")
    demo = command("demo", _demo, "the main job on real transactions, in a folder of its own")
    demo.add_argument("--events", help="Parquet file of transactions (default: the largest at hand)")
    return parser


def _rules_parser(parser: argparse.ArgumentParser, places: Any) -> None:
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int | None], text: str) -> Any:
        sub = commands.add_parser(name, help=text, description=text, parents=[places])
        sub.set_defaults(run=run)
        return sub

    push = command("push", _rules_push, "check rules and publish their next versions")
    push.add_argument("files", nargs="+")
    push.add_argument("--status", default="active", choices=["active", "draft", "shadow", "paused"])
    push.add_argument("--author", default="")
    push.add_argument("--comment", default="")
    check = command("check", _rules_check, "check rules and run their own tests; nothing is written")
    check.add_argument("files", nargs="+")
    command("list", _rules_list, "the last version of every rule")
    for name, status in (("pause", "paused"), ("resume", "active"), ("retire", "retired")):
        sub = command(name, _rules_status, f"publish a version with status {status}")
        sub.add_argument("rule_id")
        sub.add_argument("--author", default="")
        sub.add_argument("--comment", default="")
        sub.set_defaults(status=status)
    for name, text in (
        ("clear-state", "forget all window state of a stream; its rules go on with empty windows"),
        ("retire-all", "retire all rules of a stream"),
    ):
        sub = command(name, _rules_command, text)
        sub.add_argument("stream")
        sub.set_defaults(action=name.replace("-", "_"))
    command("schema", _rules_schema, "print the JSON Schema of rule documents, for editors")
    export = command("export", _rules_export, "print rules as YAML")
    export.add_argument("rule_id", nargs="?")


def _as_json(options: argparse.Namespace) -> bool:
    return bool(getattr(options, "json", False))


def _settings(options: argparse.Namespace) -> Settings:
    named = (getattr(options, name, None) for name in ("root", "conf", "profile"))
    return Settings.local(*named)


def _tables(settings: Settings, *streams: Stream, kafka: bool = False) -> Tables:
    from lookback.spark.session import get_spark
    from lookback.spark.tables import Tables

    return Tables.local(get_spark(settings=settings.spark, kafka=kafka), settings.root).holding(*streams)


def _rules_table(options: argparse.Namespace) -> RulesTable:
    from lookback.spark.rules import RulesTable

    settings = _settings(options)
    streams = settings.streams()
    tables = _tables(settings)
    if not tables.exists("rules"):
        for stream in [stream for stream in streams.values() if not stream.table] or streams.values():
            tables.create(stream)
    return RulesTable(tables, streams)


def _init(options: argparse.Namespace) -> int:
    from lookback.spark.catalog import REFUSED, set_up

    settings = _settings(options)
    streams = settings.streams()
    tables = _tables(settings, *streams.values())
    refused = [step for step in set_up(tables, streams) if step.done.startswith(REFUSED)]
    for name, stream in streams.items():
        print(f"{name}: {tables.path_or_name(name)}{' (others write it)' if stream.table else ''}")
    for step in refused:
        # Of a table that others write; the others are made.
        print(f"{step.thing}: {step.done}", file=sys.stderr)
    return FOUND_PROBLEMS if refused else 0


def _ingest(options: argparse.Namespace) -> None:
    from lookback.spark.fields import reads_kafka
    from lookback.spark.ingest import ingest, retry_rejected

    settings = _settings(options)
    stream = settings.stream(options.stream)
    progress = None if _as_json(options) else print
    if options.retry_rejected and (options.path or options.format):
        raise SetupError("--retry-rejected reads what rejected_events names; leave PATH and --format out")
    if options.retry_rejected:
        report = retry_rejected(_tables(settings), stream, progress=progress)
    elif reads_kafka(stream) and not (options.path or options.format):
        report = _ingest_topic(options, _tables(settings, kafka=True), stream)
    elif options.skip_lost:
        raise SetupError(f"--skip-lost is for Kafka topics, and stream {stream.name!r} is to read files")
    elif options.new or options.every:
        _ingest_new_files(options, _tables(settings), stream)
        return
    else:
        report = ingest(_tables(settings), stream, options.path, format=options.format, progress=progress)
    print(as_json(asdict(report)) if _as_json(options) else report)


def _ingest_topic(options: argparse.Namespace, tables: Tables, stream: Stream) -> IngestReport:
    from lookback.spark.topic_ingest import TopicIngest

    run = TopicIngest(
        tables, stream, options.checkpoint, every=options.every, skip_lost=options.skip_lost,
        progress=None if _as_json(options) else _say,
    )  # fmt: skip
    _on_signals(run.request_stop)
    return run.run()


def _ingest_new_files(options: argparse.Namespace, tables: Tables, stream: Stream) -> None:
    from lookback.spark.ingest import ingest_continuously

    checkpoint = options.checkpoint or f"{tables.root}/_checkpoints/ingest_{stream.name}"

    def show(report: IngestReport) -> None:
        _say(as_json(asdict(report)) if _as_json(options) else str(report))

    query = ingest_continuously(
        tables, stream, options.path, checkpoint=checkpoint, every=options.every, format=options.format, progress=show
    )
    stopping = threading.Event()
    _on_signals(stopping.set)
    while not (query.awaitTermination(0.2) or stopping.is_set()):  # type: ignore[arg-type]
        pass
    query.stop()


def _say(line: str) -> None:
    print(line, flush=True)


def _on_signals(stop: Callable[[], None]) -> None:
    """Both ways of ending a command let it finish what cannot be cut; a batch that is half done is left to the next start."""
    signal.signal(signal.SIGTERM, lambda *_: stop())
    signal.signal(signal.SIGINT, lambda *_: stop())


def _documents(options: argparse.Namespace) -> list[tuple[str, dict[str, Any]]]:
    return [(file, load_rule_document(file)) for file in options.files]


def _rules_check(options: argparse.Namespace) -> int:
    streams = _settings(options).streams()
    fine = [_is_fine(file, document, streams) for file, document in _documents(options)]
    return 0 if all(fine) else FOUND_PROBLEMS


def _is_fine(file: str, document: dict[str, Any], streams: Mapping[str, Stream]) -> bool:
    try:
        tests = len(check_rule(document, streams).rule.tests)
    except RuleError as error:
        print(f"{file}:\n{error}", file=sys.stderr)
        return False
    print(f"{file}: rule {document['rule_id']!r} is fine ({tests} {'test' if tests == 1 else 'tests'} of its own)")
    return True


def _rules_push(options: argparse.Namespace) -> int:
    # What can be found wrong without Spark is found before it starts, and before anything is published.
    if _rules_check(options):
        return FOUND_PROBLEMS
    rules = _rules_table(options)
    for _, document in _documents(options):
        for name in rules.cold_measures(document):
            text = (
                "starts empty, since no rule keeps its rows yet; window_complete is false until its window has filled"
            )
            print(f"warning: {document['rule_id']}: {name} {text}", file=sys.stderr)
        version = rules.push(document, status=options.status, author=options.author, comment=options.comment)
        print(f"published {document['rule_id']} version {version} ({options.status})")
    return 0


def _rules_status(options: argparse.Namespace) -> None:
    version = _rules_table(options).set_status(
        options.rule_id, options.status, author=options.author, comment=options.comment
    )
    print(f"published {options.rule_id} version {version} ({options.status})")


def _rules_list(options: argparse.Namespace) -> None:
    rows = [asdict(row) for row in _rules_table(options).rows()]
    if _as_json(options):
        print_json(rows)
        return
    for row in rows:
        document = row["document"] or {}
        row.update(stream=document.get("stream"), when=document.get("when"))
    print_table(rows, ("rule_id", "version", "status", "stream", "when", "author", "changed_at"))


def _rules_export(options: argparse.Namespace) -> None:
    documents = _rules_table(options).export(options.rule_id)
    print(yaml.safe_dump_all(documents, sort_keys=False, allow_unicode=True), end="")


def _rules_command(options: argparse.Namespace) -> None:
    _rules_table(options).command(options.action, options.stream)
    print(f"published {options.action} for {options.stream}")


def _rules_schema(options: argparse.Namespace) -> None:
    from lookback.core.schema import schema_text

    print(schema_text(), end="")


def _advance(options: argparse.Namespace) -> None:
    _rules_table(options).command("advance", options.stream, time=options.time)
    print(f"published advance of {options.stream} to {options.time}")


def _evaluate(options: argparse.Namespace) -> None:
    from lookback.spark.checkpoint import Checkpoint
    from lookback.spark.metrics import Metrics
    from lookback.spark.pipeline import Evaluation, checkpoint_folder

    settings = _settings(options)
    streams = settings.streams()
    stream = settings.stream(options.stream)
    idle_after = None if options.idle_after is None else parse_duration(options.idle_after)
    if idle_after is not None and options.once:
        raise SetupError("--idle-after waits for time to pass, and --once does not wait; leave one of them out")
    tables = _tables(settings, *streams.values())
    tables.create(stream)

    checkpoint = options.checkpoint or checkpoint_folder(tables, stream)
    metrics = Metrics(tables, stream, Checkpoint(Path(checkpoint)), settings.metrics)

    def show(report: BatchReport) -> None:
        metrics.add(report)
        print(as_json(_batch(report)) if _as_json(options) else _batch_line(report), flush=True)

    evaluation = Evaluation(
        tables, stream, streams, checkpoint,
        once=options.once, every=options.every or settings.every, admission=settings.admission, on_batch=show,
        idle_after=idle_after, shards=options.shards, rebuild=options.rebuild, fresh=options.fresh,
    )  # fmt: skip
    _on_signals(evaluation.request_stop)
    with metrics:
        evaluation.run()


def _repartition(options: argparse.Namespace) -> None:
    from lookback.spark.checkpoint import repartition
    from lookback.spark.pipeline import checkpoint_folder

    settings = _settings(options)
    stream, tables = settings.stream(options.stream), _tables(settings)
    folder = options.checkpoint or checkpoint_folder(tables, stream)
    repartition(tables.spark, folder, options.partitions)
    print(f"the state in {folder} has {options.partitions} partitions now")


def _batch(report: BatchReport) -> dict[str, Any]:
    return asdict(report)


def _batch_line(report: BatchReport) -> str:
    alerts = ", ".join(f"{rule} {count}" for rule, count in sorted(report.alerts.items())) or "none"
    changes = "".join(f"\n  {row['rule_id']} v{row['version']} {row['action']} {row['message']}" for row in report.log)
    seconds = (report.run_ms + report.write_ms) / 1_000
    late = f", {report.late:,} late ({report.discarded:,} discarded)" if report.late else ""
    failed = [f"{rule_id} {counts.failed:,}" for rule_id, counts in sorted(report.by_rule.items()) if counts.failed]
    return (
        f"batch {report.batch_id}: {report.events:,} events in {seconds:.1f} s, alerts: {alerts}, "
        f"{report.rules} rules, {report.state_rows:,} rows of state{late}"
        f"{', failed: ' + ', '.join(failed) if failed else ''}{changes}"
    )


def _alerts(options: argparse.Namespace) -> None:
    tables = _tables(_settings(options))
    if options.queue:
        from lookback.spark.review import open_queue

        frame = open_queue(tables, options.rule)
    else:
        from pyspark.sql import functions as F  # noqa: N812

        frame = tables.read("alerts").orderBy("arrival", "event_time", "event_id", "rule_id", "revision")
        frame = frame.where(F.col("rule_id") == options.rule) if options.rule else frame
    rows = [row.asDict() for row in frame.toLocalIterator()]
    if _as_json(options):
        print_json(rows)
    else:
        print_table(rows, ("alert_id", "event_time", "severity", "rule_id", "verdict", "message"))


def _notify(options: argparse.Namespace) -> int:
    from lookback.upkeep import notifier

    settings, every = _settings(options), parse_duration(options.every) / 1_000_000
    place = (str(settings.root), options.catalog or "", options.schema or "", settings.conf)
    sending = notifier(*place, options.stream or "", options.since or "")

    def show(counts: Counts) -> None:
        print(as_json(vars(counts)) if _as_json(options) else counts, flush=True)

    stop = threading.Event()
    _on_signals(stop.set)
    total = sending.run(once=options.once, every=every, stop=stop, report=show)
    return FOUND_PROBLEMS if options.once and (total.failed or total.given_up) else 0


def _review(options: argparse.Namespace) -> None:
    from lookback.spark.review import record_review

    reviewer = options.reviewer or getpass.getuser()
    record_review(_tables(_settings(options)), options.alert_id, options.disposition, reviewer, options.note)
    print(f"{options.alert_id}: {options.disposition}")


def _forget(options: argparse.Namespace) -> None:
    from lookback.spark.forget import forget, forget_condition
    from lookback.spark.pipeline import checkpoint_folder

    settings = _settings(options)
    stream = settings.stream(options.stream)
    forget_condition(stream, options.where)
    if not (options.dry_run or options.yes or sys.stdin.isatty()):
        raise SetupError("forget deletes for good: say --yes, or --dry-run to see what it would delete")
    tables = _tables(settings, stream)
    checkpoint = options.checkpoint or checkpoint_folder(tables, stream)
    dry_run = not options.yes or options.dry_run
    report = forget(tables, stream, options.where, dry_run=dry_run, checkpoint=checkpoint)
    if dry_run and not options.dry_run:
        print(report, file=sys.stderr if _as_json(options) else sys.stdout)
        if not _confirmed("Delete these rows for good? [y/N] "):
            print("nothing was deleted")
            return
        report = forget(tables, stream, options.where, checkpoint=checkpoint)
    print(as_json(asdict(report)) if _as_json(options) else report)


def _confirmed(question: str) -> bool:
    return input(question).strip().lower() in ("y", "yes")


def _status(options: argparse.Namespace) -> int:
    from lookback.spark.checkpoint import Checkpoint
    from lookback.spark.pipeline import checkpoint_folder
    from lookback.spark.status import stream_status

    settings = _settings(options)
    streams = settings.streams()
    tables = _tables(settings, *streams.values())
    rows = [
        stream_status(tables, stream, Checkpoint(Path(checkpoint_folder(tables, stream))))
        for stream in streams.values()
    ]
    if _as_json(options):
        print_json(rows)
    else:
        columns = (
            "stream",
            "events",
            "commits",
            "judged",
            "lag_commits",
            "rules",
            "alerts",
            "open",
            "late",
            "rejected",
        )
        print_table(rows, columns)
        print()
        for row in rows:
            print_health(row)
    return FOUND_PROBLEMS if options.check and not all(row["healthy"] for row in rows) else 0


def _maintain(options: argparse.Namespace) -> int:
    from lookback.spark.maintenance import maintain
    from lookback.upkeep import checkpoints_of

    settings = _settings(options)
    tables, streams = _tables(settings), settings.streams()
    done = maintain(tables, streams, checkpoints_of(str(tables.root), streams))
    rows = [asdict(each) for each in done.tables]
    if _as_json(options):
        print_json([*rows, *(asdict(each) for each in done.checkpoints)])
    else:
        print_table(rows, ("table", "files", "compacted", "written", "deleted", "keeps", "note"))
        for each in done.checkpoints:
            print("".join(map(visible, f"{each.level}: {each.what}")))
    return FOUND_PROBLEMS if done.problems else 0


def _demo(options: argparse.Namespace) -> None:
    from lookback.demo import run_demo

    settings = Settings.local(getattr(options, "root", None) or "./lakehouse/demo", getattr(options, "conf", None))
    run_demo(settings, None if options.events is None else Path(options.events))


if __name__ == "__main__":
    sys.exit(main())
