"""Runs what the pages in docs show.

A page is read as headings, fenced blocks and tables. What a block is says its first line:

    ```yaml stream    the stream of what follows on the page; on a page without one, that of the index of its folder, else
                      those of conf/streams
    ```yaml rule      a rule, or several with --- between: checked, with the tests in them
    ```yaml mistake   keys that replace those of the rule below-the-limit that ships (null: left out); the text block below
                      is what the check says to it, without regard to line ends
    ```python         run; what it prints is the text block below
    ```sh             commands of the command line

After a rule, a table with a column `at` holds events for a harness. Then every row that the harness has stands in the
tables below: alerts (they have a column `verdict`), late events (`action`), log rows (`log`).
"""

from __future__ import annotations

import contextlib
import datetime as dt
import io
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

import lookback
from lookback.cli import _make_parser, main
from lookback.config import load_streams
from lookback.core.errors import StreamError
from lookback.core.expressions.compiling import compile_expression
from lookback.core.expressions.forms import FORMS
from lookback.core.expressions.functions import AGGREGATE_ALIASES, AGGREGATE_ARGUMENTS, FUNCTIONS
from lookback.core.expressions.lambdas import LAMBDAS
from lookback.core.rules import document as rules
from lookback.core.rules.rulelog import LogRow
from lookback.core.streams.alerts import Alert, LateEvent
from lookback.core.streams.declaration import Stream
from lookback.core.streams.lookups import Lookup
from lookback.core.streams.source_keys import FILE_KEYS
from lookback.core.values import types
from lookback.core.values.columns import from_values, to_text
from lookback.core.values.durations import parse_duration
from lookback.core.values.limits import DEFAULT_LIMITS, LIMITS
from lookback.core.values.reading import list_document_keys
from lookback.core.values.types import STRING, array, parse_type
from lookback.importing.reasons import APPROXIMATIONS, REMEDIES
from lookback.stream_draft import draft_stream
from lookback.testing.rule_tests import check_rule

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {
    path.relative_to(DOCS).with_suffix("").as_posix(): path.read_text(encoding="utf-8")
    for path in sorted(DOCS.rglob("*.md"))
}
STREAMS = load_streams(ROOT / "conf")
NONE = "-"
# Of times that name no day.
DAY = "2026-03-01"


# Reading a page ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A fenced block, `info` is what stands behind the fence; or a table, `info` is `table`."""

    heading: str
    info: str
    text: str = ""
    rows: list[dict[str, str]] = field(default_factory=list)

    @property
    def columns(self) -> list[str]:
        return list(self.rows[0]) if self.rows else []


def blocks_of(page: str) -> list[Block]:
    """The fenced blocks and the tables of a page, in order."""
    found: list[Block] = []
    heading, fence, inside, table = "", None, [], []
    for line in [*PAGES.get(page, "").splitlines(), ""]:
        if fence is not None:
            if line != "```":
                inside.append(line)
                continue
            found.append(Block(heading, fence, "".join(f"{each}\n" for each in inside)))
            fence, inside = None, []
        elif line.startswith("|"):
            table.append(line)
        else:
            if table:
                names, _, *rows = map(cells, table)
                found.append(Block(heading, "table", rows=[dict(zip(names, row, strict=True)) for row in rows]))
                table = []
            if line.startswith("```"):
                fence = line[3:].strip()
            elif line.startswith("#"):
                heading = line.lstrip("# ")
    return found


def cells(line: str) -> list[str]:
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip()[1:-1])]


def names_in(text: str) -> list[str]:
    """Lists the texts in code marks."""
    return re.findall(r"`([^`]+)`", text)


@dataclass
class Example:
    """Rules, and what becomes of events."""

    name: str
    rules: list[dict[str, Any]]
    streams: dict[str, Stream]
    events: list[dict[str, str]] = field(default_factory=list)
    expected: dict[str, Block] = field(default_factory=dict)

    @property
    def stream(self) -> Stream:
        return self.streams[self.rules[0]["stream"]]


