"""Remarks: what is right to write and may not mean what its author meant. They stop nothing."""

from __future__ import annotations

import datetime as dt
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml

import lookback
from lookback.cli import main
from lookback.config import load_rule_document, load_streams
from lookback.core.expressions.syntax import find_lost_backslashes
from lookback.core.rules.compiling import compile_rule
from lookback.core.rules.remarks import find_remarks
from lookback.core.streams.declaration import Stream
from lookback.data_remarks import find_data_remarks

CONF = Path(__file__).parents[3] / "conf"
START = dt.datetime(2026, 3, 1, 10, tzinfo=dt.timezone.utc)
FIELDS = {
    "id": "bigint", "at": "timestamp", "customer": "string", "status": "string", "country": "string", "empty": "string",
    "amount": "decimal(18,2)", "fee": "decimal(18,2)", "qty": "int", "score": "double", "paid": "timestamp",
}  # fmt: skip
STREAM = Stream.from_dict({"stream": "orders", "event_id": "id", "event_time": "at", "fields": FIELDS})
RULE = {
    "rule_id": "r", "stream": "orders", "group_by": ["customer"], "window": "30 days",
    "measures": {"usual": "avg(amount)", "n": "count(*)"}, "when": "n >= 2", "tests": [{"events": []}],
}  # fmt: skip


def remarks(**changes: Any) -> list[str]:
    document = {name: value for name, value in {**RULE, **changes}.items() if value is not None}
    return [str(remark) for remark in find_remarks(compile_rule(document, STREAM))]


# What never holds, or is read otherwise -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "message", "remedy"),
    [
        ("hour(at) between 22 and 6", "hour(at) between 22 and 6 holds for no value", "hour(at) >= 22 or hour(at) <= 6"),
        ("qty between 2.5 and 1", "qty between 2.5 and 1 holds for no value", "qty between 1 and 2.5"),
        ("hour(at) not between 22 and 6", "not between 22 and 6 holds for every value", "hour(at) > 6 and hour(at) < 22"),
        ("not (qty between 2.5 and 1)", "qty not between 2.5 and 1 holds for every value", "qty not between 1 and 2.5"),
        ("status between 'b' and 'a'", "status between 'b' and 'a' holds for no value", "status between 'a' and 'b'"),
        ("paid between '2026-10-1' and '2026-9-30'", "holds for no value", "paid between '2026-9-30' and '2026-10-1'"),
        ("status = null", "a comparison of status with NULL is never true", "status is null"),
        ("qty > 3 or null <> lower(status)", "a comparison of lower(status) with NULL is never true", "lower(status) is not null"),
        ("status not in ('a', null)", "status not in ('a', NULL) is never true", "status not in ('a')"),
        ("not (status in (null, 'a', 'b'))", "status not in (NULL, 'a', 'b') is never true", "status not in ('a', 'b')"),
        ("status in (null)", "status in (NULL) is never true", "status is null"),
        ("qty between null and 3", "qty between NULL and 3 is never true", "a bound is NULL"),
    ],
)  # fmt: skip
def test_a_condition_that_never_holds_is_remarked_with_what_to_write(where: str, message: str, remedy: str):
    (found,) = remarks(where=where)
    assert message in found
    assert remedy in found
    assert found.endswith("(where)")


@pytest.mark.parametrize(
    "where",
    [
        "hour(at) between 6 and 22", "qty between 3 and 3", "status in ('a', null)", "status <=> null", "status is null",
        "paid between '2026-9-30' and '2026-10-1'", "qty between qty and 3", "status not in ('a', 'b')",
    ],
)  # fmt: skip
def test_a_condition_that_may_hold_is_not_remarked(where: str):
    assert remarks(where=where) == []


