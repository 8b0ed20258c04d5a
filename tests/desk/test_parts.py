"""The parts of the desks: values stay texts, every control has a name, colours can be told apart in light and dark."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import ipywidgets
import pytest
from widgets import TableReader

from lookback.desk import parts

HOSTILE = [
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "&lt;b&gt;", "$\\href{javascript:alert(1)}{x}$", "\\(x\\)",
    "\x1b[2J", "\u202egnp.exe", "a\u2028b\r\nc\x00d", "x" * 10_000,
]  # fmt: skip
# The grounds of JupyterLab's themes.
LIGHT, DARK = "#FFFFFF", "#111111"


def luminance(colour: str) -> float:
    parts_ = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (each / 12.92 if each <= 0.03928 else ((each + 0.055) / 1.055) ** 2.4 for each in parts_)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def all_widgets(widget: ipywidgets.Widget) -> list[ipywidgets.Widget]:
    return [widget, *(each for child in getattr(widget, "children", ()) for each in all_widgets(child))]


@pytest.mark.parametrize("value", HOSTILE)
def test_a_value_is_shown_as_text_alone(value: str):
    status = parts.Status()
    status.show(value, "problem")
    labels = [status.widget, parts.make_text(value)]
    for label in labels:
        assert type(label) is ipywidgets.Label
        # MathJax would read a formula between two dollars, and a formula can hold a link.
        assert {"mathjax_ignore", "tex2jax_ignore"} <= set(label._dom_classes)
        assert all(each.isprintable() for each in label.value if each != "\n")
        assert len(label.value) <= 2_100
    assert labels[1].value == parts.clean_text(value)


@pytest.mark.parametrize("value", HOSTILE)
def test_a_value_in_a_table_is_shown_as_text_alone(value: str):
    place = ipywidgets.HTML()
    parts.show_rows(place, ["field", value], [["name", value]], value)
    reader = TableReader()
    reader.feed(place.value)
    assert reader.rows == [["field", parts.clean_text(value, 100)], ["name", parts.clean_text(value)]]
    assert reader.tags == {"div", "table", "thead", "tbody", "tr", "th", "td"}
    assert re.match(r'<div class="lookback-rows mathjax_ignore tex2jax_ignore" tabindex="0" [^<>]*>', place.value)
    parts.show_rows(place, ["field", "value"], [], "none")
    assert place.value == ""


def test_a_short_printable_value_is_shown_as_it_is():
    assert parts.clean_text("Zoë: <b>$5</b>\n& 'more'") == "Zoë: <b>$5</b>\n& 'more'"
    assert parts.clean_text(None) == ""


def test_the_only_markup_is_of_the_desk_itself():
    desk = parts.make_desk(parts.make_heading("The <queue>"), parts.make_text("<b>"))
    markup = [each.value for each in all_widgets(desk) if isinstance(each, ipywidgets.HTML)]
    assert markup[1:] == ["<h3>The &lt;queue&gt;</h3>"]
    assert markup[0].startswith("<style>")


def test_every_control_has_a_title_and_a_sentence():
    pressed: list[str] = []
    button = parts.make_button("Confirm", lambda: pressed.append("x"), "Record confirmed", "lookback-confirm")
    button.click()
    assert pressed == ["x"]
    assert (button.description, button.tooltip) == ("Confirm", "Record confirmed")
    assert "lookback-confirm" in button._dom_classes
    field = parts.make_field(ipywidgets.Dropdown, "Rule", "Only alerts of this rule", options=["a"])
    assert (field.description, field.tooltip) == ("Rule", "Only alerts of this rule")
    # Tab reaches both, in the order of the page.
    assert button.tabbable is field.tabbable is None


def test_a_widget_of_the_oldest_runtime_is_described_too():
    class Seven:
        description_tooltip = ""

        def has_trait(self, name: str) -> bool:
            return name == "description_tooltip"

    widget = Seven()
    parts.describe(widget, "Only alerts of this rule")
    assert widget.description_tooltip == "Only alerts of this rule"


def test_no_text_has_a_colour_of_its_own_and_edges_can_be_seen_in_light_and_dark():
    declared = re.sub(r"border-left: [^;]+;", "", parts._STYLE)
    assert not re.search(r"#[0-9A-Fa-f]{3,6}|\bcolor\s*:|background", declared)
    for name, colour in parts.EDGES.items():
        assert contrast(colour, LIGHT) >= 3, name
        assert contrast(colour, DARK) >= 3, name


def test_a_problem_is_named_by_a_word_too():
    status = parts.Status()
    status.show("no such alert", "problem")
    assert status.text == "Problem: no such alert"
    status.show("recorded", "done")
    assert status.text == "recorded"
    assert "lookback-done" in status.widget._dom_classes
    assert "lookback-problem" not in status.widget._dom_classes


def test_commands_and_notebooks_need_no_widgets_to_begin():
    source = Path(__file__).parents[2] / "src"
    program = "import sys, lookback.cli, lookback.notebook, lookback.upkeep; sys.exit('ipywidgets' in sys.modules)"
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, check=False, env={"PYTHONPATH": str(source), "PATH": ""}).returncode == 0


@pytest.mark.parametrize("value", HOSTILE)
def test_the_words_of_a_picture_are_text_in_an_attribute(value: str):
    picture = parts.make_picture(b"PNG", f'"{value}', "lookback-picture")
    assert re.fullmatch(
        r'<img class="lookback-picture" alt="[^"<>]*" src="data:image/png;base64,UE5H"/>', picture.value
    )
    parts.show_picture(picture, b"", "gone")
    assert picture.value == ""
