"""The first hour of an analyst, by the commands alone: a file is declared, taken in, looked at, and judged by rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from lookback.cli import main
from lookback.notebook import show_queue
from lookback.spark.review import open_queue

if TYPE_CHECKING:
    from lookback.spark.tables.lakehouse import Tables

pytestmark = [pytest.mark.spark, pytest.mark.long]
ORDERS = """order_id;ordered_at;customer;amount;status
1;01.03.2026 10:00;Ann;20,00;PAID
2;01.03.2026 11:00;Ann;20,00;PAID
3;01.03.2026 12:00;Ann;100,00;DECLINED
4;01.03.2026 13:00;Bob;1.234,50;PAID
"""
MORE = """order_id;ordered_at;customer;amount;status
5;01.03.2026 14:00;Bob;many;PAID
6;01.03.2026 15:00;Bob;few;PAID
7;;Bob;1,00;PAID
8;01.03.2026 16:00;Bob;1,00;PAID
"""
USUAL = {
    "rule_id": "unusual", "stream": "orders", "group_by": ["customer"], "window": "30 days",
    "measures": {
        "usual": {"measure": "avg(amount)", "window": {"lookback": "30 days", "delay": "1 microsecond"}},
        "n": "count(*)",
    },
    "when": "amount > 3 * usual", "message": "{amount}, usually {usual}",
}  # fmt: skip


class Shell:
    """Runs commands on tables and declarations of its own, and keeps what they printed."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capsys = folder, capsys
        self.root = str(folder / "lakehouse")
        self.out = self.err = ""

    def run(self, *words: str) -> int:
        code = main(["--root", self.root, "--conf", str(self.folder / "conf"), *words])
        captured = self._capsys.readouterr()
        self.out, self.err = captured.out, captured.err
        return code

    def objects(self, *words: str) -> list[dict[str, Any]]:
        assert self.run(*words, "--json") == 0
        return [json.loads(line) for line in self.out.splitlines()]

    def rule(self, document: dict[str, Any]) -> str:
        file = self.folder / f"{document['rule_id']}.yml"
        file.write_text(yaml.safe_dump(document), encoding="utf-8")
        return str(file)


