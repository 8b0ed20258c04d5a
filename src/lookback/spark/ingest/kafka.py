"""Reads the records of a Kafka topic as a stream, and checks whether each is usable.

An unreadable record does not stop the stream: it becomes a row with a `REASON` and its topic, partition and offset.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StringType, StructField, StructType

from lookback.core.errors import SetupError
from lookback.core.streams.source_keys import KAFKA
from lookback.core.values.suggestions import suggest
from lookback.spark.ingest.fields import (
    BESIDE,
    BLOCK,
    CORRUPT,
    FILE,
    RAW,
    READ_AS,
    ROW,
    UNIT,
    cast_rows,
    drop_raw,
    list_source_columns,
)
from lookback.spark.ingest.sources import JSON_FORMATS, Source
from lookback.spark.platform.jars import fetch_kafka_jars
from lookback.spark.platform.secrets import Secrets, find_plain_secrets
from lookback.spark.platform.session import on_databricks
from lookback.spark.tables.sqltexts import quote_text

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from lookback.core.streams.declaration import Stream

# Columns of a record that are needed to read it again and are not in the rejected row's `source`.
_KEPT_COLUMNS = ("kafka_key", "kafka_timestamp", "kafka_headers")
_KAFKA_KEY = ', "kafka": '
_SOURCE_PREFIX = "kafka:"
_PROBLEM = "__problem"
# The maximum number of records in a batch of a backlog; a driver with 4 GB has room for them.
DEFAULT_BATCH_RECORDS = 500_000
_DEFAULTS = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": str(DEFAULT_BATCH_RECORDS)}
_KNOWN_OPTIONS = (
    "startingOffsets", "startingOffsetsByTimestamp", "startingOffsetsByTimestampStrategy", "startingTimestamp",
    "maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay", "minPartitions", "maxRecordsPerPartition",
    "groupIdPrefix", "failOnDataLoss", "fetchOffset.numRetries", "fetchOffset.retryIntervalMs",
    "kafkaConsumer.pollTimeoutMs",
    # Workspace credentials on Databricks.
    "databricks.serviceCredential", "databricks.serviceCredential.scope",
)  # fmt: skip
_FIXED_OPTIONS = (
    "kafka.bootstrap.servers",
    "kafka.key.deserializer",
    "kafka.value.deserializer",
    "kafka.enable.auto.commit",
)
_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}", re.ASCII)
_SERVERS = re.compile(r"[^\s,:]+:\d{1,5}(\s*,\s*[^\s,:]+:\d{1,5})*")
_SOURCE_CLASS = "org.apache.spark.sql.kafka010.KafkaSourceProvider"
_JARS_LOCK = threading.Lock()


class Subscription(NamedTuple):
    """The topics of a source: comma-separated names for `subscribe`, or a pattern for `subscribePattern`."""

    option: str
    topics: str

    @property
    def is_pattern(self) -> bool:
        """True if `topics` is a regular expression that matches names."""
        return self.option == "subscribePattern"


@dataclass(frozen=True)
class Topic:
    """One or more Kafka topics, as a stream's `source` declares them.

    Attributes:
        servers: The brokers as host:port, separated by commas.
        subscription: The topics.
        values: The format of a value: JSON, or a line of CSV.
        fields: The columns of a line of CSV.
        options: Options of Spark's Kafka source and, with the prefix `kafka.`, of Kafka's consumer. Secrets are
            references.
        secrets: The resolved secrets.
    """

    servers: str
    subscription: Subscription
    values: Source
    fields: tuple[str, ...]
    options: Mapping[str, str]
    secrets: Secrets = field(default_factory=Secrets, compare=False, repr=False)

    @classmethod
    def of(cls, stream: Stream) -> Topic:
        """Returns the topic that the stream declares. Raises SetupError with every problem of the declaration."""
        problems = list(_find_problems(stream.source))
        if problems:
            raise SetupError(f"stream {stream.name!r}: source: {'; '.join(problems)}")
        declared = stream.source
        topics = declared.get("topic")
        if topics is None:
            subscription = Subscription("subscribePattern", str(declared["pattern"]))
        else:
            subscription = Subscription("subscribe", ",".join([topics] if isinstance(topics, str) else topics))
        place, options = f"{_SOURCE_PREFIX}{subscription.topics}", _read_options(declared, "value_options")
        values = Source(place, declared.get("value", "json"), options)
        servers = re.sub(r"\s", "", declared["servers"])
        return cls(
            servers, subscription, values, tuple(declared.get("fields") or ()), _read_options(declared, "options")
        )

    def __str__(self) -> str:
        kind = "topics like" if self.subscription.is_pattern else "topic"
        return f"{kind} {self.topics} at {self.servers}"

    @property
    def topics(self) -> str:
        """The names of the topics, separated by commas, or their pattern."""
        return self.subscription.topics

    def hide_secrets(self, text: str) -> str:
        """Returns a message without the secrets of the options."""
        return self.secrets.hide(text)

    def find_dropped(self, topics: set[str]) -> set[str]:
        """Returns the topics of a checkpoint that this source no longer names; none if it names a pattern."""
        return set() if self.subscription.is_pattern else topics - set(self.topics.split(","))

    def watch(self, spark: SparkSession, options: Mapping[str, str] | None = None) -> DataFrame:
        """Streams the topic's existing records, then new ones; `options` override the declared options.

        Raises:
            SetupError: If a secret is missing or the session cannot read Kafka.
        """
        require_kafka(spark)
        self.secrets.spark = spark
        chosen = {**_DEFAULTS, **self.options, **(options or {})}
        chosen = {name: self.secrets.resolve(value, f"source.options.{name}") for name, value in chosen.items()}
        reader = spark.readStream.format(KAFKA).options(**chosen).option(*self.subscription)
        return reader.option("kafka.bootstrap.servers", self.servers).option("includeHeaders", "true").load()

    def read_records(self, records: DataFrame, stream: Stream) -> DataFrame:
        """Turns records of Spark's Kafka source into checked rows, like those of files; see `fields.cast_rows`."""
        value = F.col("value").cast("string")
        lines = records.select(
            F.make_valid_utf8(value).alias(RAW),
            F.concat(F.lit(_SOURCE_PREFIX), F.col("topic")).alias(FILE),
            F.col("topic").alias(UNIT),
            F.col("partition").cast("bigint").alias(BLOCK),
            F.col("offset").alias(ROW),
            self._explain_unreadable(value).alias(_PROBLEM),
            *[column.alias(name) for name, column in _select_record_columns().items()],
        )
        lines = lines.withColumn(READ_AS, self._describe_reading())
        if self.fields:
            rows = self.values.parse_csv(lines, self.fields)
        else:
            rows = self.values.parse_json(lines, list_source_columns(stream))
        rows = rows.withColumn(CORRUPT, F.when(F.col(RAW).isNull(), F.lit("")).otherwise(F.col(CORRUPT)))
        return drop_raw(cast_rows(rows, stream, text=True, place=str(self), malformed=F.col(_PROBLEM)), stream)

    def _explain_unreadable(self, value: Column) -> Column:
        """Returns the problem that explains why a value cannot be read."""
        first = F.concat_ws(" ", F.regexp_extract_all(F.hex(F.substring("value", 1, 8)), F.lit("(..)"), F.lit(1)))
        binary = F.concat(F.lit("the value is not UTF-8 text; its first bytes are "), first)
        other = "the value is not one line of CSV" if self.fields else "the value is not one JSON object"
        problem = F.when(value.isNull(), F.lit("the record has no value (a tombstone); a deletion is not an event"))
        return problem.when(~F.is_valid_utf8(value), binary).otherwise(F.lit(other))

    def _describe_reading(self) -> Column:
        """Describes how to read a record's raw text again: like a file's, plus the columns other than the value.

        Keeps nothing of a tombstone: there is nothing to read again, and its key may be personal data.
        """
        schema = StructType([StructField(name, StringType()) for name in self.fields]) if self.fields else None
        values = self.values.describe_reading(schema)
        beside = F.to_json(F.struct(*_KEPT_COLUMNS), JSON_FORMATS)
        record = F.concat(F.lit(values[:-1] + _KAFKA_KEY), beside, F.lit("}"))
        return F.when(F.col(RAW).isNull(), F.lit(values)).otherwise(record)


