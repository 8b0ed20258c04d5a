"""Declarations of sources, new files on Databricks, and messages about topics; no Spark runs."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from lookback import cli
from lookback.core.errors import SetupError
from lookback.core.streams.declaration import Stream
from lookback.core.streams.source_keys import KAFKA_KEYS
from lookback.spark.ingest.fields import BESIDE, reads_kafka
from lookback.spark.ingest.files import ingest, retry_rejected
from lookback.spark.ingest.kafka import DEFAULT_BATCH_RECORDS, Topic, require_kafka
from lookback.spark.ingest.kafka_faults import BrokersAway, explain_kafka_failure
from lookback.spark.ingest.sources import Source
from lookback.spark.ingest.topics import TopicIngest, is_reachable, read_checkpoint_topics
from lookback.spark.platform.secrets import Secrets, find_plain_secrets
from lookback.spark.tables.lakehouse import Tables

HOW_TO = Path(__file__).parents[2] / "docs/how-to"
FIELDS = {"id": "string", "at": "timestamp"}
KAFKA = {"format": "kafka", "servers": "one:9092, two:9093", "topic": "payments"}


def stream(**source: Any) -> Stream:
    return Stream.from_dict(
        {"stream": "events", "event_id": "id", "event_time": "at", "fields": FIELDS, "source": source}
    )


# Auto Loader ---------------------------------------------------------------------------------------------------------


class Recorder:
    """Stands for Spark's reader: every call is noted and gives the reader again."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Recorder:
            self.calls.append((name, options or (arguments[0] if arguments else None)))
            return self

        return call


def test_on_databricks_auto_loader_finds_the_files_and_reads_none_of_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "17.3")
    given = {
        "sep": ";", "pathGlobFilter": "*.csv", "maxFilesPerTrigger": "100", "cloudFiles.useManagedFileEvents": "true",
        "cloudFiles.format": "csv", "cloudFiles.allowOverwrites": "true", "cloudFiles.includeExistingFiles": "false",
    }  # fmt: skip
    reader = Recorder()
    Source("/Volumes/main/lake/in", "csv", given).watch(SimpleNamespace(readStream=reader))  # type: ignore[arg-type]

    assert reader.calls == [
        ("format", "cloudFiles"),
        ("schema", "path string, modificationTime timestamp, length bigint, content binary"),
        (
            "options",
            {
                "cloudFiles.format": "binaryFile",
                "cloudFiles.includeExistingFiles": "false",
                "cloudFiles.allowOverwrites": "false",
                "cloudFiles.useManagedFileEvents": "true",
                "cloudFiles.maxFilesPerTrigger": "100",
                "pathGlobFilter": "*.csv",
                "ignoreMissingFiles": "true",
            },
        ),
        ("load", "/Volumes/main/lake/in"),
        ("select", "_metadata.file_path"),
    ]


