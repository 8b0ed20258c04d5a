"""The limits of a rule, in one table; a stream can set them under `limits`.

They bound the cost of one rule to the others: memory and time per event, state, and the work of reading the rule. A rule
that needs more is refused with the name of the limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lookback.core.errors import DurationError
from lookback.core.values.durations import MAX_DURATION_US, MICROSECONDS, format_duration, parse_duration
from lookback.core.values.suggestions import suggest

_DAY = MICROSECONDS["day"]


@dataclass(frozen=True)
class Limit:
    """What one number limits, and the range in which a stream can set it; microseconds if it is a duration."""

    about: str
    least: int
    most: int
    is_duration: bool = False

    def format_value(self, value: int) -> str:
        """Writes the value as a person would."""
        return format_duration(value) if self.is_duration else f"{value:,}"


@dataclass(frozen=True)
class Limits:
    """The limits of one stream, described in `LIMITS`; durations are in microseconds."""

    document_bytes: int = 100_000
    expression_characters: int = 10_000
    expression_levels: int = 100
    alternatives: int = 1_000
    measures: int = 50
    steps: int = 20
    window: int = 3_660 * _DAY
    rules: int = 2_000

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> tuple[Limits, dict[str, str]]:
        """Reads the limits that a mapping sets. Returns them, and the problems by key."""
        values: dict[str, int] = {}
        wrong: dict[str, str] = {}
        for key, value in document.items():
            limit = LIMITS.get(key)
            if limit is None:
                hint = suggest(key, LIMITS)
                wrong[str(key)] = f"unknown limit {key!r:.100}; {hint}"
                continue
            number = _read_number(limit, value)
            if number is None or not limit.least <= number <= limit.most:
                kind = "a duration" if limit.is_duration else "a whole number"
                wrong[key] = (
                    f"{kind} from {limit.format_value(limit.least)} to {limit.format_value(limit.most)} is needed, got {value!r:.100}"
                )
                continue
            values[key] = number
        return cls(**values), wrong

    def to_dict(self) -> dict[str, Any]:
        """Returns the limits as a mapping, durations as texts."""
        return {
            key: format_duration(value) if LIMITS[key].is_duration else value for key, value in asdict(self).items()
        }


# `most` is what the engine can bear: the stack of its parser, or the data that it holds in memory.
LIMITS: dict[str, Limit] = {
    "document_bytes": Limit("bytes of a rule's document as JSON, its tests included", 1_000, 1_000_000),
    "expression_characters": Limit("characters of one condition or measure", 100, 10_000),
    "expression_levels": Limit("levels of parentheses, calls and operators in one of them", 5, 100),
    "alternatives": Limit("values in the list of an `in`", 1, 5_000),
    "measures": Limit("measures of a rule", 1, 500),
    "steps": Limit("steps of a sequence", 1, 100),
    "window": Limit(
        "the longest window with its delay, and the longest `within`", 1, MAX_DURATION_US, is_duration=True
    ),
    "rules": Limit("rules of the stream that are shadow, active or paused at a time", 1, 4_000),
}
DEFAULT_LIMITS = Limits()
# For documents that were accepted when the stream had other limits.
WIDEST_LIMITS = Limits(**{name: limit.most for name, limit in LIMITS.items()})


def name_limit(message: str, limit: str) -> str:
    """Appends the name of the limit to a message such as `60 measures are more than 50`."""
    return f"{message} (limits.{limit} of the stream)"


def _read_number(limit: Limit, value: object) -> int | None:
    if limit.is_duration:
        try:
            return parse_duration(value)
        except DurationError:
            return None
    return value if isinstance(value, int) and not isinstance(value, bool) else None
