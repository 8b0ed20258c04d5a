"""Commands on alerts: list, explain, review, snooze, notify."""

from __future__ import annotations

import argparse
import sys
import threading
from typing import TYPE_CHECKING, Any

from lookback.commands.options import (
    FOUND_PROBLEMS,
    AddCommand,
    announce,
    answer,
    load_settings,
    open_tables,
    read_time,
    stop_on_signals,
    wants_json,
)
from lookback.core.errors import SetupError
from lookback.core.streams.alerts import DISPOSITIONS
from lookback.core.values.durations import parse_duration
from lookback.core.values.texts import count_noun, escape_unprintable
from lookback.core.values.times import to_utc
from lookback.views.explanations import describe_alert, describe_event
from lookback.views.terminal import format_json, print_json, print_table

if TYPE_CHECKING:
    from lookback.core.explaining.events import EventExplanation
    from lookback.spark.operations.notify import Counts
    from lookback.spark.tables.lakehouse import Tables


def add_commands(command: AddCommand) -> None:
    """Adds these commands."""
    alerts = command("alerts", _list_alerts, "list alerts")
    alerts.add_argument("--rule", help="only alerts of this rule")
    alerts.add_argument("--stream", help="only alerts of this stream")
    waiting = alerts.add_mutually_exclusive_group()
    waiting.add_argument("--queue", action="store_true", help="the open queue: alerts that nobody has reviewed yet")
    waiting.add_argument(
        "--reports",
        action="store_true",
        help="alerts of rules with `queue: false` or severity info, which the queue leaves out",
    )
    alerts.add_argument(
        "--days",
        type=float,
        metavar="N",
        help="with --queue or --reports: alerts decided in the last N days (default: 90)",
    )
    explain = command("explain", _explain, "say why an alert was raised, or how a rule judged an event")
    explain.add_argument("alert_id", nargs="?", help="the alert")
    explain.add_argument("--revision", type=int, metavar="N", help="the revision of the alert (default: the last)")
    explain.add_argument("--rule", metavar="ID", help="with --event: the rule")
    explain.add_argument("--event", metavar="ID", help="with --rule: the event, with or without an alert")
    explain.add_argument("--version", type=int, metavar="N", help="the rule's version (default: the one in force then)")
    explain.add_argument(
        "--picture", metavar="FILE", help="write the time line of the key to this file, such as key.png"
    )
    review = command("review", _review, "record a decision on an alert")
    review.add_argument("alert_id")
    review.add_argument("--disposition", required=True, choices=list(DISPOSITIONS))
    review.add_argument(
        "--revision",
        type=int,
        metavar="N",
        help="the revision that the reviewer saw (default: the last, which is shown)",
    )
    review.add_argument("--note", default="")
    review.add_argument("--reviewer", help="the person who decided (default: the current user)")
    snooze = command(
        "snooze", _snooze, "leave alerts of a rule or key out of the queue and of notifications for a while"
    )
    snooze.add_argument("subject", metavar="RULE|ALERT_ID", help="a rule, * for any, or an alert, for its rule and key")
    snooze.add_argument(
        "--key", action="append", metavar="FIELD=VALUE", help="only alerts whose key has this value; may be repeated"
    )
    snooze.add_argument("--until", metavar="TIME", help="when it ends: a time, or a duration such as '8 hours'")
    snooze.add_argument("--from", dest="since", metavar="TIME", help="when it begins (default: now)")
    snooze.add_argument("--reason", help="the reason, for readers who wonder where the alerts are")
    snooze.add_argument("--author", help="who snoozes them (default: the current user)")
    snooze.add_argument("--end", action="store_true", help="end the snoozes of exactly this rule and key now")
    listed = command(
        "snoozes", _list_snoozes, "list snoozes: subject, author, reason, end, and the number of hidden alerts"
    )
    listed.add_argument("--all", action="store_true", help="include ended snoozes")
    notify = command("notify", _notify, "send alerts to the receivers of CONF/notifiers.yml")
    which = notify.add_mutually_exclusive_group(required=True)
    which.add_argument("stream", nargs="?", help="send alerts of this stream")
    which.add_argument("--all", action="store_true", help="send alerts of all declared streams")
    notify.add_argument(
        "--once", action="store_true", help="send existing alerts, then exit; exit code 1 if any failed"
    )
    notify.add_argument("--every", metavar="DURATION", default="10 seconds", help="how often to look (10 seconds)")
    notify.add_argument("--since", metavar="TIME", help="the time from which a new receiver gets alerts (now)")


