"""Reads what a rule of Elastic looks for: its kind, its query and filters, and when the engine looks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lookback.importing.conditions import And, Condition, Listed, Not, Or
from lookback.importing.detections import Chain, Counted, Key, Measured, Shape, Single, Suppression
from lookback.importing.elasticfilters import read_filters
from lookback.importing.eql import read_eql
from lookback.importing.kql import read_kql
from lookback.importing.lucene import read_lucene
from lookback.importing.reasons import Refusal
from lookback.importing.rulefiles import name_slug
from lookback.importing.terms import Terms

_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_SPAN = re.compile(r"(?:now-)?(\d+)([smhdw])(?:/[a-zA-Z])?")
_FROM, _INTERVAL = "now-6m", "5m"


@dataclass(frozen=True)
class Schedule:
    """When the engine looks, and how far back. is_kept: Whether windows are to be those of its runs."""

    interval: int
    lookback: int
    is_kept: bool

    @classmethod
    def read(cls, rule: Mapping[str, Any], is_kept: bool) -> Schedule:
        """Reads `interval` and `from`. Raises Refusal for a time that is not understood."""
        if rule.get("to") not in (None, "now"):
            raise Refusal("unsupported", f"it looks at events up to {rule['to']}, not up to now")
        return cls(_read_span(rule.get("interval", _INTERVAL)), _read_span(rule.get("from", _FROM)), is_kept)


def read_shape(rule: Mapping[str, Any], schedule: Schedule, terms: Terms) -> Shape:
    """Reads the kind of a rule with all that belongs to it. Raises Refusal."""
    kind = str(rule.get("type"))
    if kind in _REFUSED or kind not in _KINDS:
        raise Refusal(*_REFUSED.get(kind, ("unsupported", f"a rule of the type {kind!r:.60}")))
    if schedule.lookback < schedule.interval:
        terms.lose(
            "schedule", f"of each {_show(schedule.interval)} only the last {_show(schedule.lookback)} are looked at"
        )
    shape = _KINDS[kind](rule, schedule, terms)
    suppression = rule.get("alert_suppression")
    if not suppression:
        return shape
    if not isinstance(shape, Single):
        terms.lose("suppression", "of alerts of several events")
        return shape
    return replace(shape, suppression=_read_suppression(suppression, schedule, terms))


def _read_query(rule: Mapping[str, Any], terms: Terms) -> Condition:
    """Reads the query of one event with its filters."""
    language, query = str(rule.get("language", "kuery")), str(rule.get("query") or "")
    if language not in _LANGUAGES:
        raise Refusal("unsupported", f"a query in the language {language!r:.60}")
    return _add_filters(_LANGUAGES[language](query, terms), rule, terms)


def _add_filters(condition: Condition, rule: Mapping[str, Any], terms: Terms) -> Condition:
    filters = read_filters(rule.get("filters") or [], terms)
    return And((condition, *filters)) if filters else condition


def _read_single(rule: Mapping[str, Any], _: Schedule, terms: Terms) -> Shape:
    return Single(_read_query(rule, terms))


def _read_eql(rule: Mapping[str, Any], schedule: Schedule, terms: Terms) -> Shape:
    category = str(rule.get("event_category_override") or "event.category")
    found = read_eql(str(rule.get("query") or ""), terms, category)
    if not isinstance(found, Chain):
        return Single(_add_filters(found, rule, terms))
    if rule.get("filters"):
        raise Refusal("filter", "it stands beside a sequence; write its condition into each step")
    microseconds = schedule.lookback * 1_000_000
    if not found.microseconds:
        terms.lose("schedule", f"it has no maxspan, and a run sees {_show(schedule.lookback)}")
        return replace(found, microseconds=microseconds)
    if found.microseconds > microseconds - schedule.interval * 1_000_000:
        terms.lose(
            "schedule",
            f"maxspan is longer than what each run of {_show(schedule.interval)} surely sees, {_show(schedule.lookback)}",
        )
    return found


def _read_threshold(rule: Mapping[str, Any], schedule: Schedule, terms: Terms) -> Shape:
    threshold = rule["threshold"]
    field, cardinality = threshold.get("field") or [], threshold.get("cardinality") or []
    fields = tuple(map(str, field)) if isinstance(field, list) else (str(field),)
    if len(cardinality) > 1:
        raise Refusal("unsupported", "different values of several fields")
    distinct = (str(cardinality[0]["field"]), int(cardinality[0]["value"])) if cardinality else None
    slide = schedule.interval if schedule.is_kept else 0
    span = f"{_show(schedule.lookback)} every {_show(schedule.interval)}"
    if schedule.is_kept:
        terms.lose("phase", f"it counts the last {span}")
    else:
        terms.lose("schedule", f"it counts the last {span}, not at each event")
    condition = _read_query(rule, terms)
    return Counted(condition, fields, schedule.lookback, int(threshold["value"]), distinct, slide)


def _read_new_terms(rule: Mapping[str, Any], _: Schedule, terms: Terms) -> Shape:
    """Reads values that no event had before: the first event of its key in the history."""
    named = rule.get("new_terms") or {}
    fields = named["value"] if named else rule["new_terms_fields"]
    start = named["history_window_start"][0]["value"] if named else rule["history_window_start"]
    condition = And((_read_query(rule, terms), *(terms.exists(str(name)) for name in fields)))
    keys = tuple(Key(str(name), (str(name),)) for name in fields)
    return Measured((condition,), keys, _read_span(start), "count", "=", "1")


def _read_indicators(rule: Mapping[str, Any], _: Schedule, terms: Terms) -> Shape:
    """Reads events that have what an indicator has; the indicators are lists, one for each of their fields."""
    groups = []
    for mapping in rule["threat_mapping"]:
        entries = [_read_entry(each, terms) for each in mapping["entries"]]
        if len(entries) > 1:
            raise Refusal("indicators", "several values must be those of one indicator")
        groups += entries
    return Single(And((_read_query(rule, terms), Or(tuple(groups)))))


def _read_entry(entry: Mapping[str, Any], terms: Terms) -> Condition:
    name = name_slug(str(entry["value"]))
    terms.lose("list", name)
    found = Listed(str(entry["field"]), name, is_cased=True)
    return Not(found) if entry.get("negate") else found


def _read_suppression(suppression: Mapping[str, Any], schedule: Schedule, terms: Terms) -> Suppression:
    fields = tuple(map(str, suppression["group_by"]))
    duration, joins = suppression.get("duration"), suppression.get("missing_fields_strategy") != "doNotSuppress"
    if duration is None:
        terms.lose("schedule", "each run alerts once")
        return Suppression(fields, schedule.interval, joins)
    return Suppression(fields, int(duration["value"]) * _SECONDS[duration["unit"]], joins)


def _read_span(text: Any) -> int:
    """Reads a time such as now-9m, or a duration, as seconds."""
    found = _SPAN.fullmatch(str(text))
    if found is None or not int(found[1]):
        raise Refusal("unsupported", f"the time {text!r:.60}")
    return int(found[1]) * _SECONDS[found[2]]


def _show(seconds: int) -> str:
    unit = next(unit for unit in ("d", "h", "m", "s") if seconds % _SECONDS[unit] == 0)
    return f"{seconds // _SECONDS[unit]}{unit}"


_LANGUAGES: dict[str, Callable[[str, Terms], Condition]] = {"kuery": read_kql, "lucene": read_lucene}
_REFUSED = {
    "esql": ("esql", "its query is in ES|QL"),
    "machine_learning": ("machine-learning", "it asks a job of Elastic's machine learning"),
}
_KINDS: dict[str, Callable[[Mapping[str, Any], Schedule, Terms], Shape]] = {
    "eql": _read_eql,
    "new_terms": _read_new_terms,
    "query": _read_single,
    "threat_match": _read_indicators,
    "threshold": _read_threshold,
}
