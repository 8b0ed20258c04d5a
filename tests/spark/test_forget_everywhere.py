"""After a privacy request, the evaluation and `maintain`, no file below the root has a value that only the person had."""

from __future__ import annotations

import datetime as dt
import json
import shutil
import struct
import zipfile
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lookback.core.streams.alerts import REMOVED
from lookback.core.streams.declaration import Stream
from lookback.core.values.pages import decode_page
from lookback.spark.operations.forget import forget
from lookback.spark.operations.maintenance import maintain
from lookback.spark.replay.proof import proof_folder, prove
from lookback.spark.stream.pipeline import Evaluation, checkpoint_folder
from lookback.spark.tables.lakehouse import Tables
from lookback.spark.tables.schemas import PRODUCT_TABLES
from payins import commit, publish

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
VISITS = Stream.from_dict(
    {
        "stream": "visits",
        "event_id": "id",
        "event_time": "at",
        "fields": {
            "id": "string", "at": "timestamp", "customer": "bigint", "name": "string", "shop": "string", "card": "bigint",
            "amount": "decimal(18,2)", "born": "date",
        },
        "max_out_of_orderness": "1 second",
        "allowed_lateness": "1 minute",
        "max_session": "5 seconds",
    }
)  # fmt: skip
STREAMS = {VISITS.name: VISITS}
START = dt.datetime(2024, 1, 1, tzinfo=dt.timezone.utc)
PERSON = {
    "customer": 4_711_000_017, "name": 'Ann "O\'Neil"\nfrom {x}', "card": 4_111_987_654_321_098, "amount": Decimal("98765.43"),
    "born": dt.date(1961, 7, 23),
}  # fmt: skip
OTHER = {
    "customer": 5,
    "name": "Bob",
    "card": 4_000_000_000_000_002,
    "amount": Decimal("1.00"),
    "born": dt.date(1990, 1, 1),
}
MEASURES = {
    "n": "count(*)", "top": "max(card)", "who": "max(name)", "first": "min(name)", "dear": "max(amount)", "total": "avg(amount)",
    "old": "min(born)",
}  # fmt: skip
MESSAGE = "{top} {who} {dear} {total} {old} in {shop}"


def rule(rule_id: str, window: Any, key: str = "shop", **more: Any) -> dict[str, Any]:
    message = MESSAGE.replace("{shop}", f"{{{key}}}")
    return {
        "rule_id": rule_id, "stream": VISITS.name, "group_by": [key], "window": window, "measures": MEASURES,
        "when": "n >= 1", "message": message, **more,
    }  # fmt: skip


RULES = [
    rule("looking-back", "1 hour"),
    rule("revised", "1 hour", late="revise"),
    rule("minutes", {"tumbling": "10 seconds"}),
    rule("by-card", {"tumbling": "10 seconds"}, "card"),
    rule("by-name", {"session": "3 seconds"}, "name"),
    rule("listed", "1 hour", where="in_list(card, 'stolen')"),
    {
        "rule_id": "pair", "stream": VISITS.name, "group_by": ["shop"], "message": "{one.name}",
        "sequence": {"within": "1 hour", "steps": [{"name": "one", "where": "amount > 2"}, {"name": "two", "where": "amount = 1"}]},
    },
    {**rule("failing", "1 hour"), "when": "n / (n - 1) > 0"},
]  # fmt: skip


def append(tables: Tables, *rows: tuple[int, dict[str, Any]]) -> None:
    """Appends one commit of events: seconds since the start, and whose they are."""
    types = {
        "id": pa.string(), "at": pa.timestamp("us", "UTC"), "customer": pa.int64(), "name": pa.string(), "shop": pa.string(),
        "card": pa.int64(), "amount": pa.decimal128(18, 2), "born": pa.date32(), "ingested_at": pa.timestamp("us", "UTC"),
    }  # fmt: skip
    now = dt.datetime.now(dt.timezone.utc)
    events = [
        {
            **who,
            "id": f"visit-{who['customer']}-{at}",
            "at": START + dt.timedelta(seconds=at),
            "shop": "a",
            "ingested_at": now,
        }
        for at, who in rows
    ]
    columns = {name: [event[name] for event in events] for name in types}
    commit(tables, VISITS.name, columns, pa.schema(list(types.items())))


def evaluate(tables: Tables, *, rebuild: bool = False) -> None:
    Evaluation(tables, VISITS, STREAMS, checkpoint_folder(tables, VISITS), once=True, rebuild=rebuild).run()


