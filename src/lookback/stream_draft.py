"""Drafts the declaration of a stream from a file of its events, for you to edit."""

from __future__ import annotations

import codecs
import csv
import gzip
import json
import re
import shlex
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import IO, Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from lookback.core.errors import SetupError
from lookback.core.streams.fields import POSITION, RESERVED_FIELDS
from lookback.core.values.texts import first_line, quote_identifier

# A draft is made from the first rows of a file.
SAMPLE_ROWS = 10_000
# A file with a longer line does not have one event per line.
_MAX_LINE_CHARACTERS = 10_000_000
# The number of rows in which to look for the separator.
_SEPARATOR_ROWS = 100
_SEPARATORS = (",", ";", "\t", "|")
_FORMATS = {
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
}
_UTF_16 = "UTF-16"
# Texts in use for a missing value.
_BLANK_TEXTS = frozenset({"null", "na", "n/a", "none", "nan", "-", "?"})
_INTEGER = re.compile(r"[+-]?\d{1,38}", re.ASCII)
_POINT = re.compile(r"[+-]?\d*\.?\d+", re.ASCII)
_COMMA = re.compile(r"[+-]?\d+(,\d+)?", re.ASCII)
_COMMA_AND_POINTS = re.compile(r"[+-]?\d{1,3}(\.\d{3})*(,\d+)?", re.ASCII)
_POINT_AND_COMMAS = re.compile(r"[+-]?\d{1,3}(,\d{3})*(\.\d+)?", re.ASCII)
_EXPONENT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_ISO_TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d{1,9})?)?(Z|[+-]\d\d:\d\d)?", re.ASCII)
_ISO_DATE = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
# Day and month, or month and day, with or without a time of day.
_OTHER_TIME = re.compile(r"(\d\d?)([./-])(\d\d?)\2(\d{4})(?:[ T](\d\d?):\d\d(:\d\d)?( ?[AaPp][Mm])?)?", re.ASCII)
_OTHER_YEAR_FIRST = re.compile(r"\d{4}([./])\d\d\1\d\d(?: \d\d:\d\d(:\d\d)?)?", re.ASCII)
_EPOCHS = {10: "timestamp_seconds", 13: "timestamp_millis", 16: "timestamp_micros"}
_TIME_NAME = re.compile(r"time|date|_at$|(^|_)(at|ts|when|epoch)($|_)", re.IGNORECASE)
# Names of money columns. These have cents even if the first rows show none.
_MONEY_NAME = re.compile(r"(^|[_ ])(amount|price|cost|fee|balance|total|betrag|preis)$", re.IGNORECASE)
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}", re.ASCII)
_ARROW_TYPES: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (pa.types.is_boolean, "boolean"), (pa.types.is_int8, "tinyint"), (pa.types.is_int16, "smallint"),
    (pa.types.is_uint8, "smallint"), (pa.types.is_int32, "int"), (pa.types.is_uint16, "int"),
    (pa.types.is_int64, "bigint"), (pa.types.is_uint32, "bigint"), (pa.types.is_uint64, "decimal(20,0)"),
    (pa.types.is_string, "string"), (pa.types.is_large_string, "string"), (pa.types.is_date, "date"),
)  # fmt: skip


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
    """The first rows of a file, by column. `types` has the guesses for a file whose columns have types."""

    format: str
    columns: dict[str, list[Any]]
    rows: int
    is_all: bool
    options: dict[str, str] = field(default_factory=dict)
    types: dict[str, _Guess] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


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
    guesses = {
        column: sample.types.get(column) or _add_cents(column, _guess_type(column, values))
        for column, values in sample.columns.items()
    }
    names = _name_fields(sample.columns)
    return _Draft(name or _name_stream(file), str(path), file, sample, guesses, names).write()


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
        encoding = _find_encoding(file)
        if format_ == "json" and encoding != "utf-8-sig":
            raise SetupError(
                f"{file} is {encoding}, but JSON must be UTF-8; convert it: `iconv -f {encoding} -t UTF-8`"
            )
        with _open(file, encoding) as lines:
            sample = _read_csv(lines, file) if format_ == "csv" else _read_json(lines, file)
    except (OSError, EOFError, UnicodeDecodeError, csv.Error, pa.ArrowException) as error:
        raise SetupError(f"{file} cannot be read as {format_}: {first_line(error)}") from error
    if encoding == "utf-8-sig":
        return sample
    # Spark ends a line at a single byte, which in UTF-16 may be half a character.
    whole = {"multiLine": "true"} if encoding == _UTF_16 else {}
    return _Sample(**{**vars(sample), "options": {**sample.options, "encoding": encoding, **whole}})


