"""`lookback remote` against a workspace on this machine, with the payloads of the REST API."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lookback.cli import main
from lookback.core.errors import RemoteError, SetupError
from lookback.remote import runs
from lookback.remote.bundle import Bundle, read_bundle
from lookback.remote.checks import TABLES, check_deployment
from lookback.remote.figures import Query, prepare_queries
from lookback.remote.workspace import RemoteWorkspace, connect, open_workspace
from lookback.spark.tables.schemas import PRODUCT_TABLES
from workspace_server import Answer, Asked, WorkspaceServer, error

FILES = "/Workspace/Users/ann.lee@example.com/.bundle/lookback/dev/files"
WHEEL = "/Workspace/Users/ann.lee@example.com/.bundle/lookback/dev/artifacts/.internal/lookback_rules-0.1.0-py3-none-any.whl"
SCHEMA = "main.lookback_ann_lee"
IDS = {"evaluate": 11, "evaluate_once": 12, "ingest": 13}
NOTEBOOKS = {"evaluate": "03_evaluate_stream", "evaluate_once": "03_evaluate_stream", "ingest": "01_ingest"}
# Of the API, whose numbers of runs are large.
RUN = 455644833
PAGE = "https://adb-1.azuredatabricks.net/?o=1#job/11/run/455644833"


PREFIXES = {"dev": "[dev ann_lee] ", "staging": "staging ", "prod": ""}
STAND_IN = Path(__file__).with_name("databricks_stand_in.py")


class CommandLine:
    """The stand-in for the Databricks CLI. A test changes what it answers by `answer`."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "stand_in.json"
        self.answer()

    def answer(self, **changes: Any) -> None:
        targets = {target: summary(target) for target in PREFIXES}
        self.file.write_text(json.dumps({"default": "dev", "targets": targets, **changes}))

    @property
    def calls(self) -> list[list[str]]:
        file = self.file.with_suffix(".calls")
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def summary(target: str, *, is_deployed: bool = True, **more: Any) -> dict[str, Any]:
    """The output of `databricks bundle summary --output json` for a target, as far as the CLI's source tells."""

    def define(key: str) -> dict[str, Any]:
        settings = {**job(key)["settings"], "name": f"{PREFIXES[target]}lookback-{key.replace('_', '-')}"}
        state = {"id": str(IDS[key]), "url": f"https://adb-1/jobs/{IDS[key]}?o=1"}
        kept = {"kind": "BUNDLE", "metadata_file_path": "/Workspace/state/metadata.json"}
        return {
            **settings, "deployment": kept, "edit_mode": "UI_LOCKED",
            **(state if is_deployed else {"modified_status": "created"}),
        }  # fmt: skip

    return {
        "bundle": {"name": "lookback", "target": target, "environment": target, "mode": "development"},
        "workspace": {
            "current_user": {"userName": "ann.lee@example.com", "short_name": "ann_lee"},
            "file_path": FILES,
        },
        "variables": {"stream": {"description": "Stream.", "value": "payments"}},
        "resources": {"jobs": {key: define(key) for key in IDS}},
        **more,
    }


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "bundle"
    folder.mkdir()
    (folder / "databricks.yml").write_text("bundle: {name: lookback}")
    return folder


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    """Puts the stand-in for the Databricks CLI on the PATH."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "databricks").write_text(f"#!/bin/sh\nexec '{sys.executable}' -ISs '{STAND_IN}' \"$@\"\n")
    (programs / "databricks").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    found = CommandLine(tmp_path)
    monkeypatch.setenv("STAND_IN", str(found.file))
    return found


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cli: CommandLine) -> Iterator[WorkspaceServer]:
    """A workspace with all that the bundle deploys, that nothing runs in. The environment says where it is."""
    for name in (
        "DATABRICKS_CONFIG_PROFILE",
        "DATABRICKS_BUNDLE_TARGET",
        "DATABRICKS_CLIENT_ID",
        "DATABRICKS_WORKSPACE_ID",
    ):
        monkeypatch.delenv(name, raising=False)
    with WorkspaceServer() as server:
        monkeypatch.setenv("DATABRICKS_HOST", server.url)
        monkeypatch.setenv("DATABRICKS_TOKEN", "secret-token")
        monkeypatch.setenv("DATABRICKS_CONFIG_FILE", str(tmp_path / "none.cfg"))
        deploy(server)
        yield server


def job(key: str, **settings: Any) -> dict[str, Any]:
    parameters = {
        "root": "/Volumes/main/lookback_ann_lee/checkpoints", "catalog": "main", "schema": "lookback_ann_lee",
        "conf": f"{FILES}/conf", "stream": "payments",
    }  # fmt: skip
    task = {
        "task_key": key, "job_cluster_key": key, "libraries": [{"whl": WHEEL}],
        "notebook_task": {"notebook_path": f"{FILES}/notebooks/{NOTEBOOKS[key]}", "source": "WORKSPACE"},
    }  # fmt: skip
    if key == "evaluate":
        settings.setdefault("continuous", {"pause_status": "UNPAUSED", "task_retry_mode": "ON_FAILURE"})
    return {
        "job_id": IDS[key],
        "creator_user_name": "ann.lee@example.com",
        "run_as_user_name": "ann.lee@example.com",
        "settings": {
            "name": f"[dev ann_lee] lookback-{key.replace('_', '-')}", "format": "MULTI_TASK",
            "tags": {"product": "lookback"}, "tasks": [task],
            "parameters": [{"name": name, "default": value} for name, value in parameters.items()], **settings,
        },
    }  # fmt: skip


def run(state: str = "RUNNING", **more: Any) -> dict[str, Any]:
    return {
        "run_id": RUN,
        "job_id": 11,
        "run_page_url": PAGE,
        "start_time": 1772359200000,
        "status": {"state": state},
        **more,
    }


def deploy(server: WorkspaceServer, **jobs: dict[str, Any]) -> None:
    found = {key: jobs.get(key, job(key)) for key in IDS}
    permissions = [
        {"user_name": "ann.lee@example.com", "all_permissions": [{"permission_level": "IS_OWNER", "inherited": False}]},
        {"group_name": "admins", "all_permissions": [{"permission_level": "CAN_MANAGE", "inherited": True}]},
    ]

    def listed(asked: Asked) -> Answer:
        # The name is compared as the workspace does: whole, whatever the case.
        named = [each for each in found.values() if each["settings"]["name"].lower() == asked.query["name"].lower()]
        return Answer({"jobs": named, "has_more": False} if named else {"has_more": False})

    def one(asked: Asked) -> Answer:
        return Answer(next(each for each in found.values() if str(each["job_id"]) == asked.query["job_id"]))

    me = {"userName": "ann.lee@example.com", "displayName": "Ann Lee", "groups": [{"display": "users"}], "id": "7"}
    server.replies |= {
        "GET /api/2.0/preview/scim/v2/Me": me,
        "GET /api/2.2/jobs/list": listed,
        "GET /api/2.2/jobs/get": one,
        "GET /api/2.2/jobs/runs/list": {"has_more": False},
        "GET /api/2.2/jobs/runs/get": run(),
        "POST /api/2.2/jobs/run-now": {"run_id": RUN, "number_in_job": RUN},
        "POST /api/2.2/jobs/runs/cancel": {},
        "POST /api/2.2/jobs/update": {},
        "GET /api/2.0/workspace/get-status": lambda asked: Answer(
            {"object_type": "NOTEBOOK", "path": asked.query["path"]}
        ),
        "GET /api/2.1/unity-catalog/catalogs/main": {"name": "main"},
        f"GET /api/2.1/unity-catalog/schemas/{SCHEMA}": {"name": "lookback_ann_lee", "full_name": SCHEMA},
        f"GET /api/2.1/unity-catalog/volumes/{SCHEMA}.checkpoints": {"name": "checkpoints"},
        "GET /api/2.0/sql/warehouses": {"warehouses": [warehouse("a1", "STOPPED"), warehouse("b2", "RUNNING")]},
        "GET /api/2.0/sql/warehouses/a1": warehouse("a1", "STOPPED"),
    }
    for job_id in IDS.values():
        server.replies[f"GET /api/2.0/permissions/jobs/{job_id}"] = {
            "object_id": f"/jobs/{job_id}", "object_type": "job", "access_control_list": permissions
        }  # fmt: skip
    for table in (*TABLES, "payments"):
        server.replies[f"GET /api/2.1/unity-catalog/tables/{SCHEMA}.{table}/exists"] = {"table_exists": True}


def warehouse(id_: str, state: str) -> dict[str, Any]:
    return {"id": id_, "name": f"warehouse {id_}", "state": state, "warehouse_type": "PRO", "cluster_size": "2X-Small"}


def workspace(bundle: Path, retry_seconds: float = 1.0) -> RemoteWorkspace:
    """The workspace of the bundle by a client that soon gives up."""
    client = connect(None, request_seconds=0.3, retry_seconds=retry_seconds)
    return dataclasses.replace(open_workspace(bundle), client=client)


def no_sleep(_: float) -> None:
    """Time passes."""


def remote(bundle: Path, *words: str) -> int:
    return main(["remote", *words, "--bundle", str(bundle)])


# The bundle ----------------------------------------------------------------------------------------------------------


def read(folder: Path, target: str | None = None, profile: str | None = None, seconds: float = 60.0) -> Bundle:
    return read_bundle(folder, target, profile, seconds)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (None, "[dev ann_lee] lookback-evaluate"),
        ("staging", "staging lookback-evaluate"),
        ("prod", "lookback-evaluate"),
    ],
)
def test_job_has_the_name_of_its_target(
    bundle: Path, server: WorkspaceServer, cli: CommandLine, target: str | None, expected: str
) -> None:
    found = read(bundle, target, "fraud")
    assert found.target == (target or "dev")
    assert (found.get_job("evaluate").name, found.get_job("evaluate").job_id) == (expected, 11)
    assert found.get_job("ingest").parameters["stream"] == "payments"
    named = ["--target", target] if target else []
    assert cli.calls == [["bundle", "summary", "--force-pull", "--output", "json", *named, "--profile", "fraud"]]


def test_target_of_the_environment_is_that_of_the_cli(
    bundle: Path, server: WorkspaceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABRICKS_BUNDLE_TARGET", "staging")
    assert read(bundle).target == "staging"


def test_only_jobs_of_the_files_are_jobs_of_the_bundle(bundle: Path, server: WorkspaceServer, cli: CommandLine) -> None:
    found = summary("dev")
    # Deployed once, and taken out of the files since.
    found["resources"]["jobs"]["notify"] = {"id": "15", "modified_status": "deleted", "url": "https://adb-1/jobs/15"}
    cli.answer(targets={"dev": found})
    assert set(read(bundle).jobs) == set(IDS)
    cli.answer(targets={"dev": {**found, "resources": {}}})
    assert read(bundle).jobs == {}


def test_what_is_missing_of_a_bundle_is_said(
    bundle: Path, server: WorkspaceServer, cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SetupError) as caught:
        read(bundle, "test")
    assert str(caught.value) == (
        f"{bundle}/databricks.yml: test: no such target. Available targets: dev, staging, prod; name one with --target"
    )
    cli.answer(default=None)
    with pytest.raises(SetupError, match=r"databricks.yml: please specify target; name one with --target"):
        read(bundle)
    with pytest.raises(SetupError, match=r"there is no .*conf.databricks.yml; run it where the bundle is"):
        read(bundle / "conf")
    cli.answer(required=["node_type"])
    with pytest.raises(
        SetupError, match="the variable node_type has no value in this target; set BUNDLE_VAR_node_type "
    ):
        read(bundle)
    monkeypatch.setenv("BUNDLE_VAR_node_type", "i3.xlarge")
    with pytest.raises(SetupError, match="the bundle has no job 'judge'; it has evaluate, evaluate_once, ingest"):
        read(bundle).get_job("judge")


def test_missing_cli_is_a_sentence_with_the_command_that_installs_it(
    bundle: Path, server: WorkspaceServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    assert remote(bundle, "stop") == 2
    said = capsys.readouterr().err
    assert (
        "the Databricks CLI, by which bundles are read, is not on the PATH: `brew install databricks/tap/databricks`"
        in said
    )
    assert len(said.splitlines()) == 1


NO_LOG_IN = "cannot resolve bundle auth configuration: default auth: databricks-cli: no token"
INVALID = "expected a map, found a sequence\n  at resources.jobs\n  in conf/jobs/x.yml:3:5"


@pytest.mark.parametrize(
    ("code", "stderr", "said"),
    [
        (2, "Usage: databricks [OPTIONS]\n\nError: No such command 'bundle'.\n", "a CLI that has no bundles; install"),
        (
            1,
            f"Warning: x\n\nError: {NO_LOG_IN}. Config: token=***\n\n",
            f"log in ({NO_LOG_IN}): log in with `databricks",
        ),
        (
            1,
            f"Error: {INVALID}\n\nError: more\n",
            f"bundle ({' '.join(INVALID.split())}); `databricks bundle validate`",
        ),
        (9, "", "the Databricks CLI cannot read the bundle (it printed no error); `databricks bundle validate`"),
    ],
    ids=["pip", "log-in", "invalid", "silent"],
)
def test_failure_of_the_cli_is_a_sentence_with_the_remedy(
    bundle: Path,
    server: WorkspaceServer,
    cli: CommandLine,
    capsys: pytest.CaptureFixture[str],
    code: int,
    stderr: str,
    said: str,
) -> None:
    cli.answer(code=code, stderr=stderr)
    assert remote(bundle, "status") == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert len(printed.splitlines()) == 1
    assert printed.startswith(f"lookback: {bundle}/databricks.yml: ")


@pytest.mark.parametrize("stdout", ["Name: lookback", "[]", "{}", '{"bundle": null}'])
def test_output_that_is_no_summary_is_refused(
    bundle: Path, server: WorkspaceServer, cli: CommandLine, stdout: str
) -> None:
    cli.answer(stdout=stdout)
    with pytest.raises(SetupError, match="the output of `databricks bundle summary` cannot be read; install a newer"):
        read(bundle)


def test_cli_that_does_not_end_is_given_up(bundle: Path, server: WorkspaceServer, cli: CommandLine) -> None:
    cli.answer(seconds=60)
    with pytest.raises(RemoteError, match="did not end in time; try again, or allow more with --timeout"):
        read(bundle, seconds=0.2)


def test_bundle_of_another_workspace_is_refused(
    bundle: Path, server: WorkspaceServer, cli: CommandLine, capsys: pytest.CaptureFixture[str]
) -> None:
    for host in (f"{server.url}/", f"{server.url}?o=1", server.url.removeprefix("http://")):
        cli.answer(targets={"dev": summary("dev", workspace={"host": host})})
        assert remote(bundle, "stop") == 0
    capsys.readouterr()
    cli.answer(targets={"dev": summary("dev", workspace={"host": "https://adb-9.azuredatabricks.net"})})
    assert remote(bundle, "stop") == 2
    said = capsys.readouterr().err
    assert f"names the workspace https://adb-9.azuredatabricks.net, and you are logged in to {server.url}" in said


def test_tables_are_those_of_the_product() -> None:
    assert set(TABLES) == set(PRODUCT_TABLES)


# Who asks, and what goes wrong ---------------------------------------------------------------------------------------


def test_credentials_go_with_every_request_and_into_no_output(
    bundle: Path, server: WorkspaceServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert remote(bundle, "deploy-check") == 0
    asked = [each for each in server.asked if each.path.startswith("/api/")]
    assert asked
    assert {each.headers["Authorization"] for each in asked} == {"Bearer secret-token"}
    assert all("lookback/" in each.headers["User-Agent"] for each in asked)
    assert "secret-token" not in "".join(capsys.readouterr())


def test_profile_names_the_workspace(
    bundle: Path, server: WorkspaceServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "some.cfg").write_text(f"[fraud]\nhost = {server.url}\ntoken = of-the-profile\n")
    monkeypatch.setenv("DATABRICKS_CONFIG_FILE", str(tmp_path / "some.cfg"))
    monkeypatch.delenv("DATABRICKS_HOST")
    monkeypatch.delenv("DATABRICKS_TOKEN")
    assert remote(bundle, "stop", "--profile", "fraud") == 0
    assert server.of("GET /api/2.2/jobs/list")[0].headers["Authorization"] == "Bearer of-the-profile"


@pytest.mark.parametrize("host", [True, False])
def test_missing_credentials_are_said(
    bundle: Path,
    server: WorkspaceServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    host: bool,
) -> None:
    monkeypatch.delenv("DATABRICKS_TOKEN")
    monkeypatch.setenv("PATH", "")
    if not host:
        monkeypatch.delenv("DATABRICKS_HOST")
    assert remote(bundle, "start") == 2
    said = capsys.readouterr().err
    assert "there are no credentials for a workspace" in said
    assert "databricks auth login" in said
    assert "DATABRICKS_TOKEN" in said


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (error(401, "UNAUTHENTICATED", "Invalid access token."), "not accepted (401: Invalid access token)"),
        (error(403, "PERMISSION_DENIED", "User is not authorized."), "not allowed (403: User is not authorized)"),
        (error(500, "INTERNAL_ERROR", "Internal error."), "the workspace failed (500: Internal error)"),
        (error(503, "TEMPORARILY_UNAVAILABLE", "Busy.", Retry_After="0"), "is not available for now (503)"),
        (error(429, "REQUEST_LIMIT_EXCEEDED", "Slow down.", Retry_After="0"), "too many requests (429)"),
        (error(400, "INVALID_PARAMETER_VALUE", "No such thing."), "refused (INVALID_PARAMETER_VALUE: No such thing)"),
        (Answer("<html>Sign in to the proxy</html>"), "the answer does not come from a workspace"),
        (Answer({}, seconds=0.5), "no answer in time"),
    ],
    ids=["401", "403", "500", "503", "429", "400", "html", "time-out"],
)
def test_refusal_is_a_sentence_with_the_remedy(
    bundle: Path, server: WorkspaceServer, answer: Answer, said: str
) -> None:
    server.replies["GET /api/2.2/jobs/list"] = answer
    with pytest.raises(RemoteError) as caught:
        workspace(bundle).get_job("evaluate")
    assert str(caught.value).startswith(f"{server.url}: job '[dev ann_lee] lookback-evaluate': ")
    assert said in str(caught.value)
    assert "secret-token" not in str(caught.value)


def test_workspace_that_is_not_there_is_said(
    bundle: Path, server: WorkspaceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with WorkspaceServer() as gone:
        monkeypatch.setenv("DATABRICKS_HOST", gone.url)
    with pytest.raises(RemoteError, match="cannot be reached; is the host right"):
        open_workspace(bundle, request_seconds=0.3, retry_seconds=1.0)


def test_throttled_request_waits_as_long_as_it_is_told(bundle: Path, server: WorkspaceServer) -> None:
    listed = server.replies["GET /api/2.2/jobs/list"]
    assert callable(listed)
    throttled = [error(429, "REQUEST_LIMIT_EXCEEDED", "Slow down.", Retry_After="1")]
    server.replies["GET /api/2.2/jobs/list"] = lambda asked: throttled.pop() if throttled else listed(asked)
    before = time.monotonic()
    assert workspace(bundle, retry_seconds=5).get_job("evaluate").job_id == 11
    assert 1 <= time.monotonic() - before < 4
    assert len(server.of("GET /api/2.2/jobs/list")) == 2


# deploy-check --------------------------------------------------------------------------------------------------------


def checked(bundle: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[dict[str, str]]]:
    code = remote(bundle, "deploy-check", "--json", *words)
    return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_all_that_is_deployed_is_fine(
    bundle: Path, server: WorkspaceServer, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines = checked(bundle, capsys)
    assert (code, {line["level"] for line in lines}) == (0, {"ok"})
    said = [line["what"] for line in lines]
    assert f"ann.lee@example.com at {server.url}, target dev" in said
    assert "'[dev ann_lee] lookback-evaluate' is deployed (11), runs as ann.lee@example.com." in said
    assert f"{FILES}/notebooks/03_evaluate_stream is there (evaluate, evaluate_once)." in said
    assert f"{WHEEL} is there (evaluate, evaluate_once, ingest)." in said
    assert f"{SCHEMA}.checkpoints is there." in said
    assert "warehouse b2 (b2) is running." in said
    # Each thing once, though three jobs need it.
    assert len(said) == len(set(said)) == 1 + 3 + 3 + 4 + 3 + len(TABLES) + 1 + 1


def test_all_that_is_missing_is_a_line_with_a_remedy(
    bundle: Path, server: WorkspaceServer, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = error(404, "RESOURCE_DOES_NOT_EXIST", "not here")
    server.replies["GET /api/2.0/workspace/get-status"] = gone
    for kind, name in (("catalogs", "main"), ("schemas", SCHEMA)):
        server.replies[f"GET /api/2.1/unity-catalog/{kind}/{name}"] = gone
    server.replies[f"GET /api/2.1/unity-catalog/volumes/{SCHEMA}.checkpoints"] = error(
        403, "PERMISSION_DENIED", "no READ"
    )
    server.replies[f"GET /api/2.1/unity-catalog/tables/{SCHEMA}.alerts/exists"] = {"table_exists": False}
    server.replies["GET /api/2.0/permissions/jobs/11"] = {
        "access_control_list": [{"group_name": "users", "all_permissions": [{"permission_level": "CAN_VIEW"}]}]
    }
    server.replies["GET /api/2.0/permissions/jobs/12"] = error(403, "PERMISSION_DENIED", "not a manager")
    server.replies["GET /api/2.0/sql/warehouses"] = {}
    code, lines = checked(bundle, capsys)
    assert code == 1
    wrong = {line["what"]: (line["level"], line["remedy"]) for line in lines if line["level"] != "ok"}
    assert all(remedy for _, remedy in wrong.values())
    assert wrong["main is not there."] == ("problem", "Create it, or grant USE CATALOG on main.")
    assert wrong[f"{SCHEMA} is not there."][0] == "problem"
    assert wrong[f"{SCHEMA}.checkpoints may not be seen by you: no READ."][0] == "problem"
    # The first run makes it.
    assert wrong[f"{SCHEMA}.alerts is not there."][0] == "warning"
    deploy = "Run `databricks bundle deploy --target dev`."
    assert wrong[f"{FILES}/conf, which evaluate, evaluate_once, ingest needs, is not there."] == ("problem", deploy)
    assert wrong["You may not run '[dev ann_lee] lookback-evaluate' (you have CAN_VIEW)."][0] == "problem"
    assert (
        wrong["Who may run '[dev ann_lee] lookback-evaluate-once' may not be seen by you: not a manager."][0]
        == "warning"
    )
    assert wrong["There is no SQL warehouse that you may use."][0] == "problem"


def test_bundle_that_was_never_deployed(
    bundle: Path, server: WorkspaceServer, cli: CommandLine, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.answer(targets={"dev": summary("dev", is_deployed=False)})
    server.replies["GET /api/2.2/jobs/list"] = {"has_more": False}
    code, lines = checked(bundle, capsys, "--warehouse", "a1")
    assert code == 1
    missing = [line for line in lines if line["level"] == "problem"]
    assert [line["check"] for line in missing] == ["job evaluate", "job evaluate_once", "job ingest"]
    assert {line["remedy"] for line in missing} == {"Run `databricks bundle deploy --target dev`."}
    # Where its tables will be, the bundle says.
    assert f"{SCHEMA}.checkpoints is there." in [line["what"] for line in lines]
    assert lines[-1]["what"] == "warehouse a1 (a1) is stopped; `lookback remote status` starts it."


def test_bundle_that_names_no_place_is_a_line(
    bundle: Path, server: WorkspaceServer, cli: CommandLine, capsys: pytest.CaptureFixture[str]
) -> None:
    server.replies["GET /api/2.2/jobs/list"] = {"has_more": False}
    found = summary("dev", is_deployed=False)
    for each in found["resources"]["jobs"].values():
        each["parameters"] = []
    cli.answer(targets={"dev": found})
    _, lines = checked(bundle, capsys)
    (line,) = (line for line in lines if line["check"] == "catalog")
    assert (line["level"], line["what"]) == ("warning", "Neither jobs nor bundle say where the tables are.")


def test_warehouse_that_is_not_there_is_a_line(
    bundle: Path, server: WorkspaceServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert remote(bundle, "deploy-check", "--warehouse", "c3") == 1
    said = capsys.readouterr().out
    assert f"problem: warehouse: {server.url}: SQL warehouse c3: is not there (404" in said
    assert "Name one by --warehouse ID" in said


def test_who_is_not_known_is_told_at_once(
    bundle: Path, server: WorkspaceServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.replies["GET /api/2.0/preview/scim/v2/Me"] = error(401, "UNAUTHENTICATED", "expired")
    assert remote(bundle, "deploy-check") == 2
    assert "who is logged in: the credentials are not accepted (401: expired)" in capsys.readouterr().err


# start and stop ------------------------------------------------------------------------------------------------------


def test_continuous_job_that_waits_is_run_now(bundle: Path, server: WorkspaceServer) -> None:
    assert runs.start_job(workspace(bundle), "evaluate", no_sleep) == PAGE
    (asked,) = server.of("POST /api/2.2/jobs/run-now")
    assert asked.body["job_id"] == 11
    assert len(asked.body["idempotency_token"]) == 32
    assert not server.of("POST /api/2.2/jobs/update")


def test_start_that_is_repeated_as_its_answer_was_lost_is_one_start(bundle: Path, server: WorkspaceServer) -> None:
    server.replies["POST /api/2.2/jobs/run-now"] = [Answer({"run_id": RUN}, seconds=0.5), Answer({"run_id": RUN})]
    assert runs.start_job(workspace(bundle, retry_seconds=5), "evaluate", no_sleep) == PAGE
    first, second = server.of("POST /api/2.2/jobs/run-now")
    assert first.body == second.body


def test_paused_continuous_job_is_unpaused_and_its_run_awaited(bundle: Path, server: WorkspaceServer) -> None:
    paused = {"pause_status": "PAUSED", "task_retry_mode": "ON_FAILURE"}
    deploy(server, evaluate=job("evaluate", continuous=paused))
    server.replies["GET /api/2.2/jobs/runs/list"] = [
        *[Answer({"has_more": False})] * 3,
        Answer({"runs": [run("PENDING")]}),
    ]
    assert runs.start_job(workspace(bundle), "evaluate", no_sleep) == PAGE
    (asked,) = server.of("POST /api/2.2/jobs/update")
    # What else makes it continuous is left as it is.
    unpaused = {"pause_status": "UNPAUSED", "task_retry_mode": "ON_FAILURE"}
    assert asked.body == {"job_id": 11, "new_settings": {"continuous": unpaused}}
    assert not server.of("POST /api/2.2/jobs/run-now")


def test_unpaused_job_whose_run_does_not_come_has_its_own_page(bundle: Path, server: WorkspaceServer) -> None:
    deploy(server, evaluate=job("evaluate", continuous={"pause_status": "PAUSED"}))
    assert runs.start_job(workspace(bundle), "evaluate", no_sleep) == f"{server.url}/jobs/11"


def test_job_that_runs_is_not_started_again(
    bundle: Path, server: WorkspaceServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.replies["GET /api/2.2/jobs/runs/list"] = {"runs": [run()]}
    assert remote(bundle, "start") == 2
    said = capsys.readouterr().err
    assert f"'[dev ann_lee] lookback-evaluate' is running already (RUNNING, {PAGE})" in said
    assert "lookback remote stop --job evaluate" in said
    assert not server.of("POST /api/2.2/jobs/run-now")


def test_job_that_shares_the_checkpoint_of_one_that_runs_is_not_started(bundle: Path, server: WorkspaceServer) -> None:
    def listed(asked: Asked) -> Answer:
        return Answer({"runs": [run()]} if asked.query["job_id"] == "11" else {})

    server.replies["GET /api/2.2/jobs/runs/list"] = listed
    with pytest.raises(RemoteError, match=r"lookback-evaluate' is running already .* stop --job evaluate`"):
        runs.start_job(workspace(bundle), "evaluate_once", no_sleep)
    # Ingest judges nothing, so it may.
    assert runs.start_job(workspace(bundle), "ingest", no_sleep) == PAGE


def test_stop_pauses_first_and_then_cancels(
    bundle: Path, server: WorkspaceServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.replies["GET /api/2.2/jobs/runs/list"] = {"runs": [run()]}
    assert remote(bundle, "stop") == 0
    changes = [(asked.path, asked.body) for asked in server.asked if asked.method == "POST"]
    paused = {"pause_status": "PAUSED", "task_retry_mode": "ON_FAILURE"}
    assert changes == [
        ("/api/2.2/jobs/update", {"job_id": 11, "new_settings": {"continuous": paused}}),
        ("/api/2.2/jobs/runs/cancel", {"run_id": RUN}),
    ]
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("paused '[dev ann_lee] lookback-evaluate': no run begins until")
    assert second.startswith(f"cancelled run {RUN} (RUNNING)")


def test_stop_of_what_does_not_run_says_so(bundle: Path, server: WorkspaceServer) -> None:
    deploy(server, evaluate=job("evaluate", continuous={"pause_status": "PAUSED"}))
    assert runs.stop_job(workspace(bundle), "evaluate") == [
        "'[dev ann_lee] lookback-evaluate' was not running and is paused"
    ]
    assert runs.stop_job(workspace(bundle), "ingest") == ["'[dev ann_lee] lookback-ingest' was not running"]
    assert not [asked for asked in server.asked if asked.method == "POST"]


def test_jobs_of_one_name_are_refused(bundle: Path, server: WorkspaceServer) -> None:
    twin = {**job("evaluate"), "job_id": 14}
    server.replies["GET /api/2.2/jobs/list"] = {"jobs": [job("evaluate"), twin]}
    server.replies["GET /api/2.2/jobs/get"] = lambda asked: Answer({**twin, "job_id": int(asked.query["job_id"])})
    with pytest.raises(RemoteError, match=r"has 2 jobs '\[dev ann_lee\] lookback-evaluate' \(11, 14\)"):
        workspace(bundle).get_job("evaluate")
    (line,) = [each for each in check_deployment(workspace(bundle)) if each.check == "job evaluate"]
    said = "There are 2 jobs '[dev ann_lee] lookback-evaluate': 11, 14."
    assert (line.level, line.what, line.remedy) == ("problem", said, "Delete the old ones.")


def test_job_that_was_renamed_by_hand_is_found_by_its_number(bundle: Path, server: WorkspaceServer) -> None:
    server.replies["GET /api/2.2/jobs/list"] = {"has_more": False}
    assert workspace(bundle).get_job("evaluate").job_id == 11


@pytest.mark.parametrize(
    "answer",
    [
        error(400, "INVALID_PARAMETER_VALUE", "Job 11 does not exist."),
        error(403, "PERMISSION_DENIED", "User does not have View permissions on job 11."),
    ],
    ids=["deleted", "hidden"],
)
def test_job_that_was_deleted_by_hand_is_not_there(bundle: Path, server: WorkspaceServer, answer: Answer) -> None:
    server.replies["GET /api/2.2/jobs/list"] = {"has_more": False}
    server.replies["GET /api/2.2/jobs/get"] = answer
    deploy_command = "`databricks bundle deploy --target dev`, or ask for CAN_VIEW on it"
    with pytest.raises(RemoteError, match=f"has no job .* that you may see: {deploy_command}"):
        workspace(bundle).get_job("evaluate")


# logs ----------------------------------------------------------------------------------------------------------------


def task(state: str, code: str | None = None, message: str = "", **more: Any) -> dict[str, Any]:
    details = {"termination_details": {"code": code, "type": "CLIENT_ERROR", "message": message}} if code else {}
    return {
        "run_id": 9001,
        "task_key": "evaluate",
        "start_time": 1772359200000,
        "status": {"state": state, **details},
        **more,
    }


def test_run_is_followed_to_its_end(bundle: Path, server: WorkspaceServer, capsys: pytest.CaptureFixture[str]) -> None:
    said = "Workload failed, see run output for details"
    failed = {
        "state": "TERMINATED",
        "termination_details": {"code": "RUN_EXECUTION_ERROR", "type": "CLIENT_ERROR", "message": said},
    }
    server.replies["GET /api/2.2/jobs/runs/list"] = {"runs": [run()]}
    server.replies["GET /api/2.2/jobs/runs/get"] = [
        Answer(
            run(
                "QUEUED",
                status={
                    "state": "QUEUED",
                    "queue_details": {"code": "MAX_CONCURRENT_RUNS_REACHED", "message": "Queued."},
                },
            )
        ),
        Answer(run(tasks=[task("RUNNING")])),
        Answer(run(tasks=[task("RUNNING")])),
        Answer(
            run(
                status=failed,
                end_time=1772359260000,
                tasks=[task("TERMINATED", "RUN_EXECUTION_ERROR", said, end_time=1772359260000)],
            )
        ),
    ]
    server.replies["GET /api/2.2/jobs/runs/get-output"] = {
        "metadata": run(),
        "error": "StateError: these pages are of layout 9",
        "error_trace": "\x1b[0;31mStateError\x1b[0m\n  in cell 4\n\x07  judged",
    }
    lines = list(runs.follow_run(workspace(bundle), "evaluate", until_end=True, sleep=no_sleep))
    assert [(line.task, line.state) for line in lines] == [
        ("", "QUEUED"), ("", "RUNNING"), ("evaluate", "RUNNING"), ("", "RUN_EXECUTION_ERROR"),
        ("evaluate", "RUN_EXECUTION_ERROR"), ("evaluate", "ERROR"),
    ]  # fmt: skip
    assert lines[0].message == "Queued."
    assert lines[3].at == dt.datetime(2026, 3, 1, 10, 1, tzinfo=dt.timezone.utc)
    assert server.of("GET /api/2.2/jobs/runs/get-output")[0].query == {"run_id": "9001"}
    assert remote(bundle, "logs", "--run", str(RUN), "--follow") == 1
    assert capsys.readouterr().out.splitlines() == [
        f"2026-03-01T10:01:00Z RUN_EXECUTION_ERROR: {said}",
        f"2026-03-01T10:01:00Z evaluate RUN_EXECUTION_ERROR: {said}",
        "2026-03-01T10:01:00Z evaluate ERROR: StateError: these pages are of layout 9",
        "  StateError",
        "    in cell 4",
        "  \\x07  judged",
    ]


def test_without_follow_a_run_is_told_as_it_stands(bundle: Path, server: WorkspaceServer) -> None:
    server.replies["GET /api/2.2/jobs/runs/list"] = {"runs": [run()]}
    server.replies["GET /api/2.2/jobs/runs/get"] = {
        **run(),
        "tasks": [{**task("TERMINATED", "SUCCESS"), "status": None}],
    }
    lines = list(runs.follow_run(workspace(bundle), "evaluate", until_end=False, sleep=no_sleep))
    assert [line.state for line in lines] == ["RUNNING", "UNKNOWN"]
    assert server.of("GET /api/2.2/jobs/runs/list")[0].query == {"job_id": "11", "limit": "1"}


def test_each_attempt_of_a_task_is_told(bundle: Path, server: WorkspaceServer) -> None:
    attempts = [task("TERMINATED", "DRIVER_ERROR", attempt_number=0), task("RUNNING", attempt_number=1, run_id=9002)]
    server.replies["GET /api/2.2/jobs/runs/get"] = run(tasks=attempts)
    server.replies["GET /api/2.2/jobs/runs/get-output"] = error(404, "RESOURCE_DOES_NOT_EXIST", "expired")
    lines = list(runs.follow_run(workspace(bundle), "evaluate", RUN))
    assert [(line.attempt, line.state, line.message) for line in lines[1:]] == [
        (0, "DRIVER_ERROR", ""), (1, "RUNNING", ""), (0, "ERROR", "the output is not there"),
    ]  # fmt: skip


def test_cancelled_run_is_no_failure(bundle: Path, server: WorkspaceServer) -> None:
    ended = task("TERMINATED", "USER_CANCELED", "Run cancelled.")
    server.replies["GET /api/2.2/jobs/runs/get"] = run(status=ended["status"], tasks=[ended])
    assert remote(bundle, "logs", "--run", str(RUN), "--follow") == 0


def test_job_without_runs_has_no_logs(bundle: Path, server: WorkspaceServer) -> None:
    with pytest.raises(RemoteError, match="has not run yet: `lookback remote start --job evaluate`"):
        list(runs.follow_run(workspace(bundle), "evaluate"))


# status --------------------------------------------------------------------------------------------------------------

NOW = 1772359200  # 2026-03-01T10:00:00Z
SAMPLE = {
    "at_us": str((NOW - 5) * 1_000_000), "recent": "true", "events": "1200", "late": "0", "discarded": "0",
    "lag_seconds": "0.000", "watermark": str((NOW - 20) * 1_000_000), "state_rows": "5000", "run_ms": "300",
    "evaluate_ms": "100", "write_ms": "100", "judged": "7",
    "by_rule": '{"big":{"evaluated":1200,"matched":1500,"suppressed":100,"failed":0}}',
}  # fmt: skip
# What a query is told by -> the rows of its answer.
ROWS: dict[str, list[dict[str, str | None]]] = {
    "`metrics`": [SAMPLE],
    "`rules`": [{"rule_id": "big", "version": "1", "status": "active", "document": '{"stream": "payments"}'},
                {"rule_id": "odd", "version": "1", "status": "active", "document": "no JSON"},
                {"rule_id": "other", "version": "1", "status": "active", "document": '{"stream": "logins"}'}],
    "DESCRIBE HISTORY": [
        {"version": "8", "timestamp": "2026-03-01T09:59:58.000Z", "operation": "OPTIMIZE", "operationMetrics": "{}"},
        {"version": "7", "timestamp": "2026-03-01T09:59:50Z", "operation": "WRITE", "operationMetrics": '{"numOutputRows":"9"}'},
    ],
    "`rejected_events`": [{"counted": "0", "reason": None}],
    "`rule_log`": [],
}  # fmt: skip


def succeeded(rows: list[dict[str, str | None]], **result: Any) -> Answer:
    columns = [
        {"name": name, "type_name": "STRING", "type_text": "STRING", "position": at}
        for at, name in enumerate(rows[0] if rows else {})
    ]
    return Answer(
        {
            "statement_id": "01f0-1", "status": {"state": "SUCCEEDED"},
            "manifest": {"format": "JSON_ARRAY", "schema": {"column_count": len(columns), "columns": columns}},
            "result": {"chunk_index": 0, "row_offset": 0, "data_array": [list(row.values()) for row in rows], **result},
        }
    )  # fmt: skip


def told(asked: Asked, rows: dict[str, list[dict[str, str | None]]] = ROWS) -> Answer:
    return succeeded(next(found for part, found in rows.items() if part in asked.body["statement"]))


@pytest.fixture
def at_ten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock stands at NOW."""
    monkeypatch.setattr("lookback.commands.remote.time.time", lambda: NOW)


