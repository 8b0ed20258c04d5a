"""Lookback in a session that somebody else started, with all of Spark's defaults: what it sets, and what it leaves alone."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

import lookback
from alert_rows import collect_alerts
from lookback.core.errors import SetupError
from lookback.core.streams.declaration import Stream
from lookback.spark.checkpoints.checkpoint import Checkpoint
from lookback.spark.platform import session
from lookback.spark.platform.session import (
    _LOG_CONFIG,
    _OWN_MARK,
    _QUERY_SETTINGS,
    _QUERY_SPEED,
    apply_query_settings,
    choose_default_shards,
    get_spark,
    open_own_session,
)
from lookback.spark.replay.backtest import Candidate, backtest
from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder
from lookback.spark.tables.lakehouse import Tables
from payins import (
    RULES,
    STREAM,
    STREAMS,
    append,
    make_events,
    publish,
    replay_of_tables,
    replayed_alerts,
    stored_alerts,
)

pytestmark = pytest.mark.spark

_PARTITIONS = "spark.sql.shuffle.partitions"


@pytest.fixture
def theirs(spark: SparkSession) -> Iterator[SparkSession]:
    """A session as somebody else starts one: Spark's defaults, another time zone, no ANSI mode."""
    session = spark.newSession()
    for key in (*_QUERY_SETTINGS, *_QUERY_SPEED, _OWN_MARK, "spark.databricks.delta.snapshotPartitions"):
        session.conf.unset(key)
    session.conf.set(_PARTITIONS, "200")
    session.conf.set("spark.sql.session.timeZone", "America/New_York")
    session.conf.set("spark.sql.ansi.enabled", "false")
    yield session
    # The session that makes a frame is the active one.
    spark.createDataFrame([(1,)], "n int")


def test_a_new_session_logs_by_the_file_that_lies_beside_its_module(spark: SparkSession) -> None:
    assert "status = error" in _LOG_CONFIG.read_text(encoding="utf-8")
    manager = spark.sparkContext._jvm.org.apache.logging.log4j.LogManager  # type: ignore[union-attr]
    used = manager.getContext(False).getConfiguration().getConfigurationSource().getLocation()
    assert Path(used.removeprefix("file:")) == _LOG_CONFIG


def frozen(folder: str) -> dict[str, str]:
    """The settings that the first batch of a checkpoint froze."""
    metadata = Path(folder, "offsets", "0").read_text(encoding="utf-8").splitlines()[1]
    return dict(json.loads(metadata)["conf"])


