"""Lists: what a command or an import does with each value, and what is refused (contract 11.3)."""

from __future__ import annotations

import datetime as dt
import json
import shutil
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from lookback.cli import main
from lookback.core.errors import RuleError, SetupError
from lookback.spark import lists
from lookback.spark.lists import (
    ListReport,
    add_values,
    import_values,
    list_names,
    read_list,
    remove_values,
    show_lists,
)
from lookback.spark.operations.catalog import AS_IT_SHOULD_BE, set_up
from lookback.spark.rules import RulesTable
from payins import STREAM, STREAMS, rule

if TYPE_CHECKING:
    from pathlib import Path

    from lookback.spark.tables.lakehouse import Tables

pytestmark = pytest.mark.spark
END = dt.datetime(2030, 1, 1, tzinfo=dt.timezone.utc)


def values(tables: Tables, name: str) -> dict[str, tuple[Any, ...]]:
    rows = read_list(tables, name).collect()
    assert len({row["value"] for row in rows}) == len(rows)
    zone = dt.timezone.utc
    return {
        row["value"]: (row["expires_at"] and row["expires_at"].astimezone(zone), row["reason"], row["author"])
        for row in rows
    }


def counts(report: ListReport) -> tuple[int, ...]:
    assert report.offered == report.added + report.changed + report.duplicates + report.rejected
    return report.offered, report.added, report.changed, report.duplicates, report.rejected, report.values


@pytest.mark.long
def test_c11_3_values_come_change_and_go(ready: Tables) -> None:
    assert (list_names(ready), show_lists(ready)) == ([], [])
    assert counts(add_values(ready, "shops", ["a", "b", "a"], reason="new", author="kim")) == (3, 2, 0, 1, 0, 2)
    # The same again says nothing new; another expiry or reason changes the value.
    version = ready.version("lists")
    assert counts(add_values(ready, "shops", ["a", "b"])) == (2, 0, 0, 2, 0, 2)
    assert ready.version("lists") == version
    assert counts(add_values(ready, "shops", ["b", "it's"], until=END, author="ann")) == (2, 1, 1, 0, 0, 3)
    assert values(ready, "shops") == {
        "a": (None, "new", "kim"), "b": (END, "new", "ann"), "it's": (END, None, "ann")
    }  # fmt: skip
    add_values(ready, "old", ["x"], until=dt.datetime(2020, 1, 1, tzinfo=dt.timezone.utc))
    assert [row["state"] for row in read_list(ready, "old").collect()] == ["expired"]
    assert [(row["list"], row["values"], row["expired"]) for row in show_lists(ready)] == [
        ("old", 1, 1),
        ("shops", 3, 0),
    ]

    removal = remove_values(ready, "shops", ["a", "it's", "z"])
    assert (removal.removed, removal.missing) == (2, ("z",))
    assert str(removal) == "list shops: 2 values removed; not on it: z"
    assert set(values(ready, "shops")) == {"b"}
    with pytest.raises(SetupError, match="unknown list 'shop'; did you mean 'shops'"):
        remove_values(ready, "shop", ["b"])
    remove_values(ready, "shops", ["b"])
    assert list_names(ready) == ["old"]


@pytest.mark.long
def test_c11_3_plain_sql_may_change_lists_and_the_time_of_the_insert_is_theirs(ready: Tables) -> None:
    name, before = ready.identifier("lists"), dt.datetime.now(dt.timezone.utc)
    ready.spark.sql(f"insert into {name} (list, value) values ('Any name at all', 7)")
    (row,) = read_list(ready, "Any name at all").collect()
    assert row["value"] == "7"
    assert before <= row["added_at"].astimezone(dt.timezone.utc) <= dt.datetime.now(dt.timezone.utc)
    # A list that is there is added to, whatever its name.
    assert add_values(ready, "Any name at all", ["8"]).added == 1
    with pytest.raises(Exception, match="DELTA_NOT_NULL_CONSTRAINT_VIOLATED"):
        ready.spark.sql(f"insert into {name} (list, value) values ('a', null)")
    properties = ready.describe("lists")["properties"]
    assert properties["delta.enableChangeDataFeed"] == "true"
    assert {properties[f"delta.{kind}RetentionDuration"] for kind in ("log", "deletedFile")} == {"interval 3650 days"}


