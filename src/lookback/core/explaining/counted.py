"""Finds every event behind an alert, however many: those that a window counted or a sequence matched."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from lookback.core.explaining.evidence import Evidence
from lookback.core.explaining.steps import find_all_taken
from lookback.core.explaining.tracing import TracedRow, replay
from lookback.core.values.times import parse_time
from lookback.core.values.windows import SEQUENCE


def find_counted(evidence: Evidence, alerts: Sequence[Mapping[str, Any]]) -> list[list[str] | None]:
    """Returns the ids of the events behind each row of `alerts`; None for a row that a replay does not reproduce.

    For a window these are the events that any measure counted, for a sequence the events that its steps took.

    Args:
        evidence: All events of the key, and what decides which of them count.
        alerts: Raised rows of that key and rule, of windows or a sequence, with the columns of the alerts table.
    """
    if evidence.rule.spec.kind == SEQUENCE:
        found = find_all_taken(evidence, alerts)
        return [None if taken is None else _list_ids(evidence, list(chain.from_iterable(taken))) for taken in found]
    starts = [parse_time(alert["window_start"]) for alert in alerts]
    last = max(int(alert["arrival"]) for alert in alerts)
    by_window: dict[tuple[Any, Any], list[TracedRow]] = defaultdict(list)
    for row in replay(evidence, last, first=min(starts), last=None):
        if not row.is_retraction:
            by_window[row.alert.window_start, row.alert.window_end].append(row)
    return [_find_in_window(evidence, alert, by_window[alert["window_start"], alert["window_end"]]) for alert in alerts]


def _find_in_window(evidence: Evidence, alert: Mapping[str, Any], rows: Sequence[TracedRow]) -> list[str] | None:
    """Lists the events of the window's last row, up to the alert's commit, that has the alert's measures."""
    recorded, rule = alert["measures"] or {}, evidence.rule
    for row in reversed(rows):
        if row.alert.arrival <= int(alert["arrival"]) and row.has_measures(rule, recorded):
            counted = [row.list_counted(measure) for measure in rule.measures]
            return _list_ids(evidence, np.unique(np.concatenate(counted)).tolist())
    return None


def _list_ids(evidence: Evidence, positions: Sequence[int]) -> list[str]:
    return [evidence.events.id_text(at) for at in positions]
