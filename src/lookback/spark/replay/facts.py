"""Reads what the shards of a replay say of rules and events beside alerts: failures, errors, discarded events."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from pyspark.sql import functions as F  # noqa: N812

from lookback.core.rules.rulelog import LogRow
from lookback.core.streams.blocks import unpack_failures
from lookback.core.values.texts import count_noun
from lookback.spark.batches.shard import FAILURES, LOG
from lookback.spark.replay.answers import ShardAnswers
from lookback.spark.replay.plan import ReplayPlan


def describe_discarded(answers: ShardAnswers) -> Iterator[str]:
    """Describes the events that came too late to count, if there are any."""
    late = answers.read_late().where("late_by_us > 0").groupBy("event_id", "event_time", "arrival")
    # One shard's rules may discard an event that another shard's rules take.
    discarded = late.agg(F.bool_and(F.col("action") == "discarded").alias("is_discarded")).where("is_discarded")
    example = F.min(F.struct("arrival", F.col("event_time").cast("string"), "event_id")).alias("example")
    row = discarded.agg(F.count("*").alias("count"), example).head()
    if row is not None and row["count"]:
        arrival, time, event_id = row["example"]
        yield (
            f"{count_noun(row['count'], 'event')} came too late for every rule here and do not count, as in the "
            f"stream; for example {event_id!r} of {time} in commit {arrival}. Older events are late if you ingest "
            "their file after newer ones. To judge them, ingest older files first, or declare a longer allowed_lateness"
        )


def count_failures(answers: ShardAnswers, plan: ReplayPlan) -> Counter[int]:
    """Counts how many times each trial could not be judged."""
    failed = Counter[int]()
    for payload in answers.list_payloads(FAILURES):
        for failure in unpack_failures(payload):
            failed[plan.tried[failure.rule_id].number] += failure.count
    return failed


def list_errors(answers: ShardAnswers, plan: ReplayPlan) -> list[LogRow]:
    """Lists the distinct rows for rule_log, with the rules' own ids."""
    logged = {LogRow(**each) for payload in answers.list_payloads(LOG) for each in json.loads(payload)}
    own_ids = {rule_id: tried.rule_id for rule_id, tried in plan.tried.items()}
    return sorted({replace(row, rule_id=own_ids.get(row.rule_id or "", row.rule_id)) for row in logged}, key=repr)
