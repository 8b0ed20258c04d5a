"""Makes a repository of a team's own: conf with a stream, rules and lists, notebooks, CI, and a Databricks bundle.

Most files are those of Lookback's own repository, which the wheel has beside the templates.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from lookback.core.errors import SetupError

_TEMPLATES = Path(__file__).parent / "template"
# Where the files of the repository are: in the wheel, or in a clone.
_SHARED = _TEMPLATES / "shared"
_CLONE = Path(__file__).parents[2]
# Template -> the file that it becomes.
_OWN = {
    "README.md": "README.md",
    "gitignore": ".gitignore",
    "requirements.txt": "requirements.txt",
    "mule-accounts.csv": "conf/lists/mule-accounts.csv",
    "rules.yml": ".github/workflows/rules.yml",
    "Dockerfile": "Dockerfile",
    "devcontainer.json": ".devcontainer/devcontainer.json",
}
# pyproject.toml puts the same into the wheel.
SHARED = (
    "databricks.yml",
    "conf/settings.yml",
    "conf/rule.schema.json",
    "conf/streams/payments.yml",
    "conf/samples/payments.csv",
    "conf/rules/below-the-limit.yml",
    "conf/rules/payment-to-listed-account.yml",
    "conf/dashboards",
    "conf/jobs",
    "conf/profiles",
    "notebooks",
)
# The bundle of a clone builds the wheel; that of a project installs the published one.
_BUILD = re.compile(r"^artifacts:\n(?:(?: .*)?\n)+", re.MULTILINE)
_SOURCES = re.compile(r"^    - (?:dev|docs|src|tests)/\*\*\n", re.MULTILINE)
_WHY_EXCLUDED = re.compile(r"^# Jobs need the wheel, .*\n(?:# .*\n)+", re.MULTILINE)
_LIBRARY = re.compile(r"^( *)- whl: \.\./\.\./dist/\*\.whl$", re.MULTILINE)
_DEPENDENCY = "- ../../dist/*.whl"
_PACKAGE = "lookback-rules"


def make_project(folder: Path) -> list[str]:
    """Writes the files of a new project into a new or empty folder. Returns their paths in it, sorted.

    Raises SetupError if the folder is not empty, or cannot be written.
    """
    files = dict(_make_files())
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise SetupError(f"{folder} is not an empty folder; name a new one")
        for name, text in files.items():
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8", newline="")
    except (OSError, ValueError) as error:
        # ValueError: a path with a NUL, which no system accepts.
        raise SetupError(f"{folder} cannot be written: {error}") from error
    return sorted(files)


def _make_files() -> Iterator[tuple[str, str]]:
    release = version(_PACKAGE)
    for template, name in _OWN.items():
        yield name, _read(_TEMPLATES / template).replace("VERSION", release)
    place = _SHARED if _SHARED.is_dir() else _CLONE
    for name in SHARED:
        found = place / name
        for file in sorted(found.iterdir()) if found.is_dir() else [found]:
            if file.is_file():
                text = _read(file)
                path = file.relative_to(place).as_posix()
                yield path, text if file.suffix == ".csv" else _adapt(text, release)


def _adapt(text: str, release: str) -> str:
    """Adapts a file of the repository: the published wheel instead of a built one, and the stream of the project."""
    text = _WHY_EXCLUDED.sub("# A dashboard's file among the others would be a second dashboard.\n", text)
    text = _SOURCES.sub("", _BUILD.sub("", text))
    text = _LIBRARY.sub(rf"\1- pypi:\n\1    package: {_PACKAGE}=={release}", text)
    text = text.replace(_DEPENDENCY, f"- {_PACKAGE}=={release}").replace("source_format: parquet", "source_format: csv")
    for around in ("stream: {}", "/{}/", r"\"{}\"", "`{}`"):
        text = text.replace(around.format("transactions"), around.format("payments"))
    return text


def _read(file: Path) -> str:
    with file.open(encoding="utf-8", newline="") as opened:
        return opened.read()
