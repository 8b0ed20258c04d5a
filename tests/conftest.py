"""How many generated cases, and in which order the tests run.

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


# The folders of tests by how long their files take; all others follow.
_LONGEST_FIRST = ("notebooks", "spark")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the files that take long first: each of two processes takes a file at a time, and so both end together."""
    for folder in reversed(_LONGEST_FIRST):
        items.sort(key=lambda item: item.path.parent.name != folder)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What the generated cases had in them, so that one can see that many of them were not empty."""
    oracle = sys.modules.get("oracle")
    if os.environ.get("LOOKBACK_CASES") == "fuzz" and oracle is not None:
        terminalreporter.section("generated cases")
        for name, count in sorted(oracle.COVERED.items()):
            terminalreporter.write_line(f"{count:>10,}  {name}")
