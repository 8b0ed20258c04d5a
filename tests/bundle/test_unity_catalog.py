"""Tests the text that only Unity Catalog understands: grants, volumes, keys. None of it has been run on a workspace here."""

from __future__ import annotations

import getpass
import json
import re
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
from pyspark.errors import AnalysisException, PySparkException

from lookback.config import Settings
from lookback.core.errors import SetupError
from lookback.core.rules.compiling import compile_rule
from lookback.core.rules.coverage import Coverage
from lookback.core.streams.declaration import Stream
from lookback.spark.following.rulewatch import RulesWatch
from lookback.spark.ingest.files import ingest, ingest_continuously, retry_rejected
from lookback.spark.ingest.topics import TopicIngest
from lookback.spark.operations.catalog import SetUpStep, Volume, _Setup
from lookback.spark.operations.grants import Grantees, TablePlace, list_grants
from lookback.spark.platform import session
from lookback.spark.platform.session import _set_or_skip
from lookback.spark.stream.pipeline import Evaluation, _Idle
from lookback.spark.tables.lakehouse import Tables
from lookback.spark.tables.schemas import COMMENTS, KEYS, PRODUCT_TABLES

THREATS = Path(__file__).parents[2] / "docs" / "explanation" / "threats.md"
ROLES = Grantees("analysts", "engineers", "lookback-service")
PLACE = TablePlace("main", "fraud", "lookback", "landing")


class Unity:
    """Answers as Unity Catalog would, remembers what it was asked to run, and refuses grants on what it does not own."""

    def __init__(self, owned: Sequence[str] = ("SCHEMA", "TABLE", "VIEW", "VOLUME")) -> None:
        self.ran: list[str] = []
        self.volumes: set[str] = set()
        self.keys: set[str] = set()
        self.granted: dict[str, set[str]] = {}
        self._owned = owned

    def __call__(self, statement: str) -> Sequence[Mapping[str, Any]]:
        if statement.startswith("SHOW VOLUMES IN "):
            return [{"database": "fraud", "volume_name": name} for name in sorted(self.volumes)]
        if " FROM `main`.information_schema.table_constraints " in statement:
            (table,) = re.findall(r"table_name = '(\w+)'", statement)
            return [{"constraint_name": f"{table}_pk"}] if table in self.keys else []
        if shown := re.fullmatch(r"SHOW GRANTS (`.+`) ON (.+)", statement):
            given = self.granted.get(f"{shown[2]} {shown[1]}", set())
            return [{"Principal": shown[1], "ActionType": each.replace(" ", "_")} for each in given]
        return self._change(statement)

    def _change(self, statement: str) -> Sequence[Mapping[str, Any]]:
        if granted := re.fullmatch(r"GRANT (.+) ON ((\w+) .+) TO (`.+`)", statement):
            if granted[3] not in self._owned:
                raise AnalysisException("PERMISSION_DENIED: User does not own Catalog 'main'.\n\nmore")
            self.granted.setdefault(f"{granted[2]} {granted[4]}", set()).update(granted[1].split(", "))
        elif made := re.match(r"CREATE VOLUME IF NOT EXISTS `main`.`fraud`.`(\w+)` ", statement):
            self.volumes.add(made[1])
        elif keyed := re.match(r"ALTER TABLE `main`.`fraud`.`(\w+)` ADD CONSTRAINT ", statement):
            self.keys.add(keyed[1])
        else:
            raise AssertionError(statement)
        self.ran.append(statement)
        return []


def part(unity: Unity) -> _Setup:
    nothing: Any = None
    return _Setup(Tables.catalog(nothing, "main", "fraud"), {}, unity)


def test_the_page_on_threats_has_the_grants_that_set_up_gives() -> None:
    (block,) = re.findall(r"```sql\n(GRANT .*?)```", THREATS.read_text(encoding="utf-8"), re.DOTALL)
    shown = [line for line in block.splitlines() if line and not line.startswith("--")]
    given = [f"{grant.statement};" for grant in list_grants(PLACE, ROLES, ["transactions"])]
    assert shown == given
    # The stream that the engine writes itself is granted already.
    assert [f"{grant.statement};" for grant in list_grants(PLACE, ROLES, ["transactions", "metrics"])] == given


def test_only_the_service_writes_what_it_decides_and_analysts_see_no_raw_rows() -> None:
    found = list_grants(PLACE, ROLES, ["transactions"])
    writers = {grant.securable: grant.principal for grant in found if "MODIFY" in grant.privileges}
    assert writers == {
        "SCHEMA main.fraud": "lookback-service", "TABLE main.fraud.rules": "analysts", "TABLE main.fraud.reviews": "analysts", "TABLE main.fraud.labels": "analysts",
        "TABLE main.fraud.snoozes": "analysts", "TABLE main.fraud.lists": "analysts",
    }  # fmt: skip
    assert not [grant for grant in found if grant.principal == "analysts" and "rejected" in grant.securable]


