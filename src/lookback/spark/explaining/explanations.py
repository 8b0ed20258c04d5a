"""Explains an alert, or how a rule judged an event, from the events and rules at that time."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lookback.core.engine.schedule import STATUS_BY_ACTION
from lookback.core.errors import ReviewError
from lookback.core.explaining.eventexplanation import EventExplanation, Standing
from lookback.core.explaining.events import explain_event_at, find_key_fields
from lookback.core.explaining.evidence import Explanation
from lookback.core.explaining.explanation import explain_alert, picture_span
from lookback.core.rules.compiled import CompiledRule
from lookback.core.rules.document import read_document
from lookback.core.streams.eventrows import read_events
from lookback.core.streams.events import Events
from lookback.core.values.columns import to_text
from lookback.core.values.suggestions import suggest
from lookback.core.values.times import format_time, to_utc
from lookback.core.values.windows import PER_EVENT, SEQUENCE, SESSION, TiledWindow
from lookback.spark.explaining.evidence import find_first_within, read_evidence, select_changes, select_key
from lookback.spark.explaining.history import Lanes, RuleHistory, rank_version, read_feed, read_or_refuse
from lookback.spark.tables.sqltexts import quote_name

if TYPE_CHECKING:
    from lookback.core.rules.rulelog import LogRow
    from lookback.core.streams.declaration import Stream
    from lookback.spark.record.evaluations import Term
    from lookback.spark.tables.lakehouse import Tables

# How long after a decision all earlier rule changes are sure to be in the tables, even if clocks differ.
_SETTLED = dt.timedelta(minutes=10)


def explain(
    tables: Tables,
    streams: Mapping[str, Stream],
    alert_id: str,
    *,
    days: float | None = None,
    revision: int | None = None,
) -> Explanation:
    """Explains why an alert was raised: its rule in words, and the events that it counted or matched, as of that time.

    Measures, sessions and sequences are computed again from those events: see `Explanation.consistent`. Events that
    were deleted later count but are not shown. After `evaluate --fresh` an alert may have rows of several evaluations;
    the explanation is about the last one that wrote the alert or the given revision, under its rules and settings. If
    the first commits of the rules table are gone, its current rows are used, and a note says so.

    Args:
        tables: The tables of the workspace.
        streams: The declared streams by name.
        alert_id: The id of the alert.
        days: How far before the window the timeline begins; default: a few window lengths, at most 30 days.
        revision: The revision to explain; default: the last, whatever its verdict.

    Raises:
        ReviewError: If the alert, the revision or the rule version cannot be found, or the events' history is gone.
    """
    explainer = Explainer(tables, streams)
    return explainer.explain(find_revision(read_alert_rows(explainer.tables, alert_id), alert_id, revision), days)


class Explainer:
    """Explains many alerts, and caches the rules that it has read until the rules table or rule_log changes.

    Threads may share an instance.
    """

    def __init__(self, tables: Tables, streams: Mapping[str, Stream]) -> None:
        """Creates an explainer for the declared streams, given by name."""
        self.tables = tables.holding(*streams.values())
        self._streams = streams
        # By stream, the evaluations with an explained alert.
        self._known: dict[str, list[_KnownHistory]] = {}

    def read_row(self, alert_id: str, revision: int, decided_at: dt.datetime) -> dict[str, Any]:
        """Reads the row of an alert's revision.

        Args:
            alert_id: The id as text.
            revision: The revision.
            decided_at: The row's `decided_at` (aware), by which Delta skips other files.

        Raises:
            ReviewError: If the row no longer exists.
        """
        given = {"alert_id": alert_id, "revision": revision, "decided_at": decided_at}
        rows = self.tables.ask("alert_revision", **given).toArrow().to_pylist()
        if not rows:
            raise ReviewError(f"revision {revision} of alert {alert_id!r} no longer exists; read the queue again")
        return _read_maps(rows[0])

    def explain(self, alert: dict[str, Any], days: float | None = None) -> Explanation:
        """Explains `alert`, a row of `alerts` with aware times; for `days` see the function `explain`."""
        stream = _find_stream(self._streams, alert["stream"])
        history = self._find_history(stream, alert["decided_at"])
        explained = _explain_by_version(self.tables, stream, history, alert, days)
        notes = (*explained.notes, *_list_first(self.tables, stream, alert), *_list_lost(history, alert["rule_id"]))
        return replace(explained, notes=notes)

    def _find_history(self, stream: Stream, decided_at: dt.datetime) -> RuleHistory:
        """Finds the rules of the evaluation that wrote a row. Reads them if they are not cached or may have changed."""
        remaining = [each for each in self._known.get(stream.name, ()) if not each.history.term.covers(decided_at)]
        own = next((each for each in self._known.get(stream.name, ()) if each not in remaining), None)
        if own is not None and decided_at < own.read_at - _SETTLED:
            return own.history
        commits = tuple(self.tables.version(name) for name in ("rules", "rule_log"))
        if own is None or own.commits != commits:
            read_at = dt.datetime.now(dt.timezone.utc)
            own = _KnownHistory(RuleHistory(self.tables, stream, self._streams, decided_at), commits, read_at)
            self._known[stream.name] = [*remaining, own]
        return own.history


class _KnownHistory(NamedTuple):
    """The rules of an evaluation, and the commits of `rules` and `rule_log` and the time when they were read."""

    history: RuleHistory
    commits: tuple[int, ...]
    read_at: dt.datetime


def _explain_by_version(
    tables: Tables, stream: Stream, history: RuleHistory, alert: dict[str, Any], days: float | None
) -> Explanation:
    """Explains a row of an alert by its rule version.

    An UPDATE may have changed the version between the commit and an advance, so several documents are tried.
    """
    rule_id, number, arrival = alert["rule_id"], alert["rule_version"], int(alert["arrival"])
    before = history.find_version(rule_id, number, arrival - 1)
    updated = [each for each in history.list_updated(rule_id, number, arrival) if each.row != before.row]
    # A document with other measures or another key cannot have produced the row.
    fitting = [each for each in (before, *updated) if _has_names_of(each.rule, alert)] or [before]
    explanations: list[Explanation] = []
    for version in fitting:
        since, earliest = picture_span(version.rule, history.declarations.widest, alert, days)
        evidence = read_evidence(tables, stream, version.rule, alert, earliest, history)
        explanations.append(explain_alert(evidence, alert, version.row, since))
        if explanations[-1].consistent:
            return explanations[-1]
    return explanations[0]


def _has_names_of(rule: CompiledRule, alert: Mapping[str, Any]) -> bool:
    """Returns whether a row of an alert has exactly the measures and the key fields of a rule."""
    measures = {each.name for each in rule.measures}
    return set(alert["measures"]) == measures and set(alert["key"]) == set(rule.key_names)


def explain_event(
    tables: Tables,
    streams: Mapping[str, Stream],
    rule_id: str,
    event_id: str,
    *,
    version: int | None = None,
    days: float | None = None,
) -> EventExplanation:
    """Explains how a rule judged an event: whether it saw it, its windows, the parts of its condition, other events.

    A lookback rule is shown as of the event's arrival, any other rule as of the last commit.

    Args:
        tables: The tables of the workspace.
        streams: The declared streams by name.
        rule_id: The rule.
        event_id: The id of the event as text.
        version: The version of the rule; default: the one in force when the event arrived, else the last.
        days: See `explain`.

    Raises:
        ReviewError: If the rule, version or event cannot be found, or the history is gone.
    """
    tables = tables.holding(*streams.values())
    stream = _find_stream_of_rule(tables, streams, rule_id)
    history = RuleHistory(tables, stream, streams)
    place = _find_event(tables, stream, event_id)
    log = history.list_obeyed(tables.version(stream.name))
    standing = _find_standing(log, history, rule_id, version, place.arrival)
    found = history.find_version(rule_id, standing.version, place.arrival - 1)
    rule, event = found.rule, place.event
    commit = place.arrival if rule.spec.kind in PER_EVENT else tables.version(stream.name)
    fields = find_key_fields(rule, event.columns)
    key = {part.name: to_text(event.key_column(name).item(0)) for part, name in zip(rule.key, fields, strict=True)}
    start = time = int(event.times[0])
    if rule.spec.kind == SESSION:
        start = time - history.declarations.widest.max_session
    elif rule.sequence is not None:
        # Events from before the event's own span show how close the steps came.
        start = time - rule.sequence.within
    elif isinstance(rule.window, TiledWindow):
        start = rule.window.last_start(time) - rule.window.size
    row = {
        "rule_id": rule_id,
        "rule_version": standing.version,
        "key": key,
        "arrival": commit,
        "event_time": to_utc(time),
        "window_start": to_utc(start),
        "window_end": to_utc(time),
    }
    since, earliest = picture_span(rule, history.declarations.widest, row, days)
    evidence = read_evidence(tables, stream, rule, row, earliest, history)
    at = evidence.find_position(event_id, time, place.arrival)
    if at is None:
        raise ReviewError(
            f"event {event_id!r} is more than max_future ahead of its commit {place.arrival}, so no rule counts it; "
            f"it is in table {tables.identifier('late_events')}"
        )
    alerts = _read_alerts_about(tables, history.term, rule, key, event_id, time)
    explained = explain_event_at(evidence, at, commit, standing, found.row, since, alerts)
    return replace(explained, notes=tuple(_list_lost(history, rule_id)))


def _list_first(tables: Tables, stream: Stream, alert: Mapping[str, Any]) -> list[str]:
    """Lists the note on the first event of the table, if an alert's window begins earlier; else nothing.

    `window_complete` can be true for such a window: it says that no event is missing, not that there were any.
    """
    first = find_first_within(tables, stream, alert["window_start"], alert["window_end"])
    if first is None:
        return []
    return [f"Table {stream.name} has no event before {format_time(first)}, so the window is empty up to then."]


def _list_lost(history: RuleHistory, rule_id: str) -> list[str]:
    """Lists the note on the lost part of a rule's history; empty if nothing is lost."""
    return [note] if (note := history.describe_lost(rule_id)) else []


