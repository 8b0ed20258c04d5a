"""Appends rows to a table in a folder of this machine by a transaction of Delta, without a Spark job."""

from __future__ import annotations

import datetime as dt
import json
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from py4j.protocol import Py4JError
from pyspark.sql.types import StructType

from lookback.spark.platform.session import is_connect
from lookback.spark.tables.lakehouse import STATISTICS, commit_file
from lookback.spark.tables.schemas import PRODUCT_TABLES

if TYPE_CHECKING:
    from lookback.spark.tables.lakehouse import Tables

# What Delta asks of writers by these features, it does itself in the transaction, or it is checked here.
_WRITER_FEATURES = frozenset(
    {"appendOnly", "changeDataFeed", "checkConstraints", "deletionVectors", "inCommitTimestamp", "invariants"}
)
# Up to this version of the protocol, what is asked of writers shows in the settings and columns.
_LAST_WITHOUT_FEATURES, _WITH_FEATURES = 4, 7
_CONSTRAINT = "delta.constraints."
_STREAMING_UPDATE, _WRITE = "DeltaOperations$StreamingUpdate", "DeltaOperations$Write"
# What a write may say of itself beside its mode: partitions, predicates and the like.
_MORE_OF_A_WRITE = 8


class TableChanged(Exception):
    """Others have written to a table since it was read."""


def append_directly(tables: Tables, rows: pa.Table, name: str, mark: str = "", *, read_at: int | None = None) -> bool:
    """Appends `rows` to one of the product's tables in one file and one commit, some 150 ms sooner than a Spark job.

    mark: QUERY_ID:BATCH_ID of a stream, which the commit carries as its user metadata; "" for anybody else. Columns are matched
    by name; missing ones are NULL. read_at: the last commit of
    the table by which the rows were made; None if they do not depend on it.
    Returns False, with nothing committed, if Spark must append the rows: on Databricks, over Spark Connect, to tables
    elsewhere, and to a table that somebody altered so that it asks more of its writers than a plain file. Raises TableChanged
    if the table has a later commit than `read_at`, or a conflict (see `is_conflict`) if it gets one in this moment.
    """
    folder = None if is_connect(tables.spark) else tables.log_folder(name)
    if folder is None:
        return False
    jvm: Any = tables.spark._jvm
    delta = jvm.org.apache.spark.sql.delta
    query_id, _, batch_id = mark.rpartition(":")
    try:
        # These classes are Delta's own, and another release may have them otherwise.
        transaction = _start(
            delta.DeltaLog.forTable(tables.spark._jsparkSession, str(folder)), folder, jvm.scala.Option
        )
        metadata = json.loads(transaction.metadata().json())["metaData"]
        protocol = json.loads(transaction.protocol().json())["protocol"]
        if not (_asks_nothing_more(metadata, protocol) and _fits(rows, metadata, name)):
            return False
        if read_at is not None:
            if transaction.readVersion() != read_at:
                raise TableChanged(name)
            # Delta refuses the commit if another one, that was made of the rows there too, comes first.
            transaction.readWholeTable()
        if mark:
            append = jvm.org.apache.spark.sql.streaming.OutputMode.Append()
            operation = getattr(delta, _STREAMING_UPDATE)(append, query_id, int(batch_id), jvm.scala.Option.apply(mark))
        else:
            nothing = [jvm.scala.Option.empty()] * _MORE_OF_A_WRITE
            operation = getattr(delta, _WRITE)(jvm.org.apache.spark.sql.SaveMode.Append, *nothing)
        added = delta.actions.Action.fromJson(json.dumps({"add": _write_file(folder, rows, metadata)}))
        actions = jvm.scala.jdk.javaapi.CollectionConverters.asScala(jvm.java.util.List.of(added)).toSeq()
    except (Py4JError, AttributeError, TypeError, KeyError, ValueError, OSError, pa.ArrowException):
        # Spark says what is wrong with a table that it cannot write to either. A file without a commit is no part of the
        # table; VACUUM removes it.
        return False
    # An error from here on may come after the commit, so it is not answered by another append.
    transaction.commit(actions, operation)
    return True


def measure_columns(rows: pa.Table, names: list[str]) -> dict[str, Any]:
    """Returns the statistics of a file as Delta keeps them: numbers of rows and NULLs, least and greatest value."""
    columns = {name: rows.column(name) for name in names if name in rows.column_names}
    bounds = {
        name: pc.min_max(column).as_py()
        for name, column in columns.items()
        if pa.types.is_int64(column.type) or pa.types.is_timestamp(column.type)
    }
    return {
        "numRecords": rows.num_rows,
        **{
            key: {name: _to_json(each[bound]) for name, each in bounds.items() if each[bound] is not None}
            for key, bound in (("minValues", "min"), ("maxValues", "max"))
        },
        "nullCount": {name: column.null_count for name, column in columns.items()},
    }


def _start(log: Any, folder: Path, option: Any) -> Any:
    """Starts a transaction on the last commit that Delta knows, if nobody has written since.

    To find the last commit, Delta lists all commits since the last checkpoint.
    """
    known = log.unsafeVolatileSnapshot()
    version = known.version()
    if version < 0 or not commit_file(folder, version).exists() or commit_file(folder, version + 1).exists():
        return log.startTransaction()
    return log.startTransaction(option.empty(), option.apply(known))


def _asks_nothing_more(metadata: Mapping[str, Any], protocol: Mapping[str, Any]) -> bool:
    """Returns whether a plain file may be added to a table with these actions of its log."""
    version = protocol["minWriterVersion"]
    is_plain = version <= _LAST_WITHOUT_FEATURES or (
        version == _WITH_FEATURES and set(protocol["writerFeatures"]) <= _WRITER_FEATURES
    )
    has_checks = any(key.startswith(_CONSTRAINT) for key in metadata.get("configuration") or {})
    return is_plain and not has_checks and not metadata.get("partitionColumns")


def _fits(rows: pa.Table, metadata: Mapping[str, Any], name: str) -> bool:
    """Returns whether the table's columns are those of the product, beside others that may be NULL."""
    there = {field.name: field for field in StructType.fromJson(json.loads(metadata["schemaString"]))}
    ours = {field.name: field for field in PRODUCT_TABLES[name]}
    return (
        all(set(field.metadata) <= {"comment"} for field in there.values())
        and all(column in there and there[column].dataType == field.dataType for column, field in ours.items())
        and all(column in ours for column in rows.column_names)
        and all(
            field.nullable or (column in rows.column_names and not rows.column(column).null_count)
            for column, field in there.items()
        )
    )


def _write_file(folder: Path, rows: pa.Table, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Writes the rows to a file, and returns the action that adds it to the table."""
    file = folder / f"part-00000-{uuid.uuid4()}-c000.snappy.parquet"
    pq.write_table(rows, file, compression="snappy", store_schema=False)
    columns = (metadata.get("configuration") or {}).get(STATISTICS, "")
    return {
        "path": file.name,
        "partitionValues": {},
        "size": file.stat().st_size,
        "modificationTime": time.time_ns() // 1_000_000,
        "dataChange": True,
        "stats": json.dumps(measure_columns(rows, [column.strip(" `") for column in columns.split(",")])),
    }


def _to_json(bound: int | dt.datetime) -> int | str:
    """Writes a bound as Delta has it: times are cut to milliseconds, which its readers take into account."""
    if isinstance(bound, int):
        return bound
    return bound.astimezone(dt.timezone.utc).replace(tzinfo=None).isoformat(timespec="milliseconds") + "Z"
