"""The Databricks bundle, as far as it can be checked without a workspace.

Each job goes through the model of the package databricks-bundles with the values of each target in place of its
variables. Strictly: what the model would bring into form (a number as text, an unknown key) is a mistake here.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import venv
import zipfile
import zoneinfo
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from databricks.bundles.dashboards import Dashboard
from databricks.bundles.jobs import Job
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from lookback.config import Settings, load_streams
from lookback.core.values.durations import parse_duration
from lookback.parameters import _parse

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "conf" / "jobs"
BUNDLE: dict[str, Any] = yaml.safe_load((ROOT / "databricks.yml").read_text(encoding="utf-8"))
FILES = {path: yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.yml"))}
JOBS: dict[str, dict[str, Any]] = {
    name: job for document in FILES.values() for name, job in document["resources"]["jobs"].items()
}
CLUSTERS: dict[str, dict[str, Any]] = {
    name: cluster for document in FILES.values() for name, cluster in document["resources"].get("clusters", {}).items()
}
BOARD_FILES = {
    path: yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "conf/dashboards").glob("*.yml"))
}
BOARDS: dict[str, dict[str, Any]] = {
    name: board for document in BOARD_FILES.values() for name, board in document["resources"]["dashboards"].items()
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
RUNTIMES = ROOT / "tests" / "data" / "runtimes"
# The packages that no runtime has, or not in the version that is pinned.
INSTALLED = ("sqlglot", "pyahocorasick", "tzdata")
REFERENCE = re.compile(r"\$\{([^}]*)\}")
# What the command-line interface of Databricks knows of a bundle without asking its files.
GIVEN = {
    "bundle.name": "lookback",
    "bundle.target": "dev",
    "workspace.file_path": "/Workspace/Users/ann@example.com/.bundle/lookback/dev/files",
    "workspace.current_user.short_name": "ann",
    "workspace.current_user.userName": "ann@example.com",
    "resources.clusters.analysts.id": "0101-120000-abcdefgh",
}
# Without a value in a target, so asked for there: what differs from workspace to workspace.
ASKED = {
    "dev": {"node_type", "warehouse_id"},
    "staging": {"node_type", "warehouse_id", "service_principal", "analysts", "engineers", "notify"},
    "prod": {"node_type", "warehouse_id", "service_principal", "analysts", "engineers", "notify"},
}
TARGETS = list(ASKED)


def resolved(value: Any, target: str) -> Any:
    """A value with what its references stand for; one that is a reference as a whole takes the type too."""
    if isinstance(value, dict):
        return {key: resolved(each, target) for key, each in value.items()}
    if isinstance(value, list):
        return [resolved(each, target) for each in value]
    if not isinstance(value, str):
        return value
    whole = REFERENCE.fullmatch(value)
    if whole:
        return looked_up(whole[1], target)
    return REFERENCE.sub(lambda match: str(looked_up(match[1], target)), value)


def looked_up(path: str, target: str) -> Any:
    root, _, name = path.partition(".")
    if root == "var":
        assert name in BUNDLE["variables"], f"{path} is not declared"
        values = BUNDLE["targets"][target]["variables"]
        return resolved(values[name], target) if name in values else f"the-{name}"
    assert path in GIVEN, f"${{{path}}} is nothing that a bundle knows"
    return GIVEN[path]


def require_strict(job: dict[str, Any]) -> None:
    """Raises where the model does not take a job exactly as it stands."""
    taken = Job.from_dict(json.loads(json.dumps(job))).as_dict()
    if taken != job:
        raise ValueError(f"the model makes of it {taken}")


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all mappings within a value, itself included."""
    if isinstance(value, dict):
        yield path
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in parts:
        yield from places(each, (*path, key))


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def tasks() -> Iterator[tuple[Path, dict[str, Any], dict[str, Any]]]:
    """(file, job, task) of every task."""
    for path, document in FILES.items():
        for job in document["resources"]["jobs"].values():
            for task in job["tasks"]:
                yield path, job, task


# The bundle itself ---------------------------------------------------------------------------------------------------


