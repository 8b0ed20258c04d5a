"""Distinguishes the evaluations of a stream: each `evaluate --fresh` begins another one and keeps earlier outputs."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, NamedTuple

from lookback.core.values.times import to_utc

if TYPE_CHECKING:
    from lookback.core.streams.declaration import Stream
    from lookback.spark.tables.lakehouse import Tables


class Term(NamedTuple):
    """The time of one evaluation of a stream, between two starts with `--fresh` (aware); None means unbounded.

    Attributes:
        begun_at: When it began.
        ended_at: When the next one began.
        begun_after: The last commit of the events that appears in the outputs of earlier evaluations, if any.
    """

    begun_at: dt.datetime | None = None
    ended_at: dt.datetime | None = None
    begun_after: int | None = None

    @classmethod
    def find(cls, tables: Tables, stream: Stream, decided_at: dt.datetime | None = None) -> Term:
        """Finds the evaluation that wrote a row at `decided_at`; by default the last evaluation."""
        if not tables.may_have_rows("rule_log"):
            return cls()
        rows = tables.ask("fresh_evaluations", stream=stream.name).collect()
        starts = [(to_utc(row["at_us"]), row["arrival"]) for row in rows]
        begun = [each for each in starts if decided_at is None or each[0] < decided_at]
        ended = [at for at, _ in starts[len(begun) :]]
        begun_at, begun_after = begun[-1] if begun else (None, None)
        return cls(begun_at, ended[0] if ended else None, begun_after)

    def covers(self, written_at: dt.datetime) -> bool:
        """Returns whether the evaluation wrote a row at `written_at`, a time with a zone."""
        return (self.begun_at is None or self.begun_at < written_at) and (
            self.ended_at is None or written_at <= self.ended_at
        )

    @property
    def values(self) -> dict[str, dt.datetime | None]:
        """The bounds, for a question."""
        return {"begun_at": self.begun_at, "ended_at": self.ended_at}
