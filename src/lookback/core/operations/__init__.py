"""Decides whether a stream is healthy, and who receives an alert.

It must not know how rules are judged.
"""
