"""Wheel and sdist have what a rule needs to be checked; `make packages` tries them in empty environments, with a network."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

from lookback.project import SHARED

ROOT = Path(__file__).resolve().parents[2]
TOOL = runpy.run_path(str(ROOT / "dev/tools/packages.py"))
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
CI = (ROOT / ".ci/run").read_text(encoding="utf-8")
# Checks a rule with the package in the first argument, where Spark is not installed.
SCRIPT = """
import importlib.abc, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("pyspark", "delta", "py4j"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
sys.path.insert(0, sys.argv[1])
import lookback
from lookback.cli import main

assert lookback.__file__.startswith(sys.argv[1]), lookback.__file__
sys.exit(main(["rules", "check", *sys.argv[2:]]))
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    wheel, sdist = TOOL["build"](tmp_path_factory.mktemp("dist"))
    return wheel, sdist


def test_packages_have_every_file_of_the_source_and_nothing_else(packages: tuple[Path, Path]) -> None:
    wheel, sdist = packages
    source = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    copied = {
        f"lookback/template/shared/{path.relative_to(ROOT).as_posix()}"
        for name in SHARED
        for path in ([ROOT / name] if (ROOT / name).is_file() else (ROOT / name).iterdir())
    }
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == source | copied
    with tarfile.open(sdist) as archive:
        there = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{name}" for name in source} | {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml"} <= there


def test_a_wheel_made_of_the_sdist_is_the_same(packages: tuple[Path, Path]) -> None:
    assert TOOL["compare"](*packages) == []


def test_the_wheel_checks_a_rule_without_spark(packages: tuple[Path, Path], tmp_path: Path) -> None:
    zipfile.ZipFile(packages[0]).extractall(tmp_path)
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), str(ROOT / "conf/rules/customer-day-spend.yml")]
    done = subprocess.run(command, cwd=ROOT, env={"PATH": ""}, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "is valid" in done.stdout


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_do_little_and_its_actions_are_pinned(workflow: Path) -> None:
    text = workflow.read_text(encoding="utf-8")
    document = yaml.safe_load(text)
    assert document["permissions"] == {}
    assert all(job["timeout-minutes"] and job["permissions"] for job in document["jobs"].values())
    uses = re.findall(r"uses: (.*)", text)
    assert uses
    assert [line for line in uses if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)] == []


def test_ci_runs_the_parts_on_the_pythons_that_are_declared() -> None:
    matrix = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["parts"]["strategy"]["matrix"]
    parts = {*matrix["part"], *(each["part"] for each in matrix["include"])}
    assert parts == set(re.findall(r"^run_(\w+)\(\)", CI, re.MULTILINE))
    versions = re.findall(r"Python :: (3\.\d+)\"", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert matrix["python"] == versions


def test_a_part_that_is_unknown_is_refused() -> None:
    done = subprocess.run([ROOT / ".ci/run", "chek"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "chek is not a part; use check, test" in done.stderr