def test_a_role_without_a_principal_gets_nothing_and_names_are_quoted_where_they_must_be() -> None:
    assert list_grants(PLACE, Grantees(), ["transactions"]) == []
    (only, *_) = list_grants(TablePlace("my-catalog", "fraud"), Grantees(engineers="a`b"), [])
    assert only.statement == "GRANT USE CATALOG ON CATALOG `my-catalog` TO `a``b`"
    named = {grant.kind for grant in list_grants(TablePlace("main", "fraud"), ROLES, [])}
    assert named == {"CATALOG", "SCHEMA", "TABLE", "VIEW"}


@pytest.mark.parametrize(
    ("path", "volume"),
    [
        ("/Volumes/main/fraud/checkpoints", Volume("main", "fraud", "checkpoints")),
        ("/Volumes/main/fraud/landing/transactions/", Volume("main", "fraud", "landing")),
        ("/Volumes/main/fraud", None),
        ("/mnt/Volumes/main/fraud/x", None),
        ("s3://bucket/landing", None),
        ("", None),
    ],
)
def test_a_path_is_in_a_volume(path: str, volume: Volume | None) -> None:
    assert Volume.from_path(path) == volume


def test_a_volume_is_made_once_and_one_of_another_schema_is_left_alone() -> None:
    unity = Unity()
    volume = Volume("main", "fraud", "checkpoints")
    assert part(unity)._create_volume(volume, "checkpoints", unity).done == "created"
    assert part(unity)._create_volume(volume, "checkpoints", unity).done == "as it should be"
    assert (
        part(unity)._create_volume(Volume("main", "raw", "files"), "landing", unity).done
        == "in another schema, left unchanged"
    )
    comment = "'Checkpoints of evaluations; only the jobs read and write them'"
    assert unity.ran == [f"CREATE VOLUME IF NOT EXISTS `main`.`fraud`.`checkpoints` COMMENT {comment}"]


def test_a_key_is_added_once_and_says_nothing_that_queries_may_count_on() -> None:
    unity = Unity()
    (alerts,) = [table for table in part(unity)._list_tables() if table.name == "alerts"]
    assert part(unity)._add_key(alerts) == ["a primary key"]
    assert part(unity)._add_key(alerts) == []
    assert unity.ran == [
        "ALTER TABLE `main`.`fraud`.`alerts` ADD CONSTRAINT `alerts_pk` PRIMARY KEY (`alert_id`, `revision`)"
    ]
    (rules,) = [table for table in part(unity)._list_tables() if table.name == "rules"]
    assert part(unity)._add_key(rules) == []


def test_keys_are_columns_that_are_never_null() -> None:
    for name, columns in KEYS.items():
        required = {field.name for field in PRODUCT_TABLES[name] if not field.nullable}
        assert set(columns) <= required, name
    assert set(COMMENTS) == set(PRODUCT_TABLES)
    assert all(field.metadata["comment"] for schema in PRODUCT_TABLES.values() for field in schema)


def test_what_is_granted_is_not_granted_again_and_what_is_refused_is_left_to_somebody_else() -> None:
    unity = Unity()
    for round_ in ("granted", "as it should be"):
        steps = [part(unity)._grant(grant, unity) for grant in list_grants(PLACE, ROLES, ["transactions"])]
        refused = [step for step in steps if step.to_do]
        assert [step.to_do for step in refused] == [
            f"GRANT USE CATALOG ON CATALOG main TO `{role}`" for role in ("analysts", "engineers", "lookback-service")
        ]
        assert {step.done for step in refused} == {"refused: PERMISSION_DENIED: User does not own Catalog 'main'."}
        # The service has SELECT on the schema, and what it was given before.
        assert {step.done for step in steps if not step.to_do} == {round_}
    assert len(unity.ran) == len(set(unity.ran)) == len(list_grants(PLACE, ROLES, ["transactions"])) - 3


def make_session(**catalogs: str) -> Any:
    """A session that answers for its settings alone: the class of each catalog."""
    settings = {f"spark.sql.catalog.{name}": each for name, each in catalogs.items()}
    return SimpleNamespace(conf=SimpleNamespace(get=settings.get))


