"""Fits a model to what rules measured of the Handbook's transactions: the table of docs/how-to/training-set.md.

`python -m dev.tools.training training --events FILE` takes the folder that `lookback features` wrote of the same
transactions. It needs scikit-learn (BSD), which nothing else does: `pip install scikit-learn==1.9.1`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pyarrow.dataset as ds
from sklearn.ensemble import HistGradientBoostingClassifier

from dev.tools.handbook import ROOT, TOGETHER, find_alerts, find_flagged, load_rules, read_events

PAGE = ROOT / "docs" / "how-to" / "training-set.md"
_BEGIN, _END = "<!-- figures begin -->", "<!-- figures end -->"


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the figures into the page. Returns 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("features", type=Path, help="the folder of the features")
    parser.add_argument("--events", type=Path, required=True, help="the transactions, a Parquet file")
    parser.add_argument("--learn-from", default="2018-05-01", help="a month after the first event: windows are full")
    parser.add_argument("--learn-until", default="2018-08-01", help="the day before which it learns")
    parser.add_argument("--judge-from", default="2018-08-08", help="a week later, when labels are known")
    options = parser.parse_args(arguments)
    learn_from, learn_until, judge_from = (
        pd.Timestamp(day, tz="UTC") for day in (options.learn_from, options.learn_until, options.judge_from)
    )
    events = read_events(options.events)
    rows = read_rows(options.features, events.to_pandas())
    at = rows["event_time"].dt.tz_localize("UTC")
    judged = rows[at >= judge_from]
    scores = score(rows[(at >= learn_from) & (at < learn_until)], judged)
    flagged = find_flagged(events.to_pandas(), find_alerts(events, load_rules()))
    table = format_table(judged, scores, flagged)
    before, rest = PAGE.read_text(encoding="utf-8").split(_BEGIN)
    PAGE.write_text(f"{before}{_BEGIN}\n\n{table}\n\n{_END}{rest.split(_END)[1]}", encoding="utf-8")
    sys.stdout.write(f"{table}\n")
    return 0


def read_rows(features: Path, events: pd.DataFrame) -> pd.DataFrame:
    """Returns the features with the amount of their event, and whether it was fraud."""
    rows = ds.dataset(features, format="parquet").to_table().to_pandas()
    events["event_id"] = events["transaction_id"].astype(str)
    return rows.merge(events[["event_id", "transaction_id", "amount", "is_fraud"]], on="event_id", validate="1:1")


def score(learned: pd.DataFrame, judged: pd.DataFrame) -> pd.Series:
    """Fits a model to the labelled rows. Returns its score of each judged row."""
    names = [name for name in learned if "." in name and not name.endswith("window_complete")]

    def values(rows: pd.DataFrame) -> pd.DataFrame:
        return rows[[*names, "amount"]].astype(float).assign(hour=rows["event_time"].dt.hour)

    model = HistGradientBoostingClassifier(random_state=0)
    model.fit(values(learned), learned["positive"].astype(bool))
    return pd.Series(model.predict_proba(values(judged))[:, 1], judged.index)


def format_table(judged: pd.DataFrame, scores: pd.Series, flagged: pd.DataFrame) -> str:
    """Formats precision and recall of the rules and of the model, which flags as many payments as they do."""
    fraud = judged["is_fraud"]
    by_rules = judged["transaction_id"].isin(flagged["transaction_id"])
    half = by_rules.sum() // 2
    ranked = scores.sort_values(ascending=False, kind="stable").index
    lines = [
        f"{len(judged):,} payments, {fraud.sum():,} of them fraud:",
        "",
        "| what flags | flagged | precision | recall |",
        "|---|---|---|---|",
    ]
    found = {
        f"the rules, {TOGETHER}": judged.index[by_rules],
        "the model, as many": ranked[: by_rules.sum()],
        "the model, half as many": ranked[:half],
    }
    for name, rows in found.items():
        right = fraud[rows].sum()
        lines.append(f"| {name} | {len(rows):,} | {right / len(rows):.3f} | {right / fraud.sum():.3f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
