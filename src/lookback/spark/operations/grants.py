"""Lists the grants of each role in Unity Catalog; docs/explanation/threats.md gives the reasons."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lookback.core.streams import metrics
from lookback.questions import VIEWS
from lookback.spark.tables.sqltexts import quote_name

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
# The tables that explain an alert. Without rejected_events, which has anybody's raw rows.
_READ = ("alerts", "late_events", "rule_log", metrics.TABLE, "notifications", "ingests")
_WRITTEN = ("rules", "reviews", "labels", "snoozes", "lists")


@dataclass(frozen=True)
class Grantees:
    """The principals of the roles: account groups, and the application id of the service; empty for no grants."""

    analysts: str = ""
    engineers: str = ""
    service: str = ""


@dataclass(frozen=True)
class TablePlace:
    """The catalog and schema of the tables, and the schema's volumes of checkpoints and arriving files, if any."""

    catalog: str
    schema: str
    checkpoints: str = ""
    landing: str = ""


@dataclass(frozen=True)
class Grant:
    """A principal's privileges on a catalog, schema, table or volume.

    Attributes:
        privileges: The privileges.
        kind: CATALOG, SCHEMA, TABLE, VIEW or VOLUME.
        name: The parts of the thing's name.
        principal: The group or service.
    """

    privileges: tuple[str, ...]
    kind: str
    name: tuple[str, ...]
    principal: str

    @property
    def securable(self) -> str:
        """The thing's name in SQL, such as `TABLE main.fraud.rules`."""
        return f"{self.kind} {'.'.join(part if _PLAIN.fullmatch(part) else quote_name(part) for part in self.name)}"

    @property
    def statement(self) -> str:
        """The GRANT statement that gives the privileges."""
        return f"GRANT {', '.join(self.privileges)} ON {self.securable} TO {quote_name(self.principal)}"


def list_grants(place: TablePlace, roles: Grantees, streams: Sequence[str]) -> list[Grant]:
    """Lists the grants of all roles with a principal; `streams` has the names of the events tables."""
    return [grant for grant in _generate_grants(place, roles, streams) if grant.principal]


def _generate_grants(place: TablePlace, roles: Grantees, streams: Sequence[str]) -> Iterator[Grant]:
    catalog, schema = (place.catalog,), (place.catalog, place.schema)
    everybody = (roles.analysts, roles.engineers, roles.service)
    yield from (Grant(("USE CATALOG",), "CATALOG", catalog, role) for role in everybody)
    yield from (Grant(("USE SCHEMA",), "SCHEMA", schema, role) for role in everybody)
    # The jobs create tables and volumes and write all tables, including rules: commands of an idle stream, quarantine.
    yield Grant(("CREATE TABLE", "CREATE VOLUME"), "SCHEMA", schema, roles.service)
    yield Grant(("SELECT", "MODIFY"), "SCHEMA", schema, roles.service)
    if place.checkpoints:
        yield Grant(("READ VOLUME", "WRITE VOLUME"), "VOLUME", (*schema, place.checkpoints), roles.service)
    if place.landing:
        yield Grant(("READ VOLUME",), "VOLUME", (*schema, place.landing), roles.service)
    yield from (Grant(("SELECT", "MODIFY"), "TABLE", (*schema, name), roles.analysts) for name in _WRITTEN)
    events = [name for name in streams if name not in _READ]
    yield from (Grant(("SELECT",), "TABLE", (*schema, name), roles.analysts) for name in (*_READ, *events))
    yield from (Grant(("SELECT",), "VIEW", (*schema, name), roles.analysts) for name in VIEWS)
    yield Grant(("SELECT",), "SCHEMA", schema, roles.engineers)
    if place.checkpoints:
        yield Grant(("READ VOLUME",), "VOLUME", (*schema, place.checkpoints), roles.engineers)
