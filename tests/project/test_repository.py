"""The repository's promises about itself: pins, notebooks without outputs, text without machines."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# In pieces, so that this file may be searched as well.
FORBIDDEN = re.compile(
    "|".join(
        [
            r"\bpypi\." + "org",
            "pythonhosted" + r"\.org",
            r"\brepo\d?\.maven\." + r"(org|apache\.org)",
            r"\b\w*maven" + r"\.org",
            r"(?<![\w.}])/(root|work|home)" + "/",
            r"/tmp" + "/w",
            r"/Users" + r"/\w+/(?!\.bundle)",
        ]
    )
)


def tracked_files() -> list[Path]:
    """Files that are, or are about to be, in version control."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True, text=True,
    )  # fmt: skip
    return [ROOT / name for name in sorted(set(listed.stdout.split("\0")) - {""}) if (ROOT / name).is_file()]


def locked_versions() -> dict[str, set[str]]:
    """name -> versions; more than one where markers tell platforms apart."""
    versions: dict[str, set[str]] = {}
    for line in (ROOT / "requirements.lock").read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            requirement = Requirement(line)
            (pin,) = requirement.specifier
            assert pin.operator == "==", line
            versions.setdefault(canonical(requirement.name), set()).add(pin.version)
    return versions


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_lock_has_one_exact_version_of_everything_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = dict(project["optional-dependencies"])
    # Engines to compare with, a fuzzer and JupyterLab are large and not for everybody: pinned where they are declared.
    assert all("==" in requirement for extra in ("bench", "browser", "fuzz") for requirement in extras.pop(extra))
    declared = [*project["dependencies"], *(requirement for extra in extras.values() for requirement in extra)]
    locked = locked_versions()
    for requirement in map(Requirement, declared):
        versions = locked.get(canonical(requirement.name), set())
        assert versions, f"{requirement} is not in requirements.lock"
        for version in versions:
            assert requirement.specifier.contains(version), f"requirements.lock has {requirement.name} {version}"


def test_spark_and_delta_are_pinned() -> None:
    locked = locked_versions()
    assert (locked["pyspark"], locked["delta-spark"]) == ({"4.2.0"}, {"4.4.0"})


def test_lock_names_no_index() -> None:
    assert not re.search(r"://|--(extra-)?index|--find-links|^-e|file:", (ROOT / "requirements.lock").read_text(), re.M)


def test_notebooks_are_those_that_are_documented() -> None:
    assert [path.name for path in NOTEBOOKS] == [
        "00_set_up.ipynb",
        "01_ingest.ipynb",
        "02_author_rules.ipynb",
        "02a_backtest_rules.ipynb",
        "02b_change_lists.ipynb",
        "03_evaluate_stream.ipynb",
        "04_review_alerts.ipynb",
        "04a_measure_rules.ipynb",
        "04b_explain_or_snooze.ipynb",
        "05_maintain.ipynb",
        "06_notify.ipynb",
        "07_forget.ipynb",
        "08_prove.ipynb",
    ]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_has_no_outputs(notebook: Path) -> None:
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    assert cells
    for number, cell in enumerate(cells, 1):
        assert not cell["outputs"], f"cell {number} has outputs; make fix strips them"
        assert cell["execution_count"] is None, f"cell {number} has a count; make fix strips it"


def test_text_names_no_registry_and_no_machine() -> None:
    found = []
    for path in tracked_files():
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        name = path.relative_to(ROOT)
        found += [
            f"{name}:{number}: {line.strip()[:100]}" for number, line in enumerate(lines, 1) if FORBIDDEN.search(line)
        ]
    assert not found, "\n".join(found)


def test_the_tests_that_are_run_on_each_runtime_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "dev/tools")
    tool = importlib.import_module("runtimes")
    for tests in (tool._TESTS, tool._BRIEF, tool._BRIEF_HERE, tool._select_tests("4.0")):
        for path in tool._list_paths(tests):
            file, _, name = path.partition("::")
            assert f"def {name}" in (ROOT / file).read_text(encoding="utf-8")


def test_the_tests_that_are_run_on_each_runtime_import_only_what_is_installed_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT / "dev/tools")
    tool = importlib.import_module("runtimes")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [requirement for extra in project["optional-dependencies"].values() for requirement in extra]
    there = set.intersection(
        *({canonical(Requirement(each).name) for each in runtime.packages} for runtime in tool.RUNTIMES.values())
    )
    missing = {canonical(Requirement(each).name) for each in extras} - there
    modules = [
        name
        for name, dists in importlib.metadata.packages_distributions().items()
        if missing & {*map(canonical, dists)}
    ]
    assert "deltalake" in modules
    tests = sorted({Path(path.partition("::")[0]).stem for path in tool._list_paths(tool._TESTS)})
    script = f"import sys; sys.modules.update(dict.fromkeys({modules})); import conftest, {', '.join(tests)}"
    paths = [ROOT / each for each in ("tests/spark", "src", "tests", "tests/support", ".")]
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}, capture_output=True, check=False, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("room", ["core", "spark"])
def test_contributing_lists_the_packages_of_a_room_in_the_order_in_which_they_may_import(room: str) -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [each["layers"] for each in contracts if each["id"] == room]
    table = page.partition(f"| `{room}`, from the top down |")[2].partition("\n\n")[0]
    listed = [re.findall(r"`(\w+)`", line.split("|")[1]) for line in table.splitlines()[2:]]
    assert listed == [layer.split(" | ") for layer in layers]


def test_changelog_has_the_version_of_the_package() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_what_people_are_told_to_install_is_ours() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (project["name"], list(project["scripts"])) == ("lookback-rules", ["lookback"])
    # `lookback` is somebody else's package.
    foreign = re.compile(r"pip install[^`\n]*[\s'\"]lookback(?![\w-])|\blookback\[")
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("src/**/*.py"), *ROOT.glob("conf/**/*.yml")]
    wrong = {path.name: match[0] for path in files if (match := foreign.search(path.read_text(encoding="utf-8")))}
    assert wrong == {}
