"""The figures of docs/explanation/handbook.md: a plain pandas script gets the same of a part of the slice (contract 10.4)."""

from __future__ import annotations

from decimal import Decimal

import pandas as pd
import pytest

from dev.tools.handbook import (
    PAGE,
    SLICE,
    TOGETHER,
    find_alerts,
    load_rules,
    measure_card_precision,
    measure_rules,
    read_events,
)

EVENTS = 30_000
RULES = ("customer-day-spend", "large-payment")


def flag_by_hand(frame: pd.DataFrame) -> dict[str, pd.Series]:
    """The two rules in plain pandas. The amounts are in cents, so that sums are exact."""
    by_customer = frame.set_index("event_time").groupby("customer_id")["cents"].rolling("24h", closed="both")
    totals, counts = by_customer.sum(), by_customer.count()
    # Both are sorted by customer and time, as the rows are here.
    order = frame.sort_values(["customer_id", "event_time"], kind="stable").index
    spends = (totals.to_numpy() >= 100_000) & (counts.to_numpy() >= 3)
    return {
        "customer-day-spend": pd.Series(spends, index=order).reindex(frame.index),
        "large-payment": frame["cents"] > 22_000,
    }


def card_precision_by_hand(frame: pd.DataFrame, scores: pd.Series, top: int) -> float:
    """As the Handbook's card_precision_top_k does it, day by day, over cards that have a score."""
    detected: list[int] = []
    of_days = []
    for day in sorted(frame["day"].unique()):
        predictions: dict[int, tuple[float, int]] = {}
        for card, fraud, score in zip(
            *(frame.loc[frame["day"] == day, name] for name in ("customer_id", "is_fraud")), scores[frame["day"] == day],
            strict=True,
        ):  # fmt: skip
            best, compromised = predictions.get(card, (0, 0))
            predictions[card] = max(best, score), max(compromised, int(fraud))
        ranked = sorted((-best, card) for card, (best, _) in predictions.items() if best and card not in detected)
        found = [card for _, card in ranked[:top] if predictions[card][1]]
        detected += found
        of_days.append(len(found) / top)
    return sum(of_days) / len(of_days)


@pytest.fixture(scope="module")
def measured() -> tuple[pd.DataFrame, pd.DataFrame]:
    events = read_events(SLICE).slice(0, EVENTS)
    rules = [rule for rule in load_rules() if rule["rule_id"] in RULES]
    frame = events.to_pandas()
    frame["cents"] = [int(amount * Decimal(100)) for amount in frame["amount"]]
    frame["day"] = frame["event_time"].dt.date
    return measure_rules(events, find_alerts(events, rules)).set_index("rule"), frame


def test_c10_4_precision_and_recall_are_those_of_plain_pandas(measured: tuple[pd.DataFrame, pd.DataFrame]) -> None:
    figures, frame = measured
    flagged = flag_by_hand(frame)
    either = flagged["customer-day-spend"] | flagged["large-payment"]
    for name, is_flagged in {**flagged, TOGETHER: either}.items():
        row = figures.loc[name]
        right = int((is_flagged & frame["is_fraud"]).sum())
        assert row["flagged"] == is_flagged.sum() > 0
        assert row["precision"] == right / is_flagged.sum()
        assert row["recall"] == right / frame["is_fraud"].sum()
    days = frame["day"].nunique()
    assert figures.loc["large-payment", "alerts_per_day"] == flagged["large-payment"].sum() / days


def test_c10_4_card_precision_is_that_of_plain_pandas(measured: tuple[pd.DataFrame, pd.DataFrame]) -> None:
    figures, frame = measured
    flagged = flag_by_hand(frame)
    scores = {name: each.astype(int) for name, each in flagged.items()}
    scores[TOGETHER] = sum(scores.values())  # type: ignore[assignment]
    for name, score in scores.items():
        expected = card_precision_by_hand(frame, score, 100)
        assert figures.loc[name, "card_precision"] == pytest.approx(expected)
        assert expected > 0
        # With few places the order matters.
        few = measure_card_precision(frame.assign(score=score), 3)
        assert few == pytest.approx(card_precision_by_hand(frame, score, 3))


def test_a_card_that_is_known_as_defrauded_is_left_out_and_an_empty_place_is_a_miss() -> None:
    rows = [("d1", 1, True, 2), ("d1", 2, False, 3), ("d1", 3, True, 0), ("d2", 1, True, 2), ("d2", 3, True, 1)]
    scored = pd.DataFrame(rows, columns=["day", "customer_id", "is_fraud", "score"])
    # First day: card 2, wrong, and card 1; second day: card 3 alone, as card 1 is known.
    assert measure_card_precision(scored, 2) == 0.5
    # With one place: 2, wrong; then 1.
    assert measure_card_precision(scored, 1) == 0.5


def test_the_page_has_a_row_for_every_rule_on_transactions() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for rule in load_rules():
        assert f"| `{rule['rule_id']}` |" in page