def test_health_is_told_in_the_words_of_local_status(
    bundle: Path, server: WorkspaceServer, at_ten: None, capsys: pytest.CaptureFixture[str]
) -> None:
    server.replies["POST /api/2.0/sql/statements"] = told
    server.replies["GET /api/2.2/jobs/runs/list"] = {"runs": [run()]}
    assert remote(bundle, "status") == 0
    assert capsys.readouterr().out.splitlines() == [
        f"[dev ann_lee] lookback-evaluate: RUNNING {PAGE}",
        "payments needs a look (1 warning): judged through commit 7, nothing waits, last heard of 5 seconds ago.",
        "  warning: Rule big raised 1,400 alerts within the last hour, 100% of all.",
        "    Raise its limit, give it `suppress`, or pause it: lookback rules pause big.",
    ]
    assert remote(bundle, "status", "--check", "--json") == 1
    row = json.loads(capsys.readouterr().out)
    assert (row["healthy"], row["judged"], row["commits"], row["lag_commits"], row["rules"]) == (False, 7, 8, 0, 1)
    assert (row["job_state"], row["run"]) == ("RUNNING", PAGE)
    asked = server.of("POST /api/2.0/sql/statements")
    # The running warehouse rather than the first; values go apart from the text.
    assert {each.body["warehouse_id"] for each in asked} == {"b2"}
    assert all("payments'" not in each.body["statement"] for each in asked)
    assert {"name": "stream", "value": "payments"} in asked[0].body["parameters"]
    assert "FROM `main`.`lookback_ann_lee`.`metrics`" in asked[0].body["statement"]


