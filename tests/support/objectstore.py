"""An S3 server on this machine, for tests, and the JARs by which Spark reaches it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from broker import free_ports
from lookback.core.errors import SetupError
from lookback.spark.platform.jars import PROVIDED, Artifacts, fetch_session_jars

# hadoop-aws is of the Hadoop that pyspark 4.2.0 has. Its bundle of the AWS SDK is 600 MB; these parts of it are 13.
_HADOOP, _SDK = "3.5.0", "2.35.4"
S3 = Artifacts(
    f"hadoop-aws-{_HADOOP}",
    (
        ("org.apache.hadoop", "hadoop-aws", _HADOOP),
        *(("software.amazon.awssdk", part, _SDK) for part in ("s3", "s3-transfer-manager", "sts")),
    ),
    # Spark has Netty and Apache's HTTP client.
    r"(org\.apache\.hadoop|software\.amazon|org\.wildfly|org\.reactivestreams)[\w.]*_.+\.jar",
    (*PROVIDED, "software.amazon.awssdk:bundle"),
)
# It has a venv of its own, as botocore takes an older dateutil than the one that is locked.
MOTO = Path(os.environ.get("LOOKBACK_MOTO") or Path(sys.prefix, "objectstore/bin/python"))
INSTALL = "run `make test-objectstore`, which installs moto and fetches hadoop-aws"
_START_SECONDS = 60
# Spark's settings for a command that works on a few rows in a bucket.
SMALL = {
    "spark.driver.memory": "2g",
    "spark.master": "local[2]",
    "spark.driver.defaultJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


class S3Server:
    """Moto's S3, which keeps buckets in memory.

    Attributes:
        address: Where it is reached, `http://127.0.0.1:PORT`.
        settings: Spark's settings for reaching it.
    """

    def __init__(self, folder: Path) -> None:
        (port,) = free_ports(1)
        self.address = f"http://127.0.0.1:{port}"
        self._log = (folder / "moto.log").open("wb")
        self._process = subprocess.Popen(
            [MOTO, Path(__file__).with_name("s3server.py"), str(port)],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            cwd=folder,
        )
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                with socket.create_connection(("127.0.0.1", port), 1):
                    break
            except OSError:
                assert self._process.poll() is None, (folder / "moto.log").read_text()
                assert time.monotonic() < deadline, f"no S3 server in {_START_SECONDS} s"
                time.sleep(0.1)
        jars = [*fetch_session_jars(), *S3.fetch()]
        self.settings = {
            "spark.jars": ",".join(map(str, jars)),
            "spark.hadoop.fs.s3a.endpoint": self.address,
            "spark.hadoop.fs.s3a.endpoint.region": "us-east-1",
            "spark.hadoop.fs.s3a.access.key": "test",
            "spark.hadoop.fs.s3a.secret.key": "test",
            "spark.hadoop.fs.s3a.path.style.access": "true",
        }

    @property
    def process_id(self) -> int:
        """The number of its process."""
        return self._process.pid

    def make_bucket(self, name: str) -> None:
        self._request("PUT", name)

    def set_weather(self, delay: float = 0.0, failures: Sequence[Mapping[str, Any]] = ()) -> None:
        """Sets the seconds that each request takes, and what fails: see `s3server.Failure`."""
        self._request("PUT", "-/weather", json.dumps({"delay": delay, "failures": list(failures)}).encode())

    @contextmanager
    def count_requests(self) -> Iterator[dict[str, int]]:
        """Counts requests by what they do to what, such as `list log of alerts`; they are there when the block ends."""
        counts: dict[str, int] = {}
        self._request("DELETE", "-/requests")
        yield counts
        counts.update(self.read_counts()["counts"])

    @contextmanager
    def count_requests_of_batches(self) -> Iterator[list[dict[str, int]]]:
        """Counts the requests of each micro-batch that begins in the block, as `count_requests` does."""
        batches: list[dict[str, int]] = []
        self._request("DELETE", "-/requests")
        yield batches
        batches += self.read_counts()["batches"]

    def read_counts(self) -> dict[str, Any]:
        """Returns the `counts` since the last one, those of each of the `batches`, and the `bytes` written, by kind."""
        found: dict[str, Any] = json.loads(self._request("GET", "-/requests"))
        return found

    def read_commit_times(self, table: str) -> dict[int, float]:
        """Returns when each commit of a table was there, in seconds since 1970. `table` is its bucket and folder."""
        commits = json.loads(self._request("GET", "-/commits")).items()
        return {int(Path(key).stem): at for key, at in commits if key.startswith(f"/{table}/_delta_log/")}

    def _request(self, method: str, path: str, body: bytes | None = None) -> bytes:
        request = urllib.request.Request(f"{self.address}/{path}", body, method=method)
        with urllib.request.urlopen(request) as answer:
            content: bytes = answer.read()
        return content

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()


def find_missing() -> str | None:
    """Returns a sentence on what is missing for these tests, with the command that installs it; None if all is there."""
    if not MOTO.exists():
        return f"moto, an S3 server for tests, is not in {MOTO}: {INSTALL}"
    try:
        S3.fetch()
    except SetupError as error:
        return f"{error}\n{INSTALL}"
    return None


def prefetch() -> None:
    """Fetches the JARs once; says what is missing where that fails."""
    try:
        S3.fetch(quiet=False)
    except SetupError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    prefetch()
