"""Prepares the events of commits for evaluation: discards events too far in the future and finds each commit's mark.

The mark of a commit is its highest event time, which raises the watermark; that of a commit of a union has the highest
event time of each member.
"""

from __future__ import annotations

import datetime as dt

import numpy as np

from lookback.core.streams.alerts import LateEvent, sortable_id
from lookback.core.streams.declaration import Stream
from lookback.core.streams.events import Events
from lookback.core.streams.watermarks import Mark, merge_mark
from lookback.core.values.durations import format_duration
from lookback.core.values.keys import Int64s
from lookback.core.values.times import to_utc


def arrival_number(arrival: int | None) -> int:
    """Returns a sortable number for an arrival: -1 for None, which means before the first arrival."""
    return -1 if arrival is None else arrival


def describe_fast_clock(stream: Stream) -> str:
    """Warns if one fast clock can make all other events too late; empty if max_future is low enough to prevent it."""
    bound = stream.max_out_of_orderness + stream.allowed_lateness
    if stream.max_future <= bound:
        return ""
    return (
        f"max_future ({format_duration(stream.max_future)}) exceeds max_out_of_orderness + allowed_lateness "
        f"({format_duration(bound)}): one event whose clock is further ahead than that makes all other events too "
        f"late, until their times have caught up. Set max_future to {format_duration(bound)} or less"
    )


def split_future(
    events: Events, committed_at: Int64s, stream: Stream, max_future: int | Int64s | None = None
) -> tuple[Events, list[LateEvent]]:
    """Discards the events that are more than max_future ahead of their commit's time.

    An event exactly max_future ahead is kept.

    Args:
        events: Events of any commits.
        committed_at: The commit time of each event in microseconds, shape (rows,).
        stream: The declaration of the stream.
        max_future: The limit of each event, or one for all; None for the stream's.

    Returns:
        The events to evaluate, and a row of late_events for each discarded event.
    """
    future = events.times - (stream.max_future if max_future is None else max_future) > committed_at
    if not future.any():
        return events, []
    discarded = []
    for at in np.flatnonzero(future).tolist():
        time, commit = int(events.times[at]), int(events.commits[at])
        ahead = int(committed_at[at]) - time
        discarded.append(LateEvent(stream.name, events.id_text(at), to_utc(time), commit, ahead, "discarded"))
    return events.take(np.flatnonzero(~future)), discarded


def late_sort_key(stream: Stream, arrival: int, event_time: dt.datetime, event_id: str) -> tuple[int, dt.datetime, str]:
    """Returns the sort key of a row of late_events: arrival, event time and event id. event_id: as text."""
    integer = stream.fields[stream.event_id].is_integer
    return arrival, event_time, sortable_id(int(event_id) if integer else event_id)


def find_marks(events: Events, commits: Int64s) -> dict[int, Mark | None]:
    """Finds the mark of every commit in `commits`; None for a commit without rows in `events`."""
    marks: dict[int, Mark | None] = {int(commit): None for commit in np.unique(commits)}
    if events.member_field:
        members = events.columns[events.member_field].values
        for name in set(members.tolist()) - {None}:
            for commit, high in _find_highest(events.take(members == name)).items():
                known = marks[commit]
                marks[commit] = {**(known if isinstance(known, dict) else {}), name: high}
    else:
        marks.update(_find_highest(events))
    return marks


def _find_highest(events: Events) -> dict[int, int]:
    """Finds the highest event time of each commit."""
    if not len(events):
        return {}
    order = np.argsort(events.commits, kind="stable")
    ordered = events.commits[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    highest = np.maximum.reduceat(events.times[order], starts)
    return dict(zip(ordered[starts].tolist(), highest.tolist(), strict=True))


def merge_marks(parts: list[dict[int, Mark | None]]) -> dict[int, Mark | None]:
    """Merges the marks found in several parts of the same commits."""
    merged: dict[int, Mark | None] = {}
    for part in parts:
        for commit, mark in part.items():
            merged[commit] = merge_mark(merged.get(commit), mark)
    return merged
