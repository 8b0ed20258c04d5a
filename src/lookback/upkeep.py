"""The functions that operate a place: set-up, maintenance, proofs, notifications, privacy requests.

Notebooks call them all, the command line calls some.
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

# The number of differing rows to show.
_MAX_DIFFERENCES = 20


def open_place(settings: Settings) -> tuple[Tables, dict[str, Stream]]:
    """Starts or finds Spark. Returns the tables and the declared streams by name.

    It creates nothing, so the tables may not exist yet. Raises SetupError.
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

    Args:
        root: Folder of local tables; with catalog and schema the folder of the checkpoints in a volume,
            /Volumes/catalog/schema/volume.
        catalog: Catalog of the tables; empty for local tables.
        schema: Schema of the tables in the catalog.
        conf: Folder of streams/ and rules/.
        landing: Folder in which event files arrive; empty to create none.
        analysts: Unity Catalog principal that gets the grants of an analyst; empty for none.
        engineers: Principal that gets the grants of an engineer; empty for none.
        service: Principal that gets the grants of the service; empty for none.
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
        show(text("The owner of the named objects must run:"), *map(text, left))
    return steps


def maintain(root: str, catalog: str = "", schema: str = "", conf: str = "../conf") -> Maintenance:
    """Deletes rows past their retention, runs OPTIMIZE and VACUUM on every table, and checks every checkpoint.

    Shows the results. Raises SetupError at the end if an evaluation cannot continue from its checkpoint.
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
    """Replays the events that a stream judged since the last proof, and shows how many output rows are correct.

    Args:
        root: Folder of local tables, or of checkpoints with a catalog.
        catalog: Catalog of the tables; empty for local tables.
        schema: Schema of the tables in the catalog.
        conf: Folder of streams/ and rules/.
        stream: The stream to prove; empty for every declared stream with outputs.
        accept: Whether the next proof starts after the rows that differ.

    Returns:
        The rows shown, with the columns stream, rule_id (None for late events), alike, only_recorded, only_replayed,
        unprovable and unjudged.

    Raises:
        SetupError: At the end, if a row differs.
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
                show(proofs.differences.orderBy("arrival", "rule_id").limit(_MAX_DIFFERENCES).toPandas())
    found = pd.DataFrame(
        rows, columns=["stream", "rule_id", "alike", "only_recorded", "only_replayed", "unprovable", "unjudged"]
    )
    show(found)
    if differing:
        raise SetupError(
            f"rows of {' and '.join(differing)} differ from a replay: they were changed, deleted or inserted by hand, "
            "or judged with other settings; to skip them next time: lookback prove STREAM --nightly --accept"
        )
    return found


def forget(
    root: str, catalog: str = "", schema: str = "", conf: str = "../conf", stream: str = "", where: str = "",
    dry_run: bool = True,
) -> ForgetReport:  # fmt: skip
    """Permanently deletes all rows about the events of a stream that satisfy `where`, and shows the report.

    `where` is a condition on the stream's fields, such as `customer_id = 17`. With `dry_run` the rows are only counted.
    Raises ExpressionError if `where` is not a valid condition, and SetupError.
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

    Args:
        settings: Settings of the place.
        stream: The stream whose alerts to send; empty for all declared streams.
        since: Time from which a new receiver gets alerts, in UTC if it has no zone; empty for now.

    Raises:
        SetupError: If the receivers, the stream or `since` are invalid.
    """
    from lookback.spark.operations.notify import Notifier

    senders = {receiver: make_sender(receiver) for receiver in load_receivers(settings.conf)}
    try:
        start = to_utc(parse_calendar_time(since)) if since else None
    except ValueError:
        raise SetupError(f"{since!r:.100} is not a valid time; use 2026-01-31T12:00:00Z") from None
    names = [settings.stream(stream).name] if stream else list(settings.streams())
    tables, declared = open_place(settings)
    for name in names:
        tables.require(declared[name])
    return Notifier(tables, names, senders, start)


def show_receivers(conf: str = "../conf") -> None:
    """Shows a table of the alerts that each receiver of CONF/notifiers.yml gets. Raises SetupError."""
    rows = [
        {
            "receiver": each.name,
            "way": "webhook" if isinstance(each.way, Webhook) else ", ".join(each.way.to),
            "severity": f"{each.severity} and higher",
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

    Mode `once` sends the alerts that exist now. Mode `continuous` looks for new alerts at the interval `every` until
    `minutes` have passed (0 for no limit) or you interrupt it; after an interrupt the last alerts may be sent again.
    `stream` and `since` are as in `make_notifier`. Raises SetupError; in mode `once` also at the end if an alert could
    not be sent.
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
        pass  # the user has seen enough
    finally:
        timer.cancel()
    clear()
    show(text(f"{total}."))
    if once and (total.failed or total.given_up):
        raise SetupError(f"{total}: the table notifications has the reasons; the next run tries again")
    return total
