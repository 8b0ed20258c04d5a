"""Parses the text of an expression, within limits, into a syntax tree that has the same meaning in Spark.

sqlglot does the parsing; this module makes sure that Spark would read the text the same way. Functions keep the names
as written, so that one table (`functions.py`) decides about them. If sqlglot and Spark would group operators
differently, the expression is refused with the advice to add parentheses.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import ClassVar, NamedTuple

from sqlglot import exp
from sqlglot.dialects.spark import Spark
from sqlglot.errors import SqlglotError
from sqlglot.parsers.spark import SparkParser
from sqlglot.tokenizer_core import Token, TokenType

from lookback.core.errors import ExpressionError
from lookback.core.values.limits import DEFAULT_LIMITS, Limits, name_limit
from lookback.core.values.texts import quote_identifier

MAX_CHARACTERS = DEFAULT_LIMITS.expression_characters
MAX_LEVELS = DEFAULT_LIMITS.expression_levels
# A level of nesting takes about 25 frames of sqlglot's parser. Python's default limit of 1,000 allows forty levels.
_FRAMES = 8_000

COMPARISONS = (exp.EQ, exp.NEQ, exp.LT, exp.LTE, exp.GT, exp.GTE, exp.NullSafeEQ)
PREDICATES = (exp.In, exp.Between, exp.Like, exp.ILike, exp.RegexpLike, exp.Escape, exp.Is, exp.NullSafeNEQ)
ARITHMETIC = (exp.Add, exp.Sub, exp.Mul, exp.Div, exp.IntDiv, exp.Mod, exp.Neg, exp.DPipe)
_LOOSE = (*COMPARISONS, *PREDICATES, exp.Not, exp.And, exp.Or)
_TIGHT = (*COMPARISONS, *PREDICATES, *ARITHMETIC)
_IS_WRITTEN = "is_written"


class LookbackSql(Spark):
    """Spark's dialect without sqlglot's rewriting of functions, which is meant for translation between engines."""

    class Tokenizer(Spark.Tokenizer):
        # Since Spark 4 a doubled quote inside a string is a quote.
        STRING_ESCAPES: ClassVar[list[str]] = ["\\", "'", '"']
        NUMERIC_LITERALS: ClassVar[dict[str, str]] = {}
        # Words such as `call` and `show` begin statements, but are names in an expression.
        COMMANDS: ClassVar[set[TokenType]] = set()

    class Parser(SparkParser):
        FUNCTIONS: ClassVar[dict[str, Callable[..., exp.Expr]]] = {}
        FUNCTION_PARSERS = {name: SparkParser.FUNCTION_PARSERS[name] for name in ("CAST", "TRY_CAST")}
        NO_PAREN_FUNCTIONS: ClassVar[dict[TokenType, type[exp.Expr]]] = {}
        STATEMENT_PARSERS: ClassVar[dict[TokenType, Callable[..., exp.Expr]]] = {}
        NO_PAREN_FUNCTION_PARSERS = {"CASE": SparkParser.NO_PAREN_FUNCTION_PARSERS["CASE"]}
        # sqlglot drops a unary plus, but in Spark it affects types: `+5` is not a literal.
        UNARY_PARSERS = {k: v for k, v in SparkParser.UNARY_PARSERS.items() if k is not TokenType.PLUS}

        def _parse_paren(self) -> exp.Expr | None:
            """Marks parentheses from the text, since sqlglot adds more to express its own grouping of operators."""
            tree = super()._parse_paren()
            if isinstance(tree, exp.Paren):
                tree.meta[_IS_WRITTEN] = True
            return tree


_DIALECT = LookbackSql()


def parse(text: str, limits: Limits = DEFAULT_LIMITS) -> exp.Expr:
    """Parses one expression.

    Raises ExpressionError if the text is empty, has more characters or levels than `limits` allow, is not a single
    expression, or is grouped differently by Spark.
    """
    _check_size(text, limits.expression_characters)
    tokens = _tokenize(text)
    most = max(MAX_LEVELS, limits.expression_levels)
    _check_tokens(tokens, most)
    try:
        with _deep_recursion():
            trees = _DIALECT.parser().parse_into(exp.Condition, tokens, text)
    except SqlglotError as error:
        raise ExpressionError([_explain_parse_error(text, error)]) from None
    except RecursionError:
        raise ExpressionError([_explain_depth(most)]) from None
    if len(trees) != 1 or trees[0] is None:
        raise ExpressionError(["write one expression, without a semicolon"])
    tree = _join_names(trees[0])
    _check_levels(tree, limits.expression_levels)
    problems = list(_find_ambiguities(tree))
    if problems:
        raise ExpressionError(problems)
    return tree


def _join_names(tree: exp.Expr) -> exp.Expr:
    """Makes each name with dots one identifier. sqlglot divides it: the last of five parts is a field of a column."""
    for node in list(tree.find_all(exp.Dot, exp.Column)):
        name = _read_name(node)
        if name is None or "." not in name:
            continue
        joined = exp.Column(this=exp.Identifier(this=name, quoted=False))
        if node is tree:
            return joined
        node.replace(joined)
    return tree


def _read_name(tree: exp.Expr) -> str | None:
    """Returns the full name of a column, with dots; None for anything else."""
    if isinstance(tree, exp.Column):
        return ".".join(str(part.name) for part in tree.parts)
    if isinstance(tree, exp.Dot) and isinstance(tree.expression, exp.Identifier):
        before = _read_name(tree.this)
        return None if before is None else f"{before}.{tree.expression.name}"
    return None


def _explain_depth(most: int) -> str:
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


def _tokenize(text: str) -> list[Token]:
    try:
        tokens = _DIALECT.tokenize(text)
    except SqlglotError as error:
        raise ExpressionError([_explain_parse_error(text, error)]) from None
    return [_reread_string(text, token) if token.token_type in _STRINGS else token for token in tokens]


_STRINGS = (TokenType.STRING, TokenType.RAW_STRING)


def _reread_string(text: str, token: Token) -> Token:
    # sqlglot and Spark differ in rare escapes (octal, \Z, \%), so reread strings from the source.
    prefix = int(token.token_type == TokenType.RAW_STRING)
    quote, body = text[token.start + prefix], text[token.start + prefix + 1 : token.end]
    if prefix and quote in body:
        # Spark ends a raw text at the first quote, whatever is before it.
        return token
    read = body if prefix else _unescape(body, quote)
    return Token(TokenType.STRING, read, token.line, token.col, token.start, token.end, list(token.comments))


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


_LOST = {
    "t": "a tab",
    "n": "a line break",
    "r": "a carriage return",
    "b": "a backspace",
    "0": "a NUL",
    "Z": "a Ctrl-Z",
}
_KEPT = ("\\", "'", '"', "%", "_")
# What may stand between LIKE and one of its patterns.
_IN_PATTERNS = (TokenType.ANY, TokenType.ALL, TokenType.SOME, TokenType.L_PAREN, TokenType.STRING, TokenType.COMMA)


class LostBackslash(NamedTuple):
    """A text literal that loses backslashes in SQL.

    Attributes:
        written: The literal, with its quotes.
        read: How SQL reads its backslashes.
        remedy: A literal that keeps them.
    """

    written: str
    read: str
    remedy: str


def find_lost_backslashes(text: str) -> list[LostBackslash]:
    r"""Finds text literals in which a backslash and the next character are read as an escape, in order.

    Leaves out literals that consist only of escapes, such as '\n', since these are intended.
    """
    found = []
    tokens = _tokenize(text)
    is_pattern = False
    for token in tokens:
        # Also in `not ilike '...'` and each text of `like any ('...', '...')`.
        if token.token_type in (TokenType.LIKE, TokenType.ILIKE):
            is_pattern = True
        elif token.token_type not in _IN_PATTERNS:
            is_pattern = False
        written = text[token.start : token.end + 1]
        is_plain = token.token_type == TokenType.STRING and written[0] not in "rR"
        matches = list(_ESCAPE.finditer(written, 1, len(written) - 1)) if is_plain else []
        lost = [each for each in matches if each[3] or (each[4] and each[4] not in _KEPT)]
        if not lost or not (any(each[4] not in _LOST for each in lost) or re.search(r"\w", _ESCAPE.sub("", written))):
            continue
        # A pattern of LIKE drops a second backslash, so it needs four.
        doubled = "\\" * (4 if is_pattern else 2)
        pieces, end = [], 0
        for each in lost:
            pieces += [written[end : each.start()], doubled]
            end = each.start() + 1
        names = dict.fromkeys(
            f"{each[0]} as {_LOST.get(each[4] or '', each[4] or repr(_unescape(each[0], '')))}" for each in lost
        )
        found.append(LostBackslash(written, " and ".join(names), "".join([*pieces, written[end:]])))
    return found


def _code_point(code: int) -> str:
    if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
        raise ExpressionError([f"\\u{code:04X} is not a character; write the character itself"])
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
            problems.append("adjacent strings are not allowed; join them with concat()")
            break
    for before, at, after, word in zip(tokens, tokens[1:], tokens[2:], tokens[3:], strict=False):
        kinds = (before.token_type, at.token_type, after.token_type)
        # After `)`, `filter` is neither a field nor a function.
        if kinds == (TokenType.R_PAREN, TokenType.FILTER, TokenType.L_PAREN) and word.token_type != TokenType.WHERE:
            problems.append(f"{at.text} ( needs the word where; write filter (where {word.text} ...)")
    if any(token.token_type in (TokenType.RAW_STRING, TokenType.HEX_STRING) for token in tokens):
        problems.append(
            "hexadecimal literals, and raw ones with a quote, are not allowed; write a plain string or number"
        )
    if problems:
        raise ExpressionError(problems)
    _check_nesting(tokens, most)


def _check_nesting(tokens: list[Token], most: int) -> None:
    """Raises ExpressionError for nesting that would exhaust the parser's stack."""
    depth = prefixes = 0
    for token in tokens:
        kind = token.token_type
        if kind in (TokenType.L_PAREN, TokenType.CASE, TokenType.L_BRACKET):
            depth += 1
        elif kind in (TokenType.R_PAREN, TokenType.END, TokenType.R_BRACKET):
            depth -= 1
        prefixes = prefixes + 1 if kind in (TokenType.NOT, TokenType.DASH, TokenType.TILDE) else 0
        if depth > most or prefixes > most:
            raise ExpressionError([_explain_depth(most)])


