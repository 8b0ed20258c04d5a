"""Reads the files of a configuration folder: settings, profiles, stream declarations, receivers and rules."""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lookback.core.errors import DurationError, Problem, SetupError, StreamError
from lookback.core.operations.receivers import Receiver, read_receivers
from lookback.core.rules.gate import Gate
from lookback.core.streams.declaration import Stream
from lookback.core.streams.members import complete_union
from lookback.core.streams.unions import list_members
from lookback.core.values.durations import parse_duration
from lookback.core.values.suggestions import suggest
from lookback.places import parse_place
from lookback.yamltexts import parse_documents

DEFAULT_ROOT = "./lakehouse"
DEFAULT_CONF = "./conf"
DEFAULT_EVERY = "1 second"
# The limits of a file: twice the largest `document_bytes`. Aliases can expand a few lines to billions of values.
MAX_FILE_BYTES = 2_000_000
MAX_NODES = 50_000
DEFAULT_METRICS = 30.0
# Keeps the start of a retention within the dates that Python can represent.
_LONGEST_RETENTION = dt.timedelta(days=36_500)
# The tables whose old rows `maintain` may delete, with the shortest retention in days. The open queue covers 90 days,
# and labels belong to alerts. Jobs read the last day of the remaining tables; a week leaves room for a job that did not
# run.
RETAINED = {"alerts": 90, **dict.fromkeys(("late_events", "rule_log", "notifications", "metrics", "ingests"), 7)}
RETAINED |= {"labels": 90, "snoozes": 7, "lists": 30}


@dataclass(frozen=True)
class Settings:
    """The settings of a run, with the places of its tables and files.

    Attributes:
        root: Folder of the tables: an absolute path or the URI of a bucket, see `parse_place`. With a catalog and a
            schema the tables are catalog.schema.<table>, and root is the folder of checkpoints in a volume.
        conf: Folder of streams/ and rules/.
        profile: Name of CONF/profiles/<profile>.yml, which sets `every`, `admission` and `spark`; CONF/settings.yml
            overrides it.
        every: Pause between two micro-batches.
        admission: Options of the Delta source that limit a micro-batch.
        spark: Spark settings that override Lookback's own.
        metrics: Seconds between two rows of the table `metrics`; None writes no rows.
        shards: Number of shards in a new checkpoint if the stream declares none; None lets the evaluation choose.
        accept_unknown_checkpoint: Whether to continue from a checkpoint whose format this release does not know.
        catalog: Catalog of the tables; empty if they are folders.
        schema: Schema of the tables in the catalog.
        retention: Age at which `maintain` deletes rows, by table; other tables keep all rows.
        gate: Conditions that a rule version must meet before it becomes active; None for no conditions.
        agents_publish: Whether an assistant may publish rules, as drafts or in shadow, by `lookback mcp`.
    """

    root: str
    conf: Path
    profile: str = ""
    every: str = DEFAULT_EVERY
    admission: Mapping[str, str] = field(default_factory=dict)
    spark: Mapping[str, str] = field(default_factory=dict)
    metrics: float | None = DEFAULT_METRICS
    shards: int | None = None
    accept_unknown_checkpoint: bool = False
    catalog: str = ""
    schema: str = ""
    retention: Mapping[str, dt.timedelta] = field(default_factory=dict)
    gate: Gate | None = None
    agents_publish: bool = False

    @classmethod
    def local(
        cls,
        root: str | Path | None = None,
        conf: str | Path | None = None,
        profile: str | None = None,
        catalog: str | None = None,
        schema: str | None = None,
    ) -> Settings:
        """Returns the settings of this machine: arguments first, then the environment, then the defaults.

        Args:
            root: Default: LOOKBACK_ROOT, then ./lakehouse. With a catalog the default is the schema's volume
                `checkpoints`, and LOOKBACK_ROOT is ignored.
            conf: Default: LOOKBACK_CONF, then ./conf.
            profile: Default: LOOKBACK_PROFILE, then the profile in CONF/settings.yml.
            catalog: Catalog of the tables; goes with schema.
            schema: Schema of the tables in the catalog.

        Raises:
            SetupError: If a file is invalid, the profile does not exist, root is not a valid place, or only one of
                catalog and schema is given.
        """
        if bool(catalog) != bool(schema):
            raise SetupError(f"catalog and schema go together, got catalog={catalog or ''!r}, schema={schema or ''!r}")
        files = f"/Volumes/{catalog}/{schema}/checkpoints" if catalog else os.environ.get("LOOKBACK_ROOT", DEFAULT_ROOT)
        folder = Path(conf or os.environ.get("LOOKBACK_CONF") or DEFAULT_CONF)
        file = folder / "settings.yml"
        of_profile: dict[str, Any] = {"every": "", "admission": {}, "spark": {}}
        texts = {"profile": "", "metrics": "", "shards": ""}
        texts |= dict.fromkeys(("accept_unknown_checkpoint", "agents_publish"), "false")
        own = _run_settings(file, {**of_profile, **texts, "retention": {}, "gate": {}})
        name = profile or os.environ.get("LOOKBACK_PROFILE") or own["profile"]
        chosen = _run_settings(_profile_file(folder / "profiles", name), of_profile) if name else of_profile
        place = str(root or files or DEFAULT_ROOT)
        return cls(
            root=place if catalog else str(parse_place(place)),
            conf=folder,
            profile=name,
            every=own["every"] or chosen["every"] or DEFAULT_EVERY,
            admission={**chosen["admission"], **own["admission"]},
            spark={**chosen["spark"], **own["spark"]},
            metrics=_read_metrics_seconds(own["metrics"], file),
            shards=_read_shards(own["shards"], file),
            accept_unknown_checkpoint=_read_boolean(
                own["accept_unknown_checkpoint"], "accept_unknown_checkpoint", file
            ),
            catalog=catalog or "",
            schema=schema or "",
            retention=_read_retention(own["retention"], file),
            gate=_read_gate(own["gate"], file),
            agents_publish=_read_boolean(own["agents_publish"], "agents_publish", file),
        )

    def streams(self) -> dict[str, Stream]:
        """Returns the declared streams by name."""
        return load_streams(self.conf)

    def stream(self, name: str) -> Stream:
        """Returns the declared stream of that name. Raises SetupError, which lists the declared streams."""
        streams = self.streams()
        if name not in streams:
            raise SetupError(f"no stream {name!r} in {self.conf / 'streams'}; declared are {', '.join(streams)}")
        return streams[name]


