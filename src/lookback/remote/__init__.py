"""Starts, stops and checks the jobs that the bundle has deployed to a Databricks workspace, and reads their stream's health.

The Databricks CLI says which jobs a bundle has, the SDK asks the workspace about them. Neither Spark nor tables are used.
"""
