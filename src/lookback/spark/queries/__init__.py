"""A subset of PySpark's API that also runs on DuckDB, without a JVM.

A query is written once, in PySpark's API. On a Spark session, Spark runs it. On a `frames.Session` the same code builds
SQL for DuckDB, which answers from local files in milliseconds. This package knows nothing of tables.
"""
