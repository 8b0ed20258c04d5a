"""Events in columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, reduce
from itertools import pairwise
from operator import and_
from typing import Any

import numpy as np
import numpy.typing as npt

from lookback.core.expressions.compiling import Expression, Membership, add_memberships, recompile
from lookback.core.expressions.kernels import either_mask
from lookback.core.expressions.textsearch import TextSearch
from lookback.core.streams.alerts import sortable_id
from lookback.core.streams.declaration import Stream
from lookback.core.streams.unions import MEMBER
from lookback.core.values.cache import estimate_bytes
from lookback.core.values.columns import (
    Column,
    Mask,
    Values,
    concat_columns,
    find_beyond_calendar,
    from_values,
    normalize_zeros,
)
from lookback.core.values.keys import Int64s, Keys, encode_keys
from lookback.core.values.lists import Lists
from lookback.core.values.sortable import write_sortable
from lookback.core.values.types import DataType

# The maximum size of the cached values of expressions.
MAX_VALUE_BYTES = 128 * 2**20
# When sorting, commits are moved as a whole if they have at least this many rows on average.
_LONG_COMMIT_ROWS = 1_000


class Events:
    """Events of one stream as columns of equal length.

    columns: by field name. The id and time columns have no NULLs. commits: the commit version that added each event,
    shape (rows,). order: the names of the columns that order events with the same commit and time, before their ids do.
    member_field: the field that names the member of a union; empty for other streams.
    keys: the results of `find_keys` by grouping set. Rules share expressions, so the most recently used values of
    expressions are cached.
    """

    def __init__(
        self,
        columns: Mapping[str, Column],
        commits: Int64s,
        event_id: str,
        event_time: str,
        order: Sequence[str] = (),
        member_field: str = "",
    ) -> None:
        self.columns = columns
        self.commits = commits
        self.times: Int64s = columns[event_time].values
        self._id, self._time, self._order, self.member_field = event_id, event_time, tuple(order), member_field
        self._values: dict[str, Column] = {}
        self._cached_bytes = 0
        self.keys: dict[tuple[str, ...], Keys] = {}
        self._shards: dict[tuple[tuple[str, ...], int], Int64s] = {}
        self._candidates: Mapping[str, Int64s] = {}

    @classmethod
    def of(cls, columns: Mapping[str, Column], commits: Int64s, stream: Stream) -> Events:
        """Makes events of a stream. columns: include the stream's order columns."""
        member_field = "" if stream.union is None else MEMBER
        return cls(columns, commits, stream.event_id, stream.event_time, tuple(stream.order_columns), member_field)

    def __len__(self) -> int:
        return len(self.commits)

    def _replace(self, columns: Mapping[str, Column], commits: Int64s | None = None) -> Events:
        arrived = self.commits if commits is None else commits
        return Events(columns, arrived, self._id, self._time, self._order, self.member_field)

    def take(self, index: npt.NDArray[Any] | slice) -> Events:
        """Returns the events at `index` (positions, a mask or a slice)."""
        columns = {name: column.take(index) for name, column in self.columns.items()}
        taken = self._replace(columns, self.commits[index])
        # A batch is judged in parts. Computing the keys and shards of each part again took some 7 % of a shard's time.
        taken.keys = {group_by: keys.take(index) for group_by, keys in self.keys.items()}
        taken._shards = {known_as: shards[index] for known_as, shards in self._shards.items()}
        return taken

    def value(self, expression: Expression) -> Column:
        """Returns the expression's value for every event."""
        known = self._values.pop(expression.sql, None)
        column = expression.evaluate(self.columns, len(self)) if known is None else known
        self._values[expression.sql] = column
        if known is None:
            self._cached_bytes += estimate_bytes(column)
            while self._cached_bytes > MAX_VALUE_BYTES:
                self._cached_bytes -= estimate_bytes(self._values.pop(next(iter(self._values))))
        return column

    def search(self, search: TextSearch) -> None:
        """Finds the events for which the conditions of a search may hold, so that `test` evaluates no others."""
        self._candidates = search.find(self.columns)

    def test(self, condition: Expression) -> tuple[Mask, Mask | None]:
        """Marks the events for which a condition holds, and those with an error in it; None for none."""
        at = self._candidates.get(condition.sql)
        if at is None:
            column = self.value(condition)
            return column.is_true(), column.error
        holds = np.zeros(len(self), dtype=bool)
        if len(at):
            part = {name: self.columns[name].take(at) for name in condition.fields}
            holds[at] = condition.evaluate(part, len(at)).is_true()
        return holds, None

    def find_keys(self, group_by: tuple[str, ...]) -> Keys:
        """Returns the key of every event under a grouping set: fields, and canonical SQL of expressions over them."""
        if group_by not in self.keys:
            self.keys[group_by] = encode_keys([self.key_column(name) for name in group_by], len(self))
        return self.keys[group_by]

    def find_shards(self, group_by: tuple[str, ...], shards: int) -> Int64s:
        """Returns the shard of every event's key under a grouping set, 0 to shards - 1."""
        known_as = group_by, shards
        if known_as not in self._shards:
            self._shards[known_as] = self.find_keys(group_by).shard(shards)
        return self._shards[known_as]

    def key_column(self, name: str) -> Column:
        """Returns the values of a field, or of the expression with this canonical SQL; errors and NULLs are NULL."""
        if name in self.columns:
            return self.columns[name]
        return _settle_key(self.value(_compile_key_over(name, self.columns)))

    def look_up(self, memberships: Iterable[Membership], lists: Lists) -> Events:
        """Returns the same events with columns for calls of in_list as of each event's time (see `add_memberships`)."""
        new = [membership for membership in memberships if membership.name not in self.columns]
        if not new:
            return self
        columns = add_memberships(self.columns, new, self.times, lists)
        return self._replace(columns)

    def with_column(self, name: str, column: Column) -> Events:
        """Returns the same events with a column added or replaced."""
        return self._replace({**self.columns, name: column})

    def id_value(self, at: int) -> int | str:
        """Returns the id of one event: an integer or a text, depending on the declaration."""
        value: int | str = self.id_column.values.item(at)
        return value

    @property
    def id_column(self) -> Column:
        """The ids of all events."""
        return self.columns[self._id]

    def list_ids(self, positions: Int64s | slice) -> list[int | str]:
        """Returns the ids of some events."""
        return self.columns[self._id].to_stored_list(positions)

    def id_text(self, at: int) -> str:
        """Returns the id of one event as text."""
        return str(self.id_value(at))

    @cached_property
    def id_texts(self) -> list[str]:
        """The ids of all events as text."""
        return [str(value) for value in self.columns[self._id].to_stored_list()]

    def sort_text(self, at: int) -> str:
        """Returns a text that sorts one event among the events with the same commit and time."""
        return "".join(
            [*(write_sortable(self._read_ordered(name, at)) for name in self._order), sortable_id(self.id_value(at))]
        )

    def _read_ordered(self, name: str, at: int) -> Any:
        column = self.columns[name]
        return None if column.null is not None and column.null[at] else column.values[at]

    def in_order_of_arrival(self) -> Events:
        """Sorts the events by (commit, event time, order columns, event id). The sort is stable.

        In an order column NULL comes first. Strings are compared by code point, which is the order of their UTF-8 bytes.
        """
        if self._is_in_order():
            return self
        known: list[Int64s] = [self.commits, self.times]
        order = np.lexsort(known[::-1])
        for values in self._list_tie_breakers():
            at = _find_tied([each[order] for each in known])
            if not len(at):
                break
            rows, ranks = order[at], np.zeros(len(order), dtype=np.int64)
            # Comparing texts is slow, so only tied rows are ranked.
            ranks[rows] = np.unique(values[rows], return_inverse=True)[1].ravel()
            known.append(ranks)
            order[at] = rows[np.lexsort([each[rows] for each in reversed(known)])]
        return self.take(order)

    def _is_in_order(self) -> bool:
        """Returns whether the events are in order of arrival."""
        is_same = self.commits[1:] == self.commits[:-1]
        later, tied = self.times[1:] > self.times[:-1], self.times[1:] == self.times[:-1]
        if not ((self.commits[1:] > self.commits[:-1]) | (is_same & (later | tied))).all():
            return False
        at = np.flatnonzero(is_same & tied)
        for values in self._list_tie_breakers():
            first, second = values[at], values[at + 1]
            if (first > second).any():
                return False
            at = at[first == second]
        return True

    def _list_tie_breakers(self) -> Iterator[Values]:
        """Yields the values that order events with the same commit and time, the most significant first."""
        for name in self._order:
            column = self.columns[name]
            if column.null is not None:
                yield ~column.null
                values = column.values.copy()
                values[column.null] = "" if column.type.name == "string" else 0
                yield values
            else:
                yield column.values
        yield self.columns[self._id].values

    @classmethod
    def concat_arrived(cls, parts: Sequence[Events], stream: Stream) -> Events:
        """Concatenates events as `concat` does, and sorts them in order of arrival (see `in_order_of_arrival`)."""
        # Tables are mostly written in order, so it is enough to move long commits as a whole.
        pieces = [piece for part in parts for piece in part._split_long_commits() if len(piece)]
        pieces.sort(key=lambda piece: (piece.commits[0], piece.times[0]))
        return cls.concat(pieces or parts[:1], stream).in_order_of_arrival()

    def _split_long_commits(self) -> list[Events]:
        """Splits the events into runs of one commit each; returns them in one piece if the runs are short."""
        edges = find_commit_edges(self.commits)
        if len(self) < _LONG_COMMIT_ROWS * (len(edges) - 1):
            return [self]
        return [self.take(slice(low, high)) for low, high in pairwise(edges)]

    @classmethod
    def concat(cls, parts: Sequence[Events], stream: Stream) -> Events:
        """Joins events as `join` does. Without parts: no rows, but all fields."""
        return cls.join(parts) if parts else empty_events(stream, stream.fields)

    @classmethod
    def join(cls, parts: Sequence[Events]) -> Events:
        """Joins events of one stream, at least one part, keeping only the columns that all parts have."""
        if len(parts) == 1:
            return parts[0]
        common = [name for name in parts[0].columns if all(name in part.columns for part in parts)]
        columns = {name: concat_columns([part.columns[name] for part in parts]) for name in common}
        return parts[0]._replace(columns, np.concatenate([part.commits for part in parts]))


