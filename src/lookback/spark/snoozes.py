"""Snoozes alerts: leaves those of a rule, of a key, or of both out of the queue and notifications for a while.

A snooze is a row of the table `snoozes`, which you may also write by SQL. Alerts are still written. When a snooze ends,
by the clock, the alerts that are still open return to the queue.
"""

from __future__ import annotations

import contextlib
import datetime as dt
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812

from lookback.core.errors import DurationError, ReviewError, RuleError
from lookback.core.rules.document import read_document
from lookback.core.rules.keys import list_entry_names
from lookback.core.values.durations import parse_duration
from lookback.core.values.suggestions import suggest
from lookback.core.values.times import parse_calendar_time, to_utc
from lookback.spark.rulerows import list_rule_ids
from lookback.spark.tables.conflicts import change_table
from lookback.spark.tables.sqltexts import to_timestamp

if TYPE_CHECKING:
    from pyspark.sql import Column

    from lookback.core.streams.declaration import Stream
    from lookback.spark.tables.lakehouse import Tables

TABLE = "snoozes"
# Used instead of a rule's id for the alerts of any rule.
ANY_RULE = "*"
PENDING, ACTIVE, EXPIRED = "pending", "active", "expired"


@dataclass(frozen=True)
class Snooze:
    """A pause of some alerts in the queue, for the aware times [since, until), by the clock.

    A `rule_id` of None means any rule. A `key` of None means any key; otherwise it covers every key with these values.
    """

    rule_id: str | None
    key: Mapping[str, str | None] | None
    since: dt.datetime
    until: dt.datetime
    reason: str
    author: str

    @property
    def subject(self) -> str:
        """The rule and key in words."""
        rule = "any rule" if self.rule_id is None else self.rule_id
        key = ", ".join(f"{name} = {'NULL' if text is None else text}" for name, text in (self.key or {}).items())
        return f"{rule}, {key}" if key else rule

    def __str__(self) -> str:
        return f"The queue leaves out {self.subject} until {self.until:%Y-%m-%dT%H:%M:%SZ}: {self.reason}"

    def covers(self, alert: Mapping[str, Any]) -> bool:
        """Returns whether the snooze covers an alert's rule and key, at any time."""
        key = alert["key"] or {}
        is_key = all(name in key and key[name] == text for name, text in (self.key or {}).items())
        return self.rule_id in (None, alert["rule_id"]) and is_key


def read_end(text: str) -> dt.datetime:
    """Parses the end of a snooze: a time, or a duration from now such as `8 hours`. Raises ReviewError."""
    with suppress(DurationError):
        return dt.datetime.now(dt.timezone.utc) + dt.timedelta(microseconds=parse_duration(text))
    try:
        return to_utc(parse_calendar_time(text))
    except ValueError:
        raise ReviewError(
            f"a snooze ends at a time such as 2026-01-31T12:00:00Z, or after a duration such as '8 hours', got {text!r:.100}"
        ) from None


def snooze(
    tables: Tables,
    streams: Mapping[str, Stream],
    subject: str,
    key: Mapping[str, str] | None = None,
    *,
    until: dt.datetime,
    reason: str,
    since: dt.datetime | None = None,
    author: str | None = None,
) -> Snooze:
    """Appends and returns a snooze.

    Args:
        tables: The tables of the place.
        streams: The declared streams by name.
        subject: Id of a rule, `*` for any rule, or id of an alert for its rule and key.
        key: Values by field, as in the `key` of alerts; None for any key, or the alert's.
        until: Aware time of the end.
        reason: For readers who wonder where the alerts are.
        since: Aware time of the begin; default: now.
        author: Default: the current user.

    Raises:
        ReviewError: If the rule or alert is unknown, a field is not in the rule's `group_by`, the end is not after the
            begin and after now, or the reason is empty.
    """
    now = dt.datetime.now(dt.timezone.utc)
    since = now if since is None else since
    if not reason.strip():
        raise ReviewError("a snooze needs a reason, for readers who wonder where the alerts are")
    if until <= max(since, now):
        raise ReviewError(
            f"a snooze must end after its begin and after now, {now:%Y-%m-%dT%H:%M:%SZ}, got {until.isoformat()}"
        )
    tables.require_table(TABLE)
    rule_id, chosen = _find_subject(tables, streams, subject, key)
    made = Snooze(rule_id, chosen, since, until, reason, tables.current_user if author is None else author)
    rows = [(rule_id, None if chosen is None else dict(chosen), since, until, reason, made.author)]
    tables.append_rows(rows, TABLE)
    return made


def end_snoozes(
    tables: Tables, streams: Mapping[str, Stream], subject: str, key: Mapping[str, str] | None = None
) -> int:
    """Ends the snoozes of exactly this rule and key that have not ended yet. Returns their number.

    `streams`, `subject`, `key` and the errors are as in `snooze`.
    """
    tables.require_table(TABLE)
    rule_id, chosen = _find_subject(tables, streams, subject, key)
    now = to_timestamp(parse_calendar_time(dt.datetime.now(dt.timezone.utc)))
    same_key = _write_key("key").eqNullSafe(_write_key(_make_map(chosen)))
    is_running = F.col("rule_id").eqNullSafe(F.lit(rule_id)) & same_key & (F.col("until") > now)
    ended = tables.read(TABLE).where(is_running).count()
    if ended:
        change_table(tables, TABLE, lambda: tables.delta(TABLE).update(is_running, {"until": now}))
    return ended


