"""One alert at a review desk: its words, the buttons to decide, the picture, the events, and related alerts."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import ipywidgets

from lookback.core.rules.document import SEVERITIES
from lookback.desk import parts, sentences
from lookback.desk.queue import QueuedAlert
from lookback.desk.records import ListedEvent, OpenedAlert, describe_decisions
from lookback.spark.review import Review

# The button's title and the meaning of each disposition.
_MEANINGS = {
    "confirmed": ("Confirmed", "it is what the rule looks for"),
    "false_positive": ("False positive", "it is not what the rule looks for"),
    "benign": ("Benign", "true but harmless"),
    "unclear": ("Unclear", "the facts do not decide it"),
}
_MAX_LISTED_LIKE = 20
_EXPLAINING = "Being explained ..."
_LIKE_COLUMNS = ("event time (UTC, +00:00)", "rule", "severity", "verdict", "message", "decided")


class AlertView:
    """The open alert. It calls `decide` with a disposition, `snooze` with end, reason and whether for the whole rule."""

    def __init__(
        self,
        decide: Callable[[str], None],
        skip: Callable[[], None],
        undo: Callable[[], None],
        snooze: Callable[[str, str, bool], None],
    ) -> None:
        self._severity = ""
        self._title = parts.make_text("", "lookback-head", "lookback-alert-title")
        texts = (parts.make_text("", f"lookback-{name}") for name in ("told", "words", "counts", "like-words"))
        self._reviews, self._words, self._counts, self._like_words = texts
        self._picture_place = parts.make_column(name="lookback-picture")
        self._events = parts.add_classes(ipywidgets.HTML(), "lookback-events")
        self._like = parts.add_classes(ipywidgets.HTML(), "lookback-like")
        hint = "What you found; it is recorded with the decision"
        self._note = parts.make_field(ipywidgets.Textarea, "Note", hint, "lookback-note", rows=2, layout=parts.WIDE)
        self._buttons = {
            name: parts.make_button(title, partial(decide, name), "", f"lookback-decide-{name.replace('_', '-')}")
            for name, (title, _) in _MEANINGS.items()
        }
        skipping = parts.make_button("Next", skip, "Open the next alert without a decision", "lookback-skip")
        undoing = parts.make_button("Undo", undo, "Withdraw the last decision of this session", "lookback-undo")
        buttons = parts.make_row(*self._buttons.values(), skipping, undoing)
        decision = parts.make_column(self._note, buttons, name="lookback-decision")
        # The buttons come first, so that they stay in view however much there is to say about the alert.
        self.widget = parts.make_column(
            *(self._title, self._reviews, decision, self._words, self._picture_place),
            name="lookback-alert",
        )
        self.below = parts.make_column(
            *(parts.make_heading("Events behind it"), self._events),
            *(parts.make_heading("Related alerts"), self._counts, self._like_words, self._like),
            *(parts.make_heading("Snooze"), _make_snooze(snooze)),
        )
        self.name_chosen(1)

    @property
    def note(self) -> str:
        """The current text of the note."""
        return str(self._note.value)

    def clear_note(self) -> None:
        """Empties the note after recording it."""
        self._note.value = ""

    def name_chosen(self, number: int) -> None:
        """Shows on the buttons how many alerts a decision applies to."""
        count, of = ("", "this alert") if number <= 1 else (f" ({number:,})", f"all {number:,} chosen alerts")
        for name, button in self._buttons.items():
            title, meaning = _MEANINGS[name]
            button.description, button.tooltip = f"{title}{count}", f"Decide on {of}: {meaning}"

    def show_nothing(self, sentence: str) -> None:
        """Shows that no alert is open."""
        self._clear("", sentence)
        self._reviews.value = self._words.value = ""

    def show_row(self, alert: QueuedAlert, seen: Sequence[Review]) -> None:
        """Shows what the queue knows about an alert, with the reviews by other reviewers that were already shown."""
        self._clear(alert.severity, sentences.describe_title(alert))
        self._reviews.value = parts.clean_text(f"Decided before: {'; '.join(map(str, seen))}." if seen else "")
        self._words.value = parts.clean_text(f"{sentences.describe_row(alert)}\n{_EXPLAINING}")

    def show_explanation(self, opened: OpenedAlert) -> None:
        """Shows an alert in words, its picture and its events."""
        self._words.value = parts.clean_text("\n".join(opened.lines))
        words = f"Time line of {opened.picture_words}; the events are listed below"
        self._picture_place.children = [parts.make_picture(opened.picture, words)]
        self._show_events(opened.events)

    def show_no_explanation(self, sentence: str) -> None:
        """Shows why the alert cannot be explained."""
        self._words.value = self._words.value.replace(_EXPLAINING, parts.clean_text(f"Not explained: {sentence}"))

    def show_like(self, like: Sequence[Mapping[str, Any]], counts: Mapping[str, int] | None) -> None:
        """Shows the other alerts of the entity, and how alerts of the rule were decided; None: not counted yet."""
        described = "being counted" if counts is None else describe_decisions(counts)
        self._counts.value = parts.clean_text(f"Alerts of the same rule, decided before: {described}.")
        shown = like[:_MAX_LISTED_LIKE]
        self._like_words.value = sentences.describe_like(len(like), len(shown))
        parts.show_rows(self._like, _LIKE_COLUMNS, list(map(_list_like, shown)), "Related alerts")

    def _show_events(self, events: Sequence[ListedEvent]) -> None:
        columns = ["why", *dict.fromkeys(name for each in events for name in each.fields)]
        rows = [(each.reason, *(_show_value(each, name) for name in columns[1:])) for each in events]
        parts.show_rows(self._events, columns, rows, "The events behind the alert")

    def _clear(self, severity: str, title: str) -> None:
        """Shows another title, and clears the explanation, so that nothing of another alert shows next to this one."""
        self._title.value = parts.clean_text(title)
        if self._severity:
            self._title.remove_class(f"lookback-{self._severity}")
        self._severity = severity if severity in SEVERITIES else ""
        if self._severity:
            self._title.add_class(f"lookback-{self._severity}")
        self._picture_place.children = []
        self._events.value = self._like.value = self._counts.value = self._like_words.value = ""
        self.name_chosen(1)


def _show_value(event: ListedEvent, name: str) -> str:
    """Returns the text of a field; empty for one that the event does not have, as steps may show other fields."""
    text = event.fields.get(name, "")
    return "null" if text is None else text


def _make_snooze(snooze: Callable[[str, str, bool], None]) -> Any:
    hint = "A time such as 2026-01-31T12:00:00Z, or a duration such as 8 hours"
    until = parts.make_field(ipywidgets.Text, "Snooze until", hint, "lookback-snooze-until", value="8 hours")
    reason = parts.make_field(ipywidgets.Text, "Reason", "Why it is snoozed", "lookback-snooze-reason")
    hint = "Snooze all alerts of the rule, not only those of this key"
    kind, name = ipywidgets.Checkbox, "lookback-snooze-rule"
    whole = parts.make_field(kind, "all keys of the rule", hint, name, value=False, indent=False)
    hint = "Leave the alerts of this rule and key out of the queue and of notifications for a while"
    button = parts.make_button(
        "Snooze", lambda: snooze(until.value, reason.value, whole.value), hint, "lookback-snooze"
    )
    return parts.make_row(until, reason, whole, button, name="lookback-snoozing")


def _list_like(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Lists the cells of another alert of the same entity."""
    time = f"{row['event_time'].astimezone(dt.timezone.utc):{parts.TIME}}"
    verdict = row["verdict"] if row["mode"] == "active" else f"{row['verdict']}, {row['mode']}"
    decided = str(row["reviews"][-1]) if row["reviews"] else "waits" if row["verdict"] == "raised" else ""
    return time, row["rule_id"], row["severity"], verdict, row["message"] or "", decided