def test_unity_catalog_is_every_catalog_but_those_that_came_before_it() -> None:
    nothing = make_session(open="io.unitycatalog.spark.UCSingleCatalog", other="org.example.Catalog")
    assert Tables.catalog(nothing, "main", "fraud").is_unity
    assert Tables.catalog(nothing, "other", "fraud").is_unity
    # The open-source one has neither volumes nor grants for Spark.
    assert not Tables.catalog(nothing, "open", "fraud").is_unity
    assert Tables.catalog(nothing, "open", "fraud").is_open_unity
    assert not Tables.catalog(nothing, "hive_metastore", "fraud").is_unity
    assert not Tables.catalog(nothing, "spark_catalog", "fraud").is_unity
    assert not Tables.local(nothing, "lakehouse").is_unity
    assert SetUpStep("x", "created").to_do == ""


class Refusing:
    """Settings of compute that lets none be changed."""

    conf: Any

    def __init__(self) -> None:
        self.conf = self

    def set(self, key: str, _value: str) -> None:
        raise AnalysisException(f"[CONFIG_NOT_AVAILABLE] Configuration {key} is not available.")

    def get(self, _key: str) -> str:
        return "as it was"


def test_serverless_compute_may_refuse_settings_but_none_that_results_depend_on() -> None:
    spark: Any = Refusing()
    _set_or_skip(spark, "spark.sql.execution.arrow.maxRecordsPerBatch", "100000")
    with pytest.raises(AnalysisException):
        _set_or_skip(spark, "spark.sql.session.timeZone", "UTC")


def test_the_version_of_rules_in_a_catalog_is_asked_for_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked = [0.0], list[str]()
    monkeypatch.setattr("lookback.spark.following.rulewatch.time", SimpleNamespace(monotonic=lambda: clock[0]))

    def version(name: str) -> int:
        asked.append(name)
        return 1

    tables: Any = SimpleNamespace(local_folder=lambda _: None, find_log_place=lambda _: None, version=version)
    nothing: Any = None
    watch = RulesWatch(tables, nothing, nothing)
    assert not watch.is_cheap
    asked.clear()
    for _ in range(120):
        clock[0] += 0.5
        watch.follow_if_due(None)
    assert asked == ["rules"] * 6


def test_a_look_at_the_rules_that_fails_is_logged_and_done_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock, version, widened = [0.0], [1], list[Coverage]()
    monkeypatch.setattr("lookback.spark.following.rulewatch.time", SimpleNamespace(monotonic=lambda: clock[0]))
    tables: Any = SimpleNamespace(
        local_folder=lambda _: None, find_log_place=lambda _: None, version=lambda _: version[0]
    )
    stream: Any = SimpleNamespace(name="tx")
    watch = RulesWatch(tables, stream, SimpleNamespace())  # type: ignore[arg-type]
    is_out = [False]

    def needs() -> Coverage:
        if is_out[0]:
            raise PySparkException("[UNAVAILABLE] the catalog does not answer\nat a.long.trace")
        return Coverage()

    monkeypatch.setattr(watch, "find_current_needs", needs)
    monkeypatch.setattr(watch, "_widen", widened.append)
    version[0], is_out[0] = 2, True
    for _ in range(50):
        clock[0] += 0.5
        watch.follow_if_due(None)
    assert [record.getMessage() for record in caplog.records] == [
        "stream=tx could not check the rules table, will retry: [UNAVAILABLE] the catalog does not answer"
    ] * 2
    assert not widened
    is_out[0] = False
    clock[0] += 10
    watch.follow_if_due(None)
    assert widened == [Coverage()]


def test_the_table_of_rules_is_asked_only_where_the_plan_may_be_narrowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def coverage(*fields: str) -> Coverage:
        return Coverage.of([], fields)

    plans, asked = [SimpleNamespace(coverage=coverage("a"))], list[str]()
    checkpoint: Any = SimpleNamespace(read_plan=lambda: plans[-1], write_plan=plans.append)
    tables: Any = SimpleNamespace(local_folder=lambda _: None, find_log_place=lambda _: None, version=lambda _: 1)
    watch = RulesWatch(tables, SimpleNamespace(name="tx"), checkpoint)  # type: ignore[arg-type]

    def needs() -> Coverage:
        asked.append("rules")
        return coverage("b")

    monkeypatch.setattr(watch, "find_current_needs", needs)
    monkeypatch.setattr(
        "lookback.spark.following.rulewatch.replace", lambda plan, coverage: SimpleNamespace(coverage=coverage)
    )
    # A batch that changed nothing, and one after which the rules need what the plan has.
    watch._follow(cast("Any", SimpleNamespace(required=None)))
    watch._follow(cast("Any", SimpleNamespace(required=coverage("a"))))
    assert (asked, len(plans)) == ([], 1)
    # What a rule in the table needs that no batch has applied yet stays in the plan.
    plans[-1].coverage = coverage("a", "b", "c")
    watch._follow(cast("Any", SimpleNamespace(required=coverage("a"))))
    assert (asked, plans[-1].coverage) == (["rules"], coverage("a", "b"))