@contextmanager
def _deep_recursion() -> Iterator[None]:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, _FRAMES))
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


# What people write from another language, and what SQL has in its place.
_FOREIGN = {
    "&&": "write 'and'",
    "=>": "write '>='",
    "\u2265": "write '>='",
    "\u2264": "write '<='",
    "\u2260": "write '<>'",
    "~": "write 'rlike'",
    "matches": "write 'rlike'",
    "contains": "write contains(field, 'text')",
    "startswith": "write startswith(field, 'text')",
    "endswith": "write endswith(field, 'text')",
    "distinct": "to count different values write count(distinct field), in measures",
    "where": "to count only some events write count(*) filter (where ...), in measures",
}


def _explain_parse_error(text: str, error: SqlglotError) -> str:
    details = getattr(error, "errors", None)
    if not details:
        return "the expression cannot be read; look for a quote or comment that is not closed"
    highlight = details[0].get("highlight") or ""
    if not highlight:
        return "the expression ends too early; look for a missing operand or parenthesis"
    before = (details[0].get("start_context") or "")[-20:]
    description = details[0].get("description") or ""
    if description.startswith("Expecting )"):
        return f"a ')' or an operator is missing at {before + highlight!r}; write it there"
    unquoted = _suggest_quotes(details[0])
    if description.startswith("Required keyword"):
        return f"something is missing at {before + highlight!r}; write a value on both sides of each operator{unquoted}"
    after = f" after {before!r}" if before else ""
    is_keyword = _WORD.fullmatch(highlight) and not is_bare_name(highlight)
    field = f"; if {highlight} is a field, write it in backticks: {quote_identifier(highlight)}" if is_keyword else ""
    remedy = _FOREIGN.get(highlight.lower(), "look there for a missing operator, quote or comma, or leave the rest out")
    return f"the expression cannot be read at {highlight!r}{after}; {remedy}{field or unquoted}"


