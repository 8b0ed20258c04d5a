"""Commands on alerts: list, review, notify."""

from __future__ import annotations

import argparse
import sys
import threading
from typing import TYPE_CHECKING

from lookback.commands.asked import FOUND_PROBLEMS, Command, on_signals, settings_of, tables_of, wants_json
from lookback.core.errors import SetupError
from lookback.core.values.durations import parse_duration
from lookback.views.terminal import as_json, print_json, print_table

if TYPE_CHECKING:
    from lookback.spark.operations.notify import Counts


def add_commands(command: Command) -> None:
    """Adds these commands."""
    alerts = command("alerts", _alerts, "list alerts")
    alerts.add_argument("--rule", help="of this rule only")
    alerts.add_argument("--stream", help="of this stream only")
    alerts.add_argument("--queue", action="store_true", help="the open queue: what nobody reviewed yet")
    alerts.add_argument(
        "--days", type=float, metavar="N", help="of --queue: alerts decided within so many days (default: 90)"
    )
    review = command("review", _review, "record what an alert was")
    review.add_argument("alert_id")
    review.add_argument("--disposition", required=True, choices=["confirmed", "false_positive", "unclear"])
    review.add_argument(
        "--revision",
        type=int,
        metavar="N",
        help="of the alert, the one that was seen (default: the last, which is shown)",
    )
    review.add_argument("--note", default="")
    review.add_argument("--reviewer", help="who looked at it (default: who works here)")
    notify = command("notify", _notify, "send alerts to the receivers of CONF/notifiers.yml")
    which = notify.add_mutually_exclusive_group(required=True)
    which.add_argument("stream", nargs="?", help="of this stream")
    which.add_argument("--all", action="store_true", help="of all declared streams")
    notify.add_argument("--once", action="store_true", help="send what is there, then end; 1 where some of it failed")
    notify.add_argument("--every", metavar="DURATION", default="10 seconds", help="how often to look (10 seconds)")
    notify.add_argument("--since", metavar="TIME", help="from when on a receiver that is new hears of alerts (now)")


def _alerts(options: argparse.Namespace) -> None:
    settings = settings_of(options)
    if options.stream:
        settings.stream(options.stream)  # raises where there is none
    if options.days is not None and not options.queue:
        raise SetupError(
            "--days says how far back the queue goes: give --queue too, or leave it out to list every alert"
        )
    tables = tables_of(settings)
    note = ""
    if options.queue:
        from lookback.spark.review import QUEUE_DAYS, note_on_older, open_queue

        days = QUEUE_DAYS if options.days is None else options.days
        frame, note = open_queue(tables, options.rule, options.stream, days), note_on_older(tables, days)
    else:
        from pyspark.sql import functions as F  # noqa: N812

        frame = tables.read("alerts").orderBy("arrival", "event_time", "event_id", "rule_id", "alert_id", "revision")
        frame = frame.where(F.col("rule_id") == options.rule) if options.rule else frame
        frame = frame.where(F.col("stream") == options.stream) if options.stream else frame
    rows = [row.asDict() for row in frame.toLocalIterator()]
    if wants_json(options):
        print_json(rows)
    else:
        print_table(rows, ("alert_id", "revision", "event_time", "severity", "rule_id", "verdict", "message"))
    if note:
        # Beside the rows, so that a program that reads them need not know it.
        print(note, file=sys.stderr)


def _review(options: argparse.Namespace) -> None:
    from lookback.spark.review import record_review

    chosen = (options.alert_id, options.disposition, options.reviewer, options.note, options.revision)
    print(record_review(tables_of(settings_of(options)), *chosen))


def _notify(options: argparse.Namespace) -> int:
    from lookback.upkeep import notifier

    settings, every = settings_of(options), parse_duration(options.every) / 1_000_000
    sending = notifier(settings, options.stream or "", options.since or "")

    def show(counts: Counts) -> None:
        print(as_json(vars(counts)) if wants_json(options) else counts, flush=True)

    stop = threading.Event()
    on_signals(stop.set)
    total = sending.run(once=options.once, every=every, stop=stop, report=show)
    return FOUND_PROBLEMS if options.once and (total.failed or total.given_up) else 0
