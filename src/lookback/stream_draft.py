"""Drafts the declaration of a stream from a file of its events, for you to edit."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import re
import shlex
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
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
from lookback.core.values.notation import is_day
from lookback.core.values.texts import first_line, quote_identifier
from lookback.core.values.times import parse_calendar_time

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
# Texts in use for a missing value.
_BLANK_TEXTS = frozenset({"null", "na", "n/a", "none", "nan", "-", "?"})
_INTEGER = re.compile(r"[+-]?\d{1,38}", re.ASCII)
_EXPONENT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
# How people write numbers: the form, the mark before the fraction, and the expression that ingest reads it by.
_COMMA, _POINT_AND_COMMAS = re.compile(r"[+-]?\d+(,\d+)?", re.A), re.compile(r"[+-]?\d{1,3}(,\d{3})*(\.\d+)?", re.A)
_NUMBER_FORMS = (
    (re.compile(r"[+-]?\d*\.?\d+", re.A), ".", ""),
    (_COMMA, ",", "replace({}, ',', '.')"),
    (re.compile(r"[+-]?\d{1,3}(\.\d{3})*(,\d+)?", re.A), ",", "replace(replace({}, '.', ''), ',', '.')"),
    (_POINT_AND_COMMAS, ".", "replace({}, ',', '')"),
)
_ZONE = re.compile(r"(Z|UTC|GMT|[+-]\d\d(:?\d\d)?)\s*$", re.ASCII | re.IGNORECASE)
# A year, month and day; or day and month, or month and day, and a year; with or without a time of day.
_OTHER_TIME = re.compile(
    r"(?:\d{4}([./])\d\d\1\d\d|(\d\d?)([./-])(\d\d?)\3\d{4})(?:([ T])\d\d?:\d\d(:\d\d)?( ?)([AaPp][Mm])?)?", re.ASCII
)
_EPOCHS = {10: "timestamp_seconds", 13: "timestamp_millis", 16: "timestamp_micros"}
_TIME_NAME = re.compile(r"time|date|_at$|(^|_)(at|ts|when|epoch)($|_)", re.IGNORECASE)
# Names of money columns. These have cents even if the first rows show none.
_MONEY_NAME = re.compile(r"(^|[_ ])(amount|price|cost|fee|balance|total|betrag|preis)$", re.IGNORECASE)
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}", re.ASCII)
_ARROW_TYPES = {
    "int8": "tinyint", "int16": "smallint", "uint8": "smallint", "int32": "int", "uint16": "int", "int64": "bigint",
    "uint32": "bigint", "uint64": "decimal(20,0)", "bool": "boolean", "string": "string", "large_string": "string",
    "date32[day]": "date", "date64[ms]": "date",
}  # fmt: skip


@dataclass(frozen=True)
class _Guess:
    """A guess at the field of a column.

    `type` is empty if the column cannot be a field; `note`, the comment in the draft, then says why. `expression`
    computes the field from the column; it is empty if the field is the column itself.
    """

    type: str
    expression: str = ""
    note: str = ""


@dataclass(frozen=True)
class _Sample:
    """The first rows of a file, by column. `guesses` is known for a file whose columns have types."""

    format: str
    columns: dict[str, list[Any]]
    rows: int
    is_all: bool
    options: dict[str, str] = field(default_factory=dict)
    guesses: dict[str, _Guess] = field(default_factory=dict)
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class _Drafted:
    """A field of the draft: the column that it is made from, and the column's values in the sample."""

    name: str
    column: str
    values: list[Any]
    guess: _Guess


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
    # Integers in a file with types stay integers: its author chose the type.
    guesses = sample.guesses or {
        column: _add_cents(column, _guess_type(column, values)) for column, values in sample.columns.items()
    }
    taken = {*RESERVED_FIELDS, POSITION}
    drafted = []
    for column, guess in guesses.items():
        own = _find_free_name(column if _PLAIN_NAME.fullmatch(column) else _simplify_name(column), taken)
        taken.add(own.lower())
        drafted.append(_Drafted(own, column, sample.columns[column], guess))
    name = name or _simplify_name(file.name.partition(".")[0])[:63]
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
    encodings = ["utf-8-sig", "windows-1252"]
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encodings = ["UTF-16"]
    elif b"\0" in head[:1_000]:
        raise SetupError(
            f"{file} has NUL bytes; if it is UTF-16 without a BOM, convert it: `iconv -f UTF-16LE -t UTF-8`"
        )
    for encoding in encodings:
        try:
            text = codecs.getincrementaldecoder(encoding)().decode(head, final=is_all)
            break
        except UnicodeDecodeError:
            if encoding == encodings[-1]:
                raise
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
        return _Sample("csv", {}, 0, True)
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
    return _Sample("csv", columns, len(whole), is_all and len(rows) < SAMPLE_ROWS, options, notes=notes)


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
        if not line.strip():
            continue
        try:
            event = json.loads(line, parse_float=Decimal)
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
        events.append(event)
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
    notes = [
        f"the key {name!r} differs from {chosen[name.lower()]!r} only in case and is not read; rename one of them"
        for name in columns
        if chosen[name.lower()] != name
    ]
    kept = {name: values for name, values in columns.items() if chosen[name.lower()] == name}
    return _Sample("json", kept, len(events), is_all and len(lines) <= SAMPLE_ROWS, notes=notes)


