"""CONTRIBUTING shows changes that can be made as they stand: applied to a copy of the tree, what they add runs there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
# Generated cases in which every measure is the new aggregate, or every window with a resolution has no length.
COMPARED = """
import sys
sys.path[:0] = ["tests", "tests/support", "tests/core"]
import cases
from hypothesis import HealthCheck, given, settings
from test_equals_oracle import assert_engine_equals_oracle
from oracle import COVERED

def with_windows(case):
    for change in case["changes"]:
        document = change["document"] or {}
        measures = [spec for spec in document.get("measures", {}).values() if isinstance(spec, dict)]
        for holder in (document, *measures):
            window = holder.get("window")
            if isinstance(window, dict) and "resolution" in window:
                window["lookback"] = "0 seconds"
    return case

settings.register_profile("some", max_examples=5, derandomize=True, deadline=None,
                          suppress_health_check=list(HealthCheck))
settings.load_profile("some")
"""
AGGREGATE = """
cases._AGGREGATES[:] = ["try_sum(a)", "try_sum(n * 4611686018427387904)"]

@given(cases.cases(updates=True))
def compare(case):
    assert_engine_equals_oracle(case)

compare()
"""
WINDOW = """
@given(cases.resolution_cases().map(with_windows))
def compare(case):
    assert_engine_equals_oracle(case)

compare()
"""
# A sound ORC file, a torn one, and a value that does not fit.
SOURCE = """
import sys
from pathlib import Path
from lookback.config import load_streams
from lookback.spark.ingest.files import ingest
from lookback.spark.platform.session import get_spark
from lookback.spark.tables.lakehouse import Tables

folder = Path(sys.argv[1])
spark = get_spark(cores=1)
stream = load_streams("conf")["payments"]
rows = "'{}' as event_id, timestamp_seconds(1767225600) as event_time, 'A1' as payer_id, '{}' as amount"
for name, amount in (("a", "12.50"), ("b", "much")):
    spark.sql("SELECT " + rows.format(name, amount)).coalesce(1).write.mode("append").orc(str(folder / "in"))
(folder / "in" / "torn.orc").write_bytes(b"ORC" + bytes(40))
tables = Tables.local(spark, folder / "root")
tables.create(stream)
report = ingest(tables, stream, str(folder / "in"))
print(report.offered, report.ingested, report.rejected)
print(sorted(row.reason for row in tables.read("rejected_events").collect()))
"""


def changes(heading: str) -> list[str]:
    """The diffs below a heading."""
    (section,) = re.findall(rf"^## {heading}$(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return re.findall(r"^```diff\n(.*?)^```", section, re.MULTILINE | re.DOTALL)


def apply(diff: str, tree: Path) -> None:
    """Applies a diff whose hunks have no numbers: what a hunk takes out or leaves stands once in the file."""
    for name, text in re.findall(r"^--- a/(\S+)\n\+\+\+ b/\1\n(.*?)(?=^--- a/|\Z)", diff, re.MULTILINE | re.DOTALL):
        file = tree / name
        content = file.read_text(encoding="utf-8")
        for hunk in re.split(r"^@@\n", text, flags=re.MULTILINE)[1:]:
            lines = [(line[:1], line[1:]) for line in hunk.splitlines()]
            before = "".join(f"{line}\n" for sign, line in lines if sign != "+")
            after = "".join(f"{line}\n" for sign, line in lines if sign != "-")
            assert content.count(f"\n{before}") == 1, f"{name} has {content.count(before)} times:\n{before}"
            content = content.replace(f"\n{before}", f"\n{after}")
        file.write_text(content, encoding="utf-8")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what changes touch and tests read."""
    for name in ("src", "tests", "docs", "conf", "dev", "notebooks"):
        ignored = shutil.ignore_patterns("__pycache__", ".data")
        shutil.copytree(ROOT / name, tmp_path / "tree" / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "Makefile"):
        shutil.copy(ROOT / name, tmp_path / "tree" / name)
    return tmp_path / "tree"