class _EventPlace(NamedTuple):
    """An event of the table, as columns with one row, and the commit that inserted it."""

    event: Events
    arrival: int


def _find_stream_of_rule(tables: Tables, streams: Mapping[str, Stream], rule_id: str) -> Stream:
    """Finds the stream that the last document of a rule names. Raises ReviewError if it is unknown."""
    known = tables.ask("rule_rows", rule_id=None).collect()
    own = sorted((row for row in known if row["rule_id"] == rule_id), key=rank_version)
    if not own:
        ids = [row["rule_id"] for row in known if row["rule_id"] not in (None, "*")]
        hint = suggest(rule_id, ids, "`lookback rules list` shows the rules")
        raise ReviewError(f"rule {rule_id!r} does not exist; {hint}")
    return _find_stream(streams, str(read_document(own[-1]["document"]).get("stream")))


def _find_event(tables: Tables, stream: Stream, event_id: str) -> _EventPlace:
    """Finds the first row that the table ever had of an event. Raises ReviewError if it never had one."""
    own = f"_change_type = 'insert' AND CAST({quote_name(stream.event_id)} AS STRING) = :event_id"
    found = select_changes(tables, read_feed(tables, stream.name), stream, own, event_id=event_id)
    rows = read_or_refuse(found.toArrow, stream.name)
    if not rows.num_rows:
        raise ReviewError(
            f"table {tables.identifier(stream.name)} never had an event {event_id!r}; give a value of the field "
            f"{stream.event_id}"
        )
    events = read_events(rows.drop_columns(["_change_type"]), stream, 0)[0].in_order_of_arrival()
    return _EventPlace(events.take(np.arange(1)), int(events.commits[0]))


