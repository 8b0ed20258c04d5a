"""Reads Sigma's correlations: how many events, how many values, which rules together, in order, or without another."""

from __future__ import annotations

from collections.abc import Sequence

from sigma.correlations import (
    CorrelationConditionAND,
    CorrelationConditionItem,
    CorrelationConditionNOT,
    CorrelationConditionOR,
    SigmaCorrelationCondition,
    SigmaCorrelationRule,
    SigmaExtendedCorrelationCondition,
    SigmaRuleReference,
)

from lookback.importing.conditions import Condition
from lookback.importing.detections import Chain, Correlation, Key, Measured, Together, make_chain, name_member
from lookback.importing.reasons import Reason, Refusal

_OPERATORS = {"LT": "<", "LTE": "<=", "GT": ">", "GTE": ">=", "EQ": "=", "NEQ": "<>"}
# These hold for ever longer windows once they hold; the others may hold between events, or cease to.
_LASTING = (">", ">=")
_AGGREGATES = {
    "event_count": "count",
    "value_count": "count(distinct)",
    "value_sum": "sum",
    "value_avg": "avg",
    "value_median": "median",
    "value_percentile": "percentile",
}
_Read = tuple[Correlation, list[Reason]]


def read_correlation(rule: SigmaCorrelationRule, members: Sequence[Condition]) -> _Read:
    """Reads a correlation whose references are resolved; `members` are the conditions of the rules that it names.

    Raises Refusal.
    """
    kind = rule.type.name.lower()
    if kind in _AGGREGATES:
        return _read_measured(rule, tuple(members), _AGGREGATES[kind])
    if isinstance(rule.condition, SigmaExtendedCorrelationCondition):
        return _read_extended(rule, tuple(members), rule.condition)
    return _read_counted(rule, tuple(members), rule.condition)


def _read_keys(rule: SigmaCorrelationRule) -> tuple[Key, ...]:
    """Reads the fields of the key, with the names that they have in the events of each member."""
    keys = []
    for name in rule.group_by or []:
        alias = rule.aliases.aliases.get(name)
        fields = []
        for reference in rule.referenced_rules:
            called = (reference.reference, reference.rule.name, str(reference.rule.id))
            mapped = {} if alias is None else {each.reference: field for each, field in alias.mapping.items()}
            fields.append(next((mapped[each] for each in called if each in mapped), name))
        keys.append(Key(name, tuple(fields)))
    return tuple(keys)


def _find_alias_loss(keys: Sequence[Key]) -> list[Reason]:
    differing = [key.name for key in keys if len(set(key.fields)) > 1]
    return [Reason("alias", f"{differing[0]!r} is another field in each member")] if differing else []


def _read_measured(rule: SigmaCorrelationRule, members: tuple[Condition, ...], aggregate: str) -> _Read:
    condition, keys = rule.condition, _read_keys(rule)
    assert isinstance(condition, SigmaCorrelationCondition)
    operator, losses = _OPERATORS[condition.op.name], _find_alias_loss(keys)
    if operator not in _LASTING:
        losses.append(Reason("every-event", f"{operator} {condition.count}"))
    named = condition.fieldref or ""
    fields = tuple(named) if isinstance(named, list) else (named,)
    if len(fields) > 1 and aggregate != "count(distinct)":
        raise Refusal("unsupported", f"{aggregate} over several fields")
    percentile = 50 if condition.percentile is None else condition.percentile
    if not 0 <= percentile <= 100:
        raise Refusal("sigma", f"a percentile is from 0 to 100, got {percentile}")
    measured = Measured(
        members,
        keys,
        rule.timespan.seconds,
        aggregate,
        operator,
        f"{condition.count}",
        fields if aggregate != "count" else (),
        percentile,
    )
    return measured, losses


