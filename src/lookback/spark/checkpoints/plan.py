"""The plan of an evaluation's query, and how a changed declaration of its stream differs from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lookback.core.rules.coverage import Coverage

if TYPE_CHECKING:
    from lookback.core.streams.declaration import Stream


@dataclass(frozen=True)
class Plan:
    """The plan of a query.

    Attributes:
        shards: The number of parts that the keys are divided into, fixed by the first batch.
        coverage: The events and fields that dispatch sends: enough for all rules in force, including those whose rows
            were deleted since.
        declared: The part of the stream's declaration that state depends on.
        starts: The first commit to read of each source.
        spark: The version of Spark that plans the query.
        gates: What an enforced gate requires of active rows, by the rules commit from which it applies; see
            `RuleChange`.
        settings: The rows of the `Declarations` that the query uses.
    """

    shards: int
    coverage: Coverage
    declared: Mapping[str, Any] = field(default_factory=dict)
    starts: Mapping[str, int] = field(default_factory=dict)
    spark: str = ""
    gates: Mapping[int, str] = field(default_factory=dict)
    settings: Sequence[tuple[int | None, str]] = ()

    def first_commit(self, source: str) -> int:
        """Returns the first commit that the query reads of a source."""
        return self.starts.get(source, 0)


def snapshot_declaration(stream: Stream) -> dict[str, Any]:
    """Returns the part of a stream's declaration that state depends on, as plain values."""
    fields = {name: str(type_) for name, type_ in stream.fields.items()}
    return {
        "stream": stream.name,
        "event_id": stream.event_id,
        "event_time": stream.event_time,
        "fields": fields,
        "order_by": list(stream.order_by),
    }


def find_changes(plan: Plan, stream: Stream) -> list[str]:
    """Describes how a stream's declaration differs from the one that the state was built with."""
    before = plan.declared
    if not before:
        return []
    if before["stream"] != stream.name:
        return [f"it is the checkpoint of stream {before['stream']!r}"]
    now = snapshot_declaration(stream)
    problems = [
        f"{key} was {before[key]}, now {now[key]}"
        for key in ("event_id", "event_time", "order_by")
        if before[key] != now[key]
    ]
    read = {before["event_id"], before["event_time"], *plan.coverage.fields}
    for name in sorted(read & before["fields"].keys()):
        was, is_now = before["fields"][name], now["fields"].get(name)
        if is_now is None:
            problems.append(f"field {name}, which rules read, is gone")
        elif is_now != was:
            problems.append(f"field {name} was {was}, now {is_now}")
    return problems
