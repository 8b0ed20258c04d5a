"""Compares imported Sigma rules with pySigma's SQLite backend, event by event.

    pip install pysigma-backend-sqlite            # in an environment of your own: it is no dependency
    git clone https://github.com/SigmaHQ/sigma
    python dev/tools/sigma_oracle.py sigma --events 2000

The events are those of the repository's regression tests, and others that are made of the rules' own values. SQLite folds
the letters of ASCII alone, so events have no others. The exit code is 1 if a rule that is exact differs.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sqlite3
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import yaml
from sigma.backends.sqlite import sqliteBackend
from sigma.collection import SigmaCollection
from sigma.exceptions import SigmaError

import lookback
from lookback.core.streams.declaration import Stream
from lookback.importing.conditions import Condition, Fields, Network, Number, Text, Wildcard, list_tests
from lookback.importing.detections import Detection, list_members
from lookback.importing.documents import read_documents
from lookback.importing.drafting import draft_stream, read_draft
from lookback.importing.fields import FieldNames
from lookback.importing.mapping import NameMap
from lookback.importing.reasons import Refusal
from lookback.importing.report import EXACT
from lookback.importing.rulefiles import find_files
from lookback.importing.run import Target, write_rules
from lookback.importing.sigma import read_rules

Event = dict[str, Any]
NAMES = NameMap(keywords=("message",))
# Event rules that are judged at once.
RULES_AT_ONCE = 400


def main(arguments: Sequence[str] | None = None) -> int:
    """Compares, and prints how many pairs were equal. Returns 1 if an exact rule differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository", type=Path)
    parser.add_argument("--events", type=int, default=2_000, help="how many events to make")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    folders = [each for each in sorted(options.repository.glob("rules*")) if each.is_dir()]
    files = find_files(folders)
    found = read_rules(files, NAMES)
    stream = read_draft(draft_stream("logs", found, NAMES))
    with tempfile.TemporaryDirectory() as place:
        report = write_rules(found, Target(stream, Path(place)), NAMES)
        exact = {line.origin.id: line.rule_id for line in report.lines if line.kind == EXACT}
        paths = [Path(place) / f"{rule_id}.yml" for rule_id in exact.values()]
        documents = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in paths]
    detections = [each for each in found if isinstance(each, Detection) and each.origin.id in exact]
    real = list(read_real_events(options.repository / "regression_data", stream))
    made = make_events(detections, stream, options.events, random.Random(options.seed))  # noqa: S311 - test data
    events = [clean(event, stream) for event in (*real, *made)]
    print(f"{len(exact):,} exact rules, {len(real):,} real events, {len(made):,} made of the rules' values")
    started = time.perf_counter()
    ours = judge(documents, events, stream)
    print(f"judged by Lookback in {time.perf_counter() - started:.0f} s")
    theirs, unknown = query(files, exact, events, stream)
    return compare(exact, ours, theirs, unknown, len(events))


def compare(
    exact: Mapping[str, str], ours: Mapping[str, set[int]], theirs: Mapping[str, set[int]], unknown: int, events: int
) -> int:
    """Prints the differences. Returns the exit code."""
    differing = [(id_, ours[exact[id_]] ^ rows) for id_, rows in theirs.items() if ours[exact[id_]] != rows]
    for id_, rows in differing[:20]:
        print(f"  {exact[id_]} ({id_}) differs at events {sorted(rows)[:10]}")
    matches = sum(map(len, theirs.values()))
    rules = sum(bool(rows) for rows in theirs.values())
    print(
        f"{len(theirs) * events:,} pairs: {sum(len(rows) for _, rows in differing):,} differences in {len(differing)} rules"
    )
    print(f"{matches:,} matches of {rules:,} rules; SQLite cannot judge {unknown}")
    return 1 if differing else 0


def read_real_events(folder: Path, stream: Stream) -> Iterator[Event]:
    """Reads the events of the regression tests: the fields of Windows' event log, by their last names."""
    names = FieldNames(stream, {})
    for path in sorted(folder.rglob("*.json")):
        text = path.read_text(encoding="utf-8")
        decoder, at = json.JSONDecoder(), 0
        while at < len(text):
            if text[at].isspace():
                at += 1
                continue
            parsed, at = decoder.raw_decode(text, at)
            for event in parsed if isinstance(parsed, list) else [parsed]:
                yield {names.find(name): value for name, value in flatten(event, "") if is_known(name, names)}


def is_known(name: str, names: FieldNames) -> bool:
    """Returns whether a rule reads a field."""
    try:
        names.find(name)
    except Refusal:
        return False
    return True


