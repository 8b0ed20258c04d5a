"""Runs an import: reads rules, writes those that can be taken over, and says what became of each."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lookback.config import MAX_FILE_BYTES
from lookback.core.streams.declaration import Stream
from lookback.importing.conditions import Listed, list_tests
from lookback.importing.detections import Detection, Origin, Unread, list_members
from lookback.importing.examples import write_tests
from lookback.importing.mapping import NameMap
from lookback.importing.reasons import Refusal
from lookback.importing.report import APPROXIMATED, EXACT, PART, REFUSED, Line, Report, describe_fidelity
from lookback.importing.rulefiles import RuleFolder, name_slug, write_yaml
from lookback.importing.writer import Writer, find_losses

# Characters of an id that tell rules of the same title apart.
_ID_CHARACTERS = 8


@dataclass(frozen=True)
class Target:
    """Where rules are written to.

    Attributes:
        rules: The folder of the rules.
        lists: That of the files of lists; None writes none.
        skeletons: That of rules whose condition must be written by hand; None writes none.
    """

    stream: Stream
    rules: Path
    lists: Path | None = None
    skeletons: Path | None = None


def write_rules(found: Sequence[Detection | Unread], target: Target, names: NameMap) -> Report:
    """Writes the rules that can be taken over, each to a file of its own. Nothing is published."""
    writer, folder = Writer(target.stream, names), RuleFolder(target.rules)
    lines = [_write_one(each, writer, folder) for each in found]
    if target.lists is not None:
        made = {line.origin for line in lines if line.rule_id}
        _write_lists([each for each in found if isinstance(each, Detection) and each.origin in made], target.lists)
    if target.skeletons is not None:
        _write_skeletons([line for line in lines if "python" in [each.code for each in line.reasons]], writer, target)
    return Report(lines, target.stream.name, names.logsources is None)


def _write_one(found: Detection | Unread, writer: Writer, folder: RuleFolder) -> Line:
    origin = found.origin
    if isinstance(found, Unread):
        kind = PART if found.part_of else REFUSED
        return Line(origin, kind, reasons=found.reasons, part_of=found.part_of)
    try:
        losses = tuple(find_losses(found, writer.fields))
        kind = APPROXIMATED if losses else EXACT
        # A document that is refused takes no name.
        document = writer.make_document(found, "unnamed", describe_fidelity(kind, losses))
        rule_id = folder.choose_name(_list_names(origin), {"format": origin.format, "id": origin.identity})
        document["rule_id"] = rule_id
        if tests := write_tests(document, found, writer.fields, writer.stream):
            document["tests"] = tests
        text = write_yaml(document)
        if len(text.encode()) > MAX_FILE_BYTES:
            raise Refusal("check", f"its file would be larger than {MAX_FILE_BYTES:,} bytes")
        folder.write(rule_id, text)
    except Refusal as refusal:
        return Line(origin, REFUSED, reasons=(refusal.reason,))
    return Line(origin, kind, rule_id, losses)


def _list_names(origin: Origin) -> list[str]:
    """Lists names for a rule, the best first."""
    stem = name_slug(Path(origin.file).stem)
    slug = name_slug(origin.title) or stem or "rule"
    other = name_slug(origin.id)[:_ID_CHARACTERS] or stem
    return [slug, f"{slug}-{other}", f"{slug}-{other}-{origin.place}"]


def _write_lists(detections: Sequence[Detection], folder: Path) -> None:
    """Writes an empty file for each list that rules ask, unless there is one."""
    tests = (test for each in detections for member in list_members(each.shape) for test in list_tests(member))
    for name in sorted({test.list for test in tests if isinstance(test, Listed)}):
        path = folder / f"{name}.csv"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with path.open("w", encoding="utf-8", newline="") as file:
                csv.writer(file).writerow(["value"])


def _write_skeletons(lines: Sequence[Line], writer: Writer, target: Target) -> None:
    """Writes rules that have everything but a condition, which `rules check` asks for."""
    assert target.skeletons is not None
    folder = RuleFolder(target.skeletons)
    for line in lines:
        source = {"format": line.origin.format, "id": line.origin.identity}
        try:
            rule_id = folder.choose_name(_list_names(line.origin), source)
        except Refusal:
            continue
        folder.write(rule_id, write_yaml({**writer.describe(line.origin, rule_id, line.fidelity), "where": ""}))
