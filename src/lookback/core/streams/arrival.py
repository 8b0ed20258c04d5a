"""From rows of commits to what shards are given: events beyond the bound set aside, the mark of every commit."""

from __future__ import annotations

import datetime as dt

import numpy as np

from lookback.core.streams.alerts import LateEvent, moment, sortable_id
from lookback.core.streams.declaration import Stream
from lookback.core.streams.events import Events
from lookback.core.values.keys import Int64s


def split_future(events: Events, committed_at: Int64s, stream: Stream) -> tuple[Events, list[LateEvent]]:
    """The events that count, and a row for each that lies more than max_future ahead of its commit's time.

    committed_at: in microseconds, shape (rows,). An event exactly max_future ahead counts.
    """
    future = events.times - stream.max_future > committed_at
    if not future.any():
        return events, []
    discarded = []
    for at in np.flatnonzero(future).tolist():
        time, commit = int(events.times[at]), int(events.commits[at])
        ahead = int(committed_at[at]) - time
        discarded.append(LateEvent(stream.name, events.id_text(at), moment(time), commit, ahead, "discarded"))
    return events.take(np.flatnonzero(~future)), discarded


def late_place(stream: Stream, arrival: int, event_time: dt.datetime, event_id: str) -> tuple[int, dt.datetime, str]:
    """What rows of late_events are sorted by: the order of arrival of their events. event_id: as text."""
    integer = stream.fields[stream.event_id].is_integer
    return arrival, event_time, sortable_id(int(event_id) if integer else event_id)


def marks_of(events: Events, commits: Int64s) -> dict[int, int | None]:
    """The highest event time of every commit in `commits`; None where `events` has none of it."""
    marks: dict[int, int | None] = {int(commit): None for commit in np.unique(commits)}
    if len(events):
        order = np.argsort(events.commits, kind="stable")
        ordered = events.commits[order]
        starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
        highest = np.maximum.reduceat(events.times[order], starts)
        marks.update(zip(ordered[starts].tolist(), highest.tolist(), strict=True))
    return marks


def merge_marks(parts: list[dict[int, int | None]]) -> dict[int, int | None]:
    """The marks of commits whose events were counted in several places."""
    merged: dict[int, int | None] = {}
    for part in parts:
        for commit, high in part.items():
            known = merged.get(commit)
            merged[commit] = high if known is None else known if high is None else max(known, high)
    return merged
