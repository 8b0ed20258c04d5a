"""What Spark says of a damaged checkpoint or of files that are gone, in words for the person who can mend it."""

from __future__ import annotations

import re
from pathlib import Path

from lookback.core.errors import SetupError, StateError

# Spark's names of errors, or texts of its log readers, that mean: this checkpoint cannot be read.
_TORN = re.compile(
    r"CANNOT_LOAD_STATE_STORE|STREAMING_STATEFUL_OPERATOR_|STREAMING_CHECKPOINT_|STATE_STORE_\w+|STDS_\w+|STATE_REPARTITION_\w+"
    r"|Failed to read log file|ChecksumException|JsonEOFException|MismatchedInputException|Unexpected end-of-input"
    r"|CONCURRENT_STREAM_LOG_UPDATE|CHECKPOINT_FILE_CHECKSUM|/state/\d+/_stateSchema/\S+ does not exist"
)
_GONE = re.compile(
    r"FAILED_READ_FILE\.FILE_NOT_EXIST|DELTA_CHANGE_DATA_FILE_NOT_FOUND|DELTA_LOG_FILE_NOT_FOUND|DELTA_VERSION_NOT_FOUND"
    r"|DELTA_MISSING_CHANGE_DATA|DELTA_TRUNCATED_TRANSACTION_LOG|DELTA_VERSIONS_NOT_CONTIGUOUS"
)
_OTHER_TABLE = "DIFFERENT_DELTA_TABLE_READ_BY_STREAMING_SOURCE"
_CONCURRENT = "CONCURRENT_STREAM_LOG_UPDATE"
_STATE_ERROR = re.compile(r"StateError: (.+)")
# Raised in a Python of the executors, which on a cluster is another installation than that of the driver.
_NO_MODULE = re.compile(r"ModuleNotFoundError: No module named '((?:lookback|numpy|pandas|pyarrow|sqlglot)[\w.]*)'")
_FILE = re.compile(r"(?:file:(?://)?|File `)(/[^\n]*?\.(?:parquet|json)|/[^\n]*/(?:offsets|commits|state)/[\w./-]*\w)")
_MOST_TEXT = 300


def explain_failure(error: Exception, stream: str, checkpoint: Path) -> Exception:
    """The error to raise in place of a failed query's: with the remedy where one is known, else the error itself."""
    text = whole_text(error)
    remedy = f"make the state anew from the tables: lookback evaluate {stream} --rebuild"
    if own := _STATE_ERROR.search(text):
        return StateError(f"{checkpoint}: {own[1].strip()}: lookback evaluate {stream} --rebuild")
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
        return SetupError(f"{file or checkpoint} is torn, damaged or missing ({_reason(text)}); {remedy}")
    if _GONE.search(text):
        return SetupError(
            f"{file or 'a file'} of a table cannot be read any more ({_reason(text)}): the log was cleaned, or files were "
            f"vacuumed, before they were judged. What was in them cannot be judged; to go on without it, {remedy}"
        )
    return error


def whole_text(error: Exception) -> str:
    """What an error and its causes say, down to Java's."""
    texts, at = [], 0
    found: object = error
    while found is not None and at < 20:
        texts.append(str(found))
        found, at = getattr(found, "_cause", None) or getattr(found, "__cause__", None), at + 1
    return "\n".join(texts)


def _reason(text: str) -> str:
    """The words that tell which fault it is."""
    match = _TORN.search(text) or _GONE.search(text)
    assert match is not None
    start = text.rfind("\n", 0, match.start()) + 1
    line = text[max(start, match.start() - 1) :].split("\n", 1)[0]
    return line[:_MOST_TEXT].strip()
