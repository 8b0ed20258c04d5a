"""Commands on alerts: list, review, notify."""

from __future__ import annotations

import argparse
import sys
import threading
from typing import TYPE_CHECKING

from lookback.commands.options import (
    FOUND_PROBLEMS,
    AddCommand,
    load_settings,
    open_tables,
    stop_on_signals,
    wants_json,
)
from lookback.core.errors import SetupError
from lookback.core.streams.alerts import DISPOSITIONS
from lookback.core.values.durations import parse_duration
from lookback.views.explanations import describe_alert, describe_event
from lookback.views.terminal import escape_unprintable, format_json, print_json, print_table

if TYPE_CHECKING:
    from lookback.core.explaining.evidence import Explanation
    from lookback.spark.operations.notify import Counts


def add_commands(command: AddCommand) -> None:
    """Adds these commands."""
    alerts = command("alerts", _list_alerts, "list alerts")
    alerts.add_argument("--rule", help="only those of this rule")
    alerts.add_argument("--stream", help="only those of this stream")
    alerts.add_argument("--queue", action="store_true", help="the open queue: alerts that nobody has reviewed yet")
    alerts.add_argument(
        "--days", type=float, metavar="N", help="with --queue: alerts decided within so many days (default: 90)"
    )
    explain = command("explain", _explain, "say why an alert was raised, or how a rule judged an event")
    explain.add_argument("alert_id", nargs="?", help="the alert")
    explain.add_argument("--revision", type=int, metavar="N", help="the revision of the alert (default: the last)")
    explain.add_argument("--rule", metavar="ID", help="with --event: the rule")
    explain.add_argument("--event", metavar="ID", help="with --rule: the event, also one that raised no alert")
    explain.add_argument("--version", type=int, metavar="N", help="the rule's version (default: the one in force then)")
    explain.add_argument(
        "--picture", metavar="FILE", help="write the time line of the key to this file, such as key.png"
    )
    review = command("review", _review, "record what a person decided about an alert")
    review.add_argument("alert_id")
    review.add_argument("--disposition", required=True, choices=list(DISPOSITIONS))
    review.add_argument(
        "--revision",
        type=int,
        metavar="N",
        help="the revision of the alert that was seen (default: the last, which is shown)",
    )
    review.add_argument("--note", default="")
    review.add_argument("--reviewer", help="the person who decided (default: the current user)")
    notify = command("notify", _notify, "send alerts to the receivers of CONF/notifiers.yml")
    which = notify.add_mutually_exclusive_group(required=True)
    which.add_argument("stream", nargs="?", help="the stream whose alerts are sent")
    which.add_argument("--all", action="store_true", help="send those of all declared streams")
    notify.add_argument("--once", action="store_true", help="send what is there, then end; 1 if some of it failed")
    notify.add_argument("--every", metavar="DURATION", default="10 seconds", help="how often to look (10 seconds)")
    notify.add_argument("--since", metavar="TIME", help="the time from which on a new receiver gets alerts (now)")


def _list_alerts(options: argparse.Namespace) -> None:
    settings = load_settings(options)
    if options.stream:
        settings.stream(options.stream)  # raises if there is none
    if options.days is not None and not options.queue:
        raise SetupError(
            "--days says how far back the queue goes: give --queue too, or leave it out to list every alert"
        )
    tables = open_tables(settings)
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
        # On stderr, so that programs that read the rows do not see it.
        print(note, file=sys.stderr)


def _explain(options: argparse.Namespace) -> None:
    from lookback.spark.review import explain, explain_event
    from lookback.views.timeline import plot_key_timeline

    if (options.alert_id is None) == (options.rule is None and options.event is None):
        raise SetupError("name an alert, or a rule and an event: lookback explain --rule ID --event ID")
    settings = load_settings(options)
    tables = open_tables(settings)
    picture: Explanation | None
    if options.alert_id is not None:
        alert = explain(tables, settings.streams(), options.alert_id, revision=options.revision)
        row, lines, picture = alert.to_dict(), [*describe_alert(alert)], alert
    elif options.rule is None or options.event is None:
        raise SetupError("--rule and --event belong together: lookback explain --rule ID --event ID")
    else:
        event = explain_event(tables, settings.streams(), options.rule, options.event, version=options.version)
        row, lines, picture = event.to_dict(), [*describe_event(event)], event.picture
    if options.picture:
        if picture is None:
            raise SetupError("--picture: the rule does not see the event, so there is no time line to draw")
        plot_key_timeline(picture).savefig(options.picture)
    if wants_json(options):
        print_json([row])
    else:
        for line in lines:
            print(escape_unprintable(line))


def _review(options: argparse.Namespace) -> None:
    from lookback.spark.review import record_review

    tables = open_tables(load_settings(options))
    print(record_review(
        tables, options.alert_id, options.disposition, options.reviewer, options.note, options.revision
    ))  # fmt: skip


def _notify(options: argparse.Namespace) -> int:
    from lookback.upkeep import make_notifier

    settings, every = load_settings(options), parse_duration(options.every) / 1_000_000
    sending = make_notifier(settings, options.stream or "", options.since or "")

    def show(counts: Counts) -> None:
        print(format_json(vars(counts)) if wants_json(options) else counts, flush=True)

    stop = threading.Event()
    stop_on_signals(stop.set)
    total = sending.run(once=options.once, every=every, stop=stop, report=show)
    return FOUND_PROBLEMS if options.once and (total.failed or total.given_up) else 0
