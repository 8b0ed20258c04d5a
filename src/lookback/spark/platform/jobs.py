"""Tags the Spark jobs of a thread so that another thread can cancel them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from lookback.spark.platform.session import is_connect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@contextmanager
def tagged_jobs(spark: SparkSession, tag: str) -> Iterator[None]:
    """Tags the jobs that this thread starts in the `with` block. `tag` must not contain commas; use a UUID."""
    if is_connect(spark):
        spark.addTag(tag)
        try:
            yield
        finally:
            spark.removeTag(tag)
        return
    context = spark.sparkContext
    context.addJobTag(tag)
    # Interrupt cancelled tasks, which would otherwise run to their end.
    context.setInterruptOnCancel(True)
    try:
        yield
    finally:
        context.removeJobTag(tag)
        context.setInterruptOnCancel(False)


def cancel_jobs(spark: SparkSession, tag: str) -> None:
    """Cancels the running jobs with a tag. Later jobs still run, so repeat this until the thread has ended."""
    with suppress(PySparkException, Py4JError):
        if is_connect(spark):
            spark.interruptTag(tag)
        else:
            spark.sparkContext.cancelJobsWithTag(tag)
