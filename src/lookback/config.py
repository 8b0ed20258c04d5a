"""Reads the files of a configuration folder: settings, profiles, stream declarations, receivers and rules."""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lookback.core.errors import DurationError, Problem, SetupError, StreamError
from lookback.core.operations.receivers import Receiver, read_receivers
from lookback.core.rules.gate import Gate
from lookback.core.streams.declaration import Stream
from lookback.core.values.durations import parse_duration
from lookback.core.values.suggestions import suggest
from lookback.core.values.texts import first_line
from lookback.places import parse_place

DEFAULT_ROOT = "./lakehouse"
DEFAULT_CONF = "./conf"
DEFAULT_EVERY = "1 second"
# The limits of a file. With aliases, a file of a few lines can stand for billions of values.
MAX_FILE_BYTES = 200_000
MAX_NODES = 50_000
DEFAULT_METRICS = 30.0
# A retention begins at a time that Python can represent.
_LONGEST_RETENTION = dt.timedelta(days=36_500)
# The tables whose old rows `maintain` may delete, with the shortest time to keep them, in days. The open queue goes back
# 90 days, and labels belong to alerts. The others are read a day back; a week leaves room for a job that did not run.
RETAINED = {
    "alerts": 90,
    "late_events": 7,
    "rule_log": 7,
    "notifications": 7,
    "metrics": 7,
    "ingests": 7,
    "labels": 90,
    "snoozes": 7,
    "lists": 30,
}