def _open(file: Path, encoding: str) -> IO[str]:
    opened = gzip.open if file.suffix == ".gz" else open
    return cast("IO[str]", opened(file, "rt", encoding=encoding, newline=""))


def _find_encoding(file: Path) -> str:
    """Returns UTF-16 if the file has its byte-order mark, UTF-8 if it is valid UTF-8, else Excel's western encoding."""
    opened = gzip.open if file.suffix == ".gz" else open
    with cast("IO[bytes]", opened(file, "rb")) as content:
        head = content.read(1_000)
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return _UTF_16
    if b"\0" in head:
        raise SetupError(
            f"{file} has NUL bytes; if it is UTF-16 without a BOM, convert it: `iconv -f UTF-16LE -t UTF-8`"
        )
    try:
        with _open(file, "utf-8-sig") as lines:
            for line in islice(lines, SAMPLE_ROWS):
                if len(line) > _MAX_LINE_CHARACTERS:
                    raise SetupError(f"{file} has a line of {len(line):,} characters; write one event per line")
    except UnicodeDecodeError:
        return "windows-1252"
    return "utf-8-sig"


def _read_csv(text: IO[str], file: Path) -> _Sample:
    lines = text.readlines(4_000_000)
    if lines and re.fullmatch(r"(?i)sep=.?\s*", lines[0]):
        raise SetupError(
            f"{file}: its first line is {lines[0].strip()!r}, which only Excel reads; delete that line: "
            f"`tail -n +2 {shlex.quote(file.name)}`"
        )
    is_all = not text.readline()
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
    return _Sample("csv", columns, len(whole), is_all and len(rows) < SAMPLE_ROWS, options, notes=tuple(notes))


def _require_different_names(names: Sequence[str], file: Path) -> None:
    """Raises SetupError if two columns have the same name, ignoring case."""
    places: dict[str, list[int]] = {}
    for at, name in enumerate(names, 1):
        places.setdefault(name.lower(), []).append(at)
    for listed in places.values():
        if len(listed) > 1 and names[listed[0] - 1]:
            same = ", ".join(repr(names[at - 1]) for at in listed)
            raise SetupError(
                f"{file}: the columns {', '.join(map(str, listed))} are named {same}, the same name to Spark; "
                "give each its own name"
            )


def _find_separator(lines: Sequence[str]) -> str:
    """Returns the separator with which most rows match the header's width; on a tie, the one with most values."""

    def score(separator: str) -> tuple[bool, float, int]:
        rows = [row for row in islice(csv.reader(lines, delimiter=separator), _SEPARATOR_ROWS) if row]
        width = len(rows[0]) if rows else 0
        return width > 1, sum(len(row) == width for row in rows) / max(len(rows), 1), width

    return max(_SEPARATORS, key=score)


def _read_json(lines: IO[str], file: Path) -> _Sample:
    columns: dict[str, list[Any]] = {}
    rows = 0
    for number, line in enumerate(islice(lines, SAMPLE_ROWS), 1):
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
        for name, value in event.items():
            columns.setdefault(name, [None] * rows).append(value)
        rows += 1
        for values in columns.values():
            if len(values) < rows:
                values.append(None)
    if rows == 1 and len(columns) == 1:
        ((name, (value,)),) = columns.items()
        if isinstance(value, list) and all(isinstance(item, dict) for item in value):
            raise SetupError(
                f"{file} is one object with a list of {len(value):,} objects in {name!r}, as CloudTrail writes it; "
                f"write one event per line: `jq -c '.[{json.dumps(name)}][]'` does this"
            )
    columns, notes = _keep_most_frequent(columns)
    return _Sample("json", columns, rows, not lines.readline(), notes=tuple(notes))


def _keep_most_frequent(columns: dict[str, list[Any]]) -> tuple[dict[str, list[Any]], list[str]]:
    """Keeps the most frequent of the keys that differ only in case. Returns the columns, and a note per dropped key."""
    chosen: dict[str, str] = {}
    for name in sorted(columns, key=lambda name: columns[name].count(None)):
        chosen.setdefault(name.lower(), name)
    notes = [
        f"the key {name!r} differs from {chosen[name.lower()]!r} only in case and is not read; rename one of them"
        for name in columns
        if chosen[name.lower()] != name
    ]
    return {name: values for name, values in columns.items() if chosen[name.lower()] == name}, notes


