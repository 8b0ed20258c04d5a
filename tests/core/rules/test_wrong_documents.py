"""Errors that teach: what is wrong with a rule document is told with its place, what was found and what to write."""

from __future__ import annotations

import copy
import datetime as dt
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from lookback import Harness, replay
from lookback.core.errors import Problem, RuleError, StreamError
from lookback.core.rules.compiling import compile_rule
from lookback.core.rules.document import KEYS_OF_KIND, read_document, read_rule
from lookback.core.rules.problems import MAX_PROBLEMS
from lookback.core.streams.declaration import Stream

PAYMENTS = Stream.from_dict(
    {
        "stream": "payments",
        "event_id": "payment_id",
        "event_time": "event_time",
        "fields": {
            "payment_id": "bigint", "event_time": "timestamp", "customer_id": "int", "beneficiary_id": "string",
            "payment_type": "string", "amount": "decimal(18,2)", "rate": "double", "tags": "array<string>",
        },
        "allowed_lateness": "1 hour",
    }
)  # fmt: skip
_LOGINS = {
    "stream": "logins",
    "event_id": "event_id",
    "event_time": "event_time",
    "fields": {
        "event_id": "string",
        "event_time": "timestamp",
        "user_id": "string",
        "ip": "string",
        "outcome": "string",
    },
}
LOGINS = Stream.from_dict(_LOGINS)
COUNTED = Stream.from_dict({**_LOGINS, "fields": {**_LOGINS["fields"], "Count": "int"}})
STREAMS = {"payments": PAYMENTS, "logins": LOGINS}

LOOKBACK: dict[str, Any] = {
    "rule_id": "beneficiary-burst",
    "stream": "payments",
    "group_by": ["beneficiary_id"],
    "where": "payment_type = 'CSH'",
    "window": "24 hours",
    "measures": {"total": "sum(amount)", "usual": {"measure": "avg(amount)", "window": "30 days"}},
    "when": "total > 5 * usual and amount > 100",
    "message": "{total} to {beneficiary_id}",
    "tests": [{"name": "one", "events": [{"payment_id": 1}], "alerts": [{"event_id": 1}]}],
}
TUMBLING: dict[str, Any] = {
    "rule_id": "busy-minutes",
    "stream": "payments",
    "group_by": ["customer_id"],
    "window": {"tumbling": "5 minutes", "offset": "1 minute"},
    "measures": {"total": "sum(amount)"},
    "when": "total >= 10",
    "message": "{total} by {customer_id}",
}
SLIDING = {**TUMBLING, "rule_id": "busy-hours", "window": {"sliding": "1 hour", "slide": "5 minutes"}}
SESSION = {**TUMBLING, "rule_id": "visits", "window": {"session": "30 minutes"}}
SEQUENCE: dict[str, Any] = {
    "rule_id": "login-takeover",
    "stream": "logins",
    "group_by": ["user_id"],
    "sequence": {
        "within": "10 minutes",
        "steps": [
            {"name": "failures", "where": "outcome = 'FAIL'", "at_least": 3},
            {"name": "success", "where": "outcome = 'SUCCESS' and not array_contains(failures.ip, ip)"},
        ],
        "until": "outcome = 'SUCCESS'",
    },
    "message": "{failures.count} failures, then {ip}",
}
FAILURES, SUCCESS = SEQUENCE["sequence"]["steps"]
SILENT = {"name": "silent", "absent": "outcome = 'SUCCESS'", "within": "5 minutes"}
ABSENCE = {**SEQUENCE, "rule_id": "no-success", "sequence": {"within": "10 minutes", "steps": [FAILURES, SILENT]}}
EVENT = {
    "rule_id": "large",
    "stream": "payments",
    "group_by": ["customer_id"],
    "where": "amount > 100",
    "message": "{amount} by {customer_id}",
}
GOOD = [EVENT, LOOKBACK, TUMBLING, SLIDING, SESSION, SEQUENCE, ABSENCE]


class Wrong(NamedTuple):
    """A wrong document (or its text, as the table holds it), and of one of its problems the place and some words."""

    name: str
    document: object
    place: str
    words: tuple[str, ...]
    stream: Stream | None = None


