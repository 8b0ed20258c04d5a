"""Commands for operating a place: init, status, maintain, forget."""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.util
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from lookback.commands.options import FOUND_PROBLEMS, AddCommand, answer, load_settings, open_tables, wants_json
from lookback.core.errors import SetupError
from lookback.core.operations.health import WarmUp, describe_warm_up
from lookback.core.streams.arrival import describe_fast_clock
from lookback.core.values.texts import escape_unprintable
from lookback.views.terminal import format_json, print_health, print_json, print_table

if TYPE_CHECKING:
    from lookback.config import Settings
    from lookback.spark.operations.forget import ForgetReport
    from lookback.spark.tables.lakehouse import Tables


def add_commands(command: AddCommand) -> None:
    """Adds these commands."""
    command("init", _init, "create the tables of all declared streams; add missing comments")
    status = command("status", _show_status, "show figures of each stream, and whether it is healthy")
    status.add_argument("--check", action="store_true", help="exit with 1 if a stream is not healthy, for a monitor")
    status.add_argument(
        "--warehouse",
        metavar="ID",
        help="read the tables of --catalog and --schema over this SQL warehouse, without Spark",
    )
    status.add_argument(
        "--tell", action="store_true", help="send findings to the receivers of CONF/notifiers.yml that want them"
    )
    command(
        "maintain",
        _maintain,
        "delete rows past their retention, OPTIMIZE and VACUUM all tables, check the checkpoints",
    )
    forget = command("forget", _forget, "delete all rows about some events, for a privacy request")
    forget.add_argument("stream")
    forget.add_argument("--where", required=True, help="a condition on the stream's fields, such as 'customer_id = 17'")
    forget.add_argument("--dry-run", action="store_true", help="count the rows; delete nothing")
    forget.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    forget.add_argument("--checkpoint", help="folder of the evaluation's checkpoint (default: below the root)")


def _init(options: argparse.Namespace) -> int:
    from lookback.spark.operations.catalog import REFUSED, set_up

    settings = load_settings(options)
    streams = settings.streams()
    tables = open_tables(settings, *streams.values())
    checkpoints = settings.root if settings.catalog else ""
    steps = set_up(tables, streams, checkpoints=checkpoints)
    refused = [step for step in steps if step.done.startswith(REFUSED)]
    for name, stream in streams.items():
        print(f"{name}: {tables.path_or_name(name)}{' (external table)' if stream.table else ''}")
        if remark := describe_fast_clock(stream):
            print(f"{name}: {remark}", file=sys.stderr)
    for step in refused:
        # This is an external table; all other tables have been created.
        print(f"{step.thing}: {step.done}", file=sys.stderr)
    return FOUND_PROBLEMS if refused else 0


def _show_status(options: argparse.Namespace) -> int:
    from lookback.spark.checkpoints.checkpoint import Checkpoint, checkpoint_folder
    from lookback.spark.operations.status import stream_status

    settings = load_settings(options)
    streams = settings.streams()
    if options.warehouse:
        return _report_health(options, settings, _read_remote_status(settings, options.warehouse, streams))

    def compute(tables: Tables) -> list[dict[str, Any]]:
        reaches = tables.reaches_files
        return [
            stream_status(
                tables, stream, Checkpoint(tables.find_place(checkpoint_folder(tables, stream))) if reaches else None
            )
            for stream in streams.values()
        ]

    rows = answer(settings, compute, *streams.values())
    if not wants_json(options):
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
        print("alerts, open, rejected: of the last 90 days\n")
    return _report_health(options, settings, rows)


def _read_remote_status(settings: Settings, warehouse: str, streams: Iterable[str]) -> list[dict[str, Any]]:
    if importlib.util.find_spec("databricks.sdk") is None:
        raise SetupError("--warehouse needs databricks-sdk: pip install 'lookback-rules[remote]'")
    if not (settings.catalog and settings.schema):
        raise SetupError("--warehouse reads the tables of a catalog; name it by --catalog and --schema")
    from lookback.remote.figures import StreamTables, describe_stream, prepare_queries
    from lookback.remote.workspace import open_workspace

    execute, now = prepare_queries(open_workspace(), warehouse), dt.datetime.now(dt.timezone.utc)
    places = (StreamTables.in_schema(settings.catalog, settings.schema, stream) for stream in streams)
    return [describe_stream(place, execute, now) for place in places]


