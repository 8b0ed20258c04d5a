"""The form of a rule: a field for each part of its document, with the problems of that part below it.

The form reads a text and returns changes to it (see `rulefields`); it keeps no document itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import ipywidgets

from lookback.core.rules.document import LATE_POLICIES, SEVERITIES, WINDOW_FORMS
from lookback.core.values.windows import SEQUENCE
from lookback.desk import parts
from lookback.desk.rule import fields as rulefields
from lookback.desk.rule.checking import find_nearest_place

if TYPE_CHECKING:
    from lookback.core.streams.declaration import Stream
    from lookback.desk.rule.checking import RuleFinding
    from lookback.desk.rule.text import RuleText

_SHORT = {"width": "265px"}
# The keys with a single value: title and hint of the field. The first five have two lines.
_VALUES = {
    "description": ("Description", "What the rule looks for, for reviewers of its alerts"),
    "where": ("Where", "The events that the rule sees, as Spark SQL; empty: all"),
    "when": ("When", "The condition that raises an alert, over measures and fields, as Spark SQL"),
    "message": ("Message", "The text of the alert; names in braces are filled in"),
    "runbook": ("Runbook", "What to do about an alert: a text or a URL"),
    "rule_id": ("Rule id", "The rule's name: lower-case letters, digits, '.', '_' or '-'. It never changes"),
    "suppress": (
        "Suppress",
        "Raises no other alert of the key for this long, such as 1 hour; empty: raise every alert",
    ),
    "score": ("Score", "What an alert adds to the risk of its entity; empty: by severity"),
    "allowed_lateness": ("Lateness", "How far behind the watermark an event may be; empty: as the stream says"),
    "effective_from": ("From", "Events before this time trigger nothing; empty: no limit"),
    "effective_until": ("Until", "Events at or after this time trigger nothing; empty: no limit"),
}
_LONG = tuple(_VALUES)[:5]
# The keys with a list of texts without blanks.
_WORDS = {
    "tags": ("Tags", "Words by which people find the rule and its alerts, such as attack.t1110, separated by blanks"),
    "references": ("References", "URLs of what the rule is based on, separated by blanks"),
}
_CHOICES = {
    "severity": ("Severity", "Severity of the alerts", SEVERITIES),
    "late": ("Late events", "What the rule does with a late event", LATE_POLICIES),
}
_FLAGS = {
    "early": ("Early", "Windows also give a result after each event, before they end", False),
    "reset_on_alert": ("Reset on alert", "An alert resets the windows of its key", False),
    "warm_start": ("Warm start", "The rule starts with earlier events in its windows", True),
}
# The fields of a measure and of a parameter: title, hint and width.
_ROWS = {
    "measures": {
        "name": ("Name", "The name of the measure in conditions and the message", "180px"),
        "aggregate": ("is", "One aggregate, such as sum(amount) or count(*) filter (where amount > 1000)", "300px"),
        "window": ("Window", "Its own lookback window, such as 30 days; empty: the rule's", "150px"),
        "delay": ("Delay", "How long before the event it ends, such as 1 day; empty: at the event", "190px"),
    },
    "parameters": {
        "name": ("Name", "The name of the parameter", "220px"),
        "value": ("Value", "A number, a text or a duration", "220px"),
    },
}
# The fields that show the problems of a row, by the place below the row's name.
_PROBLEMS = {
    "measures": {"": "aggregate", ".measure": "aggregate", ".window": "window", ".window.delay": "delay"},
    "parameters": {"": "value"},
}
# What a field shows of a document: its value, whether that is all of it, and the options, if it has any.
_Shown = tuple[Any, bool] | tuple[Any, bool, Iterable[Any]]
_Change = Callable[["FormPlace | None", Callable[["RuleText"], "RuleText"]], None]


class FormPlace:
    """A field of the form, with a line for its problems below it."""

    def __init__(self, place: str, control: Any, on_change: Callable[[FormPlace], None]) -> None:
        self.control, self._filling = control, parts.Filling()
        self._note = parts.make_text(
            "", "lookback-note", "lookback-problem", layout={"display": "none", "width": "auto"}
        )
        name = f"lookback-field-{place.replace('.', '-').replace('_', '-')}"
        self.widget = parts.make_column(control, self._note, name=name)
        self._filling.observe(control, lambda: on_change(self))

    def show(self, value: Any, is_whole: bool = True, options: Iterable[Any] | None = None) -> None:
        """Shows a value without reporting a change. `is_whole`: the field shows all of it, and may change it.

        Each of the `options`, if any, is a text or a (text, value) pair.
        """
        with self._filling:
            if options is not None and tuple(self.control.options) != tuple(options):
                self.control.options = list(options)
            self.control.value = value
            self.control.disabled = not is_whole

    def tell(self, messages: Sequence[str]) -> None:
        """Shows the problems of this field; without any it hides the line."""
        self._note.value = parts.clean_text("\n".join(messages))
        self._note.layout.display = "" if messages else "none"


class RuleForm:
    """The fields of the form. `change` gets the field and a function that changes the text."""

    def __init__(self, streams: Mapping[str, Stream], change: _Change) -> None:
        self._streams, self._change = streams, change
        self._text: RuleText | None = None
        self._places: dict[str, FormPlace] = {}
        self._readers: dict[str, Callable[[Mapping[str, Any]], _Shown]] = {}
        self._add_values()
        self._add_keys()
        for key in dict.fromkeys(key for keys in WINDOW_FORMS.values() for key in keys):
            self._add_part(key)
        self._fields = parts.make_text("", "lookback-stream-fields")
        self._rows = {key: _Rows(key, change) for key in _ROWS}
        note = "Steps of a sequence are written in the YAML, under `sequence`."
        self._sequence_note = parts.make_text(note, "lookback-sequence-note")
        aggregates = list(rulefields.AGGREGATES)
        self._aggregate = _make_dropdown(
            "Aggregate", "What a new measure computes", "lookback-new-aggregate", aggregates
        )
        self._argument = _make_dropdown("of", "The field to aggregate", "lookback-new-argument")
        self._aggregate.observe(lambda _: self._show_arguments(), names="value")
        hint = "Show or hide the fields that few rules need"
        self._opens_rare = parts.make_field(ipywidgets.ToggleButton, "More fields", hint, "lookback-more")
        self._rare = parts.make_column(name="lookback-rare")
        self._opens_rare.observe(lambda _: _display(self._rare, self._opens_rare.value), names="value")
        self.widget = self._lay_out()
        _display(self._rare, is_shown=False)

    def _lay_out(self) -> Any:
        of = {name: place.widget for name, place in self._places.items()}
        row, heading = parts.make_row, parts.make_heading
        hint = "Add a measure of the chosen aggregate"
        add_measure = parts.make_button("Add measure", self._begin_measure, hint, "lookback-add-measure")
        self._new_measure = row(self._aggregate, self._argument, add_measure)
        hint, begin = "Add a parameter, which expressions use as :name", rulefields.begin_parameter
        add_parameter = parts.make_button(
            "Add parameter", lambda: self._change(None, begin), hint, "lookback-add-parameter"
        )
        windows = row(*(of[name] for name in of if name.startswith("window.")), name="lookback-window")
        first = [row(of["rule_id"], of["stream"], of["severity"]), of["description"], self._fields, of["group_by"]]
        window = [heading("Window"), row(of["kind"], windows), self._sequence_note]
        measures = [heading("Measures"), self._rows["measures"].widget, self._new_measure, of["when"]]
        parameters = [heading("Parameters"), self._rows["parameters"].widget, row(add_parameter)]
        alert = [heading("Alert"), of["message"], row(of["suppress"], self._opens_rare)]
        rows = [["entities", "score"], ["tags"], ["references"], ["runbook"], ["late", "allowed_lateness"]]
        rows += [["effective_from", "effective_until"], list(_FLAGS)]
        self._rare_places = [self._places[name] for names in rows for name in names]
        self._rare.children = [row(*(of[name] for name in names)) if names[1:] else of[names[0]] for names in rows]
        return parts.make_column(*first, of["where"], *window, *measures, *parameters, *alert, self._rare)

    def _add(
        self,
        place: str,
        control: Any,
        read: Callable[[Mapping[str, Any]], _Shown],
        put: Callable[[RuleText, Any], RuleText],
    ) -> None:
        """Adds a field, with a function that reads its value from a document, and one that changes the text."""
        self._places[place] = FormPlace(
            place, control, lambda each: self._change(each, lambda text: put(text, each.control.value))
        )
        self._readers[place] = read

    def _add_values(self) -> None:
        for name, (title, hint) in _VALUES.items():
            control = make_area(title, hint, 2) if name in _LONG else _make_text_field(title, hint, layout=_SHORT)
            self._add(name, control, partial(_read, rulefields.read_value, name), partial(rulefields.put_value, name))
        for name, (title, hint) in _WORDS.items():
            control = _make_text_field(title, hint, layout=parts.WIDE)
            self._add(name, control, partial(_read, rulefields.read_words, name), partial(rulefields.put_words, name))
        for name, (title, hint, known) in _CHOICES.items():
            read = partial(_read_choice, name, known)
            self._add(name, _make_dropdown(title, hint), read, partial(rulefields.put_value, name))
        for name, (title, hint, default) in _FLAGS.items():
            control = parts.make_field(ipywidgets.Checkbox, title, hint, indent=False)
            put = partial(rulefields.put_flag, name, default=default)
            self._add(name, control, partial(_read_flag, name, default), put)

    def _add_keys(self) -> None:
        stream = _make_dropdown("Stream", "The stream whose events the rule judges")
        self._add("stream", stream, self._read_stream, lambda text, value: text.put(["stream"], value))
        hint = "The fields that make the key; Ctrl and Space add one"
        group_by = parts.make_list(ipywidgets.SelectMultiple, "Group by", hint, 5)
        self._add("group_by", group_by, self._read_group_by, rulefields.put_group_by)
        hint = "Whom the alerts are about: fields of the event, and of group_by if the rule has windows of the clock or sessions"
        entities = parts.make_list(ipywidgets.SelectMultiple, "Entities", hint, 5)
        self._add("entities", entities, self._read_entities, rulefields.put_entities)
        kind = _make_dropdown("Kind", "How events are combined: not at all, by a window, or as steps in order")
        self._add("kind", kind, _read_kind, rulefields.choose_kind)

    def _add_part(self, key: str) -> None:
        hint = f"A duration such as 24 hours: `{key}` of the window"
        control = _make_text_field(key.capitalize(), hint, layout={"width": "220px"})

        def read(document: Mapping[str, Any]) -> _Shown:
            window = rulefields.read_window(document)
            return window.parts.get(key, ""), window.is_whole

        def put(text: RuleText, value: str) -> RuleText:
            return rulefields.put_window(text, {**rulefields.read_window(text.document).parts, key: value})

        self._add(f"window.{key}", control, read, put)

    def _begin_measure(self) -> None:
        aggregate, name = self._aggregate.value, self._argument.value or ""
        self._change(None, lambda text: rulefields.begin_measure(text, aggregate, name))

    def _find_stream(self) -> Stream | None:
        return self._streams.get(str(self._text.get("stream"))) if self._text is not None else None

    def _list_fields(self) -> Mapping[str, Any]:
        stream = self._find_stream()
        return {} if stream is None else stream.fields

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
        fields = ", ".join(f"{name} {type_}" for name, type_ in self._list_fields().items())
        self._fields.value = parts.clean_text(f"Fields: {fields}")
        for name, place in self._places.items():
            if place is not but:
                place.show(*self._readers[name](document))
        self._rows["measures"].show(rulefields.read_measures(document), but)
        self._rows["parameters"].show(rulefields.read_parameters(document), but)
        kind = rulefields.read_window(document).kind
        is_sequence, has_window = kind == SEQUENCE, kind in WINDOW_FORMS
        for name, place in self._places.items():
            if (key := name.removeprefix("window.")) != name:
                _display(place.widget, has_window and key in WINDOW_FORMS[kind])
        for widget in (self._rows["measures"].widget, self._new_measure):
            _display(widget, has_window)
        _display(self._places["when"].widget, not is_sequence)
        _display(self._sequence_note, is_sequence)

    def _read_stream(self, document: Mapping[str, Any]) -> _Shown:
        named = rulefields.read_value(document, "stream")
        return named.value, named.is_whole, _with_unknown(self._streams, named.value)

    def _read_group_by(self, document: Mapping[str, Any]) -> _Shown:
        entries = rulefields.read_group_by(document)
        return self._offer_fields(None if entries is None else tuple(entries), document)

    def _read_entities(self, document: Mapping[str, Any]) -> _Shown:
        return self._offer_fields(rulefields.read_entities(document), document)

    def _offer_fields(self, chosen: Sequence[str] | None, document: Mapping[str, Any]) -> _Shown:
        fields, entries = self._list_fields(), rulefields.read_group_by(document) or {}
        expressions = {name: text for name, text in entries.items() if text}
        unknown = [name for name in chosen or () if name not in fields and name not in expressions]
        options = [(f"{name} ({type_})", name) for name, type_ in fields.items()]
        options += [(parts.clean_text(f"{name} ({text})", 120), name) for name, text in expressions.items()]
        options += [(parts.clean_text(f"{name} (not a field of the stream)", 120), name) for name in unknown]
        return chosen or (), chosen is not None, options

    def _list_places(self) -> dict[str, FormPlace]:
        """Maps places of the document to the fields that show their problems."""
        places = {**self._places, "window": self._places["kind"], "entity": self._places["entities"]}
        if self._text is not None and not isinstance(self._text.get("window"), Mapping):
            places["window"] = self._places["window.lookback"]
        for key, rows in self._rows.items():
            for row in rows.rows:
                places |= {f"{key}.{row.key}{suffix}": row.places[part] for suffix, part in _PROBLEMS[key].items()}
        return places

    def _list_all(self) -> Iterator[FormPlace]:
        """Lists each field once."""
        yield from self._places.values()
        yield from (place for rows in self._rows.values() for row in rows.all for place in row.places.values())

    def tell(self, problems: Sequence[RuleFinding]) -> None:
        """Shows each problem below its field."""
        places = self._list_places()
        by_place: dict[int, list[str]] = {}
        for each in problems:
            near = places.get(find_nearest_place(each.place, places))
            by_place.setdefault(id(near), []).append(each.message)
        for place in self._list_all():
            place.tell(by_place.get(id(place), []))
        if any(id(place) in by_place for place in self._rare_places):
            self._opens_rare.value = True

    def disable(self) -> None:
        """Disables all fields while the YAML is invalid."""
        for place in self._list_all():
            place.control.disabled = True


@dataclass
class _FormRow:
    """The fields of a measure or a parameter in one row. `key` is its name in the document."""

    places: dict[str, FormPlace]
    widget: Any
    key: str = ""


class _Rows:
    """Rows of fields, one per measure or parameter, in a column `widget`. `all` has unused rows behind those shown."""

    def __init__(self, key: str, change: _Change) -> None:
        self._key, self._change = key, change
        self.all: list[_FormRow] = []
        self.rows: list[_FormRow] = []
        self.widget = parts.make_column()

    def _make_row(self) -> _FormRow:
        row = _FormRow({}, parts.make_row(name="lookback-form-row"))
        for part, (title, hint, width) in _ROWS[self._key].items():
            control = _make_text_field(title, hint, f"lookback-{self._key[:-1]}-{part}", layout={"width": width})
            row.places[part] = FormPlace(self._key, control, partial(self._put, row, part))
        remove = parts.make_button(
            "Remove",
            lambda: self._change(None, lambda text: text.remove([self._key, row.key])),
            f"Remove this row of {self._key}",
            f"lookback-remove-{self._key}",
        )
        row.widget.children = [*(place.widget for place in row.places.values()), remove]
        return row

    def _put(self, row: _FormRow, part: str, place: FormPlace) -> None:
        def change(text: RuleText) -> RuleText:
            value = place.control.value
            if part != "name":
                return rulefields.put_part(text, [self._key, row.key], part, value)
            renamed = rulefields.rename(text, [self._key, row.key], value)
            row.key = value
            return renamed

        self._change(place, change)

    def show(self, wanted: Sequence[Any], but: FormPlace | None) -> None:
        """Shows a row for each measure or parameter, except in the field `but`."""
        self.all += [self._make_row() for _ in range(len(wanted) - len(self.all))]
        self.rows = self.all[: len(wanted)]
        for row, each in zip(self.rows, wanted, strict=True):
            row.key = each.name
            for part, place in row.places.items():
                if place is not but:
                    place.show(getattr(each, part), each.is_whole or part == "name")
        self.widget.children = [row.widget for row in self.rows]


def _read(read: Callable[..., rulefields.ValueField], name: str, document: Mapping[str, Any]) -> _Shown:
    found = read(document, name)
    return found.value, found.is_whole


def _read_choice(name: str, known: Iterable[str], document: Mapping[str, Any]) -> _Shown:
    """Reads an optional key with its options, which include its current value."""
    read = rulefields.read_value(document, name)
    names = [each for each in _with_unknown(known, read.value) if each]
    return read.value, read.is_whole, [("(default)", ""), *((parts.clean_text(each, 120), each) for each in names)]


def _read_flag(name: str, default: bool, document: Mapping[str, Any]) -> _Shown:
    value = document.get(name, default)
    return value is True, isinstance(value, bool)


def _read_kind(document: Mapping[str, Any]) -> _Shown:
    return rulefields.read_window(document).kind, True, rulefields.KINDS


def _display(widget: Any, is_shown: bool) -> None:
    widget.layout.display = "" if is_shown else "none"


def make_area(title: str, hint: str, lines: int) -> Any:
    """Makes a multi-line text field, which shows its hint while it is empty."""
    how = {"rows": lines, "layout": parts.WIDE, "placeholder": hint}
    return parts.make_field(ipywidgets.Textarea, title, hint, continuous_update=True, **how)


def _make_text_field(title: str, hint: str, *classes: str, layout: Any) -> Any:
    """Makes a short text field that is checked as you type, and shows its hint while it is empty."""
    how = {"layout": layout, "placeholder": hint}
    return parts.make_field(ipywidgets.Text, title, hint, *classes, continuous_update=True, **how)


def _make_dropdown(title: str, hint: str, name: str = "", options: Sequence[str] = ()) -> Any:
    chosen = {"value": options[0]} if options else {}
    names = filter(None, [name])
    return parts.make_field(ipywidgets.Dropdown, title, hint, *names, options=list(options), layout=_SHORT, **chosen)


def _with_unknown(known: Iterable[str], value: str) -> list[str]:
    """Lists the options of a key, plus its current value if that is not among them."""
    names = list(known)
    return names if value in names else [*names, value]
