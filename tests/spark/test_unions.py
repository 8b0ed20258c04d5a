"""Unions (12.8): ingest fills a union from its members' change feeds, each event once, and rules judge across members."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import lookback
from alert_rows import collect_alerts, list_alerts
from lookback.core.errors import SetupError
from lookback.core.streams.declaration import Stream
from lookback.core.streams.members import complete_union
from lookback.spark.explaining.explanations import explain
from lookback.spark.ingest.files import ingest
from lookback.spark.ingest.unions import UnionIngest
from lookback.spark.replay.backtest import Candidate, backtest
from lookback.spark.replay.proof import prove
from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder
from lookback.spark.tables.sqltexts import quote_text
from payins import publish, stored_alerts

if TYPE_CHECKING:
    from lookback.spark.ingest.report import IngestReport
    from lookback.spark.tables.lakehouse import Tables

pytestmark = pytest.mark.spark
LOGINS = Stream.from_dict(
    {
        "stream": "logins",
        "event_id": "login_id",
        "event_time": "at",
        "fields": {"login_id": "bigint", "at": "timestamp", "user": "string", "ok": "boolean"},
        "max_out_of_orderness": "1 minute",
    }
)
PAYMENTS = Stream.from_dict(
    {
        "stream": "payments",
        "event_id": "id",
        "event_time": "paid_at",
        "fields": {"id": "string", "paid_at": "timestamp", "payer": "string", "cents": "bigint", "note": "string"},
    }
)
STREAMS = {"logins": LOGINS, "payments": PAYMENTS}
DOCUMENT: dict[str, Any] = {
    "stream": "activity",
    "union": ["logins", "payments"],
    "fields": {"user": "string", "ok": "boolean", "amount": "decimal(9,2)", "cents": "bigint"},
    "columns": {"payments": {"user": "payer", "amount": "cents / 100"}},
}


def declare(streams: dict[str, Stream] = STREAMS, **changes: Any) -> Stream:
    document, problems = complete_union({**DOCUMENT, **changes}, streams)
    assert not problems
    return Stream.from_dict(document)


UNION = declare()


def login(tables: Tables, *rows: tuple[int, str, str, bool]) -> None:
    """Writes logins in one commit: id, minute, user, ok."""
    tables.require(LOGINS)
    values = ", ".join(
        f"({id_}, timestamp '2026-01-31 {minute}:00Z', {quote_text(user)}, {ok}, {at}, now())"
        for at, (id_, minute, user, ok) in enumerate(rows)
    )
    tables.spark.sql(f"INSERT INTO {tables.identifier('logins')} VALUES {values}")


def pay(tables: Tables, *rows: tuple[str, str, str, int]) -> None:
    """Writes payments in one commit: id, minute, payer, cents."""
    tables.require(PAYMENTS)
    values = ", ".join(
        f"({quote_text(id_)}, timestamp '2026-01-31 {minute}:00Z', {quote_text(payer)}, {cents}, null, {at}, now())"
        for at, (id_, minute, payer, cents) in enumerate(rows)
    )
    tables.spark.sql(f"INSERT INTO {tables.identifier('payments')} VALUES {values}")


def take(tables: Tables, union: Stream = UNION, streams: dict[str, Stream] = STREAMS, **options: Any) -> IngestReport:
    return UnionIngest(tables, streams, union, progress=None, **options).run()


def changes(tables: Tables, name: str = "activity") -> list[tuple[str, str]]:
    """All that the change feed of the union has, in order."""
    rows = tables.read_changes(name, 0).orderBy("_commit_version", "_change_type", "event_time", "position", "event_id")
    return [(row["_change_type"], row["event_id"]) for row in rows.collect()]


def delete(tables: Tables, name: str, condition: str) -> None:
    tables.spark.sql(f"DELETE FROM {tables.identifier(name)} WHERE {condition}")


@pytest.mark.long
def test_c12_8_a_union_has_the_fields_of_its_members_by_name_or_by_columns(tables: Tables) -> None:
    login(tables, (7, "10:00", "ann", False), (8, "10:05", "bob", True))
    pay(tables, ("p:1", "10:02", "ann", 1250))
    report = take(tables)
    assert (report.offered, report.ingested, report.rejected, report.commits) == (3, 3, 0, 1)
    rows = tables.read("activity").orderBy("event_time").collect()
    shown = [tuple(str(row[name]) for name in ("event_id", "member", "user", "ok", "amount", "cents")) for row in rows]
    assert shown == [
        ("logins:7", "logins", "ann", "False", "None", "None"),
        ("payments:p:1", "payments", "ann", "None", "12.50", "1250"),
        ("logins:8", "logins", "bob", "True", "None", "None"),
    ]
    assert take(tables).offered == 0


@pytest.mark.long
def test_c12_8_structs_of_members_come_by_their_parts(tables: Tables) -> None:
    streams = {}
    for name, process in (("windows", "struct<name:string,id:int>"), ("linux", "struct<name:string,user:string>")):
        fields = {"id": "string", "at": "timestamp", "process": process}
        streams[name] = Stream.from_dict({"stream": name, "event_id": "id", "event_time": "at", "fields": fields})
        tables.require(streams[name])
    into = "(id, at, process, position, ingested_at) VALUES ('1', timestamp '2026-01-31 10:0"
    for name, process in (
        ("windows", "0:00Z', named_struct('name', 'CMD', 'id', 7)"),
        ("linux", "1:00Z', named_struct('name', 'SH', 'user', 'ann')"),
    ):
        tables.spark.sql(f"INSERT INTO {tables.identifier(name)} {into}{process}, 0, now())")
    document = {
        "stream": "all",
        "union": ["windows", "linux"],
        "columns": {"linux": {"process.name": "lower(process.name)"}},
    }
    whole, problems = complete_union(document, streams)
    assert not problems
    assert take(tables, Stream.from_dict(whole), streams).ingested == 2
    rows = tables.read("all").orderBy("event_time").collect()
    assert [row["process"].asDict() for row in rows] == [
        {"name": "CMD", "id": 7, "user": None}, {"name": "sh", "id": None, "user": "ann"},
    ]  # fmt: skip


@pytest.mark.long
def test_c12_8_each_event_comes_once_whatever_becomes_of_the_checkpoint(tables: Tables) -> None:
    login(tables, (1, "10:00", "ann", True))
    take(tables)
    login(tables, (2, "10:01", "ann", True))
    pay(tables, ("a", "10:02", "ann", 1))
    with pytest.MonkeyPatch.context() as patch:
        # As if the process were killed after it wrote, before it noted that.
        patch.setattr(UnionIngest, "_write_progress", lambda self, read: {}["killed"])
        with pytest.raises(KeyError, match="killed"):
            take(tables)
    again = take(tables)
    assert (again.offered, again.ingested, again.duplicates) == (2, 0, 2)
    # Another checkpoint knows nothing, and all is read again.
    again = take(tables, checkpoint=f"{tables.root}/elsewhere")
    assert (again.offered, again.ingested, again.duplicates) == (3, 0, 3)
    assert changes(tables) == [("insert", "logins:1"), ("insert", "logins:2"), ("insert", "payments:a")]


@pytest.mark.long
def test_c12_8_a_delete_of_a_member_reaches_the_union(tables: Tables) -> None:
    login(tables, (1, "10:00", "ann", True), (2, "10:01", "bob", True))
    take(tables)
    delete(tables, "logins", "login_id = 1")
    # Gone before it came.
    pay(tables, ("a", "10:02", "ann", 1), ("b", "10:03", "bob", 1))
    delete(tables, "payments", "id = 'a'")
    take(tables)
    expected = [("insert", "logins:1"), ("insert", "logins:2"), ("delete", "logins:1"), ("insert", "payments:b")]
    assert changes(tables) == expected
    # Nor do they come again with a new checkpoint.
    take(tables, checkpoint=f"{tables.root}/elsewhere")
    assert changes(tables) == expected


@pytest.mark.long
def test_c12_8_an_event_that_is_replaced_in_a_member_is_replaced_in_the_union(tables: Tables) -> None:
    login(tables, (1, "10:00", "ann", True), (2, "10:01", "bob", True))
    take(tables)
    delete(tables, "logins", "login_id = 1")
    login(tables, (1, "10:00", "eve", True))
    # The same again, as RESTORE writes it.
    delete(tables, "logins", "login_id = 2")
    login(tables, (2, "10:01", "bob", True))
    take(tables)
    assert changes(tables)[2:] == [("delete", "logins:1"), ("insert", "logins:1")]
    take(tables, checkpoint=f"{tables.root}/elsewhere")
    assert len(changes(tables)) == 4


@pytest.mark.long
def test_c12_8_events_of_one_time_keep_the_order_of_their_member(tables: Tables) -> None:
    login(tables, (9, "10:00", "ann", False), (3, "10:00", "ann", False))
    login(tables, (1, "10:00", "ann", True))
    take(tables)
    rows = tables.read("activity").orderBy("position").collect()
    assert [row["event_id"] for row in rows] == ["logins:9", "logins:3", "logins:1"]


def test_c12_8_what_cannot_be_converted_is_rejected_and_can_be_mended(tables: Tables) -> None:
    union = declare(columns={"payments": {"amount": "cast(note as decimal(9,2))", "user": "payer"}})
    tables.require(PAYMENTS)
    tables.spark.sql(
        f"INSERT INTO {tables.identifier('payments')} VALUES "
        "('a', timestamp '2026-01-31 10:00:00Z', 'ann', 1, 'much', 0, now()), "
        "('b', timestamp '2026-01-31 10:01:00Z', 'ann', 1, '7.5', 1, now())"
    )
    report = take(tables, union)
    assert (report.offered, report.ingested, report.rejected) == (2, 1, 1)
    (row,) = tables.read("rejected_events").collect()
    assert row["source"] == "stream payments"
    assert "amount" in row["reason"]
    assert '"user":"ann"' in row["raw"]


@pytest.mark.long
def test_c12_8_a_member_may_be_a_table_that_others_write(tables: Tables) -> None:
    place = f"{tables.root}/theirs"
    tables.spark.sql(
        f"CREATE TABLE delta.`{place}` (id bigint, at timestamp, user string) USING delta TBLPROPERTIES "
        "(delta.enableChangeDataFeed = true, delta.enableInCommitTimestamps = true)"
    )
    theirs = Stream.from_dict(
        {
            "stream": "theirs",
            "event_id": "id",
            "event_time": "at",
            "fields": {"id": "bigint", "at": "timestamp", "user": "string"},
            "table": place,
            "order_by": ["user"],
        }
    )
    streams = {**STREAMS, "theirs": theirs}
    union = declare(streams, union=["theirs", "logins"], fields={"user": "string"}, columns={})
    tables.spark.sql(
        f"INSERT INTO delta.`{place}` VALUES (1, timestamp '2026-01-31 10:00:00Z', 'b'), "
        "(2, timestamp '2026-01-31 10:00:00Z', 'a'), (null, now(), 'c'), (3, null, 'c')"
    )
    login(tables, (1, "10:00", "ann", True))
    take(tables, union, streams)
    tables.spark.sql(f"UPDATE delta.`{place}` SET user = 'z' WHERE id = 1")
    tables.spark.sql(f"DELETE FROM delta.`{place}` WHERE id = 2")
    take(tables, union, streams)
    assert changes(tables) == [
        ("insert", "theirs:2"),
        ("insert", "theirs:1"),
        ("insert", "logins:1"),
        ("delete", "theirs:2"),
    ]


@pytest.mark.long
def test_c12_8_where_a_feed_no_longer_reaches_the_table_itself_is_read(
    tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    login(tables, (1, "10:00", "ann", True), (2, "10:01", "bob", True))
    take(tables)
    delete(tables, "logins", "login_id = 1")
    login(tables, (3, "10:02", "ann", True))
    monkeypatch.setattr("lookback.spark.ingest.unions.find_first_readable", lambda tables, name: 99)
    take(tables)
    assert changes(tables)[2:] == [("delete", "logins:1"), ("insert", "logins:3")]


def test_c12_8_files_are_not_ingested_into_a_union(tables: Tables) -> None:
    with pytest.raises(SetupError, match="is a union, whose events come from logins, payments"):
        ingest(tables, UNION, "somewhere")
    with pytest.raises(SetupError, match="is not a union"):
        UnionIngest(tables, STREAMS, LOGINS)


RULES: list[dict[str, Any]] = [
    {
        "rule_id": "login-then-payment",
        "stream": "activity",
        "group_by": ["user"],
        "sequence": {
            "within": "10 minutes",
            "steps": [
                {"name": "failed", "where": "member = 'logins' and not ok", "at_least": 2},
                {"name": "paid", "where": "member = 'payments' and amount > 100"},
            ],
        },
    },
    {
        "rule_id": "in-ten-minutes",
        "stream": "activity",
        "group_by": ["user"],
        "window": {"tumbling": "10 minutes"},
        "measures": {"n": "count(*)", "members": "count(distinct member)"},
    },
]


@pytest.mark.long
def test_c12_8_a_rule_follows_a_login_by_a_payment_and_waits_for_the_slower_member(tables: Tables) -> None:
    streams, folder = {**STREAMS, "activity": UNION}, checkpoint_folder(tables, UNION)
    tables.create(UNION)
    publish(tables, RULES)
    login(tables, (1, "10:00", "ann", False), (2, "10:01", "ann", False))
    pay(tables, ("z", "09:58", "bob", 1))
    take(tables)
    # Payments are an hour and a half behind, but they come: no payment is late.
    login(tables, (3, "11:30", "cat", True))
    pay(tables, ("a", "10:05", "ann", 50_000))
    take(tables)
    pay(tables, ("b", "10:06", "ann", 60_000), ("c", "10:10", "bob", 1))
    take(tables)
    Evaluation(tables, UNION, streams, folder, once=True).run()
    raised = [(row.rule_id, row.event_id) for row in stored_alerts(tables)]
    assert sorted(raised, key=str) == [
        ("in-ten-minutes", None),
        ("login-then-payment", "payments:a"),
        ("login-then-payment", "payments:b"),
    ]
    assert tables.read("late_events").count() == 0
    with backtest(tables, UNION, [Candidate(each) for each in RULES]) as result:
        assert sorted(collect_alerts(result.alerts)) == stored_alerts(tables)
    # The events of the union as a replay takes them.
    feed = tables.read_changes("activity", 0).withColumnRenamed("_commit_version", "arrival")
    rows = feed.drop("_change_type", "_commit_timestamp", "ingested_at").toArrow()
    assert sorted(list_alerts(lookback.replay(RULES, rows, UNION))) == stored_alerts(tables)
    for row in tables.read("alerts").collect():
        assert explain(tables, streams, row["alert_id"], revision=row["revision"]).consistent

    # A login that is deleted from its stream counts no longer.
    delete(tables, "logins", "login_id = 2")
    pay(tables, ("d", "10:07", "ann", 70_000))
    take(tables)
    Evaluation(tables, UNION, streams, folder, once=True).run()
    alerts = stored_alerts(tables)
    assert "payments:d" not in {row.event_id for row in alerts}
    with prove(tables, UNION, streams) as proofs:
        assert all(row.holds for row in proofs.rows)
    Evaluation(tables, UNION, streams, folder, once=True, rebuild=True).run()
    assert stored_alerts(tables) == alerts
