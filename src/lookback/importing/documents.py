"""Reads the YAML documents of a file of another system, which may be long, hostile or no YAML at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from lookback.core.errors import SetupError
from lookback.yamltexts import parse_documents

# Lists of hashes are long.
MAX_FILE_BYTES = 2_000_000
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
    documents = parse_documents(text, str(file), _MAX_NODES)
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