def test_the_bundle_has_no_key_that_is_not_one_of_a_bundle() -> None:
    assert set(BUNDLE) == {"bundle", "include", "sync", "variables", "artifacts", "targets"}
    assert BUNDLE["bundle"] == {"name": "lookback", "engine": "direct", "databricks_cli_version": ">= 0.281.0"}
    for document in FILES.values():
        assert set(document) == {"resources"}
        assert set(document["resources"]) <= {"clusters", "jobs"}
    for document in BOARD_FILES.values():
        assert set(document) == {"resources"}
        assert set(document["resources"]) == {"dashboards"}
    known = {"mode", "default", "presets", "workspace", "run_as", "permissions", "resources", "variables"}
    assert all(set(target) <= known for target in BUNDLE["targets"].values())


def test_the_bundle_includes_every_job_once() -> None:
    included = {path for pattern in BUNDLE["include"] for path in ROOT.glob(pattern)}
    assert included == {*FILES, *BOARD_FILES}
    assert set(BOARDS) == {"lookback"}
    names = [name for document in FILES.values() for name in document["resources"]["jobs"]]
    assert sorted(names) == [
        "analysts",
        "evaluate",
        "evaluate_once",
        "evaluate_serverless",
        "forget",
        "ingest",
        "maintain",
        "notify",
        "prove",
        "set_up",
    ]
    assert all(path.stem in document["resources"]["jobs"] for path, document in FILES.items())


def test_what_is_uploaded_is_what_jobs_need() -> None:
    left = {pattern.removesuffix("/**") for pattern in BUNDLE["sync"]["exclude"]}
    assert set(BUNDLE["sync"]) == {"exclude"}
    # Such a file in a folder of the workspace is a dashboard of its own, beside the one that the bundle makes of it.
    assert {path.relative_to(ROOT).parent.as_posix() for path in ROOT.glob("conf/**/*.lvdash.json")} == {
        "conf/dashboards"
    }
    left.remove("conf/dashboards")
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith((".", "dist"))}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {name for name in folders if f"\n{name}/" in f"\n{tracked}"} - left == {"conf", "notebooks"}
    assert left <= folders


def test_variables_say_what_they_are_and_values_stand_in_targets_alone() -> None:
    assert list(BUNDLE["targets"]) == TARGETS
    for name, variable in BUNDLE["variables"].items():
        assert set(variable) == {"description"}, name
        assert variable["description"].endswith("."), name
    for target in TARGETS:
        assert set(BUNDLE["variables"]) - set(BUNDLE["targets"][target]["variables"]) == ASKED[target], target
        assert set(BUNDLE["targets"][target]["variables"]) <= set(BUNDLE["variables"]), target


def test_every_variable_is_used_and_every_reference_leads_somewhere() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "databricks.yml", *FILES, *BOARD_FILES)]
    paths = {path for text in texts for path in REFERENCE.findall(text)}
    assert {path.removeprefix("var.") for path in paths if path.startswith("var.")} == set(BUNDLE["variables"])
    for path in paths:
        looked_up(path, "dev")
    with pytest.raises(AssertionError):
        looked_up("var.catalogue", "dev")
    with pytest.raises(AssertionError):
        looked_up("workspace.filepath", "dev")


@pytest.mark.parametrize("target", ["staging", "prod"])
def test_what_others_use_runs_as_the_service_and_is_looked_after_by_groups(target: str) -> None:
    document = BUNDLE["targets"][target]
    assert document["mode"] == "production"
    assert document["run_as"] == {"service_principal_name": "${var.service_principal}"}
    assert levels_of(document["permissions"]) == {
        "${var.service_principal}": "CAN_MANAGE", "${var.engineers}": "CAN_MANAGE", "${var.analysts}": "CAN_RUN",
    }  # fmt: skip
    # Whatever is under /Workspace/Shared anybody may change, and the service would run it.
    assert document["workspace"] == {
        "root_path": "/Workspace/Users/${var.service_principal}/.bundle/${bundle.name}/${bundle.target}"
    }


# What a level of the whole bundle is on a resource of a kind, by the command-line interface's own table, and on the folder of
# the files. A resource that names a group itself keeps that level.
LEVELS = {
    "files": {"CAN_MANAGE": "CAN_MANAGE", "CAN_RUN": "CAN_RUN", "CAN_VIEW": "CAN_READ"},
    "jobs": {"CAN_MANAGE": "CAN_MANAGE", "CAN_RUN": "CAN_MANAGE_RUN", "CAN_VIEW": "CAN_VIEW"},
    "clusters": {"CAN_MANAGE": "CAN_MANAGE", "CAN_RUN": "CAN_RESTART", "CAN_VIEW": "CAN_ATTACH_TO"},
    # CAN_RUN of the bundle gives nothing on a dashboard.
    "dashboards": {"CAN_MANAGE": "CAN_MANAGE", "CAN_VIEW": "CAN_READ"},
}


