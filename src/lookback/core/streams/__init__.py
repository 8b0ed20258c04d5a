"""The declaration of a stream, its events in order of arrival, and the rows that Lookback writes about them.

This package must not know rules.
"""
