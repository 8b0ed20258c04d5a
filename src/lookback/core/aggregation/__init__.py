"""Aggregates over the rows of a key: how rows are added, merged, taken away, and asked for a range of times.

It must not know rules or where rows are kept.
"""