def evaluate_key(sql: str, columns: Mapping[str, Column], rows: int) -> Column:
    """Evaluates the canonical SQL of an entry of a key as `Events.key_column` does."""
    return _settle_key(_compile_key_over(sql, columns).evaluate(columns, rows))


def _settle_key(column: Column) -> Column:
    unknown = either_mask(column.error, find_beyond_calendar(column))
    # As in fields, there is only one zero.
    return normalize_zeros(replace(column, null=either_mask(column.null, unknown), error=None))


def _compile_key_over(sql: str, columns: Mapping[str, Column]) -> Expression:
    return compile_key(sql, tuple((name, columns[name].type) for name in sorted(columns)))


# Each batch asks again.
@lru_cache(maxsize=1_000)
def compile_key(sql: str, fields: tuple[tuple[str, DataType], ...]) -> Expression:
    """Compiles the canonical SQL of an entry of a key over fields with their types."""
    return recompile(sql, dict(fields))


def _find_tied(keys: Sequence[Int64s]) -> Int64s:
    """Finds rows that equal a neighbour in all `keys`. The rows are sorted by these keys."""
    is_same = reduce(and_, (key[1:] == key[:-1] for key in keys))
    tied: Int64s = np.flatnonzero(np.append(is_same, False) | np.append(False, is_same))
    return tied


def find_commit_edges(commits: Int64s) -> list[int]:
    """Finds where runs of rows of one commit begin, starting with 0, and where the last run ends."""
    return [0, *(np.flatnonzero(commits[1:] != commits[:-1]) + 1).tolist(), len(commits)]


def empty_events(stream: Stream, fields: Iterable[str]) -> Events:
    """Makes events without rows, with columns for `fields`, the id, the time and the order columns."""
    columns = {name: from_values(stream.columns_of_events[name], []) for name in {*stream.key_columns, *fields}}
    return Events.of(columns, np.zeros(0, dtype=np.int64), stream)
