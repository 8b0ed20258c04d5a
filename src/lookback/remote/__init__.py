"""Reaches a Databricks workspace and its SQL warehouses, without Spark."""
