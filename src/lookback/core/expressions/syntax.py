"""Text of an expression -> a syntax tree that means the same to Spark: parsing, limits and precedence.

sqlglot parses; this module sees to it that what it reads is what Spark would read. Functions keep the names they were
written with, so that one table (`functions.py`) decides about them, and where sqlglot and Spark bind operators
differently the expression is refused with the advice to put parentheses.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import ClassVar

from sqlglot import exp
from sqlglot.dialects.spark import Spark
from sqlglot.errors import SqlglotError
from sqlglot.parsers.spark import SparkParser
from sqlglot.tokenizer_core import Token, TokenType

from lookback.core.errors import ExpressionError
from lookback.core.values.limits import DEFAULT_LIMITS, Limits, name_limit

MAX_CHARACTERS = DEFAULT_LIMITS.expression_characters
MAX_LEVELS = DEFAULT_LIMITS.expression_levels
# A level of nesting takes about 25 frames of sqlglot's parser; the default limit of 1,000 allows forty levels.
_FRAMES = 8_000

COMPARISONS = (exp.EQ, exp.NEQ, exp.LT, exp.LTE, exp.GT, exp.GTE, exp.NullSafeEQ)
PREDICATES = (exp.In, exp.Between, exp.Like, exp.Escape, exp.Is, exp.NullSafeNEQ)
ARITHMETIC = (exp.Add, exp.Sub, exp.Mul, exp.Div, exp.IntDiv, exp.Mod, exp.Neg, exp.DPipe)
_LOOSE = (*COMPARISONS, *PREDICATES, exp.Not, exp.And, exp.Or)
_TIGHT = (*COMPARISONS, *PREDICATES, *ARITHMETIC)


class LookbackSql(Spark):
    """Spark's dialect without the rewriting of functions that sqlglot does to translate between engines."""

    class Tokenizer(Spark.Tokenizer):
        # Since Spark 4 a doubled quote within a string is a quote.
        STRING_ESCAPES: ClassVar[list[str]] = ["\\", "'", '"']
        NUMERIC_LITERALS: ClassVar[dict[str, str]] = {}
        # An expression is no statement: `call`, `show` and the like are names.
        COMMANDS: ClassVar[set[TokenType]] = set()

    class Parser(SparkParser):
        FUNCTIONS: ClassVar[dict[str, Callable[..., exp.Expr]]] = {}
        FUNCTION_PARSERS = {name: SparkParser.FUNCTION_PARSERS[name] for name in ("CAST", "TRY_CAST")}
        NO_PAREN_FUNCTIONS: ClassVar[dict[TokenType, type[exp.Expr]]] = {}
        STATEMENT_PARSERS: ClassVar[dict[TokenType, Callable[..., exp.Expr]]] = {}
        NO_PAREN_FUNCTION_PARSERS = {"CASE": SparkParser.NO_PAREN_FUNCTION_PARSERS["CASE"]}
        # sqlglot drops a unary plus, Spark types by it: `+5` is not a literal there.
        UNARY_PARSERS = {k: v for k, v in SparkParser.UNARY_PARSERS.items() if k is not TokenType.PLUS}


_DIALECT = LookbackSql()


def parse(text: str, limits: Limits = DEFAULT_LIMITS) -> exp.Expr:
    """The syntax tree of one expression.

    Raises ExpressionError for what is empty, has more characters or levels than `limits`, is no single expression, or is
    bound differently by Spark.
    """
    _check_size(text, limits.expression_characters)
    tokens = _tokens(text)
    most = max(MAX_LEVELS, limits.expression_levels)
    _check_tokens(tokens, most)
    try:
        with _deep_recursion():
            trees = _DIALECT.parser().parse_into(exp.Condition, tokens, text)
    except SqlglotError as error:
        raise ExpressionError([_parse_problem(text, error)]) from None
    except RecursionError:
        raise ExpressionError([_too_deep(most)]) from None
    if len(trees) != 1 or trees[0] is None:
        raise ExpressionError(["write one expression, without a semicolon"])
    tree = trees[0]
    _check_levels(tree, limits.expression_levels)
    problems = list(_ambiguities(tree))
    if problems:
        raise ExpressionError(problems)
    return tree


def _too_deep(most: int) -> str:
    what = f"the expression is nested deeper than {most} levels; split it into smaller ones"
    return name_limit(what, "expression_levels")


def _check_size(text: object, most: int) -> None:
    if not isinstance(text, str):
        raise ExpressionError([f"an expression is a text, got {text!r}"])
    if not text.strip():
        raise ExpressionError(["the expression is empty"])
    if len(text) > most:
        what = f"the expression has {len(text):,} characters, more than {most:,}; split it into smaller ones"
        raise ExpressionError([name_limit(what, "expression_characters")])


