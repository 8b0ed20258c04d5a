"""Commands on streams: draft a declaration, ingest, evaluate, repartition."""

from __future__ import annotations

import argparse
import sys
import threading
from dataclasses import asdict
from typing import TYPE_CHECKING

import yaml

from lookback.commands.options import (
    FOUND_PROBLEMS,
    AddCommand,
    announce,
    load_settings,
    make_adder,
    open_tables,
    print_line,
    stop_on_signals,
    wants_json,
)
from lookback.core.errors import SetupError, StreamError
from lookback.core.streams.declaration import Stream
from lookback.core.values.durations import parse_duration
from lookback.core.values.texts import escape_unprintable
from lookback.views.terminal import describe_change, format_json, print_document, print_json, print_table

if TYPE_CHECKING:
    from lookback.spark.batches.sink import BatchReport
    from lookback.spark.ingest.files import IngestReport
    from lookback.spark.tables.lakehouse import Tables


def add_commands(command: AddCommand, places: argparse.ArgumentParser) -> None:
    """Adds these commands. `places` has the options of all commands."""
    stream = command("stream", _draft_stream, "declare a stream")
    new = make_adder(stream.add_subparsers(title="commands", required=True, metavar="COMMAND"), places)(
        "new", _draft_stream, "draft the declaration of a stream from a file of its events, for you to edit"
    )
    new.add_argument("file", help="a CSV, JSON lines or Parquet file, or a folder of them")
    new.add_argument("--name", default="", help="the stream's name (default: the file's)")
    new.add_argument(
        "--format", choices=["parquet", "csv", "json"], default="", help="needed if the suffix does not show it"
    )
    new.add_argument("--write", action="store_true", help="write CONF/streams/NAME.yml, unless it exists; else print")
    ingest = command("ingest", _ingest, "ingest files, or a Kafka topic, into a stream's events table")
    ingest.add_argument("stream")
    ingest.add_argument("path", nargs="?", help="file or folder (default: the stream's source, which may be a topic)")
    ingest.add_argument("--format", choices=["parquet", "csv", "json"])
    ingest.add_argument(
        "--retry-rejected", action="store_true",
        help="ingest rows of rejected_events, and files, that are readable by now; they leave that table",
    )  # fmt: skip
    mode = ingest.add_mutually_exclusive_group()
    mode.add_argument(
        "--every", metavar="DURATION", help="keep running, and look for new files or records at this interval"
    )
    mode.add_argument("--new", action="store_true", help="only files added since the last run with --new or --every")
    ingest.add_argument(
        "--checkpoint",
        help="folder that keeps the files or offsets of --new, --every and topics (default: below the root)",
    )
    ingest.add_argument(
        "--skip-lost", action="store_true", help="continue even if Kafka has deleted records that were not read yet"
    )
    rejected = command("rejected", _list_rejected, "list the rows that ingest could not use, and why")
    rejected.add_argument("stream")
    rejected.add_argument("--limit", type=int, default=20, metavar="N", help="how many rows to print (20); --json: all")
    evaluate = command("evaluate", _evaluate, "judge a stream's events by its rules")
    evaluate.add_argument("stream")
    how = evaluate.add_mutually_exclusive_group()
    how.add_argument("--once", action="store_true", help="judge existing events, then exit")
    how.add_argument(
        "--every", metavar="DURATION", help="how often to look for new events (default: as the profile says)"
    )
    evaluate.add_argument(
        "--profile", metavar="NAME", help="settings of CONF/profiles/NAME.yml (default: as conf/settings.yml says)"
    )
    evaluate.add_argument(
        "--idle-after", metavar="DURATION",
        help="after each such interval without a new commit, advance the watermark by this duration",
    )  # fmt: skip
    evaluate.add_argument("--checkpoint", help="folder of the checkpoint (default: below the root)")
    evaluate.add_argument(
        "--shards", type=int, metavar="N",
        help="the permanent number of shards of a new checkpoint (default: as the stream or the settings say, "
        "else one per core, at most 48)",
    )  # fmt: skip
    begin = evaluate.add_mutually_exclusive_group()
    begin.add_argument(
        "--rebuild", action="store_true",
        help="move the checkpoint aside and rebuild the state from the tables; existing rows are not written again",
    )  # fmt: skip
    begin.add_argument(
        "--fresh", action="store_true",
        help="start a new checkpoint although alerts exist already: all of them are written again",
    )  # fmt: skip
    spread = command("repartition", _repartition, "spread the state of a stopped evaluation over more or fewer cores")
    spread.add_argument("stream")
    spread.add_argument("partitions", type=int, help="at most as many as the checkpoint has shards")
    spread.add_argument("--checkpoint", help="folder of the checkpoint (default: below the root)")


