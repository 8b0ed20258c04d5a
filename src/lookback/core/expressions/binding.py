"""Binds a syntax tree to a schema and returns a typed node. Only listed classes of syntax nodes are allowed.

Binding reports all problems of a tree at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal

from sqlglot import exp

from lookback.core.errors import TypeNameError
from lookback.core.expressions.forms import FORMS
from lookback.core.expressions.functions import FUNCTIONS, make_call, make_combination, make_ranked
from lookback.core.expressions.kernels import LONG_MAX, LONG_MIN
from lookback.core.expressions.lambdas import LAMBDAS, make_lambda, make_variable
from lookback.core.expressions.like import join_likes, make_like, quote_text
from lookback.core.expressions.nodes import PRIMARY, UNARY, Node, make_constant, make_field, name_membership
from lookback.core.expressions.operators import (
    RefusedOperator,
    add_interval,
    cast_explicitly,
    make_arithmetic,
    make_case,
    make_comparison,
    make_in_list,
    make_is_null,
    make_is_truth,
    make_logic,
    make_negative,
    make_not,
    parse_literal_time,
)
from lookback.core.expressions.refusals import (
    IN_LIST,
    explain_ambiguous_field,
    explain_no_function,
    explain_refusal,
    explain_unknown_field,
    quote_day,
)
from lookback.core.expressions.syntax import LookbackSql, name_as_sql, quote_node, unwrap
from lookback.core.values.durations import MICROSECONDS, format_duration
from lookback.core.values.limits import DEFAULT_LIMITS, name_limit
from lookback.core.values.types import (
    BIGINT,
    BOOLEAN,
    DATE,
    DOUBLE,
    INT,
    NULL,
    STRING,
    TIMESTAMP,
    DataType,
    decimal,
    parse_type,
)

_NUMBER = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", re.IGNORECASE | re.ASCII)
_DAY = re.compile(r"[0-9]{4} - [0-9]{1,2} - [0-9]{1,2}", re.ASCII)
_LONGEST_DAYS = LONG_MAX // MICROSECONDS["day"]

_Handler = Callable[["Binder", exp.Expr], Node]


class Binder:
    """Binds syntax trees to a schema and collects their problems. A tree with problems has no node.

    Args:
        schema: The type of each field.
        alternatives: The maximum number of values in the list of an `in`.
    """

    def __init__(self, schema: Mapping[str, DataType], alternatives: int = DEFAULT_LIMITS.alternatives) -> None:
        self._schema, self._alternatives = schema, alternatives
        self._names: dict[str, list[str]] = {}
        for name in schema:
            self._names.setdefault(name.lower(), []).append(name)
        # The name and the node of the variable of the lambda that is being bound.
        self._variable: tuple[str, Node] | None = None
        self.problems: list[str] = []
        # The calls of in_list by the names of their columns: the SQL, the list's name, and the text to look up.
        self.memberships: dict[str, tuple[str, str, Node]] = {}

    def bind(self, tree: exp.Expr) -> Node | None:
        """Returns the typed node of a tree; None if the tree has problems."""
        tree = unwrap(tree)
        handler, allowed = _NODES.get(type(tree), (None, ""))
        extra = [key for key, value in tree.args.items() if value and key not in allowed.split()]
        if handler is None or extra:
            self._report(explain_refusal(tree))
            return None
        return self._try(lambda: handler(self, tree))

    def bind_combination(self, tree: exp.Expr) -> Node | None:
        """Returns the typed node of a combination of values, or of a value with its rank; None if it has problems."""
        make = make_combination if isinstance(tree, exp.Tuple) else make_ranked
        return self._try(lambda: make(self.bind_all(tree.expressions)))

    def _try(self, make: Callable[[], Node]) -> Node | None:
        try:
            return make()
        except RefusedOperator as refused:
            self._report(str(refused))
        except _OperandProblems:
            pass
        return None

    def bind_all(self, trees: Sequence[exp.Expr]) -> list[Node]:
        """Returns the nodes of all trees. Raises _OperandProblems, after binding all of them, if any has problems."""
        unknown = [self._is_unknown(tree) for tree in trees]
        nodes = [None if wrong else self.bind(tree) for tree, wrong in zip(trees, unknown, strict=True)]
        bound = [node for node in nodes if node is not None]
        # An unknown name next to a field with texts or times is probably a text without quotes.
        beside_text = any(node.fields and node.type in (STRING, DATE, TIMESTAMP) for node in bound)
        for tree, wrong in zip(trees, unknown, strict=True):
            if wrong:
                self._report(explain_unknown_field(unwrap(tree).name, self._schema, beside_text=beside_text))
        if len(bound) < len(nodes):
            raise _OperandProblems
        return bound

    def _is_unknown(self, tree: exp.Expr) -> bool:
        """Returns whether the tree is a name that is not in the schema."""
        if not isinstance(unwrap(tree), exp.Column):
            return False
        name = unwrap(tree).name.lower()
        return name not in self._names and not (self._variable and name == self._variable[0].lower())

    def _report(self, message: str) -> None:
        if message not in self.problems:
            self.problems.append(message)

    # Leaves

    def _bind_variable(self, tree: exp.Expr) -> Node:
        if self._variable is None:
            raise RefusedOperator(explain_refusal(tree))
        return self._variable[1]

    def _bind_column(self, tree: exp.Expr) -> Node:
        name = tree.name
        if self._variable and name.lower() == self._variable[0].lower():
            # The parser finds variables by their exact spelling.
            return self._variable[1]
        matches = self._names.get(name.lower(), [])
        if len(matches) == 1:
            return make_field(matches[0], self._schema[matches[0]], name_as_sql(matches[0]))
        raise RefusedOperator(
            explain_unknown_field(name, self._schema) if not matches else explain_ambiguous_field(name, matches)
        )

    def _bind_literal(self, tree: exp.Expr) -> Node:
        text = str(tree.this)
        if tree.args["is_string"]:
            return make_constant(STRING, text, quote_text(text), literal=text)
        return _read_number(text, negated=False)

    # Operators

    def _bind_binary(self, tree: exp.Expr) -> Node:
        symbol = _SYMBOLS[type(tree)]
        if symbol in "+-" and (interval := _find_interval(tree)) is not None:
            return self._add_interval(tree, *interval)
        left, right = self.bind_all([tree.this, tree.expression])
        if symbol == "||":
            return make_call("concat", [left, right])
        if symbol in ("=", "!=", "<", "<=", ">", ">=", "<=>"):
            for one, other in ((left, tree.expression), (right, tree.this)):
                if one.type in (DATE, TIMESTAMP) and _DAY.fullmatch(day := unwrap(other).sql(LookbackSql)):
                    raise RefusedOperator(
                        f"{day} is a difference of numbers; put dates in single quotes: {quote_day(day)}"
                    )
            return make_comparison(symbol, left, right)
        return make_arithmetic(symbol, left, right)

    def _add_interval(self, tree: exp.Expr, other: exp.Expr, interval: exp.Interval) -> Node:
        (node,) = self.bind_all([other])
        microseconds = _read_interval(interval)
        sign = -1 if isinstance(tree, exp.Sub) else 1
        if sign < 0 and isinstance(tree.this, exp.Interval):
            raise RefusedOperator(f"{quote_node(tree)} takes a time from an interval; write time - interval")
        printed = node.within(4)
        count, unit = format_duration(microseconds).split()
        return add_interval(
            node, sign * microseconds, f"{printed} {'-' if sign < 0 else '+'} interval '{count}' {unit.rstrip('s')}"
        )

    def _bind_negative(self, tree: exp.Expr) -> Node:
        if isinstance(tree.this, exp.Literal) and not tree.this.args["is_string"]:
            return _read_number(str(tree.this.this), negated=True)
        (node,) = self.bind_all([tree.this])
        return make_negative(node)

    def _bind_logic(self, tree: exp.Expr) -> Node:
        word = "and" if isinstance(tree, exp.And) else "or"
        return _make_chain(word, self.bind_all(_split_chain(tree)))

    def _bind_negation(self, tree: exp.Expr) -> Node:
        inner = tree.this
        if isinstance(inner, exp.Is):
            return self._bind_is(inner, negated=True)
        (node,) = self.bind_all([inner])
        return make_not(node)

    def _bind_is(self, tree: exp.Expr, negated: bool = False) -> Node:
        (node,) = self.bind_all([tree.this])
        if isinstance(tree.expression, exp.Null):
            return make_is_null(node, negated)
        if isinstance(tree.expression, exp.Boolean):
            return make_is_truth(node, bool(tree.expression.this), negated)
        raise RefusedOperator(f"{quote_node(tree)} is not allowed; write is null, is true or is false")

    def _bind_distinct(self, tree: exp.Expr) -> Node:
        left, right = self.bind_all([tree.this, tree.expression])
        return make_not(make_comparison("<=>", left, right))

    def _bind_in(self, tree: exp.Expr) -> Node:
        if len(tree.expressions) > self._alternatives:
            what = f"a list has {len(tree.expressions):,} values, more than {self._alternatives:,}"
            raise RefusedOperator(
                name_limit(f"{what}; split it with or, or mark the events by a field of their own", "alternatives")
            )
        value, *items = self.bind_all([tree.this, *tree.expressions])
        if not items:
            raise RefusedOperator(f"{quote_node(tree)} has an empty list; write at least one value")
        return make_in_list(value, items)

    def _bind_between(self, tree: exp.Expr) -> Node:
        value, low, high = self.bind_all([tree.this, tree.args["low"], tree.args["high"]])
        return make_logic("and", [make_comparison(">=", value, low), make_comparison("<=", value, high)])

    def _bind_escaped_like(self, tree: exp.Expr) -> Node:
        escape = tree.expression
        if (
            not isinstance(tree.this, (exp.Like, exp.ILike))
            or not isinstance(escape, exp.Literal)
            or len(escape.name) != 1
        ):
            raise RefusedOperator(f"{quote_node(tree)}: escape takes one character in quotes after a like")
        return self._bind_like(tree.this, escape.name)

    def _bind_like(self, tree: exp.Expr, escape: str = "\\") -> Node:
        if set(tree.args) - {"this", "expression", "negate"}:
            raise RefusedOperator(explain_refusal(tree))
        negated, ignores_case = bool(tree.args.get("negate")), isinstance(tree, exp.ILike)
        patterns = [tree.expression]
        if isinstance(tree.expression, (exp.Any, exp.All)):
            patterns = self._list_patterns(tree)
        value, *nodes = self.bind_all([tree.this, *patterns])
        likes = [make_like(value, node, escape, negated, ignores_case=ignores_case) for node in nodes]
        word = "and" if isinstance(tree.expression, exp.All) else "or"
        return likes[0] if len(likes) == 1 else _make_chain(word, likes)

    def _bind_regexp(self, tree: exp.Expr) -> Node:
        return make_call("regexp_like", self.bind_all([tree.this, tree.expression]))

    def _list_patterns(self, tree: exp.Expr) -> list[exp.Expr]:
        """Lists the patterns of `like any` and `like all`. Raises RefusedOperator."""
        listed, word = tree.expression.this, f"{tree.key} {tree.expression.key}"
        patterns = listed.expressions if isinstance(listed, exp.Tuple) else [unwrap(listed)]
        if not patterns or isinstance(listed, exp.Subquery):
            raise RefusedOperator(f"{quote_node(tree)}: {word} takes patterns in parentheses, such as ('a%', 'b%')")
        if tree.args.get("negate"):
            # In SQL, `not like any` holds where a single pattern does not match.
            remedy = f"where none of the patterns matches, write not (x {tree.key} any (...))"
            raise RefusedOperator(f"{quote_node(tree)} is easily misread; {remedy}")
        if len(patterns) > self._alternatives:
            what = f"{word} has {len(patterns):,} patterns, more than {self._alternatives:,}"
            raise RefusedOperator(name_limit(f"{what}; split it with or", "alternatives"))
        return patterns

    # Conditional values, casts, calls

    def _bind_case(self, tree: exp.Expr) -> Node:
        flat: list[exp.Expr] = [part for branch in tree.args["ifs"] for part in (branch.this, branch.args["true"])]
        subject, default = tree.args.get("this"), tree.args.get("default")
        nodes = self.bind_all([*flat, *([subject] if subject else []), *([default] if default else [])])
        pairs = list(zip(nodes[0 : len(flat) : 2], nodes[1 : len(flat) : 2], strict=True))
        last = nodes[-1] if default else None
        if subject:
            pairs = [(make_comparison("=", nodes[len(flat)], when), then) for when, then in pairs]
        shown = " ".join(f"when {when.sql} then {then.sql}" for when, then in pairs)
        return make_case(pairs, last, f"case {shown}{f' else {last.sql}' if last else ''} end")

    def _bind_cast(self, tree: exp.Expr) -> Node:
        target = _read_cast_type(tree.args["to"])
        (node,) = self.bind_all([tree.this])
        if node.type == STRING and target.name in ("date", "timestamp") and isinstance(node.literal, str):
            return make_constant(target, parse_literal_time(node.literal, target), f"{target} {node.sql}")
        return cast_explicitly(node, target, tolerant=bool(tree.args.get("safe")))

    def _bind_call(self, tree: exp.Expr) -> Node:
        name = str(tree.name).lower()
        if name == IN_LIST:
            return self._bind_membership(self.bind_all(tree.expressions))
        if name in LAMBDAS:
            return self._bind_lambda(name, tree.expressions)
        if name in FUNCTIONS or name in FORMS:
            return make_call(name, self.bind_all(tree.expressions))
        self._report(explain_no_function(name))
        self.bind_all([tree for tree in tree.expressions if not isinstance(tree, (exp.Star, exp.Distinct))])
        raise _OperandProblems

    def _bind_lambda(self, name: str, arguments: Sequence[exp.Expr]) -> Node:
        example = f"{name}(a, x -> {'x + 1' if name == 'transform' else 'x > 1'})"
        is_call = len(arguments) == 2 and isinstance(arguments[1], exp.Lambda)
        variables = arguments[1].expressions if is_call else []
        if len(variables) != 1 or arguments[1].args.get("colon"):
            raise RefusedOperator(f"{name}() takes an array and a lambda with one variable, such as {example}")
        if self._variable:
            raise RefusedOperator(f"{name}() is in another lambda; write it outside, or use array_contains() there")
        variable = str(variables[0].name)
        if variable.lower() in self._names:
            raise RefusedOperator(f"{name}(): {variable} is a field; give the items another name, such as item -> ...")
        (items,) = self.bind_all(arguments[:1])
        if items.type.element is None:
            raise RefusedOperator(f"{name}() takes an array, but {items.sql!r} is of type {items.type}")
        node = make_variable(variable, items.type.element)
        self._variable = variable, node
        try:
            (body,) = self.bind_all([arguments[1].this])
        finally:
            self._variable = None
        return make_lambda(name, items, node, body)

    def _bind_membership(self, arguments: Sequence[Node]) -> Node:
        example = "in_list(terminal_id, 'known-terminals')"
        if len(arguments) != 2:
            raise RefusedOperator(
                f"in_list() takes a field and the name of a list, such as {example}; got {len(arguments)}"
            )
        value, list_name = arguments
        name = list_name.literal
        if list_name.type != STRING or not isinstance(name, str) or not name.strip():
            raise RefusedOperator(
                f"in_list(): the list is named by a text in quotes, such as {example}; got {list_name.sql}"
            )
        if not value.fields:
            raise RefusedOperator(
                f"in_list(): {value.sql} is the same for all events; look a field up, such as {example}"
            )
        if self._variable and self._variable[1].fields & value.fields:
            remedy = "look up a field, or list the values with in"
            raise RefusedOperator(f"in_list(): {value.sql} is an item of an array; {remedy}")
        sql = f"in_list({value.sql}, {quote_text(name)})"
        column = name_membership(sql)
        try:
            text = cast_explicitly(value, STRING, tolerant=False)
        except RefusedOperator as refused:
            raise RefusedOperator(f"in_list() looks up texts: {refused}") from None
        self.memberships[column] = (sql, name, text)
        return make_field(column, BOOLEAN, sql)


class _OperandProblems(Exception):
    """Raised for operands whose problems are already recorded."""


def _make_chain(word: str, nodes: Sequence[Node]) -> Node:
    return make_logic(word, nodes, join_likes(nodes) if word == "or" else None)


def _split_chain(tree: exp.Expr) -> list[exp.Expr]:
    """Splits a chain of one connective into its operands, in order, looking inside parentheses."""
    parts: list[exp.Expr] = []
    pending = [tree]
    while pending:
        node = unwrap(pending.pop())
        if type(node) is type(tree):
            pending += [node.expression, node.this]
        else:
            parts.append(node)
    return parts


def split_conjuncts(tree: exp.Expr) -> list[exp.Expr]:
    """Splits a tree at its outermost `and`. Returns the operands in order, or the tree itself if it has no `and`."""
    tree = unwrap(tree)
    return _split_chain(tree) if isinstance(tree, exp.And) else [tree]


def _read_number(text: str, negated: bool) -> Node:
    sign, level = ("-", UNARY) if negated else ("", PRIMARY)
    if not _NUMBER.fullmatch(text):
        raise RefusedOperator(f"{text} is not a number")
    if "e" in text.lower():
        value = float(sign + text)
        if value in (float("inf"), float("-inf")):
            raise RefusedOperator(f"{sign}{text} is beyond the range of a double")
        shown = repr(value) if "e" in repr(value) else f"{value!r}e0"
        return make_constant(DOUBLE, value, shown, level)
    if "." in text:
        return _read_decimal(text, negated, level)
    if len(text) > 100:
        raise RefusedOperator("a number has more than 38 digits")
    number = int(sign + text)
    if LONG_MIN <= number <= LONG_MAX:
        type_ = INT if -(2**31) <= number < 2**31 else BIGINT
        return make_constant(type_, number, f"{sign}{abs(number)}", level, literal=number)
    return _read_decimal(text, negated, level)


def _read_decimal(text: str, negated: bool, level: int) -> Node:
    value = Decimal(text)
    _, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int)
    precision = max(len(digits), -exponent)
    if precision > 38:
        raise RefusedOperator(f"{text} has more than 38 digits")
    unscaled = int("".join(map(str, digits)))
    type_ = decimal(max(precision, 1), -exponent)
    shown = format(value, "f") if exponent else f"{value}."
    return make_constant(type_, -unscaled if negated else unscaled, f"{'-' if negated else ''}{shown}", level)


def _find_interval(tree: exp.Expr) -> tuple[exp.Expr, exp.Interval] | None:
    left, right = unwrap(tree.this), unwrap(tree.expression)
    if isinstance(right, exp.Interval):
        return left, right
    return (right, left) if isinstance(left, exp.Interval) else None


def _read_interval(interval: exp.Interval) -> int:
    value, unit = interval.this, interval.args.get("unit")
    name = str(unit.name).lower() if isinstance(unit, exp.Var) else ""
    name = name[:-1] if name.endswith("s") else name
    if (
        not isinstance(value, exp.Literal)
        or not re.fullmatch(r"[0-9]{1,9}", value.name, re.ASCII)
        or name not in MICROSECONDS
    ):
        raise RefusedOperator(
            f"{quote_node(interval)}: write an interval as a whole number and a unit, such as interval '10' minutes"
        )
    length = int(value.name) * MICROSECONDS[name]
    if length > LONG_MAX:
        raise RefusedOperator(f"{quote_node(interval)} is longer than {_LONGEST_DAYS:,} days; write a shorter interval")
    return length


def _read_cast_type(tree: exp.Expr) -> DataType:
    text = tree.sql("spark").lower()
    try:
        type_ = parse_type(text)
    except TypeNameError as error:
        raise RefusedOperator(f"cast: {error}") from None
    if type_.name == "array":
        raise RefusedOperator(f"cast to {type_} is not supported; cast its elements")
    return type_


_SYMBOLS: dict[type[exp.Expr], str] = {
    exp.EQ: "=",
    exp.NEQ: "!=",
    exp.LT: "<",
    exp.LTE: "<=",
    exp.GT: ">",
    exp.GTE: ">=",
    exp.NullSafeEQ: "<=>",
    exp.Add: "+",
    exp.Sub: "-",
    exp.Mul: "*",
    exp.Div: "/",
    exp.Mod: "%",
    exp.IntDiv: "div",
    exp.DPipe: "||",
}

# The allow-list: class of syntax node -> (its handler, the arguments it may have).
_NODES: dict[type[exp.Expr], tuple[_Handler, str]] = {
    exp.Column: (Binder._bind_column, "this"),
    exp.Identifier: (Binder._bind_variable, "this quoted"),
    exp.Literal: (Binder._bind_literal, "this is_string"),
    exp.Boolean: (lambda _, tree: make_constant(BOOLEAN, bool(tree.this), "true" if tree.this else "false"), "this"),
    exp.Null: (lambda *_: make_constant(NULL, None, "null"), ""),
    **dict.fromkeys(_SYMBOLS, (Binder._bind_binary, "this expression typed safe")),
    exp.Neg: (Binder._bind_negative, "this"),
    exp.And: (Binder._bind_logic, "this expression"),
    exp.Or: (Binder._bind_logic, "this expression"),
    exp.Not: (Binder._bind_negation, "this"),
    exp.Is: (Binder._bind_is, "this expression"),
    exp.NullSafeNEQ: (Binder._bind_distinct, "this expression"),
    exp.In: (Binder._bind_in, "this expressions"),
    exp.Between: (Binder._bind_between, "this low high"),
    exp.Like: (Binder._bind_like, "this expression negate"),
    exp.ILike: (Binder._bind_like, "this expression negate"),
    exp.RegexpLike: (Binder._bind_regexp, "this expression"),
    exp.Escape: (Binder._bind_escaped_like, "this expression"),
    exp.Case: (Binder._bind_case, "this ifs default"),
    exp.Cast: (Binder._bind_cast, "this to"),
    exp.TryCast: (Binder._bind_cast, "this to safe"),
    exp.Anonymous: (Binder._bind_call, "this expressions"),
}
