"""Sets a place up: schema, volumes, tables with their comments, layout and keys, and grants.

A second run changes nothing that is as it should be. RunStatement it again after an upgrade, as a release may have new comments
or grants.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.errors import PySparkException

from lookback.core.errors import SetupError
from lookback.core.values.texts import summarize_error
from lookback.spark.operations.grants import Grant, Roles, TablePlace, list_grants
from lookback.spark.tables.lakehouse import quote_name, quote_text
from lookback.spark.tables.schemas import COMMENTS, KEYS, PRODUCT_TABLES, describe_events_table, make_events_schema

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from lookback.core.streams.declaration import Stream
    from lookback.spark.tables.lakehouse import Tables

AS_IT_SHOULD_BE = "as it should be"
REFUSED = "refused: "
RunStatement = Callable[[str], Sequence[Mapping[str, Any]]]
_VOLUME = re.compile(r"/Volumes/([^/]+)/([^/]+)/([^/]+)(?:/.*)?")
_VOLUMES = {
    "checkpoints": "Checkpoints of evaluations; nobody but the jobs reads or writes them",
    "landing": "Files of events on their way in",
}


@dataclass(frozen=True)
class SetUpStep:
    """The result for one thing. done: `as it should be`, the changes, or `refused` and why.

    to_do: the statement that somebody with more rights must run; empty if nothing is left.
    """

    thing: str
    done: str
    to_do: str = ""


@dataclass(frozen=True)
class Volume:
    """A volume of Unity Catalog by its three names."""

    catalog: str
    schema: str
    name: str

    @classmethod
    def from_path(cls, path: str) -> Volume | None:
        """Returns the volume of a path, /Volumes/catalog/schema/volume/...; None for a path outside volumes."""
        match = _VOLUME.fullmatch(path)
        return None if match is None else cls(*match.groups())

    @property
    def identifier(self) -> str:
        """The volume's name in SQL."""
        return ".".join(map(quote_name, (self.catalog, self.schema, self.name)))


def set_up(
    tables: Tables,
    streams: Mapping[str, Stream],
    *,
    checkpoints: str = "",
    landing: str = "",
    roles: Roles | None = None,
    unity: RunStatement | None = None,
) -> list[SetUpStep]:
    """Creates the missing parts of a place, and returns a step for each part.

    Everywhere: the product's tables and those of the streams, and comments.
    In a catalog: the schema, and the layout of files. In Unity Catalog: the volumes of the folders `checkpoints` and
    `landing` (if they are of the same schema), primary keys, which nothing enforces, and the grants of `roles`. A grant
    that the caller has no right to give is a step with `to_do`.
    unity: runs the statements of Unity Catalog; by default the session, if the tables are there.
    A table that others write is left as it is; if it is missing or does not fit, its step is `refused` and says why.
    Raises SetupError if a table of Lookback's own does not fit its stream's declaration.
    """
    if unity is None and tables.is_unity:

        def unity(statement: str) -> Sequence[Mapping[str, Any]]:
            return [row.asDict() for row in tables.spark.sql(statement).collect()]

    return _Setup(tables.holding(*streams.values()), streams, unity).run(checkpoints, landing, roles or Roles())


@dataclass(frozen=True)
class _Table:
    """A table as it should be. key: the columns that identify a row, if any. event_time: that of an events table."""

    name: str
    schema: StructType
    comment: str
    key: tuple[str, ...] = ()
    event_time: str | None = None


