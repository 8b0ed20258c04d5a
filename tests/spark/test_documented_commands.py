"""The commands that the pages show are run as they stand, page after page on the same tables, and end well.

Those that go on until they are stopped get `--once`, one that asks gets its answer, ALERT_ID becomes that of an alert,
and a pattern its files, as by a shell.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lookback.cli import main

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.long]
ROOT = Path(__file__).parents[2]
# In an order in which each finds what it needs.
PAGES = (
    "docs/reference/commands.md",
    "docs/how-to/write-a-rule.md",
    "docs/how-to/rules-in-a-repository.md",
    "docs/how-to/explain.md",
    "docs/how-to/measure-rules.md",
    "docs/reference/rule-keys.md",
    "docs/reference/measures.md",
    "docs/reference/sequences.md",
    "docs/reference/alerts-and-limits.md",
    "docs/how-to/rules-over-alerts.md",
    "docs/reference/mistakes.md",
    "docs/how-to/recover.md",
    "docs/how-to/prove.md",
    "docs/how-to/from-a-laptop.md",
    "docs/how-to/snooze.md",
    "docs/how-to/change-lists.md",
    "docs/how-to/notify.md",
    "docs/explanation/time/index.md",
    "docs/reference/health.md",
    "docs/explanation/threats.md",
)
# They need a workspace or a receiver; their own tests have servers for them.
ELSEWHERE = ("notify", "--warehouse", "--tell")


def commands(page: str) -> list[list[str]]:
    """The arguments of each `lookback` command in the page's blocks."""
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    lines = [shlex.split(line, comments=True) for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    ours = [words[1:] for words in lines if words and words[0].removeprefix(".venv/bin/") == "lookback"]
    return [words for words in ours if not set(words) & set(ELSEWHERE)]


def ending(words: list[str]) -> list[str]:
    """The command as a test can run it."""
    if words[0] == "evaluate" and "--once" not in words:
        # Time that passes is for an evaluation that goes on; tests of the pipeline let it pass.
        kept = words[: words.index("--idle-after")] if "--idle-after" in words else words
        return [*kept, "--once"]
    if any("*" in word for word in words):
        return [name for word in words for name in (sorted(map(str, ROOT.glob(word))) if "*" in word else [word])]
    if "--out" in words:
        at = words.index("--out") + 1
        return [*words[:at], f"{os.environ['LOOKBACK_ROOT']}-{words[at]}", *words[at + 1 :]]
    if words == ["ingest", "purchases"]:
        # The Spark of the tests was started in another folder.
        return [*words, str(Path("purchases.csv").resolve())]
    if words[0] == "forget" and "--dry-run" not in words:
        return [*words, "--yes"]
    return words


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tables, on which one page goes on after another."""
    return tmp_path_factory.mktemp("place") / "lakehouse"


@pytest.fixture(scope="module")
def done() -> dict[str, set[str]]:
    """The commands that were run, by page."""
    return {}


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_the_pages_end_well(
    spark: SparkSession, root: Path, done: dict[str, set[str]], page: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("LOOKBACK_ROOT", str(root))
    monkeypatch.delenv("LOOKBACK_CONF", raising=False)
    # Those before it, too, if it is run alone.
    for each in PAGES[: PAGES.index(page) + 1]:
        if each not in done:
            done[each] = run_page(each, capsys)
    if page == PAGES[-1]:
        run = set().union(*done.values())
        assert {"init", "rules", "ingest", "evaluate", "alerts", "review", "status", "forget", "advance"} <= run


def run_page(page: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """Runs the commands of a page, and returns their names."""
    run = set()
    for words in map(ending, commands(page)):
        if "ALERT_ID" in words:
            assert main(["alerts", "--queue", "--json"]) == 0
            alert = json.loads(capsys.readouterr().out.splitlines()[0])
            words[words.index("ALERT_ID")] = alert["alert_id"]
        code = main(words)
        said = capsys.readouterr()
        # These two say by their code what they found.
        reports = {"--check", "--backtest"} & set(words)
        assert code == 0 or (code == 1 and reports), f"{page}: {words}: {said.err}"
        run.add(words[0])
    return run


def test_tutorial_leads_to_alerts(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs/tutorial/first-alert.md").read_text(encoding="utf-8")
    for name, text in re.findall(r"^```\w+ file (\S+)\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOOKBACK_ROOT", raising=False)
    monkeypatch.delenv("LOOKBACK_CONF", raising=False)
    run_page("docs/tutorial/first-alert.md", capsys)
    assert main(["alerts", "--queue", "--json"]) == 0
    alerts = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sorted(alert["key"]["card"] for alert in alerts) == ["c2", "c3"]
