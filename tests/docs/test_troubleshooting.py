"""docs/troubleshooting.md quotes what the code says, and leaves nothing out that a person meets.

A text of the code is compared with its placeholders as `…`; a quote is such a text, or the beginning of one.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from lookback.core.operations.health import THRESHOLDS
from lookback.core.rules.rulebook import ACTIONS, COMMANDS

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "lookback"
PAGE = ROOT / "docs" / "troubleshooting.md"
ANY = "…"
# What these are made with reaches a person; ExpressionError, RuleError and StreamError name every problem and teach by
# themselves, so the page tells their kinds alone.
TOLD = {
    "SetupError",
    "StateError",
    "RemoteError",
    "ReviewError",
    "EventError",
    "DurationError",
    "TypeNameError",
    "_LOG.warning",
}
# Why a row of `rules` is rejected; the reasons of rejected_events are told by columns and by files, see `_told_by`.
REASONS = {("core/rules/rulebook.py", "Rejected")}
# Of a text that is put together: a piece begins or ends in the middle.
_PIECE = re.compile(r"^['`:;, ]|['` ]$|^[\w…]+$|^… = |^…\.\.\.|[^ ]: ?$")


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


def told() -> Iterator[tuple[str, str]]:
    """(file, text) of everything that a person can be told by way of an error, a warning or a reason."""
    for name, tree in files().items():
        inner = {id(part) for node in ast.walk(tree) if _is_column(node) for part in ast.walk(node) if part is not node}
        for node in ast.walk(tree):
            if id(node) not in inner:
                yield from ((name, text) for each in _told_by(name, node) for text in _texts(each))


def _texts(node: ast.AST) -> Iterator[str]:
    """The text that an expression makes; where that has no word, those of its parts, such as a line for each of several."""
    text = plain(written(node))
    if not is_said(text):
        for part in ast.iter_child_nodes(node):
            yield from _texts(part)
    elif not _PIECE.search(text):
        yield text


def _is_column(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("F.lit", "F.concat")


def _told_by(name: str, node: ast.AST) -> list[ast.expr]:
    """Returns the text that a call or an assignment shows to people."""
    if name == "spark/ingest/fields.py" and isinstance(node, ast.expr) and _is_column(node):
        return [node]
    if name == "spark/ingest/sources.py" and isinstance(node, ast.Assign) and "broken[" in ast.unparse(node.targets[0]):
        return [node.value]
    if isinstance(node, ast.Call) and (ast.unparse(node.func) in TOLD or (name, ast.unparse(node.func)) in REASONS):
        return node.args[:1]
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "succeeds":
        return node.args[1:2]
    return []


TEXTS = sorted({text: name for name, text in told()}.items())


def quotes() -> list[str]:
    """The first cell of each row of the tables of messages."""
    found = []
    for table in re.findall(r"(?:^\|.*\n)+", PAGE.read_text(encoding="utf-8"), re.MULTILINE):
        head, _, *rows = table.splitlines()
        if head.startswith("| Message "):
            cells = [re.split(r"(?<!\\)\|", row)[1].strip() for row in rows]
            found += [cell.replace("\\|", "|") for cell in cells]
    return found


QUOTES = quotes()


def is_quoted(text: str) -> bool:
    return any(text.startswith(plain(quote)) for quote in QUOTES)


def column(title: str) -> list[str]:
    """The names in the first column of the table that begins with this title."""
    page = PAGE.read_text(encoding="utf-8")
    (table,) = re.findall(rf"^\| {title} \|.*\n\|.*\n((?:\|.*\n)+)", page, re.MULTILINE)
    return [name for row in table.splitlines() for name in re.findall(r"`([^`]+)`", row.split("|")[1])]


@pytest.mark.parametrize("quote", QUOTES)
def test_message_of_the_page_is_one_of_the_code(quote: str) -> None:
    assert quote.startswith("`"), "a message stands in code marks"
    assert quote.endswith("`"), "a message stands in code marks"
    assert any(text.startswith(plain(quote)) for text in texts())


@pytest.mark.parametrize(("text", "file"), TEXTS, ids=[text[:60] for text, _ in TEXTS])
def test_message_of_the_code_is_on_the_page(text: str, file: str) -> None:
    assert is_quoted(text), f"{file} says this: give it a row in docs/troubleshooting.md"


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
    page = PAGE.read_text(encoding="utf-8")
    assert "(health.md#what-is-found)" in page
    assert not any(f"| `{name}` |" in page for name in THRESHOLDS)


def test_a_text_is_read_as_it_will_be_said() -> None:
    code = "SetupError(f\"{file}: {name!r} has {n:,} rows\" + more + 'of `x`')"
    call = ast.parse(code, mode="eval").body
    assert isinstance(call, ast.Call)
    assert plain(written(call.args[0])) == "…: … has … rows…of x"
    assert plain("`…: '…' is not …`") == "…: … is not …"
