"""Connects to a Databricks workspace, and turns its refusals into sentences with the remedy."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import requests
from databricks.sdk import WorkspaceClient
from databricks.sdk.core import Config
from databricks.sdk.errors import (
    InternalError,
    NotFound,
    PermissionDenied,
    TemporarilyUnavailable,
    TooManyRequests,
    Unauthenticated,
)
from databricks.sdk.errors.base import DatabricksError
from databricks.sdk.service.jobs import BaseRun, Job, JobSettings

from lookback.core.errors import RemoteError, SetupError
from lookback.remote.bundle import FILE, LOG_IN, Bundle, read_bundle, shorten_error

# The SDK repeats a request that got no answer, 429 or 503, after a growing pause or the one that the workspace names,
# until all its tries together took RETRY_SECONDS.
REQUEST_SECONDS = 30.0
RETRY_SECONDS = 120.0
_T = TypeVar("_T")


@dataclass(frozen=True)
class User:
    """The user who is logged in. name: e-mail address, or application id of a service principal."""

    name: str
    groups: frozenset[str]


@dataclass(frozen=True)
class DeployedJob:
    """A job of the bundle as the workspace has it."""

    key: str
    name: str
    job: Job

    @property
    def job_id(self) -> int:
        """The job's number in the workspace."""
        assert self.job.job_id is not None
        return self.job.job_id

    @property
    def settings(self) -> JobSettings:
        """The job's definition."""
        return self.job.settings or JobSettings()

    @property
    def is_continuous(self) -> bool:
        """True if the workspace starts the job again when it ends."""
        return self.settings.continuous is not None

    @property
    def parameters(self) -> dict[str, str]:
        """The values that runs have by default."""
        return {each.name: each.default for each in self.settings.parameters or []}

    @property
    def notebooks(self) -> set[str]:
        """The paths of the notebooks that the tasks run."""
        return {task.notebook_task.notebook_path for task in self.settings.tasks or [] if task.notebook_task}


@dataclass(frozen=True)
class RemoteWorkspace:
    """The workspace that a target of the bundle is deployed to. Every call may raise RemoteError."""

    client: WorkspaceClient
    user: User
    bundle: Bundle

    @property
    def host(self) -> str:
        """The workspace's URL."""
        return _get_host(self.client)

    @property
    def deploy_command(self) -> str:
        """The command that deploys the bundle."""
        return f"`databricks bundle deploy --target {self.bundle.target}`"

    def find_jobs(self, key: str) -> list[DeployedJob]:
        """Returns the deployed job, and others of its name after it; none if it is not deployed or not visible."""
        wanted = self.bundle.get_job(key)
        with explain_errors(self.host, f"job {wanted.name!r}"):
            ids = [wanted.job_id, *(job.job_id for job in self.client.jobs.list(name=wanted.name))]
        jobs = [self._find_job(job_id, wanted.name) for job_id in dict.fromkeys(ids) if job_id is not None]
        return [DeployedJob(key, wanted.name, job) for job in jobs if job is not None]

    def get_job(self, key: str) -> DeployedJob:
        """Returns the one job of that key. Raises RemoteError if there is none, or more than one of its name."""
        jobs = self.find_jobs(key)
        if not jobs:
            raise RemoteError(
                f"{self.host} has no job {self.bundle.get_job(key).name!r} that you may see: "
                f"{self.deploy_command}, or ask for CAN_VIEW on it"
            )
        if len(jobs) > 1:
            ids = ", ".join(str(each.job_id) for each in jobs)
            raise RemoteError(f"{self.host} has {len(jobs)} jobs {jobs[0].name!r} ({ids}); delete the old ones")
        return jobs[0]

    def list_active_runs(self, job: DeployedJob) -> list[BaseRun]:
        """Returns the runs that wait, run or are being ended, newest first."""
        with explain_errors(self.host, f"the runs of {job.name!r}"):
            return list(self.client.jobs.list_runs(job_id=job.job_id, active_only=True))

    def request(self, subject: str, call: Callable[[], _T]) -> tuple[_T | None, str]:
        """Returns the answer of a call; or None and the reason, if its subject is missing or not visible."""
        try:
            with explain_errors(self.host, subject):
                return call(), ""
        except RemoteError as error:
            if isinstance(error.__cause__, NotFound):
                return None, "is not there"
            if isinstance(error.__cause__, PermissionDenied):
                return None, f"may not be seen by you: {_describe_error(error.__cause__)}"
            raise

    def _find_job(self, job_id: int, name: str) -> Job | None:
        # The bundle's state still names a job that somebody has deleted by hand.
        return self.request(f"job {name!r}", lambda: self.client.jobs.get(job_id))[0]


