"""The questions in SQL name the same severities and actions as the code."""

from __future__ import annotations

import re

from lookback.core.rules.document import SEVERITIES
from lookback.core.rules.rulelog import ACTIONS
from lookback.core.streams import alerts
from lookback.questions import read_question


def test_a_rejected_version_has_none_of_the_actions_that_apply_a_version() -> None:
    listed = re.findall(r"action IN \((.*)\)", read_question("rejected_versions"))
    assert listed == [", ".join(f"'{action}'" for action in ("rejected", *ACTIONS.values()))]


def test_a_warming_version_has_none_of_the_actions_that_bring_it_into_force() -> None:
    listed = re.findall(r"action IN \((.*)\)\)", read_question("warming_versions"))
    assert listed == [", ".join(f"'{action}'" for action in ACTIONS.values() if action != ACTIONS["draft"])]


def test_the_events_of_the_stream_alerts_are_rows_that_change_what_stands() -> None:
    assert (alerts.BEGINS, alerts.GOES_ON, alerts.CEASES, alerts.TABLE) == (1, 0, -1, "alerts")


def test_the_queue_is_in_the_order_of_the_severities() -> None:
    listed = ", ".join(f"'{severity}'" for severity in SEVERITIES)
    assert f"array_position(array({listed}), severity) DESC" in read_question("open_queue")