def _read_counted(
    rule: SigmaCorrelationRule, members: tuple[Condition, ...], condition: SigmaCorrelationCondition
) -> _Read:
    """Reads how many of the rules match: all of them, or a number."""
    keys, operator, number = _read_keys(rule), _OPERATORS[condition.op.name], condition.count
    is_all = (operator in (">=", "=") and number == len(members)) or (operator == ">" and number == len(members) - 1)
    if rule.type.name == "TEMPORAL_ORDERED":
        if not is_all:
            raise Refusal("unsupported", f"{operator} {number} of {len(members)} rules in order")
        return make_chain(members, keys, rule.timespan.seconds), []
    names, losses = [name_member(at) for at in range(len(members))], _find_alias_loss(keys)
    if is_all:
        return Together(members, keys, rule.timespan.seconds, " and ".join(f"{name} > 0" for name in names)), losses
    if operator not in _LASTING:
        losses.append(Reason("every-event", f"{operator} {number} rules"))
    counted = " + ".join(f"if({name} > 0, 1, 0)" for name in names)
    return Together(members, keys, rule.timespan.seconds, f"{counted} {operator} {number}"), losses


def _read_extended(
    rule: SigmaCorrelationRule, members: tuple[Condition, ...], condition: SigmaExtendedCorrelationCondition
) -> _Read:
    """Reads a condition such as `a and b`, or `a and not b`."""
    places = {reference.reference: at for at, reference in enumerate(rule.referenced_rules)}
    keys, seconds, parsed = _read_keys(rule), rule.timespan.seconds, condition.parsed
    if _has_not(parsed):
        return _read_missing(members, keys, seconds, _list_conjuncts(parsed), places), []
    if rule.type.name == "TEMPORAL_ORDERED":
        wanted = [places[each.reference] for each in _list_conjuncts(parsed) if isinstance(each, SigmaRuleReference)]
        if len(wanted) != len(_list_conjuncts(parsed)):
            raise Refusal("unsupported", "alternatives in order")
        order = sorted(set(wanted))
        ordered = tuple(Key(key.name, tuple(key.fields[at] for at in order)) for key in keys)
        return make_chain([members[at] for at in order], ordered, seconds), []
    return Together(members, keys, seconds, _write_wanted(parsed, places)), _find_alias_loss(keys)


def _has_not(parsed: CorrelationConditionItem | SigmaRuleReference) -> bool:
    if isinstance(parsed, SigmaRuleReference):
        return False
    return isinstance(parsed, CorrelationConditionNOT) or any(map(_has_not, parsed.args))


def _list_conjuncts(
    parsed: CorrelationConditionItem | SigmaRuleReference,
) -> list[CorrelationConditionItem | SigmaRuleReference]:
    """Lists the parts that are joined by `and`."""
    if isinstance(parsed, CorrelationConditionAND):
        return [each for part in parsed.args for each in _list_conjuncts(part)]
    return [parsed]


def _read_missing(
    members: tuple[Condition, ...],
    keys: tuple[Key, ...],
    seconds: int,
    parts: Sequence[CorrelationConditionItem | SigmaRuleReference],
    places: dict[str, int],
) -> Chain:
    """Reads `a and not b and not c`. Raises Refusal for other conditions with `not`."""
    wanted = [places[each.reference] for each in parts if isinstance(each, SigmaRuleReference)]
    negated = [each.args[0] for each in parts if isinstance(each, CorrelationConditionNOT)]
    unwanted = [places[each.reference] for each in negated if isinstance(each, SigmaRuleReference)]
    if len(wanted) != 1 or len(wanted) + len(unwanted) != len(parts):
        raise Refusal("absence", "more than one rule must come, or `not` is about several rules together")
    if any(len({key.fields[at] for at in unwanted}) > 1 for key in keys):
        raise Refusal("absence", "the key is another field in each of the rules that must not come")
    order = [*wanted, *unwanted]
    ordered = tuple(Key(key.name, tuple(key.fields[at] for at in order)) for key in keys)
    return make_chain([members[wanted[0]]], ordered, seconds, unwanted=[members[at] for at in unwanted])


def _write_wanted(parsed: CorrelationConditionItem | SigmaRuleReference, places: dict[str, int]) -> str:
    if isinstance(parsed, SigmaRuleReference):
        return f"{name_member(places[parsed.reference])} > 0"
    word = " or " if isinstance(parsed, CorrelationConditionOR) else " and "
    return word.join(f"({_write_wanted(each, places)})" for each in parsed.args)
