"""Commands for operating a place: init, status, maintain, forget."""

from __future__ import annotations

import datetime as dt
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lookback import verbs
from lookback.commands.options import (
    FOUND_PROBLEMS,
    CommandOptions,
    Commands,
    add_checkpoint,
    flag,
    option,
    print_lines,
    warn,
)
from lookback.core.errors import SetupError
from lookback.core.operations.figures import WarmUp, describe_warm_up
from lookback.core.streams.arrival import describe_fast_clock
from lookback.views.terminal import print_health, print_json, print_table

if TYPE_CHECKING:
    from lookback.config import Settings
    from lookback.spark.tables.lakehouse import Tables


def add_commands(commands: Commands) -> None:
    """Adds these commands."""
    commands.add("init", _init, "create the tables of all declared streams; add missing comments")
    status = commands.add("status", _show_status, "show figures of each stream, and whether it is healthy")
    flag(status, "--check", "exit with 1 if a stream is not healthy, for a monitor")
    flag(status, "--tell", "send findings to the receivers of CONF/notifiers.yml that want them")
    text = "delete rows past their retention, OPTIMIZE and VACUUM all tables, check the checkpoints"
    commands.add("maintain", _maintain, text)
    forget = commands.add("forget", _forget, "delete all rows about some events, for a privacy request", "stream")
    option(forget, "--where", "a condition on the stream's fields, such as 'customer_id = 17'", required=True)
    flag(forget, "--dry-run", "count the rows; delete nothing")
    flag(forget, "--yes", "do not ask for confirmation")
    add_checkpoint(forget, "folder of the evaluation's checkpoint (default: below the root)")


def _init(options: CommandOptions) -> int:
    from lookback.spark.operations.catalog import REFUSED

    place = options.open_workspace()
    refused = [step for step in verbs.set_up(place) if step.done.startswith(REFUSED)]
    for name, stream in place.streams.items():
        print(f"{name}: {place.tables.path_or_name(name)}{' (external table)' if stream.table else ''}")
        if remark := describe_fast_clock(stream):
            print(f"{name}: {remark}", file=sys.stderr)
    for step in refused:
        # This is an external table; all other tables have been created.
        print(f"{step.thing}: {step.done}", file=sys.stderr)
    return FOUND_PROBLEMS if refused else 0


def _show_status(options: CommandOptions) -> int:
    from lookback.spark.checkpoints.checkpoint import Checkpoint, checkpoint_folder
    from lookback.spark.operations.status import stream_status

    place = options.open_workspace()
    settings, streams = place.settings, place.streams

    def compute(tables: Tables) -> list[dict[str, Any]]:
        tables, reaches = tables.holding(*streams.values()), tables.reaches_files
        return [
            stream_status(
                tables, stream, Checkpoint(tables.find_place(checkpoint_folder(tables, stream))) if reaches else None
            )
            for stream in streams.values()
        ]

    rows = place.answer(compute)
    if not options.wants_json:
        names = "stream events commits judged lag_commits rules alerts open late rejected"
        print_table(rows, names.split())
        print("alerts, open, rejected: of the last 90 days\n")
    return _report_health(options, settings, rows)


def _report_health(options: CommandOptions, settings: Settings, rows: Sequence[Mapping[str, Any]]) -> int:
    """Prints whether streams are healthy, or all figures with --json; sends what is not. Returns the exit code."""
    if options.wants_json:
        print_json(rows)
    else:
        for row in rows:
            print_health(row)
            print_lines(*(f"warming: {describe_warm_up(WarmUp(**each))}" for each in row.get("warming", ())))
    unhealthy = [row for row in rows if not row["healthy"]]
    is_unsent = options.tell and not _send_notices(settings.conf, unhealthy)
    return FOUND_PROBLEMS if is_unsent or (options.check and unhealthy) else 0


def _send_notices(conf: Path, unhealthy: Sequence[Mapping[str, Any]]) -> bool:
    """Sends a notice about each unhealthy stream to its receivers. Returns whether all were sent."""
    from lookback.core.operations.notifications import SENT, make_health_notice
    from lookback.senders import send_to_all

    senders = verbs.make_senders(conf)
    is_sent = True
    for row in unhealthy:
        notice = make_health_notice(row, dt.datetime.now(dt.timezone.utc))
        wanting = {receiver: send for receiver, send in senders.items() if receiver.wants(notice)}
        for receiver, outcome in send_to_all(notice, wanting).items():
            if outcome.status != SENT:
                is_sent = False
                warn(f"{receiver.name} could not be notified of {row['stream']}: {outcome.error}")
    return is_sent


def _maintain(options: CommandOptions) -> int:
    done = verbs.maintain(options.open_workspace())
    rows = [asdict(each) for each in done.tables]
    if options.wants_json:
        older = [] if done.older is None else [{"open_before_queue": done.older.count, **asdict(done.older)}]
        print_json([*rows, *(asdict(each) for each in done.checkpoints), *older])
    else:
        print_table(rows, ("table", "expired", "open", "files", "compacted", "written", "deleted", "keeps", "note"))
        print_lines(*(f"{each.level}: {each.what}" for each in done.checkpoints))
        if done.older is not None:
            print(done.older)
    return FOUND_PROBLEMS if done.problems else 0


def _forget(options: CommandOptions) -> None:
    from lookback.spark.operations.forget import forget_condition

    place, where = options.open_workspace(), options.where
    forget_condition(place.stream, where)
    if not (options.dry_run or options.yes or sys.stdin.isatty()):
        raise SetupError("forget deletes permanently: add --yes, or --dry-run to see what it would delete")
    dry_run = not options.yes or options.dry_run
    report = verbs.forget(place, where, dry_run=dry_run, checkpoint=options.checkpoint)
    if dry_run and not options.dry_run:
        for line in report.list_lines():
            (warn if options.wants_json else print_lines)(line)
        if input("Permanently delete these rows? [y/N] ").strip().lower() not in ("y", "yes"):
            print("nothing was deleted")
            return
        report = verbs.forget(place, where, dry_run=False, checkpoint=options.checkpoint)
    options.show_report(report, *report.list_lines())
