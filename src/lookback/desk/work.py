"""The work of a desk: one piece at a time, the buttons that start it, and the status line with its outcome."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lookback.desk import parts
from lookback.desk.running import RunningEvaluation
from lookback.verbs import Progress

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Work:
    """The work of a desk, with its status line, its cancel button and the last piece of work (run), if any.

    While something runs, the buttons made here are disabled and the cancel button is enabled.
    """

    def __init__(self, spark: SparkSession | None) -> None:
        self.status = parts.Status()
        self.run: RunningEvaluation | None = None
        self.cancel_button = parts.make_button("Cancel", self.cancel, "Cancel what is running", "lookback-cancel")
        self.cancel_button.disabled = True
        self._spark, self._buttons = spark, list[Any]()

    def make_button(self, title: str, act: Callable[[], object], hint: str, name: str) -> Any:
        """Makes a button. An error of its action is shown as a sentence."""

        def press() -> None:
            with self.status.catching():
                act()

        button = parts.make_button(title, press, hint, name)
        self._buttons.append(button)
        return button

    def start(
        self, title: str, work: Callable[[Progress], Any], show: Callable[[Any], None], *, is_lasting: bool = False
    ) -> None:
        """Starts work in a separate thread. `show` gets its result. For `is_lasting` see `RunningEvaluation`."""
        if self.run is not None and self.run.is_running:
            self.status.show("Something is still running; cancel it first.", "problem")
            return

        def finish(act: Callable[[], None]) -> None:
            try:
                act()
            finally:
                self._set_running(False)

        then = "`lookback rules list` shows whether it was published" if is_lasting else "nothing is running"
        self._set_running(True)
        self.status.show(f"{title} ...")
        self.run = RunningEvaluation(
            self._spark,
            work,
            is_lasting=is_lasting,
            on_line=lambda line: self.status.show(f"{title}: {line}"),
            on_done=lambda result: finish(lambda: show(result)),
            on_failure=lambda sentence: finish(lambda: self.status.show(sentence, "problem")),
            on_cancelled=lambda: finish(lambda: self.status.show(f"{title} was cancelled; {then}.", "done")),
        ).start()

    def cancel(self) -> None:
        """Cancels the running work, if any."""
        if self.run is not None and self.run.is_running:
            self.status.show("Cancelling ...")
            self.run.cancel()

    def _set_running(self, is_running: bool) -> None:
        for button in self._buttons:
            button.disabled = is_running
        self.cancel_button.disabled = not is_running
