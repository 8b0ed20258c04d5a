"""Reads, writes and checks the checkpoint of an evaluation: the query's id, plan and progress."""

from __future__ import annotations

import contextlib
import json
import re
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lookback.core.errors import SetupError
from lookback.core.rules.coverage import Coverage
from lookback.places import Place, move_tree, open_place, write_whole
from lookback.spark.checkpoints.parcels import Parcels
from lookback.spark.checkpoints.plan import Plan, find_changes
from lookback.spark.checkpoints.sparklogs import (
    EVENTS,
    LISTS,
    RULES,
    SOURCES,
    list_batches,
    read_offsets,
    read_positions,
)
from lookback.spark.platform.owner import become_owner

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from lookback.core.streams.declaration import Stream
    from lookback.spark.tables.lakehouse import Tables

PLAN_FILE = "lookback.json"
_REBUILD = "rebuild.json"
_READ = "read-{}.json"


def describe_remedy(stream: str) -> str:
    """Says how to make a new checkpoint for a stream's evaluation."""
    return f"rebuild it from the tables: lookback evaluate {stream} --rebuild"


def checkpoint_folder(tables: Tables, stream: Stream) -> str:
    """Returns the default checkpoint folder of a stream's evaluation, under the tables' root or volume.

    Raises SetupError for tables of a catalog without a reachable volume.
    """
    return tables.choose_checkpoint("evaluate", stream)


