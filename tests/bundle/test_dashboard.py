"""The dashboard of the bundle, as far as its file says: pages, widgets, and the names in its queries.

What its queries answer is tested on tables, in tests/spark/test_dashboard.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import sqlglot
import yaml
from sqlglot import exp

from lookback.core.operations.thresholds import THRESHOLDS
from lookback.core.rules.document import SEVERITIES
from lookback.core.streams.alerts import DISPOSITIONS, MAX_EVIDENCE_IDS
from lookback.core.streams.alerts import TABLE as ALERTS
from lookback.questions import VIEWS, read_question, write_view
from lookback.spark.operations.grants import Grantees, TablePlace, list_grants
from lookback.spark.review import QUEUE_DAYS
from lookback.spark.tables.schemas import PRODUCT_TABLES

FILE = Path(__file__).resolve().parents[2] / "conf/dashboards/lookback.lvdash.json"
DASHBOARD: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
# The text of each dataset, as Databricks puts its lines together.
QUERIES: dict[str, str] = {each["name"]: "".join(each["queryLines"]) for each in DASHBOARD["datasets"]}
# The versions of widgets that this file is written in -> how a widget names the fields that it shows.
VERSIONS = {"bar": 3, "counter": 2, "filter-multi-select": 2, "filter-single-select": 2, "line": 3, "table": 2}
# The grid of a page without `layoutVersion` is so wide.
COLUMNS = 6
# By it a filter asks which of its values the others leave; Databricks alone knows it.
ASSOCIATIVITY = "COUNT_IF(`associative_filter_predicate_group`)"


class WidgetQuery(NamedTuple):
    """A widget's question to a dataset. fields: name -> expression over the columns of the dataset."""

    widget: str
    dataset: str
    fields: dict[str, str]
    is_aggregated: bool


def layouts() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each page's name with each of its widgets and their places."""
    for page in DASHBOARD["pages"]:
        for each in page["layout"]:
            yield page["name"], each


def widget_queries() -> list[WidgetQuery]:
    """The queries of all widgets, without what filters ask beside their values."""
    found = []
    for _, each in layouts():
        for named in each["widget"].get("queries", []):
            query = named["query"]
            if "fields" not in query:
                continue  # It gives a dataset the value of a parameter.
            fields = {
                field["name"]: field["expression"] for field in query["fields"] if field["expression"] != ASSOCIATIVITY
            }
            found.append(WidgetQuery(each["widget"]["name"], query["datasetName"], fields, not query["disaggregated"]))
    return found


