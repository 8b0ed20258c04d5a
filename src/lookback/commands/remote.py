"""Adds the sub-commands of `lookback remote`, and prints their results."""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.util
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lookback.commands.options import FOUND_PROBLEMS, RunCommand, make_adder, wants_json
from lookback.core.errors import RemoteError, SetupError
from lookback.core.operations.health import PROBLEM, check_health, describe_health, is_healthy
from lookback.core.values.durations import parse_duration
from lookback.core.values.texts import escape_unprintable
from lookback.views.terminal import format_json, print_health

if TYPE_CHECKING:
    from lookback.remote.runs import Line
    from lookback.remote.workspace import DeployedJob, RemoteWorkspace

_DESCRIPTION = "Jobs of a Databricks workspace that the bundle has deployed there."


def add_commands(commands: Any, places: argparse.ArgumentParser) -> None:
    """Adds `remote` with its sub-commands to the sub-parsers `commands`. places: the options that all commands have."""
    parser = commands.add_parser("remote", help="jobs of a Databricks workspace", description=_DESCRIPTION)
    add = make_adder(parser.add_subparsers(title="commands", required=True, metavar="COMMAND"), places)

    def command(name: str, run: RunCommand, text: str) -> Any:
        sub = add(name, run, text)
        sub.add_argument("--target", help="target of the bundle (DATABRICKS_BUNDLE_TARGET; the default one)")
        sub.add_argument(
            "--profile", help="profile of ~/.databrickscfg (DATABRICKS_CONFIG_PROFILE, or DATABRICKS_HOST)"
        )
        sub.add_argument("--bundle", default=".", metavar="DIR", help="folder of databricks.yml (.)")
        sub.add_argument(
            "--timeout",
            metavar="DURATION",
            default="2 minutes",
            help="how long to ask again one that does not answer (2 minutes)",
        )
        return sub

    check = command("deploy-check", _deploy_check, "are the jobs deployed, and is there what they need")
    check.add_argument("--warehouse", metavar="ID", help="SQL warehouse to read by (the first that you may use)")
    for name, run, text in (
        ("start", _start, "start the evaluation, unless it runs"),
        ("stop", _stop, "stop the evaluation; a continuous job is paused"),
    ):
        _add_job_option(command(name, run, text))
    status = command("status", _status, "the state of the evaluation's job, and whether its stream is healthy")
    _add_job_option(status)
    status.add_argument("--warehouse", metavar="ID", help="SQL warehouse to read by (the first that you may use)")
    status.add_argument("--check", action="store_true", help="end with 1 where the stream needs a look, for a monitor")
    logs = command("logs", _logs, "what a run did: its states, and the error of a task that failed")
    _add_job_option(logs)
    logs.add_argument("--run", dest="run_id", type=int, metavar="ID", help="the run (the last one of the job)")
    logs.add_argument("--follow", action="store_true", help="go on until the run has ended")


def _add_job_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--job", default="evaluate", help="the job's key in the bundle (evaluate)")


def _open_workspace(options: argparse.Namespace) -> RemoteWorkspace:
    if importlib.util.find_spec("databricks.sdk") is None:
        raise SetupError("lookback remote needs databricks-sdk: pip install 'lookback-rules[remote]'")
    from lookback.remote.workspace import REQUEST_SECONDS, open_workspace

    seconds = parse_duration(options.timeout) / 1_000_000
    if seconds <= 0:
        raise SetupError(f"--timeout must be longer than 0 s, got {options.timeout!r}")
    return open_workspace(
        options.bundle, options.target, options.profile,
        request_seconds=min(REQUEST_SECONDS, seconds), retry_seconds=seconds,
    )  # fmt: skip


