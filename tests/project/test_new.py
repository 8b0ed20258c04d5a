"""`lookback new`: a repository of a team's own, made of the files of this one."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from lookback.cli import _make_parser, main
from lookback.config import Settings
from lookback.core.errors import SetupError
from lookback.project import SHARED, make_project

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
RELEASE = f"lookback-rules=={version('lookback-rules')}"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("new") / "rules of ours"
    make_project(folder)
    return folder


def load(file: Path) -> Any:
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def test_the_first_steps_work(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    rules = sorted(map(str, Path("conf/rules").glob("*.yml")))
    assert main(["rules", "check", *rules]) == 0
    said = capsys.readouterr().out
    assert len(re.findall(r"is valid \([1-9]\d* tests\)", said)) == len(rules) == 2
    assert main(["stream", "list", "--json"]) == 0
    (stream,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert stream["stream"] == "payments"
    assert Path(Settings.local().streams()["payments"].source["path"]).is_file()
    asked = {name for rule in rules for name in re.findall(r"in_list\(\w+, '([\w-]+)'\)", Path(rule).read_text())}
    assert asked == {file.stem for file in Path("conf/lists").glob("*.csv")} == {"mule-accounts"}


def test_the_commands_of_the_readme_are_those_that_there_are(project: Path) -> None:
    text = (project / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 40
    commands = re.findall(r"^lookback (.*)$", text, re.MULTILINE) + re.findall(r"`lookback (stream .*?)`", text)
    assert len(commands) == 8
    for command in commands:
        _make_parser().parse_args(shlex.split(command))


def test_the_bundle_is_ours_with_the_published_wheel(project: Path) -> None:
    ours, made = load(ROOT / "databricks.yml"), load(project / "databricks.yml")
    assert made.keys() == ours.keys() - {"artifacts"}
    assert made["variables"] == ours["variables"]
    assert {name: target["variables"].keys() for name, target in made["targets"].items()} == {
        name: target["variables"].keys() for name, target in ours["targets"].items()
    }
    assert {target["variables"]["stream"] for target in made["targets"].values()} == {"payments"}
    assert made["sync"] == {"exclude": ["conf/dashboards/**"]}
    for file in sorted((ROOT / "conf/jobs").glob("*.yml")):
        own, other = load(project / "conf/jobs" / file.name), load(file)
        text = json.dumps(other)
        text = text.replace('{"whl": "../../dist/*.whl"}', json.dumps({"pypi": {"package": RELEASE}}))
        assert own == json.loads(text.replace("../../dist/*.whl", RELEASE)), file.name
        for notebook in re.findall(r"\.\./\.\./(notebooks/\w+\.ipynb)", file.read_text(encoding="utf-8")):
            assert (project / notebook).is_file()
    texts = {file: file.read_text(encoding="utf-8") for file in project.rglob("*") if file.is_file()}
    assert [file.name for file, text in texts.items() if "dist/*" in text or "transactions" in text] == []
    assert [file.name for file, text in texts.items() if "VERSION" in text] == []
    for file in project.glob("notebooks/*.ipynb"):
        json.loads(texts[file])


def test_ci_checks_the_rules_and_its_actions_are_those_of_this_repository(project: Path) -> None:
    workflow = project / ".github/workflows/rules.yml"
    text = workflow.read_text(encoding="utf-8")
    document = load(workflow)
    assert document["permissions"] == {}
    assert [step.get("run") for step in document["jobs"]["check"]["steps"]][2:] == [
        f"pip install {RELEASE}", "lookback rules check conf/rules",
    ]  # fmt: skip
    ours = "".join(file.read_text(encoding="utf-8") for file in (ROOT / ".github/workflows").glob("*.yml"))
    assert set(re.findall(r"uses: (.*)", text)) <= set(re.findall(r"uses: (.*)", ours))
    if linter := shutil.which("actionlint"):
        done = subprocess.run([linter, str(workflow)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_the_containers_name_what_is_there(project: Path) -> None:
    """Nothing is built here: only what the files say is checked."""
    container = json.loads((project / ".devcontainer/devcontainer.json").read_text(encoding="utf-8"))
    assert (project / ".devcontainer" / container["build"]["dockerfile"]).resolve() == project.resolve() / "Dockerfile"
    text = (project / "Dockerfile").read_text(encoding="utf-8")
    sources = re.findall(r"^COPY (?:--\S+ )?(\S+)", text, re.MULTILINE)
    assert all((project / source).exists() for source in sources)
    assert sources == ["requirements.txt", "conf"]
    assert (project / "requirements.txt").read_text() == RELEASE.replace("==", "[local]==") + "\n"


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    for folder in (tmp_path, tmp_path / "mine"):
        with pytest.raises(SetupError, match="is not an empty folder; name a new one"):
            make_project(folder)
    with pytest.raises(SetupError, match="cannot be written"):
        make_project(tmp_path / "mine" / "below")
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]
    assert main(["new", str(tmp_path)]) == 2


def test_the_wheel_has_what_is_copied() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]["targets"]
    assert build["wheel"]["force-include"] == {name: f"lookback/template/shared/{name}" for name in SHARED}
    assert {f"/{name}" for name in SHARED} <= set(build["sdist"]["include"])
