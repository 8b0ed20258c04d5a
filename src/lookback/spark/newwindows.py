"""Says which windows of a new version would start empty or are older than the stream, and how fast they are filled."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from functools import cache, cached_property
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql import functions as F  # noqa: N812

from lookback.core.engine.warming import find_reach, find_reason_cold
from lookback.core.errors import RuleError
from lookback.core.rules.compiled import WINDOW_COMPLETE, CompiledRule
from lookback.core.rules.compiling import compile_rule
from lookback.core.rules.versions import WITH_STATE
from lookback.core.values.columns import to_text
from lookback.core.values.durations import MICROSECONDS, format_duration
from lookback.core.values.times import to_utc
from lookback.core.values.windows import Lookback, Session, Window

if TYPE_CHECKING:
    from lookback.spark.rulerows import RuleRow
    from lookback.spark.rules import RulesTable

_DAY_US = MICROSECONDS["day"]
# Estimates how long a warm-up takes. Making a history of two sums took 10 microseconds of processor time per event, one
# of sessions, or of matches with fixed expiry, another 8 to 14.
_MIN_SECONDS, _EVENTS_PER_SECOND, _ORDERED_PER_SECOND = 5, 150_000, 80_000


class _Span(NamedTuple):
    """The name of a measure, or `sequence`, and how far it reaches back in microseconds."""

    name: str
    reach: int


class NewWindows:
    """Says what the windows of new versions begin with.

    Each fact about the tables is read once, however many versions are asked about. `rules` is the table to which the
    versions are published.
    """

    def __init__(self, rules: RulesTable) -> None:
        self._rules, self._tables = rules, rules.tables.holding(*rules.streams.values())
        self._has_begun, self._has_events = cache(self._ask_has_begun), cache(self._ask_has_events)
        self._bounds, self._events_since = cache(self._read_bounds), cache(self._count_events_since)
        self._kept_states = cache(self._list_kept_states)

    def find_cold_measures(self, rule: CompiledRule) -> list[str]:
        """Returns the measures that will start empty and take over a day to fill, as no rule keeps their rows yet.

        A sequence, which has no measures, is listed as `sequence`. For a session, which has no length, its gap counts.
        The list is empty if the stream has no events yet, when no rows can be kept.
        """
        spans = {span: state for span, state in _find_spans(rule).items() if span.reach > _DAY_US}
        if not spans or not self._has_events(rule.spec.stream):
            return []
        kept = self._kept_states(rule.spec.stream)
        return [span.name for span, state in spans.items() if state not in kept]

    def describe_history(self, rule: CompiledRule) -> str:
        """Says how windows without kept rows are filled: from the table and how long that takes, or as events come."""
        stream = rule.spec.stream
        if not self._has_begun(stream):
            return (
                f"the stream has not been evaluated yet: the first lookback evaluate {stream} judges all its events in "
                "the order of their arrival, and the windows fill from the first one on"
            )
        if (reason := find_reason_cold(rule)) is not None:
            return f"{reason}, so window_complete is false until the longest window has filled"
        reach = find_reach(rule)
        count, first = self._events_since(stream, reach)
        seconds = round(_MIN_SECONDS + count / (_EVENTS_PER_SECOND if reach is not None else _ORDERED_PER_SECOND))
        return (
            f"the running stream reads the {count:,} events since {to_text(to_utc(first))} from the table, "
            f"in about {seconds:,} s, and until then {self._describe_until_filled(rule.spec.rule_id)}"
        )

    def describe_past(self, streams: Iterable[str]) -> str:
        """Says that new versions do not judge what was judged before; empty if none of the streams was evaluated yet."""
        if not any(map(self._has_begun, streams)):
            return ""
        return "events that were judged before are not judged again; lookback backtest shows what a rule makes of them"

    def describe_young_stream(self, rule: CompiledRule) -> str:
        """Says that `window_complete` does not keep a rule from judging windows that begin before the stream does.

        Empty if the rule's condition does not name `window_complete`, or if the stream has events for the whole window.
        """
        stream = rule.spec.stream
        if rule.when is None or WINDOW_COMPLETE not in rule.when.fields or not self._has_events(stream):
            return ""
        reach, (first, last) = max(span.reach for span in _find_spans(rule)), self._bounds(stream)
        begins, full = rule.spec.effective_from, first + reach
        if last >= full or (begins is not None and begins >= full):
            return ""
        return (
            f"the first event of {stream} is of {to_text(to_utc(first))}, and window_complete is true from it on, although "
            f"the windows of {format_duration(reach)} begin earlier; to wait until they do not, set effective_from: "
            f"{to_text(to_utc(full))}"
        )

    def _describe_until_filled(self, rule_id: str) -> str:
        """Says what judges the events while a version of the rule warms up."""
        before = next((row for row in self._rows if row.rule_id == rule_id and row.status == "active"), None)
        return "the rule raises no alert" if before is None else f"version {before.version} stays in force"

    @cached_property
    def _rows(self) -> list[RuleRow]:
        return self._rules.rows()

    def _ask_has_begun(self, stream: str) -> bool:
        """Returns whether an evaluation has obeyed a rule of the stream."""
        tables = self._rules.tables
        return tables.exists("rule_log") and not tables.read("rule_log").where(F.col("stream") == stream).isEmpty()

    def _ask_has_events(self, stream: str) -> bool:
        tables = self._tables
        return tables.exists(stream) and not tables.is_unwritten(stream) and not tables.read(stream).isEmpty()

    def _read_bounds(self, stream: str) -> tuple[int, int]:
        """Returns the times of the first and the last event."""
        time_ = F.unix_micros(self._rules.streams[stream].event_time)
        ((first, last),) = self._tables.read(stream).agg(F.min(time_), F.max(time_)).collect()
        return first, last

    def _count_events_since(self, stream: str, reach: int | None) -> tuple[int, int]:
        """Counts the events that are at most `reach` older than the newest, or all. Returns the first's time, too."""
        rows, time_ = self._tables.read(stream), F.unix_micros(self._rules.streams[stream].event_time)
        if reach is not None:
            rows = rows.where(time_ >= self._bounds(stream)[1] - reach)
        ((count, first),) = rows.agg(F.count("*"), F.min(time_)).collect()
        return count, first

    def _list_kept_states(self, stream: str) -> set[str]:
        kept: set[str] = set()
        for row in self._rows:
            if row.status in WITH_STATE and row.document and row.document.get("stream") == stream:
                # A row written by hand may not be a valid rule.
                with contextlib.suppress(RuleError):
                    kept |= set(_find_spans(compile_rule(row.document, self._rules.streams[stream])).values())
        return kept


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
