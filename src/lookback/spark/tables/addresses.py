"""Says where the tables of one place are, and its checkpoints."""

from __future__ import annotations

import getpass
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lookback.core.errors import SetupError
from lookback.places import ObjectPath, Place, find_local_path, open_place, parse_place
from lookback.spark.platform.session import is_connect, on_databricks
from lookback.spark.tables.sqltexts import quote_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import SparkSession
    from typing_extensions import Self

    from lookback.core.streams.declaration import Stream

_NAME = re.compile(r"[a-z][a-z0-9_]{0,127}", re.ASCII)
# A table of another catalog or schema, used for look-ups.
_FULL_NAME = re.compile(r"(\w[\w-]{0,254}\.){2}\w[\w-]{0,254}", re.ASCII)
# What Spark's settings call a catalog on a server of the open-source Unity Catalog.
_OPEN_UNITY = "io.unitycatalog.spark.UCSingleCatalog"
# Catalogs of a workspace outside Unity Catalog.
_LEGACY_CATALOGS = ("spark_catalog", "hive_metastore")


@dataclass(frozen=True)
class AddressedTables:
    """The tables of one place: `root` (a folder or its URL) or `catalog` and `schema`, never both.

    Table names consist of lower-case letters, digits and _. A name with two dots refers to a table of another catalog or
    schema, which you can only read.

    Attributes:
        spark: The session that runs the queries.
        root: The folder of local tables, or its URL.
        catalog_name: The catalog.
        schema_name: The schema in the catalog.
        elsewhere: Streams whose events are in external tables, by name; see `holding`.
        volume: The folder for the checkpoints of a catalog's tables; see `files`.
    """

    spark: SparkSession
    root: str | None = None
    catalog_name: str | None = None
    schema_name: str | None = None
    elsewhere: Mapping[str, Stream] = field(default_factory=dict, hash=False)
    volume: str | None = None

    @classmethod
    def local(cls, spark: SparkSession, root: str | Path) -> Self:
        """Returns tables in the Delta folders ROOT/<table>. `root` is a path or a URI; see `parse_place`."""
        return cls(spark, root=str(parse_place(root)))

    @classmethod
    def catalog(cls, spark: SparkSession, catalog: str, schema: str, volume: str | None = None) -> Self:
        """Returns tables named catalog.schema.table. The schema must exist. `volume` is a folder in a volume."""
        folder = None if volume is None else volume.rstrip("/")
        return cls(spark, catalog_name=catalog, schema_name=schema, volume=folder)

    @property
    def place(self) -> str:
        """The place, for display: catalog.schema, or the folder."""
        return str(self.root) if self.root is not None else f"{self.catalog_name}.{self.schema_name}"

    @property
    def files(self) -> str:
        """The folder of checkpoints and locks: the root, or for a catalog the volume.

        Raises SetupError if there is none, or this machine cannot reach it.
        """
        if self.root is not None:
            return self.root
        if self.volume is None:
            raise SetupError("tables of a catalog need a checkpoint folder: give one in a volume, /Volumes/...")
        if self.is_open_unity and self.volume.startswith("/Volumes/"):
            raise SetupError(
                "Spark reaches no volumes of the open-source Unity Catalog: give root, a folder or a bucket such as "
                "s3a://bucket/fraud, for checkpoints and the files of the tables"
            )
        if self.is_unity and not self.volume.startswith(("/", "dbfs:")) and "://" not in self.volume:
            raise SetupError(
                f"root must be the volume for checkpoints, such as /Volumes/main/fraud/checkpoints, got {self.volume!r}"
            )
        if self.volume.startswith("/Volumes/") and not self.reaches_files:
            raise SetupError(
                f"{self.volume} is not on this machine: run this as a job, or in a notebook or terminal of the "
                "workspace"
            )
        return str(parse_place(self.volume))

    def choose_checkpoint(self, step: str, stream: Stream) -> str:
        """Returns the default checkpoint folder of a step for a stream. Raises SetupError as `files` does."""
        return f"{self.files}/_checkpoints/{step}_{stream.name}"

    def find_place(self, folder: str | Place) -> Place:
        """Opens a folder, such as a checkpoint, to read and write its files."""
        return open_place(folder, self.spark)

    @property
    def reaches_files(self) -> bool:
        """Whether this machine can reach the checkpoints. Those in a volume need the workspace's /Volumes."""
        return not (self.volume or "").startswith("/Volumes/") or Path("/Volumes").is_dir()

    @property
    def current_user(self) -> str:
        """The user of the workspace, or on a local machine the user of the operating system."""
        if on_databricks() or is_connect(self.spark):
            (row,) = self.spark.sql("SELECT current_user() AS name").collect()
            return str(row["name"])
        return getpass.getuser()

    @property
    def is_unity(self) -> bool:
        """Whether the tables are in Unity Catalog on Databricks, which has volumes, keys and grants."""
        is_named = self.catalog_name is not None and self.catalog_name not in _LEGACY_CATALOGS
        return is_named and not self.is_open_unity

    @property
    def is_open_unity(self) -> bool:
        """Whether the tables are in the open-source Unity Catalog, of which Spark's connector reaches tables and views."""
        if self.catalog_name is None or on_databricks() or is_connect(self.spark):
            return False
        return self.spark.conf.get(f"spark.sql.catalog.{self.catalog_name}", None) == _OPEN_UNITY

    def holding(self, *streams: Stream) -> Self:
        """Returns these tables, with events read from the external tables that the streams declare."""
        elsewhere = {stream.name: stream for stream in streams if stream.table}
        return replace(self, elsewhere={**self.elsewhere, **elsewhere}) if elsewhere else self

    def is_place(self, name: str) -> bool:
        """Returns whether the table is addressed by its path, not by its name in a catalog."""
        stream = self.elsewhere.get(name)
        if stream is not None:
            return stream.has_table_path
        return self.root is not None and not _FULL_NAME.fullmatch(name)

    def identifier(self, name: str) -> str:
        """Returns the quoted SQL name of a table: delta.`<root>/rules` or `catalog`.`schema`.`rules`."""
        if self.is_place(name):
            return f"delta.{quote_name(self.path_or_name(name))}"
        return self.path_or_name(name)

    def path_or_name(self, name: str) -> str:
        """Returns the folder of a local table, or the quoted three-part name of a table in a catalog.

        `name` is a table of this place, or catalog.schema.table for any other. Raises SetupError if it is not a table
        name.
        """
        if _FULL_NAME.fullmatch(name):
            return ".".join(map(quote_name, name.split(".")))
        if not _NAME.fullmatch(name):
            raise SetupError(f"{name!r} is not a table name; use lower-case letters, digits and _")
        if name in self.elsewhere:
            table = self.elsewhere[name].table
            return str(parse_place(table)) if self.is_place(name) else ".".join(map(quote_name, table.split(".")))
        if self.root is not None:
            return f"{self.root}/{name}"
        return f"{quote_name(str(self.catalog_name))}.{quote_name(str(self.schema_name))}.{quote_name(name)}"

    def local_folder(self, name: str) -> Path | None:
        """Returns the folder of a table on this machine; None if it is not here."""
        return find_local_path(self.path_or_name(name)) if self.is_place(name) else None

    def find_log_place(self, name: str) -> Place | None:
        """Returns what `log_folder` does, or the table's place in S3, which Arrow reads with Spark's settings."""
        if not self.is_place(name) or self.local_folder(name) is not None:
            return self.log_folder(name)
        place = self.find_place(self.path_or_name(name))
        is_read = isinstance(place, ObjectPath) and place.scheme == "s3a"
        return place if is_read and not on_databricks() and not is_connect(self.spark) else None

    def log_folder(self, name: str) -> Path | None:
        """Returns the folder of a table if this process can read its log itself; None on Databricks and if remote."""
        return None if on_databricks() else self.local_folder(name)
