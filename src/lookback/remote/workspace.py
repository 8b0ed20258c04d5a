"""A Databricks workspace: its answers as the SDK types them, its refusals as sentences with the remedy."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

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
from databricks.sdk.service.jobs import BaseRun, Job

from lookback.core.errors import RemoteError, SetupError
from lookback.remote.bundle import Bundle, User

# A request may take so long. One that got no answer, or 429 or 503, is made again by the SDK, after a pause that grows or
# that the workspace asks for, until it has been tried for so long in all. Seconds.
REQUEST_SECONDS = 30.0
RETRY_SECONDS = 120.0
_LOG_IN = (
    "log in with `databricks auth login --profile NAME` and say --profile NAME, or set DATABRICKS_HOST and "
    "DATABRICKS_TOKEN in the environment"
)
_MOST_TEXT = 300
_T = TypeVar("_T")


@dataclass(frozen=True)
class Deployed:
    """A job of the bundle as the workspace has it."""

    key: str
    name: str
    job: Job

    @property
    def job_id(self) -> int:
        """Its number in the workspace."""
        assert self.job.job_id is not None
        return self.job.job_id

    @property
    def is_continuous(self) -> bool:
        """Whether the workspace starts it again when it ends."""
        return self.job.settings is not None and self.job.settings.continuous is not None

    @property
    def parameters(self) -> dict[str, str]:
        """The values that its runs have unless told otherwise."""
        settings = self.job.settings
        return {each.name: each.default for each in (settings.parameters if settings else None) or []}

    @property
    def notebooks(self) -> set[str]:
        """The notebooks that its tasks run."""
        tasks = (self.job.settings.tasks if self.job.settings else None) or []
        return {task.notebook_task.notebook_path for task in tasks if task.notebook_task}


class Workspace:
    """The workspace that a target of the bundle is deployed to; every call may raise RemoteError."""

    def __init__(self, client: WorkspaceClient, bundle: Bundle) -> None:
        self.client, self.bundle = client, bundle

    @property
    def host(self) -> str:
        """Its URL."""
        return str(self.client.config.host).rstrip("/")

    @functools.cached_property
    def user(self) -> User:
        """Who is logged in."""
        with in_words(self.host, "who is logged in"):
            me = self.client.current_user.me()
        groups = frozenset(group.display for group in me.groups or [] if group.display)
        return User(me.user_name or "", me.display_name or "", groups)

    def find(self, key: str) -> list[Deployed]:
        """The jobs that have the name of the bundle's job; none where it is not deployed, or not to be seen."""
        name = self.bundle.job_name(key, self.user)
        with in_words(self.host, f"job {name!r}"):
            ids = [job.job_id for job in self.client.jobs.list(name=name) if job.job_id is not None]
            return [Deployed(key, name, self.client.jobs.get(job_id)) for job_id in dict.fromkeys(ids)]

    def job(self, key: str) -> Deployed:
        """The one job of that key. Raises RemoteError where there is none, or more than one of its name."""
        found = self.find(key)
        if not found:
            raise RemoteError(
                f"{self.host} has no job {self.bundle.job_name(key, self.user)!r} that you may see: "
                f"{self.deploy}, or ask for CAN_VIEW on it"
            )
        if len(found) > 1:
            ids = ", ".join(str(each.job_id) for each in found)
            raise RemoteError(f"{self.host} has {len(found)} jobs {found[0].name!r} ({ids}); delete those of old")
        return found[0]

    @property
    def deploy(self) -> str:
        """What deploys the bundle."""
        return f"`databricks bundle deploy --target {self.bundle.target}`"

    def active_runs(self, job: Deployed) -> list[BaseRun]:
        """Its runs that wait, run or are being ended, newest first."""
        with in_words(self.host, f"the runs of {job.name!r}"):
            return list(self.client.jobs.list_runs(job_id=job.job_id, active_only=True))

    def look(self, what: str, call: Callable[[], _T]) -> tuple[_T | None, str]:
        """The answer of a call, or None and why there is none: it is not there, or may not be seen."""
        try:
            with in_words(self.host, what):
                return call(), ""
        except RemoteError as error:
            if isinstance(error.__cause__, NotFound):
                return None, "is not there"
            if isinstance(error.__cause__, PermissionDenied):
                return None, f"may not be seen by you: {_said(error.__cause__)}"
            raise


