"""How many generated cases, and which tests run in one process.

The cases are the same in every run of `make test`; `make fuzz` draws new and many ones.
"""

from __future__ import annotations

import os
import sys

import pytest
from hypothesis import HealthCheck, settings

# No deadlines: a test is not slower for a busy machine.
_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("test", derandomize=True, deadline=None, suppress_health_check=_SLOW)
settings.register_profile("fuzz", max_examples=10_000, deadline=None, suppress_health_check=_SLOW)
settings.load_profile(os.environ.get("LOOKBACK_CASES", "test"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the tests of the Spark session in one process, and the notebooks, which follow one another, in one too."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        group = next((name for name in ("notebook", "spark") if item.get_closest_marker(name)), None)
        if group is not None:
            item.add_marker(pytest.mark.xdist_group(group))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What the generated cases had in them, so that one can see that many of them were not empty."""
    oracle = sys.modules.get("oracle")
    if os.environ.get("LOOKBACK_CASES") == "fuzz" and oracle is not None:
        terminalreporter.section("generated cases")
        for name, count in sorted(oracle.COVERED.items()):
            terminalreporter.write_line(f"{count:>10,}  {name}")
