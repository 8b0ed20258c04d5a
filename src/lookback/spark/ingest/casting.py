"""Writes SQL that casts values to a declared type and checks that the result is exact, and suggests a remedy if not.

Spark's casts silently round decimals, truncate fractions and times of day, and turn numbers that are too large into
infinity. Only floats and doubles may be rounded to the nearest value, since that is what these types mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegralType,
    StringType,
    TimestampNTZType,
    TimestampType,
)

from lookback.core.expressions.syntax import name_as_sql
from lookback.core.values.notation import BASIC_TIME, BLANKS, DATE, FALSE, INTEGER, NOT_FINITE, NUMBER, TIME, TRUE
from lookback.core.values.times import DAY_US

if TYPE_CHECKING:
    from pyspark.sql import Column

    from lookback.core.values.types import DataType as FieldType

# Matches text times without a zone after the time of day.
_NO_ZONE = "[Tt ][0-9:.,]+"
# Functions for times counted from 1970, by the number of digits such times have today.
_EPOCHS = {10: "timestamp_seconds", 13: "timestamp_millis", 16: "timestamp_micros"}
_NANOSECOND_DIGITS = 19
_INFINITY = "double('Infinity')"
# Formats that remedies show.
_DAY_FORMAT, _TIME_FORMAT = "'dd.MM.yyyy'", "'dd.MM.yyyy HH:mm:ss'"


def write_cast(sql: str, source: DataType, target: FieldType, *, json: bool) -> str:
    """Writes the cast of `sql`, an expression of type `source`, to `target`; the cast gives NULL if it fails.

    With `json`, arrays are in text as JSON.
    """
    if _is_json_array(source, target, json):
        sql, source = _write_json_array(sql, target), _make_text_type(target)
    return _write_cast(sql, source, target, 0)


def _write_cast(sql: str, source: DataType, target: FieldType, level: int) -> str:
    if isinstance(source, ArrayType) and target.element is not None:
        item = f"__x{level}"
        return f"transform({sql}, {item} -> {_write_cast(item, source.elementType, target.element, level + 1)})"
    if isinstance(source, StringType):
        # A text keeps its blanks; around other values they mean nothing.
        return sql if target.name == "string" else _write_reading(_write_trim(sql), target)
    if target.name == "timestamp" and not isinstance(source, (TimestampType, TimestampNTZType, DateType)):
        # Spark would silently take the number as seconds from 1970.
        return f"if({sql} is null, null, try_cast(null as timestamp))"
    return f"try_cast({sql} as {target})"


def _write_reading(text: str, target: FieldType) -> str:
    """Writes the SQL that parses a trimmed text, by the same patterns as the core."""
    if target.name == "boolean":
        return f"case when {_match(text, TRUE)} then true when {_match(text, FALSE)} then false end"
    if target.name == "timestamp":
        return f"coalesce(if({_match(text, DATE)}, try_cast({text} as timestamp), null), {_write_time(text)})"
    if target.name == "date":
        time = _write_time(text)
        midnight = (
            f"if(unix_micros({time}) % {DAY_US} = 0, date_from_unix_date(int(unix_micros({time}) div {DAY_US})), null)"
        )
        return f"if({_match(text, DATE)}, try_cast({text} as date), {midnight})"
    if target.is_integer:
        # Without a match, the extracted text is empty and the cast gives NULL.
        return f"try_cast(regexp_extract({text}, r'^{INTEGER}\\z', 1) as {target})"
    return _write_decimal(text, str(target)) if target.is_decimal else f"try_cast({text} as {target})"


def _write_decimal(text: str, target: str) -> str:
    """Writes the SQL that parses a decimal, including a zero with a large exponent, which Spark refuses."""
    zero = f"if({_match(text, NUMBER)} and {text} rlike '^[+-]?[0.]+[eE]', try_cast(0 as {target}), null)"
    return f"coalesce(try_cast({text} as {target}), {zero})"


def _write_time(text: str) -> str:
    """Writes the SQL that parses a day with a time of day. Spark's cast supports only the first of these forms."""
    usual = "(?!0000)[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}:[0-9]{2}([.][0-9]+)?(Z|[+-][0-9]{2}:[0-9]{2})?"
    basic = f"regexp_replace({text}, '^(.{{4}})(..)(..).(..)(..)', '$1-$2-$3T$4:$5')"
    basic = f"regexp_replace({basic}, '^(.{{16}})([0-9])', '$1:$2')"
    return (
        f"case when {_match(text, usual)} then try_cast({text} as timestamp)"
        f" when {_match(text, TIME)} then {_write_normal_time(text)}"
        f" when {_match(text, BASIC_TIME)} then {_write_normal_time(basic)} end"
    )


