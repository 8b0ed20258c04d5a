"""Which rules the engine takes out of service: those that fail too often, and those whose judging itself breaks.

An error that SQL knows (overflow, division by zero, a cast) costs one event its verdict. Anything else that is raised
while one rule is judged is a defect: that rule stops, alone, and its next version begins anew.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from lookback.core.errors import StateError, StoreFailed
from lookback.core.streams.alerts import Failure

# The machine's trouble or the state's, and no rule's: the batch fails and is repeated.
NOT_THE_RULES = (MemoryError, StateError, StoreFailed)
# Who publishes what the engine decides.
AUTHOR = "lookback"
_MOST_TEXT = 300
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f]+")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")


@dataclass(frozen=True)
class Quarantine:
    """A version of a rule that is to be taken out of service, and why."""

    rule_id: str
    version: int
    comment: str


def find_quarantines(failures: Iterable[Failure], max_failures: int) -> list[Quarantine]:
    """The versions that have failed too often in a batch, or broke. failures: of all shards, one per rule and version."""
    found = []
    for failure in failures:
        if failure.reason:
            comment = f"{failure.reason}, at commit {failure.first_arrival[0]}"
        elif failure.count > max_failures:
            comment = (
                f"{failure.count:,} events of one batch could not be judged (overflow, division by zero or a cast), more "
                f"than max_failures, {max_failures:,}; the first is {_line(failure.first_event_id)}"
            )
        else:
            continue
        found.append(Quarantine(failure.rule_id, failure.version, f"{comment}; mend the rule and push it again"))
    return found


def describe_error(error: Exception) -> str:
    """An unexpected exception in one line: its type, its text and where it was raised; the same whenever it is repeated."""
    place, at = "", error.__traceback__
    while at is not None:
        place = f" ({at.tb_frame.f_code.co_filename.rpartition('/')[2]}:{at.tb_lineno})"
        at = at.tb_next
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - whatever it is, it must not take others along
        text = "its text cannot be had"
    return f"{type(error).__name__}: {_line(_ADDRESS.sub('0x', text))}{place}"


def failure_text(failure: Failure) -> str:
    """What rule_log says of errors while judging."""
    told = []
    if failure.reason:
        told.append(
            f"judging the rule broke with {failure.reason}; what it would have said of these events is dropped, and this "
            "version is judged no more where it broke"
        )
    if failure.count:
        events = "1 event" if failure.count == 1 else f"{failure.count} events"
        told.append(
            f"{events} could not be judged (overflow, division by zero or a cast); the first is {failure.first_event_id}"
        )
    return "; ".join(told)


def _line(text: str) -> str:
    """A text of any origin as it can stand in a table: one line, not too long, no half of a surrogate pair."""
    text = _UNPRINTABLE.sub(" ", text).encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _MOST_TEXT else f"{text[: _MOST_TEXT - 3]}..."
