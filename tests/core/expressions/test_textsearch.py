"""The search for the texts of many conditions finds every event for which a condition holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookback.core.expressions.compiling import compile_expression
from lookback.core.expressions.textsearch import Anchor, TextSearch, find_clauses, prepare_search
from lookback.core.streams.events import Events
from lookback.core.values.columns import from_values
from lookback.core.values.types import BIGINT, STRING, TIMESTAMP, DataType, parse_type

FIELDS: dict[str, DataType] = {
    "id": BIGINT,
    "at": TIMESTAMP,
    "image": STRING,
    "cmd": STRING,
    "n": BIGINT,
    "d": parse_type("decimal(5,2)"),
}


def make_events(images: list[str | None], commands: list[str | None], numbers: list[int | None]) -> Events:
    rows = range(len(images))
    values: dict[str, list[Any]] = {
        "id": list(rows), "at": list(rows), "image": images, "cmd": commands, "n": numbers, "d": [None] * len(images)
    }  # fmt: skip
    columns = {name: from_values(FIELDS[name], values[name]) for name in FIELDS}
    return Events(columns, np.zeros(len(images), dtype=np.int64), "id", "at")


# Pieces that overlap, fold to one another (the Kelvin sign, a dotted capital I), hold wildcards and NUL.
_PIECES = [
    "abc",
    "bca",
    "ABC",
    "xyz",
    "%",
    "_",
    "\\",
    "k\u212ak",
    "\u0130bc",
    "\0",
    "a",
    "",
    "\U0001f600zz",
    "\u017ftu",
    "STU",
    "\u212a",
    "\u03a3",
    "^^",
]
_TEXTS = st.lists(st.sampled_from(_PIECES), max_size=4).map("".join)
_REGEXPS = [
    "abc", "(?i)ABC", "(abc|xyz)+a?", "[aA]bc", "b?xyz.*", "(?i)k\u212ak", "STU$", "(?:abc){2}", "(?:abc){0,2}", ".*", "abc|",
    r"\bxyz", "\u03a3abc", "[?][?][?]", r"x\x00y|\^\^\^", "(?i)stu|\u017ftu", r"\Qabc\Exyz",
]  # fmt: skip
_ROWS = st.lists(
    st.tuples(st.none() | _TEXTS, st.none() | _TEXTS, st.none() | st.integers(0, 2)), min_size=1, max_size=12
)


def quote(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def escape(text: str) -> str:
    return "".join("\\" + each if each in "\\%_" else each for each in text)


@st.composite
def text_conditions(draw: st.DrawFn) -> str:
    subject = draw(st.sampled_from(["image", "cmd", "lower(image)", "lower(cmd)", "upper(cmd)", "trim(image)"]))
    text, other = draw(_TEXTS), draw(_TEXTS)
    escaped, plain = escape(text), subject.replace("upper(cmd)", "cmd")  # ilike refuses upper()
    return draw(
        st.sampled_from([
            f"{subject} = {quote(text)}",
            f"{quote(text)} = {subject}",
            f"{subject} in ({quote(text)}, {quote(other)})",
            f"contains({subject}, {quote(text)})",
            f"startswith({subject}, {quote(text)})",
            f"endswith({subject}, {quote(text)})",
            f"{subject} like {quote(f'%{escaped}%')}",
            f"{subject} like {quote(f'{escaped}%_{escape(other)}')}",
            f"{subject} not like {quote(f'%{escaped}')}",
            f"{plain} ilike {quote(f'%{escaped}%{escape(other)}')}",
            f"{subject} like any ({quote(f'%{escaped}')}, {quote(f'{escape(other)}%')})",
            f"{plain} ilike all ({quote(f'%{escaped}%')}, {quote(f'%{escape(other)}%')})",
            f"{subject} <> {quote(text)}",
            f"regexp_like({subject}, {quote(draw(st.sampled_from(_REGEXPS)))})",
        ])
    )  # fmt: skip


_LEAVES = text_conditions() | st.sampled_from(["n > 0", "10 / n > 4", "image is null", "n in (1, 2)", "d > 1.5"])
CONDITIONS = st.recursive(
    _LEAVES,
    lambda parts: st.one_of(
        st.tuples(parts, parts).map(lambda pair: f"({pair[0]} and {pair[1]})"),
        st.tuples(parts, parts).map(lambda pair: f"({pair[0]} or {pair[1]})"),
        parts.map(lambda part: f"not ({part})"),
    ),
    max_leaves=6,
)


@given(st.lists(CONDITIONS, min_size=1, max_size=6), _ROWS)
def test_a_condition_holds_for_no_other_events(texts: list[str], rows: list[Any]) -> None:
    conditions = [compile_expression(text, FIELDS) for text in texts]
    plain, searched = (make_events(*map(list, zip(*rows, strict=True))) for _ in range(2))  # type: ignore[arg-type]
    searched.search(TextSearch(conditions))
    for condition in conditions:
        column, (holds, error) = plain.value(condition), searched.test(condition)
        assert holds.tolist() == column.is_true().tolist()
        assert (error is not None and error.tolist()) == (column.error is not None and column.error.tolist())


IMAGE = Anchor("image", False, "ab.exe")


@pytest.mark.parametrize(
    ("text", "clauses"),
    [
        ("image = 'ab.exe'", [(IMAGE,)]),
        ("image like '%ab.exe' and n > 0", [(IMAGE,)]),
        ("image like '%ab.exe' and lower(cmd) like '%-enc%'", [(IMAGE,), (Anchor("cmd", True, "-enc"),)]),
        ("cmd ilike '%-ENC_x%'", [(Anchor("cmd", True, "-enc"),)]),
        ("image = 'ab.exe' or startswith(cmd, 'run')", [(IMAGE, Anchor("cmd", False, "run"))]),
        ("image = 'ab.exe' or cmd like '%a%'", []),
        # Short texts that are rare all the same: two signs, and letters that are not of ASCII.
        (
            "cmd like '%^^%' or cmd ilike '%\U0001f600%'",
            [(Anchor("cmd", False, "^^"), Anchor("cmd", True, "\U0001f600"))],
        ),
        ("regexp_like(cmd, 'ping\\\\s+-n.{2}(ABC|ab\\\\?cdef)x?')", [(Anchor("cmd", True, "ping"),)]),
        ("regexp_like(cmd, '(?i)[0-9](-Enc|--File)+')", [(Anchor("cmd", True, "-enc"), Anchor("cmd", True, "--file"))]),
        ("regexp_like(cmd, '(?:abc)?')", []),
        ("cmd like '%^%'", []),
        ("cmd like '%: %'", []),
        ("not image = 'ab.exe'", []),
        ("image not like '%ab.exe'", []),
        ("upper(image) = 'AB.EXE'", []),
        # An error of the first part counts, whatever the image is.
        ("10 / n > 4 and image = 'ab.exe'", []),
        ("image = 'ab.exe' and in_list(image, 'known')", []),
    ],
)
def test_a_clause_has_texts_of_which_one_must_occur(text: str, clauses: list[tuple[Anchor, ...]]) -> None:
    assert list(find_clauses(compile_expression(text, FIELDS))) == clauses


def test_a_condition_whose_sql_cannot_be_read_again_is_evaluated_for_every_event() -> None:
    condition = replace(compile_expression("image = 'ab.exe'", FIELDS), sql="image = (")
    assert find_clauses(condition) == ()


def test_few_conditions_are_evaluated_as_they_are() -> None:
    conditions = [compile_expression(f"image = 'image{number}'", FIELDS) for number in range(16)]
    assert prepare_search(tuple(conditions[:15])) is None
    assert prepare_search(tuple(conditions)) is not None


def test_only_the_events_found_are_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    condition = compile_expression("image like '%ab.exe' and 1 < length(cmd)", FIELDS)
    events = make_events(["x", "c:ab.exe", None, "ab.exe"], ["long", "l", "long", "long"], [1, 1, 1, 1])
    events.search(TextSearch([condition]))
    evaluated: list[int] = []
    real = type(condition).evaluate
    monkeypatch.setattr(
        type(condition), "evaluate", lambda self, columns, rows: evaluated.append(rows) or real(self, columns, rows)
    )
    holds, error = events.test(condition)
    assert (holds.tolist(), error, evaluated) == ([False, False, False, True], None, [2])
