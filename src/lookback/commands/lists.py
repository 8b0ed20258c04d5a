"""Commands on lists: add, remove, show, import."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lookback.commands.options import AddCommand, answer, load_settings, make_adder, open_tables, wants_json
from lookback.core.values.texts import escape_unprintable
from lookback.views.terminal import format_json, print_json, print_table

if TYPE_CHECKING:
    from lookback.spark.lists import ListReport
    from lookback.spark.tables.lakehouse import Tables

# The number of kinds of rejected rows to print.
_MAX_REASONS = 5


def add_commands(command: AddCommand, places: argparse.ArgumentParser) -> None:
    """Adds `lists` with its sub-commands. `places` has the options of all commands."""
    parser = command("lists", _show, "values that rules look up with in_list(field, 'name')")
    add = make_adder(parser.add_subparsers(title="commands", required=True, metavar="COMMAND"), places)
    added = add("add", _add, "add values to a list, which the first value creates")
    added.add_argument("name", metavar="NAME")
    added.add_argument("values", metavar="VALUE", nargs="+", help="the text of cast(field as string), or a CIDR range")
    _add_options(added)
    removed = add("remove", _remove, "remove values from a list")
    removed.add_argument("name", metavar="NAME")
    removed.add_argument("values", metavar="VALUE", nargs="+")
    shown = add("show", _show, "show all lists, or the values of one")
    shown.add_argument("name", metavar="NAME", nargs="?")
    imported = add("import", _import, "add the values in a file to a list")
    imported.add_argument("name", metavar="NAME")
    imported.add_argument("file", metavar="FILE", help="a file, a folder or a pattern: CSV, JSON lines or Parquet")
    imported.add_argument("--value", metavar="COL", help="the column of the values (value, or the only one)")
    imported.add_argument(
        "--format", choices=["parquet", "csv", "json"], help="format of the file (default: from its name)"
    )
    _add_options(imported)


def _add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--until", metavar="TIME", help="when the values expire: a time, or a duration such as '30 days'"
    )
    command.add_argument("--reason", help="why the values are on the list")
    command.add_argument("--kind", choices=["cidr"], help="cidr: the values are ranges of addresses")
    command.add_argument("--author", help="who adds the values (default: the current user)")


def _add(options: argparse.Namespace) -> None:
    from lookback.spark.lists import add_values, read_until

    until = None if options.until is None else read_until(options.until)
    report = add_values(
        open_tables(load_settings(options)), options.name, options.values, until=until, reason=options.reason,
        kind=options.kind, author=options.author,
    )  # fmt: skip
    _print_report(options, report)


def _remove(options: argparse.Namespace) -> None:
    from lookback.spark.lists import remove_values

    removal = remove_values(open_tables(load_settings(options)), options.name, options.values)
    print(format_json(asdict(removal)) if wants_json(options) else escape_unprintable(str(removal)))


def _show(options: argparse.Namespace) -> None:
    from lookback.spark.lists import read_list, show_lists

    def compute(tables: Tables) -> list[dict[str, Any]]:
        if options.name is None:
            return show_lists(tables)
        return [row.asDict() for row in read_list(tables, options.name).toLocalIterator()]

    rows = answer(load_settings(options), compute)
    names: tuple[str, ...] = ("value", "state", "expires_at", "added_at", "author", "reason")
    if options.name is None:
        names = ("list", "kind", "values", "expired", "last_added_at")
    if wants_json(options):
        print_json(rows)
    elif rows:
        print_table(rows, names)
    else:
        print("No lists yet; `lookback lists add NAME VALUE` makes one.")


def _import(options: argparse.Namespace) -> None:
    from lookback.spark.lists import import_values, read_until

    until = None if options.until is None else read_until(options.until)
    report = import_values(
        open_tables(load_settings(options)), options.name, options.file, value=options.value, until=until,
        reason=options.reason, kind=options.kind, format=options.format, author=options.author,
    )  # fmt: skip
    _print_report(options, report)


def _print_report(options: argparse.Namespace, report: ListReport) -> None:
    if wants_json(options):
        print(format_json(asdict(report)))
        return
    print(escape_unprintable(str(report)))
    for rejection in report.rejections[:_MAX_REASONS]:
        print(escape_unprintable(f"  {rejection}"))
