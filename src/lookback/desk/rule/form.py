"""The form of a rule: a field for each part of its document, with the problems of that part below it.

The form reads a text and returns changes to it (see `rulefields`); it keeps no document itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import ipywidgets

from lookback.core.rules.document import LATE_POLICIES, SEVERITIES, WINDOW_FORMS
from lookback.core.values.windows import SEQUENCE
from lookback.desk.parts import (
    add_classes,
    clean_text,
    make_button,
    make_column,
    make_field,
    make_heading,
    make_row,
    make_text,
)
from lookback.desk.rule import fields as rulefields
from lookback.desk.rule.checking import find_nearest_place

if TYPE_CHECKING:
    from lookback.core.streams.declaration import Stream
    from lookback.desk.rule.checking import RuleFinding
    from lookback.desk.rule.text import RuleText

_WIDE = {"width": "98%"}
_SHORT = {"width": "265px"}
# The keys with a single value: title, hint and number of lines of the field.
_VALUES = {
    "rule_id": ("Rule id", "The rule's name: lower-case letters, digits, '.', '_' or '-'. It never changes", 1),
    "description": ("Description", "What the rule looks for, for reviewers of its alerts", 2),
    "where": ("Where", "The events that the rule sees, as Spark SQL; empty: all", 2),
    "when": ("When", "The condition that raises an alert, over measures and fields, as Spark SQL", 2),
    "message": ("Message", "The text of the alert; names in braces are filled in", 2),
    "suppress": ("Suppress", "Raises no other alert of the key for this long, such as 1 hour; empty: raise every alert", 1),
    "score": ("Score", "What an alert adds to the risk of its entity; empty: by severity", 1),
    "allowed_lateness": ("Lateness", "How far behind the watermark an event may be; empty: as the stream says", 1),
    "effective_from": ("From", "Events before this time trigger nothing; empty: no limit", 1),
    "effective_until": ("Until", "Events at or after this time trigger nothing; empty: no limit", 1),
}  # fmt: skip
_CHOICES = {
    "severity": ("Severity", "Severity of the alerts", SEVERITIES),
    "late": ("Late events", "What the rule does with a late event", LATE_POLICIES),
}
_FLAGS = {
    "early": ("Early", "Windows also give a result after each event, before they end", False),
    "reset_on_alert": ("Reset on alert", "An alert resets the windows of its key", False),
    "warm_start": ("Warm start", "The rule starts with earlier events in its windows", True),
}


class FormPlace:
    """A field of the form, with a line for its problems below it."""

    def __init__(self, place: str, control: Any, on_change: Callable[[FormPlace], None]) -> None:
        self.place, self.control = place, control
        self._on_change, self._is_shown = on_change, False
        self._note = make_text("", "lookback-note", "lookback-problem", layout={"display": "none", "width": "auto"})
        self.widget = make_column(
            control, self._note, name=f"lookback-field-{place.replace('.', '-').replace('_', '-')}"
        )
        control.observe(self._notify, names="value")

    @property
    def value(self) -> Any:
        """The value of the field."""
        return self.control.value

    def _notify(self, _: object) -> None:
        if not self._is_shown:
            self._on_change(self)

    def show(self, value: Any, is_whole: bool = True) -> None:
        """Shows a value without reporting a change. `is_whole`: the field shows all of it, and may change it."""
        self._is_shown = True
        try:
            self.control.value = value
            self.control.disabled = not is_whole
        finally:
            self._is_shown = False

    def show_options(self, options: Iterable[Any], value: Any, is_whole: bool = True) -> None:
        """Shows a value among options, each a text or a (text, value) pair."""
        self._is_shown = True
        try:
            if tuple(self.control.options) != tuple(options):
                self.control.options = list(options)
        finally:
            self._is_shown = False
        self.show(value, is_whole)

    def tell(self, messages: Sequence[str]) -> None:
        """Shows the problems of this field; without any it hides the line."""
        self._note.value = clean_text("\n".join(messages))
        self._note.layout.display = "" if messages else "none"


@dataclass
class _FormRow:
    """The fields of a measure or a parameter in one row. `key` is its name in the document."""

    key: str
    places: dict[str, FormPlace]
    widget: Any


class RuleForm:
    """The fields of the form. `change` gets the field and a function that changes the text."""

    def __init__(
        self, streams: Mapping[str, Stream], change: Callable[[FormPlace | None, Callable[[RuleText], RuleText]], None]
    ) -> None:
        self._streams, self._change = streams, change
        self._text: RuleText | None = None
        self._values = {name: self._make_value(name) for name in _VALUES}
        self._choices = {name: self._make_choice(name) for name in _CHOICES}
        self._flags = {name: self._make_flag(name) for name in _FLAGS}
        self._stream = self._add(
            "stream",
            _make_dropdown("Stream", "The stream whose events the rule judges"),
            lambda value, text: text.put(["stream"], value),
        )
        self._group_by = self._add(
            "group_by",
            _make_list("Group by", "The fields that make the key; Ctrl and Space add one"),
            lambda value, text: rulefields.put_group_by(text, value),
        )
        self._entity = self._add(
            "entity",
            _make_dropdown("Entity", "Whom the alerts are about: a field of group_by"),
            lambda value, text: rulefields.put_value(text, "entity", value),
        )
        self._kind = self._add(
            "kind",
            _make_dropdown("Kind", "How events are combined: by a window, or as steps in order"),
            lambda value, text: rulefields.choose_kind(text, value),
        )
        keys = dict.fromkeys(key for keys in WINDOW_FORMS.values() for key in keys)
        self._parts = {key: self._make_part(key) for key in keys}
        self._fields = make_text("", "lookback-stream-fields")
        self._measures = _Rows(self._make_measure)
        self._parameters = _Rows(self._make_parameter)
        self._sequence_note = make_text(
            "Steps of a sequence are written in the YAML, under `sequence`.", "lookback-sequence-note"
        )
        self._aggregate = _make_dropdown(
            "Aggregate", "What a new measure computes", "lookback-new-aggregate", options=list(rulefields.AGGREGATES)
        )
        self._argument = _make_dropdown("of", "The field to aggregate", "lookback-new-argument")
        self._aggregate.observe(lambda _: self._show_arguments(), names="value")
        self.widget = self._lay_out()

    def _lay_out(self) -> Any:
        add_measure = make_button(
            "Add measure", self._begin_measure, "Add a measure of the chosen aggregate", "lookback-add-measure"
        )
        add_parameter = make_button(
            "Add parameter",
            lambda: self._change(None, rulefields.begin_parameter),
            "Add a parameter, which expressions use as :name",
            "lookback-add-parameter",
        )
        self._new_measure = make_row(self._aggregate, self._argument, add_measure)
        values, choices, flags = self._values, self._choices, self._flags
        self._window = make_row(*(part.widget for part in self._parts.values()), name="lookback-window")
        return make_column(
            make_row(values["rule_id"].widget, self._stream.widget, choices["severity"].widget),
            values["description"].widget, self._fields, self._group_by.widget,
            make_row(self._entity.widget, values["score"].widget), values["where"].widget,
            make_heading("Window"), make_row(self._kind.widget, self._window), self._sequence_note,
            make_heading("Measures"), self._measures.widget, self._new_measure, values["when"].widget,
            make_heading("Parameters"), self._parameters.widget, make_row(add_parameter),
            make_heading("Alert"), values["message"].widget,
            make_row(values["suppress"].widget, choices["late"].widget, values["allowed_lateness"].widget),
            make_row(values["effective_from"].widget, values["effective_until"].widget),
            make_row(*(flag.widget for flag in flags.values())),
        )  # fmt: skip

    def _add(self, place: str, control: Any, put: Callable[[Any, RuleText], RuleText]) -> FormPlace:
        return FormPlace(place, control, lambda each: self._change(each, lambda text: put(each.value, text)))

    def _make_value(self, name: str) -> FormPlace:
        title, hint, lines = _VALUES[name]
        control = make_area(title, hint, lines) if lines > 1 else _make_text_field(title, hint, layout=_SHORT)
        return self._add(name, control, lambda value, text: rulefields.put_value(text, name, value))

    def _make_choice(self, name: str) -> FormPlace:
        title, hint, _ = _CHOICES[name]
        return self._add(name, _make_dropdown(title, hint), lambda value, text: rulefields.put_value(text, name, value))

    def _make_flag(self, name: str) -> FormPlace:
        title, hint, default = _FLAGS[name]
        control = make_field(ipywidgets.Checkbox, title, hint, indent=False)
        return self._add(name, control, lambda value, text: rulefields.put_flag(text, name, value, default))

    def _make_part(self, key: str) -> FormPlace:
        control = _make_text_field(
            key.capitalize(),
            f"A duration such as 24 hours: `{key}` of the window",
            layout={"width": "220px"},
        )

        def put(value: str, text: RuleText) -> RuleText:
            return rulefields.put_window(text, {**rulefields.read_window(text.document).parts, key: value})

        return self._add(f"window.{key}", control, put)

    def _make_measure(self, row: _FormRow) -> None:
        def put(part: str) -> Callable[[Any, RuleText], RuleText]:
            def change(value: str, text: RuleText) -> RuleText:
                there = next(each for each in rulefields.read_measures(text.document) if each.name == row.key)
                changed: dict[str, Any] = {part: value}
                return rulefields.put_measure(text, replace(there, **changed))

            return change

        fields = {
            "name": ("Name", "The name of the measure in conditions and the message", "180px"),
            "aggregate": ("is", "One aggregate, such as sum(amount) or count(*) filter (where amount > 1000)", "300px"),
            "window": ("over", "Its own lookback window, such as 30 days; empty: the rule's", "150px"),
            "delay": ("up to before", "How long before the event it ends, such as 1 day; empty: at the event", "190px"),
        }  # fmt: skip
        for part, (title, hint, width) in fields.items():
            control = _make_text_field(title, hint, f"lookback-measure-{part}", layout={"width": width})
            row.places[part] = self._add(
                "measures", control, self._rename(row, "measures") if part == "name" else put(part)
            )
        self._finish_row(row, "measures")

    def _make_parameter(self, row: _FormRow) -> None:
        for part, title, hint in (
            ("name", "Name", "The name of the parameter"),
            ("value", "Value", "A number, a text or a duration"),
        ):
            control = _make_text_field(title, hint, f"lookback-parameter-{part}", layout={"width": "220px"})
            change = self._rename(row, "parameters") if part == "name" else (
                lambda value, text: rulefields.put_parameter(text, row.key, value)
            )  # fmt: skip
            row.places[part] = self._add("parameters", control, change)
        self._finish_row(row, "parameters")

    def _rename(self, row: _FormRow, key: str) -> Callable[[Any, RuleText], RuleText]:
        def change(value: str, text: RuleText) -> RuleText:
            renamed = rulefields.rename(text, [key, row.key], value)
            row.key = value
            return renamed

        return change

    def _finish_row(self, row: _FormRow, key: str) -> None:
        remove = make_button(
            "Remove",
            lambda: self._change(None, lambda text: text.remove([key, row.key])),
            f"Remove this row of {key}",
            f"lookback-remove-{key}",
        )
        row.widget.children = [*(place.widget for place in row.places.values()), remove]

    def _begin_measure(self) -> None:
        aggregate, name = self._aggregate.value, self._argument.value or ""
        self._change(None, lambda text: rulefields.begin_measure(text, aggregate, name))

    def _find_stream(self) -> Stream | None:
        return self._streams.get(str(self._text.get("stream"))) if self._text is not None else None

    def _show_arguments(self) -> None:
        stream, aggregate = self._find_stream(), self._aggregate.value
        names = [] if stream is None else rulefields.list_argument_fields(aggregate, stream)
        self._argument.options, self._argument.value = names, next(iter(names), None)
        self._argument.layout.display = "" if rulefields.AGGREGATES[aggregate] else "none"

    def show(self, text: RuleText, but: FormPlace | None) -> None:
        """Shows a text in all fields except `but`."""
        before, self._text = self._find_stream(), text
        document, stream = text.document, self._find_stream()
        if stream is not before or stream is None:
            self._show_arguments()
        fields = {} if stream is None else stream.fields
        self._fields.value = clean_text("Fields: " + ", ".join(f"{name} {type_}" for name, type_ in fields.items()))
        for name, place in self._values.items():
            read = rulefields.read_value(document, name)
            self._show_place(place, but, read.text, read.is_whole)
        for name, place in self._choices.items():
            read = rulefields.read_value(document, name)
            if place is not but:
                place.show_options(_with_default(_CHOICES[name][2], read.text), read.text, read.is_whole)
        for name, place in self._flags.items():
            value = document.get(name, _FLAGS[name][2])
            self._show_place(place, but, value is True, isinstance(value, bool))
        self._show_keys(document, fields, but)
        self._show_window(document, but)
        self._measures.show(
            [(each.name, _list_measure(each), each.is_whole) for each in rulefields.read_measures(document)], but
        )
        self._parameters.show(
            [
                (each.name, {"name": each.name, "value": each.text}, each.is_whole)
                for each in rulefields.read_parameters(document)
            ],
            but,
        )

    def _show_keys(self, document: Mapping[str, Any], fields: Mapping[str, Any], but: FormPlace | None) -> None:
        named, group_by = rulefields.read_value(document, "stream"), rulefields.read_group_by(document)
        if self._stream is not but:
            self._stream.show_options(_with_unknown(self._streams, named.text), named.text, named.is_whole)
        if self._group_by is not but:
            unknown = [name for name in group_by or () if name not in fields]
            options = [(f"{name} ({type_})", name) for name, type_ in fields.items()]
            options += [(clean_text(f"{name} (not a field of the stream)", 120), name) for name in unknown]
            self._group_by.show_options(options, group_by or (), group_by is not None)
        entity = rulefields.read_value(document, "entity")
        if self._entity is not but:
            self._entity.show_options(_with_default(group_by or (), entity.text), entity.text, entity.is_whole)

    def _show_window(self, document: Mapping[str, Any], but: FormPlace | None) -> None:
        window = rulefields.read_window(document)
        is_sequence = window.kind == SEQUENCE
        if self._kind is not but:
            self._kind.show_options(rulefields.KINDS, window.kind)
        for key, part in self._parts.items():
            part.widget.layout.display = "" if not is_sequence and key in WINDOW_FORMS[window.kind] else "none"
            self._show_place(part, but, window.parts.get(key, ""), window.is_whole)
        for widget in (self._measures.widget, self._new_measure, self._values["when"].widget):
            widget.layout.display = "none" if is_sequence else ""
        self._sequence_note.layout.display = "" if is_sequence else "none"

    @staticmethod
    def _show_place(place: FormPlace, but: FormPlace | None, value: Any, is_whole: bool) -> None:
        if place is not but:
            place.show(value, is_whole)

    def _list_places(self) -> dict[str, FormPlace]:
        """Maps places of the document to the fields that show their problems."""
        places = {**self._values, **self._choices, **self._flags}
        places |= {"stream": self._stream, "group_by": self._group_by, "entity": self._entity}
        places |= {"window": self._kind, **{f"window.{key}": part for key, part in self._parts.items()}}
        if self._text is not None and not isinstance(self._text.get("window"), Mapping):
            places["window"] = self._parts["lookback"]
        for key, rows, parts in (
            ("measures", self._measures, {"": "aggregate", ".measure": "aggregate", ".window": "window", ".window.delay": "delay"}),
            ("parameters", self._parameters, {"": "value"}),
        ):  # fmt: skip
            for row in rows.rows:
                places |= {f"{key}.{row.key}{suffix}": row.places[part] for suffix, part in parts.items()}
        return places

    def tell(self, problems: Sequence[RuleFinding]) -> None:
        """Shows each problem below its field."""
        places = self._list_places()
        by_place: dict[int, list[str]] = {}
        for each in problems:
            near = places.get(find_nearest_place(each.place, places))
            by_place.setdefault(id(near), []).append(each.message)
        for place in {
            id(each): each
            for each in [*places.values(), *self._measures.list_places(), *self._parameters.list_places()]
        }.values():
            place.tell(by_place.get(id(place), []))

    def disable(self) -> None:
        """Disables all fields while the YAML is invalid."""
        for place in [
            *self._list_places().values(),
            self._kind,
            *self._measures.list_places(),
            *self._parameters.list_places(),
        ]:
            place.control.disabled = True


class _Rows:
    """Rows of fields, one per measure or parameter, in a column `widget`."""

    def __init__(self, make: Callable[[_FormRow], None]) -> None:
        self._make = make
        self._all: list[_FormRow] = []
        self.rows: list[_FormRow] = []
        self.widget = make_column()

    def show(self, wanted: Sequence[tuple[str, Mapping[str, str], bool]], but: FormPlace | None) -> None:
        """Shows rows, given the key of each, the texts of its fields, and whether they show the whole value."""
        while len(self._all) < len(wanted):
            row = _FormRow("", {}, make_row(name="lookback-form-row"))
            self._make(row)
            self._all.append(row)
        self.rows = self._all[: len(wanted)]
        for row, (key, values, is_whole) in zip(self.rows, wanted, strict=True):
            row.key = key
            for part, place in row.places.items():
                if place is not but:
                    place.show(values[part], is_whole or part == "name")
        self.widget.children = [row.widget for row in self.rows]

    def list_places(self) -> list[FormPlace]:
        """Lists the fields of all rows."""
        return [place for row in self._all for place in row.places.values()]


def make_area(title: str, hint: str, lines: int) -> Any:
    """Makes a multi-line text field."""
    return make_field(ipywidgets.Textarea, title, hint, rows=lines, layout=_WIDE, continuous_update=True)


def _make_text_field(title: str, hint: str, *classes: str, layout: Any) -> Any:
    """Makes a short text field that is checked as you type."""
    return make_field(ipywidgets.Text, title, hint, *classes, layout=layout, continuous_update=True)


def _make_dropdown(title: str, hint: str, *classes: str, options: Sequence[str] = ()) -> Any:
    chosen = {"value": options[0]} if options else {}
    return make_field(ipywidgets.Dropdown, title, hint, *classes, options=list(options), layout=_SHORT, **chosen)


def _make_list(title: str, hint: str) -> Any:
    return add_classes(
        make_field(ipywidgets.SelectMultiple, title, hint, options=[], rows=5, layout=_WIDE), "lookback-list"
    )


def _with_default(known: Iterable[str], value: str) -> list[tuple[str, str]]:
    """Lists the options of an optional key."""
    return [("(default)", ""), *((clean_text(name, 120), name) for name in _with_unknown(known, value) if name)]


def _with_unknown(known: Iterable[str], value: str) -> list[str]:
    """Lists the options of a key, plus its current value if that is not among them."""
    names = list(known)
    return names if value in names else [*names, value]


def _list_measure(measure: rulefields.MeasureField) -> dict[str, str]:
    return {part: getattr(measure, part) for part in ("name", "aggregate", "window", "delay")}