@pytest.mark.long
def test_the_shards_are_the_cores_and_the_settings_of_the_session_stay(
    tables: Tables, theirs: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    # What is set up and compared goes through our own session, in which Delta is quick.
    at_theirs = Tables.local(theirs, str(tables.root))
    tables.create(STREAM)
    folder = checkpoint_folder(tables, STREAM)
    publish(tables, RULES)
    events = make_events(120, seed=6)
    append(tables, [row for row in events if row["arrival"] <= 3])
    before = dict(theirs.conf.getAll)
    Evaluation(at_theirs, STREAM, STREAMS, folder, once=True).run()
    assert theirs.conf.getAll == before
    assert Checkpoint(Path(folder)).read_plan().shards == 2  # type: ignore[union-attr]
    assert frozen(folder)[_PARTITIONS] == "2"
    assert frozen(folder)["spark.sql.streaming.stateStore.providerClass"].endswith("RocksDBStateStoreProvider")
    assert sorted(path.name for path in Path(folder, "state", "0").iterdir() if path.name.isdigit()) == ["0", "1"]

    # A setting is for a new checkpoint: this one keeps its number, and says so.
    append(tables, [row for row in events if row["arrival"] > 3])
    with caplog.at_level(logging.WARNING, "lookback"):
        Evaluation(at_theirs, STREAM, STREAMS, folder, once=True, default_shards=5).run()
    assert (
        f"{folder} keeps its 2 shards, because the setting of 5 is only for a new checkpoint; to change it: "
        "lookback evaluate payins --rebuild --shards 5"
    ) in caplog.text
    assert Checkpoint(Path(folder)).read_plan().shards == 2  # type: ignore[union-attr]
    assert stored_alerts(tables) == replayed_alerts(replay_of_tables(tables))

    with backtest(at_theirs, STREAM, [Candidate(each) for each in RULES]) as result:
        assert sorted(collect_alerts(result.alerts)) == replayed_alerts(lookback.replay(RULES, events, STREAM))
    assert theirs.conf.getAll == before


def test_c8_a_checkpoint_whose_offset_log_names_its_sources_is_gone_on_with_only_if_the_settings_accept_it(
    tables: Tables, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tables.create(STREAM)
    folder = Path(checkpoint_folder(tables, STREAM))
    publish(tables, [RULES[0]])
    events = make_events(60, seed=8)
    append(tables, [row for row in events if row["arrival"] <= 3])
    with monkeypatch.context() as patched:
        patched.setitem(_QUERY_SETTINGS, "spark.sql.streaming.offsetLog.formatVersion", "2")
        Evaluation(tables, STREAM, STREAMS, folder, once=True).run()
    log = (folder / "offsets/0").read_text(encoding="utf-8")
    assert log.startswith("v2\n")
    append(tables, [row for row in events if row["arrival"] > 3])
    with pytest.raises(SetupError, match="has version v2, a format that this release does not know"):
        Evaluation(tables, STREAM, STREAMS, folder, once=True).run()
    assert (folder / "offsets/0").read_text(encoding="utf-8") == log
    with caplog.at_level(logging.WARNING, "lookback"):
        Evaluation(tables, STREAM, STREAMS, folder, once=True, accept_unknown=True).run()
    assert "the settings accept a checkpoint of an unknown format, so nothing is checked" in caplog.text
    assert stored_alerts(tables) == replayed_alerts(replay_of_tables(tables))


@pytest.mark.long
def test_the_stream_or_a_setting_says_the_number_of_a_new_checkpoint(tables: Tables, tmp_path: Path) -> None:
    three = Stream.from_dict({**STREAM.to_dict(), "shards": 3})
    assert Stream.from_dict(three.to_dict()) == three
    tables.create(three)
    append(tables, make_events(20, seed=6))

    def shards(stream: Stream, name: str, **options: int) -> tuple[int, str]:
        folder = tmp_path / name
        Evaluation(tables, stream, {stream.name: stream}, folder, once=True, fresh=True, **options).run()
        plan = Checkpoint(folder).read_plan()
        assert plan is not None
        return plan.shards, frozen(str(folder))[_PARTITIONS]

    # Never more tasks than cores.
    assert shards(three, "declared") == (3, "2")
    assert shards(three, "set", default_shards=1) == (1, "1")
    with pytest.raises(SetupError, match="at least one shard, got 0"):
        Evaluation(tables, STREAM, STREAMS, tmp_path / "none", default_shards=0)


def test_a_checkpoint_of_too_many_shards_is_gone_on_with_and_told_of(
    tables: Tables, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tables.create(STREAM)
    folder = checkpoint_folder(tables, STREAM)
    append(tables, make_events(20, seed=6))
    Evaluation(tables, STREAM, STREAMS, folder, once=True, shards=3).run()
    # More than are ever chosen.
    monkeypatch.setattr("lookback.spark.stream.resume.MAX_SHARDS", 2)
    with caplog.at_level(logging.WARNING, "lookback"):
        Evaluation(tables, STREAM, STREAMS, folder, once=True).run()
    assert "keeps its 3 shards, and each takes time in every batch" in caplog.text
    assert "lookback evaluate payins --rebuild --shards N, where N is the number of cores of the cluster" in caplog.text


def test_a_session_beside_theirs_has_what_lookback_needs(theirs: SparkSession) -> None:
    theirs.conf.set("spark.hadoop.some.storage", "key")
    theirs.createDataFrame([(1,)], "n int")
    before = dict(theirs.conf.getAll)
    own = get_spark(settings={"spark.sql.files.maxRecordsPerFile": "7", "spark.driver.memory": "too late"})
    assert own.sparkContext is theirs.sparkContext
    assert theirs.conf.getAll == before
    assert own.conf.get("spark.sql.session.timeZone") == "UTC"
    assert own.conf.get("spark.sql.ansi.enabled") == "true"
    assert own.conf.get("spark.sql.files.maxRecordsPerFile") == "7"
    assert own.conf.get("spark.hadoop.some.storage") == "key"
    # Also what they set later, by the next call; what Lookback needs stays as it is.
    theirs.conf.set("spark.hadoop.some.storage", "another key")
    theirs.conf.set("spark.sql.ansi.enabled", "false")
    assert open_own_session(theirs).conf.get("spark.hadoop.some.storage") == "another key"
    assert own.conf.get("spark.sql.ansi.enabled") == "true"
    # Its own session has none beside it, and there is one for all.
    assert open_own_session(own) is own
    assert open_own_session(theirs) is own


def test_a_query_gets_its_settings_and_the_session_has_its_own_again(theirs: SparkSession) -> None:
    speed = "spark.sql.execution.arrow.maxBytesPerBatch"
    theirs.conf.set(speed, "77")
    before = dict(theirs.conf.getAll)

    def start(found: dict[str, str]) -> None:
        with apply_query_settings(theirs, 7):
            found.update(theirs.conf.getAll)
            raise OSError("a query that could not be started")

    within: dict[str, str] = {}
    with pytest.raises(OSError, match="could not be started"):
        start(within)
    assert theirs.conf.getAll == before
    assert within == {**before, **_QUERY_SPEED, **_QUERY_SETTINGS, _PARTITIONS: "7", speed: "77"}
    with apply_query_settings(theirs, None):
        assert theirs.conf.get(_PARTITIONS) == "200"


def test_the_cores_of_the_cluster_are_the_shards(spark: SparkSession) -> None:
    assert choose_default_shards(spark) == 2


def test_keys_of_storage_are_not_on_the_command_line_of_the_jvm(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[dict[str, str]] = []

    def launch(conf: SparkConf, _: object) -> None:
        launched.append(dict(conf.getAll()))
        raise Launched

    class Launched(Exception):
        pass

    monkeypatch.setattr(SparkContext, "_gateway", None)
    monkeypatch.setattr(session, "launch_gateway", launch)
    with pytest.raises(Launched):
        session._start("lookback", 2, {"spark.hadoop.fs.s3a.secret.key": "s3cret", "spark.driver.memory": "1g"}, [])
    (seen,) = launched
    assert seen["spark.driver.memory"] == "1g"
    assert "spark.jars" in seen
    assert "s3cret" not in str(seen)
