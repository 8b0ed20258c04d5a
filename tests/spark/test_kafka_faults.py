"""A topic under faults: ingest killed, brokers away, records deleted before they were read, old ones compacted."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from lookback.core.errors import SetupError
from lookback.core.streams.declaration import Stream
from lookback.spark.ingest.topics import TopicIngest

if TYPE_CHECKING:
    from broker import Broker
    from lookback.spark.tables.lakehouse import Tables

pytestmark = [pytest.mark.spark, pytest.mark.long]
FIELDS = {"id": "string", "at": "timestamp"}


def stream(broker: Broker, topic: str, **source: Any) -> Stream:
    document = {
        "stream": "events", "event_id": "id", "event_time": "at", "fields": FIELDS, "commit_rows": 100,
        "source": {"format": "kafka", "servers": broker.servers, "topic": topic, **source},
    }  # fmt: skip
    return Stream.from_dict(document)


def events(first: int, last: int) -> list[dict[str, Any]]:
    """Each with a key; every tenth cannot be read."""
    return [
        {"key": f"k{n}", "value": json.dumps({"id": f"e{n:05d}", "at": "x" if n % 10 == 9 else 1_709_510_400 + n})}
        for n in range(first, last)
    ]


COLUMNS = {"at": "timestamp_seconds(cast(at as bigint))"}


def ids(tables: Tables) -> list[str]:
    return sorted(row["id"] for row in tables.read("events").select("id").collect())


def good(first: int, last: int) -> list[str]:
    return [f"e{n:05d}" for n in range(first, last) if n % 10 != 9]


def until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def declared_with(broker: Broker, topic: str, **source: Any) -> Stream:
    return Stream.from_dict({**stream(broker, topic, **source).to_dict(), "columns": COLUMNS})


def test_killed_in_the_middle_again_and_again_every_record_is_there_once(
    tables: Tables, broker: Broker, tmp_path: Path
):
    topic = broker.create("killed", 3)
    declared = declared_with(broker, topic, options={"maxOffsetsPerTrigger": 900})
    conf = tmp_path / "conf"
    (conf / "streams").mkdir(parents=True)
    (conf / "streams/events.yml").write_text(yaml.safe_dump(declared.to_dict()))
    spark = {"spark.driver.memory": "1g", "spark.driver.defaultJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
    (conf / "settings.yml").write_text(yaml.safe_dump({"spark": spark}))
    command = [
        sys.executable,
        "-m",
        "lookback.cli",
        "--root",
        str(tables.root),
        "--conf",
        str(conf),
        "ingest",
        "events",
    ]
    log = Path(str(tables.root)) / "events" / "_delta_log"
    chance = random.Random(7)
    broker.produce(topic, events(0, 3_000))
    for _ in range(3):
        done = len(list(log.glob("*.json")))
        process = subprocess.Popen(
            [*command, "--every", "100 milliseconds"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            # A batch has nine commits: it is killed between two of them, or while it plans the next.
            until(lambda: len(list(log.glob("*.json"))) > done + 1, 120, "nothing was committed")  # noqa: B023
            assert process.poll() is None
            time.sleep(chance.random() * 2)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    last = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=240, check=False)
    assert last.returncode == 0, last.stderr
    report = json.loads(last.stdout)
    assert report["offered"] == report["ingested"] + report["duplicates"] + report["rejected"]

    assert ids(tables) == good(0, 3_000)
    rows = tables.read("rejected_events").select("source", "raw").collect()
    assert sorted(json.loads(row["raw"])["id"] for row in rows) == [f"e{n:05d}" for n in range(9, 3_000, 10)]
    assert len({row["source"] for row in rows}) == 300
    # In order within what was found together, however it was cut: commits of one file, at most commit_rows each.
    history = tables.delta("events").history().where("operation = 'WRITE'").collect()
    assert all(row["operationMetrics"]["numFiles"] == "1" for row in history)
    assert max(int(row["operationMetrics"]["numOutputRows"]) for row in history) == 100


def test_brokers_that_are_away_are_waited_for_and_it_is_said(
    tables: Tables, broker: Broker, caplog: pytest.LogCaptureFixture
):
    topic = broker.create("away")
    broker.produce(topic, events(0, 20))
    # Sooner than Kafka's minute, so that the query fails for want of a broker and is begun again.
    options = {"kafka.default.api.timeout.ms": 8_000, "kafka.request.timeout.ms": 4_000, "fetchOffset.numRetries": 1}
    declared = declared_with(broker, topic, options=options)
    caplog.set_level(logging.WARNING, "lookback")
    broker.kill()
    lines: list[str] = []
    run = TopicIngest(tables, declared, every="200 milliseconds", progress=lines.append)
    failure: list[BaseException] = []

    def guarded() -> None:
        try:
            run.run()
        except BaseException as error:  # noqa: BLE001 - told below
            failure.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    try:
        until(lambda: "waiting for" in caplog.text, 20, "nothing was said")
        broker.start()
        until(lambda: tables.exists("events") and ids(tables) == good(0, 20), 90, "it did not begin")
        until(lambda: "answers again" in caplog.text, 20, "it was not said that the broker is back")
        caplog.clear()

        broker.kill()
        until(lambda: "waiting for" in caplog.text, 90, "nothing was said of the second time")
        broker.start()
        broker.produce(topic, events(20, 40))
        until(lambda: ids(tables) == good(0, 40), 120, "it did not go on")
        assert not failure
    finally:
        run.request_stop()
        thread.join(60)
        if broker._process is None:
            broker.start()
    assert not thread.is_alive()
    assert not failure


def test_a_run_that_is_to_end_gives_up_in_words(tables: Tables, broker: Broker):
    declared = declared_with(broker, "any", servers="127.0.0.1:9")
    with pytest.raises(SetupError, match=r"no broker of topic any at 127.0.0.1:9 has answered for \d+ s"):
        TopicIngest(tables, declared, patience=2, progress=None).run()


def test_records_that_were_deleted_unread_are_named_and_skipped_only_when_asked(tables: Tables, broker: Broker):
    topic = broker.create("lost")
    broker.produce(topic, events(0, 5))
    declared = declared_with(broker, topic)
    assert TopicIngest(tables, declared, progress=None).run().ingested == 5
    broker.produce(topic, events(10, 20))
    broker.delete_before(topic, 8)

    with pytest.raises(SetupError) as told:
        TopicIngest(tables, declared, progress=None).run()
    assert "the next records of partition lost-0 are those from offset 5" in str(told.value)
    assert "lookback ingest events --skip-lost" in str(told.value)
    assert ids(tables) == good(0, 5)

    report = TopicIngest(tables, declared, skip_lost=True, progress=None).run()
    # Offsets 8 to 14 are left, the last of them cannot be read.
    assert (report.offered, report.ingested, report.rejected) == (7, 6, 1)
    assert ids(tables) == good(0, 5) + good(13, 20)


def test_a_topic_that_was_made_anew_is_told_from_the_old_one(tables: Tables, broker: Broker):
    topic = broker.create("anew")
    broker.produce(topic, events(0, 5))
    declared = declared_with(broker, topic)
    TopicIngest(tables, declared, progress=None).run()
    admin = broker.admin()
    admin.delete_topics([topic])
    until(lambda: topic not in admin.list_topics(), 30, "the topic stays")
    admin.close()
    broker.create(topic)
    broker.produce(topic, events(20, 22))

    with pytest.raises(SetupError, match="was read up to offset 5 and now ends at 2"):
        TopicIngest(tables, declared, progress=None).run()
    other = TopicIngest(tables, declared, f"{tables.root}/_checkpoints/other", progress=None)
    assert other.run().ingested == 2


def test_a_compacted_topic_is_read_over_its_gaps(tables: Tables, broker: Broker):
    topic = broker.create(
        "compacted", cleanup_policy="compact", segment_ms="100", min_cleanable_dirty_ratio="0.01",
        max_compaction_lag_ms="200", delete_retention_ms="100",
    )  # fmt: skip
    records = [{**record, "key": f"k{at % 3}"} for at, record in enumerate(events(0, 9))]
    for record in records:
        broker.produce(topic, [record])
        time.sleep(0.15)
    # The last segment is never compacted.
    broker.produce(topic, [{"key": "last", "value": events(10, 11)[0]["value"]}])
    sizes = Path(broker.folder) / "logs" / "compacted-0"
    until(
        lambda: any(p.stat().st_size for p in sizes.glob("*.log")) and len(list(sizes.glob("*.log"))) < 6,
        60,
        "no compaction",
    )
    declared = declared_with(broker, topic)

    report = TopicIngest(tables, declared, progress=None).run()

    assert report.balanced
    # Of each key the last is there for certain.
    assert set(ids(tables)) >= {"e00006", "e00007", "e00008", "e00010"}
    assert report.offered < 10
