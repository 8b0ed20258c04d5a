"""Decides before the shuffle which shards need which events, and packs each shard's events into blocks."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

from lookback.core.errors import SetupError
from lookback.core.expressions.compiling import Expression, recompile
from lookback.core.rules.account import Account
from lookback.core.rules.coverage import Coverage
from lookback.core.rules.quarantine import NOT_THE_RULES
from lookback.core.streams.arrival import find_marks, split_future
from lookback.core.streams.blocks import COMMIT, OwnCount, narrow_columns, pack_events
from lookback.core.streams.declaration import Stream
from lookback.core.streams.declarations import Declarations
from lookback.core.streams.events import Events, compile_key
from lookback.core.values.columns import Mask, from_arrow
from lookback.core.values.keys import Int64s
from lookback.core.values.limits import LIMITS
from lookback.core.values.times import NEVER_DUE
from lookback.core.values.types import DataType
from lookback.spark.checkpoints.checkpoint import Checkpoint
from lookback.spark.checkpoints.plan import Plan
from lookback.spark.tables.sqltexts import read_plain_name, select_field, write_plain_name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from lookback.core.streams.alerts import LateEvent

EVENTS, RULE = "events", "rule"
# Texts in rows of the rules table are cut to one character more than is valid.
_MAX_CHARACTERS = {
    "rule_id": 201,
    "status": 51,
    "document": LIMITS["document_bytes"].most + 1,
    "evidence": 100_000,
    "author": 1_000,
    "approved_by": 1_000,
}
# The rows that the stateful operator takes and returns: few and large.
BLOCKS = StructType(
    [
        StructField("shard", StringType(), nullable=False),
        StructField("kind", StringType(), nullable=False),
        StructField("payload", BinaryType(), nullable=False),
    ]
)
KIND, _COMMITTED = "_kind", "_committed"
# The kinds of changes that matter; updates have another number.
INSERTED, DELETED = 1, 2
_KINDS = {"insert": INSERTED, "delete": DELETED}
# With up to this many fields, a query reads all of them, so that a rule that needs another field does not need a new
# query. Shards get only the fields that rules read.
_MAX_FIELDS_READ_WHOLE = 32
# Rows packed at once, which limits the worker's memory.
_CHUNK_ROWS = 200_000


def find_shard_labels(spark: SparkSession, shards: int) -> list[str]:
    """Finds a label for each shard so that Spark's shuffle puts shard i on partition i of `shards`."""
    column = F.col("label")
    candidates = spark.range(64 * shards + 64).select(F.concat(F.lit("s"), F.col("id").cast("string")).alias("label"))
    rows = candidates.select(column, F.pmod(F.hash(column), F.lit(shards)).alias("partition")).collect()
    labels: dict[int, str] = {}
    for row in rows:
        labels.setdefault(row["partition"], row["label"])
    return [labels[partition] for partition in range(shards)]


def build_event_blocks(
    changes: DataFrame, declarations: Declarations, plan: Plan, labels: list[str], checkpoint: Checkpoint
) -> DataFrame:
    """Packs the events of a change feed into blocks."""
    stream = declarations.last
    fields = stream.fields if len(stream.fields) <= _MAX_FIELDS_READ_WHOLE else plan.coverage.fields
    rows = select_changes(changes, declarations, fields)
    return rows.mapInArrow(Dispatch(declarations, plan.coverage, tuple(labels), checkpoint), BLOCKS)


def select_changes(changes: DataFrame, declarations: Declarations, fields: Iterable[str]) -> DataFrame:
    """Selects the columns of a change feed that `BlockBuilder` needs, including the `fields` that rules read."""
    stream = declarations.last
    committed = F.col("_commit_timestamp")
    ahead = F.unix_micros(stream.event_time) - F.unix_micros(committed)
    # Passing numbers to Python is cheaper than texts, and NULL cheaper than a time. Comparing texts is cheaper than
    # cutting them.
    kind = F.lit(0)
    for name, number in _KINDS.items():
        kind = F.when(F.col("_change_type") == name, number).otherwise(kind)
    return changes.select(
        *(select_field(name, write_plain_name(name)) for name in sorted({*stream.key_columns, *fields})),
        kind.cast("tinyint").alias(KIND),
        COMMIT,
        F.when(ahead > declarations.least_future, committed).alias(_COMMITTED),
    )


def build_rule_blocks(changes: DataFrame, labels: list[str], gates: Mapping[int, str]) -> DataFrame:
    """Packs every change of the rules table into a block for each shard. For `gates` see `Plan`."""
    gate = F.lit("")
    for commit, asked in sorted(gates.items()):
        gate = F.when(F.col("commit") >= commit, asked).otherwise(gate)
    row = F.to_json(F.struct("*", gate.alias("gate")), {"ignoreNullFields": "false"}).cast("binary")
    return select_rule_changes(changes).select(
        F.explode(F.array(*map(F.lit, labels))).alias("shard"), F.lit(RULE).alias("kind"), row.alias("payload")
    )


