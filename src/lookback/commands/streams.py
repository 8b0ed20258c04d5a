"""Commands on streams: draft a declaration, ingest, evaluate, repartition."""

from __future__ import annotations

import sys
import threading
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import yaml

from lookback import verbs
from lookback.commands.options import (
    FOUND_PROBLEMS,
    CommandOptions,
    Commands,
    add_checkpoint,
    add_format,
    announce,
    flag,
    option,
    print_line,
    print_lines,
    stop_on_signals,
    warn,
)
from lookback.core.errors import SetupError, StreamError
from lookback.core.streams.declaration import Stream
from lookback.core.values.durations import parse_duration
from lookback.core.values.texts import escape_unprintable
from lookback.views.terminal import describe_change, format_json, print_document, print_json, print_table

if TYPE_CHECKING:
    from lookback.spark.batches.sink import BatchReport
    from lookback.spark.ingest.report import IngestReport
    from lookback.spark.ingest.topics import TopicIngest
    from lookback.spark.ingest.unions import UnionIngest


def add_commands(commands: Commands) -> None:
    """Adds these commands."""
    text = "draft the declaration of a stream from a file of its events, for you to edit"
    streams = commands.add_group("stream", "declare and list streams")
    streams.add("list", _list_streams, "list the declared streams with their fields")
    new = streams.add("new", _draft_stream, text)
    option(new, "file", "a CSV, JSON lines or Parquet file, or a folder of them")
    option(new, "--name", "the stream's name (default: the file's)", default="")
    add_format(new, "needed if the suffix does not show it", default="")
    flag(new, "--write", "write CONF/streams/NAME.yml, unless it exists; else print")
    ingest = commands.add(
        "ingest", _ingest, "ingest files, a topic or a union's members into an events table", "stream"
    )
    option(ingest, "path", "file or folder (default: the stream's source, which may be a topic)", nargs="?")
    add_format(ingest, None)
    text = "ingest rows of rejected_events, and files, that are readable by now; they leave that table"
    flag(ingest, "--retry-rejected", text)
    mode = ingest.add_mutually_exclusive_group()
    option(mode, "--every", "keep running, and look for new files or records at this interval", "DURATION")
    flag(mode, "--new", "only files added since the last run with --new or --every")
    text = "folder that keeps what --new, --every, topics and unions have read (default: below the root)"
    add_checkpoint(ingest, text)
    flag(ingest, "--skip-lost", "continue even if Kafka has deleted records that were not read yet")
    rejected = commands.add("rejected", _list_rejected, "list the rows that ingest could not use, and why", "stream")
    option(rejected, "--limit", "how many rows to print (20); --json: all", "N", type=int, default=20)
    evaluate = commands.add("evaluate", _evaluate, "judge a stream's events by its rules", "stream")
    how = evaluate.add_mutually_exclusive_group()
    flag(how, "--once", "judge existing events, then exit")
    option(how, "--every", "how often to look for new events (default: as the profile says)", "DURATION")
    text = "settings of CONF/profiles/NAME.yml (default: as conf/settings.yml says)"
    option(evaluate, "--profile", text, "NAME")
    text = "after each such interval without a new commit, advance the watermark by this duration"
    option(evaluate, "--idle-after", text, "DURATION")
    add_checkpoint(evaluate)
    text = (
        "the permanent number of shards of a new checkpoint (default: as the stream or the settings say, "
        "else one per core, at most 48)"
    )
    option(evaluate, "--shards", text, "N", type=int)
    begin = evaluate.add_mutually_exclusive_group()
    text = "move the checkpoint aside and rebuild the state from the tables; existing rows are not written again"
    flag(begin, "--rebuild", text)
    flag(begin, "--fresh", "start a new checkpoint although alerts exist already: all of them are written again")
    text = "spread the state of a stopped evaluation over more or fewer cores"
    spread = commands.add("repartition", _repartition, text, "stream")
    option(spread, "partitions", "at most as many as the checkpoint has shards", type=int)
    add_checkpoint(spread)


def _ingest(options: CommandOptions) -> None:
    from lookback.spark.ingest.files import ingest, require_ingest, retry_rejected

    place = options.open_workspace()
    stream = place.stream
    if options.retry_rejected and (options.path or options.format):
        raise SetupError("--retry-rejected reads the files in rejected_events; omit PATH and --format")
    if options.retry_rejected:
        report = retry_rejected(place.tables, stream, progress=options.progress)
    elif run := _open_ingest(options, place):
        stop_on_signals(run.request_stop)
        report = run.run()
    elif options.skip_lost:
        raise SetupError(f"--skip-lost is for Kafka topics, and stream {stream.name!r} reads files")
    elif options.new or options.every:
        _ingest_new_files(options, place)
        return
    else:
        require_ingest(place.tables, stream)
        announce(escape_unprintable(f"reading the events of {options.path or f'stream {stream.name}'}"))
        report = ingest(place.tables, stream, options.path, format=options.format, progress=options.progress)
    _show_ingest(options, report, [])