@dataclass(frozen=True)
class Settings:
    """The places of tables and files, and the settings of a run.

    root: the folder of the tables, as `parse_place` reads it: an absolute path, or the URI of a bucket. With catalog and schema the tables are catalog.schema.<table>, and root is
    the folder of checkpoints, in a volume. conf: the folder of streams/ and rules/. profile: the name of
    CONF/profiles/<profile>.yml, which sets `every`, `admission` and `spark`; CONF/settings.yml overrides it.
    every: the pause between two micro-batches. admission: the options of the Delta source that bound a micro-batch.
    spark: Spark settings that override Lookback's own. shards: the number for a new checkpoint of a stream that declares
    none; None: the evaluation chooses. accept_unknown_checkpoint: whether to go on with a checkpoint whose form this
    release does not know. metrics: the seconds between two rows of the table `metrics`; None: no rows are written.
    retention: the age at which `maintain` deletes rows, by table of the product; the others keep all rows. gate: what a
    version of a rule must have before it is active; None: nothing.
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

    @classmethod
    def local(
        cls, root: str | Path | None = None, conf: str | Path | None = None, profile: str | None = None,
        catalog: str | None = None, schema: str | None = None,
    ) -> Settings:  # fmt: skip
        """Returns the settings of this machine: those given, else those of the environment, else the defaults.

        root: LOOKBACK_ROOT, ./lakehouse; with a catalog the volume `checkpoints` of the schema, whatever LOOKBACK_ROOT says.
        conf: LOOKBACK_CONF, ./conf; profile: LOOKBACK_PROFILE, the one of CONF/settings.yml.
        Raises SetupError if a file cannot be used, there is no such profile, root is not a place, or one of catalog and
        schema is missing.
        """
        if bool(catalog) != bool(schema):
            raise SetupError(f"catalog and schema go together, got catalog={catalog or ''!r}, schema={schema or ''!r}")
        files = f"/Volumes/{catalog}/{schema}/checkpoints" if catalog else os.environ.get("LOOKBACK_ROOT", DEFAULT_ROOT)
        folder = Path(conf or os.environ.get("LOOKBACK_CONF") or DEFAULT_CONF)
        file = folder / "settings.yml"
        keys = {"profile": "", "every": "", "admission": {}, "spark": {}, "metrics": "", "shards": "", "retention": {}}
        keys |= {"accept_unknown_checkpoint": "false", "gate": {}}
        own = _run_settings(file, keys)
        name = profile or os.environ.get("LOOKBACK_PROFILE") or own["profile"]
        chosen: dict[str, Any] = {"every": DEFAULT_EVERY, "admission": {}, "spark": {}}
        if name:
            chosen = _run_settings(_profile_file(folder / "profiles", name), chosen)
        place = str(root or files or DEFAULT_ROOT)
        return cls(
            place if catalog else str(parse_place(place)),
            folder,
            name,
            own["every"] or chosen["every"],
            {**chosen["admission"], **own["admission"]},
            {**chosen["spark"], **own["spark"]},
            _read_metrics_seconds(own["metrics"], file),
            _read_shards(own["shards"], file),
            _read_boolean(own["accept_unknown_checkpoint"], "accept_unknown_checkpoint", file),
            catalog or "",
            schema or "",
            _read_retention(own["retention"], file),
            _read_gate(own["gate"], file),
        )

    def streams(self) -> dict[str, Stream]:
        """Returns the declared streams by name."""
        return load_streams(self.conf)

    def stream(self, name: str) -> Stream:
        """Returns the declared stream of that name. Raises SetupError, which lists the declared ones, if there is none."""
        streams = self.streams()
        if name not in streams:
            raise SetupError(f"there is no stream {name!r} in {self.conf / 'streams'}; there are {', '.join(streams)}")
        return streams[name]


def load_receivers(conf_dir: str | Path) -> tuple[Receiver, ...]:
    """Reads the receivers of alerts from CONF/notifiers.yml. Raises SetupError with every problem, or if it names none."""
    file = Path(conf_dir) / "notifiers.yml"
    receivers = read_receivers(load_yaml(file), str(file))
    if not receivers:
        raise SetupError(f"{file} names no receiver; docs/operations.md shows how")
    return receivers


def _read_shards(text: str, file: Path) -> int | None:
    """Reads the number of shards; None if the settings leave it out. Raises SetupError."""
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and int(text)):
        raise SetupError(f"{file}: shards is a whole number from 1 on, got {text!r}; leave it out for the cores")
    return int(text)


def _read_boolean(text: str, key: str, file: Path) -> bool:
    if text.lower() not in ("true", "false"):
        raise SetupError(f"{file}: {key} is true or false, got {text!r}")
    return text.lower() == "true"


def _read_metrics_seconds(text: str, file: Path) -> float | None:
    """Reads the seconds between two rows of metrics; None for none. Raises SetupError."""
    if text in ("", "none"):
        return None if text else DEFAULT_METRICS
    try:
        microseconds = parse_duration(text)
    except DurationError as error:
        raise SetupError(f"{file}: metrics: {error}, or none to write none") from error
    if not microseconds:
        raise SetupError(f"{file}: metrics must be longer than 0 s, got {text!r}; write none to write none")
    return microseconds / 1_000_000


def _read_retention(texts: Mapping[str, str], file: Path) -> dict[str, dt.timedelta]:
    """Reads the age at which rows are deleted, by table. Raises SetupError with every problem."""
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


# The keys of `gate`, with the least and the most that each may be.
_GATE = {
    "tests": (0.0, 1_000.0), "backtest_days": (0.0, 36_500.0), "max_alerts_per_day": (0.0, 1e12),
    "min_precision": (0.0, 1.0), "shadow_hours": (0.0, 876_000.0),
}  # fmt: skip
_GATE_SWITCHES = ("approval", "enforce")


def _read_gate(texts: Mapping[str, str], file: Path) -> Gate | None:
    """Reads the conditions of activation; None if the settings leave them out. Raises SetupError with every problem."""
    problems, found = [], dict[str, Any]()
    for name, text in texts.items():
        if name in _GATE_SWITCHES:
            found[name] = _read_boolean(text, f"gate.{name}", file)
            continue
        if name not in _GATE:
            problems.append(f"gate has no condition {name!r:.100}; {suggest(name, [*_GATE, *_GATE_SWITCHES])}")
            continue
        least, most = _GATE[name]
        try:
            number = float(text)
        except ValueError:
            number = -1.0
        if not least <= number <= most or (name == "tests" and number != int(number)):
            problems.append(f"gate.{name} must be a number from {least:g} to {most:g}, got {text!r:.100}")
            continue
        found[name] = int(number) if name == "tests" else number
    if not found.get("backtest_days") and {"max_alerts_per_day", "min_precision"} & found.keys():
        problems.append("gate.backtest_days must be there too: over so many days alerts and precision are counted")
    if problems:
        raise SetupError(f"{file}: {'; '.join(problems)}")
    return Gate(**found) if found else None


def _profile_file(folder: Path, name: str) -> Path:
    known = sorted(file.stem for file in folder.glob("*.yml"))
    if name not in known:
        raise SetupError(f"there is no profile {name!r} in {folder}; there are {', '.join(known) or 'none'}")
    return folder / f"{name}.yml"


def _run_settings(file: Path, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the keys of `defaults` from a file: texts, and mappings of texts."""
    document = _read(file, missing_ok=True)[1] or {}
    if not isinstance(document, dict) or not set(document) <= set(defaults):
        raise SetupError(f"{file} holds something else than the keys {', '.join(defaults)}")
    found: dict[str, Any] = {}
    for key, default in defaults.items():
        value = document.get(key, default)
        if isinstance(default, dict) != isinstance(value, dict):
            kind = "a mapping of settings" if isinstance(default, dict) else "one text"
            raise SetupError(f"{file}: {key} is {kind}, got {value!r:.100}")
        found[key] = {str(k): str(v) for k, v in value.items()} if isinstance(value, dict) else str(value)
    return found


