"""The site: every page has its place, none is long, and nothing is fetched, neither by the build nor by a browser."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
MKDOCS = ROOT / ".venv/site/bin/mkdocs"
# Pages of the repository itself, which dev/tools/site.py adds.
PROJECT = {"contributing.md", "changelog.md", "security.md"}
FOLDERS = {"Tutorial": "tutorial", "How-to guides": "how-to", "Reference": "reference", "Explanation": "explanation"}
# Addresses that messages and other projects use.
FIXED = {"bring-your-rules.md", "contract.md", "index.md", "operations.md", "rule-guide.md", "sizing.md", "streams.md"}


def pages_of(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for each in nav.values() if isinstance(nav, dict) else nav:
            yield from pages_of(each)


def test_every_page_has_one_place() -> None:
    listed = list(pages_of(SITE["nav"]))
    assert sorted(listed) == sorted({*(page.relative_to(DOCS).as_posix() for page in PAGES), *PROJECT})


def test_each_kind_of_page_has_its_folder() -> None:
    for part in SITE["nav"]:
        for title, nav in part.items():
            if title in FOLDERS:
                assert {page.partition("/")[0] for page in pages_of(nav)} - FIXED == {FOLDERS[title]}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_page_is_short_and_has_a_title(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# ")
    assert len(lines) <= 400 or page.name == "contract.md", "the contract keeps its clauses together"
    fenced = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    long = [line for line in fenced.splitlines() if len(line) > 120 and not line.lstrip().startswith("|")]
    assert long == [] or page.name == "contract.md"


def test_a_warning_is_an_error_and_nothing_is_fetched() -> None:
    assert SITE["strict"] is True
    assert SITE["theme"]["font"] is False
    assert [each if isinstance(each, str) else next(iter(each)) for each in SITE["plugins"]] == [
        "search",
        "mkdocstrings",
    ]


@pytest.mark.long
@pytest.mark.skipif(not MKDOCS.exists(), reason="make docs has not been run")
def test_site_is_built_without_a_warning(tmp_path: Path) -> None:
    command = [str(MKDOCS), "build", "--quiet", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert built.returncode == 0, built.stderr
    page = (tmp_path / "reference/api/engine.html").read_text(encoding="utf-8")
    assert 'id="lookback.testing.harness.Harness.events"' in page
    loaded = r'(?:<(?:script|img|iframe)[^>]* src|<link rel="(?:stylesheet|preconnect)"[^>]* href)="(https?:[^"]*)"'
    assert {
        where for each in tmp_path.rglob("*.html") for where in re.findall(loaded, each.read_text("utf-8"))
    } == set()
    assert (tmp_path / "search/search_index.json").stat().st_size > 100_000


def test_llms_txt_names_every_page_of_the_site() -> None:
    """For programs that read the site: its pages by kind, in the order of the navigation."""

    def lines(nav: Any, title: str = "") -> Iterator[str]:
        if isinstance(nav, str):
            # The overview of a part has no title of its own.
            named = title or next(line[2:] for line in (DOCS / nav).read_text("utf-8").splitlines() if line)
            yield f"- [{named}]({nav.removesuffix('.md')}.html)"
        elif isinstance(nav, dict):
            for name, each in nav.items():
                yield from lines(each, name)
        else:
            for each in nav:
                yield from lines(each)

    parts = []
    for part in SITE["nav"]:
        ((title, nav),) = part.items()
        parts.append("\n".join([f"## {title}\n", *lines(nav, title if isinstance(nav, str) else "")]) + "\n")
    begin = f"# {SITE['site_name']}\n\n> {SITE['site_description']}\n"
    expected = "\n".join([begin, *parts])
    assert (DOCS / "llms.txt").read_text(encoding="utf-8") == expected
