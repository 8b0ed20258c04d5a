"""Look-ups at ingest (11.4): values of another table are stored in the event with its version, and these are what is judged."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from lookback.core.errors import SetupError
from lookback.core.streams.declaration import Stream
from lookback.spark.ingest.files import ingest, ingest_continuously, retry_rejected
from lookback.spark.ingest.lookups import Lookups
from lookback.spark.ingest.report import IngestReport
from lookback.spark.ingest.topics import TopicIngest
from lookback.spark.operations.forget import forget
from lookback.spark.replay.proof import prove
from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder
from payins import publish, stored_alerts

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from broker import Broker
    from lookback.spark.tables.lakehouse import Tables

pytestmark = pytest.mark.spark
PAGE = Path(__file__).parents[2] / "docs/how-to/look-ups.md"
LOOKUP: dict[str, Any] = {
    "table": "customers",
    "on": "customer_id",
    "fields": {"segment": "string"},
    "missing": None,
}
STRICT = {**LOOKUP, "missing": "reject"}
SEVERAL = (
    "customer_id: '2' has several rows in table customers, which differ in segment: leave one of them there, then "
    "--retry-rejected"
)


def stream(*lookups: dict[str, Any], **changes: Any) -> Stream:
    document = {
        "stream": "events",
        "event_id": "id",
        "event_time": "at",
        "fields": {"id": "string", "at": "timestamp", "customer_id": "bigint"},
        "commit_rows": 2,
        "lookups": list(lookups),
    }
    return Stream.from_dict({**document, **changes})


def write(tables: Tables, rows: list[tuple[Any, ...]], name: str = "customers", columns: str = "") -> int:
    """Replaces a table's rows in one commit. Returns its version."""
    frame = tables.spark.createDataFrame(rows, columns or "customer_id bigint, segment string").coalesce(1)
    writer = frame.write.format("delta").mode("overwrite").option("overwriteSchema", "true")
    writer.saveAsTable(name) if "." in name else writer.save(tables.path_or_name(name))
    return tables.version(name)


def offer(file: Path, *rows: tuple[str, Any] | dict[str, Any]) -> Path:
    """Writes events to a file, a second apart; a pair is an id and a customer."""
    lines = []
    for at, row in enumerate(rows):
        event = row if isinstance(row, dict) else {"id": row[0], "customer_id": row[1]}
        lines.append(json.dumps({"at": f"2026-01-31T12:{at // 60:02}:{at % 60:02}Z", **event}))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n")
    return file


def take(tables: Tables, declared: Stream, file: Path) -> tuple[int, int, int, int]:
    return counts(ingest(tables, declared, file, progress=None))


def counts(report: IngestReport) -> tuple[int, int, int, int]:
    assert report.balanced
    return report.offered, report.ingested, report.duplicates, report.rejected


def stored(tables: Tables, *fields: str) -> list[tuple[Any, ...]]:
    names = fields or ("segment", "customers_version")
    return [tuple(row) for row in tables.read("events").orderBy("id").select("id", *names).collect()]


def reasons(tables: Tables) -> list[tuple[str, str]]:
    rows = tables.read("rejected_events").collect()
    return sorted((json.loads(row["raw"])["id"], row["reason"]) for row in rows)


@pytest.mark.long
def test_c11_4_values_and_the_version_are_those_of_the_table_when_the_event_was_taken_in(
    tables: Tables, tmp_path: Path
):
    first = write(tables, [(1, "student"), (2, "premium")])
    declared = stream(LOOKUP)

    # Three commits of one round, an unknown customer and none.
    events = [("a", 1), ("b", 2), ("c", 1), ("d", 3), ("e", None)]
    assert take(tables, declared, offer(tmp_path / "1.json", *events)) == (5, 5, 0, 0)
    second = write(tables, [(1, "adult"), (3, None)])
    # The second file has the events of the first, which stay as they were.
    assert take(tables, declared, offer(tmp_path / "2.json", *events, ("f", 1), ("g", 3))) == (7, 2, 5, 0)

    assert second > first
    assert stored(tables) == [
        ("a", "student", first), ("b", "premium", first), ("c", "student", first), ("d", None, first), ("e", None, first),
        ("f", "adult", second), ("g", None, second),
    ]  # fmt: skip
    comments = {field.name: field.metadata["comment"] for field in tables.read("events").schema}
    assert comments["segment"] == "Looked up by ingest in customers, by customer_id"
    assert comments["customers_version"] == "The version of table customers that ingest used for the look-up"


