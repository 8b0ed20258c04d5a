"""A small stream, rules for it, and the same alerts read from the tables and from a replay: shared by the Spark tests."""

from __future__ import annotations

import datetime as dt
import json
import random
import shutil
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812

import lookback
from alert_rows import AlertRow, list_alerts, read_alerts
from dev.bench.producer import append as append_commit
from dev.soak import scenario
from lookback.core.streams.declaration import Stream
from lookback.spark.tables.lakehouse import Tables
from lookback.spark.tables.schemas import PRODUCT_TABLES

if TYPE_CHECKING:
    from collections.abc import Iterable

rule, window, sequence = scenario.make_rule, scenario.make_window_rule, scenario.make_sequence_rule
# Tests append commits of any size.
STREAM = Stream.from_dict({key: value for key, value in scenario.STREAM.to_dict().items() if key != "commit_rows"})
STREAMS = {STREAM.name: STREAM}
START = 1_700_000_000_000_000
TIME = pa.timestamp("us", tz="UTC")
_BY_ID = {document["rule_id"]: document for document in scenario.RULES}
RULES = [rule("by-customer"), _BY_ID["by-shop"], _BY_ID["all"], {**_BY_ID["pair"], "where": "amount <> 13"}]
# One rule of every kind that RULES has not.
_KINDS = ("revised", "emptied", "shops", "minutes", "tens", "sessions", "large-small", "fixed")
MORE_RULES = [
    *(_BY_ID[rule_id] for rule_id in _KINDS),
    {key: value for key, value in _BY_ID["silent"].items() if key != "reset_on_alert"},
]


def make_events(count: int, seed: int) -> list[dict[str, Any]]:
    """Events out of order, with ties, some late, a few lost to lateness; `arrival` counts commits from 1."""
    chance, time, rows = random.Random(seed), START, []
    for at in range(count):
        time += chance.choice([0, 1, 1_000_000, 3_000_000])
        delay = chance.choice([0] * 12 + [5_000_000, 15_000_000, 40_000_000, 200_000_000])
        rows.append(
            {
                "id": f"e{at}",
                "at": time - delay,
                "customer": chance.choice([None, 1, 2, 3, 3]),
                "shop": chance.choice(["a", "ü", "", None]),
                "amount": f"{chance.choice([1, 13, 25, 49, 50])}.{chance.randrange(100):02}",
                "arrival": at // 25 + 1,
            }
        )
    return rows


def append(tables: Tables, rows: list[dict[str, Any]]) -> None:
    """Appends one foreign commit of one file per arrival, written by the Delta protocol, as another engine would."""
    types = {"id": pa.string(), "at": TIME, "customer": pa.int32(), "shop": pa.string(), "amount": pa.decimal128(18, 2)}
    for arrival in sorted({row["arrival"] for row in rows}):
        here = [row for row in rows if row["arrival"] == arrival]
        amounts = [None if row["amount"] is None else Decimal(row["amount"]) for row in here]
        columns = {name: [row[name] for row in here] for name in ("id", "at", "customer", "shop")} | {"amount": amounts}
        # As they stand in the list, which is how a replay of it takes them.
        columns["position"] = [at for at, row in enumerate(rows) if row["arrival"] == arrival]
        columns["ingested_at"] = [dt.datetime.now(dt.timezone.utc)] * len(here)
        schema = pa.schema([*types.items(), ("position", pa.int64()), ("ingested_at", TIME)])
        commit(tables, STREAM.name, columns, schema)


def publish(tables: Tables, documents: Iterable[dict[str, Any]], status: str = "active") -> None:
    """Inserts documents into the rules table, each as version 1, in one commit. A push of each would be a commit of each."""
    texts = ("rule_id", "status", "document", "author", "comment")
    schema = pa.schema([(name, pa.string()) for name in texts] + [("version", pa.int64()), ("changed_at", TIME)])
    rows = [(document["rule_id"], status, json.dumps(document), "ann", "") for document in documents]
    columns = dict(zip(texts, map(list, zip(*rows, strict=True)), strict=True))
    columns |= {"version": [1] * len(rows), "changed_at": [dt.datetime.now(dt.timezone.utc)] * len(rows)}
    commit(tables, "rules", columns, schema)


