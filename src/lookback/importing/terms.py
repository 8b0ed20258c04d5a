"""Tests of fields as Elasticsearch makes them, whatever the language of the query.

Values of keyword fields are compared letter by letter. A field that an event lacks satisfies no test, and of an array
one item is enough. What a test cannot say exactly is noted in `losses`.
"""

from __future__ import annotations

import ipaddress
import re
from decimal import Decimal, InvalidOperation

from lookback.importing.conditions import Condition, Network, Number, Operand, Pattern, Regex, Text, Wildcard
from lookback.importing.reasons import Reason, Refusal

# Fields of free text, which Elasticsearch splits into words.
_TEXT_FIELDS = ("message", "error.message", "powershell.file.script_block_text")
# The fields that the Elastic Common Schema declares as addresses.
_ADDRESSES = ("ip", "resolved_ip")
# A field with another reading of the same values.
_CASELESS, _KEYWORD, _TEXT = ".caseless", ".keyword", ".text"
# The operators that Lucene's regular expressions have beyond the usual ones.
_LUCENE_SIGNS = '#@&<>~"'
_WILDCARDS = {"*": Wildcard.ANY, "?": Wildcard.ONE}


class Terms:
    """Makes tests of fields, and notes in `losses` what is not exactly as the rule says."""

    def __init__(self) -> None:
        self.losses: list[Reason] = []

    def exists(self, field: Operand) -> Condition:
        """An event has a value in the field, if only an empty text."""
        return Text(_find_plain(field), (Wildcard.ANY,), is_cased=True)

    def equals(self, field: Operand, text: str, *, is_cased: bool = True) -> Condition:
        """A field is a text, or an address that may be written otherwise."""
        if isinstance(field, str) and field.rpartition(".")[2] in _ADDRESSES and (network := _as_network(text)):
            return Network(field, network)
        return self.fits(field, (text,), is_cased=is_cased)

    def fits(self, field: Operand, pattern: Pattern, *, is_cased: bool = True) -> Condition:
        """A field is a text with wildcards, as a whole."""
        if isinstance(field, str):
            is_cased = is_cased and not field.endswith(_CASELESS)
            if field in _TEXT_FIELDS or field.endswith(_TEXT):
                self.lose("analyzed", f"{field} is split into words")
                inner = [*pattern]
                while inner and inner[0] is Wildcard.ANY:
                    del inner[0]
                while inner and inner[-1] is Wildcard.ANY:
                    del inner[-1]
                return Text(_find_plain(field), (Wildcard.ANY, *inner, Wildcard.ANY), is_cased=False)
        if not is_cased:
            self.note_letters("".join(part for part in pattern if isinstance(part, str)))
        return Text(_find_plain(field), tuple(part for part in pattern if part != "") or ("",), is_cased)

    def matches(self, field: Operand, pattern: str, *, is_cased: bool = True) -> Condition:
        """A field fits one of Lucene's regular expressions as a whole."""
        return Regex(_find_plain(field), rf"\A(?:{translate_regex(pattern)})\z", "s" if is_cased else "is")

    def compares(self, field: Operand, operator: str, text: str) -> Condition:
        """A field is a number that compares with another one. Raises Refusal for what is none."""
        try:
            number = Decimal(text)
        except InvalidOperation:
            raise Refusal("range", f"{field} {operator} {text}") from None
        return Number(field, operator, int(number) if number == number.to_integral_value() else number)

    def note_letters(self, text: str) -> None:
        """Notes that a text has letters that Elasticsearch does not fold: those beyond ASCII."""
        if not text.isascii() and text.lower() != text.upper():
            self.lose("fold", f"{next(each for each in text if not each.isascii())!r}")

    def lose(self, code: str, text: str) -> None:
        """Notes a reason once."""
        if (reason := Reason(code, text)) not in self.losses:
            self.losses.append(reason)


def make_pattern(text: str) -> Pattern:
    """Makes a pattern of a text in which `*` and `?` are wildcards, and none can be escaped."""
    return tuple(_WILDCARDS.get(part, part) for part in re.split(r"([*?])", text) if part) or ("",)


def make_escaped_pattern(text: str) -> Pattern:
    """Makes a pattern of a text in which a backslash takes its meaning from the sign after it."""
    pieces = re.findall(r"\\.|[*?]|[^\\*?]+|\\", text, re.DOTALL)
    return tuple(_WILDCARDS.get(each) or (each[1:] if each[0] == "\\" and each[1:] else each) for each in pieces)


def translate_regex(pattern: str) -> str:
    """Writes a regular expression of Lucene as one of RE2. Raises Refusal for what RE2 lacks."""
    found, at, is_class = [], 0, False
    while at < len(pattern):
        sign = pattern[at]
        if sign == "\\":
            at += 1
            if at == len(pattern):
                raise Refusal("regex", f"{pattern!r:.100} ends with a backslash")
            found.append(f"\\{pattern[at]}" if pattern[at] in "dDsSwW" else re.escape(pattern[at]))
        elif is_class:
            is_class = sign != "]"
            found.append(f"\\{sign}" if sign in "[&" else sign)
        elif sign in _LUCENE_SIGNS:
            raise Refusal("regex", f"{sign} is an operator in {pattern!r:.100}")
        else:
            is_class = sign == "["
            found.append(f"\\{sign}" if sign in "^$" else sign)
            if is_class and pattern[at + 1 : at + 2] == "^":
                found.append("^")
                at += 1
        at += 1
    return "".join(found)


def _find_plain(field: Operand) -> Operand:
    """Returns the field whose values another reading of them has."""
    if not isinstance(field, str):
        return field
    return next((field.removesuffix(end) for end in (_CASELESS, _KEYWORD, _TEXT) if field.endswith(end)), field)


def _as_network(text: str) -> str | None:
    """Returns an address or a range as a range; None if it is neither."""
    try:
        network = ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None
    return f"{network}"
