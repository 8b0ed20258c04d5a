"""One measurement, one JSON file: what was measured, on what, with which command."""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from dev.bench.sets import REPOSITORY, write_json

# Elsewhere for a quick run, which must not go over figures that count.
FOLDER = "LOOKBACK_BENCH_RESULTS"
RESULTS = Path(os.environ.get(FOLDER) or Path(__file__).resolve().parent / "results").resolve()
_PACKAGES = ("pyspark", "delta-spark", "pyarrow", "numpy", "pandas")


def record(name: str, part: str, settings: Mapping[str, Any], figures: Mapping[str, Any], **more: Any) -> Path:
    """Writes dev/bench/results/NAME.json. The command that repeats the measurement is the one that runs now."""
    file = RESULTS / f"{name}.json"
    document = {
        "name": name,
        "part": part,
        "command": command(sys.argv[1:]),
        "measured_at": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        "git": git(),
        "machine": machine(),
        "versions": versions(),
        "settings": dict(settings),
        "figures": dict(figures),
        **more,
    }
    write_json(file, document)
    return file


def load(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Loads the results of a folder by name."""
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))}


def committed() -> dict[str, dict[str, Any]]:
    """Loads the results of dev/bench/results from the commit that is checked out; none outside a repository."""
    names = _output(["git", "ls-tree", "-r", "--name-only", "HEAD", "dev/bench/results"]).splitlines()
    found = (_output(["git", "show", f"HEAD:{name}"]) for name in names if name.endswith(".json"))
    documents = [json.loads(text) for text in found if text]
    return {document["name"]: document for document in documents}


def command(arguments: Sequence[str]) -> str:
    """Returns the command to type at the top of the repository."""
    return " ".join(["python -m dev.bench", *arguments])


def git() -> dict[str, Any]:
    """Returns the commit that is checked out, and whether the engine differs from it; empty outside a repository."""
    commit = _output(["git", "rev-parse", "HEAD"])
    return (
        {"commit": commit, "changed": bool(_output(["git", "status", "--porcelain", "src", "conf"]))} if commit else {}
    )


def machine() -> dict[str, Any]:
    """Cores, memory and processor; nothing that names the machine."""
    info = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*:\s*(.*)", info.read_text()) if info.exists() else []
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return {
        "cores": os.cpu_count(),
        "memory_gib": round(memory, 1),
        "processor": models[0] if models else platform.processor(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions() -> dict[str, str]:
    """Returns the versions of Python, Java and the packages that the figures depend on."""
    java = Path(os.environ["JAVA_HOME"], "bin", "java") if os.environ.get("JAVA_HOME") else "java"
    match = re.search(r'version "([^"]+)"', _output([str(java), "-version"], errors=True))
    packages = {package: version for package in _PACKAGES if (version := installed(package)) is not None}
    return {"python": platform.python_version(), "java": match[1] if match else "unknown", **packages}


def installed(package: str) -> str | None:
    """Returns the version of a distribution; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def percentiles(values: Sequence[float], *shares: float) -> list[float]:
    """Returns the least values that at least so many per cent of the values do not exceed; NaN without values."""
    ordered = sorted(values)
    if not ordered:
        return [float("nan")] * len(shares)
    return [ordered[max(0, -int(-len(ordered) * share // 100) - 1)] for share in shares]


def _output(arguments: list[str], *, errors: bool = False) -> str:
    try:
        done = subprocess.run(arguments, cwd=REPOSITORY, capture_output=True, text=True, check=False)  # noqa: S603
    except OSError:
        return ""
    return (done.stderr if errors else done.stdout).strip()
