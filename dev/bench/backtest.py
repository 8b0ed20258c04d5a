"""The speed of a backtest: all events of a prepared table, judged by rules that were in force from the beginning."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from dev.bench.drain import Drain
from dev.bench.lakehouse import commits_for, linked, stream_of
from dev.bench.processes import MemorySampler
from dev.bench.results import record
from dev.bench.rules import rules_for
from dev.bench.sets import DATA
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
