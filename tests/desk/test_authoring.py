"""The desk of an author without a front end: fields are set and buttons clicked, as a browser does."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ipywidgets
import pytest
from widgets import TableReader, field, find, find_all, read_rows, walk

from lookback import notebook
from lookback.config import Settings, load_streams
from lookback.desk.authoring import Authoring
from lookback.desk.parts import make_text
from lookback.desk.rule.sliders import Sliders
from lookback.desk.rule.text import RuleText
from lookback.desk.rule.tuning import Tuning
from lookback.notebook import showing

ROOT = Path(__file__).parents[2]


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "conf", tmp_path / "conf", ignore=shutil.ignore_patterns("samples", "jobs"))
    return tmp_path / "conf"


def open_desk(conf: Path, rule: str = "") -> Authoring:
    streams = load_streams(conf)
    rules: Any = SimpleNamespace(streams=streams, tables=SimpleNamespace(spark=None))
    text = RuleText.read(conf / f"rules/{rule}.yml") if rule else None
    return Authoring(rules, streams["transactions"], Settings.local(str(conf.parent / "lakehouse"), str(conf)), text)


def note(desk: Authoring, place: str) -> str:
    shown = find(desk, f"field-{place}").children[1]
    return shown.value if shown.layout.display != "none" else ""


def findings(desk: Authoring) -> str:
    return " | ".join(cell for row in read_rows(find(desk, "findings").value) for cell in row)


def test_a_new_rule_is_written_by_the_form_alone(conf: Path):
    desk = open_desk(conf)
    field(desk, "rule-id").value = "many-small"
    field(desk, "group-by").value = ("customer_id",)
    field(desk, "where").value = "amount < 5"
    find(desk, "new-aggregate").value = "sum({})"
    assert "event_time" not in find(desk, "new-argument").options
    find(desk, "new-argument").value = "amount"
    find(desk, "add-measure").click()
    name, aggregate, *_ = find_all(desk, "measure-name")[1], find_all(desk, "measure-aggregate")[1]
    name.value, aggregate.value = "total", "max(amount)"
    field(desk, "when").value = "n >= :limit and total > 1"
    find_all(desk, "parameter-value")[0].value = "5"
    field(desk, "entities").value = ("customer_id", "terminal_id")
    field(desk, "tags").value = "attack.t1110  typology.card-testing"
    field(desk, "references").value = "https://example.org/a"
    field(desk, "runbook").value = "Call the customer"
    field(desk, "severity").value = "high"
    field(desk, "suppress").value = "1 hour"
    assert desk.checked.is_fine, desk.checked.problems
    assert desk.text.document == {
        "rule_id": "many-small", "stream": "transactions", "severity": "high", "group_by": ["customer_id"],
        "entities": ["customer_id", "terminal_id"], "tags": ["attack.t1110", "typology.card-testing"],
        "references": ["https://example.org/a"], "runbook": "Call the customer", "where": "amount < 5", "window": "1 hour", "measures": {"n": "count(*)", "total": "max(amount)"},
        "when": "n >= :limit and total > 1", "parameters": {"limit": 5}, "suppress": "1 hour", "message": "{n} events within an hour",
    }  # fmt: skip
    assert "Raised when n >= 5 and total > 1" in find(desk, "words").value
    assert find(desk, "yaml").children[0].children[0].value == desk.text.text
    find(desk, "save").click()
    assert (conf / "rules/many-small.yml").read_text() == desk.text.text
    assert desk.status.endswith("many-small.yml.")


def test_a_file_that_is_opened_and_saved_is_the_same_file(conf: Path):
    for file in sorted((conf / "rules").glob("*.yml"))[::4]:
        before = file.read_bytes()
        desk = open_desk(conf, file.stem)
        assert desk.save() == file
        assert file.read_bytes() == before


def test_problems_stand_below_their_fields_while_one_types(conf: Path):
    desk = open_desk(conf, "spend-against-usual")
    field(desk, "when").value = "amount > 4 * usual and know >= 10"
    assert "know" in note(desk, "when")
    assert findings(desk).startswith("line | place | what to do | ")
    field(desk, "where").value = "amount > 'x'"
    assert "cast one of them" in note(desk, "where")
    assert "know" in note(desk, "when")
    find(desk, "publish").click()
    assert desk.status == "Problem: fix 2 problems first, see Check"
    field(desk, "where").value = ""
    field(desk, "when").value = "amount > 4 * usual and known >= 10"
    assert (note(desk, "when"), note(desk, "where")) == ("", "")
    assert desk.text.text == (conf / "rules/spend-against-usual.yml").read_text()


def test_fields_that_few_rules_need_are_folded_until_one_has_a_problem(conf: Path):
    desk = open_desk(conf, "spend-against-usual")
    more, rare = find(desk, "more"), find(desk, "rare")
    assert rare.layout.display == "none"
    assert {"field-score", "field-late", "field-runbook"} <= {
        each._dom_classes[0].removeprefix("lookback-") for each in walk(rare) if each._dom_classes
    }
    more.value = True
    assert rare.layout.display == ""
    more.value = False
    assert rare.layout.display == "none"
    field(desk, "score").value = "many"
    assert note(desk, "score")
    assert rare.layout.display == ""


def test_each_field_of_the_form_explains_itself(conf: Path):
    desk = open_desk(conf, "spend-against-usual")
    controls = [each for each in walk(desk.widget) if isinstance(each, (ipywidgets.Text, ipywidgets.Textarea))]
    form = [each for each in controls if each in walk(find(desk, "form"))]
    assert len(form) > 15
    assert all(each.tooltip and each.placeholder == each.tooltip for each in form)


def test_the_check_is_in_the_half_next_to_the_form(conf: Path):
    desk = open_desk(conf, "spend-against-usual")
    shown = walk(find(desk, "yaml"))
    assert find(desk, "words") in shown
    assert find(desk, "findings") in shown


def test_the_yaml_and_the_form_follow_each_other(conf: Path):
    desk = open_desk(conf, "sensor-silent")
    yaml = find(desk, "yaml").children[0].children[0]
    assert find(desk, "sequence-note").layout.display == ""
    yaml.value = yaml.value.replace("severity: high", "severity: low").replace("5 minutes", "6 minutes")
    assert field(desk, "severity").value == "low"
    assert desk.text.document["sequence"]["within"] == "6 minutes"
    assert "tests[0]" in findings(desk)  # what the form has no field for is checked as well
    good = desk.text
    yaml.value = yaml.value + "\n  x: ["
    assert field(desk, "rule-id").disabled
    assert "is not YAML" in find(desk, "field-yaml").children[1].value
    find(desk, "save").click()
    assert desk.status.startswith("Problem: the YAML cannot be read")
    find(desk, "undo").click()
    assert desk.text is good
    assert not field(desk, "rule-id").disabled


def test_letters_typed_into_one_field_are_taken_back_together(conf: Path):
    desk = open_desk(conf, "large-payment")
    before = desk.text.text
    for length in range(1, 6):
        field(desk, "suppress").value = "1 day"[:length]
    field(desk, "severity").value = "low"
    find(desk, "undo").click()
    assert (field(desk, "suppress").value, field(desk, "severity").value) == ("1 day", RuleText(before).get("severity"))
    find(desk, "undo").click()
    assert desk.text.text == before
    find(desk, "undo").click()
    assert desk.status == "Nothing to undo."


def test_names_that_cannot_be_are_told_at_the_row(conf: Path):
    desk = open_desk(conf, "card-testing")
    name = find_all(desk, "measure-name")[0]
    name.value = ""
    assert "a name may have letters" in find_all(desk, "field-measures")[0].children[1].value
    name.value = "terminals"
    assert "measures.terminals already exists" in find_all(desk, "field-measures")[0].children[1].value
    name.value = "number"
    assert list(desk.text.document["measures"]) == ["number", "terminals", "largest", "last"]
    find_all(desk, "remove-measures")[0].click()
    assert list(desk.text.document["measures"]) == ["terminals", "largest", "last"]


def test_a_kind_brings_its_fields(conf: Path):
    desk = open_desk(conf)
    field(desk, "kind").value = "sliding"
    shown = [
        key
        for key in ("lookback", "sliding", "slide", "session", "offset")
        if find(desk, f"field-window-{key}").layout.display != "none"
    ]
    assert shown == ["sliding", "slide", "offset"]
    field(desk, "window-slide").value = "2 hours"
    assert "larger than the window" in note(desk, "window-slide")
    field(desk, "kind").value = "sequence"
    assert desk.text.document["sequence"]["steps"]
    assert find(desk, "field-when").layout.display == "none"


def test_a_file_of_another_rule_or_one_that_changed_is_not_written_over(conf: Path):
    desk = open_desk(conf)
    field(desk, "rule-id").value = "large-payment"
    find(desk, "save").click()
    assert "large-payment.yml already exists; tick" in desk.status
    desk = open_desk(conf, "large-payment")
    field(desk, "severity").value = "low"
    file = conf / "rules/large-payment.yml"
    file.write_text(file.read_text() + "# a colleague\n")
    find(desk, "save").click()
    assert "has changed since it was opened" in desk.status
    assert file.read_text().endswith("# a colleague\n")
    find(desk, "replace").value = True
    find(desk, "save").click()
    assert file.read_text() == desk.text.text
    field(desk, "severity").value = "high"
    find(desk, "save").click()
    assert desk.status.endswith(".yml.")
    assert not list((conf / "rules").glob("*.new"))
    for wrong in ("../up", "", "A"):
        field(desk, "rule-id").value = wrong
        find(desk, "save").click()
        assert "the file name comes from rule_id" in desk.status


def test_another_file_is_opened_at_the_desk(conf: Path):
    desk = open_desk(conf)
    find(desk, "files").value = str(conf / "rules/failed-logins.yml")
    find(desk, "open").click()
    assert desk.text.text == (conf / "rules/failed-logins.yml").read_text()
    assert field(desk, "stream").value == "logins"
    (conf / "rules/failed-logins.yml").write_text("a: [")
    find(desk, "open").click()
    assert desk.status.startswith("Problem: ")
    find(desk, "files").value = ""
    find(desk, "open").click()
    assert desk.text.get("rule_id") == "my-rule"
    assert desk.status == "Started a new rule; Undo brings back the previous text."
    find(desk, "undo").click()
    assert desk.text.get("rule_id") == "failed-logins"
    find(desk, "save").click()
    assert "has changed since it was opened" in desk.status


def test_c12_5_the_desk_offers_the_expressions_of_a_key_with_the_fields(conf: Path):
    desk = open_desk(conf, "network-tries-accounts")
    group_by, entities = field(desk, "group-by"), field(desk, "entities")
    assert (group_by.value, entities.value) == (("network",), ("network",))
    for control in (group_by, entities):
        assert any(name == "network" and "regexp_extract" in label for label, name in control.options)
    group_by.value = ("network", "user_id")
    assert desk.text.get("group_by")[0].keys() == {"network"}
    assert desk.text.get("group_by")[1] == "user_id"
    assert {problem.place for problem in desk.checked.problems} == {"tests[0]"}


def test_values_of_a_document_are_text_everywhere(conf: Path):
    hostile = "<img src=x onerror=alert(1)>"
    desk = open_desk(conf)
    yaml = find(desk, "yaml").children[0].children[0]
    yaml.value = f"rule_id: a\nstream: '{hostile}'\nseverity: '{hostile}'\ngroup_by: ['{hostile}']\nentity: '{hostile}'\nwhen: '{hostile}'\nmeasures: {{'{hostile}': '{hostile}'}}\nparameters: {{'{hostile}': 1}}\n"
    for widget in walk(desk.widget):
        if isinstance(widget, ipywidgets.HTML):
            reader = TableReader()
            reader.feed(widget.value)
            assert reader.tags <= {"style", "h3", "div", "table", "thead", "tbody", "tr", "th", "td"}
        assert "onerror" not in getattr(widget, "description", "")
        assert "onerror" not in str(getattr(widget, "tooltip", ""))
    assert desk.checked.problems
    assert hostile in findings(desk)


def test_every_control_has_a_name_and_its_place_in_the_order(conf: Path):
    desk = open_desk(conf, "card-testing")
    for widget in walk(desk.widget):
        if isinstance(
            widget, (ipywidgets.Button, ipywidgets.Text, ipywidgets.Textarea, ipywidgets.Dropdown, ipywidgets.Checkbox)
        ):
            assert widget.description
            assert widget.tooltip


def make_workspace(conf: Path) -> Any:
    streams = load_streams(conf)
    rules: Any = SimpleNamespace(streams=streams, tables=SimpleNamespace(spark=None))
    settings = Settings.local(str(conf.parent / "lakehouse"), str(conf))
    return SimpleNamespace(rules=rules, stream=streams["transactions"], settings=settings, conf=conf)


FORM = SimpleNamespace(
    rule_file="", rule_id="rush", description="", severity="high", group_by="customer_id", where="", window="1 hour",
    measures="total: sum(amount); n: count(*)", when="total >= :limit", parameters="limit: 350", message="{n} payments",
)  # fmt: skip


def open_from_notebook(conf: Path, form: SimpleNamespace, wanted: bool = True) -> Any:
    """The desk, as notebook 2 opens it."""
    workspace = make_workspace(conf)
    return notebook.open_author_desk(workspace, form, notebook.rule_form(workspace, form), wanted)


def test_the_notebook_begins_with_its_parameters_or_with_a_file_whose_comments_stay(
    conf: Path, monkeypatch: pytest.MonkeyPatch
):
    shown = list[Any]()
    monkeypatch.setattr(showing, "has_person", lambda: True)
    monkeypatch.setattr(showing, "show", shown.append)
    desk = open_from_notebook(conf, FORM)
    assert desk is not None
    assert shown == [desk.widget]
    assert desk.checked.is_fine
    assert desk.text.document["measures"] == {"total": "sum(amount)", "n": "count(*)"}
    file = SimpleNamespace(**{**vars(FORM), "rule_file": "spend-against-usual.yml"})
    desk = open_from_notebook(conf, file)
    assert desk is not None
    assert "# the month that ended a day ago" in desk.text.text
    assert desk.save() == conf / "rules/spend-against-usual.yml"


def test_without_a_person_or_widgets_the_notebook_says_so_and_goes_on(
    conf: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert open_from_notebook(conf, FORM) is None
    assert notebook.open_stream_desk(make_workspace(conf)) is None
    assert capsys.readouterr().out.count("No desk: the notebook runs non-interactively") == 2
    monkeypatch.setattr(showing, "has_person", lambda: True)
    assert open_from_notebook(conf, FORM, wanted=False) is None
    capsys.readouterr()
    for name in ("authoring", "streams"):
        monkeypatch.delitem(sys.modules, f"lookback.desk.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    assert open_from_notebook(conf, FORM) is None
    assert notebook.open_stream_desk(make_workspace(conf)) is None
    assert capsys.readouterr().out.count("The desk needs the package ipywidgets, which is not installed") == 2


def variant(limit: int, span: str, alerts: int) -> Any:
    return SimpleNamespace(rule_id="a", parameters={"limit": limit, "span": span}, alerts=alerts, alerts_per_day=float(alerts), keys=1,
        flagged=1, labelled=2, positives=1, precision=0.5, recall=0.25, all_positives=4)  # fmt: skip


def test_sliders_redraw_both_pictures_from_what_was_judged():
    taken = list[Any]()
    sliders = Sliders(taken.append)
    figures = [variant(limit, span, limit) for limit in (1, 2, 3) for span in ("1 hour", "2 hours")]
    sliders.show(Tuning(figures, {"limit": 2, "span": "1 hour"}), budget=2)
    assert sliders.chosen == {"limit": 2, "span": "1 hour"}
    _, limit, span, words, row, alerts, precision, table = sliders.widget.children
    assert [len(row) for row in read_rows(table.value)] == [8] * 7
    before = alerts.value, precision.value
    assert before[0].startswith(
        '<img class="lookback-alerts-picture" alt="a: alerts a day by limit" src="data:image/png;'
    )
    limit.value = 3
    assert words.value == "With limit 3, span 1 hour: 3 alerts, 3 a day, of 1 key; precision 50%, recall 25%."
    assert alerts.value != before[0]
    assert precision.value != before[1]
    assert "alerts a day by limit" in alerts.value
    span.value = "2 hours"
    assert "alerts a day by span" in alerts.value
    row.children[0].click()
    assert taken == [{"limit": 3, "span": "2 hours"}]


def test_a_rule_without_parameters_has_figures_and_no_slider():
    sliders = Sliders(lambda _: None)
    only = variant(1, "", 4)
    only.parameters = {}
    sliders.show(Tuning([only], {}), budget=None)
    *_, words = sliders.widget.children
    assert "No parameter was varied" in words.value
    assert type(words) is type(make_text())