# Words after a comparison, up to the parse error, that look like a text without quotes.
_UNQUOTED = re.compile(r"(?:=|<>|\blike)\s*([^\s'\"`(),=<>]*[^\s'\"`(),=<>0-9.][^'\"`(),=<>]*)", re.IGNORECASE)


def _suggest_quotes(error: dict[str, str]) -> str:
    """Returns a remedy if parsing failed at a possible text without quotes; otherwise an empty text."""
    rest = re.match(r"[^\s,)'\"]*", error.get("end_context") or "")
    text = f"{error.get('start_context') or ''}{error['highlight']}{rest[0] if rest else ''}"
    matches = list(_UNQUOTED.finditer(text))[-1:]
    return "".join(f"; put texts in single quotes: '{each[1].strip()}'" for each in matches if each.end() == len(text))


# A name is printed without backticks only if it is read as a field in each of these contexts.
_CONTEXTS = (
    "({0})",
    "f({0})",
    "{0} + {0} * {0}",
    "{0} - interval '1' day",
    "case {0} when {0} then {0} end",
    "not {0} and {0} in ({0})",
    "{0} not like {0} escape '!'",
    "{0} is null or {0} between {0} and {0}",
    "cast({0} as int)",
    "f(1) filter (where {0})",
)
_WORD = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*", re.ASCII)


def name_as_sql(name: str) -> str:
    """Writes a field name as SQL, in backticks if it would otherwise be read as something else."""
    return ".".join(part if is_bare_name(part) else quote_identifier(part) for part in name.split("."))


@functools.lru_cache(maxsize=4_096)
def is_bare_name(word: str) -> bool:
    """Returns whether a word without backticks is read as a field wherever a field is allowed.

    The parser itself decides, since some keywords are names in some places only.
    """
    if not _WORD.fullmatch(word):
        return False
    if [token.token_type for token in _DIALECT.tokenize(word)] == [TokenType.VAR]:
        return True
    return all(_is_read_as_name(context.format(word), word, context.count("{0}")) for context in _CONTEXTS)