def select_rule_changes(changes: DataFrame) -> DataFrame:
    """Selects the columns of a RuleChange from the rules table's change feed.

    Texts that are too long for a rule are cut but remain too long. Bytes that are not UTF-8 are replaced.
    """
    change = "CASE _change_type WHEN 'update_postimage' THEN 'update' WHEN 'update_preimage' THEN 'before' ELSE _change_type END"
    texts = (f"substring(make_valid_utf8({name}), 1, {most}) AS {name}" for name, most in _MAX_CHARACTERS.items())
    return changes.selectExpr(f"{change} AS change", f"{COMMIT} AS commit", "version", *texts)


@dataclass(frozen=True)
class Dispatch:
    """Packs record batches of events into one block per shard. Every block has the marks of all commits.

    The plan in the checkpoint determines which events and fields are sent. It grows while the query runs, so that a new
    rule does not need a new query. `coverage` is used if a worker cannot read the plan, or the plan has a field that
    the query does not read. Each block contains its coverage, and the shards check whether it suffices.
    """

    declarations: Declarations
    coverage: Coverage
    labels: tuple[str, ...]
    checkpoint: Checkpoint

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the blocks of `batches`. Spark's mapInArrow calls this."""
        builder = BlockBuilder(self.declarations, self.labels)
        with ThreadPoolExecutor(1) as reader:
            # In a bucket this is two requests, while the JVM reads the events.
            planned = reader.submit(self._read_planned)
            for chunk in merge_batches(batches):
                coverage = planned.result()
                if not coverage.fields <= frozenset(chunk.schema.names):
                    coverage = self.coverage
                kinds = chunk.column(KIND).to_numpy()
                for kind in (INSERTED, DELETED):
                    at = np.flatnonzero(kinds == kind)
                    if len(at):
                        yield builder.build(take_rows(chunk, at), kind, coverage)

    def _read_planned(self) -> Coverage:
        try:
            plan = self.checkpoint.read_plan()
        except (OSError, SetupError):
            plan = None
        return self.coverage if plan is None else plan.coverage


@dataclass(frozen=True)
class BlockBuilder:
    """Builds the blocks of all shards, identified by `labels`. `account` counts events, if given."""

    declarations: Declarations
    labels: tuple[str, ...]
    account: Account | None = None

    def build(self, chunk: pa.RecordBatch, kind: int, coverage: Coverage) -> pa.RecordBatch:
        """Builds a block per shard. `chunk` has rows of `select_changes` of one `kind`, INSERTED or DELETED."""
        stream = self.declarations.last
        routing = _Routing(stream, coverage)
        # Keep blocks small: the JVM copies their bytes a dozen times.
        sent = narrow_columns(chunk.select([*sorted({*stream.key_columns, *coverage.fields}), COMMIT]))
        commits = chunk.column(COMMIT).to_numpy()
        types = stream.columns_of_events
        reads = routing.reads | (self.account.fields if self.account is not None else set())
        columns = {name: from_arrow(chunk.column(name), types[name]) for name in sorted(reads)}
        events = Events.of(columns, commits, stream)
        header: dict[str, Any] = {"deleted": kind == DELETED, "rows": len(commits), "coverage": coverage.to_dict()}
        future: list[LateEvent] = []
        if kind == INSERTED:
            ahead = chunk.column(_COMMITTED)
            if ahead.null_count < len(ahead):
                committed = from_arrow(ahead, stream.fields[stream.event_time])
                bounds = np.where(committed.is_known(), committed.values, NEVER_DUE)
                most = self.declarations.list_values("max_future", commits)
                sent = sent.filter(pa.array(events.times - most <= bounds))
                events, future = split_future(events, bounds, stream, most)
            header["marks"] = list(find_marks(events, commits).items())
        else:
            header["marks"] = [(int(commit), None) for commit in np.unique(commits)]
        header["future"] = [{**vars(late), "event_time": late.event_time.isoformat()} for late in future]
        # Only the first shard gets these counts.
        wanted = self.account.count_wanted(events) if self.account is not None and kind == INSERTED else []
        headers = [{**header, "wanted": wanted}] + [{**header, "wanted": []}] * (len(self.labels) - 1)
        payloads = [
            pack_events(sent if here.all() else sent.filter(pa.array(here)), {**head, "own": own})
            for head, (here, own) in zip(headers, routing.route(events, len(self.labels)), strict=True)
        ]
        rows = {"shard": list(self.labels), "kind": [EVENTS] * len(payloads), "payload": payloads}
        return pa.RecordBatch.from_pydict(rows, schema=_ARROW_BLOCKS)


