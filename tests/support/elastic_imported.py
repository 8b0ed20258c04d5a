"""Imports Elastic's rules from dicts, and judges events by them. Fields have dots in rules, and `_` in the stream."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

import lookback
from lookback.core.streams.declaration import Stream
from lookback.importing.elastic import NDJSON, TOML, read_rules
from lookback.importing.mapping import NameMap
from lookback.importing.report import Report
from lookback.importing.rulefiles import find_files
from lookback.importing.run import Target, write_rules

FIELDS = {
    "event_id": "string", "event_time": "timestamp", "process_name": "string", "user_name": "string", "host_id": "string",
    "message": "string", "process_pid": "bigint", "file_size": "double", "process_trusted": "boolean",
    "process_args": "array<string>", "event_category": "array<string>", "source_ip": "string", "host_ip": "string",
    "file_hash_md5": "string", "file_hash_sha1": "string", "event_type": "array<string>",
}  # fmt: skip
STREAM = Stream.from_dict({"stream": "logs", "event_id": "event_id", "event_time": "event_time", "fields": FIELDS})
ID = "0e95725d-7320-415d-80f7-004da920fc27"
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

    @property
    def document(self) -> dict[str, Any]:
        """The only document."""
        (document,) = self.documents.values()
        return document


def make_rule(query: str, language: str = "eql", **more: Any) -> dict[str, Any]:
    """Makes a rule of EQL, KQL or Lucene as Kibana exports it."""
    type_ = "eql" if language == "eql" else "query"
    return {"rule_id": ID, "name": "A rule", "type": type_, "language": language, "query": query, **more}


def import_rules(
    folder: Path, *rules: Mapping[str, Any], is_scheduled: bool = False, names: NameMap | None = None
) -> Imported:
    """Imports rules as one export; each gets an id of its own."""
    lines = [json.dumps({**rule, "rule_id": f"{rule['rule_id'][:-2]}{at:02}"}) for at, rule in enumerate(rules)]
    path = folder / "export.ndjson"
    path.write_text("\n".join([*lines, json.dumps({"exported_count": len(rules)})]), encoding="utf-8")
    return import_files(folder, path, is_scheduled=is_scheduled, names=names)


def import_files(folder: Path, *places: Path, is_scheduled: bool = False, names: NameMap | None = None) -> Imported:
    """Imports files."""
    names = names or NameMap()
    found = read_rules(find_files(places, (TOML, NDJSON)), is_scheduled=is_scheduled, known=STREAM.fields)
    report = write_rules(found, Target(STREAM, folder / "rules", folder / "lists"), names)
    made = [folder / "rules" / f"{line.rule_id}.yml" for line in report.lines if line.rule_id]
    return Imported(report, {file.stem: yaml.safe_load(file.read_text(encoding="utf-8")) for file in made})


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
        rows.append({**row, **{name.replace(".", "_"): value for name, value in event.items() if name != "at"}})
    harness.events(rows)
    assert not harness.errors
    found: dict[str, list[str]] = {rule_id: [] for rule_id in documents}
    for alert in harness.alerts:
        if alert.verdict == "raised":
            found[alert.rule_id].append(alert.event_id)
    return found


def find(folder: Path, rule: Mapping[str, Any], *events: Mapping[str, Any]) -> list[int]:
    """Imports a rule that must be exact, and returns the places of the events that it alerts on."""
    made = import_rules(folder, rule)
    assert made.fidelities == ["exact"]
    (found,) = judge(made.documents, events).values()
    return [int(each.removeprefix("e")) for each in found]
