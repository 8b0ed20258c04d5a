"""Resolves references to secrets in a declaration: ${env:NAME} and ${secret:SCOPE/KEY}."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lookback.core.errors import SetupError
from lookback.core.values.texts import first_line

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_REFERENCE = re.compile(r"\$\{(env|secret):([^}]*)\}")
_HIDDEN = "***"
# Names of options whose whole value is a secret, and assignments of a secret inside a longer text.
_SECRET_NAME = re.compile(r"(password|secret|token|\.key|api[._-]?key)$", re.IGNORECASE)
_SECRET_PART = re.compile(r"\b(\w*(?:password|secret))\s*=\s*(?!\s*[\"']?\$\{)[\"']?[^\s\"';]", re.IGNORECASE)


@dataclass
class Secrets:
    """Replaces references with secrets, and hides the secrets in messages.

    ${env:NAME} is an environment variable, ${secret:SCOPE/KEY} a secret of the Databricks workspace.
    """

    spark: SparkSession | None = None
    _known: set[str] = field(default_factory=set, repr=False)

    def resolve(self, text: str, place: str) -> str:
        """Returns the text with references resolved. Raises SetupError, which names `place`, if one is missing."""

        def value(match: re.Match[str]) -> str:
            secret = (
                _read_variable(match[2], place)
                if match[1] == "env"
                else _read_workspace_secret(self.spark, match[2], place)
            )
            # Inside quotes, as in sasl.jaas.config, a quote in the secret would end the value.
            quoted = secret.replace("\\", "\\\\").replace('"', '\\"')
            self._known |= {secret, quoted}
            return quoted if text[match.start() - 1 : match.start()] == '"' else secret

        return _REFERENCE.sub(value, text)

    def hide(self, text: str) -> str:
        """Returns the text with all resolved secrets replaced by ***."""
        for secret in sorted(self._known, key=len, reverse=True):
            text = text.replace(secret, _HIDDEN) if secret else text
        return text


def find_plain_secrets(options: Mapping[str, str]) -> list[str]:
    """Returns the names of options that contain a secret instead of a reference."""
    return [
        name
        for name, value in options.items()
        if (_SECRET_NAME.search(name) and not _REFERENCE.search(value)) or _SECRET_PART.search(value)
    ]


def _read_variable(name: str, place: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise SetupError(f"{place} reads the environment variable {name}, which is not set; set it and start again")
    return value


def _read_workspace_secret(spark: SparkSession | None, text: str, place: str) -> str:
    scope, _, key = text.partition("/")
    if not (scope and key):
        raise SetupError(f"{place}: write a secret of the workspace as ${{secret:SCOPE/KEY}}, got ${{secret:{text}}}")
    try:
        from pyspark.dbutils import DBUtils  # type: ignore[import-not-found,unused-ignore]  # noqa: PLC0415
    except ImportError:
        raise SetupError(
            f"{place} reads the secret {text}, which is available only on Databricks; here use ${{env:NAME}}"
        ) from None
    try:
        return str(DBUtils(spark).secrets.get(scope, key))
    except Exception as error:
        raise SetupError(f"{place}: the secret {text} cannot be read: {first_line(error):.200}") from error
