"""Decides which rules the engine takes out of service: those that fail too often, and those that break while judged.

An error that SQL knows (overflow, division by zero, a cast) costs one event its verdict. Any other exception while a rule
is judged is a defect: only that rule stops, and its next version starts afresh.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from lookback.core.errors import StateError, StoreFailed
from lookback.core.streams.alerts import Failure
from lookback.core.values.texts import cut_end, to_one_line

# Caused by the machine or the state and not by a rule: the batch fails and is repeated.
NOT_THE_RULES = (MemoryError, StateError, StoreFailed)
# The author of the rows of the rules table that the engine writes.
AUTHOR = "lookback"
_MAX_TEXT_CHARACTERS = 300
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")


@dataclass(frozen=True)
class Quarantine:
    """A version of a rule to take out of service, and why."""

    rule_id: str
    version: int
    comment: str


def find_quarantines(failures: Iterable[Failure], max_failures: int) -> list[Quarantine]:
    """Returns the versions that failed too often in a batch, or broke. failures: one per rule and version, of all shards."""
    quarantines = []
    for failure in failures:
        if failure.reason:
            comment = f"{failure.reason}, at commit {failure.first_arrival[0]}"
        elif failure.count > max_failures:
            comment = (
                f"{failure.count:,} events of one batch could not be judged (overflow, division by zero or a cast), more "
                f"than max_failures, {max_failures:,}; rule_log names the first"
            )
        else:
            continue
        quarantines.append(Quarantine(failure.rule_id, failure.version, f"{comment}; mend the rule and push it again"))
    return quarantines


def describe_error(error: Exception) -> str:
    """Describes an unexpected exception on one line: its type, its text and where it was raised.

    A repetition gives the same text: addresses in memory are left out.
    """
    place, at = "", error.__traceback__
    while at is not None:
        place = f" ({at.tb_frame.f_code.co_filename.rpartition('/')[2]}:{at.tb_lineno})"
        at = at.tb_next
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - an error without a text must not stop other rules
        text = "its text cannot be had"
    return f"{type(error).__name__}: {_shorten(_ADDRESS.sub('0x', text))}{place}"


def describe_failure(failure: Failure) -> str:
    """Returns the message of rule_log for errors while judging."""
    sentences = []
    if failure.reason:
        sentences.append(
            f"judging the rule broke with {failure.reason}; its results for these events are dropped, and this "
            "version is judged no more where it broke"
        )
    if failure.count:
        events = "1 event" if failure.count == 1 else f"{failure.count} events"
        sentences.append(
            f"{events} could not be judged (overflow, division by zero or a cast); the first is {failure.first_event_id}"
        )
    return "; ".join(sentences)


def _shorten(text: str) -> str:
    return cut_end(to_one_line(text), _MAX_TEXT_CHARACTERS)
