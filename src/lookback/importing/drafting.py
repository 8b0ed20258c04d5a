"""Drafts the declaration of a stream that has all fields that rules read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

import yaml

from lookback.core.streams.declaration import Stream
from lookback.core.values.texts import quote_identifier
from lookback.importing.conditions import TimePart, list_tests
from lookback.importing.detections import Detection, list_fields_read, list_members
from lookback.importing.fields import name_column
from lookback.importing.mapping import NameMap
from lookback.importing.rulefiles import write_yaml

EVENT_ID, EVENT_TIME = "event_id", "event_time"


def draft_stream(name: str, found: Iterable[object], names: NameMap, arrays: Set[str] = frozenset()) -> str:
    """Returns the YAML of a stream with all fields that the rules read, for the user to edit.

    Fields are texts, which hold whatever comes: rules compare numbers in them as numbers. A time of which a rule asks
    the hour is a timestamp. A field that has arrays is an array of texts. A field whose name cannot be that of a column is read from the column of that name.
    """
    detections = [each for each in found if isinstance(each, Detection)]
    times = _find_times(detections)
    fields, columns = {EVENT_ID: "string", EVENT_TIME: "timestamp"}, dict[str, str]()
    known = {each.lower() for each in fields}
    read = [
        *names.fields.values(),
        *names.keywords,
        *(field for each in detections for field in list_fields_read(each.shape)),
    ]
    for field in sorted(dict.fromkeys(names.fields.get(each, each) for each in read), key=str.lower):
        column = name_column(field)
        if column.lower() in known:
            continue
        known.add(column.lower())
        fields[column] = "timestamp" if field in times else "array<string>" if field in arrays else "string"
        if column != field:
            columns[column] = ".".join(map(quote_identifier, field.split(".")))
    document = {"stream": name, EVENT_ID: EVENT_ID, EVENT_TIME: EVENT_TIME, "fields": fields, "columns": columns}
    return write_yaml({key: value for key, value in document.items() if value})


def read_draft(text: str) -> Stream:
    """Returns the stream of a draft. Raises StreamError, such as for a wrong name."""
    return Stream.from_dict(yaml.safe_load(text))


def _find_times(detections: Sequence[Detection]) -> set[str]:
    members = (member for each in detections for member in list_members(each.shape))
    return {test.field for member in members for test in list_tests(member) if isinstance(test, TimePart)}