def test_a_look_at_the_rules_compiles_only_the_documents_that_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream.from_dict(
        {
            "stream": "tx",
            "event_id": "id",
            "event_time": "at",
            "fields": {"id": "string", "at": "timestamp", "n": "int"},
        }
    )
    compiled = list[str]()

    def count(rule: Any, stream: Stream) -> Any:
        compiled.append(rule["rule_id"])
        return compile_rule(rule, stream)

    monkeypatch.setattr("lookback.spark.following.rulewatch.compile_rule", count)
    tables: Any = SimpleNamespace(local_folder=lambda _: None, find_log_place=lambda _: None, version=lambda _: 1)
    watch = RulesWatch(tables, stream, SimpleNamespace())  # type: ignore[arg-type]

    def row(number: int, status: str = "active", **more: Any) -> dict[str, Any]:
        rule = {
            "rule_id": f"r{number}", "stream": "tx", "group_by": ["id"], "window": "1 hour",
            "measures": {"m": "count(*)"}, "when": f"m > {number}", **more,
        }  # fmt: skip
        return {"status": status, "document": json.dumps(rule)}

    rows = [row(number, where=f"n = {number % 3}") for number in range(50)] + [{"status": "active", "document": "no"}]
    first = watch._find_needs(rows)
    assert first.wants == {(("id",), f"n = {value}") for value in range(3)}
    assert len(compiled) == 50
    more = watch._find_needs(
        [*rows[1:], row(60, measures={"m": "sum(n)"}), row(70, "retired"), {"status": None, "document": None}]
    )
    assert compiled[50:] == ["r60"]
    assert more.wants == {(("id",), None)}
    assert watch._find_needs(rows) == first
    monkeypatch.setattr("lookback.spark.following.rulewatch._MAX_DOCUMENTS", 10)
    watch._needs.clear()
    assert watch._find_needs(rows) == first
    assert len(watch._needs) <= 10


def test_a_watermark_that_cannot_be_moved_on_is_logged_and_moved_a_span_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock, is_out, asked = [0.0], [True], [0]
    monkeypatch.setattr("lookback.spark.stream.pipeline.time", SimpleNamespace(monotonic=lambda: clock[0]))

    def version(_: str) -> int:
        if is_out[0]:
            raise PySparkException("[UNAVAILABLE] the catalog does not answer")
        asked[0] += 1
        return 1

    tables, stream = SimpleNamespace(version=version), SimpleNamespace(name="tx")
    idle = _Idle(SimpleNamespace(tables=tables, stream=stream), 1_000_000)  # type: ignore[arg-type]
    query: Any = SimpleNamespace(status={"isDataAvailable": True})
    clock[0] = 1.0
    idle.advance_if_due(query)
    idle.advance_if_due(query)
    (record,) = caplog.records
    assert record.getMessage().startswith("stream=tx could not advance the watermark, will retry: ")
    clock[0], is_out[0] = 2.0, False
    idle.advance_if_due(query)
    assert asked == [1]


def test_a_query_over_a_catalog_is_looked_at_twice_a_second_and_local_rules_are_looked_at_often() -> None:
    for is_cheap, seconds in ((True, 0.02), (False, 0.5)):
        waited: list[float] = []

        def ended(timeout: float, waited: list[float] = waited) -> bool:
            waited.append(timeout)
            return len(waited) == 3

        evaluation = Evaluation.__new__(Evaluation)
        evaluation._query = SimpleNamespace(awaitTermination=ended)  # type: ignore[assignment]
        evaluation._watch = SimpleNamespace(is_cheap=is_cheap, follow_if_due=lambda _: None)  # type: ignore[assignment]
        evaluation._lists = SimpleNamespace(follow_if_due=lambda: None)  # type: ignore[assignment]
        evaluation._warm_ups = None
        evaluation._quarantines = SimpleNamespace(publish=lambda: None)  # type: ignore[assignment]
        evaluation._require_ownership = lambda: None
        evaluation._stopping, evaluation._idle = threading.Event(), None
        evaluation.reports = deque()
        assert evaluation._wait()
        assert waited == [seconds] * 3


STREAM = {
    "stream": "tx", "event_id": "id", "event_time": "at", "fields": {"id": "bigint", "at": "timestamp"},
}  # fmt: skip


