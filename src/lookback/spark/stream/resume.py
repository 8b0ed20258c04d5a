"""Begins an evaluation: on a new checkpoint, on the existing one, or with its state rebuilt from the tables."""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lookback.core.errors import SetupError
from lookback.spark.batches.sink import OUTPUTS, find_last_written, is_written
from lookback.spark.checkpoints.checkpoint import EVENTS, RULES, Checkpoint, UnknownFormatError
from lookback.spark.platform.session import MAX_SHARDS
from lookback.spark.stream.rebuild import Rebuild, has_outputs, log_new_beginning
from lookback.spark.tables.history import find_first_readable, find_other_histories, require_commits

if TYPE_CHECKING:
    from lookback.core.streams.declaration import Stream
    from lookback.spark.tables.lakehouse import Tables

_LOG = logging.getLogger("lookback")


@dataclass(frozen=True)
class Beginning:
    """The start of an evaluation.

    starts: the first commit of each source that the query reads. rebuild: how the state is rebuilt; None if it is not.
    """

    starts: Mapping[str, int]
    rebuild: Rebuild | None


def begin(
    tables: Tables, stream: Stream, streams: Mapping[str, Stream], checkpoint: Checkpoint, *,
    rebuild: bool, fresh: bool, shards: int | None, default_shards: int | None = None, accept_unknown: bool = False,
) -> Beginning:  # fmt: skip
    """Checks whether an evaluation can begin on this checkpoint, repairs it, and returns how the evaluation begins.

    rebuild: move the checkpoint aside and rebuild the state from the tables. fresh: allow a new checkpoint although the
    tables have outputs of the stream, which are written again. shards: the number that a checkpoint must have.
    default_shards: the number that a new one gets by the settings. accept_unknown: use a checkpoint of an unknown format
    and repair nothing. Raises SetupError with the remedy.
    """
    if not fresh:
        require_known_tables(tables, stream, checkpoint)
    if rebuild or (fresh and find_other_histories(tables, checkpoint.read_noted(stream))):
        _prepare_new_checkpoint(tables, stream, streams, checkpoint, rebuild=rebuild)
    checkpoint.require_spark(tables.spark.version, stream.name)
    is_known = not (accept_unknown and _warn_if_unknown_format(checkpoint))
    if is_known:
        for line in checkpoint.repair(stream, lambda mark: any(is_written(tables, name, mark) for name in OUTPUTS)):
            _LOG.warning(line)
    checkpoint.require_fit(stream, shards)
    document, plan = checkpoint.read_rebuild(), checkpoint.read_plan()
    rebuild_plan = None if document is None else Rebuild.from_dict(document)
    if not checkpoint.is_new:
        if plan is not None and shards is None:
            _warn_about_shards(checkpoint, stream, plan.shards, default_shards)
        if is_known:
            require_sources(tables, stream, checkpoint)
            _require_newest(tables, stream, checkpoint)
        return Beginning(
            {} if plan is None else plan.starts, rebuild_plan if is_being_rebuilt(checkpoint, rebuild_plan) else None
        )
    if rebuild_plan is None and not fresh and has_outputs(tables, stream):
        raise SetupError(
            f"{checkpoint.folder} is a new checkpoint, but the tables have alerts or log rows of stream {stream.name!r} "
            f"already; from the beginning they would be written twice. To go on where they end: lookback evaluate "
            f"{stream.name} --rebuild. If a checkpoint is elsewhere, name it by --checkpoint. To have all of them once "
            "more beside those that are there: --fresh; to try a rule out, publish it with status shadow"
        )
    if rebuild_plan is None and plan is None and has_outputs(tables, stream):
        log_new_beginning(tables, stream)
    # A first start that was cut short has stored them already.
    starts = plan.starts if plan is not None else _find_starts(tables, stream)
    _warn_about_starts(tables, stream, starts)
    _warn_about_ignored_rows(tables, stream)
    return Beginning(starts, rebuild_plan)


def _warn_if_unknown_format(checkpoint: Checkpoint) -> bool:
    """Logs a warning if the checkpoint has an unknown format, and returns whether it has."""
    try:
        checkpoint.require_known_format()
    except UnknownFormatError as error:
        _LOG.warning(f"the settings accept a checkpoint of an unknown format, so nothing is checked: {error}")
        return True
    return False


