"""Proves the tables after a soak run, and that every event and every change of a rule is accounted for."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dev.soak.scenario import STREAM, is_usable
from lookback.core.rules.changes import RETIRE_ALL
from lookback.core.rules.commands import LIST_CHANGED, LISTS
from lookback.core.rules.rulelog import ACTIONS
from lookback.core.rules.versions import WARM, WITH_HISTORY, WITHOUT_HISTORY
from lookback.spark.checkpoints.checkpoint import checkpoint_folder
from lookback.spark.replay.proof import prove

if TYPE_CHECKING:
    from lookback.spark.replay.proof import Proofs
    from lookback.spark.tables.lakehouse import Tables

_MAX_SHOWN = 5


def compare(tables: Tables, landing: Path) -> dict[str, Any]:
    """Proves the tables. Returns counts, and the number and first examples of each kind of difference."""
    log = [row.asDict() for row in tables.read("rule_log").collect()]
    with prove(tables, STREAM, {STREAM.name: STREAM}) as proofs:
        differences = {
            **_find_unproved(proofs),
            "alerts twice": _find_repeated(tables),
            "rule changes": _find_log_problems(tables, log),
            "list changes": _find_list_problems(tables, log),
            "still warming": list_warming(Path(checkpoint_folder(tables, STREAM))),
            "account": _find_account_problems(tables, landing),
        }
    return {
        "events": tables.read(STREAM.name).count(),
        "commits": tables.version(STREAM.name),
        "alerts": tables.read("alerts").count(),
        "late_events": tables.read("late_events").count(),
        "rule_changes": sum(map(_is_change, log)),
        "list_changes": sum(row["action"] == LIST_CHANGED for row in log),
        "warm-ups": sum(row["action"] == _WARMING for row in log),
        "warm-ups activated with history": sum(row["decision"] == WITH_HISTORY for row in log),
        "warm-ups activated cold": sum(row["decision"] == WITHOUT_HISTORY for row in log),
        "differences": {name: len(found) for name, found in differences.items()},
        "examples": {
            name: [str(each)[:400] for each in found[:_MAX_SHOWN]] for name, found in differences.items() if found
        },
    }


def _find_unproved(proofs: Proofs) -> dict[str, list[Any]]:
    """Lists what the proof found: the rows of alerts that differ, late events by number, and what it could not prove."""
    alerts = [f"only {row['side']}, {row['times']} times: {row.asDict()}" for row in proofs.differences.collect()]
    late = [row for row in proofs.rows if row.rule_id is None and not row.holds]
    # Nobody deletes anything here, and no commit is of others: all of it can be proved.
    return {"alerts": alerts, "late_events": late, "unprovable": [row for row in proofs.rows if row.unprovable]}


def _find_repeated(tables: Tables) -> list[Any]:
    """Lists the alerts of which a revision is there more than once."""
    counts = tables.read("alerts").groupBy("alert_id", "revision").count().where("count > 1")
    return list(map(tuple, counts.collect()))


_WARMING = "warming"
_LOGGED_CHANGES = {*ACTIONS.values(), _WARMING, "clear_state", "advance", "retire_all"}


def _is_change(entry: dict[str, Any]) -> bool:
    """Returns whether an entry of the log is of a row of `rules`. The row of a version that is warming was logged before."""
    return entry["action"] in _LOGGED_CHANGES and entry["decision"] not in (WITH_HISTORY, WITHOUT_HISTORY)


def find_differences(stored: Iterable[Any], replayed: Iterable[Any]) -> list[str]:
    """Lists the rows that only one side has, or has more often."""
    ours, theirs = Counter(stored), Counter(replayed)
    only_stored = [f"only in the table: {row}" for row in (ours - theirs).elements()]
    return sorted(only_stored + [f"only in the replay: {row}" for row in (theirs - ours).elements()])


def _find_log_problems(tables: Tables, log: list[dict[str, Any]]) -> list[str]:
    """Finds rows of `rules` that are not exactly once in the log."""
    changes = [entry for entry in log if _is_change(entry) or entry["action"] == "rejected"]
    # A version that is paused while it is warming has two rows in the log: it goes on to warm up.
    paused = {(each["rule_id"], each["version"], each["batch_id"]) for each in changes if each["action"] == "paused"}
    logged = Counter(
        (entry["rule_id"], entry["version"] if entry["rule_id"] != "*" else entry["action"])
        for entry in changes
        # Rows with this decision follow from a command, which is in the log, too.
        if entry["decision"] != RETIRE_ALL
        and not (entry["action"] == _WARMING and (entry["rule_id"], entry["version"], entry["batch_id"]) in paused)
    )
    written = Counter(
        (row["rule_id"], row["version"] if row["rule_id"] != "*" else row["status"])
        for row in tables.read("rules").collect()
        # The stream writes these itself, and may do so twice.
        if row["status"] not in (LISTS, WARM)
    )
    return find_differences(logged.elements(), written.elements())


def _find_list_problems(tables: Tables, log: list[dict[str, Any]]) -> list[str]:
    """Finds commits that changed lists and are not exactly once in the log."""
    logged = [entry["version"] for entry in log if entry["action"] == LIST_CHANGED]
    changes = tables.read_changes("lists", 0).select("_commit_version").distinct().collect()
    return find_differences(logged, [row["_commit_version"] for row in changes])


def list_warming(checkpoint: Path) -> list[Any]:
    """Lists the versions that a checkpoint has as warming. The last run waits for their history, so none is left."""
    file = checkpoint / "warming.json"
    return list(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else []


def _find_account_problems(tables: Tables, landing: Path) -> list[str]:
    """Finds problems unless each offered event is in the table once, and each broken line in rejected_events once."""
    lines = [line for file in landing.glob("*.json") for line in file.read_text(encoding="utf-8").splitlines()]
    offered = {line for line in lines if is_usable(line)}
    ids = Counter(row["id"] for row in tables.read(STREAM.name).select("id").collect())
    problems = [f"{id_} is {count} times in the table" for id_, count in ids.items() if count > 1]
    if len(ids) != len(offered):
        problems.append(f"{len(offered)} events offered, {len(ids)} in the table")
    rejected, broken = tables.read("rejected_events").count(), len(lines) - sum(map(is_usable, lines))
    if rejected != broken:
        problems.append(f"{broken} lines are no events, {rejected} rows in rejected_events")
    return problems