def test_a_condition_is_remarked_wherever_it_stands():
    measures = {"n": "count(*) filter (where status = null)"}
    assert [text.rpartition("(")[2] for text in remarks(measures=measures, when="n > null")] == ["measures.n)", "when)"]
    steps = [{"name": "a", "where": "status = null"}, {"name": "b", "where": "true"}]
    sequence = {"within": "1 hour", "steps": steps, "until": "qty = null"}
    found = remarks(sequence=sequence, window=None, measures=None, when=None)
    assert [text.rpartition("(")[2] for text in found] == ["sequence.steps[0].where)", "sequence.until)"]


@pytest.mark.parametrize(
    ("where", "read", "remedy"),
    [
        (r"contains(status, '\temp\new')", r"\t as a tab and \n as a line break", r"'\\temp\\new'"),
        (r"status = 'C:\dir'", r"\d as d", r"'C:\\dir'"),
        (r"status like '%\dir%'", r"\d as d", r"'%\\\\dir%'"),
        (r"status not ilike '%\dir%'", r"\d as d", r"'%\\\\dir%'"),
        (r"status like ('%\dir')", r"\d as d", r"'%\\\\dir'"),
        (r"status ilike any ('x', '%\dir')", r"\d as d", r"'%\\\\dir'"),
        (r"status = 'D:\101x'", r"\101 as 'A'", r"'D:\\101x'"),
        (r"status = 'C:\\Temp\User'", r"\U as U", r"'C:\\Temp\\User'"),
    ],
)
def test_a_backslash_that_sql_takes_away_is_remarked(where: str, read: str, remedy: str):
    (found,) = remarks(where=where)
    assert f"SQL reads {read}; for a backslash write {remedy}" in found
    # What is written then is read as what was meant, and not remarked.
    written = found.partition("write ")[2].partition(", and in")[0]
    before = where[where.index("'") : where.rindex("'") + 1]
    assert remarks(where=where.replace(before, written)) == []


def test_only_a_pattern_needs_four_backslashes():
    (found,) = find_lost_backslashes(r"status like 'x' and contains(status, '\dir')")
    assert found.remedy == r"'\\dir'"


@pytest.mark.parametrize(
    "where", [r"contains(status, '\n')", r"contains(status, '\r\n')", r"status = 'it\'s'", r"status like 'a\_b'", r"status = '\\x'"]
)  # fmt: skip
def test_a_backslash_that_is_meant_is_not_remarked(where: str):
    assert remarks(where=where) == []


@pytest.mark.parametrize(
    "where",
    ["score > 5", "score >= qty", "5 < score", "not score <= 5", "abs(score) * 2 > 5", "score > 5 or score < 3", "qty > 0 and not (5 > -score)", "score not between 1 and 5", "not (score + 1 between 1 and 5)", "sqrt(score) > 5"],
)  # fmt: skip
def test_a_limit_that_nan_passes_is_remarked(where: str):
    (found,) = remarks(where=where)
    assert "holds where score is NaN, which is greater than every number; write not isnan(score) and" in found
    assert remarks(where=f"not isnan(score) and ({where})") == []


@pytest.mark.parametrize(
    "where",
    ["score < 5", "score > 5 and score < 10", "nanvl(score, 0) > 5", "cast(score as decimal(9,2)) > 5", "score between 5 and 9", "amount > 5"],
)  # fmt: skip
def test_a_limit_that_nan_does_not_pass_is_not_remarked(where: str):
    assert remarks(where=where) == []


def test_a_measure_that_may_be_nan_is_remarked():
    (found,) = remarks(measures={"top": "max(score)", "mean": "avg(qty)"}, when="top > 5 or mean > 5")
    assert "holds where top is NaN" in found
    assert found.endswith("(when)")
    assert remarks(where="not isnan(score)", measures={"top": "max(score)"}, when="top > 5") == []


