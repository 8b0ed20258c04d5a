"""Checks whether the bundle is deployed, and whether everything that its jobs need is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from databricks.sdk.service.jobs import JobAccessControlResponse, JobPermissionLevel
from databricks.sdk.service.sql import EndpointInfo, State

from lookback.core.errors import RemoteError
from lookback.core.operations.health import PROBLEM, WARNING
from lookback.remote.workspace import DeployedJob, RemoteWorkspace, explain_errors

OK = "ok"
# The product's own tables, which the first run of a job creates; the stream's events table comes to these.
TABLES = (
    "rejected_events",
    "rules",
    "alerts",
    "late_events",
    "rule_log",
    "reviews",
    "metrics",
    "notifications",
    "ingests",
    "labels",
    "snoozes",
    "lists",
)
_MAY_RUN = {JobPermissionLevel.CAN_MANAGE, JobPermissionLevel.CAN_MANAGE_RUN, JobPermissionLevel.IS_OWNER}
# Other paths are files of volumes, packages of a registry, or notebooks of a Git repository.
_WORKSPACE_FOLDERS = ("/Workspace/", "/Users/", "/Shared/", "/Repos/")


@dataclass(frozen=True)
class Check:
    """The result of one check. level: ok, warning or problem; remedy: what to do, empty if all is well."""

    level: str
    check: str
    what: str
    remedy: str = ""


def check_deployment(workspace: RemoteWorkspace, warehouse_id: str | None = None) -> Iterator[Check]:
    """Checks the jobs, the files that they run, their tables, and the SQL warehouse of `lookback remote status`."""
    yield Check(OK, "login", f"{workspace.user.name} at {workspace.host}, target {workspace.bundle.target}")
    jobs: list[DeployedJob] = []
    for key in sorted(workspace.bundle.jobs):
        found = workspace.find_jobs(key)
        jobs += found[:1]
        yield _check_job(workspace, key, found)
        if found:
            yield _check_permission(workspace, found[0])
    for path, keys in sorted(_group_by_path(jobs).items()):
        yield _check_path(workspace, path, ", ".join(sorted(keys)))
    yield from _check_catalog(workspace, jobs)
    yield _check_warehouse(workspace, warehouse_id)


def choose_warehouse(workspace: RemoteWorkspace, warehouse_id: str | None = None) -> EndpointInfo | None:
    """Returns the SQL warehouse of that id; without one the first that the user may use, a running one before others."""
    with explain_errors(workspace.host, f"SQL warehouse {warehouse_id}" if warehouse_id else "the SQL warehouses"):
        if warehouse_id:
            found = workspace.client.warehouses.get(warehouse_id)
            return EndpointInfo(id=found.id, name=found.name, state=found.state)
        gone = (State.DELETED, State.DELETING)
        usable = [each for each in workspace.client.warehouses.list() if each.state not in gone]
    return min(usable, key=lambda each: each.state != State.RUNNING, default=None)


def _check_job(workspace: RemoteWorkspace, key: str, found: list[DeployedJob]) -> Check:
    check, name = f"job {key}", workspace.bundle.get_job(key).name
    if not found:
        what = f"There is no job {name!r}, or not for you to see."
        return Check(PROBLEM, check, what, f"Run {workspace.deploy_command}.")
    if len(found) > 1:
        ids = ", ".join(str(each.job_id) for each in found)
        return Check(PROBLEM, check, f"There are {len(found)} jobs {name!r}: {ids}.", "Delete the old ones.")
    runs_as = found[0].job.run_as_user_name
    return Check(OK, check, f"{name!r} is deployed ({found[0].job_id}){f', runs as {runs_as}' if runs_as else ''}.")


def _check_permission(workspace: RemoteWorkspace, job: DeployedJob) -> Check:
    check = f"permission {job.key}"
    ask = "Ask an owner of the job for CAN_MANAGE_RUN, or add it to the bundle's permissions."
    found, reason = workspace.request("permissions", lambda: workspace.client.jobs.get_permissions(str(job.job_id)))
    if found is None:
        return Check(WARNING, check, f"Who may run {job.name!r} {reason}.", f"Try it. {ask}")
    own = [entry for entry in found.access_control_list or [] if _applies_to_user(workspace, entry)]
    levels = {each.permission_level for entry in own for each in entry.all_permissions or []}
    if levels & _MAY_RUN:
        return Check(OK, check, f"You may run {job.name!r}.")
    names = ", ".join(sorted(level.value for level in levels if level)) or "none"
    return Check(PROBLEM, check, f"You may not run {job.name!r} (you have {names}).", ask)


def _applies_to_user(workspace: RemoteWorkspace, entry: JobAccessControlResponse) -> bool:
    user = workspace.user
    return user.name in (entry.user_name, entry.service_principal_name) or entry.group_name in user.groups


def _group_by_path(jobs: list[DeployedJob]) -> dict[str, set[str]]:
    """Maps each path of the workspace that jobs need (notebooks, wheels, settings) to the keys of these jobs."""
    keys: dict[str, set[str]] = {}
    for job in jobs:
        paths = {*job.notebooks, job.parameters.get("conf", "")}
        for task in job.settings.tasks or []:
            paths |= {library.whl or "" for library in task.libraries or []}
        for environment in job.settings.environments or []:
            paths |= set((environment.spec.dependencies if environment.spec else None) or [])
        for path in paths:
            if path.startswith(_WORKSPACE_FOLDERS):
                keys.setdefault(path, set()).add(job.key)
    return keys


def _check_path(workspace: RemoteWorkspace, path: str, keys: str) -> Check:
    found, reason = workspace.request(path, lambda: workspace.client.workspace.get_status(path))
    if found is None:
        return Check(PROBLEM, "path", f"{path}, which {keys} needs, {reason}.", f"Run {workspace.deploy_command}.")
    return Check(OK, "path", f"{path} is there ({keys}).")


def _check_catalog(workspace: RemoteWorkspace, jobs: list[DeployedJob]) -> Iterator[Check]:
    """Checks catalog, schema, volumes and tables, as the deployed jobs name them; without jobs as the bundle does."""
    parameters = [job.parameters for job in jobs or workspace.bundle.jobs.values()]
    places = [each for each in parameters if each.get("catalog") and each.get("schema")]
    if not places:
        what = "Neither jobs nor bundle say where the tables are."
        yield Check(WARNING, "catalog", what, f"Run {workspace.deploy_command}.")
    unity = workspace.client
    calls: dict[str, Callable[[str], Any]] = {
        "catalog": unity.catalogs.get, "schema": unity.schemas.get, "volume": unity.volumes.read,
        "table": unity.tables.exists,
    }  # fmt: skip
    # Jobs share most of them.
    for kind, name, remedy in dict.fromkeys(each for place in places for each in _list_securables(place)):
        yield _check_securable(workspace, kind, name, remedy, calls[kind])


def _list_securables(place: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yields kind, full name and remedy of everything in Unity Catalog that a job with these parameters needs."""
    catalog, schema = place["catalog"], f"{place['catalog']}.{place['schema']}"
    yield "catalog", catalog, f"Create it, or grant USE CATALOG on {catalog}."
    yield "schema", schema, f"CREATE SCHEMA {schema}, or grant USE SCHEMA on it."
    parts = place.get("root", "").split("/")
    if parts[:2] == ["", "Volumes"] and len(parts) >= 5 and all(parts[2:5]):
        volume = ".".join(parts[2:5])
        yield "volume", volume, f"CREATE VOLUME {volume}, or grant READ VOLUME on it."
    for table in (*TABLES, place.get("stream", "")):
        if table:
            remedy = "The first run of ingest or evaluate creates it; else grant SELECT on it."
            yield "table", f"{schema}.{table}", remedy


