"""Parameters of notebooks: from their own cell, from the environment, from the widgets of Databricks."""

from __future__ import annotations

import ast
import datetime as dt
import importlib.util
import inspect
import json
import re
import runpy
import subprocess
import sys
from collections import deque
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pandas as pd
import pyarrow as pa
import pytest

from lookback import notebook
from lookback.core.errors import RuleError, SetupError
from lookback.core.explaining.evidence import Explanation, StepEvidence
from lookback.core.streams.declaration import Stream
from lookback.notebook import streams
from lookback.parameters import check_mode
from lookback.spark.batches.sink import BatchReport
from lookback.views import pictures

inject = runpy.run_path(str(Path(__file__).parents[2] / "dev/tools/pictures.py"))["inject"]
# More do not fit on a screen beside the cells.
MOST_PARAMETERS = 12
NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


class Widgets:
    """The widgets of Databricks: a widget is made unless the job has set it, and its value is always a string."""

    def __init__(self, **job: str) -> None:
        self._values, self.made, self.lists = dict(job), list[str](), dict[str, list[str]]()

    def text(self, name: str, defaultValue: str, label: str | None = None) -> None:  # noqa: N803 - as Databricks has it
        assert isinstance(defaultValue, str)
        self.made.append(name)
        self._values.setdefault(name, defaultValue)

    def dropdown(self, name: str, defaultValue: str, choices: list[str], label: str | None = None) -> None:  # noqa: N803
        assert defaultValue in choices
        self.lists[name] = choices
        self.text(name, defaultValue)

    def get(self, name: str) -> str:
        if name not in self._values:
            raise KeyError(f"InputWidgetNotDefined: No input widget named {name} is defined")
        return self._values[name]


def test_the_widgets_of_these_tests_take_what_those_of_databricks_take():
    # Read, not imported: importing it looks for a workspace.
    sdk = importlib.util.find_spec("databricks.sdk")
    assert sdk is not None
    assert sdk.origin is not None
    stub = ast.parse((Path(sdk.origin).parent / "runtime/dbutils_stub.py").read_text(encoding="utf-8"))
    (widgets,) = (node for node in ast.walk(stub) if isinstance(node, ast.ClassDef) and node.name == "widgets")
    theirs = {
        node.name: [each.arg for each in node.args.args] for node in widgets.body if isinstance(node, ast.FunctionDef)
    }
    for name in ("text", "dropdown", "get"):
        assert list(inspect.signature(getattr(Widgets(), name)).parameters) == theirs[name]


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
    given = notebook.parameters({"root": "../lakehouse", "minutes": 0.5, "events": 50_000, "publish": False})
    assert vars(given) == {"root": "../lakehouse", "minutes": 0.5, "events": 50_000, "publish": False}


def test_the_environment_goes_before_the_cell_and_takes_its_types(monkeypatch: pytest.MonkeyPatch):
    for name, value in {"ROOT": "there", "MINUTES": "2", "EVENTS": "10", "PUBLISH": "True", "OTHER": "x"}.items():
        monkeypatch.setenv(f"LOOKBACK_PARAM_{name}", value)
    cell = {"root": "../lakehouse", "minutes": 0.5, "events": 50_000, "publish": False, "note": ""}
    given = notebook.parameters(cell)
    assert vars(given) == {"root": "there", "minutes": 2.0, "events": 10, "publish": True, "note": ""}
    assert isinstance(given.minutes, float)


def test_on_databricks_widgets_are_made_and_go_before_everything(databricks: Any, monkeypatch: pytest.MonkeyPatch):
    widgets = databricks(minutes="0", mode="continuous")
    monkeypatch.setenv("LOOKBACK_PARAM_MODE", "from the environment")
    cell = {"mode": "once", "minutes": 1.5, "publish": False, "stream": "transactions"}
    given = notebook.parameters(cell)
    assert widgets.made == ["mode", "minutes", "publish", "stream"]
    assert vars(given) == {"mode": "continuous", "minutes": 0.0, "publish": False, "stream": "transactions"}