def _list_alerts(options: argparse.Namespace) -> None:
    settings = load_settings(options)
    if options.stream:
        settings.stream(options.stream)  # raises if it is unknown
    if options.days is not None and not (options.queue or options.reports):
        raise SetupError(
            "--days is for the queue and reports: add --queue or --reports, or omit it to list every alert"
        )
    rows, note = answer(settings, lambda tables: _read_alerts(tables, options))
    if wants_json(options):
        print_json(rows)
    else:
        print_table(rows, ("alert_id", "revision", "event_time", "severity", "rule_id", "verdict", "message"))
    if note:
        # On stderr, so that programs reading the rows do not see it.
        print(note, file=sys.stderr)


def _read_alerts(tables: Tables, options: argparse.Namespace) -> tuple[list[dict[str, Any]], str]:
    """Reads the alerts selected by the options, and a note on alerts that the queue leaves out."""
    if options.queue or options.reports:
        from lookback.spark.review import QUEUE_DAYS, note_on_older, note_on_snoozed, open_queue

        days = QUEUE_DAYS if options.days is None else options.days
        frame = open_queue(tables, options.rule, options.stream, days, reports=options.reports)
        notes = (note_on_snoozed(tables, days), note_on_older(tables, days)) if options.queue else ()
        note = "\n".join(filter(None, notes))
    else:
        from lookback.spark.review import list_alerts

        frame, note = list_alerts(tables, options.rule, options.stream), ""
    return [row.asDict() for row in frame.toLocalIterator()], note


def _explain(options: argparse.Namespace) -> None:
    from lookback.core.explaining.evidence import Explanation
    from lookback.spark.review import explain, explain_event

    if (options.alert_id is None) == (options.rule is None and options.event is None):
        raise SetupError("name an alert, or a rule and an event: lookback explain --rule ID --event ID")
    if options.alert_id is None and (options.rule is None or options.event is None):
        raise SetupError("--rule and --event belong together: lookback explain --rule ID --event ID")
    settings = load_settings(options)
    streams = settings.streams()

    def compute(tables: Tables) -> Explanation | EventExplanation:
        if options.alert_id is not None:
            return explain(tables, streams, options.alert_id, revision=options.revision)
        return explain_event(tables, streams, options.rule, options.event, version=options.version)

    explained = answer(settings, compute)
    picture = explained if isinstance(explained, Explanation) else explained.picture
    if options.picture:
        if picture is None:
            raise SetupError("--picture: the rule does not see the event, so it has no time line")
        from lookback.views.timeline import plot_key_timeline

        plot_key_timeline(picture).savefig(options.picture)
    row = explained.to_dict()
    lines = describe_alert(explained) if isinstance(explained, Explanation) else describe_event(explained)
    if wants_json(options):
        print_json([row])
    else:
        for line in lines:
            print(escape_unprintable(line))


def _review(options: argparse.Namespace) -> None:
    from lookback.spark.review import record_review

    tables = open_tables(load_settings(options))
    announce(escape_unprintable(f"reading alert {options.alert_id}, and recording the decision"))
    recorded = record_review(
        tables, options.alert_id, options.disposition, options.reviewer, options.note, options.revision
    )
    print(escape_unprintable(str(recorded)))


def _snooze(options: argparse.Namespace) -> None:
    from lookback.spark.snoozes import end_snoozes, read_end, snooze

    if not options.end and (options.until is None or options.reason is None):
        raise SetupError("a snooze needs its end and a reason: --until '8 hours' --reason TEXT; --end ends one")
    key = _read_key(options.key)
    settings, since = load_settings(options), read_time(options, "since")
    streams = settings.streams()
    tables = open_tables(settings, *streams.values())
    if options.end:
        ended = end_snoozes(tables, streams, options.subject, key)
        print(f"{count_noun(ended, 'snooze')} ended" if ended else "No such snooze; `lookback snoozes` lists them.")
        return
    made = snooze(
        tables, streams, options.subject, key, until=read_end(options.until), reason=options.reason,
        since=None if since is None else to_utc(since), author=options.author,
    )  # fmt: skip
    print(escape_unprintable(str(made)))


def _read_key(pairs: list[str] | None) -> dict[str, str] | None:
    if pairs is None:
        return None
    wrong = [pair for pair in pairs if not pair.partition("=")[1]]
    if wrong:
        raise SetupError(f"--key must be FIELD=VALUE such as customer_id=17, got {wrong[0]!r:.100}")
    return {name: text for name, _, text in (pair.partition("=") for pair in pairs)}


def _list_snoozes(options: argparse.Namespace) -> None:
    from lookback.spark.review import show_snoozes
    from lookback.spark.snoozes import EXPIRED

    listed = answer(load_settings(options), show_snoozes)
    rows = [row for row in listed if options.all or row["state"] != EXPIRED]
    if wants_json(options):
        print_json(rows)
    else:
        print_table(
            [{**row, "rule_id": row["rule_id"] or "*"} for row in rows],
            ("rule_id", "key", "state", "from", "until", "alerts", "author", "reason"),
        )


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
