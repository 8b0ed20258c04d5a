"""Hooks of mkdocs.yml, which make the site read as the repository does.

- A link to a file outside docs leads to a copy of it below `source`, as text.
- CONTRIBUTING, CHANGELOG and SECURITY are pages of the site.
- The words behind a fence that tell tests what a block is (```yaml rule) are taken off.
- Anchors are those that `make check` knows.
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
from links import find_links

ROOT = Path(__file__).resolve().parents[2]
_PROJECT_PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "SECURITY.md": "security.md"}
_PAGES = {"README.md": "index.md", **_PROJECT_PAGES}
_FENCE = re.compile(r"(^```.*?^```[ \t]*$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_FENCE_HEAD = re.compile(r"^(\s*```)(\w+) (?:file (\S+)|[\w -]+)$", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Makes anchors as GitHub does."""
    config.mdx_configs["toc"] = {**config.mdx_configs.get("toc", {}), "slugify": _slugify}
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the project's pages, and every file to which a page leads."""
    for name, page in _PROJECT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    pages = [ROOT / name for name in _PROJECT_PAGES] + [
        Path(config.docs_dir) / file.src_uri for file in files.documentation_pages() if file.abs_src_path
    ]
    for path in sorted({path for page in pages for path in _list_sources(page)}):
        if (ROOT / path).is_dir():
            names = sorted(each.name for each in (ROOT / path).iterdir() if each.is_file())
            files.append(
                File.generated(config, _copy(path), content=f"{path}\n\n" + "".join(f"{name}\n" for name in names))
            )
        else:
            files.append(File.generated(config, _copy(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrites the links that leave docs, and the heads of fences."""
    parts = _FENCE.split(markdown)
    source = next(
        (name for name, known in _PROJECT_PAGES.items() if known == page.file.src_uri), f"docs/{page.file.src_uri}"
    )
    for at, part in enumerate(parts):
        parts[at] = _FENCE_HEAD.sub(_name_file, part) if at % 2 else _LINK.sub(lambda link: _lead(link, source), part)
    return "".join(parts)


def _list_sources(page: Path) -> Iterator[str]:
    """Yields the files and folders of the repository, not pages of the site, to which a page leads."""
    name = page.relative_to(ROOT).as_posix()
    for link in find_links(page):
        path = link.target.partition("#")[0]
        if path and not link.is_external:
            target = posixpath.normpath(posixpath.join(posixpath.dirname(name), path))
            if not target.startswith("docs/") and target not in _PAGES:
                yield target


def _copy(path: str) -> str:
    """Returns where the site has a file of the repository: a .txt, which browsers show; without a dot, which is hidden."""
    return f"source/{path.lstrip('.')}.txt"


def _lead(link: re.Match[str], source: str) -> str:
    path, mark, anchor = link[2].partition("#")
    if not path or re.match(r"[a-z][a-z0-9+.-]*:", path):
        return link[0]
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    here = posixpath.dirname(source.removeprefix("docs/"))
    if target.startswith("docs/"):
        target = target.removeprefix("docs/")
    elif target in _PAGES:
        target = _PAGES[target]
    else:
        target, mark, anchor = _copy(target), "", ""
    return f"{link[1]}{posixpath.relpath(target, here or '.')}{mark}{anchor}{link[3]}"


def _name_file(head: re.Match[str]) -> str:
    return f'{head[1]}{head[2]} title="{head[3]}"' if head[3] else f"{head[1]}{head[2]}"


def _slugify(text: str, separator: str) -> str:
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", separator)