def test_a_widget_is_a_list_where_its_values_are_one(databricks: Any):
    widgets = databricks()
    conf = str(NOTEBOOKS[0].parents[1] / "conf")
    cell = {"conf": conf, "stream": "transactions", "mode": "once", "publish": False, "severity": "?", "note": ""}
    notebook.parameters(cell, mode=["once", "continuous"], severity=["low", "high"])
    streams = widgets.lists.pop("stream")
    assert "transactions" in streams
    assert "logins" in streams
    # A default that is not in the list would be refused by Databricks: a text, and the message of whoever reads it.
    assert widgets.lists == {"mode": ["once", "continuous"], "publish": ["false", "true"]}
    assert widgets.made == list(cell)


def test_parameters_are_the_texts_numbers_and_booleans_of_a_notebook(databricks: Any):
    names = {
        "__name__": "__main__",
        "_i1": "root = 1",
        "In": ["x"],
        "notebook": notebook,
        "root": "here",
        "spark": object(),
    }
    assert vars(notebook.parameters(names)) == {"root": "here"}


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
        notebook.parameters({"it": default})


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
    "message": "", "parameters": "",
}  # fmt: skip


def workspace(conf: Path, rules: Any = None) -> Any:
    return SimpleNamespace(stream=STREAM, streams={"tx": STREAM}, conf=conf, rules=rules)


def test_a_form_becomes_a_document(tmp_path: Path):
    assert notebook.rule_form(workspace(tmp_path), SimpleNamespace(**FORM)) == {
        "rule_id": "r", "stream": "tx", "severity": "low", "group_by": ["k", "id"], "window": "1 hour",
        "measures": {"total": "sum(amount)", "n": "count(*) filter (where amount > 1)"}, "when": "n > 1",
    }  # fmt: skip


def test_a_form_takes_parameters_as_numbers_and_texts(tmp_path: Path):
    form = SimpleNamespace(**{**FORM, "parameters": "least: 2; share: 0.5; span: 3 hours", "window": ":span"})
    document = notebook.rule_form(workspace(tmp_path), form)
    assert document["parameters"] == {"least": 2, "share": 0.5, "span": "3 hours"}


def test_what_is_given_replaces_that_part_of_the_written_rule(tmp_path: Path):
    form = SimpleNamespace(**dict.fromkeys(FORM, ""))
    written = "rule_id: mine\ngroup_by: [k]\nwindow: 1 hour\nmeasures: {n: count(*)}\nwhen: n > 1\n"
    document = notebook.rule_form(workspace(tmp_path), form, written)
    assert document == {
        "rule_id": "mine", "stream": "tx", "group_by": ["k"], "window": "1 hour", "measures": {"n": "count(*)"}, "when": "n > 1",
    }  # fmt: skip
    form.when, form.measures = "m > 2", "m: sum(amount)"
    changed = notebook.rule_form(workspace(tmp_path), form, written)
    assert changed == {**document, "when": "m > 2", "measures": {"m": "sum(amount)"}}


def test_a_rule_is_a_file_or_one_that_is_published(tmp_path: Path):
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules" / "mine.yml").write_text("rule_id: mine\n")
    rows = [SimpleNamespace(rule_id="other", document={"rule_id": "other"})]
    place = workspace(tmp_path, SimpleNamespace(rows=lambda: rows))
    assert notebook.open_rule(place, "mine.yml") == {"rule_id": "mine"}
    assert notebook.open_rule(place, "other") == {"rule_id": "other"}
    with pytest.raises(
        SetupError, match="rule 'none' is neither a file in conf/rules nor a published rule; set rule to"
    ):
        notebook.open_rule(place, "none")


def test_a_parameter_for_jobs_alone_has_no_widget_and_keeps_its_default_unless_given(databricks: Any):
    widgets = databricks()
    assert vars(notebook.parameters({"root": "here"}, also={"desk": True, "when": ""})) == {
        "root": "here", "desk": True, "when": "",
    }  # fmt: skip
    assert widgets.made == ["root"]
    databricks(desk="false")
    assert notebook.parameters({"root": "here"}, also={"desk": True}).desk is False


