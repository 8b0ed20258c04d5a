"""Files of rules: what is read, what is written and never overwritten, and what one wrong file costs: itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from imported import FIELDS, HEAD, import_files, import_rules, make_rule
from lookback.cli import main
from lookback.core.errors import SetupError
from lookback.importing.mapping import NameMap, SourceEntry, load_map
from lookback.importing.rulefiles import is_unchanged, name_slug

ONE, TWO = "0e95725d-7320-415d-80f7-004da920fc27", "1b1b1b1b-7320-415d-80f7-004da920fc27"
STREAM = {"stream": "logs", "event_id": "event_id", "event_time": "event_time", "fields": FIELDS}
RULE = make_rule({"Image": "x"}, id=ONE)


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    """A folder with a stream and a Sigma rule."""
    (tmp_path / "conf/streams").mkdir(parents=True)
    (tmp_path / "conf/streams/logs.yml").write_text(yaml.safe_dump(STREAM))
    (tmp_path / "sigma").mkdir()
    (tmp_path / "sigma/a.yml").write_text(yaml.safe_dump(RULE))
    return tmp_path


def run(conf: Path, *words: str) -> int:
    return main(["--conf", str(conf / "conf"), "import", "sigma", *words])


# What is written -------------------------------------------------------------------------------------------------------


def test_a_rule_keeps_what_people_need(tmp_path: Path) -> None:
    rule = make_rule(
        {"Image": "x", "User": "y"},
        title="Suspicious: {Things} (100%)",
        id=ONE,
        author="Ann, Bob",
        license="MIT",
        level="informational",
        description="What it\nfinds",
        tags=["attack.t1059", "attack.execution", "car.2013-04-002"],
        references=["https://example.org/a", "a book", "https://example.org/a"],
        fields=["CommandLine", "Nowhere"],
    )
    names = NameMap(license="DRL-1.1", url="https://example.org/{path}")
    (document,) = import_rules(tmp_path, rule, names=names).documents.values()
    assert document == {
        "rule_id": "suspicious-things-100",
        "description": "What it finds",
        "tags": ["attack.t1059", "attack.execution", "car.2013-04-002"],
        "references": ["https://example.org/a"],
        "source": {
            "format": "sigma",
            "id": ONE,
            "author": "Ann, Bob",
            "license": "MIT",
            "url": "https://example.org/rules.yml",
            "fidelity": "exact",
        },
        "stream": "logs",
        "severity": "info",
        "where": "lower(Image) = 'x' and lower(User) = 'y'",
        "message": "Suspicious- (Things) (100%): CommandLine {CommandLine}, Image {Image}, User {User}",
    }


def test_a_rule_without_a_licence_has_that_of_the_map(tmp_path: Path) -> None:
    (document,) = import_rules(tmp_path, RULE, names=NameMap(license="DRL-1.1")).documents.values()
    assert document["source"]["license"] == "DRL-1.1"


def test_rules_of_one_title_have_names_of_their_own_however_often_they_are_imported(tmp_path: Path) -> None:
    for rules in ((RULE, {**RULE, "id": TWO}), ({**RULE, "id": TWO}, RULE)):
        made = import_rules(tmp_path, *rules)
        ids = {name: document["source"]["id"] for name, document in made.documents.items()}
        assert ids == {"a-rule": ONE, "a-rule-1b1b1b1b": TWO}
    assert import_rules(tmp_path, RULE, RULE).fidelities[1].startswith("refused: duplicate: ")


def test_a_title_without_latin_letters_gives_way_to_the_name_of_the_file(tmp_path: Path) -> None:
    made = import_rules(tmp_path, {**RULE, "title": "規則"})
    assert list(made.documents) == ["rules"]
    assert name_slug("Ünïcode & more…") == "unicode-more"


def test_a_file_that_somebody_changed_is_left_alone(tmp_path: Path) -> None:
    import_rules(tmp_path, RULE)
    file = tmp_path / "rules/a-rule.yml"
    written = file.read_text()
    assert is_unchanged(written)
    import_rules(tmp_path, {**RULE, "level": "low"})
    assert "severity: low" in file.read_text()
    for text in (written.replace("medium", "high"), written.partition("\n")[2], "", "x: ["):
        file.write_text(text)
        made = import_rules(tmp_path, {**RULE, "level": "low"})
        assert (file.read_text(), list(made.documents)) == (text, ["a-rule-0e95725d"])
    for name in ("a-rule-0e95725d", "a-rule-0e95725d-1"):
        (tmp_path / f"rules/{name}.yml").write_text("mine")
    refused = import_rules(tmp_path, RULE)
    assert refused.fidelities[0].startswith("refused: exists: a-rule.yml is the file of another rule")


def test_lists_that_are_there_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists/admins.csv").write_text("value\nann\n")
    import_rules(tmp_path, make_rule({"User|expand": "%admins%"}))
    assert (tmp_path / "lists/admins.csv").read_text() == "value\nann\n"


# What is wrong ---------------------------------------------------------------------------------------------------------

WRONG = {
    "no YAML": ("title: [", "yaml: "),
    "a tag": ("title: !!python/object/apply:os.system ['touch ran']", "yaml: "),
    "not text": ("\0", "yaml: "),
    "aliases": ("a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "\n".join(
        f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]" for a, b in zip("abcdef", "bcdefg", strict=True)), "yaml: "),
    "an alias in itself": ("a: &a [*a]", "yaml: "),
    "deep nesting": ("title: " + "[" * 200_000, "yaml: "),
    "a key twice": ("detection: {s: {Image: x}, condition: s}\ntitle: a\ntitle: b", "yaml: "),
    "a list": ("- a", "sigma: it has neither"),
    "a text": ("hello", "sigma: it has neither"),
    "another mapping": ("a: b", "sigma: it has neither"),
    "no detection": (yaml.safe_dump({**HEAD, "detection": None}), "sigma: "),
    "no condition": (yaml.safe_dump({**HEAD, "detection": {"s": {"a": "b"}}}), "sigma: "),
    "an unknown selection": (yaml.safe_dump(make_rule({"s": {"Image": "x"}}, "s and t")), "sigma: "),
    "an old aggregation": (yaml.safe_dump(make_rule({"s": {"Image": "x"}}, "s | count() > 3")), "aggregation: "),
    "a wrong level": (yaml.safe_dump({**RULE, "level": "odd"}), "sigma: "),
    "a wrong correlation": (yaml.safe_dump({"title": "x", "correlation": {"type": "odd"}}), "sigma: "),
    "a correlation that is a text": (yaml.safe_dump({"title": "x", "correlation": "odd"}), "sigma: "),
    "an unknown action": (yaml.safe_dump({**RULE, "action": "odd"}), "sigma: "),
    "a detection of odd values": (yaml.safe_dump(make_rule({"Image": {"a": "b"}})), "sigma: "),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_costs_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    text, said = WRONG[name]
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "sigma"
    folder.mkdir()
    (folder / "a.yml").write_text(text)
    (folder / "b.yml").write_text(yaml.safe_dump(RULE))
    made = import_files(tmp_path, folder)
    kinds = {Path(line.origin.file).name: line.fidelity for line in made.report.lines}
    assert kinds["b.yml"] == "exact"
    assert kinds["a.yml"].startswith(f"refused: {said}")
    assert len(kinds["a.yml"]) < 700
    assert not (tmp_path / "ran").exists()


def test_a_file_may_hold_several_rules_of_which_one_is_wrong(tmp_path: Path) -> None:
    made = import_rules(tmp_path, {**RULE, "level": "odd"}, {**RULE, "title": "Good"}, {**HEAD, "title": "none"})
    assert sorted(made.documents) == ["good"]
    assert [str(line).partition(": ")[0].rpartition("/")[2] for line in made.report.lines] == [
        "rules.yml#3",
        "rules.yml",
        "rules.yml#2 -> good",
    ]


def test_documents_with_actions_build_on_each_other(tmp_path: Path) -> None:
    first = {"action": "global", **HEAD, "level": "high"}
    second = {"name": "One", "detection": {"s": {"Image": "x"}, "condition": "s"}}
    third = {"name": "Two", "detection": {"s": {"Image": "y"}, "condition": "s"}}
    made = import_rules(tmp_path, first, second, third)
    found = {name: (document["severity"], document["source"]["id"]) for name, document in made.documents.items()}
    assert found == {"a-rule": ("high", "rules.yml"), "a-rule-rules": ("high", "rules.yml#2")}


def test_filters_apply_to_rules_of_their_source(tmp_path: Path) -> None:
    sigma_filter = {
        "title": "Known",
        "logsource": HEAD["logsource"],
        "filter": {"rules": [ONE], "known": {"User": "bot"}, "condition": "not known"},
    }
    made = import_rules(tmp_path, RULE, {**RULE, "id": TWO, "title": "Other"}, sigma_filter)
    wheres = {name: document["where"] for name, document in made.documents.items()}
    assert wheres == {
        "a-rule": "lower(Image) = 'x' and not coalesce(lower(User) = 'bot', false)",
        "other": "lower(Image) = 'x'",
    }


HOSTILE = [
    "x'; DROP TABLE rules; --",
    "`x`",
    "${env:HOME}",
    "a\u202eb",
    "../../x",
    "x" * 250,
    "\x1b[2J",
    "{Image}",
    "a:limit",
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_texts_are_texts(tmp_path: Path, text: str) -> None:
    rule = make_rule({"Image": text}, title=text, author=text, description=text, tags=["attack.x"], fields=[text])
    made = import_rules(tmp_path, rule)
    assert made.fidelities == ["exact"]
    inside = {each.relative_to(tmp_path).parts[0] for each in tmp_path.rglob("*")}
    assert inside == {"sigma", "rules"}
    unknown = import_rules(tmp_path, make_rule({text: "x"}))
    assert unknown.fidelities[0].startswith(("refused: unmapped-field", "refused: sigma"))
    assert all(each.isprintable() for each in map(str, [*made.report.lines, *unknown.report.lines]))


# The map ---------------------------------------------------------------------------------------------------------------


def test_the_map_names_fields_and_sources(tmp_path: Path) -> None:
    sources = (
        SourceEntry({"product": "windows", "category": "process_creation"}, "EventID = 1 or EventID = 4688"),
        SourceEntry({"product": "linux"}, "true"),
    )
    names = NameMap({"Binary": "Image"}, logsources=sources)
    rule = make_rule({"Binary": ["x", None]})
    linux = {**rule, "title": "Linux", "logsource": {"product": "linux", "category": "x"}}
    other = {**rule, "title": "Other", "logsource": {"product": "windows"}}
    made = import_rules(tmp_path, rule, linux, other, names=names)
    wheres = [document["where"] for document in made.documents.values()]
    condition = "lower(Image) = 'x' or Image is null"
    assert wheres == [f"(EventID = 1 or EventID = 4688) and ({condition})", condition]
    assert made.fidelities[2].startswith("refused: logsource: the map has no entry for windows; add an entry")


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"field": {}}, "unknown key 'field'; did you mean 'fields'"), ({"fields": []}, "fields must be a mapping"),
        ({"fields": {"a": 1}}, "fields.a must be a text"), ({"keywords": "x"}, "keywords must be a list"),
        ({"logsources": {}}, "logsources must be a list"), ({"logsources": ["x"]}, r"logsources\[0\] must be a mapping"),
        ({"logsources": [{"product": "x"}]}, "where is missing"), ({"logsources": [{"odd": "x"}]}, "unknown key 'odd'"),
        ({"license": 1}, "license must be a text"), ([], "must have one mapping"),
    ],
)  # fmt: skip
def test_a_wrong_map_is_refused_with_its_place(tmp_path: Path, document: Any, said: str) -> None:
    (tmp_path / "map.yml").write_text(yaml.safe_dump(document))
    with pytest.raises(SetupError, match=said):
        load_map(tmp_path / "map.yml")


# The command -----------------------------------------------------------------------------------------------------------


def test_the_command_writes_rules_that_check_takes(conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(conf, str(conf / "sigma"), "--stream", "logs") == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "1 rule in 1 file, for stream logs"
    assert said[1].startswith(
        "each rule judges every event of the stream, whatever its source: windows/process_creation 1;"
    )
    assert said[2:] == [f"{conf}/sigma/a.yml -> a-rule: exact", "exact 1 (100.0%), approximated 0, refused 0"]
    file = conf / "conf/rules/a-rule.yml"
    assert main(["--conf", str(conf / "conf"), "rules", "check", str(file)]) == 0


def test_the_exit_code_says_what_is_not_exact(conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(conf / "sigma"), "--stream", "logs"]
    (conf / "sigma/b.yml").write_text(yaml.safe_dump(make_rule({"User|expand": "%x%"}, title="B")))
    assert (run(conf, *words), run(conf, *words, "--strict")) == (0, 1)
    (conf / "sigma/c.yml").write_text(yaml.safe_dump(make_rule({"Nothing": "x"}, title="C")))
    assert run(conf, *words) == 1
    said = capsys.readouterr().out.splitlines()[-4:]
    assert said[1:] == [
        "exact 1 (33.3%), approximated 1, refused 1",
        "  approximated, list: 1",
        "  refused, unmapped-field: 1",
    ]


def test_the_report_is_written_or_printed_as_json(conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(conf / "sigma/a.yml"), "--stream", "logs", "--out", str(conf / "out")]
    assert run(conf, *words, "--report", str(conf / "report.txt")) == 0
    assert "a-rule" not in capsys.readouterr().out
    assert f"{conf}/sigma/a.yml -> a-rule: exact\n" in (conf / "report.txt").read_text()
    assert run(conf, *words, "--report", str(conf / "report.txt")) == 0
    (conf / "report.txt").write_text("mine")
    assert run(conf, *words, "--report", str(conf / "report.txt")) == 2
    assert (conf / "report.txt").read_text() == "mine"
    assert "is not a report of an import" in capsys.readouterr().err
    assert run(conf, *words, "--json") == 0
    (row,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert row == {
        "file": f"{conf}/sigma/a.yml", "place": 1, "id": ONE, "title": "A rule", "rule_id": "a-rule", "result": "exact",
        "logsource": "windows/process_creation", "reasons": [], "fidelity": "exact",
    }  # fmt: skip
    assert (conf / "out/a-rule.yml").exists()


def test_a_stream_is_drafted_with_all_fields(conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rule = make_rule({"c-uri": "x", "a.b": "y", "When|hour": 3, "position": 7, "EVENT_TIME": "z"}, title="B")
    (conf / "sigma/b.yml").write_text(yaml.safe_dump(rule))
    draft = conf / "conf/streams/web.yml"
    words = [str(conf / "sigma"), "--stream", "web", "--draft-stream", str(draft)]
    assert run(conf, *words) == 0
    declared = yaml.safe_load(draft.read_text())
    assert declared["fields"] == {
        "event_id": "string", "event_time": "timestamp", "a_b": "string", "c_uri": "string", "Image": "string",
        "position_": "string", "When": "timestamp",
    }  # fmt: skip
    assert declared["columns"] == {"a_b": "`a`.`b`", "c_uri": "`c-uri`", "position_": "`position`"}
    assert main(["--conf", str(conf / "conf"), "rules", "check", str(conf / "conf/rules/b.yml")]) == 0
    capsys.readouterr()
    assert run(conf, *words) == 2
    assert "already exists" in capsys.readouterr().err


def test_a_pipeline_of_pysigma_names_the_fields(conf: Path) -> None:
    transformations = [{"id": "names", "type": "field_name_mapping", "mapping": {"Binary": "Image"}}]
    (conf / "pipeline.yml").write_text(yaml.safe_dump({"name": "p", "priority": 1, "transformations": transformations}))
    (conf / "sigma/a.yml").write_text(yaml.safe_dump(make_rule({"Binary": "x"})))
    assert run(conf, str(conf / "sigma"), "--stream", "logs") == 1
    assert run(conf, str(conf / "sigma"), "--stream", "logs", "--pipeline", str(conf / "pipeline.yml")) == 0


def test_wrong_use_is_explained(conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rules = str(conf / "sigma")
    (conf / "empty").mkdir()
    (conf / "map.yml").write_text("keywords: [Nothing]")
    for words, said in (
        ([str(conf / "none"), "--stream", "logs"], "none does not exist; name files or folders"),
        ([str(conf / "empty"), "--stream", "logs"], "there is no file that ends with .yml or .yaml"),
        ([rules, "--stream", "odd"], "no stream"),
        ([rules, "--stream", "logs", "--pipeline", str(conf / "none")], "--pipeline"),
        ([rules, "--stream", "logs", "--map", str(conf / "none")], "cannot be read"),
        ([rules, "--stream", "logs", "--map", str(conf / "map.yml")], "--map: stream 'logs' has no field 'Nothing'"),
    ):
        assert run(conf, *words) == 2
        assert said in capsys.readouterr().err


def test_without_pysigma_the_command_says_how_to_install_it(conf: Path) -> None:
    script = f"import sys; sys.modules['sigma'] = None\nfrom lookback.cli import main\nsys.exit(main({['import', 'sigma', 'x', '--stream', 'logs']!r}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (
        2,
        "lookback: lookback import sigma needs pySigma 2, which needs Python 3.11 or newer: pip install 'lookback-rules[sigma]'\n",
    )
