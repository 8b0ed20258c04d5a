"""Reads queries in KQL, Kibana's language for filters, as https://www.elastic.co/docs/reference/query-languages/kql has it."""

from __future__ import annotations

import re
from collections.abc import Callable

from lookback.importing.conditions import And, Condition, Not, Or, Pattern, Wildcard
from lookback.importing.reasons import Refusal
from lookback.importing.terms import Terms
from lookback.importing.tokens import TokenReader

_TOKEN = re.compile(
    r"""(?P<space>\s+) | (?P<quoted>"(?:[^"\\]|\\.)*") | (?P<sign>[():{}]|<=|>=|<|>)
    | (?P<word>(?:[^\s\\():<>"{}]|\\u[0-9a-fA-F]{4}|\\.)+)""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPED = re.compile(r"\\u([0-9a-fA-F]{4})|\\(and|or|not)\b|\\(.)|(\*)", re.DOTALL | re.IGNORECASE)
_BLANKS = {"t": "\t", "r": "\r", "n": "\n"}
# A backslash may escape these, outside quotes.
_SIGNS = '\\():<>"*{}'
_KEYWORDS = ("and", "or", "not")


def read_kql(query: str, terms: Terms) -> Condition:
    """Reads a query. Raises Refusal."""
    return _KqlReader(query, terms).read()


class _KqlReader(TokenReader):
    """Reads one query, token by token: `not` binds before `and`, `and` before `or`."""

    def __init__(self, query: str, terms: Terms) -> None:
        super().__init__(query, _TOKEN, lambda text: _refuse(f"{text!r} is not understood"), terms)

    def read(self) -> Condition:
        """Reads the whole query. Raises Refusal."""
        if self._peek().kind == "end":
            raise Refusal("nothing", "its query is empty")
        condition = self._read_or(lambda: self._read_expression(""))
        if self._peek().kind != "end":
            raise _refuse(f"an operator is missing before {self._peek().text!r:.60}")
        return condition

    def _read_or(self, read: Callable[[], Condition]) -> Condition:
        parts = [self._read_and(read)]
        while self._take_word("or"):
            parts.append(self._read_and(read))
        return parts[0] if len(parts) == 1 else Or(tuple(parts))

    def _read_and(self, read: Callable[[], Condition]) -> Condition:
        parts = [self._read_not(read)]
        while self._take_word("and"):
            parts.append(self._read_not(read))
        return parts[0] if len(parts) == 1 else And(tuple(parts))

    def _read_not(self, read: Callable[[], Condition]) -> Condition:
        if self._take_word("not"):
            return Not(self._read_not(read))
        if self._take_sign("("):
            inner = self._read_or(read)
            self._expect(")")
            return inner
        return read()

    def _read_expression(self, parent: str) -> Condition:
        """Reads a field with its value or values. parent: the array of objects that the field is in."""
        start = self._peek().start
        name = self._read_literal()
        operator = self._peek()
        if operator.kind != "sign" or operator.text not in (":", "<", "<=", ">", ">="):
            raise Refusal(
                "keywords", f"it looks for {self._query[start : operator.start].strip()!r:.60} in no field by name"
            )
        self._at += 1
        field = f"{parent}{_show(name)}"
        if operator.text != ":":
            return self._terms.compares(field, operator.text, _show(self._read_literal()))
        if self._take_sign("{"):
            self._terms.lose("nested", f"{field} is an array of objects")
            inner = self._read_or(lambda: self._read_expression(f"{field}."))
            self._expect("}")
            return inner
        return self._read_values(field)

    def _read_values(self, field: str) -> Condition:
        """Reads a value, or values in parentheses that are joined by and, or, not."""
        if self._take_sign("("):
            inner = self._read_or(lambda: self._read_value(field))
            self._expect(")")
            return inner
        return self._read_value(field)

    def _read_value(self, field: str) -> Condition:
        return make_test(field, self._read_literal(), self._terms)

    def _read_literal(self) -> Pattern:
        """Reads a text in quotes, or words up to the next sign, with the blanks between them."""
        token = self._peek()
        if token.kind == "quoted":
            self._at += 1
            return (_unescape_quoted(token.text[1:-1]),)
        first = token
        while token.kind == "word" and token.text.lower() not in _KEYWORDS:
            last = self._next()
            token = self._peek()
        if token is first:
            raise _refuse(f"a value is missing before {token.text!r:.60}")
        return _unescape(self._query[first.start : last.end])

    def _take_word(self, word: str) -> bool:
        return self._take("word", word)

    def _take_sign(self, sign: str) -> bool:
        return self._take("sign", sign)

    def _take(self, kind: str, text: str) -> bool:
        is_there = (self._peek().kind, self._peek().text.lower()) == (kind, text)
        self._at += is_there
        return is_there

    def _expect(self, sign: str) -> None:
        if not self._take_sign(sign):
            raise _refuse(f"{sign} is missing before {self._peek().text!r:.60}")


def _refuse(text: str) -> Refusal:
    return Refusal("kql", text)


def make_test(field: str, pattern: Pattern, terms: Terms) -> Condition:
    """Makes the test of a field for one value; `*` alone asks for any."""
    if field == "*":
        raise Refusal("keywords", f"it looks for {_show(pattern)!r:.60} in all fields")
    if set(pattern) == {Wildcard.ANY}:
        return terms.exists(field)
    if any(isinstance(part, Wildcard) for part in pattern):
        return terms.fits(field, pattern)
    return terms.equals(field, _show(pattern))


def _show(pattern: Pattern) -> str:
    return "".join("*" if part is Wildcard.ANY else str(part) for part in pattern)


def _unescape(text: str) -> Pattern:
    """Returns a value without quotes as a pattern."""
    parts: list[str | Wildcard] = [""]
    at = 0
    for found in _ESCAPED.finditer(text):
        parts[-1] = f"{parts[-1]}{text[at : found.start()]}"
        at = found.end()
        code, word, sign, star = found.groups()
        if star:
            parts += [Wildcard.ANY, ""]
        elif sign and sign not in _SIGNS and sign not in _BLANKS:
            raise Refusal("kql", f"a backslash before {sign!r} in {text!r:.60}")
        else:
            parts[-1] = f"{parts[-1]}{chr(int(code, 16)) if code else word or _BLANKS.get(sign, sign)}"
    parts[-1] = f"{parts[-1]}{text[at:]}"
    return tuple(part for part in parts if part != "") or ("",)


def _unescape_quoted(text: str) -> str:
    def replace(found: re.Match[str]) -> str:
        code, sign = found.groups()
        return chr(int(code, 16)) if code else _BLANKS.get(sign, sign if sign in '"\\' else found[0])

    return re.sub(r"\\u([0-9a-fA-F]{4})|\\(.)", replace, text, flags=re.DOTALL)
