"""Generated Sigma rules and events: imported rules alert on exactly what a slow evaluator of Sigma finds."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from imported import HEAD, import_rules, judge
from judged import make_near
from sigma_reference import matches

# Few letters, so that texts meet; with all that means something in Sigma, in LIKE, in regular expressions or in SQL.
PIECES = [
    "a",
    "B",
    "ab",
    "\\",
    "\\\\",
    "*",
    "?",
    "\\*",
    "\\?",
    "%",
    "_",
    "'",
    '"',
    ".",
    "(",
    " -a",
    " /b",
    "ä",
    "Ü",
    "\n",
    "\0",
    "1",
]
TEXTS = ["Image", "CommandLine", "User", "Host"]
RULES, EVENTS = 6, 40


def make_text(chance: random.Random, most: int = 4) -> str:
    return "".join(chance.choice(PIECES) for _ in range(chance.randint(0, most)))


def make_item(chance: random.Random) -> tuple[str, Any]:
    """Makes a field with modifiers, and its value."""
    field = chance.choice(TEXTS)
    kind = chance.randrange(14)
    if kind < 6:
        how = chance.choice(["", "|contains", "|startswith", "|endswith"])
        how += chance.choice(["", "", "|cased"]) + chance.choice(["", "", "|all"]) + chance.choice(["", "", "|neq"])
        values = [make_text(chance) for _ in range(chance.randint(1, 3))]
        return field + how, values if chance.random() < 0.7 else values[0]
    return [
        (f"{chance.choice(['EventID', 'User', 'Size'])}|{chance.choice(['lt', 'lte', 'gt', 'gte'])}", chance.randint(0, 3)),
        ("EventID", chance.choice([1, "1", [1, 2], ["1", "x"], "*1"])),
        (f"{chance.choice([*TEXTS, 'EventID', 'Groups'])}|exists", chance.random() < 0.5),
        (chance.choice([*TEXTS, "EventID"]), None),
        (f"Groups|contains{chance.choice(['', '|all'])}", [make_text(chance, 2) or "a" for _ in range(2)]),
        (f"{field}|re{chance.choice(['', '|i'])}", chance.choice(["^a", "a.b", "B$", "(a|1)+b"])),
        (f"{field}|{chance.choice(['fieldref', 'fieldref|neq'])}", chance.choice([each for each in TEXTS if each != field])),
        ("CommandLine|windash|contains", chance.choice([" -a", "-b", "/a"])),
    ][kind - 6]  # fmt: skip


def make_rule(chance: random.Random, number: int) -> dict[str, Any]:
    names = ["sel_a", "sel_b", "flt"][: chance.randint(1, 3)]
    detection: dict[str, Any] = {}
    for name in names:
        items = [dict(make_item(chance) for _ in range(chance.randint(1, 3))) for _ in range(chance.randint(1, 2))]
        detection[name] = items[0] if len(items) == 1 else items
    return {**HEAD, "title": f"r{number}", "detection": {**detection, "condition": make_condition(chance, names, 3)}}


def make_condition(chance: random.Random, names: list[str], depth: int) -> str:
    if depth == 0 or chance.random() < 0.3:
        return chance.choice([*names, *names, "1 of them", "all of them", "1 of sel*", "all of sel_*"])
    if chance.random() < 0.35:
        return f"not ({make_condition(chance, names, depth - 1)})"
    parts = [make_condition(chance, names, depth - 1) for _ in range(2)]
    word = chance.choice([" and ", " or ", " and not "])
    return f"({word.join(parts)})" if chance.random() < 0.7 else " and not ".join(parts)


def list_texts(value: Any) -> list[str]:
    """Lists the texts in a rule's selections."""
    if isinstance(value, (dict, list)):
        return [text for each in (value.values() if isinstance(value, dict) else value) for text in list_texts(each)]
    return [value] if isinstance(value, str) else []


def make_event(chance: random.Random, texts: list[str]) -> dict[str, Any]:
    event: dict[str, Any] = {field: make_near(chance, texts) for field in TEXTS if chance.random() < 0.7}
    if chance.random() < 0.3:
        event["User"] = chance.choice(["1", "2.5", "-3", "3", "x1"])
    if chance.random() < 0.2:
        event["Host"] = event.get("User", "").swapcase() or None
    event["EventID"] = chance.choice([None, 0, 1, 2, 3, 11])
    event["Size"] = chance.choice([None, 0.5, 1.0, 3.0])
    event["Groups"] = chance.choice([None, [], ["a"], [make_text(chance, 2), make_text(chance, 2)]])
    return {name: value for name, value in event.items() if value is not None}


# A failing case is not made smaller, which would take minutes: each rule is small already.
@settings(phases=[Phase.explicit, Phase.generate])
@given(st.integers(0, 2**32))
def test_imported_rules_find_what_the_reference_finds(seed: int) -> None:
    chance = random.Random(seed)
    rules = [make_rule(chance, number) for number in range(RULES)]
    texts = list_texts([rule["detection"] for rule in rules])
    events = [make_event(chance, texts) for _ in range(EVENTS)]
    with tempfile.TemporaryDirectory() as folder:
        made = import_rules(Path(folder), *rules)
    assert made.fidelities == ["exact"] * RULES
    expected = {rule["title"]: [f"e{at}" for at, event in enumerate(events) if matches(rule, event)] for rule in rules}
    assert judge(made.documents, events, at_once=True) == expected