def encodings(widget: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields all encodings of a widget that name a field."""

    def walk(part: Any) -> Iterator[dict[str, Any]]:
        if isinstance(part, dict) and "fieldName" in part:
            yield part
        for inner in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
            yield from walk(inner)

    yield from walk(widget["spec"]["encodings"])


def test_every_name_is_there_once() -> None:
    assert set(DASHBOARD) == {"datasets", "pages"}
    names = [each["name"] for each in DASHBOARD["datasets"]]
    names += [page["name"] for page in DASHBOARD["pages"]]
    names += [each["widget"]["name"] for _, each in layouts()]
    assert sorted(names) == sorted(set(names))
    titles = [each["displayName"] for each in (*DASHBOARD["datasets"], *DASHBOARD["pages"])]
    assert len(titles) == len(set(titles))
    for page in DASHBOARD["pages"]:
        assert set(page) == {"name", "displayName", "layout", "pageType"}
        assert page["pageType"] == "PAGE_TYPE_CANVAS"
    for each in DASHBOARD["datasets"]:
        # The bundle gives catalog and schema.
        assert set(each) - {"parameters"} == {"name", "displayName", "queryLines"}
        assert all(line.endswith("\n") for line in each["queryLines"][:-1])


def test_no_two_widgets_overlap_and_none_is_beyond_the_page() -> None:
    by_page: dict[str, list[dict[str, int]]] = {}
    for page, each in layouts():
        position = each["position"]
        assert set(position) == {"x", "y", "width", "height"}
        assert position["x"] >= 0 <= position["y"]
        assert position["width"] > 0 < position["height"]
        assert position["x"] + position["width"] <= COLUMNS, each["widget"]["name"]
        by_page.setdefault(page, []).append(position)
    for positions in by_page.values():
        for a, b in combinations(positions, 2):
            apart = a["x"] + a["width"] <= b["x"] or b["x"] + b["width"] <= a["x"]
            assert apart or a["y"] + a["height"] <= b["y"] or b["y"] + b["height"] <= a["y"], (a, b)


@pytest.mark.parametrize("widget", [each["widget"] for _, each in layouts()], ids=lambda widget: widget["name"])
def test_a_widget_shows_what_it_asks_for(widget: dict[str, Any]) -> None:
    if "multilineTextboxSpec" in widget:
        assert set(widget) == {"name", "multilineTextboxSpec"}
        return
    assert set(widget) == {"name", "queries", "spec"}
    spec = widget["spec"]
    assert spec["version"] == VERSIONS[spec["widgetType"]]
    assert spec["frame"]["showTitle"]
    assert spec["frame"].get("showDescription", False) == ("description" in spec["frame"])
    if spec["widgetType"] == "filter-single-select":
        # A test of its own says what it asks.
        assert all(each["query"]["datasetName"] in QUERIES for each in widget["queries"])
        return
    asked = {each["name"]: each["query"] for each in widget["queries"]}
    assert all(query["datasetName"] in QUERIES for query in asked.values())
    names = [field["name"] for query in asked.values() for field in query["fields"]]
    shown = list(encodings(widget))
    assert shown
    if spec["widgetType"] == "filter-multi-select":
        assert {each["queryName"] for each in shown} == set(asked)
        for each in shown:
            value, rest = asked[each["queryName"]]["fields"]
            assert (value["name"], rest["expression"]) == (each["fieldName"], ASSOCIATIVITY)
        return
    assert list(asked) == ["main_query"]
    # Databricks says "invalid widget definition" where these differ.
    assert sorted(each["fieldName"] for each in shown) == sorted(names)
    assert all(each["displayName"] for each in shown)
    (query,) = asked.values()
    assert query["disaggregated"] == (spec["widgetType"] == "table")


def test_c12_2_a_filter_leaves_the_open_alerts_of_one_tag() -> None:
    (filter_,) = [each["widget"] for _, each in layouts() if each["widget"]["name"] == "alerts_tag"]
    offered, given = filter_["queries"]
    assert offered["query"]["datasetName"] == "queue_tags"
    assert given["query"] == {
        "datasetName": "open_queue", "parameters": [{"name": "tag", "keyword": "tag"}], "disaggregated": False,
    }  # fmt: skip
    assert filter_["spec"]["encodings"]["fields"] == [
        {"fieldName": "tag", "displayName": "tag", "queryName": offered["name"]},
        {"parameterName": "tag", "queryName": given["name"]},
    ]
    # Every parameter in a query is declared, and begins with what the filter shows first.
    for each in DASHBOARD["datasets"]:
        asked = {
            node.name
            for node in sqlglot.parse_one(QUERIES[each["name"]], dialect="databricks").find_all(exp.Placeholder)
        }
        assert asked == {parameter["keyword"] for parameter in each.get("parameters", [])}
    (parameter,) = next(each for each in DASHBOARD["datasets"] if each["name"] == "open_queue")["parameters"]
    assert parameter["defaultSelection"] == filter_["spec"]["selection"]["defaultSelection"]
    assert "'all tags'" in QUERIES["open_queue"]
    assert "'all tags'" in QUERIES["queue_tags"]


def test_every_dataset_is_shown_and_the_filters_reach_all_that_have_a_stream() -> None:
    assert {each.dataset for each in widget_queries()} == set(QUERIES)
    for page in DASHBOARD["pages"]:
        widgets = [each["widget"] for each in page["layout"] if "spec" in each["widget"]]
        by_kind = {kind: [w for w in widgets if w["spec"]["widgetType"] == kind] for kind in VERSIONS}
        (filter_,) = by_kind["filter-multi-select"]
        reached = {query["query"]["datasetName"] for query in filter_["queries"]}
        asked = {query["query"]["datasetName"] for widget in widgets for query in widget["queries"]}
        # Risk is that of all streams together, and so are the tags to choose from.
        assert asked - reached == ({"top_entities", "queue_tags"} if page["name"] == "alerts" else set())


@pytest.mark.parametrize("dialect", ["databricks", "spark"])
@pytest.mark.parametrize("name", QUERIES)
def test_a_query_reads_tables_of_the_product_that_analysts_may_read(name: str, dialect: str) -> None:
    tree = sqlglot.parse_one(QUERIES[name], dialect=dialect)
    made = {each.alias for each in tree.find_all(exp.CTE)}
    tables = [each for each in tree.find_all(exp.Table) if each.name not in made]
    # The target's catalog and schema come before the name.
    assert all(not each.catalog and not each.db for each in tables)
    place, roles = TablePlace("main", "lookback"), Grantees(analysts="the-analysts")
    readable = {
        grant.name[-1]
        for grant in list_grants(place, roles, [])
        if grant.kind in ("TABLE", "VIEW") and "SELECT" in grant.privileges
    }
    assert {each.name for each in tables} <= readable & {*PRODUCT_TABLES, *VIEWS}
    assert tables


def test_numbers_and_names_in_queries_are_those_of_the_product() -> None:
    severities = ", ".join(f"'{each}'" for each in SEVERITIES)
    assert f"array({severities})" in QUERIES["open_queue"]
    assert f"INTERVAL '{QUEUE_DAYS:.0f}' DAY" in write_view("open_queue", str)
    known = ", ".join(f"'{name}'" for name, positive in DISPOSITIONS.items() if positive is not None)
    assert f"disposition IN ({known})" in read_question("labelled_events")
    assert [name for name, positive in DISPOSITIONS.items() if positive] == ["confirmed"]
    assert f"coalesce(array_size(alert.evidence), 0) < {MAX_EVIDENCE_IDS}" in read_question("standing_alerts")
    assert f"a.stream <> '{ALERTS}'" in QUERIES["top_entities"]
    numbers = set(
        re.findall(
            r"(?<![\w.])\d+(?:\.\d+)?(?![\w.])",
            QUERIES["stream_health"].partition("FROM timed")[0].partition("timed AS")[2],
        )
    )
    checks = ("silent", "unjudged", "behind", "late_least", "discarded_share", "late_share", "watermark_ahead")
    assert numbers - {"0", "1000000"} == {f"{THRESHOLDS[name].value:g}" for name in checks}


def test_the_dashboard_is_deployed_with_the_targets_catalog_and_schema() -> None:
    document = yaml.safe_load(FILE.with_name("lookback.yml").read_text(encoding="utf-8"))
    (dashboard,) = document["resources"]["dashboards"].values()
    assert (FILE.parent / dashboard["file_path"]).resolve() == FILE
    assert (dashboard["dataset_catalog"], dashboard["dataset_schema"]) == ("${var.catalog}", "${var.schema}")
    # With those of whoever deploys, everybody who sees the dashboard would read what the service may read.
    assert dashboard["embed_credentials"] is False
