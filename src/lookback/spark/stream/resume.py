"""Begins an evaluation on a new or existing checkpoint, or with its state rebuilt from the tables."""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lookback.core.errors import SetupError
from lookback.spark.batches.sink import OUTPUTS, find_last_written, is_written
from lookback.spark.checkpoints.checkpoint import Checkpoint
from lookback.spark.checkpoints.repair import repair
from lookback.spark.checkpoints.sparklogs import EVENTS, RULES, UnknownFormatError, require_known_format
from lookback.spark.platform.session import MAX_SHARDS
from lookback.spark.stream.rebuild import Rebuild, has_outputs, log_new_beginning
from lookback.spark.tables.history import find_first_readable, find_other_histories, require_commits

if TYPE_CHECKING:
    from lookback.core.streams.declaration import Stream
    from lookback.spark.stream.options import EvaluationOptions
    from lookback.spark.tables.lakehouse import Tables

_LOG = logging.getLogger("lookback")


@dataclass(frozen=True)
class Beginning:
    """The start of an evaluation.

    Attributes:
        starts: The first commit that the query reads of each source.
        rebuild: How to rebuild the state; None without a rebuild.
    """

    starts: Mapping[str, int]
    rebuild: Rebuild | None


def begin(
    tables: Tables, stream: Stream, streams: Mapping[str, Stream], checkpoint: Checkpoint, options: EvaluationOptions
) -> Beginning:
    """Checks and repairs a checkpoint, and returns how the evaluation begins.

    Args:
        tables: The tables.
        stream: The stream to evaluate.
        streams: All streams by name.
        checkpoint: The checkpoint.
        options: The options of the evaluation.

    Returns:
        The start of the evaluation.

    Raises:
        SetupError: If the evaluation cannot begin; the message has the remedy.
    """
    if not options.fresh:
        require_known_tables(tables, stream, checkpoint)
    if options.rebuild or (options.fresh and find_other_histories(tables, checkpoint.read_noted(stream))):
        _prepare_new_checkpoint(tables, stream, streams, checkpoint, rebuild=options.rebuild)
    checkpoint.require_spark(tables.spark.version, stream.name)
    is_known = not (options.accept_unknown and _warn_if_unknown_format(checkpoint))
    if is_known:
        for line in repair(checkpoint, stream, lambda mark: any(is_written(tables, name, mark) for name in OUTPUTS)):
            _LOG.warning(line)
    checkpoint.require_fit(stream, options.shards)
    document, plan = checkpoint.read_rebuild(), checkpoint.read_plan()
    rebuild_plan = None if document is None else Rebuild.from_dict(document)
    if not checkpoint.is_new:
        if options.fresh:
            _LOG.warning(
                "%s exists, so the evaluation goes on where it ended, and --fresh changes nothing. To judge all events "
                "again, give --checkpoint a new folder",
                checkpoint.folder,
            )
        if plan is not None and options.shards is None:
            _warn_about_shards(checkpoint, stream, plan.shards, options.default_shards)
        if is_known:
            require_sources(tables, stream, checkpoint)
            _require_newest(tables, stream, checkpoint)
        return Beginning(
            {} if plan is None else plan.starts, rebuild_plan if is_being_rebuilt(checkpoint, rebuild_plan) else None
        )
    if rebuild_plan is None and not options.fresh and has_outputs(tables, stream):
        raise SetupError(
            f"{checkpoint.folder} is a new checkpoint, but the tables already have alerts or log rows of stream "
            f"{stream.name!r}, which would be written twice. To continue where they end, run lookback evaluate "
            f"{stream.name} --rebuild. If the checkpoint is elsewhere, set --checkpoint. To write all of them "
            "a second time, use --fresh; to try out a rule, publish it with status shadow"
        )
    if rebuild_plan is None and plan is None and has_outputs(tables, stream):
        log_new_beginning(tables, stream)
    # An interrupted first start has already stored them.
    starts = plan.starts if plan is not None else _find_starts(tables, stream)
    _warn_about_starts(tables, stream, starts)
    _warn_about_ignored_rows(tables, stream)
    return Beginning(starts, rebuild_plan)


def _warn_if_unknown_format(checkpoint: Checkpoint) -> bool:
    """Logs a warning if the checkpoint has an unknown format. Returns whether it has."""
    try:
        require_known_format(checkpoint.folder)
    except UnknownFormatError as error:
        _LOG.warning(f"the settings accept a checkpoint of an unknown format, so nothing is checked: {error}")
        return True
    return False


