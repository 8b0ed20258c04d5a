"""Reads the declared receivers: who is sent alerts, by webhook or e-mail, and which alerts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import urlsplit

from lookback.core.errors import DurationError, SetupError
from lookback.core.rules.document import SEVERITIES
from lookback.core.values.durations import parse_duration
from lookback.core.values.suggestions import suggest

VERDICTS = ("raised", "suppressed", "retracted")
MODES = ("active", "shadow")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,199}", re.ASCII)
_ADDRESS = re.compile(r"[^\s@<>\"',;:]{1,64}@[^\s@<>\"',;:]{1,255}")
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
_KEYS = ("name", "webhook", "email", "severity", "rules", "streams", "verdicts", "modes", "give_up_after", "timeout")
_WEBHOOK_KEYS = ("url", "url_env", "secret_env")
_EMAIL_KEYS = ("host", "port", "starttls", "from", "to", "user_env", "password_env")


@dataclass(frozen=True)
class Webhook:
    """A POST to a URL.

    url, or url_env: the environment variable that holds it; secret_env: the variable with the key to sign with.
    """

    url: str = ""
    url_env: str = ""
    secret_env: str = ""


@dataclass(frozen=True)
class Email:
    """A message by SMTP. user_env, password_env: environment variables; empty if the server needs no log-in."""

    host: str
    port: int
    sender: str
    to: tuple[str, ...]
    starttls: bool = True
    user_env: str = ""
    password_env: str = ""


@dataclass(frozen=True)
class Receiver:
    """A receiver of alerts.

    severity: the lowest that it is sent; rules, streams: names or patterns with * of those whose alerts it is sent.
    give_up_after: seconds after which an alert that could not be sent is given up; timeout: seconds for one attempt.
    """

    name: str
    way: Webhook | Email
    severity: str = "low"
    rules: tuple[str, ...] = ("*",)
    streams: tuple[str, ...] = ("*",)
    verdicts: tuple[str, ...] = ("raised", "retracted")
    modes: tuple[str, ...] = ("active",)
    give_up_after: float = 86_400.0
    timeout: float = 10.0

    def wants(self, alert: Mapping[str, Any]) -> bool:
        """Returns whether this receiver is sent a row of the alerts table."""
        return (
            alert["verdict"] in self.verdicts
            and alert["mode"] in self.modes
            and alert["severity"] in SEVERITIES[SEVERITIES.index(self.severity) :]
            and any(fnmatchcase(alert["stream"], pattern) for pattern in self.streams)
            and any(fnmatchcase(alert["rule_id"], pattern) for pattern in self.rules)
        )


def read_receivers(document: Any, place: str) -> tuple[Receiver, ...]:
    """Reads the receivers from a document {receivers: [...]}. place: its file, for messages.

    Raises SetupError with every problem at once.
    """
    reader = _Reader(place)
    if not isinstance(document, dict) or set(document) != {"receivers"} or not isinstance(document["receivers"], list):
        raise SetupError(f"{place} must hold the one key receivers, with a list")
    receivers = [reader.read_receiver(each, at) for at, each in enumerate(document["receivers"], 1)]
    names = [receiver.name for receiver in receivers if receiver]
    for name in sorted({name for name in names if names.count(name) > 1}):
        reader.problems.append(f"{place}: two receivers are named {name!r}; what was sent is remembered by name")
    if reader.problems:
        raise SetupError("\n".join(reader.problems))
    return tuple(receiver for receiver in receivers if receiver)


def find_url_problem(url: str) -> str:
    """Returns why a webhook's URL is refused; empty if it is valid. The URL may be a secret and is never repeated."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        return "is no URL"
    if not host or any(character.isspace() or not character.isprintable() for character in url):
        return "is no URL"
    if parts.username is not None or parts.password is not None:
        return "must hold no user and password; sign with secret_env"
    if parts.scheme == "https" or (parts.scheme == "http" and host in _LOCAL_HOSTS):
        return ""
    return "must begin with https://, or http:// for this machine"


