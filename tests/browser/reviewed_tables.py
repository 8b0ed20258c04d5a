"""Tables for the desks: 10,000 payments that a real evaluation judged, among them one with markup in every field."""

from __future__ import annotations

import datetime as dt
import shutil
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import yaml

from lookback.config import load_rule_document, load_streams
from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder
from lookback.spark.tables.lakehouse import Tables
from payins import TIME, commit, publish

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import SparkSession

    from lookback.core.streams.declaration import Stream

ROOT = Path(__file__).resolve().parents[2]
ALERTS = 10_000
START = dt.datetime(2026, 3, 2, 8, tzinfo=dt.timezone.utc)
# Values that would do something if anything of a value ever were markup.
SCRIPT = "<script>window.hacked = 1</script>"
IMAGE = '<img src="x" onerror="window.hacked = 2">'
BOLD = "</td><b class=hacked>CSH</b>"
# A rule that raises an alert for each payment, and one whose few alerts come first in the queue.
EVERY = {
    "rule_id": "every-payment", "stream": "payments", "severity": "low", "group_by": ["payer_id"], "entity": "payer_id",
    "window": "1 hour", "measures": {"payments": "count(*)"}, "when": "payments >= 1",
    "message": "{payer_id} made {payments} payments in an hour",
}  # fmt: skip
LARGE = {
    "rule_id": "large-sum", "stream": "payments", "severity": "critical", "group_by": ["payer_id"], "entity": "payer_id",
    "window": "24 hours", "measures": {"total": "sum(amount)", "payments": "count(*)"},
    "parameters": {"limit": 5000}, "when": "total >= :limit",
    "message": "{payer_id} paid {total} in a day",
}  # fmt: skip
_TYPES = {
    "event_id": pa.string(), "event_time": TIME, "payer_id": pa.string(), "beneficiary_id": pa.string(),
    "payment_type": pa.string(), "amount": pa.decimal128(18, 2), "ingested_at": TIME,
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """The tables, their declarations, and the parameters by which a notebook finds them."""

    tables: Tables
    streams: Mapping[str, Stream]
    conf: Path

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters of a notebook."""
        return {"root": str(self.tables.root), "conf": str(self.conf), "stream": "payments"}


def make_place(spark: SparkSession, folder: Path) -> Place:
    """Makes conf/ and tables below a new folder, and evaluates 10,000 payments by three rules."""
    conf = folder / "conf"
    shutil.copytree(ROOT / "conf", conf, ignore=shutil.ignore_patterns("samples", "jobs"))
    # Kernels are short-lived: a compiler that is done early pays more than fast code later.
    options = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    settings = {"spark": {"spark.driver.memory": "1g", "spark.driver.defaultJavaOptions": options}}
    (conf / "settings.yml").write_text(yaml.safe_dump(settings))
    streams = load_streams(conf)
    payments = streams["payments"]
    tables = Tables.local(spark, folder / "lakehouse").holding(*streams.values())
    tables.create(payments)
    shipped = load_rule_document(conf / "rules/beneficiary-day-total.yml")
    publish(tables, [EVERY, LARGE, shipped])
    rows = [*map(_make_payment, range(ALERTS - 1)), _make_hostile_payment()]
    columns = {name: [row[name] for row in rows] for name in _TYPES}
    commit(tables, payments.name, columns, pa.schema(list(_TYPES.items())))
    Evaluation(tables, payments, streams, checkpoint_folder(tables, payments), once=True).run()
    return Place(tables, streams, conf)


def _make_payment(number: int) -> dict[str, Any]:
    """Makes a payment of one of 500 payers; ten of them pay much, so that a few alerts are critical."""
    payer = number % 500
    much = payer < 10 and number // 500 >= 18
    return {
        "event_id": f"p{number:05}", "event_time": START + dt.timedelta(seconds=3 * number),
        "payer_id": f"A{payer:03}", "beneficiary_id": f"B{number % 37:02}", "payment_type": ("TRF", "CSH", "CRD")[number % 3],
        "amount": Decimal("4750.25") if much else Decimal(number % 90 + 10) + Decimal("0.99"), "ingested_at": dt.datetime.now(dt.timezone.utc),
    }  # fmt: skip


def _make_hostile_payment() -> dict[str, Any]:
    """Makes the last payment: markup wherever a text may stand, and an amount that raises a critical alert."""
    last = _make_payment(ALERTS)
    return {
        **last,
        "event_id": f"{BOLD}-1",
        "payer_id": SCRIPT,
        "beneficiary_id": IMAGE,
        "payment_type": BOLD,
        "amount": Decimal(9_000),
    }
