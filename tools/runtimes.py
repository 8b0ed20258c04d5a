"""Runs the tests that depend on Spark most on the Spark of each Databricks Runtime, with what that runtime brings.

    python tools/runtimes.py [4.0] [4.1] [4.2]

Each has an environment of its own below build/runtimes, made once. Every one first writes a checkpoint, and then finds those
of the others: what an older Spark wrote is gone on with, what a newer one wrote is refused.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT / "build" / "runtimes"
CHECKPOINTS = PLACE / "checkpoints"
# Of the runtimes; other versions of Python that Lookback runs on will do where it is missing.
_PYTHON = "python3.12"
_UNRAISABLE = "ignore::pytest.PytestUnraisableExceptionWarning"
# Files of tests/spark, and of some of them these tests alone.
_TESTS = {
    "pipeline": (
        "test_c3_every_kind_of_rule_gives_what_replay_gives_for_any_cut_and_shard_count",
        "test_c3_7_a_rule_inserted_by_sql_while_the_stream_runs_is_obeyed",
        "test_c3_7_changes_of_rules_between_runs_equal_replay_at_logged_arrivals",
    ),
    "kill": (),
    "rebuild": (),
    "maintenance": ("test_a_table_that_gets_another_column_ends_the_run_with_an_error_and_the_next_one_goes_on",),
    "connect": (),
    "stored_checkpoint": (),
}


@dataclass(frozen=True)
class Runtime:
    """A Databricks Runtime as far as it can be had outside: the open-source Spark and Delta that are nearest to its own.

    pins: the file of tests/data/runtimes with the packages that it brings. needed: versions that this Spark needs, for Spark
    Connect and where Databricks has built it for another version of protobuf.
    """

    name: str
    pins: str
    spark: str
    delta: str
    needed: tuple[str, ...]

    @property
    def packages(self) -> list[str]:
        """What the environment is made of: exact versions, and of the tests' own those that everybody has."""
        lines = (ROOT / "tests/data/runtimes" / f"{self.pins}.txt").read_text(encoding="utf-8").splitlines()
        pinned = dict(line.split("==") for line in lines if line and not line.startswith("#"))
        needed = dict(each.split("==") for each in self.needed)
        brought = [f"{name}=={version}" for name, version in {**pinned, **needed}.items()]
        locked = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
        own = [line for line in locked if line.split("==")[0] in ("hypothesis", "pytest", "sqlglot")]
        return [f"pyspark=={self.spark}", f"delta-spark=={self.delta}", *brought, *own]


_CONNECT_4_0 = ("grpcio==1.67.0", "grpcio-status==1.67.0", "googleapis-common-protos==1.65.0")
_CONNECT = ("grpcio==1.76.0", "grpcio-status==1.76.0", "googleapis-common-protos==1.71.0")
RUNTIMES = {
    "4.0": Runtime("17.3 LTS", "17.3.x-scala2.13", "4.0.1", "4.0.0", _CONNECT_4_0),
    "4.1": Runtime("18 LTS", "18.x-scala2.13", "4.1.0", "4.1.0", ("protobuf==6.33.0", *_CONNECT)),
    "4.2": Runtime("19", "19.x-scala2.13", "4.2.0", "4.4.0", _CONNECT),
}


def main(arguments: Sequence[str]) -> int:
    """Runs the tests of the runtimes named by their Spark, by default of all. Returns how many failed."""
    unknown = sorted(set(arguments) - set(RUNTIMES))
    if unknown:
        print(f"{', '.join(unknown)}: not among {', '.join(RUNTIMES)}", file=sys.stderr)
        return 2
    chosen = {spark: RUNTIMES[spark] for spark in RUNTIMES if spark in arguments or not arguments}
    pythons = {spark: environment(spark, runtime) for spark, runtime in chosen.items()}
    if not arguments:
        shutil.rmtree(CHECKPOINTS, ignore_errors=True)
    failed = 0
    for spark, python in pythons.items():
        store = [str(python), "tests/stored_checkpoint.py", str(CHECKPOINTS / f"spark-{spark}.zip")]
        failed += _run(f"a checkpoint by Spark {spark}", store)
    for spark, python in pythons.items():
        # Without the filter of pyproject.toml, which leaves out those that take minutes. Sockets that an older Spark leaves
        # open are not ours.
        pytest = [str(python), "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider", "--durations=5"]
        tests = [*pytest, "-W", "ignore::ResourceWarning", "-W", _UNRAISABLE, *_tests(spark)]
        failed += _run(f"the tests on Databricks Runtime {chosen[spark].name}, Spark {spark}", tests)
    return failed


def environment(spark: str, runtime: Runtime) -> Path:
    """The interpreter of the runtime's environment, which is made where it is missing or its versions have changed."""
    folder = PLACE / spark
    python, made = folder / "bin" / "python", folder / "made"
    packages = runtime.packages
    mark = hashlib.sha256("\n".join(packages).encode()).hexdigest()
    if made.exists() and made.read_text() == mark:
        return python
    print(f"installing what Databricks Runtime {runtime.name} brings into {folder.relative_to(ROOT)} ...", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([_base(), "-m", "venv", folder], check=True)  # noqa: S603
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *packages], check=True)  # noqa: S603
    made.write_text(mark)
    return python


def _tests(spark: str) -> list[str]:
    # The client of Spark Connect knows transformWithStateInPandas from Spark 4.1 on.
    known = {name: chosen for name, chosen in _TESTS.items() if (spark, name) != ("4.0", "connect")}
    files = {f"tests/spark/test_{name}.py": chosen for name, chosen in known.items()}
    return [at for file, chosen in files.items() for at in ([f"{file}::{name}" for name in chosen] or [file])]


def _base() -> str:
    for candidate in (_PYTHON, sys.executable):
        done = subprocess.run([candidate, "-c", "import ensurepip, venv"], capture_output=True, check=False)  # noqa: S603
        if done.returncode == 0:
            return candidate
    return sys.executable


def _run(what: str, command: Sequence[str]) -> int:
    """Runs a command at the top of the repository and says how long it took. Returns 1 where it failed."""
    started = time.monotonic()
    paths = [str(ROOT / "src"), str(ROOT / "tests")]
    own: Mapping[str, str] = {"PYTHONPATH": os.pathsep.join(paths), "LOOKBACK_CHECKPOINTS": str(CHECKPOINTS)}
    code = subprocess.run(command, cwd=ROOT, env={**os.environ, **own}, check=False).returncode  # noqa: S603
    print(f"{what}: {'failed' if code else 'ok'} in {time.monotonic() - started:.0f} s", flush=True)
    return 1 if code else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