@pytest.mark.parametrize(
    ("absent", "more", "is_remarked"),
    [
        ("status = 'shipped' and array_contains(ordered.qty, qty)", {}, True),
        ("qty = element_at(ordered.qty, 1)", {}, True),
        ("qty = element_at(ORDERED.qty, (2))", {"at_most": 3}, True),
        ("qty = element_at(ordered.qty, -1)", {}, False),
        ("qty = element_at(ordered.qty, 1)", {"at_most": 1}, False),
        ("array_contains(ordered.qty, qty)", {"at_least": 3}, False),
        ("status = 'shipped'", {}, False),
    ],
)
def test_an_absence_that_another_event_of_the_step_can_end_is_remarked(
    absent: str, more: dict[str, int], is_remarked: bool
):
    steps = [
        {"name": "ordered", "where": "status = 'paid'", **more}, {"name": "shipped", "absent": absent, "within": "1 hour"},
    ]  # fmt: skip
    found = remarks(where=None, window=None, measures=None, when=None, sequence={"within": "1 hour", "steps": steps})
    told = [each for each in found if "[1].absent" in each]
    assert len(told) == is_remarked
    assert all("qty, -1) for the event that began the wait" in each for each in told)


def test_the_rules_that_ship_are_fine():
    streams = load_streams(CONF)
    for path in sorted((CONF / "rules").glob("*.yml")):
        document = load_rule_document(path)
        found = find_remarks(compile_rule(document, streams[document["stream"]]))
        assert [each for each in found if each.place not in ("tests", "queue", "window")] == [], path


# An outlier in its own average ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "when",
    [
        "amount > 3 * usual", "3 * usual < amount and n > 5", "amount / usual > 3", "n > 5 or not (amount <= usual + 10)",
        "amount between usual and 10 * usual", "coalesce(amount, 0) > usual", "Amount > 3 * USUAL",
    ],
)  # fmt: skip
def test_a_field_beside_its_own_average_is_remarked_with_the_recipe(when: str):
    assert remarks(when=when) == [
        (
            "amount is compared with usual, the average of amount over a window that holds the event itself, so an outlier "
            "moves its own limit; to leave the event out write `usual: {measure: avg(amount), window: {lookback: 30 days, "
            "delay: 1 microsecond}}` (when)"
        )
    ]


def test_the_recipe_of_the_remark_is_taken_and_silences_it():
    (remark,) = remarks(when="amount > 3 * usual")
    written = yaml.safe_load(remark.partition("write `")[2].partition("`")[0])
    assert remarks(measures={**RULE["measures"], **written}, when="amount > 3 * usual") == []


def test_the_last_value_of_a_window_with_the_event_is_its_own():
    (remark,) = remarks(measures={"before": "last(amount)"}, when="amount <> before")
    assert remark.startswith(
        "amount is compared with before, the last of amount over a window that holds the event itself"
    )
    assert "so it is compared with itself" in remark
    written = yaml.safe_load(remark.partition("write `")[2].partition("`")[0])
    assert remarks(measures=written, when="amount <> before") == []
    # These are of an event that may be another one.
    assert remarks(measures={"large": "last(amount) filter (where amount > 9)"}, when="amount <> large") == []
    assert remarks(measures={"begin": "first(amount)"}, when="amount <> begin") == []


def test_the_recipe_finds_the_outlier_that_its_own_average_hides():
    rows = [
        {"id": at, "at": START + dt.timedelta(hours=at), "customer": "a", "amount": 20 if at < 2 else 100}
        for at in range(3)
    ]
    plain = {**RULE, "when": "amount > 3 * usual"}
    left_out = {
        **plain,
        "measures": {"usual": {"measure": "avg(amount)", "window": {"lookback": "30 days", "delay": "1 microsecond"}}},
    }
    assert len(lookback.replay([plain], rows, STREAM).alerts) == 0  # 100 > 3 * 46.67 is false
    (alert,) = lookback.replay([left_out], rows, STREAM).alerts
    assert (alert.event_id, alert.measures["usual"]) == ("2", Decimal("20.000000"))


