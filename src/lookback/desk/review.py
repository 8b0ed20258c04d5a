"""The review desk: a queue, one alert with its picture, and one press to decide.

It does slow work ahead of time: while you look at one alert, it explains the next one in the background.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from lookback.core.errors import ReviewError
from lookback.core.values.texts import count_noun
from lookback.desk import parts, sentences
from lookback.desk.ahead import Ahead
from lookback.desk.alert import AlertView
from lookback.desk.listing import QueueView
from lookback.desk.queue import QueuedAlert, QueueFilter, ReviewQueue, SessionStep, find_step
from lookback.desk.records import AlertRecords, OpenedAlert
from lookback.spark.review import Review, SeenAlert


class ReviewDesk:
    """A desk for reviewing alerts. A notebook shows its `widget`.

    The buttons call its public methods. A decision is bound to the revision and the reviews that were shown. Every
    method reports errors in the status line.
    """

    def __init__(self, records: AlertRecords, *, in_background: bool = True) -> None:
        """Reads the queue and opens its first alert. With `in_background` it explains the next alert ahead of time."""
        self.records = records
        self.queue = ReviewQueue()
        # The decisions of this session; the last one is undone first.
        self.session: list[SessionStep] = []
        self.status = parts.Status()
        self._is_cut = False
        self._opened: OpenedAlert | None = None
        self._current: QueuedAlert | None = None
        # Reviews by other reviewers that were already shown, by alert.
        self._seen_reviews: dict[str, tuple[Review, ...]] = {}
        self._chosen: tuple[str, ...] = ()
        self._ahead = Ahead(records, in_background=in_background)
        self._list = QueueView(self.show, self.choose, self.turn, self.read, self.choose_all, self.choose_like)
        self._alert = AlertView(self.decide, self.skip, self.undo, self.snooze)
        halves = parts.make_halves(self._list.widget, self._alert.widget)
        heading = parts.make_heading("Review desk")
        self.widget = parts.make_desk(heading, self.status.widget, self._list.filters, halves, self._alert.below)
        self.read()

    # Actions on the queue.

    def read(self) -> None:
        """Reloads the queue with the chosen filter and order, and reopens the current alert, else opens the first."""
        with self._working("Reading the queue ..."):
            reading = self.records.read_queue()
            before, order = self.queue.filter, self.queue.order
            self.queue = ReviewQueue(reading.alerts, reading.read_at)
            self.queue.show(before, order)
            self._is_cut = reading.is_cut
            self._seen_reviews.clear()
            self._ahead.forget()
            self._list.offer(self.queue.list_rules(), self.queue.list_tags())
            self.status.show(f"{sentences.describe_queue(self.queue, is_cut=self._is_cut)} {reading.note}".rstrip())
            self._open_first()

    def show(self, filter_: QueueFilter, order: str) -> None:
        """Sets the filter and the order, and opens the first alert."""
        with self._working():
            self.queue.show(filter_, order)
            self.status.show(sentences.describe_queue(self.queue, is_cut=self._is_cut))
            self._open_first()

    def turn(self, pages: int) -> None:
        """Turns a number of pages forward or, if negative, back."""
        with self._working():
            self.queue.page += pages
            self._list.refresh(self.queue, self._chosen)

    def choose(self, alert_ids: Sequence[str]) -> None:
        """Chooses alerts, and opens one of them. A decision applies to all of them."""
        with self._working():
            self._chosen = tuple(alert_ids)
            alert = self.queue.find(alert_ids[0]) if len(alert_ids) == 1 else None
            if alert is not None and alert != self._current:
                self._open(alert)
            self._alert.name_chosen(len(self._chosen))

    def choose_all(self) -> None:
        """Chooses all alerts that the filter shows, on all pages."""
        with self._working():
            self._choose_many([each.alert_id for each in self.queue.shown])

    def choose_like(self) -> None:
        """Chooses all alerts that the filter shows of the open alert's entity, on all pages."""
        with self._working():
            if self._current is None:
                raise ReviewError("No alert is open: choose one in the queue.")
            self._choose_many(self.queue.list_like(self._current))

    def _choose_many(self, alert_ids: Sequence[str]) -> None:
        self._chosen = tuple(alert_ids)
        self._list.refresh(self.queue, self._chosen)
        self._alert.name_chosen(len(self._chosen))
        self.status.show(f"{count_noun(len(self._chosen), 'alert')} chosen: a decision applies to all of them.")

    def skip(self) -> None:
        """Opens the next alert without a decision."""
        with self._working():
            self._go_on([each for each in self._chosen if each in self._seen_reviews])

    # Decisions.

    def decide(self, disposition: str, note: str | None = None) -> None:
        """Records a decision on the chosen alerts, and opens the next. `note` defaults to the text in the field."""
        note = self._alert.note if note is None else note
        with self._working("Recording ..."):
            alerts = [each for each in map(self.queue.find, self._chosen) if each is not None]
            if not alerts:
                raise ReviewError("No alert is chosen: choose one in the queue.")
            if len(alerts) > 1 and not note.strip():
                raise ReviewError(
                    f"{len(alerts):,} alerts are chosen: write the reason in the note; each of them gets it."
                )
            recorded = self.records.decide(list(map(self._describe_seen, alerts)), disposition, note)
            done = tuple(each for each in alerts if each.alert_id in set(recorded.recorded))
            if done:
                self._alert.clear_note()
                step = SessionStep(done, disposition, note, self.records.reviewer, recorded.reviewed_at)
                self.session.append(step)
                self._ahead.add(step, 1)
            self._seen_reviews.update(recorded.elsewhere)
            sentence = sentences.describe_recorded(recorded, disposition, done, is_single=len(alerts) == 1)
            self.status.show(sentence, "problem" if recorded.elsewhere or recorded.later else "done")
            if len(alerts) > 1 or not (recorded.elsewhere or recorded.later):
                self._go_on([*recorded.recorded, *recorded.elsewhere])
            elif not recorded.elsewhere:
                self._show_later(done[0])

    def undo(self) -> None:
        """Withdraws the last decision of this session, and opens its first alert."""
        with self._working("Undoing ..."):
            if not self.session:
                raise ReviewError("Nothing to undo in this session.")
            step = self.session[-1]
            left = self.records.undo(step)
            self.session.pop()
            self._ahead.add(step, -1)
            self._ahead.drop()
            # An alert that is open with a later revision is in the queue already.
            back = [each for each in step.alerts if each.alert_id not in left and each.alert_id not in self.queue]
            self.queue.put_back(back)
            self._seen_reviews.update({alert_id: tuple(reviews) for alert_id, reviews in left.items()})
            self.status.show(sentences.describe_undone(step, left), "done")
            if back:
                self._open(back[0])
            else:
                self._list.refresh(self.queue, self._chosen)

    def snooze(self, until: str, reason: str, whole_rule: bool = False) -> None:
        """Snoozes the open alert's rule and key, or its whole rule, and opens the next alert."""
        with self._working("Recording ..."):
            if self._current is None:
                raise ReviewError("No alert is open: choose one in the queue.")
            made = self.records.snooze(self._current, until, reason, whole_rule=whole_rule)
            covered = self.queue.snooze(lambda each: made.covers({"rule_id": each.rule_id, "key": each.key}))
            self.status.show(f"{made} ({count_noun(len(covered), 'alert')} of this queue.)", "done")
            self._open_first()

    # Updates of the parts.

    def _show_later(self, alert: QueuedAlert) -> None:
        """Opens the later revision of a decided alert; your own earlier decision counts as seen."""
        self.queue.take_out([alert.alert_id])
        last = self.records.find_last(alert.alert_id)
        own = _make_review(self.session[-1], alert.alert_id, alert.revision)
        self._seen_reviews[alert.alert_id] = (*self._seen_reviews.get(alert.alert_id, ()), own)
        self.queue.put_back([last])
        self._open(last)

    def _go_on(self, gone: Sequence[str]) -> None:
        """Opens the alert after the chosen ones, and removes those that are no longer open."""
        following = self.queue.find_next(self._chosen)
        self.queue.take_out(gone)
        if following is None:
            self._open_first()
        else:
            self._open(following)

    def _open_first(self) -> None:
        current = None if self._current is None else self.queue.find(self._current.alert_id)
        shown = self.queue.shown
        if current is not None and self.queue.turn_to(current.alert_id) is not None:
            self._open(current)
        elif shown:
            self._open(shown[0])
        else:
            self._current = self._opened = None
            self._chosen = ()
            self._list.refresh(self.queue, ())
            self._alert.show_nothing("No open alert matches the filter." if len(self.queue) else "No open alerts.")

    def _open(self, alert: QueuedAlert) -> None:
        """Shows an alert: first what the queue has, then the explanation."""
        self._current, self._opened, self._chosen = alert, None, (alert.alert_id,)
        self.queue.turn_to(alert.alert_id)
        self._list.refresh(self.queue, self._chosen)
        self._alert.show_row(alert, self._seen_reviews.get(alert.alert_id, ()))
        try:
            self._opened, like = self._ahead.open(alert)
            self._alert.show_explanation(self._opened)
            self._alert.show_like(list(map(self._add_own_review, like)), self._ahead.count(alert.rule_id))
        except Exception as error:  # noqa: BLE001 - an alert without its explanation can still be decided
            self._alert.show_no_explanation(parts.describe_failure(error))
        following = self.queue.find_next([alert.alert_id])
        if following is not None:
            self._ahead.prepare(following)

    def _add_own_review(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Adds this session's decision to an alert of the same entity, which may have been read earlier."""
        step = find_step(self.session, row["alert_id"])
        if step is None or any(each.reviewed_at == step.reviewed_at for each in row["reviews"]):
            return row
        return {**row, "reviews": [*row["reviews"], _make_review(step, row["alert_id"], None)]}

    def _describe_seen(self, alert: QueuedAlert) -> SeenAlert:
        seen = frozenset(self._seen_reviews.get(alert.alert_id, ()))
        return SeenAlert(alert.alert_id, alert.revision, alert.decided_at, seen)

    @contextmanager
    def _working(self, sentence: str = "") -> Iterator[None]:
        """Shows a sentence during the work, and replaces it with the error if the work fails."""
        if sentence:
            self.status.show(sentence)
        with self.status.catching():
            yield


def _make_review(step: SessionStep, alert_id: str, revision: int | None) -> Review:
    return Review(alert_id, step.disposition, revision, step.reviewer, step.note, step.reviewed_at)
