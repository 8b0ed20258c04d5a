"""Makes the measured events: seeded, cached below dev/bench/.data/, the same for every engine.

A set is one file in order of arrival, in commits of 100,000 rows, each commit sorted by (event_time, event_id); the
event_id is the place in that order, from 0.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dev.bench.texts import make_texts

Int64s = npt.NDArray[np.int64]
Columns = dict[str, npt.NDArray[Any]]

REPOSITORY = Path(__file__).resolve().parents[2]
DATA = Path(__file__).resolve().parent / ".data"
COMMIT_ROWS = 100_000
SECOND = 1_000_000
MINUTE, HOUR, DAY = 60 * SECOND, 3_600 * SECOND, 86_400 * SECOND
TIME = pa.timestamp("us", tz="UTC")
# What the generated sets begin with: 2024-01-01. Repeats in time must stay in the past.
START = 1_704_067_200 * SECOND
# Of the file for peers: 28 bytes an event, little-endian, nothing between the fields.
RECORD = np.dtype(
    [
        ("event_id", "<i8"),
        ("event_time", "<i8"),
        ("customer_id", "<i4"),
        ("terminal_id", "<i4"),
        ("amount_cents", "<i4"),
    ]
)
NAMES = ("handbook", "zipf", "uniform", "logins", "processes")
# The watermark's bounds, as the bench's streams declare them: no event of a set is too late for them.
OUT_OF_ORDERNESS, ALLOWED_LATENESS = 10 * SECOND, HOUR
_SEED = 20_240_101
ROWS = {"handbook": 1_754_155, "zipf": 2_000_000, "uniform": 2_000_000, "logins": 2_000_000, "processes": 1_000_000}
_CUSTOMERS, _TERMINALS, _USERS = 100_000, 20_000, 200_000
_LATE_SHARE, _VERY_LATE_SHARE, _MAX_LATE = 0.05, 0.01, 30 * MINUTE
_WHOLE_SECONDS_SHARE = 0.1
_SAMPLE = REPOSITORY / "conf" / "samples" / "transactions.parquet"
# To be counted up when a generator changes: files and tables that older ones made are then made anew.
GENERATOR = b"1"
_LONGEST_WINDOW = 30 * DAY


@dataclass(frozen=True)
class EventSet:
    """A set of events. rows: None for all of it, else so many, for a quick look (the generated ones then span less time)."""

    name: str
    rows: int | None = None

    @property
    def stem(self) -> str:
        """The common part of its files' names."""
        return self.name if self.rows is None else f"{self.name}-{self.rows}"

    @property
    def parquet(self) -> Path:
        """The file; it is made if it is missing."""
        file = DATA / f"{self.stem}.parquet"
        if not file.exists() or (pq.read_schema(file).metadata or {}).get(b"bench") != GENERATOR:
            _write_parquet(make(self.name, self.rows or ROWS[self.name]), file)
        return file

    @property
    def binary(self) -> Path:
        """The same rows for peers, 28 bytes each; made if it is missing."""
        file = DATA / f"{self.stem}.bin"
        source = self.parquet
        if not file.exists() or file.stat().st_mtime < source.stat().st_mtime:
            records = np.empty(len(self.columns["event_id"]), RECORD)
            for name in RECORD.names or ():
                records[name] = self.columns[name]
            temporary = _temporary(file)
            records.tofile(temporary)
            temporary.replace(file)
        return file

    @cached_property
    def columns(self) -> Columns:
        """The columns; times in microseconds since 1970, texts as they are."""
        table = pq.read_table(self.parquet)
        return {name: _array(table.column(name)) for name in table.column_names}

    @cached_property
    def period(self) -> int:
        """The whole days that the set spans, in microseconds; repeats follow each other at this distance."""
        times = self.columns["event_time"]
        return -(-int(times.max() - times.min() + 1) // DAY) * DAY

    def commit(self, number: int) -> Columns:
        """Makes the rows of a commit, from 0, of the set repeated in time without end.

        Every repeat has other events, customers and terminals (users and addresses), so its alerts are those of the first.
        """
        return self.at(np.arange(number * COMMIT_ROWS, (number + 1) * COMMIT_ROWS, dtype=np.int64))

    def at(self, positions: Int64s) -> Columns:
        """Makes the rows at these places of the set repeated in time."""
        rows = len(self.columns["event_id"])
        repeat, at = np.divmod(positions, rows)
        taken = {name: values[at] for name, values in self.columns.items()}
        taken["event_id"] = positions
        taken["event_time"] = taken["event_time"] + repeat * self.period
        for name in ("customer_id", "terminal_id", "user_id", "ip"):
            if name in taken:
                taken[name] = (taken[name] + repeat * self._span(name)).astype(np.int32)
        return taken

    def _span(self, name: str) -> int:
        return int(self.columns[name].max()) + 1


def make(name: str, rows: int) -> Columns:
    """Makes the columns of a set in order of arrival. Generated sets depend only on their name and rows."""
    if name == "handbook":
        return handbook(rows)
    if name == "logins":
        return logins(rows)
    if name == "processes":
        times = np.sort(_times(rows))
        return {"event_id": np.arange(rows, dtype=np.int64), "event_time": times, **make_texts(rows, _SEED)}
    if name in ("zipf", "uniform"):
        return transactions(rows, skewed=name == "zipf")
    raise ValueError(f"there is no set {name!r}; there are {', '.join(NAMES)}")


def handbook(rows: int) -> Columns:
    """Reads the first rows of the Handbook's transactions: of the file that LOOKBACK_HANDBOOK names, else of the repeated sample."""
    named = os.environ.get("LOOKBACK_HANDBOOK")
    file = Path(named) if named else _SAMPLE
    table = pq.read_table(file, columns=["event_time", "transaction_id", "customer_id", "terminal_id", "amount_cents"])
    table = table.sort_by([("event_time", "ascending"), ("transaction_id", "ascending")])
    once = {name: _array(table.column(name)) for name in table.column_names if name != "transaction_id"}
    repeat, at = np.divmod(np.arange(rows, dtype=np.int64), table.num_rows)
    span = -(-int(once["event_time"][-1] - once["event_time"][0] + 1) // DAY) * DAY
    columns = {name: values[at] for name, values in once.items()}
    columns["event_time"] = columns["event_time"] + repeat * span
    for name in ("customer_id", "terminal_id"):
        columns[name] = (columns[name] + repeat * (int(once[name].max()) + 1)).astype(np.int32)
    return {"event_id": np.arange(rows, dtype=np.int64), **columns}


def transactions(rows: int, *, skewed: bool) -> Columns:
    """Card transactions over 24 hours, those of the full 2,000,000; fewer rows span less.

    skewed: customers by Zipf weights with exponent 1 (the hottest has about 8 %), terminals with 0.8; else uniform.
    5 % of the events reach the table late, a fifth of these by up to 30 minutes and the others by up to 10 s; those are
    late in the file too that fall behind a younger commit.
    """
    times = _times(rows)
    amounts = np.clip(np.exp(_random(3).normal(8.0, 1.0, rows)), 1, 2_000_000).astype(np.int32)
    customers = _ids(_random(4), rows, _CUSTOMERS, 1.0 if skewed else 0.0)
    terminals = _ids(_random(5), rows, _TERMINALS, 0.8 if skewed else 0.0)
    others: Columns = {"customer_id": customers, "terminal_id": terminals, "amount_cents": amounts}
    return _arrived(times, times + _delays(rows), others)


def logins(rows: int) -> Columns:
    """Attempts to log in: runs of failures of a user from one address, most of them ended by a success.

    One run in 50 has three or more failures and a success from another address.
    """
    random = _random(6)
    runs = rows
    lengths = np.minimum(random.geometric(0.55, runs), 8)
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), rows)) + 1]
    runs = len(lengths)
    takeover = random.random(runs) < 0.02
    lengths = np.where(takeover, np.maximum(lengths, 4), lengths)
    run = np.repeat(np.arange(runs), lengths)[:rows]
    ends = np.cumsum(lengths)
    last = (np.arange(1, int(ends[-1]) + 1) == np.repeat(ends, lengths))[:rows]
    users = _ids(random, runs, _USERS, 0.6)
    addresses = random.integers(0, 1 << 24, runs, dtype=np.int32)
    times = START + np.sort(random.integers(0, _span(rows), runs))
    step = np.arange(rows) - (ends - lengths)[run]
    own = times[run] + step * 20 * SECOND + random.integers(0, 10 * SECOND, rows)
    success = last & (takeover[run] | (random.random(rows) < 0.9))
    elsewhere = success & takeover[run]
    address = np.where(elsewhere, (addresses[run] + 7) % (1 << 24), addresses[run]).astype(np.int32)
    outcomes = np.where(success, "SUCCESS", "FAIL").astype(object)
    return _arrived(own, own + _delays(rows), {"user_id": users[run], "ip": address, "outcome": outcomes})


