"""Every message that docs/reference/messages explains is one of the code.

A text of the code is compared with its placeholders as `…`; a quote is such a text, or the beginning of one.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from lookback.core.operations.thresholds import THRESHOLDS
from lookback.core.rules.commands import COMMANDS
from lookback.core.rules.rulelog import ACTIONS

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "lookback"
PAGES = sorted((ROOT / "docs" / "reference" / "messages").glob("*.md"))
PAGE = "".join(path.read_text(encoding="utf-8") for path in PAGES)
ANY = "…"


def written(node: ast.AST) -> str:
    """The text that an expression makes, with ANY for what is known only when it runs."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[sd]", ANY, node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(written, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return written(node.left) + written(node.right)
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("F.lit", "F.concat", "name_limit"):
        texts = node.args[:1] if ast.unparse(node.func) == "name_limit" else node.args
        return "".join(map(written, texts))
    return ANY


@functools.cache
def plain(text: str) -> str:
    """The text in one line; `'…'` as `…`, since a value is quoted here and not there."""
    text = re.sub(r"\s+", " ", text.replace("`", "").replace(f"'{ANY}'", ANY))
    return re.sub(rf"{ANY}(?: ?{ANY})*", ANY, text).strip()


def is_said(text: str) -> bool:
    """Returns whether it has a word of its own; else it is made of texts that stand elsewhere."""
    return re.search(r"[A-Za-z]{3}", text) is not None


@functools.cache
def files() -> dict[str, ast.Module]:
    paths = sorted(SOURCE.rglob("*.py"))
    return {path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


@functools.cache
def texts() -> frozenset[str]:
    """Every text that stands anywhere in the code."""
    found = {plain(written(node)) for tree in files().values() for node in ast.walk(tree)}
    return frozenset(text for text in found if is_said(text))


def quotes() -> list[str]:
    """The first cell of each row of the tables of messages."""
    found = []
    for table in re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE):
        head, _, *rows = table.splitlines()
        if head.startswith("| Message "):
            cells = [re.split(r"(?<!\\)\|", row)[1].strip() for row in rows]
            found += [cell.replace("\\|", "|") for cell in cells]
    return found


QUOTES = quotes()


def column(title: str) -> list[str]:
    """The names in the first column of the table that begins with this title."""
    (table,) = re.findall(rf"^\| {title} \|.*\n\|.*\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    return [name for row in table.splitlines() for name in re.findall(r"`([^`]+)`", row.split("|")[1])]


@pytest.mark.parametrize("quote", QUOTES)
def test_message_of_the_page_is_one_of_the_code(quote: str) -> None:
    assert quote.startswith("`"), "a message stands in code marks"
    assert quote.endswith("`"), "a message stands in code marks"
    assert any(text.startswith(plain(quote)) for text in texts())


def test_every_message_is_there_once() -> None:
    assert len(QUOTES) == len(set(QUOTES))


def test_actions_of_the_rule_log_are_those_of_the_code() -> None:
    noted = {
        written(argument)
        for tree in files().values()
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] in ("write", "LogRow", "add_note")
        for argument in call.args[:4]
    }
    names = {name for name in noted if re.fullmatch(r"[a-z]+(_[a-z]+)*", name)}
    assert set(column("Action")) == names | set(ACTIONS.values()) | set(COMMANDS)


def test_findings_are_left_to_the_page_on_health() -> None:
    assert "(../health.md#what-is-found)" in PAGE
    assert not any(f"| `{name}` |" in PAGE for name in THRESHOLDS)


def test_a_text_is_read_as_it_will_be_said() -> None:
    code = "SetupError(f\"{file}: {name!r} has {n:,} rows\" + more + 'of `x`')"
    call = ast.parse(code, mode="eval").body
    assert isinstance(call, ast.Call)
    assert plain(written(call.args[0])) == "…: … has … rows…of x"
    assert plain("`…: '…' is not …`") == "…: … is not …"
