"""Finds what is valid in a rule but may not be what its author meant. Remarks do not stop a rule."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping

from sqlglot import exp

from lookback.core.errors import ExpressionError, Problem
from lookback.core.expressions.compiling import compile_expression
from lookback.core.expressions.syntax import COMPARISONS, find_lost_backslashes, parse, unwrap, write_node
from lookback.core.rules.compiled import CompiledMeasure, CompiledRule
from lookback.core.rules.descriptions import DESCRIPTIONS
from lookback.core.values.durations import MICROSECONDS, format_duration
from lookback.core.values.limits import WIDEST_LIMITS
from lookback.core.values.types import DataType
from lookback.core.values.windows import EVENT, LOOKBACK, SEQUENCE, Lookback, TiledWindow

_WEEK, _DAY = MICROSECONDS["week"], MICROSECONDS["day"]
# Offsets from the epoch, a Thursday, to the first Monday and the first Sunday after it.
_TO_MONDAY, _TO_SUNDAY = 4 * _DAY, 3 * _DAY
_VALUE_AGGREGATES = {
    "avg": "the average",
    "sum": "the sum",
    "min": "the smallest",
    "max": "the largest",
    "last": "the last",
    "stddev_samp": "the standard deviation",
}


def find_remarks(rule: CompiledRule) -> list[Problem]:
    """Finds the remarks that need no events, in the order of the rule's keys."""
    return [
        *_find_unused_parameters(rule),
        *_find_week_starts(rule),
        *_find_self_limits(rule),
        *_find_misread_conditions(rule),
        *_find_shared_waits(rule),
        *_find_unasked_reports(rule),
        *_find_missing_tests(rule),
        *_find_empty_lists(rule),
    ]


def _find_unused_parameters(rule: CompiledRule) -> Iterator[Problem]:
    texts = {
        key: value for key, value in rule.spec.document.items() if key not in ("parameters", "tests", *DESCRIPTIONS)
    }
    written = json.dumps(texts, ensure_ascii=False, default=str)
    for name in rule.spec.parameters:
        if not re.search(rf":{name}(?!\w)", written, re.ASCII):
            yield Problem(f"parameters.{name}", f"nothing in the rule takes it; write :{name} where its value belongs")


def _find_week_starts(rule: CompiledRule) -> Iterator[Problem]:
    """Finds a window of whole weeks that starts on a Thursday by default."""
    window = rule.spec.window
    if not isinstance(window, TiledWindow) or window.slide % _WEEK or window.offset:
        return
    yield Problem(
        "window",
        f"a window of {format_duration(window.size)} begins on a Thursday, as 1 January 1970 was, at 00:00 UTC; write "
        f"`offset: {_TO_MONDAY // _DAY} days` for weeks from Monday, `offset: {_TO_SUNDAY // _DAY} days` for weeks from Sunday",
    )


def _find_self_limits(rule: CompiledRule) -> Iterator[Problem]:
    """Finds a field compared with an aggregate of itself over a window that includes the event."""
    if rule.spec.kind != LOOKBACK or not rule.spec.when:
        return
    measures = {measure.name.lower(): measure for measure in rule.measures}
    texts = {measure.name: measure.text for measure in rule.spec.measures}
    reported: set[str] = set()
    for node in parse(rule.spec.when, WIDEST_LIMITS).find_all(*COMPARISONS, exp.Between):
        names = {column.name.lower() for column in node.find_all(exp.Column)}
        for name in sorted(names & set(measures)):
            measure = measures[name]
            fields = _value_fields(measure)
            shared = sorted(field for field in fields if field.lower() in names)
            window = measure.window
            if not isinstance(window, Lookback) or window.delay or _is_record(node, measure):
                continue
            if not shared or name in reported:
                continue
            reported.add(name)
            own = f"{{measure: {texts[measure.name]}, window: {{lookback: {format_duration(window.size)}, delay: 1 microsecond}}}}"
            aggregate = f"{_VALUE_AGGREGATES[measure.feature.function]} of {', '.join(sorted(fields))}"
            is_own = measure.feature.function == "last"
            effect = "it is compared with itself" if is_own else "an outlier moves its own limit"
            yield Problem(
                "when",
                f"{shared[0]} is compared with {measure.name}, {aggregate} over a window that holds the event itself, so "
                f"{effect}; to leave the event out write `{measure.name}: {own}`",
            )


