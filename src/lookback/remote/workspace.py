"""Connects to a Databricks workspace, and turns its refusals into sentences with the remedy."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass

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

from lookback.core.errors import RemoteError, SetupError
from lookback.core.values.texts import collapse_spaces

# The SDK repeats a request that got no answer, 429 or 503, after a growing pause or the one that the workspace names,
# until all its tries together took RETRY_SECONDS.
REQUEST_SECONDS = 30.0
RETRY_SECONDS = 120.0
_LOG_IN = (
    "log in with `databricks auth login --profile NAME` and set DATABRICKS_CONFIG_PROFILE, or set DATABRICKS_HOST and "
    "DATABRICKS_TOKEN in the environment"
)
_MAX_CHARACTERS = 300


@dataclass(frozen=True)
class RemoteWorkspace:
    """A workspace and the user who is logged in to it: an e-mail address, or the application id of a service principal."""

    client: WorkspaceClient
    user: str

    @property
    def host(self) -> str:
        """The workspace's URL."""
        return _get_host(self.client)


def open_workspace(
    *, request_seconds: float = REQUEST_SECONDS, retry_seconds: float = RETRY_SECONDS
) -> RemoteWorkspace:
    """Logs in to the workspace that the environment names, as every Databricks tool does.

    Raises SetupError if no workspace or no credentials are configured, and RemoteError if the workspace refuses them.
    """
    client = connect(request_seconds, retry_seconds)
    with explain_errors(_get_host(client), "who is logged in"):
        return RemoteWorkspace(client, client.current_user.me().user_name or "")


def connect(request_seconds: float, retry_seconds: float) -> WorkspaceClient:
    """Makes a client; the workspace has not checked its credentials yet."""
    # The SDK warns where a workspace does not describe itself, which nothing here needs.
    logging.getLogger("databricks.sdk").setLevel(logging.ERROR)
    try:
        # Whole seconds; the SDK takes 0 for its own five minutes.
        retry_seconds = max(1, math.ceil(retry_seconds))
        config = Config(product="lookback", http_timeout_seconds=request_seconds, retry_timeout_seconds=retry_seconds)
        if not config.host:
            raise SetupError(f"no workspace is named: {_LOG_IN}")
        return WorkspaceClient(config=config)
    except ValueError as error:
        raise SetupError(f"no credentials for a workspace ({_describe_error(error)}): {_LOG_IN}") from error


def _get_host(client: WorkspaceClient) -> str:
    return str(client.config.host).rstrip("/")


@contextlib.contextmanager
def explain_errors(host: str, subject: str) -> Iterator[None]:
    """Raises RemoteError instead of the SDK's errors, with the workspace's error as its cause. `subject` is requested."""
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
        raise RemoteError(f"{host}: {subject}: you are not logged in ({_describe_error(error)}): {_LOG_IN}") from error


def _explain_error(error: BaseException) -> str:
    text = _describe_error(error)
    if isinstance(error, TooManyRequests):
        return "too many requests (429), even after the requested wait; try again in some minutes"
    if isinstance(error, TemporarilyUnavailable):
        return "is not available for now (503); try again in some minutes"
    if isinstance(error, requests.Timeout):
        return "no answer in time; try again"
    if isinstance(error, requests.ConnectionError):
        return "cannot be reached; is the host right, and do network, VPN and proxy let you there?"
    if isinstance(error, Unauthenticated):
        return f"the credentials are not accepted (401: {text}); they may have run out: {_LOG_IN}"
    if isinstance(error, PermissionDenied):
        return f"not allowed (403: {text}); ask for it, or use another DATABRICKS_CONFIG_PROFILE"
    if isinstance(error, NotFound):
        return f"does not exist (404: {text}), or you may not see it"
    if isinstance(error, InternalError):
        return f"the workspace failed (500: {text}); try again, and look at the status page of the platform"
    if isinstance(error, DatabricksError):
        return f"refused ({error.error_code or type(error).__name__}: {text})"
    return f"gave up: {text}"


def _describe_error(error: BaseException) -> str:
    """Returns an error's text in one line, without the configuration that the SDK appends."""
    text = collapse_spaces(str(error)).partition(" Config: ")[0].rstrip(".")
    return text[:_MAX_CHARACTERS] or type(error).__name__
