"""What people who look after the tables call: setting a place up, and its maintenance; by notebooks and command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from lookback.config import Settings, load_streams
from lookback.core.errors import SetupError
from lookback.display import show, text

if TYPE_CHECKING:
    from lookback.core.streams import Stream
    from lookback.spark.catalog import Step
    from lookback.spark.maintenance import Maintenance
    from lookback.spark.tables import Tables


def open_place(
    root: str, catalog: str = "", schema: str = "", conf: str | Path = "../conf"
) -> tuple[Tables, dict[str, Stream]]:
    """Starts or finds Spark. Returns where the tables are or are to be, and the declared streams by name.

    With catalog and schema the tables are catalog.schema.<table>, else folders below `root`. Nothing is made.
    Raises SetupError.
    """
    from lookback.spark.session import get_spark
    from lookback.spark.tables import Tables

    if bool(catalog) != bool(schema):
        raise SetupError(f"catalog and schema go together, got catalog={catalog!r}, schema={schema!r}")
    streams = load_streams(conf)
    spark = get_spark("lookback upkeep", settings=Settings.local(conf=conf).spark)
    return (Tables.catalog(spark, catalog, schema) if catalog else Tables.local(spark, root)), streams


def checkpoints_of(root: str, streams: Mapping[str, Stream]) -> dict[str, str]:
    """Stream -> the folder of its evaluation's checkpoint: below `root`, of a catalog's tables a volume."""
    return {name: f"{root.rstrip('/')}/_checkpoints/evaluate_{name}" for name in streams}


def set_up(
    root: str, catalog: str = "", schema: str = "", conf: str = "../conf", landing: str = "",
    analysts: str = "", engineers: str = "", service: str = "",
) -> list[Step]:  # fmt: skip
    """Makes what is missing of a place, and shows what became of each thing.

    root: the folder of local tables; with catalog and schema the folder in a volume, /Volumes/catalog/schema/volume, in
    which checkpoints are. landing: the folder that files of events arrive in; empty: none is made. analysts, engineers,
    service: principals that get the grants of their role, in Unity Catalog; empty: none.
    """
    from lookback.spark.catalog import set_up as make
    from lookback.spark.grants import Roles

    tables, streams = open_place(root, catalog, schema, conf)
    roles = Roles(analysts, engineers, service)
    steps = make(tables, streams, checkpoints=root if catalog else "", landing=landing, roles=roles)
    if landing and "://" not in landing:
        Path(landing).mkdir(parents=True, exist_ok=True)
    show(pd.DataFrame([{"thing": step.thing, "done": step.done} for step in steps]))
    left = [step.to_do for step in steps if step.to_do]
    if left:
        show(text("An owner of what they name must run these:"), *map(text, left))
    return steps


def maintain(root: str, catalog: str = "", schema: str = "", conf: str = "../conf") -> Maintenance:
    """OPTIMIZE and VACUUM of every table, and the health of every checkpoint, shown as tables.

    Raises SetupError, at the end, where an evaluation cannot go on from its checkpoint.
    """
    from lookback.spark.maintenance import maintain as run

    tables, streams = open_place(root, catalog, schema, conf)
    done = run(tables, streams, checkpoints_of(tables.root or root, streams))
    show(pd.DataFrame([asdict(each) for each in done.tables]))
    show(pd.DataFrame([asdict(each) for each in done.checkpoints]))
    if done.problems:
        raise SetupError("; ".join(done.problems))
    return done
