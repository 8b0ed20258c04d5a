"""A version can be tagged when the changelog, the package and the repository agree, and not before."""

from __future__ import annotations

import runpy
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
tool = runpy.run_path(str(ROOT / "dev/tools/release.py"))
CHANGELOG = """# Changelog

## [Unreleased]

## [0.2.0] - 2026-03-01

### Added

- A thing. State kept.
- Another,
  in two lines. **State reset**: pages have a new layout.

## [0.1.0] - 2026-01-01

- The first. State reset.
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    (tmp_path / ".gitignore").write_text("build/\n")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\nversion = "0.2.0"\n')
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    return tmp_path


def git(tree: Path, *words: str) -> None:
    who = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
    subprocess.run(["git", *who, *words], cwd=tree, check=True, capture_output=True)


def commit(tree: Path) -> None:
    git(tree, "add", "-A")
    git(tree, "commit", "-q", "-m", "x")


def said(tree: Path, capsys: pytest.CaptureFixture[str], version: str = "0.2.0") -> tuple[int, list[str]]:
    code = tool["main"]([version, "--root", str(tree)])
    return code, capsys.readouterr().out.splitlines()


def test_message_of_the_tag_begins_with_what_becomes_of_the_state(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines = said(tree, capsys)
    assert code == 0
    assert lines[:3] == ["Lookback 0.2.0", "", "State reset: start with `lookback evaluate STREAM --rebuild`."]
    assert "- A thing. State kept." in lines
    assert "The first" not in "".join(lines)
    assert (tree / "build/release.txt").read_text().splitlines() == lines
    (tree / "CHANGELOG.md").write_text(CHANGELOG.replace("**State reset**", "State kept"))
    commit(tree)
    assert said(tree, capsys)[1][2] == "State kept: restart on the same checkpoint."


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("## [0.2.0] - 2026-03-01", "## [0.3.0] - 2026-03-01", "CHANGELOG.md has no section '## [0.2.0]"),
        ("## [0.2.0] - 2026-03-01", "## [0.2.0]", "its section needs a day"),
        ("2026-03-01", "2026-02-30", "its section needs a day"),
        ("[Unreleased]\n", "[Unreleased]\n\n- More. State kept.\n", "CHANGELOG.md still has entries under Unreleased"),
        ("- A thing. State kept.", "- A thing.", "an entry says neither 'state kept' nor 'state reset': A thing."),
        ("## [Unreleased]\n\n", "", "CHANGELOG.md must begin with Unreleased"),
        (
            "## [0.1.0]",
            "## [0.10.0]",
            "CHANGELOG.md must begin with Unreleased, then have the versions, the newest first",
        ),
        (
            "## [0.2.0]",
            "## [0.10.0] - 2026-04-01\n\n- New. State kept.\n\n## [0.2.0]",
            "CHANGELOG.md has 0.10.0 above it",
        ),
    ],
)
def test_changelog_that_is_not_ready_is_told(
    tree: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, problem: str
) -> None:
    assert old in CHANGELOG
    (tree / "CHANGELOG.md").write_text(CHANGELOG.replace(old, new))
    commit(tree)
    code, lines = said(tree, capsys)
    assert code == 1
    assert len(lines) == 1
    assert lines[0].startswith(f"0.2.0: {problem}")


def test_package_of_another_version_is_told(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = said(tree, capsys, "0.1.0")
    assert code == 1
    assert "0.1.0: CHANGELOG.md has 0.2.0 above it, which is newer" in lines
    assert "0.1.0: pyproject.toml has version 0.2.0" in lines


def test_repository_that_is_not_ready_is_told(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    git(tree, "tag", "v0.2.0")
    (tree / "new.txt").write_text("x")
    assert said(tree, capsys) == (
        1,
        ["0.2.0: there are changes that are not committed", "0.2.0: the tag v0.2.0 is there already"],
    )


def test_changelog_of_the_repository_can_be_read() -> None:
    sections = tool["read_changelog"]((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    assert next(iter(sections)) == "Unreleased"
    assert all(tool["split_entries"](text) for name, (_, text) in sections.items() if name != "Unreleased")
    assert sum(len(tool["split_entries"](text)) for _, text in sections.values()) > 20
