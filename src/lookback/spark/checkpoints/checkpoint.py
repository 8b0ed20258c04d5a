"""Reads, writes, checks and repairs the checkpoint of an evaluation: the query's id, plan and progress."""

from __future__ import annotations

import contextlib
import json
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lookback.core.errors import SetupError
from lookback.core.rules.coverage import Coverage
from lookback.places import Place, move_tree, open_place, write_whole
from lookback.spark.checkpoints.parcels import Parcels
from lookback.spark.platform.owner import become_owner

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from lookback.core.streams.declaration import Stream
    from lookback.spark.tables.lakehouse import Tables

_PLAN = "lookback.json"
_REBUILD = "rebuild.json"
_READ = "read-{}.json"
# The sources of the query, in the order of their lines in an offsets file (after version and metadata), and the table
# of lists, which only the driver reads.
EVENTS, RULES, LISTS = "events", "rules", "lists"
_SOURCES = (EVENTS, RULES)
# A file of the state store, with its version. The files that belong to a .zip have other names.
_STATE = re.compile(r"(\d+)\.(?:changelog|zip)")
# The versions of Spark's logs that this release supports. Later versions may write a source's id before its offset.
_KNOWN_VERSIONS = {"offsets": ("v1",), "commits": ("v1", "v2")}
_VERSION = re.compile(r"v\d+")
_SOURCE_ID = re.compile(r"[^{\[\"]*:(?=[{-])")
_REMEDY = "rebuild it from the tables: lookback evaluate {stream} --rebuild"


class UnknownFormatError(SetupError):
    """A file of Spark's in the checkpoint is intact but has an unknown format."""


def checkpoint_folder(tables: Tables, stream: Stream) -> str:
    """Returns the default checkpoint folder of a stream's evaluation, under the tables' root or volume.

    Raises SetupError for tables of a catalog without a reachable volume.
    """
    return tables.choose_checkpoint("evaluate", stream)


@dataclass(frozen=True)
class Plan:
    """The plan of a query.

    Attributes:
        shards: The number of parts that the keys are divided into, fixed by the first batch.
        coverage: The events and fields that dispatch sends: enough for all rules in force, including those whose rows
            were deleted since.
        declared: The part of the stream's declaration that state depends on.
        starts: The first commit to read of each source.
        spark: The version of Spark that plans the query.
        gates: What an enforced gate requires of active rows, by the rules commit from which it applies; see
            `RuleChange`.
        settings: The rows of the `Declarations` that the query uses.
    """

    shards: int
    coverage: Coverage
    declared: Mapping[str, Any] = field(default_factory=dict)
    starts: Mapping[str, int] = field(default_factory=dict)
    spark: str = ""
    gates: Mapping[int, str] = field(default_factory=dict)
    settings: Sequence[tuple[int | None, str]] = ()

    def first_commit(self, source: str) -> int:
        """Returns the first commit that the query reads of a source."""
        return self.starts.get(source, 0)