@pytest.fixture(scope="module")
def lived(created: Tables, tmp_path_factory: pytest.TempPathFactory) -> Tables:
    """Tables in which the person's values stand wherever they can, with two checkpoints and the state of a nightly proof."""
    root = tmp_path_factory.mktemp("everywhere") / "lakehouse"
    for name in PRODUCT_TABLES:
        shutil.copytree(created.path_or_name(name), root / name)
    tables = Tables.local(created.spark, root)
    tables.create(VISITS)
    now = dt.datetime.now(dt.timezone.utc)
    name, card = PERSON["name"], str(PERSON["card"])
    tables.append_rows(
        [("stolen", card, f"of {name}", "ann", now, None, None), ("stolen", "4", name, "ann", now, None, None)], "lists"
    )
    publish(tables, RULES)
    append(tables, (0, PERSON), (1, PERSON), (2, OTHER), (4, PERSON), (7, PERSON))
    append(tables, (8, OTHER), (30, OTHER))
    evaluate(tables)
    # Late for everything: the window of the minute is told again, and a session is told.
    append(tables, (5, PERSON), (31, OTHER), (400, OTHER))
    evaluate(tables)
    with prove(tables, VISITS, STREAMS, saved=proof_folder(tables, VISITS)) as proofs:
        assert all(proof.holds for proof in proofs.rows)
    (alert_id,) = (
        tables.read("alerts")
        .where("rule_id = 'looking-back' and key['shop'] = 'a'")
        .orderBy("event_time")
        .collect()[-1][:1]
    )
    tables.append_rows([(alert_id, "unclear", 0, "bob", f"asked {name.upper()}, {card}", now)], "reviews")
    tables.append_rows([(None, {"shop": "b"}, now, now, f"{card}: {name}", "ann")], "snoozes")
    tables.append_rows([(VISITS.name, "visit-5-8", True, card, now, name, "ann")], "labels")
    tables.append_rows([(alert_id, 0, "desk", "failed", 1, f"rejected {name!r}", now, VISITS.name)], "notifications")
    rejected = [(VISITS.name, f'"{card},{name}', "malformed line", "a.csv", now, None, None)]
    tables.append_rows(rejected, "rejected_events")
    checkpoint = Path(checkpoint_folder(tables, VISITS))
    shutil.copytree(checkpoint, checkpoint.with_name(f"{checkpoint.name}.20240101T000000Z"))
    return tables


def forms(value: Any) -> list[bytes]:
    """The ways in which a file may hold a value."""
    text = str(value)
    written = {text, json.dumps(text)[1:-1], repr(text)[1:-1], text.upper()}
    if isinstance(value, Decimal):
        # An average has more digits; columns of statistics too.
        written.add(text.rstrip("0"))
    return [each.encode() for each in written]


NEEDLES = {name: forms(value) for name, value in PERSON.items()} | {"id": [b"visit-4711000017"]}
NUMBERS = {
    "customer": PERSON["customer"],
    "card": PERSON["card"],
    "amount": 9_876_543,
    "born": (PERSON["born"] - dt.date(1970, 1, 1)).days,
}


def find_in_bytes(content: bytes) -> set[str]:
    found = {name for name, needles in NEEDLES.items() if any(needle in content for needle in needles)}
    found |= {
        name
        for name in ("customer", "card")
        if struct.pack("<q", NUMBERS[name]) in content or struct.pack(">q", NUMBERS[name]) in content
    }
    return found.union(*map(find_in_page, cut_pages(content)))


def cut_pages(content: bytes) -> Iterator[bytes]:
    """Cuts the pages of window state out of the bytes that hold them."""
    begin = content.find(b"LBpg")
    while begin >= 0:
        end = begin + 8
        for _ in range(struct.unpack_from("<H", content, begin + 6)[0]):
            if end + 33 > len(content):
                break
            end += 33 + struct.unpack_from("<Q", content, end + 25)[0]
        yield content[begin:end]
        begin = content.find(b"LBpg", begin + 4)


def find_in_page(page: bytes) -> set[str]:
    found = set()
    for array in decode_page(page, "a page"):
        if array is None:
            continue
        values = set(array.tolist())
        found |= {name for name, number in NUMBERS.items() if number in values}
        text = json.dumps(array.tolist(), ensure_ascii=False).encode()
        found |= {name for name, needles in NEEDLES.items() if any(needle in text for needle in needles)}
    return found


