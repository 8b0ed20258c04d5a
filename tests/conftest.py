"""How many generated cases, in which order the tests run, and their Spark.

The cases are the same in every run of `make test`; `make fuzz` draws new and many ones.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import SparkSession

# No deadlines: a test is not slower for a busy machine.
_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("test", max_examples=15, derandomize=True, deadline=None, suppress_health_check=_SLOW)
settings.register_profile("fuzz", max_examples=10_000, deadline=None, suppress_health_check=_SLOW)
settings.load_profile(os.environ.get("LOOKBACK_CASES", "test"))
_IS_FUZZ = os.environ.get("LOOKBACK_CASES") == "fuzz"
_SECONDS_BETWEEN_LINES = 20.0

# Spark's defaults, and what suits queries of a few rows: each is planned once and evaluated by its tree, in place of Java
# that is written and compiled for it.
USUAL = {
    "spark.sql.codegen.wholeStage": "true",
    "spark.sql.codegen.factoryMode": "FALLBACK",
    "spark.sql.adaptive.enabled": "true",
    "spark.sql.ui.explainMode": "formatted",
}
SMALL = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
    # Each query is described to Spark's pages, which are off.
    "spark.sql.ui.explainMode": "simple",
}
_JAVA = (
    # Tests are over before a slower compiler pays; the code of this one has 48 MB by default, too little for all of them.
    "-XX:TieredStopAtLevel=1",
    "-XX:ReservedCodeCacheSize=240m",
    "-XX:+UseSerialGC",
    # The sizes that a run of all tests reaches anyway; from smaller ones it gets there by many collections.
    "-Xms1g",
    "-Xmn500m",
    "-XX:MetaspaceSize=300m",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the files that take long first: each of two processes takes a file at a time, and so both end together."""
    items.sort(key=lambda item: item.path.parent.name != "spark")
    for item in items if _IS_FUZZ else ():
        generated = getattr(getattr(item, "obj", None), "hypothesis", None)
        if generated is not None:
            generated.inner_test = _count_cases(generated.inner_test, item)


def _count_cases(test: Callable[..., None], item: pytest.Item) -> Callable[..., None]:
    """Returns a generated test that says now and then how many of its cases have run."""
    plugins = item.config.pluginmanager
    reporter, capture = plugins.get_plugin("terminalreporter"), plugins.get_plugin("capturemanager")
    count, said_at = 0, time.monotonic()

    @functools.wraps(test)
    def run(*args: object, **kwargs: object) -> None:
        nonlocal count, said_at
        count += 1
        # A process of several has no reporter.
        if reporter is not None and time.monotonic() - said_at >= _SECONDS_BETWEEN_LINES:
            said_at = time.monotonic()
            with capture.global_and_fixture_disabled():
                reporter.write_line(f"{count:>6,} cases so far: {item.nodeid}")
                # A file or a pipe gets the line at once, too.
                reporter.flush()
        test(*args, **kwargs)

    return run


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[SparkSession]:
    """One local Spark for all tests of a process."""
    from lookback.spark.platform.session import get_spark

    folder = tmp_path_factory.mktemp("spark")
    options = {
        "spark.driver.memory": "2g",
        "spark.driver.defaultJavaOptions": " ".join(_JAVA),
        "spark.local.dir": str(folder / "local"),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        # To compile queries takes as long as to run them. Notebooks in Jupyter have a Spark of their own, which compiles theirs.
        **SMALL,
    }
    session = get_spark("lookback tests", cores=2, settings=options, kafka=_reads_kafka(request.session.items))
    yield session
    # A query that outlives the interpreter ends in a page of Java errors.
    for query in session.streams.active:
        query.stop()
    session.stop()


@pytest.fixture(scope="module")
def usual_queries(spark: SparkSession) -> Iterator[None]:
    """Spark plans and compiles queries as it does outside of tests; for modules that are about the values of expressions."""
    before = {name: str(spark.conf.get(name)) for name in USUAL}
    for name, value in USUAL.items():
        spark.conf.set(name, value)
    yield
    for name, value in before.items():
        spark.conf.set(name, value)


def _reads_kafka(tests: list[pytest.Item]) -> bool:
    """Whether some test needs Kafka and its JARs are there; where they cannot be fetched, only those tests fail."""
    if not any("broker" in getattr(test, "fixturenames", ()) for test in tests):
        return False
    from lookback.core.errors import SetupError
    from lookback.spark.platform.jars import fetch_kafka_jars

    try:
        return bool(fetch_kafka_jars())
    except SetupError:
        return False


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Counts what the generated cases had in them, to show that many of them were not empty."""
    oracle = sys.modules.get("oracle")
    if _IS_FUZZ and oracle is not None:
        terminalreporter.section("generated cases")
        for name, count in sorted(oracle.COVERED.items()):
            terminalreporter.write_line(f"{count:>10,}  {name}")
