"""Damage of a checkpoint's files at random ends in the right alerts, or in a sentence with a remedy that gives them."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lookback.core.errors import LookbackError
from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder
from lookback.spark.tables.lakehouse import Tables
from payins import (
    MORE_RULES,
    RULES,
    STREAM,
    STREAMS,
    append,
    make_events,
    publish,
    relocate,
    replay_of_tables,
    replayed_alerts,
    stored_alerts,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from alert_rows import AlertRow

pytestmark = [pytest.mark.spark, pytest.mark.long]
EVENTS = make_events(200, seed=31)
# 24 took 6 minutes on two busy cores.
DAMAGES = 9


def evaluate(tables: Tables, **options: bool) -> list[AlertRow]:
    Evaluation(tables, STREAM, STREAMS, checkpoint_folder(tables, STREAM), once=True, **options).run()  # type: ignore[arg-type]
    return stored_alerts(tables)


def flip_bits(file: Path, chance: random.Random) -> None:
    content = bytearray(file.read_bytes())
    for _ in range(min(len(content), 8)):
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(content)


def cut(file: Path, chance: random.Random) -> None:
    file.write_bytes(file.read_bytes()[: chance.randrange(max(1, file.stat().st_size))])


def remove(file: Path, _: random.Random) -> None:
    file.unlink()


KINDS: list[Callable[[Path, random.Random], None]] = [flip_bits, cut, remove]


def test_c8_random_damage_of_a_checkpoint_is_never_passed_over_in_silence(ready: Tables, tmp_path: Path) -> None:
    publish(ready, [*RULES, *MORE_RULES])
    append(ready, [row for row in EVENTS if row["arrival"] <= 4])
    evaluate(ready)
    append(ready, [row for row in EVENTS if row["arrival"] > 4])
    before, chance, wrong = str(ready.root), random.Random(31), list[str]()
    for number in range(DAMAGES):
        root = tmp_path / str(number)
        shutil.copytree(before, root)
        relocate(root, before, str(root))
        tables = Tables.local(ready.spark, root)
        folder = Path(checkpoint_folder(tables, STREAM))
        kind = KINDS[number % len(KINDS)]
        file = chance.choice(sorted(each for each in folder.rglob("*") if each.is_file()))
        # What guards a file goes with it, as Hadoop would notice that it does not fit.
        (file.parent / f".{file.name}.crc").unlink(missing_ok=True)
        kind(file, chance)
        place = f"{number}: {kind.__name__} {file.relative_to(folder)}"
        try:
            found = evaluate(tables)
        except LookbackError as error:
            if "--rebuild" not in str(error):
                wrong.append(f"{place}: no remedy in {error}")
                continue
            found = evaluate(tables, rebuild=True)
        except Exception as error:  # noqa: BLE001 - all of them are told at the end
            wrong.append(f"{place}: {type(error).__name__}: {str(error)[:300]}")
            continue
        if found != replayed_alerts(replay_of_tables(tables)):
            wrong.append(f"{place}: other alerts")
        shutil.rmtree(root)
    assert wrong == []
