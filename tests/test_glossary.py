"""docs/glossary.md has every word of the engine once, and the guides use it and not another one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lookback.core.rules.document import KEYS_OF_KIND, SEQUENCE_KEYS, STATUSES
from lookback.spark.tables.schemas import ALERTS, REVIEWS

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
GLOSSARY = (DOCS / "glossary.md").read_text(encoding="utf-8")
# A page on other engines says what they say; one on threats speaks of SQL and of grants.
GUIDES = {
    name: (DOCS / f"{name}.md") for name in ("rule-guide", "how-time-works", "health", "operations", "troubleshooting")
}
PAGES = {path.stem: path for path in (ROOT / "README.md", *DOCS.glob("*.md")) if path.stem != "glossary"}
# Words of everyday as well, or of commands: where one is first used in our sense no program can tell.
EVERYDAY = re.findall(
    r"\w+",
    "condition document event feature key list lookback page report review rule step suppress until version within",
)
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in GLOSSARY.splitlines()
    if line.startswith("| <a id=")
]
# Anchor -> word.
WORDS = {match[1]: match[2] for row in ROWS if (match := re.fullmatch(r'<a id="([\w-]+)"></a>(.+)', row[0]))}
OTHERS = sorted({other.strip() for row in ROWS for other in row[2].split(",") if other.strip()})
OURS = re.findall(
    r"\w+",
    """
rule document version status stream event arrival group_by key feature measure condition lookback tumbling sliding session
sequence step within until watermark late shard page alert verdict revision review disposition backtest replay
""",
)


def prose(text: str) -> str:
    """Returns a page's sentences: no blocks, tables, headings; in code marks only words of ours."""
    text = re.sub(r"^\s*```.*?^\s*```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^(?:\||#).*$", "", text, flags=re.MULTILINE)
    return re.sub(r"``.+?``|`([^`]*)`", lambda code: code[1] if code[1] in WORDS.values() else "``", text)


def uses(word: str, text: str) -> list[re.Match[str]]:
    """Finds a word in a text, in the plural as well; not within the address of a link."""
    spaced = re.escape(word).replace("\\ ", r"\s+")
    return list(re.finditer(rf"(?<![\w#/(.-])(?:{spaced})(?:e?s)?(?![\w-]|\.md)", text, re.IGNORECASE))


def test_every_word_of_the_engine_is_there() -> None:
    words = set(WORDS.values())
    assert len(WORDS) == len(ROWS), "each row begins with an anchor and the word"
    assert {*OURS, "allowed lateness", *KEYS_OF_KIND, *set(SEQUENCE_KEYS) - {"steps", "expiry"}} <= words
    assert len(words) == len(ROWS), "one meaning a word"
    assert [anchor for anchor, word in WORDS.items() if anchor != word.replace(" ", "-")] == []


def test_meanings_are_those_of_the_tables() -> None:
    meanings = {row[0].rpartition(">")[2]: row[1] for row in ROWS}
    assert meanings["verdict"] == ALERTS["verdict"].metadata["comment"]
    assert meanings["disposition"] == REVIEWS["disposition"].metadata["comment"]
    assert all(status in meanings["status"] for status in STATUSES)


@pytest.mark.parametrize("anchor", WORDS)
def test_word_is_linked_where_a_guide_uses_it_first(anchor: str) -> None:
    linked = 0
    for name, path in PAGES.items():
        text = prose(path.read_text(encoding="utf-8"))
        links = list(re.finditer(rf"\[([^\]]+)\]\((?:docs/)?glossary\.md#{anchor}\)", text))
        linked += len(links)
        assert len(links) <= 1, f"{name} links it twice"
        if links and anchor not in EVERYDAY:
            (first, *_) = uses(WORDS[anchor], text)
            assert links[0].start() < first.start() < links[0].end(), (
                f"{name}: {text[first.start() - 60 : first.end()]}"
            )
    assert linked, "no page links it"


@pytest.mark.parametrize("name", GUIDES)
def test_guide_uses_no_other_words(name: str) -> None:
    text = prose(GUIDES[name].read_text(encoding="utf-8"))
    assert [other for other in OTHERS if uses(other, text)] == []
