"""Lines and tables for people: a row of rule_log that is of no rule names none; a table fits the terminal, and hides nothing."""

from __future__ import annotations

import re
import sys

import pytest

from lookback.views.terminal import describe_change, print_table


@pytest.mark.parametrize(
    ("rule_id", "version", "text"),
    [("r", 3, "r v3 activated"), ("*", None, "* activated"), (None, None, "activated"), ("r", 0, "r v0 activated")],
)
def test_a_change_of_no_version_is_described_without_one(rule_id: str | None, version: int | None, text: str) -> None:
    assert describe_change({"rule_id": rule_id, "version": version, "action": "activated"}) == text


ODD = "o[bold]dd\x1b[1m"
ROWS = [{"alert_id": "0123456789abcdef" * 2, "message": f"{ODD} {'word ' * 9}end"}, {"alert_id": None, "message": ""}]


def test_a_table_that_goes_to_no_terminal_is_a_line_for_each_row(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(ROWS, ("alert_id", "message"))
    header, first, second = capsys.readouterr().out.splitlines()
    assert header == "alert_id                          message"
    assert first == f"{'0123456789abcdef' * 2}  o[bold]dd\\x1b[1m {'word ' * 9}end"
    assert second == ""


def test_a_table_in_a_terminal_is_as_wide_as_it_and_hides_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setenv("TERM", "xterm")
    print_table(ROWS, ("alert_id", "message"))
    # The names of the columns are bold; nothing of a value steers the terminal.
    header, *rest = capsys.readouterr().out.splitlines()
    assert "\x1b" not in "".join(rest)
    lines = [re.sub(r"\x1b\[\d+m", "", header), *rest]
    assert max(map(len, lines)) <= 50
    words = "".join("".join(lines).split())
    assert "o[bold]dd\\x1b[1m" in words
    assert words.count("word") == 9
