r"""Searches texts for what thousands of conditions look for, in one pass, so that few conditions are evaluated at all.

A condition on texts can only hold for an event that satisfies all its clauses. A clause is a choice of texts, its
anchors, of which one has to occur:

    lower(image) like '%ntdsutil.exe' and cmd like '%ifm%'      ntdsutil.exe in lower(image); ifm in cmd
    image = 'a.exe' or image = 'b.exe'                          a.exe or b.exe in image
    not cmd like '%ifm%'                                        no clause, so it is evaluated for every event

The automaton of Aho and Corasick finds all anchors in a text in time linear in the text, however many there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
from sqlglot import exp

from lookback.core.expressions.compiling import CANONICAL, Expression
from lookback.core.expressions.letters import change_to_lower
from lookback.core.expressions.like import make_automaton, split_pattern
from lookback.core.expressions.regexps import find_required_texts
from lookback.core.expressions.syntax import parse, unwrap
from lookback.core.values.columns import Column
from lookback.core.values.keys import Int64s
from lookback.core.values.types import STRING, DataType

# A shorter anchor of ASCII occurs nearly everywhere, so looking for it saves nothing; two signs such as ^^ are rare.
_MIN_CHARACTERS, _MIN_SIGNS = 3, 2
# A clause with more texts is left out.
_MAX_ANCHORS = 10_000
# With fewer conditions, evaluating them all is as fast as the search.
_MIN_CONDITIONS = 16
# Operations on texts, numbers and booleans that never have an error.
_SAFE = (
    exp.And, exp.Or, exp.Not, exp.Paren, exp.Like, exp.ILike, exp.Escape, exp.In, exp.Is, exp.EQ, exp.NEQ, exp.LT,
    exp.LTE, exp.GT, exp.GTE, exp.NullSafeEQ, exp.Column, exp.Identifier, exp.Null, exp.Boolean, exp.Literal,
)  # fmt: skip
_SAFE_FUNCTIONS = {
    "cidr_match", "coalesce", "contains", "endswith", "length", "lower", "ltrim", "regexp_like", "rtrim", "startswith",
    "trim", "upper",
}  # fmt: skip
_TESTS = {"startswith", "endswith", "contains"}


class Anchor(NamedTuple):
    """A text that occurs in a field, or in the field in small letters."""

    field: str
    is_lower: bool
    text: str


# Texts of which one occurs in every event for which a condition holds.
Clause = tuple[Anchor, ...]


class TextSearch:
    """The conditions that can be found by their clauses. Keeps nothing of the events.

    Args:
        conditions: Conditions over the same fields.
    """

    def __init__(self, conditions: Iterable[Expression]) -> None:
        numbers: dict[Clause, int] = {}
        # The numbers of the clauses of each condition, by its SQL.
        self._conditions: dict[str, list[int]] = {}
        for condition in conditions:
            clauses = find_clauses(condition)
            if clauses:
                self._conditions[condition.sql] = [numbers.setdefault(each, len(numbers)) for each in clauses]
        self._count = len(numbers)
        by_subject: dict[tuple[str, bool], dict[str, list[int]]] = {}
        for clause, number in numbers.items():
            for field, is_lower, text in clause:
                by_subject.setdefault((field, is_lower), {}).setdefault(text, []).append(number)
        self._automata = {subject: make_automaton(texts) for subject, texts in by_subject.items()}

    def find(self, columns: Mapping[str, Column]) -> dict[str, Int64s]:
        """Finds the rows for which conditions may hold.

        Returns:
            For each condition that has clauses, by its SQL, the ascending positions of these rows.
        """
        positions = self._find_positions(columns)
        return {sql: _intersect([positions[number] for number in clauses]) for sql, clauses in self._conditions.items()}

    def _find_positions(self, columns: Mapping[str, Column]) -> list[Int64s]:
        """Finds the rows that satisfy each clause, ascending."""
        rows, numbers = list[int](), list[int]()
        for (field, is_lower), automaton in self._automata.items():
            column, known = columns[field], dict[str, list[int]]()
            is_known = column.is_known().tolist()
            for row, text in enumerate(column.values.tolist()):
                if not is_known[row]:
                    continue
                found = known.get(text)
                if found is None:
                    matches = automaton.iter(change_to_lower(text) if is_lower else text)
                    found = known[text] = list(set(chain.from_iterable(each for _, each in matches)))
                rows += [row] * len(found)
                numbers += found
        # A clause may be satisfied by texts of several fields.
        codes = np.unique(np.array(numbers, dtype=np.int64) * (len(column) if numbers else 1) + rows)
        of_clause, at = np.divmod(codes, len(column)) if numbers else (codes, codes)
        edges = np.searchsorted(of_clause, np.arange(self._count + 1))
        return [at[low:high] for low, high in pairwise(edges.tolist())]


def _intersect(parts: Sequence[Int64s]) -> Int64s:
    """Returns the positions that all parts have; each part is ascending."""
    first, *others = sorted(parts, key=len)
    for each in others:
        if not len(first):
            break
        first = first[each[np.minimum(np.searchsorted(each, first), len(each) - 1)] == first]
    return first


@lru_cache(maxsize=4)
def prepare_search(conditions: tuple[Expression, ...]) -> TextSearch | None:
    """Prepares the search for some conditions; None if there are too few for it to pay."""
    return TextSearch(conditions) if len(conditions) >= _MIN_CONDITIONS else None


@lru_cache(maxsize=20_000)
def find_clauses(condition: Expression) -> tuple[Clause, ...]:
    """Finds the clauses of a condition, all of which every event satisfies for which the condition holds.

    There are none if nothing is known, or if the condition may have an error, which counts for any event.
    """
    if condition.memberships or not condition.is_readable:
        return ()
    tree = parse(condition.sql, CANONICAL)
    return tuple(dict.fromkeys(_find_clauses(tree, condition.types))) if _never_fails(tree, condition.types) else ()


def never_fails(expression: Expression) -> bool:
    """Returns whether an expression is sure to have no error for any event; false if that is not known."""
    return _never_fails(parse(expression.sql, CANONICAL), expression.types)


def _never_fails(tree: exp.Expr, types: Mapping[str, DataType]) -> bool:
    return all(map(_is_safe_type, types.values())) and all(map(_is_safe, tree.walk()))


def _is_safe_type(type_: DataType) -> bool:
    return type_.is_integer or type_.is_float or type_.name in ("string", "boolean")


def _is_safe(node: exp.Expr) -> bool:
    if isinstance(node, exp.Anonymous):
        name = str(node.name).lower()
        return name in _SAFE_FUNCTIONS or (name == "split_part" and _is_part_number(node.expressions[2]))
    # The number 1.5 is a decimal, and comparing it with an integer casts both.
    return isinstance(node, _SAFE) and not (isinstance(node, exp.Literal) and "." in node.name and not node.is_string)


def _is_part_number(node: exp.Expr) -> bool:
    """Returns whether this is a number other than 0, which split_part refuses."""
    node = unwrap(node)
    return isinstance(node, exp.Literal) and node.name.strip("0") != ""


def _find_clauses(node: exp.Expr, types: Mapping[str, DataType]) -> list[Clause]:
    node = unwrap(node)
    if isinstance(node, exp.And):
        return [clause for part in node.flatten() for clause in _find_clauses(part, types)]
    if isinstance(node, exp.Or):
        parts = [_find_clauses(part, types) for part in node.flatten()]
        if not all(parts):
            return []
        rarest = [max(clauses, key=_rate) for clauses in parts]
        merged = tuple(dict.fromkeys(chain.from_iterable(rarest)))
        return [merged] if len(merged) <= _MAX_ANCHORS else []
    subject, texts, is_lower = _find_texts(node)
    if subject is None or not texts or not all(map(_is_rare, texts)) or len(texts) > _MAX_ANCHORS:
        return []
    field, is_lowered = _read_subject(subject)
    if types.get(field) != STRING:
        return []
    return [tuple(Anchor(field, is_lower or is_lowered, text) for text in dict.fromkeys(texts))]


def _find_texts(node: exp.Expr) -> tuple[exp.Expr | None, list[str], bool]:
    """Returns the subject of a test, texts of which one occurs in it if it holds, and whether in its small letters."""
    nothing = None, list[str](), False
    escape = "\\"
    if isinstance(node, exp.Escape):
        node, escape = unwrap(node.this), node.expression.name
    if isinstance(node, (exp.Like, exp.ILike)) and not node.args.get("negate"):
        ignores_case = isinstance(node, exp.ILike)
        pattern = change_to_lower(node.expression.name) if ignores_case else node.expression.name
        return node.this, [_find_longest(pattern, escape)], ignores_case
    if isinstance(node, exp.EQ):
        sides = [unwrap(node.this), unwrap(node.expression)]
        literals = [each for each in sides if isinstance(each, exp.Literal)]
        others = [each for each in sides if not isinstance(each, exp.Literal)]
        if len(literals) == 1 and literals[0].is_string:
            return others[0], [literals[0].name], False
    if isinstance(node, exp.In) and node.expressions and all(_is_text(each) for each in node.expressions):
        return node.this, [each.name for each in node.expressions], False
    if isinstance(node, exp.Anonymous) and str(node.name).lower() in _TESTS and _is_text(node.expressions[1]):
        return node.expressions[0], [node.expressions[1].name], False
    if isinstance(node, exp.Anonymous) and str(node.name).lower() == "regexp_like":
        return node.expressions[0], find_required_texts(node.expressions[1].name), True
    return nothing


def _is_rare(text: str) -> bool:
    """Returns whether few texts probably have this text in them."""
    is_signs = len(text) >= _MIN_SIGNS and not any(each.isalnum() or each.isspace() for each in text)
    return len(text) >= _MIN_CHARACTERS or is_signs or not text.isascii()


def _is_text(node: exp.Expr) -> bool:
    return isinstance(node, exp.Literal) and bool(node.is_string)


def _find_longest(pattern: str, escape: str) -> str:
    """Returns the longest text that every match of a LIKE pattern has."""
    pieces = split_pattern(pattern, escape)
    texts = ["".join(character or "\0" for character in piece).split("\0") for piece in pieces]
    return max(chain.from_iterable(texts), key=len, default="")


def _read_subject(node: exp.Expr) -> tuple[str, bool]:
    """Returns the field that a test reads, and whether in small letters; no field if it reads anything else."""
    node, is_lower = unwrap(node), False
    if isinstance(node, exp.Anonymous) and str(node.name).lower() == "lower":
        node, is_lower = unwrap(node.expressions[0]), True
    return (node.name, is_lower) if isinstance(node, exp.Column) else ("", False)


def _rate(clause: Clause) -> tuple[int, int]:
    """Rates a clause by how rarely it is probably satisfied: by its shortest text, then by their number."""
    return min(len(each.text) for each in clause), -len(clause)
