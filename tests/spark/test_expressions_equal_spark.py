"""Expressions give what Spark's own expr() gives: value, NULL, result type and error, row by row.

Rows mix extremes (least and greatest integers and decimals, leap days, times before the epoch, NaN, empty and non-Latin
texts, NULL) with small values that collide. Rows that Lookback marks as errors are masked in the common query and then
put to Spark one at a time: each must raise.
"""

from __future__ import annotations

import datetime as dt
import math
import random
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.errors import ArithmeticException
from sqlglot import exp

import lookback
from lookback.core.errors import ExpressionError
from lookback.core.expressions.compiling import Expression, compile_expression
from lookback.core.expressions.letters import change_to_lower, change_to_upper
from lookback.core.expressions.syntax import LookbackSql, parse
from lookback.core.values.columns import Column, arrow_type, from_arrow
from lookback.core.values.types import parse_type
from lookback.core.values.zones import find_zone

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SCHEMA = {
    "y": "tinyint", "s": "smallint", "i": "int", "j": "int", "l": "bigint", "m": "bigint",
    "d52": "decimal(5,2)", "d182": "decimal(18,2)", "d180": "decimal(18,0)", "d186": "decimal(18,6)",
    "d2810": "decimal(28,10)", "d380": "decimal(38,0)", "d3818": "decimal(38,18)", "d3838": "decimal(38,38)",
    "f": "float", "x": "double", "z": "double", "b": "boolean", "c": "boolean", "t": "string", "u": "string",
    "n": "string", "day1": "date", "day2": "date", "ts1": "timestamp", "ts2": "timestamp",
    "ai": "array<int>", "at": "array<string>", "ad": "array<decimal(18,2)>", "ax": "array<double>",
}  # fmt: skip
TYPES = {name: parse_type(text) for name, text in SCHEMA.items()}
ROWS = 40
pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("usual_queries")]

_TEXTS = [
    "",
    " ",
    "a",
    "b",
    "A",
    "ab",
    "abc",
    "a%c",
    "a_c",
    "a\\c",
    " ab ",
    "äöÜ",
    "ß",
    "日本語",
    "😀x",
    "ΑΣ",
    "İ",
    "x\ny",
    "aaaa",
]
_NUMBERS = [
    "٣", "5\x7f", "0e38", "0e37", "1e37", "1e38",
    "0", "1", "-1", "+7", " 12 ", "1.5", "1e3", "", "abc", "2147483647", "2147483648", "-9223372036854775808",
    "9223372036854775808", "0.005", "-0.005", "99999999999999999999", "1e-40", "0e50", "true", "No", "T", ".5", "5.", "-.", "1 2",
]  # fmt: skip
_DATES = [
    (1970, 1, 1),
    (1969, 12, 31),
    (2000, 2, 29),
    (2024, 2, 29),
    (1900, 2, 28),
    (2023, 12, 31),
    (2024, 1, 1),
    (1582, 10, 10),
    (1, 1, 1),
    (9999, 12, 31),
]
_DOUBLES = [
    0.0,
    -0.0,
    1.0,
    -1.5,
    2.5,
    0.1,
    1e10,
    -1e18,
    9.3e18,
    9223372036854775807.0,
    1e300,
    -1e-300,
    math.nan,
    math.inf,
    -math.inf,
    123.456,
]


