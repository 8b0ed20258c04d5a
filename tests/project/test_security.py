"""Input from outside is data: no file, table, page or argument makes anything run, grow without bound, or leave its place."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import pickle
import re
import struct
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from lookback.cli import main
from lookback.config import Settings, load_rule_document, load_stream, load_streams
from lookback.core.aggregation.runs import Run
from lookback.core.aggregation.sharedruns import SharedRun
from lookback.core.errors import RuleError, SetupError, StateError, StreamError
from lookback.core.rules.document import Rule, read_document
from lookback.core.rules.rulebook import RuleBook
from lookback.core.state.shard import MANIFEST, ShardState
from lookback.core.streams.blocks import unpack_events, unpack_failures, unpack_table
from lookback.core.streams.declaration import Stream
from lookback.core.values.pages import decode_page, encode_page
from lookback.testing.trial import DocumentTrial
from lookback.views import pictures
from lookback.views.terminal import format_cell

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
HOSTILE = [
    "`x`", "x`; DROP TABLE rules", "x'; DROP TABLE rules; --", '"x"', "../rules", "..", "a/b", "x\0", "x\ny", "${env:HOME}",
    "$(id)", "x y", "x;", "x\\", "-rf", "\uff58", "\u202ex", "x" * 5_000, "",
]  # fmt: skip
STREAM = {
    "stream": "tx",
    "event_id": "id",
    "event_time": "at",
    "fields": {"id": "bigint", "at": "timestamp", "k": "string"},
}


# Nothing that is read can run ------------------------------------------------------------------------------------------


@cache
def nodes(file: Path) -> list[ast.AST]:
    """All calls and imports of a file."""
    found = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    return [node for node in found if isinstance(node, ast.Call | ast.Import | ast.ImportFrom)]


@cache
def calls(file: Path) -> list[tuple[str, ast.Call]]:
    """(dotted name, call) of all calls in a file."""
    return [(ast.unparse(node.func), node) for node in nodes(file) if isinstance(node, ast.Call)]


def code_of_notebooks() -> list[str]:
    found = []
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        found += ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return found


def test_nothing_is_read_by_a_way_that_can_run_code() -> None:
    banned = re.compile(
        r"(^|\.)(eval|exec|compile|__import__|system|popen|load_module|read_pickle|to_pickle|unsafe_load|full_load|unsafe_load_all"
        r"|full_load_all|PyExtensionType)$|^(pickle|cloudpickle|dill|marshal|shelve|joblib)\."
    )
    allowed = {"re.compile", "_compiled"}
    found = [
        f"{file.name}: {name}"
        for file in SOURCES
        for name, _ in calls(file)
        if banned.search(name) and name not in allowed
    ]
    assert found == []
    modules = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
    for file in SOURCES:
        for node in nodes(file):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert not {name.partition(".")[0] for name in names} & modules, file


def test_yaml_is_loaded_safely_alone() -> None:
    found = {
        (name, "Loader" in ast.unparse(call))
        for file in SOURCES
        for name, call in calls(file)
        if re.fullmatch(r"yaml\.\w+", name)
    }
    assert found <= {
        ("yaml.safe_load", False),
        ("yaml.compose_all", True),
        # Events, of which nothing is made.
        ("yaml.parse", True),
        ("yaml.safe_dump", False),
        ("yaml.safe_dump_all", False),
    }
    # One file reads YAML, by `_LOADER` and, to explain what is wrong, by its slower twin.
    readers = {file.name for file in SOURCES if "Loader=" in file.read_text()}
    assert readers == {"yamltexts.py"}
    (text,) = (file.read_text() for file in SOURCES if file.name == "yamltexts.py")
    assert set(re.findall(r"Loader=([\w.]+)", text)) == {"loader"}
    assert re.findall(r"_compose\(text, file, single, ([\w.]+)\)", text) == ["_LOADER", "yaml.SafeLoader"]
    assert "_LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader" in text


def test_no_array_is_read_as_pickled_objects_and_no_shell_is_started() -> None:
    for file in SOURCES:
        for name, call in calls(file):
            options = {ast.unparse(keyword) for keyword in call.keywords}
            assert not options & {"allow_pickle=True", "shell=True"}, file
            # numpy's default is allow_pickle=False, but a page is never a file of numpy's at all.
            assert name not in ("np.load", "np.fromfile", "os.system", "subprocess.getoutput"), file
    assert not any(line.lstrip().startswith(("!", "%sh")) for cell in code_of_notebooks() for line in cell.splitlines())


# Each makes SQL of names that it quotes, of what our parser has understood, or of what conf/ says, which is code.
MAKES_SQL = {
    "addresses.py", "catalog.py", "dispatch.py", "duplicates.py", "evidence.py", "fields.py", "filelog.py", "forget.py",
    "frames.py", "history.py", "kafka.py", "lakehouse.py", "maintenance.py", "metrics.py", "reading.py", "redaction.py",
    "rejected.py", "sources.py", "status.py", "trials.py", "warehouse.py",
}  # fmt: skip


def test_sql_is_made_of_text_in_few_places() -> None:
    """A new place must quote what it puts in, be tried with hostile names, and be listed here."""
    made = re.compile(r"(^|\.)(sql|expr|selectExpr|executeJava|createOrReplaceTempView)$")
    taking = re.compile(r"\.(where|filter|having|delete|update|orderBy|groupBy|run)$")
    found = set()
    for file in SOURCES:
        if "core" in file.parts:
            continue
        for name, call in calls(file):
            put_together = any(isinstance(each, ast.JoinedStr) for each in call.args)
            if (made.search(name) and not is_sqlglot(name, call)) or (taking.search(name) and put_together):
                found.add(file.name)
    assert found <= MAKES_SQL


def is_sqlglot(name: str, call: ast.Call) -> bool:
    """`tree.sql("spark")` of a parser's tree is text, and runs nothing."""
    return name.endswith(".sql") and [ast.unparse(each) for each in call.args] in (["'spark'"], ["LookbackSql"])


