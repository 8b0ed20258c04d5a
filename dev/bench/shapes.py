"""Shapes of rules and events that are easily slow: the core alone, each beside a reference kernel of the same run.

The kernel is what any engine does at least: it sorts rows by key and time, and adds their values up. A ratio of 100 says
that an event of the shape costs as much processor time as 100 rows of the kernel. Ratios compare machines and days that
seconds do not, so a shape that was mended has a bound on its ratio, three times what was measured.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dev.bench import texts
from dev.bench.results import record
from dev.bench.watching import say
from lookback.core.engine.batch import Batch
from lookback.core.engine.evaluation import Evaluator
from lookback.core.rules.changes import RuleChange
from lookback.core.rules.rulebook import RuleBook
from lookback.core.state.shard import ShardState
from lookback.core.streams.arrival import find_marks
from lookback.core.streams.declaration import Stream
from lookback.core.streams.events import Events
from lookback.core.values.columns import Column

SECOND, MINUTE, HOUR, DAY = 1_000_000, 60_000_000, 3_600_000_000, 86_400_000_000
_KERNEL_ROWS = 200_000
_REPEATS = 3
_LATE_SHARE, _COMMITS = 0.05, 100
STREAM = Stream.from_dict(
    {
        "stream": "shapes", "event_id": "id", "event_time": "at", "max_out_of_orderness": "1 minute",
        "allowed_lateness": "1 hour", "fields": {"id": "bigint", "at": "timestamp", "k": "bigint", "n": "int", "amount": "decimal(18,2)"},
    }
)  # fmt: skip


class Shard:
    """One shard with its rules and a store in memory. The commits of each batch of events are later than those before."""

    def __init__(self, *rules: dict[str, Any], stream: Stream = STREAM) -> None:
        self._pages: dict[str, bytes] = {}
        self._stream = stream
        self._state, self._evaluator = ShardState(RuleBook(stream, {stream.name: stream})), Evaluator(stream)
        self._changes = [
            RuleChange(
                "insert", at, f"r{at}", 1, "active", json.dumps({"rule_id": f"r{at}", "stream": stream.name, **rule})
            )
            for at, rule in enumerate(rules)
        ]
        self._commit = self._ids = 0

    def adopt(self, state: ShardState, evaluator: Evaluator) -> None:
        """Judges by another state, which has its rules already."""
        self._state, self._evaluator = state, evaluator

    def get(self, name: str) -> bytes | None:
        """Returns a page of the store."""
        return self._pages.get(name)

    def put(self, name: str, page: bytes) -> None:
        """Keeps a page."""
        self._pages[name] = page

    def remove(self, name: str) -> None:
        """Removes a page."""
        del self._pages[name]

    @property
    def stored_bytes(self) -> int:
        """The bytes of all pages."""
        return sum(map(len, self._pages.values()))

    def judge(self, times: Any, keys: Any, numbers: Any | None = None, commits: int = 1) -> float:
        """Judges a batch of so many commits and saves the state. Returns the seconds of the processor."""
        zeros = np.zeros(len(times), dtype=np.int32)
        values = {
            "k": keys, "n": zeros if numbers is None else numbers, "amount": 100 + np.arange(len(times)) * 7919 % 10_000
        }  # fmt: skip
        return self.judge_values(times, values, commits)

    def judge_values(self, times: Any, fields: dict[str, Any], commits: int = 1) -> float:
        """Judges events with these times and values of the other fields, as `judge` does."""
        rows, first = len(times), self._commit + 1
        self._commit += commits
        event_id, event_time = self._stream.event_id, self._stream.event_time
        values = {event_id: np.arange(self._ids, self._ids + rows), event_time: times, **fields}
        self._ids += rows
        columns = {
            name: Column(type_, np.asarray(values[name]).astype(type_.storage))
            for name, type_ in self._stream.fields.items()
        }
        events = Events(columns, first + np.arange(rows) * commits // max(1, rows), event_id, event_time)
        changes, self._changes = self._changes, []
        batch = Batch(events, None, find_marks(events, events.commits), changes)
        start = time.process_time()
        self._state.begin(self)
        output = self._evaluator.process(self._state, batch)
        self._state.save()
        spent = time.process_time() - start
        if output.failures or any(row.action == "rejected" for row in output.log):
            raise RuntimeError(f"the rules of a shape cannot be judged: {output.failures or output.log}")
        return spent


@dataclass(frozen=True)
class Shape:
    """A shape and how to measure it.

    measure: yields seconds of runs that are alike, of which the least counts. events: judged in each run. bound: the most
    that the ratio may be; None where the shape is still slow. against: where another shape is the reference in place of
    the kernel. unit: of a millionth of what `measure` yields.
    """

    name: str
    events: int
    measure: Callable[[], Iterator[float]]
    bound: float | None = None
    against: str | None = None
    unit: str = "us an event"


def run() -> int:
    """Measures all shapes, prints and records them. Returns 1 where a ratio is beyond its bound, else 0."""
    figures: dict[str, dict[str, Any]] = {}
    kernel, failed = _time_kernel(), False
    for shape in SHAPES:
        value = min(shape.measure()) / shape.events * 1e6
        kernel = min(kernel, _time_kernel())
        ratio = value / (kernel if shape.against is None else figures[shape.against]["value"])
        is_beyond = shape.bound is not None and ratio > shape.bound
        failed |= is_beyond
        bound = "" if shape.bound is None else f", at most {shape.bound:,}{': BEYOND' if is_beyond else ''}"
        say(
            f"{shape.name:<56} {value:10,.2f} {shape.unit:<12} {ratio:8,.1f} times {shape.against or 'the kernel'}{bound}"
        )
        figures[shape.name] = {
            "value": round(value, 3), "unit": shape.unit, "against": shape.against or "the kernel",
            "ratio": round(ratio, 2), "bound": shape.bound,
        }  # fmt: skip
    say(f"the kernel: {kernel:.3f} us a row")
    record("shapes", "shapes", {"kernel_rows": _KERNEL_ROWS}, {"kernel_us_a_row": round(kernel, 4), "shapes": figures})
    return int(failed)


def _time_kernel() -> float:
    """Returns the microseconds a row of a sort by key and time with prefix sums."""
    random = np.random.default_rng(1)
    keys, times = random.integers(0, 1_000, _KERNEL_ROWS), random.integers(0, DAY, _KERNEL_ROWS)
    spent = []
    for _ in range(5):
        start = time.process_time()
        order = np.lexsort((times, keys))
        np.cumsum(times[order])
        spent.append(time.process_time() - start)
    return min(spent) / _KERNEL_ROWS * 1e6


def _rule(window: Any, when: str, **more: Any) -> dict[str, Any]:
    return {"group_by": ["k"], "window": window, "measures": {"m": "sum(amount)"}, "when": when, **more}


def _spread_times(rows: int, span: int, begin: int = 0) -> Any:
    return begin + np.arange(rows) * span // rows


def _zipf_keys(rows: int) -> Any:
    return np.random.default_rng(2).zipf(1.3, rows) % 10_000


def _judge_once(rules: Sequence[dict[str, Any]], times: Any, keys: Any, numbers: Any = None) -> Iterator[float]:
    """Judges one batch by rules that are new, again and again."""
    for _ in range(_REPEATS):
        yield Shard(*rules).judge(times, keys, numbers)


def _judge_after(
    rule: dict[str, Any], known: tuple[Any, Any], rows: int, step: int, numbers: Sequence[int] = (0, 0)
) -> Iterator[float]:
    """Judges small batches after large ones of events (times and keys).

    step: microseconds from batch to batch; numbers: the field n of each large batch and, last, of the small ones.
    """
    times, keys = known
    shard, last = Shard(rule), int(times.max())
    for number in numbers[:-1]:
        shard.judge(times, keys, np.full(len(times), number))
    for at in range(1, 1 + _REPEATS):
        few = keys[:: max(1, len(keys) // rows)][:rows]
        yield shard.judge(_spread_times(len(few), step, last + at * step), few, np.full(len(few), numbers[-1]))


def _sequence(steps: list[dict[str, Any]], message: str = "") -> dict[str, Any]:
    return {"group_by": ["k"], "message": message, "sequence": {"within": "1 hour", "steps": steps}}


def _judge_sequence(
    events: int, where: str, message: str = "", span: int = 50 * MINUTE, absent: str = "", **more: Any
) -> Iterator[float]:
    """Judges events of one key. absent: the condition of a last step that waits a minute; more: of the rule."""
    steps: list[dict[str, Any]] = [{"name": "a", "where": "n = 0", "at_least": 2}, {"name": "b", "where": where}]
    steps += [{"name": "silent", "absent": absent, "within": "1 minute"}] if absent else []
    return _judge_once([{**_sequence(steps, message), **more}], _spread_times(events, span), np.zeros(events))


def _judge_steps(events: int, *steps: dict[str, Any], late_by: int = 0) -> Iterator[float]:
    """Judges events of one key, of which a window sees half. late_by: of 5 % of the events, at most, in many commits."""
    random = np.random.default_rng(3)
    late = (random.random(events) < _LATE_SHARE) * random.integers(0, late_by + 1, events)
    times = _spread_times(events, 2 * HOUR) - late
    rule = _sequence([{"name": "a", "where": "n = 0", "at_least": 2}, *steps])
    for _ in range(_REPEATS):
        yield Shard(rule).judge(times, np.zeros(events), commits=_COMMITS if late_by else 1)


def _judge_pairs(events: int, where: str, take: str = "all", **more: Any) -> Iterator[float]:
    """Judges events of one key, of which each second one (n = 1) fits the one before, and a window sees half."""
    steps: list[dict[str, Any]] = [{"name": "a", "where": "n = 0"}, {"name": "b", "where": f"n = 1 and {where}"}]
    rule = _sequence(steps)
    rule["sequence"]["take"] = take
    return _judge_once([{**rule, **more}], _spread_times(events, 2 * HOUR), np.zeros(events), np.arange(events) % 2)


def _judge_logins(events: int, **last: Any) -> Iterator[float]:
    """Judges batches in which half of the events could be the last of a sequence, for as many keys as there are events.

    last: more of the last step.
    """
    steps: list[dict[str, Any]] = [
        {"name": "failures", "where": "n = 0", "at_least": 3},
        {"name": "success", "where": "n = 1 and not array_contains(failures.amount, amount)", **last},
    ]
    rule = _sequence(steps)
    rule["sequence"] |= {"within": "10 minutes", "until": "n = 1"}
    shard, random = Shard(rule), np.random.default_rng(3)
    for at in range(1 + _REPEATS):
        keys, numbers = random.integers(0, events, events), random.integers(0, 2, events)
        # A key has a few events at a time.
        keys[1:] = np.where(random.random(events - 1) < 0.5, keys[:-1], keys[1:])
        spent = shard.judge(_spread_times(events, 10 * HOUR, 10 * HOUR * at), keys, numbers)
        if at:
            yield spent


def _judge_texts(events: int, rules: int) -> Iterator[float]:
    """Judges events of new texts by rules on texts."""
    shard = Shard(*texts.make_rules(rules), stream=texts.STREAM)
    for at in range(1 + _REPEATS):
        times = _spread_times(events, HOUR, at * HOUR)
        spent = shard.judge_values(times, texts.make_texts(events, at))
        if at:
            yield spent


def _judge_many(events: int, rules: list[dict[str, Any]]) -> Iterator[float]:
    return _judge_once(rules, _spread_times(events, DAY), _zipf_keys(events), np.arange(events) % 200)


def _judge_on(events: int, rules: list[dict[str, Any]], *, late_by: int = 0) -> Iterator[float]:
    """Judges batches by rules that are known, after one of as many events. late_by: of 5 % of the events, at most."""
    shard, keys = Shard(*rules), _zipf_keys(events)
    random = np.random.default_rng(3)
    late = (random.random(events) < _LATE_SHARE) * random.integers(0, late_by + 1, events)
    for at in range(1 + _REPEATS):
        times = _spread_times(events, 2 * HOUR, 2 * HOUR * at) - late
        spent = shard.judge(times, keys, np.arange(events) % 200, _COMMITS if late_by else 1)
        if at:
            yield spent


def _over_groupings() -> list[dict[str, Any]]:
    """Each of 20 measures over 5 windows."""
    large, sums = "count(*) filter (where amount >= 20)", ["count(*)", "sum(amount)"]
    measures = {
        ("k",): [*sums, large, "count(distinct n)"], ("n",): [*sums, large, "count(distinct k)"],
        ("k", "n"): [*sums, "max(amount)", "avg(amount)"], ("amount", "k"): [*sums, large, "count(distinct n)"],
        ("amount", "n"): [*sums, large, "count(distinct k)"],
    }  # fmt: skip
    return [
        {**_rule(f"{size} minutes", "m < 0", group_by=list(group_by)), "measures": {"m": text}}
        for group_by, texts in measures.items()
        for text in texts
        for size in (10, 60, 180, 720, 1_440)
    ]


def _judge_aggregate(text: str) -> Iterator[float]:
    rule = {**_rule("1 hour", "m < 0"), "measures": {"m": text}}
    return _judge_once([rule], _spread_times(50_000, DAY), np.arange(50_000) % 100)


def _measure_bytes(aggregates: Sequence[str]) -> Iterator[float]:
    """Yields the megabytes of state, once."""
    shard = Shard({**_rule("1 day", "m0 < 0"), "measures": {f"m{at}": text for at, text in enumerate(aggregates)}})
    shard.judge(_spread_times(50_000, HOUR), np.arange(50_000) % 100)
    yield shard.stored_bytes / 1e6


_SIX = ("sum(amount)", "avg(amount)", "min(amount)", "max(amount)", "stddev_samp(amount)", "count(amount)")
_LARGE = 50_000
_KNOWN = (_spread_times(_LARGE, MINUTE), np.arange(_LARGE))
_DAYS = (_spread_times(200_000, 5 * MINUTE - 2 * SECOND, DAY), np.arange(200_000) % 1_000)

SHAPES = (
    Shape("100 rules, tumbling, Zipf", 10_000, lambda: _judge_many(10_000, [
        _rule({"tumbling": "1 hour"}, f"m > {200_000 + 10 * at}") for at in range(100)]), 60),
    Shape("100 rules, tumbling, each with windows of its own", 10_000, lambda: _judge_many(10_000, [
        _rule({"tumbling": f"{60 + at} minutes"}, f"m > {200_000 + 10 * at}") for at in range(100)]), 320),
    Shape("100 rules, different where, same measure", 100_000, lambda: _judge_on(100_000, [
        _rule("1 hour", "m < 0", where=f"n <> {at}") for at in range(100)]), 70),
    Shape("100 rules over 20 measures of 5 groupings", 100_000, lambda: _judge_on(100_000, _over_groupings()), 110),
    Shape("100 rules over 20 measures of 5 groupings, 5 % late", 100_000, lambda: _judge_on(
        100_000, _over_groupings(), late_by=HOUR // 2), 240),
    Shape("sliding 1 day / 5 min, 400,000 rows, no window ends", 1_000, lambda: _judge_after(
        _rule({"sliding": "1 day", "slide": "5 minutes"}, "m < 0"), _DAYS, 1_000, SECOND // 2), 100),
    Shape("sliding early, 600 windows an event", 1_000, lambda: _judge_once(
        [_rule({"sliding": "10 hours", "slide": "1 minute"}, "m < 0", early=True)],
        _spread_times(1_000, HOUR), np.arange(1_000) % 50), 150),
    Shape("sliding early, 600 windows an event, one key", 1_000, lambda: _judge_once(
        [_rule({"sliding": "10 hours", "slide": "1 minute"}, "m < 0", early=True)],
        _spread_times(1_000, 10 * HOUR), np.zeros(1_000)), 600),
    Shape("sliding early, 600 alerts an event", 10, lambda: _judge_once(
        [_rule({"sliding": "10 hours", "slide": "1 minute"}, "m > 0", early=True)],
        _spread_times(10, HOUR), np.zeros(10))),
    Shape("sequence, one key, a condition on earlier steps", 2_000, lambda: _judge_sequence(
        2_000, "n = 0 and amount < element_at(a.amount, 1) - 1000"), 150),
    Shape("the same, the window slides past 1,000 events", 2_000, lambda: _judge_sequence(
        2_000, "n = 0 and amount < element_at(a.amount, 1) - 1000", span=2 * HOUR), 150),
    Shape("the same, every event alerts", 2_000, lambda: _judge_sequence(
        2_000, "n = 0 and amount <> element_at(a.amount, 1)", span=2 * HOUR), 4_000),
    Shape("the same, the last one of the step before", 2_000, lambda: _judge_sequence(
        2_000, "n = 0 and amount = element_at(a.amount, -1)", span=2 * HOUR), 1_100),
    Shape("the same, the number of the step before", 2_000, lambda: _judge_sequence(
        2_000, "n = 0 and a.count > 2000", span=2 * HOUR), 100),
    Shape("the same, it is no event's last step but one in between", 2_000, lambda: _judge_steps(
        2_000, {"name": "b", "where": "n = 0 and amount = element_at(a.amount, -1)"},
        {"name": "c", "where": "n = 0"}), 1_100),
    Shape("the same, compared with the first one, which differs in each match", 2_000, lambda: _judge_steps(
        2_000, {"name": "b", "where": "amount < element_at(a.amount, 1) - 1000000"}, {"name": "c", "where": "n = 0"}), 150),
    Shape("the same, at least three that satisfy it", 2_000, lambda: _judge_steps(
        2_000, {"name": "b", "where": "n = 0 and amount <> element_at(a.amount, 1)", "at_least": 3}), 5_500),
    Shape("the same, reset_on_alert", 2_000, lambda: _judge_sequence(
        2_000, "n = 0 and amount < element_at(a.amount, 1) - 1000000", span=2 * HOUR, reset_on_alert=True), 150),
    Shape("the same, 5 % late", 2_000, lambda: _judge_steps(
        2_000, {"name": "b", "where": "n = 0 and amount < element_at(a.amount, 1) - 1000000"}, late_by=5 * MINUTE), 3_800),
    Shape("sequence, one key, each second event ends a match of its own", 2_000, lambda: _judge_pairs(
        2_000, "id = element_at(a.id, 1) + 1"), 2_300),
    Shape("the same, an array has its value", 2_000, lambda: _judge_pairs(
        2_000, "array_contains(a.id, id - 1)"), 2_300),
    Shape("the same, reset_on_alert", 2_000, lambda: _judge_pairs(
        2_000, "array_contains(a.id, id - 1)", reset_on_alert=True), 4_000),
    Shape("the same, a condition of another kind", 1_000, lambda: _judge_pairs(
        1_000, "(id = element_at(a.id, 1) + 1 or n > 1)")),
    Shape("the same, own conditions with a limit", 2_000, lambda: _judge_steps(
        2_000, {"name": "b", "where": "n = 0", "at_most": 3}), 600),
    Shape("the same, take: once", 2_000, lambda: _judge_pairs(
        2_000, "id = element_at(a.id, 1) + 1", take="once"), 2_300),
    Shape("sequence, one key, own conditions, take: once", 4_000, lambda: _judge_pairs(
        4_000, "id > 0", take="once"), 700),
    Shape("sequence, one key, own conditions, every event alerts", 4_000, lambda: _judge_sequence(
        4_000, "n = 0", "{a.count} and {b.count}"), 700),
    Shape("absence, one key, every event waits for one", 4_000, lambda: _judge_sequence(
        4_000, "n = 0", "{a.count} and {b.count}", absent="n = 1"), 1_800),
    Shape("the same, a condition on earlier steps", 2_000, lambda: _judge_sequence(
        2_000, "n = 0 and amount > element_at(a.amount, 1) - 100000", "{a.count} and {b.count}", absent="n = 1"), 3_000),
    Shape("sequence, many keys, most events cannot complete it", 100_000, lambda: _judge_logins(100_000), 20),
    Shape("the same, the last step has a key of its own", 100_000, lambda: _judge_logins(100_000, key=["id"]), 45),
    Shape("1,000 event rules on texts", 10_000, lambda: _judge_texts(10_000, 1_000), 220),
    Shape("500 events over 50,000 keys, session", 500, lambda: _judge_after(
        _rule({"session": "1 hour"}, "m < 0"), _KNOWN, 500, MINUTE), 900),
    Shape("500 events over 50,000 keys, sequence", 500, lambda: _judge_after(
        _sequence([{"name": "a", "where": "n = 0"}, {"name": "b", "where": "n = 1"}]), _KNOWN, 500, MINUTE), 150),
    Shape("suppress, 50,000 alerted keys, batch of 100", 100, lambda: _judge_after(
        _rule("1 hour", "m > 0", suppress="1 day"), _KNOWN, 100, MINUTE), 1_500),
    Shape("reset_on_alert, 50,000 alerted keys, batch of 100", 100, lambda: _judge_after(
        _rule("1 hour", "m > 0 and n = 1", reset_on_alert=True), _KNOWN, 100, MINUTE, (0, 1, 0)), 400),
    Shape("avg", 50_000, lambda: _judge_aggregate("avg(amount)")),
    Shape("stddev_samp", 50_000, lambda: _judge_aggregate("stddev_samp(amount)"), 5, against="avg"),
    Shape("median", 50_000, lambda: _judge_aggregate("median(amount)"), 70, against="avg"),
    Shape("median, one key, 25,000 rows in a window", 50_000, lambda: _judge_once(
        [{**_rule("1 day", "m < 0"), "measures": {"m": "median(amount)"}}], _spread_times(50_000, DAY), np.zeros(50_000)), 100,
        against="avg"),
    Shape("median, Zipf, 5 % late", 20_000, lambda: _judge_on(
        20_000, [{**_rule("1 hour", "m < 0"), "measures": {"m": "median(amount)"}}], late_by=HOUR // 2), 300, against="avg"),
    Shape("state of one aggregate, 50,000 rows", 50_000, lambda: _measure_bytes(_SIX[:1]), unit="bytes a row"),
    Shape("state of six aggregates, 50,000 rows", 50_000, lambda: _measure_bytes(_SIX),
          1.1, against="state of one aggregate, 50,000 rows", unit="bytes a row"),
    Shape("every event alerts with 12 measures", 4_000, lambda: _judge_once(
        [{**_rule("1 hour", "m0 > 0"), "measures": {f"m{at}": f"sum(amount + {at})" for at in range(12)}}],
        _spread_times(4_000, HOUR), np.arange(4_000) % 100), 300),
)  # fmt: skip
