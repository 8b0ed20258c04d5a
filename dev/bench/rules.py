"""Makes the measured rules as documents. Their limits fit the set, so that the share of alerts is the same in all sets."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dev.bench import sets, texts
from dev.bench.sets import DATA, DAY, HOUR, MINUTE, Columns, EventSet, Int64s, Windows, write_json

Document = dict[str, Any]

# Of the two rules that every engine runs: at most so many of the events alert.
_SPEND_SHARE, _BURST_SHARE = 0.003, 0.006
# Of each of many rules: together about 1 % of the events alert, as with the two.
_MANY_SHARE = 0.0001
_LARGE_CENTS = 2_000
_MIN_AMOUNTS = (0, 10, 15, 25, 40)
_CUSTOMER, _TERMINAL = ("customer_id",), ("terminal_id",)
_PAIR = ("customer_id", "terminal_id")
_SAME_BY_CUSTOMER, _SAME_AT_TERMINAL = ("amount", "customer_id"), ("amount", "terminal_id")
_LARGE = f"count(*) filter (where amount >= {_LARGE_CENTS // 100})"
# Five grouping sets, four features each.
FEATURES: tuple[tuple[tuple[str, ...], str], ...] = (
    (_CUSTOMER, "count(*)"), (_CUSTOMER, "sum(amount)"), (_CUSTOMER, _LARGE), (_CUSTOMER, "count(distinct terminal_id)"),
    (_TERMINAL, "count(*)"), (_TERMINAL, "sum(amount)"), (_TERMINAL, _LARGE), (_TERMINAL, "count(distinct customer_id)"),
    (_PAIR, "count(*)"), (_PAIR, "sum(amount)"), (_PAIR, "max(amount)"), (_PAIR, "avg(amount)"),
    (_SAME_BY_CUSTOMER, "count(*)"), (_SAME_BY_CUSTOMER, "sum(amount)"), (_SAME_BY_CUSTOMER, _LARGE),
    (_SAME_BY_CUSTOMER, "count(distinct terminal_id)"),
    (_SAME_AT_TERMINAL, "count(*)"), (_SAME_AT_TERMINAL, "sum(amount)"), (_SAME_AT_TERMINAL, _LARGE),
    (_SAME_AT_TERMINAL, "count(distinct customer_id)"),
)  # fmt: skip


@dataclass(frozen=True)
class Rules:
    """Rules to push, and those that only keep rows: paused, so their windows go on and nothing is judged.

    listed: so many odd numbers are on the list that rules ask.
    """

    documents: tuple[Document, ...]
    paused: tuple[Document, ...] = ()
    listed: int = 0


def rules_for(name: str, events: EventSet) -> Rules:
    """Makes the rule set of that name with limits for the events. Raises ValueError for an unknown name."""
    if name not in RULE_SETS:
        raise ValueError(f"there is no rule set {name!r}; there are {', '.join(RULE_SETS)}")
    code = b"".join(Path(str(each)).read_bytes() for each in (__file__, sets.__file__, texts.__file__))
    digest = hashlib.sha256(code).hexdigest()[:8]
    file = DATA / "rules" / f"{events.stem}-{name}-{digest}.json"
    if not file.exists():
        # Limits of many rules take some seconds.
        made = RULE_SETS[name](events)
        write_json(file, {"documents": made.documents, "paused": made.paused, "listed": made.listed})
    found = json.loads(file.read_text(encoding="utf-8"))
    return Rules(tuple(found["documents"]), tuple(found["paused"]), found["listed"])


def peers_rules(events: EventSet) -> Document:
    """Makes the two rules that every engine runs, in the peers' form: times in microseconds, amounts in cents."""
    columns = events.columns
    times, cents = columns["event_time"], columns["amount_cents"].astype(np.int64)
    spend = Windows(columns["customer_id"], times).sums(cents, DAY)
    large = (cents >= _LARGE_CENTS).astype(np.int64)
    burst = Windows(columns["terminal_id"], times).sums(large, 10 * MINUTE)
    return {
        "rules": [
            {
                "rule_id": "spend",
                "group_by": "customer_id",
                "aggregate": "sum",
                "window_us": DAY,
                "at_least": _limit(spend, _SPEND_SHARE, unit=100),
            },
            {
                "rule_id": "burst",
                "group_by": "terminal_id",
                "aggregate": "count",
                "min_amount_cents": _LARGE_CENTS,
                "window_us": 10 * MINUTE,
                "at_least": _limit(burst, _BURST_SHARE, unit=1),
            },
        ]
    }


