"""The notebooks under nbmake, in order, in one temporary place, each from its first cell to its last."""

from __future__ import annotations

import re
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pyarrow.parquet as pq
import pytest
import yaml
from nbmake.nb_run import NotebookRun

from workspace_server import Answer, WorkspaceServer

pytestmark = pytest.mark.notebook
ROOT = Path(__file__).parents[2]
inject = runpy.run_path(str(ROOT / "dev/tools/pictures.py"))["inject"]
TIMEOUT = 300
EVENTS = 5_000


Run = Callable[..., str]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of conf/ with a small Spark, and a few thousand of the sample's events, one of them unusable."""
    place = tmp_path_factory.mktemp("notebooks")
    shutil.copytree(ROOT / "conf", place / "conf", ignore=shutil.ignore_patterns("samples", "jobs"))
    # Short lives: a compiler that is done early and a collector that is small pay more than fast code later.
    options = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    settings = {"spark": {"spark.driver.memory": "1g", "spark.driver.defaultJavaOptions": options}}
    (place / "conf" / "settings.yml").write_text(yaml.safe_dump(settings))
    events = pq.read_table(ROOT / "conf/samples/transactions.parquet").slice(0, EVENTS).to_pandas()
    events.loc[EVENTS - 1, "event_time"] = None
    events.to_parquet(place / "events.parquet", index=False, coerce_timestamps="us")
    return place