def _ingest(options: argparse.Namespace) -> None:
    from lookback.spark.ingest.fields import reads_kafka
    from lookback.spark.ingest.files import ingest, require_ingest, retry_rejected

    settings = load_settings(options)
    stream = settings.stream(options.stream)
    progress = None if wants_json(options) else print
    if options.retry_rejected and (options.path or options.format):
        raise SetupError("--retry-rejected reads the files in rejected_events; omit PATH and --format")
    if options.retry_rejected:
        report = retry_rejected(open_tables(settings), stream, progress=progress)
    elif reads_kafka(stream) and not (options.path or options.format):
        report = _ingest_topic(options, open_tables(settings, kafka=True), stream)
    elif options.skip_lost:
        raise SetupError(f"--skip-lost is for Kafka topics, and stream {stream.name!r} reads files")
    elif options.new or options.every:
        _ingest_new_files(options, open_tables(settings), stream)
        return
    else:
        tables = open_tables(settings)
        require_ingest(tables, stream)
        announce(escape_unprintable(f"reading the events of {options.path or f'stream {stream.name}'}"))
        report = ingest(tables, stream, options.path, format=options.format, progress=progress)
    if wants_json(options):
        print(format_json(asdict(report)))
        return
    print(report)
    _print_rejections(report)
    if report.assumptions:
        print(report.assumptions)


def _print_rejections(report: IngestReport) -> None:
    if report.why_rejected:
        # A rejection quotes the contents of files.
        print_line("\n".join(map(escape_unprintable, report.why_rejected.splitlines())))


def _list_rejected(options: argparse.Namespace) -> None:
    from lookback.spark.ingest.rejected import RejectedRows

    settings = load_settings(options)
    stream, tables = settings.stream(options.stream), open_tables(settings)
    rejected = RejectedRows(tables, stream) if tables.exists("rejected_events") else None
    if rejected is None or rejected.read().isEmpty():
        if not wants_json(options):
            print(f"{stream.name}: no rejected rows")
    elif wants_json(options):
        print_json(row.asDict() for row in rejected.read().toLocalIterator())
    else:
        for each in rejected.count_by_reason():
            print(escape_unprintable(str(each)))
        print(f"the newest {options.limit}:")
        rows = [row.asDict() for row in rejected.read().limit(options.limit).collect()]
        print_table(rows, ("ingested_at", "reason", "source", "raw"))
        print(f"correct the stream's declaration or `raw`, then: lookback ingest {stream.name} --retry-rejected")


def _draft_stream(options: argparse.Namespace) -> int:
    from lookback.stream_draft import draft_stream

    text = draft_stream(options.file, options.name, options.format)
    try:
        name = Stream.from_dict(yaml.safe_load(text)).name
    except StreamError as error:
        name, problems = error.name, str(error)
    else:
        problems = ""
    if not options.write:
        print_document(text)
    else:
        file = load_settings(options).conf / "streams" / f"{name}.yml"
        if file.exists():
            raise SetupError(f"{file} already exists; give the new stream another --name, or edit that file")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        print(f"wrote {file}: read every line and edit it, then `lookback ingest {name}`")
    if problems:
        print(f"edit the draft before you use it:\n{problems}", file=sys.stderr)
    return FOUND_PROBLEMS if problems else 0


def _ingest_topic(options: argparse.Namespace, tables: Tables, stream: Stream) -> IngestReport:
    from lookback.spark.ingest.topics import TopicIngest

    run = TopicIngest(
        tables, stream, options.checkpoint, every=options.every, skip_lost=options.skip_lost,
        progress=None if wants_json(options) else print_line,
    )  # fmt: skip
    stop_on_signals(run.request_stop)
    return run.run()


