"""The slow, obvious evaluator: keeps every event, takes them one at a time, rescans for every window.

It is the truth that the engine is compared with. Of the engine it uses only what is tested elsewhere: documents,
expressions (against Spark) and the identity of alerts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from decimal import ROUND_HALF_UP, Decimal, localcontext
from fractions import Fraction
from typing import Any

import numpy as np

from lookback.core.alerts import alert_id, moment
from lookback.core.columns import Column, from_values, text_of
from lookback.core.compiled import CompiledRule, Feature, compile_rule
from lookback.core.expressions import Expression
from lookback.core.streams import Stream
from lookback.core.types import BOOLEAN

ERROR = object()


@dataclass
class OracleEvent:
    """One event: stored values by field, the commit that brought it, and its id in the order that ids compare in."""

    values: dict[str, Any]
    commit: int
    time: int
    id_key: Any


@dataclass
class _FeatureLog:
    since: int | None
    floor: int | None = None
    width: int = 0
    rows: list[tuple[Any, int, Any]] = field(default_factory=list)


@dataclass
class _Rule:
    compiled: CompiledRule
    version: int
    status: str


class Oracle:
    """Rules and events in, (alert id, verdict, texts of measures, complete, arrival) out."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.rules: dict[str, _Rule] = {}
        self.features: dict[str, _FeatureLog] = {}
        self.high: int | None = None
        self.alerts: list[tuple[Any, ...]] = []
        self.late: list[tuple[Any, ...]] = []
        self.failed: dict[tuple[str, int], int] = {}
        self.raised: dict[tuple[str, Any], int] = {}

    def change(self, document: dict[str, Any], version: int, status: str) -> None:
        """A rule change between two commits."""
        self.rules[document["rule_id"]] = _Rule(compile_rule(document, self.stream), version, status)

    def run(self, events: list[OracleEvent]) -> None:
        """Judges events; each commit is complete."""
        for rule in self._in_force():
            for measure in rule.compiled.measures:
                log = self.features.setdefault(measure.feature.feature_id, _FeatureLog(self.high))
                log.width = 0
        for rule in self._in_force():
            for measure in rule.compiled.measures:
                log = self.features[measure.feature.feature_id]
                width = measure.window.size + measure.window.delay + rule.compiled.allowed_lateness
                log.width = max(log.width, width)
        for commit in sorted({event.commit for event in events}):
            here = [event for event in events if event.commit == commit]
            watermark = None if self.high is None else self.high - self.stream.max_out_of_orderness
            for event in sorted(here, key=lambda e: (e.time, e.id_key)):
                self._event(event, watermark)
            self.high = max([event.time for event in here] + ([] if self.high is None else [self.high]))
            self._after_commit()

    def _in_force(self) -> list[_Rule]:
        return [rule for _, rule in sorted(self.rules.items()) if rule.status in ("active", "shadow", "paused")]

    def _after_commit(self) -> None:
        used = {m.feature.feature_id for rule in self._in_force() for m in rule.compiled.measures}
        for feature_id in [each for each in self.features if each not in used]:
            del self.features[feature_id]
        assert self.high is not None
        for log in self.features.values():
            floor = self.high - self.stream.max_out_of_orderness - log.width
            log.floor = floor if log.floor is None else max(log.floor, floor)

    def _event(self, event: OracleEvent, watermark: int | None) -> None:
        actions = []
        fed: set[str] = set()
        for rule in self._in_force():
            self._feed(rule, event, watermark, fed)
        for rule in self._in_force():
            where = self._value(rule.compiled.where, event, True)
            taken = watermark is None or event.time >= watermark - rule.compiled.allowed_lateness
            late = watermark is not None and event.time < watermark
            if where is ERROR and taken and rule.status in ("active", "shadow"):
                self._fail(rule)
            if where is not True:
                continue
            judged = taken and self._judges(rule, event, late)
            actions.append("evaluated" if judged else "recorded" if taken else "discarded")
            if judged:
                self._judge(rule, event)
        if watermark is not None and event.time < watermark and actions:
            best = min(actions, key=["evaluated", "recorded", "discarded"].index)
            self.late.append((event.values[self.stream.event_id], event.commit, watermark - event.time, best))

    def _judges(self, rule: _Rule, event: OracleEvent, late: bool) -> bool:
        spec = rule.compiled.rule
        if rule.status not in ("active", "shadow") or (late and spec.late == "record"):
            return False
        if spec.effective_from is not None and event.time < spec.effective_from:
            return False
        return spec.effective_until is None or event.time <= spec.effective_until

    def _feed(self, rule: _Rule, event: OracleEvent, watermark: int | None, fed: set[str]) -> None:
        for feature in rule.compiled.features:
            if feature.feature_id in fed:
                continue
            fed.add(feature.feature_id)
            if watermark is not None and event.time < watermark - feature.allowed_lateness:
                continue
            if (
                self._value(feature.where, event, True) is not True
                or self._value(feature.filter, event, True) is not True
            ):
                continue
            value = self._value(feature.argument, event, 0)
            if value is None or value is ERROR:
                continue
            self.features[feature.feature_id].rows.append((self._key(feature.group_by, event), event.time, value))

    def _judge(self, rule: _Rule, event: OracleEvent) -> None:
        compiled = rule.compiled
        columns: dict[str, Column] = {
            name: from_values(t, [event.values[name]]) for name, t in self.stream.fields.items()
        }
        complete, spoiled = True, False
        for measure in compiled.measures:
            log = self.features[measure.feature.feature_id]
            last = event.time - measure.window.delay
            first = last - measure.window.size
            bounds = [bound for bound in (log.floor, log.since) if bound is not None]
            complete = complete and all(first >= bound for bound in bounds)
            key = self._key(compiled.group_by, event)
            low = first if log.floor is None else max(first, log.floor)
            values = [value for k, time, value in log.rows if k == key and low <= time <= last]
            column = self._aggregate(measure.feature, values)
            spoiled = spoiled or column.error is not None
            for part in (measure.feature.filter, measure.feature.argument):
                spoiled = spoiled or self._value(part, event, 0) is ERROR
            columns[measure.name] = column
        columns["window_complete"] = from_values(BOOLEAN, [complete])
        when = compiled.when.evaluate(columns, 1)
        if spoiled or (when.error is not None and when.error[0]):
            self._fail(rule)
        elif when.is_true()[0]:
            self._alert(rule, event, columns, complete)

    def _alert(self, rule: _Rule, event: OracleEvent, columns: dict[str, Column], complete: bool) -> None:
        compiled, rule_id = rule.compiled, rule.compiled.rule.rule_id
        fields = self.stream.fields
        key = {name: text_of(from_values(fields[name], [event.values[name]]).item(0)) for name in compiled.group_by}
        verdict = "raised"
        span = compiled.rule.suppress
        if span is not None:
            slot = (rule_id, tuple(sorted(key.items())))
            if slot in self.raised and event.time <= self.raised[slot] + span:
                verdict = "suppressed"
            else:
                self.raised[slot] = event.time
        measures = {m.name: text_of(columns[m.name].item(0)) for m in compiled.measures}
        event_id = str(event.values[self.stream.event_id])
        self.alerts.append(
            (alert_id(rule_id, rule.version, key, event_id), rule_id, rule.version, rule.status, verdict, event_id,
             moment(event.time), tuple(sorted(measures.items())), complete, event.commit)
        )  # fmt: skip

    def _fail(self, rule: _Rule) -> None:
        slot = (rule.compiled.rule.rule_id, rule.version)
        self.failed[slot] = self.failed.get(slot, 0) + 1

    def _key(self, group_by: tuple[str, ...], event: OracleEvent) -> tuple[Any, ...]:
        return tuple(event.values[name] for name in group_by)

    def _value(self, expression: Expression | None, event: OracleEvent, default: Any) -> Any:
        if expression is None:
            return default
        columns = {name: from_values(self.stream.fields[name], [event.values[name]]) for name in expression.fields}
        column = expression.evaluate(columns, 1)
        if column.error is not None and column.error[0]:
            return ERROR
        if column.null is not None and column.null[0]:
            return None
        value = column.values[0]
        return value.item() if isinstance(value, np.generic) else value

    def _aggregate(self, feature: Feature, values: list[Any]) -> Column:
        type_ = feature.aggregate.result_type(feature.argument_type)
        result = _FUNCTIONS[feature.function](values, feature)
        if type_.is_decimal and result is not None and abs(result) >= 10**type_.precision:
            return Column(type_, from_values(type_, [0]).values, None, np.array([True]))
        if type_.name == "bigint" and result is not None and not -(2**63) <= result < 2**63:
            return Column(type_, np.zeros(1, dtype=np.int64), None, np.array([True]))
        return from_values(type_, [result])