def _read_parquet(file: Path) -> _Sample:
    # Spark reads times of the legacy type INT96 in microseconds.
    with pq.ParquetFile(file, coerce_int96_timestamp_unit="us") as parquet:
        batch = next(iter(parquet.iter_batches(SAMPLE_ROWS)), None)
        total = parquet.metadata.num_rows
    if batch is None:
        return _Sample("parquet", {}, 0, True)
    table = pa.Table.from_batches([batch])
    _require_different_names(table.column_names, file)
    unreadable = [f"{each.name} ({each.type})" for each in table.schema if _is_unreadable(each.type)]
    if unreadable:
        raise SetupError(
            f"{file}: Spark cannot read columns of these types: {', '.join(unreadable)}; "
            "write the file without them, or with other types"
        )
    types = {column.name: _guess_from_type(column.name, column.type, table[column.name]) for column in table.schema}
    columns = {name: table[name].to_pylist() if types[name].type else [] for name in table.column_names}
    return _Sample("parquet", columns, table.num_rows, table.num_rows == total, types=types)


def _is_unreadable(kind: pa.DataType) -> bool:
    return bool(pa.types.is_time(kind) or pa.types.is_float16(kind) or pa.types.is_decimal256(kind))


def _guess_from_type(name: str, kind: pa.DataType, values: Any) -> _Guess:
    """Guesses the field of a column that has a type."""
    if pa.types.is_timestamp(kind):
        if kind.unit == "ns":
            column = f"timestamp_micros({quote_identifier(name)} div 1000)"
            return _Guess("timestamp", column, "in nanoseconds, truncated to microseconds")
        return _Guess("timestamp", note="" if kind.tz else "without a zone: taken as UTC")
    if pa.types.is_dictionary(kind):
        return _guess_from_type(name, kind.value_type, values.cast(kind.value_type))
    if pa.types.is_decimal(kind):
        if kind.precision <= 38 and 0 <= kind.scale <= kind.precision:
            return _Guess(f"decimal({kind.precision},{kind.scale})")
        return _Guess("", note=f"is {kind}, which no field can hold")
    if pa.types.is_floating(kind):
        return _add_cents(name, _guess_floats([value for value in values.to_pylist() if value is not None]))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        element = _guess_from_type(name, kind.value_type, values.combine_chunks().flatten())
        return (
            _Guess(f"array<{element.type}>")
            if element.type and not element.expression
            else _Guess("", note=f"is {kind}, which no field can hold")
        )
    known = next((type_ for is_kind, type_ in _ARROW_TYPES if is_kind(kind)), "")
    if known == "bigint":
        return _guess_epoch(name, [str(value) for value in values.to_pylist() if value is not None]) or _Guess(known)
    if pa.types.is_struct(kind):
        return _Guess(
            "", note=f'is a struct; declare a part of it under columns, such as part: "{quote_identifier(name)}.part"'
        )
    return _Guess(known) if known else _Guess("", note=f"is {kind}, which no field can hold")


def _guess_floats(values: Sequence[float]) -> _Guess:
    """Guesses a decimal for doubles with few digits: money is often a double, and its shortest text is exact."""
    texts = [format(Decimal(repr(value)), "f") for value in values if value == value and abs(value) != float("inf")]
    guess = _guess_numbers(texts) if texts and len(texts) == len(values) else None
    if guess is None or not guess.type.startswith("decimal(18") or int(guess.type[11:-1]) > 4:
        return _Guess("double", note="to sum it, cast it to a decimal: sum(cast(x as decimal(18,2)))")
    return _Guess(guess.type, note=f"a double in the file; {guess.note}" if guess.note else "a double in the file")


# Guessing ------------------------------------------------------------------------------------------------------------