def _read_parquet(file: Path) -> _Sample:
    # Spark reads times of the legacy type INT96 in microseconds.
    with pq.ParquetFile(file, coerce_int96_timestamp_unit="us") as parquet:
        batch = next(iter(parquet.iter_batches(SAMPLE_ROWS)), None)
        total = parquet.metadata.num_rows
    if batch is None:
        return _Sample("parquet", {}, 0, True)
    _require_different_names(batch.schema.names, file)
    unreadable = [
        f"{each.name} ({each.type})"
        for each in batch.schema
        if pa.types.is_time(each.type) or pa.types.is_float16(each.type) or pa.types.is_decimal256(each.type)
    ]
    if unreadable:
        raise SetupError(
            f"{file}: Spark cannot read columns of these types: {', '.join(unreadable)}; "
            "write the file without them, or with other types"
        )
    guesses = {each.name: _guess_from_type(each.name, batch[each.name]) for each in batch.schema}
    columns = {name: batch[name].to_pylist() if guess.type else [] for name, guess in guesses.items()}
    return _Sample("parquet", columns, batch.num_rows, batch.num_rows == total, guesses=guesses)


# Guessing ------------------------------------------------------------------------------------------------------------


def _guess_from_type(name: str, values: pa.Array) -> _Guess:
    """Guesses the field of a column that has a type."""
    kind, column = values.type, quote_identifier(name)
    if pa.types.is_dictionary(kind):
        return _guess_from_type(name, values.cast(kind.value_type))
    if pa.types.is_timestamp(kind):
        if kind.unit == "ns":
            note = "in nanoseconds, truncated to microseconds"
            return _Guess("timestamp", f"timestamp_micros({column} div 1000)", note)
        return _Guess("timestamp", note="" if kind.tz else "without a zone: taken as UTC")
    if pa.types.is_decimal(kind) and kind.precision <= 38 and 0 <= kind.scale <= kind.precision:
        return _Guess(f"decimal({kind.precision},{kind.scale})")
    if pa.types.is_floating(kind):
        return _add_cents(name, _guess_floats(values.drop_null().to_pylist()))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        element = _guess_from_type(name, values.flatten())
        if element.type and not element.expression:
            return _Guess(f"array<{element.type}>")
    if pa.types.is_struct(kind):
        return _Guess("", note=f'is a struct; declare a part of it under columns, such as part: "{column}.part"')
    known = _ARROW_TYPES.get(str(kind), "")
    epoch = _guess_epoch(name, [str(value) for value in values.drop_null().to_pylist()]) if known == "bigint" else None
    return epoch or _Guess(known, note="" if known else f"is {kind}, which no field can hold")


