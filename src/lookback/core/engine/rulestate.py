"""Which rules of a shard are judged, and the state that they need: opened, dropped, and lost by a rule that fails."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lookback.core.engine.output import Output
from lookback.core.judging.sessions import forget_measures
from lookback.core.rules.compiled import WARMING_LANE, CompiledRule, Feature
from lookback.core.rules.quarantine import NOT_THE_RULES, describe_error
from lookback.core.rules.versions import Entry
from lookback.core.state.featurestate import FeatureState
from lookback.core.state.shard import ShardState
from lookback.core.streams.alerts import Failure

Rules = Sequence[tuple[Entry, CompiledRule]]


def stop_unreadable(state: ShardState, output: Output) -> None:
    """Stops the rules in force whose documents can no longer be read, with a failure for each."""
    for entry, problems in state.book.unreadable():
        if not entry.broken:
            state.book.mark_broken(entry)
            reason = f"a document that cannot be read any more: {problems}"
            at = (state.last_commit or 0, 0, "")
            output.failures.append(Failure(entry.rule_id, entry.version, 0, "", at, reason, entry.status))


def drop_stopped(state: ShardState, rules: Rules) -> Rules:
    """Returns the rules without those that have stopped in this shard."""
    broken = state.book.broken
    return [(entry, rule) for entry, rule in rules if (entry.rule_id, entry.version) not in broken] if broken else rules


def list_features(rules: Rules) -> list[tuple[Feature, list[tuple[Entry, CompiledRule]]]]:
    """Lists each feature whose rows are kept as runs, with the rules that use it."""
    features: dict[str, Feature] = {}
    users: dict[str, list[tuple[Entry, CompiledRule]]] = {}
    for entry, rule in rules:
        for feature in rule.features:
            features[feature.feature_id] = feature
            users.setdefault(feature.feature_id, []).append((entry, rule))
    return [(feature, users[feature_id]) for feature_id, feature in features.items()]


def open_states(state: ShardState, rules: Rules) -> None:
    """Creates the states that the rules need, and sets how far below the watermark each keeps rows."""
    widths: dict[str, int] = {}
    for _, rule in rules:
        for name, width in rule.needs.items():
            widths[name] = max(width, widths.get(name, 0))
    for name, width in widths.items():
        state.features.setdefault(name, FeatureState(since=state.high)).width = width
    for _, rule in rules:
        for feature in rule.features:
            held = state.features[feature.feature_id]
            held.buckets, held.row_set = feature.buckets, feature.row_set


def forget_unused(state: ShardState, rules: Rules, watermark: int | None) -> None:
    """Drops the state that no rule needs any longer."""
    for _, rule in rules:
        if rule.store and rule.measures:
            forget_measures(state.table(rule.store), [measure.feature.feature_id for measure in rule.measures])
    features = {name for _, rule in rules for name in rule.needs}
    tables = {name for _, rule in rules for name in (rule.memory, rule.open_keys)}
    raised = {
        entry.role: (rule.spec.suppress, rule.allowed_lateness)
        for entry, rule in rules
        if rule.spec.suppress is not None and rule.lane < WARMING_LANE
    }
    state.forget_unused(features, tables, raised, watermark)


@contextmanager
def contain_failure(output: Output, state: ShardState, rules: Rules, commit: int) -> Iterator[None]:
    """Confines an unexpected exception to `rules`, which this shard then stops judging.

    Their state may be half changed by then, so the keyed tables of these rules are dropped. Alerts of earlier segments
    stay in the output tables, but this shard forgets them: a version that failed never alerts again.
    """
    try:
        yield
    except NOT_THE_RULES:
        raise
    except Exception as error:  # noqa: BLE001 - other rules and the stream must continue, whatever the error
        reason = describe_error(error)
        for entry, rule in rules:
            state.book.mark_broken(entry)
            for name in (rule.store, rule.memory):
                state.tables.drop(name)
            output.failures.append(Failure(entry.rule_id, entry.version, 0, "", (commit, 0, ""), reason, entry.status))
