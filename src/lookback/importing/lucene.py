"""Reads queries in Lucene's language, as far as they are plain: fields with values, `AND`, `OR`, `NOT` and parentheses."""

from __future__ import annotations

import re

from lookback.importing.conditions import And, Condition, Not, Or
from lookback.importing.kql import make_test
from lookback.importing.reasons import Refusal
from lookback.importing.terms import Terms, make_escaped_pattern
from lookback.importing.tokens import Token, TokenReader

_TOKEN = re.compile(
    r"""(?P<space>\s+) | (?P<quoted>"(?:[^"\\]|\\.)*") | (?P<regex>/(?:[^/\\]|\\.)+/)
    | (?P<range>[\[{]\s*\S+\s+TO\s+\S+?\s*[\]}]) | (?P<sign>&&|\|\||[():!]|>=|<=|>|<)
    | (?P<word>(?![-+])(?:[^\s\\():"\[\]{}/^~!<>]|\\.)+)""",
    re.VERBOSE | re.DOTALL,
)
_WORDS = {"AND": "and", "&&": "and", "OR": "or", "||": "or", "NOT": "not", "!": "not"}


def read_lucene(query: str, terms: Terms) -> Condition:
    """Reads a query. Raises Refusal for what is not plain, such as a boost or words without a field."""
    return _LuceneReader(query, terms).read()


class _LuceneReader(TokenReader):
    def __init__(self, query: str, terms: Terms) -> None:
        super().__init__(query, _TOKEN, _refuse, terms)

    def read(self) -> Condition:
        """Reads the whole query."""
        if self._peek().kind == "end":
            raise Refusal("nothing", "its query is empty")
        condition = self._read_joined(None)
        if self._peek().kind != "end":
            raise _refuse(self._peek().text)
        return condition

    def _read_joined(self, field: str | None) -> Condition:
        """Reads parts that are joined by `AND`, or by `OR` or nothing; both together mean something else in Lucene."""
        parts, words = [self._read_part(field)], set[str]()
        while self._peek().text not in ("", ")"):
            words.add(self._take_word("and", "or") or "or")
            parts.append(self._read_part(field))
        if len(words) > 1:
            raise Refusal("lucene", "AND and OR are mixed without parentheses")
        return And(tuple(parts)) if words == {"and"} else Or(tuple(parts))

    def _read_part(self, field: str | None) -> Condition:
        if self._take_word("not"):
            return Not(self._read_part(field))
        token = self._take()
        if token.text == "(":
            condition = self._read_joined(field)
            if self._take().text != ")":
                raise _refuse(token.text)
            return condition
        if field is None:
            return self._read_field(token)
        return self._read_value(field, token)

    def _read_field(self, token: Token) -> Condition:
        if token.kind != "word" or self._peek().text != ":":
            raise Refusal("keywords", f"it looks for {token.text!r:.60} in no field by name")
        self._take()
        name = _unescape(token.text)
        if name == "_exists_":
            return self._terms.exists(_unescape(self._take().text))
        if self._peek().text == "(":
            return self._read_part(name)
        return self._read_value(name, self._take())

    def _read_value(self, field: str, token: Token) -> Condition:
        if token.kind == "quoted":
            return self._terms.equals(field, _unescape(token.text[1:-1]))
        if token.kind == "regex":
            return self._terms.matches(field, token.text[1:-1].replace("\\/", "/"))
        if token.kind == "range":
            return self._read_range(field, token.text)
        if token.text in (">", ">=", "<", "<="):
            return self._terms.compares(field, token.text, self._take().text)
        if token.kind != "word":
            raise _refuse(token.text)
        return make_test(field, make_escaped_pattern(token.text), self._terms)

    def _read_range(self, field: str, text: str) -> Condition:
        low, high = text[1:-1].split(" TO ")
        bounds = [(">=" if text[0] == "[" else ">", low.strip()), ("<=" if text[-1] == "]" else "<", high.strip())]
        given = [self._terms.compares(field, operator, value) for operator, value in bounds if value != "*"]
        return And(tuple(given)) if given else self._terms.exists(field)

    def _take(self) -> Token:
        if self._peek().kind == "end":
            raise _refuse("the end")
        return self._next()

    def _take_word(self, *words: str) -> str:
        """Takes one of the words that join parts; empty if another token is there."""
        word = _WORDS.get(self._peek().text, "")
        if word in words:
            self._take()
            return word
        return ""


def _unescape(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text, flags=re.DOTALL)


def _refuse(text: str) -> Refusal:
    return Refusal("lucene", f"{text!r:.60} is not understood here")