@pytest.mark.long
def test_c11_3_what_is_refused_changes_nothing(ready: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    add_values(ready, "offices", ["10.0.0.0/8"], kind="cidr")
    version = ready.version("lists")
    with pytest.raises(
        SetupError,
        match=r"list offices is of kind cidr: '10.0.0.300' is not .*; '10.1.\*' is not .*; write 10.1.0.0/16",
    ):
        add_values(ready, "offices", ["10.0.0.1", "10.0.0.300", "10.1.*"])
    with pytest.raises(SetupError, match=r"unknown kind 'cdir'; did you mean 'cidr'"):
        add_values(ready, "offices", ["10.0.0.1"], kind="cdir")
    with pytest.raises(SetupError, match=r"'two words' is not a valid list name"):
        add_values(ready, "two words", ["a"])
    with pytest.raises(SetupError, match="a value is empty"):
        add_values(ready, "shops", ["a", ""])
    with pytest.raises(SetupError, match=r"a value expires at a time such as .*got 'soon'"):
        lists.read_until("soon")
    monkeypatch.setattr(lists, "MAX_LIST_VALUES", 2)
    with pytest.raises(
        SetupError, match=r"list offices would have 3 values, and at most 2 are allowed; nothing was written"
    ):
        add_values(ready, "offices", ["10.1.0.0/16", "2001:db8::/32"])
    monkeypatch.setattr(lists, "MAX_VALUES", 2)
    with pytest.raises(SetupError, match=r"the table lists would have 3 values, and at most 2"):
        add_values(ready, "shops", ["a", "b"])
    assert ready.version("lists") == version


@pytest.mark.long
def test_c11_3_a_rule_that_names_an_unknown_list_is_not_published(ready: Tables) -> None:
    rules = RulesTable(ready, STREAMS)
    document = rule("watched", where="in_list(shop, 'watched')")
    with pytest.raises(RuleError, match=r"unknown list 'watched'; no lists exist yet"):
        rules.push(document)
    add_values(ready, "watch", ["a"])
    with pytest.raises(RuleError, match=r"unknown list 'watched'; did you mean 'watch'\?.*lookback lists add"):
        rules.push(document)
    assert ready.is_unwritten("rules")
    add_values(ready, "watched", ["a"])
    assert rules.push(document) == 1


@pytest.mark.long
def test_c11_3_every_row_of_an_import_is_accounted_for(
    ready: Tables, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "known.csv"
    file.write_text(
        "iban,expires_at,reason\n"
        "DE1,2030-01-01T00:00:00Z,court\n"
        "DE2,,\n"
        "DE1,2029-01-01T00:00:00Z,court\n"  # the one that expires last counts
        ",,\n"
        "DE3,someday,\n"
    )
    report = import_values(ready, "sanctioned", file, value="iban", reason="list of May", author="kim")
    assert counts(report) == (5, 2, 0, 1, 2, 2)
    assert {row.example for row in report.rejections} >= {"iban is NULL"}
    assert values(ready, "sanctioned") == {"DE1": (END, "court", "kim"), "DE2": (None, "list of May", "kim")}
    assert counts(import_values(ready, "sanctioned", file, value="iban")) == (5, 0, 0, 3, 2, 2)
    with pytest.raises(SetupError, match=r"none of the columns is called value; .* Choose one with --value"):
        import_values(ready, "sanctioned", file)

    numbers = tmp_path / "terminals.parquet"
    pq.write_table(pa.table({"terminal": pa.array([7, 8, None, 7], pa.int64())}), numbers)
    assert counts(import_values(ready, "terminals", numbers, until=END)) == (4, 2, 0, 1, 1, 2)
    assert values(ready, "terminals")["7"][0] == END

    lines = tmp_path / "offices.jsonl"
    lines.write_text("".join(json.dumps({"value": each}) + "\n" for each in ("10.0.0.0/8", "::1", " 10.0.0.1", None)))
    conf = tmp_path / "conf"
    (conf / "streams").mkdir(parents=True)
    (conf / "streams/payins.yml").write_text(yaml.safe_dump(STREAM.to_dict()))
    places = ["--root", str(ready.root), "--conf", str(conf), "--json"]
    assert (
        main([*places, "lists", "import", "offices", str(lines), "--kind", "cidr", "--until", "2030-01-01T00:00:00Z"])
        == 0
    )
    (row,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (row["offered"], row["added"], row["rejected"]) == (4, 2, 2)
    assert any(
        "' 10.0.0.1' is not an address or a range of addresses; write 10.0.0.1" in each["example"]
        for each in row["rejections"]
    )


@pytest.mark.long
def test_c11_3_commands_print_objects(ready: Tables, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    conf = tmp_path / "conf"
    (conf / "streams").mkdir(parents=True)
    (conf / "streams/payins.yml").write_text(yaml.safe_dump(STREAM.to_dict()))

    def run(*words: str) -> list[dict[str, Any]]:
        assert main(["--root", str(ready.root), "--conf", str(conf), "--json", "lists", *words]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    (row,) = run("add", "shops", "a", "b", "--until", "2030-01-01T00:00:00Z", "--reason", "new", "--author", "kim")
    assert (row["list"], row["added"], row["values"]) == ("shops", 2, 2)
    (row,) = run("show")
    assert {name: row[name] for name in ("list", "kind", "values", "expired")} == {
        "list": "shops", "kind": None, "values": 2, "expired": 0
    }  # fmt: skip
    rows = run("show", "shops")
    assert [(row["value"], row["expires_at"], row["reason"], row["author"], row["state"]) for row in rows] == [
        (value, "2030-01-01T00:00:00Z", "new", "kim", "active") for value in "ab"
    ]
    (row,) = run("remove", "shops", "b", "c")
    assert row == {"list": "shops", "removed": 1, "missing": ["c"]}
    assert main(["--root", str(ready.root), "--conf", str(conf), "lists", "show", "shop"]) == 2
    assert "did you mean 'shops'" in capsys.readouterr().err


@pytest.mark.long
def test_c11_3_init_makes_the_table_on_an_older_root(ready: Tables) -> None:
    shutil.rmtree(f"{ready.root}/lists")
    assert (list_names(ready), show_lists(ready)) == ([], [])
    steps = {step.thing: step.done for step in set_up(ready, STREAMS)}
    assert steps[f"table {ready.identifier('lists')}"] == "created"
    assert {step.done for step in set_up(ready, STREAMS)} == {AS_IT_SHOULD_BE}
