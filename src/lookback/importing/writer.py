"""Writes detections as rule documents of a stream."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lookback.core.errors import RuleError
from lookback.core.rules.compiling import compile_rule
from lookback.core.rules.descriptions import MAX_ENTRIES, MAX_TAG_CHARACTERS, MAX_URL_CHARACTERS
from lookback.core.streams.declaration import Stream
from lookback.core.values.texts import collapse_spaces, cut_end
from lookback.importing.conditions import And, Condition, Or, Present
from lookback.importing.detections import (
    Chain,
    Counted,
    Detection,
    Gauged,
    Key,
    Measured,
    Origin,
    Shape,
    Single,
    Together,
    list_fields_read,
    name_member,
)
from lookback.importing.elasticwriter import (
    find_array_keys,
    list_shown,
    write_chain,
    write_counted,
    write_keys,
    write_single,
)
from lookback.importing.expressions import write_condition
from lookback.importing.fields import FieldNames
from lookback.importing.literals import write_span, write_window
from lookback.importing.mapping import NameMap
from lookback.importing.reasons import Reason, Refusal

_MAX_DESCRIPTION_CHARACTERS = 2_000
# Fields in a message.
_MAX_SHOWN = 4
_URL = re.compile(r"https?://[^\s/?#]+\S*", re.IGNORECASE)
_DECIMAL = "decimal(38,9)"


@dataclass(frozen=True)
class Writer:
    """Writes the rules of one stream. names: what the map says."""

    stream: Stream
    names: NameMap

    def make_document(self, detection: Detection, rule_id: str, fidelity: str) -> dict[str, Any]:
        """Returns the document of a rule, which passes the checks of `rules check`. Raises Refusal."""
        body = self._write_shape(detection.shape)
        head, message = self.describe(detection.origin, rule_id, fidelity), self._write_message(detection)
        document = _leave_out_empty({**head, **body, "message": message})
        try:
            compile_rule(document, self.stream)
        except RuleError as error:
            raise Refusal(*_explain(error)) from error
        return document

    def describe(self, origin: Origin, rule_id: str, fidelity: str) -> dict[str, Any]:
        """Returns the part of a document that does not say what the rule looks for."""
        document: dict[str, Any] = {
            "rule_id": rule_id,
            "description": cut_end(collapse_spaces(origin.description or origin.title), _MAX_DESCRIPTION_CHARACTERS),
            "tags": _clean_tags(origin.tags),
            "references": _clean_references(origin.references),
            "runbook": origin.runbook.strip(),
            "source": self._write_source(origin, fidelity),
            "stream": self.stream.name,
            "severity": origin.severity,
            "score": origin.score,
            "queue": origin.waits,
        }
        return _leave_out_empty(document)

    @property
    def fields(self) -> FieldNames:
        """Returns the stream's fields by the names that rules use."""
        return FieldNames(self.stream, self.names.fields)

    def _write_source(self, origin: Origin, fidelity: str) -> dict[str, str]:
        named = {
            "format": origin.format,
            "id": origin.identity,
            "author": cut_end(collapse_spaces(origin.author), 500),
            "license": collapse_spaces(origin.license or self.names.license),
            "url": self.names.url.replace("{path}", origin.path.replace(" ", "%20")),
            "fidelity": fidelity,
        }
        return {key: value for key, value in named.items() if value}

    def _write_message(self, detection: Detection) -> str:
        """Writes the title, and of an event some fields."""
        title = collapse_spaces(detection.origin.title).translate(str.maketrans("{}:", "()-"))
        if not isinstance(detection.shape, Single):
            return _add_fields(title, self._list_known(list_shown(detection.shape), has_arrays=False))
        read = [*detection.origin.shown, *list_fields_read(detection.shape)]
        return _add_fields(title, self._list_known(read))

    def _list_known(self, names: Sequence[str], *, has_arrays: bool = True) -> list[str]:
        """Lists the stream's fields of these names that a message can show. has_arrays: Arrays are among them."""
        found: dict[str, None] = {}
        for name in names:
            try:
                field, is_array = self.fields.find(name), self.fields.find_type(name).element is not None
            except Refusal:
                continue
            if has_arrays or not is_array:
                found[field] = None
        return [name for name in found if "." not in name][:_MAX_SHOWN]

    def _write_shape(self, shape: Shape) -> dict[str, Any]:
        if isinstance(shape, Single):
            return write_single(shape, self.stream, self.fields)
        if isinstance(shape, (Counted, Chain)):
            return write_counted(shape, self.fields) if isinstance(shape, Counted) else write_chain(shape, self.fields)
        if isinstance(shape, Measured):
            return self._write_measured(shape)
        return self._write_gauged(shape) if isinstance(shape, Gauged) else self._write_together(shape)

    def _write_measured(self, shape: Measured) -> dict[str, Any]:
        keys, fields = self._write_keys(shape.members, shape.keys), [self.fields.write(each) for each in shape.fields]
        if shape.aggregate not in ("count", "count(distinct)"):
            fields = [self._write_number(name) for name in shape.fields]
        measure = {
            "count": "count(*)",
            "count(distinct)": f"count(distinct {', '.join(fields)})",
            "percentile": f"percentile({', '.join(fields)}, {shape.percentile / 100})",
        }.get(shape.aggregate, f"{shape.aggregate}({', '.join(fields)})")
        name = "events" if shape.aggregate == "count" else "found"
        name = next(each for each in (name, f"{name}_measured") if each not in self.stream.fields)
        return {
            "group_by": keys,
            "where": self._write_where(shape.members, shape.keys),
            "window": write_span(shape.seconds),
            "measures": {name: measure},
            "when": f"{name} {shape.operator} {shape.number}",
            **({"reset_on_alert": True} if shape.resets else {}),
        }

    def _write_gauged(self, shape: Gauged) -> dict[str, Any]:
        number = self._write_number(shape.fields[0])
        calls = {"last": f"last({number})", "count": "count(*)", "count(distinct)": f"count(distinct {number})"}
        measures: dict[str, Any] = {}
        for gauge in shape.gauges:
            window: Any = write_span(gauge.seconds)
            if gauge.delay:
                window = {"lookback": window, "delay": write_span(gauge.delay)}
            sql = f"{calls[gauge.aggregate]} filter (where {write_condition(shape.members[gauge.member], self.fields)})"
            measures[gauge.name] = {"measure": sql, "window": window}
        return {
            "group_by": self._write_keys(shape.members, shape.keys),
            "where": self._write_where(shape.members, shape.keys),
            "window": write_span(max(gauge.seconds for gauge in shape.gauges)),
            "measures": measures,
            "when": shape.wanted,
        }

    def _write_number(self, name: str) -> str:
        """Writes a field as a number that can be added up exactly."""
        type_, field = self.fields.find_type(name), self.fields.write(name)
        if type_.is_integer or type_.is_decimal:
            return field
        if type_.is_float:
            return f"cast({field} as {_DECIMAL})"
        if type_.name != "string":
            raise Refusal("type", f"{name} is {type_}, and the rule computes with it")
        return f"try_cast({field} as {_DECIMAL})"

    def _write_together(self, shape: Together) -> dict[str, Any]:
        filters = [write_condition(member, self.fields) for member in shape.members]
        measures = {name_member(at): f"count(*) filter (where {sql})" for at, sql in enumerate(filters)}
        return {
            "group_by": self._write_keys(shape.members, shape.keys),
            "where": self._write_where(shape.members, shape.keys),
            "window": write_window(shape.seconds, shape.slide),
            "measures": measures,
            "when": shape.wanted,
        }

    def _write_keys(self, members: Sequence[Condition], keys: Sequence[Key]) -> list[Any]:
        """Writes the key; one that is another field in each member is the field of the first member that matches."""
        return [self._write_key(members, key) for key in keys]

    def _write_key(self, members: Sequence[Condition], key: Key) -> Any:
        fields = [self.fields.find(name) for name in key.fields]
        if len(set(fields)) == 1:
            return write_keys(fields[:1], self.fields)[0]
        return {self._name_key(key.name): self._write_choice(members, key)}

    def _write_choice(self, members: Sequence[Condition], key: Key) -> str:
        fields = [self.fields.write(name) for name in key.fields]
        cases = [
            f"when {write_condition(member, self.fields)} then {field}"
            for member, field in zip(members, fields, strict=True)
        ]
        return f"case {' '.join(cases)} end"

    def _name_key(self, name: str) -> str:
        plain = re.sub(r"[^A-Za-z0-9_]", "_", name)
        lowered = {each.lower() for each in self.stream.fields}
        return f"{plain}_key" if plain.lower() in lowered else plain

    def _write_where(self, members: Sequence[Condition], keys: Sequence[Key]) -> str:
        """Writes that an event satisfies a member, and has the key in the field of that member."""
        fields = [tuple(self.fields.find(name) for name in key.fields) for key in keys]
        if all(len(set(each)) == 1 for each in fields):
            any_member = [] if And(()) in members else [Or(tuple(members))]
            return write_condition(And((*any_member, *(Present(each[0]) for each in fields))), self.fields)
        own = [And((member, *(Present(key.fields[at]) for key in keys))) for at, member in enumerate(members)]
        return write_condition(Or(tuple(own)), self.fields)


