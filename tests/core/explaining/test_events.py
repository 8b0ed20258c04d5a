"""Contract 10.9: every event of a stream is explained, and what is said of it agrees with the alerts that the stream had."""

from __future__ import annotations

import time
from typing import Any

import pytest
from test_evidence import RULE, STREAM, as_rows, moment, rows

import lookback
from growth import grows_in_proportion
from lookback.core.explaining.eventexplanation import EventExplanation, Standing
from lookback.core.explaining.events import explain_event_at
from lookback.core.explaining.evidence import Activation, Clock, Evidence, ListHistory, Reset
from lookback.core.explaining.progress import find_progress
from lookback.core.rules.compiled import CompiledRule
from lookback.core.rules.compiling import compile_rule
from lookback.core.streams.arrival import find_marks
from lookback.core.streams.declarations import Declarations
from lookback.core.streams.eventrows import read_events
from lookback.core.values.contents import read_contents, set_contents
from lookback.core.values.lists import KnownLists, Lists
from lookback.core.values.times import parse_time
from lookback.core.values.windows import TiledWindow

MEASURES = {"total": "sum(amount)", "n": "count(*)"}
BASE: dict[str, Any] = {"rule_id": "r", "stream": "tx", "group_by": ["k"]}
LOOKBACKS = {
    "of the evidence": RULE,
    "late ones recorded": {**BASE, "window": "20 seconds", "measures": MEASURES, "when": "total > 12 and n < 9", "late": "record"},
    "emptied by alerts": {**BASE, "window": "1 minute", "measures": MEASURES, "when": "total > 12", "reset_on_alert": True},
    "within a range": {
        **BASE, "window": "20 seconds", "measures": MEASURES, "when": "total > 20", "effective_until": "2024-03-04T00:00:40Z",
    },
    "broken by some events": {**BASE, "window": "20 seconds", "measures": {"part": "sum(10 / (amount - 2))"}, "when": "part > 5"},
}  # fmt: skip


def explain_all(
    document: dict[str, Any], given: list[dict[str, Any]], status: str = "active"
) -> list[EventExplanation]:
    """Explains every event of a rule that stood there from the start."""
    rule = compile_rule(document, STREAM)
    alerts = as_rows(
        lookback.replay([({"rule_id": "r", "version": 1, "document": document}, None)], given, STREAM).alerts
    )
    everything = read_events(given, STREAM, 1)[0].in_order_of_arrival()
    highs = {commit: high for commit, high in find_marks(everything, everything.commits).items() if high is not None}
    return [_explain(rule, row, given, alerts, Clock(Declarations.of(STREAM), highs), status) for row in given]


def _explain(
    rule: CompiledRule, row: dict[str, Any], given: list[dict[str, Any]], alerts: list[dict[str, Any]], clock: Clock, status: str
) -> EventExplanation:  # fmt: skip
    own = read_events([each for each in given if each["k"] == row["k"]], STREAM, 1)[0].in_order_of_arrival()
    of_key = [each for each in alerts if each["key"] == {"k": row["k"]}]
    resets = [Reset(each["arrival"], parse_time(each["event_time"]), each["event_id"]) for each in of_key]
    evidence = Evidence(rule, own, clock, [Activation(None, "r", rule)], resets if rule.spec.reset_on_alert else [])
    at = evidence.find_position(row["id"])
    assert at is not None
    commit = row["arrival"] if rule.spec.kind == "lookback" else max(each["arrival"] for each in given)
    about = [each for each in of_key if each["event_id"] == row["id"]]
    return explain_event_at(evidence, at, commit, Standing(1, status), {}, parse_time(row["at"]) - 40_000_000, about)


@pytest.mark.parametrize("document", LOOKBACKS.values(), ids=list(LOOKBACKS))
def test_c10_9_an_event_has_an_alert_exactly_if_its_explanation_finds_nothing_against_it(
    document: dict[str, Any],
) -> None:
    found = explain_all(document, rows(7, count=70))

    quiet = {"where", "condition", "error", "late", "range"}
    names = [{reason.name for reason in each.reasons} for each in found]
    assert [bool(each.alerts) for each in found] == [not (each & quiet) for each in names]
    holding = [bool(each.windows) and each.windows[0].holds for each in found]
    assert all(holds for holds, each in zip(holding, found, strict=True) if each.alerts)
    assert {True, False} == {bool(each.alerts) for each in found}


