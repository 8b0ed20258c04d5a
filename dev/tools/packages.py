"""Builds the wheel and the sdist and tries them where nothing else is installed: `make packages`.

For each Python the wheel is installed with its dependencies into an empty environment. There `lookback rules check` must
check a rule and run its tests within seconds, without Spark and without Java. The exit code is 0 if all of this works, 1
if something does not, 3 if the dependencies could not be installed, as then nothing was tried.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FINE, BROKEN, UNKNOWN = 0, 1, 3
_PYTHONS = ("python3.10", "python3.11", "python3.12")
_RULE = "conf/rules/customer-day-spend.yml"
_MAX_SECONDS = 20.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Builds both packages and tries the wheel on each Python. Returns 0, 1 or 3."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="folder of the packages")
    parser.add_argument("--python", action="append", help="an interpreter; default: those of 3.10 to 3.12 on the PATH")
    parser.add_argument("--extra", default="", help="an extra to install too, such as local")
    options = parser.parse_args(arguments)
    wheel, sdist = build(options.output)
    print(f"built {wheel.name} and {sdist.name}")
    if differences := compare(wheel, sdist):
        print(f"a wheel made of the sdist differs in {', '.join(differences)}")
        return BROKEN
    pythons = options.python or list(_find_pythons())
    codes = {try_wheel(python, wheel, options.extra) for python in pythons}
    return max(codes, default=UNKNOWN, key=(FINE, UNKNOWN, BROKEN).index)


def build(folder: Path, source: Path = ROOT) -> tuple[Path, Path]:
    """Builds the wheel and the sdist of a source tree into a folder, without a network. Returns their paths."""
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder.resolve())]
    done = _run(command, cwd=source)
    if done.returncode:
        raise SystemExit(f"hatchling failed:\n{done.stdout}{done.stderr}")
    (wheel,), (sdist,) = folder.glob("lookback_rules-*.whl"), folder.glob("lookback_rules-*.tar.gz")
    return wheel, sdist


def compare(wheel: Path, sdist: Path) -> list[str]:
    """Lists the files in which the wheel differs from one that is built from the sdist."""
    with tempfile.TemporaryDirectory() as scratch:
        with tarfile.open(sdist) as archive:
            archive.extractall(scratch, filter="data")
        (source,) = Path(scratch).iterdir()
        again, _ = build(Path(scratch) / "again", source)
        one, other = _read(wheel), _read(again)
    return sorted(name for name in {*one, *other} if one.get(name) != other.get(name))


def try_wheel(python: str, wheel: Path, extra: str = "") -> int:
    """Installs the wheel into an empty environment and checks a rule there. Returns 0, 1 or 3."""
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        _run([python, "-m", "venv", str(place / "venv")]).check_returncode()
        programs = place / "venv" / "bin"
        package = f"lookback-rules[{extra}] @ {wheel.resolve().as_uri()}" if extra else str(wheel.resolve())
        pip = [str(programs / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", package]
        installed = _run(pip)
        if installed.returncode:
            print(f"{python}: not tried, pip could not install the dependencies: {installed.stderr.strip()[-300:]}")
            return UNKNOWN
        for name in ("conf/streams", _RULE):
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            copy(ROOT / name, place / name)
        # No Java, and no package from outside the environment.
        environment = {"PATH": str(programs), "HOME": str(place), "LANG": os.environ.get("LANG", "C.UTF-8")}
        started = time.monotonic()
        command = [str(programs / "lookback"), "rules", "check", _RULE]
        done = _run(command, cwd=place, env=environment)
        seconds = time.monotonic() - started
    fine = done.returncode == 0 and "is valid" in done.stdout and seconds < _MAX_SECONDS
    print(f"{python}: {'' if fine else 'FAILED, '}{seconds:.1f} s: {(done.stdout + done.stderr).strip()}")
    return FINE if fine else BROKEN


def _run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)  # noqa: S603


def _find_pythons() -> Iterator[str]:
    """Yields the interpreters on the PATH that run; one there may be a shim that does not."""
    for name in _PYTHONS:
        path = shutil.which(name)
        if path and _run([path, "-c", "import venv"]).returncode == 0:
            yield path


def _read(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}


if __name__ == "__main__":
    sys.exit(main())
