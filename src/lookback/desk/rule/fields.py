"""The fields of a rule's form: what they show of a document, and how they change its text.

A field that cannot show its whole value is not `is_whole`: the form leaves it alone, and you change it in the YAML.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from lookback.core.errors import SetupError
from lookback.core.expressions.functions import AGGREGATE_ARGUMENTS
from lookback.core.rules.document import COMMON_KEYS, KEYS_OF_KIND, MEASURE_KEYS, WINDOW_FORMS, find_kind
from lookback.core.rules.parameters import NAME, find_wrong_value, read_parameter
from lookback.core.values.texts import quote_identifier
from lookback.core.values.windows import EVENT, LOOKBACK, SEQUENCE, SLIDING

if TYPE_CHECKING:
    from lookback.core.streams.declaration import Stream
    from lookback.desk.rule.text import RuleText

KINDS = tuple(KEYS_OF_KIND)
# The aggregates for new measures; the name of a field goes in the braces.
AGGREGATES = {
    "count(*)": "",
    "count(distinct {})": "count",
    **{
        f"{name}({{}}{', 0.95' if name == 'percentile' else ''})": name
        for name in AGGREGATE_ARGUMENTS
        if name != "count"
    },
}
_OWN_WINDOW_KEYS = WINDOW_FORMS[LOOKBACK][:2]
_FIRST_SIZE = "1 hour"
_FIRST_SEQUENCE = {"within": "10 minutes", "steps": [{"name": "first", "where": "true"}]}
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


@dataclass(frozen=True)
class WindowField:
    """The window of a rule.

    Attributes:
        kind: The rule's kind.
        parts: Texts by the kind's keys in `WINDOW_FORMS`; none for an event rule or a sequence.
        is_whole: Whether the texts are all there is.
    """

    kind: str
    parts: Mapping[str, str] = field(default_factory=dict)
    is_whole: bool = True


@dataclass(frozen=True)
class MeasureField:
    """A measure. `window` and `delay` describe its own lookback window; empty for the rule's."""

    name: str
    aggregate: str
    window: str = ""
    delay: str = ""
    is_whole: bool = True


@dataclass(frozen=True)
class ValueField:
    """A field with one value, or a parameter, as a text."""

    name: str
    value: str
    is_whole: bool = True


def read_value(document: Mapping[str, Any], name: str) -> ValueField:
    """Reads the value of a key as a text; empty if the key is missing."""
    value = document.get(name)
    if value is None:
        return ValueField(name, "")
    if isinstance(value, (dt.date, dt.datetime)):
        return ValueField(name, value.isoformat())
    is_single = isinstance(value, (str, int, float, bool))
    return ValueField(name, _write(value) if is_single else "", is_single)


def put_value(name: str, text: RuleText, written: str) -> RuleText:
    """Writes the value of a key; an empty text removes the key. A score becomes a number if possible."""
    if not written:
        return text.remove([name])
    return text.put([name], int(written) if name == "score" and written.isascii() and written.isdigit() else written)


def put_flag(name: str, text: RuleText, is_set: bool, default: bool = False) -> RuleText:
    """Writes true or false; the default removes the key unless the document spells it out."""
    if is_set == default and not isinstance(text.get(name), bool):
        return text.remove([name])
    return text.put([name], is_set)


def read_group_by(document: Mapping[str, Any]) -> dict[str, str] | None:
    """Reads the entries of group_by: their names, each with its expression, empty for a field. None if any is wrong."""
    value = document.get("group_by", [])
    found: dict[str, str] = {}
    for each in value if isinstance(value, list) else [None]:
        ((name, text), *more) = (each or {None: None}).items() if isinstance(each, Mapping) else [(each, "")]
        if more or not isinstance(name, str) or not isinstance(text, str):
            return None
        found[name] = text
    return found


def put_group_by(text: RuleText, chosen: Iterable[str]) -> RuleText:
    """Writes the entries of group_by by their names; existing ones keep their order, and new fields follow."""
    known = read_group_by(text.document) or {}
    names = _keep_order(known, chosen)
    return put_list(text, "group_by", [{name: known[name]} if known.get(name) else name for name in names])


