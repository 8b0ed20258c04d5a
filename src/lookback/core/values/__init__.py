"""The basic values of the engine: types, columns, keys, durations, times, windows, limits and pages.

This package must not know rules, expressions or streams.
"""