def _value_fields(measure: CompiledMeasure) -> frozenset[str]:
    """Returns the fields whose values the measure aggregates; none for a count."""
    feature = measure.feature
    is_other = feature.function == "last" and feature.filter is not None  # an event that may not be this one
    if feature.argument is None or feature.function not in _VALUE_AGGREGATES or is_other:
        return frozenset()
    return feature.argument.named


def _is_record(node: exp.Expr, measure: CompiledMeasure) -> bool:
    """Returns whether the comparison tests for the largest or smallest event, which needs the event in the window."""
    if measure.feature.function not in ("min", "max") or isinstance(node, (exp.GT, exp.LT, exp.Between)):
        return False
    return isinstance(unwrap(node.this), exp.Column) and isinstance(unwrap(node.expression), exp.Column)


def _find_misread_conditions(rule: CompiledRule) -> Iterator[Problem]:
    """Finds conditions that cannot hold, or hold for NaN, and texts that are read without their backslashes."""
    texts = list(list_texts(rule))
    trees = [(place, text, parse(text, WIDEST_LIMITS)) for place, text in texts]
    types = {name: type_ for part in rule.expressions for name, type_ in part.types.items()}
    guarded = {
        column.name.lower()
        for _, _, tree in trees
        for call in tree.find_all(exp.Anonymous)
        if str(call.name).lower() in ("isnan", "nanvl")
        for column in call.find_all(exp.Column)
    }
    floats = {name for name in _list_floats(rule, types, guarded) if name.lower() not in guarded}
    for place, text, tree in trees:
        found = [*_explain_never_true(tree, types), *_explain_nan(tree, floats)]
        found += [
            f"in {lost.written} SQL reads {lost.read}; for a backslash write {lost.remedy}, and in a YAML text in double "
            "quotes twice as many"
            for lost in find_lost_backslashes(text)
        ]
        yield from (Problem(place, message) for message in dict.fromkeys(found))


def list_texts(rule: CompiledRule) -> Iterator[tuple[str, str]]:
    """Lists the expressions of a rule as they are written, with their places."""
    spec = rule.spec
    if spec.where:
        yield "where", spec.where
    for at, entry in enumerate(spec.group_by):
        if entry.expression:
            yield f"group_by[{at}].{entry.name}", entry.expression
    yield from ((f"measures.{measure.name}", measure.text) for measure in spec.measures)
    if spec.when:
        yield "when", spec.when
    if spec.sequence is not None:
        for at, step in enumerate(spec.sequence.steps):
            yield f"sequence.steps[{at}].{'absent' if step.absent else 'where'}", step.condition
        if spec.sequence.until:
            yield "sequence.until", spec.sequence.until


def _list_floats(rule: CompiledRule, types: Mapping[str, DataType], guarded: Collection[str]) -> Iterator[str]:
    """Lists the fields and measures that may be NaN."""
    measures = {measure.name: measure for measure in rule.measures}
    for name, type_ in types.items():
        measure = measures.get(name)
        if measure is None:
            may_be_nan = type_.is_float
        else:
            argument = measure.feature.argument_type
            may_be_nan = type_.is_float and argument is not None and argument.is_float
            may_be_nan = may_be_nan and not {each.lower() for each in measure.argument_fields} & {*guarded}
        if may_be_nan:
            yield name