def examples_of(page: str) -> Iterator[Example]:
    streams, example = STREAMS, None
    index = f"{page.rpartition('/')[0]}/index"
    for block in [*(each for each in blocks_of(index) if each.info == "yaml stream"), *blocks_of(page)]:
        if block.info == "yaml stream":
            stream = Stream.from_dict(yaml.safe_load(block.text))
            streams = {stream.name: stream}
        elif block.info == "yaml rule":
            if example:
                yield example
            example = Example(f"{page}: {block.heading}", list(yaml.safe_load_all(block.text)), streams)
        elif example and "at" in block.columns:
            assert not example.events, f"{example.name}: a second table of events"
            example.events = block.rows
        elif example and (kind := next((kind for kind in TABLES if kind in block.columns), None)):
            assert kind not in example.expected, f"{example.name}: a second table with the column {kind}"
            example.expected[kind] = block
    if example:
        yield example


# Running an example --------------------------------------------------------------------------------------------------


def time_of(cell: str) -> str:
    match = re.fullmatch(r"(?:(\d\d-\d\d) )?(\d\d:\d\d(?::\d\d(?:\.\d{1,6})?)?)", cell)
    assert match, f"{cell!r} is no time"
    return f"2026-{match[1]}T{match[2]}Z" if match[1] else f"{DAY}T{match[2]}Z"


def shown(value: Any) -> str:
    """A value as the tables of the pages have it: times without what is zero or the pages' day."""
    if value is None:
        return NONE
    if isinstance(value, dt.datetime):
        text = to_text(value) or ""
        day, clock = text.removesuffix("Z").split("T")
        return ("" if day == DAY else f"{day[5:]} ") + clock.removesuffix(":00")
    if isinstance(value, (list, tuple)):
        return ", ".join(map(shown, value))
    return to_text(value) or ""


def alert_cell(alert: Alert, column: str) -> str:
    if column == "id":
        return shown(alert.event_id)
    if column in {each.name for each in fields(Alert)}:
        return shown(getattr(alert, column))
    return shown(alert.key[column] if column in alert.key else alert.measures[column])


def late_cell(late: LateEvent, column: str) -> str:
    return shown(late.event_id if column == "id" else getattr(late, column))


def log_cell(row: LogRow, column: str) -> str:
    return shown(row.action if column == "log" else getattr(row, column))


# The column that tells a table -> what it holds of a harness.
TABLES = {"verdict": ("alerts", alert_cell), "action": ("late_events", late_cell), "log": ("errors", log_cell)}


def run_events(example: Example) -> lookback.Harness:
    """The harness after the events. A row whose id is `publish x` publishes rule x, `advance` moves the watermark."""
    stream = example.stream
    harness = lookback.Harness(stream)
    named = {row["id"].removeprefix("publish ") for row in example.events if row["id"].startswith("publish ")}
    for rule in example.rules:
        if rule["rule_id"] not in named:
            harness.rule(rule)
    waiting: list[dict[str, Any]] = []
    for row in [*example.events, None]:
        if row is None or row["id"].startswith("publish ") or row["id"] == "advance":
            if waiting:
                harness.events(waiting)
                waiting = []
            if row is not None and row["id"] == "advance":
                harness.watermark(time_of(row["at"]))
            elif row is not None:
                (rule,) = [rule for rule in example.rules if f"publish {rule['rule_id']}" == row["id"]]
                harness.rule(rule)
            continue
        event: dict[str, Any] = {name: cell for name, cell in row.items() if cell and name != "watermark"}
        event[stream.event_id], event[stream.event_time] = event.pop("id"), time_of(event.pop("at"))
        if "arrival" in event:
            event["arrival"] = int(event["arrival"])
        waiting.append(event)
    return harness


EXAMPLES = [example for page in PAGES for example in examples_of(page)]


