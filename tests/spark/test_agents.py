"""`lookback mcp` on tables: one server that starts Spark once, called by the client of the package mcp over stdio."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from mcp import Client, StdioServerParameters

from lookback.cli import main
from lookback.spark.checkpoints.checkpoint import checkpoint_folder
from lookback.spark.stream.pipeline import Evaluation
from lookback.spark.tables.lakehouse import Tables
from payins import RULES, STREAM, STREAMS, append, make_events, publish

pytestmark = pytest.mark.spark
ROOT = Path(__file__).parents[2]
LARGE = {
    "rule_id": "large", "stream": STREAM.name, "parameters": {"limit": 40}, "group_by": ["customer"], "window": "1 hour",
    "measures": {"n": "count(*)", "total": "sum(amount)"}, "when": "amount > :limit and n >= 2", "message": "{total}",
}  # fmt: skip


# A server with a Spark of its own: a minute and more.
@pytest.mark.long
def test_a_rule_is_written_tried_and_published_as_a_draft(ready: Tables, capsys: pytest.CaptureFixture[str]) -> None:
    conf = Path(str(ready.root), "conf")
    (conf / "streams").mkdir(parents=True)
    (conf / "streams/payins.yml").write_text(yaml.safe_dump(STREAM.to_dict()), encoding="utf-8")
    settings = "agents_publish: true\nspark: {spark.driver.memory: 1g, spark.sql.shuffle.partitions: 2}\n"
    (conf / "settings.yml").write_text(settings, encoding="utf-8")
    publish(ready, RULES)
    append(ready, make_events(60, 3))
    Evaluation(ready, STREAM, STREAMS, checkpoint_folder(ready, STREAM), once=True).run()
    place = ["--root", str(ready.root), "--conf", str(conf)]
    file = conf / "rule.yml"
    text = yaml.safe_dump(LARGE, sort_keys=False)
    file.write_text(text, encoding="utf-8")

    def printed(*words: str) -> list[dict[str, Any]]:
        assert main([*place, *words, "--json"]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    async def run() -> None:
        server = StdioServerParameters(
            command=sys.executable, args=["-m", "lookback", *place, "mcp"], env={"PYTHONPATH": str(ROOT / "src")}
        )
        async with Client(server) as client:

            async def ask(tool: str, **given: Any) -> list[dict[str, Any]]:
                found = await client.call_tool(tool, given)
                assert not found.is_error, found.content
                return [json.loads(line) for line in found.content[0].text.splitlines()]

            assert await ask("list_rules") == printed("rules", "list")
            queue = await ask("list_queue", limit=3)
            assert queue == printed("alerts", "--queue", "--limit", "3")
            alert = queue[0]
            why = await ask("explain_alert", alert_id=alert["alert_id"])
            assert why == printed("explain", alert["alert_id"])
            event = await ask("explain_event", rule_id="by-customer", event_id="e1")
            assert event == printed("explain", "--rule", "by-customer", "--event", "e1")
            drafts = await ask("draft_tests", rule=text)
            assert drafts == printed("rules", "draft-tests", str(file))
            assert [bool(each["alerts"]) for each in drafts] == [True, False]
            tested = yaml.safe_dump({**LARGE, "tests": drafts}, sort_keys=False)
            assert (await ask("check_rule", rule=tested, against_data=True))[0]["rule_id"] == "large"
            tried = await ask("backtest", rule=text, vary=["limit=20,45"])
            assert [each["alerts"] for each in tried] == [
                each["alerts"] for each in printed("backtest", str(file), "--vary", "limit=20,45")
            ]
            *_, made = await ask("publish_rule", rule=tested, status="draft", comment="a try")
            assert made == {"rule_id": "large", "version": 1, "status": "draft"}
            (row,) = await ask("show_rule", rule_id="large")
            assert (row["status"], row["comment"]) == ("draft", "by an assistant: a try")
            unknown = await client.call_tool("explain_alert", {"alert_id": "0" * 32})
            assert unknown.is_error
            assert "Traceback" not in unknown.content[0].text
            assert "0" * 32 in unknown.content[0].text
            (conf / "settings.yml").write_text("agents_publish: false")
            refused = await client.call_tool("publish_rule", {"rule": text, "status": "shadow"})
            assert refused.is_error
            assert refused.content[0].text.startswith("publishing is not allowed")

    asyncio.run(run())
