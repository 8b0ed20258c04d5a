"""Reports the rows that an ingest read, ingested, found to be duplicates and rejected."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lookback.core.values.texts import count_noun
from lookback.spark.ingest.rejected import Rejection

if TYPE_CHECKING:
    from collections.abc import Iterable

_MAX_REASONS = 5


@dataclass(frozen=True)
class IngestReport:
    """Counts of the rows that an ingest read, ingested, found to be duplicates, and rejected.

    Attributes:
        stream: The stream's name.
        offered: The rows read.
        ingested: The rows written to the events table.
        duplicates: The rows whose event was already ingested.
        rejected: The rows written to rejected_events.
        commits: The number of commits.
        seconds: The duration.
        first_version: The first committed version of the events table; None if nothing was committed, and in the
            reports of continuous ingest.
        last_version: The last committed version; None in the same cases.
        without_zone: Usable rows with a time without a zone, taken as UTC.
        without_time: Usable rows with a day instead of a time, taken as midnight UTC.
        rejections: The kinds of reasons for rejected rows.
    """

    stream: str
    offered: int
    ingested: int
    duplicates: int
    rejected: int
    commits: int
    seconds: float
    first_version: int | None = None
    last_version: int | None = None
    without_zone: int = 0
    without_time: int = 0
    rejections: tuple[Rejection, ...] = ()

    @property
    def balanced(self) -> bool:
        """True if every row read is accounted for."""
        return self.offered == self.ingested + self.duplicates + self.rejected

    def plus(self, more: IngestReport) -> IngestReport:
        """Returns the sum of this report and another round's report `more`, without versions."""
        return IngestReport(
            stream=self.stream,
            offered=self.offered + more.offered,
            ingested=self.ingested + more.ingested,
            duplicates=self.duplicates + more.duplicates,
            rejected=self.rejected + more.rejected,
            commits=self.commits + more.commits,
            seconds=self.seconds + more.seconds,
            without_zone=self.without_zone + more.without_zone,
            without_time=self.without_time + more.without_time,
            rejections=_merge_rejections(self.rejections + more.rejections),
        )

    @property
    def why_rejected(self) -> str:
        """The most frequent reasons for rejected rows, one line each with an example, and the command to list all."""
        if not self.rejections:
            return ""
        lines = [f"  {rejection}" for rejection in self.rejections[:_MAX_REASONS]]
        if len(self.rejections) > _MAX_REASONS:
            lines.append(f"  ... and {len(self.rejections) - _MAX_REASONS} other reasons")
        return "\n".join([*lines, f"  all of them: lookback rejected {self.stream}"])

    def __str__(self) -> str:
        first, last = self.first_version, self.last_version
        versions = f"version {first}" if first == last else f"versions {first} to {last}"
        where = "" if first is None else f" ({versions})"
        return (
            f"{self.stream}: {self.offered:,} offered = {self.ingested:,} ingested + {self.duplicates:,} duplicates + "
            f"{self.rejected:,} rejected; {count_noun(self.commits, 'commit')}{where} in {self.seconds:.1f} s"
        )

    @property
    def assumptions(self) -> str:
        """The assumptions about times without a zone or days without a time, and how to avoid them; may be empty."""
        assumed = []
        if self.without_zone:
            assumed.append(f"{_describe_rows(self.without_zone)} a time without a zone, taken as UTC")
        if self.without_time:
            assumed.append(f"{_describe_rows(self.without_time)} a day without a time, taken as midnight UTC")
        if not assumed:
            return ""
        return (
            f"{self.stream}: {'; '.join(assumed)}. Write times as 2026-01-31T12:00:00Z, or name the zone in `columns`, "
            "such as to_utc_timestamp(at, 'Europe/Berlin')"
        )


def _describe_rows(count: int) -> str:
    return "1 row has" if count == 1 else f"{count:,} rows have"


def _merge_rejections(rejections: Iterable[Rejection]) -> tuple[Rejection, ...]:
    """Merges rejections by kind: adds up the rows, keeps the first example, and sorts the most frequent kind first."""
    merged: dict[str, Rejection] = {}
    for each in rejections:
        known = merged.get(each.reason)
        merged[each.reason] = each if known is None else replace(known, rows=known.rows + each.rows)
    return tuple(sorted(merged.values(), key=lambda each: (-each.rows, each.reason)))
