"""A Kafka topic as ingest finds it: its records as a stream, each judged usable or not.

No record stops another: one whose value cannot be read becomes a row with a `REASON`, and topic, partition and offset.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

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
    REASON,
    ROW,
    cast_rows,
    list_source_columns,
)
from lookback.spark.ingest.sources import JSON_FORMATS, Source
from lookback.spark.platform.jars import fetch_kafka_jars
from lookback.spark.platform.secrets import Secrets, find_plain_secrets
from lookback.spark.platform.session import on_databricks
from lookback.spark.tables.lakehouse import quote_text

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from lookback.core.streams.declaration import Stream

# Of a rejected row: not in `source`, and needed to read it again.
_KEPT = ("kafka_key", "kafka_timestamp", "kafka_headers")
_KEPT_AS = ', "kafka": '
_SOURCE = "kafka:"
# A backlog comes in batches of at most so many records, which a driver of 4 GB holds.
DEFAULT_MOST = 500_000
_DEFAULTS = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": str(DEFAULT_MOST)}
_OPTIONS = (
    "startingOffsets", "startingOffsetsByTimestamp", "startingOffsetsByTimestampStrategy", "startingTimestamp",
    "maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay", "minPartitions", "maxRecordsPerPartition",
    "groupIdPrefix", "failOnDataLoss", "fetchOffset.numRetries", "fetchOffset.retryIntervalMs",
    "kafkaConsumer.pollTimeoutMs",
    # On Databricks: credentials of the workspace.
    "databricks.serviceCredential", "databricks.serviceCredential.scope",
)  # fmt: skip
_OURS = ("kafka.bootstrap.servers", "kafka.key.deserializer", "kafka.value.deserializer", "kafka.enable.auto.commit")
_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}", re.ASCII)
_SERVERS = re.compile(r"[^\s,:]+:\d{1,5}(\s*,\s*[^\s,:]+:\d{1,5})*")
_CLASS = "org.apache.spark.sql.kafka010.KafkaSourceProvider"
_ADDING = threading.Lock()


@dataclass(frozen=True)
class Topic:
    """A Kafka topic, or several, as a stream's `source` declares it.

    servers: host:port, with commas between; subscription: (subscribe, topics) or (subscribePattern, a pattern); values:
    how a value is read, JSON or lines of CSV with the columns `fields`; options: of Spark's Kafka source and, with
    `kafka.` before them, of Kafka's consumer, secrets not yet put in.
    """

    servers: str
    subscription: tuple[str, str]
    values: Source
    fields: tuple[str, ...]
    options: Mapping[str, str]
    secrets: Secrets = field(default_factory=Secrets, compare=False, repr=False)

    @classmethod
    def of(cls, stream: Stream) -> Topic:
        """The topic that the stream declares. Raises SetupError with every problem of the declaration."""
        problems = list(_problems(stream.source))
        if problems:
            raise SetupError(f"stream {stream.name!r}: source: {'; '.join(problems)}")
        declared = stream.source
        topics = declared.get("topic")
        if topics is None:
            subscription = ("subscribePattern", str(declared["pattern"]))
        else:
            subscription = ("subscribe", ",".join([topics] if isinstance(topics, str) else topics))
        values = Source(f"{_SOURCE}{subscription[1]}", declared.get("value", "json"), _texts(declared, "value_options"))
        servers = re.sub(r"\s", "", declared["servers"])
        return cls(servers, subscription, values, tuple(declared.get("fields") or ()), _texts(declared, "options"))

    def __str__(self) -> str:
        kind = "topic" if self.subscription[0] == "subscribe" else "topics like"
        return f"{kind} {self.subscription[1]} at {self.servers}"

    def watch(self, spark: SparkSession, options: Mapping[str, str] | None = None) -> DataFrame:
        """A stream of the topic's records, those that are there first; options go before the declared ones.

        Raises SetupError where a secret is missing or the session cannot read Kafka.
        """
        require_kafka(spark)
        self.secrets.spark = spark
        chosen = {**_DEFAULTS, **self.options, **(options or {})}
        chosen = {name: self.secrets.resolve(value, f"source.options.{name}") for name, value in chosen.items()}
        reader = spark.readStream.format(KAFKA).options(**chosen).option(*self.subscription)
        return reader.option("kafka.bootstrap.servers", self.servers).option("includeHeaders", "true").load()

    def judged(self, records: DataFrame, stream: Stream) -> DataFrame:
        """Records as Spark's source gives them -> rows judged as those of files are; see `fields.judged`."""
        value = F.col("value").cast("string")
        lines = records.select(
            F.make_valid_utf8(value).alias(RAW),
            F.concat(F.lit(_SOURCE), F.col("topic")).alias(FILE),
            F.col("partition").cast("bigint").alias(BLOCK),
            F.col("offset").alias(ROW),
            self._unreadable(value).alias("__why"),
            *[column.alias(name) for name, column in _of_record().items()],
        )
        lines = lines.withColumn(READ_AS, self._read_as())
        rows = (
            self.values.split(lines, self.fields)
            if self.fields
            else self.values.parsed(lines, list_source_columns(stream))
        )
        rows = rows.withColumn(CORRUPT, F.when(F.col(RAW).isNull(), F.lit("")).otherwise(F.col(CORRUPT)))
        rows = cast_rows(rows, stream, text=True, place=str(self), malformed=F.col("__why"))
        rejected = F.col(REASON).isNotNull()
        return rows.withColumns({name: F.when(rejected, F.col(name)) for name in (RAW, READ_AS)})

    def _unreadable(self, value: Column) -> Column:
        """Why a value that cannot be read cannot."""
        first = F.concat_ws(" ", F.regexp_extract_all(F.hex(F.substring("value", 1, 8)), F.lit("(..)"), F.lit(1)))
        binary = F.concat(F.lit("the value is not UTF-8 text; its first bytes are "), first)
        other = "the value is not one line of CSV" if self.fields else "the value is not one JSON object"
        told = F.when(value.isNull(), F.lit("the record has no value (a tombstone); a deletion is not an event"))
        return told.when(~F.is_valid_utf8(value), binary).otherwise(F.lit(other))

    def _read_as(self) -> Column:
        """How to read a record's raw text again: as files are read, and what stood beside the value.

        Of a tombstone nothing is kept: there is nothing to read again, and its key may be a person's.
        """
        schema = StructType([StructField(name, StringType()) for name in self.fields]) if self.fields else None
        values = self.values.read_as(schema)
        beside = F.to_json(F.struct(*_KEPT), JSON_FORMATS)
        told = F.concat(F.lit(values[:-1] + _KEPT_AS), beside, F.lit("}"))
        return F.when(F.col(RAW).isNull(), F.lit(values)).otherwise(told)


