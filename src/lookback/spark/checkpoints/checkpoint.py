"""Reads, writes, checks and repairs the checkpoint of an evaluation: its query's id, its plan and its progress."""

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
# The sources of the query in its order, which is also that of the lines of an offsets file after version and metadata, and
# the table of lists, which the driver reads.
EVENTS, RULES, LISTS = "events", "rules", "lists"
_SOURCES = (EVENTS, RULES)
# A file that the state store saved, with its version. The files that belong to a .zip are named otherwise.
_STATE = re.compile(r"(\d+)\.(?:changelog|zip)")
# The versions of Spark's logs that this release knows. Later versions may write a source's id before its offset.
_KNOWN_VERSIONS = {"offsets": ("v1",), "commits": ("v1", "v2")}
_VERSION = re.compile(r"v\d+")
_SOURCE_ID = re.compile(r"[^{\[\"]*:(?=[{-])")
_REMEDY = "rebuild it from the tables: lookback evaluate {stream} --rebuild"


class UnknownFormatError(SetupError):
    """A file of Spark's in the checkpoint is whole, but has a format that this release does not know."""


def checkpoint_folder(tables: Tables, stream: Stream) -> str:
    """Returns the default checkpoint folder of a stream's evaluation, which is below the tables' root or volume.

    Raises SetupError for tables of a catalog without a reachable volume.
    """
    return f"{tables.files}/_checkpoints/evaluate_{stream.name}"


@dataclass(frozen=True)
class Plan:
    """The plan of a query.

    shards: the number of parts that the keys are divided into, fixed by the first batch. coverage: the events and fields
    that dispatch sends, enough for the rules in force, even those whose rows were deleted since. declared: the part of the
    stream's declaration that state depends on. starts: the first commit that
    is read of each source. spark: the version of Spark that plans the query.
    gates: what an enforced gate asks of active rows, by the commit of the rules from which on it does (see `RuleChange`).
    settings: the rows of the `Declarations` by which the query judges.
    """

    shards: int
    coverage: Coverage
    declared: Mapping[str, Any] = field(default_factory=dict)
    starts: Mapping[str, int] = field(default_factory=dict)
    spark: str = ""
    gates: Mapping[int, str] = field(default_factory=dict)
    settings: Sequence[tuple[int | None, str]] = ()

    def first_commit(self, source: str) -> int:
        """Returns the first commit of a source that the query reads."""
        return self.starts.get(source, 0)


def snapshot_declaration(stream: Stream) -> dict[str, Any]:
    """Returns the part of a stream's declaration that window state depends on, as plain values."""
    fields = {name: str(type_) for name, type_ in stream.fields.items()}
    return {
        "stream": stream.name, "event_id": stream.event_id, "event_time": stream.event_time, "fields": fields,
        "order_by": list(stream.order_by),
    }  # fmt: skip