def test_elsewhere_a_plain_file_stream_does_and_knows_nothing_of_auto_loader(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("DATABRICKS_RUNTIME_VERSION", raising=False)
    reader = Recorder()
    monkeypatch.setattr(Source, "list_files", lambda *_: ["in/a.csv"])
    given = {"maxFilesPerTrigger": "100", "cloudFiles.useManagedFileEvents": "true"}
    Source("in", "csv", given).watch(SimpleNamespace(readStream=reader))  # type: ignore[arg-type]

    assert reader.calls[0] == ("format", "binaryFile")
    assert reader.calls[2] == (
        "options", {"maxFileAge": "36500d", "maxFilesPerTrigger": "100", "ignoreMissingFiles": "true"}
    )  # fmt: skip


@pytest.mark.parametrize(
    ("path", "name", "options", "meant"),
    [
        ("/Volumes/c/s/in", "dbfs:/Volumes/c/s/in/a.csv", {}, True),
        ("/Volumes/c/s/in/", "dbfs:/Volumes/c/s/in/day=2026-01-31/hour=7/a.csv", {}, True),
        ("/Volumes/c/s/in", "dbfs:/Volumes/c/s/in/old/a.csv", {}, False),
        ("/Volumes/c/s/in", "dbfs:/Volumes/c/s/in/old/a.csv", {"RecursiveFileLookup": "True"}, True),
        ("/Volumes/c/s/in", "dbfs:/Volumes/c/s/in/_SUCCESS", {}, False),
        ("s3://bucket/in", "s3://bucket/in/old/a%20b.csv", {}, False),
        ("/Volumes/c/s/*/in", "dbfs:/Volumes/c/s/x/in/old/a.csv", {}, True),
        ("/data/in", "file:/data/in/a.csv", {}, True),
    ],
)
def test_what_auto_loader_finds_and_a_batch_read_does_not_take_is_left_out(
    path: str, name: str, options: dict[str, str], meant: bool
):
    assert Source(path, "csv", options).covers(name) is meant


# Kafka ---------------------------------------------------------------------------------------------------------------


def test_a_topic_is_what_its_declaration_says():
    declared = stream(**KAFKA, options={"maxOffsetsPerTrigger": 7, "startingOffsets": {"payments": {"0": 5}}})
    topic = Topic.of(declared)

    assert reads_kafka(declared)
    assert (topic.servers, topic.subscription) == ("one:9092,two:9093", ("subscribe", "payments"))
    assert topic.options == {"maxOffsetsPerTrigger": "7", "startingOffsets": '{"payments": {"0": 5}}'}
    assert Topic.of(stream(**{**KAFKA, "topic": ["a", "b"]})).subscription == ("subscribe", "a,b")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"servers": "broker"}, "servers must be host:port, or several separated by commas, got 'broker'"),
        ({"topic": None}, "either `topic` (a name or a list of names) or `pattern` is required"),
        ({"pattern": "x.*"}, "either `topic` (a name or a list of names) or `pattern` is required"),
        ({"topic": "a/b"}, "got 'a/b'"),
        ({"value": "avro"}, "value must be json or csv, got 'avro'"),
        ({"value": "csv"}, "CSV values need `fields`"),
        ({"fields": ["id"]}, "JSON values do not"),
        ({"options": {"maxOffsetPerTrigger": 5}}, "did you mean 'maxOffsetsPerTrigger'?"),
        ({"options": {"kafka.bootstrap.servers": "x:1"}}, "set by Lookback; use `servers`"),
        ({"options": {"kafka.ssl.keystore.password": "hush"}}, "write ${env:NAME}"),
        ({"options": {"kafka.sasl.jaas.config": 'x required password="hush";'}}, "${secret:SCOPE/KEY}"),
    ],
)
def test_a_wrong_declaration_is_refused_in_words_that_hold_no_secret(changes: dict[str, Any], said: str):
    with pytest.raises(SetupError) as refused:
        Topic.of(stream(**{**KAFKA, **changes}))
    assert said in str(refused.value)
    assert "hush" not in str(refused.value)


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(SetupError) as refused:
        Topic.of(stream(format="kafka", topic="a b", value="xml", options={"x": 1}))
    assert str(refused.value).count("; ") >= 3


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"kafka.ssl.truststore.password": "${env:TRUST}"}, []),
        ({"kafka.sasl.jaas.config": 'X required username="u" password="${secret:a/b}";'}, []),
        ({"kafka.sasl.jaas.config": "Krb5LoginModule required useKeyTab=true keyTab='/etc/k';"}, []),
        ({"kafka.sasl.jaas.config": 'X required clientId="u" clientSecret="abc";'}, ["kafka.sasl.jaas.config"]),
        ({"kafka.ssl.keystore.key": "-----BEGIN"}, ["kafka.ssl.keystore.key"]),
    ],
)
def test_secrets_that_stand_in_the_file_are_found(options: dict[str, str], names: list[str]):
    assert find_plain_secrets(options) == names