def ids_of(examples: list[Example]) -> list[str]:
    return [f"{at} {example.name}" for at, example in enumerate(examples, 1)]


@pytest.mark.parametrize("example", EXAMPLES, ids=ids_of(EXAMPLES))
def test_rule_of_a_page_is_fine(example: Example) -> None:
    for rule in example.rules:
        check_rule(rule, example.streams)
        assert example.events or rule.get("tests"), "an example shows what becomes of events"


RUN = [example for example in EXAMPLES if example.events]


@pytest.mark.parametrize("example", RUN, ids=ids_of(RUN))
def test_events_of_a_page_bring_the_rows_that_it_shows(example: Example) -> None:
    harness = run_events(example)
    for kind, (name, cell) in TABLES.items():
        rows = getattr(harness, name)
        block = example.expected.get(kind)
        columns = block.columns if block else [kind]
        found = [{column: cell(row, column) for column in columns} for row in rows]
        assert found == (block.rows if block else []), name


@pytest.mark.parametrize("example", RUN, ids=ids_of(RUN))
def test_watermarks_of_a_page_are_those_of_the_rule_in_words(example: Example) -> None:
    """The highest event time of all commits before, less max_out_of_orderness; never less than an advance."""
    highest, advanced, commit = None, None, 0
    earlier: list[tuple[int, dt.datetime]] = []
    for row in example.events:
        if row["id"].startswith("publish "):
            continue
        at = dt.datetime.fromisoformat(time_of(row["at"]).removesuffix("Z")).replace(tzinfo=dt.timezone.utc)
        if row["id"] == "advance":
            advanced = at
            continue
        commit = int(row.get("arrival") or commit + 1)
        highest = max((time for number, time in earlier if number < commit), default=None)
        late = dt.timedelta(microseconds=example.stream.max_out_of_orderness)
        bounds = [bound for bound in (highest and highest - late, advanced) if bound]
        if "watermark" in row:
            assert row["watermark"] == shown(max(bounds, default=None)), row
        earlier.append((commit, at))


# Other blocks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_python_of_a_page_prints_what_stands_below_it(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    blocks = blocks_of(page)
    names: dict[str, Any] = {}
    for block, after in pairwise([*blocks, Block("", "")]):
        if block.info == "python":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(block.text, f"docs/{page}.md", "exec"), names)
            assert printed.getvalue() == (after.text if after.info == "text" else "")


def mistakes() -> list[tuple[str, dict[str, Any], str]]:
    found = []
    rule = yaml.safe_load((ROOT / "conf/rules/below-the-limit.yml").read_text(encoding="utf-8"))
    for page in PAGES:
        for block, after in pairwise(blocks_of(page)):
            if block.info == "yaml mistake":
                changed = {**rule, "message": "", "tests": [], **yaml.safe_load(block.text)}
                found.append((page, {k: v for k, v in changed.items() if v is not None}, after.text))
    return found


@pytest.mark.parametrize(("page", "rule", "said"), mistakes())
def test_mistake_of_a_page_is_told_as_it_says(page: str, rule: dict[str, Any], said: str) -> None:
    with pytest.raises(lookback.RuleError) as caught:
        check_rule(rule, STREAMS)
    assert str(caught.value).split() == said.split()


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_are_those_of_the_command_line(page: str) -> None:
    for block in blocks_of(page):
        if block.info != "sh":
            continue
        for line in block.text.splitlines():
            words = shlex.split(line, comments=True)
            if words and words[0].endswith("lookback"):
                _make_parser().parse_args(words[1:])


# The rule guide ------------------------------------------------------------------------------------------------------

