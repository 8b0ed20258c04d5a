"""Spark's daemon of Python workers under a limit: `spark.python.daemon.module` names this module.

Each worker is forked from it and may hold LOOKBACK_WORKER_MIB of memory of its own (RLIMIT_DATA); an allocation beyond that
fails with MemoryError. The name ends as that of Spark's own module does, by which the sampler of memory knows workers.
"""

from __future__ import annotations

import os
import resource

from pyspark.daemon import manager

if __name__ == "__main__":
    most = int(os.environ["LOOKBACK_WORKER_MIB"]) << 20
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    manager()  # type: ignore[no-untyped-call]
