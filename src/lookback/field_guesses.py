"""Guesses the type of a field from the values of a column."""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from lookback.core.streams.fields import is_field_name
from lookback.core.values.notation import is_day
from lookback.core.values.texts import quote_identifier
from lookback.core.values.times import parse_calendar_time

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
_ARROW_TYPES = {"int8": "tinyint", "int16": "smallint", "int32": "int", "int64": "bigint", "uint64": "decimal(20,0)"}
_ARROW_TYPES |= {"uint8": "smallint", "uint16": "int", "uint32": "bigint", "bool": "boolean"}
_ARROW_TYPES |= {"string": "string", "large_string": "string", "date32[day]": "date", "date64[ms]": "date"}


@dataclass(frozen=True)
class FieldGuess:
    """A guess at the field of a column.

    `type` is empty if the column cannot be a field; `note`, the comment in the draft, then says why. `expression`
    computes the field from the column; it is empty if the field is the column itself.
    """

    type: str
    expression: str = ""
    note: str = ""


def guess_from_type(name: str, values: pa.Array) -> FieldGuess:
    """Guesses the field of a column that has a type."""
    kind, column = values.type, quote_identifier(name)
    if pa.types.is_dictionary(kind):
        return guess_from_type(name, values.cast(kind.value_type))
    if pa.types.is_timestamp(kind):
        if kind.unit == "ns":
            note = "in nanoseconds, truncated to microseconds"
            return FieldGuess("timestamp", f"timestamp_micros({column} div 1000)", note)
        return FieldGuess("timestamp", note="" if kind.tz else "without a zone: taken as UTC")
    if pa.types.is_decimal(kind) and kind.precision <= 38 and 0 <= kind.scale <= kind.precision:
        return FieldGuess(f"decimal({kind.precision},{kind.scale})")
    if pa.types.is_floating(kind):
        return add_cents(name, _guess_floats(values.drop_null().to_pylist()))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        element = guess_from_type(name, values.flatten())
        if element.type and not element.expression and not element.type.startswith("struct"):
            return FieldGuess(f"array<{element.type}>")
    if pa.types.is_struct(kind):
        parts = {part.name: guess_from_type(part.name, pc.struct_field(values, part.name)) for part in kind}
        return _join_parts(parts)
    known = _ARROW_TYPES.get(str(kind), "")
    epoch = _guess_epoch(name, [str(value) for value in values.drop_null().to_pylist()]) if known == "bigint" else None
    return epoch or FieldGuess(known, note="" if known else f"is {kind}, which no field can hold")


def _guess_floats(values: Sequence[float]) -> FieldGuess:
    """Guesses a decimal for doubles with few digits: money is often a double, and its shortest text is exact."""
    texts = [format(Decimal(repr(value)), "f") for value in values if math.isfinite(value)]
    guess = _guess_numbers("", texts) if texts and len(texts) == len(values) else None
    if guess is None or not guess.type.startswith("decimal(18") or int(guess.type[11:-1]) > 4:
        return FieldGuess("double", note="to sum it, cast it to a decimal: sum(cast(x as decimal(18,2)))")
    return replace(guess, note=join_notes("a double in the file", guess.note))


def add_cents(name: str, guess: FieldGuess) -> FieldGuess:
    """Returns the guess, widened to two digits after the point if the name suggests money and fewer were seen."""
    if not _MONEY_NAME.search(name) or guess.type not in ("bigint", "decimal(18,1)"):
        return guess
    return replace(
        guess, type="decimal(18,2)", note="money, by its name; more than 2 digits after the point are rejected"
    )


def guess_from_values(name: str, values: Iterable[Any]) -> FieldGuess:
    """Guesses the field of a column of texts, or of what JSON has."""
    known = [value for value in values if value is not None]
    kinds = {type(value) for value in known}
    if not known:
        return FieldGuess("string", note="has no value in these rows")
    if kinds == {str}:
        return _guess_texts(name, known)
    if kinds == {bool}:
        return FieldGuess("boolean")
    if kinds <= {int, Decimal}:
        texts = [format(Decimal(value), "f") for value in known]
        return (kinds == {int} and _guess_epoch(name, texts)) or _guess_numbers(name, texts) or FieldGuess("double")
    if kinds == {list}:
        element = guess_from_values(name, [item for value in known for item in value])
        if element.type and not element.expression and not element.type.startswith(("array", "struct")):
            return FieldGuess(f"array<{element.type}>")
        return FieldGuess("", note="is a list of objects, which no field can hold")
    if kinds == {dict}:
        names = dict.fromkeys(part for value in known for part in value)
        return _join_parts({part: guess_from_values(part, [value.get(part) for value in known]) for part in names})
    return FieldGuess(
        "string", note=f"has values of several kinds: {', '.join(sorted(kind.__name__ for kind in kinds))}"
    )


def _join_parts(guesses: Mapping[str, FieldGuess]) -> FieldGuess:
    """Guesses the field of a struct. Parts that cannot be fields, or must be computed, are left out."""
    # Spark takes names of parts that differ only in case for the same; the first one is kept.
    first = {name.lower(): name for name in reversed(list(guesses))}
    types = {
        name: guess.type
        for name, guess in guesses.items()
        if first[name.lower()] == name and not guess.expression and is_field_name(name)
    }
    parts = ",".join(f"{name}:{type_}" for name, type_ in types.items() if type_)
    out = [name for name in guesses if not types.get(name)]
    note = f"leaves out {', '.join(out)}; map such a part in columns to a field of its own" if out else ""
    return FieldGuess(f"struct<{parts}>" if parts else "", note=note)


