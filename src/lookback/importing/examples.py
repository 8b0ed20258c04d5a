"""Makes the tests that a rule brings along tests of the rule that was written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lookback.core.errors import LookbackError
from lookback.core.streams.alerts import Alert
from lookback.core.streams.declaration import Stream
from lookback.core.values.times import to_utc
from lookback.importing.detections import Chain, Detection, Example, Together
from lookback.importing.fields import FieldNames
from lookback.importing.reasons import Refusal
from lookback.testing.harness import Harness

_SECOND = 1_000_000


def write_tests(document: Mapping[str, Any], detection: Detection, names: FieldNames, stream: Stream) -> list[Any]:
    """Returns the tests of a document, with the alerts that it raises.

    Raises Refusal if it alerts where the original does not, or the other way round.
    """
    return [_write_test(document, each, detection, names, stream) for each in detection.examples]


def _write_test(
    document: Mapping[str, Any], example: Example, detection: Detection, names: FieldNames, stream: Stream
) -> dict[str, Any]:
    events = [_write_event(at, fields, number, names, stream) for number, (at, fields) in enumerate(example.rows)]
    if wait := _find_wait(detection):
        # Time moves with the events.
        last = example.rows[-1][0] + wait * _SECOND + stream.max_out_of_orderness + _SECOND
        events.append(_write_event(last, {}, len(events), names, stream))
    harness = Harness(stream)
    try:
        harness.rule(document)
        harness.events(events)
    except LookbackError as error:
        raise Refusal("tests", f"{example.name!r}: {error}") from error
    raised = [alert for alert in harness.alerts if alert.verdict == "raised"]
    if failed := [row.message for row in harness.errors]:
        raise Refusal("tests", f"{example.name!r}: {failed[0]}")
    if bool(raised) is not example.alerts:
        expected = "an alert" if example.alerts else "none"
        raise Refusal("tests", f"{example.name!r} expects {expected}, and the rule raises {len(raised)}")
    return {"name": example.name, "events": events, "alerts": [_write_alert(alert) for alert in raised]}


def _write_event(at: int, fields: Mapping[str, Any], number: int, names: FieldNames, stream: Stream) -> dict[str, Any]:
    is_number = stream.fields[stream.event_id].is_integer
    event: dict[str, Any] = {
        stream.event_id: number if is_number else f"e{number}",
        stream.event_time: to_utc(at).isoformat().replace("+00:00", "Z"),
    }
    for name, value in fields.items():
        inside, *path = [event, *names.find(name).split(".")]
        for part in path[:-1]:
            inside = inside.setdefault(part, {})
        inside[path[-1]] = value
    return event


def _find_wait(detection: Detection) -> int:
    """Returns after how many seconds a rule that waits for the end of a time has decided; 0 for any other."""
    shape = detection.shape
    if isinstance(shape, Together):
        return shape.slide and shape.seconds + shape.slide
    return shape.microseconds // _SECOND if isinstance(shape, Chain) and shape.absent is not None else 0


def _write_alert(alert: Alert) -> dict[str, Any]:
    if alert.event_id is not None:
        return {"event_id": alert.event_id}
    return {"window_start": alert.window_start.isoformat().replace("+00:00", "Z"), "key": dict(alert.key)}