def _leave_out_empty(document: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in document.items() if value not in ("", [], {}, None)}


def _add_fields(title: str, fields: Sequence[str]) -> str:
    return f"{title}: {', '.join(f'{name} {{{name}}}' for name in fields)}" if fields else title


def _clean_tags(tags: Sequence[str]) -> list[str]:
    """Returns the tags that a document may have, each once."""
    found = {tag.lower(): tag for tag in reversed(tags) if tag and not re.search(r"\s", tag)}
    return [tag for tag in reversed(found.values()) if len(tag) <= MAX_TAG_CHARACTERS][:MAX_ENTRIES]


def _clean_references(references: Sequence[str]) -> list[str]:
    """Returns the references that are URLs."""
    found = (each.strip() for each in references)
    urls = (each for each in found if _URL.fullmatch(each) and len(each) <= MAX_URL_CHARACTERS)
    return list(dict.fromkeys(urls))[:MAX_ENTRIES]


def _explain(error: RuleError) -> tuple[str, str]:
    """Says why a document is refused: by its pattern, or by another check."""
    text = str(error.problems[0])
    if "limits.expression_characters" in text:
        return "too-long", text
    return ("regex" if "the pattern has" in text else "check"), text


def find_losses(detection: Detection, fields: FieldNames) -> list[Reason]:
    """Returns why the rule differs from its original, each code once. Raises Refusal for a field that is not there."""
    by_code: dict[str, Reason] = {}
    for loss in (*detection.losses, *find_array_keys(detection.shape, fields)):
        by_code.setdefault(loss.code, loss)
    return list(by_code.values())