def _find_standing(
    log: list[LogRow], history: RuleHistory, rule_id: str, version: int | None, arrival: int
) -> Standing:
    """Finds the rule version in force for an event of commit `arrival`, or the status of the chosen version then."""
    own = [row for row in log if row.rule_id == rule_id and STATUS_BY_ACTION.get(row.action, "draft") != "draft"]
    before = [row for row in own if row.arrival is None or row.arrival < arrival]
    roles = Lanes(before, history, {"rule_id": rule_id, "rule_version": version}).list_roles(rule_id)
    meant = next((each.version for each in roles if version in (None, each.version)), None)
    if meant is not None or (before and version in (None, before[-1].version)):
        last = next((row for row in reversed(before) if row.version == meant), before[-1])
        return Standing(int(last.version or 0), STATUS_BY_ACTION[last.action], last.arrival)
    version = history.find_last(rule_id) if version is None else version
    since = next((row.arrival for row in own if row.version == version), None)
    return Standing(version, "", since)


def _read_alerts_about(
    tables: Tables, term: Term, rule: CompiledRule, key: Mapping[str, str | None], event_id: str, time: int
) -> list[dict[str, Any]]:
    """Reads the alerts of a rule about an event, about a window that covers it, or with it as evidence."""
    of_event, of_evidence = rule.spec.kind in (*PER_EVENT, SEQUENCE), rule.spec.kind == SEQUENCE
    given = {"stream": rule.spec.stream, "rule_id": rule.spec.rule_id, "event_id": event_id, "time": to_utc(time)}
    alerts = tables.ask("alerts_about", of_event=of_event, of_evidence=of_evidence, **given, **term.values)
    names = [name for name in alerts.columns if name != "key"]
    about = (alerts if of_event else select_key(tables, alerts, key)).select(*names)
    return sorted((row.asDict() for row in about.collect()), key=itemgetter("arrival", "alert_id", "revision"))