def test_evaluation_that_has_stopped_is_told(
    bundle: Path, server: WorkspaceServer, at_ten: None, capsys: pytest.CaptureFixture[str]
) -> None:
    old = {**SAMPLE, "at_us": str((NOW - 7200) * 1_000_000), "recent": "false", "judged": "5"}
    history = [{**row, "timestamp": "2026-03-01T09:00:00.000Z"} for row in ROWS["DESCRIBE HISTORY"]]
    rows = {**ROWS, "`metrics`": [old], "DESCRIBE HISTORY": history}
    deploy(server, evaluate=job("evaluate", continuous={"pause_status": "PAUSED"}))
    server.replies["POST /api/2.0/sql/statements"] = lambda asked: told(asked, rows)
    assert remote(bundle, "status", "--warehouse", "a1") == 0
    said = capsys.readouterr().out
    assert said.startswith("[dev ann_lee] lookback-evaluate: has not run yet, paused\n")
    assert (
        "problem: The evaluation is not running: it was last heard of 2 hours ago, and 1 commit of events waits" in said
    )
    assert server.of("POST /api/2.0/sql/statements")[0].body["warehouse_id"] == "a1"


def test_query_that_takes_long_is_waited_for_and_read_to_its_last_chunk(bundle: Path, server: WorkspaceServer) -> None:
    pending = Answer({"statement_id": "01f0-1", "status": {"state": "PENDING"}})
    server.replies["POST /api/2.0/sql/statements"] = pending
    server.replies["GET /api/2.0/sql/statements/01f0-1"] = [pending, succeeded([{"n": "1"}], next_chunk_index=1)]
    server.replies["GET /api/2.0/sql/statements/01f0-1/result/chunks/1"] = {"chunk_index": 1, "data_array": [["2"]]}
    execute = prepare_queries(workspace(bundle), "a1", sleep=no_sleep)
    assert execute(Query("SELECT n", {})) == [{"n": "1"}, {"n": "2"}]