def two(events: EventSet) -> Rules:
    """A sum over 24 hours by customer, a count with a filter over 10 minutes by terminal: the same as `peers_rules`."""
    spend, burst = peers_rules(events)["rules"]
    return Rules(
        (
            lookback("spend", _CUSTOMER, "sum(amount)", DAY, f"value >= {spend['at_least'] // 100}"),
            lookback("burst", _TERMINAL, _LARGE, 10 * MINUTE, f"value >= {burst['at_least']}"),
        )
    )


def with_condition(where: str, listed: int = 0) -> Callable[[EventSet], Rules]:
    """The two, of which that about spending has a condition: all customers with odd numbers are on the list."""

    def rules(events: EventSet) -> Rules:
        spend, burst = two(events).documents
        return Rules(({**spend, "where": where}, burst), listed=listed)

    return rules


def ten(events: EventSet) -> Rules:
    """Ten rules over three grouping sets: the two, distinct counts, averages, and a month against a day."""
    limits = _Limits(events)
    more = [
        limits.rule("customer-payments-hour", _CUSTOMER, "count(*)", HOUR),
        limits.rule("customer-spend-week", _CUSTOMER, "sum(amount)", 7 * DAY),
        limits.rule("customer-terminals-day", _CUSTOMER, "count(distinct terminal_id)", DAY),
        limits.rule("terminal-turnover-hour", _TERMINAL, "sum(amount)", HOUR),
        limits.rule("terminal-customers-day", _TERMINAL, "count(distinct customer_id)", DAY),
        limits.rule("pair-payments-day", _PAIR, "count(*)", DAY),
        limits.rule("pair-largest-day", _PAIR, "max(amount)", DAY),
        against_usual(),
    ]
    return Rules((*two(events).documents, *more))


def hundred(events: EventSet) -> Rules:
    """100 rules over 5 grouping sets and 20 features: each feature over five windows."""
    return Rules(tuple(_over_features(events, 5)))


def two_hundred(events: EventSet) -> Rules:
    """200 rules over the same 5 grouping sets and 20 features: each feature over ten windows."""
    return Rules(tuple(_over_features(events, 10)))


def thousand(events: EventSet) -> Rules:
    """1,000 rules over the same 5 grouping sets and 100 features: each of 20 for amounts from five limits on, over ten windows."""
    limits = _Limits(events)
    rules = [
        limits.rule(f"f{number:02d}-a{least:02d}-w{at:02d}", group_by, measure, size, least)
        for number, (group_by, measure) in enumerate(FEATURES)
        for least in _MIN_AMOUNTS
        for at, size in enumerate(_windows(events))
    ]
    return Rules(tuple(rules))


