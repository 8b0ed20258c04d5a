"""One local Spark for all of these tests, and tables of their own for each."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from lookback.core.errors import SetupError
from lookback.core.streams import Stream
from lookback.spark.jars import kafka_jars
from lookback.spark.schemas import PRODUCT_TABLES
from lookback.spark.session import get_spark
from lookback.spark.tables import Tables
from payins import STREAM as PAYINS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

    from broker import Broker

CONF = Path(__file__).parents[2] / "conf"


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[SparkSession]:
    folder = tmp_path_factory.mktemp("spark")
    settings = {
        "spark.driver.memory": "2g",
        # Tests are over before a slower compiler pays; the code of this one has 48 MB by default, too little for all of them.
        "spark.driver.defaultJavaOptions": "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m -XX:+UseSerialGC",
        "spark.local.dir": str(folder / "local"),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
    session = get_spark("lookback tests", cores=2, settings=settings, kafka=_reads_kafka(request.session.items))
    yield session
    # A query that outlives the interpreter ends in a page of Java errors.
    for query in session.streams.active:
        query.stop()
    session.stop()


def _reads_kafka(tests: list[pytest.Item]) -> bool:
    """Whether some test needs Kafka and its JARs are there; where they cannot be fetched, only those tests fail."""
    if not any("broker" in getattr(test, "fixturenames", ()) for test in tests):
        return False
    try:
        return bool(kafka_jars())
    except SetupError:
        return False


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
    """The product's tables, empty; no stream's. Copied, as a Delta folder is found wherever it lies."""
    root = tmp_path / "lakehouse"
    for name in PRODUCT_TABLES:
        shutil.copytree(created.path_or_name(name), root / name)
    return Tables.local(created.spark, root)


@pytest.fixture
def ready(created: Tables, tables: Tables) -> Tables:
    """The product's tables and that of the stream `payins`, empty."""
    shutil.copytree(created.path_or_name(PAYINS.name), tables.path_or_name(PAYINS.name))
    return tables
