"""Divides queries into tokens, for readers that take one after another."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from lookback.importing.reasons import Refusal
from lookback.importing.terms import Terms


@dataclass(frozen=True)
class Token:
    """A piece of a query. kind: the name of its group in the pattern; at the end of the query, end."""

    kind: str
    text: str
    start: int
    end: int


class TokenReader:
    """Reads a query token by token.

    Args:
        query: The query.
        pattern: A token, with a group for each kind; those of the kind space are left out.
        refuse: Makes the Refusal of text that is not a token.
        terms: Makes the tests of fields.
    """

    def __init__(self, query: str, pattern: re.Pattern[str], refuse: Callable[[str], Refusal], terms: Terms) -> None:
        self._query, self._terms, self._at, self._tokens = query, terms, 0, list[Token]()
        at = 0
        while at < len(query):
            token = pattern.match(query, at)
            if token is None:
                raise refuse(query[at : at + 20])
            if token.lastgroup != "space":
                self._tokens.append(Token(str(token.lastgroup), token[0], at, token.end()))
            at = token.end()
        self._tokens.append(Token("end", "", at, at))

    def _peek(self, ahead: int = 0) -> Token:
        return self._tokens[min(self._at + ahead, len(self._tokens) - 1)]

    def _next(self) -> Token:
        token = self._peek()
        self._at += token.kind != "end"
        return token
