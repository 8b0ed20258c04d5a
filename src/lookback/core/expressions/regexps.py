"""Regular expressions with the results of Java's, in time linear in the text, by RE2.

pyarrow has RE2. Both search for the leftmost match and prefer earlier alternatives. `$` differs most: in Java it also
matches before a line break at the end of the text. It is allowed where nothing can follow it, and is written as an
optional line break and the end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lookback.core.expressions.characters import invert, write_characters
from lookback.core.expressions.kernels import KernelResult, map_repeated
from lookback.core.expressions.operators import RefusedOperator
from lookback.core.expressions.patterns import (
    Alternation,
    Anchor,
    Characters,
    Concatenation,
    Group,
    LineEnd,
    Parser,
    Repeat,
    Tree,
    walk,
)
from lookback.core.expressions.signatures import Arguments, Call, require_count, require_type
from lookback.core.values.columns import Values
from lookback.core.values.types import BOOLEAN, STRING

# The limit for sets of characters once counted repeats are written out, as RE2 does. It bounds the time for each
# character of a text.
MAX_POSITIONS = 2_000
_LONG_RUN = 50


@dataclass(frozen=True)
class Pattern:
    r"""A pattern for RE2.

    Attributes:
        usual: The pattern for texts that do not end with "\r\n".
        windows: The pattern for texts that do; there `$` does not match between the two characters.
    """

    usual: str
    windows: str


@lru_cache(maxsize=10_000)
def translate(text: str, group: int | None = None) -> Pattern:
    """Translates a Java pattern.

    Args:
        text: The pattern.
        group: The group to extract, named `found` in the result; 0 is the whole match. None: no group is captured.

    Raises:
        RefusedOperator: The pattern is wrong, RE2 lacks something in it or could read it differently, or it has no such
            group.
    """
    parser = Parser(text)
    tree = parser.parse()
    if group is not None and not 0 <= group <= parser.groups:
        groups = "no group" if not parser.groups else f"{parser.groups} group{'s' * (parser.groups > 1)}"
        remedy = "take 0, the whole match" + (f", or a group up to {parser.groups}" if parser.groups else "")
        raise RefusedOperator(f"the pattern {text!r} has {groups}, so there is no group {group}; {remedy}")
    if _count_positions(tree) > MAX_POSITIONS:
        raise RefusedOperator(
            f"the pattern matches more than {MAX_POSITIONS:,} characters once its repeats are written out; repeat "
            "less, or use * or +"
        )
    parts = tree.parts if isinstance(tree, Concatenation) else (tree,)
    after: tuple[Tree, ...] = ()
    if group == 0 and parts and isinstance(parts[-1], LineEnd):
        # The match does not include the line break before the end.
        parts, after = parts[:-1], parts[-1:]
    whole = Concatenation((Group(0, Concatenation(parts)), *after))
    _check_places(whole, parser, group, is_last=True)
    return Pattern(
        _write(whole, group, r"[\n\r\x{85}\x{2028}\x{2029}]?\z"),
        _write(whole, group, r"(?:\r\n)?\z"),
    )


def find_required_texts(text: str) -> list[str]:
    """Finds texts of ASCII of which each match of a Java pattern has one, in small letters; none if that is not known."""
    return _find_required(Parser(text).parse())


def _find_required(tree: Tree) -> list[str]:
    match tree:
        case Characters():
            return [_find_letter(tree)] if _find_letter(tree) else []
        case Group(body=body):
            return _find_required(body)
        case Repeat(body=body, least=least):
            return _find_required(body) if least else []
        case Alternation(branches=branches):
            found = [_find_required(branch) for branch in branches]
            return [text for texts in found for text in texts] if all(found) else []
        case Concatenation(parts=parts):
            runs = groupby(parts, lambda part: bool(_find_letter(part)))
            known = [
                each
                for is_run, run in runs
                for each in ([["".join(map(_find_letter, run))]] if is_run else map(_find_required, run))
            ]
            # The best are those of which the shortest is longest.
            return max(filter(None, known), key=lambda texts: (min(map(len, texts)), -len(texts)), default=[])
    return []


def _find_letter(tree: Tree) -> str:
    """Returns the small letter or the sign of ASCII that a part matches, whatever the case; '' for other parts."""
    codes = {first for first, last in tree.ranges if first == last} if isinstance(tree, Characters) else set()
    letters = {chr(code).lower() for code in codes}
    # Half a character is read as a question mark.
    is_one = isinstance(tree, Characters) and len(codes) == len(tree.ranges) and len(letters) == 1 and max(codes) < 128
    return letters.pop() if is_one and letters != {"?"} else ""


# Calls ---------------------------------------------------------------------------------------------------------------


def type_regexp_like(name: str, arguments: Arguments) -> Call:
    """Types a call with a text and a literal pattern; the result is a boolean."""
    require_count(name, arguments, 2, 2)
    _check_pattern(name, arguments, None)
    return Call([require_type(name, arguments[0], STRING), arguments[1]], BOOLEAN)


def type_regexp_extract(name: str, arguments: Arguments) -> Call:
    """Types a call with a text, a literal pattern and the number of a group, 1 if left out; the result is a string."""
    require_count(name, arguments, 2, 3)
    group = arguments[2].literal if len(arguments) > 2 else 1
    if not isinstance(group, int):
        raise RefusedOperator(f"{name}() takes the number of a group as an integer literal, got {arguments[2].sql}")
    _check_pattern(name, arguments, group)
    return Call([require_type(name, arguments[0], STRING), *arguments[1:]], STRING)


def _check_pattern(name: str, arguments: Arguments, group: int | None) -> None:
    text = arguments[1].literal
    if not isinstance(text, str):
        raise RefusedOperator(
            f"{name}() takes its pattern as a literal text or a parameter of the rule, got {arguments[1].sql}"
        )
    try:
        pattern = translate(text, group)
        for written in (pattern.usual, pattern.windows):
            pc.match_substring_regex(pa.array([""], pa.large_string()), pattern=written)
    except RefusedOperator as refused:
        raise RefusedOperator(f"{name}(): {refused}") from None
    except pa.ArrowInvalid as error:
        raise RefusedOperator(f"{name}(): the pattern is too large ({error}); repeat less, or split it") from None


def match_regexp(call: Call, values: Sequence[Values]) -> KernelResult:
    """Returns whether the pattern is found in each text."""
    written = str(call.arguments[1].literal)
    has_run = _make_run_test(written)
    if has_run is not None:
        return KernelResult(np.fromiter(map(has_run, values[0].tolist()), dtype=bool, count=len(values[0])))

    def match(texts: Any, pattern: str) -> Values:
        return np.asarray(pc.match_substring_regex(texts, pattern=pattern).to_numpy(zero_copy_only=False))

    pattern = translate(written)
    return KernelResult(map_repeated(lambda texts: _search(match, pattern, texts).astype(bool), values[0]))


@lru_cache(maxsize=10_000)
def _make_run_test(text: str) -> Callable[[str], bool] | None:
    """Returns the test of a pattern such as .{1000,}, a long run of one set of characters; None for other patterns.

    RE2 takes 9 ms for this one and a text of 2,000 characters.
    """
    tree = Parser(text).parse()
    if not isinstance(tree, Repeat) or not isinstance(tree.body, Characters) or tree.least < _LONG_RUN:
        return None
    least, others = tree.least, invert(tree.body.ranges)
    ranges = "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in others)
    between = re.compile(f"[{ranges}]") if ranges else None

    def has_run(text: str) -> bool:
        if between is None or len(text) < least:
            return len(text) >= least
        return any(len(run) >= least for run in between.split(_replace_halves(text)))

    return has_run


def extract_regexp(call: Call, values: Sequence[Values]) -> KernelResult:
    """Returns what the group took of the first match in each text; '' without a match, or if it took no part."""

    def extract(texts: Any, pattern: str) -> Values:
        # Without a match, the struct is NULL.
        found = pc.extract_regex(texts, pattern=pattern).flatten()[0]
        return np.asarray(pc.fill_null(found, "").to_numpy(zero_copy_only=False))

    group = int(call.arguments[2].literal) if len(call.arguments) > 2 else 1
    pattern = translate(str(call.arguments[1].literal), group)
    return KernelResult(map_repeated(lambda texts: _search(extract, pattern, texts), values[0]))


def _search(search: Callable[[Any, str], Values], pattern: Pattern, values: Values) -> Values:
    """Searches each text by the one of the two patterns that is meant for it."""
    texts = values.tolist()
    if pattern.usual == pattern.windows:
        return search(_make_array(texts), pattern.usual)
    is_windows = np.fromiter((text.endswith("\r\n") for text in texts), dtype=bool, count=len(texts))
    found = search(_make_array(texts), pattern.usual)
    if is_windows.any():
        found = found.copy()
        found[is_windows] = search(_make_array(values[is_windows].tolist()), pattern.windows)
    return found


def _make_array(texts: list[str]) -> Any:
    try:
        return pa.array(texts, pa.large_string())
    except UnicodeEncodeError:
        return pa.array([_replace_halves(text) for text in texts], pa.large_string())


def _replace_halves(text: str) -> str:
    """Replaces halves of characters by question marks, as Java writes them."""
    return text.encode("utf-8", "replace").decode()


# Checks and writing --------------------------------------------------------------------------------------------------


def _count_positions(tree: Tree) -> int:
    match tree:
        case Characters():
            return 1
        case Repeat(body=body, least=least, most=most):
            return _count_positions(body) * max(least, most or 0, 1)
        case Concatenation(parts=parts) | Alternation(branches=parts):
            return sum(map(_count_positions, parts))
        case Group(body=body):
            return _count_positions(body)
    return 0


def _can_be_empty(tree: Tree) -> bool:
    match tree:
        case Repeat(body=body, least=least):
            return least == 0 or _can_be_empty(body)
        case Concatenation(parts=parts):
            return all(map(_can_be_empty, parts))
        case Alternation(branches=branches):
            return any(map(_can_be_empty, branches))
        case Group(body=body):
            return _can_be_empty(body)
    return not isinstance(tree, Characters)


def _check_places(tree: Tree, parser: Parser, group: int | None, *, is_last: bool) -> None:
    """Refuses `$` where something could follow, or in the group that is extracted, and what groups decide differently.

    `is_last`: nothing of the pattern follows the tree.
    """
    match tree:
        case LineEnd(at=at) if not is_last:
            remedy = r"put it at the end of the pattern or of an alternative, or use \z, the end of the text"
            parser.refuse(at, "a place at the end of the text with something behind it", remedy)
        case Concatenation(parts=parts):
            for number, part in enumerate(parts, start=1):
                _check_places(part, parser, group, is_last=is_last and number == len(parts))
        case Alternation(branches=branches):
            for branch in branches:
                _check_places(branch, parser, group, is_last=is_last)
        case Group(number=number, body=body):
            if number == group and (ends := [each for each in walk(body) if isinstance(each, LineEnd)]):
                remedy = r"put it behind the group and at the end of the pattern, or use \z, the end of the text"
                parser.refuse(ends[0].at, "a $ in the extracted group", remedy)
            _check_places(body, parser, group, is_last=is_last)
        case Repeat(body=body, most=most, at=at):
            if group is not None and _can_be_empty(body):
                parser.refuse(at, "a repeat of what can be empty", "let each repeat take at least one character")
            if group and most != 1 and any(isinstance(each, Group) and each.number == group for each in walk(body)):
                # Java may keep there what a failed attempt took.
                parser.refuse(at, "a repeat around the extracted group", "put the repeat into the group: ((?:...)*)")
            _check_places(body, parser, group, is_last=False)


def _write(tree: Tree, group: int | None, line_end: str) -> str:
    """Writes a tree for RE2; `line_end` is written for `$`."""
    match tree:
        case Characters(ranges=ranges):
            return write_characters(ranges)
        case Anchor(text=text):
            return text
        case LineEnd():
            return line_end
        case Concatenation(parts=parts):
            return "".join(_write(part, group, line_end) for part in parts)
        case Alternation(branches=branches):
            return f"(?:{'|'.join(_write(branch, group, line_end) for branch in branches)})"
        case Group(number=number, body=body):
            return f"({'?P<found>' if number == group else '?:'}{_write(body, group, line_end)})"
        case Repeat(body=body, least=least, most=most, is_lazy=is_lazy):
            written = _write(body, group, line_end)
            atom = written if isinstance(body, (Characters, Group)) else f"(?:{written})"
            bounds = "" if most is None else most
            return f"{atom}{{{least},{bounds}}}{'?' * is_lazy}"