def levels_of(permissions: list[dict[str, str]]) -> dict[str, str]:
    """Principal -> level."""
    return {entry.get("group_name", entry.get("service_principal_name", "")): entry["level"] for entry in permissions}


def level_on(target: str, kind: str, name: str, principal: str) -> str:
    """Returns a principal's permission on a resource of a target: the resource's own, else the target's."""
    document = BUNDLE["targets"][target]
    own = document["resources"].get(kind, {}).get(name, {}).get("permissions", [])
    return levels_of(own).get(principal) or LEVELS[kind][levels_of(document["permissions"])[principal]]


@pytest.mark.parametrize("target", ["staging", "prod"])
def test_analysts_run_notebooks_on_their_cluster_and_start_no_job_of_the_service(target: str) -> None:
    analysts = "${var.analysts}"
    # To run a cell takes CAN_RUN of its notebook, and to start a cluster that has ended CAN_RESTART; less only attaches.
    assert level_on(target, "files", "", analysts) == "CAN_RUN"
    assert {name: level_on(target, "clusters", name, analysts) for name in CLUSTERS} == {"analysts": "CAN_RESTART"}
    # A job runs as the service, with parameters of whoever starts it: set_up grants, forget deletes.
    assert {level_on(target, "jobs", name, analysts) for name in JOBS} == {"CAN_VIEW"}
    assert set(BUNDLE["targets"][target]["resources"]["jobs"]) == set(JOBS)
    assert {level_on(target, "jobs", name, "${var.engineers}") for name in JOBS} == {"CAN_MANAGE"}


@pytest.mark.parametrize("target", ["staging", "prod"])
def test_analysts_see_the_dashboard_and_engineers_change_it(target: str) -> None:
    assert {name: level_on(target, "dashboards", name, "${var.analysts}") for name in BOARDS} == {
        "lookback": "CAN_READ"
    }
    assert {level_on(target, "dashboards", name, "${var.engineers}") for name in BOARDS} == {"CAN_MANAGE"}
    assert set(BUNDLE["targets"][target]["resources"]) == {"jobs", "dashboards"}


@pytest.mark.parametrize("target", TARGETS)
def test_a_dashboard_is_one_of_the_model_and_is_shown_by_the_viewers_own_grants(target: str) -> None:
    for path, document in BOARD_FILES.items():
        for name, dashboard in document["resources"]["dashboards"].items():
            given = resolved(dashboard, target)
            assert Dashboard.from_dict(json.loads(json.dumps(given))).as_dict() == given
            assert not given["embed_credentials"]
            assert (path.parent / given["file_path"]).is_file()
            assert given["display_name"] == name
            assert given["dataset_catalog"] == resolved("${var.catalog}", target)
            assert given["dataset_schema"] == resolved("${var.schema}", target)
            with pytest.raises((ValueError, TypeError)):
                Dashboard.from_dict({**given, "nonsense": "x"})  # type: ignore[typeddict-unknown-key]


def test_the_analysts_cluster_is_shared_gets_the_wheel_and_is_one_of_the_model() -> None:
    (cluster,) = CLUSTERS.values()
    # Of one user at a time, or without isolation, it would be nobody's own grants and name.
    assert cluster["data_security_mode"] == "USER_ISOLATION"
    for target in TARGETS:
        require_strict({"name": "x", "job_clusters": [{"job_cluster_key": "x", "new_cluster": plain(cluster, target)}]})
    (task,) = JOBS["analysts"]["tasks"]
    assert task["existing_cluster_id"] == "${resources.clusters.analysts.id}"
    assert packages_of(JOBS["analysts"], task)[0].endswith("dist/*.whl")
    given = {parameter["name"]: parameter["default"] for parameter in JOBS["analysts"]["parameters"]}
    assert given["disposition"] == given["alert_id"] == ""


def plain(cluster: dict[str, Any], target: str) -> dict[str, Any]:
    """Keys that a cluster of a job may have too."""
    own = ("cluster_name", "autotermination_minutes")
    return {key: value for key, value in resolved(cluster, target).items() if key not in own}


