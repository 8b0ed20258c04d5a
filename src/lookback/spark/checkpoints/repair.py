"""Repairs the damage that a crash may leave in a checkpoint, or names the file that is beyond repair."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from lookback.core.errors import SetupError
from lookback.spark.checkpoints.checkpoint import PLAN_FILE, Checkpoint, describe_remedy
from lookback.spark.checkpoints.sparklogs import is_planned, is_readable, is_whole, list_batches, require_known_format

if TYPE_CHECKING:
    from collections.abc import Callable

    from lookback.core.streams.declaration import Stream
    from lookback.places import Place

# A file of the state store, with its version. The files that belong to a .zip have other names.
_STATE = re.compile(r"(\d+)\.(?:changelog|zip)")


def repair(checkpoint: Checkpoint, stream: Stream, is_written: Callable[[str], bool]) -> list[str]:
    """Repairs the damage that a crash may leave in the last batch of a checkpoint, if that is safe.

    Args:
        checkpoint: The checkpoint.
        stream: The stream.
        is_written: Returns whether an output table has a commit with this mark, `query id:batch`.

    Returns:
        A line for each repair.

    Raises:
        SetupError: If the checkpoint has other damage; the message names the file.
        UnknownFormatError: If a file has an unknown format. Nothing is changed then.
    """
    if checkpoint.is_new:
        return _repair_new(checkpoint)
    require_known_format(checkpoint.folder)
    _require_whole(checkpoint, stream, "metadata", lambda file: json.loads(file.read_text())["id"])
    _require_whole(checkpoint, stream, PLAN_FILE, lambda _: checkpoint.read_plan())
    planned, finished = list_batches(checkpoint.folder / "offsets"), list_batches(checkpoint.folder / "commits")
    done = []
    if finished and not is_whole(checkpoint.folder / "commits" / str(finished[-1]), lines=2):
        if planned[-1:] != finished[-1:]:
            raise _make_torn_error(stream, checkpoint.folder / "commits" / str(finished[-1]))
        done.append(_remove(checkpoint, "commits", finished.pop(), "the batch runs again, but is written only once"))
    if planned and planned[-1] not in finished and not is_planned(checkpoint.folder / "offsets" / str(planned[-1])):
        if is_written(f"{checkpoint.query_id}:{planned[-1]}"):
            raise _make_torn_error(stream, checkpoint.folder / "offsets" / str(planned[-1]))
        done.append(_remove(checkpoint, "offsets", planned.pop(), "the batch had written nothing and is planned again"))
    needed = [*planned[-1:], *finished[-1:]]
    for number in sorted(set(needed)):
        if not is_planned(checkpoint.folder / "offsets" / str(number)):
            raise _make_torn_error(stream, checkpoint.folder / "offsets" / str(number))
    if ahead := _find_unfinished_state(checkpoint, finished):
        for file in ahead:
            _unlink(file)
        done.append(f"removed {len(ahead)} state files of an unfinished batch, which runs again")
    return done


def _find_unfinished_state(checkpoint: Checkpoint, finished: list[int]) -> list[Place]:
    """Finds state files newer than the last finished batch, which a repeated batch could mistake for its own.

    Batch n ends with version n + 1 of the state.
    """
    last = finished[-1] + 1 if finished else 0
    files: list[Place] = [*(checkpoint.folder / "state").glob("*/*/[0-9]*.*")]
    ahead = [file for file in files if (match := _STATE.fullmatch(file.name)) and int(match[1]) > last]
    return sorted(ahead, key=str)


def _repair_new(checkpoint: Checkpoint) -> list[str]:
    file = checkpoint.folder / "metadata"
    if not file.exists() or is_readable(file, lambda each: json.loads(each.read_text())["id"]):
        return []
    _unlink(file)
    return [f"removed the torn file {file}: nothing had begun"]


def _require_whole(checkpoint: Checkpoint, stream: Stream, name: str, read: Callable[[Place], object]) -> None:
    file = checkpoint.folder / name
    if not file.exists() or not is_readable(file, read):
        raise _make_torn_error(stream, file)


def _make_torn_error(stream: Stream, file: Place) -> SetupError:
    what = "is torn or damaged" if file.exists() else "is missing"
    return SetupError(
        f"{file} {what}: the evaluation cannot resume from this checkpoint; {describe_remedy(stream.name)}"
    )


def _remove(checkpoint: Checkpoint, kind: str, number: int, because: str) -> str:
    file = checkpoint.folder / kind / str(number)
    _unlink(file)
    return f"removed the torn file {file}: {because}"


def _unlink(file: Place) -> None:
    file.unlink()
    # The file's Hadoop checksum.
    (file.parent / f".{file.name}.crc").unlink(missing_ok=True)
