"""Tables in the bucket of an S3 server, with events in many small commits, and the commands that work on them."""

from __future__ import annotations

import datetime as dt
import json
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import yaml

from dev.bench.producer import append
from lookback.cli import main
from lookback.places import ObjectPath, parse_place
from objectstore import SMALL, S3Server

STREAM = {
    "stream": "pay", "event_id": "id", "event_time": "at", "max_out_of_orderness": "10 seconds",
    "fields": {"id": "int", "at": "timestamp", "card": "string", "amount": "int"},
}  # fmt: skip
SPARK = {
    **SMALL,
    # Spark removes what is older than these batches: it does so in the early batches too.
    "spark.sql.streaming.minBatchesToRetain": "5",
}


@dataclass
class BucketTables:
    """Tables in the bucket, with events in commits of two rows.

    Attributes:
        server: The S3 server.
        name: The folder in the bucket.
        conf: The folder of the settings.
        commits: The last commit of the events.
    """

    server: S3Server
    name: str
    conf: Path
    commits: int = 0

    @classmethod
    def make(cls, server: S3Server, folder: Path, rules: int) -> BucketTables:
        """Makes the tables and publishes so many rules, each of which alerts at every event."""
        (folder / "streams").mkdir(parents=True)
        (folder / "streams/pay.yml").write_text(yaml.safe_dump(STREAM))
        tables = cls(server, folder.name, folder)
        tables.admit(files=1)
        for number in range(rules):
            rule = {
                "rule_id": f"rule{number}", "stream": "pay", "group_by": ["card"], "window": "1 hour",
                "measures": {"total": "sum(amount)"}, "when": f"total > {number / 1000}", "message": "{total}",
            }  # fmt: skip
            (folder / f"rule{number}.yml").write_text(yaml.safe_dump(rule))
        tables.run("init")
        tables.run("rules", "push", *(str(folder / f"rule{number}.yml") for number in range(rules)))
        return tables

    def admit(self, files: int) -> None:
        """Lets a batch take so many commits of events."""
        spark = {**self.server.settings, **SPARK}
        settings = {"spark": spark, "admission": {"maxFilesPerTrigger": str(files)}}
        (self.conf / "settings.yml").write_text(yaml.safe_dump(settings))

    def run(self, *words: str) -> None:
        """Runs a command."""
        assert main([*self.options, *words]) == 0

    @property
    def options(self) -> list[str]:
        """The place and the settings, as options of a command."""
        return ["--root", str(self.root), "--conf", str(self.conf)]

    @property
    def root(self) -> ObjectPath:
        """The folder of the tables."""
        settings = {name.removeprefix("spark.hadoop."): value for name, value in self.server.settings.items()}
        place = parse_place(f"s3a://bucket/{self.name}")
        assert isinstance(place, ObjectPath)
        return replace(place, settings=tuple(settings.items()))

    def release(self) -> None:
        """Lets the next evaluation begin at once; it would watch for fifteen seconds whether a killed one still lives."""
        (self.root / "_checkpoints" / ".evaluate_pay.owner").write_text("")

    def require_each_alert_once(self, printed: str, rules: int) -> None:
        """Asserts that these lines of `alerts --json` are one alert of each of so many rules for each event."""
        rows = [json.loads(line) for line in printed.splitlines()]
        found = sorted((row["rule_id"], row["event_id"], row["revision"]) for row in rows)
        events = range(2, 2 * self.commits + 2)
        assert found == sorted((f"rule{rule}", str(event), 0) for rule in range(rules) for event in events)

    def append(self, commits: int) -> None:
        """Appends commits of two events."""
        for version in range(self.commits + 1, self.commits + commits + 1):
            now = dt.datetime.now(dt.timezone.utc)
            rows = {
                "id": pa.array([2 * version, 2 * version + 1], pa.int32()),
                "at": pa.array([now, now], pa.timestamp("us", tz="UTC")),
                "card": [f"c{version % 4}", "c9"],
                "amount": pa.array([1, 2], pa.int32()),
                "ingested_at": pa.array([now, now], pa.timestamp("us", tz="UTC")),
            }
            append(self.root / "pay", version, pa.table(rows))
        self.commits += commits
