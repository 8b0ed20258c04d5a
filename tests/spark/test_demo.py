"""`make demo`, on the slice of transactions that the repository has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lookback.cli import main

pytestmark = [pytest.mark.spark, pytest.mark.long]
CONF = Path(__file__).parents[2] / "conf"


def test_the_demo_ends_with_a_backtest_its_picture_and_a_proof(
    spark: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """10.2, 10.3, 10.6: more alerts at lower limits, a picture of them, and no row that differs from a replay."""
    root = tmp_path / "demo"
    events = CONF / "samples" / "transactions.parquet"

    assert main(["--root", str(root), "--conf", str(CONF), "demo", "--events", str(events)]) == 0

    said = capsys.readouterr().out
    tried = {
        int(limit): int(alerts.replace(",", ""))
        for limit, alerts in re.findall(r"limit +(\d+): +([\d,]+) alerts", said)
    }
    counts = [tried[limit] for limit in sorted(tried)]
    assert sorted(tried) == [500, 650, 800, 1000, 1250, 1500, 2000]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1]
    proved = re.search(r"([\d,]+) rows match, none differs", said)
    assert proved is not None
    assert int(proved[1].replace(",", "")) > 0
    for picture in ("alert.png", "what-if.png"):
        assert (root / picture).read_bytes().startswith(b"\x89PNG")
        assert str(root / picture) in said
