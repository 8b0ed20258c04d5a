"""Measures Lookback. Without a command: everything that --only, --sets and --peers choose, then the report."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from dev.bench import plan, report
from dev.bench.results import FOLDER, load
from dev.bench.rules import PEERS_RULES, RULE_SETS, rules_for
from dev.bench.sets import DATA, NAMES, REPOSITORY, EventSet
from dev.bench.versus import PEERS
from lookback.config import Settings

_PEERS = tuple(dict.fromkeys(peer.name for peer in PEERS))
_LIMIT_SECONDS = 120.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the exit code: 0, or 1 where a measurement failed."""
    options = parser().parse_args(arguments)
    if options.command is None:
        return _everything(options)
    if options.command == "report":
        report.write(options.baseline)
        return 0
    if options.command == "shapes":
        from dev.bench import shapes  # noqa: PLC0415

        return shapes.run()
    if options.command == "scale":
        from dev.bench import scale  # noqa: PLC0415

        return scale.run(options.parts, quick=options.small)
    if options.command == "desk":
        from dev.bench import desk  # noqa: PLC0415

        desk.run(options.alerts)
        return 0
    if options.command in ("latency", "bucket", "changes", "warm"):
        return _live(options)
    events = EventSet(options.set, options.rows)
    if options.command == "prepare":
        _prepare(events, options.commits)
    elif options.command == "peer":
        _peer(options, events)
    else:
        _drain(options, events)
    return 0


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    top = argparse.ArgumentParser(prog="python -m dev.bench", description=__doc__)
    top.add_argument("--only", type=_list_of(plan.PARTS), help=f"parts, of {', '.join(plan.PARTS)}")
    top.add_argument("--sets", type=_list_of(NAMES), default=list(NAMES), help=f"sets, of {', '.join(NAMES)}")
    top.add_argument("--peers", type=_list_of(("all", *_PEERS)), default=[], help=f"all, or of {', '.join(_PEERS)}")
    top.add_argument("--quick", action="store_true", help="small sets and short times: does everything work?")
    top.add_argument("--limit-seconds", type=float, default=_LIMIT_SECONDS, help="for each run of a peer")
    top.add_argument("--baseline", type=Path, help="results to compare with; default: those last committed")
    commands = top.add_subparsers(dest="command")
    drain = commands.add_parser("drain", help="throughput of one set with one set of rules")
    _set_arguments(drain)
    drain.add_argument("--rules", choices=RULE_SETS, default=PEERS_RULES)
    drain.add_argument("--repeats", type=float, default=1.0, help="of the set in time")
    drain.add_argument("--state", action="store_true", help="also read the pages in force")
    drain.add_argument("--workers", type=int, default=0, help="of a Spark cluster, a core each; default: one process")
    _setting_arguments(drain, "throughput")
    tried = commands.add_parser("backtest", help="a backtest of one set of rules over one set of events")
    _set_arguments(tried)
    tried.add_argument("--rules", choices=RULE_SETS, default=PEERS_RULES)
    tried.add_argument("--repeats", type=float, default=1.0, help="of the set in time")
    _setting_arguments(tried, "throughput")
    whatif = commands.add_parser("what-if", help="many variants of a rule in one backtest, beside one of them")
    _set_arguments(whatif)
    whatif.add_argument("--vary", choices=("limit", "window"), default="limit", help="the parameter that is varied")
    whatif.add_argument("--variants", type=int, default=100)
    whatif.add_argument("--repeats", type=float, default=1.0, help="of the set in time")
    _setting_arguments(whatif, "throughput")
    latency = commands.add_parser("latency", help="from the commit of events to the commit of their alerts")
    latency.add_argument("--rate", type=int, default=1_000, help="events a second")
    latency.add_argument("--seconds", type=float, default=60.0)
    latency.add_argument(
        "--plain", action="store_true", help="in a session that somebody else started, with all of Spark's defaults"
    )
    latency.add_argument("--many", action="store_true", help="with 100 rules more, which alert seldom")
    bucket = commands.add_parser("bucket", help="the same with tables and checkpoint in a bucket, and its requests")
    bucket.add_argument("--rate", type=int, default=1_000, help="events a second")
    bucket.add_argument("--seconds", type=float, default=50.0, help="for each delay")
    bucket.add_argument(
        "--delays", type=int, nargs="*", default=[0, 10, 30, 60], help="milliseconds that a request takes, in turn"
    )
    changes = commands.add_parser("changes", help="from the commit of a rule change to its first verdict")
    changes.add_argument("--rate", type=int, default=1_000, help="events a second")
    changes.add_argument("--known", type=int, default=12, help="changes on a known grouping key")
    changes.add_argument(
        "--new", type=int, default=4, help="rules on new grouping keys, at most 5, and as many more without history"
    )
    changes.add_argument("--lists", type=int, default=12, help="changes of a list of a million values")
    warm = commands.add_parser("warm", help="from the commit of a rule to its being in force with its history")
    _set_arguments(warm)
    warm.add_argument("--rule", choices=("window", "sequence"), default="window", help="what is to know the past")
    warm.add_argument("--repeats", type=float, default=1.0, help="of the set in time")
    warm.add_argument("--rate", type=int, default=1_000, help="events a second meanwhile")
    warm.add_argument("--seconds", type=float, default=60.0, help="that are measured before, and after it is in force")
    for live in (latency, bucket, changes, warm):
        live.add_argument("--warm-up", type=float, default=60.0, help="seconds that do not count")
        live.add_argument("--every", help="how often the evaluation looks for more; default: as the profile says")
        _setting_arguments(live, "latency")
    peer = commands.add_parser("peer", help="another engine on the same events with the same two rules")
    peer.add_argument("peer", choices=_PEERS)
    peer.add_argument("--variant", required=True)
    peer.add_argument("--durable", action="store_true")
    peer.add_argument("--limit-seconds", type=float, default=_LIMIT_SECONDS)
    _set_arguments(peer)
    prepare = commands.add_parser("prepare", help="an events table, for those that measure")
    _set_arguments(prepare)
    prepare.add_argument("--commits", type=int, required=True)
    commands.add_parser("shapes", help="rules and events that are easily slow, by the core alone, against a kernel")
    scale = commands.add_parser(
        "scale", help="many shards, many rules, a log of many commits: what they cost by themselves"
    )
    scale.add_argument("--parts", type=_list_of(plan.SCALE_PARTS), default=list(plan.SCALE_PARTS), help="default: all")
    scale.add_argument("--small", action="store_true", help="small sizes: does everything work?")
    desk = commands.add_parser("desk", help="the review desk: to read the queue, to open an alert, to decide")
    desk.add_argument("--alerts", type=int, default=1_000_000, help="in the table")
    written = commands.add_parser("report", help="dev/bench/results.md and its pictures from dev/bench/results/*.json")
    written.add_argument("--baseline", type=Path, help="a folder of results; default: those last committed")
    return top


