"""The stateful operator. It imports little because Spark starts an interpreter to inspect it before every query."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql.streaming.stateful_processor import StatefulProcessorHandle, TimerValues

    from lookback.core.streams.declaration import Stream
    from lookback.core.streams.declarations import Declarations
    from lookback.places import Place
    from lookback.spark.batches.shard import Shard

PAGES = "pages"
_NAME = StructType([StructField("name", StringType(), nullable=False)])
_PAGE = StructType([StructField("page", BinaryType(), nullable=False)])


class ShardProcessor(StatefulProcessor):
    """Evaluates the blocks of one shard and returns the rows to write.

    `query` is the folder of the checkpoint. `query_id` is None if versions do not wait for their history.
    """

    def __init__(
        self,
        declarations: Declarations,
        streams: dict[str, Stream],
        labels: list[str],
        query: Place,
        schedule: dict[str, Any] | None = None,
        query_id: str | None = None,
    ) -> None:
        self._declarations, self._streams, self._labels, self._query = declarations, streams, labels, query
        self._schedule, self._query_id = schedule, query_id

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Opens the pages. Spark calls this before the first rows of a batch."""
        self._pages = handle.getMapState(PAGES, _NAME, _PAGE)

    def handleInputRows(  # type: ignore[override]  # noqa: N802 - Spark's name
        self,
        key: Any,
        rows: Iterator[pd.DataFrame],
        timerValues: TimerValues,  # noqa: N803
    ) -> Iterator[pd.DataFrame]:
        """Evaluates one batch of one shard."""
        yield self._open_shard(key).judge(rows)

    def close(self) -> None:
        """Does nothing, because nothing is kept open."""

    def _open_shard(self, key: Any) -> Shard:
        from lookback.core.engine.schedule import Schedule
        from lookback.spark.batches.shard import Shard
        from lookback.spark.checkpoints.histories import Histories

        histories = None if self._query_id is None else Histories.of(self._query, self._query_id)
        schedule = None if self._schedule is None else Schedule.from_dict(self._schedule)
        return Shard(
            self._declarations,
            self._streams,
            self._labels,
            self._query,
            str(key[0]),
            self._pages,
            schedule,
            histories,
        )
