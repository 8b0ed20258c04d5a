"""Generated queries of EQL and KQL: imported rules alert on exactly what a slow evaluator of the languages finds."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from elastic_imported import import_rules, judge, make_rule
from eql_reference import Tree, holds, write_eql, write_kql
from judged import make_near

# Few letters, so that texts meet; with all that means something in a query, in LIKE, in regular expressions or in SQL.
PIECES = ["a", "B", "ab", "\\", "*", "?", "%", "_", "'", '"', ".", "(", "a b", "1", "\n", ":", "{", "\\t"]
TEXTS = ["process.name", "user.name", "process.args"]
NUMBERS = ["process.pid", "file.size", "user.name"]
RULES, EVENTS = 8, 40


def make_text(chance: random.Random, most: int = 3) -> str:
    return "".join(chance.choice(PIECES) for _ in range(chance.randint(1, most)))


def make_tree(chance: random.Random, make_test: Any, depth: int = 3) -> Tree:
    if depth == 0 or chance.random() < 0.3:
        return make_test(chance)
    if chance.random() < 0.35:
        return ("not", make_tree(chance, make_test, depth - 1))
    parts = [make_tree(chance, make_test, depth - 1) for _ in range(chance.randint(2, 3))]
    return (chance.choice(["and", "or"]), *parts)


def make_eql_test(chance: random.Random) -> Tree:
    field, kind = chance.choice(TEXTS), chance.randrange(10)
    if kind < 3:
        return (chance.choice(["==", ":", "like", "like~", "!="]), field, make_text(chance))
    if kind < 5:
        operator = chance.choice(["in", "in~", "like", "like~", ":"])
        return (operator, field, [make_text(chance) for _ in range(chance.randint(1, 3))])
    if kind == 5:
        function = chance.choice(["startsWith", "endsWith", "stringContains"]) + chance.choice(["", "~"])
        return ("call", function, field, make_text(chance))
    return [
        (chance.choice(["==", "!=", "<", "<=", ">", ">="]), chance.choice(NUMBERS), chance.choice([0, 1, 2, 0.5])),
        (chance.choice(["==", "!="]), chance.choice([*TEXTS, *NUMBERS, "process.trusted"]), None),
        chance.choice([
            ("==", "process.trusted", chance.random() < 0.5),
            (chance.choice(["regex", "regex~"]), field, chance.choice(["a.*", "[aB]+", "a|ab", "(ab)*.", r"\d?a"])),
            ("call", "cidrMatch", "source.ip", chance.choice(["10.0.0.0/8", "::/0", "10.1.0.0/16"])),
        ]),
        chance.choice([
            (chance.choice(["==", ">", "<"]), ("length", field), chance.randint(0, 3)),
            (chance.choice([":", "=="]), ("substring", field, *chance.choice([[1], [-2], [0, -1], [1, 3], [-3, -1]])), "a"),
            (chance.choice([">", "==", "!="]), ("indexOf", field, chance.choice(["a", "B"])), 0),
            ("==", ("indexOf", "user.name", "a"), None),
            (":", ("concat", field, "x"), "a*x"),
            ("==", ("between", field, "a", "b"), ""),
            ("==", ("add", chance.choice(NUMBERS), 1), 2),
        ]),
    ][kind - 6]  # fmt: skip


def make_kql_test(chance: random.Random) -> Tree:
    field = chance.choice(TEXTS)
    return chance.choice([
        ("kql", field, make_text(chance).strip() or "a"),
        ("==", field, make_text(chance)),
        (chance.choice(["kql", "=="]), field, [make_text(chance).strip() or "a" for _ in range(3)]),
        (chance.choice(["<", "<=", ">", ">="]), chance.choice(NUMBERS), chance.choice([0, 1, 0.5])),
        ("kql", "process.pid", chance.randint(0, 3)),
        ("kql", "process.trusted", chance.random() < 0.5),
        ("!=", chance.choice([*TEXTS, "process.pid"]), None),
    ])  # fmt: skip


def list_texts(tree: Tree) -> list[str]:
    """Lists the texts that a tree looks for."""
    if tree[0] in ("and", "or", "not"):
        return [text for each in tree[1:] for text in list_texts(each)]
    values = tree[-1] if isinstance(tree[-1], list) else [tree[-1]]
    return [value for value in values if isinstance(value, str)]


def make_event(chance: random.Random, texts: list[str]) -> dict[str, Any]:
    event: dict[str, Any] = {field: make_near(chance, texts) for field in TEXTS[:2] if chance.random() < 0.7}
    if chance.random() < 0.3:
        event["user.name"] = chance.choice(["1", "2.5", "-3", "3", "x1"])
    event["process.args"] = chance.choice([None, [], ["a"], [make_near(chance, texts), make_near(chance, texts)]])
    event["process.pid"] = chance.choice([None, 0, 1, 2, 3])
    event["file.size"] = chance.choice([None, 0.5, 1.5, 3.0])
    event["process.trusted"] = chance.choice([None, True, False])
    event["source.ip"] = chance.choice([None, "10.1.2.3", "192.168.0.1", "2001:db8::1", "nowhere"])
    return {name: value for name, value in event.items() if value is not None}


def compare(seed: int, make_test: Any, write: Any) -> None:
    """Imports rules, and compares what they find in events with what the reference finds."""
    chance = random.Random(seed)
    trees = [make_tree(chance, make_test) for _ in range(RULES)]
    # Each event is near one rule.
    events = [make_event(chance, list_texts(chance.choice(trees)) or ["a"]) for _ in range(EVENTS)]
    with tempfile.TemporaryDirectory() as folder:
        made = import_rules(Path(folder), *[{**write(tree), "name": f"r{at}"} for at, tree in enumerate(trees)])
    assert made.fidelities == ["exact"] * RULES
    expected = {
        f"r{at}": [f"e{place}" for place, event in enumerate(events) if holds(tree, event)]
        for at, tree in enumerate(trees)
    }
    assert judge(made.documents, events, at_once=True) == expected


# A failing case is not made smaller, which would take minutes: each rule is small already.
@settings(phases=[Phase.explicit, Phase.generate])
@given(st.integers(0, 2**32))
def test_rules_of_eql_find_what_the_reference_finds(seed: int) -> None:
    compare(seed, make_eql_test, lambda tree: make_rule(f"any where {write_eql(tree)}"))


@settings(phases=[Phase.explicit, Phase.generate])
@given(st.integers(0, 2**32))
def test_rules_of_kql_find_what_the_reference_finds(seed: int) -> None:
    compare(seed, make_kql_test, lambda tree: make_rule(write_kql(tree), "kuery"))