def _write_normal_time(text: str) -> str:
    text = f"regexp_replace(replace(upper({text}), ',', '.'), '([T ][0-9]+:[0-9]+)(?![0-9:])', '$1:00')"
    return f"try_cast({text} as timestamp)"


def _match(text: str, pattern: str) -> str:
    """Writes the condition that the whole text matches a pattern."""
    return f"{text} rlike r'^(?:{pattern})\\z'"


def _write_json_array(sql: str, target: FieldType) -> str:
    """Writes the cast of a JSON array in text to an array of texts, or to NULL. Long numbers keep their digits."""
    texts = _write_text_type(target)
    return f"coalesce(try_variant_get(try_parse_json({sql}), '$', '{texts}'), from_json({sql}, '{texts}'))"


def write_exactness(sql: str, source: DataType, target: FieldType, *, json: bool) -> str:
    """Writes the condition that casting `sql`, which is not NULL, to `target` gives exactly the same value."""
    if _is_json_array(source, target, json):
        return _write_exactness(_write_json_array(sql, target), _make_text_type(target), target, 0)
    return _write_exactness(sql, source, target, 0)


def _is_json_array(source: DataType, target: FieldType, json: bool) -> bool:
    return json and target.name == "array" and isinstance(source, StringType)


def write_is_day_alone(sql: str, source: DataType) -> str:
    """Writes the condition that the value of `sql` is a day without a time of day."""
    if isinstance(source, StringType):
        return _match(_write_trim(sql), DATE)
    return "true" if source.typeName() == "date" else "false"


def write_lacks_zone(sql: str, source: DataType) -> str:
    """Writes the condition that the value of `sql` is a time without a zone."""
    if isinstance(source, StringType):
        return f"{_write_trim(sql)} rlike '{_NO_ZONE}$'"
    return "true" if isinstance(source, TimestampNTZType) else "false"


def _write_text_type(target: FieldType) -> str:
    return f"array<{_write_text_type(target.element)}>" if target.element is not None else "string"


def _make_text_type(target: FieldType) -> DataType:
    return ArrayType(_make_text_type(target.element)) if target.element is not None else StringType()


def _write_exactness(sql: str, source: DataType, target: FieldType, level: int) -> str:
    if target.name == "array":
        if not isinstance(source, ArrayType) or target.element is None:
            return "true"
        item = f"__x{level}"
        inner = _write_exactness(item, source.elementType, target.element, level + 1)
        there = f"{_write_cast(item, source.elementType, target.element, level + 1)} is not null"
        return f"forall({sql}, {item} -> {item} is null or ({there} and {inner}))"
    if isinstance(source, StringType):
        return _write_text_exactness(sql, target)
    value = f"try_cast({sql} as {target})"
    if isinstance(source, BooleanType):
        return "false" if target.is_numeric else "true"
    if target.is_float:
        if isinstance(source, (FloatType, DoubleType)):
            return f"(abs({value}) < {_INFINITY} or isnan({sql}) or abs({sql}) = {_INFINITY})"
        return f"abs({value}) < {_INFINITY}"
    numeric = isinstance(source, (IntegralType, DecimalType, FloatType, DoubleType))
    timed = isinstance(source, (TimestampType, TimestampNTZType))
    if (numeric and (target.is_integer or target.is_decimal or target.name == "boolean")) or (
        timed and (target.is_integer or target.is_decimal or target.name == "date")
    ):
        return f"coalesce(try_cast({value} as {source.simpleString()}) = {sql}, false)"
    return "true"


def _write_text_exactness(sql: str, target: FieldType) -> str:
    text = _write_trim(sql)
    if target.is_decimal:
        return _write_digit_limit(text, target.scale)
    if target.is_float:
        finite = f"({_match(text, NUMBER)} and abs(try_cast({sql} as {target})) < {_INFINITY})"
        return f"({finite} or {_match(text, NOT_FINITE)})"
    return "true"


