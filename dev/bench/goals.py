"""Compares results with the goals for a machine of two cores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Results = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Goal:
    """A bound on a figure of the results.

    at_least False: the figure must not be above the bound. needs: names of the results that it comes from.
    """

    what: str
    unit: str
    bound: float
    needs: tuple[str, ...]
    figure: Callable[[Results], float | None]
    at_least: bool = True

    def value(self, results: Results) -> float | None:
        """Returns the figure; None if a result that it needs is missing."""
        if any(name not in results for name in self.needs):
            return None
        return self.figure(results)

    def reached(self, value: float) -> bool:
        """Returns whether a value satisfies the goal."""
        return value >= self.bound if self.at_least else value <= self.bound


def figure(name: str, *path: str) -> Callable[[Results], float | None]:
    """Returns a figure of one result, which is None if it was not measured."""

    def read(results: Results) -> float | None:
        value: Any = results[name]["figures"]
        for key in path:
            value = None if value is None else value.get(key)
        return None if value is None else float(value)

    return read


def ratio(name: str, other: str, key: str = "steady_events_per_s") -> Callable[[Results], float | None]:
    """Returns a figure: one of a measurement divided by the same of another; by default the steady rates of drains."""

    def read(results: Results) -> float | None:
        return float(results[name]["figures"][key] / results[other]["figures"][key])

    return read


def steady(result: Mapping[str, Any]) -> float:
    """Events per second of a drain, or of a peer."""
    return float(result["figures"]["steady_events_per_s"])


def comparable(result: Mapping[str, Any]) -> bool:
    """Returns whether a peer's figure can be compared with ours: it ran, and its alerts equal ours."""
    return bool(result["figures"].get("comparison", {}).get("equal"))


def times_best(drain: str, peers: str, name: str, *, durable: bool = True) -> Callable[[Results], float | None]:
    """Returns a figure: a drain's steady rate divided by that of the fastest comparable peer on the set `name`."""

    def read(results: Results) -> float | None:
        rates = [
            steady(result)
            for result in results.values()
            if result["part"] == "peer"
            and (result["settings"]["peer"], result["settings"]["durable"]) == (peers, durable)
            and base_name(result["settings"]["set"]) == name
            and comparable(result)
        ]
        return steady(results[drain]) / max(rates) if rates else None

    return read


def base_name(name: str) -> str:
    """A name without the number of rows that a quick run adds: drain-zipf-300000-2 -> drain-zipf-2."""
    return "-".join(part for part in name.split("-") if not (part.isdigit() and int(part) >= 1_000 * 50))


def _memory_growth(results: Results) -> float | None:
    """Returns the workers' peak memory in the last quarter of a long backlog, divided by that in the second quarter."""
    figures = results[_TWO["handbook"]]["figures"]
    series = figures["memory"].get("workers_over_time_mib", [])
    quarter = len(series) // 4
    if not quarter or figures["events"] < _BACKLOG_EVENTS:
        return None
    return float(max(series[-quarter:]) / max(series[quarter : 2 * quarter]))


_BACKLOG_EVENTS = 20_000_000
_TWO = {"handbook": "drain-handbook-2", "zipf": "drain-zipf-2", "uniform": "drain-uniform-2"}


def _find_backtest_share(results: Results) -> float:
    """Returns the rate of a backtest of 100 rules over that of a drain by them, both from start to end."""
    tried, drained = (results[name]["figures"] for name in ("backtest-handbook-100", "drain-handbook-100"))
    return float(tried["events_per_s"] / drained["cold_events_per_s"])


_MANY = ("drain-zipf-100", "drain-zipf-200", "drain-zipf-1000", "drain-logins-sequence")


def _find_most_memory(results: Results) -> float:
    """Returns the most memory that the workers of these drains held together, pages that they share counted once."""
    return max(float(results[name]["figures"]["memory"]["workers_pss_peak_mib"]) for name in _MANY) * 2**20 / 1e9