def load_receivers(conf_dir: str | Path) -> tuple[Receiver, ...]:
    """Reads the receivers of alerts from CONF/notifiers.yml. Raises SetupError with all problems, or if it is empty."""
    file = Path(conf_dir) / "notifiers.yml"
    receivers = read_receivers(_parse(read_text(file), str(file))[1], str(file))
    if not receivers:
        raise SetupError(f"{file} names no receiver; docs/how-to/notify.md shows how")
    return receivers


def _read_shards(text: str, file: Path) -> int | None:
    """Reads the number of shards; None if the settings leave it out. Raises SetupError."""
    if text and not (text.isascii() and text.isdigit() and int(text)):
        raise SetupError(f"{file}: shards must be a whole number, at least 1, got {text!r}; omit it for one per core")
    return int(text) if text else None


def _read_boolean(text: str, key: str, file: Path) -> bool:
    if text.lower() not in ("true", "false"):
        raise SetupError(f"{file}: {key} must be true or false, got {text!r}")
    return text.lower() == "true"


def _read_metrics_seconds(text: str, file: Path) -> float | None:
    """Reads the seconds between two rows of metrics; None if metrics are off. Raises SetupError."""
    if text in ("", "none"):
        return None if text else DEFAULT_METRICS
    try:
        microseconds = parse_duration(text)
    except DurationError as error:
        raise SetupError(f"{file}: metrics: {error}, or none to turn them off") from error
    if not microseconds:
        raise SetupError(f"{file}: metrics must be longer than 0 s, got {text!r}; none turns them off")
    return microseconds / 1_000_000


def _read_retention(texts: Mapping[str, str], file: Path) -> dict[str, dt.timedelta]:
    """Reads the age at which rows are deleted, by table. Raises SetupError with all problems."""
    problems, found = [], {}
    for name, text in texts.items():
        if name not in RETAINED:
            problems.append(f"retention has no table {name!r:.100}; {suggest(name, RETAINED)}")
            continue
        if text == "none":
            continue
        try:
            age = dt.timedelta(microseconds=parse_duration(text))
        except DurationError as error:
            problems.append(f"retention.{name}: {error}, or none to keep every row")
            continue
        if not dt.timedelta(days=RETAINED[name]) <= age <= _LONGEST_RETENTION:
            problems.append(
                f"retention.{name} must be from {RETAINED[name]} to {_LONGEST_RETENTION.days:,} days, got {text!r}; none "
                "keeps every row"
            )
        found[name] = age
    if problems:
        raise SetupError(f"{file}: {'; '.join(problems)}")
    return found


