"""Kills ingest, authors and evaluation again and again, then proves the tables.

It runs in rounds: each has its own tables and a number of kills, and ends with a comparison. The exit code is 1 if
anything differs. Ctrl-C ends the run after the comparison of the current round.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dev.soak.round import Round
from dev.soak.tally import Tally


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs rounds until the number of kills or of seconds is reached. Returns 1 if a round failed."""
    options = parser().parse_args(arguments)
    folder = Path(options.folder or tempfile.mkdtemp(prefix="lookback-soak-"))
    tally, started = Tally(options.seed), time.monotonic()
    for number_of_signal in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number_of_signal, lambda *_: setattr(tally, "stopping", True))
    number = 0
    while not tally.stopping and tally.kills < options.kills and time.monotonic() - started < options.seconds:
        number += 1
        kills = min(options.round_kills, options.kills - tally.kills)
        deadline = started + options.seconds
        chance = random.Random(f"{options.seed}:{number}")  # noqa: S311 - repeatable, no secret
        verdict = Round(folder / f"round-{number}", chance, tally, options.tear).run(kills, deadline)
        tally.close(verdict)
        sys.stderr.write(f"round {number}: {json.dumps(verdict)}\n")
        if not tally.differs(verdict):
            shutil.rmtree(folder / f"round-{number}")
        _write(options.report, tally)
    sys.stdout.write(f"{tally}\n")
    if tally.has_failed:
        sys.stderr.write(f"The tables that differ are left in {folder}.\n")
        return 1
    if options.folder is None:
        shutil.rmtree(folder)
    return 0


def _write(report: Path | None, tally: Tally) -> None:
    text: dict[str, Any] = tally.to_dict()
    if report is not None:
        report.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    top = argparse.ArgumentParser(prog="python -m dev.soak", description=__doc__)
    top.add_argument("--kills", type=int, default=200, help="in all; default: %(default)s")
    top.add_argument("--round-kills", type=int, default=50, help="between two comparisons; default: %(default)s")
    top.add_argument("--seconds", type=float, default=4 * 3600.0, help="begin no kill after that; default: %(default)s")
    top.add_argument("--seed", type=int, default=1, help="of moments, events and changes; default: %(default)s")
    top.add_argument(
        "--tear", type=float, default=0.1, help="part of the kills of an evaluation after which a file of its checkpoint is cut off"
    )  # fmt: skip
    top.add_argument(
        "--folder", help="where the tables go; default: a temporary folder, removed unless anything differs"
    )
    top.add_argument("--report", type=Path, help="a file for the figures as JSON")
    return top


if __name__ == "__main__":
    sys.exit(main())
