"""Reads the filters of a rule, which Kibana writes in Elasticsearch's query DSL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lookback.importing.conditions import And, Condition, Not, Or, Wildcard
from lookback.importing.reasons import Refusal
from lookback.importing.terms import Terms, make_escaped_pattern

_RANGES = {"gt": ">", "gte": ">=", "lt": "<", "lte": "<="}


def read_filters(filters: Sequence[Mapping[str, Any]], terms: Terms) -> tuple[Condition, ...]:
    """Reads the filters that are not disabled; all must hold. Raises Refusal."""
    found = []
    for each in filters:
        meta = each.get("meta") or {}
        if meta.get("disabled"):
            continue
        query = each.get("query") or {key: each[key] for key in ("exists", "range") if key in each}
        condition = _read_query(query, terms)
        found.append(Not(condition) if meta.get("negate") else condition)
    return tuple(found)


def _read_query(query: Mapping[str, Any], terms: Terms) -> Condition:
    if len(query) != 1:
        raise Refusal("filter", f"{query}"[:200])
    ((kind, body),) = query.items()
    if kind == "bool":
        return _read_bool(body, terms)
    if kind == "exists":
        return terms.exists(str(body["field"]))
    if kind == "match_all":
        return And(())
    if kind not in ("match_phrase", "term", "terms", "wildcard", "prefix", "range") or len(body) != 1:
        raise Refusal("filter", f"{query}"[:200])
    ((field, value),) = body.items()
    if kind == "range":
        return And(tuple(_read_bound(field, key, each, terms) for key, each in value.items()))
    if kind == "terms":
        return Or(tuple(terms.equals(field, _as_text(each)) for each in value))
    options = value if isinstance(value, dict) else {}
    text = _as_text(next((options[key] for key in ("value", "query", "wildcard") if key in options), value))
    is_cased = not options.get("case_insensitive")
    if kind == "wildcard":
        return terms.fits(field, make_escaped_pattern(text), is_cased=is_cased)
    if kind == "prefix":
        return terms.fits(field, (text, Wildcard.ANY), is_cased=is_cased)
    return terms.equals(field, text, is_cased=is_cased)


def _read_bool(body: Mapping[str, Any], terms: Terms) -> Condition:
    parts = {key: _as_list(body[key]) for key in ("must", "filter", "should", "must_not") if key in body}
    if set(body) - set(parts) - {"minimum_should_match"} or body.get("minimum_should_match", 1) not in (1, "1"):
        raise Refusal("filter", f"{body}"[:200])
    read = {key: tuple(_read_query(each, terms) for each in values) for key, values in parts.items()}
    all_parts = [*read.get("must", ()), *read.get("filter", ()), *map(Not, read.get("must_not", ()))]
    # With other clauses, `should` requires nothing.
    if read.get("should") and (not all_parts or "minimum_should_match" in body):
        all_parts.append(Or(read["should"]))
    return And(tuple(all_parts))


def _read_bound(field: str, key: str, value: Any, terms: Terms) -> Condition:
    if key not in _RANGES:
        raise Refusal("filter", f"{key} in the range of {field}")
    return terms.compares(field, _RANGES[key], _as_text(value))


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _as_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