def _avg(values: list[Any], feature: Feature) -> Any:
    if not values:
        return None
    argument = feature.argument_type
    assert argument is not None
    if not argument.is_decimal:
        return float(Fraction(sum(values), len(values)))
    digits = min(38, argument.scale + 4) - argument.scale
    with localcontext() as context:
        context.prec = 200
        mean = Decimal(sum(values)).scaleb(digits) / len(values)
        return int(mean.quantize(Decimal(1), ROUND_HALF_UP))


def _stddev(values: list[Any], feature: Feature) -> Any:
    if len(values) < 2:
        return None
    assert feature.argument_type is not None
    exact = [Fraction(value, 10**feature.argument_type.scale) for value in values]
    mean = sum(exact) / len(exact)
    variance = sum((value - mean) ** 2 for value in exact) / (len(exact) - 1)
    with localcontext() as context:
        context.prec = 120
        return float((Decimal(variance.numerator) / Decimal(variance.denominator)).sqrt()) if variance else 0.0


def _number(value: Any) -> Any:
    return (math.isnan(value), value) if isinstance(value, float) else value


_FUNCTIONS = {
    "count": lambda values, feature: len(values),
    "sum": lambda values, feature: sum(values) if values else None,
    "avg": _avg,
    "min": lambda values, feature: min(values, key=_number) if values else None,
    "max": lambda values, feature: max(values, key=_number) if values else None,
    "stddev_samp": _stddev,
}