def _guess_floats(values: Sequence[float]) -> _Guess:
    """Guesses a decimal for doubles with few digits: money is often a double, and its shortest text is exact."""
    texts = [format(Decimal(repr(value)), "f") for value in values if value == value and abs(value) != float("inf")]
    guess = _guess_numbers("", texts) if texts and len(texts) == len(values) else None
    if guess is None or not guess.type.startswith("decimal(18") or int(guess.type[11:-1]) > 4:
        return _Guess("double", note="to sum it, cast it to a decimal: sum(cast(x as decimal(18,2)))")
    return replace(guess, note=_join("a double in the file", guess.note))


def _add_cents(name: str, guess: _Guess) -> _Guess:
    """Returns the guess, widened to two digits after the point if the name suggests money and fewer were seen."""
    if not _MONEY_NAME.search(name) or guess.type not in ("bigint", "decimal(18,1)"):
        return guess
    return replace(
        guess, type="decimal(18,2)", note="money, by its name; more than 2 digits after the point are rejected"
    )


def _guess_type(name: str, values: Iterable[Any]) -> _Guess:
    known = [value for value in values if value is not None]
    kinds = {type(value) for value in known}
    if not known:
        return _Guess("string", note="has no value in these rows")
    if kinds == {str}:
        return _guess_texts(name, known)
    if kinds == {bool}:
        return _Guess("boolean")
    if kinds <= {int, Decimal}:
        texts = [format(Decimal(value), "f") for value in known]
        return (kinds == {int} and _guess_epoch(name, texts)) or _guess_numbers(name, texts) or _Guess("double")
    if kinds == {list}:
        element = _guess_type(name, [item for value in known for item in value])
        if element.type and not element.expression and not element.type.startswith("array"):
            return _Guess(f"array<{element.type}>")
        return _Guess("", note="is a list of objects, which no field can hold")
    if kinds == {dict}:
        part = next(iter(known[0]), "part")
        example = f"{_simplify_name(f'{name}_{part}')}: \"get_json_object({quote_identifier(name)}, '$.{part}')\""
        parts = ", ".join(map(str, known[0]))
        return _Guess("", note=f"is an object ({parts}); declare a part of it under columns, such as {example}")
    return _Guess("string", note=f"has values of several kinds: {', '.join(sorted(kind.__name__ for kind in kinds))}")


def _guess_texts(name: str, texts: Sequence[str]) -> _Guess:
    guess = _guess_plain_texts(name, texts)
    if guess is not None:
        return guess
    # A column of numbers or times may use a word such as n/a for a missing value.
    blanks = Counter(text for text in texts if text.strip().lower() in _BLANK_TEXTS)
    others = [text for text in texts if text not in blanks]
    guess = _guess_plain_texts(name, others) if others and len(blanks) == 1 else None
    if guess is None:
        return _Guess("string")
    ((blank, count),) = blanks.items()
    column = quote_identifier(name)
    expression = (guess.expression or column).replace(column, f"nullif({column}, '{blank}')")
    values = "1 value is" if count == 1 else f"{count:,} values are"
    return replace(guess, expression=expression, note=_join(guess.note, f"{values} {blank!r}, read as null"))


def _guess_plain_texts(name: str, texts: Sequence[str]) -> _Guess | None:
    if all(text.lower() in ("true", "false") for text in texts):
        return _Guess("boolean")
    return _guess_epoch(name, texts) or _guess_numbers(name, texts) or _guess_times(name, texts)


def _guess_epoch(name: str, texts: Sequence[str]) -> _Guess | None:
    lengths = {len(text) for text in texts}
    function = _EPOCHS.get(lengths.pop()) if len(lengths) == 1 else None
    if not function or not _TIME_NAME.search(name) or not all(map(str.isdigit, texts)):
        return None
    return _Guess("timestamp", f"{function}(cast({quote_identifier(name)} as bigint))", "counted from 1970-01-01")