def snapshot_declaration(stream: Stream) -> dict[str, Any]:
    """Returns the part of a stream's declaration that state depends on, as plain values."""
    fields = {name: str(type_) for name, type_ in stream.fields.items()}
    return {
        "stream": stream.name, "event_id": stream.event_id, "event_time": stream.event_time, "fields": fields,
        "order_by": list(stream.order_by),
    }  # fmt: skip


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
        return not _list_batches(self.folder / "offsets") and not _list_batches(self.folder / "commits")

    def read_last_judged(self) -> int | None:
        """Returns the last commit of the events table that finished batches read completely; None before any.

        Raises SetupError if the file cannot be read, and UnknownFormatError if its format is unknown.
        """
        batches = _list_batches(self.folder / "commits")
        offset = _read_offsets(self.folder / "offsets" / str(batches[-1]))[EVENTS] if batches else None
        return None if offset is None else offset - 1

    def find_last_judged(self) -> int | None:
        """Like `read_last_judged`, but returns None if a file cannot be read or has an unknown format."""
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, SetupError):
            return self.read_last_judged()
        return None

    def find_unfinished(self) -> int | None:
        """Returns the last events commit of an unfinished batch, which is repeated at the start; None without one."""
        planned, finished = _list_batches(self.folder / "offsets"), _list_batches(self.folder / "commits")
        if not planned or planned[-1] in finished:
            return None
        with contextlib.suppress(SetupError):
            offset = _read_offsets(self.folder / "offsets" / str(planned[-1]))[EVENTS]
            return None if offset is None else offset - 1
        return None

    def read_last_batch_time(self) -> float | None:
        """Returns when the last batch finished, in seconds since the epoch; None before the first."""
        finished = _list_batches(self.folder / "commits")
        return (self.folder / "commits" / str(finished[-1])).stat().st_mtime if finished else None

    def find_next_commits(self) -> dict[str, int]:
        """Returns the first commit of each source that the next batch reads. An unfinished batch is read again."""
        return self._find_commits_after(_list_batches(self.folder / "commits"))

    def find_last_planned(self) -> int:
        """Returns the number of the last planned batch; -1 before the first."""
        return max(_list_batches(self.folder / "offsets"), default=-1)

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
        offsets = _read_offsets(self.folder / "offsets" / str(batch))
        return {name: None if each is None else each - 1 for name, each in offsets.items()}

    def find_reread_commits(self) -> dict[str, int]:
        """Returns the first commit of each source that Spark reads at a start: the first of the last finished batch."""
        return self._find_commits_after(_list_batches(self.folder / "commits")[:-1])

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
            begin = self._find_commits_after(_list_batches(self.folder / "offsets"))[RULES]
        return {**dict([last] if last[1] else []), begin: asked}

    def _find_commits_after(self, finished: list[int]) -> dict[str, int]:
        plan = self.read_plan()
        offsets: Mapping[str, int | None] = {}
        if finished and (file := self.folder / "offsets" / str(finished[-1])).exists():
            offsets = _read_offsets(file)
        starts = {name: 0 if plan is None else plan.first_commit(name) for name in _SOURCES}
        return {name: starts[name] if (after := offsets.get(name)) is None else after for name in _SOURCES}

    def read_plan(self) -> Plan | None:
        """Returns the plan of the query's last start; None before any. Raises SetupError if the file is damaged."""
        file = self.folder / _PLAN
        if not file.exists():
            return None
        try:
            document = json.loads(file.read_text())
            shards, coverage = int(document["shards"]), Coverage.from_dict(document)
            starts = {str(name): int(start) for name, start in document["starts"].items()}
            gates = {int(commit): str(asked) for commit, asked in document["gates"].items()}
            settings = tuple((None if after is None else int(after), str(text)) for after, text in document["settings"])
            declared, spark = dict(document["declared"]), str(document["spark"])
            return Plan(shards, coverage, declared, starts, spark, gates, settings)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SetupError(f"{file} is damaged ({error}); start with a new checkpoint: evaluate --rebuild") from error

    def write_plan(self, plan: Plan) -> None:
        """Stores the plan; called before the query starts."""
        document = {
            "shards": plan.shards, **plan.coverage.to_dict(), "declared": dict(plan.declared), "starts": dict(plan.starts),
            "spark": plan.spark, "gates": dict(plan.gates), "settings": [list(row) for row in plan.settings],
        }  # fmt: skip
        self.write_json(_PLAN, document)

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
        remedy = _REMEDY.format(stream=stream.name)
        if shards not in (None, plan.shards):
            raise SetupError(
                f"{self.folder} has {plan.shards} shards, which cannot change to {shards}; leave the number out, or "
                f"{remedy} --shards {shards}"
            )
        if problems := _find_changes(plan, stream):
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
                f"{_REMEDY.format(stream=stream)}"
            )

    def repair(self, stream: Stream, is_written: Callable[[str], bool]) -> list[str]:
        """Repairs the damage that a crash may leave in the last batch, if that is safe.

        Args:
            stream: The stream.
            is_written: Returns whether an output table has a commit with this mark, `query id:batch`.

        Returns:
            A line for each repair.

        Raises:
            SetupError: If the checkpoint has other damage; the message names the file.
            UnknownFormatError: If a file has an unknown format. Nothing is changed then.
        """
        if self.is_new:
            return self._repair_new()
        self.require_known_format()
        self._require_whole(stream, "metadata", lambda file: json.loads(file.read_text())["id"])
        self._require_whole(stream, _PLAN, lambda _: self.read_plan())
        planned, finished = _list_batches(self.folder / "offsets"), _list_batches(self.folder / "commits")
        done = []
        if finished and not _is_whole(self.folder / "commits" / str(finished[-1]), lines=2):
            if planned[-1:] != finished[-1:]:
                raise self._make_torn_error(stream, self.folder / "commits" / str(finished[-1]))
            done.append(self._remove("commits", finished.pop(), "the batch runs again, but is written only once"))
        if planned and planned[-1] not in finished and not _is_planned(self.folder / "offsets" / str(planned[-1])):
            if is_written(f"{self.query_id}:{planned[-1]}"):
                raise self._make_torn_error(stream, self.folder / "offsets" / str(planned[-1]))
            done.append(self._remove("offsets", planned.pop(), "the batch had written nothing and is planned again"))
        needed = [*planned[-1:], *finished[-1:]]
        for number in sorted(set(needed)):
            if not _is_planned(self.folder / "offsets" / str(number)):
                raise self._make_torn_error(stream, self.folder / "offsets" / str(number))
        if ahead := self._find_unfinished_state(finished):
            for file in ahead:
                _unlink(file)
            done.append(f"removed {len(ahead)} state files of an unfinished batch, which runs again")
        return done

    def require_known_format(self) -> None:
        """Raises UnknownFormatError if one of Spark's logs has a format that this release cannot read and repair."""
        for kind in ("offsets", "commits"):
            for number in _list_batches(self.folder / kind)[-2:]:
                file = self.folder / kind / str(number)
                if unknown := _find_unknown_format(file, kind):
                    raise UnknownFormatError(
                        f"{file} {unknown}, a format that this release does not know: another version of Spark may "
                        "have written it. Nothing was repaired or deleted. Use the versions of Spark and Lookback that "
                        "wrote it. Or, at your own risk, set accept_unknown_checkpoint: true in conf/settings.yml to "
                        "let Spark use it unchecked"
                    )

    def _find_unfinished_state(self, finished: list[int]) -> list[Place]:
        """Finds state files newer than the last finished batch, which a repeated batch could mistake for its own.

        Batch n ends with version n + 1 of the state.
        """
        last = finished[-1] + 1 if finished else 0
        files: list[Place] = [*(self.folder / "state").glob("*/*/[0-9]*.*")]
        ahead = [file for file in files if (match := _STATE.fullmatch(file.name)) and int(match[1]) > last]
        return sorted(ahead, key=str)

    def _repair_new(self) -> list[str]:
        file = self.folder / "metadata"
        if not file.exists() or _is_readable(file, lambda each: json.loads(each.read_text())["id"]):
            return []
        _unlink(file)
        return [f"removed the torn file {file}: nothing had begun"]

    def _require_whole(self, stream: Stream, name: str, read: Callable[[Place], object]) -> None:
        file = self.folder / name
        if not file.exists() or not _is_readable(file, read):
            raise self._make_torn_error(stream, file)

    def _make_torn_error(self, stream: Stream, file: Place) -> SetupError:
        what = "is torn or damaged" if file.exists() else "is missing"
        return SetupError(
            f"{file} {what}: the evaluation cannot resume from this checkpoint; {_REMEDY.format(stream=stream.name)}"
        )

    def _remove(self, kind: str, number: int, because: str) -> str:
        file = self.folder / kind / str(number)
        _unlink(file)
        return f"removed the torn file {file}: {because}"

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