def _tokens(text: str) -> list[Token]:
    try:
        tokens = _DIALECT.tokenize(text)
    except SqlglotError as error:
        raise ExpressionError([_parse_problem(text, error)]) from None
    return [_spark_string(text, token) if token.token_type == TokenType.STRING else token for token in tokens]


def _spark_string(text: str, token: Token) -> Token:
    # sqlglot and Spark differ in rare escapes (octal, \Z, \%), so strings are read again from the source.
    body = text[token.start + 1 : token.end]
    quote = text[token.start]
    return Token(
        TokenType.STRING, _unescape(body, quote), token.line, token.col, token.start, token.end, list(token.comments)
    )


_ESCAPE = re.compile(
    r"""\\u([0-9a-fA-F]{4}) | \\U([0-9a-fA-F]{8}) | \\([01][0-7]{2}) | \\(.) | (''|"")""", re.VERBOSE | re.DOTALL
)
_SINGLE = {"0": "\0", "b": "\b", "n": "\n", "r": "\r", "t": "\t", "Z": "\x1a", "%": "\\%", "_": "\\_"}


def _unescape(body: str, quote: str) -> str:
    def replacement(match: re.Match[str]) -> str:
        short, long, octal, single, doubled = match.groups()
        if short or long:
            return _code_point(int(short or long, 16))
        if octal:
            return chr(int(octal, 8))
        if single is not None:
            return _SINGLE.get(single, single)
        return quote if doubled == quote * 2 else str(doubled)

    return _ESCAPE.sub(replacement, body)


def _code_point(code: int) -> str:
    if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
        raise ExpressionError([f"\\u{code:04X} is no character; write the character itself"])
    return chr(code)


_STATEMENTS = {TokenType.SELECT, TokenType.WITH, TokenType.VALUES}


def _check_tokens(tokens: list[Token], most: int) -> None:
    if not tokens:
        raise ExpressionError(["the expression is empty"])
    problems = []
    if any(token.token_type == TokenType.SEMICOLON for token in tokens):
        problems.append("write one expression, without a semicolon")
    if any(token.token_type in _STATEMENTS for token in tokens):
        problems.append("a query is not allowed; an expression sees the fields of one event")
    for before, after in pairwise(tokens):
        if before.token_type == after.token_type == TokenType.STRING:
            problems.append("strings that stand side by side are not allowed; join them with concat()")
            break
    for before, at, after, word in zip(tokens, tokens[1:], tokens[2:], tokens[3:], strict=False):
        kinds = (before.token_type, at.token_type, after.token_type)
        # After a `)` it is no name of a field or of a function.
        if kinds == (TokenType.R_PAREN, TokenType.FILTER, TokenType.L_PAREN) and word.token_type != TokenType.WHERE:
            problems.append(f"{at.text} ( needs the word where; write filter (where {word.text} ...)")
    if any(token.token_type in (TokenType.RAW_STRING, TokenType.HEX_STRING) for token in tokens):
        problems.append("raw and hexadecimal literals are not allowed; write a plain string or number")
    if problems:
        raise ExpressionError(problems)
    _check_nesting(tokens, most)


def _check_nesting(tokens: list[Token], most: int) -> None:
    """Refuse before parsing what would exhaust the parser's stack."""
    depth = prefixes = 0
    for token in tokens:
        kind = token.token_type
        if kind in (TokenType.L_PAREN, TokenType.CASE, TokenType.L_BRACKET):
            depth += 1
        elif kind in (TokenType.R_PAREN, TokenType.END, TokenType.R_BRACKET):
            depth -= 1
        prefixes = prefixes + 1 if kind in (TokenType.NOT, TokenType.DASH, TokenType.TILDE) else 0
        if depth > most or prefixes > most:
            raise ExpressionError([_too_deep(most)])


@contextmanager
def _deep_recursion() -> Iterator[None]:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, _FRAMES))
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


def _parse_problem(text: str, error: SqlglotError) -> str:
    details = getattr(error, "errors", None)
    if not details:
        return "the expression cannot be read; look for a quote or comment that is not closed"
    found = details[0].get("highlight") or ""
    if not found:
        return "the expression ends too early; look for a missing operand or parenthesis"
    before = (details[0].get("start_context") or "")[-20:]
    said = details[0].get("description") or ""
    if said.startswith("Expecting )"):
        return f"a ')' or an operator is missing at {before + found!r}; write it there"
    unquoted = _unquoted(details[0])
    if said.startswith("Required keyword"):
        return f"something is missing at {before + found!r}; write a value on both sides of each operator{unquoted}"
    after = f" after {before!r}" if before else ""
    is_keyword = _WORD.fullmatch(found) and not is_bare_name(found)
    field = f"; if {found} is a field, write it in backticks: {_in_backticks(found)}" if is_keyword else ""
    return (
        f"the expression cannot be read at {found!r}{after}; look there for a missing operator, quote or comma, "
        f"or leave the rest out{field or unquoted}"
    )


