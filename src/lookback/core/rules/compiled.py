"""Rules bound to their streams: their expressions, measures and steps, and the state that they need."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from decimal import ROUND_HALF_UP, Context, Decimal
from functools import cached_property
from typing import Any

from lookback.core.aggregation.aggregate import Aggregate
from lookback.core.aggregation.aggregates import PERCENTILE, RANKING, find_aggregate
from lookback.core.aggregation.runs import Buckets
from lookback.core.expressions.compiling import Expression, Membership, find_rising
from lookback.core.rules.document import Rule
from lookback.core.rules.keys import KeyPart
from lookback.core.values.columns import to_text
from lookback.core.values.types import DataType
from lookback.core.values.windows import SESSION, SLIDING, TUMBLING, Lookback, Step, TiledWindow, Window

# A name in braces in a message.
PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
WINDOW_COMPLETE = "window_complete"
COUNT = "count"
# Aggregates that never fall as rows are added, in the order in which one may bound the next over the same rows.
_RISING = ("count", "sum", "max", "count_distinct")
# A decimal with at most this many digits can be compared with any number without an overflow.
_MAX_COMPARABLE_DIGITS = 18
_DIGITS = re.compile(r"(\d+)")
# Prefixes of the tables of judged events (for late: revise), of keys with open windows, and of judged windows.
JUDGED = "judged-"
OPEN_KEYS = "open-"
# Versions in this lane or a higher one are waiting for the history of their windows, and share no state.
WARMING_LANE = 2
_MEMORY_PREFIXES = {TUMBLING: "windows-", SLIDING: "windows-", SESSION: "sessions-"}
# Enough digits for any value in a message.
_WIDE_CONTEXT = Context(prec=400)


@dataclass(frozen=True)
class Feature:
    """The part of a rule that needs state. Rules with equal features share one state."""

    stream: str
    group_by: tuple[str, ...]  # columns of keys (see `KeyPart`) in ascending order
    function: str
    allowed_lateness: int  # microseconds
    where: Expression | None = field(default=None, compare=False)  # with `filter`, the condition of the events to keep
    filter: Expression | None = field(default=None, compare=False)
    argument: Expression | None = field(default=None, compare=False)  # the value to keep of each event
    tiles: TiledWindow | None = None  # the windows that decide whether an event is too late; None: its own time decides
    buckets: Buckets | None = None  # how rows are combined, if the windows have a resolution
    feature_id: str = ""
    row_set: str = ""  # the rows shared with other features of the grouping; "": its own, which are combined or emptied

    @property
    def aggregate(self) -> Aggregate:
        """The feature's aggregate function."""
        return find_aggregate(self.function)

    @cached_property
    def memberships(self) -> tuple[Membership, ...]:
        """The calls of in_list in the feature's expressions, inner ones first."""
        return _list_memberships((self.where, self.filter, self.argument))

    @property
    def argument_type(self) -> DataType | None:
        """The type of the aggregate's argument; None for count(*)."""
        return None if self.argument is None else self.argument.type

    @property
    def is_rising(self) -> bool:
        """True if the aggregate never falls as rows are added; for a sum, while no value is negative."""
        if self.function == "max":
            type_ = self.argument_type
            return type_ is not None and (
                type_.is_integer or (type_.is_decimal and type_.precision <= _MAX_COMPARABLE_DIGITS)
            )
        return self.buckets is None and self.function in _RISING

    @property
    def is_in_units(self) -> bool:
        """True if the result has the unit of the argument, but may have more digits."""
        return self.function.startswith(("avg", "stddev", "median", PERCENTILE))

    @property
    def is_safe(self) -> bool:
        """True if the aggregate cannot fail, whatever the rows."""
        type_ = self.argument_type
        if self.function == "avg":
            return type_ is not None and (not type_.is_decimal or type_.precision + 4 <= 38)
        if self.function in ("min", "max", "first", "last", "mode", "collect_set"):
            return type_ is not None and type_.name not in ("timestamp", "date")
        return self.function != "sum" and not self.function.startswith(tuple(RANKING))


