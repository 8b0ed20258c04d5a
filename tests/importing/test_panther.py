"""Panther's correlations and simple detections, against verdicts that were worked out by hand."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

import lookback
from lookback.cli import main
from lookback.core.streams.declaration import Stream
from lookback.importing.mapping import NameMap
from lookback.importing.panther import read_rules
from lookback.importing.report import Report
from lookback.importing.rulefiles import find_files
from lookback.importing.run import Target, write_rules
from lookback.testing.rule_tests import check_rule

FIELDS = {
    "event_id": "string", "event_time": "timestamp", "p_rule_id": "string", "user": "string", "owner": "string",
    "host": "string", "tool": "struct<name: string, version: string>", "size": "bigint", "is_admin": "boolean",
}  # fmt: skip
STREAM = Stream.from_dict({"stream": "signals", "event_id": "event_id", "event_time": "event_time", "fields": FIELDS})
START = 1_767_225_600_000_000
MINUTE = 60_000_000
Signal = tuple[float, str, "str | None"]


def correlate(detection: dict[str, Any], *tests: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Makes a correlation rule with one Sequence or Group."""
    head = {"AnalysisType": "correlation_rule", "RuleID": "My.Rule", "DisplayName": "My rule", "Severity": "High"}
    timing = {"Schedule": {"RateMinutes": 60, "TimeoutMinutes": 5}, "LookbackWindowMinutes": 90}
    return {**head, "Detection": [{**timing, **detection}], "Tests": list(tests), **more}


def group(*members: str | dict[str, Any], by: str | dict[str, str] | None = "user", **more: Any) -> dict[str, Any]:
    """Makes a Group of detections, such as `failed` with the rule id My.failed. by: the field that must be the same."""
    entries = [name_member(each) for each in members]
    names = [each["ID"] for each in entries]
    fields = dict.fromkeys(names, by) if isinstance(by, str) else by
    criteria = {"any": [{"GroupID": name, "Match": field} for name, field in (fields or {}).items()]}
    return {"Group": entries, **({"MatchCriteria": criteria} if fields else {}), **more}


def sequence(*members: str | dict[str, Any], match: list[Any] | None = None, **more: Any) -> dict[str, Any]:
    """Makes a Sequence with a transition from each detection to the next."""
    entries = [name_member(each) for each in members]
    names = [each["ID"] for each in entries]
    transitions = [
        {"ID": f"{first} to {second}", "From": first, "To": second, "Match": match or [{"On": "user"}], **more}
        for first, second in pairwise(names)
    ]
    return {"Sequence": entries, "Transitions": transitions}


def name_member(member: str | dict[str, Any]) -> dict[str, Any]:
    return {"ID": member, "RuleID": f"My.{member}"} if isinstance(member, str) else member


def absent(name: str) -> dict[str, Any]:
    return {**name_member(name), "Absence": True}


def at_least(name: str, count: int) -> dict[str, Any]:
    return {**name_member(name), "MinMatchCount": count}


def tell(expected: bool, name: str = "a test", **outputs: dict[str, dict[str, list[Any]]]) -> dict[str, Any]:
    """Makes a test: of each detection the values of fields, and when they came."""
    rows = [{"ID": key, "Matches": values} for key, values in outputs.items()]
    return {"Name": name, "ExpectedResult": expected, "RuleOutputs": rows}


def read(folder: Path, *documents: Any, names: NameMap | None = None, **how: Any) -> tuple[Report, dict[str, Any]]:
    """Imports the documents of one file. Returns the report and the documents that were written, by name."""
    source = folder / "panther" / "rules.yml"
    source.parent.mkdir(exist_ok=True)
    source.write_text(yaml.safe_dump_all(documents, sort_keys=False), encoding="utf-8")
    names = names or NameMap()
    target = Target(STREAM, folder / "rules", skeletons=folder / "skeletons")
    report = write_rules(read_rules(find_files([source]), **how), target, names)
    made = [folder / "rules" / f"{line.rule_id}.yml" for line in report.lines if line.rule_id]
    return report, {path.stem: yaml.safe_load(path.read_text()) for path in made}


