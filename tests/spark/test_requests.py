"""How many requests a batch sends to an object store: as many after hundreds of batches as at first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from bucket import BucketTables
from objectstore import S3Server

pytestmark = [pytest.mark.spark, pytest.mark.objectstore]
# Delta writes a checkpoint of a log after ten commits, so ten batches have one of each.
WINDOW = 10
# The first batch whose requests count.
FIRST = 5
# Of a batch that alerts.
MOST_REQUESTS = 27
# What takes place once in some seconds, not in each batch: the heartbeat of the owner, looks at rules and lists, rows of
# metrics, and Spark's upkeep of the state. On a slow machine a batch has more of it.
BY_TIME = ("owner", "head log of rules", "log of lists", "of metrics", "list state", "head state")
# Lists of the events' log in a batch. A query lists it again after two seconds, so a slow machine has more of them.
LISTS = "list log of pay"
MOST_LISTS = 2


def count_requests(tables: BucketTables, batches: int) -> list[dict[str, int]]:
    """Evaluates so many batches of one commit. Returns the requests of each."""
    tables.append(batches)
    with tables.server.count_requests_of_batches() as counts:
        tables.run("evaluate", "pay", "--once")
    assert len(counts) >= batches
    return counts


def find_mean(batches: Sequence[dict[str, int]]) -> dict[str, float]:
    """Returns the requests of a batch by kind."""
    kinds = sorted({kind for each in batches for kind in each if not kind.endswith(BY_TIME)})
    return {kind: sum(each.get(kind, 0) for each in batches) / len(batches) for kind in kinds}


def find_steady(server: S3Server, folder: Path, rules: int, history: int) -> dict[str, float]:
    """Returns the requests of a batch where commits of the events have been judged before."""
    tables = BucketTables.make(server, folder, rules)
    tables.append(history)
    tables.admit(files=1_000)
    tables.run("evaluate", "pay", "--once")
    tables.admit(files=1)
    return find_mean(count_requests(tables, WINDOW + 2)[1 : WINDOW + 1])


def total(requests: dict[str, float]) -> float:
    return sum(requests.values())


def require_no_growth(before: dict[str, float], after: dict[str, float]) -> None:
    """Fails if a batch sends more requests than one before."""
    most = 1.05 * (total(before) - before.get(LISTS, 0)) + 1
    assert total(after) - after.get(LISTS, 0) <= most, f"{before}\n{after}"
    assert after.get(LISTS, 0) <= MOST_LISTS, after


def test_c13_3_a_late_batch_sends_as_many_requests_as_an_early_one(server: S3Server, tmp_path: Path) -> None:
    counts = count_requests(BucketTables.make(server, tmp_path / "long", 1), 10 * FIRST + WINDOW + 2)
    early, *later = (find_mean(counts[start : start + WINDOW]) for start in (FIRST, 3 * FIRST, 10 * FIRST))
    assert total(early) <= MOST_REQUESTS, early
    # A commit that was listed is read by one request.
    assert early.get("head log of pay", 0) <= 0.2, early
    for each in later:
        require_no_growth(early, each)


def test_c13_3_a_batch_of_many_commits_reads_each_of_them_once(server: S3Server, tmp_path: Path) -> None:
    tables = BucketTables.make(server, tmp_path / "together", 1)
    tables.append(40)
    tables.admit(files=1_000)
    with server.count_requests() as counts:
        tables.run("evaluate", "pay", "--once")
    assert counts["get log of pay"] <= 60, counts
    assert counts["head log of pay"] <= 15, counts


def test_c13_3_neither_many_rules_nor_a_long_log_of_events_ask_for_more_requests(
    server: S3Server, tmp_path: Path
) -> None:
    least = find_steady(server, tmp_path / "least", rules=1, history=20)
    of_rules = find_steady(server, tmp_path / "rules", rules=50, history=20)
    of_commits = find_steady(server, tmp_path / "commits", rules=1, history=150)
    for each in (of_rules, of_commits):
        require_no_growth(least, each)
