"""`make audit` tells a package that is known to be vulnerable from an advisory source that could not be asked."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
audit = runpy.run_path(str(ROOT / "dev/tools/audit.py"))["main"]
FINE = {"name": "numpy", "version": "2.2.6", "vulns": []}
FLAW = {"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["1.1"], "description": "..."}
BAD = {"name": "pyyaml", "version": "1.0", "vulns": [FLAW]}
SKIPPED = {"name": "odd", "skip_reason": "there is no such package"}


def run(tmp_path: Path, answer: list[dict[str, Any]] | None, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Runs the command against an auditor that answers so (None: no network); returns its exit code and output."""
    auditor = tmp_path / "auditor"
    lines = [
        "import json, pathlib, sys",
        f"pathlib.Path({str(tmp_path / 'asked')!r}).write_text(json.dumps(sys.argv[1:]))",
    ]
    if answer is None:
        lines += ["sys.stderr.write('Traceback\\nConnectionError: no route to host\\n')", "sys.exit(1)"]
    else:
        lines += [f"print({json.dumps({'dependencies': answer})!r})", "sys.exit(1)"]
    auditor.write_text(f"#!{sys.executable}\n" + "\n".join(lines))
    auditor.chmod(0o755)
    return audit(["--auditor", str(auditor)]), capsys.readouterr().out


def test_it_says_what_is_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, [FINE], capsys) == (0, "1 packages looked up at osv: 0 known vulnerabilities\n")
    asked = json.loads((tmp_path / "asked").read_text())
    assert asked[:2] == ["-r", str(ROOT / "requirements.lock")]
    code, said = run(tmp_path, [FINE, BAD], capsys)
    assert code == 1
    assert "pyyaml 1.0: PYSEC-1, CVE-1; mended in 1.1\n" in said


def test_it_says_when_nothing_could_be_found_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = run(tmp_path, None, capsys)
    assert code == 3
    assert "cannot be reached, or the auditor failed (ConnectionError: no route to host)" in said
    assert run(tmp_path, [FINE, SKIPPED], capsys)[0] == 3
    assert run(tmp_path, [], capsys)[0] == 3
    assert audit(["--auditor", str(tmp_path / "missing")]) == 3
    assert "SOURCE=pypi" in capsys.readouterr().out
