"""Runs the tests that depend most on Spark with the Spark and the packages of each Databricks Runtime.

    python dev/tools/runtimes.py [4.0] [4.1] [4.2]
    python dev/tools/runtimes.py --brief

Each has its own environment below build/runtimes, which is created once. Each first writes a checkpoint, and then reads
those of the others: it must go on with a checkpoint of an older Spark and refuse one of a newer. The brief run takes
minutes: the oldest Spark with a few of the tests, and checkpoints passed, both ways, between it and the environment that
runs this.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / "build" / "runtimes"
CHECKPOINTS = PLACE / "checkpoints"
# The Python of the runtimes; if it is missing, the running Python is used.
_PYTHON = "python3.12"
_UNRAISABLE = "ignore::pytest.PytestUnraisableExceptionWarning"
# Files of tests/spark; if tests are named, only these.
_TESTS = {
    "pipeline": (
        "test_c3_every_kind_of_rule_gives_what_replay_gives_for_any_cut_and_shard_count",
        "test_c3_7_a_rule_inserted_by_sql_while_the_stream_runs_is_obeyed",
        "test_c3_7_changes_of_rules_between_runs_equal_replay_at_logged_arrivals",
    ),
    "kill": (),
    "rebuild": (),
    "maintenance": ("test_a_run_goes_on_where_its_table_gets_another_column",),
    "connect": (),
    "stored_checkpoint": (),
}


_HANDOVER = "test_c8_the_checkpoint_of_an_older_spark_is_gone_on_with_and_that_of_a_newer_one_is_refused"
# The client of Spark Connect has no stateful operator on Spark 4.0.
_NO_OPERATOR = "test_an_evaluation_whose_client_has_no_stateful_operator_is_refused_before_it_begins"
# The tests of a brief run: on the oldest Spark, and in the environment that runs this.
_BRIEF = {
    "pipeline": (
        "test_c3_every_kind_of_rule_gives_what_replay_gives_for_any_cut_and_shard_count",
        "test_c3_7_a_rule_inserted_by_sql_while_the_stream_runs_is_obeyed",
    ),
    "connect": (_NO_OPERATOR,),
    "stored_checkpoint": (_HANDOVER,),
}
_BRIEF_HERE = {"stored_checkpoint": (_HANDOVER,)}


@dataclass(frozen=True)
class Runtime:
    """The nearest equivalent of a Databricks Runtime outside of Databricks: the closest open-source Spark and Delta.

    pins: the file of tests/data/runtimes with its packages. needed: versions that this Spark needs for Spark Connect, or
    because Databricks has built it for another version of protobuf.
    """

    name: str
    pins: str
    spark: str
    delta: str
    needed: tuple[str, ...]

    @property
    def packages(self) -> list[str]:
        """The packages of the environment, with exact versions; those that only tests need have the locked versions."""
        lines = (ROOT / "tests/data/runtimes" / f"{self.pins}.txt").read_text(encoding="utf-8").splitlines()
        pinned = dict(line.split("==") for line in lines if line and not line.startswith("#"))
        needed = dict(each.split("==") for each in self.needed)
        locked = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
        own = dict(line.split("==") for line in locked if line.split("==")[0] in _OWN)
        there = [f"{name}=={version}" for name, version in {**pinned, **needed, **own}.items()]
        return [f"pyspark=={self.spark}", f"delta-spark=={self.delta}", *there]


# What the jobs install, and what only tests need.
_OWN = ("hypothesis", "pyahocorasick", "pytest", "sqlglot", "tzdata")
_CONNECT_4_0 = ("grpcio==1.67.0", "grpcio-status==1.67.0", "googleapis-common-protos==1.65.0")
_CONNECT = ("grpcio==1.76.0", "grpcio-status==1.76.0", "googleapis-common-protos==1.71.0", "zstandard==0.25.0")
RUNTIMES = {
    "4.0": Runtime("17.3 LTS", "17.3.x-scala2.13", "4.0.1", "4.0.0", _CONNECT_4_0),
    "4.1": Runtime("18 LTS", "18.x-scala2.13", "4.1.0", "4.1.0", ("protobuf==6.33.0", *_CONNECT)),
    "4.2": Runtime("19", "19.x-scala2.13", "4.2.0", "4.4.0", _CONNECT),
}


def main(arguments: Sequence[str]) -> int:
    """Runs the tests of the runtimes named by their Spark, by default of all. Returns the number of failed runs."""
    parser = argparse.ArgumentParser(prog="python dev/tools/runtimes.py", description=__doc__)
    parser.add_argument("sparks", nargs="*", metavar="SPARK", help=", ".join(RUNTIMES))
    parser.add_argument(
        "--brief", action="store_true", help="the oldest Spark and this environment, a few of the tests"
    )
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.sparks) - set(RUNTIMES))
    if unknown or (options.brief and options.sparks):
        print(f"{', '.join(unknown) or '--brief'}: name some of {', '.join(RUNTIMES)}, or --brief", file=sys.stderr)
        return 2
    runs = _plan_brief_runs() if options.brief else _plan_runs(options.sparks or [*RUNTIMES])
    if not options.sparks:
        shutil.rmtree(CHECKPOINTS, ignore_errors=True)
    failed = 0
    for run in runs:
        store = [str(run.python), "tests/support/stored_checkpoint.py", str(CHECKPOINTS / f"spark-{run.spark}.zip")]
        failed += _run(f"a checkpoint by Spark {run.spark}", store)
    for run in runs:
        # `-m ""` lifts the filter of pyproject.toml, which leaves out tests that take minutes. Open sockets of an older
        # Spark are not our fault.
        pytest = [str(run.python), "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider", "--durations=5"]
        tests = [*pytest, "-W", "ignore::ResourceWarning", "-W", _UNRAISABLE, *run.tests]
        failed += _run(f"the tests on {run.name}, Spark {run.spark}", tests)
    return failed


@dataclass(frozen=True)
class Run:
    """One environment: its interpreter and the tests to run there. spark: the first two numbers of its version."""

    name: str
    spark: str
    python: Path
    tests: Sequence[str]


def _plan_runs(sparks: Sequence[str]) -> list[Run]:
    chosen = {spark: RUNTIMES[spark] for spark in RUNTIMES if spark in sparks}
    return [
        Run(
            f"Databricks Runtime {each.name}", spark, ensure_environment(spark, each), _list_paths(_select_tests(spark))
        )
        for spark, each in chosen.items()
    ]


def _plan_brief_runs() -> list[Run]:
    oldest, runtime = next(iter(RUNTIMES.items()))
    here = ".".join(version("pyspark").split(".")[:2])
    return [
        Run(f"Databricks Runtime {runtime.name}", oldest, ensure_environment(oldest, runtime), _list_paths(_BRIEF)),
        Run("this environment", here, Path(sys.executable), _list_paths(_BRIEF_HERE)),
    ]


def ensure_environment(spark: str, runtime: Runtime) -> Path:
    """Returns the interpreter of the runtime's environment. Creates it if it is missing or its versions have changed."""
    folder = PLACE / spark
    python, stamp = folder / "bin" / "python", folder / "made"
    packages = runtime.packages
    mark = hashlib.sha256("\n".join(packages).encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == mark:
        return python
    print(
        f"installing the packages of Databricks Runtime {runtime.name} into {folder.relative_to(ROOT)} ...", flush=True
    )
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([_find_python(), "-m", "venv", folder], check=True)  # noqa: S603
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *packages], check=True)  # noqa: S603
    stamp.write_text(mark)
    return python