@pytest.mark.parametrize(
    ("measures", "when", "remarked"),
    [
        ({"top": "max(amount)"}, "amount >= top", False),  # the largest so far, which needs the event
        ({"top": "max(amount)"}, "amount = top", False),
        ({"top": "max(amount)"}, "amount > top", True),
        ({"top": "max(amount)"}, "amount >= 2 * top", True),
        ({"total": "sum(amount)"}, "amount > 0.8 * total", True),
        ({"spread": "stddev_samp(amount)"}, "cast(amount as double) > 3 * spread", True),
        ({"n": "count(amount)"}, "amount > n", False),
        ({"usual": "avg(fee)"}, "amount > 3 * usual", False),
        ({"usual": "avg(amount)"}, "amount > 3 and usual > 5", False),
        ({"usual": "avg(amount + fee)"}, "fee > usual", True),
        ({"usual": "avg(amount)", "total": {"measure": "sum(amount)", "window": "1 hour"}}, "total > 3 * usual", False),
    ],
)
def test_other_comparisons_are_remarked_where_an_outlier_moves_its_limit(
    measures: dict[str, Any], when: str, remarked: bool
):
    assert bool(remarks(measures=measures, when=when)) is remarked


def test_a_window_with_many_events_has_no_event_of_its_own():
    assert remarks(window={"tumbling": "1 day"}, when="usual > 3") == []


# Weeks ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "remarked"),
    [
        ({"tumbling": "1 week"}, True),
        ({"tumbling": "14 days"}, True),
        ({"tumbling": "168 hours"}, True),
        ({"tumbling": "1 week", "offset": "4 days"}, False),
        ({"tumbling": "1 day"}, False),
        ({"sliding": "2 weeks", "slide": "1 week"}, True),
        ({"sliding": "1 week", "slide": "1 day"}, False),
        ("7 days", False),
    ],
)
def test_windows_of_whole_weeks_begin_on_thursdays(window: Any, remarked: bool):
    found = remarks(window=window, when="n > 1")
    assert bool(found) is remarked
    if remarked:
        assert "begins on a Thursday, as 1 January 1970 was, at 00:00 UTC" in found[0]


@pytest.mark.parametrize(("offset", "day"), [(None, 3), ("4 days", 0), ("3 days", 6)])
def test_the_days_that_the_remark_names_are_so(offset: str | None, day: int):
    window = {"tumbling": "1 week", **({"offset": offset} if offset else {})}
    rows = [{"id": at, "at": START + dt.timedelta(days=at), "customer": "a"} for at in range(15)]
    rule = {**RULE, "window": window, "when": None}
    alerts = lookback.replay([{k: v for k, v in rule.items() if v is not None}], rows, STREAM).alerts
    assert {alert.window_start.weekday() for alert in alerts} == {day}


@pytest.mark.parametrize(
    ("changes", "remarked"),
    [
        ({"when": None}, True), ({"when": None, "queue": True}, True), ({"when": None, "queue": False}, False),
        ({"when": None, "severity": "info"}, False), ({"when": None, "severity": "info", "queue": True}, True), ({}, False),
    ],
)  # fmt: skip
def test_windows_that_each_wait_for_a_person_are_remarked_unless_they_are_reports(
    changes: dict[str, Any], remarked: bool
):
    for window in ({"tumbling": "1 day"}, {"sliding": "1 hour", "slide": "5 minutes"}, {"session": "1 hour"}):
        found = remarks(window=window, **changes)
        remark = (
            "without `when` every window with an event raises an alert, and each waits for a person; write `queue: false` if "
            "they are reports, or a condition (queue)"
        )
        assert found == [remark] * remarked


def test_a_rule_without_tests_is_remarked():
    assert remarks(tests=None) == [
        "tests is missing; write an alert that you want and a near miss, so that a change cannot break them (tests)"
    ]


@pytest.mark.parametrize("file", sorted((CONF / "rules").glob("*.yml")), ids=lambda file: file.stem)
def test_nothing_is_remarked_on_the_rules_that_ship(file: Path):
    document = load_rule_document(file)
    assert find_remarks(compile_rule(document, load_streams(CONF)[document["stream"]])) == []


