"""Parses regular expressions as Java reads them, and refuses what RE2 lacks or the two could read differently.

Every set of characters is written out, so that no name of a class and no folding of case is left to RE2.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from lookback.core.expressions.characters import (
    CONTROLS,
    LINE_ENDS,
    MAX_CODE,
    NAMED,
    SHORTHANDS,
    Ranges,
    fold,
    invert,
    merge,
)
from lookback.core.expressions.operators import RefusedOperator

# How often RE2 repeats at most.
MAX_REPEATS = 1_000
_MAX_LEVELS = 100


@dataclass(frozen=True)
class Characters:
    """One character of a set."""

    ranges: Ranges


@dataclass(frozen=True)
class Anchor:
    """A place without a character, as RE2 writes it."""

    text: str


@dataclass(frozen=True)
class LineEnd:
    """The end of the text, or the place before a line break at its end; `at`: where the pattern has it."""

    at: int


@dataclass(frozen=True)
class Concatenation:
    """Parts that follow one another."""

    parts: tuple[Tree, ...]


@dataclass(frozen=True)
class Alternation:
    """Branches, of which the first that leads to a match is taken."""

    branches: tuple[Tree, ...]


@dataclass(frozen=True)
class Group:
    """A group that captures, counted from 1."""

    number: int
    body: Tree


@dataclass(frozen=True)
class Repeat:
    """A repeated part. `most` is None without a bound; `at`: where the pattern has it."""

    body: Tree
    least: int
    most: int | None
    is_lazy: bool
    at: int


Tree = Characters | Anchor | LineEnd | Concatenation | Alternation | Group | Repeat


def walk(tree: Tree) -> Iterator[Tree]:
    """Yields a tree and all trees in it, in the order of the pattern."""
    left = [tree]
    while left:
        yield (tree := left.pop())
        match tree:
            case Concatenation(parts=parts) | Alternation(branches=parts):
                left += parts[::-1]
            case Group(body=body) | Repeat(body=body):
                left.append(body)


_LIST = "list the characters in brackets, such as [a-z]"
_REFUSED_ESCAPES = {
    **dict.fromkeys("123456789k", ("a back-reference", "RE2 has none; write what the group matches once more")),
    "B": (r"\B", "write the characters beside it, such as [a-z]"),
    "G": (r"\G", r"use ^ or \A"),
    "R": (r"\R", r"use (?:\r\n|[\n\r])"),
    "c": (r"\c", r"write the character by its code, such as \x01"),
    "E": (r"\E without \Q", "leave it out"),
}
_REFUSED_GROUPS = [
    ("(?=", "a look-ahead", "RE2 has none; test the rest in a condition of its own, with and"),
    ("(?!", "a look-ahead", "RE2 has none; exclude texts by a condition of its own, with and not"),
    ("(?<=", "a look-behind", "RE2 has none; put what comes before into the pattern, and regexp_extract a group"),
    ("(?<!", "a look-behind", "RE2 has none; exclude texts by a condition of its own, with and not"),
    ("(?>", "an atomic group", "use (?:...); RE2 does not backtrack, so nothing is gained by it"),
    ("(?P", "a named group as Python writes it", "use (?<name>...), or (...) as groups go by number"),
]
_REFUSED_FLAGS = {
    "x": "leave out spaces and comments",
    "d": "name the line break: \\n",
    "u": "list the letters beyond ASCII in both cases, such as [äÄ]",
    "U": _LIST,
}
_COUNT = re.compile(r"\{([0-9]+)(,([0-9]*))?\}", re.ASCII)
_GROUP_NAME = re.compile(r"\(\?<([a-zA-Z][a-zA-Z0-9]*)>")
_FLAGS = re.compile(r"\(\?([a-zA-Z]*)(?:-([a-zA-Z]*))?([:)])")
_CODE = re.compile(r"x([0-9a-fA-F]{2})|x\{([0-9a-fA-F]+)\}|u([0-9a-fA-F]{4})|0([0-3][0-7]{2}|[0-7]{1,2})")


class Parser:
    """Parses the text of a Java pattern, with its recursion bounded."""

    def __init__(self, text: str) -> None:
        self._text, self._at, self._level = text, 0, 0
        self._flags = frozenset[str]()
        self._names: set[str] = set()
        self.groups = 0

    def parse(self) -> Tree:
        """Returns the tree of the whole pattern. Raises RefusedOperator."""
        tree = self._parse_alternation()
        if self._at < len(self._text):
            self.refuse(self._at, "a ) without (", r"write \) for the character itself")
        return tree

    def refuse(self, at: int, what: str, remedy: str) -> NoReturn:
        """Raises RefusedOperator with the place, counted from 1."""
        shown = self._text[at : at + 12]
        raise RefusedOperator(f"the pattern has {what} at character {at + 1}, {shown!r}; {remedy}")

    def _take(self, text: str) -> bool:
        taken = self._text.startswith(text, self._at)
        self._at += len(text) * taken
        return taken

    def _peek(self, ahead: int = 0) -> str:
        return self._text[self._at + ahead : self._at + ahead + 1]

    def _parse_alternation(self) -> Tree:
        branches = [self._parse_concatenation()]
        while self._take("|"):
            branches.append(self._parse_concatenation())
        return branches[0] if len(branches) == 1 else Alternation(tuple(branches))

    def _parse_concatenation(self) -> Tree:
        parts: list[Tree] = []
        while self._peek() not in ("", "|", ")"):
            if self._take(r"\Q"):
                end = self._text.find(r"\E", self._at)
                quoted = self._text[self._at : end if end >= 0 else None]
                parts += [self._make_character(ord(each)) for each in quoted]
                self._at += len(quoted) + 2 * (end >= 0)
                if quoted:
                    parts[-1] = self._parse_repeat(parts[-1])
            elif (atom := self._parse_atom()) is not None:
                parts.append(self._parse_repeat(atom))
        return parts[0] if len(parts) == 1 else Concatenation(tuple(parts))

    def _parse_atom(self) -> Tree | None:
        """Parses one part without its repeat; None for flags."""
        at, character = self._at, self._peek()
        if character == "(":
            return self._parse_group()
        self._at += 1
        if character == "[":
            return Characters(self._parse_class(at))
        if character == "\\":
            escaped = self._parse_escape(at, in_class=False)
            if isinstance(escaped, int):
                return self._make_character(escaped)
            return Characters(escaped) if isinstance(escaped, tuple) else escaped
        if character == ".":
            return Characters(((0, MAX_CODE),) if "s" in self._flags else invert(LINE_ENDS))
        if character in "^$":
            if "m" in self._flags:
                remedy = r"without (?m) they are the text's ends; use (?:\A|[\n\r]) or (?:\z|[\n\r]) for lines"
                self.refuse(at, f"{character} with the flag m", remedy)
            return LineEnd(at) if character == "$" else Anchor(r"\A")
        if character in "*+?":
            self.refuse(at, f"{character} with nothing to repeat", f"write \\{character} for the character itself")
        if character == "{":
            self.refuse(at, "a { that is not a number of repeats", r"write \{ for the character itself")
        if 0xD800 <= ord(character) < 0xE000:
            self.refuse(at, "half a character", "write the whole one")
        return self._make_character(ord(character))

    def _make_character(self, code: int) -> Characters:
        ranges = ((code, code),)
        return Characters(fold(ranges) if "i" in self._flags else ranges)

    def _parse_group(self) -> Tree | None:
        start, kept = self._at, self._flags
        for opening, what, remedy in _REFUSED_GROUPS:
            if self._text.startswith(opening, start):
                self.refuse(start, what, remedy)
        number = 0
        if match := _GROUP_NAME.match(self._text, start):
            if match[1] in self._names:
                self.refuse(start, f"a second group named {match[1]}", "give each its own name")
            self._names.add(match[1])
            self._at = match.end()
        elif not self._text.startswith("(?", start):
            self._at += 1
        elif match := _FLAGS.match(self._text, start):
            self._set_flags(start, match[1], match[2] or "")
            self._at = match.end()
            if match[3] == ")":
                return None
            number = -1
        else:
            self.refuse(start, "a group that Java does not know", "use (...) or (?:...)")
        if number == 0:
            number = self.groups = self.groups + 1
        self._level += 1
        if self._level > _MAX_LEVELS:
            self.refuse(start, f"more than {_MAX_LEVELS} groups in one another", "leave some out")
        body = self._parse_alternation()
        if not self._take(")"):
            self.refuse(start, "a ( that is not closed", r"write ) behind it, or \( for the character itself")
        self._level -= 1
        self._flags = kept
        return body if number < 0 else Group(number, body)

    def _set_flags(self, at: int, added: str, removed: str) -> None:
        for flag in added + removed:
            if flag not in "ims":
                self.refuse(at, f"the flag {flag}", _REFUSED_FLAGS.get(flag, "use i, s or m"))
        self._flags = self._flags.union(added) - set(removed)

    def _parse_repeat(self, atom: Tree) -> Tree:
        at = self._at
        bounds = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(self._peek())
        if bounds:
            self._at += 1
        elif match := _COUNT.match(self._text, at):
            least = int(match[1][-5:]) if len(match[1].lstrip("0")) < 6 else MAX_REPEATS + 1
            most = int(match[3]) if match[3] else None if match[2] else least
            bounds, self._at = (least, most), match.end()
            if max(least, most or 0) > MAX_REPEATS:
                self.refuse(at, f"more than {MAX_REPEATS:,} repeats", "repeat less, or use * or +")
            if most is not None and most < least:
                self.refuse(at, "repeats whose bounds are the wrong way round", "write the smaller number first")
        else:
            return atom
        if isinstance(atom, (Anchor, LineEnd)):
            self.refuse(at, "a place that is repeated", "leave the repeat out")
        is_lazy = self._take("?")
        if self._peek() == "+" and not is_lazy:
            self.refuse(at, "a possessive repeat", "leave the second + out; RE2 does not backtrack")
        if self._peek() and self._peek() in "*+?{":
            self.refuse(at, "a repeat of a repeat", "put the first one in (?:...)")
        return Repeat(atom, *bounds, is_lazy, at)

    # Classes and escapes

    def _parse_class(self, start: int) -> Ranges:
        is_negated, ranges = self._take("^"), Ranges()
        is_first = True
        while is_first or self._peek() != "]":
            at, character = self._at, self._peek()
            if not character:
                self.refuse(start, "a [ that is not closed", r"write ] behind it, or \[ for the character itself")
            if is_first and character == "]":
                self.refuse(at, "a ] as the first character of a class", r"write \]")
            is_first = False
            found = self._parse_member()
            if isinstance(found, int):
                last = found
                if self._peek() == "-" and self._peek(1) not in ("]", ""):
                    self._at += 1
                    end = self._parse_member()
                    if not isinstance(end, int) or end < found:
                        self.refuse(at, "a range that does not go from a character to a later one", r"write \- for a -")
                    last = end
                found = ((found, last),)
            ranges = merge(ranges, fold(found) if "i" in self._flags else found)
        self._at += 1
        return invert(ranges) if is_negated else ranges

    def _parse_member(self) -> int | Ranges:
        """Parses one character or one shorthand in a class."""
        at, character = self._at, self._peek()
        self._at += 1
        if character == "[":
            self.refuse(at, "a class in a class", r"list the characters in one, or write \[ for the character itself")
        if character == "&" and self._peek() == "&":
            self.refuse(at, "an intersection of classes", r"list the characters, or write \& for the character itself")
        if character == "-" and self._peek() == "-":
            self.refuse(at, "two - in a class", r"write \- for the character itself")
        if character == "\\":
            escaped = self._parse_escape(at, in_class=True)
            assert isinstance(escaped, (int, tuple))
            return escaped
        if 0xD800 <= ord(character) < 0xE000:
            self.refuse(at, "half a character", "write the whole one")
        return ord(character)

    def _parse_escape(self, at: int, *, in_class: bool) -> int | Ranges | Anchor | LineEnd:
        """Parses what follows a backslash: a character, a set, or a place outside a class."""
        character = self._peek()
        if match := _CODE.match(self._text, self._at):
            self._at = match.end()
            code = int(match[4], 8) if match[4] else int(match[1] or match[2] or match[3], 16)
            if code > MAX_CODE or 0xD800 <= code < 0xE000:
                self.refuse(at, "a code that is not a character", r"write the character itself, or \x{...}")
            return code
        self._at += 1
        if character in CONTROLS:
            return CONTROLS[character]
        if character.lower() in SHORTHANDS:
            ranges = SHORTHANDS[character.lower()]
            return ranges if character.islower() else invert(ranges)
        if character and character in "pP":
            return self._parse_named_class(at, is_negated=character == "P")
        if not in_class and character == "b" and self._peek() != "{":
            return Anchor(r"\b")
        if not in_class and character in ("A", "z"):
            return Anchor(f"\\{character}")
        if not in_class and character == "Z":
            return LineEnd(at)
        if not character:
            self.refuse(at, "a backslash at its end", r"write \\ for the character itself")
        if character.isascii() and character.isalnum():
            default = (f"\\{character}{' in a class' * in_class}", _LIST)
            self.refuse(at, *_REFUSED_ESCAPES.get(character, default))
        return ord(character)

    def _parse_named_class(self, at: int, *, is_negated: bool) -> Ranges:
        match = re.compile(r"\{([^}]*)\}").match(self._text, self._at)
        name = match[1] if match else self._peek()
        if match is None or name not in NAMED:
            remedy = f"{_LIST}, or use one of {', '.join(NAMED)}"
            self.refuse(at, f"the class {name}, which differs by version of Unicode", remedy)
        if "i" in self._flags and name in ("Lower", "Upper"):
            self.refuse(at, f"{name} with the flag i, which differs by version of Java", r"use \p{Alpha}")
        self._at = match.end()
        return invert(NAMED[name]) if is_negated else NAMED[name]