def read_snoozes(tables: Tables, *, ended_after: dt.datetime | None = None) -> list[Snooze]:
    """Reads the snoozes in the order of their ends, without those that ended by the aware time `ended_after`."""
    return [each for each, _ in _read_with_key_text(tables, ended_after)] if tables.exists(TABLE) else []


def _read_with_key_text(tables: Tables, ended_after: dt.datetime | None = None) -> list[tuple[Snooze, str | None]]:
    """Reads the snoozes, each with its key as a text."""
    return [
        (
            Snooze(
                row["rule_id"],
                row["key"],
                to_utc(row["from_us"]),
                to_utc(row["until_us"]),
                row["reason"],
                row["author"] or "",
            ),
            row["key_text"],
        )
        for row in tables.ask("listed_snoozes", ended_after=ended_after).collect()
    ]


def list_snoozes(tables: Tables, since: dt.datetime) -> list[dict[str, Any]]:
    """Lists all snoozes in the order of their ends: rule_id, key, from, until, reason, author, state, alerts.

    `state` is pending, active or expired. `alerts` is the number of alerts, decided at the aware time `since` or later,
    that an active snooze keeps out of the queue; an alert counts for each snooze that covers it.
    """
    now, listed = dt.datetime.now(dt.timezone.utc), _read_with_key_text(tables) if tables.exists(TABLE) else []
    counts: dict[tuple[str | None, str | None], int] = {}
    if listed:
        rows = tables.ask("snoozed_alerts", since=since, until=None, ended_after=None).collect()
        counts = {(row["rule_id"], row["key_text"]): row["alerts"] for row in rows}
    return [_make_row(each, now, counts.get((each.rule_id, text), 0)) for each, text in listed]


def _make_row(each: Snooze, now: dt.datetime, alerts: int) -> dict[str, Any]:
    state = PENDING if now < each.since else ACTIVE if now < each.until else EXPIRED
    return {
        "rule_id": each.rule_id,
        "key": each.key,
        "from": each.since,
        "until": each.until,
        "reason": each.reason,
        "author": each.author,
        "state": state,
        "alerts": alerts if state == ACTIVE else 0,
    }


def _write_key(column: str | Column) -> Column:
    """Formats a key as text with sorted fields, since Spark cannot compare maps."""
    return F.to_json(F.array_sort(F.map_entries(column)))


def _make_map(key: Mapping[str, str | None] | None) -> Column:
    pairs = [F.lit(part) for pair in (key or {}).items() for part in pair]
    return (F.lit(None) if key is None else F.create_map(*pairs)).cast("map<string,string>")


def _find_subject(
    tables: Tables, streams: Mapping[str, Stream], subject: str, key: Mapping[str, str] | None
) -> tuple[str | None, Mapping[str, str | None] | None]:
    """Finds the rule and key of a new snooze. Raises ReviewError."""
    if subject == ANY_RULE:
        known = {name for stream in streams.values() for name in stream.fields}
        if not set(key or ()) <= known:
            for (text,) in tables.run("SELECT DISTINCT document FROM rules WHERE rule_id <> '*'").collect():
                with contextlib.suppress(RuleError):
                    known |= set(list_entry_names(read_document(text).get("group_by")))
        _check_fields(key, known, "any declared stream, nor of the group_by of any rule")
        return None, key
    text = "SELECT document FROM rules WHERE rule_id = :rule_id ORDER BY version DESC LIMIT 1"
    if documents := tables.run(text, rule_id=subject).collect():
        names = list_entry_names(read_document(documents[0]["document"]).get("group_by"))
        _check_fields(key, set(names), f"the group_by of rule {subject}")
        return subject, key
    alerts = tables.run(
        "SELECT rule_id, key FROM alerts WHERE alert_id = :alert_id LIMIT 1", alert_id=subject
    ).collect()
    if not alerts:
        hint = suggest(
            subject, list_rule_ids(tables), "`lookback rules list` shows the rules, `lookback alerts` the alerts"
        )
        raise ReviewError(f"unknown rule or alert {subject!r}; {hint}")
    rule_id, own = alerts[0]
    _check_fields(key, set(own), f"the key of alert {subject}")
    return rule_id, own if key is None else key


def _check_fields(key: Mapping[str, str] | None, known: set[str], place: str) -> None:
    unknown = [name for name in key or () if name not in known]
    if unknown:
        hint = suggest(unknown[0], sorted(known), f"there are {', '.join(sorted(known)) or 'none'}")
        raise ReviewError(f"field {unknown[0]!r} is not one of {place}; {hint}")