def drop_record_parts(read_as: Column) -> Column:
    """Replaces the part of `read_as` that differs by record with `"kafka": true`, so that rows can be grouped by it."""
    common = F.concat(F.substring_index(read_as, _KAFKA_KEY + "{", 1), F.lit(f"{_KAFKA_KEY}true}}"))
    return F.when(F.contains(read_as, F.lit(_KAFKA_KEY + "{")), common).otherwise(read_as)


def is_record(source: Column) -> Column:
    """Returns the condition that the `source` of a rejected row is a Kafka record, not a file."""
    return F.coalesce(F.startswith(source, F.lit(_SOURCE_PREFIX)), F.lit(False))


def name_source() -> Column:
    """Returns the `source` of a checked row: its file, or kafka:TOPIC/PARTITION/OFFSET for a record."""
    record = F.concat_ws("/", FILE, F.col(BLOCK).cast("string"), F.col(ROW).cast("string"))
    # A row that is checked again already has its whole source. Topic names never contain a slash.
    return F.when(F.col(FILE).rlike(f"^{_SOURCE_PREFIX}[^/]*$"), record).otherwise(F.col(FILE))


def add_record_columns(rows: DataFrame) -> DataFrame:
    """Adds the columns of BESIDE to rejected `rows`, from READ_AS and FILE (their source)."""
    schema = f"kafka struct<{', '.join(f'{name}: {BESIDE[name]}' for name in _KEPT_COLUMNS)}>"
    kept = F.from_json(READ_AS, schema, JSON_FORMATS).getField("kafka")
    place = F.split(F.substring(FILE, len(_SOURCE_PREFIX) + 1, 1_000), "/")
    return rows.withColumns(
        {
            **{name: kept.getField(name) for name in _KEPT_COLUMNS},
            "kafka_topic": F.get(place, F.lit(0)),
            "kafka_partition": F.expr("try_cast(get(split(__file, '/'), 1) as int)"),
            "kafka_offset": F.expr("try_cast(get(split(__file, '/'), 2) as bigint)"),
        }
    )