def commit(tables: Tables, name: str, columns: dict[str, list[Any]], schema: pa.Schema) -> None:
    """Appends one commit; without Spark, which takes a third of a second, where the table is a folder with its checksum."""
    rows = pa.table(columns, schema=schema)
    if tables.root is not None:
        folder = Path(tables.path_or_name(name))
        version = max(int(file.stem) for file in (folder / "_delta_log").glob("[0-9]*.json"))
        if (folder / "_delta_log" / f"{version:020d}.crc").exists():
            append_commit(folder, version + 1, rows)
            return
    tables.append(tables.spark.createDataFrame(rows).coalesce(1), name)


def copy_of(tables: Tables, root: Path, *streams: str) -> Tables:
    """The product's tables, and those of the streams, copied below `root`: a Delta folder is found wherever it lies."""
    for name in (*PRODUCT_TABLES, *streams):
        shutil.copytree(tables.path_or_name(name), root / name)
    return Tables.local(tables.spark, root)


def relocate(folder: Path, before: str, now: str) -> None:
    """Tells the checkpoints below `folder`, which was at `before`, that it is at `now`: Spark notes whole paths in them."""
    for file in folder.glob("**/state/*/_metadata/v2/*"):
        if file.suffix != ".crc" and before in (text := file.read_text()):
            file.write_text(text.replace(before, now))
            (file.parent / f".{file.name}.crc").unlink(missing_ok=True)


def stored_alerts(tables: Tables) -> list[AlertRow]:
    return sorted(read_alerts(tables))


def outputs(tables: Tables) -> dict[str, Any]:
    """All that an evaluation wrote, as often as it is there."""
    late = tables.read("late_events").select("event_id", "arrival", "late_by_us", "action").collect()
    log = tables.read("rule_log").where("action not in ('failed', 'commit_cut')")
    rows = log.select("rule_id", "version", "action", "message", "arrival").collect()
    alerts = stored_alerts(tables)
    return {
        "alerts": Counter(alerts),
        "twice": [key for key, count in Counter(row[:2] for row in alerts).items() if count > 1],
        "late": Counter(map(tuple, late)),
        "log": Counter(map(tuple, rows)),
    }


def forget_commit(tables: Tables, name: str) -> None:
    """As if the process had been killed before it wrote the last commit of a table."""
    version = tables.version(name)
    for file in Path(tables.path_or_name(name), "_delta_log").glob(f"*{version:020d}.*"):
        file.unlink()
    tables.spark._jvm.org.apache.spark.sql.delta.DeltaLog.clearCache()  # type: ignore[union-attr]
    assert tables.version(name) == version - 1


def replayed_alerts(result: lookback.Result) -> list[AlertRow]:
    return sorted(list_alerts(result))


def replay_of_tables(tables: Tables, stream: Stream = STREAM) -> lookback.Result:
    """A replay of what the tables hold: events by their commits, rules at their logged arrivals."""
    events = (
        tables.read_changes(STREAM.name, 0)
        .where("_change_type = 'insert'")
        .select(*stream.columns_of_events, F.col("_commit_version").alias("arrival"))
        .toArrow()
    )
    rows = {(row["rule_id"], row["version"]): row.asDict() for row in tables.read("rules").collect()}
    taken = ["activated", "shadowed", "paused", "retired", "quarantined", "advance", "clear_state"]
    log = tables.read("rule_log").where(F.col("action").isin(taken)).collect()
    rules = [
        (rows[row["rule_id"], row["version"]], row["arrival"]) for row in sorted(log, key=lambda r: r["arrival"] or -1)
    ]
    return lookback.replay(rules, events, stream)


def lose_first_files(tables: Tables, last: int, name: str = STREAM.name) -> None:
    """Rewrites a table and removes the files of its first commits, as OPTIMIZE and VACUUM do in time."""
    folder = Path(str(tables.root)) / name
    tables.spark.sql(f"OPTIMIZE {tables.identifier(name)}")
    for commit in range(1, last + 1):
        actions = map(json.loads, (folder / "_delta_log" / f"{commit:020}.json").read_text().splitlines())
        for path in [action[kind]["path"] for action in actions for kind in ("add", "cdc") if kind in action]:
            (folder / path).unlink()
