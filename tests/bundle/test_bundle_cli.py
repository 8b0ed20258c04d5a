"""The bundle by the real command-line interface of Databricks, against a stand-in for a workspace on this machine.

Only where `databricks` is on the PATH. It validates, builds the wheel, uploads files and makes the jobs; what a workspace
would say of a job that cannot run stays unknown.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from test_bundle import ASKED, JOBS, ROOT, TARGETS

from workspace_server import Answer, Asked, WorkspaceServer, error

DATABRICKS = shutil.which("databricks")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(DATABRICKS is None, reason="the command-line interface of Databricks is not on the PATH"),
]
SERVICE = "11111111-2222-3333-4444-555555555555"
GIVEN = {
    "node_type": "i3.xlarge", "service_principal": SERVICE, "analysts": "the-analysts", "engineers": "the-engineers",
    "notify": "ops@example.com", "warehouse_id": "0123456789abcdef",
}  # fmt: skip
_API, _FILES = "/api/2.0/workspace", "/api/2.0/workspace-files/"
_IMPORT = f"{_FILES}import-file"


class BundleWorkspace(WorkspaceServer):
    """Keeps files, folders, jobs and permissions as a deployment makes them. user: whoever is logged in."""

    def __init__(self, user: str) -> None:
        super().__init__()
        self.user = user
        self.files: dict[str, Any] = {}
        self.folders: set[str] = set()
        self.jobs: dict[int, dict[str, Any]] = {}
        self.clusters: dict[str, dict[str, Any]] = {}
        self.dashboards: dict[str, dict[str, Any]] = {}
        self.published: dict[str, dict[str, Any]] = {}
        self.permissions: dict[str, list[dict[str, Any]]] = {}
        self.runs: list[int] = []

    def answer(self, asked: Asked) -> Answer:
        with self._lock:
            found = self._answer(asked.method, unquote(asked.path), asked)
        return found or error(404, "RESOURCE_DOES_NOT_EXIST", f"nothing at {asked.method} {asked.path}")

    def _answer(self, method: str, path: str, asked: Asked) -> Answer | None:
        if path == "/api/2.0/preview/scim/v2/Me":
            return Answer({"id": "1", "userName": self.user})
        if path.startswith("/telemetry"):
            return Answer({"errors": [], "numProtoSuccess": 1})
        if path.startswith("/api/2.0/permissions/"):
            if method == "PUT":
                self.permissions[path] = asked.body["access_control_list"]
            shown = [
                {**entry, "all_permissions": [{"permission_level": entry["permission_level"]}]}
                for entry in self.permissions.get(path, [])
            ]
            return Answer({"access_control_list": shown})
        if path.startswith("/api/2.2/jobs/"):
            return self._of_jobs(path.removeprefix("/api/2.2/jobs/"), asked)
        if path.startswith("/api/2.1/clusters/"):
            return self._of_clusters(path.removeprefix("/api/2.1/clusters/"), asked)
        if path.startswith("/api/2.0/lakeview/dashboards"):
            return self._of_dashboards(path.removeprefix("/api/2.0/lakeview/dashboards").strip("/"), asked)
        return self._of_files(path, asked)

    def _of_dashboards(self, path: str, asked: Asked) -> Answer | None:
        name, _, part = path.partition("/")
        if asked.method == "POST" and not name:
            name = f"{len(self.dashboards):032x}"
            self.dashboards[name] = {**asked.body, **asked.query, "dashboard_id": name, "etag": "1"}
            return Answer(self.dashboards[name])
        if name not in self.dashboards:
            return None
        if part == "published":
            if asked.method == "POST":
                self.published[name] = asked.body
            return Answer(self.published[name]) if name in self.published else None
        return Answer(self.dashboards[name])

    def _of_files(self, path: str, asked: Asked) -> Answer | None:
        if path.startswith(_IMPORT):
            name = "/" + path.removeprefix(_IMPORT).lstrip("/")
            if name in self.files and asked.query.get("overwrite") != "true":
                return error(409, "RESOURCE_ALREADY_EXISTS", name)
            self.files[name] = asked.body
            return Answer()
        if path == f"{_API}/mkdirs":
            parts = asked.body["path"].split("/")
            self.folders.update("/".join(parts[:end]) for end in range(2, len(parts) + 1))
            return Answer()
        if path == f"{_API}/delete":
            self.files = {name: body for name, body in self.files.items() if not name.startswith(asked.body["path"])}
            return Answer()
        if path.startswith(_FILES) and (name := f"/{path.removeprefix(_FILES)}") in self.files:
            return Answer(self.files[name])
        name = asked.query.get("path", "")
        if path == f"{_API}/get-status" and name in {*self.folders, *self.files}:
            kind = "DIRECTORY" if name in self.folders else "FILE"
            return Answer({"object_type": kind, "path": name, "object_id": 1, "size": 1})
        if path == f"{_API}/export" and name in self.files:
            return Answer(self.files[name])
        return None

    def _of_clusters(self, verb: str, asked: Asked) -> Answer | None:
        if verb == "create":
            name = f"0101-120000-cluster{len(self.clusters)}"
            self.clusters[name] = asked.body
            return Answer({"cluster_id": name})
        if verb == "get" and (name := asked.query["cluster_id"]) in self.clusters:
            return Answer({**self.clusters[name], "cluster_id": name, "state": "RUNNING"})
        return None

    def _of_jobs(self, verb: str, asked: Asked) -> Answer | None:
        if verb == "create":
            self.jobs[len(self.jobs) + 1] = asked.body
            return Answer({"job_id": len(self.jobs)})
        if verb == "get" and (number := int(asked.query["job_id"])) in self.jobs:
            return Answer({"job_id": number, "settings": self.jobs[number]})
        if verb == "run-now":
            self.runs.append(asked.body["job_id"])
            return Answer({"run_id": len(self.runs)})
        if verb == "runs/get":
            state = {"life_cycle_state": "TERMINATED", "result_state": "SUCCESS", "state_message": ""}
            name = self.jobs[self.runs[-1]]["name"]
            return Answer({"run_id": 1, "run_name": name, "run_page_url": self.url, "state": state, "tasks": []})
        return None


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tracked files alone, as a clone has them."""
    folder = tmp_path_factory.mktemp("bundle")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