def _list_batches(folder: Place) -> list[int]:
    """Returns the numbers of the batches that have a file in the folder, ascending."""
    return sorted(int(file.name) for file in folder.glob("[0-9]*") if file.name.isdigit())


def _read_offsets(file: Place) -> dict[str, int | None]:
    """Returns the first commit of each source after a batch. Raises SetupError if the file is unreadable."""
    if unknown := _find_unknown_format(file, "offsets"):
        raise UnknownFormatError(
            f"{file} {unknown}, a format that this release does not know, so the last evaluated commit is unknown"
        )
    try:
        lines = file.read_text().splitlines()[2:]
        offsets = [None if line == "-" else json.loads(line) for line in lines]
        read = {
            name: None if each is None else int(each["reservoirVersion"])
            for name, each in zip(_SOURCES, offsets, strict=True)
        }
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise SetupError(
            f"{file} is torn or missing ({error}); start with a new checkpoint: evaluate --rebuild"
        ) from error
    return read


def _find_unknown_format(file: Place, kind: str) -> str | None:
    """Describes how a file of Spark's logs differs from the known format; None if it matches, is torn or is missing."""
    try:
        version, *lines = file.read_text().splitlines() or [""]
    except (OSError, UnicodeDecodeError):
        return None
    if _VERSION.fullmatch(version) and version not in _KNOWN_VERSIONS[kind]:
        return f"has version {version}"
    if kind == "commits" or version not in _KNOWN_VERSIONS[kind]:
        return None
    sources = [line for line in lines[1:] if line != "-"]
    if any(_SOURCE_ID.match(line) for line in sources):
        return "names its sources"
    read = [offset for line in sources if (offset := _parse_json(line)) is not None]
    if any(not isinstance(offset, dict) or "reservoirVersion" not in offset for offset in read):
        return "has offsets without a table version"
    if len(lines) - 1 > len(_SOURCES):
        return f"has {len(lines) - 1} sources instead of {len(_SOURCES)}"
    return None


