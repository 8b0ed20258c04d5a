"""How many generated cases: the same ones in every run of `make test`; new and many ones by `make fuzz`."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# No deadlines: a test is not slower for a busy machine.
_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("test", derandomize=True, deadline=None, suppress_health_check=_SLOW)
settings.register_profile("fuzz", max_examples=5_000, deadline=None, suppress_health_check=_SLOW)
settings.load_profile(os.environ.get("LOOKBACK_CASES", "test"))