def read_one(folder: Path, detection: dict[str, Any], *tests: dict[str, Any], **how: Any) -> dict[str, Any]:
    report, documents = read(folder, correlate(detection, *tests), **how)
    assert documents, report.lines[0].fidelity
    return next(iter(documents.values()))


def judge(document: dict[str, Any], *signals: Signal) -> list[str]:
    """Returns the ids of the signals that alert, e0, e1, ... signals: minutes, the detection, the user."""
    harness = lookback.Harness(STREAM)
    harness.rule({**document, "tests": []})
    rows = [
        {"event_id": f"e{number}", "event_time": START + round(at * MINUTE), "p_rule_id": f"My.{name}", "user": user}
        for number, (at, name, user) in enumerate(signals)
    ]
    harness.events(rows)
    assert not harness.errors
    return [alert.event_id or alert.window_start.strftime("%H:%M") for alert in harness.alerts]


# Correlations ----------------------------------------------------------------------------------------------------------


def test_a_group_alerts_in_any_order_within_its_time(tmp_path: Path) -> None:
    document = read_one(tmp_path, group("failed", "changed"))
    assert document["source"] == {
        "format": "panther", "id": "My.Rule",
        "fidelity": "approximated: schedule: Panther asks every 60 minutes, more alerts, or earlier ones: nothing waits "
        "for a run, or falls between two",
    }  # fmt: skip
    assert judge(document, (0, "failed", "a"), (1, "changed", "b"), (90, "changed", "a")) == ["e2"]
    assert judge(document, (0, "changed", "a"), (2, "failed", "a"), (3, "other", "a")) == ["e1"]
    assert judge(document, (0, "failed", "a"), (90.0001, "changed", "a")) == []
    assert judge(document, (0, "failed", None), (1, "changed", None)) == []


def test_a_group_counts(tmp_path: Path) -> None:
    document = read_one(tmp_path, group(at_least("failed", 3), "changed"))
    signals = [(0, "failed", "a"), (1, "changed", "a"), (2, "failed", "a"), (3, "failed", "a")]
    assert judge(document, *signals) == ["e3"]
    assert judge(document, *signals[:3]) == []


def test_a_group_without_criteria_has_one_key(tmp_path: Path) -> None:
    document = read_one(tmp_path, group("failed", "changed", by=None))
    assert judge(document, (0, "failed", "a"), (1, "changed", None)) == ["e1"]


def test_members_may_have_the_key_in_different_fields(tmp_path: Path) -> None:
    detection = group("failed", "changed", by={"failed": "user", "changed": "owner"})
    values = {"failed": {"user": {"a": [0]}}, "changed": {"owner": {"a": [5]}}}
    other = {"failed": {"user": {"a": [0]}}, "changed": {"owner": {"b": [5]}, "user": {"a": [5]}}}
    document = read_one(tmp_path, detection, tell(True, **values), tell(False, **other))
    assert document["group_by"] == [
        {"any": "case when p_rule_id = 'My.failed' then user when p_rule_id = 'My.changed' then owner end"}
    ]
    check_rule(document, {"signals": STREAM})


def test_a_signal_that_must_not_come_may_come_before_or_after(tmp_path: Path) -> None:
    """Windows are those of Panther's runs: of 90 minutes, one every hour."""
    document = read_one(tmp_path, group("changed", absent("approved")))
    assert document["window"] == {"sliding": "90 minutes", "slide": "1 hour"}
    assert document["source"]["fidelity"] == (
        "approximated: phase: Panther asks every 60 minutes, other moments: windows begin at multiples of the interval"
    )
    end = (400, "other", None)
    assert judge(document, (40, "changed", "a"), end) == ["00:00"]
    # At 70 minutes the windows from 00:00 and from 01:00 see it.
    assert judge(document, (70, "changed", "a"), end) == ["00:00", "01:00"]
    assert judge(document, (40, "changed", "a"), (50, "approved", "a"), end) == []
    assert judge(document, (40, "approved", "a"), (50, "changed", "a"), end) == []
    assert judge(document, (40, "approved", "b"), (50, "changed", "a"), end) == ["00:00"]


