"""Runs of a job: started, stopped and followed."""

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
    RunLifeCycleState,
    RunLifecycleStateV2State,
    RunResultState,
    RunStatus,
    RunTask,
)

from lookback.core.errors import RemoteError
from lookback.remote.workspace import Deployed, Workspace, in_words

# A continuous job that is no longer paused begins a run within a minute. Seconds.
_BEGINS_WITHIN = 60.0
_ENDED = {"TERMINATED", "SKIPPED", "INTERNAL_ERROR"}
# How terminals are coloured, which traces of notebooks are.
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_Sleep = Callable[[float], None]


@dataclass(frozen=True)
class Line:
    """One thing that a run did. task: empty for the run as a whole; attempt: 0 for a task's first."""

    at: dt.datetime
    task: str
    attempt: int
    state: str
    message: str = ""
    trace: str = ""


def start(workspace: Workspace, key: str, sleep: _Sleep = time.sleep) -> str:
    """Starts the bundle's job and returns the URL of the run's page; of the job's where the run is not there yet.

    A continuous job that is paused is unpaused, which begins a run and goes on beginning them.
    Raises RemoteError where a run is active already, of this job or of one that judges the same stream.
    """
    job = workspace.job(key)
    for other in [job, *_same_work(workspace, job)]:
        for run in workspace.active_runs(other):
            raise RemoteError(
                f"{other.name!r} is running already ({state_of(run)}, {run.run_page_url}), and a stream has one "
                f"evaluation at a time: `lookback remote stop --job {other.key}` ends it"
            )
    if job.is_continuous and is_paused(job):
        _set_pause(workspace, job, PauseStatus.UNPAUSED)
        return _first_run(workspace, job, sleep) or f"{workspace.host}/jobs/{job.job_id}"
    with in_words(workspace.host, f"starting {job.name!r}"):
        # With the token a request that is made again, as its answer was lost, starts no second run.
        started = workspace.client.jobs.run_now(job.job_id, idempotency_token=uuid.uuid4().hex)
        return workspace.client.jobs.get_run(started.bind()["run_id"]).run_page_url or ""


def stop(workspace: Workspace, key: str) -> list[str]:
    """Stops the bundle's job: pauses it where it is continuous, cancels its active runs. Returns what was done."""
    job, done = workspace.job(key), []
    if job.is_continuous and not is_paused(job):
        # First, or the workspace begins another run.
        _set_pause(workspace, job, PauseStatus.PAUSED)
        done.append(
            f"paused {job.name!r}: no run begins until `lookback remote start`, or the next deploy, unpauses it"
        )
    for run in workspace.active_runs(job):
        assert run.run_id is not None
        with in_words(workspace.host, f"cancelling run {run.run_id}"):
            workspace.client.jobs.cancel_run(run.run_id)
        done.append(f"cancelled run {run.run_id} ({state_of(run)}); what its last batch lacks, the next start writes")
    return done or [f"{job.name!r} was not running{' and is paused' if is_paused(job) else ''}"]


def follow(
    workspace: Workspace, key: str, run_id: int | None = None, *,
    until_end: bool = False, every: float = 5.0, sleep: _Sleep = time.sleep,
) -> Iterator[Line]:  # fmt: skip
    """What a run does: a line for each change of state, and for each task that failed its error and trace.

    run_id: the last run of the job unless given. until_end: go on until the run has ended, looking every so many seconds.
    """
    known: dict[tuple[str, int], str] = {}
    told: set[tuple[str, int]] = set()
    run_id = run_id or _last_run(workspace, key)
    while True:
        with in_words(workspace.host, f"run {run_id}"):
            run = workspace.client.jobs.get_run(run_id)
        for line in _lines(run):
            place = (line.task, line.attempt)
            if known.get(place) != line.state:
                known[place] = line.state
                yield line
        for task in run.tasks or []:
            place = (task.task_key, task.attempt_number or 0)
            if has_failed(task) and place not in told:
                told.add(place)
                yield _failure(workspace, task)
        if not until_end or has_ended(run):
            return
        sleep(every)


def last_run(workspace: Workspace, job: Deployed) -> BaseRun | None:
    """The newest run of a job, ended or not."""
    with in_words(workspace.host, f"the runs of {job.name!r}"):
        return next(iter(workspace.client.jobs.list_runs(job_id=job.job_id, limit=1)), None)


def is_paused(job: Deployed) -> bool:
    """Whether a continuous job begins no run by itself."""
    continuous = job.job.settings.continuous if job.job.settings else None
    return continuous is not None and continuous.pause_status == PauseStatus.PAUSED


