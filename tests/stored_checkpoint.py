"""Tables and a checkpoint as this release leaves them, in one small file, for later releases to go on with.

Run by hand when the layout of state has changed, or before a release: `python tests/stored_checkpoint.py`. With the name of
a file it is written there, as `make test-runtimes` does for each Spark.
"""

from __future__ import annotations

import sys
import tempfile
import zipfile
from importlib.metadata import version
from pathlib import Path

from lookback.spark.platform.session import get_spark
from lookback.spark.rules import RulesTable
from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder
from lookback.spark.tables.lakehouse import Tables
from payins import MORE_RULES, RULES, STREAM, STREAMS, append, make_events, relocate

DATA = Path(__file__).parent / "data"
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
    made = store(Path(sys.argv[1]) if sys.argv[1:] else DATA / f"checkpoint-{version('lookback-rules')}.zip")
    sys.stdout.write(f"{made}: {made.stat().st_size:,} bytes\n")