@dataclass(frozen=True)
class CompiledMeasure:
    """A measure bound to its stream: the aggregate of `feature` over `window`, of type `type`."""

    name: str
    feature: Feature
    window: Window
    type: DataType

    @property
    def argument_fields(self) -> frozenset[str]:
        """The fields of the event that the argument reads."""
        return frozenset() if self.feature.argument is None else self.feature.argument.named

    def format_value(self, value: Any) -> str | None:
        """Formats a value for people; None for NULL.

        Averages and deviations of decimals are rounded half up, as money is, to the digits of the argument: 50.006957 of a
        decimal(18,2) is 50.01.
        """
        if value is not None and self._last_digit is not None:
            exact = value if isinstance(value, Decimal) else Decimal(repr(float(value)))
            if exact.is_finite():
                value = exact.quantize(self._last_digit, ROUND_HALF_UP, _WIDE_CONTEXT)
        return to_text(value)

    @cached_property
    def _last_digit(self) -> Decimal | None:
        """The unit to which the value is rounded for people, such as 0.01; None for the exact value."""
        scale = 0 if self.feature.argument_type is None else self.feature.argument_type.scale
        return Decimal(1).scaleb(-scale) if scale and self.feature.is_in_units else None


@dataclass(frozen=True)
class CompiledStep:
    """A step of a sequence."""

    step: Step
    condition: Expression  # over the event's fields and the arrays of earlier steps, such as `failures.ip`
    gate: Expression | None  # the part of the condition that reads only the event; None: always true
    own: bool  # whether the gate is the whole condition


def split_step_name(name: str, steps: Collection[str]) -> tuple[str, str]:
    """Splits a name as `CompiledSequence.split_name` does. A part of a struct has dots too: `process.name`."""
    step, _, field = name.partition(".")
    return (step, field) if step in steps else ("", name)


@dataclass(frozen=True)
class SequenceKey:
    """A key under which events take part in a sequence.

    Attributes:
        fields: The fields that make it, each in the place of a field of group_by.
        bits: The conditions with this key: a bit for each step, then one for the absence and one for `until`.
        wanted: A condition of the events that may satisfy any of them; None for all events.
    """

    fields: tuple[str, ...]
    bits: int
    wanted: Expression | None


@dataclass(frozen=True)
class CompiledSequence:
    """A sequence bound to its stream."""

    steps: tuple[CompiledStep, ...]
    absent: CompiledStep | None  # the last step if it waits for an absence; it is not in `steps`
    until: Expression | None
    kept: tuple[str, ...]  # the fields to keep of an event for later steps, the absence and the message, sorted
    within: int  # the time for all steps, in microseconds
    keys: tuple[SequenceKey, ...] = ()  # the different keys of the conditions, that of group_by first

    @property
    def has_own_keys(self) -> bool:
        """Whether an event may take part under more keys than that of group_by."""
        return len(self.keys) > 1

    def key_of(self, bit: int) -> tuple[str, ...]:
        """Returns the fields that make the key of a condition, which has this bit (see `SequenceKey`)."""
        return next(key.fields for key in self.keys if key.bits >> bit & 1)

    @property
    def conditions(self) -> list[CompiledStep]:
        """All steps, the absent one included."""
        return [*self.steps, self.absent] if self.absent else list(self.steps)

    def split_name(self, name: str) -> tuple[str, str]:
        """Splits a name such as `failures.ip` into the step and the field; the step is "" for a field of the event."""
        return split_step_name(name, self._step_names)

    @cached_property
    def _step_names(self) -> frozenset[str]:
        return frozenset(each.step.name for each in self.steps)


