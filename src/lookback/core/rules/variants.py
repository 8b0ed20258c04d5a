"""Makes variants of a rule document: the same rule with other parameter values."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from lookback.core.errors import Problem, RuleError
from lookback.core.rules.parameters import Parameters, Value
from lookback.core.values.suggestions import suggest

# The maximum number of variants of a rule that are judged at once.
MAX_VARIANTS = 200
_EXAMPLE = "such as limit=500,1000,2000"


@dataclass(frozen=True)
class Variant:
    """A document with its own parameter values, without the rule's tests, which are for other values."""

    document: Mapping[str, Any]

    @property
    def parameters(self) -> Mapping[str, Value]:
        """The variant's parameter values."""
        return dict(self.document.get("parameters") or {})

    @property
    def text(self) -> str:
        """The values as JSON, different for each variant of a rule."""
        return json.dumps(self.parameters, ensure_ascii=False)


def read_varied(texts: Iterable[str]) -> dict[str, list[str]]:
    """Reads texts such as `limit=500,1000` into the values by parameter; a value in double quotes may contain commas.

    Raises:
        ValueError: A text is malformed, or names a parameter again; the message is for people.
    """
    varied: dict[str, list[str]] = {}
    for text in texts:
        name, sign, values = (part.strip() for part in text.partition("="))
        if not sign or not name:
            raise ValueError(f"{text!r:.100} is not NAME=VALUE,VALUE, {_EXAMPLE}")
        if name in varied:
            raise ValueError(f"{name} is given twice; write all its values together, {_EXAMPLE}")
        listed = next(csv.reader([values], skipinitialspace=True), [])
        varied[name] = [value.strip() for value in listed]
        if not listed or not all(varied[name]):
            raise ValueError(f"{name} has an empty value; write at least one, {_EXAMPLE}")
    return varied


def suggest_values(document: Mapping[str, Any]) -> dict[str, list[int | float]]:
    """Suggests values from a quarter to four times that of the first numeric parameter; none without such a parameter."""
    for name, value in (document.get("parameters") or {}).items():
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value:
            # Steps of about 19%, with the value itself among them.
            scaled = [float(f"{value * 4 ** (at / 8):.3g}") for at in range(-8, 9) if at]
            whole = isinstance(value, int)
            values = sorted({value, *(round(each) if whole else each for each in scaled if not whole or round(each))})
            return {str(name): values}
    return {}


def make_variants(
    documents: Sequence[Mapping[str, Any]], varied: Mapping[str, Sequence[object]]
) -> list[list[Variant]]:
    """Makes the variants of each document: one per combination of values, in the given order, without duplicates.

    Parameters that are not varied keep their values. A document without any varied parameter has one variant.

    Raises:
        RuleError: No document has the parameter, a value is of the wrong kind, or there are more than MAX_VARIANTS variants.
    """
    read = [Parameters(dict(document.get("parameters") or {})) for document in documents]
    known = list(dict.fromkeys(name for each in read for name in each.values))
    rule_id = str(documents[0].get("rule_id")) if documents else "?"
    unknown = [name for name in varied if name not in known]
    if unknown:
        otherwise = None if known else "add one under `parameters`, such as `parameters: {limit: 1000}`"
        problems = [
            Problem(f"parameters.{name}", f"unknown parameter {name}; {suggest(name, known, otherwise)}")
            for name in unknown
        ]
        raise RuleError(rule_id, problems)
    return [_make_variants(document, own, varied) for document, own in zip(documents, read, strict=True)]


def _make_variants(
    document: Mapping[str, Any], parameters: Parameters, varied: Mapping[str, Sequence[object]]
) -> list[Variant]:
    plain = {name: value for name, value in document.items() if name != "tests"}
    own = {name: values for name, values in varied.items() if name in parameters.values}
    count, rule_id = math.prod(len(values) for values in own.values()), str(document.get("rule_id"))
    if count > MAX_VARIANTS:
        factors = " x ".join(f"{len(values)} of {name}" for name, values in own.items())
        message = (
            f"{factors} give {count:,} variants, more than {MAX_VARIANTS}; use fewer values first, then closer ones"
        )
        raise RuleError(rule_id, [Problem("parameters", message)])
    if not own:
        return [Variant(plain)]
    made: dict[str, Variant] = {}
    problems: dict[Problem, None] = {}
    for values in product(*own.values()):
        changed, wrong = parameters.change(dict(zip(own, values, strict=True)))
        problems.update(dict.fromkeys(wrong))
        variant = Variant({**plain, "parameters": changed})
        made.setdefault(variant.text, variant)
    if problems:
        raise RuleError(rule_id, list(problems))
    return list(made.values())