def test_secrets_take_the_place_of_their_references_and_are_hidden(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PASSWORD", 'a"b\\c')
    secrets = Secrets()

    assert secrets.resolve("${env:PASSWORD}", "here") == 'a"b\\c'
    assert secrets.resolve('password="${env:PASSWORD}"', "here") == 'password="a\\"b\\\\c"'
    assert secrets.hide('it said a"b\\c and a\\"b\\\\c') == "it said *** and ***"
    assert "PASSWORD" not in repr(secrets)
    assert 'a"b' not in repr(secrets)


def test_secrets_of_the_workspace_are_read_there_alone(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(SetupError, match="available only on Databricks; here use"):
        Secrets().resolve("${secret:lake/kafka}", "options.x")
    asked: list[Any] = []
    module = ModuleType("pyspark.dbutils")
    held = SimpleNamespace(get=lambda scope, key: asked.append((scope, key)) or "found")
    module.DBUtils = lambda spark: SimpleNamespace(secrets=held)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pyspark.dbutils", module)

    assert Secrets().resolve("${secret:lake/kafka}", "options.x") == "found"
    assert asked == [("lake", "kafka")]
    with pytest.raises(SetupError, match=r"options.x: write a secret of the workspace as \$\{secret:SCOPE/KEY\}"):
        Secrets().resolve("${secret:lake}", "options.x")


def test_on_databricks_nothing_is_fetched(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "17.3")
    monkeypatch.setattr("lookback.spark.ingest.kafka.fetch_kafka_jars", lambda: 1 / 0)
    require_kafka(SimpleNamespace())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            (
                "[KAFKA_DATA_LOSS.COULD_NOT_READ_OFFSET_RANGE] Some data may have been lost ... Could not read records in offset "
                "[5, 15) for topic partition p-0\nwith consumer group spark-kafka-source-1."
            ),
            "the next records of partition p-0 are those from offset 5 up to 15, but at least the first",
        ),
        (
            (
                "[KAFKA_DATA_LOSS.PARTITION_OFFSET_CHANGED] Some data may have been lost ... Partition p-0 offset was changed "
                "from 5 to 2.\nThis could either"
            ),
            "partition p-0 was read up to offset 5 and now ends at 2",
        ),
        (
            "failOnDataLoss: Partition p-0's offset was changed from 5 to 2, some data",
            "up to offset 5 and now ends at 2",
        ),
        (
            "[KAFKA_DATA_LOSS.ADDED_PARTITION_DOES_NOT_START_FROM_OFFSET_ZERO] Added partition p-3 starts from 12 instead of 0.",
            "the first 12 records of the new partition p-3",
        ),
        (
            "[KAFKA_DATA_LOSS.PARTITIONS_DELETED] Reason: Partitions p-0, p-1 have been deleted.",
            "the topic no longer has partitions p-0, p-1, which were read before: it was deleted. Begin with another",
        ),
        (
            "UnknownTopicOrPartitionException: This server does not host this topic-partition.",
            "the topic does not exist",
        ),
        (
            "org.apache.kafka.common.errors.SaslAuthenticationException: Authentication failed: Invalid username",
            "the brokers refuse access (SaslAuthenticationException: Authentication failed: Invalid username)",
        ),
        (
            "TopicAuthorizationException: Not authorized to access topics: [payments]",
            "refuse access (TopicAuthorizationException",
        ),
        ("org.apache.kafka.common.config.ConfigException: Invalid value 7 for configuration x", "Invalid value 7"),
    ],
)
def test_what_spark_says_of_a_topic_is_put_in_words(text: str, said: str):
    declared = stream(**KAFKA)
    told = explain_kafka_failure(RuntimeError(text), Topic.of(declared), declared, "/checkpoint")
    assert isinstance(told, SetupError)
    assert "topic payments at one:9092,two:9093: " in str(told)
    assert said in str(told)


