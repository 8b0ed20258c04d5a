"""The public API is documented: docstrings that name what goes in and what is raised, examples that run."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")


def column(title: str) -> list[str]:
    """The names in the first column of a table of docs/reference/python.md."""
    (table,) = re.findall(rf"^\| {title} \|.*\n\|.*\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    return [name for row in table.splitlines() for name in re.findall(r"`([^`]+)`", row.split("|")[1])]


PUBLIC = column("Module")
SAME_EVERYWHERE = set(column("Parameter"))


class Member(NamedTuple):
    """A public class, function or method. documented: its docstring and, of a method, that of the class."""

    name: str
    value: Any
    documented: str


def members(module: ModuleType) -> Iterator[Member]:
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    for name in getattr(module, "__all__", None) or [name for name in own if not name.startswith("_")]:
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            yield Member(f"{module.__name__}.{name}", value, value.__doc__ or "")
        if inspect.isclass(value):
            for method, function in functions(value):
                told = f"{function.__doc__ or ''}\n{value.__doc__ or ''}"
                yield Member(f"{module.__name__}.{name}.{method}", function, told)


def functions(value: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, found in vars(value).items():
        function = getattr(found, "__func__", None) or getattr(found, "fget", None) or found
        if inspect.isfunction(function) and (not name.startswith("_") or name == "__init__"):
            yield name, function


MEMBERS = [member for name in PUBLIC for member in members(importlib.import_module(name))]
WRITTEN = [
    member for member in MEMBERS if inspect.isfunction(member.value) and "<" not in member.value.__code__.co_filename
]


def raised(function: Callable[..., Any]) -> set[str]:
    """Lists the errors that a function raises itself."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    calls = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)]
    return {call.func.id for call in calls if isinstance(call.func, ast.Name)}


def test_page_lists_what_the_reference_has() -> None:
    pages = sorted((ROOT / "docs/reference/api").glob("*.md"))
    made = [
        name for page in pages for name in re.findall(r"^::: (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert len(made) == len(set(made))
    for name in PUBLIC:
        exported = (
            getattr(importlib.import_module(name), "__all__", ()) if name in ("lookback", "lookback.notebook") else ()
        )
        homes = {home_of(importlib.import_module(name), each) for each in exported} or {name}
        assert all(home in made or home.rpartition(".")[0] in made for home in homes), name
    assert len(MEMBERS) > 100


def home_of(module: ModuleType, name: str) -> str:
    """Where a name that a package exports is defined."""
    value = getattr(module, name)
    # A constant does not know its module, but the package knows it.
    home = value.__module__ if callable(value) else module._HOMES[name]
    return f"{home}.{name}"


@pytest.mark.parametrize("member", MEMBERS, ids=lambda member: member.name)
def test_public_name_says_what_it_answers(member: Member) -> None:
    if not member.name.endswith(".__init__"):
        assert len((member.value.__doc__ or "").split("\n")[0]) > 10


@pytest.mark.parametrize("member", WRITTEN, ids=lambda member: member.name)
def test_docstring_names_what_is_raised(member: Member) -> None:
    assert {error for error in raised(member.value) if error not in member.documented} == set()


@pytest.mark.parametrize("member", WRITTEN, ids=lambda member: member.name)
def test_docstring_names_the_parameters(member: Member) -> None:
    names = set(inspect.signature(member.value).parameters) - {"self", "cls"}
    if len(names) == 1:
        # The docstring speaks of nothing else.
        return
    names -= SAME_EVERYWHERE
    assert {name for name in names if not re.search(rf"\b{name}\b", member.documented)} == set()


def examples() -> list[doctest.DocTest]:
    """The examples in docstrings of all modules that have any."""
    found = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        if re.search(r"^\s*>>> ", path.read_text(encoding="utf-8"), re.MULTILINE):
            name = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
            tests = doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(name))
            found += [test for test in tests if test.examples]
    return found


@pytest.mark.parametrize("example", examples(), ids=lambda example: example.name)
def test_example_of_a_docstring_gives_what_it_says(example: doctest.DocTest) -> None:
    said: list[str] = []
    doctest.DocTestRunner().run(example, out=said.append)
    assert not said, "".join(said)


def test_there_are_examples() -> None:
    assert {"lookback.testing.harness.Harness", "lookback.testing.harness.replay"} <= {
        example.name for example in examples()
    }
