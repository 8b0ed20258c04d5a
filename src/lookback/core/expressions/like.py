"""LIKE patterns: what they match, in linear time."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import ahocorasick
import numpy as np

from lookback.core.expressions.kernels import KernelResult, map_repeated
from lookback.core.expressions.letters import change_to_lower
from lookback.core.expressions.nodes import Node, Pieces, TextTest, make_strict
from lookback.core.expressions.operators import RefusedOperator
from lookback.core.expressions.signatures import require_type
from lookback.core.values.columns import Values
from lookback.core.values.types import BOOLEAN, STRING

# The limit for a part between two `%` of a LIKE pattern if it has `_`, since it is compared at every position of the
# text.
MAX_LIKE_PART_CHARACTERS = 100
# With at least this many texts, one search for all of them (Aho-Corasick) is faster than a search for each.
_PARTS_AT_ONCE = 9


def make_like(value: Node, pattern: Node, escape: str, negated: bool, *, ignores_case: bool = False) -> Node:
    """Makes value [not] like pattern: `%` is any text, `_` any character. Takes linear time.

    Args:
        value: The text.
        pattern: The pattern, a literal.
        escape: The character before a `%` or `_` that stands for itself.
        negated: Whether it is `not like`.
        ignores_case: Whether it is `ilike`: text and pattern are compared in small letters, as Spark does.

    Raises:
        RefusedOperator: The pattern is not a literal or is invalid, or `ilike` has a text in capital letters.
    """
    word = "ilike" if ignores_case else "like"
    if not isinstance(pattern.literal, str):
        raise RefusedOperator(
            f"the pattern of {word!r} must be a literal text; use contains(), startswith() or endswith()"
        )
    if ignores_case and value.sql.startswith("upper("):
        # Spark drops the inner change of case, which matters for letters such as the sharp s.
        raise RefusedOperator(f"'ilike' of {value.sql!r} changes the case twice; leave upper() out")
    sql = f"{value.within(4)} {'not ' if negated else ''}{word} {pattern.sql}"
    if escape != "\\":
        sql += f" escape {quote_text(escape)}"
    pieces = split_pattern(change_to_lower(pattern.literal) if ignores_case else pattern.literal, escape)
    test = TextTest(require_type(word, value, STRING), ignores_case, pieces)
    node = _make_test(sql, test, compile_like(pieces), negated=negated)
    return node if negated else replace(node, tested=test)


def join_likes(nodes: Sequence[Node]) -> list[Node]:
    """Joins neighbours among the operands of `or` that test one text, so that each text is read once for all patterns."""
    joined: list[Node] = []
    for test, group in groupby(nodes, lambda node: node.tested and (node.tested.text.sql, node.tested.ignores_case)):
        likes = list(group)
        tests = [node.tested for node in likes if node.tested is not None]
        if test is None or len(likes) == 1:
            joined += likes
        else:
            joined.append(_make_test("", tests[0], _compile_any([each.pieces for each in tests])))
    return joined


def _make_test(sql: str, test: TextTest, matches: Callable[[str], bool], *, negated: bool = False) -> Node:
    hit = (lambda text: matches(change_to_lower(text))) if test.ignores_case else matches

    def find_hits(texts: Values) -> Values:
        return np.fromiter(map(hit, texts.tolist()), dtype=bool, count=len(texts))

    def run(values: Values) -> KernelResult:
        hits = map_repeated(find_hits, values)
        return KernelResult(~hits if negated else hits)

    return make_strict(BOOLEAN, sql, [test.text], run, 4)


def _compile_any(patterns: Sequence[Pieces]) -> Callable[[str], bool]:
    """Returns a function that tells whether any of the patterns matches a text."""
    whole, heads, tails, parts = set[str](), list[str](), list[str](), list[str]()
    others: list[Callable[[str], bool]] = []
    for pieces in patterns:
        texts = ["".join(c or "" for c in piece) for piece in pieces]
        if any(None in piece for piece in pieces):
            others.append(compile_like(pieces))
        elif len(texts) == 1:
            whole.add(texts[0])
        elif len(texts) == 2 and "" in texts:
            (heads if texts[0] else tails).append(texts[0] or texts[1])
        elif len(texts) == 3 and texts[0] == texts[2] == "" != texts[1]:
            parts.append(texts[1])
        else:
            others.append(compile_like(pieces))
    if len(parts) >= _PARTS_AT_ONCE:
        automaton = make_automaton(dict.fromkeys(parts, True))
        others.insert(0, lambda text: next(automaton.iter(text), None) is not None)
        parts.clear()
    ends = tuple(tails)
    begins = tuple(heads)

    def matches(text: str) -> bool:
        return (
            text in whole
            or text.endswith(ends)
            or text.startswith(begins)
            or any(part in text for part in parts)
            or any(other(text) for other in others)
        )

    return matches


def make_automaton(values: Mapping[str, object]) -> ahocorasick.Automaton:
    """Makes an automaton that finds texts in a text at once, each with its value."""
    automaton = ahocorasick.Automaton()
    for text, value in values.items():
        automaton.add_word(text, value)
    automaton.make_automaton()
    return automaton


def quote_text(text: str) -> str:
    """Writes a text as a string literal."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def split_pattern(pattern: str, escape: str) -> Pieces:
    """Splits a pattern at `%`; None in a piece matches any character. Raises Refused."""
    pieces: list[list[str | None]] = [[]]
    position = 0
    while position < len(pattern):
        character = pattern[position]
        position += 1
        if character == escape:
            following = pattern[position : position + 1]
            if following not in ("%", "_", escape) or not following:
                raise RefusedOperator(
                    f"the pattern {pattern!r} has {escape!r} before something other than %, _ or {escape!r}; double it"
                )
            pieces[-1].append(following)
            position += 1
        elif character == "%":
            pieces.append([])
        else:
            pieces[-1].append(None if character == "_" else character)
    return tuple(map(tuple, pieces))