def test_a_checkpoint_of_another_topic_is_refused_before_anything_is_written(tmp_path: Path):
    offsets = tmp_path / "checkpoint" / "offsets"
    offsets.mkdir(parents=True)
    (offsets / "9").write_text('v1\n{"batchWatermarkMs":0}\n{"orders":{"0":5}}')
    (offsets / "10").write_text('v1\n{"batchWatermarkMs":0}\n{"payments":{"0":5},"orders":{"0":7}}')
    (offsets / ".10.crc").write_bytes(b"crc")
    assert read_checkpoint_topics(offsets.parent) == {"payments", "orders"}
    assert read_checkpoint_topics(tmp_path / "none") == set()
    run = TopicIngest(Tables.local(cast(Any, None), tmp_path), stream(**KAFKA), offsets.parent)
    with pytest.raises(
        SetupError, match=r"is of topic orders, but stream 'events' now reads payments\. Begin with another"
    ):
        run.run()


@pytest.mark.parametrize(
    "text",
    [
        "org.apache.kafka.common.errors.TimeoutException: Timed out waiting for a node assignment. Call: describeTopics",
        "java.util.concurrent.TimeoutException: Cannot fetch record for offset 7 in 120000 milliseconds",
        "org.apache.kafka.common.config.ConfigException: No resolvable bootstrap urls given in bootstrap.servers",
    ],
)
def test_a_broker_that_is_away_is_tried_again(text: str):
    declared = stream(**KAFKA)
    assert isinstance(
        explain_kafka_failure(RuntimeError(text), Topic.of(declared), declared, "/checkpoint"), BrokersAway
    )


def test_another_error_stays_what_it_is():
    declared, error = stream(**KAFKA), RuntimeError("something else")
    assert explain_kafka_failure(error, Topic.of(declared), declared, "/checkpoint") is error


def test_no_broker_answers_where_none_is():
    assert not is_reachable("127.0.0.1:9,[::1]:9")


def test_what_only_topics_have_is_refused_for_files(capsys: pytest.CaptureFixture[str]):
    conf = str(Path(__file__).parents[2] / "conf")
    assert cli.main(["--conf", conf, "ingest", "items", "--skip-lost"]) == 2
    assert "--skip-lost is for Kafka topics, and stream 'items' reads files" in capsys.readouterr().err


def test_files_of_a_topic_have_to_be_named():
    with pytest.raises(SetupError, match="reads a Kafka topic"):
        ingest(SimpleNamespace(spark=None, root="/nowhere"), stream(**KAFKA))  # type: ignore[arg-type]


# A table that others write -------------------------------------------------------------------------------------------


def test_nothing_is_ingested_into_a_table_that_others_write():
    declared = Stream.from_dict(
        {"stream": "orders", "event_id": "id", "event_time": "at", "fields": FIELDS, "table": "main.sales.orders"}
    )
    tables: Any = SimpleNamespace(root="/nowhere", spark=None)
    for take in (
        lambda: ingest(tables, declared, Path("x.csv")),
        lambda: retry_rejected(tables, declared),
        lambda: TopicIngest(tables, declared),
    ):
        with pytest.raises(
            SetupError, match=r"are in main\.sales\.orders, which another program writes; you cannot ingest"
        ):
            take()


def test_declarations_of_the_guide_are_fine():
    page = "".join(
        (HOW_TO / f"{name}.md").read_text(encoding="utf-8")
        for name in ("ingest-files", "kafka", "look-ups", "external-tables")
    )
    blocks = re.findall(r"^```yaml stream\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    streams = [Stream.from_dict(yaml.safe_load(block)) for block in blocks]
    assert [declared.name for declared in streams] == [
        "card_payments",
        "readings_by_line",
        "secured",
        "purchases",
        "orders",
    ]
    topics = [Topic.of(declared) for declared in streams if reads_kafka(declared)]
    assert len(topics) == 3
    assert not any("${" in text for topic in topics[:2] for text in topic.options.values())


def test_the_guide_has_every_key_and_column_of_a_topic():
    page = (HOW_TO / "kafka.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+)`", page))
    assert {*KAFKA_KEYS} - {"format"} <= named
    assert {*BESIDE} <= named
    assert f"{DEFAULT_BATCH_RECORDS:,}" in page
