"""Generated cases: events in disorder, rules of every kind, changes between commits, cuts. Times in microseconds.

Small numbers with many ties, so that edges are hit exactly and a case that fails shrinks to a few rows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from lookback.core.rules.gate import write_evidence
from lookback.core.streams.declaration import Stream

_DECLARATION = {
    "stream": "tx",
    "event_id": "id",
    "event_time": "at",
    "fields": {
        "id": "string", "at": "timestamp", "c": "int", "k": "string", "a": "decimal(18,2)", "n": "int", "d": "double",
    },
    "max_out_of_orderness": "3 microseconds",
    "allowed_lateness": "6 microseconds",
}  # fmt: skip
STREAMS = {
    "plain": Stream.from_dict(_DECLARATION),
    "narrow": Stream.from_dict(_DECLARATION | {"max_session": "20 microseconds", "max_revisions": 2}),
    "tight": Stream.from_dict(_DECLARATION | {"max_session": "7 microseconds", "max_revisions": 1}),
}
# Other names of the fields: words of SQL, which an expression has in backticks.
_RESERVED = {"c": "Case", "k": "null", "a": "select", "n": "from", "d": "TRUE"}
_FIELDS = {_RESERVED.get(name, name): type_ for name, type_ in _DECLARATION["fields"].items()}
STREAMS["reserved"] = Stream.from_dict(_DECLARATION | {"fields": _FIELDS})
# Members with disorder of their own; the last has no event in many cases.
MEMBERS = {"x": "3 microseconds", "y": "1 microsecond", "z": "5 microseconds"}
STREAMS["union"] = Stream.from_dict(
    {key: value for key, value in _DECLARATION.items() if key != "max_out_of_orderness"}
    | {"union": MEMBERS, "idle": "6 microseconds"}
)
_KINDS = ["event", "event"] + ["lookback"] * 3 + ["tumbling", "sliding"] + ["session"] * 2 + ["sequence"] * 4
_AGGREGATES = [
    "count(*)", "count(*)", "count(a)", "count(distinct k)", "count(distinct n)", "count(distinct d)", "count(distinct k, n)", "sum(a)", "sum(n)",
    "sum(n * 4611686018427387904)", "sum(12 div n)", "max(10 div (n - 1))",
    # From 1970 on, the year 10000.
    "max(at + interval 2932897 days)", "collect_set(at + interval 2932897 days)", "mode(at + interval 2932897 days)",
    "avg(a)", "avg(n)", "min(a)", "max(k)", "max(n)", "stddev_samp(a)",
    "var_samp(n)", "var_pop(a)", "stddev_pop(n)", "median(a)", "median(d)", "percentile(n, 0.9)", "percentile(a, 0.25)", "mode(n)", "mode(k)", "mode(d)",
    "max_by(n, a)", "min_by(n, d)", "max_by(k, n)", "max_by(d, k)", "min_by(12 div n, a)", "max_by(at, 10 div n)", "min_by(d, d)",
    "collect_set(k)", "collect_set(n)", "collect_set(d)", "count_if(n > 0)", "count_if(10 / n > 2)", "bool_and(n > 0)", "bool_or(a > 1)",
    "min(d)", "max(d)", "min(-d)", "max(-d)",
    "first(n)", "last(n)", "last(n)", "last(k)", "first(d)", "last(12 div n)", "last(at)", "first(a)",
]  # fmt: skip
_RESOLUTIONS: list[int | None] = [None, None, None, 1, 2, 3, 4, 7]
# Aggregates that cannot have a resolution.
_EXACT_ONLY = (
    "distinct",
    "min",
    "max",
    "first",
    "last",
    "median",
    "percentile",
    "mode",
    "collect_set",
    "bool",
    "max_by",
    "min_by",
)
_FILTERS = [
    "",
    "",
    " filter (where a > 1)",
    " filter (where n > 0)",
    " filter (where 10 / n > 2)",
    " filter (where n <> 0)",
]
_WHERES = [None, None, None, None, None, "n >= 0", "k <> 'x'", "10 / n > 1", "a is not null", "d >= 0"]
_WHENS = [
    "m0 >= {limit}", "m0 = {limit}", "m0 < {limit}", "m0 is null", "m0 >= {limit} or window_complete",
    "not window_complete", "{limit} / m0 > 1", "true",
]  # fmt: skip
_OWN_CONDITIONS = [
    "true", "n = 0", "n = 1", "n <= 1", "n >= 1", "n > 1", "c = 1", "c <> 1", "c is null", "k = 'x'", "10 / n > 3", "a > 1",
    "d = 0", "d > 1",
]  # fmt: skip
# Of an earlier step: {0} is its name.
_LINKED_CONDITIONS = [
    "array_contains({0}.c, c)", "not array_contains({0}.n, n)", "{0}.count >= 1", "{0}.count >= 2",
    "element_at({0}.n, 1) <= n", "element_at({0}.n, 1) = n", "element_at({0}.at, -1) < at", "element_at({0}.n, 2) > 0",
    "10 / element_at({0}.n, -1) > n", "size({0}.k) > 1 and c = 1",
    "n > 0 and array_contains({0}.k, k)", "10 / n > 3 and 2 / ({0}.count - 1) > 0", "array_contains({0}.a, a)",
    "array_contains({0}.d, d)", "element_at({0}.d, -1) <= d", "element_at({0}.n, -2) >= n", "{0}.count between 2 and 3",
    "size({0}.k) < 4 and {0}.count <> 2", "{0}.count > n", "not array_contains({0}.n, n) or element_at({0}.n, -1) = n",
    "5 / ({0}.count - 3) > 0 and n < 2",
]  # fmt: skip
# Some so much longer than others that a version with one of them fills up anew.
_SPANS = [3, 5, 8, 1, 2, 4, 12, 25]
# What a later version may have from another document of the same kind.
_REVISABLE = (
    "window", "measures", "when", "early", "late", "reset_on_alert", "suppress", "message", "where", "allowed_lateness",
    "effective_from", "effective_until", "group_by", "entities", "tags",
)  # fmt: skip
# Entries of a key beside fields. Some are an error for some events, or NULL, and some are equal to a field.
_KEY_EXPRESSIONS = [
    "upper(k)", "upper(k)", "coalesce(k, 'x')", "nullif(k, 'x')", "concat(k, 'y')", "n > 0", "10 div n", "n * 1000000000", "k", "n",
    "d", "d * -1", "a * 2", "at + interval 2932897 days", "cast(at as date)", "case when n > 1 then c end",
]  # fmt: skip
_KINDS_OF_WINDOWS = ("tumbling", "sliding", "session")
# An UPDATE may make a version of another kind of it once: then it has remembered nothing of that kind yet.
_MEMORY_OF_KIND = {"tumbling": "tiles", "sliding": "tiles"}


def _microseconds(number: int) -> str:
    return f"{number} microseconds"


@st.composite
def measures(draw: st.DrawFn, *, own_windows: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for at in range(draw(st.integers(1, 3))):
        text = draw(st.sampled_from(_AGGREGATES)) + draw(st.sampled_from(_FILTERS))
        if "div" in text and draw(st.booleans()):
            # Guards the division, and what it leaves out may have an error.
            text = text.partition(" filter")[0] + " filter (where n > 1)"
        # The conditions compare the first measure with numbers.
        if at == 0:
            text = text.replace("max_by(k", "count(distinct k").replace("max_by(at", "count(distinct at")
            for name in (
                "max(k)",
                "last(k)",
                "max(at",
                "last(at",
                "mode(k",
                "mode(at",
                "collect_set(",
                "bool_and(",
                "bool_or(",
            ):
                text = text.replace(name, f"count{name[name.index('(') :]}")
        own = draw(st.sampled_from([None, None, 1, 3, 7, 12])) if own_windows else None
        found[f"m{at}"] = text if own is None else {"measure": text, "window": draw(look_back_windows([own]))}
    return found


@st.composite
def look_back_windows(draw: st.DrawFn, sizes: list[int], resolutions: list[int | None] = _RESOLUTIONS) -> Any:
    size = draw(st.sampled_from(sizes))
    delay = draw(st.sampled_from([None, None, 0, 1, 3, 5]))
    resolution = draw(st.sampled_from(resolutions))
    if delay is None and resolution is None:
        return _microseconds(size)
    window = {"lookback": _microseconds(size)}
    window |= {} if delay is None else {"delay": _microseconds(delay)}
    return window if resolution is None else window | {"resolution": _microseconds(min(size, resolution))}


def _bearing(document: dict[str, Any]) -> dict[str, Any]:
    """The rule with an exact window for each measure that cannot have a resolution."""
    found = {}
    for name, spec in document["measures"].items():
        text, window = (spec, None) if isinstance(spec, str) else (spec["measure"], spec["window"])
        used = document["window"] if window is None else window
        if isinstance(used, dict) and "resolution" in used and any(word in text for word in _EXACT_ONLY):
            window = {key: value for key, value in used.items() if key != "resolution"}
        found[name] = text if window is None else {"measure": text, "window": window}
    return document | {"measures": found}


@st.composite
def lookbacks(draw: st.DrawFn) -> dict[str, Any]:
    document = {
        "window": draw(look_back_windows(_SPANS)),
        "measures": draw(measures(own_windows=True)),
        "when": draw(st.sampled_from([*_WHENS, "m0 * n > {limit}"])).format(limit=draw(st.integers(0, 4))),
        "late": draw(st.sampled_from(["evaluate", "record", "revise", "revise"])),
        "message": draw(st.sampled_from(["", "{m0} at {id}, {d} {window_complete}"])),
    }
    if document["late"] != "revise":
        document["reset_on_alert"] = draw(st.booleans())
    return _bearing(document)


@st.composite
def event_rules(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "when": draw(st.sampled_from([*_OWN_CONDITIONS, "10 / (n - 1) > n", "case when n > 0 then d > 0 end"])),
        "late": draw(st.sampled_from(["evaluate", "evaluate", "record"])),
        "message": draw(st.sampled_from(["", "{a} at {id}, {d} {window_complete}"])),
    }


@st.composite
def windows(draw: st.DrawFn, kind: str) -> dict[str, Any]:
    size = draw(st.integers(1, 6 if kind == "session" else 12))
    window = {kind: _microseconds(size)}
    if kind == "sliding":
        window["slide"] = _microseconds(draw(st.integers(1, size)))
    if kind != "session":
        window["offset"] = _microseconds(draw(st.sampled_from([0, 0, 1, 3])))
    document = {
        "window": window,
        "measures": draw(measures(own_windows=False)),
        "early": draw(st.sampled_from([False, False, True])),
        "message": draw(st.sampled_from(["", "{m0} {window_complete}"])),
    }
    when = draw(st.none() | st.sampled_from(_WHENS))
    return document if when is None else document | {"when": when.format(limit=draw(st.integers(0, 4)))}


@st.composite
def sequences(draw: st.DrawFn) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []
    wanting, shown = draw(st.booleans()), ""
    for at in range(draw(st.sampled_from([1, 2] if wanting else [2, 2, 3, 1]))):
        least = draw(st.sampled_from([1, 1, 1, 2]))
        most = draw(st.sampled_from([None, None, None, 0, 1]))
        step = {"name": f"s{at}", "where": draw(conditions(at)), "at_least": least}
        shown += f"{{s{at}.count}} {{s{at}.d}} "
        steps.append(step if most is None else step | {"at_most": least + most})
    if wanting:
        wait = draw(st.sampled_from([1, 2, 3, 4, 6, 12, None]))
        absent = {"name": "silent", "absent": draw(conditions(len(steps)))}
        steps.append(absent if wait is None else absent | {"within": _microseconds(wait)})
    sequence = {"within": _microseconds(draw(st.sampled_from([8, 5, 12, 25, 3, 1]))), "steps": steps}
    until = draw(st.sampled_from([None, None, None, "n = 3", "c = 2", "10 / n > 4"]))
    if until is not None:
        sequence["until"] = until
    sequence["expiry"] = draw(st.sampled_from(["sliding", "fixed"]))
    if draw(st.integers(0, 2)) == 0:
        sequence = _taken_once(sequence)
    return {
        "sequence": sequence,
        "late": draw(st.sampled_from(["evaluate", "evaluate", "record"])),
        "reset_on_alert": draw(st.sampled_from([False, False, True])),
        "message": draw(st.sampled_from(["", "{s0.count} of {s0.n} at {id}, {a} {window_complete}", shown])),
    }


def _taken_once(sequence: dict[str, Any]) -> dict[str, Any]:
    """The sequence with `take: once`, without the keys that it refuses."""
    steps = [{key: value for key, value in step.items() if key != "at_most"} for step in sequence["steps"]]
    return {key: value for key, value in sequence.items() if key != "expiry"} | {"steps": steps, "take": "once"}


@st.composite
def linked_cases(draw: st.DrawFn) -> dict[str, Any]:
    """Cases as of `cases` about sequences with a step that reads earlier ones, with most events of one key in a window."""
    pace = draw(st.sampled_from([1, 1, 2, 3]))
    # Events of one key, nearly all of them in order, or many of them late.
    late = draw(st.sampled_from([[0] * 25 + [1, 3], [0] * 25 + [1, 3], [0, 0, 0, 0, 1, 3, 5]]))
    events = [
        row | {"k": draw(st.sampled_from("xxxxxxxy")), "at": at // pace - draw(st.sampled_from(late))}
        for at, row in enumerate(draw(rows()))
    ]
    last = max(row["arrival"] for row in events)
    most = draw(st.sampled_from([1, 1, 2]))
    steps = [
        {"name": f"s{at}", "where": draw(st.sampled_from(_OFTEN)), "at_least": draw(st.sampled_from([1, 1, 1, 2, 3]))}
        for at in range(most)
    ]
    if draw(st.integers(0, 4)) == 0:
        steps[-1]["at_most"] = steps[-1]["at_least"] + 1
    parts = [
        draw(st.sampled_from([*_LINKED_CONDITIONS, *_OF_LAST_ROWS * 2, *_OF_FIRST_ROWS])).format(
            f"s{draw(st.sampled_from([most - 1, most - 1, 0]))}"
        )
        for _ in range(2)
    ]
    where = draw(st.sampled_from(["{0}", "{0}", "n >= 0 and {0}", "{0} and {1}", "{0} or {1}", "not ({0})"]))
    least = draw(st.sampled_from([1, 1, 1, 1, 2, 3, 4]))
    steps.append({"name": f"s{most}", "where": where.format(*parts), "at_least": least})
    if draw(st.integers(0, 4)) == 0:
        steps[-1]["at_most"] = least + draw(st.sampled_from([0, 1, 2]))
    for at in range(most + 1, most + 1 + draw(st.sampled_from([0, 0, 0, 1, 2]))):
        linked = draw(st.sampled_from(_OF_FIRST_ROWS)).format(f"s{draw(st.integers(0, at - 1))}")
        where = draw(st.sampled_from(_OFTEN)) if draw(st.booleans()) else draw(conditions(at) | st.just(linked))
        steps.append({"name": f"s{at}", "where": where, "at_least": draw(st.sampled_from([1, 1, 2]))})
        if draw(st.integers(0, 5)) == 0:
            steps[-1]["at_most"] = steps[-1]["at_least"]
    if draw(st.booleans()):
        steps.append(
            {"name": "silent", "absent": draw(conditions(len(steps))), "within": _microseconds(draw(st.integers(1, 6)))}
        )
    sequence: dict[str, Any] = {"within": _microseconds(draw(st.sampled_from([5, 8, 3, 12]))), "steps": steps}
    if draw(st.integers(0, 3)) == 0:
        sequence = _taken_once(sequence)
    until = draw(st.sampled_from([None, None, None, "n = 3"]))
    document = {
        "rule_id": "r1", "stream": "tx", "group_by": ["k"],
        "sequence": sequence if until is None else sequence | {"until": until},
        "reset_on_alert": draw(st.sampled_from([False, False, True])),
        "message": draw(st.sampled_from(["", f"{{s0.count}} {{s{most}.count}} {{s{most}.n}} {{s0.n}}"])),
    }  # fmt: skip
    return {
        "stream": "plain",
        "rows": events,
        "changes": [_row(0, "insert", "r1", 1, "active", document)],
        "cuts": draw(st.lists(st.integers(1, last), unique=True, max_size=2)),
        "shards": 1,
        "reload": False,
        "cached": None,
        "small_pages": draw(st.sampled_from([True, True, False])),
    }


# Conditions that are the same for an earlier step that begins later, as long as it has these rows.
_OF_LAST_ROWS = [
    "{0}.count >= 3", "{0}.count = 4", "size({0}.n) between 3 and 4", "element_at({0}.n, -2) < n", "array_contains({0}.n, n)",
    "array_contains({0}.n, 1 - n)", "not array_contains({0}.n, n)", "element_at({0}.n, -1) <> n", "element_at({0}.n, -3) = n",
]  # fmt: skip
# Conditions that are another one in each match whose first rows have other values.
_OF_FIRST_ROWS = [
    "n = element_at({0}.n, 1)", "n <> element_at({0}.n, 1)", "n < element_at({0}.n, 1)", "element_at({0}.n, 1) >= n",
    "n > element_at({0}.n, 1) - 1", "n <= element_at({0}.n, 2)", "d = element_at({0}.d, 1)", "d < element_at({0}.d, 1)",
    "d <> element_at({0}.d, 1)", "a >= element_at({0}.a, 1)", "a = element_at({0}.a, 1) * 1.50", "c = element_at({0}.n, 1)",
    "k = element_at({0}.k, 1) and n > element_at({0}.n, 1)", "c = element_at({0}.c, 1) and d = element_at({0}.d, 1)",
    "n <> element_at({0}.n, 1) and d >= element_at({0}.d, 1)", "at > element_at({0}.at, 1) and {0}.count < 4",
    "10 / element_at({0}.n, 1) > n", "n = element_at({0}.n, -1)", "{0}.count = n", "id < element_at({0}.id, 1)",
]  # fmt: skip
# Conditions of the event alone that most generated events satisfy.
_OFTEN = ["true", "n >= 0", "n <= 1", "n >= 1", "c = 1", "d >= 0", "k = 'x'"]


@st.composite
def conditions(draw: st.DrawFn, earlier: int) -> str:
    """A step's condition; so many steps are before it."""
    if earlier and draw(st.booleans()):
        return draw(st.sampled_from(_LINKED_CONDITIONS)).format(f"s{draw(st.integers(0, earlier - 1))}")
    return draw(st.sampled_from(_OWN_CONDITIONS))


