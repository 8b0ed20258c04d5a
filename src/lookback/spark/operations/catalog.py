"""Sets up a deployment: schema, volumes, grants, views, and tables with their comments, layout and keys.

It changes only what is missing or different. Run it again after an upgrade, since a release may have new comments or
grants.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.errors import PySparkException

from lookback.core.errors import SetupError
from lookback.core.values.texts import summarize_error
from lookback.questions import VIEWS, write_view
from lookback.spark.operations.grants import Grant, Grantees, TablePlace, list_grants
from lookback.spark.tables.schemas import COMMENTS, KEYS, PRODUCT_TABLES, describe_events_table, make_events_schema
from lookback.spark.tables.sqltexts import quote_name, quote_text

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from lookback.core.streams.declaration import Stream
    from lookback.spark.tables.lakehouse import Tables

AS_IT_SHOULD_BE = "as it should be"
REFUSED = "refused: "
RunStatement = Callable[[str], Sequence[Mapping[str, Any]]]
_VOLUME = re.compile(r"/Volumes/([^/]+)/([^/]+)/([^/]+)(?:/.*)?")
_VOLUMES = {
    "checkpoints": "Checkpoints of evaluations; only the jobs read and write them",
    "landing": "Files of events to be ingested",
}


@dataclass(frozen=True)
class SetUpStep:
    """The result for one thing.

    Attributes:
        thing: The thing, such as a table.
        done: `as it should be`, the changes, or `refused` and the reason.
        to_do: The statement that somebody with more privileges must run; empty if nothing is left to do.
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
    roles: Grantees | None = None,
    unity: RunStatement | None = None,
) -> list[SetUpStep]:
    """Creates the missing parts of a deployment, and returns a step for each part.

    It always creates the tables of the product and of the streams, with comments. In a catalog, it also sets up the
    schema, the file layout and the views that answer questions; in Unity Catalog also volumes, primary keys (not
    enforced) and grants. A grant that the caller may not give becomes a step with `to_do`. A table that another program
    writes is left unchanged; if it is missing or does not fit, its step is `refused` and gives the reason.

    Args:
        tables: The tables of the deployment.
        streams: The declared streams by name.
        checkpoints: The folder of the checkpoints. Its volume is created if it is in the tables' schema.
        landing: The folder of arriving files; the same holds for its volume.
        roles: The principals that get grants.
        unity: Runs the statements of Unity Catalog; by default the session, if the tables are in Unity Catalog.

    Raises:
        SetupError: If a table that Lookback writes does not fit its stream's declaration.
    """
    if unity is None and tables.is_unity:

        def unity(statement: str) -> Sequence[Mapping[str, Any]]:
            return [row.asDict() for row in tables.spark.sql(statement).collect()]

    return _Setup(tables.holding(*streams.values()), streams, unity).run(checkpoints, landing, roles or Grantees())


@dataclass(frozen=True)
class _Table:
    """The desired state of a table. `key` has the columns that identify a row; only events tables have `event_time`."""

    name: str
    schema: StructType
    comment: str
    key: tuple[str, ...] = ()
    event_time: str | None = None


class _Setup:
    def __init__(self, tables: Tables, streams: Mapping[str, Stream], unity: RunStatement | None) -> None:
        self._tables, self._streams, self._unity = tables, streams, unity
        self._own = {name: stream for name, stream in streams.items() if not stream.table}

    def run(self, checkpoints: str, landing: str, roles: Grantees) -> list[SetUpStep]:
        steps: list[SetUpStep] = []
        if self._tables.root is None:
            steps.append(self._create_schema())
        self._tables.require_conditional_writes()
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
        if self._tables.root is None:
            steps += map(self._update_view, VIEWS)
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
        return SetUpStep(thing, "written by another program, left unchanged")

    def _create_schema(self) -> SetUpStep:
        name = f"{quote_name(str(self._tables.catalog_name))}.{quote_name(str(self._tables.schema_name))}"
        # CREATE SCHEMA needs a privilege that the caller may lack, even if the schema exists.
        if self._tables.spark.catalog.databaseExists(name):
            return SetUpStep(f"schema {name}", AS_IT_SHOULD_BE)
        comment = quote_text("Lookback: events, rules, alerts and their reviews")
        self._tables.spark.sql(f"CREATE SCHEMA IF NOT EXISTS {name} COMMENT {comment}")
        return SetUpStep(f"schema {name}", "created")

    def _is_own(self, volume: Volume) -> bool:
        return (volume.catalog, volume.schema) == (self._tables.catalog_name, self._tables.schema_name)

    def _create_volume(self, volume: Volume, use: str, unity: RunStatement) -> SetUpStep:
        thing = f"volume {volume.identifier}"
        if not self._is_own(volume):
            return SetUpStep(thing, "in another schema, left unchanged")
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

    def _update_view(self, name: str) -> SetUpStep:
        """Creates the view that answers a question, or changes it if the question has changed."""
        place, text = self._tables.identifier(name), write_view(name, self._tables.identifier)
        before = ""
        if self._tables.exists(name):
            rows = self._tables.spark.sql(f"DESCRIBE TABLE EXTENDED {place}").collect()
            before = next((row["data_type"] for row in rows if row["col_name"] == "View Text"), "")
        if before == text:
            return SetUpStep(f"view {place}", AS_IT_SHOULD_BE)
        if self._tables.is_open_unity:
            # It refuses OR REPLACE. Elsewhere that keeps the grants on the view.
            self._tables.spark.sql(f"DROP VIEW IF EXISTS {place}")
            self._tables.spark.sql(f"CREATE VIEW {place} AS {text}")
        else:
            self._tables.spark.sql(f"CREATE OR REPLACE VIEW {place} AS {text}")
        return SetUpStep(f"view {place}", "changed" if before else "created")

    def _set_comments(self, table: _Table, detail: Mapping[str, Any]) -> list[str]:
        name, done = self._tables.identifier(table.name), []
        before = {field.name: field.metadata.get("comment") for field in self._tables.read(table.name).schema}
        after = {field.name: field.metadata["comment"] for field in table.schema if field.name in before}
        changed = {column: comment for column, comment in after.items() if before[column] != comment}
        if changed:
            columns = ", ".join(
                f"{quote_name(column)} COMMENT {quote_text(comment)}" for column, comment in changed.items()
            )
            # A single statement makes a single commit.
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
        catalog = quote_name(str(self._tables.catalog_name))
        keys = self._unity(
            f"SELECT constraint_name FROM {catalog}.information_schema.table_constraints "
            f"WHERE table_schema = {schema} AND table_name = {name} AND constraint_type = 'PRIMARY KEY'"
        )
        if keys:
            return []
        columns = ", ".join(map(quote_name, table.key))
        # Without RELY, because writers of events may repeat an id, so queries must not rely on the key.
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