GOALS = (
    Goal("steady drain, Handbook, 2 rules", "events/s", 300_000, (_TWO["handbook"],),
         figure(_TWO["handbook"], "steady_events_per_s")),
    Goal("the same over the best Flink with checkpoints and a file sink", "times", 0.8, (_TWO["handbook"],),
         times_best(_TWO["handbook"], "flink", "handbook")),
    Goal("steady drain, Zipf, 2 rules", "events/s", 200_000, (_TWO["zipf"],), figure(_TWO["zipf"], "steady_events_per_s")),
    Goal("the same over the best Flink with checkpoints and a file sink", "times", 0.8, (_TWO["zipf"],),
         times_best(_TWO["zipf"], "flink", "zipf")),
    Goal("100 rules, 5 grouping sets, 20 features, Handbook", "events/s", 250_000, ("drain-handbook-100",),
         figure("drain-handbook-100", "steady_events_per_s")),
    Goal("100 rules, 5 grouping sets, 20 features, Zipf", "events/s", 150_000, ("drain-zipf-100",),
         figure("drain-zipf-100", "steady_events_per_s")),
    Goal("200 rules over the same features, Zipf", "events/s", 100_000, ("drain-zipf-200",),
         figure("drain-zipf-200", "steady_events_per_s")),
    Goal("1,000 rules over 100 features, Zipf", "events/s", 40_000, ("drain-zipf-1000",),
         figure("drain-zipf-1000", "steady_events_per_s")),
    Goal("a sequence of logins", "events/s", 250_000, ("drain-logins-sequence",),
         figure("drain-logins-sequence", "steady_events_per_s")),
    Goal("3,000 rules on texts", "events/s", 20_000, ("drain-processes-3000-on-texts",),
         figure("drain-processes-3000-on-texts", "steady_events_per_s")),
    Goal("the same, the first batch, which loads the rules", "s", 30, ("drain-processes-3000-on-texts",),
         figure("drain-processes-3000-on-texts", "first_batch_s"), at_least=False),
    Goal("memory of the Python workers in the largest of these four", "GB", 3.0, _MANY, _find_most_memory, at_least=False),
    Goal("backtest, Handbook, 2 rules", "events/s", 500_000, ("backtest-handbook-2",),
         figure("backtest-handbook-2", "events_per_s")),
    Goal("backtest over drain, start to end, Handbook, 100 rules", "times", 1.0,
         ("backtest-handbook-100", "drain-handbook-100"), _find_backtest_share),
    Goal("what-if, 100 limits over one, processor time", "times", 1.3, ("what-if-handbook-limit",),
         figure("what-if-handbook-limit", "ratio"), at_least=False),
    Goal("what-if, 100 windows of a sum over one, processor time", "times", 3.0, ("what-if-handbook-window",),
         figure("what-if-handbook-window", "ratio"), at_least=False),
    Goal("latency at 1,000 events/s, p50", "ms", 500, ("latency-1000",), figure("latency-1000", "p50_ms"), at_least=False),
    Goal("latency at 1,000 events/s, p99", "ms", 900, ("latency-1000",), figure("latency-1000", "p99_ms"), at_least=False),
    Goal("the same with 102 rules over that with 2, p50", "times", 1.2, ("latency-1000-many", "latency-1000"),
         ratio("latency-1000-many", "latency-1000", "p50_ms"), at_least=False),
    Goal("rule change to first verdict, known grouping key, p50", "s", 0.8, ("rule-changes",),
         figure("rule-changes", "known_key_p50_s"), at_least=False),
    Goal("rule change to first verdict, new grouping key, p50", "s", 2.5, ("rule-changes",),
         figure("rule-changes", "new_key_p50_s"), at_least=False),
    Goal("rule change to first verdict, new grouping key, without history, p50", "s", 2.5, ("rule-changes",),
         figure("rule-changes", "cold_key_p50_s"), at_least=False),
    Goal("a rule with a window of 30 days knows the past, Handbook", "s", 20, ("warm-handbook",),
         figure("warm-handbook", "seconds"), at_least=False),
    Goal("the same, 20 million events", "s", 60, ("warm-handbook-large",),
         figure("warm-handbook-large", "seconds"), at_least=False),
    Goal("a sequence within 30 days knows the past, 20 million events", "s", 300, ("warm-handbook-sequence",),
         figure("warm-handbook-sequence", "seconds"), at_least=False),
    Goal("latency until a minute after a rule knows the past, over that before, Handbook, p95", "times", 2, ("warm-handbook",),
         figure("warm-handbook", "p95_from_then_on_ratio"), at_least=False),
    Goal("the same, 20 million events", "times", 2, ("warm-handbook-large",),
         figure("warm-handbook-large", "p95_from_then_on_ratio"), at_least=False),
    Goal("the same, a sequence, 20 million events", "times", 2, ("warm-handbook-sequence",),
         figure("warm-handbook-sequence", "p95_from_then_on_ratio"), at_least=False),
    Goal("memory while a rule learns the past above that before, Handbook", "GB", 2, ("warm-handbook",),
         figure("warm-handbook", "memory_more_gb"), at_least=False),
    Goal("the same, 20 million events", "GB", 2, ("warm-handbook-large",),
         figure("warm-handbook-large", "memory_more_gb"), at_least=False),
    Goal("a rule knows the past, 20 million events that are all in its window, Zipf", "s", 180, ("warm-zipf-large",),
         figure("warm-zipf-large", "seconds"), at_least=False),
    Goal("latency as above, the same, p95", "times", 2, ("warm-zipf-large",),
         figure("warm-zipf-large", "p95_from_then_on_ratio"), at_least=False),
    Goal("memory as above, the same", "GB", 2, ("warm-zipf-large",),
         figure("warm-zipf-large", "memory_more_gb"), at_least=False),
    Goal("time of a drain that asks a list of a million values over one without, Zipf, 2 rules", "times", 1.1,
         ("drain-zipf-2-asking", "drain-zipf-2-unlisted"), ratio("drain-zipf-2-asking", "drain-zipf-2-unlisted", "seconds"),
         at_least=False),
    Goal("time of a drain that leaves half of the events to a list over one that knows which half, Zipf, 2 rules", "times", 1.1,
         ("drain-zipf-2-listed", "drain-zipf-2-condition"), ratio("drain-zipf-2-listed", "drain-zipf-2-condition", "seconds"),
         at_least=False),
    Goal("change of a list to its row in rule_log, p50", "s", 0.8, ("rule-changes",), figure("rule-changes", "list_p50_s"),
         at_least=False),
    Goal("retained state, Handbook, 30 days", "bytes per event and feature", 40, ("drain-handbook-window-30d",),
         figure("drain-handbook-window-30d", "state", "bytes_per_retained_row"), at_least=False),
    Goal("retained state, Zipf, 2 rules", "bytes per event and feature", 40, (_TWO["zipf"],),
         figure(_TWO["zipf"], "state", "bytes_per_retained_row"), at_least=False),
    Goal("window 30 days over 1 hour, the same events retained", "times", 0.8,
         ("drain-handbook-held-30d", "drain-handbook-held-1h"), ratio("drain-handbook-held-30d", "drain-handbook-held-1h")),
    Goal("Zipf over uniform, 2 rules", "times", 0.7, (_TWO["zipf"], _TWO["uniform"]), ratio(_TWO["zipf"], _TWO["uniform"])),
    Goal("memory of the Python workers, last quarter of a backlog of 20 million events over its second", "times", 1.2,
         (_TWO["handbook"],), _memory_growth, at_least=False),
)  # fmt: skip


