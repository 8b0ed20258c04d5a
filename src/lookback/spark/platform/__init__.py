"""The platform below the tables: the Spark session, JARs, secrets, owners of files, and remedies for Spark's failures.

This package must not know tables or streams.
"""
