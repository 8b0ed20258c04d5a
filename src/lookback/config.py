"""Settings and stream declarations as files hold them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lookback.core.errors import Problem, SetupError, StreamError
from lookback.core.streams import Stream

DEFAULT_ROOT = "./lakehouse"
DEFAULT_CONF = "./conf"
DEFAULT_EVERY = "1 second"


@dataclass(frozen=True)
class Settings:
    """Where things are, and how a run on this machine is set.

    root: the folder of the local tables, or its URL; conf: the folder of streams/ and rules/. profile: the name of
    CONF/profiles/<profile>.yml, which says the other three, CONF/settings.yml going before it. every: the pause between
    two micro-batches; admission: options of the Delta source that bound one; spark: Spark settings that go before
    Lookback's own.
    """

    root: str
    conf: Path
    profile: str = ""
    every: str = DEFAULT_EVERY
    admission: Mapping[str, str] = field(default_factory=dict)
    spark: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def local(
        cls, root: str | Path | None = None, conf: str | Path | None = None, profile: str | None = None
    ) -> Settings:
        """Settings of this machine: as given, else by the environment, else by default.

        root: LOOKBACK_ROOT, ./lakehouse; conf: LOOKBACK_CONF, ./conf; profile: LOOKBACK_PROFILE, what CONF/settings.yml says.
        Raises SetupError where a file cannot be used or there is no such profile.
        """
        folder = Path(conf or os.environ.get("LOOKBACK_CONF") or DEFAULT_CONF)
        own = _run_settings(folder / "settings.yml", {"profile": "", "every": "", "admission": {}, "spark": {}})
        name = profile or os.environ.get("LOOKBACK_PROFILE") or own["profile"]
        chosen: dict[str, Any] = {"every": DEFAULT_EVERY, "admission": {}, "spark": {}}
        if name:
            chosen = _run_settings(_profile_file(folder / "profiles", name), chosen)
        return cls(
            str(root or os.environ.get("LOOKBACK_ROOT") or DEFAULT_ROOT),
            folder,
            name,
            own["every"] or chosen["every"],
            {**chosen["admission"], **own["admission"]},
            {**chosen["spark"], **own["spark"]},
        )

    def streams(self) -> dict[str, Stream]:
        """The declared streams by name."""
        return load_streams(self.conf)

    def stream(self, name: str) -> Stream:
        """One declared stream. Raises SetupError, naming those that there are, where it is none of them."""
        streams = self.streams()
        if name not in streams:
            raise SetupError(f"there is no stream {name!r} in {self.conf / 'streams'}; there are {', '.join(streams)}")
        return streams[name]


def _profile_file(folder: Path, name: str) -> Path:
    known = sorted(file.stem for file in folder.glob("*.yml"))
    if name not in known:
        raise SetupError(f"there is no profile {name!r} in {folder}; there are {', '.join(known) or 'none'}")
    return folder / f"{name}.yml"


def _run_settings(file: Path, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of `defaults` as the file sets them: texts, and mappings of texts."""
    document = (yaml.safe_load(file.read_text(encoding="utf-8")) or {}) if _composed(file, missing_ok=True) else {}
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
    """The stream that a YAML file declares.

    Raises SetupError where the file cannot be read, StreamError with every problem, its file and line.
    """
    file = Path(path)
    node = _composed(file)
    lines: dict[str, int] = {}
    twice = [Problem(place, f"the key stands twice, {file}:{line}") for place, line in _places(node, "", lines)]
    document = yaml.safe_load(file.read_text(encoding="utf-8"))
    try:
        stream = Stream.from_dict(document)
    except StreamError as error:
        problems = [Problem(p.place, f"{p.message}, {file}:{_line(lines, p.place)}") for p in error.problems]
        raise StreamError(error.name, [*twice, *problems]) from None
    if twice:
        raise StreamError(stream.name, twice)
    return stream


def load_streams(conf_dir: str | Path) -> dict[str, Stream]:
    """The streams that CONF/streams/*.yml declare, by name, in the order of the files' names.

    Raises SetupError where there is no file or two declare one name, and what `load_stream` raises.
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
    """The rule document of a YAML file, as it stands there. Raises SetupError where it cannot be read as one."""
    file = Path(path)
    twice = _places(_composed(file), "", {})
    if twice:
        raise SetupError("; ".join(f"{file}:{line}: the key {place} stands twice" for place, line in twice))
    document = yaml.safe_load(file.read_text(encoding="utf-8"))
    if not isinstance(document, dict):
        raise SetupError(f"{file} holds no rule; a rule is a mapping with the keys rule_id, stream, window, ...")
    return document


def _composed(file: Path, *, missing_ok: bool = False) -> Any:
    """The file as YAML nodes, which know their lines; None where it is empty, or missing and that is fine."""
    if missing_ok and not file.exists():
        return None
    try:
        return yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"{file} cannot be read: {error}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{file}:{mark.line + 1}" if mark else str(file)
        raise SetupError(f"{where} is not YAML: {error.problem or error.context}") from error


def _places(node: Any, place: str, lines: dict[str, int]) -> list[tuple[str, int]]:
    """Notes the line of every place below a node. Returns the places that stand twice, with the later line."""
    if not isinstance(node, yaml.MappingNode):
        return []
    twice: list[tuple[str, int]] = []
    for key, value in node.value:
        name, line = f"{place}.{key.value}".lstrip("."), key.start_mark.line + 1
        if name in lines:
            twice.append((name, line))
        lines[name] = line
        twice += _places(value, name, lines)
    return twice


def _line(lines: dict[str, int], place: str) -> int:
    """The line of a place, or of the nearest one around it that is in the file."""
    while place and place not in lines:
        place = place.rpartition(".")[0]
    return lines.get(place, 1)
