"""Reads the declared receivers: who gets which alerts, by webhook or e-mail."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, PlainValidator, Strict, ValidationInfo

from lookback.core.errors import DurationError, Problem, SetupError
from lookback.core.rules.document import SEVERITIES
from lookback.core.values.durations import parse_duration
from lookback.core.values.reading import Refused, needs, read_mapping

VERDICTS = ("raised", "suppressed", "retracted")
MODES = ("active", "shadow")
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


def find_url_problem(url: str) -> str:
    """Returns why a webhook's URL is refused; empty if it is valid. Never repeats the URL, which may be a secret."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        return "is not a URL"
    if not host or any(character.isspace() or not character.isprintable() for character in url):
        return "is not a URL"
    if parts.username is not None or parts.password is not None:
        return "must not contain a user or password; sign with secret_env"
    if parts.scheme == "https" or (parts.scheme == "http" and host in _LOCAL_HOSTS):
        return ""
    return "must begin with https://, or http:// for this machine"


def is_local_url(url: str) -> bool:
    """Returns whether a URL points to this machine."""
    return urlsplit(url).hostname in _LOCAL_HOSTS


def _read_url(url: object) -> str:
    if problem := find_url_problem(str(url)):
        raise ValueError(problem)
    return str(url)


def _read_severity(severity: object) -> str:
    if not isinstance(severity, str) or severity not in SEVERITIES:
        raise ValueError(f"must be one of {', '.join(SEVERITIES)}, got {severity!r:.100}")
    return severity


def _read_texts(value: object) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or not all(isinstance(each, str) and each for each in texts):
        raise ValueError("must be a list of texts")
    return tuple(texts)


def _make_choice_reader(known: tuple[str, ...]) -> PlainValidator:
    """Makes a validator that reads one of these texts, or a list of them."""

    def read(value: object) -> tuple[str, ...]:
        texts = _read_texts(value)
        if wrong := [each for each in texts if each not in known]:
            raise ValueError(f"must be among {', '.join(known)}, got {wrong[0]!r:.100}")
        return texts

    return PlainValidator(read)


def _read_recipients(value: object) -> tuple[str, ...]:
    texts = _read_texts(value or ())
    if not texts:
        raise ValueError("must name at least one address")
    return texts


def _read_seconds(value: object, info: ValidationInfo) -> float:
    try:
        microseconds = parse_duration(value)
    except DurationError as error:
        raise ValueError(f"{info.field_name}: {error}") from None
    if not microseconds:
        raise ValueError("must be longer than 0 s")
    return microseconds / 1_000_000


_WAY = "webhook or email"
_SERVER = "host must be a name and port a number"
Name = Annotated[
    str,
    Field(strict=True, pattern=r"^[a-z0-9][a-z0-9._-]{0,99}$"),
    needs("must be lower-case letters, digits, '.', '_' and '-'"),
]
Texts = Annotated[tuple[str, ...], PlainValidator(_read_texts)]
Seconds = Annotated[float, PlainValidator(_read_seconds)]
# The value may be the secret itself, so the message does not repeat it.
Variable = Annotated[
    str,
    Field(strict=True, pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,199}$"),
    needs("must be the name of an environment variable", shows_value=False),
]
Address = Annotated[
    str,
    Field(strict=True, pattern=r"^[^\s\x00-\x1f@<>\"',;:]{1,64}@[^\s\x00-\x1f@<>\"',;:]{1,255}$"),
    needs("from and to must be addresses such as desk@example.com"),
]


@dataclass(frozen=True)
class Webhook:
    """A POST to a URL.

    Attributes:
        url: The URL.
        url_env: Alternatively, the environment variable with the URL.
        secret_env: The environment variable with the signing key.
    """

    url: Annotated[str, PlainValidator(_read_url)] = ""
    url_env: Variable = ""
    secret_env: Variable = ""


@dataclass(frozen=True)
class Email:
    """A message by SMTP. `user_env` and `password_env` name environment variables; empty if no login is needed."""

    host: Annotated[str, Field(strict=True, min_length=1), needs(_SERVER)]
    port: Annotated[int, Field(strict=True, gt=0, lt=65_536), needs(_SERVER)]
    sender: Annotated[Address, Field(alias="from")]
    to: Annotated[tuple[Address, ...], BeforeValidator(_read_recipients)]
    starttls: Annotated[bool, Strict(), needs("must be true or false", shows_value=False)] = True
    user_env: Variable = ""
    password_env: Variable = ""


