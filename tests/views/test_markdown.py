"""Contract 10.8: the report on rules for a pull request. What a name holds ends no cell, names nobody and is no markup."""

from __future__ import annotations

from dataclasses import replace

from lookback.spark.replay.backtest import BacktestFigures
from lookback.spark.reports import RuleReport
from lookback.views.markdown import describe_range, escape_markdown, format_reports

FIGURES = BacktestFigures("spend", 4, {}, 1_234, 41.128, 17, 1_234, 8, 4, 0.5, 0.25, 16, 1_300, 0)
PASSING = RuleReport("rules/spend.yml", "spend", 2, FIGURES, 30.04)


def test_c10_8_a_report_is_a_table_with_a_sentence_for_each_problem() -> None:
    failing = replace(PASSING, rule_id="burst", file="rules/burst.yml", problems=["too many; raise its limit"])
    unread = RuleReport("rules/torn.yml", problems=["it holds no rule"])
    assert format_reports([PASSING, failing, unread]).splitlines() == [
        "## Rules: 2 of 3 fail",
        "",
        "| Rule | Tests | Alerts | Alerts a day | Keys | Precision | Recall | Verdict |",
        "| --- | --: | --: | --: | --: | --: | --: | --- |",
        "| spend | 2 | 1,234 | 41.1 | 17 | 0.500 | 0.250 | passes |",
        "| burst | 2 | 1,234 | 41.1 | 17 | 0.500 | 0.250 | **fails** |",
        "| rules/torn.yml | 0 |  |  |  |  |  | **fails** |",
        "",
        "- **burst** (rules/burst.yml) fails: too many; raise its limit",
        "- **rules/torn.yml** fails: it holds no rule",
    ]
    assert describe_range([PASSING, failing, unread]) == "Figures cover 30 days of events."
    assert format_reports([PASSING]).startswith("## Rules: it passes\n")
    assert format_reports([PASSING, PASSING]).startswith("## Rules: all 2 pass\n")
    without_labels = replace(PASSING, figures=replace(FIGURES, precision=None, recall=None, alerts_per_day=None))
    assert "| spend | 2 | 1,234 |  | 17 |  |  | passes |" in format_reports([without_labels])


def test_c10_8_names_and_messages_are_shown_as_they_are() -> None:
    assert escape_markdown("a|b\nc") == r"a\|b c"
    assert escape_markdown("<img src=x> & @ann #1") == "&lt;img src=x&gt; &amp; &#64;ann &#35;1"
    assert escape_markdown("`x` [y](z) *w* _v_ ~u~ \\") == r"\`x\` \[y\](z) \*w\* \_v\_ \~u\~ \\"
    assert escape_markdown("\x1b[31m\u202ered") == r"\x1b\[31m\u202ered"
    hostile = RuleReport("rules/|\n| x |.yml", problems=["|\n|"], remarks=["<b>"])
    text = format_reports([hostile])
    assert len(text.splitlines()) == 8
    row = text.splitlines()[4]
    assert row.replace(r"\|", "").count("|") == 9
    assert "<b>" not in text
