"""The errors that Lookback raises on purpose.

    LookbackError
    ├── DurationError      a text that is not a duration
    ├── TypeNameError      a text that is not a column type
    ├── ExpressionError    an expression that is refused; .problems lists every reason
    ├── StreamError        a stream declaration that is refused; .problems
    ├── RuleError          a rule document that is refused; .problems
    ├── EventError         rows given to the harness or to replay that cannot be events
    ├── StateError         window state that this release cannot read
    ├── ReviewError        an unknown alert, an invalid disposition or history that was removed
    ├── RemoteError        a workspace that refuses, is incomplete or does not answer
    └── SetupError         tables, files, settings or the machine are not as needed

    StoreFailed            the state store failed; not the caller's fault, so not a LookbackError

A message names the place, the value found and the remedy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class LookbackError(Exception):
    """The base of all errors that Lookback raises on purpose; the message tells the user what to do."""


class DurationError(LookbackError, ValueError):
    """A text that is not a duration of fixed length."""


class TypeNameError(LookbackError, ValueError):
    """A text that does not name a supported column type."""


def show_value(value: object) -> str:
    """Formats a caller's value for a message, at most 100 characters of it; only its type if it has no text."""
    try:
        return f"{value!r:.100}"
    except Exception:  # noqa: BLE001 - such as a time beyond the calendar, or lists nested 5,000 deep
        return f"a {type(value).__name__}"


@dataclass(frozen=True)
class Problem:
    """One problem of a document: `place` is a dotted path in it, `message` tells what to do.

    A message that begins with `must` or `is` takes the place as its subject.
    """

    place: str
    message: str

    @property
    def sentence(self) -> str:
        """The message with its subject, if the place is that."""
        is_subject = bool(self.place) and self.message.startswith(("must ", "is "))
        return f"{self.place} {self.message}" if is_subject else self.message

    def __str__(self) -> str:
        return f"{self.sentence} ({self.place})" if self.place else self.message


class ExpressionError(LookbackError, ValueError):
    """An expression that is not allowed or does not fit the fields; `.problems` lists sentences."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        super().__init__("; ".join(self.problems))


class _DocumentError(LookbackError, ValueError):
    kind = "Document"

    def __init__(self, name: str, problems: Iterable[Problem], version: int | None = None) -> None:
        self.name = name
        self.version = version
        self.problems = list(problems)
        label = f"{self.kind} {name!r}" + ("" if version is None else f" v{version}")
        super().__init__("\n".join(f"{label}: {problem}" for problem in self.problems))


class StreamError(_DocumentError):
    """A stream declaration that cannot be used; `.problems` lists every problem with its place."""

    kind = "Stream"


class RuleError(_DocumentError):
    """A rule document that cannot be used; `.problems` lists every problem with its place."""

    kind = "Rule"


class EventError(LookbackError, ValueError):
    """Rows that cannot be events of the stream they were given to."""


class StateError(LookbackError):
    """Window state that this release cannot read; the message tells how to continue."""


class ReviewError(LookbackError, ValueError):
    """An unknown alert, an invalid disposition, or history that was removed."""


class RemoteError(LookbackError):
    """A workspace that refuses, is incomplete or does not answer; the message tells what to do."""


class SetupError(LookbackError):
    """Tables, files, settings or the machine are not as needed; the message tells what to run."""


class StoreFailed(Exception):
    """The store of a shard's state failed: a fault of the platform, not of the caller."""
