"""Bad rows in the rules table, rules that break, and authors who publish at once, on real Spark and Delta."""

from __future__ import annotations

import json
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import Row
from pyspark.sql import functions as F  # noqa: N812

import lookback
from lookback.core.errors import RuleError, SetupError
from lookback.core.rules.changes import MAX_VERSION
from lookback.core.rules.quarantine import Quarantine
from lookback.spark.following.quarantine import FILE, Quarantines
from lookback.spark.rules import RulesTable
from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder
from lookback.spark.tables.schemas import RULES as SCHEMA
from payins import RULES, STREAM, STREAMS, append, make_events, replay_of_tables, replayed_alerts, rule, stored_alerts

if TYPE_CHECKING:
    from lookback.core.streams.declaration import Stream
    from lookback.spark.tables.lakehouse import Tables

pytestmark = pytest.mark.spark
STRICT = replace(STREAM, max_failures=5)
GOOD = rule("good", when="n >= 1", message="")


def evaluate(tables: Tables, stream: Stream = STREAM) -> Evaluation:
    evaluation = Evaluation(tables, stream, {stream.name: stream}, checkpoint_folder(tables, stream), once=True)
    evaluation.run()
    return evaluation


def write(tables: Tables, *rows: tuple[Any, ...]) -> None:
    """Rows (rule_id, version, status, document) in one commit, with clocks of years past and to come."""
    schema = "rule_id string, version long, status string, document string"
    frame = tables.spark.createDataFrame(list(rows), schema)
    late = F.when(F.col("version") > 1, F.lit("1999-01-01")).otherwise("2999-01-01").cast("timestamp")
    known = frame.withColumn("author", F.lit("a person")).withColumn("comment", F.lit(None).cast("string"))
    tables.append(known.withColumn("changed_at", late).coalesce(1), "rules")


def shown(rule_id: str | None) -> str | None:
    """A rule_id as the log has it."""
    return rule_id if rule_id is None or len(rule_id) <= 103 else f"{rule_id[:100]}..."


def log_of(tables: Tables, *actions: str) -> list[tuple[str | None, int | None, str]]:
    rows = tables.read("rule_log").where(F.col("action").isin(*actions)).collect()
    return sorted(((row["rule_id"], row["version"], row["action"]) for row in rows), key=repr)


def as_row(document: dict[str, Any], version: int | None = 1, status: str = "active") -> tuple[Any, ...]:
    return (document["rule_id"], version, status, json.dumps(document))


