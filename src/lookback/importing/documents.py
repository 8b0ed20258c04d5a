"""Reads the YAML documents of a file of another system, which may be long, hostile or no YAML at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import SafeConstructor

from lookback.core.errors import SetupError
from lookback.core.values.texts import first_line

# Libyaml reads thousands of files ten times faster, if it is there.
_LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
# Lists of hashes are long.
MAX_FILE_BYTES = 2_000_000
# Values of a file with its aliases expanded, which can make billions of a few lines.
_MAX_NODES = 100_000


def read_documents(path: str | Path) -> list[Any]:
    """Reads all documents of a file. Raises SetupError if it cannot be read, is not YAML, or has a key twice."""
    file = Path(path)
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise SetupError(f"{file} is larger than {MAX_FILE_BYTES:,} bytes")
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise SetupError(f"{file} cannot be read: {error}") from error
    try:
        nodes = list(yaml.compose_all(text, Loader=_LOADER))
        if sum(_count_nodes(node, {}, file) for node in nodes) > _MAX_NODES:
            raise SetupError(f"{file} has more than {_MAX_NODES:,} values once its aliases (*name) are expanded")
        return [SafeConstructor().construct_document(node) for node in nodes]
    except RecursionError as error:
        raise SetupError(f"{file} is nested too deeply, or an alias in it contains itself") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = "" if mark is None else f":{mark.line + 1}"
        raise SetupError(f"{file}{line} is not YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise SetupError(f"{file} is not YAML: {first_line(error)}") from error


def read_mapping_file(path: str | Path) -> dict[str, Any]:
    """Reads a file with one mapping. Raises SetupError."""
    documents = read_documents(path)
    if len(documents) != 1 or not isinstance(documents[0], dict):
        raise SetupError(f"{path} must have one mapping, as docs/bring-your-rules.md shows")
    return documents[0]


def _count_nodes(node: Any, known: dict[int, int], file: Path) -> int:
    """Counts the nodes with all aliases expanded. Raises SetupError for a key that is written twice."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in known:
        if isinstance(node, yaml.MappingNode):
            _require_single_keys(node, file)
        parts = [part for each in node.value for part in (each if isinstance(each, tuple) else (each,))]
        known[id(node)] = 1 + sum(_count_nodes(part, known, file) for part in parts)
    return known[id(node)]


def _require_single_keys(node: yaml.MappingNode, file: Path) -> None:
    seen = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode):
            if key.value in seen:
                line = key.start_mark.line + 1
                raise SetupError(f"{file}:{line}: the key {key.value!r:.100} is written twice; one would be lost")
            seen.add(key.value)
