"""Aggregates the rows of a key: adds, merges and removes rows, and aggregates the rows in a time range.

This package must not know about rules or about where rows are stored.
"""
