"""Which log stores of Delta are refused for a bucket, as two processes could lose a commit there."""

from __future__ import annotations

import zipfile
from typing import TYPE_CHECKING, cast

import pytest
from pyspark import SparkConf

from lookback.core.errors import SetupError
from lookback.spark.platform.logstores import S3_JAR, add_log_store, require_one_winner

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Nothing of it is asked for.
SPARK = cast("SparkSession", None)
SINGLE = "io.delta.storage.S3SingleDriverLogStore"
S3, ANY = "spark.delta.logStore.s3a.impl", "spark.delta.logStore.class"


@pytest.mark.parametrize(
    ("root", "settings", "message"),
    [
        (
            "s3a://b/x",
            {},
            f"{S3} is {SINGLE} by default.*one commit is lost.*set {S3} to lookback.S3LogStore or .*spark.jars",
        ),
        ("s3://b/x", {S3: SINGLE}, f"{S3} is {SINGLE}: .*one commit is lost"),
        ("s3a://b/x", {S3.removeprefix("spark."): SINGLE}, f"delta.logStore.s3a.impl is {SINGLE}: "),
        ("s3a://b/x", {ANY: "io.delta.storage.GCSLogStore"}, f"{ANY} is io.delta.storage.GCSLogStore: "),
        (
            "abfss://b@c/x",
            {ANY: SINGLE},
            f"{ANY} is {SINGLE}: .*remove the setting, for io.delta.storage.AzureLogStore",
        ),
        ("gs://b/x", {"spark.delta.logStore.gs.impl": "my.Store"}, "spark.delta.logStore.gs.impl is my.Store: "),
    ],
)
def test_c13_2_a_log_store_that_may_lose_a_commit_is_refused(root: str, settings: dict[str, str], message: str) -> None:
    with pytest.raises(SetupError, match=message):
        require_one_winner(SPARK, root, settings)


@pytest.mark.parametrize(
    ("root", "settings"),
    [
        ("/folder", {ANY: SINGLE}),
        ("dbfs:/x", {}),
        ("abfss://b@c/x", {}),
        ("gs://b/x", {}),
        ("gs://b/x", {S3: SINGLE}),
        ("s3a://b/x", {S3: "io.delta.storage.S3DynamoDBLogStore"}),
    ],
)
def test_c13_2_a_log_store_that_keeps_two_writers_apart_is_used(root: str, settings: dict[str, str]) -> None:
    require_one_winner(SPARK, root, settings)


def test_c13_2_lookbacks_own_sessions_have_the_log_store_for_s3() -> None:
    conf = SparkConf(loadDefaults=False).set("spark.jars", "a.jar")
    add_log_store(conf)
    assert (conf.get(S3), conf.get("spark.jars")) == ("lookback.S3LogStore", f"a.jar,{S3_JAR}")
    for setting in (S3, ANY, S3.removeprefix("spark.")):
        conf = SparkConf(loadDefaults=False).set(setting, SINGLE)
        add_log_store(conf)
        assert (conf.get(setting), conf.contains(S3)) == (SINGLE, setting == S3)
    with zipfile.ZipFile(S3_JAR) as jar:
        assert "lookback/S3LogStore.class" in jar.namelist()
