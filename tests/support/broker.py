"""A real Kafka broker on this machine, for tests: one KRaft node in a folder, with ports of its own."""

from __future__ import annotations

import base64
import ctypes
import gc
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pyspark

from lookback.core.errors import SetupError
from lookback.spark.ingest.topics import is_reachable
from lookback.spark.platform.jars import Artifacts, fetch_kafka_jars

with warnings.catch_warnings():
    # It reads its own files in a way that newer Pythons warn of.
    warnings.simplefilter("ignore", DeprecationWarning)
    from kafka import KafkaAdminClient, KafkaProducer, TopicPartition

BROKER = Artifacts(
    "kafka-broker-4.1.0", (("org.apache.kafka", "kafka_2.13", "4.1.0"), ("org.slf4j", "slf4j-simple", "1.7.36"))
)
USER, PASSWORD = "lookback", 'it\'s "secret" \\ 7'
LARGEST = 16 * 2**20
_START_SECONDS = 90
_PROPERTIES = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
controller.listener.names=CONTROLLER
listeners=PLAINTEXT://127.0.0.1:{port},SASL://127.0.0.1:{sasl},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port},SASL://127.0.0.1:{sasl}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,SASL:SASL_PLAINTEXT,CONTROLLER:PLAINTEXT
inter.broker.listener.name=PLAINTEXT
sasl.enabled.mechanisms=PLAIN
listener.name.sasl.plain.sasl.jaas.config=\
org.apache.kafka.common.security.plain.PlainLoginModule required user_{user}="{password}";
log.dirs={folder}/logs
auto.create.topics.enable=false
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
message.max.bytes={largest}
group.initial.rebalance.delay.ms=0
log.cleaner.backoff.ms=200
log.initial.task.delay.ms=100
log.retention.check.interval.ms=500
"""


class Broker:
    """Started with `start`, ended with `kill`, started again on the same port and folder with `start`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._port, self._sasl, controller = free_ports(3)
        self.servers, self.sasl_servers = f"127.0.0.1:{self._port}", f"127.0.0.1:{self._sasl}"
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self._config = folder / "server.properties"
        # Escaped once for JAAS and once more for the file of properties.
        password = PASSWORD.replace("\\", "\\\\").replace('"', '\\"').replace("\\", "\\\\")
        text = _PROPERTIES.format(
            port=self._port, sasl=self._sasl, controller=controller, folder=folder, user=USER, password=password,
            largest=LARGEST,
        )  # fmt: skip
        self._config.write_text(text, encoding="utf-8")
        identity = base64.urlsafe_b64encode(os.urandom(16)).decode().rstrip("=").replace("-", "a")
        self._java("kafka.tools.StorageTool", "format", "-t", identity, "-c", str(self._config)).wait(60)

    def start(self) -> None:
        self._process = self._java("kafka.Kafka", str(self._config))
        deadline = time.monotonic() + _START_SECONDS
        while True:
            assert self._process.poll() is None, (self.folder / "broker.log").read_text()[-3_000:]
            assert time.monotonic() < deadline, f"no broker in {_START_SECONDS} s"
            try:
                if is_reachable(self.servers):
                    self.admin().close()
                    return
            except Exception:  # noqa: BLE001 - it is not there yet, in whatever way
                pass
            time.sleep(0.2)
            with warnings.catch_warnings():
                # A client that finds no broker leaves its sockets open.
                warnings.simplefilter("ignore", ResourceWarning)
                gc.collect()

    def kill(self) -> None:
        """Ends it at once, as a machine that dies does."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def remove(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def admin(self) -> Any:
        return KafkaAdminClient(bootstrap_servers=self.servers, request_timeout_ms=10_000)

    def create(self, topic: str, partitions: int = 1, **settings: str) -> str:
        """A new topic; its name. settings: with _ in place of dots."""
        configs = {"max.message.bytes": str(LARGEST), **{n.replace("_", "."): v for n, v in settings.items()}}
        admin = self.admin()
        try:
            admin.create_topics({topic: {"num_partitions": partitions, "replication_factor": 1, "configs": configs}})
        finally:
            admin.close()
        return topic

    def delete_before(self, topic: str, offset: int) -> None:
        """Deletes the records of partition 0 before the offset, as retention does."""
        admin = self.admin()
        try:
            admin.delete_records({TopicPartition(topic, 0): offset})
        finally:
            admin.close()

    def produce(self, topic: str, records: list[Any]) -> None:
        """Writes records in order: a value (text, bytes, None), or a dict of value, key, headers, partition, timestamp_ms."""
        producer = KafkaProducer(bootstrap_servers=self.servers, max_request_size=LARGEST, acks="all", linger_ms=5)
        try:
            sent = [producer.send(topic, **_record(record)) for record in records]
            producer.flush(60)
            for each in sent:
                each.get(60)
        finally:
            producer.close(10)

    def _java(self, *arguments: str) -> subprocess.Popen[bytes]:
        # Spark's resolver leaves out Scala, which Spark has.
        scala = (Path(pyspark.__file__).parent / "jars").glob("scala-library-*.jar")
        jars = os.pathsep.join(map(str, [*BROKER.fetch(), *scala]))
        home = os.environ.get("JAVA_HOME")
        java = str(Path(home, "bin", "java")) if home else "java"
        flags = ["-Xmx320m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]
        with (self.folder / "broker.log").open("ab") as log:
            return subprocess.Popen(
                [java, *flags, "-cp", jars, *arguments],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder, preexec_fn=_end_with_the_tests,  # noqa: PLW1509 - it calls the kernel alone
            )  # fmt: skip


def prefetch() -> None:
    """Fetches the JARs of the broker and of Spark's Kafka source, once; says what is missing where that fails."""
    try:
        fetch_kafka_jars(quiet=False)
        BROKER.fetch(quiet=False)
    except SetupError as error:
        sys.exit(str(error))


def _end_with_the_tests() -> None:
    """On Linux the broker is killed when the process of the tests is gone, however that ended."""
    if hasattr(ctypes.CDLL(None), "prctl"):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _record(record: Any) -> dict[str, Any]:
    if not isinstance(record, dict):
        record = {"value": record}
    return {name: each.encode() if isinstance(each, str) else each for name, each in record.items()}


def free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


if __name__ == "__main__":
    prefetch()