def _deploy_check(options: argparse.Namespace) -> int:
    from lookback.remote.checks import check_deployment

    levels = []
    for check in check_deployment(_open_workspace(options), options.warehouse):
        levels.append(check.level)
        if wants_json(options):
            print(format_json(asdict(check)), flush=True)
            continue
        print(escape_unprintable(f"{check.level + ':':<9}{check.check}: {check.what}"), flush=True)
        if check.remedy:
            print(escape_unprintable(f"{'':<9}{check.remedy}"))
    return FOUND_PROBLEMS if PROBLEM in levels else 0


def _start(options: argparse.Namespace) -> None:
    from lookback.remote.runs import start_job

    url = start_job(_open_workspace(options), options.job)
    print(
        format_json({"job": options.job, "url": url})
        if wants_json(options)
        else f"started {options.job}: {escape_unprintable(url)}"
    )


def _stop(options: argparse.Namespace) -> None:
    from lookback.remote.runs import stop_job

    for done in stop_job(_open_workspace(options), options.job):
        print(format_json({"job": options.job, "done": done}) if wants_json(options) else escape_unprintable(done))


def _logs(options: argparse.Namespace) -> int:
    from lookback.remote.runs import follow_run

    failed = False
    for line in follow_run(_open_workspace(options), options.job, options.run_id, until_end=options.follow):
        failed = failed or line.state == "ERROR"
        print(format_json(asdict(line)) if wants_json(options) else _format_line(line), flush=True)
    return FOUND_PROBLEMS if failed else 0


def _format_line(line: Line) -> str:
    clock = line.at.astimezone(dt.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    task = f" {line.task}" if line.task else ""
    again = f" (attempt {line.attempt + 1})" if line.attempt else ""
    first = f"{clock}{task}{again} {line.state}" + (f": {line.message}" if line.message else "")
    return "\n".join(
        [escape_unprintable(first), *(f"  {escape_unprintable(each)}" for each in line.trace.splitlines())]
    )


def _status(options: argparse.Namespace) -> int:
    from lookback.remote.checks import choose_warehouse
    from lookback.remote.figures import StreamTables, prepare_queries, read_figures

    workspace = _open_workspace(options)
    job = workspace.get_job(options.job)
    place = {name: job.parameters.get(name, "") for name in ("catalog", "schema", "stream")}
    if not all(place.values()):
        raise RemoteError(f"{job.name!r} has no parameters catalog, schema and stream: {workspace.deploy_command}")
    warehouse = choose_warehouse(workspace, options.warehouse)
    if warehouse is None or warehouse.id is None:
        raise RemoteError(
            f"{workspace.host} has no SQL warehouse that you may use: name one by --warehouse, or ask for CAN_USE"
        )
    now = dt.datetime.fromtimestamp(time.time(), dt.timezone.utc)
    figures = read_figures(StreamTables.in_schema(**place), prepare_queries(workspace, warehouse.id), now)
    findings = check_health(figures)
    row = {
        "stream": figures.stream, **_describe_job(workspace, job), "commits": figures.committed, "judged": figures.judged,
        "lag_commits": figures.waiting, "lag_seconds": round(figures.lag, 3), "rules": figures.rules,
        "healthy": is_healthy(findings), "health": describe_health(figures, findings),
        "findings": [asdict(finding) for finding in findings],
    }  # fmt: skip
    if wants_json(options):
        print(format_json(row))
    else:
        print(escape_unprintable(f"{row['job']}: {row['job_state']} {row['run'] or ''}".rstrip()))
        print_health(row)
    return FOUND_PROBLEMS if options.check and not row["healthy"] else 0


def _describe_job(workspace: RemoteWorkspace, job: DeployedJob) -> dict[str, Any]:
    """Returns the job's name, the state of its last run, and that run's page."""
    from lookback.remote.runs import describe_state, find_last_run, is_paused

    run = find_last_run(workspace, job)
    state = "has not run yet" if run is None else describe_state(run)
    return {
        "job": job.name,
        "job_state": f"{state}, paused" if is_paused(job) else state,
        "run": None if run is None else run.run_page_url,
    }
