"""Two processes that commit to one table in a bucket: of two commits of one version one fails, and none is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from py4j.protocol import Py4JJavaError

from commits import open_log_store, write
from lookback.cli import main
from lookback.places import ObjectPath, parse_place
from lookback.spark.platform.logstores import S3_JAR
from objectstore import S3Server

pytestmark = [pytest.mark.objectstore]
COMMITS = 500
APPENDS = 6
# S3A repeats a PUT without an answer. The first one may have succeeded.
LOST = {"kind": "lost", "rate": 0.03, "method": "PUT", "match": "_delta_log/0"}


def run_together(server: S3Server, commands: list[list[str]], folder: Path) -> list[str]:
    """Starts processes, lets them begin at the same moment, and returns the last line of each."""
    processes = []
    for number, words in enumerate(commands):
        with (folder / f"{number}.log").open("wb") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", *words],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env={"PYTHONPATH": ":".join(sys.path)},
                )
            )
    try:
        for each in processes:
            assert each.stdin is not None
            each.stdin.write(json.dumps({**server.settings, "spark.driver.memory": "1g"}) + "\n")
            each.stdin.flush()
        for number, each in enumerate(processes):
            assert each.stdout is not None
            assert each.stdout.readline() == "ready\n", (folder / f"{number}.log").read_text()
        for each in processes:
            assert each.stdin is not None
            each.stdin.write("go\n")
            each.stdin.flush()
        ends = [each.communicate()[0] for each in processes]
        assert [each.returncode for each in processes] == [0] * len(processes), [
            (folder / f"{number}.log").read_text()[-3000:] for number in range(len(processes))
        ]
        return [end.splitlines()[-1] for end in ends]
    finally:
        for each in processes:
            each.kill()


def find(server: S3Server, key: str) -> ObjectPath:
    settings = {name.removeprefix("spark.hadoop."): value for name, value in server.settings.items()}
    place = parse_place(f"s3a://{key}")
    assert isinstance(place, ObjectPath)
    return replace(place, settings=tuple(settings.items()))


def read(server: S3Server, key: str) -> bytes:
    return find(server, f"bucket/{key}").read_bytes()


@pytest.fixture
def stormy(server: S3Server) -> Iterator[None]:
    server.set_weather(failures=[LOST])
    yield
    server.set_weather()


@pytest.mark.usefixtures("stormy")
def test_c13_2_of_a_thousand_commits_at_the_same_moment_none_is_lost(server: S3Server, tmp_path: Path) -> None:
    commands = [["commits", "s3a://bucket/log/_delta_log", name, str(COMMITS)] for name in ("a", "b")]
    versions = [json.loads(line) for line in run_together(server, commands, tmp_path)]
    # A torn file is not JSON, and a lost commit is one that its writer believes it made.
    found = [json.loads(read(server, f"log/_delta_log/{version:020}.json")) for version in range(2 * COMMITS)]
    assert [[name, number] for name, number in found if name == "a"] == [["a", each] for each in range(COMMITS)]
    assert [[name, number] for name, number in found if name == "b"] == [["b", each] for each in range(COMMITS)]
    for name, made in zip("ab", versions, strict=True):
        assert [version for version, (writer, _) in enumerate(found) if writer == name] == made
    changes = sum(one != other for (one, _), (other, _) in pairwise(found))
    assert changes > COMMITS / 10, "they did not meet"


@pytest.mark.usefixtures("stormy")
def test_c13_2_two_sessions_append_to_one_table(server: S3Server, tmp_path: Path) -> None:
    commands = [["appends", "s3a://bucket/rows", "met", name, str(APPENDS)] for name in ("a", "b")]
    # The first commit makes the table. Of two that do so one conflicts, and both meet from version 0 on.
    assert run_together(server, commands, tmp_path) == ["done", "done"]
    commits = [read(server, f"rows/met/_delta_log/{version:020}.json") for version in range(2 * APPENDS)]
    actions = [[json.loads(line) for line in each.splitlines()] for each in commits]
    assert [sum("commitInfo" in action for action in each) for each in actions] == [1] * len(actions)
    assert len({action["commitInfo"]["txnId"] for each in actions for action in each if "commitInfo" in action}) == len(
        actions
    )
    files = [action["add"]["path"] for each in actions for action in each if "add" in action]
    assert len(files) == len(set(files)) == 2 * APPENDS
    rows = Counter(read_row(server, file) for file in files)
    assert rows == Counter({(name, number): 1 for name in "ab" for number in range(APPENDS)})


def read_row(server: S3Server, file: str) -> tuple[str, int]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (row,) = pq.read_table(pa.BufferReader(read(server, f"rows/met/{file}"))).to_pylist()
    return row["name"], row["number"]


def test_c13_2_a_large_commit_and_a_replaced_file(server: S3Server) -> None:
    small_parts = {"spark.hadoop.fs.s3a.multipart.size": "5M", "spark.hadoop.fs.s3a.multipart.threshold": "5M"}
    folder = "s3a://bucket/large/_delta_log"
    first = f"{folder}/{0:020}.json"
    # In parts, as a commit of very many files is.
    large = "x" * 11_000_000
    with open_log_store({**server.settings, **small_parts}) as store:
        with server.count_requests() as counts:
            assert write(*store, first, large)
        assert counts["post log of large"] == 2, counts
        assert not write(*store, first, "y" * 11_000_000)
        assert not write(*store, first, "z")
        assert read(server, f"large/_delta_log/{0:020}.json") == large.encode() + b"\n"
        for line in ("old", "new"):
            assert write(*store, f"{folder}/_last_checkpoint", line, overwrite=True)
    assert read(server, "large/_delta_log/_last_checkpoint") == b"new\n"


def list_log(opened: tuple[Any, Any, Any], folder: str, name: str) -> list[str]:
    jvm, store, conf = opened
    found = store.listFrom(jvm.org.apache.hadoop.fs.Path(f"{folder}/{name}"), conf)
    return [each.getPath().toString().removeprefix(f"{folder}/") for each in iter_java(found)]


def test_c13_3_a_log_is_listed_from_where_it_is_read(server: S3Server) -> None:
    folder = "s3a://bucket/listed/_delta_log"
    for version in range(1_100):
        find(server, f"bucket/listed/_delta_log/{version:020}.json").write_bytes(b"{}")
    with open_log_store(server.settings) as opened:
        with server.count_requests() as counts:
            assert list_log(opened, folder, f"{1_098:020}.json") == [f"{1_098:020}.json", f"{1_099:020}.json"]
        assert counts == {"list log of listed": 1}
        assert len(list_log(opened, folder, f"{0:020}.")) == 1_100
        assert list_log(opened, folder, f"{1_100:020}.") == []
        with pytest.raises(Py4JJavaError, match="No such file or directory"):
            list_log(opened, "s3a://bucket/nowhere/_delta_log", "0.json")
        # VACUUM lists data from the name NUL, and goes into the folders.
        for name in ("part-0.parquet", "_change_data/cdc-0.parquet"):
            find(server, f"bucket/listed/{name}").write_bytes(b"data")
        assert list_log(opened, "s3a://bucket/listed", "\0") == ["_change_data", "_delta_log", "part-0.parquet"]


def test_c13_3_a_stream_remembers_what_it_has_listed_of_a_log(server: S3Server) -> None:
    folder = "s3a://bucket/long/_delta_log"
    commits = [f"{version:020}.json" for version in range(1_103)]

    def commit(version: int, text: str) -> None:
        find(server, f"bucket/long/_delta_log/{commits[version]}").write_bytes(text.encode())

    for version in range(1_100):
        commit(version, f"first {version}")
    with open_log_store(server.settings) as reader:
        jvm, store, conf = reader

        def list_from(version: int, requests: int, age: str = "10m") -> list[str]:
            following = jvm.org.apache.hadoop.conf.Configuration(conf)
            following.set("fs.lookback.max.list.age", age)
            with server.count_requests() as counts:
                listed = list_log((jvm, store, following), folder, f"{version:020}.")
            assert counts.get("list log of long", 0) == requests
            return listed

        # All of them are two pages.
        assert list_from(0, 2) == commits[:1_100]
        commit(1_100, "by another writer")
        assert list_from(1_090, 0) == commits[1_090:1_100]
        # Who asks for what is new sees it, by one request.
        assert list_from(1_100, 1) == [commits[1_100]]
        assert list_from(1_090, 0) == commits[1_090:1_101]
        # So does a stream that did not ask for a while, also of the whole log.
        commit(1_101, "by another writer")
        assert list_from(7, 1, "1ns") == commits[7:1_102]
        # And who follows no log, and a stream that starts.
        commit(1_102, "by another writer")
        assert list_log(reader, folder, f"{1_090:020}.") == commits[1_090:1_103]
        assert list_from(1_090, 0) == commits[1_090:1_102]
        jvm.lookback.S3LogStore.forgetLists()
        assert list_from(1_090, 1) == commits[1_090:1_103]
        # Another table in its place.
        for version in range(1_103):
            find(server, f"bucket/long/_delta_log/{commits[version]}").unlink()
        for version in range(1_095):
            commit(version, f"second {version}")
        assert list_from(1_090, 2, "1ns") == commits[1_090:1_095]


def test_a_commit_that_could_not_be_read_ahead_is_read_when_it_is_asked_for(server: S3Server) -> None:
    folder = "s3a://bucket/ahead/_delta_log"
    once = {"spark.hadoop.fs.s3a.retry.limit": "0", "spark.hadoop.fs.s3a.attempts.maximum": "1"}
    for version in range(3):
        find(server, f"bucket/ahead/_delta_log/{version:020}.json").write_bytes(f"commit {version}".encode())
    with open_log_store({**server.settings, **once}) as (jvm, store, conf):

        def read_commit(version: int) -> list[str]:
            return list(iter_java(store.read(jvm.org.apache.hadoop.fs.Path(f"{folder}/{version:020}.json"), conf)))

        list_log((jvm, store, conf), folder, f"{0:020}.")
        server.set_weather(failures=[{"kind": "busy", "method": "GET", "match": f"{1:020}.json"}])
        try:
            assert read_commit(0) == ["commit 0"]
            # It may wait for the read ahead, so that has ended too.
            with pytest.raises(Py4JJavaError, match="reduce your request rate"):
                read_commit(1)
        finally:
            server.set_weather()
        assert [read_commit(version) for version in (1, 2)] == [["commit 1"], ["commit 2"]]


def iter_java(found: Any) -> Iterator[Any]:
    while found.hasNext():
        yield found.next()


def test_the_jar_is_compiled_from_the_source_beside_it(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    made = tmp_path / "made.jar"
    command = [sys.executable, str(root / "dev/tools/s3jar.py"), str(made)]
    subprocess.run(command, check=True, capture_output=True)
    assert made.read_bytes() == S3_JAR.read_bytes(), "run python dev/tools/s3jar.py"


@pytest.fixture
def conf_of(server: S3Server, tmp_path: Path) -> Path:
    (tmp_path / "streams").mkdir()
    stream = {"stream": "pay", "event_id": "id", "event_time": "at", "fields": {"id": "int", "at": "timestamp"}}
    (tmp_path / "streams/pay.yml").write_text(yaml.safe_dump({**stream, "max_out_of_orderness": "1 second"}))
    off = {"spark.hadoop.fs.s3a.bucket.switched.create.conditional.enabled": "false", "spark.master": "local[2]"}
    spark = {**server.settings, **off, "spark.driver.memory": "1g"}
    (tmp_path / "settings.yml").write_text(yaml.safe_dump({"spark": spark}))
    return tmp_path


def test_c13_2_a_store_without_conditional_writes_is_refused_before_anything_is_written(
    server: S3Server, conf_of: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.make_bucket("switched")
    server.make_bucket("old")
    with server.count_requests() as counts:
        assert main(["--root", "s3a://switched/x", "--conf", str(conf_of), "init"]) == 2
    assert "fs.s3a.bucket.switched.create.conditional.enabled is false" in capsys.readouterr().err
    assert not [each for each in counts if each.startswith(("put", "post"))], counts
    server.set_weather(failures=[{"kind": "unconditional"}])
    try:
        assert main(["--root", "s3a://old/x", "--conf", str(conf_of), "init"]) == 2
    finally:
        server.set_weather()
    assert "ignores If-None-Match" in capsys.readouterr().err
    # The folder of the file that was written to ask is left, with nothing in it.
    assert list(find(server, "old/x").iterdir()) == []
