"""Commands say the same, to the byte, by Spark, without it, and over a SQL warehouse, on the same tables."""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Iterable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
import yaml

from lookback.cli import main
from lookback.core.streams.declaration import Stream
from lookback.core.values.columns import from_arrow, to_text
from lookback.spark.lists import add_values, remove_values
from lookback.spark.review import record_review
from lookback.spark.rules import RulesTable
from lookback.spark.snoozes import snooze
from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder
from lookback.spark.tables import answers
from lookback.spark.tables.folders import open_folders
from lookback.spark.tables.lakehouse import Tables
from lookback.spark.tables.schemas import ALERTS, make_events_schema
from lookback.spark.tables.sqltexts import quote_text
from lookback.verbs import Workspace
from payins import MORE_RULES, RULES, STREAM, STREAMS, append, copy_of, make_events, publish
from sample_alert import ALERT
from workspace_server import Answer, Asked, WorkspaceServer, run_statement

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pytestmark = pytest.mark.spark
NOW = dt.datetime.now(dt.timezone.utc).replace(microsecond=123_457)
HOUR = dt.timedelta(hours=1)
ODD = 'o\'dd "name" `x` % {0} \\ [bold]ü\x1b[1m'
WATCHED = {
    "rule_id": "watched", "stream": STREAM.name, "group_by": ["shop"], "window": "1 hour", "when": "n >= 2",
    "measures": {"n": "count(*) filter (where in_list(customer, 'vips'))", "top": "max(amount)"}, "message": "{n} in {shop}, {top}",
}  # fmt: skip


@pytest.fixture(scope="module")
def desk(created: Tables, tmp_path_factory: pytest.TempPathFactory) -> Tables:
    """Two evaluations of rules of every kind; versions, lists, snoozes, reviews and rows that are odd."""
    tables = copy_of(created, tmp_path_factory.mktemp("desk") / 'it\'s `100%` "ü"', STREAM.name)
    write_conf(tables)
    add_values(tables, "vips", ["1", "3", "ü"], reason=ODD, author="ann")
    add_values(tables, "nets", ["10.0.0.0/8"], kind="cidr", until=NOW - HOUR, author="bob")
    remove_values(tables, "vips", ["ü"])
    more = [each for each in MORE_RULES if each["rule_id"] in ("minutes", "sessions", "revised", "silent")]
    publish(tables, [*RULES, *more, WATCHED])
    events = make_events(100, 3)
    append(tables, events[:50])
    Evaluation(tables, STREAM, STREAMS, checkpoint_folder(tables, STREAM), once=True).run()
    table = RulesTable(tables, STREAMS)
    table.push({**RULES[0], "description": ODD, "tags": ["attack.T1078"]}, comment=ODD)
    table.push({**RULES[0], "when": "n >= 3"}, status="shadow")
    place = tables.identifier("rules")
    # By SQL: a document that is no rule, an UPDATE in place, and a draft without a version.
    tables.spark.sql(f"INSERT INTO {place} (rule_id, version, status, document) VALUES ('broken', 1, 'active', '{{')")
    tables.spark.sql(f"UPDATE {place} SET comment = 'changed' WHERE rule_id = 'all'")
    tables.spark.sql(f"INSERT INTO {place} (rule_id, status, document) VALUES ('draft', 'draft', NULL)")
    append(tables, events[50:])
    tables.spark.sql(f"DELETE FROM {tables.identifier(STREAM.name)} WHERE id = 'e7'")
    fresh = checkpoint_folder(tables, STREAM) + "-fresh"
    Evaluation(tables, STREAM, STREAMS, fresh, once=True, fresh=True).run()
    _write_odd_alerts(tables)
    raised = [row["alert_id"] for row in tables.read("alerts").where("verdict = 'raised'").limit(2).collect()]
    record_review(tables, raised[0], "confirmed", "kim", ODD)
    snooze(tables, STREAMS, raised[1], until=NOW + 24 * HOUR, reason=ODD, author="kim")
    snooze(
        tables, STREAMS, "*", {"customer": "3"}, until=NOW + 48 * HOUR, since=NOW + HOUR, reason="later", author="kim"
    )
    return tables


