"""Commands that replay history: backtest, prove."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lookback.commands.options import FOUND_PROBLEMS, CommandOptions, Commands, flag, option, warn
from lookback.config import load_rule_document
from lookback.core.errors import SetupError
from lookback.core.rules.variants import read_varied
from lookback.core.values.columns import to_text
from lookback.core.values.texts import count_noun
from lookback.core.values.times import to_utc
from lookback.views.terminal import print_json

if TYPE_CHECKING:
    from lookback.core.rules.compiled import CompiledRule
    from lookback.core.streams.declaration import Stream
    from lookback.spark.replay.backtest import Backtest, BacktestFigures, Candidate
    from lookback.spark.replay.comparison import RunComparison
    from lookback.spark.rules import RulesTable

# The number of differences that `prove` prints.
_MAX_SHOWN = 20


def add_commands(commands: Commands) -> None:
    """Adds these commands."""
    text = "find the alerts that rules would have raised over all events of a stream"
    tried = commands.add("backtest", _backtest, text)
    option(tried, "rules", "files of rules, or ids of rules in the table", "FILE|ID", nargs="+")
    option(tried, "--since", "the event time from which alerts count (default: the first)", "TIME")
    option(tried, "--until", "the event time before which alerts count (default: no end)", "TIME")
    option(tried, "--since-commit", "the first commit whose events may raise alerts", "N", type=int)
    text = "try the rules with each of these values of a parameter; repeat it to try all combinations"
    option(tried, "--vary", text, "NAME=V1,V2", action="append", default=[])
    option(tried, "--against", "compare with this version: alerts gained, lost and kept", "ID|FILE")
    option(tried, "--as-of", "use the labels known at that time (default: now)", "TIME")
    text = "use the lists at the time of each event (then), or the current ones for all events, as a what-if (now)"
    option(tried, "--lists", text, choices=["then", "now"], default="then")
    option(tried, "--out", "a new or empty folder for a Delta table of the alerts", "DIR")
    text = "write what rules measured of each event when it arrived, with its label, as a training set"
    made = commands.add("features", _features, text)
    option(
        made,
        "rules",
        "files of rules, or ids of rules in the table, with windows that end at the event",
        "FILE|ID",
        nargs="+",
    )
    option(made, "--since", "the first event time to write (default: the first); earlier events still count", "TIME")
    option(made, "--until", "the event time before which rows end (default: no end)", "TIME")
    option(made, "--as-of", "use the labels known at that time (default: now)", "TIME")
    option(made, "--out", "a new or empty folder for the rows", "DIR", required=True)
    option(made, "--format", "format of the rows (default: parquet)", choices=["parquet", "delta"], default="parquet")
    text = "replay a stream's events, and compare with its alerts and late events row by row"
    proven = commands.add("prove", _prove, text, "stream")
    option(proven, "--from-commit", "the first commit to compare (default: the first)", "N", type=int)
    flag(proven, "--nightly", "continue from the saved state of the last such proof, after its last commit")
    flag(proven, "--accept", "with --nightly: continue after these commits next time even if rows differ")
    option(proven, "--until-commit", "the last one (default: the last that was judged)", "N", type=int)


def _backtest(options: CommandOptions) -> None:
    from lookback.spark.replay.backtest import Range, backtest
    from lookback.spark.rules import RulesTable

    place = options.open_workspace()
    streams = place.streams
    try:
        varied = read_varied(options.vary)
    except ValueError as error:
        raise SetupError(f"--vary: {error}") from None
    as_of = options.read_moment("as_of")
    within = Range(options.read_time("since"), options.read_time("until"), options.since_commit)
    if options.against is not None and len(options.rules) > 1:
        raise SetupError("--against compares one rule with another version of it; give only one FILE or ID")
    files = _check_files([*options.rules, *filter(None, [options.against])], streams)
    rules = RulesTable(place.tables, streams, place.settings.gate is not None)
    candidates = [_find_candidate(each, files, rules) for each in options.rules]
    against = None if options.against is None else _find_candidate(options.against, files, rules)
    stream = _find_stream([*candidates, *([] if against is None else [against])])
    with backtest(
        place.tables,
        streams[stream],
        candidates,
        within,
        vary=varied,
        rows=bool(options.out),
        as_of=as_of,
        against=against,
        lists_now=options.lists == "now",
        streams=streams,
        progress=options.progress,
    ) as result:
        for warning in result.warnings:
            warn(f"warning: {warning}")
        if options.out:
            result.write(options.out)
        rows = [_make_row(each) for each in result.figures]
        if options.wants_json:
            for row, each in zip(rows, result.comparisons, strict=False):
                row["against"] = each.to_dict()
            print_json(rows)
            return
        columns = ("alerts", "alerts_per_day", "keys", "flagged", "positives", "precision", "recall", "failures")
        values = [{name: row["parameters"].get(name) for name in varied} for row in rows]
        drawn = [{**own, **row} for row, own in zip(rows, values, strict=True)]
        compared = map(_describe_comparison, result.comparisons, values)
        errors = (f"{logged.rule_id}: {logged.action}: {logged.message}" for logged in result.errors)
        names = ["rule_id", "version", *varied, *columns]
        options.show_rows(drawn, names, *compared, _describe(result), *errors)


def _features(options: CommandOptions) -> None:
    from lookback.spark.replay.features import compute_features
    from lookback.spark.replay.outputs import require_new
    from lookback.spark.rules import RulesTable

    place = options.open_workspace()
    since, until, as_of = options.read_time("since"), options.read_time("until"), options.read_moment("as_of")
    files = _check_files(options.rules, place.streams)
    rules = RulesTable(place.tables, place.streams, place.settings.gate is not None)
    candidates = [_find_candidate(each, files, rules) for each in options.rules]
    stream = place.streams[_find_stream(candidates)]
    # Refused before the work, and not only after it.
    require_new(place.tables.spark, options.out, options.format)
    with compute_features(
        place.tables,
        stream,
        candidates,
        since=since,
        until=until,
        as_of=as_of,
        streams=place.streams,
        progress=options.progress,
    ) as result:
        for warning in result.warnings:
            warn(f"warning: {warning}")
        if options.progress is not None:
            options.progress(f"writing {options.out}")
        written = result.write(options.out, options.format)
    rows = [vars(each) for each in result.rules]
    if options.wants_json:
        print_json([{"out": options.out, "format": options.format, "rows": written, "rules": rows}])
        return
    drawn = [{**row, "columns": len(row["columns"])} for row in rows]
    errors = (f"{logged.rule_id}: {logged.action}: {logged.message}" for logged in result.errors)
    summary = f"{count_noun(written, 'row')} in {options.out}, of {count_noun(result.events, 'event')}"
    options.show_rows(drawn, ("rule_id", "version", "columns", "failures"), summary, *errors)


def _find_stream(candidates: Sequence[Candidate]) -> str:
    """Returns the stream of the rules. Raises SetupError if there are several."""
    names = sorted({str(each.document["stream"]) for each in candidates})
    if len(names) > 1:
        raise SetupError(f"these rules are of the streams {' and '.join(names)}; try those of one stream at a time")
    return names[0]


def _prove(options: CommandOptions) -> int:
    from lookback.spark.replay.proof import describe_match, proof_folder, prove

    if options.accept and not options.nightly:
        raise SetupError("--accept is for --nightly: add --nightly")
    place = options.open_workspace()
    stream, tables = place.stream, place.tables
    with prove(
        tables,
        stream,
        place.streams,
        first=options.from_commit,
        last=options.until_commit,
        saved=proof_folder(tables, stream) if options.nightly else None,
        accept=options.accept,
        progress=options.progress,
    ) as proofs:
        differs = any(not row.holds for row in proofs.rows)
        rows, lines = [vars(row) for row in proofs.rows], []
        if not options.wants_json:
            rows = [{**row, "rule_id": row["rule_id"] or "(late events)"} for row in rows]
            found = proofs.differences.orderBy("arrival", "rule_id").limit(_MAX_SHOWN).collect()
            text = "only {side}: {verdict} {alert_id} of {rule_id}, commit {arrival}: {message}"
            lines = [*(text.format(**row.asDict()) for row in found), *filter(None, [proofs.gone])]
            first, last = proofs.commits
            lines.append(f"commits {first} to {last}: {describe_match(proofs.rows)}")
        names = ("rule_id", "alike", "only_recorded", "only_replayed", "unprovable", "unjudged")
        options.show_rows(rows, names, *lines)
    return FOUND_PROBLEMS if differs else 0


def _check_files(names: Iterable[str], streams: Mapping[str, Stream]) -> dict[str, CompiledRule]:
    """Checks the rules that are files, which needs no Spark. The other names are ids. Raises RuleError and SetupError."""
    from lookback.testing.rule_tests import check_rule

    files = [each for each in names if each.endswith((".yml", ".yaml")) or Path(each).exists()]
    return {each: check_rule(load_rule_document(each), streams) for each in files}


def _find_candidate(name: str, files: Mapping[str, CompiledRule], rules: RulesTable) -> Candidate:
    """Returns the rule of a file, or of the table by its id. Raises RuleError."""
    from lookback.spark.replay.backtest import Candidate

    if name in files:
        return Candidate(dict(files[name].spec.document), rules.next_version(files[name].spec.rule_id))
    row = rules.find_version(name)
    return Candidate(dict(rules.check(row.document or {}).spec.document), row.version)


def _make_row(figures: BacktestFigures) -> dict[str, Any]:
    ratios = ("alerts_per_day", "precision", "recall")
    rounded = {name: None if (value := getattr(figures, name)) is None else round(value, 6) for name in ratios}
    return {**vars(figures), **rounded}


def _describe_comparison(comparison: RunComparison, values: Mapping[str, Any]) -> str:
    named = ", ".join(f"{name} = {value}" for name, value in values.items())
    lost, gained = (count_noun(keys, "key") for keys in (comparison.keys_lost, comparison.keys_gained))
    counts = (
        f"{comparison.gained.alerts:,} gained, {comparison.lost.alerts:,} lost, {comparison.kept.alerts:,} kept; "
        f"{gained} gained, {lost} lost"
    )
    version = f"against {comparison.rule_id} version {comparison.version}"
    return f"{version}{f' with {named}' if named else ''}: {comparison.sentence} ({counts})"


def _describe(result: Backtest) -> str:
    first, last = result.commits
    if not result.events:
        return f"the commits {first} to {last} have no events: take some in with lookback ingest"
    text = f"{result.events:,} events of the commits {first} to {last}"
    if result.first_time is not None and result.last_time is not None:
        text += f"; alerts count from {to_text(to_utc(result.first_time))} to {to_text(to_utc(result.last_time))}"
    if result.deletes:
        commits = f"{result.deletes:,} {'commit' if result.deletes == 1 else 'commits'}"
        text += f"; {commits} deleted events, which are left out"
    return text
