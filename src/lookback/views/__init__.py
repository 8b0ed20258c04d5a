"""Shows results to people: tables as text and HTML, charts, and the live view of a stream.

This package must not change anything.
"""
