"""Other engines on the same events with the same two rules. Alerts are compared before any figure is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dev.bench.results import installed, record
from dev.bench.rules import peers_rules
from dev.bench.sets import DATA, REPOSITORY, EventSet, write_json
from dev.bench.watching import say

Alert = tuple[str, int, int]
# A peer that does not end by itself so long after its limit is ended.
_GRACE_SECONDS = 120.0


@dataclass(frozen=True)
class Peer:
    """One way to run another engine. package: the distribution that it needs, if it is not there already."""

    name: str
    variant: str
    durable: bool = False
    package: str | None = None

    @property
    def label(self) -> str:
        """Its name in results: flink-tuned-heap-durable."""
        return "-".join([self.name, self.variant, *(["durable"] if self.durable else [])])


_FLINK, _BYTEWAX, _POLARS = "apache-flink-libraries", "bytewax", "polars"
PEERS = (
    *(
        Peer("flink", variant, durable, _FLINK)
        for variant in ("tuned-heap", "tuned-rocksdb", "demo-heap", "demo-rocksdb")
        for durable in (False, True)
    ),
    *(
        Peer("bytewax", variant, durable, _BYTEWAX)
        for variant in ("workers-1", "workers-2")
        for durable in (False, True)
    ),
    Peer("tws", "per-key", durable=True),
    Peer("oneshot", "numpy"),
    Peer("oneshot", "polars", package=_POLARS),
)


@dataclass(frozen=True)
class Comparison:
    """Two sets of alerts: how many are in both, in ours alone, in theirs alone; and the first of those."""

    both: int
    ours_alone: int
    theirs_alone: int
    example: Alert | None = None

    @property
    def equal(self) -> bool:
        """True if both have alerts and these are the same."""
        return self.both > 0 and not self.ours_alone and not self.theirs_alone


def compare(ours: Iterable[Alert], theirs: Iterable[Alert], judged: int) -> Comparison:
    """Compares alerts of the first `judged` events in order of arrival: an event_id is the place in that order."""
    mine, others = ({alert for alert in alerts if alert[1] < judged} for alerts in (ours, theirs))
    different = sorted(mine ^ others)
    return Comparison(len(mine & others), len(mine - others), len(others - mine), different[0] if different else None)


def read_alerts(file: Path) -> set[Alert]:
    """Reads lines rule_id,event_id,value. Raises ValueError if one occurs twice, as no alert is raised twice."""
    lines = [line.split(",") for line in file.read_text(encoding="utf-8").splitlines() if line]
    alerts = {(rule, int(event), int(value)) for rule, event, value in lines}
    if len(alerts) != len(lines):
        raise ValueError(f"{file.name}: {len(lines) - len(alerts)} alerts stand twice")
    return alerts


def run(peer: Peer, events: EventSet, limit_seconds: float, ours: Path) -> Path:
    """Runs one peer in a process of its own. ours: the alerts to compare with. Returns the file of the result."""
    name = f"peer-{peer.label}-{events.stem}"
    settings = {"set": events.stem, "peer": peer.name, "variant": peer.variant, "durable": peer.durable}
    if peer.package is not None and installed(peer.package) is None:
        say(f"{name}: not installed")
        return record(name, "peer", settings, {"outcome": "not installed"})
    rules = DATA / f"{events.stem}.rules.json"
    write_json(rules, peers_rules(events))
    alerts = DATA / "alerts" / f"{name}.csv"
    alerts.parent.mkdir(parents=True, exist_ok=True)
    alerts.unlink(missing_ok=True)
    arguments = [
        *(sys.executable, "-m", f"dev.bench.peers.{peer.name}", "--variant", peer.variant),
        *("--input", str(events.binary), "--rules", str(rules), "--alerts", str(alerts)),
        *(["--durable"] if peer.durable else []),
        *("--limit-seconds", str(limit_seconds)),
    ]
    try:
        outcome = _outcome(arguments, limit_seconds + _GRACE_SECONDS)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        say(f"{name}: failed: {error}")
        return record(name, "peer", settings, {"outcome": "failed", "error": str(error)[:500]})
    judged = int(outcome["events"])
    found = compare(read_alerts(ours), read_alerts(alerts), judged)
    alike = {
        "equal": found.equal,
        "both": found.both,
        "ours_alone": found.ours_alone,
        "theirs_alone": found.theirs_alone,
    }
    figures = {
        "outcome": "complete" if outcome["complete"] else f"stopped after {judged:,} events",
        **{key: outcome[key] for key in ("events", "seconds", "steady_events_per_s", "alerts", "complete")},
        "comparison": {**alike, "example": found.example},
    }
    say(
        f"{name}: {figures['steady_events_per_s']:,.0f} events/s, {figures['outcome']}, alerts "
        f"{'equal' if found.equal else f'DIFFER: {alike}, such as {found.example}'}"
    )
    more = {"version": outcome.get("version"), **outcome.get("settings", {})}
    return record(name, "peer", {**settings, **more}, figures)


def _outcome(arguments: Sequence[str], timeout: float) -> dict[str, Any]:
    """Returns the JSON object of the last line that the peer writes. Raises an error if it fails or takes too long."""
    # A group of its own: an engine's processes end with it.
    with subprocess.Popen(  # noqa: S603
        arguments, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise ValueError(f"it ended with {process.returncode}")
    outcome = json.loads(output.strip().splitlines()[-1])
    assert isinstance(outcome, dict)
    return outcome