# The keys of `gate`, with the smallest and the largest value of each.
_GATE = {"tests": (0.0, 1_000.0), "backtest_days": (0.0, 36_500.0), "max_alerts_per_day": (0.0, 1e12)}
_GATE |= {"min_precision": (0.0, 1.0), "shadow_hours": (0.0, 876_000.0)}
_GATE_SWITCHES = ("approval", "enforce")


def _read_gate(texts: Mapping[str, str], file: Path) -> Gate | None:
    """Reads the conditions of activation; None if the settings have none. Raises SetupError with all problems."""
    problems, found = [], dict[str, Any]()
    for name, text in texts.items():
        if name in _GATE_SWITCHES:
            found[name] = _read_boolean(text, f"gate.{name}", file)
            continue
        if name not in _GATE:
            problems.append(f"gate has no condition {name!r:.100}; {suggest(name, [*_GATE, *_GATE_SWITCHES])}")
            continue
        lowest, highest = _GATE[name]
        try:
            number = float(text)
        except ValueError:
            number = -1.0
        if not lowest <= number <= highest or (name == "tests" and number != int(number)):
            problems.append(f"gate.{name} must be a number from {lowest:g} to {highest:g}, got {text!r:.100}")
            continue
        found[name] = int(number) if name == "tests" else number
    if not found.get("backtest_days") and {"max_alerts_per_day", "min_precision"} & found.keys():
        problems.append("gate.backtest_days is missing: it sets how many days the backtest covers")
    if problems:
        raise SetupError(f"{file}: {'; '.join(problems)}")
    return Gate(**found) if found else None


def _profile_file(folder: Path, name: str) -> Path:
    known = sorted(file.stem for file in folder.glob("*.yml"))
    if name not in known:
        raise SetupError(f"no profile {name!r} in {folder}; profiles: {', '.join(known) or 'none'}")
    return folder / f"{name}.yml"


