"""A stream's declaration, its events as they arrive, and the rows that Lookback writes about them.

It must not know rules.
"""
