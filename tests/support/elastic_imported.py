"""Imports Elastic's rules from dicts, and judges events by them. Fields have dots in rules, and `_` in the stream."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from judged import Imported, find_alerts, group_by_rule
from lookback.core.streams.declaration import Stream
from lookback.importing.elastic import NDJSON, TOML, read_rules
from lookback.importing.mapping import NameMap
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
    target = Target(STREAM, folder / "rules", folder / "lists")
    return Imported.read(write_rules(found, target, names), target.rules)


def judge(
    documents: Mapping[str, Mapping[str, Any]], events: Sequence[Mapping[str, Any]], *, at_once: bool = False
) -> dict[str, list[str]]:
    """Returns the ids of the events that each rule alerts on, in order. `at`: seconds after the start of the events.

    at_once: All arrive in one commit.
    """
    rows = [{name.replace(".", "_"): value for name, value in event.items()} for event in events]
    alerts = find_alerts(STREAM, documents, rows, at_once=at_once)
    return group_by_rule(documents, [alert for alert in alerts if alert.verdict == "raised"])


def find(folder: Path, rule: Mapping[str, Any], *events: Mapping[str, Any]) -> list[int]:
    """Imports a rule that must be exact, and returns the places of the events that it alerts on."""
    made = import_rules(folder, rule)
    assert made.fidelities == ["exact"]
    (found,) = judge(made.documents, events).values()
    return [int(each.removeprefix("e")) for each in found]