@pytest.mark.parametrize("target", TARGETS)
def test_values_name_what_there_is(target: str) -> None:
    values = {name: resolved(f"${{var.{name}}}", target) for name in BUNDLE["variables"]}
    assert values["stream"] in load_streams(ROOT / "conf")
    assert (ROOT / "conf" / "profiles" / f"{values['profile']}.yml").is_file()
    # Its workers have 1 GB each.
    serverless = {each["name"]: each["default"] for each in JOBS["evaluate_serverless"]["parameters"]}
    assert serverless["profile"] == "serverless"
    assert Settings.local(conf=ROOT / "conf", profile="serverless").admission["maxBytesPerTrigger"] == "1m"
    assert values["source_format"] in ("parquet", "csv", "json")
    assert re.fullmatch(rf"/Volumes/{values['catalog']}/{values['schema']}/\w+/.*/", values["source_path"])
    # One evaluation at a time has the checkpoint.
    assert [values["evaluate_continuously"], values["evaluate_on_update"]].count("UNPAUSED") <= 1


# Jobs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", JOBS)
def test_a_job_is_one_of_the_model_to_the_letter(name: str, target: str) -> None:
    require_strict(resolved(JOBS[name], target))


@pytest.mark.parametrize("name", JOBS)
def test_a_key_that_the_model_does_not_know_is_refused_wherever_it_stands(name: str) -> None:
    # In these anything may be a key.
    free = ("base_parameters", "tags", "custom_tags", "spark_conf")
    for path in places(resolved(JOBS[name], "dev")):
        if path and path[-1] in free:
            continue
        job = resolved(JOBS[name], "dev")
        at(job, path)["nonsense"] = "x"
        with pytest.raises((ValueError, TypeError)):
            require_strict(job)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("trigger", "pause_status"), "unpaused"),
        (("trigger", "table_update", "condition"), "ANY"),
        (("environments", 0, "spec", "environment_version"), 5),
        (("timeout_seconds",), "14400"),
        (("queue", "enabled"), "yes"),
        (("tasks", 0, "max_retries"), 2.5),
        (("health", "rules", 0, "op"), ">"),
        (("job_clusters", 0, "new_cluster", "data_security_mode"), "DEDICATED"),
    ],
)
def test_a_value_that_is_none_of_its_kind_is_refused(path: tuple[Any, ...], value: Any) -> None:
    (job,) = [resolved(JOBS[name], "dev") for name in ("evaluate_serverless", "evaluate") if path[0] in JOBS[name]][:1]
    at(job, path[:-1])[path[-1]] = value
    with pytest.raises((ValueError, TypeError)):
        require_strict(job)


@pytest.mark.parametrize("name", JOBS)
def test_a_job_says_what_it_is_and_tells_somebody_when_it_fails(name: str) -> None:
    job = JOBS[name]
    assert job["name"] == f"lookback-{name.replace('_', '-')}"
    assert job["description"].endswith(".")
    assert job["email_notifications"]["on_failure"] == ["${var.notify}"]
    assert job["tags"] == {"product": "lookback", "target": "${bundle.target}"}
    # A threshold tells nobody without an address, and an address is of no use without a threshold.
    warned = "on_duration_warning_threshold_exceeded" in job["email_notifications"]
    metrics = {rule["metric"] for rule in job.get("health", {}).get("rules", [])}
    assert warned == ("RUN_DURATION_SECONDS" in metrics)
    # A run without end is told by what waits, which is told for streaming queries alone.
    behind = "on_streaming_backlog_exceeded" in job["email_notifications"]
    assert behind == (metrics == {"STREAMING_BACKLOG_SECONDS", "STREAMING_BACKLOG_FILES"})
    if warned:
        (rule,) = job["health"]["rules"]
        assert (rule["metric"], rule["value"] < job["timeout_seconds"]) == ("RUN_DURATION_SECONDS", True)


def test_in_prod_time_goes_on_where_nothing_comes() -> None:
    assert parse_duration(resolved("${var.idle_after}", "prod")) == parse_duration("15 minutes")
    parameters = {parameter["name"]: parameter["default"] for parameter in JOBS["evaluate"]["parameters"]}
    assert parameters["idle_after"] == "${var.idle_after}"


