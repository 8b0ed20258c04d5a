"""What the repository promises about itself: pins, the bundle's paths, notebooks without outputs, text without machines."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
JOBS = sorted((ROOT / "conf" / "jobs").glob("*.yml"))
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


def parameter_names(notebook: Path) -> set[str]:
    """The names that the cell tagged `parameters` assigns."""
    cells = json.loads(notebook.read_text())["cells"]
    tagged = [cell for cell in cells if "parameters" in cell.get("metadata", {}).get("tags", [])]
    assert len(tagged) == 1, f"{notebook.name} needs one cell tagged parameters"
    return set(re.findall(r"^(\w+)\s*(?::[^=]+)?=", "".join(tagged[0]["source"]), re.MULTILINE))


def notebook_tasks() -> list[tuple[str, dict[str, object], dict[str, object]]]:
    """(file, job, task) of every task that runs a notebook."""
    return [
        (path.name, job, task)
        for path in JOBS
        for job in yaml.safe_load(path.read_text())["resources"]["jobs"].values()
        for task in job["tasks"]
        if "notebook_task" in task
    ]


def test_lock_has_one_exact_version_of_everything_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = dict(project["optional-dependencies"])
    # Engines to compare with, and a fuzzer, are large and not for everybody: pinned where they are declared.
    assert all("==" in requirement for extra in ("bench", "fuzz") for requirement in extras.pop(extra))
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


def test_bundle_gives_values_in_targets_alone() -> None:
    bundle = yaml.safe_load((ROOT / "databricks.yml").read_text())
    assert bundle["bundle"]["name"] == "lookback"
    for name, variable in bundle["variables"].items():
        assert set(variable) == {"description"}, name
    assert list(bundle["targets"]) == ["dev", "staging", "prod"]
    for name, target in bundle["targets"].items():
        assert set(target["variables"]) <= set(bundle["variables"]), name


def test_bundle_uses_every_variable_that_it_declares_and_no_other() -> None:
    texts = [path.read_text() for path in (ROOT / "databricks.yml", *JOBS)]
    used = {name for text in texts for name in re.findall(r"\$\{var\.(\w+)\}", text)}
    assert used == set(yaml.safe_load(texts[0])["variables"])


def test_bundle_includes_the_jobs() -> None:
    bundle = yaml.safe_load((ROOT / "databricks.yml").read_text())
    included = {path for pattern in bundle["include"] for path in ROOT.glob(pattern)}
    assert included == set(JOBS)
    names = [name for path in JOBS for name in yaml.safe_load(path.read_text())["resources"]["jobs"]]
    assert sorted(names) == sorted(set(names)) == ["evaluate", "evaluate_once", "ingest"]


def test_notebooks_of_jobs_exist() -> None:
    missing = {
        task["notebook_task"]["notebook_path"]
        for _, _, task in notebook_tasks()
        if not (ROOT / "conf" / "jobs" / task["notebook_task"]["notebook_path"]).resolve().is_file()
    }
    assert not missing


def test_parameters_go_one_way_from_job_to_notebook() -> None:
    for file, job, task in notebook_tasks():
        passed = task["notebook_task"]["base_parameters"]
        declared_by_job = {parameter["name"] for parameter in job["parameters"]}
        assert passed == {name: f"{{{{job.parameters.{name}}}}}" for name in declared_by_job}, file
        notebook = (ROOT / "conf" / "jobs" / task["notebook_task"]["notebook_path"]).resolve()
        assert declared_by_job <= parameter_names(notebook), f"{file} passes what {notebook.name} does not declare"


def test_notebooks_are_the_four() -> None:
    assert [path.name for path in NOTEBOOKS] == [
        "01_ingest.ipynb",
        "02_author_rules.ipynb",
        "03_evaluate_stream.ipynb",
        "04_review_alerts.ipynb",
    ]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_has_no_outputs(notebook: Path) -> None:
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    assert cells
    for number, cell in enumerate(cells, 1):
        assert not cell["outputs"], f"cell {number} has outputs; make fix strips them"
        assert cell["execution_count"] is None, f"cell {number} has a count; make fix strips it"


def test_changelog_says_for_every_entry_what_becomes_of_the_state() -> None:
    entries = re.split(r"^- ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]
    assert entries
    for entry in entries:
        assert re.search(r"\bstate (kept|reset)\b", entry, re.IGNORECASE), entry


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
