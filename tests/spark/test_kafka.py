"""Ingest of a Kafka topic, from a real broker: as files are taken in, and each record once."""

from __future__ import annotations

import datetime as dt
import json
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F  # noqa: N812

from broker import PASSWORD, USER
from lookback.core.errors import SetupError
from lookback.core.streams.declaration import Stream
from lookback.spark.ingest.files import ingest, retry_rejected
from lookback.spark.ingest.kafka import Topic
from lookback.spark.ingest.report import IngestReport
from lookback.spark.ingest.topics import TopicIngest

if TYPE_CHECKING:
    from pathlib import Path

    from broker import Broker
    from lookback.spark.tables.lakehouse import Tables

pytestmark = pytest.mark.spark
AT = "2024-03-04T00:00:{:02d}Z"
FIELDS = {"id": "string", "at": "timestamp", "amount": "decimal(18,2)", "sender": "string", "trace": "string"}
COLUMNS = {"sender": "kafka_key", "trace": "kafka_headers['trace']"}


def stream(broker: Broker, topic: str, columns: dict[str, str] | None = None, **source: Any) -> Stream:
    document = {
        "stream": "events", "event_id": "id", "event_time": "at", "fields": FIELDS, "commit_rows": 4,
        "columns": COLUMNS if columns is None else columns,
        "source": {"format": "kafka", "servers": broker.servers, "topic": topic, **source},
    }  # fmt: skip
    return Stream.from_dict(document)


def event(number: int, **more: Any) -> str:
    return json.dumps({"id": f"e{number:02d}", "at": AT.format(number), **more})


def take(tables: Tables, declared: Stream, **options: Any) -> IngestReport:
    report = TopicIngest(tables, declared, progress=None, **options).run()
    assert report.balanced
    return report


def counts(report: IngestReport) -> tuple[int, int, int, int]:
    return report.offered, report.ingested, report.duplicates, report.rejected


def rejected(tables: Tables) -> dict[str, tuple[str | None, str]]:
    return {row["source"]: (row["raw"], row["reason"]) for row in tables.read("rejected_events").collect()}


@pytest.mark.long
def test_records_go_in_once_and_what_cannot_be_read_is_kept_with_its_place(tables: Tables, broker: Broker):
    topic = broker.create("mixed", 2)
    headers = [("trace", b"first"), ("trace", b"last"), ("other", b"\xff")]
    large = "x" * 3_000_000
    bad = event(9, amount="1,50")
    broker.produce(
        topic,
        [
            {"value": event(3), "partition": 0},
            {"value": event(1), "partition": 0, "key": "ann", "headers": headers},
            {"value": event(1, amount="7"), "partition": 1},
            {"value": event(2, note=large), "partition": 1},
            {"value": event(5), "partition": 0},
            {"value": event(4), "partition": 1},
            # What no event is, from offset 3 of both partitions on.
            {"value": None, "key": "ann", "partition": 0},
            {"value": b"\x00\x00\x00\x00\x07\xff\xfe", "partition": 0},
            {"value": '{"id": "e08", "at"', "partition": 0},
            {"value": bad, "key": "bob", "headers": [("trace", b"t9")], "partition": 1},
            {"value": "", "partition": 1},
            {"value": '[{"id": "e10"}]', "partition": 1},
        ],
    )
    declared = stream(broker, topic)

    report = take(tables, declared)

    assert counts(report) == (12, 5, 0, 7)
    assert (report.commits, report.first_version, report.last_version) == (2, 1, 2)
    feed = tables.read_changes("events", 0).orderBy("_commit_version", "at").collect()
    assert [(row["_commit_version"], row["id"]) for row in feed] == [
        (1, "e01"), (1, "e02"), (1, "e03"), (1, "e04"), (2, "e05"),
    ]  # fmt: skip
    # By partition and offset; a partition begins where the one before ends.
    assert {row["id"]: row["position"] for row in feed} == {"e03": 0, "e01": 1, "e05": 2, "e02": 7, "e04": 8}
    # Of two with one id and time the first of the lower partition stays.
    assert (feed[0]["sender"], feed[0]["trace"], feed[0]["amount"]) == ("ann", "last", None)
    found = rejected(tables)
    other, reason = found.pop("kafka:mixed/1/0")
    assert json.loads(other)["amount"] == 7
    assert reason.startswith("id: 'e01' is the id of an existing event, and this row differs from it")
    malformed = "the value is not one JSON object"
    assert found == {
        "kafka:mixed/0/3": (None, "the record has no value (a tombstone); a deletion is not an event"),
        "kafka:mixed/0/4": (
            "\0\0\0\0\7\ufffd\ufffd", "the value is not UTF-8 text; its first bytes are 00 00 00 00 07 FF FE",
        ),
        "kafka:mixed/0/5": ('{"id": "e08", "at"', malformed),
        "kafka:mixed/1/3": (
            bad,
            "amount: '1,50' is not decimal(18,2): write a decimal point, by columns: {amount: \"replace(amount, ',', '.')\"}",
        ),
        "kafka:mixed/1/4": ("", malformed),
        "kafka:mixed/1/5": ('[{"id": "e10"}]', malformed),
    }  # fmt: skip

    # Nothing is read twice, also not by a run without its checkpoint; what comes later is, from a new partition too.
    assert counts(take(tables, declared)) == (0, 0, 0, 0)
    again = take(tables, declared, checkpoint=f"{tables.root}/_checkpoints/other")
    assert counts(again) == (12, 0, 5, 7)
    assert len(rejected(tables)) == 7
    admin = broker.admin()
    admin.create_partitions({topic: 3})
    admin.close()
    broker.produce(topic, [{"value": event(6), "partition": 2}, {"value": event(5), "partition": 1}])
    assert counts(take(tables, declared)) == (2, 1, 1, 0)


