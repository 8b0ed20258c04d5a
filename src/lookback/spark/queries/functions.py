"""The functions of PySpark, imported as `F`. Inside `without_spark`, they build SQL for DuckDB instead.

Modules whose queries may run without a JVM import this instead of `pyspark.sql.functions`.
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
        """Returns the function of the current engine."""
        if _WITHOUT_SPARK.get():
            from lookback.spark.queries.columns import find_function

            return find_function(name)
        from pyspark.sql import functions

        return getattr(functions, name)


_WITHOUT_SPARK: ContextVar[bool] = ContextVar("without_spark", default=False)


@contextmanager
def without_spark() -> Iterator[None]:
    """Makes the functions of this module build SQL for DuckDB inside the block, in this thread."""
    token = _WITHOUT_SPARK.set(True)
    try:
        yield
    finally:
        _WITHOUT_SPARK.reset(token)
