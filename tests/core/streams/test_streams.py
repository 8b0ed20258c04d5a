"""Stream declarations: what is accepted comes back as it went in, what is wrong is told all at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from lookback.config import Settings, load_rule_document, load_stream, load_streams
from lookback.core.errors import SetupError, StreamError
from lookback.core.streams import fields as module
from lookback.core.streams.alerts import FIELDS as ALERT_FIELDS
from lookback.core.streams.arrival import describe_fast_clock
from lookback.core.streams.declaration import Stream
from lookback.core.values.types import BIGINT, TIMESTAMP, DataType, decimal, parse_type

CONF = Path(__file__).parents[3] / "conf"
MINIMAL = {
    "stream": "payments",
    "event_id": "id",
    "event_time": "at",
    "fields": {"id": "bigint", "at": "timestamp", "amount": "decimal(18,2)"},
}
SECOND, HOUR, DAY = 1_000_000, 3_600_000_000, 86_400_000_000


def problems(**changes: object) -> dict[str, str]:
    with pytest.raises(StreamError) as caught:
        Stream.from_dict({**MINIMAL, **changes})
    return {problem.place: problem.message for problem in caught.value.problems}


def test_each_type_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[object] = []

    def parse_and_note(text: object, **options: bool) -> DataType:
        parsed.append(text)
        return parse_type(text, **options)

    monkeypatch.setattr(module, "parse_type", parse_and_note)
    assert Stream.from_dict(MINIMAL).fields["id"] == BIGINT
    assert parsed == ["bigint", "timestamp", "decimal(18,2)"]


def test_c4_defaults():
    stream = Stream.from_dict(MINIMAL)

    assert stream.fields == {"id": BIGINT, "at": TIMESTAMP, "amount": decimal(18, 2)}
    assert (stream.max_out_of_orderness, stream.allowed_lateness, stream.max_future) == (10 * SECOND, HOUR, HOUR)
    assert (stream.max_session, stream.dedupe_window) == (7 * DAY, 30 * DAY)
    assert (stream.max_revisions, stream.max_failures, stream.commit_rows) == (1_000, 100, 100_000)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"columns": {"amount": "cents / 100"}, "source": {"format": "csv", "path": "x.csv"}},
        {"comments": {"amount": "in euros; what's left"}},
        {
            "max_future": "90 minutes",
            "dedupe_window": "0 seconds",
            "commit_rows": 7,
            "allowed_lateness": "1 microsecond",
        },
        {"fields": {"id": "string", "at": "timestamp", "tags": "array<decimal(38,10)>", "ok": "boolean"}},
    ],
)
def test_from_dict_of_to_dict_is_the_same(changes: dict[str, object]):
    stream = Stream.from_dict({**MINIMAL, **changes})

    assert Stream.from_dict(stream.to_dict()) == stream


def test_style8_all_problems_at_once():
    found = problems(
        stream="Payments",
        event_id="idd",
        event_time="amount",
        columns={"total": "1", "amount": 2},
        comments={"total": "1", "amount": 2},
        max_future="a while",
        max_session="1 month",
        commit_rows=0,
        max_failures=True,
        source="here",
        lateness="1 hour",
    )

    assert set(found) == {
        "stream", "event_id", "event_time", "columns.total", "columns.amount", "comments.total", "comments.amount", "max_future", "max_session", "commit_rows",
        "max_failures", "source", "lateness",
    }  # fmt: skip
    assert "did you mean 'id'?" in found["event_id"]
    assert "must be one of timestamp" in found["event_time"]
    assert "30 days" in found["max_session"]


def test_every_field_problem_is_told():
    fields = {
        "id": "bigint",
        "at": "timestamp",
        "AT": "timestamp",
        "ingested_at": "timestamp",
        "a-b": "int",
        "c": "money",
    }

    assert set(problems(fields=fields)) == {"fields.AT", "fields.ingested_at", "fields.a-b", "fields.c"}


def test_position_is_a_field_only_of_a_table_that_others_write() -> None:
    fields = {"id": "bigint", "at": "timestamp", "Position": "double"}
    (message,) = problems(fields=fields).values()
    assert "'Position' is the column in which ingest stores where it read an event; choose another name" in message
    theirs = Stream.from_dict({**MINIMAL, "fields": fields, "table": "/lake/orders"})
    assert (theirs.order_columns, theirs.key_columns) == ({}, ("id", "at"))
    own = Stream.from_dict(MINIMAL)
    assert (own.order_columns, own.key_columns) == ({"position": BIGINT}, ("id", "at", "position"))


def test_a_stream_that_one_fast_clock_can_make_late_is_remarked() -> None:
    assert describe_fast_clock(Stream.from_dict(MINIMAL)) == ""
    tight = {**MINIMAL, "max_out_of_orderness": "1 minute", "allowed_lateness": "5 minutes"}
    assert describe_fast_clock(Stream.from_dict({**tight, "max_future": "6 minutes"})) == ""
    assert describe_fast_clock(Stream.from_dict(tight)) == (
        "max_future (1 hour) exceeds max_out_of_orderness + allowed_lateness (6 minutes): one event whose clock is further "
        "ahead than that makes all other events too late, until their times have caught up. Set max_future to 6 minutes or less"
    )


def test_the_streams_that_ship_stand_one_fast_clock() -> None:
    remarked = {name: describe_fast_clock(stream) for name, stream in load_streams(CONF).items()}
    assert set(remarked.values()) == {""}


def test_order_by_names_fields_of_a_table_that_others_write() -> None:
    fields = {"id": "bigint", "at": "timestamp", "part": "int", "offset": "bigint", "x": "double", "tags": "array<int>"}
    theirs = {"fields": fields, "table": "/lake/orders"}
    declared = Stream.from_dict({**MINIMAL, **theirs, "order_by": ["part", "offset"]})
    assert list(declared.order_columns) == ["part", "offset"]
    assert Stream.from_dict(declared.to_dict()) == declared
    assert "ingest stores the order in which it reads rows" in problems(order_by=["id"])["order_by"]
    for wrong, said in (
        (["ofset"], "'ofset' is not one of the declared fields; did you mean 'offset'?"),
        (["x"], "field 'x' is double; events are ordered by bigint, date,"),
        (["tags"], "field 'tags' is array<int>; events"),
        ("part", "a list of fields is needed, got 'part'"),
        ([1], "a list of fields is needed, got [1]"),
    ):
        assert said in problems(**theirs, order_by=wrong)["order_by"]


@pytest.mark.parametrize(
    "name",
    ["rules", "alerts", "rejected_events", "reviews", "labels", "snoozes", "lists", "1st", "a.b", "", None, "a" * 64],
)
def test_names_that_are_no_stream(name: object):
    assert "stream" in problems(stream=name)


def test_c11_6_the_stream_of_alerts_is_declared_as_it_ships_or_with_fewer_fields() -> None:
    own = load_stream(CONF / "streams/alerts.yml")
    assert own.is_of_alerts
    assert not load_stream(CONF / "streams/transactions.yml").is_of_alerts
    named = {"stream": "alerts", "event_id": own.event_id, "event_time": own.event_time}
    few = {"change_id": "string", "decided_at": "timestamp", "score": "bigint"}
    assert list(Stream.from_dict({**named, "fields": few, "allowed_lateness": "2 hours"}).fields) == list(few)
    # Its table is the product's, whose columns are what they are.
    for fields in ({**few, "mine": "int"}, {**few, "score": "int"}):
        with pytest.raises(
            StreamError, match=r"made of the alerts of all streams; declare it as conf/streams/alerts\.yml does"
        ):
            Stream.from_dict({**named, "fields": fields})
    with pytest.raises(StreamError, match="'alerts' is a table of the product; leave `table` out"):
        Stream.from_dict({**named, "fields": few, "table": "/x"})


@pytest.mark.parametrize("document", [None, [], "payments", 3])
def test_a_document_that_is_no_mapping(document: object):
    with pytest.raises(StreamError, match="mapping"):
        Stream.from_dict(document)  # type: ignore[arg-type]


@pytest.mark.parametrize("type_", ["double", "timestamp", "decimal(18,0)", "boolean"])
def test_an_id_is_an_integer_or_a_string(type_: str):
    assert "event_id" in problems(fields={**MINIMAL["fields"], "id": type_})  # type: ignore[dict-item]


def test_the_streams_that_are_shipped():
    streams = load_streams(CONF)

    of_users = {"transactions", "logins", "payments", "activity", "items", "readings", "processes"}
    assert set(streams) == {*of_users, "metrics", "alerts"}
    assert streams["transactions"].fields["amount"] == decimal(18, 2)
    # The engine itself writes the events of the last two.
    assert not streams.pop("metrics").source
    own = streams.pop("alerts")
    assert not own.source
    assert own.fields == ALERT_FIELDS
    # Its events are those of its members.
    assert not streams.pop("activity").source
    for stream in streams.values():
        assert (CONF.parent / stream.source["path"]).is_file()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"fields": {"metrics_id": "string", "measured_at": "timestamp", "lag_seconds": "double"}},
        {"fields": {"metrics_id": "string", "measured_at": "timestamp", "mine": "int"}},
    ],
)
def test_a_stream_named_as_the_table_of_metrics_has_its_columns(changes: dict[str, object]):
    assert "conf/streams/metrics.yml" in problems(stream="metrics", **changes)["stream"]


def test_problems_of_a_file_come_with_its_lines(tmp_path: Path):
    file = tmp_path / "s.yml"
    file.write_text(
        "stream: s\nevent_id: id\nevent_time: at\nfields:\n  id: bigint\n  at: time\n  id: int\nmax_futur: 1 hour\n"
    )

    with pytest.raises(StreamError) as caught:
        load_stream(file)

    places = {(problem.place, problem.message.rpartition(", ")[2]) for problem in caught.value.problems}
    assert places == {("fields.id", f"{file}:7"), ("fields.at", f"{file}:6"), ("max_futur", f"{file}:8")}


def test_a_file_that_is_no_yaml_is_named_with_the_line(tmp_path: Path):
    file = tmp_path / "s.yml"
    file.write_text("stream: s\nfields: [id\nevent_id: x: y\n")

    with pytest.raises(SetupError, match=r"s\.yml:3 is not YAML"):
        load_stream(file)


@pytest.mark.parametrize(
    ("text", "line", "what", "remedy"),
    [
        ("a: 1\n\tb: 2", 2, "the indentation has a tab, at 'b: 2'", "indent with spaces only"),
        (
            "a: 1\n b:\n  c: 1",
            2,
            "it is indented differently from the key before it",
            "indent the keys of one level alike",
        ),
        ("a:\n    b: 1\n  c: 2", 3, "the line is indented differently", "indent the keys of one level alike"),
        ("a:\n  - b: 1\n   c: 2", 3, "the line is indented differently", "indent the keys of one level alike"),
        ("a: 1\nwhen: total > 5: x", 2, "a text has a ':' in it, at 'when: total > 5: x'", "put the text in quotes"),
        ("a: 1\nb", 2, "a key has no ':', at 'b'", "write `key: value`"),
        ("a: 1\nb\nc: 2", 2, "a key has no ':', at 'b'", "write `key: value`"),
        ("a 1\nb: 2", 1, "a key has no ':', at 'a 1'", "write `key: value`"),
        ("a: 1\nmeasures\n  n: count(*)", 2, "a key has no ':', at 'measures'", "write `key: value`"),
        ("a: 'x\nb: 2\n", 1, "a quote is not closed", "close it"),
        ("a: 1\nwhere: 'a' = 'b'", 2, "text follows a closing quote or brace", "in double quotes"),
        ("message: {total} to {x}", 1, "text follows a closing quote or brace", "in double quotes"),
        ("when: > 5", 1, "a text begins with >, | or !", "put the text in quotes"),
        ("when: !a > 5", 1, "a text begins with >, | or !", "put the text in quotes"),
        ("where: *all", 1, "a text begins with *", "put the text in quotes"),
        ("where: `from` = 1", 1, "a text begins with a character that means something else", "put the text in quotes"),
        ("a: [1, 2\nb: 3", 2, "an earlier bracket is not closed", "add it"),
        ("a: 1\n---\na: 2", 2, "a second document begins", "write one document per file"),
        ('a: "\\d"', 1, "a text in double quotes has a backslash", "use single quotes"),
    ],
)
def test_what_is_wrong_with_yaml_is_said_with_the_line_what_is_seen_and_the_remedy(
    tmp_path: Path, text: str, line: int, what: str, remedy: str
):
    file = tmp_path / "rule.yml"
    file.write_text(text)

    with pytest.raises(SetupError) as caught:
        load_rule_document(file)

    start, _, rest = str(caught.value).partition(": ")
    assert start == f"{file}:{line} is not YAML"
    assert rest.startswith(what)
    assert remedy in rest.partition("; ")[2]


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(SetupError, match="cannot be read"):
        load_stream(tmp_path / "none.yml")


def test_a_folder_without_streams(tmp_path: Path):
    with pytest.raises(SetupError, match="--conf"):
        load_streams(tmp_path)


def test_two_files_for_one_stream(tmp_path: Path):
    (tmp_path / "streams").mkdir()
    for name in ("a.yml", "b.yml"):
        (tmp_path / "streams" / name).write_text((CONF / "streams/items.yml").read_text())

    with pytest.raises(SetupError, match=r"'items' is declared in .*a\.yml and again in .*b\.yml"):
        load_streams(tmp_path)


def test_settings_come_from_arguments_then_environment_then_defaults(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("LOOKBACK_ROOT", raising=False)
    monkeypatch.setenv("LOOKBACK_CONF", "/etc/lookback")

    assert Settings.local() == Settings(str(Path("lakehouse").absolute()), Path("/etc/lookback"))
    assert Settings.local("/data", "/conf") == Settings("/data", Path("/conf"))


def test_a_stream_that_is_not_declared():
    with pytest.raises(SetupError, match=r"declared are .*transactions"):
        Settings.local(conf=CONF).stream("transaction")


@pytest.mark.parametrize(
    ("table", "is_place"),
    [
        ("main.sales.orders", False),
        ("prod-lake.sales.orders_2", False),
        ("/lake/orders", True),
        ("s3://bucket/orders", True),
        ("dbfs:/lake/orders", True),
    ],
)
def test_a_table_that_others_write_is_a_whole_path_or_a_name_of_three_parts(table: str, is_place: bool) -> None:
    stream = Stream.from_dict({**MINIMAL, "table": table})
    assert (stream.table, stream.has_table_path) == (table, is_place)
    assert Stream.from_dict(stream.to_dict()) == stream


@pytest.mark.parametrize(
    "table", ["orders", "sales.orders", "./orders", "lake/orders", "", 7, "a.b.c.d", "a. b.c", "/"]
)
def test_a_table_that_could_be_meant_in_two_ways_is_refused(table: object) -> None:
    with pytest.raises(StreamError, match=r"a whole path, such as /lake/orders, or catalog\.schema\.table is needed"):
        Stream.from_dict({**MINIMAL, "table": table})


def test_a_table_that_others_write_goes_with_nothing_of_ingest() -> None:
    document = {**MINIMAL, "table": "a.b.c", "source": {"path": "x"}, "columns": {"id": "x + 1"}}
    with pytest.raises(StreamError) as refused:
        Stream.from_dict(document)
    assert [problem.place for problem in refused.value.problems] == ["source", "columns.id"]


def test_the_metrics_are_never_elsewhere() -> None:
    fields = {"metrics_id": "string", "measured_at": "timestamp"}
    document = {"stream": "metrics", "event_id": "metrics_id", "event_time": "measured_at", "fields": fields}
    with pytest.raises(StreamError, match="is a table of the product; leave `table` out"):
        Stream.from_dict({**document, "table": "/x"})


@pytest.mark.parametrize(
    ("source", "place", "said"),
    [
        ({"path": "x", "sep": ";"}, "sep", "'sep' is an option of the reader; write it below options: {sep: \";\"}"),
        ({"path": "x", "Delimiter": "|"}, "Delimiter", 'write it below options: {delimiter: "|"}'),
        ({"path": "x", "value_options": {}}, "value_options", "is for topics, with `format: kafka`; files take format"),
        ({"path": "x", "pathh": "y"}, "pathh", "unknown key 'pathh'; did you mean 'path'?"),
        ({"path": "x", "colour": 1}, "colour", "unknown key 'colour'; known: format, path, options"),
        ({"path": 7}, "path", "a text is needed, got 7"),
        ({"format": ["csv"]}, "format", "a text is needed"),
        ({"options": ["x"]}, "options", "a mapping of option to value is needed"),
        (
            {"format": "csv", "options": {"seperator": ";"}},
            "options.seperator",
            "is not an option of Spark's reader of csv",
        ),
        ({"format": "csv", "options": {"headr": True}}, "options.headr", "did you mean 'header'?"),
        (
            {"format": "parquet", "options": {"sep": ";"}},
            "options.sep",
            "not an option of Spark's reader of parquet files",
        ),
        ({"options": {"mergeShema": "true"}}, "options.mergeShema", "did you mean 'mergeSchema'?"),
        ({"format": "kafka", "topics": "a"}, "topics", "unknown key 'topics'; did you mean 'topic'?"),
        ({"format": "kafka", "sep": ";"}, "sep", 'write it below value_options: {sep: ";"}'),
        ({"format": "kafka", "options": ["x"]}, "options", "a mapping of option to value is needed"),
        (
            {"format": "kafka", "value": "csv", "value_options": {"sepp": ";"}},
            "value_options.sepp",
            "did you mean 'sep'?",
        ),
    ],
)
def test_what_a_source_would_ignore_is_refused(source: dict[str, object], place: str, said: str) -> None:
    found = problems(source=source)
    assert list(found) == [f"source.{place}"]
    assert said in found[f"source.{place}"]


def test_options_of_readers_are_taken_whatever_their_capitals() -> None:
    options = {"SEP": ";", "Header": True, "pathglobfilter": "*.csv", "cloudFiles.useManagedFileEvents": "true"}
    source = {"format": "csv", "path": "x", "options": options}
    assert Stream.from_dict({**MINIMAL, "source": source}).source == source


def test_an_unknown_limit_is_told_with_the_near_one() -> None:
    assert problems(limits={"measure": 3})["limits.measure"] == "unknown limit 'measure'; did you mean 'measures'?"
