"""The speed of a backtest: all events of a prepared table, judged by rules that were in force from the beginning.

What-if, too: the processor time of many variants of a rule in one pass beside that of one.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

from dev.bench.drain import Drain
from dev.bench.lakehouse import commits_for, linked, stream_of
from dev.bench.processes import MemorySampler, ProcessorClock
from dev.bench.results import record
from dev.bench.rules import peers_rules, rules_for
from dev.bench.sets import DATA, EventSet
from dev.bench.watching import say


def run(drain: Drain) -> Path:
    """Measures a backtest of the drain's events and rules in this process. Returns the file of the result."""
    from lookback.spark.platform.session import get_spark  # noqa: PLC0415
    from lookback.spark.replay.backtest import Candidate, backtest  # noqa: PLC0415 - Spark is started after the sets are made
    from lookback.spark.tables.lakehouse import Tables  # noqa: PLC0415

    name = drain.name or f"backtest-{drain.events.stem}-{drain.rules}"
    stream, commits = stream_of(drain.events.name), commits_for(drain.events, drain.repeats)
    documents = rules_for(drain.rules, drain.events).documents
    root = linked(drain.events, commits, DATA / "runs" / name)
    tables = Tables.local(get_spark("lookback bench", settings=drain.settings.spark), root)
    tables.create(stream)
    clock = time.monotonic()
    with (
        MemorySampler() as memory,
        backtest(tables, stream, [Candidate(document) for document in documents], progress=say) as result,
    ):
        seconds = time.monotonic() - clock
    figures = {
        "events": result.events,
        "seconds": round(seconds, 3),
        "events_per_s": round(result.events / seconds, 1),
        "alerts": sum(each.rows for each in result.figures),
        "failed": sum(each.failures for each in result.figures),
        "memory": memory.figures(),
    }
    settings = {
        "set": drain.events.stem, "rules": drain.rules, "rule_count": len(documents), "commits": commits,
        "spark": dict(drain.settings.spark),
    }  # fmt: skip
    tables.spark.stop()
    shutil.rmtree(root)
    say(f"{name}: {figures['events_per_s']:,.0f} events/s, {figures['alerts']:,} rows of alerts, {seconds:.0f} s")
    return record(name, "backtest", settings, figures)


VARIED = ("limit", "window")
# Each is measured so often, one after the other, since other work on the machine comes and goes.
_ROUNDS = 2


def run_variants(drain: Drain, varied: str, variants: int) -> Path:
    """Measures a what-if of the drain's events in this process, beside a backtest of one of its variants."""
    from lookback.spark.platform.session import get_spark  # noqa: PLC0415
    from lookback.spark.replay.backtest import Candidate, backtest  # noqa: PLC0415
    from lookback.spark.tables.lakehouse import Tables  # noqa: PLC0415

    name = drain.name or f"what-if-{drain.events.stem}-{varied}"
    stream, commits = stream_of(drain.events.name), commits_for(drain.events, drain.repeats)
    document, values = _vary(drain.events, varied, variants)
    root = linked(drain.events, commits, DATA / "runs" / name)
    tables = Tables.local(get_spark("lookback bench", settings=drain.settings.spark), root)
    tables.create(stream)
    seconds: dict[int, list[float]] = {1: [], variants: []}
    figures: dict[str, Any] = {}
    # The first, which does not count, plans, compiles and starts workers.
    with ProcessorClock() as clock:
        for number, count in enumerate([1, *(list(seconds) * _ROUNDS)]):
            before = clock.read()
            vary = {varied: values[:count]} if count > 1 else {}
            with backtest(tables, stream, [Candidate(document)], vary=vary, rows=False) as result:
                taken = clock.read() - before
                if number:
                    seconds[count].append(taken)
                say(f"{name}: {count} variants, {result.events:,} events, {taken:.1f} s of the processor")
                figures = {
                    "events": result.events,
                    "most_alerts": max(each.alerts for each in result.figures),
                    "failed": sum(each.failures for each in result.figures),
                }
    one, many = (sum(taken) / len(taken) for taken in seconds.values())
    figures |= {"one_processor_s": round(one, 2), "many_processor_s": round(many, 2), "ratio": round(many / one, 3)}
    settings = {
        "set": drain.events.stem, "varied": varied, "variants": variants, "commits": commits, "when": document["when"],
        "spark": dict(drain.settings.spark),
    }  # fmt: skip
    tables.spark.stop()
    shutil.rmtree(root)
    say(f"{name}: {variants} variants take {figures['ratio']} times the processor time of one")
    return record(name, "what-if", settings, figures)


def _vary(events: EventSet, varied: str, variants: int) -> tuple[dict[str, Any], list[object]]:
    """Returns the rule about spending with a parameter, and its values: none alerts more often than the first."""
    spend = peers_rules(events)["rules"][0]
    limit, hours = spend["at_least"] // 100, spend["window_us"] // 3_600_000_000
    document = {
        "rule_id": "spend", "stream": "transactions", "group_by": ["customer_id"], "measures": {"value": "sum(amount)"},
        "parameters": {"limit": limit, "window": f"{hours} hours"}, "window": ":window", "when": "value >= :limit",
    }  # fmt: skip
    if varied == "limit":
        return document, [limit + at for at in range(variants)]
    minutes = hours * 60
    return document, [f"{minutes - at * minutes // variants} minutes" for at in range(variants)]
