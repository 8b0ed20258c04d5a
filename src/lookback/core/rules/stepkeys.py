"""The keys of a sequence: under which keys an event takes part, if steps have a key of their own.

group_by: [src_ip]      step a                          step b with key: [dst_ip]
src_ip, dst_ip          p, q                            q, p
takes part              as a under p                    as b under p, so it may follow the first event
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from lookback.core.expressions.compiling import Expression, recompile
from lookback.core.rules.compiled import CompiledSequence, SequenceKey
from lookback.core.rules.problems import quote_value
from lookback.core.values.types import DataType
from lookback.core.values.windows import StepSequence

_REMEDY = "name one field for each entry of group_by, in its order"


def bind_keys(
    spec: StepSequence,
    group_by: Mapping[str, DataType],
    fields: Mapping[str, DataType],
    find_field: Callable[[str, str], str | None],
    add_problem: Callable[[str, str], None],
) -> list[tuple[str, ...]]:
    """Binds the key of each step, and then that of `until`.

    Args:
        spec: The sequence.
        group_by: The entries of group_by in the order of the document, with their types.
        fields: The fields of the stream, with their types.
        find_field: Returns a field as the stream writes it, by name and place; None for an unknown one, which it reports.
        add_problem: Reports a problem at a place.

    Returns:
        The fields of each key, in the ascending order of the entries of group_by whose place they take.
    """

    def bind(key: Sequence[str] | None, place: str) -> tuple[str, ...]:
        if key is None:
            return tuple(sorted(group_by))
        if len(key) != len(group_by):
            entries, named = _count(len(group_by), "entry", "entries"), _count(len(key), "field", "fields")
            add_problem(place, f"names {named}, and group_by has {entries}; {_REMEDY}, or leave key out")
            return ()
        bound = {}
        for (entry, type_), written in zip(group_by.items(), key, strict=True):
            name = find_field(written, place)
            if name is not None and fields[name] != type_:
                add_problem(
                    place,
                    f"{quote_value(name)} is {fields[name]}, and {quote_value(entry)} of group_by, whose place it takes, "
                    f"is {type_}; name a field of the same type, or give both one type in the stream's columns",
                )
            bound[entry] = name or entry
        return tuple(bound[entry] for entry in sorted(bound))

    bound = [bind(step.key, f"sequence.steps[{at}].key") for at, step in enumerate(spec.steps)]
    return [*bound, bind(spec.until_key, "sequence.until.key")]


def add_keys(
    sequence: CompiledSequence,
    bound: Sequence[tuple[str, ...]],
    group_by: tuple[str, ...],
    where: Expression | None,
    fields: Mapping[str, DataType],
) -> CompiledSequence:
    """Returns the sequence with its keys, that of group_by first. `bound` is what `bind_keys` has returned."""
    gates = [(1 << at, step.gate) for at, step in enumerate(sequence.conditions)]
    parts = list(zip(bound, gates, strict=False))
    if sequence.until is not None:
        parts.append((bound[-1], (1 << len(sequence.steps) + 1, sequence.until)))
    bits, of_key = {group_by: 0}, dict[tuple[str, ...], list[Expression | None]]()
    for key, (bit, gate) in parts:
        bits[key] = bits.get(key, 0) | bit
        of_key.setdefault(key, []).append(gate)
    # The shard of an event's own key counts it and finds it late, whatever it satisfies.
    keys = [
        SequenceKey(key, mask, where if key == group_by else _join(where, of_key[key], fields))
        for key, mask in bits.items()
    ]
    return replace(sequence, keys=tuple(keys))


def _join(
    where: Expression | None, gates: Sequence[Expression | None], fields: Mapping[str, DataType]
) -> Expression | None:
    """Returns a condition of the rule's events that satisfy any of the gates, or one that holds for more events."""
    known = [gate for gate in gates if gate is not None and gate.is_readable]
    if len(known) < len(gates) or (where is not None and not where.is_readable):
        return where
    any_gate = " OR ".join(f"({gate.sql})" for gate in known)
    return recompile(any_gate if where is None else f"({where.sql}) AND ({any_gate})", fields)


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
