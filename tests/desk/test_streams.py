"""The desk of a stream without Spark: the list, the buttons, and a refresh that ends."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from widgets import find

from lookback.config import load_streams
from lookback.core.errors import Problem, RuleError, SetupError
from lookback.desk import streams
from lookback.desk.running import Ticker
from lookback.desk.steering import SteeredRule, list_steered
from lookback.desk.streams import StreamDesk

STREAM = load_streams(Path(__file__).parents[2] / "conf")["transactions"]


def row(rule_id: str, version: int = 1, status: str = "active", stream: str = "transactions", **parameters: Any) -> Any:
    return SimpleNamespace(
        rule_id=rule_id, version=version, status=status, document={"stream": stream, "parameters": parameters}
    )


class Rules:
    """A rules table of a few rows, which notes what is asked of it."""

    def __init__(self, *rows: Any) -> None:
        self.rows_ = list(rows)
        self.has_gate, self.status = False, "active"
        self.asked = list[Any]()
        self.tables = SimpleNamespace(place=f"place {id(self)}")

    def list_rows(self) -> list[Any]:
        return self.rows_

    def set_status(self, rule_id: str, status: str, *, author: str, comment: str) -> int:
        self.asked.append((rule_id, status, author, comment))
        if rule_id == "gone":
            raise RuleError("gone", [Problem("rule_id", "not a rule in the table")])
        self.rows_ = [
            row(each.rule_id, each.version + 1, status) if each.rule_id == rule_id else each for each in self.rows_
        ]
        return 2

    def set_parameters(self, rule_id: str, changes: Any, *, author: str, comment: str) -> int:
        self.asked.append((rule_id, changes, author, comment))
        self.written = row(rule_id, 3, self.status)
        return 3

    def read_versions(self, rule_id: str) -> list[Any]:
        assert self.written.rule_id == rule_id
        return [self.written]


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    counted = {"a": 10, "a (shadow)": 5}
    monkeypatch.setattr(streams, "count_alerts_by_role", lambda *_: dict(counted))
    return counted


def open_desk(rules: Any, seconds: float = 0) -> StreamDesk:
    return StreamDesk(rules, STREAM, seconds)


def test_rules_of_the_stream_with_their_alerts_a_minute(counts: dict[str, int]):
    rows = [row("a", limit=3), row("a", 2, "shadow"), row("b", 1, "paused"), row("other", stream="logins")]
    listed = list_steered(rows, "transactions", counts, 5)
    assert [(each.role, each.status, each.per_minute) for each in listed] == [
        ("a", "active", 2.0),
        ("a (shadow)", "shadow", 1.0),
        ("b", "paused", 0.0),
    ]
    assert (
        list_steered([SimpleNamespace(rule_id="x", version=1, status="active", document=None)], "transactions", {}, 5)
        == []
    )
    assert SteeredRule("a", "a" * 60 + "\n", 1, "active", 2.25).line.endswith(
        "... active      v1          2.2 a minute"
    )
    desk = open_desk(Rules(*rows))
    assert [value for _, value in find(desk, "rules").options] == ["a", "a (shadow)", "b"]
    assert "3 rules, 3.0 alerts a minute over the last 5 minutes" in find(desk, "read-at").value


def test_pause_resume_and_set_act_on_the_chosen_rule(counts: dict[str, int]):
    rules = Rules(row("a", limit=3, span="1 hour"), row("b"))
    desk = open_desk(rules)
    assert (find(desk, "name").options, find(desk, "value").value) == (("limit", "span"), "3")
    find(desk, "value").value = "4"
    find(desk, "author").value, find(desk, "comment").value = "ann", "too many"
    find(desk, "set").click()
    assert desk.status == "published a version 3 with limit = 4."
    rules.has_gate, rules.status = True, "draft"
    find(desk, "set").click()
    assert desk.status == (
        "wrote a version 3 with limit = 4 as a draft: it is not in force yet; the settings have a gate: lookback rules "
        "activate a."
    )
    rules.asked.pop()
    find(desk, "rules").value = "b"
    find(desk, "set").click()
    assert "b has no parameters" in desk.status
    find(desk, "pause").click()
    assert desk.status == "b is published as version 2, paused."
    assert find(desk, "rules").value == "b"
    assert "paused" in find(desk, "rules").options[1][0]
    find(desk, "resume").click()
    assert rules.asked == [
        ("a", {"limit": "4"}, "ann", "too many"),
        ("b", "paused", "ann", "too many"),
        ("b", "active", "ann", "too many"),
    ]


def test_an_error_is_a_sentence_and_a_rule_that_is_gone_too(counts: dict[str, int]):
    desk = open_desk(Rules(row("gone")))
    find(desk, "pause").click()
    assert desk.status.startswith("Problem: ")
    assert "not a rule in the table" in desk.status
    empty = open_desk(Rules())
    find(empty, "pause").click()
    assert "no rule is chosen" in empty.status


def test_what_is_typed_stays_while_the_list_is_refreshed(counts: dict[str, int]):
    rules = Rules(row("a", limit=3), row("b", limit=4))
    desk = open_desk(rules)
    find(desk, "value").value = "12"
    counts["b"] = 500
    desk.refresh()
    assert find(desk, "value").value == "12"
    find(desk, "rules").value = "b"
    assert find(desk, "value").value == "4"
    assert "100.0 a minute" in find(desk, "rules").options[1][0]


def wait_until(holds: Any) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.01)
    return False


def test_the_refresh_ends_with_stop_and_with_another_desk_of_the_stream(counts: dict[str, int]):
    rules = Rules(row("a"))
    first = open_desk(rules, seconds=0.01)
    rules.rows_ = [row("a"), row("b")]
    assert wait_until(lambda: len(first.rules) == 2)
    second = open_desk(rules, seconds=0.01)
    assert wait_until(lambda: not first.is_refreshing)
    assert second.is_refreshing
    find(second, "stop").click()
    assert not second.is_refreshing
    assert "no longer refreshes automatically" in second.status


def test_the_refresh_ends_when_nobody_is_there_and_goes_on_after_an_error():
    ended, acted = list[bool](), list[int]()

    def act() -> None:
        acted.append(1)
        raise ValueError("the table is gone")

    ticker = Ticker(act, 0.01, 0.1, lambda: ended.append(True)).start()
    assert wait_until(lambda: not ticker.is_running)
    assert len(acted) > 1
    assert ended == [True]


class Evaluation:
    """An evaluation that runs until it is stopped."""

    def __init__(self, fails: bool = False) -> None:
        self.running, self.reports, self._fails = True, list[Any](), fails

    def stop(self) -> None:
        self.running = False
        if self._fails:
            raise SetupError("the checkpoint is gone")


@pytest.mark.parametrize("fails", [False, True])
def test_stop_ends_the_evaluation_beside_the_desk(counts: dict[str, int], fails: bool):
    desk, evaluation = open_desk(Rules(row("a"))), Evaluation(fails)
    desk.attach(evaluation)  # type: ignore[arg-type]
    assert find(desk, "progress-picture").layout.display == ""
    assert desk.is_refreshing
    find(desk, "stop").click()
    assert not evaluation.running
    assert not desk.is_refreshing
    assert desk.status == (
        "Problem: The evaluation failed: the checkpoint is gone"
        if fails
        else "The evaluation has ended; the next one continues from there."
    )


def test_an_evaluation_that_ends_by_itself_is_told(counts: dict[str, int]):
    desk, evaluation = open_desk(Rules(row("a")), seconds=0.01), Evaluation()
    desk.attach(evaluation)  # type: ignore[arg-type]
    evaluation.running = False
    assert wait_until(lambda: desk.status.startswith("The evaluation has ended"))
    desk.stop()
