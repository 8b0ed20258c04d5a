"""Reads queries in EQL, as https://www.elastic.co/docs/reference/query-languages/eql/eql-syntax describes the language."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from decimal import Decimal

from lookback.importing.conditions import (
    And,
    Call,
    Compared,
    Condition,
    Fields,
    Flag,
    Literal,
    Network,
    Not,
    Number,
    Operand,
    Or,
    Present,
    Relation,
    Wildcard,
)
from lookback.importing.detections import Chain, Step
from lookback.importing.reasons import Refusal
from lookback.importing.terms import Terms, make_pattern
from lookback.importing.tokens import Token, TokenReader

_TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*|/\*.*?\*/) | (?P<raw>\"\"\".*?\"\"\"(?:"{1,2}(?!"))?) | (?P<text>"(?:[^"\\\n]|\\.)*")
    | (?P<span>\d+(?:ms|s|m|h|d)\b) | (?P<number>\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)
    | (?P<name>\??(?:`(?:[^`]|``)+`|[A-Za-z_@][\w@]*)(?:\.(?:`(?:[^`]|``)+`|[\w@]+))*~?)
    | (?P<sign>==|!=|<=|>=|[-+*/%<>=:(),!|\[\]])""",
    re.VERBOSE | re.DOTALL,
)
_MICROSECONDS = {"ms": 1_000, "s": 1_000_000, "m": 60_000_000, "h": 3_600_000_000, "d": 86_400_000_000}
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "'": "'"}
_COMPARISONS = ("==", "!=", "<", "<=", ">", ">=", ":")
_LOOKUPS = ("in", "in~", "like", "like~", "regex", "regex~")
_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
_SUMS, _PRODUCTS = {"+": "add", "-": "subtract"}, {"*": "multiply", "/": "divide", "%": "modulo"}
_KEYWORDS = ("and", "or", "not", "where", "by", "with", "until", "in", "like", "regex")
_TRUE, _FALSE = And(()), Or(())
_RELATIONS = {"startswith": Relation.STARTS, "endswith": Relation.ENDS, "stringcontains": Relation.CONTAINS}

# A part of a condition: a condition, a field (its name), a computed value, a literal, or null (None).
Part = Condition | Operand | Literal | None


def read_eql(query: str, terms: Terms, category: str = "event.category") -> Condition | Chain:
    """Reads a query. category: the field of `process` in `process where ...`. Raises Refusal.

    A chain without a span has 0 microseconds.
    """
    reader = _EqlReader(query, terms, category)
    return reader.read()


