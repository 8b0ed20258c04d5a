"""The work of a running stream between its batches: changes of rules and lists, warm-up of versions, quarantine.

This package must not know how the query is planned.
"""
