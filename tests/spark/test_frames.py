"""A question has the same answer by Spark and by DuckDB: NULLs, extremes and the order of rows included."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pytest

from lookback.core.values.columns import to_text
from lookback.spark.tables.folders import open_folders
from lookback.spark.tables.frames import NeedsSpark

if TYPE_CHECKING:
    from pathlib import Path

    from lookback.spark.tables.frames import Session
    from lookback.spark.tables.lakehouse import Tables

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
# Each reads these rows.
QUESTIONS = {
    "comparisons": "SELECT id, i > 0 AS x, s <> 'a' AS y, d <= 1.10 AS z FROM odd ORDER BY id",
    "three-valued": "SELECT id FROM odd WHERE NOT (i = 1 OR b) OR s IS NULL ORDER BY id",
    "null-safe": "SELECT id, i <=> :nothing AS x, s <=> 'a' AS y FROM odd ORDER BY id",
    "values": "SELECT id, :text AS s, :number AS i, :time AS t, :nothing IS NULL AS n FROM odd ORDER BY id",
    "no restriction": "SELECT id FROM odd WHERE :nothing IS NULL OR s = :nothing ORDER BY id",
    "lists": "SELECT id FROM odd WHERE array_contains(:names, s) ORDER BY id",
    "texts": "SELECT id, concat(s, '-', CAST(i AS STRING)) AS x, substring(s, 1, 2) AS y, make_valid_utf8(s) AS z FROM odd ORDER BY id",
    "quoted": "SELECT id, s AS `o'd :time FROM \"x` FROM odd WHERE s = :text ORDER BY id",
    "cases": "SELECT id, CASE WHEN b THEN 'yes' WHEN i = 1 THEN 'one' ELSE s END AS x FROM odd ORDER BY id",
    "times": "SELECT id, unix_micros(t) AS x, timestamp_micros(unix_micros(t)) AS y FROM odd WHERE t >= :time ORDER BY id",
    "casts": "SELECT id, CAST(i AS BIGINT) AS x, CAST('12.50' AS DECIMAL(18,2)) AS y, CAST(:moment AS TIMESTAMP) AS z FROM odd ORDER BY id",
    "maps": "SELECT id, m['k'] AS x, m[:key] AS y, array_size(map_keys(m)) AS z FROM odd ORDER BY id",
    "arrays": "SELECT id, coalesce(array_contains(a, 'x'), false) AS x FROM odd ORDER BY id",
    "ascending": "SELECT id FROM odd ORDER BY i, s DESC, id",
    "descending": "SELECT id FROM odd ORDER BY i DESC, t ASC NULLS LAST, id",
    "limited": "SELECT id FROM odd ORDER BY t DESC, id LIMIT 2",
    "grouped": "SELECT s, count(*) AS n, count(i) AS i, min(t) AS t, max(d) AS d, bool_and(b) AS every, bool_or(b) AS any, count(CASE WHEN b THEN 1 END) AS if, count(DISTINCT t) AS different FROM odd GROUP BY s ORDER BY s",
    "of no row": "SELECT count(*) AS n, max(i) AS i FROM odd WHERE id > 100",
    "newest": "SELECT b, max_by(s, struct(t, id)) AS x FROM odd WHERE s IS NOT NULL AND t IS NOT NULL GROUP BY b ORDER BY b",
    "replaced": "SELECT * EXCEPT (i, m, a), i * id AS i FROM odd WHERE i > 0 OR i IS NULL ORDER BY id",
    "full": "SELECT l.id AS x, r.id AS y FROM odd l FULL JOIN (SELECT id + 2 AS id FROM odd) AS r ON r.id = l.id ORDER BY x, y",
}  # fmt: skip
VALUES = {
    "nothing": None, "text": "ü' \"`\\%", "number": 2**40, "time": FIRST, "names": ["a", "", "o'x\\\n$"], "key": "n",
    "moment": "2026-01-31T12:00:00.5Z",
}  # fmt: skip


def listed(rows: Any) -> tuple[list[str], list[list[str | None]]]:
    return [name.lower() for name in rows.columns], [[plain(value) for value in row] for row in rows.collect()]


def plain(value: Any) -> str | None:
    """A value as text: times without their zone, which Spark leaves out, and maps without an order, which they have none of there."""
    if isinstance(value, dict):
        return str(sorted((key, plain(each)) for key, each in value.items()))
    if isinstance(value, tuple):
        return str([plain(each) for each in value])
    return to_text(value)


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_has_the_same_answer_by_both_engines(name: str, tables: Tables) -> None:
    columns = [list(column) for column in zip(*ROWS, strict=True)]
    columns[7] = [None if each is None else list(each.items()) for each in columns[7]]
    table = pa.table(list(map(pa.array, columns, SCHEMA.types)), schema=SCHEMA)
    by_spark = listed(tables.run(QUESTIONS[name], {"odd": tables.spark.createDataFrame(table)}, **VALUES))
    with open_folders(str(tables.root)) as folders:
        odd = cast("Session", folders.spark).read(table)
        rows = folders.run(QUESTIONS[name], {"odd": cast("Any", odd)}, **VALUES)
        assert listed(rows) == by_spark
        assert (rows.count(), rows.isEmpty()) == (len(by_spark[1]), not by_spark[1])


def test_what_is_not_known_without_spark_is_refused(tmp_path: Path) -> None:
    with open_folders(str(tmp_path)) as folders, pytest.raises(NeedsSpark):
        folders.spark.createDataFrame([])
