"""SQL expressions over columns: read from text, checked against types, compiled and evaluated as Spark evaluates them.

It must not know rules, state or streams.
"""
