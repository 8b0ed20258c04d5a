"""Privacy requests: what leaves the tables and the state, what stays, and that a killed request can be made again."""

from __future__ import annotations

import datetime as dt
import json
import shutil
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F  # noqa: N812

from lookback.cli import main
from lookback.core.errors import ExpressionError, SetupError
from lookback.core.streams.alerts import REMOVED
from lookback.core.streams.declaration import Stream
from lookback.spark.operations import forget as forgetting
from lookback.spark.operations.dependents import Dependents
from lookback.spark.operations.forget import ForgetReport, forget
from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder
from lookback.spark.tables.lakehouse import Tables
from lookback.spark.tables.schemas import PRODUCT_TABLES, REJECTED_EVENTS
from payins import START, STREAM, STREAMS, append, publish, rule, sequence

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.spark
CUSTOMER = "customer = 17"
NOW = dt.datetime(2026, 3, 1, tzinfo=dt.timezone.utc)
SECOND = 1_000_000
RULES = [
    rule("by-customer", when="n >= 2", message="{n}"),
    rule("by-shop", group_by=["shop"], when="n >= 3", message="{n} in {shop}"),
    sequence(
        "pair",
        [{"name": "one", "where": "amount = 1"}, {"name": "two", "where": "amount = 2"}],
        group_by=["shop"],
        message="{one.customer}",
    ),
    rule("failing", group_by=[], when="total / (n - 1) > 1000000", message=""),
]


def event(event_id: str, seconds: int, customer: int, amount: int, arrival: int = 1) -> dict[str, Any]:
    return {
        "id": event_id, "at": START + seconds * SECOND, "customer": customer, "shop": "a", "amount": f"{amount}.00",
        "arrival": arrival,
    }  # fmt: skip


def evaluate(tables: Tables) -> None:
    Evaluation(tables, STREAM, STREAMS, checkpoint_folder(tables, STREAM), once=True).run()


def reject(tables: Tables, *raws: str | None) -> None:
    rows = [(STREAM.name, raw, "amount: 'x' is not decimal(18,2)", "a.json", NOW, None, None) for raw in raws]
    tables.append(tables.spark.createDataFrame(rows, REJECTED_EVENTS), "rejected_events")


def values(tables: Tables, name: str, *columns: str) -> list[tuple[Any, ...]]:
    return sorted(tuple(row) for row in tables.read(name).selectExpr(*columns).collect())


@pytest.fixture(scope="module")
def made(created: Tables, tmp_path_factory: pytest.TempPathFactory) -> Tables:
    """Tables with two customers in one shop. Of 17 are e1 (which also fails a rule), e3 and, 10 minutes late, e4."""
    root = tmp_path_factory.mktemp("forget") / "lakehouse"
    for name in PRODUCT_TABLES:
        shutil.copytree(created.path_or_name(name), root / name)
    tables = Tables.local(created.spark, root)
    tables.create(STREAM)
    publish(tables, RULES)
    append(
        tables,
        [
            event("e1", 0, 17, 1), event("e2", 1, 5, 2), event("e3", 2, 17, 3),
            event("e4", -600, 17, 3, 2), event("e5", 3, 5, 3, 2),
        ],
    )  # fmt: skip
    evaluate(tables)
    reviews = tables.read("alerts").selectExpr(
        "alert_id", "'unclear' disposition", "'ann' reviewer", "'' note", "current_timestamp() reviewed_at"
    )
    tables.append(reviews, "reviews")
    labels = [(STREAM.name, id_, True, None, dt.datetime.now(dt.timezone.utc), None, None) for id_ in ("e1", "e2")]
    tables.append_rows([*labels, ("others", *labels[0][1:])], "labels")
    now = dt.datetime.now(dt.timezone.utc)
    keys = [
        ("by-customer", {"customer": "17"}),
        ("by-customer", {"customer": "5"}),
        (None, {"customer": "17"}),
        ("others", {"customer": "17"}),
    ]
    tables.append_rows(
        [(rule_id, key, now, now, "known", "ann") for rule_id, key in [*keys, ("by-customer", None)]], "snoozes"
    )
    # What was ever looked up in a list is known by the versions of rules.
    publish(tables, [rule("listed", where="in_list(customer, 'vips') and in_list(shop, 'shops')")], status="draft")
    tables.append_rows(
        [(name, value, None, None, now, None, None) for name in ("vips", "shops") for value in ("17", "5", "x")],
        "lists",
    )
    reject(tables, json.dumps({"id": "r1", "customer": "17", "amount": "x"}), json.dumps({"customer": 5}), '17,"', None)
    return tables


