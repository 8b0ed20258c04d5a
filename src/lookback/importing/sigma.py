"""Reads Sigma rules by pySigma's parser, which is installed apart: it is under the LGPL."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sigma.collection import SigmaCollection
from sigma.correlations import SigmaCorrelationRule
from sigma.exceptions import (
    SigmaAuthorError,
    SigmaDateError,
    SigmaDescriptionError,
    SigmaError,
    SigmaFalsePositivesError,
    SigmaIdentifierError,
    SigmaModifiedError,
    SigmaReferencesError,
    SigmaRegularExpressionError,
    SigmaRelatedError,
    SigmaRuleNotFoundError,
    SigmaScopeError,
    SigmaStatusError,
)
from sigma.filters import SigmaFilter
from sigma.processing.pipeline import ProcessingPipeline
from sigma.rule import SigmaLevel, SigmaRule, SigmaRuleBase

from lookback.core.errors import SetupError
from lookback.importing.conditions import And, Condition, Given, Or
from lookback.importing.detections import Detection, Origin, Single, Unread
from lookback.importing.documents import read_documents
from lookback.importing.mapping import NameMap
from lookback.importing.reasons import Reason, Refusal
from lookback.importing.rulefiles import RuleFile
from lookback.importing.sigmaconditions import ConditionReader
from lookback.importing.sigmacorrelations import read_correlation

FORMAT = "sigma"
_SEVERITIES = {"informational": "info"}
_SOURCE_KEYS = ("product", "category", "service")
# What a rule says about itself decides no alert. Hayabusa's rules often say it in other forms than Sigma's.
_ABOUT_ITSELF = (
    SigmaAuthorError, SigmaDateError, SigmaDescriptionError, SigmaFalsePositivesError, SigmaIdentifierError,
    SigmaModifiedError, SigmaReferencesError, SigmaRelatedError, SigmaScopeError, SigmaStatusError,
)  # fmt: skip
# Stands for the namespace of a tag that has none; pySigma refuses the rule without.
_NO_NAMESPACE = "none."


def load_pipeline(path: str | Path | None) -> ProcessingPipeline | None:
    """Reads one of pySigma's processing pipelines; None without a path. Raises SetupError."""
    if path is None:
        return None
    try:
        return ProcessingPipeline.from_yaml(Path(path).read_text(encoding="utf-8"))
    except Exception as error:
        raise SetupError(f"--pipeline {path}: {error}") from error


def read_rules(
    files: Iterable[RuleFile], names: NameMap, pipeline: ProcessingPipeline | None = None
) -> list[Detection | Unread]:
    """Reads the rules of files, in order. A rule or a file that is wrong costs only itself."""
    return _Reading(names, pipeline).read(files)


# A rule, its file, and its place there.
_Read = tuple[SigmaRule | SigmaCorrelationRule, RuleFile, int]


