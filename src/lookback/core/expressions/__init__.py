"""Parses, type-checks and compiles SQL expressions over columns, and evaluates them as Spark does.

This package must not know rules, state or streams.
"""
