"""Makes the samples of this folder, the same ones every time.

    python conf/samples/generate.py                           logins, payments, items, readings, processes
    python conf/samples/generate.py --transactions FILE       and transactions.parquet, cut from the whole file

The transactions are consecutive rows of the Fraud Detection Handbook's simulated data set.
"""

from __future__ import annotations

import argparse
import csv
import datetime as dt
import json
import random
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

FOLDER = Path(__file__).parent
SEED = 20180401
START = dt.datetime(2024, 3, 4, tzinfo=dt.timezone.utc)
# The slice: the highest rate of fraud is reached from the third month on.
SLICE_START = dt.datetime(2018, 7, 10, tzinfo=dt.timezone.utc)
SLICE_ROWS = 120_000

Row = dict[str, Any]


def minutes(number: float) -> dt.timedelta:
    """A stretch of time."""
    return dt.timedelta(minutes=number)


def numbered(rows: list[Row], prefix: str) -> list[Row]:
    """The rows in time, each with an event_id."""
    rows.sort(key=lambda row: row["event_time"])
    return [{"event_id": f"{prefix}{number:05d}", **row} for number, row in enumerate(rows, 1)]


def logins(rng: random.Random) -> list[Row]:
    """A day of 40 users who mistype now and then.

    Three accounts are taken over after a run of failures from other addresses, one user forgets a password but comes from home, and one address tries many accounts.
    """
    rows: list[Row] = []

    def attempt(when: dt.datetime, user: str, ip: str, outcome: str) -> None:
        rows.append({"event_time": when, "user_id": user, "ip": ip, "outcome": outcome})

    homes = {f"user-{number:02d}": f"198.51.100.{number}" for number in range(1, 41)}
    for user, home in homes.items():
        for _ in range(rng.randint(3, 7)):
            when = START + minutes(rng.uniform(6 * 60, 23 * 60))
            if rng.random() < 0.15:
                attempt(when - dt.timedelta(seconds=rng.randint(5, 40)), user, home, "FAIL")
            attempt(when, user, home, "SUCCESS")
    for user, hour in (("user-07", 10), ("user-19", 14), ("user-33", 21)):
        begin = START + minutes(hour * 60 + rng.uniform(0, 30))
        for number in range(rng.randint(3, 6)):
            attempt(begin + minutes(number), user, f"203.0.113.{rng.randint(1, 3)}", "FAIL")
        attempt(begin + minutes(7), user, "192.0.2.66", "SUCCESS")
    begin = START + minutes(9 * 60)
    for number in range(4):
        attempt(begin + minutes(number), "user-12", homes["user-12"], "FAIL")
    attempt(begin + minutes(5), "user-12", homes["user-12"], "SUCCESS")
    for number, user in enumerate(sorted(homes)[:30]):
        attempt(START + minutes(16 * 60 + number / 5), user, "203.0.113.200", "FAIL")
    return numbered(rows, "L")


def payments(rng: random.Random) -> list[Row]:
    """Four days of everyday payments.

    Two beneficiaries collect over 10 M in cash within a day, one from many payers,
    and one account passes on at once what it receives.
    """
    rows: list[Row] = []

    def pay(when: dt.datetime, payer: str, beneficiary: str, kind: str, amount: float) -> None:
        rows.append(
            {
                "event_time": when,
                "payer_id": payer,
                "beneficiary_id": beneficiary,
                "payment_type": kind,
                "amount": Decimal(round(amount * 100)).scaleb(-2),
            }
        )

    for _ in range(400):
        payer, beneficiary = rng.sample(range(1, 81), 2)
        when = START + minutes(rng.uniform(0, 4 * 24 * 60))
        pay(
            when,
            f"A{payer:03d}",
            f"A{beneficiary:03d}",
            rng.choice(["TRF", "TRF", "CRD", "SEPA", "CSH"]),
            rng.lognormvariate(5, 1.2),
        )
    for number in range(6):
        pay(
            START + minutes(26 * 60 + number * 150),
            f"A{number + 1:03d}",
            "B900",
            "CSH",
            rng.uniform(1_900_000, 2_300_000),
        )
    for number in range(12):
        pay(
            START + minutes(60 * 60 + number * 100), f"A{number + 20:03d}", "B901", "CSH", rng.uniform(850_000, 990_000)
        )
    for number in range(8):
        when = START + minutes(75 * 60 + number * 45)
        pay(when, f"A{number + 40:03d}", "A077", "TRF", 9_500)
        pay(when + minutes(4), "A077", f"X{number:03d}", "TRF", 9_400)
    return numbered(rows, "P")


def items(rng: random.Random) -> list[Row]:
    """Half a day of sales in five cities; prices in Ghent double for twenty minutes, and Turin sells nothing for an hour."""
    rows: list[Row] = []
    usual = {"Ghent": 20, "Lyon": 35, "Porto": 15, "Turin": 28, "Utrecht": 42}
    for _ in range(500):
        city, at = rng.choice(list(usual)), rng.uniform(8 * 60, 20 * 60)
        if city == "Turin" and 13 * 60 <= at < 14 * 60:
            continue
        price = usual[city] * rng.uniform(0.7, 1.4) * (2 if city == "Ghent" and 700 <= at < 720 else 1)
        rows.append({"event_time": START + minutes(at), "city": city, "price": Decimal(round(price * 100)).scaleb(-2)})
    return numbered(rows, "I")