def _integer(bits: int, chance: random.Random) -> int:
    top = 2 ** (bits - 1)
    return chance.choice(
        [0, 1, -1, 2, 3, 5, -7, 10, 100, top - 1, -top, -top + 1, top // 2, chance.randrange(-top, top)]
    )


def _decimal(precision: int, scale: int, chance: random.Random) -> Decimal:
    top = 10**precision - 1
    one = min(10**scale, top)
    number = chance.choice(
        [0, one, -one, 1, -1, one // 2, 5, -5, 3 * one, 1000 * one, top, -top, top // 2, chance.randrange(-top, top)]
    )
    number = max(-top, min(top, number))
    return Decimal((int(number < 0), tuple(map(int, str(abs(number)))), -scale))


def _value(text: str, chance: random.Random) -> Any:
    type_ = parse_type(text)
    if type_.is_integer:
        return _integer(type_.bits, chance)
    if type_.is_decimal:
        return _decimal(type_.precision, type_.scale, chance)
    if type_.is_float:
        value = chance.choice(_DOUBLES)
        return value if type_.name == "double" or not math.isfinite(value) or abs(value) < 1e15 else 1.25
    if type_.name == "boolean":
        return chance.random() < 0.5
    if type_.name == "date":
        return dt.date(*chance.choice(_DATES))
    if type_.name == "timestamp":
        clock = chance.choice([(0, 0, 0, 0), (23, 59, 59, 999_999), (12, 30, 15, 500_000), (1, 2, 3, 4)])
        return dt.datetime(*chance.choice(_DATES), *clock, tzinfo=dt.timezone.utc)
    if type_.element is not None:
        return [_maybe(str(type_.element), chance) for _ in range(chance.randrange(4))]
    return chance.choice(_TEXTS)


def _maybe(text: str, chance: random.Random) -> Any:
    return None if chance.random() < 0.12 else _value(text, chance)


def table(seed: int) -> pa.Table:
    chance = random.Random(seed)
    columns: dict[str, pa.Array[Any]] = {"row": pa.array(range(ROWS), pa.int32())}
    for name, text in SCHEMA.items():
        pick = (lambda: chance.choice([*_NUMBERS, None])) if name == "n" else (lambda text=text: _maybe(text, chance))
        columns[name] = pa.array([pick() for _ in range(ROWS)], arrow_type(TYPES[name]))
    return pa.table(columns)


# Expressions ---------------------------------------------------------------------------------------------------------

WRITTEN = """
i + j | i - j | i * j | i / j | i % j | i div j | l + m | l - m | l * m | l / m | l % m | l div m | y + y | s * s | y - s | -i | -l | -y
abs(i) | abs(l) | abs(y) | abs(d182) | abs(x) | -d182 | -x | - (i) | i + 1 | l + 1 | i + 2147483648 | l * 2 | i / 2 | 7 / 2 | 7 % -2
-9223372036854775808 | -2147483648 | 9223372036854775808 | 99999999999999999999999999999999999999 | 1.5 | .5 | 0.05 | 5. | 1e3 | -1.50 | 0.00
d182 + d182 | d182 - d186 | d182 * d186 | d182 / d186 | d182 % d186 | d52 * d52 | d52 / d52 | d52 + 1 | d52 * 2 | d52 - 1000000 | d182 / 3
d380 + d380 | d380 * d380 | d380 / d380 | d380 % d380 | d3818 * d3818 | d3818 + d380 | d3818 / d3838 | d3838 * d3838 | d3838 / d3838 | d380 % d3838
d380 / d3838 | d3838 / d380 | d2810 * d2810 | d2810 / d182 | d182 / d2810 | d2810 % d52 | l + d182 | l * d52 | i * d52 | i / d52 | d52 / i | y % d52 | l % d182
d182 + x | d182 * f | i + x | l * x | f + f | f * f | f / f | f % f | x + z | x - z | x * z | x / z | x % z | i + f | x / 0 | i / 0 | d52 / 0 | i % 0 | l div 0
i = j | i != j | i <> j | i < j | i <= j | i > j | i >= j | i <=> j | l = i | x = z | x < z | x <= z | x > z | x >= z | x != z | x <=> z | f = x | i = x
d182 = d186 | d182 < d52 | d182 > i | d182 >= 1000 | d182 = 10.00 | d380 = d3838 | d380 < d3838 | d3818 > d380 | l > d182 | d182 = x | i > 1.5 | i = 1.0 | l < 1e3
t = u | t < u | t >= u | t = 'a' | 'a' = t | t != '' | t <=> u | b = c | b < c | b <=> c | b > true | day1 = day2 | day1 < day2 | ts1 = ts2 | ts1 >= ts2 | day1 = ts1 | day1 < ts2
ts1 > '2000-02-29' | ts1 = timestamp '2000-02-29 12:30:15.5' | day1 = '2000-02-29' | day1 >= date '1970-01-01' | ts1 < '2024-02-29 23:59:59.999999' | ts1 > '2000-02-29 12:30:15+02:00'
i = null | null = i | null <=> i | i <=> null | null + i | i + null | not null | null and b | b or null | null is null | i is null | i is not null | not i is null
b and c | b or c | not b | !b | b and not c or c | not (b and c) | not b and c | b and (1 / i = 1) | (1 / i = 1) and b | b or (1 / i = 1) | (1 / i = 1) or b | b and c and 1 / i > 0 or b
b is true | b is not true | b is false | b is not false | b is unknown | b is not unknown | (i = j) is true | (i / j > 1) is true | (1 / i = 1) is null
i in (1, 2, 3) | i in (1, null) | i not in (1, 2) | i not in (1, null) | i in (j, 1 / i, 5) | i in (l, 5) | d182 in (1, 2.5, 1000) | t in ('a', 'b') | t in ('a', u) | t not in ('a', null) | x in (1.0, z)
l in (1, 9223372036854775807) | i in (1, 9223372036854775808) | day1 in (day2, '2000-02-29') | ts1 in (ts2, day1) | null in (1, 2) | b in (true, c) | i in (1.0, 2) | y in (1, 2, 300)
i between 1 and 5 | i not between j and 10 | d182 between 0 and 1000 | t between 'a' and 'b' | ts1 between ts2 and '2024-01-01' | i between null and 5 | 1 / i between 0 and 1 and b
t like 'a%' | t like '%' | t like '' | t like '_' | t like '%b%' | t like 'a\\_c' | t like 'a\\%c' | t like 'a!%c' escape '!' | t like '%a%a%' | t not like '%a' | t like '_日%' | t like '%語' | t like 'x%y' | t like '__'
t like 'a\\\\\\\\c' | t like 'a_c' | t like '%aa%aa' | t like '%aa%aaa' | t like '%ß%' | t like '😀_' | t not like '%!_%' escape '!'
t ilike 'A%' | t ilike '%B%' | t not ilike '%SS' | t ilike '_日%' | t ilike 'A\\_C' | t ilike 'A!%C' escape '!' | t ilike '%Ä%' | lower(t) ilike 'a%'
t rlike '^a' | t not rlike '.b$' | regexp_like(t, '(?i)Ä') | rlike(t, 'x\\ny') | regexp(t, r'\\s') | t regexp '' | regexp_extract(t, '^(.)(.*)$', 2) | regexp_extract(t, '(a+)') | length(regexp_extract(t, '.+', 0))
t like any ('a%', '%b') | t ilike any ('A%', '_') | not (t like any ('a%', '%b')) | t like all ('%a%', '%b%') | t ilike all ('%A%', '%B%') | t like any ('a')
case when b then i when c then l end | case when i > 1 then 'x' else t end | case i when 1 then 'one' when j then 'two' else 'three' end | case when b then 1 else 1.5 end | case when 1 / i > 0 then b else c end
case when b then 1 / i else 0 end | case when b then d52 when c then i end | case when i = 0 then null else 1 / i end | case when b then null end | case when b then x else d182 end
if(b, i, l) | if(b, 1 / i, 2) | if(i = 0, 0, 10 / i) | if(b, d182, d186) | if(b, 1, null) | if(b, day1, ts1) | if(1 / i = 1, 1, 2) | if(b, d380, d3838) | if(b, f, i) | if(b, f, x) | if(b, y, s)
coalesce(i, j) | coalesce(i, 1 / j) | coalesce(1 / i, 2) | coalesce(null, i, l) | coalesce(d52, d182, 1) | coalesce(t, u, 'z') | nvl(i, 0) | ifnull(b, false) | coalesce(x, 0) | coalesce(i, d52, x) | coalesce(d380, d3838)
nullif(i, j) | nullif(i, 0) | 1 / nullif(i, 0) | nullif(t, '') | nullif(d182, 1000) | nullif(1 / i, 1) | nullif(x, z) | nullif(l, i)
greatest(i, j) | least(i, j, 5) | greatest(i, l) | greatest(d52, d186) | least(d182, 1) | greatest(x, z) | least(x, z) | greatest(t, u) | least(day1, day2) | greatest(ts1, day1) | greatest(i, 1 / j) | least(null, i) | greatest(b, c) | greatest(i, x)
cast(i as bigint) | cast(i as tinyint) | cast(l as int) | cast(l as smallint) | cast(i as decimal(5,2)) | cast(l as decimal(38,18)) | cast(l as decimal(10,0)) | cast(i as double) | cast(l as double) | cast(l as float) | cast(i as string) | cast(l as string) | cast(i as boolean)
cast(b as int) | cast(b as decimal(3,2)) | cast(b as double) | cast(b as string) | cast(d52 as int) | cast(d52 as tinyint) | cast(d182 as bigint) | cast(d380 as bigint) | cast(d380 as int) | cast(d380 as smallint) | cast(d2810 as bigint) | cast(d3838 as bigint)
cast(d182 as decimal(5,1)) | cast(d186 as decimal(18,2)) | cast(d3818 as decimal(18,2)) | cast(d3838 as decimal(38,37)) | cast(d52 as decimal(38,30)) | cast(d182 as double) | cast(d380 as double) | cast(d3818 as double) | cast(d3838 as double) | cast(d182 as string) | cast(d3838 as string) | cast(d182 as boolean) | cast(d380 as string)
cast(x as int) | cast(x as bigint) | cast(x as smallint) | cast(x as tinyint) | cast(x as decimal(18,2)) | cast(x as decimal(38,18)) | cast(x as float) | cast(f as double) | cast(f as int) | cast(f as bigint) | cast(f as decimal(18,6)) | cast(x as boolean) | cast(x as decimal(38,0))
cast(n as int) | cast(n as bigint) | cast(n as tinyint) | cast(n as decimal(10,2)) | cast(n as decimal(38,0)) | cast(n as decimal(38,38)) | cast(n as boolean) | try_cast(n as int) | try_cast(n as decimal(5,1)) | try_cast(n as boolean) | try_cast(l as int) | try_cast(1 / i as int) | try_cast(x as int)
cast(ts1 as date) | cast(day1 as timestamp) | cast(ts1 as bigint) | cast(ts1 as int) | cast(ts1 as string) | cast(day1 as string) | i::bigint | l::string | cast('12' as int) | cast(null as int) | cast('2000-02-29' as date) | cast('2000-02-29 01:02:03' as timestamp) | try_cast(ts1 as int)
round(d182) | round(d182, 1) | round(d182, -1) | round(d182, 5) | round(d186, 3) | round(d3838, 10) | round(d380, -3) | round(d52, -2) | round(d52, -5) | round(i) | round(i, -1) | round(i, -3) | round(l, -5) | round(l, -18) | round(l, -19) | round(y, -1) | round(d2810, 0) | round(i, 2) | round(i, -10)
ceil(i) | ceil(l) | ceil(x) | ceil(f) | ceil(d182) | ceil(d3838) | ceil(d380) | floor(l) | floor(x) | floor(d182) | floor(d186) | floor(d3818) | floor(d52) | ceiling(x) | floor(y) | ceil(9007199254740993) | sign(i) | sign(x) | sign(d182) | signum(l) | sign(d3838)
lower(t) | upper(t) | trim(t) | ltrim(t) | rtrim(t) | length(t) | char_length(t) | substring(t, 1, 2) | substring(t, 0, 2) | substring(t, -2, 1) | substring(t, -10, 9) | substring(t, 2) | substr(t, 2, 100) | substring(t, i, j) | substring(t, 1, -1) | substring(t, y) | left(t, 2) | left(t, -1) | right(t, 2) | right(t, i) | right(t, 0)
concat(t, u) | t || u | t || '-' || u | concat(t) | concat(t, u, 'x') | concat(t, null) | startswith(t, 'a') | endswith(t, u) | contains(t, u) | contains(t, '') | startswith(t, u) | lower(t) = 'äöü' | length(t) > 2
hour(ts1) | minute(ts1) | second(ts1) | hour(day1) | dayofweek(ts1) | dayofweek(day1) | dayofmonth(ts1) | day(day1) | month(ts1) | month(day1) | year(ts1) | year(day1) | datediff(day1, day2) | datediff(ts1, ts2) | datediff(ts1, day2) | unix_micros(ts1)
date_trunc('hour', ts1) | date_trunc('DAY', ts1) | date_trunc('week', ts1) | date_trunc('month', ts1) | date_trunc('quarter', ts1) | date_trunc('year', ts1) | date_trunc('minute', ts1) | date_trunc('second', ts1) | date_trunc('millisecond', ts1) | date_trunc('microsecond', ts1) | date_trunc('month', day1) | date_trunc('MM', ts1) | date_trunc('yy', ts1)
ts1 + interval '10' minutes | ts1 - interval '1' day | ts1 + interval 2 weeks | interval '3' hours + ts1 | ts1 + interval '90' seconds > ts2 | ts1 - interval '5' milliseconds | ts1 + interval '7' microseconds | ts1 + interval '1' day - interval '1' hour
array_contains(ai, i) | array_contains(at, t) | array_contains(at, 'a') | array_contains(ai, 1) | array_contains(ai, l) | array_contains(ad, d182) | array_contains(ax, x) | not array_contains(at, t) | size(ai) | size(at) = 0 | element_at(ai, 1) | element_at(at, -1) | element_at(ad, 2) | element_at(ai, i) | element_at(ax, 1) | element_at(at, 0) | size(ai) >= 2 and element_at(ai, 2) > 0
exists(ai, e -> e > 0) | exists(ai, e -> e = i) | exists(ai, e -> 10 / e > 1) | exists(at, e -> e like 'a%' or b) | exists(ai, e -> null) | exists(ad, e -> e > d182) | exists(ax, e -> e > x) | not exists(at, e -> e is null)
forall(ai, e -> e > 0) | forall(ai, e -> e <> j) | forall(ai, e -> 10 / e > 1) | forall(at, e -> length(e) < 3) | forall(ax, e -> e >= z) | forall(ai, e -> b) | forall(filter(ai, e -> e > 0), g -> g < 100)
filter(ai, e -> e > j) | filter(ai, e -> 1 / e > 0) | filter(at, e -> e <> t) | filter(ad, e -> e is null) | size(filter(ax, e -> e > 0)) | array_contains(filter(ai, e -> e > 0), i) | filter(ax, e -> true) | filter(at, e -> e in (t, u))
transform(ai, e -> e + i) | transform(ai, e -> cast(e as bigint) * 2) | transform(at, e -> upper(e)) | transform(ad, e -> e * d52) | transform(ax, e -> e + x) | transform(ai, e -> e > i) | transform(at, e -> ts1) | transform(ai, e -> 1 / e) | transform(ad, e -> cast(e as decimal(38,18))) | transform(at, e -> case when e = 'a' then day1 end)
array_join(at, ',') | array_join(at, t) | array_join(at, '', u) | array_join(at, ', ', '?') | array_join(transform(ai, e -> cast(e as string)), '-') | array_size(ai) | array_size(filter(at, e -> e > 'a')) | element_at(transform(ai, e -> coalesce(e, i)), 1)
pmod(i, j) | pmod(l, m) | pmod(y, y) | pmod(y, s) | pmod(s, y) | pmod(i, -2147483648) | pmod(i, l) | pmod(l, -9223372036854775808) | pmod(y, -128) | pmod(i, 0) | pmod(x, z) | pmod(f, f) | pmod(-x, 3) | pmod(x, -2.5) | pmod(x, f) | pmod(d182, d186)
pmod(d52, d182) | pmod(-d52, d182) | pmod(d182, d52) | pmod(d380, d3838) | pmod(d3838, d380) | pmod(d3818, d2810) | pmod(d52, i) | pmod(i, d52) | pmod(i, 3) | pmod(i, null) | pmod(-7, 3) | pmod(d182, x) | pmod(d3818, d3818) | pmod(d180, d52) | pmod(1 / i, 0)
isnan(x) | isnan(f) | isnan(i) | isnan(d182) | isnan(null) | isnan(1 / i) | not isnan(x) and x > 1 | nanvl(x, z) | nanvl(f, f) | nanvl(x, f) | nanvl(f, x) | nanvl(x, 0) | nanvl(f, 0) | nanvl(x, null) | nanvl(f, null) | nanvl(null, f) | nanvl(i, x) | nanvl(x, 1 / i) | nanvl(x, 0.5) > 1 | nanvl(d182, 1)
to_date(ts1) | to_date(day1) | to_date('2000-02-29') | date(ts1) | to_timestamp(day1) | to_timestamp(ts1) | int(l) | bigint(i) | double(i) | string(i) | boolean(i) | int(n) | timestamp(day1)
sqrt(x) | sqrt(i) | sqrt(d182) | sqrt(null) | radians(x) | degrees(x) | degrees(d186) | exp(x) | exp(i) | ln(x) | ln(l) | log10(x) | log10(d182) | pow(x, z) | pow(i, 2) | power(x, 0.5) | pow(x, -3) | pow(z, i) | sin(x) | cos(x) | sin(f) | asin(x) | acos(x) | acos(d52 / 1000) | atan2(x, z) | atan2(i, j)
replace(t, 'a') | replace(t, 'a', u) | replace(t, '', 'x') | replace(t, u, 'xy') | replace(t, null) | split_part(t, 'a', 1) | split_part(t, 'b', -1) | split_part(t, u, 2) | split_part(t, '', 1) | split_part('a.b.c', '.', y) | split_part(t, 'a', 0) | concat_ws(',', t, u) | concat_ws(t, u, null, 'x') | concat_ws('-') | concat_ws(',', at, t) | concat_ws(null, t) | concat_ws(t, at) | concat_ws(',', t, string(1 / i = 1))
instr(t, u) | instr(t, 'b') | instr(t, '') | lpad(t, 3, 'xy') | lpad(t, 2) | rpad(t, 5, u) | rpad(t, 0) | lpad(t, -3, 'a') | rpad(t, 6, '') | lpad(t, y % 10, 'äx') | repeat(t, 3) | repeat(t, y % 5) | repeat(t, -1) | reverse(t) | reverse(ai) | reverse(at) | initcap(t) | initcap(concat(t, ' ', u)) | initcap('hello wORLD-foo') | md5(t) | sha2(t, 256) | sha2(t, 0) | sha2(t, 512) | sha2(t, 384) | sha2(t, 224) | sha2(t, i)
date_add(day1, y) | date_add(ts1, 3) | date_sub(day1, s % 100) | date_sub('2024-03-01', 1) | date_add(day1, null) | last_day(day1) | last_day(ts1) | dayofyear(day1) | dayofyear(ts1) | weekofyear(day1) | weekofyear(ts1) | quarter(day1) | months_between(day1, day2) | months_between(ts1, ts2) | months_between(ts1, day2, false) | months_between(ts1, ts2, b) | unix_timestamp(ts1) | unix_timestamp(day1)
from_utc_timestamp(ts1, 'Europe/Berlin') | from_utc_timestamp(ts1, 'America/New_York') | from_utc_timestamp(ts1, 'Asia/Kolkata') | from_utc_timestamp(ts1, '-05:30') | from_utc_timestamp(day1, 'Asia/Tokyo') | hour(from_utc_timestamp(ts1, 'Australia/Adelaide')) | to_date(from_utc_timestamp(ts1, if(b, 'UTC', '+14:00'))) | from_utc_timestamp(ts1, null) | from_utc_timestamp(ts1, 'Z')
try_divide(i, j) | try_divide(x, z) | try_divide(d182, d186) | try_divide(d380, d3838) | try_divide(d3838, d380) | try_divide(1, 0) | try_divide(i, null) | try_divide(1 / i, j) | try_divide(1, 1 / i) | try_divide(l, d52) | try_divide(f, f) | coalesce(try_divide(i, 0), 5)
array_position(ai, i) | array_position(at, t) | array_position(ax, x) | array_position(ad, d182) | array_distinct(ai) | array_distinct(at) | array_distinct(ax) | array_distinct(ad) | array_max(ai) | array_max(at) | array_max(ax) | array_min(ax) | array_min(ad) | array_min(at) | size(array_distinct(ai)) | element_at(reverse(ai), 1)
isnull(i) | isnotnull(t) | mod(i, j) | 'it''s' | 'a\\tb' | 'a\\'b' | "double" | '\\u0041' | '\\101' | 'a\\qb' | "it""s" | true | null | '' | length('a\\%b') | -i % 3 | -i * 2 | 2 - -i | 1 - 2 - 3 | 8 / 2 / 2 | 2 + 3 * 4 | (2 + 3) * 4
d52 > 5 * d186 | d182 * 1.0 | d182 * 1.1 > d186 | 100 * d52 / d182 | (i + j) / 2 | (d182 - d186) / nullif(d186, 0) | abs(d182 - d186) > 3 * d52 | i + d52 * l | d380 - 1 | d3838 + 1 | d3838 - d380 | i * 1.5 | l / 1.5 | 1.5 / l | 10 % d52 | l % 1.5
"""


def written() -> list[str]:
    return [text.strip() for line in WRITTEN.strip().splitlines() for text in line.split(" | ")]


class Generator:
    """Random expressions over the schema, mostly well typed."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    def expressions(self, count: int) -> Iterator[str]:
        for _ in range(count):
            yield self._any(self._chance.choice([2, 2, 3, 3, 4]))

    def overflows(self, count: int) -> Iterator[str]:
        """Arithmetic of numbers of all types, which goes on with what overflowed."""
        for _ in range(count):
            yield self._arithmetic(self._chance.choice([2, 3, 3]))

    def _arithmetic(self, depth: int) -> str:
        if depth <= 0 or self._chance.random() < 0.1:
            return self._pick("y", "i", "i", "j", "l", "l", "m", "d52", "d182", "d2810", "x", "0.5", "-3", "2147483648")
        n, less = self._arithmetic, depth - 1
        return self._chance.choice([
            lambda: f"({n(less)} {self._pick('+', '-', '*', '*', '/', '%')} {n(less)})",
            lambda: f"({n(less)} {self._pick('+', '-', '*', '*')} {n(less)})",
            lambda: f"{self._pick('-', 'abs', 'round')}({n(less)})",
            lambda: f"try_cast({n(less)} as {self._pick('tinyint', 'int', 'bigint')})",
            lambda: f"if({self._pick('b', 'i > j')}, {n(less)}, {n(less)})",
        ])()  # fmt: skip

    def _pick(self, *items: str) -> str:
        return self._chance.choice(items)

    def _any(self, depth: int) -> str:
        return self._chance.choice([self._number, self._condition, self._condition, self._text, self._time])(depth)

    def _number(self, depth: int) -> str:
        if depth <= 0:
            return self._pick(
                "y",
                "s",
                "i",
                "j",
                "l",
                "m",
                "d52",
                "d182",
                "d180",
                "d186",
                "d2810",
                "d3818",
                "d380",
                "x",
                "f",
                "0",
                "1",
                "-3",
                "100",
                "2.5",
                "0.001",
                "3000000000",
            )
        n, less = self._number, depth - 1
        return self._chance.choice([
            lambda: f"({n(less)} {self._pick('+', '-', '*', '/', '%')} {n(less)})",
            lambda: f"({n(less)} {self._pick('+', '-', '*', '/', '%')} {n(less)})",
            lambda: f"-({n(less)})",
            lambda: f"abs({n(less)})",
            lambda: f"round({n(less)}, {self._pick('0', '1', '2', '-1')})",
            lambda: f"{self._pick('floor', 'ceil')}({n(less)})",
            lambda: f"coalesce({n(less)}, {n(less)})",
            lambda: f"{self._pick('greatest', 'least')}({n(less)}, {n(less)})",
            lambda: f"if({self._condition(less)}, {n(less)}, {n(less)})",
            lambda: f"case when {self._condition(less)} then {n(less)} when {self._condition(less)} then {n(less)} end",
            lambda: f"nullif({n(less)}, {n(less)})",
            lambda: f"cast({n(less)} as {self._pick('int', 'bigint', 'decimal(18,2)', 'decimal(38,10)', 'double', 'smallint')})",
            lambda: f"try_cast({n(less)} as {self._pick('int', 'bigint', 'decimal(10,4)', 'tinyint')})",
            lambda: f"length({self._text(less)})",
            lambda: f"{self._pick('hour', 'year', 'dayofweek', 'unix_micros', 'month', 'dayofmonth')}({self._moment(less)})",
            lambda: f"(size({self._pick('ai', 'at')}) {self._pick('+', '*')} {n(less)})",
            lambda: f"element_at({self._pick('ai', 'ad', 'ax')}, {self._pick('1', '-1', '2')})",
            lambda: f"try_divide({n(less)}, {n(less)})",
            lambda: f"{self._pick('sqrt', 'radians', 'degrees')}({n(less)})",
            lambda: f"instr({self._text(less)}, {self._text(less)})",
            lambda: f"{self._pick('quarter', 'dayofyear', 'weekofyear', 'unix_timestamp')}({self._moment(less)})",
            lambda: f"months_between({self._moment(less)}, {self._moment(less)})",
            lambda: f"{self._pick('array_max', 'array_min')}({self._pick('ai', 'ad', 'ax')})",
            lambda: f"array_position({self._pick('ai, i', 'at, t', 'ad, d182', 'ax, x')})",
            lambda: f"size({self._array(less)})",
        ])()  # fmt: skip

    def _array(self, depth: int) -> str:
        name = self._pick("ai", "at", "ad", "ax")
        e = {"ai": "e % 3", "at": "length(e)", "ad": "e * 2", "ax": "e - x"}[name]
        return self._pick(
            f"filter({name}, e -> {self._item(name, depth)})",
            f"transform({name}, e -> if({self._item(name, depth)}, {e}, {self._number(depth - 1)}))",
            f"filter(transform({name}, e -> {e}), g -> g > {self._number(depth - 1)})",
        )

    def _decision(self, depth: int) -> str:
        name = self._pick("ai", "at", "ad", "ax")
        return f"{self._pick('exists', 'forall')}({name}, e -> {self._item(name, depth)})"

    def _item(self, name: str, depth: int) -> str:
        """A condition on an item `e` of an array."""
        text = self._pick("e = t", "e like 'a%'", "e rlike '[a-b]$'", "length(e) > i", "e in ('a', u)", "e is null")
        number = self._pick(
            f"e > {self._number(depth - 1)}", "10 / e > 1", "e = i", "e is null", "e in (1, null)", "e % 2 = 0"
        )
        item = text if name == "at" else number
        return self._pick(
            item, item, f"({item} {self._pick('and', 'or')} {self._condition(depth - 1)})", f"not ({item})"
        )

    def _condition(self, depth: int) -> str:
        if depth <= 0:
            return self._pick("b", "c", "i > 0", "d182 >= 1000", "t = 'a'", "1 / i > 0", "day1 < day2", "x > 0")
        c, less = self._condition, depth - 1
        return self._chance.choice([
            lambda: f"({c(less)} and {c(less)})",
            lambda: f"({c(less)} or {c(less)})",
            lambda: self._decision(less),
            lambda: f"not ({c(less)})",
            lambda: f"({self._number(less)} {self._pick('=', '!=', '<', '<=', '>', '>=', '<=>')} {self._number(less)})",
            lambda: f"({self._number(less)} {self._pick('=', '<', '>')} {self._number(less)})",
            lambda: f"({self._text(less)} {self._pick('=', '<', '>=', '<=>')} {self._text(less)})",
            lambda: f"({self._moment(less)} {self._pick('=', '<', '>=')} {self._moment(less)})",
            lambda: f"({self._number(less)} in ({self._number(less)}, {self._number(0)}, 1))",
            # Spark evaluates a longer operand before the condition around it, so that its error counts where it should not.
            lambda: f"({self._number(0)} between {self._number(less)} and {self._number(less)})",
            lambda: f"({self._any(less)} is {self._pick('', 'not ')}null)",
            lambda: f"(({c(less)}) is {self._pick('true', 'false', 'not true', 'not false')})",
            lambda: f"({self._text(less)} like {self._pick(repr('a%'), repr('%b%'), repr('_'), repr('%a_'))})",
            lambda: f"({self._text(less)} ilike {self._pick(repr('A%'), repr('%Äß'), repr('_'), repr('%a_'))})",
            lambda: f"({self._text(less)} {self._pick('like', 'ilike')} {self._pick('any', 'all')} ('A%', '%ß', '_'))",
            lambda: f"{self._pick('contains', 'startswith', 'endswith')}({self._text(less)}, {self._text(less)})",
            lambda: f"coalesce({c(less)}, {c(less)})",
            lambda: f"array_contains({self._pick('ai, i', 'at, t', 'ad, d182', 'ax, x')})",
        ])()  # fmt: skip

    def _text(self, depth: int) -> str:
        if depth <= 0:
            return self._pick("t", "u", "'a'", "'äß'", "''", "n")
        t, less = self._text, depth - 1
        return self._chance.choice([
            lambda: f"({t(less)} || {t(less)})",
            lambda: f"{self._pick('lower', 'upper', 'trim', 'ltrim', 'rtrim')}({t(less)})",
            lambda: f"substring({t(less)}, {self._pick('1', '-2', 'i', '0')}, {self._pick('2', 'j', '-1')})",
            lambda: f"{self._pick('left', 'right')}({t(less)}, {self._pick('1', '2', 'y')})",
            lambda: f"coalesce({t(less)}, {t(less)})",
            lambda: f"if({self._condition(less)}, {t(less)}, {t(less)})",
            lambda: f"cast({self._pick('i', 'l', 'd182', 'd3838', 'b', 'ts1', 'day1', '(d52 * 3)', 'round(d186, 1)')} as string)",
            lambda: f"nullif({t(less)}, {t(less)})",
            lambda: f"replace({t(less)}, {t(less)}, {t(0)})",
            lambda: f"split_part({t(less)}, {t(0)}, {self._pick('1', '2', '-1', 'y', '0')})",
            lambda: f"concat_ws({t(0)}, {self._pick('at', t(less))}, {t(less)})",
            lambda: f"{self._pick('lpad', 'rpad')}({t(less)}, {self._pick('3', '-1', 'y', '12')}, {t(0)})",
            lambda: f"repeat({t(less)}, {self._pick('0', '3', '-1')})",
            lambda: f"{self._pick('reverse', 'initcap', 'md5')}({t(less)})",
            lambda: f"sha2({t(less)}, {self._pick('256', '0', 'i')})",
        ])()  # fmt: skip

    def _moment(self, depth: int) -> str:
        return self._pick(
            "ts1",
            "ts2",
            "date_trunc('month', ts1)",
            "ts1 + interval '36' hours",
            "date_trunc('week', ts2)",
            "cast(day1 as timestamp)",
        )

    def _time(self, depth: int) -> str:
        return self._chance.choice(
            [
                self._moment(depth),
                f"if({self._condition(depth - 1)}, {self._moment(depth)}, ts2)",
                "cast(ts1 as date)",
                f"{self._pick('last_day', 'date')}({self._moment(depth)})",
                "date_add(day1, y)",
                "date_sub(day2, s)",
            ]
        )


# Comparison ----------------------------------------------------------------------------------------------------------

# Rules that drop or move operands, so that an error in them may or may not show: not part of what SQL promises.
_EXCLUDED = [
    "BooleanSimplification", "ConstantFolding", "NullPropagation", "SimplifyConditionals", "SimplifyBinaryComparison",
    "OptimizeIn", "ReorderAssociativeOperator", "PushFoldableIntoBranches", "LikeSimplification", "UnwrapCastInBinaryComparison",
    "NullDownPropagation", "SimplifyCasts", "ReplaceNullWithFalseInPredicate", "CombineConcats", "DecimalAggregates",
    "FoldablePropagation", "ConstantPropagation", "OptimizeRand", "EliminateMapObjects",
]  # fmt: skip
_RULES = "org.apache.spark.sql.catalyst.optimizer."
_DEFAULT = {"spark.sql.ansi.enabled": "true", "spark.sql.session.timeZone": "UTC"}
_PLAIN = {**_DEFAULT, "spark.sql.subexpressionElimination.enabled": "false"}
# The optimiser itself evaluates a local relation, without compiling; streams run compiled code.
_INTERPRETED = {**_PLAIN, "spark.sql.optimizer.excludedRules": ",".join(_RULES + rule for rule in _EXCLUDED)}
_COMPILED = {
    **_PLAIN,
    "spark.sql.optimizer.excludedRules": ",".join(_RULES + rule for rule in [*_EXCLUDED, "ConvertToLocalRelation"]),
}


def _compiled(texts: list[str]) -> dict[str, Expression]:
    made = {text: _accepted(text) for text in texts}
    return {text: expression for text, expression in made.items() if expression is not None}


def _accepted(text: str) -> Expression | None:
    try:
        return compile_expression(text, TYPES)
    except ExpressionError:
        return None


def _evaluated(expressions: dict[str, Expression], rows: pa.Table) -> dict[str, Column]:
    columns = {name: from_arrow(rows.column(name), type_) for name, type_ in TYPES.items()}
    return {text: expression.evaluate(columns, rows.num_rows) for text, expression in expressions.items()}


def _error_rows(column: Column) -> list[int]:
    return [] if column.error is None else [int(row) for row in column.error.nonzero()[0]]


def _masked(text: str, column: Column, name: str) -> str:
    failing = _error_rows(column)
    if not failing:
        return f"{text} as {name}"
    return f"case when row in ({', '.join(map(str, failing))}) then null else ({text}) end as {name}"


def _stored(column: Column) -> list[Any]:
    """The stored values, None for NULL and error; floats as their bits, one for every NaN."""
    values = [_bits(value) for value in column.values.tolist()]
    return [value if known else None for value, known in zip(values, column.is_known().tolist(), strict=True)]


def _bits(value: Any) -> Any:
    if isinstance(value, list):
        return [_bits(item) for item in value]
    if not isinstance(value, float):
        return value
    return "NaN" if math.isnan(value) else struct.pack("d", value)


def _spark_type(frame: DataFrame, name: str) -> str:
    text = frame.schema[name].dataType.simpleString()
    return "null" if text == "void" else text


def _differences(frame: DataFrame, expressions: dict[str, Expression], columns: dict[str, Column]) -> Iterator[str]:
    """Compares values, NULLs and types of a batch, in one query; in halves where Spark fails, to find the culprit."""
    texts = list(expressions)
    try:
        answer = frame.selectExpr("row", *(_masked(text, columns[text], f"c{k}") for k, text in enumerate(texts)))
        types = [_spark_type(answer, f"c{k}") for k in range(len(texts))]
        result = answer.toArrow()
    except Exception as error:  # noqa: BLE001 - any failure of Spark is a finding
        if len(texts) == 1:
            yield f"{texts[0]}: Spark fails: {str(error)[:200]}"
            return
        for half in (texts[: len(texts) // 2], texts[len(texts) // 2 :]):
            yield from _differences(frame, {text: expressions[text] for text in half}, columns)
        return
    order = sorted(range(result.num_rows), key=result.column("row").to_pylist().__getitem__)
    for k, text in enumerate(texts):
        if types[k] != str(expressions[text].type):
            yield f"{text}: type {expressions[text].type}, Spark {types[k]}"
            continue
        theirs = _stored(from_arrow(result.column(f"c{k}"), expressions[text].type))
        yield from _unequal(text, _stored(columns[text]), [theirs[row] for row in order])


# Functions whose last digits differ between Java and C. What they give decides nothing else in these expressions.
_ROUNDED = re.compile(r"\b(exp|ln|log10|pow|power|sin|cos|asin|acos|atan2)\(")
_ULPS = 2


def _is_near(our: Any, their: Any) -> bool:
    if not (isinstance(our, bytes) and isinstance(their, bytes)):
        return False
    a, b = struct.unpack("d", our)[0], struct.unpack("d", their)[0]
    return bool(math.copysign(1, a) == math.copysign(1, b) and abs(a - b) <= _ULPS * math.ulp(b))


def _unequal(text: str, ours: list[Any], theirs: list[Any]) -> Iterator[str]:
    is_rounded = _ROUNDED.search(text) is not None
    for row, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        if our != their and not (is_rounded and _is_near(our, their)):
            yield f"{text}: row {row}: {our!r}, Spark {their!r}"
            return


def _not_raised(
    spark: SparkSession, table_rows: pa.Table, columns: dict[str, Column], probes: int, seed: int
) -> Iterator[str]:
    """Puts one failing row of some expressions to Spark; each should raise."""
    failing = [(text, _error_rows(column)) for text, column in columns.items() if _error_rows(column)]
    chance = random.Random(seed)
    for text, rows in chance.sample(failing, min(probes, len(failing))):
        row = chance.choice(rows)
        try:
            value = spark.createDataFrame(table_rows.slice(row, 1)).selectExpr(f"{text} as c").collect()
        except Exception:  # noqa: BLE001 - whatever Spark raises, it raised
            continue
        yield f"{text}: row {row}: marked as an error, Spark gives {value}"


def compare(spark: SparkSession, texts: list[str], seed: int, probes: int, batch: int = 100) -> list[str]:
    """All disagreements about these expressions over the rows of a seed."""
    rows = table(seed)
    frame = spark.createDataFrame(rows)
    expressions = _compiled(texts)
    columns = _evaluated(expressions, rows)
    names = list(expressions)
    found: list[str] = []
    with settings(spark, _COMPILED):
        for start in range(0, len(names), batch):
            part = {name: expressions[name] for name in names[start : start + batch]}
            found += _differences(frame, part, columns)
    with settings(spark, _INTERPRETED):
        found += _not_raised(spark, rows, columns, probes, seed)
    return found


@contextmanager
def settings(spark: SparkSession, values: dict[str, str]) -> Iterator[None]:
    before = {key: spark.conf.get(key, None) for key in values}
    for key, value in values.items():
        spark.conf.set(key, value)
    try:
        yield
    finally:
        for key, old in before.items():
            if old is None:
                spark.conf.unset(key)
            else:
                spark.conf.set(key, old)


# Tests ---------------------------------------------------------------------------------------------------------------


def test_every_written_expression_is_supported() -> None:
    assert [text for text in written() if _accepted(text) is None] == []


@pytest.mark.long
def test_written_expressions(spark: SparkSession) -> None:
    assert compare(spark, written(), seed=1, probes=25) == []


@pytest.mark.long
def test_written_expressions_with_the_default_optimiser(spark: SparkSession) -> None:
    rows = table(2)
    expressions = _compiled(written())
    columns = _evaluated(expressions, rows)
    with settings(spark, _DEFAULT):
        assert list(_differences(spark.createDataFrame(rows), expressions, columns)) == []


def test_canonical_text_means_the_same_to_spark(spark: SparkSession) -> None:
    rows = table(3)
    expressions = {expression.sql: expression for expression in _compiled(written()).values()}
    columns = _evaluated(expressions, rows)
    with settings(spark, _INTERPRETED):
        assert list(_differences(spark.createDataFrame(rows), expressions, columns)) == []


@pytest.mark.parametrize("seed", [11, 12])
def test_generated_expressions(spark: SparkSession, seed: int) -> None:
    assert compare(spark, list(Generator(seed).expressions(250)), seed, probes=5) == []


def test_generated_arithmetic_that_overflows(spark: SparkSession) -> None:
    assert compare(spark, list(Generator(20).overflows(200)), seed=20, probes=10) == []


# Neither a distinct count nor an average: Spark computes their argument for all rows, before the filter, and fails where
# Lookback does not.
_FILTERED = [
    "sum(12 div i) filter (where i <> 0)", "max(10 / i) filter (where i > 0)", "count(1 / i) filter (where i in (1, 2))",
    "min(1 / i) filter (where i <> 0 and 1 / i > 0)", "sum(12 div i)", "sum(12 div i) filter (where j > 1)",
    "sum(j) filter (where 1 / i > 0)",
]  # fmt: skip


def test_an_argument_is_evaluated_only_where_its_filter_is_true(spark: SparkSession) -> None:
    cells = [(3, 1), (0, 2), (2, None), (None, 3), (-5, 0), (0, None)]
    rows = [{"id": str(at), "at": at, "i": i, "j": j} for at, (i, j) in enumerate(cells)]
    frame = spark.createDataFrame([(row["i"], row["j"]) for row in rows], "i int, j int")
    fields = {"id": "string", "at": "timestamp", "i": "int", "j": "int"}
    stream = {"stream": "s", "event_id": "id", "event_time": "at", "fields": fields}
    failing = []
    for text in _FILTERED:
        rule = {
            "rule_id": "r",
            "stream": "s",
            "window": "1 hour",
            "measures": {"m": text, "n": "count(*)"},
            "when": "n = 6",
        }
        found = lookback.replay([{**rule, "group_by": []}], rows, stream)
        with settings(spark, _DEFAULT):
            if found.errors:
                failing.append(text)
                with pytest.raises(ArithmeticException):
                    frame.selectExpr(text).collect()
            else:
                assert [alert.measures["m"] for alert in found.alerts] == [frame.selectExpr(text).head()[0]], text
    assert failing == _FILTERED[-3:]


_COMBINED = [
    "count(distinct i, j)", "count(distinct i, x)", "count(distinct x)", "count(distinct t, x, j)",
    "count(distinct i, x) filter (where j > 0)", "first(i)", "last(i)", "first(t)", "last(x)", "last(b)", "first(i) filter (where i > 0)",
    "last(t) filter (where t is not null)", "last(d) filter (where j > 9)",
    "median(i)", "median(d)", "percentile(d, 0.3)", "percentile(x, 0)", "percentile(x, 1)", "percentile(j, 0.95)", "percentile(i, 0.5) filter (where j > 9)",
    "mean(j)", "std(j)", "variance(d)", "var_samp(i)", "var_pop(d)", "var_pop(i)", "stddev_pop(j)", "stddev_pop(d) filter (where j = 3)",
    "count_if(i > 1)", "count_if(b) filter (where j > 1)", "every(b)", "bool_and(j > 0)", "any(b)", "some(i > 5)", "bool_or(b) filter (where j > 9)",
    "max_by(i, d)", "min_by(t, d)", "max_by(d, t) filter (where j = 1)", "min_by(x, t) filter (where j = 2)", "max_by(b, d)", "min_by(i, x) filter (where x < 0)",
    "mode(j)", "mode(t) filter (where j > 9)", "sort_array(collect_set(j))", "sort_array(collect_set(t))",
]  # fmt: skip


def test_aggregates_over_several_values_and_over_order_equal_spark(spark: SparkSession) -> None:
    cells = [
        (None, 1, math.nan, "a\0b", None, True), (2, 1, 0.0, "a", Decimal("1.50"), None), (2, 1, -0.0, "a\0c", None, False),
        (2, None, math.nan, "", Decimal("-0.01"), True), (2, 1, math.nan, "a", Decimal("7.00"), None),
        (None, 3, None, None, None, False), (1, 2, 0.5, '["', None, True), (1, 2, 0.5, '[', None, True),
    ]  # fmt: skip
    types = {"i": "int", "j": "int", "x": "double", "t": "string", "d": "decimal(9,2)", "b": "boolean"}
    stream = {
        "stream": "s",
        "event_id": "id",
        "event_time": "at",
        "fields": {"id": "string", "at": "timestamp", **types},
    }
    for cut in (cells, cells[:3], cells[:4]):
        frame = spark.createDataFrame(cut, ", ".join(f"{name} {type_}" for name, type_ in types.items())).coalesce(1)
        measures = {f"m{at}": text.removeprefix("sort_array(").replace("))", ")") for at, text in enumerate(_COMBINED)}
        rule = {"rule_id": "r", "stream": "s", "window": "1 hour", "measures": {**measures, "n": "count(*)"}}
        rows = [{"id": str(at), "at": at, **dict(zip(types, cell, strict=True))} for at, cell in enumerate(cut)]
        (alert,) = lookback.replay([{**rule, "when": f"n = {len(cut)}", "group_by": []}], rows, stream).alerts
        with settings(spark, _DEFAULT):
            theirs = frame.selectExpr(*(f"{text} as m{at}" for at, text in enumerate(_COMBINED))).head()
        for name, text in measures.items():
            # Events have 0.0 in place of -0.0, which is equal to it in SQL.
            value = theirs[name] + 0.0 if isinstance(theirs[name], float) else theirs[name]
            ours = alert.measures[name]
            # Spark adds up doubles, and so rounds more than once.
            is_near = (
                None not in (ours, value)
                and text.startswith(("var", "std"))
                and ours == pytest.approx(value, rel=1e-14)
            )
            assert is_near or _bits(ours) == _bits(value), text


def test_lower_and_upper_of_every_character_equal_spark(spark: SparkSession) -> None:
    """Without Python's knowledge of letters, which differs by its version."""
    characters = [chr(code) for code in range(1, 0x110000) if not 0xD800 <= code < 0xE000]
    rows = ["\n".join(characters[at : at + 8_192]) for at in range(0, len(characters), 8_192)]
    answer = spark.createDataFrame(pa.table({"t": rows})).selectExpr("lower(t)", "upper(t)").toArrow().to_pydict()
    assert ["\n".join(map(change_to_lower, row.split("\n"))) for row in rows] == answer["lower(t)"]
    assert ["\n".join(map(change_to_upper, row.split("\n"))) for row in rows] == answer["upper(t)"]


def test_c12_10_local_times_of_zones_equal_spark(spark: SparkSession) -> None:
    """Only zones about which the zone database has not changed its mind since Java's release of it."""
    chance = random.Random(6)
    zones = [
        "Europe/Berlin", "Europe/Dublin", "Europe/London", "America/New_York", "America/Sao_Paulo", "America/St_Johns", "Asia/Kolkata", "Asia/Kathmandu",
        "Asia/Dubai", "Asia/Tokyo", "Australia/Lord_Howe", "Pacific/Apia", "Pacific/Chatham", "Africa/Cairo", "Antarctica/Troll", "US/Pacific",
        "Etc/GMT+5", "UTC", "EST5EDT", "+02:00", "-09:30", "+18:00", "Z",
    ]  # fmt: skip
    rows = []
    for zone in zones:
        found = find_zone(zone)
        assert found is not None
        changes = [each for each in found.starts.tolist() if 0 < each < 1_700_000_000_000_000]
        edges = [each + step for each in changes for step in (-1, 0)]
        later = [chance.randrange(1_700_000_000, 8_000_000_000) * 1_000_000 for _ in range(40)]
        before = [
            chance.randrange(-4_000_000_000, 0) * 1_000_000 for _ in range(40 if "/" in zone and zone[0] in "EU" else 0)
        ]
        rows += [(zone, time) for time in (*edges, *later, *before)]
    table_rows = pa.table({"zone": [zone for zone, _ in rows], "us": pa.array([time for _, time in rows], pa.int64())})
    frame = spark.createDataFrame(table_rows)
    with settings(spark, _DEFAULT):
        answer = frame.selectExpr("unix_micros(from_utc_timestamp(timestamp_micros(us), zone)) c").toArrow()["c"]
    columns = {"zone": from_arrow(table_rows["zone"], parse_type("string"))}
    columns["at"] = Column(parse_type("timestamp"), table_rows["us"].to_numpy())
    schema = {name: column.type for name, column in columns.items()}
    ours = compile_expression("from_utc_timestamp(at, zone)", schema).evaluate(columns, len(rows)).values.tolist()
    assert [row for row, our, their in zip(rows, ours, answer.to_pylist(), strict=True) if our != their] == []


_OPERATORS = ["=", "<>", "<", ">=", "<=>", "+", "-", "*", "/", "%", "||", "and", "or", "div"]
_SUFFIXES = [
    "is null", "is not null", "is true", "is not false", "in (1, d)", "not in (2)", "between {} and {}", "not between {} and {}",
    "like 'x'", "not like 'y'", "like 'x' escape '!'", "ilike 'x'", "not ilike 'y'", "like any ('x', 'y')", "rlike 'x'", "not rlike 'y'", "regexp 'x'", "is distinct from {}", "is not distinct from {}",
]  # fmt: skip


def _chain(chance: random.Random) -> str:
    """A chain of operators, of which Spark's grammar allows some, with few parentheses."""
    operand = lambda: chance.choice(["a", "b", "c", "1", "'t'", "(a = b)", "(c is null)", "- a", "not b"])  # noqa: E731
    parts = [chance.choice(["", "", "", "not ", "! "]) + operand()]
    for _ in range(chance.randrange(1, 4)):
        suffix = chance.choice(_SUFFIXES)
        if chance.random() < 0.5:
            parts.append(f"{chance.choice(_OPERATORS)} {operand()}")
        else:
            parts.append(suffix.format(*(chance.choice(["a", "1", "b + 1", "c = 2"]) for _ in range(2))))
    return " ".join(parts)


def _with_all_parentheses(tree: exp.Expr) -> str:
    for node in list(tree.walk()):
        if (
            node is not tree
            and isinstance(node, (exp.Binary, exp.Unary, exp.In, exp.Between))
            and not isinstance(node, exp.Paren)
        ):
            is_like = isinstance(node.parent, exp.Escape) and isinstance(node, exp.Like)
            if not isinstance(node.parent, (exp.Paren, exp.Not)) and not is_like:
                node.replace(exp.Paren(this=node.copy()))
    return tree.sql(LookbackSql)


def test_the_parser_groups_operators_as_spark_does(spark: SparkSession) -> None:
    parser = spark._jsparkSession.sessionState().sqlParser()

    def read(text: str) -> str:
        try:
            plan = str(parser.parseExpression(text).toString())
        except Exception:  # noqa: BLE001 - Spark refuses it
            return "refused"
        # `x is not null` has a node of its own, and sqlglot writes `any` in capitals.
        return plan.replace("isnotnull(", "NOT isnull(").replace("ANY(", "any(")

    chance, accepted = random.Random(7), 0
    for text in dict.fromkeys(_chain(chance) for _ in range(3_000)):
        try:
            tree = parse(text)
        except ExpressionError:
            continue
        # Binding refuses `a is (true + b)`.
        if not all(isinstance(each.expression, (exp.Null, exp.Boolean)) for each in tree.find_all(exp.Is)):
            continue
        # And `any (...) + 1`, which is no list of patterns.
        if not all(isinstance(each.this, exp.Tuple) for each in tree.find_all(exp.Any)):
            continue
        accepted += 1
        assert read(text) != "refused", text
        assert read(text) == read(_with_all_parentheses(tree)), text
    assert accepted > 300