@st.composite
def documents(draw: st.DrawFn, rule_id: str, kind: str) -> dict[str, Any]:
    own = {"event": event_rules, "lookback": lookbacks, "sequence": sequences}
    keys = [["k"], ["k"], [], ["c"], ["k", "c"], ["d"], ["d", "k"]]
    group_by = draw(key_expressions()) if draw(st.integers(0, 3)) == 0 else draw(st.sampled_from(keys))
    document = {"rule_id": rule_id, "stream": "tx", "group_by": group_by}
    document |= draw(own[kind]() if kind in own else windows(kind))
    if "p" in _key_names(document) and draw(st.booleans()):
        read = draw(st.sampled_from(["p is not null", "p is null or p = p"]))
        if kind != "sequence":
            document["when"] = f"({document['when']}) and ({read})" if "when" in document else f"(true) and ({read})"
        document["message"] = f"{document['message']} {{p}}"
    # A window has many events, so that only its key has one value of a field.
    about = _key_names(document) if kind in _KINDS_OF_WINDOWS else sorted({*_key_names(document), *"ckand"})
    optional = {
        "entities": draw(st.none() | st.lists(st.sampled_from(about), unique=True)) if about else None,
        "tags": draw(st.sampled_from([None, None, ["a"], ["attack.t1110", "b"]])),
        "where": draw(st.sampled_from(_WHERES)),
        "allowed_lateness": draw(st.sampled_from([None, None, None, "0 seconds", "2 microseconds"])),
        "suppress": draw(st.sampled_from([None, None, "2 microseconds", "6 microseconds", "30 microseconds"])),
        "effective_from": draw(st.sampled_from([None] * 6 + [0, 10])),
        "effective_until": draw(st.sampled_from([None] * 6 + [15, 25])),
    }
    if kind == "event" and "(p " not in document["when"] and draw(st.booleans()):
        # One of its two conditions is enough.
        optional["where"] = document.pop("when")
    if kind == "sequence" and draw(st.sampled_from(_HAS_KEYS)):
        document = draw(with_step_keys(document))
    return _about_key(document | {key: value for key, value in optional.items() if value is not None}, kind)


