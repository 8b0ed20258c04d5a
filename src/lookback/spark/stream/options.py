"""The options with which the evaluation of a stream starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lookback.core.errors import SetupError

if TYPE_CHECKING:
    from lookback.core.rules.gate import Gate
    from lookback.spark.batches.sink import BatchReport
    from lookback.spark.following.warmups import Historian


@dataclass(frozen=True)
class EvaluationOptions:
    """The options of an evaluation.

    Attributes:
        once: Whether to end after evaluating the existing events.
        every: How often to look for new events.
        admission: Options of the Delta source that limit a batch.
        on_batch: Called with the report of each batch.
        idle_after: After this many microseconds without a new commit, an `advance` in the rules table moves the
            watermark forward by as much, repeatedly.
        shards: The number of parts that the keys of a new checkpoint are divided into, permanently (see `repartition`).
            SetupError is raised if an existing checkpoint has another number. Defaults to `default_shards`, then to the
            stream's `shards`, then to the cores of the cluster, at most 48.
        default_shards: The same as a setting: if an existing checkpoint has another number, only a warning is logged.
        rebuild: Whether to move the checkpoint aside and rebuild the state from the tables. Existing rows are not
            written again.
        fresh: Whether to allow a new checkpoint if the tables already have outputs of the stream, which are then
            written again.
        accept_unknown: Whether to use a checkpoint with an unknown format, unchecked.
        gate: The gate in the settings. If enforced, it rejects active rows without evidence, from the next row of the
            rules table on.
        historian: Builds the history of new versions' windows. If None, they start without history.

    Raises:
        SetupError: If there is less than one shard.
    """

    once: bool = False
    every: str = "500 milliseconds"
    admission: Mapping[str, str] = field(default_factory=dict)
    on_batch: Callable[[BatchReport], None] | None = None
    idle_after: int | None = None
    shards: int | None = None
    default_shards: int | None = None
    rebuild: bool = False
    fresh: bool = False
    accept_unknown: bool = False
    gate: Gate | None = None
    historian: Historian | None = None

    def __post_init__(self) -> None:
        for number in (self.shards, self.default_shards):
            if number is not None and number < 1:
                raise SetupError(f"an evaluation needs at least one shard, got {number}")