def repartition(spark: SparkSession, folder: str | Place, partitions: int) -> None:
    """Divides the state of a stopped query among `partitions` partitions, at most as many as it has shards.

    Raises SetupError if there is no such checkpoint, if it has fewer shards, or if this Spark cannot repartition state.
    """
    checkpoint = Checkpoint(open_place(folder, spark))
    plan = checkpoint.read_plan()
    if plan is None:
        raise SetupError(f"{folder} is not the checkpoint of an evaluation that has run")
    if not 1 <= partitions <= plan.shards:
        raise SetupError(
            f"{folder} divides its keys into {plan.shards} shards, so its state has 1 to {plan.shards} partitions, not "
            f"{partitions}; more shards are chosen with a new checkpoint: `evaluate --rebuild --shards`"
        )
    # Spark 4.2 has this as an experimental call.
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
    """A checkpoint in a folder of this machine, also a mounted one such as /Volumes/..., or of an object store."""

    folder: Place

    @property
    def query_id(self) -> str | None:
        """The id that the query keeps over restarts; None before its first start."""
        file = self.folder / "metadata"
        return str(json.loads(file.read_text())["id"]) if file.exists() else None

    def ensure_query_id(self) -> str:
        """Returns the query's id. Before the first start it chooses one and stores it, which Spark then uses."""
        known = self.query_id
        if known is not None:
            return known
        chosen = str(uuid.uuid4())
        self.write_json("metadata", {"id": chosen})
        return chosen

    @property
    def owner_file(self) -> Place:
        """The file that names the evaluating process. It lies beside the folder, which may be moved.

        A symbolic link leads to one folder, so its owner is the same.
        """
        folder = self.folder.resolve() if isinstance(self.folder, Path) else self.folder
        return folder.parent / f".{folder.name}.owner"

    @property
    def is_new(self) -> bool:
        """True until a batch has been planned."""
        return not _list_batches(self.folder / "offsets") and not _list_batches(self.folder / "commits")

    def read_last_judged(self) -> int | None:
        """Returns the last commit of the events table that finished batches have read whole; None before the first batch.

        Raises SetupError if the file cannot be read, and UnknownFormatError.
        """
        batches = _list_batches(self.folder / "commits")
        offset = _read_offsets(self.folder / "offsets" / str(batches[-1]))[EVENTS] if batches else None
        return None if offset is None else offset - 1

    def find_last_judged(self) -> int | None:
        """Returns the same as `read_last_judged`, but None if a file cannot be read or has an unknown format."""
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, SetupError):
            return self.read_last_judged()
        return None

    def find_unfinished(self) -> int | None:
        """Returns the last commit of the events that a begun batch reads, which is repeated at the start; None without one."""
        planned, finished = _list_batches(self.folder / "offsets"), _list_batches(self.folder / "commits")
        if not planned or planned[-1] in finished:
            return None
        with contextlib.suppress(SetupError):
            offset = _read_offsets(self.folder / "offsets" / str(planned[-1]))[EVENTS]
            return None if offset is None else offset - 1
        return None

    def read_last_batch_time(self) -> float | None:
        """Returns the time at which the last batch finished, in seconds from the epoch; None before the first."""
        finished = _list_batches(self.folder / "commits")
        return (self.folder / "commits" / str(finished[-1])).stat().st_mtime if finished else None

    def find_next_commits(self) -> dict[str, int]:
        """Returns, per source, the first commit that the next batch reads; an unfinished batch is read again."""
        return self._find_commits_after(_list_batches(self.folder / "commits"))

    def find_last_planned(self) -> int:
        """Returns the number of the last batch that was planned; -1 before the first."""
        return max(_list_batches(self.folder / "offsets"), default=-1)

    def note_read(self, source: str, commit: int, stamp: int) -> None:
        """Notes the last commit of a table that was read, with its time, by which the table is known again at a start.

        It need not survive a crash of the machine: without a note nothing is compared.
        """
        note = json.dumps([commit, stamp]).encode()
        write_whole(self.folder / _READ.format(source), note, durable=False)

    def read_noted(self, stream: Stream) -> dict[str, tuple[int, int]]:
        """Returns, by the name of a table, the commit and the time that `note_read` noted last, where it did."""
        noted = {}
        for source in (EVENTS, RULES, LISTS):
            with contextlib.suppress(OSError, ValueError, TypeError):
                commit, stamp = json.loads((self.folder / _READ.format(source)).read_text())
                noted[stream.name if source == EVENTS else source] = int(commit), int(stamp)
        return noted

    def read_batch(self, batch: int) -> dict[str, int | None]:
        """Returns, per source, the last commit that a planned batch reads whole; None where there is none."""
        offsets = _read_offsets(self.folder / "offsets" / str(batch))
        return {name: None if each is None else each - 1 for name, each in offsets.items()}

    def find_reread_commits(self) -> dict[str, int]:
        """Returns, per source, the first commit that Spark looks up at a start: the first one of the last finished batch."""
        return self._find_commits_after(_list_batches(self.folder / "commits")[:-1])

    def plan_gates(self, asked: str) -> dict[int, str]:
        """Returns the gates of the next plan. asked: what the gate of the settings asks now.

        A change of the settings holds from the first commit of the rules on that no batch has been planned to read: a batch
        that is repeated decides as it did before.
        """
        plan = self.read_plan()
        before = {} if plan is None else dict(sorted(plan.gates.items()))
        if plan is None or self.is_new:
            return {0: asked} if asked else {}
        last = next(reversed(before.items()), (0, ""))
        if last[1] == asked:
            return before
        begin = plan.first_commit(RULES)
        # Without offsets that can be read there is no batch that would be repeated.
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
        """Returns the plan of the query's last start; None before the first. Raises SetupError if the file is damaged."""
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
        """Returns the document that `write_rebuild` stored; None if this checkpoint's state is not rebuilt.

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
        """Stores how the state is rebuilt; called before anything else is in the folder."""
        self.write_json(_REBUILD, document)

    def move_aside(self) -> Place | None:
        """Renames the folder, if it exists, so that its name ends in the time. Returns the new path."""
        if not self.folder.exists():
            return None
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        names = (f"{self.folder.name}.{stamp}{f'-{again}' if again else ''}" for again in range(1_000))
        target = next(path for name in names if not (path := self.folder.with_name(name)).exists())
        move_tree(self.folder, target)
        return target

    def require_fit(self, stream: Stream, shards: int | None) -> None:
        """Raises SetupError if the checkpoint belongs to another stream or has another number of shards.

        shards: the required number; None accepts any.
        """
        plan = self.read_plan()
        if plan is None or self.is_new:
            return
        remedy = _REMEDY.format(stream=stream.name)
        if shards not in (None, plan.shards):
            raise SetupError(
                f"{self.folder} divides its keys into {plan.shards} shards for good, not {shards}; leave the number out, or "
                f"{remedy} --shards {shards}"
            )
        if problems := _find_changes(plan, stream):
            raise SetupError(
                f"{self.folder} does not fit stream {stream.name!r} as it is declared now: {'; '.join(problems)}. "
                f"Take the change back, or {remedy}"
            )

    def require_spark(self, version: str, stream: str) -> None:
        """Raises SetupError if a newer minor version of Spark than `version` has written the checkpoint."""
        plan = self.read_plan()
        if plan is not None and not self.is_new and _parse_minor_version(version) < _parse_minor_version(plan.spark):
            raise SetupError(
                f"{self.folder} was last written by Spark {plan.spark}, and this is Spark {version}: an older Spark cannot be "
                f"trusted to read what a newer one wrote. Go on with Spark {plan.spark} or newer, or "
                f"{_REMEDY.format(stream=stream)}"
            )

    def repair(self, stream: Stream, is_written: Callable[[str], bool]) -> list[str]:
        """Repairs the damage that a crash may leave in the last batch, if that is safe. Returns a line for each repair.

        is_written: returns whether an output table has a commit with this mark, `query id:batch`. Raises SetupError,
        naming the file, if the checkpoint has other damage, and UnknownFormatError, before anything is changed, if a file
        has an unknown format.
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
            done.append(self._remove("commits", finished.pop(), "the batch is run again, and written once"))
        if planned and planned[-1] not in finished and not _is_planned(self.folder / "offsets" / str(planned[-1])):
            if is_written(f"{self.query_id}:{planned[-1]}"):
                raise self._make_torn_error(stream, self.folder / "offsets" / str(planned[-1]))
            done.append(self._remove("offsets", planned.pop(), "the batch had written nothing, and is planned again"))
        needed = [*planned[-1:], *finished[-1:]]
        for number in sorted(set(needed)):
            if not _is_planned(self.folder / "offsets" / str(number)):
                raise self._make_torn_error(stream, self.folder / "offsets" / str(number))
        if ahead := self._find_unfinished_state(finished):
            for file in ahead:
                _unlink(file)
            done.append(f"{len(ahead)} files of state of a batch that was not finished are removed: it is run again")
        return done

    def require_known_format(self) -> None:
        """Raises UnknownFormatError if a log of Spark's lacks the format that this release reads and repairs."""
        for kind in ("offsets", "commits"):
            for number in _list_batches(self.folder / kind)[-2:]:
                file = self.folder / kind / str(number)
                if unknown := _find_unknown_format(file, kind):
                    raise UnknownFormatError(
                        f"{file} {unknown}, a format that this release does not know: another version of Spark may have "
                        "written it. Nothing is repaired or deleted. Evaluate with the Spark and the Lookback that wrote it; "
                        "or, at your own risk, write accept_unknown_checkpoint: true into conf/settings.yml, and Spark "
                        "goes on with it as it is"
                    )

    def _find_unfinished_state(self, finished: list[int]) -> list[Place]:
        """Finds the files of state that are newer than the last finished batch; its repetition could take them as its own.

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
        return [f"{file} was torn and is removed: nothing had begun"]

    def _require_whole(self, stream: Stream, name: str, read: Callable[[Place], object]) -> None:
        file = self.folder / name
        if not file.exists() or not _is_readable(file, read):
            raise self._make_torn_error(stream, file)

    def _make_torn_error(self, stream: Stream, file: Place) -> SetupError:
        what = "is torn or damaged" if file.exists() else "is missing"
        return SetupError(
            f"{file} {what}: the evaluation cannot go on from this checkpoint; {_REMEDY.format(stream=stream.name)}"
        )

    def _remove(self, kind: str, number: int, because: str) -> str:
        file = self.folder / kind / str(number)
        _unlink(file)
        return f"{file} was torn and is removed: {because}"

    def write_json(self, name: str, document: object) -> None:
        """Stores a document as JSON in the file of this name, which is replaced at once and survives a crash."""
        Parcels(self.folder).write(name, json.dumps(document).encode())

    def parcels(self, kind: str) -> Parcels:
        """Returns the parcels of a kind, which have a folder of their own, with a name that none of Spark's has."""
        return Parcels(self.folder / f"lookback-{kind}")


