"""Starts and stops a job, and follows its runs."""

from __future__ import annotations

import dataclasses
import datetime as dt
import re
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from databricks.sdk.service.jobs import (
    BaseRun,
    Continuous,
    JobSettings,
    PauseStatus,
    Run,
    RunLifecycleStateV2State,
    RunTask,
)

from lookback.core.errors import RemoteError
from lookback.remote.workspace import DeployedJob, RemoteWorkspace, explain_errors

# A continuous job that is no longer paused begins a run within a minute.
_BEGINS_WITHIN_SECONDS = 60.0
# Codes with which a run has ended, and has not failed.
_NO_FAILURES = frozenset({"SUCCESS", "SUCCESS_WITH_FAILURES", "USER_CANCELED", "CANCELED", "SKIPPED"})
# Traces of notebooks are coloured for terminals.
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_Sleep = Callable[[float], None]


@dataclass(frozen=True)
class Line:
    """A line of a run's log. task: empty for the run as a whole; attempt: 0 for a task's first."""

    at: dt.datetime
    task: str
    attempt: int
    state: str
    message: str = ""
    trace: str = ""


def start_job(workspace: RemoteWorkspace, key: str, sleep: _Sleep = time.sleep) -> str:
    """Starts the job and returns the URL of the run's page, or of the job's if the run has not appeared in time.

    A continuous job that is paused is unpaused, so the workspace keeps it running.
    Raises RemoteError if a run is active, of this job or of another one that judges the same stream.
    """
    # `databricks bundle run` neither unpauses the job, nor sees those runs, nor sends a token with its request.
    job = workspace.get_job(key)
    for other in [job, *_find_rivals(workspace, job)]:
        for run in workspace.list_active_runs(other):
            raise RemoteError(
                f"{other.name!r} is running already ({describe_state(run)}, {run.run_page_url}), and a stream has one "
                f"evaluation at a time: `lookback remote stop --job {other.key}` ends it"
            )
    if is_paused(job):
        _set_pause(workspace, job, PauseStatus.UNPAUSED)
        return _wait_for_run(workspace, job, sleep) or f"{workspace.host}/jobs/{job.job_id}"
    with explain_errors(workspace.host, f"starting {job.name!r}"):
        # The token keeps a request that is repeated, as its answer was lost, from starting a second run.
        started = workspace.client.jobs.run_now(job.job_id, idempotency_token=uuid.uuid4().hex)
        return workspace.client.jobs.get_run(started.bind()["run_id"]).run_page_url or ""


def stop_job(workspace: RemoteWorkspace, key: str) -> list[str]:
    """Pauses the job if it is continuous, and cancels its active runs. Returns a line for each thing done."""
    job, done = workspace.get_job(key), []
    if job.is_continuous and not is_paused(job):
        # Pausing comes first, or the workspace begins another run.
        _set_pause(workspace, job, PauseStatus.PAUSED)
        done.append(
            f"paused {job.name!r}: no run begins until `lookback remote start`, or the next deploy, unpauses it"
        )
    for run in workspace.list_active_runs(job):
        assert run.run_id is not None
        with explain_errors(workspace.host, f"cancelling run {run.run_id}"):
            workspace.client.jobs.cancel_run(run.run_id)
        done.append(
            f"cancelled run {run.run_id} ({describe_state(run)}); what its last batch lacks, the next start writes"
        )
    return done or [f"{job.name!r} was not running{' and is paused' if is_paused(job) else ''}"]


def follow_run(
    workspace: RemoteWorkspace, key: str, run_id: int | None = None, *,
    until_end: bool = False, every: float = 5.0, sleep: _Sleep = time.sleep,
) -> Iterator[Line]:  # fmt: skip
    """Yields a line for each change of state of a run, and the error and trace of each task that failed.

    run_id: the job's last run unless given. until_end: go on until the run has ended; every: seconds between two looks.
    """
    states: dict[tuple[str, int], str] = {}
    explained: set[tuple[str, int]] = set()
    run_id = run_id or _get_last_run_id(workspace, key)
    while True:
        with explain_errors(workspace.host, f"run {run_id}"):
            run = workspace.client.jobs.get_run(run_id)
        for line in _list_states(run):
            attempt = (line.task, line.attempt)
            if states.get(attempt) != line.state:
                states[attempt] = line.state
                yield line
        for task in run.tasks or []:
            attempt = (task.task_key, task.attempt_number or 0)
            if has_failed(task) and attempt not in explained:
                explained.add(attempt)
                yield _explain_failure(workspace, task)
        if not until_end or has_ended(run):
            return
        sleep(every)


