"""Marks the Spark jobs of a thread, so that another thread can cancel them."""

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
    """Marks the jobs that this thread starts in the `with` block. tag: a text without commas, such as a UUID."""
    if is_connect(spark):
        spark.addTag(tag)
        try:
            yield
        finally:
            spark.removeTag(tag)
        return
    context = spark.sparkContext
    context.addJobTag(tag)
    # A task that is cancelled is interrupted, so that it does not go on to its end.
    context.setInterruptOnCancel(True)
    try:
        yield
    finally:
        context.removeJobTag(tag)
        context.setInterruptOnCancel(False)


def cancel_jobs(spark: SparkSession, tag: str) -> None:
    """Cancels the jobs with a tag that run now. One that starts later runs, so call it until the thread has ended."""
    with suppress(PySparkException, Py4JError):
        if is_connect(spark):
            spark.interruptTag(tag)
        else:
            spark.sparkContext.cancelJobsWithTag(tag)