def test_what_ends_is_queued_limited_and_retried_and_what_does_not_end_is_begun_again_by_databricks() -> None:
    assert [name for name, job in JOBS.items() if "continuous" in job] == ["evaluate", "notify"]
    for name, job in JOBS.items():
        (task,) = job["tasks"]
        if "continuous" in job:
            # A new run follows each that ends or fails; retries, limits and queues are refused there.
            assert not {"max_concurrent_runs", "queue", "timeout_seconds", "schedule", "trigger"} & set(job)
            assert not {"max_retries", "timeout_seconds"} & set(task)
            assert "minutes" in {parameter["name"] for parameter in job["parameters"] if parameter["default"] == "0"}
            continue
        assert (job["max_concurrent_runs"], job["queue"]) == (1, {"enabled": True}), name
        assert job["timeout_seconds"] > 0, name
        assert task["max_retries"] >= 1, name
        assert task["min_retry_interval_millis"] >= 1_000, name


def test_jobs_begin_by_what_they_wait_for() -> None:
    kinds = ("continuous", "schedule", "trigger")
    begins = {name: [kind for kind in kinds if kind in job] for name, job in JOBS.items()}
    assert begins == {
        "analysts": [], "forget": [],
        "evaluate": ["continuous"], "evaluate_once": [], "evaluate_serverless": ["trigger"], "ingest": ["trigger"],
        "maintain": ["schedule"], "notify": ["continuous"], "prove": ["schedule"], "set_up": [],
    }  # fmt: skip
    table = "${var.catalog}.${var.schema}.${var.stream}"
    assert JOBS["evaluate_serverless"]["trigger"]["table_update"]["table_names"] == [table]
    assert JOBS["ingest"]["trigger"]["file_arrival"]["url"] == "${var.source_path}"
    # Less than a minute is refused.
    assert JOBS["evaluate_serverless"]["trigger"]["table_update"]["min_time_between_triggers_seconds"] >= 60
    assert JOBS["ingest"]["trigger"]["file_arrival"]["wait_after_last_change_seconds"] >= 60


def wrong_cron(text: str) -> str | None:
    """Returns the fault of a Quartz expression: seconds, minutes, hours, day of the month, month, day of the week[, year]."""
    limits = [(0, 59), (0, 59), (0, 23), (1, 31), (1, 12), (1, 7), (1970, 2099)]
    fields = text.split()
    if len(fields) not in (6, 7):
        return f"{len(fields)} fields"
    if [fields[3], fields[5]].count("?") != 1:
        return "one of the two days is a question mark"
    for field, (least, most) in zip(fields, limits, strict=False):
        for part in field.split(","):
            numbers = re.fullmatch(r"(?:\*|\?|(\d+)(?:-(\d+))?)(?:/(\d+))?", part)
            if numbers is None:
                return part
            if any(each is not None and not least <= int(each) <= most for each in numbers.groups()[:2]):
                return part
    return None


@pytest.mark.parametrize("target", ["dev", "staging"])
def test_nothing_begins_by_itself_but_in_production(target: str) -> None:
    document = BUNDLE["targets"][target]
    # Both pause what says nothing of it itself; what says UNPAUSED runs.
    assert document["mode"] == "development" or document["presets"]["trigger_pause_status"] == "PAUSED"
    said = [
        resolved(job[kind]["pause_status"], target)
        for job in JOBS.values()
        for kind in ("continuous", "schedule", "trigger")
        if "pause_status" in job.get(kind, {})
    ]
    assert set(said) == {"PAUSED"}


def test_a_schedule_is_a_time_of_quartz_in_a_zone_that_there_is() -> None:
    schedules = [job["schedule"] for job in JOBS.values() if "schedule" in job]
    assert schedules
    for schedule in schedules:
        assert wrong_cron(schedule["quartz_cron_expression"]) is None
        assert schedule["timezone_id"] in zoneinfo.available_timezones()
    for wrong in (
        "17 3 * * *",
        "0 17 3 * * *",
        "0 60 3 * * ?",
        "0 17 24 * * ?",
        "0 17 3 ? * ?",
        "0 17 3 * 13 ?",
        "a 1 1 * * ?",
    ):
        assert wrong_cron(wrong), wrong


# What jobs run -------------------------------------------------------------------------------------------------------


def notebook_of(path: Path, task: dict[str, Any]) -> Path:
    return (path.parent / task["notebook_task"]["notebook_path"]).resolve()


