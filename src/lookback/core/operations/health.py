"""Decides from a stream's figures whether it is healthy, what is wrong, and what to do about it."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lookback.core.operations.figures import Figures
from lookback.core.operations.thresholds import THRESHOLDS
from lookback.core.rules.roles import SHADOW, name_role
from lookback.core.streams.metrics import RuleCounts
from lookback.core.values.texts import count_noun

PROBLEM, WARNING, NOTE = "problem", "warning", "note"
LEVELS = (PROBLEM, WARNING, NOTE)


@dataclass(frozen=True)
class Finding:
    """One finding about a stream.

    Attributes:
        level: problem (events are not judged, or not correctly), warning (needs attention) or note (good to know).
        check: The name of the check.
        what: A sentence with the figures.
        remedy: What to do.
    """

    level: str
    check: str
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.level}: {self.what} {self.remedy}"


def check_health(figures: Figures) -> list[Finding]:
    """Runs all checks and returns their findings, problems first; empty if all is well."""
    findings = [finding for check in _CHECKS for finding in check(figures)]
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


def needs_leader(findings: Sequence[Finding]) -> bool:
    """Returns whether a finding names the event that moved the watermark ahead."""
    return any(finding.check in _NAMING_LEADER for finding in findings)


def make_misfit(what: str) -> Finding:
    """Makes the finding about an events table that lacks declared fields. `what` says which, and what to do."""
    return Finding(PROBLEM, "fields", f"The {what}.", "Until then its events cannot be read.")


def is_healthy(findings: Sequence[Finding]) -> bool:
    """Returns whether nothing needs to be done, because all findings are notes."""
    return all(finding.level == NOTE for finding in findings)


def describe_health(figures: Figures, findings: Sequence[Finding]) -> str:
    """Describes the stream in a sentence, such as: payments is healthy: judged through commit 7, nothing waits."""
    counts = Counter(finding.level for finding in findings)
    problems = [count_noun(counts[level], level) for level in (PROBLEM, WARNING) if counts[level]]
    state = "is healthy" if is_healthy(findings) else f"needs a look ({', '.join(problems)})"
    judged = "nothing judged yet" if figures.judged is None else f"judged through commit {figures.judged:,}"
    waiting = "nothing waits"
    if figures.waiting:
        waiting = f"{count_noun(figures.waiting, 'commit')} waiting"
        waiting += f", the oldest for {_format_span(figures.lag)}" if figures.rules else " for a rule"
    last = (
        ""
        if figures.last_sample is None
        else f", last heard from {_format_span(_seconds(figures.now - figures.last_sample))} ago"
    )
    return f"{figures.stream} {state}: {judged}, {waiting}{last}."


def _check_tables(figures: Figures) -> list[Finding]:
    findings = [
        Finding(
            PROBLEM,
            "other_tables",
            f"The evaluation has read other tables than the current ones: {what}.",
            "Restore the tables that were read, or judge the current ones as a new evaluation: lookback evaluate "
            f"{figures.stream} --fresh.",
        )
        for what in figures.other_tables
    ]
    account = figures.account
    if account is not None and not account["closes"]:
        what = (
            f"The account of the last {account['rounds']:,} rounds of ingest does not add up: rows that ingest wrote "
            "are not in the table of events, or late_events has rows about events that are not."
        )
        remedy = "Find out whether tables were restored from a backup, or another program deleted or wrote rows."
        findings.append(Finding(PROBLEM, "account", what, remedy))
    return findings


def _check_running(figures: Figures) -> list[Finding]:
    if not figures.rules:
        if not figures.waiting and figures.judged is None:
            return []
        remedy = f"Publish one: lookback rules push FILE (stream: {figures.stream})."
        return [Finding(NOTE, "no_rules", "No rule of this stream is in force, so nothing is judged.", remedy)]
    waits = f"{count_noun(figures.waiting, 'commit')} of events {'waits' if figures.waiting == 1 else 'wait'}"
    start = f"Start it: lookback evaluate {figures.stream}; if a schedule starts it, check its last run."
    if figures.waiting and figures.judged is None and figures.is_silent:
        return [Finding(PROBLEM, "not_running", f"No evaluation has judged this stream yet, and {waits}.", start)]
    if figures.waiting and figures.is_silent and figures.lag > THRESHOLDS["unjudged"].value:
        last = "never wrote metrics"
        if figures.last_sample is not None:
            last = f"was last heard from {_format_span(_seconds(figures.now - figures.last_sample))} ago"
        what = f"The evaluation is not running: it {last}, and {waits}, the oldest for {_format_span(figures.lag)}."
        return [Finding(PROBLEM, "not_running", what, start)]
    return []


def _check_lag(figures: Figures) -> list[Finding]:
    if figures.is_silent or figures.lag <= THRESHOLDS["behind"].value:
        return []
    before = [sample for sample in figures.samples if figures.now - sample.at >= dt.timedelta(minutes=10)]
    grows = bool(before) and figures.lag - before[-1].lag > THRESHOLDS["behind_growing"].value
    trend = f", {_format_span(figures.lag - before[-1].lag)} longer than 10 minutes ago" if grows else ""
    what = (
        f"The evaluation is behind: {count_noun(figures.waiting, 'commit')} waiting, the oldest for "
        f"{_format_span(figures.lag)}{trend}."
    )
    return [Finding(PROBLEM if grows else WARNING, "behind", what, _suggest_speedup(figures))]


def _suggest_speedup(figures: Figures) -> str:
    """Returns the remedy for a slow evaluation, which depends on where its time goes."""
    stages: Counter[str] = Counter()
    for sample in figures.samples:
        stages.update(sample.stages)
    run, judging, writing = stages["run"], stages["evaluate"], stages["write"]
    if writing > run:
        return "Most of the time goes into writing alerts: see which rule raises the most, and run lookback maintain."
    if judging > run - judging:
        return (
            "Most of the time goes into judging: give it more cores (lookback repartition), or see which rules share "
            "no windows with other rules; rules that share grouping, conditions and windows cost little."
        )
    return (
        "Most of the time goes into reading and moving events: use larger batches (lookback evaluate --profile "
        "throughput) or give it more cores."
    )


def _check_rules(figures: Figures) -> list[Finding]:
    findings = [
        Finding(
            PROBLEM,
            "quarantined",
            f"Rule {rule_id} is quarantined: it failed too often and is no longer evaluated.",
            "See rule_log for the error, fix the rule and publish it again: lookback rules push FILE.",
        )
        for rule_id in sorted(figures.quarantined)
    ]
    counts = figures.rule_counts
    for rule_id in sorted({*figures.failing, *(name for name, each in counts.items() if each.failed)}):
        failed = counts.get(rule_id, RuleCounts()).failed
        times = f" {count_noun(failed, 'time')}" if failed else ""
        reason = figures.failing.get(rule_id, "")
        what = f"Rule {rule_id} failed{times} within the last hour{f': {reason}' if reason else ''}."
        remedy = (
            "Guard the part that fails, such as nullif(x, 0) for a division or a wider type for a cast, and publish it "
            "again."
        )
        findings.append(Finding(WARNING, "failing", what, remedy))
    findings += [
        Finding(
            WARNING,
            "refused",
            f"A row of the rules table for {rule_id} was rejected: {why}.",
            "The previous version, if any, is still in force; publish a corrected one.",
        )
        for rule_id, why in sorted(figures.refused.items())
    ]
    return findings + _check_warming(figures)


def _check_warming(figures: Figures) -> list[Finding]:
    """Reports the versions that have waited too long for their history."""
    most = THRESHOLDS["warming_stuck"].value
    return [
        Finding(
            WARNING,
            "warming_stuck",
            f"Version {each.version} of rule {each.rule_id} has been warming for {_format_span(waited)}, with {each.named} "
            f"of {each.pieces or 'no'} pieces of its history published; the previous version is in force.",
            "Is the evaluation running? Its log says why a history could not be built. To start without it: lookback "
            "rules push FILE --cold.",
        )
        for each in figures.warming
        if (waited := _seconds(figures.now - each.since)) > most
    ]


def _check_storms(figures: Figures) -> list[Finding]:
    raised = {rule_id: each.matched - each.suppressed for rule_id, each in figures.rule_counts.items()}
    total = sum(raised.values())
    return [
        Finding(
            WARNING,
            "storm",
            f"Rule {rule_id} raised {count:,} alerts within the last hour, {count / total:.0%} of all.",
            "Raise its limit, or give it `suppress`; alerts of a version in shadow are in no review queue."
            if rule_id.endswith(name_role("", SHADOW))
            else f"Raise its limit, give it `suppress`, or pause it: lookback rules pause {rule_id}.",
        )
        for rule_id, count in sorted(raised.items())
        if count >= THRESHOLDS["storm"].value
    ]


def _check_rejected(figures: Figures) -> list[Finding]:
    if not figures.rejected:
        return []
    share = figures.rejected / (figures.rejected + figures.ingested)
    what = f"{count_noun(figures.rejected, 'row')} ({share:.1%}) could not be ingested within the last hour"
    what += f"; the newest: {figures.reason}." if figures.reason else "."
    level = PROBLEM if share >= THRESHOLDS["rejected_share"].value else WARNING
    remedy = "See rejected_events; fix the source, or the stream's fields and columns in its declaration."
    return [Finding(level, "rejected", what, remedy)]


def _check_late(figures: Figures) -> list[Finding]:
    events = sum(sample.events for sample in figures.samples)
    late = sum(sample.late for sample in figures.samples)
    discarded = sum(sample.discarded for sample in figures.samples)
    if late < THRESHOLDS["late_least"].value or not events:
        return []
    if discarded >= THRESHOLDS["discarded_share"].value * events:
        what = (
            f"{discarded:,} of {events:,} events ({discarded / events:.1%}) were discarded as too late within the last "
            "hour."
        )
        what += _name_leader(figures)
        remedy = (
            "See late_events.late_by_us; if the source is sound, set the stream's max_out_of_orderness (in a union that "
            "of the member) or allowed_lateness above it; negative values mean clocks that are ahead."
        )
        return [Finding(PROBLEM, "discarded", what, remedy)]
    if late >= THRESHOLDS["late_share"].value * events:
        what = f"{late:,} of {events:,} events ({late / events:.1%}) were late within the last hour."
        what += _name_leader(figures)
        remedy = (
            "Set the stream's max_out_of_orderness (in a union that of the member) above the usual "
            "late_events.late_by_us; this delays results accordingly."
        )
        return [Finding(WARNING, "late", what, remedy)]
    return []


# The checks that name the event that moved the watermark ahead.
_NAMING_LEADER = ("discarded", "late", "watermark_ahead", "watermark_stuck")


def _name_leader(figures: Figures) -> str:
    return f" The watermark was moved furthest by {figures.leader}." if figures.leader else ""


def describe_leader(event_id: str, time: dt.datetime, taken_in: dt.datetime | None) -> str:
    """Describes an event that moved the watermark. `taken_in` is when ingest stored it; None if not known."""
    ahead = 0.0 if taken_in is None else _seconds(time - taken_in)
    when = f", {_format_span(ahead)} ahead of the clock when it was ingested" if ahead > 0 else ""
    return f"event {event_id!r} of {time:%Y-%m-%dT%H:%M:%SZ}{when}"


def _check_watermark(figures: Figures) -> list[Finding]:
    known = [sample for sample in figures.samples if sample.watermark is not None]
    if not known:
        return []
    watermark = known[-1].watermark
    assert watermark is not None
    ahead = _seconds(watermark - figures.now)
    if ahead > THRESHOLDS["watermark_ahead"].value:
        what = f"The watermark is {_format_span(ahead)} ahead of the clock, so current events count as late."
        what += _name_leader(figures)
        remedy = (
            "An event or an advance has set it, and it never goes back: see the newest events of the table and the "
            "stream's max_future; to start over, judge the events again with a new checkpoint."
        )
        return [Finding(PROBLEM, "watermark_ahead", what, remedy)]
    standing = [sample for sample in known if sample.watermark == watermark]
    stood = _seconds(standing[-1].at - standing[0].at)
    came = sum(sample.events for sample in standing[1:])
    if stood > THRESHOLDS["watermark_stuck"].value and came:
        what = f"The watermark has not moved for {_format_span(stood)} while {count_noun(came, 'event')} came."
        what += _name_leader(figures)
        remedy = (
            "An event with a time ahead of all other events holds it, and these are judged as late; see the stream's "
            "max_future and the source's clocks."
        )
        return [Finding(WARNING, "watermark_stuck", what, remedy)]
    if -ahead > THRESHOLDS["watermark_behind"].value and not figures.waiting:
        quiet = (
            figures.newest is not None and _seconds(figures.now - figures.newest) > THRESHOLDS["watermark_behind"].value
        )
        what = (
            f"The watermark is {_format_span(-ahead)} behind the clock, "
            f"{'because no events come' if quiet else 'as are the events'}."
        )
        remedy = (
            "Windows and absences wait for it; if that matters: lookback evaluate --idle-after, or lookback advance."
        )
        return [Finding(NOTE, "watermark_behind", what, remedy)]
    return []


def _check_state(figures: Figures) -> list[Finding]:
    known = [sample.state_rows for sample in figures.samples if sample.state_rows is not None]
    if not known or known[-1] < THRESHOLDS["state_least"].value:
        return []
    if known[-1] < THRESHOLDS["state_growth"].value * max(1, known[0]):
        return []
    what = f"Window state has grown from {known[0]:,} to {known[-1]:,} rows within the last hour."
    remedy = (
        "If a long window is filling, the growth will stop; else narrow the rules' where, shorten windows, or give "
        "long ones a resolution. A watermark that does not move also keeps state."
    )
    return [Finding(WARNING, "state", what, remedy)]


_CHECKS: tuple[Callable[[Figures], list[Finding]], ...] = (
    _check_tables,
    _check_running,
    _check_lag,
    _check_rules,
    _check_storms,
    _check_rejected,
    _check_late,
    _check_watermark,
    _check_state,
)


def _seconds(span: dt.timedelta) -> float:
    return span.total_seconds()


def _format_span(seconds: float) -> str:
    """Formats a length of time in the largest unit in which it is at least 2."""
    for unit, size in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}s"
    return f"{seconds:,.0f} seconds"
