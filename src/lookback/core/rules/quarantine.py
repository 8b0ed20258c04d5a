"""Decides which rules the engine quarantines: those that fail on too many events, and those that raise an exception.

A SQL error (overflow, division by zero, a cast) costs one event its verdict. Any other exception while judging is a defect:
it stops only that rule, and the rule's next version starts afresh.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from lookback.core.errors import StateError, StoreFailed
from lookback.core.streams.alerts import Failure
from lookback.core.values.texts import cut_end, to_one_line

# Errors of the machine or the state, not of a rule: the batch fails and is repeated.
NOT_THE_RULES = (MemoryError, StateError, StoreFailed)
# The author of the rows that the engine writes into the rules table.
AUTHOR = "lookback"
_MAX_TEXT_CHARACTERS = 300
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")


@dataclass(frozen=True)
class Quarantine:
    """A version to take out of service, and why."""

    rule_id: str
    version: int
    comment: str


def find_quarantines(failures: Iterable[Failure], max_failures: int) -> list[Quarantine]:
    """Finds the versions that failed on too many events of a batch, or raised an exception.

    Args:
        failures: One per rule and version, summed over all shards.
        max_failures: The number of events of one batch that may fail.
    """
    quarantines = []
    for failure in failures:
        if failure.reason:
            comment = f"{failure.reason}, at commit {failure.first_arrival[0]}"
        elif failure.count > max_failures:
            comment = (
                f"{failure.count:,} events of one batch could not be judged (overflow, division by zero or a cast); "
                f"max_failures is {max_failures:,}, and rule_log names the first event"
            )
        else:
            continue
        quarantines.append(Quarantine(failure.rule_id, failure.version, f"{comment}; fix the rule and push it again"))
    return quarantines


def describe_error(error: Exception) -> str:
    """Describes an unexpected exception on one line: its type, its text and where it was raised.

    Memory addresses are left out, so that the same exception gives the same text.
    """
    place, at = "", error.__traceback__
    while at is not None:
        place = f" ({at.tb_frame.f_code.co_filename.rpartition('/')[2]}:{at.tb_lineno})"
        at = at.tb_next
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - an error without a text must not stop other rules
        text = "(no text)"
    text = cut_end(to_one_line(_ADDRESS.sub("0x", text)), _MAX_TEXT_CHARACTERS)
    return f"{type(error).__name__}: {text}{place}"


def describe_failure(failure: Failure) -> str:
    """Returns the message of rule_log for errors while judging."""
    sentences = []
    if failure.reason:
        sentences.append(
            f"judging failed with {failure.reason}; the results for these events are dropped, and the shards where it "
            "failed no longer judge this version"
        )
    if failure.count:
        events = "1 event" if failure.count == 1 else f"{failure.count} events"
        sentences.append(
            f"{events} could not be judged (overflow, division by zero or a cast); the first is {failure.first_event_id}"
        )
    return "; ".join(sentences)
