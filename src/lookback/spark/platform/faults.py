"""Explains Spark's errors about damaged checkpoints and missing files, with a remedy, and logs survivable failures."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from lookback.core.errors import SetupError, StateError
from lookback.core.values.texts import summarize_error

if TYPE_CHECKING:
    from lookback.core.streams.declaration import Stream
    from lookback.places import Place

_LOG = logging.getLogger("lookback")
# Names of Spark's errors, or messages of its log readers, for an unreadable checkpoint.
_TORN = re.compile(
    r"CANNOT_LOAD_STATE_STORE|STREAMING_STATEFUL_OPERATOR_|STREAMING_CHECKPOINT_|STATE_STORE_\w+|STDS_\w+|STATE_REPARTITION_\w+"
    r"|Failed to read log file|ChecksumException|JsonEOFException|MismatchedInputException|Unexpected end-of-input"
    # RocksDB's messages about a changed file.
    r"|block checksum mismatch|Bad table magic number"
    # Jackson names this setting whenever it cannot parse JSON, such as a checkpoint file.
    r"|StreamReadFeature\.INCLUDE_SOURCE|CONCURRENT_STREAM_LOG_UPDATE|CHECKPOINT_FILE_CHECKSUM"
    r"|/state/\d+/_stateSchema/\S+ does not exist"
)
_GONE = re.compile(
    r"FAILED_READ_FILE\.FILE_NOT_EXIST|DELTA_CHANGE_DATA_FILE_NOT_FOUND|DELTA_LOG_FILE_NOT_FOUND|DELTA_VERSION_NOT_FOUND"
    r"|DELTA_MISSING_CHANGE_DATA|DELTA_TRUNCATED_TRANSACTION_LOG|DELTA_VERSIONS_NOT_CONTIGUOUS"
)
_OTHER_TABLE = "DIFFERENT_DELTA_TABLE_READ_BY_STREAMING_SOURCE"
_CONCURRENT = "CONCURRENT_STREAM_LOG_UPDATE"
_STATE_ERROR = re.compile(r"StateError: (.+)")
_SETUP_ERROR = re.compile(r"SetupError: (.+)")
# Raised in an executor's Python, which on a cluster is a different installation from the driver's.
_NO_MODULE = re.compile(
    r"ModuleNotFoundError: No module named "
    r"'((?:ahocorasick|lookback|numpy|pandas|pyarrow|pydantic|sqlglot|tzdata)[\w.]*)'"
)
_FILE = re.compile(r"(?:file:(?://)?|File `)(/[^\n]*?\.(?:parquet|json)|/[^\n]*/(?:offsets|commits|state)/[\w./-]*\w)")
# How Java, Python and Arrow report a full disk.
_FULL = re.compile(r"No space left on device|Disk quota exceeded|There is not enough space on the disk")
_FULL_PLACE = re.compile(
    r"(?:No space left on device|Disk quota exceeded): '([^'\n]+)'|(/[^\s:'\"]+) \((?:No space|Disk quota)"
)
_LACKS_COLUMN = re.compile(
    r"UNRESOLVED_COLUMN\S*\] A column, variable, or function parameter with name (`[^\n]+?`) cannot be"
)
_MAX_CHARACTERS = 300
_MAX_CAUSES = 20


def explain_failure(error: Exception, stream: str, checkpoint: Place) -> Exception:
    """Returns an error with a remedy for a failed query, or the original error if no remedy is known."""
    text = collect_messages(error)
    if full := explain_full_disk(error):
        return full
    remedy = f"rebuild the state from the tables: lookback evaluate {stream} --rebuild"
    if own := _STATE_ERROR.search(text):
        return StateError(f"{checkpoint}: {own[1].strip()}: lookback evaluate {stream} --rebuild")
    if setup := find_setup_error(error):
        return setup
    if missing := _NO_MODULE.search(text):
        return SetupError(
            f"the Python of Spark's executors has no module {missing[1]!r}; on every machine of the cluster, "
            "install the same version of Lookback for the Python in PYSPARK_PYTHON or, if that is not set, "
            "the driver's Python"
        )
    file = next((match[1] for match in _FILE.finditer(text)), None)
    if _OTHER_TABLE in text:
        return SetupError(
            f"{checkpoint} was made from another table of the same name, which was deleted and created again; "
            f"{remedy}, or use another --checkpoint"
        )
    if _CONCURRENT in text:
        return SetupError(
            f"{checkpoint}: another query has written to this checkpoint, or one of its files is missing. If no other "
            f"evaluation is running, {remedy}"
        )
    if _TORN.search(text):
        return SetupError(f"{file or checkpoint} is torn, damaged or missing ({_quote_fault(text)}); {remedy}")
    if _GONE.search(text):
        return SetupError(
            f"{file or 'a file'} of a table can no longer be read ({_quote_fault(text)}): the log was cleaned or "
            f"files were vacuumed before their events were evaluated. To continue without these events, {remedy}"
        )
    return error


def explain_full_disk(error: BaseException) -> SetupError | None:
    """Returns an error with a remedy if a full disk is the cause; None otherwise."""
    text = collect_messages(error)
    if not _FULL.search(text):
        return None
    place = next((match[1] or match[2] for match in _FULL_PLACE.finditer(text)), None)
    return SetupError(
        f"the disk is full{f': {place} could not be written' if place else ''}. Free some space and start again: "
        "committed work is kept, and unfinished work is repeated"
    )


def explain_unreadable(error: Exception, place: str) -> Exception:
    """Returns an error with a remedy for a failed read of table `place`, or the original error if none is known."""
    text = collect_messages(error)
    if full := explain_full_disk(error):
        return full
    if _GONE.search(text):
        return SetupError(
            f"the changes of {place} cannot be read without a gap ({_quote_fault(text)}): files were vacuumed, "
            "the log was cleaned, or the change feed was off for some commits. Keep the change feed on "
            "(delta.enableChangeDataFeed), keep the history longer, and try again with later commits"
        )
    if lacking := _LACKS_COLUMN.search(text):
        return SetupError(
            f"{place} no longer has the column {lacking[1]}: it was renamed or dropped. Restore it, or change the "
            "stream's declaration"
        )
    return error


def find_setup_error(error: Exception) -> SetupError | None:
    """Returns the SetupError that a task raised on an executor; None if the failure has another cause."""
    found = _SETUP_ERROR.search(collect_messages(error))
    return None if found is None else SetupError(found[1].strip())


def succeeds(act: Callable[[], object], message: str, stream: Stream) -> bool:
    """Runs an action whose failure a running stream must survive, such as checking a table.

    Logs a failure as `message`, with `%s` for the stream's name and the error. Returns whether the action succeeded.
    """
    try:
        act()
    except Exception as error:  # noqa: BLE001 - no error may stop the stream
        _LOG.warning(message, stream.name, summarize_error(error))
        return False
    return True


def collect_messages(error: BaseException) -> str:
    """Returns the messages of an error and its causes, down to Java's."""
    texts: list[str] = []
    cause: object = error
    while cause is not None and len(texts) < _MAX_CAUSES:
        texts.append(str(cause))
        cause = getattr(cause, "_cause", None) or getattr(cause, "__cause__", None)
    return "\n".join(texts)


def _quote_fault(text: str) -> str:
    """Quotes the line of a message that names the fault."""
    match = _TORN.search(text) or _GONE.search(text)
    assert match is not None
    start = text.rfind("\n", 0, match.start()) + 1
    line = text[max(start, match.start() - 1) :].split("\n", 1)[0]
    return line[:_MAX_CHARACTERS].strip()