def _parse_minor_version(version: str) -> tuple[int, ...]:
    """Returns the first two numbers of a version of Spark; an empty tuple if it has none."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return () if match is None else (int(match[1]), int(match[2]))


def _list_batches(folder: Place) -> list[int]:
    """Returns the numbers of the batches that have a file in the folder, ascending."""
    return sorted(int(file.name) for file in folder.glob("[0-9]*") if file.name.isdigit())


def _read_offsets(file: Place) -> dict[str, int | None]:
    """Returns, per source, the first commit after those that a batch reads. Raises SetupError if the file is unreadable."""
    if unknown := _find_unknown_format(file, "offsets"):
        raise UnknownFormatError(
            f"{file} {unknown}, a format that this release does not know; the last commit judged cannot be read from it"
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
    """Describes how a file of one of Spark's logs differs from the known format; None if it does not, is torn or missing."""
    try:
        version, *lines = file.read_text().splitlines() or [""]
    except (OSError, UnicodeDecodeError):
        return None
    if _VERSION.fullmatch(version) and version not in _KNOWN_VERSIONS[kind]:
        return f"is of version {version}"
    if kind == "commits" or version not in _KNOWN_VERSIONS[kind]:
        return None
    sources = [line for line in lines[1:] if line != "-"]
    if any(_SOURCE_ID.match(line) for line in sources):
        return "names its sources"
    read = [offset for line in sources if (offset := _parse_json(line)) is not None]
    if any(not isinstance(offset, dict) or "reservoirVersion" not in offset for offset in read):
        return "has offsets without a version of a table"
    if len(lines) - 1 > len(_SOURCES):
        return f"has {len(lines) - 1} sources and not {len(_SOURCES)}"
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
    """Returns whether a file of Spark's has its version and at least `lines` lines, each of them JSON or `-`."""

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
    # Hadoop's checksum of the file.
    (file.parent / f".{file.name}.crc").unlink(missing_ok=True)


def _find_changes(plan: Plan, stream: Stream) -> list[str]:
    """Describes how a stream's declaration differs from the one that the state was made from."""
    before = plan.declared
    if not before:
        return []
    if before["stream"] != stream.name:
        return [f"it is the checkpoint of stream {before['stream']!r}"]
    now = snapshot_declaration(stream)
    problems = [
        f"{key} was {before[key]}, is {now[key]}"
        for key in ("event_id", "event_time", "order_by")
        if before[key] != now[key]
    ]
    read = {before["event_id"], before["event_time"], *plan.coverage.fields}
    for name in sorted(read & before["fields"].keys()):
        was, is_now = before["fields"][name], now["fields"].get(name)
        if is_now is None:
            problems.append(f"field {name}, which rules read, is gone")
        elif is_now != was:
            problems.append(f"field {name} was {was}, is {is_now}")
    return problems
