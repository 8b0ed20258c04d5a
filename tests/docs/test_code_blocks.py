"""No block of code stands in a page that nothing runs or reads.

What a page shows is run where it can be: README by test_readme, docs by test_docs, the changes in CONTRIBUTING by
test_contributing. What cannot be run without tables or a workspace is read here: commands by the parsers of the
commands, make targets by the Makefile, SQL, YAML and JSON by their parsers. A block of a kind that is not in the table
below fails, and so does a `text` block that is no output of the block before it; one that nobody runs, such as a time
line, says so: `text drawing`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import runpy
import shlex
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import sqlglot
import yaml
from sqlglot import exp

import dev.bench.__main__
import dev.soak.__main__
from lookback.cli import _make_parser

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    page.relative_to(ROOT).as_posix(): page for page in runpy.run_path(str(ROOT / "dev/tools/links.py"))["list_pages"]()
}
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
# Programs of others in commands: their words are read as far as they name something of ours.
FOREIGN = {"cd", "cp", "export", "git", "mkdir", "pip", "pre-commit", "python3.12"}
# Of Unity Catalog and Delta, which sqlglot keeps as they are.
NAME = r"(?:[\w.]+|`[^`]+`)"
PRIVILEGE = (
    "USE CATALOG|USE SCHEMA|SELECT|MODIFY|EXECUTE|CREATE (?:SCHEMA|TABLE|VOLUME)|(?:READ|WRITE) VOLUME|ALL PRIVILEGES"
)
KEPT = re.compile(
    rf"(?:GRANT|REVOKE) (?:{PRIVILEGE})(?:, (?:{PRIVILEGE}))* ON (?:CATALOG|SCHEMA|TABLE|VIEW|VOLUME) {NAME} (?:TO|FROM) {NAME}"
    rf"|VACUUM {NAME}(?: RETAIN \d+ HOURS)?|OPTIMIZE {NAME}|REORG TABLE {NAME} APPLY \(PURGE\)"
    rf"|CREATE (?:CATALOG|SCHEMA|VOLUME) (?:IF NOT EXISTS )?{NAME}"
)
# What stands in a command for a number.
NUMBERS = {"N", "PARTITIONS"}


class Block(NamedTuple):
    """A fenced block. info: what stands behind the fence; before: the info of the block before it in the page."""

    page: str
    line: int
    info: str
    text: str
    before: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def pages_of(name: str) -> str:
    """The Markdown of a page or of a notebook."""
    text = PAGES[name].read_text(encoding="utf-8")
    if not name.endswith(".ipynb"):
        return text
    cells = json.loads(text)["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def blocks_of(name: str) -> Iterator[Block]:
    before, begun, info, inside = "", 0, "", list[str]()
    for number, line in enumerate(pages_of(name).splitlines(), 1):
        if begun and line.strip() == "```":
            yield Block(name, begun, info, "".join(f"{each}\n" for each in inside), before)
            before, begun, inside = info, 0, []
        elif begun:
            inside.append(line)
        elif line.lstrip().startswith("```"):
            begun, info = number, line.strip().strip("`").strip()
    assert not begun, f"{name}:{begun}: the block has no end"


BLOCKS = [block for name in PAGES for block in blocks_of(name)]


# Commands ------------------------------------------------------------------------------------------------------------


def lines_of(text: str) -> Iterator[list[str]]:
    """The words of each command; a line that ends with a backslash goes on in the next."""
    for line in text.replace("\\\n", " ").splitlines():
        if words := shlex.split(line.removeprefix("$ "), comments=True):
            yield words


def parse(parser: argparse.ArgumentParser, words: list[str]) -> None:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parser.parse_args(["4" if word in NUMBERS else word for word in words])
    except SystemExit as error:
        raise AssertionError(f"{shlex.join(words)}: {said.getvalue()}") from error


def made(words: list[str]) -> None:
    """A make command names targets with an explanation, and variables that the Makefile reads."""
    for word in words:
        name, is_variable, _ = word.partition("=")
        if is_variable:
            assert re.search(rf"\$\({name}\)|\$\(or \$\({name}\)", MAKEFILE), f"the Makefile reads no {name}"
        else:
            assert re.search(rf"^{name}:.*##", MAKEFILE, re.MULTILINE), f"the Makefile has no target {name}"


def python(words: list[str]) -> None:
    modules = {"dev.bench": dev.bench.__main__.parser, "dev.soak": dev.soak.__main__.parser}
    assert words[0] == "-m", f"python {shlex.join(words)}: no test knows it"
    if words[1] == "pytest":
        paths = [word.partition("::")[0] for word in words[2:] if word.startswith("tests")]
        assert [path for path in paths if not (ROOT / path).exists()] == []
    else:
        parse(modules[words[1]](), words[2:])


def databricks(words: list[str]) -> None:
    """A command of the Databricks CLI for the bundle names a target and a resource that there is."""
    bundle = yaml.safe_load((ROOT / "databricks.yml").read_text(encoding="utf-8"))
    for option, value in pairwise(words):
        if option in ("-t", "--target"):
            assert value in bundle["targets"], value
    if words[:2] == ["bundle", "run"]:
        jobs = [yaml.safe_load(path.read_text())["resources"]["jobs"] for path in (ROOT / "conf/jobs").glob("*.yml")]
        named = [word for word in words[2:] if word in {name for job in jobs for name in job}]
        assert len(named) == 1, f"{shlex.join(words)} runs no job of conf/jobs"


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "lookback": lambda words: parse(_make_parser(), words),
    "make": made,
    "python": python,
    "databricks": databricks,
}


def command(words: list[str]) -> None:
    program = words[0].removeprefix(".venv/bin/")
    if program in COMMANDS:
        COMMANDS[program](words[1:])
    else:
        assert program in FOREIGN, f"no test knows the program {program}"


# The other kinds -----------------------------------------------------------------------------------------------------


def read_sh(block: Block) -> None:
    for words in lines_of(block.text):
        command(words)


def read_sql(block: Block) -> None:
    texts = [" ".join(text.split()) for text in re.sub(r"--.*", "", block.text).split(";")]
    assert any(texts)
    for text in filter(None, texts):
        if not KEPT.fullmatch(text):
            (statement,) = sqlglot.parse(text, read="databricks")
            assert not isinstance(statement, exp.Command | exp.Grant), text


def read_yaml(block: Block) -> None:
    assert isinstance(yaml.safe_load(block.text), (dict, list))


def read_json(block: Block) -> None:
    for line in block.text.splitlines() if "\n{" in block.text else [block.text]:
        json.loads(line)


def output(block: Block) -> None:
    assert block.before in ("python", "sh", "yaml mistake"), "a text is the output of the block before it"


def elsewhere(*names: str) -> Callable[[Block], None]:
    """Run by the tests of these pages, and only there."""

    def check(block: Block) -> None:
        assert any(block.page.startswith(name) for name in names), f"{block.info} is run only in {', '.join(names)}"

    return check


def nothing(block: Block) -> None:
    pass


KINDS: dict[str, Callable[[Block], None]] = {
    "sh": read_sh,
    "bash": read_sh,
    "sql": read_sql,
    "json": read_json,
    "text": output,
    "text drawing": nothing,
    "python": elsewhere("docs/"),
    "yaml mistake": elsewhere("README.md", "docs/"),
    "yaml rule": elsewhere("README.md", "docs/"),
    "yaml stream": elsewhere("docs/"),
    # Files of the tutorial.
    "text file purchases.csv": elsewhere("docs/tutorial/"),
    "yaml file conf/rules/card-rush.yml": elsewhere("docs/tutorial/"),
    # A file, and the declaration that `lookback stream new` drafts from it.
    "text file orders.csv": elsewhere("docs/streams.md"),
    "yaml stream draft": elsewhere("docs/streams.md"),
    # A part of a settings file, a job or a workflow: read, no more.
    "yaml": read_yaml,
    "diff": elsewhere("CONTRIBUTING.md"),
}


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"{block.place} {block.info}")
def test_block_is_run_or_read(block: Block) -> None:
    assert block.info in KINDS, f"{block.place}: no test runs or reads a block `{block.info}`"
    KINDS[block.info](block)


# Commands within sentences -------------------------------------------------------------------------------------------


def inline_commands(name: str) -> list[str]:
    text = re.sub(r"^\s*```.*?^\s*```", "", pages_of(name), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"(?<!`)`((?:lookback|make) [^`]+)`(?!`)", text.replace("\n", " "))


def known(parser: argparse.ArgumentParser, words: list[str]) -> None:
    """Words of a command that may leave out what is required: sub-commands, options."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) and words and not words[0].startswith("-"):
            for each in words[0].split("|"):
                assert each in action.choices, f"{parser.prog} has no command {each}"
                known(action.choices[each], words[1:])
            return
    options = {option for action in parser._actions for option in action.option_strings}
    assert [word for word in words if word.startswith("--") and word not in options] == []