def _set_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--set", choices=NAMES, required=True)
    parser.add_argument("--rows", type=int, help="the set with so many events, for a quick look")


def _setting_arguments(parser: argparse.ArgumentParser, profile: str) -> None:
    parser.add_argument("--profile", default=profile, help="settings of conf/profiles/NAME.yml; default: %(default)s")
    parser.add_argument("--spark", nargs="*", default=[], metavar="KEY=VALUE", help="settings before the profile's")
    parser.add_argument("--admission", nargs="*", default=[], metavar="KEY=VALUE", help="options that bound a batch")
    parser.add_argument("--name", default="", help="of the result, where it shall not go over the usual one")


def _list_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        unknown = sorted(set(text.split(",")) - set(known))
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not among {', '.join(known)}")
        return text.split(",")

    return parse


def _pairs(texts: Sequence[str]) -> dict[str, str]:
    return dict(text.split("=", 1) for text in texts)


def _settings(options: argparse.Namespace) -> Settings:
    """Returns the settings of the profile, changed by those of the command line."""
    chosen = Settings.local(conf=REPOSITORY / "conf", profile=options.profile)
    return replace(
        chosen,
        every=getattr(options, "every", None) or chosen.every,
        admission={**chosen.admission, **_pairs(options.admission)},
        spark={**chosen.spark, **_pairs(options.spark)},
    )


