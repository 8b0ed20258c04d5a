"""The limits of a rule, in one table; a stream can set them under `limits`.

They bound the cost of one rule to the others: memory and time per event, state, and the work of reading the rule. A rule
that needs more is refused with the name of the limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Annotated, Any, get_type_hints

from pydantic_core import CoreSchema, core_schema

from lookback.core.errors import DurationError, show_value
from lookback.core.values.durations import MAX_DURATION_US, MICROSECONDS, format_duration, parse_duration
from lookback.core.values.reading import read_mapping

_DAY = MICROSECONDS["day"]
# Levels of lists and mappings in a document; the deepest useful one is an array in an event of a rule's test.
MAX_NESTING = 20


def is_too_deep(document: object) -> bool:
    """Returns whether a document is nested deeper than MAX_NESTING levels, as one that contains itself is."""
    # Level by level, with each part of a level once: aliases of YAML can make a small text endless.
    level: list[Any] = [document] if isinstance(document, (Mapping, list, tuple)) else []
    for _ in range(MAX_NESTING):
        parts = (part for outer in level for part in (outer.values() if isinstance(outer, Mapping) else outer))
        level = list({id(part): part for part in parts if isinstance(part, (Mapping, list, tuple))}.values())
    return bool(level)


@dataclass(frozen=True)
class Limit:
    """One limit: its meaning, and the range in which a stream can set it, in microseconds if it is a duration."""

    about: str
    least: int
    most: int
    is_duration: bool = False

    def read(self, value: object) -> int:
        """Reads the value that a stream sets. Raises ValueError if it has another type or is out of the range."""
        kind, number = ("a duration", None) if self.is_duration else ("a whole number", value)
        if self.is_duration:
            with suppress(DurationError):
                number = parse_duration(value)
        if not isinstance(number, int) or isinstance(number, bool) or not self.least <= number <= self.most:
            bounds = f"from {self.format_value(self.least)} to {self.format_value(self.most)}"
            raise ValueError(f"{kind} {bounds} is needed, got {show_value(value)}")
        return number

    def format_value(self, value: int) -> str:
        """Writes the value as a person would."""
        return format_duration(value) if self.is_duration else f"{value:,}"

    def __get_pydantic_core_schema__(self, *_: object) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.read)


@dataclass(frozen=True)
class Limits:
    """The limits of one stream; durations are in microseconds.

    The upper end of each range is what the engine can bear: the stack of its parser, or the data that it holds in memory.
    """

    document_bytes: Annotated[
        int, Limit("bytes of a rule's document as JSON, its tests included", 1_000, 1_000_000)
    ] = 500_000
    expression_characters: Annotated[int, Limit("characters of one condition or measure", 100, 100_000)] = 100_000
    expression_levels: Annotated[int, Limit("levels of parentheses, calls and operators in one of them", 5, 100)] = 100
    alternatives: Annotated[int, Limit("values in the list of an `in`", 1, 10_000)] = 10_000
    measures: Annotated[int, Limit("measures of a rule", 1, 500)] = 50
    steps: Annotated[int, Limit("steps of a sequence", 1, 100)] = 20
    window: Annotated[
        int, Limit("the longest window with its delay, and the longest `within`", 1, MAX_DURATION_US, is_duration=True)
    ] = 3_660 * _DAY
    rules: Annotated[int, Limit("rules of the stream that are shadow, active or paused at a time", 1, 10_000)] = 10_000

    @classmethod
    def from_dict(cls, document: object) -> Limits:
        """Reads the limits that a mapping sets. Raises Refused with every problem."""
        if not isinstance(document, Mapping):
            raise ValueError(f"a mapping of limit to number is needed, got {show_value(document)}")
        return read_mapping(cls, document, unknown="unknown limit")

    def to_dict(self) -> dict[str, Any]:
        """Returns the limits as a mapping, durations as texts."""
        return {
            key: format_duration(value) if LIMITS[key].is_duration else value for key, value in asdict(self).items()
        }


LIMITS: dict[str, Limit] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(Limits, include_extras=True).items()
}
DEFAULT_LIMITS = Limits()
# For documents that were accepted when the stream had other limits.
WIDEST_LIMITS = Limits(**{name: limit.most for name, limit in LIMITS.items()})


def name_limit(message: str, limit: str) -> str:
    """Appends the name of the limit to a message such as `60 measures are more than 50`."""
    return f"{message} (limits.{limit} of the stream)"
