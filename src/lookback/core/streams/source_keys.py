"""Checks the keys of `source` in a stream's declaration, and the options of Spark's file readers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lookback.core.errors import Problem, show_value
from lookback.core.values.suggestions import suggest

KAFKA = "kafka"
FILE_KEYS = ("format", "path", "options")
KAFKA_KEYS = ("format", "servers", "topic", "pattern", "value", "fields", "options", "value_options")
# The options of Spark's file readers by format; a test compares them with Spark's own lists.
_ANY_TEXT = (
    "charset", "columnNameOfCorruptRecord", "compression", "dateFormat", "enableDateTimeParsingFallback", "encoding",
    "lineSep", "locale", "mode", "multiLine", "samplingRatio", "singleVariantColumn", "timeFormat", "timeZone",
    "timestampFormat", "timestampNTZFormat",
)  # fmt: skip
READER_OPTIONS: dict[str, tuple[str, ...]] = {
    "csv": (
        *_ANY_TEXT, "charToEscapeQuoteEscaping", "codec", "columnPruning", "comment", "delimiter", "emptyValue",
        "enforceSchema", "escape", "escapeQuotes", "extension", "header", "ignoreLeadingWhiteSpace",
        "ignoreTrailingWhiteSpace", "inferSchema", "inputBufferSize", "maxCharsPerColumn", "maxColumns", "nanValue",
        "negativeInf", "nullValue", "positiveInf", "preferDate", "quote", "quoteAll", "sep", "unescapedQuoteHandling",
    ),
    "json": (
        *_ANY_TEXT, "allowBackslashEscapingAnyCharacter", "allowComments", "allowNonNumericNumbers",
        "allowNumericLeadingZeros", "allowSingleQuotes", "allowUnquotedControlChars", "allowUnquotedFieldNames",
        "dropFieldIfAllNull", "ignoreNullFields", "inferTimestamp", "prefersDecimal", "pretty", "primitivesAsString",
        "sortKeys", "useUnsafeRow", "writeNonAsciiCharacterAsCodePoint",
    ),
    "parquet": ("compression", "datetimeRebaseMode", "int96RebaseMode", "mergeSchema"),
}  # fmt: skip
# Options of all formats that select files and limit how many are read at once; only Databricks has the last two.
FINDER_OPTIONS = (
    "basePath", "ignoreCorruptFiles", "ignoreMissingFiles", "latestFirst", "maxBytesPerTrigger", "maxFileAge",
    "maxFilesPerTrigger", "modifiedAfter", "modifiedBefore", "pathGlobFilter", "recursiveFileLookup",
    "readerCaseSensitive", "skipRows",
)  # fmt: skip


def find_source_problems(source: Mapping[str, Any]) -> Iterator[Problem]:
    """Yields a problem for each key or option that would be ignored, and for each value of the wrong kind.

    Places are relative to `source`. spark/ingest finds the other problems of a topic when it reads it.
    """
    is_topic = source.get("format") == KAFKA
    keys = KAFKA_KEYS if is_topic else FILE_KEYS
    for key, value in source.items():
        place = str(key)
        if key not in keys:
            yield Problem(place, _explain_unknown_key(str(key), value, keys, is_topic))
        elif key in ("options", "value_options"):
            if not isinstance(value, (Mapping, type(None))):
                yield Problem(
                    place, f'a mapping of option to value is needed, such as {{sep: ";"}}, got {show_value(value)}'
                )
            elif not is_topic:
                yield from _find_option_problems(value or {}, source.get("format"), place)
            elif key == "value_options":
                yield from _find_option_problems(value or {}, source.get("value", "json"), place)
        elif key in ("format", "path") and not isinstance(value, str):
            yield Problem(place, f"a text is needed, got {show_value(value)}")


def _explain_unknown_key(key: str, value: object, keys: tuple[str, ...], is_topic: bool) -> str:
    option = _find_option(key, (name for names in READER_OPTIONS.values() for name in (*names, *FINDER_OPTIONS)))
    if option is not None:
        below = "value_options" if is_topic else "options"
        return f"{key!r} is an option of the reader; write it below {below}: {{{option}: {json.dumps(value, default=str)}}}"
    if not is_topic and key in KAFKA_KEYS:
        return f"{key!r} is for topics, with `format: kafka`; files take {', '.join(keys)}"
    return f"unknown key {key!r}; {suggest(key, keys)}"


def _find_option(name: str, known: Iterable[str]) -> str | None:
    """Finds an option, ignoring case as Spark does, and returns Spark's spelling; None if it is unknown."""
    return next((option for option in known if option.lower() == name.lower()), None)


def _find_option_problems(options: Mapping[Any, Any], format_: object, place: str) -> Iterator[Problem]:
    of_format = READER_OPTIONS.get(str(format_))
    # Without a format, the suffix of the files decides, so the options of all formats are accepted.
    readers = of_format or tuple(dict.fromkeys(name for names in READER_OPTIONS.values() for name in names))
    known = (*readers, *FINDER_OPTIONS)
    for name in map(str, options):
        # A name with a dot is a setting of Auto Loader or a file system.
        if "." in name or _find_option(name, known):
            continue
        hint = suggest(name, known, "see Spark's data source options")
        what = f"{format_} files" if of_format else "files"
        yield Problem(f"{place}.{name}", f"{name!r} is not an option of Spark's reader of {what}; {hint}")