def _warn_about_shards(checkpoint: Checkpoint, stream: Stream, shards: int, default: int | None) -> None:
    remedy = f"to change it: lookback evaluate {stream.name} --rebuild --shards"
    if default not in (None, shards):
        _LOG.warning(
            f"{checkpoint.folder} divides its keys into {shards} shards for good, and the setting of {default} is for a new "
            f"checkpoint; {remedy} {default}"
        )
    elif default is None and shards > MAX_SHARDS:
        _LOG.warning(
            f"{checkpoint.folder} divides its keys into {shards} shards for good, and each costs time in every batch; "
            f"{remedy} N, with the cores of the cluster for N"
        )


def _find_starts(tables: Tables, stream: Stream) -> dict[str, int]:
    return {EVENTS: find_first_readable(tables, stream.name), RULES: find_first_readable(tables, "rules")}


def _prepare_new_checkpoint(
    tables: Tables, stream: Stream, streams: Mapping[str, Stream], checkpoint: Checkpoint, *, rebuild: bool
) -> None:
    """Moves the checkpoint aside and writes into a new one how the state is rebuilt, if it is."""
    # A checkpoint that cannot be read may be rebuilt too.
    judged, plan = checkpoint.find_last_judged(), None
    if rebuild:
        plan = Rebuild.from_tables(tables, stream, streams, _find_starts(tables, stream), judged)
    moved = checkpoint.move_aside()
    if moved is not None:
        _LOG.warning(f"the checkpoint before is kept as {moved}; delete it when the new one has caught up")
    if plan is not None:
        checkpoint.write_rebuild(plan.to_dict())


def is_being_rebuilt(checkpoint: Checkpoint, rebuild: Rebuild | None) -> bool:
    """Returns whether a rebuild has commits with output to judge again; the rest is an ordinary evaluation.

    One that could not read the first events never ends, as windows may still begin before the events that it read.
    """
    if rebuild is None or not rebuild.is_exact:
        return rebuild is not None
    judged = checkpoint.find_last_judged()
    return judged is None or judged < (rebuild.through or 0)


def require_known_tables(tables: Tables, stream: Stream, checkpoint: Checkpoint) -> None:
    """Raises SetupError, with the remedy, if a checkpoint has read other tables than those that are there."""
    if others := find_other_histories(tables, checkpoint.read_noted(stream)):
        raise SetupError(
            f"the evaluation of stream {stream.name!r} cannot go on from {checkpoint.folder}: {'; '.join(others)}. Tables were "
            "restored from an older backup, or deleted and created again. Bring back the tables that were read; or judge "
            f"what is there now as a new evaluation, beside the outputs of the one before: lookback evaluate {stream.name} --fresh"
        )


def _require_newest(tables: Tables, stream: Stream, checkpoint: Checkpoint) -> None:
    """Raises SetupError if the outputs have rows of a later batch than the last one of the checkpoint."""
    planned = checkpoint.find_last_planned()
    if (written := find_last_written(tables, str(checkpoint.query_id))) > planned:
        raise SetupError(
            f"{checkpoint.folder} ends at batch {planned}, and the tables have rows of its batch {written}: an older copy of "
            "the checkpoint was restored, and what it judges again would be written twice. Bring back the newer one, or make "
            f"the state anew from the tables, which writes nothing twice: lookback evaluate {stream.name} --rebuild"
        )


def require_sources(tables: Tables, stream: Stream, checkpoint: Checkpoint) -> None:
    """Raises SetupError, with the remedy, if the next commits of a checkpoint cannot be read any more."""
    last = checkpoint.read_last_batch_time()
    ended = None if last is None else dt.datetime.fromtimestamp(last, dt.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    again = checkpoint.find_reread_commits()
    for source, commit in checkpoint.find_next_commits().items():
        name = stream.name if source == EVENTS else "rules"
        require_commits(tables, name, again[source], commit, stream.name, ended)


def _warn_about_ignored_rows(tables: Tables, stream: Stream) -> None:
    passed_over = tables.count_passed_over(stream)
    if passed_over:
        _LOG.warning(
            f"{passed_over:,} rows of {tables.identifier(stream.name)} are no events and are passed over: {stream.event_id} is "
            f"NULL, or {stream.event_time} is NULL or not in the years 1 to 9999. So will be others of that kind"
        )


def _warn_about_starts(tables: Tables, stream: Stream, starts: Mapping[str, int]) -> None:
    for source, start in starts.items():
        if start:
            name = stream.name if source == EVENTS else "rules"
            _LOG.warning(
                f"the change feed of {tables.identifier(name)} can be read from commit {start} on: what was written before "
                "is not judged and counts in no window, as if the table had been empty"
            )
