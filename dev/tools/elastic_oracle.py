"""Compares imported EQL rules with the python `eql` engine, event by event and sequence by sequence.

    python -m venv /tmp/eql && /tmp/eql/bin/pip install eql     # under the AGPL: a program of its own, no dependency
    git clone https://github.com/elastic/detection-rules
    python dev/tools/elastic_oracle.py detection-rules --engine /tmp/eql/bin/python

The engine knows no capitals, no arrays, no `?` that stands for a character and no repeated steps, and `not` of a missing
field is NULL to it. So texts of rules and events are in small letters and have no `?`, each event has all fields of its rule
with one value each, and rules with `regex`, `runs` or names in backticks are left out. The exit code is 1 if a rule that is exact differs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

import lookback
from lookback.core.streams.declaration import Stream
from lookback.importing.conditions import Condition, Flag, Network, Number, Text, Wildcard, list_tests
from lookback.importing.detections import Chain, Detection, list_fields_read, list_key_fields, list_members
from lookback.importing.drafting import draft_stream, read_draft
from lookback.importing.elastic import NDJSON, read_rules
from lookback.importing.fields import FieldNames
from lookback.importing.mapping import NameMap
from lookback.importing.report import EXACT
from lookback.importing.rulefiles import find_files
from lookback.importing.run import Target, write_rules

START = 1_772_359_200
# Runs in the other Python: reads queries with their events, and writes the ids of the last events that each found.
ENGINE = """
import json, sys
import eql
from eql.parser import elasticsearch_syntax
for line in sys.stdin:
    rule, found = json.loads(line), []
    try:
        with elasticsearch_syntax:
            query = eql.parse_query(rule["query"])
        engine = eql.PythonEngine({})
        engine.add_query(query)
        engine.add_output_hook(lambda result: found.append(result.events[-1].data["_id"]))
        engine.stream_events([eql.Event(each["_kind"], each["_ticks"], each) for each in rule["events"]])
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    print(json.dumps(found), flush=True)
"""
FUNCTIONS = {name.lower(): name for name in ("cidrMatch", "endsWith", "indexOf", "startsWith", "stringContains")}
Event = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compares, and prints how many pairs were equal. Returns 1 if an exact rule differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository", type=Path)
    parser.add_argument("--engine", required=True, help="the Python that has the package eql")
    parser.add_argument("--events", type=int, default=100, help="how many events to make for each rule")
    parser.add_argument("--rules", type=int, default=10_000, help="how many rules to compare")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    chance = random.Random(options.seed)  # noqa: S311 - test data
    rules = {rule["rule_id"]: rule for rule in load_rules(options.repository)}
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / f"rules{NDJSON}"
        path.write_text("\n".join(map(json.dumps, rules.values())), encoding="utf-8")
        found = read_rules(find_files([path]))
        stream = read_draft(draft_stream("logs", found, NameMap()))
        report = write_rules(found, Target(stream, Path(place)), NameMap())
        exact = {line.origin.id: line.rule_id for line in report.lines if line.kind == EXACT}
        documents = {
            id_: yaml.safe_load((Path(place) / f"{name}.yml").read_text("utf-8")) for id_, name in exact.items()
        }
    detections = [each for each in found if isinstance(each, Detection) and each.origin.id in exact]
    print(f"{len(detections):,} exact rules of {len(rules):,}")
    chance.shuffle(detections)
    del detections[options.rules :]
    made = {each.origin.id: make_events(each, options.events, chance) for each in detections}
    lines = [
        json.dumps({"query": rules[id_]["query"], "events": [nest(e) for e in events]}) for id_, events in made.items()
    ]
    done = subprocess.run(  # noqa: S603 - the program of the user
        [options.engine, "-c", ENGINE], input="\n".join(lines), capture_output=True, text=True, check=True
    )
    theirs = dict(zip(made, map(json.loads, done.stdout.splitlines()), strict=True))
    started = time.perf_counter()
    ours = {id_: judge(documents[id_], events, stream) for id_, events in made.items()}
    print(f"judged by Lookback in {time.perf_counter() - started:.0f} s")
    return compare(
        {id_: isinstance(each.shape, Chain) for id_, each in zip(made, detections, strict=True)}, exact, ours, theirs
    )


def load_rules(repository: Path) -> list[dict[str, Any]]:
    """Reads the rules of EQL that the engine understands."""
    # Python 3.10 has no such module.
    load = importlib.import_module("tomllib").loads
    rules = [
        load(path.read_text(encoding="utf-8"))["rule"]
        for folder in ("rules", "rules_building_block")
        for path in sorted((repository / folder).rglob("*.toml"))
    ]
    return [
        {key: rule[key] for key in ("rule_id", "name", "type", "from", "interval") if key in rule}
        | {"query": rewrite(rule["query"])}
        for rule in rules
        if rule["type"] == "eql"
        and not re.search(r"\bregex\b|\bruns\b|!\[|`|^sample", rule["query"])
        and not {"filters", "event_category_override"} & set(rule)
    ]


def rewrite(query: str) -> str:
    """Returns a query with texts in small letters and functions in the engine's."""
    pieces = re.split(r'("""(?:.*?)"""|"(?:[^"\\\n]|\\.)*")', query, flags=re.DOTALL)
    return "".join(
        piece.lower().replace("?", "q") if at % 2 else re.sub(r"\b[a-zA-Z]+(?=~?\s*\()", rename, piece)
        for at, piece in enumerate(pieces)
    )


