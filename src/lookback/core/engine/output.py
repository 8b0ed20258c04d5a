"""The results of a batch in one shard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lookback.core.rules.account import Taken
from lookback.core.rules.coverage import Coverage
from lookback.core.rules.rulelog import LogRow
from lookback.core.streams.alerts import Alert, AlertOrder, Failure, LateEvent
from lookback.core.streams.flagged import FlaggedEvents
from lookback.core.streams.measured import MeasuredEvents

# How many rows of alerts are packed together. A row takes about 2 kB as an object and a few hundred bytes packed.
MAX_ROWS = 10_000


@dataclass
class Output:
    """The results of a batch.

    Attributes:
        rows: The rows of alerts in order of their places; with `pack`, those that are not packed yet.
        late: The late events.
        log: The rows for rule_log that are the same in all shards.
        notes: The rows for rule_log of this shard only.
        failures: The failures of each step in turn; `merge_failures` merges them into one per rule and version.
        evaluated: How many events each rule judged, by `Entry.role`; for rules over windows, how many these counted.
        taken: How many events of this shard each version wanted.
        flagged: The events that rules which write no alerts flagged.
        measured: The events whose measures rules recorded instead of raising alerts.
        required: The events and fields that the rules in force need.
        covered: False if a rule came into force that needs more than dispatch sent. Nothing was judged then, and the
            batch must be processed again with what `required` names.
        pack: Packs rows into `packed` as soon as there are many, so that the alerts of a batch are not all in memory as
            objects; None to keep all in `rows`.
        packed: The packed rows, which come before `rows`.
    """

    rows: list[tuple[AlertOrder, Alert]] = field(default_factory=list)
    late: list[LateEvent] = field(default_factory=list)
    log: list[LogRow] = field(default_factory=list)
    notes: list[LogRow] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    evaluated: Counter[str] = field(default_factory=Counter)
    taken: Counter[Taken] = field(default_factory=Counter)
    flagged: list[FlaggedEvents] = field(default_factory=list)
    measured: list[MeasuredEvents] = field(default_factory=list)
    required: Coverage = field(default_factory=Coverage)
    covered: bool = True
    pack: Callable[[Sequence[tuple[AlertOrder, Alert]]], bytes] | None = None
    packed: list[bytes] = field(default_factory=list)

    def add_rows(self, rows: list[tuple[AlertOrder, Alert]]) -> None:
        """Appends rows of alerts."""
        self.rows += rows
        if self.pack is not None and len(self.rows) >= MAX_ROWS:
            parts = range(0, len(self.rows), MAX_ROWS)
            self.packed += [self.pack(self.rows[at : at + MAX_ROWS]) for at in parts]
            self.rows = []

    @property
    def alerts(self) -> list[Alert]:
        """The rows of alerts, in order (see `AlertOrder`)."""
        return [alert for _, alert in self.rows]
