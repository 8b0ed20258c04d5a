"""A rule as the text of its YAML file, which a form reads and changes place by place.

The text is the source of truth: a change replaces the characters of one value, so that comments, order and parts
without a form field stay the same. Each change is parsed again and compared with the intended document.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from lookback.config import ParsedRule, parse_rule_text, read_text
from lookback.core.errors import LookbackError, SetupError
from lookback.core.rules.document import COMMON_KEYS, KEYS_OF_KIND

# Editors that know the YAML language server check a file that begins with this line.
HEADER = "# yaml-language-server: $schema=../rule.schema.json\n"
# The width at which long texts are folded.
_WIDTH = 120
# Texts at these keys are SQL or have braces, so they are always quoted.
_QUOTED_KEYS = ("where", "when", "message", "until", "absent")
_BLOCK_KEYS = ("measures", "parameters")
_AFTER_WHERE = COMMON_KEYS.index("where") + 1
_OF_KINDS = tuple(dict.fromkeys(key for keys in KEYS_OF_KIND.values() for key in keys))
# The order of new keys.
_ORDER = (*COMMON_KEYS[:_AFTER_WHERE], *_OF_KINDS, *COMMON_KEYS[_AFTER_WHERE:])


@dataclass(frozen=True)
class RuleText:
    """The text of a rule's YAML file, which messages call `name`.

    A place is a sequence of keys, such as ("measures", "total"). The constructor raises SetupError if the text is not
    YAML or not a mapping.
    """

    text: str
    name: str = "the YAML"

    def __post_init__(self) -> None:
        _ = self.parsed

    @classmethod
    def of(cls, document: Mapping[str, Any], name: str = "the YAML") -> RuleText:
        """Writes a document as the text of a new file."""
        text = cls(f"{HEADER}{next(_write_entries('rule_id', str(document.get('rule_id', '')), ''))}", name)
        for key, value in document.items():
            text = text.put([key], value)
        return text

    @classmethod
    def read(cls, file: str | Path) -> RuleText:
        """Reads a file. Raises SetupError."""
        return cls(read_text(file), str(file))

    @cached_property
    def parsed(self) -> ParsedRule:
        """The document, its node and its lines."""
        return parse_rule_text(self.text, self.name)

    @property
    def document(self) -> dict[str, Any]:
        """The document. Do not change it."""
        return self.parsed.document

    def get(self, *place: str) -> Any:
        """Returns the value at a place; None if there is none."""
        value: Any = self.document
        for key in place:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def put(self, place: Sequence[str], value: Any) -> RuleText:
        """Returns the text with a value at a place, which may be new. Missing mappings around it are created.

        Raises SetupError if this would also change another part of the document, as with anchors.
        """
        if _is_alike(self.get(*place), value) and place[-1] in (self.get(*place[:-1]) or {}):
            return self
        wanted = _with_value(self.document, place, value)
        outer, at = self._find_outer(place)
        if at < len(place) - 1:
            # The mapping around the value is missing or not a mapping, so write it with the value in it.
            for key in reversed(place[at + 1 :]):
                value = {key: value}
        key, entry = place[at], _find_entry(outer, place[at])
        texts = self._replace(key, entry, value) if entry is not None else self._insert(key, outer, value)
        return self._choose(texts, wanted, place)

    def remove(self, place: Sequence[str]) -> RuleText:
        """Returns the text without a place, and without mappings that become empty. Raises SetupError as `put` does."""
        while len(place) > 1 and len(self.get(*place[:-1]) or ()) == 1:
            place = place[:-1]
        outer, at = self._find_outer(place)
        entry = _find_entry(outer, place[at]) if at == len(place) - 1 else None
        if entry is None:
            return self
        return self._choose([self._cut(outer, entry)], _without_value(self.document, place), place)

    def rename(self, place: Sequence[str], key: str) -> RuleText:
        """Returns the text with another key at a place. Raises SetupError as `put` does, or if the key exists."""
        outer, at = self._find_outer(place)
        entry = _find_entry(outer, place[at]) if at == len(place) - 1 else None
        if entry is None or key == place[-1]:
            return self
        if _find_entry(outer, key) is not None:
            raise SetupError(f"{'.'.join([*place[:-1], key])} already exists; choose another name")
        start, end = entry[0].start_mark.index, entry[0].end_mark.index
        texts = [self.text[:start] + written + self.text[end:] for written in _write_scalars(key, "", "")]
        return self._choose(texts, _with_key(self.document, place, key), place)

    def _find_outer(self, place: Sequence[str]) -> tuple[yaml.MappingNode, int]:
        """Finds the innermost existing mapping around a place, and the position in `place` of its key."""
        node: yaml.MappingNode = self.parsed.node
        for at, key in enumerate(place[:-1]):
            entry = _find_entry(node, key)
            if entry is None or not isinstance(entry[1], yaml.MappingNode) or not entry[1].value:
                return node, at
            node = entry[1]
        return node, len(place) - 1

    def _choose(self, texts: Iterable[str], wanted: Mapping[str, Any], place: Sequence[str]) -> RuleText:
        """Returns the first text whose document is the wanted one."""
        for text in texts:
            try:
                made = RuleText(text, self.name)
            except LookbackError:
                continue
            if _is_alike(made.document, wanted):
                return made
        raise SetupError(
            f"{'.'.join(place)} cannot be changed here without changing more of the text, line {self.parsed.find_line(place[0])}; "
            "change it in the YAML"
        )

    def _replace(self, key: str, entry: tuple[Any, Any], value: Any) -> Iterator[str]:
        """Yields texts with another value for an entry, the most similar one first."""
        node = entry[1]
        colon = self.text.find(":", entry[0].end_mark.index) + 1
        start, end = max(colon, node.start_mark.index), self._find_end(node)
        between = self.text[colon:start]
        indent = " " * entry[0].start_mark.column
        style = node.style if isinstance(node, yaml.ScalarNode) else ""
        for written in _write_values(key, value, indent, style or ""):
            if "\n" not in between:
                yield f"{self.text[:colon]}{between or ' '}{written}{self.text[max(end, start) :]}"
            else:
                # The value begins on a line below its key, which may be followed by a comment.
                comment, _, rest = between.partition("\n")
                kept = f"{comment}\n{rest.rstrip()}" if rest.strip() else comment.rstrip()
                yield f"{self.text[:colon]} {written}{kept}{self.text[end:]}"

    def _insert(self, key: str, outer: yaml.MappingNode, value: Any) -> Iterator[str]:
        if outer.flow_style and outer.value:
            end = self._find_end(outer.value[-1][1])
            end = max(end, outer.value[-1][0].end_mark.index)
            for written in _write_values(key, value, "", ""):
                yield f"{self.text[:end]}, {_write_key(key)}: {written}{self.text[end:]}"
            return
        before = self._find_before(key, outer)
        indent = " " * outer.start_mark.column
        if before is None:
            at = outer.value[0][0].start_mark.index - len(indent)
        else:
            end = max(self._find_end(before[1]), before[0].end_mark.index + 1)
            at = self.text.find("\n", end) + 1 or len(self.text)
        break_ = "" if not at or self.text[at - 1] == "\n" else "\n"
        for entry in _write_entries(key, value, indent):
            yield self.text[:at] + break_ + entry + self.text[at:]

    def _find_before(self, key: str, outer: yaml.MappingNode) -> tuple[Any, Any] | None:
        """Finds the entry after which to insert a new key; None to insert it first."""
        entries: list[tuple[Any, Any]] = outer.value
        if outer is not self.parsed.node or key not in _ORDER:
            return entries[-1]
        later = _ORDER[_ORDER.index(key) + 1 :]
        at = next((at for at, entry in enumerate(entries) if entry[0].value in later), len(entries))
        return entries[at - 1] if at else None

    def _cut(self, outer: yaml.MappingNode, entry: tuple[Any, Any]) -> str:
        start, end = entry[0].start_mark.index, max(self._find_end(entry[1]), entry[0].end_mark.index + 1)
        if outer.flow_style:
            at = outer.value.index(entry)
            if at + 1 < len(outer.value):
                return self.text[:start] + self.text[outer.value[at + 1][0].start_mark.index :]
            if at:
                start = self._find_end(outer.value[at - 1][1])
            return self.text[:start] + self.text[end:]
        line = self.text.find("\n", end)
        begin = self.text.rfind("\n", 0, start) + 1
        return self.text[:begin] + (self.text[line + 1 :] if line >= 0 else "")

    def _find_end(self, node: Any) -> int:
        """Finds the end of a node, excluding trailing comments and blank lines, which belong to the next node."""
        end: int = node.end_mark.index
        if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
            last = node.value[-1]
            return self._find_end(last[1] if isinstance(last, tuple) else last)
        if isinstance(node, yaml.ScalarNode) and node.style in ("|", ">"):
            return len(self.text[:end].rstrip())
        return end


def _find_entry(node: yaml.MappingNode, key: str) -> tuple[Any, Any] | None:
    return next((entry for entry in node.value if entry[0].value == key), None)


def _is_alike(one: Any, other: Any) -> bool:
    """Returns whether two values and their types are the same, ignoring the order of keys."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return len(one) == len(other) and all(key in other and _is_alike(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_alike, one, other))
    return type(one) is type(other) and repr(one) == repr(other)


