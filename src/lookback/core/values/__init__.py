"""The values that everything above is made of: types, columns, keys, durations, times, windows, pages.

It must not know rules, expressions or streams.
"""
