"""The input of a soak run: a small stream with every kind of disorder, rules of every kind, and changes of rules and lists.

The Spark tests use the same stream and most of the rules.
"""

from __future__ import annotations

import datetime as dt
import json
import random
from dataclasses import dataclass, field
from typing import Any

from lookback.core.streams.declaration import Stream

STREAM = Stream.from_dict(
    {
        "stream": "payins",
        "event_id": "id",
        "event_time": "at",
        "fields": {"id": "string", "at": "timestamp", "customer": "int", "shop": "string", "amount": "decimal(18,2)"},
        "max_out_of_orderness": "20 seconds",
        "allowed_lateness": "1 minute",
        # Small commits, so that every batch has some.
        "commit_rows": 25,
    }
)
STREAMS = {STREAM.name: STREAM}
_START = dt.datetime(2024, 1, 1, tzinfo=dt.timezone.utc)
# The seconds by which an event is behind the newest: in order, out of order, late, too late.
_DELAYS = [0] * 12 + [5, 15, 40, 200]
_FUTURE = "2099-01-01T00:00:00Z"


@dataclass
class Feed:
    """Makes lines of JSON, as a source writes them: late events, some of the far future, duplicates and broken ones."""

    chance: random.Random
    count: int = 0
    now: dt.datetime = _START
    _recent: list[str] = field(default_factory=list)

    def make_lines(self, count: int) -> list[str]:
        """Makes the next lines."""
        return [self._make_line() for _ in range(count)]

    def _make_line(self) -> str:
        kind = self.chance.random()
        if kind < 0.02 and self._recent:
            return self.chance.choice(self._recent)
        self.count += 1
        self.now += dt.timedelta(microseconds=self.chance.choice([0, 1, 1_000_000, 3_000_000]))
        at = (self.now - dt.timedelta(seconds=self.chance.choice(_DELAYS))).isoformat().replace("+00:00", "Z")
        row: dict[str, Any] = {
            "id": f"e{self.count}",
            "at": _FUTURE if kind > 0.995 else at,
            "customer": self.chance.choice([None, 1, 2, 3, 3]),
            "shop": self.chance.choice(["a", "ü", "", None]),
            "amount": f"{self.chance.choice([1, 13, 25, 49, 50])}.{self.chance.randrange(100):02}",
        }
        if 0.02 <= kind < 0.03:
            # The lines are broken in several ways, and no two are equal, so that each of them is counted.
            row |= self.chance.choice([{"id": None, "shop": f"s{self.count}"}, {"at": "yesterday"}, {"at": None}])
        line = json.dumps(row, ensure_ascii=False)
        self._recent = [*self._recent[-50:], line]
        return line


def is_usable(line: str) -> bool:
    """Returns whether ingest can make an event of a line of `Feed`."""
    row = json.loads(line)
    return row["id"] is not None and row["at"] not in (None, "yesterday")


def make_rule(rule_id: str, **more: Any) -> dict[str, Any]:
    """Makes a lookback rule. more: keys of its document that are added or replaced."""
    return {
        "rule_id": rule_id,
        "stream": STREAM.name,
        "group_by": ["customer"],
        "window": "5 minutes",
        "measures": {"n": "count(*)", "total": "sum(amount)", "top": "max(amount)"},
        "when": "n >= 4 and total > 100",
        "message": "{total} by {customer}",
        **more,
    }


def make_window_rule(rule_id: str, window: dict[str, str], **more: Any) -> dict[str, Any]:
    """Makes a rule of a tumbling, sliding or session window; without `when` every window gives a result."""
    document = make_rule(rule_id, **{"window": window, "message": "{total}", **more})
    return document if "when" in more else {key: value for key, value in document.items() if key != "when"}