def test_c10_9_each_part_of_where_and_when_is_shown_with_its_values() -> None:
    document = {
        **BASE,
        "where": "amount <> 3 and amount > 0",
        "window": "20 seconds",
        "measures": MEASURES,
        "when": "total > 5 and n < 3",
    }
    given = [
        {"id": name, "at": moment(second), "k": "a", "amount": amount, "arrival": 1 + at}
        for at, (name, second, amount) in enumerate(
            [("a", 0, 2), ("b", 5, 3), ("c", 6, 4), ("d", 7, None), ("e", 8, 1)]
        )
    ]
    found = {each.event_id: each for each in explain_all(document, given)}

    assert [str(part) for part in found["a"].windows[0].parts] == [
        "total > 5 is false (total = 2.00)",
        "n < 3 is true (n = 1)",
    ]
    assert (
        found["a"].reasons[0].text
        == "When the event came, the condition does not hold: total > 5 is false (total = 2.00)."
    )
    assert (found["b"].is_seen, found["b"].windows, found["b"].picture) == (False, (), None)
    assert found["b"].reasons[0].text == "The rule does not see the event: amount != 3 is false (amount = 3.00)."
    assert [part.holds for part in found["d"].where] == [None, None]
    assert [reason.name for reason in found["c"].reasons] == ["raised"]
    assert "n < 3 is false (n = 3)" in found["e"].reasons[0].text
    picture = found["c"].picture
    assert picture is not None
    assert list(picture.timeline["event_id"]) == ["a", "c"]
    assert found["c"].to_dict()["windows"][0]["measures"] == {"total": "6.00", "n": "2"}


def test_c10_9_a_version_that_was_paused_or_not_in_force_is_said_first() -> None:
    document = {**BASE, "window": "20 seconds", "measures": MEASURES, "when": "n >= 1"}
    given = [{"id": "a", "at": moment(0), "k": "a", "amount": 2, "arrival": 3}]
    for status, name in (("paused", "paused"), ("", "not in force"), ("retired", "retired"), ("shadow", "shadow")):
        (found,) = explain_all(document, given, status)
        assert [reason.name for reason in found.reasons if reason.name != "raised"] == [name]
        assert found.windows[0].holds


WINDOWED = {
    "tumbling": {"window": {"tumbling": "10 seconds"}, "measures": MEASURES, "when": "total > 8"},
    "sliding": {"window": {"sliding": "30 seconds", "slide": "10 seconds"}, "measures": MEASURES, "when": "total > 25"},
    "session": {"window": {"session": "3 seconds"}, "measures": MEASURES, "when": "total > 8"},
}  # fmt: skip


@pytest.mark.parametrize("own", WINDOWED.values(), ids=list(WINDOWED))
def test_c10_9_the_windows_of_an_event_have_the_values_of_their_alerts(own: dict[str, Any]) -> None:
    document, given = {**BASE, **own}, rows(11, count=80)
    alerts = as_rows(
        lookback.replay([({"rule_id": "r", "version": 1, "document": document}, None)], given, STREAM).alerts
    )
    last = {(each["key"]["k"], each["window_start"]): each for each in alerts}
    covered = 0
    for row, found in zip(given, explain_all(document, given), strict=True):
        holding = {each.window_start for each in found.windows if each.holds}
        raised = {
            start for (key, start), each in last.items()
            if key == row["k"] and each["verdict"] == "raised" and each["window_start"] <= row["at"] < each["window_end"]
        }  # fmt: skip
        if not any(reason.name == "late" for reason in found.reasons):
            assert raised == holding, (row, found.reasons)
            covered += len(raised)
        if isinstance(compile_rule(document, STREAM).window, TiledWindow):
            assert all(each.window_start <= row["at"] < each.window_end for each in found.windows)
    assert covered > 10


def test_c10_9_a_sequence_says_which_step_an_event_fits_and_which_match_took_it() -> None:
    document = {
        **BASE,
        "sequence": {
            "within": "1 minute",
            "steps": [
                {"name": "small", "where": "amount < 2", "at_least": 2},
                {"name": "large", "where": "amount > 2 and amount > element_at(small.amount, -1)"},
            ],
        },
    }
    given = [
        {"id": name, "at": moment(second), "k": "a", "amount": amount, "arrival": 1 + at}
        for at, (name, second, amount) in enumerate([("a", 0, 1), ("b", 5, 1), ("c", 6, 2), ("d", 7, 4), ("e", 30, 1)])
    ]
    found = {each.event_id: each for each in explain_all(document, given)}
    assert [len(found[name].windows) for name in "abcde"] == [1, 1, 0, 1, 0]
    assert found["c"].reasons[0].name == "sequence"
    assert "it fits no step" in found["c"].reasons[0].text
    assert "it fits small alone" in found["e"].reasons[0].text
    assert [part.step for part in found["d"].steps if part.holds] == ["large"]