@pytest.mark.parametrize("name", ["02_author_rules", "04_review_alerts"])
def test_the_parameters_of_a_notebook_with_a_desk_are_folded(name: str):
    cells = nbformat.read(NOTEBOOKS[0].parent / f"{name}.ipynb", as_version=4).cells
    at = next(n for n, cell in enumerate(cells) if cell.source == "## Parameters")
    assert cells[at].metadata["jp-MarkdownHeadingCollapsed"]
    folded = next(n for n, cell in enumerate(cells) if n > at and cell.source.startswith("## "))
    code = [cell for cell in cells[at:folded] if cell.cell_type == "code"]
    assert len(code) == 2
    assert all(cell.metadata["jupyter"]["source_hidden"] for cell in code)


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
    assert "must be one of info, low, medium, high, critical" in shown


TRIED = {
    "lookback": {"window": "1 hour", "measures": {"n": "count(*)"}, "when": "n >= 2"},
    "revise": {"window": "1 hour", "measures": {"n": "count(*)"}, "when": "n = 1", "late": "revise"},
    "tumbling": {"window": {"tumbling": "1 hour"}, "measures": {"n": "count(*)"}},
    "sliding": {"window": {"sliding": "2 hours", "slide": "1 hour"}, "measures": {"n": "count(*)"}},
    "session": {"window": {"session": "20 minutes"}, "measures": {"total": "sum(amount)"}},
    "sequence": {"sequence": {"within": "2 hours", "steps": [{"name": "a", "where": "amount > 1", "at_least": 2}]}},
    "absence": {
        "sequence": {
            "within": "1 hour",
            "steps": [
                {"name": "a", "where": "amount > 1"},
                {"name": "b", "absent": "amount > 1", "within": "20 minutes"},
            ],
        }
    },
}


