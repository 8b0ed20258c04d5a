"""Rules of Flink's demo and of AWS's dynamic rules engine, against verdicts that were worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import lookback
from lookback.cli import main
from lookback.core.streams.declaration import Stream
from lookback.importing import aws, flink
from lookback.importing.jsonrules import SUFFIXES
from lookback.importing.mapping import NameMap
from lookback.importing.report import Report
from lookback.importing.rulefiles import find_files
from lookback.importing.run import Target, write_rules

FIELDS = {
    "event_id": "string", "event_time": "timestamp", "payer": "string", "kind": "string", "amount": "decimal(12,2)",
    "id": "string", "equipment": "struct<id: string>", "measureValue": "double",
}  # fmt: skip
STREAM = Stream.from_dict({"stream": "events", "event_id": "event_id", "event_time": "event_time", "fields": FIELDS})
RULE = {
    "ruleId": 1, "ruleState": "ACTIVE", "groupingKeyNames": ["payer"], "unique": [], "aggregateFieldName": "amount",
    "aggregatorFunctionType": "SUM", "limitOperatorType": "GREATER", "limit": 50, "windowMinutes": 20,
}  # fmt: skip
ENGINE = {
    "id": "r1", "name": "Mine", "status": "ACTIVE", "equipmentName": "T1", "ruleExpression": "A.getValue() > 5",
    "sensorWindowMap": {"A": 10},
}  # fmt: skip


def read(folder: Path, reader: Any, text: str) -> tuple[Report, list[dict[str, Any]]]:
    """Imports the text of a file."""
    (folder / "given.json").write_text(text)
    found = reader.read_rules(find_files([folder / "given.json"]))
    report = write_rules(found, Target(STREAM, folder / "rules"), NameMap())
    paths = [folder / f"rules/{line.rule_id}.yml" for line in report.lines if line.rule_id]
    return report, [yaml.safe_load(path.read_text()) for path in paths]


def read_one(folder: Path, reader: Any, rule: Any) -> tuple[str, dict[str, Any]]:
    report, documents = read(folder, reader, rule if isinstance(rule, str) else json.dumps(rule))
    assert documents, report.lines[0].fidelity
    return report.lines[0].fidelity, documents[0]


def judge(document: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """Returns the ids of the events that alert: e0, e1, ... `at`: minutes."""
    harness = lookback.Harness(STREAM)
    harness.rule(document)
    start = 1_772_359_200_000_000
    harness.events(
        [
            {"event_id": f"e{number}", "event_time": start + round(row.pop("at") * 60_000_000), **row}
            for number, row in enumerate(rows)
        ]
    )
    assert not harness.errors
    return [str(alert.event_id) for alert in harness.alerts]


def pay(*given: tuple[float, str | None, float]) -> list[dict[str, Any]]:
    return [{"at": at, "payer": payer, "amount": amount} for at, payer, amount in given]


def sense(*given: tuple[float, str, float]) -> list[dict[str, Any]]:
    """Makes readings: minutes, the sensor with its equipment, the value."""
    return [
        {"at": at, "id": sensor[0], "equipment": {"id": f"T{sensor[1:]}"}, "measureValue": value}
        for at, sensor, value in given
    ]


# Flink -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        RULE,
        [RULE],
        {**RULE, "limit": "50", "windowMinutes": "20", "ruleId": "1"},
        "1,(active),(payer),,(amount),(sum),(>),(50),(20)\n",
        f"\n{json.dumps(RULE)}\n\n",
    ],
)
def test_both_forms_of_a_rule_of_flink_are_read(tmp_path: Path, given: Any) -> None:
    fidelity, document = read_one(tmp_path, flink, given)
    assert fidelity == "exact"
    assert document == {
        "rule_id": "sum-amount-by-payer", "description": "SUM amount by payer",
        "source": {"format": "flink", "id": "1", "fidelity": "exact"}, "stream": "events", "severity": "medium",
        "group_by": ["payer"], "where": "payer is not null", "window": "20 minutes",
        "measures": {"found": "sum(amount)"}, "when": "found > 50", "message": "SUM amount by payer: payer {payer}",
    }  # fmt: skip
    # Both ends of the window count, as there.
    assert judge(document, pay((0, "a", 30), (20, "a", 21), (20, "b", 51), (20, None, 99))) == ["e1", "e2"]
    assert judge(document, pay((0, "a", 30), (20.0001, "a", 21))) == []


@pytest.mark.parametrize(
    ("operator", "expected"),
    [
        ("EQUAL", ["e1"]), ("NOT_EQUAL", ["e0", "e2"]), ("GREATER", ["e2"]), ("GREATER_EQUAL", ["e1", "e2"]),
        ("LESS", ["e0"]), ("LESS_EQUAL", ["e0", "e1"]),
    ],
)  # fmt: skip
def test_the_operators_of_flink(tmp_path: Path, operator: str, expected: list[str]) -> None:
    _, document = read_one(tmp_path, flink, {**RULE, "limitOperatorType": operator, "groupingKeyNames": []})
    assert "group_by" not in document
    assert judge(document, pay((0, "a", 20), (1, "b", 30), (2, None, 1))) == expected


def test_flink_counts_and_counts_again_after_an_alert(tmp_path: Path) -> None:
    count = {**RULE, "aggregateFieldName": "COUNT_FLINK", "limitOperatorType": "GREATER_EQUAL", "limit": 2}
    fidelity, document = read_one(tmp_path, flink, count)
    events = [(at, "a", 1.0) for at in range(5)]
    assert (fidelity, judge(document, pay(*events))) == ("exact", ["e1", "e2", "e3", "e4"])
    resetting = {**count, "aggregateFieldName": "COUNT_WITH_RESET_FLINK", "ruleId": 2}
    fidelity, document = read_one(tmp_path, flink, resetting)
    assert fidelity.startswith("approximated: there: a reset also empties the windows of other rules of the same key")
    assert judge(document, pay(*events)) == ["e1", "e3"]
    report, _ = read(tmp_path, flink, json.dumps([count, resetting, {**count, "ruleId": 3, "groupingKeyNames": []}]))
    assert [line.fidelity[:40] for line in report.lines] == [
        "approximated: there: a rule of the same ", "approximated: there: a reset also emptie", "exact",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"aggregatorFunctionType": "AVG"}, "there: AVG fails at the first event, since its sum is never set"),
        ({"aggregatorFunctionType": "MAX"}, "there: MAX fails at 0 and below"),
        ({"unique": ["kind"]}, "there: unique (kind) is never read"),
        ({"ruleState": "PAUSE"}, "paused, more alerts, unless you push it and then pause it"),
    ],
)
def test_the_report_says_what_was_broken_in_the_demo(tmp_path: Path, more: dict[str, Any], said: str) -> None:
    fidelity, _ = read_one(tmp_path, flink, {**RULE, **more})
    assert fidelity.startswith(f"approximated: {said}")


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"ruleState": "CONTROL", "controlType": "CLEAR_STATE_ALL"}, "command: it is the command CLEAR_STATE_ALL"),
        ({"ruleState": "DELETE"}, "command: it is the command DELETE"),
        ({"ruleState": "active"}, "engine: ruleState is 'active'"),
        ({"aggregatorFunctionType": "MEDIAN"}, "engine: aggregatorFunctionType is 'MEDIAN'"),
        ({"limitOperatorType": "=>"}, "engine: limitOperatorType is '=>'"),
        ({"limit": "much"}, "engine: limit is 'much'"),
        ({"limit": True}, "engine: limit is True"),
        ({"windowMinutes": 0}, "engine: windowMinutes is 0"),
        ({"windowMinutes": 1.5}, "engine: windowMinutes is 1.5"),
        ({"aggregateFieldName": "COUNT_FLINK", "aggregatorFunctionType": "MIN"}, "unsupported: MIN of COUNT_FLINK"),
        ({"aggregateFieldName": "nowhere"}, "unmapped-field: stream 'events' has no field 'nowhere'"),
        ({"groupingKeyNames": ["nowhere"]}, "unmapped-field: stream 'events' has no field 'nowhere'"),
    ],
)
def test_what_flink_could_not_judge_is_refused(tmp_path: Path, more: dict[str, Any], reason: str) -> None:
    report, documents = read(tmp_path, flink, json.dumps({**RULE, **more}))
    assert report.lines[0].fidelity.startswith(f"refused: {reason}")
    assert not documents


def test_the_last_rule_of_an_id_counts(tmp_path: Path) -> None:
    report, documents = read(tmp_path, flink, f"{json.dumps(RULE)}\n{json.dumps({**RULE, 'limit': 7})}\n1,(active)\n")
    assert [line.reasons[0].code for line in report.lines if line.reasons] == ["duplicate", "engine"]
    assert [document["when"] for document in documents] == ["found > 7"]


@pytest.mark.parametrize("reader", [flink, aws])
def test_a_file_that_cannot_be_read_costs_itself(tmp_path: Path, reader: Any) -> None:
    (tmp_path / "a.json").write_bytes(b"\xff\xfe")
    (tmp_path / "b.json").write_text("[" * 100_000)
    found = reader.read_rules(find_files([tmp_path], SUFFIXES))
    assert [each.reasons[0].code for each in found] == ["file", "file"]
    assert reader.read_rules(find_files([write(tmp_path / "c.json", "[]")])) == []


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


# AWS -------------------------------------------------------------------------------------------------------------------


def engine(expression: str, *sensors: str, minutes: int = 10, **more: Any) -> dict[str, Any]:
    return {**ENGINE, "ruleExpression": expression, "sensorWindowMap": dict.fromkeys(sensors or "A", minutes), **more}


def test_a_rule_of_aws_judges_the_last_values(tmp_path: Path) -> None:
    fidelity, document = read_one(
        tmp_path, aws, {"Records": [engine("(A.getValue() > 5 and B.getValue() <= -1.5)", "A", "B")]}
    )
    assert fidelity.startswith("approximated: there: each evaluation sends an alert, also one that it calls STOP")
    assert document["group_by"] == [{"equipment_id": "equipment.id"}] or document["group_by"] == ["equipment.id"]
    rows = [(0, "A1", 6), (1, "B1", -1.5), (2, "B2", -9), (3, "A1", 5), (4, "C1", 6), (5, "A1", 7), (11.5, "A1", 8)]
    # At 11.5 minutes the value of B is older than its window.
    assert judge(document, sense(*rows)) == ["e1", "e5"]


def test_nothing_is_evaluated_until_each_sensor_has_sent_a_value(tmp_path: Path) -> None:
    _, document = read_one(tmp_path, aws, engine("A.getValue() > 5 || B.getValue() > 5", "A", "B"))
    assert judge(document, sense((0, "A1", 6), (1, "B1", 0), (2, "A1", 0), (3, "A1", 9))) == ["e1", "e3"]


def test_a_value_that_has_not_changed(tmp_path: Path) -> None:
    _, document = read_one(tmp_path, aws, engine("A.hasNotChanged(5)"))
    steady = [(0, "A1", 1), (3, "A1", 1), (5, "A1", 1), (7, "A1", 2), (9, "A1", 2), (12.5, "A1", 2)]
    assert judge(document, sense(*steady)) == ["e2", "e5"]
    assert (
        read_one(tmp_path, aws, engine("A.hasNotChanged(5)"))[0].count("hasChanged and hasNotChanged compare obj") == 1
    )
    _, other = read_one(tmp_path, aws, engine("A.hasChanged(5)", id="r2"))
    assert judge(other, sense(*steady)) == ["e0", "e1", "e3", "e4"]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("A.isValueBetween(2, 3)", ["e1", "e2"]),
        ("!A.isValueBetween(2, 3)", ["e0", "e3"]),
        ("not (A.getValue() == 1 or A.getValue() ge 4.0)", ["e1", "e2"]),
        ("A.getValue() != 1 && !(A.getValue() > 3)", ["e1", "e2"]),
        ("3 lt A.getValue()", ["e3"]),
        ("A.getValue() == 1 or A.getValue() > 1 and A.getValue() < 3", ["e0", "e1"]),
    ],
)
def test_expressions(tmp_path: Path, expression: str, expected: list[str]) -> None:
    _, document = read_one(tmp_path, aws, engine(expression))
    assert judge(document, sense((0, "A1", 1), (1, "A1", 2), (2, "A1", 3), (3, "A1", 4))) == expected


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (engine("A.getMinutesSinceChange() > 5"), "unsupported: getMinutesSinceChange() of a sensor"),
        (engine("A.hasChanged(0)"), "unsupported: hasChanged(0) of a sensor"),
        (engine("A.getValue()"), "unsupported: its expression at '': it does not compare numbers"),
        (engine("A.getValue() > 'x'"), 'unsupported: its expression at "x \'": "\'" is not in sensorWindowMap'),
        (
            engine("B.getValue() > 1"),
            "unsupported: its expression at '. getValue ( ) >': 'B' is not in sensorWindowMap",
        ),
        (engine("A.getValue() > 1 A"), "unsupported: its expression at 'A': what follows is not understood"),
        (engine("(A.getValue() > 1"), "unsupported: its expression at '': ')' is missing"),
        (engine("A.isValueBetween(1, x)"), "unsupported: its expression at ')': 'x' is not a number"),
        (engine("(" * 60), "unsupported: its expression at '( ( ( ( (': it is nested too deeply"),
        (engine("", status="INACTIVE"), "command: INACTIVE takes the rule away there"),
        (engine("A.getValue() > 1", minutes=0), "engine: sensorWindowMap.A is 0"),
        ({"id": "x"}, "engine: a rule has status, ruleExpression and sensorWindowMap"),
        ("x", "engine: a rule has status, ruleExpression and sensorWindowMap"),
    ],
)
def test_other_rules_of_aws_are_refused(tmp_path: Path, rule: Any, reason: str) -> None:
    report, documents = read(tmp_path, aws, json.dumps(rule))
    assert report.lines[0].fidelity.startswith(f"refused: {reason}")
    assert not documents


@pytest.mark.parametrize(("name", "rule"), [("flink", RULE), ("aws", ENGINE)])
def test_the_commands(tmp_path: Path, name: str, rule: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "given").mkdir()
    (tmp_path / "given/rules.jsonl").write_text(json.dumps(rule))
    conf, draft = str(tmp_path / "conf"), str(tmp_path / "conf/streams/events.yml")
    words = ["--conf", conf, "import", name, str(tmp_path / "given"), "--stream", "events"]
    assert main([*words, "--draft-stream", draft]) == 0
    (made,) = (tmp_path / "conf/rules").iterdir()
    assert main(["--conf", conf, "rules", "check", str(made)]) == 0
    assert main([*words, "--strict"]) == (0 if name == "flink" else 1)
    capsys.readouterr()
