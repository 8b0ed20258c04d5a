"""The way of one event to its alert stays short enough to be walked: how many files it passes, and how often it changes.

Counted are the calls from one file of the core into another while `Evaluator.process` judges the event that raises the
alert. Properties, `len` and indexing are left out, since who reads the code takes them for values; so are the rooms
`values`, `expressions` and `aggregation`, which know neither rules nor events and are read as one reads a library.
"""

from __future__ import annotations

import sys
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from lookback import Harness
from lookback.core.engine.evaluation import Evaluator

CORE = Path(sys.modules[Evaluator.__module__].__file__ or "").parents[1]
ROOMS = ("engine", "judging", "rules", "state", "streams")
STREAM = {
    "stream": "logins",
    "event_id": "id",
    "event_time": "at",
    "fields": {"id": "string", "at": "timestamp", "customer": "int", "status": "string"},
    "max_out_of_orderness": "0 seconds",
}
RULE = {"rule_id": "r", "stream": "logins", "severity": "low", "group_by": ["customer"], "message": "{customer}"}
COUNT = {**RULE, "measures": {"n": "count(*)"}, "when": "n >= 1"}
STEPS = [{"name": "failed", "where": "status = 'failed'"}, {"name": "entered", "where": "status = 'ok'"}]


class Way:
    """The files that were passed, and the calls from one of them into another."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.changes = 0

    def trace(self, frame: FrameType, event: str, _: Any) -> None:
        """Counts a call, as `sys.setprofile` reports it."""
        file = frame.f_code.co_filename
        if event != "call" or not is_counted(file) or reads_value(frame):
            return
        self.files.add(file)
        caller = frame.f_back
        while caller is not None and not is_counted(caller.f_code.co_filename):
            caller = caller.f_back
        self.changes += caller is not None and caller.f_code.co_filename != file


def is_counted(file: str) -> bool:
    path = Path(file)
    return CORE in path.parents and path.relative_to(CORE).parts[0] in ROOMS


def reads_value(frame: FrameType) -> bool:
    """Returns whether the call is that of a property, of `len` or of an index."""
    name, owner = frame.f_code.co_name, frame.f_locals.get("self")
    return name in ("__len__", "__getitem__") or isinstance(
        getattr(type(owner), name, None), property | cached_property
    )


def walk(rule: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Way:
    """Judges events up to the one whose batch raises the first alert, and returns the way of that batch."""
    process, ways = Evaluator.process, list[Way]()

    def traced(*arguments: Any) -> Any:
        ways.append(way := Way())
        sys.setprofile(way.trace)
        try:
            return process(*arguments)
        finally:
            sys.setprofile(None)

    harness = Harness(STREAM)
    harness.rule(rule)
    monkeypatch.setattr(Evaluator, "process", traced)
    for number, (time, status) in enumerate((("00:00:00", "failed"), ("00:00:30", "ok"), ("03:00:00", "failed"))):
        harness.events([{"id": str(number), "at": f"2026-03-01T{time}Z", "customer": 1, "status": status}])
        if harness.alerts:
            return ways[-1]
    raise AssertionError("no alert was raised")


@pytest.mark.parametrize(
    ("kind", "files", "changes"),
    [
        ({**COUNT, "window": "1 hour"}, 12, 50),
        ({**COUNT, "window": {"tumbling": "10 minutes"}}, 13, 56),
        ({**COUNT, "window": {"sliding": "10 minutes", "slide": "5 minutes"}}, 13, 60),
        ({**COUNT, "window": {"session": "5 minutes"}}, 13, 51),
        ({**RULE, "sequence": {"within": "1 hour", "steps": STEPS}}, 16, 61),
    ],
    ids=["lookback", "tumbling", "sliding", "session", "sequence"],
)
def test_an_event_passes_few_files_on_its_way_to_an_alert(
    kind: dict[str, Any], files: int, changes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    way = walk(kind, monkeypatch)
    assert len(way.files) <= files, sorted(way.files)
    assert way.changes <= changes