# What follows a comparison up to where reading ends: words and signs as a text has them, but for a quote before them.
_UNQUOTED = re.compile(r"(?:=|<>|\blike)\s*([^\s'\"`(),=<>]*[^\s'\"`(),=<>0-9.][^'\"`(),=<>]*)", re.IGNORECASE)


def _unquoted(error: dict[str, str]) -> str:
    """The remedy where what cannot be read may be a text without quotes."""
    rest = re.match(r"[^\s,)'\"]*", error.get("end_context") or "")
    text = f"{error.get('start_context') or ''}{error['highlight']}{rest[0] if rest else ''}"
    found = list(_UNQUOTED.finditer(text))[-1:]
    return "".join(f"; put texts in single quotes: '{each[1].strip()}'" for each in found if each.end() == len(text))


# A name without backticks is read as a field in all of these, or it is printed with them.
_PLACES = (
    "({0})", "f({0})", "{0} + {0} * {0}", "{0} - interval '1' day", "case {0} when {0} then {0} end", "not {0} and {0} in ({0})",
    "{0} not like {0} escape '!'", "{0} is null or {0} between {0} and {0}", "cast({0} as int)", "f(1) filter (where {0})",
)  # fmt: skip
_WORD = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*", re.ASCII)
# Above it sqlglot reads a field of a field.
_MOST_PARTS = 4


def name_as_sql(name: str) -> str:
    """The name of a field as an expression has it: in backticks where it would be read as anything else."""
    parts = name.split(".")
    if len(parts) > _MOST_PARTS:
        return _in_backticks(name)
    return ".".join(part if is_bare_name(part) else _in_backticks(part) for part in parts)


def _in_backticks(name: str) -> str:
    return f"`{name.replace('`', '``')}`"


@functools.lru_cache(maxsize=4_096)
def is_bare_name(word: str) -> bool:
    """Whether a word without backticks is read as the name of a field wherever one may stand.

    Asked of the parser itself: which of its keywords are names as well depends on where they stand.
    """
    if not _WORD.fullmatch(word):
        return False
    if [token.token_type for token in _DIALECT.tokenize(word)] == [TokenType.VAR]:
        return True
    return all(_reads_names(place.format(word), word, place.count("{0}")) for place in _PLACES)


def _reads_names(text: str, word: str, times: int) -> bool:
    try:
        (tree,) = _DIALECT.parser().parse_into(exp.Condition, _DIALECT.tokenize(text), text)
    except SqlglotError:
        return False
    columns = [] if tree is None else list(tree.find_all(exp.Column))
    return [[part.name for part in column.parts] for column in columns] == [[word]] * times


def children(node: exp.Expr) -> Iterator[exp.Expr]:
    """The direct parts of a node."""
    for value in node.args.values():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, exp.Expr):
                yield item


def unwrapped(node: exp.Expr) -> exp.Expr:
    """The node within any parentheses."""
    while isinstance(node, exp.Paren):
        node = node.this
    return node


def _check_levels(tree: exp.Expr, most: int) -> None:
    # A chain of ANDs, however long, is one level.
    pending = [(tree, 1)]
    while pending:
        node, level = pending.pop()
        if level > most:
            raise ExpressionError([_too_deep(most)])
        for child in children(node):
            chained = isinstance(node, (exp.And, exp.Or)) and type(child) is type(node)
            pending.append((child, level if chained or isinstance(node, exp.Paren) else level + 1))


def _ambiguities(tree: exp.Expr) -> Iterator[str]:
    """Where Spark would group operators differently than they were parsed here."""
    for node in tree.walk():
        if isinstance(node, _TIGHT):
            operands = [c for c in children(node) if not _listed(node, c)]
            if any(isinstance(c, _LOOSE) and not _escaped(node, c) for c in operands):
                yield f"put parentheses around the comparisons in {shortened(node)}"
            elif isinstance(node, exp.DPipe) and any(isinstance(c, (exp.Add, exp.Sub)) for c in operands):
                yield f"put parentheses around the sum in {shortened(node)}"
        cast = node.this if isinstance(node, exp.Neg) else None
        if isinstance(cast, (exp.Cast, exp.TryCast)) and isinstance(cast.this, exp.Literal):
            yield f"put parentheses after the minus sign in {shortened(node)}"


def _listed(node: exp.Expr, child: exp.Expr) -> bool:
    return isinstance(node, exp.In) and child is not node.this


def _escaped(node: exp.Expr, child: exp.Expr) -> bool:
    return isinstance(node, exp.Escape) and isinstance(child, exp.Like)


def shortened(node: exp.Expr) -> str:
    """The node's text for a message, at most about 60 characters."""
    text = " ".join(node.sql(LookbackSql, comments=False).split())
    return repr(text if len(text) <= 60 else text[:57] + "...")