def declared(path: Path) -> dict[str, Any]:
    """The parameters of a notebook with their defaults: what its cell tagged `parameters` assigns."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    (tagged,) = [cell for cell in cells if "parameters" in cell.get("metadata", {}).get("tags", [])]
    body = ast.parse("".join(tagged["source"])).body
    return {node.targets[0].id: ast.literal_eval(node.value) for node in body}  # type: ignore[attr-defined]


def source_of(path: Path) -> str:
    """The cells of a notebook as one text."""
    return "\n".join("".join(cell["source"]) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"])


def test_every_notebook_is_found_from_the_file_that_names_it() -> None:
    found = [notebook_of(path, task) for path, _, task in tasks()]
    assert all(path.is_file() and path.parent == ROOT / "notebooks" for path in found)
    # Those for people at a keyboard are no jobs.
    every = {path.name for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert every - {path.name for path in found} == {
        "02_author_rules.ipynb",
        "02a_backtest_rules.ipynb",
        "02b_change_lists.ipynb",
        "04a_measure_rules.ipynb",
        "04b_explain_or_snooze.ipynb",
    }


@pytest.mark.parametrize("target", TARGETS)
def test_parameters_go_one_way_and_none_is_left_out(target: str) -> None:
    """Variable -> job parameter -> notebook parameter. A job passes every parameter that its notebook declares, no other."""
    for path, job, task in tasks():
        names = [parameter["name"] for parameter in job["parameters"]]
        parameters = declared(notebook_of(path, task))
        # Where there is a desk, a job says that nobody is at it.
        parameters |= {"desk": True} if 'also={"desk": True}' in source_of(notebook_of(path, task)) else {}
        assert names == list(parameters), path.name
        assert task["notebook_task"]["base_parameters"] == {name: f"{{{{job.parameters.{name}}}}}" for name in names}
        for parameter in job["parameters"]:
            text = resolved(parameter["default"], target)
            assert isinstance(text, str), f"{path.name}: {parameter['name']} reaches the job as text"
            _parse(parameter["name"], text, parameters[parameter["name"]])


def test_every_task_has_its_compute_and_all_compute_is_used() -> None:
    for path, job, task in tasks():
        clusters = {cluster["job_cluster_key"] for cluster in job.get("job_clusters", [])}
        environments = {environment["environment_key"] for environment in job.get("environments", [])}
        assert {task.get("job_cluster_key")} - {None} == clusters, path.name
        assert {task.get("environment_key")} - {None} == environments, path.name
        assert len(clusters) + len(environments) + ("existing_cluster_id" in task) == 1, path.name


def test_a_cluster_belongs_to_one_job_and_what_goes_on_has_one() -> None:
    # Serverless compute ends what has judged all that was there; without end it runs nothing.
    for path, job, _ in tasks():
        for cluster in job.get("job_clusters", []):
            assert cluster["new_cluster"]["data_security_mode"] == "SINGLE_USER", path.name
        modes = {parameter["default"] for parameter in job["parameters"] if parameter["name"] == "mode"}
        assert "environments" not in job or modes <= {"once"}, path.name


# The wheel -----------------------------------------------------------------------------------------------------------


def locked() -> dict[str, str]:
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    pairs = [line.split(" ;")[0].split("==") for line in lines if "==" in line and not line.startswith("#")]
    return {name.strip(): version.strip() for name, version in pairs}


def packages_of(job: dict[str, Any], task: dict[str, Any]) -> list[str]:
    """Lists what a task installs: files, and packages with their versions."""
    listed = [library.get("whl") or library["pypi"]["package"] for library in task.get("libraries", [])]
    for environment in job.get("environments", []):
        listed += environment["spec"]["dependencies"]
    return listed


def runtime_pins(name: str) -> tuple[str, dict[str, str]]:
    """The version of Python of a runtime, and those of packages by name."""
    lines = (RUNTIMES / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    (python,) = [line.removeprefix("# Python ") for line in lines if line.startswith("# Python ")]
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    return python, pins


def used_runtimes() -> set[str]:
    found = set()
    for target in TARGETS:
        found |= {resolved("${var.spark_version}", target)}
        found |= {f"serverless-{resolved('${var.environment_version}', target)}"}
    return found


def test_every_task_takes_the_wheel_that_the_bundle_builds_and_versions_as_locked() -> None:
    (artifact,) = BUNDLE["artifacts"].values()
    assert (artifact["type"], artifact["path"], set(artifact)) == (
        "whl", ".", {"type", "path", "build", "dynamic_version"},
    )  # fmt: skip
    # Serverless environments, and clusters that are on, keep a wheel of a version that they have.
    assert artifact["dynamic_version"] is True
    assert "--wheel-dir dist " in artifact["build"]
    for path, job, task in tasks():
        wheel, *pinned = packages_of(job, task)
        assert ((path.parent / wheel).parent.resolve(), Path(wheel).name) == (ROOT / "dist", "*.whl")
        assert pinned == [f"{name}=={locked()[name]}" for name in INSTALLED], path.name


@pytest.mark.parametrize("runtime", sorted(path.stem for path in RUNTIMES.glob("*.txt")))
def test_a_runtime_has_what_the_wheel_requires_or_the_job_installs_it(runtime: str) -> None:
    python, pins = runtime_pins(runtime)
    assert SpecifierSet(PROJECT["requires-python"]).contains(python)
    installed = {name: locked()[name] for name in INSTALLED}
    for requirement in map(Requirement, [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["remote"]]):
        version = {**pins, **installed}.get(requirement.name.lower())
        assert version is not None, f"{requirement.name} is neither in {runtime} nor installed by the jobs"
        assert requirement.specifier.contains(version), f"{requirement} does not go with {version} of {runtime}"


def test_the_runtimes_of_the_targets_are_known() -> None:
    assert used_runtimes() <= {path.stem for path in RUNTIMES.glob("*.txt")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, by the bundle's own command on a copy of what it is made of."""
    place = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE", "src", "databricks.yml", "conf", "notebooks"):
        (place / name).symlink_to(ROOT / name)
    # As installed for work on Lookback, so no network: this spelling of pip's means no isolation.
    variables = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "PIP_NO_BUILD_ISOLATION": "false",
        "HOME": str(place),
    }
    subprocess.run(BUNDLE["artifacts"]["lookback"]["build"], shell=True, cwd=place, env=variables, check=True)
    (built,) = (place / "dist").glob("*.whl")
    return built