class Answering:
    """A session of Spark Connect, which knows who works here."""

    conf = SimpleNamespace(set=lambda _key, _value: None)

    def __init__(self) -> None:
        self.ran: list[str] = []

    def sql(self, text: str) -> Any:
        self.ran.append(text)
        return SimpleNamespace(collect=lambda: [{"name": "ann@example.com"}])


def test_on_a_workspace_the_user_is_the_workspaces_and_here_that_of_the_operating_system(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("DATABRICKS_RUNTIME_VERSION", raising=False)
    spark: Any = Answering()
    tables = Tables.catalog(spark, "main", "fraud")
    assert (tables.current_user, spark.ran) == (getpass.getuser(), [])
    # The driver of a cluster runs as root, whoever has the notebook.
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "17.3")
    assert (tables.current_user, spark.ran) == ("ann@example.com", ["SELECT current_user() AS name"])
    monkeypatch.delenv("DATABRICKS_RUNTIME_VERSION")
    monkeypatch.setattr(Answering, "__module__", "pyspark.sql.connect.session")
    assert tables.current_user == "ann@example.com"


def test_where_databricks_connect_is_installed_its_session_is_taken_and_what_it_lacks_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Answering, "__module__", "pyspark.sql.connect.session")
    found: list[Any] = [Answering()]

    def get_or_create() -> Any:
        if not found:
            raise ValueError("default auth: cannot configure default credentials\nmore")
        return found[0]

    connect = ModuleType("databricks.connect")
    connect.__spec__ = ModuleSpec("databricks.connect", None)
    connect.DatabricksSession = SimpleNamespace(builder=SimpleNamespace(getOrCreate=get_or_create))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "databricks.connect", connect)
    monkeypatch.setattr(session.SparkSession, "getActiveSession", lambda: None)
    assert session.get_spark() is found[0]
    found.clear()
    with pytest.raises(
        SetupError, match=r"does not reach a workspace: default auth: cannot .* DATABRICKS_CONFIG_PROFILE"
    ):
        session.get_spark()


def test_checkpoints_of_a_catalog_are_in_a_volume_that_this_machine_reaches() -> None:
    nothing = make_session(open="io.unitycatalog.spark.UCSingleCatalog")
    place = Settings.local(catalog="main", schema="fraud")
    assert place.root == "/Volumes/main/fraud/checkpoints"
    tables = Tables.of(nothing, place)
    assert (tables.place, tables.reaches_files, tables.root) == ("main.fraud", False, None)
    with pytest.raises(SetupError, match="/Volumes/main/fraud/checkpoints is not on this machine: run this as a job"):
        _ = tables.files
    with pytest.raises(SetupError, match=r"root must be the volume for checkpoints.*got '../lakehouse'"):
        _ = Tables.of(nothing, Settings.local("../lakehouse", catalog="main", schema="fraud")).files
    with pytest.raises(SetupError, match="need a checkpoint folder"):
        _ = Tables.catalog(nothing, "main", "fraud").files
    with pytest.raises(
        SetupError, match="no volumes of the open-source Unity Catalog: give root, a folder or a bucket"
    ):
        _ = Tables.of(nothing, Settings.local(catalog="open", schema="fraud")).files
    assert Tables.of(nothing, Settings.local("/tmp/x", catalog="main", schema="fraud")).files == "/tmp/x"
    assert Tables.of(nothing, Settings.local("/tmp/x", catalog="open", schema="fraud")).files == "/tmp/x"
    with pytest.raises(SetupError, match="go together, got catalog='main', schema=''"):
        Settings.local(catalog="main")


def test_ingest_refuses_compute_of_spark_connect_before_it_looks_at_anything(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Answering, "__module__", "pyspark.sql.connect.session")
    spark: Any = Answering()
    tables = Tables.catalog(spark, "main", "fraud")
    topic = Stream.from_dict(
        {**STREAM, "source": {"format": "kafka", "options": {"kafka.bootstrap.servers": "b:9092", "subscribe": "t"}}}
    )
    stream = Stream.from_dict(STREAM)
    for take in (
        lambda: ingest(tables, stream, tmp_path),
        lambda: retry_rejected(tables, stream),
        lambda: ingest_continuously(tables, stream, tmp_path, checkpoint=tmp_path / "c"),
        lambda: TopicIngest(tables, topic, tmp_path / "c"),
    ):
        with pytest.raises(
            SetupError, match="does not support: use a cluster with dedicated access mode, as the job ingest does"
        ):
            take()
    assert (spark.ran, list(tmp_path.iterdir())) == ([], [])