def test_as_schedule_asks_as_often_as_panther(tmp_path: Path) -> None:
    document = read_one(tmp_path, group("failed", "changed"), is_scheduled=True)
    assert document["source"]["fidelity"].startswith("approximated: phase: ")
    assert judge(document, (61, "failed", "a"), (85, "changed", "a"), (400, "other", None)) == ["00:00", "01:00"]
    # No run sees both, which are 31 minutes apart... but the one from 01:00 does.
    assert judge(document, (59, "failed", "a"), (91, "changed", "a"), (400, "other", None)) == []


def test_a_sequence_wants_its_order(tmp_path: Path) -> None:
    document = read_one(tmp_path, sequence("failed", "changed", WithinTimeFrameMinutes=10))
    assert judge(document, (0, "failed", "a"), (5, "changed", "b"), (10, "changed", "a")) == ["e2"]
    assert judge(document, (0, "changed", "a"), (5, "failed", "a")) == []
    assert judge(document, (0, "failed", "a"), (10.0001, "changed", "a")) == []


def test_a_sequence_counts_and_may_change_the_field(tmp_path: Path) -> None:
    detection = sequence(at_least("failed", 2), "changed", match=[{"From": "user", "To": "owner"}])
    yes = {"failed": {"user": {"a": [0, 3]}}, "changed": {"owner": {"a": [5]}}}
    no = {"failed": {"user": {"a": [0, 6]}}, "changed": {"owner": {"a": [5]}}}
    document = read_one(tmp_path, detection, tell(True, "two", **yes), tell(False, "one", **no))
    assert document["sequence"]["steps"][1]["key"] == ["owner"]
    assert [len(test["alerts"]) for test in document["tests"]] == [1, 0]
    check_rule(document, {"signals": STREAM})


def test_the_last_signal_of_a_sequence_may_be_one_that_must_not_come(tmp_path: Path) -> None:
    document = read_one(tmp_path, sequence("changed", absent("approved"), WithinTimeFrameMinutes=10))
    end = (60, "other", None)
    assert judge(document, (0, "changed", "a"), end) == ["e0"]
    assert judge(document, (0, "changed", "a"), (10, "approved", "a"), end) == []
    assert judge(document, (0, "approved", "a"), (1, "changed", "a"), end) == ["e1"]


def test_three_signals_keep_the_key_all_along(tmp_path: Path) -> None:
    document = read_one(tmp_path, sequence("failed", "changed", "deleted"))
    signals = [(0, "failed", "a"), (1, "changed", "a"), (2, "deleted", "b"), (90, "deleted", "a")]
    assert judge(document, *signals) == ["e3"]
    assert document["sequence"]["within"] == "90 minutes"


def test_the_field_of_the_key_may_change_at_each_step(tmp_path: Path) -> None:
    detection = sequence("failed", "changed", "deleted")
    first, second = detection["Transitions"]
    first["Match"], second["Match"] = [{"From": "user", "To": "owner"}], [{"From": "owner", "To": "host"}]
    outputs = {"failed": {"user": {"a": [0]}}, "changed": {"owner": {"a": [5]}}, "deleted": {"host": {"a": [9]}}}
    other = {**outputs, "deleted": {"owner": {"a": [9]}}}
    document = read_one(tmp_path, detection, tell(True, **outputs), tell(False, **other))
    keys = [step.get("key", document["group_by"]) for step in document["sequence"]["steps"]]
    assert keys == [["user"], ["owner"], ["host"]]


