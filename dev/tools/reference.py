"""Makes the reference of the public API as HTML from the docstrings: `make docs`.

The public modules are listed in PUBLIC, and in docs/reference/python.md. A warning of the generator is an error: an exported name
that does not exist, or a docstring that cannot be read.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import pdoc
import pdoc.render

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = (
    "lookback",
    "lookback.config",
    "lookback.core.streams.alerts",
    "lookback.core.errors",
    "lookback.testing.rule_tests",
    "lookback.notebook",
    "lookback.spark.platform.session",
    "lookback.spark.tables.lakehouse",
    "lookback.spark.ingest.files",
    "lookback.spark.ingest.report",
    "lookback.spark.rules",
    "lookback.spark.stream.pipeline",
    "lookback.spark.replay.backtest",
    "lookback.spark.replay.features",
    "lookback.spark.replay.proof",
    "lookback.spark.labels",
    "lookback.spark.activation",
    "lookback.spark.reports",
    "lookback.spark.challenger",
    "lookback.spark.figures",
    "lookback.spark.review",
    "lookback.spark.snoozes",
    "lookback.spark.lists",
    "lookback.spark.operations.status",
    "lookback.spark.operations.forget",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the pages. Returns 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "reference")
    options = parser.parse_args(arguments)
    build(options.output)
    print(f"{len(PUBLIC)} modules: open {options.output / 'index.html'}")
    return 0


def build(folder: Path) -> None:
    """Writes a page for each public module below the folder. Raises UserWarning if one is incomplete."""
    for name in PUBLIC:
        module = importlib.import_module(name)
        # Names that a package imports when they are asked for are asked for now.
        for exported in getattr(module, "__all__", ()):
            setattr(module, exported, getattr(module, exported))
    pdoc.render.configure(docformat="google", show_source=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        pdoc.pdoc(*PUBLIC, output_directory=folder)


if __name__ == "__main__":
    sys.exit(main())
