"""The same query gives the same rows by Spark and by DuckDB: NULLs, extremes and the order of rows included."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from lookback.core.values.columns import to_text
from lookback.spark.queries import functions as F  # noqa: N812
from lookback.spark.queries.columns import NeedsSpark
from lookback.spark.queries.frames import Session
from lookback.spark.queries.functions import without_spark

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
UTC = dt.timezone.utc
FIRST = dt.datetime(2026, 3, 29, 1, 30, 0, 1, tzinfo=UTC)
SCHEMA = pa.schema(
    [
        ("id", pa.int64()), ("s", pa.string()), ("i", pa.int32()), ("t", pa.timestamp("us", "UTC")), ("b", pa.bool_()),
        ("d", pa.decimal128(18, 2)), ("f", pa.float64()), ("m", pa.map_(pa.string(), pa.string())), ("a", pa.list_(pa.string())),
    ]
)  # fmt: skip
ROWS: list[tuple[Any, ...]] = [
    (1, "a", 1, FIRST, True, Decimal("1.10"), 0.0, {"k": "v", "n": None}, ["x", "y"]),
    (2, None, None, None, None, None, None, None, None),
    (3, "", -(2**31), dt.datetime(1, 1, 2, tzinfo=UTC), False, Decimal("-9999999999999999.99"), -0.0, {}, []),
    (4, "ü' \"`\\%", 2**31 - 1, dt.datetime(9999, 12, 30, 23, 59, 59, 999999, tzinfo=UTC), True, Decimal("0.00"), 1e300, {"": ""}, [None]),
    (5, "a", 1, FIRST + dt.timedelta(microseconds=1), False, None, 2.5, {"n": "1", "k": "v"}, ["", "x"]),
    (6, "A", None, FIRST, None, Decimal("1.10"), None, {"k": None}, ["a"]),
]  # fmt: skip
# Each gives a frame of one made of these rows.
QUERIES: dict[str, Callable[[Any], Any]] = {
    "comparisons": lambda rows: rows.select("id", (F.col("i") > 0).alias("x"), (F.col("s") != "a").alias("y"), (F.col("d") <= Decimal("1.10")).alias("z")),
    "three-valued": lambda rows: rows.where(~((F.col("i") == 1) | F.col("b")) | F.col("s").isNull()),
    "null-safe": lambda rows: rows.select("id", F.col("i").eqNullSafe(F.lit(None)).alias("x"), F.col("s").eqNullSafe("a").alias("y")),
    "literals": lambda rows: rows.select("id", F.lit(None).cast("string").alias("n"), F.lit("o'x\\\n").alias("s"), F.lit(2**40).alias("i"), F.lit(FIRST).alias("t")),
    "isin": lambda rows: rows.where(F.col("s").isin("a", "") | F.col("id").isin([2])),
    "texts": lambda rows: rows.select("id", F.concat("s", F.lit("-"), F.col("i").cast("string")).alias("x"), F.substring("s", 1, 2).alias("y"), F.col("s").startswith("a").alias("z"), F.make_valid_utf8("s").alias("u")),
    "when": lambda rows: rows.select("id", F.when(F.col("b"), "yes").when(F.col("i") == 1, "one").otherwise(F.col("s")).alias("x"), F.when(F.col("b"), 1).alias("y")),
    "times": lambda rows: rows.select("id", F.unix_micros("t").alias("x"), F.timestamp_micros(F.unix_micros("t")).alias("y")).where(F.col("y") >= F.lit(FIRST)),
    "casts": lambda rows: rows.select("id", F.col("i").cast("bigint").alias("x"), F.lit("12.50").cast("decimal(18,2)").alias("y"), F.lit("2026-01-31T12:00:00.5Z").cast("timestamp").alias("z")),
    "maps": lambda rows: rows.select("id", F.col("m")["k"].alias("x"), F.size("m").alias("z")),
    "arrays": lambda rows: rows.select("id", F.array_contains("a", "x").alias("x")),
    "ascending": lambda rows: rows.orderBy("i", F.col("s").desc(), "id").select("id"),
    "descending": lambda rows: rows.orderBy(F.col("i").desc(), F.col("t").asc_nulls_last(), "id").select("id"),
    "limited": lambda rows: rows.orderBy(F.col("t").desc(), "id").limit(2),
    "grouped": lambda rows: rows.groupBy("s").agg(F.count("*").alias("n"), F.count("i").alias("i"), F.min("t").alias("t"), F.max("d").alias("d"), F.bool_and("b").alias("all"), F.bool_or("b").alias("any"), F.count_if("b").alias("if"), F.count_distinct("t").alias("different")).orderBy("s"),
    "of no row": lambda rows: rows.where("id > 100").agg(F.count("*").alias("n"), F.max("i").alias("i")),
    "counted": lambda rows: rows.groupBy((F.col("i") == 1).alias("one")).count().orderBy("one"),
    "newest": lambda rows: rows.groupBy("b").agg(F.max_by("i", "t").alias("x"), F.max_by("s", F.struct("i", "t", "id")).alias("y"), F.max_by(F.struct("s", "i"), F.struct("d", "id")).alias("z")).orderBy("b"),
    "replaced": lambda rows: rows.withColumns({"i": F.col("i").cast("bigint") - F.lit(1), "j": F.coalesce("id", F.lit(0)) * 2}).drop("m", "a") .where("i > 0 OR i IS NULL"),
    "distinct": lambda rows: rows.select("s", "b").distinct().orderBy("s", "b"),
    "left": lambda rows: rows.join(rows.where("id > 2").select("s", F.col("id").alias("other")), "s", "left").select("id", "other").orderBy("id", "other"),
    "anti": lambda rows: rows.join(rows.where("id > 4").select("s"), "s", "left_anti").select("id").orderBy("id"),
    "anti by order": lambda rows: rows.join(rows.select(F.col("s").alias("same"), F.col("id").alias("later")), (F.col("s") == F.col("same")) & (F.col("id") < F.col("later")), "left_anti").select("id").orderBy("id"),
    "full": lambda rows: rows.where("id < 4").select("id", "s").join(rows.where("id > 2").select("id", "i"), ["id"], "full_outer").orderBy("id"),
}  # fmt: skip


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    made = Session()
    yield made
    made.close()


def listed(rows: Any) -> tuple[list[str], list[list[str | None]]]:
    return [name.lower() for name in rows.columns], [[plain(value) for value in row] for row in rows.collect()]


def plain(value: Any) -> str | None:
    """A value as text: times without their zone, which Spark leaves out, and maps without an order, which they have none of there."""
    if isinstance(value, dict):
        return str(sorted((key, plain(each)) for key, each in value.items()))
    if isinstance(value, tuple):
        return str([plain(each) for each in value])
    return to_text(value)


@pytest.mark.parametrize("name", QUERIES)
def test_a_query_gives_the_same_rows_by_both_engines(name: str, spark: SparkSession, session: Session) -> None:
    columns = [list(column) for column in zip(*ROWS, strict=True)]
    columns[7] = [None if each is None else list(each.items()) for each in columns[7]]
    table = pa.table(list(map(pa.array, columns, SCHEMA.types)), schema=SCHEMA)
    by_spark = listed(QUERIES[name](spark.createDataFrame(table)))
    with without_spark():
        rows = QUERIES[name](session.read(table))
        assert listed(rows) == by_spark
        assert (rows.count(), rows.isEmpty()) == (len(by_spark[1]), not by_spark[1])


def test_what_is_not_known_without_spark_is_refused(session: Session) -> None:
    with without_spark():
        rows = session.read(pa.table({"x": [1]}))
        for ask in (
            lambda: F.levenshtein("x", "x"), lambda: F.col("x").cast("interval"), lambda: F.lit("a\0b"), lambda: F.lit([1]),
            lambda: session.catalog, lambda: F.col("a\0b"),
        ):  # fmt: skip
            with pytest.raises(NeedsSpark):
                ask()
    assert rows.count() == 1