FAILURES: dict[str, Any] = {
    **BASE,
    "sequence": {
        "within": "10 seconds",
        "steps": [
            {"name": "small", "where": "amount = 1", "at_least": 3},
            {"name": "mid", "where": "amount = 2", "at_most": 2},
            {"name": "large", "where": "amount > 2 and amount > element_at(mid.amount, -1)"},
        ],
        "until": "amount = 9",
    },
}  # fmt: skip


def list_events(*pairs: tuple[int, int]) -> list[dict[str, Any]]:
    """Events of one key, by second and amount, each a commit; they are named by their order."""
    return [
        {"id": name, "at": moment(second), "k": "a", "amount": amount, "arrival": 1 + at}
        for at, (name, (second, amount)) in enumerate(zip("abcdefghij", pairs, strict=False))
    ]


# within 10 s; small at least 3 (1), mid at most 2 (2), large (3 or more), 9 ends a match; the last event is asked about
@pytest.mark.parametrize(
    ("pairs", "ids", "words"),
    {
        "a step lacks events": (
            [(0, 1), (1, 1), (5, 3)], [["a", "b"], [], []],
            "In the 10 seconds up to the event, step small has 2 of at least 3 (a, b), step mid has no event and step large has no event.",
        ),
        "a step is missing": ([(0, 1), (1, 1), (2, 1), (5, 3)], [["a", "b", "c"], [], []], "step small has 3 (a, b, c), step mid has"),
        "a step has too many": (
            [(0, 1), (1, 1), (2, 1), (3, 2), (3, 2), (4, 2), (5, 3)], [["a", "b", "c"], ["d", "e", "f"], []],
            "step mid has 3 of at most 2 (d, e, f)",
        ),
        "both ends are in time": ([(0, 1), (1, 1), (2, 1), (10, 2)], [["a", "b", "c"], ["d"], []], "step mid has 1 (d)"),
        "one is out of time": (
            [(0, 1), (1, 1), (2, 1), (11, 2)], [["b", "c"], [], []],
            "Without the time limit, step small has 3 (a, b, c), step mid has 1 (d) and step large has no event; the first event came 11 s",
        ),
        "an event ended it": ([(0, 1), (1, 1), (2, 1), (3, 9), (5, 2)], [[], [], []], "step small has no event, step mid has"),
        "one that was too late does not count": (
            [(0, 1), (1, 1), (100, 5), (2, 1), (5, 2)], [["a", "b"], [], []], "step small has 2 of at least 3 (a, b)",
        ),
        "many are named by the last": (
            [(at, 1) for at in range(7)], [list("abcdefg"), [], []], "step small has 7 (..., c, d, e, f, g)",
        ),
    }.values(),
)  # fmt: skip
def test_c10_9_a_sequence_that_did_not_match_says_how_far_it_came(
    pairs: list[tuple[int, int]], ids: list[list[str]], words: str
) -> None:
    found = explain_all(FAILURES, list_events(*pairs))[-1]
    assert found.progress is not None
    assert [list(step.event_ids) for step in found.progress.steps] == ids
    (text,) = [reason.text for reason in found.reasons if reason.name == "sequence"]
    assert words in text
    assert bool(found.progress.untimed) == ("Without the time limit" in text)
    listed = found.to_dict()["progress"]["steps"][0]
    assert (listed["name"], listed["at_least"], list(listed["event_ids"])) == ("small", 3, ids[0])


def test_c10_9_what_came_before_the_rule_is_no_step_of_it() -> None:
    given = list_events((0, 1), (1, 1), (2, 1), (5, 2))
    rule = compile_rule(FAILURES, STREAM)
    own = read_events(given, STREAM, 1)[0].in_order_of_arrival()
    clock = Clock(Declarations.of(STREAM), {})
    cases = {
        "from the start": [Activation(None, "r", rule)],
        "after b": [Activation(2, "r", rule)],
        "another version goes on": [Activation(None, "r", rule), Activation(2, "r", rule)],
        "it was retired meanwhile": [Activation(None, "r", rule), Activation(1, "r", None), Activation(2, "r", rule)],
        "all state was cleared": [Activation(None, "r", rule), Activation(2, "*", None)],
    }
    counted = {
        name: find_progress(Evidence(rule, own, clock, activations), 3).steps[0].event_ids
        for name, activations in cases.items()
    }
    assert counted == {
        "from the start": ("a", "b", "c"), "after b": ("c",), "another version goes on": ("a", "b", "c"),
        "it was retired meanwhile": ("c",), "all state was cleared": ("c",),
    }  # fmt: skip