def state_of(run: BaseRun | Run | RunTask) -> str:
    """The state of a run or task in one word, such as RUNNING, SUCCESS or RUN_EXECUTION_ERROR."""
    if run.status and run.status.state:
        ended = run.status.state == RunLifecycleStateV2State.TERMINATED
        return (_code(run.status) if ended else "") or run.status.state.value
    state = run.state
    if state is None or state.life_cycle_state is None:
        return "UNKNOWN"
    return state.result_state.value if state.result_state else state.life_cycle_state.value


def has_ended(run: BaseRun | Run | RunTask) -> bool:
    """Whether nothing more comes of it."""
    if run.status and run.status.state:
        return run.status.state == RunLifecycleStateV2State.TERMINATED
    return bool(run.state and run.state.life_cycle_state and run.state.life_cycle_state.value in _ENDED)


def has_failed(run: BaseRun | Run | RunTask) -> bool:
    """Whether it has ended in another way than it should; cancelled by a person is no failure."""
    if not has_ended(run):
        return False
    if run.status and run.status.termination_details:
        return _code(run.status) not in ("SUCCESS", "SUCCESS_WITH_FAILURES", "USER_CANCELED", "CANCELED", "SKIPPED")
    fine = (RunResultState.SUCCESS, RunResultState.SUCCESS_WITH_FAILURES, RunResultState.CANCELED)
    state = run.state
    if state is None or state.life_cycle_state == RunLifeCycleState.SKIPPED:
        return False
    return state.result_state not in fine


def _code(status: RunStatus) -> str:
    """How a run ended, in the workspace's word; empty where it does not say."""
    details = status.termination_details
    return details.code.value if details and details.code else ""


def _lines(run: Run) -> Iterator[Line]:
    yield Line(_moment(run), "", 0, state_of(run), _message(run))
    for task in run.tasks or []:
        yield Line(_moment(task), task.task_key, task.attempt_number or 0, state_of(task), _message(task))


def _moment(run: Run | RunTask) -> dt.datetime:
    """When it came into the state that it has, so far as the workspace says: the end, else the start."""
    milliseconds = run.end_time or run.start_time
    if not milliseconds:
        return dt.datetime.now(dt.timezone.utc).replace(microsecond=0)
    return dt.datetime.fromtimestamp(milliseconds / 1_000, dt.timezone.utc)


def _message(run: Run | RunTask) -> str:
    status = run.status
    if status and status.termination_details and status.termination_details.message:
        return status.termination_details.message
    if status and status.queue_details and status.queue_details.message:
        return status.queue_details.message
    return (run.state.state_message if run.state else None) or ""


def _failure(workspace: Workspace, task: RunTask) -> Line:
    """What a failed task says of its failure."""
    attempt = task.attempt_number or 0
    if task.run_id is None:
        return Line(_moment(task), task.task_key, attempt, "ERROR", _message(task))
    output, why = workspace.look(
        f"the output of {task.task_key}", lambda: workspace.client.jobs.get_run_output(task.run_id or 0)
    )
    if output is None:
        return Line(_moment(task), task.task_key, attempt, "ERROR", f"the output {why}")
    message = _ESCAPES.sub("", output.error or "the workspace keeps no error of it")
    return Line(_moment(task), task.task_key, attempt, "ERROR", message, _ESCAPES.sub("", output.error_trace or ""))


def _same_work(workspace: Workspace, job: Deployed) -> list[Deployed]:
    """The other jobs of the bundle that run the same notebook on the same stream, so share its checkpoint."""
    names = ("catalog", "schema", "stream")
    place = [job.parameters.get(name) for name in names]
    others = [each for key in workspace.bundle.jobs if key != job.key for each in workspace.find(key)]
    return [
        other for other in others
        if job.notebooks & other.notebooks and place == [other.parameters.get(name) for name in names]
    ]  # fmt: skip


def _set_pause(workspace: Workspace, job: Deployed, status: PauseStatus) -> None:
    """Pauses or unpauses a continuous job; the rest of what makes it continuous stays."""
    assert job.job.settings is not None
    continuous = dataclasses.replace(job.job.settings.continuous or Continuous(), pause_status=status)
    with in_words(workspace.host, f"pausing or unpausing {job.name!r}"):
        workspace.client.jobs.update(job.job_id, new_settings=JobSettings(continuous=continuous))


def _first_run(workspace: Workspace, job: Deployed, sleep: _Sleep) -> str | None:
    """The page of the run that begins now; None where it takes too long to come."""
    for _ in range(int(_BEGINS_WITHIN / 2)):
        for run in workspace.active_runs(job):
            return run.run_page_url
        sleep(2.0)
    return None


def _last_run(workspace: Workspace, key: str) -> int:
    job = workspace.job(key)
    run = last_run(workspace, job)
    if run is None or run.run_id is None:
        raise RemoteError(f"{job.name!r} has not run yet: `lookback remote start --job {key}`")
    return run.run_id
