"""Plans the measurements of a whole run, in order, each in its own process, so that compilers and caches start cold."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dev.bench.results import FOLDER, RESULTS, command
from dev.bench.sets import COMMIT_ROWS, REPOSITORY, ROWS
from dev.bench.versus import PEERS
from dev.bench.watching import say

PARTS = (
    "shapes",
    "drain",
    "rules",
    "windows",
    "sequence",
    "texts",
    "backtest",
    "cluster",
    "latency",
    "changes",
    "warm",
    "lists",
    "scale",
    "peers",
)
SCALE_PARTS = ("shards", "rules", "log")
# What `python -m dev.bench` runs unless told otherwise.
DEFAULT_PARTS = (
    "shapes", "drain", "rules", "windows", "sequence", "texts", "backtest", "cluster", "latency", "changes", "warm", "lists",
)  # fmt: skip
_QUICK_ROWS = 300_000
# The larger of the tables whose past a new rule is to know.
_WARM_EVENTS = 20_000_000
# What one batch takes by the profile `throughput`: twenty commits of handbook, eighteen of the others. Nine batches are to
# follow the first two, and a rest; where many rules make that long, half as many or fewer.
_BATCH_EVENTS, _SMALL_BATCH_EVENTS = 1_800_000, 200_000
_BATCHES, _FEW_BATCHES, _MIN_BATCHES, _SMALL_BATCHES, _TEXT_BATCHES = 11.5, 6.5, 4.5, 22.5, 8.5
# The sets of rules that are backtested.
_BACKTESTED = ("2", "100")
# The way to run all events at once that backtests stand beside.
ONE_SHOT = ("oneshot", "--variant", "polars")


@dataclass(frozen=True)
class Step:
    """One measurement: the part and the set that it belongs to, and its command line. others: parts that need it too."""

    part: str
    set: str
    arguments: tuple[str, ...]
    others: tuple[str, ...] = ()

    def is_in(self, parts: Sequence[str]) -> bool:
        """Returns whether one of these parts has or needs the measurement."""
        return not {self.part, *self.others}.isdisjoint(parts)


def steps(*, quick: bool, peers: Sequence[str], limit_seconds: float) -> list[Step]:
    """Every measurement. quick: small sets and short times, to see that everything works. peers: names of engines."""
    shapes = Step("shapes", "zipf", ("shapes",))
    scale = Step("scale", "zipf", ("scale", *(("--small",) if quick else ())))
    return [
        shapes,
        *_drains(quick=quick),
        *_backtests(quick=quick),
        *_live(quick=quick),
        scale,
        *_peers(peers, limit_seconds, quick=quick),
    ]


def run(chosen: Iterable[Step]) -> int:
    """Runs them one after the other. Returns how many failed; one that fails does not keep the others from running."""
    started, failed = time.monotonic(), 0
    environment = {**os.environ, FOLDER: str(RESULTS)}
    todo = list(chosen)
    for number, step in enumerate(todo, 1):
        say(f"\n[{number}/{len(todo)}, {time.monotonic() - started:,.0f} s] {command(step.arguments)}")
        line = [sys.executable, "-m", "dev.bench", *step.arguments]
        done = subprocess.run(line, cwd=REPOSITORY, check=False, env=environment)  # noqa: S603
        failed += done.returncode != 0
    say(f"\n{len(todo)} measurements in {time.monotonic() - started:,.0f} s, {failed} failed")
    return failed


def _drains(*, quick: bool) -> list[Step]:
    state, small_batches = ("--state",), ("--admission", f"maxFilesPerTrigger={_SMALL_BATCH_EVENTS // COMMIT_ROWS}")
    full, half = _BATCHES * _BATCH_EVENTS, _FEW_BATCHES * _BATCH_EVENTS
    small = _SMALL_BATCHES * _SMALL_BATCH_EVENTS
    plan: list[tuple[str, str, str, float, tuple[str, ...]]] = [
        ("drain", "handbook", "2", full, state),
        ("drain", "zipf", "2", full, state),
        ("drain", "uniform", "2", full, state),
        ("rules", "handbook", "100", full, ()),
        ("rules", "zipf", "100", full, ()),
        *(("rules", "zipf", rules, half, ()) for rules in ("10", "100-of-5-features", "200", "distinct")),
        ("rules", "zipf", "1000", _MIN_BATCHES * _BATCH_EVENTS, ()),
        *(("windows", "handbook", f"held-{size}", small, small_batches) for size in ("1h", "30d")),
        *(
            ("windows", "handbook", f"window-{size}", small, (*state, *small_batches))
            for size in ("1h", "1d", "7d", "30d")
        ),
        ("sequence", "logins", "sequence", half, ()),
        ("texts", "processes", "3000-on-texts", _TEXT_BATCHES * _SMALL_BATCH_EVENTS, small_batches),
        # Each pair one after the other, for the same reason as the next two.
        ("lists", "zipf", "2", half, ("--name", "drain-zipf-2-unlisted")),
        ("lists", "zipf", "2-asking", half, ()),
        ("lists", "zipf", "2-condition", half, ()),
        ("lists", "zipf", "2-listed", half, ()),
        # One after the other, so that the two stand side by side whatever else the machine does.
        ("cluster", "zipf", "2", half, ("--name", "cluster-zipf-local")),
        ("cluster", "zipf", "2", half, ("--name", "cluster-zipf-workers", "--workers", "2")),
    ]
    found = []
    for part, name, rules, events, more in plan:
        arguments = ("--repeats", f"{events / ROWS[name]:.2f}", *more)
        if quick:
            bounds = ("--repeats", "2", "--admission", "maxFilesPerTrigger=1")
            kept = tuple(each for each in more if each not in small_batches)
            arguments = ("--rows", str(_QUICK_ROWS), *bounds, *kept)
        # Backtests are compared with these.
        others = ("backtest",) if name == "handbook" and rules in _BACKTESTED else ()
        found.append(Step(part, name, ("drain", "--set", name, "--rules", rules, *arguments), others))
    return found


def _backtests(*, quick: bool) -> list[Step]:
    rows = ("--rows", str(_QUICK_ROWS)) if quick else ()
    repeats = ("--repeats", "2" if quick else f"{_BATCHES * _BATCH_EVENTS / ROWS['handbook']:.2f}")
    return [
        *(
            Step("backtest", "handbook", ("backtest", "--set", "handbook", "--rules", rules, *rows, *repeats))
            for rules in _BACKTESTED
        ),
        # The limit: the same two rules where nothing streams.
        Step("backtest", "handbook", ("peer", *ONE_SHOT, "--set", "handbook", *rows)),
        *(
            Step("backtest", "handbook", ("what-if", "--set", "handbook", "--vary", varied, *rows, "--repeats", "2"))
            for varied in ("limit", "window")
        ),
    ]


def _live(*, quick: bool) -> list[Step]:
    short = ("--seconds", "10", "--warm-up", "5") if quick else ()
    few = ("--known", "3", "--new", "1", "--lists", "3", "--warm-up", "5") if quick else ()
    warm = ("warm", "--set", "handbook")
    large = ("--repeats", f"{_WARM_EVENTS / ROWS['handbook']:.2f}", "--name", "warm-handbook-large")
    sequences = (*large[:2], "--rule", "sequence", "--name", "warm-handbook-sequence")
    return [
        *(Step("latency", "zipf", ("latency", "--rate", str(rate), *short)) for rate in (100, 1_000, 5_000)),
        Step("latency", "zipf", ("latency", "--rate", "100", "--plain", *short)),
        Step("latency", "zipf", ("latency", "--rate", "1000", "--many", *short)),
        Step("changes", "zipf", ("changes", *few), ("lists",)),
        Step("warm", "handbook", (*warm, *(("--rows", str(_QUICK_ROWS)) if quick else ()), *short)),
        *(() if quick else (Step("warm", "handbook", (*warm, *large)), Step("warm", "handbook", (*warm, *sequences)))),
    ]


def _peers(names: Sequence[str], limit_seconds: float, *, quick: bool) -> list[Step]:
    small = ("--rows", str(_QUICK_ROWS)) if quick else ()
    found = []
    for name in ("handbook", "zipf"):
        for peer in PEERS:
            if peer.name in names:
                durable = ("--durable",) if peer.durable else ()
                peer_arguments = ("peer", peer.name, "--variant", peer.variant, *durable, "--set", name, *small)
                found.append(Step("peers", name, (*peer_arguments, "--limit-seconds", f"{limit_seconds:g}")))
    return found
