"""Asks the questions that decide a stream's health, of any engine, and reads their answers."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lookback.core.operations.backlog import Backlog
from lookback.core.operations.figures import Figures, Sample
from lookback.core.operations.thresholds import RECENT
from lookback.core.rules.versions import EVALUATED
from lookback.core.streams.metrics import RuleCounts
from lookback.core.values.times import to_utc

# The maximum length of a logged message within a sentence.
_MAX_CHARACTERS = 200


# Asks a question, with values by name. The values of an answer's rows may be texts, as a SQL warehouse sends them.
Ask = Callable[..., Sequence[Any]]


class Samples(NamedTuple):
    """The samples of the last hour, oldest first, and the time and last judged commit of the last sample ever."""

    recent: list[Sample]
    last_at: dt.datetime | None = None
    judged: int | None = None


class HealthQuestions:
    """The questions about one stream at the aware time `now`."""

    def __init__(self, ask: Ask, stream: str, now: dt.datetime) -> None:
        self._ask, self._stream, self._now, self._since = ask, stream, now, now - RECENT

    def read_figures(
        self,
        list_statuses: Callable[[], Sequence[tuple[str, str]]],
        measure: Callable[[int | None], Backlog],
        count_ingested: Callable[[], int],
        judged: int | None = None,
    ) -> Figures:
        """Reads the figures that the questions answer, together with what each engine finds out by itself.

        Args:
            list_statuses: Lists rule_id and status of the current versions of the stream's rules.
            measure: Measures the backlog after a judged commit.
            count_ingested: Counts the rows that ingest accepted in the last hour. Called only if it rejected some.
            judged: The last judged commit that the checkpoint names; None if it is not read.
        """
        samples, statuses = self.read_samples(), list_statuses()
        judged = max((commit for commit in (samples.judged, judged) if commit is not None), default=None)
        judged = self.find_last_arrival() if judged is None else judged
        waiting = measure(judged)
        rejected, reason = self.count_rejected()
        failing, refused = self.read_failures()
        return Figures(
            stream=self._stream,
            now=self._now,
            rules=sum(1 for _, status in statuses if status in EVALUATED),
            quarantined=[rule_id for rule_id, status in statuses if status == "quarantined"],
            committed=waiting.committed,
            judged=judged,
            waiting=waiting.waiting,
            lag=waiting.seconds(self._now),
            newest=waiting.newest,
            samples=samples.recent,
            last_sample=samples.last_at,
            failing=failing,
            refused=refused,
            rejected=rejected,
            reason=reason,
            ingested=count_ingested() if rejected else 0,
        )

    def read_samples(self) -> Samples:
        """Reads the samples from the table `metrics`."""
        rows = self._ask("health_samples", stream=self._stream, since=self._since)
        if not rows:
            return Samples([])
        recent = [_parse_sample(row) for row in rows if int(row["is_recent"])]
        return Samples(recent, to_utc(int(rows[-1]["at_us"])), _parse_int(rows[-1]["judged"]))

    def find_last_arrival(self) -> int | None:
        """Finds the last commit for which an alert was written."""
        (row,) = self._ask("last_arrival", stream=self._stream)
        return _parse_int(row["arrival"])

    def count_rejected(self) -> tuple[int, str]:
        """Counts the rows that ingest rejected within the last hour, and returns the reason of the newest too."""
        (row,) = self._ask("rejected_lately", stream=self._stream, since=self._since)
        return int(row["counted"]), (row["reason"] or "")[:_MAX_CHARACTERS]

    def read_failures(self) -> tuple[dict[str, str], dict[str, str]]:
        """Reads the log messages of rules that failed within the last hour, and of rules whose last row was rejected."""
        failing, refused = {}, {}
        for row in self._ask("rule_failures", stream=self._stream):
            message = (row["message"] or "")[:_MAX_CHARACTERS]
            if int(row["has_failed"]) and to_utc(int(row["at_us"])) >= self._since:
                failing[row["rule_id"]] = message
            if row["action"] == "rejected":
                refused[row["rule_id"]] = message
        return failing, refused


def _parse_sample(row: Any) -> Sample:
    watermark = _parse_int(row["watermark_us"])
    return Sample(
        at=to_utc(int(row["at_us"])),
        events=int(row["events"] or 0),
        late=int(row["late"] or 0),
        discarded=int(row["discarded"] or 0),
        lag=float(row["lag_seconds"] or 0),
        watermark=None if watermark is None else to_utc(watermark),
        state_rows=_parse_int(row["state_rows"]),
        stages={stage: int(row[f"{stage}_ms"] or 0) for stage in ("run", "evaluate", "write")},
        rules={rule_id: RuleCounts(**counts) for rule_id, counts in json.loads(row["by_rule"] or "{}").items()},
    )


def _parse_int(value: str | int | None) -> int | None:
    return None if value is None else int(value)
