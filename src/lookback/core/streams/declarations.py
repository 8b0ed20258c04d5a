"""The history of a stream's declaration: which lateness and limits applied when. A restart may change them."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np

from lookback.core.errors import StreamError
from lookback.core.streams.declaration import Stream
from lookback.core.values.keys import Int64s
from lookback.core.values.limits import WIDEST_LIMITS
from lookback.core.values.zones import ZONES_RELEASE

# The keys of a declaration that affect how events are judged. Keys that only ingest reads are not among them.
SETTINGS = (
    "max_out_of_orderness",
    "allowed_lateness",
    "max_future",
    "max_session",
    "max_revisions",
    "max_failures",
    "limits",
    "union",
    "idle",
)


class Declared(NamedTuple):
    """A declaration of a stream as logged in rule_log.

    after: the last commit judged before it took effect; None for the first. text: the settings, the release of
    Lookback and that of the zone database, as JSON.
    """

    after: int | None
    stream: Stream
    text: str

    @property
    def mark(self) -> str:
        """A fingerprint of the text; empty for a declaration that is not logged."""
        return sha256(self.text.encode()).hexdigest()[:16] if self.text else ""

    @classmethod
    def now(cls, stream: Stream, release: str, after: int | None = None) -> Declared:
        """Makes the entry for a stream's declaration under a release of Lookback."""
        return cls(after, stream, json.dumps({**list_settings(stream), "release": release, "zones": ZONES_RELEASE}))

    @classmethod
    def from_text(cls, stream: Stream, text: str, after: int | None) -> Declared | None:
        """Parses a declaration from rule_log; None if the text is invalid. stream: supplies all but the settings."""
        try:
            settings = {name: value for name, value in json.loads(text).items() if name in SETTINGS}
            # Only ingest reads the columns of a union, which may have had other members.
            ours = stream.to_dict() if stream.union is None else {**stream.to_dict(), "columns": {}}
            return cls(after, Stream.from_dict({**ours, **settings}), text)
        except (ValueError, AttributeError, StreamError):
            return None


@dataclass(frozen=True)
class Declarations:
    """The declarations of a stream in the order in which they applied. The first covers all commits up to the second."""

    listed: tuple[Declared, ...]

    @classmethod
    def of(cls, stream: Stream) -> Declarations:
        """Makes the history of a stream whose declaration never changed, or was never logged."""
        return cls((Declared(None, stream, ""),))

    @classmethod
    def from_rows(cls, stream: Stream, rows: Iterable[tuple[int | None, str]]) -> Declarations:
        """Reads rows of rule_log, each an arrival and a decision, in the order in which they were written.

        Invalid rows are skipped. If none is left, the stream's current declaration applies throughout.
        """
        read = (Declared.from_text(stream, text, after) for after, text in rows)
        listed = _drop_replaced(each for each in read if each is not None)
        return cls(listed) if listed else cls.of(stream)

    def to_rows(self) -> list[tuple[int | None, str]]:
        """Returns rows that `from_rows` can read."""
        return [(each.after, each.text) for each in self.listed]

    def after(self, judged: int | None) -> Declared:
        """Returns the declaration that applies once all commits up to `judged` have been judged."""
        places = [_number(each.after) for each in self.listed]
        return self.listed[max(0, bisect_right(places, _number(judged)) - 1)]

    @property
    def cuts(self) -> list[int]:
        """The last commit judged before each change."""
        return [each.after for each in self.listed[1:] if each.after is not None]

    def then(self, declared: Declared) -> Declarations:
        """Adds a declaration, unless it equals the last one."""
        if declared.text == self.listed[-1].text:
            return self
        return Declarations(_drop_replaced([*self.listed, declared]))

    def with_limits(self, stream: Stream) -> Declarations:
        """Returns the same declarations with the limits of `stream`. Limits only decide which rules are accepted."""
        return Declarations(
            tuple(each._replace(stream=replace(each.stream, limits=stream.limits)) for each in self.listed)
        )

    def describe(self, through: int) -> list[tuple[int | None, dict[str, Any]]]:
        """Lists the settings that applied up to commit `through`, each with the commit after which it took effect."""
        known = list[tuple[int | None, dict[str, Any]]]()
        for each in self.listed:
            settings = list_settings(each.stream)
            if not known:
                known.append((None, settings))
            elif _number(each.after) < through and settings != known[-1][1]:
                known.append((each.after, settings))
        return known

    @property
    def last(self) -> Stream:
        """The latest declaration of the stream."""
        return self.listed[-1].stream

    @property
    def widest(self) -> Stream:
        """A declaration that accepts every rule and event, and keeps all data, that any of these accepts or keeps."""
        names = ("allowed_lateness", "max_session", "max_future")
        most = {name: max(getattr(each.stream, name) for each in self.listed) for name in names}
        return replace(self.last, limits=WIDEST_LIMITS, **most)

    @property
    def least_future(self) -> int:
        """The smallest `max_future` of all declarations."""
        return min(each.stream.max_future for each in self.listed)

    def list_values(self, setting: str, commits: Int64s) -> int | Int64s:
        """Lists a setting's value, such as that of `max_future`, for each commit; one number if it never changed."""
        values: list[int] = [getattr(each.stream, setting) for each in self.listed]
        if len(set(values)) == 1:
            return values[0]
        # An event of commit c is judged after commit c - 1.
        places = np.searchsorted(np.array(self.cuts), commits - 1, side="right")
        return np.array(values, dtype=np.int64)[places]


def list_settings(stream: Stream) -> dict[str, Any]:
    """Lists the settings that affect how events are judged, in the form of a stream's YAML."""
    document = stream.to_dict()
    return {name: document[name] for name in SETTINGS if name in document}


def plan_declarations(
    before: Sequence[tuple[int | None, str]], unfinished: int | None, declared: Declared
) -> Declarations:
    """Decides which declarations a restarted stream uses: a repeated batch is judged by the one it was started with.

    before: the rows of the plan that started the batch; unfinished: the last commit of that batch; None if there is
    none.
    """
    known = Declarations.from_rows(declared.stream, before)
    if not before or unfinished is None:
        return Declarations((declared,))
    repeated = known.after(unfinished - 1)._replace(after=None)
    return Declarations((repeated,)).then(declared._replace(after=unfinished))


def _drop_replaced(listed: Iterable[Declared]) -> tuple[Declared, ...]:
    """Drops declarations that judged nothing because a later one replaced them at the same arrival."""
    kept = list[Declared]()
    for declared in listed:
        kept = [each for each in kept if _number(each.after) < _number(declared.after)]
        kept.append(declared)
    return tuple(kept)


def _number(after: int | None) -> int:
    return -1 if after is None else after
