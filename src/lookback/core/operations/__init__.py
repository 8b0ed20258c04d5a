"""Decides whether a stream is healthy and to whom an alert is sent.

It must not know how rules are judged.
"""
