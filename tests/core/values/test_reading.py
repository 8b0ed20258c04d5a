"""A mapping is read as a dataclass: what pydantic would coerce is refused, and every problem has its place and sentence."""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass, field, replace
from types import MappingProxyType
from typing import Annotated, Any

import pytest
from pydantic import Field, PlainValidator, Strict

from lookback.core.errors import Problem, SetupError, StreamError
from lookback.core.operations.receivers import Receiver, Webhook, read_receivers
from lookback.core.streams.declaration import Stream
from lookback.core.values.limits import Limits
from lookback.core.values.reading import Refused, list_document_keys, needs, read_mapping

STREAM = {
    "stream": "payments",
    "event_id": "id",
    "event_time": "at",
    "fields": {"id": "bigint", "at": "timestamp", "amount": "decimal(18,2)"},
}
HOOK = {"name": "on-call", "webhook": {"url": "https://hooks.example.com/x"}}
DESK = {
    "name": "desk",
    "email": {"host": "smtp.example.com", "from": "lookback@example.com", "to": ["desk@example.com"]},
}
LATER = object()
# Of every type that YAML, JSON or Python can put into a document, with values that a lax reader would take for others.
ODD: list[Any] = [
    None, True, False, 0, 1, -1, 1.0, 0.5, math.nan, math.inf, 10**30, "", " ", "1", "true", "a\n", "\ud800", "é", "ⅷ", "²", b"x",
    [], ["a"], [None], (), ("id",), {"x"}, {}, {"a": {"b": {"c": [1]}}}, {1: 2}, {None: None}, {"": ""}, {"\ud800": 1}, LATER, int,
    "x" * 300, Limits(), Webhook("https://a.example.com"),
]  # fmt: skip


def stream_problems(**changes: Any) -> dict[str, str]:
    with pytest.raises(StreamError) as refused:
        Stream.from_dict({**STREAM, **changes})
    return {problem.place: problem.message for problem in refused.value.problems}


def receiver_problems(document: Any) -> str:
    with pytest.raises(SetupError) as refused:
        read_receivers({"receivers": [document]}, "notifiers.yml")
    return str(refused.value)


# The reader itself -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inner:
    count: Annotated[int, Field(strict=True, ge=1), needs("a positive integer is needed")] = 1


def read_inner(value: Any) -> Inner:
    return read_mapping(Inner, value, unknown="unknown part")


@dataclass(frozen=True)
class Outer:
    name: Annotated[str, Strict(), Field(alias="of"), needs("a text is needed")]
    secret: Annotated[str, Strict(), needs("a secret is needed", shows_value=False)] = ""
    inner: Annotated[Inner, PlainValidator(read_inner)] = field(default_factory=Inner)


def test_what_a_mapping_says_is_read_and_the_rest_has_its_default() -> None:
    assert read_mapping(Outer, {"of": "x"}) == Outer("x")
    read = read_mapping(Outer, MappingProxyType({"of": "x", "inner": {"count": 3}}))
    assert read == Outer("x", inner=Inner(3))
    assert dict(list_document_keys(Outer)) == {"of": True, "secret": False, "inner": False}


def test_every_problem_is_told_with_its_place_and_sentence() -> None:
    document = {"name": "x", 3: 4, "secret": 5, "inner": {"count": True, "cuont": 2}}
    with pytest.raises(Refused) as refused:
        read_mapping(Outer, document, [Problem("between", "found before")])
    assert refused.value.problems == [
        Problem("name", "unknown key 'name'; known: of, secret, inner"),
        Problem("3", "unknown key '3'; known: of, secret, inner"),
        Problem("between", "found before"),
        Problem("of", "a text is needed, got None"),
        Problem("secret", "a secret is needed"),
        Problem("inner.cuont", "unknown part 'cuont'; did you mean 'count'?"),
        Problem("inner.count", "a positive integer is needed, got True"),
    ]


def test_an_object_made_without_a_document_is_not_checked() -> None:
    assert replace(Outer("x"), name=5).name == 5  # type: ignore[arg-type]


# What a lax reader would take ------------------------------------------------------------------------------------------


