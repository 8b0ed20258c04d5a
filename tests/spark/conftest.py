"""Tables of their own for each of these tests, a Kafka broker, and an S3 server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from lookback.core.streams.declaration import Stream
from lookback.spark.tables.lakehouse import Tables
from payins import STREAM as PAYINS
from payins import copy_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

    from broker import Broker
    from objectstore import S3Server

CONF = Path(__file__).parents[2] / "conf"


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """One Kafka broker for all tests; each has topics of its own, and who ends the broker starts it again."""
    from broker import Broker

    found = Broker(tmp_path_factory.mktemp("kafka"))
    try:
        found.start()
        yield found
    finally:
        found.remove()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One S3 server for all tests, as Spark's session keeps its address. It has the bucket `bucket`."""
    from objectstore import S3Server, find_missing

    if missing := find_missing():
        pytest.fail(missing, pytrace=False)
    started = S3Server(tmp_path_factory.mktemp("s3"))
    started.make_bucket("bucket")
    yield started
    started.stop()


@pytest.fixture(scope="session")
def transactions() -> Stream:
    return Stream.from_dict(yaml.safe_load((CONF / "streams/transactions.yml").read_text(encoding="utf-8")))


@pytest.fixture(scope="session")
def created(spark: SparkSession, transactions: Stream, tmp_path_factory: pytest.TempPathFactory) -> Tables:
    # A root that must be quoted wherever it goes.
    tables = Tables.local(spark, tmp_path_factory.mktemp("created") / "it's `quoted`, 100%")
    tables.create(transactions)
    tables.create(PAYINS)
    return tables


@pytest.fixture
def tables(created: Tables, tmp_path: Path) -> Tables:
    """The product's tables, empty; no stream's."""
    return copy_of(created, tmp_path / "lakehouse")


@pytest.fixture
def ready(created: Tables, tmp_path: Path) -> Tables:
    """The product's tables and that of the stream `payins`, empty."""
    return copy_of(created, tmp_path / "lakehouse", PAYINS.name)