def _explain_never_true(tree: exp.Expr, types: Mapping[str, DataType]) -> Iterator[str]:
    """Explains comparisons with NULL, and ranges that no value is in."""
    for node in tree.find_all(*COMPARISONS, exp.Between, exp.In, exp.Like):
        if isinstance(node, exp.NullSafeEQ):
            continue
        this = write_node(node.this)
        if isinstance(node, exp.In):
            word = "not " if _is_negated(node) else ""
            left = [write_node(item) for item in node.expressions if not isinstance(unwrap(item), exp.Null)]
            if len(left) < len(node.expressions) and (word or not left):
                remedy = f"{word}in ({', '.join(left)})" if left else f"is {word}null"
                written = ", ".join(map(write_node, node.expressions))
                yield f"{this} {word}in ({written}) is never true, since it compares with NULL; write {this} {remedy}"
        elif isinstance(node, exp.Between):
            bounds = node.args["low"], node.args["high"]
            low, high = map(write_node, bounds)
            if _is_above(node.this, *bounds, types):
                yield _explain_exchanged(this, low, high, is_negated=_is_negated(node))
            elif any(isinstance(unwrap(bound), exp.Null) for bound in bounds):
                yield f"{this} between {low} and {high} is never true, since a bound is NULL; leave it out"
        elif any(isinstance(unwrap(side), exp.Null) for side in (node.this, node.expression)):
            other = write_node(node.expression if isinstance(unwrap(node.this), exp.Null) else node.this)
            word = "is not null" if isinstance(node, exp.NEQ) else "is null"
            yield f"a comparison of {other} with NULL is never true; write {other} {word}"


def _explain_exchanged(this: str, low: str, high: str, *, is_negated: bool) -> str:
    """Explains a range whose bounds are exchanged."""
    word, holds = ("not between", "every") if is_negated else ("between", "no")
    over = "what is outside of a range" if is_negated else "a range"
    around = f"{this} > {high} and {this} < {low}" if is_negated else f"{this} >= {low} or {this} <= {high}"
    return (
        f"{this} {word} {low} and {high} holds for {holds} value, since the first bound is above the second; write {this} "
        f"{word} {high} and {low}, or for {over} over midnight or the end of a year {around}"
    )


def _is_negated(node: exp.Expr) -> bool:
    """Returns whether a node is negated, with any parentheses between."""
    parent = node.parent
    while isinstance(parent, exp.Paren):
        parent = parent.parent
    return isinstance(parent, exp.Not)


def _is_above(value: exp.Expr, low: exp.Expr, high: exp.Expr, types: Mapping[str, DataType]) -> bool:
    """Returns whether the lower bound of a value is above the upper one, as far as both are constants."""
    if any(bound.find(exp.Column) for bound in (low, high)):
        return False
    try:
        type_ = compile_expression(write_node(value), types, WIDEST_LIMITS).type
        bounds = [write_node(bound) for bound in (low, high)]
        if type_.name in ("date", "timestamp"):
            bounds = [f"cast({bound} as {type_})" for bound in bounds]
        compared = compile_expression(f"({bounds[0]}) > ({bounds[1]})", {}, WIDEST_LIMITS)
    except ExpressionError:
        return False
    return bool(compared.evaluate({}, 1).is_true()[0])


def _find_shared_waits(rule: CompiledRule) -> Iterator[Problem]:
    """Finds an absence that looks among all events of the step before it, though each of these begins its own wait."""
    steps = () if rule.spec.sequence is None else rule.spec.sequence.steps
    if len(steps) < 2 or not steps[-1].absent or steps[-2].at_least > 1 or steps[-2].at_most == 1:
        return
    before = steps[-2].name
    for call in parse(steps[-1].condition, WIDEST_LIMITS).find_all(exp.Anonymous):
        name, arguments = str(call.name).lower(), call.expressions
        column = unwrap(arguments[0]) if arguments else None
        if not isinstance(column, exp.Column) or not column.name.lower().startswith(f"{before}.".lower()):
            continue
        if name == "array_contains" or (name == "element_at" and isinstance(unwrap(arguments[1]), exp.Literal)):
            field = column.name
            yield Problem(
                f"sequence.steps[{len(steps) - 1}].absent",
                f"each event of {before} begins a wait, but {field} begins with the earliest event of the match, so what belongs "
                f"to one event of {before} can end the wait of another; write element_at({field}, -1) for the event that began "
                "the wait",
            )


