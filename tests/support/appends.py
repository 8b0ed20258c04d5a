"""Appends to one table from a process of its own, one row in each commit.

Run as `python -m appends ROOT TABLE NAME COUNT`, with the settings of Spark as JSON on its standard input. It prints
`ready`, waits for a line, and appends.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lookback.config import Settings
from lookback.spark.platform.session import get_spark
from lookback.spark.tables.conflicts import change_table
from lookback.spark.tables.lakehouse import Tables


def main() -> None:
    root, table, name, count = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    spark = get_spark(cores=1, settings=json.loads(sys.stdin.readline()))
    tables = Tables.of(spark, Settings(root, Path()))
    rows = [spark.createDataFrame([(name, number)], "name string, number int").coalesce(1) for number in range(count)]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    for each in rows:
        change_table(tables, table, lambda row=each: tables.append(row, table))
    sys.stdout.write("done\n")


if __name__ == "__main__":
    main()
