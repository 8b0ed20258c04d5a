"""Reads Panther's detections: correlation rules, and simple detections in YAML. Those in Python become skeletons."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lookback.core.errors import SetupError
from lookback.importing.detections import Detection, Example, Origin, Shape, Single, Unread
from lookback.importing.documents import read_documents
from lookback.importing.panthercorrelations import read_correlation
from lookback.importing.pantherdetections import find_value, read_match
from lookback.importing.panthertests import read_tests
from lookback.importing.reasons import Reason, Refusal
from lookback.importing.rulefiles import RuleFile

FORMAT = "panther"
# Not detections: code and data that detections share, and lists of what to install.
_OTHERS = ("global", "datamodel", "lookup_table", "pack")
_QUERIES = ("scheduled_query", "saved_query", "scheduled_rule")
# Long ago, so that no clock calls the events of a test early.
_TEST_TIME = 1_767_225_600_000_000


def read_rules(files: Iterable[RuleFile], *, is_scheduled: bool = False) -> list[Detection | Unread]:
    """Reads the detections of files, in order. A rule or a file that is wrong costs only itself.

    is_scheduled: Whether correlations are judged at intervals, as in Panther, and not at each signal.
    """
    found: list[Detection | Unread] = []
    for file in files:
        try:
            documents = read_documents(file.path)
        except SetupError as error:
            found.append(Unread(Origin(FORMAT, str(file.path), 1, file.below), (Reason("yaml", str(error)),)))
            continue
        for at, document in enumerate(documents):
            if isinstance(document, dict) and document.get("AnalysisType", _OTHERS[0]) not in _OTHERS:
                found.append(_read_one(document, file, at + 1, is_scheduled))
    return found


def _read_one(document: dict[str, Any], file: RuleFile, place: int, is_scheduled: bool) -> Detection | Unread:
    origin = _describe_origin(document, file, place)
    try:
        return _read_detection(document, origin, is_scheduled)
    except Refusal as refusal:
        return Unread(origin, (refusal.reason,))


def _read_detection(document: dict[str, Any], origin: Origin, is_scheduled: bool) -> Detection:
    kind = document["AnalysisType"]
    if kind == "correlation_rule":
        correlation = read_correlation(document.get("Detection"), is_scheduled=is_scheduled)
        examples = read_tests(document.get("Tests"), correlation)
        return Detection(origin, correlation.shape, correlation.losses, examples)
    if kind in _QUERIES:
        raise Refusal("scheduled-query", f"a {kind} of Panther asks its tables in SQL")
    if kind != "rule":
        raise Refusal("unsupported", f"AnalysisType {kind!r:.60} does not look at events")
    if "Detection" not in document:
        raise Refusal("python", f"its condition is rule() of {document.get('Filename')!r:.100}")
    # Filters of Python and simple detections are combined by `and`, as are the entries of one.
    condition = read_match([document["Detection"], document.get("InlineFilters") or []])
    shape = Single(condition)
    return Detection(origin, shape, examples=_read_logs(document.get("Tests"), shape))


def _read_logs(tests: Any, shape: Shape) -> tuple[Example, ...]:
    """Reads the tests of a simple detection: each is one event."""
    found = []
    for test in tests if isinstance(tests, list) else []:
        if isinstance(test, dict) and isinstance(test.get("Log"), Mapping) and not test.get("Mocks"):
            fields = find_value(test["Log"], shape)
            found.append(Example(str(test.get("Name", "")), ((_TEST_TIME, fields),), bool(test.get("ExpectedResult"))))
    return tuple(found)


def _describe_origin(document: Mapping[str, Any], file: RuleFile, place: int) -> Origin:
    id_ = _read_text(document, "RuleID", "PolicyID", "QueryName")
    references = document.get("Reference")
    return Origin(
        FORMAT,
        str(file.path),
        place,
        file.below,
        title=_read_text(document, "DisplayName") or id_,
        id=id_,
        description=_read_text(document, "Description"),
        severity=_read_severity(document.get("Severity")),
        tags=_read_tags(document),
        references=tuple(map(str, references if isinstance(references, list) else [references or ""])),
        runbook=_read_text(document, "Runbook"),
    )


def _read_text(document: Mapping[str, Any], *names: str) -> str:
    return next((str(document[name]) for name in names if document.get(name)), "")


def _read_severity(severity: Any) -> str:
    lowered = str(severity).lower()
    return lowered if lowered in ("info", "low", "medium", "high", "critical") else "medium"


def _read_tags(document: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the tags, and the entries of MITRE ATT&CK as Sigma writes them, such as attack.t1098."""
    tags, reports = document.get("Tags"), document.get("Reports")
    named = reports.get("MITRE ATT&CK") if isinstance(reports, dict) else None
    codes = [code for entry in named or [] for code in str(entry).split(":")] if isinstance(named, list) else []
    own = ["-".join(str(tag).split()) for tag in tags] if isinstance(tags, list) else []
    return (*own, *(f"attack.{code.strip().lower()}" for code in codes))
