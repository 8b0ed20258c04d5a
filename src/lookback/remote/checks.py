"""Is the bundle deployed, and is all there that its jobs need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from databricks.sdk.service.jobs import JobAccessControlResponse, JobPermissionLevel
from databricks.sdk.service.sql import EndpointInfo, State

from lookback.core.errors import RemoteError
from lookback.core.operations.health import PROBLEM, WARNING
from lookback.remote.workspace import Deployed, Workspace, in_words

OK = "ok"
# The tables of the product, which the first run of a job makes; a stream's own comes to these.
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
)
_MAY_RUN = {JobPermissionLevel.CAN_MANAGE, JobPermissionLevel.CAN_MANAGE_RUN, JobPermissionLevel.IS_OWNER}


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. level: ok, warning or problem; remedy: what to do, empty where all is well."""

    level: str
    check: str
    what: str
    remedy: str = ""


def deploy_check(workspace: Workspace, warehouse_id: str | None = None) -> Iterator[Check]:
    """Looks at the jobs, what they run, where their tables are, and a SQL warehouse for `status`.

    Raises RemoteError where the workspace does not answer or does not know who asks.
    """
    yield Check(OK, "login", f"{workspace.user.name} at {workspace.host}, target {workspace.bundle.target}")
    jobs: list[Deployed] = []
    for key in sorted(workspace.bundle.jobs):
        found = workspace.find(key)
        jobs += found[:1]
        yield _deployed(workspace, key, found)
        if found:
            yield _may_run(workspace, found[0])
    for path, users in sorted(_paths(jobs).items()):
        yield _path(workspace, path, ", ".join(sorted(users)))
    yield from _catalog(workspace, jobs)
    yield _warehouse(workspace, warehouse_id)


def usable_warehouse(workspace: Workspace, warehouse_id: str | None = None) -> EndpointInfo | None:
    """The SQL warehouse of that id; without one the first that the user may use, a running one before others."""
    with in_words(workspace.host, f"SQL warehouse {warehouse_id}" if warehouse_id else "the SQL warehouses"):
        if warehouse_id:
            found = workspace.client.warehouses.get(warehouse_id)
            return EndpointInfo(id=found.id, name=found.name, state=found.state)
        gone = (State.DELETED, State.DELETING)
        there = [each for each in workspace.client.warehouses.list() if each.state not in gone]
    return min(there, key=lambda each: each.state != State.RUNNING, default=None)


def _deployed(workspace: Workspace, key: str, found: list[Deployed]) -> Check:
    name = workspace.bundle.job_name(key, workspace.user)
    if not found:
        return Check(
            PROBLEM, f"job {key}", f"There is no job {name!r}, or not for you to see.", f"Run {workspace.deploy}."
        )
    if len(found) > 1:
        ids = ", ".join(str(each.job_id) for each in found)
        return Check(PROBLEM, f"job {key}", f"There are {len(found)} jobs {name!r}: {ids}.", "Delete those of old.")
    runs_as = found[0].job.run_as_user_name
    return Check(
        OK, f"job {key}", f"{name!r} is deployed ({found[0].job_id}){f', runs as {runs_as}' if runs_as else ''}."
    )


def _may_run(workspace: Workspace, job: Deployed) -> Check:
    ask = "Ask an owner of the job for CAN_MANAGE_RUN, or add it to the bundle's permissions."
    found, why = workspace.look("permissions", lambda: workspace.client.jobs.get_permissions(str(job.job_id)))
    if found is None:
        return Check(WARNING, f"permission {job.key}", f"Who may run {job.name!r} {why}.", f"Try it. {ask}")
    mine = [entry for entry in found.access_control_list or [] if _is_of(workspace, entry)]
    levels = {each.permission_level for entry in mine for each in entry.all_permissions or []}
    if levels & _MAY_RUN:
        return Check(OK, f"permission {job.key}", f"You may run {job.name!r}.")
    named = ", ".join(sorted(level.value for level in levels if level)) or "none"
    return Check(PROBLEM, f"permission {job.key}", f"You may not run {job.name!r} (you have {named}).", ask)


def _is_of(workspace: Workspace, entry: JobAccessControlResponse) -> bool:
    user = workspace.user
    return user.name in (entry.user_name, entry.service_principal_name) or entry.group_name in user.groups