def _add_cents(name: str, guess: _Guess) -> _Guess:
    """Returns the guess, widened to two digits after the point if the name suggests money and fewer were seen."""
    if not _MONEY_NAME.search(name) or guess.type not in ("bigint", "decimal(18,1)"):
        return guess
    return _Guess(
        "decimal(18,2)", guess.expression, "money, by its name; more than 2 digits after the point are rejected"
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
        return (_guess_epoch(name, texts) if kinds == {int} else None) or _guess_numbers(texts) or _Guess("double")
    if kinds == {list}:
        element = _guess_type(name, [item for value in known for item in value])
        plain = element.type and not element.expression and not element.type.startswith("array")
        return (
            _Guess(f"array<{element.type}>")
            if plain
            else _Guess("", note="is a list of objects, which no field can hold")
        )
    if kinds == {dict}:
        parts = ", ".join(map(str, known[0]))
        example = next(iter(known[0]), "part")
        example_column = (
            f"{_simplify_name(f'{name}_{example}')}: \"get_json_object({quote_identifier(name)}, '$.{example}')\""
        )
        return _Guess("", note=f"is an object ({parts}); declare a part of it under columns, such as {example_column}")
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
    value = f"nullif({quote_identifier(name)}, '{blank}')"
    expression = guess.expression.replace(quote_identifier(name), value) if guess.expression else value
    note = f"{'1 value is' if count == 1 else f'{count:,} values are'} {blank!r}, read as null"
    return _Guess(guess.type, expression, f"{guess.note}; {note}" if guess.note else note)


def _guess_plain_texts(name: str, texts: Sequence[str]) -> _Guess | None:
    if all(text.lower() in ("true", "false") for text in texts):
        return _Guess("boolean")
    return (
        _guess_epoch(name, texts)
        or _guess_numbers(texts)
        or _guess_local_numbers(name, texts)
        or _guess_times(name, texts)
    )


def _guess_epoch(name: str, texts: Sequence[str]) -> _Guess | None:
    lengths = {len(text) for text in texts}
    if not texts or len(lengths) != 1 or not _TIME_NAME.search(name) or not all(map(str.isdigit, texts)):
        return None
    function = _EPOCHS.get(lengths.pop())
    if function is None:
        return None
    return _Guess("timestamp", f"{function}(cast({quote_identifier(name)} as bigint))", "counted from 1970-01-01")


def _guess_numbers(texts: Sequence[str]) -> _Guess | None:
    if all(map(_INTEGER.fullmatch, texts)):
        if any(text.lstrip("+-")[0] == "0" and len(text.lstrip("+-")) > 1 for text in texts):
            return _Guess("string", note="has leading zeros, which a number would lose")
        digits = max(len(text.lstrip("+-")) for text in texts)
        return _Guess(
            "bigint" if digits <= 18 else "string", note="" if digits <= 18 else f"numbers of {digits} digits"
        )
    if all(map(_POINT.fullmatch, texts)):
        scale = max(len(text.partition(".")[2]) for text in texts)
        whole = max(len(text.partition(".")[0].lstrip("+-")) for text in texts)
        return _make_decimal(whole, scale)
    return _Guess("double") if all(map(_EXPONENT.fullmatch, texts)) else None


def _make_decimal(whole: int, scale: int) -> _Guess:
    """Returns a decimal with room for larger numbers than those seen."""
    precision = 18 if max(whole, 9) + scale <= 18 else 38
    if whole + scale > 38:
        return _Guess("double", note="more digits than a decimal can hold")
    seen = "1 digit" if scale == 1 else f"{scale} digits"
    return _Guess(f"decimal({precision},{scale})", note=f"at most {seen} after the point were seen; more are rejected")


def _guess_local_numbers(name: str, texts: Sequence[str]) -> _Guess | None:
    """Guesses numbers with a decimal comma, or with separators between thousands."""
    column = quote_identifier(name)
    for form, fraction, expression in (
        (_COMMA, ",", f"replace({column}, ',', '.')"),
        (_COMMA_AND_POINTS, ",", f"replace(replace({column}, '.', ''), ',', '.')"),
        (_POINT_AND_COMMAS, ".", f"replace({column}, ',', '')"),
    ):
        if all(map(form.fullmatch, texts)):
            parts = [text.partition(fraction) for text in texts]
            lengths = {len(part[2]) for part in parts if part[1]}
            if form is _COMMA and lengths == {3} and all(map(_POINT_AND_COMMAS.fullmatch, texts)):
                return _Guess(
                    "string", note=f"is {texts[0]!r} a thousand or a fraction? see numbers in docs/streams.md"
                )
            whole = max(sum(map(str.isdigit, part[0])) for part in parts)
            guess = _make_decimal(whole, max(lengths, default=0))
            return _Guess(guess.type, expression, guess.note)
    return None


def _guess_times(name: str, texts: Sequence[str]) -> _Guess | None:
    column = quote_identifier(name)
    if all(map(_ISO_TIME.fullmatch, texts)):
        is_local = any(not _ISO_TIME.fullmatch(text)[3] for text in texts)  # type: ignore[index]
        return _Guess("timestamp", note="without a zone: taken as UTC" if is_local else "")
    if all(map(_ISO_DATE.fullmatch, texts)):
        return _Guess("date")
    if all(map(_OTHER_YEAR_FIRST.fullmatch, texts)):
        mark = texts[0][4]
        return _make_time(column, f"yyyy{mark}MM{mark}dd", texts)
    matches = [match for match in map(_OTHER_TIME.fullmatch, texts) if match]
    if len(matches) < len(texts) or len({match[2] for match in matches}) != 1:
        return None
    mark, first = matches[0][2], max(int(match[1]) for match in matches)
    second = max(int(match[3]) for match in matches)
    if first > 12 < second:
        return None
    is_day_first = first > 12 or (second <= 12 and mark == ".")
    day = f"d{mark}M{mark}yyyy" if is_day_first else f"M{mark}d{mark}yyyy"
    is_open = first <= 12 and second <= 12 and mark != "."
    return _make_time(column, day, texts, "is the month first, or the day?" if is_open else "")


def _make_time(column: str, day: str, texts: Sequence[str], note: str = "") -> _Guess:
    clocks = [text.count(":") for text in texts]
    if not any(clocks):
        return _Guess("date", f"to_date({column}, '{day}')", note)
    seconds = "" if max(clocks) == 1 else ":ss" if min(clocks) == 2 else "[:ss]"
    halves = texts[0][-1] in "mM"
    between = "'T'" if "T" in texts[0][:11] else " "
    pattern = f"{day}{between}{'h' if halves else 'H'}:mm{seconds}"
    pattern += (" a" if texts[0][-3] == " " else "a") if halves else ""
    zone = "without a zone: taken as UTC"
    escaped = pattern.replace("'", "\\'")
    return _Guess("timestamp", f"to_timestamp({column}, '{escaped}')", f"{zone}; {note}" if note else zone)


# Names ---------------------------------------------------------------------------------------------------------------


def _simplify_name(name: str) -> str:
    text = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    text = re.sub(r"\W+", "_", text).strip("_").lower()[:128] or "field"
    return f"f_{text}"[:128] if text[0].isdigit() else text


def _name_fields(columns: Iterable[str]) -> dict[str, str]:
    """Maps each column to a field name: its own if that is valid and unique ignoring case."""
    names: dict[str, str] = {}
    for column in columns:
        name = column if _PLAIN_NAME.fullmatch(column) else _simplify_name(column)
        taken = {each.lower() for each in names.values()} | RESERVED_FIELDS | {POSITION}
        options = [name, *(f"{name}_{number}" for number in range(2, len(taken) + 3))]
        names[column] = next(option for option in options if option.lower() not in taken)
    return names


def _name_stream(file: Path) -> str:
    stem = file.name.partition(".")[0]
    name = _simplify_name(stem).lower()
    return name[:63]


# Writing -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Draft:
    """Writes the declaration from the guesses. `names` maps columns to field names."""

    name: str
    path: str
    file: Path
    sample: _Sample
    guesses: dict[str, _Guess]
    names: dict[str, str]

    def write(self) -> str:
        """Returns the declaration as YAML."""
        ids, times = self._find_ids(), self._find_times()
        lines = [*self._write_head(), self._write_line("stream", self.name, "the name of the events table")]
        columns = self._find_expressions(times[:1])
        fields = {self.names[column]: guess for column, guess in self.guesses.items() if guess.type}
        if times:
            time = fields[times[0]]
            if time.type == "date":
                note = "dates without a time of day: all events of a day are at midnight"
                fields[times[0]] = _Guess("timestamp", time.expression, note)
        if ids:
            lines.append(self._write_line("event_id", ids[0], self._write_alternatives("unique in these rows", ids)))
        else:
            id_field = _find_free_name("event_id", fields)
            fields = {id_field: _Guess("string", note="a hash of the row: equal rows count as one event"), **fields}
            columns = {id_field: self._write_hash(), **columns}
            lines.append(
                self._write_line(
                    "event_id", id_field, "no column is unique, so it is a hash of all; a real id is better"
                )
            )
        if times:
            lines.append(self._write_line("event_time", times[0], self._write_alternatives("", times)))
        else:
            lines.append(
                self._write_line(
                    "event_time", "TODO", "no column looks like a time: set the field with the event's time"
                )
            )
        lines.append("fields:")
        lines += [self._write_line(f"  {name}", guess.type, guess.note) for name, guess in fields.items()]
        for column, guess in self.guesses.items():
            if not guess.type:
                lines.append(f"  # {column} {guess.note}")
        if columns:
            lines.append("columns:                       # fields computed from the file's columns, in Spark SQL")
            lines += [f"  {name}: {_write_scalar(expression)}" for name, expression in columns.items()]
        lines += [
            self._write_line("max_out_of_orderness", "10 seconds", "how far events may be out of order"),
            self._write_line("allowed_lateness", "1 hour", "how late an event may be and still count"),
            self._write_line(
                "max_future", "1 hour", "at most the sum of the two above: one fast clock makes other events late"
            ),
            *self._write_source(),
        ]
        return "\n".join(lines) + "\n"

    def _write_head(self) -> Iterator[str]:
        rows = f"all {self.sample.rows:,} rows" if self.sample.is_all else f"its first {self.sample.rows:,} rows"
        yield f"# Drafted from {self.file.name}, {rows}. Read every line, edit it, and save it as conf/streams/{self.name}.yml."
        yield "# docs/streams.md explains every key."
        yield from (f"# {note}" for note in self.sample.notes)

    def _write_line(self, key: str, value: str, note: str = "") -> str:
        text = f"{key}: {_write_scalar(value)}"
        return f"{text:<30} # {note}" if note else text

    def _write_alternatives(self, note: str, names: Sequence[str]) -> str:
        alternatives = f"could also be {', '.join(names[1:4])}" if len(names) > 1 else ""
        return "; ".join(part for part in (note, alternatives) if part)

    def _find_ids(self) -> list[str]:
        """Finds the fields whose values are unique in these rows, the likeliest id first."""
        candidates = []
        for at, (column, guess) in enumerate(self.guesses.items()):
            values = self.sample.columns[column]
            is_key = guess.type in ("string", "bigint", "int", "smallint", "tinyint") and not guess.expression
            if is_key and None not in values and len(set(values)) == len(values):
                name = self.names[column].lower()
                is_named = name in ("id", "event_id", f"{self.name}_id", f"{self.name.removesuffix('s')}_id")
                candidates.append(
                    (not is_named, not re.search(r"(^|_)(id|key|nr|no|number|uuid)$", name), at, self.names[column])
                )
        return [name for *_, name in sorted(candidates)]

    def _find_times(self) -> list[str]:
        """Finds the fields that can be the event's time, the likeliest first: times before dates, then complete."""
        candidates = []
        for at, (column, guess) in enumerate(self.guesses.items()):
            if guess.type in ("timestamp", "date"):
                name = self.names[column]
                is_named = name.lower() in ("event_time", "time", "timestamp", "ts", "at")
                candidates.append((guess.type == "date", None in self.sample.columns[column], not is_named, at, name))
        return [name for *_, name in sorted(candidates)]

    def _find_expressions(self, time: Sequence[str]) -> dict[str, str]:
        """Maps each field that differs from the column of its name to its expression."""
        expressions = {}
        for column, guess in self.guesses.items():
            name = self.names[column]
            if guess.type and (guess.expression or name != column):
                expressions[name] = guess.expression or quote_identifier(column)
        return expressions

    def _write_hash(self) -> str:
        parts = ", ".join(
            f"coalesce(cast({quote_identifier(column)} as string), '')"
            for column, guess in self.guesses.items()
            if guess.type
        )
        return f"sha2(concat_ws('|', {parts}), 256)"

    def _write_source(self) -> Iterator[str]:
        yield "source:                        # where ingest looks by default"
        yield f"  format: {self.sample.format}"
        yield f"  path: {_write_scalar(self.path)}"
        if self.sample.options:
            yield f"  options: {json.dumps(self.sample.options)}"


def _find_free_name(name: str, taken: Iterable[str]) -> str:
    lowered = {each.lower() for each in taken}
    options = (name, *(f"{name}_{number}" for number in range(2, len(lowered) + 3)))
    return next(option for option in options if option.lower() not in lowered)


def _write_scalar(text: str) -> str:
    """Formats a text as a YAML scalar on one line."""
    if re.search(r"""[`'"|{}\[\],:#&*!%@\\]""", text):
        return json.dumps(text, ensure_ascii=False) if not text.startswith("decimal(") else text
    return yaml.safe_dump(text, width=10_000, allow_unicode=True).splitlines()[0]
