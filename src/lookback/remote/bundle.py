"""What a bundle deploys to a target, as its files say."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lookback.config import load_yaml
from lookback.core.errors import SetupError

FILE = "databricks.yml"
_REFERENCE = re.compile(r"\$\{([a-z_]+(?:\.[A-Za-z_][A-Za-z0-9_]*)+)\}")
_SERVICE_PRINCIPAL = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)


@dataclass(frozen=True)
class Bundle:
    """A target of the bundle.

    jobs: key -> the job's definition; is_development: jobs carry the deployer's name; prefix: what else their names begin
    with; variables: name -> value, where the target, or BUNDLE_VAR_name in the environment, has one.
    """

    name: str
    target: str
    is_development: bool
    prefix: str
    jobs: Mapping[str, Mapping[str, Any]]
    variables: Mapping[str, str] = field(default_factory=dict)

    def job_name(self, key: str, user: User) -> str:
        """The name that the job has in the workspace. Raises SetupError for an unknown job, or an open variable."""
        if key not in self.jobs:
            raise SetupError(f"the bundle has no job {key!r}; it has {', '.join(sorted(self.jobs))}")
        prefix = self.prefix or (f"[dev {user.short_name}] " if self.is_development else "")
        return self.resolve(prefix + str(self.jobs[key].get("name", key)), user)

    def resolve(self, text: str, user: User) -> str:
        """The text with the values of the references in it. Raises SetupError, naming those that have none."""
        known = {
            **{f"var.{name}": value for name, value in self.variables.items()},
            "bundle.name": self.name,
            "bundle.target": self.target,
            "workspace.current_user.userName": user.name,
            "workspace.current_user.short_name": user.short_name,
        }
        for _ in range(5):
            text = _REFERENCE.sub(lambda match: known.get(match[1], match[0]), text)
        if open_ := sorted(set(_REFERENCE.findall(text))):
            names = ", ".join(open_)
            raise SetupError(
                f"{FILE}: {names} has no value in target {self.target}; set BUNDLE_VAR_<name> in the environment"
            )
        return text


@dataclass(frozen=True)
class User:
    """Who is logged in. name: e-mail address, or application id of a service principal; groups: names of theirs."""

    name: str
    display_name: str = ""
    groups: frozenset[str] = frozenset()

    @property
    def short_name(self) -> str:
        """The name as bundles write it into names: what stands before @, in lower case, of letters, digits and _."""
        name = self.display_name if _SERVICE_PRINCIPAL.fullmatch(self.name) and self.display_name else self.name
        local = name.partition("@")[0].lower()
        return "".join(character if character.isalpha() or character.isdecimal() else "_" for character in local)


def load_bundle(folder: str | Path, target: str | None = None) -> Bundle:
    """The bundle of a folder that has a databricks.yml.

    target: its name; without one DATABRICKS_BUNDLE_TARGET, else the one that the file says is the default.
    Raises SetupError where a file cannot be read, or there is no such target.
    """
    file = Path(folder) / FILE
    if not file.is_file():
        raise SetupError(f"there is no {file}; run it where the bundle is, or name its folder with --bundle")
    document = _mapping(load_yaml(file), str(file))
    targets = _mapping(document.get("targets") or {}, f"{file}: targets")
    name = target or os.environ.get("DATABRICKS_BUNDLE_TARGET") or _default_target(targets)
    if name not in targets:
        raise SetupError(f"{file} has no target {name!r}; it has {', '.join(targets) or 'none'}")
    chosen = _mapping(targets[name] or {}, f"{file}: targets.{name}")
    presets = chosen.get("presets") or {}
    return Bundle(
        name=str((document.get("bundle") or {}).get("name", "")),
        target=name,
        is_development=chosen.get("mode") == "development",
        prefix=str(presets.get("name_prefix") or ""),
        jobs=_jobs(Path(folder), document),
        variables=_variables(document.get("variables") or {}, chosen.get("variables") or {}),
    )


def _default_target(targets: Mapping[str, Any]) -> str:
    default = [name for name, target in targets.items() if (target or {}).get("default")]
    if len(default) != 1 and len(targets) != 1:
        raise SetupError(f"say which target: --target NAME, one of {', '.join(targets) or 'none'}")
    return (default or list(targets))[0]


def _jobs(folder: Path, document: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    files = [file for pattern in document.get("include") or [] for file in sorted(folder.glob(pattern))]
    jobs: dict[str, Mapping[str, Any]] = {}
    for source in [document, *(_mapping(load_yaml(file), str(file)) for file in files)]:
        jobs.update((source.get("resources") or {}).get("jobs") or {})
    return jobs


def _variables(declared: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, str]:
    """The value of each variable that has one: by the environment, by the target, by default."""
    found: dict[str, str] = {}
    for name, declaration in declared.items():
        default = (declaration or {}).get("default") if isinstance(declaration, dict) else None
        value = os.environ.get(f"BUNDLE_VAR_{name}", values.get(name, default))
        if value is not None and not isinstance(value, (dict, list)):
            found[name] = str(value)
    return found


def _mapping(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise SetupError(f"{place} is no mapping, so no part of a bundle")
    return value