def test_query_that_takes_too_long_is_cancelled(bundle: Path, server: WorkspaceServer) -> None:
    server.replies["POST /api/2.0/sql/statements"] = {"statement_id": "01f0-1", "status": {"state": "PENDING"}}
    server.replies["POST /api/2.0/sql/statements/01f0-1/cancel"] = {}
    execute = prepare_queries(workspace(bundle), "a1", seconds=0, sleep=no_sleep)
    with pytest.raises(RemoteError, match="no answer to a query within 0 seconds; it was cancelled"):
        execute(Query("SELECT n", {}))
    assert server.of("POST /api/2.0/sql/statements/01f0-1/cancel")


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("[TABLE_OR_VIEW_NOT_FOUND] The table cannot be found.", "the first run of ingest or evaluate creates"),
        ("[INSUFFICIENT_PERMISSIONS] User does not have SELECT.", "ask for USE CATALOG, USE SCHEMA and SELECT"),
        ("[DIVIDE_BY_ZERO] Division by zero.", "a query failed"),
    ],
)
def test_query_that_fails_is_told(bundle: Path, server: WorkspaceServer, message: str, said: str) -> None:
    status = {"state": "FAILED", "error": {"error_code": "BAD_REQUEST", "message": message}}
    server.replies["POST /api/2.0/sql/statements"] = {"statement_id": "01f0-1", "status": status}
    with pytest.raises(RemoteError) as caught:
        prepare_queries(workspace(bundle), "a1")(Query("SELECT n", {}))
    assert said in str(caught.value)
    assert message in str(caught.value)
