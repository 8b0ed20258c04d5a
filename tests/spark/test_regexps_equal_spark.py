"""Regular expressions find and extract what Spark's do, over generated patterns and texts.

Patterns are made of the grammar that is accepted, and of characters thrown together, of which few are. Texts have the
characters that engines read differently: line breaks, letters whose other case is beyond ASCII, combining marks,
characters beyond the first 65,536, NUL.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from lookback.core.expressions.compiling import compile_expression
from lookback.core.expressions.like import quote_text
from lookback.core.expressions.operators import RefusedOperator
from lookback.core.expressions.patterns import Parser
from lookback.core.expressions.regexps import translate
from lookback.core.values.columns import from_arrow
from lookback.core.values.types import STRING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark]

TEXTS_PER_PATTERN = 5
_CHARACTERS = (
    "aaabbAB01__ .-\\kKsSiIzZ\n\n\r\r\t\0\v\f\x1b\x7f[]{}()*+?&^$|/,:#@`"
    "\xe9\xc9\xdf\x85\u2028\u2029\u212a\u017f\u0130\u0131\u0301\u0660\u00a0\u180e\u3000\ufb01\U0001f600\U00010400"
)
_ATOMS = [
    "a", "b", "A", "k", "s", "i", "Z", "0", "_", " ", "-", "é", "ß", "😀", "\U00010400", "\u212a", "\u017f", "\u0301", ".", ".", ".",
    "}", "]", ",", ":", "#", "/", "\n", "\r", "\\d", "\\D", "\\w", "\\W", "\\s", "\\S", "\\.", "\\\\", "\\n", "\\r", "\\t", "\\f", "\\a",
    "\\e", "\\01", "\\07", "\\012", "\\0377", "\\x41", "\\x{e9}", "\\x{1F600}", "\\u0085", "\\u212A", "\\Qa.b\\E", "\\Q*", "\\-", "\\[", "\\{",
    "\\p{Alpha}", "\\P{Alpha}", "\\p{Punct}", "\\p{Lower}", "\\p{Upper}", "\\p{Space}", "\\p{Blank}", "\\p{Cntrl}", "\\p{ASCII}",
    "\\p{XDigit}", "\\p{Graph}", "\\p{Print}", "\\p{Digit}", "\\P{Alnum}",
]  # fmt: skip
_PLACES = ["^", "$", "$", "\\A", "\\z", "\\Z", "\\b"]
_MEMBERS = [
    "a", "b", "k", "K", "s", "0", "_", "-", "^", "$", ".", "*", "(", "|", "{", "#", " ", "&", "é", "😀", "\u212a", "\\d", "\\w", "\\W", "\\s", "\\S",
    "\\n", "\\r", "\\\\", "\\]", "\\[", "\\-", "\\^", "a-c", "A-z", "J-L", "0-9", "Z-a", "À-ÿ", "\\x00-\\x1f", "\\u2000-\\u2fff", "\n", "\\p{Alpha}",
    "\\P{Punct}", "😀-😂", "!--",
]  # fmt: skip
_REPEATS = ["*", "+", "?", "*?", "+?", "??", "{2}", "{0,2}", "{1,}", "{1,3}?", "{0}", "{2,}?"]
_SOUP = [
    "\\",
    "\\Q",
    "\\E",
    "(?",
    "(?:",
    "(?i)",
    "(?i-s:",
    "(?s)",
    "{1",
    "{,2}",
    "{2}",
    "}",
    *"()[]{}^$*+?|-&.,abkZ01\n\r #=!<>:é😀Ktnrdwsbxu",
]


class Generator:
    """Draws patterns and texts of a seed."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    def pattern(self) -> str:
        draw = self._chance.random()
        if draw < 0.2:
            return "".join(self._chance.choice(_SOUP) for _ in range(self._chance.randrange(7)))
        flags = self._chance.choice(["", "", "", "(?i)", "(?s)", "(?is)", "(?m)"])
        return flags + self._alternation(3)

    def _alternation(self, levels: int) -> str:
        return "|".join(self._sequence(levels) for _ in range(self._chance.choice([1, 1, 1, 2, 3])))

    def _sequence(self, levels: int) -> str:
        parts = [self._part(levels) for _ in range(self._chance.choice([0, 1, 1, 2, 2, 3, 4]))]
        if self._chance.random() < 0.15:
            parts.append("$")
        return "".join(parts)

    def _part(self, levels: int) -> str:
        draw = self._chance.random()
        if draw < 0.1:
            return self._chance.choice(_PLACES)
        if draw < 0.3 and levels:
            opening = self._chance.choice(["(", "(", "(", "(?:", "(?i:", "(?-i:", "(?s:", "(?<g>"])
            atom = f"{opening}{self._alternation(levels - 1)})"
        elif draw < 0.5:
            members = "".join(self._chance.choice(_MEMBERS) for _ in range(self._chance.randrange(1, 4)))
            atom = f"[{self._chance.choice(['', '^'])}{members}]"
        else:
            atom = self._chance.choice(_ATOMS)
        return atom + (self._chance.choice(_REPEATS) if self._chance.random() < 0.3 else "")

    def texts(self) -> list[str | None]:
        return [self._text() for _ in range(TEXTS_PER_PATTERN)]

    def _text(self) -> str | None:
        draw = self._chance.random()
        if draw < 0.03:
            return None
        letters = "ab\n\r" if draw < 0.3 else _CHARACTERS
        end = self._chance.choice(["", "", "", "", "\n", "\r", "\r\n", "\n\r", "\x85", "\u2028"])
        return "".join(self._chance.choice(letters) for _ in range(self._chance.choice([0, 1, 2, 3, 5, 8, 13]))) + end