def _write_odd_alerts(tables: Tables) -> None:
    def alert(name: str, **values: Any) -> dict[str, Any]:
        return {**ALERT, "alert_id": name, "stream": STREAM.name, "decided_at": NOW, **values}

    keys: list[Any] = [None, {}, {"b": None, ODD: ODD}, {"customer": "3"}]
    rows = [alert(f"key-{at}", key=key, measures=key, rule_id=ODD) for at, key in enumerate(keys)]
    rows += [
        alert("twice"),
        alert("twice", revision=1, message=None),
        alert("gone"),
        alert("gone", revision=1, verdict="retracted"),
    ]
    rows += [
        alert("shadow", mode="shadow"),
        alert("old", decided_at=NOW - 100 * 24 * HOUR),
        alert("times", event_time=NOW),
    ]
    rows += [alert("null", event_id=None, window_complete=None, evidence=None, message=None, severity="critical")]
    tables.append(tables.spark.createDataFrame(rows, ALERTS).coalesce(2), "alerts")


def write_conf(tables: Tables) -> None:
    file = Path(str(tables.root), "conf/streams/payins.yml")
    file.parent.mkdir(parents=True)
    file.write_text(yaml.safe_dump(STREAM.to_dict()), encoding="utf-8")


def say(tables: Tables, words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(["--root", str(tables.root), "--conf", f"{tables.root}/conf", *words])
    return code, *capsys.readouterr()


COMMANDS = [
    ["alerts"], ["alerts", "--rule", "by-customer"], ["alerts", "--queue"], ["alerts", "--queue", "--rule", ODD],
    ["alerts", "--rule", "nope"],
    ["alerts", "--tag", "ATTACK.t1110"], ["alerts", "--queue", "--tag", "attack.T1110"], ["alerts", "--queue", "--tag", ODD],
    ["rules", "list", "--tag", "attack.t1078"], ["rules", "coverage"],
    ["alerts", "--queue", "--stream", "payins", "--days", "3000"], ["snoozes", "--all"], ["rules", "list"],
    ["rules", "show", "by-customer"], ["rules", "diff", "by-customer", "1", "2"], ["lists", "show"], ["lists", "show", "vips"],
    ["lists", "show", "nope"], ["explain", "nope"], ["explain", "--rule", "nope", "--event", "e1"], ["status"],
]  # fmt: skip
# The rest of what commands print is made from the same rows.
IN_WORDS = [["alerts", "--queue"], ["rules", "list"], ["status"]]
EXPLAINED = ("by-customer", "pair", "sessions", "watched")


@pytest.mark.long
def test_commands_say_the_same_without_a_jvm(
    desk: Tables, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    last = {row["rule_id"]: row["alert_id"] for row in desk.read("alerts").where("verdict = 'raised'").collect()}
    explaining = [["explain", last[rule_id]] for rule_id in EXPLAINED]
    explaining += [["explain", "--rule", rule_id, "--event", "e60"] for rule_id in ("all", "minutes")]
    differing = []
    for words in [*IN_WORDS, *([*words, "--json"] for words in [*COMMANDS, *explaining])]:
        with monkeypatch.context() as patch:
            patch.setattr(Workspace, "open_tables", _refuse)
            without = say(desk, words, capsys)
        with monkeypatch.context() as patch:
            patch.setattr(answers, "_READER", ("there_is_no_such_package",))
            by_spark = say(desk, words, capsys)
        if settle(without) != settle(by_spark):
            differing.append((words, without, by_spark))
    assert not differing, "\n".join(f"{words}:\n{without}\n{by_spark}" for words, without, by_spark in differing)


def _refuse(*_: object) -> Tables:
    raise AssertionError("Spark was asked")


def settle(said: tuple[int, str, str]) -> tuple[int, list[Any], list[str]]:
    """What a command said, without times that pass while it is said, and what Spark's workers write beside it."""
    code, out, err = said
    err = re.sub(r"decided at [^,]+,", "decided at a minute,", err)
    out = re.sub(r"\d+ (second|minute)s?", "a while", out)
    lines = [json.loads(line) if line.startswith("{") else line for line in out.splitlines()]
    for line in lines:
        if isinstance(line, dict):
            line.pop("lag_seconds", None)
    return code, lines, [line for line in err.splitlines() if line.startswith(("lookback", "The queue", "1 snooze"))]


@pytest.mark.long
def test_change_feed_and_history_are_read_as_spark_reads_them(desk: Tables) -> None:
    def listed(rows: DataFrame) -> list[str]:
        return sorted(str([plain(row[name]) for name in sorted(rows.columns)]) for row in rows.collect())

    def plain(value: object) -> str | None:
        # A map of Spark's has no order.
        return str(sorted(value.items())) if isinstance(value, dict) else to_text(value)

    def read(tables: Tables, name: str) -> list[object]:
        last = tables.version(name)
        since = {
            "startingTimestamp": times[name][2].astimezone(dt.timezone.utc).replace(tzinfo=None).isoformat(sep=" ")
        }
        feeds = [tables.read_changes(name, *bounds) for bounds in ((0,), (1, 2), (last,), (last + 1,))]
        commits = tables.history(name, 3).select(
            "version", "timestamp", "operation", "operationMetrics", "userMetadata"
        )
        return [last, *map(listed, [*feeds, tables.changes(name, since), commits, tables.read(name, 1)])]

    names = ("rules", "payins", "lists", "alerts")
    times = {name: [row["timestamp"] for row in desk.history(name).orderBy("version").collect()] for name in names}
    by_spark = {name: read(desk, name) for name in names}
    with open_folders(str(desk.root)) as folders:
        for name in names:
            assert read(folders, name) == by_spark[name], name


TYPED = Stream.from_dict({
    "stream": "typed", "event_id": "id", "event_time": "at", "fields": {
        "id": "string", "at": "timestamp", "n": "int", "b": "bigint", "d": "double", "f": "float", "ok": "boolean", "day": "date",
        "a": "decimal(38,18)", "s": "string", "ns": "array<int>", "ds": "array<double>", "days": "array<date>",
        "times": "array<timestamp>", "amounts": "array<decimal(18,2)>", "texts": "array<array<string>>",
    },
})  # fmt: skip
EXTREMES: dict[str, list[Any]] = {
    "n": [-(2**31), 2**31 - 1, 0], "b": [-(2**63), 2**63 - 1], "d": [-0.0, 0.0, float("nan"), float("inf"), -5e-324],
    "f": [-0.0, float("nan"), float("-inf"), 1.5], "ok": [True, False], "day": [dt.date(1, 1, 1), dt.date(9999, 12, 31)],
    "a": [Decimal("99999999999999999999.999999999999999999"), Decimal("-0.000000000000000001")],
    "s": ["", "\0", "ü\n", ODD, " ", "NULL"], "ns": [[], [None, 1], [2**31 - 1]], "ds": [[-0.0, float("nan"), None], []],
    "days": [[dt.date(1, 1, 1), None], []], "times": [[NOW, None, dt.datetime(1, 1, 2, tzinfo=dt.timezone.utc)]],
    "amounts": [[Decimal("9007199254740993.01"), None]], "texts": [[["", None], None, []], []],
    "at": [NOW, dt.datetime(1, 1, 2, tzinfo=dt.timezone.utc), dt.datetime(9998, 12, 31, tzinfo=dt.timezone.utc)],
}  # fmt: skip


@pytest.mark.long
def test_c11_1_values_of_every_type_are_read_as_spark_reads_them(tables: Tables) -> None:
    """11.1: what a history is made of: NULLs, zeros with a sign, NaN, first and last days, arrays in arrays."""
    tables.create(TYPED)
    rows = [
        {"id": f"{name}-{number}", "at": NOW, name: value}
        for name, values in EXTREMES.items()
        for number, value in enumerate(values)
    ]
    schema = make_events_schema(TYPED)
    tables.append(
        tables.spark.createDataFrame([{**row, "ingested_at": NOW} for row in rows], schema).coalesce(1), "typed"
    )

    def read(batches: Iterable[pa.RecordBatch]) -> dict[str, list[Any]]:
        table = pa.Table.from_batches(batches)
        columns = {name: from_arrow(table[name], type_).to_stored_list() for name, type_ in TYPED.fields.items()}
        return {name: [repr(value) for value in column] for name, column in columns.items()}

    def select(them: Tables) -> Any:
        return them.run("SELECT * FROM feed ORDER BY id", {"feed": them.read_changes("typed", 1)})

    by_spark = read(select(tables).toArrow().to_batches())
    assert tables.root is not None
    with open_folders(tables.root) as folders:
        assert read(select(folders).toArrow().to_batches(7)) == by_spark
    assert len(by_spark["id"]) == len(rows)


@pytest.mark.parametrize(
    ("name", "words", "feature"),
    [
        ("alerts", ["alerts", "--json"], "'delta.enableDeletionVectors' = 'true'"),
        ("rules", ["rules", "list", "--json"], "'delta.columnMapping.mode' = 'name'"),
        ("lists", ["lists", "show", "--json"], "'delta.checkpointPolicy' = 'v2'"),
    ],
)
@pytest.mark.long
def test_spark_answers_where_a_table_has_what_only_spark_reads(
    ready: Tables, name: str, words: list[str], feature: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    write_conf(ready)
    publish(ready, RULES[:1])
    add_values(ready, "vips", ["1"], author="ann")
    _write_odd_alerts(ready)
    asked, open_tables = [], Workspace.open_tables

    def ask(*arguments: Any) -> Tables:
        asked.append(arguments)
        return open_tables(*arguments)

    monkeypatch.setattr(Workspace, "open_tables", ask)
    before = settle(say(ready, words, capsys))
    assert not asked
    ready.spark.sql(f"ALTER TABLE {ready.identifier(name)} SET TBLPROPERTIES ({feature})")
    if name == "alerts":
        ready.spark.sql(f"DELETE FROM {ready.identifier(name)} WHERE alert_id = 'old'")
        before = before[0], [line for line in before[1] if line["alert_id"] != "old"], before[2]
    assert settle(say(ready, words, capsys)) == before
    assert asked


def test_a_filter_finds_rows_of_files_that_have_no_statistics_of_its_column(ready: Tables) -> None:
    rules = RulesTable(ready, STREAMS)
    # The stream writes these rows itself, and leaves statistics to Spark.
    rules.announce_lists(STREAM.name, {1: "a"})
    rules.push(RULES[0])
    assert ready.root is not None
    with open_folders(ready.root) as folders:
        by_rule = folders.ask("rule_rows", rule_id="*").collect()
    assert [row["status"] for row in by_rule] == ["lists"]


@pytest.mark.long
def test_a_command_that_writes_says_what_it_waits_for(desk: Tables, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = say(desk, ["review", "times", "--disposition", "benign"], capsys)
    assert (code, err) == (0, "reading alert times, and recording the decision ...\n")
    assert "recorded as benign" in out


OVER_WAREHOUSE = ["--catalog", "main", "--schema", "fraud", "--warehouse", "w1"]


@pytest.fixture
def server(desk: Tables, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[WorkspaceServer]:
    """A workspace whose schema main.fraud has the tables of the desk."""

    def answer(asked: Asked) -> Answer:
        text = asked.body["statement"]
        name = r"`main`\.`fraud`\.`(\w+)`"
        by_path = lambda found: f"table_changes_by_path({quote_text(desk.path_or_name(found[1]))}"  # noqa: E731
        text = re.sub(rf"table_changes\('{name}'", by_path, text)
        text = re.sub(name, lambda found: desk.identifier(found[1]), text)
        return run_statement(lambda sql: desk.spark.sql(sql).collect(), {**asked.body, "statement": text})

    for name in ("DATABRICKS_CONFIG_PROFILE", "DATABRICKS_CLIENT_ID", "DATABRICKS_WORKSPACE_ID"):
        monkeypatch.delenv(name, raising=False)
    with WorkspaceServer() as server:
        monkeypatch.setenv("DATABRICKS_HOST", server.url)
        monkeypatch.setenv("DATABRICKS_TOKEN", "secret-token")
        monkeypatch.setenv("DATABRICKS_CONFIG_FILE", str(tmp_path / "none.cfg"))
        server.replies["GET /api/2.0/preview/scim/v2/Me"] = {"userName": "ann@example.com", "id": "7"}
        server.replies["POST /api/2.0/sql/statements"] = answer
        yield server


def ask(desk: Tables, words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main([*OVER_WAREHOUSE, "--conf", f"{desk.root}/conf", *words])
    return code, *capsys.readouterr()


@pytest.mark.long
def test_commands_say_the_same_over_a_warehouse(
    desk: Tables, server: WorkspaceServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    last = {row["rule_id"]: row["alert_id"] for row in desk.read("alerts").where("verdict = 'raised'").collect()}
    explaining = [["explain", last[rule_id]] for rule_id in EXPLAINED]
    explaining += [["explain", "--rule", rule_id, "--event", "e60"] for rule_id in ("all", "minutes")]
    differing = []
    for words in [*IN_WORDS, *([*words, "--json"] for words in [*COMMANDS, *explaining])]:
        if words[0] != "status":
            by_warehouse, by_spark = ask(desk, words, capsys), say(desk, words, capsys)
            if by_warehouse != by_spark:
                differing.append((words, by_warehouse, by_spark))
    assert differing == [], "\n".join(f"{each[0]}\n{each[1][2][:600]}\n{each[1][1][:300]}" for each in differing)
    statements = [asked.body for asked in server.of("POST /api/2.0/sql/statements")]
    assert {body["warehouse_id"] for body in statements} == {"w1"}
    # Values go apart from the text.
    assert not any("by-customer" in body["statement"] for body in statements)


@pytest.mark.long
def test_reviews_and_snoozes_are_written_over_a_warehouse(
    desk: Tables, server: WorkspaceServer, capsys: pytest.CaptureFixture[str]
) -> None:
    alert_id = json.loads(ask(desk, ["alerts", "--queue", "--json"], capsys)[1].splitlines()[0])["alert_id"]
    code, out, err = ask(desk, ["review", alert_id, "--disposition", "benign", "--note", ODD], capsys)
    assert (code, "is recorded as benign" in out) == (0, True), err
    assert (
        "was already recorded" in ask(desk, ["review", alert_id, "--disposition", "benign", "--note", ODD], capsys)[1]
    )
    (review,) = desk.read("reviews").where(f"alert_id = '{alert_id}'").collect()
    assert (review["reviewer"], review["note"], review["disposition"]) == ("ann@example.com", ODD, "benign")
    snooze = ["snooze", "by-customer", "--key", "customer=9", "--until", "8 hours", "--reason", ODD]
    code, out, err = ask(desk, snooze, capsys)
    assert code == 0, err
    (row,) = desk.read("snoozes").where("key['customer'] = '9'").collect()
    assert (row["rule_id"], row["reason"], row["author"]) == ("by-customer", ODD, "ann@example.com")


@pytest.mark.long
def test_lists_are_changed_over_a_warehouse(
    desk: Tables, server: WorkspaceServer, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(*words: str) -> tuple[Any, ...]:
        code, out, err = ask(desk, ["lists", *words, "--json"], capsys)
        assert code == 0, err
        report = json.loads(out)
        return tuple(value for name, value in report.items() if name not in ("list", "seconds", "rejections"))

    assert change("add", "shops", "a", ODD, "a", "--reason", ODD) == (3, 2, 0, 1, 0, 2)
    # The same again changes nothing; another end changes the value, and keeps its reason.
    assert change("add", "shops", "a") == (1, 0, 0, 1, 0, 2)
    assert change("add", "shops", "a", "--until", "8 hours", "--author", "kim") == (1, 0, 1, 0, 0, 2)
    rows = desk.read("lists").where("list = 'shops'").orderBy("value").collect()
    assert [(row["value"], row["reason"], row["author"], row["expires_at"] is None) for row in rows] == [
        ("a", ODD, "kim", False),
        (ODD, ODD, "ann@example.com", True),
    ]
    assert change("remove", "shops", ODD, "b") == (1, ["b"])
    assert change("remove", "shops", "a") == (1, [])
    assert desk.read("lists").where("list = 'shops'").isEmpty()
    statements = [asked.body["statement"] for asked in server.of("POST /api/2.0/sql/statements")]
    assert not any("shops" in text or "[bold]" in text for text in statements)


@pytest.mark.long
def test_a_change_over_a_warehouse_is_repeated_when_another_writer_was_faster(
    desk: Tables, server: WorkspaceServer, capsys: pytest.CaptureFixture[str]
) -> None:
    answer, merges = server.replies["POST /api/2.0/sql/statements"], []
    message = "[DELTA_CONCURRENT_APPEND.WHOLE_TABLE_READ] Files were added by a concurrent update."

    def conflict_once(asked: Asked) -> Answer:
        if "MERGE INTO" in asked.body["statement"]:
            merges.append(asked)
            if len(merges) == 1:
                error = {"error_code": "BAD_REQUEST", "message": message}
                return Answer({"statement_id": "1", "status": {"state": "FAILED", "error": error}})
        return answer(asked)

    server.replies["POST /api/2.0/sql/statements"] = conflict_once
    code, out, err = ask(desk, ["lists", "add", "late", "a"], capsys)
    assert (code, len(merges)) == (0, 2), err
    assert "1 added" in out


@pytest.mark.long
@pytest.mark.parametrize("words", [["rules", "pause", "all"], ["maintain"], ["lists", "import", "vips", "a.csv"]])
def test_what_a_warehouse_cannot_do_is_refused_before_anything_is_written(
    desk: Tables, server: WorkspaceServer, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    code, _, err = ask(desk, words, capsys)
    assert (code, err.splitlines()[-1]) == (
        2,
        "lookback: this needs Spark, which --warehouse does without; leave it out",
    )
    assert not [each for each in server.of("POST /api/2.0/sql/statements") if "INSERT" in each.body["statement"]]


@pytest.mark.long
def test_status_over_a_warehouse_is_that_of_the_tables(
    desk: Tables, server: WorkspaceServer, capsys: pytest.CaptureFixture[str]
) -> None:
    def read(words: list[str]) -> dict[str, Any]:
        return json.loads(ask(desk, words, capsys)[1])

    found, expected = read(["status", "--json"]), json.loads(say(desk, ["status", "--json"], capsys)[1])
    # The checkpoint is not read, so what is judged comes from the last alert.
    own = ("judged", "lag_commits", "lag_seconds", "account", "health", "healthy", "findings")
    assert {**found, **dict.fromkeys(own)} == {**expected, **dict.fromkeys(own)}
