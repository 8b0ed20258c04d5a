"""Reads a mapping of a file as the frozen dataclass that declares its keys.

The annotation of a field says what its key may hold, for instance `Annotated[int, Field(strict=True, ge=1),
needs("a positive integer is needed")]`. pydantic checks every key, and this module turns its errors into problems with
our sentences. An object that is made without a document, by its class or by `replace`, is not checked.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, fields, replace
from typing import Any, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic.fields import FieldInfo

from lookback.core.errors import Problem, show_value
from lookback.core.values.suggestions import suggest

T = TypeVar("T")


class Refused(ValueError):
    """A value that cannot be used; `.problems` has the places below it, `.partial` what could be read of it."""

    def __init__(self, problems: Iterable[Problem], partial: Any = None) -> None:
        # Without a message: pydantic encodes it, which fails for half of a surrogate pair in a place.
        super().__init__()
        self.problems, self.partial = list(problems), partial


def needs(sentence: str, *, shows_value: bool = True) -> WrapValidator:
    """Gives a type the sentence with which its values are refused. shows_value: false for what may be a secret."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(f"{sentence}, got {show_value(value)}" if shows_value else sentence) from None

    return WrapValidator(check)


def read_mapping(
    cls: type[T], document: Mapping[Any, Any], problems: Iterable[Problem] = (), unknown: str = "unknown key"
) -> T:
    """Reads a mapping as an instance of the dataclass. Raises Refused with every problem.

    A missing key without a default is read as None, so that its own sentence refuses it. problems: those that the caller
    has found already. unknown: how the problem of a key begins that the dataclass does not declare.
    """
    declared: type = cls
    keys = list_document_keys(declared)
    found = [
        Problem(str(key), f"{unknown} {str(key)!r:.100}; {suggest(str(key), keys)}")
        for key in document
        if key not in keys
    ]
    found += problems
    values = {key: document.get(key) for key, is_needed in keys.items() if is_needed or key in document}
    try:
        read: T = _make_adapter(declared).validate_python(values)
    except ValidationError as error:
        found += _list_problems(error)
    if found:
        raise Refused(found)
    return read


def read_partly(cls: type[T], values: Mapping[str, Any], context: object) -> tuple[T, list[Problem]]:
    """Reads a mapping as a dataclass whose fields all have defaults, and returns it with every problem.

    A wrong value is replaced by what could be read of it, else by the default. context: what the annotations of the fields
    find as `info.context`.
    """
    declared: type = cls
    adapter = _make_adapter(declared)
    try:
        return adapter.validate_python(values, context=context), []
    except ValidationError as error:
        partial = {each["loc"][0]: _find_cause(each) for each in error.errors(include_url=False, include_input=False)}
        problems = list(_list_problems(error))
    read = adapter.validate_python({key: each for key, each in values.items() if key not in partial}, context=context)
    kept = {str(key): cause.partial for key, cause in partial.items() if isinstance(cause, Refused)}
    return replace(read, **{key: value for key, value in kept.items() if value is not None}), problems


@functools.cache
def list_document_keys(cls: type) -> Mapping[str, bool]:
    """Returns the keys that a dataclass declares, in order, and whether a document needs them."""
    hints = get_type_hints(cls, include_extras=True)
    keys = {}
    for each in fields(cls):
        alias = FieldInfo.from_annotation(hints[each.name]).alias
        keys[alias or each.name] = each.default is MISSING and each.default_factory is MISSING
    return keys


@functools.cache
def _make_adapter(cls: type) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


def put_below(place: str, problem: Problem) -> Problem:
    """Returns the problem of a part of the value at a place, such as `steps` and `[0].name`."""
    dot = "." if problem.place and not problem.place.startswith("[") else ""
    return Problem(f"{place}{dot}{problem.place}", problem.message)


def _find_cause(error: Any) -> Any:
    """Returns the exception of a function of ours that refused a value; None if pydantic did."""
    return error.get("ctx", {}).get("error")


def _list_problems(error: ValidationError) -> Iterator[Problem]:
    for each in error.errors(include_url=False, include_input=False):
        place, cause = ".".join(map(str, each["loc"])), _find_cause(each)
        if isinstance(cause, Refused):
            yield from (put_below(place, below) for below in cause.problems)
        else:
            yield Problem(place, str(cause or each["msg"]))
