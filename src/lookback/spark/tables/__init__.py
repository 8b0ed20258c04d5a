"""The Delta tables of a place: their columns, how they are made, read, locked, and what their histories hold.

It must not know what rows mean to a rule.
"""
