"""A small stream, rules for it, and the same alerts read from the tables and from a replay: shared by the Spark tests."""

from __future__ import annotations

import datetime as dt
import json
import random
import shutil
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812

import lookback
from dev.bench.producer import append as append_commit
from lookback.core.streams.declaration import Stream
from lookback.core.values.columns import to_text
from lookback.spark.tables.lakehouse import Tables
from lookback.spark.tables.schemas import PRODUCT_TABLES

if TYPE_CHECKING:
    from collections.abc import Iterable

STREAM = Stream.from_dict(
    {
        "stream": "payins",
        "event_id": "id",
        "event_time": "at",
        "fields": {"id": "string", "at": "timestamp", "customer": "int", "shop": "string", "amount": "decimal(18,2)"},
        "max_out_of_orderness": "20 seconds",
        "allowed_lateness": "1 minute",
    }
)
STREAMS = {STREAM.name: STREAM}
START = 1_700_000_000_000_000
TIME = pa.timestamp("us", tz="UTC")


def rule(rule_id: str, **more: Any) -> dict[str, Any]:
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


RULES = [
    rule("by-customer"),
    rule("by-shop", group_by=["shop"], window={"lookback": "2 minutes", "delay": "10 seconds"}, when="n > 5"),
    rule("all", group_by=[], when="top >= 49 or n = 1", suppress="30 seconds", late="record"),
    rule(
        "pair",
        group_by=["shop", "customer"],
        where="amount <> 13",
        when="window_complete and n > 1 and total / (n - 3) > 2",
    ),
]


def window(rule_id: str, window: dict[str, str], **more: Any) -> dict[str, Any]:
    """A rule of a tumbling, sliding or session window: every window gives a result."""
    document = rule(rule_id, **{"window": window, "message": "{total}", **more})
    if "when" not in more:
        del document["when"]
    return document


def sequence(rule_id: str, steps: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    own = {name: more.pop(name) for name in ("until", "expiry") if name in more}
    document = rule(rule_id, sequence={"within": "2 minutes", "steps": steps, **own}, **more)
    return {name: value for name, value in document.items() if name not in ("window", "measures", "when")}


LARGE = {"name": "large", "where": "amount > 40", "at_least": 2}
# One rule of every kind that RULES has not.
MORE_RULES = [
    rule("revised", late="revise", when="n >= 3 and total < 150", message="{n} by {customer}"),
    rule("emptied", group_by=["shop"], reset_on_alert=True, when="n >= 3 or total > 90", message=""),
    rule("shops", measures={"n": "count(distinct shop) filter (where amount > 20)"}, when="n >= 3", message="{n}"),
    window("minutes", {"tumbling": "1 minute", "offset": "7 seconds"}, group_by=["shop"]),
    window("tens", {"sliding": "30 seconds", "slide": "10 seconds"}, when="n > 2", early=True, suppress="20 seconds"),
    window("sessions", {"session": "15 seconds"}, when="n > 1", message="{customer}"),
    sequence(
        "large-small",
        [LARGE, {"name": "small", "where": "amount < 30 and not array_contains(large.shop, shop)"}],
        until="amount > 50",
        message="{large.count} of {large.amount} in {large.shop}, then {amount} in {shop}",
    ),
    sequence("fixed", [LARGE, {"name": "next", "where": "amount > 20"}], expiry="fixed", message="{next.count}"),
    sequence(
        "silent",
        [{"name": "seen", "where": "amount > 20"}, {"name": "none", "absent": "amount > 20", "within": "20 seconds"}],
        group_by=["shop"],
        message="{seen.count} {shop}",
    ),
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
        columns["ingested_at"] = [dt.datetime.now(dt.timezone.utc)] * len(here)
        commit(tables, STREAM.name, columns, pa.schema([*types.items(), ("ingested_at", TIME)]))


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


def stored_alerts(tables: Tables) -> list[tuple[Any, ...]]:
    micros = {"at": "event_time", "start": "window_start", "end": "window_end"}
    rows = tables.read("alerts").withColumns({name: F.unix_micros(time) for name, time in micros.items()}).collect()
    return sorted(
        (
            row["alert_id"], row["revision"], row["verdict"], row["rule_id"], row["rule_version"], row["mode"],
            tuple(sorted(row["key"].items())), str(row["event_id"]), row["at"], row["window_complete"],
            tuple(sorted(row["measures"].items())), row["message"], tuple(row["evidence"]), row["start"], row["end"],
            row["arrival"],
        )
        for row in rows
    )  # fmt: skip


def replayed_alerts(result: lookback.Result) -> list[tuple[Any, ...]]:
    def micros(time: dt.datetime) -> int:
        return (time - dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)) // dt.timedelta(microseconds=1)

    return sorted(
        (
            alert.alert_id, alert.revision, alert.verdict, alert.rule_id, alert.rule_version, alert.mode,
            tuple(sorted(alert.key.items())), str(alert.event_id), micros(alert.event_time), alert.window_complete,
            tuple(sorted((name, to_text(value)) for name, value in alert.measures.items())), alert.message,
            tuple(alert.evidence), micros(alert.window_start), micros(alert.window_end), alert.arrival,
        )
        for alert in result.alerts
    )  # fmt: skip


def replay_of_tables(tables: Tables) -> lookback.Result:
    """A replay of what the tables hold: events by their commits, rules at their logged arrivals."""
    events = (
        tables.read_changes(STREAM.name, 0)
        .where("_change_type = 'insert'")
        .select(*STREAM.fields, F.col("_commit_version").alias("arrival"))
        .toArrow()
    )
    rows = {(row["rule_id"], row["version"]): row.asDict() for row in tables.read("rules").collect()}
    taken = ["activated", "shadowed", "paused", "retired", "quarantined", "advance", "clear_state"]
    log = tables.read("rule_log").where(F.col("action").isin(taken)).collect()
    rules = [
        (rows[row["rule_id"], row["version"]], row["arrival"]) for row in sorted(log, key=lambda r: r["arrival"] or -1)
    ]
    return lookback.replay(rules, events, STREAM)
