"""The files of a stream's checkpoint beside Spark's own: its plan, histories of rules, and lists.

This package must not know what a batch does with it.
"""
