"""Where an evaluation begins: on a new checkpoint, on the one that it has, or with its state made anew."""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lookback.core.errors import SetupError
from lookback.spark.platform.session import MAX_SHARDS
from lookback.spark.stream.checkpoint import EVENTS, RULES, Checkpoint, UnknownFormError
from lookback.spark.stream.rebuild import Rebuild, has_outputs
from lookback.spark.stream.sink import is_written
from lookback.spark.tables.history import find_first_readable, require_commits

if TYPE_CHECKING:
    from lookback.core.streams.declaration import Stream
    from lookback.spark.tables.lakehouse import Tables

_LOG = logging.getLogger("lookback")
_OUTPUTS = ("rule_log", "late_events", "alerts")


@dataclass(frozen=True)
class Beginning:
    """starts: the first commit of each source that its query reads. rebuild: how state is made anew, if it is."""

    starts: Mapping[str, int]
    rebuild: Rebuild | None


def begin(
    tables: Tables, stream: Stream, streams: Mapping[str, Stream], checkpoint: Checkpoint, *,
    rebuild: bool, fresh: bool, shards: int | None, default_shards: int | None = None, accept_unknown: bool = False,
) -> Beginning:  # fmt: skip
    """Looks whether an evaluation can begin on this checkpoint, and how.

    rebuild: move it aside and make the state anew from the tables. fresh: a new one may begin although outputs of the
    stream are there, and writes all of them again. shards: the number that a checkpoint must have. default_shards: the
    number that a new one would have by the settings. accept_unknown: go on with one whose form is not known here, and
    mend nothing. Raises SetupError with the remedy.
    """
    if rebuild:
        _prepare_rebuild(tables, stream, streams, checkpoint)
    checkpoint.require_spark(tables.spark.version, stream.name)
    is_known = not (accept_unknown and _warn_of_unknown_form(checkpoint))
    if is_known:
        for line in checkpoint.mend(stream, lambda mark: any(is_written(tables, name, mark) for name in _OUTPUTS)):
            _LOG.warning(line)
    checkpoint.require_fit(stream, shards)
    document, plan = checkpoint.rebuild(), checkpoint.plan()
    made_anew = None if document is None else Rebuild.from_dict(document)
    if not checkpoint.is_new:
        if plan is not None and shards is None:
            _warn_of_shards(checkpoint, stream, plan.shards, default_shards)
        if is_known:
            require_sources(tables, stream, checkpoint)
        return Beginning({} if plan is None else plan.starts, None if _is_made(checkpoint, made_anew) else made_anew)
    if made_anew is None and not fresh and has_outputs(tables, stream):
        raise SetupError(
            f"{checkpoint.folder} is a new checkpoint, but the tables have alerts or log rows of stream {stream.name!r} "
            f"already; from the beginning they would be written twice. To go on where they end: lookback evaluate "
            f"{stream.name} --rebuild. If a checkpoint is elsewhere, name it by --checkpoint. To have all of them once "
            "more beside those that are there: --fresh; to try a rule out, publish it with status shadow"
        )
    # A first start that was cut short has found them already.
    starts = plan.starts if plan is not None and plan.starts else _starts(tables, stream)
    _warn_of_starts(tables, stream, starts)
    _warn_of_no_events(tables, stream)
    return Beginning(starts, made_anew)


def _warn_of_unknown_form(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint is of an unknown form, which is said then."""
    try:
        checkpoint.require_known_form()
    except UnknownFormError as error:
        _LOG.warning(f"the settings accept a checkpoint of an unknown form, so nothing is checked: {error}")
        return True
    return False


def _warn_of_shards(checkpoint: Checkpoint, stream: Stream, shards: int, default: int | None) -> None:
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


def _starts(tables: Tables, stream: Stream) -> dict[str, int]:
    return {EVENTS: find_first_readable(tables, stream.name), RULES: find_first_readable(tables, "rules")}


def _prepare_rebuild(tables: Tables, stream: Stream, streams: Mapping[str, Stream], checkpoint: Checkpoint) -> None:
    """Moves the checkpoint aside and writes into a new one how state is made anew."""
    judged = None
    # What cannot be read of it is not needed.
    with contextlib.suppress(SetupError):
        judged = checkpoint.judged_through()
    plan = Rebuild.of_tables(tables, stream, streams, _starts(tables, stream), judged)
    moved = checkpoint.move_aside()
    if moved is not None:
        _LOG.warning(f"the checkpoint before is kept as {moved}; delete it when the new one has caught up")
    if plan is not None:
        checkpoint.record_rebuild(plan.to_dict())


def _is_made(checkpoint: Checkpoint, rebuild: Rebuild | None) -> bool:
    """Whether all that was written before has been judged again: nothing waits then, and nothing can be there twice.

    Not where windows may still begin before what was read: of them nothing is said.
    """
    if rebuild is None or not rebuild.is_exact:
        return False
    try:
        judged = checkpoint.judged_through()
    except UnknownFormError:
        return False
    if judged is None:
        return False
    return judged >= (rebuild.schedule.through or 0)


def require_sources(tables: Tables, stream: Stream, checkpoint: Checkpoint) -> None:
    """Raises SetupError, with the remedy, where the commits that a checkpoint goes on from cannot be read any more."""
    last = checkpoint.last_batch_at()
    ended = None if last is None else dt.datetime.fromtimestamp(last, dt.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    again = checkpoint.reads_again_from()
    for source, commit in checkpoint.continues_from().items():
        name = stream.name if source == EVENTS else "rules"
        require_commits(tables, name, again[source], commit, stream.name, ended)


def _warn_of_no_events(tables: Tables, stream: Stream) -> None:
    passed_over = tables.count_passed_over(stream)
    if passed_over:
        _LOG.warning(
            f"{passed_over:,} rows of {tables.identifier(stream.name)} are no events and are passed over: {stream.event_id} is "
            f"NULL, or {stream.event_time} is NULL or not in the years 1 to 9999. So will be others of that kind"
        )


def _warn_of_starts(tables: Tables, stream: Stream, starts: Mapping[str, int]) -> None:
    for source, start in starts.items():
        if start:
            name = stream.name if source == EVENTS else "rules"
            _LOG.warning(
                f"the change feed of {tables.identifier(name)} can be read from commit {start} on: what was written before "
                "is not judged and stands in no window, as if the table had been empty"
            )