def alike(read_as: Column) -> Column:
    """`read_as` of rejected rows without what is each record's own: `"kafka": true` in its place."""
    common = F.concat(F.substring_index(read_as, _KEPT_AS + "{", 1), F.lit(f"{_KEPT_AS}true}}"))
    return F.when(F.contains(read_as, F.lit(_KEPT_AS + "{")), common).otherwise(read_as)


def is_record(source: Column) -> Column:
    """Whether the `source` of a rejected row is a record of Kafka, not a file."""
    return F.coalesce(F.startswith(source, F.lit(_SOURCE)), F.lit(False))


def source_of() -> Column:
    """The `source` of a judged row: its file; of a record kafka:TOPIC/PARTITION/OFFSET."""
    record = F.concat_ws("/", FILE, F.col(BLOCK).cast("string"), F.col(ROW).cast("string"))
    # One that is judged again has the whole of it already. Names of topics hold no slash.
    return F.when(F.col(FILE).rlike(f"^{_SOURCE}[^/]*$"), record).otherwise(F.col(FILE))


def beside_value(rows: DataFrame) -> DataFrame:
    """Rejected rows with READ_AS and FILE (their source) -> the same with the columns of BESIDE."""
    schema = f"kafka struct<{', '.join(f'{name}: {BESIDE[name]}' for name in _KEPT)}>"
    kept = F.from_json(READ_AS, schema, JSON_FORMATS).getField("kafka")
    place = F.split(F.substring(FILE, len(_SOURCE) + 1, 1_000), "/")
    return rows.withColumns(
        {
            **{name: kept.getField(name) for name in _KEPT},
            "kafka_topic": F.get(place, F.lit(0)),
            "kafka_partition": F.expr("try_cast(get(split(__file, '/'), 1) as int)"),
            "kafka_offset": F.expr("try_cast(get(split(__file, '/'), 2) as bigint)"),
        }
    )


