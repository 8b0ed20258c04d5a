"""Lookback's files in a stream's checkpoint, beside Spark's: the plan, histories of rules, and lists.

This package must not know what a batch does with them.
"""