class _Reading:
    """The rules of one import, which refer to each other across files."""

    def __init__(self, names: NameMap, pipeline: ProcessingPipeline | None) -> None:
        self._names, self._pipeline = names, pipeline
        self._rules: list[_Read] = []
        self._filters: list[SigmaFilter] = []
        self._unread: list[Detection | Unread] = []
        # What each rule was read as, or why it cannot be read.
        self._conditions: dict[int, tuple[Condition, tuple[Reason, ...]] | Reason] = {}

    def read(self, files: Iterable[RuleFile]) -> list[Detection | Unread]:
        """Returns what was read, in order; files that cannot be read come first."""
        for file in files:
            self._parse_file(file)
        rules = [rule for rule, _, _ in self._rules]
        collection = SigmaCollection([*rules], resolve_references=False)
        self._conditions = {id(rule): self._read_condition(rule) for rule in rules if isinstance(rule, SigmaRule)}
        missing = [self._resolve(rule, collection) for rule in rules]
        found = [self._try_to_finish(*each) for each in zip(self._rules, missing, strict=True)]
        return [*self._unread, *found]

    def _try_to_finish(self, read: _Read, missing: Reason | None) -> Detection | Unread:
        try:
            if missing is not None:
                raise Refusal(missing.code, missing.text)
            return self._finish(*read)
        except Refusal as refusal:
            return Unread(_describe_origin(*read), (refusal.reason,))

    def _parse_file(self, file: RuleFile) -> None:
        try:
            documents = read_documents(file.path)
        except SetupError as error:
            self._refuse(file, 1, Reason("yaml", str(error)))
            return
        # Documents with an `action` change those after them.
        if any(isinstance(each, dict) and "action" in each for each in documents):
            self._parse(documents, file, 1)
        else:
            for at, document in enumerate(documents):
                self._parse([document], file, at + 1)

    def _parse(self, documents: list[Any], file: RuleFile, place: int) -> None:
        """Parses documents that belong together."""
        known = ("detection", "correlation", "filter", "action")
        for document in documents:
            if not isinstance(document, dict) or not any(key in document for key in known):
                self._refuse(file, place, Reason("sigma", "it has neither detection, correlation nor filter"))
                return
        try:
            parsed = SigmaCollection.from_dicts(
                [_name_tags(document) for document in documents],
                collect_errors=True,
                collect_filters=True,
                resolve_references=False,
            )
        except Exception as error:  # noqa: BLE001 - hostile documents raise errors of many kinds
            self._refuse(file, place, _explain(error), documents[0])
            return
        of_rules = {id(error) for rule in (*parsed.rules, *parsed.filters) for error in rule.errors}
        for own in parsed.errors:
            if id(own) not in of_rules:
                self._refuse(file, place, _explain(own), documents[0])
        for sigma_filter in parsed.filters:
            if sigma_filter.errors:
                self._refuse(file, place, _explain(sigma_filter.errors[0]), documents[0])
            else:
                self._filters.append(sigma_filter)
        self._rules += [(rule, file, place + at) for at, rule in enumerate(parsed.rules)]

    def _refuse(self, file: RuleFile, place: int, reason: Reason, document: Any = None) -> None:
        document = document if isinstance(document, dict) else {}
        title, id_ = (str(document.get(key) or "") for key in ("title", "id"))
        self._unread.append(Unread(Origin(FORMAT, str(file.path), place, file.below, title=title, id=id_), (reason,)))

    def _read_condition(self, rule: SigmaRule) -> tuple[Condition, tuple[Reason, ...]] | Reason:
        """Reads what a rule looks for, with what stands for its source of events."""
        try:
            _require_readable(rule)
            for sigma_filter in self._filters:
                # It changes the rule, and returns it.
                sigma_filter.apply_on_rule(rule)
            if self._pipeline is not None:
                self._pipeline.apply(rule)
            reader = ConditionReader(self._names.keywords)
            conditions = tuple(reader.read(each.parsed) for each in rule.detection.parsed_condition)
            return self._add_source(rule, Or(conditions)), tuple(dict.fromkeys(reader.losses))
        except Refusal as refusal:
            return refusal.reason
        except Exception as error:  # noqa: BLE001 - of one rule; pySigma raises errors of many kinds
            return _explain(error)

    def _add_source(self, rule: SigmaRule, condition: Condition) -> Condition:
        """Adds the condition that the map gives for the rule's source of events. Raises Refusal if it gives none."""
        if self._names.logsources is None:
            return condition
        entry = self._names.find_source(_list_source(rule))
        if entry is None:
            raise Refusal("logsource", f"the map has no entry for {_name_source(rule)}")
        return condition if entry.where.strip() == "true" else And((Given(entry.where), condition))

    def _resolve(self, rule: SigmaRule | SigmaCorrelationRule, collection: SigmaCollection) -> Reason | None:
        """Finds the rules that a correlation names. Returns why it cannot."""
        if not isinstance(rule, SigmaCorrelationRule):
            return None
        try:
            _require_readable(rule)
            rule.resolve_rule_references(collection)
            if self._pipeline is not None:
                self._pipeline.apply(rule)
        except SigmaRuleNotFoundError as error:
            return Reason("missing-rule", str(error))
        except Exception as error:  # noqa: BLE001 - of one rule; pySigma raises errors of many kinds
            return _explain(error)
        return None

    def _finish(self, rule: SigmaRule | SigmaCorrelationRule, file: RuleFile, place: int) -> Detection | Unread:
        """Makes the detection of a rule. Raises Refusal."""
        origin = _describe_origin(rule, file, place)
        if not rule._output:
            users = [each.title for each in rule._backreferences]
            return Unread(origin, part_of=users[0] if users else "a correlation")
        if isinstance(rule, SigmaCorrelationRule):
            members = [self._require(each.rule) for each in rule.referenced_rules]
            shape, found = read_correlation(rule, [condition for condition, _ in members])
            inner = [loss for _, of_member in members for loss in of_member]
            return Detection(origin, shape, tuple(dict.fromkeys([*found, *inner])))
        condition, losses = self._require(rule)
        return Detection(origin, Single(condition), losses)

    def _require(self, rule: SigmaRule | SigmaCorrelationRule) -> tuple[Condition, tuple[Reason, ...]]:
        if isinstance(rule, SigmaCorrelationRule):
            raise Refusal("chain", f"it counts the alerts of {rule.title!r}, a correlation")
        found = self._conditions[id(rule)]
        if isinstance(found, Reason):
            raise Refusal(found.code, found.text)
        return found


