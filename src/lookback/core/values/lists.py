"""Lists of values, such as known terminals, as they are after a commit of table `lists`; `in_list` asks them.

A value takes 24 bytes of memory: two halves of a hash, as in grouping keys, and when it expires. Asking
takes a binary search, what events ask often is remembered, and applying a few changes copies no list.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isqrt
from typing import Protocol

import numpy as np
from pandas import Index

from lookback.core.errors import StateError
from lookback.core.values.addresses import ADDRESS_BITS, name_network, read_address, read_network
from lookback.core.values.cache import SHARED_CACHE, estimate_bytes
from lookback.core.values.columns import Column, Values, concat_columns, from_values
from lookback.core.values.keys import Int64s, Keys, encode_keys, number_values
from lookback.core.values.listchanges import ListChange, ListRows
from lookback.core.values.pages import decode_page, encode_page
from lookback.core.values.types import STRING

# The expiry of a text that is not in the list.
_NO_VALUE = -(2**63)
_FORMAT = 1
# A few changes are kept beside the sorted values until there are more than this, and than a multiple of the root of their number.
_MIN_CHANGED = 1_000
_CHANGED_BY_ROOT = 16
# A process keeps at most this many answers per list and field, and adds new values only if they are at least
# one in _MIN_SHARE of the known ones.
_MAX_ANSWERS, _MIN_SHARE = 250_000, 8
# The texts of values, those of rows of kind cidr, and the ranges of addresses.
_TABLES = 3
_RANGE = re.compile(r"[0-9a-fA-F:.]+/[0-9.]+")
# The halves of a value's hash.
_Hash = tuple[int, int]
# The version of an address, and how many of its leading bits a range names.
_Prefix = tuple[int, int]


@dataclass(frozen=True)
class _Values:
    """A multiset of (hash, expiry): a value may have several rows, and is a member until the latest of their expiries.

    low, high, until: of each row, shape (rows,), sorted by `low`; rows of one hash are neighbours, and ascend by `until`.
    changed: in place of these, the expiries of the hashes that changed since; ascending, empty where no row is left.
    """

    low: Int64s
    high: Int64s
    until: Int64s
    changed: Mapping[_Hash, tuple[int, ...]] = field(default_factory=dict)
    count: int = 0

    @classmethod
    def of(cls, low: Int64s, high: Int64s, until: Int64s) -> _Values:
        order = np.argsort(low)
        in_order = low[order]
        # Few rows share a value, or the low half of a hash.
        if bool((in_order[1:] == in_order[:-1]).any()):
            order = np.lexsort((until, high, low))
        return cls(low[order], high[order], until[order], count=len(low))

    def find_until(self, keys: Keys) -> Int64s:
        """Finds per hash when it expires; _NO_VALUE for one that is not there."""
        found = np.full(len(keys), _NO_VALUE, dtype=np.int64)
        if len(self.low) and len(keys):
            # In order each search begins where the one before ended, in memory that is at hand.
            order = np.argsort(keys.low)
            low, high = keys.low[order], keys.high[order]
            at = np.searchsorted(self.low, low, side="right") - 1
            is_low = (at >= 0) & (self.low[at] == low)
            is_same = is_low & (self.high[at] == high)
            found[order[is_same]] = self.until[at[is_same]]
            for row in order[is_low & ~is_same].tolist():  # two hashes share their low half: almost never
                found[row] = max(self._list_stored(keys.pair(row)), default=_NO_VALUE)
        if self.changed:
            low, until_by_hash = self._changed_low, self.changed
            for row in np.flatnonzero(np.isin(keys.low, low)) if len(keys) else ():
                expiries = until_by_hash.get(keys.pair(int(row)))
                if expiries is not None:
                    found[row] = expiries[-1] if expiries else _NO_VALUE
        return found

    @cached_property
    def _changed_low(self) -> Int64s:
        return np.array([low for low, _ in self.changed], dtype=np.int64)

    def _list_stored(self, hashed: _Hash) -> list[int]:
        """Lists the expiries of a hash among the sorted rows."""
        first, end = (int(np.searchsorted(self.low, hashed[0], side=side)) for side in ("left", "right"))
        return [int(self.until[at]) for at in range(first, end) if int(self.high[at]) == hashed[1]]

    def change(self, net: Mapping[tuple[_Hash, int], int]) -> _Values:
        """Adds and removes rows. net: per hash and expiry how many are added, less those removed."""
        changed, count = dict(self.changed), self.count
        by_hash: dict[_Hash, Counter[int]] = {}
        for (hashed, until), number in net.items():
            by_hash.setdefault(hashed, Counter())[until] += number
        for hashed, numbers in by_hash.items():
            before = changed[hashed] if hashed in changed else self._list_stored(hashed)
            rows = Counter(before)
            rows.update(numbers)
            after = tuple(sorted(rows.elements()))
            changed[hashed] = after
            count += len(after) - len(before)
        result = replace(self, changed=changed, count=count)
        most = max(_MIN_CHANGED, _CHANGED_BY_ROOT * isqrt(len(self.low)))
        return result.merge() if len(changed) > most else result

    def add_all(self, keys: Keys, until: Int64s) -> _Values:
        """Adds many rows at once."""
        plain = self.merge()
        return _Values.of(
            np.concatenate([plain.low, keys.low]),
            np.concatenate([plain.high, keys.high]),
            np.concatenate([plain.until, until]),
        )

    def merge(self) -> _Values:
        """Returns the same rows, all of them sorted."""
        if not self.changed:
            return self
        stays = ~np.isin(self.low, self._changed_low)
        for at in np.flatnonzero(~stays):
            stays[at] = (int(self.low[at]), int(self.high[at])) not in self.changed
        rows = [(*hashed, until) for hashed, listed in sorted(self.changed.items()) for until in listed]
        new = np.array(rows, dtype=np.int64).reshape(-1, 3)
        low = np.concatenate([self.low[stays], new[:, 0]])
        # Stable, and of two sorted runs: this merges them.
        order = np.argsort(low, kind="stable")
        high, until = np.concatenate([self.high[stays], new[:, 1]]), np.concatenate([self.until[stays], new[:, 2]])
        return _Values(low[order], high[order], until[order], count=len(low))


_NOTHING = np.zeros(0, dtype=np.int64)
_NONE = _Values(_NOTHING, _NOTHING, _NOTHING)


class Answers:
    """Remembers until when texts are on a list, by the value of the field that each text is made of.

    Values repeat, and to find one takes less time than to make its text and look that up.
    """

    def __init__(self) -> None:
        # The values, and what was found for NULL and for each of them.
        self._known: tuple[Index, Column] | None = None
        self._bytes = 0

    def evict(self) -> None:
        """Forgets them."""
        self._known, self._bytes = None, 0

    def find(self, column: Column, ask: Callable[[Column], Column]) -> Column:
        """Returns for each row of a field what `ask` returns for its value.

        ask: is given values that differ, each once as long as it is remembered. column: of integers, booleans or texts, with
        one row or more and no error.
        """
        if self._known is None:
            nothing = Column(column.type, column.values[:1], np.ones(1, dtype=bool))
            self._known = Index(column.values[:0], dtype=column.values.dtype), ask(nothing)
        index, found = self._known
        is_known = slice(None) if column.null is None else ~column.null
        values = column.values[is_known]
        at = index.get_indexer(Index(values, dtype=index.dtype)) + 1
        is_new = at == 0
        if is_new.any():
            codes, new = number_values(values[is_new])
            at[is_new] = codes + len(found)
            found = concat_columns([found, ask(Column(column.type, new))])
            self._remember(index, found, new)
        SHARED_CACHE.hold(self, self._bytes)
        rows = np.zeros(len(column), dtype=np.int64)
        rows[is_known] = at
        return found.take(rows)

    def _remember(self, index: Index, found: Column, new: Values) -> None:
        # To make the index again for a few costs more than to ask about them again.
        if len(new) * _MIN_SHARE < len(index):
            return
        if len(index) + len(new) > _MAX_ANSWERS:
            self.evict()
            return
        values = np.concatenate([index.to_numpy(), new])
        self._known = Index(values, dtype=index.dtype), found
        # The index has a table of twice their size.
        self._bytes = 3 * estimate_bytes(values) + estimate_bytes(found)


@dataclass(frozen=True)
class _List:
    """One list. texts: values compared as texts; ranged: those of rows of kind cidr, which make the list one of ranges.

    ranges: the values that are ranges, by their network. prefixes: the lengths of their prefixes, and perhaps of some that are
    gone. answers: what was found of the texts of a field, by what tells these texts.
    """

    texts: _Values = _NONE
    ranged: _Values = _NONE
    ranges: _Values = _NONE
    prefixes: frozenset[_Prefix] = frozenset()
    answers: dict[Hashable, Answers] = field(default_factory=dict, compare=False)

    @property
    def count(self) -> int:
        return self.texts.count + self.ranged.count

    @property
    def tables(self) -> tuple[_Values, ...]:
        return self.texts, self.ranged, self.ranges

    def find_until(self, keys: Keys, texts: Values) -> Int64s:
        """Finds per text when its membership ends. keys: the hashes of the texts."""
        until = self.texts.find_until(keys)
        if self.ranged.count:
            until = np.maximum(until, self.ranged.find_until(keys))
            until = np.maximum(until, self._find_in_ranges(texts))
        return until

    def _find_in_ranges(self, texts: Values) -> Int64s:
        until = np.full(len(texts), _NO_VALUE, dtype=np.int64)
        addresses = [read_address(text) if isinstance(text, str) else {} for text in texts.tolist()]
        for version, length in self.prefixes:
            at = [row for row, numbers in enumerate(addresses) if version in numbers]
            if at:
                shift = ADDRESS_BITS[version] - length
                networks = [name_network(version, addresses[row][version] >> shift << shift, length) for row in at]
                keys = encode_keys([from_values(STRING, networks)], len(networks))
                until[at] = np.maximum(until[at], self.ranges.find_until(keys))
        return until


@dataclass(frozen=True)
class Lists:
    """The contents of lists after a commit of table `lists`. commit: None before the first one that was read."""

    commit: int | None = None
    _lists: Mapping[str, _List] = field(default_factory=dict)

    @classmethod
    def empty(cls) -> Lists:
        """Returns no list at all."""
        return cls()

    @property
    def names(self) -> frozenset[str]:
        """The names of the lists that have values."""
        return frozenset(name for name, each in self._lists.items() if each.count)

    @property
    def count(self) -> int:
        """The number of rows of all lists."""
        return sum(each.count for each in self._lists.values())

    @property
    def counts(self) -> dict[str, int]:
        """The number of rows of each list that has any, by name."""
        return {name: each.count for name, each in sorted(self._lists.items()) if each.count}

    @classmethod
    def join(cls, parts: Iterable[Lists], commit: int | None) -> Lists:
        """Joins lists of different names, as they are after a commit."""
        return cls(commit, {name: each for part in parts for name, each in part._lists.items()})

    def select(self, names: Collection[str]) -> Lists:
        """Returns these lists alone."""
        return Lists(self.commit, {name: each for name, each in self._lists.items() if name in names})

    def apply(self, changes: Iterable[ListChange], commit: int | None = None) -> Lists:
        """Returns the lists after changes. commit: the last one that was read, if it has none of the changes."""
        known = [each for each in changes if each.list is not None and each.value is not None]
        commits = [each.commit for each in known] + ([] if commit is None else [commit])
        return self.change(ListRows.by_list(known), max(commits, default=None))

    def change(self, rows: Mapping[str, ListRows], commit: int | None = None) -> Lists:
        """Returns the lists after rows were added and removed, by list. commit: the last one that was read.

        Takes time by the number of rows. To remove a row that is not there changes nothing.
        """
        commits = [each for each in (self.commit, commit) if each is not None]
        changed = {name: _change_list(self._lists.get(name, _List()), listed) for name, listed in rows.items()}
        return Lists(max(commits, default=None), {**self._lists, **changed})

    def find_until(self, name: str, texts: Column) -> Int64s:
        """Finds per text when it ceases to be a value of a list, in microseconds: no time is before that of one that is none.

        texts: of type string; what is found for a NULL means nothing. Of a list of kind cidr an address in one of its ranges
        is a value too. A list that is not there has no values.
        """
        if name not in self._lists or not len(texts):
            return np.full(len(texts), _NO_VALUE, dtype=np.int64)
        return self._lists[name].find_until(encode_keys([texts], len(texts), has_repeats=False), texts.values)

    def recall(self, name: str, key: Hashable) -> Answers:
        """Returns what a list answered since it changed last. key: tells what texts it was asked for."""
        return self._lists[name].answers.setdefault(key, Answers()) if name in self._lists else Answers()

    def to_bytes(self) -> bytes:
        """Returns the lists as a page."""
        lists = [(name, each) for name, each in sorted(self._lists.items()) if each.count]
        tables = [table.merge() for _, each in lists for table in each.tables]
        prefixes = [sorted(each.prefixes) for _, each in lists]
        head = [_FORMAT, self.commit is not None, self.commit or 0]
        arrays = [
            np.array(head, dtype=np.int64),
            np.array([name for name, _ in lists], dtype=object),
            np.array([len(table.low) for table in tables], dtype=np.int64),
            *(_concat([getattr(table, column) for table in tables]) for column in ("low", "high", "until")),
            np.array([len(each) for each in prefixes], dtype=np.int64),
            np.array([number for each in prefixes for prefix in each for number in prefix], dtype=np.int64),
        ]
        return encode_page(list(arrays))

    @classmethod
    def from_bytes(cls, page: bytes, place: str = "lists") -> Lists:
        """Reads what `to_bytes` wrote. Raises StateError, naming `place` and the remedy, for anything else."""
        arrays = decode_page(page, place)
        try:
            return cls._from_arrays([_require_integers(array, at) for at, array in enumerate(arrays)], place)
        except (ValueError, TypeError, IndexError) as error:
            raise StateError(
                f"{place}: a page of lists is damaged ({error}); start with a new checkpoint, the tables have it all"
            ) from error

    @classmethod
    def _from_arrays(cls, arrays: Sequence[Values], place: str) -> Lists:
        head, names, rows, low, high, until, prefix_counts, prefixes = arrays
        version, has_commit, commit = (int(each) for each in head)
        if version != _FORMAT:
            raise StateError(
                f"{place}: the lists have layout version {version}, this release reads version {_FORMAT}; "
                "go on with the release that wrote them, or start with a new checkpoint"
            )
        if len(rows) != _TABLES * len(names) or len(prefix_counts) != len(names):
            raise ValueError("lengths contradict each other")
        for counts, columns in ((rows, [low, high, until]), (prefix_counts, [prefixes[::2], prefixes[1::2]])):
            # Before they are added up: sums of large numbers may be any number.
            is_whole = not len(counts) or 0 <= counts.min() <= counts.max() <= len(columns[0])
            if not is_whole or any(len(column) != counts.sum() for column in columns):
                raise ValueError("lengths contradict each other")
        ends, prefix_ends = np.cumsum(rows), np.cumsum(prefix_counts)
        pairs = [(int(each[0]), int(each[1])) for each in prefixes.reshape(-1, 2)]
        if not all(0 <= length <= ADDRESS_BITS.get(kind, -1) for kind, length in pairs):
            raise ValueError("a range of addresses has no such prefix")

        def cut(at: int) -> _Values:
            part = slice(int(ends[at] - rows[at]), int(ends[at]))
            if (low[part][1:] < low[part][:-1]).any():
                raise ValueError("values are not sorted")
            return _Values(low[part], high[part], until[part], count=int(rows[at]))

        lists = {}
        for at, name in enumerate(names.tolist()):
            texts, ranged, ranges = (cut(_TABLES * at + table) for table in range(_TABLES))
            own = pairs[int(prefix_ends[at] - prefix_counts[at]) : int(prefix_ends[at])]
            lists[str(name)] = _List(texts, ranged, ranges, frozenset(own))
        return cls(commit if has_commit else None, lists)


class ListSource(Protocol):
    """Gives an evaluator the contents of lists."""

    def read(self, commit: int | None, names: frozenset[str]) -> Lists:
        """Returns these lists as they are after a commit of table `lists`; None: before the first one, so they are empty."""
        ...

    def knows(self, commit: int) -> bool:
        """Returns whether the lists after a commit can be read."""
        ...


@dataclass(frozen=True)
class KnownLists:
    """The contents of lists by commit, in memory."""

    versions: dict[int, Lists] = field(default_factory=dict)

    def read(self, commit: int | None, names: frozenset[str] | None) -> Lists:
        """Returns these lists after a commit, all if None. Raises StateError for a commit that is not known."""
        if commit is None:
            return Lists.empty()
        if commit not in self.versions:
            raise StateError(f"lists: commit {commit} is not known; give the evaluator the lists of that commit")
        return self.versions[commit] if names is None else self.versions[commit].select(names)

    def knows(self, commit: int) -> bool:
        """Returns whether a commit is one of them."""
        return commit in self.versions


def _change_list(before: _List, rows: ListRows) -> _List:
    """Returns a list after changes of its rows."""
    # Ranges are known before a row of kind cidr makes the list one of ranges.
    may_be_range = rows.is_cidr
    # Of a million values one text is searched sooner than each by a pattern.
    if "/" in "".join(rows.values):
        may_be_range = may_be_range | [_RANGE.fullmatch(value) is not None for value in rows.values]
    candidates = np.flatnonzero(may_be_range).tolist()
    networks = {at: network for at in candidates if (network := read_network(rows.values[at])) is not None}
    ranges = rows.take(np.array(list(networks), dtype=np.int64))
    ranges.values[:] = [name_network(*network) for network in networks.values()]
    return _List(
        _change_values(before.texts, rows.take(~rows.is_cidr)),
        _change_values(before.ranged, rows.take(rows.is_cidr)),
        _change_values(before.ranges, ranges),
        before.prefixes | {(version, length) for version, _, length in networks.values()},
    )


def _change_values(before: _Values, rows: ListRows) -> _Values:
    if not len(rows):
        return before
    keys = encode_keys([Column(STRING, rows.values)], len(rows), has_repeats=False)
    if rows.rows.min() > 0 and rows.rows.sum() > max(_MIN_CHANGED, before.count // 4):
        each = np.repeat(np.arange(len(rows)), rows.rows)
        return before.add_all(keys.take(each), rows.until[each])
    net = Counter[tuple[_Hash, int]]()
    for hashed, until, number in zip(keys.list_pairs(), rows.until.tolist(), rows.rows.tolist(), strict=True):
        net[hashed, until] += number
    return before.change(net)


def _concat(arrays: Sequence[Int64s]) -> Int64s:
    return np.concatenate(arrays) if arrays else _NOTHING


def _require_integers(array: Values | None, at: int) -> Values:
    """Returns an array of a page: the names of lists, which are the second, or integers."""
    if array is None:
        raise ValueError("an array is missing")
    is_text = array.dtype == np.dtype(object) and all(isinstance(each, str) for each in array)
    if not (is_text if at == 1 else array.dtype == np.dtype(np.int64)):
        raise ValueError("an array is of another type")
    return array