class _Reader:
    """Reads a document and collects its problems."""

    def __init__(self, place: str) -> None:
        self.place, self.problems = place, list[str]()

    def read_receiver(self, document: Any, at: int) -> Receiver | None:
        """Reads a receiver; None if it has a problem."""
        before = len(self.problems)
        where = f"receiver {at}"
        if not isinstance(document, dict):
            self._add_problem(where, "must be a mapping")
            return None
        name = document.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            self._add_problem(where, f"name must be lower-case letters, digits, '.', '_' and '-', got {name!r:.100}")
            return None
        where = f"receiver {name!r}"
        self._check_keys(where, document, _KEYS)
        way = self._read_way(where, document)
        severity = document.get("severity", "low")
        if severity not in SEVERITIES:
            self._add_problem(where, f"severity must be one of {', '.join(SEVERITIES)}, got {severity!r:.100}")
        patterns = {key: self._read_texts(where, document, key, ("*",)) for key in ("rules", "streams")}
        verdicts = self._read_texts(where, document, "verdicts", ("raised", "retracted"), VERDICTS)
        modes = self._read_texts(where, document, "modes", ("active",), MODES)
        spans = {
            key: self._read_seconds(where, document, key, default)
            for key, default in (("give_up_after", "24 hours"), ("timeout", "10 seconds"))
        }
        if way is None or len(self.problems) > before:
            return None
        return Receiver(
            name, way, severity, patterns["rules"], patterns["streams"], verdicts, modes, spans["give_up_after"], spans["timeout"]
        )  # fmt: skip

    def _read_way(self, where: str, document: Mapping[str, Any]) -> Webhook | Email | None:
        if ("webhook" in document) == ("email" in document):
            self._add_problem(where, "has either webhook or email")
            return None
        kind = "webhook" if "webhook" in document else "email"
        part = document[kind]
        if not isinstance(part, dict):
            self._add_problem(where, f"{kind} must be a mapping")
            return None
        self._check_keys(f"{where}, {kind}", part, _WEBHOOK_KEYS if kind == "webhook" else _EMAIL_KEYS)
        for key in part:
            if str(key).endswith("_env") and not _VARIABLE.fullmatch(str(part[key])):
                # The value may be the secret itself, so the message does not repeat it.
                self._add_problem(where, f"{key} must be the name of a variable of the environment")
        return self._read_webhook(where, part) if kind == "webhook" else self._read_email(where, part)

    def _read_webhook(self, where: str, part: Mapping[str, Any]) -> Webhook | None:
        if ("url" in part) == ("url_env" in part):
            self._add_problem(where, "webhook has either url or url_env")
            return None
        if "url" in part and (problem := find_url_problem(str(part["url"]))):
            self._add_problem(where, f"url {problem}")
            return None
        return Webhook(**{key: str(part[key]) for key in _WEBHOOK_KEYS if key in part})

    def _read_email(self, where: str, part: Mapping[str, Any]) -> Email | None:
        to = self._read_texts(where, part, "to", ())
        host, port, starttls = part.get("host"), part.get("port", 587), part.get("starttls", True)
        for address in (*to, str(part.get("from", ""))):
            if not _ADDRESS.fullmatch(address):
                self._add_problem(
                    where, f"from and to must be addresses such as desk@example.com, got {address!r:.100}"
                )
        if not to:
            self._add_problem(where, "to must name at least one address")
        if not isinstance(host, str) or not host or not isinstance(port, int) or not 0 < port < 65_536:
            self._add_problem(where, f"host must be a name and port a number, got {host!r:.100} and {port!r:.100}")
            return None
        if not isinstance(starttls, bool):
            self._add_problem(where, "starttls must be true or false")
            return None
        if ("user_env" in part) != ("password_env" in part):
            self._add_problem(where, "user_env and password_env go together")
            return None
        if not starttls and "password_env" in part and host not in _LOCAL_HOSTS:
            self._add_problem(where, "a password goes over starttls alone")
            return None
        envs = {key: str(part[key]) for key in ("user_env", "password_env") if key in part}
        return Email(host, port, str(part.get("from")), to, starttls, **envs)

    def _read_texts(
        self, where: str, document: Mapping[str, Any], key: str, default: tuple[str, ...], known: Iterable[str] = ()
    ) -> tuple[str, ...]:
        value = document.get(key, default)
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, (list, tuple)) or not all(isinstance(each, str) and each for each in texts):
            self._add_problem(where, f"{key} must be a list of texts")
            return ()
        wrong = [each for each in texts if known and each not in known]
        if wrong:
            self._add_problem(where, f"{key} must be of {', '.join(known)}, got {wrong[0]!r:.100}")
        return tuple(texts)

    def _read_seconds(self, where: str, document: Mapping[str, Any], key: str, default: str) -> float:
        try:
            microseconds = parse_duration(document.get(key, default))
        except DurationError as error:
            self._add_problem(where, f"{key}: {error}")
            return 0.0
        if not microseconds:
            self._add_problem(where, f"{key} must be longer than 0 s")
        return microseconds / 1_000_000

    def _check_keys(self, where: str, document: Mapping[str, Any], known: tuple[str, ...]) -> None:
        for key in document:
            if key not in known:
                self._add_problem(where, f"has no key {key!r:.100}; {suggest(key, known)}")

    def _add_problem(self, where: str, message: str) -> None:
        self.problems.append(f"{self.place}: {where}: {message}")
