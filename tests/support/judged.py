"""Judges events by imported rules, whatever system they come from."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

import lookback
from lookback.core.streams.alerts import Alert
from lookback.core.streams.declaration import Stream
from lookback.importing.report import Report

START = 1_772_359_200


@dataclass
class Imported:
    """What an import made: the report, and the documents by rule id."""

    report: Report
    documents: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, report: Report, folder: Path) -> Imported:
        """Reads the rules of a report from the folder to which they were written."""
        files = [folder / f"{line.rule_id}.yml" for line in report.lines if line.rule_id]
        return cls(report, {file.stem: yaml.safe_load(file.read_text(encoding="utf-8")) for file in files})

    @property
    def fidelities(self) -> list[str]:
        """The result of each rule."""
        return [line.fidelity for line in self.report.lines]

    @property
    def document(self) -> dict[str, Any]:
        """The only document."""
        (document,) = self.documents.values()
        return document


def find_alerts(
    stream: Stream,
    documents: Mapping[str, Mapping[str, Any]],
    events: Sequence[Mapping[str, Any]],
    *,
    at_once: bool = False,
) -> list[Alert]:
    """Returns the alerts on events, which are called e0, e1, ... `at`: seconds after the start of the events.

    at_once: All arrive in one commit.
    """
    harness = lookback.Harness(stream)
    for document in documents.values():
        harness.rule(document)
    rows = []
    for number, event in enumerate(events):
        row = {"event_id": f"e{number}", "event_time": START * 1_000_000 + round(event.get("at", number) * 1_000_000)}
        row |= {"arrival": 1} if at_once else {}
        rows.append({**row, **{name: value for name, value in event.items() if name != "at"}})
    harness.events(rows)
    assert not harness.errors
    return list(harness.alerts)


def group_by_rule(documents: Mapping[str, Any], alerts: Sequence[Alert]) -> dict[str, list[str]]:
    """Returns the ids of the events of alerts by rule, in order."""
    found: dict[str, list[str]] = {rule_id: [] for rule_id in documents}
    for alert in alerts:
        found[alert.rule_id].append(alert.event_id)
    return found


def make_near(chance: random.Random, texts: list[str]) -> str:
    """Makes a text that is almost one that a rule looks for."""
    text = chance.choice(texts)
    for sign in ("*", "?", "\\"):
        text = text.replace(sign, chance.choice([sign, "", "z"]))
    text = "".join(chance.choice("z%_A") if chance.random() < 0.1 else each for each in text)
    return chance.choice(["", "", "x"]) + chance.choice([str, str.upper])(text) + chance.choice(["", "", "x"])
