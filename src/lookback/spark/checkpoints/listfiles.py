"""Stores the lists after each commit of the table `lists` as parcels, written by the driver and read by shards.

    <commit>.index                the pieces of every list after the commit
    <commit>.<n>.<id>.changes     the changes of a list by the commit
    <commit>.<n>.<id>.snapshot    the whole list after the commit

A list consists of its last snapshot and the changes since. A commit adds one piece for each list that it changes, and
one index. Too many changes are replaced by a snapshot. So a new worker reads few pieces, and a commit that adds values
writes at most a small multiple of them. A commit that removes values writes a snapshot without them: once the earlier
files are removed, no file contains the values.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from lookback.core.errors import StoreFailed
from lookback.core.values.cache import RecentCache
from lookback.core.values.listchanges import CIDR, FOREVER, ListRows
from lookback.core.values.lists import Lists
from lookback.spark.checkpoints.checkpoint import Checkpoint
from lookback.spark.checkpoints.parcels import Parcels

_INDEX, _CHANGES, _SNAPSHOT = "index", "changes", "snapshot"
_FLOOR, _ANNOUNCED = "floor", "announced"
# A snapshot replaces more than 64 pieces of changes, or more changed rows than both 10,000 and a quarter of the list.
_MAX_PIECES, _MIN_ROWS = 64, 10_000
# A process caches this many lists, each as of the last commit read: enough for the rules of a few streams.
_MAX_CACHED = 1_000


class ListPiece(NamedTuple):
    """A parcel of one list, with its number of rows: of the snapshot, or of the changes."""

    name: str
    rows: int

    @property
    def is_snapshot(self) -> bool:
        """Whether it contains the whole list."""
        return self.name.endswith(_SNAPSHOT)


@dataclass(frozen=True)
class ListFiles:
    """The lists in one folder; a `ListSource` of the core."""

    parcels: Parcels

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> ListFiles:
        """Returns the lists of a checkpoint."""
        return cls(checkpoint.parcels("lists"))

    def read(self, commit: int | None, names: frozenset[str]) -> Lists:
        """Returns the named lists after a commit; missing lists are empty. Raises StoreFailed for a lost file."""
        if commit is None or not names:
            return Lists.empty() if commit is None else Lists(commit)
        chains = self._read_index(commit)
        known = sorted(names & chains.keys())
        return Lists.join(
            [self._read_list(name, chains[name], _KEPT.get((self.parcels.folder, name), _Kept)) for name in known],
            commit,
        )

    def knows(self, commit: int) -> bool:
        """Returns whether the driver has written the lists for a commit."""
        return self.parcels.has(_name_index(commit))

    def list_commits(self) -> list[int]:
        """Lists the commits whose lists can be read, ascending."""
        return [int(name.partition(".")[0]) for name in self.parcels.list() if name.endswith(f".{_INDEX}")]

    def find_damaged(self, commits: Iterable[int]) -> list[int]:
        """Finds the commits whose lists are unreadable because files are lost or damaged."""
        there = set(self.parcels.list())

        def is_whole(commit: int) -> bool:
            try:
                return {piece.name for chain in self._read_index(commit).values() for piece in chain} <= there
            except StoreFailed:
                return False

        return [commit for commit in commits if not is_whole(commit)]

    def begin(self, commits: Iterable[int], contents: Lists) -> None:
        """Writes the same lists for each of these commits, regardless of earlier ones."""
        names = enumerate(sorted(contents.names))
        commits = sorted(commits)
        chains = {name: [self._write_snapshot(commits[0], at, contents.select([name]))] for at, name in names}
        for commit in commits:
            self._write_index(commit, chains)

    def add(self, before: int | None, commit: int, changes: Mapping[str, ListRows]) -> None:
        """Writes the lists after a commit.

        Args:
            before: The commit with the last index; None before the first.
            commit: The commit.
            changes: The changes of each list since `before`.
        """
        chains = {} if before is None else self._read_index(before)
        for at, (name, rows) in enumerate(sorted(changes.items())):
            chains[name] = self._extend(name, chains.get(name, []), commit, at, rows)
        self._write_index(commit, chains)

    def drop_before(self, commit: int) -> None:
        """Removes the files that only earlier commits need."""
        kept = [each for each in self.list_commits() if each >= commit]
        if not kept:
            return
        self.parcels.write(_FLOOR, json.dumps(kept[0]).encode())
        needed = {piece.name for each in kept for chain in self._read_index(each).values() for piece in chain}
        needed |= {_name_index(each) for each in kept} | {_FLOOR, _ANNOUNCED}
        # Indexes first: one without its pieces would be damaged.
        for name in sorted(self.parcels.list(), key=lambda name: not name.endswith(f".{_INDEX}")):
            if name not in needed:
                self.parcels.remove(name)

    def read_floor(self) -> int:
        """Returns the first commit kept when older ones were removed; -1 if none were removed."""
        return int(json.loads(self.parcels.read(_FLOOR))) if _FLOOR in self.parcels.list() else -1

    def note_announced(self, versions: Mapping[int, int]) -> None:
        """Stores for each commit the rules version that announced it. If this is lost, files are kept longer."""
        self.parcels.write(_ANNOUNCED, json.dumps(sorted(versions.items())).encode())

    def read_announced(self) -> dict[int, int]:
        """Returns what `note_announced` stored; empty if that is lost."""
        try:
            return {int(commit): int(version) for commit, version in json.loads(self.parcels.read(_ANNOUNCED))}
        except (StoreFailed, ValueError, TypeError):
            return {}

    def _extend(self, name: str, chain: Sequence[ListPiece], commit: int, at: int, rows: ListRows) -> list[ListPiece]:
        piece = ListPiece(_name_piece(commit, at, _CHANGES), int(abs(rows.rows).sum()))
        extended = [*chain, piece]
        waiting = [each.rows for each in extended if not each.is_snapshot]
        whole = sum(each.rows for each in extended if each.is_snapshot)
        has_removals = bool((rows.rows < 0).any())
        if not has_removals and len(waiting) <= _MAX_PIECES and sum(waiting) <= max(_MIN_ROWS, whole // 4):
            self.parcels.write(piece.name, pack_rows(rows))
            return extended
        before = self._read_list(name, chain, _Kept())
        return [self._write_snapshot(commit, at, before.change({name: rows}, commit))]

    def _write_snapshot(self, commit: int, at: int, contents: Lists) -> ListPiece:
        piece = ListPiece(_name_piece(commit, at, _SNAPSHOT), contents.count)
        self.parcels.write(piece.name, contents.to_bytes())
        return piece

    def _read_list(self, name: str, chain: Sequence[ListPiece], kept: _Kept) -> Lists:
        """Reads a list from its pieces, starting from the contents in `kept`, which it updates."""
        names = tuple(piece.name for piece in chain)
        if kept.pieces != names:
            done = len(kept.pieces) if kept.pieces == names[: len(kept.pieces)] else 0
            contents, changes = kept.contents if done else Lists.empty(), list[ListRows]()
            for piece in chain[done:]:
                if piece.is_snapshot:
                    contents, changes = Lists.from_bytes(self.parcels.read(piece.name), piece.name), []
                else:
                    changes.append(unpack_rows(self.parcels.read(piece.name), piece.name))
            kept.contents = contents.change({name: ListRows.concat(changes)}) if changes else contents
            kept.pieces = names
        return kept.contents

    def _read_index(self, commit: int) -> dict[str, list[ListPiece]]:
        name = _name_index(commit)
        parsed = _parse(name, self.parcels.read(name))
        try:
            return {
                str(each): [ListPiece(str(piece), int(rows)) for piece, rows in chain] for each, chain in parsed.items()
            }
        except (ValueError, TypeError, AttributeError) as error:
            raise _make_damaged_error(name, error) from error

    def _write_index(self, commit: int, chains: Mapping[str, Sequence[ListPiece]]) -> None:
        self.parcels.write(_name_index(commit), json.dumps(chains, separators=(",", ":")).encode())


@dataclass
class _Kept:
    """The cached contents of a list, and the pieces that they were read from."""

    pieces: tuple[str, ...] = ()
    contents: Lists = field(default_factory=Lists.empty)


# Shared by all shards of a process.
_KEPT: RecentCache[_Kept] = RecentCache(_MAX_CACHED)


def pack_rows(rows: ListRows) -> bytes:
    """Encodes the changed rows of one list."""
    columns = rows.values.tolist(), rows.until.tolist(), rows.is_cidr.tolist(), rows.rows.tolist()
    packed = [
        [value, None if until == FOREVER else until, CIDR if is_cidr else None, number]
        for value, until, is_cidr, number in zip(*columns, strict=True)
    ]
    return json.dumps(packed, separators=(",", ":")).encode()


def unpack_rows(content: bytes, place: str) -> ListRows:
    """Decodes what `pack_rows` returned. Errors about damage name `place`."""
    values, until, kinds, numbers = zip(*_parse(place, content), strict=True)
    return ListRows(
        np.array(values, dtype=object),
        np.array([FOREVER if each is None else each for each in until], dtype=np.int64),
        np.array([kind == CIDR for kind in kinds], dtype=bool),
        np.array(numbers, dtype=np.int64),
    )


def _name_commit(commit: int) -> str:
    return f"{commit:020}"


def _name_piece(commit: int, at: int, kind: str) -> str:
    # The unique name keeps cached contents valid after a rebuild.
    return f"{_name_commit(commit)}.{at}.{uuid.uuid4().hex[:12]}.{kind}"


def _name_index(commit: int) -> str:
    return f"{_name_commit(commit)}.{_INDEX}"


def _parse(name: str, content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError as error:
        raise _make_damaged_error(name, error) from error


def _make_damaged_error(name: str, error: Exception) -> StoreFailed:
    return StoreFailed(f"{name} of the lists is damaged ({error}); start the evaluation again, which rebuilds it")
