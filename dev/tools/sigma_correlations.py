"""Compares imported Sigma correlations with pySigma's SQLite backend, on correlations and events that it makes.

    pip install pysigma-backend-sqlite            # in an environment of your own: it is no dependency
    python dev/tools/sigma_correlations.py --correlations 500 --events 60

SQLite lowers keys and values, so these have no capitals; it leaves events without a key out, as Lookback does. It says
of rules in order that they hold at any event of the window, so only events of the last rule are compared. No two events
have the same time. The exit code is 1 if a correlation that is not refused differs.
"""

from __future__ import annotations

import argparse
import json
import random
import sqlite3
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from sigma.backends.sqlite import sqliteBackend
from sigma.collection import SigmaCollection

import lookback
from lookback.core.streams.declaration import Stream
from lookback.importing.mapping import NameMap
from lookback.importing.rulefiles import find_files
from lookback.importing.run import Target, write_rules
from lookback.importing.sigma import read_rules

Event = dict[str, Any]
# When an alert came, in milliseconds, and its key.
Alerts = set[tuple[int, tuple[str, ...]]]
TYPES = ("event_count", "value_count", "temporal", "temporal_ordered")
NUMBERS = {"one": 1, "two": 2, "three": 3}
STREAM = Stream.from_dict(
    {
        "stream": "logs", "event_id": "event_id", "event_time": "event_time",
        "fields": {
            "event_id": "string", "event_time": "timestamp", "EventID": "bigint", "User": "string", "Host": "string",
            "timestamp": "bigint",
        },
    }
)  # fmt: skip
START = 1_772_359_200_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Compares, and prints how many pairs were equal. Returns 1 if a correlation differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--correlations", type=int, default=200)
    parser.add_argument("--events", type=int, default=60, help="how many events each correlation judges")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    chance = random.Random(options.seed)  # noqa: S311 - test data
    compared = dict.fromkeys(TYPES, 0)
    alerts = differing = refused = 0
    for _ in range(options.correlations):
        correlation = make_correlation(chance)
        events = make_events(chance, options.events)
        documents = [*map(make_rule, NUMBERS), {"title": "Together", "name": "together", "correlation": correlation}]
        ours = judge(documents, correlation, events)
        if ours is None:
            refused += 1
            continue
        theirs = query(documents, correlation, events)
        compared[correlation["type"]] += 1
        alerts += len(theirs)
        if ours != theirs:
            differing += 1
            print(
                f"  differs: {correlation}\n    only here {sorted(ours - theirs)[:5]}, only there {sorted(theirs - ours)[:5]}"
            )
    pairs = sum(compared.values()) * options.events
    print(f"{compared}, refused {refused}: {pairs:,} pairs of a correlation and an event, {alerts:,} alerts of SQLite")
    print(f"{differing} correlations differ")
    return 1 if differing else 0


def make_rule(name: str) -> dict[str, Any]:
    """Makes a rule that a correlation names."""
    source = {"product": "windows", "category": "process_creation"}
    detection = {"s": {"EventID": NUMBERS[name]}, "condition": "s"}
    return {"title": name, "name": name, "logsource": source, "detection": detection}


def make_correlation(chance: random.Random) -> dict[str, Any]:
    """Makes a correlation of any of the types."""
    kind, names = chance.choice(TYPES), list(NUMBERS)
    rules = chance.sample(names, chance.randint(1 if "count" in kind else 2, len(names)))
    made: dict[str, Any] = {"type": kind, "rules": rules, "timespan": f"{chance.choice([1, 5, 10, 30])}s"}
    if group_by := chance.choice([["User"], ["User"], ["User", "Host"], ["Host"], []]):
        made["group-by"] = group_by
    if "count" in kind:
        made["condition"] = {chance.choice(["gte", "gt", "lt", "lte", "eq"]): chance.randint(1, 4)}
    if kind == "value_count":
        made["condition"]["field"] = "Host"
    return made


def make_events(chance: random.Random, count: int) -> list[Event]:
    """Makes events at different times, some exactly a time span apart, some without a key."""
    at, found = START, []
    for _ in range(count):
        at += chance.choice([1, 500, 999, 1_000, 1_000, 2_000, 5_000, 9_999])
        values = {"User": chance.choice(["a", "a", "b", None]), "Host": chance.choice(["x", "y", "z", None])}
        found.append({"EventID": chance.choice([1, 1, 2, 3, 4]), "timestamp": at, **values})
    return found


def judge(
    documents: Sequence[Mapping[str, Any]], correlation: Mapping[str, Any], events: Sequence[Event]
) -> Alerts | None:
    """Returns the alerts of the imported correlation; None if it is refused."""
    with tempfile.TemporaryDirectory() as place:
        source = Path(place) / "rules.yml"
        source.write_text(yaml.safe_dump_all(documents), encoding="utf-8")
        report = write_rules(
            read_rules(find_files([source]), NameMap()), Target(STREAM, Path(place) / "made"), NameMap()
        )
        line = next(line for line in report.lines if line.origin.title == "Together")
        if not line.rule_id:
            return None
        document = yaml.safe_load((Path(place) / f"made/{line.rule_id}.yml").read_text(encoding="utf-8"))
    rows = [{"event_id": str(at), "event_time": event["timestamp"] * 1_000, **event} for at, event in enumerate(events)]
    result = lookback.replay([document], rows, STREAM)
    if result.errors:
        raise SystemExit(f"a rule failed: {result.errors[0]}")
    return {
        (events[int(alert.event_id or 0)]["timestamp"], read_key(alert.key, correlation)) for alert in result.alerts
    }


def query(documents: Sequence[Mapping[str, Any]], correlation: Mapping[str, Any], events: Sequence[Event]) -> Alerts:
    """Returns the alerts that SQLite finds."""
    database = sqlite3.connect(":memory:")
    database.execute('CREATE TABLE logs ("EventID" INTEGER, "timestamp" INTEGER, "User" TEXT, "Host" TEXT)')
    database.executemany("INSERT INTO logs VALUES (:EventID, :timestamp, :User, :Host)", events)
    backend = sqliteBackend(timestamp_format="unix_ms")
    # The correlation is the last query; others are those of rules that alert by themselves.
    text = backend.convert(SigmaCollection.from_dicts([dict(each) for each in documents]))[-1]
    found = {
        (round(row[2] * 1_000), read_key(json.loads(row[1] or "{}"), correlation)) for row in database.execute(text)
    }
    if correlation["type"] == "temporal_ordered":
        last = {event["timestamp"] for event in events if event["EventID"] == NUMBERS[correlation["rules"][-1]]}
        found = {(at, key) for at, key in found if at in last}
    return found


def read_key(key: Mapping[str, Any], correlation: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the values of a key in the order of the correlation."""
    return tuple(str(key[name]) for name in correlation.get("group-by", ()))


if __name__ == "__main__":
    sys.exit(main())