def read_entities(document: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Reads the fields of entity or entities; None if they are not names."""
    value = document.get("entities", [document["entity"]] if "entity" in document else [])
    return tuple(value) if isinstance(value, list) and all(isinstance(name, str) for name in value) else None


def put_entities(text: RuleText, chosen: Iterable[str]) -> RuleText:
    """Writes the fields of entities, in the order of `put_group_by`. A change replaces the key `entity`."""
    before = read_entities(text.document) or ()
    names = _keep_order(before, chosen)
    return text if names == list(before) else put_list(text.remove(["entity"]), "entities", names)


def _keep_order(before: Iterable[str], chosen: Iterable[str]) -> list[str]:
    wanted, known = list(chosen), list(before)
    return [*(name for name in known if name in wanted), *(name for name in wanted if name not in known)]


def read_words(document: Mapping[str, Any], name: str) -> ValueField:
    """Reads a list of texts without blanks as one text, such as tags."""
    value = document.get(name, [])
    is_whole = isinstance(value, list) and all(isinstance(each, str) and each.split() == [each] for each in value)
    return ValueField(name, " ".join(value) if is_whole else "", is_whole)


def put_words(name: str, text: RuleText, written: str) -> RuleText:
    """Writes the words of a text as a list."""
    return put_list(text, name, written.split())


def put_list(text: RuleText, name: str, values: Sequence[object]) -> RuleText:
    """Writes a list; an empty one removes the key, unless the document spells it out."""
    if not values and not text.get(name):
        return text
    return text.put([name], list(values)) if values else text.remove([name])


def read_window(document: Mapping[str, Any]) -> WindowField:
    """Reads the window; for an event rule or a sequence only the kind."""
    value = document.get("window")
    if SEQUENCE in document:
        return WindowField(SEQUENCE, {}, value is None)
    if value is None:
        return WindowField(find_kind(document) or LOOKBACK)
    if not isinstance(value, Mapping):
        return WindowField(LOOKBACK, {LOOKBACK: _write(value)}, isinstance(value, str))
    kinds = [kind for kind in WINDOW_FORMS if kind in value]
    kind = kinds[0] if kinds else LOOKBACK
    known = WINDOW_FORMS[kind]
    is_whole = len(kinds) == 1 and all(key in known and isinstance(value[key], str) for key in value)
    return WindowField(kind, {key: _write(value[key]) for key in known if key in value}, is_whole)


def put_window(text: RuleText, parts: Mapping[str, str]) -> RuleText:
    """Writes the parts of a window of the current kind. Empty parts other than the size are removed."""
    there = read_window(text.document)
    if there.kind not in WINDOW_FORMS:
        return text
    size, *others = WINDOW_FORMS[there.kind]
    given = {size: parts.get(size, ""), **{key: parts[key] for key in others if parts.get(key)}}
    value = text.get("window")
    if not isinstance(value, Mapping):
        is_short = there.kind == LOOKBACK and len(given) == 1
        return text.put(["window"], given[size] if is_short else given)
    for key, written in given.items():
        text = text.put(["window", key], written)
    for key in there.parts.keys() - given.keys():
        text = text.remove(["window", key])
    return text


def choose_kind(text: RuleText, kind: str) -> RuleText:
    """Changes the kind of a rule: removes the parts that the kind does not allow, and adds those it needs."""
    there = read_window(text.document)
    if kind == there.kind:
        return text
    for key in set(text.document) - {*COMMON_KEYS, *KEYS_OF_KIND[kind]} | {"window"}:
        text = text.remove([key])
    if kind == SEQUENCE:
        return text.put(["sequence"], _FIRST_SEQUENCE)
    if kind == EVENT:
        # A condition on measures says nothing about one event.
        return text.remove(["when"]) if text.get("where") else text.put(["when"], "true")
    size = there.parts.get(there.kind) or _FIRST_SIZE
    if kind == LOOKBACK:
        text = text.put(["window"], size)
    else:
        text = text.put(["window"], {kind: size, "slide": size} if kind == SLIDING else {kind: size})
    if not text.get("measures"):
        text = text.put(["measures"], {"n": "count(*)"}).put(["when"], "n >= 3")
    return text


def read_measures(document: Mapping[str, Any]) -> list[MeasureField]:
    """Reads the measures in their order; none if they are not a mapping."""
    value = document.get("measures")
    return [_read_measure(str(name), each) for name, each in value.items()] if isinstance(value, Mapping) else []


def _read_measure(name: str, value: Any) -> MeasureField:
    if isinstance(value, str):
        return MeasureField(name, value)
    if not (isinstance(value, Mapping) and isinstance(value.get("measure"), str) and set(value) <= set(MEASURE_KEYS)):
        return MeasureField(name, "", is_whole=False)
    window = value.get("window")
    if window is None or isinstance(window, str):
        return MeasureField(name, value["measure"], window or "")
    if isinstance(window, Mapping) and set(window) <= set(_OWN_WINDOW_KEYS):
        parts = [window.get(key, "") for key in _OWN_WINDOW_KEYS]
        if all(isinstance(part, str) for part in parts):
            return MeasureField(name, value["measure"], *parts)
    return MeasureField(name, value["measure"], is_whole=False)


def put_measure(text: RuleText, measure: MeasureField) -> RuleText:
    """Writes a new or existing measure, with its own window if it has one."""
    place = ["measures", measure.name]
    there = _read_measure(measure.name, text.get(*place)) if text.get(*place) is not None else None
    if there == measure:
        return text
    if there is not None and (there.window, there.delay) == (measure.window, measure.delay):
        is_mapping = isinstance(text.get(*place), Mapping)
        return text.put([*place, "measure"] if is_mapping else place, measure.aggregate)
    if not (measure.window or measure.delay):
        return text.put(place, measure.aggregate)
    window: Any = measure.window
    if measure.delay:
        window = dict(zip(_OWN_WINDOW_KEYS, (measure.window, measure.delay), strict=True))
    return text.put(place, {"measure": measure.aggregate, "window": window})


def put_part(text: RuleText, place: Sequence[str], part: str, written: str) -> RuleText:
    """Writes a part of a measure, or the value of a parameter."""
    key, name = place
    if key == "parameters":
        return put_parameter(text, name, written)
    there = next(each for each in read_measures(text.document) if each.name == name)
    changed: dict[str, Any] = {part: written}
    return put_measure(text, replace(there, **changed))


def begin_measure(text: RuleText, aggregate: str, name: str = "") -> RuleText:
    """Adds a measure of an aggregate over the field `name`, and derives the measure's name from both."""
    written = aggregate.format(name if _PLAIN_NAME.fullmatch(name) else quote_identifier(name))
    words = re.findall(r"[A-Za-z0-9_]+", f"{aggregate.partition('(')[0]} {name}", re.ASCII)
    return text.put(["measures", _find_free("_".join(words) or "n", text.get("measures"))], written)


def list_argument_fields(aggregate: str, stream: Stream) -> list[str]:
    """Lists the fields whose types suit an aggregate of `AGGREGATES`."""
    function = AGGREGATES[aggregate]
    check = AGGREGATE_ARGUMENTS.get(function)
    return [] if check is None else [name for name, type_ in stream.fields.items() if check(type_) is None]


def read_parameters(document: Mapping[str, Any]) -> list[ValueField]:
    """Reads the parameters in their order; none if they are not a mapping."""
    value = document.get("parameters")
    return [read_value(value, name) for name in value] if isinstance(value, Mapping) else []


def put_parameter(text: RuleText, name: str, written: str) -> RuleText:
    """Writes the value of a parameter as YAML would read it: number, boolean or text. Raises SetupError."""
    value = read_parameter(written.strip())
    if message := find_wrong_value(value):
        raise SetupError(f"{name} {message}")
    return text.put(["parameters", name], value)


def begin_parameter(text: RuleText) -> RuleText:
    """Adds a parameter with an unused name."""
    return text.put(["parameters", _find_free("limit", text.get("parameters"))], 1)


def rename(text: RuleText, place: Sequence[str], name: str) -> RuleText:
    """Renames a measure or a parameter. Raises SetupError for an invalid name."""
    if not NAME.fullmatch(name):
        raise SetupError("a name may have letters, digits and _, and must not begin with a digit")
    return text.rename(place, name)


def _find_free(name: str, taken: Any) -> str:
    used = {str(each).lower() for each in taken} if isinstance(taken, Mapping) else set()
    numbered = (name if number == 1 else f"{name}_{number}" for number in range(1, len(used) + 2))
    return next(each for each in numbered if each.lower() not in used)


def _write(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
