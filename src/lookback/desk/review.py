"""The review desk: a queue, one alert with its picture, and one press to decide.

It does slow work ahead of time: while you look at one alert, it explains the next one in the background.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import ipywidgets

from lookback.core.errors import LookbackError, ReviewError
from lookback.core.rules.document import SEVERITIES
from lookback.core.values.texts import count_noun, cut_end, summarize_error
from lookback.core.values.times import format_time
from lookback.desk.parts import (
    Status,
    TextTable,
    add_classes,
    clean_text,
    make_button,
    make_column,
    make_desk,
    make_field,
    make_heading,
    make_picture,
    make_row,
    make_text,
)
from lookback.desk.queue import (
    AGES,
    ORDERS,
    SNOOZED,
    QueuedAlert,
    QueueFilter,
    ReviewQueue,
    ReviewSession,
    SessionStep,
)
from lookback.desk.records import AlertRecords, ListedEvent, OpenedAlert, describe_decisions
from lookback.spark.review import RecordedReviews, Review, SeenAlert

# The button's title and the meaning of each disposition.
_MEANINGS = {
    "confirmed": ("Confirmed", "it is what the rule looks for"),
    "false_positive": ("False positive", "it is not what the rule looks for"),
    "benign": ("Benign", "true but harmless"),
    "unclear": ("Unclear", "the facts do not decide it"),
}
_ANY = "any"
_LIST_ROWS = 14
_MAX_LISTED_LIKE = 20
# The maximum width of the text columns in the list, in characters.
_WIDTHS = {"severity": 8, "rule": 24, "entity": 28, "message": 90}
_TIME = "%Y-%m-%d %H:%M:%S"


class ReviewDesk:
    """A desk for reviewing alerts. A notebook shows its `widget`.

    The buttons call its public methods. A decision is bound to the revision and the reviews that were shown. Every
    method reports errors in the status line, as an error in a browser's callback would be lost.
    """

    def __init__(self, records: AlertRecords, *, in_background: bool = True) -> None:
        """Reads the queue and opens its first alert. With `in_background` it explains the next alert ahead of time."""
        self.records = records
        self.queue, self.session = ReviewQueue(), ReviewSession()
        self.status = Status()
        self._is_cut = False
        self._opened: OpenedAlert | None = None
        self._current: QueuedAlert | None = None
        # Reviews by other reviewers that were already shown, by alert.
        self._seen_reviews: dict[str, tuple[Review, ...]] = {}
        self._chosen: tuple[str, ...] = ()
        self._counts: Mapping[str, dict[str, int]] = {}
        self._ahead = _Ahead(records, in_background=in_background)
        self._is_working = False
        self._list, self._alert = _QueueView(self), _AlertView(self)
        self.widget = make_desk(make_heading("Review desk"), self.status.widget, self._list.widget, self._alert.widget)
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
            self._list.offer_rules(self.queue.list_rules())
            self.status.show(" ".join(part for part in (self._describe_queue(), reading.note) if part))
            self._open_first()

    def show(self, filter_: QueueFilter, order: str) -> None:
        """Sets the filter and the order, and opens the first alert."""
        with self._working():
            self.queue.show(filter_, order)
            self.status.show(self._describe_queue())
            self._open_first()

    def turn(self, pages: int) -> None:
        """Turns a number of pages forward or, if negative, back."""
        with self._working():
            self.queue.page += pages
            self._list.refresh(self._chosen)

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
            self._chosen = tuple(each.alert_id for each in self.queue.shown)
            self._list.refresh(self._chosen)
            self._alert.name_chosen(len(self._chosen))
            self.status.show(f"{count_noun(len(self._chosen), 'alert')} chosen: a decision applies to all of them.")

    def skip(self) -> None:
        """Opens the next alert without a decision."""
        with self._working():
            gone = [each for each in self._chosen if each in self._seen_reviews]
            self._go_on(self._chosen, gone)

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
            seen = [self._describe_seen(each) for each in alerts]
            recorded = self.records.decide(seen, disposition, note)
            self._follow(alerts, recorded, disposition, note)

    def undo(self) -> None:
        """Withdraws the last decision of this session, and opens its first alert."""
        step = self.session.last
        with self._working("Undoing ..."):
            if step is None:
                raise ReviewError("Nothing to undo in this session.")
            left = self.records.undo(step)
            self.session.drop_last()
            self._count(step, -1)
            self._ahead.drop()
            # An alert that is open with a later revision is in the queue already.
            back = [each for each in step.alerts if each.alert_id not in left and each.alert_id not in self.queue]
            self.queue.put_back(back)
            for alert_id, reviews in left.items():
                self._seen_reviews[alert_id] = tuple(reviews)
            sentence = f"Undone: {step.disposition} of {_name_alerts(step.alerts)}."
            if left:
                sentence += f" {count_noun(len(left), 'alert')} stay decided: {_list_reviews(left)}."
            self.status.show(sentence, "done")
            if back:
                self._open(back[0])
            else:
                self._list.refresh(self._chosen)

    def snooze(self, until: str, reason: str, *, whole_rule: bool = False) -> None:
        """Snoozes the open alert's rule and key, or its whole rule, and opens the next alert."""
        with self._working("Recording ..."):
            if self._current is None:
                raise ReviewError("No alert is open: choose one in the queue.")
            made = self.records.snooze(self._current, until, reason, whole_rule=whole_rule)
            covered = self.queue.snooze(lambda each: made.covers({"rule_id": each.rule_id, "key": each.key}))
            self.status.show(f"{made} ({count_noun(len(covered), 'alert')} of this queue.)", "done")
            self._open_first()

    # Updates of the parts.

    def _follow(self, alerts: Sequence[QueuedAlert], recorded: RecordedReviews, disposition: str, note: str) -> None:
        """Shows the outcome of a decision, and opens the next alert."""
        own = set(recorded.recorded)
        done = tuple(each for each in alerts if each.alert_id in own)
        if done:
            step = SessionStep(done, disposition, note, self.records.reviewer, recorded.reviewed_at)
            self.session.add(step)
            self._count(step, 1)
        self._seen_reviews.update(recorded.elsewhere)
        sentences = [f"Recorded {disposition} for {_name_alerts(done)}."] if done else []
        if recorded.elsewhere:
            sentences.append(
                f"Not recorded for {count_noun(len(recorded.elsewhere), 'alert')}, decided meanwhile: "
                f"{_list_reviews(recorded.elsewhere)}."
            )
        is_single = len(alerts) == 1
        if recorded.elsewhere and is_single:
            sentences.append("Press again to override, or Next to leave it.")
        if recorded.later:
            sentences.append(
                f"{count_noun(len(recorded.later), 'alert')} got a later revision: look at it, and decide again if it "
                "changes your mind."
            )
        kind = "problem" if recorded.elsewhere or recorded.later else "done"
        self.status.show(" ".join(sentences), kind)
        self._alert.clear_note(is_kept=not done)
        if recorded.elsewhere and is_single:
            return
        if recorded.later and is_single:
            self._show_later(done[0], recorded)
            return
        self._go_on(self._chosen, [*own, *recorded.elsewhere])

    def _show_later(self, alert: QueuedAlert, recorded: RecordedReviews) -> None:
        """Opens the later revision of a decided alert; your own earlier decision counts as seen."""
        self.queue.take_out([alert.alert_id])
        last = self.records.find_last(alert.alert_id)
        step = self.session.last
        assert step is not None
        own = Review(alert.alert_id, step.disposition, alert.revision, step.reviewer, step.note, recorded.reviewed_at)
        self._seen_reviews[alert.alert_id] = (*self._seen_reviews.get(alert.alert_id, ()), own)
        self.queue.put_back([last])
        self._open(last)

    def _go_on(self, after: Sequence[str], gone: Sequence[str]) -> None:
        """Opens the alert after the given ones, and removes those that are no longer open."""
        following = self.queue.find_next(after)
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
            self._list.refresh(())
            self._alert.show_nothing("No open alert matches the filter." if len(self.queue) else "No open alerts.")

    def _open(self, alert: QueuedAlert) -> None:
        """Shows an alert: first what the queue has, then the explanation."""
        self._current, self._chosen = alert, (alert.alert_id,)
        self.queue.turn_to(alert.alert_id)
        self._list.refresh(self._chosen)
        self._alert.show_row(alert, self._seen_reviews.get(alert.alert_id, ()))
        try:
            self._opened = self._ahead.open(alert)
            self._alert.show_explanation(self._opened)
            like = [self._add_own_review(each) for each in self._ahead.read_like(self._opened)]
            self._alert.show_like(like, self._count_like(alert))
        except Exception as error:  # noqa: BLE001 - an alert without its explanation can still be decided
            self._opened = None
            self._alert.show_no_explanation(_name_error(error))
        following = self.queue.find_next([alert.alert_id])
        if following is not None:
            self._ahead.prepare(following)

    def _add_own_review(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Adds this session's decision to an alert of the same entity, which may have been read earlier."""
        step = self.session.find(row["alert_id"])
        if step is None or any(each.reviewed_at == step.reviewed_at for each in row["reviews"]):
            return row
        own = Review(row["alert_id"], step.disposition, None, step.reviewer, step.note, step.reviewed_at)
        return {**row, "reviews": [*row["reviews"], own]}

    def _count_like(self, alert: QueuedAlert) -> str:
        self._counts = self._ahead.counts or self._counts
        own = self._counts.get(alert.rule_id)
        return "being counted" if not self._ahead.is_counted else describe_decisions(own or {})

    def _count(self, step: SessionStep, by: int) -> None:
        """Counts a decision of this session, which saves reading the counts again."""
        for alert in step.alerts:
            self._ahead.add(alert.rule_id, step.disposition, by)

    def _describe_seen(self, alert: QueuedAlert) -> SeenAlert:
        seen = frozenset(self._seen_reviews.get(alert.alert_id, ()))
        return SeenAlert(alert.alert_id, alert.revision, alert.decided_at, seen)

    def _describe_queue(self) -> str:
        waiting, shown = len(self.queue), len(self.queue.shown)
        kept = f"More than {waiting:,} alerts wait; these are the first" if self._is_cut else ""
        text = kept or (f"{waiting:,} alerts wait" if waiting != 1 else "1 alert waits")
        return f"{text}, {shown:,} of them shown." if shown != waiting else f"{text}."

    @contextmanager
    def _working(self, sentence: str = "") -> Iterator[None]:
        """Shows a sentence during the work, and replaces it with the error if the work fails."""
        if self._is_working:
            yield
            return
        self._is_working = True
        if sentence:
            self.status.show(sentence)
        try:
            yield
        except Exception as error:  # noqa: BLE001 - it would be lost in the browser's log
            self.status.show(_name_error(error), "problem")
        finally:
            self._is_working = False


class _Ahead:
    """Prepares the next alert and the counts by rule in the background, without touching widgets."""

    def __init__(self, records: AlertRecords, *, in_background: bool) -> None:
        self._records = records
        self._pool = ThreadPoolExecutor(1, "lookback-desk") if in_background else None
        self._next: tuple[QueuedAlert, Future[tuple[OpenedAlert, list[dict[str, Any]]]]] | None = None
        self._like: tuple[OpenedAlert, list[dict[str, Any]]] | None = None
        self._counting: Future[dict[str, dict[str, int]]] | None = None
        self._added: list[tuple[str, str, int]] = []

    @property
    def is_counted(self) -> bool:
        """Whether the counts have been read."""
        return self._counting is not None and self._counting.done() and self._counting.exception() is None

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """The decided alerts by rule and disposition, including this session; empty until they are read."""
        if not self.is_counted or self._counting is None:
            return {}
        counts = {rule_id: dict(own) for rule_id, own in self._counting.result().items()}
        for rule_id, disposition, by in self._added:
            own = counts.setdefault(rule_id, {})
            own[disposition] = own.get(disposition, 0) + by
        return counts

    def add(self, rule_id: str, disposition: str, by: int) -> None:
        """Counts a decision or its undoing. A count that is still running sees it in the table."""
        if self.is_counted:
            self._added.append((rule_id, disposition, by))

    def forget(self) -> None:
        """Drops everything prepared, as the queue is reloaded."""
        self._next = self._counting = None
        self._added.clear()

    def drop(self) -> None:
        """Drops the prepared alert, as decisions on related alerts were withdrawn."""
        self._next = None

    def prepare(self, alert: QueuedAlert) -> None:
        """Starts explaining an alert unless that is done or running; after the first alert it also counts decisions."""
        if self._pool is None:
            return
        if self._next is None or self._next[0] != alert:
            if self._next is not None:
                self._next[1].cancel()
            self._next = alert, self._pool.submit(self._explain, alert)
        if self._counting is None:
            self._counting = self._pool.submit(self._records.count_decisions)

    def open(self, alert: QueuedAlert) -> OpenedAlert:
        """Returns the explained alert: the prepared one, or explained now."""
        if self._next is not None and self._next[0] == alert and not self._next[1].cancelled():
            opened, like = self._next[1].result()
            self._like = opened, like
            return opened
        return self._records.open(alert)

    def read_like(self, opened: OpenedAlert) -> list[dict[str, Any]]:
        """Returns the alerts of the same entity: the prepared ones, or read now."""
        if self._like is not None and self._like[0] is opened:
            return self._like[1]
        return self._records.read_like(opened)

    def _explain(self, alert: QueuedAlert) -> tuple[OpenedAlert, list[dict[str, Any]]]:
        opened = self._records.open(alert)
        return opened, self._records.read_like(opened)


class _QueueView:
    """The filters, the list and its pages. The list is one control: arrows move, Shift and Ctrl select several."""

    def __init__(self, desk: ReviewDesk) -> None:
        self._desk = desk
        self._is_filling = False
        choose = partial(make_field, ipywidgets.Dropdown)
        self._rule = choose("Rule", "Show only the alerts of this rule", "lookback-filter-rule", options=[(_ANY, None)])
        severities = [(_ANY, None), *((name, name) for name in reversed(SEVERITIES))]
        self._severity = choose(
            "Severity", "Show only alerts of this severity", "lookback-filter-severity", options=severities
        )
        self._entity = make_field(
            ipywidgets.Text, "Entity", "Show only alerts whose key contains this text; Enter applies it",
            "lookback-filter-entity", placeholder="part of a key",
        )  # fmt: skip
        self._age = choose("Age", "Show only alerts decided this long ago", "lookback-filter-age", options=list(AGES))
        self._snoozed = choose(
            "Snoozed", "Whether snoozed alerts are shown", "lookback-filter-snoozed", options=list(SNOOZED)
        )
        self._order = choose("Order", "The order of the queue", "lookback-order", options=list(ORDERS))
        filters = (self._rule, self._severity, self._entity, self._age, self._snoozed, self._order)
        for field in filters:
            field.observe(self._apply, "value")
        read = make_button("Read again", desk.read, "Reload the queue from the tables", "lookback-read")
        self._head = make_text("", "lookback-head", "lookback-list-head")
        self.list = make_field(
            ipywidgets.SelectMultiple, "The alerts that wait", "Arrows open another one; with Shift or Ctrl several are chosen",
            "lookback-list", "lookback-queue-list", "lookback-named", rows=_LIST_ROWS, layout={"width": "100%"},
        )  # fmt: skip
        self.list.observe(self._choose, "index")
        self._page = make_text("", "lookback-page")
        pages = make_row(
            make_button("Previous page", partial(desk.turn, -1), "Show the page before", "lookback-previous-page"),
            self._page,
            make_button("Next page", partial(desk.turn, 1), "Show the page after", "lookback-next-page"),
            make_button(
                "Choose all shown", desk.choose_all,
                "Choose all alerts that the filter shows, on every page, for one decision", "lookback-choose-all",
            ),
        )  # fmt: skip
        self.widget = make_column(
            make_row(*filters, read, name="lookback-filters"), self._head, self.list, pages, name="lookback-queue"
        )

    def offer_rules(self, rules: Sequence[str]) -> None:
        """Offers the rules with open alerts, and keeps the chosen one."""
        with self._filling():
            chosen = self._rule.value
            names = sorted({*rules, *([chosen] if chosen else [])})
            self._rule.options = [(_ANY, None), *((clean_text(name, 100), name) for name in names)]
            self._rule.value = chosen

    def refresh(self, chosen: Sequence[str]) -> None:
        """Shows the page of the queue, with the chosen alerts marked."""
        with self._filling():
            queue = self._desk.queue
            lines = _align([_list_cells(each) for each in queue.on_page])
            self._head.value, options = lines[0], lines[1:]
            places = {each.alert_id: at for at, each in enumerate(queue.on_page)}
            if tuple(options) != tuple(label for label, _ in self.list.options or ()):
                self.list.options = [(text, at) for at, text in enumerate(options)]
            self.list.index = tuple(sorted(places[each] for each in chosen if each in places))
            self._page.value = f"Page {queue.page + 1:,} of {queue.pages:,}; {count_noun(len(queue.shown), 'alert')}"

    def _choose(self, _: Any) -> None:
        if not self._is_filling:
            self._desk.choose([self._desk.queue.on_page[at].alert_id for at in self.list.index])

    def _apply(self, _: Any) -> None:
        if self._is_filling:
            return
        filter_ = QueueFilter(
            self._rule.value, self._severity.value, self._entity.value, self._age.value, self._snoozed.value
        )
        self._desk.show(filter_, self._order.value)

    @contextmanager
    def _filling(self) -> Iterator[None]:
        """Marks changes of the controls that the desk makes itself."""
        before, self._is_filling = self._is_filling, True
        try:
            yield
        finally:
            self._is_filling = before


class _AlertView:
    """One alert: its words, the buttons to decide, the picture, the events, and related alerts."""

    def __init__(self, desk: ReviewDesk) -> None:
        self._desk = desk
        self._events: Sequence[ListedEvent] = ()
        self._title = make_text("", "lookback-head", "lookback-alert-title")
        self._severity = ""
        self._words = make_text("", "lookback-words")
        self._reviews = make_text("", "lookback-told")
        self._picture_place = make_column(name="lookback-picture")
        self._fields = TextTable(["field", "value"], name="lookback-fields")
        self._event_list = make_field(
            ipywidgets.Select, "The events behind the alert", "Arrows choose one and show its fields next to it",
            "lookback-list", "lookback-events", "lookback-named", rows=8, layout={"width": "100%"},
        )  # fmt: skip
        self._event_list.observe(self._show_fields, "index")
        columns = ["event time (UTC, +00:00)", "rule", "severity", "verdict", "message", "decided"]
        self._like = TextTable(columns, name="lookback-like")
        self._like_words, self._counts = make_text("", "lookback-like-words"), make_text("", "lookback-counts")
        self.widget = make_column(
            make_heading("The alert"), self._title, self._reviews, self._words, self._make_decision(), self._make_snooze(),
            self._picture_place,
            make_heading("Events behind it"), self._event_list, self._fields.widget,
            make_heading("Related alerts"), self._counts, self._like_words, self._like.widget,
            name="lookback-alert",
        )  # fmt: skip

    def _make_decision(self) -> Any:
        desk = self._desk
        self._note = make_field(
            ipywidgets.Textarea, "Note", "What you found; it is recorded with the decision", "lookback-note", rows=2,
            layout={"width": "100%"},
        )  # fmt: skip
        self._buttons = {
            name: make_button(title, partial(desk.decide, name), "", f"lookback-decide-{name.replace('_', '-')}")
            for name, (title, _) in _MEANINGS.items()
        }
        self.name_chosen(1)
        return make_column(
            self._note,
            make_row(
                *self._buttons.values(),
                make_button("Next", desk.skip, "Open the next alert without a decision", "lookback-skip"),
                make_button("Undo", desk.undo, "Withdraw the last decision of this session", "lookback-undo"),
            ),
            name="lookback-decision",
        )

    def _make_snooze(self) -> Any:
        until = make_field(
            ipywidgets.Text, "Snooze until", "A time such as 2026-01-31T12:00:00Z, or a duration such as 8 hours",
            "lookback-snooze-until", value="8 hours",
        )  # fmt: skip
        reason = make_field(ipywidgets.Text, "Reason", "Why it is snoozed", "lookback-snooze-reason")
        whole = make_field(
            ipywidgets.Checkbox, "all keys of the rule", "Snooze all alerts of the rule, not only those of this key",
            "lookback-snooze-rule", value=False, indent=False,
        )  # fmt: skip

        def press() -> None:
            self._desk.snooze(until.value, reason.value, whole_rule=whole.value)

        hint = "Leave the alerts of this rule and key out of the queue and of notifications for a while"
        button = make_button("Snooze", press, hint, "lookback-snooze")
        return make_row(until, reason, whole, button, name="lookback-snoozing")

    @property
    def note(self) -> str:
        """The current text of the note."""
        return str(self._note.value)

    def clear_note(self, *, is_kept: bool = False) -> None:
        """Empties the note after recording it. With `is_kept` nothing was recorded, so the text stays."""
        if not is_kept:
            self._note.value = ""

    def name_chosen(self, number: int) -> None:
        """Shows on the buttons how many alerts a decision applies to."""
        of = "this alert" if number <= 1 else f"all {number:,} chosen alerts"
        for name, button in self._buttons.items():
            title, meaning = _MEANINGS[name]
            button.description = title if number <= 1 else f"{title} ({number:,})"
            button.tooltip = f"Decide on {of}: {meaning}"

    def show_nothing(self, sentence: str) -> None:
        """Shows that no alert is open."""
        self._set_severity("")
        self._title.value, self._reviews.value, self._words.value = sentence, "", ""
        self._clear()
        self.name_chosen(1)

    def show_row(self, alert: QueuedAlert, seen: Sequence[Review]) -> None:
        """Shows what the queue knows about an alert, with the reviews by other reviewers that were already shown."""
        self._set_severity(alert.severity)
        snoozed = ", snoozed" if alert.is_snoozed else ""
        title = f"{alert.severity}{snoozed}: {alert.rule_id}, {alert.entity or 'all events'}, {format_time(alert.event_time)} (+00:00)"
        self._title.value = clean_text(title)
        self._reviews.value = clean_text(f"Decided before: {'; '.join(map(str, seen))}." if seen else "")
        measures = ", ".join(f"{name} = {'null' if text is None else text}" for name, text in alert.measures.items())
        self._words.value = clean_text(
            f"{alert.message or 'The rule has no message.'}\n{measures}\nBeing explained ..."
        )
        self._clear()
        self.name_chosen(1)

    def show_explanation(self, opened: OpenedAlert) -> None:
        """Shows an alert in words, its picture and its events."""
        self._words.value = clean_text("\n".join(opened.lines))
        self._picture_place.children = [
            make_picture(opened.picture, f"Time line of {opened.picture_words}; the events are listed below")
        ]
        self._events = opened.events
        self._event_list.options = [(clean_text(each.title, 200), at) for at, each in enumerate(opened.events)]
        self._event_list.index = 0 if opened.events else None

    def show_no_explanation(self, sentence: str) -> None:
        """Shows why the alert cannot be explained."""
        self._words.value = self._words.value.replace("Being explained ...", clean_text(f"Not explained: {sentence}"))

    def show_like(self, like: Sequence[Mapping[str, Any]], counts: str) -> None:
        """Shows the other alerts of the entity, and how alerts of the rule were decided."""
        self._counts.value = clean_text(f"Alerts of the same rule, decided before: {counts}.")
        shown = like[:_MAX_LISTED_LIKE]
        more = f"; the newest {len(shown)}" if len(like) > len(shown) else ""
        words = (
            f"Other alerts of the same entity: {len(like):,}{more}." if like else "No other alert of the same entity."
        )
        self._like_words.value = words
        self._like.show([_list_like(each) for each in shown])

    def _show_fields(self, _: Any) -> None:
        at = self._event_list.index
        fields = self._events[at].fields if at is not None and at < len(self._events) else {}
        self._fields.show([(name, "null" if text is None else text) for name, text in fields.items()])

    def _set_severity(self, severity: str) -> None:
        if self._severity:
            self._title.remove_class(f"lookback-{self._severity}")
        self._severity = severity if severity in SEVERITIES else ""
        if self._severity:
            add_classes(self._title, f"lookback-{self._severity}")

    def _clear(self) -> None:
        """Clears the explanation, so that nothing of another alert shows next to this one."""
        self._picture_place.children = []
        self._events = ()
        self._event_list.options = []
        self._fields.show([])
        self._like.show([])
        self._counts.value = self._like_words.value = ""


def _list_cells(alert: QueuedAlert) -> tuple[str, str, str, str, str]:
    """Lists the cells of an alert's line in the queue."""
    texts = (alert.rule_id, alert.entity or "all events", alert.message)
    rule, entity, message = (
        cut_end(clean_text(text).replace("\n", " "), _WIDTHS[name])
        for name, text in zip(("rule", "entity", "message"), texts, strict=True)
    )
    severity = alert.severity + (" zz" if alert.is_snoozed else "")
    return severity, f"{alert.event_time:{_TIME}}", rule, entity, message


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligns lines below their titles, which come first, for a monospaced font."""
    lines = [("severity", "event time (UTC, +00:00)", "rule", "entity", "message"), *rows]
    widths = [max(len(line[at]) for line in lines) for at in range(len(lines[0]))]
    # A browser collapses ordinary spaces in a list.
    return [
        "\N{NO-BREAK SPACE}\N{NO-BREAK SPACE}".join(
            text.ljust(width, "\N{NO-BREAK SPACE}") for text, width in zip(line, widths, strict=True)
        ).rstrip()
        for line in lines
    ]


def _list_like(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Lists the cells of another alert of the same entity."""
    time = row["event_time"].astimezone(dt.timezone.utc)
    mode = "" if row["mode"] == "active" else f", {row['mode']}"
    decided = str(row["reviews"][-1]) if row["reviews"] else "waits" if row["verdict"] == "raised" else ""
    return (
        f"{time:{_TIME}}", row["rule_id"], row["severity"], f"{row['verdict']}{mode}", row["message"] or "", decided,
    )  # fmt: skip


def _name_alerts(alerts: Sequence[QueuedAlert]) -> str:
    """Names one alert, or counts several."""
    if len(alerts) != 1:
        return count_noun(len(alerts), "alert")
    return f"{alerts[0].rule_id}, {alerts[0].entity or 'all events'}"


def _list_reviews(reviews: Mapping[str, Sequence[Review]]) -> str:
    """Lists the last review of each of the first three alerts."""
    listed = [str(each[-1]) for each in list(reviews.values())[:3]]
    return "; ".join(listed) + ("; ..." if len(reviews) > 3 else "")


def _name_error(error: BaseException) -> str:
    """Describes an error in a sentence; one that Lookback raises says what to do."""
    return str(error) if isinstance(error, LookbackError) else summarize_error(error)
