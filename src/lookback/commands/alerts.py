"""Commands on alerts: list, explain, review, snooze, notify."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

from lookback import verbs
from lookback.commands.options import (
    FOUND_PROBLEMS,
    CommandOptions,
    Commands,
    announce,
    flag,
    option,
    print_lines,
    stop_on_signals,
)
from lookback.core.errors import SetupError
from lookback.core.streams.alerts import DISPOSITIONS
from lookback.core.values.durations import parse_duration
from lookback.core.values.texts import count_noun, escape_unprintable
from lookback.views.explanations import describe_alert, describe_event, list_counted_events
from lookback.views.terminal import format_json, print_json

if TYPE_CHECKING:
    from lookback.core.explaining.eventexplanation import EventExplanation
    from lookback.spark.operations.notify import DeliveryCounts
    from lookback.spark.tables.lakehouse import Tables


def add_commands(commands: Commands) -> None:
    """Adds these commands."""
    alerts = commands.add("alerts", _list_alerts, "list alerts")
    option(alerts, "--rule", "only alerts of this rule")
    option(alerts, "--stream", "only alerts of this stream")
    option(alerts, "--tag", "only alerts with this tag, such as attack.t1110; capitals make no difference")
    waiting = alerts.add_mutually_exclusive_group()
    flag(waiting, "--queue", "the open queue: alerts that nobody has reviewed yet")
    flag(waiting, "--reports", "alerts of rules with `queue: false` or severity info, which the queue leaves out")
    option(
        alerts, "--days", "with --queue or --reports: alerts decided in the last N days (default: 90)", "N", type=float
    )
    option(
        alerts,
        "--limit",
        "at most this many alerts (default: all): the first of the queue, else the newest",
        "N",
        type=int,
    )
    explain = commands.add("explain", _explain, "say why an alert was raised, or how a rule judged an event")
    option(explain, "alert_id", "the alert", nargs="?")
    option(explain, "--revision", "the revision of the alert (default: the last)", "N", type=int)
    option(explain, "--rule", "with --event: the rule", "ID")
    option(explain, "--event", "with --rule: the event, with or without an alert", "ID")
    option(explain, "--version", "the rule's version (default: the one in force then)", "N", type=int)
    option(explain, "--picture", "write the time line of the key to this file, such as key.png", "FILE")
    review = commands.add("review", _review, "record a decision on an alert", "alert_id")
    option(review, "--disposition", required=True, choices=list(DISPOSITIONS))
    option(
        review, "--revision", "the revision that the reviewer saw (default: the last, which is shown)", "N", type=int
    )
    option(review, "--note", default="")
    option(review, "--reviewer", "the person who decided (default: the current user)")
    text = "leave alerts of a rule or key out of the queue and of notifications for a while"
    snooze = commands.add("snooze", _snooze, text)
    option(snooze, "subject", "a rule, * for any, or an alert, for its rule and key", "RULE|ALERT_ID")
    option(snooze, "--key", "only alerts whose key has this value; may be repeated", "FIELD=VALUE", action="append")
    option(snooze, "--until", "when it ends: a time, or a duration such as '8 hours'", "TIME")
    option(snooze, "--from", "when it begins (default: now)", "TIME", dest="since")
    option(snooze, "--reason", "the reason, for readers who wonder where the alerts are")
    option(snooze, "--author", "who snoozes them (default: the current user)")
    flag(snooze, "--end", "end the snoozes of exactly this rule and key now")
    text = "list snoozes: subject, author, reason, end, and the number of hidden alerts"
    flag(commands.add("snoozes", _list_snoozes, text), "--all", "include ended snoozes")
    notify = commands.add("notify", _notify, "send alerts to the receivers of CONF/notifiers.yml")
    which = notify.add_mutually_exclusive_group(required=True)
    option(which, "stream", "send alerts of this stream", nargs="?")
    flag(which, "--all", "send alerts of all declared streams")
    flag(notify, "--once", "send existing alerts, then exit; exit code 1 if any failed")
    option(notify, "--every", "how often to look (10 seconds)", "DURATION", default="10 seconds")
    option(notify, "--since", "the time from which a new receiver gets alerts (now)", "TIME")


def _list_alerts(options: CommandOptions) -> None:
    place = options.open_workspace()
    if options.stream:
        _ = place.stream  # raises if it is unknown
    if options.limit is not None and options.limit < 1:
        raise SetupError(f"--limit must be at least 1, got {options.limit}; leave it out to list every alert")
    if options.days is not None and not (options.queue or options.reports):
        raise SetupError(
            "--days is for the queue and reports: add --queue or --reports, or omit it to list every alert"
        )
    rows, note = place.answer(lambda tables: _read_alerts(tables, options))
    more = ["message"] if options.queue or options.reports else ["revision", "verdict", "message"]
    options.show_rows(rows, ["alert_id", "event_time", "severity", "rule_id", "key", "event_id", *more])
    if note:
        # On stderr, so that programs reading the rows do not see it.
        print(note, file=sys.stderr)


def _read_alerts(tables: Tables, options: CommandOptions) -> tuple[list[dict[str, Any]], str]:
    """Reads the alerts selected by the options, and a note on alerts that the queue leaves out."""
    tables.require_table("alerts")
    if options.queue or options.reports:
        from lookback.spark.review import QUEUE_DAYS, open_queue

        days = QUEUE_DAYS if options.days is None else options.days
        frame = open_queue(tables, options.rule, options.stream, days, tag=options.tag, reports=options.reports)
        note = "\n".join(verbs.list_queue_notes(tables, days)) if options.queue else ""
    else:
        from lookback.spark.review import list_alerts

        frame, note = list_alerts(tables, options.rule, options.stream, options.tag), ""
    rows = [row.asDict() for row in frame.toLocalIterator()]
    if options.rule is not None and not rows:
        verbs.require_rule(tables, options.rule)
    if options.limit is not None and options.limit < len(rows):
        left = f"{len(rows) - options.limit:,} more; without --limit all are listed"
        is_waiting = options.queue or options.reports
        rows = rows[: options.limit] if is_waiting else rows[len(rows) - options.limit :]
        note = f"{note}\n{left}".strip()
    return rows, note


def _explain(options: CommandOptions) -> None:
    from lookback.core.explaining.evidence import Explanation
    from lookback.spark.review import explain, explain_event

    if (options.alert_id is None) == (options.rule is None and options.event is None):
        raise SetupError("name an alert, or a rule and an event: lookback explain --rule ID --event ID")
    if options.alert_id is None and (options.rule is None or options.event is None):
        raise SetupError("--rule and --event belong together: lookback explain --rule ID --event ID")
    place = options.open_workspace()
    streams = place.streams

    def compute(tables: Tables) -> Explanation | EventExplanation:
        if options.alert_id is not None:
            return explain(tables, streams, options.alert_id, revision=options.revision)
        return explain_event(tables, streams, options.rule, options.event, version=options.version)

    explained = place.answer(compute)
    picture = explained if isinstance(explained, Explanation) else explained.picture
    if options.picture:
        if picture is None:
            raise SetupError("--picture: the rule does not see the event, so it has no time line")
        from lookback.views.timeline import plot_key_timeline

        plot_key_timeline(picture).savefig(options.picture)
    if options.wants_json:
        print_json([explained.to_dict()])
    elif isinstance(explained, Explanation):
        print_lines(*describe_alert(explained), *list_counted_events(explained))
    else:
        print_lines(*describe_event(explained))


def _review(options: CommandOptions) -> None:
    from lookback.spark.review import record_review

    tables = options.open_workspace().open_tables()
    announce(escape_unprintable(f"reading alert {options.alert_id}, and recording the decision"))
    recorded = record_review(
        tables, options.alert_id, options.disposition, options.reviewer, options.note, options.revision
    )
    print_lines(recorded)


def _snooze(options: CommandOptions) -> None:
    from lookback.spark.snoozes import end_snoozes, read_end, snooze

    if not options.end and (options.until is None or options.reason is None):
        raise SetupError("a snooze needs its end and a reason: --until '8 hours' --reason TEXT; --end ends one")
    key = _read_key(options.key)
    place, since = options.open_workspace(), options.read_moment("since")
    streams, tables = place.streams, place.tables
    if options.end:
        ended = end_snoozes(tables, streams, options.subject, key)
        print(f"{count_noun(ended, 'snooze')} ended" if ended else "No such snooze; `lookback snoozes` lists them.")
        return
    made = snooze(
        tables,
        streams,
        options.subject,
        key,
        until=read_end(options.until),
        reason=options.reason,
        since=since,
        author=options.author,
    )
    print_lines(made)


def _read_key(pairs: list[str] | None) -> dict[str, str] | None:
    if pairs is None:
        return None
    if wrong := [pair for pair in pairs if "=" not in pair]:
        raise SetupError(f"--key must be FIELD=VALUE such as customer_id=17, got {wrong[0]!r:.100}")
    return dict(pair.split("=", 1) for pair in pairs)


def _list_snoozes(options: CommandOptions) -> None:
    rows = options.open_workspace().answer(lambda tables: verbs.list_snoozes(tables, with_ended=options.all))
    if not options.wants_json:
        rows = [{**row, "rule_id": row["rule_id"] or "*"} for row in rows]
    options.show_rows(rows, ("rule_id", "key", "state", "from", "until", "alerts", "author", "reason"))


def _notify(options: CommandOptions) -> int:
    place, every = options.open_workspace(), parse_duration(options.every) / 1_000_000
    sending = verbs.make_notifier(place, options.since or "")

    def show(counts: DeliveryCounts) -> None:
        print(format_json(vars(counts)) if options.wants_json else counts, flush=True)

    stop = threading.Event()
    stop_on_signals(stop.set)
    total = sending.run(once=options.once, every=every, stop=stop, report=show)
    return FOUND_PROBLEMS if options.once and total.has_failed else 0