# Beside history ------------------------------------------------------------------------------------------------------


def history(count: int = 40) -> pa.Table:
    return pa.Table.from_pylist(
        [
            {
                "id": at, "at": START + dt.timedelta(minutes=at), "customer": f"c{at % 2}",
                "status": "DECLINED" if at % 4 == 0 else "PAID", "country": ["DE", "FR", "BE", "NL", "LU"][at % 5],
                "empty": None, "amount": Decimal(at), "fee": Decimal(1), "qty": at % 3, "arrival": at + 1,
            }
            for at in range(count)
        ],
        pa.schema([*((n, pa.decimal128(18, 2) if n in ("amount", "fee") else t) for n, t in (
            ("id", pa.int64()), ("at", pa.timestamp("us", "UTC")), ("customer", pa.string()), ("status", pa.string()),
            ("country", pa.string()), ("empty", pa.string()), ("amount", None), ("fee", None), ("qty", pa.int32()),
            ("arrival", pa.int64()))),
        ]),
    )  # fmt: skip


def seen(**changes: Any) -> list[str]:
    document = {name: value for name, value in {**RULE, **changes}.items() if value is not None}
    return [str(remark) for remark in find_data_remarks(compile_rule(document, STREAM), STREAM, history())]


def test_a_text_that_was_never_seen_is_named_with_the_one_that_was():
    assert seen(where="status = 'declined'") == [
        "'declined' was never seen in status; did you mean 'DECLINED', of 10 events? (where)",
        "matched none of 40 events; the rule would see nothing (where)",
    ]


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("status in ('PAID', 'DECLIND')", "'DECLIND' was never seen in status; did you mean 'DECLINED', of 10 events?"),
        ("status <> ' paid'", "' paid' was never seen in status; did you mean 'PAID', of 30 events?"),
        (
            "'XX' = country or qty = 1",
            "'XX' was never seen in country; there are 'DE' (8), 'FR' (8), 'BE' (8), 'NL' (8), ...",
        ),
        ("coalesce(empty, 'x') = 'y' or qty = 1", "'y' was never seen in COALESCE(`empty`, 'x'); there are 'x' (40)"),
        ("empty = 'x' or qty = 1", "'x' was never seen in empty; it has no value in any event"),
        ("not (lower(status) = 'DECLINED')", "did you mean 'declined', of 10 events?"),
        ("`status` <=> 'paid' or qty = 1", "did you mean 'PAID'"),
    ],
)
def test_every_way_to_compare_a_text(where: str, said: str):
    found = seen(where=where)
    assert len(found) == 1
    assert said in found[0]


def test_what_was_seen_is_not_remarked():
    assert seen(where="status = 'DECLINED' and country in ('DE', 'FR')") == []
    assert seen(where="lower(status) = 'declined' and concat(country, '') <> 'DE'") == []


def test_filters_conditions_and_steps_are_looked_at_too():
    measures = {"n": "count(*)", "m": "count(*) filter (where status = 'paid')"}
    assert seen(measures=measures) == [
        "'paid' was never seen in status; did you mean 'PAID', of 30 events? (measures.m)",
        "the filter matched none of 40 events (measures.m)",
    ]
    assert seen(when="n >= 2 and status = 'paid'") == [
        "'paid' was never seen in status; did you mean 'PAID', of 30 events? (when)",
        (
            "would have raised no alert over 40 events from 2026-03-01T10:00:00Z to 2026-03-01T10:39:00Z: nothing satisfied it (when)"
        ),
    ]
    steps = [
        {"name": "a", "where": "status = 'PAID'"},
        {"name": "b", "where": "amount > 1000 and country <> element_at(a.country, 1)"},
    ]
    found = seen(
        window=None, measures=None, when=None, sequence={"within": "1 hour", "steps": steps, "until": "qty > 9"}
    )
    assert found[:2] == [
        "the condition matched none of 40 events (sequence.steps[1].where)",
        "the condition matched none of 40 events (sequence.until)",
    ]
    assert "would have raised no alert over 40 events" in found[2]