def _everything(options: argparse.Namespace) -> int:
    if options.quick and FOLDER not in os.environ:
        # Small figures must not go over those that count: the same again, with another folder for results.
        os.environ[FOLDER] = str(DATA / "quick")
        os.execv(sys.executable, [sys.executable, "-m", "dev.bench", *sys.argv[1:]])  # noqa: S606
    peers = _PEERS if "all" in options.peers else options.peers
    parts = options.only or [*plan.DEFAULT_PARTS, *(["peers"] if peers else [])]
    steps = plan.steps(quick=options.quick, peers=peers or _PEERS, limit_seconds=options.limit_seconds)
    failed = plan.run(step for step in steps if step.is_in(parts) and step.set in options.sets)
    report.write(options.baseline)
    return 1 if failed else 0


def _prepare(events: EventSet, commits: int) -> None:
    from dev.bench.lakehouse import prepare  # noqa: PLC0415 - Spark is imported when it is needed
    from lookback.spark.platform.session import get_spark  # noqa: PLC0415

    prepare(get_spark("lookback bench"), events, commits)


def _drain(options: argparse.Namespace, events: EventSet) -> None:
    from dev.bench import backtest, drain  # noqa: PLC0415

    chosen = drain.Drain(
        events,
        getattr(options, "rules", PEERS_RULES),
        options.repeats,
        _settings(options),
        state=getattr(options, "state", False),
        name=options.name,
        workers=getattr(options, "workers", 0),
    )
    if options.command == "what-if":
        backtest.run_variants(chosen, options.vary, options.variants)
    else:
        (backtest if options.command == "backtest" else drain).run(chosen)


def _live(options: argparse.Namespace) -> int:
    from dev.bench import latency, warm  # noqa: PLC0415

    live = latency.Live(
        options.rate,
        getattr(options, "seconds", 0.0),
        options.warm_up,
        _settings(options),
        options.name,
        getattr(options, "plain", False),
        getattr(options, "many", False),
    )
    if options.command == "latency":
        latency.run(live)
    elif options.command == "bucket":
        from dev.bench import bucket  # noqa: PLC0415 - needs what the tests of object stores install

        bucket.run(live, options.delays)
    elif options.command == "changes":
        latency.run_changes(live, options.known, options.new, options.lists)
    else:
        warm.run(live, EventSet(options.set, options.rows), options.repeats, options.rule)
    return 0


def _peer(options: argparse.Namespace, events: EventSet) -> None:
    from dev.bench import drain, versus  # noqa: PLC0415

    wanted = (options.peer, options.variant, options.durable)
    peer = next((peer for peer in PEERS if (peer.name, peer.variant, peer.durable) == wanted), None)
    if peer is None:
        sys.exit(f"There is no such way to run {options.peer}; there are {', '.join(peer.label for peer in PEERS)}.")
    ours = DATA / "alerts" / f"drain-{events.stem}-{PEERS_RULES}.csv"
    measured = load().get(ours.stem, {"settings": {}})["settings"].get("when")
    if not ours.exists() or measured != drain.conditions(rules_for(PEERS_RULES, events)):
        sys.exit(f"First measure Lookback by today's rules: python -m dev.bench drain --set {events.name}")
    versus.run(peer, events, options.limit_seconds, ours)


if __name__ == "__main__":
    sys.exit(main())
