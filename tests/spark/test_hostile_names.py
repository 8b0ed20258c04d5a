"""Names, paths and arguments that mean something to SQL, a shell or a pattern go through the whole pipeline as what they are."""

from __future__ import annotations

import datetime as dt
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812

from lookback.core.errors import LookbackError, ReviewError, RuleError, SetupError
from lookback.core.expressions.compiling import compile_expression
from lookback.core.expressions.syntax import LookbackSql
from lookback.core.streams.declaration import Stream
from lookback.core.values.times import parse_time
from lookback.core.values.types import parse_type
from lookback.spark.checkpoints.checkpoint import Checkpoint
from lookback.spark.ingest.fields import find_source_columns
from lookback.spark.ingest.files import ingest
from lookback.spark.operations.forget import forget
from lookback.spark.operations.status import event_account
from lookback.spark.review import explain, open_queue, record_review
from lookback.spark.rules import RulesTable
from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder
from lookback.spark.stream.rebuild import find_mark_before
from lookback.spark.tables.lakehouse import Tables
from lookback.spark.tables.schemas import PRODUCT_TABLES
from payins import publish

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
# Fields that are words of SQL, and columns of the product's own tables.
STREAM = Stream.from_dict(
    {
        "stream": "select_",
        "event_id": "event_id",
        "event_time": "timestamp",
        "fields": {
            "event_id": "string", "timestamp": "timestamp", "key": "string", "value": "int", "date": "date", "user": "string",
            "rows": "int", "raw": "string", "message": "string",
        },
    }
)  # fmt: skip
STREAMS = {STREAM.name: STREAM}
RULE = {
    "rule_id": "r", "stream": STREAM.name, "group_by": ["key", "user"], "window": "1 day",
    "measures": {"n": "count(*)", "total": "sum(value)"}, "when": "n >= 2 and total > rows", "message": "{key} {message}",
}  # fmt: skip
KEY = "x' OR '1'='1`; DROP TABLE rules; -- $(touch ran) ${env:HOME} \\ \"q\" \u202e%s{0}"
ARGUMENTS = ["' OR 1=1 --", "`rules`", "a; DROP TABLE rules", "../../etc/passwd", "${env:HOME}", "a\x00b", "a\nb", ""]


@pytest.mark.long
def test_hostile_root_file_fields_and_values_change_nothing(created: Tables, tmp_path: Path) -> None:
    root = tmp_path / 'it\'s `quoted`; DROP TABLE x -- $(touch ran) "q" 100% ü'
    for name in PRODUCT_TABLES:
        shutil.copytree(created.path_or_name(name), root / name)
    tables = Tables.local(created.spark, root)
    rules = RulesTable(tables, STREAMS)
    tables.create(STREAM)
    rules.push(RULE, author=KEY, comment=KEY)
    events = [
        {"event_id": f"{KEY} {at}", "timestamp": f"2026-03-01T00:00:0{at}Z", "key": KEY, "value": 5, "date": "2026-03-01",
         "user": "u", "rows": 1, "raw": KEY, "message": KEY}
        for at in range(3)
    ]  # fmt: skip
    files = root / "in 'it`s'; $(touch ran)"
    files.mkdir()
    lines = [json.dumps(event) for event in events] + [json.dumps({"event_id": None, "key": KEY})]
    (files / "a 'b' `c`; $(touch ran) --.json").write_text("\n".join(lines))
    assert (ingest(tables, STREAM, files, progress=None).ingested, tables.read("rejected_events").count()) == (3, 1)

    folder = checkpoint_folder(tables, STREAM)
    Evaluation(tables, STREAM, STREAMS, folder, once=True).run()
    assert event_account(tables, STREAM, Checkpoint(Path(folder)).read_last_judged()).closes
    alerts = tables.read("alerts").orderBy("event_time").collect()
    assert [(row["key"], row["message"], row["event_id"]) for row in alerts] == [
        ({"key": KEY, "user": "u"}, f"{KEY} {KEY}", f"{KEY} {at}") for at in (1, 2)
    ]
    assert len(explain(tables, STREAMS, alerts[0]["alert_id"]).timeline) == 2
    record_review(tables, alerts[0]["alert_id"], "unclear", KEY, KEY)
    assert [row["alert_id"] for row in open_queue(tables).collect()] == [alerts[1]["alert_id"]]

    for text in ARGUMENTS:
        assert open_queue(tables, text).isEmpty()
        for refused in (
            lambda text=text: record_review(tables, text, "unclear", "me"),
            lambda text=text: record_review(tables, alerts[1]["alert_id"], text, "me"),
            lambda text=text: explain(tables, STREAMS, text),
        ):
            with pytest.raises(ReviewError):
                refused()
        for refused in (
            lambda text=text: rules.set_status(text, "paused"),
            lambda text=text: rules.set_status("r", text),
            lambda text=text: rules.command(text, STREAM.name),
            lambda text=text: rules.command("clear_state", text),
            lambda text=text: rules.command("advance", STREAM.name, time=text),
        ):
            with pytest.raises(RuleError):
                refused()
        with pytest.raises(LookbackError):
            forget(tables, STREAM, f"key = '{KEY}' {text or ';'}")
        with pytest.raises(SetupError):
            tables.read(text)

    literal = KEY.replace("\\", "\\\\").replace("'", "\\'")
    report = forget(
        tables, STREAM, f"key = '{literal}' and value > rows and date = date '2026-03-01'".replace("date '", "'")
    )
    # The rejected row has no value that is greater.
    assert dict(report.rows) == {
        STREAM.name: 3, "reviews": 1, "alerts": 2, "labels": 0, "snoozes": 0, "lists": 0, "late_events": 0, "rule_log": 0, "rejected_events": 0,
    }  # fmt: skip
    # It stays, without the values that only these events had.
    assert report.redacted["rejected_events"] == 1
    assert KEY not in str(tables.read("rejected_events").collect())
    assert tables.read("rules").count() == 1
    assert not list(tmp_path.rglob("ran"))
    assert not Path("ran").exists()