# Whether the steps of a sequence have keys of their own.
_HAS_KEYS = [False, False, True]
# By field of group_by, the fields that may stand for it.
_INSTEAD = {"c": "nnc", "k": ["id", "k"], "d": "d", "n": "ccn"}


@st.composite
def with_step_keys(draw: st.DrawFn, document: dict[str, Any]) -> dict[str, Any]:
    """The rule with keys of some of its steps, over fields of which many events have equal values."""
    keys = [["c"], ["c"], ["c"], ["n"], ["n", "c"], ["c", "n"], ["c", "k"], ["k", "n"]]
    new = document | {"group_by": draw(st.sampled_from(keys))}
    sequence = dict(new["sequence"])

    def draw_key() -> dict[str, Any]:
        if draw(st.sampled_from([True, True, False])):
            return {"key": [draw(st.sampled_from(_INSTEAD[name])) for name in new["group_by"]]}
        return {}

    steps = [{name: value for name, value in step.items() if name != "key"} for step in sequence["steps"]]
    sequence["steps"] = [step | draw_key() for step in steps]
    if draw(st.booleans()):
        # A field of group_by is that of the match.
        new["message"] = "{c} {n} {k} at {id}"
    if "until" in sequence:
        until = sequence["until"]
        until = until["where"] if isinstance(until, dict) else until
        sequence["until"] = {"where": until, **draw_key()} if draw(st.booleans()) else until
    return _about_key(new | {"sequence": sequence}, "sequence")


