"""Reads the files of other systems, and the YAML documents in them. They may be long, hostile or not YAML at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from lookback.core.errors import SetupError
from lookback.yamltexts import parse_documents

# Lists of hashes are long.
MAX_FILE_BYTES = 2_000_000
_MAX_NODES = 100_000


def read_text(file: Path) -> str:
    """Reads the text of a file. Raises SetupError if it is too large or cannot be read."""
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise SetupError(f"{file} is larger than {MAX_FILE_BYTES:,} bytes")
        return file.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise SetupError(f"{file} cannot be read: {error}") from error


def read_documents(path: str | Path) -> list[Any]:
    """Reads all documents of a file. Raises SetupError if it cannot be read, is not YAML, or has a key twice."""
    file = Path(path)
    documents = parse_documents(read_text(file), str(file), _MAX_NODES)
    for node, _ in documents:
        _require_single_keys(node, file, set())
    return [document for _, document in documents]


def read_mapping_file(path: str | Path) -> dict[str, Any]:
    """Reads a file with one mapping. Raises SetupError."""
    documents = read_documents(path)
    if len(documents) != 1 or not isinstance(documents[0], dict):
        raise SetupError(f"{path} must have one mapping, as docs/bring-your-rules.md shows")
    return documents[0]


def _require_single_keys(node: yaml.Node, file: Path, checked: set[int]) -> None:
    """Raises SetupError for a key that is written twice, anywhere below a node."""
    if isinstance(node, yaml.ScalarNode) or id(node) in checked:
        return
    checked.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for part in node.value:
            _require_single_keys(part, file, checked)
        return
    seen = set()
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode):
            if key.value in seen:
                line = key.start_mark.line + 1
                raise SetupError(f"{file}:{line}: the key {key.value!r:.100} is written twice; one would be lost")
            seen.add(key.value)
        _require_single_keys(key, file, checked)
        _require_single_keys(value, file, checked)