def _warn_about_shards(checkpoint: Checkpoint, stream: Stream, shards: int, default: int | None) -> None:
    remedy = f"to change it: lookback evaluate {stream.name} --rebuild --shards"
    if default not in (None, shards):
        _LOG.warning(
            f"{checkpoint.folder} keeps its {shards} shards, because the setting of {default} is only for a new "
            f"checkpoint; {remedy} {default}"
        )
    elif default is None and shards > MAX_SHARDS:
        _LOG.warning(
            f"{checkpoint.folder} keeps its {shards} shards, and each takes time in every batch; {remedy} N, where N "
            "is the number of cores of the cluster"
        )


def _find_starts(tables: Tables, stream: Stream) -> dict[str, int]:
    return {EVENTS: find_first_readable(tables, stream.name), RULES: find_first_readable(tables, "rules")}


def _prepare_new_checkpoint(
    tables: Tables, stream: Stream, streams: Mapping[str, Stream], checkpoint: Checkpoint, *, rebuild: bool
) -> None:
    """Moves the checkpoint aside, and for a rebuild stores its plan in a new one."""
    # An unreadable checkpoint can also be rebuilt.
    judged, plan = checkpoint.find_last_judged(), None
    if rebuild:
        plan = Rebuild.from_tables(tables, stream, _find_starts(tables, stream), judged)
    moved = checkpoint.move_aside()
    if moved is not None:
        _LOG.warning(f"the previous checkpoint is kept as {moved}; delete it when the new one has caught up")
    if plan is not None:
        checkpoint.write_rebuild(plan.to_dict())


def is_being_rebuilt(checkpoint: Checkpoint, rebuild: Rebuild | None) -> bool:
    """Returns whether a rebuild still has commits with output to evaluate again. After that it is a normal evaluation.

    A rebuild that could not read the first events never ends, because windows may always begin before the events it
    read.
    """
    if rebuild is None or not rebuild.is_exact:
        return rebuild is not None
    judged = checkpoint.find_last_judged()
    return judged is None or judged < (rebuild.through or 0)


def require_known_tables(tables: Tables, stream: Stream, checkpoint: Checkpoint) -> None:
    """Raises SetupError, with the remedy, if the tables are not those that the checkpoint has read."""
    if changed := find_other_histories(tables, checkpoint.read_noted(stream)):
        raise SetupError(
            f"the evaluation of stream {stream.name!r} cannot resume from {checkpoint.folder}: {'; '.join(changed)}. "
            "Tables were restored from an older backup, or deleted and created again. Restore the tables that were "
            "read; or begin a new evaluation of the current tables, which keeps the earlier outputs: lookback evaluate "
            f"{stream.name} --fresh"
        )


def _require_newest(tables: Tables, stream: Stream, checkpoint: Checkpoint) -> None:
    """Raises SetupError if the outputs have rows of a batch after the checkpoint's last one."""
    planned = checkpoint.find_last_planned()
    if (written := find_last_written(tables, str(checkpoint.query_id))) > planned:
        raise SetupError(
            f"{checkpoint.folder} ends at batch {planned}, but the tables have rows of its batch {written}: an older "
            "copy of the checkpoint was restored, and its output would be written twice. Restore the newer one, or "
            f"rebuild the state from the tables, which writes nothing twice: lookback evaluate {stream.name} --rebuild"
        )


def require_sources(tables: Tables, stream: Stream, checkpoint: Checkpoint) -> None:
    """Raises SetupError, with the remedy, if the next commits of a checkpoint can no longer be read."""
    last = checkpoint.read_last_batch_time()
    ended = None if last is None else dt.datetime.fromtimestamp(last, dt.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    again = checkpoint.find_reread_commits()
    for source, commit in checkpoint.find_next_commits().items():
        name = stream.name if source == EVENTS else "rules"
        require_commits(tables, name, again[source], commit, stream.name, ended)


def _warn_about_ignored_rows(tables: Tables, stream: Stream) -> None:
    ignored = tables.count_passed_over(stream)
    if ignored:
        _LOG.warning(
            f"{ignored:,} rows of {tables.identifier(stream.name)} are not events and are ignored: {stream.event_id} "
            f"is NULL, or {stream.event_time} is NULL or not in the years 1 to 9999. More such rows will be ignored too"
        )


def _warn_about_starts(tables: Tables, stream: Stream, starts: Mapping[str, int]) -> None:
    for source, start in starts.items():
        if start:
            name = stream.name if source == EVENTS else "rules"
            _LOG.warning(
                f"the change feed of {tables.identifier(name)} can be read only from commit {start} on: earlier rows "
                "are not evaluated and count in no window, as if the table had been empty"
            )
