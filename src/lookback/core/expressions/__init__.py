"""SQL expressions over columns: parses, type-checks and compiles them, and evaluates them as Spark does.

This package must not know rules, state or streams.
"""
