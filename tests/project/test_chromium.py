"""Without a browser `make test-browser` says how this machine gets one."""

from __future__ import annotations

from pathlib import Path

import chromium
import pytest


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, in which alone programs are looked for."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("LOOKBACK_CHROMIUM", raising=False)
    monkeypatch.setattr(chromium, "_APPLICATIONS", ())
    return tmp_path


def add(folder: Path, name: str) -> Path:
    program = folder / name
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return program


@pytest.mark.parametrize(
    ("installer", "command"),
    [
        ("apt-get", "sudo apt-get install chromium"),
        ("dnf", "sudo dnf install chromium"),
        ("brew", "brew install --cask chromium"),
        ("none", "install the package `chromium` of your system"),
    ],
)
def test_message_names_the_package(programs: Path, capsys: pytest.CaptureFixture[str], installer: str, command: str):
    add(programs, installer)
    assert chromium.main() == 1
    assert capsys.readouterr().err.startswith(f"No Chromium was found: {command}.")


def test_one_on_the_path_is_taken_and_a_chosen_one_before_it(programs: Path, monkeypatch: pytest.MonkeyPatch):
    on_path, chosen = add(programs, "google-chrome"), add(programs, "other")
    assert chromium.find_chromium() == on_path
    monkeypatch.setenv("LOOKBACK_CHROMIUM", str(chosen))
    assert chromium.find_chromium() == chosen
    monkeypatch.setenv("LOOKBACK_CHROMIUM", str(programs / "none"))
    with pytest.raises(chromium.NoChromium, match=r"LOOKBACK_CHROMIUM is .*, which is no program"):
        chromium.find_chromium()
