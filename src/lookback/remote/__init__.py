"""Reads the health of streams from the tables of a Databricks workspace, over a SQL warehouse and without Spark."""
