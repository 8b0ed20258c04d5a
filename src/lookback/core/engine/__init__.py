"""Evaluates batches of events and rule changes with all rules, in order, and stops rules that fail.

This package must not know where events come from or where alerts go.
"""
