"""What a rule document says about the rule for people: tags, references, a runbook and its source.

None of it changes which alerts a rule raises.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from lookback.core.errors import Problem
from lookback.core.rules import kinds
from lookback.core.rules.kinds import Kind, Reading, key, make_schema, read_form, settle
from lookback.core.rules.problems import quote_value

# The keys of a document that are only for people.
DESCRIPTIONS = ("description", "tags", "references", "runbook", "source")
# The most tags, and the most references, of one rule.
MAX_ENTRIES = 100
MAX_TAG_CHARACTERS, MAX_URL_CHARACTERS = 100, 2_000
_TAG = rf"\S{{1,{MAX_TAG_CHARACTERS}}}"
_URL = r"[Hh][Tt][Tt][Pp][Ss]?://[^\s/?#]+[^\s]*"
_URL_EXAMPLE = "https://attack.mitre.org/techniques/T1110/"


def _read_texts(value: Any, example: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ValueError(f"must be a list of texts, such as [{example}], got {quote_value(value)}")
    if len(value) > MAX_ENTRIES:
        raise ValueError(f"has {len(value):,} entries, and at most {MAX_ENTRIES} are allowed; leave some out")
    return value


def _find_wrong_tag(tag: str) -> str | None:
    if not tag.strip():
        return "is blank; write a tag such as 'attack.t1110', or leave it out"
    if len(tag) > MAX_TAG_CHARACTERS:
        return (
            f"has {len(tag):,} characters, and a tag has at most {MAX_TAG_CHARACTERS}; use `description` for sentences"
        )
    if tag.split() != [tag]:
        return f"{quote_value(tag)} has blanks; write {quote_value('_'.join(tag.split()))}"
    return None


def _read_tags(value: Any, _: Reading) -> tuple[str, ...]:
    tags, problems = dict[str, str](), []
    for at, tag in enumerate(_read_texts(value, "attack.t1110")):
        wrong = _find_wrong_tag(tag)
        if wrong is None and tag.lower() in tags:
            wrong = f"{quote_value(tag)} is there twice (capitals make no difference); leave one out"
        if wrong is None:
            tags[tag.lower()] = tag
        else:
            problems.append(Problem(f"[{at}]", wrong))
    return settle(tuple(tags.values()), problems)


def list_tags(document: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Lists the tags of a document, which may be wrong in other places."""
    tags = (document or {}).get("tags")
    return tuple(tag for tag in tags if isinstance(tag, str)) if isinstance(tags, list) else ()


def has_tag(document: Mapping[str, Any] | None, tag: str) -> bool:
    """Returns whether a document has a tag, whatever its capitals."""
    return tag.lower() in (each.lower() for each in list_tags(document))


def _find_wrong_url(text: str) -> str | None:
    if len(text) > MAX_URL_CHARACTERS:
        return f"has {len(text):,} characters, and a URL has at most {MAX_URL_CHARACTERS:,}; use a shorter one"
    if not re.fullmatch(_URL, text):
        return f"must be a URL that begins with http:// or https://, got {quote_value(text)}"
    return None


def _read_url(value: Any, reading: Reading) -> str:
    text = kinds.read_text(value, reading)
    if value is not None and (wrong := _find_wrong_url(text)):
        raise ValueError(wrong)
    return text


def _read_references(value: Any, _: Reading) -> tuple[str, ...]:
    urls = _read_texts(value, _URL_EXAMPLE)
    found = [(at, _find_wrong_url(text)) for at, text in enumerate(urls)]
    return settle(tuple(urls), [Problem(f"[{at}]", wrong) for at, wrong in found if wrong])


def _list_of(item: kinds.Schema) -> kinds.Schema:
    return {"type": "array", "items": item, "maxItems": MAX_ENTRIES}


_WRITE_TAG = f"write a tag without blanks, of at most {MAX_TAG_CHARACTERS} characters, such as attack.t1110"
_TAG_SCHEMA = {"type": "string", "pattern": f"^{_TAG}$", "patternErrorMessage": _WRITE_TAG}
_URL_SCHEMA = {
    "type": "string",
    "pattern": f"^{_URL}$",
    "patternErrorMessage": f"write a URL, such as {_URL_EXAMPLE}",
    "maxLength": MAX_URL_CHARACTERS,
}
Tags = Annotated[tuple[str, ...], Kind(_read_tags, {**_list_of(_TAG_SCHEMA), "uniqueItems": True})]
References = Annotated[tuple[str, ...], Kind(_read_references, _list_of(_URL_SCHEMA))]


@dataclass(frozen=True)
class SourceForm:
    """The origin of a rule that was written elsewhere.

    format: The format of the original, such as sigma.
    id: The original's id there.
    author: Who wrote the original.
    license: The license under which it may be used.
    url: Where the original is found.
    fidelity: How well this rule says what the original says.
    """

    format: kinds.Text = key("", "sigma")
    id: kinds.Text = key("", "5d0c7e4a-9b1f-4f6e-8a57-2d1c3b4e5f60")
    author: kinds.Text = key("", "A. Analyst")
    license: kinds.Text = key("", "DRL-1.1")
    url: Annotated[str, Kind(_read_url, _URL_SCHEMA)] = key("", "https://example.org/rules/1234")
    fidelity: kinds.Text = key("", "exact")


def _read_source(value: Any, reading: Reading) -> SourceForm:
    if not isinstance(value, Mapping):
        raise ValueError(f"must be a mapping, such as {{format: sigma, author: A. Analyst}}, got {quote_value(value)}")
    form, problems = read_form(SourceForm, value, reading)
    return settle(form, problems)


Source = Annotated[SourceForm, Kind(_read_source, make_schema(SourceForm))]