def repartition(spark: SparkSession, folder: str | Place, partitions: int) -> None:
    """Divides the state of a stopped query into `partitions` partitions.

    Raises SetupError if the checkpoint does not exist, it has fewer shards than that, or this Spark cannot repartition
    state.
    """
    checkpoint = Checkpoint(open_place(folder, spark))
    plan = checkpoint.read_plan()
    if plan is None:
        raise SetupError(f"{folder} is not the checkpoint of an evaluation that has run")
    if not 1 <= partitions <= plan.shards:
        raise SetupError(
            f"{folder} divides its keys into {plan.shards} shards, so its state has 1 to {plan.shards} partitions, not "
            f"{partitions}; for more shards make a new checkpoint: `evaluate --rebuild --shards`"
        )
    # An experimental API of Spark 4.2.
    manager = getattr(spark, "_streamingCheckpointManager", None)
    if manager is None:
        raise SetupError(
            "this Spark cannot repartition state: Spark 4.2 can; on Databricks (Runtime 18.3 or newer) set "
            "spark.sql.streaming.stateStore.partitions and start the evaluation again"
        )
    with become_owner(checkpoint.owner_file, f"checkpoint {folder}"):
        manager.repartition(str(checkpoint.folder), partitions)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in a local folder, a mounted one such as /Volumes/..., or an object store."""

    folder: Place

    @property
    def query_id(self) -> str | None:
        """The id of the query, which survives restarts; None before its first start."""
        file = self.folder / "metadata"
        return str(json.loads(file.read_text())["id"]) if file.exists() else None

    def ensure_query_id(self) -> str:
        """Returns the query's id. Before the first start, chooses and stores one for Spark to use."""
        known = self.query_id
        if known is not None:
            return known
        chosen = str(uuid.uuid4())
        self.write_json("metadata", {"id": chosen})
        return chosen

    @property
    def owner_file(self) -> Place:
        """The file that names the evaluating process. It is beside the folder, because the folder may be moved.

        Symbolic links are resolved, so that each folder has only one owner.
        """
        folder = self.folder.resolve() if isinstance(self.folder, Path) else self.folder
        return folder.parent / f".{folder.name}.owner"

    @property
    def is_new(self) -> bool:
        """Whether no batch has been planned yet."""
        return not list_batches(self.folder / "offsets") and not list_batches(self.folder / "commits")

    def read_last_judged(self) -> int | None:
        """Returns the last commit of the events table that finished batches read completely; None before any.

        Raises SetupError if the file cannot be read, and UnknownFormatError if its format is unknown.
        """
        batches = list_batches(self.folder / "commits")
        offset = read_offsets(self.folder / "offsets" / str(batches[-1]))[EVENTS] if batches else None
        return None if offset is None else offset - 1

    def has_judged(self, commit: int, count_files: Callable[[int], int]) -> bool:
        """Returns whether finished batches have read a commit of the events table completely.

        After a DELETE, Spark's log ends within its commit, at the last file, until another commit follows.

        Args:
            commit: The commit.
            count_files: Counts the files of a commit that the change feed reads.

        Raises:
            SetupError: The log of the last batch cannot be read.
        """
        batches = list_batches(self.folder / "commits")
        position = read_positions(self.folder / "offsets" / str(batches[-1]))[EVENTS] if batches else None
        if position is None or position.commit != commit or not position.files:
            return position is not None and commit < position.commit
        return position.files >= count_files(commit)

    def find_last_judged(self) -> int | None:
        """Like `read_last_judged`, but returns None if a file cannot be read or has an unknown format."""
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, SetupError):
            return self.read_last_judged()
        return None

    def find_unfinished(self) -> int | None:
        """Returns the last events commit of an unfinished batch, which is repeated at the start; None without one."""
        planned, finished = list_batches(self.folder / "offsets"), list_batches(self.folder / "commits")
        if not planned or planned[-1] in finished:
            return None
        with contextlib.suppress(SetupError):
            offset = read_offsets(self.folder / "offsets" / str(planned[-1]))[EVENTS]
            return None if offset is None else offset - 1
        return None

    def read_last_batch_time(self) -> float | None:
        """Returns when the last batch finished, in seconds since the epoch; None before the first."""
        finished = list_batches(self.folder / "commits")
        return (self.folder / "commits" / str(finished[-1])).stat().st_mtime if finished else None

    def find_next_commits(self) -> dict[str, int]:
        """Returns the first commit of each source that the next batch reads. An unfinished batch is read again."""
        return self._find_commits_after(list_batches(self.folder / "commits"))

    def find_last_planned(self) -> int:
        """Returns the number of the last planned batch; -1 before the first."""
        return max(list_batches(self.folder / "offsets"), default=-1)

    def note_read(self, source: str, commit: int, stamp: int) -> None:
        """Stores the last commit read from a table and its time, so that the next start can recognize the table.

        The note may be lost in a crash of the machine; then nothing is compared.
        """
        note = json.dumps([commit, stamp]).encode()
        write_whole(self.folder / _READ.format(source), note, durable=False)

    def read_noted(self, stream: Stream) -> dict[str, tuple[int, int]]:
        """Returns for each table, by name, the last commit and time that `note_read` stored, if any."""
        noted = {}
        for source in (EVENTS, RULES, LISTS):
            with contextlib.suppress(OSError, ValueError, TypeError):
                commit, stamp = json.loads((self.folder / _READ.format(source)).read_text())
                noted[stream.name if source == EVENTS else source] = int(commit), int(stamp)
        return noted

    def read_batch(self, batch: int) -> dict[str, int | None]:
        """Returns the last commit of each source that a planned batch reads completely, or None."""
        offsets = read_offsets(self.folder / "offsets" / str(batch))
        return {name: None if each is None else each - 1 for name, each in offsets.items()}

    def find_reread_commits(self) -> dict[str, int]:
        """Returns the first commit of each source that Spark reads at a start: the first of the last finished batch."""
        return self._find_commits_after(list_batches(self.folder / "commits")[:-1])

    def plan_gates(self, asked: str) -> dict[int, str]:
        """Returns the gates of the next plan. `asked` is what the gate in the settings requires now.

        A changed setting applies from the first rules commit that no batch has been planned to read, so that a repeated
        batch decides as before.
        """
        plan = self.read_plan()
        before = {} if plan is None else dict(sorted(plan.gates.items()))
        if plan is None or self.is_new:
            return {0: asked} if asked else {}
        last = next(reversed(before.items()), (0, ""))
        if last[1] == asked:
            return before
        begin = plan.first_commit(RULES)
        # Without readable offsets, no batch will be repeated.
        with contextlib.suppress(OSError, SetupError):
            begin = self._find_commits_after(list_batches(self.folder / "offsets"))[RULES]
        return {**dict([last] if last[1] else []), begin: asked}

    def _find_commits_after(self, finished: list[int]) -> dict[str, int]:
        plan = self.read_plan()
        offsets: Mapping[str, int | None] = {}
        if finished and (file := self.folder / "offsets" / str(finished[-1])).exists():
            offsets = read_offsets(file)
        starts = {name: 0 if plan is None else plan.first_commit(name) for name in SOURCES}
        return {name: starts[name] if (after := offsets.get(name)) is None else after for name in SOURCES}

    def read_plan(self) -> Plan | None:
        """Returns the plan of the query's last start; None before any. Raises SetupError if the file is damaged."""
        file = self.folder / PLAN_FILE
        try:
            document = json.loads(file.read_text())
            shards, coverage = int(document["shards"]), Coverage.from_dict(document)
            starts = {str(name): int(start) for name, start in document["starts"].items()}
            gates = {int(commit): str(asked) for commit, asked in document["gates"].items()}
            settings = tuple((None if after is None else int(after), str(text)) for after, text in document["settings"])
            declared, spark = dict(document["declared"]), str(document["spark"])
            return Plan(shards, coverage, declared, starts, spark, gates, settings)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SetupError(f"{file} is damaged ({error}); start with a new checkpoint: evaluate --rebuild") from error

    def write_plan(self, plan: Plan) -> None:
        """Stores the plan; called before the query starts."""
        document = {
            "shards": plan.shards,
            **plan.coverage.to_dict(),
            "declared": dict(plan.declared),
            "starts": dict(plan.starts),
            "spark": plan.spark,
            "gates": dict(plan.gates),
            "settings": [list(row) for row in plan.settings],
        }
        self.write_json(PLAN_FILE, document)

    def read_rebuild(self) -> dict[str, Any] | None:
        """Returns the document that `write_rebuild` stored; None if the checkpoint is not being rebuilt.

        Raises SetupError if the file is damaged.
        """
        file = self.folder / _REBUILD
        if not file.exists():
            return None
        try:
            return dict(json.loads(file.read_text()))
        except (ValueError, TypeError) as error:
            raise SetupError(f"{file} is damaged ({error}); start with a new checkpoint: evaluate --rebuild") from error

    def write_rebuild(self, document: Mapping[str, Any]) -> None:
        """Stores how to rebuild the state; called before anything else is written to the folder."""
        self.write_json(_REBUILD, document)

    def move_aside(self) -> Place | None:
        """Renames the folder, if it exists, by appending the time. Returns the new path."""
        if not self.folder.exists():
            return None
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        names = (f"{self.folder.name}.{stamp}{f'-{again}' if again else ''}" for again in range(1_000))
        target = next(path for name in names if not (path := self.folder.with_name(name)).exists())
        move_tree(self.folder, target)
        return target

    def require_fit(self, stream: Stream, shards: int | None) -> None:
        """Raises SetupError if the checkpoint does not match the stream, or `shards` if given."""
        plan = self.read_plan()
        if plan is None or self.is_new:
            return
        remedy = describe_remedy(stream.name)
        if shards not in (None, plan.shards):
            raise SetupError(
                f"{self.folder} has {plan.shards} shards, which cannot change to {shards}; leave the number out, or "
                f"{remedy} --shards {shards}"
            )
        if problems := find_changes(plan, stream):
            raise SetupError(
                f"{self.folder} does not match the current declaration of stream {stream.name!r}: "
                f"{'; '.join(problems)}. Undo the change, or {remedy}"
            )

    def require_spark(self, version: str, stream: str) -> None:
        """Raises SetupError if a newer minor version of Spark than `version` has written the checkpoint."""
        plan = self.read_plan()
        if plan is not None and not self.is_new and _parse_minor_version(version) < _parse_minor_version(plan.spark):
            raise SetupError(
                f"{self.folder} was last written by Spark {plan.spark}, but this is Spark {version}: an older Spark "
                f"may misread what a newer one wrote. Use Spark {plan.spark} or newer, or "
                f"{describe_remedy(stream)}"
            )

    def write_json(self, name: str, document: object) -> None:
        """Stores a document as a JSON file, atomically and crash-safe."""
        Parcels(self.folder).write(name, json.dumps(document).encode())

    def parcels(self, kind: str) -> Parcels:
        """Returns the parcels of a kind, in their own folder, whose name does not clash with Spark's."""
        return Parcels(self.folder / f"lookback-{kind}")


def _parse_minor_version(version: str) -> tuple[int, ...]:
    """Returns the first two numbers of a Spark version; an empty tuple if it has none."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return () if match is None else (int(match[1]), int(match[2]))