# Names that are the same in every process, which those of objects are not.
@pytest.mark.parametrize("value", ODD, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("key", list_document_keys(Stream))
def test_any_value_of_a_streams_key_is_refused_at_its_place_or_kept(key: str, value: Any) -> None:
    try:
        stream = Stream.from_dict({**STREAM, key: value})
    except StreamError as refused:
        places = {re.split(r"[.\[]", problem.place)[0] for problem in refused.problems}
        # With other fields, the other keys that name fields are wrong too.
        # The id of a union is a text, and its fields are those of its members.
        others = {"fields": {"event_id", "event_time"}, "union": {"fields", "columns"}}
        assert places <= {key} | others.get(key, set())
        return
    assert Stream.from_dict(stream.to_dict()) == stream


@pytest.mark.parametrize("key", ["max_revisions", "max_failures", "commit_rows", "shards"])
@pytest.mark.parametrize("value", [None, True, 1.0, 0, -1, "1", math.nan, math.inf, [1]])
def test_a_count_is_a_positive_integer_and_nothing_like_it(key: str, value: Any) -> None:
    assert stream_problems(**{key: value}) == {key: f"a positive integer is needed, got {value!r}"}


@pytest.mark.parametrize("value", [None, True, 5, 5.0, math.nan, "5", "1 month", ["1 hour"], b"1 hour"])
def test_a_duration_is_a_text_with_a_unit(value: Any) -> None:
    assert set(stream_problems(max_future=value)) == {"max_future"}


@pytest.mark.parametrize("value", [True, 2.0, "2", math.nan, None, 0, 501, [2]])
def test_a_limit_is_an_integer_in_its_range(value: Any) -> None:
    message = f"a whole number from 1 to 500 is needed, got {value!r}"
    assert stream_problems(limits={"measures": value}) == {"limits.measures": message}


@pytest.mark.parametrize("value", [Limits(), None, [], "", 0])
def test_limits_are_a_mapping(value: Any) -> None:
    assert stream_problems(limits=value) == {"limits": f"a mapping of limit to number is needed, got {value!r:.100}"}


@pytest.mark.parametrize("key", ["columns", "comments", "source", "table", "lookups"])
def test_a_key_without_a_value_is_as_if_it_were_left_out(key: str) -> None:
    assert Stream.from_dict({**STREAM, key: None}) == Stream.from_dict(STREAM)


@pytest.mark.parametrize(
    "name", ["payments\n", "Payments", "²", "pay\u0660", "\ud800", " payments", 5, None, b"payments"]
)
def test_a_name_is_ascii_and_whole(name: Any) -> None:
    assert "lower-case letters, digits and _ is needed" in stream_problems(stream=name)["stream"]


def test_problems_between_keys_are_told_beside_those_of_the_keys() -> None:
    found = stream_problems(
        fields={"id": "money", "at": "timestamp", "x": "int"}, event_id="idd", event_time="x", commit_rows=0
    )
    assert set(found) == {"fields.id", "event_id", "event_time", "commit_rows"}
    # The id is declared, and the problem of its type is told once.
    assert set(stream_problems(fields={"id": "money", "at": "timestamp"})) == {"fields.id"}


# Names that are the same in every process, which those of objects are not.
@pytest.mark.parametrize("value", ODD, ids=lambda value: type(value).__name__)
def test_any_value_of_a_receivers_key_is_refused_in_sentences_or_kept(value: Any) -> None:
    for document in (HOOK, DESK):
        for key in (
            "name",
            "webhook",
            "email",
            "severity",
            "rules",
            "verdicts",
            "modes",
            "give_up_after",
            "timeout",
            "way",
        ):
            read_or_refuse({**document, key: value})
    for key in ("url", "url_env", "secret_env", "other"):
        read_or_refuse({**HOOK, "webhook": {**HOOK["webhook"], key: value}})  # type: ignore[dict-item]
    for key in ("host", "port", "starttls", "from", "to", "user_env", "password_env", "sender"):
        read_or_refuse({**DESK, "email": {**DESK["email"], key: value}})  # type: ignore[dict-item]
    read_or_refuse(value)


def read_or_refuse(document: Any) -> None:
    try:
        (receiver,) = read_receivers({"receivers": [document]}, "notifiers.yml")
    except SetupError:
        assert receiver_problems(document).startswith("notifiers.yml: receiver ")
        return
    assert isinstance(receiver.way, Webhook if "webhook" in document else object)
    assert receiver.timeout > 0
    assert all(isinstance(each, str) and each for each in (*receiver.rules, *receiver.verdicts, *receiver.modes))


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        ({"url_env": None}, "url_env must be the name of an environment variable"),
        ({"url_env": True}, "url_env must be the name of an environment variable"),
        (
            {"url": "https://a.example.com", "secrt_env": "X"},
            "webhook has no key 'secrt_env'; did you mean 'secret_env'?",
        ),
        ([], "webhook must be a mapping"),
    ],
)
def test_a_variable_without_a_name_is_refused(part: Any, problem: str) -> None:
    assert receiver_problems({"name": "on-call", "webhook": part}).startswith("notifiers.yml: receiver 'on-call': ")
    assert problem in receiver_problems({"name": "on-call", "webhook": part})


@pytest.mark.parametrize("port", [True, 587.0, "587", 0, 65_536, None])
def test_a_port_is_an_integer_in_its_range(port: Any) -> None:
    assert "host must be a name and port a number" in receiver_problems(
        {**DESK, "email": {**DESK["email"], "port": port}}
    )  # type: ignore[dict-item]


def test_a_secret_is_in_no_message_of_a_receiver() -> None:
    for key in ("url", "url_env", "secret_env"):
        assert "s3cret" not in receiver_problems({**HOOK, "webhook": {key: "http://u:s3cret@example.com"}})


def test_a_receiver_that_is_wrong_in_all_keys_says_so_of_each() -> None:
    wrong = {
        "name": "x",
        "webhook": {"url": 5},
        "severity": 1,
        "rules": {1},
        "verdicts": "no",
        "modes": [1],
        "timeout": 5,
    }
    text = receiver_problems(wrong)
    assert len(text.splitlines()) == 6
    assert "receiver 'x': url is not a URL" in text
    assert "receiver 'x': timeout: 5 is not a duration" in text


# What the objects are for others ---------------------------------------------------------------------------------------


def test_streams_and_receivers_are_compared_pickled_and_never_changed() -> None:
    stream = Stream.from_dict({**STREAM, "limits": {"measures": 3}})
    (receiver,) = read_receivers({"receivers": [HOOK]}, "notifiers.yml")
    for each in (stream, receiver, stream.limits):
        assert pickle.loads(pickle.dumps(each)) == each
    assert receiver == Receiver("on-call", Webhook("https://hooks.example.com/x"))
    assert replace(stream, limits=Limits()) == Stream.from_dict(STREAM)
    assert hash(receiver) == hash(pickle.loads(pickle.dumps(receiver)))
    with pytest.raises(FrozenInstanceError):
        stream.name = "other"  # type: ignore[misc]
    assert isinstance(stream.fields, Mapping)