@pytest.mark.parametrize(
    ("detection", "reason"),
    [
        (group(absent("failed")), "absence: it has no signal that must come"),
        (group("failed", {**name_member("b"), "MaxMatchCount": 3}), "unsupported: an entry has 'MaxMatchCount'"),
        (group("failed", by={}, Other=1), "unsupported: Detection has 'Other'"),
        (group("failed", "changed", by={"failed": "user"}), "unsupported: MatchCriteria.any has no entry for 'changed'"),
        (group(absent("failed"), "changed", Schedule={"CronExpression": "0 0 * * *"}), "unsupported: Schedule.RateMin"),
        (group("failed", LookbackWindowMinutes="a"), "unsupported: LookbackWindowMinutes is 'a'"),
        (group("failed", "failed"), "unsupported: two entries have the same ID"),
        (group("failed", "changed", by="nowhere"), "unmapped-field: stream 'signals' has no field 'nowhere'"),
        (sequence(absent("failed"), "changed"), "absence: a signal that must not come is not the last"),
        (sequence("a", "b", absent("c")), "absence: more than one signal comes before"),
        (sequence("a", "b", "c", WithinTimeFrameMinutes=5), "unsupported: a transition has a time frame of its own"),
        (sequence("a", "b", "c", match=[{"From": "user", "To": "owner"}]), "unsupported: its transitions match diff"),
        (sequence("a", "b", match=["user"]), "unsupported: a transition matches 'user'"),
        ({**sequence("a", "b"), "EventEvaluationOrder": "Reverse"}, "unsupported: EventEvaluationOrder is 'Reverse'"),
        ({"Sequence": [name_member("a")], "Transitions": [{"From": "a", "To": "x"}]}, "unsupported: its transitions do"),
        ({"Group": ["a"]}, "unsupported: an entry names no RuleID: 'a'"),
    ],
)  # fmt: skip
def test_what_cannot_be_said_is_refused(tmp_path: Path, detection: dict[str, Any], reason: str) -> None:
    report, documents = read(tmp_path, correlate(detection))
    assert report.lines[0].fidelity.startswith(f"refused: {reason}")
    assert not documents


# Their tests -----------------------------------------------------------------------------------------------------------


def test_a_test_of_panther_becomes_one_of_the_rule(tmp_path: Path) -> None:
    tests = [
        tell(True, "both", changed={"user": {"a": ["2026-02-01T10:00:05Z"]}}, failed={"user": {"a": [0]}}),
        tell(True, "at once", failed={"user": {"a": [7], "b": [8]}}, changed={"user": {"a": [9], "b": [9]}}),
        tell(False, "late", failed={"user": {"a": [0]}}, changed={"user": {"a": [91]}}),
    ]
    tests[0]["RuleOutputs"][1]["Matches"]["user"]["a"] = ["2026-02-01T10:00:00Z"]
    document = read_one(tmp_path, group("failed", "changed"), *tests)
    assert document["tests"][0] == {
        "name": "both",
        "events": [
            {"event_id": "e0", "event_time": "2026-02-01T10:00:00Z", "p_rule_id": "My.failed", "user": "a"},
            {"event_id": "e1", "event_time": "2026-02-01T10:00:05Z", "p_rule_id": "My.changed", "user": "a"},
        ],
        "alerts": [{"event_id": "e1"}],
    }
    assert [len(test["alerts"]) for test in document["tests"]] == [1, 2, 0]
    check_rule(document, {"signals": STREAM})
    document["tests"][2]["alerts"] = [{"event_id": "e1"}]
    with pytest.raises(lookback.RuleError, match="alerts expected: 1, found: 0"):
        check_rule(document, {"signals": STREAM})


@pytest.mark.parametrize("expected", [True, False])
def test_a_test_of_an_absence_lies_in_one_window(tmp_path: Path, expected: bool) -> None:
    """The pair is told within the part of a window that no other covers; else another window would see only one."""
    changed = {"changed": {"user": {"a": [28]}}}
    approved = {} if expected else {"approved": {"user": {"a": [0]}}}
    document = read_one(tmp_path, group("changed", absent("approved")), tell(expected, **approved, **changed))
    (test,) = document["tests"]
    assert test["events"][0]["event_time"] == "2026-01-01T00:30:00Z"
    assert test["alerts"] == ([{"window_start": "2026-01-01T00:00:00Z", "key": {"user": "a"}}] if expected else [])
    check_rule(document, {"signals": STREAM})


def test_a_test_that_cannot_be_told_is_left_out(tmp_path: Path) -> None:
    far = tell(False, approved={"user": {"a": [0]}}, changed={"user": {"a": [30]}})
    wrong = tell(False, nobody={"user": {"a": [0]}})
    strange = {
        "Name": "x",
        "ExpectedResult": True,
        "RuleOutputs": [{"ID": "changed", "Matches": {"user": {"a": ["?"]}}}],
    }
    assert "tests" not in read_one(tmp_path, group("changed", absent("approved")), far, wrong, strange)