def _parse_json(text: str) -> Any:
    """Returns the value of a JSON text; None if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def _is_planned(file: Place) -> bool:
    return _is_whole(file, lines=2 + len(_SOURCES)) and _is_readable(file, _read_offsets)


def _is_whole(file: Place, lines: int) -> bool:
    """Returns whether a file of Spark's has a version and at least `lines` lines in all, each JSON or `-`."""

    def read(file: Place) -> None:
        version, *rest = file.read_text().splitlines()
        if not version.startswith("v") or len(rest) < lines - 1:
            raise ValueError(version)
        for line in rest:
            if line != "-":
                json.loads(line)

    return _is_readable(file, read)


def _is_readable(file: Place, read: Callable[[Place], object]) -> bool:
    try:
        read(file)
    except (SetupError, OSError, ValueError, KeyError, TypeError):
        return False
    return True


def _unlink(file: Place) -> None:
    file.unlink()
    # The file's Hadoop checksum.
    (file.parent / f".{file.name}.crc").unlink(missing_ok=True)


def _find_changes(plan: Plan, stream: Stream) -> list[str]:
    """Describes how a stream's declaration differs from the one that the state was built with."""
    before = plan.declared
    if not before:
        return []
    if before["stream"] != stream.name:
        return [f"it is the checkpoint of stream {before['stream']!r}"]
    now = snapshot_declaration(stream)
    problems = [
        f"{key} was {before[key]}, now {now[key]}"
        for key in ("event_id", "event_time", "order_by")
        if before[key] != now[key]
    ]
    read = {before["event_id"], before["event_time"], *plan.coverage.fields}
    for name in sorted(read & before["fields"].keys()):
        was, is_now = before["fields"][name], now["fields"].get(name)
        if is_now is None:
            problems.append(f"field {name}, which rules read, is gone")
        elif is_now != was:
            problems.append(f"field {name} was {was}, now {is_now}")
    return problems
