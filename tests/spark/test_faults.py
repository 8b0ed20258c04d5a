"""Errors about torn checkpoints and lost files become sentences with a remedy. The texts are Spark 4.2's and Delta 4.4's."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from lookback.cli import main
from lookback.core.errors import SetupError, StateError
from lookback.spark.platform.faults import explain_failure, explain_unreadable
from lookback.spark.platform.session import _select_lines

FOLDER = Path("/lake house/_checkpoints/evaluate_payins")
STATE = f"file:{FOLDER}/state/0/0/3.changelog"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (("Caused by: org.apache.spark.SparkException: [CANNOT_LOAD_STATE_STORE.UNCATEGORIZED] An error occurred during "
         "loading state.  SQLSTATE: 58030\nCaused by: java.io.EOFException: Stream ended prematurely"),
         f"{FOLDER} is torn, damaged or missing ([CANNOT_LOAD_STATE_STORE.UNCATEGORIZED] An error occurred during loading"),
        (("[CANNOT_LOAD_STATE_STORE.CANNOT_READ_STREAMING_STATE_FILE] An error occurred during loading state. Error reading "
         f"streaming state file of {STATE} does not exist. If the stream job is restarted"),
         f"{FOLDER}/state/0/0/3.changelog is torn, damaged or missing ("),
        (f"terminated with exception: Failed to read log file file:{FOLDER}/offsets/2. Incomplete log file",
         f"{FOLDER}/offsets/2 is torn, damaged or missing (Failed to read log file"),
        ("[STREAMING_STATEFUL_OPERATOR_MISSING_STATE_DIRECTORY] Cannot restart streaming query with stateful operators",
         f"{FOLDER} is torn, damaged or missing ("),
        (f"File `{FOLDER}/state/0/_stateSchema/default/0_72ac` does not exist",
         f"{FOLDER}/state/0/_stateSchema/default/0_72ac is torn, damaged or missing ("),
        ("PySparkRuntimeError: Error getting value: block checksum mismatch: stored = 2977541261, computed = 486003668",
         f"{FOLDER} is torn, damaged or missing ("),
        ("Bad table magic number: expected 9863518390377041911, found 0 in /tmp/spark/000008.sst",
         f"{FOLDER} is torn, damaged or missing ("),
        (("Illegal character ((CTRL-CHAR, code 22)): only regular white space (\\r, \\n, \\t) is allowed between tokens\n"
         " at [Source: REDACTED (`StreamReadFeature.INCLUDE_SOURCE_IN_LOCATION` disabled); line: 1, column: 2]"),
         f"{FOLDER} is torn, damaged or missing ("),
        ("com.fasterxml.jackson.databind.exc.MismatchedInputException: No content to map due to end-of-input",
         "is torn, damaged or missing ("),
        ("[CONCURRENT_STREAM_LOG_UPDATE] Concurrent update to the log. Multiple streaming jobs detected for 1.",
         "another query has written to this checkpoint, or one of its files is missing"),
        ("[DIFFERENT_DELTA_TABLE_READ_BY_STREAMING_SOURCE] The streaming query was reading from an unexpected Delta table",
         "was made from another table of the same name, which was deleted and created again"),
        ("[FAILED_READ_FILE.FILE_NOT_EXIST] Encountered error while reading file file:/lake house/payins/part-0.parquet. File",
         "/lake house/payins/part-0.parquet of a table can no longer be read ("),
        ("[DELTA_LOG_FILE_NOT_FOUND_FOR_STREAMING_SOURCE] If you never deleted it, it's likely your query is lagging behind.",
         "a file of a table can no longer be read ("),
    ],
)  # fmt: skip
def test_c8_a_fault_is_told_with_the_file_and_the_remedy(text: str, told: str) -> None:
    error = explain_failure(RuntimeError(f"[STREAM_FAILED] Query terminated with exception: {text}"), "payins", FOLDER)
    assert isinstance(error, SetupError)
    assert told in str(error)
    assert "lookback evaluate payins --rebuild" in str(error)
    assert "\n" not in str(error)


def test_c8_pages_of_another_layout_are_told_in_the_words_of_the_one_that_reads_them() -> None:
    text = "  File x, line 3\nlookback.core.errors.StateError: manifest: the window state has layout version 3; start with a new checkpoint\n  at"
    error = explain_failure(RuntimeError(text), "payins", FOLDER)
    assert isinstance(error, StateError)
    assert (
        str(error)
        == f"{FOLDER}: manifest: the window state has layout version 3; start with a new checkpoint: lookback evaluate payins --rebuild"
    )


@pytest.mark.parametrize("module", ["lookback", "lookback.spark.batches.dispatch", "sqlglot", "pyarrow", "pydantic"])
def test_a_cluster_whose_machines_lack_lookback_is_told_what_to_install(module: str) -> None:
    text = f"Traceback\n    return cloudpickle.loads(obj)\nModuleNotFoundError: No module named '{module}'\n\n\tat java"
    error = explain_failure(RuntimeError(text), "payins", FOLDER)
    assert isinstance(error, SetupError)
    assert f"the Python of Spark's executors has no module {module!r}; on every machine" in str(error)


def test_what_is_not_known_is_left_as_it_is() -> None:
    for text in ("out of memory", "ModuleNotFoundError: No module named 'theirs'", "[DIVIDE_BY_ZERO] Division by zero"):
        error = RuntimeError(text)
        assert explain_failure(error, "payins", FOLDER) is error


def test_the_causes_of_an_error_are_read_too() -> None:
    error = RuntimeError("An error occurred while calling start")
    error.__cause__ = RuntimeError("x")
    error.__cause__.__cause__ = RuntimeError(f"Failed to read log file file:{FOLDER}/commits/7. Incomplete log file")
    assert f"{FOLDER}/commits/7 is torn" in str(explain_failure(error, "payins", FOLDER))


FULL = "the disk is full: /data/x could not be written. Free some space and start again"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/data/x"), FULL),
        (OSError(errno.EDQUOT, "Disk quota exceeded", "/data/x"), FULL),
        (
            RuntimeError("Job aborted\nCaused by: java.io.FileNotFoundException: /data/x (No space left on device)"),
            FULL,
        ),
        (
            RuntimeError("org.rocksdb.RocksDBException: While appending: No space left on device"),
            "the disk is full. Free",
        ),
    ],
)
def test_a_full_disk_is_told_in_a_sentence_by_every_command(
    error: Exception, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in str(explain_failure(error, "payins", FOLDER))

    def run(_: object) -> None:
        raise error

    monkeypatch.setattr("lookback.commands.upkeep._maintain", run)
    assert main(["maintain"]) == 2
    assert capsys.readouterr().err.startswith(f"lookback: {told}")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[DELTA_MISSING_CHANGE_DATA] Error getting change data for range [1 , 4] as change data was not\nrecorded for version [2].",
         "the changes of payins cannot be read without a gap ([DELTA_MISSING_CHANGE_DATA] Error getting change data"),
        ("[UNRESOLVED_COLUMN.WITH_SUGGESTION] A column, variable, or function parameter with name `amount` cannot be resolved.",
         "payins no longer has the column `amount`: it was renamed or dropped"),
        ("java.io.IOException: No space left on device", "the disk is full"),
    ],
)  # fmt: skip
def test_a_table_that_cannot_be_read_whole_is_told_in_a_sentence(text: str, told: str) -> None:
    error = explain_unreadable(RuntimeError(text), "payins")
    assert isinstance(error, SetupError)
    assert told in str(error)


DAEMON = '  File "/x/pyspark.zip/pyspark/daemon.py", line 95, in worker\n'


def test_a_worker_that_finds_its_work_no_longer_needed_leaves_no_trace() -> None:
    begin, broken = "Traceback (most recent call last):\n", "BrokenPipeError: [Errno 32] Broken pipe\n"
    own = [begin, '  File "/x/lookback/senders.py", line 1\n', broken]
    other = [begin, DAEMON, "EOFError\n"]
    mixed = [begin, begin, DAEMON, broken, DAEMON, broken]
    lines = ["a\n", begin, DAEMON, DAEMON, broken, *mixed, *own, *other, "b\n", begin, DAEMON]
    shown = [line.decode() for line in _select_lines(line.encode() for line in lines)]
    assert shown == ["a\n", *own, *other, "b\n", begin, DAEMON]