def changed(base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The document with some keys changed; `...` removes a key."""
    return {key: value for key, value in {**base, **changes}.items() if value is not ...}


def lookback(**changes: Any) -> dict[str, Any]:
    return changed(LOOKBACK, **changes)


def tumbling(**changes: Any) -> dict[str, Any]:
    return changed(TUMBLING, **changes)


def window(base: dict[str, Any] = TUMBLING, **keys: str) -> dict[str, Any]:
    return changed(base, window=keys)


def measures(**more: object) -> dict[str, Any]:
    return changed(LOOKBACK, measures={**LOOKBACK["measures"], **more})


def coarse(resolution: object, n: str = "count(*)", **keys: Any) -> dict[str, Any]:
    """The lookback rule with a resolution, and one more measure."""
    wanted = {"lookback": "24 hours", "resolution": resolution, **keys}
    return changed(LOOKBACK, window=wanted, measures={**LOOKBACK["measures"], "n": n})


def sequence(**changes: Any) -> dict[str, Any]:
    return changed(SEQUENCE, sequence=changed(SEQUENCE["sequence"], **changes))


def steps(*items: object) -> dict[str, Any]:
    return sequence(steps=list(items))


def step(**changes: Any) -> dict[str, Any]:
    """The sequence with its first step changed."""
    return steps(changed(FAILURES, **changes), SUCCESS)


def nested(levels: int) -> list[Any]:
    made: list[Any] = []
    for _ in range(levels):
        made = [made]
    return made


NOT_A_QUERY = ("a query is not allowed", "an expression sees the fields of one event")
NO_DURATION = ("is not a duration", "write an integer and a unit, such as '24 hours'")
FIRST, SECOND = "sequence.steps[0]", "sequence.steps[1]"

KEYS = [
    Wrong("an unknown key", lookback(windw="1 hour"), "windw", ("unknown key 'windw'", "did you mean 'window'?")),
    Wrong("an unknown key without a window", {**EVENT, "windw": "1 hour"}, "windw", ("did you mean 'window'?",)),
    Wrong("no condition", changed(EVENT, where=...), "when", ("judges each event by itself", "'amount >= 10000'")),
    Wrong("revise on an event rule", {**EVENT, "late": "revise"}, "late", ("an event rule takes evaluate or record",)),
    Wrong(
        "reset on an event rule",
        {**EVENT, "reset_on_alert": True},
        "reset_on_alert",
        ("for lookback and sequence rules", "this is an event rule"),
    ),
    Wrong("early on an event rule", {**EVENT, "early": True}, "early", ("this is an event rule", "leave it out")),
    Wrong("a measure in an event rule", {**EVENT, "when": "n > 3"}, "when", ("unknown field 'n'",)),
    Wrong("a key in capitals", lookback(Severity="low"), "Severity", ("'Severity'", "did you mean 'severity'?")),
    Wrong(
        "another word for when",
        lookback(condition="n > 3"),
        "condition",
        ("unknown key 'condition'", "did you mean 'when'?"),
    ),
    Wrong("another word for group_by", lookback(partition_by=["id"]), "partition_by", ("did you mean 'group_by'?",)),
    Wrong("a key like no other", lookback(zzz=1), "zzz", ("unknown key 'zzz'", "known: rule_id, description")),
    Wrong("a key that is no text", {**LOOKBACK, True: 1}, "true", ("unknown key true", "known:")),
    Wrong("a very long key", {**LOOKBACK, "k" * 50_000: 1}, "kkk ... kkk", ("unknown key 'kkk", "known:")),
    Wrong("the status of a row", lookback(status="active"), "status", ("status", "in the rule's row", "leave it out")),
    Wrong(
        "early on lookback", lookback(early=True), "early", ("for tumbling, sliding and session rules", "lookback rule")
    ),
    Wrong("late on tumbling", tumbling(late="record"), "late", ("event, lookback and sequence rules", "leave it out")),
    Wrong("late on sliding", {**SLIDING, "late": "record"}, "late", ("this is a sliding rule", "leave it out")),
    Wrong("late on session", {**SESSION, "late": "record"}, "late", ("this is a session rule", "leave it out")),
    Wrong(
        "reset on tumbling", tumbling(reset_on_alert=True), "reset_on_alert", ("for lookback and sequence", "tumbling")
    ),
    Wrong("early on a sequence", changed(SEQUENCE, early=True), "early", ("this is a sequence rule", "leave it out")),
    Wrong(
        "measures on a sequence", changed(SEQUENCE, measures={"n": "count(*)"}), "measures", ("sequence rule", "leave")
    ),
    Wrong(
        "when on a sequence", changed(SEQUENCE, when="n > 1"), "when", ("when is for event, lookback", "leave it out")
    ),
    Wrong(
        "a window and a sequence", changed(SEQUENCE, window="1 hour"), "window", ("not both", "leave the window out")
    ),
    Wrong("no rule_id", lookback(rule_id=...), "rule_id", ("is missing", "write a name such as 'large-payment'")),
    Wrong("no stream", lookback(stream=...), "stream", ("is missing", "name the stream")),
    Wrong("no window", lookback(window=...), "window", ("is missing", "such as 'window: 24 hours'")),
    Wrong("no measures", lookback(measures=...), "measures", ("is missing", "such as 'n: count(*)'")),
    Wrong("no measures in a window", tumbling(measures=...), "measures", ("is missing", "such as 'n: count(*)'")),
    Wrong("no when", lookback(when=...), "when", ("is missing", "such as 'n >= 10'")),
    Wrong("an empty when", lookback(when=""), "when", ("is blank", "such as 'n >= 10'")),
    Wrong("an empty where", lookback(where=" "), "where", ("is blank", "leave it out for all")),
]
VALUES = [
    Wrong("an id with capitals", lookback(rule_id="Burst"), "rule_id", ("lower-case", "got 'Burst'", "write 'burst'")),
    Wrong("an id with spaces", lookback(rule_id="my rule"), "rule_id", ("got 'my rule'", "write 'my-rule'")),
    Wrong("an id with a line's end", lookback(rule_id="burst\n"), "rule_id", (r"got 'burst\n'", "write 'burst'")),
    Wrong("an id too long", lookback(rule_id="a" * 101), "rule_id", ("1 to 100", "got 'aaa")),
    Wrong("an id with SQL", lookback(rule_id="r'; drop table rules; --"), "rule_id", ("drop table", "1 to 100 lower-case")),
    Wrong("an id that is a command", lookback(rule_id="*"), "rule_id", ("got '*'", "write 'large-payment'")),
    Wrong("an id that is a number", lookback(rule_id=5), "rule_id", ("got 5", "write '5'")),
    Wrong("severity in capitals", lookback(severity="HIGH"), "severity", ("info, low, medium, high, critical", "did you mean 'high'?")),
    Wrong("severity without a value", lookback(severity=None), "severity", ("must be one of info, low", "got null")),
    Wrong("a tag that is no list", lookback(tags="attack.t1110"), "tags", ("must be a list of texts, such as [attack.t1110]", "got 'attack.t1110'")),
    Wrong("tags without a value", lookback(tags=None), "tags", ("must be a list of texts", "got null")),
    Wrong("a tag that is a number", lookback(tags=["a", 1110]), "tags", ("must be a list of texts", '["a", 1110]')),
    Wrong("a tag with blanks", lookback(tags=["a", "credential access"]), "tags[1]", ("'credential access' has blanks", "write 'credential_access'")),
    Wrong("a blank tag", lookback(tags=[" "]), "tags[0]", ("is blank", "such as 'attack.t1110'")),
    Wrong("a tag of 101 characters", lookback(tags=["x" * 101]), "tags[0]", ("has 101 characters", "at most 100", "use `description`")),
    Wrong("a tag twice", lookback(tags=["attack.t1110", "ATTACK.T1110"]), "tags[1]", ("'ATTACK.T1110' is there twice", "leave one out")),
    Wrong("too many tags", lookback(tags=[f"t{n}" for n in range(101)]), "tags", ("has 101 entries", "at most 100", "leave some out")),
    Wrong("a reference that is no list", lookback(references="https://example.org"), "references", ("must be a list of texts, such as [https://",)),
    Wrong("a reference that is a path", lookback(references=["https://a.org", "docs/a.md"]), "references[1]", ("must be a URL that begins with http:// or https://", "'docs/a.md'")),
    Wrong("a reference that is a script", lookback(references=["javascript:alert(1)"]), "references[0]", ("http:// or https://",)),
    Wrong("a reference without a host", lookback(references=["https:///a"]), "references[0]", ("http:// or https://",)),
    Wrong("a reference with a blank", lookback(references=["https://a.org/b c"]), "references[0]", ("http:// or https://",)),
    Wrong("a reference too long", lookback(references=["https://a.org/" + "x" * 2_000]), "references[0]", ("has 2,014 characters", "at most 2,000", "use a shorter one")),
    Wrong("a blank runbook", lookback(runbook=" "), "runbook", ("is blank", "what to do about an alert", "leave it out")),
    Wrong("a runbook that is a list", lookback(runbook=["call"]), "runbook", ("must be a text", "in quotes")),
    Wrong("a source that is a text", lookback(source="sigma"), "source", ("must be a mapping, such as {format: sigma", "got 'sigma'")),
    Wrong("an unknown key of a source", lookback(source={"licence": "MIT"}), "source.licence", ("unknown key 'licence'", "did you mean 'license'?")),
    Wrong("a source with a wrong url", lookback(source={"url": "ftp://a.org"}), "source.url", ("http:// or https://", "'ftp://a.org'")),
    Wrong("a source with a number", lookback(source={"id": 5}), "source.id", ("must be a text", "in quotes")),
    Wrong("an entity that is no text", lookback(entity=["beneficiary_id"]), "entity", ("must be a text", "in quotes")),
    Wrong("an empty entity", lookback(entity=""), "entity", ("is blank", "name a field of the event or of group_by")),
    Wrong("an entity that is not in group_by", tumbling(entity="amount"), "entity", ("'amount' is not in group_by", "a tumbling window has many events", "add it there")),
    Wrong("entities that are not in group_by", changed(SESSION, entities=["customer_id", "amount"]), "entities[1]", ("'amount' is not in group_by", "a session window", "name one of its fields")),
    Wrong("an entity misspelt", lookback(entity="beneficary_id"), "entity", ("has no field 'beneficary_id'", "did you mean 'beneficiary_id'?")),
    Wrong("an entity that is no field", lookback(entities=["customer_id", "total"]), "entities[1]", ("has no field 'total'",)),
    Wrong("an entity that is an array", lookback(entities=["tags"]), "entities[0]", ("is an array and cannot be an entity", "choose another")),
    Wrong("an entity and entities", lookback(entity="customer_id", entities=["beneficiary_id"]), "entity", ("leave it out", "write all in entities")),
    Wrong("entities that are a text", lookback(entities="customer_id"), "entities", ("must be a list of field names", "got 'customer_id'")),
    Wrong("an entity twice", lookback(entities=["customer_id", "CUSTOMER_ID"]), "entities", ("entities names a field twice", "leave one out")),
    Wrong("too many entities", lookback(entities=["payment_id", "event_time", "customer_id", "beneficiary_id", "payment_type", "amount", "rate", "n", "x"]), "entities", ("names 9 fields", "at most 8", "leave some out")),
    Wrong("a score in words", lookback(score="high"), "score", ("0 to 1,000,000, got 'high'", "leave it out")),
    Wrong("a score that is a flag", lookback(score=True), "score", ("whole number", "got true")),
    Wrong("a score with a fraction", lookback(score=1.5), "score", ("whole number", "got 1.5")),
    Wrong("a score below zero", lookback(score=-1), "score", ("from 0 to 1,000,000, got -1",)),
    Wrong("a score too large", lookback(score=1_000_001), "score", ("from 0 to 1,000,000", "got 1000001")),
    Wrong("a score without a value", lookback(score=None, severity="high"), "score", ("got null", "of the severity, 50")),
    Wrong("a queue in words", lookback(queue="no"), "queue", ("true or false", "got 'no'")),
    Wrong("a policy like revise", lookback(late="revised"), "late", ("'revised'", "did you mean 'revise'?")),
    Wrong("a flag in words", lookback(reset_on_alert="yes"), "reset_on_alert", ("true or false", "got 'yes'")),
    Wrong("a flag as a number", tumbling(early=1), "early", ("must be true or false", "got 1")),
    Wrong("a description that is a number", lookback(description=5), "description", ("must be a text, got 5", "in quotes")),
    Wrong("a date for a text", lookback(message=dt.date(2026, 1, 31)), "message", ("got 2026-01-31", "put it in quotes")),
    Wrong("a when that YAML reads", lookback(when=True), "when", ("must be a text, got true", "put it in quotes")),
    Wrong("revise in a sequence", changed(SEQUENCE, late="revise"), "late", ("for lookback rules", "evaluate or record")),
    Wrong(
        "revise with a reset", lookback(late="revise", reset_on_alert=True), "late",
        ("revise and reset_on_alert exclude each other", "leave one of them out"),
    ),
    Wrong("suppress zero", lookback(suppress="0 hours"), "suppress", ("must be longer than 0 s", "'0 hours'")),
    Wrong("suppress without a value", lookback(suppress=None), "suppress", ("null", *NO_DURATION)),
    Wrong(
        "lateness above the stream's", lookback(allowed_lateness="2 hours"), "allowed_lateness",
        ("2 hours is longer than the stream allows", "write at most 1 hour"),
    ),
    Wrong("lateness in words", lookback(allowed_lateness="a while"), "allowed_lateness", ("'a while'", *NO_DURATION)),
    Wrong(
        "until before from", lookback(effective_from="2026-02-01", effective_until="2026-01-01"), "effective_until",
        ("must be after effective_from, '2026-02-01'", "got '2026-01-01'"),
    ),
    Wrong("a time in words", lookback(effective_from="tomorrow"), "effective_from", ("'2026-01-31T12:00:00Z'", "'tomorrow'")),
    Wrong("a thirteenth month", lookback(effective_until="2026-13-01"), "effective_until", ("must be a time", "'2026-13-01'")),
    Wrong("a time beyond all years", lookback(effective_until=10**30), "effective_until", ("must be a time", "got 1000")),
    Wrong("a time that is a flag", lookback(effective_from=True), "effective_from", ("must be a time", "got true")),
]  # fmt: skip
WINDOWS = [
    Wrong("a resolution of zero", coarse("0 minutes"), "window.resolution", ("must be longer than 0 s", "'0 minutes'")),
    Wrong("a resolution in short", coarse("1h"), "window.resolution", ("'1h'", *NO_DURATION)),
    Wrong("a resolution of nothing", coarse(None), "window.resolution", ("null", *NO_DURATION)),
    Wrong(
        "a resolution above the window", coarse("25 hours"), "window.resolution",
        ("'25 hours' is larger than the window of '24 hours'", "write at most the window"),
    ),
    Wrong(
        "a resolution above a measure's window",
        measures(n={"measure": "count(*)", "window": {"lookback": "1 hour", "delay": "1 day", "resolution": "1 day"}}),
        "measures.n.window.resolution", ("'1 day' is larger than the window of '1 hour'", "write at most the window"),
    ),
    Wrong("a resolution like another key", coarse("1 hour", resolutoin="1 hour"), "window.resolutoin", ("did you mean 'resolution'?",)),
    Wrong(
        "a resolution on tumbling", window(tumbling="1 day", resolution="1 hour"), "window.resolution",
        ("resolution is for lookback windows", "this is a tumbling window", "leave it out"),
    ),
    Wrong(
        "a resolution on session", window(SESSION, session="1 hour", resolution="1 minute"), "window.resolution",
        ("resolution is for lookback windows", "this is a session window", "leave it out"),
    ),
    *(
        Wrong(
            f"{name} with a resolution", coarse("1 hour", n=f"{name}(amount)"), "measures.n",
            (f"{name}(amount) cannot have a resolution", "when an event is deleted", "{measure: ..., window: 1 day}"),
        )
        for name in ("min", "max")
    ),
    Wrong(
        "distinct with a resolution",
        measures(
            n={
                "measure": "count(distinct customer_id)",
                "window": {"lookback": "3 days", "delay": "1 hour", "resolution": "1 day"},
            }
        ),
        "measures.n", ("cannot have a resolution", "counts and sums", "window: {lookback: 3 days, delay: 1 hour}}"),
    ),
    Wrong("a window of zero", lookback(window="0 seconds"), "window", ("must be longer than 0 s", "'0 seconds'")),
    Wrong("a negative window", lookback(window="-1 hours"), "window", ("'-1 hours'", *NO_DURATION)),
    Wrong("a window of months", lookback(window="1 month"), "window", ("no fixed length", "write days, such as '30 days'")),
    Wrong("a window with a fraction", lookback(window="1.5 hours"), "window", ("'1.5 hours'", *NO_DURATION)),
    Wrong("a window of an unknown unit", lookback(window="24 hous"), "window", ("unknown unit 'hous'", "use one of", "hours")),
    Wrong("a window without a space", lookback(window="24hours"), "window", ("'24hours'", *NO_DURATION)),
    Wrong("a window that is a number", lookback(window=86_400), "window", ("86400", *NO_DURATION)),
    Wrong("a window that is a list", lookback(window=["1 hour"]), "window", ('["1 hour"]', *NO_DURATION)),
    Wrong("a window beyond all years", lookback(window="20000000 days"), "window", ("longer than 10,000 years", "shorter")),
    Wrong("a window of much text", lookback(window="x" * 5_000), "window", ("'xxx", *NO_DURATION)),
    Wrong("a date for a window", window(LOOKBACK, lookback=dt.date(2026, 1, 1)), "window.lookback", ("2026-01-01", *NO_DURATION)),
    Wrong("a delay of months", window(LOOKBACK, lookback="1 hour", delay="1 month"), "window.delay", ("write days",)),
    Wrong("a slide above the size", window(sliding="5 minutes", slide="1 hour"), "window.slide", ("'1 hour' is larger", "at most")),
    Wrong("no slide", window(sliding="1 hour"), "window.slide", ("is missing", "such as 'slide: 5 minutes'")),
    Wrong("a slide too small", window(sliding="1 day", slide="1 second"), "window.slide", ("'1 second'", "more than 1,000", "longer")),
    Wrong("a slide of zero", window(sliding="1 day", slide="0 minutes"), "window.slide", ("longer than 0 s", "'0 minutes'")),
    Wrong("two kinds at once", window(tumbling="1 hour", session="1 hour"), "window", ("must be of one kind", "tumbling and session at once", "write one of")),
    Wrong("no kind", window(tumblin="1 hour"), "window", ("must name its kind", "tumblin", "write one of {lookback: 1 hour}, {tumbling: 1 hour}")),
    Wrong("delay on tumbling", window(tumbling="1 hour", delay="1 day"), "window.delay", ("for lookback windows", "leave it out")),
    Wrong("offset on lookback", window(LOOKBACK, lookback="1 hour", offset="1 day"), "window.offset", ("for tumbling and sliding", "leave")),
    Wrong("gap beside session", window(session="1 hour", gap="1 hour"), "window.gap", ("unknown key 'gap'", "known: session")),
    Wrong("a negative offset", window(tumbling="1 hour", offset="-1 minutes"), "window.offset", ("'-1 minutes'", *NO_DURATION)),
]  # fmt: skip
FIELDS = [
    Wrong("another stream", lookback(stream="logins"), "stream", ("'logins', not for 'payments'", "correct the name"), PAYMENTS),
    Wrong("a stream near by", lookback(stream="Paymnts"), "stream", ("'Paymnts'", "did you mean 'payments'?")),
    Wrong("a stream that is no text", lookback(stream=["payments"]), "stream", ('got ["payments"]', "in quotes")),
    Wrong("group_by: a name near by", lookback(group_by=["customr_id"]), "group_by", ("'customr_id'", "did you mean 'customer_id'?")),
    Wrong("group_by: a measure", lookback(group_by=["total"]), "group_by", ("no field 'total'", "known: payment_id, event_time")),
    Wrong("group_by: an array", lookback(group_by=["tags"]), "group_by", ("'tags' is an array", "choose another field")),
    Wrong("group_by: twice", lookback(group_by=["amount", "Amount"]), "group_by", ("names a field twice", "Amount", "leave one out")),
    Wrong("group_by: a text", lookback(group_by="amount"), "group_by", ("such as [customer_id]", "got 'amount'")),
    Wrong("group_by: SQL", lookback(group_by=["1; drop table rules; --"]), "group_by", ("drop table", "known: payment_id")),
    Wrong("where: a name near by", lookback(where="amuont > 1"), "where", ("unknown field 'amuont'", "did you mean 'amount'?")),
    Wrong("where: a name like no other", lookback(where="zzz > 1"), "where", ("unknown field 'zzz'", "the fields are amount, ")),
    Wrong("where: a table's name", lookback(where="payments.amount > 1"), "where", ("'payments.amount'", "did you mean 'amount'?")),
    Wrong("where: a measure", lookback(where="total > 1"), "where", ("unknown field 'total'", "the fields are")),
    Wrong("when: a name near by", lookback(when="totl > 1"), "when", ("unknown field 'totl'", "did you mean 'total'?")),
    Wrong("when: a field of an event", tumbling(when="Amount > 1"), "when", ("amount is a field of one event", "max(amount)")),
    Wrong("measures: a name near by", measures(n="sum(amuont)"), "measures.n", ("'amuont'", "did you mean 'amount'?")),
    Wrong("message: a name near by", lookback(message="{totl}"), "message", ("{totl} is neither", "did you mean {total}?")),
    Wrong("message: spaces", lookback(message="{ total }"), "message", ("{ total } is neither", "did you mean {total}?")),
    Wrong("message: nothing", lookback(message="{}"), "message", ("{} is neither", "known: amount, ")),
    Wrong("message: a field of an event", tumbling(message="{amount}"), "message", ("amount is a field of one event", "max(amount)")),
    Wrong("message: Python", lookback(message="{total.__class__}"), "message", ("{total.__class__} is neither", "known:")),
    Wrong("message: SQL", lookback(message="{total; drop table rules}"), "message", ("drop table", "known: amount, ")),
    Wrong("message: much text", lookback(message="{" + "x" * 5_000 + "}"), "message", ("{xxx", "known:")),
    Wrong("sequence: a name near by", step(where="outcom = 'FAIL'"), f"{FIRST}.where", ("'outcom'", "did you mean 'outcome'?")),
    Wrong("sequence: a message near by", changed(SEQUENCE, message="{failure.count}"), "message", ("did you mean {failures.count}?",)),
]  # fmt: skip
TYPES = [
    Wrong("where is a number", lookback(where="amount"), "where", ("must be true or false", "decimal(18,2)", "compare it")),
    Wrong("when is a number", tumbling(when="total + 1"), "when", ("must be true or false", "'total + 1'", "compare it")),
    Wrong("not of a number", lookback(where="not amount"), "where", ("'not' needs a condition", "compare it")),
    Wrong("the sum of a text", measures(n="sum(payment_type)"), "measures.n", ("got string", "cast it")),
    Wrong("the sum of a double", measures(n="sum(rate)"), "measures.n", ("double depend on order", "write cast(x as decimal(18,2))")),
    Wrong("the average of a double", measures(n="avg(rate)"), "measures.n", ("exact numbers", "write cast(x as decimal(18,2))")),
    Wrong("the least array", measures(n="min(tags)"), "measures.n", ("takes single values", "array<string>")),
    Wrong("a filter that is a number", measures(n="count(*) filter (where amount)"), "measures.n", ("filter takes a condition", "compare")),
    Wrong("text and number", lookback(where="amount > 'much'"), "where", ("decimal(18,2) and string", "cast one of them")),
]  # fmt: skip
MEASURES = [
    Wrong("no measure at all", lookback(measures={}), "measures", ("got {}", "such as 'n: count(*)'")),
    Wrong("measures in a list", lookback(measures=["count(*)"]), "measures", ('got ["count(*)"]', "such as 'n: count(*)'")),
    Wrong("an empty measure", tumbling(measures={"n": ""}, when=..., message=...), "measures.n", ("such as count(*)", "got ''")),
    Wrong("a measure that is a number", measures(n=5), "measures.n", ("must be an aggregate, such as count(*)", "got 5")),
    Wrong("a measure with a wrong key", measures(n={"measure": "count(*)", "windw": "1 hour"}), "measures.n.windw", ("did you mean 'window'?",)),
    Wrong("an aggregate in when", lookback(when="sum(amount) > 1"), "when", ("sum() is an aggregate", "belongs in measures")),
    Wrong("two aggregates in one", measures(n="sum(amount) / count(*)"), "measures.n", ("COUNT(*)", "give each aggregate its own measure")),
    Wrong("no aggregate", measures(n="amount"), "measures.n", ("'amount' is not an aggregate", "such as sum(amount)")),
    Wrong("an unknown aggregate", measures(n="kurtosis(amount)"), "measures.n", ("kurtosis()", "the aggregates are any, avg, bool_and")),
    Wrong("distinct star", measures(n="count(distinct *)"), "measures.n", ("count(distinct *) is not allowed", "name a field")),
    Wrong("the sum of a star", measures(n="sum(*)"), "measures.n", ("sum(*) is not allowed", "name a field")),
    Wrong("a measure named like a field", measures(Amount="count(*)"), "measures.Amount", ("'Amount' is a field", "choose another")),
    Wrong("window_complete", measures(window_complete="count(*)"), "measures.window_complete", ("is reserved", "choose another")),
    Wrong("a step named off", sequence(steps=[{"name": False, "where": "true"}]), "sequence.steps[0].name", ("false is not a name", "write 'on' with them")),
    Wrong("a measure with a space", lookback(measures={"a b": "count(*)"}), "measures.a b", ("'a b' is not a name", "use letters")),
    Wrong("a measure twice", measures(Total="count(*)"), "measures.Total", ("'Total' is there twice", "its own name")),
    Wrong("51 measures", lookback(measures={f"m{i}": "count(*)" for i in range(51)}), "measures", ("51 measures", "split the rule")),
    Wrong(
        "a window of its own in a tumbling rule", tumbling(measures={"total": {"measure": "sum(amount)", "window": "1 hour"}}),
        "measures.total.window", ("only measures of a lookback rule", "leave out this lookback window"),
    ),
    Wrong(
        "a tumbling window of its own", measures(n={"measure": "sum(amount)", "window": {"tumbling": "1 hour"}}),
        "measures.n.window", ("those look back too", "leave out this tumbling window"),
    ),
]  # fmt: skip
STEPS = [
    Wrong("sequence is a list", changed(SEQUENCE, sequence=[]), "sequence", ("must be a mapping with within and steps", "got []")),
    Wrong("an unknown key of a sequence", sequence(untill="true"), "sequence.untill", ("did you mean 'until'?",)),
    Wrong("no within", sequence(within=...), "sequence.within", ("is missing", "such as 'within: 10 minutes'")),
    Wrong("within of months", sequence(within="1 month"), "sequence.within", ("'1 month'", "write days")),
    Wrong("no steps", sequence(steps=...), "sequence.steps", ("is missing", "write steps such as {name: failures")),
    Wrong("empty steps", steps(), "sequence.steps", ("at least one step, got []", "write steps such as")),
    Wrong("21 steps", steps(*({"name": f"s{i}", "where": "true"} for i in range(21))), "sequence.steps", ("21 steps", "split")),
    Wrong("a step that is a text", steps("outcome = 'FAIL'"), FIRST, ("must be a mapping with name and where", "FAIL")),
    Wrong("a step without a name", step(name=...), f"{FIRST}.name", ("is missing", "such as 'failures'")),
    Wrong("a step with a wrong name", step(name="three failures"), f"{FIRST}.name", ("'three failures'", "use letters")),
    Wrong("a step named like a field", step(name="IP"), f"{FIRST}.name", ("'IP' is a field", "choose another name")),
    Wrong("two steps of one name", steps(FAILURES, {**SUCCESS, "name": "Failures"}), f"{SECOND}.name", ("'Failures' is there twice", "its own")),
    Wrong("a step without a condition", step(where=...), f"{FIRST}.where", ("is missing", "such as \"outcome = 'FAIL'\"")),
    Wrong("a step with a number", step(where=1), f"{FIRST}.where", ("must be a condition, got 1", "such as")),
    Wrong("another word for where", step(condition="true"), f"{FIRST}.condition", ("did you mean 'where'?",)),
    Wrong("an unknown key of a step", step(atleast=3), f"{FIRST}.atleast", ("did you mean 'at_least'?",)),
    Wrong("within of a step", step(within="1 hour"), f"{FIRST}.within", ("for a last step with absent", "leave it out")),
    Wrong("at_least 0", step(at_least=0), f"{FIRST}.at_least", ("a whole number from 1", "got 0")),
    Wrong("at_least as a text", step(at_least="3"), f"{FIRST}.at_least", ("a whole number from 1", "got '3'")),
    Wrong("at_most below at_least", step(at_most=2), f"{FIRST}.at_most", ("from 3 (at_least)", "got 2")),
    Wrong("a later step", step(where="ip = element_at(success.ip, 1)"), f"{FIRST}.where", ("success.ip is of step 'success'", "comes later")),
    Wrong("the step itself", step(where="failures.count > 1"), f"{FIRST}.where", ("is of the step itself", "fields of the event and of earlier steps")),
    Wrong("an unknown step", steps(FAILURES, {**SUCCESS, "where": "zz.count > 1"}), f"{SECOND}.where", ("named 'zz'", "known: failures")),
    Wrong("a step near by", steps(FAILURES, {**SUCCESS, "where": "failurs.count > 1"}), f"{SECOND}.where", ("did you mean 'failures.count'?",)),
    Wrong("a step for a number", steps(FAILURES, {**SUCCESS, "where": "failures > 3"}), f"{SECOND}.where", ("write failures.count", "such as failures.event_id")),
    Wrong("until of a step", sequence(until="failures.count > 3"), "sequence.until", ("is of step 'failures'", "can read only the event's fields")),
    Wrong("an empty until", sequence(until=" "), "sequence.until", ("must be a condition, such as", "got ' '")),
    Wrong("expiry like fixed", sequence(expiry="fix"), "sequence.expiry", ("one of sliding, fixed", "did you mean 'fixed'?")),
    Wrong("expiry like no other", sequence(expiry="never"), "sequence.expiry", ("one of sliding, fixed", "got 'never'")),
    Wrong("absent not last", steps(FAILURES, SILENT, SUCCESS), f"{SECOND}.absent", ("only the last step can be absent", "move it")),
    Wrong("absent alone", steps(SILENT), f"{FIRST}.absent", ("nothing begins the wait", "write a step before it")),
    Wrong("absent with at_least", steps(FAILURES, {**SILENT, "at_least": 2}), f"{SECOND}.at_least", ("one of absence", "leave it out")),
    Wrong("absent with where", steps(FAILURES, {**SILENT, "where": "true"}), f"{SECOND}.where", ("where or absent, not both", "leave one")),
    Wrong("absent within zero", steps(FAILURES, {**SILENT, "within": "0 minutes"}), f"{SECOND}.within", ("longer than 0 s", "'0 minutes'")),
    Wrong("a stream with count", SEQUENCE, "sequence", ("field count of stream", "rename the field"), COUNTED),
]  # fmt: skip
INJECTIONS = [
    Wrong("two statements", lookback(where="1 = 1; drop table rules; --"), "where", ("write one expression", "without a semicolon")),
    Wrong("a quote closed early", lookback(where="'; drop table rules; --"), "where", ("look for a quote or comment",)),
    Wrong("a statement", lookback(where="drop table rules"), "where", ("cannot be read at 'drop'", "leave the rest out")),
    Wrong("a subquery", lookback(where="amount in (select 1 from rules)"), "where", NOT_A_QUERY),
    Wrong("exists", lookback(when="exists (select 1)"), "when", NOT_A_QUERY),
    Wrong("a union", lookback(where="1 = 1 union select document from rules"), "where", NOT_A_QUERY),
    Wrong("a subquery in a measure", measures(n="(select count(*) from rules)"), "measures.n", NOT_A_QUERY),
    Wrong("a table in a measure", measures(n="count(*) from rules"), "measures.n", ("cannot be read at 'from'", "leave the rest out")),
    Wrong("two statements in a measure", measures(n="count(*); drop table rules"), "measures.n", ("without a semicolon", "write one")),
    Wrong("a comment left open", lookback(where="amount > 1 /* "), "where", ("a quote or comment that is not closed", "look for")),
    Wrong("nothing but a comment", lookback(where="-- amount > 1"), "where", ("the expression is empty",)),
    Wrong("java_method", lookback(where="java_method('java.lang.System', 'exit') = ''"), "where", ("java_method() is not allowed", "functions are")),
    Wrong("a method of Java", measures(n="sum(java_method('a', 'b'))"), "measures.n", ("function java_method() is not allowed", "the functions are")),
    Wrong("eval", lookback(when="eval('1') = 1"), "when", ("eval() is not allowed", "the functions are")),
    Wrong("a window function", lookback(when="row_number() over (order by amount) = 1"), "when", ("over", "the rule's window and measures")),
    Wrong("an aggregate over", measures(n="sum(amount) over ()"), "measures.n", ("a window function (over)", "the rule's window does that")),
    Wrong("a lambda", lookback(where="x -> x = 'a'"), "where", ("a lambda (->) is not allowed", "use it in exists()")),
    Wrong("a lambda of Python", lookback(where="lambda x: x"), "where", ("cannot be read at 'x'", "look there")),
    Wrong("a parameter", lookback(when="total > {limit}"), "when", ("a parameter is not allowed", "write the value")),
    Wrong("a clock", lookback(where="event_time < now()"), "where", ("now() is not allowed", "use the event's time")),
    Wrong("chance", lookback(where="rand() < 0.1"), "where", ("rand() is not allowed", "a replay would differ")),
    Wrong("a regular expression", lookback(where="payment_type rlike '(a+)+(?=b)'"), "where", ("look-ahead at character 6, '(?=b)'", "in a condition of its own")),
    Wrong("a message in SQL", step(where="ip = '' or 1 = 1; --"), f"{FIRST}.where", ("without a semicolon", "write one")),
    Wrong("until with a query", sequence(until="exists (select 1)"), "sequence.until", NOT_A_QUERY),
    Wrong("half a character", lookback(where="amount > \ud800"), "where", ("half of a surrogate pair", "write the character")),
]  # fmt: skip
SYNTAX = [
    Wrong("a parenthesis left open", lookback(where="(amount > 1"), "where", ("a ')' or an operator is missing at '(amount > 1'", "write it")),
    Wrong("a value missing", lookback(where="amount >"), "where", ("something is missing at 'amount >'", "write a value")),
    Wrong("words that do not belong", lookback(where="amount > 10 000"), "where", ("cannot be read at '000'", "a missing operator")),
    Wrong("and as in C", lookback(where="amount > 1 && amount < 2"), "where", ("cannot be read at '&&' after 'amount > 1 '", "write 'and'")),
    Wrong("at least, turned round", lookback(where="amount => 1"), "where", ("cannot be read at '=>'", "write '>='")),
    Wrong("at least, as a sign", lookback(where="amount \u2265 1"), "where", ("cannot be read at '\u2265'", "write '>='")),
    Wrong("contains between", lookback(where="payment_type contains 'x'"), "where", ("cannot be read at 'contains'", "contains(field, 'text')")),
    Wrong("a regular expression between", lookback(where="payment_type ~ 'x'"), "where", ("cannot be read at '~'", "write 'rlike'")),
    Wrong("distinct alone", measures(n="distinct(payment_type)"), "measures.n", ("cannot be read at 'distinct'", "write count(distinct field)")),
    Wrong("distinct of PySpark", measures(n="countDistinct(payment_type)"), "measures.n", ("countdistinct() is not an aggregate", "write count(distinct x)")),
    Wrong("where for filter", measures(n="count(*) where amount > 1"), "measures.n", ("cannot be read at 'where'", "count(*) filter (where ...)")),
    Wrong("an empty list", lookback(where="amount in ()"), "where", ("has an empty list", "write at least one value")),
    Wrong("too many characters", lookback(where="amount > 1 or " * 10_000 + "true"), "where", ("more than 100,000", "split it")),
    Wrong("a long name", lookback(where="a" * 9_000 + " > 1"), "where", ("unknown field 'aaa", "the fields are")),
    Wrong("deep parentheses", lookback(where="(" * 4_000 + "1" + ")" * 4_000), "where", ("deeper than 100 levels", "split it")),
    Wrong("deep words", lookback(when="not " * 2_000 + "true"), "when", ("deeper than 100 levels", "split it")),
]  # fmt: skip
TESTS = [
    Wrong("tests are no list", lookback(tests={}), "tests", ("must be a list of mappings with name, events and alerts", "got {}")),
    Wrong("a test that is a text", lookback(tests=["a"]), "tests[0]", ("must be a mapping with name, events and alerts", "'a'")),
    Wrong("a test without events", lookback(tests=[{"name": "x"}]), "tests[0].events", ("is missing", "write a list of mappings")),
    Wrong("events that are numbers", lookback(tests=[{"events": [1]}]), "tests[0].events", ("such as [{event_id: 1", "got [1]")),
    Wrong("alerts that are a number", lookback(tests=[{"events": [], "alerts": 5}]), "tests[0].alerts", ("a list of mappings", "got 5")),
    Wrong("alerts that are a mapping", lookback(tests=[{"events": [], "alerts": {"a": 1}}]), "tests[0].alerts", ("a list of mappings", "got")),
    Wrong("a test's key near by", lookback(tests=[{"events": [], "alert": []}]), "tests[0].alert", ("did you mean 'alerts'?",)),
]  # fmt: skip
DOCUMENTS = [
    Wrong("nothing", None, "", ("a rule is a mapping", "write at least the keys", "got null")),
    Wrong("a list", [], "", ("a rule is a mapping", "write at least the keys", "got []")),
    Wrong("a list of rules", [LOOKBACK], "", ("a rule is a mapping", "write at least the keys", "got [{")),
    Wrong("an empty mapping", {}, "", ("a rule is a mapping", "write at least the keys", "got {}")),
    Wrong("a number", 5, "", ("a rule is a mapping", "write at least the keys", "got 5")),
    Wrong("deep lists", lookback(tests=nested(5_000)), "", ("deeper than 20 levels", "leave out")),
    Wrong("deep lists elsewhere", steps(nested(700)), "", ("deeper than 20 levels", "leave out")),
    Wrong("a list of itself", lookback(group_by=[LOOKBACK["tests"]]), "group_by", ("such as [customer_id]", "got [[")),
    Wrong("text: no JSON", "rule_id: a", "document", ("is not JSON", "line 1 column 1", "write it with")),
    Wrong("text: a key twice", '{"rule_id": "a", "rule_id": "b"}', "document", ("'rule_id' twice", "leave one of them out")),
    Wrong("text: nothing", "", "document", ("is not JSON", "write it with `lookback rules push`")),
    Wrong("text: a list", "[]", "document", ("must be a JSON object with rule_id", "got []")),
    Wrong("text: a text", '"rule"', "document", ("must be a JSON object with rule_id", "got 'rule'")),
    Wrong("text: null", "null", "document", ("must be a JSON object with rule_id", "got null")),
    Wrong("text: too long", json.dumps(lookback(description="x" * 500_000)), "document", ("500,000 bytes", "make the rule smaller")),
    Wrong("text: too long in bytes", json.dumps(lookback(description="ü" * 250_000), ensure_ascii=False), "document", ("bytes", "make")),
    Wrong("text: lists without end", "[" * 99_000, "document", ("nested too deeply", "write it with")),
    Wrong("text: deep lists", '{"tests":' + "[" * 600 + "]" * 600 + "}", "", ("deeper than 20 levels", "leave out")),
    Wrong("text: many digits", '{"window": ' + "9" * 5_000 + "}", "document", ("too many digits", "write it with")),
    Wrong("text: not a number", '{"rule_id": NaN}', "rule_id", ("got NaN", "write 'nan'")),
]  # fmt: skip
WRONG = [*KEYS, *VALUES, *WINDOWS, *FIELDS, *TYPES, *MEASURES, *STEPS, *INJECTIONS, *SYNTAX, *TESTS, *DOCUMENTS]

# What tells a person what to do, or what could stand there.
REMEDY = re.compile(
    r"\b(write|use|choose|give|leave|name|rename|put|split|cast|compare|move|make|mend|look|group by|did you mean|such as|"
    r"known|are|must be|takes?|belongs|one of|only|an expression sees|would differ|is empty|does that|do that)\b"
)
INTERNAL = re.compile(
    r"Traceback|<class|object at 0x|\w+Error\b|NoneType|\b(dict|str|float|tuple)\b|datetime\.|\b(None|True|False)\b|"
    r"sqlglot|lookback\.core|recursion|\bsys\."
)


def problems_of(document: object, stream: Stream | None = None) -> list[Problem]:
    """Lists the problems of a document, or of the text of one."""
    try:
        if isinstance(document, str):
            document = read_document(document, PAYMENTS.limits)
        named = document.get("stream") if isinstance(document, dict) else None
        compile_rule(document, stream or STREAMS.get(named if isinstance(named, str) else "", PAYMENTS))
    except RuleError as error:
        refused = error
    else:
        return []
    assert refused.problems
    assert str(refused).startswith("Rule ")
    return refused.problems


def assert_teaches(problem: Problem) -> None:
    """One short sentence for a person: what to do is in it, and nothing of the machine behind it."""
    said = str(problem)
    assert len(problem.message) < 600
    assert "\n" not in said
    assert said.strip() == said
    assert REMEDY.search(problem.message), said
    assert not INTERNAL.search(problem.message), said
    said.encode()  # it goes into a table


def at_place(problem: Problem, place: str) -> bool:
    first, gap, last = place.partition(" ... ")
    return problem.place.startswith(first) and problem.place.endswith(last) if gap else problem.place == place


@pytest.mark.parametrize("wrong", WRONG, ids=[wrong.name for wrong in WRONG])
def test_c4_a_wrong_document_is_refused_with_place_and_remedy(wrong: Wrong) -> None:
    problems = problems_of(wrong.document, wrong.stream)
    for problem in problems:
        assert_teaches(problem)
    here = [problem.message for problem in problems if at_place(problem, wrong.place)]
    assert any(all(word in message for word in wrong.words) for message in here), problems


def test_the_table_is_wide_and_its_documents_are_wrong_in_one_thing() -> None:
    assert len(WRONG) >= 150
    assert len({wrong.name for wrong in WRONG}) == len(WRONG)
    for document in GOOD:
        assert problems_of(document) == []
    several = {wrong.name for wrong in WRONG if len(problems_of(wrong.document, wrong.stream)) > 1}
    # The first two take a name away that is used elsewhere, the others have several things wrong.
    assert several == {"a step named like a field", "absent alone", "text: not a number"}


def test_c4_all_problems_of_a_document_come_at_once() -> None:
    document = lookback(
        rule_id="Not Good", severity="huge", group_by=["nope"], where="amuont > 1", window="0 seconds", early=True,
        measures={"total": "sum(rate)", "large": "count(*) filter (where amount)"}, when="total > 1 and custmer_id = 1",
        suppress="soon", message="{totl}", tests={}, zzz=1, entity="custmer_id", score=-5,
    )  # fmt: skip
    with pytest.raises(RuleError) as refused:
        compile_rule(document, PAYMENTS, version=3)
    places = [problem.place for problem in refused.value.problems]
    assert sorted(places) == [
        "early", "entity", "group_by", "measures.large", "measures.total", "message", "rule_id", "score", "severity",
        "suppress", "tests", "when", "where", "window", "zzz",
    ]  # fmt: skip
    lines = str(refused.value).splitlines()
    assert len(lines) == len(places)
    assert all(line.startswith("Rule 'Not Good' v3: ") for line in lines)


def test_c4_all_problems_of_a_sequence_come_at_once() -> None:
    document = sequence(
        within="0 minutes", until="outcom = 'x'", expiry="never",
        steps=[
            {"name": "first", "where": "second.ip = ip and outcom = 'FAIL'", "at_least": 0},
            {"name": "second", "where": "first.ipp = ip", "atleast": 1},
            {"name": "first", "absent": "ip", "within": "1 month"},
        ],
    )  # fmt: skip
    problems = problems_of(changed(document, message="{first.cnt}", late="revise"))
    assert sorted(problem.place for problem in problems) == [
        "late", "message", "sequence.expiry", "sequence.steps[0].at_least", "sequence.steps[0].where",
        "sequence.steps[0].where", "sequence.steps[1].atleast", "sequence.steps[1].where", "sequence.steps[2].absent",
        "sequence.steps[2].name", "sequence.steps[2].within", "sequence.until", "sequence.within",
    ]  # fmt: skip


def test_what_is_wrong_with_a_measure_is_not_told_again_for_its_uses() -> None:
    document = lookback(measures={"total": "sum(rate)", "n": "nope(1)"}, when="round(total, 2) > 1 and n = n")
    assert [problem.place for problem in problems_of(document)] == ["measures.total", "measures.n"]


def test_what_is_no_duration_is_not_compared_with_others() -> None:
    for slide in ("0 minutes", "1 month", "-1 minutes"):
        assert [problem.place for problem in problems_of(window(sliding="1 day", slide=slide))] == ["window.slide"]
    assert [problem.place for problem in problems_of(window(sliding="1 month", slide="1 day"))] == ["window.sliding"]


def test_a_rule_of_no_known_kind_may_have_any_key() -> None:
    for wrong in ({}, {"tumblin": "1 hour"}, {"tumbling": "1 hour", "session": "1 hour"}, None):
        problems = problems_of(tumbling(window=wrong, early=True, when="total > 1"))
        assert [problem.place for problem in problems] == ["window"]


def test_a_made_up_document_gives_no_endless_list() -> None:
    problems = problems_of(lookback(**{f"key{number}": number for number in range(5_000)}))
    assert len(problems) == MAX_PROBLEMS + 1
    assert problems[-1].message == "4,900 more problems are not listed; mend these first"
    many = problems_of(lookback(measures={f"m{number}": "nope(1)" for number in range(5_000)}))
    assert len(many) == 51  # those beyond the limit are not looked at


@pytest.mark.parametrize("kind", [list, dict])
@pytest.mark.parametrize("is_itself", [False, True])
def test_a_part_without_end_is_refused_wherever_a_document_is_given(kind: type[Any], is_itself: bool) -> None:
    endless: Any = kind()
    if is_itself:
        endless.append(endless) if kind is list else endless.update(a=endless)
    for _ in range(0 if is_itself else 5_000):
        endless = [endless] if kind is list else {"a": endless}
    for document in (lookback(tests=endless), lookback(window=endless), lookback(parameters=[{"a": endless}])):
        for give in (Harness(PAYMENTS).rule, lambda each: replay([each], [], PAYMENTS)):
            with pytest.raises(RuleError, match="the document is nested deeper than 20 levels"):
                give(document)
    for name in ("fields", "columns", "limits", "lookups", "source", "table"):
        with pytest.raises(StreamError, match="a stream has at most 20 levels of lists and mappings"):
            Stream.from_dict({**_LOGINS, name: endless})
    if kind is list:
        for refused in (lambda: Harness(PAYMENTS).rule(endless), lambda: Stream.from_dict(endless)):
            with pytest.raises((RuleError, StreamError)):
                refused()


def test_a_comment_is_no_part_of_a_condition() -> None:
    plain, commented = (
        compile_rule(lookback(where=text), PAYMENTS)
        for text in ("amount > 1", "amount /* drop table rules; */ > 1 -- ; drop table rules")
    )
    assert plain.where is not None
    assert commented.where is not None
    assert commented.where.sql == plain.where.sql == "amount > 1"


def test_braces_in_a_text_of_a_message_stay_text() -> None:
    rule = compile_rule(lookback(message="'; drop table rules; -- {total} \\ % %s"), PAYMENTS)
    assert rule.message({"total": 1}) == "'; drop table rules; -- 1 \\ % %s"


@pytest.mark.parametrize("kind", KEYS_OF_KIND)
def test_every_key_of_other_kinds_is_refused_by_name(kind: str) -> None:
    bases = {"event": EVENT, "lookback": LOOKBACK, "tumbling": TUMBLING, "sliding": SLIDING, "session": SESSION}
    base = {**bases, "sequence": SEQUENCE}[kind]
    others = {key for keys in KEYS_OF_KIND.values() for key in keys} - set(KEYS_OF_KIND[kind]) - {"sequence"}
    if kind == "event":
        # With one of these it is a rule of another kind.
        others -= {"window", "measures"}
    for key in others:
        value = {"window": "1 hour", "measures": {"n": "count(*)"}, "when": "true", "late": "record"}.get(key, True)
        problems = problems_of({**base, key: value})
        assert [problem.place for problem in problems] == [key]
        assert_teaches(problems[0])


ODD = [
    None, True, 0, -1, 1.5, 10**40, "", " ", "x", "1 hour", "true", "'; drop table rules; --", "\ud800", "{", "a.b.c > 1",
    [], [None], ["x"], [[]], {}, {"x": None}, {1: 2}, {"lookback": "1 hour"}, {"measure": 1}, {"name": None}, nested(50),
    float("nan"), dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc), b"bytes",
]  # fmt: skip


def paths(node: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place within a document."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from paths(value, (*path, key))


@pytest.mark.parametrize(
    "document", [LOOKBACK, SLIDING, steps(FAILURES, SUCCESS, SILENT)], ids=["lookback", "sliding", "sequence"]
)
def test_whatever_stands_in_a_place_is_accepted_or_refused_in_words(document: dict[str, Any]) -> None:
    full = {
        **document,
        "severity": "low",
        "score": 5,
        "queue": True,
        "entity": document["group_by"][0],
        "suppress": "1 hour",
        "allowed_lateness": "1 minute",
        "description": "text",
    }
    full |= {"effective_from": "2026-01-01", "effective_until": "2026-02-01"}
    # Each place has half of the values, and neighbours have different halves.
    for at, path in enumerate([*paths(full)]):
        for value in ODD[at % 2 :: 2]:
            odd = copy.deepcopy(full)
            parent: Any = odd
            for key in path[:-1]:
                parent = parent[key]
            parent[path[-1]] = value
            for problem in problems_of(odd):
                assert_teaches(problem)
            rule, problems = read_rule(odd)
            assert problems or rule.to_dict() == odd or value != value