@pytest.mark.long
def test_c11_1_the_time_before_a_history_is_found_where_the_events_have_a_column_of_late_events(tables: Tables) -> None:
    tables.create(STREAM)
    others = (None, None, None, None, None, None, None, None)
    for number, seconds in ((1, 7), (2, 5), (3, 9)):
        at = dt.datetime(2026, 3, 1, 0, 0, seconds, tzinfo=dt.timezone.utc)
        row = (f"e{number}", at, *others)
        tables.append(
            tables.spark.createDataFrame(
                [row[: len(STREAM.fields)]], tables.read(STREAM.name).drop("position", "ingested_at").schema
            ).withColumn("ingested_at", F.lit(at)),
            STREAM.name,
        )
    assert find_mark_before(tables, STREAM, 3) == parse_time("2026-03-01T00:00:07Z")
    assert find_mark_before(tables, STREAM, 1) is None


# Every word here ended the stream of whoever used it as a field, or lost its events.
MAILS = Stream.from_dict(
    {
        "stream": "mails",
        "event_id": "id",
        "event_time": "at",
        "fields": {
            "id": "string",
            "at": "timestamp",
            "from": "string",
            "null": "int",
            "Select": "string",
            "case": "int",
        },
    }
)


@pytest.mark.long
def test_fields_named_like_words_of_sql_are_judged(tables: Tables) -> None:
    tables.create(MAILS)
    count = {"stream": MAILS.name, "window": "1 day", "measures": {"n": "count(*)"}, "when": "n >= 1"}
    wheres = {
        "from": "`from` <> 'me'",
        "null": "`null` = 1",
        "select": "`SELECT` like 'a%' and not `case` in (3)",
        "plain": "id <> 'e0'",
        "grouped": "`case` > 0 or `from` = 'you'",
    }
    rules = [{**count, "rule_id": name, "group_by": [], "where": where} for name, where in wheres.items()]
    rules[-1]["group_by"] = ["from", "case"]
    for rule in rules:
        RulesTable(tables, {MAILS.name: MAILS}).check(rule)
    publish(tables, rules)

    def append(*rows: tuple[str, str, int | None, str, int]) -> None:
        columns = "id string, `from` string, `null` int, `Select` string, `case` int"
        frame = tables.spark.createDataFrame(list(rows), columns)
        tables.append(
            frame.selectExpr("*", "timestamp'2026-03-01 00:00:00' at", "current_timestamp() ingested_at"), "mails"
        )

    def alerts() -> set[tuple[str, str]]:
        return {(row["rule_id"], row["event_id"]) for row in tables.read("alerts").collect()}

    folder = Path(checkpoint_folder(tables, MAILS))
    append(("e0", "you", 1, "ab", 1), ("e1", "me", None, "b", 2), ("e2", "me", 0, "a", 3))
    Evaluation(tables, MAILS, {MAILS.name: MAILS}, folder, once=True).run()
    first = {("from", "e0"), ("null", "e0"), ("select", "e0"), ("plain", "e1"), ("plain", "e2")}
    first |= {("grouped", "e0"), ("grouped", "e1"), ("grouped", "e2")}
    assert alerts() == first
    append(("e3", "you", 1, "ab", 4))
    Evaluation(tables, MAILS, {MAILS.name: MAILS}, folder, once=True).run()
    assert alerts() == first | {(name, "e3") for name in wheres}
    assert tables.read("rule_log").where("action in ('failed', 'rejected', 'quarantined')").isEmpty()


@pytest.mark.long
def test_a_name_that_is_printed_without_backticks_is_the_field_to_spark_too(spark: SparkSession) -> None:
    # `forget` and checks against data give printed conditions to Spark.
    words = {word.lower() for word in LookbackSql.Tokenizer.KEYWORDS if word.isidentifier()}
    names = sorted(
        words | {"current_date", "current_user", "user", "session_user", "anti", "semi", "time", "some", "check"}
    )
    schema = dict.fromkeys(names, parse_type("int"))
    texts = [
        compile_expression(f"`{name}` + `{name}` = 8 and not `{name}` in (3) or -`{name}` is null", schema).sql
        for name in names
    ]
    frame = spark.createDataFrame([(4,) * len(names)], ", ".join(f"`{name}` int" for name in names))
    assert [name for name, text in zip(names, texts, strict=True) if not reads(text)] == []
    assert frame.select(*(F.expr(text) for text in texts)).head() == (True,) * len(names)


def reads(text: str) -> bool:
    try:
        F.expr(text)
    except PySparkException:
        return False
    return True


def test_an_expression_that_spark_would_change_is_refused() -> None:
    stream = Stream.from_dict({**STREAM.to_dict(), "columns": {STREAM.event_id: "`${env:HOME}`"}})
    with pytest.raises(SetupError, match=r"which Spark would replace .* use another expression"):
        find_source_columns(stream, STREAM.event_id)


def test_a_place_that_sql_would_read_otherwise_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    # Spark puts a setting or an environment variable there, also between quotes.
    with pytest.raises(SetupError, match="which Spark would replace"):
        Tables.local(spark, tmp_path / "${env:HOME}").identifier("rules")
    with pytest.raises(SetupError, match="which Spark would replace"):
        Tables.catalog(spark, "main", "${spark.app.name}").path_or_name("rules")