def require_kafka(spark: SparkSession) -> None:
    """Enables the session to read Kafka. Outside Databricks it adds the JARs, and downloads them if they are missing.

    Raises:
        SetupError: If the JARs cannot be downloaded.
    """
    if on_databricks():
        return
    jvm: Any = spark._jvm
    loader = jvm.org.apache.spark.util.Utils
    with _JARS_LOCK:
        try:
            loader.classForName(_SOURCE_CLASS, False, False)
        except Exception:  # noqa: BLE001 - a missing class is one of several errors of py4j
            for jar in fetch_kafka_jars():
                spark.sql(f"ADD JAR {quote_text(jar.as_uri())}")


def _select_record_columns() -> dict[str, Column]:
    """Returns the columns of BESIDE for a record of Spark's Kafka source."""
    last = "element_at(filter(headers, h -> h.key = k), -1).value"
    names = "array_distinct(transform(headers, h -> h.key))"
    entry = f"struct(k as key, make_valid_utf8(cast({last} as string)) as value)"
    return {
        "kafka_key": F.make_valid_utf8(F.col("key").cast("string")),
        "kafka_timestamp": F.col("timestamp"),
        "kafka_topic": F.col("topic"),
        "kafka_partition": F.col("partition"),
        "kafka_offset": F.col("offset"),
        "kafka_headers": F.expr(f"map_from_entries(transform({names}, k -> {entry}))"),
    }


def _read_options(declared: Mapping[str, Any], key: str) -> dict[str, str]:
    """Reads options as text. A YAML value that is not text becomes JSON, which Spark expects for offsets."""
    options = dict(declared.get(key) or {})
    return {str(name): v if isinstance(v, str) else json.dumps(v) for name, v in options.items()}


def _find_problems(declared: Mapping[str, Any]) -> Iterator[str]:
    """Yields the problems of a declaration; its keys are already checked."""
    if not _SERVERS.fullmatch(str(declared.get("servers", ""))):
        yield f"servers must be host:port, or several separated by commas, got {declared.get('servers')!r}"
    yield from _find_topic_problems(declared)
    value, columns = declared.get("value", "json"), declared.get("fields") or []
    if value not in ("json", "csv"):
        yield f"value must be json or csv, got {value!r}"
    if not (isinstance(columns, list) and all(isinstance(name, str) for name in columns)):
        yield f"fields must be a list of column names for the CSV values, got {columns!r}"
    elif (value == "csv") != bool(columns):
        yield "CSV values need `fields`, their column names in order, such as `fields: [id, at]`; JSON values do not"
    yield from _find_option_problems(_read_options(declared, "options"))


def _find_topic_problems(declared: Mapping[str, Any]) -> Iterator[str]:
    topics, pattern = declared.get("topic"), declared.get("pattern")
    if (topics is None) == (pattern is None):
        yield "either `topic` (a name or a list of names) or `pattern` is required"
    elif pattern is not None:
        if not isinstance(pattern, str) or not pattern:
            yield f"pattern must be a regular expression of topic names, got {pattern!r}"
    else:
        names = topics if isinstance(topics, list) and topics else [topics]
        for name in names:
            if not (isinstance(name, str) and _TOPIC.fullmatch(name)):
                yield f"topic must be a name of letters, digits, '.', '_' and '-', or a list of names, got {name!r}"


def _find_option_problems(options: Mapping[str, str]) -> Iterator[str]:
    for name in options:
        if name in _FIXED_OPTIONS:
            yield f"option {name} is set by Lookback" + ("; use `servers`" if name.endswith("servers") else "")
        elif not name.startswith("kafka.") and name not in _KNOWN_OPTIONS:
            near = f"; {hint}" if (hint := suggest(name, _KNOWN_OPTIONS, "")) else ""
            yield f"{name!r} is not an option of Spark's Kafka source{near}; options of values go in `value_options`"
    for name in find_plain_secrets(options):
        yield (
            f"option {name} contains a secret, which does not belong in a file: write ${{env:NAME}} for an environment "
            "variable, or ${secret:SCOPE/KEY} for a secret of the Databricks workspace"
        )