def empty_environment(place: Path) -> Path:
    """A new environment of this Python without anything in it; its interpreter."""
    venv.create(place, with_pip=False, symlinks=True)
    return place / "bin" / "python"


def install(python: Path, *what: str) -> None:
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "install", *what], check=True)


def test_the_wheel_holds_the_package_and_its_command(wheel: Path, tmp_path: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    source = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.py")}
    assert source <= names
    assert {name.split("/")[0] for name in names} == {"lookback", f"lookback_rules-{PROJECT['version']}.dist-info"}
    python = empty_environment(tmp_path / "empty")
    install(python, "--no-deps", "--no-index", str(wheel))
    code = "from importlib.metadata import entry_points as e; print([p.value for p in e(group='console_scripts')])"
    done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['lookback.cli:main']"
    assert (python.parent / "lookback").is_file()


@pytest.mark.long
@pytest.mark.parametrize("runtime", sorted(path.stem for path in RUNTIMES.glob("*.txt")))
def test_the_wheel_works_among_the_packages_of_a_runtime(wheel: Path, runtime: str, tmp_path: Path) -> None:
    # Without Spark, which a runtime has of its own. Needs a network.
    python = empty_environment(tmp_path / "runtime")
    added = [f"{name}=={locked()[name]}" for name in INSTALLED]
    install(python, "-c", str(RUNTIMES / f"{runtime}.txt"), *added, f"{wheel}[remote]")
    command = python.parent / "lookback"
    assert "commands" in subprocess.run([command, "--help"], capture_output=True, text=True, check=True).stdout
    checked = ["rules", "check", "--conf", str(ROOT / "conf"), *map(str, sorted((ROOT / "conf/rules").glob("*.yml")))]
    subprocess.run([command, *checked], check=True)
    code = "from importlib.metadata import distributions as d; print(*(f'{p.name.lower()}=={p.version}' for p in d()))"
    there = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=True).stdout.split()
    pins = runtime_pins(runtime)[1]
    assert {line for line in there if line.split("==")[0] in pins} == {
        f"{name}=={version}" for name, version in pins.items() if any(line.startswith(f"{name}==") for line in there)
    }