def _guess_texts(name: str, texts: Sequence[str]) -> FieldGuess:
    guess = _guess_plain_texts(name, texts)
    if guess is not None:
        return guess
    # A column of numbers or times may use a word such as n/a for a missing value.
    blanks = Counter(text for text in texts if text.strip().lower() in _BLANK_TEXTS)
    others = [text for text in texts if text not in blanks]
    guess = _guess_plain_texts(name, others) if others and len(blanks) == 1 else None
    if guess is None:
        return FieldGuess("string")
    ((blank, count),) = blanks.items()
    column = quote_identifier(name)
    expression = (guess.expression or column).replace(column, f"nullif({column}, '{blank}')")
    values = "1 value is" if count == 1 else f"{count:,} values are"
    return replace(guess, expression=expression, note=join_notes(guess.note, f"{values} {blank!r}, read as null"))


def _guess_plain_texts(name: str, texts: Sequence[str]) -> FieldGuess | None:
    if all(text.lower() in ("true", "false") for text in texts):
        return FieldGuess("boolean")
    return _guess_epoch(name, texts) or _guess_numbers(name, texts) or _guess_times(name, texts)


def _guess_epoch(name: str, texts: Sequence[str]) -> FieldGuess | None:
    lengths = {len(text) for text in texts}
    function = _EPOCHS.get(lengths.pop()) if len(lengths) == 1 else None
    if not function or not _TIME_NAME.search(name) or not all(map(str.isdigit, texts)):
        return None
    return FieldGuess("timestamp", f"{function}(cast({quote_identifier(name)} as bigint))", "counted from 1970-01-01")


def _guess_numbers(name: str, texts: Sequence[str]) -> FieldGuess | None:
    if all(map(_INTEGER.fullmatch, texts)):
        bare = [text.lstrip("+-") for text in texts]
        if any(text[0] == "0" and len(text) > 1 for text in bare):
            return FieldGuess("string", note="has leading zeros, which a number would lose")
        digits = max(map(len, bare))
        return FieldGuess("bigint") if digits <= 18 else FieldGuess("string", note=f"numbers of {digits} digits")
    for form, mark, expression in _NUMBER_FORMS:
        if all(map(form.fullmatch, texts)):
            parts = [text.partition(mark) for text in texts]
            scales = {len(fraction) for _, found, fraction in parts if found}
            if form is _COMMA and scales == {3} and all(map(_POINT_AND_COMMAS.fullmatch, texts)):
                question = f"is {texts[0]!r} a thousand or a fraction? see numbers in docs/streams.md"
                return FieldGuess("string", note=question)
            whole = max(sum(map(str.isdigit, part)) for part, _, _ in parts)
            guess = _guess_decimal(whole, max(scales, default=0))
            return replace(guess, expression=expression.format(quote_identifier(name)))
    return FieldGuess("double") if all(map(_EXPONENT.fullmatch, texts)) else None


def _guess_decimal(whole: int, scale: int) -> FieldGuess:
    """Returns a decimal with room for larger numbers than those seen."""
    if whole + scale > 38:
        return FieldGuess("double", note="more digits than a decimal can hold")
    precision = 18 if max(whole, 9) + scale <= 18 else 38
    seen = "1 digit" if scale == 1 else f"{scale} digits"
    return FieldGuess(
        f"decimal({precision},{scale})", note=f"at most {seen} after the point were seen; more are rejected"
    )


def _guess_times(name: str, texts: Sequence[str]) -> FieldGuess | None:
    if all(map(_is_time, texts)):
        if all(map(is_day, texts)):
            return FieldGuess("date")
        is_local = not all(map(_ZONE.search, texts))
        return FieldGuess("timestamp", note="without a zone: taken as UTC" if is_local else "")
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
        return FieldGuess("date", f"to_date({column}, '{day}')", note)
    seconds = [bool(match[6]) for match in matches]
    pattern = day + ("\\'T\\'" if matches[0][5] == "T" else " ") + ("h" if matches[0][8] else "H") + ":mm"
    pattern += (":ss" if all(seconds) else "[:ss]") if any(seconds) else ""
    pattern += f"{matches[0][7]}a" if matches[0][8] else ""
    return FieldGuess(
        "timestamp", f"to_timestamp({column}, '{pattern}')", join_notes("without a zone: taken as UTC", note)
    )


def _is_time(text: str) -> bool:
    """Returns whether ingest reads the text as a time."""
    try:
        parse_calendar_time(text)
    except ValueError:
        return False
    return True


def join_notes(*notes: str) -> str:
    """Joins the notes that are not empty."""
    return "; ".join(filter(None, notes))


def simplify_name(name: str) -> str:
    """Makes a lower-case name of ASCII letters, digits and underscores."""
    text = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    text = re.sub(r"\W+", "_", text).strip("_").lower()[:128] or "field"
    return f"f_{text}"[:128] if text[0].isdigit() else text
