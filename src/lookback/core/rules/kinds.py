"""The kinds of values in a rule document: how pydantic reads each of them, and how editors describe and check it.

A mapping of a document is a dataclass, a form. Its docstring describes the keys, for us and for editors:

    class SequenceForm:
        \"\"\"Steps that have to follow one another.

        within: The time that the steps have, from the first event to the last.
        \"\"\"

        within: Span = key(1, "10 minutes", missing="write the time that the steps have")

The default of a field also stands in for a wrong value, so that the rest can be checked.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, TypeVar, get_type_hints

from pydantic import ValidationInfo
from pydantic_core import CoreSchema, core_schema

from lookback.core.errors import DurationError, Problem
from lookback.core.expressions.syntax import MAX_CHARACTERS
from lookback.core.rules.parameters import NAME, Parameters
from lookback.core.rules.problems import describe_unknown_key, quote_value
from lookback.core.values.durations import MICROSECONDS, format_duration, parse_duration
from lookback.core.values.limits import Limits, name_limit
from lookback.core.values.reading import Refused, read_partly
from lookback.core.values.suggestions import suggest
from lookback.core.values.times import parse_calendar_time

T = TypeVar("T")
Schema = dict[str, Any]
NAMES: Schema = {"pattern": f"^{NAME.pattern}$", "patternErrorMessage": "use letters, digits and _, no digit first"}
# The most events that one step can need.
MAX_EVENTS = 2**31 - 1
_MARKER = rf":{NAME.pattern}"
_CLOCK = r"[0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]{1,6})?)?"
_DESCRIBED = re.compile(r"^(\w+): (.*(?:\n +.*)*)", re.MULTILINE)


@dataclass(frozen=True)
class Reading:
    """What the values of one document depend on. score: the one that its severity stands for."""

    parameters: Parameters
    limits: Limits
    score: int = 0

    def fill(self, value: object) -> object:
        """Returns the value of the parameter if `value` is `:name`, else `value`. Raises ValueError for an unknown one."""
        if message := self.parameters.find_unknown(value):
            raise ValueError(message)
        return self.parameters.fill_value(value)

    def fill_expression(self, text: str) -> str:
        """Writes the values of parameters into an expression. Raises Refused, with the expression, for unknown ones."""
        filled, unknown = self.parameters.fill_expression(text)
        return settle(filled, [Problem("", message) for message in unknown])


@dataclass(frozen=True)
class Kind:
    """The annotation of a field. about: what the descriptions of its keys end with."""

    read: Callable[[Any, Reading], Any]
    schema: Mapping[str, Any]
    about: str = ""

    def __get_pydantic_core_schema__(self, *_: object) -> CoreSchema:
        return core_schema.with_info_plain_validator_function(self._read_found)

    def _read_found(self, value: object, info: ValidationInfo[Reading]) -> Any:
        return self.read(value, info.context)


def key(value: Any, *examples: Any, missing: str = "", **schema: Any) -> Any:
    """Declares a key of a form.

    Args:
        value: The default, or what makes it; fields of the latter kind are not compared.
        examples: What editors suggest.
        missing: The remedy if the document has no value; empty for an optional key.
        schema: More of the JSON schema.
    """
    metadata = {"examples": examples, "missing": missing, "more": schema}
    if callable(value):
        return field(default_factory=value, compare=False, metadata=metadata)
    return field(default=value, metadata=metadata)


@functools.cache
def _list_keys(cls: type) -> Mapping[str, tuple[Kind, Mapping[str, Any]]]:
    """Lists the keys of a form with their kinds and what `key` has declared."""
    hints = get_type_hints(cls, include_extras=True)
    declared = [each for each in fields(cls) if each.metadata]
    return {each.name: (hints[each.name].__metadata__[0], each.metadata) for each in declared}


def list_keys(cls: type) -> tuple[str, ...]:
    """Returns the keys of a form, in order."""
    return tuple(_list_keys(cls))


def make_schema(cls: type, keys: Iterable[str] = (), description: str = "") -> Schema:
    """Builds the JSON Schema of a form, or of a kind of it that has some of the keys."""
    docstring = inspect.getdoc(cls) or ""
    described = {name: " ".join(text.split()) for name, text in _DESCRIBED.findall(docstring)}
    declared, properties = _list_keys(cls), {}
    for name in keys or declared:
        kind, more = declared[name]
        about = f"{described.get(name, '')} {kind.about}".strip()
        schema = {"description": about, **copy.deepcopy(dict(kind.schema)), **more["more"]}
        if more["examples"]:
            schema["examples"] = list(more["examples"])
        if "patternErrorMessage" in schema:
            schema["patternErrorMessage"] = schema["patternErrorMessage"].format(*more["examples"][:1])
        properties[name] = schema
    return {
        "description": description or docstring.partition("\n")[0],
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if declared[name][1]["missing"]],
        "additionalProperties": False,
    }


def read_form(
    cls: type[T],
    document: Mapping[Any, Any],
    reading: Reading,
    keys: Iterable[str] = (),
    explain: Callable[[Any], str | None] = lambda _: None,
) -> tuple[T, list[Problem]]:
    """Reads as much of a mapping as it can, and returns it with every problem.

    keys: those of this kind of the form; by default all. explain: returns why the mapping cannot have a key; None if no
    kind of the form has it.
    """
    declared: type = cls
    problems, values, form = [], {}, dict(_list_keys(declared))
    form = {name: form[name] for name in keys} or form
    for name in document:
        if name not in form:
            place = name if isinstance(name, str) else quote_value(name)
            problems.append(Problem(place, explain(name) or describe_unknown_key(name, form)))
    for name, (_, more) in form.items():
        if more["missing"] and document.get(name) is None:
            problems.append(Problem(name, f"is missing; {more['missing']}"))
        elif name in document:
            values[name] = document[name]
    read, wrong = read_partly(cls, values, reading)
    return read, problems + wrong


def settle(value: T, problems: list[Problem]) -> T:
    """Returns the value if it has no problems. Raises Refused, with the value, if it has some."""
    if problems:
        raise Refused(problems, value)
    return value


def refuse(message: str) -> Schema:
    """Builds the schema of a key that cannot stand where it does; editors do not suggest it."""
    return {"not": {}, "errorMessage": message, "doNotSuggest": True}


def is_blank(value: object) -> bool:
    """Returns whether a value is not a text with at least one visible character."""
    return not (isinstance(value, str) and value.strip())


def find_long_span(span: int, limits: Limits, place: str = "") -> list[Problem]:
    """Finds whether a window looks back too far: its state would be kept for as long."""
    if span <= limits.window:
        return []
    message = f"{format_duration(span)} is longer than {format_duration(limits.window)}; write at most that"
    return [Problem(place, name_limit(message, "window"))]


# How values are read. Plain validators ignore what only editors use: `errorMessage`, `patternErrorMessage`, `doNotSuggest`.


def read_text(value: Any, _: Reading) -> str:
    """Reads a text; one without a value is empty."""
    if value is not None and not isinstance(value, str):
        raise ValueError(f"must be a text, got {quote_value(value)}; put it in quotes")
    return value or ""


def visible_text(remedy: str) -> Kind:
    """A text with a visible character. remedy: what to do about a blank one."""

    def read(value: Any, reading: Reading) -> str:
        text = read_text(value, reading)
        if value is not None and is_blank(text):
            raise ValueError(f"is blank; {remedy}")
        return text

    return Kind(read, {"type": "string", "pattern": r"\S"})


def expression(remedy: str) -> Kind:
    """An expression of Spark SQL, in which parameters are filled in. remedy: what to do about a blank one."""
    text = visible_text(remedy)
    more = {"patternErrorMessage": "write an expression, such as {}", "maxLength": MAX_CHARACTERS}
    about = f"Spark SQL, in quotes; at most {MAX_CHARACTERS:,} characters."
    return Kind(
        lambda value, reading: reading.fill_expression(text.read(value, reading)), {**text.schema, **more}, about
    )


def condition(wrong: str) -> Kind:
    """A condition of a sequence. wrong: the message for a blank one, with {} for the value."""

    def read(value: Any, reading: Reading) -> str:
        if is_blank(value):
            raise ValueError(wrong.format(quote_value(value)))
        return reading.fill_expression(value)

    plain = expression("")
    return Kind(read, plain.schema, plain.about)


def _span(*, zero: bool = False) -> Kind:
    """A duration in microseconds. zero: whether it may be 0."""

    def read(value: Any, reading: Reading) -> int:
        value = reading.fill(value)
        try:
            span = parse_duration(value)
        except DurationError as error:
            raise ValueError(str(error).replace(repr(value), quote_value(value))) from None
        if span == 0 and not zero:
            raise ValueError(f"must be longer than 0 s, got {quote_value(value)}")
        return span

    count, least = ("[0-9]{1,19}", "") if zero else ("0*[1-9][0-9]{0,18}", ", longer than 0")
    message = (
        "write an integer, a space and a unit, such as '{}', or the name of a parameter, such as ':span'; "
        "months and years have no fixed length, write days"
    )
    pattern = rf"^\s*({count}\s+({'|'.join(MICROSECONDS)})s?|{_MARKER})\s*$"
    about = f"A duration{least}: an integer, a space and microseconds ... weeks."
    return Kind(read, {"type": "string", "pattern": pattern, "patternErrorMessage": message}, about)


def _read_time(value: Any, _: Reading) -> int | None:
    try:
        return None if value is None else parse_calendar_time(value)
    except ValueError:
        raise ValueError(f"must be a time such as '2026-01-31T12:00:00Z', got {quote_value(value)}") from None


def choice(choices: tuple[str, ...]) -> Kind:
    """One of some words."""

    def read(value: Any, _: Reading) -> str:
        if value in choices:
            return str(value)
        hint = suggest(value, choices, "")
        message = f"must be one of {', '.join(choices)}, got {quote_value(value)}"
        raise ValueError(f"{message}; {hint}" if hint else message)

    return Kind(read, {"enum": list(choices)})


def _read_flag(value: Any, _: Reading) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, got {quote_value(value)}")
    return value


def _read_count(value: Any, reading: Reading) -> int:
    value = reading.fill(value)
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_EVENTS:
        return value
    raise ValueError(f"must be a whole number from 1 to {MAX_EVENTS:,}, got {quote_value(value)}")


def check_name(value: object) -> str | None:
    """Returns the message for what is not the name of a parameter, a measure or a step; None for a name."""
    if isinstance(value, str) and NAME.fullmatch(value):
        return None
    if isinstance(value, bool):
        word = quote_value(value)
        return f"{word} is not a name; YAML reads on, off, yes and no without quotes as true and false; write 'on' with them"
    return f"{quote_value(value)} is not a name; use letters, digits and _, no digit first, at most 128 in all"


def _read_name(value: Any, _: Reading) -> Any:
    if message := check_name(value):
        raise ValueError(message)
    return value


Anything = Annotated[Any, Kind(lambda value, _: value, {})]
Text = Annotated[str, Kind(read_text, {"type": "string"})]
Name = Annotated[
    str,
    Kind(
        _read_name,
        {"type": "string", **NAMES, "patternErrorMessage": f"{NAMES['patternErrorMessage']}, such as {{}}"},
        "Letters, digits and _, no digit first.",
    ),
]
Flag = Annotated[bool, Kind(_read_flag, {"type": "boolean"})]
Time = Annotated[
    int | None,
    Kind(
        _read_time,
        {
            "type": ["string", "integer"],
            "pattern": rf"^\s*[0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}}([T ]{_CLOCK}([Zz]|[+-][0-9]{{2}}:[0-9]{{2}})?)?\s*$",
            "patternErrorMessage": "write a time such as '{}'",
        },
        "ISO 8601 in quotes, UTC without a zone; or integer microseconds since 1970.",
    ),
]
COUNT = Kind(
    _read_count,
    {
        "type": ["integer", "string"],
        "minimum": 1,
        "maximum": MAX_EVENTS,
        "pattern": rf"^\s*{_MARKER}\s*$",
        "patternErrorMessage": "write a whole number, or the name of a parameter, such as ':least'",
    },
)
SPAN, WAIT = _span(), _span(zero=True)
Count = Annotated[int, COUNT]
Span = Annotated[int, SPAN]
Wait = Annotated[int, WAIT]