def compile_like(pieces: Pieces) -> Callable[[str], bool]:
    """Returns the test of a LIKE pattern, as `split_pattern` returns it. Raises Refused.

    Each part between `%` is matched at the first place where it fits, so the test never backtracks.
    """
    parts = [re.compile("".join("." if c is None else re.escape(c) for c in piece), re.DOTALL) for piece in pieces]
    if all(None not in piece for piece in pieces):
        return _compile_plain_like(["".join(c or "" for c in piece) for piece in pieces])
    if len(parts) == 1:
        return lambda text: parts[0].fullmatch(text) is not None
    if any(None in piece and len(piece) > MAX_LIKE_PART_CHARACTERS for piece in pieces[1:-1]):
        raise RefusedOperator(
            f"the pattern has a part of more than {MAX_LIKE_PART_CHARACTERS} characters with '_' between two '%'; make "
            "it shorter"
        )
    head, *middle, tail = parts
    tail_length = len(pieces[-1])

    def matches(text: str) -> bool:
        match = head.match(text)
        for part in middle:
            if match is None:
                return False
            match = part.search(text, match.end())
        end = len(text) - tail_length
        return match is not None and end >= match.end() and tail.match(text, end) is not None

    return matches


def _compile_plain_like(pieces: list[str]) -> Callable[[str], bool]:
    """Returns the test of a pattern without `_`."""
    head, tail = pieces[0], pieces[-1]
    if len(pieces) == 1:
        return head.__eq__
    if len(pieces) == 2:
        least = len(head) + len(tail)
        return lambda text: text.startswith(head) and text.endswith(tail) and len(text) >= least

    def matches(text: str) -> bool:
        if not text.startswith(head):
            return False
        end = len(head)
        for piece in pieces[1:-1]:
            start = text.find(piece, end)
            if start < 0:
                return False
            end = start + len(piece)
        return text.endswith(tail) and len(text) - len(tail) >= end

    return matches