@dataclass(frozen=True)
class CompiledRule:
    """A rule bound to its stream."""

    spec: Rule
    key: tuple[KeyPart, ...]  # the entries of group_by, by column in ascending order
    where: Expression | None  # with the guards of `key`; of an event rule also with `when`, which is then None
    measures: tuple[CompiledMeasure, ...]
    when: Expression | None
    allowed_lateness: int
    fields: tuple[str, ...]  # all fields of the event that the rule reads, those of the key included, sorted
    sequence: CompiledSequence | None = None
    # For tumbling and sliding windows: counts events, to find the windows that have any.
    presence: Feature | None = None
    store: str = ""  # the name of the state of a session or sequence, which no other rule shares
    # Each state that the rule uses -> the microseconds for which it is kept below the watermark.
    needs: Mapping[str, int] = field(default_factory=dict)
    lane: int = 0  # see `compile_rule`
    entities: tuple[str, ...] = ()  # names of the key or fields of the event, as the stream writes them
    # The columns whose values decide which shard judges an event: those of the key, or the id if nothing is kept of it.
    routed_by: tuple[str, ...] = ()

    @cached_property
    def group_by(self) -> tuple[str, ...]:
        """The columns of the key, by which state and shards know it; see `KeyPart`."""
        return tuple(part.column for part in self.key)

    @cached_property
    def key_names(self) -> tuple[str, ...]:
        """The names of the key's entries in alerts and messages, in the order of `group_by`."""
        return tuple(part.name for part in self.key)

    @property
    def window(self) -> Window | None:
        """The window of the rule; None for a sequence."""
        return self.spec.window

    @cached_property
    def memberships(self) -> tuple[Membership, ...]:
        """The calls of in_list in all expressions but `when`, which are decided as events arrive; inner ones first."""
        return _list_memberships(self._event_parts)

    @cached_property
    def lists(self) -> frozenset[str]:
        """The names of the lists that the rule reads."""
        judged = () if self.when is None else self.when.memberships
        return frozenset(each.list_name for each in (*self.memberships, *judged))

    @property
    def where_sql(self) -> str:
        """The condition of the rule's events as SQL; empty for all events."""
        return "" if self.where is None else self.where.sql

    @property
    def keys(self) -> list[tuple[str, ...]]:
        """The fields that make a key of an event, each in the place of one of group_by; a sequence may have several."""
        return [self.group_by] if self.sequence is None else [key.fields for key in self.sequence.keys]

    @property
    def routes(self) -> list[tuple[tuple[str, ...], Expression | None]]:
        """The fields whose values decide which shards judge an event, each with a condition of the events; None for all."""
        own_keys = () if self.sequence is None else self.sequence.keys[1:]
        return [(self.routed_by, self.where), *((key.fields, key.wanted) for key in own_keys)]

    @cached_property
    def event_fields(self) -> tuple[str, ...]:
        """The fields that decide what the rule keeps of an event, sorted, without those that only alerts show."""
        named = frozenset[str]().union(*(part.fields for part in self.key))
        if self.sequence is not None:
            named = named.union(self.sequence.kept, *(key.fields for key in self.sequence.keys))
        for part in self._event_parts:
            named |= part.named if part is not None else set()
        return tuple(sorted(named & set(self.fields)))

    @cached_property
    def measured(self) -> tuple[str, ...]:
        """The ids of the distinct features whose values a session's rows hold; empty for other kinds of rules."""
        return tuple(dict.fromkeys(measure.feature.feature_id for measure in self.measures)) if self.store else ()

    @property
    def _event_parts(self) -> list[Expression | None]:
        """The expressions over a single event."""
        parts = [self.where, *(part for m in self.measures for part in (m.feature.filter, m.feature.argument))]
        if self.sequence is not None:
            parts += [self.sequence.until, *(step.condition for step in self.sequence.conditions)]
        return parts

    @property
    def expressions(self) -> list[Expression]:
        """All expressions of the rule."""
        return [part for part in (*self._event_parts, self.when) if part is not None]

    @cached_property
    def message_names(self) -> frozenset[str]:
        """The names in braces in the message."""
        return frozenset(PLACEHOLDER.findall(self.spec.message))

    @cached_property
    def shown_names(self) -> frozenset[str]:
        """The names whose values alerts show beside the key and the measures: in the message, or as entities."""
        return self.message_names | (frozenset(self.entities) - frozenset(self.key_names))

    @cached_property
    def memory(self) -> str:
        """The name of the table of the rule's verdicts by key or of its judged events; "" if it needs none.

        Each kind of rule has its own table, so that a version never reads the rows of a version of another kind.
        """
        prefix = JUDGED if self.spec.late == "revise" else _MEMORY_PREFIXES.get(self.spec.kind, "")
        return f"{prefix}{self._owner}" if prefix else ""

    @cached_property
    def _owner(self) -> str:
        return digest([*name_owner(self.spec.rule_id, self.lane), self.group_by])

    @cached_property
    def open_keys(self) -> str:
        """The name of the table of keys with open windows, shared by rules with this group_by; "" without tiled windows."""
        return "" if self.presence is None else f"{OPEN_KEYS}{digest([self.group_by])}"

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the document: equal for equal documents only."""
        return digest([json.dumps(self.spec.document, sort_keys=True, default=str)])

    @cached_property
    def features(self) -> tuple[Feature, ...]:
        """The distinct features whose rows are kept in runs."""
        if self.store:
            return ()
        features = [*(measure.feature for measure in self.measures), *([self.presence] if self.presence else [])]
        return tuple({feature.feature_id: feature for feature in features}.values())

    @cached_property
    def rising(self) -> Mapping[str, int]:
        """The measures that `when` reads, each with a number, if lower measures never make `when` true; otherwise empty.

        `when` is false if every measure is below its number by 1 or more. The measures of a larger window are upper bounds:
        if `when` is false with them, it is false, and only the event itself can cause an error.
        """
        if self.when is None or not all(isinstance(measure.window, Lookback) for measure in self.measures):
            return {}
        names = find_rising(self.when.sql) or {}
        by_name = {measure.name: measure for measure in self.measures}
        if names.keys() != self.when.fields or not all(
            name in by_name and by_name[name].feature.is_rising for name in names
        ):
            return {}
        is_safe = all(measure.name in names or measure.feature.is_safe for measure in self.measures)
        return names if is_safe else {}

    @cached_property
    def sharing_key(self) -> tuple[object, ...]:
        """A sort key that puts rules with the same windows next to each other, since they read the same rows.

        Rules that count distinct values come first, since windows of all sizes share that work. Rules with a rising condition
        come last, the weakest `where` and the largest window first, since these show which events the next need not measure.
        """
        where = self.where.sql if self.where else ""
        features = [feature.feature_id for feature in self.features]
        presence = self.presence.feature_id if self.presence else ""
        counted = [each.feature_id for each in self.features if each.function == "count_distinct" and not presence]
        window = repr(self.spec.window)
        grouping = self.group_by, self.allowed_lateness
        if self.rising and isinstance(self.spec.window, Lookback):
            # Numbers sort by value: amount >= 5 comes before amount >= 10 and holds for more events.
            parts = _DIGITS.split(where)
            numbered = [(len(part.lstrip("0")) * (at % 2), part) for at, part in enumerate(parts)]
            ranks = [
                _RISING.index(measure.feature.function) for measure in self.measures if measure.name in self.rising
            ]
            return *grouping, True, [], True, numbered, ranks, features, -self.spec.window.size
        return *grouping, not counted, counted, False, window, where, presence, features

    def message(self, values: Mapping[str, Any]) -> str:
        """Fills `values` into the rule's message, formatted for people; NULL becomes `null`."""
        return self._message_template % tuple(
            ["null" if (text := write(values.get(name))) is None else text for name, write in self._placeholders]
        )

    @cached_property
    def _message_template(self) -> str:
        """The message with %s instead of each name in braces."""
        return "%s".join(part.replace("%", "%%") for part in PLACEHOLDER.split(self.spec.message)[::2])

    @cached_property
    def _placeholders(self) -> list[tuple[str, Callable[[Any], str | None]]]:
        """The names in the message, each with the function that formats its value."""
        measures = {measure.name: measure.format_value for measure in self.measures}
        return [(name, measures.get(name, to_text)) for name in PLACEHOLDER.findall(self.spec.message)]


def _list_memberships(parts: Iterable[Expression | None]) -> tuple[Membership, ...]:
    """Lists the distinct calls of in_list in some expressions, inner ones first."""
    found = {each.name: each for part in parts if part is not None for each in part.memberships}
    return tuple(found.values())


def name_owner(rule_id: str, lane: int) -> list[Any]:
    """Returns the identity of state that only one version of a rule uses at a time."""
    return [rule_id, lane] if lane else [rule_id]


def digest(identity: list[Any]) -> str:
    """Returns a name for an identity, equal for equal identities only."""
    return hashlib.sha256(json.dumps(identity, separators=(",", ":")).encode()).hexdigest()[:16]