class _Routing:
    """Routes events to shards according to a coverage. `reads` has the columns it needs, including key columns.

    After an error, more events are sent, never fewer, and the batch continues: the shards evaluate the rules themselves
    and quarantine only the rule that fails.
    """

    def __init__(self, stream: Stream, coverage: Coverage) -> None:
        self._needs = [
            (group_by, _compile_conditions(coverage.conditions(group_by), stream))
            for group_by in coverage.grouping_sets
        ]
        self.reads = set(stream.key_columns)
        fields = tuple(stream.columns_of_events.items())
        for group_by, conditions in self._needs:
            self.reads.update(*(condition.fields for condition in conditions or ()))
            self.reads.update(*(_find_key_fields(name, fields) for name in group_by))

    def route(self, events: Events, shards: int) -> Iterator[tuple[Mask, list[OwnCount]]]:
        """Routes events to shards.

        Yields:
            For each shard, a mask of its events: those that a grouping set needs and whose key belongs to the shard.
            For `require_own`, also how many of these have a key that belongs to the shard, by grouping set.
        """
        needs = [
            (group_by, self._select_events(conditions, events), _find_shards(group_by, events, shards))
            for group_by, conditions in self._needs
        ]
        for shard in range(shards):
            is_own = [(group_by, None if homes is None else homes == shard) for group_by, _, homes in needs]
            wanted = (
                selected if own is None else selected & own
                for (_, selected, _), (_, own) in zip(needs, is_own, strict=True)
            )
            here = reduce(or_, wanted, np.zeros(len(events), dtype=bool))
            yield here, [(group_by, np.count_nonzero(here & own)) for group_by, own in is_own if own is not None]

    @staticmethod
    def _select_events(conditions: list[Expression] | None, events: Events) -> Mask:
        if conditions is None:
            return np.ones(len(events), dtype=bool)
        selected = np.zeros(len(events), dtype=bool)
        for condition in conditions:
            try:
                value = events.value(condition)
            except NOT_THE_RULES:
                raise
            except Exception:  # noqa: BLE001 - the shards find out which rule fails
                return np.ones(len(events), dtype=bool)
            selected |= value.is_true()
            # An error counts as false, but the shard logs it.
            selected |= False if value.error is None else value.error
        return selected


def _compile_conditions(texts: list[str] | None, stream: Stream) -> list[Expression] | None:
    """Compiles conditions of which an event must meet at least one. None, for all events, if one is invalid."""
    try:
        return None if texts is None else [_compile_cached(sql, tuple(stream.fields.items())) for sql in texts]
    except NOT_THE_RULES:
        raise
    except Exception:  # noqa: BLE001 - the shards have the rule itself
        return None


def _find_key_fields(name: str, fields: tuple[tuple[str, DataType], ...]) -> frozenset[str]:
    """Finds the fields that an entry of a key reads; none for one that cannot be compiled (see `_find_shards`)."""
    if name in dict(fields):
        return frozenset({name})
    try:
        return compile_key(name, fields).fields
    except NOT_THE_RULES:
        raise
    except Exception:  # noqa: BLE001 - the shards get the same error and stop the rules of this grouping set
        return frozenset()


def _find_shards(group_by: tuple[str, ...], events: Events, shards: int) -> Int64s | None:
    """Finds the shard of each event for a grouping set. None, for all shards, if the keys cannot be computed."""
    try:
        return events.find_shards(group_by, shards)
    except NOT_THE_RULES:
        raise
    except Exception:  # noqa: BLE001 - the shards get the same error and stop the rules of this grouping set
        return None


@functools.lru_cache(maxsize=1_000)
def _compile_cached(sql: str, fields: tuple[tuple[str, DataType], ...]) -> Expression:
    return recompile(sql, dict(fields))


_ARROW_BLOCKS = pa.schema(
    [
        pa.field("shard", pa.string(), False),
        pa.field("kind", pa.string(), False),
        pa.field("payload", pa.binary(), False),
    ]
)


def merge_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Merges batches into larger ones, with the names of the fields."""
    waiting: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        waiting.append(batch.rename_columns(list(map(read_plain_name, batch.schema.names))))
        rows += batch.num_rows
        if rows >= _CHUNK_ROWS:
            yield from pa.Table.from_batches(waiting).combine_chunks().to_batches()
            waiting, rows = [], 0
    if rows:
        yield from pa.Table.from_batches(waiting).combine_chunks().to_batches()


def take_rows(chunk: pa.RecordBatch, at: Int64s) -> pa.RecordBatch:
    """Returns the rows of a chunk at ascending positions, or the chunk itself for all rows."""
    return chunk if len(at) == chunk.num_rows else chunk.take(pa.array(at))
