"""Checks the links of all pages and notebooks: those within the repository, and with --external those to the outside.

`make check` and the tests check the first kind, without a network. `make links` also checks every outside address. The
exit code is 0 if all lead somewhere, 1 if some do not, 3 if there is no network, as then nothing was checked.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parents[2]
FINE, BROKEN, UNKNOWN = 0, 1, 3
_SECONDS = 20
_FENCE = re.compile(r"^(```+|~~~+).*?^\1[ \t]*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)", re.DOTALL)
_REFERENCE = re.compile(r"^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)
_BARE = re.compile(r"(?<![(<\"'`\w])https?://[^\s<>)\"'`]+")
_SOURCE = re.compile(r"<(?:img|a)\b[^>]*?\b(?:src|href)=\"([^\"]+)\"")
# A server with one of these codes answers, but not to programs: the address exists.
_EXISTING_CODES = {401, 403, 405, 406, 429}


class Link(NamedTuple):
    """A link as it is written. page: the file that has it."""

    page: Path
    target: str

    @property
    def is_external(self) -> bool:
        """True if it leads out of the repository."""
        return re.match(r"[a-z][a-z0-9+.-]*:", self.target, re.IGNORECASE) is not None


def list_pages(root: Path = ROOT) -> list[Path]:
    """Lists all pages (.md) and notebooks (.ipynb) that are, or are about to be, in version control."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", "*.md", "*.ipynb"]
    listed = subprocess.run(command, cwd=root, capture_output=True, check=True, text=True)  # noqa: S603
    return [root / name for name in sorted(set(listed.stdout.split("\0")) - {""}) if (root / name).is_file()]


def read_prose(page: Path) -> str:
    """Reads a page without its code blocks; of a notebook the Markdown cells."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return _FENCE.sub("", text)


def find_links(page: Path) -> Iterator[Link]:
    """Finds every link of a page, except in code marks."""
    text = re.sub(r"`[^`\n]*`", "``", read_prose(page))
    for pattern in (_LINK, _REFERENCE, _BARE, _SOURCE):
        for match in pattern.finditer(text):
            yield Link(page, match[match.lastindex or 0].rstrip(".,;:"))


def find_anchors(page: Path) -> set[str]:
    """Finds the anchors of a page's headings, as the usual viewers make them; a second one of a name ends in -1."""
    counts: dict[str, int] = {}
    for heading in re.findall(r"^#+\s+(.*?)\s*#*$", read_prose(page), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        name = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        counts[name] = counts.get(name, -1) + 1
        if counts[name]:
            counts[f"{name}-{counts[name]}"] = 0
    return {*counts, *re.findall(r"<a (?:id|name)=\"([^\"]+)\"", read_prose(page))}


def find_problem(link: Link, root: Path = ROOT) -> str | None:
    """Says why a link within the repository leads nowhere; None if it does lead somewhere."""
    path, _, anchor = link.target.partition("#")
    target = (link.page.parent / unquote(path)).resolve() if path else link.page
    if not target.is_relative_to(root.resolve()):
        return "leads out of the repository"
    if not target.exists():
        return "is not there"
    if anchor and target.suffix == ".md" and anchor not in find_anchors(target):
        return f"has no heading #{anchor}; there are {', '.join(sorted(find_anchors(target)))}"
    return None


def check_address(address: str) -> str | None:
    """Says why an address does not answer; None if it does. Raises OSError if there is no network."""
    request = urllib.request.Request(address, headers={"User-Agent": "lookback-links"})  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS):  # noqa: S310 - only http and https get here
            return None
    except urllib.error.HTTPError as error:
        return None if error.code in _EXISTING_CODES else f"answers {error.code} {error.reason}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks all links and prints those that lead nowhere. Returns 0, 1 or 3."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--external", action="store_true", help="check outside addresses, too")
    parser.add_argument("--root", type=Path, default=ROOT)
    options = parser.parse_args(arguments)
    links = [link for page in list_pages(options.root) for link in find_links(page)]
    inside = [link for link in links if not link.is_external]
    wrong = {link: reason for link in inside if (reason := find_problem(link, options.root))}
    print(f"{len(inside)} links within the repository: {len(wrong)} lead nowhere")
    code = BROKEN if wrong else FINE
    if options.external:
        unreached = _check_all({link.target: link for link in links if link.target.startswith("http")}, wrong)
        code = BROKEN if wrong else UNKNOWN if unreached else FINE
    for link, reason in wrong.items():
        print(f"{link.page.relative_to(options.root)}: {link.target} {reason}")
    return code


def _check_all(addresses: Mapping[str, Link], wrong: dict[Link, str]) -> list[str]:
    """Checks every address. Adds those that do not exist to `wrong`, and returns those that could not be reached."""
    unreached, reason_unreached = [], ""
    for address, link in sorted(addresses.items()):
        try:
            if reason := check_address(address):
                wrong[link] = reason
        except OSError as error:  # noqa: PERF203 - each is checked, whatever the result of the one before
            unreached.append(address)
            reason_unreached = str(error)
    print(f"{len(addresses)} addresses outside: {len(addresses) - len(unreached)} answered")
    if unreached:
        print(
            f"{', '.join(unreached)}: not reached ({reason_unreached}), so nothing is known of them. "
            "Run it again with a network: make links"
        )
    return unreached


if __name__ == "__main__":
    sys.exit(main())
