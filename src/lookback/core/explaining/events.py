"""Explains how a rule judged one event, even if it raised no alert.

It shows the windows with the event, each part of the condition with its values, and other reasons why no alert was
raised.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lookback.core.explaining.eventexplanation import EventExplanation, JudgedWindow, Part, Reason, Standing
from lookback.core.explaining.evidence import NOT_DELETED, Evidence
from lookback.core.explaining.explanation import explain_alert, find_clean_start, list_last_rows
from lookback.core.explaining.progress import Progress, find_progress
from lookback.core.explaining.tracing import TracedRow, replay
from lookback.core.expressions.compiling import Expression, add_memberships, recompile, split_condition
from lookback.core.judging.lateness import find_in_time
from lookback.core.rules.compiled import WINDOW_COMPLETE, CompiledRule
from lookback.core.values.columns import Column, from_values, to_stored, to_text, to_texts
from lookback.core.values.durations import format_duration
from lookback.core.values.texts import join_words
from lookback.core.values.times import format_time, parse_time, to_utc
from lookback.core.values.types import BOOLEAN
from lookback.core.values.windows import EVENT, LOOKBACK, PER_EVENT, SEQUENCE, SESSION, TiledWindow


def explain_event_at(
    evidence: Evidence,
    at: int,
    commit: int,
    standing: Standing,
    rule_row: Mapping[str, Any],
    since: int,
    alerts: Sequence[Mapping[str, Any]] = (),
) -> EventExplanation:
    """Explains how the evidence's rule judged an event.

    Args:
        evidence: The rule and the events of the key.
        at: The position of the event in the evidence.
        commit: The commit as of which to explain.
        standing: The version that applied to the event.
        rule_row: The row of the rules table.
        since: The time at which the picture begins, in microseconds.
        alerts: The rows of the alerts table about the event.
    """
    rule, events = evidence.rule, evidence.events
    here = slice(at, at + 1)
    one = {name: column.take(here) for name, column in events.columns.items()}
    texts = {name: to_text(column.item(0)) for name, column in evidence.select_fields(here).items()}
    found = EventExplanation(
        rule_id=rule.spec.rule_id,
        standing=standing,
        event_id=events.id_text(at),
        event_time=to_utc(int(events.times[at])),
        arrival=int(events.commits[at]),
        event=texts,
        key=(
            {part.name: to_text(events.key_column(part.column).item(at)) for part in rule.key}
            if evidence.key is None
            else evidence.key
        ),
        is_seen=bool(evidence.is_wanted[at]),
        where=tuple(_judge_where(evidence, one)),
        alerts=tuple(alerts),
    )
    if found.is_seen:
        rows = _TRACERS.get(rule.spec.kind, _trace_window)(evidence, at, commit)
        windows = [_judge_row(evidence, one, row) for row in rows]
        watermark = evidence.clock.watermark_before(commit + 1)
        if isinstance(rule.window, TiledWindow):
            windows += _list_open(rule.window, int(events.times[at]), watermark, windows)
        elif rule.spec.kind == SESSION and not rule.spec.early:
            windows = [replace(each, is_judged=parse_time(each.window_end) <= watermark) for each in windows]
        span = (windows[0].window_start, windows[0].window_end) if windows else (found.event_time, found.event_time)
        picture = explain_alert(evidence, _make_row(found, span, commit), rule_row, since)
        found = replace(found, windows=tuple(windows), steps=tuple(_judge_steps(evidence, at, one)), picture=picture)
        if rule.spec.kind == SEQUENCE and not windows:
            found = replace(found, progress=find_progress(evidence, at))
    return replace(found, reasons=tuple(_find_reasons(evidence, at, commit, found)))


def _make_row(found: EventExplanation, span: tuple[Any, Any], commit: int) -> dict[str, Any]:
    """Makes the row that an alert about the event would have, for the picture."""
    return {
        "alert_id": "",
        "revision": 0,
        "verdict": "raised",
        "rule_id": found.rule_id,
        "rule_version": found.standing.version,
        "key": found.key,
        "event_id": found.event_id,
        "event_time": found.event_time,
        "window_start": span[0],
        "window_end": span[1],
        "measures": {},
        "message": "",
        "evidence": [found.event_id],
        "arrival": commit,
        "severity": "",
    }


def _trace_event(evidence: Evidence, at: int, commit: int) -> list[TracedRow]:
    """Returns the row that a lookback rule gave for the event when it arrived."""
    time, arrival = int(evidence.events.times[at]), int(evidence.events.commits[at])
    positions = np.arange(evidence.first_counted(at + 1), at + 1, dtype=np.int64)
    rows = replay(evidence, arrival, first=time, last=time, positions=positions, late="evaluate")
    return [row for row in rows if evidence.position_of(row.place) == at][-1:]


def _trace_window(evidence: Evidence, at: int, commit: int) -> list[TracedRow]:
    """Returns the last row of each window that covers the event, the last window first."""
    rule, time = evidence.rule, int(evidence.events.times[at])
    if isinstance(rule.window, TiledWindow):
        starts = _list_starts(rule.window, time)
        traced = replay(evidence, commit, first=starts[-1] + rule.window.size, last=starts[0] + rule.window.size)
    else:
        positions = np.flatnonzero(evidence.events.times >= find_clean_start(evidence, time))
        traced = replay(evidence, commit, first=time, last=None, positions=positions, early=True)
    rows = list_last_rows(traced)
    return [row for row in reversed(rows) if _covers(row, time)]


def _covers(row: TracedRow, time: int) -> bool:
    return parse_time(row.alert.window_start) <= time < parse_time(row.alert.window_end)


def _list_starts(window: TiledWindow, time: int) -> range:
    """Lists the starts of the windows that cover a time, the last one first."""
    return range(window.last_start(time), time - window.size, -window.slide)


def _list_open(
    window: TiledWindow, time: int, watermark: int, judged: Sequence[JudgedWindow]
) -> Iterator[JudgedWindow]:
    """Yields the windows that cover a time and have not ended, except those that were judged early."""
    starts = {each.window_start for each in judged}
    for start in _list_starts(window, time):
        if start + window.size > watermark and to_utc(start) not in starts:
            yield JudgedWindow(to_utc(start), to_utc(start + window.size), False, False, {}, ())


def _trace_match(evidence: Evidence, at: int, commit: int) -> list[TracedRow]:
    """Returns the rows of the matches that took the event."""
    time = int(evidence.events.times[at])
    positions = np.arange(evidence.first_counted(at + 1), len(evidence.events), dtype=np.int64)
    rows = replay(evidence, commit, first=time, last=None, positions=positions)
    return [row for row in rows if any(at in taken for taken in row.taken) and not row.is_retraction]


_TRACERS = {EVENT: _trace_event, LOOKBACK: _trace_event, SEQUENCE: _trace_match}


def _judge_row(evidence: Evidence, one: Mapping[str, Column], row: TracedRow) -> JudgedWindow:
    """Judges the condition over the measures of a row, part by part."""
    rule, alert, columns = evidence.rule, row.alert, dict(one)
    values = {measure.name: row.value_of(measure) for measure in rule.measures}
    for each in rule.measures:
        value = values[each.name]
        columns[each.name] = from_values(each.type, [None if value is None else to_stored(each.type, value)])
    columns[WINDOW_COMPLETE] = from_values(BOOLEAN, [alert.window_complete])
    commit = None
    if rule.when is not None and rule.when.memberships:
        commit = evidence.lists.commit_at(alert.arrival)
        lists = evidence.lists.read(alert.arrival, rule.when.memberships)
        times = np.array([parse_time(alert.event_time)], dtype=np.int64)
        columns = add_memberships(columns, rule.when.memberships, times, lists)
    parts = tuple(_judge_parts(rule.when, columns))
    return JudgedWindow(
        alert.window_start, alert.window_end, True, alert.window_complete, to_texts(values), parts, commit
    )


def _judge_where(evidence: Evidence, one: Mapping[str, Column]) -> Iterator[Part]:
    """Judges the parts of `where`; what guards an entry of the key is shown as that entry, and only if it has an error."""
    guarded = [part for part in evidence.rule.key if part.guard]
    guards = {recompile(part.guard, evidence.stream.fields).sql: part for part in guarded}
    for judged in _judge_parts(evidence.rule.where, one):
        entry = guards.get(judged.text)
        if entry is None or judged.has_error:
            yield judged if entry is None else replace(judged, text=f"{entry.name}: {entry.sql}")


def _judge_parts(condition: Expression | None, columns: Mapping[str, Column]) -> Iterator[Part]:
    for part in [] if condition is None else split_condition(condition):
        yield _judge_part(part, columns)


def _judge_part(part: Expression, columns: Mapping[str, Column], step: str = "", is_linked: bool = False) -> Part:
    value = part.evaluate(columns, 1)
    has_error = value.error is not None and bool(value.error[0])
    texts = {name: to_text(columns[name].item(0)) for name in sorted(part.named)}
    for membership in part.memberships:
        if part.sql.removeprefix("not ") != membership.sql:
            texts[membership.sql] = to_text(columns[membership.name].item(0))
    holds = value.item(0)
    lists = () if holds else tuple(dict.fromkeys(_find_decisive_lists(part, columns)))
    return Part(part.sql, texts, holds, has_error, step, is_linked, lists)


def _find_decisive_lists(part: Expression, columns: Mapping[str, Column]) -> Iterator[str]:
    """Yields each list whose opposite answer would make a part hold that does not."""
    for membership in part.memberships:
        column = columns[membership.name]
        turned = {**columns, membership.name: replace(column, values=~column.values)}
        if part.evaluate(turned, 1).is_true()[0]:
            yield membership.list_name


def find_key_fields(rule: CompiledRule, event: Mapping[str, Column]) -> tuple[str, ...]:
    """Finds the fields that make the key under which to explain an event: those of the last step that it may satisfy.

    Lists are not asked. An event that satisfies no step has the key of group_by.
    """
    fields = rule.group_by
    if rule.sequence is not None and rule.sequence.has_own_keys:
        for number, step in enumerate(rule.sequence.steps):
            if step.gate is None or step.gate.memberships or step.gate.evaluate(event, 1).is_true()[0]:
                fields = rule.sequence.key_of(number)
    return fields


def _judge_steps(evidence: Evidence, at: int, one: Mapping[str, Column]) -> Iterator[Part]:
    """Judges each step of a sequence by the part of its condition that reads only the event, and by its key."""
    sequence, key = evidence.rule.sequence, evidence.rule.key
    for number, step in enumerate(sequence.conditions if sequence else ()):
        if sequence is not None and not evidence.has_key(number)[at]:
            fields = sequence.key_of(number)
            texts = {name: to_text(evidence.events.key_column(name).item(at)) for name in fields}
            own = " and ".join(f"{name} = {part.name} of the key" for name, part in zip(fields, key, strict=True))
            yield Part(own, texts, False, step=step.step.name)
        elif step.gate is None:
            yield Part(step.condition.sql, {}, None, step=step.step.name, is_linked=True)
        else:
            judged = _judge_part(step.gate, one, step.step.name, not step.own)
            yield replace(judged, text=step.condition.sql)


def _find_reasons(evidence: Evidence, at: int, commit: int, found: EventExplanation) -> Iterator[Reason]:
    """Yields the reasons why the event raised an alert or not, the strongest first."""
    rule, spec, events = evidence.rule, evidence.rule.spec, evidence.events
    time, arrival = int(events.times[at]), int(events.commits[at])
    for alert in found.alerts:
        yield Reason(
            str(alert["verdict"]), f"Alert {alert['alert_id']}, revision {alert['revision']}: {alert['verdict']}."
        )
    yield from _find_standing_reasons(evidence, at, found)
    if not found.is_seen:
        lists_commit = evidence.lists.commit_at(arrival)
        yield _make_reason("where", "The rule does not see the event", found.where, lists_commit)
        return
    yield from _find_late_reasons(evidence, at)
    ends = [parse_time(each.window_end) for each in found.windows] if spec.kind not in PER_EVENT else [time]
    if ends and not any(_is_effective(rule, each) for each in ends):
        yield Reason("range", "The rule triggers only within [effective_from, effective_until); this time is outside.")
    judged = [each for each in found.windows if each.is_judged]
    for window in judged:
        if any(not part.holds for part in window.parts):
            words = f"{_name_window(rule, window)}the condition does not hold"
            yield _make_reason("condition", words, window.parts, window.lists_commit)
    if spec.kind == LOOKBACK and not found.windows and arrival <= commit and _is_taken(evidence, at):
        yield Reason("error", "A measure has an error over the event's window, so the condition does not hold.")
    if open_ := [each for each in found.windows if not each.is_judged]:
        yield Reason(
            "open", f"{_name_window(rule, open_[0])}nothing is judged yet: the watermark has not passed its end."
        )
    if found.progress is not None:
        fits = [part.step for part in found.steps if part.holds or part.holds is None]
        words = f"it fits {join_words(fits)} alone" if fits else "it fits no step"
        came = " ".join(
            _describe_progress(evidence, found, found.progress, evidence.clock.watermark_before(commit + 1))
        )
        yield Reason("sequence", f"No complete match took the event; {words}. {came}")
        for part in found.steps:
            if part.lists:
                names = join_words([repr(each) for each in part.lists])
                yield Reason("list", f"If the list {names} answered otherwise, it would fit step {part.step}.")
    if spec.kind == LOOKBACK and evidence.first_counted(at + 1):
        yield Reason(
            "reset",
            "An earlier alert emptied the windows of the key (reset_on_alert): events before that alert do not count.",
        )
    if any(not each.is_complete for each in judged):
        yield Reason(
            "incomplete",
            "The window begins before the rule started to keep state, so earlier events did not count in it.",
        )
    if evidence.gone_at is not None and evidence.gone_at[at] != NOT_DELETED:
        yield Reason("deleted", f"The event was deleted with commit {evidence.gone_at[at]}.")
    if spec.suppress is not None and not found.alerts and any(each.holds for each in judged):
        yield Reason("suppress", "After an alert, the rule suppresses further alerts of the key for a time.")


def _make_reason(name: str, words: str, parts: Sequence[Part], lists_commit: int | None) -> Reason:
    """Makes the reason for parts of a condition that kept the event from raising an alert.

    The reason is `list` if each part that fails would hold with the opposite answer from a list, as of `lists_commit`.
    """
    failed = [part for part in parts if not part.holds]
    text = f"{words}: {join_words([str(part) for part in failed])}."
    if any(part.has_error for part in parts):
        return Reason("error", text)
    if not all(part.lists for part in failed):
        return Reason(name, text)
    names = join_words([repr(each) for each in dict.fromkeys(each for part in failed for each in part.lists)])
    since = "before the first commit" if lists_commit is None else f"as of commit {lists_commit}"
    return Reason("list", f"{text} The deciding list is {names}, {since} of table lists.")


def _describe_progress(
    evidence: Evidence, found: EventExplanation, progress: Progress, watermark: int
) -> Iterator[str]:
    """Yields sentences about how far the steps had come, and whether a wait for an absence is over."""
    sequence, spec = evidence.rule.sequence, evidence.rule.spec.sequence
    assert sequence is not None
    assert spec is not None
    within = format_duration(spec.within)
    span = f"In the {within} up to the event" if spec.expiry != "fixed" else f"In a match of {within}"
    yield f"{span}, {join_words([str(step) for step in progress.steps])}."
    if progress.untimed:
        steps, gap = join_words([str(step) for step in progress.untimed]), format_duration(progress.gap)
        yield f"Without the time limit, {steps}; the first event came {gap} before this one."
    if sequence.absent is not None and all(step.is_met for step in progress.steps):
        due = parse_time(found.event_time) + (sequence.absent.step.within or 0)
        over = (
            f"an event that must not come by {format_time(due)} came"
            if due < watermark
            else f"the wait lasts until {format_time(due)}"
        )
        yield f"Step {sequence.absent.step.name}: {over}."


def _find_standing_reasons(evidence: Evidence, at: int, found: EventExplanation) -> Iterator[Reason]:
    standing = found.standing
    if standing.status in ("retired", "quarantined"):
        yield Reason(
            standing.status,
            f"The rule was {standing.status} by version {standing.version} before the event came. "
            "The rest assumes that it was in force.",
        )
    elif not standing.status:
        came = (
            ""
            if standing.since is None
            else f"; version {standing.version} came into force after commit {standing.since}"
        )
        yield Reason(
            "not in force",
            f"Version {standing.version} was not in force when the event came with commit "
            f"{evidence.events.commits[at]}{came}. The rest assumes that it was.",
        )
    elif standing.status == "paused":
        yield Reason("paused", f"Version {standing.version} was paused: it counted the event but raised no alert.")
    elif standing.status == "shadow":
        yield Reason("shadow", f"Version {standing.version} was in shadow: its alerts are not for review.")


def _find_late_reasons(evidence: Evidence, at: int) -> Iterator[Reason]:
    time, watermark = int(evidence.events.times[at]), evidence.clock.watermark_before(int(evidence.events.commits[at]))
    if time >= watermark:
        return
    late = f"The event is late: the watermark was at {format_time(watermark)}"
    if not _is_taken(evidence, at):
        yield Reason(
            "late", f"{late}. It came later than the rule allows (allowed_lateness), so the rule discarded it."
        )
    elif evidence.rule.spec.kind in PER_EVENT and evidence.rule.spec.late == "record":
        yield Reason("late", f"{late}. The rule counts it for later events but does not judge it (late: record).")


def _is_taken(evidence: Evidence, at: int) -> bool:
    """Returns whether the event came in time for the rule to count it."""
    rule = evidence.rule
    watermark = evidence.clock.watermark_before(int(evidence.events.commits[at]))
    tiles = rule.window if isinstance(rule.window, TiledWindow) else None
    times = np.array([evidence.events.times[at]])
    return bool(find_in_time(times, np.array([watermark]), rule.allowed_lateness, tiles)[0])


def _is_effective(rule: CompiledRule, time: int) -> bool:
    first, until = rule.spec.effective_from, rule.spec.effective_until
    return (first is None or time >= first) and (until is None or time < until)


def _name_window(rule: CompiledRule, window: JudgedWindow) -> str:
    if rule.spec.kind in PER_EVENT:
        return "When the event came, "
    kind = "session" if rule.spec.kind == SESSION else "match" if rule.spec.kind == SEQUENCE else "window"
    first, end = (format_time(parse_time(each)) for each in (window.window_start, window.window_end))
    return f"In the {kind} from {first} to {end} "