def load_stream(path: str | Path) -> Stream:
    """Reads a stream from its YAML file.

    Raises SetupError if the file cannot be read, StreamError with every problem, each with its file and line.
    """
    file = Path(path)
    node, document = _read(file)
    lines: dict[str, int] = {}
    twice = [
        Problem(place, f"the key is written twice, {file}:{line}") for place, line in _note_places(node, "", lines)
    ]
    try:
        stream = Stream.from_dict(document)
    except StreamError as error:
        problems = [Problem(p.place, f"{p.message}, {file}:{_find_line(lines, p.place)}") for p in error.problems]
        raise StreamError(error.name, [*twice, *problems]) from None
    if twice:
        raise StreamError(stream.name, twice)
    return stream


def load_streams(conf_dir: str | Path) -> dict[str, Stream]:
    """Reads the streams of CONF/streams/*.yml, by name, in the order of the files' names.

    Raises SetupError if there is no file or two declare the same name, and the errors of `load_stream`.
    """
    folder = Path(conf_dir) / "streams"
    files = sorted([*folder.glob("*.yml"), *folder.glob("*.yaml")])
    if not files:
        raise SetupError(f"{folder} holds no stream (*.yml); name the right folder with --conf or LOOKBACK_CONF")
    streams: dict[str, Stream] = {}
    declared: dict[str, Path] = {}
    for file in files:
        stream = load_stream(file)
        if stream.name in streams:
            raise SetupError(f"stream {stream.name!r} is declared in {declared[stream.name]} and again in {file}")
        streams[stream.name], declared[stream.name] = stream, file
    return streams


def load_rule_document(path: str | Path) -> dict[str, Any]:
    """Reads the rule document of a YAML file, unchecked. Raises SetupError if the file holds no mapping."""
    return parse_rule_text(read_text(path), str(path)).document


@dataclass(frozen=True)
class ParsedRule:
    """The document of a rule, the node of YAML that it was read from, and the line of each place, from 1 on."""

    document: dict[str, Any]
    node: Any
    lines: Mapping[str, int]

    def find_line(self, place: str) -> int:
        """Returns the line of a place, or of the nearest one around it that is in the text."""
        return _find_line(self.lines, place)


def parse_rule_text(text: str, name: str) -> ParsedRule:
    """Reads the rule document of a YAML text, unchecked. name: of the file, for messages.

    Raises SetupError if it is no YAML or no mapping, and if a key is written twice.
    """
    node, document = _parse(text, name)
    lines: dict[str, int] = {}
    twice = _note_places(node, "", lines)
    if twice:
        raise SetupError("; ".join(f"{name}:{line}: the key {place} is written twice" for place, line in twice))
    if not isinstance(document, dict):
        raise SetupError(f"{name} holds no rule; a rule is a mapping with the keys rule_id, stream, window, ...")
    return ParsedRule(document, node, lines)


def load_yaml(path: str | Path) -> Any:
    """Reads a YAML file. Raises SetupError if it cannot be read, with the line if there is one."""
    return _read(Path(path))[1]


def _read(file: Path, *, missing_ok: bool = False) -> tuple[Any, Any]:
    """Reads a file as YAML nodes, which know their lines, and as Python values.

    Both are None if the file is empty, or missing with missing_ok. Raises SetupError, with the line if there is one.
    """
    if missing_ok and not file.exists():
        return None, None
    return _parse(read_text(file), str(file))