def _with_value(document: Mapping[str, Any], place: Sequence[str], value: Any) -> dict[str, Any]:
    key, *rest = place
    inner = document.get(key)
    return {**document, key: _with_value(inner if isinstance(inner, Mapping) else {}, rest, value) if rest else value}


def _without_value(document: Mapping[str, Any], place: Sequence[str]) -> dict[str, Any]:
    key, *rest = place
    if rest:
        return {**document, key: _without_value(document[key], rest)}
    return {name: value for name, value in document.items() if name != key}


def _with_key(document: Mapping[str, Any], place: Sequence[str], new: str) -> dict[str, Any]:
    key, *rest = place
    if rest:
        return {**document, key: _with_key(document[key], rest, new)}
    return {new if name == key else name: value for name, value in document.items()}


# Writing --------------------------------------------------------------------------------------------------------------


def _write_entries(key: str, value: Any, indent: str) -> Iterator[str]:
    """Yields ways to write a new entry of a block with its line break, from the prettiest to the safest."""
    if key in _BLOCK_KEYS and isinstance(value, Mapping) and value:
        inner = f"{indent}  "
        lines = "".join(next(_write_entries(name, each, inner)) for name, each in value.items())
        yield f"{indent}{_write_key(key)}:\n{lines}"
    style = (
        ">" if key == "description" and isinstance(value, str) and len(value) > _WIDTH - len("description: ") else ""
    )
    for written in _write_values(key, value, indent, style):
        yield f"{indent}{_write_key(key)}: {written}\n"