def read_parts(spark: SparkSession, file: Path) -> Iterator[bytes]:
    """Reads what a file holds, decoded."""
    jvm = spark._jvm
    if file.suffix == ".parquet":
        for row in pq.read_table(file).to_pylist():
            yield from (cell if isinstance(cell, bytes) else str(cell).encode() for cell in row.values())
            # Texts in maps and lists stand there in Python's quotes.
            yield json.dumps(
                {k: v for k, v in row.items() if not isinstance(v, bytes)}, default=str, ensure_ascii=False
            ).encode()
    elif file.suffix == ".sst":
        options = jvm.org.rocksdb.Options()
        reader = jvm.org.rocksdb.SstFileReader(options)
        reader.open(str(file))
        rows = reader.newIterator(jvm.org.rocksdb.ReadOptions())
        rows.seekToFirst()
        while rows.isValid():
            yield bytes(rows.key())
            yield bytes(rows.value())
            rows.next()
        reader.close()
    elif file.suffix == ".changelog":
        codec = jvm.org.apache.spark.io.CompressionCodec.createCodec(jvm.org.apache.spark.SparkConf(), "lz4")
        stream = codec.compressedInputStream(jvm.java.io.FileInputStream(str(file)))
        yield bytes(stream.readAllBytes())
    elif file.suffix == ".zip":
        with zipfile.ZipFile(file) as archive:
            yield from map(archive.read, archive.namelist())
    else:
        yield file.read_bytes()


def search(tables: Tables) -> dict[str, set[str]]:
    """Searches every file below the root. Returns by file the values found there."""
    root = Path(str(tables.root))
    files = [file for file in sorted(root.rglob("*")) if file.is_file()]
    found = {
        str(file.relative_to(root)): set().union(*map(find_in_bytes, read_parts(tables.spark, file))) for file in files
    }
    return {file: values for file, values in found.items() if values}


def find_places(files: Iterable[str]) -> set[str]:
    """Finds the tables, checkpoints and proofs that the files belong to."""
    parts = [file.split("/") for file in files]
    return {"/".join(each[:2]) if each[0].startswith("_") else each[0] for each in parts}


@pytest.mark.long
def test_no_file_has_a_value_of_a_person_who_was_forgotten(lived: Tables) -> None:
    spark, checkpoint = lived.spark, checkpoint_folder(lived, VISITS)
    before = search(lived)
    place = Path(checkpoint).name
    everywhere = {
        f"_checkpoints/{place}",
        f"_checkpoints/{place}.20240101T000000Z",
        f"_proofs/{VISITS.name}",
        VISITS.name,
    }
    assert everywhere | {
        "alerts",
        "rule_log",
        "lists",
        "snoozes",
        "reviews",
        "notifications",
        "labels",
        "rejected_events",
    } <= find_places(before)
    stays = lived.read("alerts").where("event_id = 'visit-5-8' and rule_id = 'looking-back'").collect()[0]
    assert (stays["measures"]["top"], stays["measures"]["n"]) == (str(PERSON["card"]), "6")

    report = forget(lived, VISITS, f"customer = {PERSON['customer']}", checkpoint=checkpoint)
    assert report.waiting
    assert report.redacted.keys() >= {
        "alerts",
        "reviews",
        "snoozes",
        "labels",
        "lists",
        "notifications",
        "rejected_events",
    }
    evaluate(lived)
    evaluate(lived, rebuild=True)
    maintain(lived, STREAMS, {VISITS.name: checkpoint})
    # The days have passed on which the report says that old files go.
    listed = {purge.table: purge for purge in report.purges}
    for purge in report.purges:
        assert purge.after > dt.datetime.now(dt.timezone.utc)
    spark.conf.set("spark.databricks.delta.retentionDurationCheck.enabled", "false")
    for name in listed:
        spark.sql(f"VACUUM {lived.identifier(name)} RETAIN 0 HOURS")
    after = search(lived)
    assert {file: values for file, values in after.items() if "/_delta_log/" not in file} == {}
    assert find_places(after) <= listed.keys()

    kept = lived.read("alerts").where("event_id = 'visit-5-8' and rule_id = 'looking-back'").collect()[0]
    assert (kept["measures"]["top"], kept["measures"]["n"]) == (None, "6")
    assert REMOVED in kept["message"]
    # Windows no longer hold the person's events, and what was redacted is no difference.
    append(lived, (401, OTHER))
    evaluate(lived)
    last = lived.read("alerts").where("event_id = 'visit-5-401' and rule_id = 'looking-back'").collect()[0]
    assert (last["measures"]["top"], last["measures"]["n"]) == (str(OTHER["card"]), "6")
    again = forget(lived, VISITS, f"customer = {PERSON['customer']}", checkpoint=checkpoint)
    assert (again.total, dict(again.redacted)) == (0, {})
