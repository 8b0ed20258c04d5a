"""Says which windows of a new version would start empty or are older than the stream, and how fast they are filled."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.sql import functions as F  # noqa: N812

from lookback.core.engine.warming import find_reach, find_reason_cold
from lookback.core.errors import RuleError
from lookback.core.rules.compiled import WINDOW_COMPLETE, CompiledRule
from lookback.core.rules.compiling import compile_rule
from lookback.core.rules.document import Rule
from lookback.core.rules.versions import WITH_STATE
from lookback.core.values.columns import to_text
from lookback.core.values.durations import MICROSECONDS, format_duration
from lookback.core.values.times import to_utc
from lookback.core.values.windows import Lookback, Session, Window

if TYPE_CHECKING:
    from lookback.spark.rules import RulesTable

_DAY_US = MICROSECONDS["day"]
# Estimates how long a warm-up takes. Making a history of two sums took 10 microseconds of processor time per event, one
# of sessions, or of matches with fixed expiry, another 8 to 14.
_MIN_SECONDS, _EVENTS_PER_SECOND, _ORDERED_PER_SECOND = 5, 150_000, 80_000


class _Span(NamedTuple):
    """The name of a measure, or `sequence`, and how far it reaches back in microseconds."""

    name: str
    reach: int


def find_cold_measures(rules: RulesTable, document: Mapping[str, Any] | Rule) -> list[str]:
    """Returns the measures that will start empty and take over a day to fill, as no rule keeps their rows yet.

    A sequence, which has no measures, is listed as `sequence`. For a session, which has no length, its gap counts.
    The list is empty if the stream has no events yet, when no rows can be kept.
    """
    compiled = rules.check(document)
    spans = {span: state for span, state in _find_spans(compiled).items() if span.reach > _DAY_US}
    tables, stream = rules.tables.holding(*rules.streams.values()), compiled.spec.stream
    if not spans or not tables.exists(stream) or tables.is_unwritten(stream) or tables.read(stream).isEmpty():
        return []
    kept: set[str] = set()
    for row in rules.rows():
        if row.status in WITH_STATE and row.document and row.document.get("stream") == stream:
            # A row written by hand may not be a valid rule.
            with contextlib.suppress(RuleError):
                kept |= set(_find_spans(compile_rule(row.document, rules.streams[stream])).values())
    return [span.name for span, state in spans.items() if state not in kept]


def describe_history(rules: RulesTable, document: Mapping[str, Any] | Rule) -> str:
    """Says how windows without kept rows are filled: from the table and how long that takes, or as events come."""
    compiled = rules.check(document)
    if not _has_begun(rules, compiled.spec.stream):
        return (
            f"the stream has not been evaluated yet: the first lookback evaluate {compiled.spec.stream} judges all its "
            "events in the order of their arrival, and the windows fill from the first one on"
        )
    if (reason := find_reason_cold(compiled)) is not None:
        return f"{reason}, so window_complete is false until the longest window has filled"
    tables, time_ = rules.tables.holding(*rules.streams.values()), rules.streams[compiled.spec.stream].event_time
    rows, reach = tables.read(compiled.spec.stream), find_reach(compiled)
    if reach is not None:
        ((newest,),) = rows.agg(F.max(F.unix_micros(time_))).collect()
        rows = rows.where(F.unix_micros(time_) >= newest - reach)
    ((count, first),) = rows.agg(F.count("*"), F.min(F.unix_micros(time_))).collect()
    seconds = round(_MIN_SECONDS + count / (_EVENTS_PER_SECOND if reach is not None else _ORDERED_PER_SECOND))
    return (
        f"the running stream reads the {count:,} events since {to_text(to_utc(first))} from the table, "
        f"in about {seconds:,} s, and until then {_describe_until_filled(rules, compiled.spec.rule_id)}"
    )


def _describe_until_filled(rules: RulesTable, rule_id: str) -> str:
    """Says what judges the events while a version of the rule warms up."""
    before = next((row for row in rules.rows() if row.rule_id == rule_id and row.status == "active"), None)
    return "the rule raises no alert" if before is None else f"version {before.version} stays in force"


def describe_past(rules: RulesTable, streams: Iterable[str]) -> str:
    """Says that new versions do not judge what was judged before; empty if none of these streams was evaluated yet."""
    if not any(_has_begun(rules, name) for name in streams):
        return ""
    return "events that were judged before are not judged again; lookback backtest shows what a rule makes of them"


def _has_begun(rules: RulesTable, name: str) -> bool:
    """Returns whether an evaluation has obeyed a rule of the stream."""
    tables = rules.tables
    return tables.exists("rule_log") and not tables.read("rule_log").where(F.col("stream") == name).isEmpty()


def describe_young_stream(rules: RulesTable, document: Mapping[str, Any] | Rule) -> str:
    """Says that `window_complete` does not keep a rule from judging windows that begin before the stream does.

    Empty if the rule's condition does not name `window_complete`, or if the stream has events for the whole window.
    """
    compiled = rules.check(document)
    tables, name = rules.tables.holding(*rules.streams.values()), compiled.spec.stream
    if compiled.when is None or WINDOW_COMPLETE not in compiled.when.fields:
        return ""
    if not tables.exists(name) or tables.is_unwritten(name):
        return ""
    time_ = F.unix_micros(rules.streams[name].event_time)
    reach = max(span.reach for span in _find_spans(compiled))
    ((first, last),) = tables.read(name).agg(F.min(time_), F.max(time_)).collect()
    begins, full = compiled.spec.effective_from, None if first is None else first + reach
    if full is None or last >= full or (begins is not None and begins >= full):
        return ""
    return (
        f"the first event of {name} is of {to_text(to_utc(first))}, and window_complete is true from it on, although the "
        f"windows of {format_duration(reach)} begin earlier; to wait until they do not, set effective_from: "
        f"{to_text(to_utc(full))}"
    )


def _find_spans(rule: CompiledRule) -> dict[_Span, str]:
    """Maps the spans of a rule to the names of the states that keep their rows."""
    if rule.sequence is not None:
        return {_Span("sequence", rule.sequence.within): rule.store}
    return {
        _Span(measure.name, _find_reach(measure.window)): f"{rule.store}{measure.feature.feature_id}"
        for measure in rule.measures
    }


def _find_reach(window: Window) -> int:
    if isinstance(window, Session):
        return window.gap
    return window.size + window.delay if isinstance(window, Lookback) else window.size
