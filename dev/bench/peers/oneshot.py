"""All events at once, as the limit: what the two rules cost where nothing streams, is kept or can be resumed.

Exact all the same. In the order of (key, time, arrival) the window of an event ends at its own row, so that its value is
a difference of running sums. That counts those few events of the window that arrived after it: they are found and taken
off again, pair by pair. `numpy` finds where a window begins by binary search, `polars` aggregates by its rolling windows.
The rules run in threads of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyarrow import csv

from dev.bench.sets import RECORD

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]

_PAIRS_AT_ONCE = 4_000_000


@dataclass(frozen=True)
class Rows:
    """The events in the order of (key, time, arrival).

    keys: numbered from 0. times: in microseconds since the first event. weights: what each adds to a value. arrival:
    places in the file. order: places in the columns by time.
    """

    keys: Integers
    times: Integers
    weights: Integers
    arrival: Integers
    order: Integers


def _by_time(path: Path, count: int) -> dict[str, Integers]:
    """Reads the columns of the file in the order of (time, arrival), each in one piece, and `arrival`: the place in the file."""
    events = np.fromfile(path, RECORD, count)
    arrival = np.argsort(events["event_time"], kind="stable")
    events = events[arrival]
    return {"arrival": arrival, **{name: np.ascontiguousarray(events[name]) for name in RECORD.names or ()}}


def _rows(columns: dict[str, Integers], rule: dict[str, Any]) -> Rows:
    # One sort of plain numbers is several times faster than one of rows: the key above the place in order of time.
    total = len(columns["arrival"])
    bits = total.bit_length()
    packed = columns[rule["group_by"]].astype(np.int64)
    packed -= packed.min()
    packed <<= bits
    packed |= np.arange(total)
    packed.sort()
    order = packed & ((1 << bits) - 1)
    packed >>= bits
    keys = np.zeros(total, np.int64)
    np.cumsum(packed[1:] != packed[:-1], out=keys[1:])
    amounts = columns["amount_cents"][order]
    weights = np.ones(total, np.int64) if rule["aggregate"] == "count" else amounts.astype(np.int64)
    if "min_amount_cents" in rule:
        weights[amounts < rule["min_amount_cents"]] = 0
    return Rows(
        keys, columns["event_time"][order] - columns["event_time"][0], weights, columns["arrival"][order], order
    )


def _places(rows: Rows, window: int) -> Integers:
    """A number for each row that grows with key and time; rows of a key lie less than `window` apart as their times do.

    Those of different keys lie more than `window` apart.
    """
    span = int(rows.times.max()) + window + 1
    if (int(rows.keys[-1]) + 1) * span >= 2**63:
        raise OverflowError(f"{int(rows.keys[-1]) + 1} keys over {span} microseconds are too many for 64 bits")
    return rows.keys * span + rows.times


def _by_running_sums(rows: Rows, places: Integers, window: int) -> Integers:
    sums = np.zeros(len(places) + 1, np.int64)
    np.cumsum(rows.weights, out=sums[1:])
    values: Integers = sums[1:] - sums[np.searchsorted(places, places - window)]
    return values


def _by_rolling(rows: Rows, places: Integers, window: int) -> Integers:
    import polars as pl  # noqa: PLC0415 - the other variant does without

    frame = pl.DataFrame({"key": rows.keys, "time": rows.times, "weight": rows.weights})
    rolled = frame.rolling("time", period=f"{window}i", group_by="key", closed="both").agg(pl.col("weight").sum())
    values: Integers = rolled["weight"].to_numpy().copy()
    # Its windows take in what follows at the same time, thus what arrived later.
    sums = np.cumsum(rows.weights)
    starts = np.flatnonzero(np.diff(places, prepend=-1))
    ends = np.repeat(np.append(starts[1:], len(places)) - 1, np.diff(np.append(starts, len(places))))
    values -= sums[ends] - sums
    return values


def _take_off_later(values: Integers, rows: Rows, places: Integers, window: int) -> None:
    """Takes from each value what lies in the window but arrived after the event."""
    order = rows.keys * len(places) + rows.arrival
    # The earliest arrival of the key from each row on. Keys ascend, so that rows of others never are the least.
    earliest = np.minimum.accumulate(order[::-1])[::-1]
    # Late: a row of the key that is further on arrived before.
    late = np.flatnonzero(earliest[1:] < order[:-1])
    late = late[rows.weights[late] != 0]
    # What arrived before it and has it in the window lies between it and these ends.
    ends = np.searchsorted(earliest, order[late])
    np.minimum(ends, np.searchsorted(places, places[late] + window, side="right"), out=ends)
    counts = np.maximum(ends - late - 1, 0)
    chunks = np.cumsum(counts) // _PAIRS_AT_ONCE
    for part in np.split(np.arange(len(late)), np.flatnonzero(np.diff(chunks)) + 1):
        count = counts[part]
        later = np.repeat(late[part], count)
        judged = later + 1 + np.arange(len(later)) - np.repeat(np.cumsum(count) - count, count)
        before = rows.arrival[judged] < rows.arrival[later]
        np.subtract.at(values, judged[before], rows.weights[later[before]])


def _alerts(columns: dict[str, Integers], rule: dict[str, Any], variant: str) -> pa.Table:
    rows = _rows(columns, rule)
    places = _places(rows, rule["window_us"])
    base = _by_rolling if variant == "polars" else _by_running_sums
    values = base(rows, places, rule["window_us"])
    _take_off_later(values, rows, places, rule["window_us"])
    found = np.flatnonzero(values >= rule["at_least"])
    return pa.table(
        {
            "rule_id": pa.DictionaryArray.from_arrays(np.zeros(len(found), np.int8), [rule["rule_id"]]).cast("string"),
            "event_id": columns["event_id"][rows.order[found]],
            "value": values[found],
        }
    )


def _judge(options: argparse.Namespace, count: int = -1) -> tuple[int, pa.Table]:
    """Judges events and returns their number and their alerts. count: the number of first events; -1 for all."""
    rules = json.loads(options.rules.read_text())["rules"]
    columns = _by_time(options.input, count)
    with ThreadPoolExecutor(len(rules)) as threads:
        jobs = [threads.submit(_alerts, columns, rule, options.variant) for rule in rules]
        return len(columns["arrival"]), pa.concat_tables([job.result() for job in jobs])


def _write(alerts: pa.Table, path: Path, *, durable: bool) -> None:
    with path.open("wb") as file:
        csv.write_csv(alerts, file, csv.WriteOptions(include_header=False, quoting_style="none"))
        if durable:
            file.flush()
            os.fsync(file.fileno())


def _version(variant: str) -> str:
    try:
        return metadata.version(variant)
    except metadata.PackageNotFoundError:
        sys.exit(f"The one-shot peer needs the package {variant}: run `make bench-peers`.")


def main() -> None:
    """Runs the job that the command line names and prints its figures."""
    parser = argparse.ArgumentParser(prog="python -m dev.bench.peers.oneshot", description=__doc__)
    parser.add_argument("--variant", choices=["numpy", "polars"], default="numpy")
    parser.add_argument("--input", type=Path, required=True)
    parser.add_argument("--rules", type=Path, required=True)
    parser.add_argument("--alerts", type=Path, required=True)
    parser.add_argument("--durable", action="store_true")
    parser.add_argument("--limit-seconds", type=float, help="not needed: there is nothing between all and nothing")
    options = parser.parse_args()
    version = _version(options.variant)
    # Libraries load parts of theirs at their first use, which is no more part of the job than the start of Python.
    _judge(options, 1_000)
    began = time.perf_counter()
    events, alerts = _judge(options)
    _write(alerts, options.alerts, durable=options.durable)
    seconds = time.perf_counter() - began
    result = {
        "peer": "oneshot",
        "variant": options.variant,
        "durable": options.durable,
        "events": events,
        "seconds": round(seconds, 3),
        # There is no first quarter: everything ends at once.
        "steady_events_per_s": round(events / seconds),
        "alerts": len(alerts),
        "complete": True,
        "settings": {
            "threads": "one for each rule" if options.variant == "numpy" else "polars' own",
            "cores": os.cpu_count(),
        },
        "version": version,
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