@pytest.mark.long
def test_mended_records_go_in_by_their_raw_text_with_key_time_and_headers(tables: Tables, broker: Broker):
    topic = broker.create("mended")
    sent = 1_709_600_000_123
    records = [
        {"value": event(1, amount="1,50"), "key": "ann", "headers": [("trace", b"t1")], "timestamp_ms": sent},
        {"value": event(2, amount="2,50"), "key": "bob", "timestamp_ms": sent},
        {"value": '{"id": "cut"', "key": "cut"},
        {"value": None, "key": "gone"},
    ]
    broker.produce(topic, records)
    assert counts(take(tables, stream(broker, topic))) == (4, 0, 0, 4)
    by_value = {"amount": "replace(amount, ',', '.')"}
    # The time is the record's now, which the declaration did not ask for when it was rejected.
    mended = stream(broker, topic, columns={**COLUMNS, **by_value, "at": "kafka_timestamp"})
    tables.delta("rejected_events").update(F.col("raw") == '{"id": "cut"', {"raw": F.lit('{"id": "cut", "amount": 3}')})

    report = retry_rejected(tables, mended, progress=None)

    assert counts(report) == (3, 3, 0, 0)
    found = {row["id"]: row for row in tables.read("events").collect()}
    assert [(found[id_]["sender"], found[id_]["trace"]) for id_ in ("e01", "e02", "cut")] == [
        ("ann", "t1"), ("bob", None), ("cut", None),
    ]  # fmt: skip
    assert found["e01"]["amount"] == Decimal("1.50")
    at = dt.datetime.fromtimestamp(sent / 1_000, dt.timezone.utc)
    assert found["e01"]["at"].astimezone(dt.timezone.utc) == at
    # A tombstone stays, as nothing can be read of it.
    assert list(rejected(tables)) == ["kafka:mended/0/3"]


