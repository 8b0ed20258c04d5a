"""Reads Elastic's detection rules: TOML files of its repository, and the NDJSON that Kibana exports."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from lookback.core.errors import SetupError
from lookback.importing.conditions import And, Condition, Given, Not, Or, Test
from lookback.importing.detections import Counted, Detection, Measured, Origin, Shape, Single, Unread, list_fields_read
from lookback.importing.documents import MAX_FILE_BYTES
from lookback.importing.elasticshapes import Schedule, read_shape
from lookback.importing.fields import name_column
from lookback.importing.reasons import Reason, Refusal
from lookback.importing.rulefiles import RuleFile
from lookback.importing.terms import Terms

FORMAT = "elastic"
TOML, NDJSON = ".toml", ".ndjson"
# A longer guide is better read where it comes from.
_MAX_RUNBOOK_CHARACTERS = 2_000
# The fields that the Elastic Common Schema declares as arrays, as far as rules read them.
ARRAYS = frozenset({
    "dns.answers.data", "dns.resolved_ip", "event.category", "event.type", "file.attributes", "host.ip", "host.mac",
    "process.args", "process.env_vars", "process.parent.args", "registry.data.strings", "related.hash", "related.hosts",
    "related.ip", "related.user", "tags",
})  # fmt: skip


@dataclass(frozen=True)
class _Read:
    """A rule as it is written. rule: what `[rule]` of TOML, or an object of NDJSON, has."""

    file: RuleFile
    place: int
    rule: Mapping[str, Any]


def read_rules(
    files: Iterable[RuleFile], *, is_scheduled: bool = False, known: Iterable[str] = ()
) -> list[Detection | Unread]:
    """Reads the rules of files, in order. A rule or a file that is wrong costs only itself.

    Args:
        files: TOML or NDJSON.
        is_scheduled: Whether windows are to be those of the engine's runs, not those that end at each event.
        known: Fields of the stream, which names with `*` stand for, besides those of the rules.

    Raises:
        SetupError: For TOML in Python 3.10, which cannot read it.
    """
    found = [rule for file in files for rule in _read_file(file, is_scheduled)]
    read = [name for each in found if isinstance(each, Detection) for name in list_fields_read(each.shape)]
    names = {name_column(name): name for name in [*read, *known] if "*" not in name}
    return [_expand(each, list(names.values())) if isinstance(each, Detection) else each for each in found]


def _read_file(file: RuleFile, is_scheduled: bool) -> list[Detection | Unread]:
    try:
        return [_read_rule(each, is_scheduled) for each in _list_rules(file)]
    except Refusal as refusal:
        return [Unread(Origin(FORMAT, str(file.path), 1, file.below), (refusal.reason,))]


def _list_rules(file: RuleFile) -> Iterator[_Read]:
    """Lists the rules of a file. Raises Refusal if it cannot be read."""
    try:
        if file.path.stat().st_size > MAX_FILE_BYTES and file.path.suffix == TOML:
            raise Refusal("file", f"it is larger than {MAX_FILE_BYTES:,} bytes")
        text = file.path.read_text(encoding="utf-8-sig")
        if file.path.suffix == TOML:
            yield _Read(file, 1, _find_rule(_load_toml(text)))
            return
        for at, line in enumerate(text.splitlines()):
            rule = json.loads(line) if line.strip() else {}
            # The last line of an export counts, and exceptions have lines of their own.
            if isinstance(rule, dict) and "type" in rule and "rule_id" in rule:
                yield _Read(file, at + 1, rule)
    except (OSError, ValueError, RecursionError) as error:
        raise Refusal("file", f"{error}") from error


def _load_toml(text: str) -> Any:
    try:
        toml = importlib.import_module("tomllib")
    except ModuleNotFoundError as error:
        raise SetupError(
            "Elastic's TOML files need Python 3.11 or newer; use it, or export the rules from Kibana as NDJSON"
        ) from error
    return toml.loads(text)


def _find_rule(document: Any) -> Mapping[str, Any]:
    rule = document.get("rule")
    if not isinstance(rule, dict):
        raise Refusal("file", "it has no table [rule]")
    return rule


def _read_rule(read: _Read, is_scheduled: bool) -> Detection | Unread:
    rule, terms = read.rule, Terms()
    origin = _describe_origin(read)
    try:
        shape = read_shape(rule, Schedule.read(rule, is_scheduled), terms)
        if rule.get("exceptions_list"):
            terms.lose("exceptions", "it has lists of exceptions")
        return Detection(origin, shape, tuple(terms.losses))
    except Refusal as refusal:
        return Unread(origin, (refusal.reason,))
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, RecursionError) as error:
        # A hostile or unknown document.
        return Unread(origin, (Reason("elastic", f"{type(error).__name__}: {error}"),))


def _describe_origin(read: _Read) -> Origin:
    rule, file = read.rule, read.file
    severity = str(rule.get("severity") or "medium")
    note, score = str(rule.get("note") or "").strip(), rule.get("risk_score")
    index = rule.get("index")
    return Origin(
        FORMAT,
        str(file.path),
        read.place,
        file.below,
        title=str(rule.get("name") or ""),
        id=str(rule.get("rule_id") or ""),
        description=str(rule.get("description") or ""),
        author=", ".join(_list_texts(rule.get("author"))),
        license=str(rule.get("license") or ""),
        severity=severity if severity in ("low", "medium", "high", "critical") else "medium",
        tags=tuple(_list_techniques(rule.get("threat"))),
        references=_list_texts(rule.get("references")),
        logsource=str(index[0]) if isinstance(index, list) and index else "",
        runbook=note if len(note) <= _MAX_RUNBOOK_CHARACTERS else "",
        score=score if isinstance(score, int) and 0 <= score <= 100 else None,
        waits=False if rule.get("building_block_type") else None,
    )


def _list_texts(values: Any) -> tuple[str, ...]:
    return tuple(map(str, values)) if isinstance(values, list) else ()


def _list_techniques(threat: Any) -> Iterator[str]:
    """Lists the tactics and techniques of MITRE ATT&CK as tags, such as attack.t1110.003."""
    for entry in threat if isinstance(threat, list) else ():
        if not isinstance(entry, dict) or entry.get("framework") != "MITRE ATT&CK":
            continue
        if isinstance(tactic := entry.get("tactic"), dict):
            yield f"attack.{re.sub(r'[^a-z]+', '_', str(tactic.get('name')).lower())}"
        for technique in entry.get("technique") or ():
            yield f"attack.{str(technique.get('id')).lower()}"
            for part in technique.get("subtechnique") or ():
                yield f"attack.{str(part.get('id')).lower()}"


def _expand(detection: Detection, names: list[str]) -> Detection | Unread:
    """Replaces names with `*` by the fields that match them."""
    wild = [name for name in list_fields_read(detection.shape) if "*" in name]
    if not wild:
        return detection
    try:
        for name in wild:
            if not any(_is_named(each, name) for each in names):
                raise Refusal("unmapped-field", f"no field is named like {name!r:.100}")
        shape = _expand_shape(detection.shape, names)
    except Refusal as refusal:
        return Unread(detection.origin, (refusal.reason,))
    return replace(detection, shape=shape, losses=(*detection.losses, Reason("any-field", f"{wild[0]!r:.100}")))


def _is_named(name: str, pattern: str) -> bool:
    """Returns whether a field, or the column that it may have become, fits a name with `*`."""
    return any(fnmatchcase(name, each) for each in (pattern, re.sub(r"[^A-Za-z0-9_*]+", "_", pattern)))


def _expand_shape(shape: Shape, names: list[str]) -> Shape:
    if isinstance(shape, (Single, Counted)):
        return replace(shape, condition=_expand_condition(shape.condition, names))
    if isinstance(shape, Measured):
        return replace(shape, members=tuple(_expand_condition(each, names) for each in shape.members))
    raise Refusal("unsupported", "a name with * in a sequence")


def _expand_condition(condition: Condition, names: list[str]) -> Condition:
    if isinstance(condition, (And, Or)):
        return type(condition)(tuple(_expand_condition(each, names) for each in condition.parts))
    if isinstance(condition, Not):
        return Not(_expand_condition(condition.part, names))
    if isinstance(condition, Given) or not isinstance(condition.field, str) or "*" not in condition.field:
        return condition
    return Or(tuple(_put_field(condition, each) for each in names if _is_named(each, condition.field)))


def _put_field(test: Test, name: str) -> Condition:
    return replace(test, field=name)
