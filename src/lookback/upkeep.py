"""The functions that operate a place, one per notebook cell: set-up, maintenance, proofs, notifications, deletion."""

from __future__ import annotations

import time
from dataclasses import asdict
from threading import Event, Timer
from typing import TYPE_CHECKING

import pandas as pd

from lookback import verbs
from lookback.config import Settings, load_receivers
from lookback.core.errors import SetupError
from lookback.core.operations.receivers import Webhook
from lookback.core.streams.arrival import describe_fast_clock
from lookback.core.values.durations import parse_duration
from lookback.parameters import check_mode
from lookback.views.display import clear, show, text

if TYPE_CHECKING:
    from lookback.spark.operations.catalog import SetUpStep
    from lookback.spark.operations.forget import ForgetReport
    from lookback.spark.operations.maintenance import Maintenance
    from lookback.spark.operations.notify import DeliveryCounts

# The number of differing rows to show.
_MAX_DIFFERENCES = 20


def _open(root: str, catalog: str, schema: str, conf: str, stream: str = "") -> verbs.Workspace:
    return verbs.Workspace(Settings.local(root, conf, catalog=catalog, schema=schema), stream)


def set_up(
    root: str,
    catalog: str = "",
    schema: str = "",
    conf: str = "../conf",
    landing: str = "",
    analysts: str = "",
    engineers: str = "",
    service: str = "",
) -> list[SetUpStep]:
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
    from lookback.spark.operations.grants import Grantees

    place = _open(root, catalog, schema, conf)
    steps = verbs.set_up(place, landing, Grantees(analysts, engineers, service))
    show(pd.DataFrame([{"thing": step.thing, "done": step.done} for step in steps]))
    remarks = {name: describe_fast_clock(stream) for name, stream in place.streams.items()}
    show(*(text(f"{name}: {remark}") for name, remark in remarks.items() if remark))
    left = [step.to_do for step in steps if step.to_do]
    if left:
        show(text("The owner of the named objects must run:"), *map(text, left))
    return steps


def maintain(root: str, catalog: str = "", schema: str = "", conf: str = "../conf") -> Maintenance:
    """Deletes rows past their retention, runs OPTIMIZE and VACUUM on every table, and checks every checkpoint.

    Shows the results. Raises SetupError at the end if an evaluation cannot continue from its checkpoint.
    """
    done = verbs.maintain(_open(root, catalog, schema, conf))
    show(*(pd.DataFrame([asdict(each) for each in rows]) for rows in (done.tables, done.checkpoints)))
    if done.older is not None:
        show(text(str(done.older)))
    if done.problems:
        raise SetupError("; ".join(done.problems))
    return done


def prove(
    root: str, catalog: str = "", schema: str = "", conf: str = "../conf", stream: str = "", accept: bool = False
) -> pd.DataFrame:
    """Replays the events that a stream judged since the last proof, and shows how many output rows are correct.

    `stream` is empty for every declared stream with outputs. With `accept` the next proof starts after the rows that
    differ. Returns the rows shown, with the columns stream, rule_id (None for late events), alike, only_recorded,
    only_replayed, unprovable and unjudged. Raises SetupError at the end if a row differs.
    """
    from lookback.spark.replay.proof import describe_match, proof_folder
    from lookback.spark.replay.proof import prove as run
    from lookback.spark.stream.rebuild import has_outputs

    place = _open(root, catalog, schema, conf, stream)
    chosen = [place.stream] if stream else list(place.streams.values())
    rows, differing = [], []
    for each in chosen:
        if not stream and not has_outputs(place.tables, each):
            continue
        name, folder = each.name, proof_folder(place.tables, each)
        with run(place.tables, each, place.streams, saved=folder, accept=accept) as proofs:
            rows += [{"stream": name, **asdict(row)} for row in proofs.rows]
            first, last = proofs.commits
            outcome = describe_match(proofs.rows)
            show(text(f"{name}: commits {first} to {last}: {outcome}." if first <= last else f"{name}: nothing new."))
            if proofs.gone:
                show(text(f"{name}: {proofs.gone}."))
            if not all(row.holds for row in proofs.rows):
                differing.append(name)
                show(proofs.differences.orderBy("arrival", "rule_id").limit(_MAX_DIFFERENCES).toPandas())
    names = ["stream", "rule_id", "alike", "only_recorded", "only_replayed", "unprovable", "unjudged"]
    found = pd.DataFrame(rows, columns=names)
    show(found)
    if differing:
        raise SetupError(
            f"rows of {' and '.join(differing)} differ from a replay: they were changed, deleted or inserted by hand, "
            "or judged with other settings; to skip them next time: lookback prove STREAM --nightly --accept"
        )
    return found


def forget(
    root: str,
    catalog: str = "",
    schema: str = "",
    conf: str = "../conf",
    stream: str = "",
    where: str = "",
    dry_run: bool = True,
) -> ForgetReport:
    """Permanently deletes all rows about the events of a stream that satisfy `where`, and shows the report.

    `where` is a condition on the stream's fields, such as `customer_id = 17`. With `dry_run` the rows are only counted.
    Raises ExpressionError if `where` is not a valid condition, and SetupError.
    """
    report = verbs.forget(_open(root, catalog, schema, conf, stream), where, dry_run=dry_run)
    show(*map(text, str(report).splitlines()))
    return report


def show_receivers(conf: str = "../conf") -> None:
    """Shows a table of the alerts that each receiver of CONF/notifiers.yml gets. Raises SetupError."""
    rows = []
    for each in load_receivers(conf):
        way = "webhook" if isinstance(each.way, Webhook) else ", ".join(each.way.to)
        lists = {name: ", ".join(getattr(each, name)) for name in ("rules", "streams", "verdicts", "modes")}
        rows.append({"receiver": each.name, "way": way, "severity": f"{each.severity} and higher", **lists})
    show(pd.DataFrame(rows))


def notify(
    root: str,
    catalog: str = "",
    schema: str = "",
    conf: str = "../conf",
    stream: str = "",
    mode: str = "once",
    every: str = "10 seconds",
    minutes: float = 0,
    since: str = "",
) -> DeliveryCounts:
    """Sends alerts, and shows how many.

    Mode `once` sends the alerts that exist now. Mode `continuous` looks for new alerts at the interval `every` until
    `minutes` have passed (0 for no limit) or you interrupt it; after an interrupt the last alerts may be sent again.
    `stream` is empty for all declared streams. A new receiver gets the alerts from the time `since`, empty for now.
    Raises SetupError; in mode `once` also at the end if an alert could not be sent.
    """
    from lookback.spark.operations.notify import DeliveryCounts

    once = check_mode(mode, "once", "continuous") == "once"
    pause = parse_duration(every) / 1_000_000
    sending = verbs.make_notifier(_open(root, catalog, schema, conf, stream), since)
    total, stop = DeliveryCounts(), Event()

    def report(counts: DeliveryCounts) -> None:
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
    if once and total.has_failed:
        raise SetupError(f"{total}: the table notifications has the reasons; the next run tries again")
    return total
