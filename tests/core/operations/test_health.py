"""The findings on a stream's health: each at its threshold and just below it, with what to do."""

from __future__ import annotations

import datetime as dt
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lookback.core.operations.figures import Figures, Sample
from lookback.core.operations.health import check_health, describe_health, describe_leader, is_healthy, needs_leader
from lookback.core.operations.thresholds import RECENT, THRESHOLDS
from lookback.core.streams.metrics import RuleCounts

NOW = dt.datetime(2026, 3, 1, 12, tzinfo=dt.timezone.utc)
PAGE = Path(__file__).parents[3] / "docs" / "reference" / "health.md"


def ago(seconds: float) -> dt.datetime:
    return NOW - dt.timedelta(seconds=seconds)


def sample(seconds_ago: float, **more: Any) -> Sample:
    """A row of the metrics of a stream with which all is well."""
    at = ago(seconds_ago)
    usual: dict[str, Any] = {
        "events": 1_000, "late": 0, "discarded": 0, "lag": 0.5, "watermark": at - dt.timedelta(seconds=10), "state_rows": 5_000,
    }  # fmt: skip
    return Sample(at, **{**usual, **more})


def rows(**more: Any) -> list[Sample]:
    """One a minute for an hour; values may be functions of the minutes ago."""
    made = []
    for minute in range(59, -1, -1):
        own = {name: value(minute) if callable(value) else value for name, value in more.items()}
        made.append(sample(60 * minute + 5, **own))
    return made


WELL = Figures(
    "payments", NOW, rules=3, committed=9, judged=9, newest=ago(1), samples=rows(), last_sample=ago(5), ingested=60_000
)


def told(**more: Any) -> list[tuple[str, str]]:
    """Level and check of what is found, each with a sentence and a remedy."""
    findings = check_health(replace(WELL, **more))
    for finding in findings:
        assert finding.what.endswith("."), finding
        assert finding.remedy.endswith((".", ")")), finding
    return [(finding.level, finding.check) for finding in findings]


def test_a_stream_with_which_all_is_well() -> None:
    assert told() == []
    assert describe_health(WELL, []) == (
        "payments is healthy: judged through commit 9, nothing waits, last heard from 5 seconds ago."
    )


def test_a_new_stream_is_well() -> None:
    empty = Figures("payments", NOW, committed=0)
    assert check_health(empty) == []
    assert describe_health(empty, []) == "payments is healthy: nothing judged yet, nothing waits."


RUNNING = THRESHOLDS["silent"].value
WAITED = THRESHOLDS["unjudged"].value


@pytest.mark.parametrize(
    ("figures", "found"),
    [
        ({"waiting": 1, "lag": WAITED + 1, "last_sample": ago(RUNNING + 1)}, [("problem", "not_running")]),
        ({"waiting": 1, "lag": WAITED, "last_sample": ago(RUNNING + 1)}, []),
        # It is there, and says itself that it does not get on.
        ({"waiting": 1, "lag": WAITED + 1, "last_sample": ago(RUNNING)}, [("problem", "behind")]),
        # Nothing waits: a stream whose evaluation was stopped, or is run by a schedule.
        ({"waiting": 0, "lag": 0.0, "last_sample": ago(86_400)}, []),
        ({"waiting": 2, "lag": 1.0, "judged": None, "last_sample": None, "samples": ()}, [("problem", "not_running")]),
        ({"waiting": 2, "lag": 9e9, "rules": 0, "last_sample": None, "samples": ()}, [("note", "no_rules")]),
    ],
)
def test_an_evaluation_that_does_not_run(figures: dict[str, Any], found: list[Any]) -> None:
    assert told(**figures) == found


def test_what_is_said_of_an_evaluation_that_does_not_run() -> None:
    figures = replace(WELL, waiting=3, lag=7_300.0, last_sample=ago(7_200))
    (finding,) = check_health(figures)
    assert str(finding) == (
        "problem: The evaluation is not running: it was last heard from 2 hours ago, and 3 commits of events wait, the oldest "
        "for 2 hours. Start it: lookback evaluate payments; if a schedule starts it, check its last run."
    )
    assert describe_health(figures, [finding]) == (
        "payments needs a look (1 problem): judged through commit 9, 3 commits waiting, the oldest for 2 hours, "
        "last heard from 2 hours ago."
    )


