"""Measures the rules that ship on the Handbook's transactions, by the Handbook's own metrics: writes docs/explanation/handbook.md.

`python -m dev.tools.handbook --events FILE` takes the whole data set, and without a file the slice in the repository. The data and
the metrics are those of "Reproducible Machine Learning for Credit Card Fraud Detection", chapter "Performance metrics".
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import lookback
from lookback.config import load_rule_document, load_stream

ROOT = Path(__file__).resolve().parents[2]
SLICE = ROOT / "conf" / "samples" / "transactions.parquet"
PAGE = ROOT / "docs" / "explanation" / "handbook.md"
TOP_CARDS = 100
TOGETHER = "all together"
_COMMIT_ROWS = 100_000
_BEGIN, _END = "<!-- figures begin -->", "<!-- figures end -->"


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the figures into the page. Returns 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=Path, default=SLICE, help="a Parquet file")
    parser.add_argument("--to", type=Path, default=PAGE, help="the page whose table is replaced")
    options = parser.parse_args(arguments)
    events = read_events(options.events)
    table = format_table(measure_rules(events, find_alerts(events, load_rules())), events)
    page = options.to.read_text(encoding="utf-8")
    before, rest = page.split(_BEGIN)
    options.to.write_text(f"{before}{_BEGIN}\n\n{table}\n\n{_END}{rest.split(_END)[1]}", encoding="utf-8")
    sys.stdout.write(f"{table}\n")
    return 0


def load_rules() -> list[dict[str, Any]]:
    """Loads the rules of conf/rules on transactions, by id."""
    documents = [load_rule_document(file) for file in sorted((ROOT / "conf/rules").glob("*.yml"))]
    return [each for each in documents if each["stream"] == "transactions"]


def read_events(file: Path) -> pa.Table:
    """Reads transactions with the fields of the stream, in order of time."""
    rows = pq.read_table(file).sort_by([("event_time", "ascending"), ("transaction_id", "ascending")])
    cents = rows["amount_cents"].cast(pa.decimal128(10, 0))
    amount = pc.multiply(cents, pa.scalar(Decimal("0.01"), pa.decimal128(3, 2))).cast(pa.decimal128(18, 2))
    return rows.drop_columns(["amount_cents"]).append_column("amount", amount)


def find_alerts(events: pa.Table, rules: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Replays the events in commits as ingest cuts them. Returns the last row of each alert that stands."""
    commits = pa.array([at // _COMMIT_ROWS for at in range(len(events))], pa.int64())
    stream = load_stream(ROOT / "conf/streams/transactions.yml")
    alerts = lookback.replay(list(rules), events.append_column("arrival", commits), stream).alerts.to_pandas()
    last = alerts.sort_values("revision").drop_duplicates("alert_id", keep="last")
    return last[last["verdict"] == "raised"]


def find_flagged(events: pd.DataFrame, alerts: pd.DataFrame) -> pd.DataFrame:
    """Finds the events that alerts flagged: rule_id, transaction_id; of a session its small payments, by the rule's `where`."""
    by_event = alerts[alerts["event_id"].notna()]
    parts = [pd.DataFrame({"rule_id": by_event["rule_id"], "transaction_id": by_event["event_id"].astype("int64")})]
    small = events[events["amount"] < 5]
    by_customer = dict(iter(small.groupby("customer_id")))
    for alert in alerts[alerts["event_id"].isna()].itertuples():
        rows = by_customer[int(alert.key["customer_id"])]
        inside = rows[(rows["event_time"] >= alert.window_start) & (rows["event_time"] < alert.window_end)]
        parts.append(pd.DataFrame({"rule_id": alert.rule_id, "transaction_id": inside["transaction_id"]}))
    return pd.concat(parts).drop_duplicates(ignore_index=True)


def measure_rules(events: pa.Table, alerts: pd.DataFrame) -> pd.DataFrame:
    """Returns a row a rule, and one for all together: alerts a day, precision, recall, card precision at TOP_CARDS."""
    frame = events.select(["transaction_id", "event_time", "customer_id", "amount", "is_fraud"]).to_pandas()
    frame["amount"] = frame["amount"].astype(float)
    frame["day"] = frame["event_time"].dt.floor("D")
    days, positives = frame["day"].nunique(), int(frame["is_fraud"].sum())
    flagged = find_flagged(frame, alerts)
    names = [rule["rule_id"] for rule in load_rules()]
    rows = []
    for name in [*names, TOGETHER]:
        own = flagged if name == TOGETHER else flagged[flagged["rule_id"] == name]
        count = len(alerts) if name == TOGETHER else int((alerts["rule_id"] == name).sum())
        # How many rules flagged each event: the score by which cards are sorted.
        scores = own.groupby("transaction_id").size()
        scored = frame.assign(score=frame["transaction_id"].map(scores).fillna(0))
        right = int(scored.loc[scored["score"] > 0, "is_fraud"].sum())
        rows.append(
            {
                "rule": name,
                "alerts_per_day": count / days,
                "flagged": len(scores),
                "precision": right / len(scores) if len(scores) else None,
                "recall": right / positives if positives else None,
                "card_precision": measure_card_precision(scored, TOP_CARDS),
            }
        )
    return pd.DataFrame(rows)


def measure_card_precision(scored: pd.DataFrame, top: int) -> float:
    """Returns the mean, over days, of the share of defrauded cards among the `top` cards with the highest scores.

    scored: transactions with day, customer_id, is_fraud and score. A card has the highest score of its transactions of the
    day; of equal scores the lower number comes first. Cards found in an earlier day's list are known as defrauded and left
    out. A card without a flagged transaction is not on the list, and an empty place counts as a miss.
    """
    known: set[int] = set()
    shares = []
    for _, rows in scored.groupby("day"):
        cards = rows[~rows["customer_id"].isin(known)].groupby("customer_id").agg({"score": "max", "is_fraud": "max"})
        cards = cards[cards["score"] > 0].sort_values("score", ascending=False, kind="stable").head(top)
        found = cards.index[cards["is_fraud"].astype(bool)]
        known.update(found)
        shares.append(len(found) / top)
    return sum(shares) / len(shares)


def format_table(figures: pd.DataFrame, events: pa.Table) -> str:
    """Formats the figures as Markdown, with a sentence on the events."""
    days = pc.floor_temporal(events["event_time"], unit="day").unique()
    fraud = pc.sum(events["is_fraud"].cast(pa.int64())).as_py()
    lines = [
        f"{len(events):,} transactions of {len(days)} days, {fraud:,} of them fraud:",
        "",
        f"| rule | alerts a day | precision | recall | card precision at {TOP_CARDS} a day |",
        "|---|---|---|---|---|",
    ]
    for row in figures.itertuples():
        shares = [_format_share(value) for value in (row.precision, row.recall, row.card_precision)]
        name = row.rule if row.rule == TOGETHER else f"`{row.rule}`"
        lines.append(f"| {name} | {row.alerts_per_day:,.1f} | {' | '.join(shares)} |")
    return "\n".join(lines)


def _format_share(value: float | None) -> str:
    return "none" if value is None or pd.isna(value) else f"{value:.3f}"


if __name__ == "__main__":
    sys.exit(main())
