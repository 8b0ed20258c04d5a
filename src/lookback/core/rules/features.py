"""Makes the parts of rules that need state, with names that are equal for equal parts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from lookback.core.aggregation.runs import Buckets
from lookback.core.expressions.aggregatecalls import AggregateCall
from lookback.core.expressions.compiling import Expression
from lookback.core.rules.compiled import Feature, digest
from lookback.core.values.times import NEVER_DUE
from lookback.core.values.windows import Lookback, TiledWindow, Window


def make_feature(kind: list[Any], where: Expression | None, call: AggregateCall, window: Window) -> Feature:
    """Makes the feature of an aggregate over windows.

    Args:
        kind: What its state is of: the stream, the key, the lateness, and the owner if no other rule shares it.
        where: The condition of the rule's events.
        call: The aggregate.
        window: The windows.
    """
    parts: Sequence[Expression | None] = (where, call.filter, call.argument)
    identity: list[Any] = [*kind, call.function, *([part.sql, str(part.type)] if part else None for part in parts)]
    stream, group_by, lateness, *owner = kind
    tiles, buckets = None, None
    if isinstance(window, TiledWindow):
        tiles = window
        identity += [tiles.size, tiles.slide, tiles.offset]
    elif isinstance(window, Lookback) and window.resolution:
        # The delay decides which buckets are closed, so rules with different delays cannot share combined rows.
        identity += ["resolution", window.resolution, window.delay]
        # Lists may have changed when an event is deleted, so its row must still exist to be taken out.
        is_single = any(part is not None and part.memberships for part in parts)
        buckets = Buckets(window.resolution, NEVER_DUE if is_single else window.delay + lateness, call.function)
    row_set = "" if owner or buckets else json.dumps(group_by)
    return Feature(
        stream=stream,
        group_by=group_by,
        function=call.function,
        allowed_lateness=lateness,
        where=where,
        filter=call.filter,
        argument=call.argument,
        tiles=tiles,
        buckets=buckets,
        feature_id=digest(identity),
        row_set=row_set,
    )