def _guess_numbers(name: str, texts: Sequence[str]) -> _Guess | None:
    if all(map(_INTEGER.fullmatch, texts)):
        bare = [text.lstrip("+-") for text in texts]
        if any(text[0] == "0" and len(text) > 1 for text in bare):
            return _Guess("string", note="has leading zeros, which a number would lose")
        digits = max(map(len, bare))
        return _Guess("bigint") if digits <= 18 else _Guess("string", note=f"numbers of {digits} digits")
    for form, mark, expression in _NUMBER_FORMS:
        if all(map(form.fullmatch, texts)):
            parts = [text.partition(mark) for text in texts]
            scales = {len(fraction) for _, found, fraction in parts if found}
            if form is _COMMA and scales == {3} and all(map(_POINT_AND_COMMAS.fullmatch, texts)):
                question = f"is {texts[0]!r} a thousand or a fraction? see numbers in docs/streams.md"
                return _Guess("string", note=question)
            whole = max(sum(map(str.isdigit, part)) for part, _, _ in parts)
            guess = _guess_decimal(whole, max(scales, default=0))
            return replace(guess, expression=expression.format(quote_identifier(name)))
    return _Guess("double") if all(map(_EXPONENT.fullmatch, texts)) else None


def _guess_decimal(whole: int, scale: int) -> _Guess:
    """Returns a decimal with room for larger numbers than those seen."""
    if whole + scale > 38:
        return _Guess("double", note="more digits than a decimal can hold")
    precision = 18 if max(whole, 9) + scale <= 18 else 38
    seen = "1 digit" if scale == 1 else f"{scale} digits"
    return _Guess(f"decimal({precision},{scale})", note=f"at most {seen} after the point were seen; more are rejected")


def _guess_times(name: str, texts: Sequence[str]) -> _Guess | None:
    if all(map(_is_time, texts)):
        if all(map(is_day, texts)):
            return _Guess("date")
        is_local = not all(map(_ZONE.search, texts))
        return _Guess("timestamp", note="without a zone: taken as UTC" if is_local else "")
    matches = [match for match in map(_OTHER_TIME.fullmatch, texts) if match]
    marks = {(match[1], match[3]) for match in matches}
    if len(matches) < len(texts) or len(marks) != 1:
        return None
    ((year_first, mark),) = marks
    note = ""
    if year_first:
        day = f"yyyy{year_first}MM{year_first}dd"
    else:
        first, second = (max(int(match[at]) for match in matches) for at in (2, 4))
        if first > 12 < second:
            return None
        is_day_first = first > 12 or (second <= 12 and mark == ".")
        day = f"d{mark}M{mark}yyyy" if is_day_first else f"M{mark}d{mark}yyyy"
        note = "is the month first, or the day?" if first <= 12 and second <= 12 and mark != "." else ""
    column = quote_identifier(name)
    clocks = [match for match in matches if match[5]]
    if not clocks:
        return _Guess("date", f"to_date({column}, '{day}')", note)
    seconds = [bool(match[6]) for match in matches]
    pattern = day + ("\\'T\\'" if matches[0][5] == "T" else " ") + ("h" if matches[0][8] else "H") + ":mm"
    pattern += (":ss" if all(seconds) else "[:ss]") if any(seconds) else ""
    pattern += f"{matches[0][7]}a" if matches[0][8] else ""
    return _Guess("timestamp", f"to_timestamp({column}, '{pattern}')", _join("without a zone: taken as UTC", note))


def _is_time(text: str) -> bool:
    """Returns whether ingest reads the text as a time."""
    try:
        parse_calendar_time(text)
    except ValueError:
        return False
    return True


def _join(*notes: str) -> str:
    return "; ".join(filter(None, notes))


