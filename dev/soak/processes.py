"""Runs one process of a soak run, with its own JVM, until it is killed.

A process prints `ready` when it is warm and then waits for a line with its order, so that the next one can warm up while
the one before it works. The next process is not told what a killed one was doing; it has to find out.
"""

from __future__ import annotations

import argparse
import datetime as dt
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

from dev.soak.scenario import (
    LASTING_VALUE,
    LIST,
    LIST_VALUES,
    LISTED,
    RULES,
    STREAM,
    STREAMS,
    make_next_version,
    make_wide_rule,
)
from lookback.config import Settings

if TYPE_CHECKING:
    from lookback.spark.rules import RulesTable
    from lookback.spark.tables.lakehouse import Tables

LANDING = "landing"
_DOCUMENTS = [*RULES, LISTED]
_MAX_ERROR_CHARACTERS = 3_000
_MAX_FAILURES = 3
# Most windows have ended so long after the last event.
_SECONDS_BEYOND = 600
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
    from lookback.spark.checkpoints.checkpoint import checkpoint_folder  # noqa: PLC0415

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
    """Publishes the list that a rule asks and the missing rules, with a change after each, then goes on to change."""
    from lookback.spark import lists  # noqa: PLC0415
    from lookback.spark.rules import RulesTable  # noqa: PLC0415

    chance, rules = random.Random(order["seed"]), RulesTable(tables, STREAMS)  # noqa: S311 - repeatable, no secret
    known = {row.rule_id for row in rules.rows()}
    if LIST not in lists.list_names(tables):
        lists.add_values(tables, LIST, [LASTING_VALUE])
    for document in _DOCUMENTS:
        if document["rule_id"] not in known:
            rules.push(document)
            # An author seldom lives until all rules are there.
            _change(rules, chance)
    while True:
        time.sleep(chance.uniform(0.5, 3))
        _change(rules, chance)


def _change(rules: RulesTable, chance: random.Random) -> None:
    chance.choices(list(_CHANGES), weights=list(_CHANGES.values()))[0](rules, chance)


def _publish_version(rules: RulesTable, chance: random.Random) -> None:
    document = make_next_version(chance.choice(_DOCUMENTS), chance)
    rules.push(document, status=chance.choice(["active"] * 4 + ["shadow", "draft"]))


def _publish_status(rules: RulesTable, chance: random.Random) -> None:
    # Wide rules come later, and may be warming.
    rule_id = chance.choice(sorted({row.rule_id for row in rules.rows()}))
    rules.set_status(rule_id, chance.choice(["active", "active", "paused", "shadow", "retired"]))


def _publish_original(rules: RulesTable, chance: random.Random) -> None:
    rules.push(chance.choice(_DOCUMENTS))


def _publish_wide(rules: RulesTable, chance: random.Random) -> None:
    rules.push(make_wide_rule(chance), status=chance.choice(["active"] * 4 + ["shadow"]))


def _add_values(rules: RulesTable, chance: random.Random) -> None:
    from lookback.spark import lists  # noqa: PLC0415

    values = chance.sample(LIST_VALUES, chance.randint(1, 3))
    lists.add_values(rules.tables, LIST, values, until=_choose_end(rules, chance), reason="soak")


def _remove_values(rules: RulesTable, chance: random.Random) -> None:
    from lookback.spark import lists  # noqa: PLC0415

    lists.remove_values(rules.tables, LIST, chance.sample(LIST_VALUES, chance.randint(1, 3)))


def _change_list_by_sql(rules: RulesTable, chance: random.Random) -> None:
    end, value, table = _choose_end(rules, chance), chance.choice(LIST_VALUES), rules.tables.identifier("lists")
    expiry = "null" if end is None else f"timestamp '{end.isoformat()}'"
    row = f"list = '{LIST}' and value = '{value}'"
    statements = [
        # A value may be there twice.
        f"INSERT INTO {table} (list, value, expires_at) VALUES ('{LIST}', '{value}', {expiry})",
        f"UPDATE {table} SET expires_at = {expiry} WHERE {row}",
        f"DELETE FROM {table} WHERE {row}",
    ]
    rules.tables.spark.sql(chance.choice(statements))


def _choose_end(rules: RulesTable, chance: random.Random) -> dt.datetime | None:
    """Chooses until when a value is on the list: for good, or to a time about the newest event's."""
    highest = _find_highest(rules)
    if highest is None or chance.random() < 0.3:
        return None
    newest = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc) + dt.timedelta(microseconds=highest)
    return newest + dt.timedelta(seconds=chance.choice([-30, 0, 10, 60, 300]))


def _find_highest(rules: RulesTable) -> int | None:
    highest: int | None = rules.tables.read(STREAM.name).selectExpr(_HIGHEST).collect()[0][0]
    return highest


def _advance(rules: RulesTable, chance: random.Random) -> None:
    _advance_beyond(rules, chance.choice([-20, 1]))


def _advance_beyond(rules: RulesTable, seconds: int) -> None:
    highest = _find_highest(rules)
    if highest is not None:
        rules.command("advance", STREAM.name, time=highest + seconds * 1_000_000)


def _clear_state(rules: RulesTable, _chance: random.Random) -> None:
    rules.command("clear_state", STREAM.name)


def _optimize(rules: RulesTable, _chance: random.Random) -> None:
    rules.tables.spark.sql(f"OPTIMIZE {rules.tables.identifier(STREAM.name)}")


# The actions of an author, with their weights.
_CHANGES: dict[Callable[[RulesTable, random.Random], None], int] = {
    _publish_version: 8, _publish_original: 4, _publish_status: 4, _publish_wide: 8, _advance: 2, _clear_state: 1,
    _add_values: 4, _remove_values: 2, _change_list_by_sql: 4, _optimize: 1,
}  # fmt: skip


def _close(tables: Tables, folder: Path, order: dict[str, list[str]]) -> int:
    """Takes in and judges the rest of the events, then prints whether the tables can be proved."""
    from dev.soak.verdict import compare  # noqa: PLC0415
    from lookback.spark.ingest.files import ingest_continuously  # noqa: PLC0415
    from lookback.spark.rules import RulesTable  # noqa: PLC0415

    query = ingest_continuously(
        tables, STREAM, folder / LANDING, checkpoint=folder / "ingest", every=None, format="json"
    )
    query.awaitTermination()
    code = _evaluate(tables, folder, {"options": ["--once", *order["options"]]})
    if not code:
        # Windows end after the last commit, too.
        _advance_beyond(RulesTable(tables, STREAMS), _SECONDS_BEYOND)
        code = _evaluate(tables, folder, {"options": ["--once"]})
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