def _select_tests(spark: str) -> dict[str, tuple[str, ...]]:
    return {**_TESTS, "connect": (_NO_OPERATOR,)} if spark == "4.0" else _TESTS


def _list_paths(tests: Mapping[str, tuple[str, ...]]) -> list[str]:
    files = {f"tests/spark/test_{name}.py": chosen for name, chosen in tests.items()}
    return [at for file, chosen in files.items() for at in ([f"{file}::{name}" for name in chosen] or [file])]


def _find_python() -> str:
    for candidate in (_PYTHON, sys.executable):
        done = subprocess.run([candidate, "-c", "import ensurepip, venv"], capture_output=True, check=False)  # noqa: S603
        if done.returncode == 0:
            return candidate
    return sys.executable


def _run(what: str, command: Sequence[str]) -> int:
    """Runs a command at the top of the repository and prints how long it took. Returns 1 if it failed."""
    started = time.monotonic()
    paths = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT / "tests/support"), str(ROOT)]
    own: Mapping[str, str] = {"PYTHONPATH": os.pathsep.join(paths), "LOOKBACK_CHECKPOINTS": str(CHECKPOINTS)}
    code = subprocess.run(command, cwd=ROOT, env={**os.environ, **own}, check=False).returncode  # noqa: S603
    print(f"{what}: {'failed' if code else 'ok'} in {time.monotonic() - started:.0f} s", flush=True)
    return 1 if code else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