class Windows:
    """The windows of each key's own past, if all events come in order of time; times count in milliseconds."""

    def __init__(self, keys: npt.NDArray[Any], times: Int64s) -> None:
        milliseconds = (times - times.min()) // 1_000
        # Keys lie so far apart on one line that no window of one reaches another.
        self._apart = int(milliseconds.max()) + _LONGEST_WINDOW // 1_000 + 1
        placed = keys.astype(np.int64) * self._apart + milliseconds
        self._order = np.argsort(placed, kind="stable")
        self._placed = placed[self._order]
        self._last = np.searchsorted(self._placed, self._placed, side="right")

    def sums(self, values: Int64s, window: int) -> Int64s:
        """Sums `values` over [t - window, t] for each event. window: microseconds, up to 30 days."""
        total = np.concatenate(([0], np.cumsum(values[self._order])))
        first = np.searchsorted(self._placed, self._placed - window // 1_000, side="left")
        found = np.empty(len(self._order), dtype=np.int64)
        found[self._order] = total[self._last] - total[first]
        return found

    def gaps(self) -> Int64s:
        """Returns, for each event, the microseconds since its key's event before; more than 30 days for the first."""
        found = np.empty(len(self._order), dtype=np.int64)
        found[self._order] = 1_000 * np.diff(self._placed, prepend=self._placed[0] - self._apart)
        return found


def summary(columns: Columns) -> dict[str, Any]:
    """Describes a set: its rows, hottest keys, events behind a younger one in the file, ties in time."""
    times = columns["event_time"]
    before = np.concatenate(([times[0]], np.maximum.accumulate(times)[:-1]))
    figures: dict[str, Any] = {
        "rows": len(times),
        "hours": round(float(times.max() - times.min()) / HOUR, 2),
        "behind_a_younger_one": int((times < before).sum()),
        "latest_by_seconds": round(float((before - times).max()) / SECOND, 3),
        "tied": int(len(times) - len(np.unique(times))),
    }
    for name in ("customer_id", "terminal_id", "user_id"):
        if name in columns:
            figures[f"hottest_{name}_share"] = round(float(np.bincount(columns[name]).max()) / len(times), 5)
    return figures


def record_batches(columns: Columns) -> Iterator[pa.Table]:
    """Yields the rows as Arrow tables of one commit each."""
    table = _table(columns)
    for first in range(0, table.num_rows, COMMIT_ROWS):
        yield table.slice(first, COMMIT_ROWS)


def _random(stream: int) -> np.random.Generator:
    # A generator per column: sets that share a column draw it alike.
    return np.random.default_rng([_SEED, stream])


def _span(rows: int) -> int:
    return int(DAY * min(1.0, rows / 2_000_000))


def _times(rows: int) -> Int64s:
    times = START + _random(1).integers(0, _span(rows), rows, dtype=np.int64)
    whole = _random(2).random(rows) < _WHOLE_SECONDS_SHARE
    return np.where(whole, times // SECOND * SECOND, times)


def _delays(rows: int) -> Int64s:
    """Draws the time that each event takes to arrive in the table."""
    drawn = _random(7).random(rows)
    delay = _random(8).random(rows)
    late = np.where(drawn < _VERY_LATE_SHARE, delay * _MAX_LATE, delay * 10 * SECOND)
    return np.where(drawn < _LATE_SHARE, late, 0).astype(np.int64)


def _ids(random: np.random.Generator, rows: int, ids: int, exponent: float) -> npt.NDArray[np.int32]:
    """Drawn by weights rank ** -exponent; which id has which rank is shuffled."""
    weights = np.arange(1, ids + 1, dtype=np.float64) ** -exponent
    ranks = np.searchsorted(np.cumsum(weights) / weights.sum(), random.random(rows), side="right")
    found: npt.NDArray[np.int32] = random.permutation(ids).astype(np.int32)[np.minimum(ranks, ids - 1)]
    return found


def _arrived(times: Int64s, arrivals: Int64s, others: Columns) -> Columns:
    """Puts rows into the order of arrival: by commit, within a commit by time."""
    place = np.empty(len(times), dtype=np.int64)
    place[np.argsort(arrivals, kind="stable")] = np.arange(len(times))
    order = np.lexsort((place, times, place // COMMIT_ROWS))
    columns = {"event_id": np.arange(len(times), dtype=np.int64), "event_time": times[order]}
    return {**columns, **{name: values[order] for name, values in others.items()}}


def _array(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    if pa.types.is_timestamp(column.type):
        column = pc.cast(pc.cast(column, TIME), pa.int64())
    values: npt.NDArray[Any] = column.to_numpy()
    return values


def _table(columns: Columns) -> pa.Table:
    arrays = {name: pa.array(values) for name, values in columns.items()}
    arrays["event_time"] = arrays["event_time"].cast(TIME)
    return pa.table(arrays)


def _write_parquet(columns: Columns, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(file)
    table = _table(columns).replace_schema_metadata({b"bench": GENERATOR})
    pq.write_table(table, temporary, row_group_size=COMMIT_ROWS)
    temporary.replace(file)


def _temporary(file: Path) -> Path:
    # In the same folder, so that the rename is one step; named by process, so that two makers do not meet.
    return file.with_name(f".{file.name}.{os.getpid()}")


def write_json(file: Path, document: object) -> None:
    """Writes a JSON file in one step."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(file)
    temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    temporary.replace(file)
