"""Looks up every locked package in a database of known vulnerabilities: `make audit`.

The exit code is 0 if none is known, 1 if some are, 3 if the database could not be read, as then nothing was checked.
JARs (Spark's, Delta's) are not Python packages and are not looked up.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LOCK = Path(__file__).resolve().parents[2] / "requirements.lock"
FINE, FOUND, UNKNOWN = 0, 1, 3
_SECONDS = 600


def main(arguments: Sequence[str] | None = None) -> int:
    """Looks the packages up and prints known vulnerabilities. Returns 0, 1 or 3."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--auditor", default="pip-audit", help="the auditor's command")
    parser.add_argument("--source", default="osv", choices=["osv", "pypi"], help="the source of advisories")
    parser.add_argument("--lock", type=Path, default=LOCK)
    options = parser.parse_args(arguments)
    packages, reason = _look_up(options.auditor, options.source, options.lock)
    if packages is None:
        other = "pypi" if options.source == "osv" else "osv"
        print(
            f"Nothing is known of {options.lock.name}: the advisories of {options.source} cannot be reached, or the auditor "
            f"failed ({reason}). Run it again with a network, or with another source: make audit SOURCE={other}"
        )
        return UNKNOWN
    return _print_findings(packages, options.source)


def _look_up(auditor: str, source: str, lock: Path) -> tuple[list[dict[str, Any]] | None, str]:
    """Returns the auditor's findings by package; None, with the reason, if it failed."""
    # The lock is complete, so nothing must be resolved or installed.
    command = [
        auditor,
        "-r",
        str(lock),
        "--no-deps",
        "--disable-pip",
        "-s",
        source,
        "-f",
        "json",
        "--progress-spinner",
        "off",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)[:200]
    try:
        packages: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError, TypeError):
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return None, lines[-1][:200]
    return packages, ""


def _print_findings(packages: list[dict[str, Any]], source: str) -> int:
    skipped = [package for package in packages if "skip_reason" in package]
    found = [(package, each) for package in packages for each in package.get("vulns", ())]
    for package, each in found:
        names = ", ".join([each["id"], *each.get("aliases", ())])
        fixed = ", ".join(each.get("fix_versions", ())) or "no version yet"
        print(f"{package['name']} {package['version']}: {names}; mended in {fixed}")
    for package in skipped:
        print(f"{package['name']}: not looked up, {package['skip_reason']}")
    print(f"{len(packages) - len(skipped)} packages looked up at {source}: {len(found)} known vulnerabilities")
    if found:
        print("Raise the versions in requirements.lock (its head says how), and say so in CHANGELOG.md")
        return FOUND
    return UNKNOWN if skipped or not packages else FINE


if __name__ == "__main__":
    sys.exit(main())
