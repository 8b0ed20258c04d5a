"""What a query of EQL, KQL or Lucene matches, its rule in Lookback matches; what cannot be said is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic_imported import find, import_rules, judge, make_rule

# name -> language, query, events, which of them match.
CASES: dict[str, tuple[str, str, list[dict[str, Any]], list[int]]] = {
    "== minds the case and knows no wildcards": (
        "eql",
        'any where user.name == "A*"',
        [{"user.name": "A*"}, {"user.name": "a*"}, {"user.name": "Ab"}],
        [0],
    ),
    ": does not mind the case, and has wildcards": (
        "eql",
        'any where user.name : ("a?c", "x*")',
        [{"user.name": "ABC"}, {"user.name": "X"}, {"user.name": "ac"}, {"user.name": "yx"}],
        [0, 1],
    ),
    "a category is one of the array": (
        "eql",
        "process where true",
        [{"event.category": ["file", "process"]}, {"event.category": ["Process"]}, {}],
        [0],
    ),
    "a missing field satisfies no test, so `not` of it does": (
        "eql",
        'any where not user.name == "a" and user.name != "b" and not process.pid > 3',
        [{}, {"user.name": "a"}, {"user.name": "b"}, {"user.name": "c", "process.pid": 4}, {"user.name": "c"}],
        [0, 4],
    ),
    "null, in both directions, and of an empty array": (
        "eql",
        "any where null == user.name and process.args != null",
        [{"process.args": ["a"]}, {"process.args": []}, {}, {"user.name": "", "process.args": ["a"]}],
        [0],
    ),
    "and binds before or, not before and": (
        "eql",
        'any where user.name == "a" or not user.name == "b" and process.pid == 1',
        [{"user.name": "a"}, {"user.name": "b", "process.pid": 1}, {"user.name": "c", "process.pid": 1}, {}],
        [0, 2],
    ),
    "comments, raw texts, escapes and fields in backticks": (
        "eql",
        'any where /* a */ `user.name` : """c:\\*""" // b\n or process.name == "a\\"\\\\\\t\\u{41}"',
        [{"user.name": "C:\\x"}, {"process.name": 'a"\\\tA'}, {"user.name": "c:x"}],
        [0, 1],
    ),
    "not in, in~": (
        "eql",
        'any where user.name not in ("a", "b") and process.name in~ ("X*", "y")',
        [{"process.name": "x*"}, {"user.name": "a", "process.name": "y"}, {"process.name": "xz"}, {"process.name": "Y"}],
        [0, 3],
    ),
    "an optional field, and a field that is true": (
        "eql",
        "any where process.trusted and ?user.name != null",
        [{"process.trusted": True, "user.name": "a"}, {"process.trusted": True}, {"user.name": "a"}],
        [0],
    ),
    "functions of two fields, also of items": (
        "eql",
        "any where startsWith~(process.args, user.name) and length(user.name) + 1 < length(process.name)",
        [
            {"process.args": ["x", "ABc"], "user.name": "ab", "process.name": "1234"},
            {"process.args": ["x", "ABc"], "user.name": "ab", "process.name": "123"},
            {"process.args": ["b"], "user.name": "ab", "process.name": "1234"},
        ],
        [0],
    ),
    "parts of a text that depend on another": (
        "eql",
        'any where substring(user.name, 0, length(user.name) - 2) == "a" or substring(user.name, 0, -1) : "B*"',
        [{"user.name": "axx"}, {"user.name": "bx"}, {"user.name": "b"}, {}],
        [0, 1],
    ),
    "a function is compared with true and false": (
        "eql",
        'any where endsWith(user.name, "x") == false and cidrMatch(source.ip, "10.0.0.0/8") != false',
        [{"source.ip": "10.1.1.1"}, {"user.name": "x", "source.ip": "10.1.1.1"}, {"source.ip": "11.1.1.1"}],
        [0],
    ),
    "regular expressions take the whole text, and know no anchors": (
        "eql",
        'any where user.name regex """a.+\\$^?""" or process.name regex~ "x[^/]"',
        [{"user.name": "a\n$"}, {"user.name": "a\n"}, {"process.name": "XY"}, {"process.name": "x/"}],
        [0, 2],
    ),
    "texts in order": (
        "eql",
        'any where user.name >= "b" and "d" > user.name',
        [{"user.name": "a"}, {"user.name": "b"}, {"user.name": "cc"}, {"user.name": "d"}, {}],
        [1, 2],
    ),
    "an address, however it is written": (
        "eql",
        'any where source.ip == "2001:db8::1" or source.ip in ("10.0.0.0/8")',
        [{"source.ip": "2001:0db8:0::0001"}, {"source.ip": "10.2.3.4"}, {"source.ip": "11.2.3.4"}],
        [0, 1],
    ),
    "KQL minds the case; * is the only wildcard, and not one in quotes": (
        "kuery",
        'user.name: (Ab* or "C*" or d?)',
        [{"user.name": "Abx"}, {"user.name": "abx"}, {"user.name": "C*"}, {"user.name": "Cx"}, {"user.name": "d?"}],
        [0, 2, 4],
    ),
    "KQL: not of a missing field, values with not": (
        "kuery",
        "not process.pid: 1 AND user.name: (* and not (a or b c))",
        [{"user.name": "x"}, {"user.name": "a"}, {"user.name": "b c"}, {}, {"user.name": "x", "process.pid": 1}],
        [0],
    ),
    "KQL: escapes and words that join": (
        "kuery",
        r'user.name: (C\:\\x* or \and or "a\"b\\c" or not\u0041)',
        [{"user.name": "C:\\xy"}, {"user.name": "and"}, {"user.name": 'a"b\\c'}, {"user.name": "notA"}, {"user.name": "x"}],
        [0, 1, 2, 3],
    ),
    "KQL: a range of addresses, numbers, and a reading whatever the case": (
        "kuery",
        "source.ip: 10.0.0.0/8 and process.pid >= 2 and process.name.caseless: abC",
        [
            {"source.ip": "10.0.0.1", "process.pid": 2, "process.name": "ABc"},
            {"source.ip": "11.0.0.1", "process.pid": 2, "process.name": "abc"},
            {"source.ip": "10.0.0.1", "process.pid": 1, "process.name": "abc"},
        ],
        [0],
    ),
    "KQL: any item of an array, each value of another one": (
        "kuery",
        "process.args: (a and b) and not process.args: c",
        [{"process.args": ["b", "a"]}, {"process.args": ["a"]}, {"process.args": ["a", "b", "c"]}],
        [0],
    ),
    "Lucene": (
        "lucene",
        'user.name:(a?c OR "x y" OR /[0-9]{2}/) AND NOT process.pid:[2 TO 3} AND _exists_:process.pid',
        [
            {"user.name": "abc", "process.pid": 1},
            {"user.name": "x y", "process.pid": 3},
            {"user.name": "12", "process.pid": 2},
            {"user.name": "12", "process.pid": 4},
            {"user.name": "12"},
        ],
        [0, 1, 3],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_query_matches_what_its_language_says(tmp_path: Path, name: str) -> None:
    language, query, events, expected = CASES[name]
    assert find(tmp_path, make_rule(query, language), *events) == expected


@pytest.mark.parametrize(
    ("language", "query", "refusal"),
    [
        ("eql", "sample by host.id [any where true] [any where true]", "refused: sample: "),
        ("eql", "process", "refused: eql: `where` is missing"),
        ("eql", 'any where user.name == "a" "b"', "refused: eql: '\"b\"' is not understood"),
        ("eql", 'any where user.name == "\\q"', "refused: eql: a backslash before 'q'"),
        ("eql", "any where divide(process.pid, 2) == 1", "refused: function: divide() has no counterpart"),
        ("eql", 'any where user.name regex "a~b"', "refused: regex: ~ is an operator"),
        ("eql", "any where nothing.here == 1", "refused: unmapped-field: "),
        ("eql", "sequence [any where true] ![any where true] [any where true]", "refused: absence: "),
        (
            "eql",
            "sequence by user.name [any where true] by host.id [any where true]",
            "refused: eql: the steps have keys",
        ),
        ("kuery", "", "refused: nothing: "),
        ("kuery", "lonely words", "refused: keywords: it looks for 'lonely words'"),
        ("kuery", "user.name: a process.name: b", "refused: kql: an operator is missing before ':'"),
        ("kuery", "user.name: (a or", "refused: kql: a value is missing"),
        ("kuery", "user.name >= now", "refused: range: "),
        ("kuery", r"user.name: a\b", "refused: kql: a backslash before 'b'"),
        ("kuery", "file.name*: a", "refused: unmapped-field: no field is named like 'file.name*'"),
        ("lucene", "user.name:a OR process.pid:1 AND host.id:x", "refused: lucene: AND and OR are mixed"),
        ("lucene", "user.name:a~2", "refused: lucene: '~2' is not understood"),
        ("lucene", "+user.name:a", "refused: lucene: "),
        ("esql", "from logs", "refused: unsupported: a query in the language 'esql'"),
    ],
)
def test_what_cannot_be_said_is_refused_with_its_reason(
    tmp_path: Path, language: str, query: str, refusal: str
) -> None:
    (fidelity,) = import_rules(tmp_path, make_rule(query, language)).fidelities
    assert fidelity.startswith(refusal)


@pytest.mark.parametrize(
    ("query", "loss", "events", "expected"),
    [
        ("message: (*x* or Y)", "analyzed", [{"message": "a X b"}, {"message": "my"}, {"message": "b"}], ["e0", "e1"]),
        ("user.name: { first: a }", "nested", [], []),
        (
            "file.hash.*: a",
            "any-field",
            [{"file.hash.md5": "a"}, {"file.hash.sha1": "a"}, {"user.name": "a"}],
            ["e0", "e1"],
        ),
        ("process.name.caseless: Ä", "fold", [{"process.name": "ä"}], ["e0"]),
    ],
)
def test_what_is_not_exactly_the_same_says_so(
    tmp_path: Path, query: str, loss: str, events: list[dict[str, Any]], expected: list[str]
) -> None:
    made = import_rules(tmp_path, make_rule(query, "kuery"))
    if loss == "nested":
        assert made.fidelities[0].startswith("refused: unmapped-field: stream 'logs' has no field 'user.name.first'")
        return
    assert made.fidelities[0].startswith(f"approximated: {loss}: ")
    assert judge(made.documents, events)["a-rule"] == expected
