"""Reads from the Databricks CLI which jobs a bundle has in a target, with every `${...}` resolved."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lookback.core.errors import RemoteError, SetupError
from lookback.core.values.texts import collapse_spaces

FILE = "databricks.yml"
LOG_IN = (
    "log in with `databricks auth login --profile NAME` and pass --profile NAME, or set DATABRICKS_HOST and "
    "DATABRICKS_TOKEN in the environment"
)
_INSTALL = "`brew install databricks/tap/databricks`, or `winget install Databricks.DatabricksCLI` on Windows"
_NO_VALUE = re.compile(r"no value assigned to required variable (\w+)")
_LOG_IN_FAILED = re.compile(r"auth configuration|default auth|credential|\b401\b|access token", re.IGNORECASE)
_MAX_CHARACTERS = 300


@dataclass(frozen=True)
class BundleJob:
    """A job as the files define it. job_id: its number in the workspace, None if the bundle was not deployed."""

    name: str
    job_id: int | None
    parameters: Mapping[str, str]


@dataclass(frozen=True)
class Bundle:
    """The jobs of a target by key. host: the workspace that the files name, often empty."""

    target: str
    host: str
    jobs: Mapping[str, BundleJob]

    def get_job(self, key: str) -> BundleJob:
        """Returns the job of that key. Raises SetupError if the bundle has none."""
        if key not in self.jobs:
            raise SetupError(f"the bundle has no job {key!r}; it has {', '.join(sorted(self.jobs))}")
        return self.jobs[key]


def read_bundle(folder: str | Path, target: str | None, profile: str | None, seconds: float) -> Bundle:
    """Reads the bundle of a folder by `databricks bundle summary`, which may take so many seconds.

    target, profile: the CLI's own defaults unless given. Raises SetupError for what the user can mend in the folder or
    on this machine, RemoteError if the CLI does not end in time.
    """
    file = Path(folder) / FILE
    if not file.is_file():
        raise SetupError(f"there is no {file}; run it where the bundle is, or name its folder with --bundle")
    executable = shutil.which("databricks")
    if executable is None:
        raise SetupError(f"the Databricks CLI, by which bundles are read, is not on the PATH: {_INSTALL}")
    # --force-pull: somebody else may have deployed since this machine last saw the deployment's state.
    command = [executable, "bundle", "summary", "--force-pull", "--output", "json"]
    command += ["--target", target] if target else []
    command += ["--profile", profile] if profile else []
    try:
        done = subprocess.run(  # noqa: S603 - no shell reads it
            command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise RemoteError(
            f"{file}: `databricks bundle summary` did not end in time; try again, or allow more with --timeout"
        ) from error
    if done.returncode != 0:
        raise SetupError(f"{file}: {_explain_failure(done.stderr)}")
    try:
        return _parse_summary(json.loads(done.stdout))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise SetupError(
            f"{file}: the output of `databricks bundle summary` cannot be read; install a newer CLI: {_INSTALL}"
        ) from error


def shorten_error(text: str) -> str:
    """Returns an error's text in one line, without the configuration that Databricks SDKs append."""
    return collapse_spaces(text).partition(" Config: ")[0].rstrip(".")[:_MAX_CHARACTERS]


def _parse_summary(summary: Mapping[str, Any]) -> Bundle:
    jobs = {
        key: BundleJob(
            name=job["name"],
            job_id=int(job["id"]) if job.get("id") else None,
            parameters={each["name"]: each["default"] for each in job.get("parameters", [])},
        )
        for key, job in summary.get("resources", {}).get("jobs", {}).items()
        # A job that is deployed and no longer in the files is listed too.
        if job.get("modified_status") != "deleted"
    }
    return Bundle(summary["bundle"]["target"], summary["workspace"].get("host", ""), jobs)


def _explain_failure(stderr: str) -> str:
    """Says with a remedy why the CLI failed, by the first error that it printed."""
    if "No such command" in stderr:
        return f"`pip install databricks-cli` installs a CLI that has no bundles; install the one that does: {_INSTALL}"
    before, _, after = f"\n{stderr}".partition("\nError: ")
    text = shorten_error((after or before).strip().partition("\n\n")[0]) or "it printed no error"
    if missing := _NO_VALUE.search(text):
        return (
            f"the variable {missing[1]} has no value in this target; set BUNDLE_VAR_{missing[1]} in the environment, "
            "or write it into .databricks/bundle/<target>/variable-overrides.json"
        )
    if "no such target" in text or "please specify target" in text:
        return f"{text}; name one with --target"
    if _LOG_IN_FAILED.search(text):
        return f"the Databricks CLI cannot log in ({text}): {LOG_IN}"
    return f"the Databricks CLI cannot read the bundle ({text}); `databricks bundle validate` shows all that is wrong"
