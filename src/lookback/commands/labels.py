"""Commands on labels: import."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from lookback.commands.options import AddCommand, load_settings, make_adder, open_tables, wants_json
from lookback.core.values.texts import escape_unprintable
from lookback.views.terminal import format_json

# The number of kinds of rejected rows to print.
_MAX_REASONS = 5


def add_commands(command: AddCommand, places: argparse.ArgumentParser) -> None:
    """Adds `labels` with its sub-commands. `places` has the options of all commands."""
    parser = command("labels", _import_labels, "which events were what rules look for")
    add = make_adder(parser.add_subparsers(title="commands", required=True, metavar="COMMAND"), places)
    imported = add("import", _import_labels, "append the labels in a file to the table labels")
    imported.add_argument("stream")
    imported.add_argument("file", metavar="FILE", help="a file, a folder or a pattern: CSV, JSON lines or Parquet")
    imported.add_argument(
        "--event-id", metavar="COL", help="the column of the event's id (event_id, or the stream's own)"
    )
    imported.add_argument("--positive", metavar="COL", help="the column that is true or false (positive)")
    imported.add_argument(
        "--at", metavar="COL", help="the column of the time when it became known (labelled_at, or now)"
    )
    imported.add_argument(
        "--format", choices=["parquet", "csv", "json"], help="format of the file (default: from its name)"
    )
    imported.add_argument("--author", help="who labelled the events (default: the current user)")


def _import_labels(options: argparse.Namespace) -> None:
    from lookback.spark.labels import import_labels

    settings = load_settings(options)
    stream = settings.stream(options.stream)
    report = import_labels(
        open_tables(settings, stream), stream, options.file, event_id=options.event_id, positive=options.positive,
        at=options.at, format=options.format, author=options.author,
    )  # fmt: skip
    if wants_json(options):
        print(format_json(asdict(report)))
        return
    print(report)
    for rejection in report.rejections[:_MAX_REASONS]:
        print(escape_unprintable(f"  {rejection}"))
