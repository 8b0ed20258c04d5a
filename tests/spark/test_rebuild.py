"""State lost: made anew from the tables, it goes on as if nothing had been, and nothing is written twice."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import StreamingQueryException

from lookback.core.errors import SetupError
from lookback.spark.rules import RulesTable
from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder
from lookback.spark.tables.lakehouse import Tables
from payins import (
    MORE_RULES,
    RULES,
    START,
    STREAM,
    STREAMS,
    append,
    forget_commit,
    make_events,
    outputs,
    publish,
    relocate,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

EVENTS = make_events(300, seed=24)


def evaluate(tables: Tables, checkpoint: Path | None = None, **options: Any) -> Evaluation:
    folder = checkpoint or checkpoint_folder(tables, STREAM)
    evaluation = Evaluation(tables, STREAM, STREAMS, folder, once=True, **options)
    evaluation.run()
    return evaluation


def part(first: int, last: int) -> list[dict[str, Any]]:
    return [row for row in EVENTS if first <= row["arrival"] <= last]


class Killed(Exception):
    pass


@pytest.mark.long
def test_c8_state_made_anew_goes_on_as_if_it_had_not_been_lost(
    tables: Tables, spark: SparkSession, tmp_path: Path
) -> None:
    tables.create(STREAM)
    rules = RulesTable(tables, STREAMS)
    publish(tables, [RULES[0], RULES[2], *MORE_RULES])
    append(tables, part(1, 4))
    evaluate(tables)
    # Versions, keys and a watermark that come amid windows, matches and waits.
    rules.push({**MORE_RULES[3], "message": "{n}"})
    rules.push(RULES[1])
    rules.set_status("by-customer", "paused")
    rules.command("advance", STREAM.name, time=START + 150_000_000)
    append(tables, part(5, 8))
    evaluate(tables)
    shutil.copytree(str(tables.root), tmp_path / "whole")
    relocate(tmp_path / "whole", str(tables.root), str(tmp_path / "whole"))
    whole = Tables.local(spark, tmp_path / "whole")

    # The last batch was cut short, then the state was lost.
    forget_commit(tables, "alerts")
    folder = Path(checkpoint_folder(tables, STREAM))
    shutil.rmtree(folder)
    with pytest.raises(SetupError, match=r"lookback evaluate payins --rebuild.*--checkpoint.*--fresh"):
        evaluate(tables)
    for each in (tables, whole):
        RulesTable(each, STREAMS).push({**MORE_RULES[8], "severity": "low"})
        RulesTable(each, STREAMS).set_status("by-customer", "active")
        append(each, part(9, 12))

    def kill(report: Any) -> None:
        raise Killed

    with pytest.raises(StreamingQueryException, match="Killed"):
        evaluate(tables, rebuild=True, on_batch=kill, admission={"maxFilesPerTrigger": "3"})
    evaluation = evaluate(tables, admission={"maxFilesPerTrigger": "3"})
    assert len(evaluation.reports) >= 4
    assert evaluation.replans == 0
    evaluate(whole)
    expected = outputs(whole)
    assert not expected["twice"]
    assert outputs(tables) == expected
    assert len(expected["alerts"]) > 200
    assert {row.verdict for row in expected["alerts"]} == {"raised", "suppressed", "retracted"}

    # A state file is torn: refused, and made anew from a checkpoint that is kept.
    torn = folder.with_name("torn")
    shutil.copytree(folder, torn)
    relocate(torn, str(folder), str(torn))
    last = max((torn / "state" / "0" / "1").glob("*.changelog"), key=lambda file: int(file.stem))
    last.write_bytes(last.read_bytes()[: last.stat().st_size // 2])
    (last.parent / f".{last.name}.crc").unlink()
    for each in (tables, whole):
        append(each, [{**row, "id": f"again-{row['id']}"} for row in part(12, 12)])
    with pytest.raises(SetupError, match=rf"{torn}.* is torn, damaged or missing .*lookback evaluate payins --rebuild"):
        evaluate(tables, torn)
    evaluate(tables, torn, rebuild=True)
    evaluate(whole)
    assert outputs(tables) == outputs(whole) != expected
    kept = [path for path in folder.parent.iterdir() if path.name.startswith("torn.2")]
    assert len(kept) == 1
    assert (kept[0] / "offsets" / "0").exists()
