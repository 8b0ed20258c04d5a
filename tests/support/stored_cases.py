"""Generated cases in the tables of a place: rows written as events, and rows of alerts read in the oracle's form."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812

from lookback.spark.replay.proof import prove

if TYPE_CHECKING:
    from lookback.core.streams.declaration import Stream
    from lookback.spark.tables.lakehouse import Tables


def assert_proved(tables: Tables, stream: Stream, **options: Any) -> None:
    with prove(tables, stream, {stream.name: stream}, **options) as proofs:
        assert all(row.holds and not row.unprovable for row in proofs.rows), proofs.rows


def append(tables: Tables, rows: list[dict[str, Any]], fields: Any) -> None:
    for arrival in sorted({row["arrival"] for row in rows}):
        here = [
            (*(row[name] for name in fields), row.get("position", at))
            for at, row in enumerate(rows)
            if row["arrival"] == arrival
        ]
        read = {"timestamp": "long", "decimal": "string"}
        columns = ", ".join(f"`{name}` {read.get(type_.name, type_)}" for name, type_ in fields.items())
        frame = tables.spark.createDataFrame(here, f"{columns}, position long").withColumn(
            "at", F.timestamp_micros("at")
        )
        decimals = {name: F.col(name).cast(str(type_)) for name, type_ in fields.items() if type_.is_decimal}
        frame = frame.withColumns(decimals).withColumn("ingested_at", F.current_timestamp())
        tables.append(frame.coalesce(1), "tx")


def written(tables: Tables) -> list[tuple[Any, ...]]:
    """The rows of the alerts table in the oracle's form."""

    def moment(time: int) -> dt.datetime:
        return dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc) + dt.timedelta(microseconds=time)

    times = ("event_time", "window_start", "window_end")
    rows = tables.read("alerts").withColumns({name: F.unix_micros(name) for name in times}).collect()
    found = [
        (
            r["alert_id"], r["revision"], r["rule_id"], r["rule_version"], r["mode"], r["verdict"], r["event_id"],
            *(moment(r[name]) for name in times), tuple(sorted(r["measures"].items())), r["window_complete"],
            r["message"], tuple(sorted(r["entities"].items())), tuple(r["tags"]), tuple(r["evidence"]), r["arrival"],
        )
        for r in rows
    ]  # fmt: skip
    return sorted(found, key=repr)
