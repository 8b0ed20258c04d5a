"""Turns Spark's errors about a damaged checkpoint or about files that are gone into sentences with a remedy, and logs others."""

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
# Names of Spark's errors, or texts of its log readers, that mean that a checkpoint cannot be read.
_TORN = re.compile(
    r"CANNOT_LOAD_STATE_STORE|STREAMING_STATEFUL_OPERATOR_|STREAMING_CHECKPOINT_|STATE_STORE_\w+|STDS_\w+|STATE_REPARTITION_\w+"
    r"|Failed to read log file|ChecksumException|JsonEOFException|MismatchedInputException|Unexpected end-of-input"
    # RocksDB's words for a file of its own that has changed.
    r"|block checksum mismatch|Bad table magic number"
    # Jackson names this setting whenever JSON, such as a file of a checkpoint, cannot be parsed.
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
# Raised in a Python of the executors, which on a cluster is another installation than that of the driver.
_NO_MODULE = re.compile(
    r"ModuleNotFoundError: No module named '((?:lookback|numpy|pandas|pyarrow|pydantic|sqlglot)[\w.]*)'"
)
_FILE = re.compile(r"(?:file:(?://)?|File `)(/[^\n]*?\.(?:parquet|json)|/[^\n]*/(?:offsets|commits|state)/[\w./-]*\w)")
# Java's, Python's and Arrow's words for the same.
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
    """Returns the error to raise in place of a failed query's: with a remedy if one is known, else the error itself."""
    text = collect_messages(error)
    if full := explain_full_disk(error):
        return full
    remedy = f"make the state anew from the tables: lookback evaluate {stream} --rebuild"
    if own := _STATE_ERROR.search(text):
        return StateError(f"{checkpoint}: {own[1].strip()}: lookback evaluate {stream} --rebuild")
    if setup := find_setup_error(error):
        return setup
    if missing := _NO_MODULE.search(text):
        return SetupError(
            f"the Python of Spark's executors has no module {missing[1]!r}; on every machine of the cluster install the same "
            "version of Lookback for the Python that PYSPARK_PYTHON names, or that the driver runs in where nothing does"
        )
    file = next((match[1] for match in _FILE.finditer(text)), None)
    if _OTHER_TABLE in text:
        return SetupError(
            f"{checkpoint} was made from another table of the same name, which was deleted and created again; {remedy}, or "
            "begin with another --checkpoint"
        )
    if _CONCURRENT in text:
        return SetupError(
            f"{checkpoint}: another query has written to this checkpoint, or a file of it is gone. If no other evaluation "
            f"runs, {remedy}"
        )
    if _TORN.search(text):
        return SetupError(f"{file or checkpoint} is torn, damaged or missing ({_quote_fault(text)}); {remedy}")
    if _GONE.search(text):
        return SetupError(
            f"{file or 'a file'} of a table cannot be read any more ({_quote_fault(text)}): the log was cleaned, or files were "
            f"vacuumed, before they were judged. Their events cannot be judged; to go on without them, {remedy}"
        )
    return error


def explain_full_disk(error: BaseException) -> SetupError | None:
    """Returns the error to raise in place of one that a full disk causes; None for another one."""
    text = collect_messages(error)
    if not _FULL.search(text):
        return None
    place = next((match[1] or match[2] for match in _FULL_PLACE.finditer(text)), None)
    return SetupError(
        f"the disk is full{f': {place} could not be written' if place else ''}. Make room and start again: nothing that was "
        "committed is lost, and what was half done is repeated"
    )


def explain_unreadable(error: Exception, place: str) -> Exception:
    """Returns the error to raise in place of one that reading the table `place` ended with, if a remedy is known."""
    text = collect_messages(error)
    if full := explain_full_disk(error):
        return full
    if _GONE.search(text):
        return SetupError(
            f"the changes of {place} cannot be read without a gap ({_quote_fault(text)}): files were vacuumed, the log was cleaned, "
            "or the change feed was off for some commits. Switch it on for good (delta.enableChangeDataFeed), keep the history for "
            "longer, and make the request again for later commits"
        )
    if lacking := _LACKS_COLUMN.search(text):
        return SetupError(
            f"{place} has no column {lacking[1]} any more: it was renamed or dropped. Give it back its name, or change the "
            "stream's declaration"
        )
    return error


def find_setup_error(error: Exception) -> SetupError | None:
    """Returns the SetupError that a task raised in a Python of the executors; None if the failure has another cause."""
    found = _SETUP_ERROR.search(collect_messages(error))
    return None if found is None else SetupError(found[1].strip())


def succeeds(act: Callable[[], object], message: str, stream: Stream) -> bool:
    """Does what a running stream must survive, such as a look at a table. Returns False if it failed, which is logged.

    message: of the log, with `%s` for the stream's name and for the error.
    """
    try:
        act()
    except Exception as error:  # noqa: BLE001 - whatever it is, the stream goes on
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
