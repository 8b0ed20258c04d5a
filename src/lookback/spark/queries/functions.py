"""The functions of PySpark, as `F`: those of Spark, or inside `without_spark` those that build SQL of DuckDB.

Modules whose queries may run without a JVM import this in place of `pyspark.sql.functions`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.functions import *  # noqa: F403
    from pyspark.sql.window import WindowSpec
else:

    def __getattr__(name: str) -> Any:
        """Returns the function of the engine that runs the queries now."""
        if _WITHOUT_SPARK.get():
            from lookback.spark.queries.columns import find_function

            return find_function(name)
        from pyspark.sql import functions

        return getattr(functions, name)


_WITHOUT_SPARK: ContextVar[bool] = ContextVar("without_spark", default=False)


@contextmanager
def without_spark() -> Iterator[None]:
    """Makes the functions of this module build SQL of DuckDB until the end of the block, in this thread."""
    token = _WITHOUT_SPARK.set(True)
    try:
        yield
    finally:
        _WITHOUT_SPARK.reset(token)


def make_window(group_by: Sequence[str], order: Column) -> WindowSpec:
    """Makes the window of the rows of each group in an order; no columns to group by make one of all rows."""
    if _WITHOUT_SPARK.get():
        from lookback.spark.queries import columns

        return cast("WindowSpec", columns.Window(group_by, order))
    from pyspark.sql import Window

    return Window.partitionBy(*group_by).orderBy(order)
