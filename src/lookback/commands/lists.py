"""Commands on lists (add, remove, show, import) and labels (import)."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from lookback.commands.options import CommandOptions, Commands, add_format, option

if TYPE_CHECKING:
    from lookback.spark.tables.lakehouse import Tables


def add_commands(commands: Commands) -> None:
    """Adds `labels` and `lists` with their sub-commands."""
    group = commands.add_group("labels", "which events were what rules look for")
    imported = group.add("import", _import_labels, "append the labels in a file to the table labels", "stream")
    option(imported, "file", "a file, a folder or a pattern: CSV, JSON lines or Parquet", "FILE")
    option(imported, "--event-id", "the column of the event's id (event_id, or the stream's own)", "COL")
    option(imported, "--positive", "the column that is true or false (positive)", "COL")
    option(imported, "--at", "the column of the time when it became known (labelled_at, or now)", "COL")
    add_format(imported)
    option(imported, "--author", "who labelled the events (default: the current user)")
    group = commands.add_group("lists", "values that rules look up with in_list(field, 'name')")
    added = group.add("add", _add, "add values to a list, which the first value creates")
    option(added, "name", metavar="NAME")
    option(added, "values", "the text of cast(field as string), or a CIDR range", "VALUE", nargs="+")
    _add_options(added)
    removed = group.add("remove", _remove, "remove values from a list")
    option(removed, "name", metavar="NAME")
    option(removed, "values", metavar="VALUE", nargs="+")
    shown = group.add("show", _show, "show all lists, or the values of one")
    option(shown, "name", metavar="NAME", nargs="?")
    imported = group.add("import", _import, "add the values in a file to a list")
    option(imported, "name", metavar="NAME")
    option(imported, "file", "a file, a folder or a pattern: CSV, JSON lines or Parquet", "FILE")
    option(imported, "--value", "the column of the values (value, or the only one)", "COL")
    add_format(imported)
    _add_options(imported)


def _add_options(command: argparse.ArgumentParser) -> None:
    option(command, "--until", "when the values expire: a time, or a duration such as '30 days'", "TIME")
    option(command, "--reason", "why the values are on the list")
    option(command, "--kind", "cidr: the values are ranges of addresses", choices=["cidr"])
    option(command, "--author", "who adds the values (default: the current user)")


def _read_options(options: CommandOptions) -> dict[str, Any]:
    from lookback.spark.lists import read_until

    until = None if options.until is None else read_until(options.until)
    return {"until": until, "reason": options.reason, "kind": options.kind, "author": options.author}


def _add(options: CommandOptions) -> None:
    from lookback.spark.lists import add_values

    given, tables = _read_options(options), options.open_workspace().open_tables()
    options.show_report(add_values(tables, options.name, options.values, **given))


def _remove(options: CommandOptions) -> None:
    from lookback.spark.lists import remove_values

    options.show_report(remove_values(options.open_workspace().open_tables(), options.name, options.values))


def _import(options: CommandOptions) -> None:
    from lookback.spark.lists import import_values

    given, tables = _read_options(options), options.open_workspace().open_tables()
    report = import_values(tables, options.name, options.file, value=options.value, format=options.format, **given)
    options.show_report(report)


def _show(options: CommandOptions) -> None:
    from lookback.spark.lists import read_list, show_lists

    def compute(tables: Tables) -> list[dict[str, Any]]:
        if options.name is None:
            return show_lists(tables)
        return [row.asDict() for row in read_list(tables, options.name).toLocalIterator()]

    rows = options.open_workspace().answer(compute)
    if not rows and not options.wants_json:
        print("No lists yet; `lookback lists add NAME VALUE` makes one.")
        return
    all_lists = ("list", "kind", "values", "expired", "last_added_at")
    one_list = ("value", "state", "expires_at", "added_at", "author", "reason")
    options.show_rows(rows, all_lists if options.name is None else one_list)


def _import_labels(options: CommandOptions) -> None:
    from lookback.spark.labels import import_labels

    place = options.open_workspace()
    report = import_labels(
        place.tables,
        place.stream,
        options.file,
        event_id=options.event_id,
        positive=options.positive,
        at=options.at,
        format=options.format,
        author=options.author,
    )
    options.show_report(report)