@pytest.mark.long
def test_c4_bad_rows_are_rejected_alone_while_the_stream_judges(ready: Tables) -> None:
    bad = [
        ("good", 2, "active", "no json"),
        ("good", 3, "active", "x" * 10_000_000),
        ("good", 4, "active", "[" * 10_000 + "]" * 10_000),
        ("good", 5, "ACTIVE", json.dumps(GOOD)),
        ("good", 6, None, json.dumps(GOOD)),
        ("good", 7, "active", json.dumps({**GOOD, "stream": ["payins"]})),
        ("good", 8, "active", json.dumps(GOOD)[:-1] + ', "message": "\\ud800"}'),
        ("good", -1, "active", json.dumps(GOOD)),
        ("good", 2**63 - 1, "active", json.dumps(GOOD)),
        ("r" * 1_000_000, 1, "active", "{}"),
        ("nul\0", 1, "active", "{}"),
        ("\u202eright", 1, "a" * 1_000_000, "{}"),
        ("*", None, "clear_state", '{"stream": []}'),
        ("*", None, "advance", json.dumps({"time": 10**30})),
        (None, None, None, None),
    ]  # fmt: skip
    twice = [as_row({**GOOD, "rule_id": "twice", "message": message}, 2) for message in ("b", "a", "c")]
    write(ready, as_row(GOOD), *bad, *twice)
    # Bytes that are no text.
    ident = ready.identifier("rules")
    ready.spark.sql(
        f"INSERT INTO {ident} (rule_id, version, status, document) "
        "VALUES (cast(X'FF' AS string), 1, 'active', cast(X'EDA080' AS string))"
    )
    events = make_events(100, seed=5)
    append(ready, [row for row in events if row["arrival"] <= 2])
    evaluate(ready)
    # What a person does by SQL to rows in force: another rule_id, another version, all rows written again as they were.
    ready.spark.sql(f"UPDATE {ident} SET rule_id = 'twenty' WHERE rule_id = 'twice' AND document LIKE '%\"a\"%'")
    ready.spark.sql(
        f"MERGE INTO {ident} t USING (SELECT 'good' AS id) s ON t.rule_id = s.id AND t.version = 1 "
        f"WHEN MATCHED THEN UPDATE SET t.comment = 'checked'"
    )
    append(ready, [row for row in events if row["arrival"] > 2])
    evaluate(ready)
    rejected = ready.read("rule_log").where("action = 'rejected'").collect()
    first = [row for row in rejected if row["arrival"] is None]
    told = Counter((row["rule_id"], row["version"]) for row in first)
    # Of the three rows of one version the first in order is taken, and each of the two others is told.
    others = [("twice", 2), ("twice", 2), ("\ufffd", 1)]
    assert told == Counter([*((shown(rule_id), version) for rule_id, version, _, _ in bad), *others])
    assert max(len(row["message"]) for row in rejected) < 700
    assert max(len(row["rule_id"] or "") for row in rejected) <= 103
    # The renamed document still names the old rule, which has no row in force any more.
    assert log_of(ready, "activated", "retired") == [
        ("good", 1, "activated"), ("twice", 2, "activated"), ("twice", 2, "retired"),
    ]  # fmt: skip
    assert [(row["rule_id"], row["version"]) for row in rejected if row not in first] == [("twenty", 2)]
    alerts = ready.read("alerts").where("rule_id = 'good'").count()
    assert alerts == len(lookback.replay([GOOD], events, STREAM).alerts) > 50
    (message,) = {row["message"] for row in ready.read("alerts").where("rule_id = 'twice'").collect()}
    assert message == "a"
    # The table can still be read by those who list and publish.
    rules = RulesTable(ready, STREAMS)
    assert {row.rule_id for row in rules.rows()} >= {"good", "twenty"}
    assert rules.push(GOOD) == 9
    write(ready, as_row(GOOD, MAX_VERSION - 1))
    with pytest.raises(RuleError, match="version 9,223,372,036,854,775,805, the maximum; delete that row"):
        rules.push(GOOD)


