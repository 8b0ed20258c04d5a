"""Runs the tests that depend on Spark most on the Spark of each Databricks Runtime, with what that runtime brings.

    python dev/tools/runtimes.py [4.0] [4.1] [4.2]
    python dev/tools/runtimes.py --brief

Each has an environment of its own below build/runtimes, made once. Every one first writes a checkpoint, and then finds those
of the others: what an older Spark wrote is gone on with, what a newer one wrote is refused. The brief run takes minutes: the
oldest Spark with a few of the tests, and checkpoints handed over, both ways, between it and the environment that runs this.
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


_HANDOVER = "test_c8_the_checkpoint_of_an_older_spark_is_gone_on_with_and_that_of_a_newer_one_is_refused"
# On Spark 4.0 the client of Spark Connect has no stateful operator.
_NO_OPERATOR = "test_an_evaluation_whose_client_has_no_stateful_operator_is_refused_before_it_begins"
# Of a brief run: on the oldest Spark, and in the environment that runs this, whose Spark all other tests are run on.
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
_CONNECT = ("grpcio==1.76.0", "grpcio-status==1.76.0", "googleapis-common-protos==1.71.0", "zstandard==0.25.0")
RUNTIMES = {
    "4.0": Runtime("17.3 LTS", "17.3.x-scala2.13", "4.0.1", "4.0.0", _CONNECT_4_0),
    "4.1": Runtime("18 LTS", "18.x-scala2.13", "4.1.0", "4.1.0", ("protobuf==6.33.0", *_CONNECT)),
    "4.2": Runtime("19", "19.x-scala2.13", "4.2.0", "4.4.0", _CONNECT),
}


def main(arguments: Sequence[str]) -> int:
    """Runs the tests of the runtimes named by their Spark, by default of all. Returns how many runs failed."""
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
    runs = _brief_runs() if options.brief else _runs(options.sparks or [*RUNTIMES])
    if not options.sparks:
        shutil.rmtree(CHECKPOINTS, ignore_errors=True)
    failed = 0
    for run in runs:
        store = [str(run.python), "tests/stored_checkpoint.py", str(CHECKPOINTS / f"spark-{run.spark}.zip")]
        failed += _run(f"a checkpoint by Spark {run.spark}", store)
    for run in runs:
        # Without the filter of pyproject.toml, which leaves out those that take minutes. Sockets that an older Spark leaves
        # open are not ours.
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


def _runs(sparks: Sequence[str]) -> list[Run]:
    chosen = {spark: RUNTIMES[spark] for spark in RUNTIMES if spark in sparks}
    return [
        Run(f"Databricks Runtime {each.name}", spark, environment(spark, each), _paths(_tests(spark)))
        for spark, each in chosen.items()
    ]


def _brief_runs() -> list[Run]:
    oldest, runtime = next(iter(RUNTIMES.items()))
    here = ".".join(version("pyspark").split(".")[:2])
    return [
        Run(f"Databricks Runtime {runtime.name}", oldest, environment(oldest, runtime), _paths(_BRIEF)),
        Run("this environment", here, Path(sys.executable), _paths(_BRIEF_HERE)),
    ]


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


def _tests(spark: str) -> dict[str, tuple[str, ...]]:
    return {**_TESTS, "connect": (_NO_OPERATOR,)} if spark == "4.0" else _TESTS


def _paths(tests: Mapping[str, tuple[str, ...]]) -> list[str]:
    files = {f"tests/spark/test_{name}.py": chosen for name, chosen in tests.items()}
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
    paths = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT)]
    own: Mapping[str, str] = {"PYTHONPATH": os.pathsep.join(paths), "LOOKBACK_CHECKPOINTS": str(CHECKPOINTS)}
    code = subprocess.run(command, cwd=ROOT, env={**os.environ, **own}, check=False).returncode  # noqa: S603
    print(f"{what}: {'failed' if code else 'ok'} in {time.monotonic() - started:.0f} s", flush=True)
    return 1 if code else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