class _EqlReader(TokenReader):
    """Reads one query, token by token: `not` binds before `and`, `and` before `or`."""

    def __init__(self, query: str, terms: Terms, category: str) -> None:
        super().__init__(query, _TOKEN, lambda text: Refusal("eql", f"{text!r} is not understood"), terms)
        self._category = category

    def read(self) -> Condition | Chain:
        """Reads the whole query."""
        if self._is("sample"):
            raise Refusal("sample", "it asks for events of a key in any order and over any time")
        found = self._read_sequence() if self._take("sequence") else self._read_event()
        if self._peek().kind != "end":
            raise self._refuse()
        return found

    def _read_event(self) -> Condition:
        """Reads `process where ...`."""
        token = self._next()
        if token.kind not in ("name", "text", "raw") or not self._take("where"):
            raise Refusal("eql", f"`where` is missing after {token.text!r:.60}")
        condition = self._read_condition(self._read_or)
        if token.text == "any":
            return condition
        name = token.text if token.kind == "name" else _read_text(token)
        return And((self._terms.equals(self._category, name), condition))

    # Sequences -------------------------------------------------------------------------------------------------------

    def _read_sequence(self) -> Chain:
        keys, span = list[str](), 0
        while self._is("by", "with"):
            if self._take("by"):
                keys = self._read_keys()
            else:
                self._require("with", "maxspan", "=")
                number, unit = re.fullmatch(r"(\d+)(\D+)", self._next_of("span").text).groups()  # type: ignore[union-attr]
                span = int(number) * _MICROSECONDS[unit]
        steps, until, absent = list[Step](), None, None
        while self._is("[", "!"):
            is_absent = self._take("!")
            if absent is not None:
                raise Refusal("absence", "an event that must not come stands before others")
            step = self._read_step(keys)
            if is_absent:
                absent = step
            else:
                steps.append(step)
        if self._take("until"):
            until = self._read_step(keys)
        while self._take("|"):
            self._terms.lose("pipe", f"| {self._next_of('name').text} {self._next_of('number').text}")
        if not steps:
            raise Refusal("absence" if absent else "eql", "no event begins the sequence")
        if len({len(each.fields) for each in Chain(tuple(steps), 0, until, absent).all_steps}) > 1:
            raise Refusal("eql", "the steps have keys of different lengths")
        if absent is not None:
            self._terms.lose("reuse", "each first event waits for what must not come")
        return Chain(tuple(steps), span, until, absent)

    def _read_step(self, keys: Sequence[str]) -> Step:
        self._require("[")
        condition = self._read_event()
        self._require("]")
        own, runs = list[str](), 1
        while self._is("by", "with"):
            if self._take("by"):
                own = self._read_keys()
            else:
                self._require("with", "runs", "=")
                runs = int(self._next_of("number").text)
        fields = list(dict.fromkeys([*keys, *own]))
        # An event without the key takes no part, unless its field is optional.
        there = (self._terms.exists(name) for name in fields if not name.startswith("?"))
        return Step(And((condition, *there)), tuple(name.removeprefix("?") for name in fields), runs)

    def _read_keys(self) -> list[str]:
        keys = [_read_name(self._next_of("name").text, keeps_mark=True)]
        while self._take(","):
            keys.append(_read_name(self._next_of("name").text, keeps_mark=True))
        return keys

    # Conditions ------------------------------------------------------------------------------------------------------

    def _read_condition(self, read: Callable[[], Part]) -> Condition:
        part = read()
        if isinstance(part, str):
            # A field alone is true or false.
            return Flag(part, is_true=True)
        if part is None or isinstance(part, (Call, Literal)):
            raise Refusal("eql", f"{part} is not a condition")
        return part

    def _read_or(self) -> Part:
        first = self._read_and()
        if not self._is("or"):
            return first
        parts = [self._as_condition(first)]
        while self._take("or"):
            parts.append(self._read_condition(self._read_and))
        return Or(tuple(parts))

    def _read_and(self) -> Part:
        first = self._read_not()
        if not self._is("and"):
            return first
        parts = [self._as_condition(first)]
        while self._take("and"):
            parts.append(self._read_condition(self._read_not))
        return And(tuple(parts))

    def _as_condition(self, part: Part) -> Condition:
        return self._read_condition(lambda: part)

    def _read_not(self) -> Part:
        if self._take("not"):
            return Not(self._read_condition(self._read_not))
        return self._read_comparison()

    def _read_comparison(self) -> Part:
        left = self._read_sum()
        is_negated = self._is("not") and self._peek(1).text in _LOOKUPS and self._take("not")
        token = self._peek()
        if token.kind not in ("name", "sign") or token.text not in (*_COMPARISONS, *_LOOKUPS):
            return left
        self._at += 1
        if token.text in _LOOKUPS or self._is("("):
            found: Condition = Or(tuple(self._look_up(left, token.text, each) for each in self._read_list()))
        else:
            found = self._compare(left, token.text, self._read_sum())
        return Not(found) if is_negated else found

    def _read_list(self) -> list[Part]:
        """Reads the values of `in` and the like, or a single one."""
        if not self._take("("):
            return [self._read_sum()]
        values = [self._read_sum()]
        while self._take(","):
            values.append(self._read_sum())
        self._require(")")
        return values

    def _look_up(self, left: Part, operator: str, value: Part) -> Condition:
        """Makes the test of `in`, `like` and the like for one value."""
        if operator in _COMPARISONS:
            return self._compare(left, operator, value)
        if not isinstance(value, Literal) or not isinstance(value.value, str) or not isinstance(left, (str, Call)):
            return self._compare(left, ":" if operator.endswith("~") else "==", value)
        is_cased = not operator.endswith("~")
        if operator.startswith("regex"):
            return self._terms.matches(left, value.value, is_cased=is_cased)
        if operator.startswith("like"):
            return self._fit(left, value.value, is_cased=is_cased)
        return self._terms.equals(left, value.value, is_cased=is_cased)

    def _fit(self, field: Operand, text: str, *, is_cased: bool) -> Condition:
        pattern = make_pattern(text)
        if all(isinstance(part, str) for part in pattern):
            return self._terms.equals(field, text, is_cased=is_cased)
        return self._terms.fits(field, pattern, is_cased=is_cased)

    def _compare(self, left: Part, operator: str, right: Part) -> Condition:
        if isinstance(right, (str, Call)) and not isinstance(left, (str, Call)):
            left, operator, right = right, _MIRRORED.get(operator, operator), left
        if operator == "!=":
            return Not(self._compare(left, "==", right))
        if right in (_TRUE, _FALSE) and operator == "==":
            found = Flag(left, is_true=right == _TRUE) if isinstance(left, (str, Call)) else self._as_condition(left)
            return found if right == _TRUE or isinstance(found, Flag) else Not(found)
        if not isinstance(left, (str, Call)):
            raise Refusal("eql", f"{left} is compared with {right}"[:200])
        if right is None and operator in ("==", ":"):
            return Not(self._exists(left))
        if isinstance(right, (str, Call)):
            return _relate(left, operator, right)
        if not isinstance(right, Literal):
            raise Refusal("eql", f"{left} {operator} {right}"[:200])
        if not isinstance(right.value, str):
            return Number(left, "=" if operator in ("==", ":") else operator, right.value)
        if operator == ":":
            return self._fit(left, right.value, is_cased=False)
        if operator != "==":
            return Compared(left, operator, right)
        return self._terms.equals(left, right.value)

    def _exists(self, operand: Operand) -> Condition:
        return Present(operand) if isinstance(operand, Call) else self._terms.exists(operand)

    # Values ----------------------------------------------------------------------------------------------------------

    def _read_sum(self) -> Part:
        return self._read_operators(_SUMS, lambda: self._read_operators(_PRODUCTS, self._read_primary))

    def _read_operators(self, functions: dict[str, str], read: Callable[[], Part]) -> Part:
        found = read()
        while self._is(*functions):
            function = functions[self._next().text]
            found = Call(function, (_as_argument(found), _as_argument(read())))
        return found

    def _read_primary(self) -> Part:
        token = self._next()
        if token.kind in ("text", "raw"):
            return Literal(_read_text(token))
        if token.kind == "number":
            return Literal(_read_number(token.text))
        if token.text == "-":
            return Literal(-_read_number(self._next_of("number").text))
        if token.text == "(":
            inner = self._read_or()
            self._require(")")
            return inner
        if token.kind != "name" or token.text in _KEYWORDS:
            self._at -= 1
            raise self._refuse()
        if self._take("("):
            return self._read_call(token.text)
        constants: dict[str, Part] = {"true": _TRUE, "false": _FALSE, "null": None}
        return constants[token.text] if token.text in constants else _read_name(token.text)

    def _read_call(self, name: str) -> Part:
        function, is_cased = name.removesuffix("~").lower(), not name.endswith("~")
        arguments = [] if self._is(")") else [self._read_sum()]
        while self._take(","):
            arguments.append(self._read_sum())
        self._require(")")
        if function not in (*_RELATIONS, "cidrmatch", "wildcard", "match"):
            return Call(function, tuple(_as_argument(each) for each in arguments), is_cased)
        first, *others = arguments
        if function in _RELATIONS and len(others) == 1:
            return self._relate_texts(first, _RELATIONS[function], others[0], is_cased=is_cased)
        texts = [each.value for each in others if isinstance(each, Literal) and isinstance(each.value, str)]
        if not isinstance(first, (str, Call)) or not texts or len(texts) < len(others):
            raise Refusal("function", f"{name}() of values that are not texts")
        if function == "cidrmatch":
            return Or(tuple(Network(first, text) for text in texts))
        if function == "match":
            return Or(tuple(self._terms.matches(first, text, is_cased=is_cased) for text in texts))
        return Or(tuple(self._fit(first, text, is_cased=is_cased) for text in texts))

    def _relate_texts(self, text: Part, relation: Relation, wanted: Part, *, is_cased: bool) -> Condition:
        """Makes the test that a text starts with, ends with or contains another one."""
        if isinstance(wanted, Literal) and isinstance(text, (str, Call)):
            before = () if relation is Relation.STARTS else (Wildcard.ANY,)
            after = () if relation is Relation.ENDS else (Wildcard.ANY,)
            return self._terms.fits(text, (*before, f"{wanted.value}", *after), is_cased=is_cased)
        left, right = (_as_operand(each) for each in (text, wanted))
        return Fields(left, relation, right, is_cased)

    # Tokens ----------------------------------------------------------------------------------------------------------

    def _next_of(self, kind: str) -> Token:
        if self._peek().kind != kind:
            raise self._refuse()
        return self._next()

    def _is(self, *texts: str) -> bool:
        return self._peek().kind in ("name", "sign") and self._peek().text in texts

    def _take(self, text: str) -> bool:
        is_there = self._is(text)
        self._at += is_there
        return is_there

    def _require(self, *texts: str) -> None:
        for text in texts:
            if not self._take(text):
                raise self._refuse()

    def _refuse(self) -> Refusal:
        before = " ".join(each.text for each in self._tokens[max(self._at - 3, 0) : self._at])
        return Refusal("eql", f"{self._peek().text or 'the end'!r:.60} is not understood after {before!r:.100}")


