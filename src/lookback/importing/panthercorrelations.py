"""Reads Panther's correlations: which signals come together, or one after another, or without another.

A signal is an event of a stream with the id of the detection that made it in the field p_rule_id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from lookback.importing.conditions import Condition, Text
from lookback.importing.detections import Chain, Key, Shape, Together, make_chain, name_member
from lookback.importing.reasons import Reason, Refusal

# The field that names the detection; --map says what it is called in the stream.
SIGNAL = "p_rule_id"
_KEYS = (
    *("Group", "Sequence", "Transitions", "MatchCriteria"),
    *("Schedule", "LookbackWindowMinutes", "EventEvaluationOrder"),
)
_MEMBER_KEYS = ("ID", "RuleID", "MinMatchCount", "Absence")
_TRANSITION_KEYS = ("ID", "From", "To", "WithinTimeFrameMinutes", "Match")
_LOOKBACK_MINUTES = 15
_MINUTE = 60


@dataclass(frozen=True)
class Member:
    """A signal that a correlation waits for. is_absent: It must not come."""

    name: str
    rule_id: str
    count: int
    is_absent: bool

    @property
    def condition(self) -> Condition:
        """Returns that an event is this signal."""
        return Text(SIGNAL, (self.rule_id,), is_cased=True)


@dataclass(frozen=True)
class CorrelationRule:
    """A correlation: what is written of it, and the detections that it names."""

    shape: Shape
    members: Mapping[str, Member]
    losses: tuple[Reason, ...]


def read_correlation(detection: Any, *, is_scheduled: bool) -> CorrelationRule:
    """Reads the key `Detection` of a correlation rule. Raises Refusal."""
    if not isinstance(detection, list) or len(detection) != 1 or not isinstance(detection[0], dict):
        raise Refusal("unsupported", "Detection is not a list of one Sequence or Group")
    body = detection[0]
    _require_known(body, _KEYS, "Detection")
    is_group = "Group" in body
    members = _read_members(body.get("Group" if is_group else "Sequence"))
    minutes = _read_count(body.get("LookbackWindowMinutes", _LOOKBACK_MINUTES), "LookbackWindowMinutes")
    schedule = body.get("Schedule")
    rate = schedule.get("RateMinutes") if isinstance(schedule, dict) else None
    named = {member.name: member for member in members}
    if len(named) != len(members):
        raise Refusal("unsupported", "two entries have the same ID")
    if not is_group:
        return CorrelationRule(_read_sequence(body, members, minutes), named, (_note_schedule(rate),))
    shape = _read_group(members, _read_criteria(body.get("MatchCriteria"), members), minutes, is_scheduled, rate)
    loss = Reason("phase", f"Panther asks every {rate} minutes") if shape.slide else _note_schedule(rate)
    return CorrelationRule(shape, named, (loss,))


def _note_schedule(rate: Any) -> Reason:
    return Reason("schedule", f"Panther asks every {rate} minutes" if rate else "Panther asks at intervals")


def _require_known(given: Mapping[Any, Any], known: Sequence[str], place: str) -> None:
    if unknown := [name for name in given if name not in known]:
        raise Refusal("unsupported", f"{place} has {unknown[0]!r:.60}")


def _read_count(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise Refusal("unsupported", f"{name} is {value!r:.60}, which is not a whole number above 0")
    return value


def _read_members(entries: Any) -> list[Member]:
    found = []
    for entry in entries if isinstance(entries, list) else []:
        if not isinstance(entry, dict) or "RuleID" not in entry:
            raise Refusal("unsupported", f"an entry names no RuleID: {entry!r:.100}")
        _require_known(entry, _MEMBER_KEYS, "an entry")
        count = _read_count(entry.get("MinMatchCount", 1), "MinMatchCount")
        rule_id = str(entry["RuleID"])
        found.append(Member(str(entry.get("ID", rule_id)), rule_id, count, entry.get("Absence") is True))
    if all(member.is_absent for member in found):
        raise Refusal("absence", "it has no signal that must come")
    return found


def _read_criteria(criteria: Any, members: Sequence[Member]) -> tuple[Key, ...]:
    """Reads which fields of the signals must be the same; none if all signals belong together."""
    keys = []
    for name, entries in (criteria or {}).items():
        by_member = {str(each.get("GroupID")): str(each.get("Match")) for each in entries}
        if missing := [member.name for member in members if member.name not in by_member]:
            raise Refusal("unsupported", f"MatchCriteria.{name} has no entry for {missing[0]!r:.60}")
        fields = tuple(by_member[member.name] for member in members)
        keys.append(_name_key(str(name), fields))
    return tuple(keys)


def _name_key(name: str, fields: tuple[str, ...]) -> Key:
    """Names a key like its field, if that is the same in all signals; messages show it then."""
    return Key(fields[0] if len(set(fields)) == 1 else name, fields)


def _read_group(
    members: Sequence[Member], keys: tuple[Key, ...], minutes: int, is_scheduled: bool, rate: Any
) -> Together:
    """Reads signals in any order. A signal that must not come may come before or after the rest: only a window knows."""
    wanted = [
        f"{name_member(at)} = 0" if member.is_absent else f"{name_member(at)} >= {member.count}"
        for at, member in enumerate(members)
    ]
    slide = 0
    if is_scheduled or any(member.is_absent for member in members):
        slide = _read_count(rate, "Schedule.RateMinutes") * _MINUTE
    return Together(tuple(member.condition for member in members), keys, minutes * _MINUTE, " and ".join(wanted), slide)


def _read_sequence(body: Mapping[str, Any], members: Sequence[Member], minutes: int) -> Chain:
    if body.get("EventEvaluationOrder", "Chronological") != "Chronological":
        raise Refusal("unsupported", f"EventEvaluationOrder is {body['EventEvaluationOrder']!r:.60}")
    if any(member.is_absent for member in members[:-1]):
        raise Refusal("absence", "a signal that must not come is not the last of the sequence")
    transitions = _order_transitions(body.get("Transitions"), members)
    conditions, counts = [member.condition for member in members], [member.count for member in members]
    spans = [each.get("WithinTimeFrameMinutes") for each in transitions]
    given = [_read_count(span, "WithinTimeFrameMinutes") for span in spans if span is not None]
    if [span for span in given if span < minutes]:
        if len(members) > 2 or max(counts) > 1:
            raise Refusal(
                "unsupported", "a transition has a time frame of its own, and there are more than two signals"
            )
        minutes = given[0]
    keys, seconds = _read_sequence_keys(transitions), minutes * _MINUTE
    if not members[-1].is_absent:
        return make_chain(conditions, keys, seconds, counts)
    if len(members) > 2:
        raise Refusal("absence", "more than one signal comes before the one that must not come")
    return make_chain(conditions[:1], keys, seconds, counts[:1], conditions[1:])


def _order_transitions(transitions: Any, members: Sequence[Member]) -> list[Mapping[str, Any]]:
    """Returns the transition from each signal to the next one."""
    given = [each for each in transitions if isinstance(each, dict)] if isinstance(transitions, list) else []
    for each in given:
        _require_known(each, _TRANSITION_KEYS, "a transition")
    by_pair = {(str(each.get("From")), str(each.get("To"))): each for each in given}
    pairs = [(first.name, second.name) for first, second in pairwise(members)]
    if len(by_pair) != len(given) or not set(by_pair) <= set(pairs):
        raise Refusal("unsupported", "its transitions do not lead from each signal to the next")
    return [by_pair.get(pair, {}) for pair in pairs]


def _read_sequence_keys(transitions: Sequence[Mapping[str, Any]]) -> tuple[Key, ...]:
    """Reads which fields of the signals must be the same, all along the sequence."""
    fields: list[list[str]] = []
    for at, transition in enumerate(transitions):
        pairs = sorted(_read_match(each) for each in transition.get("Match") or [])
        if at == 0:
            fields = [list(pair) for pair in pairs]
        elif sorted(known[-1] for known in fields) != [first for first, _ in pairs]:
            raise Refusal("unsupported", "its transitions match different fields of one signal")
        else:
            following = dict(pairs)
            for known in fields:
                known.append(following[known[-1]])
    return tuple(_name_key(each[0].rpartition(".")[2], tuple(each)) for each in fields)


def _read_match(match: Any) -> tuple[str, str]:
    """Reads `{On: field}` or `{From: field, To: field}`. YAML reads the word On as true."""
    if isinstance(match, dict) and len(match) == 1 and ("On" in match or True in match):
        on = str(next(iter(match.values())))
        return on, on
    if isinstance(match, dict) and sorted(map(str, match)) == ["From", "To"]:
        return str(match["From"]), str(match["To"])
    raise Refusal("unsupported", f"a transition matches {match!r:.100}")
