"""The functions that notebooks call, one per cell. Each does one step and shows its result.

The same notebooks run in Jupyter and on Databricks. All results are ordinary display objects with escaped text.
"""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = {
    "lookback.notebook.alerts": "explain_alert explain_event import_labels measure_rules open_desk review_alert show_alerts "
    "show_explanation show_overlap show_precision show_queue show_reports snooze_alerts",
    "lookback.notebook.rules": "RULE_FIELDS backtest_rule check_gate check_rule edit_list list_rules open_author_desk open_rule "
    "publish_rule rule_form try_rule",
    "lookback.notebook.streams": "evaluate_stream ingest_files open_stream_desk open_workspace show_events show_health "
    "show_log show_rejected",
    "lookback.parameters": "parameters",
    "lookback.verbs": "Workspace",
    "lookback.views.live": "watch",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_HOMES)  # noqa: PLE0605 - each name has its home above


def __getattr__(name: str) -> Any:
    """Imports a function when it is first used: what needs Spark takes seconds to import."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