def test_c10_9_a_wait_that_ended_or_is_not_over_is_said() -> None:
    wait = {"name": "silent", "absent": "amount = 4", "within": "20 seconds"}
    document = {**BASE, "sequence": {"within": "10 seconds", "steps": [{"name": "seen", "where": "amount = 1"}, wait]}}
    came = explain_all(document, list_events((0, 1), (5, 4), (60, 2)))[0]
    assert "Step silent: an event that must not come by 2024-03-04 00:00:20 UTC came." in came.reasons[-1].text
    waits = explain_all(document, list_events((0, 1), (5, 2)))[0]
    assert "Step silent: the wait lasts until 2024-03-04 00:00:20 UTC." in waits.reasons[-1].text


def test_c10_9_a_match_with_a_fixed_time_that_is_over_is_out_of_time() -> None:
    steps = [{"name": "small", "where": "amount = 1"}, {"name": "large", "where": "amount > 2"}]
    document = {**BASE, "sequence": {"within": "10 seconds", "expiry": "fixed", "steps": steps}}
    found = explain_all(document, list_events((0, 1), (11, 3)))[-1]
    assert found.progress is not None
    assert [step.event_ids for step in found.progress.steps] == [(), ()]
    assert [step.event_ids for step in found.progress.untimed] == [("a",), ("b",)]
    assert found.progress.gap == 11_000_000


def test_c10_9_the_time_to_find_how_far_a_sequence_came_is_in_proportion_to_the_events_of_its_key() -> None:
    rule = compile_rule({**FAILURES, "sequence": {**FAILURES["sequence"], "within": "1 day"}}, STREAM)

    def seconds_for(size: int) -> float:
        given = [
            {"id": f"{at:06}", "at": moment(at), "k": "a", "amount": 1 + (at == size - 2), "arrival": 1 + at}
            for at in range(size)
        ]
        own = read_events(given, STREAM, 1)[0].in_order_of_arrival()
        highs = {int(commit): int(time) for commit, time in zip(own.commits, own.times, strict=True)}
        evidence = Evidence(rule, own, Clock(Declarations.of(STREAM), highs), [Activation(None, "r", rule)])
        started = time.process_time()
        progress = find_progress(evidence, size - 1)
        seconds = time.process_time() - started
        assert len(progress.steps[0].event_ids) == size - 2
        return seconds

    seconds_for(200)
    assert grows_in_proportion(seconds_for, 2_000)


_LISTED = {**BASE, "window": "20 seconds", "measures": MEASURES, "when": "n >= 1"}
_LIST_ROWS = [
    {"id": name, "at": moment(at), "k": "a", "amount": at, "arrival": 1 + at} for at, name in enumerate("abcdef")
]
# `known` has the values 1 and 2 from the third commit on, and 2 alone from the fifth on.
_LIST_CHANGES = [({"known": [1, 2]}, 2), ({"known": [2, 4]}, 4)]


def _explain_lists(document: dict[str, Any]) -> dict[str, EventExplanation]:
    """Explains every event of a rule that asks the list `known` (see _LIST_CHANGES)."""
    rule = compile_rule(document, STREAM)
    alerts = as_rows(lookback.replay([document], _LIST_ROWS, STREAM, _LIST_CHANGES).alerts)
    events = read_events(_LIST_ROWS, STREAM, 1)[0]
    highs = {row["arrival"]: parse_time(row["at"]) for row in _LIST_ROWS}
    versions, known = {}, Lists.empty()
    for number, (contents, _) in enumerate(_LIST_CHANGES, 1):
        rows, problems = read_contents(contents)
        assert not problems
        versions[number] = known = set_contents(known, rows, number)
    history = ListHistory(KnownLists(versions), [(after, at) for at, (_, after) in enumerate(_LIST_CHANGES, 1)])
    evidence = Evidence(
        rule, events, Clock(Declarations.of(STREAM), highs), [Activation(None, "r", rule)], lists=history
    )
    found = {}
    for at, row in enumerate(_LIST_ROWS):
        about = [each for each in alerts if each["event_id"] == row["id"]]
        commit = row["arrival"] if rule.spec.kind == "lookback" else _LIST_ROWS[-1]["arrival"]
        found[row["id"]] = explain_event_at(evidence, at, commit, Standing(1, "active"), {}, 0, about)
    return found