def _ingest_new_files(options: argparse.Namespace, tables: Tables, stream: Stream) -> None:
    from lookback.spark.ingest.files import ingest_continuously

    checkpoint = options.checkpoint or f"{tables.files}/_checkpoints/ingest_{stream.name}"
    has_shown_assumptions = False

    def show(report: IngestReport) -> None:
        nonlocal has_shown_assumptions
        if wants_json(options):
            print_line(format_json(asdict(report)))
            return
        print_line(str(report))
        _print_rejections(report)
        if report.assumptions and not has_shown_assumptions:
            has_shown_assumptions = True
            print_line(report.assumptions)

    query = ingest_continuously(
        tables, stream, options.path, checkpoint=checkpoint, every=options.every, format=options.format, progress=show,
        warn=lambda text: print(f"warning: {escape_unprintable(text)}", file=sys.stderr),
    )  # fmt: skip
    stopping = threading.Event()
    stop_on_signals(stopping.set)
    while not (query.awaitTermination(0.2) or stopping.is_set()):  # type: ignore[arg-type]
        pass
    query.stop()


def _evaluate(options: argparse.Namespace) -> None:
    from lookback.spark.checkpoints.checkpoint import Checkpoint
    from lookback.spark.replay.histories import make_history
    from lookback.spark.stream.metrics import Metrics
    from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder

    settings = load_settings(options)
    streams = settings.streams()
    stream = settings.stream(options.stream)
    idle_after = None if options.idle_after is None else parse_duration(options.idle_after)
    if idle_after is not None and options.once:
        raise SetupError("--idle-after waits for time to pass, but --once does not wait; omit one of them")
    tables = open_tables(settings, *streams.values())
    tables.require(stream)

    checkpoint = tables.find_place(options.checkpoint or checkpoint_folder(tables, stream))
    metrics = Metrics(tables, stream, Checkpoint(checkpoint), settings.metrics)

    def show(report: BatchReport) -> None:
        metrics.add(report)
        print_line(format_json(asdict(report)) if wants_json(options) else _format_batch(report))

    evaluation = Evaluation(
        tables, stream, streams, checkpoint,
        once=options.once, every=options.every or settings.every, admission=settings.admission, on_batch=show,
        idle_after=idle_after, shards=options.shards, default_shards=stream.shards or settings.shards, rebuild=options.rebuild,
        fresh=options.fresh, accept_unknown=settings.accept_unknown_checkpoint, gate=settings.gate, historian=make_history,
    )  # fmt: skip
    stop_on_signals(evaluation.request_stop)
    with metrics:
        evaluation.run()


def _repartition(options: argparse.Namespace) -> None:
    from lookback.spark.checkpoints.checkpoint import checkpoint_folder, repartition

    settings = load_settings(options)
    stream, tables = settings.stream(options.stream), open_tables(settings)
    folder = options.checkpoint or checkpoint_folder(tables, stream)
    repartition(tables.spark, folder, options.partitions)
    print(f"the state in {folder} now has {options.partitions} partitions")


def _format_batch(report: BatchReport) -> str:
    alerts = ", ".join(f"{rule} {count}" for rule, count in sorted(report.alerts.items())) or "none"
    logged = [escape_unprintable(f"{describe_change(row)} {row['message'] or ''}".rstrip()) for row in report.log]
    changes = "".join(f"\n  {each}" for each in logged)
    seconds = (report.run_ms + report.write_ms) / 1_000
    late = f", {report.late:,} late ({report.discarded:,} discarded)" if report.late else ""
    failed = [f"{rule_id} {counts.failed:,}" for rule_id, counts in sorted(report.by_rule.items()) if counts.failed]
    return (
        f"batch {report.batch_id}: {report.events:,} events in {seconds:.1f} s, alerts: {alerts}, "
        f"{report.rules} rules, {report.state_rows:,} rows of state{late}"
        f"{', failed: ' + ', '.join(failed) if failed else ''}{changes}"
    )