def test_a_condition_that_history_never_satisfied_is_remarked_whatever_its_range_or_suppression():
    assert len(seen(when="n >= 1000")) == 1
    assert seen(effective_from="2030-01-01T00:00:00Z", suppress="1 day") == []
    assert "no window has ended" in seen(window={"tumbling": "1 day"}, when=None)[0]


def test_events_that_could_not_be_judged_are_remarked():
    (remark,) = seen(when="amount / qty > 1")
    assert remark.startswith("14 events could not be judged (overflow, division by zero or a cast); the first is 0")


def test_without_events_nothing_is_said():
    assert find_data_remarks(compile_rule(RULE, STREAM), STREAM, history(0)) == []


# The command ---------------------------------------------------------------------------------------------------------


def test_check_prints_remarks_and_ends_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rule = {**load_rule_document(CONF / "rules/large-payment.yml"), "tests": []}
    file = tmp_path / "r.yml"
    file.write_text(yaml.safe_dump(rule))
    assert main(["--conf", str(CONF), "rules", "check", str(file)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == f"{file}: rule 'large-payment' is valid (0 tests)"
    assert out.splitlines()[1].startswith("remark: rule 'large-payment': tests is missing")


def test_check_as_json_says_the_level(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    fine = CONF / "rules/large-payment.yml"
    rule = load_rule_document(fine)
    (tmp_path / "remarked.yml").write_text(yaml.safe_dump({**rule, "rule_id": "remarked", "tests": []}))
    (tmp_path / "wrong.yml").write_text(yaml.safe_dump({**rule, "window": "24h"}))
    files = [str(fine), str(tmp_path / "remarked.yml"), str(tmp_path / "wrong.yml")]
    assert main(["--conf", str(CONF), "--json", "rules", "check", *files]) == 1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["file"], row["level"], row.get("place")) for row in rows] == [
        (files[0], "fine", None), (files[1], "remark", "tests"), (files[2], "problem", "window"),
        (files[2], "problem", "measures"),
    ]  # fmt: skip
    assert rows[0]["tests"] == len(rule["tests"])
    assert [row["rule_id"] for row in rows] == ["large-payment", "remarked", "large-payment", "large-payment"]


def test_check_reads_folders_and_goes_on_after_a_file_that_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    rule = load_rule_document(CONF / "rules/large-payment.yml")
    (tmp_path / "below").mkdir()
    documents = {"b-wrong.yml": {**rule, "window": "24h"}, "below/c-fine.yaml": rule, "below/d-again.yml": rule}
    for name, document in documents.items():
        (tmp_path / name).write_text(yaml.safe_dump(document))
    (tmp_path / "a-torn.yml").write_text("rule_id: [")
    (tmp_path / "notes.txt").write_text("no rule")
    missing = tmp_path / "missing.yml"
    assert main(["--conf", str(CONF), "rules", "check", str(tmp_path), str(missing)]) == 2
    said = capsys.readouterr()
    assert [line.split(":")[0] for line in said.out.splitlines()] == [str(tmp_path / "below/c-fine.yaml")]
    torn, wrong, *_, again, twice, gone, count = said.err.splitlines()
    assert torn.startswith(f"{tmp_path / 'a-torn.yml'}:1 is not YAML: ")
    assert wrong == f"{tmp_path / 'b-wrong.yml'}:"
    assert again == f"{tmp_path / 'below/d-again.yml'}:"
    assert f"{tmp_path / 'below/c-fine.yaml'} has a rule with the same rule_id; rename one of them" in twice
    assert gone.startswith(f"{missing} cannot be read: ")
    assert count == "4 of 5 files have problems"