def _write_key(key: str) -> str:
    return next(_write_scalars(key, "", ""))


def _write_values(key: str, value: Any, indent: str, style: str) -> Iterator[str]:
    """Yields ways to write a value on the line of its key, from the prettiest to the safest.

    `style` is PyYAML's style of the previous value.
    """
    if isinstance(value, str):
        yield from _write_scalars(value, indent, style or ('"' if key in _QUOTED_KEYS else ""))
        return
    for allow_unicode in (True, False):
        written = yaml.safe_dump(
            value, default_flow_style=True, sort_keys=False, allow_unicode=allow_unicode, width=10**9
        )
        yield written.removesuffix("\n...\n").strip()


def _write_scalars(value: str, indent: str, style: str) -> Iterator[str]:
    lines = value.split("\n")
    if style == ">" and len(lines) == 1 and value:
        inner = f"{indent}  "
        width = _WIDTH - len(inner)
        folded = textwrap.wrap(value, width, break_long_words=False, break_on_hyphens=False)
        yield "\n".join([">-", *(inner + line for line in folded)])
    if style in ("|", ">") and len(lines) > 1:
        yield "\n".join(["|-", *(f"{indent}  {line}" if line else "" for line in lines)])
    if style == "'" and len(lines) == 1:
        yield f"'{value.replace(chr(39), chr(39) * 2)}'"
    if style != '"' and len(lines) == 1:
        yield yaml.safe_dump(value, allow_unicode=True, width=10**9).removesuffix("\n...\n").removesuffix("\n")
    yield json.dumps(value, ensure_ascii=False)
    yield yaml.safe_dump(value, default_style='"', width=10**9).removesuffix("\n")
