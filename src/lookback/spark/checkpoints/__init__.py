"""What a stream keeps in its checkpoint beside Spark's own files: its plan, histories of rules, and lists.

This package must not know what a batch does with it.
"""