@dataclass(frozen=True)
class Change:
    """A figure now and before. worse: by which share; band: the share within which it is noise."""

    name: str
    what: str
    before: float
    now: float
    worse: float
    band: float

    @property
    def verdict(self) -> str:
        """regressed, improved, or noise."""
        return "regressed" if self.worse > self.band else "improved" if self.worse < -self.band else "noise"


# Part -> figure, whether more is better.
_COMPARED = {
    "drain": (("steady_events_per_s", True),),
    "latency": (("p50_ms", False), ("p99_ms", False)),
    "changes": (
        ("known_key_p50_s", False),
        ("new_key_p50_s", False),
        ("cold_key_p50_s", False),
        ("list_p50_s", False),
    ),
    "warm": (("seconds", False), ("p95_ratio", False)),
}
# Two runs of one thing differ by as much, whatever their batches say.
_MIN_BAND = 0.05


def changes(before: Results, now: Results) -> list[Change]:
    """Every figure that both have, of measurements that are not the same one."""
    found = []
    for name in sorted(set(before) & set(now)):
        old, new = before[name], now[name]
        if old["measured_at"] == new["measured_at"] or _measured(old) != _measured(new):
            continue
        for what, more_is_better in _COMPARED.get(new["part"], ()):
            values = [_number(each["figures"].get(what)) for each in (old, new)]
            if None in values or not values[0]:
                continue
            change = values[1] / values[0] - 1  # type: ignore[operator]
            worse = -change if more_is_better else change
            found.append(Change(name, what, values[0], values[1], worse, _band(old, new)))  # type: ignore[arg-type]
    return found


def _measured(result: Mapping[str, Any]) -> tuple[object, ...]:
    """Returns what was measured and on which machine, without the engine's settings, whose effect is to be compared."""
    machine, settings = result["machine"], result["settings"]
    what = ("set", "rules", "rule_count", "workers", "rate", "seconds", "known", "new", "repeats")
    return (machine["cores"], machine["processor"], *(settings.get(key) for key in what))


def _band(*results: Mapping[str, Any]) -> float:
    """Returns the relative spread of the middle half of the batches, alerts or changes of these runs."""
    return max([_MIN_BAND, *(_spread(result["figures"]) for result in results)])


def _spread(figures: Mapping[str, Any]) -> float:
    if figures.get("steady_spread") is not None:
        return float(figures["steady_spread"])
    for values in (figures.get("percentiles_ms"), figures.get("known_key_s")):
        if values:
            ordered = sorted(values)
            quarter = len(ordered) // 4
            return float(ordered[-1 - quarter] - ordered[quarter]) / max(1e-9, float(ordered[len(ordered) // 2]))
    return 0.0


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def named(results: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Results by their names without the rows of a quick run."""
    return {base_name(result["name"]): result for result in results}
