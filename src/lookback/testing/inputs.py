"""Reads what people give to the harness and to a replay: streams, rules and lists."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lookback.config import load_stream
from lookback.core.engine.schedule import Warmed
from lookback.core.engine.warming import find_reason_cold
from lookback.core.errors import EventError, Problem, RuleError, show_value
from lookback.core.rules.changes import RuleChange
from lookback.core.rules.commands import LISTS
from lookback.core.rules.compilecache import RuleCompiler
from lookback.core.rules.compiled import CompiledRule
from lookback.core.rules.compiling import compile_rule
from lookback.core.rules.document import STATUSES, Rule
from lookback.core.rules.problems import quote_value
from lookback.core.rules.versions import WARM, Piece
from lookback.core.streams.declaration import Stream
from lookback.core.values.contents import read_contents, set_contents
from lookback.core.values.limits import is_too_deep
from lookback.core.values.listchanges import ListChange
from lookback.core.values.lists import KnownLists, Lists


def read_lists(lists: Any) -> tuple[KnownLists, list[tuple[int | None, RuleChange]]]:
    """Reads the lists of a replay: their contents by commit, and their changes, which precede those of rules."""
    pairs = [(lists, None)] if isinstance(lists, (Mapping, Lists)) else list(lists)
    known, changes = Lists.empty(), list[tuple[int | None, RuleChange]]()
    versions: dict[int, Lists] = {}
    for at, pair in enumerate(pairs):
        if not isinstance(pair, tuple) or len(pair) != 2 or not (pair[1] is None or _is_whole(pair[1])):
            raise EventError(
                f"lists[{at}]: must be a pair of contents and the arrival from which they apply, got {show_value(pair)}"
            )
        contents, arrival = pair
        if isinstance(contents, Lists):
            known = contents
        else:
            known = set_contents(known, require_contents(contents, f"lists[{at}]"), at + 1)
        versions[at + 1] = known
        change = RuleChange("insert", at - len(pairs), "*", at + 1, LISTS, json.dumps({"commit": at + 1}))
        changes.append((None if arrival is None else int(arrival), change))
    return KnownLists(versions), changes


def require_contents(contents: object, place: str) -> dict[str, list[ListChange]]:
    """Reads the contents of lists. Raises EventError with all problems."""
    rows, problems = read_contents(contents, place)
    if problems:
        raise EventError("\n".join(str(problem) for problem in problems))
    return rows


def load_any_stream(stream: Stream | Mapping[str, Any] | str | Path) -> Stream:
    """Returns a stream from itself, its document, or the path of its YAML."""
    if isinstance(stream, Stream):
        return stream
    if isinstance(stream, (str, Path)):
        return load_stream(Path(stream))
    return Stream.from_dict(stream)


def _refuse(place: str, message: str, rule_id: str | None = None) -> RuleError:
    return RuleError(rule_id or "?", [Problem(place, message)])


def read_changes(rules: Any, stream: Stream) -> tuple[list[tuple[int | None, RuleChange]], list[Warmed]]:
    """Reads the rules of a replay: changes with their activation arrivals, and warm starts. Raises RuleError."""
    if isinstance(rules, (str, bytes, Mapping, Rule)) or not isinstance(rules, Iterable):
        raise _refuse("rules", f"must be a list of rules, got {show_value(rules)}; put one rule into a list")
    changes, warmed = list[tuple[int | None, RuleChange]](), list[Warmed]()
    compiler = RuleCompiler({stream.name: stream})
    for at, rule in enumerate(rules):
        is_warm = isinstance(rule, tuple) and len(rule) == 3
        arrival, change = _read_change(rule[:2] if is_warm else rule, at, stream, compiler)
        if is_warm:
            version = _read_warmed(rule[2], arrival, change, at, stream)
            piece = Piece(version.rule_id, version.version, version.arrival, 1, 1)
            ending = RuleChange("insert", at, "*", None, WARM, piece.to_document(stream.name), warms=True)
            changes += [(arrival, replace(change, warms=True)), (version.arrival, ending)]
            warmed.append(version)
        else:
            changes.append((arrival, change))
    return changes, warmed


def _read_warmed(active_from: Any, arrival: int | None, change: RuleChange, at: int, stream: Stream) -> Warmed:
    """Reads the warm start of a row. Raises RuleError."""
    name, place = change.rule_id, f"rules[{at}]"
    if not _is_whole(active_from) or (arrival is not None and active_from < arrival):
        message = (
            "must be the last commit judged before the version comes into force, not before its arrival, got "
            f"{show_value(active_from)}"
        )
        raise _refuse(f"{place}.active_from", message, name)
    if change.version is None or change.document is None or change.rule_id is None or change.status is None:
        raise _refuse(place, "a row with a warm start has rule_id, version, status and document", name)
    reason = find_reason_cold(compile_rule(json.loads(change.document), stream))
    if reason is not None:
        raise _refuse(place, f"starts cold: {reason}; leave the third part out", name)
    return Warmed(int(active_from), change.rule_id, change.version, change.status, change.document)


def _read_change(rule: Any, at: int, stream: Stream, compiler: RuleCompiler) -> tuple[int | None, RuleChange]:
    place = f"rules[{at}]"
    if not isinstance(rule, tuple):
        rule_id, text = check_rule(rule, stream, place, compiler)
        return None, RuleChange("insert", at, rule_id, 1, "active", text)
    if len(rule) != 2 or not isinstance(rule[0], Mapping):
        raise _refuse(
            place, f"must be a rule, or a pair of a row of the rules table and its arrival, got {show_value(rule)}"
        )
    row, arrival = rule
    rule_id, document = row.get("rule_id"), row.get("document")
    # The rulebook rejects values that a row of the table can have, such as NULL, as it does in the stream.
    if not (rule_id is None or isinstance(rule_id, str)):
        raise _refuse(f"{place}.rule_id", f"must be the rule's name, a text, got {show_value(rule_id)}")
    name = rule_id or "?"
    if isinstance(document, Mapping):
        document = _write_json(name, document)
    elif document is not None and not isinstance(document, str):
        raise _refuse(f"{place}.document", f"must be a mapping, its JSON, or None, got {show_value(document)}", name)
    version, status = read_version(name, row.get("version"), f"{place}.version"), row.get("status", "active")
    if status is not None:
        require_status(name, status, f"{place}.status")
    if arrival is not None and not _is_whole(arrival):
        message = f"must be the number of the last commit judged before the change, got {show_value(arrival)}"
        raise _refuse(f"{place}.arrival", f"{message}; give None for a change before the first commit", name)
    change = RuleChange("insert", at, rule_id, version, status, document, row.get("evidence"))
    return None if arrival is None else int(arrival), change


def check_rule(rule: Any, stream: Stream, place: str = "", compiler: RuleCompiler | None = None) -> tuple[str, str]:
    """Returns a valid rule's id and its document as JSON. Raises RuleError with all problems."""
    document = rule.document if isinstance(rule, Rule) else rule
    if not isinstance(document, Mapping):
        hint = "; read YAML with lookback.config.load_rule_document(path)" if isinstance(rule, (str, Path)) else ""
        raise _refuse(place, f"a rule is its document, a mapping, or a lookback Rule; got {quote_value(rule)}{hint}")
    document = dict(document)
    if not is_too_deep(document) and (odd := next(_find_odd_values(document), None)):
        raise _refuse(*odd, str(document.get("rule_id"))[:100])
    if (known := _compile_as_stored(document, stream, compiler)) is not None:
        return known
    rule_id = compile_rule(document, stream).spec.rule_id
    return rule_id, _write_json(rule_id, document)


