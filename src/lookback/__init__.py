"""Lookback: a rules engine for event streams on Spark and Delta Lake."""

from __future__ import annotations

from lookback.core.errors import EventError, LookbackError, RuleError, StreamError
from lookback.core.rules import Rule
from lookback.core.streams import Stream
from lookback.harness import Harness, Result, replay

__all__ = ["EventError", "Harness", "LookbackError", "Result", "Rule", "RuleError", "Stream", "StreamError", "replay"]
