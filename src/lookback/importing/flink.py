"""Reads rules of Flink's public demo of dynamic fraud detection: JSON, or a line with nine parts.

{"ruleId": 1, "ruleState": "ACTIVE", "groupingKeyNames": ["payerId"], "unique": [], "aggregateFieldName": "amount",
 "aggregatorFunctionType": "SUM", "limitOperatorType": "GREATER", "limit": 500, "windowMinutes": 20}
1,(active),(payerId),,(amount),(sum),(>),(500),(20)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from lookback.core.errors import SetupError
from lookback.importing.conditions import And
from lookback.importing.detections import Detection, Key, Measured, Origin, Unread
from lookback.importing.jsonrules import read_json_rules
from lookback.importing.reasons import Reason, Refusal
from lookback.importing.rulefiles import RuleFile

FORMAT = "flink"
_NAMES = (
    *("ruleId", "ruleState", "groupingKeyNames", "unique", "aggregateFieldName"),
    *("aggregatorFunctionType", "limitOperatorType", "limit", "windowMinutes"),
)
_WORDS = {"EQUAL": "=", "NOT_EQUAL": "<>", "GREATER": ">", "GREATER_EQUAL": ">=", "LESS": "<", "LESS_EQUAL": "<="}
_OPERATORS = {**_WORDS, **{operator: operator for operator in _WORDS.values()}, "!=": "<>"}
_AGGREGATES = {"SUM": "sum", "AVG": "avg", "MIN": "min", "MAX": "max"}
# Names in the place of a field: events are counted, and an alert may begin the count again.
_COUNT, _COUNT_WITH_RESET = "COUNT_FLINK", "COUNT_WITH_RESET_FLINK"
_MAX_MINUTES = 10 * 366 * 24 * 60
# The faults of the aggregates there; sum is right.
_FAULTS = {
    "avg": "AVG fails at the first event, since its sum is never set",
    "max": "MAX fails at 0 and below",
}


def read_rules(files: Iterable[RuleFile]) -> list[Detection | Unread]:
    """Reads the rules of files, in order. Of several with one ruleId the last counts, as there."""
    given = [(rule, file, at + 1) for file in files for at, rule in enumerate(_read_file(file))]
    last = {str(rule.get("ruleId")): at for at, (rule, _, _) in enumerate(given) if isinstance(rule, Mapping)}
    resetting = {_list_keys(rule) for rule, _, _ in given if _is_resetting(rule)}
    found: list[Detection | Unread] = []
    for at, (rule, file, place) in enumerate(given):
        id_ = str(rule.get("ruleId", "")) if isinstance(rule, Mapping) else ""
        origin = Origin(FORMAT, str(file.path), place, file.below, title=_name_rule(rule), id=id_)
        found.append(_try_to_read(rule, origin, resetting, is_last=last.get(id_, at) == at))
    return found


def _read_file(file: RuleFile) -> list[Mapping[str, Any] | Refusal]:
    try:
        return [_parse(rule) for rule in read_json_rules(file)]
    except SetupError as error:
        return [Refusal("file", str(error))]


def _try_to_read(
    rule: Mapping[str, Any] | Refusal, origin: Origin, resetting: set[tuple[str, ...]], *, is_last: bool
) -> Detection | Unread:
    try:
        if isinstance(rule, Refusal):
            raise rule
        if not is_last:
            raise Refusal("duplicate", f"a later rule has the ruleId {origin.id}, and takes its place there")
        return _read_rule(rule, origin, resetting)
    except Refusal as refusal:
        return Unread(origin, (refusal.reason,))


def _parse(rule: Any) -> Mapping[str, Any] | Refusal:
    """Returns a rule as a mapping; a line is divided as the demo does."""
    if isinstance(rule, Mapping):
        return rule
    parts = str(rule).split(",")
    if len(parts) != len(_NAMES):
        return Refusal("engine", f"neither an object nor {len(_NAMES)} parts with commas between them: {rule!r:.100}")
    values: dict[str, Any] = dict(zip(_NAMES, (part.strip().strip("()") for part in parts), strict=True))
    lists = {name: [each for each in values[name].split("&") if each] for name in ("groupingKeyNames", "unique")}
    upper = {name: values[name].upper() for name in ("ruleState", "aggregatorFunctionType")}
    return {**values, **lists, **upper}


def _list_keys(rule: Mapping[str, Any] | Refusal) -> tuple[str, ...]:
    keys = rule.get("groupingKeyNames") if isinstance(rule, Mapping) else None
    return tuple(map(str, keys)) if isinstance(keys, list) else ()


def _is_resetting(rule: Mapping[str, Any] | Refusal) -> bool:
    return isinstance(rule, Mapping) and rule.get("aggregateFieldName") == _COUNT_WITH_RESET


def _name_rule(rule: Mapping[str, Any] | Refusal) -> str:
    if isinstance(rule, Refusal) or "aggregateFieldName" not in rule:
        return ""
    by = " ".join(_list_keys(rule))
    return f"{rule.get('aggregatorFunctionType')} {rule['aggregateFieldName']}{by and f' by {by}'}"


def _read_rule(rule: Mapping[str, Any], origin: Origin, resetting: set[tuple[str, ...]]) -> Detection:
    if rule.get("ruleState") in ("CONTROL", "DELETE"):
        raise Refusal("command", f"it is the command {rule.get('controlType') or 'DELETE'}")
    if rule.get("ruleState") not in ("ACTIVE", "PAUSE"):
        raise Refusal("engine", f"ruleState is {rule.get('ruleState')!r:.60}")
    aggregate = _read_choice(rule, "aggregatorFunctionType", _AGGREGATES)
    operator = _read_choice(rule, "limitOperatorType", _OPERATORS)
    field, keys = str(rule.get("aggregateFieldName") or ""), _list_keys(rule)
    counts = field in (_COUNT, _COUNT_WITH_RESET)
    if counts and aggregate != "sum":
        raise Refusal("unsupported", f"{rule['aggregatorFunctionType']} of {field}, which is 1 for each event")
    minutes = _read_number(rule, "windowMinutes")
    if minutes != int(minutes) or not 0 < minutes <= _MAX_MINUTES:
        raise Refusal("engine", f"windowMinutes is {rule.get('windowMinutes')!r:.60}")
    shape = Measured(
        (And(()),),
        tuple(Key(key, (key,)) for key in keys),
        int(minutes) * 60,
        "count" if counts else aggregate,
        operator,
        f"{_read_number(rule, 'limit'):f}",
        () if counts else (field,),
        resets=field == _COUNT_WITH_RESET,
    )
    return Detection(origin, shape, tuple(_list_losses(rule, shape, keys in resetting)))


def _list_losses(rule: Mapping[str, Any], shape: Measured, shares_reset: bool) -> list[Reason]:
    """Returns what the demo does otherwise than its rule says."""
    faults = [_FAULTS[shape.aggregate]] if shape.aggregate in _FAULTS else []
    if rule.get("unique"):
        faults.append(f"unique ({', '.join(map(str, rule['unique']))}) is never read")
    if shape.resets:
        faults.append("a reset also empties the windows of other rules of the same key")
    elif shares_reset:
        faults.append("a rule of the same key that resets empties the window of this one too")
    losses = [Reason("there", "; ".join(faults))] if faults else []
    return [*losses, Reason("paused")] if rule["ruleState"] == "PAUSE" else losses


def _read_choice(rule: Mapping[str, Any], name: str, known: Mapping[str, str]) -> str:
    value = rule.get(name)
    if not isinstance(value, str) or value not in known:
        raise Refusal("engine", f"{name} is {value!r:.60}")
    return known[value]


def _read_number(rule: Mapping[str, Any], name: str) -> Decimal:
    """Reads a number, which may be a text there."""
    value = rule.get(name)
    try:
        number = Decimal(str(value)) if not isinstance(value, bool) else Decimal("NaN")
    except InvalidOperation:
        number = Decimal("NaN")
    if not number.is_finite() or abs(number) >= 10**18:
        raise Refusal("engine", f"{name} is {value!r:.60}")
    return number