@pytest.mark.long
def test_c4_a_rule_that_fails_too_often_or_breaks_is_quarantined_once_and_comes_back(
    ready: Tables, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(checkpoint_folder(ready, STRICT))
    divides = rule("divides", when="total / (n - n) > 1", message="")
    few = rule("few", when="if(amount = 13.13, total / (n - n), total) > 1000000", message="")
    breaks = rule("breaks", group_by=[], late="revise", when="n >= 1", message="")
    write(ready, *(as_row(each) for each in (GOOD, divides, few, breaks)))
    events = make_events(150, seed=2)
    events[3]["amount"] = "13.13"

    class Broken(int):
        """A number that nothing can be compared with; the workers of Spark get it as it is, since it has no module."""

        def __lt__(self, other: object) -> bool:
            raise ArithmeticError("no such number")

    strict = replace(STRICT, max_revisions=Broken(1_000))
    append(ready, [row for row in events if row["arrival"] == 1])
    # As if it had been killed before it could publish.
    with monkeypatch.context() as patch:
        patch.setattr(Quarantines, "publish", lambda *_, **__: None)
        (report,) = evaluate(ready, strict).reports
    assert {failure.rule_id: failure.count for failure in report.failures}["few"] == 1
    assert [report.by_rule[name].failed for name in ("few", "breaks", "good")] == [1, 1, 0]
    assert {(each["rule_id"], each["version"]) for each in json.loads((folder / FILE).read_text())} == {
        ("breaks", 1), ("divides", 1),
    }  # fmt: skip
    failed = {row["rule_id"]: row["message"] for row in ready.read("rule_log").where("action = 'failed'").collect()}
    assert set(failed) == {"few", "divides", "breaks"}
    assert "judging failed with ArithmeticError: no such number" in failed["breaks"]
    # A table that cannot be written stops nothing; what waits is published with the next run, before it begins.
    checkpoint = Evaluation(ready, STRICT, STREAMS, folder).checkpoint
    with monkeypatch.context() as patch:
        patch.setattr(RulesTable, "quarantine", lambda *_: (_ for _ in ()).throw(SetupError("others keep writing")))
        Quarantines(ready, STRICT, STREAMS, checkpoint).publish(at_once=True)
    assert "could not be quarantined, will retry: others keep writing" in caplog.text
    append(ready, [row for row in events if row["arrival"] in (2, 3)])
    evaluate(ready, STRICT)
    assert not (folder / FILE).exists()
    assert log_of(ready, "quarantined") == [("breaks", 2, "quarantined"), ("divides", 2, "quarantined")]
    published = ready.read("rules").where("status = 'quarantined'").collect()
    assert {(row["rule_id"], row["version"], row["author"]) for row in published} == {
        ("divides", 2, "lookback"), ("breaks", 2, "lookback"),
    }  # fmt: skip
    assert len(published) == 2
    assert all("fix the rule and push it again" in row["comment"] for row in published)
    # Saying it once more changes nothing.
    again = Quarantines(ready, STRICT, STREAMS, checkpoint)
    again.add_failures(report)
    again.publish()
    assert ready.read("rules").where("status = 'quarantined'").count() == 2
    # The author mends one, in the version after the engine's.
    mended = {**divides, "when": "n >= 1"}
    assert RulesTable(ready, STREAMS).push(mended) == 3
    append(ready, [row for row in events if row["arrival"] > 3])
    evaluate(ready, STRICT)
    found = stored_alerts(ready)
    counts = Counter(row.rule_id for row in found)
    assert counts["breaks"] == 0
    assert counts["divides"] > 30
    # In a replay the number is whole, so the rule alerts until its quarantine.
    assert found == [row for row in replayed_alerts(replay_of_tables(ready)) if row.rule_id != "breaks"]
    assert ready.read("rules").where("status = 'quarantined'").count() == 2


@pytest.mark.long
def test_c4_the_engine_publishes_no_quarantine_where_the_author_was_first(ready: Tables) -> None:
    rules = RulesTable(ready, STREAMS)
    documents = {name: rule(name) for name in ("plain", "newer", "drafted", "wrong", "unnumbered")}
    write(
        ready,
        *(as_row(document, None if name == "unnumbered" else 4) for name, document in documents.items()),
        as_row(documents["newer"], 5, "paused"), as_row(documents["drafted"], 5, "draft"), ("wrong", 5, "active", "{}"),
    )  # fmt: skip
    named = {name: Quarantine(name, 4, "why") for name in [*documents, "gone"]}
    assert {name: rules.quarantine(each) for name, each in named.items()} == {
        "plain": True, "newer": False, "drafted": True, "wrong": True, "unnumbered": True, "gone": False,
    }  # fmt: skip
    assert not any(rules.quarantine(each) for each in named.values())
    quarantined = ready.read("rules").where("status = 'quarantined'").collect()
    assert {(row["rule_id"], row["version"], json.loads(row["document"])["rule_id"]) for row in quarantined} == {
        (name, version, name) for name, version in (("plain", 5), ("drafted", 6), ("wrong", 6), ("unnumbered", 5))
    }


@pytest.mark.long
def test_c4_authors_who_publish_at_once_lose_no_version(ready: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = RulesTable(ready, STREAMS)
    assert rules.push(RULES[0], author="ann") == 1
    read, meeting = RulesTable._read_rows, threading.Barrier(3)
    met: set[int] = set()

    def together(self: RulesTable, rule_id: str) -> Any:
        rows = read(self, rule_id)
        # Each reads before any of them writes.
        if threading.get_ident() not in met:
            met.add(threading.get_ident())
            meeting.wait(60)
        return rows

    monkeypatch.setattr(RulesTable, "_read_rows", together)
    versions: dict[str, int] = {}
    rule_id = RULES[0]["rule_id"]

    def author(name: str) -> None:
        if name == "cat":
            versions[name] = rules.set_status(rule_id, "paused", author=name)
        else:
            versions[name] = rules.push({**RULES[0], "message": name}, author=name)

    threads = [threading.Thread(target=author, args=(name,)) for name in ("ann", "bob", "cat")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(versions.values()) == [2, 3, 4]
    rows = {row["version"]: row for row in ready.read("rules").collect()}
    assert {row["author"]: version for version, row in rows.items() if version > 1} == versions
    # Whoever paused it paused what was there, whatever the others had published by then.
    paused = versions["cat"]
    before = rows[paused - 1]["document"]
    assert json.loads(rows[paused]["document"]) == json.loads(before)
    assert rows[paused]["status"] == "paused"


@pytest.mark.long
def test_the_first_two_authors_of_a_place_lose_no_version(ready: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    rules, insert, meeting = RulesTable(ready, STREAMS), RulesTable._insert, threading.Barrier(2, timeout=60)
    assert ready.is_unwritten("rules")

    def together(self: RulesTable, rows: Any, news: Any) -> bool:
        # Each has read before any of them writes; the one that comes second tries again alone.
        if news[0].version == 1:
            meeting.wait()
        return insert(self, rows, news)

    monkeypatch.setattr(RulesTable, "_insert", together)
    versions: list[int] = []
    threads = [threading.Thread(target=lambda: versions.append(rules.push(GOOD))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(versions) == [1, 2]
    assert sorted(row["version"] for row in ready.read("rules").collect()) == [1, 2]


def test_an_author_who_always_comes_second_is_told_who_was_first(
    tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = RulesTable(tables, STREAMS)
    rows = [Row(*SCHEMA.names)("good", 1, "active", json.dumps(GOOD), "ann", "", None, None, None)]
    monkeypatch.setattr(RulesTable, "_read_rows", lambda *_: rows)
    monkeypatch.setattr(RulesTable, "_insert", lambda *_: False)
    monkeypatch.setattr("lookback.spark.rules._MAX_PAUSE_SECONDS", 0.0)
    with pytest.raises(SetupError, match=r"during each of 20 attempts; the last version, 1, is by ann\. Look at"):
        rules.push(GOOD, author="bob")


@pytest.mark.long
def test_rules_are_published_in_one_commit_or_not_at_all(ready: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = RulesTable(ready, STREAMS)
    documents = [{**GOOD, "rule_id": f"r{number}"} for number in range(20)]
    assert rules.push_all(documents[:3], author="ann") == [("r0", 1), ("r1", 1), ("r2", 1)]
    version = ready.version("rules")
    with pytest.raises(RuleError, match="r7"):
        rules.push_all([*documents[:7], {**documents[7], "when": "nothing > 1"}])
    assert ready.version("rules") == version
    # While they are published, somebody else publishes one of them.
    insert = RulesTable._insert

    def come_second(self: RulesTable, rows: Any, news: Any) -> bool:
        monkeypatch.setattr(RulesTable, "_insert", insert)
        assert rules.push({**documents[1], "message": "bob's"}, author="bob") == 2
        return insert(self, rows, news)

    monkeypatch.setattr(RulesTable, "_insert", come_second)
    again = {**documents[4], "message": "again"}
    found = rules.push_all([*documents, again], status="shadow", author="cat", comment="all")
    assert found == [(f"r{n}", {0: 2, 1: 3, 2: 2}.get(n, 1)) for n in range(20)] + [("r4", 2)]
    assert ready.version("rules") == version + 3
    by_author = Counter((row["author"], row["status"]) for row in ready.read("rules").collect())
    assert by_author == {("ann", "active"): 3, ("bob", "active"): 1, ("cat", "shadow"): 21}
    assert [json.loads(row["document"])["message"] for row in rules_of(ready, "r4", 2)] == ["again"]


def rules_of(tables: Tables, rule_id: str, version: int) -> list[Row]:
    return tables.read("rules").where(f"rule_id = '{rule_id}' AND version = {version}").collect()