GUIDE = [
    block
    for page in (
        "how-to/write-a-rule",
        "reference/rule-keys",
        "reference/measures",
        "reference/conditions",
        "reference/lists",
        "reference/sequences",
        "reference/alerts-and-limits",
        "how-to/rules-over-alerts",
        "reference/mistakes",
    )
    for block in blocks_of(page)
]
BASES: dict[str, dict[str, Any]] = {
    "event": {"when": "payer_id = 'nobody'"},
    "lookback": {"window": "1 hour", "measures": {"n": "count(*)"}, "when": "payer_id = 'nobody'"},
    "tumbling": {"window": {"tumbling": "1 hour"}, "measures": {"n": "count(*)"}},
    "sliding": {"window": {"sliding": "1 hour", "slide": "1 minute"}, "measures": {"n": "count(*)"}},
    "session": {"window": {"session": "1 hour"}, "measures": {"n": "count(*)"}},
    "sequence": {"sequence": {"within": "1 hour", "steps": [{"name": "paid", "where": "amount > 5"}]}},
}


def rows_with(column: str) -> list[dict[str, str]]:
    """The rows of all tables of the guide that have this column first."""
    return [row for block in GUIDE if block.columns[:1] == [column] for row in block.rows]


def value_of(text: str) -> str:
    """The value of an expression over the array `ips`."""
    expression = compile_expression(text, {"ips": array(STRING)})
    columns = {"ips": from_values(array(STRING), [["a", "b", "a"]])}
    column = expression.evaluate({name: columns[name] for name in expression.fields}, 1)
    assert column.error is None or not column.error[0], text
    return to_text(column.item(0)) or "NULL"


def test_guide_shows_the_rule_that_ships() -> None:
    shown = [block.text for block in GUIDE if block.info == "yaml rule"][:2]
    for document, name in zip(map(yaml.safe_load, shown), ("large-payment", "below-the-limit"), strict=True):
        shipped = yaml.safe_load((ROOT / f"conf/rules/{name}.yml").read_text(encoding="utf-8"))
        tests = document.get("tests", [])
        assert {**document, "tests": tests} == {**shipped, "tests": shipped["tests"][: len(tests)]}


def test_guide_has_every_key() -> None:
    kinds = {
        **{f"window.{key}": kind for kind, keys in rules.WINDOW_FORMS.items() for key in keys},
        **{f"measures.NAME.{key}": "lookback" for key in rules.MEASURE_KEYS},
        **{f"sequence.{key}": "sequence" for key in rules.SEQUENCE_KEYS},
        **{f"sequence.steps.{key}": "sequence" for key in (*rules.STEP_KEYS, *rules.ABSENT_KEYS)},
        **dict.fromkeys([*rules.COMMON_KEYS, *(f"tests.{key}" for key in rules.TEST_KEYS)], "all"),
    }
    for key in {key for keys in rules.KEYS_OF_KIND.values() for key in keys}:
        kinds[key] = ", ".join(kind for kind, keys in rules.KEYS_OF_KIND.items() if key in keys)
    kinds["window.offset"] = "tumbling, sliding"
    assert {row["key"].strip("`"): row["for"] for row in rows_with("key")} == kinds


@pytest.mark.parametrize("row", rows_with("key"), ids=lambda row: row["key"].strip("`"))
def test_example_of_a_key_is_a_rule_of_each_kind_that_it_is_for(row: dict[str, str]) -> None:
    (text,) = names_in(row["example"])
    example = yaml.safe_load(text)
    assert row["key"].strip("`").partition(".")[0] in example
    wanted = set(BASES) if row["for"] == "all" else set(row["for"].split(", "))
    fine = set()
    for base in BASES.values():
        kept = {} if "sequence" in example else base
        with contextlib.suppress(lookback.RuleError):
            document = {"rule_id": "example", "stream": "payments", "group_by": ["payer_id"], **kept, **example}
            fine.add(check_rule(document, STREAMS).spec.kind)
    # A window in the example makes the rule one of its kind.
    assert fine & wanted if "window" in example else fine == wanted