@pytest.fixture
def lived(made: Tables, tmp_path: Path) -> Tables:
    """A copy of these tables, with the checkpoint of their evaluation."""
    shutil.copytree(str(made.root), tmp_path / "lakehouse")
    return Tables.local(made.spark, tmp_path / "lakehouse")


def names(tables: Tables) -> list[tuple[Any, ...]]:
    return values(tables, "alerts", "rule_id", "event_id")


BEFORE = [
    ("by-customer", "e3"), ("by-customer", "e5"), ("by-shop", "e3"), ("by-shop", "e5"), ("pair", "e2"),
]  # fmt: skip


@pytest.mark.long
def test_other_streams_that_mention_the_value_are_named_with_the_command(lived: Tables) -> None:
    refunds, visits = (Stream.from_dict({**STREAM.to_dict(), "stream": name}) for name in ("refunds", "visits"))
    texts = {**visits.to_dict(), "fields": {**STREAM.to_dict()["fields"], "customer": "string"}}
    visits = Stream.from_dict(texts)
    for stream in (refunds, visits):
        lived.create(stream)
    lived.append(lived.read(STREAM.name), "refunds")
    publish(lived, [rule("refunded", stream="refunds")], status="draft")
    now = dt.datetime.now(dt.timezone.utc)
    lived.append_rows([("refunded", {"customer": "17"}, now, now, "known", "ann")], "snoozes")
    before = lived.version("refunds"), lived.version(STREAM.name), lived.version("snoozes")
    streams = [STREAM, refunds, visits]
    report = forget(lived, STREAM, CUSTOMER, dry_run=True, streams=streams)
    assert [(each.stream, each.events, each.snoozes) for each in report.mentions] == [("refunds", 3, 1), ("", 0, 1)]
    assert report.list_lines()[-3:] == [
        "Other streams are not part of this request, and still mention the values:",
        "  refunds: 3 events and 1 snooze; run lookback forget refunds --where 'customer = 17'",
        "  the table snoozes: 1 row of rules that are in no declared stream; delete them there",
    ]
    assert before == (lived.version("refunds"), lived.version(STREAM.name), lived.version("snoozes"))
    assert forget(lived, STREAM, "customer = 99", dry_run=True, streams=streams).mentions == ()


@pytest.mark.long
def test_what_belongs_to_a_customer_leaves_every_table_and_the_state(lived: Tables) -> None:
    assert names(lived) == BEFORE
    assert values(lived, "late_events", "event_id") == [("e4",)]
    failed = lived.read("rule_log").where("action = 'failed'")
    assert "the first is e1" in failed.head()["message"]  # type: ignore[index]
    folder = checkpoint_folder(lived, STREAM)
    counted = {
        "payins": 3, "reviews": 3, "alerts": 3, "labels": 1, "snoozes": 2, "lists": 1, "late_events": 1, "rule_log": 1, "rejected_events": 1,
    }  # fmt: skip

    trial = forget(lived, STREAM, CUSTOMER, dry_run=True, checkpoint=folder)
    assert (dict(trial.rows), trial.unreadable, trial.commit, trial.purges) == (counted, 2, None, ())
    assert names(lived) == BEFORE

    report = forget(lived, STREAM, CUSTOMER, checkpoint=folder)
    # by-customer e3 by its event and its key, by-shop e3 by its event, and pair, whose evidence has e1, though 5 ended it.
    assert (dict(report.rows), report.waiting) == (counted, True)
    assert report.commit == lived.version(STREAM.name)
    assert names(lived) == [("by-customer", "e5"), ("by-shop", "e5")]
    assert [row[0] for row in values(lived, STREAM.name, "id")] == ["e2", "e5"]
    assert lived.read("late_events").isEmpty()
    assert values(lived, "labels", "stream", "event_id") == [("others", "e1"), ("payins", "e2")]
    left = {(row["rule_id"], (row["key"] or {}).get("customer")) for row in lived.read("snoozes").collect()}
    assert left == {("by-customer", "5"), ("others", "17"), ("by-customer", None)}
    assert values(lived, "lists", "list", "value") == [
        ("shops", "17"), ("shops", "5"), ("shops", "x"), ("vips", "5"), ("vips", "x")
    ]  # fmt: skip
    assert failed.isEmpty()
    assert lived.read("rule_log").where("action = 'activated'").count() == len(RULES)
    assert lived.read("rejected_events").where("raw like '%r1%'").isEmpty()
    assert lived.read("rejected_events").count() == 3
    kept = {row[0] for row in values(lived, "alerts", "alert_id")}
    assert {row[0] for row in values(lived, "reviews", "alert_id")} == kept

    # The deletion is judged, though no commit has followed it.
    evaluate(lived)
    assert forget(lived, STREAM, CUSTOMER, checkpoint=folder).waiting is False

    # The window of e6 holds e2, e5 and e6, and no more e1 and e3.
    append(lived, [event("e6", 4, 5, 1)])
    evaluate(lived)
    (counts,) = [
        row["measures"] for row in lived.read("alerts").where("event_id = 'e6' and rule_id = 'by-shop'").collect()
    ]
    assert counts["n"] == "3"
    again = forget(lived, STREAM, CUSTOMER, checkpoint=folder)
    assert (again.total, again.commit, again.waiting) == (0, report.commit, False)
    check_purges(lived, report, again)


