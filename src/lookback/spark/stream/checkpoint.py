"""The checkpoint of an evaluation: its query's id, how it is planned, how far it is, whether it is whole."""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lookback.core.errors import SetupError
from lookback.core.rules.coverage import Coverage
from lookback.spark.platform.owner import become_owner

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from lookback.core.streams.declaration import Stream

_PLAN = "lookback.json"
_REBUILD = "rebuild.json"
# The sources of the query, in its order: lines of an offsets file after its version and its metadata.
EVENTS, RULES = "events", "rules"
_SOURCES = (EVENTS, RULES)
# Saved by the state store, and how it is numbered; what a .zip needs beside it has names of its own.
_STATE = re.compile(r"(\d+)\.(?:changelog|zip)")
# The versions of Spark's logs that are known here, and a source's line as later ones have it: its id before its offset.
_KNOWN_VERSIONS = {"offsets": ("v1",), "commits": ("v1", "v2")}
_VERSION = re.compile(r"v\d+")
_SOURCE_ID = re.compile(r"[^{\[\"]*:(?=[{-])")
_REMEDY = "make it anew from the tables: lookback evaluate {stream} --rebuild"


class UnknownFormError(SetupError):
    """A file of Spark's in the checkpoint is whole, and of a form that this release does not know."""


@dataclass(frozen=True)
class Plan:
    """How a query is planned.

    shards: into how many parts the keys are divided, frozen with the first batch. coverage: what dispatch sends; it
    covers the rules in force, also those whose rows have been deleted since. declared: of the stream, what state is made
    from; empty in checkpoints of earlier releases. starts: the first commit read of each source. spark: the version of
    Spark that plans it; empty in checkpoints of earlier releases.
    """

    shards: int
    coverage: Coverage
    declared: Mapping[str, Any] = field(default_factory=dict)
    starts: Mapping[str, int] = field(default_factory=dict)
    spark: str = ""

    def start(self, source: str) -> int:
        """The first commit of a source that the query reads."""
        return self.starts.get(source, 0)


def declared(stream: Stream) -> dict[str, Any]:
    """What window state depends on of a stream's declaration."""
    fields = {name: str(type_) for name, type_ in stream.fields.items()}
    return {"stream": stream.name, "event_id": stream.event_id, "event_time": stream.event_time, "fields": fields}