@pytest.mark.long
def test_c11_4_what_a_declaration_does_not_take_is_rejected_and_taken_in_when_the_table_is_mended(
    tables: Tables, tmp_path: Path
):
    write(tables, [(1, "student"), (2, "premium"), (2, "student"), (4, "same"), (4, "same"), (None, "none")])
    again = {"id": "a", "customer_id": 1, "at": "2026-01-31T12:00:00Z"}
    file = offer(tmp_path / "1.json", ("a", 1), ("b", 2), ("c", 3), ("d", None), ("e", 4), ("f", "x"), again)

    report = ingest(tables, stream(STRICT), file, progress=None)

    assert counts(report) == (7, 2, 1, 4)
    # Rows that agree in all that is looked up are no two answers, and NULL is the key of no row.
    assert stored(tables) == [("a", "student", 0), ("e", "same", 0)]
    assert reasons(tables) == [
        ("b", SEVERAL),
        ("c", "customer_id: '3' is not in table customers: add its row there, then --retry-rejected"),
        ("d", "customer_id: NULL is not in table customers: add its row there, then --retry-rejected"),
        ("f", "customer_id: 'x' is not bigint: write a whole number, such as 12"),
    ]
    assert {rejection.rows for rejection in report.rejections} == {1}

    # Neither is a rejected row written twice, nor is one rejected that the table of events has, if its customer is gone.
    write(tables, [(2, "premium")])
    assert take(tables, stream(STRICT), file) == (7, 1, 3, 3)
    assert [id_ for id_, _ in reasons(tables)] == ["b", "c", "d", "f"]
    version = write(tables, [(3, "senior")])
    retried = retry_rejected(tables, stream(STRICT), progress=None)
    assert counts(retried) == (4, 1, 1, 2)
    assert stored(tables)[-2:] == [("c", "senior", version), ("e", "same", 0)]
    assert [id_ for id_, _ in reasons(tables)] == ["d", "f"]


@pytest.mark.long
def test_an_ambiguous_key_may_be_as_good_as_none(tables: Tables, tmp_path: Path):
    write(tables, [(2, "premium"), (2, "student"), (3, "adult")])
    declared = stream({**LOOKUP, "ambiguous": None})

    assert take(tables, declared, offer(tmp_path / "1.json", ("a", 2), ("b", 3))) == (2, 2, 0, 0)

    assert stored(tables) == [("a", None, 0), ("b", "adult", 0)]