def check_purges(tables: Tables, report: ForgetReport, again: ForgetReport) -> None:
    kept = {purge.table: purge for purge in report.purges}
    assert set(kept) == set(report.rows)
    assert kept["alerts"].statements == (f"VACUUM {tables.identifier('alerts')}",)
    now = dt.datetime.now(dt.timezone.utc)
    for name, days in ((STREAM.name, 30), ("alerts", 30), ("reviews", 7)):
        assert dt.timedelta(0) < now + dt.timedelta(days=days) - kept[name].after < dt.timedelta(minutes=5)
    # Made again, it says the same, to the time of the commits.
    assert {purge.table for purge in again.purges} == set(kept)
    for purge in again.purges:
        assert abs(purge.after - kept[purge.table].after) < dt.timedelta(minutes=2)
    assert "has not judged" not in str(again)
    assert f"has not judged commit {report.commit} yet" in str(report)
    assert tables.spark.sql(kept["alerts"].statements[0]).columns == ["path"]


def test_what_rules_make_of_values_for_their_keys_is_forgotten_with_them(ready: Tables) -> None:
    tables = ready
    shout = rule("shout", group_by=[{"name": "concat(upper(shop), '-', cast(customer as string))"}])
    steps = [{"name": "one", "where": "amount = 1", "key": ["id"]}, {"name": "two", "where": "amount = 2"}]
    publish(tables, [shout, sequence("named", steps, group_by=["shop"], message="")], status="draft")
    append(tables, [event("e1", 0, 17, 1), event("e2", 1, 5, 2)])
    now = dt.datetime.now(dt.timezone.utc)
    keys = [
        ("shout", {"name": "A-17"}),
        ("shout", {"name": "A-5"}),
        ("named", {"shop": "e1"}),
        ("named", {"shop": "e2"}),
    ]
    tables.append_rows([(name, key, now, now, "a trip of a-17 and A-5", "ann") for name, key in keys], "snoozes")

    report = forget(tables, STREAM, CUSTOMER)

    assert report.rows["snoozes"] == 2
    assert values(tables, "snoozes", "rule_id", "to_json(key)", "reason") == [
        ("named", '{"shop":"e2"}', f"a trip of {REMOVED} and A-5"),
        ("shout", '{"name":"A-5"}', f"a trip of {REMOVED} and A-5"),
    ]


class Killed(Exception):
    pass


