"""What people write for folders and files is read in one way, whatever form it has; no Spark is needed here."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from lookback.cli import main
from lookback.config import Settings
from lookback.core.errors import SetupError
from lookback.places import (
    ObjectPath,
    find_local_path,
    move_tree,
    parse_place,
    parse_source,
    read_s3_options,
    remove_tree,
    write_whole,
)
from lookback.spark.checkpoints.checkpoint import Checkpoint
from lookback.spark.checkpoints.parcels import Parcels
from lookback.spark.platform.owner import become_owner


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/data/x/", "/data/x"),
        ("file:/data/x", "/data/x"),
        ("file:///data/x/", "/data/x"),
        ("FILE://localhost/data/x", "/data/x"),
        ("file:///data/it%20is%25", "/data/it is%"),
        ("/data/it%20is%", "/data/it%20is%"),
        ("here", "{here}/here"),
        ("./here/../there", "{here}/there"),
        ("2026:data", "{here}/2026:data"),
        ("a b", "{here}/a b"),
        ("~/x", "{home}/x"),
        ("s3a://bucket", "s3a://bucket"),
        ("s3a://bucket/", "s3a://bucket"),
        ("s3a://bucket//a/./b%20c/", "s3a://bucket/a/b%20c"),
        ("s3://bucket/x", "s3a://bucket/x"),
        ("S3N://bucket/x", "s3a://bucket/x"),
        ("gs://bucket/x", "gs://bucket/x"),
        ("abfs://box@account.dfs.core.windows.net/x", "abfss://box@account.dfs.core.windows.net/x"),
        ("hdfs://name:8020/x", "hdfs://name:8020/x"),
        ("dbfs:/x/y/", "dbfs:/x/y"),
        ("/Volumes/main/fraud/checkpoints", "/Volumes/main/fraud/checkpoints"),
    ],
)  # fmt: skip
def test_a_place_has_one_text_whatever_its_form(
    text: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = parse_place(text)
    assert str(place) == expected.format(here=tmp_path, home=Path.home())
    assert parse_place(str(place)) == place
    assert isinstance(place, Path) == str(place).startswith("/")
    assert find_local_path(text) == (place if isinstance(place, Path) else None)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("", "must not be empty"),
        (" s3a://bucket/x", "begin or end with a blank"),
        ("/data/x ", "begin or end with a blank"),
        ("s3a:/bucket/x", "write s3a://bucket/x"),
        ("s3:bucket/x", "write s3a://bucket/x"),
        ("s3a:///x", "names no bucket; write s3a://bucket/folder"),
        ("gs:", "write gs://bucket/folder"),
        ("s3a://bucket/a/../b", "write the full path"),
        ("file:x", "write file:///folder"),
        ("file://data/x", "write file:///folder, three slashes: file:///data/x"),
        ("~nobody-of-that-name/x", "write ./~nobody-of-that-name/x"),
    ],
)  # fmt: skip
def test_what_could_be_misread_is_refused_with_what_to_write(text: str, remedy: str) -> None:
    with pytest.raises(SetupError) as refused:
        parse_place(text)
    assert remedy.rpartition(", ")[2] in str(refused.value)


def test_files_to_read_keep_their_patterns_and_relative_paths() -> None:
    assert parse_source("in/*.csv") == "in/*.csv"
    assert parse_source("s3://bucket/in/day=*/{a,b}.json") == "s3a://bucket/in/day=*/{a,b}.json"
    assert parse_source("file:///in/a%20b/*.csv") == "/in/a b/*.csv"
    assert parse_source("~/in") == str(Path.home() / "in")
    with pytest.raises(SetupError, match="write s3a://bucket"):
        parse_source("s3a:/bucket")


COMMANDS = [
    ["init"],
    ["status"],
    ["maintain"],
    ["forget", "payins", "--where", "id = 1", "--yes"],
    ["ingest", "payins", "in"],
    ["ingest", "payins", "in", "--new"],
    ["rejected", "payins"],
    ["evaluate", "payins", "--once"],
    ["repartition", "payins", "2"],
    ["rules", "list"],
    ["rules", "pause", "x"],
    ["alerts"],
    ["review", "0" * 32, "--disposition", "benign"],
    ["backtest", "x"],
    ["prove", "payins"],
    ["explain", "0" * 32],
    ["lists", "show"],
    ["snoozes"],
    ["demo"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: " ".join(words[:2]))
def test_no_command_takes_a_misspelt_bucket_for_a_folder(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf" / "streams").mkdir(parents=True)
    (tmp_path / "conf" / "streams" / "payins.yml").write_text(
        "stream: payins\nevent_id: id\nevent_time: at\nfields: {id: int, at: timestamp}\n"
    )
    monkeypatch.setattr("sys.stdin", io.StringIO())
    before = sorted(tmp_path.rglob("*"))
    assert main(["--root", "s3a:/bucket/x", *command]) == 2
    assert "write s3a://bucket/x" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_settings_know_the_root_in_one_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for text in ("x", "./x/", f"file:{tmp_path}/x", f"file://{tmp_path}/x", tmp_path / "x"):
        assert Settings.local(text).root == f"{tmp_path}/x"
    monkeypatch.setenv("LOOKBACK_ROOT", "s3://bucket/x")
    assert Settings.local().root == "s3a://bucket/x"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectPath:
    """A store whose files are in a folder, behind the file systems by which a bucket is reached."""
    from pyarrow import fs

    inner = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())

    monkeypatch.setattr("lookback.places._open_files", lambda *_: _Bucket(inner))
    return ObjectPath("s3a", "bucket", "x")


class _Bucket:
    """Makes folders as a bucket does: with their first file."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def open_output_stream(self, path: str) -> Any:
        self._inner.create_dir(path.rpartition("/")[0], recursive=True)
        return self._inner.open_output_stream(path)

    def copy_file(self, source: str, target: str) -> None:
        self._inner.create_dir(target.rpartition("/")[0], recursive=True)
        self._inner.copy_file(source, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_files_of_a_store_are_used_like_those_of_a_folder(store: ObjectPath, tmp_path: Path) -> None:
    both = [store, tmp_path / "local" / "x"]
    for place in both:
        assert not place.exists()
        assert [*place.glob("*")] == []
        write_whole(place / "b" / "1", b"one")
        write_whole(place / "b" / "1", b"two")
        write_whole(place / "b" / "c" / "2.zip", b"")
        assert (place / "b" / "1").read_text() == "two"
        assert (place / "b" / "1").stat().st_mtime > 1e9
        assert place.is_dir()
        assert place.name == "x"
        assert [each.name for each in (place / "b").glob("[0-9]*")] == ["1"]
        assert [str(each) for each in place.glob("*/*/[0-9]*.*")] == [f"{place}/b/c/2.zip"]
        assert sorted(each.name for each in (place / "b").iterdir()) == ["1", "c"]
        moved = place.with_name("y")
        move_tree(place, moved)
        assert not place.exists()
        assert (moved / "b" / "1").read_bytes() == b"two"
        (moved / "b" / "1").unlink()
        (moved / "b" / "1").unlink(missing_ok=True)
        for act in (
            Path.unlink if isinstance(place, Path) else ObjectPath.unlink,
            type(place).stat,
            type(place).read_bytes,
        ):
            with pytest.raises(FileNotFoundError):
                act(moved / "b" / "1")  # type: ignore[arg-type]
        remove_tree(moved)
        assert not moved.exists()


def test_a_checkpoint_and_its_owner_are_in_a_store(store: ObjectPath) -> None:
    checkpoint = Checkpoint(store)
    assert checkpoint.is_new
    assert checkpoint.query_id is None
    assert checkpoint.ensure_query_id() == checkpoint.query_id
    parcels = Parcels(store / "parcels")
    assert parcels.list() == []
    parcels.write("a.1", b"x")
    assert (parcels.list(), parcels.read("a.1")) == (["a.1"], b"x")
    with become_owner(checkpoint.owner_file, "checkpoint c", 0.02) as check:
        check()
        with pytest.raises(SetupError, match=f"process {os.getpid()} "), become_owner(checkpoint.owner_file, "c", 1):
            pass
    assert checkpoint.owner_file.read_text() == ""
    moved = checkpoint.move_aside()
    assert moved is not None
    assert not checkpoint.folder.exists()
    assert Checkpoint(moved).query_id is not None


def test_settings_of_hadoop_reach_the_same_bucket_and_are_not_shown() -> None:
    settings = {
        "fs.s3a.access.key": "id", "fs.s3a.secret.key": "secret", "fs.s3a.endpoint": "http://127.0.0.1:9000/",
        "fs.s3a.bucket.other.secret.key": "other", "fs.s3a.bucket.mine.access.key": "mine",
    }  # fmt: skip
    place = ObjectPath("s3a", "mine", "x", tuple(settings.items()))
    assert read_s3_options("mine", place.settings) == {
        "access_key": "mine", "secret_key": "secret", "endpoint_override": "127.0.0.1:9000", "scheme": "http"
    }  # fmt: skip
    assert "secret" not in f"{place} {place!r}"
    assert pickle.loads(pickle.dumps(place)).settings == (place / "y").settings == place.settings
    assert read_s3_options("mine", [("fs.s3a.aws.credentials.provider", "a.b.AnonymousAWSCredentialsProvider")]) == {
        "anonymous": True
    }


def test_a_store_that_arrow_does_not_know_is_refused_with_those_that_it_knows() -> None:
    with pytest.raises(SetupError, match="Checkpoints can be in s3a://"):
        (parse_place("oss://bucket/x") / "metadata").exists()
