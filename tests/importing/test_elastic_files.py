"""Files of Elastic's rules: TOML and NDJSON, what a rule keeps for people, the command, and what one wrong file costs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from elastic_imported import FIELDS, ID, import_files, import_rules, make_rule
from lookback.cli import main
from lookback.core.errors import SetupError
from lookback.importing.mapping import NameMap

needs_toml = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 reads no TOML")
TOML = f"""
[metadata]
maturity = "production"

[rule]
author = ["Ann", "Bob"]
description = "What it\\nfinds"
building_block_type = "default"
from = "now-9m"
index = ["logs-*", "other-*"]
language = "eql"
license = "Apache-2.0"
name = "A {{rule}}"
note = "Ask Ann."
query = '''
process where process.name : "x"
'''
references = ["https://example.org/a"]
risk_score = 21
rule_id = "{ID}"
severity = "high"
type = "eql"

[[rule.threat]]
framework = "MITRE ATT&CK"
[[rule.threat.technique]]
id = "T1110"
[[rule.threat.technique.subtechnique]]
id = "T1110.003"
[rule.threat.tactic]
id = "TA0006"
name = "Credential Access"
"""


@needs_toml
def test_a_rule_keeps_what_people_need(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.toml").write_text(TOML)
    made = import_files(tmp_path, tmp_path / "in", names=NameMap(url="https://example.org/{path}"))
    assert made.document == {
        "rule_id": "a-rule",
        "description": "What it finds",
        "tags": ["attack.credential_access", "attack.t1110", "attack.t1110.003"],
        "references": ["https://example.org/a"],
        "runbook": "Ask Ann.",
        "source": {
            "format": "elastic",
            "id": ID,
            "author": "Ann, Bob",
            "license": "Apache-2.0",
            "url": "https://example.org/a.toml",
            "fidelity": "exact",
        },
        "stream": "logs",
        "severity": "high",
        "score": 21,
        "queue": False,
        "where": "exists(event_category, item -> item = 'process') and lower(process_name) = 'x'",
        "message": "A (rule): event_category {event_category}, process_name {process_name}",
    }
    assert made.report.list_head()[1] == "each rule judges every event of the stream, whatever its source: logs-* 1"


def test_a_long_guide_stays_where_it_is(tmp_path: Path) -> None:
    assert "runbook" not in import_rules(tmp_path, make_rule("any where true", note="x" * 2_001)).document
    assert import_rules(tmp_path, make_rule("any where true", note="x" * 2_000)).document["runbook"] == "x" * 2_000


@needs_toml
def test_a_wrong_file_costs_only_itself(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.toml").write_text(TOML)
    (folder / "b.toml").write_text("x = [")
    (folder / "c.toml").write_text("[hunt]\nname = 'x'\n")
    (folder / "d.ndjson").write_text('{"type": \n')
    (folder / "e.toml").write_bytes(b"\xff")
    (folder / "notes.txt").write_text("x")
    fidelities = import_files(tmp_path, folder).fidelities
    assert fidelities[0] == "exact"
    assert [each.split(": ")[:2] for each in fidelities[1:]] == [["refused", "file"]] * 4


def test_python_3_10_is_told_what_to_do_about_toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.toml").write_text(TOML)
    monkeypatch.setitem(sys.modules, "tomllib", None)
    with pytest.raises(
        SetupError, match=r"need Python 3\.11 or newer; use it, or export the rules from Kibana as NDJSON"
    ):
        import_files(tmp_path, tmp_path / "a.toml")


def test_the_command_drafts_a_stream_and_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threshold = {"field": ["user.name"], "value": 3}
    rules = [
        make_rule('process where process.args : "a" and process.name == "b"'),
        {**make_rule("process.name: a", "kuery", type="threshold", threshold=threshold), "rule_id": f"{ID[:-2]}99"},
    ]
    path, conf = tmp_path / "export.ndjson", tmp_path / "conf"
    path.write_text("\n".join(map(json.dumps, [*rules, {"exported_count": 2}])))
    words = ["--conf", str(conf), "import", "elastic", str(path), "--stream", "logs"]
    assert main([*words, "--draft-stream", str(conf / "streams/logs.yml")]) == 0
    assert "exact 1 (50.0%), approximated 1, refused 0" in capsys.readouterr().out
    fields = yaml.safe_load((conf / "streams/logs.yml").read_text())["fields"]
    assert (fields["process_args"], fields["process_name"]) == ("array<string>", "string")
    assert main([*words, "--as", "schedule", "--strict"]) == 1
    assert "approximated: phase: it counts the last 6m every 5m" in capsys.readouterr().out
    rules_made = sorted(map(str, (conf / "rules").glob("*.yml")))
    assert main(["--conf", str(conf), "rules", "check", *rules_made]) == 0


def test_a_wildcard_in_a_name_stands_for_the_fields_of_the_stream(tmp_path: Path) -> None:
    document = import_rules(tmp_path, make_rule("file.hash.*: a", "kuery")).document
    assert document["where"] == "file_hash_md5 = 'a' or file_hash_sha1 = 'a'"
    assert {"file_hash_md5", "file_hash_sha1"} < set(FIELDS)