def read_alert_rows(tables: Tables, alert_id: str) -> list[dict[str, Any]]:
    """Reads the rows of an alert as dicts with aware times, sorted by evaluation and revision.

    Raises:
        ReviewError: If the alert does not exist.
        SetupError: If the table of alerts does not exist.
    """
    tables.require_table("alerts")
    rows = tables.ask("alert_rows", alert_id=alert_id).toArrow().to_pylist()
    if not rows:
        raise ReviewError(f"alert {alert_id!r} does not exist; `open_queue` and `lookback alerts` list alert ids")
    return [_read_maps(row) for row in rows]


def _read_maps(row: dict[str, Any]) -> dict[str, Any]:
    """Returns an Arrow row with its maps as dicts."""
    return {**row, **{name: dict(row[name] or []) for name in ("key", "measures", "entities")}}


def find_revision(rows: list[dict[str, Any]], alert_id: str, revision: int | None) -> dict[str, Any]:
    """Finds the row of a revision of an alert, or the last row if `revision` is None.

    `rows` comes from `read_alert_rows`. If several evaluations wrote the revision, the last one counts.

    Raises:
        ReviewError: If the revision does not exist.
    """
    by_revision = {row["revision"]: row for row in rows}
    if revision is not None and revision not in by_revision:
        raise ReviewError(f"alert {alert_id!r} has no revision {revision}; there are {sorted(by_revision)}")
    return rows[-1] if revision is None else by_revision[revision]


def _find_stream(streams: Mapping[str, Stream], name: str) -> Stream:
    if name not in streams:
        raise ReviewError(f"stream {name!r} of the alert is not declared; declared are {', '.join(streams)}")
    return streams[name]