def five_features(events: EventSet) -> Rules:
    """100 rules over 5 grouping sets and 5 features, one a grouping set: what 100 rules cost with fewer features."""
    windows = [(at + 1) * max(_windows(events)) // 20 for at in range(20)]
    limits = _Limits(events)
    features = [feature for feature in FEATURES if feature[1] == "count(*)"]
    rules = [
        limits.rule(f"f{number:02d}-w{at:02d}", group_by, measure, window)
        for number, (group_by, measure) in enumerate(features)
        for at, window in enumerate(windows)
    ]
    return Rules(tuple(rules))


def sequence(events: EventSet) -> Rules:
    """Three failed logins of a user, then a success from an address that is not among those of the failures."""
    assert events.name == "logins", "the sequence is one of logins"
    return Rules(
        (
            {
                "rule_id": "login-takeover",
                "stream": "logins",
                "group_by": ["user_id"],
                "sequence": {
                    "within": "10 minutes",
                    "steps": [
                        {"name": "failures", "where": "outcome = 'FAIL'", "at_least": 3},
                        {"name": "success", "where": "outcome = 'SUCCESS' and not array_contains(failures.ip, ip)"},
                    ],
                    "until": "outcome = 'SUCCESS'",
                },
            },
        )
    )


def distinct(events: EventSet) -> Rules:
    """Distinct terminals of a customer and distinct customers at a terminal, over 24 hours."""
    limits = _Limits(events)
    return Rules(
        (
            limits.rule("customer-terminals-day", _CUSTOMER, "count(distinct terminal_id)", DAY),
            limits.rule("terminal-customers-day", _TERMINAL, "count(distinct customer_id)", DAY),
        )
    )


def against_usual() -> Document:
    """Compares a customer's spending of a day with the 30 days before: a sum, and an average that looks back with a delay."""
    document = lookback("spend-against-usual", _CUSTOMER, "sum(amount)", DAY, "value > 40 * usual")
    document["measures"]["usual"] = {"measure": "avg(amount)", "window": {"lookback": "30 days", "delay": "1 day"}}
    return document


def window_of(size: int) -> Callable[[EventSet], Rules]:
    """One sum by customer over a window of `size`, which also says how much is kept."""

    def rules(events: EventSet) -> Rules:
        return Rules((_Limits(events).rule("spend", _CUSTOMER, "sum(amount)", size),))

    return rules


def held_window_of(size: int) -> Callable[[EventSet], Rules]:
    """Makes the same rule while 30 days are kept, whatever its window: a paused rule on the same feature keeps the rows."""

    def rules(events: EventSet) -> Rules:
        keeper = lookback("keeper", _CUSTOMER, "sum(amount)", 30 * DAY, "value < 0")
        return Rules(window_of(size)(events).documents, (keeper,))

    return rules


# The set of rules that peers run too.
PEERS_RULES = "2"
# The list of the rules that ask one, so many values, and how they ask it.
LIST, LISTED = "listed-customers", 1_000_000
ON_LIST = f"in_list(customer_id, '{LIST}')"


def on_texts(events: EventSet) -> Rules:
    """3,000 event rules on the texts of processes."""
    assert events.name == "processes", "the rules are on the texts of processes"
    made = enumerate(texts.make_rules(3_000))
    return Rules(tuple({"rule_id": f"text-{number}", "stream": "processes", **rule} for number, rule in made))


RULE_SETS: dict[str, Callable[[EventSet], Rules]] = {
    PEERS_RULES: two,
    "2-asking": with_condition(f"customer_id % 2 = 0 or {ON_LIST}", LISTED),
    "2-condition": with_condition("customer_id % 2 = 0"),
    "2-listed": with_condition(f"not {ON_LIST}", LISTED),
    "10": ten,
    "100": hundred,
    "200": two_hundred,
    "1000": thousand,
    "100-of-5-features": five_features,
    "distinct": distinct,
    "sequence": sequence,
    "3000-on-texts": on_texts,
    "window-1h": window_of(HOUR),
    "window-1d": window_of(DAY),
    "window-7d": window_of(7 * DAY),
    "window-30d": window_of(30 * DAY),
    "held-1h": held_window_of(HOUR),
    "held-1d": held_window_of(DAY),
    "held-30d": held_window_of(30 * DAY),
}


def lookback(rule_id: str, group_by: Iterable[str], measure: str, window: int, when: str) -> Document:
    """A rule with one measure, `value`, over a lookback window of so many microseconds."""
    return {
        "rule_id": rule_id,
        "stream": "transactions",
        "group_by": list(group_by),
        "window": f"{window // 1_000_000} seconds",
        "measures": {"value": measure},
        "when": when,
    }


def _over_features(events: EventSet, windows: int) -> list[Document]:
    sizes, limits = _windows(events)[:windows], _Limits(events)
    return [
        limits.rule(f"f{number:02d}-w{at:02d}", group_by, measure, size)
        for number, (group_by, measure) in enumerate(FEATURES)
        for at, size in enumerate(sizes)
    ]


def _windows(events: EventSet) -> list[int]:
    """Ten windows, the first five of which span the same: up to 30 days of a set of months, else up to 24 hours."""
    if events.name == "handbook":
        return [HOUR, 6 * HOUR, DAY, 7 * DAY, 30 * DAY, 3 * HOUR, 12 * HOUR, 3 * DAY, 14 * DAY, 21 * DAY]
    minutes = [10, 60, 180, 720, 1_440, 30, 120, 360, 540, 1_080]
    return [each * MINUTE for each in minutes]


class _Limits:
    """Limits such that a rule alerts for about _MANY_SHARE of the events of a set."""

    def __init__(self, events: EventSet) -> None:
        self._columns: Columns = events.columns
        self._cents = self._columns["amount_cents"].astype(np.int64)
        self._windows: dict[tuple[tuple[str, ...], int], Windows] = {}

    def rule(self, rule_id: str, group_by: tuple[str, ...], measure: str, window: int, least: int = 0) -> Document:
        """A rule whose limit fits its measure and window. least: it counts events of this amount or more."""
        limit = self._limit(group_by, measure, window, 100 * least)
        document = lookback(rule_id, group_by, measure, window, f"value >= {limit}")
        return {**document, "where": f"amount >= {least}"} if least else document

    def _limit(self, group_by: tuple[str, ...], measure: str, window: int, least_cents: int) -> int:
        if measure.startswith(("max", "avg")):
            # One large amount is in the windows of many events after it.
            return _limit(self._cents, _MANY_SHARE / 50, unit=100) // 100
        is_counted = self._cents >= least_cents
        windows, cents = self._windows_by(group_by, least_cents), self._cents[is_counted]
        values: Int64s = np.ones(len(cents), dtype=np.int64)
        if measure == _LARGE:
            values = (cents >= _LARGE_CENTS).astype(np.int64)
        elif measure == "sum(amount)":
            values = cents
        elif match := re.fullmatch(r"count\(distinct (\w+)\)", measure):
            # An event brings a new value if the value's last event lies before the window: its own place in the window is
            # anywhere, so chance decides, and the sums are right on average.
            gaps = self._windows_by(tuple(sorted({*group_by, match[1]})), least_cents).gaps()
            values = (gaps > np.random.default_rng(1).random(len(gaps)) * window).astype(np.int64)
        unit = 100 if measure == "sum(amount)" else 1
        return _limit(windows.sums(values, window), _MANY_SHARE, unit) // unit

    def _windows_by(self, group_by: tuple[str, ...], least_cents: int) -> Windows:
        known_as = group_by, least_cents
        if known_as not in self._windows:
            is_counted = self._cents >= least_cents
            columns = [self._cents if name == "amount" else self._columns[name] for name in group_by]
            times = self._columns["event_time"][is_counted]
            self._windows[known_as] = Windows(_numbered([column[is_counted] for column in columns]), times)
        return self._windows[known_as]


def _numbered(columns: list[npt.NDArray[Any]]) -> Int64s:
    """A small number for each distinct combination of values."""
    numbers: Int64s = np.unique(columns[0], return_inverse=True)[1].astype(np.int64)
    for column in columns[1:]:
        combined = numbers * (int(column.max()) + 1) + column
        numbers = np.unique(combined, return_inverse=True)[1].astype(np.int64)
    return numbers


def _limit(values: Int64s, share: float, unit: int) -> int:
    """Returns the least multiple of `unit`, above one unit, that at most a `share` of the values reaches."""
    place = max(0, len(values) - 1 - int(share * len(values)))
    above = int(np.partition(values, place)[place])
    return max(2 * unit, (above // unit + 1) * unit)