def flatten(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Lists the values of an event with their names."""
    if not isinstance(value, dict):
        yield name, value
        return
    for key, inner in value.items():
        if key == "#attributes":
            yield from ((f"{name}_{each}", item) for each, item in inner.items())
        else:
            yield from flatten(inner, key)


def make_events(detections: Sequence[Detection], stream: Stream, count: int, chance: random.Random) -> list[Event]:
    """Makes events of the values of rules, so that many match, and many just do not."""
    names, order = FieldNames(stream, {}), list(detections)
    chance.shuffle(order)
    chosen = islice(cycle(order), count)
    return [make_event(list_members(each.shape)[0], names, chance) for each in chosen]


def make_event(condition: Condition, names: FieldNames, chance: random.Random) -> Event:
    """Makes an event of some of the values that a rule looks for."""
    by_field: dict[str, list[str]] = {}
    for test in list_tests(condition):
        if text := make_value(test, chance):
            by_field.setdefault(names.find(test.field), []).append(text)
    event: Event = {}
    for field, texts in by_field.items():
        # All, in the order of the rule, or some.
        kept = texts if chance.random() < 0.4 else chance.sample(texts, chance.randint(1, min(3, len(texts))))
        text = "".join(kept) if chance.random() < 0.7 else chance.choice(texts)
        if chance.random() < 0.9:
            event[field] = chance.choice([str, str.upper, str.lower, str.swapcase])(text[:2_000])
    return event


def make_value(test: Any, chance: random.Random) -> str:
    """Makes a value that satisfies a test, or almost."""
    if isinstance(test, Text):
        return "".join(part if isinstance(part, str) else fill(part, chance) for part in test.pattern)
    if isinstance(test, Number):
        return str(test.number)
    if isinstance(test, Network):
        return test.cidr.partition("/")[0]
    return "" if isinstance(test, Fields) else chance.choice(["", "x", "1"])


def fill(part: Wildcard, chance: random.Random) -> str:
    """Makes a text that a wildcard stands for."""
    return chance.choice(["", "", "-", "a b"]) if part is Wildcard.ANY else chance.choice("a.\\")


def clean(event: Event, stream: Stream) -> Event:
    """Makes all values texts of ASCII, and adds the text in which words without a field are looked for."""
    texts = {name: value for name, value in event.items() if value is not None and name in stream.fields}
    as_texts = {name: str(value).encode("ascii", "ignore").decode().replace("\0", "") for name, value in texts.items()}
    return {**as_texts, "message": " ".join(as_texts.values())}


def judge(documents: Sequence[Mapping[str, Any]], events: Sequence[Event], stream: Stream) -> dict[str, set[int]]:
    """Returns the places of the events on which each rule alerts."""
    at = "2026-03-01T10:00:00Z"
    rows = [{**event, "event_id": str(place), "event_time": at, "arrival": 1} for place, event in enumerate(events)]
    found: dict[str, set[int]] = {document["rule_id"]: set() for document in documents}
    for start in range(0, len(documents), RULES_AT_ONCE):
        result = lookback.replay(documents[start : start + RULES_AT_ONCE], rows, stream)
        if result.errors:
            raise SystemExit(f"a rule failed: {result.errors[0]}")
        for alert in result.alerts:
            found[alert.rule_id].add(int(alert.event_id))
    return found


def query(
    files: Sequence[Any], exact: Mapping[str, str], events: Sequence[Event], stream: Stream
) -> tuple[dict[str, set[int]], int]:
    """Returns the places of the events that SQLite finds for each rule, and the number of rules that it cannot judge."""
    database = sqlite3.connect(":memory:")
    database.create_function("regexp", 2, match_regex, deterministic=True)
    names = [name for name in stream.fields if name != "event_time"]
    # Sigma's own names, such as c-uri, are columns of SQLite.
    columns = {name: stream.columns.get(name, name).replace("`", "") for name in names}
    declared = ", ".join('"' + column.replace('"', '""') + '" TEXT' for column in columns.values())
    database.execute(f"CREATE TABLE logs ({declared})")
    marks = ", ".join("?" * len(names))
    rows = [[event.get(name) for name in names] for event in events]
    database.executemany(f"INSERT INTO logs VALUES ({marks})", rows)
    backend = sqliteBackend(collate_nocase=True, fulltext_field="message")
    found, unknown = dict[str, set[int]](), 0
    for file in files:
        collection = SigmaCollection.from_dicts(read_documents(file.path))
        for rule in collection.rules:
            if str(rule.id) not in exact:
                continue
            try:
                queries = backend.convert_rule(rule)
                texts = [text.replace("SELECT *", "SELECT rowid", 1) for text in queries]
                found[str(rule.id)] = {row[0] - 1 for text in texts for row in database.execute(text)}
            except (SigmaError, sqlite3.Error) as error:
                unknown += 1
                print(f"  SQLite cannot judge {file.path.name}: {str(error)[:150]}")
    return found, unknown


def match_regex(pattern: str, text: str | None) -> bool:
    """The function REGEXP of SQLite."""
    return text is not None and re.search(pattern, text) is not None


if __name__ == "__main__":
    sys.exit(main())