def run(tree: Path, *arguments: str) -> str:
    """Runs Python in the copy, with the copy's own package, and returns what it prints."""
    path = os.pathsep.join([str(tree / "src"), str(tree), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=tree, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3_000:] + done.stderr[-3_000:]
    return done.stdout


def run_tests(tree: Path, *arguments: str) -> None:
    run(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments)


def test_aggregate_is_one_that_rules_can_use(tree: Path) -> None:
    told = "import lookback.core.aggregation.aggregates as a; print(a.__file__, 'try_sum' in a.AGGREGATES)"
    assert run(tree, "-c", told).split()[1] == "False"
    for diff in changes("Add an aggregate"):
        apply(diff, tree)
    assert run(tree, "-c", told).split() == [str(tree / "src/lookback/core/aggregation/aggregates.py"), "True"]
    run_tests(tree, "tests/docs/test_docs.py", "-k", "aggregate")
    run(tree, "-c", COMPARED + AGGREGATE)


@pytest.mark.long
def test_window_is_one_that_rules_can_have(tree: Path) -> None:
    (diff,) = changes("Add a window")
    apply(diff, tree)
    schema = run(
        tree, "-c", "from lookback.core.rules.schema import format_rule_schema; print(format_rule_schema(), end='')"
    )
    (tree / "conf/rule.schema.json").write_text(schema, encoding="utf-8")
    run_tests(tree, "tests/core/rules/test_rule_schema.py", "-k", "published")
    run(tree, "-c", COMPARED + WINDOW)


@pytest.mark.spark
@pytest.mark.long
def test_source_is_one_that_ingest_reads(tree: Path, tmp_path: Path) -> None:
    (diff,) = changes("Add a source")
    apply(diff, tree)
    counts, reasons = run(tree, "-c", SOURCE, str(tmp_path)).splitlines()[-2:]
    assert counts == "3 1 2"
    assert "amount: 'much' is not decimal(18,2)" in reasons
    assert "the file cannot be read as orc" in reasons


def test_change_that_does_not_fit_is_told(tree: Path) -> None:
    for wrong in ('-FORMATS = ("parquet",)\n+FORMATS = ()\n', "-\n+# twice\n"):
        with pytest.raises(AssertionError, match="times"):
            apply(
                f"--- a/src/lookback/spark/ingest/sources.py\n+++ b/src/lookback/spark/ingest/sources.py\n@@\n{wrong}",
                tree,
            )


# The rest of the page ------------------------------------------------------------------------------------------------


def recipe(target: str) -> list[str]:
    (lines,) = re.findall(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    return [line.lstrip("\t@").replace("$(BIN)", ".venv/bin") for line in lines.splitlines()]


def test_page_has_the_one_list_of_commands() -> None:
    listed = re.findall(r"^\| `make ([a-z-]+)` \|", PAGE, re.MULTILINE)
    assert sorted(listed) == sorted(set(re.findall(r"^([a-z-]+):.*##", MAKEFILE, re.MULTILINE)) - {"help"})


def test_hooks_are_the_lines_of_check() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    (local,) = config["repos"]
    assert local["repo"] == "local", "nothing is fetched"
    assert all(hook["language"] == "system" and hook["pass_filenames"] is False for hook in local["hooks"])
    assert [hook["entry"] for hook in local["hooks"]] == recipe("check")


@pytest.mark.parametrize("form", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")), ids=lambda form: form.stem)
def test_form_can_be_filled_in(form: Path) -> None:
    document = yaml.safe_load(form.read_text(encoding="utf-8"))
    if form.stem == "config":
        assert set(document) == {"blank_issues_enabled"}
        return
    assert set(document) == {"name", "description", "body"}
    asked = [field for field in document["body"] if field["type"] != "markdown"]
    ids = [field["id"] for field in asked]
    assert len(ids) == len(set(ids)) >= 3
    assert any(field.get("validations", {}).get("required") for field in asked)
    for field in document["body"]:
        assert set(field) <= {"type", "id", "attributes", "validations"}
        assert field["type"] in ("markdown", "textarea", "input", "dropdown")
        needed = {"markdown": "value", "dropdown": "options"}.get(field["type"], "label")
        assert field["attributes"][needed]
    named = re.findall(r"(?:[A-Za-z-]+/)*[A-Za-z-]+\.md\b", form.read_text(encoding="utf-8"))
    assert [name for name in named if not (ROOT / name).is_file()] == []