def find_last_run(workspace: RemoteWorkspace, job: DeployedJob) -> BaseRun | None:
    """Returns the newest run of a job, ended or not."""
    with explain_errors(workspace.host, f"the runs of {job.name!r}"):
        return next(iter(workspace.client.jobs.list_runs(job_id=job.job_id, limit=1)), None)


def is_paused(job: DeployedJob) -> bool:
    """Returns whether the job is continuous and begins no run by itself."""
    continuous = job.settings.continuous
    return continuous is not None and continuous.pause_status == PauseStatus.PAUSED


def describe_state(run: BaseRun | Run | RunTask) -> str:
    """Returns the state of a run or task in one word, such as RUNNING, SUCCESS or RUN_EXECUTION_ERROR."""
    state = run.status.state if run.status else None
    return (_get_code(run) if has_ended(run) else "") or (state.value if state else "UNKNOWN")


def has_ended(run: BaseRun | Run | RunTask) -> bool:
    """Returns whether a run or task has ended."""
    return run.status is not None and run.status.state == RunLifecycleStateV2State.TERMINATED


def has_failed(run: BaseRun | Run | RunTask) -> bool:
    """Returns whether a run or task has ended without success; one that a person cancelled has not failed."""
    code = _get_code(run) if has_ended(run) else ""
    return code != "" and code not in _NO_FAILURES


def _get_code(run: BaseRun | Run | RunTask) -> str:
    """Returns the workspace's word for how a run ended; empty if it has none."""
    details = run.status.termination_details if run.status else None
    return details.code.value if details and details.code else ""


def _list_states(run: Run) -> Iterator[Line]:
    yield Line(_get_time(run), "", 0, describe_state(run), _get_message(run))
    for task in run.tasks or []:
        yield Line(_get_time(task), task.task_key, task.attempt_number or 0, describe_state(task), _get_message(task))


def _get_time(run: Run | RunTask) -> dt.datetime:
    """Returns when the run ended, else when it started, else the present."""
    milliseconds = run.end_time or run.start_time
    if not milliseconds:
        return dt.datetime.now(dt.timezone.utc).replace(microsecond=0)
    return dt.datetime.fromtimestamp(milliseconds / 1_000, dt.timezone.utc)


def _get_message(run: Run | RunTask) -> str:
    details = (run.status.termination_details, run.status.queue_details) if run.status else ()
    return next((each.message for each in details if each and each.message), "")


def _explain_failure(workspace: RemoteWorkspace, task: RunTask) -> Line:
    """Returns the error and trace of a failed task."""
    line = Line(_get_time(task), task.task_key, task.attempt_number or 0, "ERROR", _get_message(task))
    run_id = task.run_id
    if run_id is None:
        return line
    output, reason = workspace.request(
        f"the output of {task.task_key}", lambda: workspace.client.jobs.get_run_output(run_id)
    )
    if output is None:
        return dataclasses.replace(line, message=f"the output {reason}")
    message = _ESCAPES.sub("", output.error or "the workspace keeps no error of it")
    return dataclasses.replace(line, message=message, trace=_ESCAPES.sub("", output.error_trace or ""))


def _find_rivals(workspace: RemoteWorkspace, job: DeployedJob) -> list[DeployedJob]:
    """Returns the bundle's other jobs that run the same notebook on the same stream, so share its checkpoint."""
    names = ("catalog", "schema", "stream")
    place = [job.parameters.get(name) for name in names]
    others = [each for key in workspace.bundle.jobs if key != job.key for each in workspace.find_jobs(key)]
    return [
        other for other in others
        if job.notebooks & other.notebooks and place == [other.parameters.get(name) for name in names]
    ]  # fmt: skip


def _set_pause(workspace: RemoteWorkspace, job: DeployedJob, status: PauseStatus) -> None:
    """Pauses or unpauses a continuous job; its other settings stay."""
    continuous = dataclasses.replace(job.settings.continuous or Continuous(), pause_status=status)
    with explain_errors(workspace.host, f"pausing or unpausing {job.name!r}"):
        workspace.client.jobs.update(job.job_id, new_settings=JobSettings(continuous=continuous))


def _wait_for_run(workspace: RemoteWorkspace, job: DeployedJob, sleep: _Sleep) -> str | None:
    """Returns the page of the run that begins now; None if it does not begin in time."""
    for _ in range(int(_BEGINS_WITHIN_SECONDS / 2)):
        for run in workspace.list_active_runs(job):
            return run.run_page_url
        sleep(2.0)
    return None


def _get_last_run_id(workspace: RemoteWorkspace, key: str) -> int:
    job = workspace.get_job(key)
    run = find_last_run(workspace, job)
    if run is None or run.run_id is None:
        raise RemoteError(f"{job.name!r} has not run yet: `lookback remote start --job {key}`")
    return run.run_id