def rename(word: re.Match[str]) -> str:
    """Returns the name of a function as the engine has it."""
    return FUNCTIONS.get(word[0].lower(), word[0])


def make_events(detection: Detection, count: int, chance: random.Random) -> list[Event]:
    """Makes events of the values of a rule, so that many match, and many just do not."""
    members, keys = list_members(detection.shape), set(list_key_fields(detection.shape))
    fields, at, events = list_fields_read(detection.shape), 0.0, []
    for number in range(count):
        at += chance.choice([0.1, 0.5, 2, 20])
        values = list_values(chance.choice(members), chance)
        others = list_values(chance.choice(members), chance)
        event: Event = {"_id": f"e{number}", "_at": round(at, 1)}
        for field in fields:
            known = values.get(field) or others.get(field) or ["zz"]
            event[field] = chance.choice("xy") if field in keys else chance.choice(known)
            if chance.random() < 0.04 and isinstance(event[field], str):
                event[field] = f"{event[field]}z"
        events.append(event)
    return events


def list_values(condition: Condition, chance: random.Random) -> dict[str, list[Any]]:
    """Lists values that the tests of a condition ask for, by field."""
    found: dict[str, list[Any]] = {}
    for test in list_tests(condition):
        if not isinstance(test.field, str):
            continue
        if isinstance(test, Text):
            filling = chance.choice(["", "", "-", "a b"])
            text = "".join(filling if isinstance(part, Wildcard) else part for part in test.pattern)
            found.setdefault(test.field, []).append(text)
        elif isinstance(test, Number):
            found.setdefault(test.field, []).append(int(test.number) + chance.choice([-1, 0, 0, 1]))
        elif isinstance(test, Flag):
            found.setdefault(test.field, []).append(chance.random() < 0.5)
        elif isinstance(test, Network):
            found.setdefault(test.field, []).append(test.cidr.partition("/")[0])
    numbers = {test.field for test in list_tests(condition) if isinstance(test, Number)}
    return {
        field: [each for each in values if field not in numbers or isinstance(each, int)]
        for field, values in found.items()
    }


def nest(event: Event) -> Event:
    """Returns an event as the engine has it: with objects in objects, its kind, and its time in ticks of 100 ns."""
    kind, ticks = str(event.get("event.category", "zz")), round(event["_at"] * 10_000_000)
    found: Event = {"_id": event["_id"], "_kind": kind, "_ticks": ticks}
    for name, value in event.items():
        *above, last = name.split(".")
        inner: Any = found
        for each in above:
            inner = inner.setdefault(each, {}) if isinstance(inner, dict) else None
        if isinstance(inner, dict):
            inner[last] = value
    return found


def judge(document: dict[str, Any], events: Sequence[Event], stream: Stream) -> list[str]:
    """Returns the ids of the events on which a rule alerts, in order."""
    names = FieldNames(stream, {})
    rows = [
        {"event_id": event["_id"], "event_time": round((START + event["_at"]) * 1_000_000)}
        | {names.find(name): as_text(value) for name, value in event.items() if name[0] != "_"}
        for event in events
    ]
    result = lookback.replay([document], rows, stream)
    if result.errors:
        raise SystemExit(f"a rule failed: {result.errors[0]}")
    return [str(alert.event_id) for alert in result.alerts]


def as_text(value: Any) -> str:
    """Returns a value as the stream has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def compare(chains: dict[str, bool], exact: dict[str, str], ours: dict[str, list[str]], theirs: dict[str, Any]) -> int:
    """Prints the differences, apart for events and sequences. Returns the exit code."""
    has_failed = False
    for word, is_chain in (("events", False), ("sequences", True)):
        ids = [id_ for id_, each in chains.items() if each == is_chain]
        known = [id_ for id_ in ids if isinstance(theirs[id_], list)]
        for id_ in set(ids) - set(known):
            print(f"  the engine cannot judge {exact[id_]}: {theirs[id_]}"[:200])
        differing = [id_ for id_ in known if sorted(ours[id_]) != sorted(theirs[id_])]
        for id_ in differing[:20]:
            print(f"  {exact[id_]} ({id_}) differs: only here {sorted({*ours[id_]} - {*theirs[id_]})[:5]}", end="")
            print(f", only there {sorted({*theirs[id_]} - {*ours[id_]})[:5]}")
        matches = sum(len(theirs[id_]) for id_ in known)
        rules = sum(bool(theirs[id_]) for id_ in known)
        print(f"{word}: {len(known):,} rules, {matches:,} matches of {rules:,} of them, {len(differing)} rules differ")
        has_failed |= bool(differing)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