def test_behind_is_a_warning_and_a_problem_once_it_grows() -> None:
    limit, grown = THRESHOLDS["behind"].value, THRESHOLDS["behind_growing"].value
    level = {"waiting": 4, "samples": rows(lag=100.0)}
    assert told(lag=limit, **level) == []
    assert told(lag=limit + 0.1, **level) == [("warning", "behind")]
    assert told(lag=100.0 + grown, **level) == [("warning", "behind")]
    assert told(lag=100.1 + grown, **level) == [("problem", "behind")]
    # It was less long ago, but has not grown since.
    assert told(lag=130.0, waiting=4, samples=rows(lag=lambda minute: 0.0 if minute > 30 else 100.0)) == [
        ("warning", "behind")
    ]
    (finding,) = check_health(replace(WELL, lag=90.0, **level))
    assert finding.what == "The evaluation is behind: 4 commits waiting, the oldest for 90 seconds."
    (finding,) = check_health(replace(WELL, lag=400.0, **level))
    assert "waiting, the oldest for 7 minutes, 5 minutes longer than 10 minutes ago" in finding.what


@pytest.mark.parametrize(
    ("stages", "remedy"),
    [
        ({"run": 10, "evaluate": 2, "write": 11}, "writing alerts"),
        ({"run": 10, "evaluate": 6, "write": 1}, "judging"),
        ({"run": 10, "evaluate": 5, "write": 10}, "reading and moving events"),
    ],
)
def test_what_makes_it_faster_depends_on_where_the_time_goes(stages: dict[str, int], remedy: str) -> None:
    (finding,) = check_health(replace(WELL, waiting=4, lag=90.0, samples=rows(stages=stages, lag=90.0)))
    assert remedy in finding.remedy


def test_rules_that_fail_are_quarantined_or_refused() -> None:
    figures = replace(
        WELL,
        quarantined=["broken"],
        failing={"ratio": "3 events could not be judged; the first is 7"},
        refused={"typo": "window must be longer than 0 s"},
        samples=[sample(5, rules={"ratio": RuleCounts(10, 0, 0, 3), "other": RuleCounts(10, 1, 0, 1), "fine": RuleCounts(10)})],
    )  # fmt: skip
    findings = check_health(figures)
    assert [(finding.level, finding.check) for finding in findings] == [
        ("problem", "quarantined"), ("warning", "failing"), ("warning", "failing"), ("warning", "refused"),
    ]  # fmt: skip
    assert [finding.what for finding in findings[1:]] == [
        "Rule other failed 1 time within the last hour.",
        "Rule ratio failed 3 times within the last hour: 3 events could not be judged; the first is 7.",
        "A row of the rules table for typo was rejected: window must be longer than 0 s.",
    ]
    assert not is_healthy(findings)


def test_problems_come_first() -> None:
    found = told(lag=90.0, waiting=4, samples=rows(lag=90.0), quarantined=["broken"])
    assert found == [("problem", "quarantined"), ("warning", "behind")]


