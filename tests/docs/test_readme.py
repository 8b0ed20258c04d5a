"""Runs what the README shows."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest
import yaml

from lookback.cli import _make_parser
from lookback.config import load_streams
from lookback.testing.rule_tests import check_rule

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("text", blocks("yaml"))
def test_rule_is_the_one_that_ships(text: str) -> None:
    rule = yaml.safe_load(text)
    check_rule(rule, load_streams(ROOT / "conf"))
    shipped = yaml.safe_load((ROOT / "conf/rules" / f"{rule['rule_id']}.yml").read_text(encoding="utf-8"))
    assert rule.items() <= shipped.items()


def test_first_screen_is_short() -> None:
    assert len(README.splitlines()) <= 120
    assert max(len(line) for line in README.splitlines() if not line.startswith("|")) <= 120


def test_figure_is_the_one_that_was_measured() -> None:
    results = (ROOT / "dev/bench/results.md").read_text(encoding="utf-8")
    median, highest = (
        int(re.findall(rf"^\| latency at 1,000 events/s, {each} \|[^|]*\| (\d+) \|", results, re.MULTILINE)[0])
        for each in ("p50", "p99")
    )
    said = [float(number) * 1000 for number in re.findall(r"([\d.]+) s\b", README.partition("## A rule")[0])]
    assert [number - measured for number, measured in zip(said, (median, highest), strict=True)] == [
        pytest.approx(0, abs=10)
    ] * 2


def test_commands_are_those_of_the_command_line() -> None:
    commands = [
        shlex.split(line, comments=True)[1:] for line in README.splitlines() if line.startswith(".venv/bin/lookback ")
    ]
    assert commands
    for command in commands:
        _make_parser().parse_args(command)


def list_drawn() -> set[str]:
    return {f"{name}.png" for name in runpy.run_path(str(ROOT / "dev/tools/pictures.py"))["NOTEBOOKS"]}


def test_pictures_of_the_notebooks_are_those_that_make_pictures_draws() -> None:
    drawn = list_drawn()
    page = (ROOT / "docs/how-to/notebooks.md").read_text(encoding="utf-8")
    shown = re.findall(r"\[!\[[^\]]+\]\(\.\./pictures/([^)]+)\)\]\(\.\./\.\./notebooks/([^)]+)\)", page)
    assert {picture for picture, _ in shown} == drawn
    assert len(shown) == len(drawn)
    for picture, notebook in shown:
        assert (ROOT / "notebooks" / notebook).is_file()
        assert Path(picture).stem == Path(notebook).stem
        content = (ROOT / "docs/pictures" / picture).read_bytes()
        assert content.startswith(b"\x89PNG")
        assert len(content) < 150_000


def test_every_other_picture_is_of_a_desk_and_shown_on_its_page() -> None:
    others = [path for path in (ROOT / "docs/pictures").iterdir() if path.name not in list_drawn()]
    pages = "".join((ROOT / "docs/how-to" / name).read_text(encoding="utf-8") for name in ("review.md", "authoring.md"))
    assert {path.name for path in others} == set(re.findall(r"!\[[^\]]+\]\(\.\./pictures/([^)]+)\)", pages))
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests/browser").glob("test_*.py"))
    for path in others:
        assert f'"{path.stem}"' in tests, "make test-browser PICTURES=docs/pictures draws it"
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size < 150_000