def make_sequence_rule(rule_id: str, steps: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Makes a rule of a sequence. more: as in `make_rule`; until and expiry become keys of the sequence."""
    own = {name: more.pop(name) for name in ("until", "expiry") if name in more}
    document = make_rule(rule_id, sequence={"within": "2 minutes", "steps": steps, **own}, **more)
    return {name: value for name, value in document.items() if name not in ("window", "measures", "when")}


_LARGE = {"name": "large", "where": "amount > 40", "at_least": 2}
_NONE = {"name": "none", "absent": "amount > 20", "within": "20 seconds"}
RULES = [
    make_rule("by-customer", suppress="2 minutes"),
    make_rule("by-shop", group_by=["shop"], window={"lookback": "2 minutes", "delay": "10 seconds"}, when="n > 5"),
    make_rule("all", group_by=[], when="top >= 49 or n = 1", suppress="30 seconds", late="record"),
    # Divides by zero now and then.
    make_rule("pair", group_by=["shop", "customer"], when="window_complete and n > 1 and total / (n - 3) > 2"),
    make_rule("revised", late="revise", when="n >= 3 and total < 150", message="{n} by {customer}"),
    make_rule("emptied", group_by=["shop"], reset_on_alert=True, when="n >= 3 or total > 90", message=""),
    make_rule("shops", measures={"n": "count(distinct shop) filter (where amount > 20)"}, when="n >= 3", message="{n}"),
    make_window_rule("minutes", {"tumbling": "1 minute", "offset": "7 seconds"}, group_by=["shop"]),
    make_window_rule(
        "tens", {"sliding": "30 seconds", "slide": "10 seconds"}, when="n > 2", early=True, suppress="20 seconds"
    ),
    make_window_rule("sessions", {"session": "15 seconds"}, when="n > 1", message="{customer}"),
    make_sequence_rule(
        "large-small",
        [_LARGE, {"name": "small", "where": "amount < 30 and not array_contains(large.shop, shop)"}],
        until="amount > 50",
        message="{large.count} of {large.amount} in {large.shop}, then {amount} in {shop}",
    ),
    make_sequence_rule(
        "fixed", [_LARGE, {"name": "next", "where": "amount > 20"}], expiry="fixed", message="{next.count}"
    ),
    make_sequence_rule(
        "silent",
        [{"name": "seen", "where": "amount > 20"}, _NONE],
        group_by=["shop"],
        reset_on_alert=True,
        message="{seen.count} {shop}",
    ),
]
_GROUPINGS = [[], ["customer"], ["shop"], ["shop", "customer"]]
# The list that a rule asks, and the values that come and go. One value stays: a rule that asks a list that is not there is refused.
LIST, LASTING_VALUE, LIST_VALUES = "watched", "lasting", ["a", "ü", "1", "2", "3"]
LISTED = make_rule(
    "listed",
    measures={"n": "count(*)", "watched": f"count(*) filter (where in_list(shop, '{LIST}'))"},
    when=f"n >= 3 and watched > 0 and not in_list(customer, '{LIST}')",
    message="{watched} of {n}",
    suppress="20 seconds",
)
_WIDE_GROUPINGS = [*_GROUPINGS, ["amount"], ["amount", "shop"]]


def make_next_version(document: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """Makes another version of a rule: with other keys, another condition, a longer or a shorter memory."""
    changed = dict(document)
    key = chance.choice(["group_by", "where", "suppress", "within"])
    if key == "group_by":
        changed["group_by"] = chance.choice(_GROUPINGS)
        changed["message"] = ""
    elif key == "where":
        changed["where"] = chance.choice(["amount <> 13", "customer is not null", "shop <> ''", "amount > 5"])
    elif key == "suppress":
        changed["suppress"] = chance.choice(["10 seconds", "1 minute", "5 minutes"])
    elif "sequence" in changed:
        changed["sequence"] = changed["sequence"] | {"within": chance.choice(["1 minute", "2 minutes", "4 minutes"])}
    elif isinstance(changed["window"], str):
        changed["window"] = chance.choice(["2 minutes", "5 minutes", "9 minutes"])
    return changed


def make_wide_rule(chance: random.Random) -> dict[str, Any]:
    """Makes a version of one of three rules whose windows reach back far, often further than what is kept, or by new keys."""
    length = f"{chance.randint(10, 120)} minutes"
    common = {"group_by": chance.choice(_WIDE_GROUPINGS), "message": "", "suppress": "1 minute"}
    rule_id, session = f"wide-{chance.randint(1, 3)}", {"session": f"{chance.randint(5, 60)} seconds"}
    window = chance.choice([length, {"tumbling": length}, {"sliding": length, "slide": "5 minutes"}, session, None])
    if window is None:
        last, expiry = (
            chance.choice([{"name": "next", "where": "amount > 20"}, _NONE]),
            chance.choice(["sliding", "fixed"]),
        )
        return make_sequence_rule(rule_id, [_LARGE, last], expiry=expiry, **common)
    return make_rule(rule_id, window=window, **common)