def read_text(path: str | Path) -> str:
    """Reads the text of a YAML file, with the line breaks that it has. Raises SetupError."""
    file = Path(path)
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise SetupError(f"{file} is larger than {MAX_FILE_BYTES:,} bytes; that is no declaration, rule or setting")
        with file.open(encoding="utf-8", newline="") as opened:
            return opened.read()
    except (OSError, ValueError) as error:
        # Also a path with a NUL, which no system takes.
        raise SetupError(f"{file} cannot be read: {error}") from error


def _parse(text: str, file: str) -> tuple[Any, Any]:
    """Parses a text as YAML nodes, which know their lines, and as Python values. file: its name, for messages."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is not None and _count_nodes(node, {}) > MAX_NODES:
            raise SetupError(
                f"{file} has more than {MAX_NODES:,} values once its aliases (*name) are written out; write what is meant"
            )
        return node, yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        raise _explain_yaml_error(file, text, error) from error
    except RecursionError as error:
        raise SetupError(f"{file} is nested too deeply, or an alias in it holds itself; make it flatter") from error
    except (yaml.YAMLError, ValueError) as error:
        # A character that YAML does not allow, or a text that only looks like a date or a number.
        raise SetupError(f"{file} is not YAML: {first_line(error)}; put texts in quotes") from error


_ALIKE = "indent the keys of one level alike, with spaces"
# Words of the parser's message, with what is wrong in the line, and the remedy.
_YAML_PROBLEMS = (
    ("'\\t' that cannot start", "a tab is in the indentation", "indent with spaces alone"),
    ("cannot start any token", "a text begins with a character that means something else", "put the text in quotes"),
    ("expected a comment or a line break", "a text begins with > or |", "put the text in quotes"),
    ("found undefined alias", "a text begins with *", "put the text in quotes"),
    ("constructor for the tag", "a text begins with !", "put the text in quotes"),
    (
        "found '<scalar>'",
        "text follows a closing quote or brace",
        "put the whole value in double quotes, and texts in it in single ones",
    ),
    ("expected <block end>", "the line is indented otherwise than the others of its level", _ALIKE),
    ("sequence entries are not allowed", "a '-' is where no list can begin", "put the list below its key"),
    ("expected ',' or", "a bracket before it is not closed, or a comma is missing", "write it"),
    ("unexpected end of stream", "a quote is opened and not closed", "close it"),
    ("another document", "a second document begins", "write one in a file, and leave '---' out"),
    ("unknown escape character", "there is a backslash within double quotes", "use single quotes"),
    (
        "could not find expected ':'",
        "a key has no ':'",
        "write `key: value`, or indent the line if it goes on with a text",
    ),
    ("unhashable key", "a key is a list or a mapping", "write a name"),
)


def _explain_yaml_error(file: str, text: str, error: yaml.MarkedYAMLError) -> SetupError:
    """Names the place, what is seen there, and the remedy of a file that YAML's parser refuses."""
    problem, mark = str(error.problem or error.context), error.problem_mark or error.context_mark
    if "unexpected end of stream" in problem:
        mark = error.context_mark or mark
    if mark is None:
        return SetupError(f"{file} is not YAML: {problem}; put texts in quotes")
    lines = text.splitlines()
    line = lines[mark.line] if mark.line < len(lines) else ""
    what, remedy = next(
        ((what, remedy) for words, what, remedy in _YAML_PROBLEMS if words in problem), (problem, "put texts in quotes")
    )
    if "mapping values are not allowed" in problem:
        what, remedy = "it is indented otherwise than the key before it, or that key has no ':'", _ALIKE
        if ": " in line[: mark.column]:
            what, remedy = "a text has a ':' in it", "put the text in quotes"
    seen = line.strip() if len(line.strip()) <= 60 else f"{line.strip()[:57]}..."
    return SetupError(f"{file}:{mark.line + 1} is not YAML: {what}, at {seen!r}; {remedy}")


def _count_nodes(node: Any, known: dict[int, int]) -> int:
    """Counts the nodes with every alias written out. Raises RecursionError if one contains itself."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in known:
        parts = [part for each in node.value for part in (each if isinstance(each, tuple) else (each,))]
        known[id(node)] = 1 + sum(_count_nodes(part, known) for part in parts)
    return known[id(node)]


def _note_places(node: Any, place: str, lines: dict[str, int]) -> list[tuple[str, int]]:
    """Notes the line of every place below a node. Returns the places that occur twice, each with its later line."""
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
    """Returns the line of a place, or of the nearest one around it that is in the file."""
    while place and place not in lines:
        place = place.rpartition(".")[0]
    return lines.get(place, 1)