@pytest.mark.long
def test_one_version_is_read_whatever_is_written_meanwhile(
    tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write(tables, [(1, "version 0")])
    read_version = Lookups._read_version

    def read_and_change(self: Lookups, table: str) -> int:
        found = read_version(self, table)
        write(tables, [(1, f"version {found + 1}")])
        return found

    again = {**LOOKUP, "fields": {"tier": "string"}, "columns": {"tier": "segment"}}
    declared = stream(LOOKUP, again)
    tables.create(declared)
    monkeypatch.setattr(Lookups, "_read_version", read_and_change)

    # Read once when the ingest begins, and once for the commits of its round, whichever look-up reads it.
    assert take(tables, declared, offer(tmp_path / "1.json", ("a", 1), ("b", 1), ("c", 1))) == (3, 3, 0, 0)
    names = ("segment", "tier", "customers_version")
    assert stored(tables, *names) == [(id_, "version 1", "version 1", 1) for id_ in "abc"]
    assert tables.version("customers") == 2


@pytest.mark.parametrize(
    ("columns", "rows", "changes", "message"),
    [
        ("", None, {}, r"table delta\..*/customers``?, in which stream 'events' looks events up, does not exist, or is not a Delta"),
        ("id bigint, segment string", [(1, "x")], {}, "has no column customer_id; there are id, segment. Correct `lookups`"),
        ("customer_id bigint", [(1,)], {"columns": {"segment": "upper(Tier)"}}, r"has no column Tier; there are customer_id\."),
        ("customer_id date, segment string", [], {}, "columns.customer_id cannot become bigint"),
        ("customer_id bigint, segment map<string,int>", [], {"fields": {"segment": "int"}}, "segment cannot become int"),
    ],
    ids=["no-table", "no-key", "no-column", "no-key-of-the-type", "no-value-of-the-type"],
)  # fmt: skip
def test_a_table_that_is_missing_or_lacks_a_column_stops_the_ingest_before_anything_is_written(
    tables: Tables, tmp_path: Path, columns: str, rows: list[Any] | None, changes: dict[str, Any], message: str
):
    if rows is not None:
        write(tables, rows, columns=columns)
    declared = stream({**LOOKUP, **changes})
    tables.create(declared)

    with pytest.raises(SetupError, match=message):
        ingest(tables, declared, offer(tmp_path / "1.json", ("a", 1), ("b", "x")), progress=None)

    assert (tables.version("events"), tables.version("rejected_events")) == (0, 0)


@pytest.mark.long
def test_a_table_that_is_gone_or_changed_between_two_batches_stops_a_continuous_ingest_in_words(
    tables: Tables, tmp_path: Path
):
    write(tables, [(1, "student")])
    declared, checkpoint = stream(LOOKUP), tmp_path / "checkpoint"
    reports: list[IngestReport] = []

    def look(number: int) -> None:
        offer(tmp_path / f"in/{number}.json", (f"e{number}", 1))
        query = ingest_continuously(
            tables, declared, tmp_path / "in", checkpoint=checkpoint, every=None, progress=reports.append
        )
        query.awaitTermination()

    look(1)
    second = write(tables, [(1, "adult")])
    look(2)
    assert stored(tables) == [("e1", "student", 0), ("e2", "adult", second)]
    write(tables, [(1, "x")], columns="customer_id bigint, tier string")
    with pytest.raises(SetupError, match="has no column segment; there are customer_id, tier"):
        look(3)
    write(tables, [(1, "senior")])
    look(4)
    assert [row[1] for row in stored(tables)] == ["student", "adult", "senior", "senior"]
    assert [counts(report) for report in reports[:2]] == [(1, 1, 0, 0)] * 2


@pytest.mark.long
def test_keys_of_several_columns_other_names_and_types_and_values_that_do_not_fit(tables: Tables, tmp_path: Path):
    fields = {"id": "string", "at": "timestamp", "tenant": "string", "payer": "bigint", "payee": "bigint"}
    # The id is a text there. One more row has no such key, and one no such value.
    rows = [
        ("a", "1", "10.5", [1]),
        ("b", "1", "20", None),
        ("a", "2", "1e3", []),
        ("a", "x", "1", []),
        ("b", "3", "lots", []),
    ]
    write(tables, rows, "accounts", "Tenant string, number string, `credit-limit` string, tags array<int>")
    write(tables, [("a", "Ghent")], "tenants", "name string, city string")
    account = {
        "table": "accounts",
        "on": {"tenant": "tenant", "payer": "number"},
        "fields": {"payer_limit": "decimal(9,2)", "tags": "array<bigint>"},
        "columns": {"payer_limit": "`credit-limit`"},
    }
    payee = {
        "table": "accounts",
        "on": {"tenant": "tenant", "payee": "number"},
        "fields": {"payee_limit": "decimal(9,2)"},
        "columns": {"payee_limit": "`credit-limit`"},
        "missing": "reject",
    }
    tenant = {
        "table": "tenants",
        "on": {"tenant": "name"},
        "fields": {"city": "string"},
        "columns": {"city": "upper(city)"},
    }
    declared = stream(account, payee, tenant, fields=fields)
    events = [
        {"id": "1", "tenant": "a", "payer": 1, "payee": 2},
        {"id": "2", "tenant": "b", "payer": 7, "payee": 1},
        {"id": "3", "tenant": "b", "payer": 3, "payee": 9},
        {"id": "4", "tenant": "a", "payer": 9, "payee": None},
    ]

    assert take(tables, declared, offer(tmp_path / "1.json", *events)) == (4, 2, 0, 2)

    names = ("payer_limit", "tags", "payee_limit", "city", "accounts_version", "tenants_version")
    found = [tuple(str(value) for value in row) for row in stored(tables, *names)]
    assert found == [
        ("1", "10.50", "[1]", "1000.00", "GHENT", "0", "0"),
        ("2", "None", "None", "20.00", "None", "0", "0"),
    ]
    refused = dict(reasons(tables))
    assert refused["4"] == "tenant, payee: 'a', NULL is not in table accounts: add its row there, then --retry-rejected"
    assert re.fullmatch(
        r"table accounts: payer_limit: `.*credit-limit.*` is not decimal\(9,2\) where credit-limit = 'lots'.*; "
        r"tenant, payee: 'b', '9' is not in table accounts: .*",
        refused["3"],
    )


@pytest.mark.parametrize(
    ("missing", "ambiguous", "commit_rows"),
    [(None, "reject", 7), ("reject", None, 1_000), (None, None, 7)],
)
@pytest.mark.long
def test_drawn_tables_and_events_are_joined_as_by_hand(
    tables: Tables, tmp_path: Path, missing: str | None, ambiguous: str | None, commit_rows: int
):
    chance = random.Random(commit_rows)
    keys = [None, *range(12)]
    rows = [(chance.choice(keys), chance.choice(["a", "b", "ü", None])) for _ in range(14)]
    write(tables, rows)
    events = [(f"{at:03}", chance.choice([*keys, 99])) for at in range(100)]
    expected: dict[str, str | None] = {}
    for id_, key in events:
        values = {segment for customer, segment in rows if key is not None and customer == key}
        if len(values) == 1:
            (expected[id_],) = values
        elif (ambiguous if values else missing) is None:
            expected[id_] = None
    declared = stream({**LOOKUP, "missing": missing, "ambiguous": ambiguous}, commit_rows=commit_rows)

    found = take(tables, declared, offer(tmp_path / "in.json", *events))

    assert found == (100, len(expected), 0, 100 - len(expected))
    assert dict(row[:2] for row in stored(tables)) == expected
    assert len(set(expected.values())) > 1


@pytest.mark.long
def test_c11_4_a_table_of_another_schema_has_a_name_of_three_parts(tables: Tables, spark: SparkSession, tmp_path: Path):
    spark.sql("CREATE SCHEMA IF NOT EXISTS spark_catalog.lookback_lookups")
    name = "spark_catalog.lookback_lookups.Clients"
    try:
        version = write(tables, [(1, "student")], name)
        assert take(tables, stream({**LOOKUP, "table": name}), offer(tmp_path / "1.json", ("a", 1))) == (1, 1, 0, 0)
        assert stored(tables, "segment", "Clients_version") == [("a", "student", version)]
        # A view has no versions.
        spark.sql("CREATE VIEW spark_catalog.lookback_lookups.seen AS SELECT 1L AS customer_id, 'x' AS segment")
        for other, said in (("seen", "has no readable versions"), ("none", "does not exist")):
            declared = stream({**LOOKUP, "table": f"spark_catalog.lookback_lookups.{other}"}, stream=f"of_{other}")
            with pytest.raises(SetupError, match=said):
                ingest(tables, declared, tmp_path / "1.json", progress=None)
    finally:
        spark.sql("DROP SCHEMA spark_catalog.lookback_lookups CASCADE")


@pytest.mark.long
def test_c11_4_a_table_of_events_gets_the_columns_as_those_of_other_new_fields(tables: Tables, tmp_path: Path):
    write(tables, [(1, "student")])
    take(tables, stream(), offer(tmp_path / "1.json", ("a", 1)))

    with pytest.raises(
        SetupError, match="segment is missing, declared as string; customers_version is missing"
    ) as said:
        take(tables, stream(LOOKUP), tmp_path / "1.json")
    remedy = str(said.value).partition("Add the missing columns: ")[2].partition("; or ")[0]
    tables.spark.sql(remedy)

    assert take(tables, stream(LOOKUP), offer(tmp_path / "1.json", ("a", 1), ("b", 1))) == (2, 1, 1, 0)
    assert stored(tables) == [("a", None, None), ("b", "student", 0)]


@pytest.mark.long
def test_c11_4_records_of_a_topic_are_looked_up_in_the_newest_version_for_each_batch(tables: Tables, broker: Broker):
    topic = broker.create("lookups", 1)
    source = {"format": "kafka", "servers": broker.servers, "topic": topic, "options": {"maxOffsetsPerTrigger": 2}}
    declared = stream(STRICT, columns={"customer_id": "kafka_key"}, source=source)
    broker.produce(
        topic,
        [
            {"value": json.dumps({"id": id_, "at": f"2026-01-31T12:00:0{at}Z"}), "key": key}
            for at, (id_, key) in enumerate([("a", "1"), ("b", "2"), ("c", "1"), ("d", "x"), ("e", "1")])
        ],
    )
    write(tables, [(1, "student")])

    def change(_: str) -> None:
        write(tables, [(1, f"after version {tables.version('customers')}")])

    assert counts(TopicIngest(tables, declared, progress=change).run()) == (5, 3, 0, 2)
    assert stored(tables) == [("a", "student", 0), ("c", "after version 0", 1), ("e", "after version 1", 2)]
    rows = {row["source"].rpartition("/")[2]: row["reason"] for row in tables.read("rejected_events").collect()}
    assert rows["1"] == "customer_id: '2' is not in table customers: add its row there, then --retry-rejected"
    # The key of the record was kept, by which the row is looked up again.
    version = write(tables, [(2, "premium")])
    assert counts(retry_rejected(tables, declared, progress=None)) == (2, 1, 0, 1)
    assert stored(tables)[1] == ("b", "premium", version)


RULE = {
    "rule_id": "students",
    "stream": "events",
    "severity": "low",
    "group_by": ["segment"],
    "where": "segment = 'student' and customers_version >= 0",
    "window": "1 hour",
    "measures": {"n": "count(*)"},
    "when": "n >= 2",
    "message": "{n} of {segment}",
}


@pytest.mark.long
def test_c11_4_what_is_judged_is_what_was_stored_also_after_the_table_has_changed(tables: Tables, tmp_path: Path):
    write(tables, [(1, "student"), (2, "premium")])
    declared = stream(LOOKUP)
    streams, folder = {"events": declared}, checkpoint_folder(tables, declared)
    tables.create(declared)
    publish(tables, [RULE])
    take(tables, declared, offer(tmp_path / "1.json", ("a", 1), ("b", 2), ("c", 1), ("d", 1)))
    Evaluation(tables, declared, streams, folder, once=True).run()
    alerts = stored_alerts(tables)
    assert tables.read("alerts").orderBy("event_id").select("event_id").collect() == [("c",), ("d",)]

    # The students are none any more, and everybody else is.
    write(tables, [(1, "premium"), (2, "student")])
    Evaluation(tables, declared, streams, folder, once=True, rebuild=True).run()
    assert stored_alerts(tables) == alerts
    with prove(tables, declared, streams) as proofs:
        assert all(row.holds for row in proofs.rows)
        assert {row.rule_id: row.alike for row in proofs.rows}["students"] == 2
    # Only events of now are looked up in the table of now.
    take(tables, declared, offer(tmp_path / "2.json", ("e", 1), ("f", 2)))
    Evaluation(tables, declared, streams, folder, once=True).run()
    assert {row["event_id"] for row in tables.read("alerts").collect()} == {"c", "d", "f"}


@pytest.mark.long
def test_forget_finds_events_by_what_was_looked_up(tables: Tables, tmp_path: Path):
    write(tables, [(1, "student"), (2, "premium")])
    declared = stream(STRICT)
    take(tables, declared, offer(tmp_path / "1.json", ("a", 1), ("b", 2), ("c", 3)))

    # Of a rejected row nothing was looked up; it is found by what it has itself.
    assert forget(tables, declared, "segment = 'student'").rows["events"] == 1
    assert forget(tables, declared, "customer_id = 3").rows["rejected_events"] == 1
    assert [row[0] for row in stored(tables)] == ["b"]
    assert tables.read("rejected_events").isEmpty()
    # The looked-up table is its owner's.
    assert tables.read("customers").count() == 2


@pytest.mark.long
def test_the_example_of_the_page_does_what_the_page_says(tables: Tables, tmp_path: Path):
    page = PAGE.read_text(encoding="utf-8")
    (block,) = re.findall(r"^```yaml stream\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    customers, events = (
        [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
        for table in re.findall(r"((?:^\|[^`\n]*\|\n)+)", page, re.MULTILINE)[:2]
    )
    write(tables, [tuple(row) for row in customers[2:]], columns=", ".join(f"{name} string" for name in customers[0]))
    declared = Stream.from_dict(yaml.safe_load(block))
    rows = [
        {"purchase_id": row[0], "bought_at": f"2026-01-31T12:00:0{at}Z", "customer_id": row[1], "amount": "1"}
        for at, row in enumerate(events[2:])
    ]
    ingest(tables, declared, offer(tmp_path / "1.json", *rows), progress=None)
    found = {row["purchase_id"]: row.asDict() for row in tables.read(declared.name).collect()}
    refused = {json.loads(row["raw"])["purchase_id"]: row["reason"] for row in tables.read("rejected_events").collect()}
    for row in events[2:]:
        if row[0] in found:
            cells = [found[row[0]][name] for name in events[0][2:]]
            assert ["NULL" if cell is None else str(cell) for cell in cells] == row[2:]
        else:
            assert row[2].startswith("rejected")
            assert "several rows" in refused[row[0]]
