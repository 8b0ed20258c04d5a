"""Every link of every page and notebook leads somewhere: no network is asked."""

from __future__ import annotations

import runpy
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
tool = runpy.run_path(str(ROOT / "dev/tools/links.py"))
PAGES = tool["list_pages"]()
FILES = {
    "README.md": "# One\n\n[two](docs/two.md#the-second--part) [one](#one) [gone](gone.md) [deep](docs/two.md#none)\n",
    "docs/two.md": "# Two\n\n## The *second* / part\n\n```sh\n[no](link.md)\n```\n`[no](link.md)` [up](../README.md#one-1) [out](../../x.md)\n",
    "a.ipynb": '{"cells": [{"cell_type": "markdown", "source": ["[here](docs/two.md) ", "[not](b.ipynb)"]}]}',
}


def test_all_pages_are_looked_at() -> None:
    names = {page.relative_to(ROOT).as_posix() for page in PAGES}
    assert {"README.md", "CHANGELOG.md", "docs/reference/measures.md", "notebooks/01_ingest.ipynb"} <= names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    inside = [link for link in tool["find_links"](page) if not link.is_external]
    assert {link.target: reason for link in inside if (reason := tool["find_problem"](link))} == {}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_links_that_lead_nowhere_are_told(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool["main"](["--root", str(tree)]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "8 links within the repository: 5 lead nowhere",
        "README.md: gone.md is not there",
        "README.md: docs/two.md#none has no heading #none; there are the-second--part, two",
        "a.ipynb: b.ipynb is not there",
        "docs/two.md: ../README.md#one-1 has no heading #one-1; there are one",
        "docs/two.md: ../../x.md leads out of the repository",
    ]


class _Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response({"/there": 200, "/shy": 403}.get(self.path, 404))
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def site() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_addresses_are_asked_and_a_missing_network_is_told(
    tree: Path, site: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in FILES:
        (tree / name).unlink()
    page = tree / "page.md"
    page.write_text(f"{site}/there, [shy]({site}/shy).\n")
    assert tool["main"](["--root", str(tree), "--external"]) == 0
    assert "2 addresses outside: 2 answered" in capsys.readouterr().out
    page.write_text(f"[gone]({site}/gone)\n")
    assert tool["main"](["--root", str(tree), "--external"]) == 1
    assert f"page.md: {site}/gone answers 404 Not Found" in capsys.readouterr().out
    # No server has this port.
    page.write_text("http://127.0.0.1:1/x\n")
    assert tool["main"](["--root", str(tree), "--external"]) == 3
    assert "http://127.0.0.1:1/x: not reached" in capsys.readouterr().out
