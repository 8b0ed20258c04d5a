"""The sentences of a review desk: what waits, and what a decision or its undoing did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lookback.core.values.texts import count_noun
from lookback.core.values.times import format_time
from lookback.desk.queue import QueuedAlert, ReviewQueue, SessionStep
from lookback.spark.review import RecordedReviews, Review


def describe_queue(queue: ReviewQueue, *, is_cut: bool) -> str:
    """Says how many alerts wait, and how many of them the filter shows."""
    waiting, shown = len(queue), len(queue.shown)
    text = f"{waiting:,} alerts wait" if waiting != 1 else "1 alert waits"
    text = f"More than {waiting:,} alerts wait; these are the first" if is_cut else text
    return f"{text}, {shown:,} of them shown." if shown != waiting else f"{text}."


def describe_title(alert: QueuedAlert) -> str:
    """Names an alert by severity, rule, key and time."""
    snoozed = ", snoozed" if alert.is_snoozed else ""
    return f"{alert.severity}{snoozed}: {_name_subject(alert)}, {format_time(alert.event_time)} (+00:00)"


def describe_row(alert: QueuedAlert) -> str:
    """Says what the queue knows of an alert: its message and its measures."""
    measures = ", ".join(f"{name} = {'null' if text is None else text}" for name, text in alert.measures.items())
    return f"{alert.message or 'The rule has no message.'}\n{measures}"


def describe_recorded(
    recorded: RecordedReviews, disposition: str, done: Sequence[QueuedAlert], *, is_single: bool
) -> str:
    """Says on which alerts a decision was recorded, on which it was not, and which have a later revision."""
    sentences = [f"Recorded {disposition} for {_name_alerts(done)}."] if done else []
    if recorded.elsewhere:
        count = count_noun(len(recorded.elsewhere), "alert")
        sentences.append(f"Not recorded for {count}, decided meanwhile: {_list_reviews(recorded.elsewhere)}.")
        sentences += ["Press again to override, or Next to leave it."] if is_single else []
    if recorded.later:
        count = count_noun(len(recorded.later), "alert")
        sentences.append(f"{count} got a later revision: look at it, and decide again if it changes your mind.")
    return " ".join(sentences)


def describe_undone(step: SessionStep, left: Mapping[str, Sequence[Review]]) -> str:
    """Says which decision was withdrawn, and which alerts other reviewers have decided."""
    sentence = f"Undone: {step.disposition} of {_name_alerts(step.alerts)}."
    return sentence + (f" {count_noun(len(left), 'alert')} stay decided: {_list_reviews(left)}." if left else "")


def describe_like(found: int, shown: int) -> str:
    """Says how many other alerts of the same entity there are."""
    more = f"; the newest {shown}" if found > shown else ""
    return f"Other alerts of the same entity: {found:,}{more}." if found else "No other alert of the same entity."


def _name_alerts(alerts: Sequence[QueuedAlert]) -> str:
    """Names one alert, or counts several."""
    return _name_subject(alerts[0]) if len(alerts) == 1 else count_noun(len(alerts), "alert")


def _name_subject(alert: QueuedAlert) -> str:
    return f"{alert.rule_id}, {alert.entity or 'all events'}"


def _list_reviews(reviews: Mapping[str, Sequence[Review]]) -> str:
    """Lists the last review of each of the first three alerts."""
    listed = [str(each[-1]) for each in list(reviews.values())[:3]]
    return "; ".join(listed) + ("; ..." if len(reviews) > 3 else "")
