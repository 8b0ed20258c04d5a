"""Runs one process of a soak run, with its own JVM, until it is killed.

A process prints `ready` when it is warm and then waits for a line with its order, so that the next one can warm up while
the one before it works. The next process is not told what a killed one was doing; it has to find out.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dev.soak.scenario import RULES, STREAM, STREAMS, make_next_version
from lookback.config import Settings

if TYPE_CHECKING:
    from lookback.spark.rules import RulesTable
    from lookback.spark.tables.lakehouse import Tables

LANDING = "landing"
_MAX_ERROR_CHARACTERS = 3_000
_MAX_FAILURES = 3
_HIGHEST = "max(unix_micros(at)) filter (where at < '2090-01-01')"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one process until it is killed or has done its work."""
    parser = argparse.ArgumentParser(prog="python -m dev.soak.processes", description=__doc__)
    parser.add_argument("role", choices=ROLES)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args(arguments)
    settings = Settings.local(options.folder / "lakehouse", options.folder / "conf")
    tables = _open_tables(settings)
    _print_line("ready")
    line = sys.stdin.readline()
    if not line.strip():
        return 0
    threading.Thread(target=_end_with_parent, daemon=True).start()
    return ROLES[options.role](tables, options.folder, json.loads(line))


def _end_with_parent() -> None:
    """Ends this process with its parent: its standard input, to which nothing more is written, is closed then."""
    sys.stdin.read()
    os._exit(1)


def _print_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _open_tables(settings: Settings) -> Tables:
    """Opens the tables, after Spark has started and has read something."""
    from lookback.spark.platform.session import get_spark  # noqa: PLC0415 - Spark is imported where it is needed
    from lookback.spark.tables.lakehouse import Tables  # noqa: PLC0415

    tables = Tables.local(get_spark("lookback soak", settings=settings.spark), settings.root)
    tables.create(STREAM)
    tables.version("alerts")
    return tables


def _evaluate(tables: Tables, folder: Path, order: dict[str, list[str]]) -> int:
    """Runs the command, and runs it again if a batch failed, as its Python workers may be killed.

    Prints each failure: the killing process knows how many there may be.
    """
    from pyspark.errors import StreamingQueryException  # noqa: PLC0415

    from lookback import cli  # noqa: PLC0415

    places = ["--root", str(tables.root), "--conf", str(folder / "conf")]
    options = order["options"]
    failures, finished = 0, -1
    while True:
        try:
            return cli.main([*places, "evaluate", STREAM.name, "--json", *options])
        except StreamingQueryException as error:  # noqa: PERF203 - once in a life
            # Failures in a row without a batch between them do not come from killed workers.
            known, finished = finished, _find_last_batch(tables)
            failures = failures + 1 if finished == known else 1
            if failures > _MAX_FAILURES:
                raise
            _print_line(json.dumps({"broken": _find_error_lines(str(error))}))
            options = [option for option in options if option != "--rebuild"]


def _find_error_lines(text: str) -> str:
    """Finds the lines of a failed query's text that name an error, of Java or of Python."""
    lines = (line.strip() for line in text.splitlines())
    return "\n".join(line for line in lines if re.search(r"(Error|Exception)\b", line))[:_MAX_ERROR_CHARACTERS]


def _find_last_batch(tables: Tables) -> int:
    """Finds the last finished batch of the evaluation; -1 before the first."""
    from lookback.spark.stream.pipeline import checkpoint_folder  # noqa: PLC0415

    commits = Path(checkpoint_folder(tables, STREAM), "commits").glob("[0-9]*")
    return max((int(file.name) for file in commits if file.name.isdigit()), default=-1)


def _ingest(tables: Tables, folder: Path, order: dict[str, bool]) -> int:
    from lookback.spark.ingest.files import ingest_continuously  # noqa: PLC0415

    query = ingest_continuously(
        tables, STREAM, folder / LANDING, checkpoint=folder / "ingest", every="500 milliseconds", format="json"
    )
    query.awaitTermination()
    return 0


def _author(tables: Tables, _folder: Path, order: dict[str, str]) -> int:
    """Publishes the missing rules, then changes one after another."""
    from lookback.spark.rules import RulesTable  # noqa: PLC0415

    chance, rules = random.Random(order["seed"]), RulesTable(tables, STREAMS)  # noqa: S311 - repeatable, no secret
    known = {row.rule_id for row in rules.rows()}
    for document in RULES:
        if document["rule_id"] not in known:
            rules.push(document)
    while True:
        time.sleep(chance.uniform(0.5, 3))
        chance.choices(list(_CHANGES), weights=list(_CHANGES.values()))[0](rules, chance)


def _publish_version(rules: RulesTable, chance: random.Random) -> None:
    document = make_next_version(chance.choice(RULES), chance)
    rules.push(document, status=chance.choice(["active"] * 4 + ["shadow", "draft"]))


def _publish_status(rules: RulesTable, chance: random.Random) -> None:
    rule_id = str(chance.choice(RULES)["rule_id"])
    rules.set_status(rule_id, chance.choice(["active", "active", "paused", "shadow", "retired"]))


def _publish_original(rules: RulesTable, chance: random.Random) -> None:
    rules.push(chance.choice(RULES))


def _advance(rules: RulesTable, chance: random.Random) -> None:
    highest = rules.tables.read(STREAM.name).selectExpr(_HIGHEST).collect()[0][0]
    if highest is not None:
        rules.command("advance", STREAM.name, time=highest + chance.choice([-20_000_000, 1_000_000]))


def _clear_state(rules: RulesTable, _chance: random.Random) -> None:
    rules.command("clear_state", STREAM.name)


def _optimize(rules: RulesTable, _chance: random.Random) -> None:
    rules.tables.spark.sql(f"OPTIMIZE {rules.tables.identifier(STREAM.name)}")


# The actions of an author, with their weights.
_CHANGES: dict[Callable[[RulesTable, random.Random], None], int] = {
    _publish_version: 8, _publish_original: 4, _publish_status: 4, _advance: 2, _clear_state: 1, _optimize: 1,
}  # fmt: skip


def _close(tables: Tables, folder: Path, order: dict[str, list[str]]) -> int:
    """Takes in and judges the rest of the events, then prints whether the tables can be proved."""
    from dev.soak.verdict import compare  # noqa: PLC0415
    from lookback.spark.ingest.files import ingest_continuously  # noqa: PLC0415

    query = ingest_continuously(
        tables, STREAM, folder / LANDING, checkpoint=folder / "ingest", every=None, format="json"
    )
    query.awaitTermination()
    code = _evaluate(tables, folder, {"options": ["--once", *order["options"]]})
    if not code:
        _print_line(json.dumps({"verdict": compare(tables, folder / LANDING)}))
    return code


def _prepare(_tables: Tables, _folder: Path, _order: object) -> int:
    return 0


ROLES: dict[str, Callable[..., int]] = {
    "prepare": _prepare, "evaluate": _evaluate, "ingest": _ingest, "author": _author, "close": _close,
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