@pytest.mark.parametrize(("expected", "found"), [(True, "an alert, and the rule raises 0"), (False, "none, and the")])
def test_a_rule_that_fails_a_test_of_its_own_is_refused(tmp_path: Path, expected: bool, found: str) -> None:
    values: dict[str, Any] = {"failed": {"user": {"a": [0]}}}
    values |= {} if expected else {"changed": {"user": {"a": [1]}}}
    report, documents = read(tmp_path, correlate(group("failed", "changed"), tell(expected, "odd", **values)))
    assert report.lines[0].fidelity.startswith(f"refused: tests: 'odd' expects {found}")
    assert not documents


# Other detections ------------------------------------------------------------------------------------------------------


def simple(*match: Any, **more: Any) -> dict[str, Any]:
    """Makes a simple detection."""
    return {"AnalysisType": "rule", "RuleID": "My.Simple", "Severity": "Low", "Detection": list(match), **more}


@pytest.mark.parametrize(
    ("match", "sql"),
    [
        ({"Key": "user", "Condition": "Equals", "Value": "Ann"}, "user = 'Ann'"),
        ({"Key": "user", "Condition": "DoesNotEqual", "Value": "Ann"}, "not coalesce(user = 'Ann', false)"),
        ({"KeyPath": "tool.name", "Condition": "StartsWith", "Value": "x_"}, "tool.name like r'x\\_%'"),
        ({"DeepKey": ["tool", "name"], "Condition": "EndsWith", "Value": "z"}, "tool.name like '%z'"),
        ({"Key": "user", "Condition": "Contains", "Value": "n"}, "user like '%n%'"),
        ({"Key": "user", "Condition": "IsIn", "Values": ["a", "b"]}, "user in ('a', 'b')"),
        ({"Key": "size", "Condition": "Equals", "Value": 5}, "size = 5"),
        ({"Key": "is_admin", "Condition": "Equals", "Value": True}, "is_admin = true"),
        ({"Key": "user", "Condition": "Exists"}, "user is not null"),
        ({"Key": "user", "Condition": "IsNull"}, "user is null"),
        (
            {"Any": [{"Key": "user", "Condition": "Equals", "Value": "a"}, {"Key": "host", "Condition": "Exists"}]},
            "user = 'a' or host is not null",
        ),
        ({"None": [{"Key": "user", "Condition": "Equals", "Value": "a"}]}, "not coalesce(user = 'a', false)"),
    ],
)
def test_a_simple_detection_is_a_condition(tmp_path: Path, match: Any, sql: str) -> None:
    _, documents = read(tmp_path, simple(match))
    assert documents["my-simple"]["where"] == sql


def test_a_simple_detection_brings_its_tests(tmp_path: Path) -> None:
    tests = [
        {
            "Name": "yes",
            "ExpectedResult": True,
            "Log": {"tool": {"name": "x"}, "size": 5, "is_admin": True, "more": {}},
        },
        {"Name": "no", "ExpectedResult": False, "Log": {"tool": "x"}},
        {"Name": "mocked", "ExpectedResult": True, "Mocks": [1], "Log": {}},
    ]
    match = [{"KeyPath": "tool.name", "Condition": "Equals", "Value": "x"}, {"Key": "size", "Condition": "Exists"}]
    inline = [{"Key": "is_admin", "Condition": "Equals", "Value": True}]
    _, documents = read(tmp_path, simple(*match, Tests=tests, InlineFilters=inline))
    document = documents["my-simple"]
    first = {"event_id": "e0", "event_time": "2026-01-01T00:00:00Z", "tool": {"name": "x"}, "size": "5"}
    assert document["tests"][0] == {
        "name": "yes", "events": [{**first, "is_admin": True}], "alerts": [{"event_id": "e0"}],
    }  # fmt: skip
    assert [test["name"] for test in document["tests"]] == ["yes", "no"]
    check_rule(document, {"signals": STREAM})