@dataclass(frozen=True)
class Receiver:
    """A receiver of alerts.

    Attributes:
        name: The receiver's name.
        way: How alerts are sent.
        severity: The lowest severity of the alerts that it gets; by default it gets all but info.
        rules: Names of the rules whose alerts it gets, or patterns with *.
        streams: Names of the streams whose alerts it gets, or patterns with *.
        verdicts: The verdicts of the alerts that it gets.
        modes: The modes of the alerts that it gets.
        give_up_after: Seconds after which an alert that could not be sent is given up.
        timeout: Seconds for one attempt.
    """

    name: Name
    way: Annotated[Webhook | Email, PlainValidator(_read_way), Field(alias=_WAY)]
    severity: Annotated[str, PlainValidator(_read_severity)] = "low"
    rules: Texts = ("*",)
    streams: Texts = ("*",)
    verdicts: Annotated[tuple[str, ...], _make_choice_reader(VERDICTS)] = ("raised", "retracted")
    modes: Annotated[tuple[str, ...], _make_choice_reader(MODES)] = ("active",)
    give_up_after: Seconds = 86_400.0
    timeout: Seconds = 10.0

    def wants(self, alert: Mapping[str, Any]) -> bool:
        """Returns whether this receiver gets a row of the alerts table."""
        return (
            alert["verdict"] in self.verdicts
            and alert["mode"] in self.modes
            and alert["severity"] in SEVERITIES[SEVERITIES.index(self.severity) :]
            and any(fnmatchcase(alert["stream"], pattern) for pattern in self.streams)
            and any(fnmatchcase(alert["rule_id"], pattern) for pattern in self.rules)
        )


def read_receivers(document: Any, place: str) -> tuple[Receiver, ...]:
    """Reads the receivers from a document {receivers: [...]}. `place` is its file, for messages.

    Raises SetupError with all problems at once.
    """
    if not isinstance(document, dict) or set(document) != {"receivers"} or not isinstance(document["receivers"], list):
        raise SetupError(f"{place} must have the single key receivers, with a list")
    problems: list[str] = []
    receivers = [_read_receiver(each, at, problems) for at, each in enumerate(document["receivers"], 1)]
    names = [receiver.name for receiver in receivers if receiver]
    problems += [
        f"two receivers are named {name!r}; sent alerts are remembered by name"
        for name in sorted({name for name in names if names.count(name) > 1})
    ]
    if problems:
        raise SetupError("\n".join(f"{place}: {problem}" for problem in problems))
    return tuple(receiver for receiver in receivers if receiver)


def _read_receiver(document: Any, at: int, problems: list[str]) -> Receiver | None:
    """Reads the receiver with number `at`; None if it has problems, which are added to the list."""
    if not isinstance(document, dict):
        problems.append(f"receiver {at}: must be a mapping")
        return None
    values = {key: value for key, value in document.items() if key not in _WAYS}
    values[_WAY] = {key: value for key, value in document.items() if key in _WAYS}
    try:
        return read_mapping(Receiver, values, unknown="has no key")
    except Refused as refused:
        has_name = all(problem.place != "name" for problem in refused.problems)
        where = f"receiver {document['name']!r}" if has_name else f"receiver {at}"
        found = [Problem(problem.place.rpartition(".")[2], problem.message) for problem in refused.problems]
        problems += [f"{where}: {problem.sentence}" for problem in found]
        return None


def _read_way(parts: dict[str, Any]) -> Webhook | Email:
    if len(parts) != 1:
        raise ValueError("must have either webhook or email")
    ((kind, part),) = parts.items()
    if not isinstance(part, dict):
        raise ValueError(f"{kind} must be a mapping")
    return _WAYS[kind](part)


def _read_webhook(part: dict[str, Any]) -> Webhook:
    has_one = ("url" in part) != ("url_env" in part)
    problems = [] if has_one else [Problem("", "webhook must have either url or url_env")]
    return read_mapping(Webhook, part, problems, unknown="webhook has no key")


def _read_email(part: dict[str, Any]) -> Email:
    problems = []
    if ("user_env" in part) != ("password_env" in part):
        problems.append(Problem("", "user_env and password_env go together"))
    if part.get("starttls") is False and "password_env" in part and part.get("host") not in _LOCAL_HOSTS:
        problems.append(Problem("", "a password requires starttls"))
    return read_mapping(Email, {"port": 587, **part}, problems, unknown="email has no key")


_WAYS: dict[str, Callable[[dict[str, Any]], Webhook | Email]] = {"webhook": _read_webhook, "email": _read_email}
