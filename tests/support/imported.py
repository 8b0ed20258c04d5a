"""Imports Sigma rules from texts, and judges events by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from judged import Imported, find_alerts, group_by_rule
from lookback.core.streams.declaration import Stream
from lookback.importing.mapping import NameMap
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
    return Imported.read(report, target.rules)


def judge(
    documents: Mapping[str, Mapping[str, Any]], events: Sequence[Mapping[str, Any]], *, at_once: bool = False
) -> dict[str, list[str]]:
    """Returns the ids of the events that each rule alerts on, in order. `at`: seconds after the start of the events.

    at_once: All arrive in one commit.
    """
    return group_by_rule(documents, find_alerts(STREAM, documents, events, at_once=at_once))
