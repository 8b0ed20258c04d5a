"""Writes tables and a checkpoint into one small file, for another version of Spark to go on with.

`make test-runtimes` runs this with each Spark: `python tests/support/stored_checkpoint.py FILE`.
"""

from __future__ import annotations

import sys
import tempfile
import zipfile
from pathlib import Path

from lookback.spark.platform.session import get_spark
from lookback.spark.rules import RulesTable
from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder
from lookback.spark.tables.lakehouse import Tables
from payins import MORE_RULES, RULES, STREAM, STREAMS, append, make_events, relocate

EVENTS = make_events(150, seed=31)
# The commits that were judged when the checkpoint was stored; later ones are judged by who goes on with it.
JUDGED = 4
# Stands in the stored file for the folder that it is unpacked to.
PLACE = "/place/of/the/tables"


def store(target: Path) -> Path:
    """Makes the file: all kinds of rules, two shards, three runs, so that there are snapshots and what came after."""
    settings = {"spark.sql.shuffle.partitions": "2", "spark.sql.streaming.stateStore.minDeltasForSnapshot": "2"}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "lakehouse"
        tables = Tables.local(get_spark("lookback stored checkpoint", cores=2, settings=settings), root)
        tables.create(STREAM)
        rules = RulesTable(tables, STREAMS)
        for document in (*RULES, *MORE_RULES):
            rules.push(document, author="tests")
        for arrival in range(1, JUDGED + 1):
            append(tables, [row for row in EVENTS if row["arrival"] == arrival])
            if arrival > 1:
                Evaluation(tables, STREAM, STREAMS, checkpoint_folder(tables, STREAM), once=True).run()
        tables.spark.stop()
        relocate(root, str(root), PLACE)
        return _pack(root, target)


def _pack(root: Path, target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for file in sorted(root.rglob("*")):
            # Hadoop makes its checksums anew where there are none.
            if file.is_file() and file.suffix != ".crc" and not file.name.endswith(".owner"):
                archive.write(file, file.relative_to(root).as_posix())
    return target


if __name__ == "__main__":
    made = store(Path(sys.argv[1]))
    sys.stdout.write(f"{made}: {made.stat().st_size:,} bytes\n")
