"""Drafts tests of a rule from events of its stream: the fewest events that alert, and a near miss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lookback.core.errors import LookbackError, SetupError
from lookback.core.rules.compiled import CompiledRule
from lookback.core.rules.compiling import compile_rule
from lookback.core.values.columns import to_text
from lookback.core.values.windows import EVENT, LOOKBACK, SEQUENCE
from lookback.testing.harness import Harness, replay
from lookback.testing.rule_tests import run_rule_tests

if TYPE_CHECKING:
    import pyarrow as pa

    from lookback.core.streams.alerts import Alert
    from lookback.core.streams.declaration import Stream

# How many of the last events of a key are tried. A test of more events is no example for people, and each of them is
# left out once to see whether it is needed.
_SIZES = (2, 4, 8, 16, 32, 64, 128, 256)
# The number of events without an alert that are tried as a near miss.
_MAX_MISSES = 50
_BY_HAND = "write its tests by hand; docs/how-to/write-a-rule.md shows how"


def draft_tests(document: Mapping[str, Any], events: pa.Table, stream: Stream) -> list[dict[str, Any]]:
    """Drafts two tests from `events` (see `replay` for their form): one with an alert, and a near miss without.

    A draft says what the rule does, not what it should do: people decide that. Its events have only the fields that the
    rule reads. There is one test if no near miss is found.

    Raises:
        RuleError: If the rule is invalid.
        SetupError: If the rule is of a kind that has no drafts, or raises no alert over the events.
    """
    rule = compile_rule(document, stream)
    _require_draftable(rule)
    own = {key: value for key, value in document.items() if key != "tests"}
    raised = [alert for alert in replay([own], events, stream).alerts if alert.verdict == "raised"]
    rows = sorted(events.to_pylist(), key=lambda row: (row["arrival"], row[stream.event_time]))
    for alert in raised[:_MAX_MISSES]:
        if needed := _find_needed(own, rule, stream, rows, alert):
            break
    else:
        seen = f"the {len(rows):,} newest events of {stream.name!r}"
        why = "raises no alert over" if not raised else f"needs more than {_SIZES[-1]} events for an alert of"
        raise SetupError(f"{rule.spec.rule_id} {why} {seen}; {_BY_HAND}")
    names = {name.partition(".")[0] for name in (stream.event_id, stream.event_time, *rule.fields)}
    drafts = [_write_test(f"drafted: event {alert.event_id} alerts", own, stream, needed, names)]
    missed = needed[1:] if len(needed) > 1 else _find_miss(own, stream, rows)
    if missed and not _judge(own, stream, missed):
        drafts.append(_write_test("drafted: a near miss does not alert", own, stream, missed, names))
    if failed := run_rule_tests(compile_rule({**own, "tests": drafts}, stream), stream):
        raise SetupError(f"the drafted tests of {rule.spec.rule_id} fail: {failed[0]}; {_BY_HAND}")
    return drafts


def _require_draftable(rule: CompiledRule) -> None:
    waits = rule.sequence is not None and rule.sequence.absent is not None
    if rule.spec.kind not in (EVENT, LOOKBACK, SEQUENCE) or waits:
        raise SetupError(f"{rule.spec.rule_id} does not alert at an event but when time has passed; {_BY_HAND}")
    if rule.lists:
        raise SetupError(f"{rule.spec.rule_id} reads lists, whose values a test must name; {_BY_HAND}")


def _find_needed(
    document: Mapping[str, Any], rule: CompiledRule, stream: Stream, rows: Sequence[dict[str, Any]], alert: Alert
) -> list[dict[str, Any]]:
    """Returns as few rows as still raise the alert, in order of arrival; none if the last ones do not."""

    def alerts(chosen: Sequence[dict[str, Any]]) -> bool:
        return [each.event_id for each in _judge(document, stream, chosen)] == [alert.event_id]

    shown = {*alert.evidence, alert.event_id}
    evidence = [row for row in rows if str(row[stream.event_id]) in shown]
    own = next(row for row in evidence if str(row[stream.event_id]) == alert.event_id)
    fields = {name.partition(".")[0] for part in rule.key for name in part.fields}
    before = [row for row in rows if all(row[name] <= own[name] for name in ("arrival", stream.event_time))]
    of_key = [row for row in before if all(row[name] == own[name] for name in fields)]
    last = (of_key[-size:] for size in _SIZES if size < len(of_key) * 2)
    needed = next((tried for tried in (evidence, *last) if alerts(tried)), [])
    for row in needed:
        fewer = [each for each in needed if each is not row]
        if fewer and alerts(fewer):
            needed = fewer
    return list(needed)


def _find_miss(document: Mapping[str, Any], stream: Stream, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the newest row that alone raises nothing, if one of the newest does."""
    return next(([row] for row in rows[: -_MAX_MISSES - 1 : -1] if not _judge(document, stream, [row])), [])


def _judge(document: Mapping[str, Any], stream: Stream, rows: Sequence[dict[str, Any]]) -> list[Alert]:
    """Returns the alerts that are raised if each row is a commit of its own."""
    harness = Harness(stream)
    try:
        harness.rule(document)
        harness.events([{name: value for name, value in row.items() if name != "arrival"} for row in rows])
    except LookbackError:
        return []
    return [alert for alert in harness.alerts if alert.verdict == "raised"]


def _write_test(
    name: str, document: Mapping[str, Any], stream: Stream, rows: Sequence[dict[str, Any]], names: set[str]
) -> dict[str, Any]:
    events = [{key: _write_value(value) for key, value in row.items() if key in names} for row in rows]
    alerts = [{"event_id": alert.event_id, "message": alert.message} for alert in _judge(document, stream, rows)]
    events = [{key: value for key, value in event.items() if value is not None} for event in events]
    return {"name": name, "events": events, "alerts": alerts}


def _write_value(value: Any) -> Any:
    """Writes a value as a test has it: what YAML knows stays, anything else is a text."""
    if isinstance(value, Mapping):
        return {name: _write_value(each) for name, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_write_value(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float | str) else to_text(value)
