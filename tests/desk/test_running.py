"""Work in a thread: its result, its failure, and its cancellation, without Spark."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from lookback.core.errors import SetupError
from lookback.desk.running import RunningEvaluation


class Seen:
    def __init__(self) -> None:
        self.lines = list[str]()
        self.ends = list[Any]()

    def run(self, work: Callable[[Callable[[str], None]], Any], is_lasting: bool = False) -> RunningEvaluation:
        return RunningEvaluation(
            None,
            work,
            on_line=self.lines.append,
            on_done=lambda result: self.ends.append(("done", result)),
            on_failure=lambda sentence: self.ends.append(("failed", sentence)),
            on_cancelled=lambda: self.ends.append("cancelled"),
            is_lasting=is_lasting,
        ).start()


def test_the_result_and_the_lines_come():
    seen = Seen()

    def work(show: Callable[[str], None]) -> int:
        show("half")
        return 7

    assert seen.run(work).wait(10)
    assert (seen.lines, seen.ends) == (["half"], [("done", 7)])


@pytest.mark.parametrize(
    ("error", "sentence"), [(SetupError("do this"), "do this"), (ValueError("first\nsecond"), "first")]
)
def test_a_failure_is_a_sentence(error: Exception, sentence: str):
    seen = Seen()

    def work(show: Callable[[str], None]) -> None:
        raise error

    assert seen.run(work).wait(10)
    assert seen.ends == [("failed", sentence)]


@pytest.mark.parametrize("fails", [False, True])
def test_after_a_cancellation_only_that_is_told(fails: bool):
    seen, begun, gone = Seen(), threading.Event(), threading.Event()

    def work(show: Callable[[str], None]) -> int:
        begun.set()
        assert gone.wait(10)
        show("too late")
        if fails:
            raise ValueError("cancelled job")
        return 7

    run = seen.run(work)
    assert begun.wait(10)
    run.cancel()
    run.cancel()
    assert run.is_running
    gone.set()
    assert run.wait(10)
    assert not run.is_running
    assert (seen.lines, seen.ends) == ([], ["cancelled"])


def test_what_was_written_in_spite_of_a_cancellation_is_told():
    seen, begun, gone = Seen(), threading.Event(), threading.Event()

    def work(show: Callable[[str], None]) -> int:
        begun.set()
        assert gone.wait(10)
        return 7

    run = seen.run(work, is_lasting=True)
    assert begun.wait(10)
    run.cancel()
    gone.set()
    assert run.wait(10)
    assert seen.ends == [("done", 7)]
