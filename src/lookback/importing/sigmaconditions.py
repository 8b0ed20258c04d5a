"""Reads the condition of a Sigma rule, as pySigma has parsed it and applied its modifiers."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from sigma.conditions import (
    ConditionAND,
    ConditionFieldEqualsValueExpression,
    ConditionNOT,
    ConditionOR,
    ConditionValueExpression,
)
from sigma.types import (
    Placeholder,
    SigmaBool,
    SigmaCasedString,
    SigmaCIDRExpression,
    SigmaCompareExpression,
    SigmaExists,
    SigmaExpansion,
    SigmaFieldReference,
    SigmaNull,
    SigmaNumber,
    SigmaQueryExpression,
    SigmaRegularExpression,
    SigmaString,
    SigmaTimestampPart,
    SigmaType,
    SpecialChars,
    TimestampPart,
)

from lookback.importing.conditions import (
    And,
    Condition,
    Fields,
    Flag,
    Listed,
    Network,
    Not,
    Number,
    Or,
    Pattern,
    Present,
    Regex,
    Relation,
    Text,
    TimePart,
    Wildcard,
)
from lookback.importing.reasons import Reason, Refusal
from lookback.importing.rulefiles import name_slug

_WILDCARDS = {SpecialChars.WILDCARD_MULTI: Wildcard.ANY, SpecialChars.WILDCARD_SINGLE: Wildcard.ONE}
_OPERATORS = {"LT": "<", "LTE": "<=", "GT": ">", "GTE": ">=", "NEQ": "<>"}
_PARTS = {
    TimestampPart.MINUTE: "minute",
    TimestampPart.HOUR: "hour",
    TimestampPart.DAY: "day",
    TimestampPart.WEEK: "weekofyear",
    TimestampPart.MONTH: "month",
    TimestampPart.YEAR: "year",
}
_FLAGS = {"IGNORECASE": "i", "MULTILINE": "m", "DOTALL": "s"}


class ConditionReader:
    """Reads conditions, and notes in `losses` what is not exactly as the rule says.

    keywords: the fields in which words without a field are looked for.
    """

    def __init__(self, keywords: tuple[str, ...] = ()) -> None:
        self._keywords = keywords
        self.losses: list[Reason] = []

    def read(self, condition: Any) -> Condition:
        """Reads a parsed condition. Raises Refusal."""
        if condition is None:
            raise Refusal("nothing", "its condition is empty")
        if isinstance(condition, ConditionAND):
            return And(tuple(map(self.read, condition.args)))
        if isinstance(condition, ConditionOR):
            return Or(tuple(map(self.read, condition.args)))
        if isinstance(condition, ConditionNOT):
            return Not(self.read(condition.args[0]))
        if isinstance(condition, ConditionFieldEqualsValueExpression):
            return self._read_value(condition.field, condition.value)
        if isinstance(condition, ConditionValueExpression):
            return self._read_keyword(condition.value)
        raise Refusal("unsupported", f"a condition of the kind {type(condition).__name__}")

    def _read_keyword(self, value: SigmaType) -> Condition:
        """Reads a word that may stand anywhere in the fields for keywords."""
        if not self._keywords:
            raise Refusal("keywords", f"it looks for {_show(value)!r:.60} in no field by name")
        if isinstance(value, SigmaExpansion):
            return Or(tuple(map(self._read_keyword, value.values)))
        if isinstance(value, SigmaNumber):
            value = SigmaString(str(value.number))
        if isinstance(value, SigmaString):
            within = (Wildcard.ANY, *self._read_pattern(value), Wildcard.ANY)
            is_cased = isinstance(value, SigmaCasedString)
            return Or(tuple(Text(field, within, is_cased) for field in self._keywords))
        if isinstance(value, SigmaRegularExpression):
            return Or(tuple(self._read_value(field, value) for field in self._keywords))
        raise Refusal("unsupported", f"a keyword of the kind {type(value).__name__}")

    def _read_value(self, field: str, value: SigmaType) -> Condition:
        """Reads the test of a field."""
        if isinstance(value, SigmaExpansion):
            return Or(tuple(self._read_value(field, each) for each in value.values))
        if isinstance(value, SigmaString):
            return self._read_text(field, value)
        if isinstance(value, SigmaTimestampPart):
            return TimePart(field, _PARTS[value.timestamp_part], int(value.number))
        if isinstance(value, SigmaNumber):
            return Number(field, "=", _read_number(value))
        if isinstance(value, SigmaCompareExpression):
            return Number(field, _OPERATORS[value.op.name], _read_number(value.number))
        if isinstance(value, SigmaBool):
            return Flag(field, bool(value))
        if isinstance(value, SigmaNull):
            return Not(Present(field))
        if isinstance(value, SigmaExists):
            return Present(field) if value else Not(Present(field))
        if isinstance(value, SigmaRegularExpression):
            if value.contains_placeholder():
                raise Refusal("placeholder", f"{field} has a regular expression with a placeholder")
            flags = "".join(sorted(_FLAGS[flag.name] for flag in value.flags))
            return Regex(field, str(value.regexp), flags)
        if isinstance(value, SigmaCIDRExpression):
            return Network(field, value.cidr)
        if isinstance(value, SigmaFieldReference):
            return Fields(field, _find_relation(value), value.field)
        if isinstance(value, SigmaQueryExpression):
            raise Refusal("query", f"{field} has the query expression {_show(value)!r:.60}")
        raise Refusal("unsupported", f"{field} has a value of the kind {type(value).__name__}")

    def _read_text(self, field: str, value: SigmaString) -> Condition:
        if len(value.s) == 1 and isinstance(value.s[0], Placeholder):
            name = name_slug(value.s[0].name)
            self.losses.append(Reason("list", f"%{value.s[0].name}% is the list {name!r}"))
            return Listed(field, name)
        is_cased = isinstance(value, SigmaCasedString)
        pattern = self._read_pattern(value)
        if not is_cased and any(_has_odd_case(part) for part in pattern if isinstance(part, str)):
            self.losses.append(Reason("fold", f"{_show(value)!r:.60}"))
        return Text(field, pattern, is_cased)

    def _read_pattern(self, value: SigmaString) -> Pattern:
        """Joins neighbouring texts, and wildcards that mean the same as one."""
        pattern: list[str | Wildcard] = []
        for part in value.s:
            if isinstance(part, Placeholder):
                raise Refusal("placeholder", f"%{part.name}% is a part of the text {_show(value)!r:.60}")
            each = _WILDCARDS[part] if isinstance(part, SpecialChars) else part
            if isinstance(each, str) and pattern and isinstance(pattern[-1], str):
                pattern[-1] += each
            elif each != "" and not (each is Wildcard.ANY and pattern[-1:] == [Wildcard.ANY]):
                pattern.append(each)
        return tuple(pattern)


def _show(value: Any) -> str:
    """Writes a value for a message."""
    return str(getattr(value, "original", "") or value)


def _read_number(value: SigmaNumber) -> int | Decimal:
    return value.number if isinstance(value.number, int) else Decimal(repr(value.number))


def _find_relation(value: SigmaFieldReference) -> Relation:
    ends = value.starts_with, value.ends_with
    both = {(True, True): Relation.CONTAINS, (True, False): Relation.STARTS, (False, True): Relation.ENDS}
    return both.get(ends, Relation.EQUALS)


def _has_odd_case(text: str) -> bool:
    """Returns whether a letter has no single counterpart in the other case, or one that depends on its neighbours."""
    return not text.isascii() and any(
        len(each.lower()) != 1 or len(each.upper()) != 1 or each.upper().lower() != each.lower() or each in "Σσς"
        for each in text
    )
