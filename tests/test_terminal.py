"""Lines for people: a row of rule_log that is of no rule names none."""

from __future__ import annotations

import pytest

from lookback.views.terminal import describe_change


@pytest.mark.parametrize(
    ("rule_id", "version", "text"),
    [("r", 3, "r v3 activated"), ("*", None, "* activated"), (None, None, "activated"), ("r", 0, "r v0 activated")],
)
def test_a_change_of_no_version_is_described_without_one(rule_id: str | None, version: int | None, text: str) -> None:
    assert describe_change({"rule_id": rule_id, "version": version, "action": "activated"}) == text
