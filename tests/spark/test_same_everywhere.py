"""A walk through the commands says the same, word for word, of tables in a bucket as of tables in a folder."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from lookback.cli import main
from objectstore import SMALL, S3Server

pytestmark = [pytest.mark.spark, pytest.mark.objectstore]
STREAM = {
    "stream": "pay", "event_id": "id", "event_time": "at", "max_out_of_orderness": "10 seconds",
    "fields": {"id": "int", "at": "timestamp", "card": "string", "amount": "decimal(18,2)"},
}  # fmt: skip
MUCH = {
    "rule_id": "much", "stream": "pay", "group_by": ["card"], "window": "1 hour", "measures": {"total": "sum(amount)"},
    "parameters": {"limit": 10}, "when": "total > :limit and not in_list(card, 'good')", "message": "{total}",
    "tags": ["attack.t1110"],
}  # fmt: skip
EVER = {**MUCH, "rule_id": "ever", "window": "30 days", "parameters": {"limit": 60}}
# ALERT is the id of an alert, ROOT the place, CONF the folder of the settings.
WALK = """
init
lists add good c3 --reason friend --author ann
lists add nets 10.0.0.0/8 --kind cidr --author ann
lists show
lists show good
rules check CONF/much.yml
rules push CONF/much.yml --author ann --comment first
ingest pay CONF/0.csv
rejected pay
evaluate pay --once
ingest pay CONF/1.csv
rules push CONF/ever.yml --author ann --status shadow
rules set much limit=12 --author ann
evaluate pay --once
rules list
rules show much
rules diff much 1 2
rules compare ever
rules coverage
rules export
status
alerts
alerts --queue
alerts --tag attack.t1110
explain ALERT
explain --rule much --event 7
review ALERT --disposition confirmed --reviewer bob --note seen
alerts --queue
snooze much --key card=c1 --until 2999-01-01 --author bob --reason known
snoozes
alerts --queue
snooze much --key card=c1 --end --author bob
labels import pay CONF/labels.csv --positive fraud --author ann
rules overlap
backtest much
backtest much --vary limit=5,50
features much --out ROOT/features
prove pay
prove pay --nightly
rules pause ever --author ann
rules activate ever --author ann
maintain
forget pay --where "card = 'c1'" --dry-run
forget pay --where "card = 'c1'" --yes
evaluate pay --once
evaluate pay --once --rebuild
forget pay --where "card = 'c1'" --yes
alerts
advance pay 2026-02-02T00:00:00Z
evaluate pay --once
status
rules retire ever --author ann
explain nobody
rules show nobody
review nobody --disposition benign
backtest nobody
prove nowhere
ingest nowhere CONF/0.csv
forget pay --where "nothing = 1" --yes
"""
# What differs from one run to the next on one storage too.
VARYING = (
    (r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", "UUID"),
    # The events are of January 2026.
    (r"\b20(?!26-01)\d\d-\d\d-\d\d([T ]\d\d:\d\d(:\d\d(\.\d+)?)?Z?)?", "NOW"),
    (r"\b\d+(\.\d+)? (ms|s|seconds|minutes)\b", "DURATION"),
    (r"\b\d+(\.\d+)? (B|bytes|kB|KB|KiB|MB|MiB)\b", "SIZE"),
    (r"\d+ of \d+ parts of the events read and judged\s*", ""),
    # As many files as the evaluation had time for.
    (r"\bmetrics +\d+ +\d+ +\d+ +\d+ +\d+", "METRICS"),
    (r"\s+", " "),
)


@pytest.fixture
def conf(server: S3Server, tmp_path: Path) -> Path:
    folder = tmp_path / "conf"
    (folder / "streams").mkdir(parents=True)
    (folder / "streams/pay.yml").write_text(yaml.safe_dump(STREAM))
    for rule in (MUCH, EVER):
        (folder / f"{rule['rule_id']}.yml").write_text(yaml.safe_dump(rule))
    (folder / "settings.yml").write_text(yaml.safe_dump({"spark": {**server.settings, **SMALL}}))
    for part in range(2):
        lines = [f"{n},2026-01-31T1{part}:{n % 60:02}:00Z,c{n % 4},3.00" for n in range(part * 60, part * 60 + 60)]
        (folder / f"{part}.csv").write_text("\n".join(["id,at,card,amount", *lines, "x,2026-01-31,c1,much", ""]))
    labels = (f"{n},{n % 5 == 0},2026-02-01T00:00:00Z" for n in range(120))
    (folder / "labels.csv").write_text("\n".join(["id,fraud,labelled_at", *labels, ""]))
    return folder


Say = Callable[[str], list[str]]


@pytest.fixture
def walk(conf: Path, capsys: pytest.CaptureFixture[str]) -> Say:
    def run(root: str, *words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        ended = main(["--root", root, "--conf", str(conf), *words])
        return (ended, *capsys.readouterr())

    def follow(root: str) -> list[str]:
        """Returns what each command says, with the code with which it ends."""
        said, alert = [], ""
        for line in WALK.strip().splitlines():
            if "ALERT" in line and not alert:
                alert = min(json.loads(row)["alert_id"] for row in run(root, "alerts", "--json")[1].splitlines())
            words = [
                word.strip('"').replace("CONF", str(conf)).replace("ROOT", root).replace("ALERT", alert)
                for word in re.findall(r'"[^"]*"|\S+', line)
            ]
            code, output, errors = run(root, *words)
            assert "Traceback" not in errors, f"{line}: {errors}"
            # Where a command ends well, the standard error has its progress.
            text = f"{output}{errors if code else ''}".replace(root, "ROOT")
            for pattern, name in VARYING:
                text = re.sub(pattern, name, text)
            said.append(f"{line}: {code} {text}")
        return said

    return follow


def test_c13_1_commands_say_the_same_of_a_bucket_and_of_a_folder(walk: Say, tmp_path: Path) -> None:
    there, here = walk("s3a://bucket/walk"), walk(str(tmp_path / "walk"))
    differing = [(one, other) for one, other in zip(there, here, strict=True) if one != other]
    assert not differing, "\n\n".join(f"bucket: {one}\nfolder: {other}" for one, other in differing)
    ends = {line.partition(": ")[0]: line.partition(": ")[2][0] for line in there}
    # What is refused is refused; all else ends well.
    assert [line for line, code in ends.items() if code != "0"] == WALK.strip().splitlines()[-7:]