def test_guide_has_every_aggregate_with_its_type() -> None:
    rows = rows_with("aggregate")
    names = {name.partition("(")[0] for row in rows for name in names_in(row["aggregate"])}
    assert names == {*AGGREGATE_ARGUMENTS, *AGGREGATE_ALIASES}
    for row in rows:
        measures = {"m": row["example"].strip("`")}
        rule = {"rule_id": "example", "stream": "payments", **BASES["lookback"], "measures": measures}
        assert str(check_rule(rule, STREAMS).measures[0].type) == row["type of the result"], row


def test_guide_has_every_function() -> None:
    listed = [name for row in rows_with("function") for name in names_in(row["function"])]
    assert sorted(listed) == sorted([*FUNCTIONS, *FORMS, *LAMBDAS])


@pytest.mark.parametrize("row", [*rows_with("function"), *rows_with("operator")], ids=lambda row: row["example"])
def test_example_of_a_function_has_the_value_that_the_guide_says(row: dict[str, str]) -> None:
    assert value_of(row["example"].strip("`")) == row["value"]


def test_guide_has_every_status_and_policy() -> None:
    assert [row["Status"] for row in rows_with("Status")] == list(rules.STATUSES)
    policies = [yaml.safe_load(row["Policy"].strip("`"))["late"] for row in rows_with("Policy")]
    assert policies == list(rules.LATE_POLICIES)


def test_guide_has_every_limit() -> None:
    rows = {row["limit"].strip("`"): row for row in rows_with("limit")}
    assert list(rows) == list(LIMITS)
    for name, limit in LIMITS.items():
        shown_limits = [
            limit.format_value(number) for number in (getattr(DEFAULT_LIMITS, name), limit.least, limit.most)
        ]
        assert [rows[name][column] for column in ("default", "at least", "at most")] == shown_limits
        assert rows[name]["what it bounds"].replace("`", "") == limit.about.replace("`", "")