def _report_health(options: argparse.Namespace, settings: Settings, rows: Sequence[Mapping[str, Any]]) -> int:
    """Prints whether streams are healthy, or all figures with --json; sends what is not. Returns the exit code."""
    if wants_json(options):
        print_json(rows)
    else:
        for row in rows:
            print_health(row)
            for each in row.get("warming", ()):
                print(escape_unprintable(f"warming: {describe_warm_up(WarmUp(**each))}"))
    unhealthy = [row for row in rows if not row["healthy"]]
    is_unsent = options.tell and not _send_notices(settings.conf, unhealthy)
    return FOUND_PROBLEMS if is_unsent or (options.check and unhealthy) else 0


def _send_notices(conf: Path, unhealthy: Sequence[Mapping[str, Any]]) -> bool:
    """Sends a notice about each unhealthy stream to its receivers. Returns whether all were sent."""
    from lookback.config import load_receivers
    from lookback.core.operations.notifications import SENT, make_health_notice
    from lookback.senders import make_sender, send_to_all

    senders = {receiver: make_sender(receiver) for receiver in load_receivers(conf)}
    is_sent = True
    for row in unhealthy:
        notice = make_health_notice(row, dt.datetime.now(dt.timezone.utc))
        wanting = {receiver: send for receiver, send in senders.items() if receiver.wants(notice)}
        for receiver, outcome in send_to_all(notice, wanting).items():
            if outcome.status != SENT:
                is_sent = False
                text = f"{receiver.name} could not be notified of {row['stream']}: {outcome.error}"
                print(escape_unprintable(text), file=sys.stderr)
    return is_sent


def _maintain(options: argparse.Namespace) -> int:
    from lookback.spark.checkpoints.checkpoint import checkpoint_folder
    from lookback.spark.operations.maintenance import maintain

    settings = load_settings(options)
    tables, streams = open_tables(settings), settings.streams()
    checkpoints = {name: checkpoint_folder(tables, stream) for name, stream in streams.items()}
    done = maintain(tables, streams, checkpoints, settings.retention)
    rows = [asdict(each) for each in done.tables]
    if wants_json(options):
        older = [] if done.older is None else [{"open_before_queue": done.older.count, **asdict(done.older)}]
        print_json([*rows, *(asdict(each) for each in done.checkpoints), *older])
    else:
        print_table(rows, ("table", "expired", "open", "files", "compacted", "written", "deleted", "keeps", "note"))
        for each in done.checkpoints:
            print(escape_unprintable(f"{each.level}: {each.what}"))
        if done.older is not None:
            print(done.older)
    return FOUND_PROBLEMS if done.problems else 0


def _forget(options: argparse.Namespace) -> None:
    from lookback.spark.checkpoints.checkpoint import checkpoint_folder
    from lookback.spark.operations.forget import forget, forget_condition

    settings = load_settings(options)
    stream = settings.stream(options.stream)
    forget_condition(stream, options.where)
    if not (options.dry_run or options.yes or sys.stdin.isatty()):
        raise SetupError("forget deletes permanently: add --yes, or --dry-run to see what it would delete")
    tables = open_tables(settings, stream)
    checkpoint = options.checkpoint or (checkpoint_folder(tables, stream) if tables.reaches_files else None)
    dry_run = not options.yes or options.dry_run
    report = forget(tables, stream, options.where, dry_run=dry_run, checkpoint=checkpoint)
    if dry_run and not options.dry_run:
        _print_report(report, sys.stderr if wants_json(options) else sys.stdout)
        if not _confirm("Permanently delete these rows? [y/N] "):
            print("nothing was deleted")
            return
        report = forget(tables, stream, options.where, checkpoint=checkpoint)
    if wants_json(options):
        print(format_json(asdict(report)))
    else:
        _print_report(report, sys.stdout)


def _print_report(report: ForgetReport, file: TextIO) -> None:
    for line in report.list_lines():
        print(escape_unprintable(line), file=file)


def _confirm(question: str) -> bool:
    return input(question).strip().lower() in ("y", "yes")
