"""Drains loads that must stay within bounds: 1,000 rules, an alert for every event, a key with a million events, a burst.

Each runs in its own process: `python -m dev.soak.load NAME`. It prints a line of JSON: the peaks of memory in MiB (of the
JVM and of all Python workers together), batches, the largest of them, seconds, alerts. The exit code is 1 if memory
passed the bound or the number of alerts is wrong.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from dev.bench.processes import MemorySampler
from dev.soak.scenario import STREAM, STREAMS, make_rule

if TYPE_CHECKING:
    from lookback.spark.tables.lakehouse import Tables

# The memory of a machine of 8 GB that also runs other things.
_MAX_MIB = 6_500
_COMMIT_ROWS = 100_000
_CALM_COMMITS = 20
_START = 1_704_067_200_000_000
_SECOND = 1_000_000


@dataclass(frozen=True)
class Load:
    """The events and rules of a load.

    events: their number. customers: the number of keys. step: microseconds between two events. rules: documents. alerts:
    the right number. calm: the events of each of the 20 commits before a burst; 0 without a burst.
    """

    events: int
    customers: int
    step: int
    rules: list[dict[str, Any]]
    alerts: int
    calm: int = 0

    def make_commits(self) -> Iterator[pa.Table]:
        """Makes the rows of the events table, commit by commit."""
        starts = [*range(0, _CALM_COMMITS * self.calm, self.calm or 1)]
        starts += range(_CALM_COMMITS * self.calm, self.events, _COMMIT_ROWS)
        for first, end in pairwise([*starts, self.events]):
            number = np.arange(first, end, dtype=np.int64)
            times = pa.array(_START + number * self.step).cast(pa.timestamp("us", tz="UTC"))
            yield pa.table(
                {
                    "id": pa.array(number).cast(pa.string()),
                    "at": times,
                    "customer": pa.array((number * 2_654_435_761 % self.customers).astype(np.int32)),
                    "shop": pa.array(["a"] * len(number)),
                    "amount": pa.array(number % 1_000).cast(pa.decimal128(21, 2)).cast(pa.decimal128(18, 2)),
                    "ingested_at": pa.array([dt.datetime.now(dt.timezone.utc)] * len(number)),
                }
            )


def make_hour_rule(rule_id: str, **more: Any) -> dict[str, Any]:
    """Makes a rule over an hour of a customer's events. more: further keys of its document."""
    return make_rule(rule_id, window="1 hour", measures={"n": "count(*)", "total": "sum(amount)"}, **more)


LOADS = {
    # Each rule has its own state. The 2,000 keys have 100 events each.
    "rules": Load(
        200_000, 2_000, _SECOND // 10, [make_hour_rule(f"r{at}", where=f"amount >= {at}", when="n > 200") for at in range(1_000)], 0
    ),
    "storm": Load(1_000_000, 5_000, _SECOND // 10, [make_hour_rule("every", when="n > 0")], 1_000_000),
    # In an hour the key has some 1,080,100 events; once it has exactly 1,080,000.
    "key": Load(3_000_000, 1, _SECOND // 300, [make_hour_rule("hot", when="n = 1080000")], 1),
    # Commits of 2,000 events, then of fifty times as many.
    "burst": Load(2_040_000, 5_000, _SECOND // 1_000, [make_hour_rule("every", when="n > 0 and amount = 999")], 2_040, calm=2_000),
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one load. Returns 1 if it took more memory than a machine of 8 GB has, or raised a wrong number of alerts."""
    parser = argparse.ArgumentParser(prog="python -m dev.soak.load", description=__doc__)
    parser.add_argument("name", choices=LOADS)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="lookback-load-") as folder:
        figures = _run(LOADS[options.name], Path(folder))
    sys.stdout.write(json.dumps({"load": options.name, **figures}) + "\n")
    is_too_large = figures["jvm_peak_mib"] + figures["workers_peak_mib"] > _MAX_MIB
    return 1 if is_too_large or figures["alerts"] != LOADS[options.name].alerts else 0


def _run(load: Load, folder: Path) -> dict[str, Any]:
    from lookback.spark.platform.session import get_spark  # noqa: PLC0415
    from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder  # noqa: PLC0415 - Spark is imported where it is needed
    from lookback.spark.tables.lakehouse import Tables  # noqa: PLC0415

    tables = Tables.local(get_spark("lookback load", settings={"spark.driver.memory": "3g"}), folder / "lakehouse")
    tables.create(STREAM)
    _publish(tables, load.rules)
    for rows in load.make_commits():
        tables.append(tables.spark.createDataFrame(rows).coalesce(1), STREAM.name)
    evaluation = Evaluation(tables, STREAM, STREAMS, checkpoint_folder(tables, STREAM), once=True)
    started = time.monotonic()
    with MemorySampler() as memory:
        evaluation.run()
    seconds = time.monotonic() - started
    reports = list(evaluation.reports)
    tables.spark.stop()
    return {
        "events": sum(report.events for report in reports),
        "seconds": round(seconds, 1),
        "batches": len(reports),
        "largest_batch": max(report.events for report in reports),
        "alerts": sum(sum(report.alerts.values()) for report in reports),
        "state_rows": reports[-1].state_rows,
        **memory.figures(),
    }


def _publish(tables: Tables, documents: list[dict[str, Any]]) -> None:
    """Publishes all rules in one commit."""
    from lookback.spark.tables.schemas import RULES  # noqa: PLC0415
    from lookback.testing.rule_tests import check_rule  # noqa: PLC0415

    now = dt.datetime.now(dt.timezone.utc)
    for document in documents:
        check_rule(document, STREAMS)
    rows = [(each["rule_id"], 1, "active", json.dumps(each), "load", "", now, None, None) for each in documents]
    tables.append(tables.spark.createDataFrame(rows, RULES).coalesce(1), "rules")


if __name__ == "__main__":
    sys.exit(main())
