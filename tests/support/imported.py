"""Imports Sigma rules from texts, and judges events by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

import lookback
from lookback.core.streams.declaration import Stream
from lookback.importing.mapping import NameMap
from lookback.importing.report import Report
from lookback.importing.rulefiles import find_files
from lookback.importing.run import Target, write_rules

# Python 3.10 has no pySigma that reads all rules rightly.
pytest.importorskip("sigma.policy")
from lookback.importing.sigma import read_rules

FIELDS = {
    "event_id": "string", "event_time": "timestamp", "Image": "string", "CommandLine": "string", "User": "string",
    "Host": "string", "EventID": "bigint", "Size": "double", "Admin": "boolean", "Groups": "array<string>",
    "Ports": "array<int>", "Seen": "timestamp", "Parent": "struct<Image: string>", "c_uri": "string",
}  # fmt: skip
STREAM = Stream.from_dict({"stream": "logs", "event_id": "event_id", "event_time": "event_time", "fields": FIELDS})
HEAD = {"title": "A rule", "logsource": {"product": "windows", "category": "process_creation"}}
START = 1_772_359_200


@dataclass
class Imported:
    """What an import made: the report, and the documents by rule id."""

    report: Report
    documents: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def fidelities(self) -> list[str]:
        """The result of each rule."""
        return [line.fidelity for line in self.report.lines]


def make_rule(detection: Mapping[str, Any], condition: str = "selection", **more: Any) -> dict[str, Any]:
    """Makes a Sigma rule with one selection, or with several and a condition."""
    named = dict(detection) if condition != "selection" else {"selection": detection}
    return {**HEAD, "detection": {**named, "condition": condition}, **more}


def import_rules(
    folder: Path, *documents: Mapping[str, Any], names: NameMap | None = None, stream: Stream = STREAM
) -> Imported:
    """Imports the documents of one file."""
    source = folder / "sigma" / "rules.yml"
    source.parent.mkdir(exist_ok=True)
    source.write_text(yaml.safe_dump_all(documents, allow_unicode=True, sort_keys=False), encoding="utf-8")
    return import_files(folder, source.parent, names=names, stream=stream)


def import_files(folder: Path, *places: Path, names: NameMap | None = None, stream: Stream = STREAM) -> Imported:
    """Imports files."""
    names = names or NameMap()
    target = Target(stream, folder / "rules", folder / "lists")
    report = write_rules(read_rules(find_files(places), names), target, names)
    made = [line.rule_id for line in report.lines if line.rule_id]
    files = [folder / "rules" / f"{rule_id}.yml" for rule_id in made]
    return Imported(report, {file.stem: yaml.safe_load(file.read_text(encoding="utf-8")) for file in files})


def judge(
    documents: Mapping[str, Mapping[str, Any]], events: Sequence[Mapping[str, Any]], *, at_once: bool = False
) -> dict[str, list[str]]:
    """Returns the ids of the events that each rule alerts on, in order. `at`: seconds after the start of the events.

    at_once: All arrive in one commit.
    """
    harness = lookback.Harness(STREAM)
    for document in documents.values():
        harness.rule(document)
    rows = []
    for number, event in enumerate(events):
        row = {"event_id": f"e{number}", "event_time": START * 1_000_000 + round(event.get("at", number) * 1_000_000)}
        row |= {"arrival": 1} if at_once else {}
        rows.append({**row, **{name: value for name, value in event.items() if name != "at"}})
    harness.events(rows)
    assert not harness.errors
    found: dict[str, list[str]] = {rule_id: [] for rule_id in documents}
    for alert in harness.alerts:
        found[alert.rule_id].append(alert.event_id)
    return found