class Bomb:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


def test_a_pickle_in_place_of_a_page_or_block_is_refused_and_never_run(tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    bomb = pickle.dumps(Bomb(trace))
    pickle.loads(bomb)
    assert trace.exists(), "the bomb works"
    trace.unlink()
    objects = io.BytesIO()
    np.save(objects, np.array([Bomb(trace)], dtype=object), allow_pickle=True)
    header = struct.pack("<4sHH", b"LBpg", 2, 1)
    for raw in (bomb, objects.getvalue()):
        packed = pa.compress(raw, codec="zstd", asbytes=True)
        # 18 and above: what is no integer; each kind is told the bytes are its own.
        pages = [
            raw,
            header + raw,
            *(header + struct.pack("<BQqQQ", kind, 1, 0, len(raw), len(packed)) + packed for kind in range(80)),
        ]
        for page in pages:
            with contextlib.suppress(StateError):
                decode_page(page, "page")
        for read in (lambda page: Run.decode(page, "page"), lambda page: SharedRun.decode(page, "page"), loaded):
            with pytest.raises(StateError):
                read(raw)
        for read in (lambda block: unpack_events(block, Stream.from_dict(STREAM)), unpack_table, unpack_failures):
            with pytest.raises((StateError, ValueError)):
                read(raw)
    assert not trace.exists()


def loaded(page: bytes) -> bool:
    class Pages:
        def get(self, name: str) -> bytes | None:
            return page if name == MANIFEST else None

    stream = Stream.from_dict(STREAM)
    return ShardState(RuleBook(stream, {"tx": stream})).load(Pages())  # type: ignore[arg-type]


def test_an_arrow_block_with_a_python_type_in_it_runs_nothing(tmp_path: Path) -> None:
    # pyarrow before 14.0.1 unpickled the metadata of this extension type while reading.
    trace = tmp_path / "ran"
    meta = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": pickle.dumps(Bomb(trace))}
    schema = pa.schema([pa.field("x", pa.int64(), metadata=meta)])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_table(pa.table({"x": pa.array([1])}, schema=schema))
    unpack_table(sink.getvalue().to_pybytes())
    assert not trace.exists()


def test_what_a_page_holds_comes_back_as_plain_arrays() -> None:
    hostile: Any = np.empty(2, dtype=object)
    hostile[:] = ["__import__('os').system('id')", "!!python/object/apply:os.system ['id']"]
    (found,) = decode_page(encode_page([hostile]), "page")
    assert found is not None
    assert found.tolist() == hostile.tolist()


# Files ------------------------------------------------------------------------------------------------------------------


def laughs(levels: int, kind: str) -> str:
    """A few lines that stand for 9 ** levels values: by lists, by mappings, by merged mappings."""
    lines = ["a0: &a0 {x0: lol}" if kind != "lists" else "a0: &a0 [lol]"]
    for at in range(1, levels + 1):
        each = [f"*a{at - 1}"] * 9
        if kind == "lists":
            lines.append(f"a{at}: &a{at} [{', '.join(each)}]")
        elif kind == "merges":
            lines.append(f"a{at}: &a{at} {{<<: [{', '.join(each)}], x{at}: 1}}")
        else:
            lines.append(f"a{at}: &a{at} {{{', '.join(f'k{n}: {name}' for n, name in enumerate(each))}}}")
    return "\n".join(lines)


DOCUMENTS = {
    **{f"billion laughs by {kind}": (laughs(12, kind), "aliases") for kind in ("lists", "mappings", "merges")},
    "an alias that holds itself": ("stream: &a [*a]", "contains itself|recursive"),
    "a mapping that holds itself": ("stream: &a {x: *a}", "contains itself|recursive"),
    "brackets": ("stream: " + "[" * 2_000 + "]" * 2_000, "nested too deeply"),
    "braces": ("stream: " + "{a: " * 2_000 + "}" * 2_000, "nested too deeply"),
    "indents": ("\n".join(" " * at + "a:" for at in range(500)), "nested too deeply"),
    "ten megabytes": ("# " + "x" * 10_000_000, "larger than"),
    "a Python object": ("stream: !!python/object/apply:os.system ['touch ran']", "not YAML"),
    "a Python name": ("stream: !!python/name:os.system", "not YAML"),
    "another tag": ("stream: !Ref x", "not YAML"),
    "NUL": ("stream: 'a\0b'", "not YAML"),
    "an escape": ("stream: \x1b[2J", "not YAML"),
    "a date that is none": ("stream: 2026-13-45", "not YAML"),
    "a number of many digits": ("stream: " + "9" * 10_000, "not YAML"),
    "a list for a key": ("? [a]\n: b", "not YAML"),
    "no UTF-8": ("stream: \udcff", "cannot be read"),
}


def test_a_path_with_a_nul_is_refused() -> None:
    with pytest.raises(SetupError, match="cannot be read: embedded null byte"):
        load_stream("\0")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_file_that_would_blow_up_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    text, said = DOCUMENTS[name]
    monkeypatch.chdir(tmp_path)
    for folder in ("streams", "profiles"):
        (tmp_path / folder).mkdir()
    # The same bytes wherever a file is read.
    places = [tmp_path / "rule.yml", tmp_path / "streams/s.yml", tmp_path / "settings.yml", tmp_path / "profiles/p.yml"]
    for place in places:
        place.write_bytes(text.encode("utf-8", "surrogateescape"))
    for read in (
        lambda: load_rule_document(places[0]),
        lambda: load_stream(places[1]),
        lambda: load_streams(tmp_path),
        lambda: Settings.local(conf=tmp_path),
    ):
        with pytest.raises(SetupError, match=said) as caught:
            read()
        assert len(str(caught.value)) < 1_000
    places[2].unlink()
    with pytest.raises(SetupError, match=said):
        Settings.local(conf=tmp_path, profile="p")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "text", ["[" * 50_000 + "]" * 50_000, '{"a":' * 20_000 + "1" + "}" * 20_000, '{"a": ' + "9" * 9_000 + "}"]
)
def test_a_document_that_would_blow_up_is_refused_at_once(text: str) -> None:
    with pytest.raises(RuleError, match=r"not JSON|nested|longer"):
        Rule.from_dict(read_document(text))


