"""The way of a batch: events are dispatched to shards, shards judge them, and their answers become rows of tables.

This package must not know when a batch runs, or why.
"""