@pytest.mark.parametrize("kind", TRIED)
def test_a_rule_of_any_kind_can_be_tried(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    start = dt.datetime(2024, 3, 4, tzinfo=dt.timezone.utc)
    given = [
        {"id": at, "at": start + dt.timedelta(minutes=30 * at - 70 * (at == 5)), "k": "x", "amount": Decimal("2.00"), "arrival": at}
        for at in range(1, 9)
    ]  # fmt: skip
    monkeypatch.setattr(
        "lookback.spark.tables.history.read_recent_events", lambda tables, stream, limit: pa.Table.from_pylist(given)
    )
    place = workspace(tmp_path)
    place.tables = None

    trial = notebook.try_rule(place, {"rule_id": "r", "stream": "tx", "group_by": ["k"], **TRIED[kind]})

    assert len(trial.alerts) >= 1
    assert (len(trial.events), len(trial.errors)) == (8, 0)
    standing = trial.final_alerts
    assert "retracted" not in set(standing["verdict"])
    assert ("retracted" in set(trial.alerts["verdict"])) == (len(standing) < trial.alerts["alert_id"].nunique())
    shown = capsys.readouterr().out
    assert "a picture" in shown
    assert "raised" in shown


def test_remarks_on_a_rule_are_shown_and_stop_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    given = [
        {
            "id": 1,
            "at": dt.datetime(2024, 3, 4, tzinfo=dt.timezone.utc),
            "k": "X",
            "amount": Decimal("2.00"),
            "arrival": 1,
        }
    ]
    recent = pa.Table.from_pylist(given)
    monkeypatch.setattr("lookback.spark.tables.history.read_recent_events", lambda tables, stream, limit: recent)
    from lookback.spark.rules import RulesTable

    nowhere: Any = None
    place = workspace(tmp_path, RulesTable(nowhere, {"tx": STREAM}))
    place.tables = nowhere
    rule = {
        "rule_id": "r", "stream": "tx", "group_by": ["k"], "window": "1 hour", "where": "k = 'x'",
        "measures": {"usual": "avg(amount)"}, "when": "amount > 3 * usual",
    }  # fmt: skip

    notebook.check_rule(place, rule)
    shown = capsys.readouterr().out
    assert "amount is compared with usual" in shown
    assert "write an alert that you want and a near miss" in shown

    notebook.try_rule(place, rule)
    assert "'x' was never seen in k; did you mean 'X', of 1 event?" in capsys.readouterr().out


def test_an_explanation_of_a_sequence_is_shown_step_by_step(capsys: pytest.CaptureFixture[str]):
    time = pd.Timestamp("2024-03-04", tz="UTC")
    alert = {
        "alert_id": "1f", "revision": 0, "rule_id": "quiet", "rule_version": 2, "severity": "low", "message": "", "key": {"k": "x"},
        "verdict": "retracted", "event_time": time, "window_start": time,
    }  # fmt: skip
    timeline = {
        "event_time": [time], "event_id": ["7"], "value": [1.0], "running": [None], "in_window": [True],
        "is_alert": [True], "step": ["seen"], "fits": [""], "until": [False],
    }  # fmt: skip
    steps = (
        StepEvidence("seen", "true", "an event of any kind", pd.DataFrame({"id": [7]})),
        StepEvidence("silent", "true", "no event of any kind", pd.DataFrame({"id": []}), absent=True),
    )
    windows = pd.DataFrame({"window_start": [time], "window_end": [time], "name": ["steps"]})
    explanation = Explanation(
        pd.DataFrame(timeline), alert=alert, rule={"author": "kim"}, sentence="Raised when it is quiet.", limits={}, kind="sequence",
        notes=("Retracted: 8 came after all.",), steps=steps, windows=windows, missing=1,
    )  # fmt: skip

    notebook.show_explanation(explanation)

    shown = capsys.readouterr().out
    for words in (
        "Rule quiet, version 2 by kim. Raised when it is quiet.",
        "Key: k = x. Retracted: 8 came after all. The steps, recomputed from the events at that time, match those of",
        "1 of its events have been deleted since",
        "Step seen, an event of any kind: 1 event, in the order taken",
        "Step silent, no event of any kind: 0 events came",
        "a picture",
    ):
        assert words in shown


def test_a_relative_source_is_looked_for_beside_conf(tmp_path: Path):
    place = workspace(tmp_path / "conf")
    assert streams._find_source(place, "") == str(tmp_path / "samples/tx.csv")
    assert streams._find_source(place, "/data/x.csv") == "/data/x.csv"
    assert streams._find_source(place, "s3://bucket/x") == "s3://bucket/x"
    assert (
        streams._find_format(place, "", ""),
        streams._find_format(place, "x", ""),
        streams._find_format(place, "x", "json"),
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
        check_mode("twice", "once", "continuous")


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

    def wait(self, seconds: float) -> bool:
        return False

    def stop(self) -> None:
        self.stopped = True
        if self.error is ValueError:
            raise ValueError("the query failed")


class Hour:
    """An evaluation that runs for an hour by the clock of `lookback.views.live` and ends a batch every second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reports: deque[Any] = deque(maxlen=1_000)
        self.seconds, self.asked = 0.0, 0
        monkeypatch.setattr("lookback.views.live.time", SimpleNamespace(monotonic=lambda: self.seconds))

    def start(self) -> None:
        pass

    @property
    def running(self) -> bool:
        return self.seconds < 3_600

    def wait(self, seconds: float) -> bool:
        for second in range(int(self.seconds) + 1, int(self.seconds + seconds) + 1):
            finished = dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc) + dt.timedelta(seconds=second)
            self.reports.append(
                BatchReport(
                    batch_id=second,
                    events=10,
                    alerts={"burst": 1},
                    late=0,
                    failed=0,
                    log=(),
                    watermark=0,
                    arrival=second,
                    state_rows=5,
                    state_bytes_written=9,
                    rules=1,
                    evaluate_ms=1,
                    run_ms=2,
                    write_ms=3,
                    shards_in_memory=1,
                    finished_at=finished,
                )
            )
        self.seconds += seconds
        return not self.running

    def commits(self) -> dict[int, dt.datetime]:
        self.asked += 1
        return {each.arrival: each.finished_at for each in self.reports}

    def stop(self) -> None:
        pass


def test_an_hour_of_a_job_is_a_few_lines_and_one_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr("lookback.views.display._find_display", lambda: shown.append)
    hour: Any = Hour(monkeypatch)
    notebook.watch(hour, commits=hour.commits, view="lines")
    drawn = [each for each in shown if "data:image/png" in each._repr_html_()]
    assert drawn == shown[-1:]
    # A line every 30 seconds, and one at the end.
    assert len(shown) - 1 == 3_600 / 30 + 1
    assert sum(len(each._repr_html_()) for each in shown[:-1]) < 50_000
    assert "ended; 3,600 batches; 36,000 events" in repr(shown[-2])
    assert hour.asked <= 3_600 / 30 + 1


def test_a_live_view_asks_for_the_times_of_commits_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr("lookback.views.display._find_display", lambda: shown.append)
    drawn = pictures.plot_evaluation([])
    monkeypatch.setattr("lookback.views.pictures.plot_evaluation", lambda *_: drawn)
    monkeypatch.setattr("lookback.views.live.make_image_tag", lambda _: "<img/>")
    hour: Any = Hour(monkeypatch)
    notebook.watch(hour, minutes=5, commits=hour.commits, view="live")
    assert len(shown) == 300 + 1
    assert hour.asked == 300 / 10 + 1


@pytest.mark.parametrize(
    ("shell", "is_live"), [(None, False), (SimpleNamespace(), False), (SimpleNamespace(kernel=1), True)]
)
def test_a_picture_is_live_only_where_a_front_end_shows_it(
    monkeypatch: pytest.MonkeyPatch, shell: Any, is_live: bool
) -> None:
    monkeypatch.setattr("IPython.core.getipython.get_ipython", lambda: shell)
    cleared: list[bool] = []
    monkeypatch.setattr("lookback.views.live.clear", lambda: cleared.append(True))
    monkeypatch.setattr("lookback.views.display._find_display", lambda: lambda _: None)
    evaluation: Any = Failing(None)
    notebook.watch(evaluation)
    assert bool(cleared) is is_live


@pytest.mark.parametrize(
    ("shell", "runtime", "expected"),
    [
        (None, "", False),  # a script
        (SimpleNamespace(), "", False),  # IPython's own shell
        (SimpleNamespace(kernel=SimpleNamespace(_allow_stdin=False)), "", False),  # nbmake
        (SimpleNamespace(kernel=SimpleNamespace(_allow_stdin=True)), "", True),  # JupyterLab
        (SimpleNamespace(kernel=SimpleNamespace(_allow_stdin=False)), "17.3", True),  # Databricks asks nobody
        (SimpleNamespace(kernel=SimpleNamespace()), "", True),  # a kernel that does not tell
    ],
)
def test_a_desk_is_shown_where_a_person_may_be(
    monkeypatch: pytest.MonkeyPatch, shell: Any, runtime: str, expected: bool
) -> None:
    from lookback.views.display import has_person

    monkeypatch.setattr("IPython.core.getipython.get_ipython", lambda: shell)
    monkeypatch.delenv("DATABRICKS_RUNTIME_VERSION", raising=False)
    if runtime:
        monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", runtime)
    assert has_person() is expected


def test_a_view_is_one_of_three() -> None:
    evaluation: Any = Failing(None)
    with pytest.raises(SetupError, match="view must be auto, live or lines, got 'screen'"):
        notebook.watch(evaluation, view="screen")


def test_a_watched_evaluation_is_stopped_at_its_end_and_at_an_interrupt(capsys: Any):
    for error in (None, KeyboardInterrupt):
        evaluation: Any = Failing(error)
        notebook.watch(evaluation)
        assert evaluation.stopped
    assert "ended; no batch yet" in capsys.readouterr().out
    failed: Any = Failing(ValueError)
    with pytest.raises(ValueError, match="the query failed"):
        notebook.watch(failed)


def test_a_picture_says_what_it_is_of(capsys: pytest.CaptureFixture[str]):
    from lookback.views.display import make_image_tag, show
    from lookback.views.pictures import plot_events_over_time

    figure = plot_events_over_time([], 'a < "b" $c$')
    assert make_image_tag(figure).startswith('<img alt="a &lt; &quot;b&quot; $c$" src="data:image/png;base64,')
    show(figure)
    assert capsys.readouterr().out == 'a picture: a < "b" $c$\n'


def test_what_is_shown_is_escaped():
    from lookback.views.display import text

    assert text("<script>")._repr_html_() == "<p>&lt;script&gt;</p>"
    assert "<b>" not in pd.DataFrame({"message": ["<b>"]}).to_html()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_thin_and_documents_its_parameters(path: Path):
    document = json.loads(path.read_text(encoding="utf-8"))
    assert (document["nbformat"], document["nbformat_minor"]) == (4, 5)
    code = ["".join(cell["source"]) for cell in document["cells"] if cell["cell_type"] == "code"]
    (tagged,) = [c for c in document["cells"] if "parameters" in c["metadata"].get("tags", [])]
    names = re.findall(r"^(\w+) = ", "".join(tagged["source"]), re.MULTILINE)
    text = "".join("".join(cell["source"]) for cell in document["cells"] if cell["cell_type"] == "markdown")
    assert 0 < len(names) <= MOST_PARAMETERS
    for name in names:
        assert f"| `{name}` |" in text
    # A text or number that another cell keeps in a name of its own would be a parameter when the notebook is run again.
    body = ast.parse("\n".join(code)).body
    assigned = [each for each in body if isinstance(each, ast.Assign) and isinstance(each.value, ast.Constant)]
    assert [ast.unparse(each.targets[0]) for each in assigned] == names
    assert len({cell["id"] for cell in document["cells"]}) == len(document["cells"])


def list_declared(document: Any) -> list[str]:
    """The names in the cell of parameters."""
    (tagged,) = [cell for cell in document.cells if "parameters" in cell.metadata.get("tags", [])]
    return re.findall(r"^(\w+) = ", tagged.source, re.MULTILINE)


def parameters_of(document: Any) -> dict[str, Any]:
    """Runs the cells of a notebook up to where its parameters are read; these."""
    source = "\n".join(cell.source for cell in document.cells if cell.cell_type == "code")
    body = ast.parse(source).body
    (read,) = (
        at for at, each in enumerate(body) if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "p"
    )
    names: dict[str, Any] = {}
    exec(compile(ast.Module(body[: read + 1], []), "notebook", "exec"), names)
    return vars(names["p"])


def other_than(default: Any) -> Any:
    return not default if isinstance(default, bool) else default + 7 if not isinstance(default, str) else f"{default} x"


@pytest.mark.parametrize("way", ["cell", "papermill", "widgets", "environment"])
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_parameter_reaches_the_notebook(path: Path, way: str, databricks: Any, monkeypatch: pytest.MonkeyPatch):
    document = nbformat.read(path, as_version=4)
    expected = defaults = parameters_of(document)
    if way != "cell":
        expected = {name: other_than(default) for name, default in defaults.items()}
    if way == "papermill":
        inject(document, **expected)
    if way == "widgets":
        widgets = databricks(**{name: str(value) for name, value in expected.items()})
    if way == "environment":
        for name, value in expected.items():
            monkeypatch.setenv(f"LOOKBACK_PARAM_{name.upper()}", str(value))

    given = parameters_of(document)

    assert given == expected
    assert {name: type(value) for name, value in given.items()} == {name: type(each) for name, each in defaults.items()}
    if way == "widgets":
        # Those for jobs alone have no widget.
        assert widgets.made == list_declared(document)


def test_what_is_injected_stands_after_the_tagged_cell_and_alone_there():
    document = nbformat.read(NOTEBOOKS[0], as_version=4)
    before = [cell.source for cell in document.cells]
    tags = [cell.metadata.get("tags") for cell in document.cells]
    inject(document, root="it's \\ here", minutes=0.5)
    at = tags.index(["parameters"])
    assert document.cells[at + 1].source == '# Parameters\nroot = "it\'s \\\\ here"\nminutes = 0.5'
    assert document.cells[at + 1].metadata["tags"] == ["injected-parameters"]
    assert [cell.source for n, cell in enumerate(document.cells) if n != at + 1] == before
