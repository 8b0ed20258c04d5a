"""Writes explanations of alerts and events as lines of text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from lookback.core.values.texts import count_noun
from lookback.core.values.times import format_time, parse_time

if TYPE_CHECKING:
    from lookback.core.explaining.eventexplanation import EventExplanation, JudgedWindow
    from lookback.core.explaining.evidence import Explanation

# Further windows of an event are only in the JSON.
_MAX_WINDOWS = 5
_MAX_EVENTS = 20


def describe_alert(explanation: Explanation) -> Iterator[str]:
    """Yields the alert, its rule in words, and whether its values could be reproduced."""
    alert, rule = explanation.alert, explanation.rule
    author = f" by {rule['author']}" if rule.get("author") else ""
    message = alert["message"] or "the rule has no message"
    yield f"Alert {alert['alert_id']}, revision {alert['revision']} ({alert['severity']}): {message}"
    yield f"Rule {alert['rule_id']}, version {alert['rule_version']}{author}. {explanation.sentence}"
    yield " ".join([_describe_key(explanation.key), *explanation.notes, _describe_check(explanation)])
    about = {name: text for name, text in (alert.get("entities") or {}).items() if name not in explanation.key}
    if about:
        yield f"About: {_join_texts(about)}."
    if alert.get("tags"):
        yield f"Tags: {', '.join(alert['tags'])}."
    if runbook := (rule.get("document") or {}).get("runbook"):
        yield f"Runbook: {runbook}"


def list_counted_events(explanation: Explanation) -> Iterator[str]:
    """Yields the events that the alert counted, oldest first and at most the last twenty: time, id, and what each did.

    That is the step that took it, or the measure as of each event of a lookback rule.
    """
    shown = explanation.timeline
    if shown.empty:
        return
    counted = shown[shown["in_window"] | shown["is_alert"]] if "in_window" in shown else shown[shown["is_alert"]]
    yield f"Events, the last {_MAX_EVENTS} of {len(counted):,}:" if len(counted) > _MAX_EVENTS else "Events:"
    for row in counted.tail(_MAX_EVENTS).to_dict("records"):
        running = row.get("running", math.nan)
        what = row.get("step") or ("" if math.isnan(running) else f"{explanation.main} = {running:.12g}")
        if row["is_alert"]:
            what = f"{what}, raised the alert".removeprefix(", ")
        yield f"  {format_time(parse_time(row['event_time']))}  {row['event_id']}  {what}".rstrip()


def describe_event(found: EventExplanation) -> Iterator[str]:
    """Yields the event, the rule's version, every reason for or against an alert, and the windows with their values."""
    fields = ", ".join(f"{name} = {'null' if text is None else text}" for name, text in found.event.items())
    yield f"Event {found.event_id} at {format_time(parse_time(found.event_time))}, commit {found.arrival}: {fields}."
    standing = found.standing
    yield f"Rule {found.rule_id}, version {standing.version}: {standing.status or 'not in force'}. {_describe_key(found.key)}"
    for reason in found.reasons:
        yield f"- {reason.text}"
    if not found.reasons:
        yield "- Nothing prevents an alert, but there is none yet: the event may still wait; see `lookback status`."
    for window in found.windows[:_MAX_WINDOWS]:
        yield _describe_window(window)
        yield from (f"  {part}" for part in window.parts)
    if len(found.windows) > _MAX_WINDOWS:
        yield f"And {count_noun(len(found.windows) - _MAX_WINDOWS, 'more window')}: --json has them all."
    for part in (*found.where, *found.steps):
        yield f"  {part}"
    yield from found.notes


def _describe_window(window: JudgedWindow) -> str:
    first, end = (format_time(parse_time(each)) for each in (window.window_start, window.window_end))
    measures = ", ".join(f"{name} = {'null' if text is None else text}" for name, text in window.measures.items())
    # The window of a sequence has no measures.
    what = measures or ("" if window.is_judged else "not judged yet")
    return f"Window from {first} to {end}{f': {what}' if what else ''}"


def _describe_key(key: Mapping[str, str | None]) -> str:
    return f"Key: {_join_texts(key) or 'all events together'}."


def _join_texts(texts: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name} = {text}" for name, text in texts.items())


def _describe_check(explanation: Explanation) -> str:
    """Says whether the alert's values could be recomputed, and how many of its events are missing."""
    missing = (
        f" {explanation.missing} of its events have been deleted since and are not shown."
        if explanation.missing
        else ""
    )
    values = "The steps" if explanation.steps else "The measures"
    if explanation.consistent:
        return f"{values}, recomputed from the events at that time, match those of the alert.{missing}"
    return f"{values} could not be reproduced from the current events.{missing}"
