"""Who hears of alerts, by which way and of which."""

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
    """A POST to a URL. url, or the variable of the environment that holds it; secret_env: the one of the key to sign with."""

    url: str = ""
    url_env: str = ""
    secret_env: str = ""


@dataclass(frozen=True)
class Email:
    """A message by SMTP. user_env, password_env: variables of the environment; empty where the server asks for none."""

    host: str
    port: int
    sender: str
    to: tuple[str, ...]
    starttls: bool = True
    user_env: str = ""
    password_env: str = ""


@dataclass(frozen=True)
class Receiver:
    """One that hears of alerts.

    severity: of this and graver ones; rules, streams: names or patterns with * of those that it hears of. give_up_after:
    seconds after which an alert that could not be sent is given up; timeout: seconds that one attempt may take.
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
        """Whether it hears of a row of the alerts table."""
        return (
            alert["verdict"] in self.verdicts
            and alert["mode"] in self.modes
            and alert["severity"] in SEVERITIES[SEVERITIES.index(self.severity) :]
            and any(fnmatchcase(alert["stream"], pattern) for pattern in self.streams)
            and any(fnmatchcase(alert["rule_id"], pattern) for pattern in self.rules)
        )


def read_receivers(document: Any, place: str) -> tuple[Receiver, ...]:
    """The receivers that a document {receivers: [...]} declares. place: its file, for messages.

    Raises SetupError with every problem at once.
    """
    reader = _Reader(place)
    if not isinstance(document, dict) or set(document) != {"receivers"} or not isinstance(document["receivers"], list):
        raise SetupError(f"{place} must hold the one key receivers, with a list")
    found = [reader.receiver(each, at) for at, each in enumerate(document["receivers"], 1)]
    names = [receiver.name for receiver in found if receiver]
    for name in sorted({name for name in names if names.count(name) > 1}):
        reader.problems.append(f"{place}: two receivers are named {name!r}; what was sent is remembered by name")
    if reader.problems:
        raise SetupError("\n".join(reader.problems))
    return tuple(receiver for receiver in found if receiver)


def url_problem(url: str) -> str:
    """Why a webhook's URL is refused; empty where it is fine. The URL itself may be a secret and is not repeated."""
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
    """Reads a document and collects what is wrong with it."""

    def __init__(self, place: str) -> None:
        self.place, self.problems = place, list[str]()

    def receiver(self, document: Any, at: int) -> Receiver | None:
        """The receiver, or None where something is wrong with it."""
        before = len(self.problems)
        where = f"receiver {at}"
        if not isinstance(document, dict):
            self._wrong(where, "must be a mapping")
            return None
        name = document.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            self._wrong(where, f"name must be lower-case letters, digits, '.', '_' and '-', got {name!r:.100}")
            return None
        where = f"receiver {name!r}"
        self._unknown(where, document, _KEYS)
        way = self._way(where, document)
        severity = document.get("severity", "low")
        if severity not in SEVERITIES:
            self._wrong(where, f"severity must be one of {', '.join(SEVERITIES)}, got {severity!r:.100}")
        patterns = {key: self._texts(where, document, key, ("*",)) for key in ("rules", "streams")}
        verdicts = self._texts(where, document, "verdicts", ("raised", "retracted"), VERDICTS)
        modes = self._texts(where, document, "modes", ("active",), MODES)
        spans = {
            key: self._seconds(where, document, key, default)
            for key, default in (("give_up_after", "24 hours"), ("timeout", "10 seconds"))
        }
        if way is None or len(self.problems) > before:
            return None
        return Receiver(
            name, way, severity, patterns["rules"], patterns["streams"], verdicts, modes, spans["give_up_after"], spans["timeout"]
        )  # fmt: skip

    def _way(self, where: str, document: Mapping[str, Any]) -> Webhook | Email | None:
        if ("webhook" in document) == ("email" in document):
            self._wrong(where, "has either webhook or email")
            return None
        kind = "webhook" if "webhook" in document else "email"
        part = document[kind]
        if not isinstance(part, dict):
            self._wrong(where, f"{kind} must be a mapping")
            return None
        self._unknown(f"{where}, {kind}", part, _WEBHOOK_KEYS if kind == "webhook" else _EMAIL_KEYS)
        for key in part:
            if str(key).endswith("_env") and not _VARIABLE.fullmatch(str(part[key])):
                # Perhaps it is the secret itself.
                self._wrong(where, f"{key} must be the name of a variable of the environment")
        return self._webhook(where, part) if kind == "webhook" else self._email(where, part)

    def _webhook(self, where: str, part: Mapping[str, Any]) -> Webhook | None:
        if ("url" in part) == ("url_env" in part):
            self._wrong(where, "webhook has either url or url_env")
            return None
        if "url" in part and (problem := url_problem(str(part["url"]))):
            self._wrong(where, f"url {problem}")
            return None
        return Webhook(**{key: str(part[key]) for key in _WEBHOOK_KEYS if key in part})

    def _email(self, where: str, part: Mapping[str, Any]) -> Email | None:
        to = self._texts(where, part, "to", ())
        host, port, starttls = part.get("host"), part.get("port", 587), part.get("starttls", True)
        for address in (*to, str(part.get("from", ""))):
            if not _ADDRESS.fullmatch(address):
                self._wrong(where, f"from and to must be addresses such as desk@example.com, got {address!r:.100}")
        if not to:
            self._wrong(where, "to must name at least one address")
        if not isinstance(host, str) or not host or not isinstance(port, int) or not 0 < port < 65_536:
            self._wrong(where, f"host must be a name and port a number, got {host!r:.100} and {port!r:.100}")
            return None
        if not isinstance(starttls, bool):
            self._wrong(where, "starttls must be true or false")
            return None
        if ("user_env" in part) != ("password_env" in part):
            self._wrong(where, "user_env and password_env go together")
            return None
        if not starttls and "password_env" in part and host not in _LOCAL_HOSTS:
            self._wrong(where, "a password goes over starttls alone")
            return None
        envs = {key: str(part[key]) for key in ("user_env", "password_env") if key in part}
        return Email(host, port, str(part.get("from")), to, starttls, **envs)

    def _texts(
        self, where: str, document: Mapping[str, Any], key: str, default: tuple[str, ...], known: Iterable[str] = ()
    ) -> tuple[str, ...]:
        value = document.get(key, default)
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, (list, tuple)) or not all(isinstance(each, str) and each for each in texts):
            self._wrong(where, f"{key} must be a list of texts")
            return ()
        wrong = [each for each in texts if known and each not in known]
        if wrong:
            self._wrong(where, f"{key} must be of {', '.join(known)}, got {wrong[0]!r:.100}")
        return tuple(texts)

    def _seconds(self, where: str, document: Mapping[str, Any], key: str, default: str) -> float:
        try:
            microseconds = parse_duration(document.get(key, default))
        except DurationError as error:
            self._wrong(where, f"{key}: {error}")
            return 0.0
        if not microseconds:
            self._wrong(where, f"{key} must be longer than 0 s")
        return microseconds / 1_000_000

    def _unknown(self, where: str, document: Mapping[str, Any], known: tuple[str, ...]) -> None:
        for key in document:
            if key not in known:
                self._wrong(where, f"has no key {key!r:.100}; {suggest(key, known)}")

    def _wrong(self, where: str, message: str) -> None:
        self.problems.append(f"{self.place}: {where}: {message}")
