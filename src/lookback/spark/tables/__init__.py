"""The Delta tables of a place: their columns, their creation, reading and writing, locks, and histories.

This package must not know what rows mean to a rule.
"""