@pytest.mark.long
def test_a_request_killed_at_any_step_is_finished_by_the_next_one(
    lived: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = forgetting.change_table, 0

    def stopping(tables: Tables, name: str, act: Any) -> None:
        nonlocal left
        if not left:
            raise Killed
        left -= 1
        real(tables, name, act)

    monkeypatch.setattr(forgetting, "change_table", stopping)
    deleted = 0
    for steps in (2, 6):
        left = steps
        with pytest.raises(Killed):
            forget(lived, STREAM, CUSTOMER)
        deleted += steps
    assert deleted == 8
    # Only the events are left; and, killed just after they went, what the evaluation wrote before it judged that commit.
    left = 1
    written = lived.read("alerts").where("event_id = 'e5'").withColumn("event_id", F.lit("e1")).collect()
    dependents = Dependents.find
    schema = lived.read("alerts").schema

    def killed_after_the_events(self: Any) -> Any:
        if lived.read(STREAM.name).where(CUSTOMER).isEmpty():
            raise Killed
        return dependents(self)

    monkeypatch.setattr(Dependents, "find", killed_after_the_events)
    with pytest.raises(Killed):
        forget(lived, STREAM, CUSTOMER)
    monkeypatch.setattr(Dependents, "find", dependents)
    monkeypatch.setattr(forgetting, "change_table", real)
    lived.append(lived.spark.createDataFrame(written, schema), "alerts")
    report = forget(lived, STREAM, CUSTOMER)
    assert report.rows["alerts"] == 4  # both rules' row of e5, whose id they were given, and what bears the same id
    assert report.rows[STREAM.name] == 0
    assert lived.read("alerts").where("event_id = 'e1'").isEmpty()


@contextmanager
def writing(tables: Tables) -> Iterator[list[int]]:
    """Others append to the events and to rejected_events meanwhile, as far apart as batches of an ingest are."""
    stop, wrote, failures = threading.Event(), [], []

    def write() -> None:
        try:
            while not stop.wait(2):
                append(tables, [event(f"w{len(wrote)}", 5, 5, 1)])
                reject(tables, "{}")
                wrote.append(1)
        except Exception as error:  # noqa: BLE001 - told by the test
            failures.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield wrote
    finally:
        stop.set()
        thread.join()
    assert not failures


def test_c4_what_is_no_condition_over_the_fields_is_refused_before_anything_is_read(
    created: Tables, tmp_path: Path
) -> None:
    for where, said in (
        ("", "is empty"),
        ("customer", "is of type int"),
        ("1 = 1", "does not name a field"),
        ("true", "does not name a field"),
        ("custmer = 17", "did you mean 'customer'"),
        ("customer = 17; DROP TABLE payins", "without a semicolon"),
        ("customer = (select max(customer) from payins)", "not allowed"),
        ("customer = 17 -- or", "customer = 17"),
    ):
        if "--" in where:
            assert forgetting.forget_condition(STREAM, where).sql == said
            continue
        with pytest.raises(ExpressionError, match=said.replace("(", r"\(")):
            forget(created, STREAM, where)
    with pytest.raises(SetupError, match="lookback init"):
        forget(Tables.local(created.spark, tmp_path), STREAM, CUSTOMER)


@pytest.mark.parametrize(
    "shop",
    [
        "a' or 'x' = 'x",
        "a\\' or true --",
        "`a`; DROP TABLE x",
        "${env:HOME}",
        "${spark.app.name}",
        "a\nb\x00c",
        "\\${x}",
        "ü\u202e",
    ],
)
def test_a_literal_is_compared_and_never_run(created: Tables, shop: str) -> None:
    frame = created.spark.createDataFrame([(shop,), ("other",)], "shop string")
    text = shop.replace("\\", "\\\\").replace("'", "\\'")
    condition = forgetting.forget_condition(STREAM, f"shop = '{text}'")
    found = frame.where(F.expr(forgetting.to_spark_sql(condition))).collect()
    assert [row[0] for row in found] == [shop]


@pytest.mark.long
def test_command_asks_then_deletes_while_others_write(
    lived: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "conf/streams"
    folder.mkdir(parents=True)
    (folder / "payins.yml").write_text(json.dumps(STREAM.to_dict()))
    command = ["--root", str(lived.root), "--conf", str(folder.parent), "forget", "payins", "--where", CUSTOMER]
    # Not at a terminal, and nobody has said yes.
    assert main(command) == 2
    assert "--yes" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: "n")
    assert main(command) == 0
    assert "would be deleted" in (said := capsys.readouterr().out)
    assert "nothing was deleted" in said
    assert lived.read(STREAM.name).count() == 5
    with writing(lived) as wrote:
        assert main([*command, "--yes", "--json"]) == 0
    assert lived.read(STREAM.name).where("id like 'w%'").count() == len(wrote) > 0
    assert lived.read("rejected_events").where("raw = '{}'").count() == len(wrote)
    told = json.loads(capsys.readouterr().out)
    assert (told["rows"][STREAM.name], told["waiting"], told["dry_run"]) == (3, True, False)
    assert told["purges"][0]["statements"][0].startswith("VACUUM delta.`")
    assert main([*command[:-1], "1 / customer > 0", "--dry-run"]) == 0
    append(lived, [event("zero", 9, 0, 1)])
    assert main([*command[:-1], "1 / customer > 0", "--dry-run"]) == 2
    assert "cannot be computed for every row" in capsys.readouterr().err
