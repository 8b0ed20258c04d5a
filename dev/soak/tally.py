"""Counts the figures of a soak run."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from typing import Any

_MAX_SHOWN = 10


class Tally:
    """Counts kills, batches and differences; several threads may call its methods."""

    def __init__(self, seed: int) -> None:
        self._seed, self._lock, self._started = seed, threading.Lock(), time.monotonic()
        self._counts: dict[str, Counter[str]] = {}
        self._verdicts: list[dict[str, Any]] = []
        self._remarks: list[str] = []
        # Set to end the run: there are no more kills, and the current round is still compared.
        self.stopping = False

    def add(self, what: str, name: str, count: int = 1) -> None:
        """Adds to the count of a name under a heading."""
        with self._lock:
            self._counts.setdefault(what, Counter())[name] += count

    def kill(self, name: str) -> None:
        """Counts a kill, and prints it, as a run takes long."""
        self.add("kills", name)
        sys.stderr.write(f"kill {self.kills} after {time.monotonic() - self._started:.0f} s: {name}\n")

    def remark(self, text: str) -> None:
        """Keeps a sentence for the reader of the figures."""
        with self._lock:
            self._remarks.append(text)

    def close(self, verdict: dict[str, Any]) -> None:
        """Adds the verdict on a round."""
        with self._lock:
            self._verdicts.append(verdict)

    @property
    def kills(self) -> int:
        """The number of kills of all processes."""
        return self._counts.get("kills", Counter()).total()

    @property
    def has_failed(self) -> bool:
        """True if anything differed, or a process ended that had not been killed."""
        return any(map(self.differs, self._verdicts)) or bool(self._counts.get("ended by itself"))

    @staticmethod
    def differs(verdict: dict[str, Any]) -> bool:
        """Returns whether a round's tables differ from the replay, or could not be compared."""
        return "differences" not in verdict or any(verdict["differences"].values())

    def to_dict(self) -> dict[str, Any]:
        """Returns all figures."""
        totals: Counter[str] = Counter()
        differences: Counter[str] = Counter()
        for verdict in self._verdicts:
            totals.update({name: value for name, value in verdict.items() if isinstance(value, int)})
            differences.update(verdict.get("differences", {}))
        return {
            "seed": self._seed,
            "seconds": round(time.monotonic() - self._started),
            "rounds": len(self._verdicts),
            **{what: dict(sorted(counts.items())) for what, counts in sorted(self._counts.items())},
            "compared": dict(totals),
            "differences": dict(differences),
            "examples": [verdict["examples"] for verdict in self._verdicts if verdict.get("examples")],
            "not compared": [verdict["error"] for verdict in self._verdicts if "error" in verdict],
            "remarks": self._remarks[-_MAX_SHOWN:],
        }

    def __str__(self) -> str:
        lines = []
        for what, value in self.to_dict().items():
            if isinstance(value, dict):
                lines.append(f"{what}: {sum(value.values()):,}" if what == "kills" else f"{what}:")
                lines += [f"{count:>10,}  {name}" for name, count in value.items()]
            elif isinstance(value, list):
                lines += [f"{what}: {each}" for each in value]
            else:
                lines.append(f"{what}: {value:,}")
        return "\n".join(lines)