def _read_text(token: Token) -> str:
    if token.kind == "raw":
        return token.text[3:-3]

    def replace(found: re.Match[str]) -> str:
        if found[1]:
            return chr(int(found[1], 16))
        if found[2] not in _ESCAPES:
            raise Refusal("eql", f"a backslash before {found[2]!r} in {token.text:.60}")
        return _ESCAPES[found[2]]

    return re.sub(r"\\(?:u\{([0-9a-fA-F]{2,8})\}|(.))", replace, token.text[1:-1], flags=re.DOTALL)


def _read_name(text: str, *, keeps_mark: bool = False) -> str:
    """Reads the name of a field. keeps_mark: with the `?` of one that is optional."""
    plain = text if keeps_mark else text.removeprefix("?")
    return re.sub(r"`((?:[^`]|``)+)`", lambda found: found[1].replace("``", "`"), plain)


def _read_number(text: str) -> int | Decimal:
    return int(text) if text.isdigit() else Decimal(text)


def _as_argument(part: Part) -> Operand | Literal:
    if isinstance(part, (str, Call, Literal)):
        return part
    raise Refusal("function", f"a value is computed of {part}"[:200])


def _as_operand(part: Part) -> Operand:
    """Returns a part as a text; of an array, an item."""
    argument = _as_argument(part)
    return argument if isinstance(argument, Call) else Call("string", (argument,))


def _relate(left: Operand, operator: str, right: Operand) -> Condition:
    if operator in ("==", ":"):
        return Fields(left, Relation.EQUALS, right, operator == "==")
    return Compared(left, operator, right)