def _name_tags(document: dict[str, Any]) -> dict[str, Any]:
    """Gives a namespace to the tags of a document that have none."""
    tags = document.get("tags")
    if not isinstance(tags, list):
        return document
    named = [f"{_NO_NAMESPACE}{tag}" if isinstance(tag, str) and "." not in tag else tag for tag in tags]
    return {**document, "tags": named}


def _require_readable(rule: SigmaRuleBase) -> None:
    """Raises the first error that pySigma found in what a rule looks for."""
    for error in rule.errors:
        if not isinstance(error, _ABOUT_ITSELF):
            raise error


def _explain(error: Exception) -> Reason:
    """Says why pySigma refuses a rule."""
    text = str(error) or type(error).__name__
    if isinstance(error, SigmaRegularExpressionError):
        return Reason("regex", text)
    if "pipe syntax" in text:
        return Reason("aggregation", "it counts with `|` in its condition, as Sigma no longer does")
    return Reason("sigma", text if isinstance(error, SigmaError) else f"{type(error).__name__}: {text}")


def _list_source(rule: SigmaRule) -> dict[str, str]:
    named = {name: getattr(rule.logsource, name) for name in _SOURCE_KEYS}
    return {name: value for name, value in named.items() if value}


def _name_source(rule: SigmaRuleBase) -> str:
    return "/".join(_list_source(rule).values()) if isinstance(rule, SigmaRule) else ""


def _describe_origin(rule: SigmaRuleBase, file: RuleFile, place: int) -> Origin:
    # What pySigma could not read it leaves as it is.
    level = rule.level.name.lower() if isinstance(rule.level, SigmaLevel) else "medium"
    return Origin(
        FORMAT,
        str(file.path),
        place,
        file.below,
        title=str(rule.title or ""),
        id=str(rule.id or ""),
        description=str(rule.description or ""),
        author=_join(rule.author),
        license=str(rule.license or ""),
        severity=_SEVERITIES.get(level, level),
        tags=tuple(tag.removeprefix(_NO_NAMESPACE) for tag in _list_texts(rule.tags)),
        references=_list_texts(rule.references),
        shown=_list_texts(rule.fields),
        logsource=_name_source(rule),
    )


def _list_texts(values: Any) -> tuple[str, ...]:
    return tuple(map(str, values if isinstance(values, list) else [values] if isinstance(values, str) else ()))


def _join(author: Any) -> str:
    return ", ".join(_list_texts(author)) if isinstance(author, list) else str(author or "")
