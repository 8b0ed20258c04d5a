"""The words of a query: PySpark's, which DuckDB understands too where no JVM runs.

A query is written once, as PySpark has it. On a session of Spark, Spark runs it. On a `frames.Session` the same lines build SQL of
DuckDB, which answers in milliseconds from files on this machine. This package knows nothing of tables.
"""