def _fit_keys(document: dict[str, Any]) -> dict[str, Any]:
    """The rule without keys of steps that do not fit its group_by, or hardly ever equal it."""
    if "sequence" not in document:
        return document
    grouped = document.get("group_by", [])

    def fit(part: Any) -> Any:
        key = part.get("key") if isinstance(part, dict) else None
        is_right = key is None or (
            len(key) == len(grouped)
            and all(each in _INSTEAD.get(str(name), ()) for name, each in zip(grouped, key, strict=True))
        )
        return part if is_right else {name: value for name, value in part.items() if name != "key"}

    sequence = dict(document["sequence"])
    sequence["steps"] = [fit(step) for step in sequence["steps"]]
    if "until" in sequence:
        sequence["until"] = fit(sequence["until"])
    return document | {"sequence": sequence}


@st.composite
def key_expressions(draw: st.DrawFn) -> list[Any]:
    """A key with an expression, or two of them, or one beside a field."""
    first, second = draw(st.lists(st.sampled_from(_KEY_EXPRESSIONS), min_size=2, max_size=2, unique=True))
    keys: list[Any] = [[{"p": first}], [{"p": first}], [{"p": first}, {"q": second}], [{"q": first}]]
    field = draw(st.sampled_from("kc"))
    return draw(st.sampled_from([*keys, [field, {"p": first}]] if first != field else keys))


def _key_names(document: dict[str, Any]) -> list[str]:
    return [name for each in document["group_by"] for name in (each if isinstance(each, dict) else [each])]


@st.composite
def revised(draw: st.DrawFn, document: dict[str, Any], kind: str) -> dict[str, Any]:
    """A later version: much as before, so that it goes on with some of the state."""
    # A row that was updated since may have a document of the kind that the rule was of before.
    is_other = any((kind == other) != (_kind_of(document) == other) for other in ("event", "sequence"))
    if is_other or draw(st.sampled_from([False, False, True])):
        return _longer(document)
    other = draw(documents(document["rule_id"], kind))
    first = "measures" if kind == "session" else "window"
    keys = [key for key in _REVISABLE if key in document or key in other]
    changed = draw(st.lists(st.sampled_from([first, *keys]), unique=True, min_size=1, max_size=2))
    new = {key: value for key, value in document.items() if key not in changed}
    new |= {key: value for key, value in other.items() if key in changed}
    if kind == "sequence":
        part = draw(st.sampled_from(["within", None, "until", "steps", "expiry", "take", "within"]))
        new["sequence"] = {key: value for key, value in new["sequence"].items() if key != part}
        new["sequence"] |= {key: value for key, value in other["sequence"].items() if key == part}
        if new["sequence"].get("take") == "once":
            new["sequence"] = _taken_once(new["sequence"])
        # A message that names a step of before is refused.
        names = {step["name"] for step in new["sequence"]["steps"]}
        if not set(re.findall(r"\{(s\d+)\.", new.get("message", ""))) <= names:
            new["message"] = ""
    if new.get("late") == "revise":
        new.pop("reset_on_alert", None)
    if kind == "event" and not {"where", "when"} & new.keys():
        new["when"] = "n >= 0"
    new = _fit_keys(_about_key(new, kind))
    return _bearing(new) if kind == "lookback" else new


def _about_key(document: dict[str, Any], kind: str) -> dict[str, Any]:
    """The rule without what names an entry that is not in its key."""
    names, fields = _key_names(document), () if kind in _KINDS_OF_WINDOWS else "ckand"
    new = dict(document)
    if "entities" in new:
        new["entities"] = [name for name in new["entities"] if name in names or name in fields]
    if "p" not in names:
        new["message"] = new.get("message", "").replace("{p}", "")
        if match := re.fullmatch(r"\((.*)\) and \(p [^()]*\)", new.get("when", "")):
            new["when"] = match[1]
    return new


def _sharing(document: dict[str, Any], other: dict[str, Any], kind: str) -> dict[str, Any]:
    """The rule with the keys, events and measures of another one, so that both look at the same features."""
    taken = ("group_by", "where", "allowed_lateness", "measures", *(() if kind == "lookback" else ("window",)))
    shared = {key: value for key, value in document.items() if key not in taken}
    shared |= {key: value for key, value in other.items() if key in taken}
    if kind == "event" and not {"where", "when"} & shared.keys():
        shared["when"] = "n >= 0"
    shared = _fit_keys(_about_key(shared, kind))
    return _bearing(shared) if kind == "lookback" else shared


def _longer(document: dict[str, Any]) -> dict[str, Any]:
    """The rule with a longer memory than it had: what is forgotten does not come back."""
    new = {key: "30 microseconds" if key == "suppress" else value for key, value in document.items()}
    if "sequence" in new:
        new["sequence"] = new["sequence"] | {"within": "25 microseconds"}
    elif isinstance(new.get("window"), str):
        new["window"] = "25 microseconds"
    elif "lookback" in new.get("window", {}):
        new["window"] = new["window"] | {"lookback": "25 microseconds"}
    return new


_MOVES = st.fixed_dictionaries(
    {
        "letter": st.sampled_from(["", "a", "Z", "é", "a\0"]),
        "later": st.sampled_from([0, 0, 1, 1, 2, 5]),
        "commit": st.sampled_from([0, 0, 1, 1, 3]),
        "back": st.sampled_from([0, 0, 0, 0, 0, 1, 3, 4, 5, 6, 7, 8, 9, 20]),
        "again": st.sampled_from([False] * 7 + [True]),
        "c": st.sampled_from([1, 1, 1, 2, 0, None]),
        # Some are the same up to a NUL, or the begin of another one.
        "k": st.sampled_from(["x", "x", "x", "y", "x\0", "x\0y", None]),
        "a": st.sampled_from(["0.00", "1.01", "2.50", "-7.25", None, "9999999999999999.99"]),
        "n": st.sampled_from([0, 0, 1, 1, 2, 3, None, 2**31 - 1]),
        "d": st.sampled_from([0.0, -0.0, 0.0, -0.0, 1.5, float("nan"), float("inf"), float("-inf"), None]),
    }
)


@st.composite
def rows(draw: st.DrawFn) -> list[dict[str, Any]]:
    time, commit, found = draw(st.integers(-10, 10)), 1, []
    least = draw(st.sampled_from([1, 8, 16, 24]))
    # Positions that disagree with the ids: those in the list, or written by several, some by none.
    positions = draw(st.sampled_from([None, st.none(), st.integers(0, 3), st.integers(-2, 2) | st.none()]))
    for at, move in enumerate(draw(st.lists(_MOVES, min_size=least, max_size=least + 16))):
        time, commit = time + move["later"], commit + move["commit"]
        row = {"id": f"{move['letter']}{at}", "at": time - move["back"], "arrival": commit}
        row |= {name: move[name] for name in ("c", "k", "a", "n", "d")}
        if found and move["again"]:
            # The same once more, but for its id, its position and perhaps its commit.
            row = found[-1] | {"id": row["id"], "arrival": commit}
        if positions is not None:
            row["position"] = draw(positions)
        found.append(row)
    return found


