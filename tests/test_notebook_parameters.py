"""Parameters of notebooks: from their own cell, from the environment, from the widgets of Databricks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from lookback import notebook
from lookback.core.errors import RuleError, SetupError
from lookback.core.streams import Stream

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
MOST_LINES = 70


class Widgets:
    """What Databricks has: `text` makes a widget unless the job has set it, `get` gives its text."""

    def __init__(self, **job: str) -> None:
        self._values, self.made = dict(job), list[str]()

    def text(self, name: str, default: str) -> None:
        assert isinstance(default, str)
        self.made.append(name)
        self._values.setdefault(name, default)

    def get(self, name: str) -> str:
        return self._values[name]


@pytest.fixture
def databricks(monkeypatch: pytest.MonkeyPatch):
    """Puts a `dbutils` among the notebook's own names, as Databricks does."""

    def use(**job: str) -> Widgets:
        widgets = Widgets(**job)
        shell = SimpleNamespace(user_ns={"dbutils": SimpleNamespace(widgets=widgets)})
        monkeypatch.setattr("IPython.core.getipython.get_ipython", lambda: shell)
        return widgets

    return use


def test_without_databricks_the_values_of_the_cell_are_taken():
    given = notebook.parameters(root="../lakehouse", minutes=0.5, events=50_000, publish=False)
    assert vars(given) == {"root": "../lakehouse", "minutes": 0.5, "events": 50_000, "publish": False}


def test_the_environment_goes_before_the_cell_and_takes_its_types(monkeypatch: pytest.MonkeyPatch):
    for name, value in {"ROOT": "there", "MINUTES": "2", "EVENTS": "10", "PUBLISH": "True", "OTHER": "x"}.items():
        monkeypatch.setenv(f"LOOKBACK_PARAM_{name}", value)
    given = notebook.parameters(root="../lakehouse", minutes=0.5, events=50_000, publish=False, note="")
    assert vars(given) == {"root": "there", "minutes": 2.0, "events": 10, "publish": True, "note": ""}
    assert isinstance(given.minutes, float)


def test_on_databricks_widgets_are_made_and_go_before_everything(databricks: Any, monkeypatch: pytest.MonkeyPatch):
    widgets = databricks(minutes="0", mode="continuous")
    monkeypatch.setenv("LOOKBACK_PARAM_MODE", "from the environment")
    given = notebook.parameters(mode="once", minutes=1.5, publish=False, stream="transactions")
    assert widgets.made == ["mode", "minutes", "publish", "stream"]
    assert vars(given) == {"mode": "continuous", "minutes": 0.0, "publish": False, "stream": "transactions"}