def require_kafka(spark: SparkSession) -> None:
    """Sees to it that the session can read Kafka: on Databricks it can, elsewhere the JARs are added, fetched if need be.

    Raises SetupError where they cannot be.
    """
    if on_databricks():
        return
    jvm: Any = spark._jvm
    loader = jvm.org.apache.spark.util.Utils
    with _ADDING:
        try:
            loader.classForName(_CLASS, False, False)
        except Exception:  # noqa: BLE001 - it has none: py4j says so in several ways
            for jar in fetch_kafka_jars():
                spark.sql(f"ADD JAR {quote_text(jar.as_uri())}")


def _of_record() -> dict[str, Column]:
    """The columns of BESIDE, of a row of Spark's source."""
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


def _texts(declared: Mapping[str, Any], key: str) -> dict[str, str]:
    """Options as texts; what YAML does not read as text as JSON, as Spark wants offsets."""
    options = dict(declared.get(key) or {})
    return {str(name): v if isinstance(v, str) else json.dumps(v) for name, v in options.items()}


def _problems(declared: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with a declaration, whose keys are known ones."""
    if not _SERVERS.fullmatch(str(declared.get("servers", ""))):
        yield f"servers is host:port, with commas between several, got {declared.get('servers')!r}"
    yield from _problems_of_topic(declared)
    value, columns = declared.get("value", "json"), declared.get("fields") or []
    if value not in ("json", "csv"):
        yield f"value is json or csv, got {value!r}"
    if not (isinstance(columns, list) and all(isinstance(name, str) for name in columns)):
        yield f"fields is a list of the names of a CSV line's values, got {columns!r}"
    elif (value == "csv") != bool(columns):
        yield "a value of CSV has no header: name its values in order, `fields: [id, at]`; one of JSON needs no `fields`"
    yield from _problems_of_options(_texts(declared, "options"))


def _problems_of_topic(declared: Mapping[str, Any]) -> Iterator[str]:
    topics, pattern = declared.get("topic"), declared.get("pattern")
    if (topics is None) == (pattern is None):
        yield "either `topic`, one or a list, or `pattern` is needed"
    elif pattern is not None:
        if not isinstance(pattern, str) or not pattern:
            yield f"pattern is a regular expression of topics' names, got {pattern!r}"
    else:
        names = topics if isinstance(topics, list) and topics else [topics]
        for name in names:
            if not (isinstance(name, str) and _TOPIC.fullmatch(name)):
                yield f"topic is a name of letters, digits, '.', '_' and '-', or a list of such, got {name!r}"


def _problems_of_options(options: Mapping[str, str]) -> Iterator[str]:
    for name in options:
        if name in _OURS:
            yield f"option {name} is set by Lookback" + ("; say `servers`" if name.endswith("servers") else "")
        elif not name.startswith("kafka.") and name not in _OPTIONS:
            near = f"; {hint}" if (hint := suggest(name, _OPTIONS, "")) else ""
            yield f"option {name!r} is not one of Spark's Kafka source{near}; those of values are `value_options`"
    for name in find_plain_secrets(options):
        yield (
            f"option {name} holds a secret, which does not belong into a file: write ${{env:NAME}} for an environment "
            "variable, or ${secret:SCOPE/KEY} for a secret of the Databricks workspace"
        )
