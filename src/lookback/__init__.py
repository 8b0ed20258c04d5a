"""Lookback: a rules engine for event streams on Spark and Delta Lake."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lookback.core.errors import EventError, LookbackError, RuleError, StreamError
    from lookback.core.rules.document import Rule
    from lookback.core.streams.declaration import Stream
    from lookback.testing.harness import Harness, Result, replay

__all__ = ["EventError", "Harness", "LookbackError", "Result", "Rule", "RuleError", "Stream", "StreamError", "replay"]
_HOMES = {
    **dict.fromkeys(("EventError", "LookbackError", "RuleError", "StreamError"), "lookback.core.errors"),
    "Rule": "lookback.core.rules.document",
    "Stream": "lookback.core.streams.declaration",
    **dict.fromkeys(("Harness", "Result", "replay"), "lookback.testing.harness"),
}


def __getattr__(name: str) -> object:
    """Imports a part of the package when it is first used, so that each costs only what it needs."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
