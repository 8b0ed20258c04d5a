"""Rows of every status that a person can insert into the tables of rules and lists, on a real stream."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import pytest

import lookback
from alert_rows import read_alerts
from lookback.core.rules.commands import LISTS
from lookback.core.rules.quarantine import AUTHOR
from lookback.core.rules.versions import WARM, Piece
from lookback.spark.lists import add_values
from lookback.spark.operations.status import stream_status
from lookback.spark.replay.proof import prove
from lookback.spark.rules import RulesTable
from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder
from payins import STREAM, STREAMS, append, make_events, outputs, publish, replayed_alerts, rule, stored_alerts

if TYPE_CHECKING:
    from lookback.spark.tables.lakehouse import Tables

pytestmark = pytest.mark.spark
LISTED = rule("listed", where="in_list(shop, 'known')", when="n >= 1", message="")
AFTER = {**LISTED, "rule_id": "after"}
STATUSES = [
    "draft", "shadow", "active", "paused", "quarantined", "advance", LISTS, WARM, "warming", "rejected",
    "declared", " lists", "LISTS", "", None, "nul\0",
]  # fmt: skip
_PIECE = Piece("listed", 1, 3, 1, 1, "listed-1-3", "q").to_document(STREAM.name)
DOCUMENTS = [
    None, "", "null", "[]", "no json", "\0", "[" * 10_000, "x" * 300_000, '{"stream": null, "time": []}',
    *(json.dumps({"stream": STREAM.name, "commit": commit}) for commit in (1_000_000, 0, -1, True, 2**63 - 1, 10**30)),
    '{"stream": "payins", "commit": 1e999}', _PIECE, _PIECE.replace('"through": 3', '"through": 1e999'),
    json.dumps({**LISTED, "rule_id": "other"}),
]  # fmt: skip
VERSIONS = [None, -1, 2**63 - 1, 0, 5]


def evaluate(tables: Tables, **more: Any) -> None:
    Evaluation(tables, STREAM, STREAMS, checkpoint_folder(tables, STREAM), once=True, **more).run()


# What a person may write over version 1 of a rule: version, status and document.
BAD: dict[str, tuple[int | None, str | None, str | None]] = {
    "no-json": (2, "active", "no json"),
    "no-document": (2, "active", None),
    "no-version": (None, "active", "{}"),
    "unknown-status": (2, "Paused ", json.dumps({**LISTED, "rule_id": "unknown-status"})),
    "no-status": (2, None, json.dumps({**LISTED, "rule_id": "no-status"})),
    "other-stream": (2, "active", json.dumps({**LISTED, "rule_id": "other-stream", "stream": "none"})),
    "other-rule": (2, "shadow", json.dumps(LISTED)),
    "no-field": (2, "active", json.dumps({**LISTED, "rule_id": "no-field", "where": "colour = 1"})),
    "last-version": (2**63 - 1, "retired", json.dumps({**LISTED, "rule_id": "last-version"})),
    "damaged-retired": (2, "retired", "{"),
}


@pytest.mark.long
def test_after_a_bad_row_a_rule_is_switched_off_on_and_changed_by_the_document_that_is_in_force(ready: Tables) -> None:
    rules, events = RulesTable(ready, STREAMS), make_events(75, seed=5)
    documents = {name: rule(name, when="n >= :least", parameters={"least": 1}, message="") for name in BAD}
    publish(ready, documents.values())
    schema = "rule_id string, version long, status string, document string"
    rows = [(name, *row) for name, row in BAD.items()]
    ready.append(ready.spark.createDataFrame(rows, schema).coalesce(1), "rules")
    append(ready, [row for row in events if row["arrival"] == 1])
    evaluate(ready)
    first = {row.rule_id for row in read_alerts(ready)}
    assert first == set(BAD)
    for name in BAD:
        rules.set_status(name, "retired" if name == "no-json" else "paused")
    append(ready, [row for row in events if row["arrival"] == 2])
    evaluate(ready)
    assert {row.arrival for row in read_alerts(ready)} == {1}
    for name in BAD:
        rules.set_status(name, "active")
    assert rules.set_parameters("no-document", {"least": 2}) > 3
    assert {each["rule_id"]: each for each in rules.export()} == {
        **documents, "no-document": {**documents["no-document"], "parameters": {"least": 2}}
    }  # fmt: skip
    append(ready, [row for row in events if row["arrival"] == 3])
    evaluate(ready)
    assert {row.rule_id for row in read_alerts(ready) if row.arrival == 3} == set(BAD)


@pytest.mark.long
def test_no_row_of_a_person_stops_a_stream_its_rebuild_or_its_proof(ready: Tables) -> None:
    events = make_events(75, seed=5)
    add_values(ready, "known", ["a"])
    publish(ready, [LISTED])
    append(ready, [row for row in events if row["arrival"] == 1])
    evaluate(ready)
    numbers, authors = itertools.cycle(VERSIONS), itertools.cycle(["m", None, AUTHOR])
    rows = [
        (rule_id, next(numbers), status, document, next(authors), '{"quarantined": true}')
        for rule_id, status, document in itertools.product(("*", "a person's", None), STATUSES, DOCUMENTS)
    ]
    schema = "rule_id string, version long, status string, document string, author string, evidence string"
    ready.append(ready.spark.createDataFrame(rows, schema).coalesce(1), "rules")
    ready.spark.sql(f"INSERT INTO {ready.identifier('rules')} (rule_id, status, document, author) "
                    """VALUES ('*', 'lists', '{"stream":"payins","commit":1000000}', 'm')""")  # fmt: skip
    ready.spark.sql(
        f"INSERT INTO {ready.identifier('lists')} (list, value, expires_at, kind) VALUES "
        r"('', '', NULL, NULL), ('nul\0', 'nul\0', NULL, 'cidr'), ('known', '999.1.1.1/99', NULL, 'cidr'), "
        "('../../x', 'a', timestamp'0001-01-01', 'no kind'), (cast(X'FF' AS string), cast(X'EDA080' AS string), NULL, NULL)"
    )
    append(ready, [row for row in events if row["arrival"] == 2])
    evaluate(ready)
    publish(ready, [AFTER])
    append(ready, [row for row in events if row["arrival"] == 3])
    evaluate(ready)
    expected = lookback.replay([LISTED], events, STREAM, lists={"known": ["a"]})
    assert [row for row in stored_alerts(ready) if row.rule_id == "listed"] == replayed_alerts(expected)
    assert ready.read("alerts").where("rule_id = 'after'").count()
    told = ready.read("rule_log").where("action = 'rejected' and rule_id = '*'").collect()
    assert "the stream did not write this row" in "".join(row["message"] for row in told)
    assert {row["version"] for row in ready.read("rule_log").where("action = 'list'").collect()} == {1, 2}
    before = outputs(ready)
    evaluate(ready, rebuild=True)
    assert outputs(ready) == before
    with prove(ready, STREAM, STREAMS) as proofs:
        assert all(each.holds for each in proofs.rows)
    assert stream_status(ready, STREAM)["judged"] == 3
