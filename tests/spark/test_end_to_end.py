"""The main job through the command line, on the real slice, against a plain recomputation in pandas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pytest

from lookback.cli import main
from payins import copy_of

if TYPE_CHECKING:
    from lookback.spark.tables.lakehouse import Tables

pytestmark = pytest.mark.spark
ROOT = Path(__file__).parents[2]


def recompute_alerts(rows: pd.DataFrame) -> dict[str, set[int]]:
    """Computes which transactions raise an alert, by rule, with pandas alone: rolling windows with both ends included."""
    rows = rows.sort_values(["event_time", "transaction_id"]).set_index("event_time")
    windows = rows.groupby("customer_id")["amount_cents"].rolling("24h", closed="both")
    ids = rows.groupby("customer_id")["transaction_id"].apply(list).explode().to_numpy()
    busy = (windows.sum().to_numpy() >= 100_000) & (windows.count().to_numpy() >= 3)
    return {
        "customer-day-spend": set(ids[busy].tolist()),
        "large-payment": set(rows.loc[rows["amount_cents"] > 22_000, "transaction_id"].tolist()),
    }


# Four days of the slice, or all twelve.
@pytest.mark.parametrize("count", [40_000, 120_000])
@pytest.mark.long
def test_alerts_of_two_rules_over_the_slice_equal_a_plain_recomputation(
    created: Tables, tmp_path: Path, capsys: pytest.CaptureFixture[str], count: int
) -> None:
    # Most tables are there already, so `init` makes those of the other streams.
    copy_of(created, tmp_path / "lakehouse", "transactions")
    place = ["--root", str(tmp_path / "lakehouse"), "--conf", str(ROOT / "conf")]
    rows = pd.read_parquet(ROOT / "conf/samples/transactions.parquet").head(count)
    rows.to_parquet(tmp_path / "transactions.parquet", index=False, coerce_timestamps="us")

    def run(*command: str, code: int = 0) -> str:
        capsys.readouterr()
        assert main([*place, *command]) == code
        return capsys.readouterr().out

    def listed(*command: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in run(*command, "--json").splitlines()]

    rules = ROOT / "conf/rules"
    run("init")
    published = run("rules", "push", f"{rules}/customer-day-spend.yml", f"{rules}/large-payment.yml", "--author", "me")
    assert "published large-payment version 1 (active)" in published
    (report,) = listed("ingest", "transactions", str(tmp_path / "transactions.parquet"))
    assert report["offered"] == report["ingested"] == count
    run("evaluate", "transactions", "--once")
    found: dict[str, set[int]] = {}
    for alert in listed("alerts"):
        found.setdefault(alert["rule_id"], set()).add(int(alert["event_id"]))
    assert found == recompute_alerts(rows)
    assert all(len(ids) > 50 for ids in found.values())
    first = listed("alerts", "--queue")[0]
    assert first["severity"] == "high"
    said = run("review", first["alert_id"], "--disposition", "confirmed", "--reviewer", "me")
    assert said == f"Alert {first['alert_id']} is recorded as confirmed, by its revision 0: {first['message']}.\n"
    run("review", first["alert_id"], "--disposition", "confirmed", "--revision", "1", code=2)
    assert first["alert_id"] not in {alert["alert_id"] for alert in listed("alerts", "--queue")}
    status = next(row for row in listed("status") if row["stream"] == "transactions")
    assert status["alerts"] == sum(map(len, found.values()))
    assert status["open"] == status["alerts"] - 1
    assert status["judged"] == status["commits"] > 0 == status["lag_commits"]
    assert status["health"].startswith("transactions is healthy: judged through commit ")
    # The sample is of 2018.
    assert [(finding["level"], finding["check"]) for finding in status["findings"]] == [("note", "watermark_behind")]
    run("rules", "pause", "large-payment")
    changed = run("rules", "set", "customer-day-spend", "limit=1200", "--author", "me")
    assert changed == "published customer-day-spend version 2 with limit = 1200\n"
    last = {row["rule_id"]: row for row in listed("rules", "list")}
    assert {rule_id: (row["version"], row["status"]) for rule_id, row in last.items()} == {
        "customer-day-spend": (2, "active"), "large-payment": (2, "paused"),
    }  # fmt: skip
    document = last["customer-day-spend"]["document"]
    assert document["parameters"] == {"limit": 1200}
    # Contract 10.1: its tests go on to mean what they meant.
    assert {test["parameters"]["limit"] for test in document["tests"]} == {1000}
    run("rules", "set", "customer-day-spend", "limit=many", code=1)
    run("rules", "set", "large-payment", "limit=1", code=1)
    assert "rule_id: large-payment" in run("rules", "export", "large-payment")
    run("advance", "transactions", "2018-08-01")
    run("rules", "clear-state", "transactions")
    run("rules", "retire-all", "transactions")
    (batch,) = [json.loads(line) for line in run("evaluate", "transactions", "--once", "--json").splitlines()]
    assert [(row["rule_id"], row["action"], row["message"]) for row in batch["log"]] == [
        ("large-payment", "paused", ""),
        ("customer-day-spend", "activated", ""),
        ("*", "advance", "to 2018-08-01T00:00:00Z"),
        ("*", "clear_state", ""),
        ("customer-day-spend", "retired", "by retire_all"),
        ("large-payment", "retired", "by retire_all"),
        ("*", "retire_all", ""),
    ]
    assert (batch["watermark"], batch["rules"], batch["state_rows"]) == (1_533_081_600_000_000, 0, 0)
    run("advance", "transactions", "tomorrow", code=1)
    run("evaluate", "transactions", "--once", "--idle-after", "1 minute", code=2)
    assert json.loads(run("rules", "schema"))["title"]
    run("rules", "retire", "nobody", code=1)
    run("ingest", "nobody", code=2)
    with pytest.raises(SystemExit, match="2"):
        main(["frobnicate"])