def test_c10_9_and_11_3_a_list_that_kept_a_rule_from_seeing_an_event_is_named() -> None:
    found = _explain_lists({**_LISTED, "where": "not in_list(cast(amount as bigint), 'known') and amount < 5"})

    # a, b: before the list had values. c: 2. d: 3. e: 4, which is in the list by then. f: 5.
    names = {name: [reason.name for reason in each.reasons] for name, each in found.items()}
    assert names == {"a": ["raised"], "b": ["raised"], "c": ["list"], "d": ["raised"], "e": ["list"], "f": ["where"]}
    assert found["c"].reasons[0].text == (
        "The rule does not see the event: not in_list(cast(amount as bigint), 'known') is false (amount = 2.00). "
        "The deciding list is 'known', as of commit 1 of table lists."
    )
    assert found["e"].reasons[0].text.endswith("as of commit 2 of table lists.")
    assert found["e"].event == {"id": "e", "at": "2024-03-04T00:00:04Z", "k": "a", "amount": "4.00"}
    assert found["c"].to_dict()["where"][0]["lists"] == ("known",)


def test_c10_9_and_11_3_a_list_in_a_condition_is_shown_as_it_was_when_the_event_was_judged() -> None:
    document = {**_LISTED, "when": "n >= 1 and (in_list(n, 'known') or total > 9)"}
    found = _explain_lists(document)

    # n: 1 to 6, total: 0, 1, 3, 6, 10, 15.
    names = {name: [reason.name for reason in each.reasons] for name, each in found.items()}
    assert names == {"a": ["list"], "b": ["list"], "c": ["list"], "d": ["list"], "e": ["raised"], "f": ["raised"]}
    text = str(found["a"].windows[0].parts[1])
    assert text == "in_list(n, 'known') or total > 9 is false (n = 1, total = 0.00, in_list(n, 'known') = false)"
    assert found["a"].reasons[0].text.endswith("The deciding list is 'known', before the first commit of table lists.")


def test_c11_3_an_alert_is_explained_by_the_lists_that_its_events_met() -> None:
    """Of the events up to f, the list had 2 (c) and 4 (e) when they came; what it has now does not matter."""
    document = {**_LISTED, "measures": {"n": "count(*) filter (where in_list(cast(amount as bigint), 'known'))"}}
    picture = _explain_lists(document)["f"].picture
    assert picture is not None
    (measure,) = picture.measures
    assert list(measure.events["id"]) == ["c", "e"]
    assert list(measure.events.columns) == ["id", "at", "k", "amount", "arrival"]


def test_c10_9_and_11_3_a_list_that_kept_an_event_out_of_a_step_is_named() -> None:
    steps = [
        {"name": "first", "where": "amount < 2"},
        {"name": "second", "where": "amount > 1 and not in_list(cast(amount as bigint), 'known')"},
    ]
    found = _explain_lists({**BASE, "sequence": {"within": "1 minute", "steps": steps}})

    assert {name: [reason.name for reason in each.reasons] for name, each in found.items()}["c"] == ["sequence", "list"]
    assert found["c"].reasons[1].text == "If the list 'known' answered otherwise, it would fit step second."
    assert "raised" in {reason.name for reason in found["d"].reasons}


def test_c12_5_an_explanation_shows_the_name_of_a_key_and_an_error_in_it() -> None:
    document = {
        **BASE,
        "group_by": ["k", {"part": "cast(60 / (amount - 2) as bigint)"}],
        "window": "20 seconds",
        "measures": MEASURES,
        "when": "n > 5",
    }
    given = [
        {"id": f"e{at}", "at": f"2024-03-04T00:00:0{at}Z", "k": "x", "amount": amount, "arrival": at + 1}
        for at, amount in enumerate(["3.00", "2.00", "4.00"])
    ]
    rule = compile_rule(document, STREAM)
    events = read_events(given, STREAM, 1)[0].in_order_of_arrival()
    highs = {commit: high for commit, high in find_marks(events, events.commits).items() if high is not None}
    evidence = Evidence(rule, events, Clock(Declarations.of(STREAM), highs), [Activation(None, "r", rule)], [])
    first, failed, _ = (explain_event_at(evidence, at, 3, Standing(1, "active"), {}, 0, []) for at in range(3))
    assert (first.key, first.is_seen, first.where) == ({"k": "x", "part": "60"}, True, ())
    (part,) = failed.where
    assert (failed.is_seen, failed.reasons[0].name, part.text) == (False, "error", f"part: {rule.key[0].sql}")
