"""The command line: the same work as the notebooks, for places without them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lookback.commands import alerts, backtests, labels, lists, rules, streams, upkeep
from lookback.commands.options import FOUND_PROBLEMS, WRONG_USE, make_adder
from lookback.config import Settings
from lookback.core.errors import LookbackError, RuleError, SetupError, StreamError
from lookback.spark.platform.faults import explain_full_disk
from lookback.views.terminal import safe_output

# `pip install lookback-rules` alone leaves these out, as a cluster of Databricks has its own.
_SPARK = ("pyspark", "delta", "py4j")
_NO_SPARK = "this command needs Spark and Delta, which are not installed here: pip install 'lookback-rules[local]'"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns 0, or 1 if it found problems, or 2 for wrong use."""
    with safe_output():
        return _run(arguments)


def _run(arguments: Sequence[str] | None) -> int:
    parser = _make_parser()
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options) or 0)
    except (RuleError, StreamError) as error:
        print(error, file=sys.stderr)
        return FOUND_PROBLEMS
    except LookbackError as error:
        print(f"lookback: {error}", file=sys.stderr)
        return WRONG_USE
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _SPARK:
            raise
        print(f"lookback: {_NO_SPARK}", file=sys.stderr)
        return WRONG_USE
    except Exception as error:
        if (full := explain_full_disk(error)) is None:
            raise
        print(f"lookback: {full}", file=sys.stderr)
        return WRONG_USE


def _make_parser() -> argparse.ArgumentParser:
    places = argparse.ArgumentParser(add_help=False)
    # These may stand before or after the command; SUPPRESS keeps one from overwriting the other.
    places.add_argument(
        "--root", default=argparse.SUPPRESS,
        help="folder of the tables (LOOKBACK_ROOT; ./lakehouse); with --catalog that of checkpoints (the schema's volume checkpoints)",
    )  # fmt: skip
    places.add_argument(
        "--catalog", default=argparse.SUPPRESS, help="catalog of the tables, if they are not folders; with --schema"
    )
    places.add_argument("--schema", default=argparse.SUPPRESS, help="schema of the tables in the catalog")
    places.add_argument("--conf", default=argparse.SUPPRESS, help="folder of streams/ and rules/ (./conf)")
    places.add_argument(
        "--json", action="store_true", default=argparse.SUPPRESS, help="one JSON object a line for what is listed"
    )
    parser = argparse.ArgumentParser(prog="lookback", description=__doc__, parents=[places])
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    command = make_adder(commands, places)
    upkeep.add_commands(command)
    rules.add_commands(command, places)
    streams.add_commands(command, places)
    alerts.add_commands(command)
    labels.add_commands(command, places)
    lists.add_commands(command, places)
    backtests.add_commands(command)
    demo = command("demo", _demo, "the main job on real transactions, in a folder of its own")
    demo.add_argument("--events", help="Parquet file of transactions (default: the sample in conf/samples)")
    return parser


def _demo(options: argparse.Namespace) -> None:
    from lookback.demo import run_demo

    if hasattr(options, "catalog") or hasattr(options, "schema"):
        raise SetupError("the demo makes tables in a folder of its own; leave --catalog and --schema out")
    settings = Settings.local(getattr(options, "root", None) or "./lakehouse/demo", getattr(options, "conf", None))
    run_demo(settings, None if options.events is None else Path(options.events))


if __name__ == "__main__":
    sys.exit(main())