class _Setup:
    def __init__(self, tables: Tables, streams: Mapping[str, Stream], unity: RunStatement | None) -> None:
        self._tables, self._streams, self._unity = tables, streams, unity
        self._own = {name: stream for name, stream in streams.items() if not stream.table}

    def run(self, checkpoints: str, landing: str, roles: Roles) -> list[SetUpStep]:
        steps: list[SetUpStep] = []
        if self._tables.root is None:
            steps.append(self._create_schema())
        volumes = {use: Volume.from_path(path) for use, path in (("checkpoints", checkpoints), ("landing", landing))}
        if self._unity is not None:
            steps += [
                self._create_volume(volume, use, self._unity) for use, volume in volumes.items() if volume is not None
            ]
        existing = {table.name for table in self._list_tables() if self._tables.exists(table.name)}
        for stream in self._own.values():
            self._tables.create(stream)
        steps += [self._check_foreign_table(stream) for stream in self._streams.values() if stream.table]
        steps += [self._update_table(table, table.name not in existing) for table in self._list_tables()]
        if self._unity is not None:
            own = {use: volume.name for use, volume in volumes.items() if volume is not None and self._is_own(volume)}
            place = TablePlace(str(self._tables.catalog_name), str(self._tables.schema_name), **own)
            steps += [self._grant(grant, self._unity) for grant in list_grants(place, roles, list(self._own))]
        return steps

    def _list_tables(self) -> list[_Table]:
        product = [_Table(name, schema, COMMENTS[name], KEYS.get(name, ())) for name, schema in PRODUCT_TABLES.items()]
        return product + [
            _Table(
                stream.name,
                make_events_schema(stream),
                describe_events_table(stream),
                (stream.event_id,),
                stream.event_time,
            )
            for stream in self._own.values()
            if stream.name not in PRODUCT_TABLES
        ]

    def _check_foreign_table(self, stream: Stream) -> SetUpStep:
        thing = f"table {self._tables.identifier(stream.name)}"
        try:
            self._tables.create(stream)
        except SetupError as error:
            return SetUpStep(thing, f"{REFUSED}{error}")
        return SetUpStep(thing, "written by others, left as it is")

    def _create_schema(self) -> SetUpStep:
        name = f"{quote_name(str(self._tables.catalog_name))}.{quote_name(str(self._tables.schema_name))}"
        # CREATE SCHEMA takes a right that the caller may lack, even if the schema exists.
        if self._tables.spark.catalog.databaseExists(name):
            return SetUpStep(f"schema {name}", AS_IT_SHOULD_BE)
        comment = quote_text("Lookback: events, rules, alerts and what became of them")
        self._tables.spark.sql(f"CREATE SCHEMA IF NOT EXISTS {name} COMMENT {comment}")
        return SetUpStep(f"schema {name}", "created")

    def _is_own(self, volume: Volume) -> bool:
        return (volume.catalog, volume.schema) == (self._tables.catalog_name, self._tables.schema_name)

    def _create_volume(self, volume: Volume, use: str, unity: RunStatement) -> SetUpStep:
        thing = f"volume {volume.identifier}"
        if not self._is_own(volume):
            return SetUpStep(thing, "of another schema, left as it is")
        listed = unity(f"SHOW VOLUMES IN {quote_name(volume.catalog)}.{quote_name(volume.schema)}")
        if volume.name in {row["volume_name"] for row in listed}:
            return SetUpStep(thing, AS_IT_SHOULD_BE)
        unity(f"CREATE VOLUME IF NOT EXISTS {volume.identifier} COMMENT {quote_text(_VOLUMES[use])}")
        return SetUpStep(thing, "created")

    def _update_table(self, table: _Table, is_new: bool) -> SetUpStep:
        detail = self._tables.describe(table.name).asDict()
        done = ["created"] if is_new else []
        done += self._set_comments(table, detail) + self._set_clustering(table, detail) + self._add_key(table)
        return SetUpStep(f"table {self._tables.identifier(table.name)}", ", ".join(done) or AS_IT_SHOULD_BE)

    def _set_comments(self, table: _Table, detail: Mapping[str, Any]) -> list[str]:
        name, done = self._tables.identifier(table.name), []
        before = {field.name: field.metadata.get("comment") for field in self._tables.read(table.name).schema}
        after = {field.name: field.metadata["comment"] for field in table.schema if field.name in before}
        changed = {column: comment for column, comment in after.items() if before[column] != comment}
        if changed:
            columns = ", ".join(
                f"{quote_name(column)} COMMENT {quote_text(comment)}" for column, comment in changed.items()
            )
            # One statement is one commit.
            self._tables.spark.sql(f"ALTER TABLE {name} ALTER COLUMN {columns}")
            done.append(f"comments of {len(changed)} {'column' if len(changed) == 1 else 'columns'}")
        if detail["description"] != table.comment:
            self._tables.spark.sql(f"COMMENT ON TABLE {name} IS {quote_text(table.comment)}")
            done.append("its comment")
        return done

    def _set_clustering(self, table: _Table, detail: Mapping[str, Any]) -> list[str]:
        column = self._tables.choose_clustering(table.name, table.event_time)
        if column is None or detail.get("clusteringColumns"):
            return []
        self._tables.spark.sql(f"ALTER TABLE {self._tables.identifier(table.name)} CLUSTER BY ({quote_name(column)})")
        return [f"clustered by {column}"]

    def _add_key(self, table: _Table) -> list[str]:
        if self._unity is None or not table.key:
            return []
        schema, name = quote_text(str(self._tables.schema_name)), quote_text(table.name)
        keys = self._unity(
            f"SELECT constraint_name FROM {quote_name(str(self._tables.catalog_name))}.information_schema.table_constraints "
            f"WHERE table_schema = {schema} AND table_name = {name} AND constraint_type = 'PRIMARY KEY'"
        )
        if keys:
            return []
        columns = ", ".join(map(quote_name, table.key))
        # Not RELY: the writers of events may repeat an id, so queries must not rely on it.
        self._unity(
            f"ALTER TABLE {self._tables.identifier(table.name)} ADD CONSTRAINT {quote_name(f'{table.name}_pk')} PRIMARY KEY ({columns})"
        )
        return ["a primary key"]

    def _grant(self, grant: Grant, unity: RunStatement) -> SetUpStep:
        thing = f"{', '.join(grant.privileges)} on {grant.securable} to {grant.principal}"
        try:
            rows = unity(f"SHOW GRANTS {quote_name(grant.principal)} ON {grant.securable}")
            if set(grant.privileges) <= {_read_privilege(row) for row in rows}:
                return SetUpStep(thing, AS_IT_SHOULD_BE)
            unity(grant.statement)
        except PySparkException as error:
            return SetUpStep(thing, f"{REFUSED}{summarize_error(error)}", grant.statement)
        return SetUpStep(thing, "granted")


def _read_privilege(row: Mapping[str, Any]) -> str:
    """Returns the privilege in a row of SHOW GRANTS, spelled as in GRANT."""
    (privilege,) = [str(value) for name, value in row.items() if name.lower() == "actiontype"]
    return privilege.replace("_", " ").upper()