@pytest.fixture
def run(place: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a notebook with parameters in a Jupyter kernel and a Spark of its own; returns what it displayed as text.

    injected: the parameters stand in a cell after the tagged one, as papermill puts them; else in the environment.
    """

    def run(name: str, *, injected: bool = False, **parameters: Any) -> str:
        given = {"root": str(place / "lakehouse"), "conf": str(place / "conf"), **parameters}
        document = nbformat.read(ROOT / "notebooks" / name, as_version=4)
        if injected:
            inject(document, **given)
        else:
            for key, value in given.items():
                monkeypatch.setenv(f"LOOKBACK_PARAM_{key.upper()}", str(value))
        monkeypatch.setenv("MPLBACKEND", "agg")
        nbformat.write(document, place / name)
        result = NotebookRun(place / name, default_timeout=TIMEOUT).execute()
        assert result.error is None, result.error.trace
        outputs = [output for cell in result.nb.cells if cell.cell_type == "code" for output in cell.outputs]
        return "\n".join(output.get("data", {}).get("text/plain", output.get("text", "")) for output in outputs)

    return run


def test_0_a_place_is_set_up(place: Path, run: Run):
    said = run("00_set_up.ipynb", landing=place / "landing")
    assert said.count(" created") == 19  # twelve tables of the product, seven of streams; metrics and alerts are both
    assert (place / "landing").is_dir()


def test_1_ingest_accounts_for_every_row(place: Path, run: Run):
    said = run("01_ingest.ipynb", path=place / "events.parquet")
    assert f"{EVENTS:,} offered = {EVENTS - 1:,} ingested + 0 duplicates + 1 rejected" in said
    assert "event_time" in said
    assert "a picture: Events over time" in said


def test_2_a_rule_is_checked_tried_and_published(place: Path, run: Run):
    said = run(
        "02_author_rules.ipynb",
        rule_id="customer-day", window="24 hours", parameters="limit: 300", when="total >= :limit and n >= 2",
        publish="true", events="4000",
    )  # fmt: skip
    assert "Raised when total >= 300 and n >= 2" in said
    assert "a picture: customer-day: what it would have flagged" in said
    assert "customer-day is published as version 1, active." in said


def test_2a_a_published_rule_is_judged_over_all_events_with_other_limits(place: Path, run: Run):
    said = run("02a_backtest_rules.ipynb", rule="customer-day", vary="limit=200,300,400", budget="5")
    for picture in ("alerts a day by limit", "precision and recall by limit"):
        assert f"a picture: customer-day: {picture}" in said
    assert f"customer-day over {EVENTS - 1:,} events; nothing was published." in said
    assert "conf/settings.yml has no gate" in said


def test_2b_a_list_is_changed(place: Path, run: Run):
    said = run("02b_change_lists.ipynb", list_name="known", list_add="1, 2", list_until="30 days")
    assert "list known: 2 offered = 2 added + 0 changed + 0 duplicates + 0 rejected; 2 values now" in said


def test_3_the_stream_is_evaluated_with_a_live_view(place: Path, run: Run):
    said = run("03_evaluate_stream.ipynb", injected=True, mode="once")
    assert f"{EVENTS - 1:,} events" in said
    assert "customer-day" in said
    assert "activated" in said
    assert "transactions needs a look (1 warning): judged through commit 1, nothing waits, last heard from" in said
    assert "1 row (0.0%) could not be ingested within the last hour; the newest: event_time is NULL." in said


def test_4_an_alert_is_explained_reviewed_and_leaves_the_queue(place: Path, run: Run):
    alerts = pq.read_table(place / "lakehouse/alerts", columns=["alert_id", "event_time"]).sort_by("event_time")
    said = run(
        "04_review_alerts.ipynb", injected=True,
        alert_id=alerts["alert_id"][-1].as_py(), revision="0", disposition="confirmed", reviewer="kim", note="seen",
        rule_id="customer-day",
    )  # fmt: skip
    assert "match those of the alert" in said
    before, after = (
        int(line.split()[0].replace(",", "")) for line in said.splitlines() if "alerts wait for review" in line
    )
    assert after == before - 1 >= 0
    assert "is recorded as confirmed, by its revision 0: " in said
    for picture in ("Alerts over time", "customer-day: customer_id", "Precision by rule"):
        assert f"a picture: {picture}" in said
    assert re.search(r"customer-day +confirmed +1\b", said)


def test_4a_rules_are_measured_by_labels(place: Path, run: Run):
    said = run("04a_measure_rules.ipynb", labels=str(place / "events.parquet"), positive="is_fraud")
    assert f"{EVENTS:,} offered = {EVENTS - 1:,} stored + 1 of unknown events" in said
    for picture in ("Precision and recall over time", "Overlap of rules"):
        assert f"a picture: {picture}" in said


def test_5_maintenance_says_what_it_did_and_that_the_evaluation_can_go_on(place: Path, run: Run):
    said = run("05_maintain.ipynb")
    assert "compacted" in said
    assert "3650 days" in said
    assert "judged through commit 1, nothing waits" in said


def test_6_alerts_are_sent_to_a_receiver(place: Path, run: Run, monkeypatch: pytest.MonkeyPatch):
    declared = {"name": "desk", "webhook": {"url_env": "DESK_URL"}, "rules": ["customer-*"]}
    (place / "conf/notifiers.yml").write_text(yaml.safe_dump({"receivers": [declared]}))
    with WorkspaceServer() as server:
        monkeypatch.setenv("DESK_URL", f"{server.url}/alerts")
        server.replies["POST /alerts"] = Answer({})
        said = run("06_notify.ipynb", stream="transactions", since="2026-01-01")
    assert "customer-*" in said
    assert {asked.body["rule_id"] for asked in server.asked} == {"customer-day"}
    assert f"{len(server.asked):,} sent, 0 failed, 0 given up, 0 waiting." in said


def test_4b_an_event_without_an_alert_is_explained_and_a_rule_snoozed(place: Path, run: Run):
    # After notebook 6, which sends no alerts of a snoozed rule.
    first = str(pq.read_table(place / "events.parquet", columns=["transaction_id"])["transaction_id"][0].as_py())
    said = run(
        "04b_explain_or_snooze.ipynb", rule_id="customer-day", event_id=first, snooze_until="8 hours",
        snooze_reason="known", reviewer="kim",
    )  # fmt: skip
    assert "the condition does not hold: " in said
    assert re.search(r"customer-day.*kim", said)


def test_8_what_the_stream_wrote_is_proved(place: Path, run: Run):
    said = run("08_prove.ipynb")
    assert "transactions: commits 0 to 1: all rows match a replay." in said
    assert re.search(r"transactions +customer-day +\d+ +0 +0 +0", said)


def test_7_a_privacy_request_is_counted_first(place: Path, run: Run):
    said = run("07_forget.ipynb", where="customer_id = 596")
    assert "transactions where customer_id = 596: " in said
    assert "rows would be deleted" in said