def test_neither_spark_nor_the_sdk_of_databricks_is_imported_with_the_module():
    # The one takes seconds to start, the other looks for a workspace over the network, for minutes.
    code = "import lookback.notebook, sys; print([n for n in sys.modules if n.startswith(('databricks', 'pyspark'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("default", "text", "message"),
    [
        (False, "perhaps", "parameter it must be true or false, got 'perhaps'"),
        (3, "3.5", "parameter it must be a whole number, got '3.5'"),
        (3.0, "many", "parameter it must be a number, got 'many'"),
    ],
)
def test_a_text_that_does_not_fit_is_refused(default: Any, text: str, message: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOOKBACK_PARAM_IT", text)
    with pytest.raises(SetupError, match=re.escape(message)):
        notebook.parameters(it=default)


STREAM = Stream.from_dict(
    {
        "stream": "tx",
        "event_id": "id",
        "event_time": "at",
        "fields": {"id": "bigint", "at": "timestamp", "k": "string", "amount": "decimal(18,2)"},
        "source": {"format": "csv", "path": "samples/tx.csv"},
    }
)
FORM = {
    "rule_file": "", "rule_id": "r", "description": "", "severity": "low", "group_by": " k , id", "where": "",
    "window": "1 hour", "measures": "total: sum(amount); n: count(*) filter (where amount > 1)", "when": "n > 1",
    "message": "",
}  # fmt: skip


def workspace(conf: Path, rules: Any = None) -> Any:
    return SimpleNamespace(stream=STREAM, streams={"tx": STREAM}, conf=conf, rules=rules)


def test_a_form_becomes_a_document(tmp_path: Path):
    assert notebook.rule_form(workspace(tmp_path), SimpleNamespace(**FORM)) == {
        "rule_id": "r", "stream": "tx", "severity": "low", "group_by": ["k", "id"], "window": "1 hour",
        "measures": {"total": "sum(amount)", "n": "count(*) filter (where amount > 1)"}, "when": "n > 1",
    }  # fmt: skip


def test_a_rule_file_is_found_beside_the_streams(tmp_path: Path):
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules" / "mine.yml").write_text("rule_id: mine\n")
    form = SimpleNamespace(**{**FORM, "rule_file": "mine.yml"})
    assert notebook.rule_form(workspace(tmp_path), form) == {"rule_id": "mine"}


def test_what_is_wrong_with_a_rule_is_shown_place_by_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    from lookback.spark.rules import RulesTable

    place: Any = None
    document = {
        **notebook.rule_form(workspace(tmp_path), SimpleNamespace(**FORM)),
        "when": "n > 1 and x = 2",
        "severity": "?",
    }
    with pytest.raises(RuleError):
        notebook.check_rule(workspace(tmp_path, RulesTable(place, {"tx": STREAM})), document)
    shown = capsys.readouterr().out
    assert "severity" in shown
    assert "when" in shown
    assert "must be one of low, medium, high, critical" in shown


def test_a_relative_source_is_looked_for_beside_conf(tmp_path: Path):
    place = workspace(tmp_path / "conf")
    assert notebook._source_path(place, "") == str(tmp_path / "samples/tx.csv")
    assert notebook._source_path(place, "/data/x.csv") == "/data/x.csv"
    assert notebook._source_path(place, "s3://bucket/x") == "s3://bucket/x"
    assert (
        notebook._format(place, "", ""),
        notebook._format(place, "x", ""),
        notebook._format(place, "x", "json"),
    ) == (
        "csv",
        None,
        "json",
    )


def test_one_file_cannot_be_watched(tmp_path: Path):
    file = tmp_path / "events.csv"
    file.write_text("id\n")
    with pytest.raises(SetupError, match="watches a folder"):
        notebook.ingest_files(workspace(tmp_path), str(file), mode="continuous")


def test_catalog_and_schema_go_together_and_the_mode_is_one_of_two():
    with pytest.raises(SetupError, match="go together"):
        notebook.open_workspace("root", catalog="main")
    with pytest.raises(SetupError, match="once or continuous, got 'twice'"):
        notebook._mode("twice")


class Failing:
    """An evaluation that brings two reports, then an interrupt of the cell or a failure."""

    def __init__(self, error: type[BaseException] | None) -> None:
        self.reports: list[Any] = []
        self.error, self.stopped, self.polls = error, False, 0

    def start(self) -> None:
        pass

    @property
    def running(self) -> bool:
        self.polls += 1
        if self.error is KeyboardInterrupt and self.polls == 2:
            raise KeyboardInterrupt
        return self.polls < 3

    def stop(self) -> None:
        self.stopped = True
        if self.error is ValueError:
            raise ValueError("the query failed")


def test_a_watched_evaluation_is_stopped_at_its_end_and_at_an_interrupt(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    monkeypatch.setattr("lookback.live._REFRESH_SECONDS", 0.0)
    for error in (None, KeyboardInterrupt):
        evaluation: Any = Failing(error)
        notebook.watch(evaluation)
        assert evaluation.stopped
    assert "ended; no batch yet" in capsys.readouterr().out
    failed: Any = Failing(ValueError)
    with pytest.raises(ValueError, match="the query failed"):
        notebook.watch(failed)


def test_what_is_shown_is_escaped():
    from lookback.display import text

    assert text("<script>")._repr_html_() == "<p>&lt;script&gt;</p>"
    assert "<b>" not in pd.DataFrame({"message": ["<b>"]}).to_html()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_thin_and_documents_its_parameters(path: Path):
    document = json.loads(path.read_text(encoding="utf-8"))
    assert (document["nbformat"], document["nbformat_minor"]) == (4, 5)
    code = ["".join(cell["source"]) for cell in document["cells"] if cell["cell_type"] == "code"]
    assert sum(len(source.splitlines()) for source in code) < MOST_LINES
    (tagged,) = [c for c in document["cells"] if "parameters" in c["metadata"].get("tags", [])]
    names = re.findall(r"^(\w+) = ", "".join(tagged["source"]), re.MULTILINE)
    text = "".join("".join(cell["source"]) for cell in document["cells"] if cell["cell_type"] == "markdown")
    for name in names:
        assert f"| `{name}` |" in text
        assert f"{name}={name}" in "".join(code)
    assert len({cell["id"] for cell in document["cells"]}) == len(document["cells"])