def _check_securable(
    workspace: RemoteWorkspace, kind: str, name: str, remedy: str, call: Callable[[str], Any]
) -> Check:
    found, reason = workspace.request(f"{kind} {name}", lambda: call(name))
    # For a table that is missing the workspace does not answer 404 but says so in its answer.
    if found is not None and getattr(found, "table_exists", True):
        return Check(OK, kind, f"{name} is there.")
    # Jobs create missing tables; they do not create a catalog, schema or volume.
    return Check(WARNING if kind == "table" else PROBLEM, kind, f"{name} {reason or 'is not there'}.", remedy)


def _check_warehouse(workspace: RemoteWorkspace, warehouse_id: str | None) -> Check:
    ask = "Name one by --warehouse ID, or ask for CAN_USE on one; `lookback remote status` reads by it."
    try:
        found = choose_warehouse(workspace, warehouse_id)
    except RemoteError as error:
        if warehouse_id is None:
            raise
        return Check(PROBLEM, "warehouse", f"{error}.", ask)
    if found is None:
        return Check(PROBLEM, "warehouse", "There is no SQL warehouse that you may use.", ask)
    state = found.state.value.lower() if found.state else "in an unknown state"
    starts = "" if found.state == State.RUNNING else "; `lookback remote status` starts it"
    return Check(OK, "warehouse", f"{found.name} ({found.id}) is {state}{starts}.")