def test_check_says_what_the_pages_show(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A text below commands is what they print; those that are shown so need no tables."""
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("LOOKBACK_CONF", raising=False)
    run = 0
    for page in PAGES:
        for block, after in pairwise(blocks_of(page)):
            # The tutorial has a folder and a test of its own.
            if block.info == "sh" and after.info == "text" and page != "tutorial/first-alert":
                (command,) = block.text.splitlines()
                assert command.startswith("lookback rules check ")
                assert main(shlex.split(command)[1:]) == 0
                assert capsys.readouterr().out == after.text
                run += 1
    assert run >= 1


# Declaring a stream --------------------------------------------------------------------------------------------------

STREAM_PAGE = blocks_of("streams")
DECLARED = {"stream": "orders", "event_id": "order_id", "event_time": "ordered_at"}
ORDER_FIELDS = {"order_id": "bigint", "ordered_at": "timestamp", "amount": "decimal(18,2)"}


def stream_rows(column: str) -> list[dict[str, str]]:
    return [row for block in STREAM_PAGE if block.columns[:1] == [column] for row in block.rows]


def test_the_page_of_streams_has_every_key() -> None:
    assert [row["key"].strip("`") for row in stream_rows("key")] == list(list_document_keys(Stream))
    assert [row["key of source"].strip("`") for row in stream_rows("key of source")] == list(FILE_KEYS)


@pytest.mark.parametrize("row", [*stream_rows("key"), *stream_rows("key of source")], ids=lambda row: row["example"])
def test_example_of_a_streams_key_is_taken_and_its_default_is_the_codes(row: dict[str, str]) -> None:
    (text,) = names_in(row["example"])
    example = yaml.safe_load(text)
    key = row.get("key", "`source`").strip("`")
    base = {**DECLARED, "fields": ORDER_FIELDS, **({"table": "/lake/orders"} if key == "order_by" else {})}
    plain = Stream.from_dict(base).to_dict()
    if key == "union":
        # Ingest makes its id, a string.
        base = {"stream": "orders", "fields": {"amount": "decimal(18,2)"}}
    stream = Stream.from_dict({**base, **example})
    assert list(example) == [key]
    if "key of source" in row:
        assert row["key of source"].strip("`") in stream.source
    elif row["default"] == "required":
        with pytest.raises(StreamError):
            Stream.from_dict({name: value for name, value in base.items() if name != key})
    else:
        assert stream.to_dict()[key] != plain.get(key)
        if key in plain and row["type"] in ("duration", "number"):
            value, shown_default = plain[key], row["default"]
            if row["type"] == "number":
                assert shown_default == f"{value:,}"
            else:
                assert parse_duration(shown_default) == parse_duration(value)


def test_the_page_of_streams_has_every_key_of_a_look_up() -> None:
    rows = stream_rows("key of look-up")
    assert [row["key of look-up"].strip("`") for row in rows] == list(list_document_keys(Lookup))
    for row in rows:
        (text,) = names_in(row["example"])
        document = {**DECLARED, "fields": ORDER_FIELDS, "lookups": [yaml.safe_load(text)]}
        (lookup,) = Stream.from_dict(document).lookups
        (plain,) = Stream.from_dict(
            {**document, "lookups": [{"table": "t", "on": "order_id", "fields": {"x": "int"}}]}
        ).lookups
        key = row["key of look-up"].strip("`")
        assert lookup.to_dict()[key] != plain.to_dict()[key]


def test_the_page_of_streams_has_every_type() -> None:
    rows = stream_rows("type")
    parsed = [parse_type(row["type"].strip("`")) for row in rows]
    assert {type_.name for type_ in parsed} == {*types._SIMPLE, "decimal", "array"}
    for row, type_ in zip(rows, parsed, strict=True):
        assert str(type_) == row["type"].strip("`")


def test_the_draft_of_the_page_is_that_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = next(block for block in STREAM_PAGE if block.info.startswith("text file"))
    Path(file.info.split()[-1]).write_text(file.text, encoding="utf-8")
    assert draft_stream("orders.csv") == next(b.text for b in STREAM_PAGE if b.info == "yaml stream draft")


# The contract --------------------------------------------------------------------------------------------------------


def test_every_clause_that_a_test_is_named_after_is_in_the_contract() -> None:
    clauses, section = set(), ""
    for line in PAGES["contract"].splitlines():
        if heading := re.match(r"## (\d+)\. ", line):
            section = heading[1]
        elif clause := re.match(r"(\d+)\. \*\*C\*\* ", line):
            clauses.add(f"{section}_{clause[1]}")
    named = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^ *def test_c(\d+_\d+)(?=_)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert named
    assert named <= clauses


# Sizing --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("result", ["drain-handbook-2", "drain-zipf-2", "drain-handbook-100", "drain-zipf-100"])
def test_figures_of_sizing_are_those_of_the_benchmarks(result: str) -> None:
    """docs/sizing.md says each benchmark's last figure, to the hundred."""
    measured = re.search(
        rf"^\| {result.removeprefix('drain-').replace('-', ', ')} \|(?:[^|]*\|){{3}} ([\d,]+) \|",
        (ROOT / "dev/bench/results.md").read_text(encoding="utf-8"), re.MULTILINE,
    )  # fmt: skip
    assert measured, "dev/bench/results.md has no such row"
    assert f"{round(int(measured[1].replace(',', '')), -2):,}" in PAGES["sizing"]


# Rules of other systems ----------------------------------------------------------------------------------------------


def test_each_reason_of_an_import_has_a_section() -> None:
    sections = {"approximated": APPROXIMATIONS, "refused": REMEDIES}
    for kind, codes in sections.items():
        part = PAGES["reference/import-reasons"].partition(f"## Why a rule is {kind}\n")[2].partition("\n## ")[0]
        assert re.findall(r"^### (.*)$", part, re.MULTILINE) == sorted(codes)
