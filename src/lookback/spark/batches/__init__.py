"""The path of a batch: events are dispatched to shards and evaluated there, and the answers become rows of tables.

This package must not know when a batch runs, or why.
"""
