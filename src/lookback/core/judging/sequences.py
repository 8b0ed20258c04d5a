"""Judges sequences: steps in order within a span of time, and the absence of an event that should have followed.

Steps a, then b with the same ip as the first a, within 10 minutes:

    minute     0      1      4      12     13
    row        a      a      b      b      b
    ip         p      q      p      p      q
    candidate                *             *      the gates of a and b leave these: at 12 the window has no a but b
    match                    0             -      at 4 the match that begins at 0 ends, which alerts; at 13 none is left

All candidates are settled together (`candidates`, `matches`). Then the keys with a result are judged event by event
(`keyjudge`), which writes alerts, resets keys and follows waits for absent events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

import numpy as np

from lookback.core.judging.candidates import Candidates, Settler
from lookback.core.judging.keyedbatch import Answer, KeyedBatch
from lookback.core.judging.keyedevents import KeyedEvents
from lookback.core.judging.keyjudge import Answers, Judging, KeyJudge, Question, SequenceRun
from lookback.core.judging.keystates import KeyState
from lookback.core.judging.rulerun import RuleRun, SelectKeys
from lookback.core.judging.steps import Steps
from lookback.core.rules.compiled import CompiledRule
from lookback.core.state.shard import ShardState
from lookback.core.streams.events import Events
from lookback.core.values.columns import Mask
from lookback.core.values.keys import Int64s, Keys, list_between
from lookback.core.values.lists import Lists

# The number of keys whose candidates are settled together while they are judged event by event.
_KEYS_AT_ONCE = 1_000


def judge_sequences(rule_run: RuleRun) -> None:
    """Judges the events of a segment by a sequence rule."""
    common = SequenceRun(rule_run)
    steps = common.steps
    bits, errors = steps.find_bits(rule_run.events)
    # With keys of their own, events may count in this shard that are counted, and found to be late, in another one.
    taken = rule_run.matching & rule_run.find_in_time()
    judgeable = taken & ~rule_run.is_late if rule_run.spec.late == "record" else taken
    # An absence triggers when its wait is over. So an event is judged if a wait that it may start or end is over
    # within the effective range.
    times, dues = rule_run.events.times, rule_run.events.times + common.wait
    judged: Mask = judgeable & rule_run.find_effective(dues) & rule_run.is_evaluated
    common.alerting, common.failing = judged, judged & ~errors
    if common.absent is not None:
        is_ending = bits >> steps.absent & 1 > 0
        judged = judged | (judgeable & is_ending & rule_run.find_effective(times, dues) & rule_run.is_evaluated)
    wanted = rule_run.wanted
    rule_run.record_judged(wanted & (bits != 0), wanted & taken, wanted & judged)
    rule_run.failed |= wanted & taken & errors
    # A wait may start outside the effective range, because it may be over inside it.
    may_complete = common.alerting if common.absent is None else judgeable
    _judge_rows(common, KeyedEvents(rule_run, steps, taken, bits, rule_run.select_keys), may_complete)
    rule_run.count_failed_events()


def _judge_rows(common: SequenceRun, events: KeyedEvents, may_complete: Mask) -> None:
    """Judges events and saves the state; `may_complete` marks those that may complete the steps if they satisfy the last.

    A key is followed event by event if more than its rows may change: an alert may reset it, it waits for absent
    events, or matches have fixed expiry. For all other keys, only the events that complete the steps are judged, each
    with the rows that count for it.
    """
    rule_run, steps, within = common.rule_run, common.steps, common.spec.within
    oldest = rule_run.earliest_in_time(rule_run.timeline.end)
    batch = KeyedBatch(rule_run, steps, events)
    settler = Settler(steps, batch.rows, common.spec)
    # With fixed expiry, or after a reset, a row before `until` in time may belong to a match that began later.
    until_ends = not (common.is_fixed or common.resets)
    candidates = settler.find_possible(batch.find_rows(may_complete, steps.last), common.floor, until_ends=until_ends)
    is_kept = batch.times >= oldest - within
    is_followed: Mask = np.zeros(len(batch.keys), dtype=bool)
    if common.is_fixed or common.absent is not None or common.resets:
        is_followed[batch.rows.keys[candidates]] = True
    if common.is_fixed:
        is_followed[batch.numbers[is_kept]] = True
    is_followed[list(batch.states)] = True
    is_needed, answers = is_followed[batch.rows.keys], Answers()
    if not common.is_fixed:
        counted = Candidates(candidates, np.zeros_like(candidates), np.full_like(candidates, common.floor))
        begins, has_failed = settler.settle(counted)
        is_complete = begins[:, 0] >= 0
        is_needed[list_between(begins[is_complete, 0], candidates[is_complete])] = True
        answers = _list_answers(batch, candidates, begins, has_failed)
        # If a key is followed, an error counts only when its row arrives, because an alert may have reset the key
        # before.
        failed = batch.find_positions(candidates[has_failed & ~is_followed[batch.rows.keys[candidates]]])
        rule_run.failed[failed] |= common.failing[failed]
    judges = (
        KeyJudge(common, key, state).run(arrivals)
        for key, state, arrivals in batch.list_judged(is_needed, candidates, is_followed, answers)
    )
    while some := list(islice(judges, _KEYS_AT_ONCE)):
        _run_together(some, batch, settler)
    lateness = rule_run.rule.allowed_lateness
    batch.save(
        is_kept, is_followed, within + lateness + 1, lambda state: state.forget(oldest, within, lateness, common.wait)
    )


def _run_together(judges: Iterable[Judging], batch: KeyedBatch, settler: Settler) -> None:
    """Judges keys, and answers their questions together."""
    asking = [(judge, question) for judge in judges if (question := next(judge, None)) is not None]
    while asking:
        at, since, begin = np.array([each for _, question in asking for each in question], dtype=np.int64).T
        answers = _list_answers(batch, at, *settler.settle(Candidates(at, since, begin)))
        asking = [(judge, question) for judge, _ in asking if (question := _send(judge, answers)) is not None]


def select_taken(rule_run: RuleRun) -> Callable[[SelectKeys], Mask]:
    """Records what becomes of late events, for a version that judges events later.

    Returns a function that marks the events that the sequence takes under some of the keys.
    """
    steps, in_time = Steps(rule_run), rule_run.find_in_time()
    bits, _ = steps.find_bits(rule_run.events)
    wanted = rule_run.wanted & (bits != 0)
    rule_run.record_judged(wanted, in_time, np.zeros(len(wanted), dtype=bool))

    def mark_taken(select: SelectKeys) -> Mask:
        is_taken = np.zeros(len(wanted), dtype=bool)
        is_taken[KeyedEvents(rule_run, steps, rule_run.matching & in_time, bits, select).positions] = True
        return is_taken

    return mark_taken


def delete_from_sequences(
    state: ShardState, rule: CompiledRule, keys: Keys, deleted: Events, selected: Mask, _lists: Lists
) -> None:
    """Removes the selected deleted events, so that they no longer count for steps and no longer start or end waits."""
    assert rule.spec.sequence is not None
    table = state.table(rule.store)
    for at in np.flatnonzero(selected).tolist():
        key = keys.pair(at)
        value = table.get(key)
        if value is not None:
            key_state = KeyState.from_value(value)
            key_state.delete(int(deleted.times[at]), deleted.id_text(at), rule.spec.sequence.within)
            table.change(key, key_state.to_value())


def _send(judge: Judging, answers: Answers) -> Question | None:
    try:
        return judge.send(answers)
    except StopIteration:
        return None


def _list_answers(batch: KeyedBatch, candidates: Int64s, begins: Int64s, has_failed: Mask) -> Answers:
    is_complete = begins[:, 0] >= 0
    answers = dict.fromkeys(candidates[has_failed].tolist(), Answer(None, True))
    sort_keys = batch.find_sort_keys(begins[is_complete])
    answers |= {
        place: Answer(each, False) for place, each in zip(candidates[is_complete].tolist(), sort_keys, strict=True)
    }
    return answers