@st.composite
def of_members(draw: st.DrawFn, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same events as those of a union. Members often fall silent for a while."""
    members = draw(st.sampled_from([["x", "y"], ["x", "y", "z"], ["y", "x", "x", "x"]]))
    member, found = draw(st.sampled_from(members)), []
    for row in events:
        if draw(st.integers(0, 3)) == 0:
            member = draw(st.sampled_from(members))
        found.append(row | {"member": member})
    return found


@st.composite
def union_cases(draw: st.DrawFn, *, updates: bool) -> dict[str, Any]:
    """Cases as of `cases` about the events of a union."""
    return draw(cases(updates=updates, streams=("union",)))


@st.composite
def changes(
    draw: st.DrawFn, events: list[dict[str, Any]], *, updates: bool, drawn: Sequence[str] = _KINDS
) -> list[dict[str, Any]]:
    """Rows of the rules table, each after the commit `after`, in order.

    updates: rows that are written over as well. drawn: the kinds of rules to draw from.
    """
    last = max(row["arrival"] for row in events)
    kinds = {f"r{at}": draw(st.sampled_from(drawn)) for at in range(1, 1 + draw(st.sampled_from([1, 1, 2, 2, 3])))}
    if draw(st.booleans()):
        # Rules of one kind look at the same features, see below; a session or sequence keeps its own.
        shared = [kind for kind in ("lookback", "lookback", "tumbling", "sliding") if kind in drawn]
        kinds = dict.fromkeys(kinds, draw(st.sampled_from([kinds["r1"], *shared])))
    # Of each rule its row in force, and the kinds and documents of its versions: it may go back to one.
    current: dict[str, dict[str, Any]] = {}
    written: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    # The kinds that the version in force has had.
    had: dict[str, set[str]] = {}
    # The rows in force by rule and role: 0 active or paused, 1 shadow.
    roles: dict[str, dict[int, dict[str, Any]]] = {}
    found = []
    for rule_id, kind in kinds.items():
        status = draw(st.sampled_from(["active"] * 6 + ["shadow", "paused"]))
        after = min(last, draw(st.sampled_from([0, 0, 0, 0, 1, 2])))
        document = draw(documents(rule_id, kind))
        alike = [listed[0][1] for other, listed in written.items() if kinds[other] == kind]
        if alike and draw(st.sampled_from([True, True, False])):
            document = _sharing(document, draw(st.sampled_from(alike)), kind)
        written[rule_id] = [(kind, document)]
        had[rule_id] = {_MEMORY_OF_KIND.get(kind, kind)}
        current[rule_id] = _row(after, "insert", rule_id, 1, status, document)
        roles[rule_id] = {int(status == "shadow"): current[rule_id]}
        found.append(current[rule_id])
    found.sort(key=lambda change: change["after"])
    whats = ["version"] * 4 + ["kind"] * 2 + ["challenger"] * 3 + ["status", "quarantine", "advance", "clear_state"]
    whats += ["update", "update", "delete"] if updates else []
    gated = draw(st.sampled_from([False, False, True]))
    whats += ["refused"] * 4 if gated else []
    least = draw(st.sampled_from([0, 2, 4]))
    afters = st.lists(st.integers(found[-1]["after"], last), min_size=least, max_size=least + 4)
    for after in sorted(draw(afters)):
        what = draw(st.sampled_from(whats))
        if what in ("advance", "clear_state"):
            found.append(_row(after, "insert", "*", None, what, draw(_times(events)) if what == "advance" else None))
            continue
        rule_id = draw(st.sampled_from(sorted(current)))
        old, known = current[rule_id], written[rule_id]
        rows = [*roles[rule_id].values(), *([old] if what in ("update", "kind") and old["status"] == "draft" else [])]
        if what == "refused":
            found.append(draw(_refused(old, rows if updates else [], kinds[rule_id], after, len(found))))
            continue
        if what in ("update", "quarantine", "delete") and rows:
            found.append(draw(_touched(what, old, rows, after)))
            _fill_role(roles[rule_id], found[-1])
            current[rule_id] = found[-1] if found[-1]["version"] >= old["version"] else old
            continue
        document = old["document"]
        if what == "challenger":
            known.append(draw(_challengers(known)))
            kinds[rule_id], document = known[-1]
        if what == "version" and draw(st.sampled_from([True, True, False])):
            document = draw(revised(document, kinds[rule_id]))
            known.append((kinds[rule_id], document))
        elif what == "version":
            kinds[rule_id], document = draw(st.sampled_from(known))
        elif what == "kind":
            kind = draw(st.sampled_from(drawn))
            document = draw(documents(rule_id, kind))
            memory = _MEMORY_OF_KIND.get(kind, kind)
            if updates and memory not in had[rule_id] and old in rows and draw(st.booleans()):
                what = "update"
                had[rule_id].add(memory)
            kinds[rule_id] = kind
            known.append((kind, document))
        if what != "update":
            had[rule_id] = {_MEMORY_OF_KIND.get(kinds[rule_id], kinds[rule_id])}
        statuses = {
            "version": ["active"] * 6 + ["shadow", "paused", "draft"],
            "kind": ["active"] * 4 + ["paused"],
            "update": _IN_FORCE,
            "challenger": ["shadow"] * 4 + ["paused"],
        }
        status = draw(
            st.sampled_from(statuses.get(what, ["active", "active", "shadow", "paused", "paused", "retired"]))
        )
        change, version = ("update", old["version"]) if what == "update" else ("insert", old["version"] + 1)
        current[rule_id] = _row(after, change, rule_id, version, status, document)
        _fill_role(roles[rule_id], current[rule_id])
        found.append(current[rule_id])
    if gated:
        since = draw(st.integers(0, len(found)))
        found = [row if at < since or "gate" in row else _pass_gate(row) for at, row in enumerate(found)]
    return found


@st.composite
def _refused(
    draw: st.DrawFn, last: dict[str, Any], rows: list[dict[str, Any]], kind: str, after: int, number: int
) -> dict[str, Any]:
    """An active row that an enforced gate rejects, a further version or one of the rows updated; all stays as it was."""
    row = _row(after, "insert", last["rule_id"], 1_000 + number, "active", last["document"])
    if rows and draw(st.booleans()):
        row = draw(st.sampled_from(rows)) | {"after": after, "change": "update", "status": "active"}
    if draw(st.booleans()):
        row["document"] = draw(revised(row["document"], kind))
    return row | {"gate": True, "shown": draw(st.sampled_from(["nothing", "another", "own", "nobody"]))}


def _pass_gate(row: dict[str, Any]) -> dict[str, Any]:
    """The row under an enforced gate, with what it asks for."""
    return row | {"gate": True} | ({"shown": "fits"} if row["status"] == "active" and row["rule_id"] != "*" else {})


def gate_columns(change: dict[str, Any]) -> dict[str, Any]:
    """The columns author, approved_by and evidence of a change, by what it shows to the gate."""
    shown = change.get("shown")
    if shown is None:
        return {"author": None, "approved_by": None, "evidence": change.get("evidence")}
    about = json.loads(json.dumps(change["document"])) | ({"warm_start": "other"} if shown == "another" else {})
    evidence = None if shown == "nothing" else write_evidence(about, [], "then")
    return {"author": "ann", "approved_by": {"own": "ann", "nobody": None}.get(shown, "bob"), "evidence": evidence}


@st.composite
def _challengers(draw: st.DrawFn, known: list[tuple[str, dict[str, Any]]]) -> tuple[str, dict[str, Any]]:
    """A version with another limit, as a rule is tuned, or an earlier one again."""
    kind, document = draw(st.sampled_from(known[-2:]))
    return kind, draw(revised(document, kind)) if draw(st.booleans()) else document


_IN_FORCE = ["active", "shadow", "paused"]


@st.composite
def _touched(
    draw: st.DrawFn, what: str, last: dict[str, Any], rows: list[dict[str, Any]], after: int
) -> dict[str, Any]:
    """One of the rows updated to another status or deleted, or a further row that quarantines it. last: the rule's last row."""
    row = draw(st.sampled_from(rows))
    if what == "update":
        return row | {"after": after, "change": "update", "status": draw(st.sampled_from(_IN_FORCE))}
    if what == "delete":
        return row | {"after": after, "change": "delete"}
    further = _row(after, "insert", row["rule_id"], last["version"] + 1, "quarantined", row["document"])
    return further | {"evidence": json.dumps({"quarantined": row["version"]})}


def _fill_role(roles: dict[int, dict[str, Any]], row: dict[str, Any]) -> None:
    """Puts a row in force in its role, and ends the roles that it ends."""
    if row["status"] == "draft" and row["change"] != "delete":
        return
    ended = json.loads(row["evidence"])["quarantined"] if row["status"] == "quarantined" else row["version"]
    for role in [role for role, each in roles.items() if each["version"] == ended]:
        del roles[role]
    if row["status"] in ("active", "retired") and row["change"] != "delete":
        roles.clear()
    if row["status"] in _IN_FORCE and row["change"] != "delete":
        roles[int(row["status"] == "shadow")] = row


@st.composite
def _times(draw: st.DrawFn, events: list[dict[str, Any]]) -> dict[str, Any]:
    times = [row["at"] for row in events]
    return {"time": draw(st.integers(min(times), max(times) + 12))}


def _row(
    after: int, change: str, rule_id: str, version: int | None, status: str, document: dict[str, Any] | None
) -> dict[str, Any]:
    return {
        "after": after, "change": change, "rule_id": rule_id, "version": version, "status": status, "document": document,
    }  # fmt: skip


def with_reserved_names(case: dict[str, Any]) -> dict[str, Any]:
    """The case with fields that have words of SQL as names, whatever stream it was made for."""
    if case["stream"] == "reserved":
        return case
    rows = [{_RESERVED.get(name, name): value for name, value in row.items()} for row in case["rows"]]
    changes = [change | {"document": _renamed(change["document"])} for change in case["changes"]]
    return case | {"stream": "reserved", "rows": rows, "changes": changes}


def _renamed(part: Any, place: str = "") -> Any:
    if isinstance(part, dict):
        return {key: _renamed(value, key) for key, value in part.items()}
    if isinstance(part, list):
        return [_renamed(each, place) for each in part]
    if place in ("group_by", "entities", "key"):
        return _RESERVED.get(part, part)
    if place in _TEXTS and isinstance(part, str):
        quote = "{}" if place == "message" else "`{}`"
        return _FIELD.sub(lambda match: quote.format(_RESERVED[match[0]]), part)
    return part


# Where names of fields stand in a document: m0, m1 and so on are the measures, on whatever key.
_TEXTS = ("where", "when", "message", "absent", "until", "measure", "m0", "m1", "m2", "p", "q")
_FIELD = re.compile(r"(?<![\w'`])[ckand](?![\w'`])")


@st.composite
def cases(
    draw: st.DrawFn, *, updates: bool, streams: Sequence[str] = sorted(STREAMS), kinds: Sequence[str] = _KINDS
) -> dict[str, Any]:
    """Plain values only, so that a case that fails can be kept as it is printed."""
    events = draw(rows())
    last = max(row["arrival"] for row in events)
    stream = draw(st.sampled_from(streams))
    if stream == "union":
        events = draw(of_members(events))
    case = {
        "stream": "plain" if stream == "reserved" else stream,
        "rows": events,
        "changes": draw(changes(events, updates=updates, drawn=kinds)),
        "cuts": draw(st.lists(st.integers(1, last), unique=True, max_size=6)),
        "shards": draw(st.integers(1, 3)),
        "reload": draw(st.booleans()),
        # Bytes of pages that stay in memory: as many as usual, none, a few.
        "cached": draw(st.sampled_from([None, 0, 3_000])),
        "small_pages": draw(st.sampled_from([False, False, True])),
    }
    return with_reserved_names(case) if stream == "reserved" else case


@st.composite
def step_key_cases(draw: st.DrawFn) -> dict[str, Any]:
    """Cases as of `cases` about sequences with keys of their steps, and events of which many match each other."""
    values = st.sampled_from([1, 1, 1, 2, 0, None])
    events = [row | {"c": draw(values), "n": draw(values)} for row in draw(rows())]
    last = max(row["arrival"] for row in events)
    document = draw(with_step_keys(draw(documents("r1", "sequence"))))
    found = [_row(0, "insert", "r1", 1, "active", document)]
    if draw(st.booleans()):
        after = draw(st.integers(0, last))
        found.append(_row(after, "insert", "r1", 2, "active", draw(revised(document, "sequence"))))
    # Of events at one time, any may be taken for the one that is deleted.
    times = [row["at"] for row in events]
    alone = [at for at, time in enumerate(times) if times.count(time) == 1]
    commits = sorted({row["arrival"] for row in events})
    gone = draw(st.lists(st.sampled_from(alone), max_size=3, unique=True)) if alone else []
    deletes = [(at, draw(st.sampled_from(commits))) for at in gone]
    return {
        "stream": "plain",
        "rows": events,
        "changes": found,
        "deleted": [(at, commit) for at, commit in deletes if commit > events[at]["arrival"]],
        "cuts": draw(st.lists(st.integers(1, last), unique=True, max_size=4)),
        "shards": draw(st.integers(1, 3)),
        "reload": draw(st.booleans()),
        "cached": draw(st.sampled_from([None, 0, 3_000])),
        "small_pages": draw(st.sampled_from([True, False])),
    }


@st.composite
def advanced_cases(draw: st.DrawFn) -> dict[str, Any]:
    """Cases as of `cases` about rules of which versions come in the arrivals of advances, before them and after them."""
    events = [row | {"k": draw(st.sampled_from("xxxy"))} for row in draw(rows())]
    commits = sorted({row["arrival"] for row in events})
    windows = ["tumbling", "tumbling", "sliding", "session"]
    kinds = [draw(st.sampled_from([*windows, "sequence"])) for _ in range(draw(st.sampled_from([1, 1, 2])))]
    known = [draw(documents(f"r{at}", kind)) for at, kind in enumerate(kinds, 1)]
    if kinds[0] == kinds[-1]:
        known = [known[0], *(_sharing(each, known[0], kinds[0]) for each in known[1:])]
    found = [_row(0, "insert", each["rule_id"], 1, "active", each) for each in known]
    versions = [1] * len(known)
    for after in sorted(draw(st.lists(st.sampled_from(commits), min_size=1, max_size=3, unique=True))):
        others = ["version", "version", "version", "advance", "paused", "clear_state"]
        middle = draw(st.lists(st.sampled_from(others), min_size=1, max_size=3))
        for what in draw(st.permutations(["advance", *middle])):
            if what in ("advance", "clear_state"):
                found.append(
                    _row(after, "insert", "*", None, what, draw(_times(events)) if what == "advance" else None)
                )
                continue
            at = draw(st.integers(0, len(known) - 1))
            versions[at] += 1
            if what == "version":
                known[at] = draw(revised(known[at], kinds[at]))
            status = "paused" if what == "paused" else "active"
            found.append(_row(after, "insert", known[at]["rule_id"], versions[at], status, known[at]))
    return {"stream": "plain", "rows": events, "changes": found, "shards": draw(st.integers(1, 2))}


@st.composite
def rising_cases(draw: st.DrawFn) -> dict[str, Any]:
    """Cases as of `cases` about lookback rules with rising conditions, over windows and events of which many hold others."""
    events = [row | {"c": 1, "k": draw(st.sampled_from("xxxxy"))} for row in draw(rows())]
    if draw(st.booleans()):
        # No sum has a negative value.
        events = [row | {"a": (row["a"] or "").lstrip("-") or None} for row in events]
    last = max(row["arrival"] for row in events)
    texts = [
        "count(*)", "sum(a)", "sum(a)", "sum(n)", "max(n)", "count(n)", "count(distinct n)", "count(distinct d)", "max(a)",
        "sum(n * 4611686018427387904)", "avg(a)", "max(d)",
    ]  # fmt: skip
    pool = ["count(*)", draw(st.sampled_from(texts))]
    found = []
    for at in range(1, 1 + draw(st.sampled_from([3, 5, 2, 7]))):
        document = {"rule_id": f"r{at}", "stream": "tx", "group_by": draw(st.sampled_from([["k"]] * 5 + [["c"]]))}
        after = min(last, draw(st.sampled_from([0] * 5 + [2])))
        found.append(_row(after, "insert", f"r{at}", 1, "active", document | draw(_with_rising_condition(pool))))
    commits = sorted({row["arrival"] for row in events})
    # Of events at one time, any may be taken for the one that is deleted.
    times = [row["at"] for row in events]
    alone = [at for at, time in enumerate(times) if times.count(time) == 1]
    gone = draw(st.lists(st.sampled_from(alone), max_size=2, unique=True)) if alone else []
    deletes = [(at, draw(st.sampled_from(commits))) for at in gone]
    return {
        "stream": "plain",
        "rows": events,
        "changes": sorted(found, key=lambda change: change["after"]),
        "deleted": [(at, commit) for at, commit in deletes if commit > events[at]["arrival"]],
        "cuts": draw(st.lists(st.integers(1, last), unique=True, max_size=2)),
        "shards": draw(st.integers(1, 2)),
        "reload": draw(st.booleans()),
        "cached": draw(st.sampled_from([None, 0, 3_000])),
        "small_pages": draw(st.sampled_from([True, True, False])),
    }


@st.composite
def _with_rising_condition(draw: st.DrawFn, texts: list[str]) -> dict[str, Any]:
    filters = ["", "", "", "", " filter (where n >= 0)", " filter (where n >= 1)", " filter (where 10 / n > 2)"]
    wheres = [None, None, "n >= 0", "n >= 1", "n >= 1", "n >= 2", "n >= 1 and a >= 0", "10 / n > 1"]
    conditions = [
        *["m0 >= {0}"] * 4, "m0 > {0}", "{0} <= m0", "m0 >= {0} and m1 > {1}", "m0 >= {0} or m1 >= {1}",
        "m0 > {0}.50 or {1} < m0", "m0 >= -{0}", "m0 < {0}", "m0 >= {0} and not window_complete",
    ]  # fmt: skip
    when = draw(st.sampled_from(conditions))
    found: dict[str, Any] = {"m0": draw(st.sampled_from(texts)) + draw(st.sampled_from(filters))}
    if "m1" in when or draw(st.integers(0, 4)) == 0:
        found["m1"] = draw(st.sampled_from(texts))
        if draw(st.booleans()):
            size, delay = draw(st.sampled_from(_SPANS)), draw(st.sampled_from([0, 2]))
            found["m1"] = {
                "measure": found["m1"],
                "window": {"lookback": _microseconds(size), "delay": _microseconds(delay)},
            }
    document = {
        "window": _microseconds(draw(st.sampled_from([3, 5, 8, 12, 25]))),
        "measures": found,
        "when": when.format(draw(st.integers(1, 5)), draw(st.integers(0, 4))),
        "late": draw(st.sampled_from(["evaluate", "record"])),
        "where": draw(st.sampled_from(wheres)),
        "suppress": draw(st.sampled_from([None, None, "6 microseconds"])),
    }
    return {key: value for key, value in document.items() if value is not None}


@st.composite
def resolution_cases(draw: st.DrawFn) -> dict[str, Any]:
    """Cases as of `cases` about windows with a resolution: few keys, a batch per commit and a verdict on most events."""
    events = [row | {"c": 1, "k": draw(st.sampled_from("xxxy"))} for row in draw(rows())]
    last = max(row["arrival"] for row in events)
    lateness = draw(st.sampled_from(["0 seconds", "2 microseconds", "6 microseconds"]))
    common = {"rule_id": "r1", "stream": "tx", "group_by": ["k"], "allowed_lateness": lateness}
    versions = [common | draw(_with_resolution()) for _ in range(draw(st.sampled_from([1, 1, 2])))]
    afters = [0, draw(st.integers(0, last))]
    numbered = zip(afters, enumerate(versions, 1), strict=False)
    return {
        "stream": "plain",
        "rows": events,
        "changes": [_row(after, "insert", "r1", number, "active", version) for after, (number, version) in numbered],
        "cuts": list(range(1, last + 1)),
        "shards": 1,
        "reload": draw(st.booleans()),
        # Bytes of pages that stay in memory: as many as usual, none, a few.
        "cached": draw(st.sampled_from([None, 0, 3_000])),
    }


@st.composite
def _with_resolution(draw: st.DrawFn) -> dict[str, Any]:
    windows = look_back_windows(_SPANS, [1, 2, 3, 4, 7])
    additive = [text for text in _AGGREGATES if not any(word in text for word in _EXACT_ONLY)]
    policy = draw(st.sampled_from([{}, {}, {"late": "record"}, {"late": "revise"}, {"reset_on_alert": True}]))
    return policy | {
        "window": draw(windows),
        "measures": {
            "m0": "count(*)",
            "m1": draw(st.sampled_from(additive)) + draw(st.sampled_from(_FILTERS)),
            "m2": {"measure": draw(st.sampled_from(additive)), "window": draw(windows)},
        },
        "when": "m0 >= 3" if "reset_on_alert" in policy else "true",
    }


# Conditions over the event alone that ask lists; some of them are an error for some events, or NULL.
_LISTED = [
    "in_list(k, 'l1')", "not in_list(k, 'l1')", "in_list(n, 'l2')", "in_list(n, 'l2') and n >= 0", "in_list(c, 'l2')",
    "in_list(n, 'l2') or c = 1", "in_list(10 div n, 'l2')", "coalesce(in_list(k, 'l1'), true)", "in_list(k, 'l1') is null",
    "in_list(c, 'it\\'s. é')", "in_list(case when in_list(k, 'l1') then n end, 'l2')", "in_list(a, 'it\\'s. é')",
    "in_list(k, 'l1') and not in_list(n, 'l2')", "in_list(k, 'nobody knows')", "10 / n > 2 and in_list(k, 'l1')",
    "in_list(k, 'l1') or 10 / n > 2", "in_list(at, 'l1') or in_list(upper(k), 'l1')", "n = 0 or in_list(n, 'l2') = (c = 1)",
]  # fmt: skip
_LISTED_MEASURES = [
    "count(*) filter (where {0})", "count(*) filter (where {0})", "sum(n) filter (where {0})", "sum(a) filter (where {0})",
    "sum(case when {0} then n else 1 end)", "count(case when {0} then 1 end)", "max(case when {0} then d end)",
    "count(distinct case when {0} then k else 'no' end)", "avg(case when {0} then a else 1.00 end) filter (where {1})",
]  # fmt: skip
# What a list may have: the texts of values of fields, and some that no field has.
_LISTABLE = [*["x", "0", "1"] * 4, "x\0", "x\0y", "y", "2", "X", "10", "5", "0.00", "1.01", "", "é"]


@st.composite
def _asking(draw: st.DrawFn, document: dict[str, Any], kind: str) -> dict[str, Any]:
    """The rule with questions to lists in some of its expressions."""
    listed = st.sampled_from(_LISTED)
    new = dict(document)
    if draw(st.booleans()):
        new["where"] = draw(listed)
    if kind == "sequence":
        sequence = dict(new["sequence"])
        sequence["steps"] = [dict(step) for step in sequence["steps"]]
        for at, step in enumerate(sequence["steps"]):
            own, key = draw(listed), "absent" if "absent" in step else "where"
            how = draw(st.sampled_from(["{0}", "({1}) and {0}", "({1}) or {0}", "{1}", "not ({0}) and ({1})"]))
            step[key] = how.format(f"({own})", step[key])
            if at and draw(st.booleans()):
                linked = draw(st.sampled_from(_LINKED_CONDITIONS)).format(f"s{draw(st.integers(0, at - 1))}")
                step[key] = f"({own}) {draw(st.sampled_from(['and', 'or']))} {linked}"
        if draw(st.booleans()):
            own = sequence.get("until")
            sequence["until"] = own | {"where": draw(listed)} if isinstance(own, dict) else draw(listed)
        return new | {"sequence": sequence}
    if kind == "event":
        asked = draw(listed)
        return new | {
            "when": f"({new['when']}) {draw(st.sampled_from(['and', 'or']))} {asked}" if "when" in new else asked
        }
    measures = dict(new["measures"])
    for name, spec in measures.items():
        if draw(st.booleans()):
            text = draw(st.sampled_from(_LISTED_MEASURES)).format(draw(listed), draw(listed))
            text = text.replace("max(", "count(") if name == "m0" else text
            measures[name] = spec | {"measure": text} if isinstance(spec, dict) else text
    new["measures"] = measures
    known = "when" in new and draw(st.booleans())
    keys = ["k", "c", "d"] if kind == "lookback" else _key_names(new)
    asked = [f"in_list({key}, '{'l1' if key == 'k' else 'l2'}')" for key in keys if key in "kc"]
    first = measures["m0"] if isinstance(measures["m0"], str) else measures["m0"]["measure"]
    if first.startswith(("count", "sum")):
        # No double is a text.
        asked += ["in_list(m0, 'l2')", "not in_list(m0, 'l2')", "in_list(m0 - 1, 'l2') or window_complete"]
    if asked and (known or draw(st.booleans())):
        new["when"] = " and ".join([*([f"({new['when']})"] if known else []), draw(st.sampled_from(asked))])
    return _bearing(new) if kind == "lookback" else new


@st.composite
def list_cases(draw: st.DrawFn, *, with_deletes: bool) -> dict[str, Any]:
    """Cases as of `cases` about rules that ask lists, which change between commits, and of whose events some are deleted."""
    events = [row | {"k": draw(st.sampled_from(["x", "x", "y", None]))} for row in draw(rows())]
    if with_deletes and draw(st.booleans()):
        # Few events at one time.
        events = [row | {"at": row["at"] + at} for at, row in enumerate(events)]
    last = max(row["arrival"] for row in events)
    known: dict[str, dict[str, Any]] = {}
    found = []
    for change in draw(changes(events, updates=False)):
        document = change["document"]
        if change["rule_id"] != "*" and document is not None:
            text = json.dumps(document, sort_keys=True)
            if text not in known:
                kind = _kind_of(document)
                known[text] = draw(_asking(document, kind))
            change = change | {"document": known[text]}  # noqa: PLW2901 - the same change
        found.append(change)
    times = [row["at"] for row in events]
    found = sorted([*draw(list_changes(times, last)), *found], key=lambda change: change["after"])
    deletes = []
    if with_deletes:
        # Of events at one time, any may be taken for the one that is deleted.
        alone = [at for at, time in enumerate(times) if times.count(time) == 1]
        gone = draw(st.lists(st.sampled_from(alone), max_size=4, unique=True)) if alone else []
        commits = sorted({row["arrival"] for row in events})
        later = {at: [commit for commit in commits if commit > events[at]["arrival"]] for at in gone}
        deletes = [(at, draw(st.sampled_from(listed[:3]))) for at, listed in later.items() if listed]
    return {
        "stream": draw(st.sampled_from(["plain", "narrow", "tight"])),
        "rows": events,
        "changes": found,
        "deleted": deletes,
        "cuts": draw(st.lists(st.integers(1, last), unique=True, max_size=4)),
        "shards": draw(st.integers(1, 3)),
        "reload": draw(st.booleans()),
        "cached": draw(st.sampled_from([None, 0, 3_000])),
        "small_pages": draw(st.sampled_from([False, False, True])),
    }


@st.composite
def measured_cases(draw: st.DrawFn) -> dict[str, Any]:
    """Cases as of `list_cases` about some lookback rules that are there from the start; they may share a key."""
    case = draw(list_cases(with_deletes=True))
    found: list[dict[str, Any]] = []
    for at in range(draw(st.sampled_from([1, 2, 3]))):
        document = draw(documents(f"r{at}", "lookback"))
        if found and draw(st.booleans()):
            document = _about_key(document | {"group_by": found[0]["group_by"]}, "lookback")
        found.append(draw(_asking(document, "lookback")) if draw(st.booleans()) else document)
    lists = [change for change in case["changes"] if change["status"] == "lists"]
    rules = [_row(0, "insert", each["rule_id"], 1, "active", each) for each in found]
    return case | {
        "changes": [*(each for each in lists if not each["after"]), *rules, *(e for e in lists if e["after"])]
    }


def _kind_of(document: dict[str, Any]) -> str:
    if "sequence" in document or "window" not in document:
        return "sequence" if "sequence" in document else "event"
    return "lookback" if isinstance(document["window"], str) else next(iter(document["window"]))


@st.composite
def list_changes(draw: st.DrawFn, times: list[int], last: int) -> list[dict[str, Any]]:
    """Commits of table `lists`, each with all that the lists then have, as [list, value, expires_at]."""
    edges = [*times, min(times) - 1, max(times) + 1]
    names = ["l1", "l1", "l2", "l2", "l2", "it's. é"]
    contents: list[list[Any]] = []
    found = []
    afters = sorted(draw(st.lists(st.integers(0, last), min_size=1, max_size=6)))
    for number, after in enumerate(afters, 1):
        gone = draw(st.lists(st.integers(0, len(contents)), max_size=6))
        contents = [row for at, row in enumerate(contents) if at not in gone]
        for _ in range(draw(st.integers(0 if contents else 4, 8))):
            expires = draw(st.sampled_from([None, None, "edge", "past"]))
            end = None if expires is None else draw(st.sampled_from(edges)) + (expires == "past")
            contents.append([draw(st.sampled_from(names)), draw(st.sampled_from(_LISTABLE)), end])
        document = {"stream": "tx", "commit": 3 * number, "rows": list(contents)}
        found.append(_row(after, "insert", "*", None, "lists", document))
    return found
