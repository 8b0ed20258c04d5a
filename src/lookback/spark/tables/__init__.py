"""The Delta tables of a place: columns, creation, reading and writing, locks, and histories.

This package must not know what rows mean to a rule.
"""
