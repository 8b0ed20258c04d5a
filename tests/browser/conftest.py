"""JupyterLab, a browser and tables, each started once for all tests of this folder."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from chromium import NoChromium, find_chromium

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lab_server import LabServer
    from playwright.sync_api import Browser
    from pyspark.sql import SparkSession
    from reviewed_tables import Place

# `make test` collects this folder too, and installs no JupyterLab.
collect_ignore_glob = [] if importlib.util.find_spec("playwright") else ["test_*.py"]
# With a sandbox Chromium does not start as root, nor in most containers. It reads pages of this machine alone.
_ARGUMENTS = ("--no-sandbox", "--disable-dev-shm-usage", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Chromium without a window, in a home of its own."""
    try:
        path = find_chromium()
    except NoChromium as error:
        pytest.fail(str(error), pytrace=False)
    from notebook_page import ANSWER_MS
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=ANSWER_MS)
    home = tmp_path_factory.mktemp("home")
    with sync_playwright() as playwright:
        environment = {**os.environ, "HOME": str(home)}
        chromium = playwright.chromium.launch(executable_path=path, args=list(_ARGUMENTS), env=environment)
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabServer]:
    """One JupyterLab; each module ends the kernels that it started."""
    from lab_server import LabServer

    server = LabServer(tmp_path_factory.mktemp("lab"))
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def place(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Tables with 10,000 open alerts."""
    from reviewed_tables import make_place

    return make_place(spark, tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="session")
def pictures() -> Path | None:
    """The folder for pictures, if LOOKBACK_PICTURES asks for them."""
    folder = os.environ.get("LOOKBACK_PICTURES")
    return Path(folder) if folder else None