def _run_settings(file: Path, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the keys of `defaults` from a file. Values are strings or mappings of strings."""
    document = (_parse(read_text(file), str(file))[1] if file.exists() else None) or {}
    if not isinstance(document, dict) or not set(document) <= set(defaults):
        raise SetupError(f"{file} may have only the keys {', '.join(defaults)}")
    found: dict[str, Any] = {}
    for key, default in defaults.items():
        value = document.get(key, default)
        if isinstance(default, dict) != isinstance(value, dict):
            kind = "a mapping of settings" if isinstance(default, dict) else "one text"
            raise SetupError(f"{file}: {key} must be {kind}, got {value!r:.100}")
        found[key] = {str(k): str(v) for k, v in value.items()} if isinstance(value, dict) else str(value)
    return found


def load_stream(path: str | Path) -> Stream:
    """Reads a stream from its YAML file. The members of a union are read from the same folder.

    Raises SetupError if a file cannot be read, and StreamError with all problems, each with its file and line.
    """
    declared = _DeclaredStream.read(path)
    if not declared.is_union:
        return declared.build()
    others = [_DeclaredStream.read(file) for file in _list_stream_files(declared.file.parent)]
    streams = {each.name: each.build() for each in others if not each.is_union and each.name in declared.members}
    unions = frozenset(each.name for each in others if each.is_union)
    return declared.build_union(streams, unions)


def load_streams(conf_dir: str | Path) -> dict[str, Stream]:
    """Reads the streams of CONF/streams/*.yml, by name, in the order of the file names.

    Raises SetupError if the folder has no file or two files declare the same name, and the errors of `load_stream`.
    """
    folder = Path(conf_dir) / "streams"
    files = _list_stream_files(folder)
    if not files:
        raise SetupError(f"{folder} has no stream (*.yml); set the right folder with --conf or LOOKBACK_CONF")
    declared = [_DeclaredStream.read(file) for file in files]
    streams = {each.name: each.build() for each in declared if not each.is_union}
    unions = frozenset(each.name for each in declared if each.is_union)
    found: dict[str, _DeclaredStream] = {}
    for each in declared:
        if each.name in found:
            raise SetupError(f"stream {each.name!r} is declared in {found[each.name].file} and again in {each.file}")
        found[each.name] = each
    return {name: each.build_union(streams, unions) if each.is_union else streams[name] for name, each in found.items()}


def _list_stream_files(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.yml"), *folder.glob("*.yaml")])


@dataclass(frozen=True)
class _DeclaredStream:
    """The document of a stream's file, the line of each place, and the keys that are written twice."""

    file: Path
    document: Any
    lines: Mapping[str, int]
    twice: Sequence[Problem]

    @classmethod
    def read(cls, path: str | Path) -> _DeclaredStream:
        """Reads a file. Raises SetupError if it is not YAML."""
        file = Path(path)
        node, document = _parse(read_text(file), str(file))
        lines: dict[str, int] = {}
        places = _note_places(node, "", lines)
        twice = [Problem(place, f"the key is written twice, {file}:{line}") for place, line in places]
        return cls(file, document, lines, twice)

    @property
    def name(self) -> str:
        """The name of the stream, "?" if the document has none."""
        return str(self.document.get("stream")) if isinstance(self.document, dict) else "?"

    @property
    def is_union(self) -> bool:
        """True if the document declares a union, valid or not."""
        return isinstance(self.document, dict) and self.document.get("union") is not None

    @property
    def members(self) -> list[str]:
        """The members of a union, valid or not."""
        return list_members(self.document)

    def build(self) -> Stream:
        """Builds the stream. Raises StreamError with all problems."""
        return self._build(self.document, [])

    def build_union(self, streams: Mapping[str, Stream], unions: frozenset[str]) -> Stream:
        """Builds a union; see `complete_union` for `streams` and `unions`. Raises StreamError with all problems."""
        return self._build(*complete_union(self.document, streams, unions))

    def _build(self, document: Any, problems: Sequence[Problem]) -> Stream:
        found, name, stream = list(problems), self.name, None
        try:
            stream = Stream.from_dict(document)
        except StreamError as error:
            found, name = [*found, *error.problems], error.name
        placed = [Problem(p.place, f"{p.message}, {self.file}:{_find_line(self.lines, p.place)}") for p in found]
        if stream is None or placed or self.twice:
            raise StreamError(name, [*self.twice, *placed])
        return stream


def load_rule_document(path: str | Path) -> dict[str, Any]:
    """Reads the rule document of a YAML file, unchecked. Raises SetupError if the file is not a mapping."""
    return parse_rule_text(read_text(path), str(path)).document


@dataclass(frozen=True)
class ParsedRule:
    """The document of a rule, the YAML node that it was read from, and the line of each place, counted from 1."""

    document: dict[str, Any]
    node: Any
    lines: Mapping[str, int]

    def find_line(self, place: str) -> int:
        """Returns the line of a place, or of the nearest enclosing place that the text has."""
        return _find_line(self.lines, place)


def parse_rule_text(text: str, name: str) -> ParsedRule:
    """Reads the rule document of a YAML text, unchecked. Messages call it `name`.

    Raises SetupError if the text is not YAML or not a mapping, or if it has a key twice.
    """
    node, document = _parse(text, name)
    lines: dict[str, int] = {}
    twice = _note_places(node, "", lines)
    if twice:
        raise SetupError("; ".join(f"{name}:{line}: the key {place} is written twice" for place, line in twice))
    if not isinstance(document, dict):
        raise SetupError(f"{name} is not a rule; a rule is a mapping with the keys rule_id, stream, window, ...")
    return ParsedRule(document, node, lines)


def read_text(path: str | Path) -> str:
    """Reads the text of a YAML file and keeps its line breaks. Raises SetupError."""
    file = Path(path)
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise SetupError(
                f"{file} is larger than {MAX_FILE_BYTES:,} bytes, too large for a stream, a rule or settings"
            )
        with file.open(encoding="utf-8", newline="") as opened:
            return opened.read()
    except (OSError, ValueError) as error:
        # ValueError: a path with a NUL, which no system accepts.
        raise SetupError(f"{file} cannot be read: {error}") from error


def _parse(text: str, file: str) -> tuple[Any, Any]:
    """Parses a text as YAML nodes, which know their lines, and as Python values; None if it is empty.

    Messages call it `file`. Raises SetupError, with the line if known.
    """
    documents = parse_documents(text, file, MAX_NODES, single=True)
    return documents[0] if documents else (None, None)


def _note_places(node: Any, place: str, lines: dict[str, int]) -> list[tuple[str, int]]:
    """Records the line of every place below a node. Returns the places that occur twice, each with its later line."""
    twice: list[tuple[str, int]] = []
    if isinstance(node, yaml.SequenceNode):
        for at, value in enumerate(node.value):
            lines[f"{place}[{at}]"] = value.start_mark.line + 1
            twice += _note_places(value, f"{place}[{at}]", lines)
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        name, line = f"{place}.{key.value}".lstrip("."), key.start_mark.line + 1
        if name in lines:
            twice.append((name, line))
        lines[name] = line
        twice += _note_places(value, name, lines)
    return twice


def _find_line(lines: Mapping[str, int], place: str) -> int:
    """Returns the line of a place, or of the nearest enclosing place that the file has."""
    while place and place not in lines:
        place = place.rpartition(".")[0]
    return lines.get(place, 1)
