"""Aggregates over the rows of a key: adds, merges and removes rows, and aggregates those in ranges of times.

This package must not know rules, nor where rows are stored.
"""
