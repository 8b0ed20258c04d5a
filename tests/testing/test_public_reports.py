"""Public reports about systems that do this job, each tried here: the essence as a small rule, the value worked out by hand.

A report is an issue, a question or a pull request that was read at its address. `nature` says what went wrong there, or what
people did not expect; the expectation beside it is what is right, whatever the system of the report gave.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from lookback.core.errors import EventError, RuleError, SetupError
from lookback.core.rules.compiling import compile_rule
from lookback.core.rules.remarks import find_remarks
from lookback.core.streams.declaration import Stream
from lookback.core.values.columns import to_text
from lookback.stream_draft import draft_stream
from lookback.testing.harness import Harness

Row = Mapping[str, Any]
HOST = "https://github.com/"
# W = highest event time - 10 seconds; what is at most an hour late is taken. Events are commits 1, 2, ... unless they say more.
STREAM = {
    "stream": "s", "event_id": "id", "event_time": "at", "max_future": "1 hour",
    "fields": {
        "id": "string", "at": "timestamp", "k": "string", "kind": "string", "ip": "string", "qty": "int",
        "small": "tinyint", "huge": "decimal(38,0)", "x": "double",
    },
}  # fmt: skip


@dataclass(frozen=True)
class Report:
    """What a report says, and what is right.

    source: its address. rules, events, lists: what a harness is given; times of day are on 1 March 2026, and ids are 1, 2, ...
    where none is written. stream: changes of the stream. until: the watermark is moved to it at the end. alerts, late: all
    rows that are right; of an alert what is written is compared. failed: how many events could not be judged, by rule.
    remark: part of one on a rule. refused: a rule or an event that is refused, and part of the message.
    """

    source: str
    title: str
    nature: str
    rules: Sequence[Row]
    events: Sequence[Row]
    alerts: Sequence[Row]
    stream: Row = field(default_factory=dict)
    lists: Row = field(default_factory=dict)
    until: str = ""
    late: Sequence[tuple[str, str]] = ()
    failed: Row = field(default_factory=dict)
    remark: str = ""
    refused: tuple[Row, str] | None = None


def on(at: object, **values: Any) -> Row:
    """An event at a time: of the day, or whole."""
    is_short = isinstance(at, str) and "-" not in at
    return {"at": f"2026-03-01T{at}Z" if is_short else at, **values}


def each(start: str, count: int, seconds: float = 1, **values: Any) -> list[Row]:
    """Events that differ in their times alone."""
    first = dt.datetime.fromisoformat(f"2026-03-01T{start}+00:00")
    return [on(first + dt.timedelta(seconds=seconds * number), **values) for number in range(count)]


def kinds(start: str, texts: str, **values: Any) -> list[Row]:
    """Events a second apart, one for each of these kinds."""
    rows = each(start, len(texts.split()), **values)
    return [{**row, "kind": text} for row, text in zip(rows, texts.split(), strict=True)]


def together(*rows: Row) -> list[Row]:
    """Events of one commit."""
    return [{**row, "arrival": 1} for row in rows]


def counts(when: str = "n >= 1", window: Any = "1 hour", **keys: Any) -> Row:
    return {"rule_id": "r", "stream": "s", "window": window, "measures": {"n": "count(*)"}, "when": when, **keys}


def follows(within: str, steps: Mapping[str, Any], **keys: Any) -> Row:
    """A sequence of steps by name; the condition alone, or with what else the step has."""
    listed = [{"name": name, **({"where": step} if isinstance(step, str) else step)} for name, step in steps.items()]
    own = {name: keys.pop(name) for name in ("until", "expiry") if name in keys}
    return {"rule_id": "r", "stream": "s", "sequence": {"within": within, "steps": listed, **own}, **keys}


def hit(event: object = None, **what: Any) -> Row:
    """An alert. n: the measures are this count alone."""
    if event is not None:
        what["event_id"] = str(event)
    if "n" in what:
        what["measures"] = {"n": what.pop("n")}
    if "evidence" in what:
        what["evidence"] = what["evidence"].split()
    return {"verdict": "raised", **what}


SEQUENCES = [
    Report(
        "https://github.com/apache/flink/pull/4331",
        "[FLINK-7169][CEP] Support AFTER MATCH SKIP function in CEP",
        "A match that begins at a hides the one that begins at b, since only a is tried.",
        [follows("1 minute", {"ab": "kind in ('a', 'b')", "c": "kind = 'c' and qty = element_at(ab.qty, 1)"})],
        [on("10:00:00", kind="a", qty=1), on("10:00:01", kind="b", qty=2), on("10:00:02", kind="c", qty=2)],
        [hit(3, evidence="2 3")],
    ),
    Report(
        "https://github.com/siddhi-io/siddhi/issues/1385",
        "Siddhi Pattern does not work with Occurrences.",
        "Two of A and then two of B are found once and never again.",
        [follows("10 seconds", {"a": {"where": "kind = 'A'", "at_least": 2}, "b": {"where": "kind = 'B'", "at_least": 2}},
                 reset_on_alert=True)],
        kinds("10:00:00", "A A B B A A B B"),
        [hit(4, evidence="1 2 3 4"), hit(8, evidence="5 6 7 8")],
    ),
    Report(
        "https://github.com/ClickHouse/ClickHouse/issues/34986",
        "`windowFunnel` outputs wrong level if the event lists are the same",
        "Two steps with one condition take one event twice, or two that lie further apart than the window.",
        [follows("50 milliseconds", {"one": "kind = 'x'", "two": "kind = 'x'"}, group_by=["k"])],
        [on("10:00:00.100", k="u", kind="x"), on("10:00:00.200", k="v", kind="x"), on("10:00:00.200", k="u", kind="x"),
         on("10:00:00.250", k="u", kind="x")],
        [hit(4, evidence="3 4")],
    ),
    Report(
        "https://github.com/ClickHouse/ClickHouse/issues/21835",
        "windowFunnel: same event gets counted twice",
        "A step must be later than the one before, and an event of the same millisecond is taken.",
        [follows("50 milliseconds", {"one": "kind = '1'", "two": "kind = '2' and at > element_at(one.at, -1)"},
                 group_by=["k"])],
        [on("10:00:00.100", k="u", kind="1"), on("10:00:00.100", k="u", kind="2"), on("10:00:00.200", k="v", kind="1"),
         on("10:00:00.210", k="v", kind="1"), on("10:00:00.230", k="v", kind="2")],
        [hit(5, evidence="3 4 5")],
    ),
    Report(
        "https://github.com/ClickHouse/ClickHouse/issues/93789",
        "windowFunnel strict_once keeps multiple sequences while non-strict_once overwrites prior events",
        "A later event of step one replaces the earlier one, and the match that was there is lost.",
        [follows("1 minute", {"one": "kind = '1'", "two": "kind = '2' and at > element_at(one.at, 1)"})],
        [on("01:02:08.500", kind="1"), on("01:02:09.500", kind="1"), on("01:02:09.500", kind="2")],
        [hit(3, evidence="1 2 3")],
    ),
    Report(
        "https://github.com/ClickHouse/ClickHouse/issues/37177",
        "unexpected result of windowFunnel function with strict_deduplication option",
        "Steps that come again before the last one stop the match, though all four came in order.",
        [follows("1 minute", {name: f"kind = '{name}'" for name in ("install", "start", "login", "end")})],
        kinds("12:00:00", "install start login install start install start login end"),
        [hit(9, evidence="1 2 3 8 9")],
    ),
    Report(
        "https://github.com/ClickHouse/ClickHouse/pull/18884",
        "fix the inconsistent result of windowFunnel in case of same timestamp for different events",
        "Events of one time come in any order, so two runs over the same rows differ. Here their place decides, not their id.",
        [follows("1 minute", {"failed": "kind = 'FAIL'", "back": "kind = 'SUCCESS'"})],
        together(on("10:00:00", id="10", kind="FAIL"), on("10:00:00", id="9", kind="SUCCESS")),
        [hit(9, evidence="10 9")],
    ),
    Report(
        "https://github.com/elastic/elasticsearch/issues/65773",
        "EQL: Docs - explain most-recent/state machine matching strategy",
        "Only the newest event of a step is remembered, so an answer to the request before it finds no match.",
        [follows("1 minute", {"asked": "kind = 'REQ'", "failed": "kind = 'ERR' and array_contains(asked.ip, ip)"})],
        [on("10:00:00", kind="REQ", ip="tx1"), on("10:00:01", kind="REQ", ip="tx2"), on("10:00:02", kind="ERR", ip="tx1")],
        [hit(3, evidence="1 2 3")],
    ),
    Report(
        "https://github.com/apache/flink/pull/6124",
        "[FLINK-8914][CEP]Fix wrong semantic when greedy pattern is the head of the pattern",
        "A greedy first step gives a match for each of its events, in place of one that has them all.",
        [follows("1 minute", {"many": "kind = 'a'", "end": "kind = 'b'"})],
        kinds("10:00:00", "a a a b"),
        [hit(4, evidence="1 2 3 4")],
    ),
    Report(
        "https://github.com/Yamato-Security/hayabusa/pull/1841",
        "fix: enforce group-by equality and event order in temporal correlations",
        "A, C, B counts as A, B, C, and events of two hosts as those of one.",
        [follows("1 minute", {"a": "kind = 'A'", "b": "kind = 'B'", "c": "kind = 'C'"}, group_by=["k"])],
        [*kinds("10:00:00", "A C B", k="host1"), *kinds("10:10:00", "A B", k="host2"), *kinds("10:10:02", "C", k="host3"),
         *kinds("10:20:00", "A B C", k="host4")],
        [hit(9, evidence="7 8 9", key={"k": "host4"})],
    ),
    Report(
        "https://github.com/elastic/elasticsearch/issues/145323",
        "EQL Missing Event in sequence queries produces false positives when evaluated before maxspan window expires",
        "What has not come yet counts as what does not come, so an absence is reported before its time is over.",
        [follows("10 minutes", {"new": "kind = 'new'", "back": {"absent": "kind = 'recovered'", "within": "10 minutes"}},
                 group_by=["k"])],
        [on("05:17:04.859", k="a", kind="new"), on("05:17:05", k="b", kind="new"), on("05:20:00", k="c", kind="tick"),
         on("05:23:05.211", k="a", kind="recovered"), on("05:27:15", k="c", kind="tick"), on("05:27:16", k="c", kind="tick")],
        [hit(2, key={"k": "b"}, event_time="2026-03-01T05:27:05Z", arrival=6)],
    ),
    Report(
        "https://github.com/siddhi-io/siddhi/issues/1253",
        "AbsentPattern does not work for following scenario",
        "Each event waits for the next of its symbol. The second of WSO2 has none, so its absence is right, as that of AAA.",
        [follows("1 second", {"seen": "true", "next": {"absent": "true", "within": "1 second"}}, group_by=["k"])],
        [on("10:00:00", k="WSO2"), on("10:00:00.1", k="WSO2"), on("10:00:00.2", k="AAA")],
        [hit(2, event_time="2026-03-01T10:00:01.100000Z"), hit(3, event_time="2026-03-01T10:00:01.200000Z")],
        until="10:01:00",
    ),
    Report(
        "https://github.com/siddhi-io/siddhi/issues/1765",
        "[Siddhi] Irregular output when using same rule with different filter value",
        "Two rules about missing events, which differ in a filter, take alerts from each other.",
        [follows("20 seconds", {"seen": f"k = '{k}'", "gap": {"absent": f"k = '{k}'", "within": "20 seconds"}}, rule_id=k)
         for k in ("id1", "id2")],
        [on("10:00:00", k="id1"), on("10:00:01", k="id2"), on("10:00:15", k="id1")],
        [hit(2, rule_id="id2"), hit(3, rule_id="id1")],
        until="10:01:00",
    ),
]  # fmt: skip

WINDOWS = [
    Report(
        "https://github.com/Azure/Azure-Sentinel/pull/1335",
        "Removed BIN as this can miss bruteforces spread across BIN windows",
        "Five failures within a minute fall into two bins of twenty minutes, and neither has five.",
        [counts("n >= 5", "20 minutes")],
        each("01:19:00", 5, 15),
        [hit(5, n=5)],
    ),
    Report(
        "https://github.com/wazuh/wazuh/issues/2771",
        "Wazuh manager - frequency counter",
        "Every 8 failures should alert once; from the eighth on every failure does.",
        [counts("n >= 8", "4 minutes", reset_on_alert=True)],
        each("10:00:00", 16),
        [hit(8, n=8), hit(16, n=8)],
    ),
    Report(
        "https://github.com/wazuh/wazuh/issues/1716",
        "The behavior of ignore + same_source_ip is not as expected",
        "An alert about one address silences those about another.",
        [counts("n >= 2", "1 minute", group_by=["ip"], suppress="1 minute")],
        [*each("10:00:00", 3, ip="192.0.2.1"), *each("10:00:10", 2, ip="192.0.2.2")],
        [hit(2, n=2), hit(3, n=3, verdict="suppressed"), hit(5, n=2)],
    ),
    Report(
        "https://github.com/wazuh/wazuh/issues/30461",
        "Wazuh ignores second rule/alert with frequency for the same group",
        "The event that made one rule alert is not counted by the next rule.",
        [counts("n >= 2", rule_id="two"), counts("n >= 3", rule_id="three")],
        each("10:00:00", 3),
        [hit(2, rule_id="two"), hit(3, rule_id="three", n=3), hit(3, rule_id="two", n=3)],
    ),
    Report(
        "https://github.com/wazuh/wazuh/issues/16252",
        "PAM frequency rule not generating alert",
        "Failures without an address are counted nowhere, since the field that groups them is empty.",
        [counts("n >= 8", "3 minutes", group_by=["ip"])],
        each("16:00:36", 8, ip=None),
        [hit(8, n=8, key={"ip": None})],
    ),
    Report(
        "https://github.com/pandas-dev/pandas/issues/41119",
        "BUG: Unexpected behavior of groupby when a column has None values",
        "Rows with a NULL among the fields of their key vanish.",
        [counts(group_by=["qty", "kind"])],
        together(on("10:00:00", qty=1), on("10:00:00", qty=2)),
        [hit(1, n=1, key={"qty": "1", "kind": None}), hit(2, n=1, key={"qty": "2", "kind": None})],
    ),
    Report(
        "https://github.com/YelpArchive/elastalert/issues/2651",
        'BUG : Frequency rule matches exact num_events, no "exact or more"',
        "Four hits in a minute, where two are enough, should be one message.",
        [counts("n >= 2", "1 minute", suppress="1 minute")],
        each("10:00:00", 4),
        [hit(2), hit(3, verdict="suppressed"), hit(4, verdict="suppressed")],
    ),
    Report(
        "https://github.com/YelpArchive/elastalert/issues/807",
        'No "MATCH" occurred when it should',
        "After a time with too few events, times with enough of them are no longer found, or only the first is.",
        [counts("n >= 4", "12 minutes")],
        [*each("10:00:00", 2, 60), *each("12:00:00", 4, 60), *each("15:00:00", 4, 60)],
        [hit(6, n=4), hit(10, n=4)],
    ),
    Report(
        "https://github.com/feast-dev/feast/issues/3435",
        "Feature View TTL not Make Sense",
        "A day before each row is asked for, and older rows count as well.",
        [counts("true", "1 day", measures={"total": "sum(qty)"})],
        [on("12:00:00", qty=1), on("2026-03-02T12:00:00Z", qty=2), on("2026-03-02T12:00:00.000001Z", qty=4)],
        [hit(1, measures={"total": 1}), hit(2, measures={"total": 3}), hit(3, measures={"total": 6})],
    ),
    Report(
        "https://github.com/feast-dev/feast/issues/6615",
        "feat: Opt-in `created_timestamp <= entity_timestamp` cutoff in point-in-time joins (as-of-known-time retrieval)",
        "A row of the past that was written later is seen by what was judged before it was there.",
        [counts("true", measures={"total": "sum(qty)"})],
        [on("10:00:00", qty=1), on("09:30:00", qty=5), on("10:01:00", qty=1)],
        [hit(1, measures={"total": 1}), hit(2, measures={"total": 5}), hit(3, measures={"total": 7})],
        late=[("2", "evaluated")],
    ),
    Report(
        "https://github.com/StarRocks/starrocks/issues/18509",
        "LAG/LEAD IGNORE NULLS have incorrect behavior",
        "The value before, with NULLs left out, is looked for at the place where a NULL would have been.",
        [counts("true", {"lookback": "1 hour", "delay": "1 microsecond"},
                measures={"before": "last(qty)", "known": "last(qty) filter (where qty is not null)"})],
        [on("10:00:00", qty=4), on("10:00:01"), on("10:00:02", qty=5)],
        [hit(1, measures={"before": None, "known": None}), hit(2, measures={"before": 4, "known": 4}),
         hit(3, measures={"before": None, "known": 4})],
    ),
    Report(
        "https://github.com/influxdata/docs-v2/issues/2776",
        "Clarify week window starts on Thursday",
        "A week that begins on 1 January 1970 begins on a Thursday; an offset makes it one from Sunday to Saturday.",
        [counts("true", {"tumbling": "1 week"}, rule_id="plain"),
         counts("true", {"tumbling": "1 week", "offset": "3 days"}, rule_id="sunday")],
        [on("2026-03-04T12:00:00Z")],
        [hit(rule_id="plain", window_start="2026-02-26T00:00:00Z"), hit(rule_id="sunday", window_start="2026-03-01T00:00:00Z")],
        until="2026-03-08T00:00:00Z", remark="begins on a Thursday",
    ),
    Report(
        "https://github.com/apache/flink/pull/18982",
        "[FLINK-26334][datastream] Fix getWindowStartWithOffset in TimeWindow.java",
        "An event before 1970 comes to lie in the window after it, which begins later than the event.",
        [counts("true", {"tumbling": "7 seconds"})],
        [on("1969-12-31T23:59:59Z")],
        [hit(window_start="1969-12-31T23:59:53Z", window_end="1970-01-01T00:00:00Z", n=1)],
        until="1970-01-01T00:00:00Z",
    ),
    Report(
        "https://github.com/apache/kafka/pull/6654",
        "KAFKA-8289: Fix Session Expiration and Suppression",
        "A session is closed a moment early: an event exactly one gap after the last still belongs to it.",
        [counts("true", {"session": "5 seconds"})],
        [on("10:00:00"), on("10:00:05"), on("10:00:10.000001")],
        [hit(n=2, window_end="2026-03-01T10:00:10.000001Z"), hit(n=1, window_start="2026-03-01T10:00:10.000001Z")],
        until="10:01:00",
    ),
    Report(
        "https://github.com/confluentinc/ksql/issues/9840",
        "IMPORTANT ksqlDB auto close windows",
        "A window ends when the next message comes, which may be hours later; here time can be moved without one.",
        [counts("true", {"tumbling": "10 seconds"})],
        [on("10:00:03")],
        [hit(n=1, window_end="2026-03-01T10:00:10Z")],
        until="10:00:10",
    ),
    Report(
        "https://github.com/confluentinc/ksql/issues/4579",
        "CTAS windows missing data when time already advanced to new window and inserting late-arriving records.",
        "A record of yesterday that comes after one of today is left out without a word.",
        [counts("true", {"tumbling": "1 day"})],
        [on("2026-02-18T00:00:01Z"), on("2026-02-17T22:59:59Z")],
        [hit(n=1, window_start="2026-02-17T00:00:00Z"), hit(n=1, window_start="2026-02-18T00:00:00Z")],
        until="2026-02-19T00:00:00Z", late=[("2", "evaluated")],
    ),
    Report(
        "https://github.com/laminardb/laminardb/issues/65",
        "Watermark does not filter late data — events behind watermark are processed into window aggregations",
        "What is too late counts in a window that is over.",
        [counts("true", {"tumbling": "1 minute"}, measures={"total": "sum(qty)"}, group_by=["k"])],
        [on("10:01:40", k="MSFT", qty=100), on("10:03:30", k="tick"), on("10:00:50", k="MSFT", qty=9999)],
        [hit(measures={"total": 100}, window_start="2026-03-01T10:01:00Z")],
        stream={"allowed_lateness": "1 minute"}, late=[("3", "discarded")],
    ),
    Report(
        "https://github.com/numaproj/numaflow/issues/494",
        "dropping the message even when event time is greater than watermark",
        "Events that are not late are dropped as late. At the watermark an event is in time, below it it is late.",
        [counts()],
        [on("10:00:30"), on("10:00:20"), on("10:00:19.999999")],
        [hit(1, n=1), hit(2, n=1), hit(3, n=1)],
        late=[("3", "evaluated")],
    ),
    Report(
        "https://github.com/turbolytics/sql-flow/issues/358",
        "windows: one row stamped in the future makes every correctly stamped row late",
        "One device whose clock is a day ahead makes the rows of all others late.",
        [counts("n >= 12")],
        [{**row, "committed_at": row["at"]} for row in each("10:00:00", 2, 60)]
        + [on("2026-03-02T10:02:00Z", committed_at="2026-03-01T10:02:00Z")]
        + [{**row, "committed_at": row["at"]} for row in each("10:03:00", 10, 60)],
        [hit(13, n=12)],
        late=[("3", "discarded")],
    ),
]  # fmt: skip

VALUES = [
    Report(
        "https://github.com/pandas-dev/pandas/issues/53720",
        "BUG: Series.unique() terminates strings prematurely on null Bytes",
        "Texts that differ after a NUL are one value, so the keys of their events are mixed.",
        [counts("n >= 2", group_by=["k"])],
        together(on("10:00:00", k="A\0B"), on("10:00:01", k="A\0C"), on("10:00:02", k="A"), on("10:00:03", k="A\0B")),
        [hit(4, n=2, key={"k": "A\0B"})],
    ),
    Report(
        "https://github.com/pandas-dev/pandas/issues/34551",
        "BUG: DataFrame.drop_duplicates confuses NULL bytes",
        "Distinct texts with a NUL are counted as one, and a listed text is taken for another.",
        [counts("listed >= 1", where="kind <> 'end'", measures={
            "kinds": "count(distinct kind)", "listed": "count(*) filter (where in_list(kind, 'bad'))"})],
        together(*(on("10:00:00", kind=kind) for kind in ("a", "a\0", "a\0b"))),
        [hit(3, measures={"kinds": 3, "listed": 1})],
        lists={"bad": ["a\0b"]},
    ),
    Report(
        "https://github.com/TresAmigosSD/SMV/issues/270",
        "countDistinct with Null",
        "A row with a NULL in one of several fields is no combination, as in SQL; coalesce makes it one.",
        [counts("pairs = 2", measures={
            "pairs": "count(distinct k, kind)", "known": "count(distinct k, coalesce(kind, ''))"})],
        [on("10:00:00", k="a", kind="x"), on("10:00:01", k="a"), on("10:00:02", k="b", kind="x")],
        [hit(3, measures={"pairs": 2, "known": 3})],
    ),
    Report(
        "https://github.com/NVIDIA/cudf-spark/issues/294",
        "[BUG] -0.0 vs 0.0 is a hot mess",
        "0.0 and -0.0 are equal, and two keys nevertheless.",
        [counts("n >= 2 and x = 0", group_by=["x"])],
        [on("10:00:00", x=0.0), on("10:00:01", x=-0.0)],
        [hit(2, n=2)],
    ),
    Report(
        "https://github.com/grafana/grafana/issues/40392",
        "[unified alerting] [evaluation] NaN values trigger alerting",
        "NaN passes every limit, so a rule alerts on what is no number.",
        [counts("true", where="x > 5", rule_id="bare"), counts("true", where="not isnan(x) and x > 5", rule_id="guarded")],
        [on("10:00:00", x=float("nan")), on("10:00:01", x=6.0)],
        [hit(1, rule_id="bare"), hit(2, rule_id="bare", n=2), hit(2, rule_id="guarded", n=1)],
        remark="holds where x is NaN",
    ),
    Report(
        "https://github.com/prometheus/prometheus/issues/597",
        "0/0 evaluates to +Inf but should be NaN",
        "A ratio without requests is above every limit. Here it is an error of that event, or NULL by nullif, never an alert.",
        [counts(when, rule_id=name, measures={
            "errors": "count(*) filter (where kind = 'err')", "asked": "count(*) filter (where kind = 'req')"})
         for name, when in (("bare", "errors / asked > 0.5"), ("guarded", "errors / nullif(asked, 0) > 0.5"))],
        kinds("10:00:00", "idle req err"),
        [hit(3, rule_id="bare"), hit(3, rule_id="guarded")],
        failed={"bare": 1},
    ),
    Report(
        "https://github.com/opensearch-project/sql/issues/5177",
        "[BUG] Integer overflow wraps silently - 2147483647+1 returns -2147483648 with no error",
        "The largest int plus one is below zero.",
        [counts("qty + 1 < 0")],
        [on("10:00:00", qty=2147483647), on("10:00:01", qty=-5)],
        [hit(2, n=2)],
        failed={"r": 1},
    ),
    Report(
        "https://github.com/feldera/feldera/issues/2316",
        "SQL: Attempt to overflow a Data Type results in wrap around",
        "The sum of 127 and 1, both tinyint, is -128.",
        [counts("total > 127", measures={"total": "sum(small)"})],
        [on("10:00:00", small=127), on("10:00:01", small=1)],
        [hit(2, measures={"total": 128})],
    ),
    Report(
        "https://github.com/StarRocks/starrocks/issues/79263",
        "`SUM()` over `DECIMAL` silently returns a wrapped negative number, including under "
        "`sql_mode = 'ERROR_IF_OVERFLOW'`",
        "A sum that does not fit 38 digits is a negative number.",
        [counts("total < 0", measures={"total": "sum(huge)"})],
        [on("10:00:00", huge=Decimal(10**38 - 1)), on("10:00:01", huge=Decimal(10**38 - 1))],
        [],
        failed={"r": 1},
    ),
    Report(
        "https://github.com/prestodb/presto/issues/5798",
        "Aggregation on double column may return nondeterministic results",
        "A sum of doubles depends on the order of the rows. It is refused here; that of decimals is exact in any order.",
        [counts("total = 0.3", measures={"total": "sum(cast(x as decimal(18,2)))"})],
        [on("10:00:00", x=0.1), on("10:00:01", x=0.2)],
        [hit(2, measures={"total": Decimal("0.30")})],
        refused=(counts(measures={"total": "sum(x)"}, when="total = 0.3"), "cast(x as decimal"),
    ),
    Report(
        "https://github.com/duckdb/duckdb/issues/6910",
        "SQL NOT IN gives faulty results when column has nulls",
        "Not in a list with a NULL holds for nothing.",
        [counts(where="kind not in ('c', null)")],
        kinds("10:00:00", "a b c"),
        [],
        remark="write kind not in ('c')",
    ),
    Report(
        "https://github.com/apache/doris/issues/23553",
        "[Bug] NOT IN operator result cannot get null data",
        "A row without a value is not among those that are not 7; `<=>` says it.",
        [counts(where="qty not in (7)", rule_id="in"), counts(where="not (qty <=> 7)", rule_id="null_safe")],
        [on("10:00:00", qty=1), on("10:00:01"), on("10:00:02", qty=7)],
        [hit(1, rule_id="in"), hit(1, rule_id="null_safe"), hit(2, rule_id="null_safe")],
    ),
    Report(
        "https://github.com/ZoneMinder/zmeventnotificationNg/issues/52",
        "Rules: time window that crosses midnight only matches after midnight",
        "A rule for the night holds from midnight on, and not in the evening.",
        [counts(where="hour(at) >= 19 or hour(at) < 7")],
        [on("18:59:59"), on("19:00:00"), on("2026-03-02T06:59:59Z"), on("2026-03-02T07:00:00Z")],
        [hit(2), hit(3)],
    ),
    Report(
        "https://github.com/pimatic/pimatic/issues/764",
        "[pimatic-cron] Time Rules dont work correctly",
        "After 22 and before 6 is never, and nothing says so.",
        [counts(where="hour(at) between 22 and 6")],
        [on("21:00:00"), on("23:00:00"), on("2026-03-02T05:00:00Z")],
        [],
        remark="for a range over midnight or the end of a year hour(at) >= 22 or hour(at) <= 6",
    ),
    Report(
        "https://github.com/natesilva/is-in-subnet/issues/2",
        "isInSubnet not matching ipv6 addresses in format ::ffff:ipv4 against ipv4 cidr",
        "An address of a range, written as IPv6, is not in it.",
        [counts(where="in_list(ip, 'trusted')")],
        [on("10:00:00", ip="172.16.10.10"), on("10:00:01", ip="::ffff:172.16.10.10"), on("10:00:02", ip="172.17.0.1")],
        [hit(1), hit(2)],
        lists={"trusted": [{"value": "172.16.0.0/16", "kind": "cidr"}]},
    ),
    Report(
        "https://github.com/slskd/slskd/pull/1606",
        "Un-map IPv4 IPv6 addresses (remove '::ffff' prefix), disallow such addresses to be specified in CIDR configuration",
        "A range that is written as IPv6 becomes one of all addresses, or of none.",
        [counts(where="in_list(ip, 'trusted')")],
        [on("10:00:00", ip=ip) for ip in ("192.0.2.1", "::ffff:192.0.2.1", "198.51.100.1", "::1")],
        [hit(1), hit(2)],
        lists={"trusted": [{"value": "::ffff:192.0.2.0/120", "kind": "cidr"}]},
    ),
    Report(
        "https://github.com/apache/spark/pull/2946",
        "[SPARK-4061][SQL] We cannot use EOL character in the operand of LIKE predicate.",
        "The _ of a pattern matches no line break.",
        [counts(where="kind like 'hoge_fuga'")],
        [on("10:00:00", kind="hoge\nfuga"), on("10:00:01", kind="hogefuga")],
        [hit(1)],
    ),
    Report(
        "https://github.com/apache/spark/pull/15398",
        "[SPARK-17647][SQL] Fix backslash escaping in 'LIKE' patterns.",
        "What follows an escaped backslash in a pattern is escaped as well, so the second % is a percent sign.",
        [counts(where=r"kind like '%\\\\%'")],
        [on("10:00:00", kind=r"C:\temp"), on("10:00:01", kind="C:/temp"), on("10:00:02", kind=r"C:\%")],
        [hit(1), hit(3)],
    ),
    Report(
        "https://github.com/apache/spark/pull/56350",
        "[SPARK-57287][SQL] Escape backslash in LIKE pattern for STARTS_WITH/ENDS_WITH/CONTAINS pushdown",
        "A backslash in the text that is looked for is taken for an escape.",
        [counts(where=r"contains(kind, 'C:\temp')", rule_id="one"), counts(where=r"contains(kind, 'C:\\temp')", rule_id="two")],
        [on("10:00:00", kind=r"C:\temp\new")],
        [hit(1, rule_id="two")],
        remark=r"SQL reads \t as a tab",
    ),
    Report(
        "https://github.com/fail2ban/fail2ban/issues/2291",
        "Local / UTC time conflict",
        "The offset of a time is dropped, so it is two hours away from others and counts with none of them.",
        [counts("n >= 2", "5 minutes")],
        [on("2018-12-04T17:28:07+02:00"), on("2018-12-04T15:30:00Z")],
        [hit(2, n=2)],
    ),
    Report(
        "https://github.com/hardbyte/python-common-expression-language/issues/50",
        "Naive datetime values are interpreted in the host's local time zone",
        "A time without a zone is another one on each machine; here it is UTC.",
        [counts("n >= 3", "1 microsecond")],
        [on(dt.datetime.fromisoformat("2026-01-01T12:00:00")), on("2026-01-01 12:00:00"), on("2026-01-01T12:00:00Z")],
        [hit(3, n=3)],
    ),
    Report(
        "https://github.com/LucidDB/luciddb/issues/454",
        "[FNL-54] cast time to timestamp should initialize date to current_date",
        "A time without a day is one of today, so the same file says something else tomorrow. Here it is refused.",
        [counts()], [], [], refused=({"at": "12:00"}, "12:00"),
    ),
]  # fmt: skip

REPORTS = [*SEQUENCES, *WINDOWS, *VALUES]


def find_facts(alert: Any, expected: Row) -> Row:
    """Returns of an alert what is expected of it, with times as text."""
    found = {name: getattr(alert, name) for name in expected}
    return {name: to_text(value) if isinstance(value, dt.datetime) else value for name, value in found.items()}


def number(rows: Sequence[Row]) -> list[Row]:
    return [{"id": str(place), **row} for place, row in enumerate(rows, 1)]


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.source.removeprefix(HOST))
def test_the_value_is_the_right_one(report: Report):
    stream = Stream.from_dict({**STREAM, **report.stream})
    harness, remarks = Harness(stream), list[str]()
    harness.lists(report.lists)
    for rule in report.rules:
        harness.rule(rule)
        remarks += [str(remark) for remark in find_remarks(compile_rule(rule, stream))]
    harness.events(number(report.events))
    if report.until:
        harness.watermark(on(report.until)["at"])
    found = [find_facts(*pair) for pair in zip(harness.alerts, report.alerts, strict=False)]
    assert (found, len(harness.alerts)) == (list(report.alerts), len(report.alerts))
    assert [(late.event_id, late.action) for late in harness.late_events] == list(report.late)
    assert {row.rule_id: int(row.message.split()[0]) for row in harness.errors} == report.failed
    assert any(report.remark in remark for remark in remarks) or not report.remark
    if report.refused:
        document, message = report.refused
        give = harness.rule if "rule_id" in document else harness.events
        with pytest.raises((RuleError, EventError)) as refusal:
            give(document if "rule_id" in document else number([document]))
        assert message in str(refusal.value)


@dataclass(frozen=True)
class FileReport:
    """A report about a file. options: those that the draft finds. alerts: of events of kind `wanted`. refused: why, if it is."""

    source: str
    title: str
    nature: str
    content: bytes
    wanted: str = ""
    options: Row = field(default_factory=dict)
    alerts: Sequence[str] = ()
    refused: str = ""


FILES = [
    FileReport(
        "https://github.com/datasets/country-codes/issues/38",
        "ISO3166-1-Alpha-2 for Namibia is missing",
        "The country code of Namibia is read as a missing value.",
        b"id,at,kind\n1,2026-03-01T10:00:00Z,NA\n2,2026-03-01T10:00:01Z,\n3,2026-03-01T10:00:02Z,DE\n", "NA", {}, ["1"],
    ),
    FileReport(
        "https://github.com/dathere/datapusher-plus/issues/256",
        "Failing to detect separator for semicolon separated file",
        "A file with semicolons becomes a table of one column.",
        b"id;at;kind\n1;2011-01-01 10:00:00;Galway\n2;2011-01-02 10:00:00;Berkeley\n", "Berkeley", {"sep": ";"}, ["2"],
    ),
    FileReport(
        "https://github.com/digital-preservation/csv-validator/issues/177",
        "UTF-16 makes the validator unhappy",
        "The mark at the beginning of a file in UTF-16 becomes a part of the first name.",
        "id\tat\tkind\n1\t2026-03-01T10:00:00Z\tžena\n".encode("utf-16"), "žena",
        {"encoding": "UTF-16", "multiLine": "true", "sep": "\t"}, ["1"],
    ),
    FileReport(
        "https://github.com/databricks/spark-csv/issues/425",
        "spark 2.1.0 has issue in parsing CSV with new line character inside a quotes",
        "A line break in quotes makes two rows of one.",
        b'id,at,kind\n1,2026-03-01T10:00:00Z,"two\nlines"\n2,2026-03-01T10:00:01Z,one\n', "two\nlines",
        {"multiLine": "true"}, ["1"],
    ),
    FileReport(
        "https://github.com/mholt/PapaParse/issues/129",
        "Duplicate header names cause parsing to overwrite data",
        "Of two columns with one name only the last is kept, and nothing says so.",
        b"id,at,kind,kind\n1,2026-03-01T10:00:00Z,a,b\n", refused="'kind'",
    ),
]  # fmt: skip


@pytest.mark.parametrize("report", FILES, ids=lambda report: report.source.removeprefix(HOST))
def test_a_file_is_read_as_it_is_or_refused(tmp_path: Path, report: FileReport):
    file = tmp_path / "in.csv"
    file.write_bytes(report.content)
    if report.refused:
        with pytest.raises(SetupError, match=report.refused):
            draft_stream(file)
        return
    document = yaml.safe_load(draft_stream(file))
    options = document["source"].get("options", {})
    assert options == report.options
    frame = pd.read_csv(
        file, dtype=str, keep_default_na=False, na_values=[""],
        sep=options.get("sep", ","), encoding=options.get("encoding", "UTF-8"),
    )  # fmt: skip
    harness = Harness(document)
    harness.rule(counts(where="kind = :wanted", parameters={"wanted": report.wanted}, stream=document["stream"]))
    harness.events(frame)
    assert [alert.event_id for alert in harness.alerts] == list(report.alerts)
