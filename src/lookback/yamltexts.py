"""Parses texts of YAML, which may be long, hostile or no YAML at all, and explains what is wrong in one."""

from __future__ import annotations

from typing import Any

import yaml
from yaml.constructor import SafeConstructor

from lookback.core.errors import SetupError
from lookback.core.values.texts import first_line

# Libyaml is ten times faster, where it is there. Its messages say less, so a text that it refuses is read once more.
_LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
# Nobody nests deeper. Libyaml's composer recurses without a limit, until the process dies.
_MAX_DEPTH = 200
_BEGIN, _END = (yaml.MappingStartEvent, yaml.SequenceStartEvent), (yaml.MappingEndEvent, yaml.SequenceEndEvent)


def parse_documents(text: str, file: str, max_nodes: int, *, single: bool = False) -> list[tuple[Any, Any]]:
    """Parses the documents of a text.

    Args:
        text: The text.
        file: What messages call it.
        max_nodes: The maximum number of values with all aliases expanded, which can make billions of a few lines.
        single: A second document is refused.

    Returns:
        Of each document its nodes, which know their lines, and its Python value.

    Raises:
        SetupError: The text is not YAML, or too large. It names the line, if known, and the remedy.
    """
    try:
        try:
            nodes = _compose(text, file, single, _LOADER)
        except yaml.YAMLError:
            nodes = _compose(text, file, single, yaml.SafeLoader)
        if sum(_count_nodes(node, {}) for node in nodes) > max_nodes:
            raise SetupError(
                f"{file} has more than {max_nodes:,} values once its aliases (*name) are expanded; use fewer aliases"
            )
        return [(node, SafeConstructor().construct_document(node)) for node in nodes]
    except yaml.MarkedYAMLError as error:
        raise _explain_yaml_error(file, text, error) from error
    except RecursionError as error:
        raise SetupError(f"{file} is nested too deeply, or an alias in it contains itself; make it flatter") from error
    except (yaml.YAMLError, ValueError) as error:
        # A character that YAML forbids, or a text that only looks like a date or a number.
        raise SetupError(f"{file} is not YAML: {first_line(error)}; put texts in quotes") from error


def _compose(text: str, file: str, single: bool, loader: Any) -> list[Any]:
    """Raises RecursionError for a text that is nested too deeply."""
    depth = documents = 0
    for event in yaml.parse(text, Loader=loader):
        depth += isinstance(event, _BEGIN) - isinstance(event, _END)
        documents += isinstance(event, yaml.DocumentStartEvent)
        if depth > _MAX_DEPTH:
            raise RecursionError
        if single and documents > 1:
            line = "" if event.start_mark is None else f":{event.start_mark.line + 1}"
            what = "a second document begins; write one document per file, without '---'"
            raise SetupError(f"{file}{line} is not YAML: {what}")
    return list(yaml.compose_all(text, Loader=loader))


_ALIKE = "indent the keys of one level alike, with spaces"
_QUOTE_WHOLE = "put the whole value in double quotes, and texts in it in single ones"
_NO_COLON = ("a key has no ':'", "write `key: value`, or indent the line if it continues a text")
# Words of the parser's message, what is wrong in the line, and the remedy.
_YAML_PROBLEMS = (
    ("'\\t' that cannot start", "the indentation has a tab", "indent with spaces only"),
    ("cannot start any token", "a text begins with a character that means something else", "put the text in quotes"),
    ("expected a comment or a line break", "a text begins with >, | or !", "put the text in quotes"),
    ("found undefined alias", "a text begins with *", "put the text in quotes"),
    ("constructor for the tag", "a text begins with !", "put the text in quotes"),
    ("found '<scalar>'", "text follows a closing quote or brace", _QUOTE_WHOLE),
    ("expected <block end>", "the line is indented differently from its level", _ALIKE),
    ("sequence entries are not allowed", "a list cannot begin at this '-'", "put the list below its key"),
    ("expected ',' or", "an earlier bracket is not closed, or a comma is missing", "add it"),
    ("unexpected end of stream", "a quote is not closed", "close it"),
    ("unknown escape character", "a text in double quotes has a backslash", "use single quotes"),
    ("could not find expected ':'", *_NO_COLON),
    ("unhashable key", "a key is a list or a mapping", "write a name"),
)


def _explain_yaml_error(file: str, text: str, error: yaml.MarkedYAMLError) -> SetupError:
    """Explains an error of the YAML parser: its place, what is wrong there, and the remedy."""
    problem, mark = str(error.problem or error.context), error.problem_mark or error.context_mark
    # The parser sees these two later than where they begin.
    if "unexpected end of stream" in problem or "could not find expected ':'" in problem:
        mark = error.context_mark or mark
    if mark is None:
        return SetupError(f"{file} is not YAML: {problem}; put texts in quotes")
    lines, at = text.splitlines(), mark.line
    before, line = (lines[each] if 0 <= each < len(lines) else "" for each in (at - 1, at))
    what, remedy = next(
        ((what, remedy) for words, what, remedy in _YAML_PROBLEMS if words in problem), (problem, "put texts in quotes")
    )
    if "mapping values are not allowed" in problem:
        what, remedy = "it is indented differently from the key before it", _ALIKE
        if ": " in line[: mark.column]:
            what, remedy = "a text has a ':' in it", "put the text in quotes"
        elif before.strip() and ":" not in before and _count_spaces(before) <= _count_spaces(line):
            (what, remedy), at, line = _NO_COLON, at - 1, before
    seen = line.strip() if len(line.strip()) <= 60 else f"{line.strip()[:57]}..."
    return SetupError(f"{file}:{at + 1} is not YAML: {what}, at {seen!r}; {remedy}")


def _count_spaces(line: str) -> int:
    return len(line) - len(line.lstrip())


def _count_nodes(node: Any, known: dict[int, int]) -> int:
    """Counts the nodes with all aliases expanded. Raises RecursionError if one contains itself."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in known:
        parts = [part for each in node.value for part in (each if isinstance(each, tuple) else (each,))]
        known[id(node)] = 1 + sum(_count_nodes(part, known) for part in parts)
    return known[id(node)]
