"""What a Sigma rule matches, its rule in Lookback matches: each modifier, wildcards, escapes and missing fields."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from imported import HEAD, import_rules, judge, make_rule
from lookback.importing.mapping import NameMap

ALL = "all events"
# name -> detection, events, which of them match.
CASES: dict[str, tuple[dict[str, Any], list[dict[str, Any]], list[int]]] = {
    "a text, whatever the case": (
        {"Image": "Cmd.exe"},
        [{"Image": "cmd.EXE"}, {"Image": "cmd.exe "}, {"Image": "xcmd.exe"}, {}],
        [0],
    ),
    "letters beyond ASCII fold too": ({"User": "ÄRGER"}, [{"User": "ärger"}, {"User": "arger"}], [0]),
    "any of several": ({"Image": ["a", "B"]}, [{"Image": "A"}, {"Image": "b"}, {"Image": "c"}], [0, 1]),
    "a star": ({"Image": "*\\cmd*"}, [{"Image": "c:\\CMD.exe"}, {"Image": "cmd"}, {"Image": "\\cmd"}], [0, 2]),
    "a question mark is one character": ({"Image": "a?c"}, [{"Image": "abc"}, {"Image": "ac"}, {"Image": "a\nC"}], [0, 2]),
    "escaped wildcards": (
        {"Image": "a\\*b\\?"},
        [{"Image": "a*b?"}, {"Image": "axb?"}, {"Image": "a\\*b\\?"}],
        [0],
    ),
    "an escaped backslash before a star": ({"Image": "a\\\\*"}, [{"Image": "a\\x"}, {"Image": "ax"}], [0]),
    "signs of LIKE stand for themselves": (
        {"CommandLine|contains": "100%_x"},
        [{"CommandLine": "is 100%_X!"}, {"CommandLine": "100 per x"}, {"CommandLine": "100%zx"}, {"CommandLine": "100 _x"}],
        [0],
    ),
    "quotes and backslashes": (
        {"CommandLine|contains": "'\\x'\""},
        [{"CommandLine": "say '\\X'\" now"}, {"CommandLine": "'x'"}],
        [0],
    ),
    "line breaks and NUL": ({"CommandLine|contains": "a\nb\0c"}, [{"CommandLine": "A\nB\0C"}, {"CommandLine": "abc"}], [0]),
    "contains, startswith, endswith": (
        {"Image|startswith": "c:", "CommandLine|contains": "-enc", "User|endswith": "$"},
        [
            {"Image": "C:\\x", "CommandLine": "p -ENC y", "User": "h$"},
            {"Image": "xC:", "CommandLine": "-enc", "User": "$"},
        ],
        [0],
    ),
    "all": (
        {"CommandLine|contains|all": ["a", "b"]},
        [{"CommandLine": "xBxA"}, {"CommandLine": "a"}, {"CommandLine": "b"}],
        [0],
    ),
    "cased": ({"User|cased": "Bob"}, [{"User": "Bob"}, {"User": "bob"}], [0]),
    "contains, cased": ({"User|contains|cased": "Bo"}, [{"User": "xBob"}, {"User": "xbob"}], [0]),
    "a regular expression minds the case": ({"User|re": "^b.b$"}, [{"User": "bob"}, {"User": "BOB"}, {"User": "bobs"}], [0]),
    "flags of a regular expression": ({"User|re|i|s": "^b.b$"}, [{"User": "B\nB"}, {"User": "bobs"}], [0]),
    "cidr": (
        {"User|cidr": ["10.0.0.0/8", "2001:db8::/32"]},
        [{"User": "10.1.2.3"}, {"User": "2001:DB8::1"}, {"User": "11.0.0.1"}, {"User": "nobody"}, {}],
        [0, 1],
    ),
    "base64": ({"CommandLine|base64": "foo bar"}, [{"CommandLine": "Zm9vIGJhcg=="}, {"CommandLine": "foo bar"}], [0]),
    "base64offset": (
        {"CommandLine|base64offset|contains": "http://"},
        [{"CommandLine": "xx aHR0cDovL z"}, {"CommandLine": "h0dHA6Ly"}, {"CommandLine": "odHRwOi8v"}, {"CommandLine": "http"}],
        [0, 1, 2],
    ),
    "wide": (
        {"CommandLine|wide|base64offset|contains": "ping"},
        [{"CommandLine": "cABpAG4AZw"}, {"CommandLine": "cGluZw=="}],
        [0],
    ),
    "windash": (
        {"CommandLine|windash|contains": " -x "},
        [{"CommandLine": "a /X b"}, {"CommandLine": "a \u2013x b"}, {"CommandLine": "a +x b"}],
        [0, 1],
    ),
    "windash and all": (
        {"CommandLine|windash|contains|all": [" -x", " -y"]},
        [{"CommandLine": "a /x -y"}, {"CommandLine": "a /x"}],
        [0],
    ),
    "numbers": (
        {"EventID|gte": 5, "Size|lt": 1.5},
        [{"EventID": 5, "Size": 1.4}, {"EventID": 4, "Size": 1.0}, {"EventID": 6, "Size": 1.5}, {"EventID": 6}],
        [0],
    ),
    "a number in a text": (
        {"User|gt": 9},
        [{"User": "10"}, {"User": "9"}, {"User": "9.5"}, {"User": "ten"}, {}],
        [0, 2],
    ),
    "equal to a number": ({"EventID": [1, 2]}, [{"EventID": 1}, {"EventID": 3}, {"EventID": 2}, {}], [0, 2]),
    "a number that is a text in the event": ({"User": 4624}, [{"User": "4624"}, {"User": "04624"}], [0]),
    "a text that is a number in the event": ({"EventID": "4624"}, [{"EventID": 4624}, {"EventID": 1}], [0]),
    "a pattern of a number": ({"EventID|startswith": "46"}, [{"EventID": 4624}, {"EventID": 146}], [0]),
    "a number of an array": ({"Ports": 80}, [{"Ports": [1, 80]}, {"Ports": []}, {}], [0]),
    "neq": ({"User|neq": "bob"}, [{"User": "Bob"}, {"User": "ann"}, {}], [1, 2]),
    "exists": ({"User|exists": True}, [{"User": ""}, {}], [0]),
    "exists not": ({"User|exists": False}, [{"User": ""}, {}], [1]),
    "null": ({"User": None}, [{"User": ""}, {}], [1]),
    "the empty text": ({"User": ""}, [{"User": ""}, {}, {"User": "x"}], [0]),
    "null or a text": ({"User": [None, "x"]}, [{"User": "X"}, {}, {"User": "y"}], [0, 1]),
    "a star alone": ({"User": "*"}, [{"User": ""}, {"User": "x"}, {}], [0, 1]),
    "a boolean": ({"Admin": True}, [{"Admin": True}, {"Admin": False}, {}], [0]),
    "a boolean as a text": ({"User": True}, [{"User": "True"}, {"User": "yes"}], [0]),
    "a boolean written as a text": ({"Admin": "False"}, [{"Admin": False}, {"Admin": True}], [0]),
    "fieldref": ({"User|fieldref": "Host"}, [{"User": "A", "Host": "a"}, {"User": "a", "Host": "b"}, {"User": "a"}], [0]),
    "fieldref, endswith": (
        {"Image|fieldref|endswith": "User"},
        [{"Image": "c:\\BOB", "User": "bob"}, {"Image": "bob.exe", "User": "bob"}],
        [0],
    ),
    "an item of an array": (
        {"Groups|contains": "adm"},
        [{"Groups": ["x", "Admins"]}, {"Groups": ["x"]}, {"Groups": [None]}, {"Groups": []}, {}],
        [0],
    ),
    "all, each by an item of an array": (
        {"Groups|contains|all": ["a", "b"]},
        [{"Groups": ["xa", "bx"]}, {"Groups": ["ab"]}, {"Groups": ["a"]}],
        [0, 1],
    ),
    "a part of a struct": ({"Parent.Image": "x"}, [{"Parent": {"Image": "X"}}, {"Parent": None}, {}], [0]),
    "a name that no column has": ({"c-uri|contains": "x"}, [{"c_uri": "/X"}, {}], [0]),
    "another case of the name": ({"commandline": "x"}, [{"CommandLine": "X"}, {}], [0]),
    "the hour": ({"Seen|hour": 3}, [{"Seen": "2026-03-01T03:59:00Z"}, {"Seen": "2026-03-01T04:00:00Z"}, {}], [0]),
    "a long part with a question mark": (
        {"CommandLine|contains": "B(?" + "y" * 101},
        [{"CommandLine": "xb(q" + "Y" * 101}, {"CommandLine": "b(" + "y" * 101}],
        [0],
    ),
    "several such": (
        {"CommandLine|contains|all": ["a?" + "y" * 101, "b"]},
        [{"CommandLine": "BaX" + "y" * 101}, {"CommandLine": "aX" + "y" * 101}],
        [0],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_detection_matches(tmp_path: Path, name: str) -> None:
    detection, events, matching = CASES[name]
    made = import_rules(tmp_path, make_rule(detection))
    assert made.fidelities == ["exact"]
    assert judge(made.documents, events) == {"a-rule": [f"e{at}" for at in matching]}


@pytest.mark.parametrize("name", CASES)
def test_its_opposite_matches_the_other_events(tmp_path: Path, name: str) -> None:
    detection, events, matching = CASES[name]
    made = import_rules(tmp_path, make_rule({"selection": detection}, "not selection"))
    others = [f"e{at}" for at in range(len(events)) if at not in matching]
    assert judge(made.documents, events) == {"a-rule": others}


LOGIC = {"a1": {"User": "a"}, "a2": {"Host": "b"}, "filter": {"Image": "c"}}
EVENTS = [
    {"User": user, "Host": host, "Image": image}
    for user in ("a", None) for host in ("b", None) for image in ("c", None)
]  # fmt: skip


@pytest.mark.parametrize(
    ("condition", "matching"),
    [
        ("1 of a*", "012345"), ("all of a*", "01"), ("all of them", "0"), ("1 of them", "0123456"),
        ("a1 and not filter", "13"), ("not 1 of a*", "67"), ("not (a1 or filter)", "57"), ("not not a1", "0123"),
        ("a1 or a2 and filter", "01234"), ("a1 and not (a2 and not filter)", "023"), ("not all of them", "1234567"),
    ],
)  # fmt: skip
def test_conditions(tmp_path: Path, condition: str, matching: str) -> None:
    made = import_rules(tmp_path, make_rule(LOGIC, condition))
    assert judge(made.documents, EVENTS) == {"a-rule": [f"e{at}" for at in matching]}


def test_a_list_of_mappings_is_any_of_them(tmp_path: Path) -> None:
    detection = {"s": [{"User": "a", "Host": "b"}, {"Image": "c"}], "condition": "s"}
    made = import_rules(tmp_path, {**HEAD, "detection": detection})
    assert judge(made.documents, EVENTS) == {"a-rule": ["e0", "e1", "e2", "e4", "e6"]}


def test_several_conditions_are_any_of_them(tmp_path: Path) -> None:
    rule = {**HEAD, "detection": {**LOGIC, "condition": ["a1 and a2", "filter"]}}
    made = import_rules(tmp_path, rule)
    assert judge(made.documents, EVENTS) == {"a-rule": ["e0", "e1", "e2", "e4", "e6"]}


def test_words_without_a_field_are_looked_for_in_the_fields_of_the_map(tmp_path: Path) -> None:
    rule = {**HEAD, "detection": {"words": ["Fail", 17], "condition": "words"}}
    refused = import_rules(tmp_path, rule)
    remedy = "name the fields to search as `keywords` in the --map file"
    assert refused.fidelities == [f"refused: keywords: it looks for 'Fail' in no field by name; {remedy}"]
    made = import_rules(tmp_path, rule, names=NameMap(keywords=("CommandLine", "User")))
    events = [{"CommandLine": "a failure"}, {"User": "17"}, {"User": "x"}, {"Host": "fail"}]
    assert judge(made.documents, events) == {"a-rule": ["e0", "e1"]}


def test_long_alternatives_are_short_conditions(tmp_path: Path) -> None:
    rule = make_rule({"Image|endswith": [f"\\{at}.exe" for at in range(400)], "User": [f"U{at}" for at in range(300)]})
    (document,) = import_rules(tmp_path, rule).documents.values()
    assert document["where"].startswith("Image ilike any (r'%\\\\0.exe', r'%\\\\1.exe'")
    assert " and lower(User) in ('u0', 'u1', " in document["where"]


REFUSED = {
    "regex": ({"User|re": "(a)\\1"}, "regex: "),
    "look-ahead": ({"User|re": "a(?=b)"}, "regex: "),
    "unknown field": (
        {"Imag": "x"},
        "unmapped-field: stream 'logs' has no field 'Imag'; did you mean 'Image'?; map it",
    ),
    "unknown modifier": ({"User|odd": "x"}, "sigma: Unknown modifier"),
    "wrong address": ({"User|cidr": "10.0.0"}, "sigma: "),
    "an hour of a text": ({"User|hour": 3}, "type: User is string, and the rule asks for its hour"),
    "arrays": ({"Groups|fieldref": "User"}, "type: Groups or User is an array"),
    "a number of a boolean": ({"Admin|gt": 3}, "type: Admin is boolean, and is compared with the number 3"),
    "part of a placeholder": ({"User|contains|expand": "%x%"}, "placeholder: %x% is a part of the text"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_said_is_refused_with_its_reason(tmp_path: Path, name: str) -> None:
    detection, said = REFUSED[name]
    made = import_rules(tmp_path, make_rule(detection))
    assert made.documents == {}
    assert made.fidelities[0].startswith(f"refused: {said}")


def test_what_a_rule_says_about_itself_stops_no_import(tmp_path: Path) -> None:
    rule = make_rule({"User": "x"}) | {
        "id": "7", "date": "soon", "status": "odd", "references": "https://example.com/a", "author": ["Ann", "Bo"],
        "tags": ["sysmon", "attack.t1110"], "related": "none", "falsepositives": "few",
    }  # fmt: skip
    made = import_rules(tmp_path, rule)
    assert made.fidelities == ["exact"]
    (document,) = made.documents.values()
    assert (document["tags"], document["references"]) == (["sysmon", "attack.t1110"], ["https://example.com/a"])
    assert (document["source"]["id"], document["source"]["author"]) == ("7", "Ann, Bo")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"level": "odd"}, "level"), ({"taxonomy": 7}, "taxonomy"), ({"detection": {"condition": "x"}}, "detection")],
    ids=["level", "taxonomy", "detection"],
)
def test_what_decides_about_alerts_must_be_right(tmp_path: Path, wrong: dict[str, Any], said: str) -> None:
    made = import_rules(tmp_path, make_rule({"User": "x"}) | wrong)
    assert made.documents == {}
    assert made.fidelities[0].startswith("refused: sigma: ")
    assert said in made.fidelities[0].lower()


def test_a_placeholder_is_a_list(tmp_path: Path) -> None:
    made = import_rules(tmp_path, make_rule({"User|expand": "%Domain Admins%"}))
    assert made.fidelities == [
        "approximated: list: %Domain Admins% is the list 'domain-admins', as the list says: fill it by `lookback lists import`"
    ]
    assert made.documents["a-rule"]["where"] == "in_list(lower(User), 'domain-admins')"
    assert (tmp_path / "lists/domain-admins.csv").read_text() == "value\n"


def test_letters_whose_case_depends_on_their_place_are_noted(tmp_path: Path) -> None:
    made = import_rules(tmp_path, make_rule({"User": "ΑΣ"}))
    assert made.fidelities[0].startswith("approximated: fold: 'ΑΣ', fewer or more alerts")
