"""The work of a running stream between its batches: changes of rules and lists, versions that warm up, quarantine.

This package must not know how the query is planned.
"""
