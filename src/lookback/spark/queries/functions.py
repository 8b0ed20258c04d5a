"""The functions of PySpark, as `F`: those of Spark, or inside `without_spark` those that build SQL of DuckDB.

Modules whose queries may run without a JVM import this in place of `pyspark.sql.functions`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql.functions import *  # noqa: F403
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