def connect(
    bundle: Bundle,
    profile: str | None = None,
    *,
    request_seconds: float = REQUEST_SECONDS,
    retry_seconds: float = RETRY_SECONDS,
) -> Workspace:
    """The workspace of a profile of ~/.databrickscfg; without one that of the environment, as the SDK finds it.

    Raises SetupError where no host or no credentials are found. Nobody is asked yet whether they are right.
    """
    # It warns where a workspace does not describe itself, which nothing here needs.
    logging.getLogger("databricks.sdk").setLevel(logging.ERROR)
    try:
        config = Config(
            profile=profile, product="lookback",
            http_timeout_seconds=request_seconds,
            # Whole seconds, and it takes 0 for its own five minutes.
            retry_timeout_seconds=max(1, math.ceil(retry_seconds)),
        )  # fmt: skip
        if not config.host:
            raise SetupError(f"no workspace is named: {_LOG_IN}")
        return Workspace(WorkspaceClient(config=config), bundle)
    except ValueError as error:
        named = f"profile {profile!r}: " if profile else ""
        raise SetupError(f"{named}there are no credentials for a workspace ({_said(error)}): {_LOG_IN}") from error


@contextlib.contextmanager
def in_words(host: str, what: str) -> Iterator[None]:
    """Raises RemoteError in place of what the SDK raises; its cause is the workspace's own error. what: was asked for."""
    try:
        yield
    except TimeoutError as error:
        # The SDK has tried again until its time was over; what it met last is the cause.
        last = error.__cause__ or error
        raise RemoteError(f"{host}: {what}: {_gave_up(last)}") from last
    except DatabricksError as error:
        raise RemoteError(f"{host}: {what}: {_refused(error)}") from error
    except (requests.RequestException, ValueError) as error:
        raise RemoteError(
            f"{host}: {what}: the answer is none of a workspace's ({_said(error)}); is the host right?"
        ) from error
    except OSError as error:
        # What fetches a token, such as the Databricks CLI, has failed.
        raise RemoteError(f"{host}: {what}: there is no valid log-in ({_said(error)}): {_LOG_IN}") from error


def _gave_up(error: BaseException) -> str:
    if isinstance(error, TooManyRequests):
        return "asked too often (429), also after waiting as it asked; try again in some minutes"
    if isinstance(error, TemporarilyUnavailable):
        return "is not available for now (503); try again in some minutes"
    if isinstance(error, requests.Timeout):
        return "no answer in time; try again, or allow more with --timeout"
    if isinstance(error, requests.ConnectionError):
        return "cannot be reached; is the host right, and do network, VPN and proxy let you there?"
    return f"gave up: {_said(error)}"


def _refused(error: DatabricksError) -> str:
    said = _said(error)
    if isinstance(error, Unauthenticated):
        return f"the credentials are not accepted (401: {said}); they may have run out: {_LOG_IN}"
    if isinstance(error, PermissionDenied):
        return f"not allowed (403: {said}); ask for it, or use another --profile"
    if isinstance(error, NotFound):
        return f"is not there (404: {said}), or not for you to see"
    if isinstance(error, InternalError):
        return f"the workspace failed (500: {said}); try again, and look at the status page of the platform"
    return f"refused ({error.error_code or type(error).__name__}: {said})"


def _said(error: BaseException) -> str:
    """The error's own words; to some the SDK adds all that it was set to, which is long."""
    words = " ".join(str(error).split()).partition(" Config: ")[0]
    return words.rstrip(".")[:_MOST_TEXT] or type(error).__name__