def spoken(text: str) -> None:
    words = [word.strip("[]") for word in shlex.split(text.replace(" | ", "|"))]
    if words[0] == "make":
        made([word for word in words[1:] if word.strip(".…")])
    else:
        known(_make_parser(), words[1:])


@pytest.mark.parametrize("name", [name for name in PAGES if name != "CHANGELOG.md" and inline_commands(name)])
def test_commands_in_sentences_are_those_that_there_are(name: str) -> None:
    for text in inline_commands(name):
        spoken(text)


# What the checks themselves tell ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("info", "text"),
    [
        ("sh", "lookback evaluate"),
        ("sh", "lookback ingest payments --frmat csv"),
        ("sh", "make everything"),
        ("sh", "make soak KILL=3"),
        ("sh", "python -m dev.bench --only nothing"),
        ("sh", "python -m pytest tests/test_gone.py"),
        ("sh", "databricks bundle deploy -t production"),
        ("sh", "databricks bundle run nothing -t dev"),
        ("sh", "curl http://127.0.0.1"),
        ("sql", "SELECT FROM WHERE"),
        ("sql", "GRANT INSERT ON TABLE main.fraud.rules TO `analysts`"),
        ("yaml", "a: [1"),
        ("json", "{a: 1}"),
        ("text", "an output of nothing"),
        ("python", "print(1)"),
    ],
)
def test_block_that_is_wrong_is_told(info: str, text: str) -> None:
    with pytest.raises((AssertionError, sqlglot.errors.ParseError, yaml.YAMLError, json.JSONDecodeError)):
        KINDS[info](Block("dev/bench/README.md", 1, info, text, ""))


@pytest.mark.parametrize("text", ["lookback evaluat STREAM", "lookback evaluate STREAM --onc", "make benches"])
def test_command_in_a_sentence_that_is_wrong_is_told(text: str) -> None:
    with pytest.raises(AssertionError):
        spoken(text)