def _is_read_as_name(text: str, word: str, times: int) -> bool:
    try:
        (tree,) = _DIALECT.parser().parse_into(exp.Condition, _DIALECT.tokenize(text), text)
    except SqlglotError:
        return False
    columns = [] if tree is None else list(tree.find_all(exp.Column))
    return [[part.name for part in column.parts] for column in columns] == [[word]] * times


class Marker(NamedTuple):
    """A parameter's marker, `:name`, at characters [start, end) of a text. `is_added`: it is added or subtracted."""

    name: str
    start: int
    end: int
    is_added: bool


def find_markers(text: str) -> list[Marker]:
    """Finds the markers of parameters in an expression, in order, ignoring quoted text.

    Raises ExpressionError if the text cannot be split into tokens.
    """
    tokens = _tokenize(text)
    markers = []
    for at, (colon, name) in enumerate(pairwise(tokens)):
        is_marker = colon.token_type == TokenType.COLON and name.start == colon.end + 1
        if is_marker and _WORD.fullmatch(text[name.start : name.end + 1]):
            neighbours = [*tokens[max(0, at - 1) : at], *tokens[at + 2 : at + 3]]
            is_added = any(each.token_type in (TokenType.PLUS, TokenType.DASH) for each in neighbours)
            markers.append(Marker(text[name.start : name.end + 1], colon.start, name.end + 1, is_added))
    return markers


def children(node: exp.Expr) -> Iterator[exp.Expr]:
    """Yields the direct children of a node."""
    for value in node.args.values():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, exp.Expr):
                yield item


def unwrap(node: exp.Expr) -> exp.Expr:
    """Returns the node inside any parentheses."""
    while isinstance(node, exp.Paren):
        node = node.this
    return node


def _check_levels(tree: exp.Expr, most: int) -> None:
    # A chain of ANDs of any length is one level.
    pending = [(tree, 1)]
    while pending:
        node, level = pending.pop()
        if level > most:
            raise ExpressionError([_explain_depth(most)])
        for child in children(node):
            chained = isinstance(node, (exp.And, exp.Or)) and type(child) is type(node)
            pending.append((child, level if chained or isinstance(node, exp.Paren) else level + 1))


def _find_ambiguities(tree: exp.Expr) -> Iterator[str]:
    """Yields a remedy for each place where Spark would group operators differently."""
    for node in tree.walk():
        if isinstance(node, _TIGHT):
            operands = [_drop_added_parens(c) for c in children(node) if not _is_list_item(node, c)]
            if any(isinstance(c, _LOOSE) and not _is_grouped_alike(node, c) for c in operands):
                yield f"put parentheses around the comparisons in {quote_node(node)}"
            elif isinstance(node, exp.DPipe) and any(isinstance(c, (exp.Add, exp.Sub)) for c in operands):
                yield f"put parentheses around the sum in {quote_node(node)}"
        cast = node.this if isinstance(node, exp.Neg) else None
        if isinstance(cast, (exp.Cast, exp.TryCast)) and isinstance(cast.this, exp.Literal):
            yield f"put parentheses after the minus sign in {quote_node(node)}"


def _is_list_item(node: exp.Expr, child: exp.Expr) -> bool:
    return isinstance(node, exp.In) and child is not node.this


def _drop_added_parens(node: exp.Expr) -> exp.Expr:
    """Returns the node inside the parentheses that sqlglot added."""
    while isinstance(node, exp.Paren) and not node.meta.get(_IS_WRITTEN):
        node = node.this
    return node


def _is_grouped_alike(node: exp.Expr, child: exp.Expr) -> bool:
    """Returns whether Spark, too, reads a loose operator without parentheses as the operand of a tight one."""
    if isinstance(node, exp.Escape):
        return isinstance(child, (exp.Like, exp.ILike))
    # `a = b is null` is `(a = b) is null`. But Spark cannot apply `is` to `is not distinct from`, which is read as
    # `<=>`.
    is_compared = isinstance(child, COMPARISONS) and not isinstance(child, exp.NullSafeEQ)
    return isinstance(node, exp.Is) and is_compared and child is _drop_added_parens(node.this)


def write_node(node: exp.Expr) -> str:
    """Writes a node as SQL."""
    return str(node.sql(LookbackSql, comments=False, normalize_functions=False))


def quote_node(node: exp.Expr) -> str:
    """Writes a node as a quoted text of at most about 60 characters, for a message."""
    text = " ".join(node.sql(LookbackSql, comments=False).split())
    return repr(text if len(text) <= 60 else text[:57] + "...")