def repartition(spark: SparkSession, folder: str | Path, partitions: int) -> None:
    """Divides the state of a query that has been stopped among so many partitions, at most as many as it has shards.

    Raises SetupError where there is no such checkpoint, it has fewer shards, or this Spark cannot do it.
    """
    plan = Checkpoint(Path(folder)).plan()
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
    checkpoint = Checkpoint(Path(folder))
    with become_owner(checkpoint.owner_file, f"checkpoint {folder}"):
        manager.repartition(str(folder), partitions)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's folder: a local path, or one that is mounted as such (/Volumes/..., /dbfs/...)."""

    folder: Path

    @property
    def query_id(self) -> str | None:
        """The id that the query keeps over restarts; None before its first start."""
        file = self.folder / "metadata"
        return str(json.loads(file.read_text())["id"]) if file.exists() else None

    def ensure_query_id(self) -> str:
        """The id of the query, chosen before its first start where there is none: Spark takes what it finds."""
        known = self.query_id
        if known is not None:
            return known
        chosen = str(uuid.uuid4())
        self._write("metadata", {"id": chosen})
        return chosen

    @property
    def owner_file(self) -> Path:
        """Names the process that evaluates; beside the folder, which may be moved."""
        return self.folder.parent / f".{self.folder.name}.owner"

    @property
    def is_new(self) -> bool:
        """Whether no batch has been planned in it yet."""
        return not _numbers(self.folder / "offsets") and not _numbers(self.folder / "commits")

    def judged_through(self) -> int | None:
        """The last commit of the events table that a finished batch has read whole; None before the first."""
        batches = _numbers(self.folder / "commits")
        offset = _offsets(self.folder / "offsets" / str(batches[-1]))[EVENTS] if batches else None
        return None if offset is None else offset - 1

    def last_batch_at(self) -> float | None:
        """When the last batch was finished, in seconds from the epoch; None before the first."""
        finished = _numbers(self.folder / "commits")
        return (self.folder / "commits" / str(finished[-1])).stat().st_mtime if finished else None

    def continues_from(self) -> dict[str, int]:
        """Per source, the commit that the next batch reads first; of a batch that was not finished, that it began with."""
        return self._after(_numbers(self.folder / "commits"))

    def reads_again_from(self) -> dict[str, int]:
        """Per source, the first commit that Spark looks up at a start: that which the last finished batch began with."""
        return self._after(_numbers(self.folder / "commits")[:-1])

    def _after(self, finished: list[int]) -> dict[str, int]:
        plan = self.plan()
        found: Mapping[str, int | None] = {}
        if finished and (file := self.folder / "offsets" / str(finished[-1])).exists():
            found = _offsets(file)
        starts = {name: 0 if plan is None else plan.start(name) for name in _SOURCES}
        return {name: starts[name] if (after := found.get(name)) is None else after for name in _SOURCES}

    def plan(self) -> Plan | None:
        """What was recorded before the last start of the query; None before its first start."""
        file = self.folder / _PLAN
        if not file.exists():
            return None
        try:
            document = json.loads(file.read_text())
            shards, coverage = int(document["shards"]), Coverage.from_dict(document)
            starts = {str(name): int(start) for name, start in document.get("starts", {}).items()}
            return Plan(shards, coverage, dict(document.get("declared", {})), starts, str(document.get("spark", "")))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SetupError(f"{file} is damaged ({error}); start with a new checkpoint: evaluate --rebuild") from error

    def record(self, plan: Plan) -> None:
        """Writes down, before the query starts, how it is planned."""
        document = {"shards": plan.shards, **plan.coverage.to_dict()}
        more = {"declared": dict(plan.declared), "starts": dict(plan.starts), "spark": plan.spark}
        self._write(_PLAN, {**document, **more})

    def rebuild(self) -> dict[str, Any] | None:
        """What `record_rebuild` wrote; None where state is not made anew here."""
        file = self.folder / _REBUILD
        if not file.exists():
            return None
        try:
            return dict(json.loads(file.read_text()))
        except (ValueError, TypeError) as error:
            raise SetupError(f"{file} is damaged ({error}); start with a new checkpoint: evaluate --rebuild") from error

    def record_rebuild(self, document: Mapping[str, Any]) -> None:
        """Writes down, before anything else is in the folder, how state is made anew."""
        self._write(_REBUILD, document)

    def move_aside(self) -> Path | None:
        """Renames the folder, where there is one, to one that ends in the time. Returns the new one."""
        if not self.folder.exists():
            return None
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        names = (f"{self.folder.name}.{stamp}{f'-{again}' if again else ''}" for again in range(1_000))
        target = next(path for name in names if not (path := self.folder.with_name(name)).exists())
        self.folder.rename(target)
        return target

    def require_fit(self, stream: Stream, shards: int | None) -> None:
        """Raises SetupError where the checkpoint is not one of this stream, or of another number of shards."""
        plan = self.plan()
        if plan is None or self.is_new:
            return
        remedy = _REMEDY.format(stream=stream.name)
        if shards not in (None, plan.shards):
            raise SetupError(
                f"{self.folder} divides its keys into {plan.shards} shards for good, not {shards}; leave the number out, or "
                f"{remedy} --shards {shards}"
            )
        if problems := _changes(plan, stream):
            raise SetupError(
                f"{self.folder} does not fit stream {stream.name!r} as it is declared now: {'; '.join(problems)}. "
                f"Take the change back, or {remedy}"
            )

    def require_spark(self, version: str, stream: str) -> None:
        """Raises SetupError where a newer minor version of Spark than this one has written the checkpoint."""
        plan = self.plan()
        if plan is not None and not self.is_new and _minor(version) < _minor(plan.spark):
            raise SetupError(
                f"{self.folder} was last written by Spark {plan.spark}, and this is Spark {version}: an older Spark cannot be "
                f"trusted to read what a newer one wrote. Go on with Spark {plan.spark} or newer, or "
                f"{_REMEDY.format(stream=stream)}"
            )

    def mend(self, stream: Stream, is_written: Callable[[str], bool]) -> list[str]:
        """Repairs what a crash may leave of the last batch, where nothing can go wrong by it; returns what was done.

        is_written: whether an output table has a commit with this mark, `query id:batch`. Raises SetupError, naming the
        file, where the checkpoint is torn otherwise, and UnknownFormError, before anything is changed, where a file has a
        form that is not known here.
        """
        if self.is_new:
            return self._mend_new()
        self.require_known_form()
        self._require_whole(stream, "metadata", lambda file: json.loads(file.read_text())["id"])
        self._require_whole(stream, _PLAN, lambda _: self.plan())
        planned, finished = _numbers(self.folder / "offsets"), _numbers(self.folder / "commits")
        done = []
        if finished and not _is_whole(self.folder / "commits" / str(finished[-1]), lines=2):
            if planned[-1:] != finished[-1:]:
                raise self._torn(stream, self.folder / "commits" / str(finished[-1]))
            done.append(self._remove("commits", finished.pop(), "the batch is run again, and written once"))
        if planned and planned[-1] not in finished and not _is_planned(self.folder / "offsets" / str(planned[-1])):
            if is_written(f"{self.query_id}:{planned[-1]}"):
                raise self._torn(stream, self.folder / "offsets" / str(planned[-1]))
            done.append(self._remove("offsets", planned.pop(), "the batch had written nothing, and is planned anew"))
        needed = [*planned[-1:], *finished[-1:]]
        for number in sorted(set(needed)):
            if not _is_planned(self.folder / "offsets" / str(number)):
                raise self._torn(stream, self.folder / "offsets" / str(number))
        if ahead := self._state_ahead(finished):
            for file in ahead:
                _unlink(file)
            done.append(f"{len(ahead)} files of state of a batch that was not finished are removed: it is run again")
        return done

    def require_known_form(self) -> None:
        """Raises UnknownFormError where a log of Spark's is not of the form that this release reads and repairs."""
        for kind in ("offsets", "commits"):
            for number in _numbers(self.folder / kind)[-2:]:
                file = self.folder / kind / str(number)
                if unknown := _unknown_form(file, kind):
                    raise UnknownFormError(
                        f"{file} {unknown}, a form that this release does not know: another version of Spark may have "
                        "written it. Nothing is mended or deleted. Evaluate with the Spark and the Lookback that wrote it; "
                        "or, at your own risk, write accept_unknown_checkpoint: true into conf/settings.yml, and Spark "
                        "goes on with it as it is"
                    )

    def _state_ahead(self, finished: list[int]) -> list[Path]:
        """The state saved after that of the last finished batch, which a repetition of its batch may find and keep as it is.

        Batch n ends with version n + 1 of the state.
        """
        last = finished[-1] + 1 if finished else 0
        files = (self.folder / "state").glob("*/*/[0-9]*.*")
        return sorted(file for file in files if (match := _STATE.fullmatch(file.name)) and int(match[1]) > last)

    def _mend_new(self) -> list[str]:
        file = self.folder / "metadata"
        if not file.exists() or _reads(file, lambda each: json.loads(each.read_text())["id"]):
            return []
        _unlink(file)
        return [f"{file} was torn and is removed: nothing had begun"]

    def _require_whole(self, stream: Stream, name: str, read: Callable[[Path], object]) -> None:
        file = self.folder / name
        if not file.exists() or not _reads(file, read):
            raise self._torn(stream, file)

    def _torn(self, stream: Stream, file: Path) -> SetupError:
        what = "is torn or damaged" if file.exists() else "is missing"
        return SetupError(f"{file} {what}: the checkpoint cannot be gone on with; {_REMEDY.format(stream=stream.name)}")

    def _remove(self, kind: str, number: int, because: str) -> str:
        file = self.folder / kind / str(number)
        _unlink(file)
        return f"{file} was torn and is removed: {because}"

    def _write(self, name: str, document: Mapping[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.folder / f".{name}.{os.getpid()}"
        with temporary.open("w", encoding="utf-8") as file:
            file.write(json.dumps(document))
            file.flush()
            # A crash of the machine must not leave an empty file of that name.
            os.fsync(file.fileno())
        temporary.replace(self.folder / name)


def _minor(version: str) -> tuple[int, ...]:
    """The first two numbers of a version of Spark; nothing where it has none."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return () if match is None else (int(match[1]), int(match[2]))


def _numbers(folder: Path) -> list[int]:
    """The batches of which a folder has a file, ascending."""
    return sorted(int(file.name) for file in folder.glob("[0-9]*") if file.name.isdigit())


def _offsets(file: Path) -> dict[str, int | None]:
    """Per source, the commit that comes after what a batch reads. Raises SetupError where it cannot be read."""
    if unknown := _unknown_form(file, "offsets"):
        raise UnknownFormError(f"{file} {unknown}, a form that this release does not know; it says nothing here")
    try:
        lines = file.read_text().splitlines()[2:]
        found = [None if line == "-" else json.loads(line) for line in lines]
        read = {
            name: None if each is None else int(each["reservoirVersion"])
            for name, each in zip(_SOURCES, found, strict=True)
        }
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise SetupError(
            f"{file} is torn or missing ({error}); start with a new checkpoint: evaluate --rebuild"
        ) from error
    return read


def _unknown_form(file: Path, kind: str) -> str | None:
    """What is unknown of a file of one of Spark's logs; None where it is as known here, is torn, or is not there."""
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
    read = [offset for line in sources if (offset := _json(line)) is not None]
    if any(not isinstance(offset, dict) or "reservoirVersion" not in offset for offset in read):
        return "has offsets without a version of a table"
    if len(lines) - 1 > len(_SOURCES):
        return f"has {len(lines) - 1} sources and not {len(_SOURCES)}"
    return None


def _json(text: str) -> Any:
    """What a text means as JSON; None where it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def _is_planned(file: Path) -> bool:
    return _is_whole(file, lines=2 + len(_SOURCES)) and _reads(file, _offsets)


def _is_whole(file: Path, lines: int) -> bool:
    """Whether a file of Spark's has its version and so many lines, each of them JSON."""

    def read(file: Path) -> None:
        version, *rest = file.read_text().splitlines()
        if not version.startswith("v") or len(rest) < lines - 1:
            raise ValueError(version)
        for line in rest:
            if line != "-":
                json.loads(line)

    return _reads(file, read)


def _reads(file: Path, read: Callable[[Path], object]) -> bool:
    try:
        read(file)
    except (SetupError, OSError, ValueError, KeyError, TypeError):
        return False
    return True


def _unlink(file: Path) -> None:
    file.unlink()
    # Hadoop's checksum of what was there.
    (file.parent / f".{file.name}.crc").unlink(missing_ok=True)


def _changes(plan: Plan, stream: Stream) -> list[str]:
    """What a stream's declaration has otherwise than that which state was made from."""
    before = plan.declared
    if not before:
        return []
    if before["stream"] != stream.name:
        return [f"it is the checkpoint of stream {before['stream']!r}"]
    now = declared(stream)
    found = [f"{key} was {before[key]}, is {now[key]}" for key in ("event_id", "event_time") if before[key] != now[key]]
    read = {before["event_id"], before["event_time"], *plan.coverage.fields}
    for name in sorted(read & before["fields"].keys()):
        was, is_now = before["fields"][name], now["fields"].get(name)
        if is_now is None:
            found.append(f"field {name}, which rules read, is gone")
        elif is_now != was:
            found.append(f"field {name} was {was}, is {is_now}")
    return found
