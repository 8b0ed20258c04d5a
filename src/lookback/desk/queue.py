"""The queue of a review desk: which alerts it shows, in which order, on which page, and what this session decided.

It is pure: it uses no widgets, no Spark and no clock. Times are aware; `now` is an argument.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lookback.core.rules.document import SEVERITIES

# A browser shows a list of this length without delay.
PAGE_SIZE = 50
_HOUR = dt.timedelta(hours=1)
_DAY = dt.timedelta(days=1)
# Ranges of the time since an alert was decided, by title: at least, at most.
AGES: Mapping[str, tuple[dt.timedelta | None, dt.timedelta | None]] = {
    "any age": (None, None),
    "at most 1 hour": (None, _HOUR),
    "at most 1 day": (None, _DAY),
    "at most 7 days": (None, 7 * _DAY),
    "more than 1 day": (_DAY, None),
    "more than 7 days": (7 * _DAY, None),
    "more than 30 days": (30 * _DAY, None),
}
WITHOUT_SNOOZED, WITH_SNOOZED, ONLY_SNOOZED = "without snoozed ones", "with snoozed ones", "snoozed ones only"
SNOOZED = (WITHOUT_SNOOZED, WITH_SNOOZED, ONLY_SNOOZED)


@dataclass(frozen=True)
class QueuedAlert:
    """An open alert, by its last revision when the queue was read. The columns are those of `alerts`."""

    alert_id: str
    revision: int
    severity: str
    event_time: dt.datetime
    decided_at: dt.datetime
    rule_id: str
    rule_version: int
    stream: str
    key: Mapping[str, str | None] = field(default_factory=dict)
    measures: Mapping[str, str | None] = field(default_factory=dict)
    message: str = ""
    tags: Sequence[str] = ()
    score: int = 0
    is_snoozed: bool = False

    @property
    def entity(self) -> str:
        """The key in words, such as `customer_id 596`; empty for a rule over all events together."""
        return ", ".join(f"{name} {'null' if text is None else text}" for name, text in self.key.items())

    @property
    def size(self) -> float:
        """The first measure that is a number; without one, less than all others. Only sizes of one rule compare."""
        return next(filter(math.isfinite, map(_read_number, self.measures.values())), -math.inf)


@dataclass(frozen=True)
class QueueFilter:
    """Selects the alerts that a queue shows.

    An empty text selects any rule, severity, tag or entity. `entity` is a part of the key in words, ignoring case;
    `age` is one of AGES, `snoozed` one of SNOOZED.
    """

    rule_id: str = ""
    severity: str = ""
    tag: str = ""
    entity: str = ""
    age: str = next(iter(AGES))
    snoozed: str = WITHOUT_SNOOZED

    def shows(self, alert: QueuedAlert, now: dt.datetime) -> bool:
        """Returns whether an alert is shown. An age of exactly one hour counts as at most one hour."""
        at_least, at_most = AGES[self.age]
        age = now - alert.decided_at
        return (
            self.rule_id in ("", alert.rule_id)
            and self.severity in ("", alert.severity)
            and (not self.tag or self.tag in (tag.lower() for tag in alert.tags))
            and self.entity.strip().casefold() in alert.entity.casefold()
            and (at_least is None or age > at_least)
            and (at_most is None or age <= at_most)
            and (self.snoozed == WITH_SNOOZED or alert.is_snoozed == (self.snoozed == ONLY_SNOOZED))
        )


def _read_number(text: str | None) -> float:
    try:
        return float(text or "nan")
    except ValueError:
        return math.nan


def _rank(alert: QueuedAlert) -> int:
    return -SEVERITIES.index(alert.severity) if alert.severity in SEVERITIES else 1


def _newest(alert: QueuedAlert) -> float:
    return -alert.event_time.timestamp()


# The sort keys by title. The first is the order of `open_queue`; the id breaks ties.
ORDERS: Mapping[str, Callable[[QueuedAlert], tuple[Any, ...]]] = {
    "severity, score, newest": lambda alert: (
        _rank(alert),
        -alert.score,
        _newest(alert),
        alert.rule_id,
        alert.alert_id,
    ),
    "severity, score, largest": lambda alert: (
        _rank(alert),
        -alert.score,
        alert.rule_id,
        -alert.size,
        alert.alert_id,
    ),
    "newest first": lambda alert: (_newest(alert), alert.alert_id),
    "oldest first": lambda alert: (-_newest(alert), alert.alert_id),
    "rule": lambda alert: (alert.rule_id, _rank(alert), _newest(alert), alert.alert_id),
    "entity": lambda alert: (alert.entity, _newest(alert), alert.alert_id),
}


class ReviewQueue:
    """The alerts of a desk: filtered, sorted, in pages. Work per change is linear in the alerts, plus a sort."""

    def __init__(self, alerts: Iterable[QueuedAlert] = (), now: dt.datetime | None = None) -> None:
        """Takes the open alerts. Ages are relative to `now`; None if no filter uses an age."""
        self._alerts: dict[str, QueuedAlert] = {each.alert_id: each for each in alerts}
        self._now = now or dt.datetime.max.replace(tzinfo=dt.timezone.utc)
        # The current filter, and the title of the current order; `show` changes them.
        self.filter, self.order = QueueFilter(), next(iter(ORDERS))
        self._page = 0
        self._shown: list[QueuedAlert] | None = None

    def __len__(self) -> int:
        """The number of open alerts, shown or not."""
        return len(self._alerts)

    def __contains__(self, alert_id: str) -> bool:
        return alert_id in self._alerts

    def find(self, alert_id: str) -> QueuedAlert | None:
        """Returns the alert with an id; None if it is not open."""
        return self._alerts.get(alert_id)

    def show(self, filter_: QueueFilter, order: str) -> None:
        """Sets the filter and the order, and goes to the first page."""
        self.filter, self.order, self._page, self._shown = filter_, order, 0, None

    @property
    def shown(self) -> Sequence[QueuedAlert]:
        """The alerts that pass the filter, sorted."""
        if self._shown is None:
            kept = (each for each in self._alerts.values() if self.filter.shows(each, self._now))
            self._shown = sorted(kept, key=ORDERS[self.order])
        return self._shown

    @property
    def pages(self) -> int:
        """The number of pages, at least one."""
        return max(1, -(-len(self.shown) // PAGE_SIZE))

    @property
    def page(self) -> int:
        """The current page, from 0; the last one if there are fewer by now."""
        return min(self._page, self.pages - 1)

    @page.setter
    def page(self, page: int) -> None:
        self._page = max(0, min(page, self.pages - 1))

    @property
    def on_page(self) -> Sequence[QueuedAlert]:
        """The alerts on the current page."""
        return self.shown[self.page * PAGE_SIZE : (self.page + 1) * PAGE_SIZE]

    def list_like(self, alert: QueuedAlert) -> list[str]:
        """Lists the shown alerts with the key of an alert, of any rule of its stream: about one entity."""
        return [each.alert_id for each in self.shown if (each.stream, each.key) == (alert.stream, alert.key)]

    def turn_to(self, alert_id: str) -> int | None:
        """Turns to the page of an alert. Returns its position there; None if it is not shown."""
        place = next((at for at, each in enumerate(self.shown) if each.alert_id == alert_id), None)
        if place is None:
            return None
        self._page = place // PAGE_SIZE
        return place % PAGE_SIZE

    def find_next(self, alert_ids: Collection[str]) -> QueuedAlert | None:
        """Finds the alert to open next: the first after all the given ones, else the first that is not among them."""
        chosen = set(alert_ids)
        places = [at for at, each in enumerate(self.shown) if each.alert_id in chosen]
        behind = self.shown[places[-1] + 1 :] if places else self.shown
        before = self.shown[: places[-1]] if places else ()
        return next((each for each in (*behind, *before) if each.alert_id not in chosen), None)

    def take_out(self, alert_ids: Iterable[str]) -> list[QueuedAlert]:
        """Removes and returns alerts that are no longer open."""
        taken = [self._alerts.pop(each) for each in alert_ids if each in self._alerts]
        gone = {each.alert_id for each in taken}
        if self._shown is not None:
            self._shown = [each for each in self._shown if each.alert_id not in gone]
        return taken

    def put_back(self, alerts: Iterable[QueuedAlert]) -> None:
        """Puts back alerts that are open again, or have another revision."""
        self._alerts.update((each.alert_id, each) for each in alerts)
        self._shown = None

    def snooze(self, covers: Callable[[QueuedAlert], bool]) -> list[QueuedAlert]:
        """Marks the alerts that a snooze covers. Returns their previous state."""
        covered = [each for each in self._alerts.values() if not each.is_snoozed and covers(each)]
        self.put_back(replace(each, is_snoozed=True) for each in covered)
        return covered

    def list_rules(self) -> list[str]:
        """Lists the rules with open alerts, by name."""
        return sorted({each.rule_id for each in self._alerts.values()})

    def list_tags(self) -> list[str]:
        """Lists the tags of open alerts, in lower case, by name."""
        return sorted({tag.lower() for each in self._alerts.values() for tag in each.tags})


@dataclass(frozen=True)
class SessionStep:
    """A decision of this session, which can be undone: the alerts as queued, and the time of the reviews."""

    alerts: tuple[QueuedAlert, ...]
    disposition: str
    note: str
    reviewer: str
    reviewed_at: dt.datetime


def find_step(steps: Sequence[SessionStep], alert_id: str) -> SessionStep | None:
    """Finds the last decision on an alert; None if there is none."""
    newest = reversed(steps)
    return next((step for step in newest if any(each.alert_id == alert_id for each in step.alerts)), None)