@pytest.mark.parametrize(
    "match",
    [
        "user",
        {"Key": "user", "Condition": "AnyElement", "Expressions": []},
        {"Enrichment": {}, "Condition": "Equals", "Value": 1},
        {"Key": "user", "Condition": "Equals", "Value": 1.5},
        {"KeyPath": "users[*].name", "Condition": "Equals", "Value": "a"},
        {"Key": "user", "Condition": "IsIn", "Value": "a"},
    ],
)
def test_other_match_expressions_are_refused(tmp_path: Path, match: Any) -> None:
    report, _ = read(tmp_path, simple(match))
    assert report.lines[0].fidelity.startswith("refused: unsupported: ")


def test_a_rule_in_python_becomes_a_skeleton(tmp_path: Path) -> None:
    rule = {
        "AnalysisType": "rule", "RuleID": "My.Python", "DisplayName": "In Python", "Filename": "mine.py",
        "Severity": "Critical", "Tags": ["Two Words"], "Reports": {"MITRE ATT&CK": ["TA0003:T1098.001"]},
        "Reference": "https://example.org/a", "Runbook": "Do this.\nThen that.", "Description": "What it finds",
    }  # fmt: skip
    report, documents = read(tmp_path, rule, names=NameMap(license="Apache-2.0"))
    assert report.lines[0].fidelity == (
        "refused: python: its condition is rule() of 'mine.py'; write its condition by hand; --skeletons writes the "
        "rest of the rule"
    )
    assert not documents
    skeleton = yaml.safe_load((tmp_path / "skeletons/in-python.yml").read_text())
    assert skeleton == {
        "rule_id": "in-python", "description": "What it finds",
        "tags": ["Two-Words", "attack.ta0003", "attack.t1098.001"], "references": ["https://example.org/a"],
        "runbook": "Do this.\nThen that.", "stream": "signals", "severity": "critical", "where": "",
        "source": {
            "format": "panther", "id": "My.Python", "license": "Apache-2.0", "fidelity": report.lines[0].fidelity,
        },
    }  # fmt: skip
    with pytest.raises(lookback.RuleError, match="where is blank"):
        check_rule(skeleton, {"signals": STREAM})
    check_rule({**skeleton, "where": "user = 'a'"}, {"signals": STREAM})


def test_what_looks_at_no_events_is_refused_or_left_out(tmp_path: Path) -> None:
    kinds = ["scheduled_query", "saved_query", "scheduled_rule", "policy", "global", "pack", "datamodel"]
    documents = [{"AnalysisType": kind, "QueryName": kind, "Severity": "?"} for kind in kinds]
    report, _ = read(tmp_path, *documents, {"other": 1}, [])
    codes = [line.reasons[0].code for line in report.lines]
    assert codes == ["scheduled-query", "scheduled-query", "scheduled-query", "unsupported"]
    (tmp_path / "panther/rules.yml").write_text("a: [")
    assert [each.reasons[0].code for each in read_rules(find_files([tmp_path / "panther"]))] == ["yaml"]  # type: ignore[union-attr]


def test_the_command_writes_rules_that_pass_their_tests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "panther").mkdir()
    test = tell(True, "both", failed={"user": {"a": [0]}}, changed={"user": {"a": [5]}})
    text = yaml.safe_dump_all([correlate(group("failed", "changed"), test), simple({"Key": "user"})])
    (tmp_path / "panther/a.yml").write_text(text)
    conf, source = str(tmp_path / "conf"), str(tmp_path / "panther")
    (tmp_path / "map.yml").write_text("fields: {p_rule_id: detection}")
    words = ["--conf", conf, "import", "panther", source, "--stream", "signals", "--map", str(tmp_path / "map.yml")]
    draft = str(tmp_path / "conf/streams/signals.yml")
    assert main([*words, "--draft-stream", draft, "--skeletons", str(tmp_path / "skeletons")]) == 1
    assert "refused, unsupported: 1" in capsys.readouterr().out
    assert main(["--conf", conf, "rules", "check", f"{conf}/rules/my-rule.yml"]) == 0
    assert "valid (1 tests)" in capsys.readouterr().out.replace("(1 test)", "(1 tests)")
    document = yaml.safe_load((tmp_path / "conf/rules/my-rule.yml").read_text())
    assert document["where"] == "detection in ('My.failed', 'My.changed') and user is not null"
    assert main([*words, "--as", "schedule"]) == 1
    assert "sliding: 90 minutes" in (tmp_path / "conf/rules/my-rule.yml").read_text()
