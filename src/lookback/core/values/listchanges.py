"""Rows of table lists that were inserted or deleted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from lookback.core.values.columns import Mask, Values, from_values
from lookback.core.values.keys import Int64s
from lookback.core.values.types import STRING

# The expiry of a value that never expires.
FOREVER = 2**63 - 1
# The kind of rows whose values are ranges of addresses, such as 10.0.0.0/8.
CIDR = "cidr"


@dataclass(frozen=True)
class ListChange:
    """A row of table `lists` that was inserted or deleted, as its change feed reports it.

    An update is a delete of the row before it and an insert of the row after it. expires_at: in microseconds, None for never.
    kind: `cidr` for a range of addresses. A row whose list or value is None counts nowhere.
    """

    change: str
    commit: int
    list: str | None
    value: str | None
    expires_at: int | None = None
    kind: str | None = None


@dataclass(frozen=True)
class ListRows:
    """Rows of one list that were added or removed, as columns of shape (rows,).

    values: texts. until: when each expires, in microseconds, FOREVER for never. is_cidr: whether its row is of kind cidr. rows:
    how many such rows were added, or, if negative, removed; never 0.
    """

    values: Values
    until: Int64s
    is_cidr: Mask
    rows: Int64s

    @classmethod
    def by_list(cls, changes: Iterable[ListChange]) -> dict[str, ListRows]:
        """Groups the changes of rows by list. changes: with list and value, each."""
        by_list: dict[str, list[ListChange]] = {}
        for change in changes:
            by_list.setdefault(str(change.list), []).append(change)
        return {name: cls._of(listed) for name, listed in by_list.items()}

    @classmethod
    def _of(cls, changes: Sequence[ListChange]) -> ListRows:
        values = from_values(STRING, [each.value for each in changes]).values
        until = np.array([FOREVER if each.expires_at is None else each.expires_at for each in changes], dtype=np.int64)
        is_cidr = np.array([each.kind == CIDR for each in changes], dtype=bool)
        return cls(values, until, is_cidr, np.array([1 if each.change == "insert" else -1 for each in changes]))

    def __len__(self) -> int:
        return len(self.values)

    def take(self, index: npt.NDArray[Any]) -> ListRows:
        """Returns those at `index` (positions or a mask)."""
        return ListRows(self.values[index], self.until[index], self.is_cidr[index], self.rows[index])

    @classmethod
    def concat(cls, parts: Sequence[ListRows]) -> ListRows:
        """Joins one part or more."""
        return cls(*(np.concatenate([getattr(part, each.name) for part in parts]) for each in fields(cls)))