def test_a_storm_is_what_one_rule_raises_and_not_what_is_suppressed() -> None:
    limit = int(THRESHOLDS["storm"].value)
    storm = {"loud": RuleCounts(9_999, limit // 2 + 7, 7), "calm": RuleCounts(9_999, limit // 2 - 1)}
    assert told(samples=[sample(50, rules=storm), sample(5, rules=storm)]) == [("warning", "storm")]
    less = {"loud": RuleCounts(9_999, limit + 7, 8)}
    assert told(samples=[sample(5, rules=less)]) == []
    (finding,) = check_health(
        replace(WELL, samples=[sample(5, rules={"loud": RuleCounts(1, 3_000), "calm": RuleCounts(1, 1_000)})])
    )[1:]
    assert finding.what == "Rule loud raised 3,000 alerts within the last hour, 75% of all."


def test_rejected_rows_are_a_warning_and_a_problem_if_many() -> None:
    assert told(rejected=1, ingested=10) == [("warning", "rejected")]
    assert told(rejected=1, ingested=9) == [("problem", "rejected")]
    (finding,) = check_health(replace(WELL, rejected=1, ingested=0, reason="amount: 'x' is not int"))
    assert finding.what == (
        "1 row (100.0%) could not be ingested within the last hour; the newest: amount: 'x' is not int."
    )


def test_late_events_count_by_their_share() -> None:
    assert told(samples=rows(late=10, discarded=10)) == [("problem", "discarded")]
    assert told(samples=rows(late=99, discarded=9)) == []
    assert told(samples=rows(late=100, discarded=9)) == [("warning", "late")]
    assert told(samples=[sample(5, events=999, late=100)]) == [("warning", "late")]
    # Of few events a share says nothing.
    assert told(samples=[sample(5, events=99, late=99, discarded=99)]) == []


def test_a_watermark_ahead_of_the_clock() -> None:
    limit = THRESHOLDS["watermark_ahead"].value
    assert told(samples=[sample(5, watermark=ago(-limit))]) == []
    assert told(samples=[sample(5, watermark=ago(-limit - 1))]) == [("problem", "watermark_ahead")]


def test_a_watermark_that_stands_still_while_events_come() -> None:
    def stands(minutes: int, events: int) -> list[Sample]:
        return rows(watermark=lambda at: ago(60 * max(at, minutes) + 900), events=events)

    assert told(samples=stands(10, 5)) == []
    assert told(samples=stands(11, 5)) == [("warning", "watermark_stuck")]
    # What came before it stood is what moved it there.
    once = rows(watermark=lambda at: ago(60 * max(at, 11) + 900), events=lambda at: 5 if at >= 11 else 0)
    assert told(samples=once) == []
    # Without events it has no reason to move.
    assert told(samples=stands(11, 0)) == []


@pytest.mark.parametrize(
    "samples",
    [
        rows(late=200, discarded=100),
        rows(late=200),
        [sample(5, watermark=ago(-700))],
        rows(watermark=lambda at: ago(60 * max(at, 11) + 900)),
    ],
    ids=["discarded", "late", "watermark_ahead", "watermark_stuck"],
)
def test_the_event_that_brought_the_watermark_ahead_is_named(
    samples: list[Sample], request: pytest.FixtureRequest
) -> None:
    figures = replace(WELL, samples=samples)
    assert all("event" not in finding.what.split(".")[1] for finding in check_health(figures))
    assert needs_leader(check_health(figures))
    named = describe_leader("a\n1", ago(-3_000), ago(0))
    (finding,) = check_health(replace(figures, leader=named))
    assert finding.check == request.node.callspec.id
    assert finding.what.endswith(
        " The watermark was moved furthest by event 'a\\n1' of 2026-03-01T12:50:00Z, 50 minutes ahead of the clock when "
        "it was ingested."
    )


def test_the_watermark_that_was_furthest_ahead_is_found() -> None:
    assert not needs_leader(check_health(WELL))
    assert replace(WELL, samples=[sample(5, watermark=None)]).furthest is None
    leap = [sample(65), sample(35, watermark=ago(-3_000)), sample(5, watermark=ago(-3_000))]
    assert replace(WELL, samples=leap).furthest == leap[1]
    # An event that was not ahead of the clock, and one of a table that others write.
    assert (
        describe_leader("7", ago(5), ago(4))
        == describe_leader("7", ago(5), None)
        == "event '7' of 2026-03-01T11:59:55Z"
    )


def test_a_watermark_far_behind_the_clock_is_worth_a_note() -> None:
    limit = THRESHOLDS["watermark_behind"].value
    assert told(samples=[sample(5, watermark=ago(limit))]) == []
    assert told(samples=[sample(5, watermark=ago(limit + 1))]) == [("note", "watermark_behind")]
    # A backlog explains it.
    assert told(samples=[sample(5, watermark=ago(limit + 1))], waiting=9, lag=30.0) == []
    (finding,) = check_health(replace(WELL, samples=[sample(5, watermark=ago(9_000))], newest=ago(8_000)))
    assert finding.what == "The watermark is 2 hours behind the clock, because no events come."
    assert is_healthy([finding])


def test_state_that_grows() -> None:
    least = int(THRESHOLDS["state_least"].value)
    assert told(samples=[sample(50, state_rows=least // 2), sample(5, state_rows=least)]) == [("warning", "state")]
    assert told(samples=[sample(50, state_rows=least // 2 + 1), sample(5, state_rows=least)]) == []
    assert told(samples=[sample(50, state_rows=1), sample(5, state_rows=least - 1)]) == []


def test_the_page_has_every_threshold_and_every_finding() -> None:
    text = PAGE.read_text(encoding="utf-8")
    listed = {
        name: (float(value.replace(",", "")), unit, why)
        for name, value, unit, why in re.findall(r"^\| `(\w+)` \| ([\d.,]+) (.+?) \| (.+?) \|$", text, re.MULTILINE)
    }
    assert listed == {name: tuple(each) for name, each in THRESHOLDS.items()}
    assert dt.timedelta(hours=1) == RECENT
    source = (Path(__file__).parents[3] / "src/lookback/core/operations/health.py").read_text(encoding="utf-8")
    checks = set(re.findall(r'(?:PROBLEM|WARNING|NOTE),\s+"(\w+)"', source)) | set(
        re.findall(r'else WARNING, "(\w+)"', source)
    )
    checks |= set(re.findall(r'Finding\(level, "(\w+)"', source))
    assert set(re.findall(r"^\| (?:problem|warning|note)[a-z ,]* \| `(\w+)` \|", text, re.MULTILINE)) == checks
