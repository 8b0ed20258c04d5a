"""Warm start: how soon a rule that reaches back 30 days knows the past of a large table, and what that costs the stream.

The table is there and judged; events go on where it ends, in time too. Then a rule is published: a window on a new grouping
key, or a sequence.
"""

from __future__ import annotations

import multiprocessing
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dev.bench.lakehouse import STREAMS, TRANSACTIONS, commits_for, linked, push
from dev.bench.latency import (
    ALERTS_PER_SECOND,
    CHECKPOINT,
    Live,
    find_amount,
    latencies,
    read_commit_times,
    read_logged,
    running,
    settings_of,
    verdicts_of,
)
from dev.bench.processes import MemorySampler
from dev.bench.results import record
from dev.bench.rules import Rules, lookback
from dev.bench.sets import COMMIT_ROWS, DATA, DAY, MINUTE, REPOSITORY, EventSet
from dev.bench.watching import say
from lookback.config import Settings

_RULE = "warmed"
_TIMEOUT = 900.0


def run(live: Live, events: EventSet, repeats: float, kind: str) -> Path:
    """Measures from the commit of the rule to the commit of its row `activated`. Returns the file of the result.

    live.seconds: so long is measured before the rule is published, and again after it is in force. repeats: of the set in time.
    kind: window or sequence, that of the rule.
    """
    from lookback.spark.rules import RulesTable  # noqa: PLC0415 - Spark is started after the sets are made

    name, commits = live.name or f"warm-{events.stem}", commits_for(events, repeats)
    often = f"amount >= {find_amount(events, ALERTS_PER_SECOND / 2 / live.rate)}"
    spend = lookback("spend", ("customer_id",), "sum(amount)", DAY, f"value >= 0 and {often}")
    burst = lookback("burst", ("terminal_id",), "count(*)", 10 * MINUTE, f"value >= 0 and {often}")
    warmed = _make_rule(kind, often, f"amount < {find_amount(events, 0.9)}")
    rules = Rules((spend, burst))
    _judge_apart(events, commits, rules, DATA / "runs" / name)
    with running(live, events, rules, name, commits) as run_now:
        time.sleep(live.warm_up)
        with MemorySampler() as memory:
            time.sleep(live.seconds)
        with MemorySampler() as memory_meanwhile:
            # To publish a rule takes a moment, which is neither as before nor a part of the history.
            pushed = time.time()
            version = RulesTable(run_now.tables, STREAMS).push(warmed, author="bench")
            # Read at once: pieces of history are named by rows of this table too.
            published = max(read_commit_times(run_now.root / "rules").values())
            wanted = (_RULE, version, "activated")
            report = run_now.evaluation.wait_until(
                lambda each: any((row["rule_id"], row["version"], row["action"]) == wanted for row in each.log),
                _TIMEOUT,
            )
            time.sleep(live.seconds)
        run_now.finish()
    root = run_now.root
    activated = read_logged(root / "rule_log")[wanted]
    committed = read_commit_times(root / TRANSACTIONS.name)
    verdicts = [each for each in verdicts_of(root / "alerts") if each.rule_id != _RULE]
    spans = {"before": (pushed - live.seconds, pushed), "meanwhile": (published, activated),
             "after": (activated, activated + live.seconds), "from_then_on": (published, activated + live.seconds)}  # fmt: skip
    figures: dict[str, Any] = {"events": commits * COMMIT_ROWS, "seconds": round(activated - published, 3)}
    figures["message"] = next(row["message"] for row in report.log if row["rule_id"] == _RULE)
    for what, (first, last) in spans.items():
        figures[what] = latencies([each for each in verdicts if first <= committed[each.arrival] < last], committed)
    for what, ratio in (("meanwhile", "p95_ratio"), ("from_then_on", "p95_from_then_on_ratio")):
        figures[ratio] = round(figures[what]["p95_ms"] / figures["before"]["p95_ms"], 3)
    figures |= _compare_memory(memory.figures(), memory_meanwhile.figures())
    shutil.rmtree(root)
    file = record(name, "warm", {"set": events.stem, "rule": kind, "repeats": repeats, **settings_of(live)}, figures)
    say(
        f"{name}: in force after {figures['seconds']:.1f} s, {figures['message']}; p95 until {live.seconds:.0f} s after that "
        f"{figures['p95_from_then_on_ratio']} times that of before, {figures['p95_ratio']} times meanwhile, "
        f"{figures.get('memory_more_gb', 0):.2f} GB more, {figures.get('anonymous_more_gb', 0):.2f} of it not in files"
    )
    return file


def _make_rule(kind: str, often: str, small: str) -> dict[str, Any]:
    """Makes the rule that is to know the past. often: a condition that bounds how often it alerts; small: one in ten events."""
    if kind == "window":
        rule = lookback(_RULE, ("customer_id", "terminal_id"), "sum(amount)", 30 * DAY, f"number >= 1 and {often}")
        rule["measures"]["number"] = "count(*)"
        return rule
    steps = [
        {"name": "small", "where": small, "at_least": 3},
        {"name": "large", "where": f"{often} and not array_contains(small.terminal_id, terminal_id)"},
    ]
    return {
        "rule_id": _RULE, "stream": TRANSACTIONS.name, "group_by": ["customer_id"],
        "sequence": {"within": "30 days", "steps": steps},
    }  # fmt: skip


def _judge_apart(events: EventSet, commits: int, rules: Rules, root: Path) -> None:
    """Judges the table in a process of its own, so that the measured one holds no memory that this took."""
    process = multiprocessing.get_context("spawn").Process(target=_judge, args=(events, commits, rules, root))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"the table of {events.stem} could not be judged")


def _judge(events: EventSet, commits: int, rules: Rules, root: Path) -> None:
    from lookback.spark.platform.session import get_spark  # noqa: PLC0415
    from lookback.spark.stream.pipeline import Evaluation  # noqa: PLC0415
    from lookback.spark.tables.lakehouse import Tables  # noqa: PLC0415

    settings = Settings.local(conf=REPOSITORY / "conf", profile="throughput")
    linked(events, commits, root)
    tables = Tables.local(get_spark("lookback bench", settings=settings.spark), root)
    tables.create(TRANSACTIONS)
    push(tables, rules)
    Evaluation(tables, TRANSACTIONS, STREAMS, root / CHECKPOINT, once=True, admission=settings.admission).run()
    tables.spark.stop()


def _compare_memory(before: Mapping[str, Any], meanwhile: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the peaks of memory before and from the push on, and in GB those of all processes together, and their rise.

    A page that several processes share counts once; anonymous memory is without what they map of files.
    """
    names = ("workers_peak_mib", "jvm_peak_mib", "histories_peak_mib", "pss_peak_mib", "anonymous_peak_mib")
    if any(name not in each for name in names for each in (before, meanwhile)):
        return {}
    spans = {"before": before, "meanwhile": meanwhile}
    together = {span: each["pss_peak_mib"] * 2**20 / 1e9 for span, each in spans.items()}
    anonymous_more = (meanwhile["anonymous_peak_mib"] - before["anonymous_peak_mib"]) * 2**20 / 1e9
    return {
        **{f"memory_{span}": {name: each[name] for name in names} for span, each in spans.items()},
        **{f"memory_{span}_gb": round(each, 3) for span, each in together.items()},
        "memory_more_gb": round(together["meanwhile"] - together["before"], 3),
        "anonymous_more_gb": round(anonymous_more, 3),
    }