def _accepts(pattern: str, group: int | None) -> bool:
    try:
        translate(pattern, group)
    except RefusedOperator:
        return False
    return True


def _evaluate(call: str, texts: list[str | None]) -> list[Any]:
    column = compile_expression(call, {"t": STRING}).evaluate({"t": from_arrow(pa.array(texts), STRING)}, len(texts))
    assert column.error is None
    return [column.item(row) for row in range(len(texts))]


def make_pairs(seed: int, pairs: int, *, has_ascii_words: bool) -> Iterator[dict[str, Any]]:
    """Yields patterns that are accepted with texts and Lookback's values.

    `has_ascii_words`: Spark's Java reads `\\b` as Lookback does, by letters of ASCII; before Java 19 it did not.
    """
    generator, made = Generator(seed), 0
    chance = random.Random(seed)
    while made < pairs:
        pattern, texts = generator.pattern(), generator.texts()
        if not _accepts(pattern, None):
            continue
        if "\\b" in pattern and not has_ascii_words:
            texts = [text and text.encode("ascii", "ignore").decode() for text in texts]
        found = _evaluate(f"t rlike {quote_text(pattern)}", texts)
        parser = Parser(pattern)
        parser.parse()
        group = chance.randint(0, parser.groups)
        taken: list[Any] = [None] * len(texts)
        if is_extracted := _accepts(pattern, group):
            taken = _evaluate(f"regexp_extract(t, {quote_text(pattern)}, {group})", texts)
        for text, is_found, part in zip(texts, found, taken, strict=True):
            yield {"p": pattern, "t": text, "n": group, "e": is_extracted, "found": is_found, "taken": part}
            made += 1


def find_differences(spark: SparkSession, rows: list[dict[str, Any]]) -> list[str]:
    """Asks Spark about the rows in one query, in halves where it fails, to find the culprit."""
    names = ("p", "t", "n", "e")
    columns = {name: [row[name] for row in rows] for name in names}
    types = {"p": pa.string(), "t": pa.string(), "n": pa.int32(), "e": pa.bool_()}
    table = pa.table({"at": range(len(rows)), **{name: pa.array(columns[name], types[name]) for name in names}})
    try:
        answer = spark.createDataFrame(table).selectExpr(
            "at", "rlike(t, p) as found", "case when e then regexp_extract(t, p, n) end as taken"
        ).toArrow()  # fmt: skip
    except Exception as error:  # noqa: BLE001 - any failure of Spark is a finding
        if len({row["p"] for row in rows}) == 1:
            return [f"{rows[0]['p']!r}: Spark fails: {str(error)[:300]}"]
        middle = len(rows) // 2
        return [*find_differences(spark, rows[:middle]), *find_differences(spark, rows[middle:])]
    return [
        f"{row['p']!r} group {row['n']} on {row['t']!r}: {row['found']}, {row['taken']!r}; Spark {theirs['found']}, {theirs['taken']!r}"
        for row, theirs in ((rows[each["at"]], each) for each in answer.to_pylist())
        if (row["found"], row["taken"]) != (theirs["found"], theirs["taken"])
    ]


def _reads_words_by_ascii(spark: SparkSession) -> bool:
    assert spark._jvm is not None
    return int(spark._jvm.System.getProperty("java.specification.version")) >= 19


@pytest.mark.parametrize("pairs", [1_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_c12_3_generated_patterns_equal_spark(spark: SparkSession, pairs: int) -> None:
    rows = list(make_pairs(pairs, pairs, has_ascii_words=_reads_words_by_ascii(spark)))
    found = [
        difference
        for start in range(0, len(rows), 20_000)
        for difference in find_differences(spark, rows[start : start + 20_000])
    ]
    assert found == []
    assert sum(bool(row["found"]) for row in rows) > pairs / 4
    assert sum(bool(row["taken"]) for row in rows) > pairs / 20
