"""Drafts the declaration of a stream from a file of its events, for you to edit."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import IO, Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from lookback.core.errors import SetupError
from lookback.core.streams.fields import POSITION, RESERVED_FIELDS
from lookback.core.values.texts import escape_unprintable, first_line, quote_identifier
from lookback.field_guesses import FieldGuess, add_cents, guess_from_type, guess_from_values, join_notes, simplify_name

# A draft is made from the first rows of a file, and from no more than its first bytes.
SAMPLE_ROWS = 10_000
_SAMPLE_BYTES = 20_000_000
# A file with a longer line does not have one event per line.
_MAX_LINE_CHARACTERS = 10_000_000
# The number of rows in which to look for the separator.
_SEPARATOR_ROWS = 100
_SEPARATORS = (",", ";", "\t", "|")
_FORMATS = {
    **dict.fromkeys((".csv", ".tsv", ".txt"), "csv"),
    **dict.fromkeys((".json", ".jsonl", ".ndjson"), "json"),
    ".parquet": "parquet",
}
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}", re.ASCII)


@dataclass(frozen=True)
class _DraftedColumn:
    """A column of the file with its values in the sample, the guess at its field, and the field's name."""

    column: str
    values: list[Any]
    guess: FieldGuess
    name: str = ""


@dataclass(frozen=True)
class _Sample:
    """The first rows of a file, and `options` with which Spark reads it."""

    format: str
    columns: Sequence[_DraftedColumn]
    rows: int
    is_all: bool
    options: dict[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()


def draft_stream(path: str | Path, name: str = "", format: str = "") -> str:
    """Drafts a declaration as YAML from the first rows of a file, with comments where you have to decide.

    Args:
        path: CSV file (any separator), file of JSON lines or Parquet file, plain or .gz; or a folder, whose first such
            file is read.
        name: Name of the stream; default: the file's name.
        format: csv, json or parquet; default: from the file's suffix.

    Raises:
        SetupError: If the file cannot be read.
    """
    file = _find_file(Path(path))
    try:
        str(file).encode()
    except UnicodeEncodeError:
        raise SetupError(f"{str(file)!a}: the name is not UTF-8, so Spark cannot open the file; rename it") from None
    sample = _read(file, format or _find_format(file))
    if not sample.rows:
        raise SetupError(f"{file} has no rows to draft a stream from; choose a file with events")
    taken, drafted = {*RESERVED_FIELDS, POSITION}, []
    for each in sample.columns:
        own = _find_free_name(each.column if _PLAIN_NAME.fullmatch(each.column) else simplify_name(each.column), taken)
        taken.add(own.lower())
        drafted.append(replace(each, name=own))
    name = name or simplify_name(file.name.partition(".")[0])[:63]
    return "".join(f"{line}\n" for line in _write(name, str(path), file, sample, drafted))


# Reading a file ------------------------------------------------------------------------------------------------------


def _find_file(path: Path) -> Path:
    if not path.is_dir():
        return path
    files = sorted(file for file in path.rglob("*") if _find_suffix(file) in _FORMATS and file.name[0] not in "._")
    if not files:
        raise SetupError(f"{path} has no {', '.join(sorted(set(_FORMATS.values())))} file; choose a file")
    return files[0]


def _find_suffix(file: Path) -> str:
    return (Path(file.stem).suffix if file.suffix == ".gz" else file.suffix).lower()


def _find_format(file: Path) -> str:
    known = _FORMATS.get(_find_suffix(file))
    if known is None:
        raise SetupError(f"{file}: the suffix is not a known format; set --format to csv, json or parquet")
    return known


def _read(file: Path, format_: str) -> _Sample:
    try:
        if format_ == "parquet":
            return _read_parquet(file)
        lines, encoding, is_all = _read_lines(file)
        if format_ == "csv":
            sample = _read_csv(lines, file, is_all)
        elif encoding == "utf-8-sig":
            return _read_json(lines, file, is_all)
        else:
            raise SetupError(
                f"{file} is {encoding}, but JSON must be UTF-8; convert it: `iconv -f {encoding} -t UTF-8`"
            )
    except (OSError, EOFError, UnicodeDecodeError, csv.Error, pa.ArrowException) as error:
        raise SetupError(f"{file} cannot be read as {format_}: {first_line(error)}") from error
    if encoding != "utf-8-sig":
        sample.options["encoding"] = encoding
    if encoding == "UTF-16":
        # Spark ends a line at a single byte, which in UTF-16 may be half a character.
        sample.options["multiLine"] = "true"
    return sample


def _read_lines(file: Path) -> tuple[list[str], str, bool]:
    """Reads the first lines of a text. Returns them, the encoding, and whether they are all.

    The encoding is UTF-16 if the file has its byte-order mark, UTF-8 if it is valid UTF-8, else Excel's western one.
    """
    with cast("IO[bytes]", (gzip.open if file.suffix == ".gz" else open)(file, "rb")) as content:
        head, is_all = content.read(_SAMPLE_BYTES), not content.read(1)
    encoding = "UTF-16" if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    if encoding != "UTF-16" and b"\0" in head[:1_000]:
        raise SetupError(
            f"{file} has NUL bytes; if it is UTF-16 without a BOM, convert it: `iconv -f UTF-16LE -t UTF-8`"
        )
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(head, final=is_all)
    except UnicodeDecodeError:
        if encoding == "UTF-16":
            raise
        encoding, text = "windows-1252", head.decode("windows-1252")
    lines = io.StringIO(text, newline="").readlines()
    longest = max(map(len, lines), default=0)
    if longest > _MAX_LINE_CHARACTERS:
        raise SetupError(f"{file} has a line of {longest:,} characters; write one event per line")
    return lines if is_all else lines[:-1], encoding, is_all


def _read_csv(lines: Sequence[str], file: Path, is_all: bool) -> _Sample:
    if lines and re.fullmatch(r"(?i)sep=.?\s*", lines[0]):
        raise SetupError(
            f"{file}: its first line is {lines[0].strip()!r}, which only Excel reads; delete that line: "
            f"`tail -n +2 {shlex.quote(file.name)}`"
        )
    separator = _find_separator(lines)
    rows = list(islice(csv.reader(lines, delimiter=separator), SAMPLE_ROWS + 1))
    if not rows:
        return _Sample("csv", (), 0, True)
    header, rows = rows[0], [row for row in rows[1:] if row]
    _require_different_names(header, file)
    whole = [row for row in rows if len(row) == len(header)]
    notes = []
    if len(whole) < len(rows):
        notes = [f"{len(rows) - len(whole):,} of {len(rows):,} rows have another number of values than the header"]
    # Spark names an unnamed column after its position.
    columns = {name or f"_c{at}": [row[at] or None for row in whole] for at, name in enumerate(header)}
    options = {} if separator == "," else {"sep": separator}
    if any(mark in value for row in [header, *rows] for value in row for mark in "\r\n"):
        notes.append("values have line breaks, so Spark reads a large file with one core")
        options["multiLine"] = "true"
    return _Sample("csv", _guess_types(columns), len(whole), is_all and len(rows) < SAMPLE_ROWS, options, notes)


def _require_different_names(names: Sequence[str], file: Path) -> None:
    """Raises SetupError if two columns have the same name, ignoring case."""
    lowered = [name.lower() for name in names]
    repeated = next((name for name in lowered if name and lowered.count(name) > 1), None)
    if repeated:
        places = [at for at, name in enumerate(lowered) if name == repeated]
        raise SetupError(
            f"{file}: the columns {', '.join(str(at + 1) for at in places)} are named "
            f"{', '.join(repr(names[at]) for at in places)}, the same name to Spark; give each its own name"
        )


def _find_separator(lines: Sequence[str]) -> str:
    """Returns the separator with which most rows match the header's width; on a tie, the one with most values."""

    def score(separator: str) -> tuple[bool, float, int]:
        rows = [row for row in islice(csv.reader(lines, delimiter=separator), _SEPARATOR_ROWS) if row]
        width = len(rows[0]) if rows else 0
        return width > 1, sum(len(row) == width for row in rows) / max(len(rows), 1), width

    return max(_SEPARATORS, key=score)


def _read_json(lines: Sequence[str], file: Path, is_all: bool) -> _Sample:
    events = []
    for number, line in enumerate(lines[:SAMPLE_ROWS], 1):
        try:
            event = json.loads(line, parse_float=Decimal) if line.strip() else {}
        except (ValueError, RecursionError) as error:
            raise SetupError(
                f"{file}:{number} is not a JSON object on one line ({error}); write one event per line. "
                f"`jq -c .` puts an object of several lines on one, `jq -c '.[]'` does so for the objects of a list"
            ) from None
        if not isinstance(event, dict):
            raise SetupError(
                f"{file}:{number} is JSON but not an object; write one event per line, each an object, not a list. "
                "`jq -c '.[]'` does this"
            )
        events += [event] if line.strip() else []
    names = dict.fromkeys(name for event in events for name in event)
    columns = {name: [event.get(name) for event in events] for name in names}
    if len(events) == len(columns) == 1:
        ((name, (value,)),) = columns.items()
        if isinstance(value, list) and all(isinstance(item, dict) for item in value):
            raise SetupError(
                f"{file} is one object with a list of {len(value):,} objects in {name!r}, as CloudTrail writes it; "
                f"write one event per line: `jq -c '.[{json.dumps(name)}][]'` does this"
            )
    # Of keys that differ only in case, the most frequent is kept.
    chosen: dict[str, str] = {}
    for name in sorted(columns, key=lambda name: columns[name].count(None)):
        chosen.setdefault(name.lower(), name)
    kept = {name: values for name, values in columns.items() if chosen[name.lower()] == name}
    text = "the key {!r} differs from {!r} only in case and is not read; rename one of them"
    notes = [text.format(name, chosen[name.lower()]) for name in columns if name not in kept]
    return _Sample("json", _guess_types(kept), len(events), is_all and len(lines) <= SAMPLE_ROWS, notes=notes)


def _guess_types(columns: Mapping[str, list[Any]]) -> list[_DraftedColumn]:
    """Guesses the fields of columns without types. Integers of a file with types stay as its author chose them."""
    guesses = {name: add_cents(name, guess_from_values(name, values)) for name, values in columns.items()}
    return [_DraftedColumn(name, values, guesses[name]) for name, values in columns.items()]


def _read_parquet(file: Path) -> _Sample:
    # Spark reads times of the legacy type INT96 in microseconds.
    with pq.ParquetFile(file, coerce_int96_timestamp_unit="us") as parquet:
        batch = next(iter(parquet.iter_batches(SAMPLE_ROWS)), None)
        total = parquet.metadata.num_rows
    if batch is None:
        return _Sample("parquet", (), 0, True)
    _require_different_names(batch.schema.names, file)
    kinds = (pa.types.is_time, pa.types.is_float16, pa.types.is_decimal256)
    unreadable = [f"{each.name} ({each.type})" for each in batch.schema if any(is_of(each.type) for is_of in kinds)]
    if unreadable:
        raise SetupError(
            f"{file}: Spark cannot read columns of these types: {', '.join(unreadable)}; "
            "write the file without them, or with other types"
        )
    guesses = {name: guess_from_type(name, batch[name]) for name in batch.schema.names}
    columns = [
        _DraftedColumn(name, batch[name].to_pylist() if each.type else [], each) for name, each in guesses.items()
    ]
    return _Sample("parquet", columns, batch.num_rows, batch.num_rows == total)


def _find_free_name(name: str, taken: Iterable[str]) -> str:
    lowered = {each.lower() for each in taken}
    options = (name, *(f"{name}_{number}" for number in range(2, len(lowered) + 3)))
    return next(option for option in options if option.lower() not in lowered)


# Writing -------------------------------------------------------------------------------------------------------------


def _write(stream: str, path: str, file: Path, sample: _Sample, drafted: Sequence[_DraftedColumn]) -> Iterator[str]:
    """Yields the lines of the declaration."""
    ids, times = _find_ids(stream, drafted), _find_times(drafted)
    kept = [each for each in drafted if each.guess.type]
    fields = {each.name: each.guess for each in kept}
    expressions = {each.name: each.guess.expression or quote_identifier(each.column) for each in kept}
    columns = {each.name: expressions[each.name] for each in kept if each.guess.expression or each.name != each.column}
    if times and fields[times[0]].type == "date":
        note = "dates without a time of day: all events of a day are at midnight"
        fields[times[0]] = replace(fields[times[0]], type="timestamp", note=note)
    id_note = "unique in these rows"
    if not ids:
        ids = [_find_free_name("event_id", fields)]
        id_note = "no column is unique, so it is a hash of all; a real id is better"
        parts = (f"coalesce(cast({quote_identifier(each.column)} as string), '')" for each in kept)
        fields = {ids[0]: FieldGuess("string", note="a hash of the row: equal rows count as one event"), **fields}
        columns = {ids[0]: f"sha2(concat_ws('|', {', '.join(parts)}), 256)", **columns}

    rows = f"all {sample.rows:,} rows" if sample.is_all else f"its first {sample.rows:,} rows"
    yield f"# Drafted from {escape_unprintable(file.name)}, {rows}. Read every line, edit it, and save it as conf/streams/{stream}.yml."
    yield "# docs/streams.md explains every key."
    yield from (f"# {note}" for note in sample.notes)
    yield _write_line("stream", stream, "the name of the events table")
    yield _write_line("event_id", ids[0], join_notes(id_note, _list_others(ids)))
    missing = "no column looks like a time: set the field with the event's time"
    yield _write_line("event_time", *((times[0], _list_others(times)) if times else ("TODO", missing)))
    yield "fields:"
    yield from (_write_line(f"  {name}", guess.type, guess.note) for name, guess in fields.items())
    yield from (
        f"  # {escape_unprintable(each.column)} {escape_unprintable(each.guess.note)}"
        for each in drafted
        if not each.guess.type
    )
    if columns:
        yield "columns:                       # fields computed from the file's columns, in Spark SQL"
        yield from (f"  {name}: {_write_scalar(expression)}" for name, expression in columns.items())
    yield _write_line("max_out_of_orderness", "10 seconds", "how far events may be out of order")
    yield _write_line("allowed_lateness", "1 hour", "how late an event may be and still count")
    sum_note = "at most the sum of the two above: one fast clock makes other events late"
    yield _write_line("max_future", "1 hour", sum_note)
    yield "source:                        # where ingest looks by default"
    yield f"  format: {sample.format}"
    yield f"  path: {_write_scalar(path)}"
    if sample.options:
        yield f"  options: {json.dumps(sample.options)}"


def _find_ids(stream: str, drafted: Sequence[_DraftedColumn]) -> list[str]:
    """Finds the fields whose values are unique in these rows, the likeliest id first."""
    likely = ("id", "event_id", f"{stream}_id", f"{stream.removesuffix('s')}_id")

    def rank(name: str) -> tuple[bool, bool]:
        return name.lower() not in likely, not re.search(r"(^|_)(id|key|nr|no|number|uuid)$", name.lower())

    unique = [
        each.name
        for each in drafted
        if each.guess.type in ("string", "bigint", "int", "smallint", "tinyint") and not each.guess.expression
        if None not in each.values and len(set(each.values)) == len(each.values)
    ]
    return sorted(unique, key=rank)


def _find_times(drafted: Sequence[_DraftedColumn]) -> list[str]:
    """Finds the fields that can be the event's time, the likeliest first: times before dates, then complete."""

    def rank(each: _DraftedColumn) -> tuple[bool, bool, bool]:
        is_other = each.name.lower() not in ("event_time", "time", "timestamp", "ts", "at")
        return each.guess.type == "date", None in each.values, is_other

    return [each.name for each in sorted(drafted, key=rank) if each.guess.type in ("timestamp", "date")]


def _list_others(names: Sequence[str]) -> str:
    return f"could also be {', '.join(names[1:4])}" if len(names) > 1 else ""


def _write_line(key: str, value: str, note: str = "") -> str:
    text = f"{key}: {_write_scalar(value)}"
    return f"{text:<30} # {note}" if note else text


def _write_scalar(text: str) -> str:
    """Formats a text as a YAML scalar on one line."""
    if not text.isprintable() or re.search(r"""[`'"|{}\[\],:#&*!%@\\]""", text):
        return text if text.startswith("decimal(") else escape_unprintable(json.dumps(text, ensure_ascii=False))
    return yaml.safe_dump(text, width=10_000, allow_unicode=True).splitlines()[0]
