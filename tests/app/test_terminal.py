"""Lines and tables for people: a row of rule_log that is of no rule names none; a table fits the terminal, and hides nothing."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lookback.cli import main
from lookback.commands import upkeep
from lookback.commands.streams import _format_batch
from lookback.core.errors import SetupError
from lookback.spark.batches.sink import BatchReport
from lookback.views.terminal import describe_change, print_document, print_json, print_table, safe_output


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


# Moves the cursor, hides what follows, ends a line early, writes from right to left, and begins a line of its own.
STEERING = "a\x1b[2K\x1b]0;t\x07\r\x9b31m\u202eb"


def test_whatever_a_command_prints_cannot_steer_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_: object) -> None:
        sys.stdout.write(STEERING + " " + "\ttab, nbsp\u00a0 and \U0001f469\u200d\U0001f4bb\n")
        raise SetupError(STEERING)

    monkeypatch.setattr(upkeep, "_show_status", run)
    assert main(["status"]) == 2
    printed = capsys.readouterr()
    escaped = r"a\x1b[2K\x1b]0;t\x07\r\x9b31m\u202eb"
    assert printed.out == f"{escaped} \ttab, nbsp\u00a0 and \U0001f469\u200d\U0001f4bb\n"
    assert printed.err == f"lookback: {escaped}\n"


def test_json_stays_json_and_a_document_stays_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with safe_output():
        print_json([{"message": f"{STEERING}\x7f"}])
        print_document("description: a\u2028b\n")
    line, document = capsys.readouterr().out.splitlines(keepends=True)[0], "description: a\u2028b\n"
    assert not set(STEERING) & set(line) - {"a", "b", "t", "[", "]", "0", ";", "2", "K", "3", "1", "m"}
    assert json.loads(line) == {"message": f"{STEERING}\x7f"}
    with safe_output():
        print_document(document)
    assert capsys.readouterr().out == document


def test_an_event_forges_no_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "lookback"):
        logging.getLogger("lookback").warning("event %s failed", f"{STEERING}\nlevel=INFO all is well")
    assert caplog.messages == [r"event a\x1b[2K\x1b]0;t\x07\r\x9b31m\u202eb\nlevel=INFO all is well failed"]


def test_a_line_of_a_batch_shows_each_row_of_the_log_on_one_line() -> None:
    row = {"rule_id": "r", "version": 1, "action": "failed", "message": "the first is a\x1b\nbatch 9: 0 events"}
    names = {each.name for each in dataclasses.fields(BatchReport)}
    numbers = dict.fromkeys(names, 0)
    report = BatchReport(**{**numbers, "alerts": {}, "by_rule": {}, "log": (row,)})  # type: ignore[arg-type]
    assert _format_batch(report).splitlines()[1:] == [r"  r v1 failed the first is a\x1b\nbatch 9: 0 events"]


@pytest.mark.parametrize("words", [["--help"], ["stream", "new", "in.csv"]])
def test_a_command_whose_reader_has_gone_ends_quietly(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "in.csv").write_text("id,at,amount\n1,2026-01-01T00:00:00Z,12.50\n")
    reader, writer = os.pipe()
    os.close(reader)
    run = subprocess.run(
        [sys.executable, "-m", "lookback", *words], stdout=writer, stderr=subprocess.PIPE, cwd=tmp_path, check=False
    )
    os.close(writer)
    assert (run.returncode, run.stderr) == (141, b"")


@pytest.mark.parametrize("words", [["alerts", "--queue"], ["alerts"], ["explain", "a-1"]])
def test_alerts_of_a_place_without_tables_say_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    (tmp_path / "streams").mkdir()
    (tmp_path / "streams/s.yml").write_text(
        "{stream: s, event_id: id, event_time: at, fields: {id: string, at: timestamp}}"
    )
    assert main(["--root", str(tmp_path / "lakehous"), "--conf", str(tmp_path), *words]) == 2
    assert (
        "lakehous/alerts` does not exist, or you may not read it; the job set_up or `lookback init`"
        in capsys.readouterr().err
    )