# Names ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_names_that_reach_sql_or_a_path_are_refused_where_they_are_declared(tmp_path: Path, name: str) -> None:
    for document in (
        STREAM | {"stream": name},
        STREAM | {"event_id": name},
        STREAM | {"event_time": name},
        STREAM | {"fields": {**STREAM["fields"], name: "int"}},
        STREAM | {"fields": {**STREAM["fields"], "n": name}},
        STREAM | {"columns": {name: "k"}},
    ):
        with pytest.raises(StreamError):
            Stream.from_dict(document)
    rule = {"rule_id": name, "stream": "tx", "window": "1 day", "measures": {"n": "count(*)"}, "when": "n > 1"}
    with pytest.raises(RuleError):
        Rule.from_dict(rule)
    with pytest.raises(RuleError):
        Rule.from_dict(rule | {"rule_id": "r", "measures": {name: "count(*)"}})
    (tmp_path / "streams").mkdir()
    (tmp_path / "streams/tx.yml").write_text(json.dumps(STREAM))
    if name:
        with pytest.raises(SetupError, match="no profile"):
            Settings.local(conf=tmp_path, profile=name)
    with pytest.raises(SetupError, match="no stream"):
        Settings.local(conf=tmp_path).stream(name)


@pytest.mark.parametrize("command", ["ingest", "evaluate --once", "forget --yes --where k='1'", "repartition 2"])
def test_commands_refuse_a_stream_that_is_not_declared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    (tmp_path / "streams").mkdir()
    (tmp_path / "streams/tx.yml").write_text(json.dumps(STREAM))
    name, *words = command.split(" ")
    for hostile in ("../tx", "tx'; DROP TABLE rules", "`tx`", "${env:HOME}"):
        assert main(["--root", str(tmp_path / "root"), "--conf", str(tmp_path), name, hostile, *words]) == 2
        assert "no stream" in capsys.readouterr().err
    assert not (tmp_path / "root").exists()


# What is shown ----------------------------------------------------------------------------------------------------------


def test_a_message_cannot_steer_the_terminal() -> None:
    # Clears the screen; sets the window's title; writes over the line; turns the text around.
    shown = format_cell("\x1b[2J\x1b]0;title\x07a\rb\nc\u202ed\x9bü")
    assert shown == r"\x1b[2J\x1b]0;title\x07a\rb\nc\u202ed\x9bü"


def test_a_key_with_dollar_signs_is_no_formula() -> None:
    events = pd.DataFrame({"at": [pd.Timestamp("2026-03-01", tz="UTC")]})
    alerts = pd.DataFrame({"event_id": ["1"], "event_time": events["at"], "key": [{"k": r"$\frac{a_{$ <script>"}]})
    figure = pictures.plot_trial("$x_{$", DocumentTrial(events, alerts, pd.DataFrame(), alerts), "at")
    figure.savefig(io.BytesIO(), format="png")