def _write_digit_limit(text: str, scale: int) -> str:
    """Writes the condition that a number needs at most `scale` digits after the decimal point."""
    whole, fraction = f"regexp_extract({text}, '^[+-]?([0-9]*)', 1)", f"regexp_extract({text}, '[.]([0-9]*)', 1)"
    power = f"try_cast(regexp_extract({text}, '[eE]([+-]?[0-9]+)$', 1) as int)"
    digits = f"concat({whole}, {fraction})"
    shortened = f"trim(trailing '0' from {digits})"
    needed = f"length({fraction}) - {power} - length({digits}) + length({shortened})"
    few = f"({shortened} = '' or {needed} <= {scale})"
    shifted = f"if({text} rlike '^[+-]?[0-9]*[.]?[0-9]*[eE][+-]?[0-9]{{1,6}}$', {few}, false)"
    return f"({text} rlike '^[+-]?[0-9]*[.]?[0-9]{{0,{scale}}}0*$' or {shifted})"


def _write_trim(sql: str) -> str:
    return f"btrim({sql}, '{BLANKS}')"


def suggest_remedy(name: str, type_: FieldType, text: Column, is_inexact: bool) -> Column:
    """Suggests a remedy for a text that is not of a field's type, or, if `is_inexact`, that a cast would change."""
    key, name = name, name_as_sql(name)

    def columns(expression: str) -> str:
        return f'columns: {{{key}: "{expression}"}}'

    separators = F.lit("leave the separators out, by " + columns(f"replace({name}, ',', '')"))
    if type_.is_integer:
        cut = columns(f"cast(cast({name} as decimal(38,9)) as {type_})")
        fraction = F.lit(f"it has a fraction, so declare a decimal, or cut it by {cut}")
        whole = F.when(text.rlike("^[+-]?[0-9]+$"), F.lit("it is too large, so declare bigint or string"))
        whole = whole.when(text.rlike("^[+-]?[0-9]{1,3}(,[0-9]{3})+$"), separators)
        whole = whole.when(text.rlike("^[+-]?[0-9]*[.][0-9]*([eE][+-]?[0-9]+)?$"), fraction)
        return whole.otherwise(F.lit("write a whole number, such as 12"))
    if type_.is_decimal or type_.is_float:
        point = F.lit("write a decimal point, by " + columns(f"replace({name}, ',', '.')"))
        number = F.when(text.rlike("^[+-]?[0-9]{1,3}(,[0-9]{3})+([.][0-9]*)?$"), separators)
        number = number.when(text.rlike("^[+-]?[0-9.]*,[0-9]+$"), point)
        if is_inexact and type_.is_decimal:
            rounded = columns(f"cast({name} as {type_})")
            many = f"it has more than {type_.scale} digits after the point, so declare more, or round it by {rounded}"
            number = number.when(text.rlike("^[+-]?[0-9.]+([eE][+-]?[0-9]+)?$"), F.lit(many))
        number = number.when(
            text.rlike("^[+-]?[0-9.]+([eE][+-]?[0-9]+)?$"), F.lit("it is too large, so declare more digits")
        )
        return number.otherwise(F.lit("write a number, such as 12.50"))
    if type_.name == "date":
        cut, read = columns(f"cast({name} as date)"), columns(f"to_date({name}, {_DAY_FORMAT})")
        timed = F.when(text.contains(":"), F.lit(f"it has a time of day, so declare a timestamp, or cut it by {cut}"))
        return timed.otherwise(F.lit(f"write it as 2026-01-31, or say how it is written by {read}"))
    if type_.name == "timestamp":
        written = F.lit(
            f"write it as 2026-01-31T12:00:00Z, or say how it is written by {columns(f'to_timestamp({name}, {_TIME_FORMAT})')}"
        )
        remedy = F.when(text.rlike("^[0-9]{1,2}:[0-9]{2}"), F.lit("it has no day, so add it, or declare a string"))
        for digits, function in _EPOCHS.items():
            counted = columns(f"{function}(cast({name} as bigint))")
            remedy = remedy.when(
                text.rlike(f"^[0-9]{{{digits}}}$"), F.lit(f"say that it is counted from 1970, by {counted}")
            )
        counted = columns(f"timestamp_micros(cast({name} as bigint) div 1000)")
        nanoseconds = F.lit(f"say that it counts nanoseconds from 1970, by {counted}")
        return remedy.when(text.rlike(f"^[0-9]{{{_NANOSECOND_DIGITS}}}$"), nanoseconds).otherwise(written)
    return F.lit(
        {
            "boolean": "write true or false",
            "array": "write a list of such values, in text as JSON",
        }.get(type_.name, "write a text")
    )