@contextmanager
def workspace(target: str) -> Iterator[BundleWorkspace]:
    with BundleWorkspace("ann@example.com" if target == "dev" else SERVICE) as found:
        yield found


def environment(bundle: Path, place: BundleWorkspace, target: str) -> dict[str, str]:
    """The environment of a person who is logged in to the workspace and has values for the target's open variables."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("DATABRICKS_", "BUNDLE_"))}
    variables |= {f"BUNDLE_VAR_{name}": GIVEN[name] for name in ASKED[target]}
    return variables | {
        "DATABRICKS_HOST": place.url, "DATABRICKS_TOKEN": "t", "DATABRICKS_CONFIG_FILE": str(bundle / "none"),
    }  # fmt: skip


def databricks(bundle: Path, place: BundleWorkspace, target: str, *words: str) -> str:
    """Runs the command, which must end well, and returns both outputs."""
    variables = environment(bundle, place, target)
    command = [str(DATABRICKS), "bundle", *words, "--target", target]
    done = subprocess.run(command, cwd=bundle, env=variables, capture_output=True, text=True, timeout=300, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return said


@pytest.mark.parametrize("target", TARGETS)
def test_bundle_is_valid_without_a_warning(bundle: Path, target: str) -> None:
    with workspace(target) as place:
        said = databricks(bundle, place, target, "validate")
    warned = [line for line in said.splitlines() if line.startswith("Warning")]
    # Later releases say where a group has a level of its own on a resource, which is meant.
    assert warned == [line for line in warned if "already has permissions set for 'the-analysts' group" in line]
    assert "Validation OK!" in said or warned
    assert "Recommendation" not in said


@pytest.mark.parametrize("target", TARGETS)
def test_bundle_is_deployed_with_all_that_its_jobs_name(bundle: Path, target: str) -> None:
    shutil.rmtree(bundle / ".databricks", ignore_errors=True)
    with workspace(target) as place:
        assert "Deployment complete!" in databricks(bundle, place, target, "deploy")
        databricks(bundle, place, target, "run", "set_up")
        (begun,) = [place.jobs[number]["name"] for number in place.runs]
    prefix = {"dev": "[dev ann] ", "staging": "staging ", "prod": ""}[target]
    assert begun == f"{prefix}lookback-set-up"
    assert sorted(job["name"] for job in place.jobs.values()) == sorted(prefix + job["name"] for job in JOBS.values())
    (wheel,) = [name for name in place.files if name.endswith(".whl")]
    assert "lookback/core/engine/evaluation.py" in zipfile.ZipFile(io.BytesIO(place.files[wheel])).namelist()
    for job in place.jobs.values():
        (task,) = job["tasks"]
        assert f"{task['notebook_task']['notebook_path']}.ipynb" in place.files
        needed = [each["whl"] for each in task.get("libraries", []) if "whl" in each]
        needed += [
            each for one in job.get("environments", []) for each in one["spec"]["dependencies"] if each.endswith(".whl")
        ]
        assert needed == [wheel]
        assert "${" not in json.dumps(job)
    (dashboard,) = place.dashboards.values()
    assert dashboard["display_name"] == f"{prefix}lookback"
    schema = {"dev": "lookback_ann", "staging": "lookback_staging", "prod": "lookback"}[target]
    assert (dashboard["dataset_catalog"], dashboard["dataset_schema"]) == ("main", schema)
    assert json.loads(dashboard["serialized_dashboard"])["pages"]
    assert [each["embed_credentials"] for each in place.published.values()] == [False]
    assert not [name for name in place.files if name.endswith(".lvdash.json")]
    # What begins by itself does so in production alone.
    begins = {
        job["name"]: job[kind].get("pause_status")
        for job in place.jobs.values()
        for kind in ("continuous", "schedule", "trigger")
        if kind in job
    }
    going = {"lookback-ingest", "lookback-evaluate", "lookback-maintain"} if target == "prod" else set()
    assert {name for name, status in begins.items() if status != "PAUSED"} == going
    assert len(begins) == 5
    if target != "dev":
        root = f"/Workspace/Users/{SERVICE}/"
        assert all(name.startswith(root) for name in place.files)
        assert {job["run_as"]["service_principal_name"] for job in place.jobs.values()} == {SERVICE}
        assert len([path for path in place.permissions if "/jobs/" in path]) == len(JOBS)
        levels = {
            path.split("/")[4]: {
                entry["permission_level"] for entry in entries if entry.get("group_name") == "the-analysts"
            }
            for path, entries in place.permissions.items()
        }
        assert levels == {
            "directories": {"CAN_RUN"},
            "clusters": {"CAN_RESTART"},
            "jobs": {"CAN_VIEW"},
            "dashboards": {"CAN_READ"},
        }