def test_the_first_hour(
    tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The product's tables are there; those of the streams are made by the commands.
    monkeypatch.chdir(tmp_path)
    shell = Shell(tmp_path, capsys)
    (tmp_path / "orders.csv").write_text(ORDERS, encoding="utf-8")
    (tmp_path / "more.csv").write_text(MORE, encoding="utf-8")
    assert shell.run("stream", "new", str(tmp_path / "orders.csv"), "--write") == 0
    other = yaml.safe_load((tmp_path / "conf/streams/orders.yml").read_text(encoding="utf-8")) | {"stream": "others"}
    (tmp_path / "conf/streams/others.yml").write_text(yaml.safe_dump(other), encoding="utf-8")

    # A stream without events: whatever window a rule has, nobody could have kept its rows.
    assert shell.run("rules", "push", shell.rule(USUAL)) == 0
    assert "warning" not in shell.err
    assert "remark: rule 'unusual': tests is missing" in shell.out
    assert shell.run("rejected", "orders") == 0
    assert shell.out == "orders: no rejected rows\n"

    # All rows of the file that was drafted from go in.
    assert shell.run("ingest", "orders") == 0
    assert "4 offered = 4 ingested + 0 duplicates + 0 rejected" in shell.out
    assert "lookback rejected" not in shell.out

    # Of others the reasons are printed, each kind once, with an example and the command.
    assert shell.run("ingest", "orders", str(tmp_path / "more.csv")) == 0
    assert "4 offered = 1 ingested + 0 duplicates + 3 rejected" in shell.out
    lines = shell.out.splitlines()
    (amounts,) = (line for line in lines if line.startswith("  2 rejected: "))
    assert "amount" in amounts
    assert ("'few'" in amounts) != ("'many'" in amounts)
    assert "more.csv; such a row is {" in amounts
    (times,) = (line for line in lines if line.startswith("  1 rejected: "))
    assert "ordered_at" in times
    assert lines[-1] == "  all of them: lookback rejected orders"

    assert shell.run("rejected", "orders", "--limit", "1") == 0
    assert [line[:12] for line in shell.out.splitlines()[:2]] == ["2 rejected: ", "1 rejected: "]
    assert "the newest 1:" in shell.out
    assert "lookback ingest orders --retry-rejected" in shell.out
    rows = shell.objects("rejected", "orders")
    assert [sorted(row) for row in rows] == [["ingested_at", "raw", "reason", "source", "stream"]] * 3
    assert {json.loads(row["raw"])["order_id"] for row in rows} == {"5", "6", "7"}
    report = shell.objects("ingest", "orders", str(tmp_path / "more.csv"))[0]
    assert [each["rows"] for each in report["rejections"]] == [2, 1]

    # One warning for a rule, however many of its measures are cold; none for those that another rule keeps.
    cold = {
        **USUAL, "rule_id": "cold", "message": "{a}",
        "measures": {"a": "sum(amount)", "b": "max(amount)", "c": "min(amount)"}, "when": "a > 5",
    }  # fmt: skip
    assert shell.run("rules", "push", shell.rule(cold)) == 0
    assert shell.err.count("warning") == 1
    assert "warning: cold: a, b and c start empty" in shell.err
    assert shell.run("rules", "retire", "cold") == 0

    # What is fine and was never true.
    never = {**USUAL, "rule_id": "never", "where": "status = 'declined'"}
    assert shell.run("rules", "check", shell.rule(never), "--against-data") == 0
    assert (
        "remark: rule 'never': 'declined' was never seen in status; did you mean 'DECLINED', of 1 event?" in shell.out
    )
    assert shell.run("rules", "check", shell.rule(USUAL), "--against-data") == 0
    assert "never seen" not in shell.out
    assert "would have raised no alert" not in shell.out
    # A list counts as it is, and one that nobody has filled is named.
    asking = shell.rule({**USUAL, "rule_id": "asking", "where": "in_list(status, 'refused')"})
    assert shell.run("rules", "check", asking, "--against-data") == 0
    assert "remark: rule 'asking': unknown list 'refused'; no lists exist yet" in shell.out
    assert "matched none of" in shell.out
    assert shell.run("lists", "add", "refused", "DECLINED") == 0
    assert shell.run("rules", "check", asking, "--against-data") == 0
    assert "no list" not in shell.out
    assert "matched none of" not in shell.out
    elsewhere = shell.rule({**USUAL, "rule_id": "elsewhere", "stream": "others"})
    found = shell.objects("rules", "check", elsewhere, "--against-data")
    assert [(row["level"], row["place"]) for row in found] == [("remark", "tests"), ("remark", "stream")]

    # Alerts of two streams, told apart; money as money in the message, exact in measures.
    assert shell.run("ingest", "others") == 0
    assert shell.run("rules", "push", elsewhere) == 0
    assert shell.run("evaluate", "orders", "--once") == 0
    assert shell.run("evaluate", "others", "--once") == 0
    alerts = shell.objects("alerts")
    assert sorted(row["stream"] for row in alerts) == ["orders", "others"]
    (alert,) = shell.objects("alerts", "--stream", "orders")
    assert (alert["rule_id"], alert["message"]) == ("unusual", "100.00, usually 20.00")
    assert alert["measures"]["usual"] == "20.000000"
    assert [row["stream"] for row in shell.objects("alerts", "--queue", "--stream", "others")] == ["others"]
    assert len(shell.objects("alerts", "--queue")) == 2
    assert shell.run("alerts", "--stream", "nothing") == 2
    assert "no stream 'nothing'" in shell.err
    # A name that no rule ever had is a mistake; a rule without alerts is none.
    assert shell.run("alerts", "--queue", "--rule", "unsual") == 2
    assert "unknown rule 'unsual'; did you mean 'unusual'?" in shell.err
    assert shell.run("alerts", "--queue", "--rule", "cold") == 0

    # The queue of notebook 4 is that of its stream.
    workspace: Any = type("Workspace", (), {"tables": tables, "stream": type("Stream", (), {"name": "others"})})
    assert list(show_queue(workspace)["rule_id"]) == ["elsewhere"]
    assert open_queue(tables).count() == 2