def readings(rng: random.Random) -> list[Row]:
    """Two hours of six sensors, a value each minute and a half; one overheats, one falls silent, one sticks to a value."""
    rows: list[Row] = []
    for sensor in range(1, 7):
        level = rng.uniform(18, 24)
        for step in range(80):
            at = step * 1.5 + rng.uniform(-0.2, 0.2)
            level += rng.gauss(0, 0.15)
            if sensor == 4 and 60 <= at < 85:
                continue
            value = level + max(0, at - 70) * 1.1 if sensor == 2 and at < 100 else level
            value = 21.5 if sensor == 5 and at > 40 else value
            rows.append(
                {
                    "event_time": START + minutes(9 * 60 + at),
                    "sensor_id": f"sensor-{sensor}",
                    "value": Decimal(round(value * 1_000)).scaleb(-3),
                }
            )
    return numbered(rows, "R")


def processes(rng: random.Random) -> list[Row]:
    """A day of 12 computers; on two of them a document starts a shell that hides what it runs."""
    rows: list[Row] = []

    def start(at: float, number: int, parent: str, name: str, *args: str) -> None:
        process = {"name": name, "path": f"C:\\Windows\\{name}", "args": [*args], "parent": {"name": parent}}
        host, user = f"pc-{number:02d}", f"user-{number:02d}"
        rows.append({"event_time": START + minutes(at), "host": host, "user_id": user, "process": process})

    usual = [
        ("explorer.exe", "WINWORD.EXE", "letter.docx"),
        ("explorer.exe", "EXCEL.EXE", "figures.xlsx"),
        ("explorer.exe", "cmd.exe", "/c", "dir"),
        ("cmd.exe", "powershell.exe", "-File", "backup.ps1"),
        ("services.exe", "svchost.exe", "-k", "netsvcs"),
    ]
    for number in range(1, 13):
        for _ in range(20):
            start(rng.uniform(8 * 60, 18 * 60), number, *rng.choice(usual))
    start(10 * 60 + 12.5, 4, "WINWORD.EXE", "powershell.exe", "-nop", "-w", "hidden", "-EncodedCommand", "SQBFAFgA")
    start(15 * 60 + 41.25, 9, "OUTLOOK.EXE", "mshta.exe", "/enc", "bWFpbA==")
    return numbered(rows, "E")


def text(value: Any) -> str:
    """Values as CSV and JSON hold them: times in UTC with milliseconds."""
    if isinstance(value, dt.datetime):
        return value.replace(tzinfo=None).isoformat(timespec="milliseconds") + "Z"
    return str(value)


def write(name: str, rows: list[Row]) -> None:
    """The rows in the format that the file's name says."""
    file = FOLDER / name
    if file.suffix == ".parquet":
        times = pa.array([row["event_time"] for row in rows], pa.timestamp("us", tz="UTC"))
        values = pa.array([row["value"] for row in rows], pa.decimal128(12, 3))
        columns = {"event_id": [row["event_id"] for row in rows], "event_time": times}
        table = pa.table({**columns, "sensor_id": [row["sensor_id"] for row in rows], "value": values})
        pq.write_table(table, file, compression="zstd")
        return
    with file.open("w", encoding="utf-8", newline="") as out:
        if file.suffix == ".csv":
            writer = csv.writer(out, lineterminator="\n")
            writer.writerow(rows[0])
            writer.writerows([text(value) for value in row.values()] for row in rows)
        else:
            out.writelines(json.dumps(row, default=text) + "\n" for row in rows)


def transactions(whole: Path) -> None:
    """Consecutive rows of the whole file from SLICE_START on."""
    table = pq.read_table(whole, filters=[("event_time", ">=", SLICE_START)]).sort_by("transaction_id")
    pq.write_table(
        table.slice(0, SLICE_ROWS).replace_schema_metadata(None),
        FOLDER / "transactions.parquet",
        compression="zstd",
        compression_level=19,
        column_encoding={"transaction_id": "DELTA_BINARY_PACKED", "event_time": "DELTA_BINARY_PACKED"},
        use_dictionary=["customer_id", "terminal_id", "is_fraud", "fraud_scenario"],
    )


def main() -> None:
    """Writes every sample."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--transactions", type=Path, metavar="FILE", help="the whole data set, Parquet")
    whole = arguments.parse_args().transactions
    for name, make in (
        ("logins.jsonl", logins),
        ("payments.csv", payments),
        ("items.csv", items),
        ("readings.parquet", readings),
        ("processes.jsonl", processes),
    ):
        write(name, make(random.Random(SEED)))  # noqa: S311 - samples, no secrets
    if whole:
        transactions(whole)


if __name__ == "__main__":
    main()