# Names ---------------------------------------------------------------------------------------------------------------


def _simplify_name(name: str) -> str:
    text = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    text = re.sub(r"\W+", "_", text).strip("_").lower()[:128] or "field"
    return f"f_{text}"[:128] if text[0].isdigit() else text


def _find_free_name(name: str, taken: Iterable[str]) -> str:
    lowered = {each.lower() for each in taken}
    options = (name, *(f"{name}_{number}" for number in range(2, len(lowered) + 3)))
    return next(option for option in options if option.lower() not in lowered)


# Writing -------------------------------------------------------------------------------------------------------------


def _write(stream: str, path: str, file: Path, sample: _Sample, drafted: Sequence[_Drafted]) -> Iterator[str]:
    """Yields the lines of the declaration."""
    ids, times = _find_ids(stream, drafted), _find_times(drafted)
    fields = {each.name: each.guess for each in drafted if each.guess.type}
    columns = {
        each.name: each.guess.expression or quote_identifier(each.column)
        for each in drafted
        if each.guess.type and (each.guess.expression or each.name != each.column)
    }
    if times and fields[times[0]].type == "date":
        note = "dates without a time of day: all events of a day are at midnight"
        fields[times[0]] = replace(fields[times[0]], type="timestamp", note=note)
    id_note = "unique in these rows"
    if not ids:
        ids = [_find_free_name("event_id", fields)]
        id_note = "no column is unique, so it is a hash of all; a real id is better"
        parts = (
            f"coalesce(cast({quote_identifier(each.column)} as string), '')" for each in drafted if each.guess.type
        )
        fields = {ids[0]: _Guess("string", note="a hash of the row: equal rows count as one event"), **fields}
        columns = {ids[0]: f"sha2(concat_ws('|', {', '.join(parts)}), 256)", **columns}

    rows = f"all {sample.rows:,} rows" if sample.is_all else f"its first {sample.rows:,} rows"
    yield f"# Drafted from {file.name}, {rows}. Read every line, edit it, and save it as conf/streams/{stream}.yml."
    yield "# docs/streams.md explains every key."
    yield from (f"# {note}" for note in sample.notes)
    yield _write_line("stream", stream, "the name of the events table")
    yield _write_line("event_id", ids[0], _join(id_note, _list_others(ids)))
    if times:
        yield _write_line("event_time", times[0], _list_others(times))
    else:
        yield _write_line("event_time", "TODO", "no column looks like a time: set the field with the event's time")
    yield "fields:"
    yield from (_write_line(f"  {name}", guess.type, guess.note) for name, guess in fields.items())
    yield from (f"  # {each.column} {each.guess.note}" for each in drafted if not each.guess.type)
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


def _find_ids(stream: str, drafted: Sequence[_Drafted]) -> list[str]:
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


def _find_times(drafted: Sequence[_Drafted]) -> list[str]:
    """Finds the fields that can be the event's time, the likeliest first: times before dates, then complete."""

    def rank(each: _Drafted) -> tuple[bool, bool, bool]:
        is_named = each.name.lower() in ("event_time", "time", "timestamp", "ts", "at")
        return each.guess.type == "date", None in each.values, not is_named

    return [each.name for each in sorted(drafted, key=rank) if each.guess.type in ("timestamp", "date")]


def _list_others(names: Sequence[str]) -> str:
    return f"could also be {', '.join(names[1:4])}" if len(names) > 1 else ""


def _write_line(key: str, value: str, note: str = "") -> str:
    text = f"{key}: {_write_scalar(value)}"
    return f"{text:<30} # {note}" if note else text


def _write_scalar(text: str) -> str:
    """Formats a text as a YAML scalar on one line."""
    if re.search(r"""[`'"|{}\[\],:#&*!%@\\]""", text):
        return json.dumps(text, ensure_ascii=False) if not text.startswith("decimal(") else text
    return yaml.safe_dump(text, width=10_000, allow_unicode=True).splitlines()[0]