def _paths(jobs: list[Deployed]) -> dict[str, set[str]]:
    """Paths of the workspace that jobs need -> the keys of the jobs: notebooks, wheels, settings."""
    found: dict[str, set[str]] = {}
    for job in jobs:
        settings = job.job.settings
        paths = {*job.notebooks, job.parameters.get("conf", "")}
        for task in (settings.tasks if settings else None) or []:
            paths |= {library.whl or "" for library in task.libraries or []}
        for environment in (settings.environments if settings else None) or []:
            paths |= set((environment.spec.dependencies if environment.spec else None) or [])
        for path in paths:
            # Others are files of volumes, packages of a registry, or notebooks of a Git repository.
            if path.startswith(("/Workspace/", "/Users/", "/Shared/", "/Repos/")):
                found.setdefault(path, set()).add(job.key)
    return found


def _path(workspace: Workspace, path: str, users: str) -> Check:
    found, why = workspace.look(path, lambda: workspace.client.workspace.get_status(path))
    if found is None:
        return Check(PROBLEM, "path", f"{path}, which {users} needs, {why}.", f"Run {workspace.deploy}.")
    return Check(OK, "path", f"{path} is there ({users}).")


def _catalog(workspace: Workspace, jobs: list[Deployed]) -> Iterator[Check]:
    """Catalog, schema, volumes and tables, as the deployed jobs name them; without jobs as the bundle does."""
    places = [job.parameters for job in jobs if job.parameters.get("catalog") and job.parameters.get("schema")]
    if not places:
        names = {name: workspace.bundle.variables.get(name, "") for name in ("catalog", "schema", "volume", "stream")}
        names = {name: workspace.bundle.resolve(value, workspace.user) for name, value in names.items()}
        if not (names["catalog"] and names["schema"]):
            yield Check(
                WARNING, "catalog", "Neither jobs nor bundle say where the tables are.", f"Run {workspace.deploy}."
            )
            return
        places = [{**names, "root": f"/Volumes/{names['catalog']}/{names['schema']}/{names['volume']}"}]
    unity = workspace.client
    seen: set[str] = set()
    for kind, name, remedy in _securables(places):
        calls: dict[str, Callable[[str], Any]] = {
            "catalog": unity.catalogs.get, "schema": unity.schemas.get, "volume": unity.volumes.read,
            "table": unity.tables.exists,
        }  # fmt: skip
        if name not in seen:
            seen.add(name)
            yield _securable(workspace, kind, name, remedy, calls[kind])


def _securables(places: list[dict[str, str]]) -> Iterator[tuple[str, str, str]]:
    """(kind, full name, remedy) of what the jobs need of Unity Catalog."""
    for place in places:
        catalog, schema = place["catalog"], f"{place['catalog']}.{place['schema']}"
        yield "catalog", catalog, f"Create it, or grant USE CATALOG on {catalog}."
        yield "schema", schema, f"CREATE SCHEMA {schema}, or grant USE SCHEMA on it."
        parts = place.get("root", "").split("/")
        if parts[:2] == ["", "Volumes"] and len(parts) >= 5 and all(parts[2:5]):
            volume = ".".join(parts[2:5])
            yield "volume", volume, f"CREATE VOLUME {volume}, or grant READ VOLUME on it."
        for table in (*TABLES, place.get("stream", "")):
            if table:
                yield (
                    "table",
                    f"{schema}.{table}",
                    "The first run of ingest or evaluate creates it; else grant SELECT on it.",
                )


def _securable(workspace: Workspace, kind: str, name: str, remedy: str, call: Callable[[str], Any]) -> Check:
    found, why = workspace.look(f"{kind} {name}", lambda: call(name))
    # Of tables the workspace answers in the affirmative that one is not there.
    if found is not None and getattr(found, "table_exists", True):
        return Check(OK, kind, f"{name} is there.")
    # Tables come by themselves; what they are in does not.
    return Check(WARNING if kind == "table" else PROBLEM, kind, f"{name} {why or 'is not there'}.", remedy)


def _warehouse(workspace: Workspace, warehouse_id: str | None) -> Check:
    ask = "Name one by --warehouse ID, or ask for CAN_USE on one; `lookback remote status` reads by it."
    try:
        found = usable_warehouse(workspace, warehouse_id)
    except RemoteError as error:
        if warehouse_id is None:
            raise
        return Check(PROBLEM, "warehouse", f"{error}.", ask)
    if found is None:
        return Check(PROBLEM, "warehouse", "There is no SQL warehouse that you may use.", ask)
    state = found.state.value.lower() if found.state else "in an unknown state"
    starts = "" if found.state == State.RUNNING else "; `lookback remote status` starts it"
    return Check(OK, "warehouse", f"{found.name} ({found.id}) is {state}{starts}.")