@pytest.mark.long
def test_lines_of_csv_and_several_topics_by_pattern_in_bounded_batches(tables: Tables, broker: Broker):
    for name in ("csv.a", "csv.b"):
        broker.create(name)
    broker.produce("csv.a", [f'e{n:02d};{AT.format(n)};"1;50"' for n in range(5)])
    broker.produce("csv.b", [f"e{n:02d};{AT.format(n)};2" for n in range(5, 9)] + ["short"])
    options = {"value": "csv", "fields": ["id", "at", "amount"], "value_options": {"sep": ";"}, "pattern": "csv[.].*"}
    columns = {"amount": "replace(amount, ';', '.')", "trace": "kafka_topic", "sender": "cast(kafka_offset as string)"}
    declared = stream(broker, "", columns=columns, **options, options={"maxOffsetsPerTrigger": 4})
    declared.source.pop("topic")  # type: ignore[attr-defined]
    batches: list[str] = []

    report = TopicIngest(tables, declared, progress=batches.append).run()

    assert counts(report) == (10, 9, 0, 1)
    # Ten records, at most four of them a batch, shared out between two partitions and rounded down.
    assert len(batches) >= 3
    rows = tables.read("events").orderBy("id").collect()
    assert [row["trace"] for row in rows] == ["csv.a"] * 5 + ["csv.b"] * 4
    assert [row["sender"] for row in rows] == ["0", "1", "2", "3", "4", "0", "1", "2", "3"]
    assert (rows[0]["amount"], rows[8]["amount"]) == (Decimal("1.50"), Decimal("2.00"))
    assert rejected(tables) == {"kafka:csv.b/0/4": ("short", "the value is not one line of CSV")}
    tables.delta("rejected_events").update(F.lit(True), {"raw": F.lit(f"e30;{AT.format(30)};3")})
    assert counts(retry_rejected(tables, declared, progress=None)) == (1, 1, 0, 0)


@pytest.mark.long
def test_secrets_come_from_the_environment_and_are_said_nowhere(
    tables: Tables, broker: Broker, monkeypatch: pytest.MonkeyPatch
):
    topic = broker.create("secured")
    broker.produce(topic, [event(1)])
    module = "org.apache.kafka.common.security.plain.PlainLoginModule"
    options = {
        "kafka.security.protocol": "SASL_PLAINTEXT",
        "kafka.sasl.mechanism": "PLAIN",
        "kafka.sasl.jaas.config": f'{module} required username="{USER}" password="${{env:KAFKA_PASSWORD}}";',
    }
    declared = stream(broker, topic, servers=broker.sasl_servers, options=options)

    monkeypatch.delenv("KAFKA_PASSWORD", raising=False)
    with pytest.raises(SetupError, match="environment variable KAFKA_PASSWORD, which is not set"):
        take(tables, declared)
    monkeypatch.setenv("KAFKA_PASSWORD", "wrong-password-7")
    with pytest.raises(SetupError, match=r"the brokers refuse access \(SaslAuthenticationException: .*\)") as refused:
        take(tables, declared)
    assert "wrong-password-7" not in str(refused.value)
    monkeypatch.setenv("KAFKA_PASSWORD", PASSWORD)
    assert counts(take(tables, declared)) == (1, 1, 0, 0)
    # Nothing of the declaration goes into the tables or the checkpoint.
    kept = [path for path in tables_files(tables) if path.suffix != ".parquet"]
    assert not [path for path in kept if b"secret" in path.read_bytes() or b"PlainLogin" in path.read_bytes()]


def tables_files(tables: Tables) -> list[Path]:
    from pathlib import Path

    return [path for path in Path(str(tables.root)).rglob("*") if path.is_file()]


@pytest.mark.long
def test_a_topic_that_is_not_there_is_said_in_words_and_files_beside_it_go_in(
    tables: Tables, broker: Broker, tmp_path: Path
):
    declared = stream(broker, "nowhere", options={"fetchOffset.numRetries": 1})
    with pytest.raises(SetupError, match=r"topic nowhere at 127.0.0.1:\d+: the topic does not exist"):
        take(tables, declared)

    file = tmp_path / "backfill.jsonl"
    file.write_text(event(1) + "\n", encoding="utf-8")
    assert counts(ingest(tables, declared, file, progress=None)) == (1, 1, 0, 0)


@pytest.mark.long
def test_the_topic_says_where_it_is(broker: Broker):
    assert str(Topic.of(stream(broker, "one"))) == f"topic one at {broker.servers}"
