"""The functions for people who look after a place: set-up, maintenance, notifications, privacy requests.

Notebooks call them, and the command line calls some.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from threading import Event, Timer
from typing import TYPE_CHECKING

import pandas as pd

from lookback.config import Settings, load_receivers
from lookback.core.errors import SetupError
from lookback.core.operations.receivers import Webhook
from lookback.core.streams.arrival import describe_fast_clock
from lookback.core.values.durations import parse_duration
from lookback.core.values.times import parse_calendar_time, to_utc
from lookback.parameters import check_mode
from lookback.places import parse_place
from lookback.senders import make_sender
from lookback.views.display import clear, show, text

if TYPE_CHECKING:
    from lookback.core.streams.declaration import Stream
    from lookback.spark.operations.catalog import SetUpStep
    from lookback.spark.operations.forget import ForgetReport
    from lookback.spark.operations.maintenance import Maintenance
    from lookback.spark.operations.notify import Counts, Notifier
    from lookback.spark.tables.lakehouse import Tables

# Rows that differ and are shown.
_MOST_DIFFERENCES = 20


def open_place(settings: Settings) -> tuple[Tables, dict[str, Stream]]:
    """Starts or finds Spark. Returns the tables, which may not exist yet, and the declared streams by name.

    It creates nothing. Raises SetupError.
    """
    from lookback.spark.platform.session import get_spark
    from lookback.spark.tables.lakehouse import Tables

    streams = settings.streams()
    return Tables.of(get_spark("lookback upkeep", settings=settings.spark), settings), streams


def set_up(
    root: str, catalog: str = "", schema: str = "", conf: str = "../conf", landing: str = "",
    analysts: str = "", engineers: str = "", service: str = "",
) -> list[SetUpStep]:  # fmt: skip
    """Creates the missing parts of a place, and shows the result for each part.

    root: the folder of local tables; with catalog and schema the folder of the checkpoints in a volume,
    /Volumes/catalog/schema/volume. landing: the folder in which files of events arrive; empty: none is created. analysts,
    engineers, service: principals that get the grants of their role, in Unity Catalog; empty: none.
    """
    from lookback.spark.operations.catalog import set_up as make
    from lookback.spark.operations.grants import Roles

    tables, streams = open_place(Settings.local(root, conf, catalog=catalog, schema=schema))
    roles = Roles(analysts, engineers, service)
    steps = make(tables, streams, checkpoints=root if catalog else "", landing=landing, roles=roles)
    if landing:
        parse_place(landing).mkdir(parents=True, exist_ok=True)
    show(pd.DataFrame([{"thing": step.thing, "done": step.done} for step in steps]))
    remarks = {name: describe_fast_clock(stream) for name, stream in streams.items()}
    show(*(text(f"{name}: {remark}") for name, remark in remarks.items() if remark))
    left = [step.to_do for step in steps if step.to_do]
    if left:
        show(text("An owner of what they name must run these:"), *map(text, left))
    return steps


def maintain(root: str, catalog: str = "", schema: str = "", conf: str = "../conf") -> Maintenance:
    """Deletes rows older than the settings keep, runs OPTIMIZE and VACUUM on every table, checks every checkpoint.

    The results are shown. Raises SetupError, at the end, if an evaluation cannot go on from its checkpoint.
    """
    from lookback.spark.checkpoints.checkpoint import checkpoint_folder
    from lookback.spark.operations.maintenance import maintain as run

    settings = Settings.local(root, conf, catalog=catalog, schema=schema)
    tables, streams = open_place(settings)
    checkpoints = {name: checkpoint_folder(tables, stream) for name, stream in streams.items()}
    done = run(tables, streams, checkpoints, settings.retention)
    show(pd.DataFrame([asdict(each) for each in done.tables]))
    show(pd.DataFrame([asdict(each) for each in done.checkpoints]))
    if done.older is not None:
        show(text(str(done.older)))
    if done.problems:
        raise SetupError("; ".join(done.problems))
    return done


def prove(
    root: str, catalog: str = "", schema: str = "", conf: str = "../conf", stream: str = "", accept: bool = False
) -> pd.DataFrame:
    """Judges anew what a stream has judged since the last time, and shows how many rows of its outputs are as they should be.

    stream: empty: every declared stream that has been judged. accept: go on after rows that differ next time. Returns the
    rows shown: stream, rule_id (None for late events), alike, only_recorded, only_replayed, unprovable, unjudged. Raises SetupError,
    at the end, if a row differs.
    """
    from lookback.spark.replay.proof import proof_folder
    from lookback.spark.replay.proof import prove as run
    from lookback.spark.stream.rebuild import has_outputs

    settings = Settings.local(root, conf, catalog=catalog, schema=schema)
    names = [settings.stream(stream).name] if stream else list(settings.streams())
    tables, streams = open_place(settings)
    tables = tables.holding(*streams.values())
    rows, differing = [], []
    for name in names:
        if not stream and not has_outputs(tables, streams[name]):
            continue
        folder = proof_folder(tables, streams[name])
        with run(tables, streams[name], streams, saved=folder, accept=accept) as proofs:
            rows += [{"stream": name, **asdict(each)} for each in proofs.rows]
            first, last = proofs.commits
            show(text(f"{name}: commits {first} to {last}." if first <= last else f"{name}: nothing new."))
            if proofs.gone:
                show(text(f"{name}: {proofs.gone}."))
            if not all(each.holds for each in proofs.rows):
                differing.append(name)
                show(proofs.differences.orderBy("arrival", "rule_id").limit(_MOST_DIFFERENCES).toPandas())
    found = pd.DataFrame(
        rows, columns=["stream", "rule_id", "alike", "only_recorded", "only_replayed", "unprovable", "unjudged"]
    )
    show(found)
    if differing:
        raise SetupError(
            f"rows of {' and '.join(differing)} differ from a replay: they were changed, deleted or inserted by hand, or judged by "
            "other settings; to go on after them next time: lookback prove STREAM --nightly --accept"
        )
    return found


def forget(
    root: str, catalog: str = "", schema: str = "", conf: str = "../conf", stream: str = "", where: str = "",
    dry_run: bool = True,
) -> ForgetReport:  # fmt: skip
    """Deletes all rows about the events of a stream that satisfy `where`, for good, and shows the report.

    where: a condition over the stream's fields, such as `customer_id = 17`. dry_run: rows are counted, and nothing is
    deleted. Raises ExpressionError if `where` is no such condition, and SetupError.
    """
    from lookback.spark.checkpoints.checkpoint import checkpoint_folder
    from lookback.spark.operations.forget import forget as run
    from lookback.spark.operations.forget import forget_condition

    settings = Settings.local(root, conf, catalog=catalog, schema=schema)
    chosen = settings.stream(stream)
    forget_condition(chosen, where)  # before Spark starts
    tables, _ = open_place(settings)
    checkpoint = checkpoint_folder(tables, chosen) if tables.reaches_files else None
    report = run(tables, chosen, where, dry_run=dry_run, checkpoint=checkpoint)
    show(*map(text, str(report).splitlines()))
    return report


def make_notifier(settings: Settings, stream: str = "", since: str = "") -> Notifier:
    """Makes the notifier that sends alerts to the receivers of CONF/notifiers.yml; creates missing tables.

    stream: the stream whose alerts are sent; empty: all declared streams. since: the time from which on a new receiver
    gets alerts, UTC without a zone; empty: now. Raises SetupError.
    """
    from lookback.spark.operations.notify import Notifier

    senders = {receiver: make_sender(receiver) for receiver in load_receivers(settings.conf)}
    try:
        start = to_utc(parse_calendar_time(since)) if since else None
    except ValueError:
        raise SetupError(f"{since!r:.100} is no time such as 2026-01-31T12:00:00Z") from None
    names = [settings.stream(stream).name] if stream else list(settings.streams())
    tables, declared = open_place(settings)
    for name in names:
        tables.require(declared[name])
    return Notifier(tables, names, senders, start)


def show_receivers(conf: str = "../conf") -> None:
    """Shows, as a table, which alerts each receiver of CONF/notifiers.yml gets. Raises SetupError."""
    rows = [
        {
            "receiver": each.name,
            "way": "webhook" if isinstance(each.way, Webhook) else ", ".join(each.way.to),
            "severity": f"{each.severity} and graver",
            "rules": ", ".join(each.rules),
            "streams": ", ".join(each.streams),
            "verdicts": ", ".join(each.verdicts),
            "modes": ", ".join(each.modes),
        }
        for each in load_receivers(conf)
    ]
    show(pd.DataFrame(rows))


def notify(
    root: str, catalog: str = "", schema: str = "", conf: str = "../conf", stream: str = "", mode: str = "once",
    every: str = "10 seconds", minutes: float = 0, since: str = "",
) -> Counts:  # fmt: skip
    """Sends alerts, and shows how many.

    mode `once`: the alerts that are there; `continuous`: alerts as they come, looking every `every`, until `minutes` are
    over (0: no limit) or an interrupt, after which the last alerts may be sent again. stream, since: as in
    `make_notifier`. Raises SetupError; in mode `once` also, at the end, if an alert could not be sent.
    """
    from lookback.spark.operations.notify import Counts

    once = check_mode(mode, "once", "continuous") == "once"
    pause = parse_duration(every) / 1_000_000
    settings = Settings.local(root, conf, catalog=catalog, schema=schema)
    sending, total, stop = make_notifier(settings, stream, since), Counts(), Event()

    def report(counts: Counts) -> None:
        total.add(counts)
        clear()
        show(text(f"{total}; the last at {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())} UTC"))

    timer = Timer(minutes * 60, stop.set)
    if minutes:
        timer.start()
    try:
        sending.run(once=once, every=pause, stop=stop, report=report)
    except KeyboardInterrupt:
        pass  # the person at the notebook has seen enough
    finally:
        timer.cancel()
    clear()
    show(text(f"{total}."))
    if once and (total.failed or total.given_up):
        raise SetupError(f"{total}: the table notifications says why; the next run tries again")
    return total