def _compile_as_stored(
    document: Mapping[str, Any], stream: Stream, compiler: RuleCompiler | None
) -> tuple[str, str] | None:
    """Compiles the JSON of a document as the evaluator will, which finds it compiled then.

    Returns None if the document is wrong, or is not the same as its JSON, such as one with dates.
    """
    try:
        text = json.dumps(document)
        if json.loads(text) != document:
            return None
    except (TypeError, ValueError, RecursionError):
        return None
    compiler = compiler or RuleCompiler({stream.name: stream})
    compiled = compiler.compile_document(stream.name, text)
    return (compiled.spec.rule_id, text) if isinstance(compiled, CompiledRule) else None


def _write_json(rule_id: str, document: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(document), default=str)
    except (TypeError, ValueError, RecursionError) as error:
        message = f"cannot be written as JSON ({error}); use texts, numbers, lists and mappings"
        raise _refuse("", message, rule_id) from None


def _find_odd_values(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Yields (place, message) of each value with an unsupported type; some types break comparisons."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _find_odd_values(item, f"{place}.{key}" if place else f"{key}")
    elif isinstance(value, (list, tuple)):
        for at, item in enumerate(value):
            yield from _find_odd_values(item, f"{place}[{at}]")
    elif type(value).__module__ not in _PLAIN_MODULES or isinstance(value, type(...)):
        yield place, f"is of type {type(value).__name__}; give a text, a number, true, false, a list, a mapping or None"


_PLAIN_MODULES = ("builtins", "datetime", "decimal", "pathlib")


def read_version(rule_id: str, version: Any, place: str = "version") -> int | None:
    """Reads the number of a version; None for the next one. Raises RuleError."""
    if version is None:
        return None
    if not _is_whole(version):
        message = f"must be a whole number, such as 2, or None for the next one, got {show_value(version)}"
        raise _refuse(place, message, rule_id)
    return int(version)


def require_status(rule_id: str, status: Any, place: str = "status") -> None:
    """Checks that a status is a text. Raises RuleError."""
    if not isinstance(status, str):
        raise _refuse(place, f"must be one of {', '.join(STATUSES)}, got {show_value(status)}", rule_id)


def _is_whole(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and -(2**63) <= int(value) < 2**63