def _show_ingest(options: CommandOptions, report: IngestReport, known: list[str]) -> None:
    """Prints a report, and its assumptions unless some are known, to which it adds them."""
    if options.wants_json:
        print_line(format_json(asdict(report)))
        return
    print_line(str(report))
    if report.why_rejected:
        # A rejection quotes the contents of files.
        print_line("\n".join(map(escape_unprintable, report.why_rejected.splitlines())))
    if report.assumptions and not known:
        known.append(report.assumptions)
        print_line(report.assumptions)


def _list_rejected(options: CommandOptions) -> None:
    from lookback.spark.ingest.rejected import RejectedRows

    place = options.open_workspace()
    stream, tables = place.stream, place.tables
    rejected = RejectedRows(tables, stream) if tables.exists("rejected_events") else None
    if rejected is None or rejected.read().isEmpty():
        if not options.wants_json:
            print(f"{stream.name}: no rejected rows")
    elif options.wants_json:
        print_json(row.asDict() for row in rejected.read().toLocalIterator())
    else:
        print_lines(*rejected.count_by_reason(), f"the newest {options.limit}:")
        rows = [row.asDict() for row in rejected.read().limit(options.limit).collect()]
        print_table(rows, ("ingested_at", "reason", "source", "raw"))
        print(f"correct the stream's declaration or `raw`, then: lookback ingest {stream.name} --retry-rejected")


def _list_streams(options: CommandOptions) -> None:
    rows: list[dict[str, Any]] = [
        {
            "stream": stream.name,
            "event_id": stream.event_id,
            "event_time": stream.event_time,
            "fields": stream.table_columns,
            "comments": dict(stream.comments),
        }
        for stream in options.open_workspace().streams.values()
    ]
    if not options.wants_json:
        rows = [{**row, "fields": ", ".join(row["fields"])} for row in rows]
    options.show_rows(rows, ("stream", "event_id", "event_time", "fields"))


def _draft_stream(options: CommandOptions) -> int:
    from lookback.stream_draft import draft_stream

    text = draft_stream(options.file, options.name, options.format)
    try:
        name = Stream.from_dict(yaml.safe_load(text)).name
    except StreamError as error:
        name, problems = error.name, str(error)
    else:
        problems = ""
    if not options.write or (problems and options.name):
        print_document(text)
    else:
        file = options.open_workspace().conf / "streams" / f"{name}.yml"
        if file.exists():
            raise SetupError(f"{file} already exists; give the new stream another --name, or edit that file")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        print(f"wrote {file}: read every line and edit it, then `lookback ingest {name}`")
    if problems:
        print(f"edit the draft before you use it:\n{problems}", file=sys.stderr)
    return FOUND_PROBLEMS if problems else 0


def _open_ingest(options: CommandOptions, place: verbs.Workspace) -> TopicIngest | UnionIngest | None:
    if options.path or options.format:
        return None
    return verbs.open_ingest(
        place, options.checkpoint, every=options.every, skip_lost=options.skip_lost, progress=options.progress
    )


def _ingest_new_files(options: CommandOptions, place: verbs.Workspace) -> None:
    from lookback.spark.ingest.files import ingest_continuously

    checkpoint = options.checkpoint or place.checkpoint("ingest")
    known: list[str] = []
    query = ingest_continuously(
        place.tables,
        place.stream,
        options.path,
        checkpoint=checkpoint,
        every=options.every,
        format=options.format,
        progress=lambda report: _show_ingest(options, report, known),
        warn=lambda text: warn(f"warning: {text}"),
    )
    stopping = threading.Event()
    stop_on_signals(stopping.set)
    while not (query.awaitTermination(0.2) or stopping.is_set()):  # type: ignore[arg-type]
        pass
    query.stop()


def _evaluate(options: CommandOptions) -> None:
    place = options.open_workspace()
    idle_after = None if options.idle_after is None else parse_duration(options.idle_after)
    stream = place.stream
    if idle_after is not None and options.once:
        raise SetupError("--idle-after waits for time to pass, but --once does not wait; omit one of them")
    place.tables.require(stream)

    batches = 0

    def show(report: BatchReport) -> None:
        nonlocal batches
        batches += 1
        print_line(format_json(asdict(report)) if options.wants_json else _format_batch(report))

    evaluation, metrics = verbs.prepare_evaluation(
        place,
        options.checkpoint,
        show,
        every=options.every,
        once=options.once,
        idle_after=idle_after,
        shards=options.shards,
        rebuild=options.rebuild,
        fresh=options.fresh,
    )
    stop_on_signals(evaluation.request_stop)
    with metrics:
        evaluation.run()
    if options.once and not batches and not options.wants_json:
        print_line(f"{stream.name}: nothing new to judge")


def _repartition(options: CommandOptions) -> None:
    from lookback.spark.checkpoints.checkpoint import checkpoint_folder, repartition

    place = options.open_workspace()
    folder = options.checkpoint or checkpoint_folder(place.tables, place.stream)
    repartition(place.tables.spark, folder, options.partitions)
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
