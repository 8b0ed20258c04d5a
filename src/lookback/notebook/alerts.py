"""The cells about alerts: the queue, explanations, reviews, snoozes, and how right rules are."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pandas as pd

from lookback import verbs
from lookback.core.errors import SetupError
from lookback.core.explaining.eventexplanation import EventExplanation
from lookback.core.explaining.evidence import Explanation, MeasureEvidence
from lookback.core.values.texts import count_noun
from lookback.core.values.times import parse_calendar_time, to_utc
from lookback.desk.records import AlertRecords
from lookback.notebook.showing import say, show_desk, show_frame
from lookback.spark import labels, review, snoozes
from lookback.spark.figures import Period, RuleFigures
from lookback.verbs import Workspace
from lookback.views import pictures
from lookback.views.display import show, text, to_frame
from lookback.views.explanations import describe_alert, describe_event
from lookback.views.terminal import describe_redundant
from lookback.views.timeline import plot_key_timeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from lookback.desk.review import ReviewDesk

_MAX_LISTED_EVENTS = 50
_MAX_READ_ALERTS = 1_000
_MAX_DRAWN_ROWS = 100_000


def show_alerts(workspace: Workspace, rule_id: str = "", days: float = 90) -> pd.DataFrame:
    """Shows the newest 100,000 alerts by rule, mode and verdict, and plots their times.

    `rule_id` selects one rule; empty for all. Alerts decided more than `days` ago are left out.
    """
    alerts = _select(workspace, workspace.tables.read("alerts"), rule_id)
    alerts = alerts.where(alerts["decided_at"] >= review.queue_begins(days))
    kinds = ["rule_id", "mode", "verdict", "severity"]
    newest = to_frame(_sort_newest(alerts).limit(_MAX_DRAWN_ROWS).select("event_time", *kinds))
    counts = newest.groupby(kinds).size().rename("alerts").reset_index().sort_values("alerts", ascending=False)
    return show_frame(counts, "No alerts yet.", pictures.plot_alerts_over_time(newest))


def _select(workspace: Workspace, rows: DataFrame, rule_id: str) -> DataFrame:
    """Selects the rows about the chosen stream, and about one rule unless `rule_id` is empty."""
    own = rows.where(rows["stream"] == workspace.stream.name)
    return own.where(own["rule_id"] == rule_id) if rule_id else own


def _sort_newest(alerts: DataFrame, *ties: str) -> DataFrame:
    return alerts.orderBy(alerts["event_time"].desc(), *ties)


def show_queue(workspace: Workspace, rule_id: str = "", limit: int = 20, days: float = 90) -> pd.DataFrame:
    """Shows the first alerts of the stream's open queue, by severity, and the total number waiting.

    Alerts decided more than `days` ago are left out, and a sentence says so.
    """
    queue = review.open_queue(workspace.tables, rule_id or None, workspace.stream.name, days)
    # If few alerts wait, one pass over the tables is enough.
    frame = to_frame(queue.limit(_MAX_READ_ALERTS))
    waiting = len(frame) if len(frame) < _MAX_READ_ALERTS else queue.count()
    say(f"{waiting:,} alerts wait for review" + (f"; the first {limit}:" if waiting > limit else "."))
    show(*map(text, verbs.list_queue_notes(workspace.tables, days)))
    first = frame.head(limit)
    if len(first):
        show(first[["severity", "event_time", "rule_id", "key", "measures", "message", "alert_id", "revision"]])
    return first


def show_reports(workspace: Workspace, rule_id: str = "", limit: int = 20, days: float = 90) -> pd.DataFrame:
    """Shows the newest reports of the stream: alerts of rules with `queue: false` or severity info, which need nobody.

    Reports made more than `days` ago are left out.
    """
    reports = review.open_queue(workspace.tables, rule_id or None, workspace.stream.name, days, reports=True)
    newest = _sort_newest(reports, "rule_id", "alert_id").limit(limit)
    columns = ("event_time", "rule_id", "key", "measures", "message", "alert_id", "revision")
    return show_frame(to_frame(newest.select(*columns)), "No rule has written a report.")


def open_desk(
    workspace: Workspace, rule_id: str = "", days: float = 90, reviewer: str = "", wanted: bool = True
) -> ReviewDesk | None:
    """Shows the review desk: the queue, one alert, and buttons to decide on it.

    `rule_id` and `days` are as in `show_queue`; `reviewer` defaults to the user who runs the notebook. There is no desk
    unless it is wanted, see `show_desk`.
    """
    which: dict[str, Any] = {
        "stream": workspace.stream.name,
        "rule_id": rule_id or None,
        "days": days,
        "reviewer": reviewer or None,
    }
    make = partial(AlertRecords, workspace.tables, workspace.streams, **which)
    return show_desk("review", lambda desk: desk.ReviewDesk(make()), wanted)


def explain_alert(
    workspace: Workspace, alert_id: str = "", queue: pd.DataFrame | None = None, revision: str = ""
) -> Explanation | None:
    """Explains one alert: the rule in words, its measures, the events that counted, a chart.

    `alert_id` defaults to the first alert of `queue`, `revision` to the alert's last. Returns None, and shows a
    sentence, if the queue is empty. Raises ReviewError for an unknown alert, and SetupError if `revision` is not a
    number.
    """
    chosen = alert_id or (str(queue["alert_id"].iloc[0]) if queue is not None and len(queue) else "")
    if not chosen:
        say("Nothing to explain: the queue is empty.")
        return None
    if alert_id and revision and not revision.isdecimal():
        raise SetupError(f"parameter revision must be a whole number or empty, got {revision!r}")
    number = int(revision) if alert_id and revision else None
    explanation = review.explain(workspace.tables, workspace.streams, chosen, revision=number)
    show_explanation(explanation)
    return explanation


def explain_event(workspace: Workspace, rule_id: str = "", event_id: str = "") -> EventExplanation | None:
    """Explains how a rule judged an event, with or without an alert: every reason, the windows, and a chart.

    Returns None, and shows a sentence, if `event_id` is empty. Raises ReviewError if the rule or the event is unknown,
    and SetupError if `rule_id` is empty.
    """
    if not event_id:
        say("No event to explain: set event_id and rule_id to see how a rule judged an event.")
        return None
    if not rule_id:
        raise SetupError("event_id needs a rule: set rule_id too")
    found = review.explain_event(workspace.tables, workspace.streams, rule_id, event_id)
    show(*map(text, describe_event(found)), *([] if found.picture is None else [plot_key_timeline(found.picture)]))
    return found


def show_explanation(explanation: Explanation) -> None:
    """Shows the explanation as text, tables and a chart, with the newest 50 events that counted."""
    measures = [_make_measure_row(measure) for measure in explanation.measures]
    show(*map(text, describe_alert(explanation)), *([pd.DataFrame(measures)] if measures else []))
    show(plot_key_timeline(explanation))
    for measure in explanation.measures:
        if measure.name == explanation.main:
            shown = measure.events.tail(_MAX_LISTED_EVENTS).iloc[::-1]
            show(text(f"Events that counted for {measure.name}: {len(measure.events):,}"), shown)
    for step in explanation.steps:
        number = count_noun(len(step.events), "event")
        taken = f"{number} came" if step.absent else f"{number}, in the order taken"
        listed = [step.events.head(_MAX_LISTED_EVENTS)] if len(step.events) else []
        show(text(f"Step {step.name}, {step.words}: {taken}"), *listed)


def _make_measure_row(measure: MeasureEvidence) -> dict[str, Any]:
    end = "to" if measure.end_included else "to before"
    window = {"from": measure.window_start, end: measure.window_end}
    values = {"in the alert": measure.recorded, "recomputed": measure.recomputed, "events": len(measure.events)}
    return {"measure": measure.name, "is": measure.words, **window, **values}


def review_alert(
    workspace: Workspace,
    explanation: Explanation | None,
    alert_id: str = "",
    disposition: str = "",
    reviewer: str = "",
    note: str = "",
) -> None:
    """Records your decision on the explained alert, with the revision that was shown.

    Args:
        workspace: Tables and streams.
        explanation: Result of `explain_alert`; None if the queue is empty.
        alert_id: The alert that you decide on. If empty, nothing is recorded, so that no decision lands on an alert
            that merely comes first in the queue.
        disposition: confirmed, false_positive, benign or unclear; empty to record nothing.
        reviewer: Default: the user who runs the notebook.
        note: Remark on the decision.

    Raises:
        ReviewError: If the decision cannot be recorded.
    """
    if explanation is None or not disposition:
        say("Nothing is recorded: set disposition to confirmed, false_positive, benign or unclear.")
        return
    shown = explanation.alert
    if alert_id != shown["alert_id"]:
        name = f"alert_id {shown['alert_id']} and revision {shown['revision']}"
        say(f"Nothing is recorded: say which alert you decide on. For the one above, set {name}.")
        return
    seen = shown["revision"]
    say(str(review.record_review(workspace.tables, alert_id, disposition, reviewer or None, note, revision=seen)))


def snooze_alerts(
    workspace: Workspace, alert_id: str = "", rule_id: str = "", until: str = "", reason: str = "", author: str = ""
) -> None:
    """Hides alerts from the queue and from notifications for a while, and lists the snoozes that have not ended.

    Args:
        workspace: Tables and streams.
        alert_id: Snoozes alerts of this alert's rule and key.
        rule_id: Snoozes alerts of this rule, of any key, if alert_id is empty.
        until: A time, or a duration such as `8 hours`; empty to snooze nothing.
        reason: For readers who wonder where the alerts are.
        author: Default: the user who runs the notebook.

    Raises:
        ReviewError: If the alert or rule is unknown, or `until` is invalid.
        SetupError: If neither an alert nor a rule is given.
    """
    if until:
        if not (alert_id or rule_id):
            raise SetupError("snooze_until needs something to snooze: set alert_id or rule_id too")
        made = snoozes.snooze(
            workspace.tables,
            workspace.streams,
            alert_id or rule_id,
            until=snoozes.read_end(until),
            reason=reason,
            author=author or None,
        )
        say(str(made))
    show_frame(pd.DataFrame(verbs.list_snoozes(workspace.tables)), "Nothing is snoozed.")


def show_precision(workspace: Workspace, rule_id: str = "") -> pd.DataFrame:
    """Shows the decisions on the stream's alerts by rule; the last review of each alert counts.

    `rule_id` selects one rule; empty for all.
    """
    frame = to_frame(_select(workspace, review.decisions(workspace.tables), rule_id).drop("stream"))
    return show_frame(frame, "No alert has been reviewed yet.", pictures.plot_precision(frame))


def import_labels(workspace: Workspace, path: str = "", positive: str = "", event_id: str = "", at: str = "") -> None:
    """Appends the labels in a file, if there is a path, to the table `labels`, and shows the outcome.

    `positive`, `event_id` and `at` name columns of the file; see `lookback.spark.labels.import_labels` for the
    defaults.
    """
    if not path:
        say("No labels imported: set the parameter labels to a file.")
        return
    columns: dict[str, Any] = {"event_id": event_id or None, "positive": positive or None, "at": at or None}
    report = labels.import_labels(workspace.tables, workspace.stream, path, **columns)
    show(*(text(str(each)) for each in (report, *report.rejections)))


def measure_rules(workspace: Workspace, rule_id: str = "", as_of: str = "") -> RuleFigures:
    """Shows precision and recall of the stream's rules, over time and in total, from labels and reviews.

    `rule_id` selects one rule; empty for all. Alerts and labels after the time `as_of` (empty: now) do not count.
    Returns the figures, for `show_overlap`.
    """
    period = Period(as_of=to_utc(parse_calendar_time(as_of)) if as_of else None)
    rules = [rule_id] if rule_id else None
    figures = RuleFigures(workspace.tables, workspace.stream, period, rules, streams=workspace.streams)
    days, by_rule = to_frame(figures.by_day()), to_frame(figures.by_rule())
    show(pictures.plot_rule_figures(days), by_rule)
    return figures


def show_overlap(figures: RuleFigures) -> pd.DataFrame:
    """Shows which rules flag the same events, what each catches alone, and which rules add nothing."""
    pairs, alone = to_frame(figures.pairs()), to_frame(figures.alone())
    show(pictures.plot_overlap(pairs, alone), alone)
    show(text(describe_redundant([{str(k): v for k, v in row.items()} for row in alone.to_dict("records")])))
    return alone
