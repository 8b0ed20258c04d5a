"""The queue at a review desk: filters, a list of alerts and its pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ipywidgets

from lookback.core.rules.document import SEVERITIES
from lookback.core.values.texts import count_noun, cut_end
from lookback.desk import parts
from lookback.desk.queue import AGES, ORDERS, SNOOZED, QueuedAlert, QueueFilter, ReviewQueue

# ipywidgets shows nothing for None, so the value of "any" is an empty text.
_ANY = ("any", "")
_SEVERITIES = [(name, name) for name in reversed(SEVERITIES)]
_LIST_ROWS = 24
# The controls by the field of QueueFilter that they set: title, hint, name and options; no options for a text.
_FILTERS: dict[str, tuple[str, str, str, Sequence[Any]]] = {
    "rule_id": ("Rule", "Show only the alerts of this rule", "filter-rule", [_ANY]),
    "severity": ("Severity", "Show only alerts of this severity", "filter-severity", [_ANY, *_SEVERITIES]),
    "tag": ("Tag", "Show only alerts whose rule has this tag", "filter-tag", [_ANY]),
    "entity": ("Entity", "Show only alerts whose key contains this text; Enter applies it", "filter-entity", ()),
    "age": ("Age", "Show only alerts decided this long ago", "filter-age", list(AGES)),
    "snoozed": ("Snoozed", "Whether snoozed alerts are shown", "filter-snoozed", SNOOZED),
    "order": ("Order", "The order of the queue", "order", list(ORDERS)),
}
_TITLES = ("severity", "event time (UTC)", "rule", "entity", "message")
_TIME = "%Y-%m-%d %H:%M"
# The maximum width of the last three columns, in characters. In half a desk there is room for all but the message.
_WIDTHS = (20, 24, 90)
# A browser collapses ordinary spaces in a list.
_SPACE = "\N{NO-BREAK SPACE}"


class QueueView:
    """The filters, the list and its pages. The list is one control: arrows move, Shift and Ctrl select several.

    It calls `show` with the chosen filter and order, `choose` with ids of alerts, and `turn` with a number of pages.
    """

    def __init__(
        self,
        show: Callable[[QueueFilter, str], None],
        choose: Callable[[Sequence[str]], None],
        turn: Callable[[int], None],
        read: Callable[[], None],
        choose_all: Callable[[], None],
        choose_like: Callable[[], None],
    ) -> None:
        self._show, self._choose, self._filling = show, choose, parts.Filling()
        self._shown: Sequence[QueuedAlert] = ()
        self._filters = {name: _make_filter(*how) for name, how in _FILTERS.items()}
        for field in self._filters.values():
            self._filling.observe(field, self._apply)
        button = parts.make_button
        reading = button("Read again", read, "Reload the queue from the tables", "lookback-read")
        before = button("Previous page", partial(turn, -1), "Show the page before", "lookback-previous-page")
        after = button("Next page", partial(turn, 1), "Show the page after", "lookback-next-page")
        hint = "Choose all alerts that the filter shows, on every page, for one decision"
        choosing = button("Choose all shown", choose_all, hint, "lookback-choose-all")
        hint = "Choose all alerts that the filter shows of this alert's key, on every page, for one decision"
        grouping = button("Choose this entity's", choose_like, hint, "lookback-choose-like")
        self._head = parts.make_text("", "lookback-head", "lookback-list-head")
        hint = "Arrows open another one; with Shift or Ctrl several are chosen"
        kind, names = ipywidgets.SelectMultiple, ("lookback-queue-list", "lookback-named")
        self._list = parts.make_list(kind, "The alerts that wait", hint, _LIST_ROWS, *names)
        self._filling.observe(self._list, self._choose_listed, "index")
        self._page = parts.make_text("", "lookback-page")
        self.filters = parts.make_row(*self._filters.values(), reading, name="lookback-filters")
        pages = parts.make_row(before, self._page, after, grouping, choosing)
        self.widget = parts.make_column(self._head, self._list, pages, name="lookback-queue")

    def offer(self, rules: Sequence[str], tags: Sequence[str]) -> None:
        """Offers the rules and the tags of open alerts, and keeps the chosen ones."""
        for name, offered in (("rule_id", rules), ("tag", tags)):
            field = self._filters[name]
            with self._filling:
                chosen = field.value
                names = sorted({*offered, *filter(None, [chosen])})
                field.options = [_ANY, *((parts.clean_text(each, 100), each) for each in names)]
                field.value = chosen

    def refresh(self, queue: ReviewQueue, chosen: Sequence[str]) -> None:
        """Shows the page of the queue, with the chosen alerts marked."""
        with self._filling:
            self._shown = queue.on_page
            self._head.value, *lines = _align([_TITLES, *map(_list_cells, self._shown)])
            if tuple(lines) != tuple(label for label, _ in self._list.options or ()):
                self._list.options = [(text, at) for at, text in enumerate(lines)]
            self._list.index = tuple(at for at, each in enumerate(self._shown) if each.alert_id in set(chosen))
            self._page.value = f"Page {queue.page + 1:,} of {queue.pages:,}; {count_noun(len(queue.shown), 'alert')}"

    def _choose_listed(self) -> None:
        self._choose([self._shown[at].alert_id for at in self._list.index])

    def _apply(self) -> None:
        chosen = {name: field.value for name, field in self._filters.items()}
        order = chosen.pop("order")
        self._show(QueueFilter(**chosen), order)


def _make_filter(title: str, hint: str, name: str, options: Sequence[Any]) -> Any:
    kind, how = ipywidgets.Dropdown, {"options": options}
    if not options:
        kind, how = ipywidgets.Text, {"placeholder": "any; or a part of a key"}
    return parts.make_field(kind, title, hint, f"lookback-{name}", **how)


def _list_cells(alert: QueuedAlert) -> tuple[str, ...]:
    """Lists the cells of an alert's line in the queue."""
    texts = zip((alert.rule_id, alert.entity or "all events", alert.message), _WIDTHS, strict=True)
    cells = (cut_end(parts.clean_text(text).replace("\n", " "), width) for text, width in texts)
    return alert.severity + (" zz" if alert.is_snoozed else ""), f"{alert.event_time:{_TIME}}", *cells


def _align(lines: Sequence[Sequence[str]]) -> list[str]:
    """Aligns the cells of lines for a monospaced font."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ([text.ljust(width, _SPACE) for text, width in zip(line, widths, strict=True)] for line in lines)
    return [(2 * _SPACE).join(cells).rstrip() for cells in padded]