# Operators and functions that give NaN for NaN.
_NAN_PASSES = (exp.Paren, exp.Neg, exp.Add, exp.Sub, exp.Mul, exp.Div, exp.Mod)
_NAN_FUNCTIONS = (
    "abs", "coalesce", "nvl", "ifnull", "greatest", "mod", "pmod", "sqrt", "pow", "power", "exp", "ln", "log10", "sin", "cos",
    "asin", "acos", "atan2", "radians", "degrees",
)  # fmt: skip


def _explain_nan(tree: exp.Expr, floats: Collection[str]) -> Iterator[str]:
    """Explains comparisons that hold for NaN. floats: the names that may be NaN."""
    known = {name.lower(): name for name in floats}
    for node in tree.find_all(exp.GT, exp.GTE, exp.LT, exp.LTE, exp.Between) if known else ():
        is_negated, around = False, node.parent
        while isinstance(around, (exp.Paren, exp.Not, exp.And, exp.Or)):
            is_negated ^= isinstance(around, exp.Not)
            around = around.parent
        is_left = isinstance(node, (exp.GT, exp.GTE)) ^ is_negated
        # `between` has no right side: NaN is above its upper bound.
        greater = node.this if is_left else node.args.get("expression")
        for column in greater.find_all(exp.Column) if greater is not None else ():
            name = ".".join(part.name for part in column.parts)
            if name.lower() in known and _passes_nan(column, node) and not _is_bounded(node, name):
                shown = f"not {write_node(node)}" if is_negated else write_node(node)
                yield (
                    f"{shown} holds where {name} is NaN, which is greater than every number; write not isnan({name}) and "
                    f"{shown}"
                )


def _passes_nan(column: exp.Expr, comparison: exp.Expr) -> bool:
    """Returns whether an operand of a comparison is NaN where the column is."""
    parent = column.parent
    while parent is not None and parent is not comparison:
        is_passing = isinstance(parent, exp.Anonymous) and str(parent.name).lower() in _NAN_FUNCTIONS
        if not is_passing and not isinstance(parent, _NAN_PASSES):
            return False
        parent = parent.parent
    return True


def _is_bounded(comparison: exp.Expr, name: str) -> bool:
    """Returns whether a condition joined by `and` with a comparison bounds the name from above, so that NaN fails there."""
    top = comparison
    while isinstance(top.parent, (exp.And, exp.Paren)):
        top = top.parent
    for other in top.flatten() if isinstance(top, exp.And) else ():
        inner = unwrap(other)
        lower = inner.this if isinstance(inner, (exp.LT, exp.LTE, exp.Between, exp.EQ)) else None
        lower = inner.expression if isinstance(inner, (exp.GT, exp.GTE)) else lower
        if lower is not None and write_node(unwrap(lower)).lower() == name.lower():
            return True
    return False


def _find_unasked_reports(rule: CompiledRule) -> Iterator[Problem]:
    """Finds a rule whose every window is an alert that waits for a person."""
    if rule.spec.kind not in (EVENT, SEQUENCE) and not rule.spec.when and rule.spec.queue:
        yield Problem(
            "queue",
            "without `when` every window with an event raises an alert, and each waits for a person; write `queue: false` if "
            "they are reports, or a condition",
        )


def _find_missing_tests(rule: CompiledRule) -> Iterator[Problem]:
    if not rule.spec.tests:
        yield Problem(
            "tests", "is missing; write an alert that you want and a near miss, so that a change cannot break them"
        )


def _find_empty_lists(rule: CompiledRule) -> Iterator[Problem]:
    """Finds lists that the rule asks and that are empty in all of its tests."""
    filled = {name for test in rule.spec.tests for name, values in (test.get("lists") or {}).items() if values}
    if rule.spec.tests:
        for name in sorted(rule.lists - filled):
            yield Problem("tests", f"list {name!r} is empty in every test; write `lists: {{{name}: [...]}}` into one")