def open_workspace(
    folder: str | Path,
    target: str | None = None,
    profile: str | None = None,
    *,
    request_seconds: float = REQUEST_SECONDS,
    retry_seconds: float = RETRY_SECONDS,
) -> RemoteWorkspace:
    """Logs in and reads the bundle of a folder. The Databricks CLI may take `retry_seconds` for the bundle.

    profile: one of ~/.databrickscfg; without it the environment says where to log in, as with every Databricks tool.
    Raises SetupError if host, credentials, the CLI or the bundle are not as needed.
    """
    client = connect(profile, request_seconds, retry_seconds)
    host = _get_host(client)
    with explain_errors(host, "who is logged in"):
        me = client.current_user.me()
    user = User(me.user_name or "", frozenset(group.display for group in me.groups or [] if group.display))
    bundle = read_bundle(folder, target, profile, retry_seconds)
    # The numbers of the bundle's jobs mean other jobs in another workspace.
    if bundle.host and urlsplit(f"//{bundle.host.rpartition('//')[2]}").netloc != urlsplit(host).netloc:
        raise SetupError(f"{FILE} names the workspace {bundle.host}, and you are logged in to {host}: {LOG_IN}")
    return RemoteWorkspace(client, user, bundle)


def connect(profile: str | None, request_seconds: float, retry_seconds: float) -> WorkspaceClient:
    """Makes a client, whose credentials the workspace has not yet checked."""
    # The SDK warns where a workspace does not describe itself, which nothing here needs.
    logging.getLogger("databricks.sdk").setLevel(logging.ERROR)
    try:
        config = Config(
            profile=profile, product="lookback",
            http_timeout_seconds=request_seconds,
            # Whole seconds; the SDK takes 0 for its own five minutes.
            retry_timeout_seconds=max(1, math.ceil(retry_seconds)),
        )  # fmt: skip
        if not config.host:
            raise SetupError(f"no workspace is named: {LOG_IN}")
        return WorkspaceClient(config=config)
    except ValueError as error:
        place = f"profile {profile!r}: " if profile else ""
        raise SetupError(
            f"{place}there are no credentials for a workspace ({_describe_error(error)}): {LOG_IN}"
        ) from error


def _get_host(client: WorkspaceClient) -> str:
    return str(client.config.host).rstrip("/")


@contextlib.contextmanager
def explain_errors(host: str, subject: str) -> Iterator[None]:
    """Raises RemoteError in place of the SDK's errors; its cause is the workspace's own. subject: what is requested."""
    try:
        yield
    except (TimeoutError, DatabricksError) as error:
        # The SDK raises TimeoutError when its tries are used up; the cause is the last error that it met.
        cause = (isinstance(error, TimeoutError) and error.__cause__) or error
        raise RemoteError(f"{host}: {subject}: {_explain_error(cause)}") from cause
    except (requests.RequestException, ValueError) as error:
        raise RemoteError(
            f"{host}: {subject}: the answer does not come from a workspace ({_describe_error(error)}); is the host right?"
        ) from error
    except OSError as error:
        # A program that fetches the token, such as the Databricks CLI, has failed.
        raise RemoteError(
            f"{host}: {subject}: there is no valid log-in ({_describe_error(error)}): {LOG_IN}"
        ) from error


def _explain_error(error: BaseException) -> str:
    text = _describe_error(error)
    if isinstance(error, TooManyRequests):
        return "too many requests (429), also after the wait that it requested; try again in some minutes"
    if isinstance(error, TemporarilyUnavailable):
        return "is not available for now (503); try again in some minutes"
    if isinstance(error, requests.Timeout):
        return "no answer in time; try again, or allow more with --timeout"
    if isinstance(error, requests.ConnectionError):
        return "cannot be reached; is the host right, and do network, VPN and proxy let you there?"
    if isinstance(error, Unauthenticated):
        return f"the credentials are not accepted (401: {text}); they may have run out: {LOG_IN}"
    if isinstance(error, PermissionDenied):
        return f"not allowed (403: {text}); ask for it, or use another --profile"
    if isinstance(error, NotFound):
        return f"is not there (404: {text}), or not for you to see"
    if isinstance(error, InternalError):
        return f"the workspace failed (500: {text}); try again, and look at the status page of the platform"
    if isinstance(error, DatabricksError):
        return f"refused ({error.error_code or type(error).__name__}: {text})"
    return f"gave up: {text}"


def _describe_error(error: BaseException) -> str:
    return shorten_error(str(error)) or type(error).__name__
